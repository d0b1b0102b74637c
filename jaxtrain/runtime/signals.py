"""Signals to a run: to save and stop (Ctrl-C, or a scheduler before it ends the job), or to trace.

The first signal to stop asks the loop to finish its step, save and exit. A second one ends the process at once. Each SIGUSR2
requests a trace of the next steps. Signals work while the main thread waits inside XLA (a long compile, a hanging collective),
where Python runs no signal handler: the interpreter's own handler writes the signal's number into a pipe, and a thread reads
it.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75}
TRACE = signal.SIGUSR2

# A terminal signals the whole process group, and a launcher may forward the same signal. Both signals count as one request.
SAME_REQUEST_S = 0.2

CLOSE = 0  # no signal has this number


class Stop:
    """The request to stop a run, with its reason, and the number of requested traces. Use as a context manager.

    Signals are handled in the main thread only, because Python sets handlers nowhere else. A run in another thread leaves them
    to its caller, and is never asked to stop.

    ask: called with the signal's name, in the thread that reads the pipe, at the first signal to stop.

    at_once: set while there is no state to save. At the first signal to stop, it is called with the signal's name and exit
    code, to complete the run's files. Then the process ends at once, although the main thread may be in a compile.
    """

    def __init__(self, ask: Callable[[str], None] = lambda name: None):
        self.at_once: Callable[[str, int], None] | None = None
        self.reason: str | None = None  # the name of the first signal to stop
        self.traces = 0  # number of requested traces
        self._ask = ask
        self._first = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1
        self._thread: threading.Thread | None = None

    @staticmethod
    def exit_code_of(why: str) -> int:
        """Return the exit code of a run that was asked to stop. why: a signal's name, or another reason in words."""
        return next((code for number, code in EXIT_CODES.items() if why.startswith(number.name)), 75)

    def __enter__(self) -> "Stop":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._pipe = reading, writing = os.pipe()
        os.set_blocking(writing, False)  # required by the interpreter: its handler must never wait
        self._wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=(reading,), name="signals", daemon=True)
        self._thread.start()
        for number in (*EXIT_CODES, TRACE):
            self._before[number] = signal.signal(number, _ignore_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Handle signals as before, and end no process at once any more."""
        self.at_once = None
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()
        if self._pipe and self._thread:
            signal.set_wakeup_fd(self._wakeup_before)
            os.write(self._pipe[1], bytes([CLOSE]))
            self._thread.join()
            for end in self._pipe:
                os.close(end)
        self._pipe = self._thread = None

    def _listen(self, reading: int) -> None:
        while True:
            for number in os.read(reading, 64):
                if number == CLOSE:
                    return
                if number in (*EXIT_CODES, TRACE):
                    self._handle(signal.Signals(number))

    def handle_remote_stop(self, why: str) -> None:
        """End this process by `at_once` if another process was asked to stop while there is no state to save.

        Without `at_once`, do nothing: the loop gets the request from the other processes. why: the other process's reason.
        """
        if self.reason is None:
            self._end_at_once(why)

    def _end_at_once(self, why: str) -> None:
        if (at_once := self.at_once) is not None:
            code = self.exit_code_of(why)
            _say(f"{_name(why)}: stopping, there is nothing to save yet.")
            try:
                at_once(why, code)
            finally:
                os._exit(code)

    def _handle(self, number: signal.Signals) -> None:
        if number == TRACE:
            self.traces += 1
            _say(f"{number.name}: a trace was asked for.")
        elif self.reason is None:
            self.reason, self._first = number.name, time.monotonic()
            self._end_at_once(number.name)
            _say(f"{_name(number.name)}: finishing this step, then saving. Again to leave at once.")
            self._ask(number.name)
        elif time.monotonic() - self._first > SAME_REQUEST_S:
            _say(f"{number.name} again: stopping at once. Steps after the last checkpoint are lost.")
            os._exit(EXIT_CODES[number])


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing. A Python handler must be set for the interpreter to write to the pipe, which a thread reads."""


def _name(why: str) -> str:
    """Return the reason of a stop as messages show it: Ctrl-C for SIGINT."""
    return "Ctrl-C" if why == "SIGINT" else why


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone; the run's end is still written to its receipt
        os.write(2, f"\n{text}\n".encode(errors="backslashreplace"))  # sys.stderr's lock may be held by the main thread
