"""Everything that can be wrong with a config, found at once, before a device is touched or a file is written. No jax.

Each rule appends a `Problem`: key, value, rule, remedy. A rule that rests on a key that is itself wrong stays silent, so
that one mistake gives one line.
"""

import importlib.util
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxtrain import config, groups, windows
from jaxtrain.activations import POLICIES, parse_tensors
from jaxtrain.config import (
    MESH_AXES,
    RULES,
    ConfigError,
    Problem,
    RunConfig,
    flatten,
    impossible_rules,
    nearest,
    parts_of,
    rules_in_use,
    to_dict,
)
from jaxtrain.context import make_context, ulysses_problem
from jaxtrain.hardware import Devices, memory_environment, memory_fraction
from jaxtrain.models import FAMILIES
from jaxtrain.moments import INT8, SMALL, SMALLEST_BLOCK, block, block_axis
from jaxtrain.precision import WEIGHTS, eight_bit, unsupported
from jaxtrain.resume import check_allow_change

CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("f32", "bf16", "fp8"),
    "model.rope_scaling": ("none", "llama3", "linear"),
    "attention.impl": ("auto", "cudnn", "pallas", "chunked", "reference"),
    "attention.context": ("ring", "ulysses", "gather"),
    "sharding.gather": ("layer", "forward", "step"),
    "train.accumulate": ("auto", "layer", "microbatch"),
    "remat.policy": POLICIES,
    "dtypes.params": ("auto", "f32", "bf16"),
    "dtypes.m": ("auto", "f32", "bf16", INT8),
    "dtypes.v": ("auto", "f32", "bf16", INT8),
    "dtypes.grads": ("auto", "f32", "bf16"),
    "dtypes.reduce": ("auto", "f32", "bf16"),
    "data.packing": ("documents", "none"),
    "optimizer.offload": ("none", "moments"),
    "optimizer.schedule": ("constant", "cosine", "linear", "wsd"),
    "init.what": ("weights", "weights+optimizer"),
}
# Keys that also take `package.module:name`.
OPEN_CHOICES: dict[str, tuple[str, ...]] = {
    "model.family": tuple(FAMILIES),
    "optimizer.name": groups.METHODS,
    "loss.name": ("cross_entropy",),
}
# Precisions that people ask for, and why they are not there.
REFUSED = {
    "fp16": "float16 overflows without loss scaling, which jaxtrain does not have",
    "int8": "training in 8-bit integers is not supported",
    "mxfp8": "block-scaled formats need GPUs and kernels that jaxtrain does not have",
    "nvfp4": "block-scaled formats need GPUs and kernels that jaxtrain does not have",
}
# A plan gives the reason: 4 x 32.9 GiB over PCIe at 53 GB/s, beside 6.4 s, for configs/llama3_70b.py on h200:8.
NO_PARAMS = (
    "weights are read twice in each microbatch, and read and written by the update: of llama3_70b on h200:8 each GPU would "
    "move 131 GiB a step over PCIe, 2.7 s beside 6.4 s, and 1.3 s more for each further microbatch; moments are read and "
    "written once a step, however many microbatches it has, and free twice the memory"
)
ALIASES = {"float16": "fp16", "f16": "fp16", "half": "fp16", "float8": "fp8", "f8": "fp8", "mxfp4": "nvfp4", "fp4": "nvfp4"}

# Key -> smallest value. "> x" is meant for floats that must be above it.
AT_LEAST: dict[str, float] = {
    **dict.fromkeys(
        (
            *("model.num_layers", "model.d_model", "model.num_heads", "model.num_kv_heads", "model.d_ff", "model.vocab_size"),
            *("model.rope_factor", "model.rope_original_len", "remat.every", "data.seq_len", "data.max_segments"),
            *("train.steps", "train.global_batch", "train.grad_accum", "loss.chunk", "eval.batches", "checkpoint.keep"),
            *("log.every_steps", "profile.steps"),
        ),
        1,
    ),
    **dict.fromkeys(
        (
            *(
                "model.head_dim",
                "model.sliding_window",
                "model.attention_softcap",
                "model.logit_softcap",
                "model.query_scale",
                "model.local_rope_base",
                "data.seed",
            ),
            *("data.prefetch", "train.seed", "train.memory_fraction", "optimizer.lr", "optimizer.lr_min"),
            *(
                "optimizer.warmup_steps",
                "optimizer.decay_steps",
                "optimizer.weight_decay",
                "optimizer.momentum",
                "optimizer.beta1",
                "optimizer.beta2",
            ),
            *("optimizer.clip_norm", "eval.every_steps", "checkpoint.every_steps", "checkpoint.keep_every"),
            *(
                "sharding.zero",
                "attention.ulysses",
                "log.peak_tflops",
                "loss.z_loss",
                "sample.every_steps",
                "sample.max_tokens",
                "sample.temperature",
                "sample.seed",
                "profile.start",
                "lora.rank",
            ),
        ),
        0,
    ),
    "checkpoint.step": -1,
}
ABOVE_ZERO = (
    *("model.norm_eps", "model.rope_base", "model.rope_low_freq", "model.init_std", "optimizer.eps", "sample.top_p"),
    "lora.alpha",
)
AT_MOST = {"sharding.zero": 3, "train.memory_fraction": 1.0, "sample.top_p": 1.0}
BELOW_ONE = ("optimizer.momentum", "optimizer.beta1", "optimizer.beta2")

# Arrays of the model by their logical axes: no mesh axis may split two of one array.
ARRAYS = {
    "embed.embedding": ("vocab", "embed"),  # and the head
    "attention.wq": ("layers", "embed", "heads", "head_dim"),
    "attention.wk": ("layers", "embed", "kv_heads", "head_dim"),
    "attention.wo": ("layers", "embed", "heads", "head_dim"),
    "mlp.gate": ("layers", "embed", "mlp"),
    "the residual stream": ("batch", "residual"),
    "queries": ("batch", "sequence", "heads", "head_dim"),
    "keys": ("batch", "sequence", "kv_heads", "head_dim"),
    "feed-forward activations": ("batch", "sequence", "mlp"),
    "logits": ("batch", "sequence", "vocab"),
}


def validate(run: RunConfig, devices: Devices, workdir: Path) -> list[Problem]:
    """All problems of a resolved config on these devices. Reads the file system, writes nothing."""
    values = dict(flatten(to_dict(run)))
    bad = {p.key for p in (*_choices(values), *_ranges(values))}
    problems = validate_step(run, devices)
    problems += _steps(run, workdir, bad)
    problems += _memory(run, devices, bad)
    problems += _places(run, workdir)
    problems += _shown(run)
    # Imported here: the data pipeline sits on a higher floor, and what it reads depends on the source.
    from jaxtrain.data import pipeline

    if not bad & {"model.vocab_size", "data.seq_len", "data.max_segments"}:
        reported = {p.key for p in problems}
        found = pipeline.check(run.data, run.model.vocab_size, run.eval.every_steps > 0)
        problems += [p for p in found if p.key not in reported]
    return problems


def validate_step(run: RunConfig, devices: Devices) -> list[Problem]:
    """The problems that any machine with such devices would have, whatever its files and environment. Reads nothing."""
    values = dict(flatten(to_dict(run)))
    problems = [*_choices(values), *_ranges(values)]
    bad = {p.key for p in problems}
    sizes, wrong = mesh_sizes(run, devices)
    problems += wrong
    problems += _rules(run)
    problems += _stages(run, bad)
    problems += _model(run, bad)
    problems += _remat(run, bad)
    problems += _fp8(run, devices, bad)
    problems += config.parse_options(run.compiler.options)[1]
    problems += _attention(run, devices, bad)
    problems += _schedule(run, bad)
    problems += groups.problems(run.optimizer.groups, run.optimizer.name)
    # Also of a mesh that does not fill the devices: what does not divide over it would be the next thing to fail.
    sizes = sizes or {axis: max(getattr(run.mesh, axis), 1) for axis in MESH_AXES}
    # Mesh axes of size above 1 that split each logical axis; unknown ones are reported by _rules.
    table = {axis: [a for a in onto if sizes.get(a, 1) > 1] for axis, onto in rules_in_use(run.sharding).items()}
    split = list(_context(run, devices, sizes, table, bad))
    problems += [
        p for p in _divisions(run, sizes, table, bad) if p.key != "data.seq_len" or not any(q.key == p.key for q in split)
    ]
    problems += split
    problems += _clashes(run, table)
    problems += _moments(run, sizes, table, bad)
    problems += _lora(run, bad)
    problems += _accumulate(run, table, bad)
    return problems


def mesh_sizes(run: RunConfig, devices: Devices) -> tuple[dict[str, int] | None, list[Problem]]:
    """Size of each mesh axis with every -1 filled in; None, with the reasons, where the mesh cannot be."""
    if devices.count < 1:
        rule = f"no device to run on ({devices.source})"
        return None, [Problem("devices", devices.count, rule, "Unset JAX_PLATFORMS.")]
    what = f"{devices.count} {devices.name} device{'s' if devices.count != 1 else ''} ({devices.source})"
    try:
        return config.mesh_sizes(run.mesh, devices.count, devices.node or devices.count, what), []
    except ConfigError as error:
        return None, error.problems


def _choices(values: dict[str, Any]) -> Iterable[Problem]:
    for key, known in CHOICES.items():
        value = values[key]
        if value in known:
            continue
        name = ALIASES.get(value.lower(), value.lower())
        if name in REFUSED and (key == "precision" or key.startswith("dtypes.")):
            yield Problem(key, value, REFUSED[name], "Use bf16.")
        elif (key, value) == ("optimizer.offload", "params"):
            yield Problem(key, value, NO_PARAMS, "Set moments, and spread them over more microbatches by train.grad_accum.")
        else:
            yield Problem(key, value, "no such choice", nearest(name if name in known else value, list(known)))
    for key, known in OPEN_CHOICES.items():
        value = values[key]
        if ":" in value:
            yield from _importable(key, value)
        elif value not in known:
            remedy = nearest(value, list(known)).rstrip(".?") + ("?" if nearest(value, list(known)).endswith("?") else "")
            yield Problem(key, value, "no such choice", f"{remedy} (or package.module:name for your own).")


def _importable(key: str, value: str) -> Iterable[Problem]:
    module = value.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        yield Problem(
            key, value, f"module {module!r} is not found", "Install it or set PYTHONPATH; the form is package.module:name."
        )


def _ranges(values: dict[str, Any]) -> Iterable[Problem]:
    for key, least in AT_LEAST.items():
        if values[key] < least:
            yield Problem(key, values[key], f"must be at least {least:g}", f"Set {least:g} or more.")
    for key in ABOVE_ZERO:
        if values[key] <= 0:
            yield Problem(key, values[key], "must be above 0", "Set a positive number.")
    for key, most in AT_MOST.items():
        if values[key] > most:
            yield Problem(key, values[key], f"must be at most {most:g}", f"Set {most:g} or less.")
    for key in BELOW_ONE:
        if values[key] >= 1:
            yield Problem(key, values[key], "must be below 1", "Set a number from 0 up to, not including, 1.")


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


def _model(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    m = run.model
    if not bad & {"model.num_heads", "model.num_kv_heads"} and m.num_heads % m.num_kv_heads:
        rule = f"model.num_heads = {m.num_heads} is no multiple of it"
        yield Problem("model.num_kv_heads", m.num_kv_heads, rule, f"Set one of {_divisors(m.num_heads)}.")
    if not bad & {"model.num_heads", "model.d_model", "model.head_dim"}:
        # `resolve` fills head_dim with the quotient rounded down.
        if m.d_model % m.num_heads and m.head_dim == m.d_model // m.num_heads:
            rule = f"does not divide into model.num_heads = {m.num_heads} heads"
            yield Problem("model.d_model", m.d_model, rule, "Set a multiple of it, or model.head_dim.")
        elif m.head_dim % 2 or m.head_dim < 2:
            remedy = "Change it, or model.d_model and model.num_heads that it comes from."
            yield Problem("model.head_dim", m.head_dim, "must be even: rotary turns pairs of numbers", remedy)
    letters = set(m.attention_pattern)
    if letters - {windows.LOCAL, windows.GLOBAL}:
        rule = "is made of l (the layer sees model.sliding_window) and g (it sees everything)"
        yield Problem("model.attention_pattern", m.attention_pattern, rule, "For example lllllg.")
    elif letters and not m.sliding_window:
        rule = "says which layers see model.sliding_window, which is 0"
        yield Problem("model.attention_pattern", m.attention_pattern, rule, "Set model.sliding_window, or the pattern to ''.")
    elif m.local_rope_base and not m.sliding_window:
        rule = "is that of layers that see model.sliding_window, which is 0"
        yield Problem("model.local_rope_base", m.local_rope_base, rule, "Set model.sliding_window, or this to 0.")
    if m.rope_scaling == "llama3" and m.rope_high_freq <= m.rope_low_freq:
        rule = f"must be above model.rope_low_freq = {m.rope_low_freq:g}"
        yield Problem("model.rope_high_freq", m.rope_high_freq, rule, "Llama 3.1 has 4 and 1.")


def _remat(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    _, problems = parse_tensors(run.remat.tensors)
    yield from problems
    if run.remat.policy == "custom" and not run.remat.tensors.strip():
        yield Problem(
            "remat.tensors", "", "remat.policy = custom needs a list", "For example q=keep,mlp_up=offload; or policy full."
        )
    if run.remat.tensors.strip() and run.remat.policy != "custom" and "remat.policy" not in bad:
        rule = f"is read only with remat.policy = custom, which is {run.remat.policy}"
        yield Problem("remat.tensors", run.remat.tensors, rule, "Set remat.policy to custom, or remat.tensors to ''.")
    if run.remat.policy == "auto" and run.model.family not in FAMILIES and "model.family" not in bad:
        rule = f"what it chooses among are the activations of jaxtrain's own models, and model.family is {run.model.family}"
        yield Problem("remat.policy", "auto", rule, "Set another policy.")
    if run.remat.policy == "auto" and run.remat.every > 1:
        rule = "layers share checkpoints, and remat.policy = auto decides for each layer"
        yield Problem("remat.every", run.remat.every, rule, "Set it to 1, or another remat.policy.")
    if not bad & {"remat.every", "model.num_layers"} and run.remat.every > run.model.num_layers:
        rule = f"there are only model.num_layers = {run.model.num_layers} layers"
        yield Problem("remat.every", run.remat.every, rule, f"Set 1 to {run.model.num_layers}.")


def _fp8(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    if "precision" in bad:
        return
    yield from unsupported(run, devices)
    if run.model.family in FAMILIES:  # of others the names are known once they are made
        yield from eight_bit(run, WEIGHTS)[1]


def _attention(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    if run.attention.impl == "pallas":
        yield from _pallas(run, devices, bad)
    if run.attention.impl != "cudnn":
        return
    other = "Set attention.impl to auto or chunked"

    def refuse(rule: str, remedy: str = f"{other}.") -> Problem:
        return Problem("attention.impl", "cudnn", rule, remedy)

    if devices.kind != "gpu":
        yield refuse(f"cuDNN needs a GPU, and the run would be on {devices.name} ({devices.source})")
    sm = devices.sm if devices.kind == "gpu" else 0
    if 0 < sm < 80:
        yield refuse(f"cuDNN attention needs a GPU from Ampere (sm80) on; {devices.name} is sm{sm}")
    elif 0 < sm < 90 and run.data.packing == "documents":
        remedy = f"{other}, or data.packing to none."
        yield refuse(f"packed documents need a GPU from Hopper (sm90) on; {devices.name} is sm{sm}", remedy)
    if run.precision == "f32":
        yield refuse("cuDNN attention has no float32", f"{other}, or precision to bf16.")
    most = 128 if 0 < sm < 90 else 256
    if "model.head_dim" not in bad and (run.model.head_dim > most or run.model.head_dim % 8):
        yield refuse(f"model.head_dim = {run.model.head_dim} must be a multiple of 8 and at most {most} there")
    if run.model.attention_softcap > 0:
        yield refuse(f"cuDNN has no soft cap (model.attention_softcap = {run.model.attention_softcap:g})")


def _pallas(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    def refuse(rule: str) -> Problem:
        return Problem("attention.impl", "pallas", rule, "Set attention.impl to auto or chunked.")

    sm = devices.sm if devices.kind == "gpu" else 0
    if 0 < sm < 80:
        yield refuse(f"Pallas attention needs a GPU from Ampere (sm80) on; {devices.name} is sm{sm}")
    most = 256 if sm in (0, 80, 90, 100, 103) else 128  # the others have less shared memory
    if "model.head_dim" not in bad and (run.model.head_dim > most or run.model.head_dim % 8):
        yield refuse(f"model.head_dim = {run.model.head_dim} must be a multiple of 8 and at most {most} there")


def _context(
    run: RunConfig, devices: Devices, sizes: dict[str, int], table: dict[str, list[str]], bad: set[str]
) -> Iterable[Problem]:
    """What a sequence over several devices asks of heads, lengths and kernels."""
    a, m = run.attention, run.model
    tensor, ranks = (math.prod(sizes[axis] for axis in table[name]) for name in ("heads", "sequence"))
    if bad & {"attention.context", "attention.ulysses", "model.num_heads", "model.num_kv_heads"} or m.num_heads % tensor:
        return
    heads, kv_heads = m.num_heads // tensor, max(1, m.num_kv_heads // tensor)
    if a.ulysses and a.context != "ulysses":
        rule = f"is read only with attention.context = ulysses, which is {a.context}"
        yield Problem("attention.ulysses", a.ulysses, rule, "Set attention.context to ulysses, or attention.ulysses to 0.")
    elif a.ulysses > 1 or (a.ulysses and ranks > 1):
        fits = [u for u in range(1, ranks + 1) if ranks % u == 0 and not ulysses_problem(u, heads, kv_heads)]
        if a.ulysses not in fits:
            why = ulysses_problem(a.ulysses, heads, kv_heads) or f"is no divisor of mesh.seq = {ranks}"
            remedy = f"Set one of {', '.join(map(str, fits))}, or 0." if ranks > 1 else "Set 0, or mesh.seq above 1."
            yield Problem("attention.ulysses", a.ulysses, why, remedy)
            return
    context = make_context(a.context, a.ulysses if a.context == "ulysses" else 0, ranks, heads, kv_heads)
    if "data.seq_len" not in bad and run.data.seq_len % context.divides:
        rule = f"does not divide into two chunks for each of {context.ring} places of a ring"
        rule += f", each shared by {context.ulysses} ranks" if context.ulysses > 1 else ""
        rule = f"does not divide over {context.ulysses} ranks" if context.ring == 1 else rule
        remedy = f"Make it a multiple of {context.divides}, or mesh.seq smaller."
        yield Problem("data.seq_len", run.data.seq_len, f"{rule} (mesh.seq = {ranks}, attention.context = {a.context})", remedy)
    if a.impl == "cudnn" and context.ring > 1 and 0 < m.sliding_window < run.data.seq_len and 0 < devices.sm < 90:
        rule = f"a sliding window around a ring needs a GPU from Hopper (sm90) on; {devices.name} is sm{devices.sm}"
        yield Problem("attention.impl", a.impl, rule, "Set attention.impl to auto or chunked, or attention.context to ulysses.")


def _schedule(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    o, steps = run.optimizer, run.train.steps
    if bad & {"optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.schedule", "train.steps"}:
        return
    if o.warmup_steps > steps:
        rule = f"the run has only train.steps = {steps}, so the learning rate would never reach its peak"
        yield Problem("optimizer.warmup_steps", o.warmup_steps, rule, f"Set {steps} or less.")
    elif o.schedule != "constant":
        decay = o.decay_steps or (steps // 5 if o.schedule == "wsd" else 0)
        if o.warmup_steps + decay > steps:
            named = "optimizer.decay_steps" if o.decay_steps else "optimizer.warmup_steps"
            value = o.decay_steps or o.warmup_steps
            rule = f"warmup ({o.warmup_steps}) and decay ({decay}) together are longer than train.steps = {steps}"
            yield Problem(named, value, rule, "Shorten one of them, or train longer.")
    if o.schedule != "constant" and o.lr_min > o.lr:
        yield Problem(
            "optimizer.lr_min", o.lr_min, f"is above the peak, optimizer.lr = {o.lr:g}", "Set it to a tenth of lr, say."
        )


def _steps(run: RunConfig, workdir: Path, bad: set[str]) -> Iterable[Problem]:
    c, p, steps = run.checkpoint, run.profile, run.train.steps
    if "train.steps" in bad:
        return
    if c.step > steps:
        yield Problem(
            "checkpoint.step", c.step, f"is beyond the last step, train.steps = {steps}", "Set an earlier one, or -1."
        )
    folder = Path(c.dir).expanduser() if c.dir else workdir / "checkpoints"
    if c.step >= 0 and not folder.is_dir():
        yield Problem("checkpoint.step", c.step, f"there is no {folder} to resume from", "Set -1, or the run's own --workdir.")
    if not bad & {"profile.start", "profile.steps"} and p.start > 0 and p.start + p.steps > steps:
        rule = f"tracing {p.steps} steps from there goes past the last step, train.steps = {steps}"
        yield Problem("profile.start", p.start, rule, "Start earlier, or 0 for no trace.")
    yield from check_allow_change(c.allow_change)


def _memory(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    if devices.kind != "gpu" or devices.count < 1 or "train.memory_fraction" in bad:
        return []
    fraction = memory_fraction(devices.memory_gib, run.train.memory_fraction)
    return memory_environment(fraction, os.environ)[1]


def _divisions(run: RunConfig, sizes: dict[str, int], table: dict[str, list[str]], bad: set[str]) -> Iterable[Problem]:
    """Every dimension divides over the mesh axes that its rule names."""
    for key, axis in (
        ("model.num_heads", "heads"),
        ("model.num_kv_heads", "kv_heads"),
        ("model.head_dim", "head_dim"),
        ("model.d_ff", "mlp"),
        ("model.vocab_size", "vocab"),
        ("model.d_model", "embed"),
        ("model.num_layers", "layers"),
        ("data.seq_len", "residual"),
    ):
        section, _, name = key.partition(".")
        value, parts = getattr(getattr(run, section), name), math.prod(sizes[a] for a in table[axis])
        if axis == "kv_heads" and parts % value == 0:
            continue  # each is held by several ranks
        if key not in bad and value % parts:
            over = " x ".join(f"mesh.{a} = {sizes[a]}" for a in table[axis])
            rule = f"does not divide over {over} (sharding.rules.{axis} = {dict(run.sharding.rules)[axis]!r})"
            yield Problem(key, value, rule, f"Make it a multiple of {parts}, or those sizes ones that divide it.")
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
    """Blocks of 8-bit moments that cannot be cut, or would lie on two devices; and what cannot be streamed."""
    m, name = run.model, run.optimizer.name
    if run.optimizer.offload == "moments" and name not in groups.METHODS:
        rule = f"updates layer by layer, and {name} may look at all of them at once"
        yield Problem("optimizer.offload", "moments", rule, f"Set none, or optimizer.name to {' or '.join(groups.METHODS)}.")
    if (
        name == "muon"
        and run.dtypes.v == INT8
        and not any(optimizer == "adamw" for _, optimizer in groups.moved(run.optimizer.groups))
    ):
        rule = "blocks are cut of the matrices of layers, and with Muon those have no second moment"
        yield Problem("dtypes.v", INT8, rule, "Set f32 or bf16.")
        return
    key = next((f"dtypes.{x}" for x in ("m", "v") if getattr(run.dtypes, x) == INT8), None)
    own = {"model.num_heads", "model.num_kv_heads", "model.head_dim", "model.d_ff", "model.d_model", "model.num_layers"}
    if key is None or run.lora.rank or name not in groups.METHODS or m.family not in FAMILIES or bad & own:
        return
    length = {"layers": m.num_layers, "embed": m.d_model, "heads": m.num_heads, "kv_heads": m.num_kv_heads}
    length |= {"head_dim": m.head_dim, "mlp": m.d_ff}
    cut: dict[str, int] = {}  # axes that have blocks
    for array, axes in ARRAYS.items():
        if axes[0] != "layers":
            continue
        shape = [length[axis] for axis in axes]
        along = block_axis(axes, shape)
        if along is not None:
            cut[axes[along]] = block(shape[along])
        elif math.prod(shape[1:]) >= SMALL:
            rule = f"no dimension of {array} divides into blocks of a power of two from {SMALLEST_BLOCK} on"
            yield Problem(key, INT8, rule, "Set bf16, or model.head_dim and model.d_ff to multiples of 16.")
            return
    if not cut:
        rule = f"no matrix of the layers has the {SMALL} elements from which moments are stored in blocks"
        yield Problem(key, INT8, rule, "Set f32 or bf16.")
    for axis, size in cut.items():
        parts = math.prod(sizes[a] for a in table[axis])
        if length[axis] % (parts * size):
            over = " x ".join(f"mesh.{a} = {sizes[a]}" for a in table[axis])
            rule = f"a block of {size} along {axis} = {length[axis]} would lie on two devices ({over})"
            yield Problem(key, INT8, rule, f"Set bf16, or sizes whose product divides {length[axis] // size}.")


def _lora(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    """What adapters cannot be combined with, and weights that have none."""
    if not run.lora.rank or "lora.rank" in bad:
        return
    targets, key = parts_of(run.lora.targets), "lora.targets"
    if not targets:
        yield Problem(key, run.lora.targets, "names no weight", "Name some, as wq,wv, or set lora.rank to 0.")
    known = [name.rpartition(".")[2] for name in WEIGHTS]
    for target in targets if run.model.family in FAMILIES else ():
        if target not in known:
            yield Problem(key, run.lora.targets, f"no weight that can be adapted is called {target!r}", nearest(target, known))
    if run.train.freeze.strip():
        rule = "is without meaning: with lora.rank above 0 all weights but the adapters stay as they are"
        yield Problem("train.freeze", run.train.freeze, rule, "Set it to '', or lora.rank to 0.")
    if run.init.what != "weights":
        rule = "moments of the base's own weights, which are not trained with lora.rank above 0, have no place here"
        yield Problem("init.what", run.init.what, rule, "Set weights.")
    for name in ("m", "v"):
        if getattr(run.dtypes, name) == INT8:
            rule = "moments of adapters are too few to be worth storing in blocks"
            yield Problem(f"dtypes.{name}", INT8, rule, "Set f32 or bf16.")


def _accumulate(run: RunConfig, table: dict[str, list[str]], bad: set[str]) -> Iterable[Problem]:
    """Gradients can be added by layer where layers stand one by one, or the last one apart from a loop over the others."""
    asked = run.train.accumulate == "layer" and run.train.grad_accum > 1 and run.model.family in FAMILIES
    if not asked or run.compiler.unroll or bad:
        return
    rule = ""
    if (
        not set(table["embed"]) & {*table["batch"], *table["sequence"]}
        or run.sharding.zero != 3
        or run.sharding.gather != "layer"
    ):
        rule = "weights are not gathered layer by layer"
    elif run.remat.policy == "dots" or (run.remat.every > 1 and run.remat.policy != "none"):
        rule = f"that is not so with remat.policy={run.remat.policy} and remat.every={run.remat.every}"
    elif run.model.num_layers == 1:
        rule = "there is one layer"
    if rule:
        rule = f"in a loop over layers gradients are added where the last layer stands apart from it, and {rule}"
        yield Problem("train.accumulate", "layer", rule, "Set microbatch, or compiler.unroll to true.")


def _clashes(run: RunConfig, table: dict[str, list[str]]) -> Iterable[Problem]:
    """No mesh axis (of size above 1) splits two dimensions of one array, and the kernels can follow the rules."""
    for axis, rule, remedy in impossible_rules(table):
        yield Problem(f"sharding.rules.{axis}", dict(run.sharding.rules)[axis], rule, remedy)
    seen = set()
    for array, axes in ARRAYS.items():
        for i, first in enumerate(axes):
            for second in axes[i + 1 :]:
                both = set(table[first]) & set(table[second])
                if both and (first, second) not in seen:
                    seen.add((first, second))
                    rule = f"mesh axis {min(both)!r} also splits sharding.rules.{second}, and {array} has both"
                    yield Problem(
                        f"sharding.rules.{first}", dict(run.sharding.rules)[first], rule, "Name it in one of them only."
                    )


def _places(run: RunConfig, workdir: Path) -> Iterable[Problem]:
    written = {"--workdir": str(workdir)}
    if run.checkpoint.dir:
        written["checkpoint.dir"] = run.checkpoint.dir
    if run.paths.cache:
        written["paths.cache"] = run.paths.cache
    # Imported here: the data pipeline sits on a higher floor.
    from jaxtrain.data.pipeline import parse_sets

    if "stdlib" in (run.data.source, *parse_sets(run.data.eval_source)[0].values()):
        written["paths.data"] = run.paths.data
    for key, place in written.items():
        yield from remote(key, place) or writable(key, Path(place).expanduser())
    if run.init.from_:
        gone = remote("init.from", run.init.from_)
        yield from gone
        if not gone and not run.init.from_.startswith("hf:") and not Path(run.init.from_).expanduser().is_dir():
            remedy = "Name a run's folder, one of its checkpoints/<step>, or a Hugging Face model's folder (or hf:NAME)."
            yield Problem("init.from", run.init.from_, "no such folder", remedy)
    yield from remote("data.source", run.data.source)
    yield from remote("data.eval_source", run.data.eval_source)


def _shown(run: RunConfig) -> Iterable[Problem]:
    """Samples that would never be written, and a tracker that is not there."""
    if run.sample.every_steps > 0 and run.sample.max_tokens == 0:
        rule = "sample.max_tokens = 0 writes no samples"
        yield Problem("sample.every_steps", run.sample.every_steps, rule, "Set it to 0, or sample.max_tokens above 0.")
    where = run.log.wandb
    if where and not re.fullmatch(r"([^\s/\\#?%:]+/)?[^\s/\\#?%:]+", where):
        yield Problem("log.wandb", where, "must be PROJECT or ENTITY/PROJECT", "For example --config.log.wandb=pretraining.")
    elif where and importlib.util.find_spec("wandb") is None:
        remedy = "Install it (pip install wandb; it is the extra `wandb` of pyproject.toml), or set log.wandb to ''."
        yield Problem("log.wandb", where, "the package wandb is not installed", remedy)


def remote(key: str, place: str) -> list[Problem]:
    """s3:// and its like are refused: Path would make a local folder named 's3:' of them."""
    if "://" not in place:
        return []
    return [Problem(key, place, "object stores are not supported", "Copy it to, or mount it as, a folder.")]


def writable(key: str, place: Path) -> list[Problem]:
    """Whether a folder can be made at, or written in, `place`; found out without writing.

    The nearest existing parent must be a folder that this user may write to. Root may write anywhere by its permission
    bits, so read-only mounts and the kernel's own file systems are looked at besides.
    """
    place = Path(os.path.abspath(place))
    nearest_parent = next(p for p in (place, *place.parents) if os.path.lexists(p))
    if not nearest_parent.is_dir():
        return [Problem(key, str(place), f"{nearest_parent} is a file, not a folder", "Name another place.")]
    real = nearest_parent.resolve()
    kernel = len(real.parts) > 1 and real.parts[1] in ("proc", "sys")
    read_only = os.statvfs(real).f_flag & os.ST_RDONLY
    if kernel or read_only or not os.access(real, os.W_OK | os.X_OK):
        return [Problem(key, str(place), f"{nearest_parent} is not writable", "Name another place, or change its permissions.")]
    return []


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
