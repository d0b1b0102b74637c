"""MLflow: a run's lines of metrics.jsonl, samples, config and receipt, on a tracking server or in a local store.

mlflow's own variables select the place: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN, ... Without them it is mlflow's default,
`mlflow.db` and `mlruns/` of the current folder. MLflow keeps both values of a step that a resumed run repeats. mlflow's client
waits for the server at each call, up to minutes; so calls are made in a thread of their own.
"""

import contextlib
import importlib
import itertools
import logging
import os
import posixpath
import queue
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxtrain.config.schema import flatten
from jaxtrain.metrics import samples as texts
from jaxtrain.metrics.files import tracker_values
from jaxtrain.metrics.remote import Remote, Started

FINISH_S = 300.0  # longest wait for data that is not sent when the run ends
PATIENCE_S = 5.0  # wait before the log says so
STATUS = {0: "FINISHED", 75: "KILLED", 130: "KILLED"}  # by exit code; FAILED for others
METRICS_PER_CALL, PARAMS_PER_CALL, PARAM_LENGTH = 1000, 100, 6000  # MLflow's limits
LOGGER = logging.getLogger("jaxtrain")


class MLflow(Remote):
    """A `metrics.Tracker` for MLflow. log.mlflow is the name of an experiment, which is made if there is none."""

    key, program = "mlflow", "MLflow"
    remedy = "Correct mlflow's variables (MLFLOW_TRACKING_URI, ...), name another experiment"

    def start(self, workdir: Path, target: str, config: Mapping[str, Any], run_id: str | None) -> Started:
        mlflow: Any = importlib.import_module("mlflow")
        for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
            if os.environ.get(name):
                LOGGER.warning("%s", f"{name} is not used: log.mlflow names the experiment, and mlflow.json a run to continue")
        with _few_retries():
            return self._start(mlflow, workdir, target, config, run_id)

    def _start(self, mlflow: Any, workdir: Path, target: str, config: Mapping[str, Any], run_id: str | None) -> Started:
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(target)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(target)
        existing = self._find(mlflow, run_id) if run_id else None
        tags = {
            "mlflow.source.type": "LOCAL",
            "mlflow.source.name": shlex.join(sys.orig_argv),
        }
        run = existing or self._client.create_run(experiment_id, run_name=workdir.absolute().name, tags=tags)
        self._id = run.info.run_id
        if existing:
            self._client.update_run(self._id, status="RUNNING")
        # A param cannot change: a key that a resume changes has its first value there, and the newest one in config.json.
        new = [(name, str(value)[:PARAM_LENGTH]) for name, value in flatten(config) if name not in run.data.params]
        for batch in itertools.batched(new, PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=[self._entities.Param(*param) for param in batch], synchronous=True)
        self._client.log_dict(self._id, dict(config), "config.json")
        self._calls: queue.SimpleQueue[tuple[Callable[..., None], Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()
        server = urlsplit(self._client.tracking_uri)
        address = f"{server.scheme}://{server.netloc.rpartition('@')[2]}{server.path.rstrip('/')}"
        page = f"{address}/#/experiments/{run.info.experiment_id}/runs/{self._id}"
        return Started(self._id, page if server.scheme in ("http", "https") else None, continued=existing is not None)

    def _find(self, mlflow: Any, run_id: str) -> Any:
        """Return the run with this id; None if it was deleted, or is on another server."""
        try:
            run = self._client.get_run(run_id)
        except mlflow.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def send(self, lines: Iterable[tuple[Mapping[str, Any], float]]) -> None:
        metrics = (
            self._entities.Metric(_allowed(tag), value, int(1000 * wall_time), line["step"])
            for line, wall_time in lines
            for tag, value in tracker_values(line).items()
        )
        for batch in itertools.batched(metrics, METRICS_PER_CALL):
            self._client.log_batch(self._id, metrics=batch, synchronous=True)

    def send_samples(self, samples: Sequence[texts.TextSample]) -> None:
        self._client.log_text(self._id, texts.format_samples(samples), f"samples/step_{samples[0].step:08}.txt")

    def send_facts(self, name: str, facts: Mapping[str, Any]) -> None:
        self._client.log_dict(self._id, facts, f"{name}.json")

    def finish(self, exit_code: int) -> None:
        self._client.set_terminated(self._id, STATUS.get(exit_code, "FAILED"))

    def try_call(self, method: Callable[..., None], *args: Any) -> None:
        self._calls.put((method, args))

    def close(self, exit_code: int | None) -> None:
        if exit_code is None:
            return
        self.try_call(self.finish, exit_code)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            LOGGER.warning("%s", f"waiting for MLflow, at most {FINISH_S:g} s")
            self._thread.join(FINISH_S)
        if self._thread.is_alive():
            LOGGER.warning("%s", f"MLflow did not take all within {FINISH_S:g} s. metrics.jsonl is complete.")
        else:
            self.mark_complete()

    def _work(self) -> None:
        """Make the calls, in order, until `finish` has returned."""
        method = None
        while method != self.finish:
            method, args = self._calls.get()
            super().try_call(method, *args)


@contextlib.contextmanager
def _few_retries() -> Iterator[None]:
    """Let a wrong address fail in seconds: by default mlflow's client tries for four minutes."""
    name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    is_unset = name not in os.environ
    if is_unset:
        os.environ[name] = "2"
    try:
        yield
    finally:
        if is_unset:
            del os.environ[name]


def _allowed(tag: str) -> str:
    """Return a tag as MLflow allows it: the name of a metric has the form of a relative path, with few further characters."""
    return posixpath.normpath(re.sub(r"[^\w.\- :/]", "_", tag)).lstrip("./")
