"""Hooks of tests/gpu, which compares kernels with their definitions: large models' shapes on a GPU, small shapes on a CPU.

    JAXTRAIN_TEST_DEVICE=gpu ./run.sh test tests/gpu     all shapes, on the first GPU

`bench --suite=node` sets two variables. JAXTRAIN_TEST_RESULTS is a file; each test appends its result at once, as a JSON line.
JAXTRAIN_TEST_SECONDS is a time limit, after which no test starts.
"""

import json
import os
import time

import jax
import pytest

RESULTS = os.environ.get("JAXTRAIN_TEST_RESULTS", "")
DEADLINE = time.monotonic() + float(os.environ.get("JAXTRAIN_TEST_SECONDS", "inf"))
NO_TIME = "no time was left"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU if JAX runs on CPUs."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: JAXTRAIN_TEST_DEVICE=gpu ./run.sh test tests/gpu"))


def pytest_runtest_setup() -> None:
    """Skip a test that would begin after the time limit of the node suite."""
    if time.monotonic() > DEADLINE:
        pytest.skip(NO_TIME)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of a test. The result of its setup is written only if the test did not run."""
    if RESULTS and (report.when == "call" or (report.when == "setup" and not report.passed)):
        why = ""
        if report.skipped:
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = (crash.message if crash else str(report.longrepr)).splitlines()[0][:300]
        line = {
            "test": report.nodeid.rpartition("::")[2],
            "outcome": report.outcome,
            "why": why,
            **dict(report.user_properties),
        }
        with open(RESULTS, "a") as file:
            file.write(json.dumps(line) + "\n")
