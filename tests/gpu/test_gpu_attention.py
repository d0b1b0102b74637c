"""Attention against its definition in float32, forward and backward, for every kernel; also sharded over four ranks.

The tolerance follows, element by element, from the roundings of a correct kernel (kernel_bounds.py).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import kernel_bounds
import numpy as np
import pytest
import ranks_on_one_device

from jaxtrain.config.context import make_context
from jaxtrain.config.schema import ConfigError
from jaxtrain.kernels import attention, context_parallel
from jaxtrain.kernels.attention import Rows, reference, support
from jaxtrain.kernels.context_parallel.split import Split
from jaxtrain.models.attention import Kernel

RANKS = 4
# (context parallelism, T, query heads, key/value heads, head_dim, window, packed)
SHAPES = [
    *(("", T, N, K, H, 0, True) for T in (1024, 2048, 4096) for N, K in ((8, 2), (32, 8)) for H in (64, 128)),
    *(("", 2048, 32, 8, H, 500, True) for H in (64, 128)),
    ("", 2048, 32, 8, 128, 0, False),
    ("", 2048, 32, 8, 128, 500, False),
]
SHARDED = [
    *(("ring", 4096, 32, 8, 128, window, packed) for window, packed in ((0, True), (0, False), (300, True), (1500, True))),
    ("ring", 4096, 8, 8, 64, 0, True),
    *((how, 4096, 32, 8, 128, 0, packed) for how in ("gather", "ulysses") for packed in (True, False)),
    ("ulysses", 4096, 32, 2, 128, 500, True),
]
SMALL = [
    ("", 64, 4, 2, 16, 0, True),
    ("ring", 64, 4, 2, 16, 0, True),
    ("gather", 64, 4, 2, 16, 20, True),
]


def documents(T: int, packed: bool, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return segments and positions, int32 (3, T): rows of many documents, one document, and documents before padding."""
    rng = np.random.default_rng(seed)
    segments, positions = np.ones((3, T), np.int32), np.tile(np.arange(T, dtype=np.int32), (3, 1))
    if not packed:
        return segments, positions
    for row, (count, end) in {0: (20, T), 2: (7, T - T // 5)}.items():
        starts = [0, *sorted(rng.choice(np.arange(1, end), count - 1, replace=False).tolist())]
        segments[row] = positions[row] = 0
        for number, (first, stop) in enumerate(zip(starts, [*starts[1:], end], strict=True), 1):
            segments[row, first:stop] = number
            positions[row, first:stop] = np.arange(stop - first)
    return segments, positions


def drawn(shape: tuple[Any, ...], dtype: str = "bf16") -> tuple[Rows, list[jax.Array]]:
    """Return rows of documents, and random q, k, v and do (3, T, heads, H)."""
    _, T, N, K, H, _, packed = shape
    segments, positions = (jnp.asarray(x) for x in documents(T, packed, seed=T + N + H))
    keys = jax.random.split(jax.random.key(0), 4)
    types = jnp.float32 if dtype == "f32" else jnp.bfloat16
    arrays = [jax.random.normal(key, (3, T, n, H), types) for key, n in zip(keys, (N, K, K, N), strict=True)]
    return Rows(segments, positions, segments, positions), arrays


def exact_and_bounds(q: Any, k: Any, v: Any, do: Any, rows: Rows, spec: Any, blocks: bool) -> tuple[Any, Any]:
    """Return (o, dq, dk, dv) by the definition in float32, and the error bound of each."""
    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    def head(item: Any) -> Any:  # one row and one key/value head
        q, k, v, do, segments, positions = item
        visible = reference.visible(Rows(*(x[None] for x in (segments, positions, segments, positions))), spec)[0]
        how = {"dtype": spec.dtype, "softcap": spec.softcap, "blocks": blocks, "xp": jnp, "einsum": einsum}
        return kernel_bounds.attention(q, k, v, do, visible, **how)

    B, T, _, H = q.shape
    K = k.shape[2]

    def by_head(x: jax.Array) -> jax.Array:  # (B, T, N or K, H) -> (B K, T, G or 1, H)
        return jnp.moveaxis(x.astype(jnp.float32).reshape(B, T, K, -1, H), 2, 1).reshape(B * K, T, -1, H)

    def merge_heads(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, K, T, -1, H), 1, 2).reshape(B, T, -1, H)

    segments, positions = (jnp.repeat(x, K, axis=0) for x in rows[:2])
    items = (by_head(q), by_head(k)[:, :, 0], by_head(v)[:, :, 0], by_head(do), segments, positions)
    return jax.tree.map(merge_heads, jax.lax.map(head, items))


def on_ranks(how: str, spec: Any, kernel: str, heads: tuple[int, int], rows: Rows) -> Any:
    """Return a function `(q, k, v, do) -> (o, dq, dk, dv)` of unsharded arrays, whose sequences RANKS ranks share.

    Each rank runs the trainer's own functions, forward and backward. ranks_on_one_device computes all ranks and their
    communication on one device.
    """
    layout = make_context(how, RANKS, *heads)
    split, order = Split(layout), np.asarray(layout.chunks)

    def shard(x: Any) -> Any:  # (B, T, ...) -> (B, tokens of a rank, ...) of each rank
        chunks = x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, order]
        return jnp.split(chunks.reshape(x.shape), RANKS, axis=1)

    def unshard(by_rank: Any) -> Any:
        x = jnp.concatenate(by_rank, axis=1)
        return x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, np.argsort(order)].reshape(x.shape)

    def rank(q: Any, k: Any, v: Any, do: Any, segments: Any, positions: Any) -> Any:
        prepared = context_parallel.prepare(Rows(segments, positions, segments, positions), spec, kernel, split)
        o, back = jax.vjp(lambda q, k, v: context_parallel.attention(q, k, v, prepared, spec, kernel, split), q, k, v)
        return o, *back(do)

    def all_ranks(q: Any, k: Any, v: Any, do: Any) -> Any:
        args = [shard(x) for x in (q, k, v, do, rows.q_segments, rows.q_positions)]
        found = ranks_on_one_device.run(rank, split.axis, list(zip(*args, strict=True)))
        return tuple(unshard(x) for x in zip(*found, strict=True))

    return all_ranks


def attention_errors(
    kernel_name: str, shape: tuple[Any, ...], dtype: str = "bf16", softcap: float = 0.0
) -> dict[str, tuple[float, float]]:
    """Return {"o", "dq", "dk", "dv": (largest error, largest ratio of error to bound)} for a shape like those of SHAPES.

    Skips the test if the kernel cannot compute the shape on this device.
    """
    how, T, N, K, H, window, packed = shape
    spec = attention.Spec(H, dtype, packed, 32 if packed else 1, window, softcap)
    skip_unless_able(kernel_name, spec, T)
    rows, (q, k, v, do) = drawn(shape, dtype)
    kernel = Kernel(kernel_name, (spec,))

    def on_one(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, back = jax.vjp(lambda q, k, v: kernel(q, k, v, kernel.prepare(rows), 0), q, k, v)
        return o, *back(do)

    measured = jax.jit(on_ranks(how, spec, kernel_name, (N, K), rows) if how else on_one)
    real = rows.q_segments[:, :, None, None] > 0
    do = jnp.where(real, do, 0)
    exact, bounds = jax.jit(lambda q, k, v, do: exact_and_bounds(q, k, v, do, rows, spec, bool(how)))(q, k, v, do)
    found = {}
    for name, got, want, bound in zip(("o", "dq", "dk", "dv"), measured(q, k, v, do), exact, bounds, strict=True):
        # The output of padding is undefined. Its gradients are 0, because the output's gradient is 0 there.
        error = jnp.abs(jnp.where(real if name == "o" else True, got.astype(jnp.float32), 0) - want)
        ratio = float((error / (bound + 1e-6)).max())  # 1e-6: rounding of the float32 definition itself
        found[name] = float(error.max()), ratio if math.isfinite(ratio) else math.inf
    return found


# Head dimensions with tiles of their own and padded ones; lengths that fill no tile; no grouped queries.
OF_PALLAS = [
    *(
        ("", T, N, K, H, window, True)
        for T, N, K, H, window in ((2048, 8, 2, 256, 0), (1000, 8, 1, 192, 300), (1000, 8, 8, 96, 0))
    ),
    ("ring", 4096, 8, 2, 256, 0, True),
]
# cuDNN runs first: if another kernel breaks the device, cuDNN's tests have already passed.
CASES = [
    *(pytest.param("cudnn", shape, marks=pytest.mark.gpu) for shape in (*SHAPES, *SHARDED)),
    *(pytest.param("pallas", shape, marks=pytest.mark.gpu) for shape in (*SHAPES, *SHARDED, *OF_PALLAS)),
    *(("chunked", shape) for shape in SMALL),
]


def name_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    how, T, N, K, H, window, packed = value
    facts = [how, f"T{T}", f"heads{N}:{K}", f"dim{H}", f"window{window}" * bool(window), "packed" * packed]
    return "-".join(filter(None, facts))


@pytest.mark.parametrize(("kernel", "shape"), CASES, ids=name_of)
def test_attention(kernel, shape, record_property):
    check(kernel, shape, record_property)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[-3], OF_PALLAS[0]], ids=name_of)
def test_soft_cap_by_pallas_alone(shape, record_property):
    check("pallas", shape, record_property, "bf16", 30.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[-1], *(s for s in SHAPES if s[1] == 2048 and s[2] == 32 and s[6])], ids=name_of)
def test_forward_in_e4m3(shape):
    """Compare the kernel with the emulation of its roundings, which tests/proofs/test_attention_fp8.py compares with the
    definition.

    Kernel and emulation round the softmax weights by at most 2^-4 each, after different scaling. Tensor cores keep at least 13
    bits of a sum: of H products, which moves scores by d = H 2^-13 sum of |q k| / sqrt(H), and of 128 keys. A weight is off by
    at most exp(2 d) - 1 of itself.
    """
    _, T, N, K, H, window, packed = shape
    spec = attention.Spec(H, "bf16", packed, 32 if packed else 1, window, fp8=attention.KERNEL)
    skip_unless_able("pallas", spec, T)
    rows, (q, k, v, _) = drawn(shape)

    @functools.partial(jax.jit, static_argnums=3)
    def forward(q: Any, k: Any, v: Any, spec: Any) -> Any:
        module = attention.implementation("pallas", spec)
        return module.block_forward(q, k, v, module.prepare(rows, spec), spec, True)

    emulated = dataclasses.replace(spec, fp8=attention.EMULATED)
    (out, lse), (wanted, wanted_lse), (size, _) = (
        forward(q, k, v, spec),
        forward(q, k, v, emulated),
        forward(q, k, abs(v), emulated),
    )
    lengths = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1).max() for x in (q, k))
    d = H**0.5 * 2.0**-13 * 1.07**2 * math.prod(map(float, lengths))  # by Cauchy and Schwarz; rounding adds a 16th to each
    real = rows.q_segments[:, :, None] > 0
    apart = jnp.where(real[..., None], abs(out - wanted), 0)
    assert (apart <= (2 * 2.0**-4 + 2.0**-6 + math.exp(2 * d) - 1) * size + 1e-6).all()
    assert (jnp.where(real, abs(jnp.swapaxes(lse - wanted_lse, 1, 2)), 0) <= d + 1e-4).all()


@pytest.mark.gpu
def test_pallas_gives_the_same_bits_each_time():
    """With deterministic=True, forward and backward pass of a packed batch with grouped queries repeat bit for bit."""
    T, H = SHAPES[0][1], SHAPES[0][4]
    spec = attention.Spec(H, "bf16", True, 32, deterministic=True)
    skip_unless_able("pallas", spec, T)
    rows, (q, k, v, do) = drawn(SHAPES[0])
    kernel = Kernel("pallas", (spec,))

    @jax.jit
    def both(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, back = jax.vjp(lambda q, k, v: kernel(q, k, v, kernel.prepare(rows), 0), q, k, v)
        return o, *back(do)

    first = both(q, k, v, do)
    for _ in range(3):
        assert all(jnp.array_equal(a, b) for a, b in zip(first, both(q, k, v, do), strict=True))


def skip_unless_able(kernel: str, spec: attention.Spec, T: int) -> None:
    try:
        support.choose_attention(kernel, [(spec, T)], attention.Hardware.from_device(jax.devices()[0]))
    except ConfigError as error:
        pytest.skip(str(error))


def check(kernel: str, shape: tuple[Any, ...], record_property: Any, *more: Any) -> None:
    found = attention_errors(kernel, shape, *more)
    record_property("errors", {name: error for name, (error, _) in found.items()})
    record_property("ratio", max(ratio for _, ratio in found.values()))
    assert not {name: pair for name, pair in found.items() if not pair[1] <= 1}, "(error, ratio to the bound)"


@pytest.mark.parametrize("shape", [SHARDED[0], SHARDED[2], SHARDED[7]], ids=name_of)
def test_sharded_sequences_call_cudnn(shape):
    """Lowered for a GPU, each of four ranks calls cuDNN's forward pass once for each block, and its backward pass at least
    once.
    """
    how, T, N, K, H, window, packed = shape
    spec = attention.Spec(H, "bf16", packed, 32 if packed else 1, window)
    segments, positions = (jnp.asarray(x) for x in documents(T, packed, seed=0))
    both = on_ranks(how, spec, "cudnn", (N, K), Rows(segments, positions, segments, positions))
    q, kv = (jax.ShapeDtypeStruct((3, T, heads, H), jnp.bfloat16) for heads in (N, K))
    text = jax.jit(both).trace(q, kv, kv, q).lower(lowering_platforms=("cuda",)).as_text()
    blocks = 1 if how == "ulysses" or window else 2 + RANKS - 1  # on the diagonal, below it, other ranks' blocks
    assert text.count("@__cudnn$fmhaSoftmax(") == blocks * RANKS
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") >= blocks * RANKS
