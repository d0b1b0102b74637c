"""The dtypes of a run."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.config.layout import StepDtypes

DTYPES = {"f32": jnp.dtype("float32"), "bf16": jnp.dtype("bfloat16")}


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The dtypes of activations, of weight gradients in their reduction over devices, and of master weights."""

    compute: jnp.dtype  # activations, gathered weights
    reduce: jnp.dtype  # weight gradients in their reduction over devices
    params: jnp.dtype  # master weights
    vectors: jnp.dtype = DTYPES["f32"]  # master weights that are scales of norms or biases
    sums: jnp.dtype = DTYPES["f32"]  # weight gradients summed over microbatches
    adapters: jnp.dtype = DTYPES["f32"]  # master weights of adapters

    @classmethod
    def from_dtypes(cls, dtypes: StepDtypes) -> "Numerics":
        """Return the dtypes of a layout."""
        return cls(**{f.name: DTYPES[getattr(dtypes, f.name)] for f in dataclasses.fields(cls)})

    @property
    def precision(self) -> jax.lax.Precision:
        """Return the precision of matmuls: HIGHEST if the compute dtype is float32, else DEFAULT.

        With DEFAULT, GPUs round the inputs of a float32 matmul to TF32.
        """
        return jax.lax.Precision.HIGHEST if self.compute == jnp.float32 else jax.lax.Precision.DEFAULT
