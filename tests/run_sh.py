"""Run run.sh with fakes of the programs that it calls: uv, nvidia-smi, and the Python of the environment."""

import glob
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PATH = "/usr/bin:/bin"
HUNG_S = 120  # time after which a child counts as hung; a passing test never takes that long
# No fake hides the device file of a real GPU.
HAS_GPU = bool(glob.glob("/dev/nvidia[0-9]*"))

PYTHON = """#!/bin/bash
if [[ $1 == -c ]]; then echo 3.12; exit 0; fi
printf 'python'
printf ' <%s>' "$@"
printf '\\ncwd %s\\npath %s\\nprefix %s\\n' "$PWD" "${PYTHONPATH-}" "${JAXTRAIN_COMMAND_PREFIX-}"
exit "${FAKE_EXIT:-0}"
"""
NVIDIA_SMI = """#!/bin/bash
[[ -n ${FAKE_GPU-} ]] || exit 9
echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'
"""
UV = """#!/bin/bash
if [[ $1 == --version ]]; then echo 'uv 9'; exit 0; fi
echo "$*" >>"$HOME/uv"
case "$1 $2" in
  'python find') echo /fake/python3.12 ;;
  venv*) mkdir -p .venv/bin && cp "$(dirname "$0")/venv-python" .venv/bin/python ;;
  'pip sync') exit "${FAKE_SYNC_EXIT:-0}" ;;
esac
"""


def script(path: Path, text: str) -> None:
    """Write an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def wait_for(condition: Callable[[], bool], hung_s: float = HUNG_S) -> None:
    """Wait until `condition()` is true. Fails after `hung_s`, when a child must have hung."""
    limit = time.monotonic() + hung_s
    while not condition():
        assert time.monotonic() < limit, "it never came to that"
        time.sleep(0.01)


def copy_launcher(repo: Path) -> Path:
    """Copy run.sh and the files that it reads into the folder `repo`."""
    (repo / "jaxtrain" / "config").mkdir(parents=True)
    (repo / "notebooks").mkdir()
    for name in ("run.sh", ".python-version", "jaxtrain/config/commands.txt", "jaxtrain/config/commands.py"):
        shutil.copy(REPO / name, repo / name)
    shutil.copytree(REPO / "requirements", repo / "requirements")
    return repo


class Machine:
    """A home, and a PATH with fake programs before the system's. `python`: the fake that an installation puts into .venv.

    With the variable FAKE_GPU, it has a GPU.
    """

    def __init__(self, repo: Path, folder: Path, python: str = PYTHON):
        self.repo, self.bin, self.cwd = repo, folder / "bin", folder / "elsewhere"
        self.cwd.mkdir()
        script(self.bin / "uv", UV)
        script(self.bin / "venv-python", python)
        script(self.bin / "nvidia-smi", NVIDIA_SMI)

    @property
    def environ(self) -> dict[str, str]:
        return {"PATH": f"{self.bin}:{PATH}", "HOME": str(self.cwd), "JAXTRAIN_RESTART_WAIT": "0"}

    def run(self, *args: str, launcher: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run run.sh with these arguments to its end."""
        return subprocess.run(
            ["bash", str(launcher or self.repo / "run.sh"), *args],
            env=self.environ | env,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HUNG_S,
        )

    def calls(self) -> list[str]:
        """Return the arguments of each call of uv since this method was last called."""
        log = self.cwd / "uv"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def installed(self) -> list[str]:
        """Return the requirement files that uv installed since `calls` was last called."""
        found = [line for line in self.calls() if line.startswith("pip sync")]
        assert len(found) <= 1 and all("--require-hashes" in line for line in found)
        return re.findall(r"requirements/([\w.-]+)\.txt", found[0]) if found else []


def git(folder: Path, *args: str) -> str:
    """Run git in a folder, with an author set."""
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    done = subprocess.run(["git", "-C", str(folder), *args], env=os.environ | names, check=True, capture_output=True, text=True)
    return done.stdout.strip()
