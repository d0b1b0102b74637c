"""Processes of a run on JAX's coordination service end together, also if one fails, is killed or is stopped."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from faults import free_port
from run_sh import wait_for
from runs import REPO

COUNT = 3
# index, count, port, time limit of the start in seconds, and the code of each process between its start and its end
PROCESS = """
import os, sys, time
from jaxtrain.runtime.distributed import Cluster, ClusterError, Peers, connect, leave

index, count, timeout = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
try:
    connect(Cluster("127.0.0.1:" + sys.argv[3], count, index, None, "the test"), init_timeout_s=timeout)
except ClusterError as error:
    print(error, flush=True)
    leave(75)
peers = Peers.from_jax()

def lost(message):
    print("lost:", message, flush=True)
    os._exit(75)

peers.watch(lost)
assert peers.gather("all", str(index), 60) == [str(i) for i in range(count)]
print("ready", flush=True)
exec(sys.argv[5])
peers.close()
print("closed", flush=True)
leave(7)
"""
STEPS = """
step = 0
while peers.may_start(step + 1):
    step += 1
    if index == 1 and step == 20:
        peers.ask_to_stop("SIGTERM")
    time.sleep(0.01 * (index + 1))
print("last step", step, flush=True)
"""
WAIT = "time.sleep(600)"


class Processes:
    """The processes of one run, with their output in files."""

    def __init__(self, folder: Path, code: str, counts: tuple[int, ...] = (COUNT,) * COUNT, timeout: int = 120, port: int = 0):
        self.port = port or free_port()
        self.outputs = [folder / f"{i}.txt" for i in range(len(counts))]
        environ = os.environ | {"JAX_PLATFORMS": "cpu"}
        self.children = []
        for i, count in enumerate(counts):
            command = [sys.executable, "-c", PROCESS, *map(str, (i, count, self.port, timeout)), code]
            with open(self.outputs[i], "wb") as out:
                self.children.append(subprocess.Popen(command, cwd=REPO, env=environ, stdout=out, stderr=out))

    def await_ready(self) -> None:
        for child, output in zip(self.children, self.outputs, strict=True):
            wait_for(lambda child=child, output=output: "ready\n" in output.read_text() or child.poll() is not None)
            assert child.poll() is None, output.read_text()

    def end(self) -> tuple[list[int], list[str]]:
        """Wait for all processes. Returns exit codes and outputs, by process."""
        codes = [child.wait(300) for child in self.children]
        return codes, [output.read_text() for output in self.outputs]


def test_all_stop_after_the_same_step_and_leave_together(tmp_path: Path) -> None:
    codes, outputs = Processes(tmp_path, STEPS).end()
    assert codes == [7] * COUNT, outputs
    steps = {line for text in outputs for line in text.splitlines() if line.startswith("last step")}
    assert len(steps) == 1
    assert all(text.endswith("closed\n") for text in outputs)


@pytest.mark.parametrize(
    "index",
    [0, 2],
)
def test_a_failure_reaches_the_others_with_its_reason(index: int, tmp_path: Path) -> None:
    processes = Processes(tmp_path, f"if index == {index}:\n    peers.close('ValueError: broken'); leave(1)\n{WAIT}")
    codes, outputs = processes.end()
    assert codes == [1 if i == index else 75 for i in range(COUNT)], outputs
    for i in set(range(COUNT)) - {index}:
        assert f"process {index} (" in outputs[i] and "ValueError: broken" in outputs[i]


@pytest.mark.parametrize(("index", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_dead_process_ends_the_others_with_its_name(index: int, number: signal.Signals, tmp_path: Path) -> None:
    processes = Processes(tmp_path, WAIT)
    processes.await_ready()
    victim = processes.children.pop(index)
    processes.outputs.pop(index)
    victim.send_signal(number)
    try:
        codes, outputs = processes.end()
    finally:
        victim.kill()
        victim.wait()
    assert codes == [75] * (COUNT - 1), outputs
    assert all(f"process {index} (host {socket.gethostname()}, pid {victim.pid})" in text for text in outputs)


@pytest.mark.parametrize(("counts", "timeout"), [((3, 3), 5), ((2, 3), 60)], ids=["one stays away", "two counts"])
def test_processes_that_do_not_all_connect_leave(counts: tuple[int, ...], timeout: int, tmp_path: Path) -> None:
    codes, outputs = Processes(tmp_path, WAIT, counts=counts, timeout=timeout).end()
    assert codes == [75, 75], outputs


def test_the_port_of_another_run_is_refused(tmp_path: Path) -> None:
    """A second run on the port of a first exits with 75. JAX alone would share the port and mix processes of both runs."""
    first = Processes(tmp_path, WAIT, counts=(1,))
    (tmp_path / "second").mkdir()
    try:
        first.await_ready()
        codes, outputs = Processes(tmp_path / "second", WAIT, counts=(1,), port=first.port).end()
    finally:
        first.children[0].kill()
        first.children[0].wait()
    assert codes == [75], outputs
