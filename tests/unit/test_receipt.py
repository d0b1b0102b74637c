"""Receipts: their contents at the start and at the end, their figures, the comparison of two, and unreadable files."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from made_runs import train_line
from played_nvml import AT_ITS_CAP, HW_THERMAL, IDLE, Gpu, Nvml

from jaxtrain.commands import receipt as command
from jaxtrain.config import schema
from jaxtrain.config.hardware import HOST_LIMIT
from jaxtrain.metrics import files as metrics
from jaxtrain.metrics import receipt_collect, receipt_figures, receipt_machine
from jaxtrain.metrics.receipt_format import FORMAT, ReceiptError, load, open_run
from jaxtrain.train.receipt import Receipt
from jaxtrain.train.receipt_diff import GROUPS, compare, differences

RESOLVED = schema.to_dict(schema.RunConfig())


@pytest.fixture(autouse=True)
def known_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake git and the digests of files; tests/campaign/test_receipt_diff.py uses the real ones."""
    known = {"commit": "c" * 40, "dirty": False, "patch": "", "files": {"a.py": "d"}}
    monkeypatch.setattr(receipt_collect, "source", lambda *args: known)


def driver(count: int = 1) -> Nvml:
    """Return a driver whose GPUs are idle."""
    return Nvml(*(Gpu(reasons=IDLE) for _ in range(count)))


# ---- Contents


def test_a_killed_run_has_what_was_known_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [{"name": "vboost", "state": "ok", "seen": "GPU0: 1 of 4"}, {"name": "disk", "state": "note", "seen": "nearly full"}]
    checks = [{"name": "driver", "state": "ok", "seen": "580"}, *kept]
    fit = {"verdict": "fit", "seconds": 3.0, "nodes": [{"host": "a", "checks": checks, "measured": {"h2d_gb_s": [55.0]}}]}
    (tmp_path / "preflight.json").write_text(json.dumps(fit))
    monkeypatch.setenv("JAXTRAIN_PREFLIGHT", str(tmp_path / "preflight.json"))
    monkeypatch.setattr(receipt_machine.os, "sched_getaffinity", lambda pid: {3, 5, 7})
    written = Receipt(tmp_path, nvml=driver(3))
    written.start({"resolved": RESOLVED, "devices": receipt_machine.device_facts(jax.devices())})
    found = load(tmp_path / "receipt.json")
    assert (found["format"], found["exit_code"], found["resolved"]) == (FORMAT, None, json.loads(json.dumps(RESOLVED)))
    assert written.preflight == fit and found["preflight"]["nodes"] == [{**fit["nodes"][0], "checks": kept}]
    assert (found["versions"]["driver"], found["versions"]["driver_cuda"]) == ("580.65.06", "13.0")
    assert found["packages"]["jax"] == jax.__version__ and found["devices"]["count"] == jax.device_count()
    assert found["host"]["cpus"] == 3, "those that the process may use"
    hardware = found["hardware"]
    assert hardware["topology"] == {"nvlinks": [16, 16, 16], "pairs": {"NVLink": 1, "PHB": 2}} and "after" not in hardware
    limits = {"power_limit_w": 700.0, "power_limit_default_w": 700.0, "max_sm_clock_mhz": 1980, "max_memory_clock_mhz": 1980}
    assert hardware["gpus"][1].items() >= ({"index": 1, "name": "NVIDIA H200", "ecc": True} | limits).items()
    assert hardware["before"][0].items() >= {"throttle_reasons": "", "ecc_uncorrected": 0, "power_w": 650.0}.items()


def test_the_end_adds_clocks_and_figures(tmp_path: Path) -> None:
    gpu = Gpu()
    written = Receipt(tmp_path, nvml=Nvml(gpu))
    written.start({"memory_gib": {"peak": 120.0}, "planned": {"step_s": 0.4, "peak_gib": 100.0}})
    with metrics.Writers(tmp_path) as writers:
        for step in range(1, 31):
            writers.train(**train_line(step, step_time_s=0.5, peak_memory_gib=110.0))
    save = {"step": 10, "bytes": 4e9, "blocked_s": 0.25, "copied_s": 0.1, "total_s": 2.0, "host_gib": 9.0}
    written.saved(save)
    written.saved(save | {"step": 20, "blocked_s": 0.75, "total_s": 4.0, "host_gib": 10.0})
    gpu.reasons = AT_ITS_CAP | HW_THERMAL
    written.finish(0, "30 steps")
    found = load(tmp_path / "receipt.json")
    assert found["hardware"]["after"][0]["throttle_reasons"] == "sw_power_cap+hw_thermal"
    assert found["measured_over_planned"] == {"step_s": 1.25, "peak_gib": 1.1}
    times = {"seconds": {"median": 3.0, "max": 4.0}, "gb_per_s": 1.5, "loop_waited_s": 1.0}
    assert found["saves"] == {"count": 2, **times, "host_gib": 10.0} and found["save"]["step"] == 20


def test_an_error_at_the_end_costs_the_figures_and_not_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(nvml: Any) -> None:
        raise OverflowError("driver")

    monkeypatch.setattr(receipt_machine, "clocks", fail)
    texts = {"damaged": ("x\n{}\n", "metrics.jsonl:1"), "broken": (metrics.encode(lines(1)[0]) + "\n", "OverflowError: driver")}
    for name, (text, why) in texts.items():
        written = Receipt(tmp_path / name, nvml=driver())
        written.start({})
        (tmp_path / name / "metrics.jsonl").write_text(text)
        written.finish(75, "SIGTERM")
        found = load(tmp_path / name / "receipt.json")
        assert (found["exit_code"], found["reason"]) == (75, "SIGTERM") and why in found["no_figures"]
    assert found["loss_at"] == {"1": 10.0}


def test_no_secret_and_no_variable_of_one_attempt_is_kept() -> None:
    kept = dict.fromkeys(("NCCL_ALGO", "SLURM_JOB_ID", "XLA_FLAGS", "NCCL_DEBUG", "JAX_PLATFORMS"), "1")
    attempt, secret = ("JAXTRAIN_RESTART", "JAXTRAIN_NOTE", "HOME"), ("NCCL_API_KEY", "JAX_private", "UCX_PASSWD", "SLURM_JWT")
    others = dict.fromkeys((*attempt, *secret, "HF_TOKEN", "JAX_SOME_TOKEN"), "x")
    assert receipt_collect.select_environment(kept | others) == kept


# ---- Attempts


def attempt(folder: Path, saves: bool, loaded: dict[str, Any] | None = None, **optimizer: Any) -> Receipt:
    written = Receipt(folder, nvml=driver())
    written.start({"resolved": {**RESOLVED, "optimizer": RESOLVED["optimizer"] | optimizer}})
    written.began(loaded)
    if saves:
        written.saved({"step": 5, "bytes": 4e9, "blocked_s": 0.25, "copied_s": 0.1, "total_s": 2.0, "host_gib": 9.0})
    written.finish(75, "SIGTERM")
    return written


def read_from(saver: str, digest: str = "d" * 64, step: int | None = 10) -> dict[str, Any]:
    return {"from": "/x/checkpoints", "step": step, "saved_by": saver, "digest": digest}


def found_in(a: Path, b: Path) -> list[tuple[str, str, str, str]]:
    return [(d.group, d.name, d.a, d.b) for d in compare(open_run(a), open_run(b)).differences]


def test_a_resumed_run_has_its_attempts_and_their_changes(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    attempt(plain, saves=True)
    resumed = tmp_path / "resumed"
    first = attempt(resumed, saves=True)
    attempt(resumed, saves=False, loaded=read_from(first.id), lr=0.9)  # it saved nothing, so the result does not depend on it
    assert found_in(resumed, plain)[-1][:2] == ("config", "optimizer.lr (changed on resume)")
    third = attempt(resumed, saves=True, loaded=read_from(first.id))
    found = load(resumed / "receipt.json")
    assert [found["attempt"], *(one["attempt"] for one in found["attempts"])] == [3, 1, 2]
    assert [one["exit_code"] for one in found["attempts"]] == [75, 75] and "resolved" in found["attempts"][0]
    assert len(json.dumps(found["attempts"][1])) < 1500 and found["attempts"][1]["changed"][0][:2] == ["config", "optimizer.lr"]
    assert found_in(resumed, plain) == []
    attempt(resumed, saves=True, loaded=read_from(third.id, step=20), lr=0.9)
    attempt(plain, saves=True, lr=0.9)  # a new start in the same folder
    assert [found[:2] for found in found_in(resumed, plain)] == [("config", "optimizer.lr (changed on resume)")]


def test_an_attempt_that_finds_all_steps_done_leaves_the_receipt_of_the_run(tmp_path: Path) -> None:
    trained = attempt(tmp_path, saves=True)
    before = load(tmp_path / "receipt.json")
    idle = Receipt(tmp_path, nvml=driver())
    idle.start({"resolved": {**RESOLVED, "optimizer": RESOLVED["optimizer"] | {"lr": 0.9}}})
    idle.began(read_from(trained.id))
    idle.took_no_step = True
    idle.finish(0, "all steps were done already")
    after = load(tmp_path / "receipt.json")
    (summary,) = after.pop("attempts")
    assert after == {k: v for k, v in before.items() if k != "attempts"}
    assert (summary["id"], summary["attempt"], summary["exit_code"]) == (idle.id, 2, 0)
    assert summary["changed"][0][1] == "optimizer.lr" and "resolved" not in summary


def test_a_run_that_began_from_another_state_differs(tmp_path: Path) -> None:
    for name, saver, digest in (("a", "x", "d"), ("moved", "y", "d"), ("other", "x", "e")):
        first = attempt(tmp_path / name, saves=True, loaded=read_from(saver, digest * 64))
        attempt(tmp_path / name, saves=True, loaded=read_from(first.id, "own" + name))
    attempt(tmp_path / "seed", saves=True)
    assert found_in(tmp_path / "a", tmp_path / "moved") == []
    assert found_in(tmp_path / "a", tmp_path / "other") == [("data", "first state", "d" * 64, "e" * 64)]
    assert [found[:2] for found in found_in(tmp_path / "seed", tmp_path / "a")] == [("data", "first state")]
    assert command.main(["diff", str(tmp_path / "seed"), str(tmp_path / "a")]) == 1


def test_an_attempt_began_where_it_first_began(tmp_path: Path) -> None:
    written = Receipt(tmp_path)
    written.start({})
    written.began(None)
    origin = load(tmp_path / "receipt.json")["origin"]
    written.began(read_from("x"))  # it diverged, and rolled back
    assert origin and load(tmp_path / "receipt.json")["origin"] == origin


# ---- Figures


def lines(count: int, first: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """Return train lines whose step time in ms is the step's number. The first two steps take 10 s each."""
    out = []
    for step in range(first, first + count):
        seconds = 10.0 if step < first + 2 else step / 1000
        rates = {"tokens_per_s": 800 / seconds, "tflops_per_device": 5 / seconds, "mfu_causal": 0.01 / seconds, "hfu": None}
        out.append({"kind": "train", "step": step, "loss": 10.0 / step, "step_time_s": seconds, **rates, **fields})
    return out


def test_speed_is_that_of_a_stated_window() -> None:
    found = receipt_figures.speed([*lines(100), {"kind": "eval", "step": 50, "loss": 1.0}])
    taken = np.arange(21, 101) / 1000
    assert found["window"] == {"first_step": 21, "last_step": 100, "lines": 80, "left_out": 20}
    step = found["step_time_s"]
    assert step == pytest.approx({"median": np.median(taken), "p10": np.quantile(taken, 0.1), "p90": np.quantile(taken, 0.9)})
    assert found["mfu_causal"] == pytest.approx(np.median(0.01 / taken)) and found["hfu"] is None
    assert found["peak_tflops"] == pytest.approx(500.0)


def test_figures_are_those_of_this_attempt_and_losses_of_the_run() -> None:
    found = receipt_figures.of_run([*lines(50), *lines(50, 51)], {"resumed_from_step": 50})
    assert found["speed"]["window"]["first_step"] == 61
    assert list(found["loss_at"]) == ["1", "2", "5", "10", "20", "50", "100"] and found["loss_at"]["20"] == 0.5


def test_nan_and_infinite_losses_are_text() -> None:
    found = receipt_figures.loss_at(
        [*lines(4), *lines(1, 5, loss=math.nan), *lines(1, 10, loss=-math.inf), *lines(1, 11, loss=None)]
    )
    assert found == {"1": 10.0, "2": 5.0, "5": "nan", "10": "-inf"}
    json.loads(json.dumps(found), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert receipt_figures.loss_at([]) == {}


def test_throttling_is_a_share_of_the_time_of_this_attempt() -> None:
    def gpu(step: int, index: int, share: float | None, why: str = "") -> dict[str, Any]:
        return {"kind": "gpu", "step": step, "gpu": index, "throttled": share, "throttle_reasons": why}

    watched = [gpu(1, 0, 1.0, "hw_thermal"), gpu(11, 0, 0.5, "sw_thermal"), gpu(12, 0, 0.1, "sw_thermal+hw_slowdown")]
    watched += [gpu(11, 1, 0.0), gpu(12, 1, None), gpu(11, 2, None)]
    found = receipt_figures.of_run(watched, {"resumed_from_step": 10})["throttled"]
    assert found == [{"gpu": 0, "share": pytest.approx(0.3), "reasons": "sw_thermal+hw_slowdown"}]


# ---- Differences

GPU = {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "pci": "0000:18:00.0", "power_limit_w": 700.0}
STATE = {"index": 0, "sm_clock_mhz": 1980, "power_w": 650.0, "throttle_reasons": "sw_power_cap", "ecc_uncorrected": 0}
BASE: dict[str, Any] = {
    "id": "a",
    "command": "python",
    "python": "3.12.1",
    "packages": {"jax": "0.11.2"},
    "versions": {"driver": "570.2", "plugin_built_with": {"cuda": "12.9"}},
    "host": {"name": "a", "system": "Linux", "cpus": 8},
    "source": {"commit": "c", "files": {"a.py": "d" * 64}, "config_file": {"tiny.py": "e" * 64}, "patch": ""},
    "hardware": {
        "cpu": {"model": "a CPU", "memory_gib": 2015},
        "gpus": [GPU, {**GPU, "index": 1}],
        "topology": {"nvlinks": [18, 18], "pairs": {"NVLink": 1}},
        "before": [STATE],
        "after": [STATE],
    },
    "preflight": {"nodes": [{"measured": {"all_reduce_bus_gb_s": 475.0}}]},
    "devices": {"kind": ["NVIDIA H200"], "count": 8, "process_count": 1, "processes": {"0": [0]}},
    "environment": {},
    "env": {"set": {}, "inherited": {}},
    "resolved": RESOLVED,
    "mesh": {"data": 1, "fsdp": 8},
    "data": {"source": "/x/y.tok", "seed": 0, "tokenizer": {"name": "/x", "sha256": "f"}},
}


def changed(path: str, value: Any) -> list[tuple[str, str, str, str]]:
    """Return the differences from a receipt that has another value at one dotted path."""
    *folders, last = path.split(".")
    other = inner = copy.deepcopy(BASE)
    for name in folders:
        inner = inner[name]
    inner[last] = value
    return [(d.group, d.name, d.a, d.b) for d in differences(BASE, other)]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("environment.XLA_FLAGS", "--xla_force_host_platform_device_count=8"),
        ("env.inherited", {"NCCL_DEBUG": "INFO"}),
        ("env.set", {HOST_LIMIT: "900"}),
        ("hardware.gpus", [{**GPU, "uuid": "GPU-2", "pci": "x", "nics": ["mlx5_0"]}, {**GPU, "index": 1}]),
        # one sample does not describe the run
        ("hardware.after", [{**STATE, "sm_clock_mhz": 1500, "power_w": 80.0, "throttle_reasons": "hw_thermal"}]),
        ("throttled", [{"gpu": 0, "share": 0.1, "reasons": "hw_thermal"}]),
        ("source.commit", "x"),  # the files are equal
        ("preflight.nodes", [{"measured": {"all_reduce_bus_gb_s": 460.0}}]),
        ("data.source", "/elsewhere"),
        ("resolved.optimizer", {k: v for k, v in RESOLVED["optimizer"].items() if k != "beta1"}),  # the key has its default
        ("resolved.mesh.data", 1),  # the sizes are written out, and the same
    ],
)
def test_a_fact_that_explains_nothing_is_no_difference(path: str, value: Any) -> None:
    assert changed(path, value) == []


UNEQUAL_RATES = [{"measured": {"all_reduce_bus_gb_s": 475.0}}, {"measured": {"all_reduce_bus_gb_s": [311.0, 475.0]}}]


@pytest.mark.parametrize(
    ("path", "value", "group", "name", "shown"),
    [
        ("host.cpus", 4, "hardware", "host processors", "8 4"),
        ("hardware.gpus", [GPU, {**GPU, "power_limit_w": 500.0}], "hardware", "gpus.power_limit_w", "2 x 700.0 500.0, 700.0"),
        ("throttled", [{"gpu": 0, "share": 0.2, "reasons": "hw"}], "hardware", "GPU 0: throttled by", "absent hw"),
        ("hardware.after", [{**STATE, "ecc_uncorrected": 2}], "hardware", "GPU 0: new uncorrected ECC errors", "absent 2"),
        ("preflight.nodes", UNEQUAL_RATES, "hardware", "preflight.all_reduce_bus_gb_s", "475.0 311.0"),
        ("environment.XLA_FLAGS", "--xla_a=1", "environment", "XLA_FLAGS --xla_a", "absent 1"),
        ("env.set.NCCL_ALGO", "^NVLS", "environment", "NCCL_ALGO", "absent ^NVLS"),
        ("data.tokenizer.sha256", "0", "data", "tokenizer.sha256", "f 0"),
        ("source.files", {"a.py": "e" * 64}, "code", "a.py", f"{'d' * 12} {'e' * 12}"),
        ("resolved.optimizer.beta1", 0.5, "config", "optimizer.beta1", "0.9 0.5"),
        ("resolved.checkpoint.dir", "/x", "config", "checkpoint.dir", "'' /x"),
    ],
)
def test_a_fact_that_explains_something_is_named(path: str, value: Any, group: str, name: str, shown: str) -> None:
    ((found_group, found_name, a, b),) = changed(path, value)
    assert (found_group, found_name, f"{a} {b}") == (group, name, shown) and group in GROUPS


def test_a_fact_that_follows_from_another_is_not_named() -> None:
    other = copy.deepcopy(BASE)
    other["resolved"]["train"]["deterministic"] = True
    other["env"]["set"]["NCCL_ALGO"] = "^NVLS"  # train.deterministic sets this variable
    other["source"] |= {"commit": "e", "files": {"a.py": "x"}}
    found = [f"{d.group}: {d.name}" for d in differences(BASE, other)]
    assert found == ["code: commit", "code: a.py", "config: train.deterministic"]


def test_mixtures_are_compared_by_the_contents_of_their_files() -> None:
    def mixture(*files: tuple[str, str, float]) -> dict[str, Any]:
        found = [{"name": n, "content_sha256": c * 64, "weight": w, "tokens": 10, "documents": 1} for n, c, w in files]
        data = {**BASE["data"], "source": str(files), "files": found}
        return {**BASE, "data": data, "resolved": {"data": {"source": files[0][0]}}}

    def names(a: dict[str, Any], *other: tuple[str, str, float]) -> list[str]:
        return [d.name for d in differences(a, mixture(*other))]

    web, code = ("web", "a", 0.7), ("code", "b", 0.3)
    plain = mixture(web, code)
    assert names(plain, ("renamed", "a", 0.7), code) == []
    assert names(plain, code, web) == ["order of the files"]
    assert names(plain, ("web", "a", 0.6), code) == names(plain, ("web", "c", 0.7), code) == ["web"]
    assert names(plain, web, code, ("more", "c", 0.1)) == ["more"]


# ---- Files that cannot be read, and the command line

TEXTS = {"damaged.json": "{", "later.json": '{"format": 99, "attempts": []}', "list.json": "[]"}


def test_a_wrong_command_or_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    wrong = [(f"show {name}", name) for name in TEXTS] + [("diff list.json list.json", "list.json"), ("diff list.json", "B: ")]
    for line, named in [("list empty", "empty"), *wrong, ("diff", "A: "), ("shwo", "receipt show"), ("", "show | list | diff")]:
        assert command.main(line.split()) == 2
        assert named in capsys.readouterr().err


def test_a_receipt_that_cannot_be_read_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    for text in TEXTS.values():
        path.write_text(text)
        with pytest.raises(ReceiptError, match=re.escape(str(path))):
            Receipt(tmp_path).start({})
        assert path.read_text() == text
