"""Gradients in bfloat16 against float32, tensor by tensor, on real text: sums over many tokens keep their precision."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.kernels.embedding import TABLE, embed
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.models.zero import make_zero
from jaxtrain.sharding import make_placement
from jaxtrain.step.batch import place_batch

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
EIGHT = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


def test_a_frequent_token_gets_all_of_its_gradient():
    """One token occurs 3,000 times with equal gradients. A sum in bfloat16 would stop growing at 256 of them."""
    run = helpers.tiny(EIGHT)
    p = make_placement(run, helpers.devices_of(run))
    V, D, B, T = 16, 8, 8, 512
    tokens = jnp.where(jnp.arange(B * T) < 3000, 5, jnp.arange(B * T) % V).reshape(B, T).astype(jnp.int32)
    table = jax.random.normal(jax.random.key(0), (V, D))
    zero = dataclasses.replace(make_zero(run.sharding, p), numerics=Numerics(BF16, F32, F32))

    def look_up(table, tokens):
        return embed(zero.local_weight(table, TABLE), tokens, p, p.mesh_axes("embed"), BF16)

    specs = p.spec(TABLE), p.spec(("batch", "sequence"))
    x = jax.jit(p.shard_map(look_up, specs, p.spec(("batch", "residual", None))))(table, tokens)
    assert jnp.array_equal(x, table.astype(BF16)[tokens])
    gradient = jax.grad(lambda table, tokens: look_up(table, tokens).astype(jnp.float32).sum())
    got = jax.jit(p.shard_map(gradient, specs, specs[0]))(table, tokens)
    counts = jnp.bincount(tokens.ravel(), length=V)
    assert jnp.array_equal(got, jnp.broadcast_to(counts[:, None].astype(jnp.float32), (V, D)))


# Any path from a weight to the loss has fewer than 25 rounded operations, each off by up to 2^-8, and their errors add up like
# a random walk.
BOUND = 25**0.5 * 2**-8


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(helpers.text_file(tmp_path_factory.mktemp("text") / "text.tok"))


def gradients(text: str, **overrides) -> dict[str, np.ndarray]:
    """Return Adam's first moments after one step on real text: 1 - beta1 times the gradient, because they start at zero."""
    data = {"data.source": text, "data.tokenizer": "byte", "data.seq_len": 256, "data.packing": "none"}
    model = {"model.num_layers": 2, "model.qkv_bias": True, "model.qk_norm": True}
    others = {"train.global_batch": 16, "optimizer.clip_norm": 0.0}
    run = helpers.tiny(data | model | others | overrides)
    program = helpers.program(run)
    batch = place_batch(helpers.host_batch(run, 0), program.batch, program.context)
    state, _ = helpers.train_step(run)(helpers.fresh_state(run), batch)
    moments = state.optimizer[0].mu
    return {jax.tree_util.keystr(path): np.asarray(g) for path, g in jax.tree_util.tree_leaves_with_path(moments)}


def off(got: np.ndarray, true: np.ndarray) -> float:
    return float(np.linalg.norm(got - true) / np.linalg.norm(true))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(EIGHT, marks=pytest.mark.more),
        {"mesh.data": 2, "mesh.fsdp": 2, "train.grad_accum": 2, "sharding.zero": 2, "dtypes.reduce": "f32"},
    ],
    ids=["bf16", "f32"],
)
def test_bfloat16_gradients_are_those_of_float32(text, layout):
    """With dtypes.reduce=f32, sums over microbatches and devices are in float32: gradients of weights in bfloat16 are not
    rounded to bfloat16.
    """
    true, got = gradients(text), gradients(text, precision="bf16", **layout)
    # The keys' bias shifts all scores of a query alike, so softmax cancels it: its true gradient is zero.
    errors = {name: off(got[name], g) for name, g in true.items() if "bk" not in name}
    assert max(errors.values()) < BOUND, errors
    (table,) = (name for name in true if "embedding" in name)
    most_frequent = ord(" ")
    assert off(got[table][most_frequent], true[table][most_frequent]) < BOUND
    for name, g in got.items() if "dtypes.reduce" in layout else ():
        some = g[g != 0]
        assert (some.astype(jnp.bfloat16).astype(np.float32) != some).mean() > 0.5, name


def test_a_loss_is_the_mean_over_all_targets():
    """If the targets' weights are 4,096 times smaller, and their sum below 1, loss and gradients stay the same. If they are
    zero, loss and gradients are zero. With microbatches the loss is the mean over all targets, not the mean of their means.
    """
    runs = {n: helpers.tiny({"model.num_layers": 1, "data.seq_len": 32, "train.grad_accum": n}) for n in (1, 2)}
    gradients = {n: jax.jit(helpers.program(run).gradients) for n, run in runs.items()}
    params = helpers.fresh_state(runs[1]).params

    def of(microbatches: int, scale: float) -> tuple[float, list[jax.Array]]:
        run = runs[microbatches]
        program, host = helpers.program(run), dict(helpers.host_batch(run, 0))
        host["weights"] = host["weights"] * np.float32(scale)
        host["weights"][:6] = 0  # in the 8 rows of the first microbatch
        (loss, _), grads = gradients[microbatches](params, place_batch(host, program.batch, program.context))
        return float(loss), jax.tree.leaves(grads)

    (loss, grads), (small_loss, small_grads), (no_loss, no_grads) = of(2, 1.0), of(2, 2**-12), of(2, 0.0)
    whole_loss, whole_grads = of(1, 1.0)
    assert small_loss == pytest.approx(loss, rel=1e-6) and no_loss == 0.0
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    for usual, small, none, whole in zip(grads, small_grads, no_grads, whole_grads, strict=True):
        np.testing.assert_allclose(small, usual, rtol=1e-5, atol=1e-9)
        assert not none.any()
        np.testing.assert_allclose(usual, whole, rtol=1e-4, atol=1e-6)
