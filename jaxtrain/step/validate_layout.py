"""Check the mesh and sharding.rules: mesh axes divide dimensions evenly, and shard one dimension of an array at most."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.context import Context, ulysses_problem
from jaxtrain.config.hardware import Devices
from jaxtrain.config.layout import Layout, resolve_layout, rule_of, rule_problems
from jaxtrain.config.ramp import Ramp, parse_ramp
from jaxtrain.config.schema import (
    FIT,
    MESH_AXES,
    RULES,
    ConfigError,
    Model,
    Problem,
    RunConfig,
    Train,
    suggest,
)
from jaxtrain.kernels.attention import Hardware
from jaxtrain.models import FAMILIES
from jaxtrain.models.rules import DELTA_KEYS
from jaxtrain.optim import moments
from jaxtrain.step import attention_specs
from jaxtrain.step.validate_experts import check_experts
from jaxtrain.step.validate_pipeline import check_kinds, check_pipeline

DIMENSIONS = (  # key, its logical axis, and another key: if that is 0, the dimension does not exist
    ("model.num_heads", "heads", ""),
    ("model.num_kv_heads", "kv_heads", ""),
    ("model.linear_key_heads", "heads", "model.linear_key_heads"),
    ("model.linear_value_heads", "heads", "model.linear_value_heads"),
    ("model.d_ff", "mlp", ""),
    ("model.vocab_size", "vocab", ""),
    ("model.d_model", "embed", ""),
    ("data.seq_len", "residual", ""),
    ("model.kv_lora_rank", "embed", ""),
    ("model.q_lora_rank", "embed", "model.kv_lora_rank"),
    ("model.dense_d_ff", "mlp", "model.dense_layers"),
    ("model.shared_d_ff", "mlp", "model.num_experts"),
    ("model.d_model", "expert_embed", "model.num_experts"),
)
SHAPE_KEYS = {f"model.{name}" for name in ("num_heads", "num_kv_heads", "head_dim", "d_ff", "d_model", "num_layers")}
SHAPE_KEYS |= {f"model.{name}" for name in ("attention_pattern", *DELTA_KEYS)}


def layer_matrices(model: Model) -> dict[str, dict[str, int]]:
    """Return name of a matrix of a model's layers -> its logical axes, each with its length. There is one of each shape."""
    matrices = {
        "attention.wq": {"embed": model.d_model, "heads": model.num_heads, "head_dim": model.head_dim},
        "attention.wk": {"embed": model.d_model, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim},
    }
    if model.delta_layers:
        matrices["delta.wq"] = {"embed": model.d_model, "heads": model.linear_key_heads, "head_dim": model.linear_key_dim}
        matrices["delta.wv"] = {"embed": model.d_model, "heads": model.linear_value_heads, "head_dim": model.linear_value_dim}
        matrices["delta.wa"] = {"embed": model.d_model, "heads": model.linear_value_heads}
    if width := model.shared_d_ff if model.num_experts else model.d_ff:
        matrices["mlp.gate"] = {"embed": model.d_model, "mlp": width}
    if model.num_experts:
        matrices["an expert's mlp.gate"] = {"experts": model.num_experts, "expert_embed": model.d_model, "mlp": model.d_ff}
    return {name: {"layers": model.num_layers} | lengths for name, lengths in matrices.items()}


def check_layout(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    """Yield all problems of mesh and sharding rules, of the pipeline, experts and 8-bit moments, and of the kernels.

    bad: keys that have an invalid value.
    """
    layout, problems = find_layout(run, devices)
    yield from problems
    m, hardware, context = run.model, None, None
    yield from _rules(dict(run.sharding.rules), m.family)
    if devices.kind == "cpu" or devices.sm:
        name = devices.name if devices.kind == "gpu" else f"{devices.name} ({devices.source})"
        hardware = Hardware(devices.kind, divmod(devices.sm, 10), name)
    if layout:  # an invalid mesh is reported alone, because uneven dimensions would be a consequence
        # With these rules no mesh axis shards two axes of an array: each axis of an array may have other mesh axes.
        problems = rule_problems(layout, run.sharding)
        refused_rules = {p.key.rpartition(".")[2] for p in problems}
        rules = tuple((axis, () if rule_of(axis) in refused_rules else onto) for axis, onto in layout.rules)
        allowed = dataclasses.replace(layout, rules=rules)
        context, split = _context(run, allowed, bad)
        uneven = [*_divisions(run.flat, allowed, bad), *_batch(run.train, allowed, bad)]
        if not any(p.key == "train.global_batch" for p in uneven):
            uneven += _ramp(run.train, allowed, bad)
        yield from [p for p in uneven if p.key != "data.seq_len" or not any(problem.key == p.key for problem in split)]
        yield from split
        yield from problems
        if layout.pipelined:
            yield from check_pipeline(m, run.train, run.optimizer, run.remat, layout.stages, bad)
        yield from check_experts(run, hardware, layout, bad)
        if not run.lora.rank and m.family in FAMILIES and not bad & SHAPE_KEYS:
            matrices = {} if m.kv_lora_rank else layer_matrices(m)
            yield from moments.find_block_problems(run.optimizer, run.dtypes, matrices, layout.shards)
    if hardware and "model.head_dim" not in bad:
        yield from attention_specs.attention_problems(run, context or Context(), hardware)


def derived_values(run: RunConfig, devices: Devices, workdir: Path) -> dict[str, object]:
    """Return dotted key -> derived value, for keys such as mesh.fsdp = -1. Does not start JAX."""
    layout, _ = find_layout(run, devices)
    values: dict[str, object] = {f"mesh.{axis}": size for axis, size in (layout.mesh if layout else ())}
    if run.optimizer.schedule != "constant" and run.train.steps > 0:
        values["optimizer.decay_steps"] = run.optimizer.decay(run.train.steps)
    if run.model.sliding_window:
        values["model.local_rope_base"] = run.model.local_rope_base or run.model.rope_base
    if (gpu := devices.gpu) and not run.log.peak_tflops and run.compute in ("f32", "bf16"):
        values["log.peak_tflops"] = gpu.peak(run.compute)
    if run.train.accumulate == "auto":
        values["train.accumulate"] = "microbatch" if run.parallel.scan_layers else "layer"
    return values | ({} if run.checkpoint.dir else {"checkpoint.dir": str(workdir / "checkpoints")})


def find_layout(run: RunConfig, devices: Devices) -> tuple[Layout | None, list[Problem]]:
    """Return (the layout of a run on these devices; problems). The layout is None if the mesh is impossible.

    If a problem's remedy is more CPU devices, the layout is that on those, so that what does not fit there is told too.
    """
    if devices.problem:
        return None, [devices.problem]
    if devices.count < 1:
        rule = f"no device to run on ({devices.source})"
        return None, [Problem("devices", devices.count, rule, "Set JAX_NUM_CPU_DEVICES=1.")]
    description = f"{devices.count} {devices.name} device{'s' if devices.count != 1 else ''} ({devices.source})"
    try:
        return resolve_layout(run, devices.count, devices.node or devices.count, description), []
    except ConfigError as error:
        need = math.prod(size for axis in MESH_AXES if (size := getattr(run.mesh, axis)) > 0)
        if (devices.kind, devices.count) == ("cpu", 1) and need > 1:  # the default of a machine without GPUs
            with contextlib.suppress(ConfigError):  # sizes that fit no number of devices
                layout = resolve_layout(run, need, need, description)
                remedy = f"Set the variable JAX_NUM_CPU_DEVICES={need} to start {need} CPU devices."
                return layout, [dataclasses.replace(p, remedy=remedy) for p in error.problems]
        return None, error.problems


def _rules(rules: Mapping[str, str], family: str) -> Iterable[Problem]:
    for axis, onto in rules.items():
        key, names = f"sharding.rules.{axis}", [n for n in onto.split("+") if n]
        if axis not in RULES and family in FAMILIES:
            yield Problem(key, onto, f"the {family} model has no axis of that name", suggest(axis, list(RULES)))
        for n in names:
            if n not in MESH_AXES:
                yield Problem(key, onto, f"no mesh axis {n!r}", suggest(n, list(MESH_AXES)))
        if len(set(names)) < len(names):
            yield Problem(key, onto, "names a mesh axis twice", "Name each once, joined by '+'.")


def _context(run: RunConfig, layout: Layout, bad: set[str]) -> tuple[Context | None, list[Problem]]:
    """Return context parallelism and its problems: heads, data.seq_len and kinds of layers, if mesh axes shard a sequence."""
    m, problems, context = run.model, [], layout.context
    tensor, ranks = layout.shards("heads"), layout.shards("sequence")
    if bad & {"parallel.context", "model.num_heads", "model.num_kv_heads"} or m.num_heads % tensor:
        return None, []
    if "data.seq_len" not in bad and run.data.seq_len % context.divides:
        rule = f"does not divide into two chunks for each of {context.ring} ranks of a ring"
        rule += f", each shared by {context.ulysses} ranks" if context.ulysses > 1 else ""
        rule = f"does not divide over {context.ulysses} ranks" if context.ring == 1 else rule
        rule += f" (mesh.seq = {ranks}, parallel.context = {run.parallel.context})"
        problems.append(Problem("data.seq_len", run.data.seq_len, rule, f"{FIT}make mesh.seq smaller."))
    if m.delta_layers and "model.linear_key_heads" not in bad and not m.linear_key_heads % tensor:
        problems += _delta_context(run, context, tensor, ranks)
    if layout.pipelined:
        fits_ulysses = not ulysses_problem(ranks, m.num_heads // tensor, max(1, m.num_kv_heads // tensor))
        problems += check_kinds(m, layout.stages, context, fits_ulysses, bad)
    return context, problems


def _delta_context(run: RunConfig, context: Context, tensor: int, ranks: int) -> Iterable[Problem]:
    """Yield a problem unless each rank of the seq axis computes some heads of a delta net for all tokens of a sequence."""
    m = run.model
    heads = m.num_heads // tensor, max(1, m.num_kv_heads // tensor)
    keys = m.linear_key_heads // tensor

    def fits(group: int) -> bool:
        return keys % group == 0 and not ulysses_problem(group, *heads)

    if context.ring == 1 and keys % context.ulysses == 0:
        return
    rule = f"a delta net needs all tokens of a sequence for some of its heads, and mesh.seq = {ranks} "
    if fits(ranks):
        yield Problem("parallel.context", run.parallel.context, f"{rule}is a ring of {context.ring}", "Set ulysses.")
        return
    most = max(group for group in range(1, ranks) if ranks % group == 0 and fits(group))
    rule += f"does not divide {keys} key heads and {heads[0]} query heads"
    context_hint = "" if most == 1 or run.parallel.context == "ulysses" else " and parallel.context=ulysses"
    yield Problem("mesh.seq", ranks, rule, f"Set {most}{context_hint}.")


def _divisions(values: Mapping[str, Any], layout: Layout, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem for every dimension of weights that its mesh axes do not divide evenly."""
    for key, axis, needed in DIMENSIONS:
        if needed and not values[needed]:
            continue
        value, shards = values[key], layout.shards(axis)
        if axis == "kv_heads" and (shards % value == 0 or value == values["model.num_heads"]):
            continue  # each key/value head is replicated over several ranks; or the problem is that of model.num_heads
        if key not in bad and value % shards:
            axes = layout.mesh_axes(axis)
            over = " x ".join(f"mesh.{a} = {layout.size(a)}" for a in axes)
            rule_key = f"sharding.rules.{rule_of(axis)}"
            rule = f"does not divide over {over} ({rule_key} = {values[rule_key]!r})"
            remedy = f"{FIT}set mesh sizes that divide it"
            less = "+".join(a for a in axes if a != "stage")
            remedy += f", or sharding.rules.{axis}={less or repr('')}." if "stage" in axes else "."
            yield Problem(key, value, rule, remedy)


def _batch(train: Train, layout: Layout, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem if microbatches do not divide evenly over the devices that shard the batch."""
    batch, accum, shards = train.global_batch, train.grad_accum, layout.shards("batch")
    unit = accum * shards
    if bad & {"train.global_batch", "train.grad_accum"} or batch % unit == 0:
        return
    over = f"does not divide over {shards} devices ({' x '.join(layout.mesh_axes('batch'))})"
    rule = f"a batch of {batch} {over}"
    if accum > 1:
        rule = f"a microbatch of {batch // accum} (train.grad_accum = {accum}) {over}"
    if batch % accum:
        rule = f"does not divide into train.grad_accum = {accum} microbatches"
    remedy = f"Set a multiple of {unit}, such as {max(1, round(batch / unit)) * unit}"
    yield Problem("train.global_batch", batch, rule, remedy + (", or accumulate less." if accum > 1 else "."))


def _ramp(train: Train, layout: Layout, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem if a size of train.batch_ramp does not divide into microbatches of the full batch's size.

    A size below that of a microbatch is one microbatch, and must divide over the devices that shard the batch.
    """
    if bad & {"train.global_batch", "train.grad_accum"}:
        return
    key, text, full = "train.batch_ramp", train.batch_ramp, train.global_batch
    ramp, violation = parse_ramp(text, full)
    if violation:
        yield Problem(key, text, *violation)
    rows, shards, stages = full // train.grad_accum, layout.shards("batch"), layout.stages
    # The microbatches of interleaved stages come in runs of as many as there are stages.
    unit = rows * stages.stages if stages.groups > 1 else rows

    def nearest_fit(size: int) -> int:
        """Return the nearest size that divides; 0 if that is none."""
        return round(size / shards) * shards if size < unit == rows else round(size / unit) * unit

    if not any(size != nearest_fit(size) for size, _ in ramp.phases):
        return
    size = next(size for size, _ in ramp.phases if size != nearest_fit(size))
    rule = f"{size} sequences do not divide into microbatches of {rows}"
    if size < unit == rows:
        rule = f"{size} sequences do not divide over {shards} devices ({' x '.join(layout.mesh_axes('batch'))})"
    elif unit > rows:
        rule += f" in runs of mesh.stage = {stages.stages}"
    fit = {nearest_fit(size): until for size, until in ramp.phases}
    nearest_ramp = Ramp(full, tuple((size, until) for size, until in fit.items() if 0 < size < full))
    yield Problem(key, text, rule, f"Set '{nearest_ramp}'.")
