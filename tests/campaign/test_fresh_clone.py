"""A new user's steps: clone the last commit, set it up in an empty home, train. Needs git and a package index."""

import os
import subprocess

import pytest
import runs

pytestmark = pytest.mark.long


def fresh_clone(*words: str, **env: str) -> str:
    """Run fresh_clone.sh with these arguments of run.sh, and return the output."""
    command = ["bash", str(runs.REPO / "tests" / "campaign" / "fresh_clone.sh"), *words]
    environ = os.environ | env
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=2700)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_a_fresh_clone_trains():
    said = fresh_clone("--config.train.steps=4", "--config.optimizer.warmup_steps=1", "--config.sample.max_tokens=4")
    assert "step 4" in " ".join(said.split()), said[-4000:]


def test_the_second_jax():
    """With the second jax that run.sh can install (JAXTRAIN_JAX), tests of attention, checkpoints, parity and plans pass."""
    unit = ("attention", "assignment", "compiler", "hlo", "sharding")
    proofs = ("checkpoint_arrays", "parity_command", "plan_programs")
    files = [*(f"unit/test_{name}.py" for name in unit), *(f"proofs/test_{name}.py" for name in proofs)]
    fresh_clone("test", *(f"tests/{name}" for name in files), JAXTRAIN_JAX="0.12")
