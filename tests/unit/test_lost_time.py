"""The list of lost time: a cause that is planted in a run comes first, with its seconds. One cause's time is in no other."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gpu_traces import RATES, gpu_run, gpu_space, profile_of
from made_runs import fake, gpu, line, write_lines

from jaxtrain.config.schema import RunConfig
from jaxtrain.report import profile_times
from jaxtrain.report.lost_time import LostTime, lost_time, lost_time_section
from jaxtrain.report.profile import StepProfile
from jaxtrain.report.run import read_run
from jaxtrain.report.tables import Table

HARDWARE = {"gpus": [{"max_sm_clock_mhz": 1980, "power_limit_w": 700.0}] * 2}
FULL = {"sm_clock_mhz": 1980.0, "power_w": 650.0}


def spent(step: int, **seconds: float) -> list[dict[str, Any]]:
    """Return the ledger of a run that has done `step` steps."""
    whole = {"kind": "spent", "seconds": {"step": 1.0, **seconds}, "step": step, "doing": "step"}
    return [{"kind": "begin", "time": 1e9, "seen": 1e9}, whole, {"kind": "end", "exit_code": 0}]


def planted(folder: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float = 0.0, **causes: Any) -> StepProfile:
    """Return the profile of a traced run on two GPUs, at full clocks and without saves, but for these causes.

    Args:
        wait_s: data_wait_s of the train lines.
        causes: `clock` (keys of the GPU lines), `ledger`, `mesh`; the rest are arguments of `gpu_space`.
    """
    monkeypatch.setattr(profile_times, "rates_for", lambda gpu, precision: RATES)
    clock, ledger, more = causes.pop("clock", FULL), causes.pop("ledger", spent(1000)), {"hardware": HARDWARE}
    if mesh := causes.pop("mesh", None):
        more["mesh"] = mesh
    gpu_run(folder, gpu_space(**causes)[0], **more)
    started = [gpu(1, n, sm_clock_mhz=300.0) for n in range(2)]  # while the run started
    lines = [*started, *(gpu(step, n, **clock) for step in (10, 20) for n in range(2))]
    write_lines(folder / "metrics.jsonl", [*(line(step, data_wait_s=wait_s, step_time_s=0.5) for step in (10, 20)), *lines])
    (folder / "goodput.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ledger))
    return profile_of(folder)


def ms_of(found: LostTime) -> dict[str, float]:
    return {row.cause: 1e3 * row.seconds for row in found.rows}


def test_a_run_as_planned_loses_only_the_communication_that_is_planned(tmp_path, monkeypatch):
    found = planned = planted(tmp_path, monkeypatch)
    assert found.planned is not None and found.lost.missing == () and found.lost.step_s == found.step_ms / 1e3
    assert ms_of(found.lost) == {"exposed communication": pytest.approx(planned.by_kind["exposed communication"])}
    assert "all-gather over fsdp" in found.lost.rows[0].evidence and "mesh.fsdp" in found.lost.rows[0].setting


# {cause: ms of a step} in order, beside the exposed communication of the plan
CASES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "gather": ({"longer": {"start": 2.0}}, {"exposed communication": 6.0}),  # in three rounds of the loop
    "kernel": ({"longer": {"last": 3.0}}, {"slow kernels": 3.0}),
    "host": ({"gap_ms": 3.0}, {"waiting for the host": 3.0}),
    "data": ({"gap_ms": 5.0, "wait_s": 0.004}, {"waiting for data": 4.0, "waiting for the host": 1.0}),
    "hidden data": ({"longer": {"last": 3.0}, "wait_s": 0.004}, {"slow kernels": 3.0}),  # the GPUs were never idle
    # 4 ms of matmuls as planned at 990 of 1980 MHz
    "clock": ({"clock": FULL | {"sm_clock_mhz": 990.0}}, {"GPU clocks": 2.0}),
    # 4 ms more in the last matmul, 8 in all: half of it is the clock's, and explains the slow kernel
    "clock and kernel": (
        {"clock": FULL | {"sm_clock_mhz": 990.0}, "longer": {"last": 5.0}},
        {"GPU clocks": 4.5, "slow kernels": 0.5},
    ),
    # the clock explains no slow kernel of memory-bound work
    "clock and memory": (
        {"clock": FULL | {"sm_clock_mhz": 990.0}, "longer": {"update": 3.0}},
        {"slow kernels": 3.0, "GPU clocks": 2.0},
    ),
    "save": ({"ledger": spent(1000, save=5.0, eval=2.0)}, {"saves": 5.0, "evaluations": 2.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_planted_cause_comes_first_with_its_seconds(case: str, tmp_path, monkeypatch):
    causes, expected = CASES[case]
    before = planted(tmp_path / "before", monkeypatch).by_kind["exposed communication"]
    found = planted(tmp_path / "run", monkeypatch, **causes)
    exposed = expected.get("exposed communication", 0.0) + before
    assert ms_of(found.lost) == pytest.approx(expected | {"exposed communication": exposed}, abs=1e-3)
    assert found.lost.rows[0].cause == next(iter(expected))
    seconds = [row.seconds for row in found.lost.rows]
    assert seconds == sorted(seconds, reverse=True)
    (made,) = [part for part in lost_time_section(found.lost).blocks if isinstance(part, Table)]
    assert list(made.columns[0].cells) == list(ms_of(found.lost))
    assert list(found.to_pandas("lost")["cause"]) == list(ms_of(found.lost))


def test_throttling_and_power_are_evidence(tmp_path, monkeypatch):
    hot = {"sm_clock_mhz": 990.0, "power_w": 690.0, "throttled": 1.0, "throttle_reasons": "sw_power_cap"}
    row = planted(tmp_path, monkeypatch, clock=hot).lost.rows[0]
    assert all(each in row.evidence for each in ("990 of 1,980 MHz", "690 W of 700 W", "sw_power_cap"))


def test_the_bubble_of_a_pipeline_follows_from_its_shape(tmp_path, monkeypatch):
    """Two stages and the 6 microbatches of the config: 1/7 of the step."""
    mesh = {"data": 1, "fsdp": 2, "tensor": 1, "seq": 1, "stage": 2}
    found = planted(tmp_path, monkeypatch, mesh=mesh)
    assert ms_of(found.lost)["pipeline bubble"] == pytest.approx(found.step_ms / 7)


def test_a_save_between_the_traced_steps_is_no_wait_for_the_host(tmp_path, monkeypatch):
    """Its share is of the wall time, of which the ledger has 7.5 s in 10 s for saves."""
    found = planted(tmp_path / "run", monkeypatch, ledger=spent(1000, save=7.5, eval=1.5))
    (saves,) = [row for row in found.lost.rows if row.cause == "saves"]
    assert saves.of_wall_time == 0.75 and saves.seconds == 0.0075
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    first, *_, last = found.steps  # numbered from 0
    for every, missing in ((first + 1, 1), (last + 1, 0), (10**6, 0)):
        changed = config | {"checkpoint": {"every_steps": every}}
        (tmp_path / "run" / "config.json").write_text(json.dumps(changed))
        lost = profile_of(tmp_path / "run").lost
        assert len(lost.missing) == len(found.lost.missing) + missing
        assert not missing or "waiting for the host" not in ms_of(lost)


def test_what_was_not_measured_is_named(tmp_path, monkeypatch):
    """Without a trace, the clocks' time is that in which the GPUs were busy. Each missing source has one sentence."""
    folder = tmp_path / "run"
    planted(folder, monkeypatch, clock=FULL | {"sm_clock_mhz": 990.0, "utilization": 0.8}, wait_s=0.1)
    found = lost_time(None, read_run(folder))
    assert ms_of(found) == {"GPU clocks": pytest.approx(200), "waiting for data": pytest.approx(100)} and found.step_s == 0.5
    assert len(found.missing) == 1 and "--config.profile.start" in found.missing[0]
    alone = lost_time(None, read_run(fake(tmp_path / "new", [line(10, step_time_s=0.5, data_wait_s=None)])))
    assert alone.rows == () and len(alone.missing) == 4
    empty = lost_time(None, read_run(fake(tmp_path / "empty", [line(10, step_time_s=None)])))
    assert empty.rows == () and len(empty.missing) == 1 and empty.step_s == 0
    (folder / "receipt.json").unlink()
    found = profile_of(folder)
    assert "exposed communication" in ms_of(found.lost) and len(found.lost.missing) == 2
    json.dumps([row.seconds for row in found.lost.rows])


def test_settings_are_keys_of_the_config(tmp_path, monkeypatch):
    """Also those of axes that this run does not have."""
    from jaxtrain.report import lost_time as module

    text = Path(module.__file__).read_text()
    named = set(
        re.findall(
            r"(?<![\w.])(?:mesh|sharding|parallel|train|dtypes|moe|pipeline|remat|optimizer|eval|data|"
            r"attention|loss|compiler|checkpoint|sample|log)\.[a-z_]+",
            text,
        )
    )
    assert {"mesh.fsdp", "remat.policy", "checkpoint.every_steps"} <= named <= set(RunConfig().flat)
