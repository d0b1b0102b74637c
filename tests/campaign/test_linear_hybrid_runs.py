"""The recipe linear_hybrid, as a user runs it: its runs train and resume bit for bit, and a plan of it fits.

proofs/test_linear_hybrid.py tests the recipe's arithmetic and layouts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import runs
from compile_options import QUICKLY

CONFIG = "recipes/linear_hybrid/hybrid.py"
SHORT = {
    "data.source": "synthetic",
    "data.eval_source": "",
    "eval.every_steps": 0,
    "data.seq_len": 32,
    "train.global_batch": 8,
    "model.d_model": 32,
    "model.d_ff": 48,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 1,
    "checkpoint.every_steps": 2,
    "checkpoint.keep": 10,
    "log.every_steps": 1,
}


def run(module: str, *words: str, devices: int = 1) -> tuple[int, str]:
    """Run a command of jaxtrain with the recipe on PYTHONPATH. Returns the exit code and the output."""
    environ = os.environ | {
        "PYTHONPATH": f"{runs.REPO}:{runs.REPO / 'recipes'}",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICKLY}",
    }
    done = subprocess.run(
        [sys.executable, "-m", f"jaxtrain.{module}", *words], cwd=runs.REPO, env=environ, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def train(workdir: Path, steps: int, devices: int = 1, variant: str = "", **more: str) -> tuple[int, str]:
    keys = SHORT | {"train.steps": str(steps)} | {key.replace("__", "."): value for key, value in more.items()}
    overrides = [f"--config.{key}={value}" for key, value in keys.items()]
    return run("main", f"--config={CONFIG}{variant}", f"--workdir={workdir}", *overrides, devices=devices)


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path):
    """With fsdp=2 and tensor=2, a resumed run equals one without a stop. Its checkpoint also resumes on one device."""
    mesh = {"mesh__fsdp": "2", "mesh__tensor": "2"}
    for workdir, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        code, said = train(tmp_path / workdir, steps, 4, **mesh)
        assert code == 0, said
    assert "resuming from step 2" in said
    assert runs.exact(tmp_path / "whole") == runs.exact(tmp_path / "parts")
    whole, parts = (runs.tensors(tmp_path / name, 4) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and "params.layers.0.linear_2.attention.log_rate" in whole
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)
    # One device resumes from the checkpoint of four, and takes the same steps.
    code, said = train(tmp_path / "parts", 6)
    assert code == 0 and "resuming from step 4" in said, said
    assert all(np.isfinite(loss) for loss in runs.losses(tmp_path / "parts").values())
    own = [name for name in runs.receipt(tmp_path / "whole")["source"]["files"] if name.startswith("recipes/")]
    assert own == ["recipes/linear_hybrid/gated_delta_net.py"], "a receipt names the files of the user's own model"


def test_options_that_it_does_not_know_are_refused(tmp_path):
    """A setting that the recipe does not support gives exit code 2, and nothing is written."""
    found = {
        "variant": train(tmp_path / "run", 2, variant=":2b"),
        "family": train(tmp_path / "run", 2, model__family="linear_hybrid.gated_delta_net:huge"),
        "layers": train(tmp_path / "run", 2, model__num_layers="6"),
        "context": train(tmp_path / "run", 2, 2, mesh__seq="2", mesh__fsdp="1"),
        "samples": train(tmp_path / "run", 2, sample__max_tokens="8", data__source="stdlib"),
    }
    words = {
        "variant": "no such variant",
        "family": "defines no huge",
        "layers": "model.num_layers = 6: is no multiple of 4",
        "context": "Set parallel.context=ulysses, or mesh.seq=1",
        "samples": "has no decode() and logits()",
    }
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(found, 2), found
    for name, (_, said) in found.items():
        assert words[name] in said and "Traceback" not in said, said
    assert not (tmp_path / "run").exists()


def test_eight_gpus_are_planned(tmp_path):
    """The compiled step fits on 8 H200s, and the plan counts FLOPs by the family's formula."""
    layers = ("--config.model.num_layers=4", "--config.data.seq_len=1024")  # one period
    out = tmp_path / "plan.json"
    code, said = run("plan", f"--config={CONFIG}:1b", "--topology=h200:8", *layers, f"--json={out}")
    assert code == 0, said
    plan = json.loads(out.read_text())
    assert plan["fits"] and plan["mesh"]["fsdp"] == 8 and plan["attention"] == "cudnn"
    D, F, V, T = 2048, 5632, 151_936, 1024
    delta = 2 * D * (2 * 16 * 128 + 3 * 32 * 128 + 2 * 32) + 6 * 32 * 128 * 128
    softmax = 2 * D * 256 * (2 * 16 + 2 * 2) + 2 * 16 * 256 * T
    assert plan["flops"]["per_token_causal"] == 3 * (3 * delta + softmax + 4 * 6 * D * F + 2 * D * V)
    assert 0 < plan["time"]["mfu_causal"] < plan["time"]["hfu"] < 1
    gathered = {c["op_name"] for c in plan["collectives"] if c["kind"] == "all-gather"}
    assert any("attention.wz" in name for name in gathered), gathered


def test_the_contract_of_a_family_holds(tmp_path):
    """With model.norm_eps=0.01, the family passes the contract tests.

    The norm divides a head's output by its length, which at a document's first token is about |q . k|. If this is near 0,
    gradients of wq amplify rounding to 2.6e-5 with the default norm_eps. A larger norm_eps bounds the division.
    """
    keys = ("model.num_layers=4", "model.norm_eps=0.01")
    environ = os.environ | {"PYTHONPATH": f"{runs.REPO}:{runs.REPO / 'recipes'}", "JAXTRAIN_TEST_LEDGER": str(tmp_path)}
    part = ["--part=model.family=linear_hybrid.gated_delta_net:small", *(f"--part-config={key}" for key in keys)]
    words = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *part]
    done = subprocess.run(words, cwd=runs.REPO, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "10 passed, 1 skipped" in done.stdout, done.stdout[-4000:]
