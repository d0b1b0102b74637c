"""Two supervised processes of a run, of which one is killed and started anew, as a scheduler does: the run continues."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from faults import free_port
from run_sh import wait_for

STEPS = 80
RUN = {"train__steps": STEPS, "checkpoint__every_steps": 20, "eval__every_steps": 0, "mesh__data": 2, "mesh__fsdp": -1}


def trainer_of(supervisor: int) -> int:
    """Return the pid of the process that a supervisor runs; 0 if it runs none."""
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().strip() or 0)


@pytest.mark.long
def test_a_run_loses_a_process_and_resumes(tmp_path: Path):
    """The losses are those of a run on one process."""
    config, alone, workdir, log = (tmp_path / name for name in ("small.py", "alone", "the run", "words"))
    config.write_text(runs.SMALL)
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    code, said = runs.Child(config, alone, tmp_path / "alone.txt", env=env, **RUN).end(timeout=600)
    assert code == 0, said
    env = {"PYTHONPATH": str(runs.REPO), "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAXTRAIN_RESTART_WAIT": "0"}
    env |= {"JAXTRAIN_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXTRAIN_NUM_PROCESSES": "2"}
    words = runs.arguments(config, workdir, {"paths__cache": tmp_path / "compiled", **RUN})
    command = [sys.executable, "-m", "jaxtrain.commands.supervise", *words]

    def start(index: int) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(command, env=os.environ | env | {"JAXTRAIN_PROCESS_ID": str(index)}, stdout=out, stderr=out)

    both = [start(0), start(1)]
    try:
        wait_for(lambda: len(runs.lines(workdir)) >= 25 or any(one.poll() is not None for one in both), hung_s=600)
        os.kill(trainer_of(both[1].pid), signal.SIGKILL)
        assert both[1].wait(timeout=600) == 137
        both[1] = start(1)  # at once: the other one has not noticed the loss
        assert [one.wait(timeout=600) for one in both] == [0, 0], log.read_text()
    finally:
        for one in both:
            one.kill()
    found, expected = runs.losses(workdir), runs.losses(alone)
    assert list(found) == list(range(1, STEPS + 1))
    assert max(abs(found[i] - expected[i]) for i in found) < 1e-5
    receipt = runs.receipt(workdir)
    assert receipt["devices"]["process_count"] == 2 and receipt["attempt"] == 2 and receipt["restart"] == 1
    assert receipt["resumed_from_step"] % 20 == 0 and receipt["attempts"][0]["exit_code"] == 75
    assert receipt["goodput"]["attempts"] == 2 and receipt["goodput"]["parts_s"]["repeated"] > 0
