"""Which part of the model an operation of a compiled program belongs to, which kind of work it is, and how much of it.

The part is the named scope that the operation was traced under (`jax.named_scope` in the step and the models; a user's own
scopes count too). What the compiler makes up has none: a fusion takes that of the operations in it, anything else that of what
it is made for, and failing that of what it is made from.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

from jaxtrain.plan.program import roofline
from jaxtrain.plan.program.collectives import Found
from jaxtrain.plan.program.hlo import Computation, HloError, Instruction, Module
from jaxtrain.plan.program.op_cost import FREE, FUSIONS, Work, is_collective
from jaxtrain.profile.result import NO_SCOPE

CONTROL = ("while", "conditional", "call")  # their own time is that of what they run
ONCE = ("optimizer", "gather", "reduce", "accumulate")  # parts that belong to no pass
_KIND = {
    "gemm": "GEMM",
    "attention": "attention",
    "memory": "elementwise",
    "communication": "collectives",
    "host": "host copies",
}
_COPIES = frozenset(("copy", "transpose", "bitcast", "reshape", "copy-start", "parameter", "tuple"))
# Kernels of a GPU that the program does not name, by their own names.
_KERNELS = (
    (re.compile(r"nccl", re.I), "collectives"),
    (re.compile(r"memcpyH2D|memcpyD2H", re.I), "host copies"),
    (re.compile(r"memcpy|memset", re.I), "copies"),
    (re.compile(r"fmha|flash|attention|sdpa", re.I), "attention"),
    (re.compile(r"gemm|cutlass|cublas|nvjet|xmma", re.I), "GEMM"),
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """What is known of an operation."""

    kind: str
    part: str
    phase: str
    label: str
    source: str
    work: Work | None = None  # of one launch; None where it is not known


def part_of(op_name: str) -> str:
    """`mlp`, `loss`, `layers` (what the loop over layers itself does), ...; "" for an operation without a scope."""
    last = op_name.rsplit("/", 1)[-1]
    found = [p for p in roofline.path(op_name) if "->" not in p]  # an einsum's own text is a scope of its own
    if found and found[-1] in (last, last.rstrip(")")) or "/(" in op_name:
        found = found[:-1]  # what is done, not where
    inner = [p for p in found if p != roofline.STACK]
    return (inner or found or [""])[0]


def phase_of(op_name: str) -> str:
    """Which pass an operation belongs to; "" outside of them."""
    if part_of(op_name) in ONCE:
        return ""
    op_name = roofline.first(op_name)
    if "rematted_computation" in op_name:
        return "recompute"
    return "backward" if "transpose(" in op_name else "forward"


def by_kernel(kernel: str) -> Origin:
    """Of what runs without the program saying so: known by the kernel's name alone."""
    kind = next((kind for pattern, kind in _KERNELS if pattern.search(kernel)), "elementwise")
    return Origin(kind, "data" if kind == "host copies" else NO_SCOPE, "", kernel[:120], "")


def origins(module: Module, wires: Mapping[str, Found]) -> tuple[dict[str, Origin], tuple[str, ...]]:
    """(operation -> origin, for all that can be an event of a trace; which of them have work that cannot be counted, and why).

    `wires`: what each collective sends (`collectives.by_instruction`).
    """
    inner = {c for made in module.computations.values() for i in made.instructions if i.opcode in FUSIONS for c in i.called}
    found, unread = {}, []
    for where in module.computations.values():
        if where.name in inner:
            continue
        users = _users(where)
        for i in where.instructions:
            ends = i.opcode.endswith(("-done", "-update"))  # of what ran beside the program, which its start stands for
            if i.opcode in FREE or i.opcode in CONTROL or ends:
                continue
            try:
                done = roofline.cost(module, where, i, wires)
            except HloError as error:
                done = None
                unread.append(str(error))
            name, source = _named(module, where, users, i)
            part = part_of(name) or NO_SCOPE
            label = roofline.label(name) or re.sub(r"[.\d]+$", "", i.name)
            phase = phase_of(name) if part != NO_SCOPE else ""
            found[i.name] = Origin(_kind(module, i, done), part, phase, label, i.source or source, done)
    return found, tuple(unread)


def _kind(module: Module, i: Instruction, done: Work | None) -> str:
    if is_collective(module, i):
        return "collectives"
    kind = _KIND[done.kind] if done else by_kernel(i.attributes.get("custom_call_target", i.name)).kind
    inside = [j for c in i.called for j in module.computations[c].instructions] if i.opcode in FUSIONS else [i]
    return "copies" if kind == "elementwise" and all(j.opcode in _COPIES for j in inside) else kind


def _named(module: Module, where: Computation, users: Mapping[str, list[Instruction]], i: Instruction) -> tuple[str, str]:
    """(op_name with a scope, or "" where there is none; source)."""
    own = functools.partial(_own, module)
    if (found := own(i))[0]:
        return found
    for neighbours in (lambda j: users.get(j.name, ()), lambda j: [where.by_name[o] for o in j.operands]):
        for j in _reach(i, neighbours):
            if (found := own(j))[0]:
                return found
    return "", i.source


def _own(module: Module, i: Instruction) -> tuple[str, str]:
    """An instruction's name and source, or those of what it fuses: a GEMM's before others', the last one's before those."""
    if part_of(i.op_name):
        return i.op_name, i.source
    inside = [j for c in i.called for j in module.computations[c].instructions if part_of(j.op_name)]
    inside.sort(key=lambda j: j.opcode in ("dot", "custom-call"))
    return (inside[-1].op_name, inside[-1].source) if inside and i.opcode in FUSIONS else ("", "")


def _reach(i: Instruction, neighbours) -> Iterator[Instruction]:
    """What is reached from an instruction, nearest first."""
    seen, now = {i.name}, [i]
    while now:
        behind = []
        for j in now:
            for k in neighbours(j):
                if k.name not in seen:
                    seen.add(k.name)
                    behind.append(k)
                    yield k
        now = behind


def _users(where: Computation) -> dict[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = {}
    for i in where.instructions:
        for operand in i.operands:
            found.setdefault(operand, []).append(i)
    return found
