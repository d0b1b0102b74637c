"""Traces and what is read from them: of real runs on a CPU, with a real signal, and of a GPU by its documented form.

No trace of a GPU has been recorded yet. The one here is written by the schema from a program whose plan is known: what the plan
lays out in time, the profile must find again, to the millisecond.
"""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import runs
from hlo_text import BIG, COMPUTATIONS, ELEMENTS, RATES, gemm
from test_plan_report import BROWSER, opened

from jaxtrain import receipt
from jaxtrain.plan.program import roofline
from jaxtrain.profile import __main__ as command
from jaxtrain.profile import load, measure, page, parts, program, report, trace
from jaxtrain.profile.diff import diff
from jaxtrain.profile.result import HIDDEN, KINDS, NO_SCOPE, Profile, to_json

TINY = runs.REPO / "configs" / "tiny.py"
PARTS = {"attention", "mlp", "loss", "optimizer", "embed", "layers"}


@pytest.fixture(scope="module")
def run_of_tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """`tiny` in a process of its own, traced by its config and then twice by a signal: folder, exit code, what it said."""
    folder = tmp_path_factory.mktemp("tiny")
    workdir, asked = (
        folder / "run",
        {"profile__start": 3, "profile__steps": 2, "log__every_steps": 1, "data__source": "synthetic"},
    )
    off = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "sample__max_tokens": 0, "log__tensorboard": "false"}
    off["paths__cache"] = ""  # an executable from the compile cache is not recorded whole: see below
    child = runs.Child(
        TINY, workdir, folder / "words.txt", env={"XLA_FLAGS": "--xla_backend_optimization_level=0"}, **asked, **off
    )
    for taken in (1, 2, 3):
        child.until(lambda taken=taken: child.said.count("Trace: ") == taken)
        if taken < 3:
            child.process.send_signal(signal.SIGUSR2)
    child.process.send_signal(signal.SIGTERM)
    code, said = child.end()
    return workdir, code, said


@pytest.fixture(scope="module")
def tiny(run_of_tiny: tuple[Path, int, str]) -> Profile:
    workdir = run_of_tiny[0]
    return load.profile(load.traces(workdir)[0], load.run_around(workdir))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """A smaller model on 8 devices of this process."""
    folder = tmp_path_factory.mktemp("split")
    (folder / "small.py").write_text(runs.SMALL)
    asked = {"profile__start": 5, "profile__steps": 2, "train__steps": 8, "data__source": "synthetic"}
    off = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "model__num_layers": 1}
    assert runs.train(folder / "small.py", folder / "run", **asked, **off) == 0
    return load.profile(load.traces(folder / "run")[-1], load.run_around(folder / "run"))


# ---- Taking traces


def test_each_signal_takes_a_trace_and_changes_nothing_else(run_of_tiny):
    workdir, code, said = run_of_tiny
    assert code == 75 and receipt.load(workdir / "receipt.json")["reason"].startswith("SIGTERM")
    assert said.count("SIGUSR2: a trace was asked for.") == 2
    windows = [(int(a), int(b)) for a, b in re.findall(r"Tracing steps (\d+) to (\d+)\.", said)]
    assert len(windows) == 3 and windows[0] == (3, 4)
    assert all(b == a + 1 for a, b in windows), "profile.steps steps each time"
    found = load.traces(workdir)
    assert [path.parent.name.rpartition("_")[2] for path in found] == [str(a) for a, _ in windows]
    assert f"python -m jaxtrain.profile {workdir}" in said


def test_traced_steps_are_in_no_rate(run_of_tiny):
    """The profiler's own time, and that of writing the trace, would be taken for training."""
    workdir, _, said = run_of_tiny
    rates = {line["step"]: line["step_time_s"] for line in runs.lines(workdir)}
    for first, last in re.findall(r"Tracing steps (\d+) to (\d+)\.", said):
        # A line tells of the steps done: step 3 makes 4.
        assert [rates[step] for step in range(int(first) + 1, int(last) + 3)] == [None, None, None]


# ---- What a trace of a CPU says


def test_tiny_is_told_by_parts(tiny: Profile):
    assert tiny.steps == (3, 4) and tiny.device_kind == "cpu" and len(tiny.devices) == 1
    assert tiny.named >= 0.95
    named = {name.partition(",")[0] for name in tiny.by_part}
    assert named <= PARTS | {"final_norm", NO_SCOPE} and named >= PARTS - {"layers"}
    passes = {name.partition(", ")[2] for name in tiny.by_part if name.startswith("mlp")}
    assert passes == {"forward", "backward", "recompute"}, "remat.policy=full"
    assert "optimizer" in tiny.by_part, "outside of every pass"


def test_every_millisecond_of_a_step_is_counted_once(tiny: Profile, split: Profile):
    for found in (tiny, split):
        assert tuple(found.by_kind) == KINDS
        assert sum(found.by_kind.values()) == pytest.approx(found.step_ms)
        told = sum(ms for kinds in found.by_part.values() for ms in kinds.values())
        assert told == pytest.approx(found.step_ms - found.by_kind["idle"])
        assert sum(op.ms for op in found.ops) == pytest.approx(told)
        for d in found.devices:
            assert d.busy_ms + d.exposed_ms + d.idle_ms == pytest.approx(d.step_ms)
        assert found.step_range_ms[0] <= found.step_ms <= found.step_range_ms[1]
        drawn = sum(s.end - s.start for s in found.timeline.device)
        assert drawn == pytest.approx(found.timeline.ms, rel=1e-3)


def test_work_is_that_of_the_program(tiny: Profile):
    """FLOPs of GEMMs seen in the trace are those of the compiled step, and nothing was left uncounted."""
    assert tiny.program is not None and tiny.program.unread == ()
    seen = math.fsum(op.gflop or 0 for op in tiny.ops)
    compiled = math.fsum(cell[1] for cells in tiny.program.by_part.values() for cell in cells.values())
    assert seen == pytest.approx(compiled)
    down = [op for op in tiny.ops if op.label == "forward mlp/BTF,DF->BTD"]
    (op,) = down
    assert op.gflop == pytest.approx(2 * 16 * 128 * 384 * 128 * 4 / 1e9), "4 layers, 16 sequences of 128 tokens"
    assert op.count == 4 and op.source.startswith("jaxtrain/models/layers.py:") and op.kind == "GEMM"


def test_memory_at_the_peak_is_the_compilers(tiny: Profile, run_of_tiny):
    assert tiny.program is not None and tiny.program.held is not None
    held = tiny.program.held
    memory = receipt.load(run_of_tiny[0] / "receipt.json")["memory_gib"]
    assert sum(held.by_part.values()) == pytest.approx(held.peak_gib)
    assert held.arguments_gib == pytest.approx(memory["parameters"] + memory["optimizer state"] + memory["batch"], rel=1e-3)
    assert held.arguments_gib < held.peak_gib <= sum(memory.values()) * 1.001
    assert held.largest[0][0] >= held.largest[-1][0] > 0


def test_a_program_from_the_compile_cache_is_read_from_beside_the_trace(tiny: Profile, run_of_tiny, monkeypatch):
    """XLA then records none with the trace. Of what it holds the text says nothing."""
    whole = trace.read(Path(tiny.trace))
    assert whole.programs
    monkeypatch.setattr(trace, "read", lambda path: dataclasses.replace(whole, programs={}))
    found = load.profile(whole.path, load.run_around(run_of_tiny[0]))
    assert found.program and tiny.program and found.program.held is None
    assert dataclasses.replace(found, program=None) == dataclasses.replace(tiny, program=None)
    assert found.program.by_part == tiny.program.by_part
    monkeypatch.setattr(load, "HLO_TEXT", "missing")
    found = load.profile(whole.path, load.run_around(run_of_tiny[0]))
    assert found.program is None and found.named == 0 and "holds the program" in found.notes[0]
    assert sum(found.by_kind.values()) == pytest.approx(tiny.step_ms)


def test_devices_are_told_apart(split: Profile):
    assert [d.device for d in split.devices] == list(range(8))
    assert split.by_kind["exposed collectives"] > 0 and split.by_part["optimizer"]
    assert {op.kind for op in split.ops} >= {"GEMM", "elementwise", "collectives"}
    sent = [op for op in split.ops if op.kind == "collectives"]
    assert all(op.gb is not None for op in sent) and sum(op.gb or 0 for op in sent) > 0
    assert split.named >= 0.95
    assert any("share its cores" in note for note in split.notes)


def test_there_is_no_plan_for_a_cpu(tiny: Profile):
    assert tiny.planned is None and tiny.no_plan == "no plan for a CPU"
    assert all(op.planned_ms is None for op in tiny.ops)


def test_a_trace_does_not_pass_for_the_run(tiny: Profile, run_of_tiny):
    times = sorted(t for line in runs.lines(run_of_tiny[0]) if (t := line["step_time_s"]) is not None)
    assert tiny.untraced_ms is not None and times[0] <= tiny.untraced_ms / 1e3 <= times[-1]


# ---- A trace of a GPU, by its form


def named(op_name: str) -> str:
    return f', metadata={{op_name="jit(f)/{op_name}"}}'


STATE = f"(s32[], {BIG}, bf16[1000,5000]{{1,0}}, bf16[5000,10000]{{1,0}})"
GATHER = (
    f"({BIG}, f32[{2 * ELEMENTS}]{{0}}) all-gather-start(%held), replica_groups={{{{0,1}}}}, dimensions={{0}}, channel_id=1"
)
GATHER += ", use_global_device_ids=true" + named("jvp(layers)/while/body/mlp/all_gather")
MATMUL = "bf16[1000,10000]{1,0} fusion(%left, %right), kind=kCustom, calls=%matmul"
MATMUL += named("jvp(layers)/while/body/mlp/BTD,DF->BTF/dot_general")
PROGRAM = f"""HloModule jit_f, is_scheduled=true, num_partitions=2
{COMPUTATIONS}
%body (s: {STATE}) -> {STATE} {{
  %s = {STATE} parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %held = {BIG} get-tuple-element(%s), index=1
  %left = bf16[1000,5000]{{1,0}} get-tuple-element(%s), index=2
  %right = bf16[5000,10000]{{1,0}} get-tuple-element(%s), index=3
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %start = {GATHER}
  %inside = {MATMUL}
  %end = f32[{2 * ELEMENTS}]{{0}} all-gather-done(%start)
  ROOT %again = {STATE} tuple(%next, %held, %left, %right)
}}

%small (c: {STATE}) -> pred[] {{
  %c = {STATE} parameter(0)
  %m = s32[] get-tuple-element(%c), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%m, %three), direction=LT
}}

ENTRY %main (x: {BIG}, a.1: bf16[1000,5000], b.1: bf16[5000,10000]) -> {BIG} {{
  %x = {BIG} parameter(0)
  %a.1 = bf16[1000,5000]{{1,0}} parameter(1)
  %b.1 = bf16[5000,10000]{{1,0}} parameter(2)
  %zero = s32[] constant(0)
  %state = {STATE} tuple(%zero, %x, %a.1, %b.1)
  %loop = {STATE} while(%state), condition=%small, body=%body{named("jvp(layers)/while")}
  %out = {BIG} get-tuple-element(%loop), index=1{gemm("last")}{named("transpose(jvp(loss))/dot_general")}
  ROOT %update = {BIG} fusion(%out), kind=kLoop, calls=%twice{named("optimizer/add")}
}}
"""
MESH = {"data": 1, "fsdp": 2, "tensor": 1, "seq": 1}
NUMBER = 7  # of the program


class Space:
    """An XSpace under construction, by the schema that the reader uses."""

    def __init__(self) -> None:
        self.space = trace.space_class()()

    def plane(self, name: str) -> Any:
        return self.space.planes.add(name=name)

    def line(self, plane: Any, name: str, events: list[tuple[str, float, float, dict[str, Any]]]) -> None:
        """Events of (name, start and end in ms, stats). A text in a stat is a reference to the table of names."""
        line = plane.lines.add(name=name)
        for event, start, end, stats in events:
            made = line.events.add(
                metadata_id=_id(plane.event_metadata, event),
                offset_ps=round(start * 1e9),
                duration_ps=round((end - start) * 1e9),
            )
            for key, value in stats.items():
                names = plane.stat_metadata
                kind = {"ref_value": _id(names, value)} if isinstance(value, str) else {"int64_value": value}
                made.stats.add(metadata_id=_id(names, key), **kind)

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.space.SerializeToString())
        return path


def _id(table: Any, name: str) -> int:
    for entry in table:
        if entry.value.name == name:
            return entry.key
    entry = table.add(key=len(table) + 1)
    entry.value.name = name
    return entry.key


def gpu_space(steps: int = 2, late_ms: float = 0.0) -> tuple[Space, roofline.Roofline]:
    """What a profiler would record of PROGRAM on two GPUs, if it ran as planned; each step, device 1 is `late_ms` later."""
    from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

    read = program.read_text(PROGRAM, MESH, 2)
    ran: list[tuple[str, str, float, float]] = []
    planned = roofline.predict(read.module, RATES, read.wires, lambda *event: ran.append(event))
    space = Space()
    module = _hlo.hlo_module_from_text(PROGRAM).as_serialized_hlo_module_proto()
    metadata = space.plane(trace.METADATA)
    _id(metadata.stat_metadata, "Hlo Proto")
    _id(metadata.event_metadata, f"jit_f({NUMBER})")
    proto = program._hlo_proto()(module=module).SerializeToString()
    metadata.event_metadata[0].value.stats.add(metadata_id=1, bytes_value=proto)
    for device in range(2):
        compute, links = [], []
        for step in range(steps):
            for name, kind, start, end in ran:
                if kind.startswith(roofline.EXPOSED):
                    continue
                late = late_ms * device * (step + (name in ("last", "update")))
                at = step * planned.step_ms + late
                stats = {"hlo_op": name, "hlo_module": "jit_f", "program_id": NUMBER}
                lane, kernel = (links, "ncclDevKernel") if kind == "communication" else (compute, f"kernel of {name}")
                lane.append((kernel, at + start * 1e3, at + end * 1e3, stats))
        plane = space.plane(f"/device:GPU:{device}")
        space.line(plane, "Stream #13(Kernel)", compute)
        space.line(plane, "Stream #20(Kernel)", links)
        space.line(plane, "XLA Ops", compute)  # repeats what ran: not to be counted again
    host = space.plane(trace.HOST)
    space.line(host, "python", [("train", n * 0.1, n * 0.1 + 0.05, {"step_num": 40 + n}) for n in range(steps)])
    return space, planned


def gpu_run(folder: Path, space: Space) -> Path:
    """A run's folder around a trace."""
    space.write(folder / "profile/plugins/profile/now/host.xplane.pb")
    (folder / "config.json").write_text('{"precision": "bf16"}')
    devices = {"kind": ["NVIDIA H200"], "count": 2, "process_count": 1}
    (folder / "receipt.json").write_text(json.dumps({"devices": devices, "mesh": MESH}))
    return folder


def read_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, space: Space) -> Profile:
    monkeypatch.setattr(load, "rates_for", lambda gpu, precision: RATES)
    return load.profile(load.traces(gpu_run(folder, space))[0], load.run_around(folder))


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
    end = (
        2
        * roofline.predict(program.read_text(PROGRAM, MESH, 2).module, RATES, program.read_text(PROGRAM, MESH, 2).wires).step_ms
    )
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


# ---- Reports


def test_the_diff_says_what_became_slower(tmp_path, monkeypatch):
    before = read_gpu(tmp_path / "a", monkeypatch, gpu_space()[0])
    after = read_gpu(tmp_path / "b", monkeypatch, gpu_space(late_ms=0.5)[0])
    found = diff(before, after)
    assert found.step.ms == pytest.approx(0.25, abs=1e-3)
    assert (found.kinds[0].name, found.kinds[0].ms) == ("idle", pytest.approx(0.25, abs=1e-3))
    assert all(abs(c.ms) < 1e-3 for c in (*found.kinds[1:], *found.parts, *found.ops))
    assert sum(c.ms for c in found.kinds) == pytest.approx(found.step.ms, abs=1e-3)


def test_the_command(run_of_tiny, tiny: Profile, tmp_path, capsys):
    workdir = str(run_of_tiny[0])
    assert command.main([workdir, "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 3 and listed[0].startswith("1  ")
    files = [f"--json={tmp_path / 'p.json'}", f"--html={tmp_path / 'p.html'}"]
    assert command.main([workdir, "--trace=1", f"--diff={workdir}", *files]) == 0
    said = capsys.readouterr().out
    assert "attention, backward" in said and "no plan for a CPU" in said and "change by kind" in said
    assert re.search(r"traced, it takes \d+\.\d\d times that", said)
    tree = json.loads((tmp_path / "p.json").read_text())
    diffed = tree.pop("diff")
    assert tree == json.loads(json.dumps(to_json(tiny)))
    assert diffed["before"].endswith(".xplane.pb") and diffed["step"]["after_ms"] == tree["step_ms"]


def test_a_dump_is_summed_the_same_way(run_of_tiny, tiny: Profile, tmp_path, capsys):
    path = tmp_path / "step.hlo"
    path.write_text(PROGRAM)
    assert command.main([str(path), f"--json={tmp_path / 'd.json'}"]) == 0
    assert "without its buffer assignment" in capsys.readouterr().out
    found = json.loads((tmp_path / "d.json").read_text())["by_part"]
    assert found["mlp"]["GEMM"][:2] == [3, pytest.approx(300)] and found["mlp"]["collectives"][0] == 3
    proto = tmp_path / "module.after_optimizations.hlo.pb"
    whole = trace.read(load.traces(run_of_tiny[0])[0])
    proto.write_bytes(whole.programs[measure.main_program(whole)][1])
    assert load.dump(proto, load.run_around(run_of_tiny[0])) == tiny.program
    assert command.main([str(path), "--html=x.html"]) == 2 and "needs a trace" in capsys.readouterr().err


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


def test_xprof_gets_the_same_trace(tmp_path, capfd, monkeypatch):
    script = tmp_path / "xprof"
    script.write_text('#!/bin/sh\necho "got $*"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    folder = gpu_run(tmp_path / "run", gpu_space(steps=1)[0]) if (tmp_path / "run").mkdir() is None else tmp_path
    assert command.main([str(folder), "--xprof"]) == 0
    assert capfd.readouterr().out == f"got --logdir {folder / 'profile'}\n"


def test_the_page_stands_alone(tiny: Profile, split: Profile, tmp_path, monkeypatch):
    gpu = read_gpu(tmp_path / "gpu" if (tmp_path / "gpu").mkdir() is None else tmp_path, monkeypatch, gpu_space()[0])
    for found, planned in ((tiny, False), (split, False), (gpu, True)):
        text = page.html(found, diff(found, found))
        assert not re.findall(r"https?:|//[a-z]|@import|url\(", re.sub(r"// .*", "", text))
        assert "default-src 'none'" in text and text.count('<svg class="lanes"') == 1 + planned
        for name in ("A step as it ran", "Time by part", "What changed", "Memory at the peak"):
            assert f"<h2>{name}</h2>" in text
    evil = page.html(tiny.__class__(**{**vars(tiny), "name": '</script><script>alert("1")</script>'}))
    assert '<script>alert("1")' not in evil


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: the page is checked as text only")
def test_the_page_in_a_browser(split: Profile, tmp_path):
    probe = """<pre id="probe"></pre><script>
const table = document.querySelector("table.sortable");
table.tHead.querySelectorAll("button")[1].click();
document.getElementById("probe").textContent = JSON.stringify({
  wide: document.documentElement.scrollWidth - innerWidth,
  drawn: document.querySelectorAll(".lanes rect").length,
  first: Number(table.tBodies[0].rows[0].cells[1].dataset.value),
});
</script>"""
    document, console = opened(page.html(split).replace("</body>", f"{probe}</body>"), tmp_path, 1280)
    assert console == []
    found = json.loads(re.findall(r'<pre id="probe">(.+?)</pre>', document)[0])
    assert found["wide"] <= 0 and found["drawn"] > 10
    assert found["first"] == max(split.by_kind.values())


def test_text_keeps_to_the_width(split: Profile, capsys):
    import rich.console

    console = rich.console.Console(width=100, record=True)
    report.text(split, console)
    assert max(len(line) for line in console.export_text().splitlines()) <= 100


def test_the_command_needs_no_device_and_is_quick_to_refuse():
    done = subprocess.run([sys.executable, "-m", "jaxtrain.profile"], capture_output=True, text=True, cwd=runs.REPO)
    assert done.returncode == 2 and "RUN" in done.stderr
