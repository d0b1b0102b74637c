"""What a plan says, as plain data: `json` of it is the contract of `--json`, and every picture and table is drawn from it."""

import dataclasses
from typing import Any

FORMAT = 2

# (bytes, fraction of the full rate), by increasing bytes.
type Curve = tuple[tuple[float, float], ...]
ANY_SIZE: Curve = ((1.0, 1.0),)  # the full rate whatever the size


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast the parts of a GPU are taken to be. Each is what a real program reaches, not what a data sheet prints."""

    gemm_tflops: float  # matrix products in the compute dtype
    attention_forward_tflops: float  # of the FLOPs inside the mask, in a call with rates.ATTENTION_AT keys
    attention_backward_tflops: float
    memory_tb_s: float  # memory-bound kernels
    nvlink_gb_s: float  # bus bandwidth of ring collectives inside a node, one direction
    network_gb_s: float  # of each GPU's share of the node's network cards, one direction
    host_gb_s: float  # to and from pinned host memory
    network_latency_us: float  # of the way from one node to the next, and through it
    source: str  # "published kernel rates" or "calibrated on NVIDIA H200, 2026-11-21"
    fp8_tflops: float = 0.0  # matrix products in 8-bit floating point; 0 where the GPU has none
    collective_curve: Curve = ANY_SIZE  # of nvlink_gb_s, by the bytes of the message (see rates.fraction)
    network_curve: Curve = ANY_SIZE  # of network_gb_s, by the bytes that each GPU sends to another node


def rates_from_json(tree: dict[str, Any]) -> Rates:
    """Reads rates from plain data, in which tuples are lists."""
    curves = {name: tuple((size, part) for size, part in tree[name]) for name in ("collective_curve", "network_curve")}
    return Rates(**{**tree, **curves})


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, over a whole step: loops are multiplied out."""

    kind: str  # all-gather | reduce-scatter | all-reduce | all-to-all | collective-permute | ...
    dtype: str  # of what travels; several combined into one launch are joined by "+"
    axis: str  # mesh axes it runs over, joined by "+"
    group: int  # devices in one group
    count: int  # launches a step
    wire_gib: float  # what each GPU sends in a step over all launches
    network_gib: float  # each GPU's share of what leaves its node; 0 where the group stays inside one
    ms: float  # time on the link, all launches
    exposed_ms: float  # of that, what the GPU waits for
    source: str  # file:line of the Python that caused it
    op_name: str  # the path of named scopes it came from
    instruction: str  # its name in the HLO


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One of the arrays that are held at the peak."""

    gib: float
    kind: str  # the class it is counted in
    shape: str  # bf16[32,1,8192,4096]
    source: str  # file:line
    op_name: str
    instruction: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """GiB on one device."""

    hbm_gib: float  # the card
    reserve_gib: float  # left to what the compiler does not count: NCCL, CUDA context, fragmentation
    usable_gib: float  # what training gives to JAX
    peak_gib: float  # by the compiler's buffer assignment, with cuDNN's workspace
    arguments_gib: float  # state and batch, held throughout
    temp_gib: float
    host_gib: float  # pinned host memory of one device: offloaded activations, offloaded moments
    by_class: dict[str, float]  # at the peak; sums to peak_gib
    saved: dict[str, float]  # activations kept for the backward pass, by name
    peak_at: str  # op_name of the instruction during which the peak is reached
    timeline: tuple[tuple[float, str], ...]  # (GiB held, phase) over the schedule, thinned to a few hundred points
    largest: tuple[Buffer, ...]  # at the peak, largest first
    workspace_gib: float  # the most that one of cuDNN's attention calls takes while it runs, counted above
    workspace_by: str  # "formula", or "cudnn 9.19.0" where that was asked

    @property
    def taken_gib(self) -> float:
        """What a run has to give: the peak, and the gaps between the arrays of the compiler's heap, which is taken whole."""
        return self.arguments_gib + self.temp_gib


@dataclasses.dataclass(frozen=True)
class Flops:
    """A token's cost by formula, and a step's cost by the compiled program."""

    per_token_causal: float
    per_token_full: float
    hardware_per_step: float  # FLOPs one device executes in a step: GEMMs and attention found in the program
    expected_per_step: float  # the same by formula, with what the remat policy computes again
    attention_per_step: float = 0.0  # of the first, in fused attention kernels
    attention_by_rank: tuple[float, ...] = ()  # what the causal mask asks of each rank of mesh.seq; () where it is 1


@dataclasses.dataclass(frozen=True)
class Time:
    """A step on one device: its roofline, in milliseconds, and what published runs of its kind lead to expect."""

    gemm_ms: float
    attention_ms: float
    memory_ms: float  # memory-bound kernels
    compute_ms: float  # the three together
    communication_ms: float  # time on the links, hidden or not
    exposed_ms: float  # communication that compute waits for
    host_exposed_ms: float  # copies to and from host memory that compute waits for
    step_ms: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu_causal: float
    mfu_full: float
    hfu: float
    bound_by: str
    mfu_fp8_peak: float | None = None  # under precision=fp8: mfu_causal over the FP8 peak; the others are over that of bfloat16
    expected_step_ms: tuple[float, float] | None = None  # shortest and longest; None: no comparable published run
    expected_tokens_per_s_per_device: tuple[float, float] | None = None  # least and most


SHOWN = 6  # products in a sentence


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """The matrix products of layers under precision=fp8, for each layer and microbatch: of seven weights 21, forward and
    backward, of others such as routers theirs, and what remat computes again."""

    products: float
    eight: float  # of them, in 8-bit floating point
    wide: tuple[str, ...]  # the others, most frequent first: what and where, and how often in a step

    @property
    def some_wide(self) -> str:
        """A few of them in words."""
        more = [f"and {len(self.wide) - SHOWN} more"] if len(self.wide) > SHOWN else []
        return "; ".join([*self.wide[:SHOWN], *more])


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How microbatches pass through the stages of mesh.stage, on each GPU and in a step."""

    schedule: str
    stages: int
    groups: int  # of layers on each stage
    microbatches: int
    layers: tuple[str, ...]  # on each stage: "0-9", or "0-4 10-14"
    bubble: float  # the part of a step in which a stage has nothing to do, by formula
    idle: float  # passes through a stage that work on nothing, of those that the compiled program makes
    in_flight: float  # microbatches whose activations a stage keeps, at most
    saved_gib: float  # these activations
    permute_gib: float  # sent over stage from neighbour to neighbour
    reduce_gib: float  # and to all stages: states of the last for the vocabulary, gradients, sums
    network_gib: float  # of both
    ms: float
    exposed_ms: float


@dataclasses.dataclass(frozen=True)
class Experts:
    """Experts on devices."""

    experts: int  # of a layer
    per_token: int
    devices: int  # that share a layer's experts
    rows: float  # that a device's experts multiply, of one layer and microbatch
    room: float  # rows that their arrays have room for
    capacity: float  # 0: no token is dropped
    layer_gib: float  # all-to-all of one layer and microbatch, sent by each GPU, forward and backward
    layer_exposed_ms: float
    exposed_ms: float  # of a whole step
    load: float = 1.0  # even shares that the busiest expert is supposed to draw
    rounds: int = 1  # that each exchange takes at this load


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Instructions of one kind and origin, over a whole step."""

    kind: str  # gemm | attention | memory | communication | host
    op_name: str  # the innermost named scope, with forward, backward or recompute in front
    source: str
    count: int
    ms: float
    tflop: float
    gb: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything a plan found out about one config on one topology."""

    config: str
    overrides: tuple[str, ...]
    topology: str
    chip: str  # device kind
    mesh: dict[str, int]
    attention: str
    fits: bool
    memory: Memory
    flops: Flops
    collectives: tuple[Collective, ...]
    time: Time
    kernels: tuple[Kernel, ...]
    rates: Rates
    tokens_per_step: int
    compile_s: float
    trip_counts: dict[str, int]  # the program's loops: op_name -> iterations
    hints: tuple[str, ...]
    warnings: tuple[str, ...]
    versions: dict[str, str]
    options: dict[str, str | bool]  # compiler options that training would use
    kept: str = ""  # what remat.policy=auto came to
    matmuls: Matmuls | None = None  # under precision=fp8
    pipeline: Pipeline | None = None  # with mesh.stage
    experts: Experts | None = None  # with model.num_experts
    kind: str = ""  # of the published runs that this one is like (rates.kind)
    # Loops of unknown length and branches, for which the host waits for the GPU: op_name -> times in a step.
    host_waits: dict[str, int] = dataclasses.field(default_factory=dict)
    format: int = FORMAT


def to_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain data for `--json`."""
    tree = dataclasses.asdict(plan)
    tree["memory"]["taken_gib"] = plan.memory.taken_gib
    return tree


EXPECTED = ("expected_step_ms", "expected_tokens_per_s_per_device")


def from_json(tree: dict[str, Any]) -> Plan:
    """The inverse of `to_json`. Raises ValueError on another format."""
    if tree.get("format") != FORMAT:
        raise ValueError(f"a plan of format {tree.get('format')!r}; this jaxtrain reads {FORMAT}")
    memory = dict(tree["memory"])
    del memory["taken_gib"]
    memory["timeline"] = tuple((gib, phase) for gib, phase in memory["timeline"])
    memory["largest"] = tuple(Buffer(**b) for b in memory["largest"])
    matmuls, pipeline, experts = (tree.get(name) for name in ("matmuls", "pipeline", "experts"))
    sections = {
        "matmuls": Matmuls(**matmuls | {"wide": tuple(matmuls["wide"])}) if matmuls else None,
        "pipeline": Pipeline(**pipeline | {"layers": tuple(pipeline["layers"])}) if pipeline else None,
        "experts": Experts(**experts) if experts else None,
        "overrides": tuple(tree["overrides"]),
        "memory": Memory(**memory),
        "flops": Flops(**tree["flops"] | {"attention_by_rank": tuple(tree["flops"]["attention_by_rank"])}),
        "collectives": tuple(Collective(**c) for c in tree["collectives"]),
        "time": Time(**tree["time"] | {name: tuple(t) for name in EXPECTED if (t := tree["time"].get(name))}),
        "kernels": tuple(Kernel(**k) for k in tree["kernels"]),
        "rates": rates_from_json(tree["rates"]),
        "hints": tuple(tree["hints"]),
        "warnings": tuple(tree["warnings"]),
    }
    return Plan(**{**tree, **sections})
