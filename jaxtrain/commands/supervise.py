"""The supervisor's command line, which run.sh calls: `python -m jaxtrain.commands.supervise main|preflight [arguments]`."""

import os
import sys

from jaxtrain.runtime.messages import End, say
from jaxtrain.runtime.options import Options
from jaxtrain.runtime.supervisor import Supervisor


def main(argv: list[str]) -> int:
    """Run `main` (training) or `preflight` under the supervisor. Returns: the exit code."""
    try:
        command, *words = argv
        supervisor = Supervisor(Options(words), os.environ)
        return supervisor.train() if command == "main" else supervisor.preflight()
    except End as end:
        if str(end):
            say(str(end))
        return end.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
