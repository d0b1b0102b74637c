"""The limits of the attention kernels, and the choice of a run's kernel. Imports no jax.

A config that asks for a kernel which does not support it is refused before JAX starts, by the same functions as at the start.
"""

from collections.abc import Sequence

from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.kernels.attention import IMPLEMENTATIONS, Hardware, Spec

LARGEST_FP8 = 192  # head_dim; with a larger one, two accumulators of a tile do not fit the registers
LARGEST_PALLAS = 256  # head_dim; with a larger one, a tile's accumulator does not fit the registers


def cudnn(spec: Spec, hardware: Hardware) -> str | None:
    """Return why cuDNN does not support the spec, or None. The limits are those of cuDNN 9 on Ampere and Hopper."""
    if hardware.platform != "gpu":
        return "needs an NVIDIA GPU"
    if spec.cached:
        return "is not used with a key/value cache"
    if hardware.compute_capability < (8, 0):
        return f"needs compute capability 8.0 or newer, not {hardware}"
    older = f"needs compute capability 9.0 (Hopper) or newer, not {hardware}, for"
    hopper = hardware.compute_capability >= (9, 0)
    if spec.value_dim and not hopper:
        return f"{older} values narrower than keys"
    if spec.packed and not hopper:
        return f"{older} packed documents and for sliding windows around a ring"
    if spec.dtype != "bf16":
        return "has no float32"
    if reason := _head_dim(spec, 256 if hopper else 128):
        return reason
    if spec.softcap:
        return "has no soft cap on scores (model.attention_softcap)"
    if spec.packed and spec.deterministic:
        return "adds up packed rows in a fixed order only with 2 bytes of workspace for each score of each document"
    return None


def pallas(spec: Spec, hardware: Hardware) -> str | None:
    """Return why the Pallas kernels do not support the spec, or None."""
    if spec.cached:
        return "is not used with a key/value cache"
    if hardware.platform != "gpu":
        return "needs a GPU"
    if not hardware.hopper:
        return f"needs Hopper's WGMMA (compute capability 9.0), not {hardware}"
    if spec.dtype != "bf16":
        return "has no float32"
    return _head_dim(spec, LARGEST_PALLAS)


def forward_fp8(spec: Spec, hardware: Hardware) -> str | None:
    """Return why the forward pass in e4m3 (fp8.py) does not support the spec, or None. On CPU it is emulated."""
    if spec.dtype != "bf16":
        return "has no float32: the backward pass is in bf16"
    if hardware.platform != "gpu":
        return None
    return _head_dim(spec, LARGEST_FP8) if hardware.hopper else pallas(spec, hardware)


def _head_dim(spec: Spec, most: int) -> str | None:
    if spec.head_dim <= most and spec.head_dim % 8 == 0:
        return None
    return f"needs a model.head_dim that is a multiple of 8 and at most {most}, not {spec.head_dim}"


def no_limits(spec: Spec, hardware: Hardware) -> None:
    """Return None: this kernel supports every spec."""


LIMITS = {"cudnn": cudnn, "pallas": pallas, "reference": no_limits, "chunked": no_limits}


def unsupported_reason(name: str, specs: Sequence[Spec], hardware: Hardware) -> str | None:
    """Return why a kernel does not support one of these specs, or None."""
    return next(filter(None, (LIMITS[name](spec, hardware) for spec in specs)), None)


def kernel_problems(name: str, specs: Sequence[Spec], hardware: Hardware) -> list[Problem]:
    """Return the problems of attention.forward and attention.impl. name: attention.impl. specs: of each kind of layer."""
    refusals = []
    if reason := next(filter(None, (forward_fp8(spec, hardware) for spec in specs if spec.fp8)), None):
        refusals.append(Problem("attention.forward", "fp8", reason, "Set attention.forward to compute."))
    if name != "auto" and (reason := unsupported_reason(name, specs, hardware)):
        rule = reason + hardware.without_gpu
        remedy = "Set attention.impl to auto, which takes a kernel that supports the run."
        refusals.append(Problem("attention.impl", name, rule, remedy))
    return refusals


def choose_attention(name: str, layer_specs: Sequence[tuple[Spec, int]], hardware: Hardware) -> tuple[str, str]:
    """Return the kernel's name, and the reason for this choice.

    `auto` takes the first kernel of IMPLEMENTATIONS that supports all layers and is not slow for any layer (`_slow`).

    Args:
      name: `auto`, or the name of a kernel.
      layer_specs: the spec and the sequence length for each kind of layer.
      hardware: the hardware of the run's devices.

    Raises ConfigError: the named kernel, or the forward pass in e4m3, does not support some layer.
    """
    specs = [spec for spec, _ in layer_specs]
    if refusals := kernel_problems(name, specs, hardware):
        raise ConfigError(refusals)

    def slow(name: str) -> str | None:
        return next(filter(None, (_slow(name, seq_len) for _, seq_len in layer_specs)), None)

    if name != "auto":
        passed_over = slow(name)
        return name, "as configured" + (f"; {passed_over}" if passed_over else "")
    refused = {name: unsupported_reason(name, specs, hardware) or slow(name) for name in IMPLEMENTATIONS}
    chosen = next(name for name, reason in refused.items() if not reason)  # chunked supports everything
    before = list(refused)[: list(refused).index(chosen)]
    return chosen, "; ".join(f"{name} {refused[name]}" for name in before) or "the fastest here"


def _slow(name: str, seq_len: int) -> str | None:
    """Return why `auto` skips a kernel as slow, or None. Only `reference` is slow, for sequences above 1024 tokens."""
    return f"holds all {seq_len} x {seq_len} scores" if name == "reference" and seq_len > 1024 else None
