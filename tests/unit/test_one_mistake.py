"""One mistake gives one problem: its consequences, and the same mistake in a second file, are left out."""

import shutil
from pathlib import Path

import pytest

from jaxtrain import launch
from jaxtrain.data import prepare
from jaxtrain.hardware import Devices
from jaxtrain.validate import validate

TINY = f"--config={Path(__file__).resolve().parents[2]}/configs/tiny.py"
EIGHT_CPUS = Devices("cpu", "cpu", 8, 4.0, "test")


def problems(*settings: str) -> list[str]:
    loaded = launch.load([TINY, *(f"--config.{setting}" for setting in settings)])
    return [str(p) for p in (*loaded.problems, *validate(loaded.run, EIGHT_CPUS, Path("runs/none")))]


@pytest.mark.parametrize(
    ("setting", "start"),
    [
        ("mesh.fsdp=3", "mesh = 'data=-1 x fsdp=3 x tensor=1 x seq=1': the product of the fixed sizes is 3, but the run has 8"),
        ("mesh.tensor=5", "mesh = 'data=-1 x fsdp=-1 x tensor=5 x seq=1': the product of the fixed sizes is 5"),
        ("optimizer.lr=-1", "optimizer.lr = -1.0: must be at least 0"),
    ],
)
def test_consequences_are_left_out(setting, start):
    (line,) = problems(setting)
    assert line.startswith(start)


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """text.tok and text.val.tok, of bytes, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a text of some length. " * 400)
    prepare.prepare([str(tmp_path / "in.txt")], tmp_path / "text.tok")
    shutil.copy(tmp_path / "text.tok", tmp_path / "text.val.tok")
    return tmp_path


BOTH = ("data.source=text.tok", "data.eval_source=text.val.tok")


@pytest.mark.parametrize(
    ("settings", "start", "remedy"),
    [
        ((*BOTH, "model.vocab_size=8"), "model.vocab_size = 8: must be above ", "or more."),
        (
            (*BOTH, "data.seq_len=65536"),
            "data.seq_len = 65536: text.tok has ",
            "Choose another length, more data, or data.packing=best_fit, which pads a short sequence.",
        ),
        (
            (*BOTH, "data.tokenizer=gone/tokenizer.json"),
            "data.tokenizer = 'gone/tokenizer.json': no such file",
            "Name byte, the path of a tokenizer.json, or hf:NAME.",
        ),
        (("data.source=txt.tok", BOTH[1]), "data.source = 'txt.tok': no such file", "Did you mean text.tok?"),
        (("data.source=text.tk", BOTH[1]), "data.source = 'text.tk': no such file", "Did you mean text.tok?"),
        ((BOTH[0], "data.eval_source=txt.val.tok"), "data.eval_source = 'txt.val.tok'", "Did you mean text.val.tok?"),
        (("data.source=syntetic", BOTH[1]), "data.source = 'syntetic'", "Did you mean synthetic?"),
    ],
)
def test_a_mistake_in_data_is_one_problem(files, settings, start, remedy):
    (line,) = problems(*settings)
    assert line.startswith(start) and line.endswith(remedy)


def test_the_recipe_for_data_is_printed_once(files):
    first, second = problems("data.source=corpus/web.tok", "data.eval_source=corpus/web.val.tok")
    assert first.startswith("data.source = 'corpus/web.tok': no such file. Two commands make it") and "prepare" in first
    assert second == "data.eval_source = 'corpus/web.val.tok': no such file. The same two commands make it."


def test_a_held_out_file_is_not_answered_with_the_one_that_is_learnt(files):
    (files / "text.val.tok").unlink()
    (line,) = problems(*BOTH)
    assert "Did you mean" not in line and "prepare" in line
