"""The limits of the grouped matmuls of experts, and the choice of their implementation (grouped_matmul.py). Imports no jax."""

from collections.abc import Sequence

from jaxtrain.config.schema import Problem
from jaxtrain.kernels.attention import Hardware

CHUNK = 64  # numbers in bfloat16 that the kernels load at once: those of 128 bytes


def pallas(hardware: Hardware, exact: bool) -> str | None:
    """Return why the Pallas kernels do not support this hardware, or rows in float32 (`exact`); None if they do."""
    if hardware.platform != "gpu":
        return "needs a GPU"
    if not hardware.hopper:
        return f"needs Hopper's WGMMA (compute capability 9.0), not {hardware}"
    return "has no float32" if exact else None


def choose_matmul(impl: str, hardware: Hardware, exact: bool) -> str:
    """Return `impl` (moe.impl), with auto replaced by pallas if it supports the rows, else by ragged."""
    if impl != "auto":
        return impl
    return "ragged" if pallas(hardware, exact) else "pallas"


def single_expert(impl: str, experts: int, ranks: int) -> bool:
    """Return whether one expert on each of `ranks` devices multiplies all slots, by a plain matmul, which is the fastest.

    The expert's rows then include empty slots.
    """
    return impl == "auto" and ranks == experts


def padded_rank(impl: str, exact: bool, rank: int) -> int:
    """Return the rank that the matmuls of each expert's adapter compute: `pallas` pads it to whole chunks.

    For auto this is the rank on Hopper. exact: rows are in float32.
    """
    return rank if exact or impl == "ragged" else -(-rank // CHUNK) * CHUNK


def matmul_problems(impl: str, hardware: Hardware, exact: bool) -> list[Problem]:
    """Return a problem if moe.impl is pallas, and the Pallas kernels do not support the rows."""
    if impl != "pallas" or not (rule := pallas(hardware, exact)):
        return []
    return [Problem("moe.impl", impl, rule + hardware.without_gpu, "Set auto, which takes ragged there.")]


def matmul_fp8_problems(impl: str, hardware: Hardware, weights: Sequence[str], experts: int) -> list[Problem]:
    """Return a problem if uneven numbers of rows are multiplied in 8 bits and no implementation does that.

    CPUs emulate it. weights: those to leave out, as mlp.gate; none if no weights are in 8 bits. experts: model.num_experts.
    """
    if not weights or choose_matmul(impl, hardware, exact=False) != "ragged" or (impl == "auto" and hardware.platform == "cpu"):
        return []
    rule, first = "moe.impl = ragged has no matmul in 8 bits", "moe.impl=auto"
    if impl == "auto":
        rule = f"only Hopper (compute capability 9.0) multiplies uneven numbers of rows in 8 bits, not {hardware}"
        first = f"mesh.expert={experts}"
    instead = f"or leave them in bfloat16: fp8.exclude={','.join(weights)}"
    return [Problem("precision", "fp8", rule, f"Set {first}, or moe.capacity_factor, {instead}.")]
