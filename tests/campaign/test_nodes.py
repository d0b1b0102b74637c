"""A run on several nodes through run.sh, with real processes: it trains, saves, loses a node, and continues."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import runs
from faults import free_port
from run_sh import REPO, Machine, copy_launcher, script, wait_for

STEPS = 80
RUN = {"train__steps": STEPS, "checkpoint__every_steps": 20, "eval__every_steps": 0, "mesh__data": 2, "mesh__fsdp": -1}
# A fake ssh: runs the command in a local shell, with none of this shell's variables, and logs its arguments.
SSH = """#!/bin/bash
printf '%s\\n' "$*" >>"$HOME/ssh"
exec env -i PATH="$PATH" HOME="$HOME" JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=$DEVICES bash -c "${*: -1}"
"""


class Real(Machine):
    """run.sh with this environment's Python and the real package."""

    def __init__(self, folder: Path):
        super().__init__(
            copy_launcher(folder / "a folder" / "jaxtrain"), folder, f'#!/bin/bash\nexec "{sys.executable}" "$@"\n'
        )
        shutil.rmtree(self.repo / "jaxtrain")
        (self.repo / "jaxtrain").symlink_to(REPO / "jaxtrain")
        script(self.bin / "ssh", SSH)
        self.run("setup")

    def begin(self, *args: str, **env: str) -> subprocess.Popen[bytes]:
        with open(self.cwd / "words", "ab") as words:
            command = ["bash", str(self.repo / "run.sh"), *args]
            environ = self.environ | {"JAX_PLATFORMS": "cpu"} | env
            return subprocess.Popen(command, env=environ, cwd=self.cwd, stdin=subprocess.DEVNULL, stdout=words, stderr=words)

    @property
    def said(self) -> str:
        return (self.cwd / "words").read_text()


def trainer(workdir: Path, index: int) -> int:
    """Return the pid of a run's process that was started with --process-id=`index`."""
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
    """Return the losses of a run with the settings RUN, by one process on four devices."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "small.py").write_text(runs.SMALL)
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    code, said = runs.Child(folder / "small.py", folder / "run", folder / "words", env=env, **RUN).end(timeout=600)
    assert code == 0, said
    return runs.losses(folder / "run")


@pytest.mark.long
def test_a_run_loses_a_machine_and_resumes(tmp_path: Path, alone: dict[int, float]):
    """If the other node's process is killed, run.sh restarts both, and the losses are those of a run on one process."""
    machine, workdir = Real(tmp_path), tmp_path / "the run"
    config = tmp_path / "small.py"
    config.write_text(runs.SMALL)
    devices = {"JAX_NUM_CPU_DEVICES": "2", "DEVICES": "2"}
    given = runs.arguments(config, workdir, {"paths__cache": tmp_path / "compiled", **RUN})
    process = machine.begin(f"--nodes=127.0.0.1:{free_port()},node1", *given, **devices)

    def until(what: Callable[[], bool]) -> None:
        wait_for(lambda: what() or process.poll() is not None, hung_s=600)
        assert what(), machine.said

    try:
        until(lambda: len(runs.lines(workdir)) >= 25)
        os.kill(trainer(workdir, 1), signal.SIGKILL)
        until(lambda: process.poll() is not None)
    finally:
        process.kill()
    assert process.returncode == 0, machine.said
    found = runs.losses(workdir)
    assert list(found) == list(range(1, STEPS + 1))
    assert max(abs(found[i] - alone[i]) for i in found) < 1e-5, "the same run as one process takes"
    receipt = runs.receipt(workdir)
    assert receipt["devices"]["process_count"] == 2 and receipt["attempt"] == 2 and receipt["restart"] == 1
    assert receipt["resumed_from_step"] % 20 == 0 and receipt["attempts"][0]["exit_code"] == 75
    assert receipt["goodput"]["attempts"] == 2 and receipt["goodput"]["parts_s"]["repeated"] > 0
    asked = (machine.cwd / "ssh").read_text().splitlines()
    assert len(asked) == 2 and all("JAXTRAIN_RESTARTS=0" in line for line in asked)
