"""Where each process of a run is: what its watchdog publishes, and the sentence that compares them. Imports no jax."""

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping

from jaxtrain.config.durations import duration
from jaxtrain.runtime.words import listed

PUBLISH_S = 1.0  # between two records of a process
SILENT_S = 3.0  # a process whose record stays the same for this long does not answer


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process is. A process that has published nothing has no phase."""

    process: int
    step: int | None = None  # that it takes, counted from 1; None before the first
    phase: str | None = None  # of its main thread
    seconds: float = 0.0  # in this phase, or since the last progress within it
    waits_at: str | None = None  # the exchange of messages in which it waits for the other processes
    silent_s: float | None = None  # since its last record; None if it still publishes


def places(texts: Mapping[int, str], count: int, silent: Collection[int]) -> list[Place]:
    """Return the places of all processes, from their records. silent: processes that do not answer."""
    found = []
    for i in range(count):
        record = json.loads(texts.get(i, "{}"))
        published = record.pop("time", None)
        silent_s = None if published is None or i not in silent else max(time.time() - published, 0.0)
        found.append(Place(i, **record, silent_s=silent_s))
    return found


def in_words(found: Collection[Place], name: Callable[[int], str]) -> str:
    """Return one sentence on where the processes are, without its full stop; "" if none has published anything.

    Those for which others may wait come first: a process that does not answer, then one that is not in the exchange in which
    others are, then one in an earlier step, or at work on the host while others may wait for their devices.

    name: returns a process with its host and pid.
    """
    if all(place.phase is None for place in found):
        return ""
    groups: dict[tuple[object, ...], list[Place]] = {}
    for place in found:
        groups.setdefault((place.silent_s is None, place.step, place.phase, place.waits_at), []).append(place)

    def rank(group: list[Place]) -> tuple[bool, bool, float, bool, int]:
        place = group[0]
        answers = place.silent_s is None and place.phase is not None
        return answers, place.waits_at is not None, -1 if place.step is None else place.step, place.phase == "step", len(group)

    return "; ".join(_group_in_words(group, name) for group in sorted(groups.values(), key=rank))


def _group_in_words(group: list[Place], name: Callable[[int], str]) -> str:
    place, one = group[0], len(group) == 1
    who = listed([each.process for each in group])
    if place.phase is None:
        return f"{who} {'has' if one else 'have'} not published where {'it is' if one else 'they are'}"
    where = f"in phase {place.phase}" if place.step is None else f"in step {place.step}, phase {place.phase}"
    if place.waits_at:
        where += f", at the exchange {place.waits_at!r}"
    if place.silent_s is not None:
        who, silent_s = name(place.process) if one else who, max(each.silent_s or 0.0 for each in group)
        return f"{who} {'has' if one else 'have'} not answered for {duration(silent_s)}, last {where}"
    verb = ("waits" if one else "wait") if place.waits_at else ("is" if one else "are")
    return f"{who} {verb} {where}, for {duration(max(each.seconds for each in group))}"
