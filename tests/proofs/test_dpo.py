"""Direct preference optimisation: loss and gradients against plain autodiff on every layout, and the stored references."""

import dataclasses
import errno
import functools
import itertools
import json

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import hardware
from jaxtrain.config.schema import to_dict
from jaxtrain.config.shapes import REWARD_METRICS
from jaxtrain.data import loading, text_format, tokenizer
from jaxtrain.data.batches import open_source
from jaxtrain.data.tokenfile import PAIRS, TokenFile, TokenWriter
from jaxtrain.metrics import samples
from jaxtrain.step import loss, validate
from jaxtrain.step.batch import place_batch
from jaxtrain.step.state import abstract_tensors, from_tensors, to_tensors
from jaxtrain.train import generation, references
from jaxtrain.train.scoring import Scorer, ScoreRequest

BYTE = tokenizer.ByteTokenizer()
MODEL = {
    "loss.name": "dpo",
    "loss.beta": 0.3,
    "loss.label_smoothing": 0.1,
    "model.num_layers": 1,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.d_ff": 48,
    "data.seq_len": 64,
    "train.global_batch": 8,
    "optimizer.clip_norm": 0.0,
    "data.tokenizer": "byte",
    "eval.every_steps": 0,
}


def pairs_file(path, count=160, seed=0):
    """Write a token file of preference pairs of random letters. Some completions consist only of the end-of-text token."""
    rng = np.random.default_rng(seed)
    with TokenWriter(path, tokenizer.tokenizer_info(BYTE), loss=True, recipe={PAIRS: True}) as writer:
        for _ in range(count):
            prompt = rng.integers(97, 123, rng.integers(1, 12))
            for most in (10, 14):
                ids = np.concatenate([prompt, completion := rng.integers(97, 123, rng.integers(0, most))])
                counts = np.arange(len(ids)) >= len(prompt)
                writer.write(ids, len(ids), counts, len(completion))
                writer.end_document(loss=True)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(pairs_file(tmp_path_factory.mktemp("pairs") / "pairs.tok"))


@functools.cache
def host_batch(source):
    """Return a batch whose reference log-probabilities differ by a few nats from those of a uniform distribution."""
    data = dataclasses.replace(helpers.tiny().data, source=source, tokenizer="byte", seq_len=MODEL["data.seq_len"])
    opened = open_source(data, source, split="train", global_batch=MODEL["train.global_batch"], data_dir=".")
    assert opened.max_segments >= 6
    (name,) = (s.name for s in opened.sources)
    file = opened.sources[0].file
    counted = np.add.reduceat(file.loss_flags(0, file.header["tokens"]), file.doc_offsets[:-1])
    noise = np.random.default_rng(5).normal(0, 3, len(counted))
    opened.references[name] = (noise - np.log(264) * counted).astype(np.float32)
    return opened.batch(0)


def plain_dpo(hidden_BTD, head_VD, batch, spec):
    """Return the loss and the rewards by the formula, one pair after another, with all logits, on one device."""
    head, eps = spec.whole_head(head_VD), spec.label_smoothing
    logits_BTV = jnp.einsum("BTD,VD->BTV", hidden_BTD, head, precision="highest")
    if spec.logit_softcap:
        logits_BTV = spec.logit_softcap * jnp.tanh(logits_BTV / spec.logit_softcap)
    log_p_BTV = jax.nn.log_softmax(logits_BTV, -1)
    log_p_BT = batch["weights"] * jnp.take_along_axis(log_p_BTV, batch["targets"][..., None], -1)[..., 0]

    def pair(log_p_T, segments_T, reference_T, number):
        chosen, rejected = (segments_T == 2 * number + k for k in (1, 2))
        reward = [spec.beta * jnp.where(d, log_p_T - reference_T, 0.0).sum() for d in (chosen, rejected)]
        p = jax.nn.sigmoid(reward[0] - reward[1])
        loss = -(1 - eps) * jnp.log(p) - eps * jnp.log(1 - p)
        values = loss, *reward, jnp.asarray(reward[0] > reward[1], jnp.float32), reward[0] - reward[1]
        return [jnp.where(chosen.any(), x, 0.0) for x in values]

    pairs = jax.vmap(pair, (None, None, None, 0))
    found = jax.vmap(pairs, (0, 0, 0, None))(log_p_BT, batch["segments"], batch["reference"], jnp.arange(spec.documents // 2))
    total, *sums = (x.sum() for x in found)
    return total, jax.lax.stop_gradient(dict(zip(REWARD_METRICS, sums, strict=True)))


def begun(run):
    """Return the tensors of a run's initial state, with random numbers in the adapters' matrices b, which start at zero."""
    tensors = dict(helpers.initial_tensors(run))
    for i, name in enumerate(sorted(tensors)):
        if name.startswith("params.") and name.endswith("_b"):
            assert not tensors[name].any(), f"{name}: training begins with the base as it was"
            tensors[name] = np.random.default_rng(i).normal(0, 0.05, tensors[name].shape).astype(np.float32)
    return tensors


def step(run, host, tensors):
    """Take one step from these tensors. Returns (metrics, gradients by canonical name, tensors)."""
    made = helpers.program(run)
    homes = {k: a.sharding for k, a in abstract_tensors(made.state).items()}
    state = from_tensors(made.state, {k: jax.device_put(tensors[k], homes[k]) for k in homes})
    state, values = helpers.train_step(run)(state, place_batch(host, made.batch, made.context))
    mu = "optimizer.mu."
    after = {k: np.asarray(v) for k, v in to_tensors(state).items()}
    grads = {k.removeprefix(mu): v / (1 - run.optimizer.beta1) for k, v in after.items() if k.startswith(mu)}
    return values, grads, after


def off(got, wanted):
    """Return the largest relative difference, in norm, over all gradients."""
    assert got.keys() == wanted.keys()
    return max(float(np.linalg.norm(got[k] - wanted[k]) / np.linalg.norm(wanted[k])) for k in wanted)


def config_of(source, more=None):
    # The number of documents is that of the data, as a run sets it.
    most = int(host_batch(source)["segments"].max()) + 1
    return helpers.tiny(MODEL | {"data.source": source, "data.max_segments": most + most % 2} | (more or {}))


@functools.cache
def by_the_formula(source, *model):
    """Return tensors, whose adapters are not zero, and the results of `plain_dpo` for (key, value) pairs of a model."""
    run = config_of(source, dict(model) | {"train.steps": 21})  # another config gives another program
    tensors = begun(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss.LOSSES, "dpo", dataclasses.replace(loss.LOSSES["dpo"], function=plain_dpo))
        return tensors, step(run, host_batch(source), tensors)


# Name -> (keys of the model, layout).
LAYOUTS = {
    "one device": ({}, {}),
    "ring": ({}, {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.seq": 2}),
    "tensor, whole vocabulary": ({}, {"mesh.tensor": 4, "sharding.rules.vocab": ""}),
    "unrolled gather": ({}, {"mesh.data": 2, "mesh.seq": 2, "parallel.context": "gather", "parallel.scan_layers": False}),
    "ulysses": ({}, {"mesh.fsdp": 2, "mesh.seq": 2, "parallel.context": "ulysses"}),
    "microbatches": ({}, {"mesh.fsdp": 4, "sharding.zero": 2, "train.grad_accum": 2, "train.accumulate": "layer"}),
    "stages": ({"model.num_layers": 2}, {"mesh.stage": 2, "mesh.fsdp": 2, "mesh.seq": 2, "train.grad_accum": 4}),
    "experts": ({"model.num_experts": 4, "model.d_ff": 32}, {"mesh.expert": 2, "mesh.fsdp": 2, "mesh.seq": 2}),
    "adapters": ({"lora.rank": 3}, {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.seq": 2, "train.grad_accum": 2}),
    "a frozen head": ({"train.freeze": "head,embed.*"}, {"mesh.fsdp": 4, "mesh.tensor": 2}),
    "a tied head": ({"model.tied_head": True, "model.logit_softcap": 5.0}, {"mesh.fsdp": 2, "mesh.tensor": 4}),
}


@pytest.mark.parametrize("layout", helpers.few(LAYOUTS, "ring"))
def test_layouts_are_the_formula_by_autodiff_of_whole_logits(layout, source):
    model, mesh = LAYOUTS[layout]
    tensors, (wanted, wanted_grads, _) = by_the_formula(source, *model.items())
    found, grads, _ = step(config_of(source, model | mesh), host_batch(source), tensors)
    assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=2e-6 if mesh else 1e-6)
    for name in REWARD_METRICS:
        assert float(found[name]) == pytest.approx(float(wanted[name]), rel=1e-5, abs=1e-6 if mesh else 1e-12)
    assert found["rewards/accuracies"] not in (0.0, 1.0)
    assert off(grads, wanted_grads) < 1e-5


def test_settings_that_cannot_be(source, tmp_path):
    wrong = {"data.packing": "none", "data.max_segments": 1, "loss.z_loss": 1e-4, "loss.label_smoothing": 0.5, "loss.beta": 0.0}
    for key, value in (wrong | {"data.source": "synthetic", "loss.name": "cross_entropy"}).items():
        run = helpers.tiny(MODEL | {"data.source": source, "mesh.fsdp": 8, key: value})
        named = "data.source" if key == "loss.name" else key
        assert [problem.key for problem in validate.validate(run, hardware.probe(), tmp_path)] == [named]


# ---- Whole runs

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a config, a base with random weights, and training and held-out pairs."""
    folder = tmp_path_factory.mktemp("runs")
    whole_weights = "num_layers = 1\n    config.mesh.fsdp = 1"  # compiles faster than sharded weights
    (folder / "small.py").write_text(runs.SMALL.replace("num_layers = 2", whole_weights))
    pairs_file(folder / "train.tok", 64)
    pairs_file(folder / "held_out.tok", 20, seed=1)
    base = loading.load_config(
        [f"--config={folder / 'small.py'}", "--config.data.source=synthetic", "--config.mesh.data=1"]
    ).run
    saver = Checkpoints(folder / "base" / "checkpoints")
    meta = {
        "config": to_dict(base),
        "data": {"tokens": 0, "fingerprint": {}},
        "text": text_format.read_text_format("byte").record(),
    } | {"positions": 64}
    saver.save(2, to_tensors(helpers.fresh_state(base)), meta)
    saver.close()
    return folder


def dpo_run(folder, name, **more):
    over = {
        "data__source": folder / "train.tok",
        "data__eval_source": folder / "held_out.tok",
        "init__from": folder / "base",
        "loss__name": "dpo",
        "loss__beta": 0.5,
        "train__steps": STEPS,
        "optimizer__lr": 2e-3,
        "optimizer__warmup_steps": 1,
        "eval__every_steps": 3,
        "eval__sequences": 5,
    }
    return runs.train(folder / "small.py", folder / name, **{**over, **more})


def stored(folder, name, of="train.tok"):
    """Return, for a token file and the run `name`: the path of its reference log-probabilities, their values and their
    description.
    """
    file = TokenFile.open(folder / of)
    path = folder / name / references.FOLDER / f"{file.header['content_sha256'][:16]}.npz"
    with np.load(path) as found:
        return path, found["log_probs"], json.loads(str(found["about"]))


@pytest.fixture(scope="module")
def whole(folder):
    """Train all weights without interruption, as a reference for other tests."""
    answers = {"sample__max_tokens": 3, "sample__every_steps": 5}
    assert dpo_run(folder, "whole", **answers) == 0
    return folder


def test_training_begins_at_the_reference(whole):
    """At first policy and reference are equal, so that the loss of every pair is log 2. Then the rewards differ."""
    lines = runs.lines(whole / "whole")
    found = {line["step"]: line for line in lines if line["kind"] == "train"}
    assert found[1]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert [found[1][name] for name in REWARD_METRICS[:2]] == pytest.approx([0, 0], abs=1e-5)
    last = found[STEPS]
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-6)
    assert last["loss"] < 0.68 and last["rewards/accuracies"] > 0.5
    held_out = {line["step"]: line for line in lines if line["kind"] == "eval"}
    assert [*held_out] == [0, 3, 6] and "perplexity" not in held_out[3]
    assert all(np.isfinite(held_out[6][name]) for name in ("loss", *REWARD_METRICS))


def test_samples_answer_the_first_held_out_pairs(whole):
    """Each below its prompt, and beside the chosen answer."""
    file = TokenFile.open(whole / "held_out.tok")
    found = list(samples.parse_samples((whole / "whole" / "samples.txt").read_text()))
    assert [(sample.step, sample.prompt) for sample in found] == [(step, n) for step in (5, 6) for n in (1, 2)]
    for sample, (first, last) in zip(found[:2], itertools.batched(file.doc_offsets[:8].tolist(), 2), strict=False):
        counts = file.loss_flags(first, last)
        prompt, answer = (BYTE.decode(file.tokens[first:last][flags]) for flags in (~counts, counts))
        assert sample.text.startswith(prompt) and sample.text.endswith(f"\n[reference] {answer}")


def test_the_references_are_those_of_the_base(whole):
    """The stored log-probabilities of all documents equal those of `Scorer` with the base's weights."""
    run, sampler, params, _, _ = generation.load_model(str(whole / "base"), jax.devices()[:1])
    scorer = Scorer(run, sampler, params)
    for name in ("train.tok", "held_out.tok"):
        file = TokenFile.open(whole / name)
        spans = itertools.pairwise(file.doc_offsets[:].tolist())
        asked = [ScoreRequest(file.tokens[a:b].tolist(), int(file.loss_flags(a, b).sum())) for a, b in spans]
        found = stored(whole, "whole", name)[1]
        np.testing.assert_allclose(found, [score for score, _ in scorer.score(asked)], rtol=1e-5, atol=1e-4)


def write_references(folder, name, of, add, **changed):
    """Write the references of a token file for the run `name`: those of the run `whole` plus `add`, of another description."""
    path, found, about = stored(folder, "whole", of)
    other = folder / name / references.FOLDER / path.name
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_bytes(references.encode_log_probs(found + np.float32(add), about | changed))


OTHER_WEIGHTS = {"weights": "0" * 32}
OTHER_PRECISION = {"precision": {"activations": "bf16", "weights": "f32", "fp8": {}}}


def test_a_pass_goes_on_where_it_ended_and_other_references_are_made_anew(whole, monkeypatch, capsys):
    """A full disk ends the pass with the file's name. The next attempt computes what is missing. Before training, references of
    other weights or of another precision are computed again.
    """
    write_references(whole, "cut", "train.tok", 1, **OTHER_PRECISION)
    written = []

    def full(path, data):
        written.append(path)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_atomic(path, data)

    write_atomic = references.write_atomic
    with monkeypatch.context() as patch:
        patch.setattr(references, "write_atomic", full)
        assert dpo_run(whole, "cut") == 1
    path, partial, about = stored(whole, "cut")
    assert str(path) in capsys.readouterr().out
    right = stored(whole, "whole")[1]
    known = np.isfinite(partial)
    assert 0 < known.sum() < len(known) and np.array_equal(partial[known], right[known])

    path.write_bytes(references.encode_log_probs(partial + 1, about))  # so that a value which is computed again would show
    write_references(whole, "cut", "held_out.tok", 1, **OTHER_WEIGHTS)
    assert dpo_run(whole, "cut", train__steps=1) == 0
    assert np.array_equal(stored(whole, "cut")[1], np.where(known, right + 1, right))
    assert np.array_equal(stored(whole, "cut", "held_out.tok")[1], stored(whole, "whole", "held_out.tok")[1])


def test_a_run_resumes_with_its_references(whole, tmp_path):
    """The stored references are used again, even in another precision. They must be there, complete, and of this run
    and data: their model is gone.
    """
    resumed = functools.partial(dpo_run, whole, "parts", eval__every_steps=0)
    assert resumed(train__steps=3) == 0
    path, found, about = stored(whole, "parts")
    assert Checkpoints(whole / "parts" / "checkpoints").meta(3)["reference"] == about["weights"]
    write_references(whole, "parts", "train.tok", 0, **OTHER_PRECISION)
    kept = path.read_bytes()

    assert resumed(data__source=pairs_file(tmp_path / "other.tok", 50, seed=9)) == 2
    for wrong in (kept[:-50], references.encode_log_probs(found, about | OTHER_WEIGHTS)):
        path.write_bytes(wrong)
        assert resumed() == 2
    path.unlink()
    assert resumed() == 2
    assert runs.steps(whole / "parts") == [3] and not path.exists()

    path.write_bytes(kept)
    assert resumed() == 0
    assert path.read_bytes() == kept
    assert runs.losses(whole / "parts") == runs.losses(whole / "whole")


def test_adapters_have_their_base_for_a_reference(whole):
    """The base is always available: a lost file of references is computed again."""
    adapters = {"lora__rank": 4, "optimizer__lr": 5e-3, "eval__every_steps": 0}
    assert dpo_run(whole, "adapters", **adapters, train__steps=3) == 0
    first, *_, last = (line for line in runs.lines(whole / "adapters") if line["kind"] == "train")
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and abs(last["rewards/chosen"]) > 0.001
    path, before, about = stored(whole, "adapters")
    assert about["weights"] == Checkpoints(whole / "adapters" / "checkpoints").meta(3)["base"]["digest"]
    np.testing.assert_allclose(before, stored(whole, "whole")[1], rtol=1e-5, atol=1e-4)
    path.unlink()
    assert dpo_run(whole, "adapters", **adapters, train__steps=4) == 0
    assert np.array_equal(stored(whole, "adapters")[1], before)


def test_adapters_trained_further_have_themselves_for_a_reference(whole):
    """Training begins at the reference, the base with the adapters of init.from. They are changed then, so the stored
    references must be there on resume.
    """
    adapters = {"lora__rank": 4, "optimizer__lr": 5e-3, "eval__every_steps": 0}
    assert dpo_run(whole, "first", **adapters, train__steps=3) == 0
    further = functools.partial(dpo_run, whole, "further", **adapters, init__from=whole / "first")
    assert further(train__steps=2) == 0
    first, second = (line for line in runs.lines(whole / "further") if line["kind"] == "train")
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and second["loss"] != first["loss"]
    path, found, about = stored(whole, "further")
    assert np.abs(found - stored(whole, "first")[1]).max() > 0.01
    assert about["weights"] != Checkpoints(whole / "further" / "checkpoints").meta(2)["base"]["digest"]
    kept = path.read_bytes()
    path.unlink()
    assert further(train__steps=3) == 2
    path.write_bytes(kept)
    assert further(train__steps=3) == 0
    assert path.read_bytes() == kept
