"""The supervisor of training: preflight, restarts, forwarded signals, several nodes. Children and signals are real.

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
from run_sh import HAS_GPU, HUNG_S, PATH, git, script, wait_for

from jaxtrain.runtime import provenance
from jaxtrain.runtime.messages import End
from jaxtrain.runtime.variables import EXPECTED

ATTEMPT = runs.REPO / "tests" / "attempt.py"
NVIDIA_SMI = '#!/bin/bash\n[[ $1 == --query-gpu=name ]] && for i in 0 1 2 3 4 5 6 7; do echo "NVIDIA H200"; done\n'
# A fake ssh: it logs its arguments, and exits with the number in the host's name.
REACH = """#!/bin/bash
printf '%s\\n' "$*" >>"$HOME/ssh"
[[ $1 != unreachable ]] || exit 255
if [[ $1 == bad* ]]; then exit "${1#bad}"; fi
"""
# The command line of jaxtrain.commands.supervise, with tests/attempt.py in place of the programs that it starts.
SUPERVISE = """
import sys
from jaxtrain.commands import supervise
from jaxtrain.runtime import supervisor

class Planned(supervisor.Supervisor):
    def __init__(self, options, environ):
        super().__init__(options, environ, (sys.executable, "-IS", sys.argv[1]), patience_s=float(sys.argv[2]))

supervise.Supervisor = Planned
sys.exit(supervise.main(sys.argv[3:]))
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
        self.patience_s = 60.0
        self.ssh = self.home / "ssh"  # written by a fake of ssh
        self.environ = {"PATH": f"{self.bin}:{PATH}", "HOME": str(self.home), "PYTHONPATH": str(runs.REPO)}
        self.environ |= {"JAXTRAIN_RESTART_WAIT": "0", "JAX_PLATFORMS": "cpu"}
        script(self.bin / "nvidia-smi", "#!/bin/bash\nexit 9\n")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", SUPERVISE, str(ATTEMPT), str(self.patience_s), *arguments]

    def reaches(self, text: str = REACH) -> None:
        """Write a fake of ssh."""
        script(self.bin / "reach", text)
        self.environ["JAXTRAIN_SSH"] = str(self.bin / "reach")

    def plan(self, *lines: str) -> None:
        (self.home / "plan").write_text("\n".join(lines) + "\n")
        (self.home / "attempts").unlink(missing_ok=True)

    def begin(self, *lines: str, line: str = "main --config=x.py", **environ: str) -> subprocess.Popen[str]:
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
    """A node with eight GPUs, by a fake nvidia-smi."""
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
    "a dry run": Case([], 0, "", {"JAXTRAIN_DRY_RUN": "1"}),
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
    assert gpus.run("exit 0", line="main --no-preflight")[0] == 0 and gpus.started() == "T"
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
    for name in ("launched", "arguments", "commit", "preflight"):
        assert first[name] == second[name] is not None
    assert first["arguments"] == ["jaxtrain", "main", "--config=x.py"] and "8 NVIDIA H200" in stderr
    found = first["preflight"]
    assert look["arguments"] == ["jaxtrain", "preflight", "--config=x.py", f"--json={found}"] and look["preflight"] is None
    assert not Path(found).parent.exists(), "the supervisor removes its folder"


def test_variables_of_another_supervisor_are_dropped(node: Node):
    """But a node that was reached by ssh gets the first node's variables."""
    given = {"JAXTRAIN_RESTART": "7", "JAXTRAIN_LAUNCHED": "8", "JAXTRAIN_PREFLIGHT": "/theirs", "JAXTRAIN_RESTARTS": "0"}
    commit, dirty, _ = provenance.checkout(runs.REPO)
    for more, expected in (({}, [None] * 3), ({EXPECTED: f"{commit} {dirty}"}, ["7", "8", None])):
        node.run("exit 0", **given, **more)
        (attempt,) = node.attempts()
        assert [attempt[name] for name in ("restart", "launched", "preflight")] == expected


@pytest.mark.parametrize("line", ["main --explain", "main --help", "main --replay=a", "preflight --no-measure", "main"])
def test_a_command_takes_the_supervisors_place(gpus: Node, line: str):
    """Questions, the preflight of one node, and training without restarts and preflight. A question gets no other word."""
    switched_off = {"JAXTRAIN_RESTARTS": "0", "JAX_PLATFORMS": "cpu"} if line == "main" else {}
    process = gpus.begin("exit 75", line=line, **switched_off)
    _, stderr = process.communicate(timeout=HUNG_S)
    assert process.returncode == 75 and (stderr == "" or switched_off)
    assert [a["pid"] for a in gpus.attempts()] == [process.pid]


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
    """The pause before the second attempt would take eleven days. Its line is the second on stderr."""
    process = node.begin("exit 124", JAXTRAIN_RESTART_WAIT="999999")
    assert process.stderr
    assert "999999" in "".join(process.stderr.readline() for _ in range(2))
    process.send_signal(signal.Signals[name])
    assert ended(process) == code and len(node.attempts()) == 1


def test_a_trace_in_a_pause_leaves_it_as_it_is(node: Node):
    process = node.begin("exit 124", "exit 0", JAXTRAIN_RESTART_WAIT="1")
    assert process.stderr
    said = "".join(process.stderr.readline() for _ in range(2))
    process.send_signal(signal.SIGUSR2)
    assert (ended(process), node.started()) == (0, "TT"), said


@pytest.mark.parametrize(("line", "restarts"), [("main", "0"), ("main", "3"), ("main --nodes=here,there", "3")])
def test_a_signal_before_training_ends_it(gpus: Node, line: str, restarts: str):
    """The first process is preflight, or on several nodes a look at the config."""
    gpus.reaches()
    process = gpus.begin("until 130", line=line, JAXTRAIN_RESTARTS=restarts)
    attempt = gpus.await_attempts(1)
    process.send_signal(signal.SIGTERM)
    assert (ended(process), gpus.signals(), len(gpus.attempts())) == (75, ["SIGTERM"], 1)
    assert ("--explain" in attempt["arguments"]) == ("nodes" in line) and not gpus.ssh.exists()


@pytest.mark.skipif(HAS_GPU, reason="the driver's files name the GPUs, so nvidia-smi is not asked")
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
    command = ["bash", "-c", 'trap "" HUP INT; exec "$@"', "bash", *node.command("main")]
    subprocess.run(command, env=node.environ, check=True, stdin=subprocess.DEVNULL, timeout=HUNG_S)
    handlers = node.attempts()[0]["at_birth"]
    assert handlers["SIGHUP"] == handlers["SIGINT"] == str(signal.SIG_IGN) != handlers["SIGTERM"]


def test_a_terminal_stays_the_runs(node: Node):
    node.plan("read 75", "until 130")
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    command, pipe = [sys.executable, "-c", spawn, *node.command("main")], subprocess.PIPE
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


# ---- Provenance, and the files that a run changes


def test_the_state_of_a_checkout(tmp_path: Path):
    (tmp_path / "jaxtrain").mkdir()
    (tmp_path / "run.sh").touch()
    (tmp_path / "jaxtrain/main.py").touch()
    assert provenance.checkout(tmp_path)[:2] == ("", "")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "jaxtrain")
    git(tmp_path, "commit", "-qm", "first")
    assert provenance.checkout(tmp_path)[:2] == ("", ""), "a repository of something else"
    git(tmp_path, "add", "run.sh")
    git(tmp_path, "commit", "-qm", "second")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.txt").touch()
    assert provenance.checkout(tmp_path)[:2] == (commit, "no")
    new = tmp_path / "jaxtrain/new.py"
    new.write_text("x = 1\n")  # an untracked file may be imported by a run
    assert provenance.checkout(tmp_path)[:2] == (commit, "yes")
    new.unlink()
    (tmp_path / "jaxtrain/main.py").write_text("x = 1\n")
    assert provenance.checkout(tmp_path)[:2] == (commit, "yes")


def test_another_state_of_the_code_is_refused():
    commit, dirty, _ = provenance.checkout(runs.REPO)
    found = {"JAXTRAIN_COMMIT": commit, "JAXTRAIN_DIRTY": dirty}
    assert provenance.provenance(runs.REPO, ["A", "A", "B"], {EXPECTED: f"{commit} {dirty}"}) == found
    with pytest.raises(End, match=commit) as end:
        provenance.provenance(runs.REPO, [], {EXPECTED: f"other {dirty}"})
    assert end.value.code == 2


def test_a_command_that_fails_or_hangs_gives_no_answer():
    assert provenance.ask("echo", "a") == "a\n"
    assert provenance.ask("bash", "-c", "echo a; exit 1") is None
    assert provenance.ask("no-such-program") is None
    assert provenance.ask("sleep", "1000", timeout_s=0.1) is None


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_run_changes_no_file_and_names_its_variables(node: Node, restarts: str):
    """The user's files, the repository's and temporary files stay unchanged. JAXTRAIN_VERBOSE=1 prints variables."""
    out = node.home / "tmp"
    out.mkdir()
    repo = runs.tree(runs.REPO / "jaxtrain" / "runtime")
    code, stderr = node.run("exit 0", TMPDIR=str(out), JAXTRAIN_RESTARTS=restarts, JAXTRAIN_VERBOSE="1")
    assert code == 0 and " JAXTRAIN_COMMIT=" in stderr, stderr
    assert runs.tree(runs.REPO / "jaxtrain" / "runtime") == repo and not list(out.iterdir())
    assert {p.name for p in node.home.iterdir()} == {"attempts", "plan", "tmp"}


# ---- Several nodes


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("main --nodes=a", "", ""),
        ("main --no-preflight=1", "", ""),
        ("main", "JAXTRAIN_RESTARTS", "two"),
        ("main --nodes=here,there", "JAXTRAIN_SSH", "no-such-program -n"),
        ("preflight --nodes=here,there", "JAXTRAIN_SSH", "ssh '"),
    ],
)
def test_mistakes_are_refused_and_nothing_is_started(node: Node, line: str, name: str, value: str):
    code, stderr = node.run("exit 0", line=line, **({name: value} if name else {}))
    assert code == 2 and (name or line.split()[-1].partition("=")[0]) in stderr and node.attempts() == []


def test_a_mistake_in_the_config_is_told_before_a_node_is_reached(node: Node):
    node.reaches()
    assert node.run("exit 2", line="main --nodes=here,there")[0] == 2
    assert len(node.attempts()) == 1 and "--explain" in node.attempts()[0]["arguments"] and not node.ssh.exists()


@pytest.mark.parametrize("command", ["main", "preflight"])
def test_a_dry_run_of_several_nodes(node: Node, command: str):
    node.reaches()
    code, stderr = node.run("exit 0", line=f"{command} --nodes=here,there '--a=b c'", JAXTRAIN_DRY_RUN="1")
    place = "--coordinator=here:12321 --num-processes=2 --process-id=0"
    assert code == 0 and f"jaxtrain {command} '--a=b c' {place}\n" in stderr, stderr
    assert "--process-id=1" in stderr and node.attempts() == [] and not node.ssh.exists()


def test_preflight_on_several_nodes(node: Node):
    """Each node runs it with its own --process-id. The exit code is that of the node that fails."""
    node.reaches()
    assert node.run("exit 0", line="preflight --no-measure --nodes=here,bad3")[0] == 3
    (here,) = node.attempts()
    common = ["--no-measure", "--coordinator=here:12321", "--num-processes=2"]
    assert here["arguments"] == ["jaxtrain", "preflight", *common, "--process-id=0"]
    assert node.ssh.read_text().endswith(f"{runs.REPO}/run.sh preflight {' '.join(common)} --process-id=1\n")


@pytest.mark.parametrize(
    ("there", "here", "code"),
    [
        ("unreachable", "until 75", 75),  # the local process, which waits for that node, is ended
        ("bad2", "exit 75", 2),  # a refusal is not tried again
        ("bad1", "exit 0", 1),
        ("bad0", "exit 0", 0),
    ],
)
def test_how_another_node_ended(node: Node, there: str, here: str, code: int):
    node.reaches()
    # the first process answers --explain
    assert node.run("exit 0", here, line=f"main --nodes=here,{there}", JAXTRAIN_RESTARTS="0")[0] == code


def test_a_process_that_waits_for_a_failed_node_is_ended_when_its_time_is_over(node: Node):
    node.patience_s = 0.3
    # the node fails once the local process listens to signals
    node.reaches('#!/bin/bash\nuntil (($(wc -l <"$HOME/attempts") == 2)); do sleep 0.01; done\nexit 1\n')
    assert node.run("exit 0", "until 143", line="main --nodes=here,there", JAXTRAIN_RESTARTS="0")[0] == 1
    assert node.signals() == ["SIGTERM"]


def test_a_node_that_does_not_end_is_left_alone(node: Node):
    node.patience_s = 0.3
    node.reaches('#!/bin/bash\necho $$ >>"$HOME/ssh"\nexec sleep 1000\n')
    assert node.run("exit 0", "after 0 ssh", line="main --nodes=here,there")[0] == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(node.ssh.read_text()), 0)


def test_a_signal_to_the_process_group_keeps_the_runs_code(node: Node):
    """systemd, or `kill -- -PGID`, also sends the signal to ssh, which ignores it and waits for the other node's process."""
    node.reaches(
        '#!/bin/bash\necho began >>"$HOME/ssh"\nuntil [[ -s $HOME/signals ]]; do sleep 0.01 || :; done\n'
        'echo ended >>"$HOME/ssh"\nexit 75\n'
    )
    process = node.begin("exit 0", "until 75", line="main --nodes=here,there")
    node.await_attempts(2)
    wait_for(node.ssh.exists)
    os.killpg(process.pid, signal.SIGTERM)
    assert ended(process) == 75 and node.ssh.read_text().split() == ["began", "ended"]


def test_other_nodes_get_their_number_and_no_other_variable(node: Node):
    node.reaches()
    given = {"JAXTRAIN_CUDA": "12", "JAXTRAIN_NOTE": "/mine", "JAXTRAIN_RESTARTS": "1"}
    node.run("exit 0", "exit 75", "exit 0", line="main '--config=a b.py' --nodes=here:99,bad0,ada@bad0.lan", **given)
    attempt = node.attempts()[1]
    assert attempt["arguments"][3:] == ["--coordinator=here:99", "--num-processes=3", "--process-id=0"]
    asked = node.ssh.read_text().splitlines()
    assert sorted(line.split()[-1] for line in asked) == ["--process-id=1"] * 2 + ["--process-id=2"] * 2
    for i, line in enumerate(asked):
        assert f"cd {node.home} && env JAXTRAIN_RESTARTS=0 JAXTRAIN_EXPECTED=" in line and " JAXTRAIN_CUDA=12 " in line
        assert f" JAXTRAIN_LAUNCHED={attempt['launched']} " in line and ("JAXTRAIN_RESTART=1" in line) == (i >= 2)
        assert "main --no-preflight '--config=a b.py' --coordinator=here:99 --num-processes=3" in line and "NOTE" not in line
