"""Traces of a real run on the devices of this process, and their profiles."""

import gzip
import json
import math
from pathlib import Path

import pytest
import runs
from gpu_traces import profile_of
from pages import assert_self_contained

from jaxtrain.commands import profile as command
from jaxtrain.metrics.profiling import HLO_TEXT
from jaxtrain.plan.program import hlo
from jaxtrain.report import profile, profile_program
from jaxtrain.report.profile import StepProfile
from jaxtrain.report.profile_program import KINDS, NO_SCOPE

PARTS = {"attention", "mlp", "loss", "optimizer", "embed"}
WINDOW = (3, 4)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small model on 8 devices, with a config that requests a trace."""
    folder = tmp_path_factory.mktemp("split")
    (folder / "small.py").write_text(runs.SMALL)
    asked = {"profile__start": WINDOW[0], "profile__steps": 2, "train__steps": 9, "data__source": "synthetic"}
    off = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "model__num_layers": 1, "remat__policy": "full"}
    assert runs.train(folder / "small.py", folder / "run", **asked, **off) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def split(traced: Path) -> StepProfile:
    return profile_of(traced)


def test_steps_asked_for_are_traced_and_in_no_rate(traced: Path, split: StepProfile):
    """Traced steps have no step time. The time of the profiler, and of writing the trace, does not count as training time."""
    assert split.steps == WINDOW
    rates = {line["step"]: line["step_time_s"] for line in runs.lines(traced)}
    # The line after step 3 reports 4 steps.
    assert [rates[step] for step in (4, 5, 6)] == [None, None, None]
    times = sorted(t for t in rates.values() if t is not None)
    assert split.untraced_ms is not None and times[0] <= split.untraced_ms / 1e3 <= times[-1]


def test_time_is_divided_by_parts_and_passes(split: StepProfile):
    assert split.named >= 0.95
    named = {name.partition(",")[0] for name in split.by_part}
    assert PARTS <= named <= PARTS | {"layers", "final_norm", "weights", "gather", "reduce", NO_SCOPE}
    passes = {name.partition(", ")[2] for name in split.by_part if name.startswith("mlp")}
    assert passes == {"forward", "backward", "recompute"}, "remat.policy=full"


def test_every_millisecond_of_a_step_is_counted_once(split: StepProfile):
    assert tuple(split.by_kind) == KINDS
    assert sum(split.by_kind.values()) == pytest.approx(split.step_ms)
    ran = sum(ms for kinds in split.by_part.values() for ms in kinds.values())
    assert ran == pytest.approx(split.step_ms - split.by_kind["idle"])
    assert sum(op.ms for op in split.ops) == pytest.approx(ran)
    assert list(split.by_device) == list(range(8)) and split.by_kind["exposed communication"] > 0
    for kind, ms in split.by_kind.items():
        assert ms == pytest.approx(sum(kinds[kind] for kinds in split.by_device.values()) / 8)
    assert split.step_range_ms[0] <= split.step_ms <= split.step_range_ms[1]


def test_work_is_that_of_the_program(traced: Path, split: StepProfile):
    """FLOPs of the trace's operations equal those of the compiled step, which has no instruction of unknown cost."""
    text = Path(split.trace).with_name(HLO_TEXT).read_text()
    compiled = profile_program.read_program(text, runs.receipt(traced)["mesh"], 8)
    assert compiled.unknown == ()
    flops = sum(compiled.costs[i.name].flops * n for i, _, n, _ in hlo.walk(compiled.module) if i.name in compiled.costs)
    assert math.fsum(op.gflop or 0 for op in split.ops) == pytest.approx(flops / 1e9)
    (op,) = [op for op in split.ops if op.label == "forward mlp/BTF,DF->BTD"]
    assert op.gflop == pytest.approx(2 * 64 * 64 * 32 / 1e9), "a layer, and a sequence of 64 tokens on each device"
    assert op.count == 1 and op.source.startswith("jaxtrain/models/layers.py:") and op.kind == "matmul"


def test_lost_time_is_that_of_the_kinds(split: StepProfile):
    """remat.policy=full recomputes. A CPU has no plan and no clocks, and this run neither saved nor evaluated."""
    rows = {row.cause: 1e3 * row.seconds for row in split.lost.rows}
    assert rows["exposed communication"] == pytest.approx(split.by_kind["exposed communication"])
    assert (
        rows["recomputation"] == pytest.approx(sum(op.ms for op in split.ops if op.phase == "recompute"))
        and rows["recomputation"]
    )
    idle = rows.get("waiting for the host", 0.0) + rows.get("waiting for data", 0.0)
    assert idle == pytest.approx(split.by_kind["idle"], abs=2e-3 * split.step_ms)
    assert "slow kernels" not in rows and "GPU clocks" not in rows and len(split.lost.missing) == 2


def test_reports_of_a_cpu(traced: Path, split: StepProfile, tmp_path, capsys):
    """A CPU has no plan. The command's files are those of the functions."""
    assert split.device_kind == "cpu" and split.planned is None
    assert all(op.planned_ms is None for op in split.ops)
    workdir = str(traced)
    assert command.main([workdir, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    files = [f"--{kind}={tmp_path / f'p.{kind}'}" for kind in ("json", "html")]
    assert command.main([workdir, "--trace=1", *files]) == 0
    assert (tmp_path / "p.json").read_text() == profile.to_json(split)
    text = (tmp_path / "p.html").read_text()
    assert text == profile.make_html(split)
    assert_self_contained(text)


def test_jax_writes_the_timeline_beside_the_trace(split: StepProfile):
    """Perfetto opens this file. It has the steps and their operations."""
    trace = Path(split.trace)
    beside = trace.with_name(trace.name.replace(".xplane.pb", ".trace.json.gz"))
    assert str(beside) in profile.make_html(split)
    names = {event.get("name", "") for event in json.loads(gzip.decompress(beside.read_bytes()))["traceEvents"]}
    assert "train" in names and any(name.startswith("all-reduce") for name in names)
