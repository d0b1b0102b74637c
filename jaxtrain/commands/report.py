"""`python -m jaxtrain report RUN...`: write the HTML report of a run, or one of several runs."""

from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import Args, Parser, output_file, path_text
from jaxtrain.metrics.files import MetricsError, write_atomic
from jaxtrain.metrics.receipt import ReceiptError


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser(
        "report",
        "Write one HTML page about a run that trains or has ended, or one with the curves of several runs in the same charts. "
        "It needs no GPU and changes no file of a run.",
        examples=("runs/tiny", "runs/first runs/second --html=both.html"),
        notes="Exit codes: 0 the page is written; 1 it cannot be written; 2 the command is wrong, a folder is no run, or a "
        "file is damaged.",
    )
    cli.argument("runs", "a run's folder; several, at most 8, share each chart", "RUN", several=True, type=path_text)
    cli.option(
        "html", "the file to write; default report.html in the run's folder, or here for several runs", "FILE", type=output_file
    )
    return cli


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    from jaxtrain.report.run import RunError

    return run_command(parser(), argv, write_report, errors=(RunError, MetricsError, ReceiptError))


def write_report(args: Args) -> int:
    """Write the page, print its path, and return the exit code."""
    from jaxtrain.report.run import PAGE, read_runs
    from jaxtrain.report.run_page import run_html

    runs = read_runs(args.runs)
    file = args.html
    target = Path(file).expanduser() if file else (runs[0].folder if len(runs) == 1 else Path()) / PAGE
    write_atomic(target, run_html(runs, target))
    print(target)
    return 0
