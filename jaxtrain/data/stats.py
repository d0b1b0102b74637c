"""`python -m jaxtrain.data stats`: what a token file holds, in memory that does not grow with it."""

import collections
import hashlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config import Data
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.data.windows import PackedRows, make_batch, masked_tokens, open_windows

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
DOCUMENTS = 1 << 18  # looked at together
HASH_BYTES = 256 << 20  # of document hashes that are sorted together
ROW_TOKENS = 1 << 20  # of windows made together


def lengths(file: TokenFile) -> tuple[np.ndarray, np.ndarray]:
    """(distinct document lengths in tokens, ascending; how many documents have each), end-of-text counted.

    N tokens have at most sqrt(2 N) distinct lengths, so this is exact and small.
    """
    counts: collections.Counter[int] = collections.Counter()
    for first in range(0, file.header["documents"], DOCUMENTS):
        values, times = np.unique(np.diff(file.doc_offsets[first : first + DOCUMENTS + 1]), return_counts=True)
        counts.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
    found = sorted(counts.items())
    return np.asarray([v for v, _ in found], np.int64), np.asarray([c for _, c in found], np.int64)


def percentiles(values: np.ndarray, counts: np.ndarray) -> dict[int, int]:
    """The smallest length that at least p percent of the documents do not exceed."""
    total = np.cumsum(counts)
    return {p: int(values[np.searchsorted(total, max(1, -(-total[-1] * p // 100)))]) for p in PERCENTILES}


def histogram(values: np.ndarray, counts: np.ndarray) -> list[tuple[int, int, int]]:
    """(from, to, documents) with borders at powers of two: lengths from..to - 1."""
    out = []
    for k in range(int(values[0]).bit_length() - 1, int(values[-1]).bit_length()):
        inside = (values >= 1 << k) & (values < 1 << (k + 1))
        out.append((1 << k, 1 << (k + 1), int(counts[inside].sum())))
    return out


def duplicates(file: TokenFile, hash_bytes: int = HASH_BYTES) -> dict[str, int]:
    """Documents whose tokens equal those of an earlier one: `documents`, and the `tokens` in them.

    By 64-bit hashes, kept in a temporary file, which is read once for each `hash_bytes` of it: two different documents
    among n have the same hash with a probability of about n^2 / 2^65.
    """
    count = file.header["documents"]
    if not count:
        return {"documents": 0, "tokens": 0}
    with tempfile.TemporaryFile() as storage:
        record = np.dtype([("hash", "<u8"), ("length", "<i8")])
        for first in range(0, count, DOCUMENTS):
            offsets = file.doc_offsets[first : first + DOCUMENTS + 1].tolist()
            rows = np.empty(len(offsets) - 1, record)
            tokens, begin = file.tokens[0:0], 0  # of many documents together, and where they begin
            for i, (a, b) in enumerate(itertools.pairwise(offsets)):
                if b > begin + len(tokens):
                    tokens, begin = file.tokens[a : max(b, a + ROW_TOKENS)], a
                digest = hashlib.blake2b(tokens[a - begin : b - begin], digest_size=8).digest()
                rows[i] = int.from_bytes(digest, "little"), b - a
            storage.write(rows.tobytes())
        storage.flush()
        stored = np.memmap(storage, record, "r", shape=(count,))
        passes = -(-count * record.itemsize // hash_bytes)
        documents = tokens = 0
        for k in range(passes):
            mine = []
            for first in range(0, count, DOCUMENTS):
                part = np.asarray(stored[first : first + DOCUMENTS])
                mine.append(part[part["hash"] % np.uint64(passes) == k])
            found = np.concatenate(mine)
            found = found[np.argsort(found["hash"], kind="stable")]
            again = np.flatnonzero(found["hash"][1:] == found["hash"][:-1]) + 1
            documents += again.size
            tokens += int(found["length"][again].sum())
    return {"documents": documents, "tokens": tokens}


def packing(file: TokenFile, seq_len: int, max_segments: int) -> dict[str, float] | None:
    """What training makes of the file with data.packing=documents, from the rows it would read; None where there is no row.

    `rows`; `counted`: part of the targets with weight; `documents_per_row`: segments, on average; `masked`: part of the tokens
    that stand behind more than `max_segments` documents of their row. Of a file with loss bits also `filled`: part of the rows
    that is no padding; `truncated_documents` and `truncated_tokens`: conversations longer than a row, and what they lose.
    """
    windows = open_windows(file, seq_len, max_segments, Data().seed)
    if not windows.windows:
        return None
    counted = segments = padding = 0
    step = max(1, ROW_TOKENS // seq_len)
    for first in range(0, windows.windows, step):
        batch = make_batch(*windows.rows(np.arange(first, min(first + step, windows.windows))), True, max_segments)
        counted += int(np.count_nonzero(batch["weights"]))
        segments += int(batch["segments"].max(axis=1).sum())
        padding += int(np.count_nonzero(batch["segments"] == 0))
    total = windows.windows * seq_len
    out = {"rows": windows.windows, "counted": counted / total, "documents_per_row": segments / windows.windows}
    if not isinstance(windows, PackedRows):
        return {**out, "masked": masked_tokens(file.doc_offsets, windows.windows, seq_len, max_segments) / total}
    truncated = {"truncated_documents": windows.truncated, "truncated_tokens": windows.truncated_tokens}
    return {**out, "masked": 0.0, "filled": 1 - padding / total, **truncated}


def stats(path: Path | str, seq_len: int, max_segments: int) -> dict[str, Any]:
    """All of it, as JSON has it. Raises TokenFileError or FileNotFoundError."""
    file = TokenFile.open(path)
    header = file.header
    out: dict[str, Any] = {
        "path": str(path),
        "tokens": header["tokens"],
        "documents": header["documents"],
        "source_bytes": header["source_bytes"],
        "tokens_with_loss": header["loss"]["tokens"] if header["loss"] else header["tokens"],
        "tokenizer": header["tokenizer"]["name"],
    }
    if header["documents"]:
        values, counts = lengths(file)
        out["mean_length"] = header["tokens"] / header["documents"]
        out["length_percentiles"] = percentiles(values, counts)
        out["length_histogram"] = histogram(values, counts)
    out["duplicates"] = duplicates(file)
    out["packing"] = {"seq_len": seq_len, "max_segments": max_segments, **(packing(file, seq_len, max_segments) or {"rows": 0})}
    return out


def sample(file: TokenFile, count: int) -> list[int]:
    """Numbers of a few documents, spread over the file, the same ones each time."""
    documents = file.header["documents"]
    return sorted({documents * (2 * i + 1) // (2 * count) for i in range(min(count, documents))})


def lines(found: dict[str, Any]) -> list[str]:
    """The figures of `stats` for people."""
    out = []
    if found["documents"]:
        shown = ", ".join(f"{p}%: {length:,}" for p, length in found["length_percentiles"].items())
        out.append(f"document length, tokens: mean {found['mean_length']:,.1f}; {shown}")
        most = max(count for *_, count in found["length_histogram"])
        for begin, end, count in found["length_histogram"]:
            out.append(f"{begin:>12,} to {end - 1:>12,} {count:>12,} {'#' * -(-40 * count // most)}")
    again = found["duplicates"]
    out.append(f"exact duplicates of an earlier document: {again['documents']:,} documents, {again['tokens']:,} tokens")
    out.append(f"tokens with loss: {found['tokens_with_loss']:,} ({found['tokens_with_loss'] / max(1, found['tokens']):.2%})")
    packed = found["packing"]
    title = f"packed into rows of {packed['seq_len']:,}"
    if not packed["rows"]:
        return [*out, f"{title}: no whole row"]
    line = (
        f"{title}: {packed['rows']:,} rows, {packed['documents_per_row']:.2f} documents a row, {packed['counted']:.2%} of the "
    )
    if "filled" not in packed:
        masked = f"{packed['masked']:.2%} of the tokens masked beyond {packed['max_segments']} documents"
        return [*out, f"{line}targets count, {masked}"]
    out.append(
        f"{line}targets count, rows are {packed['filled']:.2%} full (at most {packed['max_segments']} conversations each)"
    )
    out.append(
        f"conversations cut to fit {packed['seq_len'] + 1:,} tokens: {packed['truncated_documents']:,}, "
        f"which lose {packed['truncated_tokens']:,} tokens"
    )
    return out
