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
from jaxtrain.report.live import live_progress
from jaxtrain.report.plan_sections import describe_remat, span
from jaxtrain.report.tables import Column, Listing, Section, Table, labels, numbers, print_sections, render_text, say

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
    with live_progress(console) as show:

        def update(result: SearchResult) -> None:
            nonlocal printed, stored
            lines = [] if stored == result.stored else _mesh_lines(result)
            stored = result.stored
            new = list(enumerate(result.tried, 1))[printed:]
            printed += len(new)
            lines += [f"{n}: {describe_layout(c, result.topology)}: {_outcome_text(c)}" for n, c in new]
            show(len(result.tried), result.most, "; ".join(describe_layout(c, result.topology) for c in result.running), lines)

        yield update


def _mesh_lines(result: SearchResult) -> list[str]:
    """Return what is known when the meshes of a dtype of the state are listed."""
    with_dtypes = f" with {' '.join(f'{key}={dtype}' for key, dtype in result.stored)}" if result.stored else ""
    line = f"{result.name} on {result.topology.name}{with_dtypes}: {plural(result.listed, 'mesh', 'meshes')} may fit"
    refused = [] if result.stored else [f"the config's own layout is refused: {problem}" for problem in result.own_problems]
    return [*refused, f"{line}, {result.too_big:,} cannot"]


def mesh(candidate: Candidate, topology: Topology) -> str:
    """Return the mesh axes of more than one device, such as "fsdp=4 tensor=2"."""
    sizes = layout_of(candidate.run, topology).sizes
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one GPU"


def describe_layout(candidate: Candidate, topology: Topology) -> str:
    """Return mesh, microbatches, ZeRO and remat of a layout in one line."""
    t = candidate.run.train
    sequences = plural(t.global_batch // t.grad_accum, "sequence")
    rows = f"{t.grad_accum} microbatch{'es' if t.grad_accum > 1 else ''} of {sequences}"
    return f"{mesh(candidate, topology)}, {rows}, {_zero(candidate)}, remat {describe_remat(candidate.run.remat)}"


def _zero(candidate: Candidate) -> str:
    s = candidate.run.sharding
    return f"gather={s.gather}" if s.zero == 3 else f"zero={s.zero}"


def _outcome_text(candidate: Candidate) -> str:
    if candidate.plan is None:
        return f"{candidate.outcome.kind}: {candidate.outcome.reason}" if candidate.outcome else "not compiled"
    fits = "" if candidate.plan.fits else ", does not fit"
    return f"{rough(candidate.plan.time.step_ms)} ms, {size(candidate.plan.memory.taken_gib)}{fits}"


def show_search(result: SearchResult, console: Console) -> None:
    """Print the compiled layouts, best first, the failures, and the overrides of the best layout."""
    planned = [c for c in result.tried if c.plan]
    failed = [f"{describe_layout(c, result.topology)}: {_outcome_text(c)}" for c in result.tried if not c.plan]
    refused = [f"the config's own layout is refused: {problem}" for problem in result.own_problems]
    title = f"{len(planned)} compiled" + (f", {len(failed)} failed" if failed else "")
    sections = [Listing([*refused, *failed], "warning")]
    print_sections([Section(title, [*([_table(planned, result.topology)] if planned else []), *sections])], console)
    by_formula = (
        "; workspaces of cuDNN are by formula, and plan has them by its library if that is installed" if planned else ""
    )
    say(console, f"{ENDINGS[result.ended]}; {duration(result.seconds)}{by_formula}")
    show_best(result, console)


def _table(planned: list[Candidate], topology: Topology) -> Table:
    plans = [c.plan for c in planned if c.plan]
    fastest = min((p.time.step_ms for p in plans if p.fits), default=math.inf)
    steps = [p.time.step_ms for p in plans]
    slower = [percent(p.time.step_ms / fastest - 1) if p.fits else "too big" for p in plans]
    notes = ["" if c.changes else "the config's own" for c in planned]
    per_gpu = [c.run.train.global_batch / c.run.train.grad_accum / topology.total for c in planned]
    columns = [
        Column("mesh", [mesh(c, topology) for c in planned]),
        Column("remat", [describe_remat(c.run.remat) for c in planned]),
        Column("seq/GPU", [f"{n:g}" for n in per_gpu], per_gpu),
        labels("accum", [c.run.train.grad_accum for c in planned]),
        Column("gather", [_zero(c).removeprefix("gather=") for c in planned]),
        numbers("roofline ms", steps, total=False),
        Column("slower", slower, kind="number"),
        numbers("GiB", [p.memory.taken_gib for p in plans], total=False),
        Column("expected ms", [span(p.time.expected_step_ms) for p in plans], steps),
        Column("", notes),
    ]
    return Table("", columns)


def show_best(result: SearchResult, console: Console) -> None:
    """Print the overrides of the best layout; if none fits, the memory that is missing."""
    best = result.best
    if best is None:
        too_big = [c.plan.memory.taken_gib for c in result.tried if c.plan]
        if too_big:
            need = f"the smallest of those compiled needs {size(min(too_big))}"
        elif math.isfinite(result.least_gib) and not result.listed:
            need = f"every layout needs at least {size(result.least_gib)} for weights, moments and gradients"
        elif result.ended == "budget" and not result.tried:
            say(console, "no compile ended within --budget: raise it", "bold red")
            return
        else:
            need = "no layout could be compiled"
        say(console, f"no layout was found that fits: {need}, and {size(result.usable_gib)} are usable on each GPU", "bold red")
        say(console, "more GPUs, fewer or shorter sequences in a step (train.global_batch, data.seq_len), or a smaller model")
    elif not best.changes:
        say(console, f"the best of {len(result.tried)} layouts is the config's own", "bold")
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
        return render_text(lambda console: show_search(self, console), 120)


def search_report(result: SearchResult) -> Search:
    """Return the search, and each plan of it, that show themselves."""
    for c in result.tried:
        if c.outcome and c.outcome.plan:
            c.outcome = dataclasses.replace(c.outcome, plan=plan.plan_report(c.outcome.plan))
    return Search(**vars(result))


def paste(candidate: Candidate) -> str:
    """Return a layout as overrides of the config."""
    return shlex.join(f"--config.{change}" for change in candidate.changes)


def to_json(result: SearchResult) -> dict[str, Any]:
    """Return a search as plain data: the best layout, and every compiled one."""

    def data(candidate: Candidate) -> dict[str, Any]:
        out: dict[str, Any] = {
            "changes": list(candidate.changes),
            "least_gib": candidate.least.gib,
            "outcome": candidate.outcome and candidate.outcome.kind,
        }
        if candidate.plan:
            time, memory = candidate.plan.time, candidate.plan.memory
            out |= {"fits": candidate.plan.fits, "peak_gib": memory.peak_gib, "taken_gib": memory.taken_gib}
            fields = ("expected_step_ms", "step_ms", "tokens_per_s_per_device", "mfu_causal", "communication_ms")
            return out | {field: getattr(time, field) for field in fields}
        return out | {"reason": candidate.outcome.reason if candidate.outcome else ""}

    best = result.best
    return {
        "format": FORMAT,
        "config": result.name,
        "topology": result.topology.name,
        "best": best and data(best),
        "paste": paste(best) if best else "",
        "tried": [data(c) for c in result.tried],
        "layouts": result.listed,
        "too_big": result.too_big,
        "least_gib": result.least_gib if math.isfinite(result.least_gib) else None,
        "usable_gib": result.usable_gib,
        "ended": result.ended,
        "seconds": result.seconds,
    }
