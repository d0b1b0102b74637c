"""Checks of the host: kernel settings, limits of the process and its container, and the disks of the run's paths."""

import functools
import re

from jaxtrain.config.stores import is_bucket
from jaxtrain.models import flops
from jaxtrain.node.table import Context, Table, Verdict, fault, listed, note, ok, unknown

CHECKS = Table()

SHM_GIB = 1.0
OPEN_FILES = (1024, 65536)  # a limit below the first is a fault, below the second a note
CPUS_PER_GPU = 4  # for JAX's dispatch, NCCL's proxies, input pipeline and checkpoint writer
HOST_MEMORY_SHARE = 0.5  # of the GPUs' memory, since a checkpoint is copied to the host before it is written
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
    value = (c.node.read("/proc/sys/kernel/numa_balancing") or "").strip()
    if value in ("", "0"):
        return ok("off" if value else "this kernel has none")
    # With one NUMA node the kernel moves no pages. On a machine without GPUs it does not matter.
    several = "-" in (c.node.read("/sys/devices/system/node/online") or "")
    return fault(f"on ({value})") if several and c.gpus.count else note(f"on ({value})")


@CHECKS.add(
    "CPU governor",
    expected="performance",
    why="CPUs are nearly idle between two steps; a governor that saves power lowers their clock and delays the next dispatch.",
    fix="sudo cpupower frequency-set -g performance, or the firmware's performance profile.",
)
def cpu_governor(c: Context) -> Verdict:
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    value, driver = ((c.node.read(f"{folder}/scaling_{n}") or "").strip() for n in ("governor", "driver"))
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
    disk = c.node.disks.get("shm")
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
    limit = c.node.facts.get("memlock_bytes")
    if limit is None:
        return ok("unlimited")
    seen = f"{limit / 2**20:,.0f} MiB"
    status = re.search(r"(?m)^CapEff:\s*([0-9a-f]+)", c.node.read("/proc/self/status") or "")
    if status and int(status[1], 16) & CAP_IPC_LOCK:
        return ok(f"{seen}, and no limit applies to this process (CAP_IPC_LOCK)")
    if limit >= 2**30 * c.gpu_gib:
        return ok(f"{seen}, as much as the GPUs have")
    # The limit counts memory that the network pins, but not memory that CUDA pins.
    if not c.several_nodes:
        return note(f"{seen}; a run of one node does not need it")
    infiniband = c.node.listing("/sys/class/infiniband")
    return fault(seen) if infiniband else note(f"{seen}; there is no InfiniBand that needs it")


@CHECKS.add(
    "open files",
    expected=f"{OPEN_FILES[1]} or more (ulimit -n)",
    why="Checkpoints are many files, NCCL opens sockets to every peer, and token files are mapped: a low limit ends a run.",
    fix=f"ulimit -n {OPEN_FILES[1]} before the run; docker run --ulimit nofile=1048576.",
)
def open_files(c: Context) -> Verdict:
    limit = c.node.facts.get("open_files")
    if limit is None or limit >= OPEN_FILES[1]:
        return ok("unlimited" if limit is None else str(limit))
    return fault(str(limit)) if limit < OPEN_FILES[0] else note(str(limit))


@CHECKS.add(
    "CPUs",
    expected=f"{CPUS_PER_GPU} or more for a GPU",
    why="With fewer, the loop's dispatch, the input and the checkpoint writer wait for each other.",
    fix="Ask the scheduler for more (--cpus-per-task), or give the container more.",
)
def cpus(c: Context) -> Verdict:
    count = c.node.facts.get("cpus") or 0
    quota = (c.node.read("/sys/fs/cgroup/cpu.max") or "max").split()
    text = f"{count}"
    if len(quota) == 2 and quota[0].isdigit():
        allowed = int(quota[0]) / int(quota[1])
        text, count = f"{count}, of which the container may use {allowed:g}", min(count, int(allowed))
    if not c.gpus.count:
        return ok(f"{text}, and no GPU")
    return ok(text) if count >= CPUS_PER_GPU * c.gpus.count else note(f"{text} for {c.gpus.count} GPUs")


@CHECKS.add(
    "host memory",
    expected=f"at least {HOST_MEMORY_SHARE:.0%} of the GPUs' memory",
    why="A checkpoint is copied to the host first and written from there during training; the kernel kills a process that uses "
    "too much.",
    fix="Ask for more memory (--mem=0 with Slurm, the container's limit).",
)
def host_memory(c: Context) -> Verdict:
    gib = c.node.facts.get("memory_gib") or 0.0
    limit = (c.node.read("/sys/fs/cgroup/memory.max") or "max").strip()
    text = f"{gib:,.0f} GiB"
    if limit.isdigit() and int(limit) / 2**30 < gib:
        gib = int(limit) / 2**30
        text = f"{gib:,.0f} GiB of {text}, by the container's limit"
    if not c.gpus.count:
        return ok(f"{text}, and no GPU")
    return ok(text) if gib >= HOST_MEMORY_SHARE * c.gpu_gib else note(f"{text}, for GPUs with {c.gpu_gib:,.0f} GiB")


@CHECKS.add(
    "clock",
    expected="follows a time server",
    why="Logs of several nodes are compared by their times; certificates and file systems reject a clock that is wrong.",
    fix="sudo timedatectl set-ntp true, or start chronyd; in a VM, its host's clock.",
)
def clock(c: Context) -> Verdict:
    synchronised = c.node.facts.get("clock_synchronised")
    if synchronised is None:
        return unknown("not reported by this kernel")
    # Without rtcsync, chronyd sets the clock and leaves the kernel's flag unset, so this is a note. Another check compares the
    # clocks of nodes.
    return ok("it follows one") if synchronised else note("the kernel has none")


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
    path, disk, needed = c.paths[name], c.node.disks.get(name), FREE_GIB[name]
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


@CHECKS.add(
    "paths",
    expected="data, checkpoints and compile cache on suitable disks",
    why="Data, checkpoints and cache differ in traffic: on one disk a save slows the input, and a full disk stops all of them.",
    fix="Set paths.data, checkpoint.dir and paths.cache to file systems that suit them; keep the cache on a local disk.",
)
def shared_disks(c: Context) -> Verdict:
    disks = {name: c.node.disks[name] for name in c.paths if name in c.node.disks and not c.node.disks[name].silent}
    odd = []
    if "data" in disks and "checkpoints" in disks and disks["data"].device == disks["checkpoints"].device:
        odd.append(f"data and checkpoints share {disks['data'].mount}")
    if "cache" in disks and disks["cache"].kind in NETWORK_DISKS:
        odd.append(f"cache over the network ({disks['cache'].kind})")
    if "checkpoints" in disks and disks["checkpoints"].kind == "overlay":
        odd.append("checkpoints in the container, lost with it (overlay)")
    return (
        note("; ".join(odd)) if odd else ok(listed([f"{name} on {disk.mount} ({disk.kind})" for name, disk in disks.items()]))
    )
