"""The model against an independent NumPy transformer, on packed documents; remat, sampling, and the loss.

test_contract.py has the properties that every family needs.
"""

import dataclasses
import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.schema import Model
from jaxtrain.config.shapes import BATCH_KEYS
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.models.transformer import Transformer
from jaxtrain.models.zero import make_zero
from jaxtrain.sharding import make_placement
from jaxtrain.step import loss
from jaxtrain.step.batch import place_batch
from jaxtrain.step.program import build_program
from jaxtrain.train import generation

F32 = Numerics(jnp.dtype("float32"), jnp.dtype("float32"), jnp.dtype("float32"))
SMALL = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.d_ff": 48,
    "model.init_std": 0.2,  # so large that every part of the model affects the logits
    "data.seq_len": 24,
    "train.global_batch": 4,
}


@functools.cache
def params_of(run):
    """Return random parameters, with random scales of norms and random biases, so that the comparison covers them."""
    return helpers.start(helpers.program(run)).params


@functools.cache
def forward(run):
    """Return a jitted function (params, tokens, segments, positions) -> logits."""
    definition = helpers.program(run).definition

    @jax.jit
    def logits(params, tokens, segments, positions):
        model = definition.bind(params)
        return model.logits(model(tokens, segments, positions))

    return logits


# ---- The whole forward pass, written again in numpy


def oracle(params, m: Model, tokens, segments, positions) -> np.ndarray:
    """Return the logits (B, T, V), computed in NumPy in float64."""
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


EVERYTHING = {
    "model.tied_head": True,
    "model.qk_norm": True,
    "model.qkv_bias": True,
    "model.sliding_window": 5,
    "model.attention_softcap": 0.5,
    "model.logit_softcap": 1.0,
    "model.rope_scaling": "llama3",
    "model.rope_original_len": 48,
    "model.head_dim": 16,
}
VARIANTS = {"one key head, wide heads": {"model.num_kv_heads": 1, "model.head_dim": 20}, "everything": EVERYTHING}


def packed(run):
    """Return the tokens, segments and positions of a batch whose last tokens are padding."""
    batch = helpers.host_batch(run, 0)
    segments, positions = batch["segments"].copy(), batch["positions"].copy()
    segments[1:, -3:] = positions[1:, -3:] = 0
    return batch["tokens"], segments, positions


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_numpy(variant):
    run = helpers.tiny(SMALL | VARIANTS[variant])
    params, rows = params_of(run), packed(run)
    ours, theirs = np.asarray(forward(run)(params, *rows)), oracle(params, run.model, *rows)
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4 * np.abs(theirs).max())


@pytest.mark.parametrize(
    "key", ["tied_head", "qk_norm", "qkv_bias", "sliding_window", "attention_softcap", "logit_softcap", "rope_scaling"]
)
def test_every_feature_changes_the_logits(key):
    """Without one of its features, NumPy's logits of `everything` differ by more than 0.01. Otherwise the comparison would pass
    for a feature that both implementations ignore.
    """
    run = helpers.tiny(SMALL | EVERYTHING)
    without = dataclasses.replace(run.model, **{key: getattr(Model(), key)})
    params = params_of(run) | {"head": params_of(run)["embed"]["embedding"][::-1]}
    logits, other = (oracle(params, model, *packed(run)) for model in (run.model, without))
    assert np.abs(logits - other).max() > 0.01


# ---- Remat


REMAT = {"model.num_layers": 4, "data.seq_len": 20, "model.d_ff": 56}


def test_gradients_of_a_stack_are_those_of_autodiff(monkeypatch):
    """Layers run by RematPlan.run (uses_plan_run = True), in groups and with some activations on the host, have the gradients
    of plain autodiff (uses_plan_run = False) without rematerialization.
    """
    given = SMALL | REMAT | {"mesh.fsdp": 2, "train.grad_accum": 2, "train.accumulate": "microbatch"}
    groups = {"remat.policy": "custom", "remat.tensors": "mlp_up=offload,residual=offload,q=keep", "remat.every": 3}

    def gradients(more):
        run = helpers.tiny(given | more)
        made = build_program(run, helpers.devices_of(run))
        batch = place_batch(helpers.host_batch(run, 0), made.batch, made.context)
        return made.gradients(helpers.start(made).params, batch)[1]

    learnt = gradients(groups)
    monkeypatch.setattr(Transformer, "uses_plan_run", False)
    by_autodiff = gradients({})
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(learnt), jax.tree.leaves(by_autodiff), strict=True):
        assert np.any(b), jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


# ---- Sampling


@functools.cache
def sampler_of(run):
    return generation.Sampler(run, helpers.program(run).placement)


def draw(run, prompt=(3, 1, 4, 1, 5), params=None, **changes) -> list[int]:
    ask = {"max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "seed": 0, **changes}
    return list(sampler_of(run).tokens(params or params_of(run), prompt, **ask))


def test_temperature_0_takes_the_likeliest_token_of_the_whole_model():
    """Each token is the argmax of the whole text's logits, for any seed. The prompt is longer than the 64 positions of the
    smallest cache.
    """
    run, prompt = helpers.tiny(SMALL | {"data.seq_len": 80}), [i * 37 % 251 for i in range(70)]
    tokens = list(prompt)
    for token in draw(run, prompt, temperature=0.0, max_tokens=5):
        row = np.zeros((3, 1, 80), np.int32)
        n = len(tokens)
        row[0, 0, :n], row[1, 0, :n], row[2, 0, :n] = tokens, 1, np.arange(n)
        assert token == int(np.asarray(forward(run)(params_of(run), *row))[0, n - 1].argmax())
        tokens.append(token)
    assert len(tokens) == 75
    assert draw(run, prompt, temperature=0.0, max_tokens=5, seed=9) == tokens[70:]


def test_draws_follow_the_seed_and_the_place():
    """With equal logits the noise alone chooses: tokens differ between positions, and between seeds."""
    run = helpers.tiny(SMALL)
    alike = params_of(run) | {"head": 0 * params_of(run)["head"]}
    made = draw(run, params=alike)
    assert len(set(made)) > 6
    assert made == draw(run, params=alike) != draw(run, params=alike, seed=1)


def test_draws_have_the_probabilities_of_the_logits():
    logits = jnp.log(jnp.asarray([0.1, 0.5, 0.15, 0.25]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def frequencies(temperature, top_p):
        tokens = jax.vmap(lambda key: generation.sample_token(logits, key, temperature, top_p))(keys)
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


def test_loss_with_a_split_vocabulary():
    run = helpers.tiny({"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2})
    p = make_placement(run, helpers.devices_of(run))
    spec = loss.LossSpec(F32, p, make_zero(run.sharding, p), chunk=5, logit_softcap=2.0, z_loss=0.1)
    B, T, D, V = 4, 16, 8, 24
    x, head, targets, weights = loss_inputs(B * T, D, V)
    batch = dict.fromkeys(BATCH_KEYS, targets.reshape(B, T)) | {"weights": weights.reshape(B, T)}
    tripled = helpers.loss_and_gradients(lambda *given: 3.0 * loss.cross_entropy(*given), spec)
    value, grads = tripled(x.reshape(B, T, D), head, batch)
    wanted = jax.jit(jax.value_and_grad(plain_loss, argnums=(0, 1)), static_argnums=4)(x, head, targets, weights, 2.0, 0.1)
    np.testing.assert_allclose(value, 3 * wanted[0], rtol=1e-6)
    for mine, theirs in zip(grads, wanted[1], strict=True):
        np.testing.assert_allclose(mine.reshape(theirs.shape), 3 * theirs, rtol=1e-5, atol=2e-6)
