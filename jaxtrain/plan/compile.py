"""Compile a run's train step for a machine that is not there, and keep all that a plan reads from it.

The result can be read, not run: the scheduled program, XLA's buffer assignment, and its count of memory.
"""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import RunConfig
from jaxtrain.plan import topology as machines
from jaxtrain.plan.cudnn_library import Library
from jaxtrain.plan.program import assignment, hlo, workspace
from jaxtrain.plan.topology import Topology
from jaxtrain.train import compiler
from jaxtrain.train.memory import compile_to_fit, taken_gib
from jaxtrain.train.program import Program, build

# A run's compiler times several ways to write each fusion's kernel. Without a GPU it would compile them all the same and take
# the first: more than half of a plan's seconds, for kernels that nobody runs. Instructions, schedule and buffers stay the same.
NO_TUNING: dict[str, str | bool] = {"xla_gpu_experimental_enable_fusion_autotuner": False}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A train step, compiled for a described machine."""

    program: Program
    executable: jax.stages.Compiled
    text: str  # the scheduled program of one device, as HLO
    buffers: bytes  # XLA's HloProto, with the buffer assignment
    chosen: compiler.Chosen  # the compiler options that training would use
    card: compiler.Card
    run: RunConfig  # with remat.policy=auto, what that came to
    seconds: float


def compile_step(run: RunConfig, topology: Topology, cudnn: Library | None = None) -> Compiled:
    """The train step of a run, compiled as training on that machine would compile it, but for NO_TUNING.

    With remat.policy=auto, compiles until the saved activations fit. cudnn: asked for the workspaces of attention; None: the
    formula gives them.

    Raises LayoutError or Unsupported where the config cannot be, RuntimeError where XLA's GPU compiler is not there.
    """
    program = build(run, machines.devices(topology))
    card = compiler.card(topology.memory_gib, run.train.memory_fraction)
    chosen = compiler.choose(program, card)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # The buffer assignment comes in a dump only: the executable's own copy is empty on GPUs.
        dump: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        asked = cudnn.options(topology.description) if cudnn and topology.description else {}

        def taken(executable: Any) -> float:
            before = assignment.read(_newest_dump(folder))
            after = workspace.placed(before, workspace.read(hlo.parse(executable.as_text()), chosen.options))
            return taken_gib(executable) + workspace.growth_gib(before, after)

        extra = NO_TUNING | asked | dump
        run, program, executable = compile_to_fit(run, program, chosen.options, card.usable_gib, extra=extra, taken=taken)
        buffers = _newest_dump(folder)
    seconds = time.perf_counter() - began
    text = executable.as_text()
    if text is None:
        raise RuntimeError("this jaxlib gives no text of a compiled GPU program")
    return Compiled(program, executable, text, buffers, chosen, card, run, seconds)


def _newest_dump(folder: str) -> bytes:
    """The buffer assignment of what was compiled last."""
    found = sorted(Path(folder).glob("*after_optimizations.hlo.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise RuntimeError("XLA dumped no buffer assignment; is xla_dump_to set in XLA_FLAGS?")
    return found[-1].read_bytes()
