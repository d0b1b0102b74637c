"""What nvidia-smi says of the GPUs of a node, as values: its commands, and how their output is read.

A field that an old or a new driver does not know spoils the whole query, so the fields that came or go stand in queries of
their own. Values come in nvidia-smi's units: MiB, W, MHz. What it does not tell ([N/A], [Not Supported]) is None.
"""

import csv
import dataclasses
import re
from collections.abc import Mapping, Sequence

from jaxtrain.preflight.machine import ABSENT, TIMED_OUT, Answer, Machine

CORE = (
    *("index", "uuid", "pci.bus_id", "name", "driver_version", "compute_cap", "memory.total", "memory.used"),
    *("persistence_mode", "compute_mode", "mig.mode.current", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total"),
    *("power.limit", "enforced.power.limit", "power.default_limit", "clocks.max.sm", "temperature.gpu"),
    *("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max"),
)
REASONS = ("index", "clocks_event_reasons.active")  # drivers before 535 know it as clocks_throttle_reasons.active
OLD_REASONS = ("index", "clocks_throttle_reasons.active")
APPLICATION = ("index", "clocks.applications.graphics", "clocks.default_applications.graphics")
FABRIC = ("index", "fabric.state", "fabric.status")
RECOVERY = ("index", "gpu_recovery_action")  # drivers from 570 on
REMAPS = ("gpu_uuid", *(f"remapped_rows.{each}" for each in ("correctable", "uncorrectable", "pending", "failure")))
APPS = ("gpu_uuid", "pid", "process_name", "used_memory")


def _query(kind: str, fields: tuple[str, ...]) -> str:
    return f"nvidia-smi --query-{kind}={','.join(fields)} --format=csv,nounits"


GPUS = _query("gpu", CORE)
THROTTLE = _query("gpu", REASONS)
OLD_THROTTLE = _query("gpu", OLD_REASONS)
APPLICATION_CLOCKS = _query("gpu", APPLICATION)
FABRIC_STATE = _query("gpu", FABRIC)
REMAPPED = _query("remapped-rows", REMAPS)
RECOVERY_ACTION = _query("gpu", RECOVERY)
PROCESSES = _query("compute-apps", APPS)
TOPOLOGY = "nvidia-smi topo -m"
LINKS = "nvidia-smi nvlink -s"
LINK_ERRORS = "nvidia-smi nvlink -e"
QUERIES = (GPUS, THROTTLE, OLD_THROTTLE, APPLICATION_CLOCKS, FABRIC_STATE, REMAPPED, RECOVERY_ACTION, PROCESSES)
COMMANDS = (*QUERIES, TOPOLOGY, LINKS, LINK_ERRORS)

LOST = re.compile(r"Unable to determine the device handle for GPU\s*([0-9A-Fa-f:.]+)", re.IGNORECASE)
DEAD = re.compile(r"(?m)^(\d+), .*(requires reset|GPU is lost)", re.IGNORECASE)  # in a cell of its row
SAYS_NOTHING = ("", "n/a", "not supported", "not found", "unknown error", "insufficient permissions")

Row = dict[str, str | None]


def rows(answer: Answer, fields: tuple[str, ...]) -> list[Row]:
    """A query's table, by the names it was asked for (its own heading may spell them otherwise). Empty where it failed."""
    if not answer.told:
        return []
    found = []
    for cells in list(csv.reader(answer.out.splitlines(), skipinitialspace=True))[1:]:
        if len(cells) == len(fields):
            found.append({field: _told(cell.strip()) for field, cell in zip(fields, cells, strict=True)})
    return found


def _told(cell: str) -> str | None:
    """None for what stands in brackets, as [N/A] and [Requested functionality has been deprecated]: that is no value."""
    return None if cell.startswith("[") or cell.lower() in SAYS_NOTHING else cell


def number(row: Row, field: str) -> float | None:
    """A cell as a number; None where there is none."""
    try:
        return float(row.get(field) or "")
    except ValueError:
        return None


def bits(row: Row, field: str) -> int | None:
    """A cell such as 0x0000000000000004; None where there is none."""
    try:
        return int(row.get(field) or "", 16)
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The GPUs of a node. `rows` has the CORE fields of each that the run may use; `broken`: why there are none, or not all,
    where it is a fault."""

    rows: list[Row]
    broken: str = ""
    absent: str = ""  # why a node without GPUs is one
    lost: tuple[str, ...] = ()  # bus addresses of GPUs that the driver cannot reach
    reset: tuple[str, ...] = ()  # numbers of GPUs that require a reset, where nothing else is broken
    others: tuple[Row, ...] = ()  # GPUs that CUDA_VISIBLE_DEVICES leaves out: they may be another run's

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def on_node(self) -> int:
        return len(self.rows) + len(self.others)

    @property
    def names(self) -> list[str]:
        return [row["name"] or "unknown" for row in self.rows]

    @property
    def indices(self) -> list[int]:
        """Their numbers on the node, which nvidia-smi calls them by."""
        return [int(row["index"] or 0) for row in self.rows]

    def mine[T](self, found: Mapping[int, T]) -> dict[int, T]:
        """What was found by GPU, of those that the run may use. (Within a container nvidia-smi numbers those it has.)"""
        return {index: value for index, value in found.items() if index in self.indices}


def gpus(machine: Machine) -> Gpus:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; all, where it leaves none, so that they can be told of."""
    answer = machine.run(GPUS)
    found = rows(answer, CORE)
    lost = tuple((match[1] or "?").rstrip(".:") for match in LOST.finditer(answer.out + answer.err))
    known = machine.listing("/proc/driver/nvidia/gpus")
    if found:
        mine = visible(found, machine.environ().get("CUDA_VISIBLE_DEVICES")) or found
        dead = [(m[1], m[2]) for m in DEAD.finditer(answer.out) if m[1] in [row["index"] for row in mine]]
        broken = [f"the driver cannot reach GPU {', '.join(lost)}"] * bool(lost) + [f"GPU{i}: {why}" for i, why in dead]
        reset = tuple(i for i, why in dead if why.lower() == "requires reset")
        reset = reset if len(reset) == len(broken) else ()
        return Gpus(mine, "; ".join(broken), lost=lost, reset=reset, others=tuple(row for row in found if row not in mine))
    if answer.code == ABSENT and machine.read("/proc/driver/nvidia/version") is None:
        return Gpus([], absent="no NVIDIA GPU: there is no nvidia-smi and no driver")
    if "no devices were found" in (answer.out + answer.err).lower() and not known:
        return Gpus([], absent="no NVIDIA GPU: the driver found none")
    if answer.code == ABSENT:
        return Gpus([], broken="the driver is loaded, and there is no nvidia-smi")
    said = "nvidia-smi did not answer in time" if answer.code == TIMED_OUT else f"nvidia-smi says: {answer.why}"
    return Gpus([], broken=said, lost=lost)


def visible(found: list[Row], wanted: str | None) -> list[Row]:
    """The rows that CUDA_VISIBLE_DEVICES names, read as CUDA does: the list ends at the first entry that is no device."""
    if wanted is None:
        return found
    mine = []
    for entry in (part.strip() for part in wanted.split(",")):
        named = [row for row in found if entry in (row["index"], row["uuid"]) or _begins(row["uuid"], entry)]
        if not named:
            break  # the list ends at the first entry that is no device
        mine.append(named[0])
    return mine


def _begins(uuid: str | None, entry: str) -> bool:
    return entry.startswith("GPU-") and (uuid or "").startswith(entry)


@dataclasses.dataclass(frozen=True)
class Topology:
    """`nvidia-smi topo -m`: how any two of GPUs and NICs are joined, and the NUMA node beside each GPU."""

    joined: dict[tuple[str, str], str]  # ("GPU0", "NIC1") -> PIX
    numa: dict[str, str]  # "GPU0" -> "0"; absent where it is not told
    nics: dict[str, str]  # "NIC0" -> "mlx5_0"

    @property
    def gpus(self) -> list[str]:
        return sorted({a for a, _ in self.joined if a.startswith("GPU")}, key=lambda name: int(name[3:]))

    def of(self, indices: Sequence[int]) -> "Topology":
        """The same with these GPUs alone."""
        names = [f"GPU{index}" for index in indices]
        mine = {pair: how for pair, how in self.joined.items() if all(n in names or not n.startswith("GPU") for n in pair)}
        return Topology(mine, {gpu: node for gpu, node in self.numa.items() if gpu in names}, self.nics)

    def pairs(self) -> dict[tuple[str, str], str]:
        """The joints between GPUs, each pair once."""
        at = self.gpus
        return {(a, b): self.joined[a, b] for i, a in enumerate(at) for b in at[i + 1 :] if (a, b) in self.joined}


def topology(text: str) -> Topology:
    """Reads the matrix; an empty Topology where there is none."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    columns: list[str] = []
    joined, numa, nics = {}, {}, {}
    for line in lines:
        cells = [cell.strip() for cell in re.split(r"\t+| {2,}", line.strip())]
        if not columns:
            columns = [c for c in cells if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+", c)] if cells[0] == "GPU0" else []
        elif cells[0] in columns and len(cells) > len(columns):
            joined |= {(cells[0], other): how for other, how in zip(columns, cells[1:], strict=False) if other != cells[0]}
            beside = cells[len(columns) + 1 :]  # CPU affinity, NUMA affinity, GPU NUMA ID
            if len(beside) > 1 and re.fullmatch(r"[\d,-]+", beside[1]):
                numa[cells[0]] = beside[1]
        elif legend := re.fullmatch(r"(NIC\d+): (\S+)", line.strip()):
            nics[legend[1]] = legend[2]
    return Topology(joined, numa, nics or {c: c for c in columns if c.startswith("mlx")})


def links(text: str) -> dict[int, dict[int, float | None]]:
    """`nvidia-smi nvlink -s`: GPU -> link -> GB/s in one direction, None where the link is inactive."""
    found: dict[int, dict[int, float | None]] = {}
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line.strip()):
            found[int(head[1])] = {}
        elif found and (link := re.match(r"Link (\d+): (?:([\d.]+) GB/s|<?inactive>?)", line.strip())):
            found[max(found)][int(link[1])] = float(link[2]) if link[2] else None
    return found


def link_errors(text: str) -> dict[tuple[int, int, str], int]:
    """`nvidia-smi nvlink -e`: (GPU, link, kind of error) -> how often."""
    found, gpu = {}, 0
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line.strip()):
            gpu = int(head[1])
        elif counted := re.match(r"Link (\d+): (.+?) Errors?: (\d+)", line.strip()):
            found[gpu, int(counted[1]), counted[2]] = int(counted[3])
    return found
