"""Compiled steps and plans for described GPUs, each made once in a process. No GPU is needed: the `plan` extra is enough."""

import functools
import importlib.util

from jaxtrain import launch
from jaxtrain.config import RunConfig
from jaxtrain.plan.compile import Compiled, compile_step
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.program import hlo
from jaxtrain.plan.rates import datasheet
from jaxtrain.plan.result import Plan
from jaxtrain.plan.topology import parse

# No skip where the plugin is missing: on Linux every environment that run.sh makes has one, and these tests are the proof that
# the layouts are what the docs say.
assert importlib.util.find_spec("jax_plugins"), "the CUDA plugin is not installed: ./run.sh test installs the plan extra"

LLAMA, TINY = "configs/llama3_8b.py", "configs/tiny.py"
TWO = "model.num_layers=2"  # a tenth of the time that all 32 layers take
ONE_EACH = ("train.global_batch=8", "train.grad_accum=1")  # sequences: one for each of 8 GPUs
LOOP = "parallel.scan_layers=true"
FULL = ("remat.policy=full", "remat.tensors=", LOOP)


def config(*overrides: str, of: str = LLAMA) -> RunConfig:
    """The run of a config file with overrides KEY=VALUE."""
    loaded = launch.load([f"--config={launch.REPO / of}", *(f"--config.{o}" for o in overrides)])
    assert not loaded.problems, loaded.problems
    return loaded.run


@functools.cache
def compiled(machine: str, *overrides: str, of: str = LLAMA) -> tuple[RunConfig, Compiled]:
    """A run, and its train step compiled for a machine."""
    run = config(*overrides, of=of)
    return run, compile_step(run, parse(machine))


@functools.cache
def module(machine: str, *overrides: str, of: str = LLAMA) -> hlo.Module:
    """The compiled program of a run."""
    return hlo.parse(compiled(machine, *overrides, of=of)[1].text)


@functools.cache
def plan(machine: str, *overrides: str, of: str = LLAMA, experts_load: float = 1.0) -> Plan:
    """The plan of a run at published kernel rates."""
    run, step = compiled(machine, *overrides, of=of)
    topology = parse(machine)
    return read_plan(step, run, topology, rates=datasheet(topology.gpu, run.precision), name=of, experts_load=experts_load)
