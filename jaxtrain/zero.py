"""How a step holds its weights and gradients: the stages of ZeRO, when weights are gathered, when gradients are summed.

After Rajbhandari et al. 2020 (arXiv:1910.02054), in mixed precision: the float32 master weights count as optimizer state.

    stage 0  nothing is split; gradients are all-reduced
    stage 1  master and moments are split. Weights are gathered once a step in the compute dtype and stay whole; gradients
             are held whole, one for each device, and reduce-scattered once, at the end of the step
    stage 2  the same, but each layer's gradient is reduce-scattered as its backward pass makes it
    stage 3  weights too are whole only in use (sharding.gather: layer, forward); with gather = step it is stage 1

With several microbatches, sums over mesh axes that do not split a weight wait for the end of the step as well: `data` beside
`fsdp` (HSDP), or all axes at stage 0. So each of a step's gradients crosses such an axis once.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.config import RunConfig
from jaxtrain.kernels.dot import Numerics
from jaxtrain.models.module import Params
from jaxtrain.sharding import Axes, Held, Placement


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a step holds, and how it sums."""

    placement: Placement
    numerics: Numerics
    grads: jnp.dtype  # of gradients summed over microbatches
    whole: bool  # weights are gathered once, before the first microbatch
    once: bool  # gradients are not summed over any axis before the end of the step
    accumulates: bool  # several microbatches

    def late(self, axes: Axes) -> tuple[str, ...]:
        """Mesh axes over which the gradient of a weight with these logical axes is summed at the end of the step."""
        p = self.placement
        split = {a for axis in axes for a in p.mesh_axes(axis)}
        tokens = p.mesh_axes("batch") + p.mesh_axes("sequence")
        return tokens if self.once else tuple(a for a in tokens if self.accumulates and a not in split)

    def weights(self, params: Params, axes: Params) -> Params:
        """From the master weights, what all microbatches of a step compute with."""
        return jax.tree.map(self._gathered, params, axes) if self.whole else params

    def slots(self, params: Params, axes: Params) -> Params:
        """What gradients are taken of: each has the shape, dtype and layout of its weight's gradient.

        A weight whose gradient comes back to where it rests is its own slot.
        """

        def slot(w: jax.Array, axes: Axes) -> jax.Array:
            return w if self._plain(axes) else self.zero(w, axes)

        return jax.tree.map(slot, params, axes)

    def bound(self, weights: Params, slots: Params, axes: Params) -> Params:
        """The parameters of a model that computes with `weights`, and whose gradient is that of `slots`."""

        def hold(w: jax.Array, slot: jax.Array, axes: Axes) -> jax.Array | Held:
            return slot if self._plain(axes) else Held(w, slot, self.whole, self.late(axes))

        return jax.tree.map(hold, weights, slots, axes)

    def zero(self, w: jax.Array, axes: Axes) -> jax.Array:
        """A gradient of nothing yet."""
        late = self.late(axes)
        shape = w.shape
        if late:
            at = int(axes[0] == "layers")  # behind the stacked layers, which the loop over them takes off
            shape = (*shape[:at], self.placement.size(late), *shape[at:])
        return self.pinned(jnp.zeros(shape, self.grads), axes)

    def pinned(self, g: jax.Array, axes: Axes) -> jax.Array:
        """A microbatch's gradient in the dtype and layout in which it is accumulated."""
        return jax.lax.with_sharding_constraint(g.astype(self.grads), jax.NamedSharding(self.placement.mesh, self._spec(axes)))

    def settled(self, grads: Params, axes: Params) -> Params:
        """The step's gradients, summed over every axis and split like the weights at rest."""
        return jax.tree.map(self._settled, grads, axes)

    def _plain(self, axes: Axes) -> bool:
        return not self.whole and not self.late(axes)

    def _spec(self, axes: Axes) -> jax.P:
        """Layout of a gradient before it is settled."""
        spec = self.placement.home(axes, late := self.late(axes)).spec
        return jax.P(spec[1], spec[0], *spec[2:]) if late and axes[0] == "layers" else spec

    def _gathered(self, w: jax.Array, axes: Axes) -> jax.Array:
        p, n = self.placement, self.numerics
        split = [tuple(a for a in p.mesh_axes(axis) if a in p.batch_axes) for axis in axes]

        def spread(w: jax.Array, dims: list[tuple[str, ...]]) -> jax.Array:
            for dim, over in enumerate(dims):
                w = jax.lax.all_gather(w, over, axis=dim, tiled=True) if over else w
            return w

        def local(w: jax.Array) -> jax.Array:
            w = w.astype(n.compute)
            if axes[0] != "layers" or not any(split[1:]):
                return spread(w, split)
            return spread(jax.lax.map(lambda layer: spread(layer, split[1:]), w), split[:1])

        return jax.shard_map(
            local, mesh=p.mesh, in_specs=p.spec(axes), out_specs=p.whole(axes).spec, check_vma=False
        )(w)  # fmt: skip

    def _settled(self, g: jax.Array, axes: Axes) -> jax.Array:
        p, late = self.placement, self.late(axes)
        if not late:
            return g
        stacked = axes[0] == "layers"
        split = [tuple(a for a in p.mesh_axes(axis) if a in late) for axis in axes]
        used = {a for over in split for a in over}
        rest = tuple(a for a in late if a not in used)

        def scatter(g: jax.Array, dims: list[tuple[str, ...]]) -> jax.Array:
            for dim, over in enumerate(dims):
                g = jax.lax.psum_scatter(g, over, scatter_dimension=dim, tiled=True) if over else g
            return g

        def local(g: jax.Array) -> jax.Array:
            g = g.squeeze(int(stacked))
            if stacked and any(split[1:]):
                g = scatter(g, split[:1])
                g = jax.lax.map(lambda layer: scatter(layer.astype(self.numerics.reduce), split[1:]), g)
            else:
                g = scatter(g.astype(self.numerics.reduce), split)
            return (jax.lax.psum(g, rest) if rest else g).astype(self.grads)

        return jax.shard_map(
            local, mesh=p.mesh, in_specs=self._spec(axes), out_specs=p.spec(axes), check_vma=False
        )(g)  # fmt: skip


def stage(run: RunConfig, placement: Placement, numerics: Numerics, grads: jnp.dtype) -> Stage:
    """What `sharding.zero` and `sharding.gather` ask for."""
    s = run.sharding
    once = s.zero == 1 or s.gather == "step"
    return Stage(placement, numerics, grads, once or s.zero == 2, once, run.train.grad_accum > 1)
