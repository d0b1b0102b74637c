"""The report of a search: each plan when it is done, all of them sorted, and the overrides to paste."""

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxtrain.config.durations import duration
from jaxtrain.config.numbers import percent, plural, rough, size
from jaxtrain.plan.search import Candidate, SearchResult
from jaxtrain.plan.topology import Topology, layout_of
from jaxtrain.report import plan
from jaxtrain.report.live import live
from jaxtrain.report.plan_sections import describe_remat, span
from jaxtrain.report.tables import Column, Listing, Section, Table, labels, numbers, print_sections, printed, say

ENDINGS = {
    "complete": "complete",
    "most": "ended after --most plans",
    "budget": "ended after --budget seconds",
    "interrupted": "interrupted",
}
ROUNDED = {
    "dtypes.params": "weights are rounded stochastically to 8 significant bits each step",
    "dtypes.m": "the first moment is rounded each step",
    "dtypes.v": "the second moment is rounded each step",
    "dtypes.grads": "gradients are rounded at each sum over microbatches",
}
FORMAT = 5  # version of the JSON of a search


@contextlib.contextmanager
def watch(console: Console) -> Iterator[Callable[[SearchResult], None]]:
    """Yield the `on_progress` callback of `search`. It shows a bar on a terminal, and prints a line per plan elsewhere."""
    printed, stored = 0, None
    with live(console) as show:

        def changed(found: SearchResult) -> None:
            nonlocal printed, stored
            lines = [] if stored == found.stored else _listed(found)
            stored = found.stored
            new = list(enumerate(found.tried, 1))[printed:]
            printed += len(new)
            lines += [f"{n}: {describe(c, found.topology)}: {_came_of(c)}" for n, c in new]
            show(len(found.tried), found.most, "; ".join(describe(c, found.topology) for c in found.running), lines)

        yield changed


def _listed(found: SearchResult) -> list[str]:
    """Return what is known when the meshes of a dtype of the state are listed."""
    with_dtypes = f" with {' '.join(f'{key}={dtype}' for key, dtype in found.stored)}" if found.stored else ""
    line = f"{found.name} on {found.topology.name}{with_dtypes}: {plural(found.listed, 'mesh', 'meshes')} may fit"
    refused = [] if found.stored else [f"the config's own layout is refused: {problem}" for problem in found.own_problems]
    return [*refused, f"{line}, {found.too_big:,} cannot"]


def mesh(candidate: Candidate, topology: Topology) -> str:
    """Return the mesh axes of more than one device, such as "fsdp=4 tensor=2"."""
    sizes = layout_of(candidate.run, topology).sizes
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one GPU"


def describe(candidate: Candidate, topology: Topology) -> str:
    """Return mesh, microbatches, ZeRO and remat of a layout in one line."""
    t = candidate.run.train
    each = plural(t.global_batch // t.grad_accum, "sequence")
    rows = f"{t.grad_accum} microbatch{'es' if t.grad_accum > 1 else ''} of {each}"
    return f"{mesh(candidate, topology)}, {rows}, {_zero(candidate)}, remat {describe_remat(candidate.run.remat)}"


def _zero(candidate: Candidate) -> str:
    s = candidate.run.sharding
    return f"gather={s.gather}" if s.zero == 3 else f"zero={s.zero}"


def _came_of(c: Candidate) -> str:
    if c.plan is None:
        return f"{c.outcome.kind}: {c.outcome.reason}" if c.outcome else "not compiled"
    fits = "" if c.plan.fits else ", does not fit"
    return f"{rough(c.plan.time.step_ms)} ms, {size(c.plan.memory.taken_gib)}{fits}"


def show(found: SearchResult, console: Console) -> None:
    """Print the compiled layouts, best first, the failures, and the overrides of the best layout."""
    planned = [c for c in found.tried if c.plan]
    failed = [f"{describe(c, found.topology)}: {_came_of(c)}" for c in found.tried if not c.plan]
    own = [f"the config's own layout is refused: {problem}" for problem in found.own_problems]
    title = f"{len(planned)} compiled" + (f", {len(failed)} failed" if failed else "")
    sections = [Listing([*own, *failed], "warning")]
    print_sections([Section(title, [*([_table(planned, found.topology)] if planned else []), *sections])], console)
    by_formula = (
        "; workspaces of cuDNN are by formula, and plan has them by its library if that is installed" if planned else ""
    )
    say(console, f"{ENDINGS[found.ended]}; {duration(found.seconds)}{by_formula}")
    show_best(found, console)


def _table(planned: list[Candidate], topology: Topology) -> Table:
    plans = [c.plan for c in planned if c.plan]
    fastest = min((p.time.step_ms for p in plans if p.fits), default=math.inf)
    steps = [p.time.step_ms for p in plans]
    more = [percent(p.time.step_ms / fastest - 1) if p.fits else "too big" for p in plans]
    notes = ["" if c.changes else "the config's own" for c in planned]
    each = [c.run.train.global_batch / c.run.train.grad_accum / topology.total for c in planned]
    columns = [
        Column("mesh", [mesh(c, topology) for c in planned]),
        Column("remat", [describe_remat(c.run.remat) for c in planned]),
        Column("seq/GPU", [f"{n:g}" for n in each], each),
        labels("accum", [c.run.train.grad_accum for c in planned]),
        Column("gather", [_zero(c).removeprefix("gather=") for c in planned]),
        numbers("roofline ms", steps, total=False),
        Column("slower", more, kind="number"),
        numbers("GiB", [p.memory.taken_gib for p in plans], total=False),
        Column("expected ms", [span(p.time.expected_step_ms) for p in plans], steps),
        Column("", notes),
    ]
    return Table("", columns)


def show_best(found: SearchResult, console: Console) -> None:
    """Print the overrides of the best layout; if none fits, the memory that is missing."""
    best = found.best
    if best is None:
        too_big = [c.plan.memory.taken_gib for c in found.tried if c.plan]
        if too_big:
            need = f"the smallest of those compiled needs {size(min(too_big))}"
        elif math.isfinite(found.least_gib) and not found.listed:
            need = f"every layout needs at least {size(found.least_gib)} for weights, moments and gradients"
        elif found.ended == "budget" and not found.tried:
            say(console, "no compile ended within --budget: raise it", "bold red")
            return
        else:
            need = "no layout could be compiled"
        say(console, f"no layout was found that fits: {need}, and {size(found.usable_gib)} are usable on each GPU", "bold red")
        say(console, "more GPUs, fewer or shorter sequences in a step (train.global_batch, data.seq_len), or a smaller model")
    elif not best.changes:
        say(console, f"the best of {len(found.tried)} layouts is the config's own", "bold")
    else:
        keys = [change.partition("=")[0] for change in best.changes]
        costs = [f"{key}: {ROUNDED[key]}" for key in keys if key in ROUNDED]
        print_sections([Section("The best layout costs accuracy", [Listing(costs)])], console)
        say(console, "the best layout, to paste behind the config", "bold")
        console.print(Text(paste(best)), soft_wrap=True)


class Search(SearchResult):
    """A search as the Python API returns it: it shows itself as text."""

    def __repr__(self) -> str:
        """Return the report of `python -m jaxtrain plan --search`."""
        return printed(lambda console: show(self, console), 120)


def shown(found: SearchResult) -> Search:
    """Return the search, and each plan of it, that show themselves."""
    for c in found.tried:
        if c.outcome and c.outcome.plan:
            c.outcome = dataclasses.replace(c.outcome, plan=plan.shown(c.outcome.plan))
    return Search(**vars(found))


def paste(candidate: Candidate) -> str:
    """Return a layout as overrides of the config."""
    return shlex.join(f"--config.{change}" for change in candidate.changes)


def to_json(found: SearchResult) -> dict[str, Any]:
    """Return a search as plain data: the best layout, and every compiled one."""

    def data(c: Candidate) -> dict[str, Any]:
        out: dict[str, Any] = {"changes": list(c.changes), "least_gib": c.least.gib, "outcome": c.outcome and c.outcome.kind}
        if c.plan:
            t, m = c.plan.time, c.plan.memory
            out |= {"fits": c.plan.fits, "peak_gib": m.peak_gib, "taken_gib": m.taken_gib}
            fields = ("expected_step_ms", "step_ms", "tokens_per_s_per_device", "mfu_causal", "communication_ms")
            return out | {field: getattr(t, field) for field in fields}
        return out | {"reason": c.outcome.reason if c.outcome else ""}

    best = found.best
    return {
        "format": FORMAT,
        "config": found.name,
        "topology": found.topology.name,
        "best": best and data(best),
        "paste": paste(best) if best else "",
        "tried": [data(c) for c in found.tried],
        "layouts": found.listed,
        "too_big": found.too_big,
        "least_gib": found.least_gib if math.isfinite(found.least_gib) else None,
        "usable_gib": found.usable_gib,
        "ended": found.ended,
        "seconds": found.seconds,
    }
