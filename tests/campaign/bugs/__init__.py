"""One-line bugs, one file of them for each part of the package. planted_bugs.py plants them."""

import importlib
import pkgutil
from typing import NamedTuple


class Bug(NamedTuple):
    """A line that is wrong."""

    name: str
    file: str  # below the root of the repository
    text: str  # occurs once in the file
    instead: str
    tests: str  # arguments of pytest, below tests/: files of unit/, proofs/ or gpu/


def all_bugs() -> list[Bug]:
    """Return every bug of every file beside this one."""
    modules = [importlib.import_module(f"bugs.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return [bug for module in modules for bug in module.BUGS]
