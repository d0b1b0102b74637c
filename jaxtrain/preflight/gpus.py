"""Checks of the GPUs: present, equal, free, without memory errors or Xids, and at full clocks and power."""

import re
from collections.abc import Callable, Mapping

from jaxtrain import hardware
from jaxtrain.preflight import nvidia_smi
from jaxtrain.preflight.node import TIMED_OUT
from jaxtrain.preflight.nvidia_smi import index, name, number
from jaxtrain.preflight.table import Context, Table, Verdict, fault, grouped, listed, note, ok, unknown
from jaxtrain.preflight.thresholds import CLOCK_SHARE, MEMORY_IN_USE_MIB, POWER_SHARE, XID_HOURS

DRIVER, CHECKS = Table(), Table()  # DRIVER: also run without a GPU that answers

NO_MODULE = "couldn't communicate with the NVIDIA driver"
NOT_REPORTED = "not reported by these GPUs"

# Xids of hardware errors (NVIDIA's Xid catalogue); programs cause the others.
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
ACTION_CHANGED = 154  # ends with the new action: 0x0 (None) after a recovery
# clocks_event_reasons, by nvml.h. Idle, application clocks and the power cap under load are normal.
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


def given_by(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return who assigned GPUs to this job or container, and how many; 0 if no number is known."""
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
    """Compare with the number that the scheduler or the container gave, or else with the board's."""
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
    intended = "Nothing, if that is what was asked for."
    giver, given = given_by(c.node.environ)
    if gpus.on_node < given:
        return fault(f"{gpus.on_node}, and {giver} gave {given}")
    if given:
        text = f"{gpus.count}, and {giver} gave {given}"
        return note(text, f"{intended} The others may be another job's.") if gpus.count > given else ok(text)
    if board is None or board.gpus is None:
        return ok(f"{gpus.count}; the expected number is not known for this model")
    seen = f"{gpus.on_node} of {board.gpus}"
    if gpus.on_node >= board.gpus:
        return ok(seen if gpus.on_node == board.gpus else f"{gpus.on_node}; a board has {board.gpus}")
    # Schedulers and clouds assign half, a quarter or one GPU of a board, and pods any number. Seven of eight is a broken node.
    part = gpus.others or not board.gpus % gpus.on_node or c.node.environ.get("KUBERNETES_SERVICE_HOST")
    return note(seen, intended) if part else fault(seen)


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


def each_gpu(c: Context, field: str, is_wrong: Callable[[str], bool], good: str) -> Verdict:
    """Check one field of each GPU that reports it."""
    reported = [(name(row), value) for row in c.gpus.rows if (value := row[field]) is not None]
    if not reported:
        return unknown(NOT_REPORTED)
    wrong = [(gpu, value) for gpu, value in reported if is_wrong(value)]
    return fault(grouped(wrong)) if wrong else ok(good)


@CHECKS.add(
    "ECC",
    expected="no uncorrected memory error since the driver was loaded",
    why="An uncorrected error ends the process that used the memory, and the GPU that had one tends to have more.",
    fix="Drain the node, reset the GPU (nvidia-smi --gpu-reset -i N) or reboot; report the GPU if it comes back.",
)
def ecc(c: Context) -> Verdict:
    return each_gpu(c, "ecc.errors.uncorrected.volatile.total", lambda value: value != "0", "none")


@CHECKS.add(
    "row remap",
    expected="no memory row waits to be remapped, none failed",
    why="A failed remap means that no spare rows are left. A pending one waits for a reset; until then it affects no new work, "
    "according to NVIDIA (error containment). It is a fault here because a reset costs less before a run than during it.",
    fix="Pending: reset the GPU (nvidia-smi --gpu-reset -i N) or reboot. Failed: have the GPU replaced.",
)
def row_remap(c: Context) -> Verdict:
    found = nvidia_smi.rows(c.node, nvidia_smi.REMAPS)
    if not found:
        answer = c.node.run(nvidia_smi.REMAPS.command)
        return unknown(NOT_REPORTED if answer.succeeded else answer.error)
    gpus = {row["uuid"]: name(row) for row in c.gpus.rows}
    others = {row["uuid"] for row in c.gpus.others}

    def set_on(field: str) -> list[str]:
        uuids = [row["gpu_uuid"] for row in found if row["gpu_uuid"] not in others and row[field] not in (None, "0", "No")]
        return [gpus.get(uuid, str(uuid)) for uuid in uuids]

    pending, failed = set_on("remapped_rows.pending"), set_on("remapped_rows.failure")
    if pending or failed:
        parts = [f"pending on {listed(pending)}"] * bool(pending) + [f"failed on {listed(failed)}"] * bool(failed)
        return fault("; ".join(parts))
    done = set_on("remapped_rows.uncorrectable")
    return ok(f"none pending; done after an uncorrected error on {listed(done)}" if done else "none pending, none failed")


@CHECKS.add(
    "memory in use",
    expected="what train.memory_fraction leaves of the GPU is enough for it",
    why="JAX allocates its whole memory budget at the start, and fails if another process has part of it.",
    fix="End those processes, or wait for them; nvidia-smi shows their owners. If the process is gone and its memory is still "
    "in use, reset the GPU.",
)
def memory_in_use(c: Context) -> Verdict:
    used = {name(row): number(row, "memory.used") or 0.0 for row in c.gpus.rows}
    busy = {gpu: mib for gpu, mib in used.items() if mib > MEMORY_IN_USE_MIB}
    if not busy:
        return ok(f"{max(used.values(), default=0.0) / 1024:.1f} GiB at most")
    gpus = {row["uuid"]: name(row) for row in c.gpus.rows}
    processes = {
        f"{row['process_name']} (pid {row['pid']})"
        for row in nvidia_smi.rows(c.node, nvidia_smi.PROCESSES)
        if gpus.get(row["gpu_uuid"]) in busy
    }
    by = f", by {listed(sorted(processes))}" if processes else ", by processes that are not visible from here"
    seen = grouped([(gpu, f"{mib / 1024:.1f} GiB") for gpu, mib in busy.items()]) + by
    too_much = False
    for row in c.gpus.rows:
        total = (number(row, "memory.total") or 0.0) / 1024
        fraction = hardware.memory_fraction(total, c.run.train.memory_fraction) if total else 1.0
        too_much |= busy.get(name(row), 0.0) > 1024 * total * (1 - fraction)
    return fault(seen) if too_much else note(seen)


@CHECKS.add(
    "MIG",
    expected="off",
    why="In MIG mode a process gets one instance, with a part of the GPU's memory and without NVLink.",
    fix="sudo nvidia-smi -i N -mig 0, and reset the GPU.",
)
def mig(c: Context) -> Verdict:
    return each_gpu(c, "mig.mode.current", lambda value: value == "Enabled", "off")


@CHECKS.add(
    "compute mode",
    expected="Default",
    why="Prohibited refuses every process; Exclusive_Process every one but the first.",
    fix="sudo nvidia-smi -c 0",
)
def compute_mode(c: Context) -> Verdict:
    modes = [(name(row), row["compute_mode"]) for row in c.gpus.rows if row["compute_mode"] not in (None, "", "Default")]
    prohibited = [(gpu, mode) for gpu, mode in modes if mode == "Prohibited"]
    if prohibited:
        return fault(grouped(prohibited))
    return note(grouped([(gpu, mode or "") for gpu, mode in modes])) if modes else ok("Default")


def recovery_actions(c: Context) -> dict[int, str]:
    """Return the recovery action that the driver recommends for each GPU; empty with an old driver."""
    return {index(row): action for row in c.rows(nvidia_smi.RECOVERY) if (action := row["gpu_recovery_action"])}


@CHECKS.add(
    "recovery action",
    expected="None: the driver asks for no reset of a GPU",
    why="After some errors a GPU still works, and only a reset or a reboot restores it; until then work on it may fail.",
    fix="Reset: nvidia-smi --gpu-reset -i N. Reboot: the node. Drain: end what runs on it first, then reset.",
)
def recovery_action(c: Context) -> Verdict:
    actions = recovery_actions(c)
    if not actions:
        return unknown("not reported by this driver")
    wanted = [(f"GPU{i}", action) for i, action in actions.items() if action != "None"]
    return fault(grouped(wanted)) if wanted else ok("None")


def pci(address: str) -> tuple[int, ...]:
    """Return (domain, bus, device): nvidia-smi writes 00000000:9A:00.0, and the kernel 0000:9a:00."""
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
    recovered = {i for i, action in recovery_actions(c).items() if action == "None"}
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
            # The line stays in the log after a reset. If the driver recommends no action, the GPU has recovered.
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
def power_limit(c: Context) -> Verdict:
    low, odd, reported = [], [], []
    for row in c.gpus.rows:
        limit, default = number(row, "power.limit"), number(row, "power.default_limit")
        enforced = number(row, "enforced.power.limit")
        if limit is None or default is None:
            continue
        reported.append(limit)
        if limit < POWER_SHARE * default:
            low.append((name(row), f"{limit:.0f} W of {default:.0f}"))
        elif enforced is not None and enforced < POWER_SHARE * default:
            # Laptops change it all the time.
            (low if c.board else odd).append((name(row), f"set to {limit:.0f} W, and held at {enforced:.0f}"))
        elif c.board and default < POWER_SHARE * c.board.power_w:
            odd.append((name(row), f"{default:.0f} W by default, where an {c.board.name} has {c.board.power_w:.0f}"))
    if not reported:
        return unknown(NOT_REPORTED)
    if low:
        return fault(grouped(low))
    return note(grouped(odd), "Nothing, if it is built so.") if odd else ok(f"{min(reported):.0f} W")


@CHECKS.add(
    "clocks",
    expected="the highest clock offered is the model's, and applications' clocks are the default",
    why="A lowered clock lowers every rate in proportion, and one slow GPU slows all of them.",
    fix="sudo nvidia-smi -rac (applications' clocks) and sudo nvidia-smi -rgc (locked clocks).",
)
def clocks(c: Context) -> Verdict:
    highest = {name(row): mhz for row in c.gpus.rows if (mhz := number(row, "clocks.max.sm"))}
    if not highest:
        return unknown(NOT_REPORTED)
    known = c.board.sm_mhz if c.board else None
    expected, least = (known, known) if known else (max(highest.values()), CLOCK_SHARE * max(highest.values()))
    low = [(gpu, f"offers {mhz:.0f} MHz of {expected:.0f}") for gpu, mhz in highest.items() if mhz < least]
    for row in c.rows(nvidia_smi.APPLICATION_CLOCKS):
        now, default = (number(row, field) for field in nvidia_smi.APPLICATION_CLOCKS.fields[1:])
        if now and default and now < default:
            low.append((name(row), f"set to {now:.0f} MHz, by default {default:.0f}"))
    return fault(grouped(low)) if low else ok(f"up to {min(highest.values()):.0f} MHz")


@CHECKS.add(
    "throttling",
    expected="no slow-down for heat, power or the board",
    why="A GPU that is throttled before the run has begun delays all others in every collective.",
    fix="Look at fans, coolant and inlet temperature, power supplies and cables; see also nvidia-smi -q -d "
    "PERFORMANCE,TEMPERATURE.",
)
def throttling(c: Context) -> Verdict:
    queries = (nvidia_smi.REASONS, nvidia_smi.OLD_REASONS)
    query = next((query for query in queries if nvidia_smi.rows(c.node, query)), None)
    if query is None:
        return unknown(c.node.run(nvidia_smi.REASONS.command).error)
    masks = {name(row): int(mask, 16) for row in c.rows(query) if (mask := row[query.fields[1]]) and mask.startswith("0x")}
    if not masks:
        return unknown(NOT_REPORTED)
    slowed = [(gpu, "+".join(text for bit, text in SLOWDOWNS.items() if mask & bit)) for gpu, mask in masks.items()]
    if slowed := [(gpu, reasons) for gpu, reasons in slowed if reasons]:
        return fault(grouped(slowed))
    if capped := [gpu for gpu, mask in masks.items() if mask & POWER_CAP]:
        return note(f"at the power cap, before the run: {listed(capped)}", "See who computes there: nvidia-smi.")
    return ok("none")


@CHECKS.add(
    "persistence",
    expected="on",
    why="Without it the driver releases idle GPUs, each start takes seconds longer, and error counters restart at 0.",
    fix="sudo systemctl enable --now nvidia-persistenced, or sudo nvidia-smi -pm 1.",
)
def persistence(c: Context) -> Verdict:
    off = [name(row) for row in c.gpus.rows if row["persistence_mode"] == "Disabled"]
    return note(f"off on {listed(off)}") if off else ok("on")


@CHECKS.add(
    "PCIe",
    expected="as wide as GPU and slot allow",
    why="Checkpoints, offloaded state and input use it: half the lanes, half the rate.",
    fix="Power the node off and on; if it stays, have the GPU, the riser or the switch reseated or replaced.",
)
def pcie(c: Context) -> Verdict:
    narrow, slow, reported = [], [], []
    widths: dict[str | None, set[float]] = {}  # by model
    for row in c.gpus.rows:
        width, widest = number(row, "pcie.link.width.current"), number(row, "pcie.link.width.max")
        speed, fastest = number(row, "pcie.link.gen.current"), number(row, "pcie.link.gen.max")
        if not width or not widest:
            continue
        reported.append(f"gen {speed or 0:.0f} x{width:.0f}")
        widths.setdefault(row["name"], set()).add(width)
        narrow += [(name(row), f"x{width:.0f} of x{widest:.0f}")] if width < widest else []
        slow += [(name(row), f"gen {speed:.0f} of {fastest:.0f}")] if speed and fastest and speed < fastest else []
    if not reported:
        return unknown(NOT_REPORTED)
    if narrow and (c.board or any(len(each) > 1 for each in widths.values())):
        return fault(grouped(narrow))
    if narrow:
        return note(grouped(narrow), "Nothing, if the mainboard shares its lanes between slots.")
    # An idle GPU may slow its link down to save power.
    return note(grouped(slow), "Nothing, if it is faster under load.") if slow else ok(reported[0])
