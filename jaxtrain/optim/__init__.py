"""Optimizers, their schedule, and how their state is stored and updated."""
