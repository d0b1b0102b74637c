"""Preflight on recorded nodes, healthy and broken: exactly the right check reports each fault."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest
from nodes import (
    H200,
    RECORDED,
    a_plain_environment,  # noqa: F401
    answer,
    check_of,
    copied,
    faults,
    gpu_table,
    judged,
    of_makers,
    sliders,
)

from jaxtrain import distributed, launch
from jaxtrain.preflight import __main__ as command
from jaxtrain.preflight import boards, gpus, host, inspection, multi_node, node, nvidia_smi, rates, report, software
from jaxtrain.preflight.multi_node import Preflight
from jaxtrain.preflight.node import Disk, LocalNode, RecordedNode, RecordingError, Unanswered, call_with_timeout
from jaxtrain.preflight.table import FAULT, NOTE, OK, UNKNOWN, Context, Finding, Table, grouped

REPO = Path(__file__).resolve().parents[2]


# Fault -> (the check that reports it, words of the finding, words of the fix).
FAULTS = {
    "phb_link": ("topology", "GPU0-GPU3 PHB (across one PCIe host bridge", "nvidia-fabricmanager"),
    "nvl_missing_bridge": ("topology", "GPU4 to GPU7: no NVLink, not NV6 to 3 others", "the bridge sits on all"),
    "seven_gpus": ("GPU count", "7 of 8", "power-cycle the node"),
    "lost_gpu": ("GPU count", "the driver cannot reach GPU 0000:5D:00.0", "power-cycle the node"),
    "ecc_error": ("ECC", "GPU5: 2", "--gpu-reset"),
    "row_remap_pending": ("row remap", "GPU2: pending", "reset the GPU"),
    "row_remap_failed": ("row remap", "GPU2: failed", "replaced"),
    "xid": ("Xid", "74 (NVLink error) on 0000:9a:00", "Xid catalogue"),
    "power_cap": ("power limit", "GPU0 to GPU7: 500 W of 700", "nvidia-smi -i N -pl"),
    "low_clocks": ("clocks", "GPU0 to GPU7: set to 1410 MHz, by default 1980", "nvidia-smi -rac"),
    "throttling": ("throttling", "GPU1: hw_slowdown+hw_thermal", "fans"),
    "memory_in_use": ("memory in use", "GPU0: 40.3 GiB, by python (pid 20417)", "End those processes"),
    "mig": ("MIG", "GPU7: Enabled", "-mig 0"),
    "narrow_pcie": ("PCIe", "GPU3: x8 of x16", "reseated"),
    "nvlink_down": ("NVLink", "GPU6: 17 of 18 (link 11 down)", "nvidia-smi nvlink -s"),
    "nvlink_recoveries": ("NVLink errors", "GPU4 link 7: Recovery 12", "nvidia-smi nvlink -e"),
    "fabric_manager": ("fabric", "In Progress", "systemctl restart nvidia-fabricmanager"),
    "port_down": ("InfiniBand", "mlx5_5 DOWN", "ibstat"),
    "old_driver": ("driver", "515.65.01; CUDA 12 needs 525.60.13", "Install a newer driver"),
    "old_cudnn": ("CUDA wheels", "nvidia-cudnn-cu12 9.1.0.70 (needs <10.0,>=9.10.2.21)", "./run.sh setup"),
    "no_plugin": ("CUDA plugin", "no CUDA plugin of JAX", "JAXTRAIN_CUDA=12 ./run.sh setup"),
    "library_path": ("library path", "/opt/cuda/lib64/libcudnn_ops.so.9", "unset LD_LIBRARY_PATH"),
    "numa_balancing": ("NUMA balancing", "on (1)", "sysctl kernel.numa_balancing=0"),
    "governor": ("CPU governor", "powersave", "cpupower frequency-set -g performance"),
    "small_shm": ("/dev/shm", "61 MiB", "--shm-size"),
    "locked_memory": ("locked memory", "8 MiB", "ulimit -l unlimited"),
    "full_disk": ("disk checkpoints", "1.2 of 204,800 GiB free", "checkpoint.dir"),
    "checkpoints_in_memory": ("disk checkpoints", "tmpfs", "outlives the node"),
    "stale_nccl": ("variables", "NCCL_ALGO=Ring NCCL_P2P_DISABLE=1", "--config.env.inherit=NCCL_ALGO,NCCL_P2P_DISABLE"),
    "stale_xla": ("variables", "XLA_FLAGS=--xla", "--config.env.inherit=XLA_FLAGS"),
    "two_memory_fractions": ("memory variables", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.75", "train.memory_fraction"),
    "mnnvl": ("NCCL_MNNVL_ENABLE", "1", "unset NCCL_MNNVL_ENABLE"),
    "proxy": ("proxy", "also for node-a, node-b", "no_proxy=node-a,node-b"),
    "renumbered_device": ("CUDA_VISIBLE_DEVICES", "number 3 of those, of which there is 1", "--gpus-per-task"),
    "slow_gpu": ("GEMM", "GPU5 622 (-17%)", "take it out"),
    "slow_all_reduce": ("all-reduce", "43 GB/s", "NCCL_DEBUG=INFO"),
    "nvidia_smi_hangs": ("nvidia-smi", "no answer in time", "power-cycle the node"),
    "needs_reset": ("GPU count", "GPU6: requires reset", "--gpu-reset -i 6, with no process"),
    "recovery_action": ("recovery action", "GPU4: Drain and Reset", "--gpu-reset"),
    "hot_under_load": ("under load", "GPU2: sw_thermal in 80% of the samples", "fans"),
    "gpu_work_crashes": ("GPU work", "ended with code -6 in all-reduce over the node's 8 GPUs", "NCCL_DEBUG=INFO"),
    "mount_hangs": ("disk checkpoints", "/scratch/run/checkpoints did not answer", "Mount it again"),
    "driver_broken": ("nvidia-smi", "couldn't communicate with the NVIDIA driver", "dkms status"),
}


# Harmless state that resembles a fault -> (the check that might report it, its state, words of the finding).
SOUND = {
    "others_train_beside": ("memory in use", OK, "0.0 GiB"),
    "slurm_gave_four": ("GPU count", NOTE, "8, and Slurm gave 4"),
    "display_card": ("GPU model", OK, "1 x NVIDIA GeForce RTX 4090"),
    "hgx_h100_of_four": ("topology", OK, "all pairs NV6, without switches"),
    "hgx_a100_of_four": ("topology", OK, "all pairs NV4, without switches"),
    "two_of_a_bridge": ("topology", NOTE, "1 pairs NV6, of bridges of 4"),
    "one_gpu_in_vm": ("NVLink", NOTE, "none"),
    "pod_with_three": ("GPU count", OK, "3, and NVIDIA_VISIBLE_DEVICES gave 3"),
    "xid_before_a_reset": ("Xid", NOTE, "before a reset: 74 (NVLink error)"),
    "governor_follows_load": ("CPU governor", NOTE, "powersave (intel_pstate)"),
    "locked_memory_without_limit": ("locked memory", OK, "CAP_IPC_LOCK"),
    "wheels_come_first": ("library path", NOTE, "/opt/cuda/lib64/libcudnn.so.9"),
    "one_port_of_two_down": ("InfiniBand", NOTE, "mlx5_8 DOWN; each GPU near one has another"),
}


LINKS_OF_MYSTERY = "GPU 0: x\n Link 0: 25 GB/s\n Link 1: 25 GB/s\nGPU 1: x\n Link 0: 25 GB/s\n Link 1: <inactive>\n"
BARE = "GPU 0: x\n Link 0: 25 GB/s\n Link 1: 25 GB/s\nGPU 1: x\n Link 0: <inactive>\n Link 1: <inactive>\n"
UUID_OF_1 = "GPU-0b3510b0-b46e-41da-b170-17a6205738d1"
XID = "[300911.7] NVRM: Xid (PCI:0000:9a:00): %s\n"
FACTS = '{"memlock_bytes": %s, "cpus": 192, "memory_gib": 2015.3, "open_files": null, "clock_synchronised": true}'


@pytest.mark.parametrize(("name", "gpus"), [("h200_healthy", "8 x NVIDIA H200"), ("h200_nvl_healthy", "8 x NVIDIA H200 NVL")])
def test_a_healthy_node_is_fit(name, gpus, capsys):
    code, found, line = judged(RECORDED / name, capsys)
    checks = found["nodes"][0]["checks"]
    assert (code, found["verdict"], found["exit_code"]) == (0, "fit", 0)
    assert line == f"fit: {gpus}, {len(checks)} checks"  # without a remark
    assert {check["state"] for check in checks} == {OK} and len({check["name"] for check in checks}) == len(checks) > 40
    assert all(check["expected"] and check["seen"] and check["why"] for check in checks)
    assert found["format"] == 1 and found["nodes"][0]["host"] == "node-a"


def test_what_a_board_should_have_comes_from_the_board(capsys):
    assert check_of(H200, "topology", capsys)["seen"] == "all pairs NV18"
    assert check_of(RECORDED / "h200_nvl_healthy", "topology", capsys)["seen"] == "bridges of 4, NV6 within each"


def test_the_table_for_people(capsys):
    assert command.main([f"--recorded={RECORDED / 'faults' / 'power_cap'}"]) == 3
    said = capsys.readouterr().out
    assert "power limit" in said and "why: Matmuls" in said and "fix: sudo nvidia-smi -i N -pl" in said
    assert said.rstrip().endswith("FAULT: power limit (GPU0 to GPU7: 500 W of 700): see above")


def test_a_machine_without_gpus_gets_a_plain_report(capsys):
    code, found, line = judged(RECORDED / "no_gpu", capsys)
    assert (code, found["verdict"]) == (0, "no GPUs") and line.startswith("no GPUs: no NVIDIA GPU: there is no nvidia-smi")
    states = {check["name"]: check["state"] for check in found["nodes"][0]["checks"]}
    assert states["CPU governor"] == NOTE and FAULT not in states.values() and "ECC" not in states and "driver" not in states


def test_every_recorded_fault_is_expected():
    assert {path.name for path in (RECORDED / "faults").iterdir()} == set(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_and_nothing_else(name, capsys):
    check, seen, fix = FAULTS[name]
    code, found, line = judged(RECORDED / "faults" / name, capsys)
    assert {c["name"] for c in faults(found)} == {check}
    (fault,) = faults(found)
    assert seen in fault["seen"] and fix in fault["fix"] and fault["why"]
    assert code == found["exit_code"] == 3 and found["verdict"] == "fault"
    assert line.startswith(f"FAULT: {check} (") and line.endswith(": see above")


def test_all_that_is_sound_is_expected():
    assert {path.name for path in (RECORDED / "sound").iterdir()} == set(SOUND)


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_stops_no_run(name, capsys):
    code, found, line = judged(RECORDED / "sound" / name, capsys)
    assert faults(found) == [] and code == 0 and line.startswith("fit: ")
    name_, state, seen = SOUND[name]
    (check,) = [c for c in found["nodes"][0]["checks"] if c["name"] == name_]
    assert check["state"] == state and seen in check["seen"]


def test_two_faults_are_two(tmp_path, capsys):
    folder = copied(tmp_path, {"files/proc/sys/kernel/numa_balancing": "1\n", **gpu_table(mig__mode__current="Enabled")})
    assert {c["name"] for c in faults(judged(folder, capsys)[1])} == {"NUMA balancing", "MIG"}


@pytest.mark.parametrize(
    ("change", "name", "state", "seen"),
    [
        (gpu_table(persistence_mode="Disabled"), "persistence", NOTE, "GPU0 to GPU7: Disabled"),
        (gpu_table(compute_mode="Prohibited"), "compute mode", FAULT, "GPU0 to GPU7: Prohibited"),
        (gpu_table(pcie__link__gen__current="1"), "PCIe", NOTE, "gen 1 of 5"),
        (gpu_table(ecc__errors__uncorrected__volatile__total="[N/A]"), "ECC", UNKNOWN, "not reported"),
        (gpu_table(clocks__max__sm="1755"), "clocks", FAULT, "offers 1755 MHz of 1980"),
        (gpu_table(name="NVIDIA H200 Mystery"), "topology", OK, "28 pairs NV18; the topology of this board is not known"),
        (gpu_table(name="NVIDIA H200 Mystery", power__limit="500.00"), "power limit", FAULT, "500 W of 700"),
        (gpu_table(name="NVIDIA H200 Mystery"), "all-reduce", OK, "the bandwidth of this board is not known"),
        (answer("dmesg", "", "1") | {}, "Xid", UNKNOWN, "dmesg"),
        (
            answer("dmesg", "[1.0] NVRM: Xid (PCI:0000:9a:00): 79, pid=1, GPU has fallen off the bus.\n"),
            "Xid",
            NOTE,
            "older: 79",
        ),
        (answer("dmesg", "[294622.0] NVRM: Xid (PCI:0000:9a:00): 79, gone\n"), "Xid", NOTE, "before a reset: 79"),  # 2 hours
        (answer("dmesg", "[301000.0] NVRM: Xid (PCI:0000:9a:00): 31, pid=1, name=python, MMU Fault\n"), "Xid", OK, "none"),
        (answer(nvidia_smi.REASONS, "index, x\n0, 0x0000000000000004\n"), "throttling", NOTE, "GPU0"),
        (
            answer(nvidia_smi.REMAPS, f"h\n{UUID_OF_1}, 0, 1, 0, 0\n"),
            "row remap",
            OK,
            "done after an uncorrected error",
        ),
        (answer(nvidia_smi.REMAPS, f"h\n{UUID_OF_1}, 0, 1, Yes, No\n"), "row remap", FAULT, "GPU1: pending"),
        (
            answer(nvidia_smi.FABRIC, 'Field "fabric.state" is not a valid field to query.\n', "2"),
            "fabric",
            UNKNOWN,
            "not a valid",
        ),
        (answer(nvidia_smi.TOPOLOGY, "", "9"), "topology", UNKNOWN, "exit code 9"),
        (
            {"files/sys/devices/system/node/online": "0\n", "files/proc/sys/kernel/numa_balancing": "1\n"},
            "NUMA balancing",
            NOTE,
            "on (1)",
        ),
        ({"files/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n"}, "CPU governor", NOTE, "schedutil"),
        ({"files/sys/fs/cgroup/cpu.max": "400000 100000\n"}, "CPUs", NOTE, "192, of which the container may use 4 for 8 GPUs"),
        ({"files/sys/fs/cgroup/memory.max": f"{200 << 30}\n"}, "host memory", NOTE, "200 GiB of 2,015 GiB"),
        ({"environ.json": '{"CUDA_VISIBLE_DEVICES": "0,1"}'}, "CUDA_VISIBLE_DEVICES", NOTE, "2 of 8 GPUs"),
        ({"environ.json": '{"CUDA_VISIBLE_DEVICES": "3,1"}'}, "CUDA_VISIBLE_DEVICES", NOTE, "2 of 8 GPUs"),
        ({"environ.json": '{"CUDA_VISIBLE_DEVICES": "8"}'}, "CUDA_VISIBLE_DEVICES", FAULT, "there is no GPU 8"),
        ({"environ.json": '{"CUDA_VISIBLE_DEVICES": ""}'}, "CUDA_VISIBLE_DEVICES", FAULT, "hides all GPUs"),
        ({"environ.json": '{"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"}'}, "CUDA_VISIBLE_DEVICES", NOTE, "another order"),
        ({"environ.json": '{"CUDA_DEVICE_MAX_CONNECTIONS": "1"}'}, "variables", FAULT, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ({"environ.json": '{"NCCL_IB_HCA": "mlx5"}'}, "variables", OK, "none"),  # env.inherit names it
        ({"environ.json": '{"HTTPS_PROXY": "http://p:1"}'}, "proxy", NOTE, "connects to none"),
        ({"environ.json": '{"SLURM_GPUS_ON_NODE": "16"}'}, "GPU count", FAULT, "8, and Slurm gave 16"),
        ({"environ.json": '{"NVIDIA_VISIBLE_DEVICES": "all"}'}, "GPU count", OK, "8 of 8"),
        ({"environ.json": '{"CUDA_VISIBLE_DEVICES": "GPU-7cc661e9"}'}, "GPU model", OK, "1 x NVIDIA H200"),
        ({"environ.json": '{"CUDA_VISIBLE_DEVICES": "MIG-1"}'}, "CUDA_VISIBLE_DEVICES", FAULT, "there is no GPU MIG-1"),
        (gpu_table(memory__used="4096"), "memory in use", NOTE, "4.0 GiB"),  # a run leaves 6 GiB free
        (gpu_table(memory__used="7168"), "memory in use", FAULT, "7.0 GiB"),
        (gpu_table(power__limit="650.00", power__default_limit="650.00"), "power limit", NOTE, "an HGX H200 has 700"),
        (gpu_table(enforced__power__limit="500.00"), "power limit", FAULT, "set to 700 W, and held at 500"),
        (gpu_table(name="Mystery", enforced__power__limit="500.00"), "power limit", NOTE, "held at 500"),
        (gpu_table(power__limit="[GPU requires reset]"), "GPU count", FAULT, "GPU0: requires reset"),
        (gpu_table(power__limit="[N/A]"), "power limit", UNKNOWN, "not reported"),
        (gpu_table(name="Mystery", pcie__link__width__current="8"), "PCIe", NOTE, "x8 of x16"),
        (gpu_table(pcie__link__width__current="8"), "PCIe", FAULT, "x8 of x16"),
        (gpu_table(3, name="Mystery", pcie__link__width__current="4"), "GPU model", FAULT, "7 x NVIDIA H200"),
        ({}, "power limit", OK, "700 W, by default 700"),
        (answer(nvidia_smi.BOOST, sliders(*[0] * 8)), "vboost", NOTE, "GPU0 to GPU7: 0 of 4"),
        (answer(nvidia_smi.BOOST, sliders(*[2] * 8)), "vboost", OK, "GPU0 to GPU7: 2 of 4"),
        (answer(nvidia_smi.BOOST, sliders(1, 0, 1, 1, 1, 1, 1, 1)), "vboost", NOTE, "GPU1: 0 of 4"),
        (answer(nvidia_smi.BOOST, sliders(1, 1, 1, 1, "N/A", 1, 1, 1), "1"), "vboost", OK, "GPU4: unknown"),
        (answer(nvidia_smi.BOOST, "Invalid Argument\n", "1"), "vboost", UNKNOWN, "Invalid Argument"),
        (answer(nvidia_smi.BOOST, "All done.\n"), "vboost", UNKNOWN, "not reported"),
        (answer(nvidia_smi.BOOST, "", "127"), "vboost", UNKNOWN, "there is no such command"),
        (
            answer(nvidia_smi.BOOST, sliders(*[0] * 8)) | gpu_table(name="NVIDIA B200", compute_cap="10.0"),
            "vboost",
            OK,
            "GPU0 to GPU7: 0 of 4",
        ),
        (of_makers("2850"), "clocks", OK, "up to 2850 MHz"),
        (of_makers("2500"), "clocks", FAULT, "GPU0: offers 2500 MHz of 2900"),
        (
            answer(nvidia_smi.REASONS, "i, x\n0, [Requested functionality has been deprecated]\n"),
            "throttling",
            UNKNOWN,
            "not reported",
        ),
        (answer(nvidia_smi.LINKS, LINKS_OF_MYSTERY) | gpu_table(name="Mystery"), "NVLink", FAULT, "GPU1: 1 of 2 (link 1 down)"),
        (answer(nvidia_smi.LINKS, BARE) | gpu_table(name="Mystery"), "NVLink", NOTE, "GPU1: none, and 2 on others"),
        (
            answer("dmesg", XID % "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"),
            "Xid",
            NOTE,
            "154",
        ),
        (answer(nvidia_smi.RECOVERY, "Field is not valid\n", "2"), "recovery action", UNKNOWN, "not valid"),
        ({"files/proc/uptime": "soon\n"} | answer("dmesg", XID % "79, gone"), "Xid", UNKNOWN, "ValueError: could not convert"),
        ({"facts.json": FACTS % "2199023255552"}, "locked memory", OK, "as much as the GPUs have"),
        ({"facts.json": FACTS % "8388608"}, "locked memory", NOTE, "a run of one node does not need it"),
        ({"environ.json": '{"LD_LIBRARY_PATH": "/opt/mpi/lib"}'}, "library path", OK, "none in /opt/mpi/lib"),
    ],
)
def test_degrees(change, name, state, seen, tmp_path, capsys):
    check = check_of(copied(tmp_path, change), name, capsys)
    assert check["state"] == state and seen in check["seen"]


@pytest.mark.parametrize("values", [(0,) * 8, (0, 1, 2, 3, 4, 0, 1, 2), ()])
def test_vboost_stops_no_run(values, tmp_path, capsys):
    """Only a note has a hint, and only a Hopper GPU without a value is worth a line."""
    boost = answer(nvidia_smi.BOOST, sliders(*values))
    code, found, line = judged(copied(tmp_path / "hopper", boost), capsys)
    (check,) = [c for c in found["nodes"][0]["checks"] if c["name"] == "vboost"]
    assert code == 0 and line.endswith("(1 worth a look)" if values else "(1 not measured)")
    assert ("boost-slider --vboost" in check["fix"]) == bool(values)
    ampere = copied(tmp_path / "ampere", boost, RECORDED / "sound" / "hgx_a100_of_four")
    checks = {c["name"]: c["state"] for c in judged(ampere, capsys)[1]["nodes"][0]["checks"]}
    differ = len(set(values[:4])) > 1  # of the board's four GPUs
    assert checks.get("vboost") == ((NOTE if differ else OK) if values else None)


def test_part_of_a_board_is_what_schedulers_hand_out(tmp_path, capsys):
    lines = RecordedNode(H200).run(nvidia_smi.GPUS).out.splitlines()
    few = {n: copied(tmp_path / str(n), answer(nvidia_smi.GPUS, "\n".join(lines[: n + 1]) + "\n")) for n in (1, 4, 5)}
    states = {n: check_of(folder, "GPU count", capsys)["state"] for n, folder in few.items()}
    assert states == {1: NOTE, 4: NOTE, 5: FAULT}


def test_a_variable_that_the_config_names_is_part_of_the_run(capsys):
    stale = RECORDED / "faults" / "stale_nccl"
    assert judged(stale, capsys, "--config.env.inherit=NCCL_ALGO,NCCL_P2P_DISABLE")[0] == 0
    code, found, _ = judged(stale, capsys, "--config.env.inherit=NCCL_ALGO")
    assert code == 3 and faults(found)[0]["seen"] == "NCCL_P2P_DISABLE=1"


def test_a_checkpoint_needs_room_for_two(capsys, tmp_path):
    disks = json.loads((H200 / "disks.json").read_text())
    disks["checkpoints"]["free_gib"] = 150.0
    folder = copied(tmp_path, {"disks.json": json.dumps(disks)})
    assert check_of(folder, "disk checkpoints", capsys)["state"] == OK
    config = f"--config={REPO / 'configs' / 'llama3_8b.py'}"  # 8.03 billion weights at 12 bytes, twice: 179.5 GiB
    check = check_of(folder, "disk checkpoints", capsys, config)
    assert check["state"] == FAULT and check["expected"] == "179 GiB free"
    assert check_of(folder, "disk checkpoints", capsys, config, "--config.checkpoint.dir=gs://b/run")["state"] == UNKNOWN


def context(node_=None, paths=None, cluster=None, **more) -> Context:
    """Return the context of a check: a node (healthy by default) and the default config."""
    return Context(node_ or RecordedNode(H200), launch.load([]).run, paths or {}, cluster, **more)


def test_paths_that_share_a_disk():
    data, here = Disk("/a", 9, 9, "1", "xfs", "/"), Disk("/b", 9, 9, "1", "xfs", "/")

    def finding(**disks: Disk) -> Finding:
        node_ = RecordedNode(H200)
        node_.__dict__["disks"] = disks
        return next(f for f in host.CHECKS.run(context(node_, dict.fromkeys(disks, "/x"))) if f.name == "paths")

    assert finding(data=data, checkpoints=here).seen == "data and checkpoints share /"
    assert finding(data=data, checkpoints=dataclasses.replace(here, device="2")).state == OK
    assert finding(data=data, cache=dataclasses.replace(here, kind="nfs4", device="3")).seen == "cache over the network (nfs4)"


def test_rates_below_what_a_board_reaches():
    def judge(**figures) -> dict[str, Finding]:
        return {finding.name: finding for finding in rates.CHECKS.run(context(measured=figures))}

    def state(**figures) -> dict[str, str]:
        return {name: finding.state for name, finding in judge(**figures).items()}

    # The normal rate is 480 with sums in the switches and 370 without. A rate between them is no fault.
    assert [state(all_reduce_bus_gb_s=rate)["all-reduce"] for rate in (400, 380, 300, 290)] == [OK, NOTE, NOTE, FAULT]
    assert [state(reduce_scatter_bus_gb_s=rate)["reduce-scatter"] for rate in (300, 290)] == [OK, FAULT]
    assert [state(gemm_tflops=[700.0] * 7 + [last])["GEMM"] for last in (640.0, 620.0)] == [OK, FAULT]
    assert state(gemm_tflops=[400.0] * 8)["GEMM"] == FAULT  # all GPUs are alike, and all are below half of the peak
    assert [state(h2d_gb_s=[50.0] * 7 + [last])["host to device"] for last in (26.0, 24.0)] == [OK, FAULT]
    slow = {"checkpoints": {"write_gb_s": 0.04, "read_gb_s": 1.0}}
    assert state(disk={"data": {"read_gb_s": 0.01}})["disk rates"] == FAULT  # a local disk
    assert state(disk=slow)["disk rates"] == NOTE  # a network disk may be slow for the moment
    assert state(disk={"cache": slow["checkpoints"]})["disk rates"] == OK
    broken = {"disk.checkpoints": "/scratch: Disk quota exceeded"}
    assert state(failed=broken, left_out=broken)["disk rates"] == FAULT
    assert "GPU work" not in state(failed=broken) and state(failed={"process": "it ended"})["GPU work"] == FAULT
    assert judge(left_out={"gemm_tflops": "no time"})["GEMM"].seen == "no time"


def test_a_slow_gpu_is_one_below_the_others(capsys):
    """Preflight finds the slower of two GPUs, although it lowers their median. GPUs are named by nvidia-smi's index."""
    judged = rates.CHECKS.run(context(measured={"gpus": [5, 2], "gemm_tflops": [700.0, 600.0]}))
    found = {finding.name: finding for finding in judged}
    assert found["GEMM"].state == FAULT and "GPU2 600 (-14%)" in found["GEMM"].seen and "GPU5" not in found["GEMM"].seen


@pytest.mark.parametrize(
    ("gpu", "state", "seen"),
    [
        ({"reasons": {"hw_power_brake": 0.6}}, FAULT, "GPU1: hw_power_brake in 60%"),
        ({"reasons": {"sw_thermal": 0.2}}, NOTE, "sw_thermal in 20%"),
        ({"reasons": {"sw_thermal": 0.6}}, FAULT, "sw_thermal in 60%"),
        ({"reasons": {"sync_boost": 1.0}}, OK, "1,500 MHz"),
        ({"sm_mhz": 1200.0, "power_w": 390.0}, NOTE, "GPU1: slow, at 1,200 of 1,980 MHz and 390 of 700 W"),
        ({"sm_mhz": 1200.0, "power_w": 695.0}, OK, "1,200"),  # at its limit: the GPU has full load
        ({"sm_mhz": None, "power_w": None}, OK, "none"),
    ],
)
def test_under_load(gpu, state, seen):
    whole = {"gpu": 1, "sm_mhz": 1500.0, "power_w": 690.0, "power_limit_w": 700.0, "reasons": {}} | gpu

    def under_load(of: Context) -> Finding:
        return next(f for f in rates.CHECKS.run(of) if f.name == "under load")

    healthy = context(measured={"under_load": [whole]})
    found = under_load(healthy)
    assert found.state == state and seen in found.seen
    assert state != NOTE or "MHz" not in seen or "nvidia-smi -rgc" in found.fix
    if gpu == {"reasons": {"sw_thermal": 0.6}}:  # a laptop is built to get hot
        healthy.__dict__["board"] = None
        assert under_load(healthy).state == NOTE


def test_rates_between_nodes():
    """The rate between nodes is compared with the lower of two rates: of the node's own all-reduce, and of the NICs near its
    GPUs (8 of 50 GB/s).
    """

    def state(name: str, between: float, **figures) -> str:
        node_ = RecordedNode(RECORDED / name)
        cluster = distributed.detect({}, node_.environ)[0] or distributed.Cluster("a:1", 2, 0, None, "this test")
        judged = rates.CHECKS.run(
            context(node_, cluster=cluster, measured=figures | {"inter_node_all_reduce_bus_gb_s": between})
        )
        return next(f.state for f in judged if f.name == "between nodes")

    assert [state("two_nodes/a", rate, all_reduce_bus_gb_s=470.0) for rate in (341.0, 150.0)] == [OK, FAULT]
    assert state("two_nodes/a", 18.0, all_reduce_bus_gb_s=20.0) == OK  # GPUs joined by PCIe
    assert state("two_nodes/a", 210.0) == OK  # one GPU a process: the cards allow 400, and the node has no figure
    # without a near card the rate is only reported
    assert state("sound/hgx_h100_of_four", 3.0, all_reduce_bus_gb_s=210.0) == OK


def beside(*far: int) -> dict[str, str]:
    """Return the healthy node's topology matrix, changed so that the GPUs `far` have no NIC nearby."""
    out = RecordedNode(H200).run(nvidia_smi.TOPOLOGY).out.splitlines()
    rows = [line.replace("\tPIX", "\tNODE") if line.startswith(tuple(f"GPU{n}\t" for n in far)) else line for line in out]
    return answer(nvidia_smi.TOPOLOGY, "\n".join(rows) + "\n")


@pytest.mark.parametrize(("far", "state", "cards"), [((3,), FAULT, 7), ((1, 2, 3, 4, 5, 6, 7), NOTE, 1), ((), OK, 8)])
def test_a_card_for_each_gpu(far, state, cards, tmp_path):
    """If one of eight GPUs has no NIC nearby (PIX in nvidia-smi's topology), it is a fault. A NIC near one GPU alone is for
    storage.

    The report's number of network cards counts the active NICs that are near a GPU.
    """
    cluster = distributed.Cluster("a:1", 2, 0, None, "this test")
    here = context(RecordedNode(copied(tmp_path, beside(*far))), cluster=cluster)
    assert [f.state for f in inspection.inspect(here) if f.name == "GPU and NIC"] == [state]
    assert inspection.describe(here, None)["network cards"] == cards
    port_down = {"files/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"}
    down = context(RecordedNode(copied(tmp_path / "2", port_down, tmp_path / "node")), cluster=cluster)
    assert inspection.describe(down, None)["network cards"] == cards - 1


def test_a_command_has_the_time_that_it_needs():
    """nvidia-smi may take 25 s for eight GPUs, or half of a shorter limit: the rest is for the other checks."""
    nodes = [command.make_node(command.COMMAND.parse([f"--limit={limit}"])) for limit in (60, 20)]
    assert [node_.command_s for node_ in nodes if isinstance(node_, LocalNode)] == [25.0, 10.0]


def test_sixteen_on_a_node_are_two_boards(tmp_path, capsys):
    lines = RecordedNode(H200).run(nvidia_smi.GPUS).out.splitlines()
    more = [f"{int(line[0]) + 8}{line[1:]}" for line in lines[1:]]
    check = check_of(copied(tmp_path, answer(nvidia_smi.GPUS, "\n".join([*lines, *more]) + "\n")), "GPU count", capsys)
    assert (check["state"], check["seen"]) == (OK, "16; a board has 8")


def test_a_check_that_raises_is_one_line(monkeypatch, capsys):
    def broken(_) -> None:
        raise KeyError("index")

    table = [dataclasses.replace(c, probe=broken) if c.name == "power limit" else c for c in gpus.CHECKS]
    monkeypatch.setattr(gpus, "CHECKS", Table(table))
    code, found, _ = judged(H200, capsys)
    states = {c["name"]: (c["state"], c["seen"]) for c in found["nodes"][0]["checks"]}
    assert code == 0 and states["power limit"] == (UNKNOWN, "KeyError: 'index'") and states["clocks"][0] == OK


def test_a_fault_that_is_allowed_is_noted(monkeypatch, capsys):
    node = RECORDED / "faults" / "numa_balancing"
    code, found, line = judged(node, capsys, "--allow=NUMA balancing, MIG")
    states = {c["name"]: (c["state"], c["seen"]) for c in found["nodes"][0]["checks"]}
    assert code == 0 and line.startswith("fit, allowed: NUMA balancing: 8 x NVIDIA H200, ")
    assert states["NUMA balancing"] == (NOTE, "allowed: on (1)")
    assert judged(node, capsys, "--allow=CPU governor")[0] == 3
    monkeypatch.setenv("JAXTRAIN_PREFLIGHT_ALLOW", "CPU governor,NUMA balancing")
    assert judged(node, capsys)[0] == 0 and judged(RECORDED / "faults" / "mig", capsys)[0] == 3
    assert judged(node, capsys, "--allow=CPU governor")[0] == 3  # --allow takes precedence over the variable
    monkeypatch.setenv("JAXTRAIN_PREFLIGHT_ALLOW", "foo")
    assert command.main([f"--recorded={node}"]) == 2
    assert (
        "JAXTRAIN_PREFLIGHT_ALLOW = 'foo': no check with a fault that can be allowed has this name" in capsys.readouterr().err
    )


def test_what_is_allowed_is_told_beside_a_fault(tmp_path, capsys):
    folder = copied(tmp_path, {"files/proc/sys/kernel/numa_balancing": "1\n", **gpu_table(mig__mode__current="Enabled")})
    code, _, line = judged(folder, capsys, "--allow=NUMA balancing")
    assert code == 3 and line == "FAULT: MIG (GPU0 to GPU7: Enabled), allowed: NUMA balancing: see above"


def test_every_check_has_a_name_that_can_be_allowed():
    """Every finding on every recorded node, healthy or broken, has a name that --allow accepts."""
    folders = [RECORDED / name for name in ("h200_healthy", "h200_nvl_healthy", "no_gpu", "two_nodes/a")]
    folders += [*(RECORDED / "faults").iterdir(), *(RECORDED / "sound").iterdir()]
    paths = {"data": "/data", "checkpoints": "/scratch", "cache": "/c"}
    found = {f.name for folder in folders for f in inspection.inspect(context(RecordedNode(folder), paths))}
    assert len(found) > 40 and not found - set(inspection.CHECKS)
    assert {"GPU work", "clocks of all nodes", "driver of all nodes", "disk cache"} < set(inspection.CHECKS)
    assert len(inspection.CHECKS) == len(inspection.OF_NODES) + len(inspection.EQUAL) + 1  # every name once


def test_notes_stand_under_the_table(capsys):
    assert command.main([f"--recorded={RECORDED / 'sound' / 'governor_follows_load'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    after = lines[next(i for i, line in enumerate(lines) if line.startswith("└")) + 1 :]
    assert len(after) == 2 and after[0].startswith("CPU governor: powersave (intel_pstate)") and "; " in after[0]
    assert after[1].startswith("fit: ")
    assert command.main([f"--recorded={H200}"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].startswith("└")  # a check that is ok has no note


def test_a_reset_mends_no_gpu_that_is_lost(tmp_path, capsys):
    lost = gpu_table(3, power__limit="[GPU is lost]")
    lines = next(iter(lost.values())).splitlines()
    lines = [line.replace("16, 16", "16, [GPU requires reset]") if line.startswith("6, ") else line for line in lines]
    text = "\n".join(lines) + "\n"
    check = check_of(copied(tmp_path, dict.fromkeys(lost, text)), "GPU count", capsys)
    assert check["seen"] == "8; GPU3: GPU is lost; GPU6: requires reset" and "Xid 79" in check["fix"]


def test_reading_nvidia_smi():
    text = RecordedNode(RECORDED / "h200_nvl_healthy").run(nvidia_smi.TOPOLOGY).out  # the heading is underlined
    found = nvidia_smi.parse_topology(text, range(8))
    assert len(found.pairs) == 28 and found.pairs["GPU1", "GPU3"] == "NV6"
    found = nvidia_smi.parse_topology(RecordedNode(H200).run(nvidia_smi.TOPOLOGY).out, [2, 5])
    assert found.pairs == {("GPU2", "GPU5"): "NV18"} and found.near_nics == {"GPU2": ["mlx5_2"], "GPU5": ["mlx5_5"]}
    # As an older nvidia-smi prints it in a GitHub issue: spaces for tabs, no GPU NUMA ID.
    old = (
        "        GPU0    GPU1    mlx5_0  CPU Affinity\n"
        "GPU0     X      NV12    PXB     0-23\n"
        "GPU1    NV12     X      SYS     0-23\n"
        "mlx5_0  PXB     SYS      X\n"
    )
    found = nvidia_smi.parse_topology(old, [0, 1])
    assert found.pairs == {("GPU0", "GPU1"): "NV12"} and found.near_nics == {"GPU0": ["mlx5_0"], "GPU1": []}
    assert not nvidia_smi.parse_topology("Failed to run topology matrix\n", [0]).near_nics
    lines = (
        "GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n"
    )
    assert nvidia_smi.parse_vboost(sliders(0, "N/A", 3)) == {0: (0, 4), 2: (3, 4)}
    assert nvidia_smi.parse_links(lines) == {0: [(0, "26.562 GB/s"), (1, "<inactive>")], 1: []}


def test_versions_are_compared_by_their_numbers():
    assert software.satisfies("9.28.0.42", "<10.0,>=9.10.2.21") and not software.satisfies("9.9", ">=9.10.2.21")
    assert software.satisfies("12.0", "==12") and not software.satisfies("12.0", "!=12") and software.satisfies("1", "")
    assert software.numbers("580.65.06") > software.numbers("525.60.13") > software.numbers("515.105.01")


def test_who_is_beyond_a_proxy():
    assert software.bypasses("node-a", "localhost,node-a") and software.bypasses("a.cluster", ".cluster")
    assert (
        software.bypasses("10.1.2.3", "10.0.0.0/8") and software.bypasses("node-a", "*") and software.bypasses("127.0.0.1", "")
    )
    assert not software.bypasses("node-a", "ode-a,10.0.0.0/8") and not software.bypasses("a.cluster", "b.cluster")


def test_words():
    assert grouped([("GPU0", "a"), ("GPU1", "a"), ("GPU2", "a"), ("GPU3", "a")]) == "GPU0 to GPU3: a"
    assert grouped([("GPU0", "a"), ("GPU2", "b"), ("GPU4", "a")]) == "GPU0, GPU4: a; GPU2: b"
    assert boards.board_of(["NVIDIA H200", "NVIDIA H100 80GB HBM3"]) is None


def test_one_question_that_hangs_is_named(tmp_path, capsys):
    folder = copied(tmp_path, answer(nvidia_smi.LINKS, "", "timeout") | answer(nvidia_smi.FABRIC, "", "timeout"))
    seen = check_of(folder, "nvidia-smi", capsys)["seen"]
    assert (
        seen == f"no answer in time to 2 of {len(nvidia_smi.COMMANDS)} commands: nvidia-smi --query-gpu, nvidia-smi nvlink -s"
    )


def together_on(name: str, paths: dict[str, str], seconds: float = 60) -> report.NodeReport:
    """Return preflight's report on a recorded node. The rates of the recording are removed, so that preflight measures."""
    node_ = RecordedNode(RECORDED / name)
    node_.measured = {}
    (found,) = Preflight(context(node_, paths), None, seconds).run()
    return found


def test_a_lack_of_time_is_reported():
    gemm = next(f for f in together_on("h200_healthy", {}, 8).findings if f.name == "GEMM")
    assert gemm.state == UNKNOWN and "s of --limit are left" in gemm.seen


def test_no_work_for_gpus_that_do_not_answer(monkeypatch):
    monkeypatch.setattr(multi_node, "measure", lambda *_: pytest.fail("measured all the same"))
    found = together_on("faults/nvidia_smi_hangs", {})
    assert "nvidia-smi does not answer" in found.measured["left_out"]["gemm_tflops"]


def test_measured_rates_are_judged(monkeypatch):
    figures = {"gemm_tflops": [700.0] * 7 + [500.0], "left_out": {"hbm_gb_s": "it said no"}}
    calls = []
    monkeypatch.setattr(multi_node, "measure", lambda *args: calls.append(args) or figures)
    found = together_on("h200_healthy", {"data": "~/data", "checkpoints": "gs://b/c", "cache": "/c"})
    by_name = {finding.name: finding for finding in found.findings}
    assert by_name["GEMM"].state == FAULT and "GPU7" in by_name["GEMM"].seen and by_name["HBM"].seen == "it said no"
    ((paths, seconds, options),) = calls
    assert paths == {"data": Path.home() / "data"} and 50 < seconds <= 54 and options is None


def test_a_call_that_hangs_is_abandoned():
    stuck = threading.Event()
    with pytest.raises(Unanswered, match="the server did not answer within 0 s"):
        call_with_timeout(0.01, "the server", stuck.wait)
    stuck.set()
    assert call_with_timeout(100, "it", lambda: 3) == 3
    with pytest.raises(KeyError):
        call_with_timeout(100, "it", lambda: {}[3])


def silent(monkeypatch, module) -> None:
    """Make every path whose name contains `dead` hang, as on a mount whose server is gone."""

    def call(seconds, subject, function):
        assert seconds == node.ANSWER_S
        if "dead" in subject:
            raise Unanswered(f"{subject} did not answer within 3 s")
        return function()

    monkeypatch.setattr(module, "call_with_timeout", call)


def test_a_path_that_hangs_delays_nothing(tmp_path, monkeypatch):
    silent(monkeypatch, node)
    local = LocalNode({"data": "/dead/data", "checkpoints": str(tmp_path), "cache": "/dead/cache"})
    here = context(local, {"data": "/dead/data", "cache": "/dead/cache"})
    here.__dict__["gpus"] = nvidia_smi.Gpus([])
    found = {f.name: f for f in host.CHECKS.run(here)}
    assert found["disk data"].state == FAULT and found["disk data"].seen == "/dead/data did not answer: its file system hangs"
    assert found["disk cache"].state == NOTE and found["paths"].state == OK


def test_the_output_folder_may_hang_too(monkeypatch, capsys):
    silent(monkeypatch, command)
    assert command.main(["--record=/dead", "--json=/dead/x.json"]) == 2
    said = capsys.readouterr().err
    assert "--record = '/dead': /dead did not answer within 3 s" in said and "--json = '/dead/x.json'" in said


def test_network_disks_are_measured_once():
    """Only process 0 measures network disks: eight nodes that write at the same time would slow each other down."""
    here = context(paths={"data": "/data/jaxtrain", "checkpoints": "/scratch/run", "cache": "/c"})
    assert set(multi_node.paths_to_measure(here, 0)[0]) == {"data", "checkpoints"}
    paths, left_out = multi_node.paths_to_measure(here, 3)
    assert set(paths) == {"data"} and "process 0 measures it" in left_out["disk.checkpoints"]
    silent_ = dataclasses.replace(here, node=RecordedNode(RECORDED / "faults" / "mount_hangs"))
    paths, left_out = multi_node.paths_to_measure(silent_, 0)
    assert set(paths) == {"data"} and left_out == {"disk.checkpoints": "it does not answer"}


def test_the_same_fault_on_two_nodes_names_both():
    fault = Finding("MIG", FAULT, "off", "GPU7: Enabled", "why", "fix")
    nodes = [report.NodeReport(host, "8 x NVIDIA H200", "", [fault], {}) for host in ("a", "b")]
    assert report.last_line(nodes) == "FAULT: MIG on a (GPU7: Enabled), MIG on b (GPU7: Enabled): see above"
    assert report.lines(nodes) == [("all", fault)]


def test_nodes_that_differ():
    def description(driver="580", packages=(("jax", "1"),), connected_unix=100.0) -> dict:
        return {"driver": driver, "GPUs": "8", "packages": dict(packages), "network cards": 8, "connected_unix": connected_unix}

    hosts = ["a", "b", "c"]
    assert [c.state for c in inspection.compare(hosts, [description()] * 3)] == [OK]
    (fault,) = inspection.compare(hosts, [description(), description(driver="570"), description()])
    assert (fault.name, fault.node, fault.seen) == ("driver of all nodes", "b", "570, others 580")
    (fault,) = inspection.compare(hosts, [description(), description(), description(packages=(("jax", "2"),))])
    assert (fault.node, fault.seen) == ("c", "jax 2, others 1")
    (fault,) = inspection.compare(hosts, [description(), description(connected_unix=163.0), description()])
    assert (fault.name, fault.node, fault.seen) == ("clocks of all nodes", "b", "+63.0 s from the others")


def test_processes_of_a_node_that_see_different_gpus():
    (fault,) = inspection.compare_processes([("a", "0"), ("a", "1"), ("b", "unset"), ("b", "unset")])
    assert (fault.state, fault.node) == (FAULT, "a") and "2 values on a" in fault.seen
    assert not inspection.compare_processes([("a", "0,1"), ("b", "2,3")])


def test_the_figures_of_processes_are_those_of_their_node():
    parts = [
        {"gemm_tflops": [1.0], "left_out": {"x": "y"}, "disk": {"data": {}}},
        {"gemm_tflops": [2.0], "left_out": {}, "disk": {}},
    ]
    found = multi_node.merged(parts)
    assert found["gemm_tflops"] == [1.0, 2.0] and found["disk"] == {"data": {}} and found["left_out"] == {"x": "y"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--limit=soon"], "--limit = 'soon': must be a whole number, 1 or more"),
        (["--recorded=/nowhere"], "/nowhere is no folder"),
        ([f"--recorded={RECORDED}"], "holds no facts.json"),
        (["--record=x", "--recorded=y"], "does not apply to --recorded"),
        (["--recorded="], "--recorded = '': has no value"),
        (["--record="], "--record = '': has no value"),
        (["--json="], "--json = '': has no value"),
        (["--allow=topology,foo"], "--allow = 'foo': no check with a fault that can be allowed has this name. Known: "),
        (["--allow=TOPOLOGY"], "Did you mean topology?"),
        (["--allow=GPU cuont"], "Did you mean GPU count?"),
        (["--no-measure=3"], "takes no value"),
        (["--config.train.stepz=3"], "no such key"),
        (["--jsn"], "no such option"),
        ([f"--json={RECORDED}"], "is a folder"),
    ],
)
def test_a_wrong_command_line_is_2(argv, said, capsys):
    assert command.main(argv) == 2
    assert said in capsys.readouterr().err


def test_recordings_in_a_circle(tmp_path):
    (tmp_path / "base.txt").write_text(".")
    with pytest.raises(RecordingError, match="or a circle"):
        RecordedNode(tmp_path)


@pytest.fixture
def laptop(monkeypatch, tmp_path) -> list[str]:
    """Return options for this machine, faked as one without an NVIDIA GPU and with a slow disk."""
    slow = {"gemm_tflops": [], "disk": {"checkpoints": {"write_gb_s": 0.01, "read_gb_s": 1.0}}, "left_out": {}, "failed": {}}
    monkeypatch.setattr(nvidia_smi, "read_gpus", lambda _: nvidia_smi.Gpus([], absent="no NVIDIA GPU"))
    monkeypatch.setattr(LocalNode, "start", lambda *_: None)
    monkeypatch.setattr(LocalNode, "run", lambda *_: node.Answer(node.ABSENT))
    monkeypatch.setattr(multi_node, "measure", lambda *_: slow)
    return ["--json", f"--workdir={tmp_path / 'run'}"]


def test_a_slow_disk_of_a_laptop_stops_nothing(laptop, capsys):
    assert command.main(laptop) == 0
    checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)["nodes"][0]["checks"]}
    assert (checks["disk rates"]["state"], checks["disk rates"]["seen"]) == (NOTE, "checkpoints write 0.01 GB/s")


def test_a_row_without_time_is_not_measured(laptop, capsys):
    assert command.main([*laptop, "--limit=1"]) == 0
    checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)["nodes"][0]["checks"]}
    assert checks["disk rates"]["state"] == UNKNOWN and "checkpoints: only " in checks["disk rates"]["seen"]


def test_a_recording_is_in_a_folder_of_its_own(laptop, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").touch()
    assert command.main([*laptop, f"--record={run}"]) == 2
    said = capsys.readouterr().err
    assert "holds config.json, which is no part of a recording" in said and f"--record={run / 'node'}." in said
    for _ in range(2):  # an earlier report is overwritten
        assert command.main([*laptop, f"--record={run / 'node'}"]) == 0
    assert RecordedNode(run / "node").measured["disk"] and [path.name for path in run.iterdir() if path.is_file()] == [
        "config.json"
    ]


@pytest.mark.parametrize(("shown", "code"), [("", 1), (FAULT, 3)])
def test_a_report_that_cannot_be_saved_hides_no_verdict(laptop, shown, code, monkeypatch, tmp_path, capsys):
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalNode, "save", full)
    monkeypatch.setattr(command, "write_atomic", full)
    if shown:
        monkeypatch.setattr(inspection, "inspect", lambda _: [Finding("MIG", shown, "off", "on")])
    for option in ("--record", "--json"):
        assert command.main([laptop[1], f"{option}={tmp_path / 'new'}"]) == code
        said = capsys.readouterr()
        assert f"{option} = '{tmp_path}/new': [Errno 28] No space left on device. Fix: Name another place." in said.err
        assert said.out.splitlines()[-1].startswith("FAULT: MIG" if shown else "no GPUs")


def test_a_recording_has_the_measured_rates(tmp_path):
    LocalNode({}).save(tmp_path, {"gemm_tflops": [1.0]})
    assert RecordedNode(tmp_path).measured == {"gemm_tflops": [1.0]}
