"""Memory traffic of a step, part by part, as text."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jaxtrain.plan.numbers import number
from jaxtrain.plan.program.traffic import Part, ratio


def show(found: Sequence[Part], console: Console) -> None:
    """Prints each part beside the least it could move, in a step and each time that a layer runs, and the ratio of all."""
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    for name in ("GB", "least GB", "ratio", "a layer, MB", "least MB"):
        table.add_column(name, justify="right")

    def row(name: str, counted: float, least: float, times: int = 0) -> None:
        layer = [number(1e3 * gb / times, 0) for gb in (counted, least)] if times else ["", ""]
        table.add_row(name, number(counted, 1), number(least, 1), f"{counted / least:.2f}" if least else "-", *layer)

    for part in sorted(found, key=lambda part: -part.counted_gb):
        row(part.name, part.counted_gb, part.least_gb, part.times)
    row("all", sum(p.counted_gb for p in found), sum(p.least_gb for p in found))
    console.print("\nmemory traffic outside of GEMMs and attention, GB of each GPU and step", style="bold", markup=False)
    console.print(table)
    console.print(
        f"{ratio(found):.2f} x the least; what that supposes stands in jaxtrain/plan/program/traffic.py",
        markup=False,
        soft_wrap=True,
    )
