"""The compiled program of a trace: kind, part and work of its operations, and its planned step.

The part of an operation is its `jax.named_scope`, set in the step, in jaxtrain's models, or in your own model. Operations that
the compiler adds have no scope. A fusion without a scope gets the scope of its matmul, else of its last operation. Any other
operation without a scope gets the scope of its nearest user, else of its nearest operand.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from jaxtrain.plan.program import collectives, hlo, roofline
from jaxtrain.plan.program.collectives import CollectiveOp, is_collective
from jaxtrain.plan.program.hlo import Computation, HloError, Instruction, Module
from jaxtrain.plan.program.op_cost import FREE, FUSIONS, OpCost, instruction_cost
from jaxtrain.plan.program.roofline import phase_of, scope_of
from jaxtrain.plan.result import Rates

# Kinds of time. Their sum is the step time.
KINDS: tuple[str, ...] = (
    "matmul",
    "attention",
    "memory-bound",
    "copies",
    "exposed communication",
    "exposed host copies",
    "idle",
)
LINKS: tuple[str, ...] = ("communication", "host copies")  # kinds that can overlap with computation; the rest is exposed
NO_SCOPE = "no scope"
CONTROL = ("while", "conditional", "call")  # only the operations inside of these count

_COPIES = frozenset(("copy", "transpose", "bitcast", "reshape", "copy-start", "parameter", "tuple"))
# (pattern of a kernel's name, kind), for kernels whose operation is not in the trace.
_KERNELS = (
    (re.compile(r"nccl", re.I), "communication"),
    (re.compile(r"memcpyH2D|memcpyD2H", re.I), "host copies"),
    (re.compile(r"memcpy|memset", re.I), "copies"),
    (re.compile(r"fmha|flash|attention|sdpa", re.I), "attention"),
    (re.compile(r"gemm|cutlass|cublas|nvjet|xmma", re.I), "matmul"),
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """Kind, part, pass, label and source of an operation."""

    kind: str  # one of KINDS without "exposed", or of LINKS
    part: str
    phase: str  # forward | backward | recompute | "" (once a step)
    label: str  # named scopes and operation
    source: str  # file:line
    collective: str = ""  # "all-gather over fsdp"; "" for other operations, and for NCCL kernels without such a name

    @property
    def kind_of_time(self) -> str:
        """Return the kind of KINDS in which the operation's share of the step counts."""
        return f"exposed {self.kind}" if self.kind in LINKS else self.kind

    @property
    def part_and_phase(self) -> str:
        return ", ".join(filter(None, (self.part, self.phase)))


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """The planned times of a step of the traced program, at the rates of the traced GPU."""

    step_ms: float
    by_kind: dict[str, float]  # ms; sums to step_ms
    by_part: dict[str, float]  # "part, pass" -> ms; sums to step_ms
    rates: str


@dataclasses.dataclass(frozen=True)
class TracedProgram:
    """A compiled program, with the operation and the cost of each instruction."""

    module: Module
    operations: dict[str, Operation]  # by instruction
    costs: dict[str, OpCost]  # instruction -> cost of one launch; without instructions of unknown cost
    collective_ops: dict[str, CollectiveOp]  # instruction -> its collective
    unknown: tuple[str, ...]  # reasons why costs are unknown


def read_program(text: str, mesh: Mapping[str, int], gpus: int) -> TracedProgram:
    """Return the program of a compiled module's text.

    Args:
        text: HLO of the module.
        mesh: axis -> size.
        gpus: GPUs of a node.

    Raises:
        HloError: the program cannot be read.
    """
    module = hlo.parse_hlo(text)
    program = TracedProgram(module, {}, {}, {}, ())
    unknown = []
    try:
        program.collective_ops.update(collectives.read_collectives(module, dict(mesh), gpus))
    except (HloError, ValueError) as error:
        unknown.append(f"bytes of collectives: {error}")
    inner = {c for comp in module.computations.values() for i in comp.instructions if i.opcode in FUSIONS for c in i.called}
    for computation in (c for c in module.computations.values() if c.name not in inner):
        users: dict[str, list[Instruction]] = defaultdict(list)
        for i in computation.instructions:
            for operand in i.operands:
                users[operand].append(i)
        for i in computation.instructions:
            # Only the start of an asynchronous operation counts.
            if i.opcode in FREE or i.opcode in CONTROL or i.opcode.endswith(("-done", "-update")):
                continue
            try:
                if cost := instruction_cost(module, computation, i, program.collective_ops):
                    program.costs[i.name] = cost
            except HloError as error:
                unknown.append(str(error))
            name, source = _scope(module, computation, users, i)
            part = scope_of(name) or NO_SCOPE
            phase = phase_of(name) if part != NO_SCOPE else ""
            label = roofline.op_label(name) or re.sub(r"[.\d]+$", "", i.name)
            kind = _kind(module, i, program.costs.get(i.name))
            op = program.collective_ops.get(i.name)
            collective = " over ".join(filter(None, (op.kind, op.axis))) if op else ""
            program.operations[i.name] = Operation(kind, part, phase, label, i.source or source, collective)
    return dataclasses.replace(program, unknown=tuple(unknown))


def kernel_operation(kernel: str) -> Operation:
    """Return the operation of a kernel from the kernel's name, for events whose operation is not in the program's HLO."""
    kind = next((kind for pattern, kind in _KERNELS if pattern.search(kernel)), "memory-bound")
    nccl = re.search(r"nccl\w*?_(AllGather|AllReduce|ReduceScatter|AllToAll)", kernel)
    collective = re.sub(r"\B(?=[A-Z])", "-", nccl[1]).lower() if nccl else ""
    return Operation(kind, "data" if kind == "host copies" else NO_SCOPE, "", kernel[:120], "", collective)


def _kind(module: Module, i: Instruction, cost: OpCost | None) -> str:
    if is_collective(module, i):
        return "communication"
    kind = roofline.KIND_OF_WORK[cost.kind] if cost else kernel_operation(i.attributes.get("custom_call_target", i.name)).kind
    inside = [j for c in i.called for j in module.computations[c].instructions] if i.opcode in FUSIONS else [i]
    return "copies" if kind == "memory-bound" and all(j.opcode in _COPIES for j in inside) else kind


def _scope(module: Module, computation: Computation, users: Mapping[str, list[Instruction]], i: Instruction) -> tuple[str, str]:
    """Return (op_name with a scope, source) of an instruction, else of its nearest user, else of its nearest operand.

    If none has a scope, op_name is "".
    """
    for neighbours in (lambda j: users.get(j.name, ()), lambda j: [computation.by_name[o] for o in j.operands]):
        for j in _nearest_first(i, neighbours):
            if scope_of(j.op_name):
                return j.op_name, j.source
            # A fusion gets the scope of its matmul, else that of its last operation.
            inside = [k for c in j.called for k in module.computations[c].instructions if scope_of(k.op_name)]
            if inside and j.opcode in FUSIONS:
                chosen = max(reversed(inside), key=lambda k: k.opcode in ("dot", "custom-call"))
                return chosen.op_name, chosen.source
    return "", i.source


def _nearest_first(i: Instruction, neighbours: Callable[[Instruction], Iterable[Instruction]]) -> Iterator[Instruction]:
    visited, order = {i.name}, [i]
    for j in order:  # `order` grows during the loop
        yield j
        new = {k.name: k for k in neighbours(j) if k.name not in visited}
        visited |= new.keys()
        order += new.values()


def plan_step(program: TracedProgram, rates: Rates) -> PlannedStep:
    """Return the planned step of a scheduled program at a GPU's rates.

    Raises:
        HloError: an operation cannot be timed.
    """
    by_kind: dict[str, float] = defaultdict(float)
    by_part: dict[str, float] = defaultdict(float)

    def record(name: str, work: str, start: float, end: float) -> None:
        operation = program.operations.get(name) or kernel_operation(name)
        waits = work.startswith(roofline.EXPOSED)
        kind = roofline.KIND_OF_WORK[work.removeprefix(roofline.EXPOSED)]
        if kind == "memory-bound" and operation.kind == "copies":
            kind = "copies"
        if waits or kind not in LINKS:
            by_kind[f"exposed {kind}" if waits else kind] += (end - start) * 1e3
            by_part[operation.part_and_phase] += (end - start) * 1e3

    timing = roofline.predict(program.module, rates, program.collective_ops, record)
    return PlannedStep(timing.step_ms, dict(by_kind), dict(by_part), rates.source)
