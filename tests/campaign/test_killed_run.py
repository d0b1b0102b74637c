"""A real run that is killed twice and resumed: its goodput ledger and its report page have all attempts."""

import math
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import runs
from pages import Read

from jaxtrain import goodput
from jaxtrain.report import page
from jaxtrain.report.run import read

STEPS = 120
OVERRIDES = {"train__steps": STEPS, "log__peak_tflops": 0.1, "sample__max_tokens": 8}
OVERRIDES |= {"checkpoint__every_steps": 30, "eval__every_steps": 20}


def unsaved(workdir: Path) -> bool:
    """Return whether the ledger has steps after the newest checkpoint, which a kill would lose."""
    saved = runs.steps(workdir)
    told = [x["step"] or 0 for x in goodput.read(workdir / goodput.FILE) if x["kind"] == "spent"]
    return bool(saved) and max(told, default=0) > max(saved)


class Killed(NamedTuple):
    """A finished run of three attempts. wall_s, downs_s: seconds in all and between attempts, by the test's clock."""

    workdir: Path
    wall_s: float
    downs_s: float
    said: str


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    config, workdir = folder / "small.py", folder / "run"
    config.write_text(runs.SMALL)
    overrides = OVERRIDES | {"paths__cache": folder / "compiled"}
    began, downs = time.time(), 0.0
    child = runs.Child(config, workdir, folder / "words0", **overrides)
    for attempt, least in enumerate((35, 65), start=1):
        child.until(lambda least=least: len(runs.losses(workdir)) >= least and unsaved(workdir))
        child.process.kill()
        child.process.wait()
        at = time.time()
        child = runs.Child(config, workdir, folder / f"words{attempt}", **overrides)
        downs += time.time() - at
    child.until(lambda: "\ngoodput" in child.said)  # this line comes when the ledger is closed
    wall = time.time() - began
    code, said = child.end()
    assert code == 0, said
    return Killed(workdir, wall, downs, said)


def test_the_parts_are_the_wall_time(killed: Killed):
    """The times of all causes in the ledger add up to the wall time by the test's own clock."""
    found = goodput.summarise(goodput.read(killed.workdir / goodput.FILE))
    assert sum(found.parts.values()) == pytest.approx(killed.wall_s, rel=0.01)
    assert found.attempts == 3 and found.steps == STEPS and found.steps_repeated >= 1
    assert min(found.parts[name] for name in ("step", "startup", "compile", "restore", "data", "save", "eval", "repeated")) > 0
    assert found.parts["down"] >= killed.downs_s - 0.5
    assert f"{goodput.words(found)}" in killed.said.splitlines()
    told = runs.receipt(killed.workdir)["goodput"]
    assert told["attempts"] == 3 and math.isclose(sum(told["parts_s"].values()), told["wall_s"], abs_tol=0.02)
    assert told["wall_s"] == pytest.approx(killed.wall_s, rel=0.01)


def test_the_page_tells_of_every_attempt(killed: Killed):
    words = " ".join(Read(page.html([read(killed.workdir)])).words)
    assert f"done: {STEPS} steps" in words and "killed: the receipt has no end" in words
    found = goodput.summarise(goodput.read(killed.workdir / goodput.FILE))
    for cause, seconds in found.parts.items():
        assert (f"{seconds:,.1f}" in words) or not seconds, cause
