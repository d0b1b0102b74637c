"""`python -m jaxtrain profile RUN`: the time of a step, from a trace."""

import os
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import Args, Parser, at_least, make_console, output_file, path_text
from jaxtrain.metrics.files import write_output
from jaxtrain.runtime.startup import quiet

WIDTH = 128


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser(
        "profile",
        "Show what makes a step slow, and its time by kind, part of the model and operation, from a trace. "
        "--config.profile.start=STEP of a run takes a trace, or SIGUSR2 to a running one (kill -USR2 PID). To see a trace as a "
        "timeline, open the file .trace.json.gz beside it at https://ui.perfetto.dev, or give --xprof.",
        modes=("list", "xprof"),
        examples=(
            "runs/first",
            "runs/first --html=profile.html",
        ),
        notes="Exit codes: 0 done; 2 the command line is wrong, or the trace cannot be read; 1 a file was not "
        "written, or xprof "
        "failed; 130 Ctrl-C.",
    )
    cli.argument("run", "a run's folder, or a trace: its folder or *.xplane.pb", "RUN", type=path_text)
    cli.option("list", "list the traces, and stop")
    cli.option("trace", "the trace with this number in --list; default the newest", "N", type=at_least(1), modes=("", "xprof"))
    cli.option("json", "write the profile as JSON", "FILE", type=output_file, modes=("",))
    cli.option("html", "write the report as a page", "FILE", type=output_file, modes=("",))
    cli.option("xprof", "open the trace in xprof instead")
    return cli


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # the traced run may still use the GPU
    return run_command(parser(), argv, act, errors=(ValueError,))  # TraceError and HloError are subclasses of ValueError


def act(args: Args) -> int:
    """Run the mode of the command line: list the traces (--list), open a trace in xprof (--xprof), or report a trace."""
    with quiet():  # jax's libraries print a warning about a missing driver when they are loaded
        import jax.profiler  # noqa: F401 - loads them

        from jaxtrain.report import profile, profile_trace
        from jaxtrain.report.run import read_run

    target = Path(args.run).expanduser()
    traces = profile_trace.find_traces(target)
    if args.mode == "list":
        for n, path in enumerate(traces, 1):
            print(f"{n}  {path.parent.name}  {path.stat().st_size / 1e6:,.1f} MB  {path}")
        return 0
    number = args.trace or len(traces)
    if number > len(traces):
        raise ValueError(
            f"--trace = {number}: the last trace of {target} is {len(traces)}. Fix: --trace={len(traces)}, or see --list."
        )
    path = traces[number - 1]
    if args.mode == "xprof":
        return profile_trace.open_xprof(path)
    folder = profile_trace.run_folder(target)
    step_profile = profile.load_profile(path, read_run(folder) if folder else None)
    for file, make in ((args.json, profile.to_json), (args.html, profile.make_html)):
        if file:
            write_output(file, make(step_profile))
    profile.print_profile(step_profile, make_console(WIDTH))
    return 0
