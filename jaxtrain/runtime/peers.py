"""Exchange messages between the processes of a run, through JAX's coordination service and never through the devices."""

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jaxtrain.runtime import progress
from jaxtrain.runtime.service import HEARTBEAT_S, LEAVE_S, append_news, is_aborting
from jaxtrain.runtime.words import first_line, process_list

AGREE_S = 60.0  # for all processes to publish the step they have reached, after a request to stop
EXIT_S = 300.0  # for all processes to reach the end of the run
POLL_S = 1.0
ANSWER_S = 2.0  # for an answer of the service, which takes milliseconds. JAX aborts 6 s after the end of process 0.
SILENT = 5  # unanswered requests in a row: process 0 is stopped, or its node or the network is down
COLLECTIVE = re.compile(r"gloo|nccl|collective|(closed|reset) by peer", re.IGNORECASE)


class PeerLost(RuntimeError):
    """A process of this run did not answer."""


@contextlib.contextmanager
def _asking(expected: str = "") -> Iterator[None]:
    """Ask the service in this block. Errors with the text `expected` end the block; raises PeerLost for all others."""
    try:
        yield
    except RuntimeError as error:
        if not expected or expected not in str(error):
            raise PeerLost(f"process 0 does not answer: {first_line(error)}") from error


class Peers:
    """The processes of a run and their key-value store in process 0.

    Every method may be called from any thread. In a run of one process, no method waits.

    In a run of several processes, each process has two threads. One reads the news, a list to which any process appends
    requests to stop, failures and hangs. The other asks the service which processes are alive.
    """

    def __init__(self, process_index: int, count: int, client: Any = None):
        """`client` is JAX's client of the coordination service; None in a run of one process."""
        self.process_index = process_index
        self.count = count
        self.refused = False  # the loss is that of a process that refused to start
        self.hang: str | None = None  # what a process has told by `tell_hang`
        self._client = client
        self._rounds: dict[str, int] = {}
        self._waits: dict[int, str] = {}  # thread -> the exchange in which it waits
        self._stepping = threading.Lock()  # for the next five
        self._reached = 0  # the last step this process may dispatch so far
        self._ceiling: int | None = None  # the last step without the agreement of the others; None until a stop is requested
        self._last: int | None = None  # the last step for all; -1: start no further step
        self._reason: str | None = None
        self._on_stop: Callable[[str], None] | None = None
        self._reporting = threading.Lock()  # for the next two
        self._on_lost: Callable[[str], None] | None = None
        self._lost: str | None = None  # the first loss
        self._news = 0  # entries read so far
        self._ending = threading.Event()  # no loss is reported any more
        self._live = threading.Thread(target=self._watch_live, name="peers: live", daemon=True)
        self._closing = threading.Lock()
        self._closed = count == 1
        if count > 1:
            threading.Thread(target=self._read_news, name="peers: news", daemon=True).start()

    @staticmethod
    def is_connected() -> bool:
        """Return whether this process is connected to others, by `connect` or by a program that started JAX itself."""
        from jax._src import distributed

        return distributed.global_state.client is not None

    @classmethod
    def from_jax(cls) -> "Peers":
        """Return the peers that `connect` connected; in a run of one process, peers without a client.

        To end this process, call `close` and then `leave`.
        """
        from jax._src import distributed

        state = distributed.global_state
        if state.client is None or state.num_processes == 1:
            return cls(0, 1)
        peers = cls(state.process_id, state.num_processes, state.client)
        peers._live.start()
        return peers

    def gather(self, name: str, value: str, timeout_s: float) -> list[str]:
        """Return every process's value, by process index.

        For each name, all processes must make the same number of calls. A call deletes the values of the previous call with
        this name.

        Args:
          timeout_s: seconds to wait for the other processes to make the same call.

        Raises:
          PeerLost: a process did not make the call in time. The message names all such processes.
        """
        if self.count == 1:
            return [value]
        number = self._rounds[name] = self._rounds.get(name, -1) + 1
        self._set(f"gather/{name}/{number}/{self.process_index}", value)
        values = self._gather_values(f"gather/{name}/{number}", name, timeout_s)
        if number:  # a process in this call has read the values of the previous call
            with contextlib.suppress(RuntimeError):  # process 0 is lost, and its store with it
                self._client.key_value_delete(f"jaxtrain/gather/{name}/{number - 1}/{self.process_index}")
        return values

    def _set(self, key: str, value: str) -> None:
        """Set a key in the store, or replace its value. Raises PeerLost if process 0 cannot be reached."""
        with _asking():
            self._client.key_value_set(f"jaxtrain/{key}", value, True)

    def _gather_values(self, prefix: str, name: str, timeout_s: float) -> list[str]:
        """Return every process's value under a prefix. Raises PeerLost if a value is missing after `timeout_s`."""
        deadline, values = time.monotonic() + timeout_s, dict[int, str]()
        with self._waiting(name), _asking("DEADLINE_EXCEEDED"):
            for i in range(self.count):
                remaining_ms = int(1000 * (deadline - time.monotonic()))
                values[i] = self._client.blocking_key_value_get(f"jaxtrain/{prefix}/{i}", max(remaining_ms, 1))
            return [*values.values()]
        values = self._read(prefix)  # others may be missing too, or may have answered meanwhile
        if missing := [i for i in range(self.count) if i not in values]:
            names = self.name(missing[0]) if len(missing) == 1 else process_list(missing)
            raise PeerLost(f"{names} did not answer within {timeout_s:g} s ({name})")
        return [values[i] for i in range(self.count)]

    def _read(self, prefix: str) -> dict[int, str]:
        """Return process -> its value under a prefix, without those that have none. Raises PeerLost without process 0."""
        with _asking():
            return {int(key.rpartition("/")[2]): text for key, text in self._client.key_value_dir_get(f"jaxtrain/{prefix}")}

    def name(self, index: int) -> str:
        """Return "process 1 (host NAME, pid N)", or "process 1" if the process has not published its host and pid."""
        try:
            return f"process {index} ({self._client.key_value_try_get(f'jaxtrain/who/{index}')})"
        except RuntimeError:
            return f"process {index}"

    # Where the processes are, for the watchdog (watchdog.py).

    @contextlib.contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        self._waits[threading.get_ident()] = name
        try:
            yield
        finally:
            del self._waits[threading.get_ident()]

    def waits_at(self) -> str | None:
        """Return the exchange in which the main thread waits for the others: the name of a `gather`, or "end"; or None."""
        return self._waits.get(threading.main_thread().ident or 0)

    def publish(self, text: str) -> None:
        """Publish where this process is. Waits without end if process 0 is stopped."""
        self._set(f"progress/{self.process_index}", text)

    def read_progress(self) -> dict[int, str]:
        """Return process -> what it published last."""
        return self._read("progress")

    def present(self) -> list[int]:
        """Return the processes that have not left at the end of the run."""
        departed = self._read("left")
        return [i for i in range(self.count) if i not in departed]

    def tell_hang(self, text: str) -> str:
        """Set `hang` on all processes, unless one has done so, and return it.

        From here on, no process is reported as lost: each ends by its own watchdog.
        """
        self._ending.set()
        if self.hang is None:
            self.hang = text
            self._append("hang", text)
        return self.hang

    def meet(self, name: str, timeout_s: float) -> None:
        """Wait until all processes have called this, a process is lost, or the time is over."""
        with self._waiting(name), contextlib.suppress(RuntimeError):
            self._client.wait_at_barrier(f"jaxtrain/{name}", int(1000 * timeout_s))

    # The news: a list of entries in the store, [kind, text], that any process appends to and every process reads in order.

    def _append(self, kind: str, text: str) -> None:
        """Append the entry [kind, text] to the news. Raises PeerLost if process 0 cannot be reached."""
        with _asking():
            append_news(self._client, kind, text, self._news)

    def _read_news(self) -> None:
        first, unanswered = "process 0", 0
        while not self._ending.is_set():
            try:  # `connect` has written the name: no answer means that process 0 is stopped, or slow
                name = self._client.blocking_key_value_get("jaxtrain/who/0", int(1000 * ANSWER_S))
                first, unanswered = f"process 0 ({name})", -1
                kind, text = json.loads(self._client.blocking_key_value_get(f"jaxtrain/news/{self._news}", int(1000 * POLL_S)))
            except RuntimeError as error:
                unanswered += 1
                is_gone = "DEADLINE_EXCEEDED" not in str(error) or is_aborting()
                if is_gone or unanswered == SILENT:
                    self._report(f"{first} {'is gone' if is_gone else f'has not answered for {SILENT * ANSWER_S:g} s'}")
                    return
                continue
            self._news += 1
            self._handle_news(kind, text)

    def _handle_news(self, kind: str, text: str) -> None:
        if kind == "hang":
            self._ending.set()
            self.hang = text
        elif kind != "stop":
            self.refused = kind == "refused"
            if self.process_index == 0:
                time.sleep(2 * POLL_S)  # until the others have read it: the store ends with this process
            self._report(text)
        elif self._reason is None and not self._closed:
            with self._stepping:
                self._reason, on_stop = text, self._on_stop
            if on_stop is not None:
                on_stop(text)
            self._publish_step()

    def _watch_live(self) -> None:
        """Ask the service repeatedly which processes are alive. Report a lost process in the news, then return.

        At the end process 0 returns when it is alone: its own end would abort the others.

        `get_live_nodes` returns when every process that is alive has called it.
        """
        everyone = range(self.count)
        while not self._ending.wait(POLL_S):
            try:  # if process 0 is lost, the thread that reads the news reports it
                live = self._client.get_live_nodes(list(everyone))
                departed = self._read("left")
                dead = [i for i in everyone if i not in live and i not in departed]
                if dead and not self._ending.is_set():
                    names = f"{self.name(dead[0])} is" if len(dead) == 1 else f"{process_list(dead)} are"
                    states = progress.process_states(self.read_progress(), self.present(), dead)
                    status = progress.describe_states(states, self.name)
                    lost = f"{names} dead: it ended, or sent no heartbeat for {HEARTBEAT_S} s"
                    self._append("failed", "; ".join(filter(None, (lost, status))))  # in the news, so all name the same one
                    return
            except RuntimeError:
                continue
        with contextlib.suppress(RuntimeError):
            while self.process_index == 0 and len(self._client.get_live_nodes(list(everyone))) > 1:
                time.sleep(0.1)

    def _report(self, message: str) -> None:
        with self._reporting:
            if self._ending.is_set() or self._lost is not None:
                return
            self._lost = message
            on_lost = self._on_lost
        if on_lost is not None:
            on_lost(message)

    def listen(self, on_stop: Callable[[str], None]) -> None:
        """Call `on_stop(reason)` once, in another thread, when a process has asked to stop.

        If a process has asked already, call `on_stop` now, in this thread.
        """
        with self._stepping:
            self._on_stop, why = on_stop, self._reason
        if why is not None:
            on_stop(why)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost(message)` once, in another thread, when a process of this run is lost or has failed.

        If a process is lost already, call `on_lost` now, in this thread. A process without a heartbeat for HEARTBEAT_S seconds
        counts as lost, also if it is paused by SIGSTOP. If process 0 is lost, JAX ends this process 6 s later: `on_lost` must
        return before.
        """
        with self._reporting:
            self._on_lost, message = on_lost, self._lost
        if message is not None:
            on_lost(message)

    # The last step: after a request to stop, every process publishes the step it has reached, and all continue to the largest
    # of these. The thread that reads the news publishes, because the loop may be blocked in a step that another has not begun.

    def ask_to_stop(self, why: str) -> None:
        """Make all processes, this one included, stop after the same step. Only the first request counts."""
        if self.count > 1:
            with contextlib.suppress(PeerLost):  # reading the news reports it
                if not self._closed and self._reason is None:
                    self._append("stop", why)
            return
        with self._stepping:
            if self._reason is None:
                self._reason, self._last = why, self._reached

    def _publish_step(self) -> None:
        """Publish the last step that this process has started. It starts a later one only when all have published theirs."""
        with self._stepping:
            self._ceiling = self._reached if self._ceiling is None else self._ceiling
        with contextlib.suppress(PeerLost):  # reading the news reports it
            self._set(f"reached/{self.process_index}", str(self._ceiling))

    def may_start(self, step: int) -> bool:
        """Return whether the step with this number, counted from 1, may be dispatched. Call it before each step.

        If the result is False, no process dispatches `step` or a later step, and all processes dispatch the steps before
        `step`, except after `stop_here`.

        Raises:
          PeerLost: a process did not publish the step it has reached. The message names all such processes.
        """
        while True:
            with self._stepping:
                most = self._ceiling if self._last is None else self._last
                if most is None or step <= most:
                    self._reached = step
                    return True
                if self._last is not None:
                    return False
            self._last = max(map(int, self._gather_values("reached", "last step", AGREE_S)))

    def stop_here(self, why: str) -> None:
        """Make `may_start` return False from now on, even if the agreed last step is later.

        All processes must call it between the same two steps, for the same reason.
        """
        with self._stepping:
            self._reason = self._reason or why
            self._last = -1

    @property
    def stop_reason(self) -> str | None:
        """Return the reason of the request to stop; None until this process has read a request."""
        return self._reason

    def close(self, failed: str = "", refused: bool = False) -> None:
        """Disconnect from JAX's coordination service with the other processes, or report to them that this process has failed.

        Without `failed`, `close` waits until all processes have called `close` (EXIT_S at most). Process 0 disconnects last:
        the others would abort if process 0's store ended before they have disconnected. Only the first call has an effect.

        Args:
          failed: the reason why this process must end; "": it has not failed. After a failure, call `leave` next. If a
            collective failed, the likely cause is the end of another process: `close` first waits 30 s, so that `watch` can
            report that process.
          refused: the reason is a mistake of the user's, found before the first step: `refused` is then true on the others.
        """
        with self._closing:  # a second call waits for the first: its caller may end this process
            if not self._closed:
                self._close(failed, refused)

    def _close(self, failed: str, refused: bool) -> None:
        if failed and COLLECTIVE.search(failed) and self._on_lost is not None:
            # The service needs HEARTBEAT_S to notice a lost process, and the news of it a few POLL_S to arrive.
            time.sleep(2 * HEARTBEAT_S)
        self._closed = True
        if failed:
            self._ending.set()
            with contextlib.suppress(PeerLost):
                kind, verb = ("refused", "refuses to start") if refused else ("failed", "has failed")
                self._append(kind, f"{self.name(self.process_index)} {verb}: {failed}")
            if self.process_index == 0:
                time.sleep(2 * POLL_S)  # until the others have read it: the store ends with this process
            return
        self._publish_step()  # others may yet ask to stop
        self.meet("end", EXIT_S)
        self._ending.set()
        with contextlib.suppress(PeerLost):  # process 0 has left before: nothing is lost
            self._set(f"left/{self.process_index}", "")
            if self.process_index == 0:
                self._gather_values("left", "end", HEARTBEAT_S)
                if self._live.is_alive():
                    self._live.join(HEARTBEAT_S)
                time.sleep(LEAVE_S)  # the service has disconnected the others, and they may still have to stop polling it
                return
        import jax

        with contextlib.suppress(RuntimeError):
            jax.distributed.shutdown()


def leave(exit_code: int) -> NoReturn:
    """End this process immediately, in a run of several processes.

    Python's own exit would wait in JAX's shutdown, for minutes if another process waits for this one in a collective.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or the reader is gone
    os._exit(exit_code)
