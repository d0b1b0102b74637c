"""Imports of jaxtrain only point down, and importing it starts nothing.

A module may import what stands on a lower floor. On floors 0 to 4 it may also import its neighbours, without cycles; on floors
5 to 7 only those to the left of it.
"""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "jaxtrain"

# "name.*" stands for a package and all that is in it.
FLOORS = (
    (
        "facts",
        (
            *(
                "__init__",
                "shapes",
                "config",
                "context",
                "activations",
                "auto_remat",
                "windows",
                "moments",
                "precision",
                "hardware",
            ),
            *("groups", "flops", "launch", "stores", "environment", "installed", "stages"),
        ),
    ),
    ("placement", ("sharding", "distributed.*", "startup")),
    ("arrays", ("kernels.*",)),
    ("models", ("models.*",)),
    (
        "the step",
        (
            *(
                "data.*",
                "quantized",
                "muon",
                "optimizer",
                "rounding",
                "loss",
                "stacks",
                "state",
                "snapshot",
                "stored_form",
                "update",
            ),
            *("zero", "balance", "pipeline", "gradients", "step", "compiler", "digests", "guard", "waiting"),
        ),
    ),
    (
        "around the step",
        (
            *(
                "checkpoint.errors",
                "checkpoint.place",
                "checkpoint.arrays",
                "checkpoint.files",
                "checkpoint.steps",
                "checkpoint.restoring",
                "checkpoint",
                "checkpoint.__main__",
                "resume",
                "samples",
                "metrics",
                "throughput",
                "monitor.*",
                "trackers.*",
                "progress",
                "goodput",
                "ledger",
                "position",
                "signals",
                "timelimit",
                "timeline",
                "watchdog",
                "pauses",
                "corruption",
                "divergence",
                "profiling",
                "hf.names",
                "hf.folder",
                "hf.loading",
                "hf.origin",
                "lora",
                "hf.*",
                "evaluate",
            ),
            *("generate", "scoring", "lm_eval", "sample", "memory"),
        ),
    ),
    (
        "around the run",
        (
            *(
                "validate.values",
                "validate.pipeline",
                "validate.experts",
                "validate.layout",
                "validate.places",
                "validate",
                "receipt.*",
                "replay",
            ),
            *(
                "page.*",
                "plan",
                "plan.result",
                "plan.numbers",
                "plan.topology",
                "plan.rates",
                "plan.readings",
                "plan.program.*",
                "plan.cudnn_library",
                "plan.compile",
            ),
            *("plan.make", "plan.calibrate", "plan.expect", "plan.search.*", "plan.report.*", "plan.explore.*", "plan.known.*"),
            *(
                "plan.__main__",
                "profile.*",
                "parity",
                "parity.layouts",
                "parity.compare",
                "parity.report",
                "parity.__main__",
                "preflight.*",
                "bench.*",
                "report.*",
            ),
        ),
    ),
    ("the whole", ("explain", "start", "between", "announce", "feed", "loop", "session", "train", "main", "__main__")),
)
# Imports that point up on purpose: when called, for users who look for a function in the room that has its name.
DOORS = {("sharding", "plan.explore.shardings")}
ORDERED_FROM = 5  # from this floor on, the order within a floor counts too

# What answers before JAX starts: config files, --help, --explain, and every mistake in a config.
LIGHT = ("", "config", "launch", "validate", "hardware", "flops", "explain", "main", "models", "models.llama", "data.pipeline")


def modules() -> dict[str, Path]:
    """Dotted name within jaxtrain -> file; a package is called by its own name, jaxtrain itself `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def place(module: str) -> tuple[int, int]:
    """(floor, place on the floor) of a module. Raises KeyError where it has none."""
    for floor, (_, names) in enumerate(FLOORS):
        for i, name in enumerate(names):
            package = name.removesuffix(".*")
            if module == package or (name.endswith(".*") and module.startswith(package + ".")):
                return floor, i
    raise KeyError(module)


def imported(source: str, known: set[str]) -> set[str]:
    """Modules of jaxtrain that a file imports anywhere in it: at its top, in functions, and by name through importlib.

    `from jaxtrain import config` means jaxtrain.config; `from jaxtrain.data import check` means jaxtrain.data.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
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
                found.add("__init__")
            if not name.startswith("jaxtrain."):
                continue
            inner = name.removeprefix("jaxtrain.")
            while inner and inner not in known:
                inner = inner.rpartition(".")[0]
            found.add(inner or "__init__")
    return found


def complaint(importer: str, target: str) -> str | None:
    """Why `importer` may not import `target`, or None."""
    (floor, at), (below, its) = place(importer), place(target)
    if below > floor:
        return f"{importer} (floor {floor}, {FLOORS[floor][0]}) imports {target} from floor {below}, {FLOORS[below][0]}"
    if floor == below >= ORDERED_FROM and its > at:
        return f"{importer} imports {target}, which stands to the right of it on floor {floor}, {FLOORS[floor][0]}"
    return None


def imports() -> dict[str, set[str]]:
    found = modules()
    return {name: imported(path.read_text(), set(found)) - {name} for name, path in found.items()}


def test_every_module_has_a_floor():
    homeless = []
    for name in modules():
        try:
            place(name)
        except KeyError:
            homeless.append(name)
    assert not homeless, f"{', '.join(homeless)}: say on which floor they stand, in FLOORS of tests/unit/test_floors.py"


def test_every_name_of_a_floor_is_a_module():
    known = set(modules())
    listed = [name.removesuffix(".*") for _, names in FLOORS for name in names]
    assert not [name for name in listed if name not in known], "FLOORS of tests/unit/test_floors.py names modules that are gone"
    assert len(set(listed)) == len(listed)


def test_imports_point_down():
    pairs = {(name, target) for name, targets in imports().items() for target in targets}
    assert pairs >= DOORS, "DOORS of tests/unit/test_floors.py names an import that is gone"
    wrong = [text for name, target in sorted(pairs - DOORS) if (text := complaint(name, target))]
    assert not wrong, "\n".join(wrong)


def test_no_cycles():
    # A package's __init__ that names its modules for lazy import is a table, not a dependency; those are found by name only.
    found = modules()
    graph = {}
    for name, path in found.items():
        source = ast.parse(path.read_text())
        statements = [ast.unparse(n) for n in ast.walk(source) if isinstance(n, ast.Import | ast.ImportFrom)]
        behind = {target for door, target in DOORS if door == name}
        graph[name] = imported("\n".join(statements), set(found)) - {name} - behind
    graphlib.TopologicalSorter(graph).prepare()


def test_the_rules_can_fail():
    known = set(modules())
    lazy = "def f():\n    from jaxtrain.step import build\n"
    assert imported(lazy, known) == {"step"}
    assert imported("from jaxtrain import config, train", known) == {"config", "train"}
    assert imported("from jaxtrain.data.tokenizer import load_tokenizer", known) == {"data.tokenizer"}
    assert imported("X = {'llama': 'jaxtrain.models.llama'}", known) == {"models.llama"}
    assert complaint("kernels.dot", "models.layers") and complaint("config", "sharding")
    assert complaint("plan.search.fit", "plan.report.figures") and not complaint("plan.report.figures", "plan.numbers")
    assert complaint("metrics", "sample") and not complaint("sample", "metrics")
    assert not complaint("models.layers", "kernels.dot")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_light_modules_import_no_jax():
    names = [f"jaxtrain.{name}".rstrip(".") for name in LIGHT]
    code = f"import importlib, sys\nfor n in {names!r}:\n    importlib.import_module(n)\n    print(n, 'jax' in sys.modules)"
    heavy = [line.split()[0] for line in run(code).splitlines() if line.endswith("True")]
    assert not heavy, f"importing {heavy[0]} imports jax"


def test_importing_everything_touches_no_device():
    names = ["jaxtrain" if n == "__init__" else f"jaxtrain.{n}" for n in modules()]
    code = (
        f"import importlib\nfor n in {names!r}:\n    importlib.import_module(n)\n"
        "from jax._src import xla_bridge\nprint(xla_bridge.backends_are_initialized())"
    )
    assert run(code).splitlines()[-1] == "False"
