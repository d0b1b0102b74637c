"""Parts of a run from outside the package, `package.module:name`: their import, and the line of theirs that an error is from.

Imports no jax.
"""

import contextlib
import difflib
import importlib
import importlib.util
import linecache
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, TextIO

from jaxtrain.config.schema import ConfigError, Problem

SHOWN = 5  # calls named one by one
_loaded: dict[str, str] = {}  # package.module:name -> the key of the config that names it


class WrongPart(Exception):
    """A part from outside the package returned a value that jaxtrain cannot use."""

    def __init__(self, key: str, value: str, rule: str, remedy: str):
        self.problem = Problem(key, value, rule, remedy)
        super().__init__(str(self.problem))


@contextlib.contextmanager
def calling(key: str, value: str, form: str = "") -> Iterator[None]:
    """Let errors from a call of a part name the part. Does nothing for a value without `:`, which is jaxtrain's own part.

    form: the call, as "name(data, split)", for a part that takes other arguments.
    """
    try:
        yield
    except SystemExit as error:
        if ":" not in value:
            raise
        raise WrongPart(key, value, f"ends the process by sys.exit({error.code})", "Raise an error instead.") from error
    except Exception as error:
        if ":" in value and not hasattr(error, "own_part"):
            vars(error)["own_part"] = key, value, form
        raise


# ---- Import


def load_part(key: str, value: str) -> Any:
    """Return the object that `package.module:name` names, the value of a key of the config.

    Raises:
        ConfigError: there is no such module or name, or the module cannot be imported.
    """
    name, _, attribute = value.partition(":")
    _loaded[value] = key
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module is a program, and may raise anything
        raise ConfigError([_import_problem(key, value, error)]) from error
    if not hasattr(module, attribute):
        usable = [each for each, member in vars(module).items() if not isinstance(member, types.ModuleType)]
        near = difflib.get_close_matches(attribute, usable, 1)
        remedy = f"Fix: {key}={name}:{near[0]}." if near else "Correct the name."
        raise ConfigError([Problem(key, value, f"{module.__file__} defines no {attribute!r}", remedy)])
    part = getattr(module, attribute)
    if key != "model.family" and not callable(part):
        rule = f"is no function, but {type(part).__name__}"
        raise ConfigError([Problem(key, value, rule, "Name a function, as in docs/extending.md.")])
    return part


def check_module(key: str, value: str) -> Problem | None:
    """Return the problem if the module of `package.module:name` cannot be found. Imports its package, and not the module."""
    name = value.partition(":")[0]
    _loaded[value] = key
    try:
        if importlib.util.find_spec(name) is not None:
            return None
    except Exception as error:  # of its package
        return _import_problem(key, value, error)
    return _module_problem(key, value, name)


def _import_problem(key: str, value: str, error: BaseException) -> Problem:
    name = value.partition(":")[0]
    missing_module = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if not name or name.startswith(".") or (missing_module and f"{name}.".startswith(f"{missing_module}.")):
        return _module_problem(key, value, missing_module or name)
    rule = f"{name} cannot be imported: {_error_summary(error)}{_line_of(error)}"
    remedy = f"Install {missing_module}, or set PYTHONPATH to the folder that has it." if missing_module else "Correct it."
    return Problem(key, value, rule, remedy)


def _module_problem(key: str, value: str, missing_module: str) -> Problem:
    top = missing_module.partition(".")[0]
    remedy = f"Set PYTHONPATH to the folder that has {top}, or install it; the form is package.module:name."
    remedy = "Correct the name." if top in sys.modules and top != missing_module else remedy
    return Problem(key, value, f"module {missing_module!r} is not found", remedy)


# ---- Errors


def problem_of(error: BaseException) -> Problem | None:
    """Return the problem of a part from outside the package that raised an error; None if none of them did.

    The problem has the innermost line of the part's package in the traceback. An error of a class of jaxtrain names its own
    remedy, such as a layout that is not possible, and is no such problem.
    """
    if isinstance(error, WrongPart):
        return error.problem
    frames = _part_frames(error)
    if not isinstance(error, Exception):  # Ctrl-C is no error of the part in which it arrives
        return None
    if type(error).__module__.partition(".")[0] == "jaxtrain":
        return None
    if call := getattr(error, "own_part", None):
        key, value, form = call
        remedy = "Correct it." if frames or not form else f"It is called as {form}."
        return Problem(key, value, f"{_error_summary(error)}{_line_of(error)}", remedy)
    if not frames:
        return None
    names = [frame.f_globals["__name__"] for frame, _ in frames]
    called = {frame.f_code.co_name for frame, _ in frames}
    tops = {name.partition(".")[0] for name in names}
    candidates = [value for value in _loaded if value.partition(".")[0].partition(":")[0] in tops]

    def likeness(value: str) -> tuple[bool, bool]:
        module, _, attribute = value.partition(":")
        return module in names, attribute in called

    value = max(candidates, key=likeness)
    return Problem(_loaded[value], value, f"{_error_summary(error)}{_line_of(error)}", "Correct it.")


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raise ConfigError in place of an error of a part from outside the package, for code that handles errors of that type."""
    try:
        yield
    except Exception as error:
        if problem := problem_of(error):
            raise ConfigError([problem]) from error
        raise


def report_error(error: BaseException, stream: TextIO) -> bool:
    """Write an error of a part from outside the package, its own line first, and return True; False for any other error.

    The last calls in the part's package that led to that line follow, the innermost first.
    """
    problem = problem_of(error)
    if problem is None:
        return False
    print(f"error: {problem}", file=stream)
    for frame in list(reversed(_part_frames(error)[:-1]))[:SHOWN]:
        print(f"  called in {_describe_frame(*frame)}", file=stream)
    return True


def _part_frames(error: BaseException) -> list[tuple[types.FrameType, int]]:
    """Return (frame, line) of each call in the traceback that is in the package of a loaded part, the outermost first."""
    tops = {value.partition(":")[0].partition(".")[0] for value in _loaded} - {"jaxtrain"}
    frames = traceback.walk_tb(error.__traceback__)
    return [(frame, line) for frame, line in frames if frame.f_globals.get("__name__", "").partition(".")[0] in tops]


def _line_of(error: BaseException) -> str:
    """Return file, line, function and text of the innermost own line of an error as text, or "" if it has none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" in {error.filename}:{error.lineno}: {(error.text or '').strip()}".rstrip(": ")
    frames = _part_frames(error)
    if not frames:
        return ""
    return f" in {_describe_frame(*frames[-1])}"


def _describe_frame(frame: types.FrameType, line: int) -> str:
    code = frame.f_code
    function = "" if code.co_name == "<module>" else f", in {code.co_name}"
    return f"{code.co_filename}:{line}{function}: {linecache.getline(code.co_filename, line).strip()}"


def _error_summary(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    message = error.msg if isinstance(error, SyntaxError) else str(error).strip() or "no message"
    return f"{type(error).__name__}: {message.splitlines()[0].rstrip('.')}"
