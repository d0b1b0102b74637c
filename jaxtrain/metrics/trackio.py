"""Trackio: a run's lines of metrics.jsonl, samples, config and receipt, in a local database or a Space of Hugging Face.

Trackio's own variables select the place: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL, ... Its threads write and send, so
no call waits. `attempt` distinguishes the rows of a step that a resumed run repeats.
"""

import contextlib
import importlib
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import flatten
from jaxtrain.metrics.files import tracker_values
from jaxtrain.metrics.remote import Remote, Started
from jaxtrain.metrics.samples import TextSample


class Trackio(Remote):
    """A `metrics.Tracker` for Trackio. log.trackio is PROJECT. The id of a run there is its name."""

    key, program = "trackio", "Trackio"
    remedy = "Choose another name, run `hf auth login` or correct Trackio's variables (TRACKIO_...)"

    def start(self, workdir: Path, target: str, config: Mapping[str, Any], run_id: str | None) -> Started:
        self._trackio: Any = importlib.import_module("trackio")
        self._step = 0  # of the newest line, for facts

        def run(name: str, resume: str) -> Any:
            return self._trackio.init(
                project=target,
                name=name,
                config=dict(flatten(config)),
                resume=resume,
                embed=False,
                auto_log_gpu=False,  # the lines of kind "gpu" have more
                auto_log_cpu=False,
            )

        if run_id:
            with contextlib.suppress(ValueError):  # the run was deleted, or the Space cannot be asked
                self._run = run(run_id, "must")
                return Started(run_id, self._run.url, continued=True)
        # Trackio finds a run to continue by its name alone, and folders of two runs may have the same one.
        name = f"{workdir.absolute().name}-{uuid.uuid4().hex[:6]}"
        self._run = run(name, "never")
        return Started(name, self._run.url, continued=False)

    def send(self, lines: Iterable[tuple[Mapping[str, Any], float]]) -> None:
        for line, _ in lines:
            self._step = line["step"]
            self._run.log({**tracker_values(line), "attempt": self.attempt}, step=line["step"])

    def send_samples(self, samples: Sequence[TextSample]) -> None:
        table = self._trackio.Table(columns=["prompt", "text"], data=[[s.prompt, s.text] for s in samples])
        self._run.log({"samples": table, "attempt": self.attempt}, step=samples[0].step)

    def send_facts(self, name: str, facts: Mapping[str, Any]) -> None:
        text = self._trackio.Markdown(f"```json\n{json.dumps(facts, indent=1)}\n```")
        self._run.log({name: text, "attempt": self.attempt}, step=self._step)

    def finish(self, exit_code: int) -> None:
        self._trackio.finish()  # waits at most 30 s
