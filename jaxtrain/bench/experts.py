"""Products of rows with the weights of their experts (kernels/experts/grouped.py), by the Pallas kernels: what is timed of
them, and whether they are right.

They are compared with the definition, one plain product for each expert, in float64 on the host. How far they may be from it
follows, element by element, from where a kernel must round (bounds.py). Rows that are nobody's hold NaN.
"""

import functools
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.bench import bounds
from jaxtrain.bench.case import LATE, keep
from jaxtrain.bench.check import come_to, summary
from jaxtrain.bench.measure import start, words
from jaxtrain.bench.work import Sizes, Work, one_device

PRODUCTS = ("over D", "over F", "outer")
DENSE = {"over D": "RD,DF->RF", "over F": "RF,DF->RD", "outer": "RD,RF->DF"}  # where all rows meet one weight
TIMED = ("even", "uneven")
LOADS = (*TIMED, "one has all", "some nobody's")
# Rows, experts, D, F; the last are no multiples of any tile.
SHAPES = ((4096, 8, 1024, 3584), (8192, 128, 512, 768), (1000, 7, 200, 264))
SMOKE_SHAPES = ((70, 5, 40, 24),)
DTYPES = ("bf16", "f32")


def loads(how: str, R: int, E: int) -> list[int]:
    """Rows of each of E experts, out of R.

    "even"; "uneven": the first has half, the last none, and the rest share evenly; "one has all": the second; "some nobody's":
    uneven, of three quarters of the rows.
    """
    if how == "one has all":
        return [R * (e == 1) for e in range(E)]
    R = 3 * R // 4 if how == "some nobody's" else R
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


# ---- whether it is right


def definition(which: str, a: Any, b: Any, sizes_E: Sequence[int], F_or_D: int) -> Any:
    """One of PRODUCTS, expert by expert, of NumPy arrays. F_or_D: columns of the result of a product with weights."""
    import numpy as np

    shape = (len(sizes_E), a.shape[1], b.shape[1]) if which == "outer" else (a.shape[0], F_or_D)
    y, first = np.zeros(shape, a.dtype), 0
    for e, size in enumerate(sizes_E):
        rows = slice(first, first + size)
        if which == "outer":
            y[e] = a[rows].T @ b[rows]
        else:
            y[rows] = a[rows] @ (b[e] if which == "over D" else b[e].T)
        first += size
    return y


@functools.cache
def _compiled(which: str) -> Any:
    import jax

    return jax.jit(functools.partial(product, which), static_argnums=(3, 4))


def case(shape: Sequence[int], how: str, dtype: str) -> dict[str, Any]:
    """Largest error of each of PRODUCTS, and the largest ratio of error to bound (must be at most 1). Where the bound is 0, for
    rows that are nobody's and gradients of experts without rows, any error is too much."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxtrain.kernels.numerics import DTYPES as TYPES

    R, E, D, F = shape
    sizes_E = loads(how, R, E)
    out: dict[str, Any] = {"rows": R, "experts": E, "D": D, "F": F, "loads": how, "dtype": dtype}
    worst = 0.0
    for which in PRODUCTS:
        a, b = operands(which, shape, tuple(shape[1:]), TYPES[dtype])
        nobody = jnp.arange(R)[:, None] >= sum(sizes_E)
        a = jnp.where(nobody, jnp.nan, a)
        b = jnp.where(nobody, jnp.nan, b) if which == "outer" else b
        got = _compiled(which)(a, b, jnp.array(sizes_E, jnp.int32), jnp.dtype(TYPES[dtype]), jax.lax.Precision.HIGHEST)
        a64, b64 = np.float64(a), np.float64(b)
        columns = F if which == "over D" else D
        want = definition(which, a64, b64, sizes_E, columns)
        size = definition(which, abs(a64), abs(b64), sizes_E, columns)
        summed = np.array(sizes_E)[:, None, None] if which == "outer" else a.shape[1]
        bound = bounds.sums(want, size, summed, dtype=dtype)
        error = abs(np.float64(got) - want)
        ratio = float((error / np.maximum(bound, np.finfo(np.float64).tiny)).max())
        out |= {f"{which}_error": float(error.max()), f"{which}_ratio": ratio}
        worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return out | {"ok": worst <= 1}


def cases(ask: dict[str, Any]) -> dict[str, Any]:
    """All shapes, types and loads; on a CPU a small shape, interpreted. A row has `ok`, or `failed` with the error.

    After `ask["limit_s"]` none is begun (null: no limit); `left_out` says how many. What is known is kept after each row.
    """
    began = time.monotonic()
    (device,) = start(one_device(ask.get("cache")), 1)
    shapes = SMOKE_SHAPES if device.platform == "cpu" else SHAPES
    rows: list[dict[str, Any]] = []
    left_out = 0
    for shape, dtype, how in ((s, d, h) for s in shapes for d in DTYPES for h in LOADS):
        if ask["limit_s"] and time.monotonic() - began > ask["limit_s"]:
            left_out += 1
            continue
        try:
            rows.append(case(shape, how, dtype))
        except Exception as error:  # compiler, driver or kernel: the shapes after it are still worth trying
            traceback.print_exc()
            facts = dict(zip(("rows", "experts", "D", "F"), shape, strict=True))
            rows.append({**facts, "loads": how, "dtype": dtype, "ok": False, "failed": words(error)})
        keep(ask, {"verdict": LATE, "device": device.device_kind, "left_out": 0, **summary(rows)})
    return come_to(device.device_kind, rows, left_out)


HEADINGS = ("rows", "experts", "D", "F", "loads", "dtype", *PRODUCTS, "")


def row(r: dict[str, Any]) -> list[str]:
    """As cells of HEADINGS: the largest error, and in brackets its largest ratio to the bound."""
    facts = [str(r[x]) for x in HEADINGS[:6]]
    if "failed" in r:
        return [*facts, *[""] * len(PRODUCTS), f"WRONG: {r['failed']}"]
    errors = [f"{r[f'{which}_error']:.1e} ({r[f'{which}_ratio']:.2f})" for which in PRODUCTS]
    return [*facts, *errors, "ok" if r["ok"] else "WRONG"]
