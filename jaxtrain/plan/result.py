"""The plan as plain data, from which reports are built. `to_json` defines the format of `--json`."""

import dataclasses
import functools
import itertools
import types
import typing
from typing import Any

FORMAT = 3

# (bytes of a message, fraction of the full rate), by increasing bytes.
type Curve = tuple[tuple[float, float], ...]
ANY_SIZE: Curve = ((1.0, 1.0),)  # the full rate for every size


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates that programs reach in practice on a GPU, its links and its network card."""

    gemm_tflops: float  # matmuls in the compute dtype
    attention_forward_tflops: float  # FLOPs inside the mask per second, in a call with rates.ATTENTION_AT keys
    attention_backward_tflops: float
    memory_tb_s: float  # memory-bound kernels
    nvlink_gb_s: float  # bus bandwidth of ring collectives inside a node, one direction
    network_gb_s: float  # of each GPU's share of the node's network cards, one direction
    host_gb_s: float  # to and from pinned host memory
    network_latency_us: float  # of a hop between nodes, and through the next node
    source: str  # "published kernel rates" or "calibrated on NVIDIA H200, 2026-11-21"
    fp8_tflops: float = 0.0  # matmuls in 8-bit floating point; 0 if the GPU has none or they were not measured
    collective_curve: Curve = ANY_SIZE  # of nvlink_gb_s, by the bytes of the message (see rates.rate_fraction)
    network_curve: Curve = ANY_SIZE  # of network_gb_s, by the bytes that each GPU sends to another node


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of the program, summed over all its launches in a step."""

    kind: str  # all-gather | reduce-scatter | all-reduce | all-to-all | collective-permute | ...
    dtype: str  # on the wire; the dtypes of arrays combined into one launch are joined by "+"
    axis: str  # mesh axes it runs over, joined by "+"
    group: int  # devices in one group
    count: int  # launches a step
    wire_gib: float  # sent by each GPU in a step over all launches
    network_gib: float  # each GPU's share of the bytes that leave its node; 0 if groups are within a node
    ms: float  # time on the link, over all launches
    exposed_ms: float  # wait of the compute stream for these launches, also while the link is busy with others
    source: str  # file:line of its Python code
    op_name: str  # its path of named scopes
    instruction: str  # its name in the HLO

    @property
    def axes(self) -> frozenset[str]:
        """Return the names of the mesh axes: {"fsdp"} also for a part of an axis, "fsdp(2 of 4)"."""
        return frozenset(self.axis.partition("(")[0].split("+"))


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in memory at the peak."""

    gib: float
    kind: str  # its class of memory
    shape: str  # bf16[32,1,8192,4096]
    source: str  # file:line
    op_name: str
    instruction: str


@dataclasses.dataclass(frozen=True)
class MemoryClass:
    """Memory of one class, such as gradients, over the schedule."""

    name: str
    gib: tuple[float, ...]  # at each point of Memory.timeline


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one device in a step, in GiB."""

    hbm_gib: float  # memory of the GPU
    reserve_gib: float  # for memory that the compiler does not count: NCCL, CUDA context, fragmentation
    usable_gib: float  # memory that training gives to JAX
    peak_gib: float  # by the compiler's buffer assignment, with cuDNN's workspace
    arguments_gib: float  # state and batch
    temp_gib: float
    host_gib: float  # pinned host memory of one device: offloaded activations, offloaded moments
    by_class: dict[str, float]  # at the peak; sums to peak_gib
    saved: dict[str, float]  # activations saved for the backward pass, by name
    peak_at: str  # op_name of the instruction during which the peak is reached
    timeline: tuple[tuple[float, str], ...]  # (GiB, phase) over the schedule, thinned to a few hundred points
    largest: tuple[Buffer, ...]  # at the peak, largest first
    workspace_gib: float  # the largest workspace of a cuDNN attention call; included in the figures above
    workspace_by: str  # its source: "formula", or "cudnn 9.23.2" if cuDNN computed it
    over_time: tuple[MemoryClass, ...] = ()  # at each point of the timeline, the classes sum to the point's GiB
    # by_class["temporaries"] by the pass and part whose operation wrote the arrays, such as "backward mlp"; sums to it
    temporaries: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def taken_gib(self) -> float:
        """Return the allocated memory: arguments and temporaries, which are the peak plus fragmentation."""
        return self.arguments_gib + self.temp_gib


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """FLOPs per token by formula, and per step in the compiled program."""

    per_token_causal: float
    per_token_full: float
    hardware_per_step: float  # FLOPs that a device executes in a step: GEMMs and attention in the program
    expected_per_step: float  # hardware_per_step by formula, with the remat policy's recomputation
    attention_per_step: float = 0.0  # part of hardware_per_step in fused attention kernels
    attention_by_rank: tuple[float, ...] = ()  # FLOPs inside the causal mask, by index along mesh.seq; () if mesh.seq is 1


@dataclasses.dataclass(frozen=True)
class Time:
    """The time of a step on one device: its roofline, and its expected range by comparable published runs."""

    gemm_ms: float
    attention_ms: float
    memory_ms: float  # memory-bound kernels
    compute_ms: float  # matmuls, attention and memory-bound kernels
    communication_ms: float  # time on the links, overlapped or exposed
    exposed_ms: float  # exposed communication
    host_exposed_ms: float  # exposed copies to and from host memory
    step_ms: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu_causal: float
    mfu_full: float
    hfu: float
    bound_by: str
    mfu_fp8_peak: float | None = None  # under fp8: mfu_causal over the FP8 peak; other MFUs are over the bf16 peak
    expected_step_ms: tuple[float, float] | None = None  # shortest and longest; None: no comparable published run
    expected_tokens_per_s_per_device: tuple[float, float] | None = None  # lowest and highest


SHOWN = 6  # names in one line of the report


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """The number of matmuls per layer and microbatch under precision=fp8.

    A dense layer has seven weights, and so 21 matmuls, forward and backward. Routers and recomputation add more.
    """

    products: float  # all matmuls
    eight: float  # matmuls in 8-bit floating point
    wide: tuple[str, ...]  # matmuls in 16 bits, most frequent first: operation, source line, count per step

    @property
    def some_wide(self) -> str:
        """Return the SHOWN most frequent matmuls in 16 bits, as text."""
        more = [f"and {len(self.wide) - SHOWN} more"] if len(self.wide) > SHOWN else []
        return "; ".join([*self.wide[:SHOWN], *more])


@dataclasses.dataclass(frozen=True)
class PipelineFigures:
    """The pipeline over mesh.stage. Bytes and times are those of each GPU in a step."""

    schedule: str
    stages: int
    groups: int  # virtual stages of each stage
    microbatches: int
    layers: tuple[str, ...]  # layers on each stage: "0-9", or "0-4 10-14"
    bubble: float  # fraction of the step, by formula
    idle: float  # fraction of passes through a stage without a microbatch, in the compiled program
    in_flight: float  # most microbatches whose activations a stage saves at one time
    saved_gib: float  # activations of the microbatches in flight
    permute_gib: float  # sent to neighbouring stages
    reduce_gib: float  # sent to all stages: the last stage's output for the loss, gradients, sums
    network_gib: float  # part of both that leaves the node
    ms: float
    exposed_ms: float


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a model: their sharding, the rows that they compute, and their all-to-alls."""

    experts: int  # experts of a layer
    per_token: int
    devices: int  # devices over which a layer's experts are sharded
    rows: float  # rows of tokens in a device's grouped matmuls, for one layer and microbatch
    room: float  # rows of the dispatch buffers (capacity)
    capacity: float  # capacity factor; 0: no token is dropped
    layer_gib: float  # sent by each GPU in the all-to-alls of one layer and microbatch, forward and backward
    layer_exposed_ms: float
    exposed_ms: float  # exposed time of the all-to-alls in a step
    load: float = 1.0  # assumed load of the busiest expert over an even load
    rounds: int = 1  # rounds of each dispatch at this load


@dataclasses.dataclass(frozen=True)
class KernelSummary:
    """The kernels of one kind, scope and source line, summed over a step."""

    kind: str  # gemm | attention | memory | communication | host
    op_name: str  # the innermost named scope, with forward, backward or recompute in front
    source: str
    count: int
    ms: float
    tflop: float
    gb: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan of one config on one topology."""

    config: str
    overrides: tuple[str, ...]
    topology: str
    chip: str  # device kind
    mesh: dict[str, int]
    attention: str
    fits: bool
    memory: Memory
    flops: StepFlops
    collectives: tuple[Collective, ...]
    time: Time
    kernels: tuple[KernelSummary, ...]
    rates: Rates
    tokens_per_step: int
    compile_s: float
    trip_counts: dict[str, int]  # the program's loops: op_name -> iterations
    warnings: tuple[str, ...]
    versions: dict[str, str]
    options: dict[str, str | bool]  # compiler options that training would use
    kept: str = ""  # saved activations that remat.policy=auto chose
    matmuls: Matmuls | None = None  # under precision=fp8
    pipeline: PipelineFigures | None = None  # with mesh.stage
    experts: Experts | None = None  # with model.num_experts
    kind: str = ""  # kind of comparable published runs (rates.run_kind)
    # Loops of unknown trip count and branches, for which the host waits for the GPU: op_name -> waits per step.
    host_waits: dict[str, int] = dataclasses.field(default_factory=dict)
    format: int = FORMAT


def to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data for `--json`."""
    tree = dataclasses.asdict(plan)
    tree["memory"]["taken_gib"] = plan.memory.taken_gib
    return tree


def from_json(tree: dict[str, Any]) -> Plan:
    """Return the plan whose `to_json` is `tree`, without the `run` that --tokens adds. Raises ValueError for another format."""
    if tree.get("format") != FORMAT:
        raise ValueError(f"a plan of format {tree.get('format')!r}; this jaxtrain reads {FORMAT}")
    memory = {name: value for name, value in tree["memory"].items() if name != "taken_gib"}
    return decode_json(Plan, {name: value for name, value in tree.items() if name != "run"} | {"memory": memory})


_hints = functools.cache(typing.get_type_hints)


def decode_json(kind: Any, data: Any) -> Any:
    """Return data from JSON converted to the type `kind`: dicts to its dataclasses, lists to its tuples."""
    if isinstance(kind, typing.TypeAliasType):
        return decode_json(kind.__value__, data)
    if dataclasses.is_dataclass(kind):
        return kind(**{name: decode_json(_hints(kind).get(name), value) for name, value in data.items()})  # pyright: ignore[reportCallIssue]
    args = typing.get_args(kind)
    if types.NoneType in args and data is not None:
        return decode_json(args[0], data)
    if typing.get_origin(kind) is tuple and data is not None:
        each = itertools.repeat(args[0]) if args[-1] is Ellipsis else args
        return tuple(decode_json(arg, value) for arg, value in zip(each, data, strict=False))
    return data
