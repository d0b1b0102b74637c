"""Traces of JAX's profiler: the operations that ran on each device.

`jax.profiler.ProfileData` reads a trace (`*.xplane.pb`). This module supports the planes and lines of two platforms:

    CPU  Plane /host:CPU, a line for each thread. An event with the stat `hlo_op` is an operation. The stat `device_ordinal`
         is its device, `run_id` the execution of its program. If an operation continues on other threads, the stat `_c` of an
         event `end: NAME` equals the operation's stat `_p`. The operation ends when this event begins.
    GPU  Plane /device:GPU:N, a line `Stream #...` for each CUDA stream. Every event is a kernel or a copy, and `hlo_op` is
         the operation that launched it. All other lines repeat these events, and are skipped.
"""

import dataclasses
import functools
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.metrics.profiling import TRACE_NAME

GPU_PLANE = re.compile(r"/device:GPU:(\d+)$")
STREAM = "Stream #"
HOST = "/host:CPU"
END = "end: "


class TraceError(ValueError):
    """A trace cannot be read, or has no step of a training run."""


class TraceEvent(NamedTuple):
    """One execution of an operation on one device. Times are in ns since the start of the trace."""

    start: float
    end: float
    op: str  # name of the instruction in the program; "" if the trace has none
    kernel: str  # name of the kernel on a GPU, of the operation on a CPU
    program: int  # id of the program; -1 if the trace has none
    run: int  # id of the execution of the program; -1 on GPUs


@dataclasses.dataclass(frozen=True)
class Trace:
    """The events of a trace, by device, and the numbers of its steps."""

    path: Path
    platform: str  # cpu | gpu
    devices: dict[int, tuple[TraceEvent, ...]]  # device -> its events, ordered by start
    steps: tuple[int, ...]  # numbers of the steps that the training loop marked

    @functools.cached_property
    def main_program(self) -> int:
        """Return the id of the program whose events take the most time."""
        time: dict[int, float] = defaultdict(float)
        for event in (e for events in self.devices.values() for e in events):
            time[event.program] += event.end - event.start
        return max(time, key=lambda program: time[program])


def find_traces(target: Path) -> list[Path]:
    """Return the trace files of a run's folder, or of a trace's folder or file, oldest first.

    Raises:
        TraceError: there is no trace.
    """
    if not target.exists():
        raise TraceError(f"{target}: no such file or folder. Fix: name a run's folder, or a trace (*.xplane.pb).")
    files = list(target.rglob("*.xplane.pb")) if target.is_dir() else [target]
    if not files:
        raise TraceError(
            f"{target}: no trace (*.xplane.pb) in this folder. Fix: start the run with --config.profile.start=STEP, or send "
            "SIGUSR2 to a running one."
        )
    return sorted(files, key=lambda path: (path.stat().st_mtime, str(path)))


def read_trace(path: Path) -> Trace:
    """Return the events and the step numbers of a trace.

    Raises:
        TraceError: the file is not a trace, or has no operation of a compiled program.
    """
    from jax.profiler import ProfileData

    try:
        planes = {plane.name: plane for plane in ProfileData.from_serialized_xspace(path.read_bytes()).planes}
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
    return Trace(path, "gpu" if gpus else "cpu", devices, steps)


def _gpu_events(plane: Any) -> tuple[TraceEvent, ...]:
    events = []
    for line in plane.lines:
        if line.name.startswith(STREAM):
            for event in line.events:
                stats = dict(event.stats)
                op, program = str(stats.get("hlo_op", "")), int(stats.get("program_id", -1))
                events.append(TraceEvent(event.start_ns, event.end_ns, op, event.name, program, -1))
    return tuple(sorted(events))


def _cpu_events(host: Any) -> dict[int, tuple[TraceEvent, ...]]:
    ends: dict[tuple[str, Any], list[float]] = defaultdict(list)
    executions: list[tuple[int, Any, TraceEvent]] = []
    for event in (event for line in host.lines for event in line.events):
        stats = dict(event.stats)
        if event.name.startswith(END):
            ends[event.name.removeprefix(END), stats.get("_c")].append(event.start_ns)
        elif op := str(stats.get("hlo_op", "")):
            program, run = int(stats.get("program_id", -1)), int(stats.get("run_id", -1))
            execution = TraceEvent(event.start_ns, event.end_ns, op, op, program, run)
            executions.append((int(stats.get("device_ordinal", 0)), stats.get("_p"), execution))
    devices: dict[int, list[TraceEvent]] = defaultdict(list)
    for device, number, event in executions:
        later = [end for end in ends.get((event.op, number), ()) if end >= event.start]
        devices[device].append(event._replace(end=min(later)) if later else event)
    return {device: tuple(sorted(events)) for device, events in sorted(devices.items())}


def run_folder(target: Path) -> Path | None:
    """Return the nearest folder, from `target` upwards, that has a run's config and receipt; None without such a folder."""
    start = target.resolve()
    folders = (folder for folder in (start, *start.parents) if (folder / "config.json").is_file())
    return next((folder for folder in folders if (folder / "receipt.json").is_file()), None)


def timeline_note(path: Path) -> str:
    """Return how the events of a trace are shown as a timeline: JAX writes them for Perfetto beside the trace."""
    perfetto_file = path.with_name(path.name.replace(".xplane.pb", ".trace.json.gz"))
    perfetto = f"open {perfetto_file} at ui.perfetto.dev, or " if perfetto_file.is_file() else ""
    return f"This trace as a timeline: {perfetto}give --xprof to open it in xprof."


def open_xprof(path: Path) -> int:
    """Serve xprof's web pages of a trace until Ctrl-C, and return the exit code.

    Raises:
        TraceError: xprof is not installed.
    """
    local_xprof = Path(sys.executable).with_name("xprof")
    command = str(local_xprof) if local_xprof.exists() else shutil.which("xprof")
    if command is None:
        raise TraceError(
            "--xprof: xprof is not installed. It brings many packages. Fix: install it in an environment of its own, "
            "python -m venv xprof-env && xprof-env/bin/pip install xprof, and put xprof-env/bin on PATH."
        )
    # xprof reads LOGDIR/plugins/profile/*/*.xplane.pb.
    logdirs = (p.parent.parent for p in path.resolve().parents if (p.parent.name, p.name) == ("plugins", "profile"))
    return 1 if subprocess.call([command, "--logdir", str(next(logdirs, path.parent))]) else 0
