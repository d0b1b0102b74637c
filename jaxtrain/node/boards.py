"""Expected properties of nodes, by GPU model."""

import dataclasses

from jaxtrain.config import hardware

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


def board_of(names: list[str]) -> Board | None:
    """Return the board of a node with these GPUs; None if their models differ or are not in BOARDS."""
    found = {gpu.name if (gpu := hardware.lookup(name)) else "" for name in names}
    return BOARDS.get(found.pop()) if len(found) == 1 else None
