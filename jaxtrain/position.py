"""The data of a step: the next in order, after batches that a divergence skipped.

Positions are counted in tokens wherever they are stored, so that they survive a change of batch size or sequence length. What
was skipped stands in `skipped_data.json` beside the checkpoints: it belongs to the run and not to one of its steps, since a run
that goes back to an earlier step must pass it again.
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
    """The batches of steps after `step`, of which the first is batch `begin` of the source."""

    step: int  # optimizer steps done
    begin: int
    skipped: tuple[tuple[int, int], ...] = ()  # batches [first, last), ascending and apart

    def at(self, step: int) -> int:
        """The batch that comes after `step` optimizer steps (`step` or more of them)."""
        batch = self.begin + step - self.step
        for first, last in self.skipped:
            if last > self.begin and batch >= max(first, self.begin):
                batch += last - max(first, self.begin)
        return batch

    def read(self, step: int) -> int:
        """How many batches lie before the place that `step` optimizer steps have reached, those that were skipped included."""
        return self.at(step - 1) + 1 if step > self.step else self.begin


class Positioned:
    """A source whose batch i is the one that comes after i optimizer steps."""

    def __init__(self, source: Any, position: Position):
        self._source, self._position = source, position

    def batch(self, step: int, rows: Any = None) -> Any:
        """As the source's own `batch`."""
        at = self._position.at(step)
        return self._source.batch(at) if rows is None else self._source.batch(at, rows)


def position(
    directory: "epath.Path", step: int, tokens: int, per_step: int, skipped: list[dict[str, Any]] | None = None
) -> Position:
    """That of a run which has done `step` steps and read `tokens` tokens, skipped ones included, `per_step` in each batch.

    skipped: as `read` gives it, where it is known.

    Raises CheckpointError where the list of what was skipped cannot be read.
    """
    return Position(step, math.ceil(tokens / per_step), _batches(read(directory) if skipped is None else skipped, per_step))


def read(directory: "epath.Path") -> list[dict[str, Any]]:
    """What was skipped, oldest first: `tokens` [first, last), `steps`, `back_to`, `why`, `time_unix`. [] where nothing was."""
    path = directory / NAME
    try:
        return files.unsealed(Storage(directory).read(path))["skipped"]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except Unreachable:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). It names data that this run passes over. Restore it, or remove it to read all."
        ) from error


def skip(
    directory: "epath.Path", tokens: tuple[int, int], steps: Sequence[int], why: str, back_to: int
) -> list[dict[str, Any]]:
    """Add a range of data [first, last) to what this run passes over, from its next start or rollback on.

    steps: the first and the last that it was skipped for. back_to: the checkpoint from which the run goes on. Returns all.
    """
    new = {"tokens": list(tokens), "steps": list(steps), "back_to": back_to, "why": why, "time_unix": time.time()}
    known = [*read(directory), new]
    Storage(directory).write(directory / NAME, files.sealed({"format": 1, "skipped": known}))
    return known


def _batches(skipped: list[dict[str, Any]], per_step: int) -> tuple[tuple[int, int], ...]:
    """Ranges of tokens as ranges of whole batches, those that touch joined."""
    out: list[tuple[int, int]] = []
    for first, last in sorted((item["tokens"][0] // per_step, math.ceil(item["tokens"][1] / per_step)) for item in skipped):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return tuple(out)
