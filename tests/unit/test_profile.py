"""Profiles of GPU traces. No real trace has been recorded yet; this one is made from a plan.

The plan gives each operation a time. The profile of the trace must return those times, to the millisecond.
"""

import dataclasses
import sys
from pathlib import Path

import pytest
from gpu_traces import MESH, PROGRAM, gpu_run, gpu_space, profile_of, read_gpu
from pages import EVIL, assert_self_contained
from sample_plan import sample

from jaxtrain.commands import profile as command
from jaxtrain.metrics.profiling import HLO_TEXT
from jaxtrain.plan.program import hlo
from jaxtrain.plan.topology import parse_topology
from jaxtrain.report import layer_schedule, profile, profile_program, profile_times, profile_trace
from jaxtrain.report.profile_program import Operation


def test_a_trace_of_the_plan_is_the_plan(tmp_path, monkeypatch):
    """Three gathers of 100 MB in a loop run beside matmuls of 1 ms each. A gather's time beyond its matmul is exposed."""
    space, planned = gpu_space()
    found = read_gpu(tmp_path, monkeypatch, space)
    assert found.steps == (40, 41) and found.device_kind == "NVIDIA H200" and len(found.by_device) == 2
    assert found.step_ms == pytest.approx(planned.step_ms, abs=1e-3)
    assert found.by_kind["matmul"] == pytest.approx(planned.gemm_ms, abs=1e-3) and planned.gemm_ms == pytest.approx(4)
    assert found.by_kind["exposed communication"] == pytest.approx(planned.exposed_ms, abs=1e-3)
    assert found.overlapped["communication"] == pytest.approx(planned.communication_ms - planned.exposed_ms, abs=1e-3)
    assert 0 < planned.exposed_ms < planned.communication_ms
    assert found.by_kind["idle"] == pytest.approx(0, abs=1e-3)
    assert found.by_part["mlp, forward"]["matmul"] == pytest.approx(3, abs=1e-3)
    assert found.by_part["loss, backward"] == {"matmul": pytest.approx(1, abs=1e-3)}
    assert found.by_part["optimizer"] == {"memory-bound": pytest.approx(0.2, abs=1e-3)}
    # The plan of the same program has the same figures.
    assert found.planned is not None and found.planned.step_ms == pytest.approx(planned.step_ms)
    for kind, ms in found.planned.by_kind.items():
        assert ms == pytest.approx(found.by_kind[kind], abs=1e-3), kind
    for part, ms in found.planned.by_part.items():
        assert ms == pytest.approx(sum(found.by_part[part].values()), abs=1e-3)
    (op,) = [op for op in found.ops if op.label == "forward mlp/BTD,DF->BTF"]
    assert (op.count, op.gflop, op.ran_ms, op.planned_ms) == (3, pytest.approx(300), pytest.approx(3), pytest.approx(3))


def test_a_gap_is_idle_and_a_straggler_is_named(tmp_path, monkeypatch):
    before = read_gpu(tmp_path / "a", monkeypatch, gpu_space()[0])
    found = read_gpu(tmp_path / "b", monkeypatch, gpu_space(late_ms=0.5)[0])
    assert [kinds["idle"] for kinds in found.by_device.values()] == pytest.approx([0, 0.5], abs=1e-3)
    assert [sum(kinds.values()) for kinds in found.by_device.values()] == pytest.approx(
        [before.step_ms, before.step_ms + 0.5], abs=1e-3
    )
    longer = {kind: ms - before.by_kind[kind] for kind, ms in found.by_kind.items()}
    assert longer == pytest.approx(dict.fromkeys(longer, 0.0) | {"idle": 0.25}, abs=1e-3), "the mean of two devices"


def test_kernels_without_an_operation_are_sorted_by_name(tmp_path, monkeypatch):
    space, planned = gpu_space()
    end = 2 * planned.step_ms
    extra = [("MemcpyH2D", 0.1, 0.3, {}), ("Memset", end, end + 1, {})]
    space.line("/device:GPU:0", "Stream #30(MemcpyH2D)", extra)
    found = read_gpu(tmp_path, monkeypatch, space)
    (copied,) = [op for op in found.ops if op.label == "MemcpyH2D"]
    assert (copied.kind, copied.part) == ("host copies", "data")
    assert copied.overlapped_ms == pytest.approx(0.2 / 4), "in one of four steps of devices, beside a matmul"
    assert not [op for op in found.ops if op.label == "Memset"], "after the last step"
    for kernel, kind in (("nvjet_tst_128x256", "matmul"), ("cudnn_fmha_bwd", "attention")):
        assert profile_program.kernel_operation(kernel).kind == kind


def test_what_is_missing_beside_a_trace_is_missing_in_its_profile_alone(tmp_path, monkeypatch):
    folder = gpu_run(tmp_path, gpu_space()[0])
    path = folder / "receipt.json"
    path.write_text(path.read_text().replace("NVIDIA H200", "Riva 128"))
    found = profile_of(folder)
    assert found.planned is None and "Riva 128" in found.no_plan
    path.unlink()
    found = profile_of(folder)
    assert found.no_plan and found.by_kind["matmul"] == pytest.approx(4, abs=1e-3) and found.notes
    step_ms = found.step_ms
    Path(found.trace).with_name(HLO_TEXT).unlink()
    found = profile_of(folder)
    assert found.named == 0 and HLO_TEXT in found.notes[0]
    assert found.step_ms == pytest.approx(step_ms) and found.overlapped["communication"] > 0


def test_time_at_once_is_divided():
    """Matmul a runs alone for 6 ns, then beside matmul b for 4 ns. Of these 10 ns, a counts 8 and b counts 2. Communication
    overlaps with both matmuls.
    """
    kinds = {"a": "matmul", "b": "matmul", "c": "communication"}
    operations = {name: Operation(kind, "mlp", "forward", name, "") for name, kind in kinds.items()}
    ran = [(0.0, 10.0, "a"), (6.0, 10.0, "b"), (8.0, 14.0, "c"), (12.0, 12.0, "a")]
    events = [(profile_trace.TraceEvent(start, end, op, op, 0, -1), operations[op]) for start, end, op in ran]
    sums = profile_times.divide_time(
        events, [profile_times.Window(0, 0.0, 20.0)], {(0, name): (1.0, 2.0, 3.0) for name in kinds}
    )
    rows = {o.label: list(row) for o, row in sums.items()}
    assert rows["a"] == [8, 0, 10, 2, 2, 4, 6] and rows["b"] == [2, 0, 4, 1, 1, 2, 3] and rows["c"] == [4, 2, 6, 1, 1, 2, 3]


OP_NAMES = {
    "jvp(layers)/while/body/eval_jaxpr/mlp/BTD,DF->BTF/dot_general": ("mlp", "forward"),
    "transpose(jvp(layers))/while/body/checkpoint/rematted_computation/attention/mul": ("attention", "recompute"),
    "transpose(jvp(jvp(layers)))/jvp()/checkpoint/(attention/mul:mlp/add)": ("attention", "backward"),
    "jvp(layers)/while/body/jit(dynamic_index_in_dim)/dynamic_slice": ("layers", "forward"),
    "while/body/closed_call/jvp(loss)/while/body/CD,DV->CV/dot_general": ("loss", "forward"),
    "optimizer/jit(_where)/select_n": ("optimizer", ""),
    "jvp(layers)/while/body/their_own/moe/mul": ("their_own", "forward"),
    "add": ("", "forward"),
}


@pytest.mark.parametrize("name", OP_NAMES)
def test_parts_by_name(name: str):
    op_name = f"jit(train_step)/{name}"
    assert (profile_program.scope_of(op_name), profile_program.phase_of(op_name)) == OP_NAMES[name]


# ---- Reports and the command


@pytest.mark.parametrize(
    ("content", "arguments"),
    [(None, []), ({}, []), ({"t.xplane.pb": b"\xff\xff"}, []), ({"t.xplane.pb": b""}, []), ({"t.xplane.pb": b""}, ["--xprof"])],
)
def test_targets_that_cannot_be_read(content, arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name, data in (content or {}).items():
        (tmp_path / name).write_bytes(data)
    target = tmp_path if content is not None else tmp_path / "missing"
    assert command.main([str(target), *arguments]) == 2
    assert capsys.readouterr().out == ""


def test_xprof_gets_the_same_trace(tmp_path, monkeypatch):
    given: list[str] = []
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(profile_trace.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(profile_trace.subprocess, "call", given.extend)
    folder = gpu_run(tmp_path, gpu_space(steps=1)[0])
    assert command.main([str(folder), "--xprof"]) == 0
    assert given == ["/bin/xprof", "--logdir", str(folder / "profile")]


def test_collectives_are_named_after_their_kind_and_axis(tmp_path, monkeypatch):
    """Without the program's HLO, the collective is that of the kernel's name."""
    (op,) = [op for op in read_gpu(tmp_path, monkeypatch, gpu_space()[0]).ops if op.kind == "communication"]
    assert (op.collective, op.count) == ("all-gather over fsdp", 3)
    named = {"ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)": "reduce-scatter", "ncclDevKernel_SendRecv(x)": "", "gemm": ""}
    assert {kernel: profile_program.kernel_operation(kernel).collective for kernel in named} == named


def test_the_page_fetches_nothing(tmp_path, monkeypatch):
    found = read_gpu(tmp_path, monkeypatch, gpu_space()[0])
    assert_self_contained(profile.make_html(found))
    ops = tuple(dataclasses.replace(op, label=EVIL) for op in found.ops)
    assert '<script>alert("1' not in profile.make_html(dataclasses.replace(found, name=EVIL, ops=ops))


# ---- The schedule of one layer, in a plan


def test_lanes_are_cut_to_the_layer(monkeypatch: pytest.MonkeyPatch):
    """The lanes have one of the loop's three iterations. A matmul stands for attention, and a gather overlaps it."""
    monkeypatch.setitem(layer_schedule.roofline.KIND_OF_WORK, "gemm", "attention")
    lanes = layer_schedule.layer_events(hlo.parse_hlo(PROGRAM), MESH, parse_topology("h200:2"), sample().rates, 3)
    assert set(lanes) == {"forward: computation", "forward: links"}
    (attention,) = [e for e in lanes["forward: computation"] if e.kind == "attention"]
    assert attention.start == 0 and attention.label == "forward mlp/BTD,DF->BTF"
    ends = {name: max(e.end for e in lane) for name, lane in lanes.items()}
    assert ends["forward: links"] <= ends["forward: computation"] or ends["forward: computation"] == attention.end
    assert all(e.start >= 0 and e.end > e.start for lane in lanes.values() for e in lane)
    assert all(e.kind == "communication" for e in lanes["forward: links"])
