"""Optimizers, learning-rate schedules, and the storage and the update of optimizer state."""
