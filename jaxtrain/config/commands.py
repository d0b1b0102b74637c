"""The commands: their table, and how a user types them. For run.sh, this file also runs on Python 3.8 without packages."""

import difflib
import os
import sys

PREFIX = "JAXTRAIN_COMMAND_PREFIX"  # run.sh sets it to its own path as the user typed it
CONFIG = "--config=FILE"  # in a command that the remedy of a Problem names: config and overrides of the user's command line
TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "commands.txt")
RUN_SH_COMMANDS = ("test", "lint", "setup", "notebooks", "docs", "help")
OTHER_WORDS = {"train": "main", "evaluate": "lm_eval", "generate": "sample", "benchmark": "bench", "check": "preflight"}


def command_table() -> "dict[str, str]":
    """Return the purpose of each command, by name."""
    with open(TABLE, encoding="utf-8") as file:
        pairs = [line.rstrip("\n").partition(" ") for line in file]
    return {name: purpose.strip() for name, _, purpose in pairs}


def to_run_sh(text: str) -> str:
    """Return a text with `./run.sh COMMAND` in place of `python -m jaxtrain COMMAND` if run.sh started this process."""
    prefix = os.environ.get(PREFIX)
    return text.replace("python -m jaxtrain.main", prefix).replace("python -m jaxtrain ", prefix + " ") if prefix else text


def training_command(arguments: str) -> str:
    """Return the command that trains with these arguments: `./run.sh ARGUMENTS` if run.sh started this process."""
    prefix = os.environ.get(PREFIX)
    return " ".join([prefix or "python -m jaxtrain.main", *filter(None, [arguments])])


def main(argv: "list[str]") -> int:
    """Print the table; with an argument, print the command nearest to the argument instead. Return the exit code."""
    commands = command_table()
    unknown = [word for word in argv if word not in ("-h", "--help")]
    if not unknown:
        print("jaxtrain trains transformer language models on NVIDIA GPUs.\n")
        width = max(len(to_run_sh("python -m jaxtrain " + name)) for name in commands) + 2
        for name, purpose in commands.items():
            print("  " + to_run_sh("python -m jaxtrain " + name).ljust(width) + purpose)
        print("\nEach has its own --help.")
        return 0
    by_run_sh = bool(os.environ.get(PREFIX))
    names = [*commands, *OTHER_WORDS, *(RUN_SH_COMMANDS if by_run_sh else ())]
    nearest = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.7)
    fix = "one of " + ", ".join(commands)
    if nearest:
        command = OTHER_WORDS.get(nearest[0], nearest[0])
        fix = training_command("--config=FILE") if command == "main" else to_run_sh("python -m jaxtrain " + command)
    elif unknown[0].endswith(".py"):
        fix = training_command("--config=" + unknown[0])
    print("error: command = {!r}: is unknown. Fix: {}.".format(unknown[0], fix), file=sys.stderr)  # noqa: UP032
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
