"""Weights & Biases (W&B): a run's lines of metrics.jsonl, samples, config and receipt, on a server or in offline files.

wandb's own variables select online or offline, server and key: WANDB_MODE, WANDB_BASE_URL, WANDB_API_KEY, ... The x axis of the
charts is the trainer's step, since W&B's own step counts calls. `attempt` distinguishes the rows of a step that a resumed run
repeats.
"""

import importlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.metrics.files import tracker_values, write_atomic
from jaxtrain.metrics.remote import Remote, Started
from jaxtrain.metrics.samples import TextSample

FINISH_S = 300.0  # longest wait for data that is not sent when the run ends. The data stays on disk for `wandb sync`.


class WandB(Remote):
    """A `metrics.Tracker` for W&B. log.wandb is PROJECT or ENTITY/PROJECT."""

    key, program = "wandb", "W&B"
    remedy = "Run `wandb login`, set WANDB_MODE=offline to send it later (wandb sync)"

    def start(self, workdir: Path, target: str, config: Mapping[str, Any], run_id: str | None) -> Started:
        wandb: Any = importlib.import_module("wandb")
        entity, _, project = target.rpartition("/")
        settings: dict[str, Any] = {"console": "off"}  # log.txt has the run's output
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            settings |= {"finish_timeout": FINISH_S, "finish_timeout_raises": True}
        offline = os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun")
        self._table = wandb.Table
        self._run: Any = wandb.init(
            entity=entity or None,
            project=project,
            id=run_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:12],
            name=os.environ.get("WANDB_NAME") or workdir.absolute().name,
            dir=str(workdir),
            resume=None if offline else "allow",  # offline the server cannot be asked, and the id joins the parts
            settings=wandb.Settings(**settings),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.config.update(dict(config), allow_val_change=True)
        return Started(self._run.id, self._run.url or None, continued=run_id is not None)

    def send(self, lines: Iterable[tuple[Mapping[str, Any], float]]) -> None:
        for line, _ in lines:
            self._run.log({**tracker_values(line), "step": line["step"], "attempt": self.attempt})

    def send_samples(self, samples: Sequence[TextSample]) -> None:
        table = self._table(columns=["step", "prompt", "text"], data=[list(sample) for sample in samples])
        self._run.log({"samples": table, "step": samples[0].step, "attempt": self.attempt})

    def send_facts(self, name: str, facts: Mapping[str, Any]) -> None:
        path = Path(self._run.dir) / f"{name}.json"
        write_atomic(path, json.dumps(facts, indent=1) + "\n")
        self._run.save(str(path), base_path=self._run.dir, policy="now")

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)
