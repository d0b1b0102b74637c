"""One real run that is killed twice, resumed and followed meanwhile: its ledger, its page, and what its follower said."""

import contextlib
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import runs
from made_runs import ended, fake, gpu, line
from pages import Read

from jaxtrain import goodput, metrics
from jaxtrain.report import page
from jaxtrain.report.run import read

STEPS = 120
OVERRIDES = {"train__steps": STEPS, "log__peak_tflops": 0.1, "sample__max_tokens": 8}
OVERRIDES |= {"checkpoint__every_steps": 30, "eval__every_steps": 20}


def unsaved(workdir: Path) -> bool:
    """Whether the ledger tells of steps after the newest checkpoint: a kill costs them."""
    saved = runs.steps(workdir)
    told = [x["step"] or 0 for x in goodput.read(workdir / goodput.FILE) if x["kind"] == "spent"]
    return bool(saved) and max(told, default=0) > max(saved)


@contextlib.contextmanager
def follower(folder: Path, words: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`report --follow` of a run; what it says goes to a file."""
    with open(words, "wb") as out:
        line = [sys.executable, "-m", "jaxtrain.report", str(folder), "--follow"]
        child = subprocess.Popen(line, cwd=runs.REPO, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def wait_for(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + 300
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.02)


class Killed(NamedTuple):
    """The run: its folder; seconds by the test's own clock, whole and between attempts; what it and its follower said."""

    workdir: Path
    wall_s: float
    downs_s: float
    said: str
    followed: str
    followers_code: int


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    folder = tmp_path_factory.mktemp("killed")
    config, workdir, words = folder / "small.py", folder / "run", folder / "followed.txt"
    config.write_text(runs.SMALL)
    overrides = OVERRIDES | {"paths__cache": folder / "compiled"}
    began, downs = time.time(), 0.0
    with contextlib.ExitStack() as stack:
        child = runs.Child(config, workdir, folder / "words0", **overrides)
        for attempt, least in enumerate((35, 65), start=1):
            child.until(lambda least=least: len(runs.losses(workdir)) >= least and unsaved(workdir))
            child.process.send_signal(signal.SIGSTOP)  # until the follower has looked
            if attempt == 1:
                watching = stack.enter_context(follower(workdir, words))
                wait_for(lambda: words.stat().st_size > 0)
            child.process.kill()
            child.process.wait()
            at = time.time()
            child = runs.Child(config, workdir, folder / f"words{attempt}", **overrides)
            downs += time.time() - at
        child.until(lambda: "\ngoodput" in child.said)  # with this line the account is closed
        wall = time.time() - began
        code, said = child.end()
        assert code == 0, said
        followers_code = watching.wait(300)
    yield Killed(workdir, wall, downs, said, words.read_text(), followers_code)


def test_the_parts_are_the_wall_time(killed: Killed):
    """This test's own clock is the judge."""
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
    assert f"done: {STEPS} steps done" in words and "killed: no end was written" in words
    found = goodput.summarise(goodput.read(killed.workdir / goodput.FILE))
    for cause, seconds in found.parts.items():
        assert (f"{seconds:,.1f}" in words) or not seconds, cause


def test_it_is_followed_through_kills_to_its_end(killed: Killed):
    lines = killed.followed.splitlines()
    assert killed.followers_code == 0, killed.followed
    resumed = runs.receipt(killed.workdir)["resumed_from_step"]
    again = [i for i, text in enumerate(lines) if text == f"the run goes on from step {resumed}"]
    assert again
    losses = runs.losses(killed.workdir)
    after = [text for text in lines[again[-1] :] if re.match(rf"step \d+/{STEPS}  loss", text)]
    for text in after:  # what is said of a step is what metrics.jsonl has
        step, value = re.findall(r"step (\d+)/\d+  loss ([\d.]+)", text)[0]
        assert value == f"{losses[int(step)]:.4f}"
    assert after[-1].startswith(f"step {STEPS}/{STEPS}")
    held_out = [x for x in runs.lines(killed.workdir) if x["kind"] == "eval" and x["step"] > 100]
    assert any(f"held-out loss {x['loss']:.4f}" in killed.followed for x in held_out)
    assert lines[-1] == f"done: {STEPS} steps done"


def test_ctrl_c_ends_the_following_and_not_the_run(tmp_path: Path):
    folder = fake(tmp_path / "run", [line(1)], receipt__json=ended(None))
    with follower(folder, tmp_path / "said.txt") as child:
        wait_for(lambda: b"step 1" in (tmp_path / "said.txt").read_bytes())
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
    said = (tmp_path / "said.txt").read_text()
    assert "Ctrl-C" in said and "Traceback" not in said


def test_off_a_terminal_each_new_line_is_a_line(tmp_path: Path):
    folder = fake(tmp_path / "run", [line(s, loss=9.0) for s in (1, 2, 3)], receipt__json=ended(None))
    said = tmp_path / "said.txt"
    with follower(folder, said) as child:
        wait_for(lambda: b"step 3" in said.read_bytes())
        with open(folder / "metrics.jsonl", "a") as file:
            for step in (4, 5):
                file.write(metrics.encode(line(step, loss=8.0)) + "\n" + metrics.encode(gpu(step, 0)) + "\n")
        (folder / "receipt.json").write_text(ended(0, "5 steps done"))
        assert child.wait(60) == 0
    told = said.read_text().splitlines()
    parts = [text.split("  ")[:2] for text in told[:-1]]
    assert parts == [["step 3", "loss 9.0000"], ["step 4", "loss 8.0000"], ["step 5", "loss 8.0000"]]
    assert told[-1] == "done: 5 steps done"
