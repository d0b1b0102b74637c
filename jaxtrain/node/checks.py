"""The checks of one node, in the order of the report: its GPUs, their links, versions, the host, and variables.

A NIC is near a GPU if only PCIe switches are between them (PIX or PXB in `nvidia-smi topo -m`).
"""

import functools
import ipaddress
import re
from collections import Counter
from collections.abc import Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from jaxtrain.config import environment, hardware
from jaxtrain.config.hardware import Devices
from jaxtrain.config.stores import is_bucket
from jaxtrain.models import flops
from jaxtrain.node.facts import BOOST, GOVERNOR, GOVERNOR_DRIVER, INFINIBAND, LOG, TOPOLOGY
from jaxtrain.node.machine import SWITCH, Board, GpuRow, parse_pci, parse_vboost, visible_gpus
from jaxtrain.node.table import (
    DRIVER,
    GPUS,
    HOST,
    NOT_REPORTED,
    CheckTable,
    NodeContext,
    Verdict,
    each_gpu,
    fault,
    gpu_name,
    group_texts,
    join_items,
    note,
    ok,
    unknown,
    worst,
)
from jaxtrain.report.preflight import Finding
from jaxtrain.runtime.cluster import node_names

CHECKS = CheckTable()


def inspect(context: NodeContext) -> list[Finding]:
    """Return the findings of all checks that need no measurement."""
    needs = {HOST} if context.gpus.absent else {HOST, DRIVER, GPUS} if context.gpus.rows else {HOST, DRIVER}
    return CheckTable(check for check in CHECKS if check.needs in needs).run(context)


# ---- GPUs

MEMORY_IN_USE_GIB = 2.0  # used by other processes; a display or a monitor uses less
XID_HOURS = 24.0  # an older Xid is a note, not a fault
POWER_SHARE = 0.99  # of a power limit, since drivers round
CLOCK_SHARE = 0.95  # of the highest clock among GPUs of a model that is not in BOARDS: vendors' clocks differ by some percent
HOPPER = "9.0"  # compute capability

# Xids of hardware errors (NVIDIA's Xid catalogue). Programs cause all other Xids.
HARDWARE_XIDS = {
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
ACTION_CHANGED = 154  # its line in the log ends with the new action: 0x0 (None) after a recovery
# Bits of NVML's reasons for reduced clocks (nvml.h). "Idle", "application clocks" and, under load, "power cap" are normal.
SLOWDOWNS = {0x08: "hw_slowdown", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake"}
POWER_CAP = 0x04


@CHECKS.add(
    "NVML",
    needs=DRIVER,
    expected="it answers",
    why="JAX uses the driver as NVML and nvidia-smi do: without its answers, a run finds no GPU, or hangs.",
    fix="Run nvidia-smi by hand and look into dmesg for NVRM; after an update of the driver reboot, so that the module and "
    "the libraries are of one version. Without GPUs, remove the driver.",
)
def driver_answers(context: NodeContext) -> Verdict:
    hung = ["NVML"] * bool(context.facts.nvml.get("hangs")) + [
        at for at in (TOPOLOGY, BOOST) if context.facts.run(at).code is None
    ]
    if hung:
        return fault(
            f"no answer in time from {join_items(hung)}",
            why="A call that hangs, hangs in the driver: a GPU is lost, or is being reset. A run would hang too.",
            fix="Look for Xid in dmesg, then power-cycle the node; a process in state D (ps) cannot be killed.",
        )
    if context.gpus.rows or not context.gpus.broken:
        return ok("it answers")
    if context.gpus.all_rows:
        return unreachable_fault(context)
    if "Driver Not Loaded" in context.gpus.broken:
        return fault(
            context.gpus.broken,
            why="The driver's kernel module is not loaded, or not built for the running kernel, as after a kernel update. JAX "
            "then finds no GPU.",
            fix="lsmod | grep nvidia shows whether it is loaded, sudo modprobe nvidia loads it or prints the reason, and dkms "
            "status lists the kernels it is built for. Build it for the kernel of uname -r, or boot one of those. Without "
            "GPUs, remove the driver.",
        )
    return fault(context.gpus.broken)


def unreachable_fault(context: NodeContext) -> Verdict:
    """Return the fault of GPUs that the driver cannot reach."""
    seen = f"{context.gpus.count}; {context.gpus.broken}"
    if not context.gpus.reset:
        return fault(seen)
    return fault(
        seen,
        expected="no GPU requires a reset",
        why="After some errors the driver gives a GPU no more work until it is reset: a run on it fails at its start.",
        fix=f"sudo nvidia-smi --gpu-reset -i {','.join(map(str, context.gpus.reset))}, with no process on that GPU; where the "
        "reset is refused, reboot the node.",
    )


def find_assigner(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return (system that assigned GPUs to this job or container, number of these GPUs); ("", 0) if there is none."""
    if (slurm := environ.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        return "Slurm", int(slurm)
    entries = [entry.strip() for entry in environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")]
    if all(re.fullmatch(r"\d+|GPU-[\w-]+", entry) for entry in entries):
        return "NVIDIA_VISIBLE_DEVICES", len(entries)
    return "", 0


@CHECKS.add(
    "GPU count",
    expected="all of the board's GPUs",
    why="A GPU that fell off the bus is missing from every run: the mesh does not fit, or the job gets seven of eight GPUs.",
    fix="Look for Xid 79 in dmesg, power-cycle the node (a warm reboot may not bring it back), and report the GPU if it stays "
    "away.",
)
def gpu_count(context: NodeContext) -> Verdict:
    """Compare the number of GPUs with the number that the scheduler or the container assigned, else with the board's number."""
    gpus, board = context.gpus, context.board
    if gpus.broken:
        return unreachable_fault(context)
    intended = "Nothing, if this number was requested."
    assigner, assigned = find_assigner(context.facts.environ)
    if gpus.on_node < assigned:
        return fault(f"{gpus.on_node}, and {assigner} gave {assigned}")
    if assigned:
        text = f"{gpus.count}, and {assigner} gave {assigned}"
        return note(text, fix=f"{intended} The others may be another job's.") if gpus.count > assigned else ok(text)
    if board is None or board.gpus is None:
        return ok(f"{gpus.count}; the expected number is not known for this model")
    seen = f"{gpus.on_node} of {board.gpus}"
    if gpus.on_node >= board.gpus:
        return ok(seen if gpus.on_node == board.gpus else f"{gpus.on_node}; a board has {board.gpus}")
    # Schedulers and clouds assign a half, a quarter or one GPU of a board; pods have any number. Seven of eight are a fault.
    partial = gpus.hidden or not board.gpus % gpus.on_node or context.facts.environ.get("KUBERNETES_SERVICE_HOST")
    return note(seen, fix=intended) if partial else fault(seen)


@CHECKS.add(
    "GPU model",
    expected="all alike",
    why="A mesh runs at the pace of its slowest GPU, and a plan is made for one model.",
    fix="Use the GPUs of one model: CUDA_VISIBLE_DEVICES=0,1,... chooses them.",
)
def gpu_model(context: NodeContext) -> Verdict:
    models = sorted(set(context.gpus.names))
    seen = ", ".join(f"{context.gpus.names.count(model)} x {model}" for model in models)
    return ok(seen) if len(models) == 1 else fault(seen)


@CHECKS.add(
    "ECC",
    expected="no uncorrected memory error since the driver was loaded",
    why="An uncorrected error ends the process that used the memory, and the GPU that had one tends to have more.",
    fix="Drain the node, reset the GPU (nvidia-smi --gpu-reset -i N) or reboot; report the GPU if it comes back.",
)
@each_gpu("ecc_uncorrected")
def ecc(_: NodeContext, row: GpuRow) -> Verdict:
    return (fault if row["ecc_uncorrected"] else ok)(str(row["ecc_uncorrected"]))


@CHECKS.add(
    "row remap",
    expected="no memory row waits to be remapped, none failed",
    why="A failed remap means that no spare rows are left. A pending one waits for a reset; until then it affects no new work, "
    "according to NVIDIA (error containment). It is a fault here because a reset costs less before a run than during it.",
    fix="Pending: reset the GPU (nvidia-smi --gpu-reset -i N) or reboot. Failed: have the GPU replaced.",
)
@each_gpu("remapped_rows")
def row_remap(_: NodeContext, row: GpuRow) -> Verdict:
    rows = row["remapped_rows"]
    if rows["failed"] or rows["pending"]:
        return fault("failed" if rows["failed"] else "pending")
    return ok("done after an uncorrected error" if rows["uncorrectable"] else "none")


@CHECKS.add(
    "memory in use",
    expected="what train.memory_fraction leaves of the GPU is enough for it",
    why="JAX allocates its whole memory budget at the start, and fails if another process has part of it.",
    fix="End those processes, or wait for them; nvidia-smi shows their owners. If the process is gone and its memory is still "
    "in use, reset the GPU.",
)
@each_gpu("memory")
def memory_in_use(context: NodeContext, row: GpuRow) -> Verdict:
    total, used = row["memory"]["total_gib"], row["memory"]["used_gib"]
    seen = f"{used:.1f} GiB"
    if used <= MEMORY_IN_USE_GIB:
        return ok(seen)
    owners = join_items(row.get("processes", ())) or "processes that are not visible from here"
    spare_gib = total * (1 - hardware.memory_fraction(total, context.run.train.memory_fraction)) if total else 0.0
    return (fault if used > spare_gib else note)(f"{seen}, by {owners}")


@CHECKS.add(
    "MIG",
    expected="off",
    why="In MIG mode a process gets one instance, with a part of the GPU's memory and without NVLink.",
    fix="sudo nvidia-smi -i N -mig 0, and reset the GPU.",
)
@each_gpu("mig")
def mig(_: NodeContext, row: GpuRow) -> Verdict:
    return fault("on") if row["mig"] else ok("off")


@CHECKS.add(
    "recovery action",
    expected="None: the driver asks for no reset of a GPU",
    why="After some errors a GPU still works, and only a reset or a reboot restores it; until then work on it may fail.",
    fix="Reset: nvidia-smi --gpu-reset -i N. Reboot: the node. Drain: end what runs on it first, then reset.",
)
@each_gpu("recovery_action")
def recovery_action(_: NodeContext, row: GpuRow) -> Verdict:
    return (ok if row["recovery_action"] == "None" else fault)(row["recovery_action"])


@CHECKS.add(
    "Xid",
    expected=f"no hardware Xid in the kernel's log of the last {XID_HOURS:.0f} hours",
    why="The driver logs GPU failures there; the next run fails for the same reason.",
    fix="Look the number up in NVIDIA's Xid catalogue; reset the GPU or reboot the node, and report the GPU if it comes back.",
)
def xid(context: NodeContext) -> Verdict:
    log = context.facts.run(LOG)
    if log.error:
        return unknown(f"dmesg: {log.error}")
    uptime_fields = context.facts.read("/proc/uptime").split()
    uptime = float(uptime_fields[0]) if uptime_fields else None
    run_rows = {parse_pci(row["pci"]): row for row in context.gpus.rows}
    xids: dict[str, list[str]] = {"now": [], "before a reset": [], "older": [], "of GPUs that are not this run's": []}
    for line in re.finditer(r"(?m)^(?:\[\s*([\d.]+)\])?.*NVRM: Xid \(PCI:([\w:.]+)\): (\d+)(.*)", log.out):
        number, address = int(line[3]), parse_pci(line[2])
        if number not in HARDWARE_XIDS or number == ACTION_CHANGED and re.search(r"to 0x0+\b", line[4]):
            continue
        if address not in run_rows and address not in context.gpus.lost:
            when = "of GPUs that are not this run's"
        elif uptime is not None and line[1] and uptime - float(line[1]) >= 3600 * XID_HOURS:
            when = "older"
        else:
            # The Xid stays in the log after a reset. If the driver recommends no action, the GPU has recovered.
            recovered = address in run_rows and run_rows[address].get("recovery_action") == "None"
            when = "before a reset" if recovered else "now"
        xids[when].append(f"{number} ({HARDWARE_XIDS[number]}) on {line[2]}")
    texts = {when: join_items(list(dict.fromkeys(each))) for when, each in xids.items() if each}
    if "now" in texts:
        return fault(texts["now"])
    return note("; ".join(f"{when}: {text}" for when, text in texts.items())) if texts else ok("none")


@CHECKS.add(
    "power limit",
    expected="the GPU's own default, and the board's",
    why="Matmuls of a training step run at the power limit: a cap of 70% costs about as much speed, without an error.",
    fix="sudo nvidia-smi -i N -pl WATTS, with the GPU's own limit; find what lowered it (a power policy of the rack, a "
    "container host).",
)
@each_gpu("power_limit_set_w")
def power_limit(context: NodeContext, row: GpuRow) -> Verdict | None:
    limit, default = row["power_limit_set_w"], row.get("power_limit_default_w")
    if default is None:
        return None
    enforced = row.get("power_limit_w", limit)
    if limit < POWER_SHARE * default:
        return fault(f"{limit:.0f} W of {default:.0f}")
    built_so = "Nothing, if it is built so."
    if enforced < POWER_SHARE * default:
        seen = f"set to {limit:.0f} W, and held at {enforced:.0f}"
        return fault(seen) if context.board else note(seen, fix=built_so)  # laptops change this limit all the time
    if context.board and default < POWER_SHARE * context.board.power_w:
        return note(f"{default:.0f} W by default, where an {context.board.name} has {context.board.power_w:.0f}", fix=built_so)
    return ok(f"{limit:.0f} W, by default {default:.0f}")


@CHECKS.add(
    "vboost",
    expected="on for Hopper, and equal on all GPUs",
    why="vboost moves power from the memory system to the SMs, so that matmuls have a higher clock. Its default is 0, which is "
    "off. NVIDIA's scripts of its published NeMo runs set 1.",
    fix="sudo nvidia-smi boost-slider --vboost 1 moves power from the memory system to the SMs, as for NVIDIA's published NeMo "
    "runs. Time your step with 0 and with 1, since kernels bound by memory may become slower.",
)
def vboost(context: NodeContext) -> Verdict | None:
    """Return a note if GPUs differ, or if Hopper GPUs are off; None if no GPU has a value and none is a Hopper GPU."""
    answer = context.facts.run(BOOST)
    by_index = parse_vboost(answer.out)
    sliders = {gpu_name(row): by_index.get(row["index"]) for row in context.gpus.rows}
    values = {each[0] for each in sliders.values() if each}
    hopper = any(row.get("compute_capability") == HOPPER for row in context.gpus.rows)
    if not values:
        return unknown(answer.error or NOT_REPORTED) if hopper else None
    seen = group_texts([(gpu, f"{each[0]} of {each[1]}" if each else "unknown") for gpu, each in sliders.items()])
    if len(values) > 1:
        return note(seen, fix="Set all alike: sudo nvidia-smi boost-slider --vboost N. A step waits for the slowest GPU.")
    return note(seen) if hopper and values == {0} else ok(seen)


@CHECKS.add(
    "clocks",
    expected="the highest clock offered is the model's, and applications' clocks are the default",
    why="A lowered clock lowers every rate in proportion, and one slow GPU slows all of them.",
    fix="sudo nvidia-smi -rac (applications' clocks) and sudo nvidia-smi -rgc (locked clocks).",
)
@each_gpu("max_sm_clock_mhz")
def clocks(context: NodeContext, row: GpuRow) -> Verdict:
    offered, current, default = row["max_sm_clock_mhz"], row.get("application_clock_mhz"), row.get("default_clock_mhz")
    board_mhz = context.board.sm_mhz if context.board else None
    highest = board_mhz or max(each.get("max_sm_clock_mhz", 0) for each in context.gpus.rows)
    if offered < (1 if board_mhz else CLOCK_SHARE) * highest:
        return fault(f"offers {offered:.0f} MHz of {highest:.0f}")
    if current and default and current < default:
        return fault(f"set to {current:.0f} MHz, by default {default:.0f}")
    return ok(f"up to {offered:.0f} MHz")


@CHECKS.add(
    "throttling",
    expected="no slow-down for heat, power or the board",
    why="A GPU that is throttled before the run has begun delays all others in every collective.",
    fix="Look at fans, coolant and inlet temperature, power supplies and cables; see also nvidia-smi -q -d "
    "PERFORMANCE,TEMPERATURE.",
)
@each_gpu("clock_reasons")
def throttling(_: NodeContext, row: GpuRow) -> Verdict:
    mask = row["clock_reasons"]
    if slowed := [reason for bit, reason in SLOWDOWNS.items() if mask & bit]:
        return fault("+".join(slowed))
    return (
        note("at the power cap, before the run", fix="See who computes there: nvidia-smi.") if mask & POWER_CAP else ok("none")
    )


@CHECKS.add(
    "PCIe",
    expected="as wide as GPU and slot allow",
    why="Checkpoints, offloaded state and input use it: half the lanes, half the rate.",
    fix="Power the node off and on; if it stays, have the GPU, the riser or the switch reseated or replaced.",
)
@each_gpu("pcie")
def pcie_link(context: NodeContext, row: GpuRow) -> Verdict:
    link = row["pcie"]
    if link["width"] < link["max_width"]:
        seen = f"x{link['width']} of x{link['max_width']}"
        differ = (
            len({each["pcie"]["width"] for each in context.gpus.rows if each["name"] == row["name"] and "pcie" in each}) > 1
        )
        fix = "Nothing, if the mainboard shares its lanes between slots."
        return fault(seen) if context.board or differ else note(seen, fix=fix)
    if link["gen"] < link["max_gen"]:  # an idle GPU may slow its link down to save power
        return note(f"gen {link['gen']} of {link['max_gen']}", fix="Nothing, if it is faster under load.")
    return ok(f"gen {link['gen']} x{link['width']}")


# ---- links between GPUs, and to the network

# nvidia-smi's abbreviation of a connection -> its meaning, by nvidia-smi's own legend.
CONNECTIONS = {
    "SYS": "across the CPUs' interconnect",
    "NODE": "across PCIe host bridges of one CPU",
    "PHB": "across one PCIe host bridge, through the CPU",
    "PXB": "across several PCIe switches",
    "PIX": "across one PCIe switch",
}
FABRIC_OK = ("Completed", "Success")  # good values of (fabric.state, fabric.status)
ONE_GPU = "Nothing: this run has one GPU and uses none of its links."


def has_switches(context: NodeContext) -> bool:
    return context.board is not None and context.board.joined == SWITCH


def without_switches(context: NodeContext) -> bool:
    """Return whether all pairs are connected as on a board of four GPUs, which has no switches.

    On such a board, a third of a GPU's links connect it to each other GPU: NV6 on HGX H100 4-GPU, NV4 on HGX A100 4-GPU.
    The source is issue 1617 of NVIDIA/nccl.
    """
    pairs = set(context.topology.pairs.values())
    return context.board is not None and context.gpus.on_node <= 4 and pairs == {f"NV{context.board.links // 3}"}


@CHECKS.add(
    "topology",
    expected="every pair of GPUs joined by NVLink as the board allows",
    why="Collectives run at the pace of the slowest pair: PCIe instead of NVLink makes them some ten times slower, without an "
    "error.",
    fix="Reboot the node, and see that nvidia-fabricmanager runs and has exactly the driver's version; if the pair stays on "
    "PCIe, have the board inspected (nvidia-smi topo -m). In a container or VM: give it all GPUs of the board, and no PCIe "
    "passthrough without NVSwitch.",
)
def topology(context: NodeContext) -> Verdict | None:
    if context.gpus.count < 2:
        return None
    if not context.topology.near_nics:
        return unknown(f"nvidia-smi topo -m: {context.facts.run(TOPOLOGY).error or 'it has no matrix'}")
    pairs = context.topology.pairs
    counts = ", ".join(f"{n} pairs {connection}" for connection, n in Counter(pairs.values()).most_common())
    if context.board is None:
        text = f"{counts}; the topology of this board is not known"
        return ok(text) if len(set(pairs.values())) == 1 else note(text, fix="Compare it with the board's manual.")
    if not has_switches(context):
        return bridges(context, context.board, counts)
    if without_switches(context):
        return ok(f"all pairs {next(iter(pairs.values()))}, without switches")
    expected = f"NV{context.board.links}"
    unexpected = {n: [f"{a}-{b}" for (a, b), m in pairs.items() if m == n] for n in pairs.values() if n != expected}
    texts = [f"{join_items(at)} {n}" + (f" ({CONNECTIONS[n]})" if n in CONNECTIONS else "") for n, at in unexpected.items()]
    return fault(f"{'; '.join(texts)}, not {expected}") if unexpected else ok(f"all pairs {expected}")


def bridges(context: NodeContext, board: Board, counts: str) -> Verdict:
    """Return the verdict on the NVLink bridges of a board, which must all connect the same number of GPUs.

    Args:
        counts: text with the number of GPU pairs of each connection.
    """
    pairs = context.topology.pairs
    partners = {
        gpu: sorted(n for pair, n in pairs.items() if gpu in pair and n.startswith("NV")) for gpu in context.topology.near_nics
    }
    size = max(len(connections) + 1 for connections in partners.values())
    if size == 1:
        return note(f"{counts}: no NVLink bridges", fix="Nothing, if none were bought; a bridge makes collectives faster.")
    sizes = {f"NV{board.links // (n - 1)}": n for n in board.bridged}
    full = max((sizes.get(connection, 0) for connection in pairs.values()), default=0)
    # If the run has only some GPUs of the node, a bridge may connect them to GPUs of another run.
    partial = context.gpus.hidden or find_assigner(context.facts.environ)[1] or context.gpus.on_node < full
    if partial and all(connection in sizes for connections in partners.values() for connection in connections):
        return note(f"{counts}, of bridges of {full}", fix="Nothing; GPUs of one bridge are faster together.")
    expected = f"NV{board.links // (size - 1)}"
    faults = [
        (gpu, f"{', '.join(connections) or 'no NVLink'}, not {expected} to {size - 1} others")
        for gpu, connections in partners.items()
        if connections != [expected] * (size - 1)
    ]
    if size not in board.bridged or faults:
        fix = (
            "Power the node off, and see that the bridge sits on all of its GPUs (nvidia-smi topo -m); if it does, replace it."
        )
        return fault(group_texts(faults) or f"bridges of {size}: {counts}", fix=fix)
    return ok(f"bridges of {size}, {expected} within each")


@CHECKS.add(
    "NVLink",
    expected="all links of every GPU active",
    why="A link that is down reduces the bandwidth of every collective of its GPU, and every collective uses all GPUs.",
    fix="nvidia-smi nvlink -s shows it; reset the GPUs or reboot. If it stays down: reseat or replace the GPU, the bridge or "
    "the board.",
)
def nvlink(context: NodeContext) -> Verdict:
    links = {gpu_name(row): row["nvlinks"] for row in context.gpus.rows if "nvlinks" in row}
    if not links:
        return unknown(next((why for row in context.gpus.rows if (why := row["refused"].get("nvlinks"))), NOT_REPORTED))
    active = {gpu: len(each["up"]) for gpu, each in links.items()}
    if not any(active.values()) and (context.gpus.count == 1 or not has_switches(context)):
        return note("none", fix="Nothing, if none were bought, or the GPU is alone in a virtual machine.")
    full = context.board.links if context.board else max(active.values())
    verdicts = {}
    for gpu, each in links.items():
        count, down = active[gpu], [str(link) for link in each["down"]]
        if not count and context.board is None:
            verdicts[gpu] = note(f"none, and {full} on others", fix="Nothing, if their bridges are meant so.")
        elif count < full or down and context.board is None:
            suffix = f" (link {join_items(down)} down)" if down and count else ""
            seen = f"{count} of {max(full, count + len(down))}{suffix}"
            verdicts[gpu] = fault(seen) if context.gpus.count > 1 else note(seen, fix=ONE_GPU)
    if verdicts:
        return worst(verdicts, "")
    rates = [f"{rate:g} GB/s" for rate in sorted({rate for each in links.values() for rate in each["gb_s"]})]
    if len(rates) > 1:
        return fault(f"links at different rates: {join_items(rates)}")
    return ok(f"{full} of {full} on every GPU{''.join(f', {rate} each' for rate in rates)}")


@CHECKS.add(
    "NVLink errors",
    expected="no link had to recover since the driver was loaded",
    why="A link that recovers stalls its collective for milliseconds each time, and often fails soon after.",
    fix="Watch nvidia-smi nvlink -e during a run; if the count rises, have the GPU or the board inspected.",
)
@each_gpu("nvlink_errors")
def nvlink_errors(context: NodeContext, row: GpuRow) -> Verdict:
    texts = {kind: [f"link {at}: {kind} {n}" for at, n in links.items()] for kind, links in row["nvlink_errors"].items()}
    if recovered := texts.pop("recovery", []):
        return fault(join_items(recovered)) if context.gpus.count > 1 else note(join_items(recovered), fix=ONE_GPU)
    # Resending corrects the other errors. A few in some weeks are normal.
    return note(join_items(sum(texts.values(), []))) if texts else ok("none")


@CHECKS.add(
    "fabric",
    expected="the GPUs are registered with the NVSwitches",
    why="Without Fabric Manager the switches are unusable: CUDA fails to start (error 802), or falls back to PCIe.",
    fix="sudo systemctl restart nvidia-fabricmanager, whose version must be the driver's; its log has the reason if it does "
    "not start.",
)
def fabric(context: NodeContext) -> Verdict | None:
    return fabric_registration(context) if has_switches(context) else None


@each_gpu("fabric")
def fabric_registration(context: NodeContext, row: GpuRow) -> Verdict:
    """Return the verdict on a GPU's registration with the NVSwitches."""
    state, status = row["fabric"]["state"], row["fabric"]["status"]
    if (state, status) == FABRIC_OK:
        return ok(", ".join(FABRIC_OK))
    alone = context.gpus.count == 1 and not row.get("nvlinks", {}).get("up")
    if alone or without_switches(context):
        return note(f"{state}; no switch joins these GPUs", fix="Nothing.")
    return fault(f"{state} ({status})" if status else state)


@CHECKS.add(
    "GPU and NIC",
    expected="a network card behind the same PCIe switch as each GPU (PIX or PXB)",
    why="GPUDirect RDMA reaches only such a card at full rate; otherwise traffic between nodes passes the CPU.",
    fix="Look for a card that is missing or whose port is down (ibstat); in a VM, have the host's PCIe topology passed through "
    "(NCCL_TOPO_FILE).",
)
def nics(context: NodeContext) -> Verdict | None:
    if not context.topology.has_nics:
        return note("nvidia-smi names no network card") if context.several_nodes else None
    near = context.topology.near_nics
    far = [gpu for gpu, cards in near.items() if not cards]
    if not far:
        return ok("; ".join(f"{gpu} {join_items(cards, 2)}" for gpu, cards in near.items()))
    # If there is about one card for each GPU, a card is missing. With fewer cards, the machine is built (or virtualized) so.
    card_missing = 2 * len({card for cards in near.values() for card in cards}) >= len(near)
    text = f"none near {join_items(far, 8)}"
    return fault(text) if context.several_nodes and card_missing else note(text)


def port(context: NodeContext, card: str, field: str) -> str:
    """Return the "state" (`4: ACTIVE`) or "rate" (`400 Gb/sec (4X NDR)`) of a NIC's first port; "" if it is unknown."""
    return context.facts.read(f"{INFINIBAND}/{card}/ports/1/{field}")


def active_nics(context: NodeContext) -> list[str]:
    """Return those NICs near the GPUs whose first port is up."""
    cards = dict.fromkeys(card for cards in context.topology.near_nics.values() for card in cards)
    return [card for card in cards if "ACTIVE" in port(context, card, "state")]


@CHECKS.add(
    "InfiniBand",
    expected="the ports of the cards near the GPUs are up",
    why="NCCL leaves out a port that is down, and its GPUs share another one's.",
    fix="Look at cable and switch port (ibstat, ibdiagnet), and at the subnet manager.",
)
def infiniband(context: NodeContext) -> Verdict | None:
    """Return the verdict on the first ports of the NICs near the GPUs; None if no such port is known.

    The verdict is a fault if the run uses several nodes and all ports near one GPU are down. Otherwise a port
    that is down is a note.
    """
    near = context.topology.near_nics
    states = {card: state for cards in near.values() for card in cards if (state := port(context, card, "state"))}
    if not states:
        return None
    down = [f"{card} {state.partition(': ')[2] or state}" for card, state in states.items() if "ACTIVE" not in state]
    cut = [gpu for gpu, cards in near.items() if cards and not any("ACTIVE" in states.get(n, "ACTIVE") for n in cards)]
    if not down:
        return ok(f"{len(states)} active, {join_items(sorted({port(context, card, 'rate') for card in states}))}")
    if cut and context.several_nodes:
        return fault(f"{join_items(down)}; {join_items(cut)} has no other")
    why = "each GPU near one has another" if context.several_nodes else "a run of one node does not use them"
    return note(f"{join_items(down)}; {why}")


# ---- versions of driver and CUDA wheels

# CUDA version -> lowest driver (CUDA Toolkit release notes, "CUDA Toolkit and minimum required driver versions").
DRIVERS = {"12": "525.60.13", "13": "580.65.06"}
# Libraries in the wheels. JAX's plugin loads most of them by full path (jax_plugins/xla_cuda12), so copies in LD_LIBRARY_PATH
# are not used. But other libraries load nvJitLink and the sub-libraries of cuDNN by name.
WHEEL_LIBRARIES = re.compile(r"lib(cudnn\w*|nccl|cublas\w*|cudart|cusolver\w*|cusparse|cufft|cupti|nvJitLink)\.so(\.[\d.]+)?")
LOADED_BY_NAME = r"libcudnn_\w+\.so\.{cudnn}|libnvJitLink\.so\.{cuda}"


def cuda_plugins(context: NodeContext) -> list[str]:
    """Return the CUDA versions for which a plugin of JAX is installed."""
    return sorted(m[1] for package in context.facts.packages if (m := re.fullmatch(r"jax-cuda(\d+)-plugin", package)))


@CHECKS.add(
    "driver",
    needs=DRIVER,
    expected="at least what jaxlib's CUDA needs",
    why="An older driver refuses JAX's CUDA: training ends before its first step, or falls back to the CPU.",
    fix="Install a newer driver, or a CUDA that this one supports: JAXTRAIN_CUDA=12 ./run.sh setup needs 525.60.13, 13 needs "
    "580.65.06.",
)
def driver(context: NodeContext) -> Verdict:
    plugins = cuda_plugins(context)
    cuda = plugins[0] if len(plugins) == 1 else ""
    installed = context.facts.nvml.get("driver")
    if not installed or cuda not in DRIVERS:
        return unknown("the CUDA version of JAX is not known" if installed else "not reported by NVML")
    seen = f"{installed}; CUDA {cuda} needs {DRIVERS[cuda]}"
    return ok(seen) if Version(installed) >= Version(DRIVERS[cuda]) else fault(seen)


@CHECKS.add(
    "CUDA plugin",
    needs=DRIVER,
    expected="jax, jaxlib and one CUDA plugin of the same version",
    why="Without the plugin JAX finds no GPU and trains on the CPU; with two or with another version it may not start.",
    fix="Install it again: delete .venv, and run JAXTRAIN_CUDA=12 ./run.sh setup (or 13).",
)
def cuda_plugin(context: NodeContext) -> Verdict:
    packages, plugins = context.facts.packages, cuda_plugins(context)
    if len(plugins) != 1:
        return fault(f"plugins for CUDA {' and '.join(plugins)}" if plugins else "no CUDA plugin of JAX is installed")
    wheels = ("jax", "jaxlib", f"jax-cuda{plugins[0]}-plugin", f"jax-cuda{plugins[0]}-pjrt")
    versions = {name: packages[name]["version"] for name in wheels if name in packages}
    seen = join_items([f"{name} {version}" for name, version in versions.items()])
    releases = {Version(versions[name]).base_version for name in wheels[1:] if name in versions}  # 0.11.2 of 0.11.2.dev3
    return ok(seen) if len(versions) == 4 and len(releases) == 1 else fault(seen)


@CHECKS.add(
    "CUDA wheels",
    needs=DRIVER,
    expected="cuDNN, NCCL, cuBLAS and the others in the versions that the plugin requires",
    why="Libraries that the plugin was not built for fail at their first call, or compute on slower paths.",
    fix="Install the locked set: ./run.sh setup.",
)
def cuda_wheels(context: NodeContext) -> Verdict | None:
    """Compare the installed wheels with the requirements of the extra `with-cuda` of JAX's plugin; None without a plugin."""
    packages, plugins = context.facts.packages, cuda_plugins(context)
    if not plugins:
        return None
    required = [Requirement(text) for text in packages[f"jax-cuda{plugins[0]}-plugin"]["requires"] if "with-cuda" in text]
    faults, installed = [], []
    for wheel in required:
        name = canonicalize_name(wheel.name)
        if version := packages.get(name, {}).get("version"):
            installed.append(f"{name} {version}")
            fits = wheel.specifier.contains(version, prereleases=True)
            faults += [] if fits else [f"{name} {version} (needs {wheel.specifier})"]
        else:
            faults.append(f"{name} is missing")
    if required and not installed:
        return note("none of them: JAX uses the system's libraries, whose versions are not known here")
    shown = [text for text in installed if re.search("cudnn|nccl|cublas", text)]
    return fault(join_items(faults)) if faults else ok(join_items(shown))


@CHECKS.add(
    "library path",
    needs=DRIVER,
    expected="no part of cuDNN and no nvJitLink in LD_LIBRARY_PATH",
    why="The loader prefers them to the parts that match the other libraries: a cuDNN of two versions fails, or is slow.",
    fix="unset LD_LIBRARY_PATH, or remove the folders of CUDA and cuDNN from it.",
)
def library_path(context: NodeContext) -> Verdict:
    packages, path = context.facts.packages, context.facts.environ.get("LD_LIBRARY_PATH", "")
    if not path:
        return ok("LD_LIBRARY_PATH is not set")
    folders = dict.fromkeys(folder for folder in path.split(":") if folder)
    libraries = [
        f"{folder}/{name}"
        for folder in folders
        for name in context.facts.folders.get(folder, ())
        if WHEEL_LIBRARIES.fullmatch(name)
    ]
    if not libraries:
        return ok(f"none in {path}")
    cuda = "|".join(cuda_plugins(context))
    # Without a cuDNN wheel, JAX uses the system's cuDNN, so these copies are intended.
    cudnn = packages.get(f"nvidia-cudnn-cu{cuda}", {"version": ""})["version"].partition(".")[0]
    by_name = re.compile(f"/({LOADED_BY_NAME.format(cudnn=cudnn, cuda=cuda)})$")
    preferred = [library for library in libraries if cudnn and by_name.search(library)]
    return fault(join_items(preferred)) if preferred else note(f"{join_items(libraries)}; JAX loads its own first")


# ---- the host

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
    needs=HOST,
    expected="off (kernel.numa_balancing = 0)",
    why="The kernel unmaps pages of memory from time to time, to track their use, and moves them; input and copies from the "
    "GPUs stall meanwhile.",
    fix="sudo sysctl kernel.numa_balancing=0, and in /etc/sysctl.d/ to keep it.",
)
def numa_balancing(context: NodeContext) -> Verdict:
    value = context.facts.read("/proc/sys/kernel/numa_balancing")
    if value in ("", "0"):
        return ok("off" if value else "this kernel has none")
    # With one NUMA node the kernel moves no pages. On a machine without GPUs it does not matter.
    several = "-" in context.facts.read("/sys/devices/system/node/online")
    return fault(f"on ({value})") if several and context.gpus.count else note(f"on ({value})")


@CHECKS.add(
    "CPU governor",
    needs=HOST,
    expected="performance",
    why="CPUs are nearly idle between two steps; a governor that saves power lowers their clock and delays the next dispatch.",
    fix="sudo cpupower frequency-set -g performance, or the firmware's performance profile.",
)
def cpu_governor(context: NodeContext) -> Verdict:
    value, driver = context.facts.read(GOVERNOR), context.facts.read(GOVERNOR_DRIVER)
    if not value:
        return unknown("not reported by this machine, as by most virtual ones")
    if value == "performance":
        return ok(value)
    slow = value == "conservative" or value == "powersave" and driver not in FOLLOWS_LOAD
    seen = f"{value} ({driver})" if driver else value
    return fault(seen) if slow else note(seen)


@CHECKS.add(
    "/dev/shm",
    needs=HOST,
    expected=f"{SHM_GIB:g} GiB or more",
    why="NCCL exchanges data between processes of a node there; it fails with 'No space left on device' (Docker gives 64 MiB).",
    fix="docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm.",
)
def shm(context: NodeContext) -> Verdict:
    disk = context.facts.disks.get("shm")
    if disk is None or disk.silent:
        return unknown("it does not answer" if disk else "there is none")
    total = disk.total_gib
    seen = f"{total:.1f} GiB, {disk.free_gib:.1f} free" if total >= 1 else f"{total * 1024:.0f} MiB"
    if min(total, disk.free_gib) >= SHM_GIB:
        return ok(seen)
    return fault(seen) if context.gpus.count > 1 else note(seen)


@CHECKS.add(
    "locked memory",
    needs=HOST,
    expected="unlimited (ulimit -l)",
    why="NCCL registers its buffers with the network cards, which locks them in memory; with a lower limit it fails, or avoids "
    "InfiniBand.",
    fix="ulimit -l unlimited before the run; docker run --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK, "
    "LimitMEMLOCK=infinity.",
)
def locked_memory(context: NodeContext) -> Verdict:
    limit = context.facts.memlock_bytes
    if limit is None:
        return ok("unlimited")
    seen = f"{limit / 2**20:,.0f} MiB"
    status = re.search(r"(?m)^CapEff:\s*([0-9a-f]+)", context.facts.read("/proc/self/status"))
    if status and int(status[1], 16) & CAP_IPC_LOCK:
        return ok(f"{seen}, and no limit applies to this process (CAP_IPC_LOCK)")
    gpus_gib = sum(row["memory"]["total_gib"] for row in context.gpus.rows if "memory" in row)
    if limit >= 2**30 * gpus_gib:
        return ok(f"{seen}, as much as the GPUs have")
    # The limit counts memory that the network pins, but not memory that CUDA pins.
    if not context.several_nodes:
        return note(f"{seen}; a run of one node does not need it")
    infiniband = context.facts.folders.get(INFINIBAND)
    return fault(seen) if infiniband else note(f"{seen}; there is no InfiniBand that needs it")


@CHECKS.add(
    "open files",
    needs=HOST,
    expected=f"{OPEN_FILES[1]} or more (ulimit -n)",
    why="Checkpoints are many files, NCCL opens sockets to every peer, and token files are mapped: a low limit ends a run.",
    fix=f"ulimit -n {OPEN_FILES[1]} before the run; docker run --ulimit nofile=1048576.",
)
def open_files(context: NodeContext) -> Verdict:
    limit = context.facts.open_files
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


def free_space(name: str, context: NodeContext) -> Verdict | None:
    if name not in context.paths:
        return None
    path, disk, needed = context.paths[name], context.facts.disks.get(name), FREE_GIB[name]
    if name == "checkpoints" and context.has_config:  # space for two: the newest complete checkpoint, and the one being written
        needed = max(2 * flops.parameters(context.run.model)["total"] * BYTES_PER_PARAMETER / 2**30, 0.1)
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
    _fix = f"Make room, or set {KEYS[_name]} to another disk."
    CHECKS.add(f"disk {_name}", needs=HOST, expected="free space", why=_why, fix=_fix)(functools.partial(free_space, _name))


# ---- variables

MNNVL, VISIBLE = "NCCL_MNNVL_ENABLE", "CUDA_VISIBLE_DEVICES"
RACKS = ("GB200", "GB300")  # models whose NVLink connects several nodes
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


def mnnvl_enabled(context: NodeContext) -> bool:
    """Return whether NCCL_MNNVL_ENABLE=1 is set although these GPUs have no NVLink between nodes."""
    return context.facts.environ.get(MNNVL) == "1" and not any(rack in model for rack in RACKS for model in context.gpus.names)


@CHECKS.add(
    "variables",
    needs=DRIVER,
    expected="none that a run refuses",
    why="JAX does not start with it, the same config would silently give other results, or it contradicts a key.",
    fix="unset it.",
)
def refused_variables(context: NodeContext) -> Verdict:
    """Apply the rules of the run to the variables of this node."""
    if not context.gpus.rows:
        return ok("none")
    row = context.gpus.rows[0]
    # If NVML reports no memory size, an arbitrary size is used, since the names of variables matter more.
    sm, gib = round(10 * float(row.get("compute_capability", 0))), row["memory"]["total_gib"] if "memory" in row else 1.0
    devices = Devices("gpu", row["name"], context.gpus.count, gib, "NVML", sm)
    overlay, problems = environment.overlay(context.run, devices, context.facts.environ)
    refused = [p for p in problems if p.key in context.facts.environ]
    if refused:
        seen = join_items([f"{p.key}={p.value}" for p in refused])
        return fault(seen, fix=" ".join(dict.fromkeys(p.remedy for p in refused)))
    inherited = [f"{name}={value}" for name, value in overlay.inherited.items()]
    return note(f"{join_items(inherited)}: the run takes them") if inherited else ok("none")


@CHECKS.add(
    MNNVL,
    needs=DRIVER,
    expected="not 1: NVLink ends at the node",
    why="NCCL then looks for NVLink between nodes, which only racks such as GB200 NVL72 have, and fails to start.",
    fix=f"unset {MNNVL}.",
)
def mnnvl(context: NodeContext) -> Verdict | None:
    return fault("1") if mnnvl_enabled(context) else None


@CHECKS.add(
    "proxy",
    needs=DRIVER,
    expected="no proxy between the run's processes",
    why="gRPC, by which the processes connect, uses http_proxy and https_proxy: they wait for process 0 until they give up.",
    fix="Add the nodes to no_proxy (and NO_PROXY), or unset the proxy for the run.",
)
def proxy(context: NodeContext) -> Verdict:
    environ = context.facts.environ
    proxies = {name: environ[name] for each in PROXIES for name in (each, each.upper()) if environ.get(name)}
    if not proxies:
        return ok("none set")
    seen = join_items([f"{name}={value}" for name, value in proxies.items()])
    if context.cluster is None:
        return note(f"{seen}; a run of one process connects to none", fix="Nothing, until it has more than one process.")
    hosts = [context.cluster.coordinator.rpartition(":")[0].strip("[]"), *node_names(environ.get("SLURM_STEP_NODELIST", ""))]
    hosts = list(dict.fromkeys(hosts))
    exceptions = ",".join(environ.get(name, "") for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"))
    through = [host for host in hosts if not bypasses(host, exceptions)]
    if not through:
        return ok(f"{seen}, and not for {join_items(hosts)}")
    fix = f"export no_proxy={','.join(hosts)} (added to what is there), or unset the proxy for the run."
    return fault(f"{seen}, also for {join_items(through)}", fix=fix)


def bypasses(host: str, no_proxy: str) -> bool:
    """Return whether a host is local, or no_proxy has its name, a domain at its end, a range with its address, or *."""
    for entry in filter(None, (item.strip() for item in no_proxy.split(","))):
        if entry == "*" or host == entry.lstrip(".") or host.endswith("." + entry.lstrip("*.")):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:  # a name, not an address
            continue
    return host in ("localhost", "127.0.0.1", "::1")


@CHECKS.add(
    VISIBLE,
    needs=DRIVER,
    expected="unset, or the same for all processes of a node",
    why="A GPU with number 0 in every process has no number that the node, NVML and the receipt share; jaxtrain gives "
    "processes their GPUs by --local-devices, which then names GPUs that are absent.",
    fix="unset CUDA_VISIBLE_DEVICES in the processes. Slurm: srun --gpus-per-node=8 (or --gres), not --gpus-per-task or "
    "--gpu-bind.",
)
def visible_devices(context: NodeContext) -> Verdict:
    value = context.facts.environ.get(VISIBLE)
    if value is None:
        return ok("unset")
    if value.strip() in ("", "-1", "NoDevFiles"):
        return fault(f"{value!r} hides all GPUs", fix=f"unset {VISIBLE}.")
    entries = [item.strip() for item in value.split(",") if item.strip()]
    all_rows = context.gpus.all_rows
    if absent := [entry for entry in entries if not visible_gpus(all_rows, entry)]:
        return fault(
            f"{value}: there is no GPU {join_items(absent)}", fix=f"unset {VISIBLE}, or name GPUs 0 to {len(all_rows) - 1}."
        )
    ids = context.cluster.local_device_ids if context.cluster else None
    if ids and max(ids) >= len(entries):
        detail = f"this process's GPU is number {join_items([str(i) for i in ids])} of those, of which there is {len(entries)}"
        return fault(f"{value} in one of several processes of the node: {detail}")
    if len(entries) < len(all_rows):
        return note(
            f"{value}: {len(entries)} of {len(all_rows)} GPUs", fix=f"Nothing, if they are meant; otherwise unset {VISIBLE}."
        )
    if context.gpus.indices == sorted(context.gpus.indices):
        return ok(value)
    return note(f"{value}: in another order than the node's", fix="Nothing, if it is meant.")
