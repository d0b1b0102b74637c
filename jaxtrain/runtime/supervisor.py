"""Training under supervision: preflight, attempts, restarts, and forwarding of every signal."""

import contextlib
import glob
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from jaxtrain.runtime.variables import ATTEMPT_VARIABLES, LAUNCHED, NOTE, PREFLIGHT, RESTART

# HUP and QUIT too: a run must not outlive its supervisor.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
TRACE = signal.SIGUSR2
RETRY, HANG, UNFIT, REFUSED, INTERRUPTED = 75, 124, 3, 2, 130
LONGEST_PAUSE_S = 60
LAST_OF_A_JOB_S = 600
POLL_S = 0.1
ANSWER_S = 20
# With these options, main prints an answer and does not train.
ANSWERS = ("--help", "--explain", "--replay")
MEANINGS = {RETRY: "restart requested: a process was lost, the time limit, or a signal", HANG: "the watchdog ended a hang"}
# A run that is out of memory would fail again after a restart. A fault in native code must be examined, and may have damaged
# files that a restart reads. So neither is restarted.
DEATHS = {
    signal.SIGABRT: ", as jax ends a run with a lost process",
    signal.SIGTERM: ", before or after the run",
    signal.SIGUSR1: ", before or after the run",
    signal.SIGKILL: ": out of memory (dmesg tells), or a kill -9",
    signal.SIGSEGV: ": a fault outside Python",
    signal.SIGBUS: ": a fault outside Python",
}
RESTARTED = (signal.SIGABRT, signal.SIGTERM, signal.SIGUSR1)


class Exit(Exception):
    """Raised to end the supervisor: it prints the reason and exits with `code`."""

    def __init__(self, code: int, reason: str = ""):
        super().__init__(reason)
        self.code = code


def say(text: str) -> None:
    """Write one line to stderr. An error is ignored: a closed terminal must not end the run."""
    with contextlib.suppress(OSError):
        os.write(2, f"run.sh: {text}\n".encode(errors="backslashreplace"))


class Signals:
    """Signals to the supervisor, which passes each one on to the running process, once.

    The sender may also have signalled the running process. A terminal signals the process group. A scheduler signals all
    processes of a job, or only the supervisor. The supervisor cannot distinguish these cases. So the trainer counts two signals
    within 0.2 s as one request.
    """

    def __init__(self) -> None:
        self.stop_signal: signal.Signals | None = None  # the last signal that asked for an end
        self._child: subprocess.Popen[bytes] | None = None
        self._pending: list[int] = []
        self._handled: list[signal.Signals] = []

    def listen(self) -> None:
        """Handle the signals in PASSED_ON, except signals that this process ignores from its start, as SIGHUP under nohup."""
        self._handled = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
        for number in self._handled:
            signal.signal(number, self._hear)

    def release(self) -> None:
        """Restore the default actions of the signals, for a program that replaces this one."""
        # Python ignores SIGPIPE and SIGXFSZ, and a program would inherit that.
        for number in (*self._handled, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if number != TRACE:
            self.stop_signal = signal.Signals(number)
        if self._child is None:
            self._pending.append(number)
        else:
            self._child.send_signal(number)

    def check(self) -> None:
        """Raise Exit if run.sh has received a signal to stop."""
        if self.stop_signal is not None:
            code = INTERRUPTED if self.stop_signal == signal.SIGINT else RETRY
            raise Exit(code, f"not started, because run.sh was sent {self.stop_signal.name.removeprefix('SIG')}")

    def wait(self, seconds: float) -> None:
        """Wait `seconds` before an attempt. Raises Exit if a signal asks for an end."""
        until = time.monotonic() + seconds
        while (remaining := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(remaining, POLL_S))

    def run(self, command: list[str], environ: Mapping[str, str]) -> int:
        """Run a process to which signals are passed on, in the supervisor's process group and with its stdin.

        Returns: its exit code as a shell reports it. Raises: Exit, if a signal asked for an end before the start.
        """
        self._pending.clear()
        self.check()
        # The process inherits SIG_IGN. Without it, a request for a trace would end the process until the trainer handles it.
        before = signal.signal(TRACE, signal.SIG_IGN)
        try:
            child = subprocess.Popen(command, env=environ)
        finally:
            signal.signal(TRACE, before)
        self._child = child
        while self._pending:
            child.send_signal(self._pending.pop(0))
        code = child.wait()
        self._child = None
        return code if code >= 0 else 128 - code


def pause_s(first_s: int, streak: int) -> int:
    """Return the seconds before a restart. first_s: those before the first in a row; streak: its number in the row, from 1."""
    return max(first_s, min(first_s * 2 ** (streak - 1), LONGEST_PAUSE_S))


def explain_exit(code: int) -> tuple[int, str]:
    """Return (exit code of the supervisor, text with the meaning of `code`). code: exit code of an attempt."""
    try:
        death = signal.Signals(code - 128) if code > 128 and code != INTERRUPTED else None
    except ValueError:
        death = None
    meaning = MEANINGS.get(code, "")
    if death is not None:
        meaning = f"killed by signal {death.value}, {death.name.removeprefix('SIG')}{DEATHS.get(death, '')}"
    return RETRY if death in RESTARTED else code, f"exit {code}" + (f" ({meaning})" if meaning else "")


def trains_on_cpu(environ: Mapping[str, str]) -> bool:
    """Return whether JAX_PLATFORMS or CUDA_VISIBLE_DEVICES hides the GPUs from the run."""
    return environ.get("JAX_PLATFORMS", "").startswith("cpu") or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def has_gpus() -> bool:
    """Return whether this node has NVIDIA GPUs, found as run.sh finds them."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return True
    try:  # WSL has GPUs without these devices
        listed = subprocess.run(["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"GPU " in listed.stdout


def int_variable(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the whole number in a variable, or `default` if it is unset. Raises Exit for any other text."""
    text = environ.get(name) or str(default)
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise Exit(REFUSED, f"{name} = {text}: is no whole number from 0 to 999999. Fix: {name}={default}.")
    return int(text)


class Supervisor:
    """Train with preflight and restarts, and pass signals on.

    Attributes:
        arguments: the trainer's arguments: those of run.sh without --no-preflight.
        preflight: whether preflight comes before training on GPUs.
        environ: the environment of the started processes.
        program: the command that runs a Python module.
        streak: the number of restarts in a row without progress.
    """

    def __init__(self, words: list[str], environ: Mapping[str, str], program: tuple[str, ...] = (sys.executable, "-m")):
        """Read the arguments of run.sh. Raises Exit if an option or a variable of the supervisor is wrong."""
        for word in words:
            if word.startswith("--no-preflight="):
                name, _, value = word.partition("=")
                raise Exit(REFUSED, f"{name} = {value}: takes no value. Fix: {name}.")
        self.arguments = [word for word in words if word != "--no-preflight"]
        self.preflight = "--no-preflight" not in words
        # Another run.sh may have set the variables of an attempt.
        self.environ = {name: text for name, text in environ.items() if name not in ATTEMPT_VARIABLES}
        self.program = program
        self.signals = Signals()
        self.streak, self.max_restarts = 0, int_variable(environ, "JAXTRAIN_RESTARTS", 3)
        self.first_pause_s = int_variable(environ, "JAXTRAIN_RESTART_WAIT", 1)
        self.reset_s = int_variable(environ, "JAXTRAIN_RESTART_RESET", 600)

    def train(self) -> int:
        """Train, and restart after an attempt whose exit code `explain_exit` maps to RETRY or HANG.

        Returns: the exit code, unless a trainer replaces this process.
        """
        if any(word == "-h" or word.startswith(ANSWERS) for word in self.arguments):
            self._become_trainer()
        self.signals.listen()
        self.preflight = self.preflight and has_gpus() and not trains_on_cpu(self.environ)
        if self.max_restarts == 0 and not self.preflight:
            self._become_trainer()
        with tempfile.TemporaryDirectory(prefix="jaxtrain-") as scratch:
            if self.max_restarts > 0:
                return self._attempts(Path(scratch))
            # If the trainer takes this process's place, the folder stays: it reads preflight's findings there.
            return self._preflight(Path(scratch), measure=True) or self._become_trainer()

    def _attempts(self, scratch: Path) -> int:
        """Run attempts until one succeeds or must not be restarted. Returns: the supervisor's exit code (`explain_exit`)."""
        note = scratch / "note"
        note.touch()
        self.environ |= {LAUNCHED: str(int(time.time())), NOTE: str(note)}
        measure, restarts = True, 0
        while True:
            began = time.monotonic()
            # Again before each restart: a GPU may have ended the run.
            code = self._preflight(scratch, measure)
            if code == 0:
                if measure:
                    self._announce_variables()
                measure = False
                code = self._run("main")
            # A hang lasts at least as long as the watchdog waits, so its duration proves no progress.
            if code != HANG and time.monotonic() - began >= self.reset_s:
                self.streak = 0
            code, meaning = explain_exit(code)
            if code not in (RETRY, HANG):
                if code > 128 and code != INTERRUPTED:
                    say(f"{meaning}: not started again")
                return code
            obstacle = self._obstacle(note.read_text(encoding="utf-8").strip(), time.time())
            if obstacle:
                say(f"{meaning}: not started again, {obstacle}")
                return code
            self.streak, restarts = self.streak + 1, restarts + 1
            pause = pause_s(self.first_pause_s, self.streak)
            say(f"{meaning}: starting again in {pause} s, restart {self.streak} of {self.max_restarts}")
            self.signals.wait(pause)
            self.environ[RESTART] = str(restarts)

    def _obstacle(self, note: str, now: float) -> str | None:
        """Return the reason against a restart; None if the run may restart. note: text in the trainer's file JAXTRAIN_NOTE."""
        if self.signals.stop_signal is not None:
            return f"because run.sh was sent {self.signals.stop_signal.name.removeprefix('SIG')}"
        if note:
            return f"because {note}"
        # Near the end of a Slurm job its time limit ended the attempt (train.max_minutes=auto), and would end the next.
        end = self.environ.get("SLURM_JOB_END_TIME", "")
        if re.fullmatch("[0-9]{1,12}", end) and int(end) - now < LAST_OF_A_JOB_S:
            return f"in the last ten minutes of the job (SLURM_JOB_END_TIME={end})"
        if self.streak >= self.max_restarts:
            return f"after {self.streak} in a row without progress (JAXTRAIN_RESTARTS={self.max_restarts})"
        return None

    def _preflight(self, scratch: Path, measure: bool) -> int:
        """Check whether the GPUs are fit to train.

        Before a restart, `measure` is False: no rates are measured, and the run keeps the findings of its start.

        Returns: 0 if the GPUs are fit, or an exit code after which the preflight may be repeated. Raises Exit if training must
        not start.
        """
        if not self.preflight:
            return 0
        report = scratch / "preflight.json"
        code = self._run("preflight", f"--json={report}" if measure else "--no-measure")
        self.signals.check()
        if code == 0:
            if measure:
                self.environ[PREFLIGHT] = str(report)
        elif code == UNFIT:
            fix = "Fix: repair them, or give --no-preflight to train anyway."
            raise Exit(UNFIT, f"not started: preflight found the faults above. {fix}")
        elif code == REFUSED:
            raise Exit(REFUSED)
        elif explain_exit(code)[0] not in (RETRY, HANG):
            raise Exit(code, f"not started: preflight ended with {code}. Fix: --no-preflight trains without it.")
        return code

    def _run(self, command: str, *more: str) -> int:
        words = [*self.program, "jaxtrain", command, *self.arguments, *more]
        return self.signals.run(words, self.environ)

    def _become_trainer(self) -> NoReturn:
        """Replace this process by the trainer. Raises Exit if a signal has asked for an end."""
        words = [*self.program, "jaxtrain", "main", *self.arguments]
        self._announce_variables()
        self.signals.release()
        self.signals.check()
        os.execve(words[0], words, self.environ)

    def _announce_variables(self) -> None:
        """If JAXTRAIN_VERBOSE=1, print the environment variables that run.sh and the supervisor set for the run."""
        if self.environ.get("JAXTRAIN_VERBOSE") == "1":
            names = [name for name in ("PYTHONPATH", *ATTEMPT_VARIABLES) if name in self.environ]
            say(" ".join(["sets", *(f"{name}={shlex.quote(self.environ[name])}" for name in names)]))
