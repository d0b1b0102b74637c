"""Run the parts of a long measurement one after the other within a time budget.

node/suite.py and benchmarks/first_minutes.py use this module. If a part fails or has no time left, its row in the
result has the reason, and the next part runs.
"""

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import rich.console

from jaxtrain.config import hardware
from jaxtrain.config.durations import duration
from jaxtrain.report import bench
from jaxtrain.report.tables import Table
from jaxtrain.train.child import error_line, last_lines, run_program

GOOD, OFF, BAD, OUT = "ok", "off", "FAILED", "left out"
STYLES = {BAD: "bold red", OFF: "yellow"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a part.

    Attributes:
      verdict: GOOD, OFF, BAD or OUT (left out). OFF is no fault: the result differs from the plan or is incomplete.
      found: the result in one line.
      lines: Markdown lines of the part's section in results.md.
      data: the result as JSON data.
    """

    verdict: str
    found: str
    lines: list[str] = dataclasses.field(default_factory=list)
    data: Any = None


@dataclasses.dataclass(frozen=True)
class Node:
    """Devices and output folder of the parts.

    Attributes:
      smoke: whether to use tiny shapes.
      cache: folder for compiled programs; "": none; None: the folder of the config.
    """

    devices: hardware.Devices
    smoke: bool
    folder: bench.Folder
    cache: str | None = None

    @property
    def path(self) -> Path:
        if self.folder.path is None:
            raise ValueError("parts need a folder")
        return self.folder.path

    def run_program(
        self, name: str, command: list[str], limit_s: float, environ: Mapping[str, str] | None = None
    ) -> tuple[int | None, Outcome]:
        """Run a program as a part. Return (exit code, or None after a timeout; outcome, GOOD if the code is 0, else BAD)."""
        log = self.path / "logs" / f"{bench.file_name(name)}.txt"
        code, output = run_program(command, log, environ=environ, limit_s=max(1.0, limit_s))
        lines = [f"## {name}", "", "```text", *output.strip().splitlines()[-60:], "```", ""]
        if code == 0:
            return code, Outcome(GOOD, last_lines(output).rpartition(" | ")[2], lines)
        return code, Outcome(BAD, "not done in time" if code is None else f"exit code {code}: {last_lines(output)}", lines)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a measurement, of at most `most_s` seconds. It is left out if less than `need_s` of the budget are left.

    gate: if this part fails, no further part runs.
    """

    name: str
    act: Callable[[Node, float], Outcome]
    most_s: float
    need_s: float = 1.0
    gate: bool = False

    def run(self, node: Node, limit_s: float) -> Outcome:
        """Run the part. After an exception the outcome is BAD, and the traceback is saved in logs/."""
        if limit_s < self.need_s:
            return Outcome(OUT, f"{duration(limit_s)} were left, and it needs {duration(self.need_s)}")
        try:
            return self.act(node, limit_s)
        except Exception as error:
            log = node.path / "logs" / f"{bench.file_name(self.name)}_error.txt"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
            return Outcome(BAD, f"{error_line(error)} ({log})")


def run_parts(
    parts: Sequence[Part],
    node: Node,
    console: rich.console.Console,
    budget_s: float,
    title: str,
    after: Callable[[], None] = lambda: None,
) -> int:
    """Run the parts in `budget_s` seconds. Return the exit code: 0, or 1 if a part failed. KeyboardInterrupt passes through.

    After each part, all results so far are in the output folder, with those of parts that it had before, and `after` is called.
    """
    done: dict[str, dict[str, Any]] = node.folder.results.setdefault("parts", {})
    began, code = monotonic(), 0
    try:
        for i, part in enumerate(parts, 1):
            started = monotonic()
            limit = min(part.most_s, budget_s - (started - began))
            about = f"part {i} of {len(parts)}: {part.name}, at most {duration(limit)}; {duration(started - began)} gone"
            bench.print_line(console, about, "dim")
            with console.status(part.name):
                outcome = part.run(node, limit)
            times = {"seconds": monotonic() - started, "budget_s": max(0.0, limit)}
            done[part.name] = dataclasses.asdict(outcome) | times
            bench.print_line(console, f"  {outcome.verdict}: {outcome.found}", STYLES.get(outcome.verdict, ""))
            sections = [line for p in done.values() for line in p["lines"]]
            lines = [f"**{verdict(done)}**", "", *bench.markdown(make_table(done)), *sections]
            node.folder.write(title, lines, verdict=verdict(done))
            after()
            if outcome.verdict == BAD:
                code = 1
                if part.gate:
                    break
    finally:
        if done:
            bench.print_table(console, make_table(done))
            bench.print_line(console, verdict(done), "bold red" if code else "bold green")
    return code


def verdict(done: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the verdict on all parts in one line."""
    failed = [f"{name} ({p['found']})" for name, p in done.items() if p["verdict"] == BAD]
    if failed:
        return f"FAULT: {'; '.join(failed)}"
    off = [name for name, p in done.items() if p["verdict"] == OFF]
    return "no fault" + (f"; worth a look: {', '.join(off)}" if off else "")


def make_table(done: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of parts."""
    rows = [[name, p["verdict"], duration(p["seconds"]), duration(p["budget_s"]), p["found"]] for name, p in done.items()]
    return bench.make_table("Parts", ("part", "", "took", "of at most", "result"), rows, text=2)
