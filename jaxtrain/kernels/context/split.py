"""The ranks among which a sequence is divided, and how arrays move between them. Inside a shard_map over the whole mesh."""

import dataclasses

import jax

from jaxtrain.context import Context


@dataclasses.dataclass(frozen=True)
class Split:
    """The division of a sequence, and the mesh axis along which its ranks lie. Static."""

    context: Context = Context()
    axis: str = "seq"

    @property
    def place(self) -> jax.Array:
        """This device's place in the ring, int32 ()."""
        return jax.lax.axis_index(self.axis) // self.context.ulysses

    def rank(self, place: int, member: int) -> int:
        return place * self.context.ulysses + member

    @property
    def groups(self) -> list[list[int]] | None:
        """Ranks of each Ulysses group; None where there is one."""
        u, r = self.context.ulysses, self.context.ring
        return None if r == 1 else [[self.rank(place, i) for i in range(u)] for place in range(r)]

    @property
    def rings(self) -> list[list[int]] | None:
        """Ranks of each ring, one of every place; None where there is one ring."""
        u, r = self.context.ulysses, self.context.ring
        return None if u == 1 else [[self.rank(place, i) for place in range(r)] for i in range(u)]

    def around(self, x: jax.Array, by: int = 1) -> jax.Array:
        """x of the place before, the last one's for the first; `by` = -1: of the place after."""
        u, r = self.context.ulysses, self.context.ring
        ranks = [(self.rank(place, i), self.rank((place + by) % r, i)) for place in range(r) for i in range(u)]
        return jax.lax.ppermute(x, self.axis, ranks)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The early and the late chunk of a place, from (B, 2 C, ...)."""
    chunk = x.shape[1] // 2
    return x[:, :chunk], x[:, chunk:]
