"""Whether a token file is whole: all of it read, and every fault named."""

import zlib
from pathlib import Path

import numpy as np

from jaxtrain.data.tokenfile import PREAMBLE, TokenFile, TokenFileError, read_header


def verify(path: Path | str) -> list[str]:
    """Reads all of the file. What is wrong with it, a line each; empty where nothing is."""
    path = Path(path).expanduser()
    try:
        file = TokenFile.open(path)
    except (TokenFileError, OSError) as e:
        return [str(e)]
    header, faults = file.header, []
    raw = np.memmap(path, np.uint8, "r")
    _, end = read_header(path)
    block = header["block_bytes"]
    starts = range(PREAMBLE.size, end, block)
    if len(starts) != len(header["block_crc32"]):
        faults.append(f"{path}: {len(starts)} blocks, {len(header['block_crc32'])} checksums")
    itemsize = np.dtype(header["dtype"]).itemsize
    for i, (start, crc) in enumerate(zip(starts, header["block_crc32"], strict=False)):
        stop = min(start + block, end)
        if zlib.crc32(raw[start:stop]) != crc:
            first, last = ((b - PREAMBLE.size) // itemsize for b in (start, stop))
            faults.append(
                f"{path}: block {i} (bytes {start:,} to {stop:,}, tokens {first:,} to {min(last, header['tokens']):,}) "
                "does not match its checksum"
            )
    step = block // itemsize
    vocab, seen = header["tokenizer"]["vocab_size"], 0
    for first in range(0, header["tokens"], step):
        largest = int(file.tokens[first : first + step].max())
        seen = max(seen, largest)
        if largest >= vocab:
            faults.append(f"{path}: id {largest} among tokens {first:,} to {first + step:,}; the vocabulary has {vocab}")
    if seen != header["largest_id"]:
        faults.append(f"{path}: the largest id is {seen}, the header says {header['largest_id']}")
    if header["loss"] is not None:
        counted = sum(
            int(np.count_nonzero(file.loss_flags(first, min(first + step, header["tokens"]))))
            for first in range(0, header["tokens"], step)
        )
        if counted != header["loss"]["tokens"]:
            faults.append(f"{path}: {counted:,} tokens have the loss bit, the header says {header['loss']['tokens']:,}")
    offsets = file.doc_offsets
    if offsets[0] != 0 or offsets[-1] != header["tokens"]:
        faults.append(f"{path}: documents span {offsets[0]:,} to {offsets[-1]:,}, tokens 0 to {header['tokens']:,}")
    for first in range(0, header["documents"], 1 << 20):
        part = np.asarray(offsets[first : first + (1 << 20) + 1])
        bad = np.flatnonzero(np.diff(part) <= 0)
        if bad.size:
            faults.append(f"{path}: document {first + int(bad[0]):,} ends at or before its start")
            break
        if part[0] >= 0 and part[-1] <= header["tokens"]:
            bad = np.flatnonzero(file.tokens[part[1:] - 1] != header["tokenizer"]["eot"])
            if bad.size:
                faults.append(f"{path}: document {first + int(bad[0]):,} does not end with end-of-text")
                break
    return faults
