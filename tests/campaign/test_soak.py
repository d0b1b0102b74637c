"""A long run: neither its memory nor the number of its open files grows."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from faults import Faults, steps_written


@pytest.mark.long
def test_nothing_grows(tmp_path: Path) -> None:
    """From step 1500 on, memory grows by less than 1%, 3 KB a step, and open files do not grow. Earlier steps fill caches.

    TensorStore loses references when it converts JSON to Python objects: 32 KB a save, 0.6 KB a step here.
    """
    steps, settled = 5000, 1500
    often: dict[str, Any] = {"eval__every_steps": 50, "eval__sequences": 1}
    often |= {"checkpoint__every_steps": 50, "checkpoint__keep": 2}
    faults = Faults(tmp_path, train__steps=steps, log__every_steps=10, data__source="stdlib", **often)
    workdir = tmp_path / "run"
    # malloc's arenas, one for each thread in turn, keep what threads have freed: how much depends on the load of the machine
    child = faults.start(workdir, env={"MALLOC_ARENA_MAX": "1"})
    proc, seen = Path(f"/proc/{child.process.pid}"), []
    while child.process.poll() is None:
        at = steps_written(workdir)
        if not seen or at > seen[-1][0]:
            try:
                memory = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                seen.append((at, memory, len(list((proc / "fd").iterdir()))))
            except OSError:
                break
        time.sleep(0.02)
    code, said = child.end()
    assert code == 0, said
    late = [entry for entry in seen if entry[0] >= settled]
    first, last = late[: len(late) // 3], late[-(len(late) // 3) :]
    # The least of each part: a save that runs meanwhile holds copies of the state and open files.
    memory = min(m for _, m, _ in last) / min(m for _, m, _ in first)
    files = (min(f for *_, f in first), min(f for *_, f in last))
    assert memory < 1.01
    assert files[1] <= files[0]
