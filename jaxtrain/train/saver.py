"""Save a run's state: begin between two steps, write while the next steps run, and report the end."""

import collections
import contextlib
import functools
import itertools
import os
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import CheckpointError, NotFinite, Save
from jaxtrain.config import installed
from jaxtrain.config.schema import to_dict
from jaxtrain.metrics.files import NotWritten
from jaxtrain.step.state import TrainState
from jaxtrain.train.divergence import Diverged, explain_divergence
from jaxtrain.train.services import Services
from jaxtrain.train.setup import Setup
from jaxtrain.train.snapshot import Snapshots

MOST_FAILURES = 3  # in a row end a run: it would continue without a checkpoint
RETRY_S = 5.0  # before the save of a last step is repeated
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint")  # their versions decide the contents of a checkpoint


class Saver:
    """Saves the states of one run, and counts failed saves in a row."""

    def __init__(self, setup: Setup, services: Services):
        """Args: setup: of the attempt. Its config, text format and longest sequence are stored in every checkpoint."""
        program = setup.program
        self.checkpoints, self._services, self._saved_state = setup.checkpoints, services, program.saved_state
        self.snapshots = Snapshots(program.saved_state(program.state))
        self._meta = {
            "config": to_dict(setup.user_run),
            "text": setup.text.record(),
            "positions": setup.positions,
            "mesh": dict(program.placement.mesh.shape),
            "receipt": services.receipt.id,
            "versions": installed.versions(PACKAGES),
        }
        self.newest = -1  # the newest step that is saved, or from which the run began
        self.failures = 0  # in a row
        self.not_finite = ""  # why the last save was refused, if its weights are infinite or NaN
        self._host_memory = HostMemory()
        self.longest_s = 0.0  # of all saves

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """After an exception, wait for the running save, whose end must be in the log."""
        if isinstance(error, NotWritten):
            with contextlib.suppress(NotWritten):  # the receipt is on the same disk
                self.finish()
            self._services.console.say(self.newest_in_words)
        elif error is not None:
            self.finish()

    @property
    def newest_in_words(self) -> str:
        """Return which checkpoint the same command goes on from."""
        if self.newest < 0:
            return f"There is no checkpoint in {self.checkpoints.directory}: the same command begins at step 0."
        return f"The newest checkpoint, step {self.newest} in {self.checkpoints.directory}, is intact: start again."

    def remember(self, **facts: Any) -> None:
        """Add facts to meta.json of every later checkpoint."""
        self._meta |= facts

    def prepare(self) -> None:
        """Compile the programs of a save, and import Orbax, in other threads: the first save is then as fast as later saves."""
        self.snapshots.prepare()
        self.checkpoints.prepare()

    def save(self, current: TrainState, done: int, meta: Mapping[str, Any]) -> None:
        """Begin to save the state after `done` steps, unless a checkpoint of this step exists.

        The call waits until the previous save has ended. The new files are written while the next steps run.

        Args:
          meta: facts for this checkpoint's meta.json, in addition to the facts of `remember`.

        Raises CheckpointError after MOST_FAILURES failed saves in a row, and Diverged if the weights of the previous save were
        infinite or NaN.
        """
        services, began = self._services, time.perf_counter()
        with services.phase("checkpoint", "save"):
            self._report(self.checkpoints.wait())
            # All processes are here at the same step, so they all end here.
            self.check_finite(int(current.guard["taken"]))
            if self.failures >= MOST_FAILURES:
                raise CheckpointError(
                    f"{self.failures} saves in a row have failed, and the run ends before it loses more. {self.newest_in_words}"
                )
            if self.newest == done:
                return
            snapshot = self.snapshots.take(self._saved_state(current))
            on_end = functools.partial(services.watchdog.end, services.watchdog.begin("checkpoint", f"the save of step {done}"))
            all_meta = {**self._meta, **meta}
            if self.checkpoints.save(done, snapshot.tensors, all_meta, snapshot.sums, on_end, began, snapshot.began) is None:
                on_end()  # another attempt saved this step
                self.newest, self.failures = done, 0

    def poll(self) -> None:
        """Report the saves that have ended since the last report. Does not wait for a running save."""
        self._report(self.checkpoints.poll())

    def finish(self, save_again: Callable[[], None] | None = None) -> None:
        """Wait until the running save is on disk or has failed.

        save_again: begins the save again after a failure, until MOST_FAILURES saves in a row have failed; None: do not repeat.
        """
        with self._services.phase("checkpoint", "save"):
            self._report(self.checkpoints.wait())
            while save_again and not self.not_finite and 0 < self.failures < MOST_FAILURES:
                time.sleep(RETRY_S)
                save_again()
                self._report(self.checkpoints.wait())

    def check_finite(self, applied: int) -> None:
        """Raise Diverged if the last save was refused because of its weights. applied: number of applied steps of the run."""
        if self.not_finite:
            raise Diverged(explain_divergence(self.not_finite, self.newest, applied, weights=True, rollback=False))

    def _report(self, saves: list[Save]) -> None:
        services = self._services
        for save in saves:
            if save.error:
                self.failures += 1
                self.snapshots.forget()
                if isinstance(save.error, NotFinite):
                    self.not_finite = str(save.error).rstrip(".")
                    services.console.warn(f"{save.error} The run ends at the next save")
                    continue
                retry_text = "the next save tries again" if self.failures < MOST_FAILURES else "this was the last attempt"
                services.console.warn(f"{save.error} ({self.failures} in a row; {retry_text})")
                continue
            self.failures, self.newest = 0, save.step
            seconds = save.ended - save.began
            self.longest_s = max(self.longest_s, seconds)
            most_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            services.console.say(
                f"checkpoint {save.step}: {save.bytes / 2**20:,.1f} MiB in {seconds:.1f} s "
                f"({save.bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s); the loop waited {save.returned - save.began:.2f} s, "
                f"copies took {save.copied - save.copying:.2f} s, host memory at most {most_gib:.1f} GiB"
            )
            resident_gib = read_resident_gib()
            if warning := self._host_memory.note(save.step, resident_gib):
                services.console.warn(warning)


class HostMemory:
    """Detects host memory that grows with every save: a leak that would end the run hours later."""

    SAVES = 6  # saves in a row, each with more resident memory than the save before
    LEAST_GIB = 1.0
    SHARE = 0.1  # fraction of the memory after the first of them

    def __init__(self):
        self._after: collections.deque[tuple[int, float]] = collections.deque(maxlen=self.SAVES)
        self._reported = False

    def note(self, step: int, resident_gib: float) -> str | None:
        """Note this process's resident memory after the save of a step. Return a warning for the log, at most once."""
        self._after.append((step, resident_gib))
        (first, least), grown = self._after[0], all(a < b for (_, a), (_, b) in itertools.pairwise(self._after))
        enough = resident_gib - least > max(self.LEAST_GIB, self.SHARE * least)
        if self._reported or not (grown and enough and len(self._after) == self.SAVES):
            return None
        self._reported = True
        return (
            f"host memory grows with every save: {least:.1f} GiB after step {first}, {resident_gib:.1f} GiB after step {step}. "
            "If it continues, the kernel will end this process. Fix: save less often by checkpoint.every_steps, and report the "
            "versions in receipt.json."
        )


def read_resident_gib() -> float:
    """Return the resident memory of this process in GiB; 0.0 on a system without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30
