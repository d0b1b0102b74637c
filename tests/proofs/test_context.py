"""Attention with a sequence over several devices equals attention on one device, for every kernel, method and kind of row."""

from types import SimpleNamespace

import cudnn_emulator
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.config.context import Context
from jaxtrain.config.schema import ConfigError
from jaxtrain.kernels import context_parallel
from jaxtrain.kernels.attention import Rows, Spec, cudnn, reference
from jaxtrain.kernels.context_parallel.split import Split

B, T, H = 2, 64, 8
WAYS = {
    "ring 2": Context(1, 2),
    "ring 4": Context(1, 4),
    "ring 8": Context(1, 8),
    "gather 4": Context(1, 4, gathered=True),
    "ulysses 4": Context(4, 1),
    "ulysses 2 x ring 2": Context(2, 2),
    "ulysses 2 x gather 4": Context(2, 4, gathered=True),
}
# First tokens of documents. The first row's documents: shorter than a chunk, across a border, one token, over several chunks.
DOCUMENTS = ([0, 5, 30, 31], [0, 20, 60])
PADDED = 3  # padding tokens at the end of the second row
# With a ring of 4, a chunk has 8 tokens, and a window of 10 reaches one token into the chunk before the previous one.
CASES = {
    "one document, window": Spec(H, "f32", False, 1, window=10),
    "packed": Spec(H, "f32", True, 6),
    "packed, soft cap": Spec(H, "f32", True, 6, softcap=1.5),
    "packed, window within a chunk": Spec(H, "f32", True, 6, window=5),
    "packed, window over several chunks": Spec(H, "f32", True, 6, window=40),
    "packed, sinks": Spec(H, "f32", True, 6, sinks=True),
    "packed, window, sinks": Spec(H, "f32", True, 6, window=5, sinks=True),
}


def make_rows(spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    segments, positions = np.ones((B, T), np.int32), np.tile(np.arange(T, dtype=np.int32), (B, 1))
    if spec.packed:
        for row, starts in enumerate(DOCUMENTS):
            for number, start in enumerate(starts):
                segments[row, start:], positions[row, start:] = number + 1, np.arange(T - start)
        segments[1, -PADDED:], positions[1, -PADDED:] = 0, 0
    return segments, positions


def ordered(x: np.ndarray, way: Context) -> np.ndarray:
    order = list(way.chunks)
    return x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, order].reshape(x.shape)


def compare(way: Context, spec: Spec, kernel: str, heads: int = 8, kv_heads: int = 8) -> float:
    """Return the largest difference of output and gradients from the definition on one device."""
    rng = np.random.default_rng(0)
    q, do = (rng.normal(size=(B, T, heads, H)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(B, T, kv_heads, H)).astype(np.float32) for _ in range(2))
    sinks_N = (1 + rng.normal(size=heads)).astype(np.float32) if spec.sinks else None
    segments, positions = make_rows(spec)
    # Outputs of padding must be finite, but may have any value. No gradient depends on them.
    do *= (segments > 0)[:, :, None, None]
    split = Split(way)

    def both(attention, *args):
        """Return output and gradients, compiled together."""

        def run(q, k, v, do, *rows):
            out, back = jax.vjp(lambda q, k, v, sinks: attention(q, k, v, sinks, *rows), q, k, v, sinks_N)
            return out, *back(do)

        return [x if x is None else np.asarray(x) for x in jax.jit(run)(*args)]

    def spread(q, k, v, sinks, segments, positions):
        def local(q, k, v, sinks, segments, positions):
            prepared = context_parallel.prepare(Rows(segments, positions, segments, positions), spec, kernel, split)
            return context_parallel.attention(q, k, v, prepared, spec, kernel, split, sinks)

        mesh = Mesh(np.array(jax.devices()[: way.size]), ("seq",))
        tokens = P(None, "seq")
        specs = (tokens, tokens, tokens, P(), tokens, tokens)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)(
            q, k, v, sinks, segments, positions
        )

    def definition(q, k, v, sinks, segments, positions):
        rows = Rows(segments, positions, segments, positions)
        return reference.attention(q, k, v, rows, spec) if sinks is None else with_sinks(q, k, v, sinks, rows, spec)

    arrays = (q, k, v, do, segments, positions)
    real = ordered(segments, way)[:, :, None, None] > 0
    worst = 0.0
    for a, b in zip(both(spread, *(ordered(x, way) for x in arrays)), both(definition, *arrays), strict=True):
        if a is None:
            continue
        assert np.isfinite(a).all()
        if a.ndim == 1:  # the sinks' gradients: sums over some 100 tokens of numbers near 1
            worst = max(worst, float(np.abs(a - b).max()) / 10)
            continue
        worst = max(worst, float(np.abs(np.where(real, a - ordered(b, way), 0.0)).max()))
    return worst


def with_sinks(q, k, v, sinks_N, rows, spec):
    """Return attention with sinks by the definition: a sink is another key that all queries see, and its value is zero."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / H**0.5
    scores = jnp.where(reference.visible(rows, spec)[:, None], scores, -jnp.inf)
    column = jnp.broadcast_to(sinks_N[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")


TOLERANCE = 1e-5  # float32, for sums of a few dozen terms near 1


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate cuDNN's primitives. Let the kernel `chunked` use blocks that do not divide a rank's chunk of the sequence."""
    monkeypatch.setattr(cudnn, "fused", cudnn_emulator.MODULE)
    monkeypatch.setattr("jaxtrain.kernels.attention.chunked.BLOCK", 5)


# (way, case, kernel, key/value heads for 8 query heads). If there are fewer key/value heads than ranks, several ranks hold
# each.
OFTEN = [
    ("ring 4", "one document, window", "cudnn", 4),
    ("ring 4", "packed, sinks", "cudnn", 4),
    ("ring 4", "packed, window, sinks", "reference", 8),
    ("ulysses 2 x ring 2", "packed", "cudnn", 4),
    ("ring 2", "packed, soft cap", "chunked", 2),
    ("gather 4", "packed", "chunked", 1),
    ("gather 4", "packed, window over several chunks", "reference", 8),
    ("ulysses 4", "packed", "reference", 2),
]
MORE = [
    ("ulysses 2 x ring 2", "packed, window within a chunk", "cudnn", 4),
    ("ulysses 2 x gather 4", "packed", "reference", 8),
    ("ring 8", "packed", "reference", 8),
    ("gather 4", "packed, window, sinks", "cudnn", 4),
]


@pytest.mark.parametrize("asked", helpers.few([*OFTEN, *MORE], *OFTEN), ids=str)
def test_attention_over_several_devices_is_that_of_one(asked):
    """For cuDNN the test covers the arguments of its calls and the use of its results; tests/gpu tests the kernel itself."""
    way, case, kernel, kv_heads = asked
    assert compare(WAYS[way], CASES[case], kernel, 8, kv_heads) < TOLERANCE


# Rows of 12 tokens for which cuDNN has as many documents as there may be, and padding; two documents; nothing but padding
ROWS = ([2, 2, 2, 2], [5, 7], [])


def gradients(q, k, v, do, rows, spec):
    """Return the gradients of attention on the whole rows, then those of two blocks of ring attention: a diagonal block, and
    one of earlier keys.
    """

    def block(diagonal):
        described = cudnn.describe_block(rows, spec, diagonal)
        out, lse = cudnn.block_forward(q, k, v, described, spec, diagonal)
        return cudnn.block_backward(q, k, v, out, lse, do, described, spec, diagonal)

    whole = jax.vjp(lambda *qkv: cudnn.attention(*qkv, cudnn.prepare(rows, spec), spec), q, k, v)[1](do)
    return [*whole, *block(True), *block(False)]


# (rows, query heads) of a part: a group of heads in single rows, and half of a group
@pytest.mark.parametrize(("packed", "size"), [pytest.param(True, (1, 2), marks=pytest.mark.more), (False, (3, 1))])
def test_parts_of_a_backward_pass_are_the_whole(packed, size, monkeypatch):
    spec = Spec(head_dim=4, dtype="f32", packed=packed, max_segments=4)
    segments = np.full((3, 12), 0 if packed else 1, np.int32)
    positions = np.tile(np.arange(12, dtype=np.int32), (3, 1))
    for row, lengths in enumerate(ROWS if packed else ()):
        segments[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
        positions[row, : sum(lengths)] = [at for length in lengths for at in range(length)]
    rows = Rows(segments, positions, segments, positions)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(at, (3, 12, n, 4)) for at, n in zip(keys, (4, 2, 2, 4), strict=True))
    do = jnp.where(segments[:, :, None, None] > 0, do, 0)
    want = jax.jit(lambda *given: gradients(*given, rows, spec))(q, k, v, do)
    defined = jax.jit(lambda q, k, v: jax.vjp(lambda *qkv: reference.attention(*qkv, rows, spec), q, k, v)[1](do))(q, k, v)
    for a, b in zip(want, defined, strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    taken = []

    def bind(part, *rest, **static):
        taken.append((part.shape[0], part.shape[2]))
        return cudnn_emulator.backward(part, *rest, **static)

    watched = SimpleNamespace(**vars(cudnn_emulator.MODULE))
    watched._dot_product_attention_bwd_p_wrapper = SimpleNamespace(bind=bind)
    monkeypatch.setattr(cudnn, "fused", watched)
    monkeypatch.setattr(cudnn, "backward_chunk", lambda *shape, **how: size)
    got = jax.jit(lambda *given: gradients(*given, rows, spec))(q, k, v, do)
    assert set(taken) == {size} and len(taken) == 3 * (3 // size[0]) * (4 // size[1])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_blocks_whose_offsets_do_not_fit_are_refused():
    q, rows = jax.ShapeDtypeStruct((2, 1 << 19, 32, 128), "bfloat16"), jax.ShapeDtypeStruct((2, 1 << 19), "int32")
    spec = Spec(128, "bf16", True, 4)

    def run(q, rows):
        described = cudnn.describe_block(Rows(rows, rows, rows, rows), spec, True)
        return cudnn.block_forward(q, q, q, described, spec, True)

    with pytest.raises(ConfigError, match="mesh.seq"):
        jax.eval_shape(run, q, rows)
