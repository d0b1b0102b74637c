"""A command: its options, its --help, its checks, and its exit codes.

A command is a `Command`, a table of `Option`s. `run_command` prints the help, reads the arguments, and reports all problems of
the arguments at once. Then it calls the command's own function, and turns its exceptions into exit codes. Commands that take
`--config` load it through `jaxtrain.data.loading`. Imports no jax.
"""

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Sequence

from jaxtrain.config import launch, own_parts
from jaxtrain.config.command_line import FAILED, HELP_WIDTH, INDENT, INTERRUPTED, REFUSED, Option
from jaxtrain.config.commands import spelled
from jaxtrain.config.launch import Loaded
from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.data import loading
from jaxtrain.runtime.interrupt import interruptible

CONFIG = (
    ("--config=FILE[:variant]", "a config file, with one of its variants; default configs/tiny.py"),
    ("--config.KEY=VALUE", "set a key of the config, as --config.train.steps=100"),
)


# Options that set the rank of a process in a run of several processes. jaxtrain.runtime.cluster reads them.
PROCESS_OPTIONS = (
    Option("coordinator", "address of process 0, for a run of several processes", "HOST:PORT"),
    Option("num-processes", "count of processes", "N"),
    Option("process-id", "number of this process, from 0", "I"),
    Option(
        "local-devices",
        "GPUs of this process, as 0,1; default all of its node. Slurm, torchrun and MPI set these four; docs/cluster.md "
        "lists all launchers",
        "LIST",
    ),
)


@dataclasses.dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: its module's name, as in jaxtrain/config/commands.txt.
        purpose: the first paragraph of --help.
        options: all its options but --config and --help.
        config: whether the command takes --config=FILE and --config.KEY=VALUE.
        arguments: placeholder and description of its arguments without dashes, such as ("RUN...", "a run's folder"); (): none.
            Each word of the placeholder is one argument. "..." at its end allows more, "[" at its beginning allows none.
        modes: names of options that each replace the usual action. A command line may have one of them at most.
        examples: command lines for --help, without `python -m jaxtrain NAME`.
        notes: the last paragraphs of --help, such as the exit codes.
    """

    name: str
    purpose: str
    options: tuple[Option, ...] = ()
    config: bool = False
    arguments: tuple[str, str] | tuple[()] = ()
    modes: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    notes: str = ""

    @property
    def module(self) -> str:
        """Return the beginning of the command's command line, such as `python -m jaxtrain plan`."""
        if self.name.startswith("benchmarks."):
            return f"python -m {self.name}"
        return "python -m jaxtrain.main" if self.name == "main" else f"python -m jaxtrain {self.name}"

    @property
    def usage(self) -> str:
        """Return the usage line of --help."""
        words = [self.module, *self.arguments[:1]]
        if self.config:
            words.append("[--config=FILE[:variant]] [--config.KEY=VALUE ...]")
        return " ".join([*words, "[options]"])

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return (usage, description) of --config, the arguments and the options, in the order of --help."""
        rows = [(self.arguments[0], self.arguments[1])] if self.arguments else []
        return [*(CONFIG if self.config else ()), *rows, *((o.usage, o.doc) for o in self.options)]

    @property
    def command_lines(self) -> list[str]:
        """Return the examples as a user types them."""
        return [f"{self.module} {example}".rstrip() for example in self.examples]

    def help(self) -> str:
        """Return the text of --help."""
        shown = [textwrap.fill(self.purpose, HELP_WIDTH), f"  {self.usage}"]
        shown.append("\n".join(_row(usage, doc) for usage, doc in [*self.rows, ("--help", "this text")]))
        if self.examples:
            shown.append("\n".join(f"  {line}" for line in self.command_lines))
        if self.notes:
            shown += [textwrap.fill(paragraph, HELP_WIDTH) for paragraph in self.notes.split("\n\n")]
        return spelled("\n\n".join(shown)) + "\n"

    def parse(self, argv: Sequence[str]) -> "Parsed":
        """Read a command line. Every mistake is a Problem; nothing is raised.

        Args:
            argv: the arguments, without the program's name.
        """
        options = {o.name: o.default for o in self.options if o.value and not o.bare}
        switches = {o.name: o.bare or "yes" for o in self.options if not o.value or o.bare}
        arguments: list[str] | None = [] if self.arguments else None
        loaded = None
        if self.config:
            loaded = loading.load(argv, options, switches, arguments)
            values, problems = dict(loaded.options), list(loaded.problems)
        else:
            given, _, problems = launch.split(argv, options, switches, arguments, config=False)
            values = options | dict.fromkeys(switches, "") | given
        written = {arg[2:].partition("=")[0] for arg in argv if arg.startswith("--")}
        values |= {o.name: o.default for o in self.options if o.bare and o.name not in written}
        without = {p.key for p in problems if p.rule == launch.NO_VALUE}
        problems = [self._with_fix(p) for p in problems]
        checked = [o for o in self.options if o.name in written and f"--{o.name}" not in without]
        problems += [p for o in checked if (p := o.problem(values[o.name]))]
        modes = [name for name in self.modes if values[name]]
        mode = modes[0] if modes else ""
        problems += self._wrong_modes(modes, written)
        if not any(p.rule in launch.STRAYS for p in problems):  # an unknown option may be the misspelt argument
            problems += self._wrong_arguments(arguments or [])
        return Parsed(self, mode, values, tuple(arguments or ()), loaded, problems, frozenset(written))

    def _with_fix(self, problem: Problem) -> Problem:
        """Return the problem. If an option lacks its value, the remedy is an example of this option."""
        if problem.rule != launch.NO_VALUE:
            return problem
        fix = next((o.fix for o in self.options if f"--{o.name}" == problem.key), problem.remedy)
        return dataclasses.replace(problem, remedy=fix)

    def _wrong_modes(self, modes: Sequence[str], written: set[str]) -> list[Problem]:
        """Return the problems of modes that exclude each other, and of options that the given mode does not use."""
        if len(modes) > 1:
            both = " ".join(f"--{name}" for name in modes)
            return [Problem(both, None, "each of these is an action of its own", f"Leave out --{modes[1]}.")]
        mode = modes[0] if modes else ""
        unused = [o for o in self.options if o.name in written and o.modes and mode not in o.modes]
        action = f"--{mode}" if mode else "this action"
        out = []
        for o in unused:
            named = [f"--{m}" for m in o.modes if m]
            fix = "Leave it out." if mode or not named else f"Leave it out, or add {' or '.join(named)}."
            out.append(Problem(f"--{o.name}", None, f"{action} does not use it", fix))
        return out

    def _wrong_arguments(self, given: Sequence[str]) -> list[Problem]:
        """Return the problem of a missing, an empty, or a superfluous argument without dashes; [] if there is none."""
        if not self.arguments:
            return []
        usage, doc = self.arguments
        name = usage.strip("[].")
        if "" in given:
            return [Problem(name, "", "is empty", f"Name {doc}.")]
        if not given and not usage.startswith("["):
            return [Problem(name, None, "is missing", f"Name {doc}.")]
        if len(given) > usage.count(" ") + 1 and "..." not in usage:
            return [Problem(f"argument {given[-1]!r}", None, "is one too many", "Leave it out.")]
        return []


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A command line that was read.

    Attributes:
        mode: the name of the option that replaces the usual action, or "".
        options: name -> value; "" if a switch is off.
        arguments: the arguments without dashes.
        loaded: the config. None if the command takes none.
        problems: everything that is wrong.
        given: names of the options on the command line.
    """

    command: Command
    mode: str
    options: dict[str, str]
    arguments: tuple[str, ...]
    loaded: Loaded | None
    problems: list[Problem]
    given: frozenset[str]

    @property
    def has_strays(self) -> bool:
        """Return whether there is an unknown option or argument.

        An unknown option may be a misspelt required option, so no required option is then reported as missing.
        """
        return any(p.rule in launch.STRAYS for p in self.problems)

    @property
    def config(self) -> Loaded:
        """Return the config of a command that takes one. Raises ValueError for another command."""
        if self.loaded is None:
            raise ValueError(f"{self.command.name} takes no --config")
        return self.loaded


def run_command(
    command: Command,
    argv: Sequence[str] | None,
    act: Callable[[Parsed], int],
    *,
    check: Callable[[Parsed], list[Problem]] | None = None,
    errors: tuple[type[Exception], ...] = (),
) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments without the program's name; None: the arguments of this process.
        act: the command's own work, for a command line without problems. Returns the exit code.
        check: returns further problems of the command line. They are reported together with the problems of the options.
        errors: exceptions of `act` that mean wrong input. The message is printed, and the exit code is 2.

    Returns:
        the exit code that `act` returns; 0 after --help; 2 if the command line, the config, an input or a part from outside the
        package is wrong; 1 if a file cannot be read or written; 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    if any(arg == "-h" or arg.partition("=")[0] == "--help" for arg in argv):
        print(command.help(), end="")
        return 0
    parsed = command.parse(argv)
    problems = parsed.problems + (check(parsed) if check else [])
    given = parsed.loaded.launch if parsed.loaded else None
    if problems:
        return launch.report(problems, given)
    return run_action(lambda: act(parsed), errors, given)


def run_action(act: Callable[[], int], errors: tuple[type[Exception], ...] = (), given: launch.Launch | None = None) -> int:
    """Do the work of a command and return its exit code; arguments and codes are those of `run_command`.

    given: the command line with its config, for launch.report; None: the command takes no config.
    """
    try:
        with interruptible():
            return act()
    except ConfigError as error:
        return launch.report(error.problems, given)
    except Exception as error:
        if own_parts.report(error, sys.stderr):
            return REFUSED
        if not isinstance(error, (*errors, OSError)):
            raise
        print(f"error: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, errors) else FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _row(usage: str, doc: str) -> str:
    """Return one option and its description, wrapped."""
    space = " " * INDENT
    lines = textwrap.wrap(doc, HELP_WIDTH - INDENT, break_on_hyphens=False) or [""]
    first = f"  {usage}".ljust(INDENT)
    if len(first) > INDENT or not first.endswith(" "):
        return "\n".join([first.rstrip(), *(space + line for line in lines)])
    return "\n".join([first + lines[0], *(space + line for line in lines[1:])])
