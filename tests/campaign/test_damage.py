"""Flipped bits and missing parts in every kind of checkpoint file: a restore returns the saved tensors or refuses.

tests/proofs/test_resume.py has a run that falls back to an older step.
"""

import shutil
from pathlib import Path

import runs
from faults import Faults, dice, same

from jaxtrain.checkpoint import CheckpointError, files
from jaxtrain.commands.checkpoint import main as command

FLIPS, CUTS = 60, 20


def restored(folder: Path) -> dict | None:
    """Return the tensors of step 10; None if they are refused."""
    try:
        return runs.tensors_in(folder, 10)
    except CheckpointError:
        return None


def flip(path: Path, rng) -> str:  # noqa: ANN001
    data = bytearray(path.read_bytes()) or bytearray(1)  # an empty file gets a byte
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {path.name}"


def cut(path: Path, rng) -> str:  # noqa: ANN001
    if rng.random() < 0.4 or not path.stat().st_size:
        path.unlink()
        return f"{path.name} deleted"
    size = rng.randrange(path.stat().st_size)
    path.write_bytes(path.read_bytes()[:size])
    return f"{path.name} cut to {size} bytes"


def test_nothing_damaged_loads_as_if_it_were_good(tmp_path: Path) -> None:
    faults = Faults(tmp_path, train__steps=10)
    assert faults.in_process(faults.folder / "run") == 0
    good = faults.folder / "run/checkpoints"
    truth = runs.tensors(faults.folder / "run", 10)
    there = [*files.list_step_files(good / "10"), files.NAME]
    data = [name for name in there if "/d/" in name]
    rng, refused = dice("damage"), 0
    for i in range(FLIPS + CUTS):
        folder = tmp_path / f"{i}" / "checkpoints"
        shutil.copytree(good, folder)
        # Every file is damaged in turn. Files of arrays are damaged half of the time.
        name = rng.choice(data) if i % 2 else there[(i // 2) % len(there)]
        what = (flip if i < FLIPS else cut)(folder / "10" / name, rng)
        got = restored(folder)
        refused += got is None
        assert got is None or same(got, truth), f"loaded silently wrong: {what} in {name}"
        found = command(["verify", str(folder), "--step=10"]) == 1
        # If the list of digests is gone, verify reports that, and only a restore proves the arrays.
        assert found or name == files.NAME, f"verify found nothing: {what} in {name}"
        shutil.rmtree(folder.parent)
    assert refused
