"""Step folders without their tensors: which step a run restores, which steps are damaged, and the commands' messages."""

import json
import shutil
from pathlib import Path

import pytest
from saved import killed_after, write_step

from jaxtrain import checkpoint
from jaxtrain.checkpoint import CheckpointError, Checkpoints, Damaged, files
from jaxtrain.commands.checkpoint import main


@pytest.fixture
def steps(tmp_path: Path) -> Checkpoints:
    """Write three complete steps."""
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    return Checkpoints(tmp_path)


def test_states_of_step_folders(steps: Checkpoints, tmp_path: Path):
    (tmp_path / "7").mkdir()
    (tmp_path / "07").mkdir()
    (tmp_path / "2/meta.json").unlink()
    shutil.rmtree(tmp_path / "3/arrays")
    assert steps.states() == {1: "complete", 2: "damaged", 3: "damaged", 7: "unfinished"} and steps.steps() == [1]
    assert not (tmp_path / "none").exists() and Checkpoints(tmp_path / "none").latest() is None
    assert not (tmp_path / "none").exists(), "opening writes nothing"
    with pytest.raises(ValueError, match="checkpoint.keep"):
        Checkpoints(tmp_path, keep=0)


def test_a_sweep_removes_what_saves_left_and_nothing_else(steps: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A sweep removes interrupted saves and an interrupted deletion. It leaves a damaged step and files of the user."""
    (tmp_path / "1/arrays").rename(tmp_path / "1/arrays.orbax-checkpoint-tmp")
    (tmp_path / "1" / files.NAME).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: next(p for p in Path(path).rglob("*") if p.is_file()).unlink())
        steps.storage.delete(3)
    (tmp_path / "2/arrays/commit_success.txt").unlink()
    for name in ("7/notes.txt", "9/meta.json.partial", "keep/a"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    assert steps.states() == {1: "unfinished", 2: "damaged", 3: "unfinished", 7: "unfinished", 9: "unfinished"}
    steps.storage.sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "7", "keep"]


@pytest.mark.parametrize("more", [(), ("meta.json",)])
def test_a_sweep_leaves_a_copy_that_is_under_way(steps: Checkpoints, tmp_path: Path, more: tuple[str, ...]):
    """A sweep leaves a step without its marker files: a user may copy these last, while a run saves to the folder."""
    names = ("arrays/commit_success.txt", files.NAME, *more)
    later = {tmp_path / "2" / name: (tmp_path / "2" / name).read_bytes() for name in names}
    for path in later:
        path.unlink()
    assert steps.states()[2] == steps.storage.state(2) == "damaged"
    steps.storage.sweep()
    for path, data in later.items():
        path.write_bytes(data)
    assert steps.steps() == [1, 2, 3] and files.check_files(steps.directory / "2").problems == ()


def test_a_deletion_killed_between_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After an interrupted deletion, the step is complete, or the next sweep removes it."""
    for changes, states in enumerate([{1: "complete"}, {1: "complete"}, {1: "unfinished"}, {}]):
        folder = tmp_path / str(changes)
        write_step(folder, 1)
        found = Checkpoints(folder)
        killed_after(monkeypatch, folder / "1", changes, lambda found=found: found.storage.delete(1))
        assert found.states() == states
        found.storage.sweep()
        assert found.steps() == [step for step, state in states.items() if state == "complete"]
        assert found.steps() or not list(folder.iterdir())


WRONG = {  # text of meta.json -> a word of the error
    '{"loss": 1': "",
    "{}": "",
    '{"format": 99}': "format 99",
    '{"format": 2, "data": {"mixture": {"sources": [], "parts": []}}}': "format 2",
    "another step": "seal",
    "": "",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_run_never_starts_afresh_over_what_cannot_be_read(steps: Checkpoints, tmp_path: Path, text: str):
    """The error about a damaged step names the setting that restores the previous step, even if a later step is complete."""
    meta = tmp_path / "2/meta.json"
    shutil.move(tmp_path / "3", tmp_path / "later")
    if text:
        meta.write_text(meta.read_text().replace('"step": 2', '"step": 3') if text == "another step" else text)
    else:
        meta.unlink()
    error = rf"meta\.json(.|\n)*{WRONG[text]}(.|\n)*--config\.checkpoint\.step=1 "
    with pytest.raises(CheckpointError, match=error):
        steps.latest()
    shutil.move(tmp_path / "later", tmp_path / "3")
    assert steps.latest() == 3
    with pytest.raises(CheckpointError, match=error):
        steps.meta(2)


def test_the_newest_readable_step(steps: Checkpoints, tmp_path: Path):
    assert steps.latest() == 3
    (tmp_path / "3/meta.json").write_text("{}")
    passed = {2: "its arrays"}
    assert steps.latest(passed) == 1 and passed.keys() == {2, 3}
    with pytest.raises(CheckpointError, match=r"3: (.|\n)*2: its arrays(.|\n)*1: too"):
        steps.latest({1: "too", 2: "its arrays"})


def test_set_aside_moves_and_deletes_nothing(steps: Checkpoints, tmp_path: Path):
    with pytest.raises(CheckpointError, match="1, 2, 3"):
        steps.set_aside(4)
    note = steps.set_aside(1)
    [aside] = tmp_path.glob("set_aside-*")
    assert "2, 3" in note and str(aside) in note and steps.steps() == [1]
    assert Checkpoints(aside).steps() == [2, 3] and files.check_files(aside / "3").problems == ()
    assert steps.set_aside(1) == ""


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 4
    path.write_bytes(data)


DAMAGE = {"flipped": flip, "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]), "deleted": Path.unlink}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["arrays/d/0", "meta.json"])
def test_verify_names_the_file_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, name: str):
    for step in (1, 2):
        write_step(tmp_path / "checkpoints", step)
    assert main(["verify", str(tmp_path)]) == 0
    DAMAGE[how](tmp_path / "checkpoints/2" / name)
    assert main(["verify", str(tmp_path)]) == 1 and main(["verify", str(tmp_path), "--step=1"]) == 0
    out = capsys.readouterr().out
    assert "step 1: good" in out and "step 2: DAMAGED" in out and f"{name}: " in out


def test_verify_without_digests_proves_nothing(steps: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "2" / files.NAME).unlink()
    flip(tmp_path / "3" / files.NAME)
    assert main(["verify", str(tmp_path), "--step=2"]) == 0 and "good" not in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 1 and f"{files.NAME}: " in capsys.readouterr().out
    assert main(["verify", str(tmp_path), "--step=9"]) == 2


def test_list_shows_every_step(steps: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "6").mkdir()
    (tmp_path / "3/meta.json").unlink()
    assert main(["list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("1.0000", "0.5000", "complete", "damaged", "unfinished"))


def test_locate_takes_a_run_its_checkpoints_or_a_step(tmp_path: Path):
    there = tmp_path / "run/checkpoints"
    for step in (1, 2):
        write_step(there, step)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"checkpoint": {"dir": str(there)}}))
    meant = {"run": 2, "run/checkpoints": 2, "run/checkpoints/1": 1, "run/checkpoints/1/": 1, "other": 2}
    for path, step in meant.items():
        found, at = checkpoint.locate_checkpoint(f"{tmp_path}/{path}")
        assert at == step and str(found.directory) == str(there)
    for path in (tmp_path / "nothing", tmp_path / "empty", there / "3", "az://bucket/run"):
        with pytest.raises(CheckpointError):
            checkpoint.locate_checkpoint(path)
    (there / "2/meta.json").unlink()
    with pytest.raises(Damaged):
        checkpoint.locate_checkpoint(tmp_path / "run")
