"""Print a plan on a terminal."""

from rich.console import Console
from rich.text import Text

from jaxtrain.plan.result import Plan
from jaxtrain.report.plan_sections import command, headline, mesh, notes, summary, verdict
from jaxtrain.report.sections import print_sections, say


def print_plan(plan: Plan, console: Console, *, steps: int | None = None, epochs: str = "") -> None:
    """Print the verdict, the speed, warnings, memory, time and the collectives that take longest.

    Args:
        steps, epochs: as in `summary`.
    """
    say(console, verdict(plan), "bold green" if plan.fits else "bold red")
    say(console, headline(plan), "bold")
    say(console, f"{plan.config} on {plan.topology} ({plan.chip}): mesh {mesh(plan)}, attention {plan.attention}")
    if plan.overrides:
        say(console, f"with {' '.join(plan.overrides)}")
    if plan.kept:
        say(console, plan.kept)
    print_sections([*notes(plan), *summary(plan, steps, epochs)], console)
    say(console, "\n--html=FILE adds kernels, arrays, saved activations and assumptions", "dim")
    say(console, "\nCommand of this plan", "bold")
    console.print(Text(command(plan)), soft_wrap=True)  # unwrapped, so that it can be copied


def text(plan: Plan) -> str:
    """Return the output of `print_plan` as text, 120 columns wide."""
    console = Console(width=120, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        print_plan(plan, console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
