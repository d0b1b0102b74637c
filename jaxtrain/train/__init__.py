"""The train step, its state, its compilation, and the training loop."""
