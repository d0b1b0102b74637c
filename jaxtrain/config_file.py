"""Running a config file: a Python program of the user, which may import modules beside it."""

import contextlib
import importlib.machinery
import os
import sys
import traceback
import types
import zlib
from collections.abc import Iterator, Sequence
from importlib.machinery import FileFinder, ModuleSpec
from pathlib import Path

NAME = "jaxtrain_config_file_"
STDLIB = os.path.join(os.path.dirname(os.__file__), "")
PACKAGE = os.path.join(os.path.dirname(__file__), "")


def run(file: Path) -> types.ModuleType:
    """Run a config file and return its module. Call it within `beside(file)`. Raises whatever the file raises.

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
def beside(file: Path) -> Iterator[None]:
    """Let a config file import modules of its own folder, as a script does, and of the current folder.

    For files of these folders, such a module comes before an installed one of its name, but not before one of Python's library.
    After the block these modules are forgotten, since another config file may have its own of the same name.
    """
    folders = _folders(file)
    finder, before = _Finder(folders), list(sys.path)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_elsewhere(name, folders[:-1])}
    known = set(sys.modules)
    added = [folder for folder in folders if folder not in before]
    sys.meta_path.insert(0, finder)
    sys.path += added  # for packages without __init__.py, of which other folders may have parts
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for folder in added:
            sys.path.remove(folder)
        new = [name for name in sys.modules if name not in known and not name.startswith(NAME)]
        tops = {name.partition(".")[0] for name in new}
        gone = {top for top in tops if any(os.path.dirname(path) in added for path in _places(top))}
        for name in new:
            if name.partition(".")[0] in gone:
                del sys.modules[name]
        sys.modules.update(hidden)


def where(error: BaseException, file: Path) -> str:
    """Return where an error arose: `line 3`, or `helper.py, line 3` in a module beside the config file; "" if elsewhere."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    for name, line in reversed(frames):
        if line and name == str(file.absolute()):
            return f"line {line}"
        if line and _is_own(name, _folders(file)):
            path, here = Path(name), Path.cwd()
            return f"{path.relative_to(here) if path.is_relative_to(here) else path}, line {line}"
    return ""


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module without writing a __pycache__ beside it."""

    def set_data(self, path: str, data: object, *, _mode: int = 0) -> None:
        pass


class _Finder:
    """Finds modules in `folders`, for import statements of files in these folders."""

    def __init__(self, folders: Sequence[str]):
        self.folders = folders

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module in the folders, or of a submodule of a package there. None: look elsewhere."""
        if path is None and (name in sys.stdlib_module_names or not _is_own(_importer(), self.folders)):
            return None
        for folder in self.folders if path is None else path:
            if path is None or _is_own(os.path.join(folder, ""), self.folders):
                spec = FileFinder(folder, (_Loader, [".py"])).find_spec(name)
                if spec is not None and spec.loader is not None:
                    return spec
        return None


def _folders(file: Path) -> list[str]:
    return [str(folder) for folder in dict.fromkeys((file.resolve().parent, file.absolute().parent, Path.cwd()))]


def _importer() -> str:
    """Return the file whose import statement is being executed."""
    frame = sys._getframe(1)
    inside = (__file__, "<frozen importlib", os.path.join(STDLIB, "importlib", ""))
    while frame.f_back and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return frame.f_code.co_filename


def _is_own(file: str, folders: Sequence[str]) -> bool:
    """Return whether a file is in one of these folders, and not part of jaxtrain, of Python or of an installed package."""
    installed = file.startswith((PACKAGE, STDLIB)) or {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not installed and any(file.startswith(os.path.join(folder, "")) for folder in folders)


def _places(top: str) -> list[str]:
    """Return the path of a top-level module in its folder: its file, or the folders of its package. []: none of these."""
    module = sys.modules.get(top)
    return list(getattr(module, "__path__", None) or filter(None, [getattr(module, "__file__", None)]))


def _is_elsewhere(name: str, folders: Sequence[str]) -> bool:
    """Return whether an imported module is of another folder, and has the name of one in these folders."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or not any(_is_own(path, [os.path.dirname(path)]) for path in _places(top)):
        return False
    theirs = [os.path.join(folder, each) for folder in folders for each in (f"{top}.py", top)]
    return not set(_places(top)) & set(theirs) and any(map(os.path.exists, theirs))
