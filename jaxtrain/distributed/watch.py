"""The threads behind `Peers.watch`: every process shows that it lives, and hears which one has died."""

import contextlib
import ctypes
import itertools
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

GOODBYE_S = 300.0  # process 0 holds the store: it leaves last. As long as jax waits in its own shutdown.


class Watch:
    """A process says "alive N", with N counting, "left", or "failed WHY" under its own key.

    Process 0 reads all of them, and puts "lost WHO" under its key when one has died; the others read that key alone, so that
    the work grows with the number of processes and not with its square, and all of them name the same culprit.
    """

    def __init__(self, peers: Any, client: Any, address: str, every_s: float, dead_after_s: float, lost: Callable[[str], None]):
        self.peers, self.client, self.address = peers, client, address
        self.every_s, self.dead_after_s, self.lost = every_s, dead_after_s, lost
        self.me = peers.process_index
        self.first = peers.who(0, wait_s=10)  # while it can be asked
        self.heard = 0  # how often process 0 has been heard of
        self.lock = threading.Lock()
        self.reported = False
        self.everyone_left = threading.Event()
        self.quiet = threading.Event()  # no more beats
        self.ending = threading.Event()  # and no more reports
        work = [self.beat, self.hold_the_line] if self.me else [self.attend]
        self.threads = [threading.Thread(target=run, name=f"peers: {run.__name__}", daemon=True) for run in work]

    def start(self) -> None:
        if self.me:
            _delay_abort()
        for thread in self.threads:
            thread.start()

    def say(self, text: str) -> None:
        self.client.key_value_set(f"jaxtrain/beat/{self.me}", text, True)

    def report(self, message: str) -> None:
        with self.lock:
            if self.reported or self.ending.is_set():
                return
            self.reported = True
        self.lost(message)

    def attend(self) -> None:
        """Process 0: beats, and looks at the others' beats."""
        silent = dict.fromkeys(range(1, self.peers.count), 0.0)  # seconds of silence of those that have not left
        before: dict[int, str] = {}
        then = time.monotonic()
        for n in itertools.count():
            try:
                self.say(f"alive {n}")
                said = {int(key.rpartition("/")[2]): text for key, text in self.client.key_value_dir_get("jaxtrain/beat/")}
            except RuntimeError:
                return  # its own service has been shut down: this process is leaving
            passed, then = self.passed(then)
            for i in list(silent):
                text = said.get(i, "")
                silent[i] = silent[i] + passed if text == before.get(i, "") else 0.0
                if text == "left":
                    del silent[i]
                elif text.startswith("failed ") or silent[i] > self.dead_after_s:
                    why = f"has failed: {text[7:]}" if text.startswith("failed ") else self.unheard()
                    message = f"{self.peers.who(i)} {why}"
                    self.tell_all(message)
                    self.report(message)
                    return
            before = said
            if not silent:
                self.everyone_left.set()
            if self.quiet.wait(self.every_s):
                return

    def unheard(self) -> str:
        return f"has not been heard of for {self.dead_after_s:g} s"

    def tell_all(self, message: str) -> None:
        """Process 0 stays until the others have read it: with its end, they could name nobody but process 0."""
        self.say(f"lost {message}")
        time.sleep(2.5 * self.every_s)

    def beat(self) -> None:
        """The others: beat, and hear what process 0 says."""
        before = ""
        for n in itertools.count():
            try:
                self.say(f"alive {n}")
                text = self.client.key_value_try_get("jaxtrain/beat/0")
            except RuntimeError:
                text = before  # process 0 has not begun yet, or is gone, which the line notices
            self.heard += text != before
            before = text
            if text.startswith("lost "):
                self.report(text.removeprefix("lost "))
                return
            if self.quiet.wait(self.every_s):
                return

    def hold_the_line(self) -> None:
        """The others: notice at once that process 0 has ended, and in time that it is silent.

        A call to the store shows neither: jax ends the process when the service breaks one off, and one to a machine that is
        stopped does not return. So this is a connection of our own to the port of jax's service. Nothing is said on it; the
        service closes it every minute, and one that lives lets us connect again.
        """
        host, _, port = self.address.rpartition(":")
        pause = min(self.every_s, 1.0)
        line, since, reached = None, 0.0, False  # reached: ever; a service behind a proxy may be there all the same
        silent, heard, then = 0.0, self.heard, time.monotonic()
        while not self.ending.is_set():
            try:
                if line is None:
                    line, since, reached = socket.create_connection((host.strip("[]"), int(port)), timeout=pause), then, True
                closed = not line.recv(4096)
            except TimeoutError:
                closed = False
            except ConnectionRefusedError:
                if reached:
                    self.report(f"{self.first} is gone: nothing answers at {self.address}")
                    return
                closed = True
            except (OSError, ValueError):  # no answer either way, or no address: its silence will tell
                closed = True
            if closed:
                if line is not None:
                    line.close()
                line = None
                self.ending.wait(0.05 if then - since > pause else pause)
            passed, then = self.passed(then)
            silent, heard = (silent + passed if heard == self.heard else 0.0), self.heard
            if silent > self.dead_after_s:
                self.report(f"{self.first} {self.unheard()}")
                return

    def passed(self, then: float) -> tuple[float, float]:
        """(seconds since `then`, now). A pause longer than ours was this process's own, and says nothing about the others."""
        now = time.monotonic()
        return min(now - then, 2 * self.every_s), now

    def look_around(self) -> None:
        """Waits as long as the death of a peer, if there is one, takes to be noticed and reported."""
        time.sleep(self.dead_after_s + 6 * self.every_s)

    def close(self, failed: str) -> None:
        """See Peers.close."""
        if self.me == 0 and not failed:
            until = time.monotonic() + GOODBYE_S
            while not (self.everyone_left.wait(0.1) or self.reported or time.monotonic() > until):
                continue
        self.quiet.set()
        self.join(self.threads[0])  # so that no beat comes after the last word
        with contextlib.suppress(RuntimeError):  # then process 0 is gone, and there is nobody to tell
            if self.me == 0 and failed:
                self.tell_all(f"{self.first} has failed: {failed}")
            elif self.me:
                self.say(f"failed {failed}" if failed else "left")
        with self.lock:
            self.ending.set()
        self.join(self.threads[-1])

    def join(self, thread: threading.Thread) -> None:
        if thread is not threading.current_thread():  # `lost` may close, too
            thread.join(timeout=2.5 * self.every_s + 2)


def _delay_abort() -> None:
    """Has this process live 6 s longer when it aborts, unless something else handles aborts.

    jax aborts the moment it loses its connection to process 0. The handler of SIGABRT is then called with its number, 6, and
    is the C function sleep: enough for a thread of ours to say who is gone, and to leave with the exit code for that. Every
    other abort ends as it always did, 6 s later. No Python runs in the handler, which could wait for ever for the thread
    that aborts.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    if before is not None:
        libc.signal(signal.SIGABRT, before)
