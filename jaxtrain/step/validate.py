"""Find all problems of a config at once, before a device is used or a file is written. Imports no jax.

Each check yields a `Problem` (key, value, rule, remedy) for each rule that the config breaks. If a key's value is invalid,
other checks of this key yield nothing, so one mistake gives one line.
"""

import dataclasses
import functools
import importlib.util
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import declaration, installed, own_parts, schema, unread
from jaxtrain.config.commands import CONFIG
from jaxtrain.config.environment import overlay
from jaxtrain.config.hardware import REPEATABLE, Devices
from jaxtrain.config.schema import (
    FIT,
    Checkpoint,
    Compiler,
    Data,
    Dtypes,
    Init,
    Log,
    Loss,
    Model,
    Optimizer,
    Problem,
    Profile,
    Remat,
    RunConfig,
    Sample,
    Train,
    suggest,
    to_dict,
)
from jaxtrain.models import FAMILIES, rules
from jaxtrain.models.activations import parse_tensors
from jaxtrain.models.precision import fp8_problems, fp8_weight_names, matmul_weights
from jaxtrain.optim import groups
from jaxtrain.optim.moments import INT8, find_decay_problems
from jaxtrain.runtime.timelimit import limit_s
from jaxtrain.runtime.watchdog import parse_budgets
from jaxtrain.step.resume import check_allow_change
from jaxtrain.step.state_size import least_gib
from jaxtrain.step.validate_layout import SHAPE_KEYS, check_layout, find_layout
from jaxtrain.step.validate_pipeline import check_schedule
from jaxtrain.step.validate_places import check_places, checkpoints_folder

# Precisions that people ask for, and why they are not supported.
REFUSED = {
    "fp16": "float16 overflows without loss scaling, which jaxtrain does not have",
    "int8": "training in 8-bit integers is not supported",
    "mxfp8": "block-scaled formats need GPUs and kernels that jaxtrain does not have",
    "nvfp4": "block-scaled formats need GPUs and kernels that jaxtrain does not have",
}
# The figures are from the plan of configs/llama3_70b.py on h200:8: a step moves 4 x 32.9 GiB over PCIe at 53 GB/s.
NO_PARAMS = (
    "weights are read twice in each microbatch, and read and written by the update: of llama3_70b on h200:8 each GPU would "
    "move 131 GiB a step over PCIe, 2.7 s more than 6.4 s, and 1.3 s more for each further microbatch; moments are read and "
    "written once a step, however many microbatches it has, and free twice the memory"
)
ALIASES = {"float16": "fp16", "f16": "fp16", "half": "fp16", "float8": "fp8", "f8": "fp8", "mxfp4": "nvfp4", "fp4": "nvfp4"}

EXPERT_KEYS = (
    *("experts_per_token", "router", "renormalize", "router_bias", "router_logit_bias", "expert_bias", "shared_d_ff"),
    *("routed_scaling", "router_groups", "groups_per_token"),
)
# (Pattern of keys, another key, the value of this other key with which they are read; None: any but 0, false and '').
READ_WITH = (
    *rules.READ_WITH,
    ("remat.tensors", "remat.policy", "custom"),
    ("fp8.exclude", "precision", "fp8"),
    ("sharding.gather", "sharding.zero", 3),
    ("pipeline.groups", "pipeline.schedule", "interleaved"),
    *((f"model.{name}", "model.num_experts", None) for name in EXPERT_KEYS),
    ("moe.*", "model.num_experts", None),
    ("moe.bias_rate", "model.router_bias", True),
    ("init.base", "lora.rank", None),
    ("lora.targets", "lora.rank", None),
    ("lora.rslora", "lora.rank", None),
    ("lora.experts", "lora.rank", None),
    ("lora.experts", "model.num_experts", None),
    ("lora.base", "lora.rank", None),
    ("init.what", "init.from", None),
    ("loss.mtp_weight", "model.mtp_layers", None),
    ("optimizer.decay_shape", "optimizer.schedule", "wsd"),
)

# Tracker, and the form of its key of log: a pattern, and in words.
TRACKERS = (
    ("wandb", r"([^\s/\\#?%:]+/)?[^\s/\\#?%:]+", "PROJECT or ENTITY/PROJECT"),
    ("trackio", r"[\w\-]+", "a name of letters, digits, _ and -"),
    ("mlflow", r"\S(.*\S)?", "a name without spaces around it"),
)


def validate(run: RunConfig, devices: Devices, workdir: Path) -> list[Problem]:
    """Return all problems of a resolved config on these devices. Reads the file system, writes nothing."""
    values = run.flat
    bad = {p.key for p in check_keys(values)}
    problems = validate_step(run, devices)
    problems += _steps(run.checkpoint, run.profile, run.eval.every_steps > 0, run.train.steps, workdir, bad)
    problems += [*limit_s(run.train.max_minutes)[1], *parse_budgets(run.train.timeouts)[1]]
    problems += [] if "train.memory_fraction" in bad else overlay(run, devices, os.environ)[1]
    reported = {p.key for p in problems}
    problems += [p for p in check_places(run, workdir) if p.key not in reported]
    problems += _sample_and_log(run.sample, run.log)
    problems += _host_memory(run, devices, bad)
    # Imported here: the data pipeline is in a higher layer, and the imports depend on the source.
    from jaxtrain.data import opening

    if not bad & {"model.vocab_size", "data.seq_len", "data.max_segments"}:
        reported |= {p.key for p in problems}
        data_problems = opening.check_data(
            run.data, run.model.vocab_size, run.eval.every_steps > 0, run.loss, bool(run.init.from_)
        )
        problems += [p for p in data_problems if p.key not in reported]
    return problems


def validate_step(run: RunConfig, devices: Devices, fits: bool = True) -> list[Problem]:
    """Return the problems that depend only on the config and the devices, and not on files or the environment.

    fits: remedies name numbers with which no problem of the key is left (schema.FIT), whose search takes up to a second.
    """
    check = lambda key, number: {p.key for p in _problems(with_values(run, {key: number}), devices)}  # noqa: E731
    return schema.with_fits(_problems(run, devices), check if fits else None)


def with_values(run: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a run with other values of some keys. model.head_dim follows from them, if it did before."""
    tree, m = to_dict(run), run.model
    latent = m.qk_nope_head_dim + m.qk_rope_head_dim
    if m.num_heads > 0 and m.head_dim == (latent if m.kv_lora_rank else m.d_model // m.num_heads):
        tree["model"]["head_dim"] = 0
    for key, value in values.items():
        *path, name = key.split(".")
        functools.reduce(operator.getitem, path, tree)[name] = value
    return schema.resolve(tree)[0]


def _problems(run: RunConfig, devices: Devices) -> list[Problem]:
    """Return the problems of single keys, and of keys beside each other.

    Of the latter, a key with a problem by itself has its default, and a float the nearest number that is allowed.

    If a float is too large, too small, or not read at all, the problem says the last.
    """
    values = run.flat
    key_problems = {p.key: p for p in check_keys(values)}
    if not key_problems:
        return _combined_problems(run, devices, set())
    keys = schema.all_keys()
    floats = {key for key in key_problems if isinstance(values[key], float)}
    run = with_values(
        run, {key: keys[key].nearest(values[key]) if key in floats else unread.DEFAULTS[key] for key in key_problems}
    )
    not_read = (
        {p.key: p for p in _combined_problems(run, devices, key_problems.keys() - floats) if p.key in floats} if floats else {}
    )
    problems = [dataclasses.replace(not_read.get(key, p), value=p.value) for key, p in key_problems.items()]
    return problems + [p for p in _combined_problems(run, devices, set(key_problems)) if p.key not in key_problems]


def _combined_problems(run: RunConfig, devices: Devices, bad: set[str]) -> list[Problem]:
    optimizer, dtypes = run.optimizer, run.dtypes
    problems = list(check_layout(run, devices, bad))
    problems += check_schedule(run.pipeline, bad)
    problems += rules.check_model(run.model, bad)
    problems += _remat(run.remat, run.model, bad)
    if "precision" not in bad:
        problems += fp8_problems(run.precision, devices)
        if run.model.family in FAMILIES:  # weights of other families have names only after the model is built
            problems += fp8_weight_names(run.precision, run.fp8.exclude, matmul_weights(run.model))[1]
    problems += schema.parse_options(run.compiler.options)[1]
    problems += _schedule(optimizer, run.train.steps, bad)
    problems += [] if bad & {"dtypes.v", "optimizer.beta2"} else find_decay_problems(optimizer, dtypes)
    problems += _repeatable(run.train, run.compiler, devices)
    problems += groups.find_group_problems(optimizer.groups, optimizer.name)
    problems += [] if bad & {"optimizer.lr", "optimizer.weight_decay"} else groups.find_rate_problems(optimizer)
    if optimizer.offload == "moments" and optimizer.name not in groups.METHODS:
        rule, instead = (
            f"updates layer by layer, and {optimizer.name} may need all of them at once",
            " or ".join(groups.METHODS),
        )
        problems.append(Problem("optimizer.offload", "moments", rule, f"Set none, or optimizer.name to {instead}."))
    if run.lora.rank and "lora.rank" not in bad:
        problems += _lora(run.train, run.init, dtypes)
        problems += [] if bad & {"lora.base", *SHAPE_KEYS} else _base(run, devices)
        if run.model.family in FAMILIES:
            adaptable = run.model.adaptable(run.lora.experts != "none")
            problems += rules.target_problems(run.lora, adaptable, run.model.num_experts > 0) or rules.unused_experts(
                run.lora, run.model
            )
    if run.loss.is_pairwise:
        problems += _pairs(run.loss, run.data, bad)
    if run.model.mtp_layers and not bad & {"model.mtp_layers", "model.family"}:
        problems += _mtp(run, bad)
    reported = {p.key for p in problems}
    return problems + [p for key, p in unread.find_unread(run.flat, READ_WITH, bad).items() if key not in reported]


def check_keys(values: Mapping[str, Any]) -> Iterable[Problem]:
    """Yield the problems of single keys: values that are no choice, modules that cannot be found, and numbers out of range.

    Args:
        values: dotted key -> value.
    """
    for name, key in schema.all_keys().items():
        value = values[name]
        if key.importable and ":" in value:
            yield from filter(None, [own_parts.check_module(name, value)])
        elif key.choices and value not in key.choices:
            yield _no_choice(name, value, key)
        elif violation := key.out_of_range(value):
            rule, remedy = violation
            yield Problem(name, value, rule, FIT if isinstance(value, int) and value <= declaration.MOST else remedy)


def _no_choice(name: str, value: str, key: declaration.Key) -> Problem:
    meant = ALIASES.get(value.lower(), value.lower())
    if meant in REFUSED and (name == "precision" or name.startswith("dtypes.")):
        return Problem(name, value, REFUSED[meant], "Use bf16.")
    if (name, value) == ("optimizer.offload", "params"):
        remedy = "Set moments, and spread them over more microbatches by train.grad_accum."
        return Problem(name, value, NO_PARAMS, remedy)
    remedy = suggest(meant if meant in key.choices else value, list(key.choices))
    if key.importable:
        remedy = f"{remedy.rstrip('.')} (or package.module:name for your own)."
    return Problem(name, value, "no such choice", remedy)


def _remat(remat: Remat, model: Model, bad: set[str]) -> Iterable[Problem]:
    if remat.policy == "custom" and not remat.tensors.strip():
        remedy = "For example q=keep,mlp_up=offload; or policy full."
        yield Problem("remat.tensors", "", "remat.policy = custom needs a list", remedy)
    if remat.policy == "custom" or "remat.policy" in bad:
        yield from parse_tensors(remat.tensors)[1]
    if remat.policy == "auto" and remat.every > 1:
        rule = "layers share checkpoints, and remat.policy = auto decides for single layers"
        yield Problem("remat.every", remat.every, rule, "Set it to 1, or another remat.policy.")
    elif "remat.every" not in bad and model.period > 1 and remat.every > 1:
        rule = f"each layer has its own checkpoint with d in model.attention_pattern = {model.attention_pattern}"
        yield Problem("remat.every", remat.every, rule, "Set 1.")
    elif not bad & {"remat.every", "model.num_layers"} and remat.every > model.num_layers:
        yield Problem("remat.every", remat.every, f"there are only model.num_layers = {model.num_layers} layers", FIT)


def _schedule(optimizer: Optimizer, steps: int, bad: set[str]) -> Iterable[Problem]:
    if bad & {"optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.schedule", "train.steps"}:
        return
    if optimizer.warmup_steps > steps:
        rule = f"the run has only train.steps = {steps}, so the learning rate would never reach its peak"
        yield Problem("optimizer.warmup_steps", optimizer.warmup_steps, rule, f"Set {steps} or less.")
    elif optimizer.schedule != "constant":
        decay = optimizer.decay_steps or (steps // 5 if optimizer.schedule == "wsd" else 0)
        if max(1, optimizer.warmup_steps) + decay > steps:  # the first step has the peak without a warm-up
            key = "optimizer.decay_steps" if optimizer.decay_steps else "optimizer.warmup_steps"
            value = optimizer.decay_steps or optimizer.warmup_steps
            rule = f"warmup ({optimizer.warmup_steps}) and decay ({decay}) together are longer than train.steps = {steps}"
            yield Problem(key, value, rule, "Shorten one of them, or train longer.")
    if optimizer.schedule != "constant" and optimizer.lr_min > optimizer.lr and not bad & {"optimizer.lr", "optimizer.lr_min"}:
        lower = optimizer.lr / 10 if optimizer.lr > 10 * declaration.SMALLEST else 0
        yield Problem(
            "optimizer.lr_min", optimizer.lr_min, f"is above the peak, optimizer.lr = {optimizer.lr:g}", f"Set {lower:g}."
        )


def _steps(
    checkpoint: Checkpoint, profile: Profile, evaluates: bool, steps: int, workdir: Path, bad: set[str]
) -> Iterable[Problem]:
    if checkpoint.keep_best and not evaluates:
        rule = "the lowest held-out loss decides which is the best, and eval.every_steps=0 computes none"
        yield Problem("checkpoint.keep_best", True, rule, "Set eval.every_steps=100.")
    if "train.steps" in bad:
        return
    folder = checkpoints_folder(checkpoint.dir, workdir)
    if "checkpoint.step" in bad:
        pass
    elif checkpoint.step > steps:
        rule = f"is beyond the last step, train.steps = {steps}"
        yield Problem("checkpoint.step", checkpoint.step, rule, "Set an earlier one, or -1.")
    elif checkpoint.step >= 0 and not folder.is_dir():
        yield Problem(
            "checkpoint.step", checkpoint.step, f"there is no {folder} to resume from", "Set -1, or the run's own --workdir."
        )
    if not bad & {"profile.start", "profile.steps"} and profile.start > 0 and profile.start + profile.steps > steps:
        rule = f"tracing {profile.steps} steps from there goes past the last step, train.steps = {steps}"
        yield Problem("profile.start", profile.start, rule, "Start earlier, or 0 for no trace.")
    yield from check_allow_change(checkpoint.allow_change)


# Logical axes of the weights. A mesh axis that shards none of them holds replicas.
WEIGHT_AXES = ("embed", "heads", "kv_heads", "mlp", "vocab", "layers", "experts", "expert_embed")


def _host_memory(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem if parameters, moments and gradients exceed the memory that the CPU devices of one process share."""
    keys = ("model.", "dtypes.", "mesh", "sharding.", "optimizer.name", "lora.", "train.freeze")
    if devices.kind != "cpu" or any(key.startswith(keys) for key in bad) or run.model.family not in FAMILIES:
        return
    layout, _ = find_layout(run, devices)
    if layout is None:
        return
    split = {axis for name, onto in layout.rules if name in WEIGHT_AXES for axis in onto}
    copies = math.prod(size for axis, size in layout.mesh if axis not in split)
    local_devices = devices.node or devices.count  # devices in this process
    need = least_gib(run, ("params", "moments", "grads")) * copies * local_devices / devices.count
    have = devices.memory_gib * local_devices
    if need > have:
        rule = f"a step takes at least {need:.1f} GiB for parameters, moments and gradients, and {have:.1f} GiB of this "
        rule += "machine's memory are available"
        remedy = f"Plan it with python -m jaxtrain plan {CONFIG} --topology=h200:8, or run --config=configs/tiny.py."
        yield Problem("devices", f"{devices.count} cpu", rule, remedy)


def _repeatable(train: Train, compiler: Compiler, devices: Devices) -> Iterable[Problem]:
    """Yield a problem for each setting that contradicts train.deterministic=true, or needs it while it is false."""
    if train.sdc_check_every > 0 and devices.kind == "gpu" and not train.deterministic:
        rule = "compares the bits of two runs of a step, which differ on GPUs without train.deterministic"
        yield Problem("train.sdc_check_every", train.sdc_check_every, rule, "Set train.deterministic=true, or this to 0.")
    options = schema.parse_options(compiler.options)[0] if train.deterministic else {}
    for name, value in REPEATABLE.items():
        if options.get(name, value) != value:
            rule = f"train.deterministic sets {name}={str(value).lower()}"
            yield Problem("compiler.options", compiler.options, rule, f"Take {name} out, or set train.deterministic=false.")


def _lora(train: Train, init: Init, dtypes: Dtypes) -> Iterable[Problem]:
    """Yield a problem for each setting that adapters exclude."""
    if train.freeze.strip():
        rule = "has no effect: with lora.rank above 0 only adapters are trained"
        yield Problem("train.freeze", train.freeze, rule, "Set '', or lora.rank to 0.")
    if init.what != "weights":
        rule = "moments of the base's own weights, which are not trained with lora.rank above 0, do not exist"
        yield Problem("init.what", init.what, rule, "Set weights.")
    for name in ("m", "v"):
        if getattr(dtypes, name) == INT8:
            rule = "moments of adapters are too few to be worth storing in blocks"
            yield Problem(f"dtypes.{name}", INT8, rule, "Set f32 or bf16.")


def _base(run: RunConfig, devices: Devices) -> Iterable[Problem]:
    """Yield a problem if another setting excludes a base in fewer bits."""
    base, m = run.lora.base, run.model
    if base == "bf16":
        return
    if run.precision == "fp8" and not m.outside:
        rule = "is not for precision=fp8, whose matmuls round weights of 16 bits in each step"
        yield Problem("lora.base", base, rule, "Set precision=bf16, or lora.base=bf16.")
    else:
        layout, _ = find_layout(run, devices)
        shards = {axis: layout.shards(axis) for axis in rules.SPLIT.values()} if layout else {}
        yield from rules.base_problems(base, m, shards)


def _pairs(loss: Loss, data: Data, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem for each setting that a preference loss (loss.name=dpo) excludes."""
    if not data.masks_documents:
        rule = "loss.name=dpo compares documents of a sequence, each of which must attend only to itself"
        yield Problem("data.packing", data.packing, rule, "Set documents.")
    if data.max_segments == 1:
        yield Problem("data.max_segments", 1, "the two members of a pair are in one sequence", "Set 0, or 2 or more.")
    if loss.z_loss > 0 and "loss.z_loss" not in bad:
        rule = "is not for loss.name=dpo, whose logits loss.beta keeps near those of the reference model"
        yield Problem("loss.z_loss", loss.z_loss, rule, "Set 0.")


def _mtp(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem if another setting excludes multi-token prediction."""
    m, key = run.model, "model.mtp_layers"
    excluded = (
        (run.loss.name != "cross_entropy", f"the modules have a loss of their own beside cross_entropy, not {run.loss.name}"),
        (run.lora.rank > 0, "adapters are added to the model's own layers alone, and no other weight is trained"),
        (run.mesh.stage != 1, f"the modules are on no stage of a pipeline, and mesh.stage = {run.mesh.stage}"),
        (bool(m.attention_pattern), "the modules are built for models whose layers all see the same"),
        (m.logit_multiplier != 1, "the modules have the factor of no logits"),
        (m.family not in FAMILIES, f"the model of {m.family} runs no such modules"),
    )
    if rule := next((rule for broken, rule in excluded if broken), ""):
        yield Problem(key, m.mtp_layers, rule, "Set 0.")
    elif "data.seq_len" not in bad and m.mtp_layers >= run.data.seq_len:
        rule = f"no token of a sequence of data.seq_len = {run.data.seq_len} has a target so far ahead"
        yield Problem(key, m.mtp_layers, rule, "Set 1.")


def _sample_and_log(sample: Sample, log: Log) -> Iterable[Problem]:
    """Yield a problem for samples that would never be written, and for a tracker with a wrong value or without its package."""
    if sample.every_steps > 0 and sample.max_tokens == 0:
        rule = "sample.max_tokens = 0 writes no samples"
        yield Problem("sample.every_steps", sample.every_steps, rule, "Set it to 0, or sample.max_tokens above 0.")
    for name, form, words in TRACKERS:
        value = getattr(log, name)
        if value and not re.fullmatch(form, value):
            yield Problem(f"log.{name}", value, f"must be {words}", f"For example --config.log.{name}=pretraining.")
        elif value and importlib.util.find_spec(name) is None:
            remedy = f"Set log.{name} to '', or install it. {installed.install_remedy(name)}"
            yield Problem(f"log.{name}", value, f"the package {name} is not installed", remedy)
