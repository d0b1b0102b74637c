"""Compute the memory of a compiled step on each device, and name settings that reduce it if the step does not fit."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxtrain.config.hardware import HOST_LIMIT, HOST_SHARE, Devices, host_gib
from jaxtrain.config.schema import Remat, RunConfig
from jaxtrain.metrics.throughput import HasMemoryStats
from jaxtrain.metrics.throughput import memory_gib as measured
from jaxtrain.models.activations import saved_activations
from jaxtrain.step import auto_remat, compiler
from jaxtrain.step.program import Program, build_program
from jaxtrain.step.validate import validate_step, with_values


class OutOfMemory(RuntimeError):
    """A run does not fit in the memory of its devices or of its host. The message has the sizes and settings that help."""


def format_gib(gib: float) -> str:
    """Return a memory size as text: in GiB from 1 GiB on, otherwise in MiB."""
    return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"


def memory_by_class(program: Program, compiled: Any) -> dict[str, float]:
    """Return GiB on one device by class: parameters, optimizer state, batch, XLA's temporaries, and the peak of all together.

    With train.ema_decay, the average of the weights is a class too. With offloaded moments, the optimizer state is named
    "optimizer state (on the host)" and is not part of the peak. On CPUs there is no entry for the peak.
    """

    def local_gib(tree: Any) -> float:
        return compiler.local_bytes(tree) / 2**30

    analysis = compiled.memory_analysis()
    classes = {
        "parameters": local_gib(program.state.params),
        "optimizer state" + (" (on the host)" if program.offload else ""): local_gib(program.state.optimizer),
        **({"average of weights": local_gib(program.state.ema)} if program.state.ema else {}),
        "batch": local_gib(program.batch),
        "temporaries": analysis.temp_size_in_bytes / 2**30,
    }
    # XLA's CPU compiler reports a peak without its own temporaries; that figure is not a peak.
    if program.placement.mesh.devices.flat[0].platform != "cpu":
        classes["peak"] = analysis.peak_memory_in_bytes / 2**30
    return classes


def taken_gib(compiled: Any) -> float:
    """Return the allocated GiB of a compiled step on one device: arguments, new outputs, and temporaries with fragmentation."""
    a = compiled.memory_analysis()
    return (a.argument_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes + a.temp_size_in_bytes) / 2**30


def compile_to_fit(
    program: Program,
    options: dict[str, str | bool],
    usable_gib: float,
    say: Callable[[str], None] = lambda text: None,
    extra: dict[str, str | bool] | None = None,
    taken: Callable[[Any], float] = taken_gib,
) -> tuple[Program, Any]:
    """Return (program, compiled train step). With remat.policy=auto, choose the least recomputation that fits.

    The returned step may still be too big: the caller checks its memory. usable_gib: memory of one device, inf if unknown. say:
    writes a line to the log. extra: further options of XLA, for example for dumps. taken: returns the allocated GiB of a
    compiled step.
    """
    auto = program.run.remat.policy == "auto"
    while True:
        compiled = compiler.compile_train(program, options, extra)
        smaller_run = reduce_saved(program, taken(compiled), usable_gib) if auto else None
        if smaller_run is None:
            break
        say(f"the step takes {format_gib(taken(compiled))} of {format_gib(usable_gib)}: saving fewer activations")
        program = build_program(smaller_run, list(program.placement.mesh.devices.flat))
    if auto:
        say(auto_remat.describe_choice(program.run.model, program.run.remat))
    return program, compiled


def reduce_saved(program: Program, step_gib: float, usable_gib: float) -> RunConfig | None:
    """Return the program's run with fewer saved activations if its compiled step does not fit.

    Returns None if the step fits, or if the run saves no activations. The run has remat.policy=auto, or is an earlier result of
    this function. If no choice is small enough, the result has full recomputation, and its step is refused later if it is too
    big. step_gib: allocated memory of the compiled step.
    """
    run = program.run
    excess = step_gib - (1 - auto_remat.MARGIN) * usable_gib
    if excess <= 0 or not saved_activations(run.remat):
        return None
    packed = program.kernel.name == "cudnn" and run.data.masks_documents
    documents = run.data.most_documents if packed else 0
    saved = auto_remat.Activations(run.model, run.moe, program.layout, program.placement.activation_shards, documents)
    remat = saved.smaller(run.remat, excess) or Remat("full")
    return dataclasses.replace(run, remat=remat)


def explain_memory(run: RunConfig, memory: dict[str, float], limit: str) -> str:
    """Return a text with the memory of the step by class, and the settings that reduce it, most effective first.

    A setting that this run may not have is left out.

    memory: GiB on one device by class; {} if unknown. limit: the exceeded limit as text.
    """
    hints: list[tuple[dict[str, Any], str]] = []  # (settings, text)
    if run.train.grad_accum < run.train.global_batch:
        hints.append(({}, f"train.grad_accum above {run.train.grad_accum}: smaller microbatches, fewer saved activations"))
    if run.remat.policy != "full":
        hints.append(({"remat.policy": "full"}, "remat.policy=full: save only each layer's input"))
    if run.remat.every == 1 and run.model.num_layers > 8:
        hints.append(({"remat.every": 2}, "remat.every=2 or more: save only every second layer's input"))
    if run.dtypes.m == "f32":
        hints.append(({"dtypes.m": "bf16"}, "dtypes.m=bf16: half of the first moment"))
        hints.append(({"dtypes.m": "int8", "dtypes.v": "int8"}, "dtypes.m=int8 and dtypes.v=int8: a quarter of both moments"))
        if run.optimizer.name == "muon":
            hints[-1] = {"dtypes.m": "int8"}, "dtypes.m=int8: a quarter of the first moment"
    if run.optimizer.offload == "none":
        text = "optimizer.offload=moments: none of the moments, for a slower update; best with accumulation"
        hints.append(({"optimizer.offload": "moments"}, text))
    if run.train.ema_decay:
        text = "train.ema_decay=0: no average of the weights, 4 bytes of each trained one"
        hints.append(({"train.ema_decay": 0.0}, text))
    hints.append(({}, "mesh.fsdp or mesh.tensor over more devices: smaller shards of parameters and moments"))
    devices = Devices(jax.default_backend(), jax.devices()[0].device_kind, jax.device_count(), 0.0, "JAX")
    before = validate_step(run, devices, fits=False)
    sizes = (
        ""
        if not memory
        else "\nIt holds, per device:\n" + "\n".join(f"  {name:<32}{format_gib(gib):>12}" for name, gib in memory.items())
    )
    allowed = [text for keys, text in hints if not {*validate_step(with_values(run, keys), devices, fits=False)} - {*before}]
    hint_lines = "\n".join(f"  {text}" for text in allowed)
    return f"out of memory: the train step needs more than {limit}.{sizes}\nSettings that help:\n{hint_lines}"


def check_host_memory(program: Program, limit_gib: float, offloaded_activations: int = 0) -> None:
    """Raise OutOfMemory if the arrays in host memory exceed the memory that may be pinned.

    The arrays in host memory are the copies of the state for a save, offloaded moments, and offloaded activations.

    Args:
      limit_gib: memory that this process may pin, GiB.
      offloaded_activations: bytes of offloaded activations of each device.
    """
    # Replicas share the work of a save's copies; each device has its own offloaded moments and activations.
    saved_arrays = jax.tree.leaves(program.saved_state(program.state))
    saved = sum(math.prod(a.shape) * a.dtype.itemsize for a in saved_arrays) / jax.process_count() / 2**30
    bytes_per_device = offloaded_activations + (compiler.local_bytes(program.state.optimizer) if program.offload else 0)
    pinned_gib = bytes_per_device * program.placement.mesh.size / jax.process_count() / 2**30
    if saved + pinned_gib > limit_gib:
        offloaded = f" Offloaded arrays take {format_gib(pinned_gib)}." if pinned_gib else ""
        raise OutOfMemory(
            f"out of host memory: a save copies {format_gib(saved)} to the host; {format_gib(limit_gib)} may be pinned "
            f"({HOST_LIMIT}; by default {HOST_SHARE:.0%} of this host's memory, now {format_gib(host_gib())}).{offloaded}\n"
            "If the host has more memory, or is a virtual machine that grows when memory is used, export "
            f"{HOST_LIMIT}={math.ceil(saved + pinned_gib) + 1}. Else set dtypes.m and dtypes.v to bf16 or int8 for a smaller "
            "state, or use more nodes."
        )


def check_free_memory(program: Program, compiled: Any, devices: Sequence[HasMemoryStats]) -> None:
    """Raise OutOfMemory if the step's temporaries and new outputs exceed the free memory of a device with the first state.

    The temporaries are one block (`temp_size_in_bytes`), so the limit is the largest free block (`largest_free_block_bytes` of
    `memory_stats`). If that figure is 0, as from jaxlib's GPU allocator, the limit is all free memory, `bytes_limit` less
    `bytes_in_use`, which ignores fragmentation. CPUs report no figures and are not checked.
    """
    analysis = compiled.memory_analysis()
    outputs = max(analysis.output_size_in_bytes - analysis.alias_size_in_bytes, 0)  # without outputs in donated memory
    need = analysis.temp_size_in_bytes + outputs
    state_bytes = analysis.argument_size_in_bytes - compiler.local_bytes(program.batch)
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats or "bytes_in_use" not in stats:
            continue
        largest, limit, used = stats.get("largest_free_block_bytes", 0), stats["bytes_limit"], stats["bytes_in_use"]
        free = largest if largest > 0 else limit - used
        if need > free:
            limit_name = "the largest free block" if largest > 0 else "free memory"
            raise OutOfMemory(
                f"out of memory: the train step needs {format_gib(need / 2**30)} beside its state, and {limit_name} of "
                f"{device} is {format_gib(free / 2**30)}. Of {format_gib(limit / 2**30)} are {format_gib(used / 2**30)} "
                f"in use, {format_gib(state_bytes / 2**30)} of them by the state.\n"
                "Start the same command again: a new process begins without fragmentation. If it ends here again, "
                "set train.grad_accum higher or remat.policy=full."
            )


@contextlib.contextmanager
def explain_out_of_memory(run: RunConfig, memory: dict[str, float]) -> Iterator[None]:
    """Run a block, and replace an error of JAX's allocator by OutOfMemory, with settings that help.

    memory: GiB on one device by class; {} if unknown.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _, peak = measured(jax.local_devices())
        limit = f"there is (measured peak {peak:.2f} GiB)" if peak else "there is"
        raise OutOfMemory(explain_memory(run, memory, limit)) from error
