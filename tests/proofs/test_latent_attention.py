"""Latent attention and dense layers: the latent cache, values narrower than keys, names in checkpoints, refusals.

tests/matrix.py lists the layouts that train latent attention; test_hf_models.py compares with transformers.
"""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.hardware import Devices
from jaxtrain.kernels import context_parallel
from jaxtrain.kernels.attention import Hardware, Rows, Spec, support
from jaxtrain.kernels.context_parallel.split import Split
from jaxtrain.models.transformer import empty_cache
from jaxtrain.step.state import abstract_tensors
from jaxtrain.step.validate import validate_step
from jaxtrain.train.generation import Sampler

LATENT = {
    "model.num_layers": 3,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.d_ff": 32,
    "model.kv_lora_rank": 16,
    "model.q_lora_rank": 24,
    "model.qk_nope_head_dim": 12,
    "model.qk_rope_head_dim": 8,
    "model.v_head_dim": 10,
    "model.init_std": 0.2,
}
DENSE = {"model.num_experts": 4, "model.dense_layers": 1, "model.dense_d_ff": 48, "model.router": "sigmoid"}
TARGETS = {"lora.rank": 2, "lora.targets": "wq_up,wkv_down,wkv_up,wo"}
CASES = {
    "two tensor ranks, adapters": LATENT | DENSE | {"model.num_layers": 2, "mesh.tensor": 2} | TARGETS,
    "queries without a latent": LATENT | {"model.q_lora_rank": 0},
}


@pytest.mark.parametrize("name", helpers.few(CASES, "two tensor ranks, adapters"))
def test_a_cache_of_latents_decodes_what_expanded_keys_give(name):
    """Decoding with the cache, four tokens at a time, gives the logits of the whole text without a cache."""
    run = helpers.tiny(CASES[name])
    made = helpers.program(run)
    params = helpers.start(made).params
    tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, (1, 24)).astype(np.int32)
    sampler = Sampler(run, made.placement)

    def whole(params, tokens):
        model = sampler.definition.bind(params)
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return model.logits(model(tokens, jnp.ones_like(tokens), at))

    specs = sampler.definition.specs(sampler.placement), jax.P()
    wanted = jax.jit(sampler.placement.shard_map(whole, specs, jax.P()))(params, tokens)
    decode, cache = jax.jit(sampler.decode), sampler.empty_cache(1, 64)
    for last in range(4, 25, 4):
        logits, cache = decode(params, cache, tokens[:, last - 4 : last])
        # The three matmuls may run in two orders, in float32.
        assert np.abs(logits - wanted[:, last - 1]).max() < 2e-5 * np.abs(wanted).max()


def test_a_cache_has_a_latent_and_a_rotated_key_a_token():
    run = helpers.tiny(LATENT | DENSE)
    cache = jax.eval_shape(lambda: empty_cache(run.model, helpers.program(run).placement, 2, 32, jnp.dtype("bfloat16")))
    assert [a.shape for a in cache.kv] == [(2, 2, 32, 1, 16), (2, 2, 32, 1, 8)], "of the two layers of the stack"
    assert [a.shape for a in cache.dense[0]] == [(2, 32, 1, 16), (2, 32, 1, 8)] and len(cache.dense) == 1


def rows():
    segments = np.repeat([1, 2, 3, 0], [20, 7, 30, 7]).astype(np.int32)[None]
    at = np.concatenate([np.arange(n, dtype=np.int32) for n in (20, 7, 30, 7)])[None]
    return Rows(segments, at, segments, at)


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_values_may_be_narrower_than_keys(kernel):
    """Output and gradients equal those of values that are padded with zeros."""
    rng = np.random.default_rng(0)
    q, k, v, by = (rng.standard_normal((1, 64, 4, width)).astype(np.float32) for width in (24, 24, 16, 16))
    spec, split = Spec(24, "f32", True, 3, value_dim=16), Split()

    def run(q, k, v):
        return context_parallel.attention(q, k, v, context_parallel.prepare(rows(), spec, kernel, split), spec, kernel, split)

    def filled(q, k, v):
        return run(q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, 8))))[..., :16]

    def both(*given):
        return [(y, back(by)) for y, back in (jax.vjp(of, *given) for of in (run, filled))]

    (y, got), (wanted_y, wanted) = jax.jit(both)(q, k, v)
    assert y.shape == v.shape
    np.testing.assert_allclose(y, wanted_y, rtol=1e-6, atol=1e-6)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_cudnn_takes_narrower_values_from_hopper_on():
    spec = Spec(192, "bf16", True, 3, value_dim=128)
    assert support.cudnn(spec, Hardware("gpu", (9, 0))) is None
    assert support.cudnn(spec, Hardware("gpu", (8, 0)))


def test_dense_layers_are_named_apart_in_checkpoints():
    run = helpers.tiny(LATENT | DENSE)
    names = abstract_tensors(helpers.program(run).state)
    assert names["params.dense_layers.0.mlp.gate"].shape == (32, 48)
    assert names["params.layers.1.mlp.gate"].shape == (4, 32, 32) and "params.layers.2.mlp.gate" not in names
    assert "optimizer.mu.dense_layers.0.attention.wkv_up" in names


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model.v_head_dim": 0}, "model.v_head_dim"),
        ({"model.v_head_dim": 24}, "model.v_head_dim"),  # wider than a key
        ({"model.kv_lora_rank": 0}, "model.q_lora_rank"),
        ({"model.qk_rope_head_dim": 7}, "model.qk_rope_head_dim"),
        ({"model.num_kv_heads": 2}, "model.num_kv_heads"),
        ({"model.qk_norm": True}, "model.qk_norm"),
        ({"model.dense_layers": 1, "model.dense_d_ff": 8}, "model.dense_layers"),  # without experts
        (DENSE | {"model.dense_layers": 3}, "model.dense_layers"),
        ({"model.dense_d_ff": 8}, "model.dense_d_ff"),
        ({"mesh.fsdp": 8, "model.kv_lora_rank": 12}, "model.kv_lora_rank"),
        (DENSE | {"model.router_groups": 3}, "model.router_groups"),
        (DENSE | {"model.router_groups": 4}, "model.groups_per_token"),
    ],
)
def test_what_does_not_combine_is_refused(change, key):
    problems = validate_step(helpers.tiny(LATENT | change), Devices("cpu", "cpu", 8 if "mesh.fsdp" in change else 1, 8.0, ""))
    assert key in {p.key for p in problems}
