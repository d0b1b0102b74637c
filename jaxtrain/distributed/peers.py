"""What the processes of a run tell each other, through jax's coordination service and never through the devices."""

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from jaxtrain.distributed.watch import Watch
from jaxtrain.distributed.words import first_line, listed, this_process

AGREE_S = 60.0  # for all processes to say where they are, once one has asked to stop; none waits for its devices to say so
HOUR_S = 3600.0
COLLECTIVE = re.compile(r"gloo|nccl|collective|(closed|reset) by peer", re.IGNORECASE)


class PeerLost(RuntimeError):
    """A process of this run did not answer."""


class Peers:
    """What the processes of a run tell each other outside the devices, through the store in process 0.

    All of it may be called from any thread. A run of one process has one too, and nothing there waits.
    """

    def __init__(self, process_index: int, count: int, client: Any = None, coordinator: str = ""):
        """`client` is jax's client of the coordination service, `coordinator` the service's HOST:PORT."""
        self.process_index = process_index
        self.count = count
        self._client = client
        self._coordinator = coordinator
        self._rounds: dict[str, int] = {}
        self._agreement = threading.Condition()
        self._reached = 0  # the last step this process may dispatch so far
        self._ceiling: int | None = None  # the same, as told to the others
        self._last: int | None = None  # the last step for all
        self._reason: str | None = None
        self._stopped = False  # at once, where all are between the same two steps
        self._broken: RuntimeError | None = None
        self._watch: Watch | None = None
        self.on_stop: Callable[[str], None] | None = None  # called once, in another thread, when somebody has asked to stop
        self._closed = count == 1
        self._hears_of_stop = threading.Thread(target=self._stop_with_the_others, name="peers: stop", daemon=True)
        if count > 1:
            client.key_value_set(f"jaxtrain/who/{process_index}", this_process(), True)
            self._hears_of_stop.start()

    @classmethod
    def of_this_run(cls) -> "Peers":
        """From what `start` set up; of one process where it did not.

        A process that ends without `close`, by an exception or sys.exit, tells the others that it has failed; its exit code is
        1, whatever sys.exit was given. `close` and `leave` are the way to another.
        """
        from jax._src import distributed

        state = distributed.global_state
        if state.client is None or state.num_processes == 1:
            return cls(0, 1)
        peers = cls(state.process_id, state.num_processes, state.client, state.coordinator_address or "")
        atexit.register(peers._ended_without_close)  # before jax's own shutdown, which waits for the others
        return peers

    def gather(self, name: str, value: str, timeout_s: float) -> list[str]:
        """Every process's value, by process index. Waits at most `timeout_s` seconds for the others to call it too.

        A name may be used again: all processes call it equally often. What was said under it before is forgotten.

        Raises PeerLost, naming the processes that did not answer.
        """
        if self.count == 1:
            return [value]
        deadline = time.monotonic() + timeout_s
        turn = self._rounds[name] = self._rounds.get(name, -1) + 1
        self._set(f"gather/{name}/{turn}/{self.process_index}", value)
        values = self._of_all(f"gather/{name}/{turn}", deadline, f"within {timeout_s:g} s ({name})")
        if turn:  # whoever has come to this turn has read the one before
            with contextlib.suppress(RuntimeError):  # process 0 is gone, and what it kept
                self._client.key_value_delete(f"jaxtrain/gather/{name}/{turn - 1}/{self.process_index}")
        return values

    def _set(self, key: str, value: str) -> None:
        """Puts a value into the store, over what may be there. Raises PeerLost where process 0 cannot be reached."""
        try:
            self._client.key_value_set(f"jaxtrain/{key}", value, True)
        except RuntimeError as error:
            raise PeerLost(f"process 0 does not answer: {first_line(error)}") from error

    def _of_all(self, place: str, deadline: float, when: str) -> list[str]:
        """Every process's value under `place`, waited for until then. Raises PeerLost."""
        try:
            values = []
            for i in range(self.count):
                left_ms = int(1000 * (deadline - time.monotonic()))
                try:
                    values.append(self._client.blocking_key_value_get(f"jaxtrain/{place}/{i}", max(left_ms, 1)))
                except RuntimeError as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise
                    break
            else:
                return values
            # Who else is missing, and who came while one was waited for.
            there = {key.rpartition("/")[2]: text for key, text in self._client.key_value_dir_get(f"jaxtrain/{place}")}
        except RuntimeError as error:
            raise PeerLost(f"process 0 does not answer: {first_line(error)}") from error
        missing = [i for i in range(self.count) if str(i) not in there]
        if missing:
            names = self.who(missing[0]) if len(missing) == 1 else listed(missing)
            raise PeerLost(f"{names} did not answer {when}")
        return [there[str(i)] for i in range(self.count)]

    def who(self, index: int, wait_s: float = 0.0) -> str:
        """A process in words: process 1 (host NAME, pid N). `wait_s`: seconds to wait for a process that has yet to say so."""
        key = f"jaxtrain/who/{index}"
        try:
            said = (
                self._client.blocking_key_value_get(key, int(1000 * wait_s)) if wait_s else self._client.key_value_try_get(key)
            )
        except RuntimeError:
            return f"process {index}"
        return f"process {index} ({said})"

    # Where to stop: every process says which step it has reached, and all go on to the last of these. No loop is asked to do
    # anything for that, because it may be blocked in a step that another process has not begun: this is a thread's work.

    def ask_to_stop(self, why: str) -> None:
        """Has all processes stop after one and the same step, this one included. Asked twice, the first counts.

        Raises PeerLost where process 0 cannot be told.
        """
        if self.count == 1:
            with self._agreement:
                if self._reason is None:
                    self._reason, self._ceiling, self._last = why, self._reached, self._reached
            return
        if self._closed:
            return
        try:
            self._client.key_value_set("jaxtrain/stop/first", why)
        except RuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return
            raise PeerLost(f"process 0 does not answer: {first_line(error)}") from error
        for i in range(self.count):  # each has a key of its own to wait for, by which it can also be woken to leave
            self._set(f"stop/{i}", why)

    def may_start(self, step: int) -> bool:
        """Whether step `step` (the number of steps done after it) may be dispatched; called before each.

        False means to stop here: all steps before it are dispatched by every process, and neither it nor any later one by any.

        Raises PeerLost, naming the processes that have not said where they are, where it is their turn to.
        """
        with self._agreement:
            if self._stopped:
                return False
            if self._ceiling is not None and step > self._ceiling:
                self._agreement.wait_for(lambda: self._last is not None or self._broken is not None, AGREE_S + 30)
                if self._last is None:
                    raise self._broken or PeerLost(f"nobody has said within {AGREE_S:g} s where to stop")
                if step > self._last:
                    return False
            self._reached = step
            return True

    def stop_here(self, why: str) -> None:
        """No step from here on, whatever was agreed. All processes call it between the same two steps, with the same words."""
        with self._agreement:
            self._reason = self._reason or why
            self._stopped = True

    @property
    def stop_reason(self) -> str | None:
        """Why to stop, once this process has heard that somebody asked."""
        return self._reason

    def _stop_with_the_others(self) -> None:
        why = None
        while why is None:
            try:
                why = self._client.blocking_key_value_get(f"jaxtrain/stop/{self.process_index}", int(1000 * HOUR_S))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    return  # process 0 is gone: the watch's business
        if self._closed:
            return
        if self.on_stop is not None:
            self.on_stop(why)
        said = []
        try:
            self._say_how_far(why)
            said = self._of_all("reached", time.monotonic() + AGREE_S, f"within {AGREE_S:g} s (where to stop)")
        except RuntimeError as error:
            self._broken = error
        with self._agreement:
            self._last = max((int(step) for step in said), default=None)
            self._agreement.notify_all()

    def _say_how_far(self, why: str | None) -> None:
        """Tells the others which step this process has reached; from then on it goes no further alone."""
        with self._agreement:
            self._reason = why
            self._ceiling = self._reached if self._ceiling is None else self._ceiling
        self._set(f"reached/{self.process_index}", str(self._ceiling))

    def watch(self, every_s: float, dead_after_s: float, lost: Callable[[str], None]) -> None:
        """From now on, `lost` is called, once and in another thread, with the words for it when a process of this run dies.

        Every process says every `every_s` seconds that it is there; one that has not for `dead_after_s` seconds is dead,
        although it may only be stopped. Process 0 watches the others and tells them; they watch process 0. Where process 0
        is gone, the coordination service with it, jax ends this process 6 s later: `lost` should be done by then.

        Raises ValueError where `dead_after_s` leaves no room for a beat that is late.
        """
        if dead_after_s < 3 * every_s:
            raise ValueError(f"dead_after_s ({dead_after_s:g}) must be at least three times every_s ({every_s:g})")
        if self.count > 1:
            self._watch = Watch(self, self._client, self._coordinator, every_s, dead_after_s, lost)
            self._watch.start()

    def close(self, failed: str = "") -> None:
        """Says goodbye, so that this process's end is not taken for a death, and ends the watch. Called twice, once counts.

        `failed` says instead that this process cannot go on, and why: the watches of the others hear of it at once. `leave`
        should follow. A collective that failed is more often the end of a peer than this process's own: then the watch is
        given the time to find that one first, and `lost` is called instead.

        Without it, process 0 waits (300 s at most) until all others have said goodbye, and watches them meanwhile: nothing
        works without the store that it holds.
        """
        if self._closed:
            return
        if failed and self._watch and COLLECTIVE.search(failed):
            self._watch.look_around()
        self._closed = True
        atexit.unregister(self._ended_without_close)
        with contextlib.suppress(PeerLost):  # then there is nobody to tell
            self._say_how_far(self._reason)  # the others may yet ask to stop
        if self._watch:
            self._watch.close(failed)
        # Python must not end while a thread is in a call to the store: the process would abort.
        with contextlib.suppress(PeerLost):  # then the call has ended too
            self._set(f"stop/{self.process_index}", "")
        if self._hears_of_stop is not threading.current_thread():
            self._hears_of_stop.join(timeout=5.0)

    def _ended_without_close(self) -> None:
        error = getattr(sys, "last_exc", None)  # one that nobody caught, and Python has shown
        self.close(f"{type(error).__name__}: {first_line(error)}" if error else "it ended before its work was done")
        leave(1)


def leave(exit_code: int) -> NoReturn:
    """Ends a process of several whose run has failed, at once.

    Python's own way out would wait minutes in jax's shutdown for peers that wait for this process in a collective.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or the reader has gone
    os._exit(exit_code)
