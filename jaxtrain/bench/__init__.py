"""What the devices of this machine reach: train steps, kernels, a whole node, and the same step in PyTorch."""
