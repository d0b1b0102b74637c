"""`python -m jaxtrain.receipt show|list|diff`: what ran, and the differences between two runs. Uses no device."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.command_line import REFUSED, Command, Option, Parsed, make_console, run_command
from jaxtrain.config import Problem
from jaxtrain.receipt import print as tables
from jaxtrain.receipt.diff import compare
from jaxtrain.receipt.format import ReceiptError, Run, find_runs, open_run

USAGE = {"show": "show RUN", "list": "list RUN...", "diff": "diff A B"}
COMMAND = Command(
    "receipt",
    "Show what ran, or the differences between two runs that can explain other results or another speed. RUN is a run's folder "
    "(--workdir of training) or a receipt file; for list also a folder of runs. Reads files only.",
    (Option("json", "diff: JSON for programs"),),
    arguments=("show|list|diff RUN...", "an action and its runs: show RUN, list RUN..., or diff A B"),
    examples=("show runs/tiny", "list runs", "diff runs/first runs/second"),
    notes="Exit codes: 0 done, of diff: nothing differs; 1 something differs; 2 the command or a receipt is wrong.",
)


def check(parsed: Parsed) -> list[Problem]:
    """Return the problems of the action and of the number of its runs."""
    action, *runs = parsed.arguments or ("",)
    if not action:
        return []
    if action not in USAGE:
        return [Problem("action", action, f"must be one of {', '.join(USAGE)}", "For example show runs/tiny.")]
    problems = []
    if {"show": len(runs) != 1, "list": not runs, "diff": len(runs) != 2}[action]:
        problems.append(Problem(action, " ".join(runs), "names another number of runs", f"Write {USAGE[action]}."))
    if parsed.options["json"] and action != "diff":
        problems.append(Problem("--json", None, f"{action} does not use it", "Leave it out."))
    return problems


def act(parsed: Parsed) -> int:
    """Run one action and return its exit code. Raises ReceiptError."""
    action, *targets = parsed.arguments
    console = make_console()
    if action == "list":
        runs_or_errors = [_open(path) for path in find_runs(targets)]
        tables.show_list(runs_or_errors, console)
        return 0 if any(isinstance(run, Run) for run in runs_or_errors) else REFUSED
    runs = [open_run(target) for target in targets]
    if action == "show":
        tables.show(runs[0], console)
        return 0
    found = compare(*runs)
    if parsed.options["json"]:
        print(json.dumps({"same": not found.differences, **dataclasses.asdict(found)}, indent=1))
    else:
        tables.show_diff(found, console)
    return 1 if found.differences else 0


def _open(path: Path) -> Run | tuple[str, str]:
    """Return a run for the list, or its name and the error: one bad receipt must not hide the others."""
    try:
        run = open_run(path)
        _ = run.figures, run.goodput, run.losses
        return run
    except ReceiptError as error:
        return path.name, str(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command(COMMAND, argv, act, check=check, errors=(ReceiptError,))


if __name__ == "__main__":
    sys.exit(main())
