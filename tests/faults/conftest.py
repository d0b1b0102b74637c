"""Fixtures of the fault tests."""

import pytest
from faults import Figures


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    return Figures(str(request.config.getoption("--figures")))


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether the campaigns are to be taken whole."""
    return bool(request.config.getoption("--all-layouts"))
