"""Receipts: their contents at the start and at the end, their figures, the comparison of two, and unreadable files."""

import copy
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
from jaxtrain.receipt import Receipt, collect, figures, machine
from jaxtrain.receipt import __main__ as command
from jaxtrain.receipt.diff import GROUPS, compare, differences
from jaxtrain.receipt.format import FORMAT, ReceiptError, flatten, load, open_run

RESOLVED = config.to_dict(config.RunConfig())


@pytest.fixture(autouse=True)
def known_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake git and the digests of files; tests/campaign/test_receipt_diff.py uses the real ones."""
    known = {"commit": "c" * 40, "dirty": False, "patch": "", "files": {"a.py": "d"}}
    monkeypatch.setattr(collect, "source", lambda *args: known)


def driver(*gpus: Gpu, **options: Any) -> Nvml:
    """Return a driver whose GPUs are idle."""
    for gpu in gpus:
        gpu.reasons = IDLE
    return Nvml(*gpus, **options)


# ---- Contents


def test_a_killed_run_has_what_was_known_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [{"name": "vboost", "state": "ok", "seen": "GPU0: 1 of 4"}, {"name": "disk", "state": "note", "seen": "nearly full"}]
    checks = [{"name": "driver", "state": "ok", "seen": "580"}, *kept]
    fit = {"verdict": "fit", "seconds": 3.0, "nodes": [{"host": "a", "checks": checks, "measured": {"h2d_gb_s": [55.0]}}]}
    (tmp_path / "preflight.json").write_text(json.dumps(fit))
    given = {"JAXTRAIN_PREFLIGHT": str(tmp_path / "preflight.json"), "JAXTRAIN_HOST_CLASS": "8 x NVIDIA H200"}
    for name, value in {**given, "JAXTRAIN_COMMIT": "abc", "JAXTRAIN_DIRTY": "no"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {3, 5, 7})
    written = Receipt(tmp_path, nvml=driver(Gpu(), Gpu(), Gpu()))
    devices = machine.device_facts(jax.devices())
    written.start({"resolved": RESOLVED, "devices": devices}, runs.REPO / "configs" / "tiny.py")
    found = load(tmp_path / "receipt.json")
    assert (found["format"], found["exit_code"], found["resolved"]) == (FORMAT, None, json.loads(json.dumps(RESOLVED)))
    assert written.preflight == fit and found["preflight"]["nodes"] == [{**fit["nodes"][0], "checks": kept}]
    assert found["launch"] == {"commit": "abc", "dirty": False, "host_class": "8 x NVIDIA H200"}
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
        raise OverflowError("an error of the driver's own")

    monkeypatch.setattr(machine, "clocks", fail)
    for folder, text in ((tmp_path / "damaged", "x\n{}\n"), (tmp_path / "broken", metrics.encode(lines(1)[0]) + "\n")):
        written = Receipt(folder, nvml=driver(Gpu()))
        written.start({})
        (folder / "metrics.jsonl").write_text(text)
        written.finish(75, "SIGTERM")
        found = load(folder / "receipt.json")
        assert (found["exit_code"], found["reason"]) == (75, "SIGTERM")
    assert found["no_figures"] == "OverflowError: an error of the driver's own" and found["loss_at"] == {"1": 10.0}
    assert "metrics.jsonl:1" in load(tmp_path / "damaged" / "receipt.json")["no_figures"]


def test_a_lost_gpu_costs_neither_the_receipt_nor_the_exit_code(tmp_path: Path) -> None:
    nvml = driver(Gpu(), Gpu(lost=True), Gpu())
    written = Receipt(tmp_path, nvml=nvml)
    written.start({})
    found = load(tmp_path / "receipt.json")["hardware"]
    assert found["gpus"][1] == found["before"][1] == {"index": 1, "lost": True}
    assert found["gpus"][2]["index"] == 2 and found["topology"]["nvlinks"] == [16, 16]
    nvml.gpus[0].lost = True
    written.finish(75, "another process died")
    found = load(tmp_path / "receipt.json")
    assert found["exit_code"] == 75 and [gpu.get("lost", False) for gpu in found["hardware"]["after"]] == [True, True, False]
    assert dict(flatten(found))["hardware.gpus.name"] == "2 x NVIDIA H200"
    assert command.main(["show", str(tmp_path)]) == 0


def test_a_fact_that_is_not_reported_is_null() -> None:
    found, versions = machine.node_facts(Nvml(driver=False))
    assert found["gpus"] == [] and found.keys() == {"cpu", "gpus"} and found["cpu"]["memory_gib"] > 0
    assert machine.clocks(Nvml(driver=False)) == [] and versions == {"driver": None, "driver_cuda": None}
    asked = frozenset(f"nvmlDeviceGet{name}" for name in ("EccMode", "PowerUsage", "CurrentClocksThrottleReasons"))
    found, _ = machine.node_facts(Nvml(Gpu(broken=asked)))
    assert found["gpus"][0]["ecc"] is None
    assert (found["before"][0]["power_w"], found["before"][0]["throttle_reasons"]) == (None, None)


def test_no_secret_and_no_variable_of_one_attempt_is_kept() -> None:
    kept = dict.fromkeys(("NCCL_ALGO", "SLURM_JOB_ID", "XLA_FLAGS", "NCCL_DEBUG", "JAX_PLATFORMS"), "1")
    attempt, secret = ("JAXTRAIN_RESTART", "JAXTRAIN_NOTE", "HOME"), ("NCCL_API_KEY", "JAX_private", "UCX_PASSWD", "SLURM_JWT")
    others = dict.fromkeys((*attempt, *secret, "HF_TOKEN", "JAX_SOME_TOKEN"), "x")
    assert collect.select_environment(kept | others) == kept


def test_the_container_is_named_by_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "CONTAINERS", (tmp_path / "podman", tmp_path / "docker"))
    assert collect.container({}) is None
    (tmp_path / "docker").touch()
    assert collect.container({}) == "unnamed image"
    assert collect.container({"JAXTRAIN_IMAGE": "jaxtrain@sha256:9"}) == "jaxtrain@sha256:9"


# ---- Attempts


def attempt(folder: Path, saves: bool, loaded: dict[str, Any] | None = None, **optimizer: Any) -> Receipt:
    """Add an attempt to a run, with these keys of the optimizer's config."""
    written = Receipt(folder, nvml=driver(Gpu()))
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
    was = f"from {RESOLVED['optimizer']['lr']} to 0.9"
    assert found_in(resumed, plain) == [("config", "optimizer.lr (changed on resume)", was, "absent")]


def test_an_attempt_that_finds_all_steps_done_leaves_the_receipt_of_the_run(tmp_path: Path) -> None:
    trained = attempt(tmp_path, saves=True)
    before = load(tmp_path / "receipt.json")
    idle = Receipt(tmp_path, nvml=driver(Gpu()))
    idle.start({"resolved": {**RESOLVED, "optimizer": RESOLVED["optimizer"] | {"lr": 0.9}}})
    idle.began(read_from(trained.id))
    idle.took_no_step = True
    idle.finish(0, "all steps were done already")
    after = load(tmp_path / "receipt.json")
    (summary,) = after.pop("attempts")
    assert after == {k: v for k, v in before.items() if k != "attempts"}
    assert (summary["id"], summary["attempt"], summary["exit_code"]) == (idle.id, 2, 0)
    assert summary["changed"][0][1] == "optimizer.lr" and "resolved" not in summary
    attempt(tmp_path, saves=True, loaded=read_from(trained.id))  # with more steps
    assert [one["attempt"] for one in open_run(tmp_path).attempts] == [1, 2, 3]
    assert load(tmp_path / "receipt.json")["changed"] == []


def test_a_run_that_began_from_another_state_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, saver, digest in (("a", "x", "d"), ("moved", "y", "d"), ("other", "x", "e")):
        first = attempt(tmp_path / name, saves=True, loaded=read_from(saver, digest * 64))
        attempt(tmp_path / name, saves=True, loaded=read_from(first.id, "own" + name))
    attempt(tmp_path / "seed", saves=True)
    assert found_in(tmp_path / "a", tmp_path / "moved") == []
    assert found_in(tmp_path / "a", tmp_path / "other") == [("data", "first state", "d" * 64, "e" * 64)]
    assert found_in(tmp_path / "seed", tmp_path / "a") == [("data", "first state", "made from train.seed", "d" * 64)]
    assert command.main(["diff", str(tmp_path / "seed"), str(tmp_path / "a")]) == 1


def test_an_attempt_began_where_it_first_began(tmp_path: Path) -> None:
    written = Receipt(tmp_path)
    written.start({})
    written.began(None)
    written.began(read_from("x"))  # it diverged, and rolled back
    assert load(tmp_path / "receipt.json")["origin"] == "made from train.seed"


# ---- Figures


def lines(count: int, first: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """Return train lines whose step time in ms is the step's number. The first two steps take 10 s each."""
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
    assert found["window"] == {"first_step": 21, "last_step": 100, "lines": 80, "left_out": 20}
    step = found["step_time_s"]
    assert step == pytest.approx({"median": np.median(taken), "p10": np.quantile(taken, 0.1), "p90": np.quantile(taken, 0.9)})
    assert found["mfu_causal"] == pytest.approx(np.median(0.01 / taken)) and found["hfu"] is None
    assert found["peak_tflops"] == pytest.approx(500.0)


def test_too_few_lines_have_no_speed() -> None:
    found = figures.speed([*lines(6), *lines(3, 7, step_time_s=None)])
    assert found["step_time_s"] is None and found["window"] is None and found["why"].startswith("4 train lines")


def test_figures_are_those_of_this_attempt_and_losses_of_the_run() -> None:
    found = figures.of_run([*lines(50), *lines(50, 51)], {"resumed_from_step": 50})
    assert found["speed"]["window"]["first_step"] == 61
    assert list(found["loss_at"]) == ["1", "2", "5", "10", "20", "50", "100"] and found["loss_at"]["20"] == 0.5


def test_nan_and_infinite_losses_are_text() -> None:
    found = figures.loss_at([*lines(4), *lines(1, 5, loss=math.nan), *lines(1, 10, loss=-math.inf), *lines(1, 11, loss=None)])
    assert found == {"1": 10.0, "2": 5.0, "5": "nan", "10": "-inf"}
    json.loads(json.dumps(found), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert figures.loss_at([]) == {}


def test_memory_names_its_sources() -> None:
    train = lines(3, memory_gib=70.0, peak_memory_gib=110.5)
    gpu = [{"kind": "gpu", "step": 3, "pool_gib": 132.0}, {"kind": "gpu", "step": 3, "pool_gib": None}]
    found = figures.memory([*train, *gpu], {"peak": 109.0})
    assert found == {"peak_gib": 110.5, "in_use_gib": 70.0, "pool_gib": 132.0, "compiler_peak_gib": 109.0}
    nothing = figures.memory(lines(3), {})
    assert set(nothing.values()) == {None}


def test_throttling_is_a_share_of_the_time_of_this_attempt() -> None:
    def gpu(step: int, index: int, share: float | None, why: str = "") -> dict[str, Any]:
        return {"kind": "gpu", "step": step, "gpu": index, "throttled": share, "throttle_reasons": why}

    watched = [gpu(1, 0, 1.0, "hw_thermal"), gpu(11, 0, 0.5, "sw_thermal"), gpu(12, 0, 0.1, "sw_thermal+hw_slowdown")]
    watched += [gpu(11, 1, 0.0), gpu(12, 1, None), gpu(11, 2, None)]
    found = figures.of_run(watched, {"resumed_from_step": 10})["throttled"]
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
    "eval_data": {"code": {"split": "y", "kind": "a"}},
}


def changed(path: str, value: Any) -> list[tuple[str, str, str, str]]:
    """Return the differences from a receipt that has another value at one dotted path."""
    other = copy.deepcopy(BASE)
    *folders, last = path.split(".")
    inner = other
    for name in folders:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return [(d.group, d.name, d.a, d.b) for d in differences(BASE, other)]


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
        ("hardware.gpus", [{**GPU, "nics": ["mlx5_0"]}, {**GPU, "index": 1}]),
        ("hardware.after", [{**STATE, "sm_clock_mhz": 1500, "power_w": 80.0, "throttle_reasons": ""}]),
        ("hardware.after", [{**STATE, "throttle_reasons": "hw_thermal"}]),  # one sample does not describe the run
        ("throttled", [{"gpu": 0, "share": 0.1, "reasons": "hw_thermal"}]),
        ("source.commit", "x"),  # the files are equal
        ("source.patch", "a README"),
        ("source.config_file", {"other.py": "x"}),  # the part's keys are compared
        ("compile_s", 99.0),
        ("attention", "another kernel"),
        ("preflight.nodes", [{"measured": {"all_reduce_bus_gb_s": 460.0}}]),
        ("preflight", None),
        ("data.source", "/elsewhere"),
        ("data.tokenizer.name", "/elsewhere"),
        ("resolved.log.every_steps", 99),
        ("resolved.optimizer", {k: v for k, v in RESOLVED["optimizer"].items() if k != "beta1"}),  # the key has its default
        ("resolved.mesh.data", 1),  # the sizes are written out, and the same
    ],
)
def test_a_fact_that_explains_nothing_is_no_difference(path: str, value: Any) -> None:
    assert changed(path, value) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("devices.count", 4, ("hardware", "devices.count", "8", "4")),
        ("devices.kind", ["NVIDIA H100"], ("hardware", "devices.kind", "NVIDIA H200", "NVIDIA H100")),
        ("devices.process_count", 2, ("hardware", "devices.process_count", "1", "2")),
        ("host.cpus", 4, ("hardware", "host processors", "8", "4")),
        (
            "hardware.gpus",
            [GPU, {**GPU, "power_limit_w": 500.0}],
            ("hardware", "gpus.power_limit_w", "2 x 700.0", "500.0, 700.0"),
        ),
        ("hardware.topology.pairs.NVLink", 0, ("hardware", "topology.pairs.NVLink", "1", "0")),
        ("throttled", [{"gpu": 0, "share": 0.2, "reasons": "hw"}], ("hardware", "GPU 0: throttled by", "absent", "hw")),
        ("hardware.after", [{**STATE, "ecc_uncorrected": 2}], ("hardware", "GPU 0: new uncorrected ECC errors", "absent", "2")),
        (
            "preflight.nodes",
            [{"measured": {"all_reduce_bus_gb_s": 475.0}}, {"measured": {"all_reduce_bus_gb_s": [311.0, 475.0]}}],
            ("hardware", "preflight.all_reduce_bus_gb_s", "475.0", "311.0"),
        ),
        ("environment.XLA_FLAGS", "--xla_a=1", ("environment", "XLA_FLAGS --xla_a", "absent", "1")),
        ("env.set.NCCL_PROTO", "Simple", ("environment", "NCCL_PROTO", "absent", "Simple")),
        ("env.set.NCCL_ALGO", "^NVLS", ("environment", "NCCL_ALGO", "absent", "^NVLS")),
        ("versions.driver", "580.1", ("versions", "driver", "570.2", "580.1")),
        ("versions.plugin_built_with.cuda", "13.0", ("versions", "plugin_built_with.cuda", "12.9", "13.0")),
        ("python", "3.13.0", ("versions", "python", "3.12.1", "3.13.0")),
        ("host.system", "Linux 7", ("versions", "operating system", "Linux", "Linux 7")),
        ("data.tokenizer.sha256", "0", ("data", "tokenizer.sha256", "f", "0")),
        ("eval_data.code", {"split": "x", "kind": "b"}, ("data", "eval_data.code.kind", "a", "b")),
        ("source.files", {"a.py": "e" * 64}, ("code", "a.py", "d" * 12, "e" * 12)),
        ("resolved.log.peak_tflops", 5.0, ("config", "log.peak_tflops", str(RESOLVED["log"]["peak_tflops"]), "5.0")),
        ("resolved.optimizer.beta1", 0.5, ("config", "optimizer.beta1", "0.9", "0.5")),
    ],
)
def test_a_fact_that_explains_something_is_named(path: str, value: Any, expected: tuple[str, ...]) -> None:
    assert changed(path, value) == [expected]
    assert expected[0] in GROUPS


def test_a_fact_that_follows_from_another_is_not_named() -> None:
    other = copy.deepcopy(BASE)
    other["resolved"]["train"]["deterministic"] = True
    other["env"]["set"]["NCCL_ALGO"] = "^NVLS"  # train.deterministic sets this variable
    other["source"] |= {"commit": "e", "files": {"a.py": "x"}}
    assert [(d.group, d.name) for d in differences(BASE, other)] == [
        ("code", "commit"),
        ("code", "a.py"),
        ("config", "train.deterministic"),
    ]


def test_mixtures_are_compared_by_the_contents_of_their_files() -> None:
    def mixture(*files: tuple[str, str, float]) -> dict[str, Any]:
        found = [{"name": n, "content_sha256": c * 64, "weight": w, "tokens": 10, "documents": 1} for n, c, w in files]
        return {
            **BASE,
            "data": {**BASE["data"], "source": str(files), "files": found},
            "resolved": {"data": {"source": files[0][0]}},
        }

    web, code = ("web", "a", 0.7), ("code", "b", 0.3)

    def found(*other: tuple[str, str, float]) -> list[tuple[str, str, str]]:
        return [(d.name, d.a, d.b) for d in differences(mixture(web, code), mixture(*other))]

    a, c = "10 tokens, sha256 aaaaaaaaaaaa, weight 0.7", "10 tokens, sha256 cccccccccccc, weight"
    assert found(("renamed", "a", 0.7), code) == []
    assert found(code, web) == [("order of the files", "['web', 'code']", "['code', 'web']")]
    assert found(("web", "a", 0.6), code) == [("web", a, a.replace("0.7", "0.6"))]
    assert found(web, code, ("more", "c", 0.1)) == [("more", "absent", f"{c} 0.1")]
    assert found(("web", "c", 0.7), code) == [("web", a, f"{c} 0.7")]
    # Files in several folders may have the same name.
    twins = mixture(("train.tok", "a", 0.7), ("train.tok", "b", 0.3))
    other = mixture(("train.tok", "c", 0.7), ("train.tok", "b", 0.3))
    assert [(d.a, d.b) for d in differences(twins, other) if d.group == "data"] == [(a, f"{c} 0.7")]
    fewer = [d.name for d in differences(twins, mixture(("train.tok", "b", 0.3)))]
    assert [name for name in fewer if name.startswith("train.tok")]


# ---- Files that cannot be read, and the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nowhere"], "no such file or folder"),
        (["show", "empty"], "no receipt.json in this folder"),
        (["list", "empty"], "no receipt.json in this folder or in one below it"),
        (["show", "later.json"], f"format 99, this jaxtrain reads {FORMAT}"),
        (["diff", "list.json", "list.json"], "not a receipt"),
        (["show", "binary.json"], "name a run's folder (--workdir of training)"),
        (["show", "damaged"], "move it away, and the run writes a new one."),
        ([], "is missing"),
        (["diff", "a"], "diff: needs two runs, not 1. Write diff A B."),
        (["show", "a", "b"], "show: needs one run, not 2. Write show RUN."),
        (["list"], "list: needs one run or more, not 0. Write list RUN..."),
        (["nothing"], "must be one of show, list, diff"),
        (["show", "a", "--json"], "show does not use it"),
    ],
)
def test_a_wrong_command_or_file_is_named(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "receipt.json").write_text("{")
    (tmp_path / "later.json").write_text('{"format": 99, "attempts": []}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_receipt_that_cannot_be_read_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    for text in ("{", '{"format": 99, "attempts": []}', "[]"):
        path.write_text(text)
        with pytest.raises(ReceiptError, match="not a receipt|format 99"):
            Receipt(tmp_path).start({})
        assert path.read_text() == text


def test_digests_of_configs() -> None:
    assert receipt.config_sha256({"a": 2, "b": 1}) == receipt.config_sha256({"b": 1, "a": 2})
    assert receipt.config_sha256({"a": 2, "b": 1}) != receipt.config_sha256({"a": 2, "b": 2})
