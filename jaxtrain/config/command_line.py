"""Command lines on argparse: all mistakes of a line at once, each with its remedy; --help; exit codes. Imports no jax."""

import argparse
import dataclasses
import difflib
import functools
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxtrain.config import launch
from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.schema import Problem, all_keys
from jaxtrain.config.synonyms import OTHER_UNIT, did_you_mean, nearest_keys

if TYPE_CHECKING:
    from rich.console import Console

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes
WIDTH = 118  # columns of tables if the output is no terminal
INDENT = 27  # column at which the description of an option starts
HELP_WIDTH = 126
CONFIG = (
    ("--config=FILE[:variant]", "a config file, with one of its variants; default configs/tiny.py"),
    ("--config.KEY=VALUE", "set a key of the config, as --config.train.steps=100"),
)


class Invalid(argparse.ArgumentTypeError):
    """A value that breaks a rule. `fix`: its remedy, in place of an example of the option."""

    def __init__(self, rule: str, fix: str = ""):
        super().__init__(rule)
        self.fix = fix


@dataclasses.dataclass(frozen=True)
class Option:
    """An option or argument of a command.

    Attributes:
        metavar: its value in the help. Without metavar an option is a switch: True if it is given, else False.
        const: its text if it is given without "=VALUE"; "": a value is required.
        type: function of the text. It raises Invalid or ValueError for a value that breaks a rule.
        example: a valid value, for the remedy of a wrong one.
        repeat: whether it may be given several times; its value is the list.
        modes: the modes that use it; "" is the command's usual action. (): all modes.
        positional: whether it is an argument, without dashes.
        several: whether it is one argument or more; its value is the list.
    """

    name: str
    help: str
    metavar: str = ""
    default: Any = ""
    _: dataclasses.KW_ONLY
    const: str = ""
    type: Callable[[str], Any] = str
    choices: Sequence[str] = ()
    required: bool = False
    repeat: bool = False
    example: str = ""
    may_be_empty: bool = False
    modes: Sequence[str] = ()
    positional: bool = False
    several: bool = False

    @property
    def usage(self) -> str:
        """Return the option as --help shows it."""
        if self.positional:
            return self.metavar + "..." * self.several
        value = f"[={self.metavar}]" if self.const else f"={self.metavar}" if self.metavar else ""
        return f"--{self.name}{value}"

    @property
    def dest(self) -> str:
        """Return the attribute of Args with its value."""
        return self.name.replace("-", "_")

    @property
    def key(self) -> str:
        """Return the name in problems."""
        return self.metavar if self.positional else f"--{self.name}"

    @property
    def needed(self) -> bool:
        return self.required or self.positional

    @property
    def fix(self) -> str:
        """Return the remedy for a wrong or a missing value: what an argument is, or an example of the option."""
        if self.positional:
            return f"Name {self.help}."
        example = self.example or str(self.default) or next(iter(self.choices), "") or getattr(self.type, "least", "")
        if example:
            return f"For example --{self.name}={example}."
        return f"Write {self.usage}{'' if self.usage.endswith('.') else '.'}"


class Parser(argparse.ArgumentParser):
    """argparse with all mistakes as Problems, and with commands that take `--config`, several modes, or subcommands.

    Attributes:
        prog: the command as it is typed behind `python -m jaxtrain`; a benchmark's has `benchmarks.` before it.
        config: whether the command takes --config=FILE and --config.KEY=VALUE.
        modes: names of options that each replace the usual action; a command line may have one of them at most.
        examples: command lines for the help, without `python -m jaxtrain NAME`.
        notes: the last paragraphs of the help, such as the exit codes.
        passes_on: whether unknown options are for another program: they are left in Args.unknown.
        options: the options, in the order of the help.
        commands: name -> parser of each subcommand. Without options of the command itself, a line must name one; with such
            options, one that is named comes first.
    """

    def __init__(
        self,
        name: str,
        purpose: str,
        *,
        config: bool = False,
        modes: Sequence[str] = (),
        examples: Sequence[str] = (),
        notes: str = "",
        passes_on: bool = False,
    ):
        super().__init__(prog=name, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self.purpose, self.config, self.modes = purpose, config, modes
        self.examples, self.notes, self.passes_on = examples, notes, passes_on
        self.options: list[Option] = []
        self.commands: dict[str, Parser] = {}
        self.problems: list[Problem] = []  # of the options and values of the line that is parsed

    def option(self, name: str, help: str, metavar: str = "", default: Any = "", **more: Any) -> None:  # noqa: A002
        """Declare an option. more: further fields of Option."""
        option = Option(name, help, metavar, default, **more)
        self.options.append(option)
        if not metavar:
            self.add_argument(f"--{name}", action="store_true")
        else:
            action = "append" if option.repeat else "store"
            self.add_argument(f"--{name}", type=functools.partial(self._value, option), action=action)

    def argument(self, name: str, help: str, metavar: str, **more: Any) -> None:  # noqa: A002
        """Declare an argument without dashes. more: further fields of Option."""
        self.options.append(Option(name, help, metavar, positional=True, **more))

    def command(self, name: str, purpose: str, **more: Any) -> "Parser":
        """Declare a subcommand and return its parser. Its help has the notes of this command, and its own of the examples."""
        examples = [line.removeprefix(f"{name} ") for line in self.examples if line.startswith(f"{name} ")]
        self.commands[name] = Parser(f"{self.prog} {name}", purpose, examples=examples, notes=self.notes, **more)
        return self.commands[name]

    def _value(self, option: Option, text: str) -> Any:
        """Return the value of an option's text. If it is wrong, collect the problem, and return the default."""
        try:
            if not text and not option.may_be_empty:
                fix = f"{option.fix[:-1]}, or leave it out." if option.default != "" else option.fix
                raise Invalid("is empty" if option.positional else "has no value", fix)
            if option.choices and text not in option.choices:
                raise Invalid(f"must be one of {', '.join(option.choices)}")
            return option.type(text)
        except ValueError:
            rule = "must be a whole number" if option.type is int else "must be a number"
            self.problems.append(Problem(option.key, text, rule, option.fix))
        except Invalid as error:
            self.problems.append(Problem(option.key, text, str(error), error.fix or option.fix))
        return option.default

    def parse(self, argv: Sequence[str]) -> "Args":
        """Read a command line. Every mistake is in `Args.problems`; nothing is raised.

        Args:
            argv: the arguments, without the program's name.
        """
        if self.commands and (not self.options or argv[:1] and argv[0] in self.commands):
            return self._parse_subcommand(argv)
        args = Args()
        words = list(argv)
        if self.config:
            args.line = launch.split_command_line(argv)
            words = args.line.words
        self.problems = []
        option_items, texts, args.unknown = self._tokens(words)
        self.parse_args([item for items in option_items.values() for item in items], args)
        args.explicit = {key.removeprefix("--") for key in option_items}
        positional = [option for option in self.options if option.positional]
        for option in positional:
            argument_texts, texts = (texts, []) if option.several else (texts[:1], texts[1:])
            values = [self._value(option, text) for text in argument_texts]
            if values:
                args.explicit.add(option.name)
                setattr(args, option.dest, values if option.several else values[0])
        args.strays = [] if self.passes_on else strays(args.unknown, self._names, self.config)
        args.strays += [_unexpected_argument(text, positional) for text in texts]
        for option in self.options:
            if option.needed and option.name not in args.explicit and not args.strays:
                self.problems.append(Problem(option.key, None, "is missing", option.fix))
            setattr(args, option.dest, getattr(args, option.dest, option.default if option.metavar else False))
        modes = [name for name in self.modes if name in args.explicit]
        args.mode = modes[0] if modes else ""
        args.problems = [*args.strays, *self.problems, *self._mode_problems(modes, args)]
        return args

    def _parse_subcommand(self, argv: Sequence[str]) -> "Args":
        """Read the command line of a subcommand, whose options may stand before its name."""
        word = next((word for word in argv if word in self.commands), None)
        if word is not None:
            index = argv.index(word)
            args = self.commands[word].parse([*argv[:index], *argv[index + 1 :]])
            args.command = word
            return args
        names = " | ".join(self.commands)
        unknown = next((word for word in argv if not word.startswith("-")), "")
        if not unknown:
            return Args(problems=[Problem("command", None, "is missing", f"Write {self.command_prefix} {names}.")])
        close = difflib.get_close_matches(unknown, self.commands, 1)
        fix = f"Did you mean {self.command_prefix} {close[0]}?" if close else f"Write {self.command_prefix} {names}."
        return Args(problems=[Problem("command", unknown, "is unknown", fix)])

    @property
    def _names(self) -> list[str]:
        return [o.name for o in self.options if not o.positional]

    def _tokens(self, words: Sequence[str]) -> tuple[dict[str, list[str]], list[str], list[str]]:
        """Return (key -> --NAME or --NAME=VALUE, arguments, unknown words) of a command line.

        argparse would end at the first missing value, take `-x` for an option, and reads some lines in another way in each
        version of Python. Of an option that is given twice, the last value counts, as of a key of the config.
        """
        options = {o.key: o for o in self.options if not o.positional}
        option_items: dict[str, list[str]] = {}
        arguments, unknown, remaining = [], [], list(words)
        while remaining:
            word = remaining.pop(0)
            key, has_value, value = word.partition("=")
            option = options.get(key)
            if option is None:
                target = arguments if not word.startswith("-") and not self.passes_on else unknown
                target.append(word)
                if word.startswith("--") and word != "--" and not has_value and remaining and not _is_option(remaining[0]):
                    target.append(remaining.pop(0))
            elif not option.metavar:
                option_items[key] = [key]
                if has_value:
                    self.problems.append(Problem(key, value, "takes no value", f"Write {key}."))
            else:
                if not has_value and not option.const and remaining and not _is_option(remaining[0]):
                    value, has_value = remaining.pop(0), "="
                if not has_value and not option.const:
                    self.problems.append(Problem(key, None, "needs a value", option.fix))
                    option_items.setdefault(key, [])
                    continue
                item = f"{key}={value if has_value else option.const}"
                option_items[key] = [*option_items.get(key, ()), item] if option.repeat else [item]
        return option_items, arguments, unknown

    def error(self, message: str) -> NoReturn:
        raise AssertionError(message)  # `_tokens` leaves argparse nothing to refuse

    def _mode_problems(self, modes: Sequence[str], args: "Args") -> list[Problem]:
        """Return the problems of modes that exclude each other, and of options that the given mode does not use."""
        if len(modes) > 1:
            both = " ".join(f"--{name}" for name in modes)
            return [Problem(both, None, "each of these is an action of its own", f"Leave out --{modes[1]}.")]
        action = f"--{args.mode}" if args.mode else "this action"
        problems = []
        for option in self.options:
            if option.name in args.explicit and option.modes and args.mode not in option.modes:
                mode_flags = [f"--{m}" for m in option.modes if m]
                fix = "Leave it out." if args.mode or not mode_flags else f"Leave it out, or add {' or '.join(mode_flags)}."
                problems.append(Problem(option.key, None, f"{action} does not use it", fix))
        return problems

    @property
    def command_prefix(self) -> str:
        """Return the beginning of the command's command line, such as `python -m jaxtrain plan`."""
        if self.prog.startswith("benchmarks."):
            return f"python -m {self.prog}"
        return "python -m jaxtrain.main" if self.prog == "main" else f"python -m jaxtrain {self.prog}"

    @property
    def usage_line(self) -> str:
        """Return the usage line of the help."""
        words = [self.command_prefix, *(o.usage for o in self.options if o.positional)]
        words += [] if not self.commands else ["[COMMAND]"] if self.options else ["COMMAND"]
        words += [o.usage for o in self.options if o.required]
        if self.config:
            words.append("[--config=FILE[:variant]] [--config.KEY=VALUE ...]")
        has_options = self.config or any(not o.positional and not o.required for o in self.options)
        return " ".join([*words, *(["[options]"] if has_options else [])])

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return (usage, description) of --config, arguments, options and subcommands, in the order of the help."""
        options = sorted(self.options, key=lambda o: not o.positional)
        described = [(o.usage, f"{'required: ' * o.required}{o.help}") for o in options]
        return [*(CONFIG if self.config else ()), *described, *((name, p.purpose) for name, p in self.commands.items())]

    @property
    def command_lines(self) -> list[str]:
        """Return the examples as a user types them."""
        return [f"{self.command_prefix} {example}".rstrip() for example in self.examples]

    def format_help(self) -> str:
        """Return the text of --help."""
        shown = [textwrap.fill(self.purpose, HELP_WIDTH), f"  {self.usage_line}"]
        shown.append("\n".join(_row(usage, doc) for usage, doc in [*self.rows, ("--help", "this text")]))
        if self.examples:
            shown.append("\n".join(f"  {line}" for line in self.command_lines))
        shown += [textwrap.fill(paragraph, HELP_WIDTH) for paragraph in self.notes.split("\n\n") if paragraph]
        return to_run_sh("\n\n".join(shown)) + "\n"

    def help_of(self, argv: Sequence[str]) -> str:
        """Return the help that a command line asks for; "" if it asks for none."""
        if not any(word == "-h" or word.partition("=")[0] == "--help" for word in argv):
            return ""
        return self.commands.get(argv[0], self).format_help()


class Args(argparse.Namespace):
    """A command line that was read: an attribute for each option and argument, and these.

    Attributes:
        command: name of the subcommand.
        mode: name of the option that replaces the usual action.
        explicit: names of the options and arguments on the command line.
        strays: the problems of unknown options and arguments, one of which may be a misspelt option that is required.
        problems: everything that is wrong, `strays` first.
        unknown: unknown words, for another program.
        line: of a command with --config: what `launch.split_command_line` returns.
    """

    command: str = ""
    mode: str = ""
    explicit: set[str]
    problems: list[Problem]
    strays: list[Problem]
    unknown: list[str]
    line: launch.Line


def _is_option(word: str) -> bool:
    """Return whether a word is an option, and no value. One with a blank in its name is a value: --separator "--- "."""
    return re.match(r"--[^=\s]*(=|$)", word) is not None


def _unexpected_argument(text: str, arguments: Sequence[Option]) -> Problem:
    if arguments:
        return Problem(f"argument {text!r}", None, "is one too many", "Leave it out.")
    fix = f"Write --{text}." if re.match(r"config\.[\w.]+=", text) else "Options start with --; see --help."
    return Problem(f"argument {text!r}", None, "left over: it belongs to no option", fix)


def strays(words: Sequence[str], names: Sequence[str], config: bool) -> list[Problem]:
    """Return the problems of words that belong to no option.

    Args:
        words: what is left of a command line.
        names: the command's options, without dashes.
        config: whether the command takes a config too.
    """
    names, config_keys = [*(["config"] if config else []), *names], list(all_keys()) if config else []
    remaining, problems = list(words), []
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            problems.append(_unexpected_argument(word, ()))
            continue
        name, has_value, value = word[2:].partition("=")
        if not has_value and remaining and not remaining[0].startswith("--"):
            value, has_value = remaining.pop(0), "="
        fix = _nearest_option(name, names, has_value + value, config_keys)
        problems.append(launch.explain_refusal(Problem(f"--{name}", None, launch.NO_OPTION, fix)))
    return problems


def _nearest_option(name: str, names: Sequence[str], value_text: str, config_keys: Sequence[str]) -> str:
    """Return the remedy for an unknown option: the option spelt like it, else the keys that it may mean, else all options.

    Args:
        name: the option without its dashes.
        names: all options of the command.
        value_text: "=VALUE" as it was typed, or "".
        config_keys: all keys of the config, if the command takes one.
    """
    if close := difflib.get_close_matches(name, names, 1, 0.75):
        return f"Did you mean --{close[0]}?"
    if begun := [n for n in names if name and n.startswith(name)]:
        return did_you_mean(f"--{n}" for n in begun)
    value_text = "=VALUE" if value_text and OTHER_UNIT.search(name) else value_text
    meant = [name] if name in config_keys else nearest_keys(name, config_keys) if config_keys else []
    # Names from other trainers can mean options of main, which this command may not have.
    if settings := [s for s in meant if not s.startswith("--") or s[2:].partition("=")[0] in names]:
        return did_you_mean(_as_option(setting, value_text) for setting in settings)
    return f"Known: {', '.join(f'--{n}' for n in [*names, *(['config.KEY'] if config_keys else []), 'help'])}."


def _as_option(setting: str, value_text: str) -> str:
    """Return a setting of the table of synonyms as an option: with the table's value, or else with the typed value.

    value_text: "=VALUE" as it was typed, or "".
    """
    if setting.startswith("--"):
        return setting.partition("=")[0] + value_text
    if " " in setting:
        return setting
    return f"--config.{setting}" if "=" in setting else f"--config.{setting}{value_text}"


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of options: whole numbers that are at least `least`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise Invalid(f"must be a whole number, {least} or more")
        return int(text)

    number.least = str(least)  # pyright: ignore[reportFunctionMemberAccess]
    return number


def path(text: str) -> Path:
    """Return a path with ~ expanded, because shells do not expand the ~ in --out=~/x."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~USER does not exist
        raise Invalid(f"is no path ({error})", "Write the folder of that user in full.") from error


def path_text(text: str) -> str:
    """Return a path as it was typed, after a check that its ~ can be expanded."""
    path(text)
    return text


def output_file(text: str) -> str:
    """Return the path of a file that a command writes. Raises Invalid if it cannot be written."""
    try:
        path = Path(text).expanduser().absolute()
        rule = "is a folder" if path.is_dir() else "" if path.parent.is_dir() else f"there is no folder {path.parent}"
        if not rule and not os.access(path if path.exists() else path.parent, os.W_OK):
            rule = "may not be written"
    except (OSError, RuntimeError) as error:  # the name is too long, or ~USER does not exist
        rule = f"cannot be a file ({error})"
    if rule:
        raise Invalid(rule, "Name another file.")
    return text


def make_console(width: int = WIDTH) -> "Console":
    """Return rich's console for tables: as wide as the terminal, or `width` columns if the output is no terminal."""
    from rich.console import Console  # takes 60 ms, and --help does not use it

    console = Console()
    return console if console.is_terminal else Console(width=width)


def _row(usage: str, doc: str) -> str:
    """Return one option and its description, wrapped. A usage that is too long has a line of its own."""
    space, head = " " * INDENT, f"  {usage} "
    first = [] if len(head) <= INDENT else [head.rstrip()]
    begin = space if first else head.ljust(INDENT)
    text = textwrap.fill(doc, HELP_WIDTH, initial_indent=begin, subsequent_indent=space, break_on_hyphens=False)
    return "\n".join([*first, text or head.rstrip()])
