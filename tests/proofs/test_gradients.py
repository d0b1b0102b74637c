"""Gradients in bfloat16 against float32, tensor by tensor, on real text: sums over many tokens keep their precision."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.kernels.embedding import TABLE, embed
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.sharding import make_placement
from jaxtrain.train.batch import place_batch
from jaxtrain.zero import make_zero

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
EIGHT = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


@pytest.mark.parametrize("mesh", [{}, {"mesh.data": 2, "mesh.fsdp": 2}, EIGHT])
def test_a_frequent_token_gets_all_of_its_gradient(mesh):
    """One token occurs 3,000 times with equal gradients. A sum in bfloat16 would stop growing at 256 of them."""
    run = helpers.tiny(mesh)
    p = make_placement(run, helpers.devices_of(run))
    V, D, B, T = 16, 8, 8, 512
    tokens = jnp.where(jnp.arange(B * T) < 3000, 5, jnp.arange(B * T) % V).reshape(B, T).astype(jnp.int32)
    table = jax.random.normal(jax.random.key(0), (V, D))
    zero = make_zero(run, p, Numerics(BF16, F32, F32))

    def look_up(table, tokens):
        return embed(zero.ungathered(table, TABLE), tokens, p, p.mesh_axes("embed"), BF16)

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
    """Return Adam's first moments after one step on real text, by parameter: 1 - beta1 times the gradient, because they start
    at zero.
    """
    run = helpers.tiny(
        {
            "data.source": text,
            "data.tokenizer": "byte",
            "data.seq_len": 256,
            "data.packing": "none",
            "train.global_batch": 32,
            "model.num_layers": 2,
            "model.qkv_bias": True,
            "model.qk_norm": True,
            "optimizer.clip_norm": 0.0,
            **overrides,
        }
    )
    program = helpers.program(run)
    batch = place_batch(helpers.host_batch(run, 0), program.batch, program.context)
    state, _ = helpers.train_step(run)(helpers.fresh_state(run), batch)
    moments = state.optimizer[0].mu
    return {jax.tree_util.keystr(path): np.asarray(g) for path, g in jax.tree_util.tree_leaves_with_path(moments)}


def off(got: np.ndarray, true: np.ndarray) -> float:
    return float(np.linalg.norm(got - true) / np.linalg.norm(true))


def errors_of(got: dict[str, np.ndarray], true: dict[str, np.ndarray]) -> dict[str, float]:
    # The keys' bias shifts all scores of a query alike, so softmax cancels it: its true gradient is zero.
    return {name: off(got[name], g) for name, g in true.items() if "bk" not in name}


@pytest.mark.parametrize("mesh", helpers.few(({"mesh.fsdp": 1}, EIGHT), EIGHT))
def test_bfloat16_gradients_are_those_of_float32(text, mesh):
    true = gradients(text)
    got = gradients(text, precision="bf16", **mesh)
    errors = errors_of(got, true)
    assert max(errors.values()) < BOUND, errors
    (table,) = (name for name in true if "embedding" in name)
    space = ord(" ")
    assert off(got[table][space], true[table][space]) < BOUND, "the most frequent byte"


@pytest.mark.parametrize("zero", helpers.few((0, 1, 2), 2))
def test_gradients_of_bfloat16_weights_are_float32(text, zero):
    """Gradients of weights in bfloat16 are not rounded to bfloat16: sums over microbatches and devices are in float32."""
    layout = EIGHT | {"train.grad_accum": 2, "sharding.zero": zero, "dtypes.reduce": "f32"}
    got = gradients(text, precision="bf16", **layout)
    errors = errors_of(got, gradients(text))
    assert max(errors.values()) < BOUND, errors
    for name, g in got.items():
        some = g[g != 0]
        assert (some.astype(jnp.bfloat16).astype(np.float32) != some).mean() > 0.5, name


def test_a_loss_is_a_mean_whatever_its_weights_sum_to():
    """If the targets' weights are 4,096 times smaller, and their sum below 1, mean loss and gradients stay the same. If the
    weights are zero, loss and gradients are zero.
    """
    run = helpers.tiny({"model.num_layers": 1, "train.grad_accum": 2})
    program, host = helpers.program(run), helpers.host_batch(run, 0)
    params = helpers.fresh_state(run).params

    def of(scale: float) -> tuple[float, list[jax.Array]]:
        weighted = {**host, "weights": host["weights"] * np.float32(scale)}
        (loss, _), grads = program.gradients(params, place_batch(weighted, program.batch, program.context))
        return float(loss), jax.tree.leaves(grads)

    (loss, grads), (small_loss, small_grads), (no_loss, no_grads) = of(1.0), of(2**-12), of(0.0)
    assert host["weights"].sum() * 2**-12 < 1
    assert small_loss == pytest.approx(loss, rel=1e-6)
    for small, usual, none in zip(small_grads, grads, no_grads, strict=True):
        np.testing.assert_allclose(small, usual, rtol=1e-5, atol=1e-9)
        assert not none.any()
    assert no_loss == 0.0


def test_microbatches_weigh_as_many_targets_as_they_have():
    """The loss is the mean over all targets; it is not the mean of the microbatches' means."""
    found = []
    for accum in (1, 2):
        run = helpers.tiny({"model.num_layers": 1, "train.grad_accum": accum})
        program, host = helpers.program(run), dict(helpers.host_batch(run, 0))
        host["weights"] = host["weights"].copy()
        host["weights"][:6] = 0  # in the 8 rows of the first microbatch
        batch = place_batch(host, program.batch, program.context)
        (loss, _), grads = program.gradients(helpers.fresh_state(run).params, batch)
        found.append((float(loss), jax.tree.leaves(grads)))
    (loss, grads), (split_loss, split_grads) = found
    assert split_loss == pytest.approx(loss, rel=1e-6)
    for split, whole in zip(split_grads, grads, strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-6)
