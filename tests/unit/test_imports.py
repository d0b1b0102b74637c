"""Imports of jaxtrain only point to lower layers, and modules that run before JAX starts import no jax.

A module may import any module of a lower layer. In the first five layers it may also import modules of its own layer, without
cycles. In the other layers it may import, of its own layer, only modules to its left in LAYERS.
"""

import ast
import functools
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "jaxtrain"

# "name.*" is a package with all its modules.
LAYERS = {
    "facts": """
        streams durations counts config_file __init__ commands runtime.* train shapes synonyms config own_parts
        context
        activations train.auto_remat windows optim.moments
        precision hardware optim.groups flops launch command_line stores environment installed train.stages
    """,
    "placement": """
        sharding distributed.* startup
    """,
    "arrays": """
        kernels.*
    """,
    "models": """
        models.* zero
    """,
    "the step": """
        data.* optim.* train.loss train.guard stacks train.state snapshot stored_form train.balance train.pipeline
        train.gradients train.step train.batch train.batch_feed train.kernel train.definition train.model_flops
        train.program train.compiler digests
    """,
    "around the step": """
        checkpoint.storage checkpoint.files checkpoint.arrays checkpoint.steps checkpoint.manager checkpoint
        checkpoint.__main__ resume samples metrics throughput monitor.* trackers.* progress goodput
        ledger position signals timelimit watchdog corruption divergence profiling hf.names hf.mxfp4
        hf.folder hf.importing lora hf.* generation scoring lm_eval sample train.memory
    """,
    "around the run": """
        validate.pipeline validate.experts validate.layout validate.places validate receipt.* replay
        page.* bench.disk_rates bench.microbenchmarks plan plan.result plan.topology plan.rates plan.program.*
        plan.cudnn_library plan.compile plan.make plan.calibrate plan.expect plan.layer_schedule plan.search.* plan.report.*
        plan.shardings plan.__main__ profile.* bench.child parity parity.layouts parity.compare
        parity.known_issues parity.report parity.__main__ preflight.* bench.* report.*
    """,
    "the whole": """
        explain train.timing train.services train.initial_state train.setup train.evaluate train.references
        train.summary train.saver train.step_log train.loop train.run main __main__ api
    """,
}
ORDERED_FROM = 5  # from this layer on, the order within a layer counts too
# Allowed imports from a higher layer. They happen in calls, for users who look for a function in the module of its name.
UP = {
    ("__init__", "api"),
    ("__init__", "startup"),
    ("launch", "data.pipeline"),  # for the steps of train.epochs
    ("plan.result", "plan.report.terminal"),
    ("plan.result", "plan.report.page"),
    ("profile.measure", "profile.report"),
    ("report.run", "report.page"),
}
# Modules that work before JAX starts: config files, --help, --explain, and every mistake in a config.
LIGHT = (
    *("__init__", "config", "launch", "validate", "hardware", "flops", "explain", "main", "models", "models.families.llama"),
    *("data.pipeline", "runtime.__main__", "commands"),
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


def place(module: str) -> tuple[int, int]:
    """Return (layer, index in the layer) of a module. Raises KeyError if no layer lists it."""
    for layer, names in enumerate(LAYERS.values()):
        for i, name in enumerate(names.split()):
            package = name.removesuffix(".*")
            if module == package or (name.endswith(".*") and module.startswith(package + ".")):
                return layer, i
    raise KeyError(module)


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


def allowed(importer: str, target: str) -> bool:
    """Return whether `importer` may import `target`."""
    (layer, at), (below, its) = place(importer), place(target)
    return below < layer or (below == layer and (layer < ORDERED_FROM or its <= at))


def test_every_module_has_a_layer_and_every_name_is_a_module():
    known = modules()
    listed = [name.removesuffix(".*") for names in LAYERS.values() for name in names.split()]
    assert len(set(listed)) == len(listed) and not [name for name in listed if name not in known]
    for module in known:
        place(module)


def test_imports_point_down():
    known = set(nodes())
    pairs = {(name, target) for name, found in nodes().items() for target in imported(found, known) - {name}}
    assert pairs >= UP, "UP names an import that is gone"
    assert [pair for pair in sorted(pairs - UP) if not allowed(*pair)] == [], (
        "imports of a layer above, or of modules to the right"
    )


def test_no_cycles():
    # A package's __init__ that lists its modules for lazy import is a table, not a dependency. Only import statements count
    # here.
    graph = {name: imported(statements(found), set(nodes())) - {name} for name, found in nodes().items()}
    for importer, target in UP:
        graph[importer].discard(target)
    graphlib.TopologicalSorter(graph).prepare()


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
