"""Traces of a real run on the devices of this process, and their profiles."""

import itertools
import json
import math
from pathlib import Path

import pytest
import runs
from pages import assert_self_contained

from jaxtrain.commands import profile as command
from jaxtrain.metrics.profiling import HLO_TEXT
from jaxtrain.plan.program import hlo
from jaxtrain.report import profile, profile_page, profile_program, profile_trace
from jaxtrain.report.profile import Profile
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
def split(traced: Path) -> Profile:
    return profile.profile(profile_trace.find(traced)[0], profile.run_around(traced))


def test_steps_asked_for_are_traced_and_in_no_rate(traced: Path, split: Profile):
    """Traced steps have no step time. The time of the profiler, and of writing the trace, does not count as training time."""
    assert split.steps == WINDOW
    rates = {line["step"]: line["step_time_s"] for line in runs.lines(traced)}
    # The line after step 3 reports 4 steps.
    assert [rates[step] for step in (4, 5, 6)] == [None, None, None]
    times = sorted(t for t in rates.values() if t is not None)
    assert split.untraced_ms is not None and times[0] <= split.untraced_ms / 1e3 <= times[-1]


def test_time_is_divided_by_parts_and_passes(split: Profile):
    assert split.named >= 0.95
    named = {name.partition(",")[0] for name in split.by_part}
    assert PARTS <= named <= PARTS | {"layers", "final_norm", "weights", "gather", "reduce", NO_SCOPE}
    passes = {name.partition(", ")[2] for name in split.by_part if name.startswith("mlp")}
    assert passes == {"forward", "backward", "recompute"}, "remat.policy=full"


def test_every_millisecond_of_a_step_is_counted_once(split: Profile):
    assert tuple(split.by_kind) == KINDS
    assert sum(split.by_kind.values()) == pytest.approx(split.step_ms)
    ran = sum(ms for kinds in split.by_part.values() for ms in kinds.values())
    assert ran == pytest.approx(split.step_ms - split.by_kind["idle"])
    assert sum(op.ms for op in split.ops) == pytest.approx(ran)
    assert [d.device for d in split.devices] == list(range(8)) and split.by_kind["exposed communication"] > 0
    for d in split.devices:
        assert d.busy_ms + d.exposed_ms + d.idle_ms == pytest.approx(d.step_ms)
    assert split.step_range_ms[0] <= split.step_ms <= split.step_range_ms[1]
    for lane in split.lanes.values():
        assert all(a.end <= b.start for a, b in itertools.pairwise(lane)), "operations of a lane do not overlap"
        assert lane[0].start >= 0 and lane[-1].end <= split.step_range_ms[1] * (1 + 1e-9)


def test_work_is_that_of_the_program(split: Profile):
    """FLOPs of the trace's operations equal those of the compiled step, which has no instruction of unknown cost."""
    text = Path(split.trace).with_name(HLO_TEXT).read_text()
    run = profile.run_around(Path(split.trace))
    compiled = profile_program.read(text, run.mesh, run.gpus)
    assert compiled.unknown == ()
    flops = sum(compiled.work[i.name].flops * n for i, _, n, _ in hlo.walk(compiled.module) if i.name in compiled.work)
    assert math.fsum(op.gflop or 0 for op in split.ops) == pytest.approx(flops / 1e9)
    (op,) = [op for op in split.ops if op.label == "forward mlp/BTF,DF->BTD"]
    assert op.gflop == pytest.approx(2 * 64 * 64 * 32 / 1e9), "a layer, and a sequence of 64 tokens on each device"
    assert op.count == 1 and op.source.startswith("jaxtrain/models/layers.py:") and op.kind == "matmul"


def test_reports_of_a_cpu(traced: Path, split: Profile, tmp_path, capsys):
    """A CPU has no plan. The command's files are those of the functions."""
    assert split.device_kind == "cpu" and split.planned is None
    assert all(op.planned_ms is None for op in split.ops)
    workdir = str(traced)
    assert command.main([workdir, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    files = [f"--{kind}={tmp_path / f'p.{kind}'}" for kind in ("json", "html", "perfetto")]
    assert command.main([workdir, "--trace=1", f"--diff={workdir}", *files]) == 0
    tree = json.loads((tmp_path / "p.json").read_text())
    diff = tree.pop("diff")
    assert tree == json.loads(profile_page.to_json(split))
    assert diff["changes"]["step"][0]["after_ms"] == tree["step_ms"]
    text = (tmp_path / "p.html").read_text()
    assert text == profile_page.make_html(split, profile.diff(split, split))
    assert_self_contained(text)
    assert {e["pid"] for e in json.loads((tmp_path / "p.perfetto").read_text())["traceEvents"]} == set(range(8))
