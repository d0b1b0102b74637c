"""receipt.json as a file: its format, reading it, and how earlier attempts are kept short.

Most of what an attempt has in common with the next one (the config, the digests of the source, the packages) would stand there
again and again. So an earlier attempt keeps only what differs, and `same_as_next` names what was left out; `attempts` puts it
back.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

NAME = "receipt.json"
FORMAT = 2
READ = (1, FORMAT)  # format 1: no digests of the source, no config, no facts on the GPUs, no figures

# What an earlier attempt may leave out. Of a field whose parts change on their own, each part counts for itself.
REPEATED = ("packages", "environment", "resolved", "overrides", "devices", "ranks", "data", "eval_data", "host", "launch")
REPEATED_IN_PARTS = ("source", "versions", "hardware", "env", "preflight", "speed")


class ReceiptError(ValueError):
    """receipt.json cannot be read."""


def now() -> str:
    """Local time with its offset, to the second, as ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def load(path: str | Path) -> dict[str, Any]:
    """A receipt from its file. Raises ReceiptError naming the file where it is none, or of a later format."""
    try:
        receipt = json.loads(Path(path).read_text())
        version, attempts = receipt["format"], receipt["attempts"]
    except (ValueError, KeyError, TypeError) as error:
        raise ReceiptError(f"{path}: not a receipt ({error!r}). {_instead(Path(path))}") from error
    if version not in READ or not isinstance(attempts, list):
        known = " and ".join(str(v) for v in READ)
        raise ReceiptError(f"{path}: format {version!r}, this jaxtrain reads {known}. Use the version that wrote it.")
    return receipt


def _instead(path: Path) -> str:
    if path.name == NAME:
        return "Move it away, and the run writes a new one."
    return "Name a run's folder (--workdir of training), or a receipt file."


def shortened(attempt: Mapping[str, Any], following: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier attempt without what the one after it says too."""
    out, same = dict(attempt), []
    for name in REPEATED:
        if name in out and name in following and out[name] == following[name]:
            del out[name]
            same.append(name)
    for name in REPEATED_IN_PARTS:
        parts, others = out.get(name), following.get(name)
        if isinstance(parts, dict) and isinstance(others, dict):
            equal = [key for key in parts if key in others and parts[key] == others[key]]
            out[name] = {key: value for key, value in parts.items() if key not in equal}
            same += [f"{name}.{key}" for key in equal]
    return out | {"same_as_next": same}


def attempts(receipt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All attempts of a receipt, oldest first and the newest last, each with all that it is known to have been."""
    newest = {name: value for name, value in receipt.items() if name != "attempts"}
    out = [newest]
    for short in reversed(receipt["attempts"]):
        full = dict(short)
        for name in full.pop("same_as_next", ()):
            field, _, part = name.partition(".")
            full[field] = {**full.get(field, {}), part: out[0][field][part]} if part else out[0][field]
        out.insert(0, full)
    return out
