"""Ctrl-C: what a command does before it handles it itself, and while the main thread is in C code. Standard library alone."""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

CLOSE = 0  # no signal has this number
GRACE_S = 0.5  # if no handler has run by then, the main thread is in C code
is_command = sys.argv[:1] == ["-m"]  # this process was started as `python -m jaxtrain COMMAND`; Python's mark until that runs


def end_interrupted(number: int, frame: object, stderr: int = 2) -> None:
    """Print one line and end this process. This function handles Ctrl-C until a command installs its own handler.

    A KeyboardInterrupt would print a traceback, and imports of C libraries can lose it. stderr: a file descriptor.
    """
    os.write(stderr, b"interrupted\n")
    os._exit(130)


def begin() -> None:
    """Handle Ctrl-C by `end_interrupted`, if this process is a command and nothing handles it yet."""
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_interrupted)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C. Print a line if the main thread cannot handle it yet.

    Python runs no signal handler during a compile, which can take minutes. A thread reads the signals then, prints that the
    command waits, and ends the process at the second Ctrl-C.
    """
    handler = signal.getsignal(signal.SIGINT)
    ours = handler in (signal.default_int_handler, end_interrupted)
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = waiting = False

    def handle(number: int, frame: object) -> NoReturn:
        nonlocal handled
        handled = True
        raise KeyboardInterrupt

    def listen() -> None:
        nonlocal waiting
        while CLOSE not in (numbers := os.read(reading, 64)):
            if signal.SIGINT not in numbers:
                continue
            if waiting and not handled:
                end_interrupted(signal.SIGINT, None)
            if not select.select([reading], [], [], GRACE_S)[0] and not handled:
                waiting = True
                os.write(2, b"Ctrl-C: waiting for the computation that is running; press again to stop at once\n")

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="Ctrl-C", daemon=True)
    thread.start()
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(before)
        os.write(writing, bytes([CLOSE]))
        thread.join()
        os.close(reading)
        os.close(writing)
