"""Grouped matmuls in Pallas Mosaic GPU, for Hopper, in bf16 or 8 bits: each row is multiplied by its expert's weight only.

Each tile of rows belongs to one expert. Tiles start at a multiple of 8 rows, as shared memory requires. So the first tile of an
expert may also load the last rows of the previous expert. A program stores only the rows of the tile's own expert. So rows need
no padding between experts, and no two programs store to the same address. XLA computes the list of tiles from the number of
rows of each expert, before the kernel.

Tile sizes follow from the registers and the shared memory of a multiprocessor, and were not tuned on a GPU
(benchmarks/expert_tiles.py). On CPU, Pallas interprets the kernels if INTERPRET is set, for tests.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain.kernels.experts.pallas_kernels import (
    ALIGNED,
    OUTER,
    PROGRAMS,
    STORES,
    TIMES,
    MatmulStatic,
    MatmulTile,
    chunk,
    outer_kernel,
    outer_scratch,
    times_kernel,
    times_scratch,
)
from jaxtrain.kernels.hopper import COMPUTING, GROUPS

PREFIX = "jaxtrain_experts_"  # of the kernels' names
# Parameters of the interpreter, for tests on a CPU; None: compile. With fewer than three CPU devices the interpreter hangs.
INTERPRET: plgpu.InterpretGPUParams | None = None
FAST, FULL = "times8_fast", "times8_full"  # matmuls in 8 bits with fast or full accumulation (fp8.multiply)
TILES = {
    TIMES: MatmulTile(128, 256, 64, 4),
    OUTER: MatmulTile(128, 256, 64, 4),
    FAST: MatmulTile(128, 256, 128, 4),
    FULL: MatmulTile(128, 128, 128, 6),  # with two accumulators in registers
}


def times(rows: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, contract: str, precision: jax.lax.Precision) -> jax.Array:
    """Implement `times` of grouped_matmul.py."""
    return _times(f"{TIMES}_{contract}", TILES[TIMES], rows, w_EDF, jnp.float32(1), sizes_E, contract == "F", rows.dtype)


def times8(
    rows8: jax.Array, w8_EFD: jax.Array, scale: jax.Array, sizes_E: jax.Array, out: jnp.dtype, sums: jax.lax.Precision
) -> jax.Array:
    """Return each row (R, D) in 8 bits times the weight of its expert, times `scale` (f32), in `out`: (R, F).

    Args:
      w8_EFD: weights with the contracted dimension last, as WGMMA needs it for 8-bit numbers.
      scale: the scale of the rows times the scale of the weights.
      sums: see fp8.multiply.
    """
    name = FAST if sums == jax.lax.Precision.DEFAULT else FULL
    return _times(name, TILES[name], rows8, w8_EFD, scale, sizes_E, True, out, promoted=name == FULL)


def _times(
    name: str,
    tile: MatmulTile,
    rows: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    sizes_E: jax.Array,
    transposed: bool,
    out: Any,
    promoted: bool = False,
) -> jax.Array:
    R, columns = rows.shape[0], w.shape[1 if transposed else 2]
    rows, w = _pad(rows), _pad(w, chunk(w.dtype))
    out_shape = (rows.shape[0], w.shape[1 if transposed else 2])
    tile = _narrow_tile(tile, out_shape[1], chunk(rows.dtype))
    visits, used = row_tiles(sizes_E, rows.shape[0], tile.rows)
    static = MatmulStatic(tile, _programs(), *out_shape, rows.shape[1], w.shape[0], transposed, INTERPRET is not None, promoted)
    operands = visits, used, scale.reshape(1), rows, w
    return _call(times_kernel, name, static, operands, out_shape, out, times_scratch)[:R, :columns]


def outer(
    rows_RD: jax.Array, rows_RF: jax.Array, sizes_E: jax.Array, out: jnp.dtype, precision: jax.lax.Precision
) -> jax.Array:
    """Implement `outer` of grouped_matmul.py."""
    D, F, E = rows_RD.shape[1], rows_RF.shape[1], sizes_E.shape[0]
    a, b = _pad(rows_RD), _pad(rows_RF)
    ends_E = jnp.cumsum(sizes_E)
    bounds = jnp.stack([ends_E - sizes_E, ends_E], axis=1).astype(jnp.int32)
    tile = _narrow_tile(TILES[OUTER], b.shape[1], chunk(b.dtype))
    static = MatmulStatic(tile, _programs(), a.shape[1], b.shape[1], a.shape[0], E, False, INTERPRET is not None)
    out_shape = (E, a.shape[1], b.shape[1])
    return _call(outer_kernel, f"{OUTER}_R", static, (bounds, a, b), out_shape, out, outer_scratch)[:, :D, :F]


def _narrow_tile(tile: MatmulTile, columns: int, width: int) -> MatmulTile:
    """Return the tile for a result of so few columns, such as that of an adapter.

    Two chunks of `width` columns remain: each computing warpgroup clears one, and consecutive stores need different buffers.
    """
    least = max(COMPUTING, STORES) * width
    return tile._replace(columns=min(tile.columns, -(-columns // least) * least))


def _programs() -> int:
    """Return the number of Pallas programs of a kernel: one for each multiprocessor of the GPU, or 2 in the interpreter."""
    if INTERPRET is not None:
        return 2
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.num_cores if device else jax.devices()[0].core_count


def _pad(x: jax.Array, rows: int = ALIGNED) -> jax.Array:
    """Return x padded with zeros: rows to a multiple of `rows`, columns to a multiple of `chunk`."""
    multiples = (1,) * (x.ndim - 2) + (rows, chunk(x.dtype))
    return jnp.pad(x, [(0, -n % multiple) for n, multiple in zip(x.shape, multiples, strict=True)])


def row_tiles(sizes_E: jax.Array, padded_rows: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """Return the tiles of rows, int32 (V, 4), and the number of tiles in use, int32 (1,).

    A tile is (expert, first row loaded, first row of the expert in the tile, row after the expert's last row in the tile). Rows
    after the rows of all E experts belong to an additional expert E, whose result is zero.

    Args:
      sizes_E: number of rows of each expert.
      padded_rows: number of rows with padding.
      tile: rows of a tile.
    """
    E = sizes_E.shape[0]
    ends = jnp.concatenate([jnp.cumsum(sizes_E), jnp.full((1,), padded_rows)]).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    first = starts // ALIGNED * ALIGNED
    count = jnp.where(ends > starts, -(-(ends - first) // tile), 0)
    behind = jnp.cumsum(count)
    # An expert's tiles contain its own rows, and at most ALIGNED - 1 rows before and tile - 1 rows after them.
    v = jnp.arange((padded_rows + (E + 1) * (ALIGNED + tile - 2)) // tile, dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(v[:, None] >= behind[None, :], axis=1), E).astype(jnp.int32)
    row = first[expert] + (v - (behind - count)[expert]) * tile
    visits = jnp.stack([expert, row, jnp.maximum(starts[expert], row), jnp.minimum(ends[expert], row + tile)], axis=1)
    return visits, behind[-1:]


def _call(
    body: Any,
    name: str,
    static: MatmulStatic,
    operands: tuple[jax.Array, ...],
    shape: tuple[int, ...],
    dtype: Any,
    scratch: Any,
) -> jax.Array:
    """Run a kernel. Profiles show the kernel's name, and plan/program/op_cost.py recognises the kernel by its name."""
    rows, right = operands[-2:]
    return plgpu.kernel(
        functools.partial(body, static=static),
        out_type=jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(rows).manual_axis_type),
        scratch_types=scratch(static, rows.dtype, right.dtype, dtype),
        grid=(static.programs,),
        grid_names=(PROGRAMS,),
        num_threads=COMPUTING + 1,
        thread_name=GROUPS,
        kernel_name=PREFIX + name,
        interpret=INTERPRET,
    )(*operands)
