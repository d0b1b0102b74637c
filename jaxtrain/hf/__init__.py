"""Hugging Face folders and adapters, in and out."""
