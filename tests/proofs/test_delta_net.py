"""Gated delta nets in the stack of layers: arithmetic, layouts, counts, decoding and refusals.

campaign/test_delta_net_runs.py trains, resumes, samples and plans them in child processes.
"""

import dataclasses
import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_text import RATES

from jaxtrain.config.hardware import Devices
from jaxtrain.kernels import delta_rule as kernel
from jaxtrain.models import flops
from jaxtrain.models.rules import DELTA_KEYS
from jaxtrain.plan.program import collectives, hlo, roofline
from jaxtrain.step import validate
from jaxtrain.step.state import abstract_tensors, layer_name, split_layer
from jaxtrain.train import parity
from jaxtrain.train.generation import Sampler

SMALL = {
    "model.family": "qwen3",
    "model.num_layers": 4,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.d_ff": 48,
    "model.qk_norm": True,
    "model.attention_pattern": "dg",
    "model.linear_key_heads": 2,
    "model.linear_value_heads": 4,
    "model.linear_key_dim": 8,
    "model.linear_value_dim": 8,
    "model.linear_conv": 4,
    "model.init_std": 0.2,  # a wrong mask or position changes the results
    # The norm of an output divides by its length. At a document's first token the length is |q . k| |v|, which may be nearly 0:
    # with the usual 1e-5 the norm would multiply the rounding of q by up to 300.
    "model.norm_eps": 1e-2,
    "data.seq_len": 32,
    "data.max_segments": 6,
    "train.global_batch": 4,
}
EXPERTS = {"model.family": "qwen3_moe", "model.num_experts": 4, "model.experts_per_token": 2, "model.d_ff": 24}
CHUNK, B, T, N, K, V = 16, 2, 90, 3, 8, 12
# Documents that fill a chunk, begin at its border, begin and end within one, and span several; then padding.
LENGTHS = [[16, 16, 3, 1, 40, 14], [1, 50, 5, 25, 4, 5]]
SEGMENTS = np.stack([np.repeat([1, 2, 3, 4, 5, 0], lengths) for lengths in LENGTHS]).astype(np.int32)


one_device = functools.cache(lambda: helpers.first_steps(helpers.tiny(SMALL), 2))


LAYOUTS = [
    {"mesh.fsdp": 2, "mesh.tensor": 2},
    {"mesh.fsdp": 2, "mesh.seq": 2, "parallel.context": "ulysses"},
    {"mesh.stage": 2, "train.grad_accum": 2},
    {"sharding.zero": 1, "mesh.fsdp": 2},
    {"parallel.scan_layers": False},
    {"train.grad_accum": 2, "train.accumulate": "layer", "mesh.fsdp": 2},
    {"remat.policy": "full"},
]


@pytest.mark.parametrize(
    "more", helpers.few(LAYOUTS, LAYOUTS[0]), ids=lambda more: "-".join(f"{k.rpartition('.')[2]}{v}" for k, v in more.items())
)
def test_layouts_take_the_steps_of_one_device(more):
    """Loss, gradients and weights agree with one device's, within the parity tests' bounds for float32."""
    many = helpers.first_steps(helpers.tiny(SMALL | more), 2)
    compared = parity.compare_runs(many, one_device(), parity.bounds(one_device(), None, 1, 1))
    assert not compared.violations, compared.violations


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


convolution = jax.jit(kernel.short_convolution)


@functools.partial(jax.jit, static_argnums=6)
def delta_rule(q, k, v, log_decay, beta, segments, chunk):
    return kernel.delta_rule(q, k, v, log_decay, beta, segments, chunk=chunk)[0]


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
            rules = (lambda *x: delta_rule(*x, jnp.asarray(SEGMENTS), chunk), lambda *x: by_definition(*x, SEGMENTS))
            return [(y * (by != 0), *back(by)) for y, back in (jax.vjp(rule, *given) for rule in rules)]

        for a, b in zip(*jax.jit(both)(*map(jnp.asarray, given)), strict=True):
            assert np.linalg.norm(a - b) < 1e-12 * np.linalg.norm(b)


def test_a_document_in_parts_has_the_outputs_of_the_whole():
    """The state after some tokens, and the last inputs of a convolution, continue a document where it ended."""
    given, one = arguments(40), jnp.ones((B, 40), jnp.int32)
    taps = np.random.default_rng(5).standard_normal((N, V, 4))
    with jax.enable_x64(True):
        whole = kernel.delta_rule(*map(jnp.asarray, given), one, chunk=CHUNK)
        convolved = convolution(given[2], taps, one)
        state, inputs, out, through = jnp.zeros((B, N, K, V)), jnp.zeros((B, 3, N, V)), [], []
        for part in (slice(0, 21), slice(21, 22), slice(22, 23), slice(23, 40)):
            some = [jnp.asarray(x[:, part]) for x in given]
            o, state = kernel.delta_rule(*some, one[:, part], state, chunk=CHUNK)
            through.append(convolution(some[2], taps, one[:, part], inputs))
            inputs = kernel.last_inputs(some[2], inputs)
            out.append(o)
        np.testing.assert_allclose(jnp.concatenate(out, 1), whole[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(state, whole[1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(jnp.concatenate(through, 1), convolved, rtol=1e-6, atol=1e-6)


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


DECODED = [{}, {"mesh.stage": 2, "train.grad_accum": 2}, {"mesh.tensor": 2, "mesh.fsdp": 2}]


@pytest.mark.parametrize("layout", helpers.few(DECODED, {}), ids=str)
def test_decoding_gives_the_logits_of_whole_sequences(layout):
    """A cache has the state of each delta net and the last inputs of its convolutions."""
    run = helpers.tiny(SMALL | {"data.seq_len": 64} | layout)
    made = helpers.program(run)
    params = helpers.start(made).params
    tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, (1, 24)).astype(np.int32)
    sampler = Sampler(run, made.placement)
    decode, cache = jax.jit(sampler.decode), sampler.empty_cache(1, 64)

    def logits(params, tokens):
        model, at = sampler.definition.bind(params), jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return model.logits(model(tokens, jnp.ones_like(tokens), at))

    alone = helpers.program(helpers.tiny(SMALL | {"data.seq_len": 64}))
    sampler = Sampler(alone.run, alone.placement)
    specs = sampler.definition.specs(sampler.placement), jax.P()
    whole = jax.jit(sampler.placement.shard_map(logits, specs, jax.P()))(helpers.start(alone).params, tokens)
    for first, last in ((0, 1), (1, 2), (2, 11), (11, 12), (12, 24)):
        got, cache = decode(params, cache, tokens[:, first:last])
        assert np.abs(np.asarray(got) - np.asarray(whole)[:, last - 1]).max() < 2e-5 * np.abs(whole).max()


OTHER_TRAINING = {
    "fp8": {"precision": "fp8"},
    "muon": {"optimizer.name": "muon", "mesh.fsdp": 2},
    "low bits": {"lora.rank": 2, "lora.base": "fp8"},
    "average": {"train.ema_decay": 0.9},
    "frozen": {"train.freeze": "layers.mlp.*,embed.*"},
    "biases of routers": EXPERTS | {"model.router_bias": True},
    "uneven stages": {"model.num_layers": 6, "mesh.stage": 2, "train.grad_accum": 2},
    "groups of stages": {"model.num_layers": 8, "mesh.stage": 2, "train.grad_accum": 2, "pipeline.schedule": "interleaved"}
    | {"pipeline.groups": 2},
}


@pytest.mark.more
@pytest.mark.parametrize("name", OTHER_TRAINING)
def test_other_ways_to_train_take_finite_steps(name):
    wide = {"model.d_model": 64, "model.linear_key_dim": 16, "model.linear_value_dim": 16}
    taken = helpers.first_steps(helpers.tiny(SMALL | wide | OTHER_TRAINING[name]), 2)
    assert np.isfinite(taken.loss).all() and taken.loss[0] != taken.loss[1]


@pytest.mark.parametrize("policy", [pytest.param("none", marks=pytest.mark.more), "full"])
def test_the_program_computes_the_flops_of_the_formula(policy):
    """They are the definition's, and those of the chunked form beyond it. Sequences have several chunks."""
    run = helpers.tiny(SMALL | {"data.seq_len": 256, "loss.chunk": 128, "remat.policy": policy})
    text, made = helpers.train_step(run).as_text() or "", helpers.program(run)
    found = collectives.read_collectives(hlo.parse_hlo(text), dataclasses.asdict(run.mesh), gpus_per_node=4)
    assert roofline.predict(hlo.parse_hlo(text), RATES, found).flops == pytest.approx(roofline.expected_flops(made), rel=1e-6)
    assert made.parameters == flops.parameters(run.model)["total"]


def test_a_stack_is_as_long_as_its_array():
    """Two layers are one period, so there is no loop over layers. With six layers the loop makes two trips before the last
    period.
    """
    assert [helpers.program(helpers.tiny(SMALL | {"model.num_layers": n})).layer_trips for n in (2, 6)] == [0, 2]


def test_checkpoints_number_the_layers_of_the_model():
    """Tensors have the number of their layer, as if no layer had a delta net. Patterns of names have no number."""
    made = helpers.program(helpers.tiny(SMALL))
    names = {name.removeprefix("params.") for name in abstract_tensors(made.state) if name.startswith("params.layers.")}
    assert {int(name.split(".")[1]) for name in names} == {0, 1, 2, 3}
    assert {name.split(".")[1] for name in names if ".delta." in name} == {"0", "2"}
    assert {name.split(".")[1] for name in names if ".attention." in name} == {"1", "3"}
    for name, stacked in (("params.layers.5.delta.wq", "params.layers.1_of_2.delta.wq"), ("params.head", "params.head")):
        whole, element = split_layer(name, 2)
        assert whole == stacked and (name if element is None else layer_name(whole, element)) == name
    frozen = helpers.program(helpers.tiny(SMALL | {"train.freeze": "layers.delta.w?"})).trained["layers"]
    assert not frozen["0_of_2"]["delta"]["wq"] and frozen["0_of_2"]["delta"]["shift"] and frozen["1_of_2"]["attention"]["wq"]


# ---- Refusals


@pytest.mark.parametrize(
    ("more", "key", "fix"),
    [
        ({"model.attention_pattern": "dd"}, "model.attention_pattern", {"model.attention_pattern": "dddg"}),
        ({"model.num_layers": 5}, "model.num_layers", {"model.num_layers": 6}),
        ({"model.attention_pattern": ""}, "model.linear_key_heads", {f"model.{name}": 0 for name in DELTA_KEYS}),
        ({"model.linear_key_heads": 0}, "model.linear_key_heads", {"model.linear_key_heads": 2}),
        ({"model.linear_value_heads": 3}, "model.linear_value_heads", {"model.linear_value_heads": 2}),
        ({"remat.policy": "full", "remat.every": 2}, "remat.every", {"remat.every": 1}),
        ({"mesh.seq": 2}, "parallel.context", {"parallel.context": "ulysses"}),
        ({"mesh.seq": 4, "parallel.context": "ulysses"}, "mesh.seq", {"mesh.seq": 2}),
        ({"mesh.seq": 4}, "mesh.seq", {"mesh.seq": 2, "parallel.context": "ulysses"}),
        ({"model.num_kv_heads": 4, "mesh.tensor": 4}, "model.linear_key_heads", {"model.linear_key_heads": 4}),
        ({"mesh.stage": 4, "train.grad_accum": 4}, "model.num_layers", {"model.num_layers": 8}),
        ({"lora.rank": 2, "lora.targets": "wz"}, "lora.targets", {"lora.targets": "wq"}),
        ({"model.mtp_layers": 1}, "model.mtp_layers", {"model.mtp_layers": 0}),
        (EXPERTS | {"model.dense_layers": 2, "model.dense_d_ff": 48}, "model.attention_pattern", {"model.dense_layers": 0}),
    ],
)
def test_refusals_name_the_key_and_a_fix_that_works(more, key, fix):
    """The setting is refused by its name, and the fix of the message leaves no problem of the key."""

    def problems(more):
        run = helpers.tiny(SMALL | more)
        devices = Devices("cpu", "CPU", math.prod(dataclasses.astuple(run.mesh)), 64, "")
        return {p.key for p in validate.validate_step(run, devices)}

    assert key in problems(more)
    assert key not in problems(more | fix)
