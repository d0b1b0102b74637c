"""Token embedding over a sharded table: devices exchange embeddings of tokens instead of the table.

Each device looks up its shard of the table's rows and columns, for all tokens of the devices that shard the table. All-to-alls
then bring the columns of a device's own tokens together. They send B x T x D values; gathering the table would send V x D.
"""

import jax
import jax.numpy as jnp

from jaxtrain.sharding import Axes, Placement, all_gather, all_to_all, device_index, to_residual

TABLE: Axes = ("vocab", "embed")


def embed(
    table_VD: jax.Array, tokens_BT: jax.Array, placement: Placement, columns: tuple[str, ...], dtype: jnp.dtype
) -> jax.Array:
    """Return the embeddings of this device's tokens, (B, T, D) in the layout of the residual stream.

    A token's gradient is the sum over all its occurrences. It is accumulated in float32, the dtype of the look-up: in bfloat16
    the sum of a frequent token would stop growing after a few hundred terms.

    Args:
      table_VD: this device's shard of the table.
      tokens_BT: int32 ids below the global V, with all tokens that this device has inside a transformer block.
      placement: the placement of the table and of the tokens.
      columns: mesh axes that shard the columns of `table_VD`; () if the columns are gathered.
      dtype: dtype of the result.
    """
    rows, sequence, batch = placement.mesh_axes("vocab"), placement.mesh_axes("sequence"), placement.mesh_axes("batch")
    batch_axes = tuple(a for a in columns if a in batch)
    sequence_axes = tuple(a for a in columns if a in sequence)
    replicated = tuple(a for a in columns if a not in batch + sequence)  # in sampling: all devices have the same tokens
    tokens_BT = all_gather(all_gather(tokens_BT, batch_axes, 0), sequence_axes, 1)

    V = table_VD.shape[0]
    row_BT = tokens_BT - V * device_index(rows)
    x_BTD = jnp.take(table_VD.astype(jnp.float32), row_BT, axis=0, mode="clip").astype(dtype)
    x_BTD = jnp.where(((row_BT >= 0) & (row_BT < V))[:, :, None], x_BTD, 0) if rows else x_BTD

    # S: devices of the sequence whose tokens were gathered. Each device gets back the embeddings of its own tokens.
    x_BSTD = x_BTD.reshape(x_BTD.shape[0], placement.size(sequence_axes), -1, x_BTD.shape[2])
    x_BSTD = to_residual(x_BSTD, rows, placement, dim=2)
    x_BSTD = all_to_all(x_BSTD, sequence_axes, split=1, concat=3)
    x_BTD = x_BSTD.reshape(x_BSTD.shape[0], -1, x_BSTD.shape[3])
    return all_gather(all_to_all(x_BTD, batch_axes, split=0, concat=2), replicated, 2)
