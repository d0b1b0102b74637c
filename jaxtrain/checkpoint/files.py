"""Digests of a checkpoint's files: sizes and CRC-32, written when a step is complete, and checked without any device.

The digests of files detect truncation, deletion or changed bytes after a save. The digests of arrays (checkpoint/digests.py),
which every restore compares, also detect errors between a device and the files.
"""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint.storage import DIGESTS, Storage, Unreachable, in_threads

if TYPE_CHECKING:
    from etils import epath

NAME = DIGESTS
FileDigests = dict[str, tuple[int, str]]  # path within the step -> bytes, CRC-32 in hexadecimal


@dataclasses.dataclass(frozen=True)
class FileVerdict:
    """The result of a check. problems: a line for each wrong file. proved: whether the step has integrity.json."""

    proved: bool
    problems: tuple[str, ...]
    bytes: int  # read


def list_step_files(folder: "epath.Path") -> list[str]:
    """Return every file of a step except integrity.json, as sorted paths relative to the step's folder."""
    return sorted(name for name in Storage(folder).files(folder) if name != NAME)


def crc32(path: "epath.Path", progress: Callable[[int], None] = lambda _: None) -> tuple[int, str]:
    """Return (bytes, CRC-32) of a file. progress: called with the number of bytes of each block read."""
    size = crc = 0
    for block in Storage(path).blocks(path):
        crc = zlib.crc32(block, crc)
        size += len(block)
        progress(len(block))
    return size, f"{crc:08x}"


def digest_files(folder: "epath.Path", names: Sequence[str]) -> FileDigests:
    """Return name -> (bytes, CRC-32) of the files `names` of a step. Raises OSError if a file cannot be read."""
    return dict(zip(names, in_threads(lambda name: crc32(folder / name), names), strict=True))


def encode_digests(digests: Mapping[str, Sequence[Any]]) -> str:
    """Return the text of integrity.json. digests: path of a file within the step -> (bytes, CRC-32)."""
    return to_sealed_json({"format": 1, "files": {name: list(digests[name]) for name in sorted(digests)}})


def to_sealed_json(record: Mapping[str, Any]) -> str:
    """Return a record as JSON, with the field `seal` added: the SHA-256 of all other fields."""
    return json.dumps({**record, "seal": _seal(record)}, indent=1) + "\n"


def unseal(text: str | bytes) -> dict[str, Any]:
    """Return the record of a text that `to_sealed_json` made. Raises ValueError without a seal, or if it was changed later."""
    record = json.loads(text)
    if not isinstance(record, dict) or "seal" not in record:
        raise ValueError("no JSON object with a seal")
    seal = record.pop("seal")
    if seal != _seal(record):
        raise ValueError("it was changed after it was written: its contents do not match its seal")
    return record


def _seal(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def check_files(folder: "epath.Path", progress: Callable[[int], None] = lambda _: None) -> FileVerdict:
    """Compare the files of a step with its integrity.json. Files that are not in integrity.json are ignored.

    Raises OSError only if the folder cannot be listed or the bucket cannot be reached.
    """
    try:
        recorded: Mapping[str, Any] = unseal(Storage(folder).read(folder / NAME))["files"]
    except FileNotFoundError:
        return FileVerdict(False, (), 0)
    except Unreachable:
        raise
    except (OSError, ValueError, KeyError) as error:
        return FileVerdict(True, (f"{NAME}: cannot be read ({error})",), 0)
    existing = set(list_step_files(folder))

    def check_file(name: str) -> tuple[str, int]:
        size, crc = recorded[name]
        if name not in existing:
            return f"{name}: is missing", 0
        try:
            actual_size, actual_crc = crc32(folder / name, progress)
        except Unreachable:
            raise
        except OSError as error:
            return f"{name}: cannot be read ({error.strerror})", 0
        if actual_size != size:
            return f"{name}: has {actual_size:,} bytes, was written with {size:,}", actual_size
        return (f"{name}: its contents were changed (CRC-32 {actual_crc}, was {crc})" if actual_crc != crc else ""), actual_size

    results = in_threads(check_file, sorted(recorded))
    problems = tuple(text for text, _ in results if text)
    return FileVerdict(True, problems, sum(size for _, size in results))
