"""The model against an independent numpy transformer; documents, remat, decoding, sampling, and the loss."""

import collections
import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import generate, loss
from jaxtrain.activations import KEPT
from jaxtrain.config import Model
from jaxtrain.kernels.attention import implementation
from jaxtrain.kernels.cross_entropy import chunked_cross_entropy
from jaxtrain.kernels.dot import Numerics
from jaxtrain.models.transformer import empty_cache
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.topology import parse
from jaxtrain.sharding import make_placement

F32 = Numerics(jnp.dtype("float32"), jnp.dtype("float32"), jnp.dtype("float32"))
SMALL = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.d_ff": 48,
    "model.init_std": 0.2,  # large enough that every part of the model shows in the logits
    "data.seq_len": 24,
    "train.global_batch": 4,
}
# Those in XLA: Pallas is interpreted on CPU, and its masks are proved in test_attention_properties.py.
HERE = ("reference", "chunked")


@functools.cache
def params_of(run):
    """Initial parameters; norms' scales and biases are made random too, or they would not be tested."""
    params = helpers.program(run).definition.init(jax.random.key(1))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    noise = [0.3 * rng.standard_normal(a.shape).astype(np.float32) for a in leaves]
    # Matrices keep their size; one-dimensional things, stacked over layers or not, are moved.
    return jax.tree.unflatten(tree, [a + n if np.ptp(np.asarray(a)) == 0 else a for a, n in zip(leaves, noise, strict=True)])


@functools.cache
def forward(run):
    """Jitted (params, tokens, segments, positions) -> logits."""
    definition = helpers.program(run).definition

    @jax.jit
    def logits(params, tokens, segments, positions):
        model = definition.bind(params)
        return model.logits(model(tokens, segments, positions))

    return logits


# ---- The whole forward pass, written again in numpy


def oracle(params, m: Model, tokens, segments, positions) -> np.ndarray:
    """Logits (B, T, V) in float64."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + m.norm_eps) * scale

    half = m.head_dim // 2
    freq = m.rope_base ** (-np.arange(half) / half)
    if m.rope_scaling == "llama3":
        for i, f in enumerate(freq):
            wavelength = 2 * math.pi / f
            if wavelength > m.rope_original_len / m.rope_low_freq:
                freq[i] = f / m.rope_factor
            elif wavelength >= m.rope_original_len / m.rope_high_freq:
                s = (m.rope_original_len / wavelength - m.rope_low_freq) / (m.rope_high_freq - m.rope_low_freq)
                freq[i] = (1 - s) * f / m.rope_factor + s * f

    def rotate(x):  # (B, T, heads, H)
        turn = np.exp(1j * positions[:, :, None, None] * freq)
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    apart = positions[:, :, None] - positions[:, None, :]
    mask = (segments[:, :, None] == segments[:, None, :]) & (apart >= 0) & (segments[:, None, :] > 0)
    if m.sliding_window:
        mask &= apart < m.sliding_window
    x = p["embed"]["embedding"][tokens]
    for i in range(m.num_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], p["layers"])
        a = layer["attention"]
        h = norm(x, layer["attention_norm"]["scale"])
        q, k, v = (np.einsum("btd,dnh->btnh", h, a[w]) for w in ("wq", "wk", "wv"))
        if m.qkv_bias:
            q, k, v = q + a["bq"], k + a["bk"], v + a["bv"]
        if m.qk_norm:
            q, k = norm(q, a["q_norm"]["scale"]), norm(k, a["k_norm"]["scale"])
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(y, m.num_heads // m.num_kv_heads, axis=2) for y in (k, v))
        scores = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(m.head_dim)
        if m.attention_softcap:
            scores = m.attention_softcap * np.tanh(scores / m.attention_softcap)
        weights = np.where(mask[:, None], np.exp(scores), 0)
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
        x = x + np.einsum("btnh,dnh->btd", np.einsum("bnts,bsnh->btnh", weights, v), a["wo"])
        h = norm(x, layer["mlp_norm"]["scale"])
        gate = h @ layer["mlp"]["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["mlp"]["up"])) @ layer["mlp"]["down"].T
    head = p["embed"]["embedding"] if m.tied_head else p["head"]
    logits = norm(x, p["final_norm"]["scale"]) @ head.T
    return m.logit_softcap * np.tanh(logits / m.logit_softcap) if m.logit_softcap else logits


VARIANTS = {
    "plain": {},
    "tied head": {"model.tied_head": True},
    "qk norm": {"model.qk_norm": True},
    "qkv bias": {"model.qkv_bias": True},
    "window": {"model.sliding_window": 5},
    "attention softcap": {"model.attention_softcap": 0.5},
    "logit softcap": {"model.logit_softcap": 1.0},
    "llama 3 rope": {"model.rope_scaling": "llama3", "model.rope_original_len": 48, "model.head_dim": 16},
    "one key head, wide heads": {"model.num_kv_heads": 1, "model.head_dim": 20},
}
EVERYTHING = {k: v for variant in list(VARIANTS.values())[:-1] for k, v in variant.items()}
VARIANTS["everything"] = EVERYTHING


def logits_of(run) -> tuple[np.ndarray, np.ndarray]:
    """(ours, the oracle's) on one packed batch whose last tokens are padding."""
    batch = helpers.host_batch(run, 0)
    segments, positions = batch["segments"].copy(), batch["positions"].copy()
    segments[1:, -3:] = positions[1:, -3:] = 0
    rows = batch["tokens"], segments, positions
    return np.asarray(forward(run)(params_of(run), *rows)), oracle(params_of(run), run.model, *rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_numpy(variant):
    ours, theirs = logits_of(helpers.tiny(SMALL | VARIANTS[variant]))
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4 * np.abs(theirs).max())


def test_every_variant_changes_the_logits():
    """Otherwise the comparison above would pass for a feature that both sides ignore."""
    plain = {name: logits_of(helpers.tiny(SMALL | VARIANTS[name]))[1] for name in VARIANTS}
    for name, logits in plain.items():
        if name != "plain":
            assert np.abs(logits - plain["plain"]).max() > 0.01, name


# ---- Documents


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("kernel", HERE)
def test_a_documents_logits_do_not_depend_on_its_neighbours(kernel, window, monkeypatch):
    module = implementation(kernel)
    if hasattr(module, "BLOCK"):
        monkeypatch.setattr(module, "BLOCK", 8)
    # One row of data.seq_len: a config of its own for each block size, since steps are cached by config.
    run = helpers.tiny(SMALL | {"attention.impl": kernel, "model.sliding_window": window, "data.max_segments": 9})
    params, T, rng = params_of(run), run.data.seq_len, np.random.default_rng(3)
    documents = [rng.integers(0, 256, n) for n in (7, 9, 4)]
    row = np.concatenate([*documents, np.zeros(T - 20, int)]).astype(np.int32)
    segments = np.repeat([1, 2, 3, 0], [7, 9, 4, T - 20]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (7, 9, 4)] + [np.zeros(T - 20, int)]).astype(np.int32)
    packed = np.asarray(forward(run)(params, row[None], segments[None], positions[None]))[0]
    start = 0
    for document in documents:
        n = len(document)
        alone = np.zeros((3, 1, T), np.int32)
        alone[0, 0, :n], alone[1, 0, :n], alone[2, 0, :n] = document, 1, np.arange(n)
        logits = np.asarray(forward(run)(params, *alone))[0, :n]
        np.testing.assert_allclose(packed[start : start + n], logits, rtol=1e-5, atol=1e-5)
        start += n


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("kernel", HERE)
def test_gradients_prove_causality(kernel, window):
    """d logits[t] / d embedding of token s: exactly 0 for later tokens and for other documents, not 0 for visible ones.

    All tokens of the row differ, so the rows of the embedding's gradient are the tokens of the sequence.
    """
    run = helpers.tiny(SMALL | {"attention.impl": kernel, "model.sliding_window": window, "data.max_segments": 9})
    T, params, definition = run.data.seq_len, params_of(run), helpers.program(run).definition
    tokens = np.random.default_rng(5).permutation(256)[:T].astype(np.int32)
    segments = np.repeat([1, 2, 0], [10, 11, 3]).astype(np.int32)
    positions = np.concatenate([np.arange(10), np.arange(11), np.zeros(3)]).astype(np.int32)

    @jax.jit
    def influence(params):
        def outputs(embedding):
            model = definition.bind(params | {"embed": {"embedding": embedding}})
            return model(tokens[None], segments[None], positions[None])[0]

        _, back = jax.vjp(outputs, params["embed"]["embedding"])
        probe = jax.random.normal(jax.random.key(0), (run.model.d_model,))
        return jax.vmap(lambda t: jnp.abs(back(jnp.zeros((T, run.model.d_model)).at[t].set(probe))[0][tokens]).sum(-1))(
            jnp.arange(T)
        )

    reach = np.asarray(influence(params))
    t, s = np.mgrid[:T, :T]
    same = (segments[t] == segments[s]) & (segments[t] > 0)
    # Through L layers, a window of w reaches L (w - 1) tokens back.
    back = run.model.num_layers * (window - 1) if window else T
    seen = (same & (s <= t) & (t - s <= back)) | (s == t)
    assert (reach[~seen] == 0).all()
    assert (reach[seen] > 0).all()


# ---- Remat


REMAT = {"model.num_layers": 4, "data.seq_len": 20, "model.d_ff": 56}
POLICIES = {
    "full": {"remat.policy": "full"},
    "full, two layers together": {"remat.policy": "full", "remat.every": 2},
    "full, three and one": {"remat.policy": "full", "remat.every": 3},
    "dots": {"remat.policy": "dots"},
    "dots, three and one": {"remat.policy": "dots", "remat.every": 3},
    "attention": {"remat.policy": "attention"},
    "custom": {"remat.policy": "custom", "remat.tensors": "attention_out=keep,mlp_up=keep,q=recompute"},
    "custom, some on the host": {"remat.policy": "custom", "remat.tensors": "mlp_up=offload,residual=offload,q=keep"},
    "custom, all together": {"remat.policy": "custom", "remat.tensors": "residual=keep", "remat.every": 4},
    "none, one by one": {"compiler.unroll": True},
    "full, three and one, one by one": {"remat.policy": "full", "remat.every": 3, "compiler.unroll": True},
    "custom, one by one": {"remat.policy": "custom", "remat.tensors": "mlp_up=offload,q=keep", "compiler.unroll": True},
}


def loss_function(run):
    definition, batch = helpers.program(run).definition, helpers.host_batch(run, 0)

    def value(params):
        model = definition.bind(params)
        hidden = model(batch["tokens"], batch["segments"], batch["positions"])
        return jnp.mean(jnp.square(model.logits(hidden))), hidden.sum()

    return lambda params: value(params)[0]


@functools.cache
def gradients(run):
    return jax.jit(jax.grad(loss_function(run)))(params_of(helpers.tiny(SMALL | REMAT)))


@pytest.mark.parametrize(
    "policy",
    helpers.few(POLICIES, "dots", "custom, some on the host", "full, three and one, one by one", "custom, all together"),
)
def test_remat_gives_the_same_gradients(policy):
    ours = gradients(helpers.tiny(SMALL | REMAT | POLICIES[policy]))
    theirs = gradients(helpers.tiny(SMALL | REMAT))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


def test_offloaded_tensors_go_to_host_memory():
    """Compiled for 8 described H200: CPUs have one memory, and run an offloading policy without moving anything.

    The host holds the offloaded activation of every layer but the last, of each device's own sequences, and nothing else.
    """
    pytest.importorskip("jax_cuda12_plugin", reason="needs the `plan` extra")
    run = helpers.tiny(
        {
            "precision": "bf16",
            "model.d_model": 512,
            "model.num_heads": 4,
            "model.d_ff": 1024,
            "mesh.fsdp": 8,
            "data.seq_len": 1024,
            "remat.policy": "custom",
            "remat.tensors": "q=keep,mlp_up=offload",
        }
    )
    compiled = compile_step(run, parse("h200:8")).executable
    # The last layer's backward pass comes at once: what it keeps stays on the device.
    mlp_up_bytes = (run.model.num_layers - 1) * (run.train.global_batch // 8) * run.data.seq_len * run.model.d_ff * 2
    assert compiled.memory_analysis().host_temp_size_in_bytes == mlp_up_bytes


def residuals(overrides: dict) -> collections.Counter:
    """(shape, dtype) of what the backward pass of the layers finds kept, in bf16 so that gathered weights are recognised."""
    run = helpers.tiny(SMALL | REMAT | {"precision": "bf16"} | overrides)
    definition = helpers.program(run).definition
    f = loss_function(run)
    kept = jax.eval_shape(lambda params: jax.vjp(f, params)[1], definition.abstract)
    return collections.Counter((a.shape, a.dtype.name) for a in jax.tree.leaves(kept) if a.ndim > 2)


def test_policies_keep_what_they_say():
    B, T, D, N, K, H, F, L = 4, 20, 32, 4, 2, 8, 56, 4
    q, kv, wide, stream = (((L, B, T, *rest), "bfloat16") for rest in ((N, H), (K, H), (F,), (D,)))
    full, dots, attention, none = (residuals({"remat.policy": p}) for p in ("full", "dots", "attention", "none"))
    assert (full[q], full[kv], full[wide], full[stream]) == (0, 0, 0, 1)
    assert (attention[q], attention[kv], attention[wide], attention[stream]) == (2, 2, 0, 1)
    assert (dots[q], dots[kv], dots[wide]) == (1, 2, 2)
    assert 2 <= dots[stream] <= 3  # mlp_down is the output of a GEMM, but nothing in the block's backward pass needs it
    assert none[wide] > dots[wide] and none.total() > dots.total()
    custom = residuals({"remat.policy": "custom", "remat.tensors": "mlp_up=keep,k=keep"})
    assert (custom[q], custom[kv], custom[wide], custom[stream]) == (0, 1, 1, 1)
    together = residuals({"remat.policy": "full", "remat.every": 2})
    assert together[((2, B, T, D), "bfloat16")] == 1 and together[stream] == 0
    uneven = residuals({"remat.policy": "full", "remat.every": 3})
    assert uneven[((1, B, T, D), "bfloat16")] == 1 and uneven[stream] == 0


@pytest.mark.parametrize("policy", [*KEPT, "custom"])
def test_gathered_weights_are_never_kept(policy):
    tensors = {"remat.tensors": "q=keep"} if policy == "custom" else {}
    kept = residuals({"remat.policy": policy, **tensors})
    D, F, N, K, H, L = 32, 56, 4, 2, 8, 4
    for shape in ((D, F), (F, D), (D, N, H), (D, K, H), (N, H, D)):
        assert not kept[((L, *shape), "bfloat16")], shape
    assert not kept[((L, D), "bfloat16")]


# ---- Decoding and sampling


def test_decoding_with_a_cache_gives_the_logits_of_the_whole():
    run = helpers.tiny(SMALL | EVERYTHING)
    params, definition = params_of(run), helpers.program(run).definition
    tokens = np.random.default_rng(8).integers(0, 256, (1, 17)).astype(np.int32)
    ones, at = np.ones_like(tokens), np.arange(17, dtype=np.int32)[None]
    whole = np.asarray(forward(run)(params, tokens, ones, at))[0]
    sampler = sampler_of(run)

    @jax.jit
    def extend(cache, new):
        model = sampler.definition.bind(params)
        hidden, cache = model.decode(new, cache)
        return model.logits(hidden)[0], cache

    cache, parts = empty_cache(run.model, sampler.placement, 1, 32, jnp.dtype("float32")), []
    for first, last in ((0, 6), *((i, i + 1) for i in range(6, 17))):
        logits, cache = extend(cache, tokens[:, first:last])
        parts.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-5)
    assert definition.axes == sampler.definition.axes


@functools.cache
def sampler_of(run):
    return generate.Sampler(run, helpers.program(run).placement)


def draw(run, **changes) -> list[int]:
    ask = {"max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "seed": 0, **changes}
    return list(sampler_of(run).tokens(params_of(run), [3, 1, 4, 1, 5], **ask))


def test_temperature_0_takes_the_likeliest_token_of_the_whole_model():
    run = helpers.tiny(SMALL)
    tokens = [3, 1, 4, 1, 5]
    for token in draw(run, temperature=0.0):
        row = np.zeros((3, 1, 24), np.int32)
        n = len(tokens)
        row[0, 0, :n], row[1, 0, :n], row[2, 0, :n] = tokens, 1, np.arange(n)
        assert token == int(np.asarray(forward(run)(params_of(run), *row))[0, n - 1].argmax())
        tokens.append(token)
    assert draw(run, temperature=0.0) == draw(run, temperature=0.0, seed=9)


def test_draws_follow_the_seed():
    run = helpers.tiny(SMALL)
    assert draw(run) == draw(run) != draw(run, seed=1)


def test_draws_have_the_probabilities_of_the_logits():
    logits = jnp.log(jnp.asarray([0.1, 0.5, 0.15, 0.25]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def frequencies(temperature, top_p):
        tokens = jax.vmap(lambda key: generate.choose(logits, key, temperature, top_p))(keys)
        return np.bincount(np.asarray(tokens), minlength=4) / len(keys)

    np.testing.assert_allclose(frequencies(1.0, 1.0), [0.1, 0.5, 0.15, 0.25], atol=0.03)
    np.testing.assert_allclose(frequencies(1.0, 0.7), [0, 2 / 3, 0, 1 / 3], atol=0.03)
    np.testing.assert_allclose(frequencies(1.0, 0.4), [0, 1, 0, 0])
    square = np.array([0.1, 0.5, 0.15, 0.25]) ** 2
    np.testing.assert_allclose(frequencies(0.5, 1.0), square / square.sum(), atol=0.03)


# ---- Cross entropy and norm


def plain_loss(x, head, targets, weights, softcap, z_loss=0.0):
    logits = jnp.einsum("nd,vd->nv", x, head, precision="highest")
    logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return jnp.sum(weights * (z_loss * jax.nn.logsumexp(logits, axis=1) ** 2 - picked))


def loss_inputs(n: int, D: int, V: int):
    rng = np.random.default_rng(n)
    x, head = rng.standard_normal((n, D)).astype(np.float32), rng.standard_normal((V, D)).astype(np.float32)
    weights = (rng.random(n) < 0.7).astype(np.float32) * rng.random(n).astype(np.float32)
    return x, head, rng.integers(0, V, n).astype(np.int32), weights


def test_no_targets_no_loss():
    x, head, targets, weights = loss_inputs(8, 4, 12)
    how = {"chunk": 3, "softcap": 0.0, "z_loss": 0.1, "vocab_axes": (), "precision": F32.precision}
    ours = chunked_cross_entropy(x, head.T, targets, 0 * weights, **how, gradients=True)
    assert all(not np.asarray(part).any() for part in ours)


MESHES = [{"mesh.tensor": 8}, {"mesh.fsdp": 2, "mesh.tensor": 4}, {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}]


@pytest.mark.parametrize("mesh", MESHES)
def test_loss_with_a_split_vocabulary(mesh):
    run = helpers.tiny(mesh)
    spec = loss.LossSpec(F32, make_placement(run, helpers.devices_of(run)), chunk=5, logit_softcap=2.0, z_loss=0.1)
    B, T, D, V = 4, 16, 8, 24
    x, head, targets, weights = loss_inputs(B * T, D, V)
    batch = {"targets": targets.reshape(B, T), "weights": weights.reshape(B, T)}

    def ours(x, head):
        return 3.0 * loss.cross_entropy(x.reshape(B, T, D), head, batch, spec)

    value, grads = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(x, head)
    wanted = jax.jit(jax.value_and_grad(plain_loss, argnums=(0, 1)), static_argnums=4)(x, head, targets, weights, 2.0, 0.1)
    np.testing.assert_allclose(value, 3 * wanted[0], rtol=1e-6)
    for mine, theirs in zip(grads, wanted[1], strict=True):
        np.testing.assert_allclose(mine, 3 * theirs, rtol=1e-5, atol=2e-6)
