"""A trace of two GPUs, written by the profiler's schema from a small program whose plan is known."""

import json
from pathlib import Path
from typing import Any

import pytest
from hlo_text import BIG, COMPUTATIONS, ELEMENTS, RATES, gemm

from jaxtrain.plan.program import roofline
from jaxtrain.profile import load, program, trace
from jaxtrain.profile.result import Profile


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
