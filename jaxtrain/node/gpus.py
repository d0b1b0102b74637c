"""Checks of the GPUs: present, of one model, free, without memory errors or Xids, and at full clocks and power."""

import re
from collections.abc import Mapping

from jaxtrain.config import hardware
from jaxtrain.node import nvidia_smi
from jaxtrain.node.node import TIMED_OUT
from jaxtrain.node.nvidia_smi import Row, index, number
from jaxtrain.node.table import (
    NOT_REPORTED,
    Context,
    Table,
    Verdict,
    by_value,
    each_gpu,
    fault,
    grouped,
    listed,
    note,
    ok,
    unknown,
)
from jaxtrain.report.preflight import FAULT, NOTE, OK

DRIVER, CHECKS = Table(), Table()  # checks of DRIVER also run if no GPU answers

MEMORY_IN_USE_MIB = 2048.0  # used by other processes; the driver's own reservation is smaller
XID_HOURS = 24.0  # an older Xid is a note, not a fault
POWER_SHARE = 0.99  # of a power limit, since drivers round
CLOCK_SHARE = 0.95  # of the highest clock among GPUs of a model that is not in BOARDS: vendors' clocks differ by some percent
HOPPER = "9.0"  # compute capability
NO_MODULE = "couldn't communicate with the NVIDIA driver"

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
# Bits of clocks_event_reasons (nvml.h). The reasons "idle", "application clocks" and, under load, "power cap" are normal.
SLOWDOWNS = {0x08: "hw_slowdown", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake"}
POWER_CAP = 0x04


@DRIVER.add(
    "nvidia-smi",
    expected="it answers",
    why="A call that hangs nvidia-smi hangs the driver: a GPU is lost, or is being reset. A run would hang too.",
    fix="Look for Xid in dmesg, then power-cycle the node; nvidia-smi in state D (ps) cannot be killed.",
)
def driver_answers(c: Context) -> Verdict:
    hung = [command for command in nvidia_smi.COMMANDS if c.node.run(command).code == TIMED_OUT]
    if len(hung) == len(nvidia_smi.COMMANDS):
        return fault(f"no answer in time to any of {len(hung)} commands")
    if hung:
        kinds = list(dict.fromkeys(command.partition("=")[0] for command in hung))
        return fault(f"no answer in time to {len(hung)} of {len(nvidia_smi.COMMANDS)} commands: {listed(kinds)}")
    if c.gpus.rows or not c.gpus.broken:
        return ok("it answers")
    if NO_MODULE in c.gpus.broken:
        return fault(
            c.gpus.broken,
            why="The driver's kernel module is not loaded, or not built for the running kernel, as after a kernel update. JAX "
            "then finds no GPU.",
            fix="lsmod | grep nvidia shows whether it is loaded, sudo modprobe nvidia loads it or prints the reason, and dkms "
            "status lists the kernels it is built for. Build it for the kernel of uname -r, or boot one of those. Without "
            "GPUs, remove the driver.",
        )
    return fault(
        c.gpus.broken,
        why="JAX uses the same driver as nvidia-smi: without its answers, a run finds no GPU.",
        fix="Run nvidia-smi by hand and look into dmesg for NVRM; after an update of the driver reboot, so that the module and "
        "the libraries are of one version. Without GPUs, remove the driver.",
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
    if gpus.reset:
        return fault(
            f"{gpus.count}; {gpus.broken}",
            expected="all of the board's GPUs, and none that requires a reset",
            why="After some errors the driver gives a GPU no more work until it is reset: a run on it fails at its start.",
            fix=f"sudo nvidia-smi --gpu-reset -i {','.join(gpus.reset)}, with no process on that GPU; where the reset is "
            "refused, reboot the node.",
        )
    if gpus.broken:
        return fault(f"{gpus.count}; {gpus.broken}")
    intended = "Nothing, if this number was requested."
    giver, given = find_assigner(c.node.environ)
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
    part = gpus.others or not board.gpus % gpus.on_node or c.node.environ.get("KUBERNETES_SERVICE_HOST")
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


CHECKS.add(
    "ECC",
    expected="no uncorrected memory error since the driver was loaded",
    why="An uncorrected error ends the process that used the memory, and the GPU that had one tends to have more.",
    fix="Drain the node, reset the GPU (nvidia-smi --gpu-reset -i N) or reboot; report the GPU if it comes back.",
)(by_value("ecc.errors.uncorrected.volatile.total", {"0": OK}, FAULT))


@CHECKS.add(
    "row remap",
    expected="no memory row waits to be remapped, none failed",
    why="A failed remap means that no spare rows are left. A pending one waits for a reset; until then it affects no new work, "
    "according to NVIDIA (error containment). It is a fault here because a reset costs less before a run than during it.",
    fix="Pending: reset the GPU (nvidia-smi --gpu-reset -i N) or reboot. Failed: have the GPU replaced.",
)
@each_gpu("remapped_rows.pending")
def row_remap(_: Context, row: Row) -> Verdict | None:
    if row.get("remapped_rows.pending") is None:
        return None
    failed, pending, done = (
        row[f"remapped_rows.{n}"] not in (None, "0", "No") for n in ("failure", "pending", "uncorrectable")
    )
    if failed or pending:
        return fault("failed" if failed else "pending")
    return ok("done after an uncorrected error" if done else "none")


@CHECKS.add(
    "memory in use",
    expected="what train.memory_fraction leaves of the GPU is enough for it",
    why="JAX allocates its whole memory budget at the start, and fails if another process has part of it.",
    fix="End those processes, or wait for them; nvidia-smi shows their owners. If the process is gone and its memory is still "
    "in use, reset the GPU.",
)
@each_gpu("memory.used")
def memory_in_use(c: Context, row: Row) -> Verdict | None:
    used = number(row, "memory.used") or 0.0
    seen = f"{used / 1024:.1f} GiB"
    if used <= MEMORY_IN_USE_MIB:
        return ok(seen)
    processes = [p for p in nvidia_smi.rows(c.node, nvidia_smi.PROCESSES) if p["gpu_uuid"] == row["uuid"]]
    by = listed(sorted(f"{p['process_name']} (pid {p['pid']})" for p in processes))
    total = (number(row, "memory.total") or 0.0) / 1024
    left = total * (1 - hardware.memory_fraction(total, c.run.train.memory_fraction)) if total else 0.0
    return (fault if used > 1024 * left else note)(f"{seen}, by {by or 'processes that are not visible from here'}")


CHECKS.add(
    "MIG",
    expected="off",
    why="In MIG mode a process gets one instance, with a part of the GPU's memory and without NVLink.",
    fix="sudo nvidia-smi -i N -mig 0, and reset the GPU.",
)(by_value("mig.mode.current", {"Enabled": FAULT}, OK))

CHECKS.add(
    "compute mode",
    expected="Default",
    why="Prohibited refuses every process; Exclusive_Process every one but the first.",
    fix="sudo nvidia-smi -c 0",
)(by_value("compute_mode", {"Default": OK, "Prohibited": FAULT}, NOTE))

CHECKS.add(
    "recovery action",
    expected="None: the driver asks for no reset of a GPU",
    why="After some errors a GPU still works, and only a reset or a reboot restores it; until then work on it may fail.",
    fix="Reset: nvidia-smi --gpu-reset -i N. Reboot: the node. Drain: end what runs on it first, then reset.",
)(by_value("gpu_recovery_action", {"None": OK}, FAULT))


def pci(address: str) -> tuple[int, ...]:
    """Return (domain, bus, device) of a PCI address as nvidia-smi (00000000:9A:00.0) or the kernel (0000:9a:00) prints it."""
    return tuple(int(part, 16) for part in re.findall(r"[0-9A-Fa-f]+", address.partition(".")[0]))


@CHECKS.add(
    "Xid",
    expected=f"no hardware Xid in the kernel's log of the last {XID_HOURS:.0f} hours",
    why="The driver logs GPU failures there; the next run fails for the same reason.",
    fix="Look the number up in NVIDIA's Xid catalogue; reset the GPU or reboot the node, and report the GPU if it comes back.",
)
def xid(c: Context) -> Verdict:
    answer = c.node.run("dmesg")
    if not answer.succeeded:
        return unknown(f"dmesg: {answer.error}")
    now = (c.node.read("/proc/uptime") or "").split()
    uptime = float(now[0]) if now else None
    mine = {pci(row["pci.bus_id"] or ""): index(row) for row in c.gpus.rows}
    lost = {pci(address) for address in c.gpus.lost}
    recovered = {index(row) for row in c.gpus.rows if row.get("gpu_recovery_action") == "None"}
    found: dict[str, list[str]] = {"now": [], "before a reset": [], "older": [], "of GPUs that are not this run's": []}
    for line in re.finditer(r"(?m)^(?:\[\s*([\d.]+)\])?.*NVRM: Xid \(PCI:([\w:.]+)\): (\d+)(.*)", answer.out):
        number, address = int(line[3]), pci(line[2])
        if number not in HARDWARE_XIDS or number == ACTION_CHANGED and re.search(r"to 0x0+\b", line[4]):
            continue
        if address not in mine and address not in lost:
            when = "of GPUs that are not this run's"
        elif uptime is not None and line[1] and uptime - float(line[1]) >= 3600 * XID_HOURS:
            when = "older"
        else:
            # The Xid stays in the log after a reset. If the driver recommends no action, the GPU has recovered.
            when = "before a reset" if mine.get(address) in recovered and address not in lost else "now"
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
@each_gpu("power.limit")
def power_limit(c: Context, row: Row) -> Verdict | None:
    limit, default = number(row, "power.limit"), number(row, "power.default_limit")
    if limit is None or default is None:
        return None
    held = number(row, "enforced.power.limit") or limit
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
    answer = c.node.run(nvidia_smi.BOOST)
    read = nvidia_smi.parse_vboost(answer.out)
    found = {nvidia_smi.name(row): read.get(index(row)) for row in c.gpus.rows}
    values = {each[0] for each in found.values() if each}
    hopper = any(row["compute_cap"] == HOPPER for row in c.gpus.rows)
    if not values:
        return unknown(NOT_REPORTED if answer.succeeded else answer.error) if hopper else None
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
@each_gpu("clocks.max.sm")
def clocks(c: Context, row: Row) -> Verdict | None:
    offered = number(row, "clocks.max.sm")
    if not offered:
        return None
    now, default = (number(row, f"clocks.{n}.graphics") for n in ("applications", "default_applications"))
    known = c.board.sm_mhz if c.board else None
    highest = known or max(number(each, "clocks.max.sm") or 0.0 for each in c.gpus.rows)
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
@each_gpu("clocks_event_reasons.active")
def throttling(_: Context, row: Row) -> Verdict | None:
    text = row.get("clocks_event_reasons.active") or row.get("clocks_throttle_reasons.active") or ""
    if not text.startswith("0x"):
        return None
    mask = int(text, 16)
    if slowed := [reason for bit, reason in SLOWDOWNS.items() if mask & bit]:
        return fault("+".join(slowed))
    return (
        note("at the power cap, before the run", fix="See who computes there: nvidia-smi.") if mask & POWER_CAP else ok("none")
    )


CHECKS.add(
    "persistence",
    expected="on",
    why="Without it the driver releases idle GPUs, each start takes seconds longer, and error counters restart at 0.",
    fix="sudo systemctl enable --now nvidia-persistenced, or sudo nvidia-smi -pm 1.",
)(by_value("persistence_mode", {"Disabled": NOTE}, OK))


@CHECKS.add(
    "PCIe",
    expected="as wide as GPU and slot allow",
    why="Checkpoints, offloaded state and input use it: half the lanes, half the rate.",
    fix="Power the node off and on; if it stays, have the GPU, the riser or the switch reseated or replaced.",
)
@each_gpu("pcie.link.width.current")
def pcie(c: Context, row: Row) -> Verdict | None:
    width, widest, speed, fastest = (
        number(row, f"pcie.link.{n}") for n in ("width.current", "width.max", "gen.current", "gen.max")
    )
    if not width or not widest:
        return None
    if width < widest:
        seen = f"x{width:.0f} of x{widest:.0f}"
        differ = len({each["pcie.link.width.current"] for each in c.gpus.rows if each["name"] == row["name"]}) > 1
        fix = "Nothing, if the mainboard shares its lanes between slots."
        return fault(seen) if c.board or differ else note(seen, fix=fix)
    if speed and fastest and speed < fastest:  # an idle GPU may slow its link down to save power
        return note(f"gen {speed:.0f} of {fastest:.0f}", fix="Nothing, if it is faster under load.")
    return ok(f"gen {speed or 0:.0f} x{width:.0f}")
