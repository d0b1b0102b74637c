"""The model against an independent NumPy transformer, on packed documents; remat, sampling, and the loss.

test_contract.py has the properties that every family needs.
"""

import collections
import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import generation
from jaxtrain.activations import KEPT
from jaxtrain.config import Model
from jaxtrain.kernels.cross_entropy import chunked_cross_entropy
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.models.transformer import Transformer
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.topology import parse
from jaxtrain.shapes import BATCH_KEYS, STACK
from jaxtrain.sharding import make_placement
from jaxtrain.train import loss
from jaxtrain.train.batch import place_batch
from jaxtrain.train.definition import numerics_of
from jaxtrain.train.program import build
from jaxtrain.zero import make_zero

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
    """Return the initial parameters, with random scales of norms and random biases, so that the comparison covers them."""
    params = helpers.program(run).definition.init(jax.random.key(1))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    noise = [0.3 * rng.standard_normal(a.shape).astype(np.float32) for a in leaves]
    # Matrices keep their values. Vectors, stacked over layers or not, get random changes.
    return jax.tree.unflatten(tree, [a + n if np.ptp(np.asarray(a)) == 0 else a for a, n in zip(leaves, noise, strict=True)])


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
VARIANTS["everything"] = {k: v for variant in list(VARIANTS.values())[:-1] for k, v in variant.items()}


def logits_of(run) -> tuple[np.ndarray, np.ndarray]:
    """Return (our logits, the NumPy logits) of one packed batch whose last tokens are padding."""
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
    """Each variant changes NumPy's logits by more than 0.01. Otherwise the comparison would pass for a feature that both
    implementations ignore.
    """
    plain = {name: logits_of(helpers.tiny(SMALL | VARIANTS[name]))[1] for name in VARIANTS}
    for name, logits in plain.items():
        if name != "plain":
            assert np.abs(logits - plain["plain"]).max() > 0.01, name


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
    "none, one by one": {"parallel.scan_layers": False},
    "full, three and one, one by one": {"remat.policy": "full", "remat.every": 3, "parallel.scan_layers": False},
    "custom, one by one": {"remat.policy": "custom", "remat.tensors": "mlp_up=offload,q=keep", "parallel.scan_layers": False},
}


def gradients_of(program, run):
    batch = place_batch(helpers.host_batch(run, 0), program.batch, program.context)
    return program.gradients(params_of(helpers.tiny(SMALL | REMAT)), batch)[1]


@functools.cache
def gradients(run):
    return gradients_of(helpers.program(run), run)


@pytest.mark.parametrize(
    "policy",
    helpers.few(POLICIES, "dots, three and one", "custom, some on the host", "full, three and one, one by one"),
)
def test_remat_gives_the_same_gradients(policy):
    ours = gradients(helpers.tiny(SMALL | REMAT | POLICIES[policy]))
    theirs = gradients(helpers.tiny(SMALL | REMAT))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("policy", ["full", "none"])
def test_gradients_of_a_stack_are_those_of_autodiff(policy, monkeypatch):
    """Layers run by remat.Plan.run (uses_plan_run = True) have the gradients of plain autodiff (uses_plan_run = False)."""
    given = {"remat.policy": policy, "mesh.fsdp": 2, "train.grad_accum": 2}
    run = helpers.tiny(SMALL | REMAT | given | {"train.accumulate": "microbatch"})
    learnt = gradients(run)
    monkeypatch.setattr(Transformer, "uses_plan_run", False)
    by_autodiff = gradients_of(build(run, helpers.devices_of(run)), run)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(learnt), jax.tree.leaves(by_autodiff), strict=True):
        assert np.any(b), jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


@pytest.mark.more
def test_offloaded_tensors_go_to_host_memory():
    """The step is compiled ahead of time for 8 H200s: CPUs have one kind of memory, so an offloading policy moves nothing
    there.

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
    # The last layer's backward pass comes at once: its saved activations stay on the device.
    mlp_up_bytes = (run.model.num_layers - 1) * (run.train.global_batch // 8) * run.data.seq_len * run.model.d_ff * 2
    assert compiled.memory_analysis().host_temp_size_in_bytes == mlp_up_bytes


def residuals(overrides: dict) -> collections.Counter:
    """Return (shape, dtype) of the arrays that the loop over layers saves.

    Gradients are float32, so a gathered weight (bf16) differs from a gradient buffer of the same shape.
    """
    run = helpers.tiny(SMALL | REMAT | {"precision": "bf16", "dtypes.reduce": "f32"} | overrides)
    program, batch = helpers.program(run), helpers.host_batch(run, 0)
    definition, zero = program.definition, make_zero(run, program.placement, numerics_of(run))

    def kept(params):
        def hidden(into):
            copies = jax.tree.map(lambda _: None, params)
            model = definition.bind(zero.microbatch_weights(params, copies, {}, {STACK: into}))
            return model(batch["tokens"], batch["segments"], batch["positions"])

        return jax.vjp(hidden, zero.gradient_buffers(params[STACK]))[1]

    arrays = jax.tree.leaves(jax.eval_shape(kept, definition.abstract))
    return collections.Counter((a.shape, a.dtype.name) for a in arrays if a.ndim > 1)


def test_policies_keep_what_they_say():
    B, T, D, N, K, H, F = 4, 20, 32, 4, 2, 8, 56

    def kept(iterations: int, overrides: dict) -> tuple[int, ...]:
        """Return the numbers of saved queries, of keys and values, of feed-forward arrays, and of residual streams."""
        found = residuals(overrides)
        # Outputs of matmuls have the tokens on one dimension.
        shapes = [[(iterations, *tokens, *rest) for tokens in ((B, T), (B * T,))] for rest in ((N, H), (K, H), (F,), (D,))]
        return tuple(sum(found[shape, "bfloat16"] for shape in either) for either in shapes)

    # The last group of layers is outside the loop, except under `dots`.
    assert kept(3, {"remat.policy": "full"}) == (0, 0, 0, 1)
    assert kept(3, {"remat.policy": "attention"}) == (2, 2, 0, 1)
    *dots, stream = kept(4, {"remat.policy": "dots"})
    assert dots == [1, 2, 2]
    assert 2 <= stream <= 3  # mlp_down is the output of a matmul, but no backward pass of the block needs it
    none = kept(3, {"remat.policy": "none"})
    assert none[2] > dots[2] and sum(none) > sum(dots) + stream
    assert kept(3, {"remat.policy": "custom", "remat.tensors": "mlp_up=keep,k=keep"}) == (0, 1, 1, 1)
    for every in (2, 3):
        assert kept(1, {"remat.policy": "full", "remat.every": every}) == (0, 0, 0, 1)


@pytest.mark.parametrize("policy", [*KEPT, "custom"])
def test_gathered_weights_are_never_kept(policy):
    tensors = {"remat.tensors": "q=keep"} if policy == "custom" else {}
    kept = residuals({"remat.policy": policy, **tensors})
    D, F, N, K, H, L = 32, 56, 4, 2, 8, 4
    for iterations in (L, L - 1):
        for shape in ((D, F), (F, D), (D, N, H), (D, K, H), (N, H, D), (D,)):
            assert not kept[((iterations, *shape), "bfloat16")], shape


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
        tokens = jax.vmap(lambda key: generation.choose(logits, key, temperature, top_p))(keys)
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


MESHES = [{"mesh.tensor": 8}, {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}]


@pytest.mark.parametrize("mesh", MESHES)
def test_loss_with_a_split_vocabulary(mesh):
    run = helpers.tiny(mesh)
    p = make_placement(run, helpers.devices_of(run))
    spec = loss.LossSpec(F32, p, make_zero(run, p, F32), chunk=5, logit_softcap=2.0, z_loss=0.1)
    B, T, D, V = 4, 16, 8, 24
    x, head, targets, weights = loss_inputs(B * T, D, V)
    batch = dict.fromkeys(BATCH_KEYS, targets.reshape(B, T)) | {"weights": weights.reshape(B, T)}
    tripled = helpers.loss_and_gradients(lambda *given: 3.0 * loss.cross_entropy(*given), spec)
    value, grads = tripled(x.reshape(B, T, D), head, batch)
    wanted = jax.jit(jax.value_and_grad(plain_loss, argnums=(0, 1)), static_argnums=4)(x, head, targets, weights, 2.0, 0.1)
    np.testing.assert_allclose(value, 3 * wanted[0], rtol=1e-6)
    for mine, theirs in zip(grads, wanted[1], strict=True):
        np.testing.assert_allclose(mine.reshape(theirs.shape), 3 * theirs, rtol=1e-5, atol=2e-6)
