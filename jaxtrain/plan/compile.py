"""Compile a run's train step for GPUs that are not there.

XLA's GPU compiler needs a description of the card and the shape of the machine, no driver and no card: the `plan` extra
(CUDA plugin and PJRT wheels) on any Linux box is enough. The result can be read (HLO, memory, schedule), not run.
"""

from importlib import resources
from typing import Any

import jax
from jax.experimental import topologies

from jaxtrain.config import RunConfig
from jaxtrain.step import Program, build, compile_train


def described_devices(chip: str, gpus: int, nodes: int = 1) -> list[Any]:
    """Devices of a machine that is only described: `nodes` nodes, one process each, with `gpus` GPUs of kind `chip`.

    Raises ValueError for a chip without a description and RuntimeError where XLA's GPU compiler is not there.
    """
    spec = resources.files("jaxtrain.plan") / "specs" / f"{chip}.txtpb"
    if not spec.is_file():
        known = sorted(p.name.removesuffix(".txtpb") for p in (resources.files("jaxtrain.plan") / "specs").iterdir())
        raise ValueError(f"chip {chip!r}: no description. Known: {', '.join(known)}.")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology=f"1x{nodes}x{gpus}", target_config=spec.read_text(encoding="utf-8")
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "XLA's GPU compiler is not there: install the plan extra (./run.sh setup), and on a machine without a GPU "
            "start Python with JAX_PLATFORMS=cpu"
        ) from error
    return list(topology.devices)


def compile_step(run: RunConfig, devices: list[Any]) -> tuple[Program, jax.stages.Compiled]:
    """The program of a run on these devices, and its train step, compiled as training would compile it."""
    program = build(run, devices)
    return program, compile_train(program)
