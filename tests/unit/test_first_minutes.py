"""benchmarks/first_minutes.py: its schedule, its configs on GPUs that this machine lacks, its verdicts, and calls cut off."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import rich.console
from bench_helpers import ANSWER, at_home  # noqa: F401

from benchmarks import first_minutes, gpu_items, peer_torch
from jaxtrain import flops, hardware, launch
from jaxtrain.bench import node_suite, parts, report
from jaxtrain.plan import rates
from jaxtrain.validate import validate_step

NAMES = [item.name for item in first_minutes.ITEMS]
H200 = hardware.Devices("gpu", "NVIDIA H200", 1, 140.0, "described", 90)
H100 = hardware.Devices("gpu", "NVIDIA H100 80GB HBM3", 1, 79.6, "described", 90)


def node(tmp_path: Path, devices: hardware.Devices = H200, smoke: bool = True) -> parts.Node:
    folder = report.Folder(str(tmp_path / "results"), "", "first_minutes")
    (tmp_path / "results" / "keep").mkdir(exist_ok=True)
    return parts.Node(devices, smoke, folder, str(tmp_path / "compiled"))


def console() -> rich.console.Console:
    return rich.console.Console(width=report.WIDTH, quiet=True)


# ---- The schedule


def test_items_are_in_the_order_of_their_value():
    """Correctness comes before speed, and a step with a loop, which compiles faster, before the same step without."""
    assert len(set(NAMES)) == len(NAMES) and {*gpu_items.CASES} < {*NAMES} and {*gpu_items.PEERS} < {*gpu_items.CASES}
    assert all(item.need_s <= item.most_s < 560 - first_minutes.MARGIN_S for item in first_minutes.ITEMS)
    at = NAMES.index
    assert at("compute") < at("attention of llama3") < at("losses as on a CPU") < at("one document, loop") < at("PyTorch")
    assert at("packed, loop") < at("packed, unrolled")
    (gate,) = [item.name for item in first_minutes.ITEMS if item.gate]
    assert gate == "compute"
    first = sum(item.need_s for item in first_minutes.ITEMS[: at("trace") + 1] if not item.least_gib)
    assert first < 560 - first_minutes.MARGIN_S, "a call of ten minutes can begin all items up to the trace"


@pytest.mark.parametrize("devices", [H200, H100], ids=["H200", "H100"])
def test_cases_can_be_run(devices):
    """The cases are valid and differ. Half of Llama 3 8B is left out on an H100."""
    runs = {}
    needs = {item.name: item.least_gib for item in first_minutes.ITEMS}
    for case in gpu_items.CASES:
        loaded = launch.load(gpu_items.step_argv(case, False))
        assert not [str(p) for p in (*loaded.problems, *validate_step(loaded.run, devices))], case
        assert loaded.run not in runs.values(), case
        runs[case] = loaded.run
        assert (needs[case] > H100.memory_gib) == (loaded.run.model.num_layers == 16 and loaded.run.model.d_model == 4096), case
    assert runs["one document, unrolled"].data.packing == "none" and not runs["one document, unrolled"].parallel.scan_layers
    model = runs["mixtral"].model
    assert 16 * flops.parameters(model)["total"] < 40e9, "weights, gradients and moments in float32: half of a card of 80 GB"
    for argv in ([node_suite.TINY, *gpu_items.RESUMED], [*gpu_items.SHORT, *gpu_items.LEAN]):
        loaded = launch.load(argv)
        assert not [str(p) for p in (*loaded.problems, *validate_step(loaded.run, devices))]


def test_pytorch_can_take_the_step_that_it_is_compared_in():
    run = launch.load(gpu_items.step_argv(gpu_items.PEERS[1], False)).run
    assert peer_torch.refusal(run) == [] and len(peer_torch.read_settings(gpu_items.TORCH)) == 4
    assert peer_torch.check_settings(gpu_items.TORCH) == ""


def test_tiny_cases_can_be_run():
    cpu = hardware.Devices("cpu", "cpu", 1, 8.0, "described")
    for case in gpu_items.CASES:
        loaded = launch.load(gpu_items.step_argv(case, True))
        assert not [str(p) for p in (*loaded.problems, *validate_step(loaded.run, cpu))], case


def test_kernels_that_are_compared_exist():
    sys.path.insert(0, str(node_suite.GPU_TESTS))
    try:
        from test_gpu_attention import OF_PALLAS, SHAPES, SHARDED, SMALL, name_of
    finally:
        sys.path.remove(str(node_suite.GPU_TESTS))
    on_gpu = {f"cudnn-{name_of(s)}" for s in (*SHAPES, *SHARDED)} | {f"pallas-{name_of(s)}" for s in (*SHAPES, *OF_PALLAS)}
    assert {*gpu_items.FIRST_KERNELS, *gpu_items.MORE_KERNELS} <= on_gpu
    assert {*gpu_items.SMOKE_KERNELS} <= {f"chunked-{name_of(shape)}" for shape in SMALL}


# ---- Calls and machines


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "probe", lambda: H100)
    monkeypatch.setattr(first_minutes, "begin_background", lambda node, names: None)


def call(tmp_path: Path, *more: str) -> tuple[int, dict[str, str]]:
    """Run the command; return its exit code and item -> verdict in --out."""
    code = first_minutes.main([f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}", *more])
    file = tmp_path / "out" / "results.json"
    done = json.loads(file.read_text())["parts"] if file.exists() else {}
    return code, {name: found["verdict"] for name, found in done.items()}


def act(*verdicts: str):
    """Return an item's function that has these verdicts in turn."""
    left = iter(verdicts)
    return lambda node, limit_s: parts.Outcome(next(left), "so")


def test_a_second_call_continues_and_repeats_no_finished_item(tmp_path, one_gpu, monkeypatch):
    items = (
        first_minutes.Item("a", act("ok"), 60.0),
        first_minutes.Item("b", act("FAILED"), 60.0),  # at once, and not because its time ended
        first_minutes.Item("c", act("out of time", "ok"), 60.0),
        first_minutes.Item("d", act("ok"), 60.0, need_s=50.0),
        first_minutes.Item("e", act(), 60.0, least_gib=100.0),
    )
    monkeypatch.setattr(first_minutes, "ITEMS", items)
    first = call(tmp_path, "--seconds=52")
    assert first == (1, {"a": "ok", "b": "FAILED", "c": "out of time", "d": "left out"})
    assert call(tmp_path, "--seconds=100") == (0, {"a": "ok", "b": "FAILED", "c": "ok", "d": "ok"})
    assert len(os.listdir(tmp_path / "out")) == 3
    for file in (tmp_path / "out").iterdir():
        file.unlink()
    assert call(tmp_path, "--seconds=100")[1] == {"a": "ok", "b": "FAILED", "c": "ok", "d": "ok"}, (
        "sent again, as to a new folder"
    )


@pytest.mark.parametrize(
    ("verdict", "seconds", "per_card", "again"),
    [
        ("ok", 50.0, True, False),
        ("off", 20.0, True, False),  # a speed that differs from its plan
        ("off", 50.0, False, True),  # a comparison of correctness that is incomplete
        ("FAILED", 20.0, True, False),
        ("FAILED", 49.0, True, True),  # its time ended
        ("out of time", 50.0, True, True),
    ],
)
def test_an_item_whose_time_ended_is_repeated_if_there_is_more(verdict, seconds, per_card, again):
    item = first_minutes.Item("a", act(), 100.0, per_card=per_card)
    before = {"verdict": verdict, "seconds": seconds, "budget_s": 50.0}
    assert first_minutes.is_open(item, before, 100.0) == again
    assert not first_minutes.is_open(item, before, 55.0)


@pytest.mark.parametrize(
    ("answer", "code", "verdict"),
    [
        ({"verdict": "ok", "trace": "failed: no profiler"}, 0, "FAILED"),
        ({"verdict": "ok", "trace": "it was not done"}, 0, "out of time"),
        ({"verdict": "out of time", "why": "late"}, 0, "out of time"),
        ({"verdict": "ok", "trace": "there"}, 0, "ok"),
        ({"verdict": "ok", "trace": "there"}, 1, "FAILED"),
        ({"verdict": "ok", "trace": "there"}, None, "out of time"),
    ],
)
def test_a_trace_that_lacked_time_did_not_fail(answer, code, verdict, tmp_path, monkeypatch):
    def run_case(function, request, **_):
        if answer.get("trace") == "there":
            Path(request["trace"]).mkdir()
            Path(request["trace"], "a.xplane.pb").write_text("trace")
        return ANSWER | answer

    monkeypatch.setattr(node_suite, "run_case", run_case)
    monkeypatch.setattr(parts, "run_program", lambda *_, **__: (code, "said"))
    assert gpu_items.trace_step("packed, loop", node(tmp_path), 60.0).verdict == verdict


def test_results_that_cannot_be_sent_end_nothing(tmp_path, one_gpu, monkeypatch, capsys):
    items = tuple(first_minutes.Item(name, act("ok"), 60.0) for name in "ab")
    monkeypatch.setattr(first_minutes, "ITEMS", items)
    (tmp_path / "out").write_text("a file")
    assert first_minutes.main([f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}"]) == 0
    assert {*json.loads((tmp_path / "work/results/results.json").read_text())["parts"]} == {"a", "b"}
    assert "--out: " in capsys.readouterr().err


def test_nothing_runs_behind_a_failed_gate_and_the_gate_is_tried_again(tmp_path, one_gpu, monkeypatch):
    items = (first_minutes.Item("gate", act("FAILED", "ok"), 60.0, gate=True), first_minutes.Item("a", act("ok"), 60.0))
    monkeypatch.setattr(first_minutes, "ITEMS", items)
    assert call(tmp_path) == (first_minutes.NO_COMPUTE, {"gate": "FAILED"})
    assert call(tmp_path) == (0, {"gate": "ok", "a": "ok"})


def test_a_cut_leaves_the_results_before_it(tmp_path, one_gpu, monkeypatch):
    def cut(node, limit_s):
        (node.path / "logs" / "a.txt").write_text("log")
        raise SystemExit("killed")  # passes all handlers of an item

    items = (first_minutes.Item("a", act("ok"), 60.0), first_minutes.Item("b", cut, 60.0))
    monkeypatch.setattr(first_minutes, "ITEMS", items)
    with pytest.raises(SystemExit):
        call(tmp_path)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["parts"]["a"]["verdict"] == "ok"
    assert {*os.listdir(tmp_path / "out")} == {"results.json", "results.md", "logs.tar.gz"}


def test_no_more_is_sent_than_may_be_and_the_rest_is_named(tmp_path, monkeypatch, capsys):
    one = node(tmp_path)
    one.folder.write("Title", [], parts={})
    for i in range(6):
        (one.path / "keep" / f"{i}").write_bytes(bytes(100))
    (one.path / "keep" / "large").write_bytes(bytes(20_000))
    monkeypatch.setattr(first_minutes, "MAX_FILE_BYTES", 10_000)
    first_minutes.send(one, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["0", "1", "2", "3", "logs.tar.gz", "results.json", "results.md"]
    said = capsys.readouterr().err
    assert all(name in said for name in ("4", "5", "large"))


def test_items_of_an_earlier_machine_are_not_repeated(tmp_path, capsys):
    """Speeds hold for one kind of GPU, correctness for all. A failed item, and results of a CPU, count for nothing."""
    ok, failed = {"verdict": "ok"}, {"verdict": "FAILED"}
    done = {"losses as on a CPU": ok, "packed, loop": ok, "killed and resumed": failed, "experts": {"verdict": "off"}}
    for name, about in (("h100", {"platform": "gpu", "device": H100.name}), ("cpu", {"platform": "cpu", "device": H200.name})):
        (tmp_path / name).mkdir()
        tree = {"kind": "first_minutes", "about": about, "parts": done}
        (tmp_path / name / "results.json").write_text(json.dumps(tree))
    assert first_minutes.done_elsewhere(tmp_path, H100.name) == {"losses as on a CPU", "packed, loop"}
    assert first_minutes.done_elsewhere(tmp_path, H200.name) == {"losses as on a CPU"}
    assert first_minutes.done_elsewhere(tmp_path / "gone", H200.name) == set() and capsys.readouterr().err
    (tmp_path / "h100" / "results.json").write_text("{")
    assert first_minutes.done_elsewhere(tmp_path, H100.name) == set()
    assert "h100/results.json" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--only=8b", "--smoke"]])
def test_mistakes_are_refused_first(argv, tmp_path, capsys):
    assert call(tmp_path, *argv) == (2, {})
    assert "error: --" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_the_list_is_of_open_items(tmp_path, one_gpu, capsys):
    assert call(tmp_path, "--list") == (0, {})
    assert [line.partition(" s  ")[2] for line in capsys.readouterr().out.splitlines()] == [
        item.name for item in first_minutes.ITEMS if item.least_gib < 80
    ]


def test_variables_that_end_items_are_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(first_minutes.sysconfig, "get_path", lambda name: str(tmp_path))
    image = {"XLA_FLAGS": "--a", "NCCL_ALGO": "Ring", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "1"}
    assert len(first_minutes.prepare_environment(image)) == 4
    assert image == {"CUDA_VISIBLE_DEVICES": "1", hardware.HOST_LIMIT: first_minutes.HOST_GIB}
    assert first_minutes.prepare_environment(image) == []


# ---- Verdicts


def test_steps_are_judged_by_their_estimate(tmp_path, monkeypatch):
    answer = ANSWER | {"planned": {"step_s": 0.5, "peak_gib": 41.0, "rates": "calibrated on this GPU"}}
    asked = []
    answers = iter((answer, {"verdict": "out of memory", "why": "no room"}))
    monkeypatch.setattr(node_suite, "run_case", lambda function, request, **_: asked.append(request["argv"]) or next(answers))
    one = node(tmp_path, smoke=False)
    found = gpu_items.time_step("packed, loop", one, 60.0)
    assert found.verdict == "off" and "2.00 x plan" in found.found and "0.98 x plan" in found.found
    assert gpu_items.time_step("packed, loop", one, 60.0).verdict == "FAILED"
    assert asked[0] == asked[1]


def test_pallas_takes_the_place_of_a_cudnn_that_fails(tmp_path, monkeypatch):
    asked = []
    answers = iter(({"verdict": "failed", "why": "[cudnn_frontend] Error"}, ANSWER))
    monkeypatch.setattr(node_suite, "run_case", lambda function, request, **_: asked.append(request["argv"]) or next(answers))
    found = gpu_items.time_step("packed, loop", node(tmp_path, smoke=False), 60.0)
    assert found.verdict == "off" and "[cudnn_frontend] Error" in found.found
    assert asked[1] == [*asked[0], *gpu_items.PALLAS]


@pytest.mark.parametrize(
    ("cpu", "verdict"),
    [
        ({"steps": 19, "loss": {"first": 5.0, "last": 4.0}}, "ok"),
        ({"steps": 19, "loss": {"first": 5.0, "last": 4.04}}, "FAILED"),
        ({"steps": 19, "loss": {"first": 5.0, "last": 3.96}}, "FAILED"),
        ({"steps": 7, "loss": {"first": 5.0, "last": 4.0}}, "FAILED"),  # the last losses are of different steps
        ({"verdict": "out of time", "why": "late"}, "FAILED"),
    ],
)
def test_losses_are_compared_step_by_step(cpu, verdict, tmp_path, monkeypatch):
    here = {"verdict": "ok", "attention": "cudnn", "steps": 19, "loss": {"first": 5.0, "last": 4.0}}
    monkeypatch.setattr(gpu_items, "background", gpu_items.Background())
    gpu_items.background.begin("losses f32", lambda: here | cpu)
    monkeypatch.setattr(node_suite, "run_case", lambda *_, **__: here)
    assert gpu_items.compare_losses(node(tmp_path), 60.0).verdict == verdict


def test_wrong_numbers_close_the_gate_and_missing_libraries_do_not(tmp_path, monkeypatch):
    fine = {"verdict": "ok", "kind": "H200", "product": 1e-7, "functions": 1e-7, "pinned": 0.0, "attention": 1e-3}
    for change, verdict in (
        ({}, "ok"),
        ({"product": 0.5}, "FAILED"),
        ({"functions": "JaxRuntimeError: no"}, "FAILED"),
        ({"attention": "JaxRuntimeError: No valid execution plans built"}, "off"),
        ({"pinned": "JaxRuntimeError: no"}, "off"),
        ({"verdict": "failed", "why": "cuDNN crashed", "attention": None}, "off"),
        (
            {"verdict": "refused", "why": "JAX could not start CUDA", **dict.fromkeys(("product", "functions", "pinned"))},
            "FAILED",
        ),
    ):
        answer = {key: value for key, value in (fine | change).items() if value is not None}
        monkeypatch.setattr(gpu_items, "run_case", lambda *_, answer=answer, **__: answer)
        assert gpu_items.compute(node(tmp_path), 60.0).verdict == verdict, change


def test_rates_are_kept_and_those_of_the_machine_stay(tmp_path, monkeypatch):
    """Later items must be compared with the rates with which earlier items were compared."""
    monkeypatch.setattr(rates.path, "__defaults__", (tmp_path / "home",))
    sheet = rates.datasheet(hardware.TABLE[8][1], "bf16")
    one = node(tmp_path, smoke=False)

    def measure(*_):
        rates.save(dataclasses.replace(sheet, source="measured"), sheet_name, tmp_path / "home")
        return parts.Outcome("ok", "done")

    sheet_name = hardware.TABLE[8][1].name
    monkeypatch.setattr(node_suite, "calibrate", measure)
    for earlier in (None, dataclasses.replace(sheet, source="earlier")):
        if earlier:
            rates.save(earlier, sheet_name, tmp_path / "home")
        assert gpu_items.calibrate(one, 60.0).verdict == "ok"
        assert rates.load(sheet_name, tmp_path / "home") == earlier
        (kept,) = (one.path / "keep").iterdir()
        assert "measured" in kept.read_text()


@pytest.mark.parametrize(
    ("answer", "verdict", "said"),
    [
        ({"verdict": "ok", "rows": [{"verdict": "ok", "of_bound": 0.5}]}, "ok", "1 timed, 50% to 50% of their bounds"),
        ({"verdict": "out of time", "why": "late", "rows": [{"verdict": "ok", "of_bound": None}]}, "off", "1 timed; late"),
        ({"verdict": "failed", "why": "no luck"}, "FAILED", "0 timed; no luck"),
        ({"verdict": "ok", "rows": [{"verdict": "failed", "kind": "k", "what": "w", "why": "x"}]}, "FAILED", "0 timed; k w: x"),
    ],
)
def test_verdicts_of_timed_kernels(answer, verdict, said, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_items, "run_case", lambda *_, **__: answer)
    monkeypatch.setattr(gpu_items.kernels, "make_table", lambda *_: report.make_table("", ("",), []))
    found = gpu_items.time_kernels("gemm", node(tmp_path), 60.0)
    assert (found.verdict, found.found) == (verdict, said)


def test_archives_stay_below_what_can_be_sent(tmp_path, monkeypatch):
    folder = tmp_path / "trace"
    folder.mkdir()
    (folder / "noise").write_bytes(np.random.default_rng(0).bytes(50_000))
    (only,) = gpu_items.pack(folder, tmp_path / "a.tar.gz")
    whole = only.read_bytes()
    monkeypatch.setattr(gpu_items, "MAX_FILE_BYTES", 20_000)
    made = gpu_items.pack(folder, tmp_path / "a.tar.gz")
    assert [file.name for file in made] == ["a.tar.gz.00", "a.tar.gz.01", "a.tar.gz.02"] and not only.exists()
    assert max(file.stat().st_size for file in made) == 20_000 and len(b"".join(f.read_bytes() for f in made)) == len(whole)


def test_the_cost_of_gpu_metrics_follows_from_turns(tmp_path, monkeypatch):
    """The programs are fakes. Their steps take 1.01 s with GPU metrics and 1 s without."""
    asked = []

    def run_program(command, log, *, environ=None, limit_s):
        asked.append(command)
        words = dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
        if "jaxtrain.preflight" in command:
            Path(words["json"]).write_text(json.dumps({"exit_code": 3}))
            return 3, "FAULT: ECC"
        if "jaxtrain.main" in command:
            folder = Path(words["workdir"])
            (folder / "checkpoints" / "60").mkdir(parents=True)
            every = float(words["config.log.gpu_every_s"])
            (folder / "receipt.json").write_text(json.dumps({"speed": {"step_time_s": {"median": 1.01 if every else 1.0}}}))
            (folder / "metrics.jsonl").write_text(json.dumps({"kind": "gpu", "power_w": 650.0, "nvlink_tx_gb_s": None}) + "\n")
        return 0, "done"

    monkeypatch.setattr(parts, "run_program", run_program)
    one = node(tmp_path, H100, smoke=False)
    found = {item.name: item.act(one, 300.0) for item in first_minutes.ITEMS if item.name in OF_PROGRAMS}
    assert (found["preflight"].verdict, found["preflight"].found) == ("off", "exit code 3: FAULT: ECC")
    assert found["a run and its receipt"].found.startswith("lines of GPU metrics: 1; without nvlink_tx_gb_s")
    assert found["cost of sampling"].found.startswith("a step takes +1.00% with it (off 1 and 1 s, on 1.01 and 1.01 s)")
    every = [word for command in asked for word in command if word.startswith("--config.log.gpu_every_s=")]
    assert [word.partition("=")[2] for word in every] == ["2", "0", "1", "1", "0"]
    assert not [*tmp_path.rglob("checkpoints")]


OF_PROGRAMS = ("preflight", "a run and its receipt", "cost of sampling")


def test_a_part_is_described_by_its_function(tmp_path, capsys):
    """A functools.partial has a docstring of its own, which says nothing about the part."""
    item = next(item for item in first_minutes.ITEMS if item.name == "attention")
    parts.run_parts([dataclasses.replace(item, need_s=2.0)], node(tmp_path), rich.console.Console(), 1.0, "Title", {})
    said = capsys.readouterr().out
    assert "partial" not in said and "their definitions" in said
