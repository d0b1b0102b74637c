"""FLOPs and parameter counts, compared with published figures and with counts by hand."""

import dataclasses

import helpers
import pytest

from jaxtrain.config.schema import Model, Moe, Remat, RunConfig, Train
from jaxtrain.models import flops, preset
from jaxtrain.models.activations import parse_tensors

LLAMA = Model(**preset("llama3_8b"))
SMALL = Model(num_layers=6, d_model=64, num_heads=8, num_kv_heads=2, head_dim=16, d_ff=160, vocab_size=100)


# Mixtral 8x7B (arXiv:2401.04088): 46.7 B parameters, 12.9 B of them used by a token. Qwen3-30B-A3B (arXiv:2505.09388): 30.5 B
# and 3.3 B.
@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [
        (Model(**preset("llama3_70b")), 70.554, 70.554),
        (LLAMA, 8.030_261_248, 8.030_261_248),  # exact to the last norm
        (Model(**preset("mixtral_8x7b")), 46.703, 12.880),
        (Model(**preset("qwen3_30b_a3b")), 30.532, 3.354),
        (Model(**preset("deepseek_v3")), 671.026, 37.552),  # arXiv:2412.19437: 671 B and 37 B
    ],
)
def test_parameters_of_published_models(model, billions, active):
    parts = flops.parameters(model)
    assert parts["total"] / 1e9 == pytest.approx(billions, abs=1e-9 if model is LLAMA else 1e-3)
    assert flops.active_parameters(model) / 1e9 == pytest.approx(active, abs=1e-3)
    assert sum(n for part, n in parts.items() if part != "total") == parts["total"]


def test_llama3_8b_flops_per_token():
    """Megatron and MaxText count 51.47 GFLOP a token at 8192 tokens. The full convention (no causal mask) adds 6.44 GFLOP."""
    f = flops.per_token(LLAMA, 8192)
    assert f.causal == pytest.approx(51.47e9, rel=5e-3)
    assert f.full - f.causal == pytest.approx(6 * 32 * 4096 * 8192)


def test_full_convention_is_palms():
    """The full convention is PaLM's 6 N + 12 L H Q T. N counts matmul weights: without the embedding, with the output head."""
    parts = flops.parameters(SMALL)
    weights = parts["attention"] + parts["mlp"] + parts["head"]
    assert flops.per_token(SMALL, 32).full == 6 * weights + 12 * 6 * 8 * 16 * 32


@pytest.mark.parametrize("window", [7, 100])
def test_sliding_window_limits_the_causal_count(window):
    seq_len = 64
    exact = sum(min(t + 1, window) for t in range(seq_len)) / seq_len
    got = flops.attention(dataclasses.replace(SMALL, sliding_window=window), seq_len)
    # The convention counts half of the square, or half of the band: half a position less than the exact sum.
    assert got.causal / (4 * 8 * 16) == pytest.approx(exact, abs=0.51)
    assert got.full == 4 * 8 * 16 * seq_len


def test_recompute_by_policy():
    layer = flops.gemms(SMALL)
    attention = flops.attention(SMALL, 32).causal

    def causal(**remat):
        return flops.recompute(SMALL, Remat(**remat), 32).causal

    assert causal(policy="none") == 0
    assert causal(policy="dots") == 6 * attention
    assert causal(policy="full") == 6 * (sum(layer.values()) - layer["mlp_down"] + attention)
    assert causal(policy="attention") == 6 * (layer["attention_proj"] + layer["mlp_gate"] + layer["mlp_up"])
    # Layers that share a checkpoint: the outputs of all but a group's last layer are recomputed (3 groups of 2; then 4 and 2).
    assert causal(policy="full", every=2) == causal(policy="full") + 3 * layer["mlp_down"]
    assert causal(policy="full", every=4) == causal(policy="full") + 4 * layer["mlp_down"]
    # A saved attention output without its log-sum-exp does not avoid the recompute of attention. A saved residual avoids wo's.
    most = "q=keep,k=keep,v=keep,mlp_gate=offload,mlp_up=keep"
    assert causal(policy="custom", tensors=most + ",residual=keep,attention_out=keep") == 6 * attention
    assert causal(policy="custom", tensors=most + ",residual=recompute") == 6 * (attention + layer["attention_proj"])


def test_recompute_with_norms_behind_the_products():
    """The backward pass of a norm reads the norm's input, so saving the norm's output avoids no recompute of the matmul before
    it.
    """
    layer, attention = flops.gemms(SMALL), flops.attention(SMALL, 32).causal
    normed, post = dataclasses.replace(SMALL, qk_norm=True), dataclasses.replace(SMALL, norm_placement="sandwich")

    def causal(model, policy, tensors=""):
        return flops.recompute(model, Remat(policy=policy, tensors=tensors), 32).causal

    every = ",".join(f"{name}=keep" for name in ("q", "k", "v", "mlp_gate", "mlp_up", "residual"))
    assert causal(SMALL, "custom", every) == 6 * attention
    assert causal(normed, "custom", every) == 6 * (attention + layer["q"] + layer["k"])
    assert causal(post, "custom", every) == 6 * (attention + layer["attention_proj"] + layer["mlp_down"])
    assert causal(normed, "dots") == causal(post, "dots") == 6 * attention


def test_tensors_of_custom_remat():
    places, problems = parse_tensors("q=keep, mlp_up=offload,k=recompute")
    assert places == {"q": "keep", "mlp_up": "offload", "k": "recompute"} and not problems
    _, problems = parse_tensors("q,mlp_upp=keep,v=kep,k=keep,k=offload,mlp_gate =keep")
    assert [p.value for p in problems] == ["q", "mlp_upp=keep", "v=kep", "k=offload", "mlp_gate =keep"]


FEW = dataclasses.replace(SMALL, num_experts=4, experts_per_token=2, shared_d_ff=48)
EXPERTS = RunConfig(model=FEW, train=Train(freeze=""))


def test_experts_count_those_a_token_goes_through():
    """The FLOPs of a token are three matmuls in each of its two experts and in the shared expert, and the router's matmul."""
    d = FEW.d_model
    mlp = 3 * 2 * d * (2 * FEW.d_ff + FEW.shared_d_ff) + 2 * d * 4
    dense = 3 * 2 * d * SMALL.d_ff
    assert flops.forward(FEW, 32).causal - flops.forward(SMALL, 32).causal == 6 * (mlp - dense)
    assert (
        flops.per_token(dataclasses.replace(FEW, num_experts=64), 32).full - flops.per_token(FEW, 32).full == 3 * 6 * 2 * d * 60
    )
    # 6 N of the PaLM paper, with N the active matmul weights
    weights = flops.active_parameters(FEW) - FEW.vocab_size * d - flops.parameters(FEW)["norms"]
    assert flops.per_token(FEW, 32).full == 6 * weights + 12 * 6 * 8 * 16 * 32


LATENT = dataclasses.replace(
    FEW, num_kv_heads=8, head_dim=20, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16
)


@pytest.mark.parametrize("rank", [0, 24])
def test_latent_attention_by_hand(rank):
    """Each weight of the matmuls in DeepSeek-V2's figure 3 counts 2 FLOPs. A head has dimension 20 in scores, 16 in values."""
    model, d, n = dataclasses.replace(LATENT, q_lora_rank=rank), 64, 8
    queries = d * rank + rank * n * 20 if rank else d * n * 20
    weights = queries + d * (32 + 8) + 32 * n * (12 + 16) + n * 16 * d
    assert sum(flops.gemms(model)[name] for name in ("q", "k", "v", "attention_proj")) + sum(
        flops.gemms(model).get(name, 0) for name in ("q_latent", "kv_latent")
    ) == pytest.approx(2 * weights)
    assert flops.parameters(model)["attention"] == 6 * (weights + rank + 32)
    assert flops.attention(model, 64) == flops.Flops(2 * n * (20 + 16) * 32, 2 * n * (20 + 16) * 64)


def test_dense_layers_have_no_experts():
    dense = dataclasses.replace(LATENT, dense_layers=2, dense_d_ff=200)
    d, mlp = FEW.d_model, 3 * FEW.d_model * (2 * FEW.d_ff + FEW.shared_d_ff) + 4 * FEW.d_model
    assert flops.forward(LATENT, 32).full - flops.forward(dense, 32).full == 2 * 2 * (mlp - 3 * d * 200)
    found = flops.by_weight(dense)
    assert found["dense_layers.1.mlp.up"] == 2 * d * 200 and found["layers.mlp.router"] == 4 * 2 * d * 4
    assert sum(found.values()) == pytest.approx(flops.layers(dense))
    full = flops.recompute(dense, Remat(policy="full"), 32).causal
    of_all = flops.layers(dense) + 6 * flops.attention(dense, 32).causal
    assert full == pytest.approx(of_all - 4 * flops.gemms(dense)["mlp_down"] - 2 * 2 * d * 200)


def test_a_capacity_costs_its_places_and_is_in_no_mfu():
    one = 6 * 3 * 2 * 2 * FEW.d_model * FEW.d_ff  # forward FLOPs of all layers' experts, with two experts a token
    roomy = dataclasses.replace(EXPERTS, moe=Moe(capacity_factor=1.5))
    assert helpers.training_flops(roomy) == helpers.training_flops(EXPERTS)
    assert flops.hfu_extra(EXPERTS).causal == 0
    assert flops.hfu_extra(roomy).causal == pytest.approx(3 * one * 0.5)
    tight = dataclasses.replace(EXPERTS, moe=Moe(capacity_factor=0.5))
    assert flops.hfu_extra(tight).causal == pytest.approx(-3 * one * 0.5)  # dropped tokens are computed by nobody
    frozen = dataclasses.replace(roomy, train=Train(freeze="layers.mlp.*"))
    assert flops.hfu_extra(frozen).causal == pytest.approx(2 * one * 0.5)


def test_an_expert_that_is_alone_on_its_device_computes_its_spare_rows():
    """Each token has two experts, and a buffer has 1.25 times the rows of an even load. A device with one expert computes its
    whole buffer.
    """
    for ranks, rows in ((1, 2.0), (FEW.num_experts // 2, 2.0), (FEW.num_experts, 2.5)):
        spread = dataclasses.replace(EXPERTS, mesh=dataclasses.replace(EXPERTS.mesh, expert=ranks))
        assert flops.expert_rows(spread.model, spread.moe, spread.mesh) == pytest.approx(rows)
    assert flops.expert_rows(spread.model, Moe(impl="ragged"), spread.mesh) == 2.0
