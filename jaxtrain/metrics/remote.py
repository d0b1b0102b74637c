"""Copies of a run on a server or in a store of another program: all that W&B, Trackio and MLflow share.

A run of the trainer is one run there across resumes; its id is in a file of the run's folder, such as `wandb.json`, and so is
the last step that has arrived for sure. When the run resumes, later ones are sent again, since a killed process loses what it
had not sent. These programs cannot delete logged data. So a step that is repeated or sent again appears twice; in metrics.jsonl
each step appears once.
"""

import abc
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jaxtrain.metrics.files import with_times, write_atomic
from jaxtrain.metrics.samples import TextSample

FORMAT = 1
SETTLED_S = 60.0  # after which a line has arrived: the programs send every few seconds
LOGGER = logging.getLogger("jaxtrain")


class TrackerError(ValueError):
    """An error: a tracker cannot be started as configured. Has its key of the config, the reason and a remedy."""

    def __init__(self, key: str, reason: str, remedy: str):
        super().__init__(reason)
        self.key, self.reason, self.remedy = key, reason, remedy


class Started(NamedTuple):
    """A run in another program: its id and address, and whether it continues the run whose id was asked for."""

    id: str
    url: str | None
    continued: bool


class Remote(abc.ABC):
    """A `metrics.Tracker` for another program. The constructor starts or continues the run there. Raises TrackerError.

    After that no error reaches the trainer: the first one is logged, and ends logging there.
    """

    key: ClassVar[str]  # log.KEY of the config, and KEY.json of the run's folder
    program: ClassVar[str]
    remedy: ClassVar[str]  # for a start that fails, before "or set log.KEY to ''"

    def __init__(self, workdir: Path, target: str, config: Mapping[str, Any], *, resumed: bool):
        """Args:
        target: the value of log.KEY.
        config: of the run, nested.
        resumed: whether the trainer's run resumes from a checkpoint. Then the run there continues if `target` is unchanged.
        """
        self.broken = False
        self.path = path = workdir / f"{self.key}.json"
        saved = self._load(path) if resumed and path.exists() else None
        saved = saved if saved and saved["where"] == target else None
        self.attempt = saved["attempt"] + 1 if saved else 1  # number of starts of the run there
        try:
            started = self.start(workdir, target, config, saved["id"] if saved else None)
        except Exception as error:  # no login, no network, a variable with a wrong value: the programs document no exceptions
            reason = f"{self.program} did not start: {_first_line(error).rstrip('.')}"
            raise TrackerError(f"log.{self.key}", reason, f"{self.remedy}, or set log.{self.key} to ''.") from error
        if not started.continued:
            self.attempt = 1
        self._sent = saved.get("sent", -1) if saved and started.continued else -1  # the last step that was sent
        self._mark, self._marked = self._sent, time.monotonic()  # a step, and when it was sent
        self.facts = {"where": target, "id": started.id, "attempt": self.attempt, "url": started.url}
        self._save(self._sent)

    @abc.abstractmethod
    def start(self, workdir: Path, target: str, config: Mapping[str, Any], run_id: str | None) -> Started:
        """Start a run, or continue the one with the id `run_id`, and send it the config. May raise any error."""

    @abc.abstractmethod
    def send(self, lines: Iterable[tuple[Mapping[str, Any], float]]) -> None:
        """Send lines of metrics.jsonl with their times, in seconds since 1970. May raise any error, as the next methods."""

    @abc.abstractmethod
    def send_samples(self, samples: Sequence[TextSample]) -> None:
        """Send the texts of one step."""

    @abc.abstractmethod
    def send_facts(self, name: str, facts: Mapping[str, Any]) -> None:
        """Send the contents of a JSON file of the run's folder, as `receipt`."""

    @abc.abstractmethod
    def finish(self, exit_code: int) -> None:
        """End the run."""

    def rewind(self, step: int, lines: Iterable[Mapping[str, Any]], samples: Iterable[TextSample], dropped: int) -> None:
        """Send the lines and samples so far that the run there may lack: to a new run, all of them."""
        since, self._sent, self._mark = self._sent, step, min(self._mark, step)
        self._save(self._mark)
        self.try_call(self.send, [(line, wall_time) for line, wall_time in with_times(lines) if line["step"] > since])
        by_step: dict[int, list[TextSample]] = {}
        for sample in (sample for sample in samples if sample.step > since):
            by_step.setdefault(sample.step, []).append(sample)
        for step_samples in by_step.values():
            self.try_call(self.send_samples, step_samples)
        if dropped and since >= 0:
            LOGGER.info(
                "%s",
                f"{self.program} takes nothing back: {dropped} lines of steps after {step} stay there, beside those of the "
                f"steps taken anew (attempt {self.attempt})",
            )

    def line(self, line: Mapping[str, Any], wall_time: float) -> None:
        self._sent = line["step"]
        self.try_call(self.send, [(line, wall_time)])
        if not self.broken and time.monotonic() - self._marked > SETTLED_S:
            self._save(self._mark)
            self._mark, self._marked = self._sent, time.monotonic()

    def samples(self, samples: Sequence[TextSample]) -> None:
        self.try_call(self.send_samples, samples)

    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        if name != "config":  # `start` has sent it
            self.try_call(self.send_facts, name, dict(facts))

    def close(self, exit_code: int | None) -> None:
        if exit_code is not None:
            self.try_call(self.finish, exit_code)
            self.mark_complete()

    def mark_complete(self) -> None:
        """Note that all has arrived, unless an error was logged. No call may follow."""
        if not self.broken:
            self._save(self._sent)
        self.broken = True

    def try_call(self, method: Callable[..., None], *args: Any) -> None:
        """Call a method with its errors caught. The first error is logged, and no call follows."""
        if self.broken:
            return
        try:
            method(*args)
        except Exception as error:
            self.broken = True
            message = f"{self.program} failed ({_first_line(error)}): logging to it ends. The run continues"
            LOGGER.warning("%s", f"{message}; metrics.jsonl is complete.")

    def _save(self, sent: int) -> None:
        write_atomic(self.path, json.dumps({"format": FORMAT, **self.facts, "sent": sent}, indent=1) + "\n")

    def _load(self, path: Path) -> dict[str, Any]:
        """Return the contents of the file with the id. Raises TrackerError if it is not valid, or has another FORMAT."""
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            version, *_ = (saved[name] for name in ("format", "where", "id", "attempt"))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{path}: not written by a run ({error!r})"
            raise TrackerError(f"log.{self.key}", reason, f"Move it away to start a new run in {self.program}.") from error
        if version != FORMAT:
            reason = f"{path}: format {version!r}, this jaxtrain reads {FORMAT}"
            raise TrackerError(f"log.{self.key}", reason, "Use the version that wrote it, or move it away.")
        return saved


def _first_line(error: Exception) -> str:
    """Return the first line of an error, without names and passwords in addresses."""
    return re.sub(r"//[^/@\s]+@", "//", next(iter(str(error).splitlines()), "")) or type(error).__name__
