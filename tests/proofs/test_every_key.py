"""Every key of the config changes something that can be seen from outside. A key that is not in these tables fails."""

import dataclasses
import functools
import json
import shutil
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest

from jaxtrain import compiler, config, generate, hardware, samples, timelimit, trackers, train, watchdog
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.data import pipeline, stdlib
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.launch import Launch
from jaxtrain.session import Session
from jaxtrain.sharding import LayoutError, make_placement
from jaxtrain.start import decide_start, open_data
from jaxtrain.trackers import open_trackers

# ---- Keys whose effect is in the program: shapes, layouts, kernel, batches, or the text of the compiled step

LLAMA3 = {"model.rope_scaling": "llama3"}
SPLIT = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
RING = {"mesh.seq": 4}
STAGES = {"mesh.stage": 2, "mesh.tensor": 2, "train.grad_accum": 4}
TURNS = {**STAGES, "pipeline.schedule": "interleaved", "pipeline.groups": 2, "model.num_layers": 8}
EXPERTS = {"model.num_experts": 4}
BIASED = {**EXPERTS, "model.router_bias": True}
SPREAD = {**EXPERTS, "mesh.expert": 2, "mesh.fsdp": 2}
# Key -> another value, and what else must be set for the key to matter.
PROGRAM: dict[str, tuple[Any, dict[str, Any]]] = {
    "precision": ("bf16", {}),
    "fp8.exclude": ("wo,down", {"precision": "fp8"}),
    "model.family": ("helpers:WiderFamily", {}),
    "model.num_layers": (1, {}),
    "model.d_model": (32, {}),
    "model.num_heads": (4, {}),
    "model.num_kv_heads": (2, {}),
    "model.head_dim": (16, {}),
    "model.d_ff": (64, {}),
    "model.vocab_size": (272, {}),
    "model.norm_eps": (1e-3, {}),
    "model.tied_head": (True, {}),
    "model.qk_norm": (True, {}),
    "model.qkv_bias": (True, {}),
    "model.sliding_window": (8, {}),
    "model.attention_pattern": ("lg", {"model.sliding_window": 8}),
    "model.local_rope_base": (100.0, {"model.sliding_window": 8}),
    "model.query_scale": (24.0, {}),
    "model.post_norms": (True, {}),
    "model.attention_softcap": (20.0, {}),
    "model.logit_softcap": (20.0, {}),
    "model.rope_base": (500.0, {}),
    "model.rope_scaling": ("llama3", {}),
    "model.rope_factor": (4.0, LLAMA3),
    "model.rope_low_freq": (2.0, LLAMA3),
    "model.rope_high_freq": (8.0, LLAMA3),
    "model.rope_original_len": (4096, LLAMA3),
    "mesh.data": (2, {}),
    "mesh.fsdp": (2, {}),
    "mesh.tensor": (2, {}),
    "mesh.seq": (2, {}),
    "mesh.stage": (2, {"train.grad_accum": 2}),
    "mesh.expert": (2, EXPERTS),
    "pipeline.schedule": ("gpipe", STAGES),
    "pipeline.groups": (4, TURNS),
    "model.num_experts": (4, {}),
    "model.experts_per_token": (1, EXPERTS),
    "model.router": ("sigmoid", EXPERTS),
    "model.renormalize": (False, EXPERTS),
    "model.router_bias": (True, EXPERTS),
    "model.shared_d_ff": (32, EXPERTS),
    "experts.impl": ("pallas", EXPERTS),
    "experts.capacity": (1.0, EXPERTS),
    "experts.buffer": (1.0, SPREAD),
    "experts.balance_loss": (0.1, EXPERTS),
    "experts.z_loss": (0.1, EXPERTS),
    "experts.bias_rate": (0.1, BIASED),
    "sharding.zero": (2, SPLIT),
    "sharding.gather": ("step", SPLIT),
    "sharding.rules.sequence": ("", {**RING, "sharding.rules.embed": "fsdp"}),
    "attention.context": ("gather", RING),
    "attention.ulysses": (2, {**RING, "attention.context": "ulysses"}),
    "sharding.rules.batch": ("fsdp", SPLIT),
    "sharding.rules.residual": ("", SPLIT),
    "sharding.rules.embed": ("", SPLIT),
    "sharding.rules.mlp": ("", SPLIT),
    "sharding.rules.vocab": ("", SPLIT),
    "sharding.rules.experts": ("", SPREAD),
    "sharding.rules.expert_embed": ("", SPREAD | {"model.num_experts": 2}),
    "attention.impl": ("chunked", {}),
    "remat.policy": ("full", {}),
    "remat.tensors": ("q=keep,mlp_up=keep", {"remat.policy": "custom", "remat.tensors": "q=keep"}),
    "remat.every": (2, {"remat.policy": "full"}),
    "dtypes.params": ("bf16", {}),
    "dtypes.m": ("bf16", {}),
    "dtypes.v": ("bf16", {}),
    "dtypes.grads": ("bf16", {}),
    "dtypes.reduce": ("f32", {"precision": "bf16"}),
    "data.source": ("synthetic,", {}),  # replaced by a token file
    "data.seq_len": (32, {}),
    "data.packing": ("none", {}),
    "data.max_segments": (2, {}),
    "data.seed": (1, {}),
    "train.global_batch": (8, {}),
    "train.grad_accum": (2, {}),
    "train.spike": (5.0, {}),
    "train.accumulate": ("microbatch", {"train.grad_accum": 2, "compiler.unroll": True}),
    "loss.name": ("helpers:half_loss", {}),
    "loss.chunk": (16, {}),
    "loss.z_loss": (1e-3, {}),
    "compiler.unroll": (True, {}),
    "train.steps": (40, {}),  # the schedule ends with the last step
    "optimizer.name": ("helpers:slower_adamw", {}),
    "optimizer.lr": (2e-3, {}),
    "optimizer.lr_min": (2e-4, {}),
    "optimizer.schedule": ("linear", {}),
    "optimizer.warmup_steps": (4, {}),
    "optimizer.decay_steps": (5, {}),
    "optimizer.weight_decay": (0.2, {}),
    "optimizer.momentum": (0.9, {"optimizer.name": "muon"}),
    "optimizer.groups": ("head:lr=0.5", {}),
    "optimizer.beta1": (0.8, {}),
    "optimizer.beta2": (0.99, {}),
    "optimizer.eps": (1e-5, {}),
    "optimizer.clip_norm": (0.5, {}),
    "optimizer.offload": ("moments", {}),
    "train.freeze": ("layers.mlp.*", {}),
    "lora.rank": (2, {}),
    "lora.alpha": (8.0, {"lora.rank": 2}),
    "lora.targets": ("wq", {"lora.rank": 2}),
}
BASE = {"model.num_layers": 2, "data.max_segments": 8}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(helpers.text_file(tmp_path_factory.mktemp("text") / "lines.tok", modules=4))


def facets(run: RunConfig) -> list[Callable[[], Any]]:
    """Ways to look at a run's program, cheap ones first."""

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
        lambda: helpers.program(run).attention,
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
    """Without this, every key would seem to change something."""
    one = helpers.tiny(BASE)
    other = dataclasses.replace(one, sample=dataclasses.replace(one.sample, seed=5))  # another entry of the caches
    assert one != other
    assert not differs(one, other)


def test_heads_are_split_together():
    """heads and kv_heads change the program together; one without the other, and a split head_dim, are refused."""
    both = {"sharding.rules.heads": "", "sharding.rules.kv_heads": ""}
    assert differs(helpers.tiny(BASE | SPLIT | both), helpers.tiny(BASE | SPLIT)), "heads and kv_heads change nothing"
    for key, value in (*both.items(), ("sharding.rules.head_dim", "tensor")):
        run = helpers.tiny(BASE | SPLIT | {key: value})
        with pytest.raises(LayoutError, match="key/value head|width cannot be split"):
            make_placement(run, helpers.devices_of(run))


# ---- Keys of the loop, seen in what real runs leave behind


class Runs:
    """A few whole runs of four steps, each made when first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.text = str(helpers.text_file(folder / "train.tok", modules=4))
        self.held_out = str(helpers.text_file(folder / "held_out.tok", modules=2))
        self.base = {
            "model.num_layers": 1,
            "model.d_model": 32,
            "model.num_heads": 2,
            "model.num_kv_heads": 1,
            "mesh.fsdp": 8,
            "data.source": self.text,
            "data.eval_source": self.held_out,
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
        self.settings: dict[str, dict[str, Any]] = {
            "base": {},
            "other": {
                "log.every_steps": 2,
                "log.tensorboard": False,
                "log.peak_tflops": 1.0,
                "eval.every_steps": 1,
                "eval.sequences": 8,
                "checkpoint.dir": str(folder / "elsewhere"),
                "checkpoint.every_steps": 1,
                "checkpoint.keep_every": 2,
                "profile.start": 1,
                "profile.steps": 2,
                "profile.dump_hlo": True,
                "sample.max_tokens": 0,
            },
            "seed": {"train.seed": 1, "checkpoint.keep": 2, "model.init_std": 0.02, "sample.every_steps": 3},
            "weights": {"init.from": str(folder / "base")},
            "both": {"init.from": str(folder / "base"), "init.what": "weights+optimizer"},
        }

    def config(self, name: str, **more: Any) -> RunConfig:
        return helpers.tiny(self.base | self.settings[name] | more)

    @functools.cache  # noqa: B019 - lives as long as this module's tests
    def workdir(self, name: str) -> Path:
        if name in ("weights", "both"):
            self.workdir("base")
        place = self.folder / name
        assert train.attempt(self.config(name), place, Launch("configs/tiny.py", "", (), ())).exit_code == 0
        return place

    def lines(self, name: str, kind: str) -> list[dict[str, Any]]:
        text = (self.workdir(name) / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in self.lines(name, "train")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def steps_logged(runs: Runs, name: str, kind: str) -> list[int]:
    return [line["step"] for line in runs.lines(name, kind)]


def saved(folder: Path) -> list[int]:
    return Checkpoints(folder).steps()


def log_every_steps(runs):
    assert steps_logged(runs, "base", "train") == [1, 2, 3, 4]
    assert steps_logged(runs, "other", "train") == [2, 4]


def log_tensorboard(runs):
    assert any((runs.workdir("base") / "tb").iterdir())
    assert not (runs.workdir("other") / "tb").exists()


def log_peak_tflops(runs):
    """Known or not, the rate of the last step is a number only where the peak is given and a step was counted."""
    rate = Session.throughput
    sessions = {}
    for name in ("base", "other"):
        run = runs.config(name)
        session = Session.__new__(Session)
        session.run, session.tokens_per_step = run, run.train.global_batch * run.data.seq_len
        clock = iter(range(100))
        rates = rate(session)
        rates._clock = lambda clock=clock: next(clock)
        for _ in range(5):
            rates.start_step()
        sessions[name] = rates.line()["mfu_causal"]
    assert sessions["base"] is None
    assert sessions["other"] > 0


def eval_every_steps(runs):
    assert steps_logged(runs, "base", "eval") == [2, 4]
    assert steps_logged(runs, "other", "eval") == [1, 2, 3, 4]


def eval_sequences(runs):
    """The same weights, fewer sequences: another mean."""
    assert runs.losses("other") == runs.losses("base")[1::2]
    mine, theirs = ({x["step"]: x["loss"] for x in runs.lines(name, "eval")} for name in ("base", "other"))
    assert mine[2] != theirs[2]


def checkpoint_dir(runs):
    assert saved(runs.workdir("base") / "checkpoints")
    assert not (runs.workdir("other") / "checkpoints").exists()
    assert saved(runs.folder / "elsewhere")


def checkpoint_keep(runs):
    assert saved(runs.workdir("base") / "checkpoints") == [4]
    assert saved(runs.workdir("seed") / "checkpoints") == [2, 4]


def checkpoint_keep_every(runs):
    """Of steps 1 to 4, the newest and the multiples of 2."""
    runs.workdir("other")
    assert saved(runs.folder / "elsewhere") == [2, 4]


def checkpoint_every_steps(runs):
    said = {name: (runs.workdir(name) / "log.txt").read_text() for name in ("base", "other")}
    assert "checkpoint 1:" in said["other"] and "checkpoint 3:" in said["other"]
    assert "checkpoint 1:" not in said["base"] and "checkpoint 2:" in said["base"]


def start(runs: Runs, **changes: Any) -> Any:
    """Where a run in the folder of "seed" would begin."""
    run = runs.config("seed", **changes)
    return decide_start(run, Checkpoints(runs.workdir("seed") / "checkpoints"), helpers.program(run))


def checkpoint_step(runs):
    assert start(runs).step == 4
    assert start(runs, **{"checkpoint.step": 2}).step == 2


def checkpoint_allow_change(runs):
    change = {"data.seq_len": 16}
    with pytest.raises(ConfigError, match="data.seq_len"):
        start(runs, **change)
    assert start(runs, **change, **{"checkpoint.allow_change": "data.seq_len"}).resumed


def profile_start(runs):
    assert not (runs.workdir("base") / "profile").exists()
    assert list((runs.workdir("other") / "profile").rglob("*.xplane.pb"))


def profile_steps(runs):
    assert "Tracing steps 1 to 2." in (runs.workdir("other") / "log.txt").read_text()


def profile_dump_hlo(runs):
    assert [p for p in (runs.workdir("other") / "profile").iterdir() if "hlo" in p.name]


def train_seed(runs):
    assert runs.losses("seed")[0] != runs.losses("base")[0]


def model_init_std(runs):
    wide, narrow = (helpers.initial_tensors(helpers.tiny(BASE | {"model.init_std": std})) for std in (0.05, 0.02))
    ratio = {
        name: np.std(wide[name]) / np.std(narrow[name]) for name in wide if name.startswith("params.") and wide[name].ndim > 1
    }
    np.testing.assert_allclose(list(ratio.values()), 2.5, rtol=1e-3)


def init_from(runs):
    """The first loss of a run that starts from another is below that of a fresh one, at step 1 all the same."""
    assert steps_logged(runs, "weights", "train") == [1, 2, 3, 4]
    assert runs.losses("weights")[0] < runs.losses("base")[0]
    assert "initial weights from step 4" in (runs.workdir("weights") / "log.txt").read_text()


def init_what(runs):
    """The same start; with the old moments the first update differs, and so does the second loss."""
    weights, both = runs.losses("weights"), runs.losses("both")
    assert weights[0] == both[0]
    assert weights[1] != both[1]


@functools.cache
def writer(run: RunConfig):
    """(sampler, weights) of a run's initial state."""
    return generate.Sampler(run, helpers.program(run).placement), helpers.fresh_state(run).params


def write(runs: Runs, **changes: Any) -> str:
    ask = config.Sample(**{"prompt": "x", "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, **changes})
    return generate.continue_text(*writer(helpers.tiny({"model.num_layers": 1})), ByteTokenizer(), ask)


def sample_prompt(runs):
    assert write(runs, prompt="def f").startswith("def f")
    assert write(runs).startswith("x")


def sample_max_tokens(runs):
    """The sample's file, and none where nothing is to be written."""
    assert (runs.workdir("base") / "samples.txt").exists()
    assert not (runs.workdir("other") / "samples.txt").exists()
    assert len(write(runs, max_tokens=2)) <= len(write(runs))


def sample_every_steps(runs):
    """Steps at which the model wrote: where it is not set, the last one alone."""
    found = {
        name: [s.step for s in samples.read((runs.workdir(name) / "samples.txt").read_text())] for name in ("base", "seed")
    }
    assert found == {"base": [4], "seed": [3, 4]}


def log_wandb(runs):
    """Without a login it is refused, so it was asked for. What is sent is in tests/proofs/test_watching.py."""
    assert not open_trackers(runs.folder, runs.config("base").log, resumed=False).facts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trackers, "WandB", lambda workdir, where, resumed: types.SimpleNamespace(facts={"where": where}))
        asked = runs.config("base", **{"log.wandb": "team/project"}).log
        assert open_trackers(runs.folder, asked, resumed=False).facts == {"wandb": {"where": "team/project"}}


def sample_temperature(runs):
    assert write(runs, temperature=0.0) != write(runs, temperature=1.0)


def sample_top_p(runs):
    assert write(runs, top_p=1e-6) == write(runs, temperature=0.0) != write(runs)


def sample_seed(runs):
    assert write(runs, seed=1) != write(runs)


def data_eval_source(runs):
    """Held-out text named in the config is what is read; without it, files have no validation split."""
    named = open_data(runs.config("base"))[1][""]
    other = open_data(runs.config("base", **{"data.eval_source": runs.text}))[1][""]
    assert named.fingerprint["files"][0]["name"] == "held_out.tok"
    assert other.fingerprint["files"][0]["name"] == "train.tok"


def data_tokenizer(runs):
    """Another tokenizer than the one the tokens were made with is refused."""
    run = runs.config("base")
    assert not pipeline.check(run.data, run.model.vocab_size, True)
    other = dataclasses.replace(run.data, tokenizer="hf:someone/other")
    assert {p.key for p in pipeline.check(other, run.model.vocab_size, True)} == {"data.tokenizer"}


def data_prefetch(runs):
    """Batches are made by a thread of their own, or by the one that asks."""
    for prefetch in (0, 2):
        made_by = []

        class Source:
            def batch(self, step: int) -> dict[str, np.ndarray]:
                made_by.append(threading.current_thread())  # noqa: B023 - read before the next round
                return {"tokens": np.zeros(1)}

        batches = pipeline.iterate(Source(), 0, prefetch)
        next(batches)
        batches.close()
        assert (made_by[0] is threading.current_thread()) == (prefetch == 0)


def train_memory_fraction(runs):
    """What JAX is told before it starts a GPU of 141 GiB."""
    given, default = (hardware.memory_environment(hardware.memory_fraction(141.0, f), {})[0] for f in (0.5, 0.0))
    assert given != default


def train_max_minutes(runs):
    assert timelimit.limit_s("2")[0] == 120 and timelimit.limit_s("")[0] == float("inf")
    assert timelimit.limit_s("auto", {timelimit.END: "1600"}, now=1000.0)[0] == 600
    assert all(timelimit.limit_s(wrong, {})[1] for wrong in ("auto", "soon", "0", "-1"))


def train_timeouts(runs):
    assert watchdog.parse_budgets("step=7")[0]["step"] == 7 != watchdog.parse_budgets("")[0]["step"]


def train_deterministic(runs):
    """On GPUs, in XLA's options; and a run keeps what XLA chose by trying."""
    for asked in (True, False):
        program = helpers.program(runs.config("base", **{"train.deterministic": asked, "compiler.defaults": False}))
        chosen = compiler.choose(program, compiler.card(141.0)).options
        assert (chosen.items() >= hardware.REPEATABLE.items()) == asked
    plain = compiler.Chosen({}, "", ())
    assert "xla_gpu_dump_autotune_results_to" in compiler.for_run(plain, True, 0, True, runs.folder).options
    assert compiler.for_run(plain, True, 0, False, runs.folder).options == {}


def paths_data(runs):
    """The stdlib corpus is made where the config says. Two modules of it are enough here."""
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
    before = {name: getattr(jax.config, name) for name in dir(jax.config) if "cache" in name and name.startswith("jax_")}
    try:
        train.set_compile_cache(runs.config("base"))
        assert jax.config.jax_compilation_cache_dir == before["jax_compilation_cache_dir"]
        train.set_compile_cache(runs.config("base", **{"paths.cache": str(runs.folder / "compiled")}))
        assert jax.config.jax_compilation_cache_dir == str(runs.folder / "compiled")
    finally:
        for name, value in before.items():
            if getattr(jax.config, name) != value:
                jax.config.update(name, value)


LOOP: dict[str, Callable[[Runs], None]] = {
    "model.init_std": model_init_std,
    "data.eval_source": data_eval_source,
    "data.tokenizer": data_tokenizer,
    "data.prefetch": data_prefetch,
    "train.seed": train_seed,
    "train.memory_fraction": train_memory_fraction,
    "train.max_minutes": train_max_minutes,
    "train.timeouts": train_timeouts,
    "train.deterministic": train_deterministic,
    "init.from": init_from,
    "init.what": init_what,
    "eval.every_steps": eval_every_steps,
    "eval.sequences": eval_sequences,
    "checkpoint.dir": checkpoint_dir,
    "checkpoint.every_steps": checkpoint_every_steps,
    "checkpoint.keep": checkpoint_keep,
    "checkpoint.keep_every": checkpoint_keep_every,
    "checkpoint.step": checkpoint_step,
    "checkpoint.allow_change": checkpoint_allow_change,
    "log.every_steps": log_every_steps,
    "log.tensorboard": log_tensorboard,
    "log.wandb": log_wandb,
    "log.peak_tflops": log_peak_tflops,
    "sample.every_steps": sample_every_steps,
    "sample.prompt": sample_prompt,
    "sample.max_tokens": sample_max_tokens,
    "sample.temperature": sample_temperature,
    "sample.top_p": sample_top_p,
    "sample.seed": sample_seed,
    "profile.start": profile_start,
    "profile.steps": profile_steps,
    "profile.dump_hlo": profile_dump_hlo,
    "paths.data": paths_data,
    "paths.cache": paths_cache,
}


@pytest.mark.parametrize("key", LOOP)
def test_key_changes_what_a_run_does(key, runs):
    LOOP[key](runs)


ELSEWHERE = {
    "env.defaults",  # tests/unit/test_environment.py
    "env.set",
    "env.inherit",
    "log.gpu_every_s",  # tests/unit/test_monitor.py
    "log.mfu_alert",
    "sharding.rules.layers",  # of '' or stage, test_mesh_rules.py: without stages nothing, and with them nothing else
    "sharding.rules.heads",  # test_heads_are_split_together
    "sharding.rules.kv_heads",
    "sharding.rules.head_dim",
    "train.on_divergence",  # tests/campaign/test_divergence.py
    "train.max_skips",
    "train.verify_every",  # tests/campaign/test_corruption.py
    "compiler.options",  # tests/unit/test_compiler.py
    "compiler.defaults",
}


@pytest.mark.parametrize("key", config.docs())
def test_key_is_in_one_table(key):
    found = [key in table for table in (PROGRAM, LOOP, ELSEWHERE)]
    assert sum(found) == 1, f"key {key} changes nothing that any test has seen: give it a row here, or remove it"


def test_no_row_for_a_key_that_is_gone():
    assert not {*PROGRAM, *LOOP, *ELSEWHERE} - set(config.docs())
