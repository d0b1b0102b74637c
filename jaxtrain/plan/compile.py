"""Compile a run's train step for GPUs that need not be present.

A plan reads the scheduled program and XLA's buffer assignment. It never runs the step.
"""

import contextlib
import dataclasses
import functools
import gc
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config.schema import RunConfig
from jaxtrain.plan import topology as machines
from jaxtrain.plan.cudnn_library import CudnnLibrary
from jaxtrain.plan.program import assignment, hlo
from jaxtrain.plan.topology import Topology
from jaxtrain.step import compiler
from jaxtrain.step.memory import compile_to_fit
from jaxtrain.step.program import Program, build_program

# Kernels of a plan never run. Without a GPU, autotuning would compile every candidate and choose the first, which takes more
# than half of a plan's time. Optimizing their machine code has no effect either. Instructions, schedule and buffers stay the
# same.
NO_TUNING: dict[str, str | bool] = {
    "xla_gpu_experimental_enable_fusion_autotuner": False,
    "xla_gpu_disable_gpuasm_optimizations": True,
}
# Stands in for ptxas, which XLA starts once for each of some 200 kernels. The result is a file without machine code.
ASSEMBLER = """#!/bin/sh
if [ "$1" = --version ]; then exec {ptxas} --version; fi
while [ "$1" != -o ]; do shift; done
echo > "$2"
"""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A train step that is compiled for a topology, with everything that a plan reads from it."""

    program: Program  # its run has the policy that remat.policy=auto chose
    auto: bool  # whether the config has remat.policy=auto
    executable: jax.stages.Compiled
    text: str  # the scheduled program of one device, as HLO
    module: hlo.Module  # the parsed `text`
    buffers: bytes  # XLA's HloProto, with the buffer assignment
    workspace: assignment.Workspace  # of cuDNN's attention in `module`
    assigned: assignment.Assignment  # read from `buffers`, with `workspace`
    chosen: compiler.XlaOptions  # the compiler options that training would use
    card: compiler.CardMemory
    seconds: float


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch off Python's cyclic garbage collector inside a block or a decorated function.

    Tracing and parsing a program create millions of objects that stay alive. The collector would scan them and free nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_garbage_collection()
def compile_step(run: RunConfig, topology: Topology, cudnn: CudnnLibrary | None = None) -> CompiledStep:
    """Compile the train step of a run as training on this topology would, except for the options NO_TUNING.

    With remat.policy=auto, compile again with fewer saved activations until the step fits or saves only layer inputs.

    Args:
      cudnn: cuDNN's library, from which XLA gets the workspaces of attention for GPUs that are not present; None: plans compute
        these workspaces by formula.

    Raises ConfigError for a config that cannot be trained, RuntimeError without XLA's GPU compiler.
    """
    program = build_program(run, machines.devices(topology))
    card = compiler.make_card(topology.memory_gib, run.train.memory_fraction)
    chosen = compiler.choose_options(program, card)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # Only a dump contains the buffer assignment: on GPUs, the executable's own copy is empty. A later compile takes equal
        # kernels from the cache.
        dump_options: dict[str, str | bool] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_proto": True,
            "xla_gpu_kernel_cache_file": str(Path(folder) / "kernels"),
        }
        extra = NO_TUNING | dump_options
        if topology.description:
            extra |= _make_stub_toolkit(Path(folder) / "cuda") | (cudnn.options(topology.gpu.sm) if cudnn else {})

        @functools.cache
        def parse_executable(executable: Any) -> tuple[str, hlo.Module, bytes, assignment.Workspace, assignment.Assignment]:
            text = executable.as_text()
            if text is None:
                raise RuntimeError("this jaxlib gives no text of a compiled GPU program")
            module, buffers = hlo.parse_hlo(text), _newest_dump(folder)
            workspace = assignment.read_workspace(module, chosen.options)
            return text, module, buffers, workspace, assignment.read_assignment(buffers, workspace.unassigned)

        def allocated_gib(executable: Any) -> float:
            return parse_executable(executable)[-1].allocated / 2**30

        program, executable = compile_to_fit(program, chosen.options, card.usable_gib, extra=extra, taken=allocated_gib)
        parsed = parse_executable(executable)
    seconds = time.perf_counter() - began
    return CompiledStep(program, run.remat.policy == "auto", executable, *parsed, chosen, card, seconds)


def _make_stub_toolkit(folder: Path) -> dict[str, str | bool]:
    """Make a CUDA folder with ASSEMBLER and the toolkit's libdevice, and return the options with which XLA uses this folder.

    Where the file system of `folder` runs no programs, XLA finds the toolkit's own ptxas instead.
    """
    toolkit = machines.cuda_toolkit()
    (folder / "bin").mkdir(parents=True)
    (folder / "nvvm").symlink_to(toolkit / "nvvm")
    ptxas = folder / "bin" / "ptxas"
    ptxas.write_text(ASSEMBLER.format(ptxas=shlex.quote(str(toolkit / "bin" / "ptxas"))), encoding="utf-8")
    ptxas.chmod(0o700)
    return {"xla_gpu_cuda_data_dir": str(folder)}


def _newest_dump(folder: str) -> bytes:
    """Return the serialized HloProto, with the buffer assignment, of the program that was dumped last."""
    dumps = sorted(Path(folder).glob("*after_optimizations.hlo.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not dumps:
        raise RuntimeError("XLA dumped no buffer assignment; is xla_dump_to set in XLA_FLAGS?")
    return dumps[-1].read_bytes()
