"""The supervisor's findings before a run, from its variables: checkout, class of the host, preflight."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.runtime.variables import COMMIT, DIRTY, HOST_CLASS, PREFLIGHT


def launch(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """None for a run that run.sh did not start."""
    if HOST_CLASS not in environ:
        return None
    dirty = {"yes": True, "no": False}.get(environ.get(DIRTY, ""))
    host = environ[HOST_CLASS]
    return {"commit": environ.get(COMMIT) or None, "dirty": dirty, "host_class": host, "by": "run.sh"}


def preflight(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What preflight found, whole; None where there was none."""
    path = environ.get(PREFLIGHT)
    if not path:
        return None
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        return {"error": f"{PREFLIGHT}={path}: {error}"}


def without_the_usual(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The same with only the names of checks that are ok: a receipt is written anew at every save, and nodes are many."""
    if not found:
        return None
    nodes = [{**node, "checks": [_short(check) for check in node.get("checks", ())]} for node in found.get("nodes", ())]
    return {**found, "nodes": nodes} if nodes else dict(found)


def _short(check: Mapping[str, Any]) -> dict[str, Any]:
    return {name: check[name] for name in ("name", "state")} if check.get("state") == "ok" else dict(check)
