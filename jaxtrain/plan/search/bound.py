"""What a layout costs at least, by formulas alone: so that a search need not compile what can neither fit nor win.

Everything counted here is counted by the plan as well, at the same rates, and never more of it, so that the time and the memory
of a compiled plan are at or above these bounds. (A search checks that for every plan it sees.) Per GPU, in one step:

    GEMMs          3 x the forward FLOPs and what remat computes again (jaxtrain/flops.py), less 1% for what XLA simplifies;
                   Muon's are shared by all GPUs
    attention      forward (twice where remat repeats it), 2.5 x that backward, causal half only
    memory-bound   the optimizer reads weights, moments and gradients and writes all but the last; a sum over microbatches reads
                   two gradients and writes one; a norm moves two rows forward and three backward, SwiGLU three and five; the
                   loss reads float32 logits and writes their gradient
    links          weights gathered forward and backward and gradients scattered once a microbatch, as sharding.zero and
                   sharding.gather say; replicas' gradients summed once a step; activations gathered and scattered over the
                   tensor axis four times forward and four backward; over the seq axis, what brings keys to queries; over the
                   expert axis, tokens to experts and back, twice forward and twice backward; over the stage axis, every
                   group's output and its gradient to its neighbour

    step >= max(GEMMs + attention + memory-bound + forward tensor and expert collectives, all traffic of one link)

A layer's forward pass is a chain, in which each of these collectives waits for a GEMM and the next GEMM for it: nothing hides
those. All other traffic may hide behind arithmetic, and the bound lets it. In a pipeline, what layers compute takes longer by
the ticks in which a stage is idle (stages.py).

    memory >= state + weights gathered and held + gradients being summed (with more than one microbatch)
              + what remat keeps of every layer, in a pipeline for every microbatch that waits
              + max(in the loss: the head, its float32 gradient, one chunk's logits;
                    in the backward pass: gradients of all layers, of one where they are added to those of the microbatches
                    before as they come; the largest weight; what one checkpoint computes again)

cuDNN's workspace is left out of the bound, and counted in the plan: it makes a plan larger and never smaller.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

from jaxtrain import config, flops
from jaxtrain.activations import ACTIVATIONS, kept, parse_tensors
from jaxtrain.config import MESH_AXES, RunConfig
from jaxtrain.context import Context, make_context
from jaxtrain.models import FAMILIES
from jaxtrain.optim import groups
from jaxtrain.optim.moments import INT8
from jaxtrain.plan.program.op_cost import ATTENTION_BACKWARD
from jaxtrain.plan.rates import fastest_attention
from jaxtrain.plan.result import Rates
from jaxtrain.plan.topology import Topology
from jaxtrain.train import auto_remat
from jaxtrain.train.stages import Schedule

BYTES = {"f32": 4, "bf16": 2}
SIMPLIFIED = 0.99  # the formula and the compiled GEMMs agree within a percent
# What the backward pass reads of a layer, whatever is done about the rest: with none of it kept it is computed again.
READ_BACKWARD = ("attention_norm", "q", "k", "v", "attention_out", "attention_lse", "mlp_norm", "mlp_gate", "mlp_up")


@dataclasses.dataclass(frozen=True)
class Bound:
    """No plan of this layout is faster, or smaller on its fullest GPU. Both 0 where nothing is known of the model."""

    step_s: float
    memory_gib: float


def mesh_sizes(run: RunConfig, topology: Topology) -> dict[str, int]:
    """Size of each mesh axis, with every -1 filled in. The mesh is one that validate accepts for this machine."""
    return config.mesh_sizes(run.mesh, topology.total, topology.gpus)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A run on a machine: how many parts each logical axis has, and over which mesh axes."""

    run: RunConfig
    sizes: Mapping[str, int]
    node: int  # GPUs in a node

    @functools.cached_property
    def _rules(self) -> dict[str, tuple[str, ...]]:
        return config.rules_in_use(self.run, self.sizes)

    def axes(self, logical: str) -> tuple[str, ...]:
        """Mesh axes, of size above 1, that split a logical axis."""
        return tuple(a for a in self._rules.get(logical, ()) if self.sizes.get(a, 1) > 1)

    def parts(self, *logical: str) -> int:
        return math.prod(self.sizes[a] for axis in logical for a in self.axes(axis))

    @property
    def exchange(self) -> tuple[str, ...]:
        """Of the mesh axes that split experts at rest, that along which tokens travel to them."""
        return tuple(a for a in self.axes("experts") if a == config.EXPERT_AXIS)

    @property
    def owners(self) -> int:
        """Into how many parts experts in use are split."""
        return math.prod(self.sizes[a] for a in self.exchange)

    def rest(self, part: str) -> tuple[str, ...]:
        """Mesh axes that split a part's weights at rest, and not in use."""
        if part != "experts":
            return self.axes("embed")
        return tuple(a for axis in ("experts", "expert_embed") for a in self.axes(axis) if a not in self.exchange)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """When each stage does what; of one stage, nothing waits."""
        stages, p = self.parts("layers"), self.run.pipeline
        return Schedule(p.schedule, stages, p.groups if stages > 1 else 1, self.run.train.grad_accum)

    @property
    def layers(self) -> float:
        """On one device, in the mean: the longest stage may have one more."""
        return self.run.model.num_layers / self.parts("layers")

    @property
    def room(self) -> float:
        """Rows of experts' arrays for each token."""
        return auto_remat.expert_room(self.run, self.owners)

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.run.compute]

    @property
    def weight_bytes(self) -> int:
        """Of a gathered weight of a layer, at least."""
        return 1 if self.run.precision == "fp8" else self.compute_bytes

    @property
    def tokens(self) -> float:
        """Of one step, on each shard of the batch."""
        return self.run.train.global_batch * self.run.data.seq_len / self.parts("batch")

    @property
    def context(self) -> Context:
        """How the ranks of the seq axis share a sequence."""
        m, a = self.run.model, self.run.attention
        heads, kv_heads = m.num_heads // self.parts("heads"), m.num_kv_heads // self.parts("kv_heads")
        return make_context(self.run.parallel.context, a.ulysses, self.parts("sequence"), heads, max(1, kv_heads))

    @functools.cached_property
    def whole(self) -> dict[str, float]:
        """Parameters of each part of the model on one device that has gathered them."""
        split = {
            "embedding": ("vocab",),
            "attention": ("layers", "heads"),
            "mlp": ("layers", "mlp"),
            "experts": ("layers", "mlp"),
            "router": ("layers",),
            "norms": ("layers",),
            "head": ("vocab",),
        }
        count = flops.parameters(self.run.model)
        whole = {part: count[part] / self.parts(*axes) for part, axes in split.items()}
        return whole | {"experts": whole["experts"] / self.owners}

    @functools.cached_property
    def parameters(self) -> dict[str, float]:
        """Of each part of the model, on one device at rest."""
        return {part: count / math.prod(self.sizes[a] for a in self.rest(part)) for part, count in self.whole.items()}

    @property
    def once(self) -> bool:
        """Weights are gathered, and gradients reduced, once a step."""
        return self.run.sharding.zero == 1 or self.run.sharding.gather == "step"

    @property
    def gradients(self) -> dict[str, float]:
        """Elements of each part's gradient on one device, until it is reduced over all axes."""
        return self.whole if self.once else self.parameters

    @property
    def held(self) -> float:
        """Gathered weights that a device holds from its forward pass to its backward pass, or all step long."""
        s = self.run.sharding
        whole = {part: count for part, count in self.whole.items() if self.rest(part)}
        if self.once or s.zero == 2:
            return sum(whole.values())
        return sum(whole.get(part, 0.0) for part in LAYERS) if s.gather == "forward" else 0.0


LAYERS = ("attention", "mlp", "experts", "router")  # parts of the model that are layers' matrices


def activation_bytes(layout: Layout, name: str) -> float:
    """Bytes that one activation of one layer takes on a device, for each token of its shard of the batch."""
    m, c = layout.run.model, layout.compute_bytes
    heads = m.num_heads * flops.head_dim(m) * c / layout.parts("heads", "sequence")
    kv_heads = m.num_kv_heads * flops.head_dim(m) * c / layout.parts("kv_heads", "sequence")
    rows = m.d_ff * layout.room + m.shared_d_ff if m.num_experts else m.d_ff
    wide = rows * c / layout.parts("mlp", "sequence")
    known = {
        "q": heads,
        "k": kv_heads,
        "v": kv_heads,
        # What only matrix products read is kept as they read it, where a policy does not name it.
        **dict.fromkeys(("attention_norm", "mlp_norm"), m.d_model * layout.weight_bytes / layout.parts("residual")),
        "attention_out": heads,
        "attention_lse": m.num_heads * 4 / layout.parts("heads", "sequence"),
        "mlp_gate": wide,
        "mlp_up": wide,
    }
    return known.get(name, m.d_model * c / layout.parts("residual"))


def master_bytes(layout: Layout) -> float:
    """Of the master weights on one device at rest, at least: scales of norms are float32 whatever the others are."""
    stored = BYTES[layout.run.dtypes.params]
    return sum(layout.parameters.values()) * stored + layout.parameters["norms"] * (BYTES["f32"] - stored)


def moment_bytes(layout: Layout) -> float:
    """Of all moments, at rest, at least; of 8-bit blocks the codes alone. Muon has one of the matrices of layers."""
    run, params = layout.run, layout.parameters
    if run.optimizer.name not in groups.METHODS:
        return 0.0
    wide = params["embedding"] + params["head"] + params["norms"]
    rest = sum(params.values()) - wide
    muon = run.optimizer.name == "muon"
    # Which parameters a group moves is known of the model alone.
    moved = any(optimizer == "muon" for _, optimizer in groups.moved(run.optimizer.groups))
    second = (0.0 if moved else wide, 0.0) if muon else (wide, rest)
    held = ((run.dtypes.m, wide, rest), (run.dtypes.v, *second))
    return sum(4 * w + r if d == INT8 else BYTES[d] * (w + r) for d, w, r in held)


def bound(run: RunConfig, topology: Topology, rates: Rates) -> Bound:
    """The least step time and the least peak memory of a run on a machine.

    A family, an optimizer or a loss of one's own is not looked into: of the first nothing is known, of the others nothing is
    counted. Nor is a run that does not train all of its weights.
    """
    if run.model.family not in FAMILIES or run.lora.rank or run.train.freeze:
        return Bound(0.0, 0.0)
    layout = Layout(run, mesh_sizes(run, topology), topology.gpus)
    return Bound(_step_s(layout, rates), _memory_bytes(layout) / 2**30)


def _step_s(layout: Layout, rates: Rates) -> float:
    traffic: dict[str, float] = {"nvlink": 0.0, "network": 0.0}
    for axes, wire, launches in (
        *_weight_traffic(layout),
        *_chain_traffic(layout, passes=2),
        *_context_traffic(layout),
        *_stage_traffic(layout),
    ):
        for link, seconds in _link_s(layout, rates, axes, wire, launches).items():
            traffic[link] += seconds
    chain = sum(max(_link_s(layout, rates, *item).values()) for item in _chain_traffic(layout, passes=1))
    chain *= _idle(layout)
    on_host = layout.run.optimizer.offload == "moments"
    host = 2 * moment_bytes(layout) / (rates.host_gb_s * 1e9) if on_host else 0.0
    return max(_arithmetic_s(layout, rates) + _memory_bound_s(layout, rates) + chain, *traffic.values(), host)


def _idle(layout: Layout) -> float:
    """How much longer layers take for the ticks in which a stage is idle."""
    return 1 / (1 - layout.schedule.bubble)


def _arithmetic_s(layout: Layout, rates: Rates) -> float:
    run = layout.run
    tokens = run.train.global_batch * run.data.seq_len / math.prod(layout.sizes.values())
    attention = flops.attention(run.model, run.data.seq_len).causal * run.model.num_layers
    linear = flops.forward(run.model, run.data.seq_len).causal - attention
    fused = rates.attention_backward_tflops * fastest_attention(backward=True)
    backward = ATTENTION_BACKWARD / fused if _fused_attention(run) else 2 / max(fused, rates.gemm_tflops)
    layers = run.model.num_layers * sum(flops.gemms(run.model).values())
    computed = run.model.num_layers * sum(flops.gemms(run.model, flops.expert_rows(run)).values())
    idle = _idle(layout)
    gemms = idle * computed / _layer_rate(run, rates) + (linear - layers) / rates.gemm_tflops
    seconds = SIMPLIFIED * 3 * gemms + idle * attention * (1 / _attention_rate(run, rates) + backward)
    muon = 0.0
    if run.optimizer.name == "muon" and not groups.moved(run.optimizer.groups):
        muon = SIMPLIFIED * flops.newton_schulz(run.model) / math.prod(layout.sizes.values()) / (rates.gemm_tflops * 1e12)
    return tokens * (seconds / 1e12 + idle * _again_s(run, rates)) + muon


def _layer_rate(run: RunConfig, rates: Rates) -> float:
    """Of a layer's matrix products; what fp8.exclude leaves wide is slower."""
    return rates.fp8_tflops if run.precision == "fp8" else rates.gemm_tflops


def _fused_attention(run: RunConfig) -> bool:
    """Else it is made of GEMMs."""
    return run.attention.impl in ("auto", "cudnn", "pallas")


def _attention_rate(run: RunConfig, rates: Rates) -> float:
    forward = rates.attention_forward_tflops * fastest_attention(backward=False)
    return forward if _fused_attention(run) else max(forward, rates.gemm_tflops)


def _again_s(run: RunConfig, rates: Rates) -> float:
    """Seconds per token that a GPU spends on what remat computes again."""
    total = flops.recompute(run.model, run.remat, run.data.seq_len, flops.expert_rows(run)).causal
    repeats = run.remat.policy != "none" and not {"attention_out", "attention_lse"} <= kept(run.remat)
    attention = repeats * flops.attention(run.model, run.data.seq_len).causal * run.model.num_layers
    linear = SIMPLIFIED * (total - attention)
    return (linear / _layer_rate(run, rates) + attention / _attention_rate(run, rates)) / 1e12


def _memory_bound_s(layout: Layout, rates: Rates) -> float:
    run, c = layout.run, layout.compute_bytes
    m, micro = run.model, run.train.grad_accum
    params = sum(layout.parameters.values())
    grads, made = BYTES[run.dtypes.grads] if micro > 1 else 2, sum(layout.gradients.values())
    moved = params * 2 * grads
    if run.optimizer.name in groups.METHODS:
        moved += 2 * (master_bytes(layout) + moment_bytes(layout))
    if micro > 1:
        moved += micro * made * (2 * grads + 2)
    norms = 2 * (2 + 3) * m.d_model / layout.parts("residual")
    rows = m.d_ff * flops.expert_rows(run) + m.shared_d_ff if m.num_experts else m.d_ff
    swiglu = (3 + 5) * rows / layout.parts("mlp", "sequence")
    moved += layout.tokens * layout.layers * c * (norms + swiglu)
    if run.loss.name == "cross_entropy":
        moved += layout.tokens * (4 + c) * m.vocab_size / layout.parts("vocab", "sequence")
    return moved / (rates.memory_tb_s * 1e12)


Traffic = tuple[tuple[str, ...], float, int]  # mesh axes, bytes that each device sends in a step, launches


def _weight_traffic(layout: Layout) -> list[Traffic]:
    """Gathers and reductions of weights, which every shard of the batch needs whole; over `expert` experts stay apart."""
    experts = {"experts": layout.parameters["experts"]}
    others = {part: count for part, count in layout.parameters.items() if part != "experts"}
    return [
        *_moved_over(layout, layout.rest("mlp"), (), others),
        *(_moved_over(layout, layout.rest("experts"), layout.exchange, experts) if experts["experts"] else []),
    ]


def _moved_over(layout: Layout, split: tuple[str, ...], stays: tuple[str, ...], params: Mapping[str, float]) -> list[Traffic]:
    """Of weights that are split over the mesh axes `split` at rest, and over `stays` in use too. `params`: of each part, on one
    device at rest."""
    run, parts = layout.run, math.prod(layout.sizes[a] for a in split)
    replicas = tuple(a for a in (*layout.axes("batch"), *layout.axes("sequence")) if a not in (*split, *stays))
    copies = math.prod(layout.sizes[a] for a in replicas)
    micro = run.train.grad_accum
    everything, head = sum(params.values()), params.get("head", 0.0)
    layers = sum(params.get(part, 0.0) for part in LAYERS)
    others = everything - layers
    # How rows of an embedding travel is the kernel's own affair. The last layer's weights need not be gathered again.
    again = layers * (1 - 1 / layout.layers)
    if layout.once:
        gathered, wide, reduced = layers, others, everything
    elif run.sharding.zero == 2:
        gathered, wide, reduced = layers, others, micro * (layers + head)
    else:
        gathered, wide = micro * (layers + (again if run.sharding.gather == "layer" else 0.0)), micro * head
        reduced = micro * (layers + head)
    sent = gathered * layout.weight_bytes + wide * layout.compute_bytes + reduced * BYTES[run.dtypes.reduce]
    moved = (parts - 1) * sent
    summed = 2 * everything * (copies - 1) / copies * BYTES[run.dtypes.reduce]
    return [(split, moved, 0), (replicas, summed, 0)]


def _chain_traffic(layout: Layout, passes: int) -> list[Traffic]:
    """What stands between GEMMs of a layer: over tensor a gather and a reduce-scatter back, around attention and around the
    feed-forward block; over expert each token's rows to its experts and back. Backward moves as much again."""
    run = layout.run
    split = tuple(a for a in layout.axes("residual") if a not in layout.axes("sequence"))
    axes = split or layout.axes("heads") or layout.axes("mlp")
    parts = math.prod(layout.sizes[a] for a in axes)
    tokens = layout.tokens / layout.parts("sequence")
    row = run.model.d_model * layout.compute_bytes
    number = passes * 4 * layout.layers
    over = [(axes, number * tokens * row * (parts - 1) / parts, int(number * run.train.grad_accum))]
    if (ranks := layout.owners) > 1:
        # Each device of a tensor group sends whole rows; what a capacity below 1 does not take stays at home.
        rows = tokens * run.model.experts_per_token * min(1.0, run.moe.capacity_factor or 1.0)
        number = passes * 2 * layout.layers
        over.append((layout.exchange, number * rows * row * (ranks - 1) / ranks, int(number * run.train.grad_accum)))
    return over


def _stage_traffic(layout: Layout) -> list[Traffic]:
    """Every group's output to the next, and its gradient back; also in ticks in which there is none."""
    s, run = layout.schedule, layout.run
    if s.stages == 1:
        return []
    one = layout.tokens / s.microbatches * run.model.d_model * layout.compute_bytes / layout.parts("residual")
    return [(layout.axes("layers"), 2 * s.units * one, 2 * s.units)]


def _context_traffic(layout: Layout) -> list[Traffic]:
    """What brings keys to queries over the seq axis, forward and backward; nothing where a window limits how far.

    Around a ring keys and values travel forward, and backward with their gradients in float32; gathered, as much in other
    shapes. Ulysses trades queries, keys, values and the output for heads, and their gradients.
    """
    run, m, context = layout.run, layout.run.model, layout.context
    if context.size == 1 or m.sliding_window:
        return []
    u, r, c = context.ulysses, context.ring, layout.compute_bytes
    tokens = layout.tokens / context.size * layout.layers * flops.head_dim(m)
    queries = tokens * m.num_heads / layout.parts("heads")
    keys = 2 * tokens * max(m.num_kv_heads / layout.parts("kv_heads"), u)
    trips = 2 + (run.remat.policy != "none" and not {"attention_out", "attention_lse"} <= kept(run.remat))
    around = (r - 1) * keys * (trips * c + 4)
    traded = 2 * (u - 1) / u * (2 * queries + keys) * c
    return [(layout.axes("sequence"), around + traded, 0)]


def _link_s(layout: Layout, rates: Rates, axes: tuple[str, ...], wire: float, launches: int) -> dict[str, float]:
    """Seconds that this traffic takes on each kind of link at least.

    What a group sends splits into what stays inside nodes and what leaves them: of a ring over g devices on k nodes that sends
    `wire` bytes a device, at least (k - 1) / (g - 1) of it must cross, shared by the node's devices.
    """
    group = math.prod(layout.sizes[a] for a in axes)
    if group == 1:
        return {"nvlink": 0.0, "network": 0.0}
    crossing = (_nodes(layout, axes) - 1) / (group - 1)
    seconds = {
        "nvlink": wire * (1 - crossing) / (rates.nvlink_gb_s * 1e9),
        "network": wire * crossing / (rates.network_gb_s * 1e9),
    }
    # No launch is faster than the shortest message, of which a group of two sends half.
    (size, part), *_ = rates.collective_curve
    seconds["nvlink"] = max(seconds["nvlink"], launches * size / 2 / (rates.nvlink_gb_s * 1e9 * part))
    if crossing:
        seconds["network"] += launches * rates.network_latency_us * 1e-6
    return seconds


def _nodes(layout: Layout, axes: tuple[str, ...]) -> int:
    """How many nodes one group over these mesh axes touches; neighbouring devices lie along the right-most axis."""
    members, stride = [0], 1
    for axis in reversed(MESH_AXES):
        size = layout.sizes.get(axis, 1)
        if axis in axes:
            members = [at + i * stride for at in members for i in range(size)]
        stride *= size
    return len({at // layout.node for at in members})


def _memory_bytes(layout: Layout) -> float:
    run, m, c = layout.run, layout.run.model, layout.compute_bytes
    micro = run.train.grad_accum
    held = master_bytes(layout) + layout.held * layout.weight_bytes
    grads = layout.gradients
    held += 0.0 if run.optimizer.offload == "moments" else moment_bytes(layout)
    if micro > 1:
        held += sum(grads.values()) * BYTES[run.dtypes.grads]
    tokens = layout.tokens / micro
    held += tokens * saved_bytes(layout)

    vocab, chunk = m.vocab_size / layout.parts("vocab"), min(run.loss.chunk, tokens / layout.parts("sequence"))
    everything_held = layout.held == sum(layout.whole.values())
    in_loss = 0.0
    if run.loss.name == "cross_entropy":
        in_loss = vocab * (m.d_model * (4 if everything_held else 4 + c) + chunk * 4)
    held_experts = max(1, m.num_experts) / layout.owners
    largest = m.d_model * max(
        m.d_ff * held_experts / layout.parts("mlp"), m.num_heads * flops.head_dim(m) / layout.parts("heads")
    )
    largest *= layout.weight_bytes
    made = 2 * sum(grads[part] for part in LAYERS) / (layout.layers if may_add_layers(run) else 1)
    in_backward = made + (0 if layout.held else largest) + tokens * _again_bytes(layout)
    return held + max(in_loss, in_backward)


def may_add_layers(run: RunConfig) -> bool:
    """Whether a microbatch's gradients may never be held whole: where layers stand one by one XLA can do without, too. In a
    pipeline they are added layer by layer."""
    by_layer = not run.parallel.scan_layers or run.train.accumulate == "layer" or run.mesh.stage != 1
    return run.train.grad_accum > 1 and by_layer


def on_device(layout: Layout) -> frozenset[str]:
    """Activations that remat leaves on the device, of those that the backward pass reads for certain."""
    remat = layout.run.remat
    there = kept(remat)
    if remat.policy == "custom":
        places, _ = parse_tensors(remat.tensors)
        there -= {name for name, place in places.items() if place == "offload"}
    return there & {*READ_BACKWARD}


def saved_bytes(layout: Layout) -> float:
    """What a device's layers keep for the backward pass, per token of a microbatch: the input of each checkpoint, and what the
    policy names."""
    run = layout.run
    named = sum(activation_bytes(layout, name) for name in on_device(layout))
    every = 1 if run.remat.policy == "none" else run.remat.every
    layers = auto_remat.layers_kept(run, layout.parts("layers"))
    return layers * named + -(-layers // every) * activation_bytes(layout, "layer input")


def _again_bytes(layout: Layout) -> float:
    """What one checkpoint computes again and holds at one time, per token: of several layers all, of one what SwiGLU reads."""
    remat = layout.run.remat
    if remat.policy == "none":
        return 0.0
    names = {*READ_BACKWARD} if remat.every > 1 else {"mlp_gate", "mlp_up"}
    return remat.every * sum(activation_bytes(layout, name) for name in names - kept(remat))


def ladder(run: RunConfig, rates: Rates) -> list[tuple[str, ...]]:
    """Sets of activations to keep, each larger than the last by the one that saves the most time per byte it takes.

    Attention's output and log-sum-exp save nothing apart and count as one. Among equals the smaller comes first, then the one
    that stands later in the layer, since what leads to it need not be computed again either. The last set saves every GEMM.
    """
    layout = Layout(run, dict.fromkeys(MESH_AXES, 1), 1)

    def again(names: frozenset[str]) -> float:
        keep = ",".join(f"{name}=keep" for name in names)
        remat = dataclasses.replace(run.remat, policy="custom" if keep else "full", tensors=keep, every=1)
        return _again_s(dataclasses.replace(run, remat=remat), rates)

    have: frozenset[str] = frozenset()
    rungs = []
    steps = [("attention_out", "attention_lse"), *((name,) for name in ACTIVATIONS)]
    while True:
        rated = []
        for place, step in enumerate(steps):
            size = sum(activation_bytes(layout, name) for name in step)
            saved = again(have) - again(have | {*step})
            if saved > 0:
                rated.append((float(f"{saved / size:.6g}"), -size, place, step))
        if not rated:
            return rungs
        have |= {*max(rated)[-1]}
        rungs.append(tuple(name for name in ACTIVATIONS if name in have))
