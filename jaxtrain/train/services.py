"""The objects that record and guard an attempt: log, metrics, receipt, goodput, watchdog, peers, signals."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import Any

from jaxtrain.metrics.files import NotWritten, Writers
from jaxtrain.metrics.goodput import Ledger
from jaxtrain.metrics.progress import Console
from jaxtrain.metrics.receipt import Receipt
from jaxtrain.runtime.distributed import Peers
from jaxtrain.runtime.signals import Stop
from jaxtrain.runtime.watchdog import Watchdog


class Record:
    """The receipt and the ledger of an attempt, whose end any thread may write."""

    def __init__(self):
        self.receipt: Receipt | None = None  # None before the run's folder is locked
        self.ledger: Ledger | None = None
        self.facts: dict[str, Any] = {}  # further fields of the finished receipt
        self._lock = threading.RLock()
        self._code: int | None = None

    def finish(self, code: int, reason: str, *, settle: bool = False) -> None:
        """Write the end of the attempt to ledger and receipt, unless the exit code is settled. settle: settle it then.

        Raises NotWritten if the receipt cannot be written.
        """
        with self._lock:
            if self._code is None:
                if self.ledger is not None:
                    self.ledger.end(code, reason)
                if self.receipt is not None:
                    self.receipt.finish(code, reason, self.facts)
                self._code = code if settle else None

    def end(self, code: int, reason: str, *, settle: bool = False) -> int:
        """Do what `finish` does, and report an error on stderr. Return the settled exit code, or else `code`."""
        with self._lock:
            try:
                self.finish(code, reason, settle=settle)
            except NotWritten as error:
                os.write(2, f"error: {error}\n".encode(errors="backslashreplace"))
            return code if self._code is None else self._code

    def settle(self, code: int) -> None:
        """Set the exit code of an attempt that has ended by itself: the end of another process no longer changes it."""
        with self._lock:
            self._code = code

    def leave(self, code: int, reason: str) -> None:
        """End this process at once, from any thread, with the exit code of `end`."""
        try:
            code = self.end(code, reason)
        finally:
            os._exit(code)


@dataclasses.dataclass(frozen=True)
class Guards:
    """What may end an attempt from another thread, and the record of its end."""

    own_process: bool  # the process exists for this run alone, and may be ended at once
    record: Record
    watchdog: Watchdog
    peers: Peers


@dataclasses.dataclass(frozen=True)
class Services:
    """Holds the objects of this module for one attempt. The loop, the saver and the evaluation call them."""

    console: Console
    writers: Writers
    receipt: Receipt
    ledger: Ledger  # of wall time, goodput.jsonl
    watchdog: Watchdog
    peers: Peers
    stop: Stop

    @contextlib.contextmanager
    def phase(self, budget: str, cause: str) -> Iterator[None]:
        """Run a block under the watchdog's budget `budget`. The ledger adds the block's wall time to the total of `cause`."""
        with self.watchdog.phase(budget, cause), self.ledger.during(cause):
            yield

    @property
    def stop_requested(self) -> bool:
        """Return whether this run has been asked to stop."""
        return self.peers.stop_reason is not None

    def may_start(self, step: int) -> bool:
        """Return whether the step with this number may start. After a request to stop, all processes agree on the last step."""
        return not self.stop_requested if self.peers.count == 1 else self.peers.may_start(step)

    def ask_to_stop(self, why: str) -> None:
        """Make all processes stop after the same step; before the first step, end this process."""
        self.stop.handle_remote_stop(why)
        self.peers.ask_to_stop(why)
