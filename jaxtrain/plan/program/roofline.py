"""Estimate the time of a step: a roofline over the scheduled program.

The time of an instruction is the longer of the times of its arithmetic and of its memory traffic (`op_cost.py`). Streams
run in the order of the compiler's schedule. There are four: for kernels, collectives, asynchronous copies inside the device,
and copies to and from the host. Each stream runs one operation at a time. An asynchronous operation begins when its stream is
free, and its `-done` instruction waits for its end.

The model simplifies. Collectives and matmuls do not slow each other down. All matmuls of a dtype run at one rate, for any
shape. A packed sequence counts as one document. A conditional takes the time of its slowest branch. If the kind of a layer's
attention selects the branch, the conditional takes the mean time, weighted by the fraction of layers of each kind.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping

from jaxtrain.config.context import pairs_per_rank
from jaxtrain.config.layout import Layout
from jaxtrain.config.schema import Data, Model, Remat
from jaxtrain.models import flops, windows
from jaxtrain.models.activations import saved_activations
from jaxtrain.models.attention import KIND_SWITCH
from jaxtrain.plan import result
from jaxtrain.plan.program.collectives import CollectiveOp
from jaxtrain.plan.program.hlo import Computation, HloError, Instruction, Module, trip_count
from jaxtrain.plan.program.op_cost import ATTENTION_BACKWARD, OpCost, attention_pairs, instruction_cost
from jaxtrain.step.attention_specs import attention_specs
from jaxtrain.step.model_flops import model_flops
from jaxtrain.step.program import Program
from jaxtrain.step.stages import schedule_of

GIB = 2**30
LINKS = ("communication", "host")  # kinds of work that have a stream each
COMPUTE, COPY = "compute", "copy"  # the other streams: of kernels, and of asynchronous copies inside the device
KIND_OF_WORK = {  # kind of work -> its name in a report
    "gemm": "matmul",
    "attention": "attention",
    "memory": "memory-bound",
    "": "memory-bound",
    "communication": "communication",
    "host": "host copies",
}
EXPOSED = "exposed "  # prefix of a link: time in which the compute stream waits for it

# Called for each run of an instruction with (its name, kind of work or EXPOSED + link, start, end), in seconds.
type Listener = Callable[[str, str, float, float], None]


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The time of a step on one device: step_ms = gemm_ms + attention_ms + memory_ms + exposed_ms + host_exposed_ms."""

    gemm_ms: float
    attention_ms: float
    memory_ms: float  # memory-bound kernels, and waits for asynchronous copies inside the device
    communication_ms: float  # on the links, overlapped or exposed
    exposed_ms: float
    host_exposed_ms: float  # exposed copies to and from the host
    step_ms: float
    flops: float  # executed in a step: GEMMs, and attention inside the mask
    gemm_flops: float
    gemm_least_ms: float  # time of the matmuls if only their FLOPs count
    collectives: tuple[result.Collective, ...]  # in the order of the schedule
    kernels: tuple[result.KernelSummary, ...]  # longest first
    bound_by: str


def predict(
    module: Module,
    rates: result.Rates,
    collective_ops: Mapping[str, CollectiveOp],
    record: Listener | None = None,
    filled: float = 1.0,
) -> Roofline:
    """Return the estimated time of a scheduled, partitioned module.

    Args:
      collective_ops: instruction -> the collective that it launches (`read_collectives`).
      record: called with the start and end of each run of an instruction.
      filled: fraction of the rows of the expert buffers that have tokens.

    Raises HloError for an unscheduled module, an unknown instruction, a collective that is not in `collective_ops`, or an
    asynchronous start without `-done` in its computation.
    """
    if not module.is_scheduled:
        raise HloError(f"module {module.name}: it is not scheduled, so its overlap is not known. Read compiled.as_text().")
    return _Schedule(module, rates, collective_ops, record, filled).run()


# ---- The schedule


type Clock = dict[str, float]  # stream -> time in seconds from which it is free


class _Schedule:
    """Simulates the streams of a module, and sums their times."""

    def __init__(
        self,
        module: Module,
        rates: result.Rates,
        collective_ops: Mapping[str, CollectiveOp],
        record: Listener | None,
        filled: float,
    ):
        self.module, self.rates, self.collective_ops, self.record, self.filled = module, rates, collective_ops, record, filled
        self.seconds: dict[str, float] = defaultdict(float)  # by kind of work; copies: only the waits for them
        self.flops: dict[str, float] = defaultdict(float)
        self.gemm_least_s = 0.0
        # By instruction, for collectives and host copies: time on the link, and exposed time, which includes the wait for a
        # busy link.
        self.link_ms: dict[str, float] = defaultdict(float)
        self.exposed_ms: dict[str, float] = defaultdict(float)
        self.kernels: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
        self.costs: dict[str, OpCost | None] = {}

    def run(self) -> Roofline:
        clock: Clock = dict.fromkeys((COMPUTE, *LINKS, COPY), 0.0)
        self.walk(self.module.entry, clock, 1)
        ms = {k: v * 1e3 for k, v in self.seconds.items()}
        gemm, attention, memory = ms.get("gemm", 0.0), ms.get("attention", 0.0), ms.get("memory", 0.0)
        # A collective in a branch that is not the slowest has 0 ms.
        collectives = tuple(
            self.over_step(op, self.link_ms[name], self.exposed_ms[name]) for name, op in self.collective_ops.items()
        )
        exposed = sum(c.exposed_ms for c in collectives)
        host_exposed = sum(self.exposed_ms[name] for name in self.link_ms if name not in self.collective_ops)
        step = clock[COMPUTE] * 1e3
        shares = {
            "matmuls": gemm,
            "attention": attention,
            "memory-bound kernels": memory,
            "exposed communication": exposed,
            "exposed host copies": host_exposed,
        }
        most = max(shares, key=lambda k: shares[k])
        kernels = [
            result.KernelSummary(kind, name, source, round(n), s * 1e3, num_flops / 1e12, num_bytes / 1e9)
            for (kind, name, source), (n, s, num_flops, num_bytes) in self.kernels.items()
        ]
        return Roofline(
            gemm_ms=gemm,
            attention_ms=attention,
            memory_ms=memory,
            communication_ms=sum(c.ms for c in collectives),
            exposed_ms=exposed,
            host_exposed_ms=host_exposed,
            step_ms=step,
            flops=sum(self.flops.values()),
            gemm_flops=self.flops["gemm"],
            gemm_least_ms=self.gemm_least_s * 1e3,
            collectives=collectives,
            kernels=tuple(sorted(kernels, key=lambda k: -k.ms)),
            bound_by=f"{most} {shares[most] / step:.0%} of the step" if step else "nothing: the program is empty",
        )

    @staticmethod
    def over_step(op: CollectiveOp, ms: float, exposed_ms: float) -> result.Collective:
        """Return a collective summed over a step. ms, exposed_ms: times of all its launches."""
        names = ("kind", "dtype", "axis", "group", "count", "source", "op_name", "instruction")
        wire, network = (op.count * each / GIB for each in (op.wire_bytes, op.network_bytes))
        fields = {name: getattr(op, name) for name in names}
        return result.Collective(**fields, wire_gib=wire, network_gib=network, ms=ms, exposed_ms=exposed_ms)

    def walk(self, computation: Computation, clock: Clock, times: float) -> None:
        """Simulate one run of a computation.

        times: runs per step. In a branch for one kind of layer, they are multiplied by the fraction of layers of that kind.
        """
        pending: dict[str, tuple[str, str, float]] = {}  # start -> (stream, name that its wait is counted under, end)
        for i in computation.instructions:
            if i.opcode == "while":
                self.loop(i, clock, times)
            elif i.opcode == "conditional":
                self.branches(i, clock, times)
            elif i.opcode == "call":
                self.walk(self.module.computations[i.called[0]], clock, times)
            elif i.opcode.endswith(("-done", "-update")) and i.opcode != "dynamic-update-slice":
                start = i.operands[0]
                if start not in pending:
                    raise HloError(f"{i.name}: {start}, which it ends, was not started in the computation {computation.name}")
                if i.opcode.endswith("-update"):
                    pending[i.name] = pending.pop(start)
                else:
                    stream, name, end = pending.pop(start)
                    self.wait(stream, name, end, clock, times)
            else:
                self.execute(computation, i, clock, times, pending)
        if pending:
            raise HloError(f"{next(iter(pending))}: started in the computation {computation.name} and not ended there")

    def execute(self, computation: Computation, i: Instruction, clock: Clock, times: float, pending: dict) -> None:
        """Simulate one instruction: run its kernel on the compute stream, or start it on another stream."""
        asynchronous = i.opcode.endswith("-start")
        if i.name not in self.costs:
            self.costs[i.name] = instruction_cost(self.module, computation, i, self.collective_ops, self.filled)
        cost = self.costs[i.name]
        seconds = cost.seconds(self.rates) if cost else 0.0
        if cost:
            self.count(i, cost, seconds, times)
        if cost and cost.kind in LINKS:
            stream = cost.kind
            self.link_ms[i.name] += seconds * times * 1e3
        elif cost and cost.kind == "memory" and asynchronous:
            stream = COPY
        else:  # asynchronous arithmetic uses the same units as other arithmetic, so it runs in order
            clock[COMPUTE] += seconds
            self.report(i.name, cost.kind if cost else "", clock[COMPUTE] - seconds, clock[COMPUTE])
            self.seconds[cost.kind if cost else ""] += seconds * times
            if asynchronous:
                pending[i.name] = (COPY, i.name, clock[COMPUTE])
            return
        end = max(clock[COMPUTE], clock[stream]) + seconds
        clock[stream] = end
        self.report(i.name, stream, end - seconds, end)
        if asynchronous:
            pending[i.name] = (stream, i.name, end)
        if not asynchronous or '"is_sync":true' in i.attributes.get("backend_config", "").replace(" ", ""):
            self.wait(stream, i.name, end, clock, times)

    def wait(self, stream: str, name: str, end: float, clock: Clock, times: float) -> None:
        waited = max(end - clock[COMPUTE], 0.0)
        clock[COMPUTE] += waited
        self.report(name, "memory" if stream == COPY else EXPOSED + stream, clock[COMPUTE] - waited, clock[COMPUTE])
        if stream == COPY:
            self.seconds["memory"] += waited * times
        else:
            self.exposed_ms[name] += waited * times * 1e3

    def report(self, name: str, kind: str, start: float, end: float) -> None:
        if self.record and end > start:
            self.record(name, kind, start, end)

    def loop(self, i: Instruction, clock: Clock, times: float) -> None:
        """Simulate a loop's iterations one by one while a stream is busy with earlier work, or if events are recorded.

        Otherwise simulate one iteration for all remaining iterations, since these take the same time.
        """
        body = self.module.computations[i.attributes["body"].removeprefix("%")]
        remaining = trip_count(self.module, i)
        while remaining:
            before = clock[COMPUTE]
            repeats = remaining if not self.record and before >= max(clock.values()) else 1
            self.walk(body, clock, times * repeats)
            clock[COMPUTE] = before + (clock[COMPUTE] - before) * repeats
            remaining -= repeats

    def branches(self, i: Instruction, clock: Clock, times: float) -> None:
        """Simulate the slowest branch.

        If the kind of a layer selects the branch, weight each branch by the fraction of layers of its kind, unless events are
        recorded.
        """
        shares = self.module.kind_shares
        if KIND_SWITCH in i.op_name and len(shares) == len(i.called) and not self.record:
            ends_of_streams = dict.fromkeys(clock, 0.0)
            for name, share in zip(i.called, shares, strict=True):
                trial = dict(clock)
                self.walk(self.module.computations[name], trial, times * share)
                for stream, end in trial.items():
                    ends_of_streams[stream] += share * end
            clock.update(ends_of_streams)
            return
        ends = []
        for name in i.called:
            trial, branch = dict(clock), _Schedule(self.module, self.rates, self.collective_ops, None, self.filled)
            branch.walk(self.module.computations[name], trial, 1)
            ends.append((trial[COMPUTE], name))
        self.walk(self.module.computations[max(ends)[1]], clock, times)

    def count(self, i: Instruction, cost: OpCost, seconds: float, times: float) -> None:
        op_name, source = i.op_name, i.source
        if "/" not in op_name and i.called:  # the compiler made it: name it after its matmul, or else its last operation
            inside = [inner for c in i.called for inner in self.module.computations[c].instructions if "/" in inner.op_name]
            inside.sort(key=lambda inner: inner.opcode in ("dot", "custom-call"))
            op_name, source = (inside[-1].op_name, inside[-1].source) if inside else ("", source)
        name = op_label(op_name) or re.sub(r"[.\d]+$", "", i.name)
        kernel = self.kernels[cost.kind, name, source]
        for n, value in enumerate((1, seconds, cost.flops, cost.bytes + cost.host_bytes)):
            kernel[n] += value * times
        self.flops[cost.kind] += cost.flops * times
        if cost.kind == "gemm":
            rate = cost.share * (self.rates.fp8_tflops if cost.fp8 else self.rates.gemm_tflops)
            self.gemm_least_s += cost.flops * times / (rate * 1e12)


# Parts of a path of scopes that JAX adds.
ADDED_SCOPES = re.compile(
    r"(jit\(.*\)||while|body|cond|branch_\d+_fun|eval_jaxpr|closed_call|checkpoint|rematted_computation|shard_map|"
    rf"pallas_call|mpmd_map|{KIND_SWITCH})"
)
_WRAPPED = re.compile(r"(?:transpose|jvp|vmap)\((.*)\)")
STACK = "layers"  # the scope around all layers
ONCE = ("optimizer", "gather", "reduce", "accumulate")  # parts outside of forward and backward


def op_label(op_name: str) -> str:
    """Return a readable name of an instruction: its pass, its named scopes, and its operation unless that is dot_general.

    "jit(train_step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/BTD,DF->BTF/dot_general" is
    "recompute mlp/BTD,DF->BTF".
    """
    op_name = first_op_name(op_name)
    if not op_name:
        return ""
    if "rematted_computation" in op_name:
        phase = "recompute "
    elif "jvp(loss)" in op_name or "/loss/" in op_name:
        phase = "loss "
    elif "transpose(" in op_name:
        phase = "backward "
    elif "jvp(" in op_name:
        phase = "forward "
    elif "/optimizer" in op_name:
        phase = "optimizer "
    else:
        phase = ""
    scopes = [scope for scope in scope_path(op_name) if scope != phase.strip()]
    if len(scopes) > 1 and scopes[-1] == "dot_general":
        scopes.pop()
    while len(scopes) > 1 and scopes[0] == STACK:
        scopes.pop(0)
    return phase + "/".join(scopes) if scopes else phase.strip()


def scope_path(op_name: str) -> list[str]:
    """Return the named scopes, outermost first, and the operation. If XLA combined several op_names, the first one counts."""
    return [
        scope for wrapped in first_op_name(op_name).split("/") if not ADDED_SCOPES.fullmatch(scope := _unwrap_scope(wrapped))
    ]


def scope_of(op_name: str) -> str:
    """Return the part of an operation from its scopes, such as `mlp`, or `layers` for the loop over layers; else ""."""
    last = op_name.rsplit("/", 1)[-1]
    scopes = [scope for scope in scope_path(op_name) if "->" not in scope]  # the equation of an einsum is a scope too
    if scopes and scopes[-1] in (last, last.rstrip(")")) or "/(" in op_name:
        scopes = scopes[:-1]  # the last name is the operation's
    inner = [scope for scope in scopes if scope != STACK]
    return (inner or scopes or [""])[0]


def phase_of(op_name: str) -> str:
    """Return "forward", "backward" or "recompute"; "" for the parts of ONCE, such as `optimizer`."""
    if scope_of(op_name) in ONCE:
        return ""
    op_name = first_op_name(op_name)
    if "rematted_computation" in op_name:
        return "recompute"
    return "backward" if "transpose(" in op_name else "forward"


def _unwrap_scope(scope: str) -> str:
    """Return the scope in `transpose(jvp(mlp))`: mlp."""
    while match := _WRAPPED.fullmatch(scope):
        scope = match[1]
    return scope


def first_op_name(op_name: str) -> str:
    """Return the first of several op_names that XLA combined as "prefix/(one:two)"."""
    prefix, combined, op_names = op_name.rpartition("/(")
    if not combined:
        return op_name
    return f"{prefix}/{op_names.split(':')[0] if ':' in op_names else op_names.removesuffix(')')}"


# ---- By formula


# Kernel -> (FLOPs of attention's backward pass over those of its forward pass, whether it skips masked scores). "chunked" and
# "reference" consist of XLA's own operations and compute all (T, S) scores. "chunked" recomputes them in its backward pass.
_ATTENTION = {
    "cudnn": (ATTENTION_BACKWARD, True),
    "pallas": (ATTENTION_BACKWARD, True),
    "chunked": (2.5, False),
    "reference": (2.0, False),
}


def expected_flops(program: Program, layout: Layout | None = None) -> float:
    """Return the FLOPs that each device executes in a step by formula: forward, backward and recomputed.

    FLOPs of a pipeline's bubble and padding layers count. layout: another one than the program's.

    Returns 0 for a model family whose FLOPs do not follow from the config, since those that remat recomputes are unknown.

    Raises ValueError for an unknown kernel.
    """
    run, layout, attention = program.run, layout or program.layout, program.kernel.name
    if attention not in _ATTENTION:
        raise ValueError(f"attention kernel {attention!r}: its FLOPs are not known. Known: {', '.join(_ATTENTION)}.")
    analytic = model_flops(run)
    if not analytic.by_formula or analytic.recomputed is None:
        return 0.0
    total = analytic.training + analytic.recomputed
    layer_attention = flops.attention(run.model, run.data.seq_len)
    # `flops.training` counts the backward pass as twice the forward pass. Attention is counted below.
    back = flops.differentiates_layers(run.model, run.lora, run.train)
    repeats = _attention_repeats(run.remat)
    linear = total.causal - layer_attention.causal * run.model.step_layers * (1 + back * (2 + repeats))
    backward, masked = _ATTENTION[attention]
    computed = 0.0
    for kind, layers in windows.layers_by_kind(run.model):
        uniform_model = windows.with_kind(run.model, kind)
        each = flops.attention(uniform_model, run.data.seq_len)
        passes = (layers + run.model.mtp_layers) * (1 + back * (backward + repeats))
        computed += (each.causal if masked else each.full) * passes * _ring_ratio(run.data, uniform_model, layout, masked)
    idle = schedule_of(layout).bubble
    padding_factor = layout.stages.slots / run.model.stack_length
    head = flops.head_training(run.model, run.lora, run.train)
    stack = (linear - head + computed) * padding_factor / (1 - idle)
    return (head + stack) * run.tokens_per_step / layout.devices


def attention_by_rank(program: Program) -> tuple[float, ...]:
    """Return attention's FLOPs inside the causal mask (forward, backward, recomputed) per step, by index along mesh.seq."""
    run, layout = program.run, program.layout
    backward, _ = _ATTENTION[program.kernel.name]
    out = [0.0] * layout.context.size
    for kind, layers in windows.layers_by_kind(run.model):
        uniform_model = windows.with_kind(run.model, kind)
        passes = (layers + run.model.mtp_layers) * (1 + backward + _attention_repeats(run.remat))
        mean = flops.attention(uniform_model, run.data.seq_len).causal * passes * run.tokens_per_step / layout.devices
        by_rank = pairs_per_rank(layout.context, run.data.seq_len, uniform_model.sliding_window)
        out = [sum_ + mean * n * len(by_rank) / sum(by_rank) for sum_, n in zip(out, by_rank, strict=True)]
    return tuple(out)


def _attention_repeats(remat: Remat) -> int:
    return int(remat.policy != "none" and not {"attention_out", "attention_lse"} <= saved_activations(remat))


def _ring_ratio(data: Data, model: Model, layout: Layout, masked: bool) -> float:
    """Return the ratio of attention's FLOPs in a ring to its FLOPs on one device.

    A ring skips masked blocks; a window adds halo tokens.
    """
    T, r = data.seq_len, layout.context.ring
    if r == 1:
        return 1.0
    spec = attention_specs(model, data, layout.dtypes.compute)[0]
    chunk = T // (2 * r)
    if not spec.slides(T):
        return 1.0 if masked else (2 * r + 1) / (4 * r)
    rows = chunk + spec.halo(chunk, r)
    block, full = (attention_pairs("CAUSAL", spec.window, n, n) if masked else float(n * n) for n in (rows, T))
    return 2 * r * block / full
