"""`python -m jaxtrain COMMAND [...]` runs a command, each a file of commands/; without a command, it lists them."""

import importlib
import sys

from jaxtrain.config import commands


def main(argv: list[str]) -> int:
    """Run a command and return its exit code."""
    if not argv or argv[0] not in commands.command_table():
        return commands.main(argv)
    name, *words = argv
    module = importlib.import_module("jaxtrain.main" if name == "main" else f"jaxtrain.commands.{name}")
    return getattr(module, "start", module.main)(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
