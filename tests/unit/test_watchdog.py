"""The watchdog: which time budget is exceeded, with a fake clock, and the files that it leaves.

tests/campaign/test_hangs.py has real hangs.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import Clock, Turns

from jaxtrain.runtime import progress, watchdog
from jaxtrain.runtime.watchdog import BUDGETS, Watchdog, parse_budgets

DOG: dict[str, float] = {"step": 10, "data": 5, "checkpoint": 20, "compile": 0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watchdog, "time", made)
    return made


def watching(folder: Path, **more: Any) -> Watchdog:
    return Watchdog(DOG, folder / "run", **{"ended": lambda cause: 124, **more})


def late(dog: Watchdog, clock: Clock) -> str | None:
    """Return the name of the budget that is exceeded."""
    activity = dog._overdue(clock.now)
    return activity and activity.budget


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
            report = dog._report(dog._overdue(clock.now))
            assert (report["budget"], report["budget_s"], report["phase"]) == ("data", 5, "data")
            assert [(a["name"], round(a["seconds"], 6)) for a in report["activities"]] == [("data", 5.1)]
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
        report = dog._report(dog._overdue(clock.now))
        assert "the save of step 500" in report["cause"]
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
    dog = watching(tmp_path, ended=lambda cause: ended.append(cause) or 124, process_index=index)
    dog.facts = lambda: {"last_step": 7, "path": tmp_path}
    hang(dog, clock, monkeypatch)
    (folder,) = (tmp_path / "run").glob("hang-????????-??????")
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert texts.keys() == {f"cause{suffix}.txt", f"report{suffix}.json", f"stacks{suffix}.txt"}
    (cause,) = ended
    assert "step=10" in cause and texts[f"cause{suffix}.txt"] == f"{cause}\n"
    assert "MainThread" in texts[f"stacks{suffix}.txt"] and "test_watchdog.py" in texts[f"stacks{suffix}.txt"]
    told = json.loads(texts[f"report{suffix}.json"])
    assert told["facts"] == {"last_step": 7, "path": str(tmp_path)}
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
    dog = watching(tmp_path, ended=ended)
    dog.facts = facts
    hang(dog, clock, monkeypatch)
    (folder,) = (tmp_path / "tmp").glob("hang-*")
    assert json.loads((folder / "report.json").read_text())["facts"] == {"error": "SystemExit(3)"}
    assert all(word in caplog.text for word in (str(folder), str(tmp_path / "run"), "NotADirectory", "ZeroDivisionError"))


# ---- Of several processes


class FakePeers:
    """The other processes as the watchdog sees them. records: what each publishes; process 1 stops after the first look."""

    count = 3

    def __init__(self, *records: dict[str, Any]):
        self.hang: str | None = None
        self.records = records
        self.looks = 0

    def read_progress(self) -> dict[int, str]:
        self.looks += 1
        return {i: json.dumps(record | {"time": 990 + (self.looks if i != 1 else 1)}) for i, record in enumerate(self.records)}

    def present(self) -> list[int]:
        return [0, 1, 2]

    def name(self, index: int) -> str:
        return f"process {index} (host h, pid {index})"

    def tell_hang(self, text: str) -> str:
        self.hang = text
        return text

    def meet(self, name: str, timeout_s: float) -> None: ...

    def waits_at(self) -> str | None: ...

    def publish(self, text: str) -> None: ...


def record(step: int | None, phase: str, seconds: float = 9.0, waits_at: str | None = None) -> dict[str, Any]:
    return {"step": step, "phase": phase, "seconds": seconds, "waits_at": waits_at}


def test_the_report_says_where_several_processes_are(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first process to find a hang tells it to the others, which write the same into the folder of the same name."""
    peers, ended = FakePeers(record(7, "step"), record(6, "data"), record(7, "step")), list[str]()
    for index in (0, 2):
        dog = watching(tmp_path, ended=lambda cause: ended.append(cause) or 124, process_index=index)
        dog.peers = peers  # type: ignore[assignment]
        if index == 0:
            hang(dog, clock, monkeypatch)
        else:
            assert watch(dog, clock, monkeypatch, lambda: None) == [124]
    (folder,) = (tmp_path / "run").glob("hang-*")
    first, other = (json.loads((folder / name).read_text()) for name in ("report.json", "report.2.json"))
    assert first["processes"] == other["processes"] and first["cause"] == other["cause"] == ended[0] == ended[1]
    assert (first["budget"], other["budget"]) == ("step", None)
    silent = [place.pop("silent_s") for place in first["processes"]]
    assert silent[0] is silent[2] is None and silent[1] > 0
    assert first["processes"] == [{"process": i, **each} for i, each in enumerate(peers.records)]
    assert ended[0].startswith("process 1 (host h, pid 1) ")


@pytest.mark.parametrize(
    ("records", "silent", "order"),
    [
        ([record(7, "step"), record(7, "data"), record(8, "step"), record(8, "step")], (), [[1], [0], [2, 3]]),
        ([record(8, "step"), record(7, "data"), record(8, "step")], (), [[1], [0, 2]]),
        ([record(8, "step"), record(8, "save"), record(8, "step")], (), [[1], [0, 2]]),
        ([record(4, "step", waits_at="best"), record(5, "step"), record(4, "step", waits_at="best")], (), [[1], [0, 2]]),
        ([record(7, "step"), record(9, "step"), record(9, "step")], [1], [[1], [0], [2]]),
        ([record(None, "compile"), record(None, "startup"), record(None, "compile")], (), [[1], [0, 2]]),
    ],
)
def test_who_others_may_wait_for_comes_first(records: list[dict[str, Any]], silent: tuple[int, ...], order: list[list[int]]):
    texts = {i: json.dumps(each | {"time": 0.0}) for i, each in enumerate(records)}
    parts = progress.describe_states(
        progress.process_states(texts, range(len(records)), silent), lambda i: f"process {i}"
    ).split("; ")
    assert [[int(digit) for digit in re.findall(r"\d+", re.split(" is | are | wait| ha", part)[0])] for part in parts] == order


def test_before_anything_is_published_nothing_is_said():
    assert progress.describe_states(progress.process_states({}, range(3), ()), str) == ""
    words = progress.describe_states(
        progress.process_states({0: json.dumps(record(1, "step") | {"time": 0.0})}, range(2), ()), lambda i: f"process {i}"
    )
    assert words.startswith("process 1 ")


def test_budgets_come_from_the_config():
    assert parse_budgets("") == (BUDGETS, [])
    assert parse_budgets(" step=600, data = 0.5,compile=0 ") == ({**BUDGETS, "step": 600, "data": 0.5, "compile": 0}, [])
    assert BUDGETS["compile"] > 2 * 20 * 60  # a cold compile of 20 minutes is allowed


@pytest.mark.parametrize("text", ["stop=5", "step", "step=", "step=fast", "step=-1", "step=nan", "step=inf", "step=5,step=6"])
def test_wrong_budgets_are_refused_and_keep_the_default(text: str):
    budgets, (problem,) = parse_budgets(text)
    assert problem.key == "train.timeouts" and problem.value == text.rpartition(",")[2]
    assert budgets == {**BUDGETS, "step": 5.0 if text.startswith("step=5") else BUDGETS["step"]}
