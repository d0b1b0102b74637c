"""Check this node, and the other nodes of its run: the work of `python -m jaxtrain preflight`."""

import contextlib
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
from jaxtrain.node.multi_node import Preflight
from jaxtrain.node.node import (
    ANSWER_S,
    COMMAND_S,
    LocalNode,
    Node,
    RecordedNode,
    RecordingError,
    Unanswered,
    call_with_timeout,
    not_of_a_recording,
)
from jaxtrain.node.table import Context
from jaxtrain.report import preflight as report
from jaxtrain.report.preflight import NodeReport
from jaxtrain.runtime import distributed
from jaxtrain.runtime.distributed import Cluster
from jaxtrain.step.validate_places import writable

LATE_S = 10.0  # after --limit, this process is ended; usually the own limit of each step ends it before
SAVE_S = 5.0  # time limit for writing a file or a recording
PACKAGE = Path(__file__).resolve().parents[1]


def run(args: Args, options: Mapping[str, str], cluster: Cluster | None, allowed: Sequence[str], own_process: bool) -> int:
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
    nodes: list[Node] = []
    total_s = args.limit + (args.meet if cluster else 0.0) + LATE_S
    with end_after(total_s, nodes) if own_process else contextlib.nullcontext():
        try:
            paths = run_paths(args)
            nodes.append(
                RecordedNode(Path(args.recorded).expanduser())
                if args.recorded
                else LocalNode(paths, min(COMMAND_S, args.limit / 2))
            )
            of_run, problems = distributed.detect(options, nodes[0].environ) if args.recorded else (cluster, [])
            if problems:
                raise ConfigError(problems)
            has_config = any(arg.startswith("--config") for arg in args.loaded.launch.argv)
            context = Context(nodes[0], args.loaded.run, paths, of_run, has_config)
            code = check_node(context, cluster, args, allowed, began, own_process)
        except RecordingError as error:
            fix = "Name a folder that --record made."
            raise ConfigError([Problem("--recorded", args.recorded, str(error), fix)]) from error
        finally:
            for node in nodes:
                node.close()
    if cluster is not None and own_process:
        distributed.leave(code)  # Python's own exit would wait for the other processes
    return code


def check_node(
    context: Context, cluster: Cluster | None, args: Args, allowed: Sequence[str], began: float, own_process: bool
) -> int:
    """Check a node together with the processes of its run, print the report, and return the exit code."""
    node = context.node

    def finish(reports: list[NodeReport]) -> int:
        report.allow(reports, allowed)
        saved, file = True, args.json
        if cluster is None or cluster.process_id == 0:
            text = json.dumps(report.as_json(reports, time.monotonic() - began), indent=1)
            if file == "-":
                print(text)
                print(report.last_line(reports), file=sys.stderr)
            else:
                report.show(reports)
                saved = not file or save("--json", file, lambda path: write_atomic(path, text + "\n"))
        elif report.is_incomplete(reports):  # process 0, which usually reports, may be lost
            report.show(reports)
        return report.exit_code(reports) or int(not saved)

    def end(reports: list[NodeReport]) -> None:
        code = finish(reports)
        node.close()
        distributed.leave(code)

    skip_reason = "--no-measure" if args.no_measure else "the recording has no figure" if args.recorded else ""
    left_s = args.limit - (time.monotonic() - began)
    preflight = Preflight(context, cluster, left_s, args.meet, skip_reason, end if own_process else None)
    try:
        reports = preflight.run()
        code = finish(reports)
        if args.record and isinstance(node, LocalNode):
            own = next((each for each in reports if each.host == node.facts["hostname"]), reports[0])
            saved = save("--record", args.record, lambda path: node.save(path, own.measured))
            code = code or int(not saved)
        preflight.close("a process is lost" if report.is_incomplete(reports) else "")
        return code
    except BaseException as error:
        preflight.close(str(error) or type(error).__name__)
        raise


@contextlib.contextmanager
def end_after(limit_s: float, nodes: Sequence[Node]) -> Iterator[None]:
    """End this process with exit code 3 if the block takes longer than `limit_s`. Print the function that was running.

    Args:
        nodes: the nodes that the block uses. Their commands are killed at the limit.
    """
    waiting = threading.get_ident()

    def end() -> None:
        frames = traceback.extract_stack(sys._current_frames().get(waiting))
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
        where = f"{own[-1].name} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else "no code of jaxtrain"
        print(f"FAULT: preflight did not end within {limit_s:.0f} s; it was in {where}", file=sys.stderr)
        for node in nodes:
            node.close()
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


def refused_folder(folder: Path) -> list[Problem]:
    """Return the problems of a folder for a recording: other files in it, no write permission, or a hanging file system."""

    def look() -> list[Problem]:
        if others := not_of_a_recording(folder):
            rule = f"holds {', '.join(others[:3])}, which is no part of a recording"
            return [Problem("--record", str(folder), rule, f"Name a new folder, for example --record={folder / 'node'}.")]
        return writable("--record", folder)

    try:
        return call_with_timeout(ANSWER_S, str(folder), look)
    except (OSError, Unanswered) as error:
        return [Problem("--record", str(folder), str(error), "Name another folder.")]
