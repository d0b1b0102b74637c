"""Round updated master weights to bfloat16, by stochastic rounding.

Rounding to nearest loses every update below 2**-9 of the weight; at small learning rates, all updates are that small.
Stochastic rounding keeps updates on average: it rounds up with a probability equal to the truncated fraction (Gupta et al.
2015, arXiv:1502.02551, section 3).

The random bits of an element are a function of the run's seed, the step, the parameter's name, the layer's number, and the
element's index in the layer's tensor. The index is that in the global array (JAX's partitionable Threefry). So the bits are the
same on every mesh, with every arrangement of stages, and in a resumed run.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.models.module import Params, is_stacked

BFLOAT16 = jnp.dtype("bfloat16")


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round x, f32, to one of its two neighbours in bfloat16, up with a probability equal to the truncated fraction.

    bits: uint16, of x's shape, uniform. Values that are not finite are unchanged.
    """
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((raw >> 16).astype(jnp.uint16), BFLOAT16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(BFLOAT16))


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The settings of stochastic rounding, without arrays. The random bits are computed from them."""

    seed: int
    layers: tuple[int | None, ...] | None = None  # the layer in each slot of a stack (None: empty); None: slot i has layer i

    def round_params(self, exact: Params, params: Params, step: jax.Array, layer: jax.Array | None = None) -> Params:
        """Return the updated weights `exact`, f32, in the dtypes of `params`. Rounding to bfloat16 is stochastic.

        step: int32 (), the step's number. layer: int32 (), the layer's index if stacks are updated layer by layer; None:
        `exact` has all layers.
        """

        def round_leaf(path: Any, x: jax.Array, param: jax.Array) -> jax.Array:
            if param.dtype != BFLOAT16:
                return x.astype(param.dtype)
            name = ".".join(str(k.key) for k in path)
            key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), zlib.crc32(name.encode()))
            return to_bfloat16(x, self._bits(jax.random.fold_in(key, step), is_stacked(path), x, layer))

        return jax.tree_util.tree_map_with_path(round_leaf, exact, params)

    def _bits(self, key: jax.Array, stacked: bool, x: jax.Array, layer: jax.Array | None) -> jax.Array:
        if not stacked:
            return jax.random.bits(key, x.shape, jnp.uint16)
        if layer is not None:
            return jax.random.bits(jax.random.fold_in(key, layer), x.shape, jnp.uint16)
        order = range(x.shape[0]) if self.layers is None else self.layers
        numbers = jnp.asarray([len(order) if number is None else number for number in order], jnp.uint32)
        return jax.vmap(lambda number: jax.random.bits(jax.random.fold_in(key, number), x.shape[1:], jnp.uint16))(numbers)
