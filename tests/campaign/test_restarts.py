"""What run.sh does after a run ended, and with signals. The run is a stand-in that does what the next line of a file says."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from test_launcher import Machine, script

# Lines of the plan: `exit CODE`; `kill NUMBER`, itself; `sleep SECONDS CODE`; `last SECONDS CODE`, by the clock of the test;
# `traced CODE`, SIGUSR2 came; `read CODE`, a line of stdin first; `note CODE`, no further attempt should come; `until CODE`,
# a signal came that asks to end, and 0.3 s for what else may come.
FAKE_PYTHON = f"""#!{sys.executable} -IS
import json, os, signal, sys, time

if sys.argv[1] == "-c":
    sys.exit(print("3.12"))
os.chdir(os.environ["HOME"])
names = "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"
at_birth = {{name: str(signal.getsignal(getattr(signal, name))) for name in (*names, "SIGQUIT", "SIGHUP")}}
began, asked, traced = time.monotonic(), [], []

def hear(number, frame):
    with open("signals", "a") as f:
        f.write(signal.Signals(number).name + "\\n")
    (traced if number == signal.SIGUSR2 else asked).append(number)

for name in names:
    signal.signal(getattr(signal, name), hear)
number = len(open("attempts").readlines()) if os.path.exists("attempts") else 0
action, *rest = open("plan").readlines()[number].split()
facts = dict(pid=os.getpid(), arguments=sys.argv[1:], at_birth=at_birth)
facts |= dict(restart=os.environ.get("JAXTRAIN_RESTART"), launched=os.environ.get("JAXTRAIN_LAUNCHED"))
told = "COMMIT", "DIRTY", "HOST_CLASS", "PREFLIGHT"
facts |= {{name.lower(): os.environ.get("JAXTRAIN_" + name) for name in told}}
if all(os.isatty(i) for i in range(3)):
    facts.update(group=os.getpgrp(), foreground=os.tcgetpgrp(0))
if action == "read":
    facts["line"] = sys.stdin.readline()
with open("attempts", "a") as f:
    f.write(json.dumps(facts) + "\\n")
if action == "kill":
    if rest[0] != "9":
        signal.signal(int(rest[0]), signal.SIG_DFL)
    os.kill(os.getpid(), int(rest[0]))
if action == "note":
    open(os.environ["JAXTRAIN_NOTE"], "w").write("the time is over\\n")
if action == "sleep":
    time.sleep(float(rest[0]))
if action == "traced":
    while not traced and time.monotonic() < began + 20:
        time.sleep(0.01)
if action == "last":
    now = int(open("clock").read())
    open("clock", "w").write(str(now + int(rest[0])))
if action == "until":
    while not asked and time.monotonic() < began + 20:
        time.sleep(0.01)
    time.sleep(0.3)
sys.exit(int(rest[-1]))
"""

PATH = "/usr/bin:/bin"
bash = subprocess.run(["bash", "-c", "echo ${BASH_VERSINFO[@]:0:2}"], env={"PATH": PATH}, capture_output=True, text=True).stdout
# macOS has 3.2, for good.
pytestmark = pytest.mark.skipif([int(n) for n in bash.split()] < [4, 3], reason="run.sh restarts nothing in a bash before 4.3")

ASKED = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}


class Launcher(Machine):
    """A launcher whose runs end as planned."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        script(self.bin / "venv-python", FAKE_PYTHON)
        self.run("setup")

    def plan(self, *lines: str) -> None:
        (self.cwd / "plan").write_text("\n".join(lines) + "\n")
        (self.cwd / "attempts").unlink(missing_ok=True)

    def train(self, *lines: str, **env: str) -> subprocess.CompletedProcess[str]:
        self.plan(*lines)
        return self.run("--config=x.py", **{"JAXTRAIN_RESTART_WAIT": "0"} | env)

    def begin(self, *lines: str, arguments: Sequence[str] = ("--config=x.py",), **env: str) -> subprocess.Popen[str]:
        """Starts and returns at once, in a process group of its own."""
        self.plan(*lines)
        base = {"PATH": f"{self.bin}:{PATH}", "HOME": str(self.cwd), "JAXTRAIN_RESTART_WAIT": "0"}
        return subprocess.Popen(
            ["bash", str(self.repo / "run.sh"), *arguments],
            env=base | env,
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

    def signals(self) -> list[str]:
        """What the runs heard."""
        path = self.cwd / "signals"
        return path.read_text().split() if path.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` makes what it starts ignore it, and their children
    yield Launcher(tmp_path)
    signal.signal(signal.SIGHUP, before)


# What each start says first: where it starts from, and what it sets (test_launcher.py looks at both).
INTRODUCTION = re.compile(r"run\.sh: (this is no git checkout|sets )")


def told(stderr: str) -> str:
    """What was said after the introduction, which must be there."""
    first, second, *rest = stderr.splitlines(keepends=True)
    assert INTRODUCTION.match(first) and INTRODUCTION.match(second), stderr
    return "".join(rest)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=10)
    return process.returncode, told(stderr)


def test_started_again_until_it_is_done(launcher: Launcher):
    done = launcher.train("exit 75", "exit 124", "exit 0")
    assert done.returncode == 0
    assert told(done.stderr).splitlines() == [
        "run.sh: exit 75 (start me again: a peer died, its time limit, or a signal): starting again in 0 s, restart 1 of 3",
        "run.sh: exit 124 (the watchdog ended a hang): starting again in 0 s, restart 2 of 3",
    ]
    attempts = launcher.attempts()
    assert [a["restart"] for a in attempts] == [None, "1", "2"]
    launched = {a["launched"] for a in attempts}  # the first attempt's for all
    assert len(launched) == 1 and 0 <= time.time() - int(*launched) < 60
    assert {tuple(a["arguments"]) for a in attempts} == {("-m", "jaxtrain.main", "--config=x.py")}


def test_every_way_to_train(launcher: Launcher):
    for arguments in ((), ("main", "--config=x.py"), ("--config=x.py", "a b", "")):
        launcher.plan("exit 75", "exit 0")
        assert launcher.run(*arguments, JAXTRAIN_RESTART_WAIT="0").returncode == 0
        first, second = launcher.attempts()
        assert first["arguments"] == second["arguments"]
        assert first["arguments"][1] == "jaxtrain.main"
    assert first["arguments"][2:] == ["--config=x.py", "a b", ""]


def test_a_run_whose_time_is_over(launcher: Launcher):
    done = launcher.train("exit 124", "note 75", "exit 0")
    assert done.returncode == 75 and len(launcher.attempts()) == 2
    assert done.stderr.endswith("signal): not started again, because the time is over\n")
    assert not list(launcher.cwd.glob("tmp.*"))


def test_other_commands_are_never_started_again(launcher: Launcher):
    launcher.plan("exit 75")
    done = launcher.run("data", JAXTRAIN_RESTARTS="x")
    assert (done.returncode, done.stderr) == (75, "")
    assert len(launcher.attempts()) == 1


@pytest.mark.parametrize("code", [0, 1, 2, 3, 76, 130])
def test_ends_with_the_runs_own_code(launcher: Launcher, code: int):
    done = launcher.train(f"exit {code}")
    assert (done.returncode, told(done.stderr)) == (code, "")
    assert len(launcher.attempts()) == 1


def test_deaths_by_a_signal(launcher: Launcher):
    done = launcher.train("kill 6", "kill 15", "kill 6", JAXTRAIN_RESTARTS="2")
    assert done.returncode == 75
    assert "exit 134 (killed by signal 6, ABRT, as jax ends a run whose peer died): starting again" in done.stderr
    assert "exit 143 (killed by signal 15, TERM, before it listened): starting again" in done.stderr
    assert "not started again, after 2 in a row without progress (JAXTRAIN_RESTARTS=2)" in done.stderr
    assert len(told(done.stderr).splitlines()) == 3  # none of bash's own about jobs
    for number, name in (9, "KILL: out of memory (dmesg tells), or somebody's kill -9"), (11, "SEGV: a fault outside Python"):
        done = launcher.train(f"kill {number}")
        assert done.returncode == 128 + number
        assert told(done.stderr) == f"run.sh: exit {128 + number} (killed by signal {number}, {name}): not started again\n"


def test_the_budget_and_what_refills_it(launcher: Launcher):
    script(launcher.bin / "date", '#!/bin/bash\n[[ $1 == +%s ]] && exec cat "$HOME/clock"\nexec /bin/date "$@"\n')
    (launcher.cwd / "clock").write_text("1000")
    done = launcher.train(*["exit 75"] * 4, JAXTRAIN_RESTARTS="3")
    assert done.returncode == 75
    assert len(launcher.attempts()) == 4
    # An attempt of ten minutes refills the budget; the count of restarts goes on.
    limits = {"JAXTRAIN_RESTARTS": "1", "JAXTRAIN_RESTART_RESET": "600"}
    assert launcher.train("exit 75", "last 600 75", "exit 75", **limits).returncode == 75
    assert [a["restart"] for a in launcher.attempts()] == [None, "1", "2"]
    assert launcher.train("exit 75", "last 599 75", "exit 75", **limits).returncode == 75
    assert [a["restart"] for a in launcher.attempts()] == [None, "1"]
    # However long it hung.
    assert launcher.train("exit 124", "exit 124", **limits | {"JAXTRAIN_RESTART_RESET": "0"}).returncode == 124
    assert launcher.train(*["exit 75"] * 5, "exit 0", **limits | {"JAXTRAIN_RESTART_RESET": "0"}).returncode == 0


def test_not_at_the_end_of_a_slurm_job(launcher: Launcher):
    done = launcher.train("exit 75", "exit 0", SLURM_JOB_END_TIME=str(int(time.time()) + 300))
    assert done.returncode == 75
    assert "not started again in the last ten minutes of the job (SLURM_JOB_END_TIME=" in done.stderr
    assert launcher.train("exit 75", "exit 0", SLURM_JOB_END_TIME=str(int(time.time()) + 900)).returncode == 0


def test_waits_twice_as_long_each_time(launcher: Launcher):
    script(launcher.bin / "sleep", '#!/bin/bash\necho "$1" >>"$HOME/slept"\n')

    def slept(*lines: str, **env: str) -> list[int]:
        (launcher.cwd / "slept").unlink(missing_ok=True)
        launcher.train(*lines, "exit 0", JAXTRAIN_RESTARTS="010", **env)
        return [int(line) for line in (launcher.cwd / "slept").read_text().split()]

    assert slept(*["exit 75"] * 8, JAXTRAIN_RESTART_WAIT="") == [1, 2, 4, 8, 16, 32, 60, 60]
    assert slept(*["exit 75"] * 2, JAXTRAIN_RESTART_WAIT="90") == [90, 90]
    assert slept(*["exit 75"] * 3, JAXTRAIN_RESTART_WAIT="5", JAXTRAIN_RESTART_RESET="0") == [5, 5, 5]


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("to", ["run.sh", "group"])
def test_a_signal_to_the_launcher_ends_it_with_the_run(launcher: Launcher, name: str, to: str):
    process = launcher.begin(f"until {ASKED[name]}")
    launcher.await_attempts(1)
    number = signal.Signals[name]
    if to == "group":
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    code, stderr = ended(process)
    assert code == ASKED[name]
    # To the group: its own and the one passed on, which fall together or come as two.
    assert launcher.signals() in ([[name]] if to == "run.sh" else [[name], [name, name]])
    assert len(launcher.attempts()) == 1
    assert (f"because run.sh was sent {name[3:]}" in stderr) == (ASKED[name] == 75)


def test_each_signal_is_passed_on_and_the_code_is_the_runs(launcher: Launcher):
    process = launcher.begin("until 0")
    launcher.await_attempts(1)
    sent = ["SIGUSR2", "SIGUSR2", "SIGTERM", "SIGTERM"]  # two traces; and again, to leave at once
    for count, name in enumerate(sent, 1):
        process.send_signal(signal.Signals[name])
        wait_for(lambda count=count: len(launcher.signals()) >= count)
    assert ended(process) == (0, "")
    assert launcher.signals() == sent


def test_a_signal_to_the_run_alone_starts_it_again(launcher: Launcher):
    process = launcher.begin("until 75", "exit 0")
    os.kill(launcher.await_attempts(1)["pid"], signal.SIGTERM)
    assert ended(process)[0] == 0
    assert len(launcher.attempts()) == 2


def test_a_run_does_not_outlive_the_launcher(launcher: Launcher):
    process = launcher.begin("until 75")
    attempt = launcher.await_attempts(1)
    process.send_signal(signal.SIGHUP)
    assert ended(process) == (129, "run.sh: exit 129 (killed by signal 1, HUP): not started again\n")
    with pytest.raises(ProcessLookupError):
        os.kill(attempt["pid"], 0)


def test_a_trace_is_no_request_to_end(launcher: Launcher):
    process = launcher.begin("traced 75", "exit 0")
    launcher.await_attempts(1)
    process.send_signal(signal.SIGUSR2)
    assert ended(process)[0] == 0
    assert len(launcher.attempts()) == 2


@pytest.mark.parametrize(("name", "code"), ASKED.items())
def test_a_signal_between_two_attempts_ends_at_once(launcher: Launcher, name: str, code: int):
    process = launcher.begin("exit 124", "exit 0", JAXTRAIN_RESTART_WAIT="30")
    assert process.stderr
    introduction = process.stderr.readline() + process.stderr.readline()
    assert told(introduction + process.stderr.readline()).find("starting again in 30 s") > 0
    process.send_signal(signal.SIGUSR2)  # nothing to trace: it goes on waiting
    time.sleep(0.1)
    assert process.poll() is None
    begin = time.monotonic()
    process.send_signal(signal.Signals[name])
    _, rest = process.communicate(timeout=10)
    assert (process.returncode, rest) == (code, f"run.sh: not started again, because run.sh was sent {name[3:]}\n")
    assert time.monotonic() - begin < 2
    assert len(launcher.attempts()) == 1


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
        env={"PATH": PATH, "HOME": str(launcher.cwd), "JAXTRAIN_RESTART_WAIT": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    process.stdin.write("a line\n")
    process.stdin.flush()
    facts = launcher.await_attempts(1)
    assert facts["line"] == "a line\n"
    facts = launcher.await_attempts(2)
    assert facts["foreground"] == facts["group"] != facts["pid"]
    process.stdin.write("\x03")  # Ctrl-C
    process.stdin.flush()
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert len(launcher.attempts()) == 2


def test_closed_stdin(launcher: Launcher):
    launcher.plan("exit 0")
    done = subprocess.run(
        ["bash", "-c", 'exec bash "$0" --config=x.py <&-', str(launcher.repo / "run.sh")],
        env={"PATH": PATH, "HOME": str(launcher.cwd)},
        capture_output=True,
        timeout=10,
    )
    assert (done.returncode, told(done.stderr.decode())) == (0, "")


def test_switched_off_python_takes_the_launchers_place(launcher: Launcher):
    process = launcher.begin("exit 75", JAXTRAIN_RESTARTS="0")
    assert ended(process) == (75, "")
    assert [a["pid"] for a in launcher.attempts()] == [process.pid]


def test_dry_run(launcher: Launcher):
    done = launcher.train("exit 0", JAXTRAIN_DRY_RUN="1")
    assert done.returncode == 0
    assert told(done.stderr).startswith("run.sh: would run: ")
    assert launcher.attempts() == []


@pytest.mark.parametrize("name", ["JAXTRAIN_RESTARTS", "JAXTRAIN_RESTART_WAIT", "JAXTRAIN_RESTART_RESET"])
@pytest.mark.parametrize("value", ["-1", "two", "1.5", "9999999"])
def test_wrong_limits_are_refused(launcher: Launcher, name: str, value: str):
    done = launcher.train("exit 0", **{name: value})
    assert done.returncode == 2
    assert f"run.sh: {name}={value}: must be a whole number from 0 to 999999; unset it for" in done.stderr
    assert launcher.attempts() == []
