"""Adapters of experts: gradients against those of merged weights, in every layout, and what a step computes."""

import dataclasses
import functools
import re

import helpers
import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_dpo import begun, off, step

from jaxtrain.config import schema
from jaxtrain.hf import peft
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.model import abstract_state, logits_function, place_model
from jaxtrain.models import flops
from jaxtrain.models.lora import is_adapter
from jaxtrain.plan.program import hlo
from jaxtrain.plan.program.op_cost import gemm_flops
from jaxtrain.step.state import abstract_tensors

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


@pytest.mark.parametrize("experts", helpers.few(["each", "shared"], "each"))
def test_a_capacity(experts):
    """Tokens that an expert drops add nothing to its adapter. An expert on its device alone is in "alone" above."""
    on = {"mesh.expert": 2, "moe.capacity_factor": 0.75}
    assert_as_merged("biases", experts, {}, on)


@pytest.mark.parametrize("experts", ["each", "shared"])
def test_lower_precisions_are_near(experts):
    """In bfloat16, with further rounds, and with the base in FP8."""
    tensors, _, grads = expected("biases", experts)
    of_experts = {k: v for k, v in grads.items() if ".mlp." in k}
    for precision, limit in (("bf16", 0.05), ("fp8", 0.4)):
        how = {"lora.experts": experts, "precision": precision, "mesh.expert": 2, "mesh.fsdp": 2}
        run = helpers.tiny(SMALL | BIASES | LORA | how)
        given = {k: tensors[k].astype(a.dtype) for k, a in abstract_tensors(helpers.program(run).state).items()}
        made = step(run, helpers.host_batch(run, 0), given)[1]
        assert off({k: made[k] for k in of_experts}, of_experts) < limit, precision
        assert ("f8E4M3FN" in helpers.lowered(run)) == (precision == "fp8")


@pytest.mark.parametrize("experts", ["each", "shared"])
def test_adapters_begin_with_the_loss_of_the_base(experts):
    """To the bit: b is zero."""
    run, plain = (helpers.tiny(SMALL | more) for more in (LORA | {"lora.experts": experts}, {}))
    tensors = helpers.initial_tensors(run)
    base = helpers.initial_tensors(plain) | {k: v for k, v in tensors.items() if k.startswith(PREFIX) and not is_adapter(k)}
    one, two = (float(step(r, helpers.host_batch(r, 0), t)[0]["loss"]) for r, t in ((run, tensors), (plain, base)))
    assert one == two


# ---- What a step computes

UNROLLED = {"parallel.scan_layers": False, "moe.capacity_factor": 1.0, "loss.chunk": 256}


def matmuls(run) -> float:
    """Return the FLOPs per token of all matmuls in a run's compiled step, whose layers are unrolled."""
    module = hlo.parse_hlo(helpers.train_step(run).as_text() or "")
    parts = module.computations.values()
    return sum(gemm_flops(where, i) for where in parts for i in where.instructions if i.opcode == "dot") / run.tokens_per_step


@pytest.mark.parametrize("model", helpers.few(["plain", "latent"], "plain"))
def test_a_step_has_the_flops_of_adapters_and_no_gradient_of_weights(model):
    """A capacity of an even load makes all matmuls plain. MFU's formula is that of the program, and so is that of HFU."""
    settings, none = SMALL | MODELS[model] | UNROLLED | LORA, {"lora.experts": "none"}
    for experts, remat in (("each", "none"), ("shared", "none"), ("each", "full")):
        runs = [helpers.tiny(settings | {"remat.policy": remat} | more) for more in ({"lora.experts": experts}, none)]
        of_adapters, of_none = (helpers.training_flops(run).causal + flops.hfu_extra(run).causal for run in runs)
        assert matmuls(runs[0]) - matmuls(runs[1]) == pytest.approx(of_adapters - of_none, rel=1e-3), (experts, remat)
    # A frozen weight has two matmuls in place of three. All of attention's are in the program, and half of them in the formula.
    settings = SMALL | MODELS[model] | UNROLLED | {"remat.policy": "none"}
    none, everything = helpers.tiny(settings | LORA | none), helpers.tiny(settings)
    m = none.model
    of_weights = sum(flops.by_weight(m).values()) + flops.head_forward(m)
    router = flops.by_weight(m)["layers.mlp.router"]
    saved = matmuls(everything) - (matmuls(none) - 3 * flops.adapters(m, none.lora))
    first = 0.1 * of_weights  # the first layer's input needs no gradient
    assert of_weights - router - first < saved < of_weights + first
    frozen = helpers.tiny(settings | {"train.freeze": "*.mlp.gate,*.mlp.up,*.mlp.down"})
    names = [name for name in flops.by_weight(m) if name.endswith(("mlp.gate", "mlp.up", "mlp.down"))]
    assert matmuls(everything) - matmuls(frozen) == pytest.approx(sum(flops.by_weight(m)[name] for name in names), rel=1e-3)


def test_an_adapter_of_attention_and_experts_alone_is_imported(tmp_path):
    """Of DeepSeek, whose dense layers and shared experts share the names of the weights: theirs begin with zeros."""
    folder = hugging_face.write(tmp_path / "theirs", "deepseek_v3")
    run = open_origin(str(folder)).run()
    how = schema.Lora(rank=2, alpha=4.0, targets="wo,gate,up,down")
    run = dataclasses.replace(run, lora=how, model=dataclasses.replace(run.model, mtp_layers=0))
    random = np.random.default_rng(0)
    adapters = {
        name: random.normal(size=a.shape).astype(np.float32)
        for name, a in abstract_tensors(abstract_state(*place_model(run))).items()
        if is_adapter(name) and (".wo_" in name or re.search(r"params\.layers\.\d+\.mlp\.lora\.", name))
    }
    peft.write_adapter(tmp_path / "adapter", adapters, run.model, how, "")
    run, notes = peft.import_adapter(tmp_path / "adapter", str(folder), tmp_path / "ours")
    (note,) = notes
    assert "dense_layers.0.mlp.gate" in note and "layers.0.mlp.shared.down" in note
    assert {*run.lora.targets.split(",")} == {"wo", *schema.FEED_FORWARD}
    origin = open_origin(str(tmp_path / "ours"))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stored = origin.read({name: a.update(sharding=here) for name, a in origin.stored.items()})
    stored = {name: np.asarray(x) for name, x in stored.items()}
    assert stored.keys() > adapters.keys()
    for name, x in stored.items():
        if name in adapters:
            np.testing.assert_array_equal(x, adapters[name], err_msg=name)
        else:
            assert x.any() == name.endswith("_a"), name
    assert np.isfinite(logits_function(origin)(hugging_face.TOKENS, np.ones_like(hugging_face.TOKENS))).all()
