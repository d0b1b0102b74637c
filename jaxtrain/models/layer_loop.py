"""How layers that are stacked on axis 0 follow each other in the program, forward and backward.

A loop compiles one layer. It pays for that at run time: what layers keep for the backward pass is copied into stacks, which
are filled with a number first, and copied out again. One by one, nothing is stacked but gradients, and any layer's
collectives can run beside the next layer's arithmetic. Compiling takes as much longer as there are layers.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.sharding import Held, frozen

# Which of the kinds of layers that a model has: a number of the program's where layers stand one by one or are all alike, and
# one on the device where a loop runs several.
Kind = int | jax.Array
# (x, layer, what all layers share, kind) -> x, which may be several arrays
Body = Callable[[Any, Any, Any, Kind], Any]

SLOTS = "slots"  # the scope in which a loop puts what it keeps where that waits for the backward pass; plans know it by that
LAYER_INPUT = "layer input"  # what a layer's backward pass always has


@dataclasses.dataclass(frozen=True)
class Stack:
    """How a stack's arrays make up its layers, which of them are learnt, and which are sums that gradients are added to."""

    tree: Any
    learnt: tuple[bool, ...]
    adds_in: tuple[jnp.dtype | None, ...]  # of leaves that are sums, the dtype of what is added; see `sharding.Sum`
    some_frozen: bool = False  # some weights are not learnt

    def at(self, arrays: Sequence[jax.Array], i: jax.Array | int) -> list[jax.Array]:
        """One layer's. No sums: in their place stands what has the shape and dtype of the layer's gradient."""
        return [
            at(w, i) if dtype is None else jnp.zeros(w.shape[1:], dtype) for w, dtype in zip(arrays, self.adds_in, strict=True)
        ]

    def begin(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """A stack of gradients without any layer's."""
        return [
            jnp.zeros_like(w) if dtype is None else w
            for w, learns, dtype in zip(arrays, self.learnt, self.adds_in, strict=True)
            if learns
        ]

    def put(self, grads: list[jax.Array], parts: list[jax.Array], i: jax.Array | int) -> list[jax.Array]:
        """The gradients with one layer's in its place, or added there."""
        made = [(dw[None], dtype) for dw, learns, dtype in zip(parts, self.learnt, self.adds_in, strict=True) if learns]
        return [
            # As slices, not as layers of one dimension less: of that XLA would make two kernels and a copy between them.
            jax.lax.dynamic_update_slice_in_dim(
                g, dw if dtype is None else slice_at(g, i) + dw.astype(g.dtype), i, 0, allow_negative_indices=False
            )
            for g, (dw, dtype) in zip(grads, made, strict=True)
        ]

    def cotangents(self, grads: list[jax.Array]) -> list[jax.Array | None]:
        """Of all arrays of the stack."""
        made = iter(grads)
        return [next(made) if learns else None for learns in self.learnt]

    def differentiate(
        self, f: Callable[..., Any], x: Any, layers: list[list[jax.Array]], shared: Any, *kind: Kind
    ) -> tuple[Any, Callable[..., Any]]:
        """`f(x, [layer, ...], shared, *kind)`, and its backward pass without the arguments that are there anyhow."""
        return jax.vjp(
            lambda x, layers, shared: f(x, [jax.tree.unflatten(self.tree, layer) for layer in layers], shared, *kind),
            *(x, layers, shared),
            saveable_args=(True, False, False),
            in_nzs=(True, [list(self.learnt)] * len(layers), False),
        )

    def backward(self, vjp: Any, layers: list[list[jax.Array]], shared: Any, dy: Any) -> tuple[Any, list[list[jax.Array]]]:
        dx, d_layers, _ = vjp.replace(args_res=(vjp.args_res[0], layers, shared))(dy)
        return dx, d_layers


def stack_of(layers: Any) -> tuple[list[jax.Array], Stack]:
    """The arrays of stacked layers, and how they make up the layers."""
    leaves = jax.tree.leaves(layers)
    weights, whole = jax.tree.flatten(layers, is_leaf=lambda w: isinstance(w, Held))
    # A layer's own gradient is added to nothing.
    single = [dataclasses.replace(w, sum=None) if isinstance(w, Held) else w for w in weights]
    tree = jax.tree.structure(jax.tree.unflatten(whole, single))
    learnt = tuple(learns for _, learns in _leaves_of(weights))
    adds_in = tuple(
        w.sum.take(len(w.slot)) if learns and isinstance(w, Held) and w.sum else None for w, learns in _leaves_of(weights)
    )
    return leaves, Stack(tree, learnt, adds_in, any(map(frozen, weights)))


def _leaves_of(weights: list[Any]) -> Iterator[tuple[Any, bool]]:
    """For each leaf of each weight: the weight, and whether the leaf is learnt: of a held one its slot alone, the last, and
    of a frozen one nothing."""
    for w in weights:
        count = len(jax.tree.leaves(w))
        yield from ((w, i == count - 1 and not frozen(w)) for i in range(count))


def slice_at(w: jax.Array, i: jax.Array | int) -> jax.Array:
    """The same, still stacked."""
    return jax.lax.dynamic_slice_in_dim(w, i, 1, allow_negative_indices=False)


def at(w: jax.Array, i: jax.Array | int) -> jax.Array:
    """One layer of a stacked array."""
    if isinstance(i, int):
        return jax.lax.index_in_dim(w, i, keepdims=False)
    return jax.lax.dynamic_index_in_dim(w, i, keepdims=False, allow_negative_indices=False)


def put_at(stack: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
    """What is kept for the backward pass, with this part in its place."""
    with jax.named_scope(SLOTS):
        return jax.lax.dynamic_update_slice_in_dim(stack, part[None], i, 0, allow_negative_indices=False)


def _stacking(one: Callable[..., tuple[Any, Any]], x: Any, times: int) -> tuple[Any, jax.Array, Any]:
    """`x, kept = one(x, i)` so many times: the last x, how often it was, and all that was kept, stacked.

    As a scan does it, but for the stacks that it begins with. Those are there no sooner than x: XLA may make long before what
    waits for nothing, and hold it beside the stacks of the microbatch before. And each holds a number of its own: of two that
    are alike XLA would make one, and a copy for each. What rests in host memory is left to the scan.
    """
    kept: list[Any] = []  # avals, which know of host memory
    tree = None

    def flat(x: Any, i: jax.Array) -> tuple[Any, list[jax.Array]]:
        nonlocal kept, tree
        x, made = one(x, i)
        parts, tree = jax.tree.flatten(made)
        kept = [jax.typeof(part) for part in parts]
        return x, parts

    jax.eval_shape(flat, x, jnp.int32(0))
    on_host = [a.memory_space == jax.memory.Space.Host for a in kept]
    here = [a for a, host in zip(kept, on_host, strict=True) if not host]
    x, numbers = jax.lax.optimization_barrier((x, [jnp.asarray(n).astype(a.dtype) for n, a in enumerate(here)]))
    empty = [jnp.broadcast_to(n, (times, *a.shape)) for n, a in zip(numbers, here, strict=True)]

    def step(carry, _):
        x, stacks, i = carry
        x, parts = flat(x, i)
        stays = [part for part, host in zip(parts, on_host, strict=True) if not host]
        stacks = [put_at(stack, part, i) for stack, part in zip(stacks, stays, strict=True)]
        return (x, stacks, i + 1), [part for part, host in zip(parts, on_host, strict=True) if host]

    (x, stacks, i), hosted = jax.lax.scan(step, (x, empty, jnp.int32(0)), None, length=times)
    found = iter(stacks), iter(hosted)
    return x, i, jax.tree.unflatten(tree, [next(found[host]) for host in on_host])


def number(kinds: Sequence[int], i: jax.Array) -> Kind:
    """The kind of layer i of a loop: a number of the program's where all are alike."""
    return kinds[0] if len(set(kinds)) == 1 else jnp.asarray(kinds, jnp.int32)[i]


def loop(body: Callable[..., Any], x: Any, layers: Any, kinds: Sequence[int], unroll: bool = False) -> Any:
    """`body(x, layer, kind)` over a stack of layers, in a loop that autodiff is left to."""
    if len(set(kinds)) == 1:
        return jax.lax.scan(lambda x, layer: (body(x, layer, kinds[0]), None), x, layers, unroll=unroll)[0]
    each = (layers, jnp.asarray(kinds, jnp.int32))
    return jax.lax.scan(lambda x, layer: (body(x, *layer), None), x, each, unroll=unroll)[0]


def loop_last_apart(step: Body, last: Body, x: Any, layers: Any, shared: Any, kinds: Sequence[int], waits: bool) -> Any:
    """`step` over all layers but the last, and `last` over that one, all of them parts of one stack.

    Slices of the stack would be copies of it. So loops run over the layers' numbers, forward and backward; the backward loop
    carries the gradients of the whole stack and puts each layer's in its place. Loops count in their carry: XLA starts a
    gather an iteration early only where the layer it takes follows from the loop's own counter.
    """
    leaves, stack = stack_of(layers)
    num_layers = len(kinds)

    def single(f: Body) -> Callable[..., Any]:
        return lambda x, layers, shared, kind: f(x, layers[0], shared, kind)

    @jax.custom_vjp
    def run(x: Any, leaves: list[jax.Array], shared: Any) -> Any:
        layers = jax.tree.unflatten(stack.tree, leaves)
        return loop(lambda x, layer, kind: step(x, layer, shared, kind), x, layers, kinds)

    def forward(x, leaves, shared):
        def one(x, i):
            return stack.differentiate(single(step), x, [stack.at(leaves, i)], shared, number(kinds, i))

        x, i, vjps = _stacking(one, x, num_layers - 1)
        y, vjp = stack.differentiate(single(last), x, [stack.at(leaves, i)], shared, kinds[-1])
        return y, (vjps, vjp, leaves, shared)

    def back(residuals, dy):
        vjps, vjp, leaves, shared = residuals
        end = jnp.int32(num_layers - 1)
        dx, (d_layer,) = stack.backward(vjp, [stack.at(leaves, end)], shared, dy)
        grads = stack.put(stack.begin(leaves), d_layer, end)

        def one(carry, _):
            dy, grads, count = carry
            i = num_layers - 2 - count
            # The compiler unrolls this loop, and would compute again for two layers at a time and hold both. So what was kept
            # is looked up by a number that is there no sooner than the gradient. Weights do not wait: they are gathered ahead.
            dy, then = jax.lax.optimization_barrier((dy, i)) if waits else (dy, i)
            vjp = jax.tree.unflatten(kind, [at(array, then) for array in kept])
            dx, (d_layer,) = stack.backward(vjp, [stack.at(leaves, i)], shared, dy)
            return (dx, stack.put(grads, d_layer, i), count + 1), None

        kept, kind = jax.tree.flatten(vjps)
        (dx, grads, _), _ = jax.lax.scan(one, (dx, grads, jnp.int32(0)), None, length=num_layers - 1)
        return dx, stack.cotangents(grads), None

    run.defvjp(forward, back)
    return run(x, leaves, shared)


def one_by_one(
    body: Body,
    checkpoint: Callable[..., Body],
    last: Callable[..., Body],
    x: Any,
    layers: Any,
    shared: Any,
    kinds: Sequence[int],
    every: int,
) -> Any:
    """`body` over all layers without a loop, `every` of them under each checkpoint.

    checkpoint, last: what makes a function keep what a remat policy says, and the same for the last group.
    """
    leaves, stack = stack_of(layers)
    groups = [range(at, min(at + every, len(kinds))) for at in range(0, len(kinds), every)]

    def several(group: range) -> Callable[..., Any]:
        def run(x: Any, layers: list[Any], shared: Any) -> Any:
            for i, layer in zip(group, layers, strict=True):
                x = body(x, layer, shared, kinds[i])
            return x

        return run

    @jax.custom_vjp
    def run(x: Any, leaves: list[jax.Array], shared: Any) -> Any:
        # Without gradients nothing is kept, and a loop costs nothing.
        layers = jax.tree.unflatten(stack.tree, leaves)
        return loop(lambda x, layer, kind: body(x, layer, shared, kind), x, layers, kinds)

    def forward(x, leaves, shared):
        vjps = []
        for group in groups:
            f = (last if group is groups[-1] else checkpoint)(several(group), in_loop=False)
            x = checkpoint_name(x, LAYER_INPUT)
            x, vjp = stack.differentiate(f, x, [stack.at(leaves, i) for i in group], shared)
            vjps.append(vjp)
        return x, (vjps, leaves, shared)

    def back(residuals, dy):
        vjps, leaves, shared = residuals
        grads = stack.begin(leaves)
        for group, vjp in zip(reversed(groups), reversed(vjps), strict=True):
            dy, d_layers = stack.backward(vjp, [stack.at(leaves, i) for i in group], shared, dy)
            if stack.some_frozen:
                # Small gradients, as of adapters, XLA would compute after all layers, and hold until then what it makes them
                # of. So what comes next waits for those of the group before: their sums over devices are done by then.
                dy, grads = jax.lax.optimization_barrier((dy, grads))
            for i, parts in zip(group, d_layers, strict=True):
                # XLA would make one expression of the whole stack, in which every element is looked for in every layer.
                grads = [jax.lax.optimization_barrier(g) for g in stack.put(grads, parts, i)]
        return dy, stack.cotangents(grads), None

    run.defvjp(forward, back)
    return run(x, leaves, shared)
