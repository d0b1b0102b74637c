"""Receipts: their contents at the start and at the end, attempts, rates, the comparison of two, and unreadable files."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from made_runs import train_line
from played_nvml import Gpu, Nvml
from run_sh import git

from jaxtrain.commands import receipt as command
from jaxtrain.config import installed, schema
from jaxtrain.config.hardware import HOST_LIMIT
from jaxtrain.metrics import files as metrics
from jaxtrain.metrics import receipt as receipts
from jaxtrain.metrics.receipt import FORMAT, Receipt, checkout, device_facts, load_receipt, open_run, rates, select_environment
from jaxtrain.report.receipt import compare_receipts, receipt_rows

RESOLVED = schema.to_dict(schema.RunConfig())


@pytest.fixture(autouse=True)
def known_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake git; tests/campaign/test_receipt_diff.py uses the real one."""
    monkeypatch.setattr(receipts, "checkout", lambda: ("c" * 40, False))


# ---- Contents


def test_a_killed_run_has_what_was_known_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts.os, "sched_getaffinity", lambda pid: {3, 5, 7})
    driver = Nvml(Gpu(), Gpu(limit_mw=500_000), Gpu(lost=True))
    written = Receipt(tmp_path, driver=driver)
    assert written.start({"resolved": RESOLVED, "devices": device_facts(jax.devices())}) == ""
    found = load_receipt(tmp_path / "receipt.json")
    assert (found["format"], found["exit_code"], found["resolved"]) == (FORMAT, None, json.loads(json.dumps(RESOLVED)))
    assert found["code"] == {"commit": "c" * 40, "dirty": False, "digest": installed.code_sha256(), "own": {}}
    versions = {"jax": jax.__version__, "driver": "580.65.06", "driver_cuda": "13.0"}
    assert found["versions"].items() >= versions.items() and found["devices"]["count"] == jax.device_count()
    assert found["hardware"]["cpus"] == 3, "those that the process may use"
    first, second, lost = found["hardware"]["gpus"]
    limits = {"power_limit_w": 500.0, "power_limit_default_w": 700.0, "max_sm_clock_mhz": 1980, "nvlinks": 16}
    assert second.items() >= ({"index": 1, "name": "NVIDIA H200", "ecc": True} | limits).items()
    assert first["power_limit_w"] == 700.0 and lost == {"index": 2, "lost": True} and driver.open == 0
    written.finish(75, "SIGTERM", {"goodput": {"goodput": 0.5}})
    found = load_receipt(tmp_path / "receipt.json")
    assert (found["exit_code"], found["reason"], found["goodput"]) == (75, "SIGTERM", {"goodput": 0.5})


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path) -> None:
    Receipt(tmp_path, driver=Nvml(driver=False)).start({})
    found = load_receipt(tmp_path / "receipt.json")
    assert found["hardware"]["gpus"] == [] and "driver" not in found["versions"]


def test_the_state_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the commit of the repository's own folder, and whether files that git tracks have changed."""
    inner = tmp_path / "inner"
    inner.mkdir()
    file = inner / "main.py"
    file.touch()
    assert checkout(tmp_path) == (None, None)
    git(tmp_path, "init", "-q")
    assert checkout(tmp_path) == (None, None), "no commit yet"
    git(tmp_path, "add", "inner")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.txt").touch()
    assert checkout(tmp_path) == (commit, False)
    assert checkout(inner) == (None, None), "a folder in a repository of something else"
    file.write_text("x = 1\n")
    assert checkout(tmp_path) == (commit, True)
    monkeypatch.setattr(receipts, "GIT_S", 0)
    assert checkout(tmp_path) == (None, None), "git is too slow"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(inner))
    assert checkout(tmp_path) == (None, None), "no git"


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    written = Receipt(tmp_path, process_index=1, driver=Nvml())
    written.start({})
    written.record_start(None)
    written.finish(0, "done")
    assert not list(tmp_path.iterdir())


def test_no_secret_and_no_variable_of_one_attempt_is_kept() -> None:
    kept = dict.fromkeys(("NCCL_ALGO", "SLURM_JOB_ID", "XLA_FLAGS", "NCCL_DEBUG", "JAX_PLATFORMS"), "1")
    attempt, secret = ("JAXTRAIN_RESTART", "JAXTRAIN_NOTE", "HOME"), ("NCCL_API_KEY", "JAX_private", "UCX_PASSWD", "SLURM_JWT")
    others = dict.fromkeys((*attempt, *secret, "HF_TOKEN", "JAX_SOME_TOKEN"), "x")
    assert select_environment(kept | others) == kept


# ---- Attempts


def attempt(folder: Path, loaded: dict[str, Any] | None = None, **optimizer: Any) -> Receipt:
    written = Receipt(folder, driver=Nvml())
    written.start({"resolved": {**RESOLVED, "optimizer": RESOLVED["optimizer"] | optimizer}})
    written.record_start(loaded)
    written.finish(75, "SIGTERM")
    return written


def read_from(saver: str, digest: str = "d" * 64) -> dict[str, Any]:
    return {"from": "/x/checkpoints", "step": 10, "saved_by": saver, "digest": digest}


def found_in(a: Path, b: Path) -> list[tuple[str, ...]]:
    return [tuple(one.values()) for one in compare_receipts(open_run(a), open_run(b))[0]]


def test_a_resumed_run_has_its_attempts_and_their_changes(tmp_path: Path) -> None:
    plain, resumed = tmp_path / "plain", tmp_path / "resumed"
    attempt(plain)
    first = attempt(resumed)
    attempt(resumed, read_from(first.id), lr=0.9)
    was = RESOLVED["optimizer"]["lr"]
    assert found_in(plain, resumed) == [("config", "optimizer.lr", str(was), "0.9")]
    third = attempt(resumed, read_from(first.id))
    found = load_receipt(resumed / "receipt.json")
    assert [one["attempt"] for one in (*found["attempts"], found)] == [1, 2, 3]
    assert [one["exit_code"] for one in found["attempts"]] == [75, 75] and found["id"] == third.id
    assert len(json.dumps(found["attempts"])) < 1500 and "changed" not in found["attempts"][0]
    assert found["attempts"][1]["changed"] == {"config.optimizer.lr": [was, 0.9]}
    assert found["changed"] == {"config.optimizer.lr": [0.9, was]}
    assert found_in(plain, resumed) == []
    third.update(resumed_from_step=15)  # the steps up to it were trained with the other value
    assert found_in(plain, resumed) == [("config", "optimizer.lr (from step 15 on)", "absent", f"{was}, before it 0.9")]


def test_a_receipt_that_is_no_receipt_is_refused(tmp_path: Path) -> None:
    """The state that a resumed run began from is not known if its receipt was of another format, and is no difference."""
    plain, resumed = tmp_path / "plain", tmp_path / "resumed"
    first = attempt(plain)
    attempt(resumed)
    texts = ["[]", '{"format": 4, "attempts": [3]}', '{"format": 4, "attempts": [], "environment": 3}', '{"format": 3}', "{"]
    for text in texts:
        (resumed / "receipt.json").write_text(text)
        assert command.main(["show", str(resumed)]) == command.main(["diff", str(plain), str(resumed)]) == 2
    attempt(resumed, read_from(first.id))
    assert found_in(plain, resumed) == []


def test_a_run_that_began_from_another_state_differs(tmp_path: Path) -> None:
    for name, saver, digest in (("a", "x", "d"), ("moved", "y", "d"), ("other", "x", "e")):
        first = attempt(tmp_path / name, read_from(saver, digest * 64))
        attempt(tmp_path / name, read_from(first.id, "own" + name))
    attempt(tmp_path / "seed")
    assert found_in(tmp_path / "a", tmp_path / "moved") == []
    assert found_in(tmp_path / "a", tmp_path / "other") == [("data", "origin", "d" * 64, "e" * 64)]
    assert [found[:2] for found in found_in(tmp_path / "seed", tmp_path / "a")] == [("data", "origin")]
    assert command.main(["diff", str(tmp_path / "seed"), str(tmp_path / "a")]) == 1
    assert command.main(["diff", str(tmp_path / "a"), str(tmp_path / "moved")]) == 0


def test_an_attempt_began_where_it_first_began(tmp_path: Path) -> None:
    written = Receipt(tmp_path, driver=Nvml())
    written.start({})
    written.record_start(None)
    origin = load_receipt(tmp_path / "receipt.json")["origin"]
    written.record_start(read_from("x"))  # it diverged, and rolled back
    assert origin and load_receipt(tmp_path / "receipt.json")["origin"] == origin


# ---- Results


def lines(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return train lines whose step time in ms is the step's number. The first two steps take 10 s each."""
    out = []
    for step in range(1, count + 1):
        seconds = 10.0 if step < 3 else step / 1000
        line = {"loss": 10.0 / step, "step_time_s": seconds, "mfu_causal": 0.5, "hfu": None, "peak_memory_gib": 50.0 + step % 7}
        out.append({"kind": "train", **train_line(step, **line | fields)})
    return out


def test_rates_are_medians_without_the_first_fifth() -> None:
    found = rates([*lines(100), {"kind": "eval", "step": 50, "loss": 1.0}])
    assert found["step_time_s"] == pytest.approx(0.0605) and (found["mfu_causal"], found["hfu"]) == (0.5, None)
    assert found["peak_memory_gib"] == 56.0
    assert rates(lines(5))["step_time_s"] is None and rates(lines(5))["peak_memory_gib"] == 55.0
    assert rates(lines(6))["step_time_s"] is None and rates(lines(7))["step_time_s"] is not None
    assert set(rates([]).values()) == {None}


def trained(folder: Path, changes: dict[int, float]) -> Path:
    attempt(folder)
    with metrics.Writers(folder) as writers:
        for line in lines(10):
            writers.train(**{k: v for k, v in line.items() if k != "kind"} | {"loss": changes.get(line["step"], line["loss"])})
    return folder


def test_results_are_compared_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nan = float("nan")
    a, same, other = (trained(tmp_path / name, x) for name, x in (("a", {9: nan}), ("b", {9: nan}), ("c", {7: 1.0})))
    assert command.main(["diff", str(a), str(same), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["differences"]) == (True, [])
    loss, step_time, *_, memory = found["outcomes"]
    assert loss["a"] == "" and "step 10" in loss["ratio"] and step_time["ratio"] == "1.000 times" and memory["a"] == "56"
    assert command.main(["diff", str(a), str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"][0].items() >= {"a": str(10 / 7), "b": "1.0"}.items()
    for line in (["diff", str(a), str(other)], ["show", str(a)], ["list", str(tmp_path)]):
        assert command.main(line) == 0
    assert {"rates.step_time_s", "versions.jax", "code.digest"} <= {name for name, _ in receipt_rows(open_run(a))}
    told = capsys.readouterr().out
    assert "step 7" in told and "75: SIGTERM" in told and "50.0%" in told


# ---- Differences

GPU = {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "pci": "0000:18:00.0", "power_limit_w": 700.0}
FILES = [{"name": name, "content_sha256": sha * 64, "weight": 0.5, "tokens": 9} for name, sha in (("web", "a"), ("code", "b"))]
BASE: dict[str, Any] = {
    "format": FORMAT,
    "attempts": [],
    "id": "a",
    "command": "python",
    "host": "a",
    "code": {"commit": "c", "dirty": False, "digest": "d", "own": {"mine": "e"}},
    "versions": {"jax": "0.11.2", "driver": "570.2"},
    "hardware": {"cpu": "a CPU", "cpus": 8, "memory_gib": 2015, "gpus": [GPU, {**GPU, "index": 1}]},
    "devices": {"kind": ["NVIDIA H200"], "count": 8, "process_count": 1},
    "environment": {},
    "env": {"set": {}, "inherited": {}},
    "resolved": RESOLVED,
    "mesh": {"data": 1, "fsdp": 8},
    "data": {"source": "/x/y.tok", "seed": 0, "files": FILES, "tokenizer": {"name": "/x", "sha256": "f"}},
    "eval_data": {"": {"source": "/x/z.tok", "files": FILES[:1], "tokenizer": {"name": "/x", "sha256": "f"}}},
    "origin": "made from train.seed",
}


def changed(folder: Path, path: str, value: Any) -> list[tuple[str, ...]]:
    """Return the differences from a receipt that has another value at one dotted path."""
    *parents, last = path.split(".")
    other = inner = copy.deepcopy(BASE)
    for name in parents:
        inner = inner[name]
    inner[last] = value
    for name, receipt in (("a.json", BASE), ("b.json", other)):
        (folder / name).write_text(json.dumps(receipt))
    return found_in(folder / "a.json", folder / "b.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("env.inherited", {"NCCL_DEBUG": "INFO", "CUDA_HOME": "/x"}),
        ("env.set", {HOST_LIMIT: "900"}),
        ("hardware.gpus", [{**GPU, "uuid": "GPU-2", "pci": "x"}, {**GPU, "index": 1}]),
        ("code.commit", "x"),  # the files are equal
        ("data.source", "/elsewhere"),
        ("data.files", [FILES[0] | {"name": "renamed"}, FILES[1]]),
        ("resolved.data", RESOLVED["data"] | {"source": "/elsewhere", "tokenizer": "/other"}),
        ("resolved.init.from", "/elsewhere"),
        ("resolved.optimizer", {k: v for k, v in RESOLVED["optimizer"].items() if k != "beta1"}),  # the key has its default
        ("planned", {"step_s": 1.0}),
    ],
)
def test_a_fact_that_explains_nothing_is_no_difference(tmp_path: Path, path: str, value: Any) -> None:
    assert changed(tmp_path, path, value) == []


@pytest.mark.parametrize(
    ("path", "value", "group", "name", "shown"),
    [
        ("hardware.cpus", 4, "hardware", "cpus", "8 4"),
        ("hardware.gpus", [GPU, {**GPU, "power_limit_w": 500.0}], "hardware", "gpus.power_limit_w", "2 x 700.0 500.0, 700.0"),
        ("devices.count", 4, "hardware", "devices.count", "8 4"),
        ("environment.XLA_FLAGS", "--xla_a=1", "environment", "XLA_FLAGS", "absent --xla_a=1"),
        ("env.set.NCCL_ALGO", "^NVLS", "environment", "NCCL_ALGO", "absent ^NVLS"),
        ("versions.driver", "580.1", "versions", "driver", "570.2 580.1"),
        ("data.tokenizer.sha256", "0", "data", "tokenizer", "f 0"),
        ("environment.JAXTRAIN_IMAGE", "of:2", "environment", "JAXTRAIN_IMAGE", "absent of:2"),
        ("eval_data", {"": BASE["eval_data"][""] | {"files": FILES[1:]}}, "data", "held_out.files.1", ""),
        ("code.digest", "e", "code", "digest", "d e"),
        ("code.own.mine", "f", "code", "own.mine", "e f"),
        ("resolved.optimizer.beta1", 0.5, "config", "optimizer.beta1", "0.9 0.5"),
        ("resolved.checkpoint.dir", "/x", "config", "checkpoint.dir", "'' /x"),
    ],
)
def test_a_fact_that_explains_something_is_named(
    tmp_path: Path, path: str, value: Any, group: str, name: str, shown: str
) -> None:
    ((found_group, found_name, a, b),) = changed(tmp_path, path, value)
    assert (found_group, found_name) == (group, name) and shown in f"{a} {b}"


def test_mixtures_are_compared_by_the_contents_of_their_files(tmp_path: Path) -> None:
    def names(*found: dict[str, Any]) -> list[str]:
        return [name for _, name, *_ in changed(tmp_path, "data.files", [*found])]

    web, code = FILES
    assert names(code, web) == ["files.1", "files.2"], "their order"
    assert names({**web, "weight": 0.6}, code) == names({**web, "content_sha256": "c" * 64}, code) == ["files.1"]
    assert names(web, code, {**web, "content_sha256": "c" * 64}) == ["files.3"]
    own = changed(tmp_path, "data", {"source": "own", "version": 2})
    assert [name for _, name, *_ in own] == ["files.1", "files.2", "tokenizer", "version"]


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


def test_a_receipt_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    for text in TEXTS.values():
        path.write_text(text)
        said = Receipt(tmp_path, driver=Nvml()).start({})
        (aside,) = tmp_path.glob("receipt.set_aside-*")
        assert str(path) in said and aside.name in said and load_receipt(path)["attempts"] == []
        assert aside.read_text() == text
        aside.unlink()


@pytest.mark.parametrize("name", ["goodput.jsonl", "metrics.jsonl"])
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    attempt(tmp_path / "run")
    (tmp_path / "run" / name).write_text('{"x": 1}\n{"x": 2}\n')
    assert command.main(["show", str(tmp_path / "run")]) == 2
    assert re.search(name, capsys.readouterr().err)
