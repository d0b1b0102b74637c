"""Digests of a checkpoint's files: sizes and CRC-32, written when a step is complete, and checked without any device.

They find what happened to the files since: cut off, emptied, deleted, changed. What happened to values on their way from a
device into the files shows in the digests of the arrays (jaxtrain/digests.py), which a restore checks in any case.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint import place
from jaxtrain.checkpoint.errors import Unreachable

if TYPE_CHECKING:
    from jaxtrain.checkpoint.place import AnyPath

NAME = place.DIGESTS
PIECE = 1 << 22
THREADS = 8  # crc32 runs outside the interpreter's lock, at 2 to 6 GB/s each

Found = dict[str, tuple[int, str]]  # path within the step -> bytes, CRC-32 in hexadecimal


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a check found. `problems`: one line each, naming the file. `proved`: whether there were digests to check by."""

    proved: bool
    problems: tuple[str, ...]
    bytes: int  # read


def listed(folder: "AnyPath") -> list[str]:
    """Every file of a step but the digests themselves, as paths within it, sorted."""
    return sorted(name for name in place.at(folder).files(folder) if name != NAME)


def crc32(path: "AnyPath", told: Callable[[int], None] = lambda _: None) -> tuple[int, str]:
    """(bytes, CRC-32) of a file. told: called with the bytes of each piece that was read."""
    size = crc = 0
    with place.at(path).opened(path) as file:
        while piece := file.read(PIECE):
            crc = zlib.crc32(piece, crc)
            size += len(piece)
            told(len(piece))
    return size, f"{crc:08x}"


def measure(folder: "AnyPath", names: Sequence[str], told: Callable[[int], None] = lambda _: None) -> Found:
    """Sizes and digests of these files of a step, several at a time. Raises OSError for one that cannot be read."""
    with concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: crc32(folder / name, told), names), strict=True))


def encode(found: Mapping[str, Sequence[Any]]) -> str:
    """The text of integrity.json."""
    return sealed({"format": 1, "files": {name: list(found[name]) for name in sorted(found)}})


def sealed(record: Mapping[str, Any]) -> str:
    """JSON that says of itself whether it is whole: `seal` is the SHA-256 of all the rest."""
    return json.dumps({**record, "seal": _seal(record)}, indent=1) + "\n"


def unsealed(text: str | bytes) -> dict[str, Any]:
    """The record of a text that `sealed` made. Raises ValueError where it is none, or was changed."""
    record = json.loads(text)
    if not isinstance(record, dict) or "seal" not in record:
        raise ValueError("no JSON object with a seal")
    seal = record.pop("seal")
    if seal != _seal(record):
        raise ValueError("it was changed after it was written: its contents do not match its seal")
    return record


def _seal(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def check(folder: "AnyPath", told: Callable[[int], None] = lambda _: None) -> Verdict:
    """Whether the files of a step are those that were written.

    Raises OSError only where the folder itself cannot be listed, or its bucket be reached.
    """
    try:
        wanted: Mapping[str, Any] = unsealed(place.at(folder).read(folder / NAME))["files"]
    except FileNotFoundError:
        return Verdict(False, (), 0)
    except Unreachable:
        raise
    except (OSError, ValueError, KeyError) as error:
        return Verdict(True, (f"{NAME}: cannot be read ({error})",), 0)
    there = set(listed(folder))

    def problem(name: str) -> tuple[str, int]:
        size, crc = wanted[name]
        if name not in there:
            return f"{name}: is gone", 0
        try:
            now, found = crc32(folder / name, told)
        except Unreachable:
            raise
        except OSError as error:
            return f"{name}: cannot be read ({error.strerror})", 0
        if now != size:
            return f"{name}: has {now:,} bytes, was written with {size:,}", now
        return (f"{name}: its contents were changed (CRC-32 {found}, was {crc})" if found != crc else ""), now

    with concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        results = list(pool.map(problem, sorted(wanted)))
    problems = tuple(text for text, _ in results if text)
    return Verdict(True, problems, sum(size for _, size in results))
