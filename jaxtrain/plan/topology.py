"""The machines of plans: nodes of GPUs of one chip. NVLink connects the GPUs of a node, and a network connects the nodes.

XLA's GPU compiler needs a description of the GPU and the numbers of GPUs and nodes, but no driver and no GPU. specs/ has a
description of each chip, with the memory that CUDA reports.
"""

import collections
import dataclasses
import difflib
import re
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxtrain.config import hardware
from jaxtrain.config.layout import Layout, resolve_layout
from jaxtrain.config.schema import RunConfig
from jaxtrain.runtime.startup import quiet
from jaxtrain.sharding import node_of

# Chip -> (most GPUs of a node, the reason in error messages).
CHIPS: Mapping[str, tuple[int, str]] = {
    "a100": (16, "two HGX A100 boards hold"),
    "a100_40": (16, "two HGX A100 boards hold"),
    "b200": (8, "an HGX B200 board holds"),
    "gb200": (72, "the NVLink domain of an NVL72 rack holds"),
    "gh200": (4, "a quad GH200 board holds"),
    "h100": (8, "an HGX H100 board holds"),
    "h100_pcie": (2, "an NVLink bridge joins"),
    "h200": (8, "an HGX H200 board holds"),
    "h200_nvl": (4, "an NVLink bridge joins"),
}
MOST_GPUS = 2**17  # in total, so that after a typing error the compiler does not build millions of devices
FORM = "CHIP:GPUS or CHIP:GPUSxNODES, such as h200:8 or h200:8x16"


class TopologyError(ValueError):
    """The machine is unknown, impossible or not present."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine of `nodes` nodes with `gpus` GPUs each. Each node has one process."""

    chip: str
    gpus: int  # of a node
    nodes: int
    device_kind: str  # name of the GPU in JAX
    memory_bytes: int  # of one GPU, as CUDA reports it
    description: str = dataclasses.field(repr=False)  # target description for the compiler; "" for the GPUs of this machine

    @property
    def total(self) -> int:
        """Return the number of GPUs of all nodes."""
        return self.gpus * self.nodes

    @property
    def name(self) -> str:
        """Return the name that `parse_topology` accepts, such as "h200:8x16"."""
        return f"{self.chip}:{self.gpus}" + (f"x{self.nodes}" if self.nodes > 1 else "")

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / 2**30

    def usable_gib(self, configured: float = 0.0) -> float:
        """Return the GiB per GPU that a program may use. configured: train.memory_fraction; 0: all but a reserve for NCCL."""
        return self.memory_gib * hardware.memory_fraction(self.memory_gib, configured)

    @property
    def gpu(self) -> hardware.Gpu:
        """Return the GPU's data sheet. Raises TopologyError for a GPU that is not in jaxtrain/config/hardware.py."""
        data_sheet = hardware.lookup(self.device_kind)
        if data_sheet is None:
            raise TopologyError(
                f"device {self.device_kind!r}: its rates are not known. Plan for one of {', '.join(CHIPS)}, or add it to the "
                "table in jaxtrain/config/hardware.py."
            )
        return data_sheet


def parse_topology(text: str) -> Topology:
    """Return the machine of a name such as "h200:8" or "h200:8x16". Raises TopologyError for any other text."""
    form = re.fullmatch(r"\s*([\w.-]+):([1-9]\d*)(?:x([1-9]\d*))?\s*", text.lower())
    if not form:
        raise TopologyError(f"topology {text!r}: not of the form {FORM}.")
    chip = form[1]
    if chip not in CHIPS:
        near = difflib.get_close_matches(chip, CHIPS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise TopologyError(f"topology {text!r}: no chip {chip!r}. {hint}Known: {', '.join(CHIPS)}.")
    gpus, nodes = int(form[2]), int(form[3] or 1)
    most, reason = CHIPS[chip]
    if gpus > most:
        nodes_instead, rest = divmod(gpus * nodes, most)
        instead = f"Write {chip}:{most}x{nodes_instead}" if not rest else f"Write at most {chip}:{most}, and xNODES for more"
        raise TopologyError(f"topology {text!r}: {gpus} GPUs in a node, and {reason} at most {most}. {instead}.")
    if gpus * nodes > MOST_GPUS:
        raise TopologyError(f"topology {text!r}: {gpus * nodes} GPUs. Write one of at most {MOST_GPUS}.")
    return Topology(chip, gpus, nodes, **_read_spec(chip))


def _read_spec(chip: str) -> dict[str, Any]:
    text = (resources.files("jaxtrain.plan") / "specs" / f"{chip}.txtpb").read_text(encoding="utf-8")
    (kind,) = re.findall(r'device_description_str: "(.+)"', text)
    (memory,) = re.findall(r"device_memory_size: (\d+)", text)
    return {"device_kind": kind, "memory_bytes": int(memory), "description": text}


def local_topology() -> Topology:
    """Return the machine that consists of all GPUs that JAX finds.

    Raises TopologyError if JAX finds no GPU, if the GPUs differ in kind, or if nodes differ in the number of GPUs.
    """
    gpus = jax.devices()
    if gpus[0].platform != "gpu":
        raise TopologyError(
            f"no topology is given, and this machine has no GPU (its devices are {gpus[0].platform}): name a machine, such as "
            "--topology=h200:8"
        )
    kinds = sorted({d.device_kind for d in gpus})
    nodes = collections.Counter(map(node_of, gpus))
    counts = sorted({*nodes.values()})
    if len(kinds) > 1 or len(counts) > 1:
        raise TopologyError(f"the GPUs are {', '.join(kinds)}, {' or '.join(map(str, counts))} a node: they must be equal")
    for chip in CHIPS:
        spec = _read_spec(chip)
        if spec["device_kind"] == kinds[0]:
            return Topology(chip, counts[0], len(nodes), **{**spec, "description": ""})
    # The driver reports the full memory. CUDA gives programs up to half a percent less.
    memory = int(hardware.probe().memory_gib * 2**30)
    return Topology(kinds[0], counts[0], len(nodes), kinds[0], memory, "")


LIBDEVICE, PTXAS = "nvvm/libdevice/libdevice.10.bc", "bin/ptxas"


def cuda_toolkit() -> Path:
    """Return the first folder with ptxas and libdevice in which XLA searches: those of wheels, then CUDA's usual folders.

    Raises RuntimeError if there is none.
    """
    wheels = [Path(p) / "nvidia" / name for p in sys.path for name in ("cuda_nvcc", "cu13")]
    for folder in (*wheels, Path("/usr/local/cuda"), Path("/opt/cuda")):
        if (folder / LIBDEVICE).is_file() and (folder / PTXAS).is_file():
            return folder.absolute()
    raise RuntimeError(
        "XLA's GPU compiler finds no CUDA assembler, and would crash: install the plan extra (./run.sh setup), which brings "
        "ptxas and libdevice"
    )


def devices(topology: Topology) -> list[Any]:
    """Return the devices to compile for, ordered by id, node by node. `process_index` is the number of the node.

    Without `topology.description`, return JAX's devices. Devices of a description exist only for the compiler, and cannot run
    programs. Raises RuntimeError without XLA's GPU compiler: it is not installed, or JAX was started without it.
    """
    if not topology.description:
        return jax.devices()
    cuda_toolkit()
    try:
        with quiet():
            topology_devices = topologies.get_topology_desc(
                platform="cuda", topology=f"1x{topology.nodes}x{topology.gpus}", target_config=topology.description
            ).devices
    except NotImplementedError as error:
        if not hardware.has_cuda_plugin():
            raise RuntimeError(
                "XLA's GPU compiler is not installed. Fix: ./run.sh setup, which installs the plan extra"
            ) from error
        raise RuntimeError(
            "XLA's GPU compiler is not loaded: on a machine without a GPU, JAX loads it only if it starts with "
            "JAX_PLATFORMS=cpu. Fix: start Python with JAX_PLATFORMS=cpu"
        ) from error
    return sorted(topology_devices, key=lambda d: d.id)


def layout_of(run: RunConfig, topology: Topology) -> Layout:
    """Return the layout of a run on a machine. The mesh and the rules must be legal there."""
    return resolve_layout(run, topology.total, topology.gpus)
