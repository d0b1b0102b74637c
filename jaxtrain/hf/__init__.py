"""Import and export of Hugging Face checkpoints; jaxtrain/models defines their tensor names and config.json keys."""
