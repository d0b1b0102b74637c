"""Import and export of Hugging Face checkpoints; jaxtrain/models has their names of tensors and of keys in config.json."""
