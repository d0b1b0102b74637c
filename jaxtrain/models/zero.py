"""ZeRO stages: the sharding of weights and gradients in a step, and when weights are gathered.

After Rajbhandari et al. 2020 (arXiv:1910.02054), in mixed precision: the float32 master weights count as optimizer state.

    ZeRO-0  master weights, moments and gradients are replicated. Gradients are all-reduced.
    ZeRO-1  master weights and moments are sharded. Weights are gathered once a step, in the compute dtype. Each device holds
            its unreduced gradient of the gathered weight. Reduce-scatters at the end of the step sum these gradients.
    ZeRO-2  as ZeRO-1, but each layer's gradient is reduce-scattered in its backward pass, and the embedding table stays
            sharded: each device looks up its columns (kernels/embedding.py).
    ZeRO-3  weights are gathered before each use, and freed after it. With sharding.gather = step they are gathered once a
            step, and the step runs as ZeRO-1.

The sum of a gradient over the weight's replicas (`data` with `fsdp`; all axes at ZeRO-0) is an all-reduce. With one microbatch
it is part of the layer's backward pass. With several it runs once, at the end of the step. The sum is also at the end if
weights are gathered across nodes, because XLA's scheduler cannot overlap it in the backward pass. An example is the plan of
Llama 3 70B on data=16 fsdp=64 with one microbatch. With the sum in the backward pass, 0.96 of 1.51 s of communication are
exposed. With the sum at the end of the step, 0.26 s are exposed.

Everything here computes with local shards, inside the step's shard_map.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state

from jaxtrain.config.schema import Sharding
from jaxtrain.kernels.fp8 import E4M3, Float8, encode, from_bits, to_bits
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.models.module import Definition, Params, replace_leaves, select_leaves
from jaxtrain.models.stored import Encoded, StoredWeight
from jaxtrain.sharding import (
    Axes,
    GatherSpec,
    Placement,
    all_gather_weight,
    gather_weight,
    redirect,
    reduce_gradient,
)


@dataclasses.dataclass(frozen=True)
class ComputeCopy:
    """A weight's value for its matmul (in FP8, or gathered in the compute dtype), and its master, which gets the gradient."""

    value: Any  # an array, gathered; or Float8
    master: Any


@dataclasses.dataclass(eq=False)
class StackGradients:
    """The arrays that get the gradients of a model's stack of layers, for one run of all its layers with unchanged weights.

    If the stack were run twice or partly, sums of earlier microbatches would be added twice, or lost. If the model changed the
    weights before the stack runs, autodiff would not differentiate the change.
    """

    into: Params
    adds: bool  # `into` has the sums of earlier microbatches' gradients, to which the backward pass adds
    trace: Any = dataclasses.field(default_factory=lambda: get_opaque_trace_state(convention="nnx"))
    used: bool = False

    def use(self, into: Sequence[jax.Array], layers: int) -> None:
        """Note a run of `layers` layers, whose weights have the arrays `into`. Raise TypeError for any but the one run."""
        buffers = jax.tree.leaves(self.into)
        complete = (
            len(buffers) == len(into) and all(a is b for a, b in zip(buffers, into, strict=True)) and layers == len(buffers[0])
        )
        if self.used or not complete or self.trace != get_opaque_trace_state(convention="nnx"):
            raise TypeError(
                "the model runs its stack of layers twice, in part, with changed weights, or inside a loop or another "
                "transformation: set uses_plan_run = False in the model: autodiff allows that"
            )
        self.used = True


@dataclasses.dataclass(frozen=True)
class StackWeight:
    """A differentiated weight of a stack of layers, and the array that gets its gradient.

    The backward pass of the stack (models/remat.py) returns the weight's gradient as the gradient of `into`, in the dtype of
    `into`. If `gradients.adds`, it returns the sum of `into` and the weight's gradient. It returns no gradient for the weight.
    """

    value: Any  # an array, or ComputeCopy
    into: Any
    gradients: StackGradients


jax.tree_util.register_dataclass(ComputeCopy, ["value", "master"], [])
jax.tree_util.register_dataclass(StackWeight, ["value", "into"], ["gradients"])


@dataclasses.dataclass(frozen=True)
class Zero:
    """The ZeRO stage of a run: how it shards weights and gradients. Hashable, for use as a static argument."""

    placement: Placement
    numerics: Numerics
    reduce_once: bool  # gradients are reduced once a step; weights are gathered once, too
    gather_once: bool  # weights are gathered once a step
    sums_once: bool  # gradients are summed over replicas once a step

    # ---- In a layer

    def gather_module[M: nnx.Module](self, module: M) -> M:
        """Return the module with its weights gathered, in the compute dtype: ready for use."""

        def gather(path: Any, p: Any) -> Any:
            # A plan and a profile show the weight's name in this scope.
            with jax.named_scope(jax.tree_util.keystr(path, simple=True, separator=".")):
                return p.replace(self.gather_weight(p.get_value(), p.get_metadata("axes"), p.get_metadata("exact", False)))

        with jax.named_scope("weights"):
            return jax.tree_util.tree_map_with_path(gather, module, is_leaf=lambda p: isinstance(p, nnx.Param))

    def gather_weight(self, w: Any, axes: Axes, exact: bool = False) -> Any:
        """Return one weight, gathered, in the compute dtype; if `exact`, in the master dtype."""
        if isinstance(w, StackWeight):
            raise TypeError("the stack of layers is not run by RematPlan.run alone: set uses_plan_run = False in the model")
        if isinstance(w, Encoded):
            return self._gather_encoded(w)
        if not isinstance(w, ComputeCopy):
            return self._gather_master(w, axes, exact)
        # Only the gradient of this gather is used, and XLA removes the gather itself.
        into = self._gather_master(w.master, axes, exact)
        if not isinstance(w.value, Float8):
            return redirect(w.value, into)
        bits = w.value.bits
        if not self.gather_once:
            bits = checkpoint_name(_gather_bits(bits, self.gather_spec(axes, E4M3)), "weight")
        return Float8(bits, w.value.scale, into)

    def _gather_encoded(self, w: Encoded) -> jax.Array:
        """Return a frozen weight in fewer bits, gathered in its bits and decoded, in the compute dtype."""
        arrays = {name: x.value if isinstance(x, ComputeCopy) else x for name, x in w.parts.items()}
        return checkpoint_name(_gather_and_decode(arrays, w.stored, self), "weight")

    def local_weight(self, w: Any, axes: Axes) -> jax.Array:
        """Return a weight that is used without being gathered, in the master dtype."""
        spec = dataclasses.replace(self.gather_spec(axes, w.dtype), dims=())
        return gather_weight(w, dataclasses.replace(spec, summed=()) if self.sums_once else spec)

    def _gather_master(self, w: jax.Array, axes: Axes, exact: bool) -> jax.Array:
        spec = self.gather_spec(axes, w.dtype if exact else self.numerics.compute)
        if self.reduce_once:
            spec = dataclasses.replace(spec, dims=(), summed=())
        elif self.sums_once:
            spec = dataclasses.replace(spec, summed=())
        return checkpoint_name(gather_weight(w, spec), "weight")

    def gather_spec(self, axes: Axes, compute: jnp.dtype) -> GatherSpec:
        """Return the gather of a weight with these logical axes, and the reduction of its gradient over all devices."""
        placement = self.placement
        dims = tuple((dim, over) for dim, axis in enumerate(axes) if (over := placement.gather_axes(axis)))
        return GatherSpec(dims, placement.replica_axes(axes), compute, self.numerics.reduce)

    # ---- Once a step

    def step_weights(self, params: Params, definition: Definition, in_fp8: Params) -> tuple[Params, Params]:
        """Return (base, copies) of the master weights, for all microbatches of a step.

        base: the weights that are differentiated: the gathered weights if gradients are reduced once per step (ZeRO-1 or
        sharding.gather = step), otherwise the master weights. copies: for each weight its `ComputeCopy.value`; None if the
        weight is used as in `base`.

        Args:
          in_fp8: the weights that are multiplied in FP8.
        """

        def quantize(w: jax.Array, axes: Axes, chosen: bool) -> Float8 | None:
            if not chosen:
                return None
            over = tuple(a for axis in axes if axis != "layers" for a in self.placement.mesh_axes(axis))
            encoded = encode(w, stacked=axes[0] == "layers", over=over)
            if not self.gather_once:
                return encoded
            return dataclasses.replace(encoded, bits=self._by_layer(_gather_bits, encoded.bits, axes, E4M3))

        def gather(w: jax.Array, axes: Axes, exact: bool) -> jax.Array:
            return self._by_layer(all_gather_weight, w, axes, w.dtype if exact else self.numerics.compute)

        copies = jax.tree.map(quantize, params, definition.axes, in_fp8)
        if not self.gather_once:
            return params, copies
        gathered = jax.tree.map(gather, params, definition.axes, definition.exact)
        if self.reduce_once:
            return gathered, copies
        return params, jax.tree.map(
            lambda encoded, w: w if encoded is None else encoded, copies, gathered, is_leaf=_is_copy_or_none
        )

    def microbatch_weights(
        self, base: Params, copies: Params, differentiated: Params, stack: Params | None = None, adds: bool = False
    ) -> Params:
        """Return the weights that a microbatch computes with.

        Args:
          base, copies: of `step_weights`.
          differentiated: the weights of `base` that autodiff differentiates.
          stack: the arrays for gradients of the layer stack (`StackWeight.into`), by name, if RematPlan.run runs the stack.
          adds: whether the backward pass adds the gradients to `stack`. If not, the gradients replace `stack`.
        """
        weights = jax.tree.map(
            lambda copy, w: w if copy is None else ComputeCopy(copy, w),
            copies,
            replace_leaves(base, differentiated),
            is_leaf=_is_copy_or_none,
        )
        if not stack:
            return weights
        trained = select_leaves(weights, jax.tree.map(lambda _: True, stack))
        gradients = StackGradients(stack, adds)
        marked = jax.tree.map(lambda w, into: StackWeight(w, into, gradients), trained, stack, is_leaf=_is_compute_copy)
        return replace_leaves(weights, marked)

    def gradient_buffers(self, stack: Params) -> Params:
        """Return arrays for the gradients of a stack's weights, in the reduce dtype."""
        return jax.tree.map(lambda w: jnp.zeros(w.shape, self.numerics.reduce), stack)

    def zero_sums(self, trained: Params) -> Params:
        """Return arrays of zeros for the sums of these weights' gradients over microbatches."""
        leaves, tree = jax.tree.flatten(trained)
        return jax.tree.unflatten(tree, zeros([jax.ShapeDtypeStruct(w.shape, self.numerics.sums) for w in leaves])[0])

    def reduce_gradients(self, grads: Params, axes: Params) -> Params:
        """Return the step's gradients, reduced over all devices and sharded like the master weights."""

        def reduce(grad: jax.Array, spec: GatherSpec) -> jax.Array:
            return reduce_gradient(grad, spec if self.reduce_once else dataclasses.replace(spec, dims=())).astype(
                self.numerics.sums
            )

        def reduce_leaf(grad: jax.Array, axes: Axes) -> jax.Array:
            deferred = self.reduce_once or (self.sums_once and self.placement.replica_axes(axes))
            return self._by_layer(reduce, grad, axes, grad.dtype) if deferred else grad.astype(self.numerics.sums)

        return jax.tree.map(reduce_leaf, grads, axes)

    def _by_layer(
        self, function: Callable[[jax.Array, GatherSpec], Any], w: jax.Array, axes: Axes, compute: jnp.dtype
    ) -> jax.Array:
        """Apply `function` to each layer of a sharded stack. A collective of the whole stack would transpose it in memory."""
        spec = self.gather_spec(axes, compute)
        if axes[0] != "layers" or not spec.dims:
            return function(w, spec)
        layer_spec = dataclasses.replace(spec, dims=tuple((dim - 1, over) for dim, over in spec.dims))
        return jax.lax.map(lambda layer: function(layer, layer_spec), w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_and_decode(arrays: dict[str, jax.Array], stored: StoredWeight, zero: Zero) -> jax.Array:
    """Return the weight of one layer, decoded. It is one operation for remat policies, as `sharding.all_gather_weight` is."""
    axes = stored.array_axes(zero.placement)
    if not zero.gather_once:
        arrays = {
            name: all_gather_weight(x, zero.gather_spec(axes[name][len(axes[name]) - x.ndim :], x.dtype))
            for name, x in arrays.items()
        }
    return stored.decode(arrays, zero.numerics.compute, zero.placement)


def _no_gradient(*_: Any) -> Any:
    raise TypeError("a frozen weight in fewer bits has no gradient")


_gather_and_decode.defvjp(_no_gradient, _no_gradient)


def _gather_bits(bits: jax.Array, spec: GatherSpec) -> jax.Array:
    return to_bits(all_gather_weight(from_bits(bits, E4M3), spec))


def zeros(like: Sequence[Any], after: Any = None) -> tuple[list[jax.Array], Any]:
    """Return arrays of zeros with the shapes and dtypes of `like`, and `after`. The zeros depend on the arrays of `after`.

    Without a dependency XLA would allocate the zeros long before their use. Each array is made from a separate scalar: XLA
    would merge equal arrays, and then copy them.
    """
    scalars, after = jax.lax.optimization_barrier(([jnp.zeros((), a.dtype) for a in like], after))
    return [jnp.broadcast_to(x, a.shape) for x, a in zip(scalars, like, strict=True)], after


def _is_copy_or_none(x: Any) -> bool:
    return x is None or isinstance(x, Float8)


def _is_compute_copy(x: Any) -> bool:
    return isinstance(x, ComputeCopy)


def make_zero(sharding: Sharding, placement: Placement) -> Zero:
    """Return the `Zero` of a `sharding` section on this placement."""
    layout = placement.layout
    once = sharding.zero == 1 or sharding.gather == "step"
    # A pipeline accumulates over any number of microbatches.
    several = layout.batch[0] > 1 or placement.size("stage") > 1
    sums_once = several or placement.crosses_nodes(placement.gather_axes("embed"))
    return Zero(placement, Numerics.from_dtypes(layout.dtypes), once, once or sharding.zero == 2, sums_once)
