"""`python -m jaxtrain report RUN...`: write the HTML report of a run, or of several runs compared."""

from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands.command import Command, Parsed, run_command
from jaxtrain.config.command_line import Option
from jaxtrain.metrics.files import MetricsError, write_atomic
from jaxtrain.metrics.receipt_format import ReceiptError

COMMAND = Command(
    "report",
    "Write one HTML page about a run that trains or has ended, or one that compares several runs. It needs no GPU and changes "
    "no file of a run.",
    (
        Option(
            "html", "the file to write; default report.html in the run's folder, or here for several runs", "FILE", writes=True
        ),
    ),
    arguments=("RUN...", "a run's folder; several, at most 8, are compared"),
    examples=("runs/tiny", "runs/first runs/second --html=compared.html"),
    notes="Exit codes: 0 the page is written; 1 a file cannot be read or written; 2 the command is wrong, or a folder no run.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from jaxtrain.report.run_files import RunError

    return run_command(COMMAND, argv, write, errors=(RunError, MetricsError, ReceiptError))


def write(parsed: Parsed) -> int:
    """Write the page, print its path, and return the exit code."""
    from jaxtrain.report.run import read_all
    from jaxtrain.report.run_files import PAGE
    from jaxtrain.report.run_page import html

    runs = read_all(parsed.arguments)
    file = parsed.options["html"]
    target = Path(file).expanduser() if file else (runs[0].folder if len(runs) == 1 else Path()) / PAGE
    write_atomic(target, html(runs, target))
    print(target)
    return 0
