"""What is seen while plans are made: a bar on a terminal, elsewhere a line for each."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text


class Show(Protocol):
    def __call__(self, completed: int, total: int, now: str = "", lines: Sequence[str] = ()) -> None:
        """So many of so many are done, and `now` tells more, all three on a terminal; elsewhere `lines` are what is new."""
        ...


@contextlib.contextmanager
def live(console: Console, title: str = "plans") -> Iterator[Show]:
    """Gives what is to be called after every change. The bar is gone when the block ends."""
    if not console.is_terminal:

        def say(completed: int, total: int, now: str = "", lines: Sequence[str] = ()) -> None:
            for line in lines:
                console.print(Text(line), soft_wrap=True)

        yield say
        return
    # What tells more has the room that is left: the count and the clock must not give way to it.
    rest = TextColumn("{task.fields[now]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), rest, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(title, total=None, now="")

        def move(completed: int, total: int, now: str = "", lines: Sequence[str] = ()) -> None:
            bar.update(task, completed=completed, total=total, now=now)

        yield move
