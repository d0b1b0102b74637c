"""`python -m jaxtrain.receipt show|list|diff|check`: what ran, and what differs between two runs. Touches no device."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxtrain.commands import spelled
from jaxtrain.receipt import words
from jaxtrain.receipt.compare import compare
from jaxtrain.receipt.golden import LOSS, MORE, SLOWER, check, keep, kept, passed, record
from jaxtrain.receipt.opened import Run, open_run, runs_in
from jaxtrain.receipt.stored import ReceiptError

WIDTH = 128  # of tables where the output is not a terminal
EPILOG = """\
RUN is a run's folder (--workdir of training) or a receipt file.

  python -m jaxtrain.receipt show runs/tiny
  python -m jaxtrain.receipt list runs
  python -m jaxtrain.receipt diff runs/first runs/second
  python -m jaxtrain.receipt check runs/first --save=golden.json
  python -m jaxtrain.receipt check runs/second golden.json

Exit codes: 0 done, of diff: nothing differs, of check: as good as the golden run; 1 something differs, is worse, or
is not proved; 2 the command is wrong, there is no receipt that can be read, or RUN is none to save as a golden one.
"""
ABOUT = {
    "show": "what ran, on what, how fast, and how it ended",
    "list": "one line for each run; a folder of runs stands for all in it",
    "diff": "what differs between two runs that can explain other results or another speed, and what came of it",
    "check": "whether a run is as good as a golden one, which `show` tells from then on; --save writes the golden one",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        spelled("python -m jaxtrain.receipt"),
        description="What ran, and what differs between two runs.",
        epilog=spelled(EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="command", required=True)
    made = {name: commands.add_parser(name, help=text, description=text) for name, text in ABOUT.items()}
    made["show"].add_argument("run", metavar="RUN")
    made["list"].add_argument("runs", metavar="RUN", nargs="+")
    made["diff"].add_argument("a", metavar="A")
    made["diff"].add_argument("b", metavar="B")
    c = made["check"]
    c.add_argument("run", metavar="RUN")
    c.add_argument("golden", metavar="GOLDEN", nargs="?", help="a golden receipt, or a run's folder")
    c.add_argument("--save", metavar="FILE", type=Path, help="instead: write RUN's golden receipt")
    c.add_argument("--slower", metavar="PERCENT", type=float, default=SLOWER, help=f"a step may take longer by; {SLOWER:g}")
    c.add_argument("--more-memory", metavar="PERCENT", type=float, default=MORE, help=f"the peak may grow by; {MORE:g}")
    c.add_argument(
        "--loss",
        metavar="PERCENT",
        type=float,
        help=f"a loss may differ by; default: by nothing on the same hardware, versions and layout, by {LOSS:g} on others",
    )
    for name in ("diff", "check"):
        made[name].add_argument("--json", action="store_true", help="for programs")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    p = parser()
    args = p.parse_args(argv)
    if args.command == "check" and (args.golden is None) == (args.save is None):
        p.error("check needs a GOLDEN to compare with, or --save=FILE to write one, and not both")
    # Checkpoints are verified without any device; a GPU that is present may be busy with the very run that is looked at.
    os.environ["JAX_PLATFORMS"] = "cpu"
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    try:
        return run(args, console)
    except (ReceiptError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, console: Console) -> int:
    """Everything after the command line has been read."""
    if args.command == "list":
        words.listed([_opened(path) for path in runs_in(args.runs)], console)
        return 0
    if args.command == "show":
        words.show(open_run(args.run), console)
        return 0
    if args.command == "diff":
        found = compare(open_run(args.a), open_run(args.b))
        if args.json:
            print(json.dumps(found.record(), indent=1))
        else:
            words.compared(found, console)
        return 0 if found.same else 1
    one = open_run(args.run)
    if args.save:
        args.save.expanduser().write_text(json.dumps(kept(one), indent=1) + "\n")
        console.print(f"golden receipt of {one.name}: {args.save}", highlight=False, markup=False, soft_wrap=True)
        return 0
    golden = open_run(args.golden)
    verdicts = check(one, golden, slower=args.slower, more_memory=args.more_memory, loss_tolerance=args.loss)
    found = record(verdicts, one, golden)
    if why := keep(found, one):
        print(f"note: {why}", file=sys.stderr)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        words.judged(verdicts, one.name, golden.name, console)
    return 0 if passed(verdicts) else 1


def _opened(path: Path) -> Run | tuple[str, str]:
    """A run for the list, or its name and why it cannot be read: one bad receipt must not hide the others."""
    try:
        found = open_run(path)
        _ = found.figures, found.goodput, found.losses
        return found
    except ReceiptError as error:
        return path.name, str(error)


if __name__ == "__main__":
    sys.exit(main())
