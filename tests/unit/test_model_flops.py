"""FLOPs counted in the trace of a model: the formulas for jaxtrain's own families, and the operations of others."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import pallas as pl

from jaxtrain.config import schema
from jaxtrain.config.schema import Model, RunConfig
from jaxtrain.models import preset
from jaxtrain.models.flops import Flops
from jaxtrain.models.layers import Embed, GatedLinear
from jaxtrain.models.transformer import Transformer
from jaxtrain.sharding import make_placement
from jaxtrain.step import model_flops
from jaxtrain.step.model_flops import Tally, count_flops
from jaxtrain.train.generation import Sampler

PRESETS = ("llama3.1_8b", "qwen3_8b", "gemma2_9b", "gemma3_4b", "mixtral_8x7b", "qwen3_30b_a3b", "gpt_oss_20b", "deepseek_v3")


def run_of(name: str, **sections) -> RunConfig:
    run = RunConfig(model=dataclasses.replace(Model(**preset(name)), mtp_layers=0), data=schema.Data(seq_len=4096))
    return schema.resolve(schema.to_dict(dataclasses.replace(run, **sections)))[0]


@pytest.mark.parametrize("name", PRESETS)
def test_a_count_is_the_formula_for_shipped_families(name):
    """Windows, latents, experts, dense layers and tied heads are counted as the formulas state them, exactly."""
    for sections in ({}, {"train": schema.Train(freeze="layers.attention.*")}):
        run = run_of(name, **sections)
        found, unknown = count_flops(run)
        expected = helpers.training_flops(run)
        assert (found.causal, found.full) == pytest.approx((expected.causal, expected.full), rel=1e-12) and not unknown


def test_adapters_count_as_the_formula_states_them():
    run = run_of("llama3.1_8b", lora=schema.Lora(rank=16))
    assert count_flops(run)[0].causal == pytest.approx(helpers.training_flops(run).causal, rel=1e-12)


class Narrow(Transformer):
    """A model whose feed-forward blocks have half the width that the config states, and a further one before the head."""

    def __init__(self, model, kernel, remat, ctx, rngs):
        super().__init__(dataclasses.replace(model, d_ff=model.d_ff // 2), kernel, remat, ctx, rngs)
        if ctx.own.extra:
            self.extra = GatedLinear(model.d_model, model.d_ff, 0.02, 0.02, ctx, rngs)

    def hidden_and_statistics(self, *rows):
        hidden, statistics = super().hidden_and_statistics(*rows)
        return (hidden + self.ctx.zero.gather_module(self.extra)(hidden) if self.ctx.own.extra else hidden), statistics


class Family:
    build = staticmethod(Narrow)


def narrow(extra: bool) -> RunConfig:
    return helpers.tiny({"model.family": "test_model_flops:Family", "own": {"extra": extra}})


def test_a_family_of_the_users_own_is_counted_where_it_differs_from_the_formula():
    for extra in (False, True):
        run = narrow(extra)
        m = run.model
        of_width = 3 * 2 * 3 * m.d_model * m.d_ff  # of one block of the stated width, forward and backward
        found = model_flops.model_flops(run)
        assert not found.by_formula and found.recomputed is None and found.note
        assert found.training.causal == helpers.training_flops(run).causal - m.num_layers * of_width / 2 + extra * of_width
    # A model that differs by less keeps the formula, which also knows what remat recomputes.
    known = model_flops.model_flops(dataclasses.replace(run, model=dataclasses.replace(m, family="llama"), own=()))
    assert known.by_formula and known.recomputed is not None and not known.note


class Stating(Family):
    @staticmethod
    def flops(model, seq_len):
        return Flops(7.0, 11.0 * seq_len)


def test_a_family_states_its_flops():
    run = helpers.tiny({"model.family": "test_model_flops:Stating", "own": {"extra": False}})
    found = model_flops.model_flops(run)
    assert found.training == Flops(21.0, 33.0 * run.data.seq_len)
    assert found.recomputed is None and not found.by_formula and found.note


class Mute(nnx.Module):
    """A model without decode."""

    def __init__(self, model, kernel, remat, ctx, rngs):
        self.embed = Embed(model.vocab_size, model.d_model, 0.02, ctx, rngs)


class MuteFamily:
    build = staticmethod(Mute)


def test_a_model_without_decode_writes_no_samples():
    run = helpers.tiny({"model.family": "test_model_flops:MuteFamily"})
    with pytest.raises(schema.ConfigError, match="sample.max_tokens"):
        Sampler(run, make_placement(run, jax.devices()[:1]))


def cost(f, *shapes, active=None) -> tuple[Flops, set[str]]:
    """Return the FLOPs and the unknown operations of a function of float32 arrays. active: whether each is trained."""
    traced = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    tally = Tally()
    _, found = tally.count_jaxpr(traced, active or [True] * len(shapes))
    return found, tally.unknown


def test_a_matmul_counts_once_and_once_for_each_gradient():
    one = 2 * 3 * 4 * 5
    dot = lambda a, b: a @ b  # noqa: E731
    assert [cost(dot, (3, 4), (4, 5), active=[x, y])[0].full / one for x in (False, True) for y in (False, True)] == [
        1,
        2,
        2,
        3,
    ]
    stopped = lambda a, b: jax.lax.stop_gradient(a) @ b  # noqa: E731
    rounded = lambda a, b: jnp.round(a).astype(jnp.int32).astype(jnp.float32) @ b  # noqa: E731
    assert cost(stopped, (3, 4), (4, 5))[0].full == cost(rounded, (3, 4), (4, 5))[0].full == 2 * one
    assert cost(lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "VALID"), (2, 3, 9), (5, 3, 4))[0].full == 3 * 2 * (
        2 * 5 * 6 * 3 * 4
    )


def test_loops_branches_and_calls_are_counted():
    one = 2 * 4 * 4 * 4

    def looped(w, x):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=7)[0]

    # The carry depends on w after the first iteration, so all iterations have both gradients.
    assert cost(looped, (4, 4), (4, 4), active=[True, False])[0].full == 7 * 3 * one
    assert cost(looped, (4, 4), (4, 4), active=[False, False])[0].full == 7 * one
    branches = [lambda w, x: x, lambda w, x: x @ w, lambda w, x: x @ w @ w]
    assert cost(lambda w, x: jax.lax.switch(jnp.int32(x[0, 0]), branches, w, x), (4, 4), (4, 4))[0].full == 2 * 3 * one
    assert cost(jax.checkpoint(lambda w, x: jax.jit(jnp.dot)(w, x)), (4, 4), (4, 4))[0].full == 3 * one

    def kernel(x, w, o):
        o[...] = x[...] @ w[...]

    block = pl.BlockSpec((2, 4), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 4), jnp.float32),
        grid=(4,),
        in_specs=[block, pl.BlockSpec((4, 4), lambda i: (0, 0))],
        out_specs=block,
    )
    assert cost(call, (8, 4), (4, 4), active=[False, False])[0].full == 2 * 8 * 4 * 4


def test_what_cannot_be_counted_is_named():
    endless = lambda w, x: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)  # noqa: E731
    found, unknown = cost(endless, (4, 4), (4, 4), active=[False, False])
    assert found.full == 2 * 4 * 4 * 4 and unknown
    outside = lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((4, 4), jnp.float32), x)  # noqa: E731
    assert cost(outside, (4, 4))[1] == {"pure_callback"}
