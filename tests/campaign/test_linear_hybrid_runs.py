"""The recipe linear_hybrid, as a user runs it: its runs train and resume bit for bit.

proofs/test_linear_hybrid.py tests the recipe's arithmetic and layouts.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
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
        [sys.executable, "-m", "jaxtrain", module, *words], cwd=runs.REPO, env=environ, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def train(workdir: Path, steps: int, devices: int = 1, **more: str) -> tuple[int, str]:
    keys = SHORT | {"train.steps": str(steps)} | {key.replace("__", "."): value for key, value in more.items()}
    overrides = [f"--config.{key}={value}" for key, value in keys.items()]
    return run("main", f"--config={CONFIG}", f"--workdir={workdir}", *overrides, devices=devices)


@pytest.mark.long
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path):
    """With fsdp=2 and tensor=2, a resumed run equals one without a stop. Its checkpoint also resumes on one device."""
    mesh = {"mesh__fsdp": "2", "mesh__tensor": "2"}
    for workdir, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        code, said = train(tmp_path / workdir, steps, 4, **mesh)
        assert code == 0, said
    assert "resuming from step 2" in said, "the last run did not begin again"
    assert runs.exact(tmp_path / "whole") == runs.exact(tmp_path / "parts")
    whole, parts = (runs.tensors(tmp_path / name, 4) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and "params.layers.0.linear_2.attention.log_rate" in whole
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)
    # One device resumes from the checkpoint of four, and takes the same steps.
    code, said = train(tmp_path / "parts", 6)
    assert code == 0, said
    assert all(np.isfinite(loss) for loss in runs.losses(tmp_path / "parts").values())
    assert [*runs.receipt(tmp_path / "whole")["code"]["own"]] == ["linear_hybrid.gated_delta_net"], "the user's own model"


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
    assert done.returncode == 0, done.stdout[-4000:]
