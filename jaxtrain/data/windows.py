"""Rows of a token file, and the array logic that turns them into a batch: segments, positions, weights, mixtures.

A file without loss bits is one long text, cut into windows (`FileWindows`). A file with loss bits holds conversations, whose
answers mean nothing without their prompts: its rows are filled with whole ones (`PackedRows`). With data.packing=best_fit all
rows are filled with whole documents.
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


class PackedRows:
    """Rows of whole documents, packed by best fit. `rows` checks the bytes that it reads, and raises TokenFileError if the file
    is damaged.

    Documents of equal length are shuffled by `seed` and packed into rows of T + 1 tokens (`pack`). So rows are a function of
    file, length and seed, every document is in one of them, and every epoch is an order of the same rows.

    A document of more than T + 1 tokens does not fit. Text is cut into pieces of T + 1 tokens, the last one shorter, each of
    which begins with the last target of the piece before it: every token is a target once. A conversation (in files with loss
    bits) ends with its last turn that fits; a first turn that does not fit is cut where the row ends. `truncated` counts these
    conversations, `truncated_tokens` the tokens that they lose.
    """

    def __init__(self, file: TokenFile, seq_len: int, max_segments: int | None, seed: int):
        """Reads the documents' offsets once, and keeps 12 bytes of each. max_segments: documents in a row, None: any."""
        self.name = str(file.path)
        self.file = file
        self.seq_len = seq_len
        offset = np.asarray(file.doc_offsets)
        begin, length = offset[:-1], np.diff(offset)
        self.truncated = self.truncated_tokens = 0
        if file.loss_bits is None:
            begin, length = cut_text(begin, length, seq_len)
        else:
            kept = length.copy()
            for k in np.flatnonzero(length > seq_len + 1).tolist():
                kept[k] = whole_turns(file.loss_flags(begin[k], begin[k] + seq_len + 2))
            self.truncated = int(np.count_nonzero(length > kept))
            self.truncated_tokens = int((length - kept).sum())
            begin, length = begin[kept > 0], kept[kept > 0]
        key = mix(np.asarray([seed], np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
        shuffled = np.argsort(mix(key + np.arange(len(length), dtype=np.uint64)), kind="stable")
        row = pack(length[shuffled], seq_len + 1, max_segments)
        by_row = shuffled[np.argsort(row, kind="stable")]
        self._begin, self._length = begin[by_row], length[by_row].astype(np.int32)
        count = np.bincount(row)
        self.documents = int(count.max(initial=1))  # documents in the row that has most
        self._first = np.concatenate([[0], np.cumsum(count)])  # of each row, among these
        self.windows = len(self._first) - 1
        self.capped = self.documents == max_segments
        self.filled = float(length.sum()) / max(1, self.windows * (seq_len + 1))  # part of the rows that is no padding

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


def open_windows(
    file: TokenFile, seq_len: int, max_segments: int | None, seed: int, packing: str = "documents"
) -> FileWindows | PackedRows:
    """Return the rows of a token file for `data.packing`. Conversations (files with loss bits) are always packed whole."""
    if file.loss_bits is None and packing != "best_fit":
        return FileWindows(file, seq_len)
    return PackedRows(file, seq_len, max_segments, seed)


def cut_text(begin_N: np.ndarray, length_N: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (begin, length) of pieces of at most seq_len + 1 tokens, which overlap by one token, in the order of the text."""
    pieces_N = np.maximum(1, -(-(length_N - 1) // seq_len))
    number = np.arange(pieces_N.sum()) - np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N)  # of a piece in its document
    begin, rest = (np.repeat(x_N, pieces_N) + sign * number * seq_len for x_N, sign in ((begin_N, 1), (length_N, -1)))
    return begin, np.minimum(rest, seq_len + 1)


def whole_turns(flags: np.ndarray) -> int:
    """Return how many tokens of a conversation are kept if a row has space for all but the last of these loss flags.

    An answer ends at the last of its tokens with a loss flag. If no answer ends within the row, the conversation fills the row.
    If none of its tokens has a flag, the conversation is left out (0).
    """
    size = len(flags) - 1
    ends = np.flatnonzero(flags[:-1] & ~flags[1:]) + 1
    if len(ends):
        return int(ends[-1])
    return size if flags[1:size].any() else 0


def pack(length_N: np.ndarray, size: int, most: int | None = None) -> np.ndarray:
    """Return the row of each item, int64 (N,), by best fit: the longest items first, each into the fullest row that fits it.

    Items of one length, and rows with one amount of free space, are handled together, so the time grows with the number of
    different lengths. Best fit decreasing is within 22% of the fewest rows in theory (Johnson et al. 1974).

    Args:
      length_N: 1 to `size` tokens each.
      size: tokens of a row.
      most: items in a row; None for any number.
    """
    row_N = np.empty(len(length_N), np.int64)
    by_length = np.argsort(-length_N, kind="stable")
    border = np.flatnonzero(np.diff(length_N[by_length], prepend=0, append=0))  # of each length, its first item, and the end
    most = size if most is None else most
    groups: list[list[tuple[np.ndarray, int]]] = [[] for _ in range(size + 1)]  # by free tokens: (rows, items in each)
    used = np.zeros(size + 1, bool)  # whether there is a group with this many free tokens
    rows = 0

    def put(free: int, row_R: np.ndarray, items: int) -> None:
        if len(row_R) and free and items < most:
            groups[free].append((row_R, items))
            used[free] = True

    for first, last in zip(border[:-1].tolist(), border[1:].tolist(), strict=True):
        todo = by_length[first:last]
        length = int(length_N[todo[0]])
        while len(todo):
            free = length + int(np.argmax(used[length:]))
            if used[free]:
                row_R, items = groups[free].pop()
                used[free] = bool(groups[free])
            else:
                free, items = size, 0
                row_R = rows + np.arange(-(-len(todo) // min(size // length, most)))
                rows += len(row_R)
            each = min(free // length, most - items)  # items of this length that go into a row
            full, rest = divmod(min(len(todo), len(row_R) * each), each)
            taken = full * each + rest
            row_N[todo[:taken]] = np.repeat(row_R, each)[:taken]
            todo = todo[taken:]
            put(free - each * length, row_R[:full], items + each)
            put(free - rest * length, row_R[full : full + 1], items + rest)
            put(free, row_R[full + 1 :], items)
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
    masks_documents: bool,
    max_segments: int,
) -> dict:
    """The arrays of shapes.BATCH_KEYS, each (R, T), from rows of T + 1 tokens as `Read` says what they hold.

    Documents beyond `max_segments` in a row become its padding, like the columns from `filled_R` on: segment 0, position 0,
    weight 0. Where all targets count, work is per document, not per token: five `np.repeat`s and casts.
    """
    R, T = tokens_RS.shape[0], tokens_RS.shape[1] - 1
    weights_RT = np.ones((R, T), np.float32) if loss_RT is None else loss_RT.astype(np.float32)
    if not masks_documents:
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
