"""TensorBoard: event files in the run's `tb/`, with the numbers of metrics.jsonl and the texts of samples.txt.

A resumed run writes the event files again from metrics.jsonl and samples.txt. TensorFlow is not needed.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from jaxtrain.metrics.files import tracker_values, with_times
from jaxtrain.metrics.samples import TextSample

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

SUFFIX = ".jaxtrain."  # in the name of every event file written here; no other event file is removed
FLUSH_S = 5  # lines lost in a kill are restored from metrics.jsonl


class TensorBoard:
    """A `metrics.Tracker` for TensorBoard: numbers become scalars; samples, config and receipt become texts."""

    def __init__(self, workdir: str | Path):
        self.folder = Path(workdir) / "tb"
        self._writer: SummaryWriter | None = None
        self._error: OSError | None = None  # the first one of a file
        self._step = 0  # of the newest line, for facts

    def rewind(self, step: int, lines: Iterable[Mapping[str, Any]], samples: Iterable[TextSample], dropped: int) -> None:
        """Write all lines and samples to a new event file, also those that a killed process had not flushed.

        The old event files are emptied now, and deleted at the next rewind. Event files of other programs are unchanged.
        """
        stale = sorted(self.folder.glob(f"*{SUFFIX}*"))
        for line, wall_time in with_times(lines):
            # A restart event at step 0 makes an open TensorBoard drop the data of the stale files.
            self._open(purge_step=0 if stale else None)
            self.line(line, wall_time)
        if self._writer:
            self.samples(list(samples))
        for path in stale:
            # Emptied now and removed next time: a TensorBoard that has the file open continues to read only while it exists.
            if path.stat().st_size:
                os.truncate(path, 0)
            else:
                path.unlink()

    def line(self, line: Mapping[str, Any], wall_time: float) -> None:
        self._step = line["step"]
        for tag, value in tracker_values(line).items():
            self._open().add_scalar(tag, value, line["step"], wall_time)

    def samples(self, samples: Sequence[TextSample]) -> None:
        for sample in samples:
            self._text(f"sample/{sample.prompt}" if sample.prompt else "sample", sample.text, sample.step)

    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        self._text(name, json.dumps(facts, indent=1), self._step)

    def close(self, exit_code: int | None) -> None:
        if self._writer:
            writer, self._writer = self._writer, None
            writer.close()
            self._raise_error()

    def _text(self, tag: str, text: str, step: int) -> None:
        """Write a text indented by four spaces, since TensorBoard renders Markdown: indented text is a code block."""
        self._open().add_text(tag, "".join(f"    {line}" for line in text.splitlines(keepends=True)), step)

    def _open(self, purge_step: int | None = None) -> "SummaryWriter":
        self._raise_error()
        if self._writer is None:
            from tensorboardX import SummaryWriter
            from tensorboardX.record_writer import register_writer_factory

            logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # warns of each NaN
            self.folder.mkdir(parents=True, exist_ok=True)
            scheme = f"jaxtrain-{id(self)}"  # of the paths that this tracker opens
            register_writer_factory(scheme, SimpleNamespace(open=self._file, directory_check=str))
            self._writer = SummaryWriter(
                f"{scheme}:{self.folder}",
                purge_step=purge_step,
                max_queue=0,  # no limit: the loop never waits for the disk
                flush_secs=FLUSH_S,
                # The library names files by the second and overwrites; nanoseconds keep two starts within one second apart.
                filename_suffix=f"{SUFFIX}{time.time_ns()}",
            )
        return self._writer

    def _raise_error(self) -> None:
        if self._error:
            raise self._error

    def _file(self, path: str) -> SimpleNamespace:
        """Open a file for the SummaryWriter, and keep its first error.

        An error would end the thread of the SummaryWriter, and all later calls would wait for that thread.
        """
        file = Path(path.partition(":")[2]).open("wb")  # noqa: SIM115 - the SummaryWriter closes it

        def keep_error(method: Callable[..., object]) -> Callable[..., None]:
            def call(*data: bytes) -> None:
                try:
                    method(*data)
                except OSError as error:
                    self._error = self._error or error

            return call

        return SimpleNamespace(write=keep_error(file.write), flush=keep_error(file.flush), close=keep_error(file.close))
