"""Runs of a model with gated delta nets: they train, resume bit for bit, write samples and are planned.

proofs/test_delta_net.py tests their arithmetic and layouts.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
from compile_options import QUICKLY

SHORT = {
    "data.source": "synthetic",
    "data.eval_source": "",
    "eval.every_steps": 0,
    "data.seq_len": 32,
    "train.global_batch": 8,
    "model.family": "qwen3_5",
    "model.num_layers": 4,
    "model.d_model": 32,
    "model.d_ff": 48,
    "model.attention_pattern": "dg",
    "model.attention_gate": True,
    "model.qk_norm": True,
    "model.linear_key_heads": 2,
    "model.linear_value_heads": 4,
    "model.linear_key_dim": 8,
    "model.linear_value_dim": 8,
    "model.linear_conv": 4,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 1,
    "checkpoint.every_steps": 2,
    "checkpoint.keep": 10,
    "log.every_steps": 1,
}


def run(*words: str, devices: int = 1) -> tuple[int, str]:
    """Run a command of jaxtrain. Returns the exit code and the output."""
    environ = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICKLY}"}
    command = [sys.executable, "-m", "jaxtrain", *words]
    done = subprocess.run(command, cwd=runs.REPO, env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def train(workdir: Path, steps: int, devices: int = 1, **more: str) -> None:
    keys = SHORT | {"train.steps": str(steps)} | {key.replace("__", "."): value for key, value in more.items()}
    overrides = [f"--config.{key}={value}" for key, value in keys.items()]
    code, said = run("main", "--config=configs/tiny.py", f"--workdir={workdir}", *overrides, devices=devices)
    assert code == 0, said


@pytest.mark.long
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path):
    """With fsdp=2 and tensor=2, a resumed run equals one without a stop. Its checkpoint also resumes on stages, and samples."""
    mesh = {"mesh__fsdp": "2", "mesh__tensor": "2"}
    for workdir, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        train(tmp_path / workdir, steps, 4, **mesh)
    assert runs.exact(tmp_path / "whole") == runs.exact(tmp_path / "parts")
    whole, parts = (runs.tensors(tmp_path / name, 4) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and "params.layers.2.delta.log_rate" in whole
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)
    train(tmp_path / "parts", 6, 2, mesh__stage="2", mesh__fsdp="1", train__grad_accum="2")
    assert all(np.isfinite(loss) for loss in runs.losses(tmp_path / "parts").values())
    code, said = run("sample", f"--workdir={tmp_path / 'parts'}", "--prompt=def ", "--max-tokens=8", "--temperature=0")
    assert code == 0, said


def test_a_hybrid_is_planned():
    words = [f"--config.{key}={value}" for key, value in (SHORT | {"data.seq_len": 256, "train.steps": 9}).items()]
    code, said = run("plan", "--config=configs/tiny.py", "--topology=h200:1", *words)
    assert code == 0, said
