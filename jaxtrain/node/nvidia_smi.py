"""The commands of nvidia-smi that preflight runs, and parsers of their output.

A field that a driver does not support fails the whole query, so fields that were added or removed have separate queries.
Values have nvidia-smi's units: MiB, W, MHz. A value that nvidia-smi does not report ([N/A], [Not Supported]) is None.
"""

import csv
import dataclasses
import itertools
import re
from collections.abc import Sequence

from jaxtrain.node.node import ABSENT, TIMED_OUT, Node

FIELDS = (
    *("index", "uuid", "pci.bus_id", "name", "driver_version", "compute_cap", "memory.total", "memory.used"),
    *("persistence_mode", "compute_mode", "mig.mode.current", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total"),
    *("power.limit", "enforced.power.limit", "power.default_limit", "clocks.max.sm", "temperature.gpu"),
    *("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max"),
)


def query(kind: str, *fields: str) -> str:
    return f"nvidia-smi --query-{kind}={','.join(fields)} --format=csv,nounits"


GPUS = query("gpu", *FIELDS)
REASONS = query("gpu", "index", "clocks_event_reasons.active")
FABRIC = query("gpu", "index", "fabric.state", "fabric.status")
RECOVERY = query("gpu", "index", "gpu_recovery_action")  # since driver 570
REMAPS = query(
    "remapped-rows", "gpu_uuid", *(f"remapped_rows.{n}" for n in ("correctable", "uncorrectable", "pending", "failure"))
)
OPTIONAL = (  # further fields of the GPUs, which some drivers do not have
    REASONS,
    query("gpu", "index", "clocks_throttle_reasons.active"),  # name of the clock reasons before driver 535
    query("gpu", "index", "clocks.applications.graphics", "clocks.default_applications.graphics"),
    FABRIC,
    REMAPS,
    RECOVERY,
)
PROCESSES = query("compute-apps", "gpu_uuid", "pid", "process_name", "used_memory")
TOPOLOGY, LINKS, LINK_ERRORS = "nvidia-smi topo -m", "nvidia-smi nvlink -s", "nvidia-smi nvlink -e"
BOOST = "nvidia-smi boost-slider --list"
COMMANDS = (GPUS, *OPTIONAL, PROCESSES, TOPOLOGY, LINKS, LINK_ERRORS, BOOST)

UNREACHABLE = re.compile(r"Unable to determine the device handle for GPU\s*([0-9A-Fa-f:.]+)", re.IGNORECASE)
FAILED_CELL = re.compile(r"(?m)^(\d+), .*(requires reset|GPU is lost)", re.IGNORECASE)
NO_VALUE = ("", "n/a", "not supported", "not found", "unknown error", "insufficient permissions")

Row = dict[str, str | None]


def fields_of(query: str) -> list[str]:
    return query.split()[1].partition("=")[2].split(",")


def rows(node: Node, query: str) -> list[Row]:
    """Return the rows of a query; [] if it failed. Keys are the query's fields, since nvidia-smi may print other headings."""
    answer, fields = node.run(query), fields_of(query)
    if not answer.succeeded:
        return []
    table = list(csv.reader(answer.out.splitlines(), skipinitialspace=True))[1:]
    return [
        {f: _value(cell.strip()) for f, cell in zip(fields, cells, strict=True)} for cells in table if len(cells) == len(fields)
    ]


def _value(cell: str) -> str | None:
    """Return the text of a cell; None if it is no value, such as [N/A] or [Requested functionality has been deprecated]."""
    return None if cell.startswith("[") or cell.lower() in NO_VALUE else cell


def number(row: Row, field: str) -> float | None:
    try:
        return float(row.get(field) or "")
    except ValueError:
        return None


def index(row: Row) -> int:
    return int(row["index"] or 0)


def name(row: Row) -> str:
    return f"GPU{row['index']}"


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The GPUs of a node as nvidia-smi lists them, and the reasons why GPUs or fields are missing."""

    rows: list[Row]  # fields of GPUS and OPTIONAL, a row for each GPU that the run may use
    broken: str = ""  # reason why GPUs are missing, if that is a fault
    absent: str = ""  # reason why a node has no GPUs, if that is no fault
    lost: tuple[str, ...] = ()  # PCI addresses of GPUs that the driver cannot reach
    reset: tuple[str, ...] = ()  # indices of GPUs that require a reset, if there is no other fault
    others: tuple[Row, ...] = ()  # GPUs that CUDA_VISIBLE_DEVICES leaves out, which another run may use
    refused: dict[str, str] = dataclasses.field(default_factory=dict)  # field -> reason why its query failed

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
    def text(self) -> str:
        """Return number and model of the GPUs, such as `8 x NVIDIA H200`; "" without GPUs."""
        return f"{self.count} x {', '.join(sorted(set(self.names)))}" if self.rows else ""

    @property
    def indices(self) -> list[int]:
        """Return nvidia-smi's indices of the GPUs."""
        return [index(row) for row in self.rows]


def read_gpus(node: Node) -> Gpus:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects; all GPUs if it selects none, so that the report can list them."""
    node.start((GPUS, *OPTIONAL))
    answer = node.run(GPUS)
    output = answer.out + answer.err
    lost = tuple((match[1] or "?").rstrip(".:") for match in UNREACHABLE.finditer(output))
    if found := rows(node, GPUS):
        refused = add_optional_fields(node, found)
        mine = visible(found, node.environ.get("CUDA_VISIBLE_DEVICES")) or found
        failed = [(m[1], m[2]) for m in FAILED_CELL.finditer(answer.out) if m[1] in [row["index"] for row in mine]]
        broken = [f"the driver cannot reach GPU {', '.join(lost)}"] * bool(lost) + [f"GPU{i}: {why}" for i, why in failed]
        reset = tuple(i for i, why in failed if why.lower() == "requires reset")
        reset = reset if len(reset) == len(broken) else ()
        others = tuple(row for row in found if row not in mine)
        return Gpus(mine, "; ".join(broken), lost=lost, reset=reset, others=others, refused=refused)
    if answer.code == ABSENT and node.read("/proc/driver/nvidia/version") is None:
        return Gpus([], absent="no NVIDIA GPU: there is no nvidia-smi and no driver")
    if "no devices were found" in output.lower() and not node.listing("/proc/driver/nvidia/gpus"):
        return Gpus([], absent="no NVIDIA GPU: the driver found none")
    if answer.code == ABSENT:
        return Gpus([], broken="the driver is loaded, and there is no nvidia-smi")
    error = "nvidia-smi did not answer in time" if answer.code == TIMED_OUT else f"nvidia-smi: {answer.error}"
    return Gpus([], broken=error, lost=lost)


def add_optional_fields(node: Node, gpus: Sequence[Row]) -> dict[str, str]:
    """Add the fields of OPTIONAL to the rows of the GPUs. Return field -> reason why its query failed."""
    refused = {}
    for query in OPTIONAL:
        key, *fields = fields_of(query)
        by_key = {row[key]: row for row in rows(node, query)}
        for gpu in gpus:
            gpu.update(by_key.get(gpu[key.removeprefix("gpu_")], {}))
        if not (answer := node.run(query)).succeeded:
            refused |= dict.fromkeys(fields, answer.error)
    return refused


def visible(found: Sequence[Row], wanted: str | None) -> list[Row]:
    """Return the rows of the GPUs in CUDA_VISIBLE_DEVICES (`wanted`). As in CUDA, the list ends before an unknown entry."""
    if wanted is None:
        return list(found)
    chosen = []
    for entry in (part.strip() for part in wanted.split(",")):
        named = [
            row
            for row in found
            if entry in (row["index"], row["uuid"]) or entry.startswith("GPU-") and (row["uuid"] or "").startswith(entry)
        ]
        if not named:
            break
        chosen.append(named[0])
    return chosen


@dataclasses.dataclass(frozen=True)
class Topology:
    """The matrix of `nvidia-smi topo -m`. All fields are empty if there is no matrix."""

    pairs: dict[tuple[str, str], str]  # ("GPU0", "GPU1") -> connection such as NV18; each pair is there once
    near_nics: dict[str, list[str]]  # GPU -> kernel's names of the NICs that it reaches without the CPU (PIX or PXB)
    has_nics: bool


def parse_topology(text: str, indices: Sequence[int]) -> Topology:
    """Return the topology of these GPUs. text: output of `nvidia-smi topo -m`."""
    columns: list[str] = []
    cells_of: dict[str, dict[str, str]] = {}
    nics = {}
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        cells = [cell.strip() for cell in re.split(r"\t+| {2,}", line.strip())]
        if not columns:
            columns = [c for c in cells if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+", c)] if cells[0] == "GPU0" else []
        elif cells[0] in columns and len(cells) > len(columns):
            cells_of[cells[0]] = dict(zip(columns, cells[1:], strict=False))
        elif legend := re.fullmatch(r"(NIC\d+): (\S+)", line.strip()):
            nics[legend[1]] = legend[2]
    nics = nics or {c: c for c in columns if c.startswith("mlx")}
    gpus = [gpu for i in indices if (gpu := f"GPU{i}") in cells_of]
    pairs = {(a, b): cells_of[a][b] for a, b in itertools.combinations(gpus, 2)}
    near = {gpu: [card for nic, card in nics.items() if cells_of[gpu].get(nic) in ("PIX", "PXB")] for gpu in gpus}
    return Topology(pairs, near, bool(nics))


def parse_links(text: str) -> dict[int, list[tuple[int, str]]]:
    """Parse the output of `nvidia-smi nvlink -s` or `-e`. Return GPU -> (number of the link, rest of the line) of each line."""
    found: dict[int, list[tuple[int, str]]] = {}
    for line in text.splitlines():
        if head := re.match(r"\s*GPU (\d+):", line):
            found[int(head[1])] = []
        elif found and (link := re.match(r"\s*Link (\d+): (.+)", line)):
            found[max(found)].append((int(link[1]), link[2].strip()))
    return found


def parse_vboost(text: str) -> dict[int, tuple[int, int]]:
    """Parse the output of `nvidia-smi boost-slider --list`. Return GPU -> (value, highest value) of its vboost slider.

    A GPU without a row of numbers is left out: some drivers and GPUs have no slider.
    """
    lines = re.finditer(r"(?m)^[| ]*(\d+) +vboost +(\d+) +(\d+)\b", text)  # columns: GPU, slider, highest value, value
    return {int(line[1]): (int(line[3]), int(line[2])) for line in lines}
