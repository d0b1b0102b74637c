"""Import and export of Hugging Face checkpoints; jaxtrain/models has the names of tensors and keys."""
