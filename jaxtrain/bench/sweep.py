"""Train steps of one config, or of every combination of some of its keys, each in a process of its own."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console

from jaxtrain import launch
from jaxtrain.bench import report
from jaxtrain.bench.case import OK, REFUSED, apart
from jaxtrain.bench.measure import problems
from jaxtrain.bench.report import Folder
from jaxtrain.config import Problem

FORM = "key=value,value;key=value,..., as remat.policy=full,none;mesh.fsdp=4,8"


@dataclasses.dataclass(frozen=True)
class Case:
    """One case: its name in tables, and what makes it of the config."""

    name: str
    argv: tuple[str, ...]


def combinations(text: str) -> tuple[list[tuple[str, ...]], list[Problem]]:
    """Every combination of --sweep as overrides "key=value", and what is wrong with the text.

    A value may hold commas where each is followed by NAME=, as those of remat.tensors do.
    """
    axes, found = [], []
    for part in text.split(";"):
        key, given, values = part.strip().partition("=")
        chosen = [v.strip() for v in re.split(r",(?!\w+=)", values)]
        if not given or not re.fullmatch(r"\w+(\.\w+)+", key) or not all(chosen):
            found.append(Problem("--sweep", part.strip(), "is no key with its values", f"Write {FORM}."))
            continue
        axes.append([f"{key}={value}" for value in chosen])
    names = [axis[0].partition("=")[0] for axis in axes]
    found += [
        Problem("--sweep", name, "given twice", "Give all of its values at once.") for name in {*names} if names.count(name) > 1
    ]
    return list(itertools.product(*axes)), found


def cases(base: Sequence[str], name: str, sweep: str) -> tuple[list[Case], list[Problem]]:
    """The cases of a command line: `base` is its config and overrides."""
    if not sweep:
        return [Case(name, tuple(base))], []
    found, wrong = combinations(sweep)
    return [Case(" ".join(over), (*base, *(f"--config.{o}" for o in over))) for over in found], wrong


def refusals(found: Sequence[Case], count: int) -> dict[str, list[Problem]]:
    """Case -> why it cannot be, for those that cannot."""
    wrong = {case.name: problems(launch.load(case.argv), count) for case in found}
    return {name: p for name, p in wrong.items() if p}


def run(
    found: Sequence[Case],
    refused: Mapping[str, Sequence[Problem]],
    ask: Mapping[str, Any],
    folder: Folder,
    console: rich.console.Console,
) -> int:
    """Measures the cases one after the other. Exit code 0; 1 where none could be measured.

    KeyboardInterrupt passes through, after what is done was shown and written.
    """
    done: dict[str, dict[str, Any]] = {}

    def write() -> None:
        rows = [report.step_row(name, r) for name, r in done.items()]
        lines = report.markdown("Train steps", report.STEP_HEADINGS, rows)
        if len(found) == 1:
            lines += report.markdown("Details", ("", ""), report.step_details(*next(iter(done.items()))))
        folder.write("Step time", lines, cases=[{"name": n, **r} for n, r in done.items()], best=best(done))

    try:
        for i, case in enumerate(found, 1):
            if case.name in refused:
                why = "; ".join(dict.fromkeys(map(str, refused[case.name])))
                done[case.name] = {"verdict": REFUSED, "why": why}
            else:
                with console.status(f"{i} of {len(found)}: {case.name} ..."):
                    asked = {**ask, "argv": list(case.argv), "trace": folder.trace(case.name) if ask["trace"] else ""}
                    done[case.name] = apart("steps", asked, log=folder.log(case.name))
            done[case.name]["argv"] = list(case.argv)
            if len(found) > 1:
                cells = report.step_row(case.name, done[case.name])
                told = f"{cells[1]} s, {cells[3]} tokens/s" if done[case.name]["verdict"] == OK else cells[-1]
                report.say(console, f"{i} of {len(found)}: {case.name}: {told}")
            write()
    finally:
        if len(found) == 1 and done:
            report.show(console, "", ("", ""), report.step_details(*next(iter(done.items()))))
        elif done:
            report.show(console, "", report.STEP_HEADINGS, [report.step_row(n, r) for n, r in done.items()])
            winner = best(done)
            fastest = f"best: {winner}, {done[winner]['tokens_per_s']:,.0f} tokens/s" if winner else "no case was measured"
            report.say(console, fastest, "bold")
        if folder.results["about"]["platform"] == "cpu":
            report.say(console, report.NO_MEASUREMENT, "dim")
    return 0 if best(done) else 1


def best(done: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The case of most tokens a second; None where none was measured."""
    measured = {name: r["tokens_per_s"] for name, r in done.items() if r["verdict"] == OK}
    return max(measured, key=measured.__getitem__) if measured else None
