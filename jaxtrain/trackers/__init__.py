"""Copies of a run's metrics in other tools. Each file has a `metrics.Tracker`, and is the only one to import its package."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.config import Log
from jaxtrain.metrics import Tracker
from jaxtrain.trackers.tensorboard import TensorBoard
from jaxtrain.trackers.wandb import TrackerError, WandB

__all__ = ["TrackerError", "Trackers", "open_trackers"]


class Trackers(NamedTuple):
    """All trackers of a run, and their entries in its receipt."""

    all: tuple[Tracker, ...]
    facts: dict[str, Any]


def open_trackers(workdir: Path, log: Log, *, resumed: bool, process_index: int = 0) -> Trackers:
    """Return the trackers of the config; none except on process 0. Raises TrackerError if one cannot start."""
    if process_index:
        return Trackers((), {})
    board = (TensorBoard(workdir),) if log.tensorboard else ()
    if not log.wandb:
        return Trackers(board, {})
    wandb = WandB(workdir, log.wandb, resumed=resumed)
    return Trackers((*board, wandb), {"wandb": wandb.facts})
