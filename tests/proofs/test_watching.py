"""The output of a run: held-out sets by name, samples, TensorBoard, Weights & Biases, the receipt, and the page of its report.

There are two runs of 16 steps. One has every output, and later resumes from step 8 and trains to its end again. The other
has only the default output.
"""

import hashlib
import json
import math
import threading
from pathlib import Path
from typing import Any, NamedTuple

import helpers
import numpy as np
import pytest
import runs
import wandb
from pages import assert_self_contained, curves_of
from played_nvml import Gpu, Nvml

from jaxtrain.config import installed
from jaxtrain.config.hardware import Devices
from jaxtrain.data import opening
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.metrics import files, samples
from jaxtrain.metrics.gpu_monitor import Monitor
from jaxtrain.metrics.receipt import own_code
from jaxtrain.metrics.remote import TrackerError
from jaxtrain.metrics.samples import TextSample
from jaxtrain.metrics.wandb import WandB
from jaxtrain.report import run_page
from jaxtrain.report.run import read_run
from jaxtrain.step import validate

SETS = "web={folder}/web.tok; code_2={folder}/code.tok=2,{folder}/web.tok=1;made-up=synthetic"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    for name, modules in (("train", 3), ("web", 1), ("code", 2)):
        helpers.text_file(folder / f"{name}.tok", modules)
    changes = {
        "data.source": str(folder / "train.tok"),
        "data.eval_source": str(folder / "web.tok"),
        "data.max_segments": 4,  # as with synthetic data, for which the step is compiled already
        "train.steps": 16,
        "eval.every_steps": 8,
        "checkpoint.every_steps": 8,
        "log.peak_tflops": 0.1,
    }
    return runs.smallest(folder, changes)


@pytest.fixture(scope="module")
def plain(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("plain") / "run"
    assert runs.train(config, workdir) == 0
    return workdir


class Watched(NamedTuple):
    """A run that resumed from step 8, the text of its files before that, and what W&B was told: (run id, row)."""

    workdir: Path
    first: dict[str, str]
    told: list[tuple[str, dict[str, Any]]]


def record_wandb(patch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Keep W&B offline, and return the list of its rows from now on."""
    told, log = [], wandb.Run.log

    def recorded(run: wandb.Run, row: dict[str, Any], *args: Any, **more: Any) -> None:
        told.append((run.id, dict(row)))
        log(run, row, *args, **more)

    patch.setattr(wandb.Run, "log", recorded)
    patch.setenv("WANDB_MODE", "offline")
    patch.setenv("WANDB_SILENT", "true")
    return told


@pytest.fixture(scope="module")
def watched(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    workdir = tmp_path_factory.mktemp("watched") / "run"
    everything: dict[str, Any] = {
        "data__eval_source": SETS.format(folder=config.parent),
        "sample__every_steps": 6,
        "sample__max_tokens": 4,
        "sample__prompt": "d||x",
        "log__wandb": "trainers/project",
    }
    with pytest.MonkeyPatch.context() as patch:
        told = record_wandb(patch)
        assert runs.train(config, workdir, **everything) == 0
        first = {name: (workdir / name).read_text() for name in ("samples.txt", "metrics.jsonl", "wandb.json")}
        assert runs.train(config, workdir, checkpoint__step=8, **everything) == 0
    return Watched(workdir, first, told)


def held_out(workdir: Path, name: str = "") -> list[dict[str, Any]]:
    return [line for line in runs.lines(workdir) if line["kind"] == "eval" and line.get("set", "") == name]


# ---- Held-out sets


def test_every_set_is_evaluated_each_time(watched: Watched, plain: Path) -> None:
    lines = [line for line in runs.lines(watched.workdir) if line["kind"] == "eval"]
    assert [(line["step"], line["set"]) for line in lines] == [(s, n) for s in (0, 8, 16) for n in ("web", "code_2", "made-up")]
    for line in lines:
        assert tuple(line) == files.NAMED_EVAL_KEYS
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]), rel=1e-12)
    # A named set gives the same loss as a single source without a name.
    alone = held_out(plain)
    assert [tuple(line) for line in alone] == [files.EVAL_KEYS] * 3
    assert [{k: v for k, v in line.items() if k != "set"} for line in held_out(watched.workdir, "web")] == alone
    assert [line["loss"] for line in held_out(watched.workdir, "code_2")] != [line["loss"] for line in alone]
    # A document's last byte and end token are predicted, its first byte is not: as many targets as bytes.
    assert all(line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2), rel=1e-6) for line in alone)
    assert all(line["bits_per_byte"] is None for line in held_out(watched.workdir, "made-up"))
    # The receipt has the newest evaluation.
    assert runs.receipt(plain)["held_out"] == [{k: v for k, v in alone[-1].items() if k != "kind"}]
    newest = runs.receipt(watched.workdir)["held_out"]
    assert [(line["set"], line["step"]) for line in newest] == [("web", 16), ("code_2", 16), ("made-up", 16)]


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("", {"": ""}),
        ("a.tok=0.3,b.tok=0.7", {"": "a.tok=0.3,b.tok=0.7"}),
        ("corpus=0.5", {"": "corpus=0.5"}),  # a file without a suffix, and its weight
        ("year=2024.tok ; b-2 = b.tok=2,c.tok ;", {"year": "2024.tok", "b-2": "b.tok=2,c.tok"}),
        ("./web=web.tok", {"": "./web=web.tok"}),
        ("own=own:Source;made=synthetic", {"own": "own:Source", "made": "synthetic"}),
    ],
)
def test_sets_are_read(text: str, sets: dict[str, str]) -> None:
    assert opening.parse_sets(text) == (sets, [])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a={web};a={code}", "data.eval_source"),
        ("a={web};{code}", "data.eval_source"),
        ("a={web};b={folder}/none.tok", "data.eval_source"),
        ("a={web};b={folder}/small.py", "data.eval_source"),
        ("a={web};b=own_module_that_is_not:Source", "data.eval_source"),
        ("a={web};b={other}", "data.tokenizer"),
    ],
)
def test_a_wrong_set_is_refused_before_anything_starts(config, tmp_path, capsys, text, key):
    other = tmp_path / "other.tok"
    with TokenWriter(other, {"name": "elsewhere", "sha256": "0" * 64, "vocab_size": 257, "eot": 256}) as writer:
        writer.write([1] * 1000, 1000)
        writer.end_document()
    folder = config.parent
    given = text.format(folder=folder, web=folder / "web.tok", code=folder / "code.tok", other=other)
    assert runs.train(config, tmp_path / "run", data__eval_source=given) == 2
    assert key in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---- Samples


def test_samples_do_not_disturb_training(watched: Watched, plain: Path) -> None:
    assert runs.losses(watched.workdir) == runs.losses(plain)
    ours, theirs = runs.tensors(watched.workdir), runs.tensors(plain)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_samples_are_written_at_intervals(watched: Watched) -> None:
    found = list(samples.parse_samples(watched.first["samples.txt"]))
    assert [(s.step, s.prompt) for s in found] == [(step, prompt) for step in (6, 12, 16) for prompt in (1, 2)]
    assert all(s.text.startswith("dx"[s.prompt - 1]) for s in found)
    assert samples.format_samples(found) == watched.first["samples.txt"]
    # The metrics of step 6 and of the next step have no step time, so no rate includes the samples' time.
    lines = map(json.loads, watched.first["metrics.jsonl"].splitlines())
    times = {line["step"]: line["step_time_s"] for line in lines if line["kind"] == "train"}
    assert times[6] is None and times[7] is None


def test_a_resumed_run_drops_samples_of_steps_it_takes_anew(watched: Watched) -> None:
    """The resumed steps write the same samples again. Without the rewind the file would have them twice."""
    assert (watched.workdir / "samples.txt").read_text() == watched.first["samples.txt"]
    assert len(runs.losses(watched.workdir)) == 16


# ---- Receipt, report and TensorBoard


def test_tensorboard_shows_sets_and_texts(watched: Watched) -> None:
    found, restarts = runs.events(watched.workdir / "tb")
    numbers = {(step, tag): value for step, _, values in found for tag, value in values.items()}
    for line in held_out(watched.workdir, "code_2"):
        for name in ("loss", "perplexity", "bits_per_byte"):
            assert numbers[line["step"], f"eval/code_2/{name}"] == pytest.approx(line[name])
    texts = list(samples.parse_samples((watched.workdir / "samples.txt").read_text()))
    shown = [(step, tag) for step, _, values in found for tag in values if tag.startswith("sample/")]
    assert shown == [(s.step, f"sample/{s.prompt}/text_summary") for s in texts]
    assert json.loads(numbers[16, "receipt/text_summary"])["exit_code"] == 0
    assert json.loads(numbers[8, "config/text_summary"]) == json.loads((watched.workdir / "config.json").read_text())
    assert restarts == 1


def test_events_page_and_metrics_agree(watched: Watched, plain: Path) -> None:
    """Losses and rates agree to the last digit that events, page and metrics store, also in a resumed run."""
    for workdir, sets in ((watched.workdir, ("web", "code_2")), (plain, ("",))):
        html = run_page.run_html([read_run(workdir)])
        assert_self_contained(html)
        shown = curves_of(html)
        train = {x["step"]: x for x in runs.lines(workdir) if x["kind"] == "train"}
        assert [*train] == list(range(1, 17))
        board = {step: values for step, _, values in runs.events(workdir / "tb")[0] if "train/loss" in values}
        for step, x in train.items():
            assert shown["train"][step] == x["loss"] and board[step]["train/loss"] == np.float32(x["loss"])
            rate = x["tokens_per_s_per_device"]
            assert shown["tokens/s/device"][step] == rate
            assert board[step].get("train/tokens_per_s_per_device") == (rate and np.float32(rate))
            assert shown["MFU causal"][step] == (x["mfu_causal"] and 100.0 * x["mfu_causal"])
        assert any(x["mfu_causal"] for x in train.values())
        for name in sets:
            assert shown[f"held-out {name}".rstrip()] == {x["step"]: x["loss"] for x in held_out(workdir, name)}


def test_a_receipt_names_the_code_that_ran(plain: Path) -> None:
    found = runs.receipt(plain)["code"]
    assert (found["digest"], found["own"]) == (installed.code_sha256(), {})
    assert own_code({"model": {"family": "not_there:Family"}, "data": {"source": "metrics:x, gs://b/c", "lr": 1.0}}) == {}
    held = hashlib.sha256(Path(helpers.__file__).read_bytes()).hexdigest()
    assert own_code({"resolved": {"model": {"family": "helpers:WiderFamily"}}}) == {"helpers": held}


# ---- Weights & Biases


def test_wandb_is_told_the_same(watched: Watched) -> None:
    """W&B is told the lines of metrics.jsonl and the samples, in two attempts with one id."""
    known = json.loads((watched.workdir / "wandb.json").read_text())
    assert known == json.loads(watched.first["wandb.json"]) | {"attempt": 2} and (known["format"], known["sent"]) == (1, 16)
    assert runs.receipt(watched.workdir)["wandb"] == {k: known[k] for k in ("where", "id", "attempt", "url")}
    assert {run for run, _ in watched.told} == {known["id"]}
    for attempt, from_step in ((1, -1), (2, 8)):
        told = [row for _, row in watched.told if row["attempt"] == attempt]
        rows = [row for row in told if "samples" not in row]
        lines = [line for line in runs.lines(watched.workdir) if line["step"] > from_step]
        assert [row["step"] for row in rows] == [line["step"] for line in lines]
        for row, line in zip(rows, lines, strict=True):
            same = {k: v for k, v in files.tracker_values(line).items() if k.startswith("eval/") or k == "train/loss"}
            assert same and {k: row[k] for k in same} == same
        assert [row["step"] for row in told if "samples" in row] == [step for step in (6, 12, 16) if step > from_step]
    folder = sorted((watched.workdir / "wandb").glob("offline-run-*"))[-1] / "files"
    assert json.loads((folder / "receipt.json").read_text())["exit_code"] == 0
    table = json.loads(sorted((folder / "media/table").glob("*.json"))[-1].read_text())
    assert table["columns"] == ["step", "prompt", "text"] and len(table["data"]) == 2


def test_a_wandb_run_that_is_new_gets_all_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new W&B run gets the whole history, even of a resumed run. Each project has its own W&B run."""
    line = {"kind": "eval", "step": 2, "loss": 1.5, "bits_per_byte": None, "perplexity": 4.5}
    told = record_wandb(monkeypatch)
    for project in ("one", "two"):
        tracker = WandB(tmp_path, project, {}, resumed=True)
        tracker.rewind(2, [line], [TextSample(2, 0, "x")], 0)
        tracker.close(0)
    assert [row["step"] for _, row in told] == [2] * 4
    assert [row.get("eval/loss") for _, row in told] == [1.5, None] * 2 and "samples" in told[1][1]
    assert len({run for run, _ in told}) == 2
    (tmp_path / "wandb.json").write_text('{"format": 9, "where": "two", "id": "x", "attempt": 1}')
    with pytest.raises(TrackerError):
        WandB(tmp_path, "two", {}, resumed=True)


def test_a_tracker_that_fails_stops_no_run(tmp_path, caplog, monkeypatch):
    record_wandb(monkeypatch)
    tracker = WandB(tmp_path, "one", {}, resumed=False)

    def fails(*args: Any, **more: Any) -> None:
        raise BrokenPipeError("the service is gone\nand more")

    monkeypatch.setattr(wandb.Run, "log", fails)
    with caplog.at_level("WARNING", logger="jaxtrain"):
        tracker.rewind(0, [], [], 0)
        writers = files.Writers(tmp_path, [tracker])
        for step in (1, 2):
            writers.eval(step=step, loss=1.0, bits_per_byte=None, perplexity=2.7)
        writers.note("receipt", {"exit_code": 0})
        writers.close(0)
    wandb.finish()
    assert len([record for record in caplog.records if record.name == "jaxtrain"]) == 1, "told once"
    assert [line["step"] for line in files.read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_without_a_login_nothing_starts(config, tmp_path, monkeypatch, capsys):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # wandb reads its variables once
    assert runs.train(config, tmp_path / "run", log__wandb="project", train__steps=4) == 2
    assert "log.wandb = 'project'" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("*.json*")) and not (tmp_path / "run" / "checkpoints").exists()


def test_wrong_settings_of_outputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(**changes: Any) -> list[str]:
        run = helpers.tiny({key.replace("__", "."): value for key, value in changes.items()})
        return [p.key for p in validate.validate(run, Devices("cpu", "CPU", 1, 8.0, "described"), tmp_path / "run")]

    assert problems(log__wandb="project", log__trackio="my-project", log__mlflow="an experiment") == []
    assert problems(log__wandb="team/project") == []
    for wrong in ("a/b/c", "a b", "/a", "a/"):
        assert problems(log__wandb=wrong) == ["log.wandb"]
    assert problems(log__trackio="a.b") == ["log.trackio"] and problems(log__mlflow=" a") == ["log.mlflow"]
    monkeypatch.setattr(validate.importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "trackio", "mlflow"):
        assert problems(**{f"log__{name}": "project"}) == [f"log.{name}"]
    assert problems(sample__every_steps=5, sample__max_tokens=0) == ["sample.every_steps"]


# ---- The monitor's threads


def test_the_monitor_samples_by_itself_and_a_driver_that_hangs_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtrain.metrics.gpu_monitor.JOIN_S", 0.1)
    nvml, three, hangs, again = Nvml(Gpu()), threading.Event(), threading.Event(), threading.Event()
    count = iter(range(4))

    def power(gpu: Gpu) -> int:
        if next(count) == 3:
            three.set()
            hangs.wait(300)
            again.set()
        return 0

    nvml.DeviceGetPowerUsage = power
    with Monitor({0: dict}, nvml=nvml, environ={}, sample_s=0.001) as monitor:
        assert three.wait(300)
        thread = monitor._thread
    assert thread and thread.daemon and thread.is_alive() and nvml.open == 1, "the library is still in use"
    hangs.set()
    thread.join(300)
    assert again.is_set() and not thread.is_alive()
