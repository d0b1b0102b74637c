"""`python -m jaxtrain.profile RUN`: where the time of a step went, from a trace."""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxtrain.commands import spelled

WIDTH = 128  # of the report where the output is not a terminal
EPILOG = """\
A trace: --config.profile.start=STEP of a run, or SIGUSR2 to a running one (kill -USR2 PID), which takes one of the next
profile.steps steps each time. A trace of a CPU is read as well as one of a GPU.

  python -m jaxtrain.profile runs/first
  python -m jaxtrain.profile runs/first --html=profile.html
  python -m jaxtrain.profile runs/second --diff=runs/first
  python -m jaxtrain.profile runs/first --list

RUN may also be a trace's folder or file (*.xplane.pb), or a dump of a program without a trace: HLO text as profile.dump_hlo and
python -m jaxtrain.plan --hlo write it, or *.hlo.pb as XLA dumps it, which holds memory too.

Exit codes: 0 done; 2 the command is wrong, or there is no trace that can be read; 1 a file was not written, or xprof failed;
130 Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(
        spelled("python -m jaxtrain.profile"),
        description="Where the time of a step went, from a trace.",
        epilog=spelled(EPILOG),
        formatter_class=raw,
    )
    p.add_argument("target", metavar="RUN", type=Path, help="a run's folder, a trace, or a program's dump")
    p.add_argument("--list", action="store_true", help="list the traces, and stop")
    p.add_argument("--trace", type=int, default=0, metavar="N", help="which trace of --list; default: the newest")
    p.add_argument("--diff", type=Path, metavar="OTHER", help="what became slower and faster since OTHER, a run or a trace")
    p.add_argument("--json", type=Path, metavar="FILE", help="everything that was found, for programs")
    p.add_argument("--html", type=Path, metavar="FILE", help="one page with pictures")
    p.add_argument("--xprof", action="store_true", help="instead: open the trace in xprof")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    args = parser().parse_args(argv)
    # A trace is read without any device; a GPU that is present may be busy with the very run that is looked at.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxtrain.plan.program.hlo import HloError
    from jaxtrain.profile.trace import TraceError

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    try:
        return run(args, console)
    except (TraceError, HloError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped.", file=sys.stderr)
        return 130


def run(args: argparse.Namespace, console: Console) -> int:
    """Everything after the command line has been read."""
    from jaxtrain.profile import load, report
    from jaxtrain.profile.diff import diff
    from jaxtrain.profile.page import html
    from jaxtrain.profile.result import to_json

    target = args.target.expanduser()
    if dumped := load.dump_in(target):
        if given := [f"--{name}" for name in ("list", "trace", "diff", "html", "xprof") if getattr(args, name)]:
            raise ValueError(f"{dumped} is a program's dump, and no trace: {', '.join(given)} needs a trace")
        program = load.dump(dumped, load.run_around(target))
        if args.json:
            _write(args.json, json.dumps(dataclasses.asdict(program), indent=1) + "\n")
        report.summary(program, console)
        return 0
    traces = load.traces(target)
    if args.list:
        for n, path in enumerate(traces, 1):
            print(f"{n}  {path.parent.name}  {path.stat().st_size / 1e6:,.1f} MB  {path}")
        return 0
    if not 0 <= args.trace <= len(traces):
        raise ValueError(f"--trace={args.trace}: {target} has {len(traces)}; name one of --list, from 1")
    path = traces[args.trace - 1]
    if args.xprof:
        return open_xprof(path)
    found = load.profile(path, load.run_around(target))
    changed = None
    if args.diff:
        other = args.diff.expanduser()
        changed = diff(load.profile(load.traces(other)[-1], load.run_around(other)), found)
    if args.json:
        _write(args.json, json.dumps(to_json(found, changed), indent=1) + "\n")
    if args.html:
        _write(args.html, html(found, changed))
    report.text(found, console)
    if changed:
        report.changes(changed, console)
    return 0


def _write(path: Path, text: str) -> None:
    path.expanduser().write_text(text, encoding="utf-8")


def open_xprof(path: Path) -> int:
    """xprof's own pages of a trace, until Ctrl-C. Raises ValueError where it is not installed."""
    beside = Path(sys.executable).with_name("xprof")
    command = str(beside) if beside.exists() else shutil.which("xprof")
    if command is None:
        raise ValueError(
            "--xprof: xprof is not installed. It brings many packages, so give it an environment of its own: "
            "python -m venv xprof-env && xprof-env/bin/pip install xprof; and put xprof-env/bin on PATH."
        )
    # xprof looks for LOGDIR/plugins/profile/*/*.xplane.pb.
    logdir = next(
        (p.parent.parent for p in path.resolve().parents if p.name == "profile" and p.parent.name == "plugins"), path.parent
    )
    return 1 if subprocess.call([command, "--logdir", str(logdir)]) else 0


if __name__ == "__main__":
    sys.exit(main())
