"""FP8 matmuls of every pair of types against float32 matmuls of the same numbers, and whether cuBLASLt computes them."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.kernels import fp8
from jaxtrain.node.measure import OPTIONS

PAIRS = {"e4m3 x e4m3": (fp8.E4M3, fp8.E4M3), "e5m2 x e4m3": (fp8.E5M2, fp8.E4M3), "e4m3 x e5m2": (fp8.E4M3, fp8.E5M2)}
SHAPES = [(64, 32, 48), pytest.param((4096, 4096, 14336), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("types", PAIRS.values(), ids=PAIRS.keys())
@pytest.mark.parametrize("sums", [fp8.FAST, fp8.FULL], ids=["fast", "full"])
def test_fp8_matmuls(shape, types, sums, record_property):
    on_gpu = jax.default_backend() == "gpu"
    M, K, N = shape
    x, y = jax.random.normal(jax.random.key(0), (M, K)), 3 * jax.random.normal(jax.random.key(1), (N, K))
    scales = [fp8.amax_scale(jnp.abs(a).max(), t) for a, t in zip((x, y), types, strict=True)]
    a, b = (fp8.quantize(m, s, t) for m, s, t in zip((x, y), scales, types, strict=True))
    few = [m[:256].astype(jnp.float32) * s for m, s in zip((a, b), scales, strict=True)]
    want = jnp.einsum("mk,nk->mn", *few, precision="highest")
    multiply = functools.partial(fp8.multiply, out=jnp.dtype("bfloat16"), sums=sums)
    made = jax.jit(multiply).lower(a, scales[0], b, scales[1])
    compiled = made.compile(compiler_options=OPTIONS if on_gpu else None)
    got = compiled(a, scales[0], b, scales[1])[:256, :256].astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    record_property("errors", {"y": error})
    # Rounding to bfloat16 gives 1.7e-3 (root mean square); sums of 14 bits on Hopper a little more.
    assert error < 1e-2
    if on_gpu:
        assert "matmul$f8" in (compiled.as_text() or ""), "XLA did not choose the 8-bit matmul of cuBLASLt"
