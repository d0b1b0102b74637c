"""The end of a preflight that something holds up all the same: by then somebody waits for its verdict."""

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
LATE_S = 10.0  # beyond the limit that is given: everything here has a limit of its own, and this is for what was overlooked


@contextlib.contextmanager
def guarded(limit_s: float, leave: Callable[[], object]) -> Iterator[None]:
    """A block that ends within limit_s and LATE_S: else says on stderr what it is doing, and calls `leave`."""
    waited_for = threading.get_ident()

    def over() -> None:
        print(f"FAULT: preflight was not over after {limit_s + LATE_S:.0f} s; it was in {doing(waited_for)}", file=sys.stderr)
        leave()

    timer = threading.Timer(limit_s + LATE_S, over)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def doing(thread: int) -> str:
    """The innermost function of jaxtrain that a thread is in."""
    frame = sys._current_frames().get(thread)
    ours = [each for each in traceback.extract_stack(frame) if Path(each.filename).is_relative_to(PACKAGE)]
    return f"{ours[-1].name} ({Path(ours[-1].filename).name}, line {ours[-1].lineno})" if ours else "no code of jaxtrain"
