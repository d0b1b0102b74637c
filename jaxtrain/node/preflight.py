"""Check this node, and the other nodes of its run: the work of `python -m jaxtrain preflight`."""

import contextlib
import dataclasses
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxtrain.config.command_line import Args
from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.metrics.files import write_atomic
from jaxtrain.node.facts import COMMAND_S, RecordingError, Unanswered, call_with_timeout, read_facts, read_recording
from jaxtrain.node.multi_node import Preflight
from jaxtrain.node.table import NodeContext
from jaxtrain.report import preflight as report
from jaxtrain.report.preflight import NodeReport
from jaxtrain.runtime import distributed
from jaxtrain.runtime.distributed import Cluster

LATE_S = 10.0  # after --limit, this process is ended; usually the own limit of each step ends it before
SAVE_S = 5.0  # time limit for writing a file or a recording
PACKAGE = Path(__file__).resolve().parents[1]


def run_preflight(
    args: Args, options: Mapping[str, str], cluster: Cluster | None, allowed: Sequence[str], own_process: bool
) -> int:
    """Check the node, print the report, and return the exit code.

    Args:
        args: the command line of `python -m jaxtrain preflight`.
        options: its options of a process, as `distributed.detect` takes them.
        cluster: the processes of this run.
        allowed: names of checks whose faults are only notes.
        own_process: whether this process only runs preflight, so that any thread may end the process.

    Raises:
        ConfigError: the recording cannot be read.
    """
    began = time.monotonic()
    total_s = args.limit + (args.meet if cluster else 0.0) + LATE_S
    with end_after(total_s) if own_process else contextlib.nullcontext():
        code = check_node(read_context(args, options, cluster), cluster, args, allowed, began, own_process)
    if cluster is not None and own_process:
        distributed.leave(code)  # Python's own exit would wait for the other processes
    return code


def read_context(args: Args, options: Mapping[str, str], cluster: Cluster | None) -> NodeContext:
    """Read this node, or the recorded one. Raises ConfigError."""
    paths = run_paths(args)
    if args.recorded:
        try:
            facts = read_recording(Path(args.recorded).expanduser())
        except RecordingError as error:
            fix = "Name a folder that --record made."
            raise ConfigError([Problem("--recorded", args.recorded, str(error), fix)]) from error
        cluster, problems = distributed.detect(options, facts.environ)
        if problems:
            raise ConfigError(problems)
    else:
        facts = read_facts(paths, min(COMMAND_S, args.limit / 2))
    has_config = any(arg.startswith("--config") for arg in args.loaded.launch.argv)
    return NodeContext(facts, args.loaded.run, paths, cluster, has_config)


def check_node(
    context: NodeContext, cluster: Cluster | None, args: Args, allowed: Sequence[str], began: float, own_process: bool
) -> int:
    """Check a node together with the processes of its run, print the report, and return the exit code."""

    def finish(reports: list[NodeReport]) -> int:
        report.allow(reports, allowed)
        saved, file = True, args.json
        if cluster is None or cluster.process_id == 0:
            text = json.dumps(report.as_json(reports, time.monotonic() - began), indent=1)
            if file == "-":
                print(text)
                print(report.last_line(reports), file=sys.stderr)
            else:
                report.show_report(reports)
                saved = not file or save("--json", file, lambda path: write_atomic(path, text + "\n"))
        elif report.is_incomplete(reports):  # process 0, which usually reports, may be lost
            report.show_report(reports)
        return report.exit_code(reports) or int(not saved)

    def end(reports: list[NodeReport]) -> None:
        distributed.leave(finish(reports))

    skip_reason = "--no-measure" if args.no_measure else "the recording has no figure" if args.recorded else ""
    left_s = args.limit - (time.monotonic() - began)
    on_lost = end if own_process else None
    preflight = Preflight(context, cluster, left_s, args.meet, bool(args.recorded), skip_reason, on_lost)
    try:
        reports = preflight.run()
        code = finish(reports)
        if args.record:
            local_report = next((each for each in reports if each.host == context.facts.hostname), reports[0])
            facts = dataclasses.replace(context.facts, measured=local_report.measured)
            saved = save("--record", args.record, facts.save)
            code = code or int(not saved)
        preflight.close("a process is lost" if report.is_incomplete(reports) else "")
        return code
    except BaseException as error:
        preflight.close(str(error) or type(error).__name__)
        raise


@contextlib.contextmanager
def end_after(limit_s: float) -> Iterator[None]:
    """End this process with exit code 3 if the block takes longer than `limit_s`. Print the function that was running.

    The processes that it has started end with it (train/child.py).
    """
    waiting = threading.get_ident()

    def end() -> None:
        frames = traceback.extract_stack(sys._current_frames().get(waiting))
        package_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
        location = (
            f"{package_frames[-1].name} ({Path(package_frames[-1].filename).name}, line {package_frames[-1].lineno})"
            if package_frames
            else "no code of jaxtrain"
        )
        print(f"FAULT: preflight did not end within {limit_s:.0f} s; it was in {location}", file=sys.stderr)
        distributed.leave(report.EXIT_CODES[report.FAULTY])

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def save(option: str, value: str, write: Callable[[Path], object]) -> bool:
    """Call `write` with the path `value` of an option, print an error if it fails, and return whether it succeeded."""
    try:
        call_with_timeout(SAVE_S, value, lambda: write(Path(value).expanduser()))
    except (OSError, Unanswered) as error:
        print(f"error: {option} = {value!r}: {error}. Fix: Name another place.", file=sys.stderr)
        return False
    return True


def run_paths(args: Args) -> dict[str, str]:
    """Return name ("data", "checkpoints", "cache") -> folder or bucket of the run; "" if there is none."""
    run = args.loaded.run
    folder = Path(args.workdir or Path("runs") / args.loaded.launch.name)
    checkpoints = run.checkpoint.dir or str(folder / "checkpoints")
    return {"data": run.paths.data, "checkpoints": checkpoints, "cache": run.paths.cache}
