"""Adapters that are trained further: PEFT's own and those of a run, compared with PEFT, resumed, moved, and refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import helpers
import hugging_face
import jax
import numpy as np
import packages
import pytest
import runs
from hugging_face import SAME, TOKENS, exported, tensors_of
from safetensors.numpy import load_file

from jaxtrain import main
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.commands import hf as command
from jaxtrain.hf import peft
from jaxtrain.hf.folder import open_folder
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.model import logits_function
from jaxtrain.step.batch import place_batch
from jaxtrain.step.state import to_tensors
from jaxtrain.train import generation
from jaxtrain.train.initial_state import choose_start, initial_state

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "reference" / "peft_training.py"
STEPS, RANK = 3, 4
TARGETS = ["q_proj", "v_proj", "down_proj"]
SEGMENTS = np.ones_like(TOKENS)
KEYS = {"data.source": "synthetic", "data.seq_len": 64, "train.global_batch": 8, "train.steps": 4, "paths.cache": ""}
KEYS |= {"optimizer.lr": 0.02, "optimizer.warmup_steps": 1, "eval.every_steps": 0, "sample.max_tokens": 0, "mesh.fsdp": 4}
KEYS |= {"log.every_steps": 1}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write base/, PEFT's adapter peft/ (rsLoRA, of some weights), and its import ours/."""
    packages.reference()
    folder = tmp_path_factory.mktemp("adapter")
    hugging_face.write(folder / "base", "llama", scale=0.3, vocab=264)
    settings = {"r": RANK, "lora_alpha": 6, "use_rslora": True, "target_modules": TARGETS, "lora_dropout": 0.0}
    (folder / "settings.json").write_text(json.dumps(settings))
    hugging_face.ask(SCRIPT, "make", folder / "base", folder / "peft", folder / "settings.json")
    args = ["import-adapter", str(folder / "peft"), f"--base={folder / 'base'}", f"--out={folder / 'ours'}"]
    assert command.main(args) == 0
    return folder


def train(workdir: Path, base: Path | str, **more: object) -> int:
    """Train by configs/finetune.py. more: keys, with __ for a dot."""
    keys = KEYS | {key.replace("__", "."): value for key, value in more.items()}
    args = [f"--config={ROOT / 'configs' / 'finetune.py'}:base={base}", f"--workdir={workdir}"]
    return main.main([*args, *(f"--config.{k}={v}" for k, v in keys.items())])


def test_steps_follow_peft(adapter, tmp_path):
    """Losses of three AdamW steps on a sharded mesh, and the adapter after them, are those of PEFT."""
    rows = np.stack([hugging_face.random_tokens(264, (4, 33), seed=i) for i in range(STEPS)])
    np.save(tmp_path / "rows.npy", rows)
    hugging_face.ask(SCRIPT, "train", adapter / "base", adapter / "peft", tmp_path / "rows.npy", tmp_path / "theirs")

    source = open_origin(str(adapter / "ours"))
    how = {f"model.{k}": v for k, v in dataclasses.asdict(open_folder(adapter / "base").model).items()}
    how |= {"lora." + k: v for k, v in dataclasses.asdict(source.run().lora).items()}
    how |= {"data.seq_len": 32, "train.global_batch": 4, "mesh.fsdp": 2, "mesh.tensor": 2, "data.packing": "none"}
    how |= {"optimizer.lr": 1e-2, "optimizer.schedule": "constant", "optimizer.warmup_steps": 0, "optimizer.eps": 1e-3}
    how |= {"optimizer.weight_decay": 0.0, "optimizer.clip_norm": 0.0, "train.steps": STEPS}
    run = helpers.tiny(how | {"init.from": str(adapter / "ours")})
    made, step = helpers.program(run), helpers.train_step(run)
    start = choose_start(run, Checkpoints(tmp_path / "none"), made)
    assert (start.base, start.adapters) == (str(adapter / "base"), source.path)
    state, _ = initial_state(made, start, Checkpoints(tmp_path / "none"), lambda line: None)
    losses, ones = [], np.ones((4, 32), np.int32)
    for each in rows:
        batch = {"tokens": each[:, :-1], "targets": each[:, 1:], "segments": ones, "weights": ones.astype(np.float32)}
        batch["positions"] = np.broadcast_to(np.arange(32, dtype=np.int32), (4, 32)).copy()
        state, values = step(state, place_batch(batch, made.batch, made.context))
        losses.append(float(values["loss"]))
    theirs = json.loads((tmp_path / "theirs" / "losses.json").read_text())
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)

    stored = {name: np.asarray(x) for name, x in to_tensors(state).items() if "lora" in name and name.startswith("params.")}
    peft.write_adapter(tmp_path / "after", stored, run.model, run.lora, "base")
    before, after, wanted = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (adapter / "peft", tmp_path / "after", tmp_path / "theirs")
    )
    assert after.keys() == wanted.keys() == before.keys()
    for name, x in wanted.items():
        assert np.abs(x - before[name]).max() > 1e-3, name
        np.testing.assert_allclose(after[name], x, rtol=0, atol=2e-5, err_msg=name)


def test_a_second_stage_is_used_like_a_first(adapter, tmp_path, monkeypatch):
    """Adapters go from PEFT to a run, to a run after it, and to PEFT again. The base moves on the way."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(adapter / "base", "base")
    assert command.main(["import-adapter", str(adapter / "peft"), "--base=base", "--out=ours"]) == 0
    assert train(Path("one"), "ours") == 0
    assert train(Path("two"), "one", train__steps=2) == 0
    meta = Checkpoints("two/checkpoints").meta(2)
    assert meta["base"]["path"] == str(tmp_path / "base") and meta["config"]["lora"]["rank"] == RANK
    assert meta["base"]["digest"] == Checkpoints("ours/checkpoints").meta(0)["base"]["digest"]
    # The first loss of the second stage is that of the adapters before, and so below the base's.
    assert runs.losses(Path("two"))[1] < runs.losses(Path("one"))[1]

    Path("base").rename("moved")
    assert train(Path("two"), "one") == 2, "the base is gone"
    assert train(Path("three"), "one") == 2
    assert not Path("three").exists()
    assert train(Path("two"), "one", init__base="moved") == 0
    assert train(Path("three"), "one", init__base="moved", train__steps=1) == 0
    assert runs.losses(Path("three"))[1] == runs.losses(Path("two"))[1]
    assert runs.steps(Path("two")) == [2, 4]
    assert train(Path("two"), "one", train__steps=5) == 0, "the path in the newest checkpoint"

    assert command.main(["export-adapter", "two", "--out=adapter"]) == 0
    np.save("tokens.npy", TOKENS)
    script = ROOT / "tests" / "reference" / "peft_logits.py"
    hugging_face.ask(script, "tokens.npy", "moved", "adapter", "peft.npz")
    theirs = np.load("peft.npz")
    assert np.abs(logits_function(open_origin("two"))(TOKENS, SEGMENTS) - theirs["logits"]).max() < SAME
    exported(Path("two"), Path("merged"), tokenizer="byte")
    merged, base = tensors_of(Path("merged")), tensors_of(Path("moved"))
    changed = {name for name in base if not np.array_equal(base[name], merged[name])}
    assert changed == {name for name in base if any(f"{target}.weight" in name for target in TARGETS)}
    loaded = generation.load_model("two", jax.devices()[:1])
    greedy = {"max_tokens": 6, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    again = generation.load_model("merged", jax.devices()[:1])
    made = [list(each.sampler.tokens(each.params, [5, 6, 7], **greedy)) for each in (loaded, again)]
    assert made[0] == made[1]


def test_a_resumed_second_stage_is_that_of_one_attempt(adapter, tmp_path):
    for steps in (2, 4):
        assert train(tmp_path / "twice", adapter / "ours", train__steps=steps, optimizer__schedule="constant") == 0
    assert train(tmp_path / "once", adapter / "ours", optimizer__schedule="constant") == 0
    once, twice = runs.tensors(tmp_path / "once"), runs.tensors(tmp_path / "twice")
    assert once.keys() == twice.keys() and all(np.array_equal(once[name], twice[name]) for name in once)


def test_what_cannot_be_trained_further(adapter, tmp_path, capsys):
    """Other settings, another base, a base that is none, and all weights. The message's own settings then work."""
    ours, workdir = adapter / "ours", tmp_path / "run"
    none = {"lora__rank": 0, "lora__targets": "", "lora__rslora": "false"}  # without a rank these are refused before that
    for settings in ({"lora__rank": 2}, {"lora__alpha": 7.0}, {"lora__targets": "wq"}, none):
        capsys.readouterr()
        assert train(workdir, ours, **settings) == 2, settings
        said = capsys.readouterr().err
        assert "lora.rank=4" in said and "lora.alpha=6, lora.rslora=true" in said and "lora.targets=wq,wv,down" in said
    fix = {"lora__rank": 4, "lora__alpha": 6, "lora__rslora": "true", "lora__targets": "wq,wv,down"}
    assert train(tmp_path / "fixed", adapter / "base", init__from=ours, train__steps=1, **fix) == 0
    assert train(workdir, f"{ours},lora=8") == 2
    before = runs.tree(ours)
    assert train(ours, ours) == 2 and runs.tree(ours) == before, "an import is no run to resume"
    other = hugging_face.write(tmp_path / "other", "llama", scale=0.31, vocab=264)
    for base, code in ((ours, 2), (tmp_path / "none", 2)):
        assert train(workdir, ours, init__base=base) == code
    assert train(workdir, adapter / "base", init__base=other, lora__rank=2) == 2, "a base has no base"
    assert train(workdir, adapter / "base", init__base=other) == 2, "no adapters at all"
    assert not workdir.exists()
    assert train(workdir, ours, init__base=other) == 1
    assert not (workdir / "checkpoints").exists()
