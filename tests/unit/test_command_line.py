"""Command lines as users type them: values, mistakes, --help, and the exit code of each way to end."""

import re

import pytest

from jaxtrain.commands.command import Command, run_command
from jaxtrain.config.command_line import ArgumentParser, Option
from jaxtrain.config.schema import ConfigError, Problem

FILES = Command(
    "report",
    "Write one page of a run.",
    (
        Option("html", "the file", "FILE", default="report.html", writes=True),
        Option("rows", "rows of the table", "N", default="10", least=1),
        Option("shape", "rows or columns", "SHAPE", default="rows", choices=("rows", "columns"), modes=("",)),
        Option("json", "for programs; without FILE on the terminal", "FILE", bare="-"),
        Option("list", "instead: list the traces"),
        Option("watch", "instead: follow the run"),
    ),
    arguments=("RUN...", "a run's folder"),
    modes=("list", "watch"),
    examples=("runs/tiny",),
    notes="Exit codes: 0 done.",
)
TRAIN = Command("plan", "Plan a run.", (Option("topology", "the machine", "CHIP:GPUS"),), config=True)


def test_values_come_from_the_defaults_and_from_the_command_line():
    plain = FILES.parse(["runs/a", "runs/b"])
    assert (plain.problems, plain.arguments, plain.mode) == ([], ("runs/a", "runs/b"), "")
    assert plain.options == {"html": "report.html", "rows": "10", "shape": "rows", "json": "", "list": "", "watch": ""}
    given = FILES.parse(["--rows", "3", "runs/a", "--json", "--list"])
    assert given.problems == []
    assert (given.options["rows"], given.options["json"], given.mode) == ("3", "-", "list")
    assert given.given == {"rows", "json", "list"}


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
    ("argv", "answer"),
    [
        (["write", "in", "--ouput=x"], "--output?"),
        (["write", "in", "--out=x"], "--output?"),
        (["write", "in", "--no-such"], "--output, --mark, --force, --help"),
        (["write", "in"], "--output"),
        (["write", "in", "--output="], "--output"),
        (["wirte", "in", "--output=x"], "files write"),
    ],
)
def test_mistakes_in_a_subcommand(argv: list[str], answer: str, capsys: pytest.CaptureFixture[str]):
    top = ArgumentParser("files")
    write = top.add_subparsers(dest="command").add_parser("write")
    write.add_argument("folder")
    write.add_argument("--output", required=True)
    write.add_argument("--force", action="store_true")
    write.add_argument("--mark")
    assert top.parse_args(["write", "in", "--force", "--output", "x"]).output == "x"
    assert top.parse_args(["write", "--output=x", "--", "in"]).folder == "in"
    assert top.parse_args(["write", "in", "--output=x", "--mark", "--- "]).mark == "--- "
    for helped in (["--help"], ["write", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            top.parse_args(helped)
    with pytest.raises(SystemExit) as ended:
        top.parse_args(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("error:") == 1 and answer in said


def test_a_command_with_a_config_reports_mistakes_of_both_at_once():
    parsed = TRAIN.parse(["--topology=", "--config.train.step=3"])
    assert [p.key for p in parsed.problems] == ["train.step", "--topology"]
    assert TRAIN.parse(["--config.train.steps=3"]).config.run.train.steps == 3
    with pytest.raises(ValueError, match="--config"):
        _ = FILES.parse(["r"]).config


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
