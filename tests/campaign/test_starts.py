"""How two processes start, or refuse to start together, with real processes."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import runs
from compile_options import QUICKLY
from faults import free_port

STEPS = ["--config.train.steps=2", "--config.eval.every_steps=0", "--config.log.tensorboard=false"]


def start(
    folder: Path,
    *options: str,
    folders: Sequence[Path] = (),
    env: Sequence[Mapping[str, str]] = ({}, {}),
    host: str = "127.0.0.1",
    prefix: Sequence[Sequence[str]] = ((), ()),
) -> tuple[list[int], list[str]]:
    """Start two processes of one run, and wait for them. Returns exit codes and outputs, by process.

    folders: the current folder of each process. prefix: the words before each command.
    """
    port, children = free_port(), []
    for i in range(2):
        given = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": QUICKLY, "PYTHONPATH": str(runs.REPO)}
        line = [*prefix[i], sys.executable, "-m", "jaxtrain.main", f"--config={runs.small()}", *STEPS, *options]
        line += [f"--coordinator={host}:{port}", "--num-processes=2", f"--process-id={i}"]
        where = folders[i] if folders else folder
        where.mkdir(exist_ok=True)
        with open(folder / f"{i}.txt", "wb") as out:
            environ = os.environ | given | dict(env[i])
            children.append(subprocess.Popen(line, cwd=where, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
    try:
        codes = [child.wait(120) for child in children]
    finally:
        for child in children:
            child.kill()
    return codes, [(folder / f"{i}.txt").read_text() for i in range(2)]


def everything(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob("*")]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--workdir=runs/a"], "--workdir"),
        (["--workdir={shared}/a", "--config.checkpoint.dir=kept"], "checkpoint.dir"),
        (["--workdir=runs/a", "--config.checkpoint.dir={shared}/kept"], "--workdir"),
    ],
    ids=["workdir", "checkpoint.dir", "workdir without checkpoints"],
)
def test_folders_of_one_node_are_refused_on_all(options: list[str], key: str, tmp_path: Path):
    """The nodes differ in the current folder: a relative path is another folder on each."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    codes, outputs = start(tmp_path, *(option.format(shared=tmp_path / "all") for option in options), folders=nodes)
    assert codes == [2, 2], outputs
    for text in outputs:
        assert text.count("error: ") == 1 and f"error: {key} = " in text and "process 1 (host" in text and str(nodes[1]) in text
    assert everything(*nodes, tmp_path / "all") == []


def test_a_resume_on_another_node_is_refused(tmp_path: Path):
    """The checkpoints of an earlier run are there on one node only. They stay as they were."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    assert runs.train(runs.small(), nodes[0] / "runs" / "a", train__steps=2, eval__every_steps=0) == 0
    before = runs.tree(nodes[0])
    codes, outputs = start(tmp_path, "--workdir=runs/a", "--config.train.steps=4", folders=nodes)
    assert codes == [2, 2] and all("error: --workdir = " in text for text in outputs), outputs
    assert runs.tree(nodes[0]) == before and everything(nodes[1]) == []


def test_a_mount_of_one_node_is_refused(tmp_path: Path):
    """The path is the same on both nodes, and the file systems differ, as those of local disks."""
    own = [tmp_path / "disk0", tmp_path / "disk1"]
    for folder in (*own, tmp_path / "runs"):
        folder.mkdir()
    mount = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
    prefix = [[*mount, str(folder), str(tmp_path / "runs")] for folder in own]
    if subprocess.run([*prefix[0], "true"], capture_output=True).returncode:
        pytest.skip("mounts need root")
    codes, outputs = start(tmp_path, f"--workdir={tmp_path}/runs/a", prefix=prefix)
    assert codes == [2, 2] and all("error: --workdir = " in text for text in outputs), outputs
    assert everything(*own) == []


@pytest.mark.parametrize(
    ("devices", "options"),
    [(("2", "4"), ()), (("6", "2"), ("--config.model.d_model=32",))],
    ids=["both could train", "one is refused alone"],
)
def test_different_devices_are_refused_on_all(devices: tuple[str, str], options: tuple[str, ...], tmp_path: Path):
    env = [{"JAX_NUM_CPU_DEVICES": each} for each in devices]
    codes, outputs = start(tmp_path, f"--workdir={tmp_path}/run", *options, env=env)
    assert codes == [2, 2], outputs
    for text in outputs:
        (line,) = (line for line in text.splitlines() if line.startswith("error: "))
        assert line.startswith("error: devices: ") and all(f"{each} CPU devices" in line for each in devices)
    assert not (tmp_path / "run").exists()


def test_a_mistake_on_one_node_is_told_on_the_other(tmp_path: Path):
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    nodes[0].mkdir()
    (nodes[0] / "base").mkdir()
    codes, outputs = start(tmp_path, f"--workdir={tmp_path}/run", "--config.init.from=base", folders=nodes)
    assert codes == [2, 2], outputs
    assert "error: init.from = 'base'" in outputs[1] and "error: process 1 (host" in outputs[0] and "init.from" in outputs[0]
    assert not (tmp_path / "run").exists()


def test_a_mistake_in_one_command_is_told_at_once(tmp_path: Path):
    """The other process of the run does not exist yet. So the mistake is told before this process looks for it."""
    env = {"JAX_PLATFORMS": "cpu", "JAXTRAIN_NUM_PROCESSES": "2", "JAXTRAIN_PROCESS_ID": "1"}
    env["JAXTRAIN_COORDINATOR"] = f"127.0.0.1:{free_port()}"
    child = runs.Child(runs.small(), tmp_path / "run", tmp_path / "words", env=env, train__stepz=4)
    child.until(lambda: "error: train.stepz" in child.said)
    assert child.process.poll() is None
    code, said = child.end()
    assert code == 2 and said.count("error: ") == 1


def test_a_refusal_after_the_connection_reaches_the_other(tmp_path: Path):
    """A loss of the user's own is imported after the processes have connected. On node 1 its module lacks it."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for folder, text in zip(nodes, ("from jaxtrain.step.loss import cross_entropy as mine\n", "\n"), strict=True):
        folder.mkdir()
        (folder / "own.py").write_text(text)
    env = [{"PYTHONPATH": os.pathsep.join([str(runs.REPO), str(folder)])} for folder in nodes]
    codes, outputs = start(tmp_path, f"--workdir={tmp_path}/run", "--config.loss.name=own:mine", env=env)
    assert codes == [2, 2], outputs
    assert "process 1 (host" in outputs[0] and all("own" in text for text in outputs)


def test_two_processes_train_over_ipv6_and_leave_no_probe(tmp_path: Path):
    workdir = tmp_path / "a" / "run"
    codes, outputs = start(tmp_path, f"--workdir={workdir}", host="[::1]")
    assert codes == [0, 0], outputs
    assert runs.steps(workdir) == [2] and not list(tmp_path.rglob(".shared-*"))
