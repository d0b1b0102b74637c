"""Rows of a token file, and the array logic that turns them into a batch: segments, positions, weights, mixtures.

A file without loss bits is one long text, cut into windows (`FileWindows`). A file with loss bits holds conversations, whose
answers mean nothing without what stands before them: its rows are filled with whole ones (`ConversationRows`).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from jaxtrain.data.checked import Column
from jaxtrain.data.synthetic import mix
from jaxtrain.data.tokenfile import TokenFile

BLOCKS = 1024  # of documents' offsets, read together
CONVERSATIONS = 1024  # of a shuffled file, packed together
TOGETHER = 256  # blocks of conversations that are packed at the same time: an array of 1 MB
WEIGHT_BITS = 24  # mixture weights are rounded to multiples of 2^-24, so that counting is exact in integers


# Tokens (R, T+1); (row, column) of each token in columns 1..T that starts a document, sorted; loss flags, bool (R, T): whether
# the target in columns 1..T counts, None where all do; how many columns of each row hold documents and no padding, int64 (R,),
# None where all T + 1 do.
Read = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


class Windows(Protocol):
    """Numbered rows of T + 1 tokens."""

    @property
    def name(self) -> str: ...

    @property
    def windows(self) -> int: ...

    def rows(self, index_R: np.ndarray) -> Read:
        """The rows with these numbers."""
        ...


class FileWindows:
    """The windows of a token file without loss bits. What `rows` gives has just been checked: TokenFileError where the file is
    damaged."""

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

    def rows(self, index_R: np.ndarray) -> Read:
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
        r = 0
        for first, count in _runs(index_R):
            begin, end = first * T, (first + count) * T
            read = self.file.tokens[begin : end + 1]
            tokens_RS[r : r + count, :-1] = read[:-1].reshape(count, T)
            tokens_RS[r : r + count, -1] = read[T::T]
            r += count
        return tokens_RS, row, starts[nth] - begin_R[row], None, None

    def _starts(self, begin_R: np.ndarray) -> np.ndarray:
        """Sorted starts of documents, of all blocks that hold one in a row which begins at `begin_R`.

        They may leave out blocks between two rows: within a row they are complete.
        """
        low_R = np.searchsorted(self._first, begin_R, "right") - 1
        high_R = np.searchsorted(self._first, begin_R + self.seq_len, "right")
        blocks = sorted({k for low, high in zip(low_R.tolist(), high_R.tolist(), strict=True) for k in range(low, high)})
        parts = [self.file.doc_offsets[self._nth[k] : self._nth[k + 1]] for k in blocks]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


class ConversationRows:
    """Rows of whole conversations, of a token file with loss bits. What `rows` gives has just been checked: TokenFileError
    where the file is damaged.

    The conversations are shuffled by `seed`, and each block of CONVERSATIONS of them is packed into rows of T + 1 tokens. So
    rows are a function of file, length and seed; each conversation is in one of them, and every epoch is an order of the same
    rows. A conversation of more than T + 1 tokens loses its end: `truncated` (conversations), `truncated_tokens`.
    """

    def __init__(self, file: TokenFile, seq_len: int, max_segments: int | None, seed: int):
        """Reads the documents' offsets once, and keeps 12 bytes of each. max_segments: conversations in a row, None: any."""
        self.name = str(file.path)
        self.file = file
        self.seq_len = seq_len
        offset = np.asarray(file.doc_offsets)
        length = np.diff(offset)
        key = mix(np.asarray([seed], np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
        shuffled = np.argsort(mix(key + np.arange(len(length), dtype=np.uint64)), kind="stable")
        kept = np.minimum(length, seq_len + 1).astype(np.int32)
        self.truncated = int(np.count_nonzero(length > kept))
        self.truncated_tokens = int((length - kept).sum())
        row = pack(kept[shuffled], seq_len + 1, max_segments)
        by_row = shuffled[np.argsort(row, kind="stable")]
        self._begin, self._length = offset[by_row], kept[by_row]
        count = np.bincount(row)
        self.documents = int(count.max(initial=1))  # conversations in the row that has most
        self._first = np.concatenate([[0], np.cumsum(count)])  # of each row, among these
        self.windows = len(self._first) - 1
        self.capped = self.documents == max_segments
        self.filled = float(kept.sum()) / max(1, self.windows * (seq_len + 1))  # part of the rows that is no padding

    def rows(self, index_R: np.ndarray) -> Read:
        self.file.blocks.file.look_at_times()
        S = self.seq_len + 1
        tokens_RS = np.full((len(index_R), S), self.file.header["tokenizer"]["eot"], self.file.tokens.dtype)
        loss_RS = np.zeros((len(index_R), S), bool)
        filled_R = np.zeros(len(index_R), np.int64)
        starts = []
        for r, i in enumerate(index_R.tolist()):
            part = slice(self._first[i], self._first[i + 1])
            for first, count in zip(self._begin[part].tolist(), self._length[part].tolist(), strict=True):
                at = filled_R[r]
                tokens_RS[r, at : at + count] = self.file.tokens[first : first + count]
                loss_RS[r, at : at + count] = self.file.loss_flags(first, first + count)
                if at:
                    starts.append((r, at))
                filled_R[r] += count
        row, column = np.asarray(starts, np.int64).reshape(-1, 2).T
        return tokens_RS, row, column, loss_RS[:, 1:], filled_R


def open_windows(file: TokenFile, seq_len: int, max_segments: int | None, seed: int) -> FileWindows | ConversationRows:
    """The rows of a token file: of whole conversations where it has loss bits, else windows of its text."""
    if file.loss_bits is None:
        return FileWindows(file, seq_len)
    return ConversationRows(file, seq_len, max_segments, seed)


def pack(length_N: np.ndarray, size: int, most: int | None = None) -> np.ndarray:
    """The row of each item, int64 (N,): the first of its block's rows, of `size` tokens, with space for it (first fit).

    length_N: 1 to `size` tokens each. most: items in a row, None: any number. A block is CONVERSATIONS items in a row. Blocks
    take their n-th item together, TOGETHER of them, so that Python counts the items of one block and not all of them.
    """
    row_N = np.empty(len(length_N), np.int64)
    rows = 0
    for first in range(0, len(length_N), CONVERSATIONS * TOGETHER):
        part = length_N[first : first + CONVERSATIONS * TOGETHER]
        blocks = -(-len(part) // CONVERSATIONS)
        length_BC = np.zeros((blocks, CONVERSATIONS), np.int32)
        length_BC.ravel()[: len(part)] = part
        block_B = np.arange(blocks)
        free_BR = np.full((blocks, CONVERSATIONS), size, np.int32)
        items_BR = np.zeros((blocks, CONVERSATIONS), np.int32)
        used_B = np.zeros(blocks, np.int64)
        row_BC = np.empty((blocks, CONVERSATIONS), np.int64)
        for c in range(min(len(part), CONVERSATIONS)):
            length_B = length_BC[:, c]  # 0 behind the end of the last block, which changes nothing
            row_B = np.argmax(free_BR[:, : used_B.max() + 1] >= length_B[:, None], axis=1)
            row_BC[:, c] = row_B
            free_BR[block_B, row_B] -= length_B
            used_B = np.maximum(used_B, row_B + (length_B > 0))
            if most is not None:
                items_BR[block_B, row_B] += length_B > 0
                full = items_BR[block_B, row_B] == most
                free_BR[block_B[full], row_B[full]] = -1
        row_BC += (rows + np.cumsum(used_B) - used_B)[:, None]
        row_N[first : first + len(part)] = row_BC.ravel()[: len(part)]
        rows += int(used_B.sum())
    return row_N


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
    filled_R: np.ndarray | None,
    packing: str,
    max_segments: int,
) -> dict:
    """The arrays of shapes.BATCH_KEYS, each (R, T), from rows of T + 1 tokens as `Read` says what they hold.

    Documents beyond `max_segments` in a row become its padding, like the columns from `filled_R` on: segment 0, position 0,
    weight 0. Where all targets count, work is per document, not per token: five `np.repeat`s and casts.
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
    if filled_R is not None:
        padding_RT = np.arange(T) >= filled_R[:, None]
        segments_RT[padding_RT] = 0
        positions_RT[padding_RT] = 0
        weights_RT[np.arange(1, T + 1) >= filled_R[:, None]] = 0  # the target is padding
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


def most_documents(starts: np.ndarray | Column, windows: int, seq_len: int, chunk: int = 1 << 22) -> int:
    """Documents, or parts of them, in the window that has most; at least 1. Reads `starts` as `masked_tokens` does."""
    most, last, kept = 1, -1, 0  # `kept` starts of window `last` are behind us
    for first in range(0, len(starts), chunk):
        part = np.asarray(starts[first : first + chunk])
        part = part[(part % seq_len != 0) & (part < windows * seq_len)]  # a start at column 0 adds no segment
        if not len(part):
            continue
        window_W, count_W = np.unique(part // seq_len, return_counts=True)
        count_W[0] += kept if window_W[0] == last else 0
        last, kept = int(window_W[-1]), int(count_W[-1])
        most = max(most, int(count_W.max()) + 1)
    return most


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of a run from global index `row` on, as long as its mixture stays. By a source's number:"""

    row: int
    weights: tuple[float, ...]  # 0 where the source is not in the mixture
    read: tuple[int, ...]  # its rows that were read before this part

    def places(self, index_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the source, index within it) of each global index of this part."""
        met = np.flatnonzero(self.weights)
        source_R, within_R = interleave(index_R - self.row, [self.weights[k] for k in met])
        number_R = met[source_R]
        return number_R, within_R + np.asarray(self.read, np.int64)[number_R]

    def read_before(self, row: int) -> list[int]:
        """Rows of each source that were read before global index `row` of this part."""
        read, met = list(self.read), np.flatnonzero(self.weights)
        for k, rows in zip(met.tolist(), taken(row - self.row, [self.weights[k] for k in met]), strict=True):
            read[k] += rows
        return read


def taken(rows: int, weights: Sequence[float]) -> list[int]:
    """How many of the first `rows` global indices `interleave` gives to each source."""
    counts = []
    for share in _shares(weights):
        counts.append((rows * share) >> WEIGHT_BITS)
        rows -= counts[-1]
    return [*counts, rows]


def _shares(weights: Sequence[float]) -> Iterator[int]:
    """Yield the share of each source but the last, among it and those after it, in units of 2^-WEIGHT_BITS."""
    remaining = math.fsum(weights)
    for weight in weights[:-1]:
        yield min(max(1, round(weight / remaining * 2**WEIGHT_BITS)), 2**WEIGHT_BITS - 1)
        remaining -= weight


def interleave(index_R: np.ndarray, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """(source, index within it) of each global index: sources take turns in proportion to their weights.

    Among the first g indices source k has g * weight_k of them, to within the number of sources, and the indices of each
    source are 0, 1, 2, ...: a pure function of the global index, in exact integers.
    """
    source_R = np.zeros(len(index_R), np.int64)
    within_R = np.asarray(index_R, np.int64).copy()
    rest = np.ones(len(index_R), bool)  # not yet given to an earlier source
    for k, share in enumerate(_shares(weights)):
        taken_R = (within_R * share) >> WEIGHT_BITS  # of the first `within` indices that reach here, how many k takes
        mine = rest & (((within_R + 1) * share) >> WEIGHT_BITS > taken_R)
        rest &= ~mine
        source_R[rest] = k + 1
        within_R = np.where(mine, taken_R, np.where(rest, within_R - taken_R, within_R))
    return source_R, within_R
