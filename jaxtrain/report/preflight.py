"""The report: a table, a line for each note, faults with reasons and fixes, and the verdict; or all of these as JSON."""

import dataclasses
import datetime
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

import rich.table
from rich.text import Text

from jaxtrain.config.command_line import make_console

FORMAT = 1
MAX_CHARACTERS = 120  # of a fault's text in the verdict line
WIDTH = 150  # columns, if the output is not a terminal
OK, NOTE, FAULT, UNKNOWN = "ok", "note", "FAULT", "not measured"
MISSING = "missing"  # a process of the run is absent or lost; no fault is known, and a retry may help
FIT, FAULTY, NO_GPUS, NOT_CONNECTED = "fit", "fault", "no GPUs", "not met"
EXIT_CODES = {FIT: 0, NO_GPUS: 0, FAULTY: 3, NOT_CONNECTED: 75}
ALLOWED = "allowed: "  # prefix of a fault that --allow changes to a note
STYLES = {OK: "green", NOTE: "yellow", FAULT: "bold red", UNKNOWN: "dim", MISSING: "bold red"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report: the verdict of a check, with its texts."""

    name: str
    state: str
    expected: str
    seen: str
    why: str = ""
    fix: str = ""
    node: str = ""


@dataclasses.dataclass
class NodeReport:
    """The findings on one node."""

    host: str
    gpus: str  # number and model, such as `8 x NVIDIA H200`; "" without GPUs
    absent: str  # reason why there are no GPUs
    findings: list[Finding]
    measured: dict[str, Any]


def verdict(nodes: Sequence[NodeReport]) -> str:
    if any(finding.state == FAULT for node in nodes for finding in node.findings):
        return FAULTY
    if is_incomplete(nodes):
        return NOT_CONNECTED
    return FIT if any(node.gpus for node in nodes) else NO_GPUS


def exit_code(nodes: Sequence[NodeReport]) -> int:
    return EXIT_CODES[verdict(nodes)]


def is_incomplete(nodes: Sequence[NodeReport]) -> bool:
    """Return whether a process did not connect or was lost. If so, `nodes` has only this node."""
    return any(finding.state == MISSING for node in nodes for finding in node.findings)


def allow(nodes: Sequence[NodeReport], names: Sequence[str]) -> None:
    """Change the faults of these checks to notes, since a user cannot fix some faults, such as a node's kernel settings."""
    for node in nodes:
        node.findings = [
            dataclasses.replace(f, state=NOTE, seen=f"{ALLOWED}{f.seen}") if f.state == FAULT and f.name in names else f
            for f in node.findings
        ]


def as_json(nodes: Sequence[NodeReport], seconds: float) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "verdict": verdict(nodes),
        "exit_code": exit_code(nodes),
        "seconds": round(seconds, 2),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "nodes": [
            {
                "host": node.host,
                "gpus": node.gpus,
                "checks": [dataclasses.asdict(f) | {"node": f.node or node.host} for f in node.findings],
                "measured": node.measured,
            }
            for node in nodes
        ],
    }


def shorten(text: str) -> str:
    return textwrap.shorten(text, MAX_CHARACTERS, placeholder=" ...")


def last_line(nodes: Sequence[NodeReport]) -> str:
    """Return the verdict in one line."""
    findings = [(node, finding) for node in nodes for finding in node.findings]
    states = Counter(finding.state for _, finding in findings)
    allowed = ", ".join(dict.fromkeys(finding.name for _, finding in findings if finding.seen.startswith(ALLOWED)))
    allowed = f", allowed: {allowed}" if allowed else ""
    result = verdict(nodes)
    if result == FAULTY:
        faults = [
            f"{f.name}{f' on {f.node or node.host}' if len(nodes) > 1 else ''} ({shorten(f.seen)})"
            for node, f in findings
            if f.state == FAULT
        ]
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        return f"FAULT: {', '.join(faults[:3])}{more}{allowed}: see above"
    if result == NOT_CONNECTED:
        seen = next(f.seen for _, f in findings if f.state == MISSING)
        return f"not met: {shorten(seen)}; this node has no fault that would stop it"
    notes = [f"{states[state]} {text}" for state, text in ((NOTE, "worth a look"), (UNKNOWN, "not measured")) if states[state]]
    count = f"{len(findings)} checks" + (f" ({', '.join(notes)})" if notes else "")
    if result == NO_GPUS:
        return f"no GPUs: {nodes[0].absent}; checks of GPUs left out. {count}"
    kinds = Counter(node.gpus for node in nodes if node.gpus)
    return f"fit{allowed}: {', '.join(f'{n} nodes of {gpus}' if n > 1 else gpus for gpus, n in kinds.items())}, {count}"


def table_lines(nodes: Sequence[NodeReport]) -> list[tuple[str, Finding]]:
    """Return (nodes, finding) for each line of the table. Equal findings on several nodes share a line."""
    by_name: dict[str, dict[Finding, list[str]]] = {}
    for node in nodes:
        for finding in node.findings:
            groups = by_name.setdefault(finding.name, {})
            groups.setdefault(dataclasses.replace(finding, node=""), []).append(finding.node or node.host)
    return [
        ("all" if len(hosts) == len(nodes) else ", ".join(hosts), finding)
        for groups in by_name.values()
        for finding, hosts in groups.items()
    ]


def show_report(nodes: Sequence[NodeReport]) -> None:
    """Print the report, the verdict last."""
    console = make_console(WIDTH)
    several, hosts = len(nodes) > 1, [node.host for node in nodes]
    title = f"{len(nodes)} nodes: {', '.join(hosts)}" if several else f"{hosts[0]}: {nodes[0].gpus or 'no GPU'}"
    table = rich.table.Table(title=title, title_justify="left")
    for heading in ("check", *(["node"] * several), "state", "expected", "seen"):
        table.add_column(heading, overflow="fold", ratio=2 if heading in ("expected", "seen") else None)
    rows = table_lines(nodes)
    for node_names, f in rows:
        table.add_row(f.name, *([node_names] * several), Text(f.state, style=STYLES[f.state]), Text(f.expected), Text(f.seen))
    console.print(table)
    texts = [(f"{f.name}{f' on {node_names}' if several else ''}: {f.seen}", f) for node_names, f in rows]
    for text, f in texts:
        if f.state == NOTE:
            console.print(Text(f"{text}; {f.fix}" if f.fix else text), soft_wrap=True)
    for text, f in texts:
        if f.state in (FAULT, MISSING):
            console.print(Text(f"\n{text}", style="bold"))
            console.print(Text(f"  expected: {f.expected}\n  why: {f.why}\n  fix: {f.fix}"))
    console.print(Text(last_line(nodes), style=STYLES[FAULT if exit_code(nodes) else OK]), soft_wrap=True)
