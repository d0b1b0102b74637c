"""A plan on a terminal, and several beside each other."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from jaxtrain.page.numbers import GB_PER_GIB, column, number, percent
from jaxtrain.page.sections import print_sections, say
from jaxtrain.plan.report.sections import command, expert_load, headline, make_sections, mesh, span, verdict
from jaxtrain.plan.result import Plan

BLOCK = 5  # plans beside each other
COMPARED = 14  # characters of one of them


def print_plan(plan: Plan, console: Console, *, steps: int | None = None) -> None:
    """Print the whole report, verdict first.

    Args:
        steps: training steps of the config.
    """
    say(console, verdict(plan), "bold green" if plan.fits else "bold red")
    say(console, headline(plan), "bold")
    say(console, f"{plan.config} on {plan.topology} ({plan.chip}): mesh {mesh(plan)}, attention {plan.attention}")
    if plan.overrides:
        say(console, f"with {' '.join(plan.overrides)}")
    if plan.kept:
        say(console, plan.kept)
    print_sections(make_sections(plan, steps), console)
    say(console, "\nCommand of this plan", "bold")
    console.print(Text(command(plan)), soft_wrap=True)  # in one line, to be copied


def compare(plans: Sequence[Plan], console: Console) -> None:
    """Print plans as columns, in the order given. The best of each row is bold.

    Raises:
        ValueError: there is no plan.
    """
    if not plans:
        raise ValueError("nothing to compare: give at least one plan")
    for i, plan in enumerate(plans, 1):
        words = [plan.config, *plan.overrides] if i == 1 or plan.config != plans[0].config else plan.overrides
        say(console, f"{i}: {plan.topology}, mesh {mesh(plan)}; {' '.join(words) or 'the config as it is'}")
    block = max(1, min(BLOCK, (console.width - 26) // COMPARED))
    for first in range(0, len(plans), block):
        shown = range(first, min(first + block, len(plans)))
        table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("")
        for i in shown:
            table.add_column(str(i + 1), justify="right", max_width=COMPARED - 2)
        for name, cells, best in _compared_rows(plans):
            table.add_row(Text(name), *(Text(cells[i], style="bold" if i == best else "") for i in shown))
        say(console, "")
        console.print(table)


def _compared_rows(plans: Sequence[Plan]) -> list[tuple[str, list[str], int | None]]:
    """Return (name, a cell for each plan, index of the best) of each row. Only a plan that fits can be best."""

    def best(values: Sequence[float], *, most: bool = False) -> int | None:
        fit = [i for i, plan in enumerate(plans) if plan.fits and math.isfinite(values[i])]
        ordered = sorted(fit, key=lambda i: values[i], reverse=most)
        return ordered[0] if len(fit) > 1 and values[ordered[0]] != values[ordered[-1]] else None

    times = [plan.time for plan in plans]
    wire = [sum(c.wire_gib for c in plan.collectives) * GB_PER_GIB for plan in plans]
    network = [sum(c.network_gib for c in plan.collectives) * GB_PER_GIB for plan in plans]
    speeds = [t.tokens_per_s_per_device for t in times]
    allocated = [plan.memory.taken_gib for plan in plans]
    step_ms = [t.step_ms for t in times]
    mfus = [t.mfu_causal for t in times]
    same_work = len({plan.tokens_per_step for plan in plans}) == 1  # otherwise a shorter step is no better
    classes = dict.fromkeys(name for plan in plans for name in plan.memory.by_class)
    rows: list[tuple[str, list[str], int | None]] = [
        ("fits", ["yes" if plan.fits else "no" for plan in plans], None),
        ("allocated GiB", column(allocated), best(allocated)),
        ("usable GiB", column([plan.memory.usable_gib for plan in plans]), None),
        *((f"  {name} GiB", column([plan.memory.by_class.get(name, 0.0) for plan in plans]), None) for name in classes),
        ("tokens a step", [f"{plan.tokens_per_step:,}" for plan in plans], None),
        ("expected ms", [span(t.expected_step_ms) for t in times], None),
        ("roofline ms", column(step_ms), best(step_ms) if same_work else None),
        ("  GEMM ms", column([t.gemm_ms for t in times]), None),
        ("  attention ms", column([t.attention_ms for t in times]), None),
        ("  memory-bound ms", column([t.memory_ms for t in times]), None),
        ("  exposed comm. ms", column([t.exposed_ms for t in times]), None),
        ("tokens/s/GPU", [number(v, 0) for v in speeds], best(speeds, most=True)),
        ("MFU causal", [percent(v) for v in mfus], best(mfus, most=True)),
        ("MFU full", [percent(t.mfu_full) for t in times], None),
        ("HFU", [percent(t.hfu) for t in times], None),
        ("wire GB", column(wire), best(wire) if same_work else None),
    ]
    if any(network):
        rows.append(("network GB", column(network), best(network) if same_work else None))
    if any(plan.experts for plan in plans):
        rows.append(("expert load", [expert_load(plan.experts.load) if plan.experts else "-" for plan in plans], None))
    return [*rows, ("bound by", [t.bound_by for t in times], None)]
