"""Check the mesh and sharding.rules: mesh axes divide dimensions evenly, and shard one dimension of an array at most."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.config import hardware, layout
from jaxtrain.config.context import make_context, ulysses_problem
from jaxtrain.config.hardware import Devices
from jaxtrain.config.layout import rules_in_use
from jaxtrain.config.schema import FIT, MESH_AXES, RULES, ConfigError, Problem, RunConfig, nearest, rule_of, wrong_rules
from jaxtrain.models import FAMILIES
from jaxtrain.optim import groups
from jaxtrain.optim.moments import INT8, SMALL, SMALLEST_BLOCK, block, block_axis
from jaxtrain.step.validate_experts import check_experts
from jaxtrain.step.validate_pipeline import check_kinds, check_pipeline

SHARED = "mlp.gate"  # in a model with experts, the gate of the shared expert
# Array of the model -> its logical axes. No mesh axis may shard two axes of one array.
ARRAYS = {
    "embed.embedding": ("vocab", "embed"),  # the head has the same axes
    "attention.wq": ("layers", "embed", "heads", "head_dim"),
    "attention.wk": ("layers", "embed", "kv_heads", "head_dim"),
    "attention.wo": ("layers", "embed", "heads", "head_dim"),
    SHARED: ("layers", "embed", "mlp"),
    "the residual stream": ("batch", "residual"),
    "queries": ("batch", "sequence", "heads", "head_dim"),
    "keys": ("batch", "sequence", "kv_heads", "head_dim"),
    "feed-forward activations": ("batch", "sequence", "mlp"),
    "logits": ("batch", "sequence", "vocab"),
}
# Arrays of a model with experts. They replace SHARED, or are in addition to it if there is a shared expert.
EXPERTS = {
    "mlp.router": ("layers", "embed"),
    "an expert's mlp.gate": ("layers", "experts", "expert_embed", "mlp"),
}


# Arrays of latent attention (LATENT) replace those of ATTENTION. Their latent dimension is sharded like the model dimension.
ATTENTION = ("attention.wq", "attention.wk")
LATENT = {"attention.wkv_down": ("layers", "embed"), "attention.wkv_up": ("layers", "embed", "heads", "head_dim")}


def arrays_of(run: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return name of an array of the run's model -> its logical axes."""
    m, found = run.model, ARRAYS
    if m.kv_lora_rank:
        found = {name: axes for name, axes in found.items() if name not in ATTENTION} | LATENT
    if not m.num_experts:
        return found
    return {name: axes for name, axes in found.items() if m.shared_d_ff or name != SHARED} | EXPERTS


def check_layout(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    """Yield all problems of mesh and sharding rules, and of the pipeline, the experts and offloaded or 8-bit moments.

    bad: keys that have an invalid value.
    """
    sizes, wrong = mesh_sizes(run, devices)
    yield from wrong
    yield from _rules(run)
    yield from _stages(run, bad)
    if sizes is None:  # an invalid mesh is reported alone, because uneven dimensions would be a consequence
        return
    # Logical axis -> the mesh axes of size above 1 that shard it. _rules reports unknown mesh axes.
    table = {
        axis: [a for a in onto if sizes.get(a, 1) > 1]
        for axis, onto in rules_in_use(run.sharding, run.model.num_experts, sizes).items()
    }
    split = list(_context(run, devices, sizes, table, bad))
    for problem in _divisions(run, sizes, table, bad):
        if problem.key != "data.seq_len" or not any(other.key == problem.key for other in split):
            yield problem
    yield from split
    yield from _clashes(run, table)
    yield from _moments(run, sizes, table, bad)
    yield from check_pipeline(run, sizes["stage"], bad)
    yield from check_experts(run, devices, sizes, table, bad)


def in_use(run: RunConfig, devices: Devices, workdir: Path) -> dict[str, object]:
    """Return dotted key -> derived value, for keys such as mesh.fsdp = -1. Does not start JAX."""
    sizes, _ = mesh_sizes(run, devices)
    found: dict[str, object] = {f"mesh.{axis}": size for axis, size in (sizes or {}).items()}
    if run.optimizer.schedule != "constant" and run.train.steps > 0:
        found["optimizer.decay_steps"] = run.optimizer.decay(run.train.steps)
    if run.model.sliding_window:
        found["model.local_rope_base"] = run.model.local_rope_base or run.model.rope_base
    gpu = hardware.lookup(devices.name) if devices.kind == "gpu" else None
    if gpu and not run.log.peak_tflops and run.compute in ("f32", "bf16"):
        found["log.peak_tflops"] = gpu.peak(run.compute)
    if run.train.accumulate == "auto":
        found["train.accumulate"] = "microbatch" if run.parallel.scan_layers else "layer"
    return found | ({} if run.checkpoint.dir else {"checkpoint.dir": str(workdir / "checkpoints")})


def mesh_sizes(run: RunConfig, devices: Devices) -> tuple[dict[str, int] | None, list[Problem]]:
    """Return (size of each mesh axis, with the actual size for -1; problems). The sizes are None if the mesh is impossible."""
    if devices.problem:
        return None, [devices.problem]
    if devices.count < 1:
        rule = f"no device to run on ({devices.source})"
        return None, [Problem("devices", devices.count, rule, "Set JAX_NUM_CPU_DEVICES=1.")]
    what = f"{devices.count} {devices.name} device{'s' if devices.count != 1 else ''} ({devices.source})"
    try:
        return layout.mesh_sizes(run.mesh, devices.count, devices.node or devices.count, what), []
    except ConfigError as error:
        need = math.prod(size for axis in MESH_AXES if (size := getattr(run.mesh, axis)) > 0)
        if (devices.kind, devices.count) == ("cpu", 1) and need > 1:  # the default of a machine without GPUs
            remedy = f"Set the variable JAX_NUM_CPU_DEVICES={need} to start {need} CPU devices."
            return None, [dataclasses.replace(p, remedy=remedy) if p.key == "mesh" else p for p in error.problems]
        return None, error.problems


def _rules(run: RunConfig) -> Iterable[Problem]:
    for axis, onto in run.sharding.rules:
        key, names = f"sharding.rules.{axis}", [n for n in onto.split("+") if n]
        if axis not in RULES and run.model.family in FAMILIES:
            yield Problem(key, onto, f"the {run.model.family} model has no axis of that name", nearest(axis, list(RULES)))
        for n in names:
            if n not in MESH_AXES:
                yield Problem(key, onto, f"no mesh axis {n!r}", nearest(n, list(MESH_AXES)))
        if len(set(names)) < len(names):
            yield Problem(key, onto, "names a mesh axis twice", "Name each once, joined by '+'.")


def _stages(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    zero, gather = run.sharding.zero, run.sharding.gather
    if bad & {"sharding.zero", "sharding.gather"} or zero == 3 or gather == "layer":
        return
    held = "whole throughout" if zero == 0 else "gathered once a step already"
    rule = f"says when zero = 3 gathers weights; with sharding.zero = {zero} they are {held}"
    yield Problem("sharding.gather", gather, rule, "Set sharding.zero to 3, or sharding.gather to layer.")


def _context(
    run: RunConfig, devices: Devices, sizes: dict[str, int], table: dict[str, list[str]], bad: set[str]
) -> Iterable[Problem]:
    """Yield the problems of context parallelism: heads, data.seq_len and kernels, if mesh axes shard a sequence."""
    a, m = run.attention, run.model
    tensor, ranks = (math.prod(sizes[axis] for axis in table[name]) for name in ("heads", "sequence"))
    if bad & {"parallel.context", "model.num_heads", "model.num_kv_heads"} or m.num_heads % tensor:
        return
    heads, kv_heads = m.num_heads // tensor, max(1, m.num_kv_heads // tensor)
    context = make_context(run.parallel.context, ranks, heads, kv_heads)
    if "data.seq_len" not in bad and run.data.seq_len % context.divides:
        rule = f"does not divide into two chunks for each of {context.ring} ranks of a ring"
        rule += f", each shared by {context.ulysses} ranks" if context.ulysses > 1 else ""
        rule = f"does not divide over {context.ulysses} ranks" if context.ring == 1 else rule
        remedy = f"{FIT}make mesh.seq smaller."
        yield Problem(
            "data.seq_len", run.data.seq_len, f"{rule} (mesh.seq = {ranks}, parallel.context = {run.parallel.context})", remedy
        )
    if a.impl == "cudnn" and context.ring > 1 and 0 < m.sliding_window < run.data.seq_len and 0 < devices.sm < 90:
        rule = f"a sliding window around a ring needs a GPU from Hopper (sm90) on; {devices.name} is sm{devices.sm}"
        yield Problem("attention.impl", a.impl, rule, "Set attention.impl to auto or chunked, or parallel.context to ulysses.")
    yield from check_kinds(run, sizes["stage"], context, not ulysses_problem(ranks, heads, kv_heads), bad)


def _divisions(run: RunConfig, sizes: dict[str, int], table: dict[str, list[str]], bad: set[str]) -> Iterable[Problem]:
    """Yield a problem for every dimension of weights or of the batch that its mesh axes do not divide evenly."""
    dimensions = [
        ("model.num_heads", "heads"),
        ("model.num_kv_heads", "kv_heads"),
        ("model.d_ff", "mlp"),
        ("model.vocab_size", "vocab"),
        ("model.d_model", "embed"),
        ("data.seq_len", "residual"),
    ]
    if run.model.kv_lora_rank:
        dimensions += [("model.kv_lora_rank", "embed"), ("model.q_lora_rank", "embed")]
    if run.model.dense_layers:
        dimensions += [("model.dense_d_ff", "mlp")]
    if run.model.num_experts:
        dimensions += [("model.shared_d_ff", "mlp"), ("model.d_model", "expert_embed")]
    for key, axis in dimensions:
        section, _, name = key.partition(".")
        value, parts = getattr(getattr(run, section), name), math.prod(sizes[a] for a in table[axis])
        if axis == "kv_heads" and parts % value == 0:
            continue  # each key/value head is replicated over several ranks
        if axis == "kv_heads" and value == run.model.num_heads:
            continue  # they are told of model.num_heads
        if key not in bad and value % parts:
            over = " x ".join(f"mesh.{a} = {sizes[a]}" for a in table[axis])
            named = rule_of(axis)
            rule = f"does not divide over {over} (sharding.rules.{named} = {dict(run.sharding.rules)[named]!r})"
            remedy = f"{FIT}set mesh sizes that divide it"
            less = "+".join(a for a in table[axis] if a != "stage")
            remedy += f", or sharding.rules.{axis}={less or repr('')}." if "stage" in table[axis] else "."
            yield Problem(key, value, rule, remedy)
    if bad & {"train.global_batch", "train.grad_accum"}:
        return
    batch, accum, parts = run.train.global_batch, run.train.grad_accum, math.prod(sizes[a] for a in table["batch"])
    if batch % (accum * parts) == 0:
        return
    over = " x ".join(table["batch"])
    if batch % accum:
        rule = f"does not divide into train.grad_accum = {accum} microbatches"
    elif accum > 1:
        micro = f"a microbatch of {batch // accum} (train.grad_accum = {accum})"
        rule = f"{micro} does not divide over {parts} devices ({over})"
    else:
        rule = f"a batch of {batch} does not divide over {parts} devices ({over})"
    unit = accum * parts
    remedy = f"Set a multiple of {unit}, such as {max(1, round(batch / unit)) * unit}"
    yield Problem("train.global_batch", batch, rule, remedy + (", or accumulate less." if accum > 1 else "."))


def _moments(run: RunConfig, sizes: dict[str, int], table: dict[str, list[str]], bad: set[str]) -> Iterable[Problem]:
    """Yield the problems of optimizer.offload, and of 8-bit moments: each shard must have a whole number of blocks."""
    m, name = run.model, run.optimizer.name
    if run.optimizer.offload == "moments" and name not in groups.METHODS:
        rule = f"updates layer by layer, and {name} may need all of them at once"
        yield Problem("optimizer.offload", "moments", rule, f"Set none, or optimizer.name to {' or '.join(groups.METHODS)}.")
    if (
        name == "muon"
        and run.dtypes.v == INT8
        and not any(optimizer == "adamw" for _, optimizer in groups.moved(run.optimizer.groups))
    ):
        rule = "blocks are for matrices of layers, which have no second moment with Muon"
        yield Problem("dtypes.v", INT8, rule, "Set f32 or bf16.")
        return
    key = next((f"dtypes.{x}" for x in ("m", "v") if getattr(run.dtypes, x) == INT8), None)
    if key and m.kv_lora_rank and not run.lora.rank:
        rule = "blocks are not supported for the weights of latent attention"
        yield Problem(key, INT8, rule, "Set bf16.")
        return
    own = {"model.num_heads", "model.num_kv_heads", "model.head_dim", "model.d_ff", "model.d_model", "model.num_layers"}
    if key is None or run.lora.rank or name not in groups.METHODS or m.family not in FAMILIES or bad & own:
        return
    length = {"layers": m.num_layers, "embed": m.d_model, "heads": m.num_heads, "kv_heads": m.num_kv_heads}
    length |= {"head_dim": m.head_dim, "mlp": m.d_ff, "experts": m.num_experts, "expert_embed": m.d_model}
    cut: dict[tuple[str, int], int] = {}  # (logical axis, its length) -> block size
    for array, axes in arrays_of(run).items():
        if axes[0] != "layers" or len(axes) < 3:
            continue
        own_length = length | ({"mlp": m.shared_d_ff} if m.num_experts and array == SHARED else {})
        shape = [own_length[axis] for axis in axes]
        along = block_axis(axes, shape)
        if along is not None:
            cut[axes[along], shape[along]] = block(shape[along])
        elif math.prod(shape[1:]) >= SMALL:
            rule = f"no dimension of {array} divides into blocks of a power of two from {SMALLEST_BLOCK} on"
            yield Problem(key, INT8, rule, "Set bf16, or model.head_dim and model.d_ff to multiples of 16.")
            return
    if not cut:
        rule = f"no matrix of the layers has the {SMALL} elements from which moments are stored in blocks"
        yield Problem(key, INT8, rule, "Set f32 or bf16.")
    for (axis, whole), size in cut.items():
        parts = math.prod(sizes[a] for a in table[axis])
        if whole % (parts * size):
            over = " x ".join(f"mesh.{a} = {sizes[a]}" for a in table[axis])
            rule = f"a block of {size} along {axis} = {whole} would lie on two devices ({over})"
            yield Problem(key, INT8, rule, f"Set bf16, or sizes whose product divides {whole // size}.")


def _clashes(run: RunConfig, table: dict[str, list[str]]) -> Iterable[Problem]:
    """Yield a problem for each mesh axis of size above 1 that shards two dimensions of an array, and each unsupported rule."""
    wrong: dict[str, tuple[str, str]] = {}
    for axis, rule, remedy in wrong_rules(table):
        wrong.setdefault(axis, (rule, remedy))  # a rule is reported once
    for axis, (rule, remedy) in wrong.items():
        yield Problem(f"sharding.rules.{axis}", dict(run.sharding.rules)[axis], rule, remedy)
    seen = set()
    for array, axes in arrays_of(run).items():
        axes = [axis for axis in axes if axis in RULES and axis not in wrong]
        for i, first in enumerate(axes):
            for second in axes[i + 1 :]:
                both = set(table[first]) & set(table[second])
                if both and (first, second) not in seen:
                    seen.add((first, second))
                    rule = f"mesh axis {min(both)!r} also shards sharding.rules.{second}, and {array} has both"
                    yield Problem(
                        f"sharding.rules.{first}", dict(run.sharding.rules)[first], rule, "Name it in one of them only."
                    )
