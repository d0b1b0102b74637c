"""Find all problems of a config at once, before a device is used or a file is written. Imports no jax.

Each check yields a `Problem` (key, value, rule, remedy) for each rule that the config breaks. If a key's value is invalid,
other checks of this key yield nothing, so one mistake gives one line.
"""

import dataclasses
import difflib
import functools
import importlib.util
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import declaration, installed, own_parts, schema
from jaxtrain.config.commands import CONFIG
from jaxtrain.config.environment import overlay
from jaxtrain.config.hardware import REPEATABLE, Devices
from jaxtrain.config.schema import FIT, Problem, RunConfig, flatten, nearest, parts_of, to_dict
from jaxtrain.models import FAMILIES, flops
from jaxtrain.models.activations import parse_tensors
from jaxtrain.models.precision import EXPERTS, eight_bit, matmuls, unsupported
from jaxtrain.models.rules import check_model
from jaxtrain.optim import groups
from jaxtrain.optim.moments import INT8
from jaxtrain.runtime.timelimit import limit_s
from jaxtrain.runtime.watchdog import parse_budgets
from jaxtrain.step.resume import check_allow_change
from jaxtrain.step.validate_layout import check_layout, mesh_sizes
from jaxtrain.step.validate_places import check_places

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

SLOWEST = 0.98  # decay of a second moment in bfloat16, up to which updates are accurate to 1%


def validate(run: RunConfig, devices: Devices, workdir: Path) -> list[Problem]:
    """Return all problems of a resolved config on these devices. Reads the file system, writes nothing."""
    values = dict(flatten(to_dict(run)))
    bad = {p.key for p in check_keys(values)}
    problems = validate_step(run, devices)
    problems += _steps(run, workdir, bad)
    problems += _environment(run, devices, bad)
    problems += check_places(run, workdir)
    problems += _shown(run)
    problems += _host_memory(run, devices, bad)
    # Imported here: the data pipeline is in a higher layer, and the imports depend on the source.
    from jaxtrain.data import pipeline

    if not bad & {"model.vocab_size", "data.seq_len", "data.max_segments"}:
        reported = {p.key for p in problems}
        found = pipeline.check(run.data, run.model.vocab_size, run.eval.every_steps > 0, run.loss, bool(run.init.from_))
        problems += [p for p in found if p.key not in reported]
    return problems


def validate_step(run: RunConfig, devices: Devices, fits: bool = True) -> list[Problem]:
    """Return the problems that depend only on the config and the devices, and not on files or the environment.

    fits: remedies name numbers with which no problem of the key is left (config.FIT), whose search takes up to a second.
    """
    check = lambda key, number: {p.key for p in _problems(changed(run, {key: number}), devices)}  # noqa: E731
    return schema.with_fits(_problems(run, devices), check if fits else None)


def changed(run: RunConfig, values: Mapping[str, Any]) -> RunConfig:
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
    values = dict(flatten(to_dict(run)))
    wrong = {p.key: p for p in check_keys(values)}
    if not wrong:
        return _beside(run, devices, set())
    usual, keys = dict(flatten(schema.default_config())), schema.declared()
    floats = {key for key in wrong if isinstance(values[key], float)}
    run = changed(run, {key: keys[key].nearest(values[key]) if key in floats else usual[key] for key in wrong})
    unread = {p.key: p for p in _beside(run, devices, wrong.keys() - floats) if p.key in floats} if floats else {}
    found = [dataclasses.replace(unread.get(key, p), value=p.value) for key, p in wrong.items()]
    return found + [p for p in _beside(run, devices, set(wrong)) if p.key not in wrong]


def _beside(run: RunConfig, devices: Devices, bad: set[str]) -> list[Problem]:
    problems = list(check_layout(run, devices, bad))
    problems += check_model(run.model, bad)
    problems += _remat(run, bad)
    problems += _fp8(run, devices, bad)
    problems += schema.parse_options(run.compiler.options)[1]
    problems += _attention(run, devices, bad)
    problems += _schedule(run, bad)
    problems += _second_moment(run, bad)
    problems += _repeatable(run, devices)
    problems += groups.problems(run.optimizer.groups, run.optimizer.name)
    problems += [] if bad & {"optimizer.lr", "optimizer.weight_decay"} else groups.too_fast(run.optimizer)
    problems += _lora(run, bad)
    problems += _init(run)
    problems += _pairs(run, bad)
    problems += _mtp(run, bad)
    return problems


def check_keys(values: Mapping[str, Any]) -> Iterable[Problem]:
    """Yield the problems of single keys: values that are no choice, modules that cannot be found, and numbers out of range.

    Args:
        values: dotted key -> value.
    """
    for name, key in schema.declared().items():
        value = values[name]
        if key.importable and ":" in value:
            yield from _importable(name, value)
        elif key.choices and value not in key.choices:
            yield _no_choice(name, value, key)
        elif wrong := key.out_of_range(value):
            rule, remedy = wrong
            yield Problem(name, value, rule, FIT if isinstance(value, int) and value <= declaration.MOST else remedy)


def _no_choice(name: str, value: str, key: declaration.Key) -> Problem:
    meant = ALIASES.get(value.lower(), value.lower())
    if meant in REFUSED and (name == "precision" or name.startswith("dtypes.")):
        return Problem(name, value, REFUSED[meant], "Use bf16.")
    if (name, value) == ("optimizer.offload", "params"):
        remedy = "Set moments, and spread them over more microbatches by train.grad_accum."
        return Problem(name, value, NO_PARAMS, remedy)
    remedy = nearest(meant if meant in key.choices else value, list(key.choices))
    if key.importable:
        remedy = f"{remedy.rstrip('.')} (or package.module:name for your own)."
    return Problem(name, value, "no such choice", remedy)


def _importable(key: str, value: str) -> Iterable[Problem]:
    if problem := own_parts.not_found(key, value):
        yield problem


def _remat(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    if run.remat.policy == "custom" and not run.remat.tensors.strip():
        yield Problem(
            "remat.tensors", "", "remat.policy = custom needs a list", "For example q=keep,mlp_up=offload; or policy full."
        )
    if run.remat.tensors.strip() and run.remat.policy != "custom" and "remat.policy" not in bad:
        rule = f"is read only with remat.policy = custom, which is {run.remat.policy}"
        yield Problem("remat.tensors", run.remat.tensors, rule, "Set '', or remat.policy to custom.")
    else:
        yield from parse_tensors(run.remat.tensors)[1]
    if run.remat.policy == "auto" and run.remat.every > 1:
        rule = "layers share checkpoints, and remat.policy = auto decides for single layers"
        yield Problem("remat.every", run.remat.every, rule, "Set it to 1, or another remat.policy.")
    if not bad & {"remat.every", "model.num_layers"} and run.remat.every > run.model.num_layers:
        rule = f"there are only model.num_layers = {run.model.num_layers} layers"
        yield Problem("remat.every", run.remat.every, rule, FIT)


def _fp8(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    if "precision" in bad:
        return
    yield from unsupported(run, devices)
    if run.model.family in FAMILIES:  # weights of other families have names only after the model is built
        yield from eight_bit(run, matmuls(run.model))[1]


def _attention(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    if run.attention.forward == "fp8":
        yield from _attention_fp8(run, devices, bad)
    if run.attention.impl == "pallas":
        yield from list(_pallas(run, devices, bad))[:1]
    if run.attention.impl == "cudnn":
        yield from list(_cudnn(run, devices, bad))[:1]


def _cudnn(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    other = "Set attention.impl to auto or chunked"

    def refuse(rule: str, remedy: str = f"{other}.") -> Problem:
        return Problem("attention.impl", "cudnn", rule, remedy)

    if devices.kind != "gpu":
        yield refuse(f"cuDNN needs a GPU, and the run would be on {devices.name} ({devices.source})")
    sm = devices.sm if devices.kind == "gpu" else 0
    if 0 < sm < 80:
        yield refuse(f"cuDNN attention needs a GPU from Ampere (sm80) on; {devices.name} is sm{sm}")
    elif 0 < sm < 90 and run.data.masks_documents:
        remedy = f"{other}, or data.packing to none."
        yield refuse(f"packed documents need a GPU from Hopper (sm90) on; {devices.name} is sm{sm}", remedy)
    elif devices.kind == "gpu" and run.train.deterministic and run.data.masks_documents:
        rule = "with train.deterministic cuDNN has 2 bytes of workspace for each score of each packed document"
        yield refuse(rule, "Set attention.impl to auto.")
    if run.precision == "f32":
        yield refuse("cuDNN attention has no float32", f"{other}, or precision to bf16.")
    most = 128 if 0 < sm < 90 else 256
    if "model.head_dim" not in bad and (run.model.head_dim > most or run.model.head_dim % 8):
        yield refuse(f"model.head_dim = {run.model.head_dim} must be a multiple of 8 and at most {most} there")
    if run.model.attention_softcap > 0:
        yield refuse(f"cuDNN has no soft cap (model.attention_softcap = {run.model.attention_softcap:g})")


def _attention_fp8(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    def refuse(rule: str, remedy: str = "Set attention.forward to compute.") -> Problem:
        return Problem("attention.forward", "fp8", rule, remedy)

    if devices.kind == "gpu" and devices.sm not in (0, 90):
        yield refuse(f"FP8 attention needs Hopper's WGMMA (sm90); {devices.name} is sm{devices.sm}")
    if run.precision == "f32":
        yield refuse("FP8 attention computes its backward pass in bf16", "Set precision to bf16 or fp8.")
    on_gpu = devices.kind == "gpu" and "model.head_dim" not in bad
    if on_gpu and (run.model.head_dim > 192 or run.model.head_dim % 8):
        yield refuse(f"model.head_dim = {run.model.head_dim} must be a multiple of 8 and at most 192 there")


def _pallas(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    def refuse(rule: str) -> Problem:
        return Problem("attention.impl", "pallas", rule, "Set attention.impl to auto or chunked.")

    if devices.kind != "gpu":
        yield refuse(f"the Pallas kernels need a GPU, and the run would be on {devices.name} ({devices.source})")
    elif devices.sm not in (0, 90):
        yield refuse(f"the Pallas kernels need Hopper's WGMMA (sm90); {devices.name} is sm{devices.sm}")
    if run.precision == "f32":
        yield refuse("the Pallas kernels have no float32")
    if "model.head_dim" not in bad and (run.model.head_dim > 256 or run.model.head_dim % 8):
        yield refuse(f"model.head_dim = {run.model.head_dim} must be a multiple of 8 and at most 256 there")


def _schedule(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    o, steps = run.optimizer, run.train.steps
    if bad & {"optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.schedule", "train.steps"}:
        return
    if o.warmup_steps > steps:
        rule = f"the run has only train.steps = {steps}, so the learning rate would never reach its peak"
        yield Problem("optimizer.warmup_steps", o.warmup_steps, rule, f"Set {steps} or less.")
    elif o.schedule != "constant":
        decay = o.decay_steps or (steps // 5 if o.schedule == "wsd" else 0)
        if max(1, o.warmup_steps) + decay > steps:  # the first step has the peak without a warm-up
            named = "optimizer.decay_steps" if o.decay_steps else "optimizer.warmup_steps"
            value = o.decay_steps or o.warmup_steps
            rule = f"warmup ({o.warmup_steps}) and decay ({decay}) together are longer than train.steps = {steps}"
            yield Problem(named, value, rule, "Shorten one of them, or train longer.")
    if o.schedule != "constant" and o.lr_min > o.lr and not bad & {"optimizer.lr", "optimizer.lr_min"}:
        yield Problem(
            "optimizer.lr_min",
            o.lr_min,
            f"is above the peak, optimizer.lr = {o.lr:g}",
            f"Set {o.lr / 10 if o.lr > 10 * declaration.SMALLEST else 0:g}.",
        )


def _second_moment(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem if Adam's second moment has too few bits for its slow decay.

    A step multiplies the moment by beta2 when gradients become small. bfloat16 has 8 significant bits and rounds to nearest,
    so it loses decreases of less than 2**-9 to 2**-8 of the value. The error of updates (root mean square over parameters) is
    0.2% at beta2 = 0.98, 1.4% at 0.99, and 14% at 0.995. From 0.998 on, the moment never decreases, and the error is half or
    more (test_optimizer_steps.py).
    """
    o = run.optimizer
    if run.dtypes.v == "bf16" and o.name in groups.METHODS and o.beta2 > SLOWEST and not bad & {"dtypes.v", "optimizer.beta2"}:
        rule = f"rounds away the decay of optimizer.beta2 = {o.beta2:g}, so the second moment hardly decays"
        yield Problem("dtypes.v", "bf16", rule, "Set f32.")


def _steps(run: RunConfig, workdir: Path, bad: set[str]) -> Iterable[Problem]:
    c, p, steps = run.checkpoint, run.profile, run.train.steps
    if c.keep_best and not run.eval.every_steps:
        rule = "the lowest held-out loss decides which is the best, and eval.every_steps=0 computes none"
        yield Problem("checkpoint.keep_best", True, rule, "Set eval.every_steps=100.")
    if "train.steps" in bad:
        return
    folder = Path(c.dir).expanduser() if c.dir else workdir / "checkpoints"
    if "checkpoint.step" in bad:
        pass
    elif c.step > steps:
        yield Problem(
            "checkpoint.step", c.step, f"is beyond the last step, train.steps = {steps}", "Set an earlier one, or -1."
        )
    elif c.step >= 0 and not folder.is_dir():
        yield Problem("checkpoint.step", c.step, f"there is no {folder} to resume from", "Set -1, or the run's own --workdir.")
    if not bad & {"profile.start", "profile.steps"} and p.start > 0 and p.start + p.steps > steps:
        rule = f"tracing {p.steps} steps from there goes past the last step, train.steps = {steps}"
        yield Problem("profile.start", p.start, rule, "Start earlier, or 0 for no trace.")
    yield from check_allow_change(c.allow_change)
    yield from limit_s(run.train.max_minutes)[1]
    yield from parse_budgets(run.train.timeouts)[1]


def _environment(run: RunConfig, devices: Devices, bad: set[str]) -> list[Problem]:
    if "train.memory_fraction" in bad:
        return []
    return overlay(run, devices, os.environ)[1]


WIDTH = {"f32": 4.0, "bf16": 2.0, INT8: 1.0}  # bytes of a number; the scales of int8's blocks are left out
# Logical axes of the weights. A mesh axis that shards none of them holds replicas.
OF_WEIGHTS = ("embed", "heads", "kv_heads", "mlp", "vocab", "layers", "experts", "expert_embed")


def _host_memory(run: RunConfig, devices: Devices, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem if parameters, moments and gradients exceed the memory that the CPU devices of one process share.

    The formula is a lower bound, without activations and temporaries. In a run with adapters or train.freeze, it counts only
    parameters: frozen weights have no moments and no gradients.
    """
    keys = ("model.", "dtypes.", "mesh", "sharding.", "optimizer.name", "lora.", "train.freeze")
    if devices.kind != "cpu" or any(key.startswith(keys) for key in bad) or run.model.family not in FAMILIES:
        return
    sizes, _ = mesh_sizes(run, devices)
    if sizes is None:
        return
    trained = not (run.lora.rank or run.train.freeze.strip())
    moments = {"adamw": ("m", "v"), "muon": ("m",)}.get(run.optimizer.name, ())
    held = ("params", *moments, "grads") if trained else ("params",)
    types = [getattr(run.dtypes, name) for name in held] if not run.lora.rank else [run.compute]  # adapters' base weights
    each = sum(WIDTH.get(name, 0.0) for name in types)
    split = {axis for name, onto in schema.rules_in_use(run, sizes).items() if name in OF_WEIGHTS for axis in onto}
    copies = math.prod(size for axis, size in sizes.items() if axis not in split)
    here = (devices.node or devices.count) / devices.count  # fraction of all devices that are in this process
    need = flops.parameters(run.model)["total"] * each * copies * here / 2**30
    have = devices.memory_gib * (devices.node or devices.count)
    if need > have:
        rule = f"a step takes at least {need:.1f} GiB for parameters, moments and gradients, and {have:.1f} GiB of this "
        rule += "machine's memory are available"
        yield Problem(
            "devices",
            f"{devices.count} cpu",
            rule,
            f"Plan it with python -m jaxtrain plan {CONFIG} --topology=h200:8, or run --config=configs/tiny.py.",
        )


def _repeatable(run: RunConfig, devices: Devices) -> Iterable[Problem]:
    """Yield a problem for each setting that contradicts train.deterministic=true, or needs it while it is false."""
    if run.train.sdc_check_every > 0 and devices.kind == "gpu" and not run.train.deterministic:
        rule = "compares the bits of two runs of a step, which differ on GPUs without train.deterministic"
        yield Problem("train.sdc_check_every", run.train.sdc_check_every, rule, "Set train.deterministic=true, or this to 0.")
    if not run.train.deterministic:
        return
    options, _ = schema.parse_options(run.compiler.options)
    for name, value in REPEATABLE.items():
        if name in options and options[name] != value:
            rule = f"train.deterministic sets {name}={str(value).lower()}"
            yield Problem("compiler.options", run.compiler.options, rule, f"Take {name} out, or set train.deterministic=false.")


def _lora(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem for each setting that adapters exclude, and for each name in lora.targets that no weight has."""
    if "lora.rank" in bad:
        return
    if not run.lora.rank:
        default = schema.Lora()
        unread = {"init.base": (run.init.base, ""), "lora.targets": (run.lora.targets, default.targets)}
        for key, (value, usual) in unread.items():
            if value != usual:
                yield Problem(key, value, "is read for adapters only, and lora.rank is 0", f"Set {usual!r}, or lora.rank.")
        return
    yield from _targets(run)
    if run.train.freeze.strip():
        rule = "has no effect: with lora.rank above 0 only adapters are trained"
        yield Problem("train.freeze", run.train.freeze, rule, "Set '', or lora.rank to 0.")
    if run.init.what != "weights":
        rule = "moments of the base's own weights, which are not trained with lora.rank above 0, do not exist"
        yield Problem("init.what", run.init.what, rule, "Set weights.")
    for name in ("m", "v"):
        if getattr(run.dtypes, name) == INT8:
            rule = "moments of adapters are too few to be worth storing in blocks"
            yield Problem(f"dtypes.{name}", INT8, rule, "Set f32 or bf16.")


def _init(run: RunConfig) -> Iterable[Problem]:
    if run.init.what != "weights" and not run.init.from_ and not run.lora.rank:
        yield Problem("init.what", run.init.what, "is read with init.from only", "Set weights, or init.from.")


def _targets(run: RunConfig) -> Iterable[Problem]:
    """Yield a problem if lora.targets names no weight, or a name that no weight for adapters has."""
    key, targets, known = "lora.targets", parts_of(run.lora.targets), run.model.adaptable
    every = "Set '', which is " + ",".join(known) + "."
    if not targets:
        yield Problem(key, run.lora.targets, "names no weight", every)
    wrong = [target for target in targets if target not in known]
    if not wrong or run.model.family not in FAMILIES:
        return
    meant = {target: difflib.get_close_matches(target, known, 1, 0.7) for target in wrong}
    experts = [target for target in wrong if run.model.num_experts and f"layers.mlp.{target}" in EXPERTS]
    rule = f"no weight for adapters has the name {', '.join(wrong)}"
    if experts == wrong:
        rule = f"the weights of experts take no adapters, and {', '.join(wrong)} are theirs"
    left = [name for target in targets for name in ([target] if target in known else meant[target])]
    gone = [target for target in wrong if not meant[target] and target not in experts]
    yield Problem(key, run.lora.targets, rule, every if gone or not left else f"Set {','.join(dict.fromkeys(left))}.")


def _pairs(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem for each setting that a preference loss (loss.name=dpo) excludes."""
    if not run.loss.of_pairs:
        return
    if not run.data.masks_documents:
        rule = "loss.name=dpo compares documents of a sequence, each of which must attend only to itself"
        yield Problem("data.packing", run.data.packing, rule, "Set documents.")
    if run.data.max_segments == 1:
        yield Problem("data.max_segments", 1, "the two members of a pair are in one sequence", "Set 0, or 2 or more.")
    if run.loss.z_loss > 0 and "loss.z_loss" not in bad:
        rule = "is not for loss.name=dpo, whose logits loss.beta keeps near those of the reference model"
        yield Problem("loss.z_loss", run.loss.z_loss, rule, "Set 0.")


def _mtp(run: RunConfig, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem if another setting excludes multi-token prediction, or if loss.mtp_weight is set without it."""
    m, key = run.model, "model.mtp_layers"
    if bad & {key, "loss.mtp_weight"}:
        return
    if not m.mtp_layers:
        if run.loss.mtp_weight != (default := schema.Loss().mtp_weight):
            rule = f"is read only with {key}, which is 0"
            yield Problem("loss.mtp_weight", run.loss.mtp_weight, rule, f"Set {default:g}, or {key} to 1.")
        return
    rules = (
        (run.loss.name != "cross_entropy", f"the modules have a loss of their own beside cross_entropy, not {run.loss.name}"),
        (run.lora.rank > 0, "adapters are added to the model's own layers alone, and no other weight is trained"),
        (run.mesh.stage != 1, f"the modules are on no stage of a pipeline, and mesh.stage = {run.mesh.stage}"),
        (bool(m.attention_pattern), "the modules are built for models whose layers all see the same"),
        (m.family not in FAMILIES and "model.family" not in bad, f"the model of {m.family} runs no such modules"),
    )
    for broken, rule in rules:
        if broken:
            yield Problem(key, m.mtp_layers, rule, "Set 0.")
            return
    if "data.seq_len" not in bad and m.mtp_layers >= run.data.seq_len:
        rule = f"no token of a sequence of data.seq_len = {run.data.seq_len} has a target so far ahead"
        yield Problem(key, m.mtp_layers, rule, "Set 1.")


def _shown(run: RunConfig) -> Iterable[Problem]:
    """Yield a problem for samples that would never be written, for an invalid log.wandb, and if wandb is not installed."""
    if run.sample.every_steps > 0 and run.sample.max_tokens == 0:
        rule = "sample.max_tokens = 0 writes no samples"
        yield Problem("sample.every_steps", run.sample.every_steps, rule, "Set it to 0, or sample.max_tokens above 0.")
    where = run.log.wandb
    if where and not re.fullmatch(r"([^\s/\\#?%:]+/)?[^\s/\\#?%:]+", where):
        yield Problem("log.wandb", where, "must be PROJECT or ENTITY/PROJECT", "For example --config.log.wandb=pretraining.")
    elif where and importlib.util.find_spec("wandb") is None:
        remedy = f"Set log.wandb to '', or install it. {installed.remedy('wandb')}"
        yield Problem("log.wandb", where, "the package wandb is not installed", remedy)
