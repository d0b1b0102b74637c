"""The ranks that shard a sequence, and the collectives between them.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509) is all-to-alls before attention, which gather tokens and shard heads, and their
inverse after it.

Call this module's functions inside a shard_map over the whole mesh. A rank is a device's index on the mesh axis that shards the
sequence.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.config.context import Context


@dataclasses.dataclass(frozen=True)
class Split:
    """The sharding of a sequence, and the mesh axis of its ranks; static under jit."""

    context: Context = Context()
    axis: str = "seq"

    @property
    def ring_rank(self) -> jax.Array:
        """Return this device's rank in the ring, int32 ()."""
        return jax.lax.axis_index(self.axis) // self.context.ulysses

    def rank(self, ring_rank: int, member: int) -> int:
        return ring_rank * self.context.ulysses + member

    @property
    def groups(self) -> list[list[int]] | None:
        """Return the ranks of each Ulysses group; None if there is one group."""
        u, r = self.context.ulysses, self.context.ring
        return None if r == 1 else [[self.rank(ring_rank, i) for i in range(u)] for ring_rank in range(r)]

    @property
    def rings(self) -> list[list[int]] | None:
        """Return the ranks of each ring; None if there is one ring."""
        u, r = self.context.ulysses, self.context.ring
        return None if u == 1 else [[self.rank(ring_rank, i) for ring_rank in range(r)] for i in range(u)]

    def ring_shift(self, x: jax.Array, by: int = 1) -> jax.Array:
        """Return x of the previous ring rank, cyclically; with `by` = -1, x of the next ring rank."""
        u, r = self.context.ulysses, self.context.ring
        ranks = [(self.rank(ring_rank, i), self.rank((ring_rank + by) % r, i)) for ring_rank in range(r) for i in range(u)]
        return jax.lax.ppermute(x, self.axis, ranks)

    # ---- Ulysses

    def gather(self, x_BT: jax.Array) -> jax.Array:
        """Return the tokens of a Ulysses group in rank order, from this rank's tokens (B, T)."""
        if self.context.ulysses == 1:
            return x_BT
        return jax.lax.all_gather(x_BT, self.axis, axis=1, tiled=True, axis_index_groups=self.groups)

    def shard_heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return this rank's share of the heads for all tokens of its Ulysses group, from all heads of its own tokens.

        If there are fewer key/value heads than ranks in the group, the key/value heads are repeated first. So each rank
        receives the key/value head of its query heads.
        """
        if self.context.ulysses == 1:
            return q, k, v
        repeats = max(1, self.context.ulysses // k.shape[2])
        if repeats > 1:
            k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
        return self._all_to_all(q, 2, 1), self._all_to_all(k, 2, 1), self._all_to_all(v, 2, 1)

    def local_heads(self, x_N: jax.Array) -> jax.Array:
        """Return the elements of x_N for the heads that this rank has after `shard_heads`. x_N: one number for each head."""
        ulysses = self.context.ulysses
        if ulysses == 1:
            return x_N
        count = x_N.shape[0] // ulysses
        return jax.lax.dynamic_slice_in_dim(x_N, jax.lax.axis_index(self.axis) % ulysses * count, count)

    def shard_tokens(self, out: jax.Array) -> jax.Array:
        """Invert `shard_heads`: return all heads of this rank's own tokens. out: the output of attention."""
        return out if self.context.ulysses == 1 else self._all_to_all(out, 1, 2)

    def _all_to_all(self, x: jax.Array, split: int, concat: int) -> jax.Array:
        return jax.lax.all_to_all(x, self.axis, split_axis=split, concat_axis=concat, tiled=True, axis_index_groups=self.groups)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the early and the late chunk of a rank, (B, C, ...) each, from (B, 2 C, ...)."""
    chunk = x.shape[1] // 2
    return x[:, :chunk], x[:, chunk:]
