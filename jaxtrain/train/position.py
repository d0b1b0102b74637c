"""The data of a step: the next batch in order, without batches that were skipped after a divergence.

Stored positions are counted in tokens, so they survive a change of batch size or sequence length. `skipped_data.json` next to
the checkpoints lists the skipped data. It belongs to the run and not to a checkpoint, because a run that rolls back must skip
the data again.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint import CheckpointError, Unreachable, files
from jaxtrain.checkpoint.storage import Storage

if TYPE_CHECKING:
    from etils import epath

NAME = "skipped_data.json"


@dataclasses.dataclass(frozen=True)
class Position:
    """The batches of the steps after `step`: the source's batches from number `begin` on, without the skipped batches."""

    step: int  # optimizer steps done
    begin: int
    skipped: tuple[tuple[int, int], ...] = ()  # batches [first, last), ascending and not adjacent

    def at(self, step: int) -> int:
        """Return the number of the source's batch for optimizer step `step` + 1. `step`: at least self.step."""
        batch = self.begin + step - self.step
        for first, last in self.skipped:
            if last > self.begin and batch >= max(first, self.begin):
                batch += last - max(first, self.begin)
        return batch

    def read(self, step: int) -> int:
        """Return how many batches of the source were read or skipped when `step` optimizer steps are done."""
        return self.at(step - 1) + 1 if step > self.step else self.begin


class Positioned:
    """A data source by optimizer steps: its batch i is the batch of optimizer step i + 1."""

    def __init__(self, source: Any, position: Position):
        self._source, self._position = source, position

    def batch(self, step: int, rows: Any = None) -> Any:
        """Return the batch of optimizer step `step` + 1. rows: as for the source's own `batch`."""
        at = self._position.at(step)
        return self._source.batch(at) if rows is None else self._source.batch(at, rows)


def position(
    directory: "epath.Path", step: int, tokens: int, per_step: int, skipped: list[dict[str, Any]] | None = None
) -> Position:
    """Return the position of a run in its data.

    step: optimizer steps done. tokens: tokens of all batches so far, skipped batches included. per_step: tokens of a batch.
    skipped: the result of `read`; None: this function calls `read`.

    Raises CheckpointError if the list of skipped data cannot be read.
    """
    return Position(step, math.ceil(tokens / per_step), _batches(read(directory) if skipped is None else skipped, per_step))


def read(directory: "epath.Path") -> list[dict[str, Any]]:
    """Return the skipped data, oldest first: `tokens` [first, last), `steps`, `back_to`, `why`, `time_unix`; or []."""
    path = directory / NAME
    try:
        return files.unseal(Storage(directory).read(path))["skipped"]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except Unreachable:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). It lists the data that this run skips. Restore it, or remove it to read all."
        ) from error


def skip(
    directory: "epath.Path", tokens: tuple[int, int], steps: Sequence[int], why: str, back_to: int
) -> list[dict[str, Any]]:
    """Add a range of tokens [first, last) that this run skips, from its next start or rollback on. Return all ranges.

    steps: the first and the last skipped step. back_to: the checkpoint from which the run continues.
    """
    new = {"tokens": list(tokens), "steps": list(steps), "back_to": back_to, "why": why, "time_unix": time.time()}
    known = [*read(directory), new]
    Storage(directory).write(directory / NAME, files.sealed({"format": 1, "skipped": known}))
    return known


def _batches(skipped: list[dict[str, Any]], per_step: int) -> tuple[tuple[int, int], ...]:
    """Return the skipped ranges of tokens as ranges of whole batches. Adjacent and overlapping ranges are joined."""
    out: list[tuple[int, int]] = []
    for first, last in sorted((item["tokens"][0] // per_step, math.ceil(item["tokens"][1] / per_step)) for item in skipped):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return tuple(out)
