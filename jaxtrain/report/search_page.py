"""The report of a search: the ten best settings by formula, each plan when it is done, and the overrides to paste."""

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxtrain.config.commands import spelled
from jaxtrain.config.durations import duration
from jaxtrain.config.numbers import percent, rough, size
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search import ERROR, Candidate, Refusal, SearchResult
from jaxtrain.plan.search_parallel import Outcome
from jaxtrain.plan.search_space import Overrides, changes
from jaxtrain.plan.topology import Topology, layout_of
from jaxtrain.report.live import live
from jaxtrain.report.plan_sections import describe_remat, span
from jaxtrain.report.tables import Column, Listing, Section, Table, labels, numbers, print_sections, say

ENDINGS = {
    "complete": "complete: by formula, no other setting can be better",
    "found": "ended at the first that fits",
    "most": "ended at the most plans that are allowed",
    "budget": "ended after --budget seconds",
    "interrupted": "interrupted",
}
ROUNDED = {
    "dtypes.params": "weights are rounded stochastically to 8 significant bits each step",
    "dtypes.m": "the first moment is rounded each step",
    "dtypes.v": "the second moment is rounded each step",
    "dtypes.grads": "gradients are rounded at each sum over microbatches",
}
FORMAT = 4  # version of the JSON of a search


@contextlib.contextmanager
def watch(console: Console) -> Iterator[Callable[[SearchResult], None]]:
    """Yield the `on_progress` callback of `search`. It shows a bar on a terminal, and prints a line per plan elsewhere."""
    printed = 0
    with live(console) as show:

        def changed(found: SearchResult) -> None:
            nonlocal printed
            new = list(enumerate(found.tried, 1))[printed:]
            printed += len(new)
            lines = [  # `show` tells why settings failed
                f"{'compiled ' if c.plan else ''}{n}: {describe(c, found.topology)}: "
                f"{_came_of(c.outcome) if c.plan else c.outcome and c.outcome.kind}"
                for n, c in new
            ]
            now = "; ".join(describe(c, found.topology) for c in found.running)
            show(len(found.tried), found.most, now, lines)

        yield changed


def mesh(candidate: Candidate, topology: Topology) -> str:
    """Return the mesh axes of more than one device, such as "fsdp=4 tensor=2"."""
    sizes = layout_of(candidate.run, topology).sizes
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one GPU"


def describe(candidate: Candidate, topology: Topology) -> str:
    """Return mesh, microbatches and remat of a setting in one line."""
    t = candidate.run.train
    each = t.global_batch // t.grad_accum
    rows = f"{t.grad_accum} microbatch{'es' if t.grad_accum > 1 else ''} of {each} sequence{'s' if each > 1 else ''}"
    return f"{mesh(candidate, topology)}, {rows}, remat {describe_remat(candidate.run.remat)}"


def _came_of(outcome: Outcome | None) -> str:
    if outcome is None or outcome.plan is None:
        return f"{outcome.kind}: {outcome.reason}" if outcome else "not compiled"
    plan = outcome.plan
    taken = size(plan.memory.taken_gib)
    return f"{rough(plan.time.step_ms)} ms, {taken}" if plan.fits else f"{taken}, does not fit"


def show_ranked(found: SearchResult, console: Console) -> None:
    """Print the best settings by formula, before anything is compiled."""
    kinds = {"speed": "layouts", "fit": "ways to make it fit"}
    could = f"{len(found.candidates):,} {kinds[found.objective]} that may fit, {found.too_big:,} that cannot by formula"
    if found.no_formula:
        could = f"{len(found.candidates):,} legal {kinds[found.objective]}"
    say(console, f"{found.name} on {found.topology.name}: {could}", "bold")
    if found.no_formula:
        say(console, f"There is no formula of memory and time for {found.no_formula}: all are compiled in the order listed.")
        _show_table(f"The first {len(found.shown)} to compile", found, found.shown, console)
        return
    _show_table(f"The best {len(found.shown)} by formula, not compiled", found, found.shown, console)
    say(console, "The formula leaves latencies out, so it orders small models poorly.", "dim")


def show(found: SearchResult, console: Console) -> None:
    """Print the settings that were compiled, best first, and the overrides of the best."""
    compiled = sum(c.plan is not None for c in found.tried)
    failed = f", {len(found.tried) - compiled} failed" if compiled < len(found.tried) else ""
    _show_table(f"{compiled} compiled{failed}", found, found.tried, console)
    equal = sum(c.verdict in ("best", "equal") for c in found.tried)
    if found.objective == "speed" and equal > 1:
        order = "Of these the first has the least time on links, then the fewest mesh axes, then the shortest step."
        say(console, f"{equal} are equal: their steps differ by {percent(ERROR)} at most, the error of the estimate. {order}")
    left = len(found.candidates) - len(found.tried)
    ending = "complete: every setting was compiled" if found.no_formula and found.ended == "complete" else ENDINGS[found.ended]
    say(console, f"{ending}; {left:,} settings were not tried; {duration(found.seconds)}")
    show_best(found, console)


def _show_table(title: str, found: SearchResult, some: Sequence[Candidate], console: Console) -> None:
    """Print a table with a row for each setting: the figures of its plan, or of the formula, if there is one."""
    if not some:
        return
    compiled = any(c.outcome for c in some)
    some = [c for c in some if c.plan or not compiled]
    runs = [c.run for c in some]
    own = ["" if c.changes else "the config's own" for c in some]
    gathers = [r.sharding.gather if r.sharding.zero == 3 else f"zero={r.sharding.zero}" for r in runs]
    each = [r.train.global_batch / r.train.grad_accum / found.topology.total for r in runs]
    steps = [c.plan.time.step_ms if c.plan else c.bound.step_s * 1e3 for c in some]
    sizes = [c.plan.memory.taken_gib if c.plan else c.bound.likely_gib for c in some]
    columns = [
        Column("mesh", [mesh(c, found.topology) for c in some]),
        Column("remat", [describe_remat(r.remat) for r in runs]),
        Column("seq/GPU", [f"{n:g}" for n in each], each),
        labels("accum", [r.train.grad_accum for r in runs]),
        Column("gather", gathers),
    ]
    if compiled or not found.no_formula:
        columns.append(numbers("roofline ms" if compiled else "formula ms", steps, total=False))
        columns.append(numbers("GiB", sizes, total=False))
    if compiled:
        columns.append(Column("expected ms", [span(c.plan.time.expected_step_ms) for c in some if c.plan], steps))
        notes = [f"{c.verdict}: {', '.join(filter(None, (c.reason, note)))}" for c, note in zip(some, own, strict=True)]
    else:
        notes = own if found.objective == "speed" else [" ".join(c.changes) for c in some]
    columns.append(Column("", notes))
    failed: dict[str, list[Candidate]] = {}  # by reason, told once for all of its settings
    for c in found.tried:
        if c.outcome and not c.plan:
            failed.setdefault(c.outcome.reason, []).append(c)
    told = [
        f"{describe(alike[0], found.topology)}{f' and {len(alike) - 1} more' if alike[1:] else ''}: {alike[0].reason}"
        for alike in failed.values()
    ]
    tables = [Table(title, columns)] if some else []
    print_sections([Section(title, [*tables, Listing(told, "warning")])], console)


def show_best(found: SearchResult, console: Console) -> None:
    """Print the overrides of the best setting, and whether the setting is compiled or only estimated by formula."""
    best = found.best
    unknown = 0 if not found.no_formula or found.ended == "complete" else len(found.candidates) - len(found.tried)
    if best is None and found.tried and not any(c.plan for c in found.tried):
        say(console, f"no setting could be compiled{f'; {unknown:,} were not tried' if unknown else ''}", "bold red")
        return
    if best is None:
        none = "no setting was found that fits" if found.tried or found.no_formula else "no setting probably fits by formula"
        none += f", and nothing is known of {unknown:,} that were not compiled" if unknown else ""
        none = none if found.candidates else "no setting is legal and small enough by formula"
        say(console, f"{none}: {size(found.usable_gib)} are usable on each GPU", "bold red")
        return
    source = "compiled" if best.fits else "by formula, not compiled"
    before = found.shown.index(best) if best in found.shown else 0
    if unknown and found.objective == "speed":
        source = (
            f"the best of {sum(c.plan is not None for c in found.tried)} compiled; nothing is known of the {unknown:,} others"
        )
    elif best.fits and before and found.ended in ("budget", "interrupted"):
        source = f"the best of those compiled; {before} of the best by formula were not compiled: raise --budget"
    fits = "fits" if best.fits else "probably fits"
    title = {"speed": "the best layout", "fit": f"this {fits}"}[found.objective]
    if not best.changes:
        say(console, f"{title} ({source}) is the config's own", "bold")
        return
    print_sections([Section(f"{title} costs accuracy", [Listing(_costs(best))])], console)
    say(console, f"{title} ({source}), to paste behind the config", "bold")
    console.print(Text(paste(best)), soft_wrap=True)


def paste(candidate: Candidate) -> str:
    """Return a setting as overrides of the config."""
    return shlex.join(f"--config.{change}" for change in candidate.changes)


def _costs(candidate: Candidate) -> list[str]:
    keys = [change.partition("=")[0] for change in candidate.changes]
    return [f"{key}: {ROUNDED[key]}" for key in keys if key in ROUNDED]


def hints(found: SearchResult) -> tuple[str, ...]:
    """Return hints for a plan that does not fit: the compiled settings that fit, else the best setting by formula."""
    fitting = [c for c in found.tried if c.fits]
    lines = [f"{' '.join(c.changes)}: {_came_of(c.outcome)} (compiled)" for c in fitting]
    if not fitting and (best := found.best):
        lines = [f"{' '.join(best.changes)}: about {size(best.bound.likely_gib)} (by formula, not compiled)"]
    failed = found.tried and not any(c.plan for c in found.tried)
    return tuple(lines or ["no setting could be compiled" if failed else "no setting was found that fits"])


def show_refusal(why: Refusal, name: str, overrides: Iterable[str], topology: Topology, console: Console) -> tuple[str, ...]:
    """Print that a config cannot fit, and commands of settings that probably fit. Return these commands, as hints."""
    need = f"at least {size(why.least_gib)} on each GPU, {size(why.usable_gib)} are usable"
    say(console, f"does not fit: {name} on {topology.name} needs {need}", "bold red")
    say(console, f"weights and moments alone take {size(why.state_gib)}; by formula, nothing was compiled")
    found = [(topology, why.fix, "here, with these changes")] if why.fix else []
    if why.larger:
        found.append((*why.larger, f"on {why.larger[0].total} GPUs"))
    lines = []
    for machine, c, where in found:
        changed = {change.partition("=")[0] for change in c.changes}
        mine = [shlex.quote(f"--config.{o}") for o in overrides if o.partition("=")[0] not in changed]
        title = f"probably fits {where}: about {size(c.bound.likely_gib)} on each GPU by formula"
        print_sections([Section(title, [Listing([f"costs accuracy: {cost}" for cost in _costs(c)]), ""])], console)
        words = [
            spelled("python -m jaxtrain plan"),
            shlex.quote(f"--config={name}"),
            *mine,
            f"--topology={machine.name}",
            paste(c),
        ]
        lines.append(" ".join(filter(None, words)))
        console.print(Text(lines[-1]), soft_wrap=True)
    if not found:
        say(console, "by formula, no change of the config and no larger machine of these GPUs fits", "bold")
    return tuple(lines)


def show_savings(
    plan: Plan, found: Mapping[str, Overrides], outcomes: Mapping[str, Outcome], plain: Any, console: Console
) -> tuple[str, ...]:
    """For each setting that saves memory, print whether the config fits without it. Return the printed lines, as hints.

    Args:
        plan: the config's plan.
        found: result of `savings`: setting that saves memory -> overrides without it.
        outcomes: setting that saves memory -> the outcome of planning without it.
        plain: the config.
    """
    lines = []
    for choice, instead in found.items():
        changed, outcome = " ".join(changes(plain, instead)), outcomes.get(choice)
        text = f"{choice}: with {changed} instead, {_came_of(outcome)}"
        if outcome and outcome.plan and outcome.plan.fits:
            more = outcome.plan.time.step_ms / plan.time.step_ms - 1
            text += f", {percent(abs(more))} {'slower' if more > 0 else 'faster'}: not needed for memory"
        lines.append(text)
    shown = lines or ["no setting of the config saves memory"]
    print_sections([Section("Settings that save memory, and the step without each", [Listing(shown)])], console)
    return tuple(lines)


def to_json(found: SearchResult) -> dict[str, Any]:
    """Return a search as plain data: the best setting, the ten best by formula, and every compiled setting."""

    def data(c: Candidate) -> dict[str, Any]:
        out: dict[str, Any] = {"changes": list(c.changes), "verdict": c.verdict, "reason": c.reason}
        figures = {"step_ms": c.bound.step_s * 1e3, "gib": c.bound.likely_gib, "least_gib": c.bound.memory_gib}
        out["formula"] = None if found.no_formula else figures
        if c.plan:
            t, m = c.plan.time, c.plan.memory
            out |= {"fits": c.plan.fits, "peak_gib": m.peak_gib, "taken_gib": m.taken_gib}
            fields = ("expected_step_ms", "step_ms", "tokens_per_s_per_device", "mfu_causal", "communication_ms")
            out |= {field: getattr(t, field) for field in fields}
        return out

    best = found.best
    return {
        "format": FORMAT,
        "config": found.name,
        "topology": found.topology.name,
        "objective": found.objective,
        "best": best and data(best),
        "compiled": bool(best and best.fits),
        "paste": paste(best) if best else "",
        "no_formula": found.no_formula,
        "formula": [] if found.no_formula else [data(c) for c in found.shown],
        "tried": [data(c) for c in found.tried],
        "settings": len(found.candidates),
        "too_big": None if found.no_formula else found.too_big,
        "usable_gib": found.usable_gib,
        "ended": found.ended,
        "seconds": found.seconds,
    }
