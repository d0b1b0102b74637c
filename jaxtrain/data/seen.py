"""What a run has seen and will see: the documents of a step, the steps of a document, and held-out documents in the data.

No log is needed. The order of the data is a function of (seed, row, mixture), so a checkpoint's record of the mixture and of
earlier attempts decides every row (train/history.py reads both). Files are scanned in pieces of CHUNK tokens: memory grows with
a source's sequences and documents as in training, not with its tokens.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.config.schema import Data
from jaxtrain.data.batches import window_numbers
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.synthetic import mix
from jaxtrain.data.tokenfile import CHECKED_BYTES, TokenFile
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.data.windows import FileWindows, PackedRows, open_windows

CHUNK = 1 << 24  # tokens of a file that are in memory at a time
ROWS = 1 << 20  # rows of a source whose sequences are computed at a time
NGRAM = 13  # tokens of an n-gram, as in Brown et al. 2020 (arXiv:2005.14165), appendix C
NGRAM_BYTES = 52  # the same with tokens of one byte, taking 4 bytes for a usual token
SEEN_FRACTION = 0.8  # fraction of a document's n-grams from which on most of the document counts as seen
EDGE = 4  # tokens around the inner tokens of a text that may belong to it
MAX_OCCURRENCES = 1000  # places of a text that are looked up
BITS = 24  # of the filter before the search for an n-gram
LOW = np.uint64((1 << BITS) - 1)

Progress = Callable[[int], object]  # called with the number of rows or tokens that were read


class SeenError(ValueError):
    """An error: the run's data cannot answer the question. The message has a remedy."""


@dataclasses.dataclass(frozen=True)
class DataStretch:
    """Steps of a run over which its settings of data were constant.

    Attributes:
      first, last: numbers of its first and last step, from 1.
      rows: returns the global indices of the rows of a step, ascending, int64 (R,).
      data: seq_len, seed, packing and max_segments.
      skipped: (first, last) of the ranges of rows first..last-1 that its steps pass over.
    """

    first: int
    last: int
    rows: Callable[[int], np.ndarray]
    data: Data
    skipped: Sequence[tuple[int, int]] = ()

    def step_of(self, row: int) -> int:
        """Return the step that reads a row of the stretch that is not skipped."""
        low, high = self.first, self.last
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.rows(middle)[0] <= row else (low, middle - 1)
        return low


@dataclasses.dataclass(frozen=True)
class BatchRow:
    """A row of a step's batch: a sequence of a source. `spans`: (document, first, last) of each part of a document in it."""

    row: int
    source: int
    number: int  # of the sequence in its source
    epoch: int  # of the source, from 1
    spans: list[tuple[int, int, int]]  # tokens first..last-1 of the file


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Rows that steps first..last read before a rollback to step `back_to`, and that the run passes over since then."""

    first: int
    last: int
    back_to: int
    rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class SequenceReading:
    """A step that reads a sequence, `row` of its batch, in the source's epoch `epoch`, from 1."""

    step: int
    row: int
    epoch: int


class History:
    """The data of all steps of a run, past and future.

    Attributes:
      done: number of steps that were done.
      skipped: the data that was skipped after divergences.
      sources: the sources of the run's mixtures, by number: `name`, `path`, `content_sha256`.
    """

    def __init__(self, stretches: Sequence[DataStretch], mixture: Mixture, done: int, skipped: Sequence[Skipped] = ()):
        self.stretches, self.done, self.skipped = stretches, done, skipped
        self._mixture = mixture
        self.sources = mixture.sources
        self._files: dict[int, TokenFile] = {}
        self._windows: dict[tuple[int, Data], FileWindows | PackedRows] = {}

    def label(self, source: int) -> str:
        """Return a source's name; its path if several have the name."""
        names = [each["name"] for each in self.sources]
        return self.sources[source]["path"] if names.count(names[source]) > 1 else names[source]

    def file(self, source: int) -> TokenFile:
        """Return the token file of a source. Raises SeenError if it is not where the run had it, or has another content."""
        if source not in self._files:
            path, content = self.sources[source]["path"], self.sources[source]["content_sha256"]
            if not content:
                raise SeenError(f"{self.sources[source]['name']}: has no documents. Only token files have")
            try:
                file = TokenFile.open(path)
            except FileNotFoundError as e:
                raise SeenError(f"{path}: no such file, and the run has read it. Fix: put it back there") from e
            if file.header["content_sha256"] != content:
                raise SeenError(f"{path}: is another file than the run has read. Fix: put the former one back there")
            if file.opened.size < CHECKED_BYTES:
                file.check()
            self._files[source] = file
        return self._files[source]

    def source_of(self, path: str) -> int:
        """Return the number of the source with this path or name. Raises SeenError if there is none."""
        resolved = str(Path(path).expanduser().resolve())
        numbers = [k for k, each in enumerate(self.sources) if resolved == each["path"]]
        if not numbers and not Path(path).expanduser().exists():
            numbers = [k for k, each in enumerate(self.sources) if path == each["name"]]
        if len(numbers) != 1:
            rule = "are several files of the run" if numbers else "is no file of the run"
            raise SeenError(f"{path}: {rule}. Fix: name one of {', '.join(each['path'] for each in self.sources)}")
        return numbers[0]

    def _open(self, source: int, data: Data) -> FileWindows | PackedRows:
        if (source, data) not in self._windows:
            max_segments = data.most_documents if data.masks_documents else None
            self._windows[source, data] = open_windows(self.file(source), data.seq_len, max_segments, data.seed, data.packing)
        return self._windows[source, data]

    def _mixture_of(self, stretch: DataStretch) -> Mixture:
        """Return the mixture with rows of the stretch's length, without phases that begin after it."""
        mixture = Mixture(self.sources, (), stretch.data.seq_len)
        mixture.sources, mixture.phases = self.sources, [phase for phase in self._mixture.phases if phase.step < stretch.last]
        return mixture

    def step(self, step: int) -> list[BatchRow]:
        """Return the rows of a step's batch. Raises SeenError if the run has no such step, or a file is gone."""
        stretch = self.stretch_of(step)
        return self.rows(stretch, stretch.rows(step))

    def stretch_of(self, step: int) -> DataStretch:
        """Return the stretch of a step. Raises SeenError if the run has no such step."""
        stretch = next((each for each in self.stretches if each.first <= step <= each.last), None)
        if stretch is None:
            last = self.stretches[-1].last
            raise SeenError(f"--step = {step}: the run has steps 1 to {last}. Fix: --step={last}")
        return stretch

    def rows(self, stretch: DataStretch, index_R: np.ndarray) -> list[BatchRow]:
        """Return the rows with these global indices, of the length that rows have in a stretch."""
        source_R, within_R = self._mixture_of(stretch).sources_of(index_R)
        rows = []
        for row, (source, within) in enumerate(zip(source_R.tolist(), within_R.tolist(), strict=True)):
            windows = self._open(source, stretch.data)
            number = int(window_numbers(stretch.data.seed, source, windows.windows, np.asarray([within]))[0])
            spans = windows.spans(number)
            documents = np.searchsorted(windows.file.doc_offsets[:], [first for first, _ in spans], "right") - 1
            document_spans = [(document, *span) for document, span in zip(documents.tolist(), spans, strict=True)]
            rows.append(BatchRow(row, source, number, within // windows.windows + 1, document_spans))
        return rows

    def _rows_read(self, stretch: DataStretch, source: int, until: int) -> range:
        """Return the rows of a source, counted from the run's start, that the stretch's steps up to `until` read or skip."""
        last = min(stretch.last, until)
        if last < stretch.first:
            return range(0)
        mixture, T = self._mixture_of(stretch), stretch.data.seq_len
        first, end = int(stretch.rows(stretch.first)[0]), int(stretch.rows(last)[-1]) + 1
        before = mixture.phase_of(first).read_before(first, T)[source]
        return range(before // T, mixture.phase_of(end - 1).read_before(end, T)[source] // T)

    def count_rows(self, source: int, until: int | None = None) -> int:
        """Return the number of rows of a source that `find_readings`, or `ranges_read` with `until`, goes through."""
        return sum(len(self._rows_read(each, source, each.last if until is None else until)) for each in self.stretches)

    def _sequence_numbers(
        self, stretch: DataStretch, source: int, until: int, progress: Progress
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (rows of a source, their sequences) that the stretch's steps up to `until` read, ROWS at a time."""
        windows, mixture = self._open(source, stretch.data), self._mixture_of(stretch)
        skipped = [np.empty(0, np.int64)]
        for first, last in stretch.skipped:
            source_R, within_R = mixture.sources_of(np.arange(first, last))
            skipped.append(within_R[source_R == source])
        read = self._rows_read(stretch, source, until)
        for begin in range(read.start, read.stop, ROWS):
            within = np.setdiff1d(np.arange(begin, min(begin + ROWS, read.stop)), np.concatenate(skipped), assume_unique=True)
            yield within, window_numbers(stretch.data.seed, source, windows.windows, within)
            progress(len(within))

    def find_readings(
        self, source: int, ranges: Sequence[tuple[int, int]], progress: Progress = lambda n: None
    ) -> list[list[SequenceReading]]:
        """Return when the run reads each of the places (first, last) in a source's file, past steps and future ones, in order.

        A place is read with any of its tokens first..last-1.
        """
        readings: list[list[SequenceReading]] = [[] for _ in ranges]
        for stretch in self.stretches if ranges else ():
            windows, mixture = self._open(source, stretch.data), self._mixture_of(stretch)
            number_sets = [set(windows.numbers_of(*token_range).tolist()) for token_range in ranges]
            all_numbers = np.asarray(sorted(set().union(*number_sets)), np.int64)
            limits = int(stretch.rows(stretch.first)[0]), int(stretch.rows(stretch.last)[-1]) + 1
            for within_R, number_R in self._sequence_numbers(stretch, source, stretch.last, progress):
                hit_R = np.isin(number_R, all_numbers)
                for within, number in zip(within_R[hit_R].tolist(), number_R[hit_R].tolist(), strict=True):
                    row = mixture.row_of(source, within, *limits)
                    step = stretch.step_of(row)
                    reading = SequenceReading(
                        step, int(np.searchsorted(stretch.rows(step), row)), within // windows.windows + 1
                    )
                    for range_readings, numbers in zip(readings, number_sets, strict=True):
                        if number in numbers:
                            range_readings.append(reading)
        return [sorted(range_readings, key=lambda reading: (reading.step, reading.row)) for range_readings in readings]

    def ranges_read(self, source: int, until: int, progress: Progress = lambda n: None) -> tuple[np.ndarray, np.ndarray]:
        """Return (first, last) of the ranges of a source's tokens that steps 1 to `until` read, ascending and not adjacent."""
        begins, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for stretch in self.stretches:
            windows = self._open(source, stretch.data)
            read, n = np.zeros(windows.windows, bool), windows.windows
            indices = self._rows_read(stretch, source, until)
            if indices.stop // n > -(-indices.start // n) and not stretch.skipped:  # a whole epoch
                read[:] = True
                progress(len(indices))
            else:
                for _, number in self._sequence_numbers(stretch, source, until, progress):
                    read[number] = True
            first, last = windows.ranges(np.flatnonzero(read))
            begins.append(first)
            ends.append(last)
        begin, end = np.concatenate(begins), np.concatenate(ends)
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], np.maximum.accumulate(end[order])
        new = np.append(True, begin[1:] > end[:-1])[: len(begin)]
        return begin[new], end[np.append(new[1:], True)[: len(end)]]


def find_occurrences(
    file: TokenFile, tokenizer: Tokenizer, text: str, progress: Progress = lambda n: None
) -> list[tuple[int, int]]:
    """Return (first, last) of the tokens of each place of a text in a file, the first MAX_OCCURRENCES of them.

    Places do not overlap.

    A place is found by its inner tokens: those at the ends of the text may be part of tokens that go beyond it. A text of few
    tokens is found only where it has the tokens that the text has by itself, or after a space.
    """
    inner_ids = []
    for variant in dict.fromkeys((text, " " + text, text.strip())):
        ids = np.asarray(tokenizer.encode(variant))
        inner_ids.append(ids if len(ids) < 4 else ids[1:-1])
    spans: list[tuple[int, int]] = []
    size, end = max(map(len, inner_ids)) + EDGE, 0
    for start in range(0, file.header["tokens"], CHUNK):
        origin = max(0, start - EDGE)
        chunk = file.tokens[origin : start + CHUNK + size]
        candidates: dict[int, int] = {}
        for ids in (ids for ids in inner_ids if len(ids)):
            starts = np.flatnonzero(chunk[: len(chunk) - len(ids) + 1] == ids[0])
            for i in range(1, len(ids)):
                starts = starts[chunk[starts + i] == ids[i]]
            candidates |= dict.fromkeys(starts.tolist(), len(ids))
        for begin, length in sorted(candidates.items()):
            low, high = max(0, begin - EDGE, end - origin), begin + length + EDGE
            if begin < low or text not in tokenizer.decode(chunk[low:high]):
                continue
            while text in tokenizer.decode(chunk[low : high - 1]):
                high -= 1
            while text in tokenizer.decode(chunk[low + 1 : high]):
                low += 1
            end = origin + min(high, len(chunk))
            spans.append((origin + low, end))
            if len(spans) == MAX_OCCURRENCES:
                return spans
        progress(min(CHUNK, file.header["tokens"] - start))
    return spans


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How much of held-out documents the steps of a run have read.

    Attributes:
      exact_D: whether a document that was read completely is equal, bool (D,).
      ngrams_D: fraction of each document's n-grams that were read, float (D,); nan for a document that is shorter.
      n: tokens of an n-gram.
    """

    exact_D: np.ndarray
    ngrams_D: np.ndarray
    ngram: int


def measure_overlap(
    history: History, held_out: TokenFile, until: int, ngram: int = NGRAM, progress: Progress = lambda n: None
) -> Overlap:
    """Compare the documents of a held-out file, which fit into memory, with the tokens that steps 1 to `until` read.

    An n-gram is n tokens of one document in a row. It was read if all its tokens were, anywhere in the run's files. progress:
    called with the numbers of rows and tokens.

    Raises SeenError if the files have different tokenizers.
    """
    for k in range(len(history.sources)):
        if history.file(k).header["tokenizer"]["sha256"] != held_out.header["tokenizer"]["sha256"]:
            rule = f"{held_out.path}: has another tokenizer than {history.label(k)}, so their tokens cannot be compared"
            raise SeenError(f"{rule}. Fix: prepare it again with --tokenizer={history.file(k).header['tokenizer']['name']}")
    held_out.check()
    tokens, offsets = held_out.tokens[:], held_out.doc_offsets[:]
    sizes = np.diff(offsets)
    document = np.repeat(np.arange(len(sizes)), sizes)  # of each token
    exact, _ = _document_hashes(tokens, offsets)
    grams = _ngram_hashes(tokens, ngram)
    inside = np.flatnonzero(document[: len(grams)] == document[ngram - 1 :])
    held_out_grams, held_out_hashes = np.unique(grams[inside]), np.unique(exact)
    likely = np.zeros(1 << BITS, bool)  # by the low bits of a hash: whether a known n-gram has these
    likely[held_out_grams & LOW] = True
    hit, equal = np.zeros(len(held_out_grams) + 1, bool), np.zeros(len(held_out_hashes) + 1, bool)
    for k in range(len(history.sources)):
        file, ranges = history.file(k), history.ranges_read(k, until, progress)
        for chunk, bounds, read in _read_pieces(file, *ranges, ngram, progress):
            chunk_grams = _ngram_hashes(chunk, ngram)
            chunk_grams = chunk_grams[(read[ngram:] - read[:-ngram] == ngram) & likely[chunk_grams & LOW]]
            index = np.searchsorted(held_out_grams, chunk_grams)
            hit[index[np.append(held_out_grams, 0)[index] == chunk_grams]] = True
            hashes, sizes_d = _document_hashes(chunk[bounds[0] : bounds[-1]], bounds - bounds[0])
            hashes = hashes[np.diff(read[bounds]) == sizes_d]
            index = np.searchsorted(held_out_hashes, hashes)
            equal[index[np.append(held_out_hashes, 0)[index] == hashes]] = True
    count = np.bincount(document[inside], minlength=len(sizes))
    read_count = np.bincount(document[inside], hit[np.searchsorted(held_out_grams, grams[inside])], minlength=len(sizes))
    share = np.divide(read_count, count, out=np.full(len(sizes), np.nan), where=count > 0)
    return Overlap(equal[np.searchsorted(held_out_hashes, exact)], share, ngram)


def _read_pieces(
    file: TokenFile, begin: np.ndarray, end: np.ndarray, ngram: int, progress: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (tokens, bounds of the documents that are complete in them, number of tokens read before each) of pieces of a file.

    begin, end: ranges of the tokens that were read. Each piece is followed by the ngram - 1 first tokens of the next one.
    Pieces without a token that was read are left out.
    """
    offsets, total, first = file.doc_offsets[:], file.header["tokens"], 0
    while first < total:
        last = int(offsets[np.searchsorted(offsets, first + CHUNK, "right") - 1])
        last = last if last > first else min(first + CHUNK, total)  # within a document of more than CHUNK tokens
        stop = min(last + ngram - 1, total)
        low, high = np.searchsorted(end, first, "right"), np.searchsorted(begin, stop)
        if low < high:
            change = np.zeros(stop - first + 1, np.int64)
            change[np.maximum(begin[low:high] - first, 0)] = 1
            change[np.minimum(end[low:high], stop) - first] -= 1
            documents = offsets[np.searchsorted(offsets, first) : np.searchsorted(offsets, last, "right")] - first
            bounds = documents if len(documents) else np.zeros(1, np.int64)
            yield file.tokens[first:stop], bounds, np.concatenate([[0], np.cumsum(np.cumsum(change)[:-1])])
        progress(last - first)
        first = last


def _ngram_hashes(tokens: np.ndarray, ngram: int) -> np.ndarray:
    """Return a hash of each `ngram` tokens in a row, uint64 (len(tokens) - ngram + 1,): a polynomial modulo 2^64."""
    count = max(0, len(tokens) - ngram + 1)
    mixed = mix(tokens.astype(np.uint64) + np.uint64(1))
    hashes = np.zeros(count, np.uint64)
    for i in range(ngram):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + mixed[i : i + count]
    return hashes


def _document_hashes(tokens: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (a hash of each document, uint64 (D,), its number of tokens). offsets: of the documents, which are not empty."""
    lengths = np.diff(offsets)
    position = np.arange(len(tokens), dtype=np.uint64) - np.repeat(offsets[:-1], lengths).astype(np.uint64)
    values = mix(tokens.astype(np.uint64) + (position << np.uint64(32)))
    return np.add.reduceat(values, offsets[:-1]) if len(lengths) else np.empty(0, np.uint64), lengths
