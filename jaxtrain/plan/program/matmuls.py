"""Which matrix products of a program's layers run in 8 bits. Names those that stayed wide: a pattern that the compiler did not
recognise costs half of its speed and says nothing."""

from collections import Counter

from jaxtrain.plan import result
from jaxtrain.plan.program.hlo import Instruction, Module, walk
from jaxtrain.plan.program.roofline import label
from jaxtrain.plan.program.work import FP8_CALL, GEMM_CALLS, of_experts, target

# Products that are no layer's: of attention's core, and of the loss.
ELSEWHERE = ("kernels/attention", "kernels/context", "kernels/cross_entropy")


def read(module: Module, layers: int, microbatches: int) -> result.Matmuls:
    """The matrix products of layers in a step, counted over each layer and microbatch."""
    products, eight = 0, 0
    wide: Counter[str] = Counter()
    for i, _, times, _ in walk(module, fusions=True):
        if not _of_a_layer(i):
            continue
        products += times
        if target(i) == FP8_CALL:
            eight += times
        else:
            wide[f"{label(i.op_name) or i.name} ({i.source})"] += times
    each = layers * microbatches
    return result.Matmuls(products / each, eight / each, tuple(f"{name}, {n:,} a step" for name, n in wide.most_common()))


def _of_a_layer(i: Instruction) -> bool:
    gemm = i.opcode == "dot" or target(i) in GEMM_CALLS or of_experts(i)
    return gemm and not label(i.op_name).startswith("loss") and not any(place in i.source for place in ELSEWHERE)
