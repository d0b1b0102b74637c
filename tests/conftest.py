"""Test configuration: 8 fake CPU devices (tests/gpu on request on a GPU), strict rank promotion, campaigns and the ledger."""

import os
import sys

import ledger
from compile_options import EIGHT_CPUS

os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # another checkout's compile cache would be tested instead of this code
os.environ.update({} if os.environ.get("JAXTRAIN_TEST_DEVICE") == "gpu" else EIGHT_CPUS)  # only tests/gpu uses a GPU

import contextlib
import faulthandler
import gc
import json
import math
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import changed
import jax
import kernel_results
import programs
import progress
import pytest
from hypothesis import settings

from jaxtrain.runtime.startup import threads_for_cpus

# Without bytecode files, workers and child processes would parse every source and rewrite every assertion again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ON_GPU = os.environ.get("JAXTRAIN_TEST_DEVICE") == "gpu"
if ON_GPU:
    from jaxtrain.node.train_step import one_device, start_devices

    start_devices(one_device(cache=""), 1)  # with the environment of a training run
else:
    threads_for_cpus(8)
jax.devices()  # Initialize here: some tests remove XLA_FLAGS, and a first use of JAX in such a test would find a single device.
# A suite that a shell starts in the background ignores Ctrl-C, and so do its child processes; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_numpy_rank_promotion", "raise")
programs.keep_programs()

HERE = Path(__file__).parent

# By default a property test draws one case beside the simplest, the same in each run. A campaign draws more. If it has a time
# limit, as in CI, its cases are the same in each run too: then no change fails for a case that is unrelated to it.
settings.register_profile("quick", max_examples=2, derandomize=True, deadline=None, database=None)
settings.register_profile("many", max_examples=10, derandomize=True, deadline=None, database=None)
settings.register_profile("thorough", max_examples=100, deadline=None, print_blob=True)
settings.load_profile("quick")


# Linux limits a process to about 65,530 memory maps, and a program compiled for 8 CPUs needs 500 to 1000. XLA aborts at the
# limit.
MAPPED = Path("/proc/self/maps")
MOST_MAPPED = 25_000


@pytest.fixture(autouse=True)
def programs_make_room() -> Iterator[None]:
    """Drop compiled programs if they use too many memory maps. Only tests of more than a second are followed by this check:
    shorter tests compile no program.
    """
    start = time.monotonic()
    yield
    if time.monotonic() - start > 1 and MAPPED.exists() and MAPPED.read_bytes().count(b"\n") > MOST_MAPPED:
        import helpers

        from jaxtrain.train import snapshot

        programs.kept.clear()
        for held in (helpers.train_step, helpers.program, snapshot.compile_together, snapshot.compile_by_layer):
            held.cache_clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_kept_on_disk() -> Iterator[None]:
    """Check that no test leaves a compile cache switched on: later tests could load programs of another checkout."""
    yield
    assert jax.config.jax_compilation_cache_dir is None, "a test has left JAX's compile cache switched on"  # pyright: ignore


STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
started: list[str] = []


def note_process(event: str, arguments: tuple[Any, ...]) -> None:
    """Record the start of a process. git is left out, because receipts run it to get the commit."""
    if event in STARTS and arguments[:1] != ("git",):
        started.append(f"{event} {arguments[:2]}")


sys.addaudithook(note_process)


@pytest.fixture(autouse=True)
def no_process_in_unit_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that unit tests start no process."""
    started.clear()
    yield
    if request.path.is_relative_to(HERE / "unit"):
        assert not started, f"a unit test started {started}. Fix: move it to tests/proofs or tests/campaign."


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Return whether the run is a campaign, in which long tests run in full."""
    return ledger.is_campaign(request.config)


def minutes(text: str) -> float:
    """Return the value of --campaign, in minutes. Raises pytest.UsageError if it is not a number above 0."""
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
    limit = (
        "everything there is, the test first whose last proof is the oldest. With minutes: what the default tests leave out, "
        "nothing that needs more than a minute; after so many minutes no test is begun"
    )
    parser.addoption("--campaign", nargs="?", const=math.inf, type=minutes, metavar="MINUTES", help=limit)
    near = f"only the test files that a diff touches: those that import a changed file in {NEAR} steps; the nearest first"
    parser.addoption("--changed", nargs="?", const="", metavar="COMMIT", help=f"{near}. COMMIT: since then")
    parser.addoption("--unit", action="store_true", help="only tests/unit: what needs no compile, no process and no wait")
    parser.addoption("--ledger", action="store_true", help="run nothing: list the tests that no campaign has proved lately")
    parser.addoption("--part", metavar=FORM, type=own_part, help="only the contract tests, on a part of your own")
    more = "a key of the config that the part needs; may be repeated"
    parser.addoption("--part-config", metavar="KEY=VALUE", type=own_key, action="append", default=[], help=more)


NEAR = 2  # imports between a test file and a changed file. Nearly every test imports every module in a few steps more.
FORM = "KEY=package.module:name"
KEYS = ("model.family", "loss.name", "optimizer.name", "data.source")


def own_part(text: str) -> tuple[str, str]:
    """Return (key, name) of --part. Raises pytest.UsageError if the value is malformed or the part cannot be imported."""
    key, _, name = text.partition("=")
    if key not in KEYS:
        raise pytest.UsageError(f"--part={text}: must be {FORM}, with KEY one of {', '.join(KEYS)}")
    module, given, attribute = name.partition(":")
    if not (given and module and attribute):
        raise pytest.UsageError(
            f"--part={text}: must be {key}=package.module:name; jaxtrain's own parts are tried without --part"
        )
    from jaxtrain.config import own_parts
    from jaxtrain.config import schema as config

    try:
        own_parts.load_part(key, name)
    except config.ConfigError as error:
        raise pytest.UsageError(f"--part={text}: {error}") from None
    return key, name


def own_key(text: str) -> tuple[str, Any]:
    """Return (key, value) of --part-config, with the value in the key's type.

    Also accepts what only the part has: sharding rules of new logical axes, and settings of the section `own`.
    """
    from jaxtrain.config import launch
    from jaxtrain.config import schema as config

    key, given, value = text.partition("=")
    known = dict(config.flatten(config.default_config()))
    if given and key.startswith(f"{config.OWN}."):
        with contextlib.suppress(ValueError):
            return key, json.loads(value)
        return key, value
    if not given or (key not in known and not key.startswith("sharding.rules.")):
        raise pytest.UsageError(f"--part-config={text}: must be KEY=VALUE. {launch.nearest_key(key, list(known))}")
    try:
        return key, launch.parse_value(value, type(known.get(key, "")))
    except (ValueError, KeyError):
        raise pytest.UsageError(f"--part-config={text}: {key} must be {type(known[key]).__name__}") from None


# Parametrized tests whose cases share nothing: each case may go to another worker. All tests of any other file go to one
# worker.
SPREAD = ("test_matrix[",)
# Files that take long. They start first: a long file that started last would leave the other worker idle.
LONG = (
    "test_parity",
    "test_every_key",
    "test_resume",
    "test_plan_layouts",
    "test_dpo",
    "test_moe",
    "test_optimizer_steps",
    "test_divergence",
    "test_buckets",
    "test_mtp",
    "test_lora_training",
    "test_fp8",
    "test_hf_models",
    "test_plan_programs",
    "test_api",
    "test_delta_net",
    "test_plan",
    "test_zero",
    "test_plan_memory",
    "test_stage_states",
)
DEADLINE, COMMIT = pytest.StashKey[float](), pytest.StashKey[str]()
CPU, STDERR = pytest.StashKey[float](), pytest.StashKey[int]()
LIMIT_S = 600  # of a test, but in a campaign without a time limit


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Where a time limit ends the suite (`timeout`, a CI's own) or a test, each process prints where it waited: not into the
    # file that captures a test's output.
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)
    faulthandler.register(signal.SIGTERM, file=config.stash[STDERR], all_threads=True, chain=True)
    # pytest allows one module named conftest, so these hooks are in a module of another name
    config.pluginmanager.register(kernel_results)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # the command line names no files
        if config.getoption("--unit"):
            config.args[:] = [str(HERE / "unit")]
        elif ledger.is_campaign(config):
            config.args[:] = [str(HERE / tier) for tier in ("unit", "proofs", "gpu", "campaign")]
        elif config.getoption("--changed") is not None:
            config.args[:] = files_of_the_change(config)
    if config.getoption("--part"):
        config.args[:] = [str(HERE / "proofs" / "test_contract.py")]
    if config.getoption("--part") or config.getoption("--ledger") or ON_GPU:
        config.option.dist = "no"  # a second process would find no free GPU memory
    if ledger.is_campaign(config):
        settings.load_profile("many" if is_limited(config) else "thorough")
    config.stash[DEADLINE] = time.time() + 60 * (config.getoption("--campaign") or math.inf)
    config.stash[COMMIT] = ledger.commit()


def is_limited(config: pytest.Config) -> bool:
    """Return whether pytest runs a campaign with a time limit."""
    return ledger.is_campaign(config) and math.isfinite(config.getoption("--campaign") or math.inf)


def files_of_the_change(config: pytest.Config) -> list[str]:
    """Return the test files of --changed, the nearest first. Raises pytest.UsageError if there is no such commit or change."""
    base = config.getoption("--changed")
    try:
        files = changed.changed_files(base)
    except subprocess.CalledProcessError as error:
        raise pytest.UsageError(f"--changed={base}: {error.stderr.splitlines()[0]}") from None
    touched = changed.touched(files)
    near = [str(file) for file, distance in touched.items() if distance <= NEAR]
    if not near:
        names = ", ".join(map(str, files)) or "a file, since nothing differs"
        raise pytest.UsageError(f"--changed={base}: no test file imports {names}. Fix: name the tests to run, or --unit.")
    if not hasattr(config, "workerinput"):
        print(f"changed: {len(files)} files. {len(near)} of {len(touched)} test files that import them do so in {NEAR} steps.")
    return near


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def scope(nodeid: str) -> str:
    """Return the group of tests that goes to one worker: the test's file, or the test itself if it is in SPREAD."""
    file, _, test = nodeid.partition("::")
    return nodeid if test.startswith(SPREAD) else file


def item_id(item: pytest.Item) -> str:
    """Return the id of a test in the ledger: pytest's id, followed by " thorough" for a property test in a campaign."""
    drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return item.nodeid + (" thorough" if drawn and ledger.is_campaign(item.config) else "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part:
        items[:] = [item for item in items if getattr(item, "callspec", None) and item.callspec.params.get("part") == part]
    if is_limited(config):
        select(config, items, lambda item: is_more(item) and not item.get_closest_marker("long"))
    elif not (ledger.is_campaign(config) or part):
        select(config, items, lambda item: not item.get_closest_marker("more"))
    if config.getoption("--changed") is None:
        order = {name: i for i, name in enumerate(LONG)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if ledger.is_campaign(config):
        groups: dict[str, list[pytest.Item]] = {}
        for item in items:
            groups.setdefault(scope(item.nodeid), []).append(item)
        ids = {name: [item_id(item) for item in group] for name, group in groups.items()}
        known = ledger.proofs(ledger.read())
        items[:] = [item for name in ledger.order(ids, known, config.stash[COMMIT]) for item in groups[name]]


def select(config: pytest.Config, items: list[pytest.Item], keep: Callable[[pytest.Item], bool]) -> None:
    """Deselect the tests that `keep` is not true of."""
    config.hook.pytest_deselected(items=[item for item in items if not keep(item)])
    items[:] = [item for item in items if keep(item)]


def is_more(item: pytest.Item) -> bool:
    """Return whether only a campaign runs the test."""
    return bool(item.get_closest_marker("more")) or item.path.is_relative_to(HERE / "campaign")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Skip a test that would start after the deadline, without a line in the ledger."""
    item.stash[CPU] = progress.cpu_seconds()
    return True if time.time() > deadline(item.config) else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test after LIMIT_S, with the traceback of what it waits for; the other threads' go to stderr."""
    if ledger.is_campaign(item.config) and not is_limited(item.config):
        yield
        return
    faulthandler.dump_traceback_later(LIMIT_S, file=item.config.stash[STDERR])
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"the test did not end in {LIMIT_S} s"))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S + 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


def deadline(config: pytest.Config) -> float:
    """Return the deadline of the whole run, in seconds since 1970. Workers get it from the main process."""
    return getattr(config, "workerinput", {}).get("deadline", config.stash[DEADLINE])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["deadline"] = node.config.stash[DEADLINE]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any]:
    report = (yield).get_result()
    report.ledger_item = item_id(item)
    item.stash[CPU], before = progress.cpu_seconds(), item.stash[CPU]
    report.cpu_s = item.stash[CPU] - before


class Results:
    """Write the results of tests into the ledger, in the main process."""

    def __init__(self, commit: str):
        self.commit = commit
        self.seconds: dict[str, float] = {}
        self.result: dict[str, tuple[str, str]] = {}
        self.writable = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        item = getattr(report, "ledger_item", report.nodeid)  # the report of a crashed worker has no such field
        self.seconds[item] = self.seconds.get(item, 0.0) + report.duration
        if report.failed:
            self.result[item] = (ledger.FAILED, "")
        elif report.skipped:
            self.result.setdefault(item, (ledger.SKIPPED, reason(report)))
        if report.when in ("teardown", "???"):  # ??? is the phase of a crashed worker
            result, why = self.result.pop(item, (ledger.PASSED, ""))
            seconds = round(self.seconds.pop(item), 3)
            self._append(ledger.Entry(item, self.commit, ledger.now(), seconds, result, why))

    def _append(self, entry: ledger.Entry) -> None:
        if not self.writable:
            return
        try:
            ledger.append(entry)
        except OSError as error:  # the disk is full or the home is read-only: go on without a ledger
            self.writable = False
            print(f"\nledger: not written from here on: {error}", file=sys.stderr)


def reason(report: pytest.TestReport) -> str:
    """Return the reason why a test was skipped, or why its failure was expected (xfail)."""
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", ""))


def pytest_sessionstart(session: pytest.Session) -> None:
    option = session.config.option
    lists_only = option.collectonly or option.ledger
    if not hasattr(session.config, "workerinput") and not lists_only and option.capture != "no" and not option.usepdb:
        session.config.pluginmanager.register(progress.Progress(session.config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    # results for a user's own part are no results of jaxtrain
    if not hasattr(config, "workerinput") and not config.getoption("--part"):
        config.pluginmanager.register(Results(config.stash[COMMIT]))
    if not config.getoption("--ledger"):
        return None
    print("\n" + "\n".join(ledger.summary([item_id(item) for item in session.items], ledger.read())))
    return True
