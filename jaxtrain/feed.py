"""Batches from the host onto the devices, one fetched ahead, by a wait that a signal can end.

The data pipeline runs in a thread of its own: Python hears of signals in the main thread only, and there a source that hangs
would keep it from saving.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain.data import pipeline
from jaxtrain.position import Position, Positioned
from jaxtrain.step import Program, place_batch, rows_here
from jaxtrain.waiting import LOOK_S

Host = dict[str, np.ndarray]


class Feed:
    """The batches of a run from `position` on. Every process fetches the rows that its own devices hold."""

    def __init__(self, source: Any, position: Position, program: Program, prefetch: int):
        self._program = program
        self._rows = rows_here(program.batch)
        rows = None if self._rows is None else np.asarray(self._rows)
        batches = pipeline.iterate(Positioned(source, position), position.step, prefetch, rows)
        # One place each: what is fetched ahead is the pipeline's affair, this thread only waits for it.
        self._ready: queue.Queue[Host | BaseException] = queue.Queue(1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fetch, args=(batches,), name="data", daemon=True)
        self._thread.start()

    def _fetch(self, batches: Any) -> None:
        try:
            for batch in batches:
                if not self._put(batch):
                    return
        except BaseException as error:  # raised again where the batch is asked for
            self._put(error)
        finally:
            batches.close()

    def _put(self, item: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=LOOK_S)
                return True
            except queue.Full:
                continue
        return False

    def next(self, unwanted: Callable[[], object]) -> tuple[Host, Any] | None:
        """(rows on the host, arrays on the devices) of the next batch; None once `unwanted()` is true and none has come.

        Raises what the data source raised.
        """
        while True:
            try:
                host = self._ready.get(timeout=LOOK_S)
            except queue.Empty:
                if unwanted():
                    return None
                continue
            if isinstance(host, BaseException):
                raise host
            return host, place_batch(host, self._program.batch, self._program.context, self._rows)

    def close(self) -> None:
        """No more batches. A source that hangs is left behind: its thread ends with the process."""
        self._closed.set()
        self._thread.join(timeout=2 * LOOK_S)
