"""The ledger of wall time: every second of a run has one cause, across kills, hangs and resumes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain.metrics import goodput
from jaxtrain.metrics.goodput import Ledger


def spent(until: float, done: int | None, doing: str = "step", /, **seconds: float) -> dict[str, Any]:
    return {"kind": "spent", "until": until, "seconds": seconds, "step": done, "doing": doing}


def begin(at: float, seen: float | None = None) -> dict[str, Any]:
    return {"kind": "begin", "time": at, "seen": seen}


def back(step: int) -> dict[str, Any]:
    return {"kind": "back", "step": step}


def end(at: float, code: int) -> dict[str, Any]:
    return {"kind": "end", "time": at, "exit_code": code, "reason": ""}


FINISHED = [begin(100.0), spent(104.0, None, startup=1.0, compile=3.0), back(0)]
FINISHED += [spent(114.0, 10, step=8.0, data=1.5, save=0.5), end(114.5, 0)]
KILLED = [
    begin(0.0),
    spent(5.0, None, startup=5.0),
    back(0),
    spent(15.0, 10, step=9.0, save=1.0),  # a checkpoint at step 10
    spent(35.0, 30, step=18.0, data=2.0),  # killed at 39 s, the time of its last sign of life
    begin(50.0, seen=39.0),
    spent(53.0, None, "restore", startup=2.0, restore=1.0),
    back(10),
    spent(103.0, 60, step=50.0),
    end(103.0, 0),
]
ACROSS = [begin(0.0), back(0), spent(10.0, 10, step=10.0), begin(10.0, seen=10.0), back(4), spent(12.0, 6, step=2.0)]
HUNG = [
    begin(0.0),
    back(0),
    spent(10.0, 10, step=10.0),  # a checkpoint at step 10: no later second belongs to a step that counts
    spent(40.0, 10, step=30.0),
    spent(900.0, 10, step=860.0),
    end(900.0, 124),
    begin(905.0, seen=900.0),
    back(10),
    spent(915.0, 20, step=10.0),
]
SLOW = [begin(0.0), back(0), spent(10.0, 5, step=10.0), spent(40.0, 5, step=30.0), begin(60.0, seen=45.0), back(5)]
RUNS = [begin(0.0), spent(2.0, None, startup=2.0), back(0), spent(4.0, 2, step=2.0)]


def between(code: int) -> list[dict[str, Any]]:
    """Return the ledger of two attempts of 10 s, 100 s apart. The first ends with this exit code."""
    return [begin(0.0), back(0), spent(10.0, 5, step=10.0), end(10.0, code), begin(110.0, 10.0), spent(120.0, 6, step=10.0)]


def seen_last(lines: list[dict[str, Any]], at: float) -> list[dict[str, Any]]:
    """Return the ledger with `at` as the time at which its file was last touched."""
    return [*lines[:-1], lines[-1] | {"seen_last": at}]


@pytest.mark.parametrize(
    ("lines", "parts", "counted", "good"),
    [
        (FINISHED, {"startup": 1, "compile": 3, "step": 8, "data": 1.5, "save": 0.5}, (1, 10, 0), 8 / 14),
        # The 18 + 2 s, and 4 s without a line, were spent on steps after step 10.
        (KILLED, {"startup": 7, "step": 59, "save": 1, "repeated": 24, "down": 11, "restore": 1}, (2, 60, 20), 59 / 103),
        # A line that spans the checkpoint is divided. A rollback may go back further than the restore before.
        (ACROSS, {"step": 6, "repeated": 6}, (2, 6, 6), 1 / 2),
        ([*ACROSS, back(2), spent(16.0, 6, step=4.0)], {"step": 6, "repeated": 10}, (2, 6, 10), 6 / 16),
        (HUNG, {"step": 20, "hang": 890, "down": 5}, (2, 20, 0), 20 / 915),
        # Lines are written while a step is under way. A kill loses that time, even if the counted step is in a checkpoint.
        (SLOW, {"step": 10, "repeated": 35, "down": 15}, (2, 5, 0), 1 / 6),
        *((between(code), {"step": 20, "stopped": 100}, (2, 6, 0), 1.0) for code in (0, 130)),
        (between(75), {"step": 20, "down": 100}, (2, 6, 0), 1 / 6),
        (seen_last(RUNS, 9.0), {"startup": 2, "step": 7}, (1, 2, 0), 7 / 9),
        (seen_last(RUNS, 6.0), {"startup": 2, "step": 4}, (1, 2, 0), 4 / 6),
        # A file that was copied later counts for at most the longest time between two lines.
        (seen_last(RUNS, 86_400.0), {"startup": 2, "step": 62}, (1, 2, 0), 62 / 64),
        ([], {}, (0, 0, 0), None),
    ],
)
def test_every_second_has_one_cause(lines, parts, counted, good):
    found = goodput.summarise(lines)
    assert found.seconds.keys() == set(goodput.CAUSES)
    assert {cause: pytest.approx(s) for cause, s in found.seconds.items() if s} == parts
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s)
    assert sum(sum(s.seconds.values()) for s in found.spans) == pytest.approx(found.wall_s)
    assert (found.attempts, found.steps, found.steps_repeated) == counted
    assert found.goodput == (None if good is None else pytest.approx(good))
    assert found.record()["wall_s"] == pytest.approx(sum(parts.values())) and goodput.format_goodput(found)


# ---- The file


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the ledger's clock by one that moves only when the test moves it."""
    now = [1000.0]
    clock = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0] - 900.0)
    monkeypatch.setattr("jaxtrain.metrics.goodput.time", clock)
    return now


def test_blocks_claim_their_time_and_no_more(tmp_path: Path, now: list[float]):
    path = tmp_path / goodput.FILE
    with Ledger(path, now[0] - 3.0) as ledger:
        with ledger.during("compile"):
            now[0] += 20.0
        ledger.back(0)
        ledger.base("step")
        with ledger.during("eval"):
            now[0] += 1.0
            with ledger.during("data"):
                now[0] += 5.0
            now[0] += 0.5
        ledger.record_step(3)
        now[0] += 4.0
        found = ledger.close(0, "done")
        ledger.record_step(9)
    assert found is not None and found.steps == 3 and found.wall_s == pytest.approx(33.5)
    expected = {"startup": 3.0, "compile": 20.0, "eval": 1.5, "data": 5.0, "step": 4.0}
    assert {cause: seconds for cause, seconds in found.seconds.items() if seconds} == pytest.approx(expected)
    last = [json.loads(line) for line in path.read_text().splitlines()][-1]
    assert last == {"kind": "end", "time": pytest.approx(1030.5), "exit_code": 0, "reason": "done"}


def test_lines_come_while_a_block_is_long(tmp_path: Path, now: list[float]):
    """The heartbeat thread writes a line every LINE_S seconds, and touches the file at every beat."""
    path = tmp_path / goodput.FILE
    ledger = Ledger(path, now[0])
    ledger._thread = SimpleNamespace(start=lambda: None, is_alive=lambda: False)  # type: ignore[assignment]
    beats = iter([29.0, 1.0, 1.0])

    def wait(seconds: float) -> bool:
        now[0] += (step := next(beats, 0.0))
        return not step

    with ledger, ledger.during("compile"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ledger, "_over", SimpleNamespace(wait=wait))
            ledger._beat()
        assert [line["kind"] for line in goodput.read_ledger(path)] == ["begin", "spent"]
        assert goodput.read_ledger(path)[-1]["seconds"] == {"compile": 30.0} and path.stat().st_mtime == 1031.0
        assert goodput.summarise(goodput.read_ledger(path)).seconds["compile"] == 31.0


def test_a_line_cut_by_a_kill(tmp_path: Path, now: list[float]):
    path = tmp_path / goodput.FILE
    whole = json.dumps(begin(5.0)) + "\n" + json.dumps(spent(9.0, 4, step=4.0)) + "\n"
    path.write_text(whole + '{"kind": "spe')
    assert [line["kind"] for line in goodput.read_ledger(path)] == ["begin", "spent"]
    with Ledger(path, now[0]) as ledger:
        ledger.end(0, "done")
    assert [line["kind"] for line in goodput.read_ledger(path)] == ["begin", "spent", "begin", "end"]
    path.write_text('{"kind": "spe')
    with Ledger(path, now[0]) as ledger:
        ledger.end(0, "done")
    assert goodput.summarise(goodput.read_ledger(path)).attempts == 1


def test_a_ledger_that_cannot_be_written_ends_no_run(tmp_path: Path, now: list[float], caplog: pytest.LogCaptureFixture):
    path = tmp_path / "gone" / goodput.FILE
    with Ledger(path, now[0]) as ledger:
        with ledger.during("compile"):
            now[0] += 1.0
        path.parent.mkdir()
        with ledger.during("save"):
            now[0] += 2.0
        found = ledger.close(0, "done")
    assert found is not None and (found.seconds["compile"], found.seconds["save"]) == (1.0, 2.0)
    assert len(caplog.records) == 1
