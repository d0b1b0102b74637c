"""Flipped bits and missing parts in every kind of checkpoint file: a restore returns the saved tensors or refuses."""

import shutil
from pathlib import Path

import jax
import pytest
import runs
from faults import Faults, Figures, dice, same, steps_written

from jaxtrain.checkpoint import CheckpointError, Checkpoints, files
from jaxtrain.checkpoint.__main__ import main as command

COUNTS = {False: (16, 8), True: (60, 20)}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    made = Faults(tmp_path_factory.mktemp("damage"), train__steps=10)
    assert made.in_process(made.folder / "run") == 0
    return made


def restored(folder: Path) -> dict | None:
    """Return the tensors of step 10 as a run restores them; None if the restore raises CheckpointError."""
    found = Checkpoints(folder)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    try:
        stored = {k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one) for k, a in found.stored(10).items()}
        return {k: jax.device_get(a) for k, a in found.restore(10, stored).items()}
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


def test_nothing_damaged_loads_as_if_it_were_good(faults: Faults, whole: bool, figures: Figures, tmp_path: Path) -> None:
    good = faults.folder / "run/checkpoints"
    truth = runs.tensors(faults.folder / "run", 10)
    there = [*files.listed(good / "10"), files.NAME]
    data = [name for name in there if "/d/" in name]
    rng, counts = dice("damage"), {"refused": 0, "harmless": 0, "in_files_of_arrays": 0, "found_by_verify": 0}
    flips, cuts = COUNTS[whole]
    for i in range(flips + cuts):
        folder = tmp_path / f"{i}" / "checkpoints"
        shutil.copytree(good, folder)
        # Every file is damaged in turn. Files of arrays are damaged half of the time.
        name = rng.choice(data) if i % 2 else there[(i // 2) % len(there)]
        what = (flip if i < flips else cut)(folder / "10" / name, rng)
        got = restored(folder)
        if got is None:
            counts["refused"] += 1
        else:
            assert same(got, truth), f"loaded silently wrong: {what} in {name}"
            counts["harmless"] += 1
        counts["in_files_of_arrays"] += name in data
        found = command(["verify", str(folder), "--step=10"]) == 1
        counts["found_by_verify"] += found
        # If the list of digests is gone, verify reports that, and only a restore proves the arrays.
        assert found or name == files.NAME, f"verify found nothing: {what} in {name}"
        shutil.rmtree(folder.parent)
    figures.add("damage", flips=flips, truncations_and_deletions=cuts, **counts)


@pytest.mark.parametrize("how", ["flip", *(pytest.param(how, marks=pytest.mark.more) for how in ("cut", "meta", "manifest"))])
def test_training_falls_back_and_finishes(faults: Faults, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(faults.folder / "run", workdir)
    step = workdir / "checkpoints/10"
    rng = dice(how)
    if how in ("flip", "cut"):
        # Files of arrays also hold data that later writes of the same save replaced.
        while restored(workdir / "checkpoints") is not None:
            (flip if how == "flip" else cut)(rng.choice(sorted(step.rglob("d/*"))), rng)
    else:
        (step / {"meta": "meta.json", "manifest": "arrays/state/manifest.ocdbt"}[how]).unlink()
    assert faults.in_process(workdir, train__steps=12) == 0
    said = capsys.readouterr().out
    assert "passing over damaged checkpoints, going on from step 5: 10 moved to" in said
    assert steps_written(workdir) == 12
    whole = tmp_path / "whole"
    assert faults.in_process(whole, train__steps=12) == 0
    assert same(runs.tensors(workdir, 12), runs.tensors(whole, 12))
