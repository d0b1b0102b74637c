"""Adapters of experts: gradients against those of merged weights, in every layout, and what a step computes."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_dpo import begun, step

from jaxtrain.models.lora import is_adapter

RANK, ALPHA = 3, 6.0
LORA = {"lora.rank": RANK, "lora.alpha": ALPHA}
SMALL = {"model.num_layers": 2, "model.d_model": 32, "model.num_heads": 4, "model.num_kv_heads": 2, "model.d_ff": 48}
SMALL |= {"model.num_experts": 4, "model.experts_per_token": 2, "data.seq_len": 32, "train.global_batch": 8}
SMALL |= {"optimizer.weight_decay": 0.5, "optimizer.clip_norm": 0.0, "moe.balance_loss": 0.0, "moe.z_loss": 0.0}
BIASES = {"model.family": "gpt_oss", "model.expert_bias": True, "model.router_logit_bias": True}
LATENT = {"model.family": "deepseek_v3", "model.num_kv_heads": 4, "model.head_dim": 0, "model.kv_lora_rank": 16}
LATENT |= {"model.q_lora_rank": 16, "model.qk_nope_head_dim": 8, "model.qk_rope_head_dim": 8, "model.v_head_dim": 8}
LATENT |= {"model.router": "sigmoid", "model.router_bias": True, "model.shared_d_ff": 32}
LATENT |= {"model.num_layers": 3, "model.dense_layers": 1, "model.dense_d_ff": 64}
MODELS = {"plain": {}, "biases": BIASES, "latent": LATENT}
# The axes of our weights, inputs and outputs, written down independently; those of experts without the experts.
DELTA = {
    **dict.fromkeys(("wq", "wk", "wv"), "DR,RNH->DNH"),
    "wo": "NHR,RD->DNH",
    **dict.fromkeys(("gate", "up", "wq_down", "wkv_down"), "DR,RF->DF"),
    "down": "FR,RD->DF",
    **dict.fromkeys(("wq_up", "wkv_up"), "FR,RNH->FNH"),
}
PREFIX = "params."


def equation(a: np.ndarray, b: np.ndarray, w: np.ndarray, weight: str) -> str:
    """Return the einsum of an adapter's product, with the experts E if the weight and the adapter have them."""
    ins, out = DELTA[weight].split("->")
    if w.ndim == len(out):
        return DELTA[weight]
    return f"E{ins.replace(',', ',E')}->E{out}" if a.ndim == 3 else f"{ins}->{out}"


def uneven(run):
    """Return the tensors of a run with random adapters and biases, and with a router that prefers some experts."""
    tensors = begun(run)
    for i, name in enumerate(sorted(tensors)):
        if name.endswith(("gate_bias", "up_bias", "down_bias")):
            tensors[name] = np.random.default_rng(i).normal(0, 0.1, tensors[name].shape).astype(np.float32)
    return {k: v * 40 if k.endswith("mlp.router") else v for k, v in tensors.items()}


@functools.cache
def expected(model: str, experts: str, *more: tuple[str, object]):
    """Return the tensors, the loss, and the adapters' gradients by the chain rule from merged weights, on one device."""
    settings = SMALL | MODELS[model] | dict(more)
    run = helpers.tiny(settings | LORA | {"lora.experts": experts})
    tensors, plain, scale = uneven(run), helpers.tiny(settings), run.lora.scale
    merged, halves = {k: v for k, v in tensors.items() if not is_adapter(k)}, {}
    for name in [name for name in merged if name.startswith(PREFIX)]:
        module, _, weight = name.rpartition(".")
        a, b = (tensors.get(f"{module}.lora.{weight}_{half}") for half in "ab")
        if a is not None:
            eqn = equation(a, b, merged[name], weight)
            merged[name] = merged[name] + scale * np.einsum(eqn, a, b)
            halves[name.removeprefix(PREFIX)] = a, b, eqn
    values, grads, _ = step(plain, helpers.host_batch(plain, 0), helpers.initial_tensors(plain) | merged)
    out = {}
    for name, (a, b, eqn) in halves.items():
        module, _, weight = name.rpartition(".")

        def delta(a, b, eqn=eqn, shape=grads[name].shape):
            return jnp.broadcast_to(scale * jnp.einsum(eqn, a, b), shape)

        with jax.numpy_rank_promotion("allow"):
            of_a, of_b = jax.vjp(delta, a, b)[1](jnp.asarray(grads[name]))
        out |= {f"{module}.lora.{weight}_a": np.asarray(of_a), f"{module}.lora.{weight}_b": np.asarray(of_b)}
    return tensors, float(values["loss"]), out


def assert_as_merged(model: str, experts: str, more: dict[str, object], of_model: dict[str, object] | None = None) -> None:
    """Compare a step with `expected`. more: settings of the layout. of_model: settings of both models."""
    tensors, loss, grads = expected(model, experts, *(of_model or {}).items())
    run = helpers.tiny(SMALL | MODELS[model] | LORA | {"lora.experts": experts} | (of_model or {}) | more)
    values, mine, after = step(run, helpers.host_batch(run, 0), tensors)
    assert float(values["loss"]) == pytest.approx(loss, rel=1e-5)
    assert mine.keys() == grads.keys()
    for name in mine:
        np.testing.assert_allclose(mine[name], grads[name], rtol=2e-3, atol=3e-6, err_msg=name)
    moved = {k for k in after if k.startswith(PREFIX) and not np.array_equal(after[k], tensors[k])}
    assert moved == {k for k in after if k.startswith(PREFIX) and is_adapter(k)}


KINDS = [(model, experts) for model in MODELS for experts in ("each", "shared")]


@pytest.mark.parametrize("kind", helpers.few(KINDS, KINDS[2], KINDS[5]))
def test_gradients_are_those_of_the_merged_weights(kind):
    """Each adapter's gradients, and the loss, on one device. Loads are uneven."""
    model, experts = kind
    assert_as_merged(model, experts, {})
    modules = {name.rpartition(".lora.")[0].partition(".")[0] for name in expected(model, experts)[2] if ".mlp." in name}
    assert modules == ({"dense_layers", "layers"} if model == "latent" else {"layers"})


# Each shards something else. The expert axis has further rounds, and `even` matmuls with one expert a device.
LAYOUTS = {
    "expert, fsdp": {"mesh.expert": 2, "mesh.fsdp": 2},
    "alone": {"mesh.expert": 4, "mesh.fsdp": 2},
    "tensor, accumulation": {"mesh.tensor": 2, "mesh.fsdp": 2, "train.grad_accum": 2},
    "context, replicas": {"mesh.seq": 2, "mesh.data": 2},
    "stages": {"mesh.stage": 2, "mesh.expert": 2, "train.grad_accum": 2},
    "gathered once": {"mesh.expert": 2, "mesh.fsdp": 2, "sharding.zero": 1, "remat.policy": "full"},
}


@pytest.mark.parametrize("experts", ["each", "shared"])
@pytest.mark.parametrize("layout", helpers.few(LAYOUTS, "expert, fsdp", "stages"))
def test_layouts(layout, experts):
    """Every layout has the gradients of one device."""
    assert_as_merged("biases", experts, LAYOUTS[layout])
