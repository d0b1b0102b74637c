"""The numbers of a run: how fast it goes, how much memory it takes, and the files they are kept in.

`metrics.jsonl` is the record: one JSON object a line, each written whole and flushed at once, so that a killed run loses no
finished line. `tb/` shows the same numbers in TensorBoard and is derived from it: a resumed run rebuilds it. Neither jax nor
tensorboardX is imported here until it is needed.

Lines hold every digit: a float32 value is written as the decimal that reads back as the same number. JSON has no NaN and no
infinity: such a value is written as null, and named with its kind in an extra field, `"nonfinite": {"loss": "nan"}`.
"""

import contextlib
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

TRAIN_KEYS = (
    "kind", "step", "loss", "grad_norm", "lr", "tokens", "epoch",
    "step_time_s", "tokens_per_s", "tokens_per_s_per_device", "tflops_per_device",
    "mfu_causal", "mfu_full", "hfu", "data_wait_s",
    "memory_gib", "peak_memory_gib", "skipped_steps", "time_unix",
)  # fmt: skip
EVAL_KEYS = ("kind", "step", "loss", "bits_per_byte")

TB_SUFFIX = ".jaxtrain."  # in the name of every event file written here, and the only ones ever removed
TB_FLUSH_S = 5.0  # a flush waits for the disk; what is lost in a kill comes back from metrics.jsonl


class MetricsError(ValueError):
    """metrics.jsonl cannot be read as it stands."""


class Rewound(NamedTuple):
    """What `rewind` did: lines kept, lines dropped because a later step wrote them, whether the last line was cut short."""

    kept: int
    dropped: int
    cut: bool


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace a file so that a reader, or a kill at any moment, finds either all of the old one or all of the new one."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the block ends well, and vanishes when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must reach the disk too
    finally:
        os.close(folder)


def plain(value: Any) -> Any:
    """A Python number from a Python, numpy or jax scalar, without rounding; strings, bools and None pass through."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if getattr(value, "shape", ()) != ():
        raise TypeError(f"a metric is one number, not an array of shape {value.shape}")
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if kind == "b":
        return bool(value)
    return int(value) if kind in "iu" else float(value)


def encode(line: Mapping[str, Any]) -> str:
    """One line of metrics.jsonl, without its newline."""
    out = {name: plain(value) for name, value in line.items()}
    bad = {name: repr(value) for name, value in out.items() if isinstance(value, float) and not math.isfinite(value)}
    if bad:
        out = {name: (None if name in bad else value) for name, value in out.items()} | {"nonfinite": bad}
    return json.dumps(out, allow_nan=False)


def decode(text: str | bytes) -> dict[str, Any]:
    """A line of metrics.jsonl with NaN and infinities put back in place. Raises ValueError where it is no such line."""
    line = json.loads(text)
    if not isinstance(line, dict) or "kind" not in line or not isinstance(line.get("step"), int):
        raise ValueError("not an object with `kind` and `step`")
    return line | {name: float(value) for name, value in line.pop("nonfinite", {}).items()}


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl, in order. A last line cut by a kill is left out; any other bad line raises MetricsError."""
    for _, line in _lines(Path(path)):
        if line is not None:
            yield line


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """(raw line, decoded line); the decoded line is None for a last line that a kill cut short."""
    with open(path, "rb") as file:
        bad: tuple[int, bytes, str] | None = None
        for number, raw in enumerate(file, start=1):
            if bad:
                raise MetricsError(
                    f"{path}:{bad[0]}: not a line of metrics ({bad[2]}), and others follow it. "
                    "Only a last line may be cut short. Repair or delete the line, or move the file away to start a new one."
                )
            try:
                if not raw.endswith(b"\n"):
                    raise ValueError("no end of line")
                yield raw, decode(raw)
            except ValueError as error:
                bad = number, raw, str(error)
        if bad:
            yield bad[1], None


class Writers:
    """The metric files of one run, written by process 0 alone (other processes may call everything; nothing happens).

    `rewind(step)` belongs before the first line of a resumed run. Lines are kept up to and including the restored step, so
    the lines of a step must be written before its checkpoint is complete, or a kill between the two loses them.
    """

    def __init__(self, workdir: str | Path, tensorboard: bool, *, process_index: int = 0):
        self.path = Path(workdir) / "metrics.jsonl"
        self.tb_dir = Path(workdir) / "tb"
        self._active = process_index == 0
        self._tensorboard = tensorboard and self._active
        self._file: BinaryIO | None = None
        self._events: _EventFile | None = None

    def train(self, **line: Any) -> None:
        """Write one train line. Takes all of TRAIN_KEYS but `kind` and `time_unix`; TypeError names any missing or unknown."""
        self._write({"kind": "train", **line, "time_unix": time.time()}, TRAIN_KEYS)

    def eval(self, *, step: int, loss: float, bits_per_byte: float | None) -> None:
        """Write one eval line: loss in nats per token; bits per byte is None where the tokenizer cannot tell bytes."""
        self._write({"kind": "eval", "step": step, "loss": loss, "bits_per_byte": bits_per_byte}, EVAL_KEYS)

    def _write(self, line: dict[str, Any], keys: tuple[str, ...]) -> None:
        if set(line) != set(keys):
            missing, unknown = sorted(set(keys) - set(line)), sorted(set(line) - set(keys))
            raise TypeError(f"a {line['kind']} line lacks {missing} and has unknown {unknown}")
        if not self._active:
            return
        line = {name: plain(line[name]) for name in keys}
        if self._file is None:
            self._file = _open_after_whole_lines(self.path)
        self._file.write(encode(line).encode() + b"\n")
        self._file.flush()
        if self._tensorboard:
            if self._events is None:
                self._events = _EventFile(self.tb_dir)
            self._events.add(line, line.get("time_unix", time.time()))
            self._events.flush_now_and_then()

    def rewind(self, step: int) -> Rewound:
        """Forget everything after `step` (-1: everything), in metrics.jsonl and in tb/.

        metrics.jsonl is replaced in one move; the event files are written anew from it, which also brings back events that
        a kill took before they were flushed; the old ones are left empty until the next rewind. Event files of other
        programs in tb/ stay as they are.
        """
        if not self._active:
            return Rewound(0, 0, False)
        self.close()
        kept = dropped = 0
        cut = False
        if self.path.exists():
            with replacing(self.path) as out:
                for raw, line in _lines(self.path):
                    if line is None:
                        cut = True
                    elif line["step"] <= step:
                        out.write(raw)
                        kept += 1
                    else:
                        dropped += 1
        stale = sorted(self.tb_dir.glob(f"*{TB_SUFFIX}*"))
        if self._tensorboard and kept:
            # Step 0 as the restart makes an open TensorBoard drop what it had read from the stale files.
            self._events = _EventFile(self.tb_dir, restart_at=0 if stale else None)
            wall = 0.0
            for line in read(self.path):
                wall = line.get("time_unix") or wall  # eval lines carry no time: that of the line before
                self._events.add(line, wall)
            self._events.flush()
        for path in stale:
            # Emptied now and removed next time: a TensorBoard that has the file open reads on only while it exists.
            if path.stat().st_size:
                os.truncate(path, 0)
            else:
                path.unlink()
        return Rewound(kept, dropped, cut)

    def close(self) -> None:
        """Flush to disk and close. Writing again afterwards reopens."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open_after_whole_lines(path: Path) -> BinaryIO:
    """Open to append, without the rest of a line that a kill cut short: what follows would be glued to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and any(line is None for _, line in _lines(path)):
        with replacing(path) as out:
            out.writelines(raw for raw, line in _lines(path) if line is not None)
    return open(path, "ab")


class _EventFile:
    """One TensorBoard event file, written in the caller's thread: one record a line, all its numbers in it."""

    def __init__(self, folder: Path, restart_at: int | None = None):
        from tensorboardX.event_file_writer import EventsWriter

        event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")  # generated code, opaque to type checkers
        summary_pb2: Any = importlib.import_module("tensorboardX.proto.summary_pb2")
        folder.mkdir(parents=True, exist_ok=True)
        # The library names files by the second and overwrites; nanoseconds keep two starts within one second apart.
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f"{TB_SUFFIX}{time.time_ns()}")
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        if restart_at is not None:
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.write_event(self._event(step=restart_at, wall_time=time.time(), session_log=log))
        self._flushed = time.monotonic()

    def add(self, line: Mapping[str, Any], wall_time: float) -> None:
        kind = line["kind"]
        values = [
            self._summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in line.items()
            if name not in ("kind", "step", "time_unix") and isinstance(value, int | float)
        ]
        event = self._event(step=line["step"], wall_time=wall_time, summary=self._summary(value=values))
        self._writer.write_event(event)

    def flush_now_and_then(self) -> None:
        if time.monotonic() - self._flushed >= TB_FLUSH_S:
            self.flush()

    def flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


class Throughput:
    """Rates of a run from the wall times at which its steps start.

    A step's time is the wall time from its start to the next step's start, waiting for data included. A line reports the mean
    over the steps since the line before it, of those whose time says something. Not counted are the step that `exclude` is
    called in (evaluation, a blocking save, a trace being written) and the one after it, and likewise the first two steps: the
    loop runs one step ahead of the device, so after a halt one step is only queued and seems to take no time. A line without
    a counted step has None for every rate. FLOP/s and utilisation count the model's FLOPs, never recomputed ones; those
    count into `hfu` alone.

    Args:
        tokens_per_step: tokens of a global batch, padding included.
        num_devices: over all processes.
        flops_causal, flops_full: model FLOPs per token, forward and backward, with half or all of the attention square.
        flops_hardware: FLOPs per token that the devices execute, recomputation included; None: `hfu` is None.
        peak_flops: dense FLOP/s of one device; None or 0 where unknown: utilisations are None.
        clock: seconds; for tests.
    """

    SETTLE = 2  # steps not counted after a halt, the halted one included

    def __init__(
        self,
        *,
        tokens_per_step: int,
        num_devices: int,
        flops_causal: float,
        flops_full: float,
        flops_hardware: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._tokens_per_device = tokens_per_step / num_devices
        self._num_devices = num_devices
        self._flops = {"mfu_causal": flops_causal, "mfu_full": flops_full, "hfu": flops_hardware}
        self._peak = peak_flops or None
        self._clock = clock
        self._started: float | None = None  # when the step under way began
        self._wait = 0.0  # of the step under way
        self._skip = self.SETTLE
        self._times: list[float] = []  # of counted steps since the last line
        self._waits: list[float] = []

    def start_step(self) -> None:
        """Call at the top of every step, before its data is asked for, and once after the last."""
        now = self._clock()
        if self._started is not None:
            if self._skip:
                self._skip -= 1
            else:
                self._times.append(now - self._started)
                self._waits.append(self._wait)
        self._started, self._wait = now, 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around the call that returns the next batch."""
        before = self._clock()
        yield
        self._wait += self._clock() - before

    def exclude(self) -> None:
        """The step under way does something else too: leave it out, and the next one."""
        self._skip = self.SETTLE

    def line(self) -> dict[str, float | None]:
        """The rate fields of a train line, over the steps since the last call."""
        times, waits = self._times, self._waits
        self._times, self._waits = [], []
        out: dict[str, float | None] = dict.fromkeys(
            TRAIN_KEYS[TRAIN_KEYS.index("step_time_s") : TRAIN_KEYS.index("memory_gib")]
        )
        if not times:
            return out
        out["step_time_s"] = sum(times) / len(times)
        out["data_wait_s"] = sum(waits) / len(waits)
        per_device = self._tokens_per_device / out["step_time_s"]
        out["tokens_per_s_per_device"] = per_device
        out["tokens_per_s"] = per_device * self._num_devices
        out["tflops_per_device"] = per_device * (self._flops["mfu_causal"] or 0.0) / 1e12
        for name, flops in self._flops.items():
            if self._peak and flops is not None:
                out[name] = per_device * flops / self._peak
        return out


class HasMemoryStats(Protocol):
    """A jax.Device, as far as `memory` looks at it."""

    def memory_stats(self) -> Mapping[str, int] | None: ...


def memory(devices: Iterable[HasMemoryStats]) -> tuple[float | None, float | None]:
    """(in use, peak) in GiB of the fullest of these local devices; None where the devices do not tell, as CPUs."""
    stats = [found for device in devices if (found := device.memory_stats())]

    def most(name: str) -> float | None:
        return max((s[name] / 2**30 for s in stats if name in s), default=None)

    return most("bytes_in_use"), most("peak_bytes_in_use")
