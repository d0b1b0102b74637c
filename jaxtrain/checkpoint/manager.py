"""Save steps in the background, and delete old steps."""

import concurrent.futures
import dataclasses
import datetime
import functools
import json
import logging
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.checkpoint import arrays, files
from jaxtrain.checkpoint.arrays import PEERS_S, describe_error, join_errors, orbax
from jaxtrain.checkpoint.steps import FORMAT, HELD_OUT, Steps
from jaxtrain.checkpoint.storage import ARRAYS, META, CheckpointError, NotFinite, Unreachable
from jaxtrain.runtime.distributed import Peers

if TYPE_CHECKING:
    import jax

LOGGER = logging.getLogger("jaxtrain")


@dataclasses.dataclass(frozen=True)
class Saved:
    """A save that is complete and durable."""

    step: int
    bytes: int  # of all tensors, over all processes
    blocked_s: float  # seconds the training loop waited: for the start of this save, and for an earlier save before it
    copied_s: float  # seconds the copies took, during which the devices run no step
    total_s: float  # seconds from the loop's wait for this save until the files were durable and old steps deleted
    host_gib: float  # peak host memory of this process so far, GiB


@dataclasses.dataclass(frozen=True)
class Failed:
    """A save that failed. Its files are removed; complete steps are unchanged."""

    step: int
    error: CheckpointError


@dataclasses.dataclass
class _Times:
    """Timestamps of a save, from time.perf_counter()."""

    began: float
    copying: float  # when copying began
    returned: float = 0.0  # when `save` returned to the loop
    copied: float = 0.0  # when all copies were made


class Checkpoints(Steps):
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
        super().__init__(directory, peers, finite)
        self._keep = keep
        self._keep_every = keep_every
        self._keep_best = keep_best
        self._primary = self._peers.process_index == 0
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[Saved] | None = None
        self._pending_step = -1
        self._pending_loss = math.inf
        self._finished: list[Saved | Failed] = []
        self._newest = -1  # the newest step this object saved: a network file system may list it late

    # Saving

    @property
    def pending(self) -> int | None:
        """Return the step that is being saved; None if no save is running."""
        return self._pending_step if self._pending is not None and not self._pending.done() else None

    def best(self, sets: str) -> float:
        """Return the lowest held-out loss of all complete steps and of the step that is being saved; inf if there is none.

        sets: `HELD_OUT_SETS` of the losses. Raises CheckpointError as `lowest` does.
        """
        pending = self._pending_loss if self.pending is not None else math.inf  # of this attempt, so of the same sets
        lowest = self.lowest(sets)
        return min(pending, lowest[1] if lowest else math.inf)

    def prepare(self) -> None:
        """Import Orbax in another thread, before the first save."""
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
        """Begin a save. Return the seconds since `began`, for which the training loop has waited.

        Return None, and write nothing, if this step is complete already. An earlier save that is running is awaited first.
        `poll` returns the result of this save. With `finite`, a parameter that is infinite or NaN makes the save fail.

        Args:
          tensors: copies that the save owns from here on. Their originals may be donated to the next step.
          meta: the caller's fields of meta.json, as JSON values.
          sums: returns the digests of the state by name (digests.sums). None: they are computed from `tensors`.
          ended: called in another thread when the save has succeeded or failed.
          began: time.perf_counter() when the loop began to wait for this save; None: now.
          copying: time.perf_counter() when the copies of the tensors began; None: `began`.
        """
        now = time.perf_counter() if began is None else began
        times = _Times(now, now if copying is None else copying)
        self._settle()
        saved = "saved" if step == self._newest or self._is_complete(step) else ""
        if self._peers.gather("save", saved, PEERS_S)[0]:
            return None
        size = sum(x.nbytes for x in tensors.values())
        if sums is None:
            from jaxtrain.checkpoint import digests

            found = digests.digest_arrays(dict(tensors))
            sums = lambda: found  # noqa: E731
        record = {**meta, "format": FORMAT, "step": step, "bytes": size, "time_unix": time.time()}
        record["shapes"] = {name: [list(x.shape), x.dtype.name] for name, x in tensors.items()}
        self._pending_step, self._pending_loss = step, meta.get(HELD_OUT, math.inf)
        if self._peers.count == 1:
            job = functools.partial(self._write, record, dict(tensors), sums, times)
        else:
            # Orbax begins with a collective over the devices, and collectives must be in the same order on all processes.
            job = functools.partial(self._end, record, self._begun(record, dict(tensors), sums, times), times)
        times.returned = time.perf_counter()
        self._pending = self._worker.submit(job)
        self._pending.add_done_callback(lambda _: ended())
        return times.returned - times.began

    def save_now(self, step: int, tensors: "Mapping[str, jax.Array]", meta: Mapping[str, Any]) -> None:
        """Save, wait until the files are durable, and accept no more saves. Raises CheckpointError if the save fails."""
        self.save(step, tensors, meta)
        for result in self.close():
            if isinstance(result, Failed):
                raise result.error

    def poll(self) -> list[Saved | Failed]:
        """Return the results of saves that ended since the last call. Does not wait for a running save. Call it every step."""
        if self._pending is not None and self._pending.done():
            self._settle()
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> list[Saved | Failed]:
        """Wait until the running save ends, and return the result of `poll`."""
        self._settle()
        return self.poll()

    def close(self) -> list[Saved | Failed]:
        """Wait until the running save ends, then accept no more saves. Return the result of `poll`.

        A program that ends without `close` may lose its last checkpoint."""
        try:
            return self.wait()
        finally:
            self._worker.shutdown()

    def _settle(self) -> None:
        if self._pending is None:
            return
        try:
            saved = self._pending.result()
        except Exception as e:  # Orbax, tensorstore and the file system each raise their own errors; all must be reported
            self._pending = None
            self._finished.append(Failed(self._pending_step, self._failed(e)))
            return
        self._pending = None
        self._newest = saved.step
        self._finished.append(saved)

    def _is_complete(self, step: int) -> bool:
        try:
            return self.storage.state(step) == "complete"
        except Unreachable:  # the next save fails for the same reason, and reports it
            return False

    def _failed(self, error: Exception) -> CheckpointError:
        """Remove the files of a failed save, so that a full disk has space for the next save. Return the error to report."""
        left = ""
        if self._primary:
            try:
                if self.storage.state(self._pending_step) in ("complete", "damaged"):  # the failure came after the arrays
                    self.storage.delete(self._pending_step)
                self.storage.sweep()
            except OSError as e:
                left = f" Its files could not be removed ({e})."
        if isinstance(error, NotFinite):
            return NotFinite(f"step {self._pending_step} is not saved: {error}.{left}")
        why = describe_error(error)
        return CheckpointError(
            f"saving step {self._pending_step} to {self.directory} failed: {why}.{left} Complete steps: "
            f"{self.listing()}. {self.storage.remedy(why)}"
        )

    def _write(self, record: dict[str, Any], tensors: dict[str, Any], sums: Any, times: _Times) -> Saved:
        """Run the whole save in the background, in a run of one process."""
        self._prepare(record, tensors, sums, times)
        folder = self.directory / str(record["step"])
        with arrays.context(folder, tensors.values()):
            orbax().save(folder / ARRAYS, tensors, overwrite=True)
        tensors.clear()  # copies of a complete state
        return self._commit(record, times)

    def _begun(self, record: dict[str, Any], tensors: dict[str, Any], sums: Any, times: _Times) -> Any:
        """Begin a save in a run of several processes. Return Orbax's running save, or the exception that prevented it."""
        raised = None
        try:
            self._prepare(record, tensors, sums, times)
        except Exception as e:
            raised = e
        errors = self._peers.gather("begun", describe_error(raised) if raised else "", PEERS_S)
        if any(errors):  # all processes have the same digests, so all raise NotFinite together
            return raised if isinstance(raised, NotFinite) else RuntimeError(join_errors(errors))
        folder = self.directory / str(record["step"])
        try:
            with arrays.context(folder, tensors.values(), processes=self._peers.count):
                return orbax().save_async(folder / ARRAYS, tensors, overwrite=True)
        except Exception as e:
            return e

    def _end(self, record: dict[str, Any], begun: Any, times: _Times) -> Saved:
        """Finish the save that `_begun` began, in the background."""
        error = begun if isinstance(begun, Exception) else None
        if error is None:
            try:
                begun.result()  # pyright: ignore[reportAttributeAccessIssue]
            except Exception as e:
                error = e
        errors = self._peers.gather("written", describe_error(error) if error else "", PEERS_S)
        if any(errors):
            raise error if isinstance(error, NotFinite) else RuntimeError(join_errors(errors))
        return self._commit(record, times)

    def _prepare(self, record: dict[str, Any], tensors: dict[str, Any], sums: Any, times: _Times) -> None:
        """Wait until `tensors` are computed, and write meta.json durably. Raises NotFinite for infinite or NaN parameters."""
        import jax

        from jaxtrain.checkpoint import digests

        jax.block_until_ready(tensors)
        times.copied = time.perf_counter()
        found = sums()
        if self._finite and (wrong := digests.list_not_finite(found)):
            raise NotFinite(f"weights are infinite or NaN: {wrong}")
        if not self._primary:
            return
        if self._finite and (wrong := digests.list_not_finite(found, "optimizer.")):
            LOGGER.warning("%s", f"step {record['step']} is saved with moments that are infinite or NaN: {wrong}")
        self.storage.check(record["bytes"], self._keep, self._device)
        folder = self.storage.make(record["step"])
        self._device = self.storage.device()
        shapes = record.pop("shapes")
        record["tensors"] = {name: [*shapes[name], digests.text(x)] for name, x in found.items()}
        self.storage.write(folder / META, files.sealed(record))

    def _commit(self, record: dict[str, Any], times: _Times) -> Saved:
        """Sync the files, write their digests, then delete old steps. A failure of one process raises on all processes."""
        step = record["step"]
        folder = self.directory / str(step)

        def synced() -> str:
            # Orbax's small JSON files may be in the page cache only. Without this sync, a power cut could lose them after older
            # steps were deleted.
            self.storage.sync(step)
            return json.dumps(files.listed(folder))

        names = json.loads(self._together("synced", synced if self._primary else lambda: "")[0])
        # Each process reads back its share: a write that did not reach the storage is found immediately.
        shares = self._together(
            "files", lambda: json.dumps(files.measure(folder, names[self._peers.process_index :: self._peers.count]))
        )

        def written() -> str:
            found = {name: value for share in shares for name, value in json.loads(share).items()}
            self.storage.write(folder / files.NAME, files.encode(found))
            return ""

        self._together("integrity", written if self._primary else lambda: "")
        if self._primary:
            self._delete_old()
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        now = time.perf_counter()
        blocked, copied, total = times.returned - times.began, times.copied - times.copying, now - times.began
        return Saved(step, record["bytes"], blocked, copied, total, peak_gib)

    def _together(self, name: str, part: Callable[[], str]) -> list[str]:
        """Call `part` on every process, and return all results. Raises RuntimeError on all processes if one call fails."""
        try:
            result = "ok " + part()
        except Exception as e:
            result = "no " + describe_error(e)
        answers = self._peers.gather(name, result, PEERS_S)
        if any(answer.startswith("no ") for answer in answers):
            errors = [answer[3:] if answer.startswith("no ") else "" for answer in answers]
            raise RuntimeError(join_errors(errors) if self._peers.count > 1 else errors[0])
        return [answer[3:] for answer in answers]

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

    def set_aside(self, step_after: int, what: str = "going back to step {step}: later steps") -> str:
        """Move every step later than `step_after` to DIR/set_aside-TIME/. Return a line for the log; '' if no step is later.

        Unfinished steps stay, and the next save removes them: every killed save would leave its files there otherwise.

        what: the beginning of the line. Raises CheckpointError, and moves nothing, if step `step_after` is not complete.
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
        return f"{what.format(step=step_after)} {', '.join(map(str, later))} moved to {target}, none deleted"
