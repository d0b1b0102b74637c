"""What run.sh found before Python started, as it tells in variables: the checkout, the class of the host, the preflight."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFLIGHT = "JAXTRAIN_PREFLIGHT"  # names the file in which run.sh has had the preflight of this start written


def launch(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """None for a run that run.sh did not start."""
    if "JAXTRAIN_HOST_CLASS" not in environ:
        return None
    dirty = {"yes": True, "no": False}.get(environ.get("JAXTRAIN_DIRTY", ""))
    host = environ["JAXTRAIN_HOST_CLASS"]
    return {"commit": environ.get("JAXTRAIN_COMMIT") or None, "dirty": dirty, "host_class": host, "by": "run.sh"}


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
