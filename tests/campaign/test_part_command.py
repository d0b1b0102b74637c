"""`--part` runs the contract tests of a user's own model, loss, optimizer or data source, and nothing else."""

import os
import subprocess
import sys

import runs


def test_part_takes_only_what_is_of_its_kind():
    env = os.environ | {"PYTHONPATH": f"{runs.REPO}:{runs.REPO / 'tests'}"}
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--part=data.source=broken_parts:Shifted"]
    done = subprocess.run(
        [*line, "--part-config=data.seq_len=32", "--tb=line"], cwd=runs.REPO, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1 and "1 failed, 3 passed" in done.stdout
