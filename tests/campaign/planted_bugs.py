"""Plant one-line bugs, one at a time, and check that the tests find each.

    python tests/campaign/planted_bugs.py              try all; print a line each, and the share that tests found
    python tests/campaign/planted_bugs.py clip digest  try those whose names contain a given word

Each bug is planted in a copy of the repository, and the tests in `Bug.tests` run in this copy. If they pass, a test is missing:
write one that fails. To add a bug, append it to the file of its part in bugs/. The campaign tries every bug
(test_planted_bugs.py).
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bugs import Bug, all_bugs

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("jaxtrain", "tests", "configs", "recipes", "docs", "benchmarks", "requirements")
FILES = ("pyproject.toml", "README.md", "run.sh", ".python-version")
LIMIT_S = 600


def copy_repository(root: Path) -> None:
    """Copy all files that the tests of a bug read into the folder `root`."""
    for name in (*FOLDERS, *FILES):
        source = REPO / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, root / name)


def plant(bug: Bug, root: Path) -> str:
    """Write a bug into the copy `root` of the repository, and return the file's previous text.

    Raises ValueError if `bug.text` does not occur exactly once in the file.
    """
    file = root / bug.file
    before = file.read_text()
    if (count := before.count(bug.text)) != 1:
        raise ValueError(f"{bug.name}: {bug.text!r} occurs {count} times in {bug.file}, and must occur once")
    file.write_text(before.replace(bug.text, bug.instead))
    return before


def is_noticed(bug: Bug, root: Path) -> bool:
    """Return whether the tests of a bug fail while it is planted in the copy `root`.

    Raises RuntimeError if no test ran, or if the tests do not end within LIMIT_S.
    """
    before = plant(bug, root)
    try:
        words = [f"tests/{word}" if word.startswith(("unit/", "proofs/", "gpu/")) else word for word in shlex.split(bug.tests)]
        command = [sys.executable, "-m", "pytest", "-n0", "-x", "-q", *words]
        environ = os.environ | {"PYTHONPATH": str(root), "JAXTRAIN_TEST_LEDGER": str(root / "ledger")}
        done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{bug.name}: its tests did not end in {LIMIT_S} s") from None
    finally:
        (root / bug.file).write_text(before)
    # A Python without pytest exits with 1 too, although no test ran.
    if done.returncode not in (0, 1) or (done.returncode == 1 and "FAILED" not in done.stdout):
        raise RuntimeError(f"{bug.name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main(words: list[str]) -> int:
    """Try the bugs whose names contain one of `words`, or all bugs without words. Return 0 if tests find each, else 1."""
    chosen = [bug for bug in all_bugs() if not words or any(word in bug.name for word in words)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        for bug in chosen:
            began = time.monotonic()
            found.append(is_noticed(bug, Path(folder)))
            verdict = "noticed" if found[-1] else "SURVIVED"
            print(f"{verdict:8}  {time.monotonic() - began:5.0f} s  {bug.name} ({bug.tests})", flush=True)
    print(f"{sum(found)} of {len(found)} noticed")
    return 0 if found and all(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
