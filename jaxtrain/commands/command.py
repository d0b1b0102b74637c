"""Run a command: its help, all problems of its command line at once, its work, and its exit code. Imports no jax."""

import sys
from collections.abc import Callable, Sequence

from jaxtrain.config import launch, own_parts
from jaxtrain.config.command_line import FAILED, INTERRUPTED, REFUSED, Args, Parser
from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.data import loading
from jaxtrain.runtime.cluster import FIELDS
from jaxtrain.runtime.interrupt import interruptible


def add_process_options(parser: Parser) -> None:
    """Declare the options that set the rank of a process in a run of several processes (jaxtrain/runtime/cluster.py)."""
    parser.option("coordinator", "address of process 0, for a run of several processes", "HOST:PORT")
    parser.option("num-processes", "count of processes", "N")
    parser.option("process-id", "number of this process, from 0", "I")
    parser.option(
        "local-devices",
        "GPUs of this process, as 0,1; default all of its node. Slurm and torchrun set these four (docs/cluster.md)",
        "LIST",
    )


def process_options(args: Args) -> dict[str, str]:
    """Return name -> text of the options of a process, as `distributed.detect` takes them."""
    return {name: getattr(args, name.replace("-", "_")) for name in FIELDS}


def read_line(parser: Parser, argv: Sequence[str]) -> Args:
    """Return a command line with the config that it names, `Args.loaded`, and the problems of both. Nothing is raised."""
    args = parser.parse(argv)
    if parser.commands.get(args.command, parser).config:
        args.loaded = loading.load_line(args.line)
        args.problems[len(args.strays) : len(args.strays)] = args.loaded.problems
    return args


def run_command(
    parser: Parser,
    argv: Sequence[str],
    act: Callable[[Args], int],
    *,
    check: Callable[[Args], list[Problem]] | None = None,
    errors: tuple[type[Exception], ...] = (),
) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments without the program's name.
        act: the command's own work, for a command line without problems. Returns the exit code.
        check: returns further problems of the command line. They are reported together with the problems of the options.
        errors: exceptions of `act` that mean wrong input. The message is printed, and the exit code is 2.

    Returns:
        the exit code that `act` returns; 0 after --help; 2 if the command line, the config, an input or a part from outside the
        package is wrong; 1 if a file cannot be read or written; 130 after Ctrl-C.
    """
    if text := parser.help_of(argv):
        print(text, end="")
        return 0
    args = read_line(parser, argv)
    problems = args.problems + (check(args) if check else [])
    launched = args.loaded.launch if "loaded" in args else None
    if problems:
        return launch.report_problems(problems, launched)
    try:
        with interruptible():
            return act(args)
    except ConfigError as error:
        return launch.report_problems(error.problems, launched)
    except Exception as error:
        if own_parts.report_error(error, sys.stderr):
            return REFUSED
        if not isinstance(error, (*errors, OSError)):
            raise
        print(f"error: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, errors) else FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
