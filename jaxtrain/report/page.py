"""A run as one page that can be mailed, printed and opened anywhere, or several compared: complete without scripts, and no
request leaves it."""

from collections.abc import Sequence
from html import escape

from jaxtrain.page.kit import Column, Markup, bullets, document, plural, say, swatch, table, tiles
from jaxtrain.page.numbers import number, percent, size
from jaxtrain.report import differences, facts, figures, pictures, time_spent
from jaxtrain.report.run import Run, RunError, verdict

WARNINGS = 30  # the newest, of a run; how many more there are is said
SAMPLE = 1_500  # characters of a text that a model wrote


def html(runs: Sequence[Run]) -> str:
    """The page of a run, or of several beside each other. Raises RunError for more runs than it has colours for."""
    if len(runs) > pictures.MANY:
        raise RunError(f"{len(runs)} runs: a page tells at most {pictures.MANY} apart. Name fewer.")
    return _one(runs[0]) if len(runs) == 1 else _several(runs)


def _one(run: Run) -> str:
    kind, words = verdict(run)
    devices = run.receipt.get("devices") or {}
    on = f"{devices['count']} x {', '.join(devices['kind'])}, " if devices else ""
    tries = plural(len(run.receipt.get("attempts", ())) + 1, "attempt") if run.receipt else "no receipt"
    body = [
        f"<header><h1>{escape(run.name)}</h1>",
        say(f"{run.receipt.get('config', 'config not known')}: {on}{tries}; {run.folder}", "quiet"),
        f'<p class="verdict {kind}">{escape(words)}</p></header><main>',
        tiles(figures.tiles(run)),
        *(say(note) for note in run.notes),
        _warnings(run, "Warnings"),
        *_charts([run]),
        _samples([run]),
        f"<h2>What ran</h2>{facts.attempts(run)}{facts.newest(run)}" if run.receipt else "",
        "</main>",
    ]
    return document(f"{run.name}: {words}", f"Report of a training run: {words}", body)


def _several(runs: Sequence[Run]) -> str:
    title = f"{len(runs)} runs compared"
    names = ", ".join(run.name for run in runs)
    body = [
        f"<header><h1>{escape(title)}</h1>",
        say(names, "quiet"),
        "</header><main>",
        _states(runs),
        _final(runs),
        *(say(f"{run.name}: {note}") for run in runs for note in run.notes),
        *_charts(runs),
        *(_warnings(run, f"Warnings of {run.name}") for run in runs),
        _samples(runs),
        "<h2>What differs</h2>",
        *(differences.section(runs[0], run) for run in runs[1:]),
        "</main>",
    ]
    return document(f"{title}: {names}", f"Report of training runs: {names}", body)


def _charts(runs: Sequence[Run]) -> list[str]:
    """The sections of curves; one that has nothing to show says why, or is left out where nobody would expect it."""
    learned = pictures.shown(pictures.learning(runs), len(runs))
    sped = pictures.shown(pictures.speed(runs), len(runs))
    held = pictures.shown(pictures.memory(runs), len(runs))
    spent = time_spent.section(runs)
    sampled = pictures.shown(pictures.gpus(runs), len(runs))
    taken = any(run.train.steps for run in runs)
    table_of_gpus = facts.gpu_table(runs[0]) if len(runs) == 1 else ""
    sections = [
        ("What it learned", learned, ""),
        ("How fast", sped, "No rate yet: the first steps, and those with a save or an evaluation, are not counted."),
        ("Memory", held, "The devices do not tell what they hold, as CPUs do not."),
        ("Where the wall time went", spent, ""),
        ("GPUs", sampled + table_of_gpus, "No GPU was sampled: there is none, or log.gpu_every_s is 0."),
    ]
    out = []
    for title, text, why in sections:
        if text or (why and taken):
            out.append(f"<h2>{title}</h2>{text or say(why, 'quiet')}")
    return out


def _warnings(run: Run, title: str) -> str:
    if not run.alerts:
        return ""
    newest = run.alerts[-WARNINGS:]
    earlier = len(run.alerts) - len(newest)
    more = [f"{plural(earlier, 'earlier line')} in log.txt"] if earlier else []
    return bullets(escape(title), [*more, *newest], "warnings")


def _samples(runs: Sequence[Run]) -> str:
    out = []
    for run in runs:
        for s in run.samples:
            whose = f"{run.name}, " if len(runs) > 1 else ""
            name = f"{whose}step {s.step:,}{f', prompt {s.prompt}' if s.prompt else ''}"
            text = s.text if len(s.text) <= SAMPLE else f"{s.text[:SAMPLE]} ... ({len(s.text):,} characters in samples.txt)"
            out.append(f"{say(name, 'quiet')}<pre>{escape(text)}</pre>")
    return f"<h2>What the model wrote</h2>{''.join(out)}" if out else ""


def _named(runs: Sequence[Run]) -> list[str]:
    return [Markup(swatch(pictures.colour(i)) + escape(run.name)) for i, run in enumerate(runs)]


def _states(runs: Sequence[Run]) -> str:
    devices = [run.receipt.get("devices") or {} for run in runs]
    columns = [
        Column("run", _named(runs), kind="whole"),
        Column("how it stands", [verdict(run)[1] for run in runs]),
        Column("devices", [f"{d['count']} x {', '.join(d['kind'])}" if d else "-" for d in devices]),
        Column("tokens a step", [f"{run.tokens_per_step:,}" if run.tokens_per_step else "-" for run in runs], kind="number"),
        Column("warnings", [str(len(run.alerts)) for run in runs], [len(run.alerts) for run in runs]),
    ]
    return table("Runs", columns)


def _final(runs: Sequence[Run]) -> str:
    """The figures of each, with the best marked where one is."""
    found = [figures.figures(run) for run in runs]
    columns = [
        Column("run", _named(runs), kind="whole"),
        Column("step", [f"{f.step:,}" for f in found], [f.step for f in found]),
    ]

    def measure(heading: str, values: Sequence[float | None], cells: Sequence[str], most: bool | None) -> None:
        if all(v is None for v in values):
            return
        stars = figures.best(values, cells, most) if most is not None else set()
        marked = [
            Markup(f'<span class="best" title="best">{escape(c)}</span>') if i in stars else c for i, c in enumerate(cells)
        ]
        columns.append(Column(heading, marked, kind="number"))

    common = figures.last_common(runs)
    if common is not None:
        first = figures.window(runs, common)
        losses = [figures.loss_over(run, first, common) for run in runs]
        measure(f"train loss, steps {first:,} to {common:,}", losses, [figures.loss(v) for v in losses], most=False)
    for name in dict.fromkeys(name for f in found for name in f.held_out):
        step, losses = figures.held_out_at(runs, name)
        heading = f"held-out {name}".rstrip() + (", newest" if step is None else f" at step {step:,}")
        measure(heading, losses, [figures.loss(v) for v in losses], most=None if step is None else False)
    per_device = [f.per_device for f in found]
    measure("tokens/s/device", per_device, [number(v, 0) for v in per_device], most=True)
    measure("step s", [f.step_s for f in found], [f"{f.step_s:.4g}" if f.step_s else "-" for f in found], most=None)
    measure("MFU causal", [f.mfu_causal for f in found], [percent(f.mfu_causal) for f in found], most=True)
    measure("MFU full", [f.mfu_full for f in found], [percent(f.mfu_full) for f in found], most=None)
    measure("goodput", [f.goodput for f in found], [percent(f.goodput) for f in found], most=True)
    peaks = [f.peak_gib for f in found]
    measure("peak memory", peaks, ["-" if v is None else size(v) for v in peaks], most=False)
    note = (
        "Train loss is the mean over the same steps of each, up to the last that all have reached; held-out loss that of the "
        "last step at which all were evaluated. Rates and memory are the newest attempt's: medians without its first fifth, "
        "and the peak. A star marks the best."
    )
    return table("What they came to", columns) + say(note, "quiet")
