"""Where each process of a run is: what its watchdog publishes, and the sentence that compares them. Imports no jax."""

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxtrain.config.durations import duration
from jaxtrain.runtime.words import process_list

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


def process_states(records: Mapping[int, str], processes: Iterable[int], silent: Collection[int]) -> list[dict[str, Any]]:
    """Return where these processes are: the fields of `record`, and `silent_s`, the age of a record that has stayed the same.

    A process that has published nothing has the phase None. silent: processes that do not answer.
    """
    states = []
    for i in processes:
        state = json.loads(records[i]) if i in records else {"step": None, "phase": None, "seconds": 0.0, "waits_at": None}
        silent_s = max(time.time() - state.pop("time", math.inf), 0.0)
        states.append({"process": i, **state, "silent_s": silent_s if i in silent else None})
    return states


def describe_states(states: Sequence[Mapping[str, Any]], name: Callable[[int], str]) -> str:
    """Return one sentence on where the processes are, without its full stop; "" if none has published anything.

    Those for which others may wait come first: a process that does not answer, then one that is not in the exchange in which
    others are, then one in an earlier step, or at work on the host while others may wait for their devices.

    states: from `process_states`. name: returns a process with its host and pid.
    """
    if all(state["phase"] is None for state in states):
        return ""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for state in states:
        step, phase, answers = state["step"], state["phase"], state["silent_s"] is None and state["phase"] is not None
        rank = answers, state["waits_at"] is not None, step or 0, phase == "step"
        groups.setdefault((*rank, phase or "", state["waits_at"] or ""), []).append(state)
    ordered = sorted(groups.items(), key=lambda item: (item[0][:4], len(item[1])))
    return "; ".join(_describe_group(group, name if i == 0 else None) for i, (_, group) in enumerate(ordered))


def _describe_group(group: Sequence[Mapping[str, Any]], name: Callable[[int], str] | None) -> str:
    """Return the part of the sentence on processes that are at the same place. name: names a process that is alone there."""
    first, is_single = group[0], len(group) == 1
    subject, has = process_list([state["process"] for state in group]), "has" if is_single else "have"
    if is_single and name is not None:
        subject = name(first["process"])
    if first["phase"] is None:
        return f"{subject} {has} not published anything"
    location = f"in phase {first['phase']}" if first["step"] is None else f"in step {first['step']}, phase {first['phase']}"
    if first["waits_at"]:
        location += f", at the exchange {first['waits_at']!r}"
    if first["silent_s"] is not None:
        return f"{subject} {has} not answered for {duration(max(state['silent_s'] for state in group))}, last {location}"
    verb = ("waits" if is_single else "wait") if first["waits_at"] else ("is" if is_single else "are")
    return f"{subject} {verb} {location}, for {duration(max(state['seconds'] for state in group))}"
