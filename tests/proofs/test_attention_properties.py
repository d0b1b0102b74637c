"""Every attention kernel against its definition in float64, over random documents, windows and values.

Errors must be below bounds that follow from the kernel's types (kernel_bounds.py); there are no chosen tolerances. Each shape
is a bucket that is compiled once.
"""

import contextlib
import dataclasses
import functools

import cudnn_emulator
import jax
import jax.numpy as jnp
import kernel_bounds
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races, reset_gpu_interpret_mode_state
from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

from jaxtrain.kernels.attention import Rows, Spec, chunked, cudnn, pallas, pallas_kernels, sinks, tiles
from jaxtrain.kernels.attention.pallas_kernels import FORWARD, KEYS, QUERIES, AttentionTile

B = 2
SMALL_TILES = {FORWARD: AttentionTile(32, 16, 2), QUERIES: AttentionTile(32, 32, 2), KEYS: AttentionTile(16, 32, 2)}


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A shape and the kernel's options. Each bucket is compiled once."""

    T: int
    N: int
    K: int
    spec: Spec


def bucket(
    T: int, N: int, K: int, H: int, dtype: str, window: int = 0, softcap: float = 0.0, packed: bool = True, sinks: bool = False
) -> Bucket:
    return Bucket(T, N, K, Spec(H, dtype, packed, 6 if packed else 1, window, softcap, sinks=sinks))


BUCKETS = {
    "grouped": bucket(96, 6, 2, 16, "f32"),
    "all": bucket(75, 4, 1, 24, "f32", window=19, softcap=1.5),
    "one document": bucket(70, 2, 2, 16, "bf16", packed=False),
    "bf16, all": bucket(75, 2, 1, 24, "bf16", window=19, softcap=1.5),
    "bf16, window, sinks": bucket(80, 4, 2, 16, "bf16", window=33, sinks=True),
}
KERNELS = ("reference", "chunked", "cudnn", "pallas")


def does(kernel: str, b: Bucket) -> bool:
    """Return whether the kernel supports a bucket. (The cuDNN emulator accepts float32 too.)"""
    return b.spec.dtype == "bf16" if kernel == "pallas" else kernel != "cudnn" or not b.spec.softcap


def examples(kernel: str):
    """Return settings of hypothesis: few examples for Pallas, whose interpreter takes seconds for each, and no shrinking."""
    few = {"quick": 1, "many": 3}.get(settings.get_current_profile_name())
    return settings(max_examples=few, phases=[Phase.generate]) if few and kernel == "pallas" else settings()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate cuDNN's primitives, interpret Pallas, and use chunks (`chunked.BLOCK`) that do not divide short rows."""
    reset_gpu_interpret_mode_state()  # a failed test would make all later ones fail
    monkeypatch.setattr(cudnn, "fused", cudnn_emulator.MODULE)
    monkeypatch.setattr(pallas, "INTERPRET", InterpretGPUParams(detect_races=True))
    monkeypatch.setattr(chunked, "BLOCK", 32)


@st.composite
def documents(draw, b: Bucket, ordered: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return segments and positions (B, T): documents, then padding. ordered=False: tokens of a row may be in any order."""
    segments, positions = np.ones((B, b.T), np.int32), np.tile(np.arange(b.T, dtype=np.int32), (B, 1))
    if not b.spec.packed:
        return segments, positions
    for row in range(B):
        cuts = draw(st.sets(st.integers(1, b.T - 1), max_size=b.spec.max_segments - 1)) if b.T > 1 else set()
        starts = [0, *sorted(cuts)]
        number = np.searchsorted(starts, np.arange(b.T), side="right")
        segments[row], positions[row] = number, np.arange(b.T) - np.asarray(starts)[number - 1]
        real = b.T - draw(st.integers(0, b.T // 2)) if draw(st.booleans()) else b.T
        segments[row, real:] = positions[row, real:] = 0
        if not ordered and draw(st.booleans()):
            order = np.random.default_rng(draw(st.integers(0, 9))).permutation(b.T)
            segments[row], positions[row] = segments[row, order], positions[row, order]
    return segments, positions


def values(b: Bucket, seed: int, size: float) -> list[np.ndarray]:
    """Return q, k, v and do, (B, T, heads, H). `size` scales the queries: the larger they are, the sharper is softmax."""
    rng = np.random.default_rng(seed)
    shapes, sizes = [(B, b.T, heads, b.spec.head_dim) for heads in (b.N, b.K, b.K, b.N)], (size, 1, 1, 1)
    dtype = jnp.float32 if b.spec.dtype == "f32" else jnp.bfloat16
    return [
        np.asarray((s * rng.standard_normal(shape)).astype(np.float32), dtype) for s, shape in zip(sizes, shapes, strict=True)
    ]


def visible(segments: np.ndarray, positions: np.ndarray, spec: Spec) -> np.ndarray:
    """Return whether each query (first axis) of a row attends to each key (second axis), (T, T), by the definition."""
    distance = positions[:, None] - positions[None, :]
    seen = (segments[:, None] == segments[None, :]) & (segments[None, :] > 0) & (distance >= 0)
    return seen & (distance < spec.window) if spec.window else seen


def exact(b: Bucket, arrays, segments, positions, blocks: bool = False):
    """Return (results, error bounds) of the definition in float64. Each has o, dq, dk and dv, (B, T, heads, H), and the sinks'
    gradient (N,) if the bucket has sinks.
    """
    q, k, v, do = (x.astype(np.float64) for x in arrays)
    group = b.N // b.K
    found = [[np.zeros(x.shape) for x in (q, q, k, v, *[sinks_of(b)] * b.spec.sinks)] for _ in range(2)]
    how = {"dtype": b.spec.dtype, "softcap": b.spec.softcap, "blocks": blocks, "xp": np, "einsum": np.einsum}
    for row, head in np.ndindex(len(q), b.K):
        heads = slice(head * group, (head + 1) * group)
        mask = visible(segments[row], positions[row], b.spec)
        one = (q[row, :, heads], k[row, :, head], v[row, :, head], do[row, :, heads])
        learnt = sinks_of(b)[heads] if b.spec.sinks else None
        for out, made in zip(found, kernel_bounds.attention(*one, mask, sinks_G=learnt, **how), strict=True):
            for array, part, where in zip(out, made, (heads, heads, head, head, heads), strict=False):
                if array.ndim == 1:
                    array[where] += part
                else:
                    array[row, :, where] = part
    return found


def sinks_of(b: Bucket) -> np.ndarray:
    """Return a sink for each head, (N,), from -1 (below most scores) to 3 (above most scores)."""
    return np.linspace(-1.0, 3.0, b.N)


@contextlib.contextmanager
def small_tiles():
    """Use Pallas tiles so small that a short row has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas, "LONGEST", 32)
        patch.setattr(pallas, "tiles", lambda head_dim: SMALL_TILES)
        patch.setattr(pallas_kernels, "ROWS", 16)
        yield


@functools.lru_cache(maxsize=32)
def compiled(kernel: str, b: Bucket):
    """Return a compiled function (q, k, v, do, segments, positions) -> [o, dq, dk, dv]. If the bucket has sinks, the function
    applies them and appends their gradient.
    """

    @jax.jit
    def run(q, k, v, do, segments, positions):
        prepared = sinks.prepare(Rows(segments, positions, segments, positions), b.spec, kernel)
        learnt = jnp.asarray(sinks_of(b), jnp.float32) if b.spec.sinks else None
        o, back = jax.vjp(lambda q, k, v, learnt: sinks.attention(q, k, v, learnt, prepared, b.spec, kernel), q, k, v, learnt)
        return [x for x in (o, *back(do)) if x is not None]

    return run


def run(kernel: str, b: Bucket, arrays, segments, positions) -> list[np.ndarray]:
    with small_tiles():
        return [np.asarray(x, np.float64) for x in compiled(kernel, b)(*arrays, segments, positions)]


def worst(got, wanted, limits, real) -> float:
    """Return the largest ratio of error to bound over o (without padding), dq, dk and dv. The ratio is infinite for NaN, and
    enormous for an error whose bound is 0.
    """
    ratios = []
    for i, (a, b, limit) in enumerate(zip(got, wanted, limits, strict=True)):
        if not np.isfinite(a).all():
            return np.inf
        error = np.where(real if i == 0 else True, np.abs(a - b), 0.0)
        ratios.append(np.where(error > 0, error / np.maximum(limit, 1e-300), 0.0).max())
    return float(max(ratios))


def check(kernel: str, b: Bucket, data) -> float:
    """Return the largest ratio of a kernel's error to its bound in one random case."""
    segments, positions = data.draw(documents(b, ordered=kernel == "cudnn"))
    arrays = values(b, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.3, 1.0, 4.0])))
    real = (segments > 0)[:, :, None, None]
    arrays[3] = np.where(real, arrays[3], 0).astype(arrays[3].dtype)
    got = run(kernel, b, arrays, segments, positions)
    # The chunked kernel rounds each query block's part of the gradients of keys and values. With sinks a kernel's output is
    # rounded once before the sinks are applied.
    return worst(got, *exact(b, arrays, segments, positions, blocks=kernel == "chunked" or b.spec.sinks), real)


CASES = [(kernel, name) for kernel in KERNELS for name, b in BUCKETS.items() if does(kernel, b)]
SLOW = {("pallas", "one document"), ("pallas", "bf16, window, sinks")}  # by interpretation


@pytest.mark.parametrize(("kernel", "name"), [pytest.param(*c, marks=pytest.mark.more if c in SLOW else ()) for c in CASES])
def test_attention_is_its_definition(kernel, name):
    """Pallas fills each slot of shared memory several times, and the interpreter finds no race between copies and loads."""

    @given(st.data())
    @examples(kernel)
    def hold(data):
        assert check(kernel, BUCKETS[name], data) <= 1

    hold()
    assert kernel != "pallas" or not get_races().races_found


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_a_score_far_above_the_cap(kernel):
    """The row's only token attends only to itself, so the gradients of q and k are zero up to rounding. The cap's slope is
    smaller than the rounding error of the slope.
    """
    b = bucket(1, 2, 2, 8, "f32", window=1, softcap=0.5)
    arrays, segments = values(b, 0, 4.0), np.ones((B, 1), np.int32)
    got = run(kernel, b, arrays, segments, segments - 1)
    assert worst(got, *exact(b, arrays, segments, segments - 1, blocks=kernel == "chunked"), True) <= 1


@pytest.mark.parametrize("window", [0, 1, 9, 10, 18, 40])  # ends on both sides of a tile's border
@pytest.mark.parametrize("ordered", [True, False])
def test_tiles_to_visit(window, ordered):
    """`visits` lists all tiles with a visible pair of query and key. For rows in training order it lists no other tile, and
    exactly the fully visible tiles need no mask.
    """
    b = bucket(96, 1, 1, 16, "f32", window=window)
    q_tile, kv_tile = 16, 8

    @jax.jit
    def ranges(segments, positions):
        rows = Rows(segments, positions, segments, positions)
        return [tiles.visits(rows, b.spec, q_tile, kv_tile, by_keys=by_keys) for by_keys in (False, True)]

    @given(documents(b, ordered))
    @settings(max_examples=10)
    def hold(rows):
        found = [np.asarray(x) for x in ranges(*rows)]
        for row in range(B):
            seen = visible(rows[0][row], rows[1][row], b.spec).reshape(b.T // q_tile, q_tile, b.T // kv_tile, kv_tile)
            some, whole = seen.any((1, 3)), seen.all((1, 3))
            for visits, needed, unmasked in ((found[0][row], some, whole), (found[1][row], some.T, whole.T)):
                at = np.arange(needed.shape[1])[None]
                start, full_start, full_stop, stop = (visits[:, i, None] for i in range(4))
                visited, without_mask = (at >= start) & (at < stop), (at >= full_start) & (at < full_stop)
                assert not (needed & ~visited).any() and not (without_mask & ~unmasked).any()
                assert ((full_start >= start) & (full_stop <= stop)).all()
                if ordered:
                    assert (visited == needed).all() and (without_mask == unmasked).all()

    hold()
