"""Groups of a stack's layers, run one at a time: what a group keeps for its backward pass waits in a slot until its turn comes.

Elsewhere the backward pass follows the forward pass (layer_loop.py). In a pipeline other microbatches come between, and how
many wait at a time is the schedule's to say. So what `jax.vjp` leaves of each checkpoint is put into buffers with a place for
every slot, by hand, and gradients are added to a sum of the whole stack as they are made.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.models.layer_loop import Body, Kind, at, number, put_at, slice_at, stack_of
from jaxtrain.models.remat import Plan

Buffers = list[jax.Array]  # of all that is kept: each (slots x checkpoints of a group, ...)


class Unit(NamedTuple):
    """A pass of one microbatch through one group."""

    shared: Any  # what all layers share of the microbatch
    group: jax.Array
    slot: jax.Array
    valid: jax.Array  # bool (); if not, it is nobody's, and run because a program is one for all


@dataclasses.dataclass(frozen=True)
class Kept:
    """What one checkpoint keeps: its structure, and shapes."""

    tree: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]


class Groups:
    """Groups of `per_group` neighbouring layers of one stack.

    body: see layer_loop. layers: the stack. kinds: of each place of the stack; `first` is the place in that list of the
    stack's first layer, where the list is longer. plan.every must divide per_group.
    """

    def __init__(self, body: Body, layers: Any, kinds: Sequence[int], first: jax.Array | int, per_group: int, plan: Plan):
        self._leaves, self._stack = stack_of(layers)
        self._body = body
        self._kinds, self._first, self._per_group, self._plan = kinds, first, per_group, plan
        self._every = 1 if plan.every_layer else plan.every
        self._parts = per_group // self._every  # checkpoints of a group

        def several(x: Any, layers: list[Any], shared: Any, *kinds: Kind) -> Any:
            for layer, kind in zip(layers, kinds, strict=True):
                x = body(x, layer, shared, kind)
            return x

        self._run = plan.checkpoint(several)

    def _layers(self, i: jax.Array) -> list[list[jax.Array]]:
        return [self._stack.at(self._leaves, i + q) for q in range(self._every)]

    def _differentiate(self, x: Any, shared: Any, i: jax.Array) -> tuple[Any, Any]:
        kinds = [number(self._kinds, self._first + i + q) for q in range(self._every)]
        return self._stack.differentiate(self._run, x, self._layers(i), shared, *kinds)

    def kept(self, x: Any, shared: Any) -> Kept:
        """What a checkpoint keeps of a microbatch with arrays like these."""
        found = []

        def leaves(x: Any, shared: Any) -> list[jax.Array]:
            flat, tree = jax.tree.flatten(self._differentiate(x, shared, jnp.int32(0))[1])
            found.append(tree)
            return flat

        shapes = jax.eval_shape(leaves, x, shared)
        return Kept(found[0], tuple(shapes))

    def buffers(self, kept: Kept, slots: int) -> Buffers:
        """Room for `slots` units."""
        return [jnp.zeros((slots * self._parts, *a.shape), a.dtype) for a in kept.shapes]

    def _each[C](self, step: Callable[[C, jax.Array], C], carry: C, order: range) -> C:
        if len(order) == 1 or self._plan.unroll:
            for part in order:
                carry = step(carry, jnp.int32(part))
            return carry
        parts = jnp.asarray(list(order), jnp.int32)
        return jax.lax.scan(lambda carry, part: (step(carry, part), None), carry, parts)[0]

    def through[C](self, step: Callable[[C, Any, Kind, jax.Array], C], carry: C, group: jax.Array) -> C:
        """step(carry, layer, kind, place in the stack) over a group's layers."""

        def one(carry: C, q: jax.Array) -> C:
            i = group * self._per_group + q
            layer = jax.tree.unflatten(self._stack.tree, self._stack.at(self._leaves, i))
            return step(carry, layer, number(self._kinds, self._first + i), i)

        return self._each(one, carry, range(self._per_group))

    def forward(self, x: Any, shared: Any, group: jax.Array) -> Any:
        """A group's output. Keeps nothing."""
        return self.through(lambda x, layer, kind, _: self._body(x, layer, shared, kind), x, group)

    def _step(self, unit: Unit, x: Any, buffers: Buffers, part: jax.Array, slot: jax.Array) -> tuple[Any, Buffers]:
        """One checkpoint forward."""
        y, vjp = self._differentiate(x, unit.shared, unit.group * self._per_group + part * self._every)
        place = slot * self._parts + part
        # The buffers are the loop's: each is written in its place, and not made of parts afterwards.
        return y, [put_at(b, leaf, place) for b, leaf in zip(buffers, jax.tree.leaves(vjp), strict=True)]

    def _step_back(
        self, unit: Unit, dy: Any, kept: Kept, found: list[jax.Array], sums: list[jax.Array], part: jax.Array
    ) -> tuple[Any, list[jax.Array]]:
        """One checkpoint backward."""
        vjp = jax.tree.unflatten(kept.tree, found)
        first = unit.group * self._per_group + part * self._every
        dx, d_layers = self._stack.backward(vjp, self._layers(first), unit.shared, dy)
        for q, parts in enumerate(d_layers):
            made = [dw for dw, learns in zip(parts, self._stack.learnt, strict=True) if learns]
            sums = [_added(s, dw, first + q, unit.valid) for s, dw in zip(sums, made, strict=True)]
        return dx, sums

    def _find(self, unit: Unit, buffers: Buffers, part: jax.Array) -> list[jax.Array]:
        return [at(b, unit.slot * self._parts + part) for b in buffers]

    def forward_keeping(self, unit: Unit, x: Any, buffers: Buffers) -> tuple[Any, Buffers]:
        """A group's output, and the buffers with what its backward pass needs in the unit's slot."""
        return self._each(lambda carry, part: self._step(unit, *carry, part, unit.slot), (x, buffers), range(self._parts))

    def backward(self, unit: Unit, dy: Any, kept: Kept, buffers: Buffers, sums: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
        """The gradient of a group's input, and the sums with its layers' gradients added, where the unit is valid.

        sums: of each leaf of the stack that is learnt, in the stack's order.
        """

        def step(carry: tuple[Any, list[jax.Array]], part: jax.Array) -> tuple[Any, list[jax.Array]]:
            dy, sums = carry
            return self._step_back(unit, dy, kept, self._find(unit, buffers, part), sums, part)

        return self._each(step, (dy, sums), range(self._parts)[::-1])

    def both(
        self, out: Unit, x: Any, back: Unit, dy: Any, kept: Kept, buffers: Buffers, sums: list[jax.Array]
    ) -> tuple[Any, Buffers, Any, list[jax.Array]]:
        """One unit forward and another, in another slot, backward; side by side, so that one's collectives can hide behind the
        other's arithmetic. (output, buffers, gradient of the other's input, sums)"""

        def step(carry: Any, part: jax.Array) -> Any:
            x, buffers, dy, sums = carry
            found = self._find(back, buffers, mirror := self._parts - 1 - part)
            # Nothing is written before this is read, or the compiler would keep a copy of the buffers to read it from.
            found, slot = jax.lax.optimization_barrier((found, out.slot))
            dx, sums = self._step_back(back, dy, kept, found, sums, mirror)
            return *self._step(out, x, buffers, part, slot), dx, sums

        return self._each(step, (x, buffers, dy, sums), range(self._parts))


def _added(sums: jax.Array, dw: jax.Array, i: jax.Array, valid: jax.Array) -> jax.Array:
    # What is not valid may be anything, NaN too.
    new = slice_at(sums, i) + jnp.where(valid, dw.astype(sums.dtype), 0)[None]
    return jax.lax.dynamic_update_slice_in_dim(sums, new, i, 0, allow_negative_indices=False)
