"""The test files that a change touches: those that import a changed file, or import what imports it, or name it."""

import ast
import functools
import subprocess
from collections.abc import Iterable
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SOURCES = ("jaxtrain", "configs", "benchmarks", "tests")
TESTS = ("unit", "proofs", "gpu")


def changed_files(base: str) -> list[Path]:
    """Return the files that differ from the commit `base`, new ones among them, relative to the repository.

    base: "" means the last commit, or the one before it where nothing differs from the last.
    """

    def lines(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=REPO, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    new = lines("ls-files", "--others", "--exclude-standard")
    names = lines("diff", "--name-only", base or "HEAD") + new
    return [Path(name) for name in names or lines("diff", "--name-only", base or "HEAD~1")]


@functools.cache
def imports(file: Path) -> frozenset[Path]:
    """Return the files of the repository that a Python file imports, anywhere in it."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {module for alias in node.names if (module := module_file(alias.name))}
        elif isinstance(node, ast.ImportFrom):
            inside = ".".join(file.relative_to(REPO).parent.parts) if node.level else ""
            package = ".".join(part for part in (inside, node.module) if part)
            for alias in node.names:  # a module of the package, or a name that the package defines
                module = module_file(f"{package}.{alias.name}") or module_file(package)
                found |= {module} if module else set()
    return frozenset(found)


def module_file(name: str) -> Path | None:
    """Return the file of a module of the repository; None for other modules."""
    for folder in (REPO, REPO / "tests", REPO / "tests" / "proofs", REPO / "tests" / "campaign"):
        path = folder / name.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def distances(start: Path) -> dict[Path, int]:
    """Return the files that a file imports, each with the number of imports on the shortest way to it; 0 is the file itself."""
    distance, edge = {start: 0}, [start]
    while edge:
        nearer, edge = edge, []
        for file in nearer:
            for other in imports(file) - distance.keys():
                distance[other] = distance[file] + 1
                edge.append(other)
    return distance


def touched(files: Iterable[Path]) -> dict[Path, int]:
    """Return the test files that changed files touch, each with its distance in imports; the nearest come first.

    A file that is read or run, not imported (a page, a script, a config), counts as imported by the Python files that have its
    name in them.
    """
    files = [*files]
    python = {REPO / file: 0 for file in files if file.suffix == ".py"}
    if names := [file.name for file in files if file.suffix != ".py" or file.parts[0] not in ("jaxtrain", "tests")]:
        sources = [path for folder in SOURCES for path in (REPO / folder).rglob("*.py")]
        python |= {path: 1 for path in sources if any(name in path.read_text() for name in names) and path not in python}
    found = {}
    for test in sorted(file for tier in TESTS for file in (REPO / "tests" / tier).glob("test_*.py")):
        imported = distances(test) | {REPO / "tests" / "conftest.py": 1}  # pytest's doing
        if near := [n + python[file] for file, n in imported.items() if file in python]:
            found[test] = min(near)
    return dict(sorted(found.items(), key=lambda item: item[1]))
