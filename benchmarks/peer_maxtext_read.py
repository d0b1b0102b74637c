"""Read any compiled step as a plan reads ours: its HLO, XLA's buffer assignment and its sizes.

benchmarks/peer_maxtext.py compiles such steps and says what the files of one are.
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

from jaxtrain import flops
from jaxtrain.plan import result
from jaxtrain.plan.program import assignment, collectives, hlo, roofline
from jaxtrain.plan.rates import datasheet
from jaxtrain.plan.topology import Topology

REPO = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Read:
    """A compiled step: milliseconds, GiB of memory and GB of traffic, all of one GPU and one step."""

    peak_gib: float
    arguments_gib: float
    taken_gib: float  # arguments and the whole heap
    timed: roofline.Roofline
    moved: tuple[result.Collective, ...]
    memory_gb: float  # of kernels that are neither GEMM nor attention
    wire_gb: float
    mfu: float
    held: tuple[tuple[float, str], ...]  # (GiB, what) of the heap at its fullest, largest first
    facts: dict[str, Any]


def read(at: Path, name: str, machine: Topology, per_token: float, tokens: int) -> Read:
    """Reads NAME.hlo, NAME.pb and NAME.json of a folder.

    Args:
      machine: one node, over whose GPUs everything is split (fsdp).
      per_token: model FLOPs of a token. tokens: of one GPU in a step.

    Raises HloError, AssignmentError, OSError.
    """
    facts = json.loads((at / f"{name}.json").read_text())
    module = hlo.parse((at / f"{name}.hlo").read_text())
    found = collectives.read(module, {"fsdp": machine.total}, machine.gpus)
    timed = roofline.predict(module, datasheet(machine.gpu, "bf16"), collectives.by_instruction(found))
    moved = [collectives.over_step(f, *_times(timed.collectives[f.instruction])) for f in found]
    return Read(
        peak_gib=facts["peak"] / 2**30,
        arguments_gib=facts["arguments"] / 2**30,
        taken_gib=(facts["arguments"] + facts["temp"]) / 2**30,
        timed=timed,
        moved=tuple(moved),
        memory_gb=sum(k.gb for k in timed.kernels if k.kind == "memory"),
        wire_gb=sum(m.wire_gib for m in moved) * 2**30 / 1e9,
        mfu=flops.mfu(per_token, tokens / timed.step_ms * 1e3, machine.gpu.peak("bf16")) or 0.0,
        held=_held(assignment.read((at / f"{name}.pb").read_bytes()), module),
        facts=facts,
    )


def _times(launches: roofline.Launches) -> tuple[float, float]:
    return launches.ms, launches.exposed_ms


def _held(read: assignment.Assignment, module: hlo.Module) -> tuple[tuple[float, str], ...]:
    """Return the buffers of the heap at its peak, by the Python that made them. Arguments are not in the heap."""
    most, fullest = -1, {}
    for bytes_alive, alive in assignment.replay(read, assignment.device_heap(read)):
        if bytes_alive > most:
            most, fullest = bytes_alive, {at: tuple(values) for at, values in alive.items()}
    sums: dict[str, float] = defaultdict(float)
    for at, values in fullest.items():
        # Several values share memory that is updated in place. A loop's parameter does not say where it is from.
        makers = [(module.owners[v.instruction].by_name[v.instruction], v.index) for v in map(read.values.get, values) if v]
        told = next((maker for maker in makers if maker[0].source), makers[0])
        sums[_what(*told)] += read.values[at].size / 2**30
    return tuple(sorted(((gib, what) for what, gib in sums.items()), reverse=True))


def _what(i: hlo.Instruction, index: Sequence[int]) -> str:
    part: Any = i.type
    for n in index:
        part = part[n] if isinstance(part, tuple) and n < len(part) else part
    shape = f"{part.dtype}[{','.join(map(str, part.dims))}]" if isinstance(part, hlo.Shape) else ""
    made_up = "state of a loop" if i.opcode in ("parameter", "while") else re.sub(r"[.\d]+$", "", i.name)
    return f"{shape} {roofline.label(i.op_name) or made_up} {place(i.source)}".strip()


def place(source: str) -> str:
    """Return a file:line as the page has it: of our own files without the line, which the next commit would move."""
    return source.rpartition(":")[0] if source.startswith("jaxtrain/") else source


# Parts of a step, by label, source line and enclosing function of a memory-bound kernel: ours, and those of MaxText 0.2.5. The
# first that fits.
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


def part(kernel: result.Kernel) -> str:
    """Return the part of a step that a memory-bound kernel belongs to."""
    text = f"{kernel.op_name} {kernel.source} {_function(kernel.source)}"
    return next((name for name, form in PARTS if re.search(form, text)), "others")


@functools.cache
def _function(source: str) -> str:
    """Return class and function around a file:line of ours; "" for any other."""
    name, _, line = source.rpartition(":")
    if not name.startswith("jaxtrain/"):
        return ""
    around = [n for n in ast.walk(ast.parse((REPO / name).read_text())) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    return ".".join(n.name for n in around if n.lineno <= int(line) <= (n.end_lineno or n.lineno))
