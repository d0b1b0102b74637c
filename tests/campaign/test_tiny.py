"""The first run of a new user: configs/tiny.py learns Python. The test trains its first steps."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs

LAST = 120
SHORTER = (f"--config.train.steps={LAST}", "--config.eval.every_steps=60", "--config.checkpoint.every_steps=60")


def as_a_user(module: str, *arguments: str) -> str:
    """Run a command of jaxtrain in a new process on one CPU device, and return its output."""
    line = [sys.executable, "-m", "jaxtrain", module, *arguments]
    environment = {k: v for k, v in runs.os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(line, cwd=runs.REPO, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train configs/tiny.py. Returns (the run's folder, its output)."""
    workdir = tmp_path_factory.mktemp("tiny") / "run"
    return workdir, as_a_user("main", "--config=configs/tiny.py", f"--workdir={workdir}", *SHORTER)


def test_it_learns_and_its_folder_holds_everything(finished: tuple[Path, str]) -> None:
    workdir, _ = finished
    assert {p.name for p in workdir.iterdir()} == {
        "config.json", "receipt.json", "metrics.jsonl", "log.txt", "tb", "checkpoints", "samples.txt", "goodput.jsonl",
    }  # fmt: skip
    assert runs.steps(workdir) == [60, LAST]
    receipt = runs.receipt(workdir)
    assert (receipt["exit_code"], receipt["attempt"], receipt["synthetic"]) == (0, 1, False)
    loss = np.asarray(list(runs.losses(workdir).values()))
    assert 3.0 < loss[0] < np.log(264)  # after ten steps: near a uniform guess among all tokens, but already below it
    assert np.all(np.diff([part.mean() for part in np.array_split(loss, 4)]) < 0)
    _, first, last = (line["loss"] for line in runs.lines(workdir) if line["kind"] == "eval")
    assert last < first


def test_the_sample_is_kept_and_the_command_asks_as_the_run_did(finished: tuple[Path, str]) -> None:
    workdir, said = finished
    header, _, sample = (workdir / "samples.txt").read_text().partition("\n")
    assert header == f"--- step {LAST}" and sample.startswith("def ") and sample.strip() in said
    assert as_a_user("sample", f"--workdir={workdir}").strip() == sample.strip()
    assert as_a_user("sample", f"--workdir={workdir}", "--seed=1").strip() != sample.strip()
