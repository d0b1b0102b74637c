"""Read batches from the data source in a thread, and put them on the devices.

A data source may hang. Python runs signal handlers in the main thread only. A hanging call in that thread would prevent a save.
Batches are therefore read in another thread, and the main thread waits in short intervals.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxtrain.config.context import Context
from jaxtrain.step.batch import HostBatch, place_batch, rows_here
from jaxtrain.step.loss import Batch

AHEAD = 2  # batches that wait for the loop; the thread holds one more
POLL_S = 0.05  # between two checks whether a batch is still wanted


class BatchFeed:
    """Reads the batches of a run ahead, in a thread. Every process reads only the rows for its own devices."""

    def __init__(self, source: Any, first: int, abstract: Batch, context: Context, count: int | None = None):
        """Start to read batches.

        Args:
          source: `.batch(i)` returns batch `i`, and `.batch(i, rows)` returns only these rows of batch `i`.
          first: the index `i` of the first batch.
          abstract: shapes, dtypes and shardings of a batch on the devices.
          count: number of batches to read; None: no limit.
        """
        self._abstract, self._context, self.rows = abstract, context, rows_here(abstract)
        only = () if self.rows is None else (np.asarray(self.rows),)
        batches = (source.batch(i, *only) for i in itertools.islice(itertools.count(first), count))
        self._ready: queue.Queue[HostBatch | BaseException] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(batches,), name="data", daemon=True)
        self._thread.start()

    def _read(self, batches: Iterator[HostBatch]) -> None:
        try:
            for batch in batches:
                if not self._put(batch):
                    return
        except BaseException as error:  # raised again by `next`
            self._put(error)

    def _put(self, item: HostBatch | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def next(self, unwanted: Callable[[], object]) -> HostBatch | None:
        """Return the next batch's rows for the devices of this process; None if `unwanted()` is true before they are read.

        Raises the data source's exceptions.
        """
        while True:
            try:
                host = self._ready.get(timeout=POLL_S)
            except queue.Empty:
                if unwanted():
                    return None
                continue
            if isinstance(host, BaseException):
                raise host
            return host

    def place(self, host: HostBatch) -> Batch:
        """Put rows from `next` onto the devices."""
        return place_batch(host, self._abstract, self._context, self.rows)

    def batches(self) -> Iterator[Batch]:
        """Yield each batch in turn, placed on the devices."""
        while (host := self.next(lambda: False)) is not None:
            yield self.place(host)

    def close(self) -> None:
        """Stop reading. If the data source hangs, its thread continues until the process ends."""
        self._closed.set()
        self._thread.join(timeout=2 * POLL_S)
