"""Waiting for something that may hang, in a way that can be given up. No jax here.

A call in the main thread that never returns would keep a run that is asked to stop from saving. So what may hang is done in a
thread, and the main thread looks from time to time whether it is still wanted.
"""

import queue
import threading
from collections.abc import Callable

LOOK_S = 0.05  # how often a wait looks whether it is still wanted


class Unwanted(Exception):
    """The wait was given up."""


def wait_for[T](call: Callable[[], T], unwanted: Callable[[], object], name: str) -> T:
    """What `call()` returns or raises, in a thread of this name.

    Raises Unwanted once `unwanted()` is true and it has not ended; the thread is left behind then.
    """
    done: queue.Queue[tuple[bool, T | BaseException]] = queue.Queue(1)

    def run() -> None:
        try:
            done.put((True, call()))
        except BaseException as error:  # raised again where it is waited for
            done.put((False, error))

    threading.Thread(target=run, name=name, daemon=True).start()
    while True:
        try:
            well, result = done.get(timeout=LOOK_S)
        except queue.Empty:
            if unwanted():
                raise Unwanted from None
            continue
        if not well:
            raise result  # pyright: ignore[reportGeneralTypeIssues]
        return result  # pyright: ignore[reportReturnType]
