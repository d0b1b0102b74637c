"""What `data seen` prints: the documents of a step, the steps of documents, and held-out documents in the data."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxtrain.config.numbers import plural
from jaxtrain.data import seen
from jaxtrain.data.seen import BatchRow, History, SeenError
from jaxtrain.data.show import load_file_tokenizer, render_tokens
from jaxtrain.data.tokenfile import TokenFile

SHOWN = 50  # steps of a document, and documents with a text, that are listed
WORST = 10  # held-out documents that are listed


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the amount of work done. On a terminal, show a bar."""
    import rich.console
    from rich.progress import Progress

    console = rich.console.Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda amount: bar.update(task, advance=amount)


def print_step(history: History, step: int, texts: bool) -> None:
    """Print the documents of a step, a line each; with `texts`, also their tokens as text."""
    rows, stretch = history.step(step), history.stretch_of(step)
    print(f"step {step}: {plural(len(rows), 'sequence')}, {'read' if step <= history.done else 'not read yet'}")
    _print_rows(history, rows, texts)
    for skipped in history.skipped:
        if skipped.first <= step <= skipped.last:
            steps = f"steps {skipped.first} to {skipped.last} before the rollback to step {skipped.back_to}"
            print(f"{steps}: {plural(len(skipped.rows), 'sequence')}, skipped since then")
            _print_rows(history, history.rows(stretch, skipped.rows), texts)


def _print_rows(history: History, rows: list[BatchRow], texts: bool) -> None:
    print("sequence  epoch  document  tokens of the document       file")
    for row in rows:
        file, label = history.file(row.source), history.label(row.source)
        for document, first, last in row.spans:
            begin, end = (int(at) for at in file.doc_offsets[document : document + 2])
            tokens = f"{first - begin:,} to {last - begin:,} of {end - begin:,}"
            print(f"{row.row:8}  {row.epoch:5}  {document:8}  {tokens:27}  {label}")
            if texts:
                print(render_tokens(file, first, last, load_file_tokenizer(file)[0]))


def print_readings(history: History, source: int, spans: list[tuple[int, int]]) -> None:
    """Print when the run reads spans in a source's file, (first, last) of their tokens."""
    with progress(history.count_rows(source)) as advance:
        readings = history.find_readings(source, spans, advance)
    file, label = history.file(source), history.label(source)
    for (first, last), span_readings in zip(spans, readings, strict=True):
        document = int(np.searchsorted(file.doc_offsets, first, "right")) - 1
        begin = int(file.doc_offsets[document])
        past = sum(reading.step <= history.done for reading in span_readings)
        print(
            f"document {document} of {label}, tokens {first - begin:,} to {last - begin:,}: read in {plural(past, 'sequence')} "
            f"until step {history.done}, {len(span_readings) - past} to come"
        )
        for reading in span_readings[:SHOWN]:
            later = "" if reading.step <= history.done else " (to come)"
            print(f"  step {reading.step}, sequence {reading.row}, epoch {reading.epoch} of the file{later}")
        if len(span_readings) > SHOWN:
            print(f"  and {len(span_readings) - SHOWN} more")


def print_document(history: History, target: str) -> None:
    """Print when a document is read. target: FILE:N, where N counts from 0. Raises SeenError."""
    path, _, number = target.rpartition(":")
    if not path or not number.isdecimal():
        rule = "is written FILE:N, with the number of the document in the file, from 0"
        raise SeenError(f"--document = {target}: {rule}. Fix: --document={history.sources[0]['path']}:0")
    source = history.source_of(path)
    file, document = history.file(source), int(number)
    if document >= (count := file.header["documents"]):
        rule = f"the file has documents 0 to {count - 1}"
        raise SeenError(f"--document = {target}: {rule}. Fix: --document={path}:{count - 1}")
    first, last = (int(at) for at in file.doc_offsets[document : document + 2])
    print_readings(history, source, [(first, last)])


def print_text(history: History, text: str) -> None:
    """Print when the documents with a text are read, for each place of the text. Raises SeenError."""
    count, full = 0, False
    for source in range(len(history.sources)):
        file, label = history.file(source), history.label(source)
        tokenizer, note = load_file_tokenizer(file)
        if tokenizer is None:
            raise SeenError(f"--text = {text}: {label} cannot be searched: {note}")
        with progress(file.header["tokens"]) as advance:
            spans = seen.find_occurrences(file, tokenizer, text, advance)
        print_readings(history, source, spans[: max(0, SHOWN - count)])
        count += len(spans)
        full |= len(spans) == seen.MAX_OCCURRENCES
    limit = f"; the first {SHOWN} are listed" if count > SHOWN else ""
    more = " or more" if full else ""
    print(f"{plural(count, 'place')}{more} with this text in {plural(len(history.sources), 'file')}{limit}")


def print_overlap(history: History, path: Path, until: int, ngram_size: int = 0) -> None:
    """Print how many documents of a held-out file the steps up to `until` have read, exactly and by n-grams.

    ngram_size: 0 for the default of the file's tokenizer.
    """
    held_out, last = TokenFile.open(path), history.stretches[-1].last
    ngram_size = ngram_size or (seen.NGRAM_BYTES if held_out.header["tokenizer"]["name"] == "byte" else seen.NGRAM)
    if until > last:
        raise SeenError(f"--step = {until}: the run has steps 1 to {last}. Fix: --step={last}")
    sources = range(len(history.sources))
    work = sum(history.count_rows(k, until) + history.file(k).header["tokens"] for k in sources)
    with progress(work) as advance:
        overlap = seen.measure_overlap(history, held_out, until, ngram_size, advance)
    share_D = np.nan_to_num(overlap.ngrams_D)
    tense = "read" if until <= history.done else "will have read"
    print(f"{path}: {plural(len(share_D), 'document')}, compared with what steps 1 to {until} {tense}")
    print(f"  equal to a document that was read: {overlap.exact_D.sum():,}")
    print(f"  with an n-gram of {ngram_size} tokens that was read: {(share_D > 0).sum():,}")
    print(f"  with {seen.SEEN_FRACTION:.0%} of their n-grams or more: {(share_D >= seen.SEEN_FRACTION).sum():,}")
    for document in [k for k in np.argsort(-share_D, kind="stable")[:WORST].tolist() if share_D[k] > 0]:
        print(f"  document {document}: {share_D[document]:.0%} of its n-grams{', equal' if overlap.exact_D[document] else ''}")
