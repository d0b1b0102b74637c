"""Low-rank adapters and frozen parameters in programs and runs: gradients, checkpoints, and the base of the adapters."""

import dataclasses
import math
import re
import shutil
from types import SimpleNamespace

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from test_dpo import begun, step

from jaxtrain.checkpoint import CheckpointError, Checkpoints
from jaxtrain.commands import lm_eval
from jaxtrain.config.schema import to_dict
from jaxtrain.data import loading, text_format, tokenizer
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.hf import lora
from jaxtrain.models import flops
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.lora import is_adapter
from jaxtrain.step.state import to_tensors
from jaxtrain.train import generation

RANK, ALPHA = 3, 6.0
MODEL = {
    "model.num_layers": 1,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.d_ff": 48,
    "data.seq_len": 32,
    "train.global_batch": 8,
    "optimizer.weight_decay": 0.5,
    "optimizer.clip_norm": 0.0,  # a norm covers trained parameters alone, so clipping would use another factor
}
LORA = {"lora.rank": RANK, "lora.alpha": ALPHA}
# Every way in which a step stores weights and accumulates gradients. Each of 4 ranks copies one of 2 key/value heads.
LAYOUTS = {
    "loop": {"mesh.fsdp": 2, "mesh.tensor": 4, "train.grad_accum": 2},
    "unrolled": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.seq": 2, "train.grad_accum": 2, "parallel.scan_layers": False},
    "moments on the host": {"mesh.fsdp": 2, "sharding.zero": 1, "optimizer.offload": "moments"},
}
# The axes of our weights, inputs and outputs, written down independently.
DELTA = {
    **dict.fromkeys(("wq", "wk", "wv"), "DR,RNH->DNH"),
    "wo": "NHR,RD->DNH",
    "gate": "DR,RF->DF",
    "up": "DR,RF->DF",
    "down": "FR,RD->DF",
}
PREFIX = "params."


@pytest.fixture(scope="module")
def expected():
    """Return the tensors, the loss, and the adapters' gradients by the chain rule from a model whose weights are W + s a b."""
    run = helpers.tiny(MODEL | LORA)
    tensors = begun(run)
    plain = helpers.tiny(MODEL)
    merged, scale = {k: v for k, v in tensors.items() if not is_adapter(k)}, ALPHA / RANK
    halves = {}
    for name in list(merged):
        weight = name.rpartition(".")[2]
        if name.startswith(PREFIX) and weight in DELTA:
            a, b = (tensors[f"{name.rpartition('.')[0]}.lora.{weight}_{half}"] for half in "ab")
            merged[name] = merged[name] + scale * np.einsum(DELTA[weight], a, b)
            halves[name.removeprefix(PREFIX)] = a, b
    whole = helpers.initial_tensors(plain) | merged
    values, grads, _ = step(plain, helpers.host_batch(plain, 0), whole)
    out = {}
    for name, (a, b) in halves.items():
        module, _, weight = name.rpartition(".")
        of_a = jax.vjp(lambda a, b, e=DELTA[weight]: scale * jnp.einsum(e, a, b), a, b)[1](jnp.asarray(grads[name]))
        out[f"{module}.lora.{weight}_a"], out[f"{module}.lora.{weight}_b"] = map(np.asarray, of_a)
    return tensors, float(values["loss"]), out


@pytest.mark.parametrize("layout", helpers.few(LAYOUTS, "loop"))
def test_gradients_are_those_of_the_merged_weights(layout, expected):
    """The loss, too, is that of the merged weights. The step leaves the bits of the base unchanged."""
    tensors, loss, grads = expected
    run = helpers.tiny(MODEL | LORA | LAYOUTS[layout])
    values, mine, after = step(run, helpers.host_batch(run, 0), tensors)
    assert float(values["loss"]) == pytest.approx(loss, rel=1e-5)
    assert mine.keys() == grads.keys()
    assert len(mine) == 2 * 7
    for name in mine:
        np.testing.assert_allclose(mine[name], grads[name], rtol=2e-3, atol=2e-6, err_msg=name)
    params = {k for k in after if k.startswith(PREFIX)}
    assert {k for k in params if np.array_equal(after[k], tensors[k])} == {k for k in params if not is_adapter(k)}


def test_nothing_is_computed_for_the_base():
    """With unrolled layers and no remat, the number of matmuls leaves none for gradients of the base or of the embedding."""
    run = helpers.tiny(MODEL | LORA | {"parallel.scan_layers": False, "lora.targets": "wq,up"})
    text = helpers.train_step(run).as_text()
    # layers: forward and dx. adapters: three matmuls for each of a and b. attention: two forward, four backward
    layers, adapters, attention = 7 * 2, 2 * 6, 6
    first = 6  # the first layer's input needs no gradient: none by wq, wk, wv and their adapters' a
    found = len(re.findall(r" dot\(", text))
    assert layers + adapters + attention + 2 - first <= found <= layers + adapters + attention + 2
    assert not re.findall(r" scatter\(", text)


def test_an_fp8_base():
    """With adapters and precision=fp8, the program has arrays in e4m3."""
    assert "f8E4M3FN" in helpers.lowered(helpers.tiny(MODEL | LORA | {"precision": "fp8"}))


# ---- Frozen parameters

PATTERNS = "embed.*,layers.mlp.*,layers.attention.wk,head"
FROZEN = re.compile(r"params\.(embed\.|layers\.\d\.mlp\.|layers\.\d\.attention\.wk|head)")


@pytest.mark.parametrize("layout", helpers.few(LAYOUTS, "loop"))
def test_frozen_parameters_stay_and_the_rest_goes_as_it_would(layout):
    """After one step, frozen parameters have their bits. The first moments of all others, and so their gradients, are those of
    a run on one device without frozen parameters.
    """
    run = helpers.tiny(MODEL | LAYOUTS[layout] | {"train.freeze": PATTERNS})
    plain = helpers.train(helpers.tiny(MODEL), 1).tensors
    before, after = helpers.initial_tensors(run), helpers.train(run, 1).tensors
    still = {name for name in before if FROZEN.match(name)}
    assert {name for name in before if name.startswith(PREFIX) and np.array_equal(before[name], after[name])} == still
    assert len(still) == 2 + 4
    moments = [name for name in after if name.startswith("optimizer.mu.")]
    assert len(moments) == len([name for name in plain if name.startswith("optimizer.mu.")]) - len(still)
    for name in moments:
        np.testing.assert_allclose(after[name], plain[name], rtol=2e-4, atol=1e-6, err_msg=name)


def test_only_the_head_needs_no_backward_pass_of_the_layers():
    """Frozen weights have no gradient, no sum of one over devices, and no moments."""
    frozen = {"mesh.fsdp": 2, "train.freeze": "embed.*,layers.*,final_norm.*", "parallel.scan_layers": False}
    run = helpers.tiny(MODEL | frozen)
    text = helpers.train_step(run).as_text()
    # Without gradients the layers are a loop: one layer's weights and attention, the logits, and the head's gradient.
    assert len(re.findall(r" dot\(", text)) == 7 + 2 + 1 + 1 and not re.findall(r" scatter\(", text)
    made, head = helpers.program(run), run.model.d_model * run.model.vocab_size
    summed = re.findall(r"= ([^=]*) (?:all-reduce|reduce-scatter)(?:-start)?\(", text)
    sizes = [re.findall(r"\d+", dims) for one in summed for dims in re.findall(r"\[([\d,]*)\]", one)]
    assert head // 2 <= sum(math.prod(map(int, dims)) for dims in sizes) < head + 100
    learnt = sum(a.size for a, t in zip(*map(jax.tree.leaves, (made.state.params, made.trained)), strict=True) if t)
    assert learnt == head
    assert sum(a.size for a in jax.tree.leaves(made.state.optimizer)) == 2 * learnt + 1, "two moments, and the count"


def test_flops_count_what_is_trained():
    run = helpers.tiny(MODEL)
    m, seq = run.model, run.data.seq_len
    full, forward = flops.per_token(m, seq), flops.forward(m, seq)
    assert helpers.training_flops(run) == full

    def frozen(patterns):
        return helpers.training_flops(dataclasses.replace(run, train=dataclasses.replace(run.train, freeze=patterns)))

    head = 2 * m.d_model * m.vocab_size
    assert full.causal - frozen("head").causal == head
    assert full.causal - frozen("layers.mlp.*").causal == m.num_layers * 6 * m.d_model * m.d_ff
    assert frozen("embed.*,layers.*").causal == forward.causal + 2 * head
    assert frozen("embed.*,layers.*,final_norm.*").causal == forward.causal + head


# ---- Whole runs

STEPS = 24


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train adapters for a base with random weights, on short instructions."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "small.py").write_text(
        runs.SMALL.replace("num_layers = 2", "num_layers = 1\n    config.model.init_std = 0.1\n    config.mesh.fsdp = 1")
    )
    byte = tokenizer.ByteTokenizer()
    for name, seed in (("train", 0), ("held_out", 1)):
        draws = np.random.default_rng(seed)
        with TokenWriter(folder / f"{name}.tok", tokenizer.tokenizer_info(byte)) as writer:
            for _ in range(400):
                word = "".join(draws.choice(list("abcdefgh"), 4))
                writer.write(byte.encode(text := f"Say {word}. {word}"), len(text))
                writer.end_document()
    base = loading.load_config(
        [f"--config={folder / 'small.py'}", "--config.data.source=synthetic", "--config.mesh.data=1"]
    ).run
    meta = {
        "config": to_dict(base),
        "data": {"tokens": 0, "fingerprint": {}},
        "text": text_format.read_text_format("byte").record(),
    } | {"positions": 64}
    save_base(folder / "base", to_tensors(helpers.fresh_state(base)), meta)
    assert run_adapters(folder, "adapters") == 0
    return folder


def save_base(folder, tensors, meta):
    saver = Checkpoints(folder / "checkpoints")
    saver.save(4, tensors, meta)
    saver.close()


def run_adapters(folder, name, **more):
    over = {
        "data__source": folder / "train.tok",
        "data__eval_source": folder / "held_out.tok",
        "init__from": folder / "base",
        "lora__rank": 4,
        "optimizer__lr": 2e-2,
        "optimizer__warmup_steps": 1,
        "checkpoint__every_steps": 24,
        "eval__every_steps": 12,
        "train__steps": STEPS,
    }
    return runs.train(folder / "small.py", folder / name, **{**over, **more})


def test_held_out_loss_falls(trained):
    held_out = [line["loss"] for line in runs.lines(trained / "adapters") if line["kind"] == "eval"]
    assert held_out[-1] < runs.losses(trained / "adapters")[1] - 0.3
    assert held_out[-1] < 5.3 < np.log(264)


def test_checkpoints_hold_adapters_alone_and_name_the_base(trained):
    stored = runs.tensors(trained / "adapters")
    others = {name for name in stored if "lora" not in name and "guard" not in name}
    assert others == {"step", "optimizer.count"}
    assert len([name for name in stored if name.startswith(PREFIX)]) == 2 * 7
    base = Checkpoints(trained / "adapters" / "checkpoints").meta(STEPS)["base"]
    assert base["path"] == str(trained / "base" / "checkpoints" / "4")


@pytest.mark.more
def test_resumes_to_the_bit(trained):
    """A run that ends after step 8 and resumes has the tensors of an uninterrupted run, bit for bit."""
    for steps in (8, STEPS):
        assert run_adapters(trained, "again", train__steps=steps) == 0
    one, two = (runs.tensors(trained / name) for name in ("adapters", "again"))
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_what_was_saved_can_be_used(trained):
    """`load_model` restores base and adapters. Greedy sampling gives the tokens of the merged weights, which differ from
    the base's.
    """
    run, sampler, params, at, _ = generation.load_model(str(trained / "adapters"), jax.devices()[:1])
    assert (at, run.lora.rank) == (STEPS, 4)
    prompt = {"max_tokens": 6, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    base = {k: v for k, v in runs.tensors(trained / "base").items() if k.startswith(PREFIX)}
    adapters = {k: v for k, v in runs.tensors(trained / "adapters").items() if k.startswith(PREFIX)}
    other = generation.Sampler(dataclasses.replace(run, lora=dataclasses.replace(run.lora, rank=0)), sampler.placement)

    def tokens(weights):
        def gathered(path, _):
            name = PREFIX + ".".join(key.key for key in path)
            if name in weights:
                return jnp.asarray(weights[name])
            return jnp.stack([weights[name.replace(".layers.", f".layers.{i}.")] for i in range(run.model.num_layers)])

        return list(
            other.tokens(jax.tree_util.tree_map_with_path(gathered, other.definition.abstract), [83, 97, 121], **prompt)
        )

    made = list(sampler.tokens(params, [83, 97, 121], **prompt))
    assert tokens(dict(lora.merge_adapters(base | adapters, run.lora.alpha / 4))) == made
    assert tokens(base) != made


@pytest.mark.more
def test_another_base_is_refused(trained, tmp_path):
    """The base in its new place first changes, and then is deleted. Both times training and `load_model` end with an
    error.
    """
    shutil.copytree(trained / "adapters", tmp_path / "copy")
    shutil.copytree(trained / "base", tmp_path / "base")

    def resumed(steps):
        return run_adapters(trained, tmp_path / "copy", init__from=tmp_path / "base", train__steps=steps)

    assert resumed(25) == 0
    files = runs.tree(tmp_path / "copy" / "checkpoints")
    meta, tensors = Checkpoints(tmp_path / "base" / "checkpoints").meta(4), runs.tensors(tmp_path / "base")
    tensors["params.head"] = tensors["params.head"][::-1].copy()
    shutil.rmtree(tmp_path / "base")
    save_base(tmp_path / "base", {k: jnp.asarray(v) for k, v in tensors.items()}, meta)
    for code in (1, 2):
        assert resumed(26) == code
        with pytest.raises(CheckpointError):
            generation.load_model(str(tmp_path / "copy"), jax.devices()[:1])
        shutil.rmtree(tmp_path / "base", ignore_errors=True)
    assert runs.tree(tmp_path / "copy" / "checkpoints") == files
    assert generation.load_model(str(tmp_path / "copy"), jax.devices()[:1], str(trained / "base"))[3] == 25


def test_evaluation_reads_a_base_that_moved(trained, tmp_path):
    """The harness's model has the scores of the base at its first place. A model without adapters has no base to name."""
    pytest.importorskip("lm_eval")
    harness, request = lm_eval.harness_model(), [SimpleNamespace(args=("Say ab", "ab"))]
    scores = harness(workdir=str(trained / "adapters")).loglikelihood(request, disable_tqdm=True)
    (trained / "base").rename(tmp_path / "moved")
    try:
        with pytest.raises(CheckpointError):
            harness(workdir=str(trained / "adapters"))
        moved = harness(workdir=str(trained / "adapters"), base=str(tmp_path / "moved"))
        with pytest.raises(HuggingFaceError):
            harness(workdir=str(tmp_path / "moved"), base=str(tmp_path / "moved"))
    finally:
        (tmp_path / "moved").rename(trained / "base")
    assert moved.loglikelihood(request, disable_tqdm=True) == scores


def test_runs_that_are_refused(trained, tmp_path, capsys):
    """Adapters need a base, or adapters of the same rank. Another rank cannot resume."""
    assert run_adapters(trained, tmp_path / "x", init__from="") == 2
    for other in ({"lora__rank": 2}, {"lora__alpha": 16}, {"lora__targets": "wq,wk"}, {"lora__rank": 0}):
        assert run_adapters(trained, tmp_path / "x", init__from=trained / "adapters", **other) == 2
    assert not (tmp_path / "x").exists()
    capsys.readouterr()
    assert run_adapters(trained, "adapters", lora__rank=2, train__steps=STEPS + 1) == 2
    assert "lora.rank" in capsys.readouterr().err


def test_adapters_of_another_base_are_not_trained_further(trained, tmp_path):
    meta, tensors = Checkpoints(trained / "base" / "checkpoints").meta(4), runs.tensors(trained / "base")
    tensors["params.head"] = tensors["params.head"][::-1].copy()
    save_base(tmp_path / "base", {k: jnp.asarray(v) for k, v in tensors.items()}, meta)
    further = {"init__from": trained / "adapters", "train__steps": 1}
    assert run_adapters(trained, tmp_path / "x", **further, init__base=tmp_path / "base") == 1
    assert not (tmp_path / "x" / "checkpoints").exists()
    assert run_adapters(trained, tmp_path / "y", **further, init__base=trained / "base") == 0
