"""Parts that kernels in Pallas Mosaic GPU for Hopper share: warpgroups with roles, and slots of shared memory between them.

A program is three warpgroups. The last one loads: it copies tiles from global into shared memory (TMA), some steps ahead. The
first two compute: WGMMA multiplies, with its right operand in shared memory. Barriers pass the slots of shared memory between
the warpgroups: `ready` counts the copies that fill a slot, `free` the warpgroups that are done with the slot.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a warpgroup's matmul
COMPUTING = 2  # warpgroups that compute; the one after them loads
GROUPS = "warpgroup"  # the axis of warpgroups
# Registers of a computing and of a loading thread, multiples of 8: a multiprocessor has 65,536 for 3 x 128 threads.
COMPUTE_REGISTERS, LOAD_REGISTERS = 240, 24


class Slots(NamedTuple):
    """A ring of slots in shared memory, each for a tile of every array in `refs`, with barriers."""

    refs: tuple[Any, ...]  # (stages, ...)
    ready: Any
    free: Any

    def slot(self, step: jax.Array) -> jax.Array:
        """Return the index of a step's slot."""
        return jax.lax.rem(step, jnp.int32(self.ready.shape[0]))

    def fill(self, step: jax.Array, sources: tuple[Any, ...]) -> None:
        """Copy a tile of each array into the step's slot, once the slot is free."""
        index = self.slot(step)
        plgpu.barrier_wait(self.free.at[index])
        for source, ref in zip(sources, self.refs, strict=True):
            plgpu.copy_gmem_to_smem(source, ref.at[index], self.ready.at[index])

    def take(self, step: jax.Array) -> tuple[Any, ...]:
        """Wait until the step's slot is filled, and return its arrays."""
        index = self.slot(step)
        plgpu.barrier_wait(self.ready.at[index])
        return tuple(ref.at[index] for ref in self.refs)

    def release(self, step: jax.Array, interpret: bool) -> None:
        """Mark the step's slot as free, for the warpgroup that loads."""
        if interpret:  # the interpreter's race detector requires a fence between loads and a later copy, beside the barrier
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.free.at[self.slot(step)])

    def each(self, action: Callable[[Any], None]) -> None:
        """Call `action` with the `free` barrier of each slot.

        Before the first step, the warpgroups that compute arrive at all barriers. After the last step, the warpgroup that loads
        waits at all barriers.
        """
        for index in range(self.ready.shape[0]):
            action(self.free.at[index])


def slots(*refs: Any) -> Slots:
    """Return a ring of slots of these arrays in shared memory, (stages, ...) each, with its barriers."""
    stages = refs[0].shape[0]
    free = plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages)
    return Slots(refs, plgpu.Barrier(num_arrivals=len(refs), num_barriers=stages), free)


def warpgroups(compute: Callable[[jax.Array], None], load: Callable[[], None], pipelines: tuple[Slots, ...]) -> None:
    """Run `compute(index)` in the warpgroups that compute, and `load()` in the warpgroup that loads.

    pipelines: the rings of slots that `compute` and `load` use. All slots are free at the start and at the end.
    """
    warpgroup = jax.lax.axis_index(GROUPS)

    @pl.when(warpgroup < COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        for pipeline in pipelines:
            pipeline.each(plgpu.barrier_arrive)
        compute(warpgroup)

    @pl.when(warpgroup == COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        load()
        for pipeline in pipelines:
            pipeline.each(plgpu.barrier_wait)
