"""Run the supervisor in a child process, with planned attempts (tests/attempt.py) as its children, and with real signals."""

import glob
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from run_sh import HUNG_S, PATH, script, wait_for

REPO = Path(__file__).resolve().parent.parent
ATTEMPT = Path(__file__).with_name("attempt.py")
# Tests cannot hide the device file of a real GPU.
HAS_GPU = bool(glob.glob("/dev/nvidia[0-9]*"))
GPUS = """#!/bin/bash
case $1 in
  --query-gpu=name) for i in 0 1 2 3 4 5 6 7; do echo 'NVIDIA H200'; done ;;
esac
"""
# The command line of jaxtrain.runtime, with tests/attempt.py in place of the programs that it starts.
SUPERVISE = """
import sys
from jaxtrain.runtime import __main__, supervisor

class Planned(supervisor.Supervisor):
    def __init__(self, options, environ):
        super().__init__(options, environ, (sys.executable, "-IS", sys.argv[1]), patience_s=float(sys.argv[2]))

__main__.Supervisor = Planned
sys.exit(__main__.main(sys.argv[3:]))
"""


class Supervised:
    """A home folder with a plan of attempts, in which a supervisor runs."""

    def __init__(self, folder: Path):
        self.bin, self.cwd = folder / "bin", folder / "elsewhere"
        self.cwd.mkdir()
        self.patience_s = 60.0
        script(self.bin / "nvidia-smi", "#!/bin/bash\nexit 9\n")

    @property
    def environ(self) -> dict[str, str]:
        variables = {"PATH": f"{self.bin}:{PATH}", "HOME": str(self.cwd), "PYTHONPATH": str(REPO)}
        return variables | {"JAXTRAIN_RESTART_WAIT": "0"}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", SUPERVISE, str(ATTEMPT), str(self.patience_s), *arguments]

    def gets_gpus(self) -> None:
        """Give the node eight GPUs, through a fake nvidia-smi."""
        script(self.bin / "nvidia-smi", GPUS)

    def reaches(self, text: str) -> dict[str, str]:
        """Write a fake of ssh, and return the variable that names it."""
        script(self.bin / "reach", text)
        return {"JAXTRAIN_SSH": str(self.bin / "reach")}

    def plan(self, *lines: str) -> None:
        (self.cwd / "plan").write_text("\n".join(lines) + "\n")
        (self.cwd / "attempts").unlink(missing_ok=True)

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the supervisor with these arguments to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environ | environ,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HUNG_S,
        )

    def train(self, *lines: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a supervised training whose attempts follow these lines of the plan."""
        self.plan(*lines)
        return self.run("main", "--config=x.py", **environ)

    def begin(self, *lines: str, arguments: Sequence[str] = ("--config=x.py",), **environ: str) -> subprocess.Popen[str]:
        """Start a supervised training in its own process group, and return at once."""
        self.plan(*lines)
        return subprocess.Popen(
            self.command("main", *arguments),
            env=self.environ | environ,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # a suite under nohup ignores the signal, and children inherit that
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def attempts(self) -> list[dict]:
        path = self.cwd / "attempts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_attempts(self, count: int) -> dict:
        wait_for(lambda: len(self.attempts()) >= count)
        return self.attempts()[-1]

    def started(self) -> str:
        """Return a letter for each process, in order: P preflight, p preflight without measuring, T training."""
        words = [attempt["arguments"] for attempt in self.attempts()]
        return "".join("T" if w[0] == "jaxtrain.main" else "p" if "--no-measure" in w else "P" for w in words)

    def signals(self) -> list[str]:
        """Return the names of the signals that attempts received."""
        path = self.cwd / "signals"
        return path.read_text().split() if path.exists() else []


def told(stderr: str) -> str:
    """Return stderr without its first line, which names the commit and the host."""
    first, _, rest = stderr.partition("\n")
    assert first.startswith("run.sh: ") and "; on " in first, stderr
    return rest


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process of `begin`. Returns (exit code, lines of stderr after the first)."""
    _, stderr = process.communicate(timeout=HUNG_S)
    return process.returncode, told(stderr)


def ignored_here() -> set[str]:
    """Return the signals that this process ignores. Each process that it starts ignores them too."""
    names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGQUIT")
    return {name for name in names if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN}
