"""run.sh with stand-ins for what it calls: uv, nvidia-smi, ssh, the clock, and a Python whose runs end as a file says."""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PATH = "/usr/bin:/bin"
HUNG_S = 120  # ends a child that hangs; no test waits for it
# A machine's own GPU shows as a device, which no stand-in can hide; then the launcher rightly takes CUDA.
HAS_GPU = bool(glob.glob("/dev/nvidia[0-9]*"))

PYTHON = """#!/bin/bash
if [[ $1 == -c ]]; then echo 3.12; exit 0; fi
printf 'python'
printf ' <%s>' "$@"
printf '\\ncwd %s\\npath %s\\n' "$PWD" "${PYTHONPATH-}"
exit "${FAKE_EXIT:-0}"
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
GPUS = """#!/bin/bash
case $1 in
  -L) echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)' ;;
  --query-gpu=name) for i in 0 1 2 3 4 5 6 7; do echo 'NVIDIA H200'; done ;;
esac
"""
# The time stands still, but for the lines `last` of a plan.
DATE = '#!/bin/bash\n[[ $1 == +%s ]] && exec cat "$HOME/clock"\nexec /bin/date "$@"\n'
# Reaches "machines" by a shell here; what it was asked stands in a file.
SSH = """#!/bin/bash
host=${*: -2:1} command=${*: -1}
printf '%s\\n' "$*" >>"$HOME/ssh"
[[ $host != unreachable ]] || exit 255
if [[ $host == bad* ]]; then exit "${host#bad}"; fi
# As over there: nothing of this shell's comes along.
exec env -i PATH="$PATH" HOME="$HOME" JAX_PLATFORMS=cpu ${DEVICES:+JAX_NUM_CPU_DEVICES=$DEVICES} bash -c "$command"
"""
# Lines of a plan: `exit CODE`; `kill NUMBER`, itself; `last SECONDS CODE`, by the clock of the test; `traced CODE`, SIGUSR2
# came; `read CODE`, a line of stdin first; `note CODE`, no further attempt should come; `until CODE [COUNT]`, so many signals
# came that ask to end. One that waits in vain ends with 99.
RUN = f"""#!{sys.executable} -IS
import json, os, signal, sys, time

if sys.argv[1] == "-c":
    sys.exit(print("3.12"))
os.chdir(os.environ["HOME"])
names = "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"
at_birth = {{name: str(signal.getsignal(getattr(signal, name))) for name in (*names, "SIGQUIT", "SIGHUP")}}
asked, traced = [], []

def hear(number, frame):
    with open("signals", "a") as f:
        f.write(signal.Signals(number).name + "\\n")
    (traced if number == signal.SIGUSR2 else asked).append(number)

def wait(found, count):
    limit = time.monotonic() + {HUNG_S}
    while len(found) < count:
        if time.monotonic() > limit:
            sys.exit(99)
        time.sleep(0.01)

for name in names:
    signal.signal(getattr(signal, name), hear)
number = len(open("attempts").readlines()) if os.path.exists("attempts") else 0
action, *rest = open("plan").readlines()[number].split()
facts = dict(pid=os.getpid(), arguments=sys.argv[1:], at_birth=at_birth)
told = "RESTART", "LAUNCHED", "COMMIT", "DIRTY", "HOST_CLASS", "PREFLIGHT"
facts |= {{name.lower(): os.environ.get("JAXTRAIN_" + name) for name in told}}
if all(os.isatty(i) for i in range(3)):
    facts.update(group=os.getpgrp(), foreground=os.tcgetpgrp(0))
if action == "read":
    facts["line"] = sys.stdin.readline()
with open("attempts.new", "w") as f:
    f.write((open("attempts").read() if number else "") + json.dumps(facts) + "\\n")
os.rename("attempts.new", "attempts")
code = rest[0]
if action == "kill":
    if code != "9":
        signal.signal(int(code), signal.SIG_DFL)
    os.kill(os.getpid(), int(code))
if action == "note":
    open(os.environ["JAXTRAIN_NOTE"], "w").write("the time is over\\n")
if action == "traced":
    wait(traced, 1)
if action == "last":
    now, code = int(open("clock").read()), rest[1]
    open("clock", "w").write(str(now + int(rest[0])))
if action == "until":
    wait(asked, int(rest[1]) if rest[1:] else 1)
signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in names])  # what comes now came too late
sys.exit(int(code))
"""


def script(path: Path, text: str) -> None:
    """Write an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def wait_for(condition: Callable[[], bool], hung_s: float = HUNG_S) -> None:
    """Wait for something that comes unless a child hangs."""
    limit = time.monotonic() + hung_s
    while not condition():
        assert time.monotonic() < limit, "it never came to that"
        time.sleep(0.01)


def copy_launcher(repo: Path) -> Path:
    """Copy run.sh and what it reads, over a package of two commands, into the folder `repo`."""
    (repo / "jaxtrain").mkdir(parents=True)
    shutil.copy(REPO / "run.sh", repo)
    shutil.copy(REPO / ".python-version", repo)
    shutil.copytree(REPO / "requirements", repo / "requirements")
    (repo / "jaxtrain/__init__.py").write_text('"""Package."""\n')
    (repo / "jaxtrain/main.py").write_text('"""Train a model."""\n\nif __name__ == "__main__":\n    pass\n')
    (repo / "jaxtrain/helpers.py").write_text('"""No command."""\n')
    script(repo / "jaxtrain/data/__main__.py", '"""Make token files.\n\nMore.\n"""\n')
    return repo


class Machine:
    """A home, and a PATH of stand-ins in front of the system's. `python` is what an installation puts into .venv."""

    def __init__(self, repo: Path, folder: Path, python: str = PYTHON):
        self.repo, self.bin, self.cwd = repo, folder / "bin", folder / "elsewhere"
        self.cwd.mkdir()
        script(self.bin / "uv", UV)
        script(self.bin / "venv-python", python)
        script(self.bin / "nvidia-smi", "#!/bin/bash\nexit 9\n")

    @property
    def environ(self) -> dict[str, str]:
        return {"PATH": f"{self.bin}:{PATH}", "HOME": str(self.cwd), "JAXTRAIN_RESTART_WAIT": "0"}

    def run(self, *args: str, launcher: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """run.sh with these arguments, until it ends."""
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
        """What uv was asked since the last time."""
        log = self.cwd / "uv"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def installed(self) -> list[str]:
        """The requirement files of the one `uv pip sync` since the last time."""
        (sync,) = [line for line in self.calls() if line.startswith("pip sync")]
        assert "--require-hashes" in sync
        return re.findall(r"requirements/([\w-]+)\.txt", sync)


class Launcher(Machine):
    """A machine whose runs end as planned. Its repository is installed, for CUDA 12."""

    def __init__(self, repo: Path, folder: Path):
        super().__init__(repo, folder, RUN)
        script(self.bin / "date", DATE)
        (self.cwd / "clock").write_text("1000")

    def plan(self, *lines: str) -> None:
        (self.cwd / "plan").write_text("\n".join(lines) + "\n")
        (self.cwd / "attempts").unlink(missing_ok=True)

    def train(self, *lines: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A training whose attempts end so."""
        self.plan(*lines)
        return self.run("--config=x.py", **env)

    def begin(self, *lines: str, arguments: Sequence[str] = ("--config=x.py",), **env: str) -> subprocess.Popen[str]:
        """The same in a process group of its own. Returns at once."""
        self.plan(*lines)
        return subprocess.Popen(
            ["bash", str(self.repo / "run.sh"), *arguments],
            env=self.environ | env,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def attempts(self) -> list[dict]:
        path = self.cwd / "attempts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_attempts(self, count: int) -> dict:
        wait_for(lambda: len(self.attempts()) >= count)
        return self.attempts()[-1]

    def started(self) -> str:
        """A letter for each process, in order: P preflight, p the same without measuring, T training."""
        words = [attempt["arguments"] for attempt in self.attempts()]
        return "".join("T" if w[1] == "jaxtrain.main" else "p" if "--no-measure" in w else "P" for w in words)

    def signals(self) -> list[str]:
        """What the runs heard."""
        path = self.cwd / "signals"
        return path.read_text().split() if path.exists() else []


# What each start says first: where it starts from, and what it sets.
INTRODUCTION = re.compile(r"run\.sh: (this is no git checkout|sets )")


def told(stderr: str) -> str:
    """What was said after the introduction, which must be there."""
    first, second, *rest = stderr.splitlines(keepends=True)
    assert INTRODUCTION.match(first) and INTRODUCTION.match(second), stderr
    return "".join(rest)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit code, what was said after the introduction) of one that was begun."""
    _, stderr = process.communicate(timeout=HUNG_S)
    return process.returncode, told(stderr)


def restarts_work() -> bool:
    """Return whether this machine's bash can restart runs: macOS has 3.2, for good."""
    command = ["bash", "-c", "echo ${BASH_VERSINFO[@]:0:2}"]
    found = subprocess.run(command, env={"PATH": PATH}, capture_output=True, text=True).stdout
    return [int(n) for n in found.split()] >= [4, 3]


def hear_hangups() -> Callable[[], object]:
    """Take SIGHUP from `nohup`, whose children are deaf to it, and return what gives it back."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return lambda: signal.signal(signal.SIGHUP, before)


def git(folder: Path, *args: str) -> str:
    """git in a folder, as an author of its own."""
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    done = subprocess.run(["git", "-C", str(folder), *args], env=os.environ | names, check=True, capture_output=True, text=True)
    return done.stdout.strip()
