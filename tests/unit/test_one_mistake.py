"""One mistake gives one problem: its consequences are left out, and so is the same mistake in a second file."""

import shutil
from pathlib import Path

import pytest
from token_files import write_conversations

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
        ("sharding.rules.vocab=fsdp", "sharding.rules.vocab = 'fsdp': cannot be sharded over mesh axis 'fsdp'"),
    ],
)
def test_consequences_are_left_out(setting, start):
    (line,) = problems(setting)
    assert line.startswith(start)


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """Write token files of bytes (text, text.val, chat) and an own.json without settings into a new folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a text of some length. " * 400)
    prepare.prepare([str(tmp_path / "in.txt")], tmp_path / "text.tok")
    shutil.copy(tmp_path / "text.tok", tmp_path / "text.val.tok")
    (tmp_path / "own.json").write_text("{}")
    write_conversations(tmp_path / "chat.tok", [200] * 40)
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
        (
            ("data.source=text.tok text.val.tok", BOTH[1]),
            "data.source = 'text.tok text.val.tok'",
            "Write text.tok,text.val.tok.",
        ),
        (
            ("data.source=text.tok;text.val.tok", BOTH[1]),
            "data.source = 'text.tok;text.val.tok'",
            "Write text.tok,text.val.tok.",
        ),
        ((BOTH[0], "data.eval_source=text.tok text.val.tok"), "data.eval_source = ", "Write text.tok,text.val.tok."),
        (
            (BOTH[0], "data.eval_source=text.tok;b/x.val.tok"),
            "data.eval_source = 'text.tok;b/x.val.tok': text.tok is one of several held-out sets, and has no name",
            "Write text=text.tok;x=b/x.val.tok.",
        ),
        (
            ("data.source=in.txt", BOTH[1]),
            "data.source = 'in.txt': is no token file",
            "python -m jaxtrain.data prepare --input=in.txt --output=in.tok (with --chat for conversations).",
        ),
        (
            (*BOTH, "data.tokenizer=own.json"),
            "data.tokenizer = 'own.json': is not the tokenizer of text.tok: the file was made with 'byte'",
            "Prepare the text again with --tokenizer=own.json.",
        ),
        (
            ("data.tokenizer=own.json",),
            "data.tokenizer = 'own.json': the stdlib corpus is bytes",
            "prepare --tokenizer=own.json --input=FILE.jsonl --output=FILE.tok; or set data.tokenizer=byte.",
        ),
        (
            ("data.source=chat.tok", "eval.every_steps=0", "loss.name=dpo", "init.from=."),
            "data.source = 'chat.tok': holds no pairs",
            "prepare --preference --chat --input=PAIRS.jsonl --output=PAIRS.tok.",
        ),
    ],
)
def test_a_mistake_in_data_is_one_problem(files, settings, start, remedy):
    (line,) = problems(*settings)
    assert line.startswith(start) and line.endswith(remedy)


def test_the_recipe_for_data_is_printed_once(files):
    first, second = problems("data.source=corpus/web.tok", "data.eval_source=corpus/web.val.tok")
    assert first.startswith("data.source = 'corpus/web.tok': no such file. Two commands make it") and "prepare" in first
    assert second == "data.eval_source = 'corpus/web.val.tok': no such file. The same two commands make it."


@pytest.mark.parametrize("name", ["web.jsonl.gz", "web.jsonl", "web.txt.zst", "web"])
def test_the_recipe_for_data_names_a_token_file(files, name):
    (line,) = problems(f"data.source=corpus/{name}", BOTH[1])
    assert "no such file. Two commands make it" in line and line.endswith("--output=corpus/web.tok")


def test_a_folder_without_a_tokenizer_is_one_sentence(files):
    (files / "empty").mkdir()
    (line,) = problems(*BOTH, "data.tokenizer=empty")
    assert "cannot read empty/tokenizer.json: no such file. Give byte, the path of a tokenizer.json, or hf:NAME." in line
    assert ".." not in line


def test_a_tokenizer_that_may_not_be_read_is_one_problem(files):
    """The tokenizer's file name is too long to be opened, even by root. Root could read a file without permission."""
    (line,) = problems(*BOTH, f"data.tokenizer={'x' * 300}")
    assert line.startswith("data.tokenizer = 'xxx")


def test_a_held_out_file_is_not_answered_with_the_one_that_is_learnt(files):
    (files / "text.val.tok").unlink()
    (line,) = problems(*BOTH)
    assert "Did you mean" not in line and "prepare" in line
