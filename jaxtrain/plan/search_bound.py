"""The formula of a layout's memory and step time, which orders every search.

`Bound.memory_gib` is a lower bound of a plan's memory, so no layout that fits is refused. `Bound.step_s` counts the same work
at the same rates as a plan, and assumes that all communication that can overlap does. Per GPU, in one step:

    GEMMs          3 x the forward FLOPs and those of remat (flops.py), less 1% for XLA's simplifications; GEMMs of Muon
    attention      forward (twice if remat repeats it), and backward with 2.5 x the FLOPs; the causal half of the scores
    memory-bound   optimizer, sums over microbatches, norms, SwiGLU, logits
    links          weights gathered and gradients reduced, by sharding.zero and sharding.gather; tensor, expert, seq and
                   stage traffic
    step_s         max(GEMMs + attention + memory-bound + forward tensor and expert collectives, traffic of NVLink,
                   traffic of the network, copies of offloaded moments)

    memory_gib     weights and moments + gathered weights that stay + summed gradients (with accumulation)
                   + saved activations, in a pipeline of every microbatch in flight
                   + max(the loss: head, its float32 gradient, logits of one chunk;
                         the backward pass: new gradients, the largest gathered weight, recomputed activations)

With remat.policy=auto, `step_s` assumes that as many activations as probably fit are saved. `memory_gib` assumes that only the
input of each layer is saved. The bound does not include cuDNN's workspace.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxtrain.config import schema
from jaxtrain.config.layout import Layout, resolve_layout
from jaxtrain.config.schema import MESH_AXES, Lora, Remat, RunConfig, Train
from jaxtrain.models import FAMILIES, flops
from jaxtrain.models.activations import kept, parse_tensors
from jaxtrain.optim import groups
from jaxtrain.optim.moments import INT8
from jaxtrain.plan.program.op_cost import ATTENTION_BACKWARD
from jaxtrain.plan.rates import fastest_attention, fp8_attention
from jaxtrain.plan.result import Rates
from jaxtrain.plan.topology import Topology, layout_of
from jaxtrain.sharding import Placement
from jaxtrain.step import auto_remat
from jaxtrain.step.stages import Schedule, schedule_of

BYTES = {"f32": 4, "bf16": 2}
SIMPLIFIED = 0.99  # XLA simplifies about 1% of the FLOPs of GEMMs away
# A plan's memory over the lower bound, both without weights and moments: 1.16 for 70B, 1.0 to 1.5 for the shipped configs.
ABOVE = 1.2
# Parts of the model (flops.parameters), and the logical axes that shard their weights.
PARTS = {
    "embedding": ("vocab", "embed"),
    "head": ("embed", "vocab"),
    "norms": ("layers", "embed"),
    "router": ("layers", "embed"),
    "attention": ("layers", "embed", "heads"),
    "mlp": ("layers", "embed", "mlp"),
    "experts": ("layers", "experts", "expert_embed", "mlp"),
    "mtp": ("embed",),
}
LAYERS = ("attention", "mlp", "experts", "router", "mtp")  # parts that are matrices of layers
# Activations that the backward pass of a layer always reads.
READ_BACKWARD = {"attention_norm", "q", "k", "v", "attention_out", "attention_lse", "mlp_norm", "mlp_gate", "mlp_up"}
ATTENTION = {"attention_out", "attention_lse"}


@dataclasses.dataclass(frozen=True)
class Bound:
    """Step time and memory per GPU of one layout, by formula. All figures are 0 for a run without a formula (see `bound`).

    Attributes:
        step_s: step time in seconds.
        memory_gib: lower bound of a plan's memory.
        state_gib: memory of weights and moments, without offloaded moments.
        likely_gib: approximate memory of a plan, which includes the activations that remat.policy=auto saves.
    """

    step_s: float
    memory_gib: float
    state_gib: float = 0.0
    likely_gib: float = 0.0


def bound(run: RunConfig, topology: Topology, rates: Rates) -> Bound:
    """Return step time and memory of a run on a machine, by formula.

    All figures are 0 for a user's own model family, and for a run that trains only some weights. The memory and time of a
    user's own optimizer or loss count as 0.
    """
    if no_formula(run.model.family, run.lora, run.train):
        return Bound(0.0, 0.0)
    sizes = least = Sizes(run, layout_of(run, topology), topology.gpus)
    state = _state_bytes(sizes)
    if run.remat.policy == "auto":
        least = sizes.with_remat(Remat("full"))
        room = (topology.usable_gib(run.train.memory_fraction) * 2**30 - state) / ABOVE + state
        room -= _memory_bytes(least)
        sizes = sizes.with_remat(least.saved.least_recompute(room) or Remat("full"))
    memory = _memory_bytes(sizes)
    smallest = memory if least is sizes else _memory_bytes(least)
    return Bound(_step_s(sizes, rates), smallest / 2**30, state / 2**30, (state + ABOVE * (memory - state)) / 2**30)


def least_remat(run: RunConfig, topology: Topology) -> Remat:
    """Return the remat with the least recomputation whose lower bound of memory fits; "full" if none fits."""
    sizes = Sizes(run, layout_of(run, topology), topology.gpus)
    usable = topology.usable_gib(run.train.memory_fraction) * 2**30
    found = auto_remat.choices(run.model, run.data.seq_len)
    fitting = (choice for choice in found if _memory_bytes(sizes.with_remat(choice[-1])) <= usable)
    return min(fitting, key=lambda choice: choice[:2], default=(0.0, (), Remat("full")))[-1]


def no_formula(family: str, lora: Lora, train: Train) -> str:
    """Return the setting for which a run has no formula, in words; "" if the run has one."""
    if family not in FAMILIES:
        return f"a family of your own (model.family={family})"
    if lora.rank:
        return f"adapters (lora.rank={lora.rank})"
    return f"frozen weights (train.freeze={train.freeze})" if train.freeze.strip() else ""


def least_state_gib(run: RunConfig, topology: Topology) -> float:
    """Return weights and moments in GiB, divided evenly over all GPUs: the minimum per GPU for every layout of the run.

    Return 0 for a run without a formula (see `bound`).
    """
    if no_formula(run.model.family, run.lora, run.train):
        return 0.0
    alone = dataclasses.replace(run, mesh=schema.Mesh(**dict.fromkeys(MESH_AXES, 1)))
    return _state_bytes(Sizes(alone, resolve_layout(alone, 1, 1), 1)) / topology.total / 2**30


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A run on a mesh, with the sizes of weights and activations on one device.

    Attributes:
        layout: what follows from the run on this machine.
        node: GPUs in a node.
    """

    run: RunConfig
    layout: Layout
    node: int

    def with_remat(self, remat: Remat) -> "Sizes":
        """Return the layout with another remat."""
        return dataclasses.replace(self, run=dataclasses.replace(self.run, remat=remat))

    @functools.cached_property
    def placement(self) -> Placement:
        """Return the trainer's map of logical axes to mesh axes. It needs only the sizes of the mesh, and no devices."""
        axes, sizes = zip(*self.layout.mesh, strict=True)
        return Placement(cast(Mesh, AbstractMesh(sizes, axes)), self.layout)

    @functools.cached_property
    def shards(self) -> dict[str, int]:
        """Return logical axis -> number of devices that shard it, for the axes of activations and the vocabulary."""
        return self.placement.activation_shards | {"vocab": self.placement.size(self.placement.mesh_axes("vocab"))}

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Return the pipeline schedule; without pipeline stages, that of one stage."""
        return schedule_of(self.layout)

    @property
    def layers(self) -> float:
        """Return the mean number of layers on one device. The longest stage may have one layer more."""
        m = self.run.model
        return m.stacked_layers / self.shards["layers"] + m.dense_layers + m.mtp_layers

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.run.compute]

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of an element of a layer's gathered weight; under fp8 the lower bound, 1."""
        return 1 if self.run.precision == "fp8" else self.compute_bytes

    @property
    def tokens(self) -> float:
        """Return the tokens of a step on each device, inside attention and feed-forward blocks."""
        return self.run.tokens_per_step / self.shards["batch"] / self.shards["sequence"]

    @property
    def residual(self) -> float:
        """Return the elements of the residual stream per token on a device."""
        return self.run.model.d_model * self.shards["sequence"] / self.shards["residual"]

    @property
    def saved(self) -> auto_remat.Activations:
        """Return the activations that the layers may save."""
        return auto_remat.Activations(self.run.model, self.run.moe, self.layout, self.shards)

    @functools.cached_property
    def activations(self) -> dict[str, float]:
        """Return name -> bytes of an activation of one layer, per token on a device."""
        found = self.saved.bytes_per_token | {"layer input": self.residual * self.compute_bytes}
        # Only matmuls read the norms' outputs. Outputs without a checkpoint_name are saved in the dtype of the matmul.
        return found | dict.fromkeys(("attention_norm", "mlp_norm"), self.residual * self.weight_bytes)

    @functools.cached_property
    def whole(self) -> dict[str, float]:
        """Return part of the model -> number of its weights on a device after they are gathered."""
        count, p = flops.parameters(self.run.model), self.placement
        return {part: count[part] / math.prod(p.size(p.compute_axes(a)) for a in axes) for part, axes in PARTS.items()}

    @functools.cached_property
    def parameters(self) -> dict[str, float]:
        """Return part of the model -> number of its weights that one device stores."""
        p = self.placement
        return {part: count / p.size(p.gather_axes(*PARTS[part])) for part, count in self.whole.items()}

    @property
    def once(self) -> bool:
        """Return whether weights are gathered, and gradients reduced, once per step."""
        return self.run.sharding.zero == 1 or self.run.sharding.gather == "step"

    @property
    def gradients(self) -> dict[str, float]:
        """Return part of the model -> elements of its gradient on one device, before the reduction at the end of a step."""
        return self.whole if self.once else self.parameters

    @property
    def holds_all(self) -> bool:
        """Return whether all gathered weights stay in memory until the backward pass."""
        return self.once or self.run.sharding.zero == 2

    @property
    def held(self) -> float:
        """Return the number of gathered weights that stay in memory at least until the backward pass."""
        whole = {part: count for part, count in self.whole.items() if self.placement.gather_axes(*PARTS[part])}
        if self.holds_all:
            # With one microbatch, XLA frees the embedding after the lookup.
            return sum(whole.values()) - (whole.get("embedding", 0.0) if self.run.train.grad_accum == 1 else 0.0)
        return sum(whole.get(part, 0.0) for part in LAYERS) if self.run.sharding.gather == "forward" else 0.0


def master_bytes(sizes: Sizes) -> float:
    """Return the bytes of the master weights that one device stores. Scales of norms are always float32."""
    stored = BYTES[sizes.run.dtypes.params]
    return sum(sizes.parameters.values()) * stored + sizes.parameters["norms"] * (BYTES["f32"] - stored)


def moment_bytes(sizes: Sizes) -> float:
    """Return a lower bound of the bytes of all moments on one device. Scales of 8-bit blocks are left out."""
    run, params = sizes.run, sizes.parameters
    if run.optimizer.name not in groups.METHODS:
        return 0.0
    wide = params["embedding"] + params["head"] + params["norms"]
    rest = sum(params.values()) - wide
    muon = run.optimizer.name == "muon"
    # A group can move parameters to Muon, which has one moment. The formula cannot know which parameters.
    moved = any(optimizer == "muon" for _, optimizer in groups.moved(run.optimizer.groups))
    second = (0.0 if moved else wide, 0.0) if muon else (wide, rest)
    held = ((run.dtypes.m, wide, rest), (run.dtypes.v, *second))
    return sum(4 * w + r if d == INT8 else BYTES[d] * (w + r) for d, w, r in held)


def _state_bytes(sizes: Sizes) -> float:
    """Return the bytes of weights and moments on one device, without offloaded moments."""
    return master_bytes(sizes) + (0.0 if sizes.run.optimizer.offload == "moments" else moment_bytes(sizes))


# ---- memory


def _memory_bytes(sizes: Sizes) -> float:
    run, m, c, shards = sizes.run, sizes.run.model, sizes.compute_bytes, sizes.shards
    held = _state_bytes(sizes) + sizes.held * sizes.weight_bytes
    grads, tokens = sizes.gradients, sizes.tokens / run.train.grad_accum
    if run.train.grad_accum > 1:
        held += sum(grads.values()) * BYTES[run.dtypes.grads]
    held += tokens * saved_bytes(sizes)

    everything_held = sizes.holds_all and all(sizes.placement.gather_axes(*PARTS[p]) for p, n in sizes.whole.items() if n)
    in_loss = 0.0
    if run.loss.name == "cross_entropy":
        head = m.d_model * (4 if everything_held else 4 + c)
        in_loss = m.vocab_size / shards["vocab"] * (head + min(run.loss.chunk, tokens) * 4)
    held_experts = max(1, m.num_experts) / shards["experts"]
    widths = m.d_ff * held_experts / shards["mlp"], m.num_heads * flops.head_dim(m) / shards["heads"]
    largest = m.d_model * max(widths) * sizes.weight_bytes
    # With unrolled layers, train.accumulate=layer or a pipeline, XLA may add or reduce each layer's gradients at once, and then
    # holds those of one layer.
    by_layer = not run.parallel.scan_layers or run.train.accumulate == "layer" or run.mesh.stage != 1
    summed = by_layer and (run.train.grad_accum > 1 or sizes.once)
    made = 2 * sum(grads[part] for part in LAYERS) / (sizes.layers if summed else 1)
    # A checkpoint of several layers holds all their recomputed activations at the same time. A checkpoint of one layer holds
    # the inputs of its SwiGLU.
    again = READ_BACKWARD if run.remat.every > 1 else {"mlp_gate", "mlp_up"}
    recomputed = run.remat.every * sum(sizes.activations[name] for name in again - kept(run.remat))
    if run.remat.policy == "none":
        recomputed = 0.0
    in_backward = made + (0 if sizes.held else largest) + tokens * recomputed
    return held + max(in_loss, in_backward)


def saved_bytes(sizes: Sizes) -> float:
    """Return the bytes of saved activations of a device's layers, per token of a microbatch.

    These are the inputs of each jax.checkpoint and the activations saved by name. Unnamed and offloaded activations are left
    out.
    """
    remat = sizes.run.remat
    there = kept(remat)
    if remat.policy == "custom":
        places, _ = parse_tensors(remat.tensors)
        there -= {name for name, place in places.items() if place == "offload"}
    named = sum(sizes.activations[name] for name in there & READ_BACKWARD)
    every = 1 if remat.policy == "none" else remat.every
    layers = auto_remat.layers_kept(sizes.layout)
    return layers * named + -(-layers // every) * sizes.activations["layer input"]


# ---- time


def _step_s(sizes: Sizes, rates: Rates) -> float:
    busy: Counter[str] = Counter()
    exposed = 0.0
    for axes, wire, launches, waited in _traffic(sizes):
        seconds = _link_s(sizes, rates, axes, wire, launches)
        busy.update(seconds)
        exposed += waited * max(seconds.values()) / (1 - sizes.schedule.bubble)
    on_host = sizes.run.optimizer.offload == "moments"
    host = 2 * moment_bytes(sizes) / (rates.host_gb_s * 1e9) if on_host else 0.0
    return max(_arithmetic_s(sizes, rates) + memory_bound_s(sizes, rates) + exposed, *busy.values(), host)


def _arithmetic_s(sizes: Sizes, rates: Rates) -> float:
    """Return the seconds of matmuls and attention per step. The bubble of a pipeline lengthens the time of layers."""
    run, m = sizes.run, sizes.run.model
    devices, rows = sizes.layout.devices, flops.expert_rows(run.model, run.moe, run.mesh)
    gemm, by_layer = rates.gemm_tflops, rates.fp8_tflops if run.precision == "fp8" else rates.gemm_tflops
    attention = flops.attention(m, run.data.seq_len).causal * m.step_layers
    head = flops.heads(m)
    computed = flops.layers(m, rows)

    forward = rates.attention_forward_tflops * fastest_attention(backward=False)
    backward = rates.attention_backward_tflops * fastest_attention(backward=True)
    if run.attention.forward == "fp8":
        forward *= fp8_attention(run.data.seq_len)  # the factor increases with the sequence length
    calls = 1 / forward, ATTENTION_BACKWARD / backward
    if run.attention.impl not in ("auto", "cudnn", "pallas"):  # consists of matmuls
        calls = 1 / max(forward, gemm), 2 / max(backward, gemm)
    repeated = attention * (run.remat.policy != "none" and not kept(run.remat) >= ATTENTION)
    again = flops.recompute(m, run.remat, run.data.seq_len, rows).causal - repeated
    layers = SIMPLIFIED * (3 * computed + again) / by_layer + attention * sum(calls) + repeated * calls[0]
    muon = 0.0
    if run.optimizer.name == "muon" and not groups.moved(run.optimizer.groups):
        muon = SIMPLIFIED * flops.newton_schulz(m) / devices / gemm
    per_token = layers / (1 - sizes.schedule.bubble) + SIMPLIFIED * 3 * head / gemm
    return (run.tokens_per_step / devices * per_token + muon) / 1e12


def memory_bound_s(sizes: Sizes, rates: Rates) -> float:
    """Return the seconds of optimizer, gradient accumulation, norms, SwiGLU and logits per step, by their memory traffic."""
    run, c = sizes.run, sizes.compute_bytes
    m, micro = run.model, run.train.grad_accum
    grads = BYTES[run.dtypes.grads] if micro > 1 else 2
    moved = sum(sizes.parameters.values()) * 2 * grads
    if run.optimizer.name in groups.METHODS:
        moved += 2 * (master_bytes(sizes) + moment_bytes(sizes))
    if micro > 1:
        moved += micro * sum(sizes.gradients.values()) * (2 * grads + 2)
    norms = 2 * (2 + 3) * sizes.residual  # each of two norms accesses two arrays forward, three backward
    rows = m.d_ff * flops.expert_rows(run.model, run.moe, run.mesh) + m.shared_d_ff if m.num_experts else m.d_ff
    swiglu = (3 + 5) * rows / sizes.shards["mlp"]
    moved += sizes.tokens * sizes.layers * c * (norms + swiglu)
    if run.loss.name == "cross_entropy":
        moved += sizes.tokens * (4 + c) * m.vocab_size / sizes.shards["vocab"] * (1 + m.mtp_layers)
    return moved / (rates.memory_tb_s * 1e12)


# (mesh axes, bytes that each device sends in a step, launches in a step, exposed fraction).
Traffic = tuple[tuple[str, ...], float, int, float]


def _traffic(sizes: Sizes) -> Iterator[Traffic]:
    """Yield the communication over each combination of mesh axes.

    Matmuls of the forward pass wait for tensor and expert collectives, so half of these collectives counts as exposed. Their
    other half, in the backward pass, and all other communication are assumed to overlap with computation.
    """
    run, m, c, s = sizes.run, sizes.run.model, sizes.compute_bytes, sizes.schedule
    p, shards, launches = sizes.placement, sizes.shards, 4 * sizes.layers * run.train.grad_accum
    yield from _weights(sizes, [part for part in PARTS if part != "experts"])
    if m.num_experts:
        yield from _weights(sizes, ["experts"])

    # An all-gather and a reduce-scatter around attention and around the feed-forward block, forward and backward.
    axes = p.sequence_parallel_axes or p.mesh_axes("heads") or p.mesh_axes("mlp")
    row = m.d_model * c
    yield axes, 8 * sizes.layers * sizes.tokens * row * _others(p.size(axes)), int(2 * launches), 0.5
    if exchange := p.compute_axes("experts"):
        # Each device of a tensor group sends complete tokens. A capacity factor below 1 drops some tokens.
        sent = sizes.tokens * m.experts_per_token * min(1.0, run.moe.capacity_factor or 1.0) * row * _others(p.size(exchange))
        yield exchange, 4 * sizes.layers * sent, int(launches), 0.5

    if s.stages > 1:  # each virtual stage sends its output to the next stage, and a gradient back
        yield p.mesh_axes("layers"), 2 * s.units * sizes.tokens / s.microbatches * sizes.residual * c, 2 * s.units, 0.0

    context = sizes.layout.context
    if context.size > 1 and not m.sliding_window:
        # A ring sends keys and values forward, and again backward with float32 gradients. Ulysses exchanges tokens for heads.
        u, r = context.ulysses, context.ring
        elements = sizes.tokens * sizes.layers * flops.head_dim(m)
        queries = elements * m.num_heads / shards["heads"]
        keys = 2 * elements * max(m.num_kv_heads / shards["kv_heads"], u)
        trips = 2 + (run.remat.policy != "none" and not kept(run.remat) >= ATTENTION)
        around = (r - 1) * keys * (trips * c + 4)
        yield p.mesh_axes("sequence"), around + 2 * _others(u) * (2 * queries + keys) * c, 0, 0.0


def _others(group: int) -> float:
    """Return the fraction of an array that is on the other devices of a group of this size."""
    return (group - 1) / group


def _weights(sizes: Sizes, parts: Iterable[str]) -> Iterator[Traffic]:
    """Yield the gathers of weights and the reductions of gradients of these parts, which have the same sharding."""
    run, p, micro = sizes.run, sizes.placement, sizes.run.train.grad_accum
    params = {part: sizes.parameters[part] for part in parts}
    split = p.gather_axes(*{axis: None for part in parts for axis in PARTS[part]})
    stays = p.compute_axes("experts") if "experts" in params else ()
    replicas = tuple(a for a in p.token_axes if a not in (*split, *stays))
    everything, head = sum(params.values()), params.get("head", 0.0)
    layers = sum(params.get(part, 0.0) for part in LAYERS)
    if sizes.once:
        gathered, wide, reduced = layers, everything - layers, everything
    elif run.sharding.zero == 2:
        gathered, wide, reduced = layers, everything - layers, micro * (layers + head)
    else:
        # The embedding lookup exchanges rows and gathers nothing. The last layer's weights need not be gathered again.
        again = layers * (1 - 1 / sizes.layers) if run.sharding.gather == "layer" else 0.0
        gathered, wide, reduced = micro * (layers + again), micro * head, micro * (layers + head)
    reduce = BYTES[run.dtypes.reduce]
    yield split, (p.size(split) - 1) * (gathered * sizes.weight_bytes + wide * sizes.compute_bytes + reduced * reduce), 0, 0.0
    yield replicas, 2 * everything * _others(p.size(replicas)) * reduce, 0, 0.0


def _link_s(sizes: Sizes, rates: Rates, axes: tuple[str, ...], wire: float, launches: int) -> dict[str, float]:
    """Return link ("nvlink" or "network") -> seconds of this traffic in a step.

    In a ring over g devices on k nodes, at least (k - 1) / (g - 1) of the bytes cross nodes.
    """
    group = sizes.placement.size(axes)
    if group == 1:
        return {"nvlink": 0.0, "network": 0.0}
    crossing = (_nodes(sizes, axes) - 1) / (group - 1)
    # A launch takes at least the time of the curve's smallest message, of which a device in a group of two sends half.
    (shortest, part), *_ = rates.collective_curve
    nvlink = max(wire * (1 - crossing), launches * shortest / 2 / part) / (rates.nvlink_gb_s * 1e9)
    network = wire * crossing / (rates.network_gb_s * 1e9) + bool(crossing) * launches * rates.network_latency_us * 1e-6
    return {"nvlink": nvlink, "network": network}


def _nodes(sizes: Sizes, axes: tuple[str, ...]) -> int:
    """Return the number of nodes of one group over these mesh axes. Consecutive device ids are along the last mesh axis."""
    devices = np.arange(sizes.layout.devices).reshape([size for _, size in sizes.layout.mesh])
    group = devices[tuple(slice(None) if axis in axes else 0 for axis in MESH_AXES)]
    return len(np.unique(group // sizes.node))
