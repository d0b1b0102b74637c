"""The data of a step: the next batches in order, without batches that were skipped after a divergence.

Stored positions are counted in tokens, so they survive a change of batch size or sequence length. `skipped_data.json` next to
the checkpoints lists the skipped data. It belongs to the run and not to a checkpoint, because a run that rolls back must skip
the data again.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.checkpoint import CheckpointError, Unreachable, files
from jaxtrain.checkpoint.storage import Storage
from jaxtrain.config.ramp import Ramp, parse_ramp
from jaxtrain.config.schema import Data, Train

if TYPE_CHECKING:
    from etils import epath

NAME = "skipped_data.json"


@dataclasses.dataclass(frozen=True)
class Position:
    """The batches of the steps after `step`: the source's batches from number `begin` on, without the skipped batches.

    A batch of the source has `ramp.unit` sequences, and a step as many batches in order as its size needs.
    """

    step: int  # optimizer steps done
    begin: int
    skipped: tuple[tuple[int, int], ...] = ()  # batches [first, last), ascending and not adjacent
    ramp: Ramp = Ramp(1)

    def _number(self, index: int) -> int:
        """Return the number of the source's batch that is read after `index` others."""
        batch = self.begin + index
        for first, last in self.skipped:
            if last > self.begin and batch >= max(first, self.begin):
                batch += last - max(first, self.begin)
        return batch

    def _count(self, step: int) -> int:
        """Return how many of the source's batches the steps from self.step to `step` read."""
        return (self.ramp.before(step) - self.ramp.before(self.step)) // self.ramp.unit

    def at(self, step: int) -> int:
        """Return the number of the source's first batch for optimizer step `step` + 1. `step`: at least self.step."""
        return self._number(self._count(step))

    def batches(self, step: int) -> list[int]:
        """Return the numbers of the source's batches for optimizer step `step` + 1. `step`: at least self.step."""
        return [self._number(index) for index in range(self._count(step), self._count(step + 1))]

    def read(self, step: int) -> int:
        """Return how many batches of the source were read or skipped when `step` optimizer steps are done."""
        return self._number(self._count(step) - 1) + 1 if step > self.step else self.begin


class Positioned:
    """A data source by optimizer steps: its batch i is the batch of optimizer step i + 1."""

    def __init__(self, source: Any, position: Position):
        self._source, self._position = source, position

    def batch(self, step: int, rows: Sequence[int] | None = None) -> Any:
        """Return the batch of optimizer step `step` + 1, of one or several of the source's batches.

        rows: numbers of rows of the whole batch, ascending; only these rows are returned. None: all rows.
        """
        batches = self._position.batches(step)
        if rows is None:
            chunks = [self._source.batch(batch) for batch in batches]
        else:
            row_R, unit = np.asarray(rows), self._position.ramp.unit
            within = {batch: row_R[row_R // unit == k] - k * unit for k, batch in enumerate(batches)}
            chunks = [self._source.batch(batch, chunk_rows) for batch, chunk_rows in within.items() if len(chunk_rows)]
        return chunks[0] if len(chunks) == 1 else {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}


def find_position(
    directory: "epath.Path", step: int, tokens: int, ramp: Ramp, seq_len: int, skipped: list[dict[str, Any]] | None = None
) -> Position:
    """Return the position of a run in its data.

    step: optimizer steps done. tokens: tokens of all batches so far, skipped batches included. ramp: of the run's batch.
    skipped: the result of `read_skipped`; None: this function calls it.

    Raises CheckpointError if the list of skipped data cannot be read.
    """
    per_batch = ramp.unit * seq_len
    entries = read_skipped(directory) if skipped is None else skipped
    return Position(step, math.ceil(tokens / per_batch), _batches(entries, per_batch), ramp)


# ---- The positions of a whole run, in the entry `data` of a checkpoint's meta.json


def position_entry(position: Position, train: Train, data: Data) -> dict[str, Any]:
    """Return the facts from which the rows of the steps after `position.step` follow, for JSON.

    data: the section with which the source was opened.
    """
    return {
        "step": position.step,
        "begin": position.begin,
        "skipped": [list(batches) for batches in position.skipped],
        "unit": position.ramp.unit,
        "ramp": train.batch_ramp,
        "global_batch": train.global_batch,
        "seq_len": data.seq_len,
        "seed": data.seed,
        "packing": data.packing,
        "max_segments": data.most_documents,
    }


def position_of(entry: Mapping[str, Any]) -> Position:
    """Return the position of the steps after entry["step"], up to that of the next entry. entry: from `position_entry`."""
    ramp = parse_ramp(entry["ramp"], entry["global_batch"])[0]
    return Position(entry["step"], entry["begin"], tuple((first, last) for first, last in entry["skipped"]), ramp)


def extend_entries(entries: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of a checkpoint, and after them that of the attempt that resumes from it.

    The new entry is left out if it is the exact continuation of the last one: the same steps would read the same rows.
    """
    return [*entries] if entries and _continues(entries[-1], new) else [*entries, new]


def _continues(last: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    position_keys = ("step", "begin", "skipped")
    if any(last[name] != new[name] for name in last if name not in position_keys):
        return False
    begin = position_of(last).read(new["step"])

    def ahead(skipped: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        return [(max(first, begin), end) for first, end in skipped if end > begin]

    return begin == new["begin"] and ahead(last["skipped"]) == ahead(new["skipped"])


def read_skipped(directory: "epath.Path") -> list[dict[str, Any]]:
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


def add_skipped(
    directory: "epath.Path", tokens: tuple[int, int], steps: Sequence[int], why: str, back_to: int
) -> list[dict[str, Any]]:
    """Add a range of tokens [first, last) that this run skips, from its next start or rollback on. Return all ranges.

    steps: the first and the last skipped step. back_to: the checkpoint from which the run continues.
    """
    new = {"tokens": list(tokens), "steps": list(steps), "back_to": back_to, "why": why, "time_unix": time.time()}
    entries = [*read_skipped(directory), new]
    Storage(directory).write(directory / NAME, files.to_sealed_json({"format": 1, "skipped": entries}))
    return entries


def _batches(skipped: list[dict[str, Any]], per_batch: int) -> tuple[tuple[int, int], ...]:
    """Return the skipped ranges of tokens as ranges of whole batches. Adjacent and overlapping ranges are joined."""
    out: list[tuple[int, int]] = []
    for first, last in sorted((item["tokens"][0] // per_batch, math.ceil(item["tokens"][1] / per_batch)) for item in skipped):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return tuple(out)
