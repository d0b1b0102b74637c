"""Activation checkpointing, and the run of layers stacked on axis 0: in a loop (lax.scan), or unrolled.

The activations that can be saved, and the activations that each policy saves, are in jaxtrain/models/activations.py.

With a loop, XLA compiles one group of `remat.every` layers (one layer with policy `none`), and the last group separately. With
policy `dots`, it compiles the last group separately only if that group is smaller. A loop costs time to copy saved activations
into stacks and out of them. If unrolled (parallel.scan_layers=false), a layer's collectives can overlap with the next layer's
arithmetic, and only gradients are stacked. Then compile time grows with the number of layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import Remat
from jaxtrain.kernels.experts.routing import CHOICE
from jaxtrain.kernels.fp8 import SCALE
from jaxtrain.models.activations import SAVED, parse_tensors
from jaxtrain.models.zero import ComputeCopy, StackGradients, StackWeight, zeros

# The kind of a layer: an int if it is known when the program is traced, an int32 () if a loop runs several kinds.
Kind = int | jax.Array
# (x, layer, arrays that all layers share, kind) -> x, which may be several arrays
Body = Callable[[Any, Any, Any, Kind], Any]
Arrays = list[jax.Array]

# Gathered weights (zero.py). No policy saves them, not even `none`: the gathered weights of every layer would be in memory at
# once. Exceptions: the last group, whose backward pass comes next, and all layers if sharding.gather = forward.
WEIGHT = ("weight",)
# Every policy saves the expert choice, k integers per token: the backward pass must route tokens to the same experts. Every
# policy also saves FP8 scales whose recomputation would need a pass over the tensor.
ALWAYS = (CHOICE, SCALE)
SLOTS = "slots"  # the scope of writes to buffers of saved activations; the plan recognises these writes by it


def anything_but_weights(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether the policy `none` saves an operation's result: it saves all results except gathered weights.

    To reject the name of gathered weights is not enough: JAX would save the gather's result, before `checkpoint_name`. So the
    gather itself is rejected, too: `sharding.all_gather_weight` and `zero._gather_and_decode`, the only ones of custom_vjp_call
    in the traced layers.
    """
    return primitive.name != "custom_vjp_call" and not (primitive.name == "name" and params["name"] in WEIGHT)


@dataclasses.dataclass(frozen=True)
class RematPlan:
    """A remat policy, and how the layers of the stack run under it; static under jit."""

    policy: str
    keep: tuple[str, ...]  # names of activations saved on the device; `none` and `dots` choose by operation instead
    offload: tuple[str, ...]  # names of activations saved in host memory
    every: int
    keep_weights: bool = False  # gathered weights are saved for the backward pass
    unroll: bool = False  # layers are one by one in the program, without a loop
    # A loop's backward pass loads saved activations only once the incoming gradient exists. False with a tensor axis, where XLA
    # would keep a second, transposed stack of each activation: then activations are copied out of the stack first.
    delays_load: bool = True
    period: int = 1  # layers in one element of the stack; above 1, each has its own checkpoint, and an element has `layers`

    def checkpoint(self, body: Callable[..., Any], in_loop: bool = True) -> Callable[..., Any]:
        """Return `body` under `jax.checkpoint` with this policy. in_loop: the result will be the body of a loop.

        Arguments that are Python ints are static.
        """
        policies = jax.checkpoint_policies
        names = (*ALWAYS, *WEIGHT) if self.keep_weights else ALWAYS
        if self.policy == "none":
            policy = policies.everything_saveable if self.keep_weights else anything_but_weights
        elif self.policy == "dots":
            # This policy chooses by operation: with qk-norm, the backward pass needs the matmul's output, not the named q.
            policy = policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(*names)
            )
        elif self.offload:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[*self.keep, *names],
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        else:
            policy = policies.save_only_these_names(*self.keep, *names)

        def checkpointed(*args: Any) -> Any:
            static = tuple(i for i, arg in enumerate(args) if isinstance(arg, int))
            # XLA compiles scan bodies separately, so it cannot merge the recomputation with the original. Elsewhere it would.
            # It also recomputes a layer of a period only once the gradient of the layer's output exists.
            apart = self._only_input(args, static) if self.period > 1 and in_loop else not in_loop
            return jax.checkpoint(body, policy=policy, prevent_cse=apart, static_argnums=static)(*args)

        return checkpointed

    @staticmethod
    def _only_input(args: Sequence[Any], static: Sequence[int]) -> tuple[bool, ...]:
        """Return, for each argument that is not static, whether recomputation waits for it: weights can be gathered early."""
        return tuple(i == 0 for i in range(len(args)) if i not in static)

    def element_body(self, body: Body) -> Body:
        """Return `body` for an element of the stack: with `period`, it runs for each layer of the element, in order."""
        if self.period == 1:
            return body

        def each(x: Any, element: Any, shared: Any, _: Kind) -> Any:
            for layer, kind in element.layers:
                x = body(x, layer, shared, kind)
            return x

        return each

    def checkpoint_layers(self, body: Body, in_loop: bool = True) -> Callable[..., Any]:
        """Return `body` for a list of elements of the stack, under one checkpoint; with `period`, under one for each layer."""
        inner = self.element_body(self.checkpoint(body, in_loop)) if self.period > 1 else body

        def several(x: Any, layers: list[Any], shared: Any, *kinds: Kind) -> Any:
            for layer, kind in zip(layers, kinds, strict=True):
                x = inner(x, layer, shared, kind)
            return x

        return several if self.period > 1 else self.checkpoint(several, in_loop)

    @property
    def layers_each(self) -> int:
        """Return the number of layers in one `jax.checkpoint`."""
        return 1 if self.policy == "none" else self.every

    def trips(self, num_layers: int) -> int:
        """Return the number of iterations of the loop over layers; 0 without a loop."""
        return self.groups(num_layers)[0]

    def run(self, body: Body, x: Any, layers: Any, shared: Any, kinds: Sequence[int]) -> Any:
        """Return x after `x = body(x, layer, shared, kind)` for each of the layers stacked on axis 0, in order.

        Args:
          layers: a tree of stacked arrays. If some are `StackWeight`, all others have no gradient.
          shared: arrays that all layers share; gradients through them are dropped.
          kinds: the kind of each layer, passed to `body`.
        """
        stack, trained, fixed, into = flatten(layers)
        if stack.gradients is None:
            # Autodiff gives gradients to the weights of a model whose stack does not come as StackWeight.
            return loop(self.element_body(self.checkpoint(body)), x, layers, shared, kinds)
        stack.gradients.use(into, len(kinds))
        return _run_stack(StackRun(self, body, stack, kinds), x, into, trained, fixed, shared)

    def groups(self, num_layers: int) -> tuple[int, list[range]]:
        """Return the number of groups of layers that a loop runs, and the groups after the loop, which run one by one."""
        group_size = self.layers_each
        groups = [range(i, min(i + group_size, num_layers)) for i in range(0, num_layers, group_size)]
        # The last group runs outside of the loop: its backward pass comes next, and its activations need no stack. Under `dots`
        # it stays in the loop, because XLA would merge its attention with the recomputation.
        if self.unroll:
            looped = 0
        elif self.policy == "dots":
            looped = num_layers // group_size
        else:
            looped = len(groups) - 1
        return looped, groups[looped:]

    @property
    def last(self) -> "RematPlan":
        """Return the plan of the last group. It saves gathered weights, and on the device the activations in `offload`."""
        return dataclasses.replace(self, keep_weights=True, keep=(*self.keep, *self.offload), offload=())


@dataclasses.dataclass(frozen=True, eq=False)
class StackRun:
    """One run of a stack of layers, with an explicit backward pass; static under jit.

    With `Stack.adds`, the backward pass adds each layer's gradient to the sum over earlier microbatches at once. Autodiff
    would first stack the gradients of all layers beside the sum. Without `Stack.adds`, the backward pass starts by allocating
    a stack of gradients, in the dtype of `into`. XLA would allocate autodiff's stack before the forward pass.
    """

    plan: RematPlan
    body: Body
    stack: "Stack"
    kinds: Sequence[int]

    def forward(self, x: Any, into: Arrays, trained: Arrays, fixed: Arrays, shared: Any) -> tuple[Any, Any]:
        """Return x after all layers, and the residuals for `backward`."""
        trips, last_groups = self.plan.groups(len(self.kinds))
        each, weights = self.plan.layers_each, (trained, fixed, shared)
        vjps, saved = None, []
        if trips:
            # XLA inlines a loop of one iteration, and would then merge its recomputation with the original.
            run_group = self.plan.checkpoint_layers(self.body, in_loop=trips > 1)
            x, vjps = loop_saving(lambda x, i: self._differentiate(run_group, x, weights, i * each, each), x, trips)
        for group in last_groups:
            plan = self.plan.last if group is last_groups[-1] else self.plan
            run_group = plan.checkpoint_layers(self.body, in_loop=False)
            x, vjp = self._differentiate(run_group, x, weights, group[0], len(group))
            saved.append(vjp)
        return x, (vjps, saved, into, weights)

    def backward(self, residuals: Any, dx: Any) -> tuple[Any, ...]:
        """Return the gradients of `forward`'s arguments: those of x and, as the gradient of `into`, of `trained`."""
        vjps, saved, into, weights = residuals
        trips, last_groups = self.plan.groups(len(self.kinds))
        each, delays_load = self.plan.layers_each, self.plan.delays_load
        sums, dx = (into, dx) if self.stack.adds else zeros(into, after=dx)
        for group, vjp in reversed(list(zip(last_groups, saved, strict=True))):
            dx, sums = self._add_gradients(vjp, dx, sums, weights, group[0], len(group))
            # Without the barrier, XLA fuses the updates of all layers into one kernel that selects a layer per element.
            sums = [jax.lax.optimization_barrier(total) for total in sums]

        def body(carry: tuple[Any, Arrays, jax.Array], _: None) -> tuple[Any, None]:
            dx, sums, count = carry
            i = trips - 1 - count
            # The compiler unrolls this loop, and would recompute two layers at a time, both in memory. So the index of saved
            # activations depends on the gradient. The index of weights does not: they can be gathered early.
            dx, load_index = jax.lax.optimization_barrier((dx, i)) if delays_load else (dx, i)
            vjp = layer_at(vjps, load_index)
            vjp = vjp if delays_load else jax.lax.optimization_barrier(vjp)
            return (*self._add_gradients(vjp, dx, sums, weights, i * each, each), count + 1), None

        if trips:
            (dx, sums, _), _ = jax.lax.scan(body, (dx, sums, jnp.int32(0)), None, length=trips)
        return dx, sums, None, None, None

    def _differentiate(
        self, run_group: Callable[..., Any], x: Any, weights: tuple[Arrays, Arrays, Any], first: Any, count: int
    ) -> tuple[Any, Any]:
        """Return x after `count` layers from `first`, and the layers' vjp. run_group: of `RematPlan.checkpoint_layers`."""
        trained, fixed, shared = weights
        return self.stack.differentiate(run_group, x, trained, fixed, first, count, shared, kinds_at(self.kinds, first, count))

    def _add_gradients(
        self, vjp: Any, dx: Any, sums: Arrays, weights: tuple[Arrays, Arrays, Any], first: Any, count: int
    ) -> tuple[Any, Arrays]:
        """Return the gradient of the input of `count` layers from `first`, and the sums with the layers' gradients."""
        trained, fixed, shared = weights
        dx, grads = self.stack.backward(vjp, trained, fixed, first, count, shared, dx)
        put = add_at if self.stack.adds else put_at
        for offset, layer_grads in enumerate(grads):
            sums = [put(total, g, first + offset) for total, g in zip(sums, layer_grads, strict=True)]
        return dx, sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_stack(run: StackRun, x: Any, into: Arrays, trained: Arrays, fixed: Arrays, shared: Any) -> Any:
    # Without a backward pass nothing is saved, and a loop costs nothing.
    return loop(run.plan.element_body(run.body), x, run.stack.layers(trained, fixed), shared, run.kinds)


_run_stack.defvjp(StackRun.forward, StackRun.backward)


def loop(body: Body, x: Any, layers: Any, shared: Any, kinds: Sequence[int]) -> Any:
    """Return x after `x = body(x, layer, shared, kind)` for each layer of a stack, in order, in a `lax.scan`."""

    def scan_body(x: Any, item: tuple[jax.Array, Any]) -> tuple[Any, None]:
        i, layer = item
        return body(x, layer, shared, kinds_at(kinds, i, 1)[0]), None

    return jax.lax.scan(scan_body, x, (jnp.arange(len(kinds)), layers))[0]


def loop_saving(step: Callable[[Any, jax.Array], tuple[Any, Any]], x: Any, times: int) -> tuple[Any, Any]:
    """Return the last x of `x, saved = step(x, i)` for i below `times`, and `saved` of all iterations, stacked on axis 0.

    The result is that of a scan, but the stacks are allocated after `x` is computed. XLA would allocate a scan's stacks much
    earlier, while the stacks of the previous microbatch are still in memory. Arrays in host memory are stacked by the scan.

    The index i is a counter in the carry. XLA starts a layer's gather one iteration early only if its index is such a counter.
    """
    traced, (_, outputs) = jax.make_jaxpr(step, return_shape=True)(x, jnp.int32(0))
    tree = jax.tree.structure(outputs)
    saved: Any = traced.out_avals[len(traced.out_avals) - tree.num_leaves :]  # avals, which name their memory
    hosted = [a.memory_space == jax.memory.Space.Host for a in saved]
    like = [jax.ShapeDtypeStruct((times, *a.shape), a.dtype) for a, host in zip(saved, hosted, strict=True) if not host]
    stacks, x = zeros(like, after=x)

    def body(carry: Any, _: None) -> Any:
        x, stacks, i = carry
        x, outputs = step(x, i)
        leaves = jax.tree.leaves(outputs)
        on_device = [leaf for leaf, host in zip(leaves, hosted, strict=True) if not host]
        stacks = [save_at(stack, leaf, i) for stack, leaf in zip(stacks, on_device, strict=True)]
        return (x, stacks, i + 1), [leaf for leaf, host in zip(leaves, hosted, strict=True) if host]

    (x, stacks, _), on_host = jax.lax.scan(body, (x, stacks, jnp.int32(0)), None, length=times)
    sources = iter(stacks), iter(on_host)
    return x, jax.tree.unflatten(tree, [next(sources[host]) for host in hosted])


def save_at(stack: jax.Array, x: jax.Array, i: jax.Array) -> jax.Array:
    """Return a stack of saved activations with `x` at index i."""
    with jax.named_scope(SLOTS):
        return jax.lax.dynamic_update_slice_in_dim(stack, x[None], i, 0, allow_negative_indices=False)


def kinds_at(kinds: Sequence[int], first: Any, count: int) -> list[Kind]:
    """Return the kinds of `count` layers from `first`, as ints if `first` is an int or all layers have the same kind."""
    if isinstance(first, int) or len(set(kinds)) == 1:
        return [kinds[0] if len(set(kinds)) == 1 else kinds[first + q] for q in range(count)]
    return [jnp.asarray(kinds, jnp.int32)[first + q] for q in range(count)]


# ---- Layers stacked on axis 0


def take_layer(w: jax.Array, i: jax.Array | int) -> jax.Array:
    """Return the array of layer i from a stacked array."""
    if isinstance(i, int):
        return jax.lax.index_in_dim(w, i, keepdims=False)
    return jax.lax.dynamic_index_in_dim(w, i, keepdims=False, allow_negative_indices=False)


def layer_at(layers: Any, i: jax.Array | int) -> Any:
    """Return layer i of a tree of stacked arrays."""
    return jax.tree.map(lambda w: take_layer(w, i), layers)


def put_at(stack: jax.Array, grad: jax.Array, i: jax.Array | int) -> jax.Array:
    """Return a stack of gradients with layer i's gradient set to `grad`."""
    return jax.lax.dynamic_update_slice_in_dim(stack, grad[None].astype(stack.dtype), i, 0, allow_negative_indices=False)


def add_at(total: jax.Array, grad: jax.Array, i: jax.Array | int) -> jax.Array:
    """Return a stack of sums with `grad` added to layer i's sum."""
    # The sum is of slices with a layer axis: without this axis XLA would make two kernels and a copy between them.
    old = jax.lax.dynamic_slice_in_dim(total, i, 1, allow_negative_indices=False)
    return jax.lax.dynamic_update_slice_in_dim(total, old + grad[None].astype(total.dtype), i, 0, allow_negative_indices=False)


@dataclasses.dataclass(frozen=True)
class Stack:
    """The structure of stacked layers, and which of their arrays are differentiated; static under jit."""

    tree: Any
    trained_mask: tuple[bool, ...]  # whether each leaf of the tree is differentiated
    gradients: StackGradients | None = None  # of the `StackWeight` leaves; None if there are none

    @property
    def adds(self) -> bool:
        """Return whether the backward pass adds gradients to their sum over earlier microbatches."""
        return self.gradients is not None and self.gradients.adds

    def layers(self, trained: Sequence[Any], fixed: Sequence[Any]) -> Any:
        """Return the tree with these differentiated (`trained`) and fixed arrays, stacked for all layers or of one layer."""
        sources = iter(trained), iter(fixed)
        return jax.tree.unflatten(self.tree, [next(sources[not trains]) for trains in self.trained_mask])

    def differentiate(
        self,
        run: Callable[..., Any],
        x: Any,
        trained: Any,
        fixed: Any,
        first: Any,
        count: int,
        shared: Any,
        kinds: Sequence[Kind],
    ) -> tuple[Any, Any]:
        """Return `f(x, layers, shared, *kinds)` for `count` layers from `first`, and a vjp that has no weights as residuals."""

        def apply(x: Any, trained: list[Any], fixed: list[Any], shared: Any) -> Any:
            return run(x, [self.layers(*arrays) for arrays in zip(trained, fixed, strict=True)], shared, *kinds)

        args = x, *(self._at(arrays, first, count) for arrays in (trained, fixed)), shared
        # The backward pass indexes the stacks of weights again: if weights were residuals, a loop would stack copies of them.
        return jax.vjp(apply, *args, saveable_args=(True, False, False, False), in_nzs=(True, True, False, False))

    def backward(
        self, vjp: Any, trained: Any, fixed: Any, first: Any, count: int, shared: Any, dy: Any
    ) -> tuple[Any, list[list[jax.Array]]]:
        """Return the gradient of x, and for each layer the gradients of its differentiated arrays."""
        weights = (self._at(arrays, first, count) for arrays in (trained, fixed))
        dx, grads, _, _ = vjp.replace(args_res=(vjp.args_res[0], *weights, shared))(dy)
        return dx, grads

    @staticmethod
    def _at(arrays: Sequence[jax.Array], first: Any, count: int) -> list[list[jax.Array]]:
        return [[take_layer(w, first + q) for w in arrays] for q in range(count)]


def flatten(layers: Any) -> tuple[Stack, list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Return the structure of stacked layers, their differentiated arrays, their other arrays, and `into` of each StackWeight.

    The differentiated arrays are the weights that are `StackWeight`. Of a `ComputeCopy`, only the master is differentiated.
    """

    def is_wrapped(w: Any) -> bool:
        return isinstance(w, StackWeight)

    def trained_leaves(w: Any) -> Any:
        if not is_wrapped(w):
            return False
        return ComputeCopy(jax.tree.map(lambda _: False, w.value.value), True) if isinstance(w.value, ComputeCopy) else True

    marked = [w for w in jax.tree.leaves(layers, is_leaf=is_wrapped) if is_wrapped(w)]
    arrays, tree = jax.tree.flatten(jax.tree.map(lambda w: w.value if is_wrapped(w) else w, layers, is_leaf=is_wrapped))
    flags = tuple(jax.tree.leaves(jax.tree.map(trained_leaves, layers, is_leaf=is_wrapped)))
    trained = [w for w, flag in zip(arrays, flags, strict=True) if flag]
    fixed = [w for w, flag in zip(arrays, flags, strict=True) if not flag]
    return Stack(tree, flags, next((w.gradients for w in marked), None)), trained, fixed, [w.into for w in marked]


def make_remat_plan(remat: Remat, gather: str, unroll: bool, delays_load: bool = True, period: int = 1) -> RematPlan:
    """Return the plan for the config's `remat` section and `sharding.gather`, which `validate` has checked.

    unroll, delays_load, period: see RematPlan.
    """
    more = (gather == "forward", unroll, delays_load, period)
    if remat.policy != "custom":
        return RematPlan(remat.policy, SAVED[remat.policy], (), remat.every, *more)
    actions, _ = parse_tensors(remat.tensors)
    keep = tuple(name for name, action in actions.items() if action == "keep")
    offload = tuple(name for name, action in actions.items() if action == "offload")
    return RematPlan(remat.policy, keep, offload, remat.every, *more)
