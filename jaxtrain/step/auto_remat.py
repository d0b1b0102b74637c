"""Choose the activations to save in the available memory, for remat.policy=auto.

The first choice saves the result of every matmul and attention call (`SAVED["auto"]`). If the compiled step does not
fit, the next choice has the least recomputation among the choices that a formula estimates to fit. The memory of the compiled
step then decides whether a choice fits. No formula knows the activations of a family from outside the package, whose further
choices are those of NEXT_POLICY in turn. `ranks` is the number of devices over which experts are sharded. Imports no jax.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping

from jaxtrain.config.layout import Layout
from jaxtrain.config.schema import Model, Moe, Remat
from jaxtrain.config.shapes import FIRST_ROUND, FURTHER_ROUND
from jaxtrain.models import flops
from jaxtrain.models.activations import LATENTS, saved_activations
from jaxtrain.step.stages import schedule_of

# Fraction of the usable memory that `auto` leaves free, because the peak of a plan and of an allocator may differ slightly.
MARGIN = 0.03

NEXT_POLICY = {"auto": "attention", "attention": "full"}  # remat.policy -> the next one, which saves fewer activations

# Activations that are saved or not saved together.
GROUPS = (("q",), ("k",), ("v",), ("attention_out", "attention_lse"), ("residual",), ("mlp_gate",), ("mlp_up",))


def num_saved_layers(layout: Layout, period: int) -> int:
    """Return the number of layers whose activations are saved on a device, summed over the microbatches in flight.

    period: layers in each element of the stack.
    """
    stack = layout.stages
    return period * (stack.per_group * schedule_of(layout).slots[2] if layout.pipelined else stack.slots)


def expert_room(model: Model, moe: Moe, ranks: int) -> float:
    """Return the capacity of a device's expert buffers, in rows per token of the device.

    With a capacity factor, this is experts per token x capacity factor, at most the number of experts. Without a capacity
    factor, it is experts per token x FIRST_ROUND if experts are sharded, otherwise experts per token.
    """
    m, x = model, moe
    shares = (
        min(x.capacity_factor, m.num_experts / m.experts_per_token) if x.capacity_factor else FIRST_ROUND if ranks > 1 else 1.0
    )
    return m.experts_per_token * shares


def expert_rounds(model: Model, moe: Moe, ranks: int, load: float = 1.0) -> int:
    """Return the number of rounds of a layer's dispatch, if the load of the busiest expert is `load` times an even load.

    All other experts share the remaining tokens equally. With a capacity factor, or if experts are not sharded, there is one
    round.
    """
    if moe.capacity_factor or ranks == 1:
        return 1
    return 1 + max(0, math.ceil((_busiest_load(model, ranks, load) - FIRST_ROUND) / FURTHER_ROUND - 1e-9))


def _busiest_load(model: Model, ranks: int, load: float) -> float:
    """Return the load of the device with the busiest expert, as a multiple of a device's even load.

    load: the load of the busiest expert, as a multiple of an expert's even load.
    """
    m = model
    other_experts = m.num_experts // ranks - 1
    return (load + other_experts * (m.num_experts - load) / max(m.num_experts - 1, 1)) / (other_experts + 1)


def expert_fill(model: Model, moe: Moe, ranks: int, load: float = 1.0) -> float:
    """Return the fraction of the expert buffers that tokens fill, over all rounds of a layer's dispatch.

    With a capacity factor the whole buffer is computed, so the result is 1. If experts are not sharded (`ranks` is 1), the
    buffer has exactly the tokens' rows, so the result is 1 too.

    load: the load of the busiest expert, as a multiple of an expert's even load.
    """
    if moe.capacity_factor or not model.num_experts:
        return 1.0
    if ranks == 1:
        return 1.0
    return _busiest_load(model, ranks, load) / (FIRST_ROUND + FURTHER_ROUND * (expert_rounds(model, moe, ranks, load) - 1))


def has_gate(model: Model) -> bool:
    """Return whether some layers have a gate on the output of attention, as delta nets have."""
    return model.attention_gate or model.delta_layers > 0


@functools.lru_cache(maxsize=4)
def remat_choices(model: Model, seq_len: int) -> list[tuple[float, tuple[str, ...], Remat]]:
    """Return (recomputed FLOPs, names of the activations, remat that saves them) for every combination of GROUPS."""
    candidates = []
    all_groups = (LATENTS,) * bool(model.kv_lora_rank) + (("attention_gate",),) * has_gate(model) + GROUPS
    for size in range(len(all_groups) + 1):
        for groups in itertools.combinations(all_groups, size):
            names = tuple(name for group in groups for name in group)
            remat = Remat("custom", ",".join(f"{name}=keep" for name in names)) if names else Remat("full")
            candidates.append((flops.recompute(model, remat, seq_len).causal, names, remat))
    return candidates


@dataclasses.dataclass(frozen=True)
class Activations:
    """The activations that the layers of a model may save on one device.

    Attributes:
        axes: `Placement.activation_shards`.
        documents: of a sequence at most, if attention is cuDNN's over packed sequences, whose log-sum-exp has an entry for each
            of them and one for the padding; else 0.
    """

    model: Model
    moe: Moe
    layout: Layout
    axes: Mapping[str, int]
    documents: int = 0

    @functools.cached_property
    def bytes_per_token(self) -> dict[str, float]:
        """Return name of a layer's activation -> its bytes on a device, per token of the device's shard of the batch.

        In a model with delta nets, the bytes are the mean of all layers.
        """
        m, axes = self.model, self.axes
        q, k = (n * flops.head_dim(m) / axes[axis] for n, axis in ((m.num_heads, "heads"), (m.num_kv_heads, "kv_heads")))
        value_ratio = flops.value_dim(m) / flops.head_dim(m)
        compute = 4 if self.layout.dtypes.compute == "f32" else 2
        mlp_width = m.d_ff * expert_room(m, self.moe, axes["experts"]) + m.shared_d_ff if m.num_experts else m.d_ff
        sizes = {
            "q_latent": m.q_lora_rank * compute,
            "kv_latent": (m.kv_lora_rank + m.qk_rope_head_dim) * compute,
            "q": q * compute,
            "k": k * compute,
            "v": k * value_ratio * compute,
            "attention_out": q * value_ratio * compute,
            "attention_gate": q * compute * m.attention_gate,
            "attention_lse": m.num_heads / axes["heads"] * (self.documents + 1) * 4,
            "residual": m.d_model * axes["sequence"] / axes["residual"] * compute,
            "mlp_gate": mlp_width / axes["mlp"] * compute,
            "mlp_up": mlp_width / axes["mlp"] * compute,
        }
        delta_share = m.delta_layers / m.num_layers
        keys, values = (n * width / axes["heads"] * compute for n, width in flops.linear_heads(m))
        delta = {"q": keys, "k": keys, "v": values, "attention_gate": values, "attention_out": values, "attention_lse": 0.0}
        return sizes | {name: (1 - delta_share) * sizes[name] + delta_share * size for name, size in delta.items()}

    def saved_bytes(self, names: Iterable[str]) -> float:
        """Return the bytes of these saved activations on a device, summed over the microbatches in flight."""
        _, rows, length = self.layout.batch
        tokens = rows * length / self.axes["batch"] / self.axes["sequence"]
        return num_saved_layers(self.layout, self.model.period) * tokens * sum(self.bytes_per_token[name] for name in names)

    def least_recompute(self, most_bytes: float) -> Remat | None:
        """Return the remat with the least recomputation among those that save at most `most_bytes` on a device.

        Full recomputation counts as 0 saved bytes, so the result is None only if `most_bytes` is negative.
        """
        sizes = {name: self.saved_bytes((name,)) for name in self.bytes_per_token}
        candidates = remat_choices(self.model, self.layout.batch[2])
        costs = ((recompute, sum(sizes[n] for n in names), remat) for recompute, names, remat in candidates)
        return min((c for c in costs if c[1] <= most_bytes), key=lambda choice: choice[:2], default=(0, 0, None))[2]

    def smaller(self, remat: Remat, excess_gib: float) -> Remat | None:
        """Return the remat with the least recomputation among those that save at least `excess_gib` less than `remat`.

        Returns None if even full recomputation does not save `excess_gib` less. For a family from outside the package, returns
        the next policy of NEXT_POLICY.
        """
        if self.model.outside:
            return Remat(NEXT_POLICY[remat.policy])
        return self.least_recompute(self.saved_bytes(saved_activations(remat)) - excess_gib * 2**30)


def describe_choice(model: Model, remat: Remat) -> str:
    """Return a line for the log: the activations that the chosen remat policy saves."""
    absent = {*(() if model.kv_lora_rank else LATENTS), *(() if has_gate(model) else ("attention_gate",))}
    names = sorted({*saved_activations(remat)} - absent)
    if not names:
        return "remat.policy=auto saves only each layer's input"
    caveat = f", as far as the layers of {model.family} name them (checkpoint_name)" if model.outside else ""
    return f"remat.policy=auto keeps {', '.join(names)}{caveat}"
