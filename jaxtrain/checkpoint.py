"""Saving and restoring a run's tensors, and `python -m jaxtrain.checkpoint list DIR`.

A checkpoint is one folder per step:

    checkpoints/500/meta.json    config, rules, data position, versions: plain JSON, written and synced to disk first
    checkpoints/500/arrays/      the tensors by their canonical names, written by Orbax, which renames it into place last

So a step is complete exactly when both are there, whenever the process was killed. Old steps are deleted only after the new
one is on disk, and are renamed before they are deleted, so that half of a step is never taken for one. Everything here sees
flat dicts of arrays; how a train state is laid out in memory is decided elsewhere.

Orbax is imported on first use (0.7 s): a fresh run does not pay for it before its first step.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

FORMAT = 1
META = "meta.json"
ARRAYS = "arrays"
DELETING = ".deleting"
# Bounds on Orbax's files: a reader on another mesh fetches whole chunks, a copying tool moves whole files.
CHUNK_BYTES = 64 << 20
FILE_BYTES = 1 << 30


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, read, or does not fit what it is to be restored into. Says what to do."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A save that has reached the disk."""

    step: int
    bytes: int  # of all tensors, over all processes
    blocked_s: float  # seconds the training loop waited, a still running earlier save included
    total_s: float  # seconds from the call until the files were synced and old steps deleted


class Checkpoints:
    """The steps in one folder. Opening it writes nothing; every process of a run calls the same methods in the same order.

    directory: a folder on a local or network-mounted disk.
    keep: newest steps kept. keep_every: also keep every step that is a multiple of this; 0: none.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 1, keep_every: int = 0):
        if keep < 1:
            raise ValueError(f"checkpoint.keep = {keep}: at least the newest step is kept. Set it to 1 or more.")
        self.directory = Path(directory).expanduser().absolute()
        self._keep = keep
        self._keep_every = keep_every
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[Saved] | None = None
        self._finished: list[Saved] = []
        self._newest = -1  # the newest step this object saved: does not depend on what a network file system shows

    # What is there

    def steps(self) -> list[int]:
        """Complete steps, ascending. Unfinished and damaged ones are left out."""
        return sorted(step for step, state in self.states().items() if state == "complete")

    def states(self) -> dict[int, str]:
        """Every step folder: 'complete', 'unfinished' (the save was cut off) or 'damaged' (arrays without meta.json)."""
        if not self.directory.exists():
            return {}
        return {int(f.name): self._state(f) for f in self.directory.iterdir() if _is_step(f.name) and f.is_dir()}

    def latest(self) -> int | None:
        """The newest step, to resume from; None where nothing was ever completely saved.

        Raises CheckpointError when the newest one cannot be read: starting afresh, or from an older step, over existing
        checkpoints has to be the user's decision.
        """
        steps = [step for step, state in self.states().items() if state != "unfinished"]
        if not steps:
            return None
        self.meta(max(steps))
        return max(steps)

    def meta(self, step: int) -> dict[str, Any]:
        """What `save` was given as `meta`, with `format`, `step`, `bytes` and `time_unix` (seconds) added.

        Raises CheckpointError when the step is not there, was cut off, or its meta.json cannot be read.
        """
        folder = self.directory / str(step)
        state = self._state(folder) if folder.exists() else "missing"
        if state in ("missing", "unfinished"):
            what = "there is no such checkpoint" if state == "missing" else "its save was cut off"
            raise CheckpointError(f"step {step} in {self.directory}: {what}. Complete steps: {self._listing()}.")
        try:
            meta = json.loads((folder / META).read_text())
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{folder / META} cannot be read ({e}). {self._way_out(step)}") from e
        if not isinstance(meta, dict) or not isinstance(meta.get("format"), int):
            raise CheckpointError(f"{folder / META} holds no format version. {self._way_out(step)}")
        if meta["format"] > FORMAT:
            raise CheckpointError(
                f"{folder / META}: format {meta['format']} is newer than the {FORMAT} this jaxtrain reads. Install the version "
                f"that wrote it (see 'versions' in that file). {self._way_out(step)}"
            )
        return meta

    def stored(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Name -> shape and dtype of every tensor of a step, without reading the tensors."""
        self.meta(step)
        ocp = _orbax()
        try:
            tree = ocp.metadata(self.directory / str(step) / ARRAYS).metadata
            return {name: jax.ShapeDtypeStruct(tuple(m.shape), m.dtype) for name, m in tree.items()}
        except Exception as e:  # Orbax raises whatever its parts raise; all of it means the same here
            raise CheckpointError(
                f"the list of tensors in {self.directory / str(step) / ARRAYS} cannot be read: {_innermost(e)}. "
                f"{self._way_out(step)}"
            ) from e

    # Saving

    def save(self, step: int, tensors: Mapping[str, jax.Array], meta: Mapping[str, Any]) -> float | None:
        """Start saving; returns the seconds it blocked, or None if this step is saved already (nothing is done then).

        The tensors may be donated to the next step as soon as this returns. A save still running is waited for first, and
        its error raised here if `poll` has not raised it. `meta` must be JSON. Raises CheckpointError when the save cannot
        begin: no space, no permission.
        """
        start = time.perf_counter()
        self._settle()
        if step == self._newest or step in self.steps():
            return None
        ocp = _orbax()
        size = sum(x.nbytes for x in tensors.values())
        folder = self.directory / str(step)
        record = {**meta, "format": FORMAT, "step": step, "bytes": size, "time_unix": time.time()}
        text = json.dumps(record, indent=1) + "\n"
        primary = jax.process_index() == 0
        if primary:
            self._sweep()
        self._check_space(size)
        try:
            if primary:
                folder.mkdir(parents=True, exist_ok=True)
                self._write_meta(folder, text)
            with _context(ocp):
                response = ocp.save_async(folder / ARRAYS, dict(tensors), overwrite=True)
        except Exception as e:  # Orbax, tensorstore and the file system each have their own; none may be lost
            raise self._failed(e) from e
        blocked = time.perf_counter() - start
        self._pending = self._worker.submit(self._finish, step, size, response, start, blocked, primary)
        return blocked

    def poll(self) -> list[Saved]:
        """Saves finished since the last call; raises CheckpointError if one failed. Costs nothing: call it every step."""
        if self._pending is not None and self._pending.done():
            self._settle()
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> list[Saved]:
        """`poll`, after waiting for a running save."""
        self._settle()
        return self.poll()

    def close(self) -> list[Saved]:
        """`wait`, and no more saves after it. Without it a program that ends at once may lose its last checkpoint."""
        try:
            return self.wait()
        finally:
            self._worker.shutdown()

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            saved = pending.result()
        except Exception as e:
            raise self._failed(e) from e
        self._newest = saved.step
        self._finished.append(saved)

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"saving to {self.directory} failed: {_innermost(error)}. Complete steps: {self._listing()}. "
            "Free some space or set checkpoint.dir to another place; the next save tries again."
        )

    def _finish(self, step: int, size: int, response: Any, start: float, blocked: float, primary: bool) -> Saved:
        """In the background: wait for Orbax, make it durable, then delete what need not be kept."""
        response.result()
        if primary:
            # Orbax leaves its small JSON files to the page cache. Synced before any older step goes, or a power cut could
            # take both.
            _sync_tree(self.directory / str(step))
            _sync(self.directory)
            steps = self.steps()
            for old in steps[: -self._keep]:
                if not (self._keep_every and old % self._keep_every == 0):
                    self._delete(self.directory / str(old))
        return Saved(step, size, blocked, time.perf_counter() - start)

    def _write_meta(self, folder: Path, text: str) -> None:
        partial = folder / (META + ".partial")
        with open(partial, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        partial.replace(folder / META)
        _sync(folder)

    def _check_space(self, size: int) -> None:
        place = self.directory
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if free < size:
            raise CheckpointError(
                f"{self.directory} has {free / 2**30:.2f} GiB free, a checkpoint needs {size / 2**30:.2f} GiB. "
                f"Free some space, lower checkpoint.keep (now {self._keep}) or set checkpoint.dir to another place."
            )

    def _sweep(self) -> None:
        """Remove what cut-off saves and deletions left: it can never be restored and would fill the disk."""
        if not self.directory.exists():
            return
        for folder in list(self.directory.iterdir()):
            number, _, rest = folder.name.partition(".")
            if _is_step(number) and (f".{rest}" == DELETING or (not rest and self._is_leftover(folder))):
                shutil.rmtree(folder)

    def _is_leftover(self, folder: Path) -> bool:
        """Only what `save` itself writes before the end: anything else in the folder was put there by somebody."""
        names = [entry.name for entry in folder.iterdir()]
        ours = all(n in (META, META + ".partial") or n.startswith(ARRAYS) for n in names)
        return ours and self._state(folder) == "unfinished"

    def _delete(self, folder: Path) -> None:
        shutil.rmtree(folder.rename(folder.parent / (folder.name + DELETING)))

    # Restoring

    def restore(
        self, step: int, abstract: Mapping[str, jax.ShapeDtypeStruct], *, subset: bool = False, cast: bool = False
    ) -> dict[str, jax.Array]:
        """The tensors of a step, each with the shape, dtype and sharding `abstract` asks for, on any mesh.

        subset: `abstract` may name a part of the tensors; the others are not read. cast: a float may become another float
        type (rounded to nearest); otherwise a different dtype is an error.
        Raises CheckpointError, before any tensor is read, naming what differs between checkpoint and run.
        """
        problems = differences(self.stored(step), abstract, subset=subset, cast=cast)
        folder = self.directory / str(step)
        if problems:
            shown = problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else [])
            raise CheckpointError(
                f"checkpoint {folder} does not fit this run ({len(problems)} differences):\n  "
                + "\n  ".join(shown)
                + "\nUse the config that wrote it (key 'config' in its meta.json), or another workdir for a new run."
            )
        ocp = _orbax()
        try:
            with _context(ocp, subset):
                return ocp.load(folder / ARRAYS, dict(abstract))
        except Exception as e:  # a page of wrappers around one sentence
            raise CheckpointError(f"{folder / ARRAYS} cannot be read: {_innermost(e)}. {self._way_out(step)}") from e

    def set_aside(self, step_after: int) -> str:
        """Move every step after this one to DIR/set_aside-TIME/; nothing is deleted. Returns a line saying so, '' if none.

        Raises CheckpointError if `step_after` itself is not a complete step: then nothing is moved.
        """
        self.meta(step_after)
        later = sorted(step for step in self.states() if step > step_after)
        if not later:
            return ""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        target = self.directory / f"set_aside-{stamp}"
        if jax.process_index() == 0:
            target.mkdir()
            for step in later:
                (self.directory / str(step)).rename(target / str(step))
        self._newest = min(self._newest, step_after)
        return f"going back to step {step_after}: later steps {', '.join(map(str, later))} moved to {target}, none deleted"

    def _state(self, folder: Path) -> str:
        # Orbax writes beside it and renames `arrays` into place at the end.
        if not (folder / ARRAYS).exists():
            return "unfinished"
        return "complete" if (folder / META).exists() else "damaged"

    def _listing(self) -> str:
        return ", ".join(map(str, self.steps())) or "none"

    def _way_out(self, step: int) -> str:
        earlier = [s for s in self.steps() if s < step]
        if earlier:
            return (
                f"To go on from the step before: --config.checkpoint.step={earlier[-1]} (this one is set aside, not deleted)."
            )
        return f"There is no earlier step: restore {self.directory / str(step)} from a copy, or move it away to start afresh."


def differences(
    stored: Mapping[str, jax.ShapeDtypeStruct], wanted: Mapping[str, jax.ShapeDtypeStruct], *, subset: bool, cast: bool
) -> list[str]:
    """One line for each tensor missing, left over, or of another shape or dtype. The flags are those of `restore`."""
    out = [f"{name}: not in the checkpoint" for name in sorted(wanted.keys() - stored.keys())]
    if not subset:
        out += [f"{name}: in the checkpoint, not in this run" for name in sorted(stored.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        have, want = stored[name], wanted[name]
        floats = jnp.issubdtype(have.dtype, jnp.floating) and jnp.issubdtype(want.dtype, jnp.floating)
        if have.shape != want.shape:
            out.append(f"{name}: shape {have.shape} in the checkpoint, {want.shape} in this run")
        elif have.dtype != want.dtype and not (cast and floats):
            out.append(f"{name}: dtype {have.dtype} in the checkpoint, {want.dtype} in this run")
    return out


def locate(path: str | os.PathLike[str]) -> tuple[Checkpoints, int]:
    """A run's folder, its checkpoints folder, or one step's folder -> the checkpoints and the step meant (the newest).

    Opened for reading. Raises CheckpointError if there is nothing complete to be read.
    """
    text = os.fspath(path).rstrip("/")
    parent, _, name = text.rpartition("/")
    if _is_step(name):
        found = Checkpoints(parent or ("/" if text.startswith("/") else "."))
        found.meta(int(name))
        return found, int(name)
    found = Checkpoints(folder_in(text))
    step = found.latest()
    if step is None:
        raise CheckpointError(
            f"{text}: no complete checkpoint in {found.directory}. Name a run's folder, its checkpoints folder, or "
            "one checkpoints/STEP."
        )
    return found, step


def folder_in(run: str) -> str:
    """Where a run's folder keeps its checkpoints: `checkpoint.dir` of its config.json, else checkpoints/, else itself."""
    config = Path(run) / "config.json"
    if config.exists():
        try:
            elsewhere = json.loads(config.read_text()).get("checkpoint", {}).get("dir", "")
        except (ValueError, AttributeError) as e:
            raise CheckpointError(f"{config} is no config: {e}. Name the checkpoints folder itself.") from e
        if elsewhere:
            return elsewhere
    inner = Path(run) / "checkpoints"
    return os.fspath(inner) if inner.exists() else run


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def _orbax() -> Any:
    # `import orbax.checkpoint.v1` does not work in 0.12: v1 is an attribute.
    from orbax.checkpoint import v1 as ocp

    return ocp


def _context(ocp: Any, subset: bool = False) -> Any:
    context = ocp.Context()
    saving = context.array.saving
    saving.use_compression = False  # random floats do not compress; zstd costs most of the time of a save
    saving.ocdbt_target_data_file_size = FILE_BYTES
    saving.storage_options.chunk_byte_size = CHUNK_BYTES
    # Created in the background, a folder that cannot be created leaves threads waiting for it: 20 minutes at exit.
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = subset
    return context


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


def _sync(path: str | os.PathLike[str]) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(root: str | os.PathLike[str]) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder, name))
        _sync(folder)


def main(argv: list[str] | None = None) -> int:
    """The command line. Touches no device."""
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.checkpoint", description="Look at what a run saved.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="every step: when, how large, its loss, and whether it is complete")
    listing.add_argument("dir", help="a run's folder or its checkpoints folder")
    args = parser.parse_args(argv)
    try:
        return _print_list(args.dir)
    except CheckpointError as e:
        print(e, file=sys.stderr)
        return 2


def _print_list(path: str) -> int:
    from rich.console import Console
    from rich.table import Table

    found = Checkpoints(folder_in(path))
    states = found.states()
    if not states:
        raise CheckpointError(f"{found.directory}: no checkpoints there. Name a run's folder or its checkpoints folder.")
    table = Table(title=os.fspath(found.directory), title_justify="left")
    for name in ("step", "saved", "GiB", "loss"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for step, state in sorted(states.items()):
        saved = size = loss = "-"
        if state == "complete":
            try:
                meta = found.meta(step)
            except CheckpointError as e:
                state = f"damaged: {e}"
            else:
                saved = datetime.datetime.fromtimestamp(meta["time_unix"]).strftime("%Y-%m-%d %H:%M:%S")
                size = f"{meta['bytes'] / 2**30:.3f}"
                loss = f"{meta['loss']:.4f}" if isinstance(meta.get("loss"), float) else "-"
        table.add_row(str(step), saved, size, loss, state)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
