"""The log of a run: `log.txt`, and the terminal with one line that updates in place.

Every message goes through the logger named "jaxtrain": any module may use `logging.getLogger("jaxtrain")`. While a `Console` is
open, messages go to the terminal and, with their time, to `log.txt`. Processes other than 0 have `log.<process>.txt`. Each
message is flushed at once. On a terminal the last line is live and messages appear above it. Elsewhere each line of metrics is
a plain line. Warnings of other libraries, and the traceback of an error that ends the run, go to the log too.
"""

import collections
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxtrain.config import own_parts
from jaxtrain.config.durations import duration
from jaxtrain.metrics.files import naming
from jaxtrain.metrics.table import METRICS
from jaxtrain.runtime import streams

if TYPE_CHECKING:
    from rich.progress import Progress

LOGGER = logging.getLogger("jaxtrain")
WIDE = 118  # least columns for the bar next to the numbers; a narrower line loses its end
REDRAW_S = 0.1  # drawing more often shows nothing new and slows the loop


class Console:
    """The log and terminal of one process. A context manager. Processes other than 0 write only warnings to the terminal."""

    def __init__(
        self,
        workdir: str | Path,
        process_index: int,
        total_steps: int,
        *,
        work: Callable[[int], int] = lambda step: step,
        stream: TextIO | None = None,
    ):
        """Args: work: returns the work of the first steps, of which the time left is estimated; by default all are alike."""
        self.path = Path(workdir) / ("log.txt" if process_index == 0 else f"log.{process_index}.txt")
        self._process_index = process_index
        self._total, self._work = total_steps, work
        self.fp8_factor: float | None = None  # under precision=fp8, the factor from MFU to the MFU of the FP8 peak
        self._stream = stream or sys.stdout  # None after the terminal was lost
        self._live: Progress | None = None
        self._drawn = 0.0
        self._numbers = ""
        self._lines: collections.deque[tuple[int, float]] = collections.deque(maxlen=1000)  # step and time of each line
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []
        self._lost_log = False

    def __enter__(self) -> "Console":
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            to_file = _LogFile(self)
        to_file.setFormatter(_FileFormat("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S%z"))
        library_log = _LogFile(self)
        library_log.setFormatter(to_file.formatter)
        library_log.setLevel(logging.WARNING)
        to_terminal = _TerminalHandler(self)
        to_terminal.setLevel(logging.INFO if self._process_index == 0 else logging.WARNING)
        self._handlers = [(LOGGER, to_file), (LOGGER, to_terminal), (logging.getLogger(), library_log)]
        for logger, handler in self._handlers:
            logger.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False  # absl prints what reaches the root logger a second time
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.end_live()
        if error is not None and not isinstance(error, SystemExit):
            # Only to the file: Python prints the traceback on the terminal itself.
            problem = own_parts.problem_of(error)
            LOGGER.error("%s", problem or "the run ends with an error", exc_info=error, extra={"file_only": True})
        for logger, handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
        self._handlers = []
        LOGGER.propagate = True

    def say(self, text: str) -> None:
        """Write a message to the log and the terminal."""
        LOGGER.info("%s", text)

    def warn(self, text: str) -> None:
        """Write a message that needs action by the user; also from processes other than 0."""
        LOGGER.warning("%s", text)

    def tick(self, step: int) -> None:
        """Move the progress bar to `step` steps done. The call is cheap enough for every step: it draws only on a terminal."""
        if self._has_live_line():
            self._draw(step)

    def step(self, line: Mapping[str, Any]) -> None:
        """Show a train line of metrics.jsonl, and write it to log.txt."""
        done, now = line["step"], time.monotonic()
        self._numbers = numbers(line, self._seconds_left(done, now, line["step_time_s"]), self.fp8_factor)
        text = f"step {done}/{self._total}  {self._numbers}"
        if self._has_live_line():
            self._draw(done, force=True)
            LOGGER.info("%s", text, extra={"file_only": True})
        else:
            LOGGER.info("%s", text)

    def _seconds_left(self, done: int, now: float, step_time_s: float | None) -> float | None:
        """Return an estimate of the seconds until the last step, from the times of the newest lines.

        These are the last quarter of all lines, or the last 20 lines if a quarter has fewer. The estimate includes evaluations
        and saves. At the first line, the estimate uses only the step time.
        """
        while self._lines and self._lines[-1][0] >= done:  # a rollback
            self._lines.pop()
        self._lines.append((done, now))
        count, remaining_work = len(self._lines), self._work(self._total) - self._work(done)
        before, then = self._lines[min(max(count - 20, 0), 3 * count // 4)]
        if count == 1:
            return None if step_time_s is None else remaining_work * step_time_s / (self._work(done) - self._work(done - 1))
        return remaining_work * (now - then) / (self._work(done) - self._work(before))

    def lost_log(self, error: BaseException | None) -> None:
        """Report on the terminal, once, that the log cannot be written."""
        if not self._lost_log:
            self._lost_log = True
            text = f"{self.path}: cannot be written ({error}); messages are only on the terminal"
            self._to_terminal(lambda: self._print(text, True))

    def end_live(self) -> None:
        """End the live line and continue below it."""
        if self._live is not None:
            live, self._live = self._live, None
            self._to_terminal(live.stop)

    def _has_live_line(self) -> bool:
        return self._process_index == 0 and self._stream is not None and self._stream.isatty()

    def _draw(self, step: int, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._drawn < REDRAW_S:
            return
        self._drawn = now
        self._to_terminal(lambda: self._redraw(step))

    def _redraw(self, step: int) -> None:
        if self._live is None:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, Progress, TextColumn

            screen = RichConsole(file=self._stream, highlight=False)
            columns = [TextColumn("{task.completed}/{task.total}  {task.fields[numbers]}")]
            if screen.width >= WIDE:
                columns = [BarColumn(bar_width=20), *columns]
            self._live = Progress(*columns, console=screen, auto_refresh=False)
            self._live.add_task("train", total=self._total, numbers="")
            self._live.start()
            screen.show_cursor(True)  # a killed process could not show it again
        self._live.update(self._live.task_ids[0], completed=step, numbers=self._numbers, refresh=True)

    def _print(self, text: str, warning: bool) -> None:
        if self._process_index != 0:
            text = f"[process {self._process_index}] {text}"
        text = streams.printable(text, self._stream)
        if self._live is not None:
            self._live.console.print(text, style="yellow" if warning else None, markup=False, soft_wrap=True)
        elif self._stream is not None:
            self._stream.write(f"{'warning: ' if warning else ''}{text}\n")
            self._stream.flush()
            if streams.reader_ended(self._stream):
                raise BrokenPipeError("its reader has ended")

    def _to_terminal(self, action: Any) -> None:
        """Write to the terminal. If the terminal is closed (pipe, lost connection), the run continues with its log only."""
        try:
            action()
        except (OSError, SystemExit) as error:  # rich turns a broken pipe into SystemExit
            stream, self._stream, self._live = self._stream, None, None
            if stream is not None:
                # Buffered output of the stream must be written somewhere, otherwise Python fails at exit and the exit code is
                # lost.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
            LOGGER.warning("%s", f"the terminal cannot be written to ({error!r}); all further messages are only in {self.path}")


class _FileFormat(logging.Formatter):
    """Adds the level to warnings and errors, so `grep WARNING log.txt` finds them."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname} {record.message}"
        return super().formatMessage(record)


class _LogFile(logging.FileHandler):
    """The file of a console. If it cannot be written, the terminal says so once, and has all further messages."""

    def __init__(self, console: Console):
        super().__init__(console.path, mode="a", encoding="utf-8", errors="backslashreplace")
        self._console = console

    def handleError(self, record: logging.LogRecord) -> None:
        self._console.lost_log(sys.exception())

    def close(self) -> None:
        try:
            super().close()  # writes what is buffered
        except OSError as error:
            self._console.lost_log(error)


class _TerminalHandler(logging.Handler):
    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "file_only", False):
            text, warning = record.getMessage(), record.levelno >= logging.WARNING
            self._console._to_terminal(lambda: self._console._print(text, warning))


def numbers(line: Mapping[str, Any], seconds_left: float | None, fp8_factor: float | None = None) -> str:
    """Return the columns of a progress line, without the step. seconds_left: until the last step. fp8_factor: of `Console`."""
    columns = []
    for name, metric in METRICS.items():
        value = line.get(name)
        if not metric.column or value is None or (metric.hide_zero and not value):
            continue
        columns.append(metric.column.format(value))
        if name == "mfu_causal" and fp8_factor is not None:
            columns[-1] += f" ({value * fp8_factor:.1%} of the FP8 peak)"
    if seconds_left is not None:
        columns.append(f"left {duration(seconds_left)}")
    return "  ".join(columns)


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str, int], None]]:
    """Yield a function to call with (name, bytes) of each finished part of `total` bytes. On a terminal, show a bar."""
    import rich.console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = rich.console.Console(stderr=True)
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    lines = sys.stdout.isatty()  # rich writes lines of stdout to its console, above the bar
    with Progress(*columns, console=console, transient=True, redirect_stdout=lines, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda name, size: bar.update(task, advance=size, description=name)
