"""Receipts: what one holds at the start and at the end, how attempts stay short, the figures, and what cannot be read."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs
from made_runs import train_line
from played_nvml import AT_ITS_CAP, HW_THERMAL, IDLE, Gpu, Nvml

from jaxtrain import config, metrics, receipt
from jaxtrain.receipt import FORMAT, Receipt, ReceiptError, attempts, figures, lineage, load, machine, software, things
from jaxtrain.receipt import __main__ as command
from jaxtrain.receipt.golden import kept
from jaxtrain.receipt.opened import open_run

RESOLVED = config.to_dict(config.RunConfig())


@pytest.fixture(autouse=True)
def source_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Git and the digests of all files are tried where a real run writes them."""
    monkeypatch.setattr(
        receipt, "source", lambda *args: {"commit": "c" * 40, "dirty": False, "patch": "", "files": {"a.py": "d"}}
    )


def driver(*gpus: Gpu, **options: Any) -> Nvml:
    """A driver whose GPUs are idle."""
    for gpu in gpus:
        gpu.reasons = IDLE
    return Nvml(*gpus, **options)


# ---- What it holds


def test_a_killed_run_has_what_was_known_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [{"name": "driver", "state": "ok", "seen": "580"}, {"name": "disk", "state": "note", "seen": "nearly full"}]
    fit = {"verdict": "fit", "seconds": 3.0, "nodes": [{"host": "a", "checks": checks, "measured": {"h2d_gb_s": [55.0]}}]}
    (tmp_path / "preflight.json").write_text(json.dumps(fit))
    told = {"JAXTRAIN_PREFLIGHT": str(tmp_path / "preflight.json"), "JAXTRAIN_HOST_CLASS": "8 x NVIDIA H200"}
    for name, value in {**told, "JAXTRAIN_COMMIT": "abc", "JAXTRAIN_DIRTY": "no"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {3, 5, 7})
    slip = Receipt(tmp_path, nvml=driver(Gpu(), Gpu(), Gpu()))
    slip.start({"resolved": RESOLVED, "devices": receipt.device_facts(jax.devices())}, runs.REPO / "configs" / "tiny.py")
    found = load(tmp_path / "receipt.json")
    assert (found["format"], found["exit_code"], found["resolved"]) == (FORMAT, None, json.loads(json.dumps(RESOLVED)))
    short = [{"name": "driver", "state": "ok"}, checks[1]]
    assert slip.preflight == fit and found["preflight"] == {**fit, "nodes": [{**fit["nodes"][0], "checks": short}]}
    assert found["launch"] == {"commit": "abc", "dirty": False, "host_class": "8 x NVIDIA H200", "by": "run.sh"}
    assert (found["versions"]["driver"], found["versions"]["driver_cuda"]) == ("580.65.06", "13.0")
    assert found["packages"]["jax"] == jax.__version__
    assert found["devices"]["count"] == jax.device_count() and found["devices"]["platform"] == ["cpu"]
    assert found["host"]["cpus"] == 3, "those that the process may use"
    assert found["hardware"]["topology"] == {"nvlinks": [16, 16, 16], "pairs": {"NVLink": 1, "PHB": 2}}
    assert found["hardware"]["gpus"][1] == {
        "index": 1,
        "name": "NVIDIA H200",
        "uuid": "GPU-10ac6aa1",
        "pci": "0000:18:00.0",
        "nics": [],
        "power_limit_w": 700.0,
        "power_limit_default_w": 700.0,
        "max_sm_clock_mhz": 1980,
        "max_memory_clock_mhz": 1980,
        "ecc": True,
    }
    assert found["hardware"]["before"][0]["throttle_reasons"] == "" and "after" not in found["hardware"]
    assert found["hardware"]["before"][0]["ecc_uncorrected"] == 0 and found["hardware"]["before"][0]["power_w"] == 650.0
    with pytest.raises(ValueError, match="packages"):
        Receipt(tmp_path / "other").start({"packages": {}})


def test_the_end_adds_clocks_and_figures(tmp_path: Path) -> None:
    gpu = Gpu()
    slip = Receipt(tmp_path, nvml=Nvml(gpu))
    slip.start({"memory_gib": {"peak": 120.0}, "planned": {"step_s": 0.4, "peak_gib": 100.0}})
    with metrics.Writers(tmp_path) as writers:
        for step in range(1, 31):
            writers.train(**train_line(step, step_time_s=0.5, peak_memory_gib=110.0))
    save = {"step": 10, "bytes": 4e9, "blocked_s": 0.25, "copied_s": 0.1, "total_s": 2.0, "host_gib": 9.0}
    slip.saved(save)
    slip.saved(save | {"step": 20, "blocked_s": 0.75, "total_s": 4.0, "host_gib": 10.0})
    gpu.reasons = AT_ITS_CAP | HW_THERMAL
    slip.finish(0, "30 steps done")
    found = load(tmp_path / "receipt.json")
    assert found["hardware"]["after"][0]["throttle_reasons"] == "sw_power_cap+hw_thermal"
    assert found["measured_over_planned"] == {"step_s": 1.25, "peak_gib": 1.1}
    times = {"seconds": {"median": 3.0, "max": 4.0}, "gb_per_s": 1.5, "loop_waited_s": 1.0}
    assert found["saves"] == {"count": 2, **times, "host_gib": 10.0} and found["save"]["step"] == 20
    assert list(found)[-1] == "attempts"


def test_whatever_fails_at_the_end_costs_the_figures_and_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(nvml: Any) -> None:
        raise OverflowError("an error of nobody's")

    monkeypatch.setattr(machine, "clocks", broken)
    for folder, text in ((tmp_path / "damaged", "x\n{}\n"), (tmp_path / "broken", metrics.encode(lines(1)[0]) + "\n")):
        slip = Receipt(folder, nvml=driver(Gpu()))
        slip.start({})
        (folder / "metrics.jsonl").write_text(text)
        slip.finish(75, "SIGTERM")
        found = load(folder / "receipt.json")
        assert (found["exit_code"], found["reason"]) == (75, "SIGTERM")
    assert found["no_figures"] == "OverflowError: an error of nobody's" and found["loss_at"] == {"1": 10.0}
    assert any("metrics.jsonl:1" in note for note in open_run(tmp_path / "damaged").notes)


def test_a_lost_gpu_costs_neither_the_receipt_nor_the_exit_code(tmp_path: Path) -> None:
    nvml = driver(Gpu(), Gpu(lost=True), Gpu())
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


def test_what_is_not_told_is_null() -> None:
    found = machine.hardware(Nvml(driver=False))
    assert found["gpus"] == [] and found.keys() == {"cpu", "kernel", "gpus"} and found["cpu"]["count"] > 0
    assert machine.clocks(Nvml(driver=False)) == [] and software.native(Nvml(driver=False), {})["driver"] is None
    asked = frozenset(f"nvmlDeviceGet{name}" for name in ("EccMode", "PowerUsage", "CurrentClocksThrottleReasons"))
    found = machine.hardware(Nvml(Gpu(broken=asked)))
    assert found["gpus"][0]["ecc"] is None
    assert (found["before"][0]["power_w"], found["before"][0]["throttle_reasons"]) == (None, None)


def test_no_secret_and_nothing_of_one_attempt_alone_is_kept() -> None:
    kept = dict.fromkeys(("NCCL_ALGO", "SLURM_JOB_ID", "XLA_FLAGS", "NCCL_DEBUG", "JAX_PLATFORMS"), "1")
    attempt, secret = ("JAXTRAIN_RESTART", "JAXTRAIN_NOTE", "HOME"), ("NCCL_API_KEY", "JAX_private", "UCX_PASSWD", "SLURM_JWT")
    assert software.environment(kept | dict.fromkeys((*attempt, *secret, "HF_TOKEN", "JAX_SOME_TOKEN"), "x")) == kept


def test_the_container_is_told_and_never_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "PODMAN", tmp_path / "podman")
    monkeypatch.setattr(software, "DOCKER", tmp_path / "docker")
    assert software.container({}) is None
    (tmp_path / "docker").touch()
    assert software.container({}) == "an image without a name"
    (tmp_path / "podman").write_text('engine="podman-5"\nimage="jaxtrain:1"\nimageid="ab12"\n')
    assert software.container({}) == "jaxtrain:1 (ab12)"
    assert software.container({"JAXTRAIN_IMAGE": "jaxtrain@sha256:9"}) == "jaxtrain@sha256:9"


# ---- Attempts


def test_attempts_are_kept_short_and_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = []
    monkeypatch.setenv("JAXTRAIN_PREFLIGHT", str(tmp_path / "preflight.json"))
    checks = [{"name": f"check {i}", "state": "note", "seen": "x" * 200} for i in range(40)]
    for number in range(10):
        monkeypatch.setenv("JAXTRAIN_RESTART", str(number))
        (tmp_path / "preflight.json").write_text(json.dumps({"seconds": number, "nodes": [{"checks": checks}]}))
        slip = Receipt(tmp_path, nvml=driver(Gpu()))
        resolved = {**RESOLVED, "precision": "f32"} if number < 2 else RESOLVED
        slip.start({"resolved": resolved, "env": {"set": {"A": str(number // 5)}, "inherited": {}}})
        if number % 2:  # the others are killed
            slip.finish(75, "SIGTERM", {"last_step": number})
        whole.append({name: value for name, value in slip.fields.items() if name != "attempts"})
    found = load(tmp_path / "receipt.json")
    assert [found["attempt"], found["exit_code"], found["reason"], found["last_step"]] == [10, 75, "SIGTERM", 9]
    assert attempts(found) == json.loads(json.dumps(whole)) and not any("attempts" in a for a in found["attempts"])
    assert [a["exit_code"] for a in found["attempts"]] == [None, 75] * 4 + [None]
    assert "resolved" not in found["attempts"][0] and found["attempts"][1]["resolved"]["precision"] == "f32"
    assert found["attempts"][4]["env"] == {"set": {"A": "0"}} and found["attempts"][5]["preflight"] == {"seconds": 5}
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
    fourth = attempt(4, loaded=read_from(3, 30))
    assert lineage.lineage([first, second, third, fourth]) == ([first, third, fourth], None)
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


# ---- What cannot be read, and the command line


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


def test_a_receipt_that_cannot_be_read_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    for text in ("{", '{"format": 99, "attempts": []}', "[]"):
        path.write_text(text)
        with pytest.raises(ReceiptError, match="not a receipt|format 99"):
            Receipt(tmp_path).start({})
        assert path.read_text() == text


@pytest.mark.parametrize("line", [[], ["check", "a"], ["check", "a", "b", "--save=c"], ["diff", "a"], ["nothing"]])
def test_a_wrong_command_line(line: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(line)


def test_a_run_without_losses_is_no_golden_one(tmp_path: Path) -> None:
    Receipt(tmp_path).start({})
    with pytest.raises(ReceiptError, match="no loss was written"):
        kept(open_run(tmp_path))


def test_digests_of_configs() -> None:
    assert receipt.config_sha256({"a": 2, "b": 1}) == receipt.config_sha256({"b": 1, "a": 2})
    assert receipt.config_sha256({"a": 2, "b": 1}) != receipt.config_sha256({"a": 2, "b": 2})


def test_the_network_card_beside_each_gpu(tmp_path):
    """By the PCIe bridges that both are behind; cards of another socket share none."""
    switch, other = "devices/pci0000:00/0000:00:01.0/0000:01:00.0", "devices/pci0000:80/0000:80:01.0"
    places = {
        f"{switch}/0000:02:00.0/0000:03:00.0": "mlx5_0",
        f"{switch}/0000:02:01.0/0000:04:00.0": "mlx5_1",
        f"{other}/0000:81:00.0": "mlx5_2",
    }
    gpus = {
        "0000:1b:00.0": f"{switch}/0000:02:00.0/0000:1b:00.0",
        "0000:1c:00.0": f"{switch}/0000:02:02.0/0000:1c:00.0",
        "0000:c1:00.0": "devices/pci0000:c0/0000:c1:00.0",
    }
    for place in (*places, *gpus.values()):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    for address, place in gpus.items():
        (tmp_path / "bus/pci/devices" / address).symlink_to(tmp_path / place)
    for place, name in places.items():
        (tmp_path / "class/infiniband" / name).mkdir(parents=True)
        (tmp_path / "class/infiniband" / name / "device").symlink_to(tmp_path / place)
    assert machine.nearest_nics("00000000:1B:00.0", tmp_path) == ["mlx5_0"]
    assert machine.nearest_nics("00000000:1C:00.0", tmp_path) == ["mlx5_0", "mlx5_1"]
    assert machine.nearest_nics("00000000:C1:00.0", tmp_path) == [] and machine.nearest_nics(None, tmp_path) == []
