"""Preflight in processes: several nodes together, and the measuring process, which is ended if it hangs or crashes."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nodes import RECORDED, a_plain_environment, faults  # noqa: F401

from jaxtrain.node import node_rates, rates

REPO = Path(__file__).resolve().parents[2]
ENVIRON = {"PYTHONPATH": str(REPO)}
MIB = 2**20


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def gone(pid: int) -> bool:
    """Wait until a process has ended; a zombie has."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_what_was_overlooked_ends_too(tmp_path):
    """If preflight itself hangs, it prints the line that hangs, ends the commands that it started, and exits with 3."""
    pid = tmp_path / "pid"
    script = f"""
import sys, time
from pathlib import Path
from jaxtrain.commands import preflight as command
from jaxtrain.node import facts, preflight
preflight.LATE_S = 9
def hang(*_):
    with facts._start("sh -c 'echo $$ > {pid}; exec sleep 300'", Path("{tmp_path}/log")) as wait:
        wait(time.monotonic() + 300)
preflight.read_facts = hang
sys.exit(command.main(["--limit=1", "--workdir={tmp_path}"], own_process=True))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, env=os.environ | ENVIRON)
    assert done.returncode == 3 and "facts.py" in done.stderr
    assert gone(int(pid.read_text()))


# ---- Several nodes


def two(second: str, before: str = "", *more: str) -> list[subprocess.Popen[str]]:
    """Start two processes over loopback, each on a recorded node. Each runs `before` before the command."""
    script = f"""
import sys, time
from jaxtrain.commands import preflight as command
from jaxtrain.node import multi_node
{before}
sys.exit(command.main(sys.argv[1:], own_process=True))
"""
    common = [sys.executable, "-c", script, f"--coordinator={free_address()}", "--num-processes=2", *more]
    return [
        subprocess.Popen(
            [*common, f"--process-id={i}", f"--recorded={RECORDED / 'two_nodes' / name}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | ENVIRON,
        )
        for i, name in enumerate(("a", second))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("second", "code", "verdict"),
    [("b", 0, "fit: 2 nodes of 8 x NVIDIA H200, "), ("b_phb_link", 3, "FAULT: topology on node-b ")],
)
def test_nodes_have_one_verdict(second, code, verdict):
    both = two(second)
    (said, quiet) = (process.communicate(timeout=300)[0] for process in both)
    assert [process.returncode for process in both] == [code, code] and not quiet.strip()
    assert said.rstrip().splitlines()[-1].startswith(verdict) and "between nodes" in said


@pytest.mark.parametrize(
    ("node", "code", "verdict", "found"), [("a", 75, "not met", []), ("b_phb_link", 3, "fault", ["topology"])]
)
def test_a_node_is_judged_without_the_other_process(node, code, verdict, found):
    """Without a known fault run.sh starts again."""
    options = [f"--recorded={RECORDED / 'two_nodes' / node}", "--json", f"--coordinator={free_address()}", "--num-processes=2"]
    command = [sys.executable, "-m", "jaxtrain", "preflight", *options, "--process-id=0", "--meet=5"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRON, timeout=300, check=False)
    told = json.loads(done.stdout)
    assert (done.returncode, told["verdict"], [*faults(told)]) == (code, verdict, found)
    checks = told["nodes"][0]["checks"]
    assert [c["name"] for c in checks if c["state"] == "missing"] == ["processes"] and len(checks) > 30


@pytest.mark.parametrize(("second", "code", "verdict"), [("b", 75, "not met: "), ("b_phb_link", 3, "FAULT: topology")])
def test_a_process_reports_its_node_if_process_0_is_killed(second, code, verdict):
    """If process 0 is killed, process 1 prints its node's verdict before JAX ends process 1 too."""
    hang = "multi_node.Preflight._measure = lambda *_, **__: print('measuring', flush=True) or time.sleep(1000)"
    both = two(second, hang)
    for process in both:
        assert process.stdout and any(line == "measuring\n" for line in process.stdout)
    both[0].kill()
    said, _ = both[1].communicate(timeout=300)
    both[0].wait()
    assert both[1].returncode == code and said.rstrip().splitlines()[-1].startswith(verdict), said
    assert "node-b: 8 x NVIDIA H200" in said


# ---- The measuring process


def test_everything_is_measured_in_another_process(tmp_path):
    found = node_rates.measure_node(
        {"data": tmp_path, "scratch": tmp_path / "not" / "there"}, 300, on_cpu=True, disk_bytes=4 * MIB
    )
    for name in rates.GPU_RATES:
        assert len(found[name]) == 8 and all(value > 0 for value in found[name]), found
    here, between = rates.BUS_RATES
    assert found[here] > 0 and found[between] is None and set(found["left_out"]) == {between}
    assert found["disk"]["data"] is found["disk"]["scratch"] and found["disk"]["data"]["write_gb_s"] > 0
    assert found["gpus"] == list(range(8)) and found["under_load"] == [] and found["failed"] == {}
    assert list(tmp_path.iterdir()) == []


def test_two_processes_measure_together():
    script = """
import json, sys
from jaxtrain.runtime.distributed import Cluster
from jaxtrain.node.node_rates import measure_node
print(json.dumps(measure_node({}, 300, Cluster(sys.argv[1], 2, int(sys.argv[2]), None, "this test"), on_cpu=True)))
"""
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", script, free_address()]
    both = [subprocess.Popen([*command, str(i)], cwd=REPO, env=environ, stdout=subprocess.PIPE) for i in range(2)]
    found = [json.loads(process.communicate(timeout=400)[0].splitlines()[-1]) for process in both]
    for one in found:  # one machine is one node
        assert len(one["gemm_tflops"]) == 2 and set(one["left_out"]) == {rates.BUS_RATES[1]}, found
        assert one[rates.BUS_RATES[0]] > 0


def instead(monkeypatch, tmp_path: Path, code: str) -> None:
    """Replace the measurements: the child saves a partial result from the middle of a collective, and then runs `code`."""
    (tmp_path / "instead.py").write_text(f"""
import os, time
from jaxtrain.train import child

def case(request):
    answer = {{"verdict": child.LATE, "current": "all-reduce over the node's 8 GPUs", "key": "all_reduce_bus_gb_s",
              "began_unix": time.time(), "measured": {{"gemm_tflops": [7.0]}}}}
    child.save_partial(request, answer)
    {code}
""")
    monkeypatch.setattr(node_rates, "CASE", "instead:case")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_hang_costs_the_budget_and_no_more(monkeypatch, tmp_path):
    monkeypatch.setattr(node_rates, "HANG_S", 0.0)
    note = tmp_path / "pid"
    instead(monkeypatch, tmp_path, f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(1000)")
    found = node_rates.measure_node({}, 15.0, on_cpu=True)
    assert found["gemm_tflops"] == [7.0] and found["hbm_gb_s"] == [] and set(found["failed"]) == {"all_reduce_bus_gb_s"}
    assert {"hbm_gb_s", "all_reduce_bus_gb_s"} < set(found["left_out"]) and "gemm_tflops" not in found["left_out"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_a_crash_is_told_in_its_own_words(monkeypatch, tmp_path):
    instead(monkeypatch, tmp_path, "print('NCCL WARN unhandled cuda error', flush=True); os.kill(os.getpid(), 11)")
    found = node_rates.measure_node({}, 300.0, on_cpu=True)
    words = found["failed"]["process"]
    assert "-11" in words and "NCCL WARN unhandled cuda error" in words
    assert found["gemm_tflops"] == [7.0] and found["left_out"]["hbm_gb_s"] == words


def test_it_ends_with_the_process_that_asked(tmp_path, monkeypatch):
    """If its parent is killed, the measuring process ends too, because other processes need the GPUs."""
    note = tmp_path / "pid"
    instead(monkeypatch, tmp_path, f"open({str(note)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(1000)")
    script = "from jaxtrain.node import node_rates as m\nm.CASE = 'instead:case'\nm.measure_node({}, 900.0, on_cpu=True)"
    asking = subprocess.Popen([sys.executable, "-c", script], cwd=REPO, env=os.environ | {"PYTHONPATH": f"{REPO}:{tmp_path}"})
    while not (note.exists() and note.read_text().endswith("\n")):
        assert asking.poll() is None
        time.sleep(0.05)
    pid = int(note.read_text())
    os.kill(pid, 0)
    asking.kill()
    asking.wait()
    assert gone(pid)
