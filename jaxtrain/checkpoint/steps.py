"""The steps in a folder of checkpoints: read their meta.json, and restore their arrays on any mesh. Writes nothing."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint import files
from jaxtrain.checkpoint.arrays import PEERS_S, context, describe_error, differences, first_cause, join_errors, orbax
from jaxtrain.checkpoint.storage import ARRAYS, META, CheckpointError, Damaged, Storage, Unreachable
from jaxtrain.runtime.distributed import Peers

if TYPE_CHECKING:
    import jax

# In meta.json of a step that was evaluated: the mean loss over the held-out sets, and a text that tells other sets apart
HELD_OUT, HELD_OUT_SETS = "held_out_loss", "held_out_sets"
FORMAT = 5  # of meta.json, with how the model's texts end and its longest sequence


class Steps:
    """The steps in one folder, to read. Every process of a run calls the same methods in the same order.

    Args:
      directory: a folder on a local or network-mounted disk, or gs://BUCKET/PATH, or s3://BUCKET/PATH.
      peers: the processes of the run, which restore together.
      finite: raise an error at a restore of infinite or NaN parameters.
    """

    def __init__(self, directory: str | os.PathLike[str], peers: Peers | None = None, finite: bool = True):
        self.storage = Storage(directory)
        self.directory = self.storage.path
        self._peers = peers or Peers(0, 1)
        self._finite = finite
        self._device: int | None = None  # file system of the folder, once known

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
        found: list[tuple[float, int, str]] = []
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
                found.append((float(loss), step, meta.get(HELD_OUT_SETS, "")))
        if not found:
            return None
        sets = max(found, key=lambda each: each[1])[2] if sets is None else sets
        alike = [(loss, step) for loss, step, of in found if of == sets]
        return (min(alike)[1], min(alike)[0]) if alike else None

    def meta(self, step: int) -> dict[str, Any]:
        """Return meta.json of a step: `meta` of the save, and `format`, `step`, `bytes`, `tensors` and `time_unix` (seconds).

        Raises:
          Damaged: meta.json is missing or was changed.
          CheckpointError: the step does not exist, is unfinished, has another format, or cannot be read.
        """
        folder = self.directory / str(step)
        state = self.storage.state(step)
        if state in ("missing", "unfinished"):
            what = "there is no such checkpoint" if state == "missing" else "its save was cut off"
            raise CheckpointError(f"step {step} in {self.directory}: {what}. Complete steps: {self.listing()}.")
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

    def stored(self, step: int) -> "dict[str, jax.ShapeDtypeStruct]":
        """Return name -> shape and dtype of every tensor of a step, without reading the tensors."""
        return stored_in(self.meta(step))

    def verify(self, step: int, progress: Callable[[int], None] = lambda _: None) -> files.Verdict:
        """Check meta.json of a complete step, and compare every file with its digest. progress: called with bytes read."""
        try:
            self.meta(step)
            problems = []
        except CheckpointError as error:
            problems = [str(error)]
        verdict = files.check(self.directory / str(step), progress)
        return dataclasses.replace(verdict, problems=(*problems, *verdict.problems))

    def listing(self) -> str:
        """Return the numbers of the complete steps as text, for messages."""
        try:
            return ", ".join(map(str, self.steps())) or "none"
        except Unreachable:  # the text is for messages, also about this error
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

        self._device = self.storage.device()
        meta = self.meta(step) if meta is None else meta
        recorded, stored = meta["tensors"], stored_in(meta)
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
        exactly = {k: jax.ShapeDtypeStruct(a.shape, stored[k].dtype, sharding=a.sharding) for k, a in abstract.items()}
        tensors, error = self._load(step, exactly, subset)
        errors = self._peers.gather("read", f"{type(error).__name__}:{error}" if error else "", PEERS_S)
        if error:
            raise error
        if any(errors):
            raise (Damaged if any(e.startswith("Damaged:") for e in errors) else CheckpointError)(join_errors(errors))
        found = digests.digest_arrays(tensors)
        wrong = [name for name, digest in found.items() if digests.text(digest) != recorded[name][2]]
        if wrong:
            shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            raise Damaged(
                f"checkpoint {folder}: {shown} {'is' if len(wrong) == 1 else 'are'} not what was saved: the digest of the "
                f"values read differs from that of the values on the devices then. {self.remedy(step)}"
            )
        if self._finite and (undefined := digests.list_not_finite(found)):
            raise Damaged(f"checkpoint {folder}: weights are infinite or NaN: {undefined}. {self.remedy(step)}")
        return {name: _cast(tensors.pop(name), a.dtype) for name, a in abstract.items()}

    def _load(
        self, step: int, exactly: "dict[str, jax.ShapeDtypeStruct]", partial: bool
    ) -> "tuple[dict[str, jax.Array], Exception | None]":
        import jax

        folder = self.directory / str(step)
        try:
            with context(folder, partial=partial, processes=self._peers.count):
                return orbax().load(folder / ARRAYS, exactly), None
        except Exception as e:  # a page of wrappers around one message
            cause = first_cause(e)
            if isinstance(cause, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(cause):
                return {}, cause  # device memory is exhausted, and the files are intact
            text = f"{folder / ARRAYS} cannot be read: {describe_error(e)}."
            try:
                verdict = files.check(folder)
            except Unreachable as unreachable:
                return {}, unreachable
            if verdict.proved and not verdict.problems:
                return {}, CheckpointError(f"{text} Its files are intact.")
            named = "; ".join(verdict.problems[:3])
            return {}, Damaged(f"{text} {named + '. ' if named else ''}{self.remedy(step)}")


def _cast(x: "jax.Array", dtype: Any) -> "jax.Array":
    import jax

    return x if x.dtype == dtype else jax.jit(lambda y: y.astype(dtype), out_shardings=x.sharding, donate_argnums=0)(x)


def stored_in(meta: Mapping[str, Any]) -> "dict[str, jax.ShapeDtypeStruct]":
    """Return name -> shape and dtype of every tensor of a step. meta: the result of `Steps.meta`."""
    import jax
    import jax.numpy as jnp

    return {name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for name, (shape, dtype, _) in meta["tensors"].items()}
