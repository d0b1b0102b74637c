"""Whether a token file is whole: all of it read, and every fault named."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxtrain.data.tokenfile import TokenFile, TokenFileError

STEP = 1 << 20  # tokens looked at together
DOCUMENTS = 1 << 18


def verify(path: Path | str) -> list[str]:
    """Reads all of the file. What is wrong with it, a line each; empty where nothing is.

    Damaged blocks first. Only where there are none, what the file holds is compared with what its header says.
    """
    path = Path(path).expanduser()
    try:
        file = TokenFile.open(path)
        if damaged := file.blocks.faults():
            return [f"{path}: {fault}" for fault in damaged]
        file.blocks.file.look()
        return [f"{path}: {fault}" for fault in contradictions(file)]
    except (TokenFileError, OSError) as e:
        return [str(e)]


def contradictions(file: TokenFile) -> Iterator[str]:
    """Where the arrays of a file and its header say different things. Reads all of it; raises TokenFileError."""
    header, offsets = file.header, file.doc_offsets
    tokens, vocab, eot = header["tokens"], header["tokenizer"]["vocab_size"], header["tokenizer"]["eot"]
    whole = offsets[0] == 0 and offsets[-1] == tokens
    if not whole:
        yield f"documents span {offsets[0]:,} to {offsets[-1]:,}, tokens 0 to {tokens:,}"
    for first in range(0, header["documents"], DOCUMENTS):
        bad = np.flatnonzero(np.diff(offsets[first : first + DOCUMENTS + 1]) <= 0)
        if bad.size:
            whole = False
            yield f"document {first + int(bad[0]):,} ends at or before its start"
            break
    seen = counted = document = 0
    for first in range(0, tokens, STEP):
        part = file.tokens[first : first + STEP]
        last = first + len(part)
        seen = max(seen, largest := int(part.max()))
        if largest >= vocab:
            yield f"id {largest} among tokens {first:,} to {last:,}; the vocabulary has {vocab}"
        if header["loss"] is not None:
            counted += int(np.count_nonzero(file.loss_flags(first, last)))
        while whole and document < header["documents"]:
            ends = offsets[document + 1 : document + 1 + DOCUMENTS]
            here = ends[: np.searchsorted(ends, last, "right")]
            bad = np.flatnonzero(part[here - 1 - first] != eot)
            if bad.size:
                whole = False
                yield f"document {document + int(bad[0]):,} does not end with end-of-text"
            document += len(here)
            if len(here) < len(ends):
                break
    if seen != header["largest_id"]:
        yield f"the largest id is {seen}, the header says {header['largest_id']}"
    if header["loss"] is not None and counted != header["loss"]["tokens"]:
        yield f"{counted:,} tokens have the loss bit, the header says {header['loss']['tokens']:,}"
