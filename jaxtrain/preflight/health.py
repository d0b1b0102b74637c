"""The GPUs themselves: are all there, alike, free and whole, and without memory errors?"""

import re
from collections.abc import Callable, Iterable

from jaxtrain.preflight import smi
from jaxtrain.preflight.check import Check, Node, Subject, grouped, listed
from jaxtrain.preflight.smi import Row, number

IN_USE_MIB = 2048.0  # of a GPU, held by others: the driver itself reserves less
XID_HOURS = 24.0  # older ones are history: whoever mended the GPU has had the time to

# Xids that mean hardware (NVIDIA's Xid catalogue); others come from programs.
HARDWARE = {
    48: "double-bit ECC error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    95: "uncontained ECC error",
    119: "GSP did not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    145: "NVLink RLW error",
    149: "NVLink NETIR error",
}

COUNT = Subject(
    "GPU count",
    "all of the board's GPUs",
    "A GPU that fell off the bus is missing from every run: the mesh does not fit, or the job is given seven of eight.",
    "Look for Xid 79 in dmesg, power-cycle the node (a warm reboot may not bring it back), and report the GPU if "
    "it stays away.",
)
NAMES = Subject(
    "GPU model",
    "all alike",
    "A mesh goes at the pace of its slowest GPU, and a plan is made for one model.",
    "Use the GPUs of one model: CUDA_VISIBLE_DEVICES=0,1,... chooses them.",
)
ECC = Subject(
    "ECC",
    "no uncorrected memory error since the driver was loaded",
    "An uncorrected error ends the process that used the memory, and the GPU that had one tends to have more.",
    "Drain the node, reset the GPU (nvidia-smi --gpu-reset -i N) or reboot; report the GPU if it comes back.",
)
REMAP = Subject(
    "row remap",
    "no memory row waits to be remapped, none failed",
    "A pending remap means that bad memory is still in use until the GPU is reset; a failed one that no spare rows are left.",
    "Pending: reset the GPU (nvidia-smi --gpu-reset -i N) or reboot. Failed: have the GPU replaced.",
)
XID = Subject(
    "Xid",
    f"no hardware Xid in the kernel's log of the last {XID_HOURS:.0f} hours",
    "The driver reports there what a GPU died of; the next run dies of it too.",
    "Look the number up in NVIDIA's Xid catalogue; reset the GPU or reboot the node, and report the GPU if it comes back.",
)
MEMORY = Subject(
    "memory in use",
    f"below {IN_USE_MIB / 1024:.0f} GiB a GPU",
    "JAX takes its whole memory budget at the start, and fails where somebody else has part of it.",
    "End those processes, or wait for them; nvidia-smi shows their owners. A process that is gone and still "
    "holds memory needs a reset.",
)
MIG = Subject(
    "MIG",
    "off",
    "A GPU that is cut into instances gives a process one of them, with a part of its memory and no NVLink.",
    "sudo nvidia-smi -i N -mig 0, and reset the GPU.",
)
MODE = Subject(
    "compute mode",
    "Default",
    "Prohibited refuses every process; Exclusive_Process every one but the first.",
    "sudo nvidia-smi -c 0",
)


def checks(node: Node) -> Iterable[Check]:
    yield count(node)
    yield names(node)
    yield each(node, ECC, "ecc.errors.uncorrected.volatile.total", lambda value: value != "0", ok="none")
    yield remaps(node)
    yield xids(node)
    yield memory(node)
    yield each(node, MIG, "mig.mode.current", lambda value: value == "Enabled", ok="off")
    yield mode(node)


def who(row: Row) -> str:
    return f"GPU{row['index']}"


def each(node: Node, subject: Subject, field: str, wrong: Callable[[str], bool], ok: str) -> Check:
    """A check of one field of each GPU. GPUs that do not tell it are left out; where none does, it was not measured."""
    told = [(row, value) for row in node.gpus.rows if (value := row[field]) is not None]
    if not told:
        return subject.unknown("these GPUs do not tell")
    bad = [(who(row), value) for row, value in told if wrong(value)]
    return subject.fault(grouped(bad)) if bad else subject.ok(ok)


def count(node: Node) -> Check:
    have, broken = node.gpus.count, node.gpus.broken
    if broken:
        return COUNT.fault(f"{have}; {broken}")
    slurm = node.machine.environ().get("SLURM_GPUS_ON_NODE", "")
    if slurm.isdigit() and int(slurm) != have:
        return COUNT.fault(f"{have}, and Slurm gave {slurm}")
    whole = node.board.gpus if node.board else None
    if whole is None:
        return COUNT.ok(f"{have}; how many there should be is not known of this model")
    if have == whole:
        return COUNT.ok(f"{have} of {whole}")
    # Half, a quarter or one of a board is what a scheduler or a cloud hands out; seven of eight is what is left.
    if have and not whole % have:
        return COUNT.note(f"{have} of {whole}", "Nothing, if that is what was asked for.")
    return COUNT.fault(f"{have} of {whole}")


def names(node: Node) -> Check:
    found = sorted(set(node.gpus.names))
    seen = ", ".join(f"{node.gpus.names.count(name)} x {name}" for name in found)
    return NAMES.ok(seen) if len(found) == 1 else NAMES.fault(seen)


def remaps(node: Node) -> Check:
    answer = node.machine.run(smi.REMAPPED)
    found = smi.rows(answer, smi.REMAPS)
    if not found:
        return REMAP.unknown(answer.why if not answer.told else "these GPUs do not tell")
    index = {row["uuid"]: who(row) for row in node.gpus.rows}

    def set_in(field: str) -> list[str]:
        return [index.get(row["gpu_uuid"], str(row["gpu_uuid"])) for row in found if row[field] not in (None, "0", "No")]

    pending, failed = set_in("remapped_rows.pending"), set_in("remapped_rows.failure")
    if pending or failed:
        parts = [f"pending on {listed(pending)}"] * bool(pending) + [f"failed on {listed(failed)}"] * bool(failed)
        return REMAP.fault("; ".join(parts))
    done = set_in("remapped_rows.uncorrectable")
    return REMAP.ok(f"none pending; done after an uncorrected error on {listed(done)}" if done else "none pending, none failed")


def xids(node: Node) -> Check:
    answer = node.machine.run("dmesg")
    if not answer.told:
        return XID.unknown(f"dmesg: {answer.why}")
    now = (node.machine.read("/proc/uptime") or "").split()
    uptime = float(now[0]) if now else None
    fresh, old = [], []
    for line in re.finditer(r"(?m)^(?:\[\s*([\d.]+)\])?.*NVRM: Xid \(PCI:([\w:.]+)\): (\d+)", answer.out):
        number_ = int(line[3])
        if number_ not in HARDWARE:
            continue
        text = f"{number_} ({HARDWARE[number_]}) on {line[2]}"
        recent = uptime is None or not line[1] or uptime - float(line[1]) < 3600 * XID_HOURS
        (fresh if recent else old).append(text)
    if fresh:
        return XID.fault(listed(list(dict.fromkeys(fresh))))
    return XID.note(f"older: {listed(list(dict.fromkeys(old)))}") if old else XID.ok("none")


def memory(node: Node) -> Check:
    used = {who(row): number(row, "memory.used") or 0.0 for row in node.gpus.rows}
    busy = {name: mib for name, mib in used.items() if mib > IN_USE_MIB}
    if not busy:
        return MEMORY.ok(f"{max(used.values(), default=0.0) / 1024:.1f} GiB at most")
    index = {row["uuid"]: who(row) for row in node.gpus.rows}
    holders = {
        f"{row['process_name']} (pid {row['pid']})"
        for row in smi.rows(node.machine.run(smi.PROCESSES), smi.APPS)
        if index.get(row["gpu_uuid"]) in busy
    }
    by = f", by {listed(sorted(holders))}" if holders else ", by processes that are not to be seen from here"
    return MEMORY.fault(grouped([(name, f"{mib / 1024:.1f} GiB") for name, mib in busy.items()]) + by)


def mode(node: Node) -> Check:
    modes = {who(row): row["compute_mode"] or "" for row in node.gpus.rows}
    shut = [(name, m) for name, m in modes.items() if m == "Prohibited"]
    if shut:
        return MODE.fault(grouped(shut))
    other = [(name, m) for name, m in modes.items() if m not in ("Default", "")]
    return MODE.note(grouped(other)) if other else MODE.ok("Default")
