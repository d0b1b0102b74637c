"""How long a step takes: a roofline over the scheduled program.

Each instruction costs the larger of its arithmetic and its memory traffic, at the rates given. They are laid out in the order
of the compiler's schedule: kernels one after the other on a compute stream; collectives one at a time on a second one (XLA's
parallel_collective_overlap_limit is 1), asynchronous copies inside the device on a third and to the host on a fourth. An
asynchronous start begins when its stream is free, and its done waits for it. A collective is as long on the wire whether or
not a GEMM runs beside it, and a GEMM as fast: neither slows the other.

An instruction that is not known is an error. Nothing is counted as zero because it was not understood.
"""

import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from jaxtrain import flops
from jaxtrain.config import RunConfig
from jaxtrain.plan import result
from jaxtrain.plan.collectives import Found
from jaxtrain.plan.hlo import BITS, Computation, HloError, Instruction, Module, Shape, Type, leaves, trip_count

# Shortest time of a kernel: its launch and its tail. An assumption, as XLA's own cost model has it; it matters for the
# scalars of loops and of the optimizer only.
KERNEL_US = 1.0
# FLOPs of a flash attention backward pass over those of its forward: five products of (T, S) where that has two.
ATTENTION_BACKWARD = 2.5
LINKS = ("communication", "host")  # kinds of work that run on a stream of their own
HOST_SPACE = 5  # memory space of pinned host memory


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FREE = _words(
    "parameter constant bitcast get-tuple-element tuple after-all opt-barrier optimization-barrier add-dependency domain "
    "partition-id replica-id get-dimension-size"
)
COLLECTIVES = _words(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast"
)
ELEMENTWISE = _words(
    "abs add and atan2 cbrt ceil clamp compare complex convert cosine count-leading-zeros divide erf exponential "
    "exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power "
    "real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic "
    "shift-right-logical sign sine sqrt stochastic-convert subtract tan tanh xor bitcast-convert map copy bitcast reshape "
    "transpose reverse"
)
SLICES = _words("slice dynamic-slice gather broadcast pad")  # read of their first operand no more than they make
REDUCTIONS = _words("reduce reduce-window select-and-scatter concatenate sort")
UPDATES = ("dynamic-update-slice", "scatter")
OTHER = _words("iota rng rng-bit-generator rng-get-and-update-state").union(UPDATES)
MEMORY_BOUND = ELEMENTWISE | SLICES | REDUCTIONS | OTHER
FUSIONS = ("fusion", "fusion-start")

GEMM_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
ATTENTION_CALLS = {"__cudnn$fmhaSoftmax": 1.0, "__cudnn$fmhaSoftmaxBackward": ATTENTION_BACKWARD}
CAUSAL_MASKS = {"CAUSAL": True, "PADDING_CAUSAL": True, "NO_MASK": False, "PADDING": False}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one run of an instruction does."""

    kind: str = "memory"  # gemm | attention | memory | host | communication
    flops: float = 0.0
    bytes: float = 0.0  # of device memory; of the wire for communication
    host_bytes: float = 0.0
    network_bytes: float = 0.0
    backward: bool = False  # attention's backward pass, which has its own rate

    def seconds(self, rates: result.Rates) -> float:
        """At these rates."""
        if self.kind == "communication":
            nvlink = self.bytes / (rates.nvlink_gb_s * 1e9) + rates.nvlink_latency_us * 1e-6
            if not self.network_bytes:
                return nvlink
            return max(nvlink, self.network_bytes / (rates.network_gb_s * 1e9) + rates.network_latency_us * 1e-6)
        attention = rates.attention_backward_tflops if self.backward else rates.attention_forward_tflops
        arithmetic = self.flops / ((attention if self.kind == "attention" else rates.gemm_tflops) * 1e12)
        memory = max(self.bytes / (rates.memory_tb_s * 1e12), self.host_bytes / (rates.host_gb_s * 1e9))
        return max(arithmetic, memory, KERNEL_US * 1e-6)


@dataclasses.dataclass
class Launches:
    """One collective (or copy to the host) over a whole step."""

    count: int = 0
    ms: float = 0.0  # on its link
    exposed_ms: float = 0.0  # of that, what compute waits for, the wait for its turn on the link included


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A step on one device. step_ms = gemm_ms + attention_ms + memory_ms + exposed_ms + host_exposed_ms."""

    gemm_ms: float
    attention_ms: float
    memory_ms: float  # memory-bound kernels, and waiting for asynchronous copies inside the device
    communication_ms: float  # on the links, hidden or not
    exposed_ms: float  # collectives that compute waits for
    host_ms: float  # copies to and from the host, hidden or not
    host_exposed_ms: float
    step_ms: float
    flops: float  # executed in a step: GEMMs, and attention inside its mask
    gemm_flops: float
    collectives: dict[str, Launches]  # by instruction name (an asynchronous one's start)
    kernels: tuple[result.Kernel, ...]  # longest first
    bound_by: str


def predict(module: Module, rates: result.Rates, wires: Mapping[str, Found]) -> Roofline:
    """The step time of a scheduled, partitioned module.

    `wires`: what each collective moves in a launch, by the instruction that launches it (`collectives.by_instruction`).
    Raises HloError for an unscheduled module, an instruction that is not known, a collective that `wires` lacks, and an
    asynchronous pair that is not closed in the computation that started it.
    """
    if not module.is_scheduled:
        raise HloError(f"module {module.name}: it is not scheduled, so nothing says what overlaps. Read compiled.as_text().")
    return _Schedule(module, rates, wires).run()


# ---- What an instruction does


def work(module: Module, where: Computation, i: Instruction, wires: Mapping[str, Found]) -> Work | None:
    """What one run of an instruction does; None where it does nothing. Raises HloError for one that is not known."""
    opcode = i.opcode
    if is_collective(module, i):
        if i.name not in wires:
            raise HloError(f"{i.name}: nothing says how many bytes this {opcode} sends")
        return Work("communication", bytes=wires[i.name].wire_bytes, network_bytes=wires[i.name].network_bytes)
    if opcode in FREE:
        return None
    if opcode in FUSIONS:
        called = module.computations[i.called[0]]
        made = _gemms(module, called, i)
        return _traffic(called, [where.by_name[o].type for o in i.operands], "gemm" if made else "memory", made)
    if opcode == "dot" or _target(i) in GEMM_CALLS:
        return _traffic(*_alone(where, i), "gemm", gemm_flops(where, i))
    if _target(i) in ATTENTION_CALLS:
        return _attention(where, i)
    if opcode == "copy-start":
        to, source = leaves(i.type)[0], leaves(where.by_name[i.operands[0]].type)[0]
        return _placed("memory", 0.0, [(to.bytes, to), (source.bytes, source)])
    if opcode in MEMORY_BOUND:
        return _traffic(*_alone(where, i), "memory", 0.0)
    what = f"the custom call {_target(i)!r}" if opcode == "custom-call" else f"a {opcode}"
    raise HloError(f"{i.name}: how long {what} takes is not known ({i.op_name or 'no op_name'}, {i.source or 'no source'})")


def is_collective(module: Module, i: Instruction) -> bool:
    """Whether an instruction launches a collective: its own, or one inside an asynchronous call or a fusion."""
    if i.opcode.removesuffix("-start") in COLLECTIVES:
        return True
    inside = (module.computations[c] for c in i.called) if i.opcode in ("async-start", *FUSIONS) else ()
    return any(is_collective(module, inner) for called in inside for inner in called.instructions)


def gemm_flops(where: Computation, i: Instruction) -> float:
    """Of a dot or a cuBLAS call: 2 x elements of the output x the contracted dimensions."""
    left, made = leaves(where.by_name[i.operands[0]].type)[0], leaves(i.type)[0]
    if i.opcode == "dot":
        contracted = re.findall(r"\d+", i.attributes.get("lhs_contracting_dims", ""))
    else:
        contracted = _config(i, "gemm_backend_config")["dot_dimension_numbers"].get("lhs_contracting_dimensions", ())
    return 2.0 * made.elements * math.prod(left.dims[int(d)] for d in contracted)


def attention_pairs(mask: str, window: int, queries: int, keys: int) -> float:
    """Query-key pairs inside a mask, by the convention of `flops.attention`. A packed row counts as a single document, which
    is an upper bound: what borders inside it would mask is data."""
    if not CAUSAL_MASKS[mask]:
        return queries * keys
    seen = min(window or keys, keys)
    return queries * (seen - seen**2 / (2 * keys))


def _gemms(module: Module, computation: Computation, i: Instruction) -> float:
    """FLOPs of the GEMMs in a fusion, those of computations nested in it included."""
    total = 0.0
    for inner in computation.instructions:
        if inner.opcode == "dot" or _target(inner) in GEMM_CALLS:
            total += gemm_flops(computation, inner)
        elif inner.opcode in ("fusion", "call"):
            total += sum(_gemms(module, module.computations[c], i) for c in inner.called)
        elif inner.opcode not in FREE | MEMORY_BOUND:
            raise HloError(f"{i.name}: how long it takes is not known, because of the {inner.opcode} {inner.name} inside it")
    return total


def _attention(where: Computation, i: Instruction) -> Work:
    config = _config(i, "cudnn_fmha_backend_config")
    mask, window = config["mask_type"], int(config.get("sliding_window_length", 0))
    if mask not in CAUSAL_MASKS:
        raise HloError(f"{i.name}: attention under mask {mask!r} is not known. Known: {', '.join(CAUSAL_MASKS)}")
    inputs = [leaf for o in i.operands for leaf in leaves(where.by_name[o].type)]
    q, k, v = (leaf.dims for leaf in inputs[:3])  # (B, T, N, H), (B, S, K, H), (B, S, K, H)
    pairs = q[0] * q[2] * attention_pairs(mask, window, q[1], k[1])
    made = 2.0 * pairs * (q[3] + v[3]) * ATTENTION_CALLS[_target(i)]
    # The log-sum-exp (f32) of a packed row has room for every possible document, and one value a token is used of it.
    moved = sum(leaf.bytes for leaf in (*inputs, *leaves(i.type)) if leaf.dtype not in ("f32", "u8"))
    return Work("attention", made, moved + 4.0 * q[0] * q[1] * q[2], backward=_target(i).endswith("Backward"))


def _target(i: Instruction) -> str:
    return i.attributes.get("custom_call_target", "").strip('"')


def _config(i: Instruction, key: str) -> dict:
    try:
        return json.loads(i.attributes["backend_config"])[key]
    except (KeyError, ValueError) as error:
        raise HloError(f"{i.name}: its backend_config has no {key}: {error}") from None


# ---- Bytes


def _traffic(inside: Computation, arguments: list[Type], kind: str, made: float) -> Work:
    """Work with the bytes that a kernel reads and writes: what it wants of its arguments, and its output."""
    demand = _demand(inside)
    moved: list[tuple[float, Shape]] = []
    for parameter, argument in zip(inside.parameters, arguments, strict=True):
        moved += [(_bytes(leaf, demand[parameter.name]), leaf) for leaf in leaves(argument)]
    for output in inside.root.operands if inside.root.opcode == "tuple" else (inside.root.name,):
        i = inside.by_name[output]
        outputs = leaves(i.type)[:1] if i.opcode == "custom-call" else leaves(i.type)  # without its workspace
        update = _in_place(inside, i)
        moved += [(float(leaf.bytes) if update is None else _bytes(leaf, update), leaf) for leaf in outputs]
    return _placed(kind, made, moved)


def _alone(where: Computation, i: Instruction) -> tuple[Computation, list[Type]]:
    """An instruction outside of a fusion as if it were one, and the types of its arguments."""
    names = list(dict.fromkeys(i.operands))
    parameters = [
        dataclasses.replace(where.by_name[o], opcode="parameter", operands=(), parameter_number=n, is_root=False)
        for n, o in enumerate(names)
    ]
    inside = Computation(i.name, (*parameters, dataclasses.replace(i, is_root=True)))
    return inside, [p.type for p in parameters]


def _placed(kind: str, made: float, moved: list[tuple[float, Shape]]) -> Work:
    """Bytes by the memory that they are in. A kernel that touches host memory is a host copy."""
    host = sum(b for b, s in moved if s.memory_space == HOST_SPACE)
    device = sum(b for b, s in moved if s.memory_space != HOST_SPACE)
    return Work("host" if host else kind, made, device, host)


def _elements(i: Instruction) -> int:
    return max((s.elements for s in leaves(i.type)), default=0)


def _bytes(array: Shape, elements: float) -> float:
    return min(elements, array.elements) * BITS[array.dtype] / 8


def _demand(inside: Computation) -> dict[str, float]:
    """Of every instruction of a fusion, how many of its elements are wanted: from the root backwards.

    A fusion computes lazily, so what only a slice is taken of is read as the slice. Two users that want parts are taken to
    want different parts.
    """
    wanted: dict[str, float] = defaultdict(float)
    wanted[inside.root.name] = _elements(inside.root)
    for i in reversed(inside.instructions):  # users stand behind their operands
        here = min(wanted[i.name], _elements(i))
        if i.opcode == "tuple":
            for o in i.operands:
                wanted[o] = _elements(inside.by_name[o])
        elif here:
            for operand, elements in _wanted_of(inside, i, here):
                wanted[operand.name] += elements
    return {i.name: min(wanted[i.name], _elements(i)) for i in inside.instructions}


def _wanted_of(inside: Computation, i: Instruction, here: float) -> Iterator[tuple[Instruction, float]]:
    """(operand, elements of it that are wanted) where `here` elements of an instruction are."""
    operands = [inside.by_name[o] for o in i.operands]
    part = here / max(_elements(i), 1)
    if i.opcode in UPDATES:
        # In place, the rest of the array stays where it is. A scatter combines with what is there, so it reads that.
        update = _elements(inside.by_name[_update(i)])
        touched = update if i.opcode == "scatter" else 0
        yield operands[0], touched if _in_place(inside, i) is not None else max(here - update, touched)
        yield from ((o, part * _elements(o)) for o in operands[1:])
    elif i.opcode in SLICES:
        yield operands[0], min(here, _elements(operands[0]))
        yield from ((o, part * _elements(o)) for o in operands[1:])
    else:
        yield from ((o, part * _elements(o)) for o in operands)


def _update(i: Instruction) -> str:
    """The operand that a dynamic-update-slice or a scatter (array, indices, updates) puts into the array."""
    return i.operands[1] if i.opcode == "dynamic-update-slice" else i.operands[-1]


def _in_place(inside: Computation, i: Instruction) -> int | None:
    """Elements that an update of an array that is already there writes; None where the whole output is written anew."""
    i = _through_bitcasts(inside, i)
    if i.opcode not in UPDATES or _through_bitcasts(inside, inside.by_name[i.operands[0]]).opcode != "parameter":
        return None
    return _elements(inside.by_name[_update(i)])


def _through_bitcasts(inside: Computation, i: Instruction) -> Instruction:
    while i.opcode == "bitcast":
        i = inside.by_name[i.operands[0]]
    return i


# ---- The schedule


@dataclasses.dataclass
class _Clock:
    """Streams, in seconds: when each is free. `now` is the compute stream."""

    now: float = 0.0
    free: dict[str, float] = dataclasses.field(default_factory=lambda: {"communication": 0.0, "copy": 0.0, "host": 0.0})

    def copy(self) -> "_Clock":
        return _Clock(self.now, dict(self.free))


class _Schedule:
    """Walks a module and holds the sums."""

    def __init__(self, module: Module, rates: result.Rates, wires: Mapping[str, Found]):
        self.module, self.rates, self.wires = module, rates, wires
        self.seconds: dict[str, float] = defaultdict(float)  # by kind, of what ran on the compute stream or waited
        self.flops: dict[str, float] = defaultdict(float)
        self.links: dict[str, tuple[str, Launches]] = {}
        self.kernels: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
        self.known: dict[str, Work | None] = {}

    def run(self) -> Roofline:
        clock = _Clock()
        self.walk(self.module.entry, clock, 1)
        ms = {k: v * 1e3 for k, v in self.seconds.items()}
        gemm, attention, memory = ms.get("gemm", 0.0), ms.get("attention", 0.0), ms.get("memory", 0.0)
        collectives = {name: launches for name, (kind, launches) in self.links.items() if kind == "communication"}
        host = [launches for kind, launches in self.links.values() if kind == "host"]
        exposed = sum(c.exposed_ms for c in collectives.values())
        host_exposed = sum(c.exposed_ms for c in host)
        step = clock.now * 1e3
        shares = {
            "matrix products": gemm,
            "attention": attention,
            "memory-bound kernels": memory,
            "exposed communication": exposed,
            "exposed host copies": host_exposed,
        }
        most = max(shares, key=lambda k: shares[k])
        kernels = [
            result.Kernel(kind, name, source, int(n), s * 1e3, made / 1e12, moved / 1e9)
            for (kind, name, source), (n, s, made, moved) in self.kernels.items()
        ]
        return Roofline(
            gemm_ms=gemm,
            attention_ms=attention,
            memory_ms=memory,
            communication_ms=sum(c.ms for c in collectives.values()),
            exposed_ms=exposed,
            host_ms=sum(c.ms for c in host),
            host_exposed_ms=host_exposed,
            step_ms=step,
            flops=sum(self.flops.values()),
            gemm_flops=self.flops["gemm"],
            collectives=collectives,
            kernels=tuple(sorted(kernels, key=lambda k: -k.ms)),
            bound_by=f"{most} {shares[most] / step:.0%} of the step" if step else "nothing: the program is empty",
        )

    def walk(self, where: Computation, clock: _Clock, times: int) -> None:
        """One run of a computation, of which a step has `times`."""
        pending: dict[str, tuple[str, str, float]] = {}  # start -> stream, name it is counted under, when it is finished
        for i in where.instructions:
            if i.opcode == "while":
                self.loop(i, clock, times)
            elif i.opcode == "conditional":
                self.branches(i, clock, times)
            elif i.opcode == "call":
                self.walk(self.module.computations[i.called[0]], clock, times)
            elif i.opcode.endswith(("-done", "-update")) and i.opcode != "dynamic-update-slice":
                start = i.operands[0]
                if start not in pending:
                    raise HloError(f"{i.name}: {start}, which it ends, was not started in the computation {where.name}")
                if i.opcode.endswith("-update"):
                    pending[i.name] = pending.pop(start)
                else:
                    stream, name, end = pending.pop(start)
                    self.wait(stream, name, end, clock, times)
            else:
                self.execute(where, i, clock, times, pending)
        if pending:
            raise HloError(f"{next(iter(pending))}: started in the computation {where.name} and not ended there")

    def execute(self, where: Computation, i: Instruction, clock: _Clock, times: int, pending: dict) -> None:
        """A kernel on the compute stream, or the start of something on another one."""
        asynchronous = i.opcode.endswith("-start")
        if i.name not in self.known:
            self.known[i.name] = self.cost(where, i)
        done = self.known[i.name]
        seconds = done.seconds(self.rates) if done else 0.0
        if done:
            self.count(i, done, seconds, times)
        if done and done.kind in LINKS:
            stream = done.kind
            launches = self.links.setdefault(i.name, (stream, Launches()))[1]
            launches.count += times
            launches.ms += seconds * times * 1e3
        elif done and done.kind == "memory" and asynchronous:
            stream = "copy"
        else:  # arithmetic that XLA starts beside other arithmetic shares the same units: it takes its turn
            clock.now += seconds
            self.seconds[done.kind if done else ""] += seconds * times
            if asynchronous:
                pending[i.name] = ("copy", i.name, clock.now)
            return
        end = max(clock.now, clock.free[stream]) + seconds
        clock.free[stream] = end
        if asynchronous:
            pending[i.name] = (stream, i.name, end)
        if not asynchronous or '"is_sync":true' in i.attributes.get("backend_config", "").replace(" ", ""):
            self.wait(stream, i.name, end, clock, times)

    def cost(self, where: Computation, i: Instruction) -> Work | None:
        if i.opcode != "async-start" or is_collective(self.module, i):
            return work(self.module, where, i, self.wires)
        called = self.module.computations[i.called[0]]
        parts = [w for inner in called.instructions if (w := work(self.module, called, inner, self.wires))]
        if len(parts) > 1:
            raise HloError(f"{i.name}: an asynchronous call of {len(parts)} kernels; only one is understood")
        return parts[0] if parts else None

    def wait(self, stream: str, name: str, end: float, clock: _Clock, times: int) -> None:
        waited = max(end - clock.now, 0.0)
        clock.now += waited
        if stream == "copy":
            self.seconds["memory"] += waited * times
        else:
            self.links[name][1].exposed_ms += waited * times * 1e3

    def loop(self, i: Instruction, clock: _Clock, times: int) -> None:
        """Iterations one by one while something from outside is still in flight; all that follow are alike."""
        body = self.module.computations[i.attributes["body"].removeprefix("%")]
        left = trip_count(self.module, i)
        while left:
            alike = left if all(free <= clock.now for free in clock.free.values()) else 1
            before = clock.now
            self.walk(body, clock, times * alike)
            clock.now = before + (clock.now - before) * alike
            left -= alike

    def branches(self, i: Instruction, clock: _Clock, times: int) -> None:
        """The slowest branch."""
        ends = []
        for name in i.called:
            trial, other = clock.copy(), _Schedule(self.module, self.rates, self.wires)
            other.walk(self.module.computations[name], trial, 1)
            ends.append((trial.now, name))
        self.walk(self.module.computations[max(ends)[1]], clock, times)

    def count(self, i: Instruction, done: Work, seconds: float, times: int) -> None:
        op_name, source = i.op_name, i.source
        if "/" not in op_name and i.called:  # made by the compiler: named after the last of what it fuses
            inside = [inner for c in i.called for inner in self.module.computations[c].instructions if "/" in inner.op_name]
            op_name, source = (inside[-1].op_name, inside[-1].source) if inside else ("", source)
        name = label(op_name) or re.sub(r"[.\d]+$", "", i.name)
        kernel = self.kernels[done.kind, name, source]
        for n, value in enumerate((1, seconds, done.flops, done.bytes + done.host_bytes)):
            kernel[n] += value * times
        self.flops[done.kind] += done.flops * times


_LOST = re.compile(
    r"(jit\(.*\)|jvp\(\)|transpose\(jvp\(\)\)|while|body|cond|eval_jaxpr|checkpoint|rematted_computation|shard_map)"
)
_WRAPPED = re.compile(r"(?:transpose\()?jvp\(([^()]*)\)+")


def label(op_name: str) -> str:
    """What a person calls an instruction: the pass it belongs to, then the named scopes and what is done there.

    "jit(train_step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/BTD,DF->BTF/dot_general" is
    "recompute mlp/BTD,DF->BTF".
    """
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
    parts = [_WRAPPED.sub(r"\1", p) for p in _first(op_name).split("/") if not _LOST.fullmatch(p)]
    parts = [p for p in parts if p and p != phase.strip()]
    if len(parts) > 1 and parts[-1] == "dot_general":
        parts.pop()
    if len(parts) > 1 and parts[0] == "layers":
        parts.pop(0)
    return phase + "/".join(parts) if parts else phase.strip()


def _first(op_name: str) -> str:
    """Of several instructions that XLA combined, "prefix/(one:two)", the first."""
    prefix, combined, rest = op_name.rpartition("/(")
    if not combined:
        return op_name
    return f"{prefix}/{rest.split(':')[0] if ':' in rest else rest.removesuffix(')')}"


# ---- By formula


def expected_flops(run: RunConfig, devices: int) -> float:
    """FLOPs that each of `devices` executes in a step by formula: forward, backward, and what remat computes again.

    Raises ValueError for an attention kernel that computes more than its mask: this holds for cuDNN.
    """
    once = flops.per_token(run.model, run.data.seq_len) + flops.recompute(run.model, run.remat, run.data.seq_len)
    # The backward pass of a flash kernel computes the scores once more than the usual count of twice the forward pass has.
    inside = flops.attention(run.model, run.data.seq_len).causal * run.model.num_layers * (ATTENTION_BACKWARD - 2)
    return (once.causal + inside) * run.train.global_batch * run.data.seq_len / devices
