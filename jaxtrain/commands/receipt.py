"""`python -m jaxtrain receipt show|list|diff`: receipts of runs, and the differences between two runs. Uses no device."""

import json
from collections.abc import Sequence

from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import REFUSED, Args, Parser, make_console, path_text
from jaxtrain.metrics.receipt import ReceiptError, open_run
from jaxtrain.report.receipt import compare_receipts, find_runs, show_diff, show_list, show_receipt


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser(
        "receipt",
        "Show what ran, or the differences between two runs that can explain other results or another speed. RUN is a run's "
        "folder (--workdir of training) or a receipt file. Reads files only.",
        examples=("show runs/tiny", "list runs", "diff runs/first runs/second"),
        notes="Exit codes: 0 done, of diff: nothing differs; 1 something differs; 2 the command or a receipt is wrong.",
    )
    cli.command("show", "the receipt of a run").argument("run", "a run", "RUN", type=path_text)
    cli.command("list", "a line for each run").argument(
        "runs", "a run, or a folder of runs", "RUN", several=True, type=path_text
    )
    diff = cli.command("diff", "the differences between two runs")
    diff.argument("a", "a run", "A", type=path_text)
    diff.argument("b", "the run to compare it with", "B", type=path_text)
    diff.option("json", "as JSON, for programs")
    return cli


def act(args: Args) -> int:
    """Run the subcommand and return its exit code. Raises ReceiptError."""
    console = make_console()
    if args.command == "list":
        return 0 if show_list(find_runs(args.runs), console) else REFUSED
    if args.command == "show":
        show_receipt(open_run(args.run), console)
        return 0
    a, b = open_run(args.a), open_run(args.b)
    differences, outcomes = compare_receipts(a, b)
    if args.json:
        print(json.dumps({"same": not differences, "differences": differences, "outcomes": outcomes}, indent=1))
    else:
        show_diff(a, b, differences, outcomes, console)
    return 1 if differences else 0


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    return run_command(parser(), argv, act, errors=(ReceiptError,))
