"""Checkpoints: one folder per step, written by Orbax in the background, with digests of its arrays and its files.

    checkpoints/500/meta.json       config, mesh, data position, versions, and each tensor's shape, dtype and digest
    checkpoints/500/arrays/         an array per tensor, readable on every mesh; Orbax writes all, then commits the folder
    checkpoints/500/integrity.json  size and CRC-32 of every file above, written when all of them are durable

meta.json is durable before the arrays are written. So a step is complete exactly when its arrays are committed, even if the
process is killed at any time. Older steps are deleted only after the new step is durable. Orbax does not detect a flipped bit
in an array. So each save stores digests of the state, computed on the devices (checkpoint/digests.py). Each restore compares
them with the digests of the restored arrays. The modules here handle flat dicts of arrays; jaxtrain/step/state.py
converts a train state to such a dict.

jax and Orbax are imported on first use; the import of Orbax takes 0.7 s. The command line imports neither. A run imports Orbax
during its first steps.
"""

import json
import os
from pathlib import Path

from jaxtrain.checkpoint.manager import HELD_OUT as HELD_OUT
from jaxtrain.checkpoint.manager import HELD_OUT_SETS as HELD_OUT_SETS
from jaxtrain.checkpoint.manager import Checkpoints as Checkpoints
from jaxtrain.checkpoint.manager import Save as Save
from jaxtrain.checkpoint.storage import CheckpointError as CheckpointError
from jaxtrain.checkpoint.storage import Damaged as Damaged
from jaxtrain.checkpoint.storage import NotFinite as NotFinite
from jaxtrain.checkpoint.storage import Storage, is_step
from jaxtrain.checkpoint.storage import Unreachable as Unreachable
from jaxtrain.config import stores


def locate_checkpoint(path: str | os.PathLike[str]) -> tuple[Checkpoints, int]:
    """Return (checkpoints, step) of a path, as `find_checkpoint` does. Raises CheckpointError if no step is complete."""
    return find_checkpoint(path)[:2]


def find_checkpoint(path: str | os.PathLike[str]) -> tuple[Checkpoints, int, float | None]:
    """Return (checkpoints, step, None) of a path: a run's folder, its checkpoints folder, or the folder of one step.

    If the path is not the folder of a step, the step is the newest one. If the newest one's config has checkpoint.keep_best, it
    is the one with the lowest held-out loss instead, and that loss takes the place of None. Raises CheckpointError if no step
    is complete.
    """
    text = os.fspath(path).rstrip("/")
    parent, _, name = text.rpartition("/")
    if is_step(name):
        checkpoints = Checkpoints(parent or ("/" if text.startswith("/") else "."))
        checkpoints.meta(int(name))
        return checkpoints, int(name), None
    if problem := stores.missing_folder(text):
        raise CheckpointError(f"{text}: {problem}")
    checkpoints = Checkpoints(folder_in(text))
    step = checkpoints.latest()
    if step is None:
        raise CheckpointError(f"{text}: no complete checkpoint in {checkpoints.directory}. {stores.NAME_WEIGHTS}")
    if checkpoints.meta(step).get("config", {}).get("checkpoint", {}).get("keep_best") and (best := checkpoints.lowest()):
        return checkpoints, *best
    return checkpoints, step, None


def folder_in(run: str) -> str:
    """Return the checkpoints folder of `run`: `checkpoint.dir` of its config.json if set, else checkpoints/ if it exists.

    Otherwise `run` itself is returned: it may be a checkpoints folder. In a bucket, config.json is not read.
    """
    inner = f"{run.rstrip('/')}/checkpoints"
    if stores.is_bucket(run):
        return inner if Storage(inner).states() else run
    config = Path(run) / "config.json"
    if config.exists():
        try:
            elsewhere = json.loads(config.read_text(encoding="utf-8")).get("checkpoint", {}).get("dir", "")
        except (ValueError, AttributeError) as e:
            raise CheckpointError(f"{config} is no config: {e}. Name the checkpoints folder itself.") from e
        if elsewhere:
            return elsewhere
    return inner if Path(inner).exists() else run
