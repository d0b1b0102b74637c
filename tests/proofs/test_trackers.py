"""Runs in Trackio and MLflow, read back with the clients of these packages.

One run has both. It resumes from step 4, which it had passed, so that steps 5 and 6 are there twice.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers
import mlflow
import pytest
import runs
import trackio
from made_runs import train_line
from trackio.sqlite_storage import SQLiteStorage  # what trackio.Api and the dashboard read with

from jaxtrain.config.schema import Log
from jaxtrain.metrics import files, samples
from jaxtrain.metrics.mlflow import MLflow
from jaxtrain.metrics.remote import TrackerError
from jaxtrain.metrics.samples import TextSample
from jaxtrain.metrics.trackers import open_trackers
from jaxtrain.metrics.trackio import Trackio

STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep both stores in a folder of this test, and all packages offline."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("MLFLOW_", "TRACKIO_"))]:
            patch.delenv(name)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        for module in (trackio.utils, trackio.sqlite_storage):
            patch.setattr(module, "TRACKIO_DIR", folder / "trackio")
        patch.chdir(folder)  # MLflow keeps artifacts in mlruns/ of the current folder
        yield folder


@pytest.fixture(scope="module")
def tracked(stores: Path) -> Path:
    changes = {
        "data.source": str(helpers.text_file(stores / "train.tok", modules=2)),
        "data.eval_source": str(helpers.text_file(stores / "held_out.tok", modules=1)),
        "data.max_segments": 4,  # as with synthetic data, for which the step is compiled already
        "train.steps": STEPS,
        "eval.every_steps": 2,
        "checkpoint.every_steps": 2,
        "checkpoint.keep": 9,
        "sample.max_tokens": 4,
        "sample.prompt": "d||x",
        "log.trackio": "project",
        "log.mlflow": "an experiment",
    }
    config = runs.smallest(stores, changes)
    workdir = stores / "runs" / "tracked"
    assert runs.train(config, workdir) == 0
    changed = {"optimizer__clip_norm": 0.5, "checkpoint__allow_change": "optimizer.clip_norm"}
    assert runs.train(config, workdir, checkpoint__step=4, **changed) == 0
    return workdir


def numbers(workdir: Path) -> dict[tuple[str, int], float]:
    """Return (tag, step) -> every number of metrics.jsonl."""
    return {(tag, line["step"]): x for line in runs.lines(workdir) for tag, x in files.tracker_values(line).items()}


def texts_of(workdir: Path) -> list[TextSample]:
    """Return the texts of samples.txt, which are those of the last step."""
    found = list(samples.parse_samples((workdir / "samples.txt").read_text()))
    assert [(sample.step, sample.prompt) for sample in found] == [(STEPS, 1), (STEPS, 2)]
    return found


def known(workdir: Path, name: str) -> dict[str, Any]:
    """Return the id and more of the run in a tracker, which the receipt has too."""
    found = json.loads((workdir / f"{name}.json").read_text())
    assert (
        (found.pop("format"), found.pop("sent")) == (1, STEPS)
        and runs.receipt(workdir)[name] == found
        and found["attempt"] == 2
    )
    return found


def test_mlflow_has_every_number_at_its_step(tracked: Path) -> None:
    client, run_id = mlflow.MlflowClient(), known(tracked, "mlflow")["id"]
    (run,) = client.search_runs([client.get_experiment_by_name("an experiment").experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (run_id, "tracked", "FINISHED")
    found: dict[tuple[str, int], list[Any]] = {}
    for tag in run.data.metrics:
        for metric in client.get_metric_history(run_id, tag):
            found.setdefault((tag, metric.step), []).append(metric)
    wanted = numbers(tracked)
    assert {place: max(several, key=lambda m: m.timestamp).value for place, several in found.items()} == wanted
    assert [len(found["train/loss", step]) for step in range(1, STEPS + 1)] == [1, 1, 1, 1, 2, 2]
    times = {line["step"]: line["time_unix"] for line in runs.lines(tracked) if line["kind"] == "train"}
    assert all(found["train/loss", step][-1].timestamp == int(1000 * time) for step, time in times.items())


def test_mlflow_has_config_samples_and_receipt(tracked: Path) -> None:
    client, run_id = mlflow.MlflowClient(), known(tracked, "mlflow")["id"]

    def artifact(name: str) -> str:
        return Path(client.download_artifacts(run_id, name)).read_text()

    config = json.loads((tracked / "config.json").read_text())
    assert json.loads(artifact("config.json")) == config and config["optimizer"]["clip_norm"] == 0.5
    params = client.get_run(run_id).data.params
    assert params["train.steps"] == str(STEPS) and float(params["optimizer.clip_norm"]) != 0.5  # that of the first start
    assert json.loads(artifact("receipt.json"))["exit_code"] == 0
    assert list(samples.parse_samples(artifact(f"samples/step_{STEPS:08}.txt"))) == texts_of(tracked)


def test_trackio_has_every_number_at_its_step(tracked: Path) -> None:
    name = known(tracked, "trackio")["id"]
    (run,) = trackio.Api().runs("project")
    assert run.name == name and run.config["train.steps"] == STEPS
    rows = SQLiteStorage.get_logs("project", name, run_id=run.id)
    found = {(tag, row["step"]): x for row in rows for tag, x in row.items() if tag.partition("/")[0] in ("train", "eval")}
    assert found == numbers(tracked)
    assert [(row["step"], row["attempt"]) for row in rows if "train/loss" in row] == [
        *((step, 1) for step in range(1, STEPS + 1)),
        *((step, 2) for step in range(5, STEPS + 1)),
    ]
    texts = [row["samples"]["_value"] for row in rows if "samples" in row][-1]
    assert [(each["prompt"], each["text"]) for each in texts] == [each[1:] for each in texts_of(tracked)]
    assert any('"exit_code": 0' in row["receipt"]["_value"] for row in rows if "receipt" in row)


@pytest.mark.parametrize("kind", [MLflow, Trackio])
def test_a_run_that_is_new_there_gets_all_there_is(tmp_path: Path, kind: Any) -> None:
    """A resumed run with another project starts a run there, and so does one whose run was deleted. NaN is kept."""
    lines = [{"kind": "train", **train_line(step, loss=float("nan")), "time_unix": 1e9} for step in range(1, 201)]
    seen = []
    for project in ("one", "two", "two"):
        tracker = kind(tmp_path, project, {}, resumed=True)
        tracker.rewind(200, lines, [TextSample(2, 0, "x")], 0)
        tracker.close(1)
        seen.append(tracker.facts["id"])
        if kind is MLflow:
            client = mlflow.MlflowClient()
            assert len(client.get_metric_history(seen[-1], "train/loss")) == 200
            assert client.get_run(seen[-1]).info.status == "FAILED"
            client.delete_run(seen[-1])
        else:
            (run,) = [run for run in trackio.Api().runs(project) if run.name == seen[-1]]
            rows = [row for row in SQLiteStorage.get_logs(project, run.name, run_id=run.id) if "train/loss" in row]
            assert [row["step"] for row in rows] == list(range(1, 201))
            run.delete()
    assert len(set(seen)) == 3


def test_lines_that_a_killed_process_had_not_sent_are_sent_at_the_resume(tmp_path: Path, monkeypatch) -> None:
    """What the file of the run's folder does not call sent is sent again; a step is so called once it is old."""
    monkeypatch.setattr("jaxtrain.metrics.remote.SETTLED_S", 0.0)
    lines = [{"kind": "train", **train_line(step), "time_unix": 1e9} for step in range(1, 13)]
    first = MLflow(tmp_path, "killed", {}, resumed=False)
    first.rewind(-1, [], [], 0)
    first.line(lines[0], 1e9)
    first.line(lines[1], 1e9)  # and no call of `close`
    assert json.loads((tmp_path / "mlflow.json").read_text())["sent"] == 1
    again = MLflow(tmp_path, "killed", {}, resumed=True)
    again.rewind(10, lines[:10], [], 2)
    again.line(lines[10], 1e9)
    again.close(130)
    client = mlflow.MlflowClient()
    assert again.facts["id"] == first.facts["id"] and client.get_run(first.facts["id"]).info.status == "KILLED"
    history = client.get_metric_history(first.facts["id"], "train/loss")
    assert {metric.step for metric in history} == set(range(1, 12))
    assert json.loads((tmp_path / "mlflow.json").read_text())["sent"] == 11


def test_names_of_sets_and_files_that_mlflow_does_not_allow_are_changed(tmp_path: Path) -> None:
    tracker = MLflow(tmp_path, "names", {"a": {"b": "x" * 9000}}, resumed=False)
    tracker.line({"kind": "source", "step": 1, "source": "../a//b=ü,c.tok", "tokens": 5, "epoch": 0.5, "weight": 1.0}, 1e9)
    tracker.close(0)
    data = mlflow.MlflowClient().get_run(tracker.facts["id"]).data
    assert sorted(data.metrics.values()) == [0.5, 1.0, 5.0] and len(data.params["a.b"]) == 6000


def test_a_server_that_fails_or_hangs_stops_no_run(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr("jaxtrain.metrics.mlflow.FINISH_S", 0.1)
    monkeypatch.setattr("jaxtrain.metrics.mlflow.PATIENCE_S", 0.1)
    released = mlflow.utils.async_logging.async_logging_queue.threading.Event()

    def hangs(*args: Any, **more: Any) -> None:
        released.wait(300)
        raise ConnectionError("no server at http://me:a-password@localhost:1/api\nand more")

    tracker = MLflow(tmp_path, "hangs", {}, resumed=False)
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", hangs)
    with caplog.at_level("WARNING", logger="jaxtrain"):
        writers = files.Writers(tmp_path, [tracker])
        writers.rewind(0)
        for step in (1, 2):
            writers.train(**train_line(step))
        writers.close(0)
        assert len(caplog.records) == 2, "the wait, and what is not sent after FINISH_S"
        released.set()
        tracker._thread.join(300)
    assert len([record for record in caplog.records if record.name == "jaxtrain"]) == 3, "told once"
    assert "http://localhost:1/api" in caplog.text and "a-password" not in caplog.text
    assert [line["step"] for line in files.read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_failure_at_the_end_of_a_run_is_in_its_log(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **more: Any) -> None:
        raise ConnectionError("it is gone")

    monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", fails)
    workdir = stores / "runs" / "fails"
    (stores / "one").mkdir()
    config = runs.smallest(stores / "one", {"data.source": "synthetic", "train.steps": 2, "log.mlflow": "gone"})
    assert runs.train(config, workdir) == 0
    assert "it is gone" in (workdir / "log.txt").read_text()


def test_a_wrong_address_is_tried_a_few_times_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default mlflow's client tries for four minutes, and does so for a server that is lost during the run."""
    seen, name = [], "MLFLOW_HTTP_REQUEST_MAX_RETRIES"

    def fails(*args: Any, **more: Any) -> None:
        seen.append(os.environ.get(name))
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(mlflow.MlflowClient, "get_experiment_by_name", fails)
    for own in (None, "9"):
        if own:
            monkeypatch.setenv(name, own)
        with pytest.raises(TrackerError):
            MLflow(tmp_path, "x", {}, resumed=False)
        assert os.environ.get(name) == own
    assert seen == ["2", "9"]


def test_a_tracker_that_does_not_start_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "unknown://place")
    with pytest.raises(TrackerError) as found:
        open_trackers(tmp_path, Log(trackio="others", mlflow="an experiment"), {}, resumed=False)
    assert found.value.key == "log.mlflow"
    assert trackio.context_vars.current_run.get() is None  # finished
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://localhost:1")  # without a token
    with pytest.raises(TrackerError) as found:
        open_trackers(tmp_path, Log(trackio="others"), {}, resumed=False)
    assert found.value.key == "log.trackio" and not (tmp_path / "tb").exists()
    (tmp_path / "mlflow.json").write_text("{}")
    with pytest.raises(TrackerError) as found:
        open_trackers(tmp_path, Log(mlflow="an experiment"), {}, resumed=True)
    assert found.value.key == "log.mlflow"
