"""Measurements on the devices of this machine: train steps, kernels, and a complete node."""
