"""Imports of jaxtrain point down, from folder to folder, and modules that run before JAX starts import no jax.

A module may import any module of a folder before its own in ROOMS, and modules of its own folder, without cycles.
"""

import ast
import functools
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "jaxtrain"

# The folders and files of the package, lowest first; in a line from left to right.
ROOMS = """
    config
    runtime sharding metrics data
    kernels checkpoint
    models
    optim
    step
    hf plan
    train report node
    commands
    main __main__ __init__
"""
MOST_ENTRIES = 19  # of the package's own folder
# Modules that work before JAX starts: config files, --help, --explain, and every mistake in a config.
LIGHT = (
    *("__init__", "main", "commands.api", "commands.supervise", "config", "config.explain", "config.launch", "config.commands"),
    *(
        "config.hardware",
        "data.loading",
        "commands.command",
        "models",
        "models.families.llama",
        "models.flops",
        "step.validate",
    ),
)


def modules() -> dict[str, Path]:
    """Return {dotted name within jaxtrain: file}. A package has its own name, and jaxtrain itself is `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def floor(module: str) -> int:
    """Return the index of a module's folder in ROOMS. Raises ValueError if ROOMS does not list the folder."""
    return ROOMS.split().index(module.partition(".")[0])


@functools.cache
def nodes() -> dict[str, list[ast.AST]]:
    """Return the nodes of each module's syntax tree, as a flat list."""
    return {name: list(ast.walk(ast.parse(path.read_text()))) for name, path in modules().items()}


def statements(found: list[ast.AST]) -> list[ast.AST]:
    """Return the import statements alone."""
    return [node for node in found if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(found: list[ast.AST], known: set[str]) -> set[str]:
    """Return the modules of jaxtrain that a file imports: at its top, in functions, and by name through importlib."""
    targets = set()
    for node in found:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import: write the module's whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("jaxtrain."):
            names = [node.value] if node.value.removeprefix("jaxtrain.") in known else []
        for name in names:
            if name == "jaxtrain":
                targets.add("__init__")
            if not name.startswith("jaxtrain."):
                continue
            inner = name.removeprefix("jaxtrain.")
            while inner and inner not in known:
                inner = inner.rpartition(".")[0]
            targets.add(inner or "__init__")
    return targets


def test_the_package_has_few_entries_and_each_is_a_room():
    entries = sorted({path.relative_to(PACKAGE).parts[0] for path in modules().values()})
    print(f"{len(entries)} entries:", *entries)
    assert {entry.removesuffix(".py") for entry in entries} == set(ROOMS.split()) and len(entries) <= MOST_ENTRIES


def test_imports_point_down():
    known = set(nodes())
    pairs = {(name, target) for name, found in nodes().items() for target in imported(found, known)}
    upward = [pair for pair in sorted(pairs) if floor(pair[1]) > floor(pair[0])]
    print(f"{len(upward)} imports of a folder above, of {len(pairs)}")
    assert upward == []


def test_no_cycles():
    # Strings count for the order of folders, and not here: a table of modules that are imported later is no dependency.
    graph = {name: imported(statements(found), set(nodes())) - {name} for name, found in nodes().items()}
    graphlib.TopologicalSorter(graph).prepare()
    print("0 cycles")


def test_light_modules_import_no_jax():
    """Neither a light module, nor a module that it imports at its top, nor a package above it imports jax."""
    left, seen = list(LIGHT), set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        module = nodes()[name][0]
        assert isinstance(module, ast.Module)
        top = statements(list(module.body))
        names = [a.name for n in top if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in top if isinstance(n, ast.ImportFrom)]
        heavy = {n for n in names if n.partition(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax")}
        assert not heavy, (name, heavy)
        left += [*imported(top, set(nodes())), *([name.rpartition(".")[0]] if "." in name else [])]
    assert len(seen) > len(LIGHT)
