"""Check the folders that a run reads and writes."""

import fcntl
import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.config.launch import LoadedConfig
from jaxtrain.config.schema import Problem, RunConfig, flatten, to_dict
from jaxtrain.config.stores import NAME_WEIGHTS, is_bucket, path_problem
from jaxtrain.runtime.variables import RESTART
from jaxtrain.step import resume

LONGEST_NAME, LONGEST_PATH = 255, 3000  # bytes of a folder's name on Linux, and of its path, with room for the files inside


def check_places(run: RunConfig, workdir: Path) -> Iterable[Problem]:
    written = {"--workdir": str(workdir)}
    if run.checkpoint.dir:
        written["checkpoint.dir"] = run.checkpoint.dir
    if run.paths.cache:
        written["paths.cache"] = run.paths.cache
    # Imported here: the data pipeline is in a higher layer.
    from jaxtrain.data.opening import parse_sets

    if "stdlib" in (run.data.source, *parse_sets(run.data.eval_source)[0].values()):
        written["paths.data"] = run.paths.data
    for key, path in written.items():
        checkpoints = key == "checkpoint.dir"
        yield from check_remote(key, path, checkpoints) or (
            [] if is_bucket(path) else check_writable(key, Path(path).expanduser())
        )
    resumes = bool(_saved_steps(run.checkpoint.dir, workdir))  # then init.from is not read, or only for the base of adapters
    for key, path in (("init.from", run.init.from_), ("init.base", run.init.base)):
        problems = check_remote(key, path, checkpoints=True)
        yield from problems
        elsewhere = path.startswith("hf:") or is_bucket(path) or (key == "init.from" and resumes)
        if path and not problems and not elsewhere and not os.path.isdir(Path(path).expanduser()):
            yield Problem(key, path, "no such folder", NAME_WEIGHTS)
    yield from check_remote("data.source", run.data.source)
    yield from check_remote("data.eval_source", run.data.eval_source)


def checkpoints_folder(checkpoint_dir: str, workdir: Path) -> Path:
    """Return the local folder of checkpoints. checkpoint_dir: checkpoint.dir."""
    return Path(checkpoint_dir).expanduser() if checkpoint_dir else workdir / "checkpoints"


def _saved_steps(checkpoint_dir: str, workdir: Path) -> list[int] | None:
    """Return the saved steps in the folder of checkpoints, ascending; None if it is in a bucket, or does not exist."""
    folder = checkpoints_folder(checkpoint_dir, workdir)
    if is_bucket(checkpoint_dir or str(workdir)) or not os.path.isdir(folder):
        return None
    from jaxtrain.checkpoint.storage import Storage  # only a run that may resume needs it

    return sorted(step for step, state in Storage(folder).states().items() if state != "unfinished")


def check_resume(run: RunConfig, workdir: Path) -> list[Problem]:
    """Return the problems of a resume that can be found in files, before JAX starts.

    If checkpoint.step is set, the problem is that there is no such checkpoint. Otherwise the problems are a newest checkpoint
    past train.steps, and forbidden changes of the config since the newest checkpoint. The start of the run checks again, with
    JAX. Checkpoints in a bucket, an unreadable meta.json, and experts with a capacity factor are checked only at the start.
    """
    folder, steps = checkpoints_folder(run.checkpoint.dir, workdir), _saved_steps(run.checkpoint.dir, workdir)
    if steps is None:
        return []
    step = run.checkpoint.step
    if step >= 0:
        # A restarted run may have deleted the step that it rolled back to.
        if step in steps or RESTART in os.environ:
            return []
        available = ", ".join(map(str, steps)) or "none"
        return [Problem("checkpoint.step", step, f"{folder} has no such step", f"Set one of its steps: {available}.")]
    newest = max(steps, default=0)
    if newest > run.train.steps:
        rule, remedy = f"the newest checkpoint is at step {newest} already", f"Set {newest} or more, or another --workdir."
        return [Problem("train.steps", run.train.steps, rule, remedy)]
    try:
        meta = json.loads((folder / str(newest) / "meta.json").read_text(encoding="utf-8"))
        stored = meta["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not isinstance(stored, dict) or (run.model.num_experts and run.moe.capacity_factor):
        return []
    if imported := resume.check_trained(meta, str(workdir)):
        return imported
    from jaxtrain.data import tokenizer

    return resume.compare_configs(
        stored, to_dict(run), run.checkpoint.allow_change, tokenizer.tokenizer_hashes(meta, run.data.tokenizer)
    )[1]


def check_settings_given(loaded: LoadedConfig, workdir: Path) -> list[Problem]:
    """Return a problem if a command without --config would resume a run with another config than the run has.

    Such a command reads the default config. The command is refused if a key that it does not set differs from the run's config.
    """
    if any(word.partition("=")[0] == "--config" for word in loaded.launch.argv):
        return []
    try:
        receipt = json.loads((workdir / "receipt.json").read_text(encoding="utf-8"))
        words, stored = shlex.split(receipt["command"]), dict(flatten(receipt["resolved"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    given = {word.partition("=")[0] for word in loaded.launch.argv}
    settings = [word for word in words if word.startswith("--config") and word.partition("=")[0] not in given]
    set_keys = {key for key, origin in loaded.origins.items() if origin in ("command line", "derived")}
    now = loaded.run.flat
    if not settings or all(stored[key] == now[key] for key in stored.keys() & now.keys() - set_keys):
        return []
    rule = "the folder has a run with other settings, and this command has no --config"
    return [Problem("--workdir", str(workdir), rule, f"Add those of the run: {shlex.join(settings)}")]


def check_lock(workdir: Path) -> list[Problem]:
    """Return a problem if another run has the lock of `workdir`. This check keeps no lock: the run takes its own lock later."""
    if is_bucket(str(workdir)) or not os.path.isdir(workdir):
        return []
    handle = os.open(workdir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        rule = "another run is at work in this folder"
        return [Problem("--workdir", str(workdir), rule, "Wait for it, stop it, or name another folder.")]
    except OSError:  # some network file systems cannot lock a folder
        return []
    finally:
        os.close(handle)
    return []


def check_remote(key: str, path: str, checkpoints: bool = False) -> list[Problem]:
    """Return a problem if `path` is the address of an object store, which Path would read as a local folder.

    checkpoints: the place is for checkpoints, which may be at gs:// and s3://.
    """
    why = path_problem(path, checkpoints)
    return [Problem(key, path, *why)] if why else []


def _not_for_checkpoints(path: str) -> tuple[str, str] | None:
    """Return (rule, remedy) if Orbax and TensorStore would read this path as another one; None if not."""
    if "[" in path:
        return "has a [ in its path, which Orbax reads as a pattern of file names", "Name a path without it."
    try:
        path.encode()
    except UnicodeEncodeError:
        return "is no path of UTF-8, and checkpoints cannot be saved there", "Name another place."
    if not path.isascii() and sys.getfilesystemencoding() != "utf-8":
        rule = f"is read in {sys.getfilesystemencoding()} by this Python program, and as UTF-8 where checkpoints are saved"
        return rule, "Set PYTHONUTF8=1 before Python starts."
    return None


def check_writable(key: str, folder: Path) -> list[Problem]:
    """Return a problem if `folder` cannot be created or written in. Writes nothing.

    `folder`, or its nearest parent that exists, must be a folder that this user may write to. Permission bits let root write
    anywhere, so read-only mounts and the kernel's own file systems are checked as well.
    """
    folder = Path(os.path.abspath(folder))
    if key in ("--workdir", "workdir", "checkpoint.dir") and (unsaved := _not_for_checkpoints(str(folder))):
        return [Problem(key, str(folder), *unsaved)]
    if len(os.fsencode(folder)) > LONGEST_PATH or any(len(os.fsencode(name)) > LONGEST_NAME for name in folder.parts):
        return [Problem(key, str(folder), "is longer than a path or a name may be", "Name another place.")]
    nearest_parent = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    if not nearest_parent.is_dir():
        return [Problem(key, str(folder), f"{nearest_parent} is a file, not a folder", "Name another place.")]
    real = nearest_parent.resolve()
    kernel = len(real.parts) > 1 and real.parts[1] in ("proc", "sys")
    read_only = os.statvfs(real).f_flag & os.ST_RDONLY
    if kernel or read_only or not os.access(real, os.W_OK | os.X_OK):
        return [
            Problem(key, str(folder), f"{nearest_parent} is not writable", "Name another place, or change its permissions.")
        ]
    return []
