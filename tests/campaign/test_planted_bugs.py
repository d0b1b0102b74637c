"""The script of the planted bugs tells bugs that tests notice from bugs that survive, and from bugs whose tests are skipped."""

import subprocess
import sys
from pathlib import Path

import runs

MADE = """
import pytest
from jaxtrain.config.numbers import plural


def test_plural():
    assert plural(2, "GPU") == "2 GPUs"


@pytest.mark.skip
def test_nothing():
    pass
"""
# The first two lines have one length, and are planted within a second: the bytecode of the first fits the second.
TRIED = """
import sys
from pathlib import Path
import planted_bugs
from bugs import Bug

root = Path(sys.argv[1])
planted_bugs.import_packages()
planted_bugs.copy_repository(root)
(root / "tests" / "unit" / "test_made.py").write_text(sys.argv[2])
changes = ("'{noun}s'", "'{noun}z'", "plural"), ("`8 GPUs`", "`8 GPUz`", "plural"), ("`1 GPU`", "`9 GPU`", "nothing")
for text, instead, name in changes:
    bug = Bug("made", "jaxtrain/config/numbers.py", text, instead, f"unit/test_made.py -k {name}")
    print(planted_bugs.verdict_on(bug, root))
"""


def test_a_bug_that_survives_is_told(tmp_path: Path):
    path = f"import sys; sys.path[:0] = ['{runs.REPO}/tests/campaign', '{runs.REPO}/tests']\n"
    line = [sys.executable, "-c", path + TRIED, str(tmp_path), MADE]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=runs.REPO)
    assert done.stdout.split() == ["noticed", "SURVIVED", "skipped"]
