"""Model families: one file each, with its sizes and the names that Hugging Face gives its tensors and keys. No jax."""
