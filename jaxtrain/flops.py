"""FLOPs per token, parameters of a model, and MFU.

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

and of the first layers that have no experts (model.dense_layers) 2 * 3 D times their own width. Whatever E is, MFU counts these
active FLOPs only. Where experts take a fixed number of tokens (moe.capacity_factor, in even shares), a GPU computes all of
their places, filled or not: that is in HFU (`beyond`).

A family from outside the package may state its own forward FLOPs (`stated`). Otherwise these formulas count for it too.

Multi-head latent attention has a latent of width R for keys and values, and one of width Q for queries (or none). With heads of
width H = P + r for queries and keys, of which r are rotated, and of width W for values,

    projections    2 * (D Q + Q N H  +  D (R + r) + R N (P + W)  +  N W D)
    attention      2 N (H + W) T                         ("full"), half of it ("causal")

as training computes it, with the keys and values of every head. Where a kernel takes values no narrower than keys, the zeros
that fill them up are in neither MFU nor HFU.
"""

import dataclasses
import fnmatch
import importlib
from collections.abc import Callable, Sequence

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


def value_dim(model: Model) -> int:
    """Return the width of a value's head."""
    return model.v_head_dim or head_dim(model)


# Weights of a model's matrix products -> the activations they make. A tied head is the embedding. wkv_up makes v too.
_ATTENTION = {"wq": "q", "wk": "k", "wv": "v", "wo": "attention_proj"}
_ATTENTION |= {"wq_down": "q_latent", "wq_up": "q", "wkv_down": "kv_latent", "wkv_up": "k"}
_MADE = {
    **{f"layers.attention.{name}": made for name, made in _ATTENTION.items()},
    **{f"layers.mlp.{name}": f"mlp_{name}" for name in ("gate", "up", "down")},
    **{f"layers.mlp.shared.{name}": f"mlp_{name}" for name in ("gate", "up", "down")},
    "layers.mlp.router": "router",
}
_BELOW = ("embed.embedding", "layers.attention_norm.scale", "layers.mlp_norm.scale", *_MADE)  # all that is below the last norm
_EXPERTS = tuple(f"layers.mlp.{name}" for name in ("gate", "up", "down"))


def projections(model: Model) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of one layer's attention weights, by their last names."""
    d, n, h = model.d_model, model.num_heads, head_dim(model)
    if not model.kv_lora_rank:
        return {"wq": (d, n * h), **dict.fromkeys(("wk", "wv"), (d, model.num_kv_heads * h)), "wo": (n * h, d)}
    q, r, w = model.q_lora_rank, model.kv_lora_rank, value_dim(model)
    queries = {"wq_down": (d, q), "wq_up": (q, n * h)} if q else {"wq": (d, n * h)}
    up = n * (model.qk_nope_head_dim + w)
    return queries | {"wkv_down": (d, r + model.qk_rope_head_dim), "wkv_up": (r, up), "wo": (n * w, d)}


def products(model: Model, rows: float = 0.0, dense: bool = False) -> dict[str, float]:
    """Forward FLOPs per token of one layer's GEMMs, by weight (names without layer numbers).

    rows: of experts' GEMMs for each token, in place of the experts that it goes through.
    dense: of one of model.dense_layers; the names are those of the other layers.
    """
    d = model.d_model
    found = {f"layers.attention.{name}": 2.0 * into * out for name, (into, out) in projections(model).items()}
    if dense:
        return found | dict.fromkeys(_EXPERTS, 2.0 * d * model.dense_d_ff)
    each = (rows or model.experts_per_token) if model.num_experts else 1
    found |= dict.fromkeys(_EXPERTS, 2.0 * d * model.d_ff * each)
    if model.shared_d_ff:
        found |= {f"layers.mlp.shared.{name}": 2.0 * d * model.shared_d_ff for name in ("gate", "up", "down")}
    if model.num_experts:
        found["layers.mlp.router"] = 2.0 * d * model.num_experts
    return found


def gemms(model: Model, rows: float = 0.0, dense: bool = False) -> dict[str, float]:
    """Forward FLOPs per token of one layer's GEMMs, by the activation they make (names of `activations.ACTIVATIONS`)."""
    out: dict[str, float] = {}
    for name, cost in products(model, rows, dense).items():
        out[_MADE[name]] = out.get(_MADE[name], 0.0) + cost
    if model.kv_lora_rank:
        out["v"] = out["k"] * value_dim(model) / (model.qk_nope_head_dim + value_dim(model))
        out["k"] -= out["v"]
    return out


def layers(model: Model, rows: float = 0.0) -> float:
    """Forward FLOPs per token of all layers' GEMMs."""
    linear = model.stacked_layers * sum(gemms(model, rows).values())
    return linear + model.dense_layers * sum(gemms(model, dense=True).values()) if model.dense_layers else linear


def by_weight(model: Model) -> dict[str, float]:
    """Forward FLOPs per token of the GEMMs of every weight below the head, all layers of a stack together."""
    found = {name: model.stacked_layers * cost for name, cost in products(model).items()}
    for i in range(model.dense_layers):
        found |= {name.replace("layers", f"dense_layers.{i}", 1): cost for name, cost in products(model, dense=True).items()}
    return found


def attention(model: Model, seq_len: int) -> Flops:
    """Forward FLOPs per token of one layer's attention, the mean of all layers, without its projections.

    A sliding window of W limits the causal count to W - W^2 / 2T positions, which is T / 2 at W = T. The full convention
    knows no masks: it counts T.
    """
    causal = 0.0
    for kind, layers in windows.layers_by_kind(model):
        window = min(windows.window(model, kind) or seq_len, seq_len)
        causal += layers / model.num_layers * (window - window**2 / (2 * seq_len))
    per_position = 2 * model.num_heads * (head_dim(model) + value_dim(model))
    return Flops(per_position * causal, per_position * seq_len)


def stated(model: Model) -> Callable[[Model, int], Flops] | None:
    """Return the function `flops` of a family from outside the package, `package.module:name`, if it has one."""
    module, given, name = model.family.partition(":")
    return getattr(getattr(importlib.import_module(module), name), "flops", None) if given else None


def forward(model: Model, seq_len: int) -> Flops:
    """Forward FLOPs per token: those that a family from outside states, else those of the formulas above."""
    if own := stated(model):
        return own(model, seq_len)
    linear = layers(model) + 2 * model.d_model * model.vocab_size
    return Flops(linear, linear) + attention(model, seq_len) * model.num_layers


def per_token(model: Model, seq_len: int) -> Flops:
    """Training FLOPs per token: three times the forward pass. Llama-3-8B at 8192: 51.5 GFLOP causal, 57.9 full."""
    return forward(model, seq_len) * 3


def newton_schulz(model: Model) -> float:
    """FLOPs a step, of the whole model, of Muon's matrix products; not of a token, and in no MFU.

    Of a matrix with sides a <= b an iteration multiplies it by its transpose, that by itself, and the sum with the matrix:
    2 a^2 b + 2 a^3 + 2 a^2 b. There are five.
    """
    d, attention_weights = model.d_model, list(projections(model).values())
    columns = [model.d_ff] * 3 * max(1, model.num_experts)
    if model.num_experts:
        columns += [model.num_experts, *[model.shared_d_ff] * (3 if model.shared_d_ff else 0)]

    def one(matrices: Sequence[tuple[int, int]]) -> float:
        sides = [(min(pair), max(pair)) for pair in matrices]
        return 5.0 * sum(4 * a * a * b + 2 * a**3 for a, b in sides)

    stacked = one([*attention_weights, *((d, n) for n in columns)])
    return model.stacked_layers * stacked + model.dense_layers * one([*attention_weights, *[(d, model.dense_d_ff)] * 3])


def learns(run: RunConfig, name: str) -> bool:
    """Whether a parameter, by its name without layer numbers, is trained."""
    return not run.lora.rank and not any(fnmatch.fnmatchcase(name, pattern) for pattern in parts_of(run.train.freeze))


def passes_layers(run: RunConfig) -> bool:
    """Whether the backward pass goes through the layers: not where nothing there, nor below, is trained."""
    return run.lora.rank > 0 or any(learns(run, name) for name in _BELOW)


def adapters(run: RunConfig) -> float:
    """Forward FLOPs per token of the adapters of all layers: 2 R (inputs + outputs) for each weight that has one."""
    m, d = run.model, run.model.d_model
    ends = {name: sum(pair) for name, pair in projections(m).items()}
    ends |= dict.fromkeys(("gate", "up", "down"), (d + m.d_ff) * (m.experts_per_token if m.num_experts else 1))
    return m.num_layers * 2 * run.lora.rank * sum(ends.get(name, 0) for name in parts_of(run.lora.targets))


def training(run: RunConfig) -> Flops:
    """Training FLOPs per token of a run: those of `per_token`, less what is not computed for frozen weights, and adapters'.

    A frozen weight has no gradient, a third of its three GEMMs: with adapters a step is twice the forward pass, and three times
    that of the adapters. Below the lowest layer that is trained gradients are counted that need not be computed, as is the
    first layer's in the usual count. Of a family that states its FLOPs the parts are not known: all weights count as trained.
    """
    m, everything = run.model, per_token(run.model, run.data.seq_len)
    if stated(m):
        return everything
    head = 2 * m.d_model * m.vocab_size
    saved = sum(cost for name, cost in by_weight(m).items() if not learns(run, name))
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


def beyond(run: RunConfig) -> Flops | None:
    """Return the FLOPs per token that a run computes beside the model's, for HFU. None for a family that states its FLOPs.

    They are those that remat computes a second time, the second forward matmul with the head of a loss of pairs, and those of
    places of experts beyond an even load. With a capacity below 1 tokens are dropped, and they may be negative.
    """
    if stated(run.model):
        return None
    back = passes_layers(run)
    extra = recompute(run.model, run.remat, run.data.seq_len) if back else Flops(0.0, 0.0)
    twice = 2.0 * run.model.d_model * run.model.vocab_size * run.loss.of_pairs
    rows = expert_rows(run)
    if not run.model.num_experts or rows == run.model.experts_per_token:
        return extra + Flops(twice, twice)
    spare = layers(run.model, rows) - layers(run.model)
    again = recompute(run.model, run.remat, run.data.seq_len, rows) + extra * -1 if back else Flops(0.0, 0.0)
    passes = 1 + back * (1 + learns(run, "layers.mlp.gate"))  # the backward pass: of activations, and of weights that learn
    return extra + again + Flops(twice, twice) + Flops(spare, spare) * passes


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
    - of latent attention both latents where they are not kept, since the backward pass of their norms reads them;
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
    made = have - {"q", "k"} if model.qk_norm and remat.policy != "dots" else have
    again = [name for name in ("q", "k", "v", "q_latent", "kv_latent", "mlp_gate", "mlp_up") if name not in made]
    again += ["router"]
    if not have & ({"attention_proj"} if model.sandwich_norm else {"attention_proj", "residual"}):
        again += ["attention_proj"]

    def linear(cost: dict[str, float], count: int, every: int) -> float:
        of_all = count * sum(cost.get(name, 0.0) for name in again)
        inner = 0 if "mlp_down" in have else count - (0 if model.sandwich_norm else -(-count // every))
        return of_all + inner * cost["mlp_down"]

    found = linear(gemms(model, rows), model.stacked_layers, remat.every)
    if model.dense_layers:
        found += linear(gemms(model, dense=True), model.dense_layers, 1)
    total = Flops(found, found)
    if not {"attention_out", "attention_lse"} <= have:
        total += attention(model, seq_len) * model.num_layers
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
    shared one, and that of layers without experts."""
    d, h, count, stacked = model.d_model, head_dim(model), model.num_layers, model.stacked_layers
    attention_params = sum(into * out for into, out in projections(model).values())
    if model.qkv_bias:
        attention_params += (model.num_heads + 2 * model.num_kv_heads) * h
    if model.qk_norm:
        attention_params += 2 * h
    attention_params += d * model.attention_out_bias + model.num_heads * model.attention_sinks
    attention_params += model.q_lora_rank + model.kv_lora_rank  # norms of the latents
    experts = model.num_experts
    dense = model.dense_layers * 3 * d * model.dense_d_ff
    parts = {
        "embedding": model.vocab_size * d,
        "attention": count * attention_params,
        "mlp": stacked * 3 * d * (model.shared_d_ff if experts else model.d_ff) + dense,
        "experts": stacked * experts * (3 * d * model.d_ff + (2 * model.d_ff + d) * model.expert_bias),
        "router": stacked * experts * (d + model.router_bias + model.router_logit_bias),
        "norms": count * (4 if model.sandwich_norm else 2) * d + d,
        "head": 0 if model.tied_head else model.vocab_size * d,
    }
    return parts | {"total": sum(parts.values())}


def active_parameters(model: Model) -> int:
    """Parameters that one token meets: of the experts those it goes through, of all else everything."""
    count = parameters(model)
    if not model.num_experts:
        return count["total"]
    return count["total"] - count["experts"] * (model.num_experts - model.experts_per_token) // model.num_experts
