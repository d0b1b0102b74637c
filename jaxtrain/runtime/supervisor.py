"""Training under supervision: preflight, attempts, restarts, and forwarding of every signal."""

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

from jaxtrain.runtime.messages import End, say
from jaxtrain.runtime.nodes import PATIENCE_S, RemoteProcess, exit_code, remote_line, ssh_command, verdict
from jaxtrain.runtime.options import Options, whole_number
from jaxtrain.runtime.provenance import gpu_names, gpus_present, prints_common_messages, provenance
from jaxtrain.runtime.variables import EXPECTED, LAUNCHED, NOTE, OF_AN_ATTEMPT, PREFLIGHT, RESTART

ROOT = Path(__file__).absolute().parents[2]
# HUP and QUIT too: a run must not outlive its supervisor.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
TRACE = signal.SIGUSR2
AGAIN, HANG, UNFIT, REFUSED, INTERRUPTED = 75, 124, 3, 2, 130
LONGEST_PAUSE_S = 60
LAST_OF_A_JOB_S = 600
POLL_S = 0.1
MEANINGS = {AGAIN: "restart requested: a process was lost, the time limit, or a signal", HANG: "the watchdog ended a hang"}
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


class Signals:
    """Signals to the supervisor, which passes each one on to the running process, once.

    The sender may also have signalled the running process. A terminal signals the process group. A scheduler signals all
    processes of a job, or only the supervisor. The supervisor cannot distinguish these cases. So the trainer counts two signals
    within 0.2 s as one request.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None  # the last signal that asked for an end
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._heard: list[signal.Signals] = []

    def listen(self) -> None:
        """Handle the signals in PASSED_ON, except signals that this process ignores from its start, as SIGHUP under nohup."""
        self._heard = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
        for number in self._heard:
            signal.signal(number, self._hear)

    def release(self) -> None:
        """Restore the default actions of the signals, for a program that replaces this one."""
        # Python ignores SIGPIPE and SIGXFSZ, and a program would inherit that.
        for number in (*self._heard, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if number != TRACE:
            self.asked = signal.Signals(number)
        if self._child is None:
            self._early.append(number)
        else:
            self._child.send_signal(number)

    def check(self, again: bool) -> None:
        """Raise End if run.sh has received a signal to stop. again: whether the process to be started next is a restart."""
        if self.asked is not None:
            name = self.asked.name.removeprefix("SIG")
            code = INTERRUPTED if self.asked == signal.SIGINT else AGAIN
            raise End(code, f"not started{' again' if again else ''}, because run.sh was sent {name}")

    def rest(self, seconds: float, again: bool) -> None:
        """Wait `seconds` before an attempt. Raises End if a signal asks for an end. again: see `check`."""
        until = time.monotonic() + seconds
        self.check(again)
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S))
            self.check(again)

    def start(self, command: list[str], environ: Mapping[str, str], again: bool, quiet: bool) -> subprocess.Popen[bytes]:
        """Start the process to which signals are passed on, in the supervisor's process group and with its stdin.

        Raises: End, if a signal asked for an end before the start.
        """
        self._early.clear()
        self.check(again)
        # The process inherits SIG_IGN. Without it, a request for a trace would end the process until the trainer handles it.
        before = signal.signal(TRACE, signal.SIG_IGN)
        try:
            child = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL if quiet else None)
        finally:
            signal.signal(TRACE, before)
        self._child = child
        while self._early:
            child.send_signal(self._early.pop(0))
        return child

    def ended(self) -> None:
        """Pass no more signals on, since the process has ended."""
        self._child = None


class Attempt:
    """One attempt to run a command: a process on this node, and one on each other node of the run."""

    def __init__(self, command: list[str], environ: Mapping[str, str], remote_lines: Mapping[str, str], patience_s: float):
        self.command = command
        self.environ = environ
        self.remote_lines = remote_lines
        self.patience_s = patience_s

    def run(self, signals: Signals, again: bool, quiet: bool = False) -> int:
        """Run the processes and return one exit code for all nodes. Raises End if a signal came before the start."""
        child = signals.start(self.command, self.environ, again, quiet)
        others = [RemoteProcess(host, line, self.environ, self.patience_s) for host, line in self.remote_lines.items()]
        waits_in_vain = False
        while True:
            try:
                code = exit_code(child.wait(timeout=POLL_S if others else None))
                break
            except subprocess.TimeoutExpired:
                if not waits_in_vain and any(other.failed() for other in others):
                    waits_in_vain = True
                    child.terminate()
        signals.ended()
        # The other processes end by themselves, at the latest when they notice the loss of this one.
        deadline = time.monotonic() + self.patience_s
        ends = {other.host: other.end(deadline) for other in others}
        return verdict(code, ends, signals.asked is not None)


class Restarts:
    """The budget of consecutive restarts without progress, and the pause before each restart."""

    def __init__(self, limit: int, first_s: int, reset_s: int):
        self.limit, self.first_s, self.reset_s = limit, first_s, reset_s
        self.row = self.total = 0
        self._pause_s = first_s

    def count(self, code: int, lasted_s: float) -> None:
        """Refill the budget after an attempt that made progress: it lasted at least `reset_s` seconds and did not hang.

        An attempt that hangs lasts at least as long as the watchdog waits, so its duration proves no progress.
        """
        if code != HANG and lasted_s >= self.reset_s:
            self.row, self._pause_s = 0, self.first_s

    def take(self) -> int:
        """Use one restart. Returns: the seconds to wait before it."""
        self.row += 1
        self.total += 1
        pause_s = self._pause_s
        if pause_s < LONGEST_PAUSE_S:
            self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s


def explain(code: int) -> tuple[int, str]:
    """Return (exit code of the supervisor, text with the meaning of `code`). code: exit code of an attempt."""
    try:
        death = signal.Signals(code - 128) if code > 128 and code != INTERRUPTED else None
    except ValueError:
        death = None
    meaning = MEANINGS.get(code, "")
    if death is not None:
        meaning = f"killed by signal {death.value}, {death.name.removeprefix('SIG')}{DEATHS.get(death, '')}"
    return AGAIN if death in RESTARTED else code, f"exit {code}" + (f" ({meaning})" if meaning else "")


def trains_on_cpu(environ: Mapping[str, str]) -> bool:
    """Return whether JAX_PLATFORMS or CUDA_VISIBLE_DEVICES hides the GPUs from the run."""
    return environ.get("JAX_PLATFORMS", "").startswith("cpu") or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


class Supervisor:
    """Run one command line of run.sh with preflight and restarts, and pass signals on.

    Attributes:
        options: the supervisor's options, and the trainer's arguments.
        environ: the environment of the started processes.
        program: the command that runs a Python module.
        patience_s: seconds to wait for the processes of other nodes after this node's process has ended.
    """

    def __init__(
        self,
        options: Options,
        environ: Mapping[str, str],
        program: tuple[str, ...] = (sys.executable, "-m"),
        patience_s: float = PATIENCE_S,
    ):
        self.options = options
        self.environ = dict(environ)
        self.program = program
        self.patience_s = patience_s
        self.signals = Signals()
        self.restarts = Restarts(
            whole_number(environ, "JAXTRAIN_RESTARTS", 3),
            whole_number(environ, "JAXTRAIN_RESTART_WAIT", 1),
            whole_number(environ, "JAXTRAIN_RESTART_RESET", 600),
        )
        # Another run.sh may have set these variables. A node that was reached by ssh gets some of them from the first node.
        for name in (NOTE, PREFLIGHT) if EXPECTED in environ else OF_AN_ATTEMPT:
            self.environ.pop(name, None)

    # ---- Commands

    def train(self) -> int:
        """Train, and restart after an attempt whose exit code `explain` maps to AGAIN or HANG.

        Returns: the exit code, unless a trainer replaces this process.
        """
        if self.options.answers:
            return self._become("main", self.options.arguments)
        self.signals.listen()
        names = gpu_names()
        self.environ |= provenance(ROOT, names, self.environ)
        if self.environ.get("JAXTRAIN_DRY_RUN"):
            return self._rehearse()
        if not gpus_present(names) or trains_on_cpu(self.environ):
            self.options.preflight = False
        nodes = self.options.nodes
        if nodes:
            ssh_command(self.environ)
            nodes.announce()
            # A mistake in the config is reported here, and only once.
            command = self._command("main", [*self.options.arguments, *nodes.arguments(0), "--explain"])
            code = Attempt(command, self.environ, {}, self.patience_s).run(self.signals, again=False, quiet=True)
            self.signals.check(again=False)
            if code:
                return code
        supervised = self.restarts.limit > 0 or nodes is not None
        if not supervised and not self.options.preflight:
            self._announce_variables()
            return self._become("main", self.options.arguments)
        with tempfile.TemporaryDirectory(prefix="jaxtrain-") as scratch:
            if supervised:
                return self._attempts(Path(scratch))
            code = self._preflight(Path(scratch), measure=True)
            if code:
                return code
            self._announce_variables()
            # The folder stays: the trainer reads the preflight's findings there.
            return self._become("main", self.options.arguments)

    def preflight(self) -> int:
        """Run only the preflight, on all nodes. Returns: the exit code, unless the preflight replaces this process."""
        nodes = self.options.nodes
        if not nodes:
            return self._become("preflight", self.options.arguments)
        self.signals.listen()
        self.environ |= provenance(ROOT, gpu_names(), self.environ)
        if self.environ.get("JAXTRAIN_DRY_RUN"):
            return self._rehearse("preflight")
        ssh_command(self.environ)
        nodes.announce()
        return self._attempt("preflight", self.options.arguments)

    # ---- Processes

    def _attempts(self, scratch: Path) -> int:
        """Run attempts until one succeeds or must not be restarted. Returns: the supervisor's exit code (`explain`)."""
        note = scratch / "note"
        note.touch()
        self.environ |= {LAUNCHED: str(int(time.time())), NOTE: str(note)}
        measure = True
        while True:
            began = time.monotonic()
            # Again before each restart: a GPU may have ended the run.
            code = self._preflight(scratch, measure)
            if code == 0:
                if measure:
                    self._announce_variables()
                measure = False
                code = self._attempt("main", self.options.arguments)
            self.restarts.count(code, time.monotonic() - began)
            code, meaning = explain(code)
            if code not in (AGAIN, HANG):
                if code > 128 and code != INTERRUPTED:
                    say(f"{meaning}: not started again")
                return code
            obstacle = self._obstacle(note.read_text(encoding="utf-8").strip(), time.time())
            if obstacle:
                say(f"{meaning}: not started again, {obstacle}")
                return code
            pause_s = self.restarts.take()
            say(f"{meaning}: starting again in {pause_s} s, restart {self.restarts.row} of {self.restarts.limit}")
            self.signals.rest(pause_s, again=True)
            self.environ[RESTART] = str(self.restarts.total)

    def _obstacle(self, note: str, now: float) -> str | None:
        """Return the reason against a restart; None if the run may restart. note: text in the trainer's file JAXTRAIN_NOTE."""
        if self.signals.asked is not None:
            return f"because run.sh was sent {self.signals.asked.name.removeprefix('SIG')}"
        if note:
            return f"because {note}"
        # Near the end of a Slurm job its time limit ended the attempt (train.max_minutes=auto), and would end the next.
        end = self.environ.get("SLURM_JOB_END_TIME", "")
        if re.fullmatch("[0-9]{1,12}", end) and int(end) - now < LAST_OF_A_JOB_S:
            return f"in the last ten minutes of the job (SLURM_JOB_END_TIME={end})"
        if self.restarts.row >= self.restarts.limit:
            limit = self.restarts.limit
            return f"after {self.restarts.row} in a row without progress (JAXTRAIN_RESTARTS={limit})"
        return None

    def _preflight(self, scratch: Path, measure: bool) -> int:
        """Check whether the GPUs of all nodes are fit to train.

        Before a restart, `measure` is False: no rates are measured, and the run keeps the findings of its start.

        Returns: 0 if the GPUs are fit, or an exit code after which the preflight may be repeated. Raises: End, if training must
        not start.
        """
        if not self.options.preflight:
            return 0
        found = scratch / "preflight.json"
        here = [f"--json={found}"] if measure else []
        code = self._attempt("preflight", [*self.options.arguments, *([] if measure else ["--no-measure"])], here)
        self.signals.check(again=self.restarts.row > 0)
        if code == 0:
            if measure:
                self.environ[PREFLIGHT] = str(found)
        elif code == UNFIT:
            fix = "Fix: repair them, or give --no-preflight to train anyway."
            raise End(UNFIT, f"not started: preflight found the faults above. {fix}")
        elif code == REFUSED:
            raise End(REFUSED)
        elif explain(code)[0] not in (AGAIN, HANG):
            raise End(code, f"not started: preflight ended with {code}. Fix: --no-preflight trains without it.")
        return code

    def _attempt(self, command: str, arguments: list[str], here: list[str] | None = None) -> int:
        """Run a command on all nodes. here: further arguments on this node. Returns: the exit code of all nodes."""
        local, lines = [*arguments, *(here or ())], {}
        if nodes := self.options.nodes:
            local = [*arguments, *nodes.arguments(0), *(here or ())]
            words = [command, "--no-preflight"] if command == "main" else [command]
            for index, host in enumerate(nodes.hosts[1:], start=1):
                lines[host] = remote_line(ROOT, [*words, *arguments, *nodes.arguments(index)], self.environ)
        attempt = Attempt(self._command(command, local), self.environ, lines, self.patience_s)
        return attempt.run(self.signals, again=self.restarts.row > 0)

    def _command(self, command: str, arguments: list[str]) -> list[str]:
        return [*self.program, "jaxtrain", command, *arguments]

    def _become(self, command: str, arguments: list[str]) -> int:
        """Replace this process by a command. Only a dry run returns (0). Raises End if a signal has asked for an end."""
        words = self._command(command, arguments)
        if self.environ.get("JAXTRAIN_DRY_RUN"):
            say(f"would run: {shlex.join(words)}")
            return 0
        self.signals.release()
        self.signals.check(again=False)
        return os.execve(words[0], words, self.environ)

    # ---- Texts

    def _announce_variables(self) -> None:
        """If JAXTRAIN_VERBOSE=1, print the environment variables that the supervisor sets for the run."""
        if self.environ.get("JAXTRAIN_VERBOSE") != "1" or not prints_common_messages(self.environ):
            return
        names = sorted(name for name, value in self.environ.items() if os.environ.get(name) != value)
        say(" ".join(["sets", *(f"{name}={shlex.quote(self.environ[name])}" for name in ("PYTHONPATH", *names))]))

    def _rehearse(self, command: str = "main") -> int:
        """Print the commands that would run. Returns: exit code 0."""
        nodes = self.options.nodes
        self._announce_variables()
        for index, host in enumerate(nodes.hosts[1:] if nodes else (), start=1):
            say(f"would run it on {host} too, with --process-id={index}")
        return self._become(command, [*self.options.arguments, *(nodes.arguments(0) if nodes else ())])
