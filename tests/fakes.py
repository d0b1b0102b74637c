"""A clock that moves only when something waits, and the store of jax's coordination service, for tests without waits."""

import threading
from collections.abc import Callable, Iterator
from time import strftime


class Clock:
    """Stands in for the module `time`."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def time(self) -> float:
        return self.now

    monotonic = perf_counter = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    strftime = staticmethod(strftime)


class Turns:
    """Stands in for an event that a loop waits for: each wait takes its time and a turn; after the last, the event has come."""

    def __init__(self, clock: Clock, *turns: Callable[[], object]):
        self.clock, self.turns = clock, iter(turns)
        self.taken = 0

    def wait(self, seconds: float) -> bool:
        self.clock.sleep(seconds)
        turn = next(self.turns, None)
        if turn is not None:
            self.taken += 1
            turn()
        return turn is None

    def is_set(self) -> bool:
        return False

    def set(self) -> None:
        self.turns: Iterator[Callable[[], object]] = iter(())


class Store:
    """The coordination service's store, for processes that are threads. Nobody waits for a key that `never` comes."""

    def __init__(self, never: tuple[str, ...] = ()):
        self.values: dict[str, str] = {}
        self.never = never
        self.changed = threading.Condition()
        self.asked: list[str] = []  # the keys that were waited for
        self.live: set[int] = set()
        self.barrier: threading.Barrier | None = None
        self.gone = False  # the service has ended

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if self.gone:
                raise RuntimeError("UNAVAILABLE")
            if key in self.values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            self.asked.append(key)
            if self.gone:
                raise RuntimeError("UNAVAILABLE")
            if key in self.never or not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_try_get(self, key: str) -> str:
        with self.changed:
            if key not in self.values:
                raise RuntimeError("NOT_FOUND")
            return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self.changed:
            return [(k, v) for k, v in self.values.items() if k.startswith(key.rstrip("/") + "/")]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            self.values.pop(key, None)

    def get_live_nodes(self, nodes: list[int]) -> dict[int, int]:
        return dict.fromkeys(set(nodes) & self.live, 0)

    def wait_at_barrier(self, name: str, timeout_in_ms: int) -> None:
        assert self.barrier is not None
        self.barrier.wait(timeout_in_ms / 1000)
