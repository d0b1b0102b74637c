"""The supervisor's command line, which run.sh calls to train: `python -m jaxtrain.commands.supervise [arguments]`."""

import os
import sys

from jaxtrain.runtime.supervisor import Exit, Supervisor, say


def main(argv: list[str]) -> int:
    """Train under the supervisor. Returns: the exit code."""
    try:
        return Supervisor(argv, os.environ).train()
    except Exit as end:
        if str(end):
            say(str(end))
        return end.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
