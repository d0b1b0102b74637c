"""What the processes of a run tell each other before they start: their devices, and the problems that one of them has found."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config.hardware import WITHOUT_GPUS, Devices
from jaxtrain.config.schema import Problem
from jaxtrain.runtime.service import LEAVE_S, ClusterError
from jaxtrain.runtime.words import first_line, process_list, this_process

ANSWER_S = 60.0  # of connected processes, which answer at once


def agree(devices: Devices, problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems for which the run is refused, on this process: empty on all processes, or on none.

    All processes of the run call it once, after `connect`. If their devices differ, that is the only problem, because other
    problems may follow from it. A process without a problem of its own gets one that names a process with problems. If the
    result is not empty, end this process next, by `leave`.

    Args:
      devices: those of the run, from `all_devices`.
      problems: those that this process has found.

    Raises:
      ClusterError: a process does not answer.
    """
    from jax._src import distributed  # its state has no public name

    state: Any = distributed.global_state
    problem_texts = [(str(dataclasses.replace(problem, remedy="")).rstrip(". "), problem.remedy) for problem in problems]
    view = {
        "who": this_process(),
        "kind": devices.kind,
        "count": devices.node,
        "source": devices.source,
        "problems": problem_texts,
    }
    silent, view_texts = 0, []
    try:
        state.client.key_value_set(f"jaxtrain/agree/{state.process_id}", json.dumps(view))
        for silent in range(state.num_processes):
            view_texts.append(state.client.blocking_key_value_get(f"jaxtrain/agree/{silent}", int(1000 * ANSWER_S)))
    except RuntimeError as error:
        failure = f"process {state.process_id}: process {silent} has connected, and does not answer"
        raise ClusterError(f"{failure}: {first_line(error)}") from error
    refused = refusal([json.loads(text) for text in view_texts], problems)
    if refused:
        with contextlib.suppress(RuntimeError):  # a process has ended: nobody else waits for this one
            state.client.wait_at_barrier("jaxtrain/refused", int(1000 * ANSWER_S))
        if state.process_id == 0:
            time.sleep(LEAVE_S)
    return refused


def refusal(views: Sequence[Mapping[str, Any]], local_problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems of this process, from what each process tells (as in `agree`) and its own problems."""
    kinds: dict[tuple[str, int], list[int]] = {}
    for i, view in enumerate(views):
        if view["count"]:  # a process without devices has a problem that says why
            kinds.setdefault((view["kind"], view["count"]), []).append(i)
    if len(kinds) > 1:
        return [_unequal(views, kinds)]
    if local_problems:
        return list(local_problems)
    for i, view in enumerate(views):
        if view["problems"]:
            (text, remedy), *more = view["problems"]
            rule = f"refuses to start, so this process does too: {text}" + (f" (and {len(more)} more)" if more else "")
            return [Problem(f"process {i} ({view['who']})", None, rule, remedy)]
    return []


def _unequal(views: Sequence[Mapping[str, Any]], kinds: Mapping[tuple[str, int], Sequence[int]]) -> Problem:
    mixed = len({kind for kind, _ in kinds}) > 1
    words = []
    for (kind, count), processes in kinds.items():
        first = views[processes[0]]
        noun = ("CPU device" if kind == "cpu" else "GPU") + ("s" if count > 1 else "")
        host = first["who"] if len(processes) == 1 else f"the first on {first['who']}"
        words.append(f"{process_list(processes)} ({host}): {count} {noun}" + (f" ({first['source']})" if mixed else ""))
    least = min(count for _, count in kinds)
    if mixed:
        remedy = f"Run ./run.sh preflight on a node of each kind, or {WITHOUT_GPUS}, in all processes."
    elif next(iter(kinds))[0] == "cpu":
        remedy = f"Set JAX_NUM_CPU_DEVICES={least} in every process."
    else:
        remedy = f"Give every process {least}, by CUDA_VISIBLE_DEVICES."
    return Problem("devices", None, f"the processes of this run have different devices ({'; '.join(words)})", remedy)
