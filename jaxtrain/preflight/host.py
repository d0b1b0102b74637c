"""The machine around the GPUs: kernel settings, limits of this process and its container, the clock."""

import re

from jaxtrain.preflight.check import Check, Node, Subject
from jaxtrain.preflight.smi import number

SHM_GIB = 1.0
OPEN_FILES = (1024, 65536)  # below the first nothing of this size runs; below the second it is worth knowing
CPUS_A_GPU = 4  # JAX dispatches, NCCL's proxies, the input pipeline and a save that is being written
CAP_IPC_LOCK = 1 << 14  # linux/capability.h: no limit on locked memory holds for such a process
# Whose powersave is the default, and as fast as the load asks (the kernel's guides to intel_pstate and amd-pstate).
FOLLOW_THE_LOAD = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
HOST_SHARE = 0.5  # of the GPUs' memory: a copy of the state waits on the host while it is saved

BALANCING = Subject(
    "NUMA balancing",
    "off (kernel.numa_balancing = 0)",
    "The kernel unmaps pages of memory now and then, to see who uses them, and moves them; input and copies from "
    "the GPUs stall for it.",
    "sudo sysctl kernel.numa_balancing=0, and in /etc/sysctl.d/ to keep it.",
)
GOVERNOR = Subject(
    "CPU governor",
    "performance",
    "Between two steps the CPUs have little to do; a governor that saves power slows them down and the next "
    "dispatch comes late.",
    "sudo cpupower frequency-set -g performance, or the firmware's performance profile.",
)
SHM = Subject(
    "/dev/shm",
    f"{SHM_GIB:g} GiB or more",
    "NCCL exchanges data between processes of a node there; it fails with 'No space left on device' (Docker gives 64 MiB).",
    "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm.",
)
LOCKED = Subject(
    "locked memory",
    "unlimited (ulimit -l)",
    "NCCL registers its buffers with the network cards, which locks them in memory; below what it needs it "
    "fails, or avoids InfiniBand.",
    "ulimit -l unlimited before the run; docker run --ulimit memlock=-1; Slurm: "
    "PropagateResourceLimitsExcept=MEMLOCK, LimitMEMLOCK=infinity.",
)
FILES = Subject(
    "open files",
    f"{OPEN_FILES[1]} or more (ulimit -n)",
    "Checkpoints are many files, NCCL opens sockets to every peer, and token files are mapped: too low a limit "
    "ends a run in its midst.",
    f"ulimit -n {OPEN_FILES[1]} before the run; docker run --ulimit nofile=1048576.",
)
CPUS = Subject(
    "CPUs",
    f"{CPUS_A_GPU} or more for a GPU",
    "With fewer the loop's dispatch, the input and a save that is being written wait for each other.",
    "Ask the scheduler for more (--cpus-per-task), or give the container more.",
)
MEMORY = Subject(
    "host memory",
    f"at least {HOST_SHARE:.0%} of the GPUs' memory",
    "A save is copied to the host first and written from there while training goes on; the kernel ends a process "
    "that takes too much.",
    "Ask for more memory (--mem=0 with Slurm, the container's limit).",
)
CLOCK = Subject(
    "clock",
    "follows a time server",
    "Logs of several nodes are compared by their times, certificates and file systems refuse a clock that is off.",
    "sudo timedatectl set-ntp true, or start chronyd; in a VM, its host's clock.",
)


def balancing(node: Node) -> Check:
    value = (node.machine.read("/proc/sys/kernel/numa_balancing") or "").strip()
    if not value:
        return BALANCING.ok("this kernel has none")
    if value == "0":
        return BALANCING.ok("off")
    several = "-" in (node.machine.read("/sys/devices/system/node/online") or "")
    # With one NUMA node the kernel has nowhere to move pages to; and a machine without GPUs is not the one that trains.
    if not several or not node.gpus.count:
        return BALANCING.note(f"on ({value})")
    return BALANCING.fault(f"on ({value})")


def governor(node: Node) -> Check:
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    value = (node.machine.read(f"{folder}/scaling_governor") or "").strip()
    driver = (node.machine.read(f"{folder}/scaling_driver") or "").strip()
    if not value:
        return GOVERNOR.unknown("this machine shows none, as most virtual ones")
    if value == "performance":
        return GOVERNOR.ok(value)
    seen = f"{value} ({driver})" if driver else value
    slow = value == "conservative" or value == "powersave" and driver not in FOLLOW_THE_LOAD
    return GOVERNOR.fault(seen) if slow else GOVERNOR.note(seen)


def shm(node: Node) -> Check:
    found = node.machine.disks().get("shm")
    if found is None or found.silent:
        return SHM.unknown("it does not answer" if found else "there is none")
    seen = (
        f"{found.total_gib:.1f} GiB, {found.free_gib:.1f} free" if found.total_gib >= 1 else f"{found.total_gib * 1024:.0f} MiB"
    )
    if min(found.total_gib, found.free_gib) >= SHM_GIB:
        return SHM.ok(seen)
    return SHM.fault(seen) if node.gpus.count > 1 else SHM.note(seen)


def locked(node: Node) -> Check:
    limit = node.machine.facts().get("memlock_bytes")
    if limit is None:
        return LOCKED.ok("unlimited")
    seen = f"{limit / 2**20:,.0f} MiB"
    status = re.search(r"(?m)^CapEff:\s*([0-9a-f]+)", node.machine.read("/proc/self/status") or "")
    if status and int(status[1], 16) & CAP_IPC_LOCK:
        return LOCKED.ok(f"{seen}, and this process may lock what it likes (CAP_IPC_LOCK)")
    if limit >= 2**20 * sum(number(row, "memory.total") or 0.0 for row in node.gpus.rows):
        return LOCKED.ok(f"{seen}, as much as the GPUs have")
    # What CUDA pins does not count towards the limit; only the network's memory does.
    if not node.several_nodes:
        return LOCKED.note(f"{seen}; a run of one node has no need of it")
    cards = node.machine.listing("/sys/class/infiniband")
    return LOCKED.fault(seen) if cards else LOCKED.note(f"{seen}; there is no InfiniBand that needs it")


def files(node: Node) -> Check:
    limit = node.machine.facts().get("open_files")
    if limit is None or limit >= OPEN_FILES[1]:
        return FILES.ok("unlimited" if limit is None else str(limit))
    return FILES.fault(str(limit)) if limit < OPEN_FILES[0] else FILES.note(str(limit))


def cpus(node: Node) -> Check:
    count = node.machine.facts().get("cpus") or 0
    quota = (node.machine.read("/sys/fs/cgroup/cpu.max") or "max").split()
    text = f"{count}"
    if len(quota) == 2 and quota[0].isdigit():
        allowed = int(quota[0]) / int(quota[1])
        text, count = f"{count}, of which the container may use {allowed:g}", min(count, int(allowed))
    if count >= CPUS_A_GPU * node.gpus.count:
        return CPUS.ok(text)
    return CPUS.note(f"{text} for {node.gpus.count} GPUs")


def memory(node: Node) -> Check:
    gib = node.machine.facts().get("memory_gib") or 0.0
    limit = (node.machine.read("/sys/fs/cgroup/memory.max") or "max").strip()
    text = f"{gib:,.0f} GiB"
    if limit.isdigit() and int(limit) / 2**30 < gib:
        gib = int(limit) / 2**30
        text = f"{gib:,.0f} GiB of {text}, as the container is limited"
    wanted = HOST_SHARE * sum(number(row, "memory.total") or 0.0 for row in node.gpus.rows) / 1024
    return MEMORY.ok(text) if gib >= wanted else MEMORY.note(f"{text}, for GPUs with {wanted / HOST_SHARE:,.0f} GiB")


def clock(node: Node) -> Check:
    synchronised = node.machine.facts().get("clock_synchronised")
    if synchronised is None:
        return CLOCK.unknown("this kernel does not tell")
    # chronyd without rtcsync keeps the clock right and does not tell the kernel; several nodes compare their clocks as well.
    return CLOCK.ok("it does") if synchronised else CLOCK.note("the kernel does not know of one")


PARTS = (
    *((BALANCING, balancing), (GOVERNOR, governor), (SHM, shm), (LOCKED, locked), (FILES, files)),
    *((CPUS, cpus), (MEMORY, memory), (CLOCK, clock)),
)
