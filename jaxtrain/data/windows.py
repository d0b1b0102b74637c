"""Rows of a token file, and their conversion to a batch: segments, positions, weights.

A file without loss bits is one long text, cut into windows (`FileWindows`); with data.packing=best_fit its rows are filled with
whole documents (`PackedRows`). A file with loss bits has conversations or pairs. An answer needs its prompt, so the rows are
filled with whole conversations (`PackedRows`) or whole pairs (`PairRows`).
"""

import functools
import heapq
import itertools

import numpy as np

from jaxtrain.data.synthetic import Synthetic, mix
from jaxtrain.data.tokenfile import TokenFile

WINDOWS = 1 << 20  # windows whose documents are counted at a time
EXTRA_PERCENTS = (0, 1, 2, 4, 8)  # percent of rows above the lower bound, for the attempts of `pack_evenly`

# Tokens (R, T+1); (row, column) of each token in columns 1..T that starts a document, sorted; loss flags, bool (R, T): whether
# the target in columns 1..T counts, None if all do; number of columns with documents in each row, int64 (R,), None if all T + 1
# have documents.
RowArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


class FileWindows:
    """The windows of a token file without loss bits. `rows` raises TokenFileError."""

    def __init__(self, file: TokenFile, seq_len: int, max_segments: int | None):
        """Args: max_segments: documents in a window after which it is masked (`make_batch`); None: it never is."""
        self.name = str(file.path)
        self.file = file
        self.seq_len, self.max_segments = seq_len, max_segments
        self.windows = count_windows(file.header["tokens"], seq_len)
        self._starts = file.doc_offsets

    def rows(self, index_R: np.ndarray) -> RowArrays:
        T = self.seq_len
        begin_R = index_R * T
        # Windows overlap by one token: the last target of a window is the first input of the next window.
        tokens_RS = np.empty((len(index_R), T + 1), self.file.tokens.dtype)
        for begin, tokens_S in zip(begin_R.tolist(), tokens_RS, strict=True):
            self.file.tokens.read(begin, tokens_S)
        self.file.opened.check_unchanged()
        # Count documents that start after the row's first token, up to and including the last target.
        low_R, high_R = (np.searchsorted(self._starts, at_R, "right") for at_R in (begin_R, begin_R + T))
        count_R = high_R - low_R
        row = np.repeat(np.arange(len(index_R)), count_R)
        nth = np.arange(len(row)) + np.repeat(low_R - (np.cumsum(count_R) - count_R), count_R)
        return tokens_RS, row, self._starts[nth] - begin_R[row], None, None

    def spans(self, number: int) -> list[tuple[int, int]]:
        """Return (first, last) of the inputs of each document in a window that is not masked, as positions in the file."""
        begin, end = number * self.seq_len, int(self._ends(np.asarray([number]))[0])
        low, high = np.searchsorted(self._starts, (begin, end - 1), "right")
        return list(itertools.pairwise([begin, *self._starts[low:high].tolist(), end]))

    def numbers_of(self, first: int, last: int) -> np.ndarray:
        """Return the windows in which any of the tokens first..last-1 of the file is an input that is not masked."""
        number_N = np.arange(first // self.seq_len, min((last - 1) // self.seq_len + 1, self.windows))
        return number_N[self._ends(number_N) > first]

    def ranges(self, number_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (first, last) of the tokens of windows that are not masked, (N,) each, with the last target."""
        end_N = self._ends(number_N)
        return number_N * self.seq_len, end_N + (end_N == (number_N + 1) * self.seq_len)

    def _ends(self, number_N: np.ndarray) -> np.ndarray:
        """Return the ends of the inputs of windows that are not masked, as positions in the file, (N,)."""
        begin_N = number_N * self.seq_len
        if self.max_segments is None:
            return begin_N + self.seq_len
        masked_N = np.searchsorted(self._starts, begin_N, "right") + self.max_segments - 1  # the first document that is masked
        return np.minimum(begin_N + self.seq_len, self._starts[np.minimum(masked_N, len(self._starts) - 1)])

    def count_documents(self, max_segments: int) -> tuple[int, int]:
        """Return (largest number of documents in a window, tokens that `max_segments` masks), by `windows.count_documents`."""
        return count_documents(self._starts, self.windows, self.seq_len, max_segments)


class PackedRows:
    """Rows of whole documents (`pack`). `rows` raises TokenFileError.

    Documents of equal length are shuffled by `seed` and packed into rows of T + 1 tokens. So rows are a function of file,
    T, max_segments and seed, and every document of at most T + 1 tokens is in one row. Every epoch reads these rows in another
    order. Packing the whole file once leaves less padding than packing a shuffled part of it, and a row's number is enough to
    resume.

    A document of more than T + 1 tokens does not fit. Text is cut into pieces of T + 1 tokens (the last piece may be shorter).
    Each piece begins with the last target of the previous piece, so every token is a target once. A conversation (in files
    with loss bits) is cut after its last turn that fits. A first turn that does not fit is cut where the row ends. `truncated`
    counts all conversations that were cut, `truncated_tokens` the tokens that were cut off.
    """

    def __init__(self, file: TokenFile, seq_len: int, max_segments: int | None, seed: int):
        """Pack the file. 12 bytes a document stay in memory. max_segments: largest number of documents in a row; None: any."""
        self.name = str(file.path)
        self.file = file
        self.seq_len = seq_len
        offset = file.doc_offsets
        begin, length = offset[:-1], np.diff(offset)
        self.truncated = self.truncated_tokens = 0
        if file.loss_bits is None:
            begin, length = cut_text(begin, length, seq_len)
        else:
            kept_length = length.copy()
            for k in np.flatnonzero(length > seq_len + 1).tolist():
                kept_length[k] = fit_turns(file.loss_flags(begin[k], begin[k] + seq_len + 2))
            self.truncated = int(np.count_nonzero(length > kept_length))
            self.truncated_tokens = int((length - kept_length).sum())
            begin, length = begin[kept_length > 0], kept_length[kept_length > 0]
        self._fill(begin[:, None], length[:, None], max_segments, seed)

    def _fill(self, begin_NG: np.ndarray, length_NG: np.ndarray, max_segments: int | None, seed: int) -> np.ndarray:
        """Pack N groups of G documents, each group into one row. Return the groups' indices in the order of the rows, (N,)."""
        N, G = length_NG.shape
        length_N = length_NG.sum(1)
        key = mix(np.asarray([seed], np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
        shuffled_N = np.argsort(mix(key + np.arange(N, dtype=np.uint64)), kind="stable")
        row_N = pack(length_N[shuffled_N], self.seq_len + 1, None if max_segments is None else max_segments // G)
        by_row_N = shuffled_N[np.argsort(row_N, kind="stable")]
        self._begin, self._length = begin_NG[by_row_N].ravel(), length_NG[by_row_N].ravel().astype(np.int32)
        count = G * np.bincount(row_N)
        self.documents = int(count.max(initial=1))  # documents in the fullest row
        self._first = np.concatenate([[0], np.cumsum(count)])  # the first document of each row
        self.windows = len(self._first) - 1
        self.capped = self.documents == max_segments
        self.filled = float(length_N.sum()) / max(1, self.windows * (self.seq_len + 1))  # fraction of the rows without padding
        return by_row_N

    def rows(self, index_R: np.ndarray) -> RowArrays:
        S = self.seq_len + 1
        tokens_RS = np.full((len(index_R), S), self.file.header["tokenizer"]["eot"], self.file.tokens.dtype)
        loss_RS = np.zeros((len(index_R), S), bool)
        filled_R = np.zeros(len(index_R), np.int64)
        spans = []
        for r, i in enumerate(index_R.tolist()):
            row_slice = slice(self._first[i], self._first[i + 1])
            for first, count in zip(self._begin[row_slice].tolist(), self._length[row_slice].tolist(), strict=True):
                at = filled_R[r]
                self.file.tokens.read(first, tokens_RS[r, at : at + count])
                spans.append((r, at, first, count))
                filled_R[r] += count
        self.file.opened.check_unchanged()
        for r, at, first, count in spans:
            loss_RS[r, at : at + count] = self.file.loss_flags(first, first + count)
        row, column = np.asarray([(r, at) for r, at, _, _ in spans if at], np.int64).reshape(-1, 2).T
        return tokens_RS, row, column, loss_RS[:, 1:], filled_R

    def spans(self, number: int) -> list[tuple[int, int]]:
        """Return (first, last) of each document, or piece of one, in a row, as positions in the file."""
        row_slice = slice(self._first[number], self._first[number + 1])
        return list(
            zip(self._begin[row_slice].tolist(), (self._begin[row_slice] + self._length[row_slice]).tolist(), strict=True)
        )

    def numbers_of(self, first: int, last: int) -> np.ndarray:
        """Return the rows with any of the tokens first..last-1 of the file."""
        pieces = np.flatnonzero((self._begin < last) & (self._begin + self._length > first))
        return np.unique(np.searchsorted(self._first, pieces, "right") - 1)

    def ranges(self, number_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (first, last) of all documents and pieces of rows, as positions in the file."""
        chosen = np.zeros(self.windows, bool)
        chosen[number_N] = True
        pieces = np.repeat(chosen, np.diff(self._first))
        return self._begin[pieces], self._begin[pieces] + self._length[pieces]


class PairRows(PackedRows):
    """Rows of whole pairs, packed by `pack`.

    Segments 2p + 1 and 2p + 2 of a row are the chosen and the rejected member of its pair p. Pairs of equal length are shuffled
    by `seed` before they are packed.

    A pair of more than T + 1 tokens is left out: `left_out` counts these pairs. A preference holds for complete texts, so no
    completion is cut.

    Attributes:
      longest: number of tokens of the longest pair.
    """

    def __init__(self, file: TokenFile, seq_len: int, max_segments: int | None, seed: int):
        """Pack the file. 32 bytes a pair stay in memory. max_segments: largest number of documents in a row; None: any."""
        self.name = str(file.path)
        self.file = file
        self.seq_len = seq_len
        offset = file.doc_offsets
        begin_N2, length_N2 = offset[:-1].reshape(-1, 2), np.diff(offset).reshape(-1, 2)
        length_N = length_N2.sum(1)
        fits_N = np.flatnonzero(length_N <= seq_len + 1)
        self.truncated = self.truncated_tokens = 0
        self.left_out = len(length_N) - len(fits_N)
        self.longest = int(length_N.max(initial=0))
        self._pair = fits_N[self._fill(begin_N2[fits_N], length_N2[fits_N], max_segments, seed)]

    def documents_of(self, row: int) -> np.ndarray:
        """Return the index in the file of each document of a row, in the order of the row's segments."""
        pair = self._pair[self._first[row] // 2 : self._first[row + 1] // 2]
        return (2 * pair[:, None] + np.arange(2)).ravel()


def open_windows(
    file: TokenFile, seq_len: int, max_segments: int | None, seed: int, packing: str = "documents"
) -> FileWindows | PackedRows:
    """Return the rows of a token file: windows, or whole documents if `packing` is best_fit.

    A file with loss bits has rows of whole conversations or whole pairs for every `packing`.
    """
    if file.loss_bits is None and packing != "best_fit":
        return FileWindows(file, seq_len, max_segments)
    return (PairRows if file.pairs else PackedRows)(file, seq_len, max_segments, seed)


Windows = FileWindows | PackedRows | Synthetic  # numbered rows of T + 1 tokens


def cut_text(begin_N: np.ndarray, length_N: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents (begin, length) into pieces of at most seq_len + 1 tokens. Return (begin, length) of the pieces, in order.

    Successive pieces of a document overlap by one token.
    """
    pieces_N = np.maximum(1, -(-(length_N - 1) // seq_len))
    number = np.arange(pieces_N.sum()) - np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N)  # of a piece in its document
    begin, remaining = (np.repeat(x_N, pieces_N) + sign * number * seq_len for x_N, sign in ((begin_N, 1), (length_N, -1)))
    return begin, np.minimum(remaining, seq_len + 1)


def fit_turns(flags: np.ndarray) -> int:
    """Return the number of tokens of a conversation longer than a row that are kept from its beginning.

    An answer ends at its last token with a loss flag. The tokens up to the last end of an answer in the row are kept. If no
    answer ends in the row, all tokens of the row are kept if a target among them has a flag, else none.

    flags: loss flags of the tokens that fit into a row, and of the next token.
    """
    size = len(flags) - 1
    ends = np.flatnonzero(flags[:-1] & ~flags[1:]) + 1
    if len(ends):
        return int(ends[-1])
    return size if flags[1:size].any() else 0


def pack(length_N: np.ndarray, size: int, max_items: int | None = None) -> np.ndarray:
    """Return the row of each item, int64 (N,): by `pack_best_fit`, or by `pack_evenly` if that needs fewer rows.

    Best fit puts items of similar lengths into one row. Rows of short items may then reach `max_items` items before they are
    full. In this case an equal mix of short and long items in each row needs fewer rows.

    Args:
      length_N: number of tokens of each item, 1 to `size`.
      size: tokens of a row.
      max_items: largest number of items in a row; None for any number.
    """
    row_N = pack_best_fit(length_N, size, max_items)
    if max_items is None or not len(row_N) or np.bincount(row_N).max() < max_items:
        return row_N
    fewest = max(-(-int(length_N.sum()) // size), -(-len(length_N) // max_items))
    for percent in EXTRA_PERCENTS:
        rows = fewest * (100 + percent) // 100
        if rows > row_N.max():
            break
        if (even_N := pack_evenly(length_N, size, max_items, rows)) is not None:
            return even_N
    return row_N


def pack_evenly(length_N: np.ndarray, size: int, max_items: int, rows: int) -> np.ndarray | None:
    """Return the row of each item, int64 (N,), packed into `rows` rows; None if some item fits into no row.

    The longest items come first, each into the row with the fewest tokens (LPT, Graham 1969).

    Args:
      rows: number of rows.
      length_N, size, max_items: as in `pack`.
    """
    row_N = np.empty(len(length_N), np.int64)
    open_rows = [(0, row, 0) for row in range(rows)]  # a heap of (tokens, row, items)
    order_N = np.argsort(-length_N, kind="stable")
    for item, length in zip(order_N.tolist(), length_N[order_N].tolist(), strict=True):
        if not open_rows or open_rows[0][0] + length > size:
            return None
        tokens, row, items = open_rows[0]
        row_N[item] = row
        if items + 1 < max_items:
            heapq.heapreplace(open_rows, (tokens + length, row, items + 1))
        else:
            heapq.heappop(open_rows)
    return row_N


def pack_best_fit(length_N: np.ndarray, size: int, max_items: int | None = None) -> np.ndarray:
    """Return the row of each item, int64 (N,), by best fit decreasing: longest first, each into the fullest row that has space.

    Items of equal length, and rows with equally many free tokens, are handled together. So the time grows with the number of
    different lengths. If `max_items` is None and the items are many, best fit decreasing needs at most 22% more rows than the
    optimum (Johnson et al. 1974). The arguments are as in `pack`.
    """
    row_N = np.empty(len(length_N), np.int64)
    by_length = np.argsort(-length_N, kind="stable")
    border = np.flatnonzero(np.diff(length_N[by_length], prepend=0, append=0))  # of each length, its first item, and the end
    max_items = size if max_items is None else max_items
    groups: list[list[tuple[np.ndarray, int]]] = [[] for _ in range(size + 1)]  # by free tokens: (rows, items in each)
    used = np.zeros(size + 1, bool)  # whether there is a group with this many free tokens
    rows = 0

    def add_rows(free: int, row_R: np.ndarray, items: int) -> None:
        if len(row_R) and free and items < max_items:
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
                row_R = rows + np.arange(-(-len(todo) // min(size // length, max_items)))
                rows += len(row_R)
            per_row = min(free // length, max_items - items)  # items of this length that go into a row
            full, remainder = divmod(min(len(todo), len(row_R) * per_row), per_row)
            taken = full * per_row + remainder
            row_N[todo[:taken]] = np.repeat(row_R, per_row)[:taken]
            todo = todo[taken:]
            add_rows(free - per_row * length, row_R[:full], items + per_row)
            add_rows(free - remainder * length, row_R[full : full + 1], items + remainder)
            add_rows(free, row_R[full + 1 :], items)
    return row_N


def count_windows(tokens: int, seq_len: int) -> int:
    """Return the number of windows of seq_len inputs in `tokens` tokens. A window has one more token, its last target."""
    return max(0, (tokens - 1) // seq_len)


def make_batch(
    tokens_RS: np.ndarray,
    row: np.ndarray,
    column: np.ndarray,
    loss_RT: np.ndarray | None,
    filled_R: np.ndarray | None,
    masks_documents: bool,
    max_segments: int,
) -> dict[str, np.ndarray]:
    """Return the arrays of shapes.BATCH_KEYS, each (R, T), of rows of T + 1 tokens. The first five arguments are a `RowArrays`.

    Documents beyond `max_segments` in a row are masked like padding: segment 0, position 0, weight 0. The time is
    mostly per document, not per token. masks_documents: if False, each row is one segment.
    """
    R, T = tokens_RS.shape[0], tokens_RS.shape[1] - 1
    weights_RT = np.ones((R, T), np.float32) if loss_RT is None else loss_RT.astype(np.float32)
    tails: list[tuple[int, int]] = []  # (row, column) from which a row is masked
    if not masks_documents:
        segments_RT = np.ones((R, T), np.int32)
        positions_RT = np.tile(_columns(1, T), (R, 1))
    else:
        weights_RT[row, column - 1] = 0  # the target belongs to the next document
        inside = column < T
        # Borders of segments in the flattened batch: the start of each row, of each later document in a row, and the end.
        border = np.concatenate([np.arange(0, R * T + 1, T), row[inside] * T + column[inside]])
        border.sort()
        start, length = border[:-1], border[1:] - border[:-1]
        nth = np.arange(len(start))
        number = nth + 1 - np.maximum.accumulate(np.where(start % T == 0, nth, 0))  # of each segment in its row, from 1
        tails = [divmod(at, T) for at in start[number == max_segments + 1].tolist()]
        segments_RT = np.repeat(number.astype(np.int32), length).reshape(R, T)
        begin = np.repeat(start.astype(np.int32), length)
        positions_RT = np.subtract(_columns(R, T), begin, out=begin).reshape(R, T)
    if filled_R is not None:
        short = np.flatnonzero(filled_R <= T)
        weights_RT[short, filled_R[short] - 1] = 0  # the target is padding
        tails += zip(short.tolist(), filled_R[short].tolist(), strict=True)
    for r, t in tails:
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


@functools.lru_cache(maxsize=8)
def _columns(R: int, T: int) -> np.ndarray:
    """Return 0, 1, ..., R * T - 1, int32 (R * T,): the index of each token in a flattened batch."""
    return np.arange(R * T, dtype=np.int32)


def count_documents(starts: np.ndarray, windows: int, seq_len: int, max_segments: int) -> tuple[int, int]:
    """Return (largest number of documents in a window, tokens that `max_segments` masks in all windows).

    A document that spans several windows counts in each window. The first number is at least 1.

    Args:
      starts: the starts of all documents, sorted. Starts after the last window are ignored. To save memory, the starts of
        WINDOWS windows are read at a time.
    """
    max_documents, masked = 1, 0
    for first in range(0, windows, WINDOWS):
        limits = np.asarray([first, min(first + WINDOWS, windows)]) * seq_len
        low, high = np.searchsorted(starts, limits)
        window_starts = starts[low:high]
        window_starts = window_starts[window_starts % seq_len != 0]  # a start at column 0 adds no segment
        begin = np.flatnonzero(np.diff(window_starts // seq_len, prepend=-1))  # of each window, its first start
        count = np.diff(begin, append=len(window_starts))
        max_documents = max(max_documents, int(count.max(initial=0)) + 1)
        tail = begin[count >= max_segments] + max_segments - 1  # starts of segment max_segments + 1
        masked += int((seq_len - window_starts[tail] % seq_len).sum())
    return max_documents, masked
