"""Receipts on a terminal: one, a list, and the differences between two."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.metrics.receipt import FIX, NAME, ReceiptError, RunRecord, differences, json_items, open_run

FIRST = ("command", "config", "overrides", "mesh", "attention", "data")  # most important fields, which are shown first
HIDDEN = ("attempts", "format", "resolved", "ranks", "changed")  # long, or in another table or file
FORMATS = {
    "step_time_s": ".5g", "tokens_per_s_per_device": ",.0f", "mfu_causal": ".1%", "peak_memory_gib": ",.5g", "goodput": ".1%",
}  # fmt: skip


def compare_receipts(a: RunRecord, b: RunRecord) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the facts that differ between two runs (`group`, `name`, `a`, `b`), and their results (`name`, `a`, `b`, `ratio`).

    Raises ReceiptError if a metrics.jsonl cannot be read.
    """
    facts = []
    for path, (x, y) in differences(a.receipt, b.receipt).items():
        group, _, name = path.partition(".")
        facts.append({"group": group, "name": name, "a": _text(x), "b": _text(y)})
    common_steps = sorted(a.losses.keys() & b.losses.keys())
    first = next((step for step in common_steps if repr(a.losses[step]) != repr(b.losses[step])), None)  # repr: NaN equals NaN
    if first is None:
        verdict = f"the same, bit for bit, to step {common_steps[-1]}" if common_steps else "no step whose loss both have"
        results = [{"name": "loss", "a": "", "b": "", "ratio": verdict}]
    else:
        x, y = str(a.losses[first]), str(b.losses[first])
        results = [{"name": "loss", "a": x, "b": y, "ratio": f"the first that differs, at step {first}"}]
    for name, form in FORMATS.items():
        x, y = a.rates.get(name), b.rates.get(name)
        if x or y:
            texts = [f"{v:{form}}" if v else "not measured" for v in (x, y)]
            results.append({"name": name, "a": texts[0], "b": texts[1], "ratio": f"{y / x:.3f} times" if x and y else ""})
    return facts, results


def _text(value: Any) -> str:
    return "absent" if value is None else str(value) or "''"


def show_diff(
    a: RunRecord, b: RunRecord, facts: Sequence[dict[str, str]], results: Sequence[dict[str, str]], console: Console
) -> None:
    """Print the facts that differ between two runs by group, and the results of both (see `compare_receipts`)."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    for letter, run in (("A", a), ("B", b)):
        code = run.receipt.get("code") or {}
        say(f"{letter}: {run.name}, commit {code.get('commit') or 'unknown'}{', with changes' if code.get('dirty') else ''}")
    for group in dict.fromkeys(d["group"] for d in facts):
        say(f"\n{group}", "bold")
        for d in facts:
            if d["group"] == group:
                say(f"  {d['name']}: {d['a']} -> {d['b']}")
    if not facts:
        say("\nno difference that can explain other results or another speed")
    say("\nresults", "bold")
    for result in results:
        values = f"{result['a']} -> {result['b']}" if result["a"] else ""
        say(f"  {result['name']}: {values}{f' ({result["ratio"]})' if values and result['ratio'] else result['ratio']}")


def receipt_rows(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, value as text) of the fields that `show_receipt` prints: FIRST first, without HIDDEN fields."""
    receipt = run.receipt | {"rates": run.rates, "goodput": run.goodput}
    shown = {name: receipt[name] for name in (*FIRST, *receipt) if name in receipt and name not in HIDDEN}
    for path, value in json_items(shown):
        large = isinstance(value, float) and abs(value) >= 1000
        yield path, f"{value:,.0f}" if large else f"{value:.6g}" if isinstance(value, float) else str(value)


def show_receipt(run: RunRecord, console: Console) -> None:
    """Print the receipt of a run, and a table with a row for each of its attempts."""
    fields = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for path, value in receipt_rows(run):
        fields.add_row(escape(path), escape(value))
    names = ("attempt", "started", "ended", "resumed_from_step", "exit_code", "reason")
    attempts = Table(*(name.replace("_", " ") for name in names), "changed", box=None, padding=(0, 2, 0, 0))
    for attempt in run.attempts:
        changed = ", ".join(f"{name}: {_text(was)} -> {_text(now)}" for name, (was, now) in attempt.get("changed", {}).items())
        attempts.add_row(*("-" if attempt.get(name) is None else escape(str(attempt[name])) for name in names), escape(changed))
    console.print(fields, "", attempts, highlight=False)


def find_runs(targets: Sequence[str]) -> list[Path]:
    """Return the targets that are runs, and the runs in the other targets, by name. Raises ReceiptError if there are none."""
    out: list[Path] = []
    for path in (Path(target).expanduser() for target in targets):
        is_run = path.is_file() or (path / NAME).exists()
        inside = [path] if is_run else sorted(file.parent for file in path.glob(f"*/{NAME}"))
        if not inside:
            raise ReceiptError(f"{path}: no {NAME} in this folder or in one below it. {FIX}")
        out += inside
    return out


def show_list(paths: Sequence[Path], console: Console) -> bool:
    """Print a table with a row for each run, or its error. Return whether the receipt of a run could be read."""
    measured = ("tokens_per_s_per_device", "mfu_causal", "goodput")
    table = Table("run", "attempts", "end", "step", "loss", "tok/s/device", "MFU", "goodput", box=None, padding=(0, 2, 0, 0))
    readable = False
    for path in paths:
        try:
            run = open_run(path)
            values, losses = run.rates | (run.goodput or {}), run.losses
        except ReceiptError as error:
            table.add_row(escape(path.name), "", escape(str(error)))
            continue
        readable = True
        last = max(losses, default=None)
        cells = ["-", "-"] if last is None else [str(last), f"{losses[last]:.4f}"]
        cells += ["-" if values.get(name) is None else f"{values[name]:{FORMATS[name]}}" for name in measured]
        table.add_row(escape(run.name), str(len(run.attempts)), escape(run.end), *cells)
    console.print(table, highlight=False)
    return readable
