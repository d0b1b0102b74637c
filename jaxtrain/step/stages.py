"""Schedules of pipeline stages: the layers of each stage, and the order of its passes. Imports no jax.

A stage holds `groups` groups of consecutive layers, Megatron's virtual stages. Group q is on stage q % stages, so a microbatch
passes through all stages once for each group of a stage (Narayanan et al. 2021, arXiv:2104.04473, section 2.2; one group: a
plain pipeline). All groups have the same number of slots. If groups do not divide the layers evenly, the last slots of some
groups are empty. An empty slot is the identity, and its weights are not trained (pipeline.Slot).

All stages run in lockstep: in a tick each runs one group forward on one microbatch, and one group backward on another. A unit
is a pass of one microbatch through one group. Units are ordered in runs of `stages` microbatches: group 0 on the first run,
group 1 on the same run, ..., then the next run. Stage s runs forward unit u at tick u + s. The unit's output arrives at the
next tick at stage s + 1; from the last stage, it arrives at the first stage for the next group. Backward units have the same
order of microbatches and the reverse order of groups. Stage s runs backward unit w at tick w + `wait` + stages - 1 - s:

    1f1b, interleaved   wait = groups x stages: a microbatch's backward pass starts in the tick after its last forward unit.
                        So the forward and the backward unit of a tick are independent, and one computes during the
                        communication of the other. For any number of microbatches, a stage has at most (groups + 1) x stages
                        units in flight.
    gpipe               wait = all forward ticks (Huang et al. 2019, arXiv:1811.06965): every unit is in flight.

Ticks before the first backward unit have only forward units, and ticks after the last forward unit only backward units. So a
step takes (groups x microbatches + stages - 1) times a group's forward and backward pass in every schedule. The bubble is
(stages - 1) / (groups x microbatches + stages - 1) of the step time.
"""

import dataclasses
import functools
import heapq

from jaxtrain.config.layout import Layout
from jaxtrain.config.schema import choices

IDLE = 0.1  # fraction of a step: a larger bubble is reported
SCHEDULES = choices("pipeline.schedule")

STAGE = "stage"  # the mesh axis


@dataclasses.dataclass(frozen=True)
class PipelinePhase:
    """Consecutive ticks with the same kinds of work: forward units, backward units, embedding, loss."""

    ticks: range
    forward: bool  # stages run forward units
    backward: bool
    ends: bool  # a microbatch may enter in the next tick, and the gradient of another may arrive at the embedding
    leaves: bool  # a microbatch leaves the last stage

    def shift(self, ticks: int) -> "PipelinePhase":
        """Return a copy of this phase that begins and ends `ticks` ticks later."""
        return dataclasses.replace(self, ticks=range(self.ticks.start + ticks, self.ticks.stop + ticks))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Assigns a unit to each stage at each tick. If `groups` is above 1, `stages` must divide the number of microbatches."""

    name: str
    stages: int
    groups: int
    microbatches: int

    @property
    def units(self) -> int:
        """Return the number of forward units of a stage, which equals the number of its backward units."""
        return self.groups * self.microbatches

    @property
    def wait(self) -> int:
        """Return the tick of the last stage's first backward unit."""
        return self.forward_ticks if self.name == "gpipe" else self.groups * self.stages

    @property
    def forward_ticks(self) -> int:
        """Return the number of ticks from the first stage's first forward unit to the last stage's last forward unit."""
        return self.units + self.stages - 1

    @property
    def ticks(self) -> int:
        """Return the number of ticks of a step."""
        return self.wait + self.forward_ticks

    def forward_unit(self, unit: int) -> tuple[int, int]:
        """Return (group of the stage, microbatch) of a forward unit."""
        run, within = divmod(unit, self.stages * self.groups)
        return within // self.stages, run * self.stages + within % self.stages

    def backward_unit(self, unit: int) -> tuple[int, int]:
        """Return (group of the stage, microbatch) of a backward unit."""
        group, microbatch = self.forward_unit(unit)
        return self.groups - 1 - group, microbatch

    @functools.cached_property
    def slots(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the slots of saved activations: (slot of each forward unit, slot of each backward unit, number of slots).

        A slot has one unit at a time, even on the first stage, where units are in flight the longest. In the ticks after its
        last forward unit, a stage repeats this unit in free slots, and the results are discarded.
        """
        done = {self.backward_unit(w): w + self.wait + self.stages - 1 for w in range(self.units)}
        free: list[int] = []
        waiting: list[tuple[int, int]] = []  # (tick of the backward pass, slot)
        by_forward: list[int] = []
        slot_of: dict[tuple[int, int], int] = {}
        count = 0
        for tick in range(self.forward_ticks):
            while waiting and waiting[0][0] < tick:
                heapq.heappush(free, heapq.heappop(waiting)[1])
            slot = heapq.heappop(free) if free else count
            count += slot == count
            by_forward.append(slot)
            unit = self.forward_unit(tick) if tick < self.units else None
            heapq.heappush(waiting, (done[unit] if unit else tick, slot))
            if unit:
                slot_of[unit] = slot
        return tuple(by_forward), tuple(slot_of[self.backward_unit(w)] for w in range(self.units)), count

    @functools.cached_property
    def rounds(self) -> tuple[tuple[int, tuple["PipelinePhase", ...]], ...]:
        """Return all ticks in order, as a sequence of loops: (number of iterations, phases of the first iteration) each.

        The phases of each further iteration are stages x groups ticks later.
        """
        period = self.stages * self.groups
        first = period - 1  # the tick in which the first microbatch leaves the last stage

        def kind(t: int) -> tuple[bool, bool, bool, bool]:
            # Once per period a run of microbatches enters, another leaves, and the gradient of a third arrives back at its
            # entry. Entries are prepared a tick early, so all three are in the same ticks.
            ends = self.groups == 1 or (t + 1) % period < self.stages
            forward = t < self.forward_ticks
            return forward, t >= self.wait, ends, ends and forward and t >= first

        phases: list[PipelinePhase] = []
        for t in range(self.ticks):
            if phases and dataclasses.astuple(phases[-1])[1:] == kind(t):
                phases[-1] = dataclasses.replace(phases[-1], ticks=range(phases[-1].ticks.start, t + 1))
            else:
                phases.append(PipelinePhase(range(t, t + 1), *kind(t)))
        rounds: list[tuple[int, tuple[PipelinePhase, ...]]] = []
        while phases:
            repeats = self._count_repeats(phases)
            rounds.append((repeats, tuple(phases[: 2 if repeats > 1 else 1])))
            phases = phases[repeats * len(rounds[-1][1]) :]
        return tuple(rounds)

    def _count_repeats(self, phases: list["PipelinePhase"]) -> int:
        """Return how many times the first two phases occur in a row, each pair stages x groups ticks after the previous."""
        count = 1
        while (following := phases[2 * count : 2 * count + 2]) and len(following) == 2:
            shift = count * self.stages * self.groups
            if [p.shift(shift) for p in phases[:2]] != following:
                break
            count += 1
        return count

    @property
    def bubble(self) -> float:
        """Return the fraction of a step in which a stage is idle, if all groups take equally long."""
        return (self.stages - 1) / (self.units + self.stages - 1)

    @property
    def in_flight(self) -> float:
        """Return the largest number of microbatches in flight on a stage. A unit counts as 1 / groups of a microbatch."""
        return self.slots[2] / self.groups


def schedule_of(layout: Layout) -> Schedule:
    """Return the schedule of a layout's microbatches; without a pipeline, that of one stage."""
    stages = layout.stages
    return Schedule(layout.schedule, stages.stages, stages.groups, layout.batch[0])
