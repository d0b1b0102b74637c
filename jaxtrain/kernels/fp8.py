"""Matmuls in 8-bit floating point: the three matmuls of a linear layer, of tensors with one scale each.

    y  = x  w      x and w in e4m3 (4 exponent and 3 mantissa bits, largest 448)
    dx = dy w'     dy in e5m2 (largest 57344): gradients need range more than precision
    dw = x' dy     the x of the forward pass

A tensor is divided by its scale and rounded to nearest. The scale brings the tensor's largest element into the type's top
binade or the binade below. Scales come from the tensor itself and not from earlier steps ("current scaling"), so they need no
state and no checkpoint. Formats are those of Micikevicius et al. 2022 (arXiv:2209.05433).

Scales are powers of two, so scaling is exact. The rounding of an element depends on the scale only near zero, below about 2^-13
of the largest element (2^-28 in e5m2). Larger elements are rounded equally on a device with other tokens and another scale. In
`gated_linear`, the scales of the two projections' gradients come from a bound of the largest element instead.

Scales of activations and gradients are local to a device: they need no collective, and each result is scaled before it is
summed over devices. A weight has one scale for each layer, over all of its shards, so an all-gather of the 8-bit shards needs
no rescaling.

Each matmul contracts the last axes of two operands, 8-bit arrays times their scales. XLA turns this product into one cuBLASLt
call with scales (`__cublas$lt$matmul$f8`), which requires the contracted axes last. On CPU, XLA multiplies the same rounded
numbers in bfloat16 and sums in float32.

8-bit arrays that outlive a matmul (weights, and the rounded inputs of the backward pass) are stored as the same bits in uint8.
`jax.checkpoint` rounds all floating-point numbers that it saves to the exponent and mantissa bits of their type, by the rules
of IEEE formats (jax 0.11.2, `_insert_reduce_precision`). For e4m3 this rounding would turn values above 240 into NaN, and
subnormal values into 0.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

E4M3, E5M2 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")
# Smaller scales are too near the subnormal numbers, which a GPU may flush to zero. Such tensors are practically zero.
SMALLEST = 2.0**-125


def amax_scale(amax: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the scale of tensors whose largest magnitudes are `amax`, f32.

    The scale is the smallest power of two above amax / (largest number of `dtype`), but at least SMALLEST. It is 1 if amax
    is 0. It is NaN if amax is infinite or NaN, so that all of the tensor becomes NaN: a conversion to 8 bits would turn
    infinities into large finite numbers and hide a divergence.
    """
    ratio = amax.astype(jnp.float32) / float(jnp.finfo(dtype).max)
    exponent = jax.lax.bitcast_convert_type(ratio, jnp.uint32) & jnp.uint32(0x7F800000)
    above = 2 * jax.lax.bitcast_convert_type(exponent, jnp.float32)
    scale = jnp.where(amax > 0, jnp.maximum(above, SMALLEST), 1.0)
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def quantize(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return x / scale in `dtype`; `scale` broadcasts against x."""
    return (x.astype(jnp.float32) * (1 / scale)).astype(dtype)


def to_bits(x8: jax.Array) -> jax.Array:
    """Return the bits of 8-bit floating point as uint8."""
    return jax.lax.bitcast_convert_type(x8, jnp.uint8)


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Invert `to_bits`."""
    return jax.lax.bitcast_convert_type(bits, dtype)


@dataclasses.dataclass(frozen=True)
class Float8:
    """A weight in 8 bits: e4m3 numbers times a scale, one scale for each layer of a stack."""

    bits: Any  # e4m3, as the same bits in uint8
    scale: Any  # f32, (L,) or ()
    gradient: Any = None  # in a matmul: an array of the gathered weight's shape, whose gradient is the weight's gradient


jax.tree_util.register_dataclass(Float8, ["bits", "scale", "gradient"], [])


def encode(w: jax.Array, stacked: bool, over: Sequence[str]) -> Float8:
    """Return this device's shard of a weight in e4m3.

    Args:
      stacked: axis 0 of `w` is the axis of layers; each layer gets its own scale.
      over: mesh axes that shard the weight. The scale is computed from all shards.
    """
    amax = jnp.max(jnp.abs(w), axis=tuple(range(int(stacked), w.ndim)))
    scale = amax_scale(jax.lax.pmax(amax, tuple(over)) if over else amax, E4M3)
    return Float8(to_bits(quantize(w, scale.reshape(scale.shape + (1,) * (w.ndim - stacked)), E4M3)), scale)


FAST, FULL = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST


def multiply(
    a_MK: jax.Array,
    a_scale: jax.Array,
    b_NK: jax.Array,
    b_scale: jax.Array,
    out: jnp.dtype,
    sums: jax.lax.Precision = FULL,
) -> jax.Array:
    """Return (a a_scale) (b b_scale)', (M, N), rounded once to `out`. Stacks of matrices give a stack of results.

    sums: the accumulation that XLA requests from cuBLASLt. FULL sums in float32. FAST is faster on Hopper, where tensor cores
    then accumulate with fewer bits. The forward pass uses FAST. Gradients need FULL, because they sum over thousands of tokens.
    """
    a, b = ((m.astype(jnp.bfloat16) * s.reshape(()).astype(jnp.bfloat16)) for m, s in ((a_MK, a_scale), (b_NK, b_scale)))
    stacked, last = tuple(range(a.ndim - 2)), a.ndim - 1
    return jax.lax.dot_general(a, b, (((last,), (last,)), (stacked, stacked)), precision=sums, preferred_element_type=out)


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """An einsum of activations and a weight, as a matmul of two matrices."""

    eqn: str

    @property
    def letters(self) -> tuple[str, str, str]:
        """Return the einsum letters of x, of the weight, and of the result."""
        inputs, y = self.eqn.split("->")
        xs, ws = inputs.split(",")
        return xs, ws, y

    @property
    def contracted_first(self) -> bool:
        """Return whether the weight is (contracted, output), as opposed to (output, contracted)."""
        xs, ws, y = self.letters
        contracted = "".join(c for c in xs if c in ws)
        outputs = "".join(c for c in y if c in ws)
        tokens = xs.removesuffix(contracted)
        if xs != tokens + contracted or y != tokens + outputs or ws not in (contracted + outputs, outputs + contracted):
            raise ValueError(
                f"{self.eqn}: an FP8 matmul is of (tokens, contracted) and a weight of (contracted, made) or reverse"
            )
        return ws.startswith(contracted)

    def weight(self, w: jax.Array) -> jax.Array:
        """Return the weight as a matrix: (K, N) if `contracted_first`, else (N, K)."""
        xs, ws, _ = self.letters
        rows = [n for c, n in zip(ws, w.shape, strict=True) if (c in xs) == self.contracted_first]
        return w.reshape(math.prod(rows), -1)

    def tokens(self, x: jax.Array) -> jax.Array:
        """Return x as (tokens, all other dimensions)."""
        count = sum(c not in self.letters[1] for c in self.letters[0])
        return x.reshape(math.prod(x.shape[:count]), -1)


def dot(eqn: str, x: jax.Array, w: Float8) -> jax.Array:
    """Return `einsum(eqn, x, w)` in the dtype of `x`, all three matmuls (forward and backward) in 8 bits."""
    result: Any = _dot(x, jnp.zeros(()), w.bits, w.scale, w.gradient, eqn, Peaks())
    return result[0]


def gated_linear(
    x_BTD: jax.Array, gate: Float8, up: Float8, down: Float8, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Return down(activation(gate(x)) * up(x)), (B, T, D): `dot` three times, with fewer passes over gradients.

    The scales of both projections' gradients come from a bound of their elements: the largest gradient of the gated product
    times SLOPE times the largest element of the other projection. So one pass computes and rounds the gradients. Scales from
    the gradients' largest elements would need two more passes.

    activation: a function f with f(0) = 0 and a slope |f'| of at most SLOPE.
    """
    into, out = "BTD,DF->BTF", "BTF,DF->BTD"
    projections: list[Any] = [
        _dot(x_BTD, jnp.zeros(()), w.bits, w.scale, w.gradient, into, Peaks(after=True)) for w in (gate, up)
    ]
    (gate_BTF, gate_peak), (up_BTF, up_peak) = projections
    gate_BTF, up_BTF = checkpoint_name(gate_BTF, "mlp_gate"), checkpoint_name(up_BTF, "mlp_up")
    with jax.named_scope("swiglu"):
        hidden: Any = _gate_multiply(gate_BTF, gate_peak, up_BTF, up_peak, activation)
    result: Any = _dot(*hidden, down.bits, down.scale, down.gradient, out, Peaks(before=True))
    return result[0]


# At least the largest slope of an activation (silu 1.0998, gelu 1.129) or 1, times 1 + 2^-6 for four roundings to bfloat16.
SLOPE = 1.25
SCALE = "fp8_scale"  # name of scalars that every remat policy saves: recomputing them takes a pass over their tensor


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Whether a matmul's backward pass returns a bound of x's gradient, and whether it receives a bound of y's.

    A tensor can be accompanied by a scalar, which is zero in the forward pass. The gradient of that scalar is not a derivative,
    but a bound: at least the largest magnitude of the tensor's gradient.
    """

    before: bool = False  # returns a bound of x's gradient
    after: bool = False  # receives a bound of y's gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _gate_multiply(
    gate: jax.Array, gate_peak: jax.Array, up: jax.Array, up_peak: jax.Array, activation: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return activation(gate) * up, gate_peak + up_peak


def _gate_multiply_fwd(gate, gate_peak, up, up_peak, activation):
    most = checkpoint_name(jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in (gate, up)]), SCALE)
    return (activation(gate) * up, gate_peak + up_peak), (gate, up, most)


def _gate_multiply_bwd(activation, residuals, gradients):
    (gate, up, most), (dh, h_peak) = residuals, gradients
    d_gate, d_up = jax.vjp(lambda gate, up: activation(gate) * up, gate, up)[1](dh)
    return d_gate, SLOPE * most[1] * h_peak, d_up, SLOPE * most[0] * h_peak


_gate_multiply.defvjp(_gate_multiply_fwd, _gate_multiply_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _dot(
    x: jax.Array, x_peak: jax.Array, bits: jax.Array, w_scale: jax.Array, gradient: jax.Array, eqn: str, peaks: Peaks
) -> tuple[jax.Array, jax.Array]:
    result, _ = _forward(x, x_peak, bits, w_scale, gradient, eqn, peaks)
    return result


def _forward(x, x_peak, bits, w_scale, gradient, eqn, peaks):
    matmul = _Matrices(eqn)
    xs, ws, y = matmul.letters
    x_scale = amax_scale(jnp.max(jnp.abs(x)), E4M3)
    if peaks.before:
        x_scale = checkpoint_name(x_scale, SCALE)
    x8 = to_bits(quantize(x, x_scale, E4M3))
    w_KN = matmul.weight(from_bits(bits, E4M3))
    out = multiply(
        matmul.tokens(from_bits(x8, E4M3)), x_scale, w_KN.T if matmul.contracted_first else w_KN, w_scale, x.dtype, FAST
    )
    shape = [n for c, n in zip(ws, bits.shape, strict=True) if c in y]
    out = out.reshape(*x.shape[: len(y) - len(shape)], *shape)
    return (out, x_peak), (x8, x_scale, bits, w_scale, jnp.zeros((0,), gradient.dtype))


def _backward(eqn: str, peaks: Peaks, residuals: Any, gradients: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    x8, x_scale, bits, w_scale, like = residuals
    matmul, (dy, y_peak) = _Matrices(eqn), gradients
    dy_scale = amax_scale(y_peak if peaks.after else jnp.max(jnp.abs(dy)), E5M2)
    dy8 = to_bits(quantize(dy, dy_scale, E5M2))
    x_MK, dy_MN = matmul.tokens(from_bits(x8, E4M3)), from_bits(dy8, E5M2)
    dy_MN = dy_MN.reshape(x_MK.shape[0], -1)
    w = matmul.weight(from_bits(bits, E4M3))
    dx = multiply(dy_MN, dy_scale, w if matmul.contracted_first else w.T, w_scale, dy.dtype).reshape(x8.shape)
    rows, columns = ((x_MK, x_scale), (dy_MN, dy_scale))[:: 1 if matmul.contracted_first else -1]
    dw = multiply(rows[0].T, rows[1], columns[0].T, columns[1], like.dtype)
    x_peak = jnp.max(jnp.abs(dx)).astype(jnp.float32) if peaks.before else jnp.zeros(())
    return dx, x_peak, None, None, dw.reshape(bits.shape)


_dot.defvjp(_forward, _backward)
