"""A disk that fills up during a run, or is full at its start (a small file system in memory)."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
from faults import Faults, same, steps_written

from jaxtrain.commands.checkpoint import main as command

SIZE = 3 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 3 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"needs the right to mount: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def free(place: Path) -> int:
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize


def test_a_disk_that_fills_up_in_a_save(disk: Path, tmp_path: Path) -> None:
    """A save fails midway, training continues, and a later save succeeds.

    The disk has space for the checkpoint's tensors, but not for the overhead of the files. The check before a save counts only
    tensors.
    """
    faults = Faults(tmp_path, checkpoint__keep=2, checkpoint__every_steps=40, train__steps=4000, log__every_steps=5)
    workdir = tmp_path / "run"
    child = faults.start(workdir, checkpoint__dir=disk / "checkpoints")
    child.until(lambda: "checkpoint 40:" in child.said)
    size = runs.Checkpoints(disk / "checkpoints").meta(40)["bytes"]
    with open(disk / "ballast", "wb") as ballast:
        ballast.write(bytes(free(disk) - size - 4096 - 4096))
    child.until(lambda: "No space left on device" in child.said or "are free there" in child.said)
    failed_at = steps_written(workdir)
    assert command(["verify", str(disk / "checkpoints")]) == 0, "earlier steps are as they were"
    left = [p.name for p in (disk / "checkpoints").iterdir()]
    assert "mid-save" and all(name.isdigit() for name in left), left
    (disk / "ballast").unlink()
    mark = len(child.said)
    child.until(lambda: "checkpoint " in child.said[mark:] and " GB/s" in child.said[mark:])
    child.process.terminate()
    code, said = child.end()
    assert code == 75, said
    assert steps_written(workdir) > failed_at, "training went on"
    assert "No space left on device" in said, "it failed in the middle, and not before"
    last = max(runs.Checkpoints(disk / "checkpoints").steps())
    whole = tmp_path / "whole"
    assert faults.start(whole, train__steps=last, checkpoint__every_steps=0).end()[0] == 0
    assert same(runs.tensors_in(disk / "checkpoints", last), runs.tensors(whole, last)), "failed saves change nothing"


def test_a_disk_that_stays_full_ends_the_run(disk: Path, tmp_path: Path) -> None:
    faults = Faults(tmp_path, train__steps=100_000)
    child = faults.start(tmp_path / "run", checkpoint__dir=disk / "checkpoints")
    child.until(lambda: "checkpoint 5:" in child.said)
    with open(disk / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        ballast.write(bytes(max(0, free(disk) - 8192)))  # fails if the run's own saves fill the disk first
    code, said = child.end()
    assert code == 1, said
    assert f'File "{runs.REPO / "jaxtrain"}' not in said, "no traceback of ours"
    assert command(["verify", str(disk / "checkpoints")]) == 0


def fill(place: Path, left: int) -> Path:
    """Write a file that leaves so many bytes of the disk free, and return it."""
    with open(place / "ballast", "wb") as ballast:
        ballast.write(bytes(free(place) - left))
    return place / "ballast"


OURS = f'File "{runs.REPO / "jaxtrain"}'  # in a traceback


def test_a_full_disk_is_refused_before_the_run(disk: Path, tmp_path: Path) -> None:
    """A disk without room for the run's own files, or for one checkpoint, is named, and nothing is written there."""
    faults = Faults(tmp_path, train__steps=10)
    assert faults.start(tmp_path / "first", checkpoint__keep=1).end()[0] == 0
    size = runs.Checkpoints(tmp_path / "first" / "checkpoints").meta(10)["bytes"]
    ballast = fill(disk, 16 << 10)
    code, said = faults.start(disk / "run").end()
    assert code == 2 and str(disk / "run") in said and OURS not in said, said
    ballast.unlink()
    ballast = fill(disk, size - 8192)
    elsewhere: dict[str, Any] = {"checkpoint__dir": disk / "checkpoints"}
    code, said = faults.start(tmp_path / "run", **elsewhere).end()
    assert code == 2 and str(disk / "checkpoints") in said and OURS not in said, said
    assert [p.name for p in disk.iterdir()] == [ballast.name] and not (tmp_path / "run").exists()
    ballast.unlink()
    assert faults.start(tmp_path / "run", **elsewhere).end()[0] == 0
    assert same(runs.tensors_in(disk / "checkpoints", 10), runs.tensors(tmp_path / "first", 10))


def test_a_resume_needs_room_for_one_more_checkpoint(disk: Path, tmp_path: Path) -> None:
    """The old checkpoint is deleted after the next save. The remains of a killed save are deleted before it, and so count."""
    faults = Faults(tmp_path, checkpoint__keep=1, checkpoint__dir=disk / "checkpoints", checkpoint__every_steps=0)
    workdir = tmp_path / "run"
    assert faults.start(workdir, train__steps=5).end()[0] == 0
    size = runs.Checkpoints(disk / "checkpoints").meta(5)["bytes"]
    before = runs.tree(workdir)
    ballast = fill(disk, size // 2)
    assert faults.start(workdir, train__steps=10).end()[0] == 2
    assert runs.tree(workdir) == before
    assert faults.start(workdir, train__steps=5).end()[0] == 0, "no step is left, so nothing is saved"
    ballast.unlink()
    remains = disk / "checkpoints" / "7" / "arrays.orbax-checkpoint-tmp"
    remains.mkdir(parents=True)
    (remains / "data").write_bytes(bytes(size))
    fill(disk, size - 8192)
    code, said = faults.start(workdir, train__steps=10).end()
    assert code == 0, said
    assert runs.Checkpoints(disk / "checkpoints").steps() == [10]


def test_the_disk_of_metrics_fills_up(disk: Path, tmp_path: Path) -> None:
    """The run ends with the file's name, and goes on from its newest checkpoint when there is room again."""
    faults = Faults(tmp_path, train__steps=4000, checkpoint__dir=tmp_path / "checkpoints", checkpoint__keep=2)
    child = faults.start(disk / "run")
    child.until(lambda: "checkpoint 5:" in child.said)
    ballast = fill(disk, 4096)
    code, said = child.end()
    assert code == 1 and str(disk / "run") in said and OURS not in said and "Traceback" not in said, said
    ballast.unlink()
    newest = max(runs.Checkpoints(tmp_path / "checkpoints").steps())
    assert newest >= 5
    last = newest + 5
    assert faults.start(disk / "run", train__steps=last).end()[0] == 0
    assert faults.start(tmp_path / "whole", train__steps=last, checkpoint__dir="", checkpoint__every_steps=0).end()[0] == 0
    assert runs.losses(disk / "run") == runs.losses(tmp_path / "whole")


@pytest.mark.parametrize("stopped", [False, True])
def test_there_is_no_checkpoint_to_go_on_from(disk: Path, tmp_path: Path, stopped: bool) -> None:
    """The tensors fit, and their files do not. Nobody is told that a checkpoint is left."""
    faults = Faults(tmp_path, train__steps=10, checkpoint__every_steps=0)
    assert faults.start(tmp_path / "first").end()[0] == 0
    size = runs.Checkpoints(tmp_path / "first" / "checkpoints").meta(10)["bytes"]
    fill(disk, size + 8192)
    steps = 100_000 if stopped else 10
    child = faults.start(tmp_path / "run", checkpoint__dir=disk / "checkpoints", train__steps=steps)
    if stopped:
        child.until(lambda: steps_written(tmp_path / "run") > 3)
        child.process.terminate()
    code, said = child.end()
    assert code == (75 if stopped else 1) and OURS not in said, said
    assert "intact" not in said and "nothing to save" not in said and "no checkpoint" in said
    assert not runs.Checkpoints(disk / "checkpoints").steps()
