"""A search as text for people and as plain data: the table of what was tried, what was left out and why, the line to paste."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.page.numbers import column, percent, rough, size
from jaxtrain.plan.report.live import live
from jaxtrain.plan.report.sections import describe_remat, no_range, span
from jaxtrain.plan.search.best import ERROR, OWN, Candidate, Progress, SearchResult
from jaxtrain.plan.search.space import changes, sequences_per_gpu

STYLES = {"best": "bold green", "equal": "green", "front": "green", "too big": "red", "failed": "yellow"}
ENDINGS = {
    "complete": "complete: no legal layout that was left out can both fit and be faster, by its bound and by what did not fit",
    "most": "ended at the number of plans that --most allows",
    "budget": "ended when the budget of seconds was spent",
    "interrupted": "interrupted",
}
FORMAT = 2  # of --json
REFUSALS = 3  # shown, of those that differ


@contextlib.contextmanager
def watch(console: Console) -> Iterator[Callable[[Progress], None]]:
    """What to give `search` as `on_progress`."""
    said = 0
    with live(console) as show:

        def changed(progress: Progress) -> None:
            nonlocal said
            new = list(enumerate(progress.finished, 1))[said:]
            said += len(new)
            best = _best(progress)
            lines = [f"{n}: {describe(c)}: {_outcome(c)}; {best}" for n, c in new]
            show(len(progress.finished), progress.most, f"{len(progress.running)} compiling; {best}", lines)

        yield changed


def _best(progress: Progress) -> str:
    plan = progress.best.plan if progress.best else None
    if not progress.best or not plan:
        return "none fits so far"
    return f"fastest {rough(plan.time.step_ms)} ms, {size(plan.memory.taken_gib)}: {describe(progress.best)}"


def _outcome(candidate: Candidate) -> str:
    plan = candidate.plan
    if plan is None:
        return f"{candidate.outcome.kind}: {candidate.outcome.reason}" if candidate.outcome else "not planned"
    return f"{rough(plan.time.step_ms)} ms, {size(plan.memory.taken_gib)}{'' if plan.fits else ', does not fit'}"


def mesh(candidate: Candidate) -> str:
    """fsdp=4 tensor=2."""
    sizes = {key.partition(".")[2]: size for key, size in candidate.overrides if key.startswith("mesh.") and size > 1}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one GPU"


def describe(candidate: Candidate) -> str:
    batch = f"{candidate.run.train.grad_accum} x {_rows(candidate)} sequences"
    return f"{mesh(candidate)}, {batch}, remat {describe_remat(candidate.run)}"


def _rows(candidate: Candidate) -> int:
    return candidate.run.train.global_batch // candidate.run.train.grad_accum


def show(result: SearchResult, console: Console) -> None:
    """Prints the layouts tried, the front first; what was not compiled, and why; and the overrides of the best."""
    load = ", experts' load 1.0" if result.run.model.num_experts else ""
    _say(
        console,
        f"{result.name} on {result.topology.name}: {result.layouts:,} legal layouts, {len(result.tried)} tried{load}",
        "bold",
    )
    if result.tried:
        console.print(_table(result))
        for why in sorted({no_range(c.plan) for c in result.tried if c.plan and not c.plan.time.expected_step_ms}):
            _say(console, f"expected -: {why}")
    equal = sum(c.equal for c in result.tried)
    if equal > 1:
        _say(
            console,
            f"{equal} layouts are equal: their steps differ by {ERROR:.0%} at most, which is the error of the estimate. The "
            "first of them has the least time on links, then the fewest mesh axes, then the shortest step",
        )
    for reason, count in result.cut.items():
        _say(console, f"{count:,} layouts not compiled: {reason}")
    for reason, count in _refusals(result).items():
        _say(console, f"{count:,} settings refused: {reason}")
    if result.left:
        _say(console, f"{result.left:,} layouts not tried{_could_be(result)}")
    _say(console, f"{ENDINGS[result.ended]}; {result.seconds:.0f} s")
    for warning in result.warnings:
        _say(console, f"warning: {warning}", "yellow")
    if result.best is None:
        none = f"no layout that was planned fits into {size(result.usable_gib)}"
        if not any(c.plan for c in result.tried):
            early = not result.tried and result.ended in ("budget", "interrupted")
            none = "it ended before the first plan was made" if early else "no layout could be planned"
        _say(console, none, "bold red")
        return
    if not paste(result):
        _say(console, "the best layout is the config's own", "bold")
        return
    _say(console, "the best layout, to paste behind the config", "bold")
    console.print(Text(paste(result)), soft_wrap=True)


def _could_be(result: SearchResult) -> str:
    """What the layouts not tried could still save, beside how much of that the bound is short of by nature."""
    best = result.best
    if not best or not best.plan or result.could_be >= 1:
        return ""
    low = 1 - best.bound.step_s * 1e3 / best.plan.time.step_ms
    return (
        f"; the best of them takes at most {1 - result.could_be:.1%} less time than the best plan, by its bound, which for the "
        f"best plan itself was {low:.1%} too low"
    )


def paste(result: SearchResult) -> str:
    """The best layout as overrides of the config; "" where there is none, or where it is the config's own."""
    if result.best is None or result.best.name.startswith(OWN):
        return ""
    return " ".join(f"--config.{change}" for change in changes(result.run, result.best.overrides))


def _table(result: SearchResult) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left")
    for heading in ("mesh", "remat"):
        table.add_column(heading, overflow="fold")
    for heading in ("seq/GPU", "accum", "expected ms", "expected tok/s/GPU", "roofline ms", "roofline MFU", "GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    plans = [c.plan for c in result.tried if c.plan]
    steps = iter(column([p.time.step_ms for p in plans]))
    taken = iter(column([p.memory.taken_gib for p in plans]))
    for c in result.tried:
        note = f"{c.verdict}: {c.reason}" + (f" ({c.name})" if c.name else "")
        t = c.plan.time if c.plan else None
        numbers = ("",) * 5
        if t:
            expected = (span(t.expected_step_ms), span(t.expected_tokens_per_s_per_device))
            numbers = (*expected, next(steps), percent(t.mfu_causal), next(taken))
        rows = f"{sequences_per_gpu(c.run, result.topology):g}"
        cells = (mesh(c), describe_remat(c.run), rows, str(c.run.train.grad_accum), *numbers, note)
        table.add_row(*(Text(cell) for cell in cells), style=STYLES.get(c.verdict, ""))
    return table


def _refusals(result: SearchResult) -> dict[str, int]:
    """Rules of the config's checks -> settings they refuse, the commonest few."""
    counts: dict[str, int] = {}
    for _, reason in result.refused:
        key = reason.partition(" = ")[0]
        counts[key] = counts.get(key, 0) + 1
    first = {reason.partition(" = ")[0]: reason for _, reason in reversed(result.refused)}
    most = sorted(counts, key=lambda key: -counts[key])[:REFUSALS]
    return {f"such as {first[key]}": counts[key] for key in most}


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(line, style=style))


def to_json(result: SearchResult) -> dict[str, Any]:
    """Plain data: the best layout's overrides, every layout tried with its figures, and what was left out."""

    def row(c: Candidate) -> dict[str, Any]:
        figures = (
            {}
            if not c.plan
            else {
                "fits": c.plan.fits,
                "expected_step_ms": c.plan.time.expected_step_ms,
                "expected_tokens_per_s_per_device": c.plan.time.expected_tokens_per_s_per_device,
                "equal": c.equal,
                "link_share": c.link_share,
                "step_ms": c.plan.time.step_ms,
                "tokens_per_s_per_device": c.plan.time.tokens_per_s_per_device,
                "mfu_causal": c.plan.time.mfu_causal,
                "peak_gib": c.plan.memory.peak_gib,
                "taken_gib": c.plan.memory.taken_gib,
            }
        )
        layout = {"overrides": dict(c.overrides), "name": c.name, "verdict": c.verdict, "reason": c.reason}
        return layout | figures | {"bound": {"step_ms": c.bound.step_s * 1e3, "memory_gib": c.bound.memory_gib}}

    return {
        "format": FORMAT,
        "config": result.name,
        "topology": result.topology.name,
        "best": dict(result.best.overrides) if result.best else None,
        "paste": paste(result),
        "tried": [row(c) for c in result.tried],
        "error": ERROR,
        "layouts": result.layouts,
        "refused": len(result.refused),
        "cut": dict(result.cut),
        "left": result.left,
        "could_be": result.could_be,
        "usable_gib": result.usable_gib,
        "ended": result.ended,
        "seconds": result.seconds,
        "warnings": list(result.warnings),
    }
