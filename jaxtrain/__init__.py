"""jaxtrain: a JAX SPMD trainer with named-axis sharding. Importing it touches no device and imports no jax."""

__version__ = "0.1.0"
