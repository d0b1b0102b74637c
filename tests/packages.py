"""Packages and interpreters that only a few tests of the campaign need, installed by their set-up where that is wanted."""

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
WANTED = os.environ.get("JAXTRAIN_TEST_SETUP") == "1"


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Hold a lock between processes: two workers may ask for the same packages."""
    (REPO / ".uv").mkdir(exist_ok=True)
    with open(REPO / ".uv" / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def folder_with(module: str, requirements: str) -> str:
    """Return a folder for PYTHONPATH in which `module` can be imported; "" where this environment has it.

    requirements: the name of the file in requirements/ that is installed there. Skips the test where that is not wanted.
    """
    if importlib.util.find_spec(module):
        return ""
    if not WANTED:
        pytest.skip(f"needs {module}: JAXTRAIN_TEST_SETUP=1 lets tests install requirements/{requirements}.txt for themselves")
    folder = REPO / ".uv" / f"tests-{requirements}"
    with one_at_a_time(folder.name):
        if not (folder / ".installed").exists():
            uv = shutil.which("uv") or str(REPO / ".uv" / "venv" / "bin" / "uv")
            command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", str(folder)]
            file = REPO / "requirements" / f"{requirements}.txt"
            subprocess.run([*command, "--require-hashes", "--no-deps", "--requirement", str(file)], check=True)
            (folder / ".installed").touch()
    return str(folder)


def reference() -> str:
    """Return the Python that has transformers, PEFT and TRL. Skips the test where there is none and none is to be installed."""
    if python := os.environ.get("JAXTRAIN_REFERENCE_PYTHON"):
        return python
    folder = REPO / ".reference"
    if not (folder / ".installed").exists():  # its Python is there minutes before its packages are
        if not WANTED:
            pytest.skip("needs transformers: tests/reference/setup.sh installs it, or JAXTRAIN_REFERENCE_PYTHON names a Python")
        with one_at_a_time("reference"):
            subprocess.run(["bash", str(REPO / "tests" / "reference" / "setup.sh")], check=True)
    return str(folder / "bin" / "python")
