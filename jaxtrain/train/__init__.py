"""The train step, its state, how it is compiled, and the run around it."""
