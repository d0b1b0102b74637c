"""What a step holds on each device, and what to say when that is too much."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax

from jaxtrain.config import RunConfig
from jaxtrain.hardware import HOST_LIMIT
from jaxtrain.metrics import memory as measured
from jaxtrain.step import Program


class OutOfMemory(RuntimeError):
    """The step does not fit on the devices. Carries the whole explanation."""


def size(gib: float) -> str:
    """Bytes in the unit that shows their digits."""
    return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"


def memory_by_class(program: Program, compiled: Any) -> dict[str, float]:
    """GiB on one device: parameters, optimizer state, batch; the compiler's temporaries; and the peak of all together."""

    def held(tree: Any) -> float:
        shards = (math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))
        return sum(shards) / 2**30

    analysis = compiled.memory_analysis()
    classes = {
        "parameters": held(program.state.params),
        "optimizer state": held(program.state.optimizer),
        "batch": held(program.batch),
        "temporaries": analysis.temp_size_in_bytes / 2**30,
    }
    # XLA's CPU compiler reports a peak that leaves its own temporaries out; what it says there is no peak.
    if program.placement.mesh.devices.flat[0].platform != "cpu":
        classes["peak"] = analysis.peak_memory_in_bytes / 2**30
    return classes


def taken_gib(compiled: Any) -> float:
    """GiB that a compiled step takes on one device: the peak, and the gaps of the compiler's heap, which is taken whole."""
    a = compiled.memory_analysis()
    return (a.argument_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes + a.temp_size_in_bytes) / 2**30


def explain_memory(run: RunConfig, memory: dict[str, float], limit: str) -> str:
    """What the step holds, and the settings that would help, most effective first."""
    hints = []
    if run.train.grad_accum < run.train.global_batch:
        hints.append(f"train.grad_accum above {run.train.grad_accum}: smaller microbatches, fewer saved activations")
    if run.remat.policy != "full":
        hints.append("remat.policy=full: keep each layer's input only")
    if run.remat.every == 1 and run.model.num_layers > 8:
        hints.append("remat.every=2 or more: keep every second layer's input only")
    if run.dtypes.m == "f32":
        hints.append("dtypes.m=bf16: half of the first moment")
    hints.append("mesh.fsdp or mesh.tensor over more devices: parameters and moments are split further")
    sizes = (
        ""
        if not memory
        else "\nIt holds, per device:\n" + "\n".join(f"  {name:<18}{size(gib):>12}" for name, gib in memory.items())
    )
    ways = "\n".join(f"  {hint}" for hint in hints)
    return f"out of memory: the train step needs more than {limit}.{sizes}\nWhat would help:\n{ways}"


def check_host_memory(program: Program, limit_gib: float) -> None:
    """Raises OutOfMemory where the copies of the state that a save makes would not fit into what the host may pin."""
    leaves = jax.tree.leaves(program.state)
    local = sum(math.prod(a.shape) * a.dtype.itemsize for a in leaves) / jax.process_count() / 2**30
    if local > limit_gib:
        raise OutOfMemory(
            f"out of host memory: a checkpoint goes there first and takes {size(local)}; {size(limit_gib)} may be pinned.\n"
            f"Set {HOST_LIMIT} higher if the host has more to give, dtypes.m and dtypes.v to bf16 for a smaller state, "
            "or use more nodes."
        )


@contextlib.contextmanager
def out_of_memory_explained(run: RunConfig, memory: dict[str, float]) -> Iterator[None]:
    """Turns the allocator's error, once and at the top, into one that a user can act on. `memory`: by class, {} if unknown."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _, peak = measured(jax.local_devices())
        limit = f"there is (measured peak {peak:.2f} GiB)" if peak else "there is"
        raise OutOfMemory(explain_memory(run, memory, limit)) from error
