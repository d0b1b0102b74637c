"""The meter against the world: plans of runs whose step times others measured, in the layouts that they state.

A planned step is the step of *our* program on *their* machine: same model, sequences, batch, mesh, precision, and the remat
policy nearest to theirs. So the ratio of planned to published step time holds two things, the meter's error and the difference
between two programs. Where both go through XLA to the same kernels the second is small; RUNS says of each what is known.

    python -m jaxtrain.plan --published                                  plans the runs again and prints the table
    python -m jaxtrain.plan --published=docs/planned_vs_published.md     also renews what is stored, and this page

What is stored (data/published.json) is what plans take their expected range from (rates.expected_ms): no plan waits for
twenty others.
"""

import dataclasses
import datetime
import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain import flops
from jaxtrain.page.numbers import percent
from jaxtrain.page.sections import markdown_table
from jaxtrain.plan import rates
from jaxtrain.plan import topology as machines
from jaxtrain.plan.known.published_runs import NOT_COMPARABLE, RUNS, Run
from jaxtrain.plan.report.live import live
from jaxtrain.plan.report.sections import ASSUMPTIONS
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search.cache import Cache, relevant
from jaxtrain.plan.search.parallel import Outcome, Request, plan_many

FORMAT = 3
STORED = rates.COMPARED
LEAST = 3  # runs that make a range
PAGE = "docs/planned_vs_published.md"
COMMAND = f"./run.sh plan --published={PAGE}"


@dataclasses.dataclass(frozen=True)
class Planned:
    """What is stored of a plan. One GPU, one step."""

    asked: str  # digest of the config, the machine and the rates
    step_s: float
    gemm_s: float
    attention_forward_s: float
    attention_backward_s: float
    memory_s: float
    exposed_s: float
    gemm_tflop: float
    mfu_causal: float
    mfu_full: float
    taken_gib: float
    usable_gib: float


@dataclasses.dataclass(frozen=True)
class Row:
    """A published run beside its plan."""

    run: Run
    planned: Planned

    @property
    def ratio(self) -> float:
        """Planned over published step time: below 1 where the plan is faster than the run was."""
        return self.planned.step_s / self.run.step_s

    @property
    def mfu(self) -> flops.Flops:
        """The published run's, by our formula and peak, in both conventions."""
        per_token = flops.per_token(self.run.config.model, self.run.seq_len)
        peak = machines.parse(self.run.machine).gpu.peak("bf16") * 1e12
        return per_token * (self.run.sequences * self.run.seq_len / self.run.step_s / peak)

    @property
    def gemm_rate(self) -> float:
        """TFLOP/s of GEMMs that would explain all of the difference."""
        rest = self.run.step_s - (self.planned.step_s - self.planned.gemm_s)
        return self.planned.gemm_tflop / rest if rest > 0 else math.inf


def digest(request: Request) -> str:
    facts = [
        relevant(request.run, request.topology),
        request.topology.name,
        dataclasses.asdict(request.rates) if request.rates else None,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def planned(request: Request, plan: Plan) -> Planned:
    """What of a plan is stored."""

    def total(what: str, kind: str, phases: tuple[str, ...] = ("",)) -> float:
        return sum(getattr(k, what) for k in plan.kernels if k.kind == kind and k.op_name.startswith(phases))

    t, m = plan.time, plan.memory
    backward = total("ms", "attention", ("backward",))
    figures = {
        "step_s": t.step_ms / 1e3,
        "gemm_s": t.gemm_ms / 1e3,
        "attention_forward_s": (t.attention_ms - backward) / 1e3,
        "attention_backward_s": backward / 1e3,
        "memory_s": t.memory_ms / 1e3,
        "exposed_s": t.exposed_ms / 1e3,
        "gemm_tflop": total("tflop", "gemm"),
        "mfu_causal": t.mfu_causal,
        "mfu_full": t.mfu_full,
        "taken_gib": m.taken_gib,
        "usable_gib": m.usable_gib,
    }
    return Planned(digest(request), **{name: float(f"{value:.5g}") for name, value in figures.items()})


def _stored() -> dict[str, Any]:
    tree = json.loads(STORED.read_text(encoding="utf-8"))
    if tree.get("format") != FORMAT:
        raise ValueError(f"{STORED}: format {tree.get('format')!r}, and this jaxtrain reads {FORMAT}. Run {COMMAND}")
    return tree


def rows(tree: dict[str, Any] | None = None) -> list[Row]:
    """Every published run beside what is stored of its plan. Raises ValueError where RUNS has changed since."""
    found = (_stored() if tree is None else tree)["plans"]
    absent = [run.name for run in RUNS if run.name not in found]
    if absent:
        raise ValueError(f"{STORED}: no plan of {', '.join(absent)}. Run {COMMAND}")
    return [Row(run, Planned(**found[run.name])) for run in RUNS]


def judged(found: Iterable[Row]) -> dict[str, list[Row]]:
    """Kind of run -> the rows whose ratios make its range: of XLA programs with cuDNN attention, as ours is, where there are
    LEAST of them; else of all programs, if those are as many. A kind with fewer has no range.
    """
    kinds: dict[str, list[Row]] = {}
    for row in found:
        if kind := row.run.kind:
            kinds.setdefault(kind, []).append(row)
    for kind, of_kind in kinds.items():
        same = [row for row in of_kind if row.run.same_compiler]
        kinds[kind] = same if len(same) >= LEAST else of_kind
    return {kind: chosen for kind, chosen in kinds.items() if len(chosen) >= LEAST}


def spread(found: Iterable[Row]) -> tuple[float, float]:
    """(lowest, highest) ratio of planned to published step time."""
    ratios = [row.ratio for row in found]
    return min(ratios), max(ratios)


def mean(found: Iterable[Row]) -> float:
    """The geometric mean of the ratios."""
    return statistics.geometric_mean(row.ratio for row in found)


# ---- as text

HEADINGS = ("run", "by", "GPUs", "tokens x sequences", "published s", "planned s", "ratio", "MFU published", "MFU planned")


def cells(row: Row) -> list[str]:
    """A row under HEADINGS. MFU is causal / full."""
    run, p = row.run, row.planned
    return [
        run.name,
        run.by,
        run.machine,
        f"{run.seq_len} x {run.sequences:g}",
        f"{run.step_s:.3f}",
        f"{p.step_s:.3f}",
        f"{row.ratio:.2f}",
        f"{percent(row.mfu.causal)} / {percent(row.mfu.full)}",
        f"{percent(p.mfu_causal)} / {percent(p.mfu_full)}",
    ]


def causes(row: Row) -> list[str]:
    """Where the difference likely comes from: first what can be put in figures, then what is known to differ."""
    run, p = row.run, row.planned
    peak = machines.parse(run.machine).gpu.peak("bf16")
    line = (
        f"GEMMs: {p.gemm_s / p.step_s:.0%} of the planned step, at {p.gemm_tflop / p.gemm_s:.0f} TFLOP/s. All of the "
        f"difference is explained by {row.gemm_rate:.0f} TFLOP/s, {row.gemm_rate / peak:.0%} of the bfloat16 peak."
    )
    return [line, *run.why]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def compilers(chosen: Iterable[Row]) -> str:
    """Which programs these runs are of."""
    return "XLA programs" if all(row.run.same_compiler for row in chosen) else "programs of other compilers than XLA"


KINDS = ("kind", "runs", "programs", "planned over published", "geometric mean")


def kind_cells(kind: str, chosen: Sequence[Row]) -> list[str]:
    """A kind of run under KINDS."""
    programs = "XLA, cuDNN attention" if all(row.run.same_compiler for row in chosen) else "all; too few are of XLA"
    return [kind, str(len(chosen)), programs, "{:.2f} to {:.2f}".format(*spread(chosen)), f"{mean(chosen):.2f}"]


def layout(run: Run) -> str:
    """Mesh and remat, theirs and ours."""
    mesh = " ".join(f"{axis}={size}" for axis, size in run.mesh.items())
    ours = run.keep if run.keep == "full" else f"keep {run.keep}"
    figure = f" The figure as published: {run.figure}." if run.figure else ""
    return f"Mesh {mesh}; remat `{run.remat}`, planned as `{ours}`.{figure}"


def markdown(tree: dict[str, Any] | None = None) -> str:
    """docs/planned_vs_published.md, from what is stored."""
    tree = _stored() if tree is None else tree
    found = rows(tree)
    same = [row for row in found if row.run.same_compiler]
    low, high = spread(same)
    others = "{:.2f} to {:.2f}".format(*spread(row for row in found if not row.run.same_compiler))
    slowest, fastest = (end(row.gemm_rate for row in same) for end in (min, max))
    versions = ", ".join(f"{name} {version}" for name, version in tree["versions"].items())
    out = [
        "# Planned against published",
        "",
        "A planned step time is an estimate. This page tests the meter: runs that others measured and published, planned in",
        "the layout they state. **No GPU was used for it, and none of the published figures is ours.**",
        "",
        f"For XLA programs with cuDNN attention, as ours is, planned step times are **{low:.2f} to {high:.2f}** of the",
        f"published ones (geometric mean {mean(same):.2f}): plans are optimistic. For programs of other compilers it is",
        f"{others}, which says more about the programs than about the meter.",
        "",
        "From these ratios come the ranges that plans expect, for the kinds of run that enough published ones are of. A plan",
        "of any other kind, such as experts, longer sequences, another GPU generation, says so and gives its roofline alone.",
        "",
        *markdown_table(KINDS, [kind_cells(kind, chosen) for kind, chosen in judged(found).items()]),
        "",
        *markdown_table(HEADINGS, [cells(row) for row in found]),
        "",
        "MFU is causal / full, by one formula and the dense bfloat16 peak for both sides; the percentages that were published",
        "count one way or the other and are not repeated here. Machines are written as for `--topology`.",
        "",
        "## What the ratio is made of",
        "",
        f"The meter: {ASSUMPTIONS}.",
        "Its rates are published measurements of single kernels, each with its source in jaxtrain/plan/rates.py, and none",
        "fitted to the runs below; a calibration on a GPU replaces them. All that is left of the difference would be explained",
        f"for XLA programs by GEMMs at {slowest:.0f} to {fastest:.0f} TFLOP/s in the place of 720. It is made of what the",
        "meter leaves out, in every row, and each of these makes a real step longer than its plan:",
        "",
        "- Clocks. Kernels are measured alone and for a fraction of a second; in a step the GPU is at its power limit all the",
        "  time, and its clock falls.",
        "- Contention. Where collectives overlap with kernels both slow down: kernels by 18.9% on average, 40% at most, on",
        "  A100s, H100s and MI200s (arXiv 2507.03114). The meter takes the one beside the other for free.",
        "- Launches. Between kernels are gaps, of microseconds each, and a step has tens of thousands of kernels.",
        "- Shapes. GEMMs have one rate, whether or not their tiles fill the GPU.",
        "- Stragglers: a step waits for the slowest of its GPUs.",
        "",
        "The step that is planned is ours, in their layout. Where theirs does more work, the ratio falls too: it tests the",
        "meter and the program together. Only of the first run the meter has read both programs, and found them alike.",
        "",
        "## Run by run",
        "",
    ]
    for row in found:
        p = row.planned
        fits = (
            "" if p.taken_gib <= p.usable_gib else " Ours would not fit there in this layout; the time is that of the program."
        )
        out += [
            f"### {row.run.name}: {row.ratio:.2f}",
            "",
            f"{row.run.by}: <{row.run.source}>. {layout(row.run)}",
            "",
            f"Planned: GEMMs {ms(p.gemm_s)}, attention {ms(p.attention_forward_s + p.attention_backward_s)}, memory-bound "
            f"{ms(p.memory_s)}, exposed communication {ms(p.exposed_s)}; memory {p.taken_gib:.1f} of {p.usable_gib:.1f} GiB."
            + fits,
            "",
            *(f"- {line}" for line in causes(row)),
            "",
        ]
    out += [
        "## Not comparable",
        "",
        "Published too, and not planned, since a setting that the step time depends on is not known:",
        "",
        *(f"- {name} (<{where}>): {why}." for name, where, why in NOT_COMPARABLE),
        "",
        "## How this page was made",
        "",
        "```text",
        COMMAND,
        "```",
        "",
        f"On {tree['date']}, with {versions}.",
        "Attention packing is off and the data are synthetic, as in most of the published benchmarks.",
    ]
    return "\n".join(out) + "\n"


def show(found: Iterable[Row], console: Console) -> None:
    """The table, for a terminal: without who measured it, which the page has."""
    by = HEADINGS.index("by")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, heading in enumerate((*HEADINGS[:by], *HEADINGS[by + 1 :])):
        table.add_column(heading, justify="right" if i > 2 else "left")
    for row in found:
        line = cells(row)
        table.add_row(*line[:by], *line[by + 1 :])
    console.print(table)


# ---- making it


def run(console: Console, out: Path | None = None, *, cache: Cache | None = None, jobs: int = 0) -> int:
    """Plans every run, prints the table, and with `out` renews what is stored and writes the page. Returns the exit code.

    Raises ValueError where what is stored cannot be written.
    """
    if out is not None and not os.access(STORED, os.W_OK):
        raise ValueError(
            f"--published={out}: {STORED} cannot be written, and belongs to the page. Run it in a checkout of your own"
        )
    requests = {r.name: r.request for r in RUNS}
    finished: list[str] = []
    with live(console, "published runs") as show_progress:
        show_progress(0, len(requests))

        def done(name: str, outcome: Outcome) -> None:
            finished.append(name)
            show_progress(len(finished), len(requests), f"last: {name}", [f"{name}: {outcome.kind}"])

        outcomes = plan_many(requests, jobs=jobs, cache=cache, on_done=done)
    failed = {name: o for name, o in outcomes.items() if o.plan is None}
    for name, o in failed.items():
        console.print(Text(f"{name}: {o.kind}: {o.reason}"), soft_wrap=True)
    if failed:
        return 1
    plans = {name: o.plan for name, o in outcomes.items() if o.plan}
    tree: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.date.today().isoformat(),
        "versions": next(iter(plans.values())).versions,
        "plans": {name: dataclasses.asdict(planned(requests[name], plan)) for name, plan in plans.items()},
    }
    found = rows(tree)
    tree["ranges"] = {kind: spread(chosen) for kind, chosen in judged(found).items()}
    tree["compilers"] = {kind: compilers(chosen) for kind, chosen in judged(found).items()}
    show(found, console)
    for kind, chosen in judged(found).items():
        console.print("planned over published, {}: {} runs ({}), {}, geometric mean {}".format(*kind_cells(kind, chosen)))
    if out is None:
        return 0
    STORED.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    out.expanduser().write_text(markdown(tree), encoding="utf-8")
    console.print(f"wrote {STORED} and {out}")
    return 0
