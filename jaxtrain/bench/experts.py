"""Grouped matmuls of experts by the Pallas kernels (kernels/experts/grouped.py), to be timed.

tests/gpu/test_gpu_experts.py compares them with their definition.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.bench.work import Sizes, Work, one_device

PRODUCTS = ("over D", "over F", "outer")
DENSE = {"over D": "RD,DF->RF", "over F": "RF,DF->RD", "outer": "RD,RF->DF"}  # where all rows meet one weight
TIMED = ("even", "uneven")


def loads(how: str, R: int, E: int) -> list[int]:
    """Return the rows of each of E experts, out of R: "even", or "uneven": the first has half, the last none."""
    first, last = ([], []) if how == "even" else ([R // 2], [0])
    left, among = R - sum(first), E - len(first + last)
    return [*first, *(left // among + (e < left % among) for e in range(among)), *last]


def product(which: str, a: Any, b: Any, sizes_E: Any, out: Any, precision: Any) -> Any:
    """One of PRODUCTS by the Pallas kernel. a: rows; b: weights (E, D, F), of `outer` the other rows."""
    from jaxtrain.kernels.experts import grouped

    if which == "outer":
        return grouped.outer("pallas", a, b, sizes_E, out, precision)
    return grouped.times("pallas", a, b, sizes_E, which[-1], precision)


def operands(which: str, shape: Sequence[int], weight: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """Random (a, b) of `product`, the weights of shape `weight`."""
    from jaxtrain.bench.microbenchmarks import normal

    R, _, D, F = shape
    a = normal(0, (R, F if which == "over F" else D), dtype)
    return a, normal(1, (R, F) if which == "outer" else weight, dtype)


# ---- what is timed


def products(device: Any, sizes: Sizes) -> Iterator[Work]:
    """Each of PRODUCTS, with loads as in TIMED; beside it the dense product of as many FLOPs, in which all rows meet one
    weight. On a CPU the kernels are interpreted."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.bench.microbenchmarks import chain
    from jaxtrain.train.definition import numerics_of

    n = numerics_of(one_device())

    def by_expert(which: str, constants: Any, a: jax.Array) -> jax.Array:
        b, sizes_E = constants
        return chain(a, product(which, a, b, sizes_E, n.reduce, n.precision))

    def by_one(which: str, b: jax.Array, a: jax.Array) -> jax.Array:
        return chain(a, jnp.einsum(DENSE[which], a, b, preferred_element_type=n.compute))

    def prepare(which: str, shape: Sequence[int], sizes_E: list[int] | None) -> tuple[Any, Any, Any]:
        if sizes_E is None:
            a, b = operands(which, shape, tuple(shape[2:]), n.compute)
            return functools.partial(by_one, which), b, a
        a, b = operands(which, shape, tuple(shape[1:]), n.compute)
        return functools.partial(by_expert, which), (b, jnp.array(sizes_E, jnp.int32)), a

    for shape in sizes.experts:
        R, E, D, F = shape
        of = f"{R:,} x {D:,} x {F:,}"
        for which in PRODUCTS:
            for how in ("dense", *TIMED):
                sizes_E = None if how == "dense" else loads(how, R, E)
                # A weight that no row meets is not read; its gradient is written all the same.
                weights = 1 if sizes_E is None else E if which == "outer" else sum(map(bool, sizes_E))
                what = f"{of}, dense" if sizes_E is None else f"{of}, {E} experts {how}"
                moved = 2.0 * (R * (D + F) + weights * D * F)
                make = functools.partial(prepare, which, shape, sizes_E)
                yield Work(f"experts {which}", what, 2.0 * R * D * F, moved, make)
