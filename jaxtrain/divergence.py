"""Steps that are not taken (jaxtrain/train/guard.py): told and counted, until there are so many that the run has diverged.

Everything here goes by numbers that are the same on every process, so all of them decide alike.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxtrain.train import guard


class Diverged(RuntimeError):
    """So many steps in a row were not taken that the run is ended."""


@dataclasses.dataclass(frozen=True)
class Bad:
    """A step that was not taken."""

    step: int  # the number of the step: how many are done after it
    verdict: int  # guard.NOT_FINITE or guard.SPIKE
    loss: float
    grad_norm: float
    batch: int  # of the data source
    tokens: tuple[int, int]  # positions in the data [first, last)
    data: str  # the same in words

    @property
    def words(self) -> str:
        """What happened, in one line."""
        return (
            f"step {self.step}: loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}, {guard.NAMES[self.verdict]}: the "
            f"step is skipped. Data: {self.data}"
        )


class Bads:
    """The steps that were not taken, of this attempt. `in_a_row` and `skipped` begin with those of the attempts before."""

    def __init__(self, in_a_row: int, skipped: int, most: int):
        self.in_a_row, self.skipped = in_a_row, skipped
        self._most = most
        self.row: list[Bad] = []  # of the row that has not ended, as far as this attempt saw it

    def took(self) -> None:
        """A step was taken: the row has ended."""
        self.in_a_row = 0
        self.row.clear()

    def add(self, bad: Bad) -> bool:
        """One more. Whether that is a divergence."""
        self.in_a_row += 1
        self.skipped += 1
        self.row.append(bad)
        return self.in_a_row >= self._most


def described(source: Any, batch: int) -> str:
    """Which data a batch is made of, in words; its number alone for a source of one's own."""
    windows = getattr(source, "windows", None)
    if windows is None:
        return f"batch {batch}"
    parts = [f"windows {shown(numbers)} of {name}" for name, numbers in windows(batch).items()]
    return f"batch {batch} ({'; '.join(parts)})"


def shown(numbers: Sequence[int], most: int = 8) -> str:
    """'3, 17, 5 and 29 more'."""
    head = ", ".join(map(str, numbers[:most]))
    return head if len(numbers) <= most else f"{head} and {len(numbers) - most} more"


def finite(value: float) -> float | str:
    """As JSON can hold it."""
    return value if math.isfinite(value) else repr(value)
