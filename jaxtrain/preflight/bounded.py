"""Asking what may never answer: a file system whose server is gone, a driver that hangs."""

import threading
from collections.abc import Callable

GRACE_S = 3.0  # for what takes no time where all is well


class Unmeasured(Exception):
    """There is no answer, no figure; the message says why."""


def within[T](seconds: float, who: str, ask: Callable[[], T]) -> T:
    """What `ask` returns, and whatever it raises; Unmeasured where it takes longer. It has a thread that can be left behind."""
    found: list[T] = []
    raised: list[Exception] = []

    def go() -> None:
        try:
            found.append(ask())
        except Exception as error:  # handed to the caller, whose thread this is not
            raised.append(error)

    thread = threading.Thread(target=go, name="asking", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise Unmeasured(f"{who} did not answer within {seconds:.0f} s")
    return found[0]
