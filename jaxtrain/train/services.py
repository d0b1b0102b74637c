"""The objects that record and guard an attempt: log, metrics, receipt, goodput, watchdog, peers, signals."""

import contextlib
import dataclasses
from collections.abc import Iterator

from jaxtrain.distributed import Peers
from jaxtrain.ledger import Ledger
from jaxtrain.metrics import Writers
from jaxtrain.progress import Console
from jaxtrain.receipt import Receipt
from jaxtrain.signals import Stop
from jaxtrain.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Services:
    """The objects that record and guard an attempt. The loop, saves and evaluation call them."""

    console: Console
    writers: Writers
    receipt: Receipt
    ledger: Ledger  # of wall time, goodput.jsonl
    watchdog: Watchdog
    peers: Peers
    stop: Stop

    @contextlib.contextmanager
    def phase(self, budget: str, cause: str) -> Iterator[None]:
        """Run a block under the watchdog's budget of this name, with its wall time counted to `cause` in the ledger."""
        with self.watchdog.phase(budget), self.ledger.during(cause):
            yield

    @property
    def stop_requested(self) -> bool:
        """Return whether this run has been asked to stop."""
        return self.peers.stop_reason is not None

    def may_start(self, step: int) -> bool:
        """Return whether the step of this number may start. If a stop is requested, all processes agree on the last step."""
        return not self.stop_requested if self.peers.count == 1 else self.peers.may_start(step)
