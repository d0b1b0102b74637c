"""Golden plans: what the shipped configs' compiled steps hold and move, kept in small files that tests compare with.

A change that adds a gather or two GiB to a config that nobody looked at is found by its file, and so is the line that did it:

    python -m jaxtrain.plan --golden           compare all of them, and say what differs and which line did it
    python -m jaxtrain.plan --golden=write     write them again, and say what changed

Figures belong to one compiler: under another jaxlib there is nothing to compare. Times are by published kernel rates, so that a
calibration of the machine at hand changes nothing. Counts and bytes are those of a whole step: loops are multiplied out.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain import launch
from jaxtrain.page.numbers import number
from jaxtrain.plan import topology
from jaxtrain.plan.known.golden_file import MARGINS, WRITE, Golden, GoldenError, from_plan, inapplicable, load, save
from jaxtrain.plan.rates import datasheet
from jaxtrain.plan.report.live import live
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search import parallel
from jaxtrain.plan.search.cache import Cache

FOLDER = launch.REPO / "tests" / "golden"
# File -> (config with its variant, topology). The tiny config trains on CPUs, for which there is no plan.
SHIPPED: Mapping[str, tuple[str, str]] = {
    "llama3_8b": ("configs/llama3_8b.py", "h200:8"),
    "llama3_70b": ("configs/llama3_70b.py", "h200:8"),
    "llama2_7b": ("configs/llama2_7b.py", "h200:8"),
    "llama3_1b": ("configs/llama3_1b.py", "h200:8"),
    "llama3_1b_on_1": ("configs/llama3_1b.py:gpus=1", "h200:1"),
    "llama3_8b_half": ("configs/llama3_8b.py:half", "h200:1"),
    "llama3_8b_long": ("configs/llama3_8b.py:long", "h200:8"),
    "llama3_8b_1m": ("configs/llama3_8b.py:1m", "h200:8"),
    "llama3_405b": ("configs/llama3_405b.py", "h200:8x16"),
    "mixtral_8x7b": ("configs/mixtral_8x7b.py", "h200:8"),
    "qwen3_30b_a3b": ("configs/qwen3_30b_a3b.py", "h200:8"),
}
NO_MARGINS = dict.fromkeys(MARGINS, 0.0)
BLAMED = 4  # lines or names in one sentence


@dataclasses.dataclass(frozen=True)
class Difference:
    """One figure that is not what it was."""

    what: str
    old: str
    new: str
    change: str
    words: str  # the same in a sentence, with the lines that are responsible


def path(name: str, folder: Path = FOLDER) -> Path:
    """The file of a golden plan."""
    return folder / f"{name}.json"


# ---- comparing


def compare(golden: Golden, plan: Plan, margins: Mapping[str, float] | None = None) -> list[Difference]:
    """Everything in which a plan differs from its golden one by more than the margins (None: those of the golden one).

    Raises GoldenError where the two cannot be compared: another jaxlib or another machine.
    """
    if reason := inapplicable(golden, plan.versions["jaxlib"]):
        raise GoldenError(reason)
    if golden.topology != plan.topology:
        raise GoldenError(f"a golden plan for {golden.topology} says nothing about {plan.topology}")
    new = from_plan(plan)
    within = golden.margins if margins is None else margins
    return [
        *_memory(golden, new, plan, within["peak"]),
        *_moved(golden, new, within),
        *_loops(golden, new),
        *_work(golden, new, within["tflop"]),
        *_time(golden, new, plan, within),
        *_warnings(golden, new),
    ]


def _far(old: float, new: float, margin: float) -> bool:
    return abs(new - old) > margin * max(abs(old), abs(new))


def _signed(change: float, unit: str, old: float = 0.0) -> str:
    relative = f" ({100 * change / old:+.1f}%)" if old else ""
    return f"{'+' if change >= 0 else '-'}{number(abs(change))} {unit}{relative}"


def _figure(what: str, old: float, new: float, unit: str, why: str) -> Difference:
    change = _signed(new - old, unit, old)
    words = f"{what}: {number(new)} {unit}, golden has {number(old)}: {change}{why}"
    return Difference(what, f"{number(old)} {unit}", f"{number(new)} {unit}", change, words)


def _grown(old: Mapping[str, float], new: Mapping[str, float], unit: str) -> list[tuple[str, str]]:
    """(name, words) of the entries that changed, most first; those too small to matter beside the first are left out."""
    changes = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in {*old, *new}}
    ordered = sorted(changes, key=lambda name: (-abs(changes[name]), name))
    most = abs(changes[ordered[0]]) if ordered else 0.0
    kept = [name for name in ordered if most and abs(changes[name]) > 0.05 * most]
    return [(name, f"{name} {_signed(changes[name], unit)}") for name in kept[:BLAMED]]


def _memory(old: Golden, new: Golden, plan: Plan, margin: float) -> Iterable[Difference]:
    if not _far(old.peak_gib, new.peak_gib, margin):
        return
    parts = []
    for name, words in _grown(old.classes_gib, new.classes_gib, "GiB"):
        held = new.classes_gib.get(name, 0.0) > old.classes_gib.get(name, 0.0)
        saved = [said for _, said in _grown(old.saved_gib, new.saved_gib, "GiB")] if name == "saved activations" else []
        lines = dict.fromkeys(b.source or b.op_name for b in plan.memory.largest if held and b.kind == name)
        who = saved or [f"the largest from {', '.join(list(lines)[:BLAMED])}"] * bool(lines)
        parts.append(words + (f" [{', '.join(who)}]" if who else ""))
    yield _figure("peak memory", old.peak_gib, new.peak_gib, "GiB", f"; {'; '.join(parts)}" if parts else "")


def _moved(old: Golden, new: Golden, margins: Mapping[str, float]) -> Iterable[Difference]:
    before = {c.name: c for c in old.collectives}
    after = {c.name: c for c in new.collectives}
    for name in sorted({*before, *after}, key=lambda n: -max(c.wire_gb for c in (before.get(n), after.get(n)) if c)):
        was, now = before.get(name), after.get(name)
        if max(c.wire_gb for c in (was, now) if c) <= margins["least_gb"]:
            continue
        if was and now and was.launches == now.launches and not _far(was.wire_gb, now.wire_gb, margins["wire"]):
            continue
        had, has = (f"{number(c.wire_gb)} GB in {_launches(c.launches)}" if c else "none" for c in (was, now))
        gb = (now.wire_gb if now else 0.0) - (was.wire_gb if was else 0.0)
        launches = (now.launches if now else 0) - (was.launches if was else 0)
        blamed = _lines(was.lines if was else {}, now.lines if now else {})
        yield Difference(
            name,
            had,
            has,
            f"{_signed(gb, 'GB', was.wire_gb if was else 0.0)}, {launches:+,} launches",
            f"{name}: {has} a step, golden has {had}" + (f"; {blamed}" if blamed else ""),
        )


def _lines(old: dict[str, tuple[int, float]], new: dict[str, tuple[int, float]]) -> str:
    """The lines that move more than before, or less. A line that only went to another place in its file is neither."""
    less = {line: v for line, v in old.items() if new.get(line) != v}
    more = {line: v for line, v in new.items() if old.get(line) != v}
    for line, v in list(more.items()):
        same = [other for other, was in less.items() if was == v and other.rpartition(":")[0] == line.rpartition(":")[0]]
        if same:
            del more[line], less[same[0]]
    parts = []
    # A line that is left in both moved something before and moves something else now.
    ordered = sorted(more.items(), key=lambda kv: -abs(kv[1][1] - old.get(kv[0], (0, 0.0))[1]))
    said = [f"{line} ({_launches(n)}, {number(gb)} GB{_was(old.get(line))})" for line, (n, gb) in ordered]
    if said:
        parts.append(f"from {_some(said)}")
    gone = [f"{line} ({_launches(n)}, {number(gb)} GB)" for line, (n, gb) in _most(less) if line not in new]
    if gone:
        parts.append(f"no longer from {_some(gone)}")
    return "; ".join(parts)


def _launches(count: int) -> str:
    return "1 launch" if count == 1 else f"{count:,} launches"


def _most(lines: dict[str, tuple[int, float]]) -> list[tuple[str, tuple[int, float]]]:
    return sorted(lines.items(), key=lambda kv: -kv[1][1])


def _was(value: tuple[int, float] | None) -> str:
    return f", before {value[0]:,} and {number(value[1])} GB" if value else ""


def _some(names: Sequence[str]) -> str:
    more = [f"and {len(names) - BLAMED} more"] if len(names) > BLAMED else []
    return ", ".join([*names[:BLAMED], *more])


def _loops(old: Golden, new: Golden) -> Iterable[Difference]:
    for name in sorted({*old.loops, *new.loops}):
        was, now = (" + ".join(map(str, g.loops.get(name, ()))) or "none" for g in (old, new))
        if was != now:
            trips = sum(new.loops.get(name, ())) - sum(old.loops.get(name, ()))
            yield Difference(
                f"trips of {name}", was, now, f"{trips:+,}", f"loop {name!r} runs {now} times, in the golden plan {was}"
            )


def _work(old: Golden, new: Golden, margin: float) -> Iterable[Difference]:
    if _far(old.tflop, new.tflop, margin):
        why = [words for _, words in _grown(old.work_tflop, new.work_tflop, "TFLOP")]
        yield _figure("hardware FLOPs", old.tflop, new.tflop, "TFLOP", f"; {', '.join(why)}" if why else "")


def _time(old: Golden, new: Golden, plan: Plan, margins: Mapping[str, float]) -> Iterable[Difference]:
    if _far(old.step_ms, new.step_ms, margins["step"]):
        yield _figure("planned step", old.step_ms, new.step_ms, "ms", "")
    if abs(new.exposed_share - old.exposed_share) > margins["exposed_share"]:
        waited: dict[str, float] = {}
        for c in plan.collectives:
            line = c.source or c.op_name
            waited[line] = waited.get(line, 0.0) + c.exposed_ms
        longest = [f"{line} {number(ms)} ms" for line, ms in sorted(waited.items(), key=lambda kv: -kv[1])[:BLAMED] if ms]
        was, now = (f"{100 * g.exposed_share:.1f}%" for g in (old, new))
        change = f"{100 * (new.exposed_share - old.exposed_share):+.1f} points"
        words = f"exposed communication: {now} of the step, golden has {was}"
        yield Difference("exposed share", was, now, change, words + (f"; {', '.join(longest)}" if longest else ""))


def _warnings(old: Golden, new: Golden) -> Iterable[Difference]:
    """Warnings that the golden plan has not; their numbers aside."""
    known = {_plain(w) for w in old.warnings}
    for w in new.warnings:
        if _plain(w) not in known:
            yield Difference("warning", "none", "1", "+1", w)


def _plain(warning: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", warning)


# ---- for people


def show(console: Console, name: str, differences: Sequence[Difference]) -> None:
    """Old, new and difference of each figure, then the same in words with the lines that are responsible."""
    if not differences:
        console.print(Text(f"{name}: as the golden plan", style="green"))
        return
    console.print(Text(f"{name}: {len(differences)} differences" if len(differences) > 1 else f"{name}: 1 difference", "bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("what", "golden", "now", "difference"):
        table.add_column(heading, justify="left" if heading == "what" else "right", overflow="fold")
    for d in differences:
        if d.what != "warning":
            table.add_row(*(Text(cell) for cell in (d.what, d.old, d.new, d.change)))
    if table.row_count:
        console.print(table)
    for d in differences:
        console.print(Text(f"- {d.words}"), soft_wrap=True)


def said(name: str, differences: Sequence[Difference]) -> str:
    """The differences as the message of a failing test."""
    lines = [f"{name} is not as its golden plan in tests/golden/{name}.json:", *(f"- {d.words}" for d in differences)]
    return "\n".join([*lines, f"If this is what is wanted: {WRITE}"])


def requests(names: Iterable[str]) -> dict[str, parallel.Request]:
    """The plans to make for these files. Raises GoldenError for a name that is not shipped and for a config with a mistake."""
    out = {}
    for name in names:
        if name not in SHIPPED:
            raise GoldenError(f"golden plan {name!r}: there is none. Choose from {', '.join(SHIPPED)}.")
        config, machine = SHIPPED[name]
        file, _, variant = config.partition(":")
        loaded = launch.load([f"--config={launch.REPO / file}" + (f":{variant}" if variant else "")])
        if loaded.problems:
            raise GoldenError(f"{config}: {'; '.join(map(str, loaded.problems))}")
        where = topology.parse(machine)
        out[name] = parallel.Request(loaded.run, where, config, rates=datasheet(where.gpu, loaded.run.precision))
    return out


def run(
    console: Console,
    *,
    write: bool = False,
    names: Sequence[str] = (),
    jobs: int = 0,
    cache: Cache | None = None,
    folder: Path = FOLDER,
    plan_many: Callable[..., dict[str, parallel.Outcome]] = parallel.plan_many,
) -> int:
    """Plans the shipped configs (`names`: only these), prints what differs from their files, and with `write` writes them.

    Returns 0 where all agree or are written, 1 where one differs or could not be planned, 2 where nothing can be compared.
    """
    try:
        wanted = requests(names or SHIPPED)
        kept = {name: load(path(name, folder)) for name in wanted if not write or path(name, folder).is_file()}
    except GoldenError as error:
        console.print(Text(str(error), style="red"))
        return 2
    codes = [0]

    def done(name: str, outcome: parallel.Outcome) -> None:
        if outcome.plan is None:
            console.print(Text(f"{name}: no plan, {outcome.kind}: {outcome.reason}", style="red"))
            codes.append(1)
            return
        try:
            if name in kept:
                # All that changes in a file that is written is worth a line; otherwise only what is beyond the margins.
                differences = compare(kept[name], outcome.plan, NO_MARGINS if write else None)
                show(console, name, differences)
                codes.append(1 if differences and not write else 0)
        except GoldenError as error:
            console.print(Text(f"{name}: not compared; {error}", style="yellow"))
            codes.append(0 if write else 2)
        if write:
            save(from_plan(outcome.plan), path(name, folder))
            console.print(Text(f"{name}: written to {path(name, folder)}"), soft_wrap=True)

    heard: list[str] = []
    with live(console, "golden plans") as progress:
        progress(0, len(wanted))

        def counted(name: str, outcome: parallel.Outcome) -> None:
            heard.append(name)
            progress(len(heard), len(wanted), f"last: {name}")
            done(name, outcome)

        plan_many(wanted, jobs=jobs, cache=cache, on_done=counted)
    return max(codes)
