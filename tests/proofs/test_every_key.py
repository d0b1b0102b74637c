"""Every key of the config has an effect: on a value, a size or the text of the program, or on the files of a run.

A key without a row in one of the tables below fails the test.
"""

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest
import runs as whole_runs

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import hardware
from jaxtrain.config import schema as config
from jaxtrain.config.launch import Launch
from jaxtrain.config.schema import RunConfig
from jaxtrain.data import loading, stdlib
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.metrics import files as metrics
from jaxtrain.metrics import samples
from jaxtrain.optim.optimizer import make_schedule
from jaxtrain.step import compiler
from jaxtrain.train import generation
from jaxtrain.train import run as train
from jaxtrain.train.initial_state import open_data

BASE = {"model.num_layers": 2, "data.max_segments": 8}
SPLIT = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
RING = {"mesh.seq": 4}
STAGES = {"mesh.stage": 2, "mesh.tensor": 2, "train.grad_accum": 4}
TURNS = {**STAGES, "pipeline.schedule": "interleaved", "pipeline.groups": 2, "model.num_layers": 8}
EXPERTS = {"model.num_experts": 4}
SPREAD = {**EXPERTS, "mesh.expert": 2, "mesh.fsdp": 2}
YARN = {"model.rope_scaling": "yarn", "model.rope_original_len": 256, "model.head_dim": 16}
WINDOWS = {"model.sliding_window": 9, "model.attention_pattern": "lg"}

# ---- Keys whose value is a constant of the program

# (settings that the keys need, key -> another value). All keys of a row change at once.
CONSTANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        WINDOWS | {"model.mtp_layers": 1},
        {"model.norm_eps": 1.1e-3, "model.sliding_window": 13, "model.rope_base": 507.0, "model.local_rope_base": 107.0}
        | {"model.attention_softcap": 20.25, "model.logit_softcap": 30.75, "loss.z_loss": 1.7e-3, "loss.mtp_weight": 0.36}
        | {"model.embedding_multiplier": 12.75, "model.residual_multiplier": 0.31}
        | {
            "train.loss_spike_sigma": 5.7,
            "train.steps": 43,
            "train.ema_decay": 0.9619,
            "optimizer.lr": 2.3e-3,
            "optimizer.lr_min": 2.7e-4,
        }
        | {"optimizer.warmup_steps": 4, "optimizer.weight_decay": 0.23, "optimizer.beta1": 0.83, "optimizer.beta2": 0.93}
        | {"optimizer.eps": 1.3e-5, "optimizer.clip_norm": 0.53, "optimizer.groups": "head:lr=0.57"},
    ),
    (
        EXPERTS | {"model.router_bias": True, "model.rope_scaling": "llama3", "optimizer.name": "muon"},
        {"moe.balance_loss": 0.13, "moe.sequence_balance_loss": 0.013, "moe.z_loss": 0.017, "moe.bias_rate": 0.19}
        | {"model.rope_factor": 4.5, "model.rope_low_freq": 2.5, "model.rope_high_freq": 8.75}
        | {"model.rope_original_len": 4099, "model.routed_scaling": 2.7, "optimizer.momentum": 0.91},
    ),
    ({"loss.name": "dpo", "lora.rank": 2}, {"lora.alpha": 8.5, "loss.beta": 0.37, "loss.label_smoothing": 0.21}),
    ({"lora.rank": 2, "lora.alpha": 13.5}, {"lora.rslora": True, "model.logit_multiplier": 0.47}),
]
# The constant that follows from the value of a key, where it is not the value itself.
CONSTANT = {
    "train.steps": 43 - 4,  # steps of the schedule after the warm-up
    "train.ema_decay": 1 - 0.9619,
    "optimizer.lr_min": 2.7 / 23,  # relative to the peak
    "optimizer.warmup_steps": -2.3e-3 * 3 / 4,  # the change from the first step of the warm-up to the last
    "optimizer.beta1": 1 - 0.83,
    "optimizer.beta2": 1 - 0.93,
    "optimizer.groups": 0.57,
    "model.rope_high_freq": 8.75 - 2.5,
    "lora.alpha": 8.5 / 2,
    "lora.rslora": 13.5 / 2**0.5,
}


def constants(run: RunConfig) -> np.ndarray:
    """Return all scalar constants of a run's program."""
    return np.array([float(x) for x in set(re.findall(r"dense<(-?[\d.]+(?:[eE][-+]?\d+)?)>", helpers.lowered(run)))])


@functools.cache
def with_values(row: int) -> np.ndarray:
    """Return the constants of a row's program, with the row's values."""
    given, keys = CONSTANTS[row]
    return constants(helpers.tiny(BASE | given | keys))


@pytest.mark.parametrize("row", range(len(CONSTANTS)))
def test_values_of_keys_stand_in_the_program(row):
    """A value's constant is in the program that has the value, and not in the programs of the other rows."""
    others = [with_values(other) for other in range(len(CONSTANTS)) if other != row]
    for key, value in CONSTANTS[row][1].items():
        expected = CONSTANT.get(key, value)
        assert np.isclose(with_values(row), expected, rtol=1e-6, atol=0).any(), f"key {key}: no {expected:g} in the program"
        for other in others:
            assert not np.isclose(other, expected, rtol=1e-6, atol=0).any(), f"key {key}: {expected:g} is there without it"


# ---- Keys that change the arrays, the shardings, the text or the batches of a program

LATENT = {
    "model.num_kv_heads": 8,
    "model.head_dim": 0,
    "model.kv_lora_rank": 16,
    "model.q_lora_rank": 16,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 8,
    "model.v_head_dim": 12,
}
DENSE = {**EXPERTS, "model.dense_layers": 1, "model.dense_d_ff": 48, "model.num_layers": 3}

OF_DELTA = {"linear_key_heads": 2, "linear_value_heads": 4, "linear_key_dim": 8, "linear_value_dim": 8, "linear_conv": 4}
DELTA = {"model.attention_pattern": "dg"} | {f"model.{name}": value for name, value in OF_DELTA.items()}

# (settings that the keys need, key -> another value). Each key changes alone. Other tests check that the change is right.
ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"model.num_layers": 1, "model.d_model": 32, "model.num_heads": 4, "model.num_kv_heads": 2, "model.head_dim": 16}),
    ({}, {"model.d_ff": 64, "model.vocab_size": 272, "model.tied_head": True, "model.qk_norm": True, "model.qkv_bias": True}),
    ({}, {"model.attention_out_bias": True, "model.attention_sinks": True, "model.norm_placement": "post"}),
    ({}, {"model.attention_gate": True, "model.mlp_bias": True, "model.partial_rotary_factor": 0.5}),
    ({"model.qk_norm": True}, {"model.qk_norm_joint": True}),
    (EXPERTS | {"model.shared_d_ff": 32}, {"model.shared_gate": True}),
    ({}, {"model.mtp_layers": 2, "model.family": "helpers:WiderFamily", "model.attn_logit_scale": 24**-0.5}),
    ({"model.sliding_window": 8}, {"model.attention_pattern": "lg"}),
    (LATENT, {f"model.{name}": 4 for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")}),
    (LATENT, {"model.v_head_dim": 8}),
    (DELTA, {f"model.{name}": 2 * value for name, value in OF_DELTA.items()}),
    ({}, {"model.rope_scaling": "llama3"}),
    (YARN, {"model.rope_beta_fast": 4.0, "model.rope_beta_slow": 0.25, "model.rope_truncate": False}),
    (YARN, {"model.rope_attention_factor": 1.5}),
    (YARN | {"model.rope_mscale_all_dim": 1.0}, {"model.rope_mscale": 0.5}),
    (YARN | {"model.rope_mscale": 1.0}, {"model.rope_mscale_all_dim": 0.5}),
    ({}, {"model.num_experts": 4}),
    (EXPERTS, {f"model.{name}": True for name in ("router_logit_bias", "expert_bias", "router_bias")}),
    (EXPERTS, {"model.shared_d_ff": 32, "model.experts_per_token": 1, "model.router": "sigmoid", "model.renormalize": False}),
    (EXPERTS | {"model.groups_per_token": 2, "model.router_groups": 2}, {"model.router_groups": 4}),
    (EXPERTS | {"model.router_groups": 4}, {"model.groups_per_token": 2}),
    (DENSE, {"model.dense_layers": 2, "model.dense_d_ff": 80}),
    (EXPERTS, {"mesh.expert": 2, "moe.capacity_factor": 1.0}),
    ({**EXPERTS, "mesh.expert": 4, "mesh.data": 2}, {"moe.impl": "ragged"}),
    (SPREAD, {"sharding.rules.experts": ""}),
    (SPREAD | {"model.num_experts": 2}, {"sharding.rules.expert_embed": ""}),
    ({}, {f"mesh.{axis}": 2 for axis in ("data", "fsdp", "tensor", "seq")}),
    ({"train.grad_accum": 2}, {"mesh.stage": 2}),
    (STAGES, {"pipeline.schedule": "gpipe"}),
    (TURNS, {"pipeline.groups": 4}),
    (SPLIT, {"sharding.zero": 2, "sharding.gather": "step", "sharding.rules.batch": "fsdp"}),
    (SPLIT, {f"sharding.rules.{name}": "" for name in ("residual", "embed", "heads", "mlp", "vocab")}),
    ({**RING, "sharding.rules.embed": "fsdp"}, {"sharding.rules.sequence": ""}),
    (RING, {"parallel.context": "gather"}),
    ({}, {f"dtypes.{name}": "bf16" for name in ("params", "m", "v", "grads")}),
    ({"precision": "bf16"}, {"dtypes.reduce": "f32", "attention.forward": "fp8"}),
    ({"precision": "fp8"}, {"fp8.exclude": "wo,down"}),
    ({}, {"precision": "bf16", "attention.impl": "chunked", "parallel.scan_layers": False, "remat.policy": "full"}),
    ({"remat.policy": "custom", "remat.tensors": "q=keep"}, {"remat.tensors": "q=keep,mlp_up=keep"}),
    ({"remat.policy": "full"}, {"remat.every": 2}),
    ({}, {"data.source": "TEXT", "data.packing": "none", "data.max_segments": 2, "data.seed": 1, "data.seq_len": 32}),
    ({}, {"train.global_batch": 8, "train.grad_accum": 2, "train.freeze": "layers.mlp.*", "loss.chunk": 16}),
    ({"train.grad_accum": 2, "parallel.scan_layers": False}, {"train.accumulate": "microbatch"}),
    ({}, {"loss.name": "helpers:half_loss", "lora.rank": 2}),
    ({"lora.rank": 2}, {"lora.targets": "wq"}),
    (EXPERTS | {"lora.rank": 2}, {"lora.experts": "shared"}),
    ({"lora.rank": 2}, {"lora.base": "fp8"}),
    ({}, {"optimizer.name": "helpers:slower_adamw", "optimizer.schedule": "linear", "optimizer.decay_steps": 5}),
    ({"optimizer.schedule": "wsd"}, {"optimizer.decay_shape": "sqrt"}),
    ({}, {"optimizer.offload": "moments"}),
]
PROGRAM = {key: (value, given) for given, keys in ROWS for key, value in keys.items()}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(helpers.text_file(tmp_path_factory.mktemp("text") / "lines.tok", modules=4))


def facets(run: RunConfig) -> list[Callable[[], Any]]:
    """Return functions that each describe one aspect of a run's program, cheap ones first."""

    def arrays(tree: Any) -> list[Any]:
        found = []
        for path, a in jax.tree_util.tree_leaves_with_path(tree):
            where = a.sharding
            layout = str(where.spec), where.memory_kind, dict(where.mesh.shape)
            found.append((jax.tree_util.keystr(path), a.shape, str(a.dtype), *layout))
        return found

    return [
        lambda: arrays(helpers.program(run).state),
        lambda: arrays(helpers.program(run).batch),
        lambda: helpers.program(run).kernel.name,
        lambda: {k: v.tobytes() for k, v in helpers.host_batch(run, 0).items()},
        lambda: rates(run),
        lambda: evaluation(run),
        lambda: equations(run),
        lambda: helpers.lowered(run),
    ]


@functools.cache
def rates(run: RunConfig) -> list[float]:
    """Return the learning rate of each step."""
    return np.asarray(make_schedule(run.optimizer, run.train.steps)(np.arange(run.train.steps))).tolist()


@functools.cache
def evaluation(run: RunConfig) -> str:
    """Return the text of the evaluation, which is lowered in a fraction of a train step's time."""
    program = helpers.program(run)
    return program.eval_step.lower(program.state.params, program.eval_batch).as_text()


@functools.cache
def equations(run: RunConfig) -> str:
    """Return the train step's equations, without the addresses of functions."""
    program = helpers.program(run)
    return re.sub("0x[0-9a-f]+", "", str(program.train_step.trace(program.state, program.batch).jaxpr))


def differs(one: RunConfig, other: RunConfig) -> bool:
    return any(mine() != theirs() for mine, theirs in zip(facets(one), facets(other), strict=True))


@pytest.mark.parametrize("key", PROGRAM)
def test_key_changes_the_program(key, text):
    value, given = PROGRAM[key]
    value = text if value == "TEXT" else value
    assert differs(helpers.tiny(BASE | given | {key: value}), helpers.tiny(BASE | given)), f"key {key} changes nothing"


def test_the_same_config_gives_the_same_program():
    """Otherwise every key would seem to change the program.

    The two configs differ in sample.max_tokens alone. No program depends on it, but the caches are keyed by the config: both
    programs are lowered.
    """
    one = helpers.tiny(BASE)
    other = dataclasses.replace(one, sample=dataclasses.replace(one.sample, max_tokens=5))  # another key of the caches
    assert one != other
    assert not differs(one, other)


# ---- Keys of the loop, seen in the files of two runs that differ in many keys at once


class Runs:
    """Two whole runs of four steps, "base" and "other", each trained when it is first needed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.base = {
            "data.source": helpers.text_file(folder / "train.tok", modules=2),
            "data.eval_source": helpers.text_file(folder / "held_out.tok", modules=1),
            "data.max_segments": 4,  # as with synthetic data, for which the step is compiled already
            "train.steps": 4,
            "eval.every_steps": 2,
            "eval.sequences": 24,
            "checkpoint.every_steps": 2,
            "checkpoint.keep": 1,
            "log.every_steps": 1,
            "sample.max_tokens": 4,
            "paths.cache": "",
            "paths.data": folder / "data",
        }
        self.other = {
            "log.every_steps": 2,
            "log.tensorboard": "false",
            "eval.every_steps": 1,
            "eval.sequences": 8,
            "checkpoint.dir": folder / "elsewhere",
            "checkpoint.every_steps": 1,
            "checkpoint.keep": 2,
            "checkpoint.keep_every": 2,
            "profile.start": 1,
            "profile.steps": 2,
            "profile.dump_hlo": "true",
            "sample.every_steps": 3,
        }

    def config(self, name: str, **more: Any) -> RunConfig:
        changes = self.base | (self.other if name == "other" else {}) | more
        return loading.load_config(whole_runs.arguments(whole_runs.small(), self.folder / name, changes)).run

    @functools.cache  # noqa: B019 - lives as long as this module's tests
    def workdir(self, name: str) -> Path:
        place = self.folder / name
        assert train.attempt(self.config(name), place, Launch("configs/tiny.py", "", (), ())).exit_code == 0
        return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def logged(kind: str) -> Callable[[Path], list[int]]:
    return lambda workdir: [line["step"] for line in metrics.read_metrics(workdir / "metrics.jsonl") if line["kind"] == kind]


def saves(workdir: Path) -> list[int]:
    """Return the steps at which a checkpoint was written, even if it was deleted later."""
    return [int(step) for step in re.findall(r"checkpoint (\d+): ", (workdir / "log.txt").read_text())]


def kept(workdir: Path) -> list[int]:
    """Return the steps of the complete checkpoints in the run's folder or, if it has none, in "elsewhere"."""
    here = workdir / "checkpoints"
    return Checkpoints(here if here.exists() else workdir.parent / "elsewhere").steps()


def has_any(pattern: str) -> Callable[[Path], bool]:
    return lambda workdir: any(workdir.glob(pattern))


# Key -> (a function of a run's folder, its result for "base", its result for "other").
LEFT: dict[str, tuple[Callable[[Path], Any], Any, Any]] = {
    "log.every_steps": (logged("train"), [1, 2, 3, 4], [2, 4]),
    "log.tensorboard": (has_any("tb/*"), True, False),
    "eval.every_steps": (logged("eval"), [0, 2, 4], [0, 1, 2, 3, 4]),
    "checkpoint.dir": (has_any("checkpoints/*"), True, False),
    "checkpoint.every_steps": (saves, [2, 4], [1, 2, 3, 4]),
    "checkpoint.keep": (kept, [4], [2, 3, 4]),  # "other" keeps the two newest, and the multiples of 2
    "checkpoint.keep_every": (kept, [4], [2, 3, 4]),
    "profile.start": (has_any("profile/plugins/profile/*/*.xplane.pb"), False, True),
    "profile.steps": (lambda workdir: "steps 1 to 2" in (workdir / "log.txt").read_text(), False, True),
    "profile.dump_hlo": (has_any("profile/train_step.hlo.txt"), False, True),
    "sample.every_steps": (lambda w: [x.step for x in samples.parse_samples((w / "samples.txt").read_text())], [4], [3, 4]),
}


@pytest.mark.parametrize("key", LEFT)
def test_a_key_changes_what_a_run_leaves_behind(key, runs):
    seen, base, other = LEFT[key]
    assert (seen(runs.workdir("base")), seen(runs.workdir("other"))) == (base, other)


def eval_sequences(runs):
    """Fewer held-out sequences give another mean loss with the same weights."""
    files = (metrics.read_metrics(runs.workdir(name) / "metrics.jsonl") for name in ("base", "other"))
    base, other = ({(line["kind"], line["step"]): line["loss"] for line in lines} for lines in files)
    assert base["train", 2] == other["train", 2] and base["eval", 2] != other["eval", 2]


# ---- Keys that act before a run, or outside of it


NARROW = {"model.num_layers": 1, "model.d_model": 16, "model.d_ff": 16}


def initial(**changes: Any) -> dict[str, np.ndarray]:
    """Return the initial matrices of a model, by name."""
    tensors = helpers.initial_tensors(helpers.tiny(NARROW | {key.replace("__", "."): x for key, x in changes.items()}))
    return {name: x for name, x in tensors.items() if name.startswith("params.") and x.ndim > 1}


def train_seed(runs):
    one, other = initial(), initial(train__seed=1)
    assert all((one[name] != other[name]).mean() > 0.99 for name in one)


def model_init_std(runs):
    """The standard deviation of each initial matrix is proportional to model.init_std."""
    usual, wide = initial(), initial(model__init_std=0.05)
    for name, x in usual.items():
        np.testing.assert_allclose(np.std(wide[name]) / np.std(x), 0.05 / config.Model().init_std, rtol=1e-3)


def sampling(runs):
    run = helpers.tiny(NARROW)
    sampler, weights = generation.Sampler(run, helpers.program(run).placement), helpers.fresh_state(run).params

    def write(**changes: Any) -> str:
        ask = samples.Sampling(**{"prompt": "x", "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, **changes})
        return generation.continue_text(sampler, weights, ByteTokenizer(), ask, stops=[256])

    assert write(prompt="y").startswith("y") and write().startswith("x")
    assert len(write(max_tokens=2)) < len(write())
    assert write(top_p=1e-6) == write(temperature=0.0) != write()
    assert write(seed=1) != write()


def train_deterministic(runs):
    """The key sets XLA's options for repeatable results on GPUs, and makes a run store XLA's autotuning results."""
    for asked in (True, False):
        program = helpers.program(runs.config("base", **{"train.deterministic": asked}))
        chosen = compiler.choose_options(program, compiler.make_card(141.0)).options
        assert (chosen.items() >= hardware.REPEATABLE.items()) == asked
    plain = compiler.XlaOptions({}, "", ())
    assert "xla_gpu_dump_autotune_results_to" in compiler.add_run_options(plain, True, 0, True, runs.folder).options
    assert compiler.add_run_options(plain, True, 0, False, runs.folder).options == {}


def paths_data(runs):
    """The stdlib corpus is written to the config's folder. Two of its modules are enough here."""
    with pytest.MonkeyPatch.context() as patch:
        files = stdlib.list_files()
        sides = [next(f for f in files if stdlib.is_validation(f[0]) == side) for side in (False, True)]
        patch.setattr(stdlib, "list_files", lambda: sorted(sides))
        run = runs.config("base", **{"data.source": "stdlib", "data.eval_source": ""})
        folder = Path(run.paths.data)
        shutil.rmtree(folder, ignore_errors=True)
        open_data(run)
        assert len(list(folder.glob("stdlib-*.tok"))) == 2


ALONE: dict[str, Callable[[Runs], None]] = {
    "model.init_std": model_init_std,
    "train.seed": train_seed,
    "train.deterministic": train_deterministic,
    "eval.sequences": eval_sequences,
    **{f"sample.{name}": sampling for name in ("prompt", "max_tokens", "temperature")},
    "paths.data": paths_data,
}


@pytest.mark.parametrize("test", dict.fromkeys(ALONE.values()), ids=lambda test: test.__name__)
def test_a_key_has_its_effect(test, runs):
    test(runs)


ELSEWHERE = {
    "env.set",  # tests/unit/test_environment.py
    "data.eval_source",  # tests/proofs/test_watching.py
    "log.wandb",
    "log.peak_tflops",
    "log.trackio",  # tests/proofs/test_trackers.py
    "log.mlflow",
    "paths.cache",  # tests/unit/test_startup.py
    "data.tokenizer",  # tests/unit/test_data.py
    "train.memory_fraction",  # tests/unit/test_config.py
    "train.epochs",  # tests/unit/test_config.py
    "train.batch_ramp",  # tests/proofs/test_batch_ramp.py
    "train.max_minutes",  # tests/unit/test_timelimit.py
    "train.timeouts",  # tests/unit/test_watchdog.py
    "checkpoint.keep_best",  # tests/proofs/test_train.py
    "checkpoint.step",  # tests/proofs/test_resume.py
    "checkpoint.allow_change",
    "init.from",
    "init.what",
    "init.base",  # tests/campaign/test_adapters_further.py
    "train.on_divergence",  # tests/proofs/test_divergence.py
    "train.max_skipped_steps",
    "train.sdc_check_every",  # tests/campaign/test_corruption.py
    "compiler.options",  # tests/unit/test_compiler.py
}


def test_every_key_is_in_one_table():
    tables = ({key for _, keys in CONSTANTS for key in keys}, PROGRAM, LEFT, ALONE, ELSEWHERE)
    known = set(config.all_keys())
    found = {key: sum(key in table for table in tables) for key in known}
    wrong = {key: count for key, count in found.items() if count != 1}
    assert not wrong, "give a key that changes nothing any test has seen a row here, or remove it"
    assert not {key for table in tables for key in table} - known, "a row for a key that is gone"
