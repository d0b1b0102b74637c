"""What is read from traces of GPUs. No such trace has been recorded yet; this one is written by the schema.

Its program has a plan: what the plan lays out in time, the profile must find again, to the millisecond.
"""

import dataclasses
import sys

import jax
import pytest
from gpu_traces import MESH, PROGRAM, gpu_run, gpu_space, read_gpu
from hlo_text import RATES
from pages import EVIL, assert_self_contained

from jaxtrain.plan.program import roofline
from jaxtrain.profile import __main__ as command
from jaxtrain.profile import load, measure, page, parts, program, trace
from jaxtrain.profile.diff import diff
from jaxtrain.profile.result import HIDDEN


def test_a_trace_of_the_plan_is_the_plan(tmp_path, monkeypatch):
    """Three gathers of 100 MB in a loop beside GEMMs of 1 ms each: all but what the GEMMs hide is exposed."""
    space, planned = gpu_space()
    found = read_gpu(tmp_path, monkeypatch, space)
    assert found.steps == (40, 41) and found.device_kind == "NVIDIA H200" and len(found.devices) == 2
    assert found.step_ms == pytest.approx(planned.step_ms, abs=1e-3)
    assert found.by_kind["GEMM"] == pytest.approx(planned.gemm_ms, abs=1e-3) and planned.gemm_ms == pytest.approx(4)
    assert found.by_kind["exposed collectives"] == pytest.approx(planned.exposed_ms, abs=1e-3)
    assert found.hidden["collectives"] == pytest.approx(planned.communication_ms - planned.exposed_ms, abs=1e-3)
    assert 0 < planned.exposed_ms < planned.communication_ms
    assert found.by_kind["idle"] == pytest.approx(0, abs=1e-3)
    assert found.by_part["mlp, forward"]["GEMM"] == pytest.approx(3, abs=1e-3)
    assert found.by_part["loss, backward"] == {"GEMM": pytest.approx(1, abs=1e-3)}
    assert found.by_part["optimizer"] == {"elementwise": pytest.approx(0.2, abs=1e-3)}
    # Counted from the compiled program, and so what the plan itself says.
    assert found.planned is not None and found.planned.step_ms == pytest.approx(planned.step_ms)
    for kind, ms in found.planned.by_kind.items():
        assert ms == pytest.approx(found.by_kind[kind], abs=1e-3), kind
    for part, ms in found.planned.by_part.items():
        assert ms == pytest.approx(sum(sum(k.values()) for n, k in found.by_part.items() if n.split(",")[0] == part), abs=1e-3)
    (op,) = [op for op in found.ops if op.label == "forward mlp/BTD,DF->BTF"]
    assert (op.count, op.gflop, op.ran_ms, op.planned_ms) == (3, pytest.approx(300), pytest.approx(3), pytest.approx(3))
    assert found.timeline.links and found.planned.timeline.links
    assert any("command buffers" in note for note in found.notes)


def test_a_gap_is_idle_and_a_straggler_is_named(tmp_path, monkeypatch):
    space, planned = gpu_space(late_ms=0.5)
    found = read_gpu(tmp_path, monkeypatch, space)
    assert [d.idle_ms for d in found.devices] == pytest.approx([0, 0.5], abs=1e-3)
    assert [d.step_ms for d in found.devices] == pytest.approx([planned.step_ms, planned.step_ms + 0.5], abs=1e-3)
    assert found.by_kind["idle"] == pytest.approx(0.25, abs=1e-3), "the mean of two devices"


def test_kernels_without_a_program_are_told_by_name(tmp_path, monkeypatch):
    space, _ = gpu_space()
    plane = next(p for p in space.space.planes if p.name == "/device:GPU:0")
    read = program.read_text(PROGRAM, MESH, 2)
    end = 2 * roofline.predict(read.module, RATES, read.wires).step_ms
    extra = [("MemcpyH2D", 0.1, 0.3, {}), ("Memset", end, end + 1, {})]
    space.line(plane, "Stream #30(MemcpyH2D)", extra)
    found = read_gpu(tmp_path, monkeypatch, space)
    (copied,) = [op for op in found.ops if op.label == "MemcpyH2D"]
    assert (copied.kind, copied.part) == ("host copies", "data")
    assert copied.hidden_ms == pytest.approx(0.2 / 4), "of four steps on devices, one; beside a GEMM"
    assert not [op for op in found.ops if op.label == "Memset"], "after the last step"
    assert parts.by_kernel("nvjet_tst_128x256").kind == "GEMM" and parts.by_kernel("cudnn_fmha_bwd").kind == "attention"


def test_of_an_unknown_gpu_nothing_is_planned(tmp_path, monkeypatch):
    space, _ = gpu_space()
    path = gpu_run(tmp_path, space) / "receipt.json"
    path.write_text(path.read_text().replace("NVIDIA H200", "Riva 128"))
    found = load.profile(load.traces(tmp_path)[0], load.run_around(tmp_path))
    assert found.planned is None and found.no_plan == "no plan: nothing is known of Riva 128"
    alone = space.write(tmp_path / "elsewhere" / "alone.xplane.pb")
    (tmp_path / "receipt.json").unlink()
    found = load.profile(alone, load.run_around(alone))
    assert "stands in the receipt of its run" in found.no_plan and found.by_kind["GEMM"] > 0
    assert found.program and found.program.unread, "without the mesh, what collectives send is not known, and that is said"


def test_the_schema_is_that_of_jax():
    """What is written by it, JAX's own reader reads the same way."""
    space, _ = gpu_space(steps=1)
    theirs = jax.profiler.ProfileData.from_serialized_xspace(space.space.SerializeToString())
    ours = {plane.name: trace._Plane(plane) for plane in space.space.planes}
    for plane in theirs.planes:
        mine = ours[plane.name]
        for line, my_line in zip(plane.lines, mine.plane.lines, strict=True):
            assert line.name == my_line.name
            for event, my_event in zip(line.events, my_line.events, strict=True):
                start, end = mine.times(my_line, my_event)
                assert (event.name, event.start_ns) == (mine.names[my_event.metadata_id], pytest.approx(start, abs=1))
                assert event.duration_ns == pytest.approx(end - start, abs=1)
                assert {k: v for k, v in event.stats if not k.startswith("_")} == mine.stats(my_event)


def test_time_that_is_shared_is_divided():
    """Two GEMMs at once for 4 ns, one alone for 6: 2 + 6 and 2 of 10; a collective beside them is hidden."""
    known = {
        name: parts.Origin(kind, "mlp", "forward", name, "")
        for name, kind in (("a", "GEMM"), ("b", "GEMM"), ("c", "collectives"))
    }
    ran = [(0.0, 10.0, "a"), (6.0, 10.0, "b"), (8.0, 14.0, "c")]
    events = tuple(trace.Event(start, end, op, op, 0, -1) for start, end, op in ran)
    made = measure.sums(events, (measure.Window(0, 0.0, 20.0),), 0, known)
    assert {o.label: ns for o, ns in made.time.items()} == {"a": 8.0, "b": 2.0, "c": 4.0}
    assert {o.label: ns for o, ns in made.hidden.items()} == {"c": 2.0}
    spent, hidden = measure.by_kind({0: made})
    assert spent == pytest.approx({"GEMM": 10e-6, "exposed collectives": 4e-6, "idle": 6e-6}) and hidden == {
        "collectives": 2e-6
    }
    assert set(hidden) <= set(HIDDEN)


@pytest.mark.parametrize(
    ("op_name", "part", "phase"),
    [
        ("jit(train_step)/jvp(layers)/while/body/eval_jaxpr/mlp/BTD,DF->BTF/dot_general", "mlp", "forward"),
        (
            "jit(train_step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/attention/mul",
            "attention",
            "recompute",
        ),
        ("jit(train_step)/transpose(jvp(jvp(layers)))/jvp()/checkpoint/(attention/mul:mlp/add)", "attention", "backward"),
        ("jit(train_step)/jvp(layers)/while/body/jit(dynamic_index_in_dim)/dynamic_slice", "layers", "forward"),
        ("jit(train_step)/while/body/closed_call/jvp(loss)/while/body/CD,DV->CV/dot_general", "loss", "forward"),
        ("jit(train_step)/transpose(jvp(embed))/shard_map/scatter-add", "embed", "backward"),
        ("jit(train_step)/optimizer/jit(_where)/select_n", "optimizer", ""),
        ("jit(train_step)/while/body/accumulate/add", "accumulate", ""),
        ("jit(train_step)/jvp(layers)/while/body/their_own/moe/mul", "their_own", "forward"),
        ("jit(train_step)/add", "", "forward"),
        ("", "", "forward"),
    ],
)
def test_parts_by_name(op_name, part, phase):
    assert (parts.part_of(op_name), parts.phase_of(op_name)) == (part, phase)


# ---- Reports and the command


def test_the_diff_says_what_became_slower(tmp_path, monkeypatch):
    before = read_gpu(tmp_path / "a", monkeypatch, gpu_space()[0])
    after = read_gpu(tmp_path / "b", monkeypatch, gpu_space(late_ms=0.5)[0])
    found = diff(before, after)
    assert found.step.ms == pytest.approx(0.25, abs=1e-3)
    assert (found.kinds[0].name, found.kinds[0].ms) == ("idle", pytest.approx(0.25, abs=1e-3))
    assert all(abs(c.ms) < 1e-3 for c in (*found.kinds[1:], *found.parts, *found.ops))
    assert sum(c.ms for c in found.kinds) == pytest.approx(found.step.ms, abs=1e-3)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "there is no such file or folder"),
        ({}, [], "no trace below this folder (*.xplane.pb). Start the run with --config.profile.start=STEP"),
        ({"t.xplane.pb": b"\xff\xff"}, [], "no trace of JAX's profiler, or only a part of one"),
        ({"t.xplane.pb": b""}, [], "no operation of a compiled program ran in this trace (planes: none)"),
        ({"t.xplane.pb": b""}, ["--trace=2"], "has 1; name one of --list, from 1"),
        ({"t.xplane.pb": b""}, ["--xprof"], "xprof-env/bin/pip install xprof"),
        ({"train_step.hlo.txt": b"nonsense"}, [], "not an HLO module"),
    ],
)
def test_what_cannot_be_read_is_said(content, arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name, data in (content or {}).items():
        (tmp_path / name).write_bytes(data)
    target = tmp_path if content is not None else tmp_path / "missing"
    assert command.main([str(target), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_page_stands_alone(tmp_path, monkeypatch):
    found = read_gpu(tmp_path, monkeypatch, gpu_space()[0])
    text = page.html(found, diff(found, found))
    assert_self_contained(text)
    assert text.count('<svg class="lanes"') == 2, "as it ran and as planned"
    for name in ("A step as it ran", "Time by part", "What changed"):
        assert f"<h2>{name}</h2>" in text
    assert '<script>alert("1' not in page.html(dataclasses.replace(found, name=EVIL))
