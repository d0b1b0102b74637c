"""Grouped matmuls in Pallas: every row meets the weight of its own expert, and no other.

A program of `times` makes one tile of the result. Tiles of rows are cut without regard to experts, so one may hold rows of
several; then it has a program for each of them, which stores only its own rows. So rows need no filling up between experts, and
no two programs store to the same place. Which program has which tile of whose rows follows from the group sizes alone, and is
worked out by XLA before. A program of `outer` makes one tile of one expert's sum, and goes over that expert's rows.

Programs that follow each other work on neighbouring tiles in both directions, so that what they load is still in the cache.

For GPUs it is compiled by Pallas' Triton backend; on CPU Pallas interprets it, which is for tests. Tile sizes were not tuned on
a GPU.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

TIMES, OUTER = "times", "outer"
PREFIX = "jaxtrain_experts_"  # of the kernels' names
NEIGHBOURS = 8  # tiles of the first direction that programs pass through before they go on in the second


class Tile(NamedTuple):
    """Of one kernel: rows and columns of a tile of the result, how much is contracted at a time, warps of a program, and how
    many tiles are on their way to it at a time."""

    rows: int
    columns: int
    contracted: int
    warps: int
    stages: int


# Bytes of an element -> tiles. Float32 is multiplied without the tensor cores.
TILES: dict[int, dict[str, Tile]] = {
    2: {TIMES: Tile(128, 128, 64, 8, 3), OUTER: Tile(128, 128, 64, 8, 3)},
    4: {TIMES: Tile(32, 32, 32, 4, 2), OUTER: Tile(32, 32, 32, 4, 2)},
}


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a kernel is compiled for."""

    tile: Tile
    rows: int  # of the result, or for `outer` of one expert's
    columns: int
    contracted: int
    experts: int
    over: str  # "D" or "F"


def times(rows: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, contract: str, precision: jax.lax.Precision) -> jax.Array:
    """See grouped.py; float32 is multiplied as such, whatever the precision."""
    E, D, F = w_EDF.shape
    columns, contracted = (F, D) if contract == "D" else (D, F)
    tile = _fitting(TILES[rows.dtype.itemsize][TIMES], rows.shape[0], columns, contracted)
    static = _Static(tile, rows.shape[0], columns, contracted, E, contract)
    visits = _visits(sizes_E, rows.shape[0], tile.rows)
    w_tiles = (1, *((tile.contracted, tile.columns) if contract == "D" else (tile.columns, tile.contracted)))
    return _call(
        _times_kernel,
        TIMES,
        static,
        (visits, rows, w_EDF),
        (None, (tile.rows, tile.contracted), w_tiles),
        _like(rows, (rows.shape[0], columns), rows.dtype),
        (tile.rows, tile.columns),
        visits.shape[0] * pl.cdiv(columns, tile.columns),
    )


def outer(
    rows_RD: jax.Array, rows_RF: jax.Array, sizes_E: jax.Array, out: jnp.dtype, precision: jax.lax.Precision
) -> jax.Array:
    """See grouped.py."""
    (R, D), F, E = rows_RD.shape, rows_RF.shape[1], sizes_E.shape[0]
    tile = _fitting(TILES[rows_RD.dtype.itemsize][OUTER], D, F, R)
    ends_E = jnp.cumsum(sizes_E)
    bounds = jnp.stack([ends_E - sizes_E, ends_E], axis=1).astype(jnp.int32)
    return _call(
        _outer_kernel,
        OUTER,
        _Static(tile, D, F, R, E, "R"),
        (bounds, rows_RD, rows_RF),
        (None, (tile.contracted, tile.rows), (tile.contracted, tile.columns)),
        _like(rows_RD, (E, D, F), out),
        (1, tile.rows, tile.columns),
        E * pl.cdiv(D, tile.rows) * pl.cdiv(F, tile.columns),
    )


def _fitting(tile: Tile, rows: int, columns: int, contracted: int) -> Tile:
    """Not larger than the arrays. Triton wants powers of two, and 16 numbers at least to sum over."""

    def least(t: int, n: int) -> int:
        return min(t, max(16, pl.next_power_of_2(n)))

    return tile._replace(
        rows=least(tile.rows, rows), columns=least(tile.columns, columns), contracted=least(tile.contracted, contracted)
    )


def _visits(sizes_E: jax.Array, rows: int, tile: int) -> jax.Array:
    """For each program of a column of tiles (expert, tile, first row, row behind the last) of what is its own, int32 (V, 4).

    What is nobody's belongs to an expert E, whose rows are zeros. Programs that are not needed have no rows.
    """
    E = sizes_E.shape[0]
    ends = jnp.concatenate([jnp.cumsum(sizes_E), jnp.full((1,), rows)]).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    first = starts // tile
    count = jnp.where(ends > starts, -(-ends // tile) - first, 0)
    behind = jnp.cumsum(count)
    # An expert more makes a tile more at most, as it may begin within one.
    v = jnp.arange(pl.cdiv(rows, tile) + E, dtype=jnp.int32)
    expert = jnp.sum(v[:, None] >= behind[None, :], axis=1)
    used, expert = expert <= E, jnp.minimum(expert, E)
    at = first[expert] + v - (behind - count)[expert]
    visit = jnp.stack([expert, at, starts[expert], ends[expert]], axis=1)
    return jnp.where(used[:, None], visit, jnp.array([[E, 0, 0, 0]])).astype(jnp.int32)


def _call(
    kernel: Callable[..., None],
    name: str,
    static: _Static,
    operands: tuple[jax.Array, ...],
    tiles: tuple[tuple[int, ...] | None, ...],
    result: jax.ShapeDtypeStruct,
    result_tile: tuple[int, ...],
    programs: int,
) -> jax.Array:
    """tiles: of each operand; None for a table."""

    def whole(x: Any, tile: tuple[int, ...] | None) -> pl.BlockSpec:
        """All of an array, filled up to whole tiles."""
        shape = tuple(pl.cdiv(n, t) * t for n, t in zip(x.shape, tile or x.shape, strict=True))
        return pl.BlockSpec(shape, lambda program: (0,) * len(shape))

    call = functools.partial(
        pl.pallas_call,
        functools.partial(kernel, static=static),
        result,
        grid=(programs,),
        in_specs=[whole(x, tile) for x, tile in zip(operands, tiles, strict=True)],
        out_specs=whole(result, result_tile),
        compiler_params=triton.CompilerParams(num_warps=static.tile.warps, num_stages=static.tile.stages),
        name=f"{PREFIX}{name}_{static.over}",
    )
    return jax.lax.platform_dependent(*operands, cpu=call(interpret=True), default=call(interpret=False))


def _like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An output that varies over the mesh as x does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _neighbours(program: Any, across: int, along: int) -> tuple[Any, Any]:
    """Which of `across` x `along` tiles is this program's: NEIGHBOURS across, then the same one further along."""
    band = NEIGHBOURS * along
    first = program // band * NEIGHBOURS
    height = jnp.minimum(across - first, NEIGHBOURS)
    within = program % band
    return first + within % height, within // height


def _load(ref: Any, at: tuple[Any, Any], shape: tuple[int, int], sizes: tuple[int, int], expert: Any = None) -> jax.Array:
    """A tile that begins at `at`; zeros beyond the array's `sizes`."""
    inside = _inside(at, shape, sizes)
    place = tuple(pl.ds(a, n) for a, n in zip(at, shape, strict=True))
    tile = ref.at[place] if expert is None else ref.at[(expert, *place)]
    return triton.load(tile) if inside is None else triton.load(tile, mask=inside, other=0.0)


def _inside(at: tuple[Any, Any], shape: tuple[int, int], sizes: tuple[int, int]) -> jax.Array | None:
    """Which places of a tile are in the array; None: all of any tile."""
    out = None
    for axis, (a, n, size) in enumerate(zip(at, shape, sizes, strict=True)):
        if size % n:
            within = jnp.broadcast_to(jnp.expand_dims(a + jnp.arange(n) < size, 1 - axis), shape)
            out = within if out is None else out & within
    return out


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product in f32; float32 operands stay float32, where a GPU would round them to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _times_kernel(visits, rows_ref, w_ref, out_ref, *, static: _Static):
    tile = static.tile
    visit, column = _neighbours(pl.program_id(0), visits.shape[0], pl.cdiv(static.columns, tile.columns))
    expert, at, start, stop = (visits[visit, i] for i in range(4))
    first, left = at * tile.rows, column * tile.columns

    def body(step, total):
        i = step * tile.contracted
        x = _load(rows_ref, (first, i), (tile.rows, tile.contracted), (static.rows, static.contracted))
        if static.over == "D":
            shape, sizes = (tile.contracted, tile.columns), (static.contracted, static.columns)
            return total + _dot(x, _load(w_ref, (i, left), shape, sizes, expert), (1, 0))
        shape, sizes = (tile.columns, tile.contracted), (static.columns, static.contracted)
        return total + _dot(x, _load(w_ref, (left, i), shape, sizes, expert), (1, 1))

    whole = jnp.int32(pl.cdiv(static.contracted, tile.contracted))
    steps = jnp.where(expert < static.experts, whole, jnp.int32(0))
    total = jax.lax.fori_loop(0, steps, body, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    row = first + jnp.arange(tile.rows)
    mine = jnp.broadcast_to(((row >= start) & (row < stop))[:, None], total.shape)
    inside = _inside((first, left), total.shape, (tile.rows, static.columns))
    place = out_ref.at[pl.ds(first, tile.rows), pl.ds(left, tile.columns)]
    triton.store(place, total.astype(out_ref.dtype), mask=mine if inside is None else mine & inside)


def _outer_kernel(bounds, a_ref, b_ref, out_ref, *, static: _Static):
    tile = static.tile
    across, along = pl.cdiv(static.rows, tile.rows), pl.cdiv(static.columns, tile.columns)
    expert, program = pl.program_id(0) // (across * along), pl.program_id(0) % (across * along)
    top, left = (i * n for i, n in zip(_neighbours(program, across, along), (tile.rows, tile.columns), strict=True))
    start, stop = bounds[expert, 0], bounds[expert, 1]

    def body(step, total):
        first = step * tile.contracted
        row = first + jnp.arange(tile.contracted)
        mine = ((row >= start) & (row < stop))[:, None]

        def load(ref, at, columns, size):
            # Rows of others may hold anything, NaN too.
            x = _load(ref, (first, at), (tile.contracted, columns), (static.contracted, size))
            return jnp.where(mine, x, jnp.zeros_like(x))

        a, b = load(a_ref, top, tile.rows, static.rows), load(b_ref, left, tile.columns, static.columns)
        return total + _dot(a, b, (0, 0))

    steps = start // tile.contracted, pl.cdiv(stop, tile.contracted)
    total = jax.lax.fori_loop(*steps, body, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    inside = _inside((top, left), total.shape, (static.rows, static.columns))
    place = out_ref.at[expert, pl.ds(top, tile.rows), pl.ds(left, tile.columns)]
    triton.store(place, total.astype(out_ref.dtype), mask=inside)
