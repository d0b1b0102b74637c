"""Mixture files (`NAME.mix`): token files with their weights, and what they held when the mixture was written.

JSON: {"format": "jaxtrain mixture", "version": 1, "files": [{"path", "weight", "tokens", "content_sha256"}, ...]}; paths are
relative to the file's folder, weights sum to 1.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from jaxtrain.commands import spelled
from jaxtrain.data.tokenfile import TokenFile, TokenFileError
from jaxtrain.data.verify import verify as verify_file

FORMAT = "jaxtrain mixture"
VERSION = 1
SUFFIX = ".mix"


class MixtureError(ValueError):
    """A mixture that cannot be written or read; the message names it."""


def weigh(named: list[tuple[str, float | None]], by: str, temperature: float) -> list[tuple[TokenFile, float]]:
    """The files, opened, with weights that sum to 1. Raises MixtureError, TokenFileError or FileNotFoundError.

    `by` "weight": those that are given; "tokens": in proportion to each file's tokens, times a weight where one is given.
    `temperature` T raises them to the power 1/T (Arivazhagan et al. 2019, arXiv:1907.05019): 1 leaves them as they are, more
    brings them nearer to each other.
    """
    if not 0 < temperature < math.inf:
        raise MixtureError(f"--temperature={temperature}: is a number above 0; 1 leaves the weights as they are")
    found: list[tuple[TokenFile, float]] = []
    for path, weight in named:
        if by == "weight" and weight is None:
            raise MixtureError(f"{path}: has no weight. Write {path}=0.5, for example, or give --by=tokens.")
        if weight is not None and not 0 < weight < math.inf:
            raise MixtureError(f"{path}={weight}: a weight is a number above 0")
        file = TokenFile.open(path)
        if any(os.path.samefile(file.path, other.path) for other, _ in found):
            raise MixtureError(f"{path}: is named twice; add up its weights")
        share = (1.0 if weight is None else weight) * (file.header["tokens"] if by == "tokens" else 1)
        if not share:
            raise MixtureError(f"{path}: holds no tokens")
        found.append((file, share))
    if len({file.header["tokenizer"]["sha256"] for file, _ in found}) > 1:
        listed = "; ".join(f"{file.path}: {file.header['tokenizer']['name']}" for file, _ in found)
        raise MixtureError(f"the files were made with several tokenizers ({listed})")
    logs = [math.log(share) / temperature for _, share in found]
    powers = [math.exp(log - max(logs)) for log in logs]
    return [(file, power / math.fsum(powers)) for (file, _), power in zip(found, powers, strict=True)]


def write(output: Path, weighed: list[tuple[TokenFile, float]]) -> None:
    """Appears under its name when it is whole. Raises MixtureError."""
    if output.suffix != SUFFIX:
        raise MixtureError(f"--output={output}: the name of a mixture ends in {SUFFIX}")
    folder = output.parent.resolve()
    files = [
        {
            "path": os.path.relpath(file.path.resolve(), folder),
            "weight": weight,
            "tokens": file.header["tokens"],
            "content_sha256": file.header["content_sha256"],
        }
        for file, weight in weighed
    ]
    folder.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f"{output.name}.{os.getpid()}")
    part.write_text(json.dumps({"format": FORMAT, "version": VERSION, "files": files}, indent=1) + "\n")
    part.replace(output)


def read(path: Path | str) -> list[dict[str, Any]]:
    """`path` (as it can be opened from here), `weight`, `tokens` and `content_sha256` of each file.

    Raises MixtureError or FileNotFoundError.
    """
    path = Path(path).expanduser()
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise MixtureError(f'{path}: is not a mixture (no "format": "{FORMAT}")')
        if found["version"] != VERSION:
            raise MixtureError(f"{path}: version {found['version']} of the format; this program reads version {VERSION}")
        files = [{**entry, "path": os.path.normpath(path.parent / entry["path"])} for entry in found["files"]]
        for entry in files:
            if not (0 < entry["weight"] < math.inf and isinstance(entry["content_sha256"], str) and entry["tokens"] > 0):
                raise MixtureError(f"{path}: {entry['path']}: weight {entry['weight']} is not a number above 0")
        if not files:
            raise MixtureError(f"{path}: names no files")
    except (KeyError, TypeError, ValueError) as e:
        if isinstance(e, MixtureError):
            raise
        raise MixtureError(f"{path}: is not a whole mixture ({type(e).__name__}: {e}). Write it again with: mix") from e
    return files


def open_checked(mixture: Path | str, entry: dict[str, Any]) -> TokenFile:
    """A file of a mixture, if it holds what it held then. Raises MixtureError, TokenFileError or FileNotFoundError."""
    file = TokenFile.open(entry["path"])
    if file.header["content_sha256"] != entry["content_sha256"]:
        raise MixtureError(
            f"{entry['path']}: is not the file that {mixture} was written for ({file.header['tokens']:,} tokens, then "
            f"{entry['tokens']:,}; the content differs). Write the mixture again with: {spelled('python -m jaxtrain.data mix')}"
        )
    return file


def table(weighed: list[tuple[TokenFile, float]], tokens: int) -> list[tuple[str, int, float, float]]:
    """(path, tokens, weight, epochs in `tokens` tokens of the mixture) of each file."""
    return [(str(f.path), f.header["tokens"], weight, tokens * weight / f.header["tokens"]) for f, weight in weighed]


def verify(path: Path | str) -> list[str]:
    """What is wrong with the mixture and with its files, a line each. Reads all of them."""
    faults = []
    try:
        entries = read(path)
    except (MixtureError, OSError) as e:
        return [str(e)]
    for entry in entries:
        try:
            open_checked(path, entry)
            faults += verify_file(entry["path"])
        except (MixtureError, TokenFileError, OSError) as e:
            faults.append(str(e))
    return faults
