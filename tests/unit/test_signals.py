"""The effect of signals on a run, with a fake clock. test_launching.py and the campaign send real signals."""

import signal

import pytest
from fakes import Clock

from jaxtrain import signals
from jaxtrain.signals import Stop

INT, TERM, USR1, USR2 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.parametrize(
    ("came", "reason", "code", "exits", "traces"),
    [
        ([(0, INT)], "SIGINT", 130, [], 0),
        ([(0, TERM)], "SIGTERM", 75, [], 0),
        ([(0, USR1)], "SIGUSR1", 75, [], 0),
        ([(0, USR2), (1, USR2)], None, None, [], 2),
        ([(0, TERM), (0.2, TERM)], "SIGTERM", 75, [], 0),  # the same request, from two senders
        ([(0, TERM), (0.3, INT)], "SIGTERM", 75, [130], 0),  # a second request ends at once, with its own code
        ([(0, USR1), (0.3, USR2)], "SIGUSR1", 75, [], 1),  # a request for a trace is no second request
        ([(0, USR2), (9, INT), (9.1, TERM)], "SIGINT", 130, [], 1),
    ],
)
def test_signals_ask_to_stop_or_to_trace(
    came: list[tuple[float, signal.Signals]],
    reason: str | None,
    code: int | None,
    exits: list[int],
    traces: int,
    monkeypatch: pytest.MonkeyPatch,
):
    clock, asked, left = Clock(0.0), [], []
    monkeypatch.setattr(signals, "time", clock)
    monkeypatch.setattr(signals.os, "_exit", left.append)
    stop = Stop(ask=asked.append)
    for clock.now, number in came:
        stop._received(number)
    assert (stop.reason, stop.exit_code, stop.traces, left) == (reason, code, traces, exits)
    assert asked == ([reason] if reason else []) and bool(stop) == bool(reason)


def test_where_nothing_is_there_to_save_a_run_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """The request is a signal, another process's request or the time limit. The run's files are closed first, and the
    process ends even if that fails.
    """
    left: list[int] = []
    monkeypatch.setattr(signals.os, "_exit", left.append)
    for ask, told in (
        (lambda stop: stop._received(INT), ("SIGINT", 130)),
        (lambda stop: stop.asked_elsewhere("SIGINT"), ("SIGINT", 130)),
        (lambda stop: stop.asked_elsewhere("time limit, 60 s before it"), ("time limit, 60 s before it", 75)),
    ):
        stop, seen = Stop(), []

        def at_once(name: str, code: int, seen: list = seen) -> None:
            seen.append((name, code))
            raise OSError

        stop.at_once = at_once
        with pytest.raises(OSError):
            ask(stop)
        assert seen == [told] and left.pop() == told[1] and not left
        assert capfd.readouterr().err == f"\n{told[0].replace('SIGINT', 'Ctrl-C')}: stopping, there is nothing to save yet.\n"
    Stop().asked_elsewhere("SIGTERM")  # with something to save, the loop ends the run
    assert not left
