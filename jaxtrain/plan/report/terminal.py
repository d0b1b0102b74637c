"""A plan as text for people: the whole report of one, and several beside each other."""

import dataclasses
import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from jaxtrain.plan.numbers import GB_PER_GIB, column, gib, number, percent, rough, size
from jaxtrain.plan.report.figures import (
    ASSUMPTIONS,
    TRAINING,
    added,
    built,
    card,
    classes,
    command,
    devices,
    expected,
    experts,
    headline,
    host_waits,
    load,
    matmuls,
    mesh,
    mfu,
    moved,
    off_by,
    peak_at,
    pipeline,
    ran,
    rates,
    span,
    step_parts,
    training,
    verdict,
    work,
)
from jaxtrain.plan.report.lines import bar, heading, listed, row, say, short, table
from jaxtrain.plan.result import Kernel, Plan

ROWS = 12  # of the longer tables; what is left is summed in one more row
BLOCK = 5  # plans beside each other in `compare`
COMPARED = 14  # columns of one of them


def text(plan: Plan, console: Console, *, steps: int | None = None) -> None:
    """Prints the whole report: verdict, memory, collectives, time, kernels, what to change, how it was counted.

    `steps` is the config's number of training steps.
    """
    say(console, f"{plan.config} on {plan.topology} ({plan.chip}): mesh {mesh(plan)}, attention {plan.attention}")
    if plan.overrides:
        say(console, f"with {' '.join(plan.overrides)}")
    say(console, verdict(plan), "bold green" if plan.fits else "bold red")
    say(console, headline(plan), "bold")
    if plan.kept:
        say(console, plan.kept)
    if not plan.fits:
        listed(console, "what would make it fit", plan.hints)
    _memory(plan, console)
    _collectives(plan, console)
    _time(plan, console, steps)
    listed(console, "pipeline", pipeline(plan))
    listed(console, "experts", experts(plan))
    _kernels(plan, console)
    listed(console, "loops", [f"{n:,} x {name}" for name, n in sorted(plan.trip_counts.items(), key=lambda kv: -kv[1])])
    if waits := host_waits(plan):
        say(console, waits)
    if plan.fits:
        listed(console, "hints", plan.hints)
    listed(console, "warnings", plan.warnings, "yellow")
    listed(console, "how it was counted", [rates(plan), f"the meter: {ASSUMPTIONS}", work(plan), built(plan)])
    heading(console, "to make this plan again")
    console.print(Text(command(plan)), soft_wrap=True)  # in one line, to be copied


def _memory(plan: Plan, console: Console) -> None:
    m = plan.memory
    parts = classes(plan)
    unit, sizes = gib([v for _, v in parts] + [m.peak_gib])
    heading(console, f"memory at the peak, {unit} on each GPU")
    rows = table(["", unit, "", ""], numeric=(1, 2))
    for (name, value), shown in zip(parts, sizes, strict=False):
        row(rows, name, shown, percent(value / m.peak_gib), bar(console, value, m.peak_gib))
    row(rows, "peak", sizes[-1], "", "", style="bold")
    console.print(rows)
    say(console, peak_at(plan))
    say(console, card(plan))
    if m.host_gib:
        say(console, f"pinned host memory for each GPU: {size(m.host_gib)}")
    if m.saved:
        saved = sorted(m.saved.items(), key=lambda kv: -kv[1])
        unit, sizes = gib([v for _, v in saved] + [sum(m.saved.values())])
        heading(console, f"saved for the backward pass, {unit}")
        rows = table(["", unit, ""], numeric=(1,))
        for (name, value), shown in zip(saved, sizes, strict=False):
            row(rows, name, shown, bar(console, value, saved[0][1]))
        row(rows, "all", sizes[-1], "", style="bold")
        console.print(rows)


def _collectives(plan: Plan, console: Console) -> None:
    if not plan.collectives:
        say(console, "\nno collectives: nothing moves between GPUs", "bold")
        return
    found = moved(plan)
    shown, more = found[:ROWS], found[ROWS:]
    if more:
        rest = dataclasses.replace(added(more), kind=f"{len(more)} more", dtype="", axis="", group=0, source="")
        shown = [*shown, rest]
    total = dataclasses.replace(added(found), kind="all", dtype="", axis="", group=0, source="")
    lines = [*shown, total]
    crosses = any(c.network_gib for c in found)
    headings = ["kind", "dtype", "axis", "GPUs", "count", "wire GB", *(["network GB"] if crosses else []), "ms", "exposed ms"]
    heading(console, "collectives of a step, bytes sent by each GPU")
    rows = table([*headings, "source"], numeric=range(3, len(headings)))
    fields = [column([c.wire_gib * GB_PER_GIB for c in lines]), column([c.ms for c in lines])]
    fields.append(column([c.exposed_ms for c in lines]))
    if crosses:
        fields.insert(1, column([c.network_gib * GB_PER_GIB for c in lines]))
    for i, c in enumerate(lines):
        numbers = [f[i] for f in fields]
        group = str(c.group) if c.group else ""
        style = "bold" if c is total else ""
        row(rows, c.kind, c.dtype, c.axis, group, f"{c.count:,}", *numbers, short(c.source), style=style)
    console.print(rows)


def _time(plan: Plan, console: Console, steps: int | None) -> None:
    t = plan.time
    parts = step_parts(plan)
    times = column([*(ms for _, ms in parts), t.step_ms])
    heading(console, "time of a step, by the roofline")
    rows = table(["", "ms", "", ""], numeric=(1, 2))
    for (name, ms), shown in zip(parts, times, strict=False):
        row(rows, name, shown, percent(ms / t.step_ms), bar(console, ms, t.step_ms))
    row(rows, "step", times[-1], "", "", style="bold")
    console.print(rows)
    on_links, waited = column([t.communication_ms, t.exposed_ms])
    say(console, f"communication {on_links} ms on the links, of which the GPU waits for {waited} ms")
    say(
        console,
        f"tokens/s {rough(t.tokens_per_s, 4)}, each GPU {rough(t.tokens_per_s_per_device, 4)}; "
        f"{plan.tokens_per_step:,} tokens a step",
    )
    say(console, f"MFU {mfu(plan)}, {percent(t.mfu_full)} full; HFU {percent(t.hfu)}", "bold")
    say(console, expected(plan), "bold")
    say(console, f"({off_by(plan)})")
    if plan.matmuls:
        say(console, matmuls(plan))
    by = "expected" if plan.time.expected_step_ms else "by the roofline"
    heading(console, f"time to train on {devices(plan):,} GPUs, {by}")
    rows = table(TRAINING, numeric=range(1, 5))
    for cells in training(plan, steps):
        row(rows, *cells)
    console.print(rows)


def _kernels(plan: Plan, console: Console) -> None:
    found = ran(plan)
    shown, more = found[:ROWS], found[ROWS:]
    if more:
        sums = {f: sum(getattr(k, f) for k in more) for f in ("count", "ms", "tflop", "gb")}
        shown = [*shown, Kernel(f"{len(more)} more", "", "", **sums)]
    heading(console, "kernels of a step")
    rows = table(["kind", "count", "ms", "of step", "TFLOP", "GB", "what", "source"], numeric=range(1, 6))
    columns = [column([getattr(k, f) for k in shown]) for f in ("ms", "tflop", "gb")]
    for k, ms, tflop, gb in zip(shown, *columns, strict=True):
        row(rows, k.kind, f"{k.count:,}", ms, percent(k.ms / plan.time.step_ms), tflop, gb, k.op_name, short(k.source))
    console.print(rows)


def compare(plans: Sequence[Plan], console: Console) -> None:
    """Prints plans as columns, in the order given; the best entry of what has a best is bold. What each is stands above.

    Raises ValueError without a plan.
    """
    if not plans:
        raise ValueError("nothing to compare: give at least one plan")
    for i, plan in enumerate(plans, 1):
        words = [plan.config, *plan.overrides] if i == 1 or plan.config != plans[0].config else plan.overrides
        say(console, f"{i}: {plan.topology}, mesh {mesh(plan)}; {' '.join(words) or 'the config as it is'}")
    block = max(1, min(BLOCK, (console.width - 26) // COMPARED))
    for first in range(0, len(plans), block):
        chosen = plans[first : first + block]
        headings = ["", *(str(first + i + 1) for i in range(len(chosen)))]
        rows = table(headings, numeric=range(1, len(headings)))
        for column_of_a_plan in rows.columns[1:]:
            column_of_a_plan.no_wrap, column_of_a_plan.max_width = False, COMPARED - 2
        say(console, "")
        for name, cells, best in _compared(plans):
            marked = [Text(cell, style="bold" if i == best else "") for i, cell in enumerate(cells)]
            rows.add_row(Text(name), *marked[first : first + block])
        console.print(rows)


def _compared(plans: Sequence[Plan]) -> list[tuple[str, list[str], int | None]]:
    """(name, a cell per plan, which is best) of each row; only a plan that fits can be best."""

    def best(values: list[float], most: bool = False) -> int | None:
        fit = [i for i, p in enumerate(plans) if p.fits and math.isfinite(values[i])]
        ordered = sorted(fit, key=lambda i: values[i], reverse=most)
        return ordered[0] if len(fit) > 1 and values[ordered[0]] != values[ordered[-1]] else None

    def measure(name: str, values: list[float], comparable: bool = True) -> tuple[str, list[str], int | None]:
        return name, column(values), best(values) if comparable else None

    times = [p.time for p in plans]
    wire = [sum(c.wire_gib for c in p.collectives) * GB_PER_GIB for p in plans]
    network = [sum(c.network_gib for c in p.collectives) * GB_PER_GIB for p in plans]
    per_device = [t.tokens_per_s_per_device for t in times]
    same_work = len({p.tokens_per_step for p in plans}) == 1  # else a shorter step is not a better one
    rows = [
        ("fits", ["yes" if p.fits else "no" for p in plans], None),
        measure("takes GiB", [p.memory.taken_gib for p in plans]),
        ("usable GiB", column([p.memory.usable_gib for p in plans]), None),
    ]
    names = {name: None for p in plans for name in p.memory.by_class}
    rows += [(f"  {name} GiB", column([p.memory.by_class.get(name, 0.0) for p in plans]), None) for name in names]
    rows += [
        ("tokens a step", [f"{p.tokens_per_step:,}" for p in plans], None),
        ("expected ms", [span(t.expected_step_ms) for t in times], None),
        measure("roofline ms", [t.step_ms for t in times], same_work),
        ("  GEMM ms", column([t.gemm_ms for t in times]), None),
        ("  attention ms", column([t.attention_ms for t in times]), None),
        ("  memory-bound ms", column([t.memory_ms for t in times]), None),
        ("  exposed comm. ms", column([t.exposed_ms for t in times]), None),
        ("tokens/s/GPU", [number(v, 0) for v in per_device], best(per_device, most=True)),
        ("MFU causal", [percent(t.mfu_causal) for t in times], best([t.mfu_causal for t in times], most=True)),
        ("MFU full", [percent(t.mfu_full) for t in times], None),
        ("HFU", [percent(t.hfu) for t in times], None),
        measure("wire GB", wire, same_work),
    ]
    if any(network):
        rows.append(measure("network GB", network, same_work))
    if any(p.experts for p in plans):
        rows.append(("experts' load", [load(p.experts.load) if p.experts else "-" for p in plans], None))
    return [*rows, ("bound by", [t.bound_by for t in times], None)]
