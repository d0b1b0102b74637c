"""Is this node fit to train, and are the others of the run? What is wrong, why it matters, and how to put it right."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rich.console

from jaxtrain import distributed, launch
from jaxtrain.commands import spelled
from jaxtrain.config import Problem
from jaxtrain.launch import Loaded
from jaxtrain.metrics import write_atomic
from jaxtrain.preflight import deadline, live, names, report
from jaxtrain.preflight.bounded import GRACE_S, Unmeasured, within
from jaxtrain.preflight.check import Asked
from jaxtrain.preflight.live import COMMAND_S, Live
from jaxtrain.preflight.machine import Machine, Recorded, Recording, RecordingError
from jaxtrain.preflight.together import Part, preflight
from jaxtrain.validate.places import writable

LIMIT_S, MEET_S = 60, 300
ALLOW = "JAXTRAIN_PREFLIGHT_ALLOW"
INTERRUPTED = 130

HELP = """\
Is this node fit to train, and are the others of the run? Takes a minute at most, and changes nothing.

  python -m jaxtrain.preflight [--config=FILE[:variant]] [--config.KEY=VALUE ...] [--workdir=DIR] [options]

  --config, --workdir ...  the run it is for: its places, its environment. Takes all that jaxtrain.main takes, of several
                           processes too: every node is looked at, and all come to one verdict
  --json[=FILE]            everything that was found, for programs; without FILE on the terminal, in place of the table
  --allow=NAME,...         checks whose fault is only noted, as 'NUMA balancing' where the kernel is not yours; without it,
                           those that the variable JAXTRAIN_PREFLIGHT_ALLOW names. The verdict says which were allowed
  --no-measure             ask only: no GEMM, no collective, no file written
  --limit={limit}               seconds for all of it; what does not fit is 'not measured'
  --meet={meet}               seconds for the other processes to come, before that
  --record=DIR             also keep what this node answered, to be judged elsewhere or sent in. No secrets: variables that
                           change a run, and no others
  --recorded=DIR           judge such a folder instead of this node
  --help                   this text

  python -m jaxtrain.preflight
  python -m jaxtrain.preflight --config=configs/llama3_8b.py --workdir=runs/first
  python -m jaxtrain.preflight --recorded=tests/recorded/faults/phb_link

Exit codes: 0 fit, or there is no GPU; 3 a fault, on this node or another of the run; 75 a process of the run did not come, or
was lost: try again; 2 the command or config is wrong.
"""

OPTIONS = {
    **dict.fromkeys(("workdir", "replay", "record", "recorded", "allow"), ""),
    "limit": str(LIMIT_S),
    "meet": str(MEET_S),
    **dict.fromkeys(distributed.FIELDS, ""),
}
SWITCHES = {"json": "-", "no-measure": "yes", "explain": "text"}


def main(argv: Sequence[str] | None = None, own_process: bool = False) -> int:
    """Runs the command line and returns its exit code. own_process: this process is there for nothing else."""
    began = time.monotonic()
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(spelled(HELP.format(limit=LIMIT_S, meet=MEET_S)), end="")
        return 0
    loaded = launch.load(argv, OPTIONS, SWITCHES)
    alone = distributed.detect(loaded.options, os.environ)[0] is None
    limits = ("limit",) if alone else ("limit", "meet")
    limit = sum(float(loaded.options[name]) for name in limits if loaded.options[name].isdecimal())

    def leave() -> None:
        live.end_commands()
        distributed.leave(report.CODES[report.FAULTY])

    in_time = deadline.guarded(limit, leave)
    with in_time if own_process else contextlib.nullcontext():
        return answered(loaded, argv, began, own_process)


def answered(loaded: Loaded, argv: Sequence[str], began: float, own_process: bool) -> int:
    """Looks, tells, and returns the exit code."""
    options = loaded.options
    cluster, wrong = distributed.detect(options, os.environ)
    if problems := [*loaded.problems, *wrong, *options_wrong(loaded)]:
        return launch.report(problems)
    limit = float(options["limit"])
    try:
        machine = machine_of(loaded, limit)
        said, wrong = distributed.detect(options, machine.environ()) if options["recorded"] else (cluster, [])
        if wrong:
            return launch.report(wrong)
        for_a_run = any(arg.startswith("--config") for arg in argv)
        asked = Asked(loaded.run, places(loaded), said, for_a_run)
        left_out = "--no-measure" if options["no-measure"] else "the recording has no figure" if options["recorded"] else ""
        nodes = preflight(Part(machine, asked, cluster, began + limit, left_out, float(options["meet"])))
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped.", file=sys.stderr)
        return INTERRUPTED
    except RecordingError as error:
        return launch.report([Problem("--recorded", options["recorded"], str(error), "Name a folder that --record made.")])
    finally:
        live.end_commands()
    report.allow(nodes, allowed(loaded)[1])
    found = report.as_json(nodes, time.monotonic() - began)
    if cluster is None or cluster.process_id == 0:
        tell(nodes, found, options["json"])
    if cluster is not None and own_process:
        distributed.leave(found["exit_code"])  # Python's own way out waits for the others
    return found["exit_code"]


def options_wrong(loaded: Loaded) -> list[Problem]:
    """What is wrong with the command line itself."""
    options, found = loaded.options, []
    for name, usual in (("limit", LIMIT_S), ("meet", MEET_S)):
        if not options[name].isdecimal() or int(options[name]) < 1:
            rule = "must be a whole number of seconds, 1 or more"
            found.append(Problem(f"--{name}", options[name], rule, f"For example --{name}={usual}."))
    for name in ("record", "recorded", "json"):  # a variable of the shell that is empty, most often
        if f"--{name}=" in loaded.launch.argv:
            found.append(Problem(f"--{name}", "", "names nothing", f"Name a place, or leave --{name} out."))
    found += names.unknown(*allowed(loaded))
    if options["no-measure"] not in ("", "yes"):
        found.append(Problem("--no-measure", options["no-measure"], "takes no value", "Write --no-measure."))
    if options["record"] and options["recorded"]:
        found.append(
            Problem("--record", options["record"], "there is no node to record with --recorded", "Leave one of them out.")
        )
    if options["record"]:
        found += may_write("--record", Path(options["record"]).expanduser())
    if options["json"] not in ("", "-"):
        file = Path(options["json"]).expanduser()
        found += may_write("--json", file.parent) or may_write("--json", file, folder=False)
    return found


def allowed(loaded: Loaded) -> tuple[str, list[str]]:
    """Who names the checks whose faults are only noted, the option or the variable, and their names."""
    given = loaded.options["allow"]
    text = given or os.environ.get(ALLOW, "")
    return "--allow" if given else ALLOW, [name.strip() for name in text.split(",") if name.strip()]


def may_write(key: str, place: Path, folder: bool = True) -> list[Problem]:
    """What is wrong with writing there; a file system that hangs is."""

    def ask() -> list[Problem]:
        if folder:
            return writable(key, place)
        return [Problem(key, str(place), "is a folder", "Name a file.")] if place.is_dir() else []

    try:
        return within(GRACE_S, str(place), ask)
    except Unmeasured as error:
        return [Problem(key, str(place), str(error), "Name another place.")]


def machine_of(loaded: Loaded, limit_s: float) -> Machine:
    """The node to look at. Raises RecordingError."""
    options = loaded.options
    if options["recorded"]:
        return Recorded(Path(options["recorded"]).expanduser())
    live = Live(places(loaded), min(COMMAND_S, limit_s / 2))
    return Recording(live, Path(options["record"]).expanduser()) if options["record"] else live


def places(loaded: Loaded) -> dict[str, str]:
    """Where the run's state is: name -> folder or bucket, "" for none."""
    run = loaded.run
    workdir = Path(loaded.options["workdir"] or Path("runs") / loaded.launch.name)
    return {
        "data": run.paths.data,
        "checkpoints": run.checkpoint.dir or str(workdir / "checkpoints"),
        "cache": run.paths.cache,
    }


def tell(nodes: list[report.NodeReport], found: dict, where: str) -> None:
    """The table to the terminal, or JSON to a file or in the table's place."""
    if where == "-":
        print(json.dumps(found, indent=1))
        print(report.last_line(nodes), file=sys.stderr)
        return
    if where:
        file = Path(where).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(found, indent=1) + "\n")
    console = rich.console.Console()
    report.show(nodes, console if console.is_terminal else rich.console.Console(width=report.WIDTH))


if __name__ == "__main__":
    sys.exit(main(own_process=True))
