"""The package stays small: each folder has a budget of lines of Python, everything counted.

A change that makes a folder smaller lowers its budget to what it reached. A budget is raised only in a commit whose body says
which capability needs it. It is one of a folder, never of a file: no file is cut to look small.
"""

import pytest
from test_imports import PACKAGE, modules

BUDGETS = {
    "config": 4210,
    "runtime": 2440,
    "metrics": 3180,
    "data": 5860,
    "kernels": 4880,
    "checkpoint": 1390,
    "models": 6050,
    "optim": 1080,
    "step": 4710,
    "hf": 3630,
    "plan": 5690,
    "train": 6100,
    "report": 5000,
    "node": 4410,
    "commands": 2430,
    "": 660,
}
STEP = 10  # a budget is at most this far above what is there


def lines(room: str) -> int:
    """Return the number of lines of a folder; of "", those of the files beside the folders."""
    found = [path for path in modules().values() if path.relative_to(PACKAGE).parts[:-1][:1] == ((room,) if room else ())]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found)


@pytest.mark.parametrize("room", BUDGETS)
def test_a_folder_is_within_its_budget(room: str):
    there = lines(room)
    print(f"{room or 'beside them'}: {there} of {BUDGETS[room]}")
    assert there <= BUDGETS[room], "write less, or say in the commit which capability needs more"
    assert there > BUDGETS[room] - STEP, f"lower its budget to {there}"


def test_every_folder_has_a_budget():
    rooms = {path.relative_to(PACKAGE).parts[0] for path in modules().values() if path.parent != PACKAGE}
    assert rooms | {""} == set(BUDGETS)
    print(f"{sum(map(lines, BUDGETS))} lines of {sum(BUDGETS.values())} in {len(modules())} modules")
