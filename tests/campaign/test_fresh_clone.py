"""The newcomer's way: clone the last commit, set it up in an empty home, train. Needs git and a package index."""

import subprocess

import runs


def test_a_fresh_clone_trains():
    short = ["--config.train.steps=4", "--config.optimizer.warmup_steps=1", "--config.sample.max_tokens=4"]
    command = ["bash", str(runs.REPO / "tests" / "campaign" / "fresh_clone.sh"), *short]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "step 4" in " ".join(done.stdout.split()), done.stdout[-4000:]
