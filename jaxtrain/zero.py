"""How a step holds its weights and gradients: the stages of ZeRO, when weights are gathered, when gradients are summed.

After Rajbhandari et al. 2020 (arXiv:1910.02054), in mixed precision: the float32 master weights count as optimizer state.

    stage 0  nothing is split; gradients are all-reduced
    stage 1  master and moments are split. Weights are gathered once a step in the compute dtype (but a router's as it is) and
             stay whole; gradients are held whole, one for each device, and reduce-scattered once, at the end of the step
    stage 2  the same, but each layer's gradient is reduce-scattered as its backward pass makes it
    stage 3  weights too are whole only in use (sharding.gather: layer, forward); with gather = step it is stage 1

With several microbatches, sums over mesh axes that do not split a weight wait for the end of the step as well: `data` beside
`fsdp` (HSDP), or all axes at stage 0. So each of a step's gradients crosses such an axis once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config import RunConfig
from jaxtrain.kernels.dot import Numerics
from jaxtrain.kernels.fp8 import E4M3, from_bits, scaled, to_bits
from jaxtrain.models.module import Params, filled
from jaxtrain.sharding import Axes, Held, Placement, Scaled, Sum, summed


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a step holds, and how it sums."""

    placement: Placement
    numerics: Numerics
    grads: jnp.dtype  # of gradients summed over microbatches
    whole: bool  # weights are gathered once, before the first microbatch
    once: bool  # gradients are not summed over any axis before the end of the step
    accumulates: bool  # several microbatches
    eight: Params  # which weights are held in 8 bits
    exact: Params  # which weights are not rounded to the compute dtype
    trained: Params  # which weights are learnt
    adds_layers: bool  # the model adds gradients of stacked layers to the sum of the microbatches before

    def late(self, axes: Axes) -> tuple[str, ...]:
        """Mesh axes over which the gradient of a weight with these logical axes is summed at the end of the step."""
        p = self.placement
        split = {a for axis in axes for a in p.mesh_axes(axis)}
        # Over the axis that splits experts no two devices have a part of the same gradient.
        apart = p.in_use("experts") if "experts" in axes else ()
        tokens = tuple(a for a in p.mesh_axes("batch") + p.mesh_axes("sequence") if a not in apart)
        return tokens if self.once else tuple(a for a in tokens if self.accumulates and a not in split)

    def weights(self, params: Params, axes: Params) -> Params:
        """From the master weights, what all microbatches of a step compute with."""
        held = self.rounded(params, axes)
        return jax.tree.map(self._gathered, held, axes, self.exact, is_leaf=_is_scaled) if self.whole else held

    def at_rest(self, weights: Params, params: Params) -> Params:
        """What an evaluation computes with: the `rounded` weights, which rest as the master does, and learn nothing."""
        return jax.tree.map(
            lambda w, p: Held(w, p, False, ()) if isinstance(w, Scaled) else w, weights, params, is_leaf=_is_scaled
        )

    def rounded(self, params: Params, axes: Params) -> Params:
        """The master weights, those of FP8 matmuls in 8 bits. Once a step: a scale is a collective."""
        return jax.tree.map(lambda w, axes, eight: scaled(w, axes, self.placement) if eight else w, params, axes, self.eight)

    def slots(self, params: Params, axes: Params, sums: Params) -> Params:
        """What a microbatch's gradients are taken of: each has the shape, dtype and layout of its weight's gradient. Here and
        in what follows, parameters and axes are those of the weights that are learnt.

        A weight whose gradient comes back to where it rests is its own slot. The others' are in the type that travels: a
        gradient is rounded to it once, wherever it is held, and twice as many bytes would say no more. (Once more for a
        key/value head that several ranks share.) Where the model adds to the sum of the microbatches before, that is the slot.
        """

        def slot(w: jax.Array, axes: Axes, sum_: jax.Array) -> jax.Array:
            if self.adds(axes):
                return sum_
            return w if self._plain(axes) else self._zero(w, axes, self.numerics.reduce)

        return jax.tree.map(slot, params, axes, sums)

    def bound(self, weights: Params, slots: Params, axes: Params) -> Params:
        """The parameters of a model that computes with `weights`, and whose gradient is that of `slots`. Weights and axes are
        those of all parameters: what has no slot is frozen."""

        def hold(w: jax.Array | Scaled, slot: jax.Array, axes: Axes, learns: bool) -> jax.Array | Held:
            if not learns:
                return Held(w, _no_slot(w, axes), self.whole, (), frozen=True)
            adds = self.adds(axes)
            plain = self._plain(axes) and not isinstance(w, Scaled) and not adds
            into = Sum(self.numerics.reduce, len(slot)) if adds else None
            return slot if plain else Held(w, slot, self.whole, self.late(axes), into)

        return jax.tree.map(hold, weights, filled(weights, slots), axes, self.trained, is_leaf=_is_scaled)

    def adds(self, axes: Axes) -> bool:
        """Whether the backward pass adds the gradient of a weight with these logical axes to that of earlier microbatches."""
        return self.adds_layers and self.accumulates and axes[0] == "layers"

    def zero(self, w: jax.Array, axes: Axes) -> jax.Array:
        """The sum of no microbatch's gradients."""
        return self._zero(w, axes, self.grads)

    def _zero(self, w: jax.Array, axes: Axes, dtype: jnp.dtype) -> jax.Array:
        late = self.late(axes)
        shape = w.shape
        if late:
            at = int(axes[0] == "layers")  # behind the stacked layers, which the loop over them takes off
            shape = (*shape[:at], self.placement.size(late), *shape[at:])
        return self._pinned(jnp.zeros(shape, dtype), axes)

    def pinned(self, g: jax.Array, axes: Axes) -> jax.Array:
        """A microbatch's gradient in the dtype and layout in which it is accumulated."""
        return self._pinned(g.astype(self.grads), axes)

    def settled(self, grads: Params, axes: Params) -> Params:
        """The step's gradients, summed over every axis and split like the weights at rest."""
        return jax.tree.map(self._settled, grads, axes)

    def _pinned(self, g: jax.Array, axes: Axes) -> jax.Array:
        return jax.lax.with_sharding_constraint(g, jax.NamedSharding(self.placement.mesh, self._spec(axes)))

    def _plain(self, axes: Axes) -> bool:
        return not self.whole and not self.late(axes)

    def _spec(self, axes: Axes) -> jax.P:
        """Layout of a gradient before it is settled."""
        spec = self.placement.home(axes, late := self.late(axes)).spec
        return jax.P(spec[1], spec[0], *spec[2:]) if late and axes[0] == "layers" else spec

    def _gathered(self, w: jax.Array | Scaled, axes: Axes, exact: bool) -> jax.Array | Scaled:
        if isinstance(w, Scaled):
            return Scaled(to_bits(self._spread(from_bits(w.value, E4M3), axes)), w.scale)
        return self._spread(w if exact else w.astype(self.numerics.compute), axes)

    def _spread(self, w: jax.Array, axes: Axes) -> jax.Array:
        """A weight in the type that it has, whole over the batch."""
        p = self.placement

        def spread(w: jax.Array, axes: Axes) -> jax.Array:
            for dim, axis in enumerate(axes):
                over = p.gathered(axis) if axis else ()
                w = jax.lax.all_gather(w, over, axis=dim, tiled=True) if over else w
            return w

        def local(w: jax.Array) -> jax.Array:
            if not self._by_layer(axes):
                return spread(w, axes)
            return spread(jax.lax.map(lambda layer: spread(layer, axes[1:]), w), axes[:1])

        return jax.shard_map(local, mesh=p.mesh, in_specs=p.spec(axes), out_specs=p.whole(axes).spec, check_vma=False)(w)

    def _settled(self, g: jax.Array, axes: Axes) -> jax.Array:
        p, late, reduce = self.placement, self.late(axes), self.numerics.reduce
        if not late:
            return g
        first = p.mesh_axes(axes[0])
        inner = tuple(a for a in late if a not in first)

        def local(g: jax.Array) -> jax.Array:
            g = g.squeeze(int(axes[0] == "layers"))
            if not self._by_layer(axes):
                return summed(g.astype(reduce), axes, late, None, p)
            g = jax.lax.map(lambda layer: summed(layer.astype(reduce), axes[1:], inner, None, p), g)
            return summed(g, axes[:1], tuple(a for a in late if a in first), None, p)

        g = jax.shard_map(local, mesh=p.mesh, in_specs=self._spec(axes), out_specs=p.spec(axes), check_vma=False)(g)
        return g.astype(self.grads)

    def _by_layer(self, axes: Axes) -> bool:
        """Whether a stack moves layer by layer: all at once it would be turned in memory, since its parts lie in strips."""
        batch = self.placement.batch_axes
        return axes[0] == "layers" and any(a in batch for axis in axes[1:] for a in self.placement.mesh_axes(axis))


def _is_scaled(x: Any) -> bool:
    return isinstance(x, Scaled)


def _no_slot(w: jax.Array | Scaled, axes: Axes) -> jax.Array:
    """The slot of a weight without a gradient; of a stack it has the layers, which a loop over them takes off."""
    value = w.value if isinstance(w, Scaled) else w
    return jnp.zeros((*value.shape[: int(axes[0] == "layers")], 0), jnp.float32)


def stage(
    run: RunConfig,
    placement: Placement,
    numerics: Numerics,
    grads: jnp.dtype,
    *,
    eight: Params,
    exact: Params,
    trained: Params,
    adds: bool,
) -> Stage:
    """What `sharding.zero` and `sharding.gather` ask for.

    eight: which weights are held in 8 bits. exact: which are not rounded to the compute dtype. trained: which are learnt.
    adds: the model adds gradients of layers to those of earlier microbatches.
    """
    s = run.sharding
    once = s.zero == 1 or s.gather == "step"
    whole, several = once or s.zero == 2, run.train.grad_accum > 1
    return Stage(placement, numerics, grads, whole, once, several, eight, exact, trained, adds)
