"""The process around the step: setup, state, loop, evaluation, checkpoints, generation, parity, replay."""
