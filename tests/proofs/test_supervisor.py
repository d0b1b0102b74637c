"""The supervisor of training: preflight, restarts, forwarded signals. Children and signals are real.

Its children are planned attempts (tests/attempt.py). A test waits for what they have written, never for a time.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import runs
from run_sh import HAS_GPU, HUNG_S, PATH, script, wait_for

ATTEMPT = runs.REPO / "tests" / "attempt.py"
NVIDIA_SMI = '#!/bin/bash\n[[ $1 == -L ]] && echo "GPU 0: NVIDIA H200 (UUID: GPU-0)"\n'
# The command line of jaxtrain.commands.supervise, with tests/attempt.py in place of the programs that it starts.
SUPERVISE = """
import sys
from jaxtrain.commands import supervise
from jaxtrain.runtime import supervisor

class Planned(supervisor.Supervisor):
    def __init__(self, arguments, environ):
        super().__init__(arguments, environ, (sys.executable, "-IS", sys.argv[1]))

supervise.Supervisor = Planned
sys.exit(supervise.main(sys.argv[2:]))
"""


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Undo what a suite under nohup or in the background of a shell ignores: its children would ignore it too."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Node:
    """A home folder with a plan of attempts, in which a supervisor runs. It has no GPU, until `gpus`."""

    def __init__(self, folder: Path):
        self.bin, self.home = folder / "bin", folder / "elsewhere"
        self.home.mkdir()
        self.environ = {"PATH": f"{self.bin}:{PATH}", "HOME": str(self.home), "PYTHONPATH": str(runs.REPO)}
        self.environ |= {"JAXTRAIN_RESTART_WAIT": "0", "JAX_PLATFORMS": "cpu"}
        script(self.bin / "nvidia-smi", "#!/bin/bash\nexit 9\n")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", SUPERVISE, str(ATTEMPT), *arguments]

    def plan(self, *lines: str) -> None:
        (self.home / "plan").write_text("\n".join(lines) + "\n")
        (self.home / "attempts").unlink(missing_ok=True)

    def begin(self, *lines: str, line: str = "--config=x.py", **environ: str) -> subprocess.Popen[str]:
        """Start a supervisor in its own process group. lines: the plan of its attempts. line: its command line."""
        self.plan(*lines)
        return subprocess.Popen(
            self.command(*shlex.split(line)),
            env=self.environ | environ,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *lines: str, **given: str) -> tuple[int, str]:
        """Run a supervisor to its end, as `begin`. Returns (exit code, stderr)."""
        process = self.begin(*lines, **given)
        _, stderr = process.communicate(timeout=HUNG_S)
        return process.returncode, stderr

    def attempts(self) -> list[dict]:
        path = self.home / "attempts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_attempts(self, count: int) -> dict:
        wait_for(lambda: len(self.attempts()) >= count)
        return self.attempts()[-1]

    def started(self) -> str:
        """Return a letter for each process, in order: P preflight, p preflight without measuring, T training."""
        words = [attempt["arguments"] for attempt in self.attempts()]
        return "".join("T" if w[1] == "main" else "p" if "--no-measure" in w else "P" for w in words)

    def signals(self) -> list[str]:
        """Return the names of the signals that attempts received."""
        path = self.home / "signals"
        return path.read_text().split() if path.exists() else []


def ended(process: subprocess.Popen[str]) -> int:
    """Wait for a process of `begin`. Returns its exit code."""
    process.communicate(timeout=HUNG_S)
    return process.returncode


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def gpus(node: Node) -> Node:
    """A node with a GPU, by a fake nvidia-smi."""
    script(node.bin / "nvidia-smi", NVIDIA_SMI)
    del node.environ["JAX_PLATFORMS"]
    return node


class Case(NamedTuple):
    """The ends of a run's attempts, and the supervisor's expected reaction."""

    plan: list[str]
    code: int
    started: str  # as Node.started
    env: dict[str, str] = {}


NO_RESET = {"JAXTRAIN_RESTARTS": "1", "JAXTRAIN_RESTART_RESET": "0"}
ON_CPUS = {
    "again until done": Case(["exit 75", "exit 124", "exit 0"], 0, "TTT"),
    "an error": Case(["exit 1"], 1, "T"),
    "Ctrl-C": Case(["exit 130"], 130, "T"),
    "deaths by a signal": Case(["kill 6", "kill 15", "kill 6"], 75, "TTT", {"JAXTRAIN_RESTARTS": "2"}),
    "out of memory": Case(["kill 9"], 137, "T"),
    "native fault": Case(["kill 11"], 139, "T"),
    "time over": Case(["exit 124", "note 75"], 75, "TT"),
    "the budget": Case(["exit 75"] * 4, 75, "TTTT"),
    "a hang is no progress": Case(["exit 124", "exit 124"], 124, "TT", NO_RESET),
    "progress refills the budget": Case(["exit 75"] * 3 + ["exit 0"], 0, "TTTT", NO_RESET),
}
ON_GPUS = {
    "a fault": Case(["exit 3"], 3, "P"),
    "a wrong config": Case(["exit 2"], 2, "P"),
    "a broken preflight": Case(["exit 1"], 1, "P"),
    "fit, and looked at again": Case(["exit 0", "exit 75", "exit 0", "exit 0"], 0, "PTpT"),
    "a fault before a restart": Case(["exit 0", "exit 124", "exit 3"], 3, "PTp"),
    "preflights lose a process": Case(["exit 75", "exit 0", "exit 75", "kill 6", "exit 0", "exit 0"], 0, "PPTppT"),
    "for CPUs": Case(["exit 0"], 0, "T", {"JAX_PLATFORMS": "cpu"}),
    "GPUs hidden": Case(["exit 0"], 0, "T", {"CUDA_VISIBLE_DEVICES": ""}),
}


@pytest.mark.parametrize("name", [*ON_CPUS, *ON_GPUS])
def test_after_an_end(name: str, request: pytest.FixtureRequest):
    node: Node = request.getfixturevalue("gpus" if name in ON_GPUS else "node")
    case = (ON_CPUS | ON_GPUS)[name]
    code, stderr = node.run(*case.plan, **case.env)
    assert (code, node.started()) == (case.code, case.started), stderr


def test_preflight_is_left_out_on_request_and_without_gpus(gpus: Node):
    assert gpus.run("exit 0", line="--no-preflight")[0] == 0 and gpus.started() == "T"
    script(gpus.bin / "nvidia-smi", "#!/bin/bash\nexit 9\n")
    assert gpus.run("exit 0", "exit 0")[0] == 0 and gpus.started() == ("PT" if HAS_GPU else "T")


@pytest.mark.parametrize(("left_s", "code", "started"), [(300, 75, "T"), (5000, 0, "TT")])
def test_the_last_ten_minutes_of_a_job(node: Node, left_s: int, code: int, started: str):
    found, _ = node.run("exit 75", "exit 0", SLURM_JOB_END_TIME=str(int(time.time()) + left_s))
    assert (found, node.started()) == (code, started)


def test_attempts_know_their_circumstances(gpus: Node):
    """Attempts get preflight's findings, the number of the restart, and the time of the first start (a second before)."""
    code, stderr = gpus.run("exit 0", "exit 75", "exit 0", "exit 0", JAXTRAIN_RESTART_WAIT="1")
    assert code == 0 and gpus.started() == "PTpT", stderr
    look, first, _, second = gpus.attempts()
    assert (first["restart"], second["restart"]) == (None, "1")
    for name in ("launched", "arguments", "preflight"):
        assert first[name] == second[name] is not None
    assert first["arguments"] == ["jaxtrain", "main", "--config=x.py"]
    found = first["preflight"]
    assert look["arguments"] == ["jaxtrain", "preflight", "--config=x.py", f"--json={found}"] and look["preflight"] is None
    assert not Path(found).parent.exists(), "the supervisor removes its folder"


def test_variables_of_another_supervisor_are_dropped(node: Node):
    given = {"JAXTRAIN_RESTART": "7", "JAXTRAIN_LAUNCHED": "8", "JAXTRAIN_PREFLIGHT": "/theirs", "JAXTRAIN_RESTARTS": "0"}
    node.run("exit 0", **given)
    (attempt,) = node.attempts()
    assert [attempt[name] for name in ("restart", "launched", "preflight")] == [None] * 3


@pytest.mark.parametrize("line", ["--explain", "-h", "--replay=a", ""])
def test_the_trainer_takes_the_supervisors_place(gpus: Node, line: str):
    """For questions, and without restarts and preflight."""
    switched_off = {} if line else {"JAXTRAIN_RESTARTS": "0", "JAX_PLATFORMS": "cpu"}
    process = gpus.begin("exit 75", line=line, **switched_off)
    _, stderr = process.communicate(timeout=HUNG_S)
    assert (process.returncode, stderr) == (75, "")
    (attempt,) = gpus.attempts()
    assert attempt["pid"] == process.pid and attempt["arguments"] == ["jaxtrain", "main", *line.split()]


def test_without_restarts_the_trainer_takes_the_place_after_preflight(gpus: Node):
    """The folder with preflight's findings stays for the trainer."""
    process = gpus.begin("exit 0", "exit 75", JAXTRAIN_RESTARTS="0", TMPDIR=str(gpus.home))
    assert ended(process) == 75 and gpus.started() == "PT"
    look, trained = gpus.attempts()
    assert trained["pid"] == process.pid != look["pid"]
    assert trained["preflight"] and Path(trained["preflight"]).parent.exists()


# ---- Signals


ASKED = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}


@pytest.mark.parametrize(
    ("name", "to"), [("SIGTERM", "supervisor"), ("SIGINT", "supervisor"), ("SIGUSR1", "group"), ("SIGINT", "group")]
)
def test_a_signal_ends_the_supervisor_with_the_run(node: Node, name: str, to: str):
    process = node.begin(f"until {ASKED[name]}")
    attempt = node.await_attempts(1)
    assert attempt["group"] == process.pid
    (os.killpg if to == "group" else os.kill)(process.pid, signal.Signals[name])
    assert ended(process) == ASKED[name] and len(node.attempts()) == 1
    # To the group: the process's own signal and the forwarded one may merge, come separately, or come after its end.
    assert node.signals() in ([[name]] if to == "supervisor" else [[name], [name, name]])


def test_each_signal_is_passed_on_once_and_the_code_is_the_runs(node: Node):
    process = node.begin("until 0 2")
    node.await_attempts(1)
    sent = ["SIGUSR2", "SIGUSR2", "SIGTERM", "SIGTERM"]  # two traces, a stop, and a second stop to leave at once
    for count, name in enumerate(sent, 1):
        process.send_signal(signal.Signals[name])
        wait_for(lambda count=count: len(node.signals()) >= count or process.poll() is not None)
    assert ended(process) == 0 and node.signals() == sent


def test_a_run_that_is_signalled_alone_or_asked_for_a_trace_is_started_again(node: Node):
    process = node.begin("until 75", "traced 75", "exit 0")
    os.kill(node.await_attempts(1)["pid"], signal.SIGTERM)
    node.await_attempts(2)
    process.send_signal(signal.SIGUSR2)
    assert ended(process) == 0 and len(node.attempts()) == 3


def test_a_run_does_not_outlive_the_supervisor(node: Node):
    process = node.begin("until 75")
    attempt = node.await_attempts(1)
    process.send_signal(signal.SIGHUP)
    assert ended(process) == 129
    with pytest.raises(ProcessLookupError):
        os.kill(attempt["pid"], 0)


@pytest.mark.parametrize(("name", "code"), ASKED.items())
def test_a_signal_between_two_attempts_ends_at_once(node: Node, name: str, code: int):
    """The pause before the second attempt would take eleven days."""
    process = node.begin("exit 124", JAXTRAIN_RESTART_WAIT="999999")
    assert process.stderr and "999999" in process.stderr.readline()
    process.send_signal(signal.Signals[name])
    assert ended(process) == code and len(node.attempts()) == 1


def test_a_trace_in_a_pause_leaves_it_as_it_is(node: Node):
    process = node.begin("exit 124", "exit 0", JAXTRAIN_RESTART_WAIT="1")
    assert process.stderr
    said = process.stderr.readline()
    process.send_signal(signal.SIGUSR2)
    assert (ended(process), node.started()) == (0, "TT"), said


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_signal_before_training_ends_it(gpus: Node, restarts: str):
    process = gpus.begin("until 130", JAXTRAIN_RESTARTS=restarts)
    gpus.await_attempts(1)
    process.send_signal(signal.SIGTERM)
    assert (ended(process), gpus.signals(), gpus.started()) == (75, ["SIGTERM"], "P")


@pytest.mark.skipif(HAS_GPU, reason="the device file answers, so nvidia-smi is not asked")
@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_signal_before_the_first_attempt_ends_the_supervisor(node: Node, restarts: str):
    """The signal comes while the supervisor runs nvidia-smi."""
    asks = node.home / "asks"
    script(node.bin / "nvidia-smi", '#!/bin/bash\ntouch "$HOME/asks"\nuntil [[ -e $HOME/go ]]; do sleep 0.01; done\n')
    process = node.begin("exit 0", JAXTRAIN_RESTARTS=restarts)
    wait_for(asks.exists)
    process.send_signal(signal.SIGTERM)
    (node.home / "go").touch()
    assert (ended(process), node.attempts()) == (75, [])


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_run_finds_signals_as_the_supervisor_found_them(node: Node, restarts: str):
    assert node.run("exit 0", JAXTRAIN_RESTARTS=restarts)[0] == 0
    handlers = node.attempts()[0]["at_birth"]
    assert "default_int_handler" in handlers.pop("SIGINT")
    # Supervised, a trainer that does not listen yet ignores a request for a trace.
    assert handlers.pop("SIGUSR2") == str(signal.SIG_IGN if restarts == "3" else signal.SIG_DFL)
    assert handlers == dict.fromkeys(handlers, str(signal.SIG_DFL))


def test_signals_ignored_from_the_start_stay_ignored(node: Node):
    """nohup starts a process with SIGHUP ignored. Attempts inherit the ignored SIGHUP and an ignored SIGINT."""
    node.plan("exit 0")
    command = ["bash", "-c", 'trap "" HUP INT; exec "$@"', "bash", *node.command()]
    subprocess.run(command, env=node.environ, check=True, stdin=subprocess.DEVNULL, timeout=HUNG_S)
    handlers = node.attempts()[0]["at_birth"]
    assert handlers["SIGHUP"] == handlers["SIGINT"] == str(signal.SIG_IGN) != handlers["SIGTERM"]


def test_a_terminal_stays_the_runs(node: Node):
    node.plan("read 75", "until 130")
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    command, pipe = [sys.executable, "-c", spawn, *node.command()], subprocess.PIPE
    process = subprocess.Popen(command, env=node.environ, cwd=node.home, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin
    for count, words in enumerate(("a line\n", "\x03"), 1):  # the second is Ctrl-C
        if count == 2:
            node.await_attempts(2)
        process.stdin.write(words)
        process.stdin.flush()
    process.communicate(timeout=HUNG_S)
    first, second = node.attempts()
    assert process.returncode == 130 and first["line"] == "a line\n"
    assert second["foreground"] == second["group"] != second["pid"]


# ---- Files, variables, and mistakes


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_run_changes_no_file_and_names_its_variables(node: Node, restarts: str):
    """The user's files, the repository's and temporary files stay unchanged. JAXTRAIN_VERBOSE=1 prints variables."""
    out = node.home / "tmp"
    out.mkdir()
    repo = runs.tree(runs.REPO / "jaxtrain" / "runtime")
    code, stderr = node.run("exit 0", TMPDIR=str(out), JAXTRAIN_RESTARTS=restarts, JAXTRAIN_VERBOSE="1")
    assert code == 0 and f" PYTHONPATH={runs.REPO}" in stderr and (" JAXTRAIN_LAUNCHED=" in stderr) == (restarts == "3")
    assert runs.tree(runs.REPO / "jaxtrain" / "runtime") == repo and not list(out.iterdir())
    assert {p.name for p in node.home.iterdir()} == {"attempts", "plan", "tmp"}


@pytest.mark.parametrize(("line", "name", "value"), [("--no-preflight=1", "", ""), ("", "JAXTRAIN_RESTARTS", "two")])
def test_mistakes_are_refused_and_nothing_is_started(node: Node, line: str, name: str, value: str):
    code, stderr = node.run("exit 0", line=line, **({name: value} if name else {}))
    assert code == 2 and (name or "--no-preflight") in stderr and node.attempts() == []
