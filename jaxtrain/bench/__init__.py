"""Measurements on the devices of this machine: train steps, kernels, and the suite for a new node."""
