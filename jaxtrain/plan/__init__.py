"""Runs on machines that are not there: the train step, compiled for described GPUs."""
