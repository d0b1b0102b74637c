"""The flash attention kernels, in Pallas Mosaic GPU; pallas.py calls them. hopper.py has the parts that the kernels share.

Each warpgroup that computes has its own 64 rows of the program's tile. WGMMA reads the left operand of a product of two inputs
(q k^T, do v^T) from shared memory. It reads attention weights and gradients of scores from registers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jaxtrain.kernels.attention import EMPTY_LSE, Spec
from jaxtrain.kernels.fp8 import E4M3
from jaxtrain.kernels.hopper import COMPUTING, ROWS, Slots, slots, warpgroups

LOG2E = math.log2(math.e)
FORWARD, FORWARD_FP8, QUERIES, KEYS = "forward", "forward_fp8", "backward_q", "backward_kv"  # the kernels
# The forward pass in e4m3 multiplies weights by 2^8. So the largest weight becomes 256, where e4m3 has at most 448. Weights
# above 2^-14 become normal numbers, and weights above 2^-18 are not rounded to zero.
SHIFT = 8
CHUNK = 64  # numbers of bf16 that are contiguous in shared memory
TILES, BATCH, HEADS = "tile", "row", "head"  # the axes of programs
# Of a number for each row, and for each column, of a matmul's result.
ROW_LAYOUT, COLUMN_LAYOUT = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class AttentionTile(NamedTuple):
    """The number of tokens in a tile of queries and of keys, and the number of the loop's tiles in shared memory at a time."""

    queries: int
    keys: int
    stages: int


@dataclasses.dataclass(frozen=True)
class AttentionStatic:
    """Compile-time parameters of a kernel."""

    spec: Spec
    tile: AttentionTile
    width: int  # head_dim, padded
    group: int  # query heads of a key/value head
    interpret: bool
    fp8: bool = False  # the operands of the matmuls are e4m3

    @property
    def scale(self) -> float:
        """Return the factor of the scores, 1 / sqrt(H)."""
        return self.spec.head_dim**-0.5

    @property
    def splits_gradients(self) -> bool:
        """Return whether one warpgroup sums gradients of keys and the other gradients of values.

        Above a width of 128, the two accumulators do not fit the registers of one warpgroup.
        """
        return self.width > 128

    def matrices(self, number: int, tokens: int) -> Any:
        """Return shared memory for `number` matrices (tokens, head_dim) of bf16, in the order in which WGMMA reads them.

        A swizzled chunk has at most as many columns as a tile has tokens, because a matmul sums over whole chunks.
        """
        chunk = min(CHUNK, self.tile.queries, self.tile.keys)
        order: Any = plgpu.TilingTransform((8, chunk)), plgpu.SwizzleTransform(2 * chunk)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM((number, tokens, self.width), jnp.bfloat16, transforms=order)

    def matrices_fp8(self, number: int, rows: int, columns: int) -> Any:
        """Return shared memory for `number` matrices of e4m3, in the order in which WGMMA reads them."""
        chunk = math.gcd(columns, 128)
        order: Any = plgpu.TilingTransform((8, chunk)), plgpu.SwizzleTransform(chunk)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM((number, rows, columns), E4M3, transforms=order)

    def token_ids(self, tokens: int) -> Any:
        """Return shared memory for segments and positions of the loop's tiles, `tokens` tokens each."""
        return plgpu.SMEM((self.tile.stages, 2, tokens), jnp.int32)

    def token_numbers(self, tokens: int) -> Any:
        """Return shared memory for one number per token of the loop's tiles, `tokens` tokens each."""
        return plgpu.SMEM((self.tile.stages, tokens), jnp.float32)


class Visits(NamedTuple):
    """The tiles that a program visits, as in `tiles.visits`: first tiles that need a mask, then tiles without masked pairs."""

    start: jax.Array
    full_start: jax.Array
    full_stop: jax.Array
    stop: jax.Array

    @property
    def masked(self) -> jax.Array:
        """Return the number of tiles that need a mask."""
        return self.total - (self.full_stop - self.full_start)

    @property
    def total(self) -> jax.Array:
        """Return the number of tiles to visit."""
        return self.stop - self.start

    def at(self, step: jax.Array) -> jax.Array:
        """Return the index of the tile to visit in a step."""
        ahead = self.full_start - self.start
        behind = jnp.where(step < self.masked, self.full_stop + step - ahead, self.full_start + step - self.masked)
        return jnp.where(step < ahead, self.start + step, behind)


def _visits(ref: Any, row: jax.Array, tile: jax.Array) -> Visits:
    return Visits(*(ref[row, tile, i] for i in range(4)))


def _product(a: Any, b: Any) -> jax.Array:
    """Return a b^T in f32, of two tiles in shared memory."""

    def into(sum_ref: Any) -> jax.Array:
        plgpu.wgmma(sum_ref, a, b.transpose((1, 0)))
        return sum_ref[...]

    return pl.run_scoped(into, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[0]), jnp.float32))


def _add_product(sums: jax.Array, a: jax.Array, b: Any, static: AttentionStatic) -> jax.Array:
    """Return sums + a b in f32: `a` is in registers, `b` a tile in shared memory."""
    a = a.astype(b.dtype)
    if static.interpret:  # jax 0.11.2's interpreter supports WGMMA only from shared memory, and no pl.run_state
        return sums + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    added: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.WGMMAAccumulatorRef.init(sums))
    return added


def swap_keys(keys: jax.Array, axis: int) -> jax.Array:
    """Return an array with its keys in the order in which threads hold them, for each 16 keys along `axis`.

    Four threads hold each row of a matmul's result. Thread t holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16 (PTX ISA,
    fragment D of wgmma). In the left operand of an 8-bit matmul, thread t holds columns 4t to 4t + 3 (fragment A of .m64nNk32).
    A sum over keys may have any order. So attention weights stay in their registers, and the keys of values are permuted.
    """
    shape = keys.shape
    keys = keys.reshape(*shape[:axis], -1, 2, 4, 2, *shape[axis + 1 :])
    return jnp.swapaxes(keys, axis + 1, axis + 2).reshape(shape)


def pair_registers(registers: np.ndarray, join: Callable[[list[Any]], Any]) -> np.ndarray:
    """Join registers of 8 columns each along axis 1 into registers of 16 columns: see `swap_keys`."""
    joined = np.empty((registers.shape[0], registers.shape[1] // 2, *registers.shape[2:]), object)
    for index in np.ndindex(joined.shape):
        joined[index] = join([registers[(index[0], 2 * index[1] + half, *index[2:])] for half in range(2)])
    return joined


def _round_in_place(p: jax.Array) -> jax.Array:
    """Return attention weights in e4m3 as a matmul's left operand, without moving them between threads: see `swap_keys`."""
    layouts = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_8BIT
    result_type: Any = plgpu.ShapeDtypeStruct(p.shape, E4M3, layout=layouts[1])

    def round_registers(_: Any, p: Any) -> Any:
        registers = pair_registers(p.astype(ir.Float8E4M3FNType.get()).registers, mgpu.utils.vector_concat)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT_8BIT, _is_signed=None)

    inline: Any = plgpu.inline_mgpu(arg_types=(layouts[0],), return_type=result_type)
    return inline(round_registers)(p)


def _product_with_values(p: jax.Array, v: Any, static: AttentionStatic) -> jax.Array:
    """Return p v in f32, with the attention weights p rounded to e4m3.

    v: values (head_dim, keys) in e4m3, with keys in the order of `swap_keys`.

    The accumulator starts at zero, and the caller adds the result to its own sum in f32. On Hopper, tensor cores accumulate
    8-bit products with about 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), too few for a sum over all keys.
    """
    if static.interpret:
        p8 = swap_keys(p.astype(E4M3).astype(jnp.float32), 1)
        return jnp.dot(p8, v[...].astype(jnp.float32).T, preferred_element_type=jnp.float32)
    p8 = _round_in_place(p)

    def into(sum_ref: Any) -> jax.Array:
        plgpu.wgmma(sum_ref, p8, v.transpose((1, 0)))
        return sum_ref[...]

    return pl.run_scoped(into, plgpu.WGMMAAccumulatorRef((p.shape[0], v.shape[0]), jnp.float32))


def _zeros(shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def _rows(numbers: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast one number per row, (rows,), to a matrix of `shape`."""
    return jax.lax.broadcast_in_dim(numbers, shape, (0,))


def _columns(numbers: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast one number per column, (columns,), to a matrix of `shape`."""
    return jax.lax.broadcast_in_dim(numbers, shape, (1,))


def _store(values: jax.Array, ref: Any, staging: Any) -> None:
    """Store a warpgroup's 64 rows to global memory. staging: a free tile in shared memory, through which rows are copied."""
    if ref.dtype != staging.dtype:  # no tile in shared memory is float32
        ref[...] = values.astype(ref.dtype)
        return
    staging[...] = values.astype(staging.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, ref)
    plgpu.wait_smem_to_gmem(0)


TokenIds = tuple[jax.Array, jax.Array]  # segments and positions of tokens


def _load_ids(ref: Any, layout: Any, optimized: bool = True) -> TokenIds:
    segments, positions = (plgpu.load(ref.at[i], layout=layout, optimized=optimized) for i in range(2))
    return segments, positions


def _visible(query_ids: TokenIds, key_ids: TokenIds, spec: Spec, shape: tuple[int, ...], transposed: bool = False) -> jax.Array:
    """Return the mask, bool (queries, keys), from segments and positions of queries and keys; its transpose if `transposed`."""
    broadcast_queries, broadcast_keys = (_columns, _rows) if transposed else (_rows, _columns)
    same = broadcast_queries(query_ids[0], shape) == broadcast_keys(key_ids[0], shape)
    distance = broadcast_queries(query_ids[1], shape) - broadcast_keys(key_ids[1], shape)
    mask = same & (distance >= 0)
    return mask & (distance < spec.window) if spec.window else mask


def _cap_scores(scores: jax.Array, static: AttentionStatic, factor: Any = 1.0) -> tuple[jax.Array, jax.Array | None]:
    """Return scaled and capped scores times log2(e), and the derivative of the soft cap (None without a soft cap).

    factor: the product of the scales of queries and keys, for e4m3.
    """
    cap, scale = static.spec.softcap, factor * static.scale
    if not cap:
        return scores * (scale * LOG2E), None
    # This is tanh; the GPU's tanh instruction has only 11 bits.
    squashed = 1 - 2 / (1 + jnp.exp2(scores * (scale * (2 * LOG2E / cap))))
    return squashed * (cap * LOG2E), 1 - squashed * squashed


def _loop_tiles(visits: Visits, before: Any, body: Callable[[jax.Array, Any, bool], Any], carry: Any) -> Any:
    """Run `body(step, carry, masked)` for each tile to visit, and return the last carry. Tiles that need a mask come first.

    before: the number of the first step.
    """
    masked, total = before + visits.masked, before + visits.total
    carry = jax.lax.fori_loop(before, masked, lambda step, carry: body(step, carry, True), carry)
    return jax.lax.fori_loop(masked, total, lambda step, carry: body(step, carry, False), carry)


def _load_keys(
    visits: Visits, static: AttentionStatic, row: Any, head: Any, sources: tuple[Any, Any, Any], keys: Slots, values: Slots
) -> None:
    """Copy the tiles of keys and values that a program visits. sources: keys, values, and segments and positions of keys."""
    tokens, (k_ref, v_ref, kv_ids) = static.tile.keys, sources

    @pl.loop(0, visits.total)
    def _(step):
        rows = pl.ds(visits.at(step) * tokens, tokens)
        keys.fill(step, (k_ref.at[row, rows, head], kv_ids.at[row, :, rows]))
        values.fill(step, (v_ref.at[row, head, :, rows] if static.fp8 else v_ref.at[row, rows, head],))


def _query_tile(visits_ref: Any) -> jax.Array:
    """Return the tile of queries of this program. The first program has the last tile, which has the most keys."""
    return visits_ref.shape[1] - 1 - jax.lax.axis_index(TILES)


def forward_scratch(static: AttentionStatic) -> tuple[Any, ...]:
    """Return shared memory and barriers of the forward kernel."""
    tokens, stages, width = static.tile.keys, static.tile.stages, static.width
    k, v, q_smem = static.matrices(stages, tokens), static.matrices(stages, tokens), static.matrices(COMPUTING, ROWS)
    if static.fp8:  # WGMMA reads 8-bit numbers only along the contracted dimension: for values, the axis of keys
        k, v = static.matrices_fp8(stages, tokens, width), static.matrices_fp8(stages, width, tokens)
        q_smem = static.matrices_fp8(COMPUTING, ROWS, width)
    arrived, turn = plgpu.Barrier(num_barriers=COMPUTING), plgpu.Barrier(num_arrivals=COMPUTING)
    return q_smem, arrived, slots(k, static.token_ids(tokens)), slots(v), turn


def _forward_kernel(visits_ref, q_ids, kv_ids, q_ref, k_ref, v_ref, *refs, static):
    """Compute a tile of the output, with a running maximum (in log2) and a running sum of exponentials for each query.

    The warpgroups that compute alternate: one multiplies while the other computes exponentials.

    In e4m3 (static.fp8), v_ref has shape (B, K, H, S), with keys in the order of `swap_keys`. The operand after v_ref is f32
    (B, N, 2): the product of the scales of queries and keys, and the scale of values.
    """
    *scales, out_ref, lse_ref, q_smem, arrived, keys, values, turn = refs
    row, head, q_tile, tile = jax.lax.axis_index(BATCH), jax.lax.axis_index(HEADS), _query_tile(visits_ref), static.tile
    visits = _visits(visits_ref, row, q_tile)
    shape = ROWS, tile.keys

    def next_turn() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def compute(warpgroup: jax.Array) -> None:
        rows = pl.ds(q_tile * tile.queries + warpgroup * ROWS, ROWS)
        q = q_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[row, rows, head], q, arrived.at[warpgroup])
        query_ids = _load_ids(q_ids.at[row, :, rows], ROW_LAYOUT, optimized=False)
        factor, v_scale = (scales[0][row, head, i] for i in range(2)) if static.fp8 else (1.0, 1.0)
        plgpu.barrier_wait(arrived.at[warpgroup])

        def body(step, carry, masked):
            out, top, total = carry
            k, ids = keys.take(step)
            scores = _product(q, k)
            next_turn()
            scores, _ = _cap_scores(scores, static, factor)
            if masked:
                scores = jnp.where(_visible(query_ids, _load_ids(ids, COLUMN_LAYOUT), static.spec, shape), scores, -jnp.inf)
            keys.release(step, static.interpret)
            new_top = jnp.maximum(top, scores.max(1))
            p = jnp.exp2(scores - _rows(new_top - SHIFT if static.fp8 else new_top, shape))
            shrink = jnp.exp2(top - new_top)
            out, total = out * _rows(shrink, out.shape), total * shrink + p.sum(1)
            next_turn()
            (v,) = values.take(step)
            out = out + _product_with_values(p, v, static) if static.fp8 else _add_product(out, p, v, static)
            values.release(step, static.interpret)
            return out, new_top, total

        # Masked scores are -inf, and the first maximum is finite. So the weight of a masked score is 0 from the first tile on.
        top = plgpu.layout_cast(jnp.full((ROWS,), EMPTY_LSE, jnp.float32), ROW_LAYOUT)
        start = _zeros((ROWS, static.width)), top, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW_LAYOUT)
        pl.when(warpgroup == 1)(next_turn)
        out, top, total = _loop_tiles(visits, jnp.int32(0), body, start)
        pl.when(warpgroup == 0)(next_turn)
        has_keys = total > 0
        total = jnp.where(has_keys, total, 1.0)
        if static.fp8:
            out, top = out * v_scale, top - SHIFT
        _store(out / _rows(total, out.shape), out_ref.at[row, rows, head], q)
        lse_ref.at[row, head, rows][...] = jnp.where(has_keys, top / LOG2E + jnp.log(total), EMPTY_LSE)

    def load() -> None:
        _load_keys(visits, static, row, head // static.group, (k_ref, v_ref, kv_ids), keys, values)

    warpgroups(compute, load, (keys, values))


def queries_scratch(static: AttentionStatic) -> tuple[Any, ...]:
    """Return shared memory and barriers of the kernel of queries' gradients."""
    tokens = static.tile.keys
    tiles, rows_smem = static.matrices(static.tile.stages, tokens), static.matrices(COMPUTING, ROWS)
    arrived = plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTING)
    return rows_smem, rows_smem, arrived, slots(tiles, static.token_ids(tokens)), slots(tiles)


def _queries_kernel(
    visits_ref,
    q_ids,
    kv_ids,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    q_smem,
    do_smem,
    arrived,
    keys,
    values,
    *,
    static,
):
    """Compute a tile of the queries' gradient, dq = ds k / sqrt(H). ds is the gradient of the scores."""
    row, head, q_tile, tile = jax.lax.axis_index(BATCH), jax.lax.axis_index(HEADS), _query_tile(visits_ref), static.tile
    visits = _visits(visits_ref, row, q_tile)
    shape = ROWS, tile.keys

    def compute(warpgroup: jax.Array) -> None:
        rows = pl.ds(q_tile * tile.queries + warpgroup * ROWS, ROWS)
        q, do = q_smem.at[warpgroup], do_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[row, rows, head], q, arrived.at[warpgroup])
        plgpu.copy_gmem_to_smem(do_ref.at[row, rows, head], do, arrived.at[warpgroup])
        query_ids = _load_ids(q_ids.at[row, :, rows], ROW_LAYOUT, optimized=False)
        lse, delta = (plgpu.load(x.at[row, head, rows], layout=ROW_LAYOUT, optimized=False) for x in (lse_ref, delta_ref))
        plgpu.barrier_wait(arrived.at[warpgroup])

        def body(step, dq, masked):
            k, ids = keys.take(step)
            scores, slope = _cap_scores(_product(q, k), static)
            if masked:
                scores = jnp.where(_visible(query_ids, _load_ids(ids, COLUMN_LAYOUT), static.spec, shape), scores, -jnp.inf)
            p = jnp.exp2(scores - _rows(lse * LOG2E, shape))
            (v,) = values.take(step)
            ds = p * (_product(do, v) - _rows(delta, shape))
            values.release(step, static.interpret)
            dq = _add_product(dq, ds if slope is None else ds * slope, k, static)
            keys.release(step, static.interpret)
            return dq

        dq = _loop_tiles(visits, jnp.int32(0), body, _zeros((ROWS, static.width)))
        _store(dq * static.scale, dq_ref.at[row, rows, head], q)

    def load() -> None:
        _load_keys(visits, static, row, head // static.group, (k_ref, v_ref, kv_ids), keys, values)

    warpgroups(compute, load, (keys, values))


def keys_scratch(static: AttentionStatic) -> tuple[Any, ...]:
    """Return shared memory and barriers of the kernel of keys' and values' gradients."""
    chunks, tokens = COMPUTING // 2 if static.splits_gradients else COMPUTING, static.tile.queries
    tiles, rows_smem, numbers = (
        static.matrices(static.tile.stages, tokens),
        static.matrices(chunks, ROWS),
        static.token_numbers(tokens),
    )
    arrived, done = plgpu.Barrier(num_arrivals=2, num_barriers=chunks), plgpu.Barrier(num_arrivals=COMPUTING)
    return rows_smem, rows_smem, arrived, done, slots(tiles, static.token_ids(tokens), numbers), slots(tiles, numbers)


def _keys_kernel(
    visits_ref,
    q_ids,
    kv_ids,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dk_ref,
    dv_ref,
    k_smem,
    v_smem,
    arrived,
    done,
    queries,
    gradients,
    *,
    static,
):
    """Compute a tile of dk = ds^T q / sqrt(H) and of dv = p^T do, summed over the query heads of the key/value head.

    p are the attention weights, and ds the gradient of the scores. Scores are computed as (keys, queries). So p^T and ds^T are
    already in the registers from which WGMMA reads them.
    """
    row, head, kv_tile, tile = jax.lax.axis_index(BATCH), jax.lax.axis_index(HEADS), jax.lax.axis_index(TILES), static.tile
    visits = _visits(visits_ref, row, kv_tile)
    shape = ROWS, tile.queries

    def compute_gradients(chunk: jax.Array, wants_keys: bool, wants_values: bool) -> None:
        """Compute the gradients of 64 keys if `wants_keys`, and of their values if `wants_values`.

        chunk: the index of these 64 keys in the tile.
        """
        rows = pl.ds(kv_tile * tile.keys + chunk * ROWS, ROWS)
        k, v = k_smem.at[chunk], v_smem.at[chunk]
        key_ids = _load_ids(kv_ids.at[row, :, rows], ROW_LAYOUT, optimized=False)
        plgpu.barrier_wait(arrived.at[chunk])

        def body(step, carry, masked):
            dk, dv = carry
            q, ids, lse = queries.take(step)
            scores, slope = _cap_scores(_product(k, q), static)
            if masked:
                mask = _visible(_load_ids(ids, COLUMN_LAYOUT), key_ids, static.spec, shape, transposed=True)
                scores = jnp.where(mask, scores, -jnp.inf)
            p = jnp.exp2(scores - _columns(plgpu.load(lse, layout=COLUMN_LAYOUT) * LOG2E, shape))
            do, delta = gradients.take(step)
            if wants_values:
                dv = _add_product(dv, p, do, static)
            if wants_keys:
                ds = p * (_product(v, do) - _columns(plgpu.load(delta, layout=COLUMN_LAYOUT), shape))
                dk = _add_product(dk, ds if slope is None else ds * slope, q, static)
            gradients.release(step, static.interpret)
            queries.release(step, static.interpret)
            return dk, dv

        def add_head(group_head, carry):
            return _loop_tiles(visits, group_head * visits.total, body, carry)

        zeros = [_zeros((ROWS, static.width)) if wanted else None for wanted in (wants_keys, wants_values)]
        dk, dv = jax.lax.fori_loop(0, static.group, add_head, tuple(zeros))
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        if wants_keys:
            _store(dk * static.scale, dk_ref.at[row, rows, head], k)
        if wants_values:
            _store(dv, dv_ref.at[row, rows, head], v)

    def compute(warpgroup: jax.Array) -> None:
        if static.splits_gradients:
            pl.when(warpgroup == 0)(lambda: compute_gradients(jnp.int32(0), True, False))
            pl.when(warpgroup == 1)(lambda: compute_gradients(jnp.int32(0), False, True))
        else:
            compute_gradients(warpgroup, True, True)

    def load() -> None:
        for chunk in range(arrived.shape[0]):
            rows = pl.ds(kv_tile * tile.keys + chunk * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(k_ref.at[row, rows, head], k_smem.at[chunk], arrived.at[chunk])
            plgpu.copy_gmem_to_smem(v_ref.at[row, rows, head], v_smem.at[chunk], arrived.at[chunk])

        @pl.loop(0, static.group)
        def _(group_head):
            q_head = head * static.group + group_head

            @pl.loop(0, visits.total)
            def _(i):
                step, rows = group_head * visits.total + i, pl.ds(visits.at(i) * tile.queries, tile.queries)
                queries.fill(step, (q_ref.at[row, rows, q_head], q_ids.at[row, :, rows], lse_ref.at[row, q_head, rows]))
                gradients.fill(step, (do_ref.at[row, rows, q_head], delta_ref.at[row, q_head, rows]))

    warpgroups(compute, load, (queries, gradients))


class PallasKernel(NamedTuple):
    """A kernel: its body, and the function that returns its shared memory and barriers."""

    body: Callable[..., None]
    scratch: Callable[[AttentionStatic], tuple[Any, ...]]


KERNELS = {
    FORWARD: PallasKernel(_forward_kernel, forward_scratch),
    FORWARD_FP8: PallasKernel(_forward_kernel, forward_scratch),
    QUERIES: PallasKernel(_queries_kernel, queries_scratch),
    KEYS: PallasKernel(_keys_kernel, keys_scratch),
}
