"""A token file in words: figures, rows of training, and its first documents."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxtrain.config.numbers import plural
from jaxtrain.config.schema import Data
from jaxtrain.data import tokenfile
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.documents import PrepareError
from jaxtrain.data.windows import PackedRows, PairRows, make_batch, open_windows

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
ROW_TOKENS = 1 << 20  # tokens of the rows that are built at a time


def describe(path: Path, header: dict) -> str:
    tokenizer = header["tokenizer"]
    pairs = " in pairs" if header["made"].get(tokenfile.PAIRS) else ""
    return (
        f"{path}: {plural(header['tokens'], 'token')} ({header['dtype'].replace('<u2', 'uint16').replace('<u4', 'uint32')}), "
        f"{plural(header['documents'], 'document')}{pairs}, {header['source_bytes']:,} bytes of text, "
        f"tokenizer {tokenizer['name']} ({tokenizer['vocab_size']:,} ids, sha256 {tokenizer['sha256'][:12]})"
    )


def describe_loss_tokens(header: dict) -> str:
    tokens = header["loss"]["tokens"]
    return f"{tokens:,} tokens ({tokens / max(1, header['tokens']):.2%}) count in the loss"


def rows_in_words(file: tokenfile.TokenFile, seq_len: int, max_segments: int) -> Iterator[str]:
    """Yield lines with figures of the rows that training with data.packing=documents reads. Builds all rows."""
    windows = open_windows(file, seq_len, max_segments, Data().seed)
    if not windows.windows:
        yield f"packed into rows of {seq_len:,}: no row"
        return
    loss_tokens = segments = full = 0
    step = max(1, ROW_TOKENS // seq_len)
    for first in range(0, windows.windows, step):
        batch = make_batch(*windows.rows(np.arange(first, min(first + step, windows.windows))), True, max_segments)
        loss_tokens += np.count_nonzero(batch["weights"])
        segments += batch["segments"].max(axis=1).sum()
        full += np.count_nonzero(batch["segments"])
    rows, total = windows.windows, windows.windows * seq_len
    summary = f"{rows:,} rows, {segments / rows:.2f} documents a row, {loss_tokens / total:.2%} of the targets count"
    if not isinstance(windows, PackedRows):
        masked = f"{1 - full / total:.2%} of the tokens masked beyond {max_segments} documents"
        yield f"packed into rows of {seq_len:,}: {summary}, {masked}"
        return
    capacity = f"{max_segments // 2} pairs" if file.pairs else f"{max_segments} conversations"
    yield f"packed into rows of {seq_len:,}: {summary}, rows are {full / total:.2%} full (at most {capacity} each)"
    if isinstance(windows, PairRows):
        yield f"pairs of more than {seq_len + 1:,} tokens, which are left out: {windows.left_out:,}"
    else:
        lost = f"{windows.truncated:,}, which lose {windows.truncated_tokens:,} tokens"
        yield f"conversations cut to fit {seq_len + 1:,} tokens: {lost}"


def render_tokens(file: tokenfile.TokenFile, first: int, last: int, tokenizer: tokenizers.Tokenizer | None) -> str:
    """Return tokens first..last-1 as text, as ids if `tokenizer` is None. ⟦ and ⟧ enclose tokens that the loss leaves out."""

    def decode(ids: np.ndarray) -> str:
        return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))

    tokens = file.tokens[first:last]
    if file.loss_bits is None:
        return decode(tokens)
    flags = file.loss_flags(first, last)
    borders = np.flatnonzero(np.diff(flags)) + 1
    runs = zip(np.split(tokens, borders), np.split(flags, borders), strict=True)
    texts = [(decode(run), counts[0]) for run, counts in runs if run.size]
    return "".join(text if counts else f"⟦{text}⟧" for text, counts in texts)


def load_file_tokenizer(file: tokenfile.TokenFile) -> tuple[tokenizers.Tokenizer | None, str]:
    """Return (tokenizer that made the file, ""), or (None, the reason) if the tokenizer cannot be loaded or has changed."""
    recorded = file.header["tokenizer"]
    try:
        tokenizer = tokenizers.load_tokenizer(recorded["name"], recorded["eot"])
    except tokenizers.TokenizerError as e:
        return None, f"{e}; ids are shown"
    if tokenizer.sha256 != recorded["sha256"]:
        return None, "the tokenizer of that name is another one now; ids are shown"
    return tokenizer, ""


def show_document(file: tokenfile.TokenFile, i: int, tokenizer: tokenizers.Tokenizer | None) -> None:
    first, last = int(file.doc_offsets[i]), int(file.doc_offsets[i + 1])
    pair = f", {('chosen', 'rejected')[i % 2]} of pair {i // 2}" if file.pairs else ""
    print(f"--- document {i}{pair}: tokens {first:,} to {last:,}")
    print(render_tokens(file, first, min(last, first + 200), tokenizer))


def show_file(path: Path, documents: int = 2, seq_len: int = 0, max_segments: int = 0) -> None:
    """Print figures and the first documents of a token file.

    Args:
        documents: number of documents whose beginning is printed.
        seq_len: also print how full the rows of training are with this data.seq_len; 0: not.
        max_segments: data.max_segments of these rows.

    Raises:
        PrepareError: max_segments excludes the pairs of the file.
        TokenFileError: the file cannot be read.
    """
    file = tokenfile.TokenFile.open(path)
    if file.pairs and max_segments == 1:
        rule = "the two members of a pair are documents of one sequence"
        raise PrepareError(f"--max-segments = 1: {rule}. Fix: give 2 or more, or leave it out")
    print(describe(path, file.header))
    print("made from: " + ", ".join(file.header["sources"]))
    if file.header["loss"]:
        print(f"{describe_loss_tokens(file.header)}; the others are shown between ⟦ and ⟧")
    if count := file.header["documents"]:
        sizes = np.percentile(np.diff(file.doc_offsets[:]), PERCENTILES, method="inverted_cdf").tolist()
        shown = ", ".join(f"{p}%: {size:,}" for p, size in zip(PERCENTILES, sizes, strict=True))
        print(f"document length in tokens: mean {file.header['tokens'] / count:,.1f}; percentiles {shown}")
    if seq_len:
        print(*rows_in_words(file, seq_len, Data(max_segments=max_segments).most_documents), sep="\n")
    tokenizer, note = load_file_tokenizer(file)
    if note:
        print(note)
    if chat := file.header["made"].get("chat"):
        ends = [tokenizer.decode([i]) or str(i) if tokenizer else str(i) for i in file.header["turn_ends"]]
        print(f"chat template: {chat['name']}; the turns that count end with {', '.join(ends) or 'no token'}")
    for i in range(min(documents, file.header["documents"])):
        show_document(file, i, tokenizer)
