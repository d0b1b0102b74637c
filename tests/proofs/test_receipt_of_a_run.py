"""Receipt and rates of one real run: the code that ran, rates on the report's page and in TensorBoard, the printed receipt."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import runs
from pages import curves_of

from jaxtrain.receipt import __main__ as command
from jaxtrain.receipt.collect import PATCH_MOST, own_files, source
from jaxtrain.report import page
from jaxtrain.report.run import read


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run that is long enough to measure step times, on this process's devices."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.py").write_text(runs.SMALL)
    run = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "log__peak_tflops": 0.1, "model__num_layers": 1}
    assert runs.train(folder / "small.py", folder / "run", data__source="synthetic", train__steps=20, **run) == 0
    return folder / "run"


def test_a_receipt_names_the_source_that_ran(trained: Path, tmp_path: Path) -> None:
    found = runs.receipt(trained)["source"]
    assert [*found["config_file"]] == ["small.py"] and "jaxtrain/train/run.py" in found["files"] and len(found["files"]) > 100
    import helpers

    assert own_files({"model": {"family": "not_there:Family"}, "data": {"source": "metrics:x, gs://b/c", "lr": 1.0}}) == []
    parts = own_files({"model": {"family": "helpers:WiderFamily"}})
    assert parts == [Path(helpers.__file__)]
    (tmp_path / "mine.py").write_text("x = 1\n")
    found = source(runs.REPO / "jaxtrain", tmp_path / "mine.py", parts)
    assert [*found["config_file"]] == ["mine.py"], "without its folder, which may be private"
    assert {"tests/helpers.py", "jaxtrain/__init__.py"} <= found["files"].keys()
    assert len(found["patch"]) <= PATCH_MOST


def test_rates_are_the_same_on_the_page_and_in_tensorboard(trained: Path) -> None:
    """Page and TensorBoard have the rates of metrics.jsonl. TensorBoard stores them as float32."""
    shown = curves_of(page.html([read(trained)]))
    lines = {x["step"]: x for x in runs.lines(trained)}
    rates = {step: x["tokens_per_s_per_device"] for step, x in lines.items()}
    assert shown["tokens/s/device"] == rates and len([rate for rate in rates.values() if rate]) > 10
    assert shown["MFU causal"] == {step: x["mfu_causal"] and 100.0 * x["mfu_causal"] for step, x in lines.items()}
    events = {step: values for step, _, values in runs.events(trained / "tb")[0] if "train/loss" in values}
    assert {step: values.get("train/tokens_per_s_per_device") for step, values in events.items()} == {
        step: rate and np.float32(rate) for step, rate in rates.items()
    }


def test_show_and_list_of_a_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", str(trained)]) == 0
    printed = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    receipt = runs.receipt(trained)
    assert printed["overrides.train.steps"].strip() == "20" and printed["data.source"].strip() == "synthetic"
    assert printed["loss_at.20"].strip() == str(receipt["loss_at"]["20"])
    assert printed["packages.jax"].strip() == receipt["packages"]["jax"]
    assert printed["speed.step_time_s.median"].strip() == f"{receipt['speed']['step_time_s']['median']:.6g}"
    assert "memory_gib.parameters" in printed and "goodput.goodput" in printed and "saves.count" in printed
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "receipt.json").write_text("{")
    shutil.copytree(trained, tmp_path / "killed")
    killed = {name: value for name, value in receipt.items() if name not in ("speed", "loss_at", "memory")}
    (tmp_path / "killed" / "receipt.json").write_text(json.dumps({**killed, "exit_code": None, "ended": None}))
    assert command.main(["list", str(tmp_path), str(trained)]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(rows).split())
    assert "not a receipt" in text and "killed, or still running" in text and text.count(f"{receipt['loss_at']['20']:.4f}") == 2
