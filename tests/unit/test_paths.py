"""Paths with the characters that separate lists: a file that exists under the whole text is that file."""

import shutil
from pathlib import Path

import pytest

from jaxtrain.commands import api
from jaxtrain.config.schema import Data, Problem, parse_arg, split_paths
from jaxtrain.data import documents, loading, mixture, opening, prepare

SWEEP = ("bs=16,wd=0/x.tok", "lr=3e-4/x.tok", "a;b/x.tok", "m:n/x.tok", "lr=3e-4/x", "a.tok=0.5", "plain.tok")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "in.txt").write_text("a text of some length. " * 400)
    prepare.prepare_corpus([str(folder / "in.txt")], folder / "made.tok")
    for name in SWEEP:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "made.tok", folder / name)
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def problems(source: str, held_out: str = "") -> list[Problem]:
    data = Data(source=source, eval_source=held_out, seq_len=16)
    return opening.check_data(data, 264, bool(held_out))


@pytest.mark.parametrize("name", SWEEP)
def test_a_token_file_may_have_any_name(folder: Path, name: str):
    for path in (name, str(folder / name)):
        assert problems(path, path) == []
        assert mixture.parse_files(f"{path}=0.25,plain.tok=0.75" if name != "plain.tok" else f"{path}=1")[0][0].path == path
        assert problems("plain.tok", f"one={path};two=made.tok") == []
        assert opening.parse_sets(f"one={path};two=made.tok") == ({"one": path, "two": "made.tok"}, [])


def test_files_with_and_without_weights_keep_them(folder: Path):
    files, wrong = mixture.parse_files("bs=16,wd=0/x.tok=0.5, plain.tok=0.25,lr=3e-4/x=0.25")
    assert not wrong and [(f.path, f.weight) for f in files] == [
        ("bs=16,wd=0/x.tok", 0.5),
        ("plain.tok", 0.25),
        ("lr=3e-4/x", 0.25),
    ]
    both = "lr=3e-4/x.tok,bs=16,wd=0/x.tok"
    assert opening.parse_sets(both) == ({"": both}, []) and opening.parse_sets(f"a={both}") == ({"a": both}, [])
    files, wrong = mixture.parse_files("plain.tok,bs=16,wd=0/x.tok")
    assert not wrong and [(f.path, f.weight) for f in files] == [("plain.tok", None), ("bs=16,wd=0/x.tok", None)]


@pytest.mark.parametrize("name", ["bs=16,wd=0/y.tok", "bs=16,wd=0/x.tk", "runs/a,b/x.tok", "lr=1e-3,wd=0.1,bs=8/x.tok"])
def test_a_path_that_does_not_exist_is_one_problem_that_names_it(folder: Path, name: str):
    assert [(p.key, p.value) for p in problems(name)] == [("data.source", name)]
    (problem,) = problems("plain.tok", "lr=3e-4/y.tok")
    assert (problem.key, problem.value) == ("data.eval_source", "lr=3e-4/y.tok") and "--output=lr=3e-4/y.tok" in problem.remedy
    (problem,) = problems("plain.tok", "plain.tok,lr=3e-4/y.tok")
    assert problem.value == "lr=3e-4/y.tok"
    (problem,) = problems("plain.tok", "web=gone.tok")
    assert problem.value == "gone.tok" and "--output=gone.tok" in problem.remedy
    (problem,) = problems("plain.tok", "lr=3e-4/x.tk")
    assert "lr=3e-4/x.tok" in problem.remedy  # the file that is there


def test_a_variant_may_hold_a_path_with_commas(folder: Path):
    for path in ("bs=16,wd=0", "bs=16,wd=0/x.tok", str(folder / "bs=16,wd=0"), "none", "hf:a/b"):
        for text in (f"base={path},lora=8", f"lora=8,base={path}"):
            found = parse_arg(text, base="", lora=0)
            assert (found.base, found.lora) == (path, 8)
    for wrong, key in (
        ("base=/x/a,b,c", "base=/x/a,b,c"),
        ("lora=8,base=/x/a,b", "base=/x/a,b"),
        ("base=hf:a/b,lroa=8", "lroa=8"),
        ("base=made.tok,lroa=8", "lroa=8"),
    ):
        with pytest.raises(Exception, match="no such") as raised:
            parse_arg(wrong, base="", lora=0)
        (problem,) = raised.value.problems  # pyright: ignore[reportAttributeAccessIssue]
        assert problem.key == f"--config=FILE:{key}"


def test_a_config_of_the_current_folder_may_have_a_colon_in_its_name(folder: Path):
    text = "from jaxtrain.config import default_config as get_config\n"
    (folder / "tiny:x").mkdir(exist_ok=True)
    (folder / "tiny:x" / "c.py").write_text(text)
    assert api._config_path("tiny:x/c.py") == "tiny:x/c.py" and not loading.load_config(["--config=tiny:x/c.py"]).problems


def test_inputs_of_prepare_may_have_any_name(folder: Path):
    (folder / "lr=[1]*").mkdir(exist_ok=True)
    shutil.copy(folder / "in.txt", folder / "lr=[1]*" / "in.txt")
    assert prepare.find_inputs(["lr=[1]*/in.txt"]) == [Path("lr=[1]*/in.txt")]
    for missing in ("nothere/**", "nothere/*.txt", "*.nothing"):
        with pytest.raises(prepare.PrepareError, match="matches no file"):
            prepare.find_inputs([missing])
    assert documents.dataset_name("hf:m:n") == ("m:n", None, "train") and documents.dataset_name("hf:o:n")[:2] == ("o", "n")


def test_the_longest_path_that_exists_counts():
    there = {"a,b", "a,b,c", "d"}
    assert split_paths("a,b,c,d, a,b ,x,", ",", lambda text: text.strip() in there) == ["a,b,c", "d", "a,b", "x"]
