"""Attention kernels: one signature, one table of kernels.

If attention.impl names a kernel that does not support the run, `choose` raises Unsupported.

Each implementation is a file with these functions:

    unsupported(spec, hardware) -> str | None       why the kernel does not support the spec, or None
    prepare(rows, spec) -> pytree                   the kernel's description of the batch, made once and shared by all layers
    attention(q_BTNH, k_BSKH, v_BSKH, prepared, spec) -> o_BTNH

and three more, from which kernels/context builds attention over keys on several devices:

    describe_block(rows, spec, diagonal) -> pytree  the kernel's description of a block, made once
    block_forward(q, k, v, described, spec, diagonal) -> (o_BTNH, lse_BNT)
    block_backward(q, k, v, o, lse, do, described, spec, diagonal) -> (dq, dk, dv)

A block is a set of queries and some of their keys: on the diagonal the keys of the same tokens, otherwise only earlier keys.
`block_forward` normalises the output by the block's own log-sum-exp (f32). `block_backward` takes the output and
log-sum-exp over all blocks of a query. It returns this block's term of the gradients, and the caller sums the terms in f32. A
query without visible keys in a block has output 0 and a log-sum-exp of -1e30. A sliding window applies on the diagonal only;
kernels/context_parallel/ implements windows over several devices. Learnt sinks change the output and the log-sum-exp of a
block outside the kernels (sinks.py).

A token attends to the tokens of its own document at or before its own position. The mask depends on `segments` and `positions`
alone, not on a token's index in the array. (`cudnn` needs the tokens of each document next to each other, in order.) Scores are
scaled by 1/sqrt(H). Values may be narrower than queries and keys (`Spec.value_dim`), except with `pallas` and in blocks. The
outputs of padding (segment 0) are finite and unused: no other token attends to padding, and its loss has weight 0.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax

NOTHING = -1e30  # log-sum-exp of a query without visible keys; finite, so that the difference of two of them is not NaN


EMULATED, KERNEL = "emulated", "kernel"  # the forward pass in e4m3: in XLA on CPU, or by the kernel for Hopper


class Unsupported(ValueError):
    """An error: the configured kernel, or every kernel with `auto`, does not support the run."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """The properties of attention that a kernel must support; static under jit."""

    head_dim: int
    dtype: str  # "f32" or "bf16"
    packed: bool  # several documents in a row; False: one document in a row, without padding
    max_segments: int  # documents in a row, at most
    window: int = 0  # a token attends to this many positions, itself included; 0: no window
    softcap: float = 0.0  # scores become c tanh(s / c); 0: off
    cached: bool = False  # queries are the newest tokens only, keys come from a cache
    deterministic: bool = False  # repeated runs must give equal bits
    sinks: bool = False  # each head has a learnt logit in the sum of softmax (sinks.py)
    value_dim: int = 0  # head size of values, if smaller than that of keys; 0: head_dim
    fp8: str = ""  # EMULATED or KERNEL: the forward pass multiplies in e4m3 (fp8.py)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The hardware that a kernel would run on."""

    platform: str  # "cpu" or "gpu"
    compute_capability: tuple[int, int] = (0, 0)  # (9, 0) is Hopper

    @property
    def hopper(self) -> bool:
        """Return whether the GPU has WGMMA, which only Hopper has."""
        return self.compute_capability == (9, 0)

    @classmethod
    def of(cls, device: Any) -> Self:
        """Return the hardware of a device: of jax.devices(), or of an AOT topology (`jax.experimental.topologies`)."""
        if device.platform == "cpu":
            return cls("cpu")
        major, _, minor = str(device.compute_capability).partition(".")
        return cls("gpu", (int(major), int(minor or 0)))


class Rows(NamedTuple):
    """Segments and positions of queries, int32 (B, T), and of keys, int32 (B, S)."""

    q_segments: jax.Array
    q_positions: jax.Array
    kv_segments: jax.Array
    kv_positions: jax.Array


# A new kernel is one file and one entry here. `auto` takes the first entry that supports the spec.
IMPLEMENTATIONS = {
    "cudnn": "jaxtrain.kernels.attention.cudnn",
    "pallas": "jaxtrain.kernels.attention.pallas",
    "reference": "jaxtrain.kernels.attention.reference",
    "chunked": "jaxtrain.kernels.attention.chunked",
}


def implementation(name: str, spec: Spec) -> Any:
    """Return the module of an implementation; with `spec.fp8`, a `Forward8` with this module as its `base`."""
    if name not in IMPLEMENTATIONS:
        raise Unsupported(f"attention.impl = {name!r}: no such kernel. Known: auto, {', '.join(IMPLEMENTATIONS)}.")
    base = importlib.import_module(IMPLEMENTATIONS[name])
    return importlib.import_module("jaxtrain.kernels.attention.fp8").Forward8(base) if spec.fp8 else base


def choose(name: str, asked: Sequence[tuple[Spec, int]], hardware: Hardware) -> tuple[str, str]:
    """Return the kernel's name, and the reason for this choice.

    `auto` takes the first kernel of IMPLEMENTATIONS that supports all layers and is not slow for any layer (`_slow`).

    Args:
      name: `auto`, or the name of a kernel.
      asked: the spec and the sequence length for each kind of layer.
      hardware: the hardware of the run's devices.

    Raises:
      Unsupported: the named kernel, or every kernel with `auto`, does not support some layer.
    """

    def unable(name: str) -> str | None:
        return next(filter(None, (implementation(name, spec).unsupported(spec, hardware) for spec, _ in asked)), None)

    def slow(name: str) -> str | None:
        return next(filter(None, (_slow(name, seq_len) for _, seq_len in asked)), None)

    if name != "auto":
        reason = unable(name)
        if reason:
            raise Unsupported(f"attention.impl = {name!r}: {reason}. Set attention.impl=auto to take one that can.")
        passed_over = slow(name)
        return name, "as configured" + (f"; {passed_over}" if passed_over else "")
    refused = []
    for candidate in IMPLEMENTATIONS:
        reason = unable(candidate) or slow(candidate)
        if not reason:
            return candidate, "; ".join(refused) or "the fastest here"
        refused.append(f"{candidate} {reason}")
    raise Unsupported(f"attention.impl = 'auto': no kernel can do this: {'; '.join(refused)}.")


def _slow(name: str, seq_len: int) -> str | None:
    """Return why `auto` skips a kernel as slow, or None. Only `reference` is slow, for sequences above 1024 tokens."""
    return f"holds all {seq_len} x {seq_len} scores" if name == "reference" and seq_len > 1024 else None
