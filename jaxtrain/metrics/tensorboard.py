"""TensorBoard: event files in the run's `tb/`, with the numbers of metrics.jsonl and the texts of samples.txt.

A resumed run writes the event files again from metrics.jsonl and samples.txt. TensorFlow is not needed.
"""

import importlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.metrics.files import tagged
from jaxtrain.metrics.samples import Sample

SUFFIX = ".jaxtrain."  # in the name of every event file written here; no other event file is removed
FLUSH_S = 5.0  # a flush waits for the disk; lines lost in a kill are restored from metrics.jsonl


class TensorBoard:
    """A `metrics.Tracker` for TensorBoard: numbers become scalars; samples, config and receipt become texts."""

    def __init__(self, workdir: str | Path):
        self.folder = Path(workdir) / "tb"
        self._events: _EventFile | None = None
        self._step = 0  # of the newest line, for facts

    def rewind(self, step: int, lines: Iterable[Mapping[str, Any]], samples: Iterable[Sample], dropped: int) -> None:
        """Write all lines and samples to a new event file, also those that a killed process had not flushed.

        The old event files are emptied now, and deleted at the next rewind. Event files of other programs are unchanged.
        """
        stale = sorted(self.folder.glob(f"*{SUFFIX}*"))
        lines = list(lines)
        # Eval lines have no time: the previous line's is used, and before the first step that of the next.
        wall = next((line["time_unix"] for line in lines if line.get("time_unix")), time.time())
        for line in lines:
            if self._events is None:
                # A restart event at step 0 makes an open TensorBoard drop the data of the stale files.
                self._events = _EventFile(self.folder, restart_at=0 if stale else None)
            wall = line.get("time_unix") or wall
            self._add(line, wall)
        if self._events is not None:
            self.samples(list(samples))
            self._events.flush()
        for path in stale:
            # Emptied now and removed next time: a TensorBoard that has the file open continues to read only while it exists.
            if path.stat().st_size:
                os.truncate(path, 0)
            else:
                path.unlink()

    def line(self, line: Mapping[str, Any], wall_time: float) -> None:
        self._add(line, wall_time)
        self._open().flush_now_and_then()

    def _add(self, line: Mapping[str, Any], wall_time: float) -> None:
        self._step = line["step"]
        self._open().scalars(line["step"], wall_time, tagged(line))

    def samples(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._open().text(sample.step, f"sample/{sample.prompt}" if sample.prompt else "sample", sample.text)

    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        events = self._open()
        events.text(self._step, name, json.dumps(facts, indent=1))
        events.flush()

    def close(self, exit_code: int | None) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _open(self) -> "_EventFile":
        if self._events is None:
            self._events = _EventFile(self.folder)
        return self._events


class _EventFile:
    """A TensorBoard event file, written in the caller's thread. A line of metrics.jsonl is one record, and so is a text."""

    def __init__(self, folder: Path, restart_at: int | None = None):
        from tensorboardX.event_file_writer import EventsWriter

        event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")  # generated code without types
        summary_pb2: Any = importlib.import_module("tensorboardX.proto.summary_pb2")
        folder.mkdir(parents=True, exist_ok=True)
        # The library names files by the second and overwrites; nanoseconds keep two starts within one second apart.
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f"{SUFFIX}{time.time_ns()}")
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        if restart_at is not None:
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.write_event(self._event(step=restart_at, wall_time=time.time(), session_log=log))
        self._flushed = time.monotonic()

    def scalars(self, step: int, wall_time: float, values: Mapping[str, float]) -> None:
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.write_event(self._event(step=step, wall_time=wall_time, summary=summary))

    def text(self, step: int, tag: str, text: str) -> None:
        """Write a text indented by four spaces, since TensorBoard renders Markdown: indented text is a code block."""
        from tensorboardX import summary

        indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))
        self._writer.write_event(self._event(step=step, wall_time=time.time(), summary=summary.text(tag, indented)))

    def flush_now_and_then(self) -> None:
        if time.monotonic() - self._flushed >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()
