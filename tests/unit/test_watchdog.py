"""The watchdog: which time budget is exceeded, with a fake clock, and the files that it leaves.

tests/campaign/test_hangs.py has real hangs.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import Clock, Turns

from jaxtrain import watchdog
from jaxtrain.watchdog import BUDGETS, Watchdog, parse_budgets

DOG: dict[str, float] = {"step": 10, "data": 5, "checkpoint": 20, "compile": 0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watchdog, "time", made)
    return made


def watching(folder: Path, **more: Any) -> Watchdog:
    return Watchdog(DOG, folder / "run", **{"facts": dict, "ended": lambda cause: None, **more})


def cause(dog: Watchdog, clock: Clock) -> str | None:
    report = dog._overdue(clock.now)
    return report and report["cause"].partition(" s (train.timeouts: ")[0]


def test_a_phase_has_its_budget_and_a_beat_gives_it_back(clock: Clock, tmp_path: Path):
    dog = watching(tmp_path)
    with dog.phase("step"):
        clock.now += 10
        assert cause(dog, clock) is None
        clock.now += 0.1
        assert cause(dog, clock) == "no step finished within 10"
        dog.beat()
        assert cause(dog, clock) is None
        clock.now += 10.1
        assert cause(dog, clock) == "no step finished within 10"
    with dog.phase("compile"):  # 0: not watched
        clock.now += 1e6
        assert cause(dog, clock) is None
    assert cause(dog, clock) is None
    with pytest.raises(KeyError):
        dog.phase("lunch").__enter__()


def test_an_outer_phase_stands_still_while_an_inner_one_runs(clock: Clock, tmp_path: Path):
    dog = watching(tmp_path)
    with dog.phase("step"):
        clock.now += 6
        for _ in range(3):
            with dog.phase("data"):
                clock.now += 5
                assert cause(dog, clock) is None
        with dog.phase("data"):
            clock.now += 5.1
            report = dog._overdue(clock.now)
            assert report and (report["cause"], report["phase"]) == (
                "waiting for data for 5 s (train.timeouts: data=5)",
                "data",
            )
            assert [(a["name"], a["stands"], round(a["seconds"], 6)) for a in report["activities"]] == [
                ("step", True, 6.0),
                ("data", False, 5.1),
            ]
        clock.now += 4
        assert cause(dog, clock) is None
        clock.now += 0.1
        assert cause(dog, clock) == "no step finished within 10"


def test_what_goes_on_beside_the_main_thread_is_watched_too(clock: Clock, tmp_path: Path):
    dog = watching(tmp_path)
    first = dog.begin("checkpoint", "the save of step 250")
    clock.now += 5
    dog.begin("checkpoint", "the save of step 500")
    dog.end(first)
    with dog.phase("step"):
        clock.now += 11
        dog.beat()
        clock.now += 9
        assert cause(dog, clock) is None
        clock.now += 0.5
        report = dog._overdue(clock.now)
        assert report and report["cause"].startswith("the save of step 500 has not finished after 20 s")
        assert (report["budget"], report["phase"]) == ("checkpoint", "step")
        clock.now += 1
        assert cause(dog, clock) == "the save of step 500 has not finished after 20", "the furthest beyond its budget"
    with pytest.raises(KeyError):
        dog.end(first)


def watch(dog: Watchdog, clock: Clock, monkeypatch: pytest.MonkeyPatch, *turns: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the reports with which the watchdog's thread would end the process. `turns` run between its checks."""
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr(dog, "_leave", reports.append)
    monkeypatch.setattr(dog, "_stop", Turns(clock, *turns))
    dog._watch()
    return reports


def test_time_in_which_the_process_did_not_run_is_given_back(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A pause of 100 s (a stopped process or a suspended machine) uses no time budget. The watchdog checks every 0.25 s."""
    looks = [lambda: None] * 4
    dog = watching(tmp_path)
    with dog.phase("step"), dog.phase("data"):
        assert watch(dog, clock, monkeypatch, *looks, *looks, lambda: clock.sleep(100), *looks) == []
        assert dog._phases[1].seconds(clock.now) == pytest.approx(14 / 4), "a quarter for each look"
        assert dog._phases[0].seconds(clock.now) == 0
        dog.beat()
        dog._give_back(100, clock.now)  # an activity that began after the pause gets no extra time
        assert dog._phases[1].seconds(clock.now) == 0
        assert len(watch(dog, clock, monkeypatch, *looks * 5, lambda: None)) == 1


def test_a_watchdog_that_fails_ends_no_run(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    dog = watching(tmp_path)
    monkeypatch.setattr(dog, "_overdue", lambda now: 1 / 0)
    caplog.set_level(logging.ERROR, "jaxtrain")
    assert watch(dog, clock, monkeypatch, lambda: None) == []
    assert "the watchdog has failed; the run continues without it" in caplog.text


def leave(dog: Watchdog, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step hang until the watchdog would end the process."""
    ends: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", ends.append)
    with dog.phase("step"):
        clock.now += 11
        report = dog._overdue(clock.now)
        assert report
        dog._leave(report)
    assert ends == [124]


CAUSE = "no step finished within 10 s (train.timeouts: step=10)"


@pytest.mark.parametrize("index", [0, 3])
def test_it_leaves_evidence_and_ends_the_process(index: int, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ended: list[str] = []
    known = {"last_step": 7, "loss": float("nan"), "path": tmp_path}
    dog = watching(tmp_path, facts=lambda: known, ended=ended.append, process_index=index)
    leave(dog, clock, monkeypatch)
    assert ended == [CAUSE]
    (folder,) = (tmp_path / "run").glob("hang-????????-??????")
    names = ("cause.txt", "report.json", "stacks.txt") if index == 0 else ("cause.3.txt", "report.3.json", "stacks.3.txt")
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(texts) == list(names)
    found, report, stacks = (texts[name] for name in names)
    assert found == f"{CAUSE}\n" and stacks.startswith(CAUSE)
    assert "MainThread" in stacks and "test_watchdog.py" in stacks and "All threads of the process" in stacks
    told = json.loads(report)
    assert told["facts"] == {"last_step": 7, "loss": "NaN", "path": str(tmp_path)}
    assert (told["phase"], told["seconds"], told["budget_s"], told["process_index"]) == ("step", 11, 10, index)
    assert {"host", "pid", "time", "activities"} <= set(told)


def test_it_ends_the_process_whatever_fails(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The callbacks `facts` and `ended` and writes to the run's folder all fail. The report goes to the temporary folder."""

    def facts() -> dict[str, Any]:
        raise SystemExit(3)

    def ended(cause: str) -> None:
        raise ZeroDivisionError

    (tmp_path / "run").write_text("no folder")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(watchdog.tempfile, "tempdir", str(tmp_path / "tmp"))
    leave(watching(tmp_path, facts=facts, ended=ended), clock, monkeypatch)
    (folder,) = (tmp_path / "tmp").glob("hang-*")
    assert json.loads((folder / "report.json").read_text())["facts"] == {"error": "SystemExit(3)"}
    assert f"Evidence: {folder}; {tmp_path / 'run'}" in caplog.text and "could not be written: NotADirectory" in caplog.text
    assert "files could not be completed: ZeroDivisionError()" in caplog.text


def test_budgets_come_from_the_config():
    assert parse_budgets("") == (BUDGETS, [])
    assert parse_budgets(" step=600, data = 0.5,compile=0 ") == ({**BUDGETS, "step": 600, "data": 0.5, "compile": 0}, [])
    assert BUDGETS["compile"] > 2 * 20 * 60  # a cold compile of 20 minutes is allowed


@pytest.mark.parametrize(
    "text, said",
    [
        ("stop=5", "Did you mean step?"),
        ("step", "must be NAME=SECONDS"),
        ("step=", "must be NAME=SECONDS"),
        *[(f"step={value}", "a number of seconds above 0") for value in ("fast", "-1", "nan", "inf")],
        ("step=5,step=6", "'step' is named twice"),
    ],
)
def test_wrong_budgets_are_refused_and_keep_the_default(text: str, said: str):
    budgets, (problem,) = parse_budgets(text)
    assert problem.key == "train.timeouts" and said in str(problem)
    assert budgets == {**BUDGETS, "step": 5.0 if text.startswith("step=5") else BUDGETS["step"]}
