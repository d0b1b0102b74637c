"""The command line of benchmarks: `python -m jaxtrain.bench --config=FILE`. What do the devices of this machine reach?"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import rich.console

from jaxtrain import hardware, launch
from jaxtrain.bench import kernels, peer, report, suite, sweep
from jaxtrain.bench.measure import DATA, TRACED
from jaxtrain.bench.parts import INTERRUPTED
from jaxtrain.commands import spelled
from jaxtrain.config import Problem
from jaxtrain.launch import Loaded
from jaxtrain.validate.places import writable

HELP = """\
What do the devices of this machine reach? Times the very program that training runs.

  python -m jaxtrain.bench [--config=FILE[:variant]] [--config.KEY=VALUE ...] [options]

  --config, --config.KEY   as for training
  --steps=20 --warmup=5    timed steps, and steps before them
  --data=synthetic|real    made-up tokens (default), or the config's own
  --devices=N              the first N devices; on a CPU, N of them. Default: all
  --limit=SECONDS          of a case, compiling included: no further step is begun after that. 0: no limit
  --trace                  with --out: also a trace of {traced} further steps, in DIR/traces/CASE
  --sweep='KEY=V,V;KEY=V'  every combination of these values, as --sweep='remat.policy=full,none;mesh.fsdp=4,8'.
                           What cannot be, or does not fit, is a row that says so
  --kernels[={kinds}]
                           instead: kernels against their floors, of arithmetic at the data sheet's peak and of bytes
  --suite=node             instead: is this node well, and what does it reach? At most 30 minutes; one folder to send in
  --parts=PART,...         of the suite: {parts}
  --smoke                  of the suite: tiny shapes. On a CPU always
  --peer=torch             also the same model and batch in PyTorch, in turns, and the ratio
  --peer-python=PATH       an interpreter with torch and transformers; default: this one
  --rounds=2               of the peer: how often each is measured, in turns
  --json=FILE              everything that was found, for programs
  --out=DIR                results.md, results.json, receipt.json and the output of every case
  --help                   this text

  python -m jaxtrain.bench --config=configs/llama3_8b.py --config.train.global_batch=32 --config.train.grad_accum=4
  python -m jaxtrain.bench --config=configs/llama3_8b.py:half --devices=1 --sweep='remat.policy=full,none'
  python -m jaxtrain.bench --kernels --out=runs/kernels
  python -m jaxtrain.bench --suite=node
  python -m jaxtrain.bench --config=configs/llama3_1b.py:gpus=1 --devices=1 --peer=torch

Every case runs in a process of its own. Exit codes: 0 measured, of a sweep at least one case; 1 nothing could be measured, or a
check of the suite failed; 2 the command or config is wrong, nothing was started; 130 Ctrl-C, what was done is kept.
"""

OPTIONS = {
    "steps": "20",
    "warmup": "5",
    "data": "synthetic",
    "devices": "0",
    "limit": "0",
    "rounds": "2",
    **dict.fromkeys(("sweep", "suite", "parts", "peer", "peer-python", "json", "out"), ""),
}
SWITCHES = {"kernels": ",".join(kernels.KINDS), "smoke": "yes", "trace": "yes"}
# Option -> the commands that it belongs to; "steps" is the one without a name.
BELONGS = {
    **dict.fromkeys(("config", "devices", "steps", "warmup", "limit"), ("steps", "sweep", "peer")),
    **dict.fromkeys(("data", "trace"), ("steps", "sweep")),
    "parts": ("suite",),
    "smoke": ("suite",),
    **dict.fromkeys(("peer-python", "rounds"), ("peer",)),
}


# Command -> what its exit code 1 means.
FAILURES = {
    **dict.fromkeys(("steps", "sweep"), "no case was measured"),
    "kernels": "a kernel failed",
    "peer": "one of the two could not be measured, or they do other work",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        text = HELP.format(kinds=",".join(kernels.KINDS), parts=", ".join(suite.PARTS), traced=TRACED)
        print(spelled(text), end="")
        return 0
    loaded = launch.load(argv, OPTIONS, SWITCHES)
    asked = next((name for name in ("suite", "kernels", "peer", "sweep") if loaded.options[name]), "steps")
    if wrong := options_wrong(loaded, asked):
        return launch.report([*(p for p in loaded.problems if p not in wrong), *wrong])
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=report.WIDTH)
    try:
        return run(loaded, asked, console)
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped; what was done is kept.", file=sys.stderr)
        return INTERRUPTED


def options_wrong(loaded: Loaded, asked: str) -> list[Problem]:
    """What is wrong with the command line itself, before anything is started."""
    options, found = loaded.options, [p for p in loaded.problems if p.key.startswith(("--", "argument"))]
    for name, least in (("steps", 1), ("warmup", 1), ("devices", 0), ("limit", 0), ("rounds", 1)):
        if not options[name].isdecimal() or int(options[name]) < least:
            rule = f"must be a whole number, {least} or more"
            found.append(Problem(f"--{name}", options[name], rule, f"For example --{name}={OPTIONS[name]}."))
    if options["data"] not in DATA:
        found.append(Problem("--data", options["data"], "no such data", f"Write {' or '.join(DATA)}."))
    if options["suite"] not in ("", "node"):
        found.append(Problem("--suite", options["suite"], "no such suite", "Write --suite=node."))
    if options["peer"] not in ("", "torch"):
        found.append(Problem("--peer", options["peer"], "no such peer", "Write --peer=torch."))
    for name in ("smoke", "trace"):
        if options[name] not in ("", "yes"):
            found.append(Problem(f"--{name}", options[name], "takes no value", f"Write --{name}."))
    if options["trace"] and not options["out"]:
        found.append(Problem("--trace", None, "there is no folder for it", "Add --out=DIR."))
    for name, known in (("kernels", kernels.KINDS), ("parts", suite.PARTS)):
        for value in filter(None, options[name].split(",")):
            if value not in known:
                found.append(Problem(f"--{name}", value, "no such part", f"Write some of {','.join(known)}."))
    if sum(bool(options[name]) for name in ("suite", "kernels", "peer")) > 1 or (asked != "sweep" and options["sweep"]):
        rule = "each of --suite, --kernels, --peer and --sweep is a command of its own"
        found.append(Problem("options", None, rule, "Give one of them."))
    if asked in ("suite", "kernels") and (problem := hardware.probe().problem):  # the others check a config with it
        found.append(problem)
    given = {arg[2:].partition("=")[0] for arg in loaded.launch.argv if arg.startswith("--")}
    given |= {"config"} if any(name.startswith("config.") for name in given) else set()
    useless = [f"--{name}" for name, commands in BELONGS.items() if name in given and asked not in commands]
    if useless:
        who = "the timing of steps" if asked == "steps" else f"--{asked}"
        found.append(Problem(" ".join(useless), None, f"{who} has no use for it", "Leave it out."))
    if options["json"]:
        path = Path(options["json"]).expanduser().absolute()
        if path.is_dir() or not path.parent.is_dir():
            rule = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            found.append(Problem("--json", options["json"], rule, "Name another file."))
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            found.append(Problem("--json", options["json"], "may not be written here", "Name another file."))
    if options["out"]:
        found += writable("--out", Path(options["out"]).expanduser())
    return found


def command(loaded: Loaded) -> list[str]:
    """Config file and overrides, as they stood on the command line."""
    at = loaded.launch
    file = f"{at.config_file}:{at.variant}" if at.variant else at.config_file
    return [f"--config={file}", *(f"--config.{key}={value}" for key, value in at.overrides)]


def run(loaded: Loaded, asked: str, console: rich.console.Console) -> int:
    """Everything after the command line has been read."""
    options = loaded.options
    if asked == "suite":
        return suite.run(options["out"], options["json"], options["parts"], bool(options["smoke"]), console)
    if asked == "kernels":
        return _kept(loaded, asked, lambda folder: kernels.run(options["kernels"].split(","), folder, console))
    count = int(options["devices"])
    ask: dict[str, int | None] = {"devices": count, "steps": int(options["steps"]), "warmup": int(options["warmup"])}
    ask |= {"limit_s": int(options["limit"]) or None, "trace": int(bool(options["trace"]))}
    if asked == "peer":
        base = [*command(loaded), *DATA["synthetic"], *peer.SAME_WORK]
        python, rounds = options["peer-python"] or sys.executable, int(options["rounds"])
        if wrong := [*sweep.refusals([sweep.Case("", tuple(base))], count).get("", []), *peer.refusal(base, count, python)]:
            return launch.report(wrong)
        return _kept(loaded, asked, lambda folder: peer.run(base, loaded.launch.name, python, rounds, ask, folder, console))
    found, wrong = sweep.cases([*command(loaded), *DATA[options["data"]]], loaded.launch.name, options["sweep"])
    refused = {} if wrong else sweep.refusals(found, count)
    if not wrong and len(refused) == len(found):
        wrong = [p for problems in refused.values() for p in problems]  # none of them can be: the command is wrong
    if wrong:
        return launch.report(wrong)
    return _kept(loaded, asked, lambda folder: sweep.run(found, refused, ask, folder, console))


def _kept(loaded: Loaded, kind: str, act: Callable[[report.Folder], int]) -> int:
    """Runs `act` with its folder, and closes that folder's receipt however it ends."""
    folder = report.Folder(loaded.options["out"], loaded.options["json"], kind)
    code, reason = 1, "ended by an exception"
    try:
        code = act(folder)
        reason = "done" if not code else FAILURES[kind]
    except KeyboardInterrupt:
        code, reason = INTERRUPTED, "Ctrl-C"
        raise
    finally:
        folder.finish(code, reason)
    return code


if __name__ == "__main__":
    sys.exit(main())
