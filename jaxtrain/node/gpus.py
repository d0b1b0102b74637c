"""Checks of the GPUs: present, of one model, free, without memory errors or Xids, and at full clocks and power."""

import re
from collections.abc import Mapping

from jaxtrain.config import hardware
from jaxtrain.node.facts import BOOST, LOG, TOPOLOGY
from jaxtrain.node.machine import Row, parse_vboost, pci
from jaxtrain.node.table import (
    NOT_REPORTED,
    Context,
    Table,
    Verdict,
    each_gpu,
    fault,
    grouped,
    listed,
    name,
    note,
    ok,
    unknown,
)

DRIVER, CHECKS = Table(), Table()  # checks of DRIVER also run if no GPU answers

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


@DRIVER.add(
    "NVML",
    expected="it answers",
    why="JAX uses the driver as NVML and nvidia-smi do: without its answers, a run finds no GPU, or hangs.",
    fix="Run nvidia-smi by hand and look into dmesg for NVRM; after an update of the driver reboot, so that the module and "
    "the libraries are of one version. Without GPUs, remove the driver.",
)
def driver_answers(c: Context) -> Verdict:
    hung = ["NVML"] * bool(c.facts.nvml.get("hangs")) + [at for at in (TOPOLOGY, BOOST) if c.facts.run(at).code is None]
    if hung:
        return fault(
            f"no answer in time from {listed(hung)}",
            why="A call that hangs, hangs in the driver: a GPU is lost, or is being reset. A run would hang too.",
            fix="Look for Xid in dmesg, then power-cycle the node; a process in state D (ps) cannot be killed.",
        )
    if c.gpus.rows or not c.gpus.broken:
        return ok("it answers")
    if c.gpus.every:
        return unreachable(c)
    if "Driver Not Loaded" in c.gpus.broken:
        return fault(
            c.gpus.broken,
            why="The driver's kernel module is not loaded, or not built for the running kernel, as after a kernel update. JAX "
            "then finds no GPU.",
            fix="lsmod | grep nvidia shows whether it is loaded, sudo modprobe nvidia loads it or prints the reason, and dkms "
            "status lists the kernels it is built for. Build it for the kernel of uname -r, or boot one of those. Without "
            "GPUs, remove the driver.",
        )
    return fault(c.gpus.broken)


def unreachable(c: Context) -> Verdict:
    """Return the fault of GPUs that the driver cannot reach."""
    seen = f"{c.gpus.count}; {c.gpus.broken}"
    if not c.gpus.reset:
        return fault(seen)
    return fault(
        seen,
        expected="no GPU requires a reset",
        why="After some errors the driver gives a GPU no more work until it is reset: a run on it fails at its start.",
        fix=f"sudo nvidia-smi --gpu-reset -i {','.join(map(str, c.gpus.reset))}, with no process on that GPU; where the reset "
        "is refused, reboot the node.",
    )


def find_assigner(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return (system that assigned GPUs to this job or container, number of these GPUs); ("", 0) if there is none."""
    if (slurm := environ.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        return "Slurm", int(slurm)
    parts = [part.strip() for part in environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")]
    if all(re.fullmatch(r"\d+|GPU-[\w-]+", part) for part in parts):
        return "NVIDIA_VISIBLE_DEVICES", len(parts)
    return "", 0


@CHECKS.add(
    "GPU count",
    expected="all of the board's GPUs",
    why="A GPU that fell off the bus is missing from every run: the mesh does not fit, or the job gets seven of eight GPUs.",
    fix="Look for Xid 79 in dmesg, power-cycle the node (a warm reboot may not bring it back), and report the GPU if it stays "
    "away.",
)
def gpu_count(c: Context) -> Verdict:
    """Compare the number of GPUs with the number that the scheduler or the container assigned, else with the board's number."""
    gpus, board = c.gpus, c.board
    if gpus.broken:
        return unreachable(c)
    intended = "Nothing, if this number was requested."
    giver, given = find_assigner(c.facts.environ)
    if gpus.on_node < given:
        return fault(f"{gpus.on_node}, and {giver} gave {given}")
    if given:
        text = f"{gpus.count}, and {giver} gave {given}"
        return note(text, fix=f"{intended} The others may be another job's.") if gpus.count > given else ok(text)
    if board is None or board.gpus is None:
        return ok(f"{gpus.count}; the expected number is not known for this model")
    seen = f"{gpus.on_node} of {board.gpus}"
    if gpus.on_node >= board.gpus:
        return ok(seen if gpus.on_node == board.gpus else f"{gpus.on_node}; a board has {board.gpus}")
    # Schedulers and clouds assign a half, a quarter or one GPU of a board; pods have any number. Seven of eight are a fault.
    part = gpus.others or not board.gpus % gpus.on_node or c.facts.environ.get("KUBERNETES_SERVICE_HOST")
    return note(seen, fix=intended) if part else fault(seen)


@CHECKS.add(
    "GPU model",
    expected="all alike",
    why="A mesh runs at the pace of its slowest GPU, and a plan is made for one model.",
    fix="Use the GPUs of one model: CUDA_VISIBLE_DEVICES=0,1,... chooses them.",
)
def gpu_model(c: Context) -> Verdict:
    models = sorted(set(c.gpus.names))
    seen = ", ".join(f"{c.gpus.names.count(model)} x {model}" for model in models)
    return ok(seen) if len(models) == 1 else fault(seen)


@CHECKS.add(
    "ECC",
    expected="no uncorrected memory error since the driver was loaded",
    why="An uncorrected error ends the process that used the memory, and the GPU that had one tends to have more.",
    fix="Drain the node, reset the GPU (nvidia-smi --gpu-reset -i N) or reboot; report the GPU if it comes back.",
)
@each_gpu("ecc_uncorrected")
def ecc(_: Context, row: Row) -> Verdict:
    return (fault if row["ecc_uncorrected"] else ok)(str(row["ecc_uncorrected"]))


@CHECKS.add(
    "row remap",
    expected="no memory row waits to be remapped, none failed",
    why="A failed remap means that no spare rows are left. A pending one waits for a reset; until then it affects no new work, "
    "according to NVIDIA (error containment). It is a fault here because a reset costs less before a run than during it.",
    fix="Pending: reset the GPU (nvidia-smi --gpu-reset -i N) or reboot. Failed: have the GPU replaced.",
)
@each_gpu("remapped_rows")
def row_remap(_: Context, row: Row) -> Verdict:
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
def memory_in_use(c: Context, row: Row) -> Verdict:
    total, used = row["memory"]["total_gib"], row["memory"]["used_gib"]
    seen = f"{used:.1f} GiB"
    if used <= MEMORY_IN_USE_GIB:
        return ok(seen)
    by = listed(row.get("processes", ())) or "processes that are not visible from here"
    left = total * (1 - hardware.memory_fraction(total, c.run.train.memory_fraction)) if total else 0.0
    return (fault if used > left else note)(f"{seen}, by {by}")


@CHECKS.add(
    "MIG",
    expected="off",
    why="In MIG mode a process gets one instance, with a part of the GPU's memory and without NVLink.",
    fix="sudo nvidia-smi -i N -mig 0, and reset the GPU.",
)
@each_gpu("mig")
def mig(_: Context, row: Row) -> Verdict:
    return fault("on") if row["mig"] else ok("off")


@CHECKS.add(
    "recovery action",
    expected="None: the driver asks for no reset of a GPU",
    why="After some errors a GPU still works, and only a reset or a reboot restores it; until then work on it may fail.",
    fix="Reset: nvidia-smi --gpu-reset -i N. Reboot: the node. Drain: end what runs on it first, then reset.",
)
@each_gpu("recovery_action")
def recovery_action(_: Context, row: Row) -> Verdict:
    return (ok if row["recovery_action"] == "None" else fault)(row["recovery_action"])


@CHECKS.add(
    "Xid",
    expected=f"no hardware Xid in the kernel's log of the last {XID_HOURS:.0f} hours",
    why="The driver logs GPU failures there; the next run fails for the same reason.",
    fix="Look the number up in NVIDIA's Xid catalogue; reset the GPU or reboot the node, and report the GPU if it comes back.",
)
def xid(c: Context) -> Verdict:
    log = c.facts.run(LOG)
    if log.error:
        return unknown(f"dmesg: {log.error}")
    now = c.facts.read("/proc/uptime").split()
    uptime = float(now[0]) if now else None
    mine = {pci(row["pci"]): row for row in c.gpus.rows}
    found: dict[str, list[str]] = {"now": [], "before a reset": [], "older": [], "of GPUs that are not this run's": []}
    for line in re.finditer(r"(?m)^(?:\[\s*([\d.]+)\])?.*NVRM: Xid \(PCI:([\w:.]+)\): (\d+)(.*)", log.out):
        number, address = int(line[3]), pci(line[2])
        if number not in HARDWARE_XIDS or number == ACTION_CHANGED and re.search(r"to 0x0+\b", line[4]):
            continue
        if address not in mine and address not in c.gpus.lost:
            when = "of GPUs that are not this run's"
        elif uptime is not None and line[1] and uptime - float(line[1]) >= 3600 * XID_HOURS:
            when = "older"
        else:
            # The Xid stays in the log after a reset. If the driver recommends no action, the GPU has recovered.
            recovered = address in mine and mine[address].get("recovery_action") == "None"
            when = "before a reset" if recovered else "now"
        found[when].append(f"{number} ({HARDWARE_XIDS[number]}) on {line[2]}")
    texts = {when: listed(list(dict.fromkeys(each))) for when, each in found.items() if each}
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
def power_limit(c: Context, row: Row) -> Verdict | None:
    limit, default = row["power_limit_set_w"], row.get("power_limit_default_w")
    if default is None:
        return None
    held = row.get("power_limit_w", limit)
    if limit < POWER_SHARE * default:
        return fault(f"{limit:.0f} W of {default:.0f}")
    built_so = "Nothing, if it is built so."
    if held < POWER_SHARE * default:
        seen = f"set to {limit:.0f} W, and held at {held:.0f}"
        return fault(seen) if c.board else note(seen, fix=built_so)  # laptops change this limit all the time
    if c.board and default < POWER_SHARE * c.board.power_w:
        return note(f"{default:.0f} W by default, where an {c.board.name} has {c.board.power_w:.0f}", fix=built_so)
    return ok(f"{limit:.0f} W, by default {default:.0f}")


@CHECKS.add(
    "vboost",
    expected="on for Hopper, and equal on all GPUs",
    why="vboost moves power from the memory system to the SMs, so that matmuls have a higher clock. Its default is 0, which is "
    "off. NVIDIA's scripts of its published NeMo runs set 1.",
    fix="sudo nvidia-smi boost-slider --vboost 1 moves power from the memory system to the SMs, as for NVIDIA's published NeMo "
    "runs. Time your step with 0 and with 1, since kernels bound by memory may become slower.",
)
def vboost(c: Context) -> Verdict | None:
    """Return a note if GPUs differ, or if Hopper GPUs are off; None if no GPU has a value and none is a Hopper GPU."""
    answer = c.facts.run(BOOST)
    read = parse_vboost(answer.out)
    found = {name(row): read.get(row["index"]) for row in c.gpus.rows}
    values = {each[0] for each in found.values() if each}
    hopper = any(row.get("compute_capability") == HOPPER for row in c.gpus.rows)
    if not values:
        return unknown(answer.error or NOT_REPORTED) if hopper else None
    seen = grouped([(gpu, f"{each[0]} of {each[1]}" if each else "unknown") for gpu, each in found.items()])
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
def clocks(c: Context, row: Row) -> Verdict:
    offered, now, default = row["max_sm_clock_mhz"], row.get("application_clock_mhz"), row.get("default_clock_mhz")
    known = c.board.sm_mhz if c.board else None
    highest = known or max(each.get("max_sm_clock_mhz", 0) for each in c.gpus.rows)
    if offered < (1 if known else CLOCK_SHARE) * highest:
        return fault(f"offers {offered:.0f} MHz of {highest:.0f}")
    if now and default and now < default:
        return fault(f"set to {now:.0f} MHz, by default {default:.0f}")
    return ok(f"up to {offered:.0f} MHz")


@CHECKS.add(
    "throttling",
    expected="no slow-down for heat, power or the board",
    why="A GPU that is throttled before the run has begun delays all others in every collective.",
    fix="Look at fans, coolant and inlet temperature, power supplies and cables; see also nvidia-smi -q -d "
    "PERFORMANCE,TEMPERATURE.",
)
@each_gpu("clock_reasons")
def throttling(_: Context, row: Row) -> Verdict:
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
def pcie_link(c: Context, row: Row) -> Verdict:
    link = row["pcie"]
    if link["width"] < link["max_width"]:
        seen = f"x{link['width']} of x{link['max_width']}"
        differ = len({each["pcie"]["width"] for each in c.gpus.rows if each["name"] == row["name"] and "pcie" in each}) > 1
        fix = "Nothing, if the mainboard shares its lanes between slots."
        return fault(seen) if c.board or differ else note(seen, fix=fix)
    if link["gen"] < link["max_gen"]:  # an idle GPU may slow its link down to save power
        return note(f"gen {link['gen']} of {link['max_gen']}", fix="Nothing, if it is faster under load.")
    return ok(f"gen {link['gen']} x{link['width']}")
