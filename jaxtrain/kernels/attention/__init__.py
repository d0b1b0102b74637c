"""Attention kernels: one signature, one table of kernels. Imports no jax.

support.py has the limits of each kernel, and chooses the kernel of a run. Each implementation is a file with these functions:

    prepare(rows, spec) -> pytree                   the kernel's description of the batch, made once and shared by all layers
    attention(q_BTNH, k_BSKH, v_BSKH, prepared, spec) -> o_BTNH

and three more, from which kernels/context_parallel builds attention over keys on several devices:

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
import math
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    import jax

EMPTY_LSE = -1e30  # log-sum-exp of a query without visible keys; finite, so that the difference of two of them is not NaN
ALIGNED = 128  # tokens of a tile of the kernels
EMULATED, KERNEL = "emulated", "kernel"  # the forward pass in e4m3: in XLA on CPU, or by the kernel for Hopper


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

    def slides(self, seq_len: int) -> bool:
        """Return whether there is a window shorter than a sequence."""
        return 0 < self.window < seq_len

    def halo(self, chunk: int, ring: int) -> int:
        """Return the number of tokens in the halo of a chunk (context_parallel/window.py), at most those of all other chunks.

        window - 1 is rounded up to a multiple of gcd(chunk, ALIGNED). So a halo has whole tiles if chunks have whole tiles.
        """
        step = math.gcd(chunk, ALIGNED)
        return min(-(-(self.window - 1) // step) * step, (2 * ring - 1) * chunk)

    def with_halo(self) -> Self:
        """Return the spec of attention in a chunk with its halo. The padding in the first chunk's halo counts as a document."""
        return dataclasses.replace(self, packed=True, max_segments=self.max_segments + 1)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The hardware that a kernel would run on."""

    platform: str  # "cpu" or "gpu"
    compute_capability: tuple[int, int] = (0, 0)  # (9, 0) is Hopper
    name: str = dataclasses.field(default="", compare=False)  # for messages

    def __str__(self) -> str:
        return "{}.{}".format(*self.compute_capability) + (f" ({self.name})" if self.name else "")

    @property
    def without_gpu(self) -> str:
        """Return the end of a rule that a kernel needs a GPU; "" on a GPU."""
        return "" if self.platform == "gpu" else f", and the run would be on {self.name}"

    @property
    def hopper(self) -> bool:
        """Return whether the GPU has WGMMA, which only Hopper has."""
        return self.compute_capability == (9, 0)

    @classmethod
    def from_device(cls, device: Any) -> Self:
        """Return the hardware of a device: of jax.devices(), or of an AOT topology (`jax.experimental.topologies`)."""
        if device.platform == "cpu":
            return cls("cpu", name="cpu")
        major, _, minor = str(device.compute_capability).partition(".")
        return cls("gpu", (int(major), int(minor or 0)), device.device_kind)


class Rows(NamedTuple):
    """Segments and positions of queries, int32 (B, T), and of keys, int32 (B, S)."""

    q_segments: "jax.Array"
    q_positions: "jax.Array"
    kv_segments: "jax.Array"
    kv_positions: "jax.Array"


# A new kernel is one file, one entry here, and its limits in support.py. `auto` takes the first entry that supports the spec.
IMPLEMENTATIONS = {
    "cudnn": "jaxtrain.kernels.attention.cudnn",
    "pallas": "jaxtrain.kernels.attention.pallas",
    "reference": "jaxtrain.kernels.attention.reference",
    "chunked": "jaxtrain.kernels.attention.chunked",
}


def implementation(name: str, spec: Spec) -> Any:
    """Return the module of an implementation; with `spec.fp8`, a `Forward8` with this module as its `base`."""
    base = importlib.import_module(IMPLEMENTATIONS[name])
    return importlib.import_module("jaxtrain.kernels.attention.fp8").Forward8(base) if spec.fp8 else base
