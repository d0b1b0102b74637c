"""The command line of preflight: checks this node and, with several processes, the other nodes of the run."""

import os
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands.command import add_process_options, process_options, run_command
from jaxtrain.config.command_line import Args, Invalid, Parser, at_least, output_file, path_text
from jaxtrain.config.schema import Problem, suggest
from jaxtrain.node import multi_node, preflight
from jaxtrain.node.facts import ANSWER_S, Unanswered, call_with_timeout
from jaxtrain.runtime import distributed
from jaxtrain.step.validate_places import check_writable

ALLOW = "JAXTRAIN_PREFLIGHT_ALLOW"
DAY_S = 86_400


def json_file(text: str) -> str:
    """Return the path of --json, after a check that the file can be written; "-" is the terminal."""
    try:
        return text if text == "-" else call_with_timeout(ANSWER_S, text, lambda: output_file(text))
    except Unanswered as error:
        raise Invalid(str(error), "Name another file.") from error


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser(
        "preflight",
        "Check this node, and with several processes the other nodes of the run. It takes a minute at most, "
        "and changes nothing.",
        config=True,
        examples=(
            "",
            "--config=configs/llama3_8b.py --workdir=runs/first",
            "--recorded=tests/recorded/faults/phb_link",
        ),
        notes="Exit codes: 0 fit, or there is no GPU; 3 a fault, on this node or another of the run; 75 a process of "
        "the run did "
        "not connect, or was lost: try again; 2 the command or config is wrong.",
    )
    cli.option("workdir", "the run's folder, as of jaxtrain.main", "DIR", type=path_text)
    cli.option(
        "json", "print all findings as JSON in place of the table, or write them to FILE", "FILE", const="-", type=json_file
    )
    cli.option(
        "allow",
        "checks whose fault is only a note, as 'NUMA balancing' if the kernel is not yours; default: those of the variable "
        f"{ALLOW}. The verdict names them",
        "NAME,...",
    )
    cli.option("no-measure", "read only: no matmul, no collective, no file is written")
    cli.option(
        "limit",
        "seconds for everything, default 60; a check that does not fit is 'not measured'",
        "S",
        default=60,
        type=at_least(1),
    )
    cli.option(
        "meet", "seconds for the other processes to connect, before that, default 300", "S", default=300, type=at_least(1)
    )
    cli.option(
        "record",
        "also save the node's answers, to be checked elsewhere. No secrets: only variables that change a run",
        "DIR",
        type=path_text,
    )
    cli.option("recorded", "check such a folder instead of this node", "DIR", type=path_text)
    add_process_options(cli)
    cli.option("replay", "accepted, as jaxtrain.main has it; without effect", "DIR")
    cli.option("explain", "accepted, as jaxtrain.main has it; without effect")
    return cli


def main(argv: Sequence[str], own_process: bool = False) -> int:
    """Run the command and return its exit code. own_process: see preflight.run_preflight."""

    def act(args: Args) -> int:
        options = process_options(args)
        return preflight.run_preflight(
            args, options, distributed.detect(options, os.environ)[0], allowed_checks(args)[1], own_process
        )

    return run_command(parser(), argv, act, check=find_problems)


def find_problems(args: Args) -> list[Problem]:
    """Return problems that command_line does not check: process options, names of checks, and the folder of --record."""
    _, problems = distributed.detect(process_options(args), os.environ)
    problems += unknown_checks(*allowed_checks(args))
    for name, default in (("limit", 60), ("meet", 300)):
        if (seconds := getattr(args, name)) > DAY_S:
            problems.append(Problem(f"--{name}", seconds, "is more than a day", f"Leave it out: it is then {default}."))
    if args.record and args.recorded:
        problems.append(Problem("--record", args.record, "does not apply to --recorded", "Leave one of them out."))
    elif args.record:
        folder = Path(args.record).expanduser()
        try:
            problems += call_with_timeout(ANSWER_S, args.record, lambda: check_writable("--record", folder))
        except (OSError, Unanswered) as error:
            problems.append(Problem("--record", args.record, str(error), "Name another folder."))
    return problems


def allowed_checks(args: Args) -> tuple[str, list[str]]:
    """Return (option or variable that lists checks whose faults become notes, names of these checks)."""
    allow = args.allow
    names = (allow or os.environ.get(ALLOW, "")).split(",")
    return "--allow" if allow else ALLOW, [name.strip() for name in names if name.strip()]


def unknown_checks(key: str, names: Sequence[str]) -> list[Problem]:
    """Return a problem for each name that is not the name of a check."""
    spelled = {name.lower(): name for name in multi_node.CHECKS}
    rule = "no check with a fault that can be allowed has this name"
    unknown = [(name, spelled.get(name.lower())) for name in names if name not in multi_node.CHECKS]
    return [
        Problem(key, n, rule, f"Did you mean {near}?" if near else suggest(n, sorted(multi_node.CHECKS))) for n, near in unknown
    ]


def start(argv: Sequence[str]) -> int:
    """Run the command line as this process's only work, and return its exit code."""
    return main(argv, own_process=True)
