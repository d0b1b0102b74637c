"""One-line bugs, in a file for each part of the package. planted_bugs.py plants them."""

import importlib
import pkgutil
from typing import NamedTuple


class Bug(NamedTuple):
    """A wrong line for a file, and the tests that must fail while it is planted."""

    name: str
    file: str  # relative to the repository's root
    text: str  # occurs once in the file
    instead: str
    tests: str  # arguments of pytest, relative to tests/: files of unit/, proofs/, gpu/ or campaign/


def all_bugs() -> list[Bug]:
    """Return every bug of every file in this folder."""
    modules = [importlib.import_module(f"bugs.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return [bug for module in modules for bug in module.BUGS]
