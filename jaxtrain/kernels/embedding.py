"""Token embedding over a table that is split over devices: tokens travel, the table does not.

Each device looks up its slice of D, and its slice of the vocabulary, for every token of the group that shares the table.
All-to-alls then bring the slices of D together: one over the axes that split the batch, one over those that split sequences.
That moves B x T x D values; gathering the table would move V x D.

The backward rule is written out because a token's gradient is a sum over all its occurrences: it is added up in float32 on
each device and reduced across devices in the reduce dtype, like every other weight gradient. Left to autodiff, it would be
added up in the compute dtype, and in bfloat16 a frequent token's sum stops growing at some hundred terms.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels.dot import Numerics
from jaxtrain.sharding import Axes, Placement, Weight, cotangent, is_whole, late, numbers, still, ticket

TABLE: Axes = ("vocab", "embed")


@dataclasses.dataclass(frozen=True)
class _Split:
    """Which mesh axes do what."""

    outer: tuple[str, ...]  # split the batch, but not the table
    shared: tuple[str, ...]  # split the batch, and the table's D
    along: tuple[str, ...]  # split tokens of the residual stream, and the table's D
    alone: tuple[str, ...]  # split the table's D only, as in sampling, where one sequence is on all devices
    vocab: tuple[str, ...]  # split the table's V
    gathered: tuple[str, ...]  # of those, the ones that also split tokens of the residual stream
    kept: tuple[str, ...]  # split tokens of the residual stream only


def _split(p: Placement, embed: tuple[str, ...]) -> _Split:
    """`embed`: the mesh axes that split D of this table, or of this table's gradient."""
    vocab, residual = p.mesh_axes("vocab"), p.mesh_axes("residual")
    return _Split(
        tuple(a for a in p.mesh_axes("batch") if a not in embed),
        tuple(a for a in embed if a in p.mesh_axes("batch")),
        tuple(a for a in embed if a in residual),
        tuple(a for a in embed if a not in p.mesh_axes("batch") + residual),
        vocab,
        tuple(a for a in residual if a in vocab),
        tuple(a for a in residual if a not in vocab + embed),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def embed(table_VD: Weight, tokens_BT: jax.Array, residual: Axes, placement: Placement, numerics: Numerics) -> jax.Array:
    """Rows of the table in the compute dtype, (B, T, D) in the layout `residual`.

    table_VD: at rest (master dtype), or as the step holds it. tokens_BT: int32 ids below V.
    """
    whole = is_whole(table_VD)
    s = _split(placement, () if whole else placement.mesh_axes("embed"))
    parts = placement.size(s.along)

    def local(table_VD, tokens_BT):
        V = table_VD.shape[0]
        first = V * jax.lax.axis_index(s.vocab) if s.vocab else 0
        mine_BT = (tokens_BT >= first) & (tokens_BT < first + V)
        x_BTD = jnp.take(table_VD, tokens_BT - first, axis=0, mode="clip").astype(numerics.compute)
        x_BTD = jnp.where(mine_BT[:, :, None], x_BTD, 0)
        # Tokens in as many parts as the axes of `along` make of them, of which the others then split each.
        x_BPTD = x_BTD.reshape(x_BTD.shape[0], parts, -1, x_BTD.shape[2])
        if s.gathered:
            x_BPTD = jax.lax.psum_scatter(x_BPTD, s.gathered, scatter_dimension=2, tiled=True)
        # Afterwards, when there is less to sum: pipeline stages may be nodes apart.
        others = tuple(a for a in s.vocab if a not in s.gathered)
        x_BPTD = jax.lax.psum(x_BPTD, others) if others else x_BPTD
        if s.along:
            x_BPTD = jax.lax.all_to_all(x_BPTD, s.along, split_axis=1, concat_axis=3, tiled=True)
        x_BTD = x_BPTD.reshape(x_BPTD.shape[0], -1, x_BPTD.shape[3])
        if s.shared:
            x_BTD = jax.lax.all_to_all(x_BTD, s.shared, split_axis=0, concat_axis=2, tiled=True)
        if s.alone:
            x_BTD = jax.lax.all_gather(x_BTD, s.alone, axis=2, tiled=True)
        return x_BTD

    return jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=((placement.whole(TABLE) if whole else placement.home(TABLE)).spec, P(s.outer or None, s.kept or None)),
        out_specs=placement.spec(residual),
        # The replication checker cannot follow sums that are reduced by hand over some axes only.
        check_vma=False,
    )(numbers(table_VD), tokens_BT)


def _forward(table, tokens, residual, placement, numerics):
    # An array without width carries V to the backward rule.
    like = jnp.zeros((numbers(table).shape[0], 0), jnp.int8)
    return embed(table, tokens, residual, placement, numerics), (tokens, like, ticket(table))


def _backward(residual, placement, numerics, residuals, dy):
    tokens, like, to = residuals
    s = _split(placement, still(placement.mesh_axes("embed"), to))
    V = like.shape[0] // placement.parts("vocab")

    def local(dy_BTD, tokens_BT):
        if s.alone:
            width = dy_BTD.shape[2] // placement.size(s.alone)
            dy_BTD = jax.lax.dynamic_slice_in_dim(dy_BTD, jax.lax.axis_index(s.alone) * width, width, axis=2)
        if s.shared:
            dy_BTD = jax.lax.all_to_all(dy_BTD, s.shared, split_axis=2, concat_axis=0, tiled=True)
        dy_BPTD = dy_BTD[:, None]
        if s.along:
            dy_BPTD = jax.lax.all_to_all(dy_BPTD, s.along, split_axis=3, concat_axis=1, tiled=True)
        if s.gathered:
            dy_BPTD = jax.lax.all_gather(dy_BPTD, s.gathered, axis=2, tiled=True)
        dy_BTD = dy_BPTD.reshape(dy_BPTD.shape[0], -1, dy_BPTD.shape[3])
        first = V * jax.lax.axis_index(s.vocab) if s.vocab else 0
        row_BT = tokens_BT - first
        row_BT = jnp.where((row_BT >= 0) & (row_BT < V), row_BT, V)  # V is out of bounds, and dropped
        zeros_VD = jnp.zeros((V, dy_BTD.shape[-1]), jnp.float32)
        d_table = zeros_VD.at[row_BT].add(dy_BTD.astype(jnp.float32), mode="drop").astype(numerics.reduce)
        left = still(s.outer + s.kept, to)
        d_table = jax.lax.psum(d_table, left) if left else d_table
        return d_table[None] if late(to) else d_table

    d_table = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(placement.spec(residual), P(s.outer or None, s.kept or None)),
        out_specs=placement.home(TABLE, late(to)).spec,
        check_vma=False,
    )(dy, tokens)
    return cotangent(to, d_table), None


embed.defvjp(_forward, _backward)
