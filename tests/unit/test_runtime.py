"""The supervisor's decisions: restarts and their pauses, exit codes, options."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.config import commands
from jaxtrain.runtime.supervisor import Exit, Supervisor, explain_exit, int_variable, pause_s, trains_on_cpu

REPO = Path(__file__).resolve().parents[2]


# ---- Restarts


def test_pauses_double_up_to_a_minute():
    assert [pause_s(1, row) for row in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [pause_s(first_s, 2) for first_s in (90, 0)] == [90, 0]


EXITS = {134: (75, "ABRT"), 138: (75, "USR1"), 129: (129, "HUP"), 137: (137, "KILL")}


@pytest.mark.parametrize("code", [0, 75, 76, 130, 255, *EXITS])
def test_the_meaning_of_an_exit_code(code: int):
    becomes, signal = EXITS.get(code, (code, ""))
    status, text = explain_exit(code)
    assert status == becomes and f"exit {code}" in text and signal in text


def test_gpus_that_the_user_hides():
    hidden = ({"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"})
    shown: tuple[dict[str, str], ...] = ({}, {"JAX_PLATFORMS": "cuda"}, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert all(map(trains_on_cpu, hidden)) and not any(map(trains_on_cpu, shown))


# ---- Options


def test_the_option_of_the_supervisor_is_taken_out_of_the_trainers():
    given = Supervisor(["--config=x.py", "a b", "--no-preflight", "", "--no-preflights"], {})
    assert given.arguments == ["--config=x.py", "a b", "", "--no-preflights"] and not given.preflight
    alone = Supervisor(["--process-id=1"], {})
    assert alone.preflight and alone.arguments == ["--process-id=1"]
    with pytest.raises(Exit, match=r"--no-preflight = 1: .* Fix: --no-preflight\.$") as end:
        Supervisor(["--no-preflight=1"], {})
    assert end.value.code == 2


@pytest.mark.parametrize("text", ["-1", "two", "9999999", " 1"])
def test_a_variable_that_is_no_number_is_refused(text: str):
    with pytest.raises(Exit, match=rf"^N = {text}: .* Fix: N=3\.$"):
        int_variable({"N": text}, "N", 3)


def test_numbers_in_variables():
    assert [int_variable(environ, "N", 3) for environ in ({}, {"N": ""}, {"N": "0"}, {"N": "010"})] == [3, 3, 0, 10]


# ---- The package


def test_the_supervisor_imports_the_standard_library_alone():
    """The supervisor runs beside every run, so it must start at once and stay small."""
    left, seen = ["jaxtrain.commands.supervise", "jaxtrain.runtime", "jaxtrain.commands"], set()
    while left:
        module = left.pop()
        seen.add(module)
        file = Path(str(importlib.util.find_spec(module).origin))  # pyright: ignore
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in sys.stdlib_module_names or name.startswith("jaxtrain.runtime."), f"{module}: {name}"
            left += [name for name in names if name.startswith("jaxtrain.") and name not in seen]
    assert "jaxtrain.runtime.supervisor" in seen


def test_files_for_any_python_have_the_syntax_of_3_8():
    for name in ("__init__.py", "config/commands.py"):
        ast.parse((REPO / "jaxtrain" / name).read_text(), feature_version=(3, 8))
    with pytest.raises(SyntaxError):
        ast.parse("match x:\n    case 1: pass\n", feature_version=(3, 8))


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "version_info", (3, 11, 2))
    source = compile(Path(jaxtrain.__file__).read_text(), jaxtrain.__file__, "exec")
    with pytest.raises(ImportError, match=r"3\.11\.2: .* 3\.12 .*\./run\.sh"):
        exec(source, {})
    monkeypatch.setattr(sys, "argv", ["-m", "--config=x.py"])  # the module's name while python -m looks it up
    with pytest.raises(SystemExit) as end:
        exec(source, {})
    assert end.value.code == 2 and "3.11.2" in capsys.readouterr().err


# ---- Commands


def test_the_table_names_the_modules_that_run():
    assert not [*(REPO / "jaxtrain").glob("*/**/__main__.py")]
    runs = {path.stem for path in (REPO / "jaxtrain" / "commands").glob("[a-z]*.py")} - {"api", "command", "supervise"}
    assert set(commands.command_table()) == {"main"} | runs


def test_commands_are_spelled_as_they_were_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = "Check it with: python -m jaxtrain data verify FILE"
    for prefix, line in ((None, "python -m jaxtrain "), ("./run.sh", "./run.sh ")):
        monkeypatch.delenv(commands.PREFIX, raising=False)
        if prefix:
            monkeypatch.setenv(commands.PREFIX, prefix)
        assert commands.to_run_sh(text) == text.replace("python -m jaxtrain ", line)
        assert commands.main([]) == 0 and f"\n  {line}main " in capsys.readouterr().out
    assert commands.main(["configs/a.py"]) == 2 and capsys.readouterr().err.endswith("./run.sh --config=configs/a.py.\n")


@pytest.mark.parametrize(
    ("word", "nearest"), [("pln", " plan"), ("reciept", " receipt"), ("train", ".main --config=FILE"), ("hff", " hf")]
)
def test_an_unknown_command_is_answered_with_the_nearest(
    word: str, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv(commands.PREFIX, raising=False)
    assert commands.main([word]) == 2 and capsys.readouterr().err.endswith(f"python -m jaxtrain{nearest}.\n")
    assert commands.main(["lint"]) == 2 and "jaxtrain.lint" not in capsys.readouterr().err  # no module of run.sh's commands
