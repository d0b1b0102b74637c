"""What to say while a config that fits is looked for: progress, the advice it ends with, the reasons of its choices."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.plan.report.live import live
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search.fit import Advice, Progress, Reason, figures
from jaxtrain.plan.search.parallel import Outcome


def with_hints(plan: Plan, found: Iterable[Advice | Reason]) -> Plan:
    """The plan, with these as its last hints."""
    return dataclasses.replace(plan, hints=(*plan.hints, *(item.text for item in found)))


@contextlib.contextmanager
def watch(console: Console) -> Iterator[Callable[[Progress], None]]:
    """What to give `advise` or `why` as `on_progress`."""
    said = 0
    with live(console) as show:

        def changed(progress: Progress) -> None:
            nonlocal said
            new = list(enumerate(progress.finished, 1))[said:]
            said += len(new)
            lines = [f"{n}: {progress.done}{label}: {_came_of(outcome)}" for n, (label, outcome) in new]
            now = ", ".join(f"{progress.done}{label}" for label in progress.running)
            show(len(progress.finished), progress.most, now, lines)

        yield changed


def _came_of(outcome: Outcome) -> str:
    if outcome.plan is None:
        return f"{outcome.kind}: {outcome.reason}"
    return figures(outcome.plan) + ("" if outcome.plan.fits else ", does not fit")


def show_advice(found: Sequence[Advice], console: Console) -> None:
    """Prints what makes a config fit, and the overrides to paste; nothing where there is no advice."""
    if not found:
        return
    _listed(console, "what would make it fit", [(a.text, "green" if a.fits else "") for a in found])
    if found[0].fits:
        console.print(Text("\nthe first of these, to paste behind the config", style="bold"))
        console.print(Text(" ".join(f"--config.{change}" for change in found[0].changes)), soft_wrap=True)


def show_reasons(found: Sequence[Reason], console: Console) -> None:
    """Prints which choices are needed for the config to fit, and which are not."""
    lines = [(r.text, "yellow" if r.needed is False else "") for r in found]
    _listed(console, "what was given up for memory", lines or [("nothing: the config makes no choice that saves memory", "")])


def _listed(console: Console, title: str, lines: Iterable[tuple[str, str]]) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column(overflow="fold")
    for line, style in lines:
        table.add_row(Text("-"), Text(line), style=style)
    console.print(table)
