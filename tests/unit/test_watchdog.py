"""The watchdog: which time budget is exceeded, with a fake clock, and the files that it leaves.

tests/campaign/test_hangs.py has real hangs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import Clock, Turns

from jaxtrain.runtime import watchdog
from jaxtrain.runtime.watchdog import BUDGETS, Watchdog, parse_budgets

DOG: dict[str, float] = {"step": 10, "data": 5, "checkpoint": 20, "compile": 0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watchdog, "time", made)
    return made


def watching(folder: Path, **more: Any) -> Watchdog:
    return Watchdog(DOG, folder / "run", **{"facts": dict, "ended": lambda cause: None, **more})


def late(dog: Watchdog, clock: Clock) -> str | None:
    """Return the name of the budget that is exceeded."""
    report = dog._overdue(clock.now)
    return report and report["budget"]


def test_a_phase_has_its_budget_and_a_beat_gives_it_back(clock: Clock, tmp_path: Path):
    dog = watching(tmp_path)
    with dog.phase("step"):
        clock.now += 10
        assert late(dog, clock) is None
        clock.now += 0.1
        assert late(dog, clock) == "step"
        dog.beat()
        assert late(dog, clock) is None
        clock.now += 10.1
        assert late(dog, clock) == "step"
    with dog.phase("compile"):  # 0: not watched
        clock.now += 1e6
        assert late(dog, clock) is None
    assert late(dog, clock) is None
    with pytest.raises(KeyError):
        dog.phase("lunch").__enter__()


def test_an_outer_phase_stands_still_while_an_inner_one_runs(clock: Clock, tmp_path: Path):
    dog = watching(tmp_path)
    with dog.phase("step"):
        clock.now += 6
        for _ in range(3):
            with dog.phase("data"):
                clock.now += 5
                assert late(dog, clock) is None
        with dog.phase("data"):
            clock.now += 5.1
            report = dog._overdue(clock.now)
            assert report and (report["budget"], report["budget_s"], report["phase"]) == ("data", 5, "data")
            activities = [(a["name"], a["stands"], round(a["seconds"], 6)) for a in report["activities"]]
            assert activities == [("step", True, 6.0), ("data", False, 5.1)]
        clock.now += 4
        assert late(dog, clock) is None
        clock.now += 0.1
        assert late(dog, clock) == "step"


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
        assert late(dog, clock) is None
        clock.now += 0.5
        report = dog._overdue(clock.now)
        assert report and "the save of step 500" in report["cause"]
        assert (report["budget"], report["phase"]) == ("checkpoint", "step")
        clock.now += 1
        assert late(dog, clock) == "checkpoint", "the furthest beyond its budget"
    with pytest.raises(KeyError):
        dog.end(first)


def watch(dog: Watchdog, clock: Clock, monkeypatch: pytest.MonkeyPatch, *turns: Callable[[], object]) -> list[int]:
    """Return the exit codes with which the watchdog would end the process. `turns` run before its checks."""
    ends: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", ends.append)
    monkeypatch.setattr(dog, "_stop", Turns(clock, *turns))
    dog._watch()
    return ends


def test_time_in_which_the_process_did_not_run_is_given_back(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A pause of 100 s (a stopped process or a suspended machine) uses no time budget. The watchdog checks every 0.25 s."""
    looks = [lambda: None] * 19
    dog = watching(tmp_path)
    with dog.phase("step"), dog.phase("data"):
        assert watch(dog, clock, monkeypatch, *looks[:9], lambda: clock.sleep(100), *looks[:9]) == []  # then 5 s are over
        assert watch(dog, clock, monkeypatch, lambda: None) == [124]

    def pause_and_begin() -> None:
        clock.sleep(100)
        dog.begin("data", "a read")

    dog = watching(tmp_path)
    assert watch(dog, clock, monkeypatch, pause_and_begin, *looks) == []
    assert watch(dog, clock, monkeypatch, lambda: None) == [124], "what began after the pause gets no more time"


def test_a_watchdog_that_fails_ends_no_run(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dog = watching(tmp_path)
    assert watch(dog, clock, monkeypatch, lambda: 1 / 0) == []


def hang(dog: Watchdog, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step hang until the watchdog would end the process."""
    with dog.phase("step"):
        assert watch(dog, clock, monkeypatch, *[lambda: None] * 41) == [124]


@pytest.mark.parametrize(("index", "suffix"), [(0, ""), (3, ".3")])
def test_it_leaves_evidence_and_ends_the_process(
    index: int, suffix: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended: list[str] = []
    known = {"last_step": 7, "loss": float("nan"), "path": tmp_path}
    hang(watching(tmp_path, facts=lambda: known, ended=ended.append, process_index=index), clock, monkeypatch)
    (folder,) = (tmp_path / "run").glob("hang-????????-??????")
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert texts.keys() == {f"cause{suffix}.txt", f"report{suffix}.json", f"stacks{suffix}.txt"}
    (cause,) = ended
    assert "step=10" in cause and texts[f"cause{suffix}.txt"] == f"{cause}\n"
    assert "MainThread" in texts[f"stacks{suffix}.txt"] and "test_watchdog.py" in texts[f"stacks{suffix}.txt"]
    told = json.loads(texts[f"report{suffix}.json"])
    assert told["facts"] == {"last_step": 7, "loss": "NaN", "path": str(tmp_path)}
    assert (told["phase"], told["seconds"], told["budget_s"], told["process_index"]) == ("step", 10.25, 10, index)
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
    hang(watching(tmp_path, facts=facts, ended=ended), clock, monkeypatch)
    (folder,) = (tmp_path / "tmp").glob("hang-*")
    assert json.loads((folder / "report.json").read_text())["facts"] == {"error": "SystemExit(3)"}
    assert all(word in caplog.text for word in (str(folder), str(tmp_path / "run"), "NotADirectory", "ZeroDivisionError"))


def test_budgets_come_from_the_config():
    assert parse_budgets("") == (BUDGETS, [])
    assert parse_budgets(" step=600, data = 0.5,compile=0 ") == ({**BUDGETS, "step": 600, "data": 0.5, "compile": 0}, [])
    assert BUDGETS["compile"] > 2 * 20 * 60  # a cold compile of 20 minutes is allowed


@pytest.mark.parametrize("text", ["stop=5", "step", "step=", "step=fast", "step=-1", "step=nan", "step=inf", "step=5,step=6"])
def test_wrong_budgets_are_refused_and_keep_the_default(text: str):
    budgets, (problem,) = parse_budgets(text)
    assert problem.key == "train.timeouts" and problem.value == text.rpartition(",")[2]
    assert budgets == {**BUDGETS, "step": 5.0 if text.startswith("step=5") else BUDGETS["step"]}
