"""Low-rank adapters in programs and runs: gradients, checkpoints, and the base of the adapters."""

import dataclasses
import json
import re
import shutil

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from jaxtrain import generation, lora
from jaxtrain.checkpoint import CheckpointError, Checkpoints
from jaxtrain.data import tokenizer
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.hf import __main__ as hugging_face_command
from jaxtrain.hf import peft
from jaxtrain.hf.importing import open_origin
from jaxtrain.models.lora import is_adapter
from jaxtrain.train.batch import place_batch
from jaxtrain.train.state import abstract_tensors, from_tensors, to_tensors

RANK, ALPHA = 3, 6.0
MODEL = {"model.num_layers": 2, "model.num_kv_heads": 2, "train.global_batch": 8, "optimizer.clip_norm": 0.0}
LORA = {"lora.rank": RANK, "lora.alpha": ALPHA}
# Each of 4 ranks copies one of 2 key/value heads.
LAYOUTS = {
    "one device": {},
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


def begun(run):
    """Return the tensors of a run's initial state, with random numbers in the adapters' matrices b, which start at zero."""
    tensors = dict(helpers.initial_tensors(run))
    for i, name in enumerate(sorted(tensors)):
        if name.startswith(PREFIX) and name.endswith("_b"):
            assert not tensors[name].any(), f"{name}: training begins with the base as it was"
            tensors[name] = np.random.default_rng(i).normal(0, 0.05, tensors[name].shape).astype(np.float32)
    return tensors


def step(run, tensors):
    """Take one step from these tensors. Returns (loss, gradients by canonical name, tensors)."""
    made = helpers.program(run)
    shapes = {k: a.sharding for k, a in abstract_tensors(made.state).items()}
    state = from_tensors(made.state, {k: jax.device_put(tensors[k], shapes[k]) for k in shapes})
    batch = place_batch(helpers.host_batch(run, 0), made.batch, made.context)
    state, values = helpers.train_step(run)(state, batch)
    after = {k: np.asarray(v) for k, v in to_tensors(state).items()}
    mu = "optimizer.mu."
    grads = {k.removeprefix(mu): v / (1 - run.optimizer.beta1) for k, v in after.items() if k.startswith(mu)}
    return float(values["loss"]), grads, after


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
    loss, grads, _ = step(plain, merged | {k: v for k, v in helpers.initial_tensors(plain).items() if k not in merged})
    out = {}
    for name, (a, b) in halves.items():
        module, _, weight = name.rpartition(".")
        of_a = jax.vjp(lambda a, b, e=DELTA[weight]: scale * jnp.einsum(e, a, b), a, b)[1](jnp.asarray(grads[name]))
        out[f"{module}.lora.{weight}_a"], out[f"{module}.lora.{weight}_b"] = map(np.asarray, of_a)
    return tensors, loss, out


@pytest.mark.parametrize("layout", helpers.few(LAYOUTS, "unrolled"))
def test_gradients_are_those_of_the_merged_weights(layout, expected):
    """The loss, too, is that of the merged weights. The step leaves the bits of the base unchanged."""
    tensors, loss, grads = expected
    run = helpers.tiny(MODEL | LORA | LAYOUTS[layout])
    found, mine, after = step(run, tensors)
    assert found == pytest.approx(loss, rel=1e-5)
    assert mine.keys() == grads.keys()
    assert len(mine) == 2 * 2 * 7
    for name in mine:
        np.testing.assert_allclose(mine[name], grads[name], rtol=2e-3, atol=2e-6, err_msg=name)
    params = {k for k in after if k.startswith(PREFIX)}
    assert {k for k in params if np.array_equal(after[k], tensors[k])} == {k for k in params if not is_adapter(k)}


def test_nothing_is_computed_for_the_base():
    """With unrolled layers and no remat, the number of matmuls leaves none for gradients of the base or of the embedding."""
    run = helpers.tiny(MODEL | LORA | {"parallel.scan_layers": False, "lora.targets": "wq,up"})
    text = helpers.train_step(run).as_text()
    assert text is not None
    # layers: forward and dx. adapters: three matmuls for each of a and b. attention: two forward, four backward
    layers, adapters, attention = 2 * 7 * 2, 2 * 2 * 6, 2 * 6
    first = 6  # the first layer's input needs no gradient: none by wq, wk, wv and their adapters' a
    found = len(re.findall(r" dot\(", text))
    assert layers + adapters + attention + 2 - first <= found <= layers + adapters + attention + 2
    assert not re.findall(r" scatter\(", text)


def test_an_fp8_base():
    """With adapters and precision=fp8, the program has arrays in e4m3."""
    text = helpers.lowered(helpers.tiny(MODEL | LORA | {"precision": "fp8", "mesh.fsdp": 2}))
    assert "f8E4M3FN" in text


# ---- Whole runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a base, and adapters for it, on short instructions."""
    folder = tmp_path_factory.mktemp("lora")
    config = folder / "small.py"
    config.write_text(runs.SMALL)
    byte = tokenizer.ByteTokenizer()
    for name, seed in (("train", 0), ("held_out", 1)):
        draws = np.random.default_rng(seed)
        with TokenWriter(folder / f"{name}.tok", tokenizer.info(byte)) as writer:
            for _ in range(400):
                word = "".join(draws.choice(list("abcdefgh"), 4))
                writer.write(byte.encode(text := f"Say {word}. {word}"), len(text))
                writer.end_document()
    assert runs.train(config, folder / "base", train__steps=4, data__source="synthetic", mesh__fsdp=2, mesh__tensor=4) == 0
    assert runs.train(config, folder / "adapters", **over(folder), train__steps=16) == 0
    return folder


def over(folder, base="base"):
    return {
        "data__source": str(folder / "train.tok"),
        "data__eval_source": str(folder / "held_out.tok"),
        "init__from": str(folder / base),
        "lora__rank": 4,
        "optimizer__lr": 2e-2,
        "mesh__fsdp": 4,
        "mesh__tensor": 2,
        "checkpoint__every_steps": 8,
        "eval__every_steps": 4,
    }


def test_held_out_loss_falls(trained):
    held_out = [line["loss"] for line in runs.lines(trained / "adapters") if line["kind"] == "eval"]
    assert held_out[-1] < held_out[0] - 0.3
    assert held_out[-1] < 5.3 < np.log(264)


def test_checkpoints_hold_adapters_alone_and_name_the_base(trained):
    stored = runs.tensors(trained / "adapters")
    assert {re.sub(r"\d+", "i", name) for name in stored if "lora" not in name and "guard" not in name} == {
        "step",
        "optimizer.count",
    }
    assert len([name for name in stored if name.startswith(PREFIX)]) == 2 * 2 * 7
    base = Checkpoints(trained / "adapters" / "checkpoints").meta(16)["base"]
    assert base["path"] == str(trained / "base" / "checkpoints" / "4")
    said = (trained / "adapters" / "log.txt").read_text()
    assert "and adapters of 4.1 k, the only trained parameters" in said


@pytest.mark.more
def test_resumes_to_the_bit(trained):
    """A run that ends after step 8 and resumes has the tensors of an uninterrupted run, bit for bit."""
    parts, again = over(trained), trained / "again"
    assert runs.train(trained / "small.py", again, **parts, train__steps=8) == 0
    assert runs.train(trained / "small.py", again, **parts, train__steps=16) == 0
    one, two = runs.tensors(trained / "adapters"), runs.tensors(again)
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_what_was_saved_can_be_used(trained):
    """`generation.load` restores base and adapters. Greedy sampling gives the tokens of the merged weights, which differ from
    the base's.
    """
    run, sampler, params, at = generation.load(str(trained / "adapters"), jax.devices()[:2])
    assert (at, run.lora.rank) == (16, 4)
    prompt = {"max_tokens": 6, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    made = list(sampler.tokens(params, [83, 97, 121], **prompt))
    base = runs.tensors(trained / "base")
    tensors = base | runs.tensors(trained / "adapters")
    merged = dict(lora.merged({k: v for k, v in tensors.items() if k.startswith(PREFIX)}, 32.0 / 4))
    plain = dataclasses.replace(run, lora=dataclasses.replace(run.lora, rank=0))
    other = generation.Sampler(plain, sampler.placement)
    shapes = jax.tree.map(lambda a: a, other.definition.abstract)
    flat = {k: jnp.asarray(v) for k, v in merged.items()}
    stacked = jax.tree_util.tree_map_with_path(lambda path, a: _gathered(path, flat, run.model.num_layers), shapes)
    assert list(other.tokens(stacked, [83, 97, 121], **prompt)) == made
    without = {k: jnp.asarray(v) for k, v in base.items()}
    stacked = jax.tree_util.tree_map_with_path(lambda path, a: _gathered(path, without, run.model.num_layers), shapes)
    assert list(other.tokens(stacked, [83, 97, 121], **prompt)) != made


def _gathered(path, flat, layers):
    name = PREFIX + ".".join(key.key for key in path)
    if name in flat:
        return flat[name]
    return jnp.stack([flat[name.replace(".layers.", f".layers.{i}.")] for i in range(layers)])


def test_the_command_writes_what_peft_reads(trained, tmp_path, capsys):
    out = tmp_path / "adapter"
    assert hugging_face_command.main(["export-adapter", str(trained / "adapters"), f"--out={out}", "--base=some/model"]) == 0
    settings, back, _ = peft.read(out, open_origin(str(trained / "adapters")).run().model)
    assert (settings.rank, settings.alpha, len(back)) == (4, 32.0, 2 * 2 * 7)
    assert json.loads((out / peft.CONFIG).read_text())["base_model_name_or_path"] == "some/model"
    stored = {k: v for k, v in runs.tensors(trained / "adapters").items() if k.startswith(PREFIX)}
    assert back.keys() == stored.keys() and all(np.array_equal(back[k], stored[k]) for k in stored)
    capsys.readouterr()
    assert hugging_face_command.main(["export-adapter", str(trained / "base"), f"--out={tmp_path / 'none'}"]) == 2
    assert "is of a run without adapters" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.more
def test_another_base_is_refused(trained, tmp_path, capsys):
    """The base at the path in the config first changes, and then is deleted. Both times training and `generation.load` end with
    an error.
    """
    folder = tmp_path / "copy"
    shutil.copytree(trained / "adapters", folder)
    shutil.copytree(trained / "base", tmp_path / "base")
    moved = over(trained) | {"init__from": str(tmp_path / "base")}
    config = trained / "small.py"
    assert runs.train(config, folder, **moved, train__steps=17) == 0, "the same base in another place"
    one = Checkpoints(tmp_path / "base" / "checkpoints")
    tensors = runs.tensors(tmp_path / "base")
    tensors["params.head"] = tensors["params.head"][::-1].copy()
    meta = one.meta(4)
    shutil.rmtree(tmp_path / "base" / "checkpoints" / "4")
    again = Checkpoints(tmp_path / "base" / "checkpoints")
    again.save(4, {k: jnp.asarray(v) for k, v in tensors.items()}, meta)
    again.close()
    capsys.readouterr()
    before = runs.steps(folder)
    assert runs.train(config, folder, **moved, train__steps=18) == 1
    assert "are not the base of the adapters of step 17: their digest" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="are not those"):
        generation.load(str(folder), jax.devices()[:1])
    assert runs.steps(folder) == before
    shutil.rmtree(tmp_path / "base" / "checkpoints" / "4")
    files = runs.tree(folder)
    assert runs.train(config, folder, **moved, train__steps=18) == 2
    assert f"the base of these adapters, {tmp_path / 'base'}" in capsys.readouterr().err
    assert runs.tree(folder) == files, "nothing was written"
    with pytest.raises(CheckpointError, match="--base of a command"):
        generation.load(str(folder), jax.devices()[:1])
    assert generation.load(str(folder), jax.devices()[:1], str(trained / "base"))[3] == 17


def test_runs_that_are_refused(trained, tmp_path, capsys):
    config, parts = trained / "small.py", over(trained)
    assert runs.train(config, tmp_path / "x", **{**parts, "init__from": ""}) == 2
    assert "adapters need the weights of a trained model" in capsys.readouterr().err
    assert runs.train(config, tmp_path / "x", **{**parts, "init__from": str(trained / "adapters")}) == 2
    assert "holds only adapters" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    changed = {**parts, "lora__rank": 2, "train__steps": 17}
    assert runs.train(config, trained / "adapters", **changed) == 2
    assert "can never change on resume: other tensors are trained" in capsys.readouterr().err
