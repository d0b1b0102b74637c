"""Running a config file: a Python program of the user, which may import modules beside it."""

import contextlib
import importlib.machinery
import os
import sys
import traceback
import types
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

NAME = "jaxtrain_config_file_"


def run_config_file(file: Path) -> types.ModuleType:
    """Run a config file and return its module. Call it within `sibling_imports(file)`. Raises whatever the file raises.

    The file is read as Python reads source: in UTF-8, or in the encoding that its first lines name. It is executed without
    being imported, so no __pycache__ appears next to it. The module stays in sys.modules, where dataclasses look for it.
    """
    path = file.absolute()
    module = types.ModuleType(f"{NAME}{zlib.crc32(os.fsencode(path)):08x}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    return module


@contextlib.contextmanager
def sibling_imports(file: Path) -> Iterator[None]:
    """Let a config file import modules of its own folder, as a script does, and of the current folder.

    Such a module comes before another of its name, but not before one of Python's library, or an installed one that is in use.
    After the block it is forgotten, since another config file may have its own of the same name. No __pycache__ appears.
    """
    finder, written = _Finder(_folders(file)), sys.dont_write_bytecode
    folders = {file.resolve().parent, file.absolute().parent}
    local_modules = {path.stem for folder in folders for path in folder.glob("*") if path.suffix == ".py" or path.is_dir()}
    same = [name for name in sys.modules if name.partition(".")[0] in local_modules - sys.stdlib_module_names]
    hidden = {name: sys.modules.pop(name) for name in same if not _is_installed(getattr(sys.modules[name], "__file__", ""))}
    sys.meta_path.insert(0, finder)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = written
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in finder.imported]:
            del sys.modules[name]
        sys.modules.update(hidden)


def error_location(error: BaseException, file: Path) -> str:
    """Return where an error arose: `line 3`, or `helper.py, line 3` in a module beside the config file; "" if elsewhere."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    for name, line in reversed(frames):
        if line and name == str(file.absolute()):
            return f"line {line}"
        if line and any(Path(name).is_relative_to(folder) for folder in _folders(file)) and not _is_installed(name):
            path, here = Path(name), Path.cwd()
            return f"{path.relative_to(here) if path.is_relative_to(here) else path}, line {line}"
    return ""


class _Finder:
    """Finds modules in `folders`, and notes the names of those it has `imported`."""

    def __init__(self, folders: Sequence[str]):
        self.folders, self.imported = folders, set[str]()

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module in the folders; None: look elsewhere."""
        if path is not None or name in sys.stdlib_module_names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, self.folders)
        if spec is not None and spec.loader is None:  # folders without __init__.py: a package elsewhere comes first
            spec = importlib.machinery.PathFinder.find_spec(name, [*self.folders, *sys.path])
        if spec is not None:
            self.imported.add(name)
        return spec


def _folders(file: Path) -> list[str]:
    return [str(folder) for folder in dict.fromkeys((file.resolve().parent, file.absolute().parent, Path.cwd()))]


def _is_installed(file: str | None) -> bool:
    """Return whether a file is part of jaxtrain, of Python's library or of an installed package. None: a built-in module."""
    if not file:
        return True
    roots = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__)
    return any(Path(file).is_relative_to(root) for root in roots) or bool(
        {"site-packages", "dist-packages"} & set(Path(file).parts)
    )
