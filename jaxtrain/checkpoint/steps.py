"""The steps in a folder of checkpoints: which there are, what their meta.json says. Reads, writes nothing."""

import json
import os
from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint import files, place
from jaxtrain.checkpoint.errors import CheckpointError, Damaged, Unreachable
from jaxtrain.checkpoint.place import META

if TYPE_CHECKING:
    import jax

FORMAT = 2
# How long processes wait for each other at a save or a restore: a whole save on a slow disk may lie between them, or a compile
# of one that the others found in their caches. The watchdog's budgets are what ends a hang.
PEERS_S = 5400.0


class Steps:
    """What there is in one folder.

    directory: a folder on a local or network-mounted disk, or gs://BUCKET/PATH (checkpoint/place.py).
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.place = place.at(directory)
        self.directory = self.place.path

    def steps(self) -> list[int]:
        """Complete steps, ascending. Unfinished and damaged ones are left out."""
        return sorted(step for step, state in self.states().items() if state == "complete")

    def states(self) -> dict[int, str]:
        """Every step folder: 'complete', 'unfinished' (the save was cut off) or 'damaged' (arrays without meta.json)."""
        return self.place.states()

    def latest(self, passed: dict[int, str] | None = None) -> int | None:
        """The newest step whose meta.json can be read; None where nothing was ever completely saved.

        passed: newer steps not to be taken, with the reason; those that cannot be read are added. Without it the newest one
        must be readable. Raises CheckpointError where there are steps and none is left: starting afresh over existing
        checkpoints has to be the user's decision.
        """
        steps = sorted((step for step, state in self.states().items() if state != "unfinished"), reverse=True)
        for step in steps:
            if passed is not None and step in passed:
                continue
            try:
                self.meta(step)
            except Damaged as error:
                if passed is None:
                    raise
                passed[step] = str(error)
                continue
            return step
        if not steps:
            return None
        reasons = "".join(f"\n  {step}: {why}" for step, why in sorted((passed or {}).items(), reverse=True))
        raise CheckpointError(
            f"no good checkpoint is left in {self.directory}, and a run never starts afresh over existing ones:{reasons}\n"
            "Restore one from a copy, or move the folder away to start at step 0."
        )

    def meta(self, step: int) -> dict[str, Any]:
        """What `save` was given as `meta`, with `format`, `step`, `bytes`, `tensors` and `time_unix` (seconds) added.

        Raises CheckpointError when the step is not there or was cut off, Damaged when its meta.json cannot be read.
        """
        folder = self.directory / str(step)
        state = self.place.state(step)
        if state in ("missing", "unfinished"):
            what = "there is no such checkpoint" if state == "missing" else "its save was cut off"
            raise CheckpointError(f"step {step} in {self.directory}: {what}. Complete steps: {self.listing()}.")
        try:
            text = self.place.read(folder / META)
            version = json.loads(text).get("format")
            if isinstance(version, int) and version != FORMAT:
                raise CheckpointError(
                    f"{folder / META}: format {version}, and this jaxtrain reads {FORMAT}. Use the version that wrote it (see "
                    f"'versions' in that file). {self.way_out(step)}"
                )
            return files.unsealed(text)
        except (FileNotFoundError, ValueError, AttributeError) as e:
            raise Damaged(f"{folder / META} cannot be read ({e}). {self.way_out(step)}") from e
        except Unreachable:
            raise
        except OSError as e:  # of the disk or the network, which may be well again in a moment
            raise CheckpointError(f"{folder / META} cannot be read now ({e}). {self.way_out(step)}") from e

    def stored(self, step: int) -> "dict[str, jax.ShapeDtypeStruct]":
        """Name -> shape and dtype of every tensor of a step, without reading the tensors."""
        import jax
        import jax.numpy as jnp

        return {
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
            for name, (shape, dtype, _) in self.meta(step)["tensors"].items()
        }

    def is_there(self, step: int) -> bool:
        """Whether a step is complete."""
        try:
            return self.place.state(step) == "complete"
        except Unreachable:  # the save that follows fails of it, where it is told and tried again
            return False

    def listing(self) -> str:
        """The complete steps, in words."""
        try:
            return ", ".join(map(str, self.steps())) or "none"
        except Unreachable:  # this goes into messages, that of the same trouble among them
            return "not known"

    def way_out(self, step: int) -> str:
        """What to do where a step cannot be used, in words."""
        earlier = [s for s in self.steps() if s < step]
        if earlier:
            return (
                f"To go on from the step before: --config.checkpoint.step={earlier[-1]} (this one is set aside, not deleted)."
            )
        return f"There is no earlier step: restore {self.directory / str(step)} from a copy, or move it away to start afresh."
