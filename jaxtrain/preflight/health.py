"""The GPUs themselves: are all there, alike, free and whole, and without memory errors?"""

import re
from collections.abc import Callable, Mapping

from jaxtrain import hardware
from jaxtrain.preflight import smi
from jaxtrain.preflight.check import Check, Node, Subject, grouped, listed
from jaxtrain.preflight.smi import Row, number

IN_USE_MIB = 2048.0  # of a GPU, held by others, beyond which it is worth a word: the driver itself reserves less

COUNT = Subject(
    "GPU count",
    "all of the board's GPUs",
    "A GPU that fell off the bus is missing from every run: the mesh does not fit, or the job is given seven of eight.",
    "Look for Xid 79 in dmesg, power-cycle the node (a warm reboot may not bring it back), and report the GPU if "
    "it stays away.",
)
RESET = Subject(
    COUNT.name,
    "all of the board's GPUs, and none that requires a reset",
    "After some errors the driver gives a GPU no more work until it is reset: a run that is given it fails when it starts.",
    "sudo nvidia-smi --gpu-reset -i N, with no process on that GPU; where the reset is refused, reboot the node.",
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
    "A failed remap means that no spare rows are left. A pending one waits for a reset and until then harms no new work, as "
    "NVIDIA says (error containment); it is a fault here because a reset costs less before a run than in its midst.",
    "Pending: reset the GPU (nvidia-smi --gpu-reset -i N) or reboot. Failed: have the GPU replaced.",
)
MEMORY = Subject(
    "memory in use",
    "what train.memory_fraction leaves of the GPU is enough for it",
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
    """Against what the scheduler or the container gave, else against the board."""
    gpus, board = node.gpus, node.board
    if gpus.reset:
        return RESET.fault(f"{gpus.count}; {gpus.broken}", RESET.fix.replace("-i N", f"-i {','.join(gpus.reset)}"))
    if gpus.broken:
        return COUNT.fault(f"{gpus.count}; {gpus.broken}")
    fine = "Nothing, if that is what was asked for."
    giver, given = given_by(node.machine.environ())
    if gpus.on_node < given:
        return COUNT.fault(f"{gpus.on_node}, and {giver} gave {given}")
    if given:
        text = f"{gpus.count}, and {giver} gave {given}"
        return COUNT.note(text, f"{fine} The others may be another job's.") if gpus.count > given else COUNT.ok(text)
    if board is None or board.gpus is None:
        return COUNT.ok(f"{gpus.count}; how many there should be is not known of this model")
    seen = f"{gpus.on_node} of {board.gpus}"
    if gpus.on_node >= board.gpus:
        return COUNT.ok(seen if gpus.on_node == board.gpus else f"{gpus.on_node}; a board has {board.gpus}")
    # Half, a quarter or one of a board is what schedulers and clouds hand out, and a pod any number; seven of eight is what is
    # left of a node.
    part = gpus.others or not board.gpus % gpus.on_node or node.machine.environ().get("KUBERNETES_SERVICE_HOST")
    return COUNT.note(seen, fine) if part else COUNT.fault(seen)


def given_by(environ: Mapping[str, str]) -> tuple[str, int]:
    """Who gave this job or container its GPUs, and how many; 0 where that is not told in numbers."""
    if (slurm := environ.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        return "Slurm", int(slurm)
    parts = [part.strip() for part in environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")]
    if all(re.fullmatch(r"\d+|GPU-[\w-]+", part) for part in parts):
        return "NVIDIA_VISIBLE_DEVICES", len(parts)
    return "", 0


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
    others = {row["uuid"] for row in node.gpus.others}

    def set_in(field: str) -> list[str]:
        bad = [row["gpu_uuid"] for row in found if row["gpu_uuid"] not in others and row[field] not in (None, "0", "No")]
        return [index.get(uuid, str(uuid)) for uuid in bad]

    pending, failed = set_in("remapped_rows.pending"), set_in("remapped_rows.failure")
    if pending or failed:
        parts = [f"pending on {listed(pending)}"] * bool(pending) + [f"failed on {listed(failed)}"] * bool(failed)
        return REMAP.fault("; ".join(parts))
    done = set_in("remapped_rows.uncorrectable")
    return REMAP.ok(f"none pending; done after an uncorrected error on {listed(done)}" if done else "none pending, none failed")


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
    seen = grouped([(name, f"{mib / 1024:.1f} GiB") for name, mib in busy.items()]) + by
    too_much = any(busy.get(who(row), 0.0) > left(node, row) for row in node.gpus.rows)
    return MEMORY.fault(seen) if too_much else MEMORY.note(seen)


def left(node: Node, row: Row) -> float:
    """MiB of a GPU that the run leaves to all else."""
    total = (number(row, "memory.total") or 0.0) / 1024
    fraction = hardware.memory_fraction(total, node.asked.run.train.memory_fraction) if total else 1.0
    return 1024 * total * (1 - fraction)


def mode(node: Node) -> Check:
    modes = {who(row): row["compute_mode"] or "" for row in node.gpus.rows}
    shut = [(name, m) for name, m in modes.items() if m == "Prohibited"]
    if shut:
        return MODE.fault(grouped(shut))
    other = [(name, m) for name, m in modes.items() if m not in ("Default", "")]
    return MODE.note(grouped(other)) if other else MODE.ok("Default")


def ecc(node: Node) -> Check:
    return each(node, ECC, "ecc.errors.uncorrected.volatile.total", lambda value: value != "0", ok="none")


def mig(node: Node) -> Check:
    return each(node, MIG, "mig.mode.current", lambda value: value == "Enabled", ok="off")


PARTS = ((COUNT, count), (NAMES, names), (ECC, ecc), (REMAP, remaps), (MEMORY, memory), (MIG, mig), (MODE, mode))
