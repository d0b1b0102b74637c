"""The objects that record and guard an attempt: log, metrics, receipt, goodput, watchdog, peers, signals."""

import contextlib
import dataclasses
from collections.abc import Iterator

from jaxtrain.metrics.files import Writers
from jaxtrain.metrics.goodput import Ledger
from jaxtrain.metrics.progress import Console
from jaxtrain.metrics.receipt import Receipt
from jaxtrain.runtime.distributed import Peers
from jaxtrain.runtime.signals import Stop
from jaxtrain.runtime.watchdog import Watchdog


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
