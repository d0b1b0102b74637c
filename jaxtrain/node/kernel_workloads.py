"""Kernels of a train step for timing: their operands, FLOPs and bytes. node/kernels.py times them.

Imports JAX, so it is imported after JAX has started.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels import attention as attention_table
from jaxtrain.kernels.attention.support import unsupported_reason
from jaxtrain.kernels.experts import grouped_matmul
from jaxtrain.kernels.experts.support import choose_matmul
from jaxtrain.kernels.norm import rms_norm
from jaxtrain.kernels.numerics import DTYPES, Numerics
from jaxtrain.models.zero import make_zero
from jaxtrain.node import measure
from jaxtrain.node.measure import Loop, Sizes, TimedWork, chain, normal
from jaxtrain.node.train_step import one_device
from jaxtrain.optim.optimizer import make_optimizer
from jaxtrain.sharding import make_placement
from jaxtrain.step.loss import LossSpec, cross_entropy

NO_SCORES = 1024  # tokens; for longer sequences the reference attention is not timed, since it stores all scores
PRODUCTS = ("over D", "over F", "outer")
LOADS = ("even", "uneven")


def attention(device: Any, sizes: Sizes) -> Iterator[TimedWork]:
    """Yield every attention kernel, forward and forward+backward, without and with support for packed documents.

    Each sequence is one document, also with that support.
    """
    T, H = sizes.attention[1], sizes.attention[-1]
    for name in attention_table.IMPLEMENTATIONS:
        for packed in (False, True):
            spec = attention_table.Spec(H, "bf16", packed, max_segments=32 if packed else 1)
            why_not = unsupported_reason(name, [spec], attention_table.Hardware.from_device(device))
            if name == "reference" and T > NO_SCORES:
                why_not = f"holds all {T:,} x {T:,} scores"
            forward, forward_backward = measure.attention(device, name, spec, sizes.attention)
            if why_not:
                yield dataclasses.replace(forward, kind="attention", unable=why_not)
            else:
                yield from (forward, forward_backward)


def loss(device: Any, sizes: Sizes) -> Iterator[TimedWork]:
    """Yield the loss of the train step: the head's matmul, cross entropy, and the gradients of hidden states and head."""
    T, D, V = sizes.loss
    run = one_device()
    placement = make_placement(run, [device])
    zero = make_zero(run.sharding, placement)
    spec = LossSpec(zero.numerics, placement, zero, run.loss.chunk, 0.0)

    def body(constants: Any, hidden_BTD: jax.Array) -> jax.Array:
        head_VD, batch = constants
        value, grads = jax.value_and_grad(lambda h, w: cross_entropy(h, w, batch, spec) / T, (0, 1))(hidden_BTD, head_VD)
        return chain(hidden_BTD, value, *grads)

    def prepare() -> Loop:
        targets = jax.random.randint(jax.random.key(0), (1, T), 0, V)
        head_VD = 0.02 * normal(1, (V, D), jnp.float32)
        return body, (head_VD, {"targets": targets, "weights": jnp.ones((1, T), jnp.float32)}), normal(2, (1, T, D))

    # Hidden states and their gradient in bfloat16, the head and its gradient in float32.
    yield TimedWork("cross entropy", f"{T:,} tokens of {D:,}, {V:,} words", 6.0 * T * D * V, 4.0 * T * D + 8.0 * D * V, prepare)


def norm(device: Any, sizes: Sizes) -> Iterator[TimedWork]:
    """Yield RMSNorm forward and backward. It reads x twice and dy once, and writes y and dx."""
    T, D = sizes.norm

    def body(constants: Any, x_BTD: jax.Array) -> jax.Array:
        w, dy = constants
        y: Any
        y, pull = jax.vjp(lambda x, w: rms_norm(x, w, 1e-5), x_BTD, w)
        return chain(x_BTD, y, *pull(dy))

    def prepare() -> Loop:
        return body, (jnp.ones((D,), jnp.float32), normal(0, (1, T, D))), normal(1, (1, T, D))

    yield TimedWork("norm forward+backward", f"{T:,} tokens of {D:,}", 0.0, 5.0 * 2 * T * D, prepare)


def optimizer(device: Any, sizes: Sizes) -> Iterator[TimedWork]:
    """Yield the optimizer update of the train step. It reads gradients, and reads and writes parameters and moments."""
    run = one_device()
    tx, dtype = make_optimizer(run.optimizer, run.dtypes, {"w": ("layers", "embed", "mlp")}), DTYPES[run.dtypes.grads]

    def body(grads: Any, state: Any) -> Any:
        params, moments = state
        updates, moments = tx.update(grads, moments, params)
        return jax.tree.map(lambda p, u: (p - 1e-4 * u).astype(p.dtype), params, updates), moments

    def prepare() -> Loop:
        params = {"w": normal(0, sizes.optimizer, jnp.float32)}
        return body, {"w": normal(1, sizes.optimizer, dtype)}, (params, jax.jit(tx.init)(params))

    params = {"w": jax.ShapeDtypeStruct(sizes.optimizer, jnp.float32)}
    state = jax.tree.leaves((params, jax.eval_shape(tx.init, params)))
    count = math.prod(sizes.optimizer)
    moved_bytes = 2.0 * sum(a.size * a.dtype.itemsize for a in state) + count * jnp.dtype(dtype).itemsize
    yield TimedWork("optimizer", f"{run.optimizer.name}, {count:,} parameters", 0.0, moved_bytes, prepare)


def gemm(device: Any, sizes: Sizes) -> Iterator[TimedWork]:
    """Yield square matmuls in bfloat16 and FP8."""
    for dtype in ("bf16", "fp8"):
        for n in sizes.squares:
            yield measure.gemm((n, n, n), dtype, [device])


def experts(device: Any, sizes: Sizes) -> Iterator[TimedWork]:
    """Yield the grouped matmuls of experts as `moe.impl=auto` computes them on this device, each for both `loads`.

    For comparison, matmuls in which all rows have one expert are also yielded. They have the same FLOPs.
    """
    numerics = Numerics.from_dtypes(make_placement(one_device(), [device]).layout.dtypes)
    impl = choose_matmul("auto", attention_table.Hardware.from_device(device), numerics.compute == jnp.float32)

    def body(kind: str, constants: Any, a: jax.Array) -> jax.Array:
        b, sizes_E = constants
        return chain(a, product(impl, kind, a, b, sizes_E, numerics.reduce, numerics.precision))

    def prepare(kind: str, shape: Sequence[int], sizes_E: list[int]) -> Loop:
        a, b = operands(kind, shape, numerics.compute)
        return functools.partial(body, kind), (b, jnp.array(sizes_E, jnp.int32)), a

    for shape in sizes.experts:
        R, E, D, F = shape
        yield dataclasses.replace(measure.gemm((R, D, F), "bf16", [device]), kind="experts dense")
        for kind in PRODUCTS:
            for load in LOADS:
                sizes_E = loads(load, R, E)
                # The weight of an expert without tokens is not read, but its gradient is written.
                weights = E if kind == "outer" else sum(map(bool, sizes_E))
                label = f"{R:,} x {D:,} x {F:,}, {E} experts {load}"
                moved_bytes = 2.0 * (R * (D + F) + weights * D * F)
                prepare_kind = functools.partial(prepare, kind, shape, sizes_E)
                yield TimedWork(f"experts {kind}", label, 2.0 * R * D * F, moved_bytes, prepare_kind)


def loads(load: str, R: int, E: int) -> list[int]:
    """Return the number of rows of each of E experts, R in all.

    Args:
        load: "even", or "uneven": the first expert has half of the rows, the last expert has none.
    """
    first, last = ([], []) if load == "even" else ([R // 2], [0])
    remaining, among = R - sum(first), E - len(first + last)
    return [*first, *(remaining // among + (e < remaining % among) for e in range(among)), *last]


def product(impl: str, kind: str, a: Any, b: Any, sizes_E: Any, out: Any, precision: Any) -> Any:
    """Return the grouped matmul `kind`: "over D" and "over F" contract these dimensions, "outer" is the weights' gradient.

    Args:
        a: rows (R, D), or (R, F) for "over F".
        b: weights (E, D, F), or rows (R, F) for "outer".
        sizes_E: number of rows of each expert.
        out: dtype of the result of "outer".
    """
    if kind == "outer":
        return grouped_matmul.outer(impl, a, b, sizes_E, out, precision)
    return grouped_matmul.times(impl, a, b, sizes_E, kind[-1], precision)


def operands(kind: str, shape: Sequence[int], dtype: Any) -> tuple[Any, Any]:
    """Return random (a, b) for `product`. shape: (R, E, D, F)."""
    R, E, D, F = shape
    a = normal(0, (R, F if kind == "over F" else D), dtype)
    return a, normal(1, (R, F) if kind == "outer" else (E, D, F), dtype)


WORKLOADS: dict[str, Callable[[Any, Sizes], Iterator[TimedWork]]] = {
    "attention": attention,
    "loss": loss,
    "norm": norm,
    "optimizer": optimizer,
    "gemm": gemm,
    "experts": experts,
}
