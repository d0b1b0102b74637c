"""The ledger of a run's wall time: an append-only file with the causes of each attempt's time. Imports no jax.

Process 0 writes `goodput.jsonl` in the run's folder. A line of kind `begin` opens an attempt. `spent` has the seconds
since the previous line, by cause. `back` is a rollback to a step: the steps after it are repeated. `end` has the end of the
attempt. The file's modification time is set once a second, and so shows when a killed attempt was last alive. goodput.py sums
up the file.
"""

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.metrics.files import naming
from jaxtrain.metrics.goodput import LINE_S, Goodput, read, summarise

LOGGER = logging.getLogger("jaxtrain")

BEAT_S = 1.0
PATIENCE_S = 2.0  # longest wait for another thread that may hang in a write


class Ledger:
    """Records the time of one attempt by cause. A context manager. Only the main thread calls `during` and `base`.

    path: path of goodput.jsonl. began: start of the process, in seconds since 1970. active: False on processes other than 0,
    which write nothing.
    """

    def __init__(self, path: Path, began: float, active: bool = True):
        self.path, self._active, self._kept = path, active, active
        self._offset = time.time() - time.monotonic()  # one clock for the whole attempt, independent of NTP
        self._since = self._line = began  # when the present cause began; when the last line was written
        self._stack = ["startup"]
        self._spent: dict[str, float] = {}  # since the last line
        self._step: int | None = None  # unknown before there is a state
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._beat, name="goodput", daemon=True)

    def __enter__(self) -> "Ledger":
        if self._active:
            with naming(self.path):
                seen = _cut_to_lines(self.path)
            self._append({"kind": "begin", "time": self._since, "seen": seen})
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def base(self, cause: str) -> None:
        """Set the cause of all time that no `during` block counts, from now on."""
        with self._lock:
            self._account()
            self._stack[0] = cause

    @contextlib.contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Count the time in this block for `cause`, except the time of blocks within it."""
        with self._lock:
            self._account()
            self._stack.append(cause)
        try:
            yield
        finally:
            with self._lock:
                self._account()
                self._stack.pop()
                if cause != "data":
                    self._write()

    def stepped(self, step: int) -> None:
        """Record that `step` steps are done."""
        with self._lock:
            self._step = step

    def back(self, step: int) -> None:
        """Record a rollback to this step: later steps will be repeated."""
        with self._lock:
            self._account()
            self._write()
            self._step = step
            self._append({"kind": "back", "step": step})

    def end(self, exit_code: int, reason: str) -> None:
        """Record the end of the attempt, the last line that is written.

        If another thread holds the lock for PATIENCE_S seconds, nothing is recorded.
        """
        self._over.set()
        if not self._lock.acquire(timeout=PATIENCE_S):  # the watchdog, for example, must not wait
            return
        try:
            if self._active:
                self._account()
                self._write()
                self._append({"kind": "end", "time": self._line, "exit_code": exit_code, "reason": reason})
                self._active = False
        finally:
            self._lock.release()

    def close(self, exit_code: int, reason: str) -> Goodput | None:
        """Record the end of the attempt, and return the goodput of all attempts.

        Return None on processes other than 0, or if the ledger cannot be read.
        """
        self.end(exit_code, reason)
        try:
            return summarise(read(self.path)) if self._kept else None
        except (OSError, ValueError) as error:
            LOGGER.warning("%s", f"no goodput: {error}")
            return None

    def _now(self) -> float:
        return time.monotonic() + self._offset

    def _account(self) -> None:
        now = self._now()
        cause = self._stack[-1]
        self._spent[cause] = self._spent.get(cause, 0.0) + now - self._since
        self._since = now

    def _write(self) -> None:
        """Write one line with all time since the last line. If the write fails, the next line includes this time."""
        seconds = {cause: round(s, 6) for cause, s in self._spent.items() if s > 0}
        line = {"kind": "spent", "until": self._since, "seconds": seconds, "step": self._step, "doing": self._stack[-1]}
        if seconds and self._append(line):
            self._spent, self._line = {}, self._since

    def _append(self, line: Mapping[str, Any]) -> bool:
        if not self._active:
            return False
        size = 0
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = file.tell()
                whole = json.dumps(line).encode() + b"\n"
                if file.write(whole) != len(whole):  # the disk is full
                    raise OSError(errno.ENOSPC, "only a part of a line could be written")
        except OSError as error:
            with contextlib.suppress(OSError):  # a partial line would spoil the next one
                os.truncate(self.path, size)
            if not self._failed:
                LOGGER.warning("%s", f"{self.path} cannot be written ({error}): the time it lacks counts as lost")
            self._failed = True
            return False
        return True

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with self._lock:
                self._account()
                if self._since - self._line >= LINE_S:
                    self._write()
                now = self._since
            with contextlib.suppress(OSError):  # the next line of the ledger includes this time
                os.utime(self.path, (now, now))


def _cut_to_lines(path: Path) -> float | None:
    """Remove a last line that a kill cut short. Return the file's modification time; None without a complete line."""
    try:
        seen = path.stat().st_mtime
        held = path.read_bytes()
    except FileNotFoundError:
        return None
    if whole := held[: held.rfind(b"\n") + 1]:
        if whole != held:
            os.truncate(path, len(whole))
        return seen
    os.truncate(path, 0)
    return None
