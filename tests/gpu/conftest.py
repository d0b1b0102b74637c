"""Kernels against their definitions: on a GPU in the shapes of large models, on a CPU in small shapes, interpreted.

    ./run.sh test tests/gpu                              the small shapes, on a CPU
    JAXTRAIN_TEST_DEVICE=gpu ./run.sh test tests/gpu     all shapes, on the first GPU

JAXTRAIN_TEST_RESULTS=FILE appends a JSON line for each result as soon as it is known: `bench --suite=node` reads them.
"""

import json
import os
from typing import Any

import jax
import pytest

RESULTS = os.environ.get("JAXTRAIN_TEST_RESULTS", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: JAXTRAIN_TEST_DEVICE=gpu ./run.sh test tests/gpu"))


def write(**line: Any) -> None:
    if RESULTS:
        with open(RESULTS, "a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    write(collected=len(session.items), device=jax.devices()[0].device_kind)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of a test, of its setup only where the test was not called."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        why = ""
        if report.skipped:
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = (crash.message if crash else str(report.longrepr)).splitlines()[0][:300]
        write(test=report.nodeid.rpartition("::")[2], outcome=report.outcome, why=why, **dict(report.user_properties))
