"""The output of a run: held-out sets by name, samples, TensorBoard, Weights & Biases, and the page of its report.

There are two runs of ten steps. One has every output, and later resumes from step 4 and trains to its end again. The other has
only the default output.
"""

import dataclasses
import json
import math
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import runs
import wandb
from pages import Read, assert_self_contained, curves_of
from played_nvml import Gpu, Nvml

from jaxtrain import generation, metrics, samples, validate
from jaxtrain.data import pipeline
from jaxtrain.hardware import Devices
from jaxtrain.monitor import Monitor
from jaxtrain.receipt.format import open_run, rows
from jaxtrain.report import page
from jaxtrain.report.run import read, read_all
from jaxtrain.samples import Sample
from jaxtrain.trackers.wandb import TrackerError, WandB

SETS = "web={folder}/web.tok; code_2={folder}/code.tok=2,{folder}/web.tok=1;made-up=synthetic"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    for name, modules in (("train", 4), ("web", 2), ("code", 3)):
        helpers.text_file(folder / f"{name}.tok", modules)
    changes = {
        "model.num_layers": 1,
        "mesh.fsdp": 1,  # compiles faster than sharded weights
        "data.source": str(folder / "train.tok"),
        "data.eval_source": str(folder / "web.tok"),
        "train.steps": 10,
        "eval.every_steps": 4,
        "checkpoint.every_steps": 4,
    }
    text = "\n".join(f"    config.{key} = {value!r}" for key, value in changes.items())
    path = folder / "watched.py"
    path.write_text(runs.SMALL.replace("    return config", f"{text}\n    return config"))
    return path


@pytest.fixture(scope="module")
def plain(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("plain") / "run"
    assert runs.train(config, workdir) == 0
    return workdir


@dataclasses.dataclass
class Watched:
    """A run that resumed from step 4, and the text of its files before that."""

    workdir: Path
    first: dict[str, str]
    compiled: list[int]  # programs of each sampler


@pytest.fixture(scope="module")
def watched(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    workdir = tmp_path_factory.mktemp("watched") / "run"
    everything: dict[str, Any] = {
        "data__eval_source": SETS.format(folder=config.parent),
        "sample__every_steps": 3,
        "sample__max_tokens": 4,
        "sample__prompt": "def||x",
        "log__wandb": "trainers/project",
    }
    made: list[generation.Sampler] = []
    start = generation.Sampler.__init__

    def noted(self: generation.Sampler, *args: Any) -> None:
        start(self, *args)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setattr(generation.Sampler, "__init__", noted)
        assert runs.train(config, workdir, **everything) == 0
        names = ("samples.txt", "metrics.jsonl", "wandb.json", "receipt.json")
        first = {name: (workdir / name).read_text() for name in names}
        assert runs.train(config, workdir, checkpoint__step=4, **everything) == 0
    return Watched(workdir, first, [sampler._extend._cache_size() for sampler in made])


def held_out(workdir: Path, name: str = "") -> list[dict[str, Any]]:
    return [line for line in runs.lines(workdir) if line["kind"] == "eval" and line.get("set", "") == name]


# ---- Held-out sets


def test_every_set_is_evaluated_each_time(watched: Watched, plain: Path) -> None:
    lines = [line for line in runs.lines(watched.workdir) if line["kind"] == "eval"]
    assert [(line["step"], line["set"]) for line in lines] == [(s, n) for s in (4, 8, 10) for n in ("web", "code_2", "made-up")]
    for line in lines:
        assert tuple(line) == metrics.NAMED_EVAL_KEYS
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]), rel=1e-12)
    # A named set gives the same loss as a single source without a name.
    alone = held_out(plain)
    assert [tuple(line) for line in alone] == [metrics.EVAL_KEYS] * 3
    assert [{k: v for k, v in line.items() if k != "set"} for line in held_out(watched.workdir, "web")] == alone
    assert [line["loss"] for line in held_out(watched.workdir, "code_2")] != [line["loss"] for line in alone]
    # A document's last byte and end token are predicted, its first byte is not: as many targets as bytes.
    assert all(line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2), rel=1e-6) for line in alone)
    assert all(line["bits_per_byte"] is None for line in held_out(watched.workdir, "made-up"))
    said = (plain / "log.txt").read_text()
    last = alone[-1]
    assert f"step 10: held-out loss {last['loss']:.4f}, {last['bits_per_byte']:.3f} bits a byte, perplexity " in said
    assert "step 8: held-out loss of made-up " in (watched.workdir / "log.txt").read_text()


def test_the_receipt_has_the_newest_evaluation(watched: Watched, plain: Path) -> None:
    assert runs.receipt(plain)["held_out"] == [{k: v for k, v in held_out(plain)[-1].items() if k != "kind"}]
    newest = runs.receipt(watched.workdir)["held_out"]
    assert [(line["set"], line["step"]) for line in newest] == [("web", 10), ("code_2", 10), ("made-up", 10)]


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("", {"": ""}),
        ("a/b.tok", {"": "a/b.tok"}),
        ("a.tok=0.3,b.tok=0.7", {"": "a.tok=0.3,b.tok=0.7"}),
        ("corpus=0.5", {"": "corpus=0.5"}),  # a file without a suffix, and its weight
        ("web=web.tok", {"web": "web.tok"}),
        ("year=2024.tok ; b-2 = b.tok=2,c.tok ;", {"year": "2024.tok", "b-2": "b.tok=2,c.tok"}),
        ("./web=web.tok", {"": "./web=web.tok"}),
        ("own=own:Source;made=synthetic", {"own": "own:Source", "made": "synthetic"}),
    ],
)
def test_sets_are_read(text: str, sets: dict[str, str]) -> None:
    assert pipeline.parse_sets(text) == (sets, [])


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("a={web};a={code}", "data.eval_source", "the name 'a' is given twice"),
        ("a={web};{code}", "data.eval_source", "has no name"),
        ("a={web};b={folder}/none.tok", "data.eval_source", "no such file"),
        ("a={web};b={folder}/watched.py", "data.eval_source", "is no token file"),
        ("a={web};b=own_module_that_is_not:Source", "data.eval_source", "no module own_module_that_is_not"),
        ("a={web};b={other}", "data.tokenizer", "is not the tokenizer of"),
    ],
)
def test_what_is_wrong_with_a_set_is_said_before_anything_starts(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, key: str, words: str
) -> None:
    folder = config.parent
    other = tmp_path / "other.tok"
    if "{other}" in text:
        from jaxtrain.data.tokenfile import TokenWriter

        with TokenWriter(other, {"name": "elsewhere", "sha256": "0" * 64, "vocab_size": 257, "eot": 256}) as writer:
            writer.write([1] * 1000, 1000)
            writer.end_document()
    source = text.format(folder=folder, web=folder / "web.tok", code=folder / "code.tok", other=other)
    assert runs.train(config, tmp_path / "run", data__eval_source=source) == 2
    said = capsys.readouterr().err
    assert said.count("\n") >= 1 and key in said and words in said
    assert not (tmp_path / "run").exists()


# ---- Samples


def test_samples_do_not_disturb_training(watched: Watched, plain: Path) -> None:
    assert runs.losses(watched.workdir) == runs.losses(plain)
    ours, theirs = runs.tensors(watched.workdir), runs.tensors(plain)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_samples_are_written_at_intervals(watched: Watched) -> None:
    found = list(samples.read(watched.first["samples.txt"]))
    assert [(s.step, s.prompt) for s in found] == [(step, prompt) for step in (3, 6, 9, 10) for prompt in (1, 2)]
    assert all(s.text.startswith(("def", "x")[s.prompt - 1]) for s in found)
    assert samples.write(found) == watched.first["samples.txt"]
    assert "sample (prompt 2, step 6, " in (watched.workdir / "log.txt").read_text()


def test_a_resumed_run_drops_samples_of_steps_it_takes_anew(watched: Watched) -> None:
    """The resumed steps write the same samples again. Without the rewind the file would have them twice."""
    assert (watched.workdir / "samples.txt").read_text() == watched.first["samples.txt"]
    assert len(runs.losses(watched.workdir)) == 10


def test_generation_is_compiled_once(watched: Watched) -> None:
    """Generation is compiled once for each prompt length and once for the next token, for any number of samples."""
    assert watched.compiled == [3, 3]


def test_the_time_of_samples_is_in_no_rate(watched: Watched) -> None:
    """Samples are written after step 3. The metrics of step 3 and of the next step have no step time, so no rate includes the
    samples' time.
    """
    lines = map(json.loads, watched.first["metrics.jsonl"].splitlines())
    times = {line["step"]: line["step_time_s"] for line in lines if line["kind"] == "train"}
    assert times[3] is None and times[4] is None


# ---- Trackers


def test_tensorboard_shows_sets_and_texts(watched: Watched) -> None:
    found, restarts = runs.events(watched.workdir / "tb")
    numbers = {(step, tag): value for step, _, values in found for tag, value in values.items()}
    for line in held_out(watched.workdir, "code_2"):
        for name in ("loss", "perplexity", "bits_per_byte"):
            assert numbers[line["step"], f"eval/code_2/{name}"] == pytest.approx(line[name])
    texts = list(samples.read((watched.workdir / "samples.txt").read_text()))
    shown = [(step, tag, value) for step, _, values in found for tag, value in values.items() if tag.startswith("sample/")]
    indented = ["".join(f"    {line}" for line in s.text.splitlines(keepends=True)) for s in texts]
    assert shown == [(s.step, f"sample/{s.prompt}/text_summary", text) for s, text in zip(texts, indented, strict=True)]
    assert json.loads(numbers[10, "receipt/text_summary"])["exit_code"] == 0
    assert json.loads(numbers[4, "config/text_summary"]) == json.loads((watched.workdir / "config.json").read_text())
    assert restarts == 1


def test_events_page_and_metrics_agree(watched: Watched, plain: Path) -> None:
    """Every loss agrees to the last digit that events, page and metrics store, also in a resumed run."""
    for workdir, sets in ((watched.workdir, ("web", "code_2")), (plain, ("",))):
        shown = curves_of(page.html([read(workdir)]))
        train = [x for x in runs.lines(workdir) if x["kind"] == "train"]
        assert [x["step"] for x in train] == list(range(1, 11))
        board = {step: values for step, _, values in runs.events(workdir / "tb")[0] if "train/loss" in values}
        for x in train:
            assert shown["train"][x["step"]] == x["loss"] and board[x["step"]]["train/loss"] == np.float32(x["loss"])
        for name in sets:
            assert shown[f"held-out {name}".rstrip()] == {x["step"]: x["loss"] for x in held_out(workdir, name)}


def test_the_page_shows_the_run(watched: Watched) -> None:
    run = read(watched.workdir)
    text = page.html([run])
    assert_self_contained(text)
    words = Read(text).words
    told = " ".join(words)
    for heading in ("Training", "Wall time", "Samples", "Receipt"):
        assert f"<h2>{heading}</h2>" in text
    assert "<h2>Memory</h2>" not in text and "<h2>GPUs</h2>" not in text  # a CPU
    assert "done: 10 steps" in told and f"{runs.losses(watched.workdir)[10]:.4f}" in told
    found = run.wall_time
    assert found is not None and found.attempts == 2 and found.parts["repeated"] > 0
    assert math.isclose(sum(found.parts.values()), found.wall_s, rel_tol=1e-3)
    assert f"{100 * (found.goodput or 0):.1f}%" in told
    shown = [row for row in rows(open_run(watched.workdir)) if not row[0].startswith(("overrides", *page.ELSEWHERE))]
    assert len(shown) > 50 and all(text in words for row in shown for text in row if text), "as the command shows a receipt"
    for row in runs.receipt(watched.workdir)["overrides"].items():
        assert words[words.index(row[0]) + 1] == row[1]


def test_differences_on_the_page_are_those_of_receipt_diff(watched: Watched, tmp_path: Path) -> None:
    def copied(name: str, change: Callable[[dict[str, Any]], None]) -> Path:
        (tmp_path / name).mkdir()
        for file in ("metrics.jsonl", "config.json"):
            shutil.copy(watched.workdir / file, tmp_path / name)
        told = runs.receipt(watched.workdir)
        change(told)
        (tmp_path / name / "receipt.json").write_text(json.dumps(told))
        return tmp_path / name

    changed = copied("changed", lambda told: told["packages"].update(optax="0.0.1"))
    shown = page.html(read_all([watched.workdir, changed]))
    (table,) = re.findall(r"<caption>From [^<]* to changed: possible causes</caption>.*?<tbody>(.*?)</tbody>", shown)
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    assert len(rows) == 1 and "optax" in rows[0] and "0.0.1" in rows[0]
    same = page.html(read_all([watched.workdir, copied("same", lambda told: None)]))
    assert "no difference that can explain other results or another speed" in same


def history(records: list[Any]) -> list[dict[str, Any]]:
    """Return the values of each record. A value with a nested key, as a table has, gets the first part of its key."""
    rows = ([(i.key or i.nested_key[0], json.loads(i.value_json)) for i in r.history.item] for r in records)
    return [dict(row) for row in rows if row]


def test_wandb_is_told_the_same(watched: Watched) -> None:
    """W&B's offline files have the lines of metrics.jsonl, in two attempts with one id."""
    attempts = [runs.wandb_records(path) for path in sorted((watched.workdir / "wandb").glob("offline-run-*/run-*.wandb"))]
    assert len(attempts) == 2
    known = json.loads((watched.workdir / "wandb.json").read_text())
    before = json.loads(watched.first["wandb.json"])
    assert known == before | {"attempt": 2} and known["format"] == 1
    assert runs.receipt(watched.workdir)["wandb"] == {k: known[k] for k in ("where", "id", "attempt", "url")}
    for number, (records, from_step) in enumerate(zip(attempts, (0, 4), strict=True), start=1):
        begun = next(r.run for r in records if r.HasField("run"))
        assert (begun.entity, begun.project, begun.run_id) == ("trainers", "project", known["id"])
        rows = [row for row in history(records) if "samples" not in row]
        lines = [line for line in runs.lines(watched.workdir) if line["step"] > from_step]
        assert [row["step"] for row in rows] == [line["step"] for line in lines]
        assert {row["attempt"] for row in rows} == {number}
        for row, line in zip(rows, lines, strict=True):
            told = metrics.tagged(line)
            told = {k: v for k, v in told.items() if k.startswith("eval/") or k in ("train/loss", "train/grad_norm")}
            assert {k: row[k] for k in told} == told
        axes = {r.metric.name or r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
        assert axes["*"] == "step"
        options = {u.key: json.loads(u.value_json) for r in records if r.HasField("config") for u in r.config.update}
        assert options["train"]["global_batch"] == 8
        tables = [row for row in history(records) if "samples" in row]
        assert [row["step"] for row in tables] == [step for step in (3, 6, 9, 10) if step > from_step]
    folder = sorted((watched.workdir / "wandb").glob("offline-run-*"))[-1] / "files"
    assert json.loads((folder / "receipt.json").read_text())["exit_code"] == 0
    table = json.loads(sorted((folder / "media/table").glob("*.json"))[-1].read_text())
    assert table["columns"] == ["step", "prompt", "text"] and len(table["data"]) == 2
    exits = [r.exit.exit_code for r in attempts[-1] if r.HasField("exit")]
    assert exits == [0]
    assert "W&B takes nothing back: 12 lines of steps after 4 stay there" in (watched.workdir / "log.txt").read_text()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.usefixtures("offline")
def test_a_wandb_run_that_is_new_gets_all_there_is(tmp_path: Path) -> None:
    """A new W&B run gets the whole history, even of a resumed run. Each project has its own W&B run."""
    line = {"kind": "eval", "step": 2, "loss": 1.5, "bits_per_byte": None, "perplexity": 4.5}
    ids = []
    for project in ("one", "two"):
        tracker = WandB(tmp_path, project, resumed=True)
        tracker.rewind(2, [line], [Sample(2, 0, "x")], 0)
        tracker.close(0)
        (file,) = tmp_path.glob(f"wandb/*-{tracker.facts['id']}/*.wandb")
        rows = history(runs.wandb_records(file))
        assert [row["step"] for row in rows] == [2, 2] and rows[0]["eval/loss"] == 1.5 and "samples" in rows[1]
        ids.append(tracker.facts["id"])
    assert len(set(ids)) == 2
    (tmp_path / "wandb.json").write_text('{"format": 9, "where": "two", "id": "x", "attempt": 1}')
    with pytest.raises(TrackerError, match="format 9"):
        WandB(tmp_path, "two", resumed=True)


@pytest.mark.usefixtures("offline")
def test_a_tracker_that_fails_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = WandB(tmp_path, "one", resumed=False)
    finish = tracker._run.finish

    class Broken:
        dir = str(tmp_path)

        def __getattr__(self, name: str) -> Any:
            raise BrokenPipeError("the service is gone\nand more")

    tracker._run = Broken()
    with caplog.at_level("WARNING", logger="jaxtrain"):
        tracker.rewind(0, [], [], 0)
        writers = metrics.Writers(tmp_path, [tracker])
        for step in (1, 2):
            writers.eval(step=step, loss=1.0, bits_per_byte=None, perplexity=2.7)
        writers.note("receipt", {"exit_code": 0})
        writers.close(0)
    finish()
    said = [record.getMessage() for record in caplog.records if record.name == "jaxtrain"]
    assert said == ["W&B failed (the service is gone): logging to it ends. The run continues; metrics.jsonl is complete."]
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_without_a_login_nothing_starts(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # wandb reads its variables once
    assert runs.train(config, tmp_path / "run", log__wandb="project", train__steps=4) == 2
    said = capsys.readouterr().err
    assert "log.wandb = 'project': W&B did not start: " in said and "WANDB_MODE=offline" in said
    assert not list((tmp_path / "run").glob("*.json*")) and not (tmp_path / "run" / "checkpoints").exists()


def test_what_validate_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(**changes: Any) -> dict[str, str]:
        run = helpers.tiny({key.replace("__", "."): value for key, value in changes.items()})
        return {p.key: p.rule for p in validate.validate(run, Devices("cpu", "CPU", 1, 8.0, "described"), tmp_path / "run")}

    assert problems(log__wandb="project") == problems(log__wandb="team/project") == {}
    for wrong in ("a/b/c", "a b", "/a", "a/"):
        assert problems(log__wandb=wrong) == {"log.wandb": "must be PROJECT or ENTITY/PROJECT"}
    monkeypatch.setattr(validate.importlib.util, "find_spec", lambda name: None)
    assert problems(log__wandb="project") == {"log.wandb": "the package wandb is not installed"}
    assert problems(sample__every_steps=5, sample__max_tokens=0) == {
        "sample.every_steps": "sample.max_tokens = 0 writes no samples"
    }


# ---- The monitor's threads


def test_the_monitor_samples_by_itself_and_a_driver_that_hangs_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtrain.monitor.JOIN_S", 0.1)
    nvml, three, hangs, again = Nvml(Gpu()), threading.Event(), threading.Event(), threading.Event()
    count = iter(range(4))

    def power(gpu: Gpu) -> int:
        if next(count) == 3:
            three.set()
            hangs.wait(300)
            again.set()
        return 0

    nvml.DeviceGetPowerUsage = power
    with Monitor({0: dict}, 10.0, nvml=nvml, environ={}, sample_s=0.001) as monitor:
        assert three.wait(300)
        thread = monitor._thread
    assert thread and thread.daemon and thread.is_alive() and nvml.open == 1, "the library is still in use"
    hangs.set()
    thread.join(300)
    assert again.is_set() and not thread.is_alive()
