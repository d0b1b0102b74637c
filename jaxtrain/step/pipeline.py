"""Compute the gradients of a step on pipeline stages, by one SPMD program that follows a schedule tick by tick (stages.py).

A stage has its own layers; the data, fsdp, expert, tensor and seq axes are used as without a pipeline. In every tick a stage
runs one group of its layers (Megatron's virtual stage) forward on one microbatch, and one group backward on another. Then it
sends the results to its neighbours.
Forward and backward passes of different microbatches are in one loop body, so autodiff cannot order them. Saved activations are
in buffers with a slot for each pass in flight. Each gradient is added to the sums of the stack at once.

The embedding and the head are shared by all stages. Their tables are sharded by vocabulary over the stages, as over a tensor
axis: each stage looks up its rows for the microbatch that enters the pipeline, and computes its shard of the logits of the
microbatch that leaves. So all stages have equal work and memory. Dense layers before a stack with experts are replicated: all
stages run them for the microbatch that enters.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config.layout import Arrangement
from jaxtrain.config.shapes import STACK
from jaxtrain.models.attention import Shared
from jaxtrain.models.module import Definition, Params
from jaxtrain.models.remat import Body, Kind, add_at, flatten, kinds_at, layer_at, save_at, take_layer
from jaxtrain.models.transformer import KVCache, Transformer
from jaxtrain.models.zero import Zero
from jaxtrain.sharding import Placement
from jaxtrain.step.loss import Batch
from jaxtrain.step.stages import STAGE, PipelinePhase, Schedule

Buffers = list[jax.Array]  # of all saved activations: each (slots x checkpoints of a group, ...)


class Pass(NamedTuple):
    """The pass of one microbatch through one group of layers."""

    shared: Any  # the arrays of the microbatch that all layers share
    group: jax.Array
    slot: jax.Array
    valid: jax.Array  # bool (); False in a stage's bubble: it executes, and the result is discarded


class Slot(NamedTuple):
    """A slot of the stack of layers."""

    kind: Kind  # of its layer; for an empty slot 0
    full: bool | jax.Array  # bool (); False for an empty slot

    def run(self, body: Body, carry: Any, layer: Any, shared: Shared) -> Any:
        """Return `body(carry, layer, shared, kind)`; for an empty slot `carry`, whatever the slot's weights are."""
        if self.full is True:
            return body(carry, layer, shared, self.kind)
        # Zeros for the body of an empty slot: a gradient of its input that is NaN ends here.
        body_input = _select(self.full, carry, jax.tree.map(jnp.zeros_like, carry))
        return _select(self.full, body(body_input, layer, shared.with_valid(self.full), self.kind), carry)


class StageLayers:
    """The layers of this stage: groups of `per_group` neighbouring slots of one stack.

    Args:
      model: the model with this stage's shard of the stack. Weights that are differentiated are `zero.StackWeight`.
      kinds: the kind of the layer in each slot of the global stack; None for an empty slot.
      first: the index of this stage's first slot in the global stack.
      per_group: slots in a group, a multiple of the layers under each activation checkpoint (remat.every).
    """

    def __init__(self, model: Transformer, kinds: Sequence[int | None], first: jax.Array, per_group: int):
        self._stack, self._trained, self._fixed, self.sums = flatten(model.layers)
        self._layers, self._plan = self._stack.layers(self._trained, self._fixed), model.remat
        self._kinds, self._full = [kind or 0 for kind in kinds], [kind is not None for kind in kinds]
        self._first, self._per_group = first, per_group
        self._each = self._plan.layers_each
        self._checkpoints = per_group // self._each  # of a group
        # With a period in each slot, its layers have their own checkpoints.
        has_period = self._plan.period > 1
        self._body = self._plan.element_body(self._plan.checkpoint(model.layer)) if has_period else model.layer
        self._run = self._run_checkpoint if has_period else self._plan.checkpoint(self._run_checkpoint)

    def _run_checkpoint(self, carry: Any, layers: list[Any], shared: Shared, *slots: Any) -> Any:
        """Run the layers of one activation checkpoint. slots: the kind of each, then whether each is full."""
        for layer, kind, full in zip(layers, slots[: self._each], slots[self._each :], strict=True):
            carry = Slot(kind, full).run(self._body, carry, layer, shared)
        return carry

    def _slots_at(self, i: jax.Array, count: int) -> list[Slot]:
        kinds, full = kinds_at(self._kinds, self._first + i, count), [True] * count
        if not all(self._full):
            full = [jnp.asarray(self._full)[self._first + i + q] for q in range(count)]
        return [Slot(*slot) for slot in zip(kinds, full, strict=True)]

    def _differentiate(self, x: Any, shared: Any, i: jax.Array) -> tuple[Any, Any]:
        kinds, full = zip(*self._slots_at(i, self._each), strict=True)
        return self._stack.differentiate(self._run, x, self._trained, self._fixed, i, self._each, shared, (*kinds, *full))

    def saved_shapes(self, x: Any, shared: Any) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """Return (tree structure, shapes) of the activations that one activation checkpoint saves for `x` and `shared`."""
        trees = []

        def leaves(x: Any, shared: Any) -> list[jax.Array]:
            flat, tree = jax.tree.flatten(self._differentiate(x, shared, jnp.int32(0))[1])
            trees.append(tree)
            return flat

        shapes = jax.eval_shape(leaves, x, shared)
        return trees[0], shapes

    def buffers(self, shapes: Sequence[jax.ShapeDtypeStruct], slots: int) -> Buffers:
        """Return buffers of zeros for the saved activations of `slots` passes."""
        return [jnp.zeros((slots * self._checkpoints, *a.shape), a.dtype) for a in shapes]

    def _loop[C](self, step: Callable[[C, jax.Array], C], carry: C, order: range) -> C:
        if len(order) == 1 or self._plan.unroll:
            for i in order:
                carry = step(carry, jnp.int32(i))
            return carry
        return jax.lax.scan(lambda carry, i: (step(carry, i), None), carry, jnp.asarray(list(order), jnp.int32))[0]

    def run_slots[C](self, step: Callable[[C, Any, Slot, jax.Array], C], carry: C, group: jax.Array) -> C:
        """Return the carry after `step(carry, layer, slot, index of the slot on this stage)` for each slot of a group.

        The layers run one after another, and no activations are saved.
        """

        def run_slot(carry: C, offset: jax.Array) -> C:
            i = group * self._per_group + offset
            return step(carry, layer_at(self._layers, i), self._slots_at(i, 1)[0], i)

        return self._loop(run_slot, carry, range(self._per_group))

    def _forward(self, this: Pass, x: Any, buffers: Buffers, checkpoint: jax.Array, slot: jax.Array) -> tuple[Any, Buffers]:
        """Run the layers of one activation checkpoint forward. Return (output, buffers with the saved activations)."""
        y, vjp = self._differentiate(x, this.shared, this.group * self._per_group + checkpoint * self._each)
        index = slot * self._checkpoints + checkpoint
        return y, [save_at(b, leaf, index) for b, leaf in zip(buffers, jax.tree.leaves(vjp), strict=True)]

    def _backward(
        self, this: Pass, dy: Any, tree: Any, leaves: list[jax.Array], sums: list[jax.Array], checkpoint: jax.Array
    ) -> tuple[Any, list[jax.Array]]:
        """Run the layers of one activation checkpoint backward. Return (gradient of the input, updated sums of gradients)."""
        first = this.group * self._per_group + checkpoint * self._each
        vjp = jax.tree.unflatten(tree, leaves)
        dx, grads = self._stack.backward(vjp, self._trained, self._fixed, first, self._each, this.shared, dy)
        for q, (layer_grads, slot) in enumerate(zip(grads, self._slots_at(first, self._each), strict=True)):
            # The gradient of an invalid pass, or of an empty slot, may have any value, including NaN.
            valid = this.valid & slot.full
            added = [jnp.where(valid, g.astype(s.dtype), 0) for s, g in zip(sums, layer_grads, strict=True)]
            sums = [add_at(s, g, first + q) for s, g in zip(sums, added, strict=True)]
        return dx, sums

    def _saved_leaves(self, this: Pass, buffers: Buffers, checkpoint: jax.Array) -> list[jax.Array]:
        return [take_layer(b, this.slot * self._checkpoints + checkpoint) for b in buffers]

    def forward(self, this: Pass, x: Any, buffers: Buffers) -> tuple[Any, Buffers]:
        """Return a group's output, and the buffers with its saved activations in the pass's slot."""
        return self._loop(lambda carry, c: self._forward(this, *carry, c, this.slot), (x, buffers), range(self._checkpoints))

    def backward(self, this: Pass, dy: Any, tree: Any, buffers: Buffers, sums: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
        """Return the gradient of a group's input, and the sums with its layers' gradients added if the pass is valid."""

        def step(carry: tuple[Any, list[jax.Array]], checkpoint: jax.Array) -> tuple[Any, list[jax.Array]]:
            dy, sums = carry
            return self._backward(this, dy, tree, self._saved_leaves(this, buffers, checkpoint), sums, checkpoint)

        return self._loop(step, (dy, sums), range(self._checkpoints)[::-1])

    def forward_and_backward(
        self, out: Pass, x: Any, back: Pass, dy: Any, tree: Any, buffers: Buffers, sums: list[jax.Array]
    ) -> tuple[Any, Buffers, Any, list[jax.Array]]:
        """Run the pass `out` forward and the pass `back` backward, so that collectives of one overlap with the other's compute.

        The two passes are in different slots. Return (output of `out`, buffers, gradient of the input of `back`, sums).
        """

        def step(carry: Any, checkpoint: jax.Array) -> Any:
            x, buffers, dy, sums = carry
            leaves = self._saved_leaves(back, buffers, mirror := self._checkpoints - 1 - checkpoint)
            # No write happens before this read, otherwise the compiler would keep a copy of the buffers.
            leaves, slot = jax.lax.optimization_barrier((leaves, out.slot))
            dx, sums = self._backward(back, dy, tree, leaves, sums, mirror)
            return *self._forward(out, x, buffers, checkpoint, slot), dx, sums

        return self._loop(step, (x, buffers, dy, sums), range(self._checkpoints))


@dataclasses.dataclass(frozen=True)
class PipelineModel:
    """A model on pipeline stages, without arrays. All methods compute with local shards, inside a shard_map."""

    placement: Placement
    definition: Definition
    arrangement: Arrangement
    schedule: Schedule
    kinds: Sequence[int]  # of each layer

    @property
    def last(self) -> int:
        """Return the index of the last stage."""
        return self.schedule.stages - 1

    def layers(self, model: Transformer) -> StageLayers:
        """Return the layers of a model that are on this stage."""
        kinds = [None if layer is None else self.kinds[layer] for layer in self.arrangement.order]
        first = jax.lax.axis_index(STAGE) * self.arrangement.groups * self.arrangement.per_group
        return StageLayers(model, kinds, first, self.arrangement.per_group)

    def send(self, tree: Any, by: int) -> Any:
        """Send arrays to the next stage (by = 1) or to the previous stage (by = -1). Return the received arrays.

        With several groups per stage, the stages form a ring. Otherwise the first stage (by = 1) or the last stage (by = -1)
        receives zeros.
        """
        stages = self.schedule.stages
        links = [(s, (s + by) % stages) for s in range(stages) if self.schedule.groups > 1 or 0 <= s + by < stages]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE, links), tree)

    def broadcast(self, tree: Any) -> Any:
        """Send the last stage's arrays to all stages, as a sum to which the other stages add zeros."""
        is_last = jax.lax.axis_index(STAGE) == self.last
        return jax.tree.map(lambda x: jax.lax.psum(jnp.where(is_last, x, 0), STAGE), tree)

    def gradients(
        self, objective: Any, zero: Zero, base: Params, copies: Params, trained_weights: Params, batch: Batch, total: jax.Array
    ) -> tuple[Any, Params]:
        """Return this device's share of (report, gradients of `trained_weights`) of a batch, (A, B, T).

        There is no sum over devices yet.
        """
        return _Step(self, objective, zero, base, copies, trained_weights, batch, total).run()

    def hidden(self, model: Transformer, micro: Batch) -> jax.Array:
        """Return the final hidden states of one microbatch, on all stages. Stages run one after the other, without overlap."""
        shared, layers = model.share(micro["segments"], micro["positions"]), self.layers(model)

        def run_group(x: Any, state: Any, group: jax.Array, is_active: jax.Array) -> tuple[Any, Any]:
            group_shared = shared.with_valid(is_active)
            body = model.remat.element_body(model.layer)
            return layers.run_slots(lambda x, layer, slot, _: slot.run(body, x, layer, group_shared), x, group), state

        x, _ = self.run_in_order(model.enter(micro["tokens"], shared), (), run_group)
        return model.final_hidden(x)[0]

    def decode(self, model: Transformer, tokens_BT: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Return the hidden states of new tokens, on all stages, and the cache with the tokens in it.

        A stage caches the keys and values of its own layers.
        """
        shared, cache = model.append(tokens_BT, cache)
        layers = self.layers(model)

        def run_group(x: Any, kv: Any, group: jax.Array, is_active: jax.Array) -> tuple[Any, Any]:
            def body(carry: tuple[Any, Any], block: Any, shared: Shared, kind: Kind) -> tuple[Any, Any]:
                x, kv = carry
                return model.element_with_cache(x, block, shared, kind, kv)

            def run_layer(carry: tuple[Any, Any], block: Any, slot: Slot, i: jax.Array) -> tuple[Any, Any]:
                x, kv = carry
                old = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), kv)
                x, new = slot.run(body, (x, old), block, shared.with_valid(is_active))
                return x, jax.tree.map(
                    lambda a, n: jax.lax.dynamic_update_index_in_dim(a, n, i, 0), kv, _select(is_active, new, old)
                )

            return layers.run_slots(run_layer, (x, kv), group)

        x, cache = model.enter_with_cache(tokens_BT, shared, cache)
        x, kv = self.run_in_order(x, cache.kv, run_group)
        return model.final_hidden(x)[0], dataclasses.replace(cache, kv=kv)

    def run_in_order(
        self, x: Any, state: Any, run_group: Callable[[Any, Any, jax.Array, jax.Array], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        """Return (the last stage's output for the input x, on all stages; this stage's updated `state`).

        The groups run one after the other, each on its stage, by `run_group(x, state, group, is_active)`. The other stages
        execute the same SPMD program with `is_active` False, and their results are discarded.
        """
        stages, turns = self.schedule.stages, self.schedule.stages * self.schedule.groups
        stage = jax.lax.axis_index(STAGE)

        def tick(carry: tuple[Any, Any], t: jax.Array) -> tuple[tuple[Any, Any], None]:
            x, state = run_group(*carry, t // stages, t % stages == stage)
            return (self.send(x, 1), state), None

        carry = jax.lax.scan(tick, (x, state), jnp.arange(turns - 1, dtype=jnp.int32))[0]
        x, state = run_group(*carry, jnp.int32(self.schedule.groups - 1), stage == self.last)
        return self.broadcast(x), state


@dataclasses.dataclass(frozen=True)
class _Carry:
    """The arrays that are carried from tick to tick."""

    entering: Any  # embeddings of the microbatch that enters next
    arrived: Any  # from the previous stage: the output of its last pass
    returned: Any  # from the next stage: the gradient of its last pass's input
    buffers: Buffers
    ready: Any  # gradients of the last layer's outputs, by microbatch, if they must wait
    stack: list[jax.Array]  # sums of the layers' gradients
    ends: Params  # sums of the gradients of all other weights
    report: Any


jax.tree_util.register_dataclass(_Carry, [f.name for f in dataclasses.fields(_Carry)], [])


class _Step:
    """Computes this stage's gradients of one train step."""

    def __init__(
        self,
        pipe: PipelineModel,
        objective: Any,
        zero: Zero,
        base: Params,
        copies: Params,
        trained_weights: Params,
        batch: Batch,
        total: jax.Array,
    ):
        self.pipe, self.objective, self.batch, self.total = pipe, objective, batch, total
        self.schedule, self.stage = pipe.schedule, jax.lax.axis_index(STAGE)
        self.zeros = zero.zero_sums(trained_weights)
        sums = {name: s for name, s in self.zeros.items() if name == STACK}
        self.ends = {name: w for name, w in trained_weights.items() if name != STACK}
        self.model_of = lambda ends: pipe.definition.bind(zero.microbatch_weights(base, copies, ends, sums, adds=True))
        self.model = self.model_of(self.ends)
        self.layers = pipe.layers(self.model)
        schedule = self.schedule
        # (group, microbatch) of each pass, and its slot. After its last forward pass, a stage repeats that pass.
        forward = [schedule.forward_unit(min(u, schedule.units - 1)) for u in range(schedule.forward_ticks)]
        backward = [schedule.backward_unit(w) for w in range(schedule.units)]
        self.forward_table, self.backward_table = (jnp.asarray(t, jnp.int32) for t in (forward, backward))
        forward_slots, backward_slots, self.slots = schedule.slots
        self.forward_slots, self.backward_slots = (jnp.asarray(s, jnp.int32) for s in (forward_slots, backward_slots))
        # The gradient of an output waits only if all forward passes come before all backward passes.
        self.waiting = schedule.microbatches if schedule.wait >= schedule.forward_ticks else 1

    def micro(self, m: jax.Array) -> Batch:
        """Return the arrays of microbatch m, (B, T) each."""
        return {k: jax.lax.dynamic_index_in_dim(a, m, keepdims=False) for k, a in self.batch.items()}

    def shared(self, micro: Batch) -> Any:
        """Return the arrays of a microbatch that all layers share, such as rotary tables (Transformer.share)."""
        return self.model.share(micro["segments"], micro["positions"])

    def entry(self, unit: jax.Array) -> Any:
        """Return `Transformer.enter` of the microbatch of a forward pass: the first stage's input if the pass is of group 0."""
        _, m = self.forward_table[jnp.clip(unit, 0, self.schedule.forward_ticks - 1)]
        micro = self.micro(m)
        return self.model.enter(micro["tokens"], self.shared(micro))

    def forward_pass(self, t: jax.Array, carry: _Carry) -> tuple[Pass, Any]:
        """Return (this stage's forward pass of tick t, the input of the pass)."""
        unit = t - self.stage
        valid = (unit >= 0) & (unit < self.schedule.units)
        unit = jnp.clip(unit, 0, self.schedule.forward_ticks - 1)
        group, m = self.forward_table[unit]
        x = _select((self.stage == 0) & (group == 0), carry.entering, carry.arrived)
        return Pass(self.shared(self.micro(m)).with_valid(valid), group, self.forward_slots[unit], valid), x

    def backward_pass(self, t: jax.Array, carry: _Carry) -> tuple[Pass, Any]:
        """Return (this stage's backward pass of tick t, the gradient of the output of the group)."""
        unit = t - self.schedule.wait - (self.pipe.last - self.stage)
        valid = (unit >= 0) & (unit < self.schedule.units)
        unit = jnp.clip(unit, 0, self.schedule.units - 1)
        group, m = self.backward_table[unit]
        ready = jax.tree.map(lambda r: jax.lax.dynamic_index_in_dim(r, m % self.waiting, keepdims=False), carry.ready)
        dy = _select((self.stage == self.pipe.last) & (group == self.schedule.groups - 1), ready, carry.returned)
        return Pass(self.shared(self.micro(m)), group, self.backward_slots[unit], valid), dy

    def add_loss(self, t: jax.Array, y: Any, carry: _Carry) -> _Carry:
        """Add the loss of the microbatch that leaves the last stage at tick t, and the loss's gradients, to the carry."""
        _, m = self.forward_table[t - self.pipe.last]
        micro = self.micro(m)

        def loss(ends: Params, y: Any) -> tuple[jax.Array, Any]:
            model = self.model_of(ends)
            hidden, statistics = model.final_hidden(self.pipe.broadcast(y))
            return self.objective(hidden, statistics, model.head_VD, micro, self.total)

        (_, micro_report), (d_ends, dy) = jax.value_and_grad(loss, (0, 1), has_aux=True)(self.ends, y)
        index = m % self.waiting
        ready = jax.tree.map(lambda r, d: jax.lax.dynamic_update_index_in_dim(r, d, index, 0), carry.ready, dy)
        report = jax.tree.map(jnp.add, carry.report, micro_report)
        return dataclasses.replace(carry, ready=ready, ends=add_gradients(carry.ends, d_ends), report=report)

    def add_entry_grads(self, t: jax.Array, dx: Any, carry: _Carry) -> _Carry:
        """Add the gradients of embedding and dense layers for the microbatch whose backward pass ends at tick t."""
        unit = t - self.schedule.wait - self.pipe.last
        valid = (unit >= 0) & (unit < self.schedule.units) & (self.stage == 0)
        _, m = self.backward_table[jnp.clip(unit, 0, self.schedule.units - 1)]
        micro = self.micro(m)
        shared = self.shared(micro)
        _, vjp = jax.vjp(lambda ends: self.model_of(ends).enter(micro["tokens"], shared), self.ends)
        d_entry = jax.tree.map(lambda g: jnp.where(valid, g, 0), dx)
        return dataclasses.replace(carry, ends=add_gradients(carry.ends, vjp(d_entry)[0]))

    def tick(self, phase: PipelinePhase, carry: _Carry, t: jax.Array) -> _Carry:
        """Run tick t of a phase, and return the carry for the next tick."""
        layers, stack, y, dx = self.layers, carry.stack, None, None
        buffers = carry.buffers
        if phase.forward and phase.backward:
            passes = *self.forward_pass(t, carry), *self.backward_pass(t, carry)
            y, buffers, dx, stack = layers.forward_and_backward(*passes, self.tree, buffers, stack)
        elif phase.forward:
            y, buffers = layers.forward(*self.forward_pass(t, carry), buffers)
        else:
            dx, stack = layers.backward(*self.backward_pass(t, carry), self.tree, buffers, stack)
        carry = dataclasses.replace(carry, buffers=buffers)
        if phase.backward:
            carry = dataclasses.replace(carry, stack=stack, returned=self.pipe.send(dx, -1))
            carry = self.add_entry_grads(t, dx, carry) if phase.ends else carry
        if phase.forward:
            carry = dataclasses.replace(carry, arrived=self.pipe.send(y, 1))
            carry = self.add_loss(t, y, carry) if phase.leaves else carry
            if phase.ends:
                carry = dataclasses.replace(carry, entering=self.entry(t + 1))
        return carry

    def run(self) -> tuple[Any, Params]:
        """Run all ticks. Return this device's share of (report, gradients): no sum over devices yet."""
        micro = self.micro(jnp.int32(0))
        x = self.model.enter(micro["tokens"], self.shared(micro))
        empty = jax.tree.map(jnp.zeros_like, x)
        self.tree, shapes = self.layers.saved_shapes(x, self.shared(micro))
        report = jax.eval_shape(lambda: self.objective(*self.model.final_hidden(x), self.model.head_VD, micro, self.total)[1])
        carry = _Carry(
            entering=self.entry(jnp.int32(0)),
            arrived=empty,
            returned=empty,
            buffers=self.layers.buffers(shapes, self.slots),
            ready=jax.tree.map(lambda x: jnp.zeros((self.waiting, *x.shape), x.dtype), x),
            stack=self.layers.sums,
            ends={name: g for name, g in self.zeros.items() if name != STACK},
            report=jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), report),
        )
        for count, phases in self.schedule.rounds:

            def run_round(carry: _Carry, offset: jax.Array, phases: tuple[PipelinePhase, ...] = phases) -> tuple[_Carry, None]:
                for phase in phases:
                    ticks = offset + jnp.arange(phase.ticks.start, phase.ticks.stop, dtype=jnp.int32)
                    carry, _ = jax.lax.scan(lambda carry, t, phase=phase: (self.tick(phase, carry, t), None), carry, ticks)
                return carry, None

            offset = jnp.arange(count, dtype=jnp.int32) * (self.schedule.stages * self.schedule.groups)
            carry = jax.lax.scan(run_round, carry, offset)[0] if count > 1 else run_round(carry, offset[0])[0]
        grads: Params = dict(carry.ends)
        if STACK in self.zeros:
            # By name, which is also the order of a module's leaves.
            grads[STACK] = jax.tree.unflatten(jax.tree.structure(self.zeros[STACK]), carry.stack)
        return carry.report, grads


def add_gradients(sums: Params, grads: Params) -> Params:
    """Return the sums of two trees of gradients, each in the dtype of its leaf in `sums`."""
    return jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, grads)


def _select(condition: jax.Array | bool, x: Any, y: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)
