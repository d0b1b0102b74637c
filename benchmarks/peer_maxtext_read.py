"""Read the figures of any compiled step, as plans do, from its HLO, XLA's buffer assignment and its memory sizes.

benchmarks/peer_maxtext.py compiles the steps of MaxText and jaxtrain, and writes NAME.hlo, NAME.pb and NAME.json for each.
"""

import ast
import dataclasses
import functools
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.models import flops
from jaxtrain.plan import result
from jaxtrain.plan.program import assignment, collectives, hlo, roofline
from jaxtrain.plan.rates import datasheet
from jaxtrain.plan.topology import Topology

REPO = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Read:
    """Figures of a compiled step: milliseconds, GiB of memory and GB of traffic, of one GPU and one step."""

    peak_gib: float
    arguments_gib: float
    taken_gib: float  # allocated memory: arguments and heap
    timed: roofline.Roofline
    moved: tuple[result.Collective, ...]
    memory_gb: float  # memory traffic of memory-bound kernels
    wire_gb: float
    mfu: float
    held: tuple[tuple[float, str], ...]  # (GiB, description) of the heap's buffers at the peak, largest first
    facts: dict[str, Any]


def read(at: Path, name: str, machine: Topology, per_token: float, tokens: int) -> Read:
    """Return the figures of the step in NAME.hlo, NAME.pb and NAME.json of the folder `at`.

    Args:
      machine: one node, whose GPUs are the mesh axis fsdp.
      per_token: model FLOPs of a token.
      tokens: tokens of one GPU in a step.

    Raises HloError if a file cannot be parsed, OSError if a file is missing.
    """
    facts = json.loads((at / f"{name}.json").read_text())
    module = hlo.parse_hlo((at / f"{name}.hlo").read_text())
    found = collectives.read_collectives(module, {"fsdp": machine.total}, machine.gpus)
    timed = roofline.predict(module, datasheet(machine.gpu, "bf16"), found)
    return Read(
        peak_gib=facts["peak"] / 2**30,
        arguments_gib=facts["arguments"] / 2**30,
        taken_gib=(facts["arguments"] + facts["temp"]) / 2**30,
        timed=timed,
        moved=timed.collectives,
        memory_gb=sum(k.gb for k in timed.kernels if k.kind == "memory"),
        wire_gb=sum(m.wire_gib for m in timed.collectives) * 2**30 / 1e9,
        mfu=flops.mfu(per_token, tokens / timed.step_ms * 1e3, machine.gpu.peak("bf16")) or 0.0,
        held=_held(assignment.read_assignment((at / f"{name}.pb").read_bytes()), module),
        facts=facts,
    )


def _held(read: assignment.Assignment, module: hlo.Module) -> tuple[tuple[float, str], ...]:
    """Return (GiB, operation and source line) of the buffers at the peak, largest first, without the program's arguments."""
    most, fullest = -1, {}
    for bytes_alive, alive in assignment.replay(read):
        if bytes_alive > most:
            most, fullest = bytes_alive, {at: tuple(values) for at, values in alive.items()}
    sums: dict[str, float] = defaultdict(float)
    for at, values in fullest.items():
        # Values that are updated in place share memory. A loop's parameter has no source line, so another value is preferred.
        makers = [(module.instruction(v.instruction), v.index) for v in map(read.values.get, values) if v]
        told = next((maker for maker in makers if maker[0].source), makers[0])
        sums[_what(*told)] += read.values[at].size / 2**30
    return tuple(sorted(((gib, what) for what, gib in sums.items()), reverse=True))


def _what(i: hlo.Instruction, index: Sequence[int]) -> str:
    part: Any = i.type
    for n in index:
        part = part[n] if isinstance(part, tuple) and n < len(part) else part
    shape = f"{part.dtype}[{','.join(map(str, part.dims))}]" if isinstance(part, hlo.Shape) else ""
    made_up = "state of a loop" if i.opcode in ("parameter", "while") else re.sub(r"[.\d]+$", "", i.name)
    return f"{shape} {roofline.op_label(i.op_name) or made_up} {place(i.source)}".strip()


def place(source: str) -> str:
    """Return file:line for the page; for files of jaxtrain only the file, because line numbers change with each commit."""
    return source.rpartition(":")[0] if source.startswith("jaxtrain/") else source


# (part of a step, pattern of a memory-bound kernel's label, source line and enclosing function), for jaxtrain and MaxText
# 0.2.5. The first match counts.
PARTS = (
    ("norms and residual", r"RMSNorm|kernels/norm\.py|normalizations\.py"),
    ("rotary", r"kernels/rope\.py|embeddings\.py:2\d\d\b"),
    ("optimizer, norms of gradients, clipping", r"^optimizer|optax/|max_utils\.py:1\d\d\b"),
    ("loss and head", r"^loss|max_utils\.py:6\d\d\b|nnx_decoders\.py:16\d\d\b"),
    (
        "weights and stacks: casts, slices, fills",
        r"convert_element_type|dot_general|dynamic_|layer_loop|nnx_decoders|concatenate_f",
    ),
    ("SwiGLU", r"SwiGLU|linears\.py:8\d\d\b"),
    ("around attention", r"attention"),
    ("copies and transposes made by the compiler", r"^copy|transpose"),
)


def part(kernel: result.KernelSummary) -> str:
    """Return the part of a step that a memory-bound kernel belongs to."""
    text = f"{kernel.op_name} {kernel.source} {_function(kernel.source)}"
    return next((name for name, form in PARTS if re.search(form, text)), "others")


@functools.cache
def _function(source: str) -> str:
    """Return the names of class and function that contain a file:line of jaxtrain; "" for other files."""
    name, _, line = source.rpartition(":")
    if not name.startswith("jaxtrain/"):
        return ""
    around = [n for n in ast.walk(ast.parse((REPO / name).read_text())) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    return ".".join(n.name for n in around if n.lineno <= int(line) <= (n.end_lineno or n.lineno))
