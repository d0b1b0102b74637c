"""Folders that a run reads and writes."""

import os
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.config import Problem, RunConfig
from jaxtrain.stores import GCS, is_bucket, refused


def check_places(run: RunConfig, workdir: Path) -> Iterable[Problem]:
    written = {"--workdir": str(workdir)}
    if run.checkpoint.dir:
        written["checkpoint.dir"] = run.checkpoint.dir
    if run.paths.cache:
        written["paths.cache"] = run.paths.cache
    # Imported here: the data pipeline sits on a higher floor.
    from jaxtrain.data.pipeline import parse_sets

    if "stdlib" in (run.data.source, *parse_sets(run.data.eval_source)[0].values()):
        written["paths.data"] = run.paths.data
    for key, place in written.items():
        checkpoints = key == "checkpoint.dir"
        yield from remote(key, place, checkpoints) or ([] if is_bucket(place) else writable(key, Path(place).expanduser()))
    if run.init.from_:
        gone = remote("init.from", run.init.from_, checkpoints=True)
        yield from gone
        if not gone and not run.init.from_.startswith(("hf:", GCS)) and not Path(run.init.from_).expanduser().is_dir():
            remedy = "Name a run's folder, one of its checkpoints/<step>, or a Hugging Face model's folder (or hf:NAME)."
            yield Problem("init.from", run.init.from_, "no such folder", remedy)
    yield from remote("data.source", run.data.source)
    yield from remote("data.eval_source", run.data.eval_source)


def remote(key: str, place: str, checkpoints: bool = False) -> list[Problem]:
    """s3:// and its like are refused: Path would make a local folder named 's3:' of them. Checkpoints may lie at gs://."""
    why = refused(place, checkpoints)
    return [Problem(key, place, *why)] if why else []


def writable(key: str, place: Path) -> list[Problem]:
    """Whether a folder can be made at, or written in, `place`; found out without writing.

    The nearest existing parent must be a folder that this user may write to. Root may write anywhere by its permission
    bits, so read-only mounts and the kernel's own file systems are looked at besides.
    """
    place = Path(os.path.abspath(place))
    nearest_parent = next(p for p in (place, *place.parents) if os.path.lexists(p))
    if not nearest_parent.is_dir():
        return [Problem(key, str(place), f"{nearest_parent} is a file, not a folder", "Name another place.")]
    real = nearest_parent.resolve()
    kernel = len(real.parts) > 1 and real.parts[1] in ("proc", "sys")
    read_only = os.statvfs(real).f_flag & os.ST_RDONLY
    if kernel or read_only or not os.access(real, os.W_OK | os.X_OK):
        return [Problem(key, str(place), f"{nearest_parent} is not writable", "Name another place, or change its permissions.")]
    return []
