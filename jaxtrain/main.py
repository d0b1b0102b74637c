"""The command line of training: read the config, check everything, set the memory budget, and only then start JAX."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxtrain import explain, hardware, launch
from jaxtrain.config import ConfigError
from jaxtrain.startup import set_memory_budget, start_jax
from jaxtrain.validate import validate
from jaxtrain.validate.places import remote

INTERRUPTED = 130

HELP = """\
Train a language model, or go on training it: a workdir that holds checkpoints is resumed.

  python -m jaxtrain.main [--config=FILE[:variant]] [--config.KEY=VALUE ...] [--workdir=DIR] [--explain]

  --config=FILE[:variant]  a config file; default configs/tiny.py, which trains on a CPU in minutes.
                           Variants are the file's own: configs/llama3_8b.py:half
  --config.KEY=VALUE       set any key, as --config.train.steps=100; the last one wins
  --workdir=DIR            the run's folder; default runs/NAME of the config
  --explain                print every key, its value and who set it, check the config, and stop
  --explain=markdown       print docs/config.md, which describes every key
  --help                   this text

  configs: {configs}

  python -m jaxtrain.main
  python -m jaxtrain.main --config=configs/llama3_8b.py --config.train.steps=1000 --workdir=runs/first

Exit codes: 0 done; 2 the command or config is wrong, nothing was started or written; 75 start me again (preempted, or a
peer died); 76 diverged; 130 Ctrl-C, state saved; 1 anything else. SIGUSR2 takes a trace of the next profile.steps steps.
"""


def main(argv: Sequence[str] | None = None, own_process: bool = False) -> int:
    """Runs the command line and returns its exit code. own_process: see train.attempt."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        configs = sorted(p.stem for p in (launch.REPO / "configs").glob("*.py"))
        print(HELP.format(configs=", ".join(configs)), end="")
        return 0
    loaded = launch.load(argv, options={"workdir": ""}, switches={"explain": "text"})
    style = loaded.options["explain"]
    problems = list(loaded.problems)
    if style not in ("", "text", "markdown"):
        problems.append(launch.Problem("--explain", style, "no such style", "Write --explain or --explain=markdown."))
    if style == "markdown" and not problems:
        print(explain.markdown(), end="")
        return 0
    workdir = Path(loaded.options["workdir"] or Path("runs") / loaded.launch.name).expanduser()
    problems += remote("--workdir", loaded.options["workdir"])
    devices = hardware.probe()
    if loaded.file_read:
        problems += validate(loaded.run, devices, workdir)
    if style == "text":
        explain.text(loaded)
    if problems:
        return launch.report(problems)
    if style:
        return 0
    set_memory_budget(devices, loaded.run.train.memory_fraction)
    # Imported here: everything above must answer in a moment, and the memory budget must be set before jax is imported.
    start_jax(devices)
    try:
        from jaxtrain import train

        result = train.attempt(loaded.run, workdir, loaded.launch, own_process=own_process)
    except KeyboardInterrupt:  # in the seconds before the run listens to signals itself, and after
        print("\nCtrl-C: stopped.", file=sys.stderr)
        return INTERRUPTED
    return launch.report(result.error.problems) if isinstance(result.error, ConfigError) else result.exit_code


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # asks for a trace; before there are steps to trace it must end nothing
    sys.exit(main(own_process=True))
