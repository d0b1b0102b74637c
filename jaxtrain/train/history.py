"""The data of all steps of a run, from its folder: config.json, the newest checkpoint, and the data that was skipped."""

import json
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config.schema import ConfigError, Data, from_dict
from jaxtrain.data.batches import open_source
from jaxtrain.data.seen import History, SeenError, Stretch
from jaxtrain.metrics import files as metrics
from jaxtrain.step.validate_places import checkpoints_folder
from jaxtrain.train import position


def open_history(workdir: Path) -> History:
    """Return the data of the steps of a run. Steps after the newest checkpoint are those of a resume with config.json.

    Raises SeenError, ConfigError and CheckpointError.
    """
    try:
        tree = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise SeenError(f"--workdir = {workdir}: no config.json there. Fix: name the folder of a run") from e
    run, problems = from_dict(tree)
    if problems:
        raise ConfigError(problems)
    checkpoints = Checkpoints(checkpoints_folder(run.checkpoint.dir, workdir))
    at = checkpoints.latest()
    step, stored = (0, {}) if at is None else (at, checkpoints.meta(at)["data"])
    how: dict[str, Any] = {"split": "train", "global_batch": run.ramp.unit, "data_dir": Path(run.paths.data).expanduser()}
    source = open_source(run.data, run.data.source, **how)
    if not hasattr(source, "mixture"):
        raise SeenError(f"data.source = {run.data.source}: only of token files is it known what a step reads")
    place = position.position(checkpoints.directory, step, stored.get("tokens", 0), run.ramp, run.data.seq_len)
    source.start_mixture(stored, step, place.begin * run.ramp.unit)
    entries = position.extended(stored.get("positions", []), position.record(place, run.train, run.data))
    ends = [entry["step"] for entry in entries[1:]]
    stretches = [_stretch(entry, run.train.steps if end is None else end) for entry, end in zip_longest(entries, ends)]
    done = [line["step"] for line in metrics.read(workdir / "metrics.jsonl") if line["kind"] == "train"]
    return History([each for each in stretches if each.first <= each.last], source.mixture, max([step, *done[-1:]]))


def _stretch(entry: Mapping[str, Any], last: int) -> Stretch:
    place, unit = position.position_of(entry), entry["unit"]

    def rows(step: int) -> np.ndarray:
        return (np.asarray(place.batches(step - 1))[:, None] * unit + np.arange(unit)).ravel()

    data = Data(**{key: entry[key] for key in ("seq_len", "seed", "packing", "max_segments")})
    skipped = [(max(first, place.begin) * unit, end * unit) for first, end in place.skipped if end > place.begin]
    return Stretch(entry["step"] + 1, last, rows, data, skipped)
