"""Copies of a run's metrics in TensorBoard, W&B, Trackio and MLflow. Each module has the `metrics.Tracker` of one tool."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.config.schema import Log
from jaxtrain.metrics.files import Tracker
from jaxtrain.metrics.mlflow import MLflow
from jaxtrain.metrics.remote import TrackerError
from jaxtrain.metrics.tensorboard import TensorBoard
from jaxtrain.metrics.trackio import Trackio
from jaxtrain.metrics.wandb import WandB

__all__ = ["TrackerError", "Trackers", "open_trackers"]


class Trackers(NamedTuple):
    """The trackers of a run. facts: name of a tracker -> its entry in the run's receipt."""

    all: tuple[Tracker, ...]
    facts: dict[str, Any]


def open_trackers(workdir: Path, log: Log, config: Mapping[str, Any], *, resumed: bool, process_index: int = 0) -> Trackers:
    """Return the trackers that the config names; only process 0 has any. Raises TrackerError if a tracker cannot start."""
    if process_index:
        return Trackers((), {})
    remotes = []
    try:
        for kind in (WandB, Trackio, MLflow):
            if target := getattr(log, kind.key):
                remotes.append(kind(workdir, target, config, resumed=resumed))
    except TrackerError:
        for started in remotes:
            started.close(1)
            if started.attempt == 1:
                started.path.unlink()
        raise
    board = (TensorBoard(workdir),) if log.tensorboard else ()
    return Trackers((*board, *remotes), {each.key: each.facts for each in remotes})
