"""Copies of a run's metrics in TensorBoard and W&B. Each module has the `metrics.Tracker` of one tool."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.config.schema import Log
from jaxtrain.metrics.files import Tracker
from jaxtrain.metrics.tensorboard import TensorBoard
from jaxtrain.metrics.wandb import TrackerError, WandB

__all__ = ["TrackerError", "Trackers", "open_trackers"]


class Trackers(NamedTuple):
    """The trackers of a run. facts: name of a tracker -> its entry in the run's receipt."""

    all: tuple[Tracker, ...]
    facts: dict[str, Any]


def open_trackers(workdir: Path, log: Log, *, resumed: bool, process_index: int = 0) -> Trackers:
    """Return the trackers that the config names; only process 0 has any. Raises TrackerError if a tracker cannot start."""
    if process_index:
        return Trackers((), {})
    board = (TensorBoard(workdir),) if log.tensorboard else ()
    if not log.wandb:
        return Trackers(board, {})
    wandb = WandB(workdir, log.wandb, resumed=resumed)
    return Trackers((*board, wandb), {"wandb": wandb.facts})
