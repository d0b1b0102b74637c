"""Context parallelism: the sharding of a sequence's tokens and its attention over the ranks of `mesh.seq`. Imports no jax.

A rank is the index of a device along an axis or in a group. A rank of the seq axis is ring rank x ulysses + Ulysses rank. So
the devices of a Ulysses group are neighbours, because its all-to-alls send more bytes than the ring.

A ring of r ranks cuts each sequence into 2 r chunks of C tokens. Ring rank g has the chunks g and 2 r - 1 - g (zigzag order).
An early chunk has few visible keys, the late chunk of the same rank many. So under the causal mask every ring rank computes
2 r C^2 query-key pairs. The Ulysses ranks of a ring rank shard its two chunks. In attention, each Ulysses rank has both chunks,
for some of the heads.
"""

import dataclasses
from collections.abc import Sequence

from jaxtrain.config.schema import choices

METHODS = choices("parallel.context")


@dataclasses.dataclass(frozen=True)
class Context:
    """The context parallelism of a sequence: `ulysses` x `ring` ranks. (1, 1): the sequence is on one device."""

    ulysses: int = 1  # ranks that exchange tokens for heads around an attention over all tokens of the group
    ring: int = 1  # ring ranks whose keys and values are exchanged
    gathered: bool = False  # keys and values are all-gathered over the ring ranks; otherwise they are sent around the ring

    def __str__(self) -> str:
        ring_text = f"keys gathered over {self.ring}" if self.gathered else f"a ring of {self.ring}"
        group = f"Ulysses groups of {self.ulysses}"
        return " in ".join([group] * (self.ulysses > 1) + [ring_text] * (self.ring > 1)) or "whole sequences"

    @property
    def size(self) -> int:
        return self.ulysses * self.ring

    @property
    def chunks(self) -> tuple[int, ...]:
        """Return the chunks of a sequence in the order of the ring ranks that hold them; (0,) without a ring."""
        if self.ring == 1:
            return (0,)
        return tuple(chunk for rank in range(self.ring) for chunk in (rank, 2 * self.ring - 1 - rank))

    @property
    def divides(self) -> int:
        """Return the number that the sequence length must be a multiple of."""
        return self.size * 2 if self.ring > 1 else self.size


def make_context(method: str, ranks: int, heads: int, kv_heads: int) -> Context:
    """Return the ring and Ulysses sizes for `ranks` ranks of the seq axis. A Ulysses group is as large as the heads allow.

    Args:
      method: parallel.context. Unless it is ulysses, all ranks are ring ranks.
      ranks: mesh.seq.
      heads, kv_heads: numbers of query and key/value heads on each rank of the tensor axis.
    """
    if ranks == 1:
        return Context()
    if method != "ulysses":
        return Context(1, ranks, method == "gather")
    group = max(u for u in range(1, ranks + 1) if ranks % u == 0 and not ulysses_problem(u, heads, kv_heads))
    return Context(group, ranks // group)


def ulysses_problem(group: int, heads: int, kv_heads: int) -> str | None:
    """Return why a Ulysses group of this size cannot shard these heads, or None.

    If there are fewer key/value heads than ranks in the group, several ranks have replicas of one key/value head.
    """
    if heads % group:
        return f"{heads} query heads do not divide over {group} ranks"
    if kv_heads % group and group % kv_heads:
        return f"{kv_heads} key/value heads neither divide over {group} ranks nor divide the number of ranks"
    return None


def pairs_per_rank(context: Context, seq_len: int, window: int = 0) -> Sequence[float]:
    """Return the number of query-key pairs of each rank under the causal mask, per query head, for one document per sequence.

    `window`: tokens that a query attends to, itself included; 0: itself and all earlier tokens.
    """
    reach = min(window or seq_len, seq_len)

    def before(end: float) -> float:
        """Return the number of pairs of all queries before position `end` of the sequence."""
        return end**2 / 2 if end <= reach else reach**2 / 2 + (end - reach) * reach

    if context.ring == 1:
        return [before(seq_len) / context.size] * context.size
    chunk = seq_len // (2 * context.ring)
    out = []
    for rank in range(context.ring):
        rank_chunks = (rank, 2 * context.ring - 1 - rank)
        pair_count = sum(before((number + 1) * chunk) - before(number * chunk) for number in rank_chunks)
        out += [pair_count / context.ulysses] * context.ulysses
    return out
