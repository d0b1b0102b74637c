"""Preflight on recorded nodes, healthy and broken: exactly the right check reports each fault."""

import dataclasses
import functools
import json
import threading
from pathlib import Path

import pytest
from nodes import (  # noqa: F401
    H200,
    RECORDED,
    a_plain_environment,
    answer,
    both,
    copied,
    faults,
    gpus,
    judged,
    refused,
    sliders,
    some_gpus,
)

from jaxtrain.commands import preflight as command
from jaxtrain.data import loading
from jaxtrain.node import checks, multi_node, preflight, rates
from jaxtrain.node.facts import BOOST, FILE, LOG, TOPOLOGY, Answer, NodeFacts, Unanswered, call_with_timeout, read_recording
from jaxtrain.node.machine import parse_vboost, read_topology
from jaxtrain.node.multi_node import Preflight
from jaxtrain.node.table import NodeContext
from jaxtrain.report.preflight import FAULT, NOTE, OK, UNKNOWN, Finding
from jaxtrain.runtime import distributed

REPO = Path(__file__).resolve().parents[2]
PATHS = {"data": "/data", "checkpoints": "/scratch", "cache": "/c"}
TWO = distributed.Cluster("a:1", 2, 0, None, "this test")


@functools.cache
def default_run():
    return loading.load_config([]).run


def context(of=H200, paths=PATHS, cluster=None, **more) -> NodeContext:
    """Return the context of a check: a node (a recording, healthy by default) and the default config."""
    facts = read_recording(of) if isinstance(of, Path) else of
    return NodeContext(facts, default_run(), paths, cluster or distributed.detect({}, facts.environ)[0], False, **more)


def findings(of=H200, **more) -> dict[str, Finding]:
    """Return what preflight finds on a node: the checks, and the verdicts on its recorded rates."""
    here = context(of, **more)
    found = checks.inspect(here)
    measured = here.measured or here.facts.measured
    return {f.name: f for f in [*found, *rates.CHECKS.run(dataclasses.replace(here, measured=measured))]}


def judge_rates(of=H200, cluster=None, **measured) -> dict[str, Finding]:
    """Return the verdicts on these rates of a node."""
    return {f.name: f for f in rates.CHECKS.run(context(of, cluster=cluster, measured=measured))}


# ---- Recorded nodes

# Recording -> (the check that reports it, its state, a value that it names). In faults/ nothing else is a fault.
EXPECTED = {
    "faults/phb_link": ("topology", FAULT, "GPU0-GPU3 PHB"),
    "faults/nvl_missing_bridge": ("topology", FAULT, "GPU4 to GPU7: "),
    "faults/seven_gpus": ("GPU count", FAULT, "7 of 8"),
    "faults/lost_gpu": ("GPU count", FAULT, "0000:5d:00.0"),
    "faults/ecc_error": ("ECC", FAULT, "GPU5: 2"),
    "faults/row_remap_pending": ("row remap", FAULT, "GPU2: pending"),
    "faults/row_remap_failed": ("row remap", FAULT, "GPU2: failed"),
    "faults/xid": ("Xid", FAULT, "74"),
    "faults/power_cap": ("power limit", FAULT, "GPU0 to GPU7: 500 W of 700"),
    "faults/low_clocks": ("clocks", FAULT, "1410"),
    "faults/throttling": ("throttling", FAULT, "GPU1: hw_slowdown+hw_thermal"),
    "faults/memory_in_use": ("memory in use", FAULT, "pid 20417"),
    "faults/mig": ("MIG", FAULT, "GPU7: on"),
    "faults/narrow_pcie": ("PCIe", FAULT, "GPU3: x8 of x16"),
    "faults/nvlink_down": ("NVLink", FAULT, "GPU6: 17 of 18"),
    "faults/nvlink_recoveries": ("NVLink errors", FAULT, "recovery 12"),
    "faults/fabric_manager": ("fabric", FAULT, "In Progress"),
    "faults/port_down": ("InfiniBand", FAULT, "mlx5_5"),
    "faults/old_driver": ("driver", FAULT, "515.65.01"),
    "faults/old_cudnn": ("CUDA wheels", FAULT, "nvidia-cudnn-cu12 9.1.0.70"),
    "faults/no_plugin": ("CUDA plugin", FAULT, ""),
    "faults/library_path": ("library path", FAULT, "/opt/cuda/lib64/libcudnn_ops.so.9"),
    "faults/numa_balancing": ("NUMA balancing", FAULT, "1"),
    "faults/governor": ("CPU governor", FAULT, "powersave"),
    "faults/small_shm": ("/dev/shm", FAULT, "61 MiB"),
    "faults/locked_memory": ("locked memory", FAULT, "8 MiB"),
    "faults/full_disk": ("disk checkpoints", FAULT, "1.2 of 204,800 GiB"),
    "faults/checkpoints_in_memory": ("disk checkpoints", FAULT, "tmpfs"),
    "faults/stale_jax": ("variables", FAULT, "JAX_DISABLE_JIT=1"),
    "faults/two_memory_fractions": ("variables", FAULT, "XLA_PYTHON_CLIENT_MEM_FRACTION=0.75"),
    "faults/mnnvl": ("NCCL_MNNVL_ENABLE", FAULT, "1"),
    "faults/proxy": ("proxy", FAULT, "node-b"),
    "faults/renumbered_device": ("CUDA_VISIBLE_DEVICES", FAULT, "3"),
    "faults/slow_gpu": ("GEMM", FAULT, "GPU5 622 (-17%)"),
    "faults/slow_all_reduce": ("all-reduce", FAULT, "43 GB/s"),
    "faults/nvidia_smi_hangs": ("NVML", FAULT, "NVML"),
    "faults/needs_reset": ("GPU count", FAULT, "GPU6"),
    "faults/recovery_action": ("recovery action", FAULT, "GPU4: Drain and Reset"),
    "faults/hot_under_load": ("under load", FAULT, "GPU2: sw_thermal in 80%"),
    "faults/gpu_work_crashes": ("GPU work", FAULT, "-6"),
    "faults/mount_hangs": ("disk checkpoints", FAULT, "/scratch/run/checkpoints"),
    "faults/driver_broken": ("NVML", FAULT, "Driver Not Loaded"),
    # Harmless state that resembles a fault.
    "sound/others_train_beside": ("memory in use", OK, "0.0 GiB"),
    "sound/slurm_gave_four": ("GPU count", NOTE, "4"),
    "sound/display_card": ("GPU model", OK, "1 x NVIDIA GeForce RTX 4090"),
    "sound/hgx_h100_of_four": ("topology", OK, "NV6"),
    "sound/hgx_a100_of_four": ("topology", OK, "NV4"),
    "sound/two_of_a_bridge": ("topology", NOTE, "NV6"),
    "sound/one_gpu_in_vm": ("NVLink", NOTE, ""),
    "sound/pod_with_three": ("GPU count", OK, "3"),
    "sound/xid_before_a_reset": ("Xid", NOTE, "74"),
    "sound/governor_follows_load": ("CPU governor", NOTE, "powersave (intel_pstate)"),
    "sound/locked_memory_without_limit": ("locked memory", OK, "CAP_IPC_LOCK"),
    "sound/nccl_of_the_shell": ("variables", NOTE, "NCCL_P2P_DISABLE=1"),
    "sound/wheels_come_first": ("library path", NOTE, "/opt/cuda/lib64/libcudnn.so.9"),
    "sound/one_port_of_two_down": ("InfiniBand", NOTE, "mlx5_8"),
}


def test_every_recording_is_expected():
    assert {f"{kind}/{path.name}" for kind in ("faults", "sound") for path in (RECORDED / kind).iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_is_told_and_nothing_else(name):
    check, state, seen = EXPECTED[name]
    found = findings(RECORDED / name)
    assert {f.name for f in found.values() if f.state == FAULT} == ({check} if state == FAULT else set())
    assert found[check].state == state and seen in found[check].seen
    assert state != FAULT or (found[check].fix and found[check].why)
    assert not set(found) - set(multi_node.CHECKS), "a name that --allow does not know"


@pytest.mark.parametrize(
    ("name", "gpus", "links"), [("h200_healthy", "8 x NVIDIA H200", "NV18"), ("h200_nvl_healthy", "8 x NVIDIA H200 NVL", "NV6")]
)
def test_a_healthy_node_is_fit(name, gpus, links, capsys):
    code, found, line = judged(RECORDED / name, capsys)
    (of_node,) = found["nodes"]
    told = {check["name"]: check for check in of_node["checks"]}
    assert (code, found["verdict"], found["exit_code"], found["format"]) == (0, "fit", 0, 1)
    assert line == f"fit: {gpus}, {len(told)} checks"  # without a remark
    assert {check["state"] for check in told.values()} == {OK} and len(told) == len(of_node["checks"]) > 32
    assert all(check["expected"] and check["seen"] and check["why"] for check in told.values())
    assert of_node["host"] == "node-a" and links in told["topology"]["seen"] and not set(told) - set(multi_node.CHECKS)


@pytest.mark.parametrize("error", ["NVML Shared Library Not Found", "Driver Not Loaded"])
def test_a_machine_with_a_library_of_nvml_and_no_driver_has_no_gpus(error, tmp_path, capsys):
    """Packages install the library. Beside nvidia-smi, a driver that is not loaded is a fault (faults/driver_broken)."""
    folder = copied(tmp_path, {"nvml": {"error": f"NVML: {error}"}}, RECORDED / "no_gpu")
    assert judged(folder, capsys)[1]["verdict"] == "no GPUs"


def test_a_machine_without_gpus_gets_a_plain_report(capsys):
    code, found, _ = judged(RECORDED / "no_gpu", capsys)
    states = {check["name"]: check["state"] for check in found["nodes"][0]["checks"]}
    assert (code, found["verdict"], states["CPU governor"]) == (0, "no GPUs", NOTE)
    assert FAULT not in states.values() and "ECC" not in states and "driver" not in states


# ---- One answer changed


def environ(**variables: str) -> dict:
    return {"environ": variables}


def file(path: str, text: str) -> dict:
    return {"files": {path: text}}


def links(up: list[int], down: list[int], gb_s: float = 25.0) -> dict:
    """Return the patch of GPUs of an unknown model, of which GPU 1 has these links, and all others have two of 25 GB/s."""
    others = gpus(name="Mystery", nvlinks={"up": [0, 1], "down": [], "gb_s": [25.0]})
    return both(others, gpus(1, nvlinks={"up": up, "down": down, "gb_s": [gb_s] if up else []}))


def without_driver(error: str, **more) -> dict:
    return {"nvml": {"gpus": None, "driver": None, "error": error, **more}}


XID = "[%s] NVRM: Xid (PCI:0000:9a:00): %s\n"
NUMA = "/proc/sys/kernel/numa_balancing"
BOOSTED = functools.partial(answer, BOOST)
GEN_1 = {"width": 16, "max_width": 16, "gen": 1, "max_gen": 5}
REMAPPED = {"correctable": 0, "uncorrectable": 1, "pending": 0, "failed": 0}

# (changed facts of the healthy node, check, its state, a value that it names)
DEGREES = [
    (gpus(pcie=GEN_1), "PCIe", NOTE, "1 of 5"),
    (gpus(name="Mystery", pcie={"width": 8}), "PCIe", NOTE, "x8 of x16"),
    (gpus(3, name="Mystery", pcie={"width": 4}), "GPU model", FAULT, "7 x NVIDIA H200"),
    (refused("ecc_uncorrected"), "ECC", UNKNOWN, ""),
    (gpus(max_sm_clock_mhz=1755), "clocks", FAULT, "1755 MHz of 1980"),
    (gpus(0, name="Mystery", max_sm_clock_mhz=1900), "clocks", OK, "1900"),
    (gpus(0, name="Mystery", max_sm_clock_mhz=1700), "clocks", FAULT, "GPU0: offers 1700 MHz of 1980"),
    (gpus(name="NVIDIA H200 Mystery"), "topology", OK, "NV18"),
    (gpus(power_limit_set_w=650, power_limit_default_w=650), "power limit", NOTE, "700"),
    (gpus(name="Mystery", power_limit_w=500), "power limit", NOTE, "500"),
    (some_gpus(4), "GPU count", NOTE, "4 of 8"),  # parts of a board are what schedulers hand out
    (environ(SLURM_GPUS_ON_NODE="16"), "GPU count", FAULT, "16"),
    (gpus(memory={"used_gib": 4.0}), "memory in use", NOTE, "4.0 GiB"),  # a run leaves 6 GiB free
    (gpus(memory={"used_gib": 7.0}), "memory in use", FAULT, "7.0 GiB"),
    (answer(LOG, XID % ("1.0", "79, pid=1, GPU has fallen off the bus.")), "Xid", NOTE, "older: 79"),
    (answer(LOG, XID % ("294622.0", "79, gone")), "Xid", NOTE, "before a reset: 79"),  # 2 hours
    (answer(LOG, XID % ("301000.0", "31, pid=1, name=python, MMU Fault")), "Xid", OK, ""),
    (answer(LOG, XID % ("300911.7", "154, GPU recovery action changed from 0x0 (None) to 0x1")), "Xid", NOTE, "154"),
    (both(file("/proc/uptime", "soon\n"), answer(LOG, XID % ("3.7", "79, gone"))), "Xid", UNKNOWN, "ValueError"),
    (answer(LOG, "dmesg: read kernel buffer failed: Operation not permitted\n", 1), "Xid", UNKNOWN, "not permitted"),
    (gpus(0, clock_reasons=0x04), "throttling", NOTE, "GPU0"),
    (gpus(1, remapped_rows=REMAPPED), "row remap", OK, "done"),
    (refused("fabric"), "fabric", UNKNOWN, "Not Supported"),
    (links([0], [1]), "NVLink", FAULT, "GPU1: 1 of 2 (link 1 down)"),
    (links([], [0, 1]), "NVLink", NOTE, "GPU1: none"),
    (links([0, 1], [], 20.0), "NVLink", FAULT, "20 GB/s, 25 GB/s"),
    (gpus(nvlinks={"gb_s": []}), "NVLink", OK, "18 of 18"),  # a driver that does not tell their rate
    (gpus(1, nvlink_errors={"replay": {"3": 2}}), "NVLink errors", NOTE, "GPU1: link 3: replay 2"),
    (both(file("/sys/devices/system/node/online", "0\n"), file(NUMA, "1\n")), "NUMA balancing", NOTE, ""),
    (environ(CUDA_VISIBLE_DEVICES="MIG-1"), "CUDA_VISIBLE_DEVICES", FAULT, "MIG-1"),
    (environ(CUDA_VISIBLE_DEVICES="GPU-7cc661e9"), "GPU model", OK, "1 x NVIDIA H200"),
    (environ(NCCL_ALGO="Ring"), "variables", NOTE, "NCCL_ALGO=Ring"),
    (environ(JAX_ENABLE_X64="0", CUDA_VERSION="12.9"), "variables", NOTE, "JAX_ENABLE_X64=0"),
    (BOOSTED(sliders(*[0] * 8)), "vboost", NOTE, "GPU0 to GPU7: 0 of 4"),
    (BOOSTED(sliders(1, 0, 1, 1, 1, 1, 1, 1)), "vboost", NOTE, "GPU1: 0 of 4"),
    (BOOSTED(sliders(1, 1, 1, 1, "N/A", 1, 1, 1), 1), "vboost", OK, "GPU4: "),
    (BOOSTED("All done.\n"), "vboost", UNKNOWN, ""),  # only of a Hopper GPU
    (both(BOOSTED(sliders(*[0] * 8)), gpus(name="NVIDIA B200", compute_capability="10.0")), "vboost", OK, "0 of 4"),
    (answer(TOPOLOGY, "", None), "NVML", FAULT, "nvidia-smi topo -m"),
    (gpus(2, memory=None, refused={"memory": "Unknown Error"}), "memory in use", NOTE, "GPU2: not reported (Unknown Error)"),
    (gpus(2, error="Unknown Error", reset=False), "GPU count", FAULT, "GPU2: Unknown Error"),
    (gpus(pci=None, uuid=None, name=None), "GPU count", OK, "8"),
    (gpus(memory={"total_gib": 0, "used_gib": 3.0}), "memory in use", FAULT, "3.0 GiB"),
    # Only the run's own GPUs have to be reset. A GPU that is off the bus is a fault of the node.
    (environ(CUDA_VISIBLE_DEVICES="0, 1") | gpus(6, error="GPU requires reset", reset=True), "GPU count", OK, "8 of 8"),
    (environ(CUDA_VISIBLE_DEVICES="0, 6") | gpus(6, error="GPU requires reset", reset=True), "GPU count", FAULT, "GPU6"),
    (environ(CUDA_VISIBLE_DEVICES="0,1") | gpus(6, error="GPU is lost", reset=False), "GPU count", FAULT, "GPU6"),
    (environ(CUDA_VISIBLE_DEVICES="0, 6") | gpus(6, error="x", reset=True), "CUDA_VISIBLE_DEVICES", NOTE, "2 of 8"),
    (gpus(error="GPU requires reset", reset=True), "NVML", FAULT, "GPU7"),
    (without_driver("NVML: exit code -11") | {"files": None}, "NVML", FAULT, "-11"),
    (without_driver("NVML: not found", loaded=False), "NVML", FAULT, "not found"),  # nvidia-smi is there
]


@pytest.mark.parametrize(("change", "name", "state", "seen"), DEGREES)
def test_degrees(change, name, state, seen, tmp_path):
    finding = findings(copied(tmp_path, change))[name]
    assert finding.state == state and seen in finding.seen


def test_a_reset_mends_no_gpu_that_is_lost(tmp_path):
    two = both(gpus(6, error="GPU requires reset", reset=True), gpus(3, error="GPU is lost", reset=False))
    check = findings(copied(tmp_path, two))["GPU count"]
    assert "GPU3" in check.seen and "GPU6" in check.seen and "--gpu-reset" not in check.fix


def test_a_checkpoint_needs_room_for_two(capsys, tmp_path):
    folder = copied(tmp_path, {"disks": {"checkpoints": {"free_gib": 150.0}}})

    def disk(*more: str) -> tuple[str, str]:
        checks = judged(folder, capsys, *more)[1]["nodes"][0]["checks"]
        return next((check["state"], check["expected"]) for check in checks if check["name"] == "disk checkpoints")

    assert disk()[0] == OK
    config = f"--config={REPO / 'configs' / 'llama3_8b.py'}"  # 8.03 billion weights at 12 bytes, twice: 179.5 GiB
    assert disk(config) == (FAULT, "179 GiB free")
    assert disk(config, "--config.checkpoint.dir=gs://b/run")[0] == UNKNOWN


@pytest.mark.parametrize(("far", "state", "cards"), [((3,), FAULT, 7), ((1, 2, 3, 4, 5, 6, 7), NOTE, 1), ((), OK, 8)])
def test_a_card_for_each_gpu(far, state, cards, tmp_path):
    """A NIC near one GPU alone is for storage. The report counts the active NICs that are near a GPU."""
    out = read_recording(H200).run(TOPOLOGY).out.splitlines()
    rows = [line.replace("\tPIX", "\tNODE") if line.startswith(tuple(f"GPU{n}\t" for n in far)) else line for line in out]
    here = context(copied(tmp_path, answer(TOPOLOGY, "\n".join(rows) + "\n")), cluster=TWO)
    assert [f.state for f in checks.inspect(here) if f.name == "GPU and NIC"] == [state]
    assert multi_node.describe_node(here, None)["network cards"] == cards
    port_down = file("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    down = context(copied(tmp_path / "2", port_down, tmp_path / "node"), cluster=TWO)
    assert multi_node.describe_node(down, None)["network cards"] == cards - 1


# ---- Rates


def load(**gpu) -> dict[str, list]:
    whole = {"gpu": 1, "sm_mhz": 1500.0, "power_w": 690.0, "power_limit_w": 700.0, "reasons": {}}
    return {"under_load": [whole | gpu]}


# (figures, check, its state, a value that it names)
RATES = [
    # The normal rate is 480 with sums in the switches and 370 without. A rate between them is no fault.
    *(({"all_reduce_bus_gb_s": rate}, "all-reduce", s, "") for rate, s in ((400, OK), (380, NOTE), (300, NOTE), (290, FAULT))),
    *(({"gemm_tflops": [700.0] * 7 + [last]}, "GEMM", state, "") for last, state in ((640.0, OK), (620.0, FAULT))),
    ({"gemm_tflops": [400.0] * 8}, "GEMM", FAULT, ""),  # all GPUs are alike, and all are below half of the peak
    # The slower of two, although it lowers their median. GPUs are named by nvidia-smi's index.
    ({"gpus": [5, 2], "gemm_tflops": [700.0, 600.0]}, "GEMM", FAULT, "GPU2 600 (-14%)"),
    ({"disk": {"data": {"read_gb_s": 0.01}}}, "disk rates", FAULT, ""),  # a local disk
    ({"disk": {"checkpoints": {"write_gb_s": 0.04, "read_gb_s": 1.0}}}, "disk rates", NOTE, ""),  # slow for the moment
    ({"disk": {"cache": {"write_gb_s": 0.04, "read_gb_s": 1.0}}}, "disk rates", OK, ""),
    (dict.fromkeys(("failed", "left_out"), {"disk.checkpoints": "full"}), "disk rates", FAULT, "full"),
    ({"failed": {"process": "it ended"}}, "GPU work", FAULT, "it ended"),
    ({"left_out": {"gemm_tflops": "no time"}}, "GEMM", UNKNOWN, "no time"),
    (load(reasons={"hw_power_brake": 0.6}), "under load", FAULT, "GPU1: hw_power_brake in 60%"),
    (load(reasons={"sw_thermal": 0.2}), "under load", NOTE, "sw_thermal in 20%"),
    (load(reasons={"sync_boost": 1.0}), "under load", OK, "1,500"),
    (load(sm_mhz=1200.0, power_w=390.0), "under load", NOTE, "GPU1: slow, at 1,200 of 1,980 MHz and 390 of 700 W"),
    (load(sm_mhz=1200.0, power_w=695.0), "under load", OK, "1,200"),  # at its limit: the GPU has full load
]


@pytest.mark.parametrize(("measured", "name", "state", "seen"), RATES)
def test_rates_below_what_a_board_reaches(measured, name, state, seen):
    found = judge_rates(**measured)
    assert found[name].state == state and seen in found[name].seen
    assert ("GPU work" in found) == (name == "GPU work")


@pytest.mark.parametrize(
    ("name", "between", "figures", "state"),
    [
        ("two_nodes/a", 341.0, {"all_reduce_bus_gb_s": 470.0}, OK),
        ("two_nodes/a", 150.0, {"all_reduce_bus_gb_s": 470.0}, FAULT),
        ("two_nodes/a", 18.0, {"all_reduce_bus_gb_s": 20.0}, OK),  # GPUs joined by PCIe
        ("two_nodes/a", 210.0, {}, OK),  # one GPU a process: the cards allow 400, and the node has no figure
        ("sound/hgx_h100_of_four", 3.0, {"all_reduce_bus_gb_s": 210.0}, OK),  # without a near card it is only reported
    ],
)
def test_rates_between_nodes(name, between, figures, state):
    """It is compared with the lower of two rates: of the node's own all-reduce, and of its near NICs (8 of 50 GB/s)."""
    cluster = distributed.detect({}, read_recording(RECORDED / name).environ)[0] or TWO
    found = judge_rates(RECORDED / name, cluster, inter_node_all_reduce_bus_gb_s=between, **figures)
    assert found["between nodes"].state == state


# ---- What is allowed, and what part of a run is


def test_variables_are_judged_by_the_config(capsys):
    taken = RECORDED / "sound" / "nccl_of_the_shell"
    assert judged(taken, capsys)[0] == 0
    code, found, _ = judged(taken, capsys, "--config.train.deterministic=true")
    assert code == 3 and faults(found)["variables"]["seen"] == "NCCL_ALGO=Ring"


def test_a_fault_that_is_allowed_is_noted(monkeypatch, capsys):
    node = RECORDED / "faults" / "numa_balancing"
    code, found, line = judged(node, capsys, "--allow=NUMA balancing, MIG")
    (state,) = [c["state"] for c in found["nodes"][0]["checks"] if c["name"] == "NUMA balancing"]
    assert (code, state) == (0, NOTE) and line.startswith("fit, allowed: NUMA balancing: 8 x NVIDIA H200, ")
    assert command.main([f"--recorded={node}"]) == 3
    assert "NUMA balancing" in capsys.readouterr().out.splitlines()[-1]  # the verdict is the last line
    monkeypatch.setenv("JAXTRAIN_PREFLIGHT_ALLOW", "CPU governor,NUMA balancing")
    assert judged(node, capsys)[0] == 0 and judged(RECORDED / "faults" / "mig", capsys)[0] == 3
    assert judged(node, capsys, "--allow=CPU governor")[0] == 3  # --allow takes precedence over the variable
    monkeypatch.setenv("JAXTRAIN_PREFLIGHT_ALLOW", "foo")
    assert command.main([f"--recorded={node}"]) == 2
    assert "JAXTRAIN_PREFLIGHT_ALLOW" in capsys.readouterr().err


# ---- Parts


def test_reading_nvidia_smi():
    found = read_topology(read_recording(H200), [2, 5])
    assert found.pairs == {("GPU2", "GPU5"): "NV18"} and found.near_nics == {"GPU2": ["mlx5_2"], "GPU5": ["mlx5_5"]}
    # As an older nvidia-smi prints it in a GitHub issue: spaces for tabs, no GPU NUMA ID.
    old = (
        "        GPU0    GPU1    mlx5_0  CPU Affinity\n"
        "GPU0     X      NV12    PXB     0-23\n"
        "GPU1    NV12     X      SYS     0-23\n"
        "mlx5_0  PXB     SYS      X\n"
    )
    found = read_topology(NodeFacts("a", commands={TOPOLOGY: Answer(0, old)}), [0, 1])
    assert found.pairs == {("GPU0", "GPU1"): "NV12"} and found.near_nics == {"GPU0": ["mlx5_0"], "GPU1": []}
    assert parse_vboost(sliders(0, "N/A", 3)) == {0: (0, 4), 2: (3, 4)}


@pytest.mark.parametrize(
    ("version", "state"), [("9.28.0.42", OK), ("9.9", FAULT), ("10.0", FAULT), ("9.10.2.21", OK), ("9.23.2.dev1", OK)]
)
def test_wheels_have_the_versions_that_the_plugin_requires(version, state, tmp_path):
    """The plugin of the healthy node requires a cuDNN from 9.10.2.21 on, below 10."""
    change = {"packages": {"nvidia-cudnn-cu12": {"version": version}}}
    assert findings(copied(tmp_path, change))["CUDA wheels"].state == state


@pytest.mark.parametrize(("version", "state"), [("525.60.13", OK), ("525.60.9", FAULT), ("515.105.01", FAULT)])
def test_drivers_are_compared_by_their_numbers(version, state, tmp_path):
    assert findings(copied(tmp_path, {"nvml": {"driver": version}}))["driver"].state == state


def test_who_is_beyond_a_proxy():
    within = {"node-a": "localhost,node-a", "a.cluster": ".cluster", "10.1.2.3": "10.0.0.0/8", "node-b": "*", "127.0.0.1": ""}
    assert all(checks.bypasses(name, no_proxy) for name, no_proxy in within.items())
    assert not checks.bypasses("node-a", "ode-a,10.0.0.0/8") and not checks.bypasses("a.cluster", "b.cluster")


# ---- Time that runs out


def together_on(name: str, paths: dict[str, str], seconds: float = 60) -> tuple[dict[str, Finding], dict]:
    """Return preflight's findings and figures on a recorded node without the rates of the recording, so that it measures."""
    facts = dataclasses.replace(read_recording(RECORDED / name), measured={})
    (found,) = Preflight(context(facts, paths), None, seconds).run()
    return {finding.name: finding for finding in found.findings}, found.measured


def test_what_can_be_measured_is_judged(monkeypatch):
    figures, calls = {"gemm_tflops": [700.0] * 7 + [500.0], "left_out": {"hbm_gb_s": "it said no"}}, []
    monkeypatch.setattr(multi_node, "measure_node", lambda *args: calls.append(args) or figures)
    assert together_on("h200_healthy", {}, 8)[0]["GEMM"].state == UNKNOWN  # without time
    assert "gemm_tflops" in together_on("faults/nvidia_smi_hangs", {})[1]["left_out"] and not calls
    found, _ = together_on("h200_healthy", {"data": "~/data", "checkpoints": "gs://b/c", "cache": "/c"})
    assert found["GEMM"].state == FAULT and "GPU7" in found["GEMM"].seen and found["HBM"].seen == "it said no"
    ((paths, seconds, options),) = calls
    assert paths == {"data": Path.home() / "data"} and 0 < seconds <= 54 and options is None


def test_a_call_that_hangs_is_abandoned():
    stuck = threading.Event()
    with pytest.raises(Unanswered, match="the server"):
        call_with_timeout(0.01, "the server", stuck.wait)
    stuck.set()
    assert call_with_timeout(100, "it", lambda: 3) == 3
    with pytest.raises(KeyError):
        call_with_timeout(100, "it", lambda: {}[3])


# ---- Several nodes


def test_network_disks_are_measured_once():
    """Only process 0 measures network disks: eight nodes that write at the same time would slow each other down."""
    paths = {"data": "/data/jaxtrain", "checkpoints": "/scratch/run", "cache": "/c"}
    assert set(multi_node.paths_to_measure(context(paths=paths), 0)[0]) == {"data", "checkpoints"}
    for of, process in ((H200, 3), (RECORDED / "faults" / "mount_hangs", 0)):
        found, left_out = multi_node.paths_to_measure(context(of, paths), process)
        assert set(found) == {"data"} and set(left_out) == {"disk.checkpoints"}


def test_nodes_that_differ():
    same = {"driver": "580", "GPUs": "8", "packages": {"jax": "1"}, "network cards": 8, "connected_unix": 100.0}

    def compared(at: int, **other) -> tuple[str, str, str]:
        (fault,) = multi_node.compare_nodes(["a", "b", "c"], [same | (other if i == at else {}) for i in range(3)])
        return fault.name, fault.node, fault.seen

    assert [c.state for c in multi_node.compare_nodes(["a", "b", "c"], [same] * 3)] == [OK]
    assert compared(1, driver="570") == ("driver of all nodes", "b", "570, others 580")
    assert compared(2, packages={"jax": "2"}) == ("packages of all nodes", "c", "jax 2, others 1")
    name, where, seen = compared(1, connected_unix=163.0)
    assert (name, where) == ("clocks of all nodes", "b") and seen.startswith("+63.0 s")


def test_processes_of_a_node_that_see_different_gpus():
    (fault,) = multi_node.compare_processes([("a", "0"), ("a", "1"), ("b", "unset"), ("b", "unset")])
    assert (fault.name, fault.state, fault.node) == ("CUDA_VISIBLE_DEVICES", FAULT, "a")
    assert not multi_node.compare_processes([("a", "0,1"), ("b", "2,3")])


# ---- The command


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([f"--recorded={RECORDED}"], "facts.json"),
        (["--allow=topology,foo"], "--allow = 'foo'"),
        ([f"--json={RECORDED}"], f"--json = '{RECORDED}'"),
        (["--limit=9999999999999"], "--limit = 9999999999999"),
    ],
    ids=["no recording", "no such check", "a folder", "too long"],
)
def test_a_wrong_command_line_is_2(argv, said, capsys):
    assert command.main(argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "5", '{"base": "."}', '{"hostname": "a", "colour": 1}', "[" * 100_000),
        *(
            f'{{"hostname": "a", {part}}}'
            for part in (
                *('"disks": {"data": 3}', '"environ": []', '"environ": {"A": 1}', '"nvml": []', '"nvml": {"gpus": []}'),
                *('"nvml": {"gpus": {"0": "H200"}}', '"nvml": {"gpus": {"GPU0": {}}}', '"files": []', '"folders": {"/": 5}'),
                *('"packages": {"jax": "0.1"}', '"measured": [1]', '"commands": {"dmesg": {"out": 5}}', '"base": 5'),
            )
        ),
    ],
)
def test_a_damaged_recording_is_refused(text, tmp_path, capsys):
    (tmp_path / FILE).write_text(text)
    assert command.main([f"--recorded={tmp_path}"]) == 2
    assert "--recorded" in capsys.readouterr().err


def test_a_slow_disk_of_a_laptop_stops_nothing_and_is_recorded(monkeypatch, tmp_path, capsys):
    """This machine, faked as one without an NVIDIA GPU."""
    slow = {"gemm_tflops": [], "disk": {"checkpoints": {"write_gb_s": 0.01, "read_gb_s": 1.0}}, "left_out": {}, "failed": {}}
    monkeypatch.setattr(preflight, "read_facts", lambda *_: NodeFacts("laptop", nvml={"error": "not found", "loaded": False}))
    monkeypatch.setattr(multi_node, "measure_node", lambda *_: slow)
    for _ in range(2):  # an earlier recording is overwritten
        assert command.main(["--json", f"--workdir={tmp_path}", f"--record={tmp_path / 'node'}"]) == 0
        found = {c["name"]: c for c in json.loads(capsys.readouterr().out)["nodes"][0]["checks"]}
        assert found["disk rates"]["state"] == NOTE and "checkpoints" in found["disk rates"]["seen"]
    assert read_recording(tmp_path / "node").measured == slow
