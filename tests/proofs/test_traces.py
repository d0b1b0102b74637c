"""Traces of a real run on the devices of this process, and what is read from them."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import rich.console
import runs
from gpu_traces import PROGRAM
from pages import assert_self_contained

from jaxtrain.profile import __main__ as command
from jaxtrain.profile import load, measure, page, report, trace
from jaxtrain.profile.diff import diff
from jaxtrain.profile.result import KINDS, NO_SCOPE, Profile, to_json

PARTS = {"attention", "mlp", "loss", "optimizer", "embed"}
WINDOW = (5, 6)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model on 8 devices, traced by its config."""
    folder = tmp_path_factory.mktemp("split")
    (folder / "small.py").write_text(runs.SMALL)
    asked = {"profile__start": WINDOW[0], "profile__steps": 2, "train__steps": 12, "data__source": "synthetic"}
    off = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "model__num_layers": 1, "remat__policy": "full"}
    # An executable from the compile cache is not recorded whole.
    assert runs.train(folder / "small.py", folder / "run", paths__cache="", **asked, **off) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def split(traced: Path) -> Profile:
    return load.profile(load.traces(traced)[0], load.run_around(traced))


def test_steps_asked_for_are_traced_and_in_no_rate(traced: Path, split: Profile):
    """The profiler's own time, and that of writing the trace, would be taken for training."""
    assert split.steps == WINDOW
    assert f"python -m jaxtrain.profile {traced}" in (traced / "log.txt").read_text()
    rates = {line["step"]: line["step_time_s"] for line in runs.lines(traced)}
    # A line tells of the steps done: step 5 makes 6.
    assert [rates[step] for step in (6, 7, 8)] == [None, None, None]
    times = sorted(t for t in rates.values() if t is not None)
    assert split.untraced_ms is not None and times[0] <= split.untraced_ms / 1e3 <= times[-1]


def test_time_is_told_by_parts_and_passes(split: Profile):
    assert split.named >= 0.95
    named = {name.partition(",")[0] for name in split.by_part}
    assert PARTS <= named <= PARTS | {"layers", "final_norm", "weights", "gather", "reduce", NO_SCOPE}
    passes = {name.partition(", ")[2] for name in split.by_part if name.startswith("mlp")}
    assert passes == {"forward", "backward", "recompute"}, "remat.policy=full"
    assert "optimizer" in split.by_part, "outside of every pass"


def test_every_millisecond_of_a_step_is_counted_once(split: Profile):
    assert tuple(split.by_kind) == KINDS
    assert sum(split.by_kind.values()) == pytest.approx(split.step_ms)
    told = sum(ms for kinds in split.by_part.values() for ms in kinds.values())
    assert told == pytest.approx(split.step_ms - split.by_kind["idle"])
    assert sum(op.ms for op in split.ops) == pytest.approx(told)
    for d in split.devices:
        assert d.busy_ms + d.exposed_ms + d.idle_ms == pytest.approx(d.step_ms)
    assert split.step_range_ms[0] <= split.step_ms <= split.step_range_ms[1]
    drawn = sum(s.end - s.start for s in split.timeline.device)
    assert drawn == pytest.approx(split.timeline.ms, rel=1e-3)


def test_work_is_that_of_the_program(split: Profile):
    """FLOPs of matmuls seen in the trace are those of the compiled step, and nothing was left uncounted."""
    assert split.program is not None and split.program.unread == ()
    seen = math.fsum(op.gflop or 0 for op in split.ops)
    compiled = math.fsum(cell[1] for cells in split.program.by_part.values() for cell in cells.values())
    assert seen == pytest.approx(compiled)
    (op,) = [op for op in split.ops if op.label == "forward mlp/BTF,DF->BTD"]
    assert op.gflop == pytest.approx(2 * 64 * 64 * 32 / 1e9), "a layer, and a sequence of 64 tokens on each device"
    assert op.count == 1 and op.source.startswith("jaxtrain/models/layers.py:") and op.kind == "GEMM"


def test_memory_at_the_peak_is_the_compilers(split: Profile, traced: Path):
    assert split.program is not None and split.program.held is not None
    held = split.program.held
    memory = runs.receipt(traced)["memory_gib"]
    assert sum(held.by_part.values()) == pytest.approx(held.peak_gib)
    assert held.arguments_gib == pytest.approx(
        memory["parameters"] + memory["optimizer state"] + memory["batch"], rel=0.05
    )  # of 40 KiB
    assert held.arguments_gib < held.peak_gib <= sum(memory.values()) * 1.001
    assert held.largest[0][0] >= held.largest[-1][0] > 0


def test_a_program_from_the_compile_cache_is_read_from_beside_the_trace(traced: Path, split: Profile, monkeypatch):
    """XLA then records none with the trace. Of what it holds the text says nothing."""
    whole = trace.read(Path(split.trace))
    assert whole.programs
    monkeypatch.setattr(trace, "read", lambda path: dataclasses.replace(whole, programs={}))
    found = load.profile(whole.path, load.run_around(traced))
    assert found.program and split.program and found.program.held is None
    assert dataclasses.replace(found, program=None) == dataclasses.replace(split, program=None)
    assert found.program.by_part == split.program.by_part
    monkeypatch.setattr(load, "HLO_TEXT", "missing")
    found = load.profile(whole.path, load.run_around(traced))
    assert found.program is None and found.named == 0 and "holds the program" in found.notes[0]
    assert sum(found.by_kind.values()) == pytest.approx(split.step_ms)


def test_devices_are_told_apart(split: Profile):
    assert [d.device for d in split.devices] == list(range(8))
    assert split.by_kind["exposed collectives"] > 0 and split.by_part["optimizer"]
    assert {op.kind for op in split.ops} >= {"GEMM", "elementwise", "collectives"}
    sent = [op for op in split.ops if op.kind == "collectives"]
    assert all(op.gb is not None for op in sent) and sum(op.gb or 0 for op in sent) > 0
    assert split.named >= 0.95
    assert any("share its cores" in note for note in split.notes)


def test_reports_of_a_cpu(split: Profile):
    assert split.device_kind == "cpu" and split.planned is None and split.no_plan == "no plan for a CPU"
    assert all(op.planned_ms is None for op in split.ops)
    text = page.html(split, diff(split, split))
    assert_self_contained(text)
    assert text.count('<svg class="lanes"') == 1 and "<h2>Memory at the peak</h2>" in text
    console = rich.console.Console(width=100, record=True)
    report.text(split, console)
    assert max(len(line) for line in console.export_text().splitlines()) <= 100


def test_the_command(traced: Path, split: Profile, tmp_path, capsys):
    workdir = str(traced)
    assert command.main([workdir, "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 1 and listed[0].startswith("1  ")
    files = [f"--json={tmp_path / 'p.json'}", f"--html={tmp_path / 'p.html'}"]
    assert command.main([workdir, "--trace=1", f"--diff={workdir}", *files]) == 0
    said = capsys.readouterr().out
    assert "attention, backward" in said and "no plan for a CPU" in said and "change by kind" in said
    assert re.search(r"traced, it takes \d+\.\d\d times that", said)
    tree = json.loads((tmp_path / "p.json").read_text())
    diffed = tree.pop("diff")
    assert tree == json.loads(json.dumps(to_json(split)))
    assert diffed["before"].endswith(".xplane.pb") and diffed["step"]["after_ms"] == tree["step_ms"]


def test_a_dump_is_summed_the_same_way(traced: Path, split: Profile, tmp_path, capsys):
    path = tmp_path / "step.hlo"
    path.write_text(PROGRAM)
    assert command.main([str(path), f"--json={tmp_path / 'd.json'}"]) == 0
    assert "without its buffer assignment" in capsys.readouterr().out
    found = json.loads((tmp_path / "d.json").read_text())["by_part"]
    assert found["mlp"]["GEMM"][:2] == [3, pytest.approx(300)] and found["mlp"]["collectives"][0] == 3
    proto = tmp_path / "module.after_optimizations.hlo.pb"
    whole = trace.read(load.traces(traced)[0])
    proto.write_bytes(whole.programs[measure.main_program(whole)][1])
    assert load.dump(proto, load.run_around(traced)) == split.program
    assert command.main([str(path), "--html=x.html"]) == 2 and "needs a trace" in capsys.readouterr().err
