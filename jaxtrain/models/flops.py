"""FLOPs per token, parameters of a model, and MFU.

Per token and layer, forward, with model width D, N query and K key/value heads of width H, feed-forward width F, sequence
length T, and 2 FLOPs per multiply-add:

    projections    2 * (D N H  +  2 D K H  +  N H D)     q, k and v, output
    feed-forward   2 * 3 D F                             gate, up, down
    attention      4 N H T                               scores and their sum over values, whole T x T square ("full")
                   2 N H T                               the half that a causal mask leaves                   ("causal")

and 2 D V once for the head (also when its weight is the embedding's; looking a token up costs nothing). Training is three times
the forward pass: the backward pass has two matmuls for each forward matmul. The "full" sum is the 6 N + 12 L H Q T of the PaLM
paper, appendix B, in its symbols (N parameters, H heads of width Q). Megatron-LM and MaxText count the "causal" half. The two
conventions differ by 12% for Llama 3 8B at T = 8192, so every figure names its convention. Neither convention counts norms,
rotary embedding, softmax or the optimizer, or considers document borders. Recomputation is in HFU only. If a run freezes
weights, MFU omits their gradients (`training`).

A token of a model with E experts goes through k of them, and through the shared expert of width S. So the feed-forward block is

    feed-forward   2 * 3 D (k F + S)  +  2 D E           k experts and the shared one, router

The first layers without experts (model.dense_layers) have 2 * 3 D times their own width. MFU counts these active FLOPs only,
for any E. With a fixed capacity (moe.capacity_factor, in multiples of an even load), a GPU also computes padding of buffers.
These FLOPs are in HFU only (`hfu_extra`).

A family from outside the package may have other layers: step/model_flops.py counts or asks.

Multi-head latent attention has a latent of width R for keys and values, and for queries a latent of width Q or none. Heads of
queries and keys have width H = P + r, of which r are rotated. Heads of values have width W. Then

    projections    2 * (D Q + Q N H  +  D (R + r) + R N (P + W)  +  N W D)
    attention      2 N (H + W) T                         ("full"), half of it ("causal")

since training computes the keys and values of every head. If a kernel needs values as wide as keys, the padding is in neither
MFU nor HFU.

A layer with a gated delta net has M key heads of width P and N value heads of width W, and

    projections    2 * (2 D M P  +  3 D N W  +  2 D N)   q and k; v, gate and output; decay and beta
    delta rule     6 N P W                               by its definition: read at the key, write, read at the query

The kernel computes the tokens of a chunk together, which takes more FLOPs. These are in HFU only (`chunked_rule`).

A module of multi-token prediction (model.mtp_layers) is one more layer, one more matmul with the head, and

    projections    2 * 2 D D                             of the embedding, and of the previous hidden state
"""

import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Sequence

from jaxtrain.config.schema import FEED_FORWARD, Lora, Mesh, Model, Moe, Remat, RunConfig, Train, split_items
from jaxtrain.config.shapes import DELTA_CHUNK, FIRST_ROUND
from jaxtrain.kernels.experts import support
from jaxtrain.models import windows
from jaxtrain.models.activations import saved_activations


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs per token, with attention in the "causal" and in the "full" convention of this module's docstring."""

    causal: float
    full: float

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.causal + other.causal, self.full + other.full)

    def __mul__(self, factor: float) -> "Flops":
        return Flops(self.causal * factor, self.full * factor)


def head_dim(model: Model) -> int:
    """Return the width of a query or key head: model.head_dim, or d_model / num_heads if it is 0."""
    return model.head_dim or model.d_model // model.num_heads


def value_dim(model: Model) -> int:
    """Return the width of a value head: model.v_head_dim, or the width of a query head if it is 0."""
    return model.v_head_dim or head_dim(model)


# Weights of a layer's matmuls -> the activations that they compute. wkv_up computes both k and v.
_ATTENTION = {"wq": "q", "wk": "k", "wv": "v", "wg": "attention_gate", "wo": "attention_proj"}
_ATTENTION |= {"wq_down": "q_latent", "wq_up": "q", "wkv_down": "kv_latent", "wkv_up": "k"}
_DELTA = {"wq": "q", "wk": "k", "wv": "v", "wz": "attention_gate", "wa": "decay", "wb": "decay", "wo": "attention_proj"}
_RESULTS = {
    **{f"layers.attention.{name}": result for name, result in _ATTENTION.items()},
    **{f"layers.delta.{name}": result for name, result in _DELTA.items()},
    **{f"layers.mlp.{name}": f"mlp_{name}" for name in ("gate", "up", "down")},
    **{f"layers.mlp.shared.{name}": f"mlp_{name}" for name in ("gate", "up", "down")},
    "layers.mlp.router": "router",
}
_DELTA_WEIGHTS = tuple(
    f"layers.delta.{name}" for name in (*_DELTA, "taps_q", "taps_k", "taps_v", "log_rate", "shift", "norm.scale")
)
_BELOW = (
    "embed.embedding",
    "layers.attention_norm.scale",
    "layers.mlp_norm.scale",
    *(name for name in _RESULTS if name not in _DELTA_WEIGHTS),
)
_EXPERTS = tuple(f"layers.mlp.{name}" for name in ("gate", "up", "down"))
_MTP_WEIGHTS = ("embed_proj", "hidden_proj")  # each (D, D)


def projections(model: Model) -> dict[str, tuple[int, int]]:
    """Return (input width, output width) of one layer's attention weights, by the last part of their names."""
    d, n, h = model.d_model, model.num_heads, head_dim(model)
    if not model.kv_lora_rank:
        gate = {"wg": (d, n * h)} if model.attention_gate else {}
        return {"wq": (d, n * h), **dict.fromkeys(("wk", "wv"), (d, model.num_kv_heads * h)), **gate, "wo": (n * h, d)}
    q, r, w = model.q_lora_rank, model.kv_lora_rank, value_dim(model)
    queries = {"wq_down": (d, q), "wq_up": (q, n * h)} if q else {"wq": (d, n * h)}
    up = n * (model.qk_nope_head_dim + w)
    return queries | {"wkv_down": (d, r + model.qk_rope_head_dim), "wkv_up": (r, up), "wo": (n * w, d)}


def linear_heads(model: Model) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (heads, their width) of keys, and of values, of a gated delta net."""
    return (model.linear_key_heads, model.linear_key_dim), (model.linear_value_heads, model.linear_value_dim)


def delta_projections(model: Model) -> dict[str, tuple[int, int]]:
    """Return `projections` of a layer with a gated delta net."""
    d, n = model.d_model, model.linear_value_heads
    keys, values = (heads * width for heads, width in linear_heads(model))
    return {
        "wq": (d, keys),
        "wk": (d, keys),
        "wv": (d, values),
        "wz": (d, values),
        "wa": (d, n),
        "wb": (d, n),
        "wo": (values, d),
    }


def delta_rule(model: Model) -> float:
    """Return forward FLOPs per token of the delta rule in one layer, by its definition."""
    return 6.0 * model.linear_value_heads * model.linear_key_dim * model.linear_value_dim


def chunked_rule(model: Model, seq_len: int) -> tuple[float, float, float]:
    """Return FLOPs per token of one layer's delta rule as kernels/delta_rule.py computes it.

    The three numbers are those of the forward pass, of the part of it that only its output needs, and of the backward pass.
    """
    c, k, v = min(DELTA_CHUNK, seq_len), model.linear_key_dim, model.linear_value_dim
    inverse, output = 4.0 * c * c * max(0, math.ceil(math.log2(c)) - 1), 2.0 * k * v + 2.0 * c * v
    remaining = 2.0 * (2 * c * k + c * (k + v) + 2 * k * v) + output
    padded = math.ceil(seq_len / c) * c / seq_len * model.linear_value_heads
    return (inverse + remaining) * padded, output * padded, (4.0 * c * c * (c > 1) + 2 * remaining) * padded


def matrices(model: Model) -> dict[str, tuple[int, int, int]]:
    """Return weight -> (number of such matrices, inputs, outputs) in all layers; each expert has its own.

    Routers, the decay and beta of delta nets, and the modules of multi-token prediction, are left out.
    """
    m, d = model, model.d_model
    sizes = {f"layers.attention.{name}": (m.num_layers - m.delta_layers, *pair) for name, pair in projections(m).items()}
    if m.delta_layers:
        sizes |= {f"layers.delta.{name}": (m.delta_layers, *pair) for name, pair in delta_projections(m).items()}
        del sizes["layers.delta.wa"], sizes["layers.delta.wb"]
    blocks = [("layers.mlp", m.stacked_layers * max(1, m.num_experts), m.d_ff)]
    blocks += [("layers.mlp.shared", m.stacked_layers, m.shared_d_ff), ("dense_layers.mlp", m.dense_layers, m.dense_d_ff)]
    for block, count, width in blocks:
        if count and width:
            sizes |= {f"{block}.{name}": (count, d, width) for name in ("gate", "up")}
            sizes[f"{block}.down"] = count, width, d
    return sizes


def products(model: Model, rows: float = 0.0, dense: bool = False, delta: bool = False) -> dict[str, float]:
    """Return forward FLOPs per token of one layer's matmuls, by weight (names without layer numbers).

    rows: rows of experts' matmuls per token (`expert_rows`); 0: the number of experts per token.
    dense: whether the layer is one of model.dense_layers. Its weights have the same names as the weights of other layers.
    delta: whether the layer has a gated delta net.
    """
    d, block = model.d_model, "delta" if delta else "attention"
    weights = delta_projections(model) if delta else projections(model)
    costs = {f"layers.{block}.{name}": 2.0 * into * out for name, (into, out) in weights.items()}
    if dense:
        return costs | dict.fromkeys(_EXPERTS, 2.0 * d * model.dense_d_ff)
    each = (rows or model.experts_per_token) if model.num_experts else 1
    costs |= dict.fromkeys(_EXPERTS, 2.0 * d * model.d_ff * each)
    if model.shared_d_ff:
        costs |= {f"layers.mlp.shared.{name}": 2.0 * d * model.shared_d_ff for name in ("gate", "up", "down")}
    if model.num_experts:
        costs["layers.mlp.router"] = 2.0 * d * model.num_experts
    return costs


def gemms(model: Model, rows: float = 0.0, dense: bool = False, delta: bool = False) -> dict[str, float]:
    """Return forward FLOPs per token of one layer's matmuls, by result.

    The results are names of `activations.ACTIVATIONS`, "router", and "decay" with beta.
    """
    out: dict[str, float] = {}
    for name, cost in products(model, rows, dense, delta).items():
        out[_RESULTS[name]] = out.get(_RESULTS[name], 0.0) + cost
    if model.kv_lora_rank:
        out["v"] = out["k"] * value_dim(model) / (model.qk_nope_head_dim + value_dim(model))
        out["k"] -= out["v"]
    return out


def layers(model: Model, rows: float = 0.0) -> float:
    """Return forward FLOPs per token of the matmuls of all layers, of multi-token prediction too, without output heads."""
    linear = (model.stacked_layers - model.delta_layers + model.mtp_layers) * sum(gemms(model, rows).values())
    linear += model.delta_layers * sum(gemms(model, rows, delta=True).values()) if model.delta_layers else 0.0
    linear += model.mtp_layers * 2 * len(_MTP_WEIGHTS) * model.d_model**2
    return linear + model.dense_layers * sum(gemms(model, dense=True).values()) if model.dense_layers else linear


def by_weight(model: Model) -> dict[str, float]:
    """Return weight -> forward FLOPs per token of its matmuls, without the head. A stack of layers counts as one weight."""
    costs: dict[str, float] = {}
    for delta, count in ((False, model.stacked_layers - model.delta_layers), (True, model.delta_layers)):
        for name, cost in products(model, delta=delta).items() if count else ():
            costs[name] = costs.get(name, 0.0) + count * cost
    for i in range(model.dense_layers):
        costs |= {name.replace("layers", f"dense_layers.{i}", 1): cost for name, cost in products(model, dense=True).items()}
    for i in range(model.mtp_layers):
        costs |= {f"mtp.{i}.{name}": 2.0 * model.d_model**2 for name in _MTP_WEIGHTS}
        costs |= {name.replace("layers", f"mtp.{i}.block", 1): cost for name, cost in products(model).items()}
    return costs


def attention(model: Model, seq_len: int) -> Flops:
    """Return forward FLOPs per token of attention without its projections, for one layer: the mean of all layers.

    A sliding window of W limits the causal count to W - W^2 / 2T positions, which is T / 2 at W = T. The full convention
    ignores masks: it counts T. Layers with delta nets have none.
    """
    causal = 0.0
    for kind, count in windows.layers_by_kind(model):
        window = min(windows.window(model, kind) or seq_len, seq_len)
        causal += count / model.num_layers * (window - window**2 / (2 * seq_len))
    per_position = 2 * model.num_heads * (head_dim(model) + value_dim(model))
    return Flops(per_position * causal, per_position * seq_len * (1 - model.delta_layers / model.num_layers))


def mixing(model: Model, seq_len: int) -> Flops:
    """Return forward FLOPs per token of attention and delta rules in all layers, without multi-token prediction."""
    rules = model.delta_layers * delta_rule(model)
    return attention(model, seq_len) * model.num_layers + Flops(rules, rules)


def forward(model: Model, seq_len: int) -> Flops:
    """Return FLOPs per token of the forward pass of a train step, with the modules of multi-token prediction."""
    linear = layers(model) + head_forward(model)
    return Flops(linear, linear) + mixing(model, seq_len) + attention(model, seq_len) * model.mtp_layers


def head_forward(model: Model) -> float:
    """Return forward FLOPs per token of the matmuls with the head: one, and one in each module of multi-token prediction."""
    return 2.0 * model.d_model * model.vocab_size * (1 + model.mtp_layers)


def per_token(model: Model, seq_len: int) -> Flops:
    """Return training FLOPs per token: three times the forward pass. Llama-3-8B at 8192: 51.5 GFLOP causal, 57.9 full."""
    return forward(model, seq_len) * 3


def newton_schulz(model: Model) -> float:
    """Return the FLOPs per step of Muon's matmuls, for the whole model. Neither MFU nor HFU counts them.

    For a matrix X of a rows and b >= a columns, each of five iterations computes A = X X^T, A A, and a polynomial of A times X:
    2 a^2 b + 2 a^3 + 2 a^2 b.
    """
    d, attention_weights = model.d_model, list(projections(model).values())
    columns = [model.d_ff] * 3 * max(1, model.num_experts)
    if model.num_experts:
        columns += [model.num_experts, *[model.shared_d_ff] * (3 if model.shared_d_ff else 0)]

    def block_flops(matrices: Sequence[tuple[int, int]]) -> float:
        sides = [(min(pair), max(pair)) for pair in matrices]
        return 5.0 * sum(4 * a * a * b + 2 * a**3 for a, b in sides)

    stacked = block_flops([*attention_weights, *((d, n) for n in columns)])
    delta_extra = (
        block_flops([*delta_projections(model).values()]) - block_flops(attention_weights) if model.delta_layers else 0.0
    )
    dense_matrices, mtp_matrices = [*attention_weights, *[(d, model.dense_d_ff)] * 3], [(d, d)] * len(_MTP_WEIGHTS)
    return (
        (model.stacked_layers + model.mtp_layers) * stacked
        + model.delta_layers * delta_extra
        + model.dense_layers * block_flops(dense_matrices)
        + model.mtp_layers * block_flops(mtp_matrices)
    )


def is_trained(lora: Lora, train: Train, name: str) -> bool:
    """Return whether a parameter of the model is trained; False with adapters. name: without layer numbers."""
    return not lora.rank and not any(fnmatch.fnmatchcase(name, pattern) for pattern in split_items(train.freeze))


def differentiates_layers(model: Model, lora: Lora, train: Train) -> bool:
    """Return whether the backward pass goes through the layers; False if all weights in and below the layers are frozen."""
    below = (*_BELOW, *_DELTA_WEIGHTS) if model.delta_layers else _BELOW
    return lora.rank > 0 or any(is_trained(lora, train, name) for name in below)


def passes_mtp(model: Model, lora: Lora, train: Train) -> bool:
    """Return whether the backward pass goes through the modules of multi-token prediction."""
    names = [name for name in by_weight(model) if name.startswith("mtp.")]
    return differentiates_layers(model, lora, train) or any(
        is_trained(lora, train, name) for name in ("final_norm.scale", *names)
    )


def _adapter_flops(model: Model, lora: Lora, rows: float, rank: int) -> Iterator[tuple[str, float, float]]:
    """Yield (result, forward FLOPs per token of the matmuls with a, and with b) of adapted weights, in all layers.

    The result is named as in `gemms`. rows, rank: as in `adapters`.
    """
    m, targets = model, split_items(lora.targets)
    for name, (into, out) in projections(m).items():
        if name in targets:
            times = 2.0 * lora.rank * (m.num_layers - m.delta_layers)
            yield _ATTENTION[name], times * into, times * out
    blocks = [(m.d_ff, 2.0 * lora.rank * m.num_layers)]
    if m.num_experts:
        expert_scale = 2.0 * (rank or lora.rank) * (rows or m.experts_per_token) * (lora.experts != "none")
        blocks = [(m.d_ff, m.stacked_layers * expert_scale), (m.dense_d_ff, 2.0 * lora.rank * m.dense_layers)]
        blocks.append((m.shared_d_ff, 2.0 * lora.rank * m.stacked_layers * (m.shared_d_ff > 0)))
    for name in FEED_FORWARD:
        for width, times in blocks if name in targets else ():
            into, out = (width, m.d_model) if name == "down" else (m.d_model, width)
            yield f"mlp_{name}", times * into, times * out


def adapters(model: Model, lora: Lora, rows: float = 0.0, rank: int = 0) -> float:
    """Return forward FLOPs per token of all adapters: 2 rank (inputs + outputs) for each adapted weight.

    Args:
      rows: of the adapters of experts (`adapter_rows`), as in `products`.
      rank: of the adapters of experts, as computed (support.padded_rank); 0: lora.rank.
    """
    return sum(a_flops + b_flops for _, a_flops, b_flops in _adapter_flops(model, lora, rows, rank))


def training(model: Model, seq_len: int, lora: Lora, train: Train) -> Flops:
    """Return training FLOPs per token: `per_token` without the gradients of frozen weights, and with adapters.

    A weight has three matmuls in a step, one of which computes its gradient; a frozen weight has two. With adapters, a step has
    the FLOPs of two forward passes of the base's weights, and of three of attention and of the adapters. Gradients of
    activations below the lowest trained layer are counted although they are not needed, as usual for the input of the first
    layer.
    """
    m, settings, everything = model, (lora, train), per_token(model, seq_len)
    saved = sum(cost for name, cost in by_weight(m).items() if not is_trained(*settings, name))
    saved += 0 if is_trained(*settings, "embed.embedding" if m.tied_head else "head") else head_forward(m)
    total = everything + Flops(1.0, 1.0) * (3 * adapters(m, lora) - saved)
    if differentiates_layers(m, *settings):
        return total
    main = dataclasses.replace(m, mtp_layers=0)
    if not passes_mtp(m, *settings):
        mtp_flops = forward(m, seq_len) + forward(main, seq_len) * -1
        total += (mtp_flops + attention(m, seq_len) * m.mtp_layers) * -1
    head = head_forward(main)
    within = forward(main, seq_len) + Flops(-head, -head)
    through = within + mixing(m, seq_len)  # its backward pass has gradients of activations only
    # Without a trained scale, no trained weight needs the gradient of the last hidden states.
    to_norm = 0 if is_trained(*settings, "final_norm.scale") else head
    return total + through * -1 + Flops(-to_norm, -to_norm)


def head_training(model: Model, lora: Lora, train: Train) -> float:
    """Return the FLOPs per token of `training` in matmuls with the output head, multi-token prediction included.

    These are the forward matmul, and the matmuls for the gradients of hidden states and of the head's weight, if needed.
    """
    main_head = head_forward(dataclasses.replace(model, mtp_layers=0))
    wanted = differentiates_layers(model, lora, train) or is_trained(lora, train, "final_norm.scale")
    weight = is_trained(lora, train, "embed.embedding" if model.tied_head else "head")
    return main_head * (1 + wanted + weight + model.mtp_layers * (1 + passes_mtp(model, lora, train) + weight))


def hfu_extra(run: RunConfig) -> Flops:
    """Return the FLOPs per token that a run computes in addition to the model's, for HFU.

    These FLOPs are recomputation by remat, the chunked form of delta rules, the second forward matmul of the head for a loss of
    pairs, expert capacity beyond an even load, and the padding of the rank of each expert's adapters. A capacity below 1 drops
    tokens, so the result may be negative.
    """
    m, back = run.model, differentiates_layers(run.model, run.lora, run.train)
    rows = expert_rows(m, run.moe, run.mesh)
    even = (
        run.lora.experts == "shared"
        or run.moe.capacity_factor
        or support.single_expert(run.moe.impl, m.num_experts, run.mesh.expert)
    )
    rank = 0 if even else support.padded_rank(run.moe.impl, run.compute == "f32", run.lora.rank)
    adapter_args = adapter_rows(run, rows), rank
    # Backward: gradients of activations and weights.
    passes = 1 + back * (1 + is_trained(run.lora, run.train, "layers.mlp.gate"))
    linear = (layers(m, rows) - layers(m)) * passes + 3 * (adapters(m, run.lora, *adapter_args) - adapters(m, run.lora))
    linear += 2.0 * m.d_model * m.vocab_size * run.loss.is_pairwise
    once, _, backward = chunked_rule(m, run.data.seq_len) if m.delta_layers else (0.0,) * 3
    linear += m.delta_layers * (once + backward * back - delta_rule(m) * (1 + 2 * back))
    if not back:
        return Flops(linear, linear)
    linear += recompute_adapters(m, run.lora, run.remat, *adapter_args)
    return recompute(m, run.remat, run.data.seq_len, rows) + Flops(linear, linear)


def expert_rows(model: Model, moe: Moe, mesh: Mesh) -> float:
    """Return the rows per token that all experts together multiply, for the even load that a plan assumes.

    The result is the number of experts per token times a factor, and at most the number of experts. With a capacity, the factor
    is the capacity factor, since buffers have the size of the capacity. Without a capacity, the factor is FIRST_ROUND if each
    device has one expert and moe.impl is auto. Then the dense matmul of a device covers its whole buffer
    (kernels/experts/feed_forward.py). Otherwise the factor is 1.
    """
    factor = moe.capacity_factor or (FIRST_ROUND if support.single_expert(moe.impl, model.num_experts, mesh.expert) else 1.0)
    return min(model.experts_per_token * factor, model.num_experts)


def adapter_rows(run: RunConfig, rows: float) -> float:
    """Return the rows per token that adapters of experts multiply. rows: those of the experts (`expert_rows`).

    An adapter that experts share multiplies the whole buffer of the first round (kernels/experts/feed_forward.py).
    """
    fills_buffer = run.lora.experts == "shared" and run.mesh.expert > 1 and not run.moe.capacity_factor
    return min(run.model.experts_per_token * FIRST_ROUND, run.model.num_experts) if fills_buffer else rows


def _recompute_results(model: Model, remat: Remat, delta: bool = False) -> list[str]:
    """Return the results of matmuls that `recompute` counts in every layer. delta: in layers with a gated delta net."""
    saved = saved_activations(remat)
    usable = saved - {"q", "k"} if model.qk_norm and not delta and remat.policy != "dots" else saved
    names = ("q", "k", "v", "q_latent", "kv_latent", "attention_gate", "mlp_gate", "mlp_up")
    recomputed = [name for name in names if name not in usable]
    recomputed += ["router"] if remat.policy == "dots" else ["router", "decay"]
    if not saved & ({"attention_proj"} if model.norm_placement != "pre" else {"attention_proj", "residual"}):
        recomputed += ["attention_proj"]
    return recomputed


def recompute_adapters(model: Model, lora: Lora, remat: Remat, rows: float = 0.0, rank: int = 0) -> float:
    """Return the FLOPs per token of adapters that the remat policy recomputes. rows, rank: as in `adapters`.

    The results of all matrices a have no name, and their b's are recomputed with the results that they are added to. down's b
    is left out: it is recomputed only inside checkpoints of several layers, and with norms on outputs.
    """
    if remat.policy == "none":
        return 0.0
    recomputed = _recompute_results(model, remat)
    return sum(
        a_flops + b_flops * (result in recomputed) for result, a_flops, b_flops in _adapter_flops(model, lora, rows, rank)
    )


def recompute(model: Model, remat: Remat, seq_len: int, rows: float = 0.0) -> Flops:
    """Return the FLOPs per token that the remat policy recomputes. HFU counts them, MFU does not. rows: as in `products`.

    A matmul of a layer is recomputed if the backward pass needs its result and neither it nor a later activation is saved:

    - q, k, v and attention's gate if they are not saved; with qk_norm, q and k also if they are saved, since the backward pass
      of the norm reads its input, which only "dots" saves;
    - the delta rule, always; if its output is saved, without the matmuls that only the output needs;
    - the attention kernel unless both its output and its log-sum-exp are saved;
    - both latents of latent attention if they are not saved, since the backward pass of their norms reads them;
    - wo unless its output is saved, or the residual stream after it; with norms on outputs, unless its output is saved;
    - gate and up if they are not saved, also in experts; the router, whose scores only "none" saves; decay and beta of delta
      nets, which "dots" saves too;
    - down, if it is not saved, in the layers whose output is the next layer's input under the same checkpoint. The last layer
      of each checkpoint (of `remat.every` layers) is not such a layer: the backward pass does not read its output, and XLA
      drops it. With norms on outputs, down in all layers;
    - both projections of multi-token prediction, whose results only "dots" saves.

    This holds for a fused attention kernel with its own backward pass (cuDNN). Recomputation inside that backward pass is left
    out, as usual.
    """
    if remat.policy == "none":
        return Flops(0.0, 0.0)
    saved, recomputed = saved_activations(remat), _recompute_results(model, remat)

    def linear(cost: dict[str, float], count: int, every: int, recomputed: list[str] = recomputed) -> float:
        all_layers = count * sum(cost.get(name, 0.0) for name in recomputed)
        inner = 0 if "mlp_down" in saved else count - (0 if model.norm_placement != "pre" else -(-count // every))
        return all_layers + inner * cost["mlp_down"]

    flops = linear(gemms(model, rows), model.stacked_layers - model.delta_layers, remat.every)
    if model.delta_layers:
        flops += linear(gemms(model, rows, delta=True), model.delta_layers, 1, _recompute_results(model, remat, delta=True))
        once, output, _ = chunked_rule(model, seq_len)
        flops += model.delta_layers * (once - output * ("attention_out" in saved))
    if model.dense_layers:
        flops += linear(gemms(model, dense=True), model.dense_layers, 1)
    if model.mtp_layers:
        flops += linear(gemms(model, rows), model.mtp_layers, 1)
        flops += model.mtp_layers * 2 * len(_MTP_WEIGHTS) * model.d_model**2 * (remat.policy != "dots")
    total = Flops(flops, flops)
    if not {"attention_out", "attention_lse"} <= saved:
        total += attention(model, seq_len) * model.step_layers
    return total


def mfu(flops_per_token: float, tokens_per_s: float, peak_tflops: float | None) -> float | None:
    """Return FLOPs per token x tokens per second of one device, as a fraction of the device's dense peak (TFLOP/s).

    With the FLOPs of `training`, the result is MFU; with those of `training` and `hfu_extra`, it is HFU. None if the peak is
    unknown (None or 0).
    """
    if not peak_tflops:
        return None
    return flops_per_token * tokens_per_s / (peak_tflops * 1e12)


def parameters(model: Model) -> dict[str, int]:
    """Return the number of parameters by part, and their "total". A tied head has no parameters of its own.

    "attention" includes gated delta nets. For a model with experts, "mlp" is the shared expert and the feed-forward of layers
    without experts. The block of a module of multi-token prediction counts as a layer; "mtp" has the module's two projections.
    """
    d, h, mtp = model.d_model, head_dim(model), model.mtp_layers
    count, stacked = model.step_layers, model.stacked_layers + mtp
    attention_params = sum(into * out for into, out in projections(model).values())
    if model.qkv_bias:
        attention_params += (model.num_heads + 2 * model.num_kv_heads) * h
    if model.qk_norm:
        attention_params += (model.num_heads + model.num_kv_heads if model.qk_norm_joint else 2) * h
    attention_params += d * model.attention_out_bias + model.num_heads * model.attention_sinks
    attention_params += model.q_lora_rank + model.kv_lora_rank  # norms of the latents
    keys, values = (n * width for n, width in linear_heads(model))
    delta_params = sum(into * out for into, out in delta_projections(model).values())
    delta_params += (2 * keys + values) * model.linear_conv + 2 * model.linear_value_heads + model.linear_value_dim
    experts = model.num_experts
    dense = model.dense_layers * 3 * d * model.dense_d_ff
    extra = d * model.shared_gate if experts else (2 * model.d_ff + d) * model.mlp_bias
    counts = {
        "embedding": model.vocab_size * d,
        "attention": (count - model.delta_layers) * attention_params + model.delta_layers * delta_params,
        "mlp": stacked * (3 * d * (model.shared_d_ff if experts else model.d_ff) + extra) + dense,
        "experts": stacked * experts * (3 * d * model.d_ff + (2 * model.d_ff + d) * model.expert_bias),
        "router": stacked * experts * (d + model.router_bias + model.router_logit_bias),
        "norms": count * (4 if model.norm_placement == "sandwich" else 2) * d + d + mtp * 3 * d,
        "mtp": mtp * len(_MTP_WEIGHTS) * d * d,
        "head": 0 if model.tied_head else model.vocab_size * d,
    }
    return counts | {"total": sum(counts.values())}


def active_parameters(model: Model) -> int:
    """Return the number of parameters that one token uses: its experts, and all other weights."""
    count = parameters(model)
    if not model.num_experts:
        return count["total"]
    return count["total"] - count["experts"] * (model.num_experts - model.experts_per_token) // model.num_experts
