"""The data of all steps of a run, from its folder: config.json, the newest checkpoint, and the data that was skipped."""

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config.schema import ConfigError, Data, RunConfig, from_dict
from jaxtrain.data.batches import open_source
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.opening import is_custom
from jaxtrain.data.seen import DataStretch, History, SeenError, Skipped
from jaxtrain.metrics import files as metrics
from jaxtrain.step import resume
from jaxtrain.step.validate_places import checkpoints_folder
from jaxtrain.train import position


def open_history(workdir: Path) -> History:
    """Return the data of the steps of a run. Steps after the newest checkpoint are those of a resume with config.json.

    Raises SeenError, ConfigError and CheckpointError.
    """
    run = _config(workdir)
    checkpoints = Checkpoints(checkpoints_folder(run.checkpoint.dir, workdir))
    step, meta = _newest(checkpoints)
    stored = meta.get("data", {})
    if imported := resume.check_trained(meta, str(checkpoints.directory)):
        raise ConfigError(imported)
    if is_custom(run.data.source):
        raise SeenError(f"data.source = {run.data.source}: only of token files is it known what a step reads")
    data_position = position.find_position(checkpoints.directory, step, stored.get("tokens", 0), run.ramp, run.data.seq_len)
    entries = position.extend_entries(stored.get("positions", []), position.position_entry(data_position, run.train, run.data))
    if entries[0]["step"]:
        rule = f"its checkpoints do not record which data the steps 1 to {entries[0]['step']} have read"
        raise SeenError(
            f"--workdir = {workdir}: {rule}, as an import or an older version. Fix: ask about a run of this version"
        )
    ends = [entry["step"] for entry in entries[1:]]
    stretches = [_stretch(entry, run.train.steps if end is None else end) for entry, end in zip_longest(entries, ends)]
    stretches = [each for each in stretches if each.first <= each.last]
    path = workdir / "metrics.jsonl"
    done = [line["step"] for line in metrics.read_metrics(path) if line["kind"] == "train"] if path.exists() else []
    skipped = [_skipped(item, stretches) for item in position.read_skipped(checkpoints.directory)]
    return History(stretches, _mixture(run, workdir, step, meta, data_position), max([step, *done[-1:]]), skipped)


def _config(workdir: Path) -> RunConfig:
    path = workdir / "config.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as e:
        raise SeenError(f"--workdir = {workdir}: no config.json there. Fix: name the folder of a run") from e
    except ValueError as e:
        raise SeenError(f"{path}: is no JSON ({e}). Fix: restore it, or resume the run, which writes it again") from e
    if not isinstance(tree, dict):
        raise SeenError(f"{path}: is no config. Fix: restore it, or resume the run, which writes it again")
    run, problems = from_dict(tree)
    if problems:
        raise SeenError(
            f"{path}: is of another version of jaxtrain ({problems[0]}). Fix: resume the run, which writes it again"
        )
    return run


def _newest(checkpoints: Checkpoints) -> tuple[int, dict[str, Any]]:
    """Return (step, meta.json) of the newest checkpoint whose meta.json can be read; (0, {}) without checkpoints.

    Raises CheckpointError if there are checkpoints, and none can be read.
    """
    damaged: dict[int, str] = {}
    step = checkpoints.latest(damaged)
    for at in damaged:
        print(f"note: the checkpoint of step {at} cannot be read; the answer follows from that of step {step}", file=sys.stderr)
    return (0, {}) if step is None else (step, checkpoints.meta(step))


def _mixture(run: RunConfig, workdir: Path, step: int, meta: Mapping[str, Any], data_position: position.Position) -> Mixture:
    """Return the mixture of a run that resumes from a checkpoint with this meta.json.

    The files of the config are opened only if the checkpoint has others: they may have moved since.
    """
    stored = meta.get("data", {})
    begin, seq_len = data_position.begin * run.ramp.unit, run.data.seq_len
    if "mixture" in stored and meta["config"]["data"]["source"] == run.data.source:
        mixture = Mixture(stored["mixture"]["sources"], stored["mixture"]["phases"][-1]["weights"], seq_len)
        mixture.start(stored["mixture"], stored["tokens"], step, begin)
        return mixture
    options: dict[str, Any] = {"split": "train", "global_batch": run.ramp.unit, "data_dir": Path(run.paths.data).expanduser()}
    try:
        source = open_source(run.data, run.data.source, **options)
    except ConfigError as e:
        rule = f"{e.problems[0].key} = {e.problems[0].value}: {e.problems[0].rule}"
        raise SeenError(
            f"{rule}. Fix: put it back there, and give the command in the folder in which the run was started"
        ) from e
    source.start_mixture(stored, step, begin)
    receipt = workdir / "receipt.json"
    read_data = json.loads(receipt.read_text(encoding="utf-8")).get("data") or {} if receipt.exists() else {}
    contents = {each["content_sha256"] for each in source.mixture.sources}
    if changed_files := [file["name"] for file in read_data.get("files", ()) if file["content_sha256"] not in contents]:
        raise SeenError(f"{changed_files[0]}: is another file than the run has read. Fix: put the former one back there")
    return source.mixture


def _skipped(item: Mapping[str, Any], stretches: Sequence[DataStretch]) -> Skipped:
    """Return an item of skipped_data.json."""
    first, last = item["steps"]
    stretch = next((each for each in stretches if each.first <= first <= each.last), stretches[-1])
    begin, end = (tokens // stretch.data.seq_len for tokens in item["tokens"])
    return Skipped(first, last, item["back_to"], np.arange(begin, end))


def _stretch(entry: Mapping[str, Any], last: int) -> DataStretch:
    data_position, unit = position.position_of(entry), entry["unit"]

    def rows(step: int) -> np.ndarray:
        return (np.asarray(data_position.batches(step - 1))[:, None] * unit + np.arange(unit)).ravel()

    data = Data(**{key: entry[key] for key in ("seq_len", "seed", "packing", "max_segments")})
    skipped = [
        (max(first, data_position.begin) * unit, end * unit)
        for first, end in data_position.skipped
        if end > data_position.begin
    ]
    return DataStretch(entry["step"] + 1, last, rows, data, skipped)
