"""cuDNN's workspace sizes for an H200 equal the recorded sizes. Needs the extra `plan-cudnn`, but no GPU."""

import json
import pathlib
import subprocess
import sys

import pytest
from cudnn_answers import ANSWERS, near


def test_the_formula_gives_what_cudnn_answers():
    """cuDNN's sizes equal the recorded sizes, and the formula is near. A child queries cuDNN, which must load before JAX."""
    cases = [case for case, _ in ANSWERS.values()]
    child = [sys.executable, str(pathlib.Path(__file__).parents[1] / "cudnn_workspaces.py")]
    asked = subprocess.run(child, input=json.dumps(cases), text=True, capture_output=True, timeout=400)
    if asked.returncode == 3:
        pytest.skip(f"cuDNN cannot be asked: {asked.stdout.strip()}")
    assert not asked.returncode, asked.stderr
    for (name, (case, recorded)), line in zip(ANSWERS.items(), asked.stdout.splitlines(), strict=True):
        who, said, otherwise, counted = json.loads(line)
        assert (who, otherwise) == ("cudnn 9.23.2", "formula")
        assert said == recorded, name
        assert near(case, said, counted), name
