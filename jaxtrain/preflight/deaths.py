"""What the driver says that GPUs died of: Xids in the kernel's log, and what it wants done about it."""

import re

from jaxtrain.preflight import smi
from jaxtrain.preflight.check import Check, Node, Subject, grouped, listed

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
    154: "recovery action changed",
}
CHANGED = 154  # its line ends with the new action: 0x0 (None) where all is well again

RECOVERY = Subject(
    "recovery action",
    "None: the driver asks for no reset of a GPU",
    "After some errors a GPU goes on, and only a reset or a reboot makes it whole; until then work on it may fail.",
    "Reset: nvidia-smi --gpu-reset -i N. Reboot: the node. Drain: end what runs on it first, then reset.",
)
XID = Subject(
    "Xid",
    f"no hardware Xid in the kernel's log of the last {XID_HOURS:.0f} hours",
    "The driver reports there what a GPU died of; the next run dies of it too.",
    "Look the number up in NVIDIA's Xid catalogue; reset the GPU or reboot the node, and report the GPU if it comes back.",
)


def actions(node: Node) -> dict[int, str]:
    """GPU -> what the driver wants done; empty where it is too old to tell."""
    found = smi.rows(node.machine.run(smi.RECOVERY_ACTION), smi.RECOVERY)
    told = {int(row["index"] or 0): row["gpu_recovery_action"] for row in found}
    return {index: action for index, action in node.gpus.mine(told).items() if action}


def recovery(node: Node) -> Check:
    found = actions(node)
    if not found:
        return RECOVERY.unknown("this driver does not tell")
    wanted = [(f"GPU{index}", action) for index, action in found.items() if action != "None"]
    return RECOVERY.fault(grouped(wanted)) if wanted else RECOVERY.ok("None")


def xids(node: Node) -> Check:
    answer = node.machine.run("dmesg")
    if not answer.told:
        return XID.unknown(f"dmesg: {answer.why}")
    now = (node.machine.read("/proc/uptime") or "").split()
    uptime = float(now[0]) if now else None
    mine = {place(row["pci.bus_id"] or ""): int(row["index"] or 0) for row in node.gpus.rows}
    lost = {place(address) for address in node.gpus.lost}
    well = {index for index, action in actions(node).items() if action == "None"}
    found: dict[str, list[str]] = {"now": [], "before a reset": [], "older": [], "of GPUs that are not this run's": []}
    for line in re.finditer(r"(?m)^(?:\[\s*([\d.]+)\])?.*NVRM: Xid \(PCI:([\w:.]+)\): (\d+)(.*)", answer.out):
        number = int(line[3])
        if number not in HARDWARE or number == CHANGED and re.search(r"to 0x0+\b", line[4]):
            continue
        old = uptime is not None and line[1] and uptime - float(line[1]) >= 3600 * XID_HOURS
        at = place(line[2])
        if at not in mine and at not in lost:
            when = "of GPUs that are not this run's"
        elif old:
            when = "older"
        else:
            # The line stays in the log when the GPU has been reset. A driver that wants nothing done any more has seen to it.
            when = "before a reset" if mine.get(at) in well and at not in lost else "now"
        found[when].append(f"{number} ({HARDWARE[number]}) on {line[2]}")
    if found["now"]:
        return XID.fault(once(found["now"]))
    rest = "; ".join(f"{when}: {once(texts)}" for when, texts in found.items() if texts)
    return XID.note(rest) if rest else XID.ok("none")


def once(texts: list[str]) -> str:
    return listed(list(dict.fromkeys(texts)))


def place(address: str) -> tuple[int, ...]:
    """(domain, bus, device) of a PCI address, which nvidia-smi writes 00000000:9A:00.0 and the kernel 0000:9a:00."""
    return tuple(int(part, 16) for part in re.findall(r"[0-9A-Fa-f]+", address.partition(".")[0]))


PARTS = ((RECOVERY, recovery), (XID, xids))
