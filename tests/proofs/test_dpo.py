"""Direct preference optimisation: the loss and its gradient against plain autodiff, and on every layout."""

import dataclasses
import errno
import functools
import itertools
import json
import re
import shutil

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from jaxtrain import generation, hardware, validate
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.data import pipeline, tokenizer
from jaxtrain.data.tokenfile import PAIRS, TokenFile, TokenWriter
from jaxtrain.scoring import Scored, Scorer
from jaxtrain.shapes import REWARD_METRICS
from jaxtrain.train import loss, references
from jaxtrain.train.batch import place_batch
from jaxtrain.train.state import abstract_tensors, from_tensors, to_tensors

BYTE = tokenizer.ByteTokenizer()
MODEL = {
    "loss.name": "dpo",
    "loss.beta": 0.3,
    "loss.label_smoothing": 0.1,
    "model.num_layers": 2,
    "train.global_batch": 8,
    "optimizer.clip_norm": 0.0,
    "data.tokenizer": "byte",
    "eval.every_steps": 0,
}


def pairs_file(path, count=160, seed=0):
    """Write a token file of preference pairs of random letters. Some completions consist only of the end-of-text token."""
    rng = np.random.default_rng(seed)
    with TokenWriter(path, tokenizer.info(BYTE), loss=True, made={PAIRS: True}) as writer:
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
def host_batch(source, seq_len=64, batch=8):
    """Return a batch whose reference log-probabilities differ by a few nats from those of a uniform distribution."""
    data = dataclasses.replace(helpers.tiny().data, source=source, tokenizer="byte", seq_len=seq_len)
    opened = pipeline.open_source(data, source, split="train", global_batch=batch, data_dir=".")
    assert opened.max_segments >= 6
    (name,) = (s.name for s in opened.sources)
    file = opened.sources[0].file
    counted = np.add.reduceat(file.loss_flags(0, file.header["tokens"]), file.doc_offsets[:-1])
    noise = np.random.default_rng(5).normal(0, 3, len(counted))
    opened.references[name] = (noise - np.log(264) * counted).astype(np.float32)
    return opened.batch(0)


def plain_dpo(hidden_BTD, head_VD, batch, spec):
    """Return the loss and the rewards by the formula, one pair after another, with all logits, on one device."""
    head = spec.whole_head(head_VD)
    log_p_BTV = jax.nn.log_softmax(jnp.einsum("BTD,VD->BTV", hidden_BTD, head, precision="highest"), -1)
    log_p_BT = batch["weights"] * jnp.take_along_axis(log_p_BTV, batch["targets"][..., None], -1)[..., 0]
    total, sums = 0.0, dict.fromkeys(REWARD_METRICS, 0.0)
    for row in range(log_p_BT.shape[0]):
        for pair in range(spec.documents // 2):
            chosen, rejected = (batch["segments"][row] == 2 * pair + k for k in (1, 2))
            reward = [spec.beta * jnp.where(d, log_p_BT[row] - batch["reference"][row], 0.0).sum() for d in (chosen, rejected)]
            p = jax.nn.sigmoid(reward[0] - reward[1])
            eps = spec.label_smoothing
            there = chosen.any()
            total += jnp.where(there, -(1 - eps) * jnp.log(p) - eps * jnp.log(1 - p), 0.0)
            values = *reward, jnp.asarray(reward[0] > reward[1], jnp.float32), reward[0] - reward[1]
            sums = {k: sums[k] + jnp.where(there, v, 0.0) for k, v in zip(REWARD_METRICS, values, strict=True)}
    return total, jax.lax.stop_gradient(sums)


def step(run, host, tensors):
    """Take one step from these tensors. Returns (loss, rewards, gradients by canonical name)."""
    made = helpers.program(run)
    homes = {k: a.sharding for k, a in abstract_tensors(made.state).items()}
    state = from_tensors(made.state, {k: jax.device_put(tensors[k], homes[k]) for k in homes})
    state, values = helpers.train_step(run)(state, place_batch(host, made.batch, made.context))
    mu = "optimizer.mu."
    after = {k: np.asarray(v) for k, v in to_tensors(state).items() if k.startswith(mu)}
    grads = {k.removeprefix(mu): v / (1 - run.optimizer.beta1) for k, v in after.items()}
    return float(values["loss"]), {k: float(values[k]) for k in REWARD_METRICS}, grads


def off(got, wanted):
    """Return the largest relative difference, in norm, over all gradients."""
    assert got.keys() == wanted.keys()
    return max(float(np.linalg.norm(got[k] - wanted[k]) / np.linalg.norm(wanted[k])) for k in wanted)


def config_of(source, more=None):
    # The number of documents is that of the data, as a run sets it.
    most = int(host_batch(source)["segments"].max()) + 1
    return helpers.tiny(MODEL | {"data.source": source, "data.max_segments": most + most % 2} | (more or {}))


@pytest.fixture(scope="module")
def one_device(source):
    run = config_of(source)
    tensors = helpers.initial_tensors(run)
    return tensors, step(run, host_batch(source), tensors)


def test_the_formula_by_autodiff_of_whole_logits(source, one_device, monkeypatch):
    tensors, (value, rewards, grads) = one_device
    monkeypatch.setitem(loss.LOSSES, "dpo", dataclasses.replace(loss.LOSSES["dpo"], function=plain_dpo))
    run = config_of(source, {"train.steps": 21})  # another config gives another program
    plain_value, plain_rewards, plain_grads = step(run, host_batch(source), tensors)
    assert value == pytest.approx(plain_value, rel=1e-6)
    assert rewards == pytest.approx(plain_rewards, rel=1e-5)
    assert rewards["rewards/accuracies"] not in (0.0, 1.0)
    assert off(grads, plain_grads) < 1e-5


SPLIT_TOKENS = {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.seq": 2}
LAYOUTS = {
    "data": {"mesh.data": 8},
    "zero 0": {"mesh.data": 2, "mesh.fsdp": 4, "sharding.zero": 0},
    "zero 1": {"mesh.data": 2, "mesh.fsdp": 4, "sharding.zero": 1},
    "zero 2": {"mesh.fsdp": 4, "sharding.zero": 2, "train.grad_accum": 2},
    "zero 3": {"mesh.fsdp": 8},
    "tensor": {"mesh.data": 2, "mesh.tensor": 4},
    "tensor, whole vocabulary": {"mesh.tensor": 4, "sharding.rules.vocab": ""},
    "tensor, whole residual": {"mesh.tensor": 4, "sharding.rules.residual": "seq"},
    "ring": SPLIT_TOKENS,
    "ring of 4, unrolled": {"mesh.data": 2, "mesh.seq": 4, "parallel.scan_layers": False},
    "gather": {"mesh.seq": 4, "parallel.context": "gather"},
    "ulysses": {"mesh.fsdp": 2, "mesh.seq": 4, "parallel.context": "ulysses"},
    "microbatches": {"train.grad_accum": 4, "mesh.fsdp": 2, "train.accumulate": "layer"},
    "stages": {"mesh.stage": 2, "mesh.fsdp": 2, "mesh.seq": 2, "train.grad_accum": 4},
    "stages, interleaved": {
        "model.num_layers": 4,
        "mesh.stage": 2,
        "mesh.tensor": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.groups": 2,
        "train.grad_accum": 2,
    },
}


@pytest.mark.parametrize("layout", helpers.few(LAYOUTS, "ring", "tensor, whole vocabulary"))
def test_layouts_are_one_device(layout, source, one_device):
    more = LAYOUTS[layout]
    if "model.num_layers" in more:
        run = config_of(source, {"model.num_layers": more["model.num_layers"]})
        tensors = helpers.initial_tensors(run)
        value, rewards, grads = step(run, host_batch(source), tensors)
    else:
        tensors, (value, rewards, grads) = one_device
    found = step(config_of(source, more), host_batch(source), tensors)
    assert found[0] == pytest.approx(value, rel=2e-6)
    assert found[1] == pytest.approx(rewards, rel=1e-5, abs=1e-6)
    assert off(found[2], grads) < 1e-5


OTHERS = {
    "experts": ({"model.num_experts": 4, "model.d_ff": 32}, {"mesh.expert": 2, "mesh.fsdp": 2, "mesh.seq": 2}),
    "adapters": ({"lora.rank": 3}, {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.seq": 2, "train.grad_accum": 2}),
    "a frozen head": ({"train.freeze": "head,embed.*"}, {"mesh.fsdp": 4, "mesh.tensor": 2}),
    "a tied head": ({"model.tied_head": True, "model.logit_softcap": 5.0}, {"mesh.fsdp": 2, "mesh.tensor": 4}),
}


@pytest.mark.parametrize("other", helpers.few(OTHERS, "adapters"))
def test_other_models_and_trained_parts(other, source):
    """For each case of OTHERS, loss, rewards and gradients on a mesh are those of one device."""
    model, layout = OTHERS[other]
    run = config_of(source, model)
    tensors = dict(helpers.initial_tensors(run))
    for i, name in enumerate(sorted(name for name in tensors if name.endswith("_b"))):
        tensors[name] = np.random.default_rng(i).normal(0, 0.05, tensors[name].shape).astype(np.float32)
    value, rewards, grads = step(run, host_batch(source), tensors)
    found = step(config_of(source, model | layout), host_batch(source), tensors)
    assert found[0] == pytest.approx(value, rel=2e-6)
    assert found[1] == pytest.approx(rewards, rel=1e-5, abs=1e-6)
    assert off(found[2], grads) < 1e-5


def test_in_8_bits(source):
    assert "f8E4M3FN" in helpers.lowered(config_of(source, {"precision": "fp8", "mesh.fsdp": 2}))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"data.packing": "none"}, "data.packing"),
        ({"data.max_segments": 1}, "data.max_segments"),
        ({"loss.z_loss": 1e-4}, "loss.z_loss"),
        ({"loss.label_smoothing": 0.5}, "loss.label_smoothing"),
        ({"loss.beta": 0.0}, "loss.beta"),
        ({"data.source": "synthetic"}, "data.source"),
        ({"loss.name": "cross_entropy"}, "data.source"),
    ],
)
def test_settings_that_cannot_be(keys, named, source, tmp_path):
    run = helpers.tiny(MODEL | {"data.source": source, "mesh.fsdp": 8} | keys)
    assert [problem.key for problem in validate.validate(run, hardware.probe(), tmp_path)] == [named]


# ---- Whole runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a config, a base that was trained for a few steps, and training and held-out pairs."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.py").write_text(runs.SMALL.replace("cosine", "constant"))
    pairs_file(folder / "train.tok", 200)
    pairs_file(folder / "held_out.tok", 40, seed=1)
    config = folder / "small.py"
    assert runs.train(config, folder / "base", train__steps=6, data__source="synthetic", eval__every_steps=0) == 0
    return folder


def dpo_run(folder, name, **more):
    over = {
        "data__source": folder / "train.tok",
        "data__eval_source": folder / "held_out.tok",
        "init__from": folder / "base",
        "loss__name": "dpo",
        "loss__beta": 0.5,
        "train__steps": 12,
        "optimizer__lr": 2e-3,
        "eval__every_steps": 4,
        "eval__sequences": 5,
    }
    return runs.train(folder / "small.py", folder / name, **{**over, **more})


def lines(folder, name, kind="train"):
    found = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in found if line["kind"] == kind}


def losses(folder, name):
    return {step: line["loss"] for step, line in lines(folder, name).items()}


@pytest.fixture(scope="module")
def whole(folder):
    """Train all weights without interruption, as a reference for other tests."""
    assert dpo_run(folder, "whole") == 0
    return folder


def test_training_begins_at_the_reference(whole):
    """At first policy and reference are equal, so that the loss of every pair is log 2. Then the rewards differ."""
    found = lines(whole, "whole")
    assert found[1]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert [found[1][name] for name in REWARD_METRICS[:2]] == pytest.approx([0, 0], abs=1e-5)
    assert found[12]["rewards/margins"] == pytest.approx(found[12]["rewards/chosen"] - found[12]["rewards/rejected"], abs=1e-6)
    assert found[12]["loss"] < 0.68 and found[12]["rewards/accuracies"] > 0.5
    held_out = lines(whole, "whole", "eval")
    assert [*held_out] == [4, 8, 12] and "perplexity" not in held_out[4]
    assert all(np.isfinite(held_out[12][name]) for name in ("loss", *REWARD_METRICS))


def stored(folder, name, of="train.tok"):
    """Return, for a token file and the run `name`: the path of its reference log-probabilities, their values and their
    description.
    """
    file = TokenFile.open(folder / of)
    path = folder / name / references.FOLDER / f"{file.header['content_sha256'][:16]}.npz"
    with np.load(path) as found:
        return path, found["log_probs"], json.loads(str(found["about"]))


def test_the_references_are_those_of_the_base(whole):
    """The stored log-probabilities of the first 80 documents of each file equal those of `Scorer` with the base's weights."""
    run, sampler, params, _ = generation.load(str(whole / "base"), jax.devices()[:2])
    scorer = Scorer(run, sampler, params)
    for name in ("train.tok", "held_out.tok"):
        file = TokenFile.open(whole / name)
        _, found, _ = stored(whole, "whole", name)
        offsets = file.doc_offsets[:].tolist()
        asked = [
            Scored(file.tokens[a:b].tolist(), int(file.loss_flags(a, b).sum())) for a, b in itertools.pairwise(offsets[:81])
        ]
        np.testing.assert_allclose(found[:80], [score for score, _ in scorer.score(asked)], rtol=1e-5, atol=1e-4)
        assert np.isfinite(found).all()


def test_a_pass_that_ends_in_the_middle_goes_on_there(whole, monkeypatch, capsys):
    """An error of the disk ends the reference pass. The next attempt computes only the missing log-probabilities, and its
    losses equal the uninterrupted run's to the bit.
    """
    right, read = references.NumberedRows.batch, []

    def batch(self, step, rows=None):
        read.append(step)
        if step == 5:
            raise OSError("the disk is gone")
        return right(self, step, rows)

    with monkeypatch.context() as patch:
        patch.setattr(references.NumberedRows, "batch", batch)
        with pytest.raises(OSError, match="the disk is gone"):
            dpo_run(whole, "cut")
    assert np.isnan(stored(whole, "cut")[1]).any() and np.isfinite(stored(whole, "cut")[1]).any()
    capsys.readouterr()
    assert dpo_run(whole, "cut") == 0
    first, second = re.findall(r"(\d+) of (\d+) sequences to compute", capsys.readouterr().out)
    assert int(first[0]) < int(first[1]) and second[0] == second[1]
    assert losses(whole, "cut") == losses(whole, "whole")


def test_a_run_resumes_with_its_references(whole, capsys):
    """The references are not computed again, even on another mesh with other rounding."""
    assert dpo_run(whole, "parts", train__steps=5) == 0
    assert dpo_run(whole, "parts", train__steps=8) == 0
    path, before, about = stored(whole, "parts")
    assert Checkpoints(whole / "parts" / "checkpoints").meta(8)["reference"] == about["weights"]
    capsys.readouterr()
    assert dpo_run(whole, "parts", mesh__fsdp=2, mesh__tensor=2, mesh__seq=2) == 0
    assert "to compute" not in capsys.readouterr().out
    assert np.array_equal(stored(whole, "parts")[1], before)
    ours, theirs = losses(whole, "parts"), losses(whole, "whole")
    assert all(ours[step] == theirs[step] for step in range(1, 9))
    assert [ours[step] for step in range(9, 13)] == pytest.approx([theirs[step] for step in range(9, 13)], rel=1e-4)


def test_what_is_refused_once_training_has_begun(whole, tmp_path, capsys):
    """A resumed run cannot compute its references again. The file of reference log-probabilities must be present, complete, and
    of this run and data.
    """
    shutil.copytree(whole / "parts", tmp_path / "parts")
    path, found, about = stored(tmp_path, "parts", whole / "train.tok")
    pairs_file(tmp_path / "other.tok", 50, seed=9)
    kept = path.read_bytes()

    def refused(why, **more):
        over = {"data__source": whole / "train.tok", "data__eval_source": whole / "held_out.tok", "init__from": whole / "base"}
        assert dpo_run(whole, tmp_path / "parts", **{**over, "train__steps": 14, **more}) == 2
        out, said = capsys.readouterr()
        assert said.startswith("error: loss.name = 'dpo': ") and why in said and "Start a new run" in said, said
        assert "compiling" not in out
        path.write_bytes(kept)

    refused("lacks reference log-probabilities of", data__source=tmp_path / "other.tok")
    path.unlink()
    refused("lacks reference log-probabilities of")
    path.write_bytes(kept[:-50])
    refused("is damaged")
    path.write_bytes(references.encoded(found, {**about, "weights": "0" * 32}))
    refused("it differs in weights")
    path.write_bytes(references.encoded(found, {**about, "model": about["model"] | {"rope_base": 5.0}}))
    refused("it differs in model")


def test_before_training_another_reference_is_made_anew(whole, capsys):
    """The run has no checkpoint yet, and its references are of another base: they are computed again."""
    path, found, about = stored(whole, "whole")
    (whole / "stale" / references.FOLDER).mkdir(parents=True)
    other = whole / "stale" / references.FOLDER / path.name
    other.write_bytes(references.encoded(found + 1, {**about, "weights": "0" * 32}))
    assert dpo_run(whole, "stale", train__steps=2, optimizer__warmup_steps=2) == 0
    assert "It is computed again" in capsys.readouterr().out
    assert np.array_equal(stored(whole, "stale")[1], found)


def test_a_pass_in_another_precision_is_made_anew_until_training_begins(whole, tmp_path, capsys):
    path, found, about = stored(whole, "whole")
    shutil.copytree(whole / "parts", tmp_path / "trained")
    other = {**about, "precision": {**about["precision"], "activations": "bf16"}}
    for name in (whole / "begun", tmp_path / "trained"):
        (name / references.FOLDER).mkdir(parents=True, exist_ok=True)
        (name / references.FOLDER / path.name).write_bytes(references.encoded(found + 1, other))
    assert dpo_run(whole, "begun", train__steps=2, optimizer__warmup_steps=2) == 0
    assert "it differs in precision. It is computed again" in capsys.readouterr().out
    assert np.array_equal(stored(whole, "begun")[1], found)
    over = {"data__source": whole / "train.tok", "data__eval_source": whole / "held_out.tok", "init__from": whole / "base"}
    assert dpo_run(whole, tmp_path / "trained", **over, train__steps=13) == 0
    assert "computed again" not in capsys.readouterr().out


def test_a_full_disk_ends_the_pass_with_the_name_of_the_file(whole, monkeypatch, capsys):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(references, "write_atomic", full)
    assert dpo_run(whole, "full") == 1
    said = capsys.readouterr().out
    assert f"{whole / 'full' / references.FOLDER}" in said and "cannot be written (No space left on device)" in said


ADAPTERS = {"lora__rank": 4, "optimizer__lr": 5e-3, "checkpoint__every_steps": 4}


def test_adapters_have_their_base_for_a_reference(whole, capsys):
    """The base is always available: a lost file of references is computed again."""
    assert dpo_run(whole, "adapters", **ADAPTERS) == 0
    found = lines(whole, "adapters")
    assert found[1]["loss"] == pytest.approx(np.log(2), abs=1e-6) and abs(found[12]["rewards/chosen"]) > 0.01
    path, references_before, about = stored(whole, "adapters")
    assert about["weights"] == Checkpoints(whole / "adapters" / "checkpoints").meta(12)["base"]["digest"]
    np.testing.assert_allclose(references_before, stored(whole, "whole")[1], rtol=1e-5, atol=1e-4)

    assert dpo_run(whole, "lost", **ADAPTERS, train__steps=4) == 0
    stored(whole, "lost")[0].unlink()
    capsys.readouterr()
    assert dpo_run(whole, "lost", **ADAPTERS) == 0
    assert "81 of 81 sequences to compute" in capsys.readouterr().out
    assert losses(whole, "lost") == losses(whole, "adapters")
    assert np.array_equal(stored(whole, "lost")[1], references_before)


@pytest.mark.more
def test_killed_three_times(folder, tmp_path):
    """SIGKILL comes in the middle of the reference pass, before the first checkpoint, and after one. The
    losses are those of a run that was not killed.
    """
    pairs_file(tmp_path / "many.tok", 9000)
    over = {"data__source": tmp_path / "many.tok", "init__from": folder / "base", "loss__name": "dpo", "loss__beta": 0.5}
    over |= {"train__steps": 60, "optimizer__lr": 2e-3, "eval__every_steps": 0, "checkpoint__every_steps": 5}
    over |= {"train__global_batch": 2, "paths__cache": tmp_path / "cache"}

    def child(name):
        return runs.Child(folder / "small.py", tmp_path / name, tmp_path / f"{name}.txt", **over)

    code, said = child("whole").end()
    assert code == 0, said
    place = tmp_path / "killed"
    told = []
    for moment in (
        lambda run: any((place / references.FOLDER).glob("*.npz")),
        lambda run: "step 3/60" in run.said,
        lambda run: "checkpoint 5:" in run.said,
    ):
        run = child("killed")
        run.until(lambda run=run, moment=moment: moment(run))
        run.process.kill()
        run.process.wait()
        told.append(run.said)
    code, said = child("killed").end()
    assert code == 0, said
    told.append(said)
    todo = [[int(n.replace(",", "")) for n in re.findall(r"([\d,]+) of [\d,]+ sequences to compute", text)] for text in told]
    assert todo[0][0] > todo[1][0] > 0 and todo[2] == todo[3] == []
    assert "step 1/60" not in told[0] and "resuming from" not in told[2] and re.search(r"resuming from step \d+", told[3])
    assert losses(tmp_path, "killed") == losses(tmp_path, "whole")
