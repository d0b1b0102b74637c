"""Skipped steps (jaxtrain/step/guard.py): their reports, their counts, and the decision that a run has diverged.

All processes have the same losses, gradient norms and counts, so all make the same decision.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxtrain.step import guard


class Diverged(RuntimeError):
    """The run is ended because too many steps in a row were skipped."""


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    """A step that the guard skipped, with its figures and data."""

    step: int  # number of the step, from 1
    verdict: int  # guard.NOT_FINITE or guard.SPIKE
    loss: float
    grad_norm: float
    batches: tuple[int, ...]  # of the data source
    tokens: tuple[int, int]  # positions in the data [first, last)
    seen: str = ""  # the command that lists the documents of the step; "" if the data has none

    @property
    def data(self) -> str:
        """Return the batches of the data source in words."""
        return describe_batches(self.batches)

    @property
    def words(self) -> str:
        """Return one line: the step, its loss and gradient norm, the reason why it is skipped, and its data."""
        documents = f". Its documents: {self.seen}" if self.seen else ""
        return (
            f"step {self.step}: loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}, {guard.NAMES[self.verdict]}: the "
            f"step is skipped. Data: {self.data}{documents}"
        )


class SkipCounter:
    """Counts of skipped steps. `in_a_row` and `skipped` include earlier attempts; `row` has this attempt's present series."""

    def __init__(self, in_a_row: int, skipped: int, most: int):
        self.in_a_row, self.skipped = in_a_row, skipped
        self._most = most
        self.row: list[SkippedStep] = []  # of the current row, as far as this attempt has seen it

    def note_applied(self) -> None:
        """Note a step that was applied, which ends a series of skipped steps."""
        self.in_a_row = 0
        self.row.clear()

    def add(self, skip: SkippedStep) -> bool:
        """Add a skipped step. Return whether the run has diverged, that is, `most` steps in a row or more were skipped."""
        self.in_a_row += 1
        self.skipped += 1
        self.row.append(skip)
        return self.in_a_row >= self._most


def explain_divergence(reason: str, newest: int, applied: int, weights: bool, rollback: bool) -> str:
    """Return the message of a run that has diverged, with what to do.

    Args:
      reason: what has happened, in words.
      newest: the newest complete checkpoint; -1 for none.
      applied: number of steps that were applied since the start of the run.
      weights: whether weights are infinite or NaN.
      rollback: whether train.on_divergence=rollback.
    """
    if not applied:  # no update has changed the weights
        cause = (
            "their initial values: model.init_std, the family, init.from"
            if weights
            else "the data, the model's settings, the loss"
        )
        fix = f"No step was applied so far, so optimizer.lr is not the cause: look at {cause}"
    else:
        fix = "Lower optimizer.lr, or look at the losses before in metrics.jsonl, and at an optimizer or loss of your own"
        fix = fix if weights else "Lower optimizer.lr"
        fix += ", or look at the data of these steps" if not weights else ""
        fix += "" if weights or rollback else ", or set train.on_divergence=rollback to skip it"
    at = f"the newest checkpoint, step {newest}" if newest >= 0 else "step 0, since there is no checkpoint"
    return f"{reason}. Nothing is saved from here. {fix}. The same command goes on from {at}."


def describe_batches(batches: Sequence[int]) -> str:
    """Return the numbers of a step's batches in words."""
    first, last = batches[0], batches[-1]
    return f"batch {first}" if first == last else f"batches {first} to {last}"


def finite_or_text(value: float) -> float | str:
    """Return the value, as text if it is not finite: JSON has no number for it."""
    return value if math.isfinite(value) else repr(value)
