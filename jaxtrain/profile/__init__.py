"""Analysis of the time of a step from traces of the profiler, by kind of work and by part of the model."""
