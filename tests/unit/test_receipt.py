"""Receipts: what one holds at the start and at the end, how attempts stay short, the figures, and the golden run."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest
import runs
from test_metrics import train_line

from jaxtrain import config, metrics
from jaxtrain.receipt import (
    FORMAT,
    Receipt,
    ReceiptError,
    attempts,
    figures,
    git_state,
    lineage,
    load,
    machine,
    software,
    things,
)
from jaxtrain.receipt import __main__ as command
from jaxtrain.receipt.golden import check, kept, passed
from jaxtrain.receipt.opened import open_run
from jaxtrain.receipt.settings import NO_EFFECT, matches
from jaxtrain.receipt.source import PATCH_MOST, own_files, source

RESOLVED = config.to_dict(config.RunConfig())


@dataclasses.dataclass
class Gpu:
    limit_mw: int = 700_000
    reasons: int = 0x1
    lost: bool = False


class Nvml:
    """A driver with these GPUs, which are their own handles; `broken` are functions that they refuse."""

    def __init__(self, *gpus: Gpu, broken: tuple[str, ...] = ()):
        self.gpus, self.broken = gpus, broken

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return getattr(pynvml, name)  # constants and errors

        def ask(*args: Any) -> Any:
            if name in self.broken:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            found = getattr(self, name.removeprefix("nvml"))
            return found(*args) if callable(found) else found

        return ask

    Init = Shutdown = None
    SystemGetDriverVersion, SystemGetCudaDriverVersion = "580.65.06", 13000
    DeviceGetName, DeviceGetUUID, DeviceGetEccMode = b"NVIDIA H200", "GPU-1", [1, 1]
    DeviceGetPowerManagementDefaultLimit, DeviceGetPowerUsage, DeviceGetTemperature = 700_000, 121_000, 31
    DeviceGetClockInfo, DeviceGetMaxClockInfo = 345, 1980
    DeviceGetTopologyCommonAncestor = 30

    def DeviceGetCount(self) -> int:
        return len(self.gpus)

    def DeviceGetHandleByIndex(self, index: int) -> Gpu:
        if self.gpus[index].lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.gpus[index]

    def DeviceGetPciInfo(self, gpu: Gpu) -> Any:
        return type("Pci", (), {"busId": b"0000:18:00.0"})()

    def DeviceGetPowerManagementLimit(self, gpu: Gpu) -> int:
        return gpu.limit_mw

    def DeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:
        return gpu.reasons

    def DeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        return 0 if counter == pynvml.NVML_VOLATILE_ECC else 12  # of its life

    def DeviceGetNvLinkState(self, gpu: Gpu, link: int) -> int:
        return int(link < 16)

    def DeviceGetP2PStatus(self, one: Gpu, other: Gpu, what: int) -> int:
        return int(self.gpus[-1] is other)  # 0: linked; the last is not


# ---- What it holds


def test_a_killed_run_has_what_was_known_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [{"name": "driver", "state": "ok", "seen": "580"}, {"name": "disk", "state": "note", "seen": "nearly full"}]
    fit = {"verdict": "fit", "seconds": 3.0, "nodes": [{"host": "a", "checks": checks, "measured": {"h2d_gb_s": [55.0]}}]}
    (tmp_path / "preflight.json").write_text(json.dumps(fit))
    told = {"JAXTRAIN_PREFLIGHT": str(tmp_path / "preflight.json"), "JAXTRAIN_HOST_CLASS": "8 x NVIDIA H200"}
    for name, value in {**told, "JAXTRAIN_COMMIT": "abc", "JAXTRAIN_DIRTY": "no"}.items():
        monkeypatch.setenv(name, value)
    slip = Receipt(tmp_path, nvml=Nvml(Gpu(), Gpu(), Gpu()))
    slip.start({"resolved": RESOLVED}, runs.REPO / "configs" / "tiny.py")
    found = load(tmp_path / "receipt.json")
    assert (found["format"], found["exit_code"], found["resolved"]) == (FORMAT, None, json.loads(json.dumps(RESOLVED)))
    assert found["source"]["config_file"] == "configs/tiny.py" and "jaxtrain/train.py" in found["source"]["files"]
    short = [{"name": "driver", "state": "ok"}, checks[1]]
    assert slip.preflight == fit and found["preflight"] == {**fit, "nodes": [{**fit["nodes"][0], "checks": short}]}
    assert found["launch"] == {"commit": "abc", "dirty": False, "host_class": "8 x NVIDIA H200", "by": "run.sh"}
    assert (found["versions"]["driver"], found["versions"]["driver_cuda"]) == ("580.65.06", "13.0")
    assert found["hardware"]["topology"] == {"nvlinks": [16, 16, 16], "pairs": {"NVLink": 1, "PHB": 2}}
    assert found["hardware"]["gpus"][1] == {
        "index": 1,
        "name": "NVIDIA H200",
        "uuid": "GPU-1",
        "pci": "0000:18:00.0",
        "power_limit_w": 700.0,
        "power_limit_default_w": 700.0,
        "max_sm_clock_mhz": 1980,
        "max_memory_clock_mhz": 1980,
        "ecc": True,
    }
    assert found["hardware"]["before"][0]["throttle_reasons"] == "" and "after" not in found["hardware"]
    assert found["hardware"]["before"][0]["ecc_uncorrected"] == 0


def test_the_end_adds_clocks_and_figures(tmp_path: Path) -> None:
    gpu = Gpu()
    slip = Receipt(tmp_path, nvml=Nvml(gpu))
    slip.start({"memory_gib": {"peak": 120.0}, "planned": {"step_s": 0.4, "peak_gib": 100.0}})
    with metrics.Writers(tmp_path) as writers:
        for step in range(1, 31):
            writers.train(**{**train_line(step), "step_time_s": 0.5, "peak_memory_gib": 110.0})
    slip.saved({"step": 10, "bytes": 4e9, "blocked_s": 0.25, "copied_s": 0.1, "total_s": 2.0, "host_gib": 9.0})
    slip.saved({"step": 20, "bytes": 4e9, "blocked_s": 0.75, "copied_s": 0.1, "total_s": 4.0, "host_gib": 10.0})
    gpu.reasons = 0x4 | 0x40
    slip.finish(0, "30 steps done")
    found = load(tmp_path / "receipt.json")
    assert found["hardware"]["after"][0]["throttle_reasons"] == "sw_power_cap+hw_thermal"
    assert found["measured_over_planned"] == {"step_s": 1.25, "peak_gib": 1.1}
    assert found["saves"] == {
        "count": 2,
        "seconds": {"median": 3.0, "max": 4.0},
        "gb_per_s": 1.5,
        "loop_waited_s": 1.0,
        "host_gib": 10.0,
    }
    assert list(found)[-1] == "attempts"


def test_a_damaged_metrics_file_costs_the_figures_and_not_the_end(tmp_path: Path) -> None:
    slip = Receipt(tmp_path)
    slip.start({})
    (tmp_path / "metrics.jsonl").write_text("x\n{}\n")
    slip.finish(1, "it failed")
    found = load(tmp_path / "receipt.json")
    assert (found["exit_code"], found["reason"]) == (1, "it failed") and "metrics.jsonl:1" in found["no_figures"]
    assert any("metrics.jsonl:1" in note for note in open_run(tmp_path).notes)


def test_a_lost_gpu_costs_neither_the_receipt_nor_the_exit_code(tmp_path: Path) -> None:
    nvml = Nvml(Gpu(), Gpu(lost=True), Gpu())
    slip = Receipt(tmp_path, nvml=nvml)
    slip.start({})
    found = load(tmp_path / "receipt.json")["hardware"]
    assert found["gpus"][1] == found["before"][1] == {"index": 1, "lost": True}
    assert found["gpus"][2]["index"] == 2 and found["topology"]["nvlinks"] == [16, 16]
    nvml.gpus[0].lost = True
    slip.finish(75, "a peer died")
    found = load(tmp_path / "receipt.json")
    assert found["exit_code"] == 75 and [gpu.get("lost", False) for gpu in found["hardware"]["after"]] == [True, True, False]
    assert things.described(found)["GPUs: name"] == "2 x NVIDIA H200, 1 x lost"
    assert command.main(["show", str(tmp_path)]) == 0


def test_whatever_fails_at_the_end_is_told_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slip = Receipt(tmp_path, nvml=Nvml(Gpu()))
    slip.start({})
    with metrics.Writers(tmp_path) as writers:
        writers.train(**train_line(1))

    def broken(nvml: Any) -> None:
        raise OverflowError("an error of nobody's")

    monkeypatch.setattr(machine, "clocks", broken)
    slip.finish(75, "SIGTERM")
    found = load(tmp_path / "receipt.json")
    assert (found["exit_code"], found["no_figures"]) == (75, "OverflowError: an error of nobody's") and found["loss_at"]


def test_without_gpus_there_are_facts_of_the_host_alone() -> None:
    found = machine.hardware(Nvml(broken=("nvmlInit",)))
    assert found["gpus"] == [] and found.keys() == {"cpu", "kernel", "gpus"} and found["cpu"]["count"] > 0
    assert machine.clocks(Nvml(broken=("nvmlInit",))) == []
    assert software.native(Nvml(broken=("nvmlInit",)), {})["driver"] is None


def test_what_a_gpu_does_not_tell_is_null() -> None:
    asked = ("EccMode", "PowerUsage", "CurrentClocksThrottleReasons")
    found = machine.hardware(Nvml(Gpu(), broken=tuple(f"nvmlDeviceGet{name}" for name in asked)))
    assert found["gpus"][0]["ecc"] is None
    assert (found["before"][0]["power_w"], found["before"][0]["throttle_reasons"]) == (None, None)


def test_processors_are_those_that_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {3, 5, 7})
    Receipt(tmp_path, nvml=Nvml(broken=("nvmlInit",))).start({})
    assert load(tmp_path / "receipt.json")["host"]["cpus"] == 3


def test_no_secret_and_nothing_of_one_attempt_alone_is_kept() -> None:
    kept = {"NCCL_ALGO": "Ring", "SLURM_JOB_ID": "7"}
    told = {
        "JAXTRAIN_RESTART": "2",
        "JAXTRAIN_NOTE": "/x",
        "NCCL_API_KEY": "k",
        "JAX_private": "p",
        "UCX_PASSWD": "x",
        "HOME": "/",
    }
    assert software.environment({**told, **kept}) == kept


def test_the_container_is_told_and_never_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "PODMAN", tmp_path / "podman")
    monkeypatch.setattr(software, "DOCKER", tmp_path / "docker")
    assert software.container({}) is None
    (tmp_path / "docker").touch()
    assert software.container({}) == "an image without a name"
    (tmp_path / "podman").write_text('engine="podman-5"\nimage="jaxtrain:1"\nimageid="ab12"\n')
    assert software.container({}) == "jaxtrain:1 (ab12)"
    assert software.container({"JAXTRAIN_IMAGE": "jaxtrain@sha256:9"}) == "jaxtrain@sha256:9"


def test_source_of_a_users_own_parts(tmp_path: Path) -> None:
    parts = own_files({"model": {"family": "not_there:Family"}, "data": {"source": "metrics:x, gs://b/c", "lr": 1.0}})
    assert parts == []  # nothing of the kind has been imported
    import helpers

    parts = own_files({"model": {"family": "helpers:WiderFamily"}})
    assert parts == [Path(helpers.__file__)]
    (tmp_path / "mine.py").write_text("x = 1\n")
    found = source(runs.REPO / "jaxtrain", tmp_path / "mine.py", parts)
    assert (found["config_file"], found["own"]) == ("mine.py", ["tests/helpers.py"])  # no folder of a user's is told
    assert {"mine.py", "tests/helpers.py", "jaxtrain/__init__.py"} <= found["files"].keys()
    assert len(found["patch"]) <= PATCH_MOST


def test_git_is_asked_in_its_own_language_and_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "git"
    said = '[ "$LC_ALL" = C ] && echo "fatal: not a git repository" >&2 || echo "fatal: kein Git-Repository" >&2'
    fake.write_text(f'#!/bin/sh\n[ "$GIT_OPTIONAL_LOCKS" = 0 ] || exit 0\n{said}\nexit 128\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.delenv("GIT_OPTIONAL_LOCKS", raising=False)
    assert git_state(tmp_path) is None


# ---- Attempts


def test_attempts_are_kept_short_and_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = []
    monkeypatch.setenv("JAXTRAIN_PREFLIGHT", str(tmp_path / "preflight.json"))
    checks = [{"name": f"check {i}", "state": "note", "seen": "x" * 200} for i in range(40)]
    for number in range(40):
        monkeypatch.setenv("JAXTRAIN_RESTART", str(number))
        (tmp_path / "preflight.json").write_text(json.dumps({"seconds": number, "nodes": [{"checks": checks}]}))
        slip = Receipt(tmp_path, nvml=Nvml(Gpu()))
        resolved = {**RESOLVED, "precision": "f32"} if number < 2 else RESOLVED
        slip.start({"resolved": resolved, "env": {"set": {"A": str(number // 20)}, "inherited": {}}})
        if number % 2:
            slip.finish(75, "SIGTERM")
        whole.append({name: value for name, value in slip.fields.items() if name != "attempts"})
    found = load(tmp_path / "receipt.json")
    assert attempts(found) == json.loads(json.dumps(whole))
    assert "resolved" not in found["attempts"][0] and found["attempts"][1]["resolved"]["precision"] == "f32"
    assert found["attempts"][19]["env"] == {"set": {"A": "0"}} and found["attempts"][5]["preflight"] == {"seconds": 5}
    assert all(len(json.dumps(each)) < 4000 for each in found["attempts"][2:])


def test_a_receipt_of_the_format_before_is_read_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {"format": 1, "id": "a", "attempt": 1, "started": "2026-01-01", "ended": None, "exit_code": None, "reason": None}
    old |= {"git": {"commit": "abc", "dirty": True}, "host": {"cpus": 2, "system": "Linux"}, "attempts": []}
    (tmp_path / "receipt.json").write_text(json.dumps(old))
    assert command.main(["show", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "format 1" in said and "no end: killed, or still running" in said and "abc, with changes" in said
    slip = Receipt(tmp_path)
    slip.start({})
    first, second = attempts(load(tmp_path / "receipt.json"))
    assert first == {name: value for name, value in old.items() if name != "attempts"} and second["attempt"] == 2


def attempt(number: int, **fields: Any) -> dict[str, Any]:
    return {"format": FORMAT, "id": f"id{number}", "attempt": number, **fields}


def read_from(number: int, step: int = 10) -> dict[str, Any]:
    """`loaded` of what an attempt saved."""
    return {"from": "/x/checkpoints", "step": step, "saved_by": f"id{number}", "digest": f"digest of {number}"}


def test_the_state_of_a_run_is_of_those_attempts_that_saved_what_was_read() -> None:
    first, second = attempt(1, loaded=None), attempt(2, loaded=read_from(1))  # the second saved nothing
    third = attempt(3, loaded=read_from(1, 20))
    assert lineage.lineage([first, second, third]) == ([first, third], None)
    assert lineage.lineage([first, attempt(2, loaded=None)])[0][0]["attempt"] == 2  # began anew
    foreign = read_from(9)
    assert lineage.lineage([attempt(1, loaded=foreign), second]) == ([attempt(1, loaded=foreign), second], foreign)
    weights = lineage.of_weights("hf:model", "d" * 32)
    assert lineage.lineage([attempt(1, loaded=weights), second])[1] == weights
    # Before `loaded` was written.
    old = [attempt(1, resumed_from_step=None), attempt(2, resumed_from_step=5)]
    assert lineage.lineage(old) == (old, None)
    (_, origin) = lineage.lineage([attempt(1, resumed_from_step=1000)])
    assert lineage.described(origin) == "step 1000"


def test_an_attempt_began_where_it_first_began(tmp_path: Path) -> None:
    slip = Receipt(tmp_path)
    slip.start({})
    slip.began(None)
    slip.began(read_from(1))  # it diverged, and went back
    assert load(tmp_path / "receipt.json")["loaded"] is None


# ---- Figures


def lines(count: int, first: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """Train lines whose step takes as many milliseconds as its number says; the first of them slow."""
    out = []
    for step in range(first, first + count):
        seconds = 10.0 if step < first + 2 else step / 1000
        rates = {"tokens_per_s_per_device": 100 / seconds, "tokens_per_s": 800 / seconds, "tflops_per_device": 5 / seconds}
        rates |= {"mfu_causal": 0.01 / seconds, "mfu_full": 0.02 / seconds, "hfu": None}
        out.append({"kind": "train", "step": step, "loss": 10.0 / step, "step_time_s": seconds, **rates, **fields})
    return out


def test_speed_is_that_of_a_stated_window() -> None:
    found = figures.speed([*lines(100), {"kind": "eval", "step": 50, "loss": 1.0}])
    taken = np.arange(21, 101) / 1000
    assert found["window"] == {
        "first_step": 21,
        "last_step": 100,
        "lines": 80,
        "left_out": 20,
        "rule": "train lines of this attempt that have a step time, without the first 20% of them",
    }
    step = found["step_time_s"]
    assert step == pytest.approx({"median": np.median(taken), "p10": np.quantile(taken, 0.1), "p90": np.quantile(taken, 0.9)})
    assert found["mfu_causal"] == pytest.approx(np.median(0.01 / taken)) and found["hfu"] is None
    assert found["peak_tflops"] == pytest.approx(500.0)
    assert set(found["formula"]) == set(figures.RATES) - {"tokens_per_s"}


def test_of_too_few_lines_no_speed_is_told() -> None:
    found = figures.speed([*lines(6), *lines(3, 7, step_time_s=None)])
    assert found["step_time_s"] is None and found["window"] is None and found["why"].startswith("4 train lines")


def test_figures_are_those_of_this_attempt_and_losses_of_the_run() -> None:
    found = figures.of_run([*lines(50), *lines(50, 51)], {"resumed_from_step": 50})
    assert found["speed"]["window"]["first_step"] == 61
    assert list(found["loss_at"]) == ["1", "2", "5", "10", "20", "50", "100"] and found["loss_at"]["20"] == 0.5


def test_losses_that_are_no_numbers_are_words() -> None:
    found = figures.loss_at([*lines(4), *lines(1, 5, loss=math.nan), *lines(1, 10, loss=-math.inf), *lines(1, 11, loss=None)])
    assert found == {"1": 10.0, "2": 5.0, "5": "nan", "10": "-inf"}
    json.loads(json.dumps(found), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert figures.loss_at([]) == {}


def test_memory_says_who_told() -> None:
    train = lines(3, memory_gib=70.0, peak_memory_gib=110.5)
    gpu = [{"kind": "gpu", "step": 3, "pool_gib": 132.0}, {"kind": "gpu", "step": 3, "pool_gib": None}]
    found = figures.memory([*train, *gpu], {"peak": 109.0})
    assert found == {"peak_gib": 110.5, "in_use_gib": 70.0, "pool_gib": 132.0, "compiler_peak_gib": 109.0}
    nothing = figures.memory(lines(3), {})
    assert set(nothing.values()) == {None}


def test_throttling_is_a_share_of_the_time_and_of_this_attempt() -> None:
    def gpu(step: int, index: int, share: float | None, why: str = "") -> dict[str, Any]:
        return {"kind": "gpu", "step": step, "gpu": index, "throttled": share, "throttle_reasons": why}

    watched = [gpu(1, 0, 1.0, "hw_thermal"), gpu(11, 0, 0.5, "sw_thermal"), gpu(12, 0, 0.1, "sw_thermal+hw_slowdown")]
    watched += [gpu(11, 1, 0.0), gpu(12, 1, None), gpu(11, 2, None)]
    found = figures.of_run(watched, {"resumed_from_step": 10})["throttled"]
    assert found == [{"gpu": 0, "share": pytest.approx(0.3), "reasons": "sw_thermal+hw_slowdown"}]


# ---- A golden run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run long enough for a speed, on this process's devices."""
    folder = tmp_path_factory.mktemp("golden")
    (folder / "small.py").write_text(runs.SMALL)
    run = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "log__tensorboard": False, "model__num_layers": 1}
    assert runs.train(folder / "small.py", folder / "run", data__source="synthetic", train__steps=20, **run) == 0
    return folder / "run"


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

    receipt = runs.receipt(trained)
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    receipt["memory"]["compiler_peak_gib"] = 0.505
    (copy / "receipt.json").write_text(json.dumps(receipt))
    assert [state for state, _ in altered(copy, tmp_path, change)[1:3]] == ["WORSE", "ok"]
    assert [state for state, _ in altered(copy, tmp_path, change, slower=60, more_memory=0.5)[1:3]] == ["ok", "WORSE"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_gpus_repeat_their_bits_where_they_are_told_to(trained: Path, tmp_path: Path, deterministic: bool) -> None:
    receipt, copy = runs.receipt(trained), tmp_path / "run"
    shutil.copytree(trained, copy)
    receipt["devices"]["platform"] = ["gpu"]
    receipt["resolved"] = json.loads((copy / "config.json").read_text())
    receipt["resolved"]["train"]["deterministic"] = deterministic
    (copy / "receipt.json").write_text(json.dumps(receipt))
    rule = altered(copy, tmp_path, lambda golden: None)[0][1]
    assert rule.startswith("bit for bit" if deterministic else "within 1%")


def test_another_computation_proves_nothing(trained: Path, tmp_path: Path) -> None:
    def other(golden: dict[str, Any]) -> None:
        golden["resolved"]["optimizer"]["lr"] = 1.0

    def layout(golden: dict[str, Any]) -> None:
        golden["resolved"]["remat"]["policy"] = "full"

    def beside(golden: dict[str, Any]) -> None:
        golden["resolved"]["eval"]["sequences"] = 7

    assert altered(trained, tmp_path, other)[0] == ("not compared", "another computation: config optimizer.lr")
    assert altered(trained, tmp_path, layout)[0][1].startswith("within 1%")
    assert altered(trained, tmp_path, beside)[0][1].startswith("bit for bit")


def test_a_key_that_is_newer_than_the_golden_receipt_has_its_default(trained: Path, tmp_path: Path) -> None:
    def older(golden: dict[str, Any]) -> None:
        del golden["resolved"]["optimizer"]["clip_norm"], golden["resolved"]["loss"]

    assert altered(trained, tmp_path, older)[0][1].startswith("bit for bit")
    golden = kept(open_run(trained))
    del golden["resolved"]["optimizer"]["lr"]  # whose value here is not the default
    (tmp_path / "golden.json").write_text(json.dumps(golden))
    assert check(open_run(trained), open_run(tmp_path / "golden.json"))[0].rule.endswith("config optimizer.lr")


def in_two_attempts(trained: Path, folder: Path, **first: Any) -> Path:
    """A copy of the run whose receipt has one attempt more, before it, of which some fields are others."""
    shutil.copytree(trained, folder)
    receipt = runs.receipt(trained)
    early = {**{name: value for name, value in receipt.items() if name != "attempts"}, "id": "early", **first}
    loaded = {"from": "/x", "step": 10, "saved_by": "early", "digest": "d" * 64}
    (folder / "receipt.json").write_text(json.dumps({**receipt, "attempt": 2, "attempts": [early], "loaded": loaded}))
    return folder


def test_an_earlier_attempt_with_another_config_proves_nothing(trained: Path, tmp_path: Path) -> None:
    other = {**runs.receipt(trained)["resolved"]}
    other["optimizer"] = {**other["optimizer"], "lr": 0.9}
    mixed = in_two_attempts(trained, tmp_path / "mixed", resolved=other)
    found = check(open_run(mixed), open_run(trained))
    assert (found[0].state, found[0].rule) == ("not compared", "another computation: config optimizer.lr (in earlier attempts)")
    assert not passed(found)
    with pytest.raises(ReceiptError, match="its attempts ran with other config optimizer.lr"):
        kept(open_run(mixed))
    alike = in_two_attempts(trained, tmp_path / "alike")
    assert passed(check(open_run(alike), open_run(trained))) and kept(open_run(alike))["loaded"] is None


def test_a_state_that_came_from_elsewhere_proves_nothing(trained: Path, tmp_path: Path) -> None:
    folder = in_two_attempts(trained, tmp_path / "run", loaded=read_from(9))
    found = check(open_run(folder), open_run(trained))[0]
    assert (found.state, found.rule) == ("not compared", "another computation: data first state")
    golden = kept(open_run(folder))
    assert golden["loaded"] == {**read_from(9), "from": None}
    (tmp_path / "golden.json").write_text(json.dumps(golden))
    assert passed(check(open_run(folder), open_run(tmp_path / "golden.json")))


def with_fields(trained: Path, folder: Path, **fields: Any) -> Path:
    """A copy of the run whose receipt says something else."""
    shutil.copytree(trained, folder)
    (folder / "receipt.json").write_text(json.dumps(runs.receipt(trained) | fields))
    return folder


@pytest.mark.parametrize("code", [130, 1, None])
def test_half_a_run_proves_nothing_and_is_no_golden_one(trained: Path, tmp_path: Path, capsys, code: int | None) -> None:
    half = with_fields(trained, tmp_path / "half", exit_code=code, reason="left early")
    for one, other in ((half, trained), (trained, half)):
        assert command.main(["check", str(one), str(other)]) == 1
        assert "not proved: not both runs ended with 0" in capsys.readouterr().out
    golden = tmp_path / "saved.json"
    assert command.main(["check", str(half), f"--save={golden}"]) == 2
    assert "it has not ended with 0" in capsys.readouterr().err and not golden.exists()


def test_held_out_losses_are_held_to_the_golden_ones(trained: Path, tmp_path: Path) -> None:
    def evaluated(name: str, loss: float | None, **fields: Any) -> Path:
        return with_fields(trained, tmp_path / name, held_out=[{"step": 20, "set": "web", "loss": loss}], **fields)

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
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    hot = runs.receipt(trained) | {"throttled": [{"gpu": 3, "share": 0.4, "reasons": "hw_thermal"}]}
    (folder / "receipt.json").write_text(json.dumps(hot))
    loss, speed, *_ = check(open_run(folder), open_run(trained))
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


# ---- The command


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
    assert f"began with step 10 of /x, digest {'d' * 12}" in rows and "attempt 1 began with made from train.seed" in rows
    assert [row for row in rows if row.startswith("1 started")][0].endswith("no end: killed")
    assert any(" in 1 attempt" in row and "attempts" not in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "nowhere"], "there is no such file or folder"),
        (["show", "empty"], "no receipt.json in this folder"),
        (["list", "empty"], "no receipt.json in this folder or in one below it"),
        (["show", "later.json"], "format 99, this jaxtrain reads 1 and 2"),
        (["diff", "list.json", "list.json"], "not a receipt"),
        (["show", "binary.json"], "Name a run's folder (--workdir of training), or a receipt file."),
        (["show", "damaged"], "Move it away, and the run writes a new one."),
    ],
)
def test_what_cannot_be_read_is_named(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "receipt.json").write_text("{")
    (tmp_path / "later.json").write_text('{"format": 99, "attempts": []}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert command.main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("line", [[], ["check", "a"], ["check", "a", "b", "--save=c"], ["diff", "a"], ["nothing"]])
def test_a_wrong_command_line(line: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(line)


def test_a_run_without_losses_is_no_golden_one(tmp_path: Path) -> None:
    Receipt(tmp_path).start({})
    with pytest.raises(ReceiptError, match="no loss was written"):
        kept(open_run(tmp_path))


def test_every_key_that_is_left_out_is_a_key() -> None:
    keys = config.docs()
    assert [pattern for pattern in NO_EFFECT if not any(matches(key, [pattern]) for key in keys)] == []
