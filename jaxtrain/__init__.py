"""jaxtrain: a JAX SPMD trainer with named-axis sharding. Importing it touches no device and imports no jax.

This file runs on Python 3.8 too, so that a start outside the environment ends with a sentence.
"""

import importlib.util
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
        print(problem, file=sys.stderr)
        sys.exit(2)
    raise ImportError(problem)


_check_environment()
