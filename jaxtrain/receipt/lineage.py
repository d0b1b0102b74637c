"""Which attempts have made the state that a run stands at, and what the first of them began from.

An attempt reads the checkpoint of an earlier one, or that of a run in another folder (checkpoint.dir, a copied folder), or the
weights that init.from names. `loaded` of a receipt says which. An attempt that saved nothing anybody went on from, such as one
that ran out of memory at its first step, has left nothing in the state and explains nothing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.receipt.result import Difference

Attempt = Mapping[str, Any]
ORIGIN = ("init.from",)  # a path: compared by the weights that it gave, where both receipts tell


def of_checkpoint(folder: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
    """`loaded` of an attempt that goes on from a step in this folder. meta: the step's meta.json.

    `digest` follows from those of all tensors, which were compared when they were read.
    """
    digest = hashlib.sha256(json.dumps(meta["tensors"], sort_keys=True).encode()).hexdigest()
    return {"from": str(folder), "step": meta["step"], "saved_by": meta.get("receipt"), "digest": digest}


def of_weights(path: str, digest: str) -> dict[str, Any]:
    """`loaded` of an attempt that begins with the weights of init.from."""
    return {"from": path, "step": None, "saved_by": None, "digest": digest}


def beginning(attempt: Attempt) -> dict[str, Any] | None:
    """What this attempt read its first state from; None for nothing."""
    step = attempt.get("resumed_from_step")
    if "loaded" in attempt or step is None:
        return attempt.get("loaded")
    return {"from": None, "step": step, "saved_by": None, "digest": None}


def lineage(attempts: Sequence[Attempt]) -> tuple[list[Attempt], dict[str, Any] | None]:
    """(the attempts whose steps are in the newest one's state, oldest first; what the first of them read, None for nothing).

    attempts: of one receipt, oldest first. Of those that say nothing of `loaded`, as jaxtrain once wrote them, each goes on
    from the one before.
    """
    at = len(attempts) - 1
    out = [attempts[at]]
    while True:
        loaded = beginning(out[0])
        if "loaded" in out[0]:
            by = loaded["saved_by"] if loaded else None
            earlier = [i for i in range(at) if by is not None and attempts[i].get("id") == by]
        else:
            earlier = [at - 1] if at and loaded else []
        if not earlier:
            return out, loaded
        at = earlier[0]
        out.insert(0, attempts[at])


def differences(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> list[Difference]:
    """Of what two runs began from. By digest where both tell one, else by the step; never by the place."""
    told = [one["digest"] if one and one["digest"] else None for one in (a, b)]
    steps = [one["step"] if one else None for one in (a, b)]
    same = told[0] == told[1] if all(told) else bool(a) == bool(b) and steps[0] == steps[1]
    return [] if same else [Difference("data", "first state", described(a), described(b))]


def described(origin: Mapping[str, Any] | None) -> str:
    """What a run began from, in words."""
    if origin is None:
        return "made from train.seed"
    what = "the weights" if origin["step"] is None else f"step {origin['step']}"
    where = f" of {origin['from']}" if origin["from"] else ""
    return what + where + (f", digest {origin['digest'][:12]}" if origin["digest"] else "")
