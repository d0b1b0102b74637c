"""What is seen while plans are made: a bar on a terminal, elsewhere a line for each."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


class Show(Protocol):
    def __call__(self, completed: int, total: int, now: str = "", lines: list[str] | None = None) -> None:
        """So many of so many are done. `now`: what stands behind the bar; `lines`: what is new, where there is no bar."""
        ...


@contextlib.contextmanager
def live(console: Console, title: str = "plans") -> Iterator[Show]:
    """Gives what is to be called after every change. The bar is gone when the block ends."""
    if not console.is_terminal:

        def say(completed: int, total: int, now: str = "", lines: list[str] | None = None) -> None:
            for line in lines or ():
                console.print(Text(line), soft_wrap=True)

        yield say
        return
    columns = (TextColumn(title), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[now]}"), console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, now="")

        def move(completed: int, total: int, now: str = "", lines: list[str] | None = None) -> None:
            bar.update(task, completed=completed, total=total, now=now)

        yield move
