"""What can go wrong with checkpoints. Every message says what to do."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, read, or does not fit what it is to be restored into. Says what to do."""


class Damaged(CheckpointError):
    """A step is not as it was written, or holds weights that are no numbers. An older one may be good."""


class Unreachable(CheckpointError, OSError):
    """A bucket did not answer as it should. What lies there may be good: nothing is taken for damaged, or for missing."""
