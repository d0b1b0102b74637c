"""Receipt and rates of one real run: it is as good as itself, and copies whose receipts were altered are told apart from it."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from pages import curves_of

from jaxtrain.receipt import ReceiptError
from jaxtrain.receipt import __main__ as command
from jaxtrain.receipt.compare import compare, differences
from jaxtrain.receipt.golden import check, kept, passed
from jaxtrain.receipt.opened import open_run
from jaxtrain.receipt.result import GROUPS
from jaxtrain.receipt.source import PATCH_MOST, own_files, source
from jaxtrain.report import page
from jaxtrain.report.run import read


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run long enough for a speed, on this process's devices."""
    folder = tmp_path_factory.mktemp("golden")
    (folder / "small.py").write_text(runs.SMALL)
    run = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "log__peak_tflops": 0.1, "model__num_layers": 1}
    assert runs.train(folder / "small.py", folder / "run", data__source="synthetic", train__steps=20, **run) == 0
    told = runs.receipt(folder / "run")
    told["source"] |= {"patch": "", "patch_cut": 0, "dirty": False}  # the checkout under test may have changes
    (folder / "run" / "receipt.json").write_text(json.dumps(told))
    return folder / "run"


def altered_run(
    trained: Path, folder: Path, change: Callable[[dict[str, Any]], None] = lambda told: None, **fields: Any
) -> Path:
    """A copy of the run whose receipt says something else."""
    shutil.copytree(trained, folder)
    told = runs.receipt(trained) | fields
    change(told)
    (folder / "receipt.json").write_text(json.dumps(told))
    return folder


def read_from(saved_by: str, **changes: Any) -> dict[str, Any]:
    """`loaded` of an attempt that went on from a checkpoint."""
    return {"from": "/other/checkpoints", "step": 10, "saved_by": saved_by, "digest": "d" * 64, **changes}


def in_two_attempts(trained: Path, folder: Path, newest: dict[str, Any] | None = None, **first: Any) -> Path:
    """A copy of the run whose receipt has one attempt more, before it, of which some fields are others."""
    early = {name: value for name, value in runs.receipt(trained).items() if name != "attempts"}
    fields = {"attempt": 2, "attempts": [{**early, "id": "early", **first}], "loaded": read_from("early")} | (newest or {})
    return altered_run(trained, folder, **fields)


def test_a_receipt_says_which_source_ran(trained: Path, tmp_path: Path) -> None:
    found = runs.receipt(trained)["source"]
    assert found["config_file"] == "small.py" and "jaxtrain/train/run.py" in found["files"] and len(found["files"]) > 100
    import helpers

    assert own_files({"model": {"family": "not_there:Family"}, "data": {"source": "metrics:x, gs://b/c", "lr": 1.0}}) == []
    parts = own_files({"model": {"family": "helpers:WiderFamily"}})
    assert parts == [Path(helpers.__file__)]
    (tmp_path / "mine.py").write_text("x = 1\n")
    found = source(runs.REPO / "jaxtrain", tmp_path / "mine.py", parts)
    assert (found["config_file"], found["own"]) == ("mine.py", ["tests/helpers.py"])  # no folder of a user's is told
    assert {"mine.py", "tests/helpers.py", "jaxtrain/__init__.py"} <= found["files"].keys()
    assert len(found["patch"]) <= PATCH_MOST


def test_rates_are_the_same_on_the_page_and_in_tensorboard(trained: Path) -> None:
    """Those that metrics.jsonl has, to the last digit."""
    shown = curves_of(page.html([read(trained)]))
    lines = {x["step"]: x for x in runs.lines(trained)}
    rates = {step: x["tokens_per_s_per_device"] for step, x in lines.items()}
    assert shown["tokens/s/device"] == rates and len([rate for rate in rates.values() if rate]) > 10
    assert shown["MFU causal"] == {step: x["mfu_causal"] and 100.0 * x["mfu_causal"] for step, x in lines.items()}
    events = {step: values for step, _, values in runs.events(trained / "tb")[0] if "train/loss" in values}
    assert {step: values.get("train/tokens_per_s_per_device") for step, values in events.items()} == {
        step: rate and np.float32(rate) for step, rate in rates.items()
    }


# ---- A golden run


def test_a_run_is_as_good_as_itself(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = str(tmp_path / "golden.json")
    assert command.main(["check", str(trained), f"--save={golden}"]) == 0
    assert command.main(["check", str(trained), golden]) == 0
    said = capsys.readouterr().out
    assert "bit for bit" in said and "every file as it was written" in said and "as the golden run" in said
    assert "verified, not restored" in " ".join(said.split())
    text = Path(golden).read_text()
    assert str(trained.parent) not in text and "name" not in json.loads(text)["host"]
    assert command.main(["show", golden]) == 0
    assert capsys.readouterr().out.startswith(f"golden.json: golden receipt of run, {runs.receipt(trained)['started']} to 2")
    assert command.main(["check", str(trained), golden, "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert verdicts["passed"] and [v["state"] for v in verdicts["checks"]] == ["ok", "ok", "not compared", "ok", "ok"]
    assert json.loads((trained / "golden.json").read_text()) == verdicts
    assert command.main(["show", str(trained)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"as good as golden.json, checked {verdicts['time']} at step 20" in said and "restore not tested" in said


def test_a_golden_receipt_is_not_written_over_by_a_verdict(trained: Path, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    golden = copy / "golden.json"
    assert command.main(["check", str(copy), f"--save={golden}"]) == 0
    kept_text = golden.read_text()
    assert command.main(["check", str(copy), str(golden)]) == 0
    assert golden.read_text() == kept_text and "the verdict was not kept" in capsys.readouterr().err
    assert open_run(copy).checked is None


def altered(trained: Path, tmp_path: Path, change: Any, **limits: Any) -> list[tuple[str, str]]:
    """Verdicts on the run, by a golden receipt that `change` has been at."""
    golden = kept(open_run(trained))
    change(golden)
    (tmp_path / "golden.json").write_text(json.dumps(golden))
    found = check(open_run(trained), open_run(tmp_path / "golden.json"), **limits)
    assert passed(found) == (not any(v.state == "WORSE" for v in found) and found[0].state == "ok")
    return [(v.state, v.rule) for v in found]


def test_the_last_bit_of_a_loss_counts_on_the_same_machine(trained: Path, tmp_path: Path) -> None:
    def change(golden: dict[str, Any]) -> None:
        golden["loss_at"]["10"] = math.nextafter(golden["loss_at"]["10"], 9)

    state, rule = altered(trained, tmp_path, change)[0]
    assert state == "WORSE" and rule.endswith("differs from 10 on")
    assert altered(trained, tmp_path, change, loss_tolerance=0.1)[0][0] == "ok"

    def elsewhere(golden: dict[str, Any]) -> None:
        change(golden)
        golden["devices"]["kind"] = ["another"]

    (state, rule), (speed, why), *_ = altered(trained, tmp_path, elsewhere)
    assert state == "ok" and rule.startswith("within 1%") and "other hardware devices" in rule
    assert speed == "not compared" and why == "other hardware devices"


@pytest.mark.parametrize("loss", ["nan", 1e9, 0.0])
def test_a_loss_far_off_is_worse_on_any_machine(trained: Path, tmp_path: Path, loss: Any) -> None:
    def change(golden: dict[str, Any]) -> None:
        golden["loss_at"]["10"], golden["packages"]["jax"] = loss, "0.1"

    assert altered(trained, tmp_path, change)[0][0] == "WORSE"


def test_slower_and_more_memory(trained: Path, tmp_path: Path) -> None:
    def change(golden: dict[str, Any]) -> None:
        golden["speed"]["step_time_s"]["median"] /= 1.5
        golden["memory"]["compiler_peak_gib"] = 0.5

    copy = altered_run(trained, tmp_path / "run", lambda told: told["memory"].update(compiler_peak_gib=0.505))
    assert [state for state, _ in altered(copy, tmp_path, change)[1:3]] == ["WORSE", "ok"]
    assert [state for state, _ in altered(copy, tmp_path, change, slower=60, more_memory=0.5)[1:3]] == ["ok", "WORSE"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_gpus_repeat_their_bits_where_they_are_told_to(trained: Path, tmp_path: Path, deterministic: bool) -> None:
    def change(told: dict[str, Any]) -> None:
        told["devices"]["platform"] = ["gpu"]
        told["resolved"]["train"]["deterministic"] = deterministic

    rule = altered(altered_run(trained, tmp_path / "run", change), tmp_path, lambda golden: None)[0][1]
    assert rule.startswith("bit for bit" if deterministic else "within 1%")


@pytest.mark.parametrize(
    ("section", "values", "state", "rule"),
    [
        ("optimizer", {"lr": 1.0}, "not compared", "another computation: config optimizer.lr"),
        ("remat", {"policy": "full"}, "ok", "within 1%"),
        ("eval", {"sequences": 7}, "ok", "bit for bit"),
        # A key that is newer than the golden receipt has its default; the learning rate here is not the default.
        ("optimizer", {"clip_norm": None}, "ok", "bit for bit"),
        ("optimizer", {"lr": None}, "not compared", "another computation: config optimizer.lr"),
    ],
)
def test_another_computation_proves_nothing(trained: Path, tmp_path: Path, section, values, state, rule) -> None:
    def change(golden: dict[str, Any]) -> None:
        mine = golden["resolved"][section]
        golden["resolved"][section] = {k: values.get(k, v) for k, v in mine.items() if values.get(k, v) is not None}

    found = altered(trained, tmp_path, change)[0]
    assert found[0] == state and found[1].startswith(rule)


def test_an_earlier_attempt_with_another_config_proves_nothing(trained: Path, tmp_path: Path) -> None:
    resolved = runs.receipt(trained)["resolved"]
    mixed = in_two_attempts(trained, tmp_path / "mixed", resolved=resolved | {"optimizer": resolved["optimizer"] | {"lr": 0.9}})
    found = check(open_run(mixed), open_run(trained))
    assert (found[0].state, found[0].rule) == ("not compared", "another computation: config optimizer.lr (in earlier attempts)")
    assert not passed(found)
    with pytest.raises(ReceiptError, match="its attempts ran with other config optimizer.lr"):
        kept(open_run(mixed))
    alike = in_two_attempts(trained, tmp_path / "alike")
    assert passed(check(open_run(alike), open_run(trained))) and kept(open_run(alike))["loaded"] is None


def test_a_state_that_came_from_elsewhere_proves_nothing(trained: Path, tmp_path: Path) -> None:
    folder = in_two_attempts(trained, tmp_path / "run", loaded=read_from("of another run"))
    found = check(open_run(folder), open_run(trained))[0]
    assert (found.state, found.rule) == ("not compared", "another computation: data first state")
    golden = kept(open_run(folder))
    assert golden["loaded"] == read_from("of another run") | {"from": None}
    (tmp_path / "golden.json").write_text(json.dumps(golden))
    assert passed(check(open_run(folder), open_run(tmp_path / "golden.json")))


@pytest.mark.parametrize("code", [130, 1, None])
def test_half_a_run_proves_nothing_and_is_no_golden_one(trained: Path, tmp_path: Path, capsys, code: int | None) -> None:
    half = altered_run(trained, tmp_path / "half", exit_code=code, reason="left early")
    for one, other in ((half, trained), (trained, half)):
        assert command.main(["check", str(one), str(other)]) == 1
        assert "not proved: not both runs ended with 0" in capsys.readouterr().out
    golden = tmp_path / "saved.json"
    assert command.main(["check", str(half), f"--save={golden}"]) == 2
    assert "it has not ended with 0" in capsys.readouterr().err and not golden.exists()


def test_held_out_losses_are_held_to_the_golden_ones(trained: Path, tmp_path: Path) -> None:
    def evaluated(name: str, loss: float | None, **fields: Any) -> Path:
        return altered_run(trained, tmp_path / name, held_out=[{"step": 20, "set": "web", "loss": loss}], **fields)

    golden = tmp_path / "golden.json"
    golden.write_text(json.dumps(kept(open_run(evaluated("first", 3.25)))))

    def found(folder: Path) -> tuple[bool, list[str]]:
        verdicts = check(open_run(folder), open_run(golden))
        return passed(verdicts), [v.state for v in verdicts if v.name == "held-out loss web"]

    assert found(tmp_path / "first") == (True, ["ok"])
    assert found(evaluated("off", math.nextafter(3.25, 9))) == (False, ["WORSE"])
    assert found(evaluated("nan", None)) == (False, ["WORSE"])
    assert found(trained) == (True, ["not compared"])
    resolved = runs.receipt(trained)["resolved"]
    shorter = resolved | {"eval": resolved["eval"] | {"sequences": 1}}
    assert found(evaluated("other", 4.0, resolved=shorter)) == (True, ["not compared"])


def test_a_throttled_gpu_is_slow_and_not_wrong(trained: Path, tmp_path: Path) -> None:
    hot = altered_run(trained, tmp_path / "run", throttled=[{"gpu": 3, "share": 0.4, "reasons": "hw_thermal"}])
    loss, speed, *_ = check(open_run(hot), open_run(trained))
    assert loss.rule.startswith("bit for bit") and loss.state == "ok"
    assert (speed.state, speed.rule) == ("not compared", "other hardware GPU 3: throttled by")


def test_a_damaged_checkpoint_is_found(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    largest = max((p for p in (copy / "checkpoints" / "20").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    last = check(open_run(copy), open_run(trained))[-1]
    assert last.state == "WORSE" and "its contents were changed" in last.rule
    shutil.rmtree(copy / "checkpoints")
    assert check(open_run(copy), open_run(trained))[-1].state == "not compared"


# ---- The commands show and list


def test_show_and_list_of_a_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", str(trained)]) == 0
    said = capsys.readouterr().out
    headings = ("What ran", "Versions", "Hardware", "Environment", "Preflight", "Speed", "Memory", "Loss", "Saves", "Goodput")
    assert all(f"\n{heading}" in said for heading in (*headings, "Attempts"))
    receipt = runs.receipt(trained)
    assert (receipt["source"]["commit"] or "not in git") in said
    assert str(receipt["loss_at"]["20"]) in said and "synthetic: made-up tokens" in said
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "receipt.json").write_text("{")
    shutil.copytree(trained, tmp_path / "killed")
    killed = {name: value for name, value in receipt.items() if name not in ("speed", "loss_at", "memory")}
    (tmp_path / "killed" / "receipt.json").write_text(json.dumps({**killed, "exit_code": None, "ended": None}))
    assert command.main(["list", str(tmp_path), str(trained)]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(rows).split())
    assert "not a receipt" in text and "no end: killed" in text and text.count(f"{receipt['loss_at']['20']:.4f}") == 2


def test_show_tells_a_resumed_attempts_own_beginning_and_the_firsts(trained: Path, tmp_path: Path, capsys) -> None:
    folder = in_two_attempts(trained, tmp_path / "run", exit_code=None, ended=None, loaded=None)
    assert command.main(["show", str(folder)]) == 0
    rows = [" ".join(row.split()) for row in capsys.readouterr().out.splitlines()]
    assert (
        f"began with step 10 of /other/checkpoints, digest {'d' * 12}" in rows
        and "attempt 1 began with made from train.seed" in rows
    )
    assert [row for row in rows if row.startswith("1 started")][0].endswith("no end: killed")
    assert any(" in 1 attempt" in row and "attempts" not in row for row in rows)


# ---- What explains nothing, and what does


def config_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())


def changed(trained: Path, path: str, value: Any, **also: Any) -> list[tuple[str, str, str, str]]:
    """What `differences` finds where one field of a receipt, by its dotted path, has another value."""
    receipt = runs.receipt(trained) | also
    other = json.loads(json.dumps(receipt))
    *folders, last = path.split(".")
    inner = other
    for name in folders:
        inner = inner.setdefault(name, {})
    inner[last] = value
    found, notes = differences(receipt, other, config_of(trained), config_of(trained))
    assert not notes
    return [(d.group, d.name, d.a, d.b) for d in found]


GPU = {
    "index": 0,
    "name": "NVIDIA H200",
    "uuid": "GPU-1",
    "pci": "0000:18:00.0",
    "power_limit_w": 700.0,
    "power_limit_default_w": 700.0,
    "max_sm_clock_mhz": 1980,
    "max_memory_clock_mhz": 3201,
    "ecc": True,
}


STATE = {"index": 0, "sm_clock_mhz": 1980, "power_w": 650.0, "throttle_reasons": "sw_power_cap", "ecc_uncorrected": 0}


MACHINE = {
    "cpu": {"model": "a CPU", "count": 192, "memory_gib": 2015.3},
    "kernel": "6.8",
    "gpus": [GPU, {**GPU, "index": 1}],
    "topology": {"nvlinks": [18, 18], "pairs": {"NVLink": 1}},
    "before": [STATE],
    "after": [STATE],
}


GATHERED = {"nodes": [{"measured": {"all_reduce_bus_gb_s": 475.0}}]}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", "x"),
        ("started", "x"),
        ("command", "x"),
        ("host.name", "x"),
        ("config", "x"),
        ("restart", 3),
        ("environment.SLURM_JOB_ID", "7"),
        ("environment.JAXTRAIN_COMMIT", "x"),
        ("environment.NCCL_DEBUG", "INFO"),
        ("env.set.XLA_CLIENT_MEM_FRACTION", "0.9"),
        ("environment.XLA_FLAGS", "--xla_force_host_platform_device_count=8"),
        ("hardware.gpus", [{**GPU, "uuid": "GPU-2", "pci": "x"}, {**GPU, "index": 1}]),
        ("hardware.after", [{**STATE, "sm_clock_mhz": 1500, "power_w": 80.0, "throttle_reasons": ""}]),
        ("hardware.after", [{**STATE, "throttle_reasons": "hw_thermal"}]),  # one look says nothing of the run
        ("throttled", [{"gpu": 0, "share": 0.1, "reasons": "hw_thermal"}]),
        ("hardware.cpu.memory_gib", 2015.4),
        ("source.commit", "x"),  # of files that are the same
        ("source.patch", "a README"),
        ("compile_s", 99.0),
        ("attention", "another kernel"),
        ("versions.jax", "told as a package"),
        ("preflight.nodes", [{"measured": {"all_reduce_bus_gb_s": 460.0}}]),
    ],
)
def test_what_explains_nothing_is_no_difference(trained: Path, path: str, value: Any) -> None:
    assert changed(trained, path, value, hardware=MACHINE, preflight=GATHERED) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("devices.count", 4, ("hardware", "devices", "8 x cpu", "4 x cpu")),
        ("devices.process_count", 2, ("hardware", "processes", "1", "2")),
        (
            "hardware.gpus",
            [GPU, {**GPU, "power_limit_w": 500.0}],
            ("hardware", "GPUs: power_limit_w", "2 x 700.0", "1 x 700.0, 1 x 500.0"),
        ),
        ("hardware.topology.pairs", {"PHB": 1}, ("hardware", "links of GPU pairs", "1 x NVLink", "1 x PHB")),
        (
            "throttled",
            [{"gpu": 0, "share": 0.2, "reasons": "hw_thermal"}],
            ("hardware", "GPU 0: throttled by", "not there", "hw_thermal"),
        ),
        (
            "hardware.after",
            [{**STATE, "ecc_uncorrected": 2}],
            ("hardware", "GPU 0: new uncorrected ECC errors", "not there", "2"),
        ),
        (
            "preflight.nodes",
            [{"measured": {"all_reduce_bus_gb_s": 475.0}}, {"measured": {"all_reduce_bus_gb_s": 311.0}}],
            ("hardware", "preflight: all_reduce_bus_gb_s", "475 GB/s", "311 GB/s"),
        ),
        ("environment.XLA_FLAGS", "--xla_a=1 --xla_b", ("environment", "XLA_FLAGS --xla_a", "not there", "1")),
        ("env.set.NCCL_PROTO", "Simple", ("environment", "NCCL_PROTO", "not there", "Simple")),
        ("versions.driver", "580.1", ("versions", "driver", "570.2", "580.1")),
        ("python", "3.13.0", ("versions", "Python", sys.version.split()[0], "3.13.0")),
        ("eval_data.code", {"split": "x", "kind": "b"}, ("data", "held out (code): kind", "a", "b")),
    ],
)
def test_what_explains_something_is_named(trained: Path, path: str, value: Any, expected: tuple[str, ...]) -> None:
    base = runs.receipt(trained)
    also = {"hardware": MACHINE, "preflight": GATHERED, "environment": {}, "env": {"set": {}, "inherited": {}}}
    also |= {"versions": base["versions"] | {"driver": "570.2"}, "eval_data": {"code": {"split": "y", "kind": "a"}}}
    found = changed(trained, path, value, **also)
    assert found[0] == expected and len(found) == (2 if "XLA_FLAGS" in path else 1)
    assert all(group in GROUPS for group, *_ in found)


def test_configs_are_compared_by_what_they_mean(trained: Path) -> None:
    receipt, config = runs.receipt(trained), config_of(trained)

    def found(section: str, values: dict[str, Any], **other: Any) -> list[tuple[str, str, str]]:
        changed = {**config, section: {**config[section], **values}}
        return [(d.name, d.a, d.b) for d in differences(receipt, receipt | other, config, changed)[0]]

    algorithm = {"env": {"set": {"NCCL_ALGO": "^NVLS"}, "inherited": {}}}
    assert found("train", {"deterministic": True}, **algorithm) == [("train.deterministic", "False", "True")]
    assert found("train", {}, **algorithm) == [("NCCL_ALGO", "not there", "^NVLS")]
    mesh = receipt["mesh"]
    assert found("mesh", {"fsdp": mesh["fsdp"], "data": mesh["data"]}) == [], "-1 written out"
    assert found("mesh", {"fsdp": 2}, mesh={**mesh, "fsdp": 2}) == [("mesh.fsdp", "-1", "2")]
    assert found("log", {"peak_tflops": 5.0, "every_steps": 9}) == [
        ("log.peak_tflops", str(config["log"]["peak_tflops"]), "5.0")
    ]
    # A key that one config lacks has its default.
    older = {**config, "optimizer": {name: value for name, value in config["optimizer"].items() if name != "beta1"}}
    assert differences(receipt, receipt, older, config) == ((), [])
    config["optimizer"]["beta1"] = 0.5
    assert [(d.name, d.a, d.b) for d in differences(receipt, receipt, older, config)[0]] == [("optimizer.beta1", "0.9", "0.5")]


def test_mixtures_are_compared_by_what_their_files_hold(trained: Path) -> None:
    data = runs.receipt(trained)["data"]
    base = [("web", "a", 0.7), ("code", "b", 0.3)]

    def found(*other: tuple[str, str, float]) -> list[tuple[str, str, str]]:
        sides = [
            [{"name": n, "content_sha256": c * 64, "weight": w, "tokens": 10, "documents": 1} for n, c, w in side]
            for side in (base, other)
        ]
        receipts = [{**runs.receipt(trained), "data": {**data, "files": side}} for side in sides]
        return [(d.name, d.a, d.b) for d in differences(*receipts, None, None)[0]]

    web, code = base
    c = "10 tokens, sha256 cccccccccccc"
    assert found(("renamed", "a", 0.7), code) == []
    assert found(code, web) == [("order of the files", "web, code", "code, web")]
    assert found(("web", "a", 0.6), code) == [("weight of web", "0.7", "0.6")]
    assert found(web, code, ("more", "c", 0.1)) == [("more", "not there", c)]
    assert found(("web", "c", 0.7), code) == [("web", "10 tokens, sha256 aaaaaaaaaaaa", c)]


def test_a_receipt_of_the_format_before_is_compared_by_what_it_has(trained: Path) -> None:
    new, config = runs.receipt(trained), config_of(trained)
    gone = ("source", "versions", "hardware", "env", "resolved", "launch", "preflight")
    old = {name: value for name, value in new.items() if name not in gone}
    old |= {"format": 1, "git": {"commit": "x", "dirty": True}}
    found, notes = differences(old, new, config, config)
    assert [(d.group, d.name, d.a) for d in found] == [("code", "commit", "x")] and notes == []
    old["git"]["commit"] = new["source"]["commit"]
    found, notes = differences(old, new, None, config)
    assert found == () and [note.partition(":")[0] for note in notes] == ["code", "config"]


# ---- What is told of more than the newest attempt


def found_in(folder: Path, other: Path) -> list[tuple[str, str, str]]:
    found = compare(open_run(folder), open_run(other))
    assert found.same == (not found.differences) and not found.notes
    return [(f"{d.group} {d.title}", d.a, d.b) for d in found.differences]


def test_an_earlier_attempt_that_ran_otherwise_is_a_difference(trained: Path, tmp_path: Path) -> None:
    jax = runs.receipt(trained)["packages"] | {"jax": "0.1"}
    named = [("versions jax (in earlier attempts)", "0.1 in attempt 1", "as at the end")]
    went_on = in_two_attempts(trained, tmp_path / "on", packages=jax)
    assert found_in(went_on, trained) == named
    assert command.main(["diff", str(went_on), str(trained)]) == 1
    assert found_in(in_two_attempts(trained, tmp_path / "again" / "on", packages=jax), went_on) == []
    before = in_two_attempts(trained, tmp_path / "old", {"resumed_from_step": 2}, packages=jax)
    without = {name: value for name, value in runs.receipt(before).items() if name != "loaded"}  # as was once written
    (before / "receipt.json").write_text(json.dumps(without))
    assert found_in(before, trained) == named
    # One that nothing is left of, such as one that ran out of memory, explains nothing.
    assert found_in(in_two_attempts(trained, tmp_path / "anew", {"loaded": None}, packages=jax), trained) == []


def test_what_a_run_began_from_is_compared(trained: Path, tmp_path: Path) -> None:
    def run(name: str, **first: Any) -> Path:
        return in_two_attempts(trained, tmp_path / name, loaded=read_from("of another run", **first))

    foreign = run("foreign")
    step = f"step 10 of /other/checkpoints, digest {'d' * 12}"
    assert found_in(foreign, trained) == [("data first state", step, "made from train.seed")]
    assert found_in(foreign, run("moved", **{"from": "/copied"})) == []
    assert len(found_in(foreign, run("other", digest="b" * 64))) == 1


def test_init_from_is_compared_by_its_weights(trained: Path, tmp_path: Path) -> None:
    def run(name: str, path: str, digest: str | None) -> Path:
        def change(told: dict[str, Any]) -> None:
            told["resolved"]["init"]["from"] = path

        return altered_run(trained, tmp_path / name, change, loaded=read_from("", **{"from": path}, step=None, digest=digest))

    here = run("here", "/a", "d" * 32)
    assert found_in(here, run("moved", "/b", "d" * 32)) == []
    assert [name for name, *_ in found_in(here, run("changed", "/a", "e" * 32))] == ["data first state"]
    assert [name for name, *_ in found_in(here, run("untold", "/b", None))] == ["config init.from"]
