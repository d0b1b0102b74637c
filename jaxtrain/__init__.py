"""jaxtrain: a JAX SPMD trainer with named-axis sharding. Importing it touches no device and imports no jax.

This file runs on Python 3.8 too, so that a start outside the environment ends with a sentence.
"""

import importlib.util
import os
import signal
import sys

__version__ = "0.1.0"


def _check_environment() -> None:
    """Refuse a Python that jaxtrain does not run on.

    Raises:
        SystemExit: `python -m jaxtrain.COMMAND` was started there.
        ImportError: this package was imported there.
    """
    as_command = sys.argv[:1] == ["-m"]  # Python's own mark while it looks for the module to run.
    if sys.version_info < (3, 12):  # noqa: UP036
        key, rule = "Python = {}.{}.{}".format(*sys.version_info[:3]), "jaxtrain needs 3.12 or later"
    elif as_command and importlib.util.find_spec("ml_collections") is None:
        key, rule = "Python = " + sys.executable, "the packages of jaxtrain are not installed there"
    else:
        return
    problem = key + ": " + rule + ". Fix: ./run.sh COMMAND, which prepares the environment and starts the command in it."
    if as_command:
        print("error: " + problem, file=sys.stderr)
        sys.exit(2)
    raise ImportError(problem)


def end_interrupted(number: int, frame: object, stderr: int = 2) -> None:
    """Print one line and end this process: the handler of Ctrl-C until a command has work to bring to an end.

    A KeyboardInterrupt in its place would print a traceback, and imports of C libraries lose it.
    """
    os.write(stderr, b"interrupted\n")
    os._exit(130)


_check_environment()
is_command = sys.argv[:1] == ["-m"]  # this process was started as `python -m jaxtrain.COMMAND`
if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_interrupted)
