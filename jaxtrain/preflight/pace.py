"""Whether the GPUs may go at full pace: power limit, clocks, throttling, persistence, the PCIe link."""

from jaxtrain.preflight import smi
from jaxtrain.preflight.check import Check, Node, Subject, grouped, listed
from jaxtrain.preflight.health import who
from jaxtrain.preflight.smi import Row, number

# clocks_event_reasons, as nvml.h numbers them. Idle, applications' clocks, and the power cap under load are no trouble.
SLOW = {0x08: "hw_slowdown", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake"}
POWER_CAP = 0x04
NEARLY = 0.99  # of a power limit: drivers round
ALIKE = 0.95  # of the highest clock among cards of one model that is not in boards.py

POWER = Subject(
    "power limit",
    "the GPU's own default, and the board's",
    "GEMMs of a training step run at the power limit: a cap of 70% costs about as much speed, and no error says so.",
    "sudo nvidia-smi -i N -pl WATTS, with the GPU's own limit; find what lowered it (a power policy of the rack, "
    "a container host).",
)
CLOCKS = Subject(
    "clocks",
    "the highest clock offered is the model's, and applications' clocks are the default",
    "A lowered clock lowers every rate in proportion, on one GPU for all of them.",
    "sudo nvidia-smi -rac (applications' clocks) and sudo nvidia-smi -rgc (locked clocks).",
)
THROTTLING = Subject(
    "throttling",
    "no slow-down for heat, power or the board",
    "A GPU that slows itself down before the run has begun holds back all others in every collective.",
    "Look at fans, coolant and inlet temperature, power supplies and cables; nvidia-smi -q -d "
    "PERFORMANCE,TEMPERATURE tells more.",
)
PERSISTENCE = Subject(
    "persistence",
    "on",
    "Without it the driver lets go of idle GPUs, each start takes seconds longer, and counters of errors begin anew.",
    "sudo systemctl enable --now nvidia-persistenced, or sudo nvidia-smi -pm 1.",
)
PCIE = Subject(
    "PCIe",
    "as wide as GPU and slot allow",
    "Saves, offloaded state and input go over it: half the lanes, half the rate.",
    "Power the node off and on; if it stays, the GPU, the riser or the switch has to be seated anew or replaced.",
)


def persistence(node: Node) -> Check:
    off = [who(row) for row in node.gpus.rows if row["persistence_mode"] == "Disabled"]
    return PERSISTENCE.note(f"off on {listed(off)}") if off else PERSISTENCE.ok("on")


def power(node: Node) -> Check:
    low, odd, told = [], [], []
    for row in node.gpus.rows:
        limit, default = number(row, "power.limit"), number(row, "power.default_limit")
        enforced = number(row, "enforced.power.limit")
        if limit is None or default is None:
            continue
        told.append(limit)
        if limit < NEARLY * default:
            low.append((who(row), f"{limit:.0f} W of {default:.0f}"))
        elif enforced is not None and enforced < NEARLY * default:
            # Laptops move it about all the time.
            (low if node.board else odd).append((who(row), f"set to {limit:.0f} W, and held at {enforced:.0f}"))
        elif node.board and default < NEARLY * node.board.power_w:
            odd.append((who(row), f"{default:.0f} W by default, where an {node.board.name} has {node.board.power_w:.0f}"))
    if not told:
        return POWER.unknown("these GPUs do not tell")
    if low:
        return POWER.fault(grouped(low))
    return POWER.note(grouped(odd), "Nothing, if it is built so.") if odd else POWER.ok(f"{min(told):.0f} W")


def clocks(node: Node) -> Check:
    highest = {who(row): number(row, "clocks.max.sm") for row in node.gpus.rows}
    told = {name: mhz for name, mhz in highest.items() if mhz}
    if not told:
        return CLOCKS.unknown("these GPUs do not tell")
    known = node.board.sm_mhz if node.board else None
    # Cards of one model that different makers build offer clocks that differ by some percent.
    right, least = (known, known) if known else (max(told.values()), ALIKE * max(told.values()))
    low = [(name, f"offers {mhz:.0f} MHz of {right:.0f}") for name, mhz in told.items() if mhz < least]
    for row in mine(node, smi.rows(node.machine.run(smi.APPLICATION_CLOCKS), smi.APPLICATION)):
        now, usual = (number(row, field) for field in smi.APPLICATION[1:])
        if now and usual and now < usual:
            low.append((who(row), f"set to {now:.0f} MHz, by default {usual:.0f}"))
    return CLOCKS.fault(grouped(low)) if low else CLOCKS.ok(f"up to {min(told.values()):.0f} MHz")


def throttling(node: Node) -> Check:
    answers = [(node.machine.run(smi.THROTTLE), smi.REASONS), (node.machine.run(smi.OLD_THROTTLE), smi.OLD_REASONS)]
    found, field = next(((rows, f[1]) for answer, f in answers if (rows := smi.rows(answer, f))), ([], ""))
    if not found:
        return THROTTLING.unknown(answers[0][0].why)
    bad, capped, told = [], [], False
    for row in mine(node, found):
        mask = smi.bits(row, field)
        if mask is None:
            continue
        told = True
        reasons = [name for bit, name in SLOW.items() if mask & bit]
        bad += [(who(row), "+".join(reasons))] if reasons else []
        capped += [who(row)] if mask & POWER_CAP else []
    if not told:
        return THROTTLING.unknown("these GPUs do not tell")
    if bad:
        return THROTTLING.fault(grouped(bad))
    if capped:
        return THROTTLING.note(f"at the power cap, before the run: {listed(capped)}", "See who computes there: nvidia-smi.")
    return THROTTLING.ok("none")


def pcie(node: Node) -> Check:
    narrow, slow, told = [], [], []
    widths: dict[str | None, set[float]] = {}  # of each model
    for row in node.gpus.rows:
        width, widest = number(row, "pcie.link.width.current"), number(row, "pcie.link.width.max")
        speed, fastest = number(row, "pcie.link.gen.current"), number(row, "pcie.link.gen.max")
        if not width or not widest:
            continue
        told.append(f"gen {speed or 0:.0f} x{width:.0f}")
        widths.setdefault(row["name"], set()).add(width)
        narrow += [(who(row), f"x{width:.0f} of x{widest:.0f}")] if width < widest else []
        slow += [(who(row), f"gen {speed:.0f} of {fastest:.0f}")] if speed and fastest and speed < fastest else []
    if not told:
        return PCIE.unknown("these GPUs do not tell")
    if narrow and (node.board or any(len(each) > 1 for each in widths.values())):
        return PCIE.fault(grouped(narrow))
    if narrow:
        return PCIE.note(grouped(narrow), "Nothing, if the mainboard shares its lanes between slots.")
    # An idle GPU may slow its link down to save power.
    return PCIE.note(grouped(slow), "Nothing, if it is faster under load.") if slow else PCIE.ok(told[0])


def mine(node: Node, rows: list[Row]) -> list[Row]:
    """Those of the GPUs that the run may use."""
    return [row for row in rows if int(row["index"] or 0) in node.gpus.indices]


PARTS = ((POWER, power), (CLOCKS, clocks), (THROTTLING, throttling), (PERSISTENCE, persistence), (PCIE, pcie))
