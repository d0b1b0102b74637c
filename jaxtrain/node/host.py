"""Checks of the host: kernel settings, limits of the process and its container, and the disks of the run's paths."""

import functools
import re

from jaxtrain.config.stores import is_bucket
from jaxtrain.models import flops
from jaxtrain.node.facts import GOVERNOR, GOVERNOR_DRIVER, INFINIBAND
from jaxtrain.node.table import Context, Table, Verdict, fault, note, ok, unknown

CHECKS = Table()

SHM_GIB = 1.0
OPEN_FILES = (1024, 65536)  # a limit below the first is a fault, below the second a note
FREE_GIB = {"data": 1.0, "checkpoints": 10.0, "cache": 1.0}  # "checkpoints" is used only without a config
BYTES_PER_PARAMETER = 12  # float32 master and Adam's two moments
CAP_IPC_LOCK = 1 << 14  # capability bit (linux/capability.h) of a process without a limit on locked memory
# Drivers whose governor powersave adapts clocks to the load (the kernel's guides to intel_pstate and amd-pstate).
FOLLOWS_LOAD = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
IN_MEMORY = ("tmpfs", "ramfs")
NETWORK_DISKS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "smb3", "cifs", "wekafs", "9p", "virtiofs")


@CHECKS.add(
    "NUMA balancing",
    expected="off (kernel.numa_balancing = 0)",
    why="The kernel unmaps pages of memory from time to time, to track their use, and moves them; input and copies from the "
    "GPUs stall meanwhile.",
    fix="sudo sysctl kernel.numa_balancing=0, and in /etc/sysctl.d/ to keep it.",
)
def numa_balancing(c: Context) -> Verdict:
    value = c.facts.read("/proc/sys/kernel/numa_balancing")
    if value in ("", "0"):
        return ok("off" if value else "this kernel has none")
    # With one NUMA node the kernel moves no pages. On a machine without GPUs it does not matter.
    several = "-" in c.facts.read("/sys/devices/system/node/online")
    return fault(f"on ({value})") if several and c.gpus.count else note(f"on ({value})")


@CHECKS.add(
    "CPU governor",
    expected="performance",
    why="CPUs are nearly idle between two steps; a governor that saves power lowers their clock and delays the next dispatch.",
    fix="sudo cpupower frequency-set -g performance, or the firmware's performance profile.",
)
def cpu_governor(c: Context) -> Verdict:
    value, driver = c.facts.read(GOVERNOR), c.facts.read(GOVERNOR_DRIVER)
    if not value:
        return unknown("not reported by this machine, as by most virtual ones")
    if value == "performance":
        return ok(value)
    slow = value == "conservative" or value == "powersave" and driver not in FOLLOWS_LOAD
    seen = f"{value} ({driver})" if driver else value
    return fault(seen) if slow else note(seen)


@CHECKS.add(
    "/dev/shm",
    expected=f"{SHM_GIB:g} GiB or more",
    why="NCCL exchanges data between processes of a node there; it fails with 'No space left on device' (Docker gives 64 MiB).",
    fix="docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm.",
)
def shm(c: Context) -> Verdict:
    disk = c.facts.disks.get("shm")
    if disk is None or disk.silent:
        return unknown("it does not answer" if disk else "there is none")
    total = disk.total_gib
    seen = f"{total:.1f} GiB, {disk.free_gib:.1f} free" if total >= 1 else f"{total * 1024:.0f} MiB"
    if min(total, disk.free_gib) >= SHM_GIB:
        return ok(seen)
    return fault(seen) if c.gpus.count > 1 else note(seen)


@CHECKS.add(
    "locked memory",
    expected="unlimited (ulimit -l)",
    why="NCCL registers its buffers with the network cards, which locks them in memory; with a lower limit it fails, or avoids "
    "InfiniBand.",
    fix="ulimit -l unlimited before the run; docker run --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK, "
    "LimitMEMLOCK=infinity.",
)
def locked_memory(c: Context) -> Verdict:
    limit = c.facts.memlock_bytes
    if limit is None:
        return ok("unlimited")
    seen = f"{limit / 2**20:,.0f} MiB"
    status = re.search(r"(?m)^CapEff:\s*([0-9a-f]+)", c.facts.read("/proc/self/status"))
    if status and int(status[1], 16) & CAP_IPC_LOCK:
        return ok(f"{seen}, and no limit applies to this process (CAP_IPC_LOCK)")
    gpus_gib = sum(row["memory"]["total_gib"] for row in c.gpus.rows if "memory" in row)
    if limit >= 2**30 * gpus_gib:
        return ok(f"{seen}, as much as the GPUs have")
    # The limit counts memory that the network pins, but not memory that CUDA pins.
    if not c.several_nodes:
        return note(f"{seen}; a run of one node does not need it")
    infiniband = c.facts.folders.get(INFINIBAND)
    return fault(seen) if infiniband else note(f"{seen}; there is no InfiniBand that needs it")


@CHECKS.add(
    "open files",
    expected=f"{OPEN_FILES[1]} or more (ulimit -n)",
    why="Checkpoints are many files, NCCL opens sockets to every peer, and token files are mapped: a low limit ends a run.",
    fix=f"ulimit -n {OPEN_FILES[1]} before the run; docker run --ulimit nofile=1048576.",
)
def open_files(c: Context) -> Verdict:
    limit = c.facts.open_files
    if limit is None or limit >= OPEN_FILES[1]:
        return ok("unlimited" if limit is None else str(limit))
    return fault(str(limit)) if limit < OPEN_FILES[0] else note(str(limit))


# ---- disks of the run's paths

KEYS = {"data": "paths.data", "checkpoints": "checkpoint.dir or --workdir", "cache": "paths.cache"}
WHY = {
    "data": "jaxtrain writes the corpus that it generates there, and reads the input from there.",
    "checkpoints": "A save that finds no space fails, and the run may lose everything since the last one.",
    "cache": "Without space XLA stores no compiled programs, and each start compiles again for minutes.",
}


def free_space(name: str, c: Context) -> Verdict | None:
    if name not in c.paths:
        return None
    path, disk, needed = c.paths[name], c.facts.disks.get(name), FREE_GIB[name]
    if name == "checkpoints" and c.has_config:  # space for two: the newest complete checkpoint, and the one being written
        needed = max(2 * flops.parameters(c.run.model)["total"] * BYTES_PER_PARAMETER / 2**30, 0.1)
    expected = f"{needed:,.0f} GiB free"
    if not path:
        return ok("not used", expected=expected)
    if is_bucket(path) or disk is None:
        return unknown(f"{path} is a bucket" if is_bucket(path) else f"{path} cannot be read", expected=expected)
    if disk.silent:
        return (note if name == "cache" else fault)(
            f"{disk.path} did not answer: its file system hangs",
            expected="its file system answers",
            why="A run that uses a file system whose server is gone waits for it, and hangs without an error.",
            fix=f"Mount it again, or set {KEYS[name]} to another file system.",
        )
    seen = f"{disk.free_gib:,.1f} of {disk.total_gib:,.0f} GiB free at {disk.path} ({disk.kind})"
    if name == "checkpoints" and disk.kind in IN_MEMORY:
        return fault(
            f"{seen}: in memory",
            expected="on a disk, which outlives the node",
            why="Checkpoints in memory are gone when the node restarts, which is when the run needs them; and they use the "
            "host's memory.",
            fix=f"Set {KEYS[name]} to a disk that outlives the node.",
        )
    return ok(seen, expected=expected) if disk.free_gib >= needed else fault(seen, expected=expected)


for _name, _why in WHY.items():
    CHECKS.add(f"disk {_name}", expected="free space", why=_why, fix=f"Make room, or set {KEYS[_name]} to another disk.")(
        functools.partial(free_space, _name)
    )
