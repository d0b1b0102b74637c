"""The command line of preflight: checks this node and, with several processes, the other nodes of the run."""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxtrain.commands.command import add_process_options, process_options, run_command
from jaxtrain.config import launch
from jaxtrain.config.command_line import Args, Invalid, Parser, output_file, place, whole
from jaxtrain.config.schema import Problem, nearest
from jaxtrain.metrics.files import write_atomic
from jaxtrain.node import inspection
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

ALLOW = "JAXTRAIN_PREFLIGHT_ALLOW"
LATE_S = 10.0  # after --limit, this process is ended; usually the own limit of each step ends it before
SAVE_S = 5.0  # time limit for writing a file or a recording
PACKAGE = Path(__file__).resolve().parents[1]


def json_file(text: str) -> str:
    """Return the path of --json, after a check that the file can be written; "-" is the terminal."""
    try:
        return text if text == "-" else call_with_timeout(ANSWER_S, text, lambda: output_file(text))
    except Unanswered as error:
        raise Invalid(str(error), "Name another file.") from error


def parser() -> Parser:
    """Return the parser of the command line."""
    p = Parser(
        "preflight",
        "Check this node, and with several processes the other nodes of the run. It takes a minute at most, "
        "and changes nothing.",
        config=True,
        examples=(
            "",
            "--config=configs/llama3_8b.py --workdir=runs/first",
            "--recorded=tests/recorded/faults/phb_link",
        ),
        notes="Exit codes: 0 fit, or there is no GPU; 3 a fault, on this node or another of the run; 75 a process of "
        "the run did "
        "not connect, or was lost: try again; 2 the command or config is wrong.",
    )
    p.option("workdir", "the run's folder, as of jaxtrain.main", "DIR", type=place)
    p.option(
        "json", "print all findings as JSON in place of the table, or write them to FILE", "FILE", const="-", type=json_file
    )
    p.option(
        "allow",
        "checks whose fault is only a note, as 'NUMA balancing' if the kernel is not yours; default: those of the variable "
        f"{ALLOW}. The verdict names them",
        "NAME,...",
    )
    p.option("no-measure", "read only: no matmul, no collective, no file is written")
    p.option(
        "limit",
        "seconds for everything, default 60; a check that does not fit is 'not measured'",
        "S",
        default=60,
        type=whole(1),
    )
    p.option("meet", "seconds for the other processes to connect, before that, default 300", "S", default=300, type=whole(1))
    p.option(
        "record",
        "also save the node's answers, to be checked elsewhere. No secrets: only variables that change a run",
        "DIR",
        type=place,
    )
    p.option("recorded", "check such a folder instead of this node", "DIR", type=place)
    add_process_options(p)
    p.option("replay", "accepted, as jaxtrain.main has it; without effect", "DIR")
    p.option("explain", "accepted, as jaxtrain.main has it; without effect", "FORM", const="text")
    return p


def main(argv: Sequence[str], own_process: bool = False) -> int:
    """Run the command and return its exit code.

    Args:
        own_process: whether this process only runs preflight, so that any thread may end the process.
    """
    began = time.monotonic()
    return run_command(parser(), argv, lambda args: run(args, began, own_process), check=check_options)


def run(args: Args, began: float, own_process: bool) -> int:
    """Check the node, print the report, and return the exit code."""
    nodes: list[Node] = []
    cluster, _ = distributed.detect(process_options(args), os.environ)
    total_s = args.limit + (args.meet if cluster else 0.0) + LATE_S
    with end_after(total_s, nodes) if own_process else contextlib.nullcontext():
        try:
            nodes.append(make_node(args))
            of_run, problems = distributed.detect(process_options(args), nodes[0].environ) if args.recorded else (cluster, [])
            if problems:
                return launch.report(problems)
            has_config = any(arg.startswith("--config") for arg in args.loaded.launch.argv)
            context = Context(nodes[0], args.loaded.run, run_paths(args), of_run, has_config)
            code = check_node(context, cluster, args, began, own_process)
        except RecordingError as error:
            return launch.report([Problem("--recorded", args.recorded, str(error), "Name a folder that --record made.")])
        finally:
            for node in nodes:
                node.close()
    if cluster is not None and own_process:
        distributed.leave(code)  # Python's own exit would wait for the other processes
    return code


def check_node(context: Context, cluster: Cluster | None, args: Args, began: float, own_process: bool) -> int:
    """Check a node together with the processes of its run, print the report, and return the exit code."""
    node = context.node

    def finish(reports: list[NodeReport]) -> int:
        report.allow(reports, allowed(args)[1])
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


def make_node(args: Args) -> Node:
    """Return the node to check: this node, or the recording of --recorded. Raises RecordingError."""
    if recorded := args.recorded:
        return RecordedNode(Path(recorded).expanduser())
    return LocalNode(run_paths(args), min(COMMAND_S, args.limit / 2))


def run_paths(args: Args) -> dict[str, str]:
    """Return name ("data", "checkpoints", "cache") -> folder or bucket of the run; "" if there is none."""
    run = args.loaded.run
    folder = Path(args.workdir or Path("runs") / args.loaded.launch.name)
    checkpoints = run.checkpoint.dir or str(folder / "checkpoints")
    return {"data": run.paths.data, "checkpoints": checkpoints, "cache": run.paths.cache}


# ---- the command line


def check_options(args: Args) -> list[Problem]:
    """Return problems that command_line does not check: process options, names of checks, and the folder of --record."""
    _, problems = distributed.detect(process_options(args), os.environ)
    problems += unknown_checks(*allowed(args))
    if args.record and args.recorded:
        problems.append(Problem("--record", args.record, "does not apply to --recorded", "Leave one of them out."))
    elif args.record:
        problems += refused_folder(Path(args.record).expanduser())
    return problems


def allowed(args: Args) -> tuple[str, list[str]]:
    """Return (option or variable that lists checks whose faults become notes, names of these checks)."""
    given = args.allow
    names = (given or os.environ.get(ALLOW, "")).split(",")
    return "--allow" if given else ALLOW, [name.strip() for name in names if name.strip()]


def unknown_checks(key: str, names: Sequence[str]) -> list[Problem]:
    """Return a problem for each name that is not the name of a check."""
    spelled = {name.lower(): name for name in inspection.CHECKS}
    rule = "no check with a fault that can be allowed has this name"
    unknown = [(name, spelled.get(name.lower())) for name in names if name not in inspection.CHECKS]
    return [
        Problem(key, n, rule, f"Did you mean {near}?" if near else nearest(n, sorted(inspection.CHECKS))) for n, near in unknown
    ]


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


def start(argv: Sequence[str]) -> int:
    """Run the command line as this process's only work, and return its exit code."""
    return main(argv, own_process=True)
