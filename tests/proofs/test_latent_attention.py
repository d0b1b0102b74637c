"""Latent attention and dense layers: the latent cache, values narrower than keys, names in checkpoints, refusals.

tests/matrix.py lists the layouts that train latent attention; test_hf_models.py compares with transformers.
"""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest

from jaxtrain.generation import Sampler
from jaxtrain.hardware import Devices
from jaxtrain.kernels import context
from jaxtrain.kernels.attention import Hardware, Rows, Spec, cudnn
from jaxtrain.kernels.context.split import Split
from jaxtrain.models.transformer import empty_cache
from jaxtrain.plan.program import hlo
from jaxtrain.train.state import abstract_tensors
from jaxtrain.validate import validate_step

LATENT = {
    "model.num_layers": 3,
    "model.num_kv_heads": 8,
    "model.kv_lora_rank": 16,
    "model.q_lora_rank": 24,
    "model.qk_nope_head_dim": 12,
    "model.qk_rope_head_dim": 8,
    "model.v_head_dim": 10,
    "model.init_std": 0.2,
}
DENSE = {"model.num_experts": 4, "model.dense_layers": 1, "model.dense_d_ff": 48, "model.router": "sigmoid"}
CASES = {
    "one device": LATENT | DENSE,
    "queries without a latent": LATENT | {"model.q_lora_rank": 0},
    "two tensor ranks": LATENT | DENSE | {"mesh.tensor": 2},
    "adapters": LATENT | {"lora.rank": 2, "lora.targets": "wq_up,wkv_down,wkv_up,wo"},
}


@pytest.mark.parametrize("name", helpers.few(CASES, "two tensor ranks", "adapters"))
def test_a_cache_of_latents_decodes_what_expanded_keys_give(name):
    """Decoding with the cache, first a prompt, then one token at a time, gives the logits of the whole text without a cache."""
    run = helpers.tiny(CASES[name])
    made, params = helpers.program(run), helpers.fresh_state(run).params
    if run.lora.rank:  # a new adapter would add nothing
        params = jax.tree.map(lambda w: w + 0.1 * jnp.cos(jnp.arange(w.size, dtype=w.dtype).reshape(w.shape)), params)
    tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, (1, 24)).astype(np.int32)
    sampler = Sampler(run, made.placement)

    def whole(params, tokens):
        model = sampler.definition.bind(params)
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return model.logits(model(tokens, jnp.ones_like(tokens), at))

    specs = sampler.definition.specs(sampler.placement), jax.P()
    wanted = jax.jit(sampler.placement.shard_map(whole, specs, jax.P()))(params, tokens)
    decode, cache = jax.jit(sampler.decode), sampler.empty_cache(1, 64)
    for first, last in ((0, 20), (20, 21), (21, 22)):
        logits, cache = decode(params, cache, tokens[:, first:last])
        # The three matmuls may run in two orders, in float32.
        assert np.abs(logits - wanted[:, last - 1]).max() < 2e-5 * np.abs(wanted).max()


def test_a_cache_has_a_latent_and_a_rotated_key_a_token():
    run = helpers.tiny(LATENT | DENSE)
    cache = empty_cache(run.model, helpers.program(run).placement, 2, 32, jnp.dtype("bfloat16"))
    assert [a.shape for a in cache.kv] == [(2, 2, 32, 1, 16), (2, 2, 32, 1, 8)], "of the two layers of the stack"
    assert [a.shape for a in cache.dense[0]] == [(2, 32, 1, 16), (2, 32, 1, 8)] and len(cache.dense) == 1


@functools.cache
def rows():
    segments = jnp.repeat(jnp.array([[1, 2, 3, 0]], jnp.int32), jnp.array([20, 7, 30, 7]), axis=1, total_repeat_length=64)
    at = jnp.concatenate([jnp.arange(n, dtype=jnp.int32) for n in (20, 7, 30, 7)])[None]
    return Rows(segments, at, segments, at)


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_values_may_be_narrower_than_keys(kernel):
    """Output and gradients equal those of values that are padded with zeros."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k = (jax.random.normal(key, (1, 64, 4, 24)) for key in keys[:2])
    v, by = (jax.random.normal(key, (1, 64, 4, 16)) for key in keys[2:])
    spec, split = Spec(24, "f32", True, 3, value_dim=16), Split()

    def run(q, k, v):
        return context.attention(q, k, v, context.prepare(rows(), spec, kernel, split), spec, kernel, split)

    def filled(q, k, v):
        return run(q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, 8))))[..., :16]

    for of in (run, filled):
        assert of(q, k, v).shape == v.shape
    got, wanted = (jax.grad(lambda *a, of=of: jnp.sum(of(*a) * by), (0, 1, 2))(q, k, v) for of in (run, filled))
    np.testing.assert_allclose(run(q, k, v), filled(q, k, v), rtol=1e-6, atol=1e-6)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_cudnn_takes_narrower_values_from_hopper_on():
    spec = Spec(192, "bf16", True, 3, value_dim=128)
    assert cudnn.unsupported(spec, Hardware("gpu", (9, 0))) is None
    assert "9.0" in str(cudnn.unsupported(spec, Hardware("gpu", (8, 0))))


def test_dense_layers_are_named_apart_in_checkpoints():
    run = helpers.tiny(LATENT | DENSE)
    names = abstract_tensors(helpers.program(run).state)
    assert names["params.dense_layers.0.mlp.gate"].shape == (64, 48)
    assert names["params.layers.1.mlp.gate"].shape == (4, 64, 96) and "params.layers.2.mlp.gate" not in names
    assert "optimizer.mu.dense_layers.0.attention.wkv_up" in names


REFUSED = [
    ({"model.v_head_dim": 0}, "model.v_head_dim", "is needed with model.kv_lora_rank"),
    ({"model.kv_lora_rank": 0}, "model.q_lora_rank", "is read only with model.kv_lora_rank"),
    ({"model.qk_rope_head_dim": 7}, "model.qk_rope_head_dim", "must be even"),
    ({"model.head_dim": 16}, "model.head_dim", "must be qk_nope_head_dim"),
    ({"model.v_head_dim": 24}, "model.v_head_dim", "is above the width of a key's head, 20"),
    ({"model.num_kv_heads": 4}, "model.num_kv_heads", "each of the model.num_heads = 8 heads has keys of its own"),
    ({"model.qk_norm": True}, "model.qk_norm", "latent attention is built without it"),
    ({"model.dense_layers": 1, "model.dense_d_ff": 8}, "model.dense_layers", "and model.num_experts = 0"),
    (DENSE | {"model.dense_layers": 3}, "model.dense_layers", "leaves no layer with experts"),
    (DENSE | {"model.dense_d_ff": 0}, "model.dense_d_ff", "is needed with model.dense_layers"),
    ({"model.dense_d_ff": 8}, "model.dense_d_ff", "is read only with model.dense_layers"),
    ({"mesh.fsdp": 8, "model.kv_lora_rank": 12}, "model.kv_lora_rank", "does not divide over mesh.fsdp = 8"),
    (DENSE | {"model.router_groups": 3}, "model.router_groups", "does not divide model.num_experts = 4"),
    (DENSE | {"model.groups_per_token": 2}, "model.groups_per_token", "there are only model.router_groups = 1 groups"),
    (DENSE | {"model.router_groups": 4}, "model.groups_per_token", "has only 1 experts for model.experts_per_token = 2"),
]


@pytest.mark.parametrize(("change", "key", "words"), REFUSED, ids=lambda x: x if isinstance(x, str) else ",".join(x))
def test_what_does_not_combine_is_refused(change, key, words):
    run = helpers.tiny(LATENT | change)
    problems = validate_step(run, Devices("cpu", "cpu", 8 if "mesh.fsdp" in change else 1, 8.0, "here"))
    assert key in {p.key for p in problems}
    assert any(words in p.rule for p in problems if p.key == key), [str(p) for p in problems]


SMALLER = (
    *("model.num_layers=3", "model.dense_layers=1", "model.dense_d_ff=2048", "model.d_model=1024", "model.num_heads=16"),
    *("model.num_kv_heads=16", "model.q_lora_rank=256", "model.vocab_size=4096", "model.num_experts=16", "model.d_ff=512"),
    *("model.shared_d_ff=512", "mesh.fsdp=1", "train.global_batch=8", "train.grad_accum=1", "train.accumulate=auto"),
)


@pytest.mark.more
def test_a_step_on_h200s_computes_what_the_formula_says():
    """For a smaller DeepSeek-V3 on 8 H200s, the program's FLOPs equal the formula's. cuDNN computes attention, with 192 numbers
    in a head of keys and 128 in a head of values.
    """
    made = plans.plan("h200:8", *SMALLER, of="configs/deepseek_v3.py")
    calls = [
        i for i, _, _, _ in hlo.walk(plans.module("h200:8", *SMALLER, of="configs/deepseek_v3.py")) if "fmhaSoftmax" in i.target
    ]
    assert made.attention == "cudnn" and calls
    assert made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)
