"""Every key of the config has an effect: on a value, a size or the text of the program, or on the files of a run.

A key without a row in one of the tables below fails the test.
"""

import dataclasses
import functools
import re
import shutil
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest

from jaxtrain import config, generation, hardware, metrics, samples
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.data import stdlib
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.launch import Launch
from jaxtrain.sharding import LayoutError, make_placement
from jaxtrain.train import compiler, state
from jaxtrain.train import run as train
from jaxtrain.train.batch_feed import BatchFeed
from jaxtrain.train.initial_state import choose_start, open_data
from jaxtrain.train.program import Program
from jaxtrain.train.step_log import measure_rates

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

# Settings that the keys need -> key -> (another value, the constant that follows from it). All keys of a row change at once.
CONSTANTS: list[tuple[dict[str, Any], dict[str, tuple[Any, float]]]] = [
    (
        WINDOWS,
        {
            "model.norm_eps": (1.1e-3, 1.1e-3),
            "model.sliding_window": (7, 7),
            "model.attention_softcap": (20.25, 20.25),
            "model.logit_softcap": (30.75, 30.75),
            "model.rope_base": (507.0, 507.0),
            "model.local_rope_base": (107.0, 107.0),
            "loss.z_loss": (1.7e-3, 1.7e-3),
            "train.loss_spike_sigma": (5.7, 5.7),
            "train.steps": (43, 43 - 4),  # steps of the schedule after the warm-up
            "optimizer.lr": (2.3e-3, 2.3e-3),
            "optimizer.lr_min": (2.7e-4, 2.7 / 23),  # relative to the peak
            "optimizer.warmup_steps": (4, -2.3e-3 * 3 / 4),  # the change from the first step of the warm-up to the last
            "optimizer.weight_decay": (0.23, 0.23),
            "optimizer.beta1": (0.83, 1 - 0.83),
            "optimizer.beta2": (0.93, 1 - 0.93),
            "optimizer.eps": (1.3e-5, 1.3e-5),
            "optimizer.clip_norm": (0.53, 0.53),
            "optimizer.groups": ("head:lr=0.57", 0.57),
        },
    ),
    (
        EXPERTS | {"model.router_bias": True, "model.rope_scaling": "llama3"},
        {
            "moe.balance_loss": (0.13, 0.13),
            "moe.sequence_balance_loss": (0.013, 0.013),
            "moe.z_loss": (0.017, 0.017),
            "model.routed_scaling": (2.7, 2.7),
            "moe.bias_rate": (0.19, 0.19),
            "model.rope_factor": (4.5, 4.5),
            "model.rope_low_freq": (2.5, 2.5),
            "model.rope_high_freq": (8.75, 8.75 - 2.5),
            "model.rope_original_len": (4099, 4099),
        },
    ),
    ({"lora.rank": 2}, {"lora.alpha": (8.5, 8.5 / 2)}),
    ({"optimizer.name": "muon"}, {"optimizer.momentum": (0.91, 0.91)}),
    ({"model.mtp_layers": 1}, {"loss.mtp_weight": (0.37, 0.37)}),
    ({"loss.name": "dpo"}, {"loss.beta": (0.37, 0.37), "loss.label_smoothing": (0.21, 0.21)}),
]


def constants(run: RunConfig) -> np.ndarray:
    """Return all scalar constants of a run's program."""
    return np.array([float(x) for x in set(re.findall(r"dense<(-?[\d.]+(?:[eE][-+]?\d+)?)>", helpers.lowered(run)))])


@pytest.mark.parametrize("row", range(len(CONSTANTS)))
def test_values_of_keys_stand_in_the_program(row):
    given, keys = CONSTANTS[row]
    with_values = {key: value for key, (value, _) in keys.items()}
    before, after = constants(helpers.tiny(BASE | given)), constants(helpers.tiny(BASE | given | with_values))
    for key, (_, expected) in keys.items():
        assert np.isclose(after, expected, rtol=1e-6, atol=0).any(), f"key {key}: no {expected:g} in the program"
        assert not np.isclose(before, expected, rtol=1e-6, atol=0).any(), f"key {key}: {expected:g} is there without it"


# ---- Keys that set sizes, types and shardings of a program's arrays


def tensor(name: str) -> Callable[[Program], Any]:
    """Return a function that finds a tensor of a program's state, by its name in checkpoints."""
    return lambda program: state.abstract_tensors(program.state)[name]


def size(name: str, axis: int) -> Callable[[Program], int]:
    return lambda program: tensor(name)(program).shape[axis]


def dtype(name: str) -> Callable[[Program], str]:
    return lambda program: {"float32": "f32", "bfloat16": "bf16"}[str(tensor(name)(program).dtype)]


def has(name: str) -> Callable[[Program], bool]:
    return lambda program: name in state.abstract_tensors(program.state)


def mesh(axis: str) -> Callable[[Program], int]:
    return lambda program: program.placement.mesh.shape.get(axis, 1)


def layers(program: Program) -> int:
    return len({n.split(".")[2] for n in state.abstract_tensors(program.state) if n.startswith("params.layers.")})


def adapted(program: Program) -> str:
    names = {n.rpartition(".")[2][:-2] for n in state.abstract_tensors(program.state) if ".lora." in n}
    return ",".join(sorted(names))


def without_moments(program: Program) -> str:
    """Return the patterns (`layers.mlp.*`, comma-separated) of the blocks, mlp or attention, whose weights have no moments."""
    moments = [name for name in state.abstract_tensors(program.state) if name.startswith("optimizer.mu.layers.0.")]
    return ",".join(f"layers.{x}.*" for x in ("mlp", "attention") if not any(f".{x}." in name for name in moments))


def moments_home(program: Program) -> str:
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(program.state.optimizer) if a.ndim > 1}
    return "moments" if kinds == {"pinned_host"} else "none"


def dense_layers(program: Program) -> int:
    return len(program.definition.abstract.get("dense_layers", {}))


LAYER = "params.layers.0."
DENSE = {"model.dense_layers": 1, "model.dense_d_ff": 48}
LATENT = {
    "model.num_kv_heads": 8,
    "model.kv_lora_rank": 16,
    "model.q_lora_rank": 16,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 8,
    "model.v_head_dim": 12,
}
# Key -> (another value, settings that the key needs, a function that finds the value in a program).
SHOWN: dict[str, tuple[Any, dict[str, Any], Callable[[Program], Any]]] = {
    "model.num_layers": (1, {}, layers),
    "model.d_model": (32, {}, size("params.embed.embedding", 1)),
    "model.num_heads": (4, {}, size(LAYER + "attention.wq", 1)),
    "model.num_kv_heads": (2, {}, size(LAYER + "attention.wk", 1)),
    "model.head_dim": (16, {}, size(LAYER + "attention.wq", 2)),
    "model.d_ff": (64, {}, size(LAYER + "mlp.gate", 1)),
    "model.vocab_size": (272, {}, size("params.embed.embedding", 0)),
    "model.tied_head": (True, {}, lambda program: not has("params.head")(program)),
    "model.qk_norm": (True, {}, has(LAYER + "attention.q_norm.scale")),
    "model.qkv_bias": (True, {}, has(LAYER + "attention.bk")),
    "model.attention_out_bias": (True, {}, has(LAYER + "attention.bo")),
    "model.attention_sinks": (True, {}, has(LAYER + "attention.sinks")),
    "model.router_logit_bias": (True, EXPERTS, has(LAYER + "mlp.router_logit_bias")),
    "model.expert_bias": (True, EXPERTS, has(LAYER + "mlp.down_bias")),
    "model.sandwich_norm": (True, {}, has(LAYER + "mlp_post_norm.scale")),
    "model.num_experts": (4, {}, lambda p: size(LAYER + "mlp.router", 1)(p) if has(LAYER + "mlp.router")(p) else 0),
    "model.router_bias": (True, EXPERTS, has(LAYER + "mlp.router_bias")),
    "model.shared_d_ff": (
        32,
        EXPERTS,
        lambda p: size(LAYER + "mlp.shared.up", 1)(p) if has(LAYER + "mlp.shared.up")(p) else 0,
    ),
    "model.dense_layers": (1, EXPERTS | {"model.dense_d_ff": 48}, dense_layers),
    "model.dense_d_ff": (80, EXPERTS | DENSE, size("params.dense_layers.0.mlp.gate", 1)),
    "model.mtp_layers": (2, {}, lambda program: len(program.definition.abstract.get("mtp", {}))),
    "model.kv_lora_rank": (24, LATENT, size(LAYER + "attention.wkv_up", 0)),
    "model.q_lora_rank": (24, LATENT, size(LAYER + "attention.wq_up", 0)),
    "model.qk_nope_head_dim": (4, LATENT | {"model.head_dim": 0}, lambda p: size(LAYER + "attention.wkv_up", 2)(p) - 12),
    "model.qk_rope_head_dim": (4, LATENT | {"model.head_dim": 0}, lambda p: size(LAYER + "attention.wkv_down", 1)(p) - 16),
    "model.v_head_dim": (8, LATENT, size(LAYER + "attention.wo", 2)),
    **{f"mesh.{axis}": (2, {}, mesh(axis)) for axis in ("data", "fsdp", "tensor", "seq")},
    "mesh.stage": (2, {"train.grad_accum": 2}, mesh("stage")),
    "mesh.expert": (2, EXPERTS, mesh("expert")),
    "dtypes.params": ("bf16", {}, dtype(LAYER + "mlp.gate")),
    "dtypes.m": ("bf16", {}, dtype("optimizer.mu.layers.0.mlp.gate")),
    "dtypes.v": ("bf16", {}, dtype("optimizer.nu.layers.0.mlp.gate")),
    "data.seq_len": (32, {}, lambda program: program.batch["tokens"].shape[2]),
    "train.global_batch": (8, {}, lambda program: program.batch["tokens"].shape[1]),
    "train.grad_accum": (2, {}, lambda program: program.batch["tokens"].shape[0]),
    "attention.impl": ("chunked", {}, lambda program: program.kernel.name.split()[0]),
    "optimizer.offload": ("moments", {}, moments_home),
    "train.freeze": ("layers.mlp.*", {}, without_moments),
    "lora.rank": (2, {}, lambda p: size(LAYER + "attention.lora.wq_a", 1)(p) if adapted(p) else 0),
    "lora.targets": ("wq", {"lora.rank": 2}, adapted),
}


@pytest.mark.parametrize("key", SHOWN)
def test_a_program_shows_the_value_of_a_key(key):
    value, given, shown = SHOWN[key]
    assert shown(helpers.program(helpers.tiny(BASE | given | {key: value}))) == value
    assert shown(helpers.program(helpers.tiny(BASE | given))) != value


# ---- Keys that change the compiled step's text, shardings, or batches

# Key -> (another value, settings that the key needs). Tests of each part check that the change is right.
PROGRAM: dict[str, tuple[Any, dict[str, Any]]] = {
    "precision": ("bf16", {}),
    "fp8.exclude": ("wo,down", {"precision": "fp8"}),
    "attention.forward": ("fp8", {"precision": "bf16"}),
    "model.family": ("helpers:WiderFamily", {}),
    "model.attention_pattern": ("lg", {"model.sliding_window": 8}),
    "model.attn_logit_scale": (24**-0.5, {}),
    "model.rope_scaling": ("llama3", {}),
    "model.rope_beta_fast": (4.0, YARN),
    "model.rope_beta_slow": (0.25, YARN),
    "model.rope_truncate": (False, YARN),
    "model.rope_attention_factor": (1.5, YARN),
    "model.rope_mscale": (0.5, YARN | {"model.rope_mscale_all_dim": 1.0}),
    "model.rope_mscale_all_dim": (0.5, YARN | {"model.rope_mscale": 1.0}),
    "pipeline.schedule": ("gpipe", STAGES),
    "pipeline.groups": (4, TURNS),
    "model.experts_per_token": (1, EXPERTS),
    "model.router": ("sigmoid", EXPERTS),
    "model.renormalize": (False, EXPERTS),
    "model.router_groups": (4, EXPERTS | {"model.groups_per_token": 2, "model.router_groups": 2}),
    "model.groups_per_token": (2, EXPERTS | {"model.router_groups": 4}),
    "moe.impl": ("ragged", {**EXPERTS, "mesh.expert": 4, "mesh.data": 2}),
    "moe.capacity_factor": (1.0, EXPERTS),
    "moe.buffer": (1.0, SPREAD),
    "sharding.zero": (2, SPLIT),
    "sharding.gather": ("step", SPLIT),
    "sharding.rules.sequence": ("", {**RING, "sharding.rules.embed": "fsdp"}),
    "parallel.context": ("gather", RING),
    "attention.ulysses": (2, {**RING, "parallel.context": "ulysses"}),
    "sharding.rules.batch": ("fsdp", SPLIT),
    "sharding.rules.residual": ("", SPLIT),
    "sharding.rules.embed": ("", SPLIT),
    "sharding.rules.mlp": ("", SPLIT),
    "sharding.rules.vocab": ("", SPLIT),
    "sharding.rules.experts": ("", SPREAD),
    "sharding.rules.expert_embed": ("", SPREAD | {"model.num_experts": 2}),
    "remat.policy": ("full", {}),
    "remat.tensors": ("q=keep,mlp_up=keep", {"remat.policy": "custom", "remat.tensors": "q=keep"}),
    "remat.every": (2, {"remat.policy": "full"}),
    "dtypes.grads": ("bf16", {}),
    "dtypes.reduce": ("f32", {"precision": "bf16"}),
    "data.source": ("synthetic,", {}),  # the test puts a token file here
    "data.packing": ("none", {}),
    "data.max_segments": (2, {}),
    "data.seed": (1, {}),
    "train.accumulate": ("microbatch", {"train.grad_accum": 2, "parallel.scan_layers": False}),
    "loss.name": ("helpers:half_loss", {}),
    "loss.chunk": (16, {}),
    "parallel.scan_layers": (False, {}),
    "optimizer.name": ("helpers:slower_adamw", {}),
    "optimizer.schedule": ("linear", {}),
    "optimizer.decay_steps": (5, {}),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(helpers.text_file(tmp_path_factory.mktemp("text") / "lines.tok", modules=4))


def facets(run: RunConfig) -> list[Callable[[], Any]]:
    """Return functions that each describe one aspect of a run's program, cheap ones first."""

    def arrays(tree: Any) -> list[Any]:
        return [
            (
                jax.tree_util.keystr(path),
                a.shape,
                str(a.dtype),
                str(a.sharding.spec),
                a.sharding.memory_kind,
                dict(a.sharding.mesh.shape),
            )
            for path, a in jax.tree_util.tree_leaves_with_path(tree)
        ]

    return [
        lambda: arrays(helpers.program(run).state),
        lambda: arrays(helpers.program(run).batch),
        lambda: helpers.program(run).kernel.name,
        lambda: {k: v.tobytes() for k, v in helpers.host_batch(run, 0).items()},
        lambda: helpers.lowered(run),
    ]


def differs(one: RunConfig, other: RunConfig) -> bool:
    return any(mine() != theirs() for mine, theirs in zip(facets(one), facets(other), strict=True))


def set_key(key: str, value: Any, given: dict[str, Any]) -> RunConfig:
    return helpers.tiny(BASE | given | {key: value})


@pytest.mark.parametrize("key", PROGRAM)
def test_key_changes_the_program(key, text):
    value, given = PROGRAM[key]
    value = text if key == "data.source" else value
    assert differs(set_key(key, value, given), helpers.tiny(BASE | given)), f"key {key} changes nothing"


def test_the_same_config_gives_the_same_program():
    """Otherwise every key would seem to change the program.

    The two configs differ in sample.seed alone. No program depends on it, but the caches are keyed by the config: both
    programs are lowered.
    """
    one = helpers.tiny(BASE)
    other = dataclasses.replace(one, sample=dataclasses.replace(one.sample, seed=5))  # another key of the caches
    assert one != other
    assert not differs(one, other)


def test_heads_are_split_together():
    """The rules of heads and kv_heads change the program if both change. A change of one, or a sharded head_dim, is refused."""
    both = {"sharding.rules.heads": "", "sharding.rules.kv_heads": ""}
    assert differs(helpers.tiny(BASE | SPLIT | both), helpers.tiny(BASE | SPLIT)), "heads and kv_heads change nothing"
    for key, value in (*both.items(), ("sharding.rules.head_dim", "tensor")):
        run = helpers.tiny(BASE | SPLIT | {key: value})
        with pytest.raises(LayoutError, match="key/value head|head_dim.*cannot be sharded"):
            make_placement(run, helpers.devices_of(run))


# ---- Keys of the loop, seen in the files of two runs that differ in many keys at once


class Runs:
    """Two whole runs of four steps, "base" and "other", each trained when it is first needed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.base = {
            "model.num_layers": 1,
            "model.d_model": 32,
            "model.num_heads": 2,
            "model.num_kv_heads": 1,
            "mesh.fsdp": 8,
            "data.source": str(helpers.text_file(folder / "train.tok", modules=4)),
            "data.eval_source": str(helpers.text_file(folder / "held_out.tok", modules=2)),
            "data.seq_len": 32,
            "train.steps": 4,
            "train.global_batch": 8,
            "eval.every_steps": 2,
            "eval.sequences": 24,
            "checkpoint.every_steps": 2,
            "checkpoint.keep": 1,
            "log.every_steps": 1,
            "sample.max_tokens": 4,
            "paths.cache": "",
            "paths.data": str(folder / "data"),
        }
        self.other = {
            "log.every_steps": 2,
            "log.tensorboard": False,
            "eval.every_steps": 1,
            "eval.sequences": 8,
            "checkpoint.dir": str(folder / "elsewhere"),
            "checkpoint.every_steps": 1,
            "checkpoint.keep": 2,
            "checkpoint.keep_every": 2,
            "profile.start": 1,
            "profile.steps": 2,
            "profile.dump_hlo": True,
            "sample.every_steps": 3,
        }

    def config(self, name: str, **more: Any) -> RunConfig:
        return helpers.tiny(self.base | (self.other if name == "other" else {}) | more)

    @functools.cache  # noqa: B019 - lives as long as this module's tests
    def workdir(self, name: str) -> Path:
        place = self.folder / name
        assert train.attempt(self.config(name), place, Launch("configs/tiny.py", "", (), ())).exit_code == 0
        return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def logged(kind: str) -> Callable[[Path], list[int]]:
    return lambda workdir: [line["step"] for line in metrics.read(workdir / "metrics.jsonl") if line["kind"] == kind]


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
    "eval.every_steps": (logged("eval"), [2, 4], [1, 2, 3, 4]),
    "checkpoint.dir": (has_any("checkpoints/*"), True, False),
    "checkpoint.every_steps": (saves, [2, 4], [1, 2, 3, 4]),
    "checkpoint.keep": (kept, [4], [2, 3, 4]),  # "other" keeps the two newest, and the multiples of 2
    "checkpoint.keep_every": (kept, [4], [2, 3, 4]),
    "profile.start": (has_any("profile/plugins/profile/*/*.xplane.pb"), False, True),
    "profile.steps": (lambda workdir: "Tracing steps 1 to 2." in (workdir / "log.txt").read_text(), False, True),
    "profile.dump_hlo": (has_any("profile/train_step.hlo.txt"), False, True),
    "sample.every_steps": (lambda w: [x.step for x in samples.read((w / "samples.txt").read_text())], [4], [3, 4]),
}


@pytest.mark.parametrize("key", LEFT)
def test_a_key_changes_what_a_run_leaves_behind(key, runs):
    seen, base, other = LEFT[key]
    assert (seen(runs.workdir("base")), seen(runs.workdir("other"))) == (base, other)


def eval_sequences(runs):
    """Fewer held-out sequences give another mean loss with the same weights."""
    files = (metrics.read(runs.workdir(name) / "metrics.jsonl") for name in ("base", "other"))
    base, other = ({(line["kind"], line["step"]): line["loss"] for line in lines} for lines in files)
    assert base["train", 2] == other["train", 2] and base["eval", 2] != other["eval", 2]


# ---- Keys that act before a run, or outside of it


def start(runs: Runs, **changes: Any) -> Any:
    """Return the result of `choose_start` for a run that resumes in the folder of "other"."""
    run = runs.config("other", **changes)
    runs.workdir("other")
    return choose_start(run, Checkpoints(runs.folder / "elsewhere"), helpers.program(run))


def checkpoint_step(runs):
    assert start(runs).step == 4
    assert start(runs, **{"checkpoint.step": 2}).step == 2


def checkpoint_allow_change(runs):
    change = {"data.seq_len": 16}
    with pytest.raises(ConfigError, match="data.seq_len"):
        start(runs, **change)
    assert start(runs, **change, **{"checkpoint.allow_change": "data.seq_len"}).resumed


def initial(**changes: Any) -> dict[str, np.ndarray]:
    """Return the initial matrices of a model, by name."""
    tensors = helpers.initial_tensors(helpers.tiny(BASE | {key.replace("__", "."): x for key, x in changes.items()}))
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
    run = helpers.tiny({"model.num_layers": 1})
    sampler, weights = generation.Sampler(run, helpers.program(run).placement), helpers.fresh_state(run).params

    def write(**changes: Any) -> str:
        ask = config.Sample(**{"prompt": "x", "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, **changes})
        return generation.continue_text(sampler, weights, ByteTokenizer(), ask)

    assert write(prompt="def f").startswith("def f") and write().startswith("x")
    assert len(write(max_tokens=2)) < len(write())
    assert write(top_p=1e-6) == write(temperature=0.0) != write()
    assert write(seed=1) != write()


def log_peak_tflops(runs):
    """On CPUs, the MFU of a metrics line is a number only if log.peak_tflops is set."""
    rates = {}
    for name, peak in (("base", 0.0), ("other", 1.0)):
        measured = measure_rates(runs.config("base", **{"log.peak_tflops": peak}), None)
        clock = iter(range(100))
        measured._clock = lambda clock=clock: next(clock)
        for _ in range(5):
            measured.start_step()
        rates[name] = measured.line()["mfu_causal"]
    assert rates["base"] is None
    assert rates["other"] > 0


def data_prefetch(runs):
    """The thread of BatchFeed prepares `prefetch` batches before the first request, and holds one more."""
    program = helpers.program(runs.config("base"))
    for prefetch in (1, 3):
        made: list[int] = []
        source = types.SimpleNamespace(batch=lambda step, *rows, made=made: made.append(step) or {})
        feed = BatchFeed(source, 5, program.batch, program.context, prefetch)
        ended = time.monotonic() + 60
        while len(made) <= prefetch and time.monotonic() < ended:
            time.sleep(0.001)
        time.sleep(0.05)
        feed.close()
        assert made == list(range(5, 6 + prefetch))


def train_deterministic(runs):
    """The key sets XLA's options for repeatable results on GPUs, and makes a run store XLA's autotuning results."""
    for asked in (True, False):
        program = helpers.program(runs.config("base", **{"train.deterministic": asked, "compiler.defaults": False}))
        chosen = compiler.choose(program, compiler.card(141.0)).options
        assert (chosen.items() >= hardware.REPEATABLE.items()) == asked
    plain = compiler.Chosen({}, "", ())
    assert "xla_gpu_dump_autotune_results_to" in compiler.for_run(plain, True, 0, True, runs.folder).options
    assert compiler.for_run(plain, True, 0, False, runs.folder).options == {}


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


def paths_cache(runs):
    """For several CPU devices the compile cache stays off, so the test fakes a single device."""
    told: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.config, "update", told.__setitem__)
        patch.setattr(jax, "device_count", lambda: 1)
        train.set_compile_cache(runs.config("base"))
        assert told == {}
        train.set_compile_cache(runs.config("base", **{"paths.cache": str(runs.folder / "compiled")}))
    assert told["jax_compilation_cache_dir"] == str(runs.folder / "compiled")


ALONE: dict[str, Callable[[Runs], None]] = {
    "model.init_std": model_init_std,
    "data.prefetch": data_prefetch,
    "train.seed": train_seed,
    "train.deterministic": train_deterministic,
    "eval.sequences": eval_sequences,
    "checkpoint.step": checkpoint_step,
    "checkpoint.allow_change": checkpoint_allow_change,
    "log.peak_tflops": log_peak_tflops,
    **{f"sample.{name}": sampling for name in ("prompt", "max_tokens", "temperature", "top_p", "seed")},
    "paths.data": paths_data,
    "paths.cache": paths_cache,
}


@pytest.mark.parametrize("test", dict.fromkeys(ALONE.values()), ids=lambda test: test.__name__)
def test_a_key_has_its_effect(test, runs):
    test(runs)


ELSEWHERE = {
    "env.defaults",  # tests/unit/test_environment.py
    "env.set",
    "env.inherit",
    "data.eval_source",  # tests/proofs/test_watching.py
    "log.wandb",
    "data.source_schedule",  # tests/unit/test_data_mix.py
    "data.tokenizer",  # tests/unit/test_data.py
    "log.gpu_every_s",  # tests/unit/test_monitor.py
    "log.mfu_alert",
    "train.memory_fraction",  # tests/unit/test_config.py
    "train.max_minutes",  # tests/unit/test_timelimit.py
    "train.timeouts",  # tests/unit/test_watchdog.py
    # '' or stage: without stages the key has no effect, and with stages no other value is allowed (test_mesh_rules.py)
    "sharding.rules.layers",
    "sharding.rules.heads",  # test_heads_are_split_together
    "sharding.rules.kv_heads",
    "sharding.rules.head_dim",
    "init.from",  # tests/proofs/test_resume.py
    "init.what",
    "train.on_divergence",  # tests/proofs/test_divergence.py
    "train.max_skipped_steps",
    "train.sdc_check_every",  # tests/campaign/test_corruption.py
    "compiler.options",  # tests/unit/test_compiler.py
    "compiler.defaults",
}


def test_every_key_is_in_one_table():
    valued = {key for _, keys in CONSTANTS for key in keys}
    tables = (valued, SHOWN, PROGRAM, LEFT, ALONE, ELSEWHERE)
    known = set(config.declared())
    found = {key: sum(key in table for table in tables) for key in known}
    wrong = {key: count for key, count in found.items() if count != 1}
    assert not wrong, "give a key that changes nothing any test has seen a row here, or remove it"
    assert not {key for table in tables for key in table} - known, "a row for a key that is gone"
