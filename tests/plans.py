"""Train steps compiled ahead of time for a GPU topology, and their plans. They need no GPU, but the `plan` extra.

Each step and each plan is made once in a process.
"""

import functools
import importlib.util

from jaxtrain.config import launch
from jaxtrain.config.schema import RunConfig
from jaxtrain.data import loading
from jaxtrain.plan.compile import CompiledStep, compile_step
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.program import hlo
from jaxtrain.plan.rates import datasheet
from jaxtrain.plan.result import Plan
from jaxtrain.plan.topology import parse_topology

# The tests are not skipped if the plugin is missing. On Linux every environment that run.sh makes has the plugin, and these
# tests prove that the layouts are as the docs describe them.
assert importlib.util.find_spec("jax_plugins"), "the CUDA plugin is not installed: ./run.sh test installs the plan extra"

LLAMA, TINY = "configs/llama3_8b.py", "configs/tiny.py"
TWO = "model.num_layers=2"  # compiles in a tenth of the time of all 32 layers
ONE_EACH = ("train.global_batch=8", "train.grad_accum=1")  # one sequence for each of 8 GPUs
LOOP = "parallel.scan_layers=true"
FULL = ("remat.policy=full", "remat.tensors=", LOOP)


def config(*overrides: str, of: str = LLAMA) -> RunConfig:
    """Return the run of a config file with overrides KEY=VALUE."""
    loaded = loading.load_config([f"--config={launch.REPO / of}", *(f"--config.{o}" for o in overrides)])
    assert not loaded.problems, loaded.problems
    return loaded.run


@functools.cache
def _compiled(machine: str, overrides: tuple[str, ...], of: str) -> tuple[RunConfig, CompiledStep]:
    run = config(*overrides, of=of)
    return run, compile_step(run, parse_topology(machine))


@functools.cache
def _plan(machine: str, overrides: tuple[str, ...], of: str, experts_load: float) -> Plan:
    run, step = _compiled(machine, overrides, of)
    topology = parse_topology(machine)
    return read_plan(step, topology, rates=datasheet(topology.gpu, run.precision), name=of, experts_load=experts_load)


def compiled(machine: str, *overrides: str, of: str = LLAMA) -> tuple[RunConfig, CompiledStep]:
    """Return a run, and its train step compiled for a machine."""
    return _compiled(machine, overrides, of)


def module(machine: str, *overrides: str, of: str = LLAMA) -> hlo.Module:
    """Return the compiled program of a run as a parsed HLO module."""
    return compiled(machine, *overrides, of=of)[1].module


def plan(machine: str, *overrides: str, of: str = LLAMA, experts_load: float = 1.0) -> Plan:
    """Return the plan of a run at published kernel rates."""
    return _plan(machine, overrides, of, experts_load)
