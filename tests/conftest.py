"""Every test runs on 8 fake CPU devices; ranks are never promoted silently.

LLVM's optimizations are left out: they take half the time of compiling, and programs of a few steps never earn it back. XLA's
own passes, the partitioner among them, are all there.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # what other checkouts compiled is not what is tested
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

import gc
import importlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import settings

from jaxtrain.startup import threads_for_cpus

threads_for_cpus(8)
# A shell that starts the suite in the background makes it ignore Ctrl-C, and its children with it; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Property tests draw the same few cases each time, or many with --hypothesis-profile=thorough.
settings.register_profile("quick", max_examples=6, derandomize=True, deadline=None, database=None)
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

        for held in (helpers.train_step, helpers.program, snapshot.together, snapshot.apart):
            held.cache_clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_kept_on_disk() -> Iterator[None]:
    """A compile cache that a test leaves switched on would give later ones what another checkout has compiled."""
    yield
    assert jax.config.jax_compilation_cache_dir is None, "a test has left JAX's compile cache switched on"  # pyright: ignore


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Any:
    """Where the fault tests put what they measured."""
    from faults import Figures

    return Figures(str(request.config.getoption("--figures")))


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether campaigns are to be taken whole."""
    return bool(request.config.getoption("--all-layouts"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-layouts", action="store_true", help="all of what takes long, not the sample of it")
    parser.addoption("--figures", metavar="FILE", default="", help="what the fault tests measured is written there, as JSON")
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


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--part"):
        config.args[:] = [str(Path(__file__).with_name("test_contract.py"))]
        config.option.dist = "no"
    # The matrix is one file, and as much work as the rest of the suite.
    if config.getoption("--all-layouts") and config.getoption("dist", "no") == "loadfile":
        config.option.dist = "worksteal"


# Files that are one long wait. Each stays with one of the two workers: taken last, one would keep the other idle.
LONG = (
    "test_tiny",
    "test_docs",
    "test_notebooks",
    "test_resume",
    "test_golden",
    "test_zero",
    "test_parity",
    "test_context_plans",
    "test_plan",
    "test_mistakes",
    "test_model",
    "test_fp8",
    "test_search",
    "test_train",
    "test_lora",
    "test_hf",
    "test_freeze",
    "test_contract",
    "test_muon",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part:
        items[:] = [item for item in items if getattr(item, "callspec", None) and item.callspec.params.get("part") == part]
    if not (config.getoption("--all-layouts") or part):
        more = [item for item in items if item.get_closest_marker("more")]
        config.hook.pytest_deselected(items=more)
        items[:] = [item for item in items if item not in more]
    order = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
