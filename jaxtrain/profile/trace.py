"""Traces of JAX's profiler: the operations that ran on each device, and the same in a file for Perfetto.

`jax.profiler.ProfileData` reads a trace (`*.xplane.pb`). The planes and lines of two platforms are known:

    CPU  Plane /host:CPU, a line for each thread. An event with the stat `hlo_op` is an operation. The stat `device_ordinal` names
         its device, `run_id` the execution of its program. An operation that runs on on other threads ends where the event
         `end: NAME` with its number begins.
    GPU  Plane /device:GPU:N, a line `Stream #...` for each CUDA stream. Every event is a kernel or a copy, `hlo_op` names the
         operation that launched it. All other lines repeat these events, and are skipped.

The plane /host:metadata holds the programs with their buffer assignment. ProfileData does not read them, so their bytes are
read by the few fields of XSpace that lead to them.
"""

import dataclasses
import functools
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.plan.program.protos import message_class
from jaxtrain.profiling import TRACE_NAME

GPU_PLANE = re.compile(r"/device:GPU:(\d+)$")
STREAM = "Stream #"
HOST, METADATA = "/host:CPU", "/host:metadata"
END = "end: "
PROGRAM = re.compile(r"(.*)\((\d+)\)$")
PROGRAM_FIELDS = {
    "Space": {"planes": (1, ["Plane"])},
    "Plane": {"name": (2, str), "event_metadata": (4, ["Entry"])},
    "Entry": {"value": (2, "Metadata")},
    "Metadata": {"name": (2, str), "stats": (5, ["Stat"])},
    "Stat": {"bytes_value": (6, bytes)},
}


class TraceError(ValueError):
    """A trace cannot be read, or no step of a training run is in it."""


class Event(NamedTuple):
    """One run of an operation on one device. Times are ns since the start of the trace."""

    start: float
    end: float
    stream: str  # on a GPU its CUDA stream; on a CPU a lane, in which operations do not overlap
    op: str  # instruction of the program; "" if the trace names none
    kernel: str  # on a GPU the kernel's name, on a CPU the operation's
    program: int  # number of the program; -1 if the trace names none
    run: int  # one execution of the program; -1 on GPUs


@dataclasses.dataclass(frozen=True)
class Trace:
    """The operations and programs of a trace."""

    path: Path
    platform: str  # cpu | gpu
    devices: dict[int, tuple[Event, ...]]  # events of a device, by start
    steps: tuple[int, ...]  # steps that the training loop marked
    programs: dict[int, bytes]  # program number -> serialized HloProto

    @property
    def main_program(self) -> int:
        """Return the number of the program that took the most time."""
        time: dict[int, float] = defaultdict(float)
        for event in (e for events in self.devices.values() for e in events):
            time[event.program] += event.end - event.start
        return max(time, key=lambda program: time[program])


def find(target: Path) -> list[Path]:
    """Return the traces of a run's folder, or of a trace's folder or file, oldest first.

    Raises:
        TraceError: there is none.
    """
    if not target.exists():
        raise TraceError(f"{target}: no such file or folder. Fix: name a run's folder, or a trace (*.xplane.pb).")
    found = list(target.rglob("*.xplane.pb")) if target.is_dir() else [target]
    if not found:
        raise TraceError(
            f"{target}: no trace (*.xplane.pb) in this folder. Fix: start the run with --config.profile.start=STEP, or send "
            "SIGUSR2 to a running one."
        )
    return sorted(found, key=lambda path: (path.stat().st_mtime, str(path)))


def read(path: Path) -> Trace:
    """Return the operations and programs of a trace.

    Raises:
        TraceError: the file is no trace, or no operation of a compiled program ran in it.
    """
    from jax.profiler import ProfileData

    serialized = path.read_bytes()
    try:
        planes = {plane.name: plane for plane in ProfileData.from_serialized_xspace(serialized).planes}
    except RuntimeError as error:
        raise TraceError(f"{path}: not a trace of JAX's profiler, or only a part of one ({error})") from error
    gpus = {int(match[1]): plane for name, plane in planes.items() if (match := GPU_PLANE.match(name))}
    host = planes.get(HOST)
    devices = {n: _gpu_events(plane) for n, plane in sorted(gpus.items())} if gpus else _cpu_events(host) if host else {}
    if not any(devices.values()):
        raise TraceError(
            f"{path}: no operation of a compiled program ran in this trace (planes: {', '.join(planes) or 'none'}). "
            "Fix: trace steps of training, with --config.profile.start=STEP or SIGUSR2 to the run."
        )
    marks = [event for line in host.lines for event in line.events if event.name == TRACE_NAME] if host else []
    steps = tuple(sorted(int(dict(event.stats)["step_num"]) for event in marks))
    return Trace(path, "gpu" if gpus else "cpu", devices, steps, _programs(serialized))


def _gpu_events(plane: Any) -> tuple[Event, ...]:
    found = []
    for line in plane.lines:
        if line.name.startswith(STREAM):
            for event in line.events:
                stats = dict(event.stats)
                op, program = str(stats.get("hlo_op", "")), int(stats.get("program_id", -1))
                found.append(Event(event.start_ns, event.end_ns, line.name, op, event.name, program, -1))
    return tuple(sorted(found))


def _cpu_events(host: Any) -> dict[int, tuple[Event, ...]]:
    ends: dict[tuple[str, Any], list[float]] = defaultdict(list)
    ran: list[tuple[int, Any, Event]] = []
    for event in (event for line in host.lines for event in line.events):
        stats = dict(event.stats)
        if event.name.startswith(END):
            ends[event.name.removeprefix(END), stats.get("_c")].append(event.start_ns)
        elif op := str(stats.get("hlo_op", "")):
            program, run = int(stats.get("program_id", -1)), int(stats.get("run_id", -1))
            made = Event(event.start_ns, event.end_ns, "", op, op, program, run)
            ran.append((int(stats.get("device_ordinal", 0)), stats.get("_p"), made))
    devices: dict[int, list[Event]] = defaultdict(list)
    for device, number, event in ran:
        later = [end for end in ends.get((event.op, number), ()) if end >= event.start]
        devices[device].append(event._replace(end=min(later)) if later else event)
    return {device: tuple(_in_lanes(sorted(events))) for device, events in sorted(devices.items())}


def _in_lanes(events: Iterable[Event]) -> Iterable[Event]:
    """Yield events, which come by start, each in the first lane that is free."""
    free_at: list[float] = []
    for event in events:
        lane = next((n for n, time in enumerate(free_at) if time <= event.start), len(free_at))
        free_at[lane : lane + 1] = [event.end]
        yield event._replace(stream=f"lane {lane + 1}")


@functools.cache
def _space_class() -> Any:
    return message_class("trace", PROGRAM_FIELDS, "Space")


def _programs(serialized: bytes) -> dict[int, bytes]:
    found = {}
    for plane in _space_class().FromString(serialized).planes:
        for entry in plane.event_metadata if plane.name == METADATA else ():
            match = PROGRAM.match(entry.value.name)
            found |= {int(match[2]): stat.bytes_value for stat in entry.value.stats if match and stat.bytes_value}
    return found


def write_perfetto(trace: Trace, operations: Mapping[str, Any], path: Path) -> None:
    """Write a trace as JSON that ui.perfetto.dev opens: a process for each device, a thread for each stream.

    Args:
        trace: a trace.
        operations: instruction of the main program -> its `program.Operation`.
        path: the file; it is compressed if its name ends in .gz.
    """
    main, written = trace.main_program, []
    for device, events in trace.devices.items():
        streams = sorted({event.stream for event in events})
        written.append({"ph": "M", "pid": device, "name": "process_name", "args": {"name": f"{trace.platform} {device}"}})
        for number, stream in enumerate(streams):
            written.append({"ph": "M", "pid": device, "tid": number, "name": "thread_name", "args": {"name": stream}})
        for e in events:
            known = operations.get(e.op) if e.program == main else None
            shown = {"ph": "X", "pid": device, "tid": streams.index(e.stream), "name": known.label if known else e.kernel}
            shown |= {"ts": e.start / 1e3, "dur": (e.end - e.start) / 1e3, "cat": known.kind if known else "other"}
            origin = {"part": known.part, "pass": known.phase, "source": known.source} if known else {}
            written.append(shown | {"args": {"instruction": e.op, "kernel": e.kernel, **origin}})
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": written}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
