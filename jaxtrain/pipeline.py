"""A step's gradients through pipeline stages: one program for all of them, which follows a schedule tick by tick (stages.py).

The program is manual over mesh axis `stage` and leaves the other axes as they are: a stage sees its own layers, and the data,
fsdp, expert, tensor and seq axes as without a pipeline. In every tick it runs one group of layers forward on one microbatch and
one backward on another, and hands the results to its neighbours. Forward and backward passes of different microbatches are in
one loop body, so autodiff cannot make them: what a group keeps waits in slots (models/layer_groups.py).

The embedding and the head belong to no stage. Their tables are split by vocabulary over all, as over a tensor axis: each stage
looks up its rows for the microbatch that enters, and computes its part of the logits of the one that leaves, whose states
the last stage sends to all. So no stage has more to do than the others, and none a table of its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.models.layer_groups import Groups, Unit
from jaxtrain.models.layers import RESIDUAL
from jaxtrain.models.module import Definition, Params, part
from jaxtrain.models.transformer import Cache, Transformer
from jaxtrain.sharding import Axes, Placement, Scaled
from jaxtrain.stages import Arrangement, Phase, Schedule
from jaxtrain.update import STACK
from jaxtrain.zero import Stage

STAGE = "stage"
KEYS = 5  # dimensions of the keys of a cache, and of its values: those of all layers
Batch = dict[str, Any]
# (model, what its layers gave, microbatch, weight of the whole batch) -> what is minimised, and sums to report
Lose = Callable[[Transformer, Any, Batch, jax.Array], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A model on stages."""

    placement: Placement
    definition: Definition  # of one stage's part: made with `placement.inside("stage")`
    arrangement: Arrangement
    schedule: Schedule
    kinds: Sequence[int]  # of each layer

    @property
    def inside(self) -> Placement:
        return self.placement.inside(STAGE)

    @property
    def last(self) -> int:
        """The last stage's number."""
        return self.schedule.stages - 1

    def groups(self, model: Transformer) -> Groups:
        """This stage's layers."""
        of_place = [0 if layer is None else self.kinds[layer] for layer in self.arrangement.order]
        first = jax.lax.axis_index(STAGE) * self.arrangement.groups * self.arrangement.per_group
        return Groups(model.layer, model.layers, of_place, first, self.arrangement.per_group, model.remat)

    def broadcast(self, tree: Any, stage: int) -> Any:
        """One stage's states, on all of them."""
        p = self.inside

        def local(tree: Any) -> Any:
            mine = jax.lax.axis_index(STAGE) == stage
            return jax.tree.map(lambda x: jax.lax.psum(jnp.where(mine, x, 0), STAGE), tree)

        # Over the whole mesh by hand: of a sum over one axis of several, in bfloat16, XLA's CPU compiler (jaxlib 0.11.2) dies.
        layout = jax.tree.map(lambda x: p.spec(RESIDUAL) if x.ndim == 3 else P(), tree)
        return jax.shard_map(local, mesh=p.mesh, in_specs=(layout,), out_specs=layout, check_vma=False)(tree)

    def pass_on(self, tree: Any, by: int) -> Any:
        """To the next stage (by = 1) or the one before (-1); with several groups a stage, around the ends too."""
        stages = self.schedule.stages
        links = [(s, (s + by) % stages) for s in range(stages) if self.schedule.groups > 1 or 0 <= s + by < stages]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE, links), tree)

    def specs(self, tree: Any, axes: Params) -> Any:
        """Of each weight, that its layers or its rows are split over the stages, where they are."""

        def spec(w: Any, axes: Axes) -> Any:
            own = self._spec(axes)
            return Scaled(own, P(*own[:1])) if isinstance(w, Scaled) else own

        return jax.tree.map(spec, tree, axes, is_leaf=lambda w: isinstance(w, Scaled))

    def _spec(self, axes: Axes, late: bool = False) -> P:
        parts = [STAGE if STAGE in self.placement.mesh_axes(axis) else None for axis in axes]
        # Behind the stacked layers, where there are any, stand the parts of a gradient that is not yet summed.
        parts[(at := int(axes[0] == "layers")) : at] = [None] if late else []
        return P(*parts)

    def gradients(self, lose: Lose, held: Stage, weights: Params, masters: Params, batch: Batch, total: jax.Array) -> Any:
        """(sums that `lose` reports, gradients as `held` accumulates them) of a batch of microbatches, (A, B, T).

        weights: what the step computes with (`held.weights`). masters: those of the weights that are learnt, at rest.
        """
        axes = self.definition.axes
        learnt = part(axes, held.trained)

        def run(weights: Params, masters: Params, batch: Batch, total: jax.Array) -> Any:
            inner = dataclasses.replace(held, placement=self.inside)
            return _Run(self, lose, inner, weights, masters, batch, total).all()

        grads = jax.tree.map(lambda a: self._spec(a, bool(held.late(a))), learnt, is_leaf=lambda a: isinstance(a, tuple))
        return jax.shard_map(
            run,
            mesh=self.placement.mesh,
            in_specs=(self.specs(weights, axes), self.specs(masters, learnt), P(), P()),
            out_specs=(P(), grads),
            axis_names={STAGE},
            check_vma=False,
        )(weights, masters, batch, total)

    def loss(self, lose: Callable[..., Any], held: Stage, weights: Params, masters: Params, micro: Batch) -> Any:
        """`lose(model, what its layers gave, microbatch)` of one microbatch, (B, T). Stages take their turns at it.

        weights: the `rounded` masters.
        """

        def run(weights: Params, masters: Params, micro: Batch) -> Any:
            model = self.definition.bind(held.at_rest(weights, masters))
            shared, groups = model.share(micro["segments"], micro["positions"]), self.groups(model)
            x, _ = self.in_turn(
                model.enter(micro["tokens"]),
                (),
                lambda x, own, group, mine: (groups.forward(x, shared.where(mine), group), own),
            )
            return lose(model, x, micro)

        axes = self.definition.axes
        return jax.shard_map(
            run,
            mesh=self.placement.mesh,
            in_specs=(self.specs(weights, axes), self.specs(masters, axes), P()),
            out_specs=P(),
            axis_names={STAGE},
            check_vma=False,
        )(weights, masters, micro)

    def decode(self, params: Params, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """The logits, f32 (V,), of what follows the first row's last token, and the cache with the tokens in it.

        Each stage has keys and values of its own layers.
        """

        def run(params: Params, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            model = self.definition.bind(params)
            shared, cache = model.append(tokens_BT, cache)
            groups = self.groups(model)

            def turn(x: Any, kv: Any, group: jax.Array, mine: jax.Array) -> tuple[Any, Any]:
                def layer(carry: tuple[Any, Any], block: Any, kind: Any, i: jax.Array) -> tuple[Any, Any]:
                    x, kv = carry
                    old = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), kv)
                    x, new = block(x, shared.where(mine), kind, old)
                    return x, jax.tree.map(
                        lambda a, n: jax.lax.dynamic_update_index_in_dim(a, n, i, 0), kv, _chosen(mine, new, old)
                    )

                return groups.through(layer, (x, kv), group)

            x, kv = self.in_turn(model.enter(tokens_BT), cache.kv, turn)
            hidden, _ = model.leave(x)
            return model.logits(hidden[:, -1:])[0, 0], dataclasses.replace(cache, kv=kv)

        of_cache = jax.tree.map(lambda a: P(STAGE) if a.ndim == KEYS else P(), cache)
        of_logits = self._spec(("vocab",))
        return jax.shard_map(
            run,
            mesh=self.placement.mesh,
            in_specs=(self.specs(params, self.definition.axes), P(), of_cache),
            out_specs=(of_logits, of_cache),
            axis_names={STAGE},
            check_vma=False,
        )(params, tokens_BT, cache)

    def in_turn(self, x: Any, own: Any, run: Callable[[Any, Any, jax.Array, jax.Array], tuple[Any, Any]]) -> tuple[Any, Any]:
        """What the last stage makes of x, on all stages, and what each keeps for itself.

        Each runs each of its groups in its turn, `run(x, own, group, whether it is its turn)`. In the others' it runs too, for
        nothing: the program is one for all.
        """
        stages, turns = self.schedule.stages, self.schedule.stages * self.schedule.groups
        stage = jax.lax.axis_index(STAGE)

        def tick(carry: tuple[Any, Any], t: jax.Array) -> tuple[tuple[Any, Any], None]:
            x, own = run(*carry, t // stages, t % stages == stage)
            return (self.pass_on(x, 1), own), None

        carry = jax.lax.scan(tick, (x, own), jnp.arange(turns - 1, dtype=jnp.int32))[0]
        x, own = run(*carry, jnp.int32(self.schedule.groups - 1), stage == self.last)
        return self.broadcast(x, self.last), own


@dataclasses.dataclass(frozen=True)
class _Carry:
    """What goes from tick to tick."""

    entering: Any  # the embeddings of the microbatch that enters next
    arrived: Any  # from the stage before: what it made of its last unit
    returned: Any  # from the stage behind: the gradient of what it took
    kept: list[jax.Array]  # what units keep, slot by slot
    ready: Any  # gradients of the last layer's outputs, by microbatch as far as they must wait
    stack: list[jax.Array]  # gradients of the layers so far
    ends: Params  # and of all else
    sums: Any  # what `lose` reports


jax.tree_util.register_dataclass(_Carry, [f.name for f in dataclasses.fields(_Carry)], [])


class _Run:
    """One step, as one stage sees it."""

    def __init__(
        self, pipe: Pipeline, lose: Lose, held: Stage, weights: Params, masters: Params, batch: Batch, total: jax.Array
    ):
        self.pipe, self.lose, self.held, self.batch, self.total = pipe, lose, held, batch, total
        self.schedule = pipe.schedule
        self.stage = jax.lax.axis_index(STAGE)
        axes = pipe.definition.axes
        learnt = part(axes, held.trained)
        self.learnt_stack = jax.tree.leaves(learnt.get(STACK, {}), is_leaf=lambda a: isinstance(a, tuple))
        self.learnt_ends = {name: a for name, a in learnt.items() if name != STACK}
        slots = held.slots(masters, learnt, masters)
        self.ends = {name: slot for name, slot in slots.items() if name != STACK}
        self.model_of = lambda ends: pipe.definition.bind(held.bound(weights, slots | ends, axes))
        self.zeros = jax.tree.map(held.zero, masters, learnt)
        self.model = self.model_of(self.ends)
        self.groups = pipe.groups(self.model)
        schedule = self.schedule
        # (group, microbatch) of each unit, and its slot. Past the last forward unit, while others are not done, the last again.
        forward_units = [schedule.forward_unit(min(u, schedule.units - 1)) for u in range(schedule.forward_ticks)]
        backward_units = [schedule.backward_unit(w) for w in range(schedule.units)]
        self.forward_table, self.backward_table = (jnp.asarray(t, jnp.int32) for t in (forward_units, backward_units))
        forward_slots, backward_slots, self.slots = schedule.slots
        self.forward_slots, self.backward_slots = (jnp.asarray(s, jnp.int32) for s in (forward_slots, backward_slots))
        # Only where all are forward before any is backward does the gradient of an output wait.
        self.waiting = schedule.microbatches if schedule.wait >= schedule.forward_ticks else 1

    def micro(self, m: jax.Array) -> Batch:
        return {k: jax.lax.dynamic_index_in_dim(a, m, keepdims=False) for k, a in self.batch.items()}

    def shared(self, micro: Batch) -> Any:
        return self.model.share(micro["segments"], micro["positions"])

    def entry(self, u: jax.Array) -> Any:
        """What the first stage takes as its forward unit u, where that is of its first group."""
        _, m = self.forward_table[jnp.clip(u, 0, self.schedule.forward_ticks - 1)]
        return self.model.enter(self.micro(m)["tokens"])

    def goes(self, t: jax.Array, carry: _Carry) -> tuple[Unit, Any]:
        """This stage's forward unit of tick t, and what it takes."""
        u = t - self.stage
        valid = (u >= 0) & (u < self.schedule.units)
        u = jnp.clip(u, 0, self.schedule.forward_ticks - 1)
        group, m = self.forward_table[u]
        x = _chosen((self.stage == 0) & (group == 0), carry.entering, carry.arrived)
        return Unit(self.shared(self.micro(m)).where(valid), group, self.forward_slots[u], valid), x

    def returns(self, t: jax.Array, carry: _Carry) -> tuple[Unit, Any]:
        """This stage's backward unit of tick t, and the gradient of what it gave."""
        w = t - self.schedule.wait - (self.pipe.last - self.stage)
        valid = (w >= 0) & (w < self.schedule.units)
        w = jnp.clip(w, 0, self.schedule.units - 1)
        group, m = self.backward_table[w]
        ready = jax.tree.map(lambda r: jax.lax.dynamic_index_in_dim(r, m % self.waiting, keepdims=False), carry.ready)
        dy = _chosen((self.stage == self.pipe.last) & (group == self.schedule.groups - 1), ready, carry.returned)
        return Unit(self.shared(self.micro(m)), group, self.backward_slots[w], valid), dy

    def leave(self, t: jax.Array, y: Any, carry: _Carry) -> _Carry:
        """The loss of the microbatch that leaves the last stage at tick t, and its gradients."""
        _, m = self.forward_table[t - self.pipe.last]
        micro = self.micro(m)

        def loss(ends: Params, y: Any) -> tuple[jax.Array, Any]:
            return self.lose(self.model_of(ends), y, micro, self.total)

        y = self.pipe.broadcast(y, self.pipe.last)
        (_, made), (d_ends, dy) = jax.value_and_grad(loss, (0, 1), has_aux=True)(self.ends, y)
        place = m % self.waiting
        ready = jax.tree.map(lambda r, d: jax.lax.dynamic_update_index_in_dim(r, d, place, 0), carry.ready, dy)
        sums = jax.tree.map(jnp.add, carry.sums, made)
        return dataclasses.replace(carry, ready=ready, ends=self.added(carry.ends, d_ends), sums=sums)

    def entered(self, t: jax.Array, dx: Any, carry: _Carry) -> _Carry:
        """The embedding's gradient of the microbatch that the first stage is done with at tick t."""
        w = t - self.schedule.wait - self.pipe.last
        valid = (w >= 0) & (w < self.schedule.units)
        _, m = self.backward_table[jnp.clip(w, 0, self.schedule.units - 1)]
        tokens = self.micro(m)["tokens"]
        _, vjp = jax.vjp(lambda ends: self.model_of(ends).enter(tokens), self.ends)
        d_entry = jax.tree.map(lambda g: jnp.where(valid, g, 0), self.pipe.broadcast(dx, 0))
        return dataclasses.replace(carry, ends=self.added(carry.ends, vjp(d_entry)[0]))

    def tick(self, phase: Phase, carry: _Carry, t: jax.Array) -> _Carry:
        """One tick of a phase."""
        groups, stack, y, dx = self.groups, carry.stack, None, None
        if phase.forward and phase.backward:
            units = *self.goes(t, carry), *self.returns(t, carry)
            y, kept, dx, stack = groups.both(*units, self.kept, carry.kept, stack)
        elif phase.forward:
            y, kept = groups.forward_keeping(*self.goes(t, carry), carry.kept)
        else:
            kept = carry.kept
            dx, stack = groups.backward(*self.returns(t, carry), self.kept, kept, stack)
        carry = dataclasses.replace(carry, kept=kept)
        if phase.backward:
            stack = [self.held.pinned(g, axes) for g, axes in zip(stack, self.learnt_stack, strict=True)]
            carry = dataclasses.replace(carry, stack=stack, returned=self.pipe.pass_on(dx, -1))
            carry = self.entered(t, dx, carry) if phase.ends else carry
        if phase.forward:
            carry = dataclasses.replace(carry, arrived=self.pipe.pass_on(y, 1))
            carry = self.leave(t, y, carry) if phase.leaves else carry
            if phase.ends:
                carry = dataclasses.replace(carry, entering=self.entry(t + 1))
        return carry

    def added(self, ends: Params, made: Params) -> Params:
        def add(before: jax.Array, g: jax.Array, axes: Axes) -> jax.Array:
            return before + self.held.pinned(g, axes)

        return jax.tree.map(add, ends, made, self.learnt_ends)

    def all(self) -> Any:
        """The whole step."""
        micro = self.micro(jnp.int32(0))
        x = jax.eval_shape(lambda: self.model.enter(micro["tokens"]))
        blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)
        empty = jax.tree.map(lambda a: self.pipe.inside.constrain(a, *RESIDUAL) if a.ndim == 3 else a, blank)
        self.kept = self.groups.kept(x, jax.eval_shape(lambda: self.shared(micro)))
        sums = jax.eval_shape(lambda: self.lose(self.model, empty, micro, self.total)[1])
        carry = _Carry(
            entering=self.entry(jnp.int32(0)),
            arrived=empty,
            returned=empty,
            kept=self.groups.buffers(self.kept, self.slots),
            ready=jax.tree.map(lambda x: jnp.zeros((self.waiting, *x.shape), x.dtype), x),
            stack=jax.tree.leaves(self.zeros.get(STACK, {})),  # by name, which is the order of a module's leaves too
            ends={name: g for name, g in self.zeros.items() if name != STACK},
            sums=jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), sums),
        )
        for count, phases in self.schedule.rounds:

            def one(carry: _Carry, later: jax.Array, phases: tuple[Phase, ...] = phases) -> tuple[_Carry, None]:
                for phase in phases:
                    ticks = later + jnp.arange(phase.ticks.start, phase.ticks.stop, dtype=jnp.int32)
                    carry, _ = jax.lax.scan(lambda carry, t, phase=phase: (self.tick(phase, carry, t), None), carry, ticks)
                return carry, None

            later = jnp.arange(count, dtype=jnp.int32) * (self.schedule.stages * self.schedule.groups)
            carry = jax.lax.scan(one, carry, later)[0] if count > 1 else one(carry, later[0])[0]
        grads: Params = dict(carry.ends)
        if STACK in self.zeros:
            grads[STACK] = jax.tree.unflatten(jax.tree.structure(self.zeros[STACK]), carry.stack)
        return carry.sums, grads


def _chosen(mine: jax.Array, x: Any, other: Any) -> Any:
    """x where `mine`, else the other."""
    return jax.tree.map(lambda a, b: jnp.where(mine, a, b), x, other)
