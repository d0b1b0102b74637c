"""The ranks that shard a sequence, and the collectives between them.

Call this module's functions inside a shard_map over the whole mesh. A rank is a device's index on the mesh axis that shards the
sequence.
"""

import dataclasses

import jax

from jaxtrain.config.context import Context


@dataclasses.dataclass(frozen=True)
class Split:
    """The sharding of a sequence, and the mesh axis of its ranks; static under jit."""

    context: Context = Context()
    axis: str = "seq"

    @property
    def place(self) -> jax.Array:
        """Return this device's rank in the ring, int32 ()."""
        return jax.lax.axis_index(self.axis) // self.context.ulysses

    def rank(self, place: int, member: int) -> int:
        return place * self.context.ulysses + member

    @property
    def groups(self) -> list[list[int]] | None:
        """Return the ranks of each Ulysses group; None if there is one group."""
        u, r = self.context.ulysses, self.context.ring
        return None if r == 1 else [[self.rank(place, i) for i in range(u)] for place in range(r)]

    @property
    def rings(self) -> list[list[int]] | None:
        """Return the ranks of each ring; None if there is one ring."""
        u, r = self.context.ulysses, self.context.ring
        return None if u == 1 else [[self.rank(place, i) for place in range(r)] for i in range(u)]

    def around(self, x: jax.Array, by: int = 1) -> jax.Array:
        """Return x of the previous ring rank, cyclically; with `by` = -1, x of the next ring rank."""
        u, r = self.context.ulysses, self.context.ring
        ranks = [(self.rank(place, i), self.rank((place + by) % r, i)) for place in range(r) for i in range(u)]
        return jax.lax.ppermute(x, self.axis, ranks)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the early and the late chunk of a rank, (B, C, ...) each, from (B, 2 C, ...)."""
    chunk = x.shape[1] // 2
    return x[:, :chunk], x[:, chunk:]
