"""Progress of a run of tests, with an estimate of the time that is left, and the CPU seconds of the dearest files."""

import collections
import os
import sys
import time
from collections.abc import Sequence

import ledger
import pytest

EVERY_S = 20.0  # between two lines where the output is no terminal
GUESS_S = {"unit": 0.05, "proofs": 2.0, "gpu": 0.5, "campaign": 20.0}  # of a test that never ran on this machine


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those of its child processes that have ended."""
    return sum(os.times()[:4])


def duration(seconds: float) -> str:
    """Return minutes and seconds, as 3:07."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02}"


class Estimate:
    """The share of a run's tests that have ended, and the seconds until the last one ends.

    A test is expected to take as long as in the ledger, where it is in it; what the tests of this run took corrects the sum.
    """

    def __init__(self, items: Sequence[str], known: dict[str, float]):
        self.expected = {item: known.get(item, GUESS_S.get(item.split("/")[1] if "/" in item else "", 1.0)) for item in items}
        self.total = sum(self.expected.values())
        self.done: set[str] = set()
        self.ended_s = 0.0  # expected seconds of the tests that have ended

    def end(self, item: str) -> None:
        """Count a test that has ended."""
        if item in self.expected and item not in self.done:
            self.done.add(item)
            self.ended_s += self.expected[item]

    def line(self, elapsed_s: float) -> str:
        """Return the line of progress, so many seconds after the first test began."""
        share = self.ended_s / self.total if self.total else 1.0
        left = f", about {duration(elapsed_s / share - elapsed_s)} left" if 0.02 < share < 1 else ""
        return f"{len(self.done):,} of {len(self.expected):,} tests, {duration(elapsed_s)}{left}"


class Progress:
    """Print a line of progress instead of a letter for each test that passes. Registered in the main process."""

    def __init__(self, config: pytest.Config):
        self.reporter = config.pluginmanager.getplugin("terminalreporter")
        self.terminal = sys.stdout.isatty()
        self.began = self.printed = time.monotonic()
        self.estimate = Estimate([], {})
        self.cpu_s: collections.Counter[str] = collections.Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        self.expect(ids)

    def expect(self, items: Sequence[str]) -> None:
        """Begin the estimate, once: each worker of xdist reports the same tests."""
        if items and not self.estimate.expected:
            self.began = time.monotonic()
            known = {entry.item.removesuffix(" thorough"): entry.seconds for entry in ledger.read()}
            self.estimate = Estimate(items, known)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letter for a test, unless -v asks for the names of tests."""
        if self.reporter.verbosity > 0 or hasattr(report, "wasxfail") or (report.passed and report.when != "call"):
            return None
        category = "failed" if report.when == "call" else "error"
        return (category if report.failed else report.outcome, "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.cpu_s[report.nodeid.partition("::")[0]] += getattr(report, "cpu_s", 0.0)
        if report.failed and self.reporter.verbosity <= 0:
            self.write(f"FAILED {report.nodeid}", ends=True)
        if report.when in ("teardown", "???"):
            self.estimate.end(report.nodeid)
            now = time.monotonic()
            if now - self.printed > (0.2 if self.terminal else EVERY_S):
                self.printed = now
                self.write(self.estimate.line(now - self.began))

    def write(self, text: str, ends: bool = False) -> None:
        """Write a line; on a terminal the next one takes its place, unless it `ends`."""
        if self.terminal:
            self.reporter.rewrite(text, erase=True)
            if ends:
                self.reporter.line("")
        else:
            self.reporter.write_line(text)

    def pytest_terminal_summary(self) -> None:
        self.write(self.estimate.line(time.monotonic() - self.began), ends=True)
        dearest = self.cpu_s.most_common(10)
        if sum(self.cpu_s.values()) > 60:
            self.reporter.write_line(f"{sum(self.cpu_s.values()):,.0f} CPU seconds of tests. The dearest files:")
            for file, seconds in dearest:
                self.reporter.write_line(f"  {seconds:6.0f}  {file}")
