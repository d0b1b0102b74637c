"""What run.sh does before training and around it: where a run starts from, preflight, several machines. Nothing of the user's
shell changes."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import runs
from test_launcher import REPO, Machine, script
from test_restarts import Launcher, pytestmark, told, wait_for  # noqa: F401 - needs the same bash

GPU = """#!/bin/bash
case $1 in
  -L) echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)' ;;
  --query-gpu=name) for i in 0 1 2 3 4 5 6 7; do echo 'NVIDIA H200'; done ;;
esac
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield Launcher(tmp_path)
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def node(launcher: Launcher) -> Launcher:
    """A machine on which nvidia-smi tells of eight GPUs."""
    script(launcher.bin / "nvidia-smi", GPU)
    launcher.run("setup", JAXTRAIN_CUDA="12")
    return launcher


def modules(launcher: Launcher) -> list[str]:
    """What was started, in order."""
    return [a["arguments"][1] + (" --no-measure" if "--no-measure" in a["arguments"] else "") for a in launcher.attempts()]


# ---- Preflight


def test_a_fault_stops_training(node: Launcher):
    done = node.train("exit 3")
    assert done.returncode == 3
    assert modules(node) == ["jaxtrain.preflight"]
    assert "--no-preflight" in done.stderr and node.attempts()[0]["arguments"][2] == "--config=x.py"


def test_a_node_that_is_fit_trains_and_the_run_knows_of_it(node: Launcher):
    done = node.train("exit 0", "exit 75", "exit 0", "exit 0")
    assert done.returncode == 0
    assert modules(node) == ["jaxtrain.preflight", "jaxtrain.main", "jaxtrain.preflight --no-measure", "jaxtrain.main"]
    look, run, *_ = node.attempts()
    assert f"--json={run['preflight']}" in look["arguments"] and look["preflight"] is None
    assert not Path(run["preflight"]).parent.exists(), "what run.sh keeps for itself goes with it"


def test_told_not_to_look(node: Launcher):
    node.plan("exit 0")
    done = node.run("--config=x.py", "--no-preflight")
    assert done.returncode == 0 and modules(node) == ["jaxtrain.main"]
    assert node.attempts()[0]["arguments"] == ["-m", "jaxtrain.main", "--config=x.py"]


@pytest.mark.parametrize("how", [{"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"JAXTRAIN_DRY_RUN": "1"}])
def test_nothing_to_look_at(node: Launcher, how: dict[str, str]):
    assert node.train("exit 0", **how).returncode == 0
    assert modules(node) == ([] if "JAXTRAIN_DRY_RUN" in how else ["jaxtrain.main"])


def test_questions_need_no_look(node: Launcher):
    for question in ("--explain", "--help"):
        node.plan("exit 0")
        done = node.run("--config=x.py", question)
        assert (done.returncode, done.stderr, modules(node)) == (0, "", ["jaxtrain.main"])


def test_a_preflight_that_breaks_is_not_taken_for_a_good_one(node: Launcher):
    done = node.train("exit 1")
    assert done.returncode == 1 and modules(node) == ["jaxtrain.preflight"]
    assert "preflight ended with 1" in done.stderr


@pytest.mark.parametrize("ended", ["exit 75", "kill 6"])
def test_a_preflight_that_lost_a_process_is_tried_again(node: Launcher, ended: str):
    """Within the same budget as training: a node that is slow to come is no fault."""
    done = node.train(ended, "exit 0", "exit 75", ended, "exit 0", "exit 0")
    assert done.returncode == 0, done.stderr
    looked, trained, again = "jaxtrain.preflight", "jaxtrain.main", "jaxtrain.preflight --no-measure"
    assert modules(node) == [looked, looked, trained, again, again, trained]
    assert "restart 3 of 3" in done.stderr


def test_asked_to_stop_while_it_looks_and_restarts_are_off(node: Launcher):
    process = node.begin("until 130", "exit 0", JAXTRAIN_RESTARTS="0")
    node.await_attempts(1)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 75 and node.signals() == ["SIGTERM"] and modules(node) == ["jaxtrain.preflight"]


def test_asked_to_stop_while_it_looks(node: Launcher):
    process = node.begin("until 130", "exit 0")
    node.await_attempts(1)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 75 and modules(node) == ["jaxtrain.preflight"]
    assert "not started, because run.sh was sent TERM" in stderr


def test_a_fault_found_before_a_restart(node: Launcher):
    done = node.train("exit 0", "exit 124", "exit 3")
    assert done.returncode == 3 and modules(node)[2:] == ["jaxtrain.preflight --no-measure"]


# ---- Where a run starts from


def git(folder: Path, *args: str) -> str:
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    done = subprocess.run(["git", "-C", str(folder), *args], env=os.environ | names, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_known_before_python_starts(node: Launcher):
    git(node.repo, "init", "-q")
    git(node.repo, "add", "run.sh", "jaxtrain")
    git(node.repo, "commit", "-qm", "first")
    commit = git(node.repo, "rev-parse", "HEAD")
    said = node.train("exit 0", "exit 0").stderr
    fact = node.attempts()[-1]
    assert (fact["commit"], fact["dirty"], fact["host_class"]) == (commit, "no", "8 NVIDIA H200")
    assert f"run.sh: commit {commit[:12]}, unchanged; on 8 NVIDIA H200" in said.splitlines()
    new = node.repo / "jaxtrain/new.py"
    new.write_text("x = 1\n")  # git does not know it, and a run may import it
    said = node.train("exit 0", "exit 0").stderr
    assert node.attempts()[-1]["dirty"] == "yes" and f"commit {commit[:12]}, changed since" in said
    new.unlink()
    with open(node.repo / "jaxtrain/main.py", "a") as file:
        file.write("# changed\n")
    assert node.train("exit 0", "exit 0").returncode == 0 and node.attempts()[-1]["dirty"] == "yes"


def test_what_is_set_is_told_and_nothing_else_changes(launcher: Launcher):
    """Run from a shell as a user would. Its variables are its own; what could change are files: the user's, the repository's,
    temporary ones."""
    launcher.plan("exit 0")
    home = launcher.cwd
    before, repo = {p.name for p in home.iterdir()}, runs.tree(launcher.repo)
    line = f'"{launcher.repo}/run.sh" --config=x.py'
    out = launcher.repo.parent
    env = {
        "PATH": f"{launcher.bin}:/usr/bin:/bin",
        "HOME": str(home),
        "OUT": str(out),
        "PYTHONPATH": "/mine",
        "TMPDIR": str(out),
    }
    folders = {p.name for p in out.iterdir()}
    done = subprocess.run(["bash", "-c", line], env=env, cwd=home, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert runs.tree(launcher.repo) == repo
    assert {p.name for p in home.iterdir()} - before == {"attempts"}  # the stand-in's own
    assert {p.name for p in out.iterdir()} == folders, "temporary files are left"
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("run.sh: sets ")]
    assert f"PYTHONPATH={launcher.repo}:/mine" in line
    assert all(f" {name}=" in line for name in ("JAXTRAIN_HOST_CLASS", "JAXTRAIN_LAUNCHED", "JAXTRAIN_NOTE"))


def test_sourced_it_refuses_and_leaves_the_shell_alone(launcher: Launcher):
    line = (
        f'before=$(set -o); . "{launcher.repo}/run.sh" --config=x.py; echo "code $?"; [[ $before == $(set -o) ]] && echo same'
    )
    done = subprocess.run(["bash", "-c", line], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["code", "2", "same"] and "do not source it" in done.stderr


# ---- Several machines


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


# Reaches "machines" by a shell here; what it was asked stands in a file.
SSH = """#!/bin/bash
host=${*: -2:1} command=${*: -1}
printf '%s\\n' "$*" >>"$HOME/ssh"
[[ $host != unreachable ]] || exit 255
if [[ $host == bad* ]]; then exit "${host#bad}"; fi
# As over there: nothing of this shell's comes along.
exec env -i PATH="$PATH" HOME="$HOME" JAX_PLATFORMS=cpu ${DEVICES:+JAX_NUM_CPU_DEVICES=$DEVICES} bash -c "$command"
"""


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--nodes=a"], "names one machine"),
        (["--nodes=a,b;rm"], "'b;rm' is no host"),
        (["--nodes=a,b:22"], "only the first machine has a port"),
        (["--nodes"], "needs a value"),
        (["--nodes=a,b,a"], "names a twice"),
        (["--nodes=a:99999,b"], "99999 is no port"),
        (["--no-preflight=1"], "takes no value"),
        (["--nodes=a,b", "--process-id=1"], "contradicts --nodes"),
    ],
)
def test_mistakes_in_the_list(launcher: Launcher, given: list[str], why: str):
    launcher.plan("exit 0")
    done = launcher.run("--config=x.py", *given)
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
    launcher.plan("sleep 1 3")
    done = launcher.run("preflight", "--no-measure", "--nodes=here,there")
    assert done.returncode == 3, done.stderr
    (here,) = launcher.attempts()
    common = ["--no-measure", "--coordinator=here:12321", "--num-processes=2"]
    assert here["arguments"] == ["-m", "jaxtrain.preflight", *common, "--process-id=0"]
    (there,) = (launcher.cwd / "ssh").read_text().splitlines()
    assert there.endswith(f"preflight {' '.join(common)} --process-id=1")


def test_a_machine_that_ssh_cannot_reach(launcher: Launcher):
    script(launcher.bin / "ssh", SSH)
    launcher.plan("exit 0", "until 75")  # the first answers --explain
    began = time.monotonic()
    done = launcher.run("--config=x.py", "--nodes=here,unreachable", JAXTRAIN_RESTARTS="0")
    assert done.returncode == 75 and "unreachable: ssh could not reach it" in done.stderr
    assert time.monotonic() - began < 15, "what waits for that machine is ended; by itself it would wait 20 s"


@pytest.mark.parametrize(("there", "code"), [(2, 2), (3, 3), (124, 124)])
def test_how_another_machine_ended(launcher: Launcher, there: int, code: int):
    """What it refuses, nobody tries again; its hang is the run's, although this process has left for a lost peer."""
    script(launcher.bin / "ssh", SSH)
    launcher.plan("exit 0", "sleep 1 75")
    done = launcher.run("--config=x.py", f"--nodes=here,bad{there}", JAXTRAIN_RESTARTS="0")
    assert done.returncode == code, done.stderr


def test_a_signal_to_the_process_group_keeps_the_runs_code(launcher: Launcher):
    """As systemd, or `kill -- -PGID`, sends it: also to ssh and to what waits for it."""
    script(launcher.bin / "ssh", "#!/bin/bash\nsleep 3\nexit 75\n")  # over there it ends as the processes have agreed
    process = launcher.begin("exit 0", "until 75", arguments=["--config=x.py", "--nodes=here,there"])
    launcher.await_attempts(2)
    time.sleep(0.5)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 75 and time.monotonic() - began < 15, stderr
    assert "because run.sh was sent TERM" in stderr


def test_another_state_of_the_code_is_refused(launcher: Launcher, tmp_path: Path):
    """The second machine's checkout has another commit: nothing trains."""
    script(launcher.bin / "ssh", SSH.replace('"$command"', '"${command//JAXTRAIN_EXPECTED=/JAXTRAIN_EXPECTED=other}"'))
    launcher.plan("exit 0", "until 75")
    done = launcher.run("--config=x.py", "--nodes=here,there")
    assert done.returncode == 2, done.stderr
    assert "to the same state on all nodes" in done.stderr and len(launcher.attempts()) == 2


class Real(Machine):
    """The launcher over this environment's Python and the real package."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        shutil.rmtree(self.repo / "jaxtrain")
        (self.repo / "jaxtrain").symlink_to(REPO / "jaxtrain")
        script(self.bin / "venv-python", f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
        script(self.bin / "ssh", SSH)
        self.run("setup")

    def begin(self, *args: str, **env: str) -> subprocess.Popen[bytes]:
        base = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.cwd),
            "JAX_PLATFORMS": "cpu",
            "JAXTRAIN_RESTART_WAIT": "0",
        }
        with open(self.cwd / "words", "ab") as words:
            command = ["bash", str(self.repo / "run.sh"), *args]
            return subprocess.Popen(command, env=base | env, cwd=self.cwd, stdin=subprocess.DEVNULL, stdout=words, stderr=words)

    @property
    def said(self) -> str:
        return (self.cwd / "words").read_text()


def trainer(workdir: Path, index: int) -> int:
    """The process of that index of a run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"--process-id={index}".encode() in words and f"--workdir={workdir}".encode() in words and b"-m" in words:
            return int(folder.name)
    raise AssertionError(f"no process {index}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same run by one process over four devices."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "small.py").write_text(runs.SMALL)
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    code, said = runs.Child(folder / "small.py", folder / "run", folder / "words", env=env, **MORE).end()
    assert code == 0, said
    return runs.losses(folder / "run")


MORE = {"train__steps": 40, "eval__every_steps": 0, "checkpoint__every_steps": 10, "mesh__data": 2, "mesh__fsdp": -1}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.more)])
def test_launch_train_save_kill_and_resume(count: int, tmp_path: Path, alone: dict[int, float]):
    """The whole path over several processes, each of which believes to have a machine to itself. The last one is killed."""
    machine, workdir = Real(tmp_path), tmp_path / "the run"
    config = tmp_path / "small.py"
    config.write_text(runs.SMALL)
    names = ["127.0.0.1:" + str(free_port()), *(f"node{i}" for i in range(1, count))]
    devices = {"JAX_NUM_CPU_DEVICES": str(4 // count), "DEVICES": str(4 // count)}
    given = runs.arguments(config, workdir, {"paths__cache": tmp_path / "compiled", **MORE})
    process = machine.begin(f"--nodes={','.join(names)}", *given, **devices)
    try:
        wait(process, machine, lambda: len(runs.lines(workdir)) >= 15)
        os.kill(trainer(workdir, count - 1), signal.SIGKILL)
        wait(process, machine, lambda: process.poll() is not None)
    finally:
        process.kill()
    assert process.returncode == 0, machine.said
    assert f"node{count - 1} ended with 137" in machine.said and "restart 1 of 3" in machine.said
    assert "resuming from step 10" in machine.said
    found = runs.losses(workdir)
    assert list(found) == list(range(1, 41))
    assert max(abs(found[i] - alone[i]) for i in found) < 1e-5, "the same run as one process takes"
    receipt = runs.receipt(workdir)
    assert receipt["devices"]["process_count"] == count and receipt["attempt"] == 2 and receipt["restart"] == 1
    assert receipt["goodput"]["attempts"] == 2 and receipt["goodput"]["parts_s"]["repeated"] > 0
    asked = (machine.cwd / "ssh").read_text().splitlines()
    assert len(asked) == 2 * (count - 1) and all("JAXTRAIN_RESTARTS=0" in line for line in asked)


def wait(process: subprocess.Popen[bytes], machine: Real, what: Callable[[], bool]) -> None:
    limit = time.monotonic() + 180
    while not what():
        assert time.monotonic() < limit and (process.poll() is None or what()), machine.said
        time.sleep(0.05)
