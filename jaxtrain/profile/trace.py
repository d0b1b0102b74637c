"""Read a trace of JAX's profiler: which operation of which program ran when, on each device.

A trace is an XSpace (`*.xplane.pb`): planes of lines of events. Two kinds of device are understood:

    CPU  plane /host:CPU, a line for each thread. An event with the stat `hlo_op` is an operation, and names its device and the
         execution of the program that it belongs to. What goes on after such an event, on other threads, ends where the event
         `end: NAME` that refers to it begins.
    GPU  plane /device:GPU:N, a line `Stream #...` for each CUDA stream. Every event is a kernel or a copy; `hlo_op` says for
         which operation. Other lines repeat the same in other words, and are left out.

The programs themselves, with their buffer assignment, lie in the plane /host:metadata (after tsl/profiler/protobuf/xplane.proto
and xla/tsl/profiler/utils/xplane_schema.cc in openxla/xla).
"""

import dataclasses
import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import message

from jaxtrain.plan.program.protos import UINT64, message_class
from jaxtrain.profiling import TRACE_NAME

SCHEMA = {
    "Space": {"planes": (1, ["Plane"])},
    "Plane": {
        "id": (1, int),
        "name": (2, str),
        "lines": (3, ["Line"]),
        "event_metadata": (4, ["EventEntry"]),
        "stat_metadata": (5, ["StatEntry"]),
    },
    "EventEntry": {"key": (1, int), "value": (2, "EventMetadata")},
    "StatEntry": {"key": (1, int), "value": (2, "StatMetadata")},
    "EventMetadata": {"id": (1, int), "name": (2, str), "stats": (5, ["Stat"])},
    "StatMetadata": {"id": (1, int), "name": (2, str)},
    "Line": {"id": (1, int), "name": (2, str), "timestamp_ns": (3, int), "events": (4, ["Event"])},
    "Event": {"metadata_id": (1, int), "offset_ps": (2, int), "duration_ps": (3, int), "stats": (4, ["Stat"])},
    "Stat": {
        "metadata_id": (1, int),
        "double_value": (2, float),
        "uint64_value": (3, UINT64),
        "int64_value": (4, int),
        "str_value": (5, str),
        "bytes_value": (6, bytes),
        "ref_value": (7, UINT64),
    },
}
GPU_PLANE = re.compile(r"/device:GPU:(\d+)$")
STREAM = "Stream #"
HOST, METADATA = "/host:CPU", "/host:metadata"
PROGRAM = re.compile(r"(.*)\((\d+)\)$")
END = "end: "


class TraceError(ValueError):
    """A trace cannot be read, or holds nothing of a training step."""


class Event(NamedTuple):
    """One run of an operation on one device. Times in ns since the start of the trace."""

    start: float
    end: float
    op: str  # its name in the program; "" where the trace does not say
    kernel: str  # what ran: on a GPU the kernel's name, else the operation's
    program: int  # the program's number; -1 where the trace does not say
    run: int  # one execution of the program; -1 on GPUs, which do not say


@dataclasses.dataclass(frozen=True)
class Trace:
    """What is read of a trace."""

    path: Path
    platform: str  # cpu | gpu
    devices: dict[int, tuple[Event, ...]]  # device -> its events by start
    steps: tuple[int, ...]  # numbers of the steps that the training loop marked
    programs: dict[int, tuple[str, bytes]]  # number -> name and serialized HloProto


@functools.cache
def space_class() -> Any:
    """The message class of an XSpace, as far as it is read here."""
    return message_class("trace", SCHEMA, "Space")


def find(folder: Path) -> list[Path]:
    """The traces below a folder (a run's, its profile/, or one trace's), oldest first."""
    return sorted(folder.rglob("*.xplane.pb"), key=lambda path: (path.stat().st_mtime, str(path)))


def read(path: Path) -> Trace:
    """Raises TraceError for a file that is no trace, or in which no operation of a program ran."""
    try:
        space = space_class().FromString(path.read_bytes())
    except message.DecodeError as error:
        raise TraceError(f"{path}: no trace of JAX's profiler, or only a part of one ({error})") from error
    planes = {plane.name: _Plane(plane) for plane in space.planes}
    gpus = {int(match[1]): plane for name, plane in planes.items() if (match := GPU_PLANE.match(name))}
    host = planes.get(HOST)
    devices = {n: _gpu_events(plane) for n, plane in sorted(gpus.items())} if gpus else _cpu_events(host) if host else {}
    if not any(devices.values()):
        raise TraceError(
            f"{path}: no operation of a compiled program ran in this trace (planes: {', '.join(planes) or 'none'}). "
            "Trace a few steps of training: profile.start, or SIGUSR2 to the run."
        )
    programs = planes[METADATA].programs() if METADATA in planes else {}
    return Trace(path, "gpu" if gpus else "cpu", devices, _marks(host) if host else (), programs)


class _Plane:
    """A plane with its names resolved."""

    def __init__(self, plane: Any):
        self.plane = plane
        self.names = {entry.key: entry.value.name for entry in plane.event_metadata}
        self.stat_names = {entry.key: entry.value.name for entry in plane.stat_metadata}

    def stats(self, event: Any) -> dict[str, Any]:
        return {self.stat_names.get(stat.metadata_id, ""): self.value(stat) for stat in event.stats}

    def value(self, stat: Any) -> Any:
        """The one of a stat's fields that is set. A reference is to another stat's name, where long strings are kept once."""
        if stat.ref_value:
            return self.stat_names.get(stat.ref_value, "")
        return stat.str_value or stat.int64_value or stat.uint64_value or stat.double_value or stat.bytes_value or 0

    def times(self, line: Any, event: Any) -> tuple[float, float]:
        start = line.timestamp_ns + event.offset_ps / 1e3
        return start, start + event.duration_ps / 1e3

    def programs(self) -> dict[int, tuple[str, bytes]]:
        found = {}
        for entry in self.plane.event_metadata:
            match = PROGRAM.match(entry.value.name)
            for stat in entry.value.stats:
                if match and stat.bytes_value:
                    found[int(match[2])] = match[1], stat.bytes_value
        return found


def _gpu_events(plane: _Plane) -> tuple[Event, ...]:
    found = []
    for line in plane.plane.lines:
        if not line.name.startswith(STREAM):
            continue
        for event in line.events:
            stats, kernel = plane.stats(event), plane.names.get(event.metadata_id, "")
            op, program = str(stats.get("hlo_op") or ""), int(stats.get("program_id", -1))
            found.append(Event(*plane.times(line, event), op, kernel, program, -1))
    return tuple(sorted(found))


def _cpu_events(host: _Plane) -> dict[int, tuple[Event, ...]]:
    ends: dict[tuple[str, Any], list[float]] = defaultdict(list)
    ran: list[tuple[int, Any, Event]] = []
    for line in host.plane.lines:
        for event in line.events:
            name = host.names.get(event.metadata_id, "")
            start, end = host.times(line, event)
            if name.startswith(END):
                ends[name.removeprefix(END), host.stats(event).get("_c")].append(start)
                continue
            stats = host.stats(event)
            if op := stats.get("hlo_op"):
                device, run = int(stats.get("device_ordinal", 0)), int(stats.get("run_id", -1))
                made = Event(start, end, str(op), str(op), int(stats.get("program_id", -1)), run)
                ran.append((device, stats.get("_p"), made))
    devices: dict[int, list[Event]] = defaultdict(list)
    for device, produced, event in ran:
        behind = [end for end in ends.get((event.op, produced), ()) if end >= event.start]
        devices[device].append(event._replace(end=min(behind)) if behind else event)
    return {device: tuple(sorted(events)) for device, events in sorted(devices.items())}


def _marks(host: _Plane) -> tuple[int, ...]:
    """Steps that the training loop marked."""
    events = (event for line in host.plane.lines for event in line.events if host.names.get(event.metadata_id) == TRACE_NAME)
    return tuple(sorted(int(host.stats(event).get("step_num", -1)) for event in events))
