"""Weights & Biases (W&B): a run's lines of metrics.jsonl, samples, config and receipt, on a server or in offline files.

wandb's own variables select online or offline, server and key: WANDB_MODE, WANDB_BASE_URL, WANDB_API_KEY, ... A run of the
trainer is one W&B run across resumes; the id of the W&B run is in `wandb.json`. The x axis of the charts is the trainer's step,
since W&B's own step counts calls. W&B cannot delete logged data. So a step that a resumed run repeats appears twice,
distinguished by `attempt`; in metrics.jsonl each step appears once. A new W&B run gets all lines of metrics.jsonl.
"""

import functools
import importlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.metrics.files import tagged, write_atomic
from jaxtrain.metrics.samples import Sample

FORMAT = 1
FINISH_S = 300.0  # longest wait for data that is not sent when the run ends. The data stays on disk for `wandb sync`.
LOGGER = logging.getLogger("jaxtrain")


class TrackerError(ValueError):
    """An error: W&B cannot be started as configured. The message has the reason and a remedy."""


def _never_fails(method: Callable[..., None]) -> Callable[..., None]:
    """Return the method with its errors caught. The first error is logged and ends logging to W&B, not the trainer's run."""

    @functools.wraps(method)
    def call(self: "WandB", *args: Any) -> None:
        if self.broken:
            return
        try:
            method(self, *args)
        except Exception as error:  # wandb documents no exceptions: it raises service, socket, file and value errors
            self.broken = True
            said = next(iter(str(error).splitlines()), "") or type(error).__name__
            LOGGER.warning("%s", f"W&B failed ({said}): logging to it ends. The run continues; metrics.jsonl is complete.")

    return call


class WandB:
    """A `metrics.Tracker` for W&B. The constructor starts or continues the W&B run. Raises TrackerError if that fails.

    Args:
      where: PROJECT or ENTITY/PROJECT.
      resumed: whether the trainer's run resumes from a checkpoint. Then its W&B run continues if `where` is unchanged.
    """

    def __init__(self, workdir: Path, where: str, *, resumed: bool):
        self.broken = False
        path = workdir / "wandb.json"
        known = load(path) if resumed and path.exists() else None
        known = known if known and known["where"] == where else None
        self._new = known is None  # this W&B run does not have the lines that the trainer has written so far
        self._attempt = known["attempt"] + 1 if known else 1  # number of starts of this W&B run
        entity, _, project = where.rpartition("/")
        settings: dict[str, Any] = {"console": "off"}  # log.txt has the run's output
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            settings |= {"finish_timeout": FINISH_S, "finish_timeout_raises": True}
        run_id = known["id"] if known else os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:12]
        offline = os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun")
        wandb: Any = None
        try:
            wandb = importlib.import_module("wandb")
            self._run: Any = wandb.init(
                entity=entity or None,
                project=project,
                id=run_id,
                name=os.environ.get("WANDB_NAME") or workdir.absolute().name,
                dir=str(workdir),
                resume=None if offline else "allow",  # offline the server cannot be asked, and the id joins the parts
                settings=wandb.Settings(**settings),
            )
        except Exception as error:  # no login, no such entity, no network, a variable with a wrong value
            lines = str(error).splitlines() or [type(error).__name__]
            raise TrackerError(
                f"W&B did not start: {lines[0].rstrip('.')}. Run `wandb login`, set WANDB_MODE=offline to send it later "
                "(wandb sync), or set log.wandb to ''"
            ) from error
        self._table = wandb.Table
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.facts = {"where": where, "id": self._run.id, "attempt": self._attempt, "url": self._run.url or None}
        write_atomic(path, json.dumps({"format": FORMAT, **self.facts}, indent=1) + "\n")

    @_never_fails
    def rewind(self, step: int, lines: Iterable[Mapping[str, Any]], samples: Iterable[Sample], dropped: int) -> None:
        """Log all lines and samples so far to a new W&B run. A continued W&B run already has them, so log nothing to it."""
        if self._new:
            for line in lines:
                self._log(line)
            by_step: dict[int, list[Sample]] = {}
            for sample in samples:
                by_step.setdefault(sample.step, []).append(sample)
            for several in by_step.values():
                self._log_samples(several)
            self._new = False
        elif dropped:
            LOGGER.info(
                "%s",
                f"W&B takes nothing back: {dropped} lines of steps after {step} stay there, beside those of the steps "
                f"taken anew (attempt {self._attempt})",
            )

    @_never_fails
    def line(self, line: Mapping[str, Any], wall_time: float) -> None:
        self._log(line)

    @_never_fails
    def samples(self, samples: Sequence[Sample]) -> None:
        self._log_samples(samples)

    @_never_fails
    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        """Set W&B's config if `name` is config. Save other facts, such as the receipt, as a file of the W&B run."""
        if name == "config":
            self._run.config.update(dict(facts), allow_val_change=True)
            return
        path = Path(self._run.dir) / f"{name}.json"
        write_atomic(path, json.dumps(facts, indent=1) + "\n")
        self._run.save(str(path), base_path=self._run.dir, policy="now")

    @_never_fails
    def close(self, exit_code: int | None) -> None:
        if exit_code is not None:
            self._run.finish(exit_code=exit_code)
            self.broken = True  # no call may follow

    def _log(self, line: Mapping[str, Any]) -> None:
        self._run.log({**tagged(line), "step": line["step"], "attempt": self._attempt})

    def _log_samples(self, samples: Sequence[Sample]) -> None:
        table = self._table(columns=["step", "prompt", "text"], data=[list(sample) for sample in samples])
        self._run.log({"samples": table, "step": samples[0].step, "attempt": self._attempt})


def load(path: Path) -> dict[str, Any]:
    """Return the contents of a wandb.json. Raises TrackerError if the file is not valid, or has another FORMAT."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        version, _, _, _ = (known[name] for name in ("format", "where", "id", "attempt"))
    except (ValueError, KeyError, TypeError) as error:
        raise TrackerError(f"{path}: not written by a run ({error!r}). Move it away to start a new W&B run") from error
    if version != FORMAT:
        raise TrackerError(f"{path}: format {version!r}, this jaxtrain reads {FORMAT}. Use the version that wrote it")
    return known
