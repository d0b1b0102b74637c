"""Options of commands, with the checks of their values; exit codes; consoles. Imports no jax."""

import argparse
import contextlib
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxtrain.config import launch
from jaxtrain.config.schema import Problem

if TYPE_CHECKING:
    from rich.console import Console

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes
WIDTH = 118  # columns of tables if the output is no terminal
INDENT = 27  # column at which the description of an option starts
HELP_WIDTH = 126


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: as it is typed, without the dashes.
        doc: its line of --help.
        value: placeholder of its value in --help, such as FILE. "": a switch, which takes no value.
        default: its value if it is left out.
        bare: its value if it is given without "=VALUE". "": a value is required. A switch that is given has the value "yes".
        least: its value must be a whole number that is at least `least`. None: it need not be a number.
        choices: all its valid values. (): the values cannot be listed.
        writes: whether its value is the path of a file that the command writes.
        check: function that returns the rule that a value breaks, or "".
        example: a valid value, which the error message shows.
        may_be_empty: whether an empty value is valid.
        modes: the modes that use it (see Command.modes); "" is the command's usual action. (): all modes.
    """

    name: str
    doc: str
    value: str = ""
    default: str = ""
    bare: str = ""
    least: int | None = None
    choices: tuple[str, ...] = ()
    writes: bool = False
    check: Callable[[str], str] | None = None
    example: str = ""
    may_be_empty: bool = False
    modes: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """Return the option as --help shows it."""
        if not self.value:
            return f"--{self.name}"
        return f"--{self.name}[={self.value}]" if self.bare else f"--{self.name}={self.value}"

    @property
    def fix(self) -> str:
        """Return the remedy for a wrong value: an example of the option."""
        example = self.example or self.default or next(iter(self.choices), "")
        example = example or (str(self.least) if self.least is not None else "")
        if example:
            return f"For example --{self.name}={example}."
        return f"Write --{self.name}={self.value}" + ("" if self.value.endswith(".") else ".")

    def problem(self, text: str) -> Problem | None:
        """Return a Problem with the rule that a given value breaks, or None."""
        key = f"--{self.name}"
        fix = self.fix
        if not self.value:
            return None if text == "yes" else Problem(key, text, "takes no value", f"Write {key}.")
        if text == "" and not self.may_be_empty:
            return Problem(key, "", "has no value", fix if not self.default else f"{fix[:-1]}, or leave it out.")
        if self.least is not None and (not text.isdecimal() or int(text) < self.least):
            return Problem(key, text, f"must be a whole number, {self.least} or more", fix)
        if self.choices and text not in self.choices:
            return Problem(key, text, f"must be one of {', '.join(self.choices)}", fix)
        if self.check is not None and (rule := self.check(text)):
            return Problem(key, text, rule, fix)
        if self.writes and (rule := check_output_file(text)):
            return Problem(key, text, rule, "Name another file.")
        return None


class ArgumentParser(argparse.ArgumentParser):
    """argparse in the error style of the other commands, for commands with subcommands. It refuses empty values.

    Attributes:
        may_be_empty: options whose value may be empty.
    """

    may_be_empty: tuple[str, ...] = ()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options, allow_abbrev=False)

    def parse_args(self, args=None, namespace=None):  # noqa: ANN001, ANN201  # pyright: ignore
        """Parse as argparse does, after a check for unknown options, so that a misspelt option is not reported as missing."""
        words = sys.argv[1:] if args is None else list(args)
        if problems := self._unknown_options(words):
            sys.exit(launch.report(problems))
        return super().parse_args(words, namespace)

    def _unknown_options(self, words: Sequence[str]) -> list[Problem]:
        """Return the problems of options that neither this parser nor its subcommand has, and of an unknown subcommand."""
        words = words[: words.index("--")] if "--" in words else words
        for action in self._actions:
            if not isinstance(action, argparse._SubParsersAction):
                continue
            if not words or words[0].startswith("-"):  # argparse reports the missing subcommand
                return []
            if words[0] in action.choices:
                return action.choices[words[0]]._unknown_options(words[1:])
            close = difflib.get_close_matches(words[0], action.choices, 1) or action.choices
            return [Problem("command", words[0], "is unknown", f"Fix: {self.prog} {' | '.join(close)}.")]
        words = [word for word in words if not re.match(r"--[^=]*\s", word)]  # such a word is a value: --separator "--- "
        actions = [action for action in self._actions if action.dest != "help"]
        named = [(name.removeprefix("--"), action) for action in actions for name in action.option_strings]
        options = {name: "" for name, action in named if action.nargs != 0}
        switches = {name: "yes" for name, action in named if action.nargs == 0}
        _, _, problems = launch.split(words, options, switches, [], config=False)
        return [p for p in problems if p.rule == launch.NO_OPTION and p.key != "--help"]

    def parse_known_args(self, args=None, namespace=None):  # noqa: ANN001, ANN201  # pyright: ignore
        """Parse as argparse does, and refuse empty values: an empty path would be the current folder."""
        words = sys.argv[1:] if args is None else list(args)
        for before, word in zip(["", *words], words, strict=False):
            name = word.rstrip("=") or (before if before.startswith("--") else "argument")
            if (word == "" or re.fullmatch("--[^=]+=", word)) and name not in self.may_be_empty:
                self.error(f"{name} has no value")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        sys.exit(launch.report([Problem(self.prog, None, message, f"See {self.prog} --help")]))


def make_console(width: int = WIDTH) -> "Console":
    """Return rich's console for tables: as wide as the terminal, or `width` columns if the output is no terminal."""
    from rich.console import Console  # takes 60 ms, and --help does not use it

    console = Console()
    return console if console.is_terminal else Console(width=width)


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str, int], None]]:
    """Yield a function to call with (name, bytes) of each finished part of `total` bytes. On a terminal, show a bar."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    lines = sys.stdout.isatty()  # rich writes lines of stdout to its console, above the bar
    with Progress(*columns, console=console, transient=True, redirect_stdout=lines, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda name, size: bar.update(task, advance=size, description=name)


def check_output_file(text: str) -> str:
    """Return why a file cannot be written, or "". Commands call this function before their work."""
    try:
        path = Path(text).expanduser().absolute()
        if path.is_dir():
            return "is a folder"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
    except (OSError, RuntimeError) as error:  # the name is too long, or ~USER does not exist
        return f"cannot be a file ({error})"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "may not be written"
