"""Random settings: each draw is refused with fixes that work, or trains as one device does.

    python tests/random_settings.py FIRST COUNT    judge draws FIRST, FIRST + 1, ...; print a line for each

A draw is a command line for configs/tiny.py, in float32, on at most 8 CPU devices.
"""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import helpers
import numpy as np
from remedies import named_fix

from jaxtrain.config import launch
from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import MESH_AXES, ConfigError, Problem, RunConfig
from jaxtrain.data import loading
from jaxtrain.models import FAMILIES, presets
from jaxtrain.models.structure import SIZES
from jaxtrain.step.program import build_program
from jaxtrain.step.validate import validate_step
from jaxtrain.train import parity

DEVICES = 8
ROUNDS = 16  # of fixes until a draw must be accepted
STEPS = 2

# Settings that say how a model is computed, and not what it learns.
LAYOUT = (
    *(
        "mesh.",
        "sharding.",
        "parallel.",
        "remat.",
        "pipeline.",
        "attention.impl",
        "moe.impl",
    ),
    *("train.grad_accum", "train.accumulate", "loss.chunk"),
)
PLAIN = {
    "precision": "f32",
    "data.source": "synthetic",
    "eval.every_steps": "0",
    "mesh.data": "1",
    "mesh.fsdp": "1",
    "train.steps": "20",
    "optimizer.warmup_steps": "3",
    "model.init_std": "0.05",  # larger weights multiply the rounding errors of each layer
}
# The losses that balance experts are of each microbatch, so that another number of microbatches trains differently.
UNBALANCED = {"moe.balance_loss": "0", "moe.z_loss": "0"}


SMALL = {
    "num_experts": 4,
    "experts_per_token": 2,
    "dense_layers": 1,
    "dense_d_ff": 32,
    "shared_d_ff": 16,
    "router_groups": 2,
    "groups_per_token": 1,
    "sliding_window": 12,
    "rope_original_len": 32,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


def flags_of(preset: str) -> dict[str, str]:
    """Return the settings of a published model, except its size."""
    keys = {key: SMALL.get(key, value) for key, value in presets()[preset].items() if key not in SIZES}
    return {f"model.{key}": str(value) for key, value in keys.items()}


def draw(seed: int) -> dict[str, str]:
    """Return dotted key -> text of one draw. In every third one, stages have different numbers of layers."""
    rng = np.random.default_rng([20261128, seed])

    def one_of(*values: Any) -> str:
        return str(values[int(rng.integers(len(values)))])

    def maybe(chance: float, **settings: Any) -> dict[str, str]:
        return {key.replace("__", "."): str(value) for key, value in settings.items()} if rng.random() < chance else {}

    def flags(section: str, chance: float, *names: str) -> dict[str, str]:
        return {f"{section}.{name}": "true" for name in names if rng.random() < chance}

    heads = int(one_of(1, 2, 3, 4, 4, 6, 8, 8))
    found = PLAIN | {
        "model.family": one_of(*FAMILIES),
        "model.num_layers": one_of(1, 2, 3, 3, 4, 5),
        "model.num_heads": str(heads),
        "model.num_kv_heads": one_of(*(n for n in range(1, heads + 1) if heads % n == 0 or rng.random() < 0.1)),
        "model.d_model": one_of(24, 32, 32, 48, 64),
        "model.d_ff": one_of(24, 32, 40, 48),
        "model.vocab_size": one_of(264, 264, 272, 277),
        "data.seq_len": one_of(16, 24, 32, 32, 40),
        "data.packing": one_of("documents", "documents", "best_fit", "none"),
        "data.max_segments": one_of(0, 6),
        "train.global_batch": one_of(4, 8, 8, 12, 16),
        "train.grad_accum": one_of(1, 1, 2, 2, 4, 3),
        "loss.chunk": one_of(2048, 48, 7),
    }
    found |= maybe(0.5, model__head_dim=one_of(8, 12, 16, 20))
    names = ("tied_head", "qk_norm", "qkv_bias", "attention_out_bias", "attention_sinks")
    found |= flags("model", 0.25, *names) | maybe(0.3, model__norm_placement=one_of("post", "sandwich"))
    found |= flags("model", 0.15, "qk_norm_joint", "attention_gate", "mlp_bias", "shared_gate")
    found |= maybe(0.15, model__partial_rotary_factor=0.5) | maybe(
        0.15, model__residual_multiplier=0.5, model__logit_multiplier=0.25
    )
    found |= maybe(0.3, model__sliding_window=one_of(5, 12)) | maybe(
        0.15, model__attention_pattern=one_of("lg", "llg", "lgl", "ln", "gn")
    )
    found |= maybe(0.15, model__attention_softcap=5.0) | maybe(0.15, model__logit_softcap=3.0)
    found |= maybe(0.2, model__rope_scaling=one_of("llama3", "yarn", "linear"), model__rope_original_len=32)
    found |= maybe(0.15, model__local_rope_base=100.0) | maybe(0.15, loss__z_loss=0.01)
    if rng.random() < 0.4:
        experts = int(one_of(2, 3, 4, 4, 6, 8))
        found |= {"model.num_experts": str(experts), "model.experts_per_token": one_of(1, 2, 2, 3)}
        found |= flags("model", 0.25, "router_bias", "router_logit_bias", "expert_bias")
        found |= (
            maybe(0.3, model__shared_d_ff=16) | maybe(0.3, model__router="sigmoid") | maybe(0.2, model__renormalize="false")
        )
        found |= maybe(0.2, model__dense_layers=1, model__dense_d_ff=32)
        found |= maybe(0.15, model__router_groups=2, model__groups_per_token=1)
    if rng.random() < 0.15:
        parts = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": one_of(8, 12)}
        found |= {f"model.{name}": str(size) for name, size in parts.items()} | maybe(0.5, model__q_lora_rank=24)
        found |= {"model.num_kv_heads": str(heads)}
        found.pop("model.head_dim", None)
    if rng.random() < 0.4:
        found |= flags_of(one_of(*presets()))
        found |= maybe(float("model.kv_lora_rank" in found), model__num_kv_heads=heads)
    found |= UNBALANCED if "model.num_experts" in found else {}
    found |= maybe(0.1, model__mtp_layers=one_of(1, 2))
    sizes = dict.fromkeys(MESH_AXES, 1)
    for _ in range(int(rng.integers(1, 4))):
        axis, size = one_of(*MESH_AXES), int(one_of(2, 2, 2, 3, 4))
        sizes[axis] *= size if math.prod(sizes.values()) * size <= DEVICES else 1
    if seed % 3 == 0:
        sizes = dict.fromkeys(MESH_AXES, 1) | {"stage": int(one_of(2, 2, 3, 4)), one_of("fsdp", "expert", "tensor", "seq"): 2}
        found |= {"model.num_layers": one_of(*(n for n in (3, 5, 7) if n > sizes["stage"]))}
    found |= {f"mesh.{axis}": str(size) for axis, size in sizes.items()}
    found |= maybe(0.3, pipeline__schedule="interleaved", pipeline__groups=2) | maybe(0.2, pipeline__schedule="gpipe")
    found |= maybe(0.6, sharding__zero=one_of(0, 1, 2)) | maybe(0.3, sharding__gather=one_of("forward", "step"))
    found |= maybe(0.4, parallel__context=one_of("ulysses", "gather")) | maybe(0.3, parallel__scan_layers="false")
    found |= maybe(0.5, remat__policy=one_of("none", "full", "dots", "attention")) | maybe(0.2, remat__every=2)
    found |= maybe(0.3, attention__impl=one_of("chunked", "reference")) | maybe(
        0.2, train__accumulate=one_of("layer", "microbatch")
    )
    found |= maybe(0.25, optimizer__name="muon") | maybe(0.1, lora__rank=4)
    found |= maybe(0.15, train__freeze=one_of("embed.*", "layers.mlp.*", "head", "*.scale"))
    return found


def argv(settings: dict[str, str]) -> list[str]:
    return [f"--config={launch.DEFAULT_CONFIG}", *(f"--config.{key}={value}" for key, value in settings.items())]


def problems_of(settings: dict[str, str]) -> tuple[RunConfig, list[Problem]]:
    """Return the run of a command line, and its problems: those of the config, or those of the abstract program."""
    loaded = loading.load_config(argv(settings))
    size = min(DEVICES, max(1, math.prod(dataclasses.astuple(loaded.run.mesh))))
    problems = [*loaded.problems, *validate_step(loaded.run, Devices("cpu", "cpu", size, 16.0, "a test"))]
    if not problems:
        try:
            build_program(loaded.run, helpers.devices_of(loaded.run))
        except ConfigError as error:
            problems = error.problems
    return loaded.run, problems


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a draw: what was `wrong`, "" if nothing was; the settings that ran, and the fixes that led to them."""

    wrong: str
    settings: dict[str, str]
    fixed: tuple[str, ...] = ()
    error: float = 0.0  # the largest difference from one device, relative to its bound


def mended(settings: dict[str, str]) -> Verdict:
    """Apply the fix that the first problem names, until there are no problems."""
    done: list[str] = []
    for _ in range(ROUNDS):
        _, problems = problems_of(settings)
        if not problems:
            return Verdict("", settings, tuple(done))
        fix = named_fix(problems[0])
        pairs = [word.partition("=") for word in fix.split()]
        after = settings | {key: value.strip("'") for key, _, value in pairs}
        left = {(p.key, p.rule) for p in problems_of(after)[1]}
        if not fix or (problems[0].key, problems[0].rule) in left:
            return Verdict(f"no fix that works: {problems[0]}", settings, tuple(done))
        done.append(fix)
        settings = after
    return Verdict(f"refused after {ROUNDS} fixes: {problems[0]}", settings, tuple(done))


def on_one_device(settings: dict[str, str]) -> dict[str, str]:
    """Return the settings of the same model on one device."""
    return {key: value for key, value in settings.items() if not key.startswith(LAYOUT)} | {"mesh.data": "1", "mesh.fsdp": "1"}


def train(settings: dict[str, str]) -> list[parity.Trained]:
    """Return the results of one step, and of STEPS steps, from the same weights."""
    run = loading.load_config(argv(settings)).run
    made = build_program(run, helpers.devices_of(run))
    step = helpers.compiled(made)
    batch = functools.partial(helpers.host_batch, run)
    return [parity.take_steps(made, step, helpers.start(made), batch, steps)[0] for steps in (1, STEPS)]


def judge(seed: int, say: Callable[[str], None] = lambda line: None) -> Verdict:
    """Return the verdict on one draw."""
    verdict = mended(draw(seed))
    if verdict.wrong:
        return verdict
    settings = verdict.settings
    plain = on_one_device(settings)
    _, problems = problems_of(plain)
    if problems:
        return dataclasses.replace(verdict, wrong=f"one device is refused: {problems[0]}")
    say(f"training {' '.join(argv(settings)[1:])}")
    run = problems_of(settings)[0]
    pairs = list(zip(train(settings), train(plain), strict=True))
    bounds = parity.bounds(pairs[0][1], None, 1, run.train.global_batch * run.data.seq_len)
    first, later = (parity.compare_runs(got, reference, bounds) for got, reference in pairs)
    # An element whose gradient is 0 at first, and rounding later, moves by a whole step of Adam in either direction.
    later = dataclasses.replace(later, parameter=first.parameter)
    measures = (first.gradient, first.parameter, later.loss, later.grad_norm)
    error = max(m.value / m.bound for m in measures)
    return dataclasses.replace(verdict, wrong="; ".join((*first.violations, *later.violations)), error=error)


def main(arguments: Sequence[str]) -> int:
    first, count = map(int, arguments)
    found = 0
    for seed in range(first, first + count):
        begin = time.monotonic()
        try:
            verdict = judge(seed)
        except Exception as error:  # noqa: BLE001 - every kind of exception is a finding
            verdict = Verdict(f"{type(error).__name__}: {str(error)[:2000]}", draw(seed))
        found += bool(verdict.wrong)
        word = "WRONG" if verdict.wrong else "ok   "
        print(
            f"{seed:5} {word} {time.monotonic() - begin:5.1f} s  {verdict.error:.3f}  fixes: {', '.join(verdict.fixed)}",
            flush=True,
        )
        if verdict.wrong:
            print(f"      {verdict.wrong}\n      {' '.join(argv(verdict.settings)[1:])}", flush=True)
    print(f"{count} draws, {found} findings")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
