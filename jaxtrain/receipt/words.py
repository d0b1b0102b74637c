"""Receipts in a terminal: the parts of one, a line for each of many, what differs between two, and the verdicts of a check."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.config import flatten
from jaxtrain.receipt.golden import Verdict, passed
from jaxtrain.receipt.opened import Run, source_of
from jaxtrain.receipt.result import GROUPS, Comparison
from jaxtrain.receipt.settings import variables
from jaxtrain.receipt.things import described

NOTHING = "not measured"
MARKS = {"ok": "green", "WORSE": "red", "not compared": "yellow"}


def show(run: Run, console: Console) -> None:
    """All parts of a receipt, in the order of docs/receipts.md."""
    r = run.receipt
    console.print(f"{run.name}: attempt {r.get('attempt', 1)}, {_ended(r)}", style="bold", highlight=False, markup=False)
    for note in run.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)
    for title, rows in parts(run):
        console.print()
        console.print(title, style="bold", highlight=False, markup=False)
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(f"  {escape(name)}", escape(str(value)))
        console.print(table, highlight=False)


def parts(run: Run) -> list[tuple[str, list[tuple[str, Any]]]]:
    """(heading, rows of name and value) of each part."""
    r, figures = run.receipt, run.figures
    return [
        ("What ran", _what(run)),
        ("Versions", _versions(r)),
        ("Hardware", [*described(r).items(), *_states(r)] or [("", "not told")]),
        ("Environment", [*variables(r).items()] or [("", "nothing set that changes a run")]),
        ("Preflight", _preflight(r.get("preflight"))),
        ("Speed", _speed(figures["speed"] or {}, r.get("planned") or {}, figures.get("measured_over_planned") or {})),
        ("Memory", _memory(figures["memory"] or {}, r)),
        ("Loss", [(f"step {step}", value) for step, value in (figures["loss_at"] or {}).items()] or [("", NOTHING)]),
        ("Saves and restore", _saves(r)),
        ("Goodput", _goodput(run.goodput)),
        ("Attempts", [(str(a.get("attempt", n)), _ended(a)) for n, a in enumerate(run.attempts, 1)]),
    ]


def _ended(attempt: Mapping[str, Any]) -> str:
    if attempt.get("exit_code") is None:
        return f"started {attempt.get('started')}, no end: killed, or still running"
    return f"{attempt.get('started')} to {attempt.get('ended')}, exit code {attempt['exit_code']}: {attempt['reason']}"


def _what(run: Run) -> list[tuple[str, Any]]:
    r, source = run.receipt, source_of(run.receipt)
    state = {True: ", with changes that are not committed", False: "", None: ""}[source.get("dirty")]
    rows = [("command", r.get("command")), ("config", f"{r.get('config')}, sha256 {str(r.get('config_sha256'))[:12]}")]
    rows += [(f"  {key}", value) for key, value in (r.get("overrides") or {}).items()]
    rows.append(("commit", f"{source['commit']}{state}" if source.get("commit") else source.get("error", "not in git")))
    if source.get("files"):
        rows.append(("source", f"{len(source['files'])} files, {len(source.get('patch') or '')} characters of a patch"))
    rows += [("launch", ", ".join(f"{k}: {v}" for k, v in (r.get("launch") or {}).items()))] if r.get("launch") else []
    data = r.get("data") or {}
    rows.append(("data", data.get("source", "not told") if not r.get("synthetic") else "synthetic: made-up tokens"))
    rows += [(f"  {f['name']}", f"{f['tokens']:,} tokens, sha256 {f['content_sha256'][:12]}") for f in data.get("files", ())]
    mesh = r.get("mesh") or {}
    rows.append(("mesh", " x ".join(f"{axis}={size}" for axis, size in mesh.items()) or "not told"))
    rows.append(("attention", r.get("attention", "not told")))
    return rows


def _versions(r: Mapping[str, Any]) -> list[tuple[str, Any]]:
    below = {name: value for name, value in flatten(r.get("versions") or {}) if value is not None}
    whole = {"jaxtrain": r.get("jaxtrain"), "python": r.get("python"), **below, **(r.get("packages") or {})}
    return [(name, version) for name, version in whole.items() if version is not None]


def _states(r: Mapping[str, Any]) -> list[tuple[str, str]]:
    """GPUs at the start and at the end."""
    rows = []
    for when in ("before", "after"):
        for gpu in (r.get("hardware") or {}).get(when) or ():
            told = {"MHz": gpu["sm_clock_mhz"], "W": gpu["power_w"], "C": gpu["temperature_c"]}
            said = ", ".join(f"{value:g} {unit}" for unit, value in told.items() if value is not None)
            rows.append((f"GPU {gpu['index']} {when}", f"{said}; throttled by {gpu['throttle_reasons'] or 'nothing'}"))
    return rows


def _preflight(found: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    if not found:
        return [("", "there was none")]
    if "error" in found:
        return [("", found["error"])]
    rows: list[tuple[str, Any]] = [("verdict", f"{found['verdict']}, in {found['seconds']:.1f} s")]
    for node in found.get("nodes", ()):
        wrong = [check["name"] for check in node.get("checks", ()) if check["state"] == "FAULT"]
        rows += [(f"{node['host']}: faults", ", ".join(wrong))] if wrong else []
        rows += [(f"{node['host']}: {name}", value) for name, value in flatten(node.get("measured") or {})]
    return rows


def _speed(speed: Mapping[str, Any], planned: Mapping[str, Any], ratio: Mapping[str, Any]) -> list[tuple[str, Any]]:
    if not speed or not speed["step_time_s"]:
        return [("", f"{NOTHING}: {speed.get('why', 'no lines of metrics')}")]
    step, window = speed["step_time_s"], speed["window"]
    rows = [
        ("step time", f"median {step['median']:.4g} s, p10 {step['p10']:.4g} s, p90 {step['p90']:.4g} s"),
        ("window", f"steps {window['first_step']} to {window['last_step']}, {window['lines']} lines: {window['rule']}"),
        ("tokens/s/device", f"{speed['tokens_per_s_per_device']:,.1f}; all devices {speed['tokens_per_s']:,.1f}"),
        ("TFLOP/s/device", f"{speed['tflops_per_device']:.4g}" if speed["tflops_per_device"] else NOTHING),
    ]
    if speed["mfu_causal"]:
        shares = ", ".join(f"{name} {speed[name]:.2%}" for name in ("mfu_causal", "mfu_full", "hfu") if speed[name])
        rows.append(("utilisation", f"{shares}; of a peak of {speed['peak_tflops']:.5g} TFLOP/s"))
    if planned:
        times = f", measured over planned {ratio['step_s']:.3f}" if ratio.get("step_s") else ""
        rows.append(("planned", f"{planned['step_s']:.4g} s a step ({planned['rates']}){times}"))
    return rows + [(f"  {name}", text) for name, text in speed["formula"].items()]


def _memory(memory: Mapping[str, float | None], r: Mapping[str, Any]) -> list[tuple[str, Any]]:
    words = {"peak_gib": "peak", "in_use_gib": "in use", "pool_gib": "pool", "compiler_peak_gib": "peak, by the compiler"}
    rows = [(what, f"{memory[name]:.3f} GiB" if memory.get(name) is not None else NOTHING) for name, what in words.items()]
    return rows + [(f"  {name}", f"{gib:.3f} GiB") for name, gib in (r.get("memory_gib") or {}).items()]


def _saves(r: Mapping[str, Any]) -> list[tuple[str, Any]]:
    saves, restore = r.get("saves"), r.get("restore")
    rows: list[tuple[str, Any]] = [("saves", "none")]
    if saves:
        long = f"median {saves['seconds']['median']:.3g} s, longest {saves['seconds']['max']:.3g} s"
        waited = f"the loop waited {saves['loop_waited_s']:.3g} s in all"
        rows = [("saves", f"{saves['count']}: {long}, {saves['gb_per_s']:.3g} GB/s, {waited}")]
    if restore:
        return [*rows, ("restore", f"step {restore['step']} in {restore['seconds']:.3g} s, digests {restore['digests']}")]
    at = r.get("resumed_from_step")
    return [*rows, ("restore", "none: a new run" if at is None else f"from step {at}")]


def _goodput(found: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    if not found or found["goodput"] is None:
        return [("", NOTHING)]
    rows = [("goodput", f"{found['goodput']:.1%} of {found['wall_s']:.1f} s in {found['attempts']} attempts")]
    return rows + [(f"  {cause}", f"{seconds:.1f} s") for cause, seconds in found["parts_s"].items() if seconds]


def listed(runs: Iterable[Run | tuple[str, str]], console: Console) -> None:
    """One line a run; (name, why) for what could not be read."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("run", "attempts", "end", "step", "loss", "tok/s/device", "MFU", "goodput"):
        table.add_column(name, justify="left" if name in ("run", "end") else "right", overflow="fold")
    for run in runs:
        if isinstance(run, tuple):
            table.add_row(run[0], "", escape(run[1]), "", "", "", "", "")
            continue
        speed, goodput = run.figures["speed"] or {}, run.goodput or {}
        last = max(run.losses, default=None)
        rate, mfu, good = speed.get("tokens_per_s_per_device"), speed.get("mfu_causal"), goodput.get("goodput")
        cells = [run.name, str(len(run.attempts)), escape(run.end)]
        cells += [str(last), f"{run.losses[last]:.4f}"] if last is not None else ["-", "-"]
        cells += [f"{rate:,.0f}" if rate else "-", f"{mfu:.1%}" if mfu else "-", f"{good:.1%}" if good is not None else "-"]
        table.add_row(*cells)
    console.print(table, highlight=False)


def compared(found: Comparison, console: Console) -> None:
    """What differs, by group, and what came of it."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    say(f"A: {found.a}\nB: {found.b}")
    for group in GROUPS:
        mine = [d for d in found.differences if d.group == group]
        if not mine:
            continue
        say(f"\n{group}", "bold")
        for d in mine:
            say(f"  {d.name}: {d.a} -> {d.b}")
            for line in d.lines:
                say(f"      {line}", "red" if ": - " in line[:20] else "green")
    if found.same:
        say("\nnothing differs that can explain other results or another speed")
    say("\nwhat came of it", "bold")
    for each in found.outcomes:
        values = f": {each.a} -> {each.b}" if each.a or each.b else ""
        say(f"  {each.name}{values}{f' ({each.said})' if values and each.said else f': {each.said}' if each.said else ''}")
    for note in found.notes:
        say(f"note: {note}", "yellow")


def judged(verdicts: Sequence[Verdict], name: str, golden: str, console: Console) -> None:
    """The verdicts of a check, and one line at the end."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("check", "verdict", golden, name, "rule"):
        table.add_column(escape(column), overflow="fold")
    for v in verdicts:
        mark = f"[{MARKS[v.state]}]{v.state}[/]"
        table.add_row(escape(v.name), mark, escape(v.golden), escape(v.run), escape(v.rule))
    console.print(table, highlight=False)
    worse = [v.name for v in verdicts if v.state == "WORSE"]
    if passed(verdicts):
        end = "as the golden run"
    else:
        end = f"WORSE: {', '.join(worse)}" if worse else "not proved: the losses could not be compared"
    console.print(f"{name}: {end}", style="bold", highlight=False, markup=False)
