"""Workspace of cuDNN's attention during its backward pass.

A program that XLA compiled beside cuDNN (on a GPU, or with `plan.cudnn_library`) has it as the last result of each call,
u8[bytes]. Without cuDNN that result is u8[0], and a formula gives it (kernels.attention.cudnn.workspace_bytes).
"""

import dataclasses
from collections.abc import Mapping

from jaxtrain import installed
from jaxtrain.kernels.attention.cudnn import workspace_bytes
from jaxtrain.plan.program import hlo
from jaxtrain.plan.program.assignment import ALLOCATE, FREE, Assignment, AssignmentError, Event, Value, device_heap, replay

BACKWARD = "__cudnn$fmhaSoftmaxBackward"
DETERMINISTIC = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")  # each asks cuDNN for such a kernel


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Workspace of cuDNN's backward calls on one device. Each call has its own while it runs."""

    bytes: Mapping[str, int]  # of each call, by the instruction's name
    by: str  # "formula", or "cudnn 9.19.0" if the program has it

    @property
    def largest(self) -> int:
        """Bytes; 0 in a program without such calls."""
        return max(self.bytes.values(), default=0)


def read(module: hlo.Module, options: Mapping[str, str | bool]) -> Workspace:
    """Return the workspace of a compiled program. Raises HloError for a call whose operands have unknown shapes.

    Args:
      options: the compiler's. Deterministic kernels have another workspace.
    """
    deterministic = any(options.get(name) in (True, "true") for name in DETERMINISTIC)
    said, counted = {}, {}
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.attributes.get("custom_call_target", "").strip('"') == BACKWARD:
                said[i.name] = hlo.leaves(i.type)[-1].bytes
                counted[i.name] = _count(i, [computation.by_name[o].type for o in i.operands], deterministic)
    if any(said.values()):
        version = installed.version("nvidia-cudnn-cu12") or installed.version("nvidia-cudnn-cu13") or ""
        return Workspace(said, f"cudnn {'.'.join(version.split('.')[:3])}".strip())
    return Workspace(counted, "formula")


def _count(call: hlo.Instruction, operands: list[hlo.Type], deterministic: bool) -> int:
    """Return the bytes by the shapes of queries and keys, (B, T, N, H), and of softmax's statistics, (E, N, T)."""
    shapes = [o.dims for o in operands[:4] if isinstance(o, hlo.Shape)]
    if [len(dims) for dims in shapes] != [4, 4, 4, 3]:
        raise hlo.HloError(f"{call.name}: not queries, keys, values and statistics of softmax: {shapes}")
    (_, T, N, H), (_, S, K, _), _, (E, *_) = shapes
    return workspace_bytes(E, T, S, N, K, H, deterministic=deterministic)


def placed(assignment: Assignment, workspace: Workspace) -> Assignment:
    """Return the assignment with workspaces by formula in its heap, each from the call's beginning to its end.

    The heap's gaps are assumed to stay as they are. Nothing changes if the program has its workspaces itself. Raises
    AssignmentError for a call without a result in the heap.
    """
    if workspace.by != "formula" or not workspace.bytes:
        return assignment
    heap = device_heap(assignment)
    results = {e.instruction: at for at, e in enumerate(heap) if e.kind != FREE}  # the last of each instruction
    if lost := workspace.bytes.keys() - results.keys():
        raise AssignmentError(f"{min(lost)}: a call of cuDNN's backward pass with no result in the heap")
    calls = {results[name]: name for name in workspace.bytes}
    values, events = dict(assignment.values), []
    for at, event in enumerate(heap):
        events.append(event)
        if at in calls:
            made = Value(max(values) + 1, workspace.bytes[calls[at]], calls[at], (3,), 0)
            values[made.id] = made
            events += [Event(kind, made.id, made.instruction, 0) for kind in (ALLOCATE, FREE)]
    wider = dataclasses.replace(assignment, values=values)
    growth = max(held for held, _ in replay(wider, events)) - max(held for held, _ in replay(assignment, heap))
    held_here = {e.value for e in heap}
    allocations = list(assignment.allocations)
    at = next(n for n, a in enumerate(allocations) if not held_here.isdisjoint(a.values))
    allocations[at] = dataclasses.replace(
        allocations[at],
        size=allocations[at].size + growth,
        values=(*allocations[at].values, *(values.keys() - assignment.values)),
    )
    heaps = tuple(tuple(events) if h is heap else h for h in assignment.heaps)
    return Assignment(values, tuple(allocations), heaps)


def growth_gib(before: Assignment, after: Assignment) -> float:
    """Return by how many GiB `placed` enlarged the allocated memory."""
    return (sum(a.size for a in after.allocations) - sum(a.size for a in before.allocations)) / 2**30
