"""The recipe of a layer type from outside the package (recipes/linear_hybrid): arithmetic, layouts, counts and refusals.

campaign/test_linear_hybrid_runs.py trains, resumes and plans it in child processes.
"""

import dataclasses
import functools
import importlib
import sys
import types

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger import REPO

from jaxtrain.config.schema import ConfigError
from jaxtrain.step.model_flops import model_flops
from jaxtrain.train import parity
from jaxtrain.train.generation import Sampler
from jaxtrain.train.step_log import measure_rates

sys.path.append(str(REPO / "recipes"))  # a user sets PYTHONPATH to this folder
recipe = importlib.import_module("linear_hybrid.gated_delta_net")

TINY = recipe.Family(key_heads=2, value_heads=4, key_dim=8, value_dim=8, linear_layers=1, chunk=8)
SMALL = {
    "model.family": "test_linear_hybrid:TINY",
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.d_ff": 48,
    "model.init_std": 0.2,  # a wrong mask or position changes the results
    # The norm of an output divides by its length. At a document's first token the length is |q . k| |v|, which may be nearly 0:
    # with the usual 1e-5 the norm would multiply the rounding of q by up to 300.
    "model.norm_eps": 1e-2,
    "model.qk_norm": True,
    "data.seq_len": 32,
    "data.max_segments": 6,
    "train.global_batch": 4,
}
CHUNK, B, T, N, K, V = 16, 2, 90, 3, 8, 12
# Documents that fill a chunk, begin at its border, begin and end within one, and span several; then padding.
LENGTHS = [[16, 16, 3, 1, 40, 14], [1, 50, 5, 25, 4, 5]]
SEGMENTS = np.stack([np.repeat([1, 2, 3, 4, 5, 0], lengths) for lengths in LENGTHS]).astype(np.int32)


def arguments(T: int = T) -> list[np.ndarray]:
    """Return q, k, v, log decay and beta, which float32 represents exactly. The norms of keys are a little below 1."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((B, T, N, width)) for width in (K, K, V))
    k /= 1.001 * np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -np.exp(2 * rng.standard_normal((B, T, N)) - 2)
    beta = 1 / (1 + np.exp(-2 * rng.standard_normal((B, T, N))))
    return [x.astype(np.float32).astype(np.float64) for x in (q, k, v, log_decay, beta)]


@jax.jit
def by_definition(q, k, v, log_decay, beta, segments):
    """Return the outputs of the delta rule, token by token."""

    def one(before, token):
        q, k, v, log_decay, beta, starts = token
        state = jnp.where(starts[:, None, None, None], 0.0, before) * jnp.exp(log_decay)[..., None, None]
        u = beta[..., None] * (v - jnp.einsum("BNKV,BNK->BNV", state, k))
        state = state + k[..., None] * u[..., None, :]
        return state, jnp.einsum("BNKV,BNK->BNV", state, q)

    starts = jnp.diff(segments, axis=1, prepend=-1) != 0
    tokens = [jnp.moveaxis(jnp.asarray(x), 1, 0) for x in (q, k, v, log_decay, beta, starts)]
    return jnp.moveaxis(jax.lax.scan(one, jnp.zeros((B, N, K, V)), tokens)[1], 0, 1)


convolution = jax.jit(recipe.short_convolution)
delta_rule = jax.jit(recipe.delta_rule, static_argnums=6)


# ---- The recurrence


def test_float32_is_close_to_the_definition():
    given = arguments()
    with jax.enable_x64(True):
        wanted = np.asarray(by_definition(*given, SEGMENTS))[SEGMENTS > 0]
    got = delta_rule(*(jnp.asarray(x, jnp.float32) for x in given), jnp.asarray(SEGMENTS), CHUNK)
    assert got.dtype == jnp.float32
    assert np.abs(np.asarray(got)[SEGMENTS > 0] - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("chunk", [16, 128])
def test_outputs_and_gradients_are_those_of_the_definition(chunk):
    """In float64 the tolerance of 1e-12 is a thousand times the rounding: any error of the formulas is larger."""
    given = arguments()
    by = np.random.default_rng(4).standard_normal((B, T, N, V)) * (SEGMENTS > 0)[..., None, None]
    with jax.enable_x64(True):

        def both(*given):
            rules = (lambda *x: recipe.delta_rule(*x, jnp.asarray(SEGMENTS), chunk), lambda *x: by_definition(*x, SEGMENTS))
            return [(y * (by != 0), *back(by)) for y, back in (jax.vjp(rule, *given) for rule in rules)]

        for a, b in zip(*jax.jit(both)(*map(jnp.asarray, given)), strict=True):
            assert np.linalg.norm(a - b) < 1e-12 * np.linalg.norm(b)


def test_state_and_convolution_stay_in_their_document():
    """Other values in one document change no bit of another document's outputs."""
    given = [jnp.asarray(x, jnp.float32) for x in arguments()]
    second = (SEGMENTS == 2)[..., None]
    changed = [jnp.where(second.reshape(B, T, *[1] * (x.ndim - 2)), 0.9 * x, x) for x in given]
    taps = jnp.asarray(np.random.default_rng(5).standard_normal((N, V, 4)), jnp.float32)
    for f in (
        lambda x: delta_rule(*x, jnp.asarray(SEGMENTS), CHUNK),
        lambda x: convolution(x[2], taps, jnp.asarray(SEGMENTS)),
    ):
        differs = np.asarray(f(given) != f(changed)).any((-1, -2))
        assert differs[SEGMENTS == 2].any() and not differs[SEGMENTS != 2].any()


def test_convolution_sees_the_tokens_before():
    """The convolution's last tap multiplies the token itself, and its first tap the token three positions before."""
    x, taps = 100 * jnp.arange(1.0, 7.0)[None, :, None, None], jnp.asarray([[[1000.0, 100.0, 10.0, 1.0]]])
    y = convolution(x, taps, jnp.asarray([[1, 1, 1, 1, 1, 2]]))[0, :, 0, 0]
    np.testing.assert_allclose(y / 100, [1, 12, 123, 1234, 2345, 6], rtol=1e-6)  # where silu is the identity


# ---- The model


one_device = functools.cache(lambda: helpers.first_steps(helpers.tiny(SMALL), 2))


@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh.fsdp": 2, "mesh.tensor": 2},
        pytest.param({"mesh.fsdp": 2, "mesh.seq": 2, "parallel.context": "ulysses"}, marks=pytest.mark.more),
    ],
    ids=["fsdp2xtensor2", "ulysses"],
)
def test_layouts_take_the_steps_of_one_device(mesh):
    """Loss, gradients and weights agree with one device's, within the parity tests' bounds for float32."""
    many = helpers.first_steps(helpers.tiny(SMALL | mesh), 2)
    found = parity.compare(many, one_device(), parity.bounds(one_device(), None, 1, 1))
    assert not found.wrong, found.wrong


def test_counts_are_those_of_its_own_layers():
    """The program counts every parameter of the model. FLOPs follow from the family's own formula: 2 for each weight except
    embedding and norms, plus attention and the recurrent states.
    """
    made = helpers.program(helpers.tiny(SMALL))
    run, shapes = made.run, made.definition.abstract
    assert made.parameters == sum(a.size for a in jax.tree.leaves(shapes))
    weights = sum(
        a.size
        for path, a in jax.tree_util.tree_leaves_with_path(shapes)
        if path[-1].key.startswith(("w", "gate", "up", "down"))
    )
    weights += shapes["head"].size
    found, seq_len, family = model_flops(run), run.data.seq_len, TINY
    assert found.training == family.flops(run.model, seq_len) * 3
    states = 6 * family.value_heads * family.key_dim * family.value_dim
    softmax = 4 * run.model.num_heads * run.model.head_dim * seq_len
    assert found.training.full == pytest.approx(3 * (2 * weights + states + softmax))
    assert found.training.causal == pytest.approx(3 * (2 * weights + states + softmax / 2))
    assert found.recomputed is None
    rates = measure_rates(
        dataclasses.replace(run, log=dataclasses.replace(run.log, peak_tflops=1.0)), types.SimpleNamespace(say=str)
    )
    for _ in range(4):
        rates.start_step()
    line = rates.line()
    assert line["hfu"] is None and line["mfu_full"] > line["mfu_causal"] > 0


def test_a_stack_is_as_long_as_its_array():
    """Two layers are one period, so there is no loop over layers. With six layers the loop makes two trips before the last
    period.
    """
    assert [helpers.program(helpers.tiny(SMALL | {"model.num_layers": n})).layer_trips for n in (2, 6)] == [0, 2]


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"model.num_layers": 3}, "model.num_layers = 3"),
        ({"model.num_experts": 4}, "model.num_experts = 4"),
        ({"model.sliding_window": 8, "model.attention_pattern": "lg"}, "model.attention_pattern = 'lg'"),
        ({"mesh.seq": 2}, "parallel.context = 'ring'"),
        ({"model.num_kv_heads": 4, "mesh.tensor": 4}, "mesh = "),
        ({"mesh.stage": 2, "model.num_layers": 4, "train.grad_accum": 2}, "mesh.stage = 2"),
        ({"lora.rank": 2, "lora.targets": "wz"}, "wz"),
    ],
)
def test_what_it_cannot_do_is_refused(more, key):
    with pytest.raises(ConfigError, match=key):
        helpers.program(helpers.tiny(SMALL | more))


def test_it_writes_no_samples():
    made = helpers.program(helpers.tiny(SMALL))
    with pytest.raises(ConfigError, match="sample.max_tokens"):
        Sampler(made.run, made.placement)
