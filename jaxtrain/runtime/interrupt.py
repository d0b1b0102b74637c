"""Ctrl-C ends a command with one line and exit code 130, also during its imports. Standard library alone."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

is_command = sys.argv[:1] == ["-m"]  # this process was started as `python -m jaxtrain COMMAND`; Python's mark until that runs


def end_interrupted(number: int, frame: object, stderr: int = 2) -> None:
    """Print one line and end this process. This function handles Ctrl-C until a command installs its own handler.

    A KeyboardInterrupt would print a traceback, and imports of C libraries can lose it. stderr: a file descriptor.
    """
    os.write(stderr, b"interrupted\n")
    os._exit(130)


def handle_interrupts() -> None:
    """Handle Ctrl-C by `end_interrupted`, if this process is a command and nothing handles it yet."""
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_interrupted)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, not `end_interrupted`. During a compile, Python raises it after the compile."""
    if signal.getsignal(signal.SIGINT) is not end_interrupted:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, end_interrupted)
