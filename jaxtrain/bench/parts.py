"""Parts of a long measurement, one after the other within its time: the suite of a node, and what is to be measured on a GPU.

A part that fails, or for which there is no time, is a line of the result; the others are run all the same.
"""

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import rich.console

from jaxtrain import hardware, launch
from jaxtrain.bench import report
from jaxtrain.bench.measure import DATA, words
from jaxtrain.bench.report import Folder

GOOD, OFF, BAD, OUT = "ok", "off", "FAILED", "left out"
STYLES = {BAD: "bold red", OFF: "yellow"}
INTERRUPTED = 130
HEADINGS = ("part", "", "took", "of at most", "what was found")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a part came to: a verdict, a line, a section of the page, data for programs, and a table to be printed at once."""

    verdict: str
    found: str
    lines: list[str] = dataclasses.field(default_factory=list)
    data: Any = None
    table: tuple[Sequence[str], list[list[str]]] | None = None  # headings, rows


@dataclasses.dataclass(frozen=True)
class Node:
    """What parts run on."""

    devices: hardware.Devices
    smoke: bool
    folder: Folder

    @property
    def path(self) -> Path:
        if self.folder.path is None:
            raise ValueError("parts keep a folder")
        return self.folder.path

    def config(self, name: str, micro: int, accum: int) -> tuple[str, list[str]]:
        """(name in tables, command line) of a shipped config on these GPUs, with a batch that takes seconds."""
        count = self.devices.count
        variant = "half" if name == "llama3_8b" and count == 1 else f"gpus={count}"
        batch = [f"--config.train.global_batch={count * micro * accum}", f"--config.train.grad_accum={accum}"]
        return f"{name}:{variant}", [f"--config={launch.REPO}/configs/{name}.py:{variant}", *batch, *DATA["synthetic"]]


@dataclasses.dataclass(frozen=True)
class Part:
    """One of them. It gets `most_s` seconds or what is left, and is left out below `need_s`; `remedy` is then added."""

    name: str
    act: Callable[[Node, float], Outcome]
    most_s: float
    need_s: float = 1.0
    remedy: str = ""

    @property
    def about(self) -> str:
        return (self.act.__doc__ or self.name).splitlines()[0]


def run_parts(
    parts: Sequence[Part],
    node: Node,
    console: rich.console.Console,
    budget_s: float,
    title: str,
    head: Callable[[Mapping[str, Any]], list[str]],
    last: Callable[[Mapping[str, Any]], None],
) -> int:
    """Runs them and returns the exit code: 0, or 1 where a part failed.

    After each the folder holds all that is known: `title`, what `head` makes of the parts done, and their sections. `last` is
    called with those however this ends; KeyboardInterrupt passes through.
    """
    done: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    code, reason = 1, "ended by an exception"
    began = monotonic()
    try:
        for i, part in enumerate(parts, 1):
            started = monotonic()
            limit = min(part.most_s, budget_s - (started - began))
            about = f"part {i} of {len(parts)}: {part.name}: {part.about}"
            report.say(console, f"{about} At most {minutes(limit)}; {minutes(started - began)} gone.", "dim")
            if limit < part.need_s:
                why = f"{max(0.0, limit):.0f} s were left, and it needs {part.need_s:.0f}"
                outcome = Outcome(OUT, f"{why}; {part.remedy}" if part.remedy else why)
            else:
                with console.status(part.name):
                    outcome = guarded(part, node, limit)
            taken = {"seconds": monotonic() - started, "budget_s": max(0.0, limit)}
            kept = {"verdict": outcome.verdict, "found": outcome.found, "data": outcome.data}
            done[part.name] = {**kept, **taken}
            lines += outcome.lines
            report.say(console, f"  {outcome.verdict}: {outcome.found}", STYLES.get(outcome.verdict, ""))
            if outcome.table:
                report.show(console, "", *outcome.table, text=2)
            node.folder.write(title, [*head(done), *lines], parts=done, verdict=verdict(done))
        failed = [name for name, p in done.items() if p["verdict"] == BAD]
        code, reason = (1, f"failed: {', '.join(failed)}") if failed else (0, "done")
    except KeyboardInterrupt:
        code, reason = INTERRUPTED, "Ctrl-C"
        raise
    finally:
        node.folder.finish(code, reason)
        if done:
            report.show(console, "", HEADINGS, map(table_row, done.items()), text=2)
            report.say(console, verdict(done), "bold red" if code else "bold green")
            last(done)
    return code


def guarded(part: Part, node: Node, limit_s: float) -> Outcome:
    """What a part comes to; an exception is a failure of this part, its traceback a file beside the logs."""
    try:
        return part.act(node, limit_s)
    except Exception as error:
        log = node.path / "logs" / f"{report.safe(part.name)}_error.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc())
        return Outcome(BAD, f"{words(error)} ({log})")


def minutes(seconds: float) -> str:
    return f"{max(0, int(seconds)) // 60}:{max(0, int(seconds)) % 60:02d}"


def verdict(done: Mapping[str, Mapping[str, Any]]) -> str:
    """One line on all parts."""
    failed = [f"{name} ({p['found']})" for name, p in done.items() if p["verdict"] == BAD]
    if failed:
        return f"NOT WELL: {'; '.join(failed)}"
    off = [name for name, p in done.items() if p["verdict"] == OFF]
    return "all is well" + (f"; worth a look: {', '.join(off)}" if off else "")


def table_row(item: tuple[str, Mapping[str, Any]]) -> list[str]:
    name, p = item
    return [name, p["verdict"], minutes(p["seconds"]), minutes(p["budget_s"]), p["found"]]


def summary(done: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The head of the page."""
    return [f"**{verdict(done)}**", "", *report.markdown("Parts", HEADINGS, map(table_row, done.items()))]
