"""Rows of a token file, and the array logic that turns them into a batch: segments, positions, weights, mixtures."""

import math
from typing import Protocol

import numpy as np

from jaxtrain.data.tokenfile import TokenFile

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
    """The windows of one token file."""

    def __init__(self, file: TokenFile, seq_len: int):
        self.name = str(file.path)
        self.file = file
        self.seq_len = seq_len
        self.windows = count_windows(file.header["tokens"], seq_len)
        tokens = np.asarray(file.tokens)
        # a view in which consecutive windows overlap by one token: a whole batch is one gather
        self._view = np.lib.stride_tricks.as_strided(
            tokens, (self.windows, seq_len + 1), (seq_len * tokens.itemsize, tokens.itemsize), writeable=False
        )
        self._starts = np.asarray(file.doc_offsets)
        self._bits = None if file.loss_bits is None else np.asarray(file.loss_bits)

    def rows(self, index_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        begin_R = index_R * self.seq_len
        # documents that start after the row's first token, up to and with the last target
        low_R = np.searchsorted(self._starts, begin_R, "right")
        high_R = np.searchsorted(self._starts, begin_R + self.seq_len, "right")
        count_R = high_R - low_R
        row = np.repeat(np.arange(len(index_R)), count_R)
        nth = np.arange(len(row)) + np.repeat(low_R - (np.cumsum(count_R) - count_R), count_R)
        return self._view[index_R], row, self._starts[nth] - begin_R[row], self._loss(begin_R)

    def _loss(self, begin_R: np.ndarray) -> np.ndarray | None:
        """The flags of the targets of rows that begin at tokens `begin_R`."""
        if self._bits is None:
            return None
        byte_R, bit_R = np.divmod(begin_R + 1, 8)
        # one byte more than the targets fill: a row may begin in the midst of one
        index_RN = np.minimum(byte_R[:, None] + np.arange(self.seq_len // 8 + 2), len(self._bits) - 1)
        flags_RN = np.unpackbits(self._bits[index_RN], axis=1, bitorder="little").view(bool)
        if not bit_R.any():
            return flags_RN[:, : self.seq_len]
        return np.take_along_axis(flags_RN, bit_R[:, None] + np.arange(self.seq_len), axis=1)


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


def masked_tokens(starts: np.ndarray, windows: int, seq_len: int, max_segments: int, chunk: int = 1 << 22) -> int:
    """Tokens, of all windows, that lie beyond the `max_segments`-th document of their window.

    `starts`: sorted start of each document. Reads them once, `chunk` at a time.
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
