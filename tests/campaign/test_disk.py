"""A disk that fills up during a save, or stays full (a small file system in memory)."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs
from faults import Faults, same, steps_written

from jaxtrain.checkpoint.__main__ import main as command

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
