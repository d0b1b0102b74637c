"""Command lines as users type them: values, mistakes, --help, and the exit code of each way to end."""

import importlib
import re

import pytest

from jaxtrain.commands.command import read_line, run_command
from jaxtrain.config import commands
from jaxtrain.config.command_line import Parser, at_least, output_file, path_text
from jaxtrain.config.schema import ConfigError, Problem


def files() -> Parser:
    """Return the parser of a command with options of all kinds."""
    p = Parser(
        "report",
        "Write one page of a run.",
        modes=("list", "watch"),
        examples=("runs/tiny",),
        notes="Exit codes: 0 done.",
    )
    p.argument("runs", "a run's folder", "RUN", several=True)
    p.option("html", "the file", "FILE", "report.html", type=output_file)
    p.option("rows", "rows of the table", "N", 10, type=at_least(1))
    p.option("shape", "rows or columns", "SHAPE", "rows", choices=("rows", "columns"), modes=("",))
    p.option("json", "for programs; without FILE on the terminal", "FILE", const="-")
    p.option("list", "instead: list the traces")
    p.option("watch", "instead: follow the run")
    return p


FILES = files()
TRAIN = Parser("plan", "Plan a run.", config=True)
TRAIN.option("topology", "the machine", "CHIP:GPUS")


def test_values_come_from_the_defaults_and_from_the_command_line():
    plain = FILES.parse(["runs/a", "runs/b"])
    assert (plain.problems, plain.runs, plain.mode) == ([], ["runs/a", "runs/b"], "")
    assert (plain.html, plain.rows, plain.shape, plain.json) == ("report.html", 10, "rows", "")
    assert not plain.list and not plain.watch
    given = FILES.parse(["--rows", "3", "runs/a", "--json", "--list"])
    assert given.problems == []
    assert (given.rows, given.json, given.list, given.mode) == (3, "-", True, "list")
    assert given.explicit == {"runs", "rows", "json", "list"}


@pytest.mark.parametrize(
    ("argv", "key", "right"),
    [
        # with what the message says instead, which is tried
        ([], "RUN", None),
        (["r", ""], "RUN", None),
        (["r", "--rows=0"], "--rows", "--rows=10"),
        (["r", "--rows="], "--rows", "--rows=10"),
        (["r", "--shape=round"], "--shape", "--shape=rows"),
        (["r", "--list=all"], "--list", "--list"),
        (["r", "--list", "--watch"], "--list --watch", None),
        (["r", "--list", "--shape=rows"], "--shape", None),
        (["r", "--html=/no/such/folder/x.html"], "--html", None),
        (["r", "--html"], "--html", "--html=report.html"),
        (["r", "--row=3"], "--row", "--rows"),
        (["r", "--config.train.steps=3"], "--config.train.steps", None),
        (["r", "-x"], "argument '-x'", None),
    ],
)
def test_a_mistake_is_one_problem(argv: list[str], key: str, right: str | None):
    (problem,) = FILES.parse(argv).problems
    assert problem.key == key and problem.remedy
    if right:
        assert right in problem.remedy and not FILES.parse(["r", right, *(["3"] if right == "--rows" else [])]).problems


@pytest.mark.parametrize(
    ("argv", "key", "answer"),
    [
        (["write", "in", "--ouput=x"], "--ouput", "--output?"),
        (["write", "in", "--out=x"], "--out", "--output?"),
        (["write", "in", "--no-such"], "--no-such", "--output, --mark, --force, --help"),
        (["write", "in"], "--output", "--output"),
        (["write", "in", "--output"], "--output", "--output=FILE"),
        (["write", "in", "--output="], "--output", "--output"),
        (["write", "--output=x"], "IN", "the folder"),
        (["wirte", "in", "--output=x"], "command", "files write"),
        (["--output=x"], "command", "files write"),
        (["write", "in", "out", "--output=x"], "argument 'out'", "Leave it out"),
        ([], "command", "files write"),
    ],
)
def test_mistakes_in_a_subcommand(argv: list[str], key: str, answer: str, capsys: pytest.CaptureFixture[str]):
    top = Parser("files", "Work on files.")
    write = top.command("write", "write one")
    write.argument("folder", "the folder", "IN")
    write.option("output", "the file", "FILE", required=True)
    write.option("mark", "a mark", "TEXT")
    write.option("force", "replace it")
    args = top.parse(["write", "in", "--force", "--output", "x"])
    assert (args.command, args.output, args.problems) == ("write", "x", [])
    assert top.parse(["--output", "x", "write", "in"]).folder == "in", "options may stand before the subcommand"
    assert top.parse(["write", "in", "--output=x", "--mark", "--- "]).mark == "--- "
    for helped in (["--help"], ["write", "--help"]):
        assert run_command(top, helped, lambda _: 1) == 0
    assert "--mark=TEXT" in capsys.readouterr().out
    (problem,) = top.parse(argv).problems
    assert problem.key == key and answer in problem.remedy


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("r --rows=0 --shape=round --hmtl=x --list --watch", ["--hmtl", "--rows", "--shape", "--list --watch"]),
        ("--rows --hmtl x r --shape=round", ["--hmtl", "--rows", "--shape"]),
        ("--watch=yes --rows --shape", ["--watch", "--rows", "--shape", "RUN", "--shape"]),
        ("--rows= --shape=", ["--rows", "--shape", "RUN"]),
        ("r --list=1 --html", ["--list", "--html"]),
        ("r -- s", ["--"]),
    ],
)
def test_several_mistakes_are_reported_at_once(line: str, keys: list[str]):
    args = FILES.parse(line.split())
    assert [p.key for p in args.problems] == keys
    assert args.rows == 10 and args.shape == "rows", "further checks of a command find valid values"


def test_values_are_taken_as_they_are_typed():
    p = Parser("sample", "Continue a text.", modes=("explain",))
    p.option("prompt", "the text", "TEXT")
    p.option("set", "a setting", "KEY", repeat=True)
    p.option("explain", "explain it", "STYLE", const="text")
    args = p.parse(["--prompt", "-abc", "--set=a", "--set", "b"])
    assert (args.prompt, args.set, args.problems) == ("-abc", ["a", "b"], [])
    assert p.parse(["--prompt=a", "--prompt=b=c"]).prompt == "b=c"
    assert [x.key for x in p.parse(["--explain", "config.train.steps=3"]).problems] == ["argument 'config.train.steps=3'"]
    assert [x.key for x in p.parse(["--set=a", "--explain", "--prompt"]).problems] == ["--prompt"]
    argument = Parser("profile", "Show a trace.")
    argument.argument("run", "a run's folder", "RUN", type=path_text)
    argument.option("trace", "its number", "N", type=at_least(1))
    assert [x.key for x in argument.parse(["--trace", "-3"]).problems] == ["--trace", "RUN"]
    assert [x.key for x in argument.parse(["a", "b"]).problems] == ["argument 'b'"]
    (problem,) = argument.parse(["~nobody-of-this-name/x"]).problems
    assert problem.key == "RUN" and problem.value == "~nobody-of-this-name/x"


@pytest.mark.parametrize("name", [name for name in commands.command_table() if name != "main"])
def test_defaults_are_values_of_their_options(name: str):
    """A default is not read from text, so it must be what the same text would give."""
    top = importlib.import_module(f"jaxtrain.commands.{name}").parser()
    for p in (top, *top.commands.values()):
        for o in p.options:
            if o.metavar and not o.positional and o.default != "":
                args = p.parse([f"--{o.name}={o.default}"])
                value = getattr(args, o.name.replace("-", "_"))
                zero = o.default == 0 and any(x.key == f"--{o.name}" for x in args.problems)  # stands for no value
                assert zero or (value == o.default and type(value) is type(o.default)), (name, o.name)


def test_a_command_with_a_config_reports_mistakes_of_both_at_once():
    args = read_line(TRAIN, ["--topology=", "--config.train.step=3"])
    assert [p.key for p in args.problems] == ["train.step", "--topology"]
    assert read_line(TRAIN, ["--config.train.steps=3"]).loaded.run.train.steps == 3
    line = read_line(TRAIN, ["--config", "config.py", "--topology"])
    assert [(p.key, p.value) for p in line.problems] == [("--config", "config.py"), ("--topology", None)]


def test_help_shows_every_option_within_the_width(capsys: pytest.CaptureFixture[str]):
    assert run_command(FILES, ["--help"], lambda _: 1) == 0
    text = capsys.readouterr().out
    assert all(usage in text for usage in ("--html=FILE", "--json[=FILE]", "--list ", "RUN...", "--help", FILES.notes))
    assert max(map(len, text.splitlines())) <= 126


def _fail(error: BaseException):
    def act(_: object) -> int:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ConfigError([Problem("train.steps", 0, "must be at least 1", "Write 1.")]), 2, "train.steps"),
        (KeyError("no-trace"), 2, "no-trace"),
        (FileNotFoundError(2, "No such file", "x"), 1, "x"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exceptions_become_exit_codes(error: BaseException, code: int, printed: str, capsys: pytest.CaptureFixture[str]):
    assert run_command(FILES, ["r"], _fail(error), errors=(KeyError,)) == code
    assert printed in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        run_command(FILES, ["r"], _fail(ZeroDivisionError()))


def test_further_checks_are_reported_with_those_of_the_options(capsys: pytest.CaptureFixture[str]):
    more = [Problem("RUN", "r", "is no run", "Name a run's folder.")]
    assert run_command(FILES, ["r", "--rows=0"], lambda _: 0, check=lambda _: more) == 2
    assert re.findall("error: (.+?) = ", capsys.readouterr().err) == ["--rows", "RUN"]
