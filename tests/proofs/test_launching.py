"""run.sh trains: preflight first, again after an end that asks for it, signals passed on, and several machines.

What it starts is a stand-in that does what the next line of a file says, and the clock is one too.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import runs
from run_sh import (
    GPUS,
    HAS_GPU,
    HUNG_S,
    PATH,
    SSH,
    Launcher,
    copy_launcher,
    ended,
    git,
    hear_hangups,
    restarts_work,
    script,
    told,
    wait_for,
)

pytestmark = pytest.mark.skipif(not restarts_work(), reason="run.sh restarts nothing in a bash before 4.3")

ASKED = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that is installed, for CUDA. No test changes it."""
    folder = tmp_path_factory.mktemp("installed")
    made = Launcher(copy_launcher(folder / "a folder" / "jaxtrain"), folder)
    assert made.run("setup", JAXTRAIN_CUDA="12").returncode == 0
    return made.repo


@pytest.fixture
def launcher(repo: Path, tmp_path: Path) -> Iterator[Launcher]:
    give_back = hear_hangups()
    yield Launcher(repo, tmp_path)
    give_back()


@pytest.fixture
def node(launcher: Launcher) -> Launcher:
    """A machine on which nvidia-smi tells of eight GPUs."""
    script(launcher.bin / "nvidia-smi", GPUS)
    return launcher


class End(NamedTuple):
    """How attempts end, and what run.sh makes of it."""

    plan: list[str]
    code: int
    started: str  # as Launcher.started
    said: tuple[str, ...] = ()  # without GPUs: one for each line after the introduction
    env: dict[str, str] = {}
    more: tuple[str, ...] = ()  # arguments
    gpus: bool = False


FEW = {"JAXTRAIN_RESTARTS": "1", "JAXTRAIN_RESTART_RESET": "600"}
NO_RESET = {"JAXTRAIN_RESTARTS": "1", "JAXTRAIN_RESTART_RESET": "0"}
PEER = "exit 75 (start me again: a peer died, its time limit, or a signal): "
HANG = "exit 124 (the watchdog ended a hang): "
ABORT = "exit 134 (killed by signal 6, ABRT, as jax ends a run whose peer died): "
ENDS = {
    "again until done": End(
        ["exit 75", "exit 124", "exit 0"],
        *(0, "TTT"),
        (f"{PEER}starting again in 0 s, restart 1 of 3", f"{HANG}starting again in 0 s, restart 2 of 3"),
    ),
    **{f"exit {code}": End([f"exit {code}"], code, "T") for code in (0, 1, 2, 3, 76, 130)},
    "deaths by a signal": End(
        ["kill 6", "kill 15", "kill 6"],
        *(75, "TTT"),
        (
            f"{ABORT}starting again",
            "exit 143 (killed by signal 15, TERM, before it listened): starting again",
            "not started again, after 2 in a row without progress (JAXTRAIN_RESTARTS=2)",
        ),
        {"JAXTRAIN_RESTARTS": "2"},
    ),
    "out of memory": End(["kill 9"], 137, "T", ("exit 137 (killed by signal 9, KILL: out of memory",)),
    "native fault": End(["kill 11"], 139, "T", ("exit 139 (killed by signal 11, SEGV: a fault outside Python): not started",)),
    "time over": End(["exit 124", "note 75"], 75, "TT", (HANG, "not started again, because the time is over")),
    "the budget": End(["exit 75"] * 4, 75, "TTTT", ("1 of 3", "2 of 3", "3 of 3", "after 3 in a row without progress")),
    "ten minutes refill it": End(
        ["exit 75", "last 600 75", "exit 75"], 75, "TTT", ("1 of 1", "1 of 1", "without progress"), FEW
    ),
    "less does not": End(["exit 75", "last 599 75"], 75, "TT", ("1 of 1", "without progress"), FEW),
    "nor a hang": End(["exit 124", "exit 124"], 124, "TT", ("1 of 1", "without progress"), NO_RESET),
    "each attempt refills it": End(["exit 75"] * 3 + ["exit 0"], 0, "TTTT", ("1 of 1",) * 3, NO_RESET),
    "a job's last ten minutes": End(
        ["exit 75"],
        *(75, "T"),
        ("not started again in the last ten minutes of the job (SLURM_JOB_END_TIME=1599)",),
        {"SLURM_JOB_END_TIME": "1599"},
    ),
    "before them": End(["exit 75", "exit 0"], 0, "TT", ("starting again",), {"SLURM_JOB_END_TIME": "1600"}),
    "restarts off": End(["exit 75"], 75, "T", (), {"JAXTRAIN_RESTARTS": "0"}),
    "a dry run": End([], 0, "", ("would run: ",), {"JAXTRAIN_DRY_RUN": "1"}, gpus=True),
    # Preflight
    "a fault": End(["exit 3"], 3, "P", ("give --no-preflight to train all the same",), gpus=True),
    "a broken preflight": End(["exit 1"], 1, "P", ("preflight ended with 1",), gpus=True),
    "fit, and looked at again": End(["exit 0", "exit 75", "exit 0", "exit 0"], 0, "PTpT", gpus=True),
    "a fault before a restart": End(["exit 0", "exit 124", "exit 3"], 3, "PTp", gpus=True),
    "a preflight loses a process": End(
        ["exit 75", "exit 0", "exit 75", "exit 75", "exit 0", "exit 0"], 0, "PPTppT", ("restart 3 of 3",), gpus=True
    ),
    "a preflight aborts": End(["kill 6", "exit 0", "exit 75", "kill 6", "exit 0", "exit 0"], 0, "PPTppT", gpus=True),
    "told not to look": End(["exit 0"], 0, "T", more=("--no-preflight",), gpus=True),
    "for CPUs": End(["exit 0"], 0, "T", env={"JAX_PLATFORMS": "cpu"}, gpus=True),
    "without GPUs": End(["exit 0"], 0, "T", env={"CUDA_VISIBLE_DEVICES": ""}, gpus=True),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_follows_an_end(launcher: Launcher, name: str):
    end = ENDS[name]
    if end.gpus:
        script(launcher.bin / "nvidia-smi", GPUS)
    launcher.plan(*end.plan)
    env = ({} if end.gpus or not HAS_GPU else {"JAX_PLATFORMS": "cpu"}) | end.env
    done = launcher.run("--config=x.py", *end.more, **env)
    assert (done.returncode, launcher.started()) == (end.code, end.started), done.stderr
    if end.gpus:
        assert all(words in done.stderr for words in end.said), done.stderr
    else:
        said = told(done.stderr).splitlines()
        assert len(said) == len(end.said), done.stderr  # none of bash's own about jobs
        assert all(words in line for line, words in zip(said, end.said, strict=True)), done.stderr


def test_attempts_are_told_what_they_need(node: Launcher):
    """Preflight's findings, which restart of them all this is, and when the first began."""
    done = node.train(
        "exit 0",
        "exit 75",
        "exit 0",
        "last 600 75",
        "exit 0",
        "exit 75",
        "exit 0",
        "exit 0",
        **FEW | {"JAXTRAIN_RESTARTS": "2"},
    )
    assert done.returncode == 0 and node.started() == "PTpTpTpT", done.stderr
    look, *others = node.attempts()
    trained = others[::2]
    assert [a["restart"] for a in trained] == [None, "1", "2", "3"]
    assert {a["launched"] for a in trained} == {"1000"}
    assert {tuple(a["arguments"]) for a in trained} == {("-m", "jaxtrain.main", "--config=x.py")}
    assert {a["host_class"] for a in trained} == {"8 NVIDIA H200"}
    (found,) = {a["preflight"] for a in trained}
    assert look["arguments"][2:] == ["--config=x.py", f"--json={found}"] and look["preflight"] is None
    assert not Path(found).parent.exists(), "what run.sh keeps for itself goes with it"


def test_every_way_to_train(launcher: Launcher):
    for arguments in ((), ("main", "--config=x.py"), ("--config=x.py", "a b", "")):
        launcher.plan("exit 75", "exit 0")
        assert launcher.run(*arguments, JAX_PLATFORMS="cpu").returncode == 0
        first, second = launcher.attempts()
        assert first["arguments"] == second["arguments"] and first["arguments"][1] == "jaxtrain.main"
    assert first["arguments"][2:] == ["--config=x.py", "a b", ""]


@pytest.mark.parametrize(
    ("arguments", "code", "env"),
    [
        (("data",), 75, {"JAXTRAIN_RESTARTS": "x"}),
        (("--config=x.py", "--explain"), 0, {}),
        (("--config=x.py", "--help"), 0, {}),
    ],
)
def test_other_commands_start_at_once_and_once(node: Launcher, arguments: tuple[str, ...], code: int, env: dict[str, str]):
    node.plan(f"exit {code}")
    done = node.run(*arguments, **env)
    assert (done.returncode, done.stderr, len(node.attempts())) == (code, "", 1)


def test_pauses_double_up_to_a_minute(launcher: Launcher):
    script(launcher.bin / "sleep", '#!/bin/bash\necho "$1" >>"$HOME/slept"\n')

    def slept(count: int, **env: str) -> list[int]:
        (launcher.cwd / "slept").unlink(missing_ok=True)
        launcher.train(*["exit 75"] * count, "exit 0", JAXTRAIN_RESTARTS="010", JAX_PLATFORMS="cpu", **env)
        return [int(line) for line in (launcher.cwd / "slept").read_text().split()]

    assert slept(8, JAXTRAIN_RESTART_WAIT="") == [1, 2, 4, 8, 16, 32, 60, 60]
    assert slept(2, JAXTRAIN_RESTART_WAIT="90") == [90, 90]
    assert slept(3, JAXTRAIN_RESTART_WAIT="5", JAXTRAIN_RESTART_RESET="0") == [5, 5, 5]


# ---- Signals


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("to", ["run.sh", "group"])
def test_a_signal_to_the_launcher_ends_it_with_the_run(launcher: Launcher, name: str, to: str):
    process = launcher.begin(f"until {ASKED[name]}")
    launcher.await_attempts(1)
    (os.killpg if to == "group" else os.kill)(process.pid, signal.Signals[name])
    code, stderr = ended(process)
    assert code == ASKED[name] and len(launcher.attempts()) == 1, stderr
    # To the group: its own and the one passed on, which fall together, come as two, or come when it has ended.
    assert launcher.signals() in ([[name]] if to == "run.sh" else [[name], [name, name]])
    assert (f"because run.sh was sent {name[3:]}" in stderr) == (ASKED[name] == 75)


def test_each_signal_is_passed_on_and_the_code_is_the_runs(launcher: Launcher):
    process = launcher.begin("until 0 2")
    launcher.await_attempts(1)
    sent = ["SIGUSR2", "SIGUSR2", "SIGTERM", "SIGTERM"]  # two traces; and again, to leave at once
    for count, name in enumerate(sent, 1):
        process.send_signal(signal.Signals[name])
        wait_for(lambda count=count: len(launcher.signals()) >= count)
    assert ended(process) == (0, "") and launcher.signals() == sent


def test_a_run_that_is_signalled_alone_or_asked_for_a_trace_is_started_again(launcher: Launcher):
    process = launcher.begin("until 75", "traced 75", "exit 0")
    os.kill(launcher.await_attempts(1)["pid"], signal.SIGTERM)
    launcher.await_attempts(2)
    process.send_signal(signal.SIGUSR2)
    assert ended(process)[0] == 0 and len(launcher.attempts()) == 3


def test_a_run_does_not_outlive_the_launcher(launcher: Launcher):
    process = launcher.begin("until 75")
    attempt = launcher.await_attempts(1)
    process.send_signal(signal.SIGHUP)
    assert ended(process) == (129, "run.sh: exit 129 (killed by signal 1, HUP): not started again\n")
    with pytest.raises(ProcessLookupError):
        os.kill(attempt["pid"], 0)


@pytest.mark.parametrize(("name", "code"), ASKED.items())
def test_a_signal_between_two_attempts_ends_at_once(launcher: Launcher, name: str, code: int):
    """In a pause of eleven days. A request for a trace leaves the pause as it is."""
    if name == "SIGTERM":
        script(launcher.bin / "sleep", '#!/bin/bash\ntouch "$HOME/naps"\nuntil [[ -e $HOME/wake ]]; do /bin/sleep 0.01; done\n')
        process = launcher.begin("exit 124", "exit 0")
        wait_for((launcher.cwd / "naps").exists)
        process.send_signal(signal.SIGUSR2)
        (launcher.cwd / "wake").touch()
        assert ended(process)[0] == 0 and len(launcher.attempts()) == 2
        (launcher.bin / "sleep").unlink()
    process = launcher.begin("exit 124", JAXTRAIN_RESTART_WAIT="999999")
    assert process.stderr
    introduction = "".join(process.stderr.readline() for _ in range(3))
    assert "starting again in 999999 s" in told(introduction)
    process.send_signal(signal.Signals[name])
    _, rest = process.communicate(timeout=HUNG_S)
    assert (process.returncode, rest) == (code, f"run.sh: not started again, because run.sh was sent {name[3:]}\n")


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_signal_while_preflight_looks_ends_it(node: Launcher, restarts: str):
    process = node.begin("until 130", JAXTRAIN_RESTARTS=restarts)
    node.await_attempts(1)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=HUNG_S)
    assert (process.returncode, node.signals(), node.started()) == (75, ["SIGTERM"], "P")
    assert "not started, because run.sh was sent TERM" in stderr


def test_signals_find_the_run_as_the_launcher_found_them(launcher: Launcher):
    launcher.train("exit 0")
    handlers = launcher.attempts()[0]["at_birth"]
    assert "default_int_handler" in handlers.pop("SIGINT")  # Ctrl-C is heard
    assert handlers.pop("SIGUSR2") == str(signal.SIG_IGN)  # no trace can be taken yet
    # A suite under nohup, or behind a shell's &, is deaf to some, and so is what it starts.
    deaf = {name for name in handlers if signal.getsignal(signal.Signals[name]) == signal.SIG_IGN}
    assert handlers == {name: str(signal.SIG_IGN if name in deaf else signal.SIG_DFL) for name in handlers}


def test_a_terminal_stays_the_runs(launcher: Launcher):
    launcher.plan("read 75", "until 130")
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    process = subprocess.Popen(
        [sys.executable, "-c", spawn, "bash", str(launcher.repo / "run.sh")],
        env=launcher.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    for count, words in enumerate(("a line\n", "\x03"), 1):  # the second is Ctrl-C
        if count == 2:
            launcher.await_attempts(2)
        process.stdin.write(words)
        process.stdin.flush()
    process.communicate(timeout=HUNG_S)
    first, second = launcher.attempts()
    assert process.returncode == 130 and first["line"] == "a line\n"
    assert second["foreground"] == second["group"] != second["pid"]


def test_switched_off_python_takes_the_launchers_place(launcher: Launcher):
    process = launcher.begin("exit 75", JAXTRAIN_RESTARTS="0")
    assert ended(process) == (75, "")
    assert [a["pid"] for a in launcher.attempts()] == [process.pid]


# ---- Where a run starts from, and what it changes


def test_the_commit_is_known_before_python_starts(tmp_path: Path):
    node = Launcher(copy_launcher(tmp_path / "jaxtrain"), tmp_path)
    script(node.bin / "nvidia-smi", GPUS)
    node.run("setup")
    git(node.repo, "init", "-q")
    git(node.repo, "add", "run.sh", "jaxtrain")
    git(node.repo, "commit", "-qm", "first")
    commit = git(node.repo, "rev-parse", "HEAD")

    def seen() -> tuple[str, str]:
        said = node.train("exit 0", "exit 0").stderr
        assert node.attempts()[-1]["commit"] == commit
        (line,) = [line for line in said.splitlines() if line.startswith("run.sh: commit ")]
        return node.attempts()[-1]["dirty"], line.partition(commit[:12])[2]

    assert seen() == ("no", ", unchanged; on 8 NVIDIA H200")
    new = node.repo / "jaxtrain/new.py"
    new.write_text("x = 1\n")  # git does not know it, and a run may import it
    assert seen() == ("yes", ", changed since; on 8 NVIDIA H200")
    new.unlink()
    with open(node.repo / "jaxtrain/main.py", "a") as file:
        file.write("# changed\n")
    assert seen()[0] == "yes"


def test_a_run_changes_no_file_and_says_what_it_sets(launcher: Launcher):
    """The user's files, the repository's, temporary ones. Its stdin may be closed."""
    launcher.plan("exit 0")
    home, out = launcher.cwd, launcher.cwd / "tmp"
    out.mkdir()
    before, repo = {p.name for p in home.iterdir()}, runs.tree(launcher.repo)
    done = subprocess.run(
        ["bash", "-c", f'exec "{launcher.repo}/run.sh" --config=x.py <&-'],
        env=launcher.environ | {"PYTHONPATH": "/mine", "TMPDIR": str(out)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
    )
    assert done.returncode == 0, done.stderr
    assert runs.tree(launcher.repo) == repo and not list(out.iterdir())
    assert {p.name for p in home.iterdir()} - before == {"attempts"}  # the stand-in's own
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("run.sh: sets ")]
    assert f"PYTHONPATH={launcher.repo}:/mine" in line
    assert all(f" {name}=" in line for name in ("JAXTRAIN_HOST_CLASS", "JAXTRAIN_LAUNCHED", "JAXTRAIN_NOTE"))


def test_sourced_it_refuses_and_leaves_the_shell_alone(launcher: Launcher):
    line = (
        f'before=$(set -o); . "{launcher.repo}/run.sh" --config=x.py; echo "code $?"; [[ $before == $(set -o) ]] && echo same'
    )
    done = subprocess.run(["bash", "-c", line], env={"PATH": PATH}, capture_output=True, text=True, timeout=HUNG_S)
    assert done.stdout.split() == ["code", "2", "same"] and "do not source it" in done.stderr


# ---- Several machines


@pytest.mark.parametrize(
    ("given", "env", "why"),
    [
        (["--nodes=a"], {}, "names one machine; leave it out"),
        (["--nodes=a,b;rm"], {}, "'b;rm' is no host; write HOST,HOST"),
        (["--nodes=a,b:22"], {}, "only the first machine has a port"),
        (["--nodes"], {}, "needs a value: write --nodes=HOST"),
        (["--nodes=a,b,a"], {}, "names a twice"),
        (["--nodes=a:65536,b"], {}, "65536 is no port; write one"),
        (["--nodes=a:0,b"], {}, "0 is no port; write one"),
        (["--no-preflight=1"], {}, "takes no value; write --no-preflight"),
        (["--nodes=a,b", "--process-id=1"], {}, "contradicts --nodes"),
        *(([], {"JAXTRAIN_RESTARTS": text}, f"JAXTRAIN_RESTARTS={text}: must be a whole number") for text in ("-1", "two")),
        ([], {"JAXTRAIN_RESTART_WAIT": "1.5"}, "JAXTRAIN_RESTART_WAIT=1.5: must be a whole number from 0 to 999999; unset it"),
        ([], {"JAXTRAIN_RESTART_RESET": "9999999"}, "JAXTRAIN_RESTART_RESET=9999999: must be a whole number"),
    ],
)
def test_mistakes_are_refused_and_nothing_is_started(launcher: Launcher, given: list[str], env: dict[str, str], why: str):
    launcher.plan("exit 0")
    done = launcher.run("--config=x.py", *given, **env)
    assert done.returncode == 2 and why in done.stderr and launcher.attempts() == []


def test_a_mistake_in_the_config_is_told_before_anybody_is_reached(launcher: Launcher):
    script(launcher.bin / "ssh", SSH)
    launcher.plan("exit 2")
    done = launcher.run("--config=x.py", "--nodes=here,there")
    assert done.returncode == 2 and len(launcher.attempts()) == 1 and "--explain" in launcher.attempts()[0]["arguments"]
    assert not (launcher.cwd / "ssh").exists()


def test_preflight_on_a_list_of_machines(launcher: Launcher):
    """Each is told its place, and the verdict of all is the command's."""
    script(launcher.bin / "ssh", '#!/bin/bash\nprintf "%s\\n" "$*" >>"$HOME/ssh"\nexit 3\n')
    launcher.plan("exit 0")
    done = launcher.run("preflight", "--no-measure", "--nodes=here,there")
    assert done.returncode == 3, done.stderr
    (here,) = launcher.attempts()
    common = ["--no-measure", "--coordinator=here:12321", "--num-processes=2"]
    assert here["arguments"] == ["-m", "jaxtrain.preflight", *common, "--process-id=0"]
    (there,) = (launcher.cwd / "ssh").read_text().splitlines()
    assert there.endswith(f"preflight {' '.join(common)} --process-id=1")


@pytest.mark.parametrize(
    ("there", "here", "code", "said"),
    [
        ("unreachable", "until 75", 75, "unreachable: ssh could not reach it"),  # what waits for it here is ended
        ("unreachable", "exit 0", 75, "unreachable: ssh could not reach it"),
        ("bad2", "exit 75", 2, "bad2 ended with 2"),  # what it refuses, nobody tries again
        ("bad3", "exit 75", 3, "bad3 ended with 3"),
        ("bad124", "exit 75", 124, "bad124 ended with 124"),  # its hang is the run's, although this one left for a lost peer
        ("bad76", "exit 76", 76, ""),
        ("bad1", "exit 0", 1, "bad1 ended with 1"),
        ("bad0", "exit 0", 0, ""),
    ],
)
def test_how_another_machine_ended(launcher: Launcher, there: str, here: str, code: int, said: str):
    script(launcher.bin / "ssh", SSH)
    launcher.plan("exit 0", here)  # the first answers --explain
    done = launcher.run("--config=x.py", f"--nodes=here,{there}", JAXTRAIN_RESTARTS="0", JAX_PLATFORMS="cpu")
    assert done.returncode == code and said in done.stderr, done.stderr
    assert (" ended with " in done.stderr) == ("ended" in said)


def test_a_signal_to_the_process_group_keeps_the_runs_code(launcher: Launcher):
    """As systemd, or `kill -- -PGID`, sends it: also to ssh and to what waits for it."""
    over_there = '#!/bin/bash\ntouch "$HOME/ssh"\nuntil [[ -s $HOME/signals ]]; do sleep 0.01; done\nexit 75\n'
    script(launcher.bin / "ssh", over_there)  # there it ends as the processes have agreed
    process = launcher.begin("exit 0", "until 75", arguments=["--config=x.py", "--nodes=here,there"], JAX_PLATFORMS="cpu")
    launcher.await_attempts(2)
    wait_for((launcher.cwd / "ssh").exists)
    os.killpg(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=HUNG_S)
    assert process.returncode == 75 and "because run.sh was sent TERM" in stderr, stderr


def test_another_state_of_the_code_is_refused(launcher: Launcher):
    """The second machine's checkout has another commit: nothing trains."""
    script(launcher.bin / "ssh", SSH.replace('"$command"', '"${command//JAXTRAIN_EXPECTED=/JAXTRAIN_EXPECTED=other}"'))
    launcher.plan("exit 0", "until 75")
    done = launcher.run("--config=x.py", "--nodes=here,there", JAX_PLATFORMS="cpu")
    assert done.returncode == 2, done.stderr
    assert "to the same state on all nodes" in done.stderr and len(launcher.attempts()) == 2


def test_the_others_are_told_their_place_and_no_other_variable(launcher: Launcher):
    script(launcher.bin / "ssh", SSH)
    launcher.plan("exit 0", "exit 0")
    given = {"JAXTRAIN_RESTARTS": "0", "JAX_PLATFORMS": "cpu", "JAXTRAIN_CUDA": "12", "JAXTRAIN_NOTE": "/mine"}
    launcher.run("--config=x.py", "--nodes=here:99,bad0,ada@bad0.lan", **given)
    first: Any = launcher.attempts()[1]["arguments"]
    assert first[3:] == ["--coordinator=here:99", "--num-processes=3", "--process-id=0"]
    asked = sorted((launcher.cwd / "ssh").read_text().splitlines())
    assert [line.split()[-1] for line in asked] == ["--process-id=2", "--process-id=1"]
    for line in asked:
        assert "env JAXTRAIN_RESTARTS=0 JAXTRAIN_EXPECTED=" in line and " JAXTRAIN_CUDA=12 " in line
        assert "main --no-preflight --config=x.py --coordinator=here:99 --num-processes=3" in line and "NOTE" not in line
