"""Which code ran: the commit, what was changed since, and the SHA-256 of every file of it."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import flatten

PATCH_MOST = 200_000  # characters of a patch that are kept; a receipt is read by people, and written anew at every save


def source(package: Path, config_file: Path | None = None, own: Iterable[Path] = ()) -> dict[str, Any]:
    """The source of this process.

    package: the folder of jaxtrain. own: files that the config names as package.module:name. Returns `commit` and `dirty` (null
    where the code is not tracked by git; `error` says why git could not tell), `patch` (from the commit to the files as they
    are, the package and the configs first), `patch_cut` (characters left out at its end), `files` (path from the repository's
    root -> SHA-256), `config_file` and `own` (their names among `files`).
    """
    root = package.resolve().parent
    found: dict[str, Any] = {"commit": None, "dirty": None, "patch": "", "patch_cut": 0, **(git_state(package) or {})}
    if found["dirty"]:
        whole = _patch(root, package.name)
        found |= {"patch": whole[:PATCH_MOST], "patch_cut": max(0, len(whole) - PATCH_MOST)}
    ours = sorted(package.resolve().rglob("*.py"))
    others = [path.resolve() for path in ([config_file] if config_file else []) + list(own)]
    digests = {_name(path, root): hashlib.sha256(path.read_bytes()).hexdigest() for path in [*ours, *others] if path.is_file()}
    names = [_name(path, root) for path in others if path.is_file()]
    configs = names[:1] if config_file and config_file.is_file() else []
    return found | {"files": digests, "config_file": configs[0] if configs else None, "own": names[len(configs) :]}


def _name(path: Path, root: Path) -> str:
    """From the root of the repository; a file that lies elsewhere by its own name, so that no folder of a user's is told."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def own_files(resolved: Mapping[str, Any]) -> list[Path]:
    """The files of those parts that a config names as package.module:name, as they have been imported by now.

    What these import in turn is not among them.
    """
    found = []
    for _, value in flatten(resolved):
        for name in re.findall(r"(?<![\w./])([A-Za-z_][\w.]*):[A-Za-z_]\w*", value) if isinstance(value, str) else ():
            file = getattr(sys.modules.get(name), "__file__", None)
            if file:
                found.append(Path(file))
    return list(dict.fromkeys(found))


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether tracked files differ from it; None where `folder`'s code is not tracked by git (an installed one).

    A git that is missing or refuses (a checkout owned by another user) is told as {"error": ...}.
    """
    try:
        head = _git(folder, "rev-parse", "HEAD")
        if head.returncode:
            return None if "not a git repository" in head.stderr else {"error": head.stderr.strip()}
        if _git(folder, "ls-files", "--error-unmatch", "__init__.py").returncode:
            return None  # a virtual environment inside somebody else's checkout
        status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


def _patch(root: Path, package: str) -> str:
    """From the commit to the tracked files as they are: first what runs, so that a cut takes the rest."""
    first = (package, "configs")
    parts = (first, (".", *(f":(exclude){name}" for name in first)))
    plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/")
    try:
        return "".join(_git(root, "diff", "HEAD", "--relative", *plain, "--", *paths).stdout for paths in parts)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"git diff failed: {error}\n"


def _git(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-c", "core.quotePath=false", "-C", str(folder), *args]
    # Its messages are read here, so not in the user's language; and to look must take no lock that somebody's commit needs.
    env = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False, env=env)
