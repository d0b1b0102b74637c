"""Runs with a base in fewer bits: resume by processes, and their adapters in PEFT and transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hugging_face
import numpy as np
import packages
import pytest
from hugging_face import TOKENS, exported, tensors_of

from jaxtrain import main
from jaxtrain.commands import hf as command
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.model import logits_function

ROOT = Path(__file__).resolve().parents[2]
SEGMENTS = np.ones_like(TOKENS)
SAME = 2e-4
FORMATS = {
    "nf4": ("llama", {"intermediate_size": 128, "head_dim": 16}),
    "fp8": ("qwen2", {}),
    "mxfp4": ("gpt_oss", {"intermediate_size": 128}),
}
KEYS = {"data.source": "synthetic", "data.seq_len": 64, "train.global_batch": 8, "optimizer.schedule": "constant"}
KEYS |= {"optimizer.lr": 0.02, "optimizer.warmup_steps": 1, "eval.every_steps": 0, "sample.max_tokens": 0, "paths.cache": ""}
KEYS |= {"mesh.fsdp": 4, "mesh.tensor": 2}


def arguments(base, workdir, form, **more):
    keys = KEYS | {"lora.base": form} | {name.replace("__", "."): value for name, value in more.items()}
    named = [f"--config={ROOT / 'configs' / 'finetune.py'}:base={base},lora=3", f"--workdir={workdir}"]
    return [*named, *(f"--config.{k}={v}" for k, v in keys.items())]


@pytest.mark.parametrize("form", FORMATS)
def test_peft_and_transformers_compute_the_same(tmp_path, form):
    """The adapters beside the decoded weights, and both merged, have the logits of the run."""
    name, sizes = FORMATS[form]
    folder, run = hugging_face.write(tmp_path / "theirs", name, scale=0.3, vocab=264, sizes=sizes), tmp_path / "run"
    assert command.main(["import", str(folder), f"--out={tmp_path / 'bits'}", f"--dtype={form}"]) == 0
    exported(tmp_path / "bits", tmp_path / "decoded")
    assert main.main(arguments(tmp_path / "bits", run, form, train__steps=4)) == 0
    assert command.main(["export-adapter", str(run), f"--out={tmp_path / 'adapter'}", f"--base={tmp_path / 'decoded'}"]) == 0
    exported(run, tmp_path / "merged")
    base, decoded, merged = (tensors_of(tmp_path / place) for place in ("theirs", "decoded", "merged"))
    assert decoded.keys() == merged.keys()
    assert any(not np.array_equal(decoded[k], base[k]) for k in base.keys() & decoded.keys())

    packages.reference()
    np.save(tmp_path / "tokens.npy", TOKENS)
    reference = ROOT / "tests" / "reference"
    hugging_face.ask(
        reference / "peft_logits.py", tmp_path / "tokens.npy", tmp_path / "decoded", tmp_path / "adapter", tmp_path / "peft.npz"
    )
    hugging_face.ask(reference / "logits.py", tmp_path / "tokens.npy", tmp_path / "merged")
    theirs = np.load(tmp_path / "peft.npz")
    ours = logits_function(open_origin(str(run)))(TOKENS, SEGMENTS)
    assert np.abs(ours - theirs["logits"]).max() < SAME
    assert np.abs(ours - np.load(tmp_path / "merged" / "logits.npy")).max() < SAME
    assert np.abs(ours - logits_function(open_origin(str(tmp_path / "decoded")))(TOKENS, SEGMENTS)).max() > 10 * SAME
    if form == "nf4":
        assert command.main(["check", str(run), str(tmp_path / "merged"), f"--python={packages.reference()}"]) == 0


def test_a_resumed_process_has_the_bits_of_an_unbroken_one(tmp_path):
    """Of a folder that is encoded at each start, and of its import in bits, on which the other run resumes."""
    folder = hugging_face.write(tmp_path / "theirs", "llama", scale=0.3, vocab=264, sizes=FORMATS["nf4"][1])
    assert command.main(["import", str(folder), f"--out={tmp_path / 'bits'}", "--dtype=nf4"]) == 0

    def train(workdir, steps, **more):
        args = arguments(folder, tmp_path / workdir, "nf4", train__steps=steps, checkpoint__every_steps=3, **more)
        env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
        ended = subprocess.run(
            [sys.executable, "-m", "jaxtrain.main", *args], capture_output=True, text=True, env=env, cwd=ROOT
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads((tmp_path / workdir / "checkpoints" / str(steps) / "meta.json").read_text())

    unbroken = train("unbroken", 6)
    train("broken", 3)
    again = train("broken", 6, init__base=tmp_path / "bits")
    assert again["tensors"] == unbroken["tensors"] and again["base"]["digest"] == unbroken["base"]["digest"]
    other = hugging_face.write(tmp_path / "other", "llama", scale=0.31, vocab=264, sizes=FORMATS["nf4"][1])
    assert main.main(arguments(folder, tmp_path / "broken", "nf4", train__steps=7, init__base=other)) == 1
