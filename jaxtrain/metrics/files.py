"""Metrics and samples of a run, and their files.

`metrics.jsonl` is the record: one JSON object a line, each flushed at once, so a killed run loses no finished line. Processes
other than 0 write the metrics of their own GPUs to `metrics.<process>.jsonl`. `samples.txt` is the record of the texts.
Trackers (trackers.py) copy metrics and texts to other tools. This module imports neither jax nor a tracker's package.

Lines hold every digit: a float32 value is written as the decimal that reads back as the same number. JSON has no NaN and no
infinity: such a value is written as null, and its kind is in an extra field, `"nonfinite": {"loss": "nan"}`.
"""

import contextlib
import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from jaxtrain.config.shapes import REWARD_METRICS
from jaxtrain.metrics.samples import TextSample, format_samples, parse_samples
from jaxtrain.metrics.table import GPU, METRICS, required_names

LOGGER = logging.getLogger("jaxtrain")
EVAL_KEYS = ("kind", "step", "loss", "bits_per_byte", "perplexity")
NAMED_EVAL_KEYS = ("kind", "step", "set", *EVAL_KEYS[2:])  # where data.eval_source names its sets
# One source of a mixture: tokens and epochs read so far, and its weight at this step.
SOURCE_KEYS = ("kind", "step", "source", "tokens", "epoch", "weight")


class MetricsError(ValueError):
    """metrics.jsonl cannot be read."""


class NotWritten(OSError):
    """A file or a folder of a run cannot be written: its disk is full, over its quota, read-only or broken."""

    def __str__(self) -> str:
        remedy = REMEDIES.get(self.errno or 0, "Check its disk")
        return f"{self.filename}: cannot be written ({self.strerror}). {remedy}, or name another folder."


REMEDIES = {errno.ENOSPC: "Free some space there", errno.EDQUOT: "Free some space: your quota there is used up"}
REMEDIES |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Allow writing there")


class Rewound(NamedTuple):
    """The result of `Writers.rewind`: numbers of lines kept and dropped, and whether the last line was cut short."""

    kept: int
    dropped: int
    cut: bool


@contextlib.contextmanager
def naming(path: Path, *other_paths: Path) -> Iterator[None]:
    """Raise NotWritten, which names `path`, for an OSError of the block: of `path`, of a folder above, or of `other_paths`."""
    try:
        yield
    except NotWritten:
        raise
    except OSError as error:
        if error.filename is not None and Path(os.fsdecode(error.filename)) not in (path, *path.parents, *other_paths):
            raise
        raise NotWritten(error.errno, error.strerror or str(error), str(path)) from error


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace a file atomically: a reader, or a kill at any moment, finds either the old or the new file."""
    with replacing(path) as file:
        file.write(data.encode(errors="backslashreplace") if isinstance(data, str) else data)


def write_output(file: str | Path, data: str | bytes) -> None:
    """Write the file that an option of a command names, which may be a device such as /dev/stdout. Raises NotWritten."""
    path = Path(file).expanduser()
    with naming(path):
        path.write_bytes(data.encode(errors="backslashreplace") if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file to write, which becomes `path` when the block ends, and is removed if the block raises.

    Raises NotWritten if the file cannot be written.
    """
    # The watchdog and the signal thread write too, at a run's end, from their own threads.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with naming(path, temporary):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the folder does not exist, or the disk is broken
                temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must reach the disk too
        finally:
            os.close(folder)


def python_scalar(value: Any) -> Any:
    """Return a Python number of a Python, numpy or jax scalar, without rounding; strings, bools and None are unchanged."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if getattr(value, "shape", ()) != ():
        raise TypeError(f"a metric is one number, not an array of shape {value.shape}")
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if kind == "b":
        return bool(value)
    return int(value) if kind in "iu" else float(value)


def encode_line(line: Mapping[str, Any]) -> str:
    """Return one line of metrics.jsonl, without its newline."""
    out = {name: python_scalar(value) for name, value in line.items()}
    bad = {name: repr(value) for name, value in out.items() if isinstance(value, float) and not math.isfinite(value)}
    if bad:
        out = {name: (None if name in bad else value) for name, value in out.items()} | {"nonfinite": bad}
    return json.dumps(out, allow_nan=False)


def decode_line(text: str | bytes) -> dict[str, Any]:
    """Return a line of metrics.jsonl with NaN and infinities restored. Raises ValueError for any other text."""
    line = json.loads(text)
    if not isinstance(line, dict) or "kind" not in line or not isinstance(line.get("step"), int):
        raise ValueError("not an object with `kind` and `step`")
    return line | {name: float(value) for name, value in line.pop("nonfinite", {}).items()}


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics.jsonl in order.

    A last line cut by a kill is left out; another bad line raises MetricsError."""
    for _, line in _lines(Path(path)):
        if line is not None:
            yield line


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield (raw line, decoded line); the decoded line is None for a last line that a kill cut short."""
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
                yield raw, decode_line(raw)
            except ValueError as error:
                bad = number, raw, str(error)
        if bad:
            yield bad[1], None


def tracker_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return a line's numbers by their names in trackers: train/loss, eval/loss, eval/SET/loss, source/FILE/tokens and
    gpu/I/power_w. GPU I of a process P other than 0 is gpu/P.I. Values that are None are left out."""
    prefix = line["kind"]
    if "set" in line:
        prefix += f"/{line['set']}"
    elif prefix == "gpu":
        prefix += f"/{line['process']}.{line['gpu']}" if line["process"] else f"/{line['gpu']}"
    elif prefix == "source":
        prefix += f"/{line['source']}"
    names = ("kind", "step", "set", "source", "gpu", "process", "time_unix")
    numbers = (item for item in line.items() if item[0] not in names)
    return {f"{prefix}/{name}": value for name, value in numbers if isinstance(value, int | float)}


def with_times(lines: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    """Return each line with its time in seconds since 1970. A line of a kind without times has the time of the line before it,
    and in front of the first time that one."""
    lines = list(lines)
    wall_time = next((line["time_unix"] for line in lines if line.get("time_unix")), time.time())
    return [(line, wall_time := line.get("time_unix") or wall_time) for line in lines]


class Tracker(Protocol):
    """A copy of a run's metrics in another tool, made by process 0. `rewind` is called first. A failure never ends the run."""

    def rewind(self, step: int, lines: Iterable[Mapping[str, Any]], samples: Iterable[TextSample], dropped: int) -> None:
        """Continue from `step`, with these lines and samples up to it.

        dropped: number of lines of later steps that were removed from metrics.jsonl.
        """
        ...

    def line(self, line: Mapping[str, Any], wall_time: float) -> None:
        """Add a line of metrics.jsonl; wall_time: seconds since 1970."""
        ...

    def samples(self, samples: Sequence[TextSample]) -> None:
        """Add the texts that the model generated at one step."""
        ...

    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        """Set `config` or `receipt`, as in the JSON file of that name. A later call replaces an earlier one."""
        ...

    def close(self, exit_code: int | None) -> None:
        """End the run in the tracker. exit_code None: the exit code is not known yet, and `line` may reopen the tracker."""
        ...


class Writers:
    """The metric files of one run.

    Process 0 writes them. Another process may call every method; it writes only the lines of its GPUs, to its own file.

    Call `rewind(step)` before the first line of a resumed run. Lines are kept up to and including the restored step. So the
    lines of a step must be written before its checkpoint is complete: a kill after the checkpoint would lose unwritten lines.
    """

    def __init__(self, workdir: str | Path, trackers: Sequence[Tracker] = (), *, process_index: int = 0):
        self._active = process_index == 0
        self.path = Path(workdir) / ("metrics.jsonl" if self._active else f"metrics.{process_index}.jsonl")
        self.samples_path = Path(workdir) / "samples.txt"
        self._trackers = trackers if self._active else ()
        self._file: FileIO | None = None  # without a buffer: the rest of a line that a full disk cut would be written later

    def train(self, **line: Any) -> None:
        """Write one train line.

        Takes `step`, all required METRICS, and any optional ones. Raises TypeError, which names missing and unknown keys.
        """
        needed = required_names()
        metrics = (name for name in METRICS if name in needed or name in line)
        self._write({"kind": "train", **line, "time_unix": time.time()}, ("kind", "step", *metrics, "time_unix"))

    def source(self, **line: Any) -> None:
        """Write one line on a source of a mixture. Takes all of SOURCE_KEYS except `kind`."""
        self._write({"kind": "source", **line}, SOURCE_KEYS)

    def gpu(self, **line: Any) -> None:
        """Write one line about a GPU. Any process may call this.

        Takes `step`, `gpu` (its index on its node), `process`, `throttle_reasons`, and all of table.GPU.
        """
        keys = "kind", "step", "gpu", "process", *GPU, "throttle_reasons", "time_unix"
        self._write({"kind": "gpu", **line, "time_unix": time.time()}, keys)

    def eval(self, *, step: int, name: str = "", **line: Any) -> dict[str, Any]:
        """Write one eval line, and return it.

        Takes all of EVAL_KEYS except `kind`; for a loss of pairs, REWARD_METRICS in place of bits_per_byte and perplexity; for
        a user's loss, also `cross_entropy`, in nats per token, from which bits_per_byte and perplexity follow. bits_per_byte is
        None if the tokenizer has no byte counts. Any other loss is in nats per token. With train.ema_decay there is `weights`,
        "ema": the average of the weights was evaluated. Raises TypeError as `train` does.

        name: name of the held-out set; "" for a set without a name.
        """
        line = {"kind": "eval", "step": step, **line} | ({"set": name} if name else {})
        keys = NAMED_EVAL_KEYS if name else EVAL_KEYS
        keys = (*keys[:-3], "weights", *keys[-3:]) if "weights" in line else keys
        more = ("cross_entropy",) if "cross_entropy" in line else ()
        self._write(line, (*keys[:-2], *(REWARD_METRICS if REWARD_METRICS[0] in line else (*more, *keys[-2:]))))
        return line

    def _write(self, line: dict[str, Any], keys: tuple[str, ...]) -> None:
        if set(line) != set(keys):
            missing, unknown = sorted(set(keys) - set(line)), sorted(set(line) - set(keys))
            raise TypeError(f"a {line['kind']} line lacks {missing} and has unknown {unknown}")
        if not self._active and line["kind"] != "gpu":
            return
        line = {name: python_scalar(line[name]) for name in keys}
        with naming(self.path):
            if self._file is None:
                self._file = _open_after_whole_lines(self.path)
            encoded = encode_line(line).encode() + b"\n"
            if self._file.write(encoded) != len(encoded):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._tell(lambda tracker: tracker.line(line, line.get("time_unix", time.time())))

    def samples(self, samples: Sequence[TextSample]) -> None:
        """Add the texts that the model generated at one step."""
        if not self._active:
            return
        with naming(self.samples_path), open(self.samples_path, "ab") as file:
            file.write(format_samples(samples).encode())
        self._tell(lambda tracker: tracker.samples(samples))

    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        """Send the config or the receipt to all trackers. Other modules write config.json and receipt.json."""
        self._tell(lambda tracker: tracker.note(name, facts))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        """Call a function with each tracker. A tracker whose files cannot be written is left out from then on."""
        for tracker in self._trackers:
            try:
                call(tracker)
            except OSError as error:
                self._trackers = tuple(each for each in self._trackers if each is not tracker)
                LOGGER.warning("%s", f"{type(tracker).__name__} gets nothing more of this attempt ({error})")

    def set_aside(self) -> list[Path]:
        """Rename the files of an attempt that saved no checkpoint, and return their new paths.

        If a checkpoint folder is not mounted or its path is misspelt, these files may be the only record of the run.
        """
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        new_paths = []
        for path in (self.path, self.samples_path) if self._active else (self.path,):
            if path.exists():
                new_paths.append(path.rename(path.with_name(f"{path.stem}.set_aside-{stamp}{path.suffix}")))
        return new_paths

    def rewind(self, step: int) -> Rewound:
        """Remove everything after `step` (-1: everything) from metrics.jsonl and samples.txt, and rewind the trackers.

        Each of the two files is replaced atomically.
        """
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
        if not self._active:
            return Rewound(kept, dropped, cut)
        samples = list(parse_samples(self.samples_path.read_bytes().decode())) if self.samples_path.exists() else []
        remaining = [sample for sample in samples if sample.step <= step]
        if remaining != samples:
            write_atomic(self.samples_path, format_samples(remaining))
        self._tell(lambda tracker: tracker.rewind(step, read_metrics(self.path) if kept else (), remaining, dropped))
        return Rewound(kept, dropped, cut)

    def evaluated_steps(self) -> set[int]:
        """Return the steps whose held-out loss is written."""
        return {line["step"] for line in read_metrics(self.path) if line["kind"] == "eval"} if self.path.exists() else set()

    def close(self, exit_code: int | None = None) -> None:
        """Flush and close metrics.jsonl and the trackers. A later write reopens both if exit_code is None."""
        self._tell(lambda tracker: tracker.close(exit_code))
        if self._file is not None:
            file, self._file = self._file, None
            with naming(self.path), file:
                os.fsync(file.fileno())

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open_after_whole_lines(path: Path) -> FileIO:
    """Open a file to append, after removing a last line that a kill cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and any(line is None for _, line in _lines(path)):
        with replacing(path) as out:
            out.writelines(raw for raw, line in _lines(path) if line is not None)
    return open(path, "ab", buffering=0)
