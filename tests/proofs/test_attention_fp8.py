"""Attention with its forward pass in e4m3: the kernel against its definition, its registers, gradients. test_fp8.py has steps.

Error bounds follow from the types, element by element. `e` is the roundoff of float32, `u` that of bfloat16. Rounding x to e4m3
with the scale s changes x by at most max(2^-4 |x|, 2^-10 s). 2^-10 is half of the smallest e4m3 number.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races, reset_gpu_interpret_mode_state
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
from kernel_bounds import EXACT as e
from kernel_bounds import ROUNDOFF, in_8_bits

from jaxtrain.kernels import fp8
from jaxtrain.kernels.attention import EMPTY_LSE, EMULATED, KERNEL, Rows, Spec, implementation, pallas, pallas_kernels
from jaxtrain.kernels.attention.pallas_kernels import FORWARD_FP8, AttentionTile, pair_registers, swap_keys
from jaxtrain.kernels.context_parallel import ring

B, N, K = 2, 4, 2
GROUP, u = N // K, ROUNDOFF["bf16"]
PACKED = Spec(24, "bf16", True, 4, fp8=KERNEL)
ALL = dataclasses.replace(PACKED, window=33, softcap=1.5)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_gpu_interpret_mode_state()
    monkeypatch.setattr(pallas, "INTERPRET", InterpretGPUParams(detect_races=True))


def rows_of(spec: Spec, T: int) -> Rows:
    """Return rows of two documents, with padding at the end of the second row. If not spec.packed, each row is one document."""
    segments, positions = np.ones((B, T), np.int32), np.tile(np.arange(T, dtype=np.int32), (B, 1))
    if spec.packed:
        for row, (first, real) in enumerate(((T // 3, T), (T // 2 + 3, T - 9))):
            segments[row] = np.where(np.arange(T) < first, 1, np.where(np.arange(T) < real, 2, 0))
            positions[row] = np.where(np.arange(T) < first, np.arange(T), np.arange(T) - first) * (segments[row] > 0)
    return Rows(segments, positions, segments, positions)


def values(T: int, H: int, seed: int = 0) -> list[np.ndarray]:
    """Return q, k, v and the output's gradient, (B, T, heads, H). Magnitudes differ between heads by powers of 4, because each
    head has its own FP8 scale.
    """
    rng = np.random.default_rng(seed)
    drawn = [rng.standard_normal((B, T, heads, H)) * 4.0 ** np.arange(heads)[:, None] for heads in (1, K, K, N)]
    drawn[0] = rng.standard_normal((B, T, N, H)) * 4.0 ** -(np.arange(N)[:, None] // GROUP)
    return [np.asarray(x.astype(np.float32), jnp.bfloat16) for x in drawn]


@functools.cache
def compiled(spec: Spec):
    """Return a compiled function (q, k, v, rows) -> (output, log-sum-exp). spec.fp8 chooses the kernel or its emulation."""
    module = implementation("reference", spec)
    return jax.jit(lambda q, k, v, rows: module.block_forward(q, k, v, module.prepare(rows, spec), spec, True))


def forward(spec: Spec, arrays, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the output (B, T, N, H) and the log-sum-exp (B, N, T) of attention in e4m3."""
    out, lse = compiled(spec)(*arrays[:3], rows)
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def mask_of(rows: Rows, spec: Spec, row: int) -> np.ndarray:
    distance = rows.q_positions[row][:, None] - rows.kv_positions[row][None]
    seen = (rows.q_segments[row][:, None] == rows.kv_segments[row][None]) & (rows.kv_segments[row][None] > 0) & (distance >= 0)
    return seen & (distance < spec.window) if spec.window else seen


def off(x: np.ndarray) -> np.ndarray:
    """Return, for each number of a head, the largest change that rounding it to e4m3 can cause."""
    scale = float(fp8.amax_scale(jnp.float32(np.abs(x).max()), fp8.E4M3))
    return np.maximum(2.0**-4 * np.abs(x), scale * 2.0**-10)


def compare(spec: Spec, arrays, rows: Rows, got, of_rounded: bool, heads=None) -> list[float]:
    """Return the largest ratio of error to bound, of the output and of the log-sum-exp.

    of_rounded: compare with the definition on rounded q, k and v, so that only sums and the rounding of weights cause errors.
    Otherwise compare with the definition on exact q, k and v. With scores off by at most d, softmax weights P are off by at
    most

        F = P max(exp(d) / sum of P exp(-d) - 1, 1 - exp(-d) / sum of P exp(d)) + (S + 16) e P

    Rounding these weights to e4m3, scaled so that the largest is at most 256, adds R = max(2^-4 (P + F), 2^-18 M). M is the
    largest P + F of the query.
    """
    worst = [0.0, 0.0]
    for row, head in heads or np.ndindex(B, N):
        q, k, v = (np.asarray(x[row, :, n], np.float64) for x, n in zip(arrays[:3], (head, *[head // GROUP] * 2), strict=True))
        moved = [off(x) for x in (q, k, v)]
        if of_rounded:
            q, k, v = (in_8_bits(x, fp8.E4M3) for x in (q, k, v))
            moved = [np.zeros_like(x) for x in (q, k, v)]
        size, (dq, dk, dv) = spec.head_dim**-0.5, moved
        scores = q @ k.T * size
        d = size * (dq @ (abs(k) + dk).T + abs(q) @ dk.T)
        d += e * ((spec.head_dim + 8) * size * abs(q) @ abs(k).T + 8 * abs(scores))
        if spec.softcap:
            scores, d = spec.softcap * np.tanh(scores / spec.softcap), d + 16 * e * spec.softcap
        mask = mask_of(rows, spec, row)
        real = mask.any(1)
        scores, d, mask = scores[real], d[real], mask[real]
        top = np.where(mask, scores, -np.inf).max(1, keepdims=True)
        weights = np.where(mask, np.exp(np.where(mask, scores - top, 0)), 0)
        P = weights / weights.sum(1, keepdims=True)
        more, less = (np.where(mask, np.exp(s * d), 0) for s in (1, -1))
        F = P * np.maximum(more / (P * less).sum(1, keepdims=True) - 1, 1 - less / (P * more).sum(1, keepdims=True))
        F += (len(k) + 16) * e * P
        R = np.where(mask, np.maximum(2.0**-4 * (P + F), 2.0**-18 * (P + F).max(1, keepdims=True)), 0)
        limit = (F + R) @ (abs(v) + dv) + P @ dv + (len(k) + 16) * e * (P @ abs(v))
        out, lse = got[0][row, real, head], got[1][row, head, real]
        wanted = top[:, 0] + np.log(weights.sum(1))
        limit_lse = np.where(mask, d, 0).max(1) + (len(k) + 16) * e * (1 + abs(wanted))
        worst[0] = max(worst[0], (abs(out - P @ v) / limit).max())
        worst[1] = max(worst[1], (abs(lse - wanted) / limit_lse).max())
        assert (got[1][row, head, ~real] == np.float32(EMPTY_LSE)).all()
    return worst


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles so small that a short row has many tiles."""
    monkeypatch.setattr(pallas, "LONGEST", 32)
    monkeypatch.setattr(pallas, "tiles", lambda head_dim: {FORWARD_FP8: AttentionTile(32, 32, 2)})
    monkeypatch.setattr(pallas_kernels, "ROWS", 16)


@pytest.mark.parametrize("how", [KERNEL, EMULATED])
def test_forward_is_its_definition(how, small_tiles):
    """The kernel and its emulation agree with the definition: on rounded inputs within tight bounds, on exact inputs within
    bounds of e4m3.
    """
    spec = dataclasses.replace(ALL, fp8=how)
    arrays, rows = values(75, spec.head_dim), rows_of(spec, 75)
    got = forward(spec, arrays, rows)
    assert max(compare(spec, arrays, rows, got, of_rounded=True)) <= 1
    exact = compare(spec, arrays, rows, got, of_rounded=False)
    assert max(exact) <= 1 and min(exact) > 1e-3
    assert how == EMULATED or not get_races().races_found


def test_weights_stay_in_their_registers():
    """Thread t of 4 holds the same columns of the weights as a matmul's result and as the next matmul's left operand.

    The tables of the PTX ISA define both: fragment D, with 32 columns, is the result. Fragment A of .m64nNk32 is the operand,
    whose columns are in the order of `swap_keys`.
    """
    columns = 64
    order = np.asarray(swap_keys(jnp.arange(columns), 0))
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64, columns))
    for group, t in np.ndindex(8, 4):
        held = np.empty(shape, object)
        # a block of 8 columns has two registers: for rows `group` and `group` + 8
        for i, block in enumerate(np.moveaxis(held, 1, 0)):
            assert block.size == 2
            for row, at in enumerate(np.ndindex(block.shape)):
                block[at] = tuple((group + 8 * row, 8 * i + 2 * t + j) for j in range(2))
        made = pair_registers(held, lambda pair: pair[0] + pair[1])
        assert made.shape == mgpu.WGMMA_LAYOUT_8BIT.registers_shape((64, columns))
        for i, registers in enumerate(np.split(made, columns // 32, axis=1)):  # the four registers of one instruction
            for r, register in enumerate(registers.flat):
                wanted = [(group + 8 * (r % 2), order[32 * i + 16 * (r // 2) + 4 * t + j]) for j in range(4)]
                assert list(register) == wanted


def test_what_is_not_finite_stays_so(small_tiles):
    """If an element of q, k or v is infinite or NaN, every output of its row that reads its head becomes NaN, and no other. A
    saturating conversion would turn infinity into 448.
    """
    spec = Spec(16, "bf16", False, 1, fp8=KERNEL)
    arrays, rows = values(40, spec.head_dim), rows_of(spec, 40)
    q, k, v, _ = arrays
    q[0, 3, 0, 1], k[1, 3, 1, 1], v[0, 3, 1, 1] = np.nan, np.inf, np.inf
    bad, good = {(0, 0), (0, 2), (0, 3), (1, 2), (1, 3)}, ((0, 1), (1, 0), (1, 1))
    out, lse = forward(spec, arrays, rows)
    assert {(row, head) for row, head in np.ndindex(B, N) if np.isnan(out[row, :, head]).all()} == bad
    assert max(compare(spec, arrays, rows, (out, lse), of_rounded=True, heads=good)) <= 1


@pytest.mark.parametrize("base", ["reference", "chunked"])
def test_gradients_are_those_of_the_saved_output(base):
    """The backward pass uses the saved output and log-sum-exp, and q, k and v before their rounding to e4m3.

    P = exp(s - lse), delta = sum(do o), dS = P (dP - delta), dv = P^T do, dq = dS k, dk = dS^T q. P, dS and the results are
    each rounded once to bfloat16. `d` bounds the float32 error of a score s.
    """
    spec = dataclasses.replace(PACKED, fp8=EMULATED)
    T, size = 40, spec.head_dim**-0.5
    arrays, rows = values(T, spec.head_dim), rows_of(spec, T)
    arrays[3] = np.where((rows.q_segments > 0)[:, :, None, None], arrays[3], 0)
    module = implementation(base, spec)
    prepared = module.prepare(jax.tree.map(jnp.asarray, rows), spec)
    out, back = jax.vjp(lambda q, k, v: module.attention(q, k, v, prepared, spec), *map(jnp.asarray, arrays[:3]))
    got = [np.asarray(g, np.float64) for g in back(jnp.asarray(arrays[3]))]
    _, lse = forward(spec, arrays, rows)
    for row, head in np.ndindex(B, K):
        heads = slice(head * GROUP, (head + 1) * GROUP)
        q, do, o = (np.asarray(x[row, :, heads], np.float64) for x in (arrays[0], arrays[3], out))
        k, v = (np.asarray(x[row, :, head], np.float64) for x in arrays[1:3])
        scores = np.einsum("tgh,sh->gts", q, k) * size
        d = e * (spec.head_dim + 16) * (np.einsum("tgh,sh->gts", abs(q), abs(k)) * size + abs(lse[row, heads])[..., None])
        P = np.where(mask_of(rows, spec, row)[None], np.exp(np.minimum(scores - lse[row, heads][..., None], 80)), 0)
        dP, delta = np.einsum("tgh,sh->gts", do, v), np.einsum("tgh,tgh->gt", do, o)[..., None]
        dS = P * (dP - delta)
        many = (T * GROUP + spec.head_dim) * e
        error = (2 * u + d) * abs(dS) + P * many * (np.einsum("tgh,sh->gts", abs(do), abs(v)) + abs(delta))
        results = (
            (np.einsum("gts,sh->tgh", dS, k) * size, (np.einsum("gts,sh->tgh", error, abs(k)) * size)),
            (np.einsum("gts,tgh->sh", dS, q) * size, np.einsum("gts,tgh->sh", error, abs(q)) * size),
            (np.einsum("gts,tgh->sh", P, do), np.einsum("gts,tgh->sh", (2 * u + d + many) * P, abs(do))),
        )
        for g, (wanted, limit), where in zip(got, results, (heads, head, head), strict=True):
            assert (abs(g[row, :, where] - wanted) <= limit + 2 * u * abs(wanted) + 1e-30).all()


def test_blocks_merge_into_the_whole(small_tiles):
    """Blocks of attention, merged by their log-sum-exps, agree with attention over the whole row.

    Each half of the row attends to itself, and the second half also to the first. Each block has its own FP8 scales.
    """
    spec, T = PACKED, 64
    arrays, rows = values(T, spec.head_dim), rows_of(spec, T)
    module = implementation("reference", spec)

    @jax.jit
    def both(q, k, v, rows):
        early, late = ([x[:, : T // 2] for x in (q, k, v, *rows)], [x[:, T // 2 :] for x in (q, k, v, *rows)])

        def block(queries, keys, diagonal):
            described = module.describe_block(Rows(queries[3], queries[4], keys[5], keys[6]), spec, diagonal)
            return module.block_forward(queries[0], keys[1], keys[2], described, spec, diagonal)

        first, own, behind = block(early, early, True), block(late, late, True), block(late, early, False)
        out, lse = ring.merge(own, behind)
        return jnp.concatenate([first[0], out], 1), jnp.concatenate([first[1], lse], 2)

    got = [np.asarray(x, np.float64) for x in both(*arrays[:3], rows)]
    # merging two results of rows that see no key gives NOTHING only up to rounding
    got[1] = np.where(got[1] < EMPTY_LSE / 2, np.float32(EMPTY_LSE), got[1])
    assert max(compare(spec, arrays, rows, got, of_rounded=False)) <= 1
