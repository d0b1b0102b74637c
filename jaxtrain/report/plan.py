"""A plan on a terminal and in a notebook."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxtrain.plan import result
from jaxtrain.plan.cost import Cost
from jaxtrain.report import plan_page
from jaxtrain.report.html import frame_page
from jaxtrain.report.plan_sections import command, headline, mesh, summary, verdict, warnings_section
from jaxtrain.report.tables import data_frame, print_sections, render_text, say


class PlanReport(result.Plan):
    """A plan as the Python API returns it: it shows itself as text or as a page, and has its tables as data frames."""

    def to_pandas(self, table: str = "collectives") -> Any:
        """Return a table as a pandas.DataFrame. Needs pandas.

        Args:
            table: collectives | kernels | memory (GiB by class at the peak) | timeline (GiB by class over the schedule).

        Raises:
            ValueError: the table has another name.
        """
        if table in ("collectives", "kernels"):
            return data_frame([dataclasses.asdict(row) for row in getattr(self, table)])
        if table == "memory":
            return data_frame([{"class": name, "gib": gib} for name, gib in self.memory.by_class.items()])
        if table == "timeline":
            classes = {c.name: c.gib for c in self.memory.over_time}
            points = enumerate(self.memory.timeline)
            return data_frame(
                [{"phase": phase, "gib": gib} | {name: at[i] for name, at in classes.items()} for i, (gib, phase) in points]
            )
        raise ValueError(f"table = {table!r}: no such table. Fix: collectives, kernels, memory or timeline.")

    def __repr__(self) -> str:
        """Return the report of `python -m jaxtrain plan`."""
        return render_text(lambda console: print_plan(self, console), 120)

    def _repr_html_(self) -> str:
        """Return the page of `python -m jaxtrain plan --html` in an HTML frame, for a notebook."""
        return frame_page(plan_page.plan_html(self))


def plan_report(plan: result.Plan) -> PlanReport:
    """Return the plan that shows itself."""
    return PlanReport(**vars(plan))


def print_plan(
    plan: result.Plan,
    console: Console,
    *,
    steps: int | None = None,
    tokens: int = 0,
    epochs: str = "",
    cost: Cost | None = None,
) -> None:
    """Print the verdict, the speed, warnings, memory, time and the collectives that take longest.

    Args:
        steps, tokens, epochs, cost: as in `summary`.
    """
    say(console, verdict(plan), "bold green" if plan.fits else "bold red")
    say(console, headline(plan), "bold")
    say(console, f"{plan.config} on {plan.topology} ({plan.chip}): mesh {mesh(plan)}, attention {plan.attention}")
    if plan.overrides:
        say(console, f"with {' '.join(plan.overrides)}")
    if plan.kept:
        say(console, plan.kept)
    print_sections([warnings_section(plan), *summary(plan, steps, tokens, epochs, cost)], console)
    say(console, "\n--html=FILE adds kernels, arrays, saved activations and assumptions", "dim")
    say(console, "\nCommand of this plan", "bold")
    console.print(Text(command(plan)), soft_wrap=True)  # unwrapped, so that it can be copied
