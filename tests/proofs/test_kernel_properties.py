"""Every other kernel against its definition in float64, over random values, on eight devices.

As in test_attention_properties.py, error bounds follow from the types, element by element. `e` is the roundoff of float32, in
which each device sums. `u` is that of the compute dtype, to which results are rounded. `r` is that of the reduce dtype, in
which P partial sums are communicated. Each partial sum is rounded, and each of the P - 1 additions may round too. A matmul with
"D terms" sums D products for each element.
"""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_bounds import EXACT as e
from kernel_bounds import ROUNDOFF

from jaxtrain.kernels import rope
from jaxtrain.kernels.cross_entropy import chunked_cross_entropy
from jaxtrain.kernels.dot import dot
from jaxtrain.kernels.embedding import TABLE, embed
from jaxtrain.kernels.norm import rms_norm
from jaxtrain.kernels.numerics import DTYPES, Numerics
from jaxtrain.models.zero import Zero
from jaxtrain.sharding import make_placement, to_block

TYPES = {"f32": ("f32", "f32"), "bf16": ("bf16", "bf16"), "bf16, reduced in f32": ("bf16", "f32")}  # (compute, reduce)
B, T, D, F, H, V = 4, 6, 16, 24, 8, 40

seeds = st.integers(0, 999)
sizes = st.sampled_from([1e-3, 1.0, 30.0])


@functools.cache
def placement():
    run = helpers.tiny({"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2})
    return make_placement(run, helpers.devices_of(run))


P = 8  # devices, and so partial sums


def normal(seed: int, *shapes: tuple[int, ...], dtype: str = "f32", size: float = 1.0) -> list[np.ndarray]:
    """Return random arrays whose numbers the dtype represents exactly. `size` scales the first array."""
    rng = np.random.default_rng(seed)
    sizes = (size, *(1.0,) * (len(shapes) - 1))
    return [
        np.asarray((s * rng.standard_normal(x)).astype(np.float32), DTYPES[dtype]) for s, x in zip(sizes, shapes, strict=True)
    ]


def wide(*arrays) -> list[np.ndarray]:
    return [np.asarray(x).astype(np.float64) for x in arrays]


def within(got, wanted, limit, what: str) -> None:
    ratio = np.abs(np.asarray(got).astype(np.float64) - wanted) / np.maximum(limit, 1e-300)
    assert np.isfinite(ratio).all() and ratio.max() <= 1, f"{what}: {ratio.max()} of the bound"


def numerics(types: str) -> tuple[Numerics, float, float]:
    compute, reduce = TYPES[types]
    return Numerics(DTYPES[compute], DTYPES[reduce], DTYPES["f32"]), ROUNDOFF[compute], ROUNDOFF[reduce]


def zero_of(types: str) -> Zero:
    how = dict.fromkeys(("reduce_once", "gather_once", "sums_once"), False)
    return Zero(placement(), numerics(types)[0], **how)


def on_shards(ins: tuple, outs: tuple):
    """Return a decorator that runs a function on the shards of arrays with these logical axes."""
    p = placement()
    return lambda f: jax.jit(p.shard_map(f, tuple(map(p.spec, ins)), tuple(map(p.spec, outs))))


on = pytest.mark.parametrize("types", TYPES)


@on
def test_dot(types):
    """y = x w: D terms. dx = dy w^T: F terms, in partial sums in the compute dtype. dw = x^T dy: B T terms, in partial sums in
    the reduce dtype.
    """
    n, u, r = numerics(types)
    p, zero = placement(), zero_of(types)
    residual, weight, hidden = ("batch", "residual", None), ("embed", "mlp"), ("batch", "sequence", "mlp")

    @on_shards((residual, weight, hidden), (hidden, residual, weight))
    def run(x, w, dy):
        y, back = jax.vjp(lambda x, w: dot("BTD,DF->BTF", to_block(x, p), zero.gather_weight(w, weight), n), x, w)
        return y, *back(dy)

    @given(seeds, sizes)
    def compare(seed, size):
        x, w, dy = normal(seed, (B, T, D), (D, F), (B, T, F), dtype=TYPES[types][0], size=size)
        y, dx, dw = run(x, w.astype(np.float32), dy)
        x, w, dy = wide(x, w, dy)
        within(y, x @ w, D * e * (abs(x) @ abs(w)) + u * abs(x @ w), "y")
        size_of_dx, size_of_dw = abs(dy) @ abs(w).T, np.einsum("btd,btf->df", abs(x), abs(dy))
        within(dx, dy @ w.T, (F * e + (P + 1) * u) * size_of_dx, "dx")
        within(dw, np.einsum("btd,btf->df", x, dy), (B * T * e + u + (P + 1) * r) * size_of_dw, "dw")

    compare()


@on
@pytest.mark.parametrize(("axes", "offset"), [(("batch", "residual", None), 0.0), (("batch", "sequence", "heads", None), 1.0)])
def test_norm(types, axes, offset):
    """1 / rms is off by c = (D / 2 + 8) e of itself: a mean of D squares, halved by the root.

    With n = x / rms, d = dy w and m = mean(d n): y = n w and dx = (d - n m) / rms. dw = sum(n dy) over tokens, in partial sums,
    each rounded to the compute dtype.
    """
    _, u, r = numerics(types)
    eps, zero = 1e-5, zero_of(types)
    shape = (B, T, D) if len(axes) == 3 else (B, T, 4, H)
    axis, width = ("embed", D) if len(axes) == 3 else ("head_dim", H)

    @on_shards((axes, (axis,), axes), (axes, axes, (axis,)))
    def run(x, w, dy):
        y, back = jax.vjp(lambda x, w: rms_norm(x, zero.gather_weight(w, (axis,)), eps, offset), x, w)
        return y, *back(dy)

    @given(seeds, sizes)
    def compare(seed, size):
        x, w, dy = normal(seed, shape, (width,), shape, dtype=TYPES[types][0], size=size)
        y, dx, dw = run(x, w.astype(np.float32), dy)
        x, w, dy = wide(x, w, dy)
        w = w + offset
        inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        normal_x, d, c = x * inverse, dy * w, (width / 2 + 8) * e
        m, size_of_m = (d * normal_x).mean(-1, keepdims=True), abs(d * normal_x).mean(-1, keepdims=True)
        tokens = tuple(range(x.ndim - 1))
        within(y, normal_x * w, (c + u) * abs(normal_x * w), "y")
        wanted = inverse * (d - normal_x * m)
        spread = inverse * (abs(d) + abs(normal_x) * size_of_m)
        within(dx, wanted, (4 * c + width * e) * spread + u * abs(wanted), "dx")
        size_of_dw = abs(normal_x * dy).sum(tokens)
        within(dw, (normal_x * dy).sum(tokens), (c + x.size / width * e + u + (P + 1) * r) * size_of_dw, "dw")

    compare()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rope(dtype):
    """A pair is rotated by its position times a frequency. The frequency, a power of the base, is off by some 64 e of itself.

    The angle is rounded; sine and cosine add 4 e. Then come two products and a sum. The gradient is rotated back by the same
    angle.
    """
    base, u = 10_000.0, ROUNDOFF[dtype]

    @jax.jit
    def run(x, positions, dy):
        cos, sin = rope.tables(positions, rope.frequencies(H, base))
        y, back = jax.vjp(lambda x: rope.rotate(x, cos, sin), x)
        return y, *back(dy)

    def turned(x, angle, sign):
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angle)[:, :, None], sign * np.sin(angle)[:, :, None]
        off = (66 * e * angle + 8 * e)[:, :, None] * (abs(a) + abs(b))
        y = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return y, np.concatenate([off, off], axis=-1) + u * abs(y)

    @given(seeds, sizes, st.sampled_from([10, 10_000, 1_000_000]))
    def compare(seed, size, furthest):
        x, dy = normal(seed, (B, T, 3, H), (B, T, 3, H), dtype=dtype, size=size)
        positions = np.random.default_rng(seed).integers(0, furthest, (B, T)).astype(np.int32)
        y, dx = run(x, positions, dy)
        angle = positions[..., None] * base ** (-np.arange(0, H, 2) / H)
        within(y, *turned(*wide(x), angle, 1), "y")
        within(dx, *turned(*wide(dy), angle, -1), "dx")

    compare()


def test_stretched_frequencies():
    """With Llama 3's scaling for 4,096 positions, pairs that rotate four times or more keep their frequency. The frequency of
    pairs that rotate once or less is divided by 8.
    """
    freq = 2 * np.pi / np.array([100.0, 1024.0, 2048.0, 4096.0, 40000.0])
    got = rope.llama3_scaling(jnp.asarray(freq), 8.0, 1.0, 4.0, 4096)
    share = np.array([1.0, 1.0, 1 / 3, 0.0, 0.0])  # the fraction of the frequency that stays: linear in the number of turns
    np.testing.assert_allclose(got, freq * (share + (1 - share) / 8), rtol=1e-5)
    np.testing.assert_allclose(rope.linear_scaling(jnp.asarray(freq), 4.0), freq / 4, rtol=1e-6)


@on
def test_embedding(types):
    """Output rows equal the table's rows. A table row's gradient is the sum over its token's occurrences, in partial sums."""
    n, _, r = numerics(types)
    p, zero = placement(), zero_of(types)
    residual = ("batch", "residual", None)

    @on_shards((TABLE, ("batch", "sequence"), residual), (residual, TABLE))
    def run(table, tokens, dy):
        columns = p.mesh_axes("embed")
        x, back = jax.vjp(lambda table: embed(zero.local_weight(table, TABLE), tokens, p, columns, n.compute), table)
        return x, *back(dy)

    @given(seeds, sizes, st.integers(1, V))
    def compare(seed, size, different):
        table, dy = normal(seed, (V, D), (B, T, D), dtype=TYPES[types][0], size=size)
        tokens = np.random.default_rng(seed).integers(0, different, (B, T)).astype(np.int32)
        tokens[0, :2] = V // 2 - 1, V // 2  # on both sides of a border between shards
        x, d_table = run(table.astype(np.float32), tokens, dy)
        assert (np.asarray(x) == table[tokens]).all()
        (dy,) = wide(dy)
        wanted, size_of_it = np.zeros((V, D)), np.zeros((V, D))
        np.add.at(wanted, tokens, dy)
        np.add.at(size_of_it, tokens, abs(dy))
        within(d_table, wanted, (B * T * e + (P + 1) * r) * size_of_it, "d_table")

    compare()


@pytest.mark.parametrize(
    ("dtype", "chunk", "softcap", "z_loss", "split"),
    [("f32", 7, 0.0, 0.0, 4), ("f32", 30, 2.0, 0.1, 1), ("bf16", 7, 0.0, 0.1, 4)],
)
def test_cross_entropy(dtype, chunk, softcap, z_loss, split):
    """A logit l is off by d = (D + 2) e |x| |w|, and with a soft cap c by 8 e c more.

    So a token's loss is off by the error of its logits plus (V + 8) e, and its probabilities q by Q = q (d + sum(q d) + (V + 8)
    e). dl = weight (q - target) is rounded. The z-loss z log(Z)^2 adds its slope 2 z log(Z) times q to dl. The loss's error
    grows by the error of log(Z) times this slope.
    """
    n, u = 30, ROUNDOFF[dtype]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:split]), ("tensor",))
    of_head = jax.sharding.PartitionSpec(None, "tensor")
    everywhere = jax.sharding.PartitionSpec()
    precision = jax.lax.Precision.HIGHEST if dtype == "f32" else jax.lax.Precision.DEFAULT

    @jax.jit
    def run(x, head, targets, weights):
        def local(x, head, targets, weights):
            how = {"chunk": chunk, "softcap": softcap, "z_loss": z_loss, "vocab_axes": ("tensor",) if split > 1 else ()}
            loss, dx, d_head, _ = chunked_cross_entropy(x, head, targets, weights, **how, precision=precision, gradients=True)
            return loss, jax.lax.psum(dx.astype(jnp.float32), "tensor"), d_head

        specs = (everywhere, of_head, everywhere, everywhere)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(everywhere, everywhere, of_head), check_vma=False)(
            x, head, targets, weights
        )

    @given(seeds, st.sampled_from([1e-2, 1.0, 5.0]))
    def compare(seed, size):
        x, head = normal(seed, (n, D), (D, V), dtype=dtype, size=size)
        rng = np.random.default_rng(seed)
        targets, weights = rng.integers(0, V, n).astype(np.int32), ((rng.random(n) < 0.7) * rng.random(n)).astype(np.float32)
        loss, dx, d_head = run(x, head, targets, weights)
        x, head, w = wide(x, head, weights)
        raw, d = x @ head, (D + 2) * e * (abs(x) @ abs(head))
        slope, d_slope = np.ones_like(raw), 0.0
        if softcap:
            t = np.tanh(raw / softcap)
            slope, d_slope, raw = 1 - t * t, 2 * (8 * e + d / softcap), softcap * t
            d = d * slope + 8 * e * softcap
        top = raw.max(-1, keepdims=True)
        q = np.exp(raw - top)
        total = q.sum(-1, keepdims=True)
        q = q / total
        at = np.arange(n), targets
        d = d + 4 * e * abs(raw - top)
        log_z, off_z = (np.log(total) + top)[:, 0], (q * d).sum(-1) + (V + 8) * e * (1 + abs(top[:, 0]))
        losses, by_z = log_z - raw[at] + z_loss * log_z**2, 2 * z_loss * abs(log_z)
        off = (1 + by_z) * off_z + d[at] + (V + 8) * e * abs(raw[at]) + 4 * e * z_loss * log_z**2
        within(loss, (w * losses).sum(), (w * (off + n * e * abs(losses))).sum(), "loss")
        is_target, Q = np.eye(V)[targets], q * (d + (q * d).sum(-1, keepdims=True) + (V + 8) * e)
        Q = Q * (1 + by_z)[:, None] + q * (2 * z_loss * off_z + 4 * e * (1 + by_z))[:, None]
        q = q * (1 + 2 * z_loss * log_z)[:, None]
        dl = w[:, None] * (q - is_target)
        off = w[:, None] * (Q * slope + abs(q - is_target) * (d_slope + 4 * e)) + u * abs(dl * slope)
        dl = dl * slope
        size_of_dx = abs(dl) @ abs(head).T
        within(dx, dl @ head.T, off @ abs(head).T + (V * e + (split + 1) * u) * size_of_dx, "dx")
        within(d_head, x.T @ dl, abs(x).T @ off + n * e * (abs(x).T @ abs(dl)), "d_head")
        assert not np.asarray(dx)[weights == 0].any()

    compare()
