"""Keys one by one: the choices of those that have some, and the ranges of numbers."""

import importlib.util
from collections.abc import Iterable
from typing import Any

from jaxtrain.activations import POLICIES
from jaxtrain.config import Problem, nearest
from jaxtrain.models import FAMILIES
from jaxtrain.optim import groups
from jaxtrain.optim.moments import INT8
from jaxtrain.train.stages import SCHEDULES

CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("f32", "bf16", "fp8"),
    "model.rope_scaling": ("none", "llama3", "linear"),
    "attention.impl": ("auto", "cudnn", "pallas", "chunked", "reference"),
    "attention.context": ("ring", "ulysses", "gather"),
    "sharding.gather": ("layer", "forward", "step"),
    "train.accumulate": ("auto", "layer", "microbatch"),
    "train.on_divergence": ("stop", "rollback"),
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
    "pipeline.schedule": SCHEDULES,
    "model.router": ("softmax", "sigmoid"),
    "experts.impl": ("auto", "pallas", "ragged"),
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
            *("model.rope_factor", "model.rope_original_len", "remat.every", "data.seq_len"),
            *(
                "train.steps",
                "train.global_batch",
                "train.grad_accum",
                "train.max_skips",
                "loss.chunk",
                "eval.sequences",
                "checkpoint.keep",
            ),
            *("log.every_steps", "profile.steps", "model.experts_per_token", "pipeline.groups"),
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
            *(
                "data.max_segments",
                "data.prefetch",
                "train.seed",
                "train.memory_fraction",
                "optimizer.lr",
                "optimizer.lr_min",
            ),
            *(
                "optimizer.warmup_steps",
                "optimizer.decay_steps",
                "optimizer.weight_decay",
                "optimizer.momentum",
                "optimizer.beta1",
                "optimizer.beta2",
            ),
            *(
                "train.spike",
                "train.verify_every",
                "optimizer.clip_norm",
                "eval.every_steps",
                "checkpoint.every_steps",
                "checkpoint.keep_every",
            ),
            *(
                "sharding.zero",
                "attention.ulysses",
                "log.peak_tflops",
                "log.gpu_every_s",
                "log.mfu_alert",
                "loss.z_loss",
                "sample.every_steps",
                "sample.max_tokens",
                "sample.temperature",
                "sample.seed",
                "profile.start",
                "lora.rank",
            ),
            *("model.num_experts", "model.shared_d_ff"),
            *("experts.capacity", "experts.balance_loss", "experts.z_loss", "experts.bias_rate"),
        ),
        0,
    ),
    "checkpoint.step": -1,
}
ABOVE_ZERO = (
    *("model.norm_eps", "model.rope_base", "model.rope_low_freq", "model.init_std", "optimizer.eps", "sample.top_p"),
    *("lora.alpha", "experts.buffer"),
)
AT_MOST = {"sharding.zero": 3, "log.mfu_alert": 1.0, "train.memory_fraction": 1.0, "sample.top_p": 1.0}
BELOW_ONE = ("optimizer.momentum", "optimizer.beta1", "optimizer.beta2")


def choices(values: dict[str, Any]) -> Iterable[Problem]:
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


def ranges(values: dict[str, Any]) -> Iterable[Problem]:
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
