"""What can explain that runs came out differently, as a section of their page: `python -m jaxtrain.receipt diff` as tables."""

from html import escape

from jaxtrain.page.kit import Column, Markup, say, table
from jaxtrain.receipt.diff import compare
from jaxtrain.receipt.format import ReceiptError
from jaxtrain.report.run import Run

LINES = 12  # of a source file's changed lines


def section(one: Run, other: Run) -> str:
    """What differs from one run to another, what came of it, and what else should be known."""
    without = [run.name for run in (one, other) if not run.receipt]
    if without:
        return say(f"{one.name} and {other.name} cannot be compared: {' and '.join(without)} without a receipt")
    try:
        found = compare(one.opened, other.opened)
    except ReceiptError as error:
        return say(f"{one.name} and {other.name} cannot be compared: {error}")
    out = [f"<h3>From {escape(one.name)} to {escape(other.name)}</h3>"]
    if not found.differences:
        out.append(say("Nothing differs that can explain anything."))
    else:
        names = [_named(d.name, d.lines) for d in found.differences]
        columns = [
            Column("of", [d.group for d in found.differences]),
            Column("what", names, kind="path"),
            Column(one.name, [d.a for d in found.differences], kind="path"),
            Column(other.name, [d.b for d in found.differences], kind="path"),
        ]
        out.append(table("What can explain it", columns))
    if found.outcomes:
        columns = [
            Column("what", [o.name for o in found.outcomes]),
            Column(one.name, [o.a for o in found.outcomes], kind="path"),
            Column(other.name, [o.b for o in found.outcomes], kind="path"),
            Column("in a word", [o.ratio for o in found.outcomes], kind="path"),
        ]
        out.append(table("What came of it", columns))
    return "".join(out)


def _named(name: str, lines: tuple[str, ...]) -> str:
    if not lines:
        return name
    more = (f"... {len(lines) - LINES} more",) if len(lines) > LINES else ()
    return Markup(f"{escape(name)}<pre>{escape(chr(10).join((*lines[:LINES], *more)))}</pre>")
