"""Preflight in processes: several nodes together, and the measuring process, which is ended if it hangs or crashes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nodes import RECORDED, a_plain_environment, faults  # noqa: F401

from jaxtrain.distributed import Cluster
from jaxtrain.preflight import measure, rates

REPO = Path(__file__).resolve().parents[2]
MIB = 2**20


def test_what_was_overlooked_ends_too(tmp_path):
    """If preflight itself hangs, it prints the line that hangs, ends the commands that it started, and exits with 3."""
    pid = tmp_path / "pid"
    script = f"""
import sys, time
from jaxtrain.preflight import __main__ as command
command.LATE_S = 0.5
def hang(context, *_):
    context.node.start(["sh -c 'echo $$ > {pid}; exec sleep 300'"])
    time.sleep(60)
command.check_node = hang
sys.exit(command.main(["--limit=1", "--workdir={tmp_path}"], own_process=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(REPO)}
    )
    assert done.returncode == 3
    assert "FAULT: preflight did not end within 2 s; it was in run (__main__.py, line " in done.stderr
    limit = time.monotonic() + 60
    while time.monotonic() < limit and alive(int(pid.read_text())):
        time.sleep(0.05)
    assert not alive(int(pid.read_text()))


# ---- Several nodes


def meet(second: str, first: str = "a") -> list[tuple[int, str]]:
    """Run two processes over loopback, each on a recorded node. Returns (exit code, output) of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = [sys.executable, "-m", "jaxtrain.preflight", f"--coordinator={address}", "--num-processes=2"]
    environ = os.environ | {"PYTHONPATH": str(REPO)}
    started = [
        subprocess.Popen(
            [*common, f"--process-id={i}", f"--recorded={RECORDED / 'two_nodes' / name}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ,
        )
        for i, name in enumerate((first, second))
    ]  # fmt: skip
    return [(process.wait(100), process.stdout.read() if process.stdout else "") for process in started]


def test_two_healthy_nodes_are_fit():
    (first, said), (second, quiet) = meet("b")
    assert (first, second) == (0, 0) and not quiet.strip()
    assert "2 nodes: node-a, node-b" in said and "nodes alike" in said and "between nodes" in said
    assert said.rstrip().splitlines()[-1].startswith("fit: 2 nodes of 8 x NVIDIA H200, ")


def test_a_fault_on_one_node_stops_all():
    (first, said), (second, _) = meet("b_phb_link")
    assert (first, second) == (3, 3)
    assert "FAULT: topology on node-b (GPU0-GPU3 PHB" in said.rstrip().splitlines()[-1] and "on node-a" not in said


def alone(node: str) -> tuple[int, dict, str]:
    """Run process 0 of two on a recorded node, without the other. Returns (exit code, JSON, verdict line)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"--coordinator=127.0.0.1:{free.getsockname()[1]}"
    options = [
        f"--recorded={RECORDED / 'two_nodes' / node}",
        "--json",
        address,
        "--num-processes=2",
        "--process-id=0",
        "--meet=5",
    ]
    command = [sys.executable, "-m", "jaxtrain.preflight", *options]
    environ = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr.strip().splitlines()[-1]


def test_a_node_is_judged_without_the_other_process():
    code, found, line = alone("a")
    checks = found["nodes"][0]["checks"]
    # No known fault: run.sh starts again.
    assert (code, found["verdict"], faults(found)) == (75, "not met", []) and len(checks) > 40
    assert [c["name"] for c in checks if c["state"] == "missing"] == ["processes"]
    assert line.startswith("not met: process 0: not all 2 processes connected to 127.0.0.1:") and len(line) < 250
    code, found, _ = alone("b_phb_link")
    assert code == 3 and [c["name"] for c in faults(found)] == ["topology"], "an unfit node is reported in any case"


def start_two(script: str, second: str) -> list[subprocess.Popen[str]]:
    """Start two processes on recorded nodes. Each runs `script` before the command."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    whole = f"""
import sys, time
from jaxtrain.preflight import __main__ as command, multi_node
{script}
sys.exit(command.main(sys.argv[1:], own_process=True))
"""
    common = [sys.executable, "-c", whole, f"--coordinator={address}", "--num-processes=2", "--limit=20"]
    environ = os.environ | {"PYTHONPATH": str(REPO)}
    return [
        subprocess.Popen(
            [*common, f"--process-id={i}", f"--recorded={RECORDED / 'two_nodes' / name}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ,
        )
        for i, name in enumerate(("a", second))
    ]  # fmt: skip


@pytest.mark.parametrize(("second", "code", "verdict"), [("b", 75, "not met: process 0"), ("b_phb_link", 3, "FAULT: topology")])
def test_a_process_reports_its_node_if_process_0_is_killed(second, code, verdict):
    """If process 0 is killed, process 1 prints its node's verdict before JAX ends process 1 too."""
    hang = "multi_node.Preflight._measure = lambda _: print('measuring', flush=True) or time.sleep(1000)"
    both = start_two(hang, second)
    for process in both:
        assert process.stdout and any(line == "measuring\n" for line in process.stdout)
    both[0].kill()
    said, _ = both[1].communicate(timeout=100)
    both[0].wait()
    assert both[1].returncode == code and said.rstrip().splitlines()[-1].startswith(verdict), said
    assert "node-b: 8 x NVIDIA H200" in said


def test_a_process_that_does_not_leave_delays_no_other():
    """If process 1 hangs after the verdict, process 0 still prints the verdict and exits with 0."""
    stuck = "if '--process-id=1' in sys.argv: multi_node.Preflight.close = lambda *_: time.sleep(1000)"
    both = start_two(stuck, "b")
    said, _ = both[0].communicate(timeout=100)
    both[1].kill()
    both[1].communicate()
    assert both[0].returncode == 0 and said.rstrip().splitlines()[-1].startswith("fit: 2 nodes"), said


# ---- The measuring process


def test_everything_is_measured_in_another_process(tmp_path):
    found = measure.measure({"data": tmp_path, "scratch": tmp_path / "not" / "there"}, 120, on_cpu=True, disk_bytes=4 * MIB)
    for name in rates.GPU_RATES:
        assert len(found[name]) == 8 and all(value > 0 for value in found[name]), found
    assert all(found[name] > 0 for name in rates.BUS_RATES)
    assert [found[name] for name in rates.INTER_NODE_RATES] == [None, None]
    assert found["left_out"] == dict.fromkeys(rates.INTER_NODE_RATES, "there is one node")
    assert found["disk"]["data"] is found["disk"]["scratch"] and found["disk"]["data"]["write_gb_s"] > 0
    assert found["gpus"] == list(range(8)) and found["under_load"] == [] and found["failed"] == {}
    assert list(tmp_path.iterdir()) == []


def test_two_processes_measure_together(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = """
import json, sys
from jaxtrain.distributed import Cluster
from jaxtrain.preflight.measure import measure
print(json.dumps(measure({}, 120, Cluster(sys.argv[1], 2, int(sys.argv[2]), None, "this test"), on_cpu=True)))
"""
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, f"127.0.0.1:{port}", str(i)],
            cwd=REPO,
            env=environ,
            stdout=subprocess.PIPE,
        )
        for i in range(2)
    ]
    found = [json.loads(process.communicate(timeout=150)[0].splitlines()[-1]) for process in both]
    for one in found:  # one machine is one node
        assert len(one["gemm_tflops"]) == 2 and set(one["left_out"]) == set(rates.INTER_NODE_RATES), found
        assert all(one[name] > 0 for name in rates.BUS_RATES)


def instead(monkeypatch, tmp_path: Path, code: str) -> None:
    """Replace the measurements: the child saves a partial result from the middle of a collective, and then runs `code`."""
    (tmp_path / "instead.py").write_text(f"""
import os, time
from jaxtrain.bench import child

def case(request):
    answer = {{"verdict": child.LATE, "current": "all-reduce over the node's 8 GPUs", "key": "all_reduce_bus_gb_s",
              "began_unix": time.time(), "measured": {{"gemm_tflops": [7.0]}}}}
    child.save_partial(request, answer)
    {code}
""")
    monkeypatch.setattr(measure, "CASE", "instead:case")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_hang_costs_the_budget_and_no_more(monkeypatch, tmp_path):
    note = tmp_path / "pid"
    instead(monkeypatch, tmp_path, f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(100)")
    found = measure.measure({}, 4.0, on_cpu=True)
    assert found["gemm_tflops"] == [7.0] and "gemm_tflops" not in found["left_out"]
    words = "not done within 4 s, and ended in all-reduce over the node's 8 GPUs"
    assert found["hbm_gb_s"] == [] and found["left_out"]["hbm_gb_s"] == found["left_out"]["all_reduce_bus_gb_s"] == words
    assert found["failed"] == {}  # too short for a hang
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_a_hang_in_a_collective_is_a_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "HANG_S", 0.0)
    instead(monkeypatch, tmp_path, "time.sleep(100)")
    found = measure.measure({}, 4.0, on_cpu=True)
    assert found["failed"] == {"all_reduce_bus_gb_s": found["left_out"]["all_reduce_bus_gb_s"]}


def test_a_crash_is_told_in_its_own_words(monkeypatch, tmp_path):
    instead(monkeypatch, tmp_path, "print('NCCL WARN unhandled cuda error', flush=True); os.kill(os.getpid(), 11)")
    found = measure.measure({}, 60.0, on_cpu=True)
    words = "the process failed in all-reduce over the node's 8 GPUs: exit code -11: NCCL WARN unhandled cuda error"
    assert found["gemm_tflops"] == [7.0] and found["left_out"]["h2d_gb_s"] == words and found["failed"] == {"process": words}


@pytest.mark.parametrize("alone", [True, False])
def test_one_that_falls_with_the_others_is_no_crash(alone, monkeypatch, tmp_path):
    """An abort is a fault in a run of one process. In a run of several it is none: JAX aborts a process if another ended."""
    instead(monkeypatch, tmp_path, "os.kill(os.getpid(), 6)")
    cluster = None if alone else Cluster("a:1", 2, 0, None, "this test")
    monkeypatch.setattr(measure, "PEERS_S", 60.0)
    found = measure.measure({}, 60.0, cluster, on_cpu=True)
    assert ("process" in found["failed"]) == alone and "exit code -6" in found["left_out"]["hbm_gb_s"]


def test_it_ends_with_the_process_that_asked(tmp_path, monkeypatch):
    """If its parent is killed, the measuring process ends too, because other processes need the GPUs."""
    note = tmp_path / "pid"
    instead(monkeypatch, tmp_path, f"open({str(note)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(100)")
    script = "from jaxtrain.preflight import measure\nmeasure.CASE = 'instead:case'\nmeasure.measure({}, 100.0, on_cpu=True)"
    asking = subprocess.Popen([sys.executable, "-c", script], cwd=REPO, env=os.environ | {"PYTHONPATH": f"{REPO}:{tmp_path}"})
    while not (note.exists() and note.read_text().endswith("\n")):
        assert asking.poll() is None
        time.sleep(0.05)
    pid = int(note.read_text())
    os.kill(pid, 0)
    asking.kill()
    asking.wait()
    limit = time.monotonic() + 100
    while time.monotonic() < limit and alive(pid):
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path):
    script = f"""
import os, time
from pathlib import Path
from jaxtrain.bench import disk_rates
os.fsync = lambda _: print("written", flush=True) or time.sleep(100)
disk_rates.disk(Path({str(tmp_path)!r}), 90.0, {4 * MIB})
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.iterdir()) == []
