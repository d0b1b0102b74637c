"""Grouped matmuls of experts against their definition: one plain matmul for each expert, in float64.

The error bound follows, element by element, from a correct kernel's roundings (kernel_bounds.py). Rows without an expert hold
NaN. On a CPU the Pallas kernels are interpreted.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import kernel_bounds
import numpy as np
import pytest
from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

from jaxtrain.kernels.attention import Hardware
from jaxtrain.kernels.experts import pallas, support
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.node import kernel_workloads as experts

LOADS = ("even", "uneven", "one has all", "rows without expert")
# (rows, experts, D, F). The last sizes are no multiples of any tile.
SHAPES = ((4096, 8, 1024, 3584), (8192, 128, 512, 768), (1000, 7, 200, 264))
SMALL = (70, 5, 40, 24)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(pallas, "INTERPRET", InterpretGPUParams())


def impl(dtype: str) -> str:
    """Return the implementation for this dtype on this GPU; on a CPU, that for Hopper."""
    device = jax.devices()[0]
    hardware = Hardware("gpu", (9, 0)) if device.platform == "cpu" else Hardware.from_device(device)
    return support.choose_matmul("auto", hardware, exact=dtype == "f32")


def loads(how: str, R: int, E: int) -> list[int]:
    """Return the number of rows of each of E experts: R in all, or three quarters of R for "rows without expert"."""
    if how == "one has all":
        return [R * (e == 1) for e in range(E)]
    if how == "rows without expert":
        return experts.loads("uneven", 3 * R // 4, E)
    return experts.loads(how, R, E)


def definition(which: str, a: np.ndarray, b: np.ndarray, sizes_E: list[int], columns: int) -> np.ndarray:
    """Return the result of one of experts.PRODUCTS, expert by expert. columns: the result's columns, if the product has
    weights.
    """
    shape = (len(sizes_E), a.shape[1], b.shape[1]) if which == "outer" else (a.shape[0], columns)
    y, first = np.zeros(shape, a.dtype), 0
    for e, size in enumerate(sizes_E):
        rows = slice(first, first + size)
        if which == "outer":
            y[e] = a[rows].T @ b[rows]
        else:
            y[rows] = a[rows] @ (b[e] if which == "over D" else b[e].T)
        first += size
    return y


product = jax.jit(experts.product, static_argnums=(0, 1, 5, 6))


def errors(shape: tuple[int, ...], how: str, dtype: str) -> dict[str, tuple[float, float]]:
    """Return {product: (largest error, largest ratio of error to bound)} for each of experts.PRODUCTS.

    Where the bound is 0, for rows without an expert and gradients of experts without rows, any error is too large.
    """
    R, E, D, F = shape
    sizes_E, found = loads(how, R, E), {}
    for which in experts.PRODUCTS:
        a, b = experts.operands(which, shape, DTYPES[dtype])
        unused = jnp.arange(R)[:, None] >= sum(sizes_E)
        a = jnp.where(unused, jnp.nan, a)
        b = jnp.where(unused, jnp.nan, b) if which == "outer" else b
        given = a, b, jnp.array(sizes_E, jnp.int32)
        got = product(impl(dtype), which, *given, jnp.dtype(DTYPES[dtype]), jax.lax.Precision.HIGHEST)
        a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
        columns = F if which == "over D" else D
        want = definition(which, a64, b64, sizes_E, columns)
        size = definition(which, abs(a64), abs(b64), sizes_E, columns)
        summed = np.array(sizes_E)[:, None, None] if which == "outer" else a.shape[1]
        bound = kernel_bounds.sums(want, size, summed, dtype=dtype)
        error = abs(np.asarray(got, np.float64) - want)
        ratio = float((error / np.maximum(bound, np.finfo(np.float64).tiny)).max())
        found[which] = float(error.max()), ratio if math.isfinite(ratio) else math.inf
    return found


CASES = [(SMALL, dtype, "rows without expert") for dtype in ("bf16", "f32")]
CASES += [pytest.param(*case, marks=pytest.mark.gpu) for case in itertools.product(SHAPES, ("bf16", "f32"), LOADS)]


@pytest.mark.parametrize(
    ("shape", "dtype", "how"), CASES, ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value))
)
def test_grouped_matmuls(shape, dtype, how, record_property):
    found = errors(shape, how, dtype)
    record_property("errors", {name: error for name, (error, _) in found.items()})
    record_property("ratio", max(ratio for _, ratio in found.values()))
    assert not {name: pair for name, pair in found.items() if not pair[1] <= 1}, "(error, ratio to the bound)"
