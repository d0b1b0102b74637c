"""Compile a run's train step for a machine that is not there, and keep all that a plan reads from it.

The result can be read, not run: the scheduled program, XLA's buffer assignment, and its count of memory.
"""

import dataclasses
import tempfile
import time
from pathlib import Path

import jax

from jaxtrain import compiler
from jaxtrain.config import RunConfig
from jaxtrain.plan import topology as machines
from jaxtrain.plan.topology import Topology
from jaxtrain.step import Program, build

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
    options: dict[str, str | bool]  # the compiler options that training would use
    card: compiler.Card
    seconds: float


def compile_step(run: RunConfig, topology: Topology) -> Compiled:
    """The train step of a run, compiled as training on that machine would compile it, but for NO_TUNING.

    Raises LayoutError or Unsupported where the config cannot be, RuntimeError where XLA's GPU compiler is not there.
    """
    program = build(run, machines.devices(topology))
    card = compiler.card(topology.memory_gib, run.train.memory_fraction)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # The buffer assignment comes in a dump only: the executable's own copy is empty on GPUs.
        dump: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        executable = compiler.compile_train(program, card, NO_TUNING | dump)
        found = sorted(Path(folder).glob("*after_optimizations.hlo.pb"))
        if len(found) != 1:
            raise RuntimeError(f"XLA dumped {len(found)} buffer assignments of one program; is xla_dump_to set in XLA_FLAGS?")
        buffers = found[0].read_bytes()
    seconds = time.perf_counter() - began
    text = executable.as_text()
    if text is None:
        raise RuntimeError("this jaxlib gives no text of a compiled GPU program")
    return Compiled(program, executable, text, buffers, compiler.options(program, card), card, seconds)
