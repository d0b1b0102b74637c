"""Mixtures: the source of each row of a run, by the weights of the sources.

The weights are constant over a phase of a run. A phase begins with the run, or where it resumes with another data.source: each
source then continues from its last position.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.schema import Problem, split_paths

WEIGHT_BITS = 24  # mixture weights are rounded to multiples of 2^-24, so that counting is exact in integers


@dataclasses.dataclass(frozen=True)
class WeightedFile:
    """A token file that data.source or data.eval_source names, and its weight."""

    path: str
    weight: float | None  # None if none is given


def parse_files(source: str, key: str = "data.source") -> tuple[list[WeightedFile], list[Problem]]:
    """Parse `a.tok=0.7,b.tok=0.3`: return the files, and the problems found. A file that exists may have commas in its path.

    Either all files have a weight, or none has. Without weights, `normalize_weights` sets weights in proportion to the
    files' tokens.
    """
    files, problems = [], []
    items = split_paths(source, ",", lambda item: is_file(item) or is_file(item.rpartition("=")[0]))
    for item in items:
        if re.search(r"\.tok[=0-9.]*[\s;]", item) and not Path(item).expanduser().exists():
            fix = f"Write {','.join(re.split(r'[\s;]+', item))}."
            problems.append(Problem(key, item, "names several files, which a comma separates", fix))
            continue
        path, equals, text = item.rpartition("=")
        if not equals or item.endswith(".tok") or "/" in text or is_file(item):
            files.append(WeightedFile(item, None))
            continue
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not (0 < weight < math.inf):
            problems.append(Problem(key, item, "a weight is a number above 0", f"Write {path}=0.5, for example."))
        files.append(WeightedFile(path, weight))
    odd = [file.path for file in files if not file.path.endswith(".tok") and not is_file(file.path)]
    if odd and len(items) > 1:  # a path with a comma, and one mistake
        rule = f"no such file, and as a list, which commas separate, it names {odd[0]!r}"
        return [], [Problem(key, source, rule, "Correct the path, or list token files as a.tok=0.7,b.tok=0.3.")]
    if not files and not problems:
        problems.append(Problem(key, source, "names no data", "Set stdlib, synthetic, or token files."))
    if len({file.weight is None for file in files}) > 1:
        without = next(file.path for file in files if file.weight is None)
        rule = "has no weight, and other files have one"
        problems.append(Problem(key, without, rule, f"Write {without}=0.5, for example, or leave out all weights."))
    seen: set[Path] = set()
    for file in files:
        if (resolved := resolve_path(file.path)) in seen:
            problems.append(Problem(key, file.path, "is named twice", "Name it once, with the sum of its weights."))
        seen.add(resolved)
    return files, problems


def is_file(path: str) -> bool:
    """Return whether a path, which may begin with ~, names a file."""
    return os.path.isfile(os.path.expanduser(path.strip()))


def all_exist(source: str) -> bool:
    """Return whether a text as in `parse_files` is without a mistake, and names files that exist."""
    files, problems = parse_files(source)
    return not problems and all(is_file(file.path) for file in files)


def resolve_path(path: str) -> Path:
    """Return the absolute path of a file with symbolic links resolved, so that two paths of one file are equal."""
    return Path(path).expanduser().resolve()


def normalize_weights(files: Sequence[WeightedFile], tokens: Sequence[int]) -> list[float]:
    """Return the files' weights, scaled so that they sum to 1.

    Args:
      tokens: number of tokens of each file. Files without weights get weights in proportion to this number.
    """
    weights = [float(n) if file.weight is None else file.weight for file, n in zip(files, tokens, strict=True)]
    return [weight / math.fsum(weights) for weight in weights]


@dataclasses.dataclass(frozen=True)
class MixturePhase:
    """A range of a run with constant weights. A phase ends where the next phase begins.

    `tokens` and `read` count tokens (rows times data.seq_len), so they stay valid if data.seq_len or the batch size changes.
    """

    step: int  # optimizer steps before the phase
    tokens: int  # tokens that the run reads before the phase
    weights: tuple[float, ...]  # by the source's number; 0: the source is not read in this phase
    read: tuple[int, ...]  # tokens of each source that are read before the phase

    def row(self, seq_len: int) -> int:
        """Return the number of the phase's first row."""
        return -(-self.tokens // seq_len)

    def sources_of(self, row_R: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (number of the source, index within that source) of each row of this phase."""
        mixed = np.flatnonzero(self.weights)
        source_R, within_R = interleave(row_R - self.row(seq_len), [self.weights[k] for k in mixed])
        number_R = mixed[source_R]
        return number_R, within_R + -(-np.asarray(self.read, np.int64) // seq_len)[number_R]

    def read_before(self, row: int, seq_len: int) -> tuple[int, ...]:
        """Return the tokens of each source that are read before row `row` of this phase."""
        read, mixed = [-(-tokens // seq_len) for tokens in self.read], np.flatnonzero(self.weights)
        counts = count_rows(row - self.row(seq_len), [self.weights[k] for k in mixed])
        for k, rows in zip(mixed.tolist(), counts, strict=True):
            read[k] += rows
        return tuple(rows * seq_len for rows in read)


class Mixture:
    """The phases of a run: a phase begins where the run begins, or resumes with other weights or another batch size.

    Attributes:
      sources: `name`, `path` and `content_sha256` ("" for a source that is no file) of each source in any phase, by number.
      phases: all phases in order.
      changed: whether the run resumed with other weights.
    """

    def __init__(self, sources: Sequence[Mapping[str, str]], weights: Sequence[float], seq_len: int):
        """Args: sources: as the attribute, of the sources that the config names. weights: of these sources."""
        self._opened, self._weights, self.seq_len = [dict(source) for source in sources], weights, seq_len
        self.sources: list[dict[str, str]] = []
        self.phases: list[MixturePhase] = []
        self.changed = False

    def start(self, stored: Mapping[str, Any] | None, tokens: int, step: int, begin: int) -> list[int]:
        """Set the phases of a new run (step 0), or of a run that resumes after `step` steps.

        The phases before `step` are those of the checkpoint. If the batch size has changed, the rows that were read may end
        within a batch of the new size. Then a phase begins too: the run skips the remaining rows of this batch, but no source
        skips a row. A file is identified by the hash of its contents, any other source by its name.

        Args:
          stored: the result of `state` in the checkpoint; None for a new run.
          tokens: tokens that the run read before it resumes.
          begin: number of the first row of the first batch that begins at or after token `tokens`.

        Returns:
          The number in `self.sources` of each source that was passed to the constructor.
        """
        stored_state = stored or {"sources": [], "phases": []}
        self.sources = [{k: value for k, value in source.items() if k != "tokens"} for source in stored_state["sources"]]
        unmatched, numbers = list(range(len(self.sources))), []
        for source in self._opened:
            key = "content_sha256" if source["content_sha256"] else "name"
            number = next((k for k in unmatched if self.sources[k][key] == source[key]), len(self.sources))
            if number < len(self.sources):
                unmatched.remove(number)
            self.sources[number : number + 1] = [source]
            numbers.append(number)

        def pad(values: Sequence[Any]) -> tuple[Any, ...]:
            return (*values, *[0] * (len(self.sources) - len(values)))  # 0 for sources that were added later

        self.phases = [
            MixturePhase(phase["step"], phase["tokens"], pad(phase["weights"]), pad(phase["read"]))
            for phase in stored_state["phases"]
        ]
        by_number = dict(zip(numbers, self._weights, strict=True))
        weights = tuple(by_number.get(k, 0.0) for k in range(len(self.sources)))
        self.changed = bool(self.phases) and not np.allclose(self.phases[-1].weights, weights, rtol=1e-9, atol=0)
        if not self.phases or self.changed or begin * self.seq_len != tokens:
            read = pad([source["tokens"] for source in stored_state["sources"]])
            self.phases.append(MixturePhase(step, begin * self.seq_len, weights, read))
        return numbers

    def sources_of(self, row_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (number of the source, index within that source) of each row of the run, int64 (R,) each."""
        if len(self.phases) == 1 or not row_R.size:
            return self.phases[-1].sources_of(row_R, self.seq_len)
        phase_R = np.searchsorted([phase.row(self.seq_len) for phase in self.phases[1:]], row_R, "right")
        number_R, within_R = np.empty_like(row_R), np.empty_like(row_R)
        for k in np.unique(phase_R).tolist():
            in_phase = phase_R == k
            number_R[in_phase], within_R[in_phase] = self.phases[k].sources_of(row_R[in_phase], self.seq_len)
        return number_R, within_R

    def phase_of(self, row: int) -> MixturePhase:
        """Return the phase that row `row` belongs to."""
        return [phase for k, phase in enumerate(self.phases) if k == 0 or phase.row(self.seq_len) <= row][-1]

    def tokens_read(self, row: int) -> tuple[int, ...]:
        """Return the number of tokens of each source that are read before row `row`."""
        return self.phase_of(row - 1).read_before(row, self.seq_len)

    def row_of(self, source: int, within: int, first: int, last: int) -> int:
        """Return the row with index `within` of a source. first, last: rows first..last-1 are searched, and have it."""
        while last - first > 1:
            middle = (first + last) // 2
            tokens_before = self.phase_of(middle).read_before(middle, self.seq_len)[source]
            first, last = (middle, last) if tokens_before <= within * self.seq_len else (first, middle)
        return first

    def state(self, row: int) -> dict[str, Any]:
        """Return the mixture as JSON for a checkpoint at which the rows before `row` have been read.

        `sources`: the attribute, with `tokens` read of each source. `phases`: the fields of each `MixturePhase` with a row.
        """
        read = self.tokens_read(row)
        sources = [{**source, "tokens": tokens} for source, tokens in zip(self.sources, read, strict=True)]
        return {
            "sources": sources,
            "phases": [
                dataclasses.asdict(phase) for k, phase in enumerate(self.phases) if k == 0 or phase.row(self.seq_len) < row
            ],
        }


def interleave(index_R: np.ndarray, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return (source, index within that source) of each index: sources interleave in proportion to their weights.

    Among the first n indices, source k has n * weight_k / sum(weights) indices, with an error of at most the number of sources.
    The indices within each source are 0, 1, 2, ... The result is a pure function of the index, in exact integers.
    """
    source_R = np.zeros(len(index_R), np.int64)
    within_R = np.asarray(index_R, np.int64).copy()
    unassigned = np.ones(len(index_R), bool)  # not yet given to an earlier source
    for k, share in enumerate(_binary_shares(weights)):
        taken_R = (within_R * share) >> WEIGHT_BITS  # share of k in the first `within` remaining indices
        in_source = unassigned & (((within_R + 1) * share) >> WEIGHT_BITS > taken_R)
        unassigned &= ~in_source
        source_R[unassigned] = k + 1
        within_R = np.where(in_source, taken_R, np.where(unassigned, within_R - taken_R, within_R))
    return source_R, within_R


def count_rows(rows: int, weights: Sequence[float]) -> list[int]:
    """Return the number of indices that each source gets by `interleave` among the first `rows` indices."""
    counts = []
    for share in _binary_shares(weights):
        counts.append((rows * share) >> WEIGHT_BITS)
        rows -= counts[-1]
    return [*counts, rows]


def _binary_shares(weights: Sequence[float]) -> Iterator[int]:
    """Yield for each source but the last: its weight / (its weight + all later weights), in units of 2^-WEIGHT_BITS."""
    remaining = math.fsum(weights)
    for weight in weights[:-1]:
        yield min(max(1, round(weight / remaining * 2**WEIGHT_BITS)), 2**WEIGHT_BITS - 1)
        remaining -= weight
