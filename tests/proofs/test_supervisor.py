"""The supervisor of training: preflight, restarts, forwarded signals, several nodes. Children and signals are real."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import runs
from run_sh import HUNG_S, git, wait_for
from supervised import HAS_GPU, Supervised, ended, ignored_here, told

from jaxtrain.runtime import provenance
from jaxtrain.runtime.messages import End
from jaxtrain.runtime.variables import EXPECTED

ASKED = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}
# A fake ssh: it logs its arguments, and exits with the number in the host's name.
REACH = """#!/bin/bash
printf '%s\\n' "$*" >>"$HOME/ssh"
[[ $1 != unreachable ]] || exit 255
if [[ $1 == bad* ]]; then exit "${1#bad}"; fi
"""


@pytest.fixture
def node(tmp_path: Path) -> Supervised:
    return Supervised(tmp_path)


@pytest.fixture
def gpus(node: Supervised) -> Supervised:
    node.gets_gpus()
    return node


class Case(NamedTuple):
    """The ends of a run's attempts, and the supervisor's expected reaction."""

    plan: list[str]
    code: int
    started: str  # as Supervised.started
    said: tuple[str, ...] = ()  # without GPUs: the beginning of each line after the first
    env: dict[str, str] = {}
    more: tuple[str, ...] = ()  # further arguments
    gpus: bool = False


NO_RESET = {"JAXTRAIN_RESTARTS": "1", "JAXTRAIN_RESTART_RESET": "0"}
PEER = "exit 75 (restart requested: a process was lost, the time limit, or a signal): "
HANG = "exit 124 (the watchdog ended a hang): "
ABORT = "exit 134 (killed by signal 6, ABRT, as jax ends a run with a lost process): "
CASES = {
    "again until done": Case(
        ["exit 75", "exit 124", "exit 0"],
        *(0, "TTT"),
        (f"{PEER}starting again in 0 s, restart 1 of 3", f"{HANG}starting again in 0 s, restart 2 of 3"),
    ),
    **{f"exit {code}": Case([f"exit {code}"], code, "T") for code in (0, 1, 2, 3, 76, 130)},
    "deaths by a signal": Case(
        ["kill 6", "kill 15", "kill 6"],
        *(75, "TTT"),
        (
            f"{ABORT}starting again",
            "exit 143 (killed by signal 15, TERM, before or after the run): starting again",
            "not started again, after 2 in a row without progress (JAXTRAIN_RESTARTS=2)",
        ),
        {"JAXTRAIN_RESTARTS": "2"},
    ),
    "out of memory": Case(["kill 9"], 137, "T", ("exit 137 (killed by signal 9, KILL: out of memory",)),
    "native fault": Case(["kill 11"], 139, "T", ("exit 139 (killed by signal 11, SEGV: a fault outside Python): not started",)),
    "time over": Case(["exit 124", "note 75"], 75, "TT", (HANG, "not started again, because the time is over")),
    "the budget": Case(["exit 75"] * 4, 75, "TTTT", ("1 of 3", "2 of 3", "3 of 3", "after 3 in a row without progress")),
    "a hang is no progress": Case(["exit 124", "exit 124"], 124, "TT", ("1 of 1", "without progress"), NO_RESET),
    "progress refills the budget": Case(["exit 75"] * 3 + ["exit 0"], 0, "TTTT", ("1 of 1",) * 3, NO_RESET),
    "restarts off": Case(["exit 75"], 75, "T", (), {"JAXTRAIN_RESTARTS": "0"}),
    "a dry run": Case([], 0, "", ("would run: ",), {"JAXTRAIN_DRY_RUN": "1"}, gpus=True),
    # Preflight
    "a fault": Case(["exit 3"], 3, "P", ("give --no-preflight to train anyway",), gpus=True),
    "a wrong config": Case(["exit 2"], 2, "P", gpus=True),
    "a broken preflight": Case(["exit 1"], 1, "P", ("preflight ended with 1",), gpus=True),
    "fit, and looked at again": Case(["exit 0", "exit 75", "exit 0", "exit 0"], 0, "PTpT", gpus=True),
    "a fault before a restart": Case(["exit 0", "exit 124", "exit 3"], 3, "PTp", gpus=True),
    "a preflight loses a process": Case(
        ["exit 75", "exit 0", "exit 75", "exit 75", "exit 0", "exit 0"], 0, "PPTppT", ("restart 3 of 3",), gpus=True
    ),
    "a preflight aborts": Case(["kill 6", "exit 0", "exit 75", "kill 6", "exit 0", "exit 0"], 0, "PPTppT", gpus=True),
    "preflight switched off": Case(["exit 0"], 0, "T", more=("--no-preflight",), gpus=True),
    "for CPUs": Case(["exit 0"], 0, "T", env={"JAX_PLATFORMS": "cpu"}, gpus=True),
    "GPUs hidden": Case(["exit 0"], 0, "T", env={"CUDA_VISIBLE_DEVICES": ""}, gpus=True),
}


@pytest.mark.parametrize("name", CASES)
def test_after_an_end(node: Supervised, name: str):
    case = CASES[name]
    if case.gpus:
        node.gets_gpus()
    node.plan(*case.plan)
    env = ({} if case.gpus or not HAS_GPU else {"JAX_PLATFORMS": "cpu"}) | case.env
    done = node.run("main", "--config=x.py", *case.more, **env)
    assert (done.returncode, node.started()) == (case.code, case.started), done.stderr
    if case.gpus:
        assert all(words in done.stderr for words in case.said), done.stderr
    else:
        said = told(done.stderr).splitlines()
        assert len(said) == len(case.said), done.stderr
        assert all(words in line for line, words in zip(said, case.said, strict=True)), done.stderr


@pytest.mark.parametrize(("left_s", "code", "started"), [(500, 75, "T"), (5000, 0, "TT")])
def test_the_last_ten_minutes_of_a_job(node: Supervised, left_s: int, code: int, started: str):
    end = str(int(time.time()) + left_s)
    done = node.train("exit 75", "exit 0", JAX_PLATFORMS="cpu", SLURM_JOB_END_TIME=end)
    assert (done.returncode, node.started()) == (code, started)
    assert (f"in the last ten minutes of the job (SLURM_JOB_END_TIME={end})" in done.stderr) == (code == 75)


def test_attempts_know_their_circumstances(gpus: Supervised):
    """Attempts get preflight's findings, the number of the restart, and the time of the first start."""
    done = gpus.train(*["exit 0", "exit 75"] * 2, "exit 0", "exit 0", JAXTRAIN_RESTART_WAIT="1")
    assert done.returncode == 0 and gpus.started() == "PTpTpT", done.stderr
    look, *others = gpus.attempts()
    trained = others[::2]
    assert [a["restart"] for a in trained] == [None, "1", "2"]
    assert len({a["launched"] for a in trained}) == 1
    assert {tuple(a["arguments"]) for a in trained} == {("jaxtrain.main", "--config=x.py")}
    assert {a["host_class"] for a in trained} == {"8 NVIDIA H200"}
    (found,) = {a["preflight"] for a in trained}
    assert look["arguments"] == ["jaxtrain.preflight", "--config=x.py", f"--json={found}"] and look["preflight"] is None
    assert not Path(found).parent.exists(), "the supervisor removes its folder"


def test_variables_of_another_supervisor_are_dropped(node: Supervised):
    given = {"JAXTRAIN_RESTART": "7", "JAXTRAIN_LAUNCHED": "8", "JAXTRAIN_PREFLIGHT": "/theirs"}
    node.train("exit 0", JAXTRAIN_RESTARTS="0", JAX_PLATFORMS="cpu", **given)
    (attempt,) = node.attempts()
    assert [attempt[name] for name in ("restart", "launched", "preflight")] == [None] * 3
    # A node reached by ssh gets the first node's variables.
    commit, dirty, _ = provenance.checkout(runs.REPO)
    node.train("exit 0", JAXTRAIN_RESTARTS="0", JAX_PLATFORMS="cpu", JAXTRAIN_EXPECTED=f"{commit} {dirty}", **given)
    (attempt,) = node.attempts()
    assert [attempt[name] for name in ("restart", "launched", "preflight")] == ["7", "8", None]


@pytest.mark.parametrize("question", ["--explain", "--help", "--replay=bundle"])
def test_questions_are_answered_at_once_and_once(gpus: Supervised, question: str):
    gpus.plan("exit 75")
    process = subprocess.Popen(gpus.command("main", "--config=x.py", question), env=gpus.environ, stderr=subprocess.PIPE)
    _, stderr = process.communicate(timeout=HUNG_S)
    assert (process.returncode, stderr) == (75, b"")
    assert [a["pid"] for a in gpus.attempts()] == [process.pid]


# ---- Signals


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("to", ["supervisor", "group"])
def test_a_signal_ends_the_supervisor_with_the_run(node: Supervised, name: str, to: str):
    process = node.begin(f"until {ASKED[name]}", JAX_PLATFORMS="cpu")
    attempt = node.await_attempts(1)
    assert attempt["group"] == process.pid
    (os.killpg if to == "group" else os.kill)(process.pid, signal.Signals[name])
    code, stderr = ended(process)
    assert code == ASKED[name] and len(node.attempts()) == 1, stderr
    # To the group: the process's own signal and the forwarded one may merge, come separately, or come after its end.
    assert node.signals() in ([[name]] if to == "supervisor" else [[name], [name, name]])
    assert (f"because run.sh was sent {name[3:]}" in stderr) == (ASKED[name] == 75)


def test_each_signal_is_passed_on_once_and_the_code_is_the_runs(node: Supervised):
    process = node.begin("until 0 2", JAX_PLATFORMS="cpu")
    node.await_attempts(1)
    sent = ["SIGUSR2", "SIGUSR2", "SIGTERM", "SIGTERM"]  # two traces, a stop, and a second stop to leave at once
    for count, name in enumerate(sent, 1):
        process.send_signal(signal.Signals[name])
        wait_for(lambda count=count: len(node.signals()) >= count or process.poll() is not None)
    assert ended(process) == (0, "") and node.signals() == sent


def test_a_run_that_is_signalled_alone_or_asked_for_a_trace_is_started_again(node: Supervised):
    process = node.begin("until 75", "traced 75", "exit 0", JAX_PLATFORMS="cpu")
    os.kill(node.await_attempts(1)["pid"], signal.SIGTERM)
    node.await_attempts(2)
    process.send_signal(signal.SIGUSR2)
    assert ended(process)[0] == 0 and len(node.attempts()) == 3


def test_a_run_does_not_outlive_the_supervisor(node: Supervised):
    process = node.begin("until 75", JAX_PLATFORMS="cpu")
    attempt = node.await_attempts(1)
    process.send_signal(signal.SIGHUP)
    assert ended(process) == (129, "run.sh: exit 129 (killed by signal 1, HUP): not started again\n")
    with pytest.raises(ProcessLookupError):
        os.kill(attempt["pid"], 0)


@pytest.mark.parametrize(("name", "code"), ASKED.items())
def test_a_signal_between_two_attempts_ends_at_once(node: Supervised, name: str, code: int):
    """A stop signal ends the pause of eleven days before the second attempt. SIGUSR2, which requests a trace, does not."""
    process = node.begin("exit 124", JAXTRAIN_RESTART_WAIT="999999", JAX_PLATFORMS="cpu")
    assert process.stderr
    introduction = "".join(process.stderr.readline() for _ in range(2))
    assert "starting again in 999999 s" in told(introduction)
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.Signals[name])
    _, rest = process.communicate(timeout=HUNG_S)
    assert (process.returncode, rest) == (code, f"run.sh: not started again, because run.sh was sent {name[3:]}\n")


def test_a_trace_in_a_pause_leaves_it_as_it_is(node: Supervised):
    process = node.begin("exit 124", "exit 0", JAXTRAIN_RESTART_WAIT="1", JAX_PLATFORMS="cpu")
    assert process.stderr
    said = "".join(process.stderr.readline() for _ in range(2))
    process.send_signal(signal.SIGUSR2)
    _, rest = process.communicate(timeout=HUNG_S)
    assert (process.returncode, node.started()) == (0, "TT"), said + rest


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_signal_during_preflight_ends_it(gpus: Supervised, restarts: str):
    process = gpus.begin("until 130", JAXTRAIN_RESTARTS=restarts)
    gpus.await_attempts(1)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=HUNG_S)
    assert (process.returncode, gpus.signals(), gpus.started()) == (75, ["SIGTERM"], "P")
    assert "not started, because run.sh was sent TERM" in stderr


def test_a_signal_before_the_first_attempt_ends_the_supervisor(node: Supervised):
    """The signal comes while the supervisor runs nvidia-smi, before the first attempt."""
    asks = node.cwd / "asks"
    (node.bin / "nvidia-smi").write_text('#!/bin/bash\ntouch "$HOME/asks"\nuntil [[ -e $HOME/go ]]; do sleep 0.01; done\n')
    if HAS_GPU:
        pytest.skip("the driver's files name the GPUs, so nvidia-smi is not asked")
    for restarts in ("0", "3"):
        process = node.begin("exit 0", JAXTRAIN_RESTARTS=restarts)
        wait_for(asks.exists)
        process.send_signal(signal.SIGTERM)
        (node.cwd / "go").touch()
        code, stderr = ended(process)
        assert (code, node.attempts()) == (75, []) and "not started, because run.sh was sent TERM" in stderr
        asks.unlink()
        (node.cwd / "go").unlink()


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_run_finds_signals_as_the_supervisor_found_them(node: Supervised, restarts: str):
    process = node.begin("exit 0", JAX_PLATFORMS="cpu", JAXTRAIN_RESTARTS=restarts)
    assert ended(process)[0] == 0
    handlers = node.attempts()[0]["at_birth"]
    if "SIGINT" not in ignored_here():
        assert "default_int_handler" in handlers.pop("SIGINT")
    if restarts != "0":
        assert handlers.pop("SIGUSR2") == str(signal.SIG_IGN)  # no trace can be taken yet
    ignored = ignored_here()
    assert handlers == {name: str(signal.SIG_IGN if name in ignored else signal.SIG_DFL) for name in handlers}


def test_signals_ignored_from_the_start_stay_ignored(node: Supervised):
    """nohup starts a process with SIGHUP ignored. Attempts inherit the ignored SIGHUP and an ignored SIGINT."""
    node.plan("exit 0")
    command = ["bash", "-c", 'trap "" HUP INT; exec "$@"', "bash", *node.command("main")]
    subprocess.run(command, env=node.environ | {"JAX_PLATFORMS": "cpu"}, check=True, stdin=subprocess.DEVNULL)
    handlers = node.attempts()[0]["at_birth"]
    assert handlers["SIGHUP"] == handlers["SIGINT"] == str(signal.SIG_IGN) != handlers["SIGTERM"]


def test_a_terminal_stays_the_runs(node: Supervised):
    node.plan("read 75", "until 130")
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    process = subprocess.Popen(
        [sys.executable, "-c", spawn, *node.command("main")],
        env=node.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=node.cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
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


def test_switched_off_the_trainer_takes_the_supervisors_place(node: Supervised):
    process = node.begin("exit 75", JAXTRAIN_RESTARTS="0", JAX_PLATFORMS="cpu")
    assert ended(process) == (75, "")
    assert [a["pid"] for a in node.attempts()] == [process.pid]


def test_switched_off_after_preflight_too(gpus: Supervised):
    """Without restarts, the trainer replaces the supervisor after preflight. The folder with preflight's findings stays for the
    trainer.
    """
    process = gpus.begin("exit 0", "exit 75", JAXTRAIN_RESTARTS="0", TMPDIR=str(gpus.cwd))
    assert ended(process) == (75, "") and gpus.started() == "PT"
    look, trained = gpus.attempts()
    assert trained["pid"] == process.pid != look["pid"]
    assert trained["preflight"] and Path(trained["preflight"]).parent.exists()


# ---- Provenance, and the files that a run changes


def test_the_state_of_a_checkout(tmp_path: Path):
    (tmp_path / "jaxtrain").mkdir()
    (tmp_path / "run.sh").touch()
    (tmp_path / "jaxtrain/main.py").touch()
    assert provenance.checkout(tmp_path) == ("", "", "this is no git checkout")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "jaxtrain")
    git(tmp_path, "commit", "-qm", "first")
    assert provenance.checkout(tmp_path) == ("", "", "this is no git checkout"), "a repository of something else"
    git(tmp_path, "add", "run.sh")
    git(tmp_path, "commit", "-qm", "second")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert provenance.checkout(tmp_path) == (commit, "no", "unchanged")
    new = tmp_path / "jaxtrain/new.py"
    new.write_text("x = 1\n")  # an untracked file may be imported by a run
    assert provenance.checkout(tmp_path) == (commit, "yes", "changed since")
    new.unlink()
    (tmp_path / "notes.txt").touch()
    assert provenance.checkout(tmp_path) == (commit, "no", "unchanged")
    (tmp_path / "jaxtrain/main.py").write_text("x = 1\n")
    assert provenance.checkout(tmp_path) == (commit, "yes", "changed since")


def test_another_state_of_the_code_is_refused():
    commit, dirty, _ = provenance.checkout(runs.REPO)
    assert provenance.provenance(runs.REPO, ["A", "A", "B"], {EXPECTED: f"{commit} {dirty}"}) == {
        "JAXTRAIN_COMMIT": commit,
        "JAXTRAIN_DIRTY": dirty,
        "JAXTRAIN_HOST_CLASS": "2 A+1 B",
    }
    with pytest.raises(End, match=f"this node has commit {commit}.*to the same state on all nodes") as end:
        provenance.provenance(runs.REPO, [], {EXPECTED: f"other {dirty}"})
    assert end.value.code == 2


def test_a_command_that_fails_or_hangs_gives_no_answer():
    assert provenance.ask("echo", "a") == "a\n"
    assert provenance.ask("bash", "-c", "echo a; exit 1") is None
    assert provenance.ask("no-such-program") is None
    assert provenance.ask("sleep", "1000", timeout_s=0.1) is None


def test_a_run_changes_no_file_and_names_its_variables(node: Supervised):
    """The user's files, the repository's and temporary files stay unchanged. JAXTRAIN_VERBOSE=1 prints the variables that
    run.sh sets.
    """
    home, out = node.cwd, node.cwd / "tmp"
    out.mkdir()
    before, repo = {p.name for p in home.iterdir()}, runs.tree(runs.REPO / "jaxtrain" / "runtime")
    given = {"JAX_PLATFORMS": "cpu", "TMPDIR": str(out)}
    quiet = node.train("exit 0", **given)
    assert told(quiet.stderr) == ""
    done = node.train("exit 0", JAXTRAIN_VERBOSE="1", **given)
    assert done.returncode == 0, done.stderr
    assert runs.tree(runs.REPO / "jaxtrain" / "runtime") == repo and not list(out.iterdir())
    assert {p.name for p in home.iterdir()} - before == {"attempts", "plan"}
    node.train("exit 0", JAXTRAIN_RESTARTS="0", **given)
    assert not list(out.iterdir())
    (line,) = told(done.stderr).splitlines()
    assert line.startswith(f"run.sh: sets PYTHONPATH={runs.REPO} ")
    assert all(f" {name}=" in line for name in ("JAXTRAIN_HOST_CLASS", "JAXTRAIN_LAUNCHED", "JAXTRAIN_NOTE"))


# ---- Several nodes


def test_mistakes_are_refused_and_nothing_is_started(node: Supervised):
    node.plan("exit 0")
    for arguments, env in ((["--nodes=a"], {}), (["--no-preflight=1"], {}), ([], {"JAXTRAIN_RESTARTS": "two"})):
        done = node.run("main", *arguments, **env)
        assert done.returncode == 2 and " Fix: " in done.stderr and node.attempts() == []


def test_a_mistake_in_the_config_is_told_before_a_node_is_reached(node: Supervised):
    env = node.reaches(REACH)
    node.plan("exit 2")
    done = node.run("main", "--config=x.py", "--nodes=here,there", **env)
    assert done.returncode == 2 and len(node.attempts()) == 1 and "--explain" in node.attempts()[0]["arguments"]
    assert not (node.cwd / "ssh").exists()


@pytest.mark.parametrize(("ssh", "why"), [("no-such-program -n", "names no program"), ("ssh '", "cannot be read")])
def test_a_program_that_reaches_no_node_is_refused(node: Supervised, ssh: str, why: str):
    node.plan("exit 0")
    for command in ("main", "preflight"):
        done = node.run(command, "--nodes=here,there", JAXTRAIN_SSH=ssh)
        assert done.returncode == 2 and f"JAXTRAIN_SSH = {ssh}: {why}" in done.stderr and node.attempts() == []


def test_a_dry_run_of_several_nodes(node: Supervised):
    env = node.reaches(REACH)
    for command in ("main", "preflight"):
        done = node.run(command, "--nodes=here,there", "--a=b c", JAXTRAIN_DRY_RUN="1", **env)
        place = "--coordinator=here:12321 --num-processes=2 --process-id=0"
        assert done.returncode == 0 and f"jaxtrain.{command} '--a=b c' {place}\n" in done.stderr, done.stderr
        assert "would run it on there too, with --process-id=1" in done.stderr
    for arguments in (("preflight",), ("main", "--explain")):
        assert "would run: " in node.run(*arguments, JAXTRAIN_DRY_RUN="1").stderr
    assert node.attempts() == [] and not (node.cwd / "ssh").exists()


def test_a_signal_during_the_look_at_the_config_ends_the_supervisor(node: Supervised):
    env = node.reaches(REACH)
    process = node.begin("until 130", arguments=["--nodes=here,there"], JAX_PLATFORMS="cpu", **env)
    node.await_attempts(1)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=HUNG_S)
    assert process.returncode == 75 and "not started, because run.sh was sent TERM" in stderr
    assert not (node.cwd / "ssh").exists()


def test_preflight_on_several_nodes(node: Supervised):
    """`run.sh preflight` starts a command with its own --process-id on each node, and exits with the code of the node that
    fails.
    """
    env = node.reaches(REACH)
    node.plan("exit 0")
    done = node.run("preflight", "--no-measure", "--nodes=here,bad3", **env)
    assert done.returncode == 3, done.stderr
    (here,) = node.attempts()
    common = ["--no-measure", "--coordinator=here:12321", "--num-processes=2"]
    assert here["arguments"] == ["jaxtrain.preflight", *common, "--process-id=0"]
    (there,) = (node.cwd / "ssh").read_text().splitlines()
    assert there.endswith(f"{runs.REPO}/run.sh preflight {' '.join(common)} --process-id=1")


def test_preflight_on_one_node_takes_the_supervisors_place(node: Supervised):
    node.plan("exit 3")
    process = subprocess.Popen(node.command("preflight", "--no-measure"), env=node.environ, stderr=subprocess.PIPE)
    assert process.communicate(timeout=HUNG_S)[1] == b"" and process.returncode == 3
    assert [(a["pid"], a["arguments"]) for a in node.attempts()] == [(process.pid, ["jaxtrain.preflight", "--no-measure"])]


@pytest.mark.parametrize(
    ("there", "here", "code", "said"),
    [
        # the local process, which waits for that node, is ended
        ("unreachable", "until 75", 75, "unreachable: ssh could not reach it"),
        ("unreachable", "exit 0", 75, "unreachable: ssh could not reach it"),
        ("bad2", "exit 75", 2, "bad2 ended with 2"),  # a refusal is not tried again
        ("bad3", "exit 75", 3, "bad3 ended with 3"),
        # the other node's hang decides, although this node left for a lost peer
        ("bad124", "exit 75", 124, "bad124 ended with 124"),
        ("bad76", "exit 76", 76, ""),
        ("bad1", "exit 0", 1, "bad1 ended with 1"),
        ("bad0", "exit 0", 0, ""),
    ],
)
def test_how_another_node_ended(node: Supervised, there: str, here: str, code: int, said: str):
    env = node.reaches(REACH)
    node.plan("exit 0", here)  # the first process answers --explain
    done = node.run("main", f"--nodes=here,{there}", JAXTRAIN_RESTARTS="0", JAX_PLATFORMS="cpu", **env)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert (" ended with " in done.stderr) == ("ended" in said)


def test_a_process_that_waits_for_a_failed_node_is_ended_when_its_time_is_over(node: Supervised):
    node.patience_s = 0.3
    env = node.reaches(REACH)
    node.plan("exit 0", "until 143")
    done = node.run("main", "--nodes=here,bad1", JAXTRAIN_RESTARTS="0", JAX_PLATFORMS="cpu", **env)
    assert done.returncode == 1 and node.signals() == ["SIGTERM"], done.stderr


def test_a_node_that_does_not_end_is_left_alone(node: Supervised):
    node.patience_s = 0.3
    env = node.reaches('#!/bin/bash\necho $$ >>"$HOME/ssh"\nexec sleep 1000\n')
    node.plan("exit 0", "exit 0")
    done = node.run("main", "--nodes=here,there", JAX_PLATFORMS="cpu", **env)
    assert done.returncode == 0 and "there had not ended" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((node.cwd / "ssh").read_text()), 0)


def test_a_signal_to_the_process_group_keeps_the_runs_code(node: Supervised):
    """systemd, or `kill -- -PGID`, also sends the signal to ssh, which ignores it and waits for the other node's process."""
    env = node.reaches('#!/bin/bash\ntouch "$HOME/ssh"\nuntil [[ -s $HOME/signals ]]; do sleep 0.01 || :; done\nexit 75\n')
    arguments = ["--config=x.py", "--nodes=here,there"]
    process = node.begin("exit 0", "until 75", arguments=arguments, JAX_PLATFORMS="cpu", **env)
    node.await_attempts(2)
    wait_for((node.cwd / "ssh").exists)
    os.killpg(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=HUNG_S)
    assert process.returncode == 75 and "because run.sh was sent TERM" in stderr, stderr
    assert "ended with" not in stderr, "ssh waits for the end over there"


def test_other_nodes_get_their_number_and_no_other_variable(node: Supervised):
    env = node.reaches(REACH)
    node.plan("exit 0", "exit 75", "exit 0")
    given = {"JAX_PLATFORMS": "cpu", "JAXTRAIN_CUDA": "12", "JAXTRAIN_NOTE": "/mine", "JAXTRAIN_RESTARTS": "1"}
    node.run("main", "--config=a b.py", "--nodes=here:99,bad0,ada@bad0.lan", **given, **env)
    arguments = node.attempts()[1]["arguments"]
    assert arguments[2:] == ["--coordinator=here:99", "--num-processes=3", "--process-id=0"]
    asked = (node.cwd / "ssh").read_text().splitlines()
    assert sorted(line.split()[-1] for line in asked) == ["--process-id=1"] * 2 + ["--process-id=2"] * 2
    launched = node.attempts()[1]["launched"]
    for i, line in enumerate(asked):
        assert f"cd {node.cwd} && env JAXTRAIN_RESTARTS=0 JAXTRAIN_EXPECTED=" in line and " JAXTRAIN_CUDA=12 " in line
        assert f" JAXTRAIN_LAUNCHED={launched} " in line and ("JAXTRAIN_RESTART=1" in line) == (i >= 2)
        assert "main --no-preflight '--config=a b.py' --coordinator=here:99 --num-processes=3" in line and "NOTE" not in line
