"""Every test runs on 8 fake CPU devices, those of tests/gpu on request on a GPU; ranks are never promoted silently."""

import os
import sys

import ledger
from compile_options import QUICKLY

os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # what other checkouts compiled is not what is tested
os.environ.update(
    {}
    if os.environ.get("JAXTRAIN_TEST_DEVICE") == "gpu"  # for tests/gpu alone
    else {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {QUICKLY}"}
)

import gc
import importlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import kernel_results
import programs
import pytest
from hypothesis import settings

from jaxtrain.startup import threads_for_cpus

# Workers and child processes would parse every source and rewrite every assertion anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ON_GPU = os.environ.get("JAXTRAIN_TEST_DEVICE") == "gpu"
if ON_GPU:
    from jaxtrain.bench.train_step import one_device, start_devices

    start_devices(one_device(cache=""), 1)  # with the environment of a run
else:
    threads_for_cpus(8)
jax.devices()  # here, because some tests take XLA_FLAGS away: the first use of JAX in one of them would find a single device
# A shell that starts the suite in the background makes it ignore Ctrl-C, and its children with it; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_numpy_rank_promotion", "raise")
programs.keep_programs()

HERE = Path(__file__).parent

# Property tests draw a few cases, the same each time. A campaign draws many; one with a limit, as in CI, the same each time, so
# that no change fails for cases that it has nothing to do with.
settings.register_profile("quick", max_examples=6, derandomize=True, deadline=None, database=None)
settings.register_profile("many", max_examples=100, derandomize=True, deadline=None, database=None)
settings.register_profile("thorough", max_examples=100, deadline=None, print_blob=True)
settings.load_profile("quick")


# Linux lets a process map some 65,530 areas, and a program compiled for 8 CPUs takes 500 to 1000: XLA aborts at the end.
MAPPED = Path("/proc/self/maps")
MOST_MAPPED = 25_000


@pytest.fixture(autouse=True)
def programs_make_room() -> Iterator[None]:
    """Lets go of compiled programs where there are too many. Only asked after a test long enough to have compiled some."""
    start = time.monotonic()
    yield
    if time.monotonic() - start > 1 and MAPPED.exists() and MAPPED.read_bytes().count(b"\n") > MOST_MAPPED:
        import helpers

        from jaxtrain import snapshot

        programs.kept.clear()
        for held in (helpers.train_step, helpers.program, snapshot.compile_together, snapshot.compile_by_layer):
            held.cache_clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_kept_on_disk() -> Iterator[None]:
    """A compile cache that a test leaves switched on would give later ones what another checkout has compiled."""
    yield
    assert jax.config.jax_compilation_cache_dir is None, "a test has left JAX's compile cache switched on"  # pyright: ignore


STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
started: list[str] = []


def note_process(event: str, arguments: tuple[Any, ...]) -> None:
    """Keep the start of any process but git, which receipts ask for the commit."""
    if event in STARTS and arguments[:1] != ("git",):
        started.append(f"{event} {arguments[:2]}")


sys.addaudithook(note_process)


@pytest.fixture(autouse=True)
def no_process_in_unit_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Unit tests start no process."""
    started.clear()
    yield
    if request.path.is_relative_to(HERE / "unit"):
        assert not started, f"a unit test started {started}. Fix: move it to tests/proofs or tests/campaign."


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Any:
    """What the fault tests measure; a campaign keeps it beside the ledger."""
    from faults import Figures

    return Figures(ledger.FOLDER / "figures.json" if ledger.is_campaign(request.config) else None)


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether long tests are to be taken whole."""
    return ledger.is_campaign(request.config)


def minutes(text: str) -> float:
    """The value of --campaign. Raises pytest.UsageError for one that is no number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise pytest.UsageError(
            f"--campaign={text}: must be minutes, above 0. Fix: --campaign=40, or --campaign as the last word for all."
        )
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    limit = "everything there is, the test first whose last proof is the oldest; after so many minutes no test is begun"
    parser.addoption("--campaign", nargs="?", const=math.inf, type=minutes, metavar="MINUTES", help=limit)
    parser.addoption("--unit", action="store_true", help="only tests/unit: what needs no compile, no process and no wait")
    parser.addoption("--ledger", action="store_true", help="run nothing: list the tests that no campaign has proved lately")
    parser.addoption("--part", metavar=FORM, type=own_part, help="only the contract tests, on a part of your own")
    more = "a key of the config that the part needs; may be repeated"
    parser.addoption("--part-config", metavar="KEY=VALUE", type=own_key, action="append", default=[], help=more)


FORM = "KEY=package.module:name"
KEYS = ("model.family", "loss.name", "optimizer.name", "data.source")


def own_part(text: str) -> tuple[str, str]:
    """(key, name) of --part. Raises pytest.UsageError for what is none."""
    key, _, name = text.partition("=")
    if key not in KEYS:
        raise pytest.UsageError(f"--part={text}: must be {FORM}, with KEY one of {', '.join(KEYS)}")
    module, given, attribute = name.partition(":")
    if not (given and module and attribute):
        raise pytest.UsageError(
            f"--part={text}: must be {key}=package.module:name; jaxtrain's own parts are tried without --part"
        )
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise pytest.UsageError(f"--part={text}: {module} cannot be imported: {error}. Is its folder on PYTHONPATH?") from None
    if not hasattr(found, attribute):
        raise pytest.UsageError(f"--part={text}: {found.__file__} defines no {attribute}")
    return key, name


def own_key(text: str) -> tuple[str, Any]:
    """(key, value) of --part-config, with the type of the key; rules for axes of one's own may be new."""
    from jaxtrain import config, launch

    key, given, value = text.partition("=")
    known = dict(config.flatten(config.default_config()))
    if not given or (key not in known and not key.startswith("sharding.rules.")):
        raise pytest.UsageError(f"--part-config={text}: must be KEY=VALUE. {launch.nearest_key(key, list(known))}")
    try:
        return key, launch.parse(value, type(known.get(key, "")))
    except (ValueError, KeyError):
        raise pytest.UsageError(f"--part-config={text}: {key} must be {type(known[key]).__name__}") from None


# Parametrized tests whose cases share nothing: workers take them one by one. Of any other file one worker takes all tests.
SPREAD = ("test_matrix[", "test_a_planted_bug_is_noticed[")
# Files that take long, whose tests one worker takes: begun last, one would keep the other worker idle.
LONG = (
    "test_tiny",
    "test_doc_commands",
    "test_notebooks",
    "test_docs_site",
    "test_killed",
    "test_golden",
    "test_plan_memory",
    "test_every_key",
    "test_plan_layouts",
    "test_resume",
    "test_divergence",
    "test_moments",
    "test_lora_training",
    "test_watching",
    "test_optimizer_steps",
    "test_plan",
    "test_moe",
    "test_plan_programs",
    "test_fp8",
    "test_train",
    "test_contract",
    "test_context",
    "test_offload",
    "test_stage_states",
    "test_model",
    "test_muon",
)
DEADLINE, COMMIT = pytest.StashKey[float](), pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(kernel_results)  # a second conftest.py would take the name of this one
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # no files are named on the command line
        if config.getoption("--unit"):
            config.args[:] = [str(HERE / "unit")]
        elif ledger.is_campaign(config):
            config.args[:] = [str(HERE / tier) for tier in ("unit", "proofs", "gpu", "campaign")]
    if config.getoption("--part"):
        config.args[:] = [str(HERE / "proofs" / "test_contract.py")]
    if config.getoption("--part") or config.getoption("--ledger") or ON_GPU:
        config.option.dist = "no"  # a second process would find no memory left on the GPU
    if ledger.is_campaign(config):
        limited = math.isfinite(config.getoption("--campaign") or math.inf)
        settings.load_profile("many" if limited else "thorough")
    config.stash[DEADLINE] = time.time() + 60 * (config.getoption("--campaign") or math.inf)
    config.stash[COMMIT] = ledger.commit()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def scope(nodeid: str) -> str:
    """The tests that one worker takes together: those of a file, but for SPREAD."""
    file, _, test = nodeid.partition("::")
    return nodeid if test.startswith(SPREAD) else file


def item_id(item: pytest.Item) -> str:
    """The id of a test in the ledger: that of pytest, with a mark where a property test draws many cases."""
    drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return item.nodeid + (" thorough" if drawn and ledger.is_campaign(item.config) else "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part:
        items[:] = [item for item in items if getattr(item, "callspec", None) and item.callspec.params.get("part") == part]
    if not (ledger.is_campaign(config) or part):
        more = [item for item in items if item.get_closest_marker("more")]
        config.hook.pytest_deselected(items=more)
        items[:] = [item for item in items if item not in more]
    order = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if ledger.is_campaign(config):
        groups: dict[str, list[pytest.Item]] = {}
        for item in items:
            groups.setdefault(scope(item.nodeid), []).append(item)
        ids = {name: [item_id(item) for item in group] for name, group in groups.items()}
        known = ledger.proofs(ledger.read())
        items[:] = [item for name in ledger.order(ids, known, config.stash[COMMIT]) for item in groups[name]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Begins no test after the deadline; the ledger then knows nothing new of it."""
    return True if time.time() > deadline(item.config) else None


def deadline(config: pytest.Config) -> float:
    """Seconds since 1970: that of the whole run, also in its workers."""
    return getattr(config, "workerinput", {}).get("deadline", config.stash[DEADLINE])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["deadline"] = node.config.stash[DEADLINE]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    outcome.get_result().ledger_item = item_id(item)  # type: ignore[attr-defined]


class Results:
    """Writes the results of tests into the ledger, in the process that the user started."""

    def __init__(self, commit: str):
        self.commit = commit
        self.seconds: dict[str, float] = {}
        self.result: dict[str, tuple[str, str]] = {}
        self.writable = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        item = getattr(report, "ledger_item", report.nodeid)  # a worker that crashed leaves a report without it
        self.seconds[item] = self.seconds.get(item, 0.0) + report.duration
        if report.failed:
            self.result[item] = (ledger.FAILED, "")
        elif report.skipped:
            self.result.setdefault(item, (ledger.SKIPPED, reason(report)))
        if report.when in ("teardown", "???"):  # the latter of a crash
            result, why = self.result.pop(item, (ledger.PASSED, ""))
            seconds = round(self.seconds.pop(item), 3)
            self._append(ledger.Entry(item, self.commit, ledger.now(), seconds, result, why))

    def _append(self, entry: ledger.Entry) -> None:
        if not self.writable:
            return
        try:
            ledger.append(entry)
        except OSError as error:  # a full disk or a home that is read-only: the tests go on without it
            self.writable = False
            print(f"\nledger: not written from here on: {error}", file=sys.stderr)


def reason(report: pytest.TestReport) -> str:
    """Why a test was skipped."""
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", ""))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if not hasattr(config, "workerinput") and not config.getoption("--part"):  # a part of your own proves nothing of ours
        config.pluginmanager.register(Results(config.stash[COMMIT]))
    if not config.getoption("--ledger"):
        return None
    print("\n" + "\n".join(ledger.summary([item_id(item) for item in session.items], ledger.read())))
    return True
