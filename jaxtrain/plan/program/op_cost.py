"""Cost of one run of an instruction: FLOPs, bytes of device and host memory, bytes on the wire.

A kernel reads the elements of its arguments that it needs, and writes its output. If a fusion slices a stacked weight, it reads
only the slice. If it updates an array in place, it writes only the update. An unknown instruction raises HloError.
"""

import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from jaxtrain.plan import result
from jaxtrain.plan.program.collectives import CollectiveOp, is_collective
from jaxtrain.plan.program.hlo import BITS, Computation, HloError, Instruction, Module, Shape, Type, leaves
from jaxtrain.plan.rates import ATTENTION_AT, PALLAS_ATTENTION, PALLAS_FRACTION, fp8_attention, length_factor, rate_fraction

# Shortest time of a kernel, launch and tail. The value is assumed, as in XLA's own cost model (kKernelLaunchOverhead). It
# matters only for scalar kernels of loops and of the optimizer.
KERNEL_US = 1.0
# FLOPs of flash attention's backward pass over those of its forward pass: five matmuls over (T, S) instead of two.
ATTENTION_BACKWARD = 2.5
HOST_SPACE = 5  # memory space of pinned host memory


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FREE = _words(
    "parameter constant bitcast get-tuple-element tuple after-all opt-barrier optimization-barrier add-dependency domain "
    "partition-id replica-id get-dimension-size"
)
ELEMENTWISE = _words(
    "abs add and atan2 cbrt ceil clamp compare complex convert cosine count-leading-zeros divide erf exponential "
    "exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power "
    "real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic "
    "shift-right-logical sign sine sqrt stochastic-convert subtract tan tanh xor bitcast-convert map copy bitcast reshape "
    "transpose reverse"
)
SLICES = _words("slice dynamic-slice gather broadcast pad")  # read at most the output's size of operand 0
REDUCTIONS = _words("reduce reduce-window select-and-scatter concatenate")
UPDATES = ("dynamic-update-slice", "scatter")
OTHER_OPS = _words("iota rng rng-bit-generator rng-get-and-update-state").union(UPDATES)
MEMORY_BOUND = ELEMENTWISE | SLICES | REDUCTIONS | OTHER_OPS
FUSIONS = ("fusion", "fusion-start")

FP8_CALL = "__cublas$lt$matmul$f8"
GEMM_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", FP8_CALL)
ATTENTION_CALLS = {"__cudnn$fmhaSoftmax": 1.0, "__cudnn$fmhaSoftmaxBackward": ATTENTION_BACKWARD}
# The names of jaxtrain's own kernels (kernels/attention/pallas.py) contain pass and mask. Their backward pass is two kernels,
# with seven matmuls in all, since both compute the scores. FLOPs, and so the rate, count only the usual five matmuls.
MOSAIC = "mosaic_gpu_v2"
PALLAS_CALL = re.compile(r"\bjaxtrain_attention_(forward|forward_fp8|backward_q|backward_kv)_(causal|all|window(\d+))\b")
PALLAS_CALLS = {
    "forward": 1.0,
    "forward_fp8": 1.0,
    "backward_q": ATTENTION_BACKWARD * 3 / 7,
    "backward_kv": ATTENTION_BACKWARD * 4 / 7,
}
PALLAS_FIRST = 3  # index of the queries among the operands, after the tiles to visit, segments and positions
# Grouped matmuls (kernels/experts/pallas.py); the last two operands are multiplied.
EXPERTS_CALL = re.compile(r"\bjaxtrain_experts_(?:times_[DF]|outer_R|times8_(?:fast|full))\b")
# Passes of a sort over its arrays. On a real GPU, XLA calls CUB's radix sort: it reads and writes the arrays for each 8 bits of
# a 32-bit key, and reads them once to count. For a described GPU, XLA generates a slower kernel, which training never runs.
SORT_PASSES = 2 * 4 + 1
ALLOCATION = "AllocateBuffer"  # custom call that allocates host memory for offloaded activations; nothing is written
CAUSAL_MASKS = {"CAUSAL": True, "PADDING_CAUSAL": True, "NO_MASK": False, "PADDING": False}


@dataclasses.dataclass(frozen=True)
class OpCost:
    """Cost of one run of an instruction."""

    kind: str = "memory"  # gemm | attention | memory | host | communication
    flops: float = 0.0
    bytes: float = 0.0  # of device memory; for communication, bytes on the wire inside the node
    host_bytes: float = 0.0
    network_bytes: float = 0.0
    message: float = 0.0  # bytes of a collective's message, which the rate depends on
    hops: int = 0  # of a collective, from node to node
    backward: bool = False  # attention's backward pass, which has its own rate
    keys: int = ATTENTION_AT  # keys of an attention call, which the rate depends on
    share: float = 1.0  # the kernel's rate over the rate of cuBLAS or cuDNN
    fp8: bool = False  # a GEMM in 8-bit floating point

    def seconds(self, rates: result.Rates) -> float:
        """Return the time in seconds at these rates. Raises HloError for an FP8 matmul if the rates have no FP8 rate."""
        if self.fp8 and not rates.fp8_tflops:
            raise HloError(f"a GEMM in 8-bit floating point, for which the rates ({rates.source}) have no figure")
        if self.kind == "communication":
            links = [(self.bytes, rates.nvlink_gb_s, rates.collective_curve, self.message)]
            links.append((self.network_bytes, rates.network_gb_s, rates.network_curve, self.network_bytes))
            longest = max(
                sent / (full * 1e9 * rate_fraction(curve, size)) if sent else 0.0 for sent, full, curve, size in links
            )
            return longest + self.hops * rates.network_latency_us * 1e-6
        rate = rates.fp8_tflops if self.fp8 else rates.gemm_tflops
        if self.kind == "attention":
            rate = rates.attention_backward_tflops if self.backward else rates.attention_forward_tflops
            rate *= length_factor(self.keys, self.backward)
        arithmetic = self.flops / (self.share * rate * 1e12)
        memory = max(self.bytes / (rates.memory_tb_s * 1e12), self.host_bytes / (rates.host_gb_s * 1e9))
        return max(arithmetic, memory, KERNEL_US * 1e-6)


def is_expert_matmul(i: Instruction) -> bool:
    """Return whether an instruction is one of jaxtrain's grouped matmuls of experts."""
    return i.target == MOSAIC and bool(EXPERTS_CALL.search(i.op_name))


def is_fp8_matmul(computation: Computation, i: Instruction) -> bool:
    """Return whether a matmul's operands are in 8-bit floating point."""
    return i.target == FP8_CALL or (
        is_expert_matmul(i) and leaves(computation.by_name[i.operands[-1]].type)[0].dtype.startswith("f8")
    )


def instruction_cost(
    module: Module, computation: Computation, i: Instruction, collective_ops: Mapping[str, CollectiveOp], filled: float = 1.0
) -> OpCost | None:
    """Return the cost of one run of an instruction; None if it runs no kernel. An asynchronous start has its kernel's cost.

    Raises HloError for an unknown instruction.

    Args:
      collective_ops: instruction -> its collective.
      filled: fraction of the rows of the expert buffers that have tokens.
    """
    if is_collective(module, i):
        if i.name not in collective_ops:
            raise HloError(f"{i.name}: the bytes that this {i.opcode} sends are not known")
        op = collective_ops[i.name]
        return OpCost("communication", bytes=op.wire_bytes, network_bytes=op.network_bytes, message=op.message, hops=op.hops)
    if i.opcode in ("async-start", "call-start"):
        called = module.computations[i.called[0]]
        costs = [w for inner in called.instructions if (w := instruction_cost(module, called, inner, collective_ops, filled))]
        if len(costs) > 1:
            raise HloError(f"{i.name}: an asynchronous call of {len(costs)} kernels; only one is understood")
        return costs[0] if costs else None
    if i.opcode == "copy-start":
        destination, source = leaves(i.type)[0], leaves(computation.by_name[i.operands[0]].type)[0]
        return _cost_of_accesses("memory", 0.0, [(destination.bytes, destination), (source.bytes, source)])
    if i.opcode.endswith("-start") and isinstance(i.type, tuple):  # of any other start: (arguments, result, context)
        i = dataclasses.replace(i, opcode=i.opcode.removesuffix("-start"), type=i.type[1])
    opcode = i.opcode
    if opcode in FREE or i.target == ALLOCATION:
        return None
    if opcode == "fusion":
        called = module.computations[i.called[0]]
        if called.root.opcode == "sort":
            return _sort_cost(called.root)
        flops = _fused_gemm_flops(module, called, i)
        cost = _kernel_cost(
            called, [computation.by_name[o].type for o in i.operands], i.type, "gemm" if flops else "memory", flops
        )
        return dataclasses.replace(cost, fp8=any(inner.target == FP8_CALL for inner in called.instructions))
    if opcode == "dot" or i.target in GEMM_CALLS:
        return dataclasses.replace(
            _kernel_cost(*_as_fusion(computation, i), "gemm", gemm_flops(computation, i)), fp8=i.target == FP8_CALL
        )
    if i.target in ATTENTION_CALLS:
        return _attention_cost(computation, i)
    if i.target == MOSAIC and (call := PALLAS_CALL.search(i.op_name)):
        return _pallas_cost(computation, i, call)
    if is_expert_matmul(i):
        return _experts_cost(computation, i, filled)
    if opcode in MEMORY_BOUND:
        return _kernel_cost(*_as_fusion(computation, i), "memory", 0.0)
    if opcode == "sort":
        return _sort_cost(i)
    kernel = f"the custom call {i.target!r}" if opcode == "custom-call" else f"a {opcode}"
    raise HloError(f"{i.name}: how long {kernel} takes is not known ({i.op_name or 'no op_name'}, {i.source or 'no source'})")


def gemm_flops(computation: Computation, i: Instruction) -> float:
    """Return the FLOPs of a dot or a cuBLAS call: 2 x elements of the output x product of the contracted dimensions."""
    lhs, output = leaves(computation.by_name[i.operands[0]].type)[0], leaves(i.type)[0]
    if i.opcode == "dot":
        contracted = re.findall(r"\d+", i.attributes.get("lhs_contracting_dims", ""))
    else:
        contracted = _backend_config(i, "gemm_backend_config")["dot_dimension_numbers"].get("lhs_contracting_dimensions", ())
    return 2.0 * output.elements * math.prod(lhs.dims[int(d)] for d in contracted)


def attention_pairs(mask: str, window: int, queries: int, keys: int) -> float:
    """Return the number of query-key pairs inside a mask. A causal mask has half of all pairs, as in `flops.attention`.

    A packed sequence counts as one document, which is an upper bound: the program does not have the documents' lengths.
    """
    if not CAUSAL_MASKS[mask]:
        return queries * keys
    visible = min(window or keys, keys)
    return queries * (visible - visible**2 / (2 * keys))


def _fused_gemm_flops(module: Module, computation: Computation, i: Instruction) -> float:
    """Return the FLOPs of the matmuls in a fusion, nested computations included."""
    total = 0.0
    for inner in computation.instructions:
        if inner.opcode == "dot" or inner.target in GEMM_CALLS:
            total += gemm_flops(computation, inner)
        elif inner.opcode in ("fusion", "call"):
            total += sum(_fused_gemm_flops(module, module.computations[c], i) for c in inner.called)
        elif inner.opcode not in FREE | MEMORY_BOUND:
            raise HloError(f"{i.name}: how long it takes is not known, because of the {inner.opcode} {inner.name} inside it")
    return total


def _attention_cost(computation: Computation, i: Instruction) -> OpCost:
    config = _backend_config(i, "cudnn_fmha_backend_config")
    mask, window = config["mask_type"], int(config.get("sliding_window_length", 0))
    if mask not in CAUSAL_MASKS:
        raise HloError(f"{i.name}: attention under mask {mask!r} is not known. Known: {', '.join(CAUSAL_MASKS)}")
    inputs = [leaf for o in i.operands for leaf in leaves(computation.by_name[o].type)]
    q, k, v = (leaf.dims for leaf in inputs[:3])  # (B, T, N, H), (B, S, K, H), (B, S, K, H)
    pairs = q[0] * q[2] * attention_pairs(mask, window, q[1], k[1])
    flops = 2.0 * pairs * (q[3] + v[3]) * ATTENTION_CALLS[i.target]
    # The log-sum-exp (f32) of packed sequences has a value per token for every possible document. Only one per token is used.
    num_bytes = sum(leaf.bytes for leaf in (*inputs, *leaves(i.type)) if leaf.dtype not in ("f32", "u8"))
    num_bytes += 4.0 * q[0] * q[1] * q[2]
    return OpCost("attention", flops, num_bytes, backward=i.target.endswith("Backward"), keys=k[1])


def _pallas_cost(computation: Computation, i: Instruction, call: re.Match[str]) -> OpCost:
    inputs = [leaf for o in i.operands for leaf in leaves(computation.by_name[o].type)]
    q, k = (leaf.dims for leaf in inputs[PALLAS_FIRST : PALLAS_FIRST + 2])  # (B, T, N, H), (B, S, K, H)
    mask = "NO_MASK" if call[2] == "all" else "CAUSAL"
    pairs = q[0] * q[2] * attention_pairs(mask, int(call[3] or 0), q[1], k[1])
    flops = 2.0 * pairs * 2 * q[3] * PALLAS_CALLS[call[1]]
    num_bytes = float(sum(leaf.bytes for leaf in (*inputs, *leaves(i.type))))
    backward = call[1].startswith("backward")
    share = PALLAS_ATTENTION[backward] * (fp8_attention(k[1]) if call[1] == "forward_fp8" else 1.0)
    return OpCost("attention", flops, num_bytes, backward=backward, keys=k[1], share=share)


def _experts_cost(computation: Computation, i: Instruction, filled: float) -> OpCost:
    """Return the cost of a grouped matmul: (R, D) x (E, D, F), or for weight gradients (D, R) x (R, F). R: rows of tokens."""
    lhs, rhs = (leaves(computation.by_name[o].type)[0] for o in i.operands[-2:])
    output = leaves(i.type)[0]
    width = math.prod(lhs.dims[1:]) * (rhs.dims[1] if len(rhs.dims) == 2 else output.dims[1])
    num_bytes = float(lhs.bytes + rhs.bytes + output.bytes)
    return OpCost(
        "gemm", 2.0 * filled * lhs.dims[0] * width, num_bytes, share=PALLAS_FRACTION, fp8=is_fp8_matmul(computation, i)
    )


def _sort_cost(i: Instruction) -> OpCost:
    return OpCost("memory", 0.0, float(SORT_PASSES * sum(leaf.bytes for leaf in leaves(i.type))))


def _backend_config(i: Instruction, key: str) -> dict:
    try:
        return json.loads(i.attributes["backend_config"])[key]
    except (KeyError, ValueError) as error:
        raise HloError(f"{i.name}: its backend_config has no {key}: {error}") from None


# ---- Bytes


def _kernel_cost(inside: Computation, arguments: list[Type], output_type: Type, kind: str, flops: float) -> OpCost:
    """Return the cost of a kernel with the bytes that it reads of its arguments and writes of its output.

    A library call's second output is a workspace and does not count.

    Args:
      inside: the kernel's computation.
      arguments, output_type: types of arguments and output in the caller, since only these have the memory space.
      flops: the kernel's FLOPs.
    """
    demand = _demand(inside)
    accesses: list[tuple[float, Shape]] = []
    for parameter, argument in zip(inside.parameters, arguments, strict=True):
        accesses += [(_bytes(leaf, demand[parameter.name]), leaf) for leaf in leaves(argument)]
    root = inside.root
    outputs = [(root, output_type)]
    if root.opcode == "tuple" and isinstance(output_type, tuple):
        outputs = [(inside.by_name[o], t) for o, t in zip(root.operands, output_type, strict=True)]
    for i, value_type in outputs:
        if (
            i.opcode == "get-tuple-element"
            and inside.by_name[i.operands[0]].opcode == "custom-call"
            and i.attributes["index"] != "0"
        ):
            continue  # a workspace
        written = leaves(value_type)[:1] if i.opcode == "custom-call" else leaves(value_type)
        update = _in_place_elements(inside, i)
        accesses += [(float(leaf.bytes) if update is None else _bytes(leaf, update), leaf) for leaf in written]
    return _cost_of_accesses(kind, flops, accesses)


def _as_fusion(computation: Computation, i: Instruction) -> tuple[Computation, list[Type], Type]:
    """Return a single instruction as the computation of a fusion, and the types of its arguments and its output."""
    names = list(dict.fromkeys(i.operands))
    parameters = [
        dataclasses.replace(computation.by_name[o], opcode="parameter", operands=(), parameter_number=n, is_root=False)
        for n, o in enumerate(names)
    ]
    inside = Computation(i.name, (*parameters, dataclasses.replace(i, is_root=True)))
    return inside, [p.type for p in parameters], i.type


def _cost_of_accesses(kind: str, flops: float, accesses: list[tuple[float, Shape]]) -> OpCost:
    """Return the cost of `flops` FLOPs and of `accesses`: (bytes, array) of each access.

    The cost's kind is "host" if any access is to host memory, else `kind`.
    """
    host = sum(b for b, s in accesses if s.memory_space == HOST_SPACE)
    device = sum(b for b, s in accesses if s.memory_space != HOST_SPACE)
    return OpCost("host" if host else kind, flops, device, host)


def _elements(i: Instruction) -> int:
    return max((s.elements for s in leaves(i.type)), default=0)


def _bytes(array: Shape, elements: float) -> float:
    return min(elements, array.elements) * BITS[array.dtype] / 8


def _demand(inside: Computation) -> dict[str, float]:
    """Return instruction -> number of its elements that a fusion computes, from the root backwards.

    A fusion computes only elements that its output needs, and reads only the slice of a sliced array. Two users of an array
    are assumed to need different slices.
    """
    needed: dict[str, float] = defaultdict(float)
    needed[inside.root.name] = _elements(inside.root)
    for i in reversed(inside.instructions):  # users come after their operands
        count = min(needed[i.name], _elements(i))
        if i.opcode == "tuple":
            for o in i.operands:
                needed[o] = _elements(inside.by_name[o])
        elif count:
            for operand, elements in _needed_elements(inside, i, count):
                needed[operand.name] += elements
    return {i.name: min(needed[i.name], _elements(i)) for i in inside.instructions}


def _needed_elements(inside: Computation, i: Instruction, count: float) -> Iterator[tuple[Instruction, float]]:
    """Yield (operand, number of its elements that are read) to compute `count` elements of an instruction."""
    operands = [inside.by_name[o] for o in i.operands]
    share = count / max(_elements(i), 1)
    if i.opcode in UPDATES:
        # An update in place reads nothing of the rest of the array. A scatter adds to old values, so it reads those.
        update = _elements(inside.by_name[_update_operand(i)])
        touched = update if i.opcode == "scatter" else 0
        yield operands[0], touched if _in_place_elements(inside, i) is not None else max(count - update, touched)
        yield from ((o, share * _elements(o)) for o in operands[1:])
    elif i.opcode in SLICES:
        yield operands[0], min(count, _elements(operands[0]))
        yield from ((o, share * _elements(o)) for o in operands[1:])
    else:
        yield from ((o, share * _elements(o)) for o in operands)


def _update_operand(i: Instruction) -> str:
    """Return the operand that a dynamic-update-slice or a scatter (array, indices, updates) writes into the array."""
    return i.operands[1] if i.opcode == "dynamic-update-slice" else i.operands[-1]


def _in_place_elements(inside: Computation, i: Instruction) -> int | None:
    """Return the number of elements that an in-place update writes; None if the whole output is written."""
    i = _through_bitcasts(inside, i)
    if i.opcode not in UPDATES or _through_bitcasts(inside, inside.by_name[i.operands[0]]).opcode != "parameter":
        return None
    return _elements(inside.by_name[_update_operand(i)])


def _through_bitcasts(inside: Computation, i: Instruction) -> Instruction:
    while i.opcode == "bitcast":
        i = inside.by_name[i.operands[0]]
    return i
