"""Where each process of a run is: what its watchdog publishes, and the sentence that compares them. Imports no jax."""

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxtrain.config.durations import duration
from jaxtrain.runtime.words import listed

PUBLISH_S = 2.0  # between two records of a process
SILENT_S = 5.0  # a process whose record stays the same for this long does not answer


def record(step: int | None, phase: str, seconds: float, waits_at: str | None) -> str:
    """Return what a process publishes.

    Args:
      step: the step that it takes, counted from 1; None before the first.
      phase: of its main thread. seconds: in this phase, or since the last progress within it.
      waits_at: the exchange of messages in which it waits for the other processes.
    """
    return json.dumps({"step": step, "phase": phase, "seconds": seconds, "waits_at": waits_at, "time": time.time()})


def places(records: Mapping[int, str], processes: Iterable[int], silent: Collection[int]) -> list[dict[str, Any]]:
    """Return where these processes are: the fields of `record`, and `silent_s`, the age of a record that has stayed the same.

    A process that has published nothing has the phase None. silent: processes that do not answer.
    """
    found = []
    for i in processes:
        place = json.loads(records[i]) if i in records else {"step": None, "phase": None, "seconds": 0.0, "waits_at": None}
        silent_s = max(time.time() - place.pop("time", math.inf), 0.0)
        found.append({"process": i, **place, "silent_s": silent_s if i in silent else None})
    return found


def in_words(found: Sequence[Mapping[str, Any]], name: Callable[[int], str]) -> str:
    """Return one sentence on where the processes are, without its full stop; "" if none has published anything.

    Those for which others may wait come first: a process that does not answer, then one that is not in the exchange in which
    others are, then one in an earlier step, or at work on the host while others may wait for their devices.

    found: from `places`. name: returns a process with its host and pid.
    """
    if all(place["phase"] is None for place in found):
        return ""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for place in found:
        step, phase, answers = place["step"], place["phase"], place["silent_s"] is None and place["phase"] is not None
        rank = answers, place["waits_at"] is not None, step or 0, phase == "step"
        groups.setdefault((*rank, phase or "", place["waits_at"] or ""), []).append(place)
    ordered = sorted(groups.items(), key=lambda item: (item[0][:4], len(item[1])))
    return "; ".join(_in_words(group, name if i == 0 else None) for i, (_, group) in enumerate(ordered))


def _in_words(group: Sequence[Mapping[str, Any]], name: Callable[[int], str] | None) -> str:
    """Return the part of the sentence on processes that are at the same place. name: names a process that is alone there."""
    first, one = group[0], len(group) == 1
    who, has = listed([place["process"] for place in group]), "has" if one else "have"
    if one and name is not None:
        who = name(first["process"])
    if first["phase"] is None:
        return f"{who} {has} not published anything"
    where = f"in phase {first['phase']}" if first["step"] is None else f"in step {first['step']}, phase {first['phase']}"
    if first["waits_at"]:
        where += f", at the exchange {first['waits_at']!r}"
    if first["silent_s"] is not None:
        return f"{who} {has} not answered for {duration(max(place['silent_s'] for place in group))}, last {where}"
    verb = ("waits" if one else "wait") if first["waits_at"] else ("is" if one else "are")
    return f"{who} {verb} {where}, for {duration(max(place['seconds'] for place in group))}"
