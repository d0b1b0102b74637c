"""Command lines as users type them: values, mistakes, --help, and the exit code of each way to end."""

import re

import pytest

from jaxtrain.commands.command import read_line, run_command
from jaxtrain.config.command_line import Parser, output_file, whole
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
    p.option("rows", "rows of the table", "N", 10, type=whole(1))
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
    assert given.given == {"runs", "rows", "json", "list"}


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
    assert top.parse(["write", "--output=x", "--", "in"]).folder == "in"
    assert top.parse(["write", "in", "--output=x", "--mark", "--- "]).mark == "--- "
    for helped in (["--help"], ["write", "--help"]):
        assert run_command(top, helped, lambda _: 1) == 0
    assert "--mark=TEXT" in capsys.readouterr().out
    (problem,) = top.parse(argv).problems
    assert problem.key == key and answer in problem.remedy


def test_several_mistakes_are_reported_at_once():
    keys = [p.key for p in FILES.parse(["r", "--rows=0", "--shape=round", "--hmtl=x", "--list", "--watch"]).problems]
    assert keys == ["--hmtl", "--rows", "--shape", "--list --watch"]


def test_a_command_with_a_config_reports_mistakes_of_both_at_once():
    args = read_line(TRAIN, ["--topology=", "--config.train.step=3"])
    assert [p.key for p in args.problems] == ["train.step", "--topology"]
    assert read_line(TRAIN, ["--config.train.steps=3"]).loaded.run.train.steps == 3


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
