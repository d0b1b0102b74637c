"""Models compared with transformers, torch and PEFT themselves, and runs that start from a Hugging Face folder."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import helpers
import hugging_face
import jax
import numpy as np
import packages
import pytest
from hugging_face import EXPERTS, FAMILIES, GOLDEN, SAME, TOKENS, exported, imported, tensors_of

from jaxtrain import main
from jaxtrain.checkpoint import CheckpointError
from jaxtrain.commands import hf as command
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.hf.folder import open_folder
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.model import logits_function
from jaxtrain.models import family
from jaxtrain.step.batch import place_batch
from jaxtrain.train import generation
from jaxtrain.train.initial_state import Start, initial_state

ROOT = Path(__file__).resolve().parents[2]
SEGMENTS = np.ones_like(TOKENS)


def test_transformers_computes_the_same_before_and_after(tmp_path):
    """For every family, transformers' logits of a folder and of its export after an import are equal, bit for bit."""
    packages.reference()
    pairs = []
    for name in FAMILIES:
        folder, ours, _ = imported(tmp_path / name, name)
        exported(ours, tmp_path / name / "back")
        pairs += [folder, tmp_path / name / "back"]
    np.save(tmp_path / "tokens.npy", TOKENS)
    hugging_face.ask(ROOT / "tests" / "reference" / "logits.py", tmp_path / "tokens.npy", *pairs)
    for name in FAMILIES:
        theirs, ours = (np.load(tmp_path / name / x / "logits.npy") for x in ("theirs", "back"))
        assert np.array_equal(theirs, ours), name
        # Another torch version may sum in another order.
        assert np.abs(theirs - GOLDEN[name]).max() < 1e-5, name


@pytest.mark.long
def test_check_of_a_checkpoint_that_transformers_saved(tmp_path, monkeypatch):
    """`check` passes for a checkpoint of transformers against its import, and against the export of the import."""
    monkeypatch.setenv("JAXTRAIN_REFERENCE_PYTHON", packages.reference())
    for name in ("gpt_oss", "deepseek_v3"):
        reference, place = ROOT / "tests" / "reference", tmp_path / name
        hugging_face.ask(reference / "fresh_models.py", reference / "golden" / f"{name}.5.json", place / "theirs")
        assert command.main(["import", str(place / "theirs"), f"--out={place / 'ours'}"]) == 0
        exported(place / "ours", place / "back")
        for ours, theirs in (("ours", "theirs"), ("theirs", "back")):
            assert command.main(["check", str(place / ours), str(place / theirs), f"--tolerance={SAME}"]) == 0
        other = hugging_face.write(place / "other", name)
        assert command.main(["check", str(place / "ours"), str(other), f"--tolerance={SAME}"]) == 1


def test_a_format_from_outside_the_package(tmp_path, monkeypatch):
    """transformers computes the logits of a family of one's own from its export, and not those of other weights."""
    monkeypatch.setenv("JAXTRAIN_REFERENCE_PYTHON", packages.reference())
    folder = hugging_face.write(tmp_path / "theirs", "llama")
    named = "jaxtrain_family=own_families:like_llama"
    assert command.main(["import", str(folder), f"--out={tmp_path / 'ours'}", "--set", named]) == 0
    exported(tmp_path / "ours", tmp_path / "back")
    for ours, theirs in (("ours", "back"), ("back", "theirs"), ("theirs", "back")):
        assert command.main(["check", str(tmp_path / ours), str(tmp_path / theirs), f"--tolerance={SAME}"]) == 0
    other = hugging_face.write(tmp_path / "other", "llama", scale=2.0)
    assert command.main(["check", str(tmp_path / "back"), str(other), f"--tolerance={SAME}"]) == 1


def test_servers_open_every_family(tmp_path):
    """transformers' Auto classes, with which vLLM opens models, open each export, with jaxtrain's tokens and greedy text."""
    packages.reference()
    tokenizer, text = ByteTokenizer(), "def f(x):"
    for name in FAMILIES:
        _, ours, _ = imported(tmp_path / name, name, vocab=264)
        exported(ours, tmp_path / name / "served", tokenizer="byte")
    folders = {name: tmp_path / name / "served" for name in FAMILIES}
    lines = hugging_face.ask(ROOT / "tests" / "reference" / "auto_classes.py", text, *folders.values()).splitlines()
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    for (name, folder), found in zip(folders.items(), answers, strict=True):
        architecture = family(open_folder(folder).model.family).FORMAT.architecture
        assert found["architectures"] == [architecture] and found["class"] == architecture, name
        assert (found["dtype"], found["unexpected"]) == ("torch.float32", []), name
        assert (found["ids"], found["decoded"], found["eos"]) == (tokenizer.encode(text), text, tokenizer.eot), name
        assert found["chat"] == f"### user\n{text}\n\n### assistant\n", name
        if name in ("gemma3", "deepseek_v3"):
            run, sampler, params, _, _ = generation.load_model(str(tmp_path / name / "ours"), jax.devices()[:1])
            greedy = {"max_tokens": len(found["made"]), "temperature": 0.0, "top_p": 1.0, "seed": 0}
            assert run.precision == "f32" and list(sampler.tokens(params, found["ids"], **greedy)) == found["made"], name


# ---- Training from an imported model


def test_thirty_steps_follow_torch(tmp_path):
    """From two imported models, jaxtrain's losses with AdamW follow transformers' with torch.optim.AdamW within 1e-4."""
    for name in ("gemma2", "gpt_oss"):
        folder = hugging_face.write(tmp_path / name, name, scale=0.3)
        shape = {f"model.{k}": v for k, v in dataclasses.asdict(open_folder(folder).model).items()}
        how = {"data.seq_len": 32, "train.global_batch": 4, "mesh.fsdp": 2}
        how |= {"optimizer.lr": 1e-3, "optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
        how |= {"optimizer.weight_decay": 0.1, "train.steps": 30, "data.packing": "none"}
        how |= {"moe.balance_loss": 0.0, "moe.z_loss": 0.0}  # transformers adds its own losses only if asked
        run = helpers.tiny(shape | how | {"init.from": str(folder)})
        made, step = helpers.program(run), helpers.train_step(run)
        state, _ = initial_state(made, Start(0, False, False, 0, (), {}), None, lambda line: None)
        losses = []
        for i in range(30):
            rows = hugging_face.random_tokens(128, (4, 33), seed=100 + i % 3)
            ones = np.ones((4, 32), np.int32)
            batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "segments": ones, "weights": ones.astype(np.float32)}
            batch["positions"] = np.broadcast_to(np.arange(32, dtype=np.int32), (4, 32)).copy()
            state, values = step(state, place_batch(batch, made.batch, made.context))
            losses.append(float(values["loss"]))
        wanted = GOLDEN[f"{name}_adamw"]
        assert wanted[-1] < wanted[0] - 0.3  # the loss falls
        assert np.abs(np.array(losses) / wanted - 1).max() < 1e-4, name


def test_import_and_export_stream(tmp_path):
    """Peak memory of an import onto 8 devices, with the arrays, is below 1.3 times the checkpoint's size.

    The peak memory of an export, to files of a quarter of the checkpoint's size, is below the checkpoint's size. The checkpoint
    is so large that the programs of the digests (some 80 MB) and Orbax (50 MB) are small beside it.
    """
    args = [sys.executable, "-m", "benchmarks.import_memory", "--gigabytes=0.8", "--shard-size=200MB", f"--folder={tmp_path}"]
    ended = subprocess.run(args, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["devices"] == 8 and report["import"]["peak_over_size"] < 1.3, report
    assert report["export"]["peak_over_size"] < 1, report


def test_a_run_starts_from_a_folder_and_stretches_its_context(tmp_path):
    """rope_scaling=llama3 is for sequences sixteen times as long as the folder's. Settings that do not fit it are refused."""
    folder = hugging_face.write(tmp_path / "theirs", "llama2", scale=0.3, vocab=264)
    model = {k: v for k, v in dataclasses.asdict(open_folder(folder).model).items() if v not in ("", 0, 0.0)}
    model |= {"rope_scaling": "llama3", "rope_factor": 16.0, "rope_original_len": 64}
    keys = {f"model.{k}": v for k, v in model.items()}
    keys |= {"data.source": "synthetic", "data.seq_len": 1024, "train.global_batch": 8, "train.steps": 2}
    keys |= {"optimizer.warmup_steps": 1, "eval.every_steps": 0, "sample.max_tokens": 0, "init.from": folder, "paths.cache": ""}
    args = [f"--config={ROOT / 'configs' / 'tiny.py'}", f"--workdir={tmp_path / 'run'}"]
    args += [f"--config.{k}={v}" for k, v in keys.items()]
    assert main.main(args) == 0
    shutil.rmtree(tmp_path / "run")
    for wrong in ("model.d_ff=64", "model.family=gemma2", "init.what=weights+optimizer"):
        assert main.main([*args, f"--config.{wrong}"]) == 2


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "phi3", "glm"])
def test_adapters_go_to_peft_and_come_back(tmp_path, name):
    """The merged export of a LoRA run equals PEFT's merge, and is unchanged if the PEFT files are imported again."""
    folder = hugging_face.write(tmp_path / "theirs", name, scale=0.3, vocab=264)
    config_file = ROOT / "configs" / "finetune.py"
    keys = {"data.source": "synthetic", "data.seq_len": 64, "train.global_batch": 8, "train.steps": 4, "paths.cache": ""}
    keys |= {"optimizer.lr": 0.02, "optimizer.warmup_steps": 1, "eval.every_steps": 0, "sample.max_tokens": 0, "mesh.fsdp": 8}
    keys |= {"lora.targets": "wq,wk,wv,wo"} if name in EXPERTS else {}
    args = [f"--config={config_file}:base={folder},lora=3", f"--workdir={tmp_path / 'run'}"]
    assert main.main([*args, *(f"--config.{k}={v}" for k, v in keys.items())]) == 0
    exported(tmp_path / "run", tmp_path / "merged")
    assert command.main(["export-adapter", str(tmp_path / "run"), f"--out={tmp_path / 'adapter'}"]) == 0
    args = ["import-adapter", str(tmp_path / "adapter"), f"--base={folder}", f"--out={tmp_path / 'again'}"]
    assert command.main(args) == 0
    exported(tmp_path / "again", tmp_path / "merged-again")
    base, merged, again = (tensors_of(p) for p in (folder, tmp_path / "merged", tmp_path / "merged-again"))
    assert merged.keys() == base.keys() and all(np.array_equal(merged[k], again[k]) for k in merged)
    changed = {k for k in base if not np.array_equal(base[k], merged[k])}
    assert changed == {k for k in base if "_proj.weight" in k}
    other = hugging_face.write(tmp_path / "other", name, scale=0.31, vocab=264)
    with pytest.raises(CheckpointError, match="step 4"):
        exported(tmp_path / "run", tmp_path / "none", base=str(other))

    packages.reference()
    np.save(tmp_path / "tokens.npy", TOKENS)
    script = ROOT / "tests" / "reference" / "peft_logits.py"
    hugging_face.ask(script, tmp_path / "tokens.npy", folder, tmp_path / "adapter", tmp_path / "peft.npz")
    theirs = np.load(tmp_path / "peft.npz")
    for weight in changed:
        # Both sum in float32, and may differ in the last bit of a sum of three products.
        np.testing.assert_allclose(merged[weight], theirs[f"weight.{weight}"], rtol=0, atol=3e-7)
    logits = logits_function(open_origin(str(tmp_path / "merged")))
    beside = logits_function(open_origin(str(tmp_path / "run")))(TOKENS, SEGMENTS)
    assert np.abs(logits(TOKENS, SEGMENTS) - theirs["merged"]).max() < SAME
    assert np.abs(beside - theirs["logits"]).max() < SAME
    args = [str(tmp_path / "run"), str(tmp_path / "merged"), f"--python={packages.reference()}"]
    assert command.main(["check", *args, f"--base={folder}"]) == 0


def test_check_without_transformers_is_refused(tmp_path):
    folder = hugging_face.write(tmp_path / "a", "llama2")
    assert command.main(["check", str(folder), str(folder), f"--python={sys.executable}"]) == 2
