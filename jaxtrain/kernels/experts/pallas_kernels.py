"""Kernels of grouped matmuls, in Pallas Mosaic GPU for Hopper; pallas.py calls them. hopper.py has the parts that kernels
share.

A program stays on its multiprocessor and computes one tile of the result after the other. While the computing warpgroups store
a tile, the loading warpgroup already fills the slots for the next tile. Each of the two computing warpgroups has 64 rows of the
tile in registers. Both read the same columns of the matmul's right operand from shared memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain.kernels.hopper import COMPUTING, ROWS, Slots, slots, warpgroups

TIMES, OUTER = "times", "outer"  # the kernels
PROGRAMS = "program"  # the axis of programs
SWIZZLE = 128  # bytes that are contiguous in shared memory, in the order in which WGMMA reads them
ALIGNED = 8  # rows of a block in the order of WGMMA; tiles in global memory start at a multiple of it
NEIGHBOURS = 16  # tiles of the first direction that programs process before they continue in the second
STORES = 2  # concurrent stores of a warpgroup


class MatmulTile(NamedTuple):
    """The size of a tile of the result, the contracted length of a step, and the number of steps in shared memory at a time."""

    rows: int
    columns: int
    contracted: int
    stages: int


@dataclasses.dataclass(frozen=True)
class MatmulStatic:
    """Compile-time parameters of a kernel."""

    tile: MatmulTile
    programs: int
    rows: int  # of the result; for `outer`, of one expert's result
    columns: int
    contracted: int
    experts: int
    transposed: bool  # weights are (experts, columns, contracted)
    interpret: bool
    promoted: bool = False  # each step's sum has its own accumulator, in f32


def smem(shape: tuple[int, ...], dtype: Any, block: int = ALIGNED) -> Any:
    """Return shared memory for matrices (..., rows, columns) in the order of WGMMA, in blocks of `block` rows."""
    order: Any = (plgpu.TilingTransform((block, chunk(dtype))), plgpu.SwizzleTransform(SWIZZLE))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=order)


def chunk(dtype: Any) -> int:
    """Return the number of columns that are contiguous in shared memory."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def staging(static: MatmulStatic, dtype: Any) -> Any:
    """Return shared memory for a few columns of results. It has blocks of one row, so a copy may start at any row."""
    return smem((COMPUTING, STORES, ROWS, chunk(dtype)), dtype, block=1)


def _neighbours(index: Any, across: Any, along: int) -> tuple[Any, Any]:
    """Return the position of the index-th tile in a grid of `across` x `along` tiles.

    Tiles are ordered in bands of NEIGHBOURS positions of the first coordinate. Within a band, the first coordinate varies
    fastest. Tiles that are computed at the same time then share operands in the cache.
    """
    band = NEIGHBOURS * along
    first = index // band * NEIGHBOURS
    height = jnp.minimum(across - first, NEIGHBOURS)
    within = index % band
    return first + within % height, within // height


def _each_tile(static: MatmulStatic, total: Any, body: Callable[[Any, Any], Any]) -> None:
    """Run `body(tile, done)` for each tile of this program.

    `body` returns the tile's number of steps. done: the number of steps of all earlier tiles of the program.
    """
    program = jax.lax.axis_index(PROGRAMS)
    count = (total - program + static.programs - 1) // static.programs
    jax.lax.fori_loop(0, count, lambda i, done: done + body(program + i * static.programs, done), jnp.int32(0))


def _sum(static: MatmulStatic, ring: Slots, done: Any, steps: Any, add: Callable[[Any, Any], None]) -> jax.Array:
    """Return the sum in f32 to which `add(sum, step)` adds each step's product. A step's slot is released after its product.

    WGMMA accumulates 8-bit products with fewer bits than f32. With `static.promoted`, WGMMA sums within a step only, and the
    sums of the steps are added in f32. done: the number of steps of earlier tiles.
    """
    shape = (ROWS, static.tile.columns)

    def add_step(step: Any, total: jax.Array) -> jax.Array:
        def into(sum_ref: Any) -> jax.Array:
            add(sum_ref, step)
            return sum_ref[...]

        product = pl.run_scoped(into, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        ring.release(done + step, static.interpret)
        return total + product

    if static.promoted:
        return jax.lax.fori_loop(0, steps, add_step, plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA))

    def into(total: Any) -> jax.Array:
        @pl.loop(0, steps)
        def _(step):
            add(total, step)
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: ring.release(done + step - 1, static.interpret))

        plgpu.wgmma_wait(0)
        pl.when(steps > 0)(lambda: ring.release(done + steps - 1, static.interpret))
        return total[...]

    return pl.run_scoped(into, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _store(
    static: MatmulStatic, values: jax.Array, out: Any, top: Any, left: Any, row_range: tuple[Any, Any], stage: Any
) -> None:
    """Store rows `row_range` (from, up to) of a warpgroup's 64 rows at (top, left) of the matrix `out`.

    Columns beyond the width of `out` are dropped.

    A copy has a fixed number of rows. So fewer than 64 rows are stored in copies of 32, 16, ... rows, by the binary digits of
    their number.
    """
    width = chunk(out.dtype)
    start, count = row_range[0], row_range[1] - row_range[0]
    for piece in range(static.tile.columns // width):
        columns = pl.ds(left + piece * width, width)
        buffer = stage.at[piece % STORES]
        plgpu.wait_smem_to_gmem(STORES - 1, wait_read_only=True)
        buffer[...] = values[:, piece * width : (piece + 1) * width].astype(out.dtype)
        plgpu.commit_smem()

        def copy(first: Any, rows: int, buffer: Any = buffer, columns: Any = columns) -> None:
            to = out.at[pl.ds(top + first, rows), columns]
            plgpu.copy_smem_to_gmem(buffer.at[pl.ds(first, rows)], to, commit_group=False)

        rows = ROWS
        while rows:
            # The rows of the higher digits have been stored.
            pl.when(count & rows != 0)(lambda rows=rows, copy=copy: copy(start + (count & -(2 * rows)), rows))
            rows //= 2
        plgpu.commit_smem_to_gmem_group()


def times_scratch(static: MatmulStatic, dtype: Any, right_dtype: Any, out: Any) -> tuple[Any, ...]:
    """Return shared memory and barriers of `times`."""
    tile = static.tile
    rows = smem((tile.stages, tile.rows, tile.contracted), dtype)
    right = (tile.columns, tile.contracted) if static.transposed else (tile.contracted, tile.columns)
    return slots(rows, smem((tile.stages, *right), right_dtype)), staging(static, out)


def times_kernel(visits, used, scale, rows_ref, w_ref, out_ref, ring: Slots, stage, *, static: MatmulStatic):
    """Multiply each tile of rows by its expert's weight and by the scale."""
    tile = static.tile
    along = pl.cdiv(static.columns, tile.columns)
    total = used[0] * along

    def locate_tile(index: Any) -> tuple[Any, ...]:
        """Return the tile's expert, first row, rows of the expert (from, up to), first column, and number of steps over the
        contracted dimension.
        """
        visit, column = _neighbours(index, used[0], along)
        expert, first, start, stop = (visits[visit, i] for i in range(4))
        first = pl.multiple_of(first, ALIGNED)
        steps = jnp.where(expert < static.experts, jnp.int32(pl.cdiv(static.contracted, tile.contracted)), jnp.int32(0))
        return expert, first, start, stop, column * tile.columns, steps

    def compute(warpgroup: jax.Array) -> None:
        def compute_tile(index: Any, done: Any) -> Any:
            _, first, start, stop, left, steps = locate_tile(index)

            def add(sum_ref: Any, step: Any) -> None:
                rows, w = ring.take(done + step)
                rows = rows.at[pl.ds(warpgroup * ROWS, ROWS)]
                plgpu.wgmma(sum_ref, rows, w.transpose((1, 0)) if static.transposed else w)

            sums = _sum(static, ring, done, steps, add) * scale[0]
            top = first + warpgroup * ROWS
            row_range = jnp.clip(start - top, 0, ROWS), jnp.clip(stop - top, 0, ROWS)
            pl.when(row_range[1] > row_range[0])(
                lambda: _store(static, sums, out_ref, top, left, row_range, stage.at[warpgroup])
            )
            return steps

        _each_tile(static, total, compute_tile)
        plgpu.wait_smem_to_gmem(0)

    def load() -> None:
        def load_tile(index: Any, done: Any) -> Any:
            expert, first, _, _, left, steps = locate_tile(index)

            @pl.loop(0, steps)
            def _(step):
                over, columns = pl.ds(step * tile.contracted, tile.contracted), pl.ds(left, tile.columns)
                w = w_ref.at[expert, columns, over] if static.transposed else w_ref.at[expert, over, columns]
                ring.fill(done + step, (rows_ref.at[pl.ds(first, tile.rows), over], w))

            return steps

        _each_tile(static, total, load_tile)

    warpgroups(compute, load, (ring,))


def outer_scratch(static: MatmulStatic, dtype: Any, right_dtype: Any, out: Any) -> tuple[Any, ...]:
    """Return shared memory and barriers of `outer`."""
    tile = static.tile
    left = smem((tile.stages, tile.contracted, tile.rows), dtype)
    right = smem((tile.stages, tile.contracted, tile.columns), right_dtype)
    return slots(left, right), staging(static, out), plgpu.Barrier(num_arrivals=COMPUTING)


def outer_kernel(bounds, a_ref, b_ref, out_ref, ring: Slots, stage, cleared, *, static: MatmulStatic):
    """Compute each tile of each expert's sum of outer products."""
    tile = static.tile
    across, along = pl.cdiv(static.rows, tile.rows), pl.cdiv(static.columns, tile.columns)

    def locate_tile(index: Any) -> tuple[Any, ...]:
        """Return (expert, start, stop, top, left, first, steps) of a tile.

        start, stop: the expert's token rows. top, left: the tile's first row and column in the result. first: the first token
        row loaded. steps: number of steps over the token rows.
        """
        expert, within = index // (across * along), index % (across * along)
        i, j = _neighbours(within, across, along)
        start, stop = bounds[expert, 0], bounds[expert, 1]
        first = pl.multiple_of(start // ALIGNED * ALIGNED, ALIGNED)
        steps = jnp.where(stop > start, (stop - first + tile.contracted - 1) // tile.contracted, 0)
        return expert, start, stop, i * tile.rows, j * tile.columns, first, steps

    def clear(ref: Any, first: Any, start: Any, stop: Any) -> None:
        """Zero the rows outside of [start, stop): rows of other experts, and padding, which may be NaN.

        first: index of the first row of `ref`, counted as `start` and `stop` are.
        """
        shape = ref.shape
        row = first + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
        ref[...] = jnp.where((row >= start) & (row < stop), values, jnp.zeros_like(values))

    def compute(warpgroup: jax.Array) -> None:
        width = chunk(a_ref.dtype)

        def compute_tile(index: Any, done: Any) -> Any:
            expert, start, stop, top, left, begin, steps = locate_tile(index)

            def add(sum_ref: Any, step: Any) -> None:
                a, b = ring.take(done + step)
                a_slice = a.at[:, pl.ds(warpgroup * ROWS, ROWS)]
                first = begin + step * tile.contracted

                @pl.when((first < start) | (first + tile.contracted > stop))
                def _():
                    clear(a_slice, first, start, stop)
                    half = tile.columns // COMPUTING
                    for piece in range(half // width):
                        clear(b.at[:, pl.ds(warpgroup * half + piece * width, width)], first, start, stop)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(cleared)
                    plgpu.barrier_wait(cleared)

                plgpu.wgmma(sum_ref, a_slice.transpose((1, 0)), b)

            sums = _sum(static, ring, done, steps, add)
            first_row = top + warpgroup * ROWS
            row_range = jnp.int32(0), jnp.clip(static.rows - first_row, 0, ROWS)
            pl.when(row_range[1] > 0)(
                lambda: _store(static, sums, out_ref.at[expert], first_row, left, row_range, stage.at[warpgroup])
            )
            return steps

        _each_tile(static, static.experts * across * along, compute_tile)
        plgpu.wait_smem_to_gmem(0)

    def load() -> None:
        def load_tile(index: Any, done: Any) -> Any:
            _, _, _, top, left, first, steps = locate_tile(index)

            @pl.loop(0, steps)
            def _(step):
                rows = pl.ds(first + step * tile.contracted, tile.contracted)
                ring.fill(done + step, (a_ref.at[rows, pl.ds(top, tile.rows)], b_ref.at[rows, pl.ds(left, tile.columns)]))

            return steps

        _each_tile(static, static.experts * across * along, load_tile)

    warpgroups(compute, load, (ring,))
