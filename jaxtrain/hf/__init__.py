"""Hugging Face checkpoints in and out: what families call their tensors and keys stands in jaxtrain/models."""
