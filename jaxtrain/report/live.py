"""The progress of plans while they are made: a bar on a terminal, lines elsewhere."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text


class Show(Protocol):
    def __call__(self, completed: int, total: int, now: str = "", lines: Sequence[str] = ()) -> None:
        """On a terminal, show a bar with both counts and `now` (work in progress). Elsewhere, print `lines` (new results)."""
        ...


@contextlib.contextmanager
def live_progress(console: Console, title: str = "plans") -> Iterator[Show]:
    """Yield the function to call after every change of progress. The bar disappears when the block ends."""
    if not console.is_terminal:

        def print_lines(completed: int, total: int, now: str = "", lines: Sequence[str] = ()) -> None:
            for line in lines:
                console.print(Text(line), soft_wrap=True)

        yield print_lines
        return
    # The count and the clock keep their width; this column gets the rest.
    now_column = TextColumn("{task.fields[now]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), now_column, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(title, total=None, now="")

        def update(completed: int, total: int, now: str = "", lines: Sequence[str] = ()) -> None:
            bar.update(task, completed=completed, total=total, now=now)

        yield update
