"""Read a compiled program: its computation, memory, communication, time, and warnings."""
