"""Frozen weights that are stored in 8 or 4 bits (`lora.base`), and decoded in the layer that uses them.

Such a weight has several arrays (kernels/low_bits.py) in place of one. In a dict of parameters they are a dict under the
weight's name: layers.attention.wq.bits, layers.attention.wq.scale. Each array is sharded like the weight. An all-gather sends
these arrays, and the decoded weight is recomputed in the backward pass like any gathered weight (models/zero.py).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels import low_bits
from jaxtrain.sharding import Axes, Placement, device_index

LEADING = ("layers", "experts")  # logical axes of stacks of matrices


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """How a weight is stored; static under jit.

    Without its LEADING axes, the weight is a matrix: its first dimension are the rows, and all others the columns. The matmul's
    inputs are the rows if `inputs_first`, else the columns.
    """

    format: str  # of low_bits.FORMATS
    shape: tuple[int, ...]  # over all devices
    axes: Axes  # logical axes
    inputs_first: bool

    @property
    def _lead(self) -> int:
        return sum(axis in LEADING for axis in self.axes)

    @property
    def matrix(self) -> tuple[int, int]:
        """Return (rows, columns) over all devices."""
        rows, *columns = self.shape[self._lead :]
        return rows, math.prod(columns)

    @property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each array over all devices."""
        arrays, lead = low_bits.shapes(*self.matrix, self.format, self.inputs_first), self.shape[: self._lead]
        return {name: jax.ShapeDtypeStruct((*lead, *shape), dtype) for name, (shape, dtype) in arrays.items()}

    def array_axes(self, placement: Placement) -> dict[str, Axes]:
        """Return the logical axes of each array.

        A dimension that the devices which gather the weight do not divide is replicated on them: that of the scales of blocks.
        """
        lead, (rows, columns) = self.axes[: self._lead], self.axes[self._lead :][:2]
        output_axes = (columns if self.inputs_first else rows,)  # a number for each output
        out: dict[str, Axes] = {}
        for name, array in self.abstract.items():
            sizes = array.shape[len(lead) :]
            axes: Axes = (rows, columns) if len(sizes) == 2 else output_axes if name == "scale" else (None,) * len(sizes)
            fit = (n % placement.size(placement.mesh_axes(axis)) == 0 for axis, n in zip(axes, sizes, strict=True))
            sharded = (axis if even or placement.compute_axes(axis) else None for axis, even in zip(axes, fit, strict=True))
            out[name] = (*lead, *sharded)
        return out

    @property
    def experts(self) -> bool:
        """Return whether there is a matrix for each expert."""
        return "experts" in self.axes

    def whole_blocks(self, placement: Placement) -> NamedSharding:
        """Return a sharding of one layer's weight over experts or outputs, by as many devices as divide their number.

        Each expert's matrix is on one device.
        """
        outputs = range(self._lead + 1, len(self.shape)) if self.inputs_first else [self._lead]
        dims, over = [0] if self.experts else outputs, list(placement.all_axes)
        while over:
            for dim in dims:
                if self.shape[dim] % placement.size(over) == 0:
                    return NamedSharding(placement.mesh, P(*[None] * dim, tuple(over)))
            over.pop()
        return NamedSharding(placement.mesh, P())

    def encode(self, w: jax.Array) -> dict[str, jax.Array]:
        """Return the arrays of the weight, or of one layer of it."""
        return low_bits.encode(self._matrices(w), self.format, self.inputs_first)

    def error(self, w: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        """Return the relative error of the arrays `encode(w)` (low_bits.relative_error), f32 ()."""
        return low_bits.relative_error(self._matrices(w), arrays, self.format, self.inputs_first)

    def _matrices(self, w: jax.Array) -> jax.Array:
        lead = w.shape[: w.ndim - len(self.shape) + self._lead]
        return w.reshape(*lead, *self.matrix)

    def decode(self, arrays: dict[str, jax.Array], dtype: jnp.dtype, placement: Placement | None = None) -> jax.Array:
        """Return the weight, or one layer of it, in `dtype`.

        placement: for arrays inside a shard_map, gathered as for use; None: the arrays have all shards.
        """
        start: tuple[Any, ...] = (0, 0)
        if placement is not None:
            over = [placement.compute_axes(axis) for axis in self.axes[self._lead :][:2]]
            sizes = [n // placement.size(axes) for n, axes in zip(self.matrix, over, strict=True)]
            start = tuple(device_index(axes) * n for axes, n in zip(over, sizes, strict=True))
        w = low_bits.decode(arrays, self.format, self.inputs_first, dtype, start, self.matrix)
        return w.reshape(*w.shape[:-1], -1, *self.shape[self._lead + 2 :])


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The value of a module's parameter in fewer bits."""

    parts: dict[str, Any]
    stored: StoredWeight


jax.tree_util.register_dataclass(Encoded, ["parts"], ["stored"])
