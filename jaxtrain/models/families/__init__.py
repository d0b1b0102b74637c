"""Model families: one file each, with its published sizes and the format of its Hugging Face checkpoints. Imports no jax."""
