"""What the checks derive from a node's facts: its GPUs and their connections, and the board that they are on."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config import hardware
from jaxtrain.node.facts import ABSENT, DRIVER, DRIVER_GPUS, TOPOLOGY, NodeFacts

GpuRow = Mapping[str, Any]  # facts of a GPU (gpu_facts.READINGS), and `index`
SWITCH, BRIDGE = "switch", "bridge"


@dataclasses.dataclass(frozen=True)
class Board:
    """Expected properties of a node with GPUs of one model. A property is None if it differs among nodes, or is not known."""

    name: str
    gpus: int | None  # GPUs of a board
    joined: str  # SWITCH: all links connect every pair of GPUs; BRIDGE: links connect the GPUs of one bridge
    links: int  # NVLinks of a GPU
    bridged: tuple[int, ...]  # numbers of GPUs that a bridge may connect
    power_w: float  # default power limit
    sm_mhz: int | None  # highest SM clock
    all_reduce: float | None  # bus bandwidth in GB/s of nccl-tests over all GPUs of the board, with NVLS
    without_nvls: float | None
    source: str


NCCL_TESTS = "NVIDIA/nccl-tests issues 212 and 272: 475 to 480 with NVLS on 8 GPUs, about 370 for what does not use it"
HOPPER = f"data sheet; nvidia-smi as published: NV18, 18 links of 26.562 GB/s, 700 W, 1980 MHz; {NCCL_TESTS}"
# Bridges of two and of four GPUs have 900 GB/s per GPU: 18 links to one GPU, or 6 links to each of three GPUs.
H200_NVL = "data sheet: 2- or 4-way bridge, 900 GB/s a GPU, up to 600 W; nvidia-smi as published: 1785 MHz"
HGX_A100 = "data sheet: 12 links, 600 GB/s, 400 W, 1410 MHz"
PAIR = "data sheet: a bridge joins two, 600 GB/s; its highest limit"
HGX_B200 = "HGX B200 specifications: 18 links, 1.8 TB/s a GPU, 1000 W"

# GPU's name in hardware.py -> its board.
# fmt: off
BOARDS: dict[str, Board] = {
    "H200 SXM":       Board("HGX H200",  8,    SWITCH, 18, (),     700, 1980, 480,  370,  HOPPER),
    "H100 SXM":       Board("HGX H100",  8,    SWITCH, 18, (),     700, 1980, 480,  370,  HOPPER),
    "H200 NVL":       Board("H200 NVL",  None, BRIDGE, 18, (2, 4), 600, 1785, None, None, H200_NVL),
    "H100 NVL":       Board("H100 NVL",  None, BRIDGE, 12, (2,),   400, None, None, None, PAIR),
    "H100 PCIe":      Board("H100 PCIe", None, BRIDGE, 12, (2,),   350, None, None, None, PAIR),
    "A100 SXM 80GB":  Board("HGX A100",  8,    SWITCH, 12, (),     400, 1410, None, None, HGX_A100),
    "A100 SXM 40GB":  Board("HGX A100",  8,    SWITCH, 12, (),     400, 1410, None, None, HGX_A100),
    "A100 PCIe 80GB": Board("A100 PCIe", None, BRIDGE, 12, (2,),   300, 1410, None, None, PAIR),
    "A100 PCIe 40GB": Board("A100 PCIe", None, BRIDGE, 12, (2,),   250, 1410, None, None, PAIR),
    "B200":           Board("HGX B200",  8,    SWITCH, 18, (),    1000, None, None, None, HGX_B200),
}
# fmt: on


def board_of(names: Sequence[str]) -> Board | None:
    """Return the board of a node with these GPUs; None if their models differ or are not in BOARDS."""
    models = {gpu.name if (gpu := hardware.lookup(name)) else "" for name in names}
    return BOARDS.get(models.pop()) if len(models) == 1 else None


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The GPUs of a node, and the reasons why the run cannot use some of them."""

    rows: Sequence[GpuRow]  # those that the run may use and that the driver reaches
    all_rows: Sequence[GpuRow] = ()  # also those that CUDA_VISIBLE_DEVICES leaves out, and those that the driver does not reach
    hidden: Sequence[GpuRow] = ()  # those that CUDA_VISIBLE_DEVICES leaves out, which another run may use
    broken: str = ""  # reason why GPUs are missing, if that is a fault
    absent: str = ""  # reason why a node has no GPUs, if that is no fault
    lost: frozenset[tuple[int, ...]] = frozenset()  # PCI addresses of GPUs that the driver cannot reach
    reset: tuple[int, ...] = ()  # GPUs that require a reset, if there is no other fault

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def on_node(self) -> int:
        return len(self.all_rows)

    @property
    def names(self) -> list[str]:
        return [row["name"] for row in self.rows]

    @property
    def indices(self) -> list[int]:
        return [row["index"] for row in self.rows]

    @property
    def text(self) -> str:
        """Return number and model of the GPUs, such as `8 x NVIDIA H200`; "" without GPUs."""
        return f"{self.count} x {', '.join(sorted(set(self.names)))}" if self.rows else ""


def read_gpus(facts: NodeFacts) -> Gpus:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects; all GPUs if it selects none, so that the report can list them."""
    if "gpus" not in facts.nvml:
        error = facts.nvml.get("error", "the driver was not asked")
        if facts.nvml.get("loaded", True):
            return Gpus((), broken=error)
        if facts.read(DRIVER) or facts.run(TOPOLOGY).code != ABSENT:
            return Gpus((), broken=f"{error}, and the driver or nvidia-smi is there")
        return Gpus((), absent="no NVIDIA GPU: there is no driver")
    addresses = {parse_pci(address): address for address in facts.folders.get(DRIVER_GPUS, ())}
    unknown = {"name": "unknown", "uuid": "", "pci": "", "refused": {}, "reset": False}
    all_rows: list[GpuRow] = [{**unknown, "index": int(index), **gpu} for index, gpu in facts.nvml["gpus"].items()]
    if not all_rows and addresses:
        return Gpus((), broken="the driver reaches no GPU")
    if not all_rows:
        return Gpus((), absent="no NVIDIA GPU: the driver has none")
    chosen = visible_gpus(all_rows, facts.environ.get("CUDA_VISIBLE_DEVICES")) or all_rows
    # A GPU that requires a reset, and that another run uses, does not disturb this one.
    failed = [gpu for gpu in all_rows if "error" in gpu and (gpu in chosen or not gpu["reset"])]
    # A container may see the addresses of GPUs that it was not given.
    unreachable = [gpu for gpu in all_rows if "error" in gpu]
    unmatched = {
        at: text
        for at, text in addresses.items()
        if at not in [parse_pci(gpu["pci"]) for gpu in all_rows if gpu not in unreachable]
    }
    lost = unmatched if len(unmatched) == len(unreachable) else {}
    broken = "; ".join(f"GPU{gpu['index']}: {gpu['error']}" for gpu in failed)
    broken += f" ({', '.join(lost.values())})" if lost and failed else ""
    return Gpus(
        [gpu for gpu in chosen if "error" not in gpu],
        all_rows,
        [gpu for gpu in all_rows if gpu not in chosen],
        broken,
        lost=frozenset(lost),
        reset=tuple(gpu["index"] for gpu in failed) if all(gpu["reset"] for gpu in failed) else (),
    )


def visible_gpus(all_rows: Sequence[GpuRow], setting: str | None) -> list[GpuRow]:
    """Return the rows of the GPUs in CUDA_VISIBLE_DEVICES (`setting`). As in CUDA, the list ends before an unknown entry."""
    if setting is None:
        return list(all_rows)
    chosen = []
    for entry in (item.strip() for item in setting.split(",")):
        is_uuid = entry.startswith("GPU-")
        matches = [row for row in all_rows if entry == str(row["index"]) or is_uuid and row["uuid"].startswith(entry)]
        if not matches:
            break
        chosen.append(matches[0])
    return chosen


def parse_pci(address: str) -> tuple[int, ...]:
    """Return (domain, bus, device) of a PCI address as NVML (00000000:9A:00.0) or the kernel (0000:9a:00) has it."""
    return tuple(int(field, 16) for field in re.findall(r"[0-9A-Fa-f]+", address.partition(".")[0]))


@dataclasses.dataclass(frozen=True)
class GpuTopology:
    """The matrix of `nvidia-smi topo -m`. All fields are empty if there is no matrix."""

    pairs: dict[tuple[str, str], str]  # ("GPU0", "GPU1") -> connection such as NV18; each pair is there once
    near_nics: dict[str, list[str]]  # GPU -> kernel's names of the NICs that it reaches without the CPU (PIX or PXB)
    has_nics: bool


def read_topology(facts: NodeFacts, indices: Sequence[int]) -> GpuTopology:
    """Return the connections of these GPUs."""
    columns: list[str] = []
    cells_of: dict[str, dict[str, str]] = {}
    nics = {}
    for line in re.sub(r"\x1b\[[\d;]*m", "", facts.run(TOPOLOGY).out).splitlines():
        cells = [cell.strip() for cell in re.split(r"\t+| {2,}", line.strip())]
        if not columns:
            columns = [c for c in cells if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+", c)] if cells[0] == "GPU0" else []
        elif cells[0] in columns and len(cells) > len(columns):
            cells_of[cells[0]] = dict(zip(columns, cells[1:], strict=False))
        elif legend := re.fullmatch(r"(NIC\d+): (\S+)", line.strip()):
            nics[legend[1]] = legend[2]
    nics = nics or {c: c for c in columns if c.startswith("mlx")}
    gpus = [gpu for i in sorted(indices) if (gpu := f"GPU{i}") in cells_of]
    pairs = {(a, b): cells_of[a][b] for a, b in itertools.combinations(gpus, 2)}
    near = {gpu: [card for nic, card in nics.items() if cells_of[gpu].get(nic) in ("PIX", "PXB")] for gpu in gpus}
    return GpuTopology(pairs, near, bool(nics))


def parse_vboost(text: str) -> dict[int, tuple[int, int]]:
    """Parse the output of `nvidia-smi boost-slider --list`. Return GPU -> (value, highest value) of its vboost slider.

    A GPU without a row of numbers is left out: some drivers and GPUs have no slider.
    """
    lines = re.finditer(r"(?m)^[| ]*(\d+) +vboost +(\d+) +(\d+)\b", text)  # columns: GPU, slider, highest value, value
    return {int(line[1]): (int(line[3]), int(line[2])) for line in lines}
