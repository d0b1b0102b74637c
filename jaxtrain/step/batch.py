"""A batch on the devices: (A, B, T) microbatches, sharded over the mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.context import Context
from jaxtrain.config.shapes import BATCH_KEYS, PAIR_KEYS, mtp_keys
from jaxtrain.sharding import Axes, Placement
from jaxtrain.step.loss import Batch

MICROBATCHES: Axes = (None, "batch", "sequence")  # (A, B, T)

HostBatch = dict[str, np.ndarray]  # (A x B, T) each, or the rows of this process


def abstract_batch(placement: Placement, shape: tuple[int, int, int], pairs: bool = False, mtp: int = 0) -> Batch:
    """Return the shapes, dtypes and shardings of a batch with arrays of this shape, (A, B, T).

    pairs: include the arrays of preference pairs. mtp: number of modules of multi-token prediction, whose arrays are included.
    """
    sharding = placement.sharding(MICROBATCHES, "batch", shape)
    keys = BATCH_KEYS | (PAIR_KEYS if pairs else {}) | mtp_keys(mtp)
    return {k: jax.ShapeDtypeStruct(shape, jnp.dtype(d), sharding=sharding) for k, d in keys.items()}


def rows_here(abstract: Batch) -> list[int] | None:
    """Return the numbers of the batch's rows, 0 to A x B - 1, that devices of this process hold.

    Returns None if all devices of the batch are of this process.
    """
    shape, sharding = abstract["tokens"].shape, abstract["tokens"].sharding
    if sharding is None or len(sharding.addressable_devices) == len(sharding.device_set):
        return None
    local_rows = set()
    for micro, rows, _ in sharding.addressable_devices_indices_map(shape).values():
        local_rows |= {a * shape[1] + b for a in range(*micro.indices(shape[0])) for b in range(*rows.indices(shape[1]))}
    return sorted(local_rows)


def mtp_targets(host: HostBatch, k: int) -> HostBatch:
    """Return the targets and weights of module k of multi-token prediction, (R, T).

    A token's target and weight are those of the token k positions later. If that token is in another document, the weight is 0.
    """

    def shift_left(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[:, k:], np.zeros_like(x[:, :k])], axis=1)

    same = shift_left(host["segments"]) == host["segments"]
    weights = np.where(same, shift_left(host["weights"]), 0).astype(host["weights"].dtype)
    return {f"targets_{k}": shift_left(host["targets"]), f"weights_{k}": weights}


def place_batch(host: HostBatch, abstract: Batch, context: Context, rows: Sequence[int] | None = None) -> Batch:
    """Put rows from the host, (A x B, T), onto the devices as (A, B, T) microbatches.

    With context parallelism, this function reorders the tokens of a row, in the same order in all arrays (config/context.py).
    The model's results depend on each token's segment and position, not on the order of tokens in the arrays. Targets of
    multi-token prediction are computed before the reordering.

    Args:
      rows: the numbers of the rows in `host` (`rows_here`); None: all rows.
    """
    order = list(context.chunks)
    for k in range(1, 1 + sum(key.startswith("targets_") for key in abstract)):
        host = host | mtp_targets(host, k)

    def reorder(x: np.ndarray) -> np.ndarray:
        return x if len(order) == 1 else x.reshape(x.shape[0], len(order), -1)[:, order].reshape(x.shape)

    if rows is None:
        return {k: jax.device_put(reorder(host[k]).reshape(a.shape), a.sharding) for k, a in abstract.items()}
    row_index = {row: i for i, row in enumerate(rows)}

    def put(x: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
        def read_shard(index: Any) -> np.ndarray:
            micro, within = (range(*i.indices(n)) for i, n in zip(index, target.shape[:2], strict=False))
            row_indices = [row_index[m * target.shape[1] + b] for m in micro for b in within]
            return x[row_indices].reshape(len(micro), len(within), -1)[:, :, index[2]]

        return jax.make_array_from_callback(target.shape, target.sharding, read_shard)

    return {k: put(reorder(host[k]), a) for k, a in abstract.items()}
