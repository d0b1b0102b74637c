"""A trace of two GPUs, built from a small program whose plan is known."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from hlo_text import BIG, COMPUTATIONS, ELEMENTS, RATES, gemm
from made_runs import ended

from jaxtrain.metrics.profiling import HLO_TEXT
from jaxtrain.plan.program import roofline
from jaxtrain.report import profile, profile_program, profile_times, profile_trace
from jaxtrain.report.run import read_run


def named(op_name: str) -> str:
    return f', metadata={{op_name="jit(f)/{op_name}"}}'


STATE = f"(s32[], {BIG}, bf16[1000,5000]{{1,0}}, bf16[5000,10000]{{1,0}})"
GATHER = (
    f"({BIG}, f32[{2 * ELEMENTS}]{{0}}) all-gather-start(%held), replica_groups={{{{0,1}}}}, dimensions={{0}}, channel_id=1"
)
GATHER += ", use_global_device_ids=true" + named("jvp(layers)/while/body/mlp/all_gather")
MATMUL = "bf16[1000,10000]{1,0} fusion(%left, %right), kind=kCustom, calls=%matmul"
MATMUL += named("jvp(layers)/while/body/mlp/BTD,DF->BTF/dot_general")
LOOP = f"{STATE} while(%state), condition=%small, body=%body"
LOOP += ', backend_config={"known_trip_count":{"n":"3"}}' + named("jvp(layers)/while")
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
  %loop = {LOOP}
  %out = {BIG} get-tuple-element(%loop), index=1{gemm("last")}{named("transpose(jvp(loss))/dot_general")}
  ROOT %update = {BIG} fusion(%out), kind=kLoop, calls=%twice{named("optimizer/add")}
}}
"""
MESH = {"data": 1, "fsdp": 2, "tensor": 1, "seq": 1}
NUMBER = 7  # program_id of PROGRAM


class Space:
    """Build an XSpace in the text format that ProfileData converts into a trace."""

    def __init__(self) -> None:
        self.planes: dict[str, dict[str, list[str]]] = {}  # plane -> line -> events
        self.names: dict[str, int] = {}  # names of events and stats, and text values of stats

    def line(self, plane: str, name: str, events: list[tuple[str, float, float, dict[str, Any]]]) -> None:
        """Add events (name, start in ms, end in ms, stats). A stat's text is stored as a reference to the table of names."""
        made = self.planes.setdefault(plane, {}).setdefault(name, [])
        for event, start, end, stats in events:
            values = {k: f"ref_value: {self._id(v)}" if isinstance(v, str) else f"int64_value: {v}" for k, v in stats.items()}
            shown = " ".join(f"stats {{ metadata_id: {self._id(k)} {value} }}" for k, value in values.items())
            at, took = round(start * 1e9), round((end - start) * 1e9)
            made.append(f"events {{ metadata_id: {self._id(event)} offset_ps: {at} duration_ps: {took} {shown} }}")

    def _id(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names) + 1)

    def write(self, path: Path) -> Path:
        table = "".join(
            f"{kind} {{ key: {n} value {{ id: {n} name: {json.dumps(name)} }} }}\n"
            for name, n in self.names.items()
            for kind in ("event_metadata", "stat_metadata")
        )
        text = ""
        for plane, lines in self.planes.items():
            shown = "\n".join(f"lines {{ name: {json.dumps(name)} {' '.join(events)} }}" for name, events in lines.items())
            text += f"planes {{ name: {json.dumps(plane)}\n{table}{shown} }}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
        return path


def gpu_space(
    steps: int = 2, late_ms: float = 0.0, longer: Mapping[str, float] | None = None, gap_ms: float = 0.0
) -> tuple[Space, roofline.Roofline]:
    """Return a trace of PROGRAM on two GPUs as planned, and the plan.

    Device 1 starts step n (from 0) n times `late_ms` late, and is `late_ms` later still in the kernels `last` and `update`.

    Args:
        longer: instruction -> ms that each of its runs takes beyond the plan. What comes after it is later by as much.
        gap_ms: idle time before the kernel `last`, on both devices.
    """
    read = profile_program.read_program(PROGRAM, MESH, 2)
    ran: list[tuple[str, str, float, float]] = []
    planned = roofline.predict(read.module, RATES, read.collective_ops, lambda *event: ran.append(event))
    ran = [(name, kind, start * 1e3, end * 1e3) for name, kind, start, end in ran if not kind.startswith(roofline.EXPOSED)]
    later = {(name, end): ms for name, _, _, end in ran if (ms := (longer or {}).get(name))}
    step_ms = planned.step_ms + sum(later.values()) + gap_ms
    space = Space()
    for device in range(2):
        compute, links = [], []
        for step in range(steps):
            for name, kind, start, end in ran:
                late = late_ms * device * (step + (name in ("last", "update"))) + gap_ms * (name in ("last", "update"))
                at = step * step_ms + late + sum(ms for (_, before), ms in later.items() if before <= start + 1e-9)
                stats = {"hlo_op": name, "hlo_module": "jit_f", "program_id": NUMBER}
                lane, kernel = (links, "ncclDevKernel") if kind == "communication" else (compute, f"kernel of {name}")
                lane.append((kernel, at + start, at + end + (longer or {}).get(name, 0.0), stats))
        space.line(f"/device:GPU:{device}", "Stream #13(Kernel)", compute)
        space.line(f"/device:GPU:{device}", "Stream #20(Kernel)", links)
        # a line that repeats the events: a reader must not count it again
        space.line(f"/device:GPU:{device}", "XLA Ops", compute)
    space.line(profile_trace.HOST, "python", [("train", n * 0.1, n * 0.1 + 0.05, {"step_num": 40 + n}) for n in range(steps)])
    return space, planned


def gpu_run(folder: Path, space: Space, **receipt: Any) -> Path:
    """Write a run's folder that contains a trace, and return the folder. receipt: further fields of the receipt."""
    path = space.write(folder / "profile/plugins/profile/now/host.xplane.pb")
    path.with_name(HLO_TEXT).write_text(PROGRAM)
    config = {"precision": "bf16", "train": {"grad_accum": 6}, "pipeline": {"groups": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    devices = {"kind": ["NVIDIA H200"], "count": 2, "process_count": 1}
    (folder / "receipt.json").write_text(ended(0, **{"devices": devices, "mesh": MESH} | receipt))
    return folder


def profile_of(target: Path) -> profile.StepProfile:
    """Return the profile of the first trace of a folder, as the command makes it."""
    run = profile_trace.run_folder(target)
    return profile.load_profile(profile_trace.find_traces(target)[0], read_run(run) if run else None)


def read_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, space: Space) -> profile.StepProfile:
    """Return the profile of a trace, with a plan at the rates RATES."""
    monkeypatch.setattr(profile_times, "rates_for", lambda gpu, precision: RATES)
    return profile_of(gpu_run(folder, space))
