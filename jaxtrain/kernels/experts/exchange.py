"""Dispatch of tokens to the devices of their experts, and return of the results. Runs inside a shard_map.

A device's assignments are its (token, j-th choice) pairs, numbered token x k + j. Sorted by expert, they form one run for each
device of the expert axis. A device's run consists of one run for each of its experts. The all-to-all sends a buffer with the
same number of slots for each device, and is its own inverse. The buffer has one of three layouts:

    with moe.capacity_factor    `room` slots for each expert; assignments that do not fit are dropped
    without, on one device      a slot for each assignment; no communication
    without, on several         `room` slots for each device; assignments that do not fit are sent in further rounds of
                                `further_room` slots, so none is dropped

Received slots are sorted by expert for grouped_matmul.py. With one expert per device and moe.impl=auto, plain matmuls take all
slots as the expert's rows, in the order received. Rows are gathered by index and never scatter-added, so results do not depend
on an order of additions.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config.shapes import FIRST_ROUND, FURTHER_ROUND


class Route(NamedTuple):
    """One round of a dispatch: the assignment in each slot that is sent, and the row of each slot that is received."""

    take_S: jax.Array  # the assignment in each slot; T x k for an empty slot
    slot_Tk: jax.Array  # the slot of each assignment; S if the assignment is not sent in this round
    perm_R: jax.Array  # the received slot in each row; (0,) if rows have the order of received slots
    row_R: jax.Array  # the row of each received slot, the inverse of perm_R
    sizes_E: jax.Array  # number of rows of each expert of this device


class DispatchPlan(NamedTuple):
    """A device's assignments, sorted by expert, and the route of the first round."""

    order_n: jax.Array  # assignments by expert, assignments of padding last
    rank_Tk: jax.Array  # the index of each assignment in order_n
    counts_E: jax.Array  # number of this device's assignments for each expert
    received_XE: jax.Array  # number of each device's assignments for each expert of this device; (0,) if unused
    further: jax.Array  # (1,): number of rounds after the first; the same on all devices
    dropped: jax.Array  # (1,): number of this device's assignments that are dropped
    first: Route


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The numbers of devices, experts and slots of a dispatch; static under jit."""

    experts: int  # on all devices
    tokens: int  # T, of this device
    k: int  # experts of a token
    over: tuple[str, ...]  # mesh axes that shard the experts
    ranks: int  # devices along `over`
    devices: tuple[str, ...]  # mesh axes along which devices have different tokens or experts
    capacity: float  # slots of each expert, as a multiple of the slots for an even load; 0: no assignment is dropped
    single_expert: bool  # each device has one expert, whose rows are all slots, including empty ones

    @property
    def local_experts(self) -> int:
        """Return the number of experts of one device."""
        return self.experts // self.ranks

    @property
    def room(self) -> int:
        """Return the number of slots for each device in the first round; with a capacity, for each expert."""
        n = self.tokens * self.k
        if self.capacity:
            return min(self.tokens, math.ceil(self.capacity * n / self.experts))
        return n if self.ranks == 1 else min(n, math.ceil(FIRST_ROUND * n / self.ranks))

    @property
    def further_room(self) -> int:
        """Return the number of slots for each device in a round after the first."""
        return min(self.room, math.ceil(FURTHER_ROUND * self.tokens * self.k / self.ranks))

    @property
    def overflows(self) -> bool:
        """Return whether a second round may be needed."""
        return not self.capacity and self.room < self.tokens * self.k

    # ---- Plans

    def plan(self, chosen_Tk: jax.Array) -> DispatchPlan:
        """Return the sorted assignments and the first round's route. chosen_Tk: int32 experts; `self.experts` for padding."""
        chosen_n = chosen_Tk.reshape(-1)
        order_n = jnp.argsort(chosen_n, stable=True).astype(jnp.int32)
        rank_Tk = _inverse(order_n).reshape(chosen_Tk.shape)
        counts_E = jnp.sum(chosen_n[:, None] == jnp.arange(self.experts)[None], axis=0, dtype=jnp.int32)
        local_only = self.capacity or self.single_expert or self.ranks == 1
        received_XE = (
            self._empty_route.sizes_E if local_only else self._all_to_all(counts_E.reshape(self.ranks, self.local_experts))
        )
        none = jnp.zeros((1,), jnp.int32)
        if self.capacity:
            dropped = jnp.maximum(counts_E - self.room, 0).sum(keepdims=True)
            assignments = DispatchPlan(order_n, rank_Tk, counts_E, received_XE, none, dropped, self._empty_route)
            return assignments._replace(first=self._capacity_route(assignments, chosen_Tk))
        excess = counts_E.reshape(self.ranks, self.local_experts).sum(1).max(keepdims=True) - self.room
        further = jnp.maximum(-(-excess // self.further_room), 0)
        further = jax.lax.pmax(further, self.devices) if self.overflows and self.devices else further
        assignments = DispatchPlan(order_n, rank_Tk, counts_E, received_XE, further, none, self._empty_route)
        return assignments._replace(first=self._round(assignments, chosen_Tk, jnp.int32(0), self.room))

    @property
    def _empty_route(self) -> Route:
        return Route(*(jnp.zeros((0,), jnp.int32) for _ in Route._fields))

    def further_round(self, plan: DispatchPlan, chosen_Tk: jax.Array, index: jax.Array) -> Route:
        """Return the route of a round after the first. index: 0 for the second round."""
        return self._round(plan, chosen_Tk, self.room + index * self.further_room, self.further_room)

    def _round(self, plan: DispatchPlan, chosen_Tk: jax.Array, first: jax.Array, room: int) -> Route:
        """Return the route of the assignments `first` to `first + room` of each device's run."""
        n = self.tokens * self.k
        totals_X = plan.counts_E.reshape(self.ranks, self.local_experts).sum(1)
        starts_X = jnp.cumsum(totals_X) - totals_X
        at_XC = first + jnp.arange(room)[None, :]
        take_XC = jnp.take(plan.order_n, starts_X[:, None] + at_XC, mode="clip")
        take_XC = jnp.where(at_XC < totals_X[:, None], take_XC, n)
        to_Tk = chosen_Tk // self.local_experts
        within_Tk = plan.rank_Tk - jnp.take(starts_X, to_Tk, mode="clip") - first
        travels = (to_Tk < self.ranks) & (within_Tk >= 0) & (within_Tk < room)
        slot_Tk = jnp.where(travels, to_Tk * room + within_Tk, self.ranks * room)
        none = self._empty_route.perm_R
        if self.ranks == 1:
            return Route(take_XC.reshape(-1), slot_Tk, none, none, plan.counts_E)
        if self.single_expert:
            return Route(take_XC.reshape(-1), slot_Tk, none, none, jnp.full((1,), self.ranks * room, jnp.int32))
        ends_XE = jnp.cumsum(plan.received_XE, axis=1)
        expert_XC = jnp.sum(at_XC[:, :, None] >= ends_XE[:, None, :], axis=2)
        perm_R = jnp.argsort(expert_XC.reshape(-1), stable=True).astype(jnp.int32)
        window = jnp.clip(jnp.stack([ends_XE - plan.received_XE, ends_XE]) - first, 0, room)
        return Route(take_XC.reshape(-1), slot_Tk, perm_R, _inverse(perm_R), (window[1] - window[0]).sum(0))

    def _capacity_route(self, plan: DispatchPlan, chosen_Tk: jax.Array) -> Route:
        starts_E = jnp.cumsum(plan.counts_E) - plan.counts_E
        at_EC = jnp.broadcast_to(jnp.arange(self.room)[None, :], (self.experts, self.room))
        take_EC = jnp.take(plan.order_n, starts_E[:, None] + at_EC, mode="clip")
        take_EC = jnp.where(at_EC < plan.counts_E[:, None], take_EC, self.tokens * self.k)
        within_Tk = plan.rank_Tk - jnp.take(starts_E, chosen_Tk, mode="clip")
        travels = (chosen_Tk < self.experts) & (within_Tk < self.room)
        slot_Tk = jnp.where(travels, chosen_Tk * self.room + within_Tk, self.experts * self.room)
        none = self._empty_route.perm_R
        sizes_E = jnp.full((self.local_experts,), self.room * self.ranks, jnp.int32)
        return Route(take_EC.reshape(-1), slot_Tk, none, none, sizes_E)

    # ---- Communication

    def send(self, x_TD: jax.Array, route: Route) -> jax.Array:
        """Dispatch tokens; return the rows (R, D) that this device's experts receive, with zeros in unused rows."""
        return self._sort_slots(self._all_to_all(_rows(x_TD, route.take_S // self.k)), route)

    def send_numbers(self, a_Tk: jax.Array, route: Route) -> jax.Array:
        """Dispatch a number of each assignment, as `send` does for tokens; return the number of each row, (R,)."""
        return self._sort_slots(self._all_to_all(_rows(a_Tk.reshape(-1, 1), route.take_S)), route)[:, 0]

    def receive(self, rows_RD: jax.Array, route: Route) -> jax.Array:
        """Send rows back to the devices of their tokens; return the sum of each token's rows, f32 (T, D)."""
        slots = self._all_to_all(self._unsort_rows(rows_RD, route))
        return jnp.sum(_rows(slots, route.slot_Tk).astype(jnp.float32), axis=1)

    def receive_numbers(self, a_R: jax.Array, route: Route) -> jax.Array:
        """Send one number of each row back to its token's device. Return each assignment's number, (T, k); 0 without a row."""
        return _rows(self._all_to_all(self._unsort_rows(a_R[:, None], route)), route.slot_Tk)[:, :, 0]

    def _all_to_all(self, slots: jax.Array) -> jax.Array:
        """Exchange slots by an all-to-all: block i of this device's slots goes to device i of the expert axis."""
        if self.ranks == 1:
            return slots
        blocks = slots.reshape(self.ranks, -1, *slots.shape[1:])
        return jax.lax.all_to_all(blocks, self.over, split_axis=0, concat_axis=0).reshape(slots.shape)

    def _sort_slots(self, slots: jax.Array, route: Route) -> jax.Array:
        if self.capacity:
            return jnp.swapaxes(slots.reshape(self.ranks, self.local_experts, self.room, -1), 0, 1).reshape(slots.shape)
        return jnp.take(slots, route.perm_R, axis=0, mode="clip") if route.perm_R.size else slots

    def _unsort_rows(self, rows: jax.Array, route: Route) -> jax.Array:
        if self.capacity:
            return jnp.swapaxes(rows.reshape(self.local_experts, self.ranks, self.room, -1), 0, 1).reshape(rows.shape)
        return jnp.take(rows, route.row_R, axis=0, mode="clip") if route.row_R.size else rows


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return the rows of x at `index`, zeros where the index is past the last row."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _inverse(permutation: jax.Array) -> jax.Array:
    n = permutation.shape[0]
    return jnp.zeros((n,), jnp.int32).at[permutation].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)
