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


def gemms(model: Model) -> dict[str, float]:
    """Forward FLOPs per token of one layer's GEMMs, by the activation each makes (names of `activations.ACTIVATIONS`)."""
    d, h = model.d_model, head_dim(model)
    return {
        "q": 2 * d * model.num_heads * h,
        "k": 2 * d * model.num_kv_heads * h,
        "v": 2 * d * model.num_kv_heads * h,
        "attention_proj": 2 * model.num_heads * h * d,
        "mlp_gate": 2 * d * model.d_ff,
        "mlp_up": 2 * d * model.d_ff,
        "mlp_down": 2 * model.d_ff * d,
    }


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
    columns = [*[model.num_heads * h] * 2, *[model.num_kv_heads * h] * 2, *[model.d_ff] * 3]
    sides = [(min(d, n), max(d, n)) for n in columns]
    return 5.0 * model.num_layers * sum(4 * a * a * b + 2 * a**3 for a, b in sides)


# Weights of a model's matrix products -> the activations they make. A tied head is the embedding.
_MADE = {
    **{f"layers.attention.{name}": made for name, made in (("wq", "q"), ("wk", "k"), ("wv", "v"), ("wo", "attention_proj"))},
    **{f"layers.mlp.{name}": f"mlp_{name}" for name in ("gate", "up", "down")},
}
_BELOW = ("embed.embedding", "layers.attention_norm.scale", "layers.mlp_norm.scale", *_MADE)  # all that is below the last norm


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
    ends |= dict.fromkeys(("gate", "up", "down"), d + m.d_ff)
    return m.num_layers * 2 * run.lora.rank * sum(ends.get(name, 0) for name in parts_of(run.lora.targets))


def training(run: RunConfig) -> Flops:
    """Training FLOPs per token of a run: those of `per_token`, less what is not computed for frozen weights, and adapters'.

    A frozen weight has no gradient, a third of its three GEMMs: with adapters a step is twice the forward pass, and three times
    that of the adapters. Below the lowest layer that is trained gradients are counted that need not be computed, as is the
    first layer's in the usual count.
    """
    m, everything = run.model, per_token(run.model, run.data.seq_len)
    head = 2 * m.d_model * m.vocab_size
    made = gemms(m)
    saved = sum(m.num_layers * made[a] for name, a in _MADE.items() if not learns(run, name))
    saved += 0 if learns(run, "embed.embedding" if m.tied_head else "head") else head
    total = everything + Flops(1.0, 1.0) * (3 * adapters(run) - saved)
    if passes_layers(run):
        return total
    within = forward(m, run.data.seq_len) + Flops(-head, -head)
    through = within + attention(m, run.data.seq_len) * m.num_layers  # its backward pass is all of activations
    to_norm = 0 if learns(run, "final_norm.scale") else head  # nobody wants the gradient of the last hidden states
    return total + through * -1 + Flops(-to_norm, -to_norm)


def again(run: RunConfig) -> Flops:
    """FLOPs per token that a run computes a second time."""
    return recompute(run.model, run.remat, run.data.seq_len) if passes_layers(run) else Flops(0.0, 0.0)


def recompute(model: Model, remat: Remat, seq_len: int) -> Flops:
    """FLOPs per token that the remat policy computes a second time; HFU counts them, MFU does not.

    Of each layer a GEMM runs again where the backward pass needs its result and no activation behind it was kept:

    - q, k, v where they are not kept;
    - the attention kernel unless both its output and its log-sum-exp are kept;
    - wo unless its output is kept, or the residual stream after it; with post_norms, whose backward pass reads it, its output;
    - gate and up where they are not kept;
    - down in the layers whose output is the next layer's input under the same checkpoint, so not in the last layer of each
      `remat.every`: nothing in the backward pass reads the output of the last one, and XLA drops it; with post_norms in all.

    This holds for a fused attention kernel with its own backward pass (cuDNN). Left out, as in the usual definition: what
    that backward pass computes again inside itself.
    """
    if remat.policy == "none":
        return Flops(0.0, 0.0)
    have = kept(remat)
    cost = gemms(model)
    linear = sum(cost[name] for name in ("q", "k", "v", "mlp_gate", "mlp_up") if name not in have)
    if not have & ({"attention_proj"} if model.post_norms else {"attention_proj", "residual"}):
        linear += cost["attention_proj"]
    total = Flops(linear, linear)
    if not {"attention_out", "attention_lse"} <= have:
        total += attention(model, seq_len)
    total *= model.num_layers
    if "mlp_down" not in have:
        inner = model.num_layers - (0 if model.post_norms else -(-model.num_layers // remat.every))
        total += Flops(cost["mlp_down"], cost["mlp_down"]) * inner
    return total


def mfu(flops_per_token: float, tokens_per_s: float, peak_tflops: float | None) -> float | None:
    """Part of the dense peak in use: FLOPs per token x tokens per second, both per device, over peak (TFLOP/s).

    With `per_token` it is MFU, with `per_token + recompute` HFU. None where the peak is not known (None or 0).
    """
    if not peak_tflops:
        return None
    return flops_per_token * tokens_per_s / (peak_tflops * 1e12)


def parameters(model: Model) -> dict[str, int]:
    """Number of parameters by part, and their "total". A tied head has none of its own."""
    d, h, layers = model.d_model, head_dim(model), model.num_layers
    q, kv = model.num_heads * h, model.num_kv_heads * h
    attention_params = 2 * d * q + 2 * d * kv
    if model.qkv_bias:
        attention_params += q + 2 * kv
    if model.qk_norm:
        attention_params += 2 * h
    parts = {
        "embedding": model.vocab_size * d,
        "attention": layers * attention_params,
        "mlp": layers * 3 * d * model.d_ff,
        "norms": layers * (4 if model.post_norms else 2) * d + d,
        "head": 0 if model.tied_head else model.vocab_size * d,
    }
    return parts | {"total": sum(parts.values())}
