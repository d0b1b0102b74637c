"""Rows of a token file, and the array logic that turns them into a batch: segments, positions, weights, mixtures."""

import math
from typing import Protocol

import numpy as np

from jaxtrain.data.checked import Column
from jaxtrain.data.tokenfile import TokenFile

BLOCKS = 1024  # of documents' offsets, read together
WEIGHT_BITS = 24  # mixture weights are rounded to multiples of 2^-24, so that counting is exact in integers


class Windows(Protocol):
    """Numbered rows of T + 1 tokens."""

    @property
    def name(self) -> str: ...

    @property
    def windows(self) -> int: ...

    def rows(self, index_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Tokens (R, T+1), (row, column) of each token in columns 1..T that starts a document, sorted, and loss flags.

        Loss flags: bool (R, T), whether the target in columns 1..T counts; None where all do.
        """
        ...


class FileWindows:
    """The windows of one token file. What `rows` gives has just been checked: TokenFileError where the file is damaged."""

    def __init__(self, file: TokenFile, seq_len: int):
        """Reads the documents' offsets once."""
        self.name = str(file.path)
        self.file = file
        self.seq_len = seq_len
        self.windows = count_windows(file.header["tokens"], seq_len)
        # Of each block of offsets, the number and the value of the first: which blocks a row needs, without a search on disk.
        self._nth = file.doc_offsets.block_borders()
        self._first = np.empty(len(self._nth) - 1, np.int64)
        for k in range(0, len(self._first), BLOCKS):
            nth = self._nth[k : k + BLOCKS + 1]
            self._first[k : k + BLOCKS] = file.doc_offsets[nth[0] : nth[-1]][nth[:-1] - nth[0]]

    def rows(self, index_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        self.file.blocks.file.look_at_times()
        T = self.seq_len
        begin_R = index_R * T
        # documents that start after the row's first token, up to and with the last target
        starts = self._starts(begin_R)
        low_R = np.searchsorted(starts, begin_R, "right")
        high_R = np.searchsorted(starts, begin_R + T, "right")
        count_R = high_R - low_R
        row = np.repeat(np.arange(len(index_R)), count_R)
        nth = np.arange(len(row)) + np.repeat(low_R - (np.cumsum(count_R) - count_R), count_R)
        tokens_RS = np.empty((len(index_R), T + 1), self.file.tokens.dtype)
        loss_RT = None if self.file.loss_bits is None else np.empty((len(index_R), T), bool)
        r = 0
        for first, count in _runs(index_R):
            begin, end = first * T, (first + count) * T
            read = self.file.tokens[begin : end + 1]
            tokens_RS[r : r + count, :-1] = read[:-1].reshape(count, T)
            tokens_RS[r : r + count, -1] = read[T::T]
            if loss_RT is not None:
                loss_RT[r : r + count] = self.file.loss_flags(begin + 1, end + 1).reshape(count, T)
            r += count
        return tokens_RS, row, starts[nth] - begin_R[row], loss_RT

    def _starts(self, begin_R: np.ndarray) -> np.ndarray:
        """Sorted starts of documents, of all blocks that hold one in a row which begins at `begin_R`.

        They may leave out blocks between two rows: within a row they are complete.
        """
        low_R = np.searchsorted(self._first, begin_R, "right") - 1
        high_R = np.searchsorted(self._first, begin_R + self.seq_len, "right")
        blocks = sorted({k for low, high in zip(low_R.tolist(), high_R.tolist(), strict=True) for k in range(low, high)})
        parts = [self.file.doc_offsets[self._nth[k] : self._nth[k + 1]] for k in blocks]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _runs(index_R: np.ndarray) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive indices."""
    first = np.flatnonzero(np.diff(index_R, prepend=-2) != 1)
    return list(zip(index_R[first].tolist(), np.diff(first, append=len(index_R)).tolist(), strict=True))


def count_windows(tokens: int, seq_len: int) -> int:
    """Whole windows of seq_len inputs, each of which needs the token after it as its last target."""
    return max(0, (tokens - 1) // seq_len)


def make_batch(
    tokens_RS: np.ndarray,
    row: np.ndarray,
    column: np.ndarray,
    loss_RT: np.ndarray | None,
    packing: str,
    max_segments: int,
) -> dict:
    """The arrays of shapes.BATCH_KEYS, each (R, T), from rows of T + 1 tokens.

    `row`, `column` (sorted): where a document starts in columns 1..T. Documents beyond `max_segments` in a row become its
    padding: segment 0, position 0, weight 0. `loss_RT`: whether each target counts; None where all do, and then work is
    per document, not per token: five `np.repeat`s and casts.
    """
    R, T = tokens_RS.shape[0], tokens_RS.shape[1] - 1
    weights_RT = np.ones((R, T), np.float32) if loss_RT is None else loss_RT.astype(np.float32)
    if packing == "none":
        segments_RT = np.ones((R, T), np.int32)
        positions_RT = np.tile(np.arange(T, dtype=np.int32), (R, 1))
    else:
        weights_RT[row, column - 1] = 0  # the target belongs to the next document
        inside = column < T
        row, column = row[inside], column[inside]
        # every segment's start in the flattened batch: row starts, and document starts
        start = np.concatenate([np.arange(R) * T, row * T + column])
        start.sort()
        length = np.diff(start, append=R * T)
        first = np.searchsorted(start, np.arange(R) * T)  # index of each row's first segment
        number = np.arange(len(start)) - np.repeat(first, np.diff(first, append=len(start))) + 1
        segments_RT = np.repeat(number.astype(np.int32), length).reshape(R, T)
        positions_RT = (np.arange(R * T, dtype=np.int32) - np.repeat(start.astype(np.int32), length)).reshape(R, T)
        for tail in start[number == max_segments + 1]:
            r, t = divmod(int(tail), T)
            segments_RT[r, t:] = 0
            positions_RT[r, t:] = 0
            weights_RT[r, t:] = 0
    return {
        "tokens": tokens_RS[:, :-1].astype(np.int32),
        "targets": tokens_RS[:, 1:].astype(np.int32),
        "segments": segments_RT,
        "positions": positions_RT,
        "weights": weights_RT,
    }


def masked_tokens(starts: np.ndarray | Column, windows: int, seq_len: int, max_segments: int, chunk: int = 1 << 22) -> int:
    """Tokens, of all windows, that lie beyond the `max_segments`-th document of their window.

    `starts`: sorted start of each document; what lies behind the last window does no harm. Reads them once, `chunk` at a time.
    """
    masked = 0
    kept = np.empty(0, np.int64)  # the last max_segments starts seen, which the next chunk compares with
    for first in range(0, len(starts), chunk):
        part = np.asarray(starts[first : first + chunk])
        part = part[(part % seq_len != 0) & (part < windows * seq_len)]  # a start at column 0 adds no segment
        joined = np.concatenate([kept, part])
        window = joined // seq_len
        M = max_segments
        nth = np.arange(max(len(kept), M - 1), len(joined))  # candidates: new, with M - 1 starts before them
        # start number M of its window begins segment M + 1
        is_tail = window[nth - (M - 1)] == window[nth]
        is_tail &= (nth < M) | (window[nth - M] != window[nth])
        masked += int((seq_len - joined[nth[is_tail]] % seq_len).sum())
        kept = joined[-M:]
    return masked


def interleave(index_R: np.ndarray, weights: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """(source, index within it) of each global index: sources take turns in proportion to their weights.

    Among the first g indices source k has g * weight_k of them, to within the number of sources, and the indices of each
    source are 0, 1, 2, ...: a pure function of the global index, in exact integers.
    """
    source_R = np.zeros(len(index_R), np.int64)
    within_R = np.asarray(index_R, np.int64).copy()
    rest = np.ones(len(index_R), bool)  # not yet given to an earlier source
    remaining = math.fsum(weights)
    for k, weight in enumerate(weights[:-1]):
        share = min(max(1, round(weight / remaining * 2**WEIGHT_BITS)), 2**WEIGHT_BITS - 1)
        remaining -= weight
        taken_R = (within_R * share) >> WEIGHT_BITS  # of the first `within` indices that reach here, how many k takes
        mine = rest & (((within_R + 1) * share) >> WEIGHT_BITS > taken_R)
        rest &= ~mine
        source_R[rest] = k + 1
        within_R = np.where(mine, taken_R, np.where(rest, within_R - taken_R, within_R))
    return source_R, within_R
