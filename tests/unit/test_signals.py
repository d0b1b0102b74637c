"""The effect of signals on a run, with a fake clock. Proofs and the campaign send real signals."""

import signal

import pytest
from fakes import Clock

from jaxtrain.runtime import signals
from jaxtrain.runtime.signals import Stop

INT, TERM, USR1, USR2 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which the process would have ended at once."""
    codes: list[int] = []
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    return codes


@pytest.mark.parametrize(
    ("came", "reason", "code", "exits", "traces"),
    [
        ([(0, INT)], "SIGINT", 130, [], 0),
        ([(0, USR1)], "SIGUSR1", 75, [], 0),
        ([(0, USR2), (1, USR2)], None, None, [], 2),
        ([(0, TERM), (0.2, TERM)], "SIGTERM", 75, [], 0),  # the same request, from two senders
        ([(0, TERM), (0.3, INT)], "SIGTERM", 75, [130], 0),  # a second request ends at once, with its own code
        ([(0, USR1), (0.3, USR2)], "SIGUSR1", 75, [], 1),  # a request for a trace is no second request
        ([(0, USR2), (9, INT), (9.1, TERM)], "SIGINT", 130, [], 1),
    ],
)
def test_signals_ask_to_stop_or_to_trace(came, reason, code, exits, traces, left: list[int], monkeypatch: pytest.MonkeyPatch):
    clock, asked = Clock(0.0), []
    monkeypatch.setattr(signals, "time", clock)
    stop = Stop(ask=asked.append)
    for clock.now, number in came:
        stop._handle(number)
    assert (stop.reason, stop.traces, left) == (reason, traces, exits)
    assert asked == ([reason] if reason else []) and (reason is None or stop.exit_code_of(reason) == code)


@pytest.mark.parametrize(
    ("here", "why", "code"),
    [(True, "SIGINT", 130), (False, "SIGINT", 130), (False, "time limit, 60 s before it", 75)],
)
def test_where_nothing_is_there_to_save_a_run_leaves_at_once(here: bool, why: str, code: int, left: list[int]):
    """The request is a signal here or to another process, or the time limit. The run's files are closed first, and the process
    ends even if that fails.
    """
    stop, seen = Stop(), []

    def at_once(name: str, code: int) -> None:
        seen.append((name, code))
        raise OSError

    stop.at_once = at_once
    with pytest.raises(OSError):
        stop._handle(signal.Signals[why]) if here else stop.handle_remote_stop(why)
    assert (seen, left) == ([(why, code)], [code])


def test_with_something_to_save_the_loop_ends_the_run(left: list[int]):
    Stop().handle_remote_stop("SIGTERM")
    assert not left


def test_after_its_end_a_run_is_ended_by_no_request_and_signals_are_handled_as_before(left: list[int]):
    before = signal.getsignal(TERM)
    with Stop() as stop:
        stop.at_once = lambda name, code: None
        assert signal.getsignal(TERM) is not before
        stop.close()
        assert signal.getsignal(TERM) is before
        stop.handle_remote_stop("SIGTERM")
    assert signal.getsignal(TERM) is before and not left
