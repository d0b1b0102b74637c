"""The steps in a folder of checkpoints: save them in the background, restore them on any mesh, and delete old ones."""

import concurrent.futures
import dataclasses
import datetime
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.checkpoint import files
from jaxtrain.checkpoint.arrays import PEERS_S, describe_error, differences, first_cause, import_orbax, orbax_context
from jaxtrain.checkpoint.storage import ARRAYS, META, CheckpointError, Damaged, NotFinite, Storage, Unreachable
from jaxtrain.runtime.distributed import Peers

if TYPE_CHECKING:
    import jax

LOGGER = logging.getLogger("jaxtrain")
# In meta.json of a step that was evaluated: the mean loss over the held-out sets, and a text that tells other sets apart
HELD_OUT, HELD_OUT_SETS = "held_out_loss", "held_out_sets"
FORMAT = 5  # of meta.json, with how the model's texts end and its longest sequence


@dataclasses.dataclass
class Save:
    """A save of a step, from its beginning to its end. Times are by time.perf_counter(), and 0.0 until they are reached."""

    step: int
    bytes: int  # of all tensors, over all processes
    held_out: float  # the step's held-out loss; inf if it has none
    began: float  # when the loop began to wait for this save, and for an earlier save before it
    copying: float  # when copying of the tensors began, during which the devices run no step
    copied: float = 0.0
    returned: float = 0.0  # to the loop
    ended: float = 0.0  # when the files were durable and old steps deleted, or when it had failed
    error: CheckpointError | None = None  # why it failed: its files are removed, and complete steps are unchanged


class Checkpoints:
    """The steps in one folder, to save, restore and delete. The constructor writes nothing.

    Every process of a run calls the same methods in the same order.

    Args:
      directory: a folder on a local or network-mounted disk, or gs://BUCKET/PATH, or s3://BUCKET/PATH.
      keep: number of newest steps to keep.
      keep_every: also keep each step that is a multiple of this number; 0: no other steps.
      peers: the processes of the run, which save and restore together.
      finite: raise an error for infinite or NaN parameters, both in a save and in a restore.
      keep_best: also keep the step with the lowest held-out loss (`lowest`).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 1,
        keep_every: int = 0,
        peers: Peers | None = None,
        finite: bool = True,
        keep_best: bool = False,
    ):
        if keep < 1:
            raise ValueError(f"checkpoint.keep = {keep}: at least the newest step is kept. Set it to 1 or more.")
        self.storage = Storage(directory)
        self.directory = self.storage.path
        self._keep, self._keep_every, self._keep_best = keep, keep_every, keep_best
        self._peers = peers or Peers(0, 1)
        self._primary = self._peers.process_index == 0
        self._finite = finite
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: tuple[Save, concurrent.futures.Future[None]] | None = None
        self._finished: list[Save] = []
        self._newest = -1  # the newest step this object saved: a network file system may list it late

    def _on_all_processes(self, name: str, task: Callable[[], Any]) -> list[Any]:
        """Call `task` on every process, and return all results, which are JSON values.

        If a call fails, every process raises: its own error or, without one, CheckpointError with the errors of the others,
        or Damaged if one of them is.
        """
        result, error = None, None
        try:
            result = task()
        except Exception as e:  # Orbax, tensorstore and the file system each raise their own errors
            error = e
        answer = json.dumps([result, describe_error(error) if error else ""])
        answers = [json.loads(text) for text in self._peers.gather(name, answer, PEERS_S)]
        if error:
            raise error
        if errors := "; ".join(f"process {i}: {why}" for i, (_, why) in enumerate(answers) if why):
            raise (Damaged if ": Damaged: " in errors else CheckpointError)(errors)
        return [result for result, _ in answers]

    # Listing

    def steps(self) -> list[int]:
        """Return the numbers of the complete steps, ascending."""
        return sorted(step for step, state in self.states().items() if state == "complete")

    def states(self) -> dict[int, str]:
        """Return step -> state of every step: 'complete', 'unfinished' or 'damaged'.

        A step is unfinished if its save or its deletion was interrupted. A damaged step was complete, and lacks files now.
        """
        return self.storage.states()

    def latest(self, damaged: dict[int, str] | None = None) -> int | None:
        """Return the newest step whose meta.json can be read; None if no save was ever completed.

        Args:
          damaged: steps to ignore -> reasons. Steps whose meta.json is damaged are added. None: a damaged newest step is an
            error.

        Raises:
          Damaged: the newest step is damaged, and `damaged` is None.
          CheckpointError: all existing steps are ignored or damaged. Only the user may decide to start at step 0 over them.
        """
        steps = sorted((step for step, state in self.states().items() if state != "unfinished"), reverse=True)
        for step in steps:
            if damaged is not None and step in damaged:
                continue
            try:
                self.meta(step)
            except Damaged as error:
                if damaged is None:
                    raise
                damaged[step] = str(error)
                continue
            return step
        if not steps:
            return None
        reasons = "".join(f"\n  {step}: {why}" for step, why in sorted((damaged or {}).items(), reverse=True))
        raise CheckpointError(
            f"no good checkpoint is left in {self.directory}, and a run never starts at step 0 over existing ones:{reasons}\n"
            "Restore one from a copy, or move the folder away to start at step 0."
        )

    def lowest(self, sets: str | None = None) -> tuple[int, float] | None:
        """Return (step, held-out loss) of the complete step with the lowest finite `HELD_OUT` in its meta.json.

        Only losses of the same held-out sets are compared. Of equal losses, the oldest step is returned. None: no step has one.
        A damaged meta.json does not count. Raises CheckpointError if a meta.json cannot be read now.

        sets: `HELD_OUT_SETS` of the losses; None: of the newest step that was evaluated.
        """
        candidates: list[tuple[float, int, str]] = []
        for step in self.steps():
            try:
                meta = self.meta(step)
            except Damaged:
                continue
            except CheckpointError:
                if self.storage.state(step) in ("missing", "unfinished"):  # the run has deleted it since
                    continue
                raise
            if isinstance(loss := meta.get(HELD_OUT), int | float) and math.isfinite(loss):
                candidates.append((float(loss), step, meta.get(HELD_OUT_SETS, "")))
        if not candidates:
            return None
        sets = max(candidates, key=lambda each: each[1])[2] if sets is None else sets
        comparable = [(loss, step) for loss, step, loss_sets in candidates if loss_sets == sets]
        return (min(comparable)[1], min(comparable)[0]) if comparable else None

    def meta(self, step: int) -> dict[str, Any]:
        """Return meta.json of a step: `meta` of the save, and `format`, `step`, `bytes`, `tensors` and `time_unix` (seconds).

        Raises:
          Damaged: meta.json is missing or was changed.
          CheckpointError: the step does not exist, is unfinished, has another format, or cannot be read.
        """
        folder = self.directory / str(step)
        state = self.storage.state(step)
        if state in ("missing", "unfinished"):
            reason = "there is no such checkpoint" if state == "missing" else "its save was cut off"
            raise CheckpointError(f"step {step} in {self.directory}: {reason}. Complete steps: {self.listing()}.")
        try:
            text = self.storage.read(folder / META)
            version = json.loads(text).get("format")
            if isinstance(version, int) and version != FORMAT:
                raise CheckpointError(
                    f"{folder / META}: format {version}, and this jaxtrain reads {FORMAT}. Use the version that wrote it (see "
                    f"'versions' in that file). {self.remedy(step)}"
                )
            return files.unseal(text)
        except (FileNotFoundError, ValueError, AttributeError) as e:
            raise Damaged(f"{folder / META} cannot be read ({e}). {self.remedy(step)}") from e
        except Unreachable:
            raise
        except OSError as e:  # of the disk or the network, and possibly temporary
            raise CheckpointError(f"{folder / META} cannot be read now ({e}). {self.remedy(step)}") from e

    def tensor_specs(self, step: int) -> "dict[str, jax.ShapeDtypeStruct]":
        """Return name -> shape and dtype of every tensor of a step, without reading the tensors."""
        return tensor_specs(self.meta(step))

    def verify(self, step: int, progress: Callable[[int], None] = lambda _: None) -> files.FileVerdict:
        """Check meta.json of a complete step, and compare every file with its digest. progress: called with bytes read."""
        try:
            self.meta(step)
            problems = []
        except CheckpointError as error:
            problems = [str(error)]
        verdict = files.check_files(self.directory / str(step), progress)
        return dataclasses.replace(verdict, problems=(*problems, *verdict.problems))

    def listing(self) -> str:
        """Return the numbers of the complete steps as text, for messages."""
        try:
            return ", ".join(map(str, self.steps())) or "none"
        except OSError:  # the text is for messages, also about this error
            return "not known"

    def remedy(self, step: int) -> str:
        """Return the remedy, as text, for a step that cannot be used."""
        earlier = [s for s in self.steps() if s < step]
        if earlier:
            return (
                f"To go on from the step before: --config.checkpoint.step={earlier[-1]} (this one is set aside, not deleted)."
            )
        return (
            f"There is no earlier step: restore {self.directory / str(step)} from a copy, or move it away to start at step 0."
        )

    # Restoring

    def restore(
        self,
        step: int,
        abstract: "Mapping[str, jax.ShapeDtypeStruct]",
        *,
        subset: bool = False,
        cast: bool = False,
        meta: Mapping[str, Any] | None = None,
    ) -> "dict[str, jax.Array]":
        """Return the tensors of a step, each with the shape, dtype and sharding in `abstract`, on any mesh.

        Args:
          abstract: the tensors to return.
          subset: if True, tensors of the step that `abstract` lacks are not read. If False, such a tensor is an error.
          cast: if True, a float tensor may become another float type (rounded to nearest). If False, another dtype is an error.
          meta: the step's meta.json, if the caller has read it; None: this method reads it.

        Raises:
          CheckpointError: the checkpoint does not fit `abstract` (no tensor is read then), or its arrays cannot be read
            although their files are intact.
          Damaged: the arrays differ from the saved arrays, cannot be read, or (with `finite`) have infinite or NaN parameters.
        """
        import jax

        from jaxtrain.checkpoint import digests

        self.storage.note_device()
        meta = self.meta(step) if meta is None else meta
        recorded, stored = meta["tensors"], tensor_specs(meta)
        problems = differences(stored, abstract, subset=subset, cast=cast)
        folder = self.directory / str(step)
        if problems:
            shown = problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else [])
            raise CheckpointError(
                f"checkpoint {folder} does not fit this run ({len(problems)} differences):\n  "
                + "\n  ".join(shown)
                + "\nUse the config that wrote it (key 'config' in its meta.json), or another workdir for a new run."
            )
        # Tensors are read in their stored dtypes, because digests are of the stored bits and Orbax would cast.
        as_stored = {k: jax.ShapeDtypeStruct(a.shape, stored[k].dtype, sharding=a.sharding) for k, a in abstract.items()}
        tensors: dict[str, jax.Array] = {}
        self._on_all_processes("read", lambda: tensors.update(self._load(step, as_stored, subset)))
        tensor_digests = digests.digest_arrays(tensors)
        mismatched = [name for name, digest in tensor_digests.items() if digests.to_hex(digest) != recorded[name][2]]
        if mismatched:
            shown = ", ".join(mismatched[:3]) + (f" and {len(mismatched) - 3} more" if len(mismatched) > 3 else "")
            raise Damaged(
                f"checkpoint {folder}: {shown} {'is' if len(mismatched) == 1 else 'are'} not what was saved: the digest of the "
                f"values read differs from that of the values on the devices then. {self.remedy(step)}"
            )
        if self._finite and (not_finite := digests.list_not_finite(tensor_digests)):
            raise Damaged(f"checkpoint {folder}: weights are infinite or NaN: {not_finite}. {self.remedy(step)}")
        return {name: _cast(tensors.pop(name), a.dtype) for name, a in abstract.items()}

    def _load(self, step: int, as_stored: "dict[str, jax.ShapeDtypeStruct]", partial: bool) -> "dict[str, jax.Array]":
        import jax

        folder = self.directory / str(step)
        try:
            with orbax_context(folder, partial=partial, processes=self._peers.count):
                return import_orbax().load(folder / ARRAYS, as_stored)
        except Exception as e:  # a page of wrappers around one message
            cause = first_cause(e)
            if isinstance(cause, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(cause):
                raise cause from None  # device memory is exhausted, and the files are intact
            text = f"{folder / ARRAYS} cannot be read: {describe_error(e)}."
        verdict = files.check_files(folder)
        if verdict.proved and not verdict.problems:
            raise CheckpointError(f"{text} Its files are intact.")
        file_problems = "; ".join(verdict.problems[:3])
        raise Damaged(f"{text} {file_problems + '. ' if file_problems else ''}{self.remedy(step)}")

    # Saving

    @property
    def pending(self) -> int | None:
        """Return the step that is being saved; None if no save is running."""
        return self._running[0].step if self._running and not self._running[1].done() else None

    def best(self, sets: str) -> float:
        """Return the lowest held-out loss of all complete steps and of the step that is being saved; inf if there is none.

        sets: `HELD_OUT_SETS` of the losses, and of the step that is being saved. Raises CheckpointError as `lowest` does.
        """
        pending = self._running[0].held_out if self._running and not self._running[1].done() else math.inf
        lowest = self.lowest(sets)
        return min(pending, lowest[1] if lowest else math.inf)

    def prepare(self) -> None:
        """Import Orbax in another thread, before the first save."""
        threading.Thread(target=import_orbax, name="orbax").start()

    def save(
        self,
        step: int,
        tensors: "Mapping[str, jax.Array]",
        meta: Mapping[str, Any],
        sums: Callable[[], Mapping[str, np.ndarray]] | None = None,
        on_end: Callable[[], None] = lambda: None,
        began: float | None = None,
        copying: float | None = None,
    ) -> Save | None:
        """Begin a save, and return it. `poll` returns it when it has ended.

        Return None, and write nothing, if this step is complete already. An earlier save that is running is awaited first.
        With `finite`, a parameter that is infinite or NaN makes the save fail.

        Args:
          tensors: copies that the save owns from here on. Their originals may be donated to the next step.
          meta: the caller's fields of meta.json, as JSON values.
          sums: returns the digests of the state by name (digests.digest_sums). None: they are computed from `tensors`.
          on_end: called in another thread when the save has succeeded or failed.
          began: time.perf_counter() when the loop began to wait for this save; None: now.
          copying: time.perf_counter() when the copies of the tensors began; None: `began`.
        """
        began = time.perf_counter() if began is None else began
        self._settle()
        if self._on_all_processes("save", lambda: step == self._newest or self._is_complete(step))[0]:
            return None
        size = sum(x.nbytes for x in tensors.values())
        if sums is None:
            from jaxtrain.checkpoint import digests

            tensor_digests = digests.digest_arrays(dict(tensors))
            sums = lambda: tensor_digests  # noqa: E731
        record = {**meta, "format": FORMAT, "step": step, "bytes": size, "time_unix": time.time()}
        save = Save(step, size, meta.get(HELD_OUT, math.inf), began, began if copying is None else copying)
        tensors = dict(tensors)
        if self._peers.count == 1:
            write_future = self._worker.submit(self._begin, save, record, tensors, sums)
        else:
            # Orbax begins with a collective over the devices, and collectives must be in the same order on all processes.
            write_future = concurrent.futures.Future()
            try:
                write_future.set_result(self._begin(save, record, tensors, sums))
            except Exception as e:
                write_future.set_exception(e)
        save.returned = time.perf_counter()
        self._running = save, self._worker.submit(self._end, save, tensors, write_future)
        self._running[1].add_done_callback(lambda _: on_end())
        return save

    def save_now(self, step: int, tensors: "Mapping[str, jax.Array]", meta: Mapping[str, Any]) -> None:
        """Save, wait until the files are durable, and accept no more saves. Raises CheckpointError if the save fails."""
        self.save(step, tensors, meta)
        for save in self.close():
            if save.error:
                raise save.error

    def poll(self) -> list[Save]:
        """Return the saves that ended since the last call. Does not wait for a running save. Call it every step."""
        if self._running and self._running[1].done():
            self._settle()
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> list[Save]:
        """Wait until the running save ends, and return the result of `poll`."""
        self._settle()
        return self.poll()

    def close(self) -> list[Save]:
        """Wait until the running save ends, then accept no more saves. Return the result of `poll`.

        A program that ends without `close` may lose its last checkpoint."""
        try:
            return self.wait()
        finally:
            self._worker.shutdown()

    def _settle(self) -> None:
        if self._running is None:
            return
        save, job = self._running
        concurrent.futures.wait([job])
        self._running = None
        job.result()
        self._newest = self._newest if save.error else save.step
        self._finished.append(save)

    def _is_complete(self, step: int) -> bool:
        try:
            return self.storage.state(step) == "complete"
        except Unreachable:  # the next save fails for the same reason, and reports it
            return False

    def _begin(self, save: Save, record: dict[str, Any], tensors: dict[str, Any], sums: Any) -> Any:
        """Write meta.json durably, and let Orbax begin to write the arrays. Return Orbax's running save."""
        self._on_all_processes("begun", lambda: self._prepare(save, record, tensors, sums))
        folder = self.directory / str(save.step)
        with orbax_context(folder, tensors.values(), processes=self._peers.count):
            return import_orbax().save_async(folder / ARRAYS, tensors, overwrite=True)

    def _prepare(self, save: Save, record: dict[str, Any], tensors: dict[str, Any], sums: Any) -> None:
        """Wait until `tensors` are computed, and write meta.json durably. Raises NotFinite for infinite or NaN parameters."""
        import jax

        from jaxtrain.checkpoint import digests

        jax.block_until_ready(tensors)
        save.copied = time.perf_counter()
        tensor_digests = sums()
        # All processes have the same digests, so all raise NotFinite together.
        if self._finite and (not_finite := digests.list_not_finite(tensor_digests)):
            raise NotFinite(f"weights are infinite or NaN: {not_finite}")
        if not self._primary:
            return
        if self._finite and (not_finite := digests.list_not_finite(tensor_digests, "optimizer.")):
            LOGGER.warning("%s", f"step {save.step} is saved with moments that are infinite or NaN: {not_finite}")
        self.storage.check(save.bytes, self._keep)
        folder = self.storage.make(save.step)
        record["tensors"] = {
            k: [list(tensors[k].shape), tensors[k].dtype.name, digests.to_hex(x)] for k, x in tensor_digests.items()
        }
        self.storage.write(folder / META, files.to_sealed_json(record))

    def _end(self, save: Save, tensors: dict[str, Any], write_future: "concurrent.futures.Future[Any]") -> None:
        """Finish the save that `_begin` began, in the background."""
        try:
            self._on_all_processes("written", lambda: write_future.result().result())
            self._commit(save.step)
        except Exception as e:
            save.error = self._discard_failed(save.step, e)
        tensors.clear()  # copies of a complete state, which the traceback of a failure would keep
        save.ended = time.perf_counter()

    def _commit(self, step: int) -> None:
        """Sync the files, write their digests, then delete old steps. A failure of one process raises on all processes."""
        folder = self.directory / str(step)

        def sync_files() -> list[str]:
            # Orbax's small JSON files may be in the page cache only. Without this sync, a power cut could lose them after older
            # steps were deleted.
            self.storage.sync(step)
            return files.list_step_files(folder)

        names = self._on_all_processes("synced", sync_files if self._primary else list)[0]
        # Each process reads back its share: a write that did not reach the storage is found immediately.
        local_names = names[self._peers.process_index :: self._peers.count]
        shares = self._on_all_processes("files", lambda: files.digest_files(folder, local_names))

        def write_digests() -> None:
            file_digests = {name: value for share in shares for name, value in share.items()}
            self.storage.write(folder / files.NAME, files.encode_digests(file_digests))

        self._on_all_processes("integrity", write_digests if self._primary else lambda: None)
        if self._primary:
            self._delete_old()

    def _discard_failed(self, step: int, error: Exception) -> CheckpointError:
        """Remove the files of a failed save, so that a full disk has space for the next save. Return the error to report."""
        note = ""
        if self._primary:
            try:
                if self.storage.state(step) in ("complete", "damaged"):  # the failure came after the arrays
                    self.storage.delete(step)
                self.storage.sweep()
            except OSError as e:
                note = f" Its files could not be removed ({e})."
        if isinstance(error, NotFinite):
            return NotFinite(f"step {step} is not saved: {error}.{note}")
        cause = describe_error(error)
        return CheckpointError(
            f"saving step {step} to {self.directory} failed: {cause}.{note} Complete steps: "
            f"{self.listing()}. {self.storage.remedy(cause)}"
        )

    # Deleting

    def _delete_old(self) -> None:
        steps, best = self.steps(), None
        if self._keep_best:
            try:
                best = self.lowest()
            except CheckpointError as e:  # the new step is complete: its save did not fail
                LOGGER.warning("%s", f"no old checkpoint is deleted: which is the best is not known ({e})")
                return
        for old in steps[: -self._keep]:
            if (self._keep_every and old % self._keep_every == 0) or (best and old == best[0]):
                continue
            try:
                self.storage.delete(old)
            except OSError as e:  # the new step is complete: its save did not fail
                LOGGER.warning("%s", f"checkpoint {old} could not be deleted ({e}); the next save tries again")

    def set_aside(self, step_after: int, message: str = "going back to step {step}: later steps") -> str:
        """Move every step later than `step_after` to DIR/set_aside-TIME/. Return a line for the log; '' if no step is later.

        Unfinished steps stay, and the next save removes them: every killed save would leave its files there otherwise.

        message: the beginning of the line. Raises CheckpointError, and moves nothing, if step `step_after` is not complete.
        """
        self.meta(step_after)
        later = sorted(step for step, state in self.states().items() if state != "unfinished" and step > step_after)
        self._newest = min(self._newest, step_after)
        self._peers.gather("aside", "", PEERS_S)  # every process has listed the steps before one moves them
        if not later:
            return ""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        target = self.directory / f"set_aside-{stamp}"
        if self._primary:
            self.storage.set_aside(later, target.name)
        return f"{message.format(step=step_after)} {', '.join(map(str, later))} moved to {target}, none deleted"


def _cast(x: "jax.Array", dtype: Any) -> "jax.Array":
    import jax

    return x if x.dtype == dtype else jax.jit(lambda y: y.astype(dtype), out_shardings=x.sharding, donate_argnums=0)(x)


def tensor_specs(meta: Mapping[str, Any]) -> "dict[str, jax.ShapeDtypeStruct]":
    """Return name -> shape and dtype of every tensor of a step. meta: the result of `Checkpoints.meta`."""
    import jax
    import jax.numpy as jnp

    return {name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for name, (shape, dtype, _) in meta["tensors"].items()}
