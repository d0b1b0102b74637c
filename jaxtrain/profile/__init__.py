"""Analysis of the time of a step: traces of the profiler, read and summed by kind of work and by part of the model."""
