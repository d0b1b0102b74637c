"""How much arithmetic a token costs, how many parameters a model has, and what part of a GPU's peak that is.

Per token and layer, forward, with model width D, N query and K key/value heads of width H, feed-forward width F, sequence
length T, and 2 FLOPs per multiply-add:

    projections    2 * (D N H  +  2 D K H  +  N H D)     q, k and v, output
    feed-forward   2 * 3 D F                             gate, up, down
    attention      4 N H T                               scores and their sum over values, whole T x T square ("full")
                   2 N H T                               the half that a causal mask leaves                   ("causal")

and 2 D V once for the head (also when its weight is the embedding's; looking a token up costs nothing). Training is three
times the forward pass: the backward pass has two GEMMs for each one. With H N = D the "full" sum is the 6 N + 12 L H Q T of
the PaLM paper, appendix B; Megatron-LM and MaxText count the "causal" half. The two differ by a tenth for 8B at 8192, so no
figure goes without its convention's name. Neither counts norms, rotary, softmax or the optimizer, neither knows of
document borders, and what rematerialisation computes again is in HFU only. Of a run that does not train all weights, MFU counts
what is left (`training`).

A token of a model with E experts goes through k of them, and through the shared one. So the feed-forward block is, with shared
width S,

    feed-forward   2 * 3 D (k F + S)  +  2 D E           k experts and the shared one, router

and whatever E is, MFU counts these active FLOPs only. Where experts take a fixed number of tokens (moe.capacity_factor, in even
shares), a GPU computes all of their places, filled or not: that is in HFU (`beyond`).
"""

import dataclasses
import fnmatch

from jaxtrain import windows
from jaxtrain.activations import kept
from jaxtrain.config import Model, Remat, RunConfig, parts_of


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs per token in both conventions."""

    causal: float
    full: float

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.causal + other.causal, self.full + other.full)

    def __mul__(self, factor: float) -> "Flops":
        return Flops(self.causal * factor, self.full * factor)


def head_dim(model: Model) -> int:
    """H: as configured, or D / N."""
    return model.head_dim or model.d_model // model.num_heads


# Weights of a model's matrix products -> the activations they make. A tied head is the embedding.
_MADE = {
    **{f"layers.attention.{name}": made for name, made in (("wq", "q"), ("wk", "k"), ("wv", "v"), ("wo", "attention_proj"))},
    **{f"layers.mlp.{name}": f"mlp_{name}" for name in ("gate", "up", "down")},
    **{f"layers.mlp.shared.{name}": f"mlp_{name}" for name in ("gate", "up", "down")},
    "layers.mlp.router": "router",
}
_BELOW = ("embed.embedding", "layers.attention_norm.scale", "layers.mlp_norm.scale", *_MADE)  # all that is below the last norm
_EXPERTS = tuple(f"layers.mlp.{name}" for name in ("gate", "up", "down"))


def products(model: Model, rows: float = 0.0) -> dict[str, float]:
    """Forward FLOPs per token of one layer's GEMMs, by weight (names without layer numbers).

    rows: of experts' GEMMs for each token, in place of the experts that it goes through.
    """
    d, h = model.d_model, head_dim(model)
    heads, kv_heads = model.num_heads * h, model.num_kv_heads * h
    into = {"wq": heads, "wk": kv_heads, "wv": kv_heads, "wo": heads}
    found = {f"layers.attention.{name}": 2.0 * d * width for name, width in into.items()}
    each = (rows or model.experts_per_token) if model.num_experts else 1
    found |= dict.fromkeys(_EXPERTS, 2.0 * d * model.d_ff * each)
    if model.shared_d_ff:
        found |= {f"layers.mlp.shared.{name}": 2.0 * d * model.shared_d_ff for name in ("gate", "up", "down")}
    if model.num_experts:
        found["layers.mlp.router"] = 2.0 * d * model.num_experts
    return found


def gemms(model: Model, rows: float = 0.0) -> dict[str, float]:
    """Forward FLOPs per token of one layer's GEMMs, by the activation they make (names of `activations.ACTIVATIONS`)."""
    out: dict[str, float] = {}
    for name, cost in products(model, rows).items():
        out[_MADE[name]] = out.get(_MADE[name], 0.0) + cost
    return out


def attention(model: Model, seq_len: int) -> Flops:
    """Forward FLOPs per token of one layer's attention, the mean of all layers, without its projections.

    A sliding window of W limits the causal count to W - W^2 / 2T positions, which is T / 2 at W = T. The full convention
    knows no masks: it counts T.
    """
    causal = 0.0
    for kind, layers in windows.layers_by_kind(model):
        window = min(windows.window(model, kind) or seq_len, seq_len)
        causal += layers / model.num_layers * (window - window**2 / (2 * seq_len))
    per_position = 4 * model.num_heads * head_dim(model)
    return Flops(per_position * causal, per_position * seq_len)


def forward(model: Model, seq_len: int) -> Flops:
    """Forward FLOPs per token."""
    linear = model.num_layers * sum(gemms(model).values()) + 2 * model.d_model * model.vocab_size
    return Flops(linear, linear) + attention(model, seq_len) * model.num_layers


def per_token(model: Model, seq_len: int) -> Flops:
    """Training FLOPs per token: three times the forward pass. Llama-3-8B at 8192: 51.5 GFLOP causal, 57.9 full."""
    return forward(model, seq_len) * 3


def newton_schulz(model: Model) -> float:
    """FLOPs a step, of the whole model, of Muon's matrix products; not of a token, and in no MFU.

    Of a matrix with sides a <= b an iteration multiplies it by its transpose, that by itself, and the sum with the matrix:
    2 a^2 b + 2 a^3 + 2 a^2 b. There are five.
    """
    d, h = model.d_model, head_dim(model)
    columns = [*[model.num_heads * h] * 2, *[model.num_kv_heads * h] * 2, *[model.d_ff] * 3 * max(1, model.num_experts)]
    if model.num_experts:
        columns += [model.num_experts, *[model.shared_d_ff] * (3 if model.shared_d_ff else 0)]
    sides = [(min(d, n), max(d, n)) for n in columns]
    return 5.0 * model.num_layers * sum(4 * a * a * b + 2 * a**3 for a, b in sides)


def learns(run: RunConfig, name: str) -> bool:
    """Whether a parameter, by its name without layer numbers, is trained."""
    return not run.lora.rank and not any(fnmatch.fnmatchcase(name, pattern) for pattern in parts_of(run.train.freeze))


def passes_layers(run: RunConfig) -> bool:
    """Whether the backward pass goes through the layers: not where nothing there, nor below, is trained."""
    return run.lora.rank > 0 or any(learns(run, name) for name in _BELOW)


def adapters(run: RunConfig) -> float:
    """Forward FLOPs per token of the adapters of all layers: 2 R (inputs + outputs) for each weight that has one."""
    m, d = run.model, run.model.d_model
    heads, kv_heads = m.num_heads * head_dim(m), m.num_kv_heads * head_dim(m)
    ends = {"wq": d + heads, "wk": d + kv_heads, "wv": d + kv_heads, "wo": heads + d}
    ends |= dict.fromkeys(("gate", "up", "down"), (d + m.d_ff) * (m.experts_per_token if m.num_experts else 1))
    return m.num_layers * 2 * run.lora.rank * sum(ends.get(name, 0) for name in parts_of(run.lora.targets))


def training(run: RunConfig) -> Flops:
    """Training FLOPs per token of a run: those of `per_token`, less what is not computed for frozen weights, and adapters'.

    A frozen weight has no gradient, a third of its three GEMMs: with adapters a step is twice the forward pass, and three times
    that of the adapters. Below the lowest layer that is trained gradients are counted that need not be computed, as is the
    first layer's in the usual count.
    """
    m, everything = run.model, per_token(run.model, run.data.seq_len)
    head = 2 * m.d_model * m.vocab_size
    saved = sum(m.num_layers * cost for name, cost in products(m).items() if not learns(run, name))
    saved += 0 if learns(run, "embed.embedding" if m.tied_head else "head") else head
    total = everything + Flops(1.0, 1.0) * (3 * adapters(run) - saved)
    if passes_layers(run):
        return total
    within = forward(m, run.data.seq_len) + Flops(-head, -head)
    through = within + attention(m, run.data.seq_len) * m.num_layers  # its backward pass is all of activations
    to_norm = 0 if learns(run, "final_norm.scale") else head  # nobody wants the gradient of the last hidden states
    return total + through * -1 + Flops(-to_norm, -to_norm)


def head(run: RunConfig) -> float:
    """Of them, those of the output head: its product, and the gradients of states and of its weight where they are wanted."""
    m = run.model
    wanted = passes_layers(run) or learns(run, "final_norm.scale")
    return 2.0 * m.d_model * m.vocab_size * (1 + wanted + learns(run, "embed.embedding" if m.tied_head else "head"))


def beyond(run: RunConfig) -> Flops:
    """FLOPs per token that a run computes beside the model's, for HFU: what remat computes a second time, and the places of
    experts beyond an even load. With a capacity below 1 tokens are dropped, and it may be less than nothing."""
    back = passes_layers(run)
    extra = recompute(run.model, run.remat, run.data.seq_len) if back else Flops(0.0, 0.0)
    rows = expert_rows(run)
    if not run.model.num_experts or rows == run.model.experts_per_token:
        return extra
    spare = run.model.num_layers * (sum(gemms(run.model, rows).values()) - sum(gemms(run.model).values()))
    again = recompute(run.model, run.remat, run.data.seq_len, rows) + extra * -1 if back else Flops(0.0, 0.0)
    passes = 1 + back * (1 + learns(run, "layers.mlp.gate"))  # the backward pass: of activations, and of weights that learn
    return extra + again + Flops(spare, spare) * passes


def expert_rows(run: RunConfig) -> float:
    """Rows that all experts together multiply for each token, of the load that a plan takes: an even one.

    The experts of a token; with a capacity that many even shares, since arrays have the size of what could come. Likewise with
    one expert on each device, whose plain matmul takes all of its room (kernels/experts/feed_forward.py).
    """
    e, m = run.moe, run.model
    alone = m.num_experts > 1 and run.mesh.expert == m.num_experts and e.impl == "auto"
    return min(m.experts_per_token * (e.capacity_factor or (e.buffer if alone else 1.0)), m.num_experts)


def recompute(model: Model, remat: Remat, seq_len: int, rows: float = 0.0) -> Flops:
    """FLOPs per token that the remat policy computes a second time; HFU counts them, MFU does not. rows: as in `products`.

    Of each layer a GEMM runs again where the backward pass needs its result and no activation behind it was kept:

    - q, k, v where they are not kept; with qk_norm q and k in any case, since its backward pass reads what was normed, which
      only "dots" keeps;
    - the attention kernel unless both its output and its log-sum-exp are kept;
    - wo unless its output is kept, or the residual stream after it; its output with sandwich_norm, whose backward reads it;
    - gate and up where they are not kept, those of experts too; the router, whose scores no policy keeps but "none";
    - down in the layers whose output is the next layer's input under the same checkpoint, so not in the last layer of each
      `remat.every`: nothing in the backward pass reads the output of the last one, and XLA drops it; with sandwich_norm in all.

    This holds for a fused attention kernel with its own backward pass (cuDNN). Left out, as in the usual definition: what
    that backward pass computes again inside itself.
    """
    if remat.policy == "none":
        return Flops(0.0, 0.0)
    have = kept(remat)
    cost = gemms(model, rows)
    made = have - {"q", "k"} if model.qk_norm and remat.policy != "dots" else have
    linear = sum(cost[name] for name in ("q", "k", "v", "mlp_gate", "mlp_up") if name not in made) + cost.get("router", 0.0)
    if not have & ({"attention_proj"} if model.sandwich_norm else {"attention_proj", "residual"}):
        linear += cost["attention_proj"]
    total = Flops(linear, linear)
    if not {"attention_out", "attention_lse"} <= have:
        total += attention(model, seq_len)
    total *= model.num_layers
    if "mlp_down" not in have:
        inner = model.num_layers - (0 if model.sandwich_norm else -(-model.num_layers // remat.every))
        total += Flops(cost["mlp_down"], cost["mlp_down"]) * inner
    return total


def mfu(flops_per_token: float, tokens_per_s: float, peak_tflops: float | None) -> float | None:
    """Part of the dense peak in use: FLOPs per token x tokens per second, both per device, over peak (TFLOP/s).

    With `per_token` it is MFU, with `per_token + beyond` HFU. None where the peak is not known (None or 0).
    """
    if not peak_tflops:
        return None
    return flops_per_token * tokens_per_s / (peak_tflops * 1e12)


def parameters(model: Model) -> dict[str, int]:
    """Number of parameters by part, and their "total". A tied head has none of its own; of a model with experts "mlp" is the
    shared one."""
    d, h, layers = model.d_model, head_dim(model), model.num_layers
    q, kv = model.num_heads * h, model.num_kv_heads * h
    attention_params = 2 * d * q + 2 * d * kv
    if model.qkv_bias:
        attention_params += q + 2 * kv
    if model.qk_norm:
        attention_params += 2 * h
    experts = model.num_experts
    parts = {
        "embedding": model.vocab_size * d,
        "attention": layers * attention_params,
        "mlp": layers * 3 * d * (model.shared_d_ff if experts else model.d_ff),
        "experts": layers * experts * 3 * d * model.d_ff,
        "router": layers * experts * (d + model.router_bias),
        "norms": layers * (4 if model.sandwich_norm else 2) * d + d,
        "head": 0 if model.tied_head else model.vocab_size * d,
    }
    return parts | {"total": sum(parts.values())}


def active_parameters(model: Model) -> int:
    """Parameters that one token meets: of the experts those it goes through, of all else everything."""
    count = parameters(model)
    if not model.num_experts:
        return count["total"]
    return count["total"] - count["experts"] * (model.num_experts - model.experts_per_token) // model.num_experts
