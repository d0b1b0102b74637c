"""Saving and restoring a run's tensors.

A checkpoint is one folder per step:

    checkpoints/500/meta.json       config, rules, data position, versions, and each tensor's shape, dtype and digest
    checkpoints/500/arrays/         the tensors by their canonical names, written by Orbax, which renames it into place last
    checkpoints/500/integrity.json  size and CRC-32 of every file above, written when all of them are on disk

meta.json is written and synced before the arrays, so a step is complete exactly when both are there, whenever the process was
killed. Old steps are deleted only after the new one is on disk, and are renamed before they are deleted, so that half of a step
is never taken for one. (In a bucket nothing is renamed, and other marks say the same: place.py.) Orbax does not notice a
flipped bit in an array: the digests, taken of the state on its devices (jaxtrain/digests.py), are compared at every restore
with those of what was read. Everything here sees flat dicts of arrays; how a train state is laid out in memory is decided
elsewhere.

Orbax is imported on first use (0.7 s): a fresh run does not pay for it before its first step. `prepare` does it behind those
that follow. jax is imported by what saves and restores, so that the command line, which reads files alone, does without.
"""

import concurrent.futures
import dataclasses
import datetime
import functools
import json
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain import stores
from jaxtrain.checkpoint import files, place
from jaxtrain.checkpoint.arrays import context, innermost, of_processes, orbax
from jaxtrain.checkpoint.errors import CheckpointError as CheckpointError
from jaxtrain.checkpoint.errors import Damaged as Damaged
from jaxtrain.checkpoint.place import ARRAYS, META
from jaxtrain.checkpoint.steps import FORMAT, PEERS_S, Steps
from jaxtrain.distributed import Peers

if TYPE_CHECKING:
    import jax

    from jaxtrain.checkpoint.place import AnyPath

LOGGER = logging.getLogger("jaxtrain")


@dataclasses.dataclass(frozen=True)
class Saved:
    """A save that has reached the disk."""

    step: int
    bytes: int  # of all tensors, over all processes
    blocked_s: float  # seconds the training loop waited, to begin and for a still running earlier save
    copied_s: float  # seconds it took to make the copies: the devices take no step meanwhile
    total_s: float  # seconds from the beginning of the copies until the files were synced and old steps deleted
    host_gib: float  # the most memory this process has held so far, GiB


@dataclasses.dataclass(frozen=True)
class Failed:
    """A save that came to nothing. What it had written is gone again; complete steps are as they were."""

    step: int
    error: CheckpointError


@dataclasses.dataclass
class _Times:
    """Of a save under way, by time.perf_counter()."""

    began: float
    copying: float  # began then
    returned: float = 0.0  # to the loop
    copied: float = 0.0  # made by then


class Checkpoints(Steps):
    """The steps in one folder. Opening it writes nothing; every process of a run calls the same methods in the same order.

    directory: a folder on a local or network-mounted disk, or gs://BUCKET/PATH (checkpoint/place.py).
    keep: newest steps kept. keep_every: also keep every step that is a multiple of this; 0: none.
    peers: the processes of the run, which save and restore together.
    finite: whether parameters that are infinite or no number are refused, written and read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 1,
        keep_every: int = 0,
        peers: Peers | None = None,
        finite: bool = True,
    ):
        if keep < 1:
            raise ValueError(f"checkpoint.keep = {keep}: at least the newest step is kept. Set it to 1 or more.")
        super().__init__(directory)
        self._keep = keep
        self._keep_every = keep_every
        self._peers = peers or Peers(0, 1)
        self._primary = self._peers.process_index == 0
        self._finite = finite
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[Saved] | None = None
        self._pending_step = -1
        self._finished: list[Saved | Failed] = []
        self._newest = -1  # the newest step this object saved: does not depend on what a network file system shows
        self._device: int | None = None  # file system of the folder, once something was saved there

    # Saving

    @property
    def pending(self) -> int | None:
        """The step that is being saved; None where no save is under way."""
        return self._pending_step if self._pending is not None and not self._pending.done() else None

    def prepare(self) -> None:
        """Begin to get ready for the first save, in another thread."""
        threading.Thread(target=orbax, name="orbax").start()

    def save(
        self,
        step: int,
        tensors: "Mapping[str, jax.Array]",
        meta: Mapping[str, Any],
        sums: Callable[[], Mapping[str, np.ndarray]] | None = None,
        ended: Callable[[], None] = lambda: None,
        began: float | None = None,
        copying: float | None = None,
    ) -> float | None:
        """Start saving; returns the seconds it blocked, or None if this step is saved already (nothing is done then).

        The tensors are the save's own from here on: copies, where their originals are given away. A save still running is
        waited for first. `meta` must be JSON. sums: waits for the digests by name (digests.sums) that were taken of the state
        itself; without, they are taken of `tensors`. What becomes of the save, `poll` tells; a parameter that is infinite or no
        number makes it fail. ended: called in another thread as soon as the save has come to an end.
        began: time.perf_counter() before the tensors were copied, where the save's times are to count that. copying: when that
        began, if it was later.
        """
        now = time.perf_counter() if began is None else began
        times = _Times(now, now if copying is None else copying)
        self._settle()
        there = "there" if step == self._newest or self.is_there(step) else ""
        if self._peers.gather("save", there, PEERS_S)[0]:
            return None
        size = sum(x.nbytes for x in tensors.values())
        if sums is None:
            from jaxtrain import digests

            found = digests.of_many(dict(tensors))
            sums = lambda: found  # noqa: E731
        record = {**meta, "format": FORMAT, "step": step, "bytes": size, "time_unix": time.time()}
        record["shapes"] = {name: [list(x.shape), x.dtype.name] for name, x in tensors.items()}
        self._pending_step = step
        if self._peers.count == 1:
            job = functools.partial(self._write, record, dict(tensors), sums, times)
        else:
            # Orbax begins with a collective over the devices, and those must be in the same order on all processes.
            job = functools.partial(self._end, record, self._begun(record, dict(tensors), sums, times), times)
        times.returned = time.perf_counter()
        self._pending = self._worker.submit(job)
        self._pending.add_done_callback(lambda _: ended())
        return times.returned - times.began

    def save_now(self, step: int, tensors: "Mapping[str, jax.Array]", meta: Mapping[str, Any]) -> None:
        """Save, wait until it is on disk, and no more saves after it. Raises CheckpointError where that fails."""
        self.save(step, tensors, meta)
        for result in self.close():
            if isinstance(result, Failed):
                raise result.error

    def poll(self) -> list[Saved | Failed]:
        """Saves that ended since the last call. Costs nothing: call it every step."""
        if self._pending is not None and self._pending.done():
            self._settle()
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> list[Saved | Failed]:
        """`poll`, after waiting for a running save."""
        self._settle()
        return self.poll()

    def close(self) -> list[Saved | Failed]:
        """`wait`, and no more saves after it. Without it a program that ends at once may lose its last checkpoint."""
        try:
            return self.wait()
        finally:
            self._worker.shutdown()

    def _settle(self) -> None:
        if self._pending is None:
            return
        try:
            saved = self._pending.result()
        except Exception as e:  # Orbax, tensorstore and the file system each have their own; none may be lost
            self._pending = None
            self._finished.append(Failed(self._pending_step, self._failed(e)))
            return
        self._pending = None
        self._newest = saved.step
        self._finished.append(saved)

    def _failed(self, error: Exception) -> CheckpointError:
        """The error in our words, once what the save had written is gone: on a full disk it would be in the way of the next."""
        left = ""
        if self._primary:
            try:
                if self.place.state(self._pending_step) in ("complete", "damaged"):  # what comes after the arrays failed
                    self.place.delete(self._pending_step)
                self.place.sweep()
            except OSError as e:
                left = f" What it had written could not be removed ({e})."
        return CheckpointError(
            f"saving step {self._pending_step} to {self.directory} failed: {innermost(error)}.{left} Complete steps: "
            f"{self.listing()}. {self.place.way_out}"
        )

    def _write(self, record: dict[str, Any], tensors: dict[str, Any], sums: Any, times: _Times) -> Saved:
        """In the background: everything, where there is one process."""
        self._prepare(record, tensors, sums, times)
        ocp = orbax()
        folder = self.directory / str(record["step"])
        with context(ocp):
            ocp.save(folder / ARRAYS, tensors, overwrite=True)
        tensors.clear()  # copies of a whole state
        return self._commit(record, times)

    def _begun(self, record: dict[str, Any], tensors: dict[str, Any], sums: Any, times: _Times) -> Any:
        """Orbax's answer to come; None where a process could not begin, with its error."""
        try:
            self._prepare(record, tensors, sums, times)
            error = ""
        except Exception as e:
            error = innermost(e)
        errors = self._peers.gather("begun", error, PEERS_S)
        if any(errors):
            return RuntimeError(of_processes(errors))
        ocp = orbax()
        try:
            with context(ocp, processes=self._peers.count):
                return ocp.save_async(self.directory / str(record["step"]) / ARRAYS, tensors, overwrite=True)
        except Exception as e:
            return e

    def _end(self, record: dict[str, Any], begun: Any, times: _Times) -> Saved:
        """In the background: the rest, where there are several processes."""
        error = begun if isinstance(begun, Exception) else None
        if error is None:
            try:
                begun.result()  # pyright: ignore[reportAttributeAccessIssue]
            except Exception as e:
                error = e
        errors = self._peers.gather("written", innermost(error) if error else "", PEERS_S)
        if any(errors):
            raise RuntimeError(of_processes(errors))
        return self._commit(record, times)

    def _prepare(self, record: dict[str, Any], tensors: dict[str, Any], sums: Any, times: _Times) -> None:
        """meta.json, on disk before the arrays."""
        import jax

        from jaxtrain import digests

        jax.block_until_ready(tensors)
        times.copied = time.perf_counter()
        found = sums()
        wrong = {name: digests.not_finite(x) for name, x in found.items() if name.startswith("params.")}
        wrong = {name: count for name, count in wrong.items() if count}
        if wrong and self._finite:
            shown = ", ".join(f"{name} ({count:,} values)" for name, count in list(wrong.items())[:3])
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ValueError(f"parameters that are infinite or no number are not saved: {shown}{more}")
        if not self._primary:
            return
        self.place.check(record["bytes"], self._keep, self._device)
        folder = self.place.make(record["step"])
        self._device = self.place.file_system()
        shapes = record.pop("shapes")
        record["tensors"] = {name: [*shapes[name], digests.text(x)] for name, x in found.items()}
        self._write_meta(folder, files.sealed(record))

    def _commit(self, record: dict[str, Any], times: _Times) -> Saved:
        """Make it durable, write down what the files are, then delete what need not be kept.

        A failure on one process is one of all of them: each part ends with what everybody has to say of it.
        """
        step = record["step"]
        folder = self.directory / str(step)

        def synced() -> str:
            # Orbax leaves its small JSON files to the page cache. Synced before any older step goes, or a power cut could
            # take both.
            place.sync_tree(folder)
            place.sync(self.directory)
            return json.dumps(files.listed(folder))

        names = json.loads(self._together("synced", synced if self._primary else lambda: "")[0])
        # Read back, each process its share. It shows at once what did not reach the file system.
        shares = self._together(
            "files", lambda: json.dumps(files.measure(folder, names[self._peers.process_index :: self._peers.count]))
        )

        def written() -> str:
            found = {name: value for share in shares for name, value in json.loads(share).items()}
            self.place.write(folder / files.NAME, files.encode(found))
            return ""

        self._together("integrity", written if self._primary else lambda: "")
        if self._primary:
            self._delete_old()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        now = time.perf_counter()
        blocked, copied, total = times.returned - times.began, times.copied - times.copying, now - times.began
        return Saved(step, record["bytes"], blocked, copied, total, most)

    def _together(self, name: str, part: Callable[[], str]) -> list[str]:
        """What `part` gives on every process. Raises RuntimeError on all of them where it fails on one."""
        try:
            said = "ok " + part()
        except Exception as e:
            said = "no " + innermost(e)
        answers = self._peers.gather(name, said, PEERS_S)
        if any(answer.startswith("no ") for answer in answers):
            wrong = [answer[3:] if answer.startswith("no ") else "" for answer in answers]
            raise RuntimeError(of_processes(wrong) if self._peers.count > 1 else wrong[0])
        return [answer[3:] for answer in answers]

    def _delete_old(self) -> None:
        steps = self.steps()
        for old in steps[: -self._keep]:
            if self._keep_every and old % self._keep_every == 0:
                continue
            try:
                self.place.delete(old)
            except OSError as e:  # the new step is on disk: this is no reason to call its save a failure
                LOGGER.warning("%s", f"checkpoint {old} could not be deleted ({e}); the next save tries again")

    def _write_meta(self, folder: "AnyPath", text: str) -> None:
        self.place.write(folder / META, text)

    # Restoring

    def restore(
        self, step: int, abstract: "Mapping[str, jax.ShapeDtypeStruct]", *, subset: bool = False, cast: bool = False
    ) -> "dict[str, jax.Array]":
        """The tensors of a step as `abstract` asks for them, on any mesh; arguments and errors of `restoring.restore`."""
        from jaxtrain.checkpoint import restoring

        self._device = self.place.file_system()
        return restoring.restore(self, step, abstract, subset=subset, cast=cast, peers=self._peers, finite=self._finite)

    def set_aside(self, step_after: int, what: str = "going back to step {step}: later steps") -> str:
        """Move every step after this one to DIR/set_aside-TIME/; nothing is deleted. Returns a line saying so, '' if none.

        Raises CheckpointError if `step_after` itself is not a complete step: then nothing is moved.
        """
        self.meta(step_after)
        later = sorted(step for step in self.states() if step > step_after)
        self._newest = min(self._newest, step_after)
        self._peers.gather("aside", "", PEERS_S)  # nobody moves what another still has to see
        if not later:
            return ""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        target = self.directory / f"set_aside-{stamp}"
        if self._primary:
            self.place.set_aside(later, target.name)
        return f"{what.format(step=step_after)} {', '.join(map(str, later))} moved to {target}, none deleted"


def locate(path: str | os.PathLike[str]) -> tuple[Checkpoints, int]:
    """A run's folder, its checkpoints folder, or one step's folder -> the checkpoints and the step meant (the newest).

    Opened for reading. Raises CheckpointError if there is nothing complete to be read.
    """
    text = os.fspath(path).rstrip("/")
    parent, _, name = text.rpartition("/")
    if place.is_step(name):
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
    if stores.is_bucket(run):
        inner = f"{run.rstrip('/')}/checkpoints"
        return inner if place.at(inner).states() else run
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
