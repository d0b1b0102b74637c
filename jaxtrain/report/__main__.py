"""`python -m jaxtrain.report RUN...`: one page of a run, or of several compared; with --follow, a live view of one."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands import spelled
from jaxtrain.config import Problem
from jaxtrain.launch import report as refuse
from jaxtrain.metrics import MetricsError
from jaxtrain.receipt.format import ReceiptError
from jaxtrain.report.run import RunError

HELP = """\
One page of a run, live or finished, or of several compared. Reads files only: no GPU, and the run is not touched.

  python -m jaxtrain.report RUN... [options]

  RUN                      a run's folder; several, at most 8, are compared
  --html=FILE              where the page goes. Default: report.html in the run's folder; of several runs, in this folder
  --follow                 instead: a live view of one run in the terminal, until it ends; elsewhere a line for each of its
                           lines of metrics
  --help                   this text

  python -m jaxtrain.report runs/tiny
  python -m jaxtrain.report runs/first runs/second --html=compared.html
  python -m jaxtrain.report runs/tiny --follow

Exit codes: 0 the page is written, or the run that was followed has ended; 1 a file could not be read or written, or the run
that was followed died without an end and was not started again; 2 the command is wrong, or a folder is no run; 130 Ctrl-C.
"""
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(spelled(HELP), end="")
        return 0
    folders, html, follow, problems = parse(argv)
    if problems:
        return refuse(problems)
    try:
        if follow:
            from jaxtrain.report.follow import watch

            return watch(Path(folders[0]).expanduser())
        return write(folders, html)
    except (RunError, MetricsError, ReceiptError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped; the run goes on.", file=sys.stderr)
        return INTERRUPTED


def parse(argv: Sequence[str]) -> tuple[list[str], str, bool, list[Problem]]:
    """(folders, --html, --follow, what is wrong)."""
    folders, html, follow, problems = [], "", False, []
    for arg in argv:
        name, given, value = arg.partition("=")
        if not arg.startswith("-"):
            folders.append(arg)
        elif name == "--html":
            html = value
            if not value:
                problems.append(Problem("--html", None, "there is no file", "Write --html=FILE."))
        elif name == "--follow" and not given:
            follow = True
        else:
            rule = "takes no value" if name == "--follow" else "no such option"
            problems.append(Problem(name, value or None, rule, "See --help."))
    if not folders:
        problems.append(Problem("RUN", None, "no run is named", "Name a run's folder, such as runs/tiny."))
    if follow and len(folders) > 1:
        problems.append(Problem("--follow", None, f"{len(folders)} runs are named", "Name one."))
    if follow and html:
        problems.append(Problem("--follow", None, "is a command of its own", "Leave --html out."))
    return folders, html, follow, problems


def write(folders: Sequence[str], html: str) -> int:
    """Writes the page and says where it is."""
    from jaxtrain.metrics import write_atomic
    from jaxtrain.report import page
    from jaxtrain.report.run import read_all

    if html and not Path(html).expanduser().absolute().parent.is_dir():
        raise RunError(f"--html={html}: there is no folder {Path(html).expanduser().parent}. Name another file.")
    runs = read_all(folders)
    target = Path(html).expanduser() if html else (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    if target.is_dir():
        raise RunError(f"--html={html}: is a folder. Name a file.")
    write_atomic(target, page.html(runs))
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
