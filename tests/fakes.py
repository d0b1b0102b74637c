"""Fakes for tests without real waits: a clock that moves only when code sleeps, and the store of jax's coordination service."""

import threading
from collections.abc import Callable, Iterator
from time import strftime


class Clock:
    """A fake of the module `time`. sleep() moves its clock at once."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def time(self) -> float:
        return self.now

    monotonic = perf_counter = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    strftime = staticmethod(strftime)


class Turns:
    """A fake of the threading.Event that a loop waits for. Each wait moves the clock and calls the next of `turns`.

    Once all `turns` are used up, `wait` returns True, as if the event were set.
    """

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
    """A fake of the coordination service's store; threads act as processes. A wait for a key in `never` fails at once."""

    def __init__(self, never: tuple[str, ...] = ()):
        self.values: dict[str, str] = {}
        self.never = never
        self.changed = threading.Condition()
        self.asked: list[str] = []  # keys that a process has waited for
        self.live: set[int] = set()
        self.barrier: threading.Barrier | None = None
        self.gone = False  # whether the service has ended

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
