"""The report: a table, a line for each note, the faults with their reasons and remedies, the verdict; and the same as JSON."""

import dataclasses
import datetime
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.table
from rich.text import Text

from jaxtrain.preflight.check import FAULT, MISSING, NOTE, OK, UNKNOWN, Check

FORMAT = 1
SHORT = 120  # characters of a fault in the verdict line
WIDTH = 150  # where the output is not a terminal
FIT, FAULTY, NO_GPUS, NOT_MET = "fit", "fault", "no GPUs", "not met"
CODES = {FIT: 0, NO_GPUS: 0, FAULTY: 3, NOT_MET: 75}
ALLOWED = "allowed: "  # before what was seen, where a fault is only noted
STYLES = {OK: "green", NOTE: "yellow", FAULT: "bold red", UNKNOWN: "dim", MISSING: "bold red"}


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """What was found on one node. `gpus`: as `8 x NVIDIA H200`, "" for none; `absent`: why there are none."""

    host: str
    gpus: str
    absent: str
    checks: list[Check]
    measured: dict[str, Any]


def verdict(nodes: Sequence[NodeReport]) -> str:
    if any(check.state == FAULT for node in nodes for check in node.checks):
        return FAULTY
    if any(check.state == MISSING for node in nodes for check in node.checks):
        return NOT_MET
    return FIT if any(node.gpus for node in nodes) else NO_GPUS


def allow(nodes: Sequence[NodeReport], names: Sequence[str]) -> None:
    """Makes notes of the faults that these checks found: who owns a pod cannot change the kernel of its node."""
    for node in nodes:
        node.checks[:] = [
            dataclasses.replace(c, state=NOTE, seen=f"{ALLOWED}{c.seen}") if c.state == FAULT and c.name in names else c
            for c in node.checks
        ]


def as_json(nodes: Sequence[NodeReport], seconds: float) -> dict[str, Any]:
    found = verdict(nodes)
    return {
        "format": FORMAT,
        "verdict": found,
        "exit_code": CODES[found],
        "seconds": round(seconds, 2),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "nodes": [
            {
                "host": node.host,
                "gpus": node.gpus,
                "checks": [dataclasses.asdict(check) | {"node": check.node or node.host} for check in node.checks],
                "measured": node.measured,
            }
            for node in nodes
        ],
    }


def last_line(nodes: Sequence[NodeReport]) -> str:
    """The verdict, for people and for logs."""
    checks = [check for node in nodes for check in node.checks]
    found, states = verdict(nodes), Counter(check.state for check in checks)
    allowed = ", ".join(dict.fromkeys(check.name for check in checks if check.seen.startswith(ALLOWED)))
    with_allowed = f", allowed: {allowed}" if allowed else ""
    if found == FAULTY:
        faults = []
        for node in nodes:
            for check in (each for each in node.checks if each.state == FAULT):
                on = f" on {check.node or node.host}" if len(nodes) > 1 else ""
                faults.append(f"{check.name}{on} ({textwrap.shorten(check.seen, SHORT, placeholder=' ...')})")
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        return f"FAULT: {', '.join(faults[:3])}{more}{with_allowed}: see above"
    if found == NOT_MET:
        seen = next(textwrap.shorten(check.seen, SHORT, placeholder=" ...") for check in checks if check.state == MISSING)
        return f"not met: {seen}; this node has no fault that would stop it"
    counted = f"{len(checks)} checks"
    others = [
        f"{states[state]} {words}" for state, words in ((NOTE, "worth a look"), (UNKNOWN, "not measured")) if states[state]
    ]
    counted += f" ({', '.join(others)})" if others else ""
    if found == NO_GPUS:
        return f"no GPUs: {nodes[0].absent}; checks of GPUs left out. {counted}"
    kinds = Counter(node.gpus for node in nodes if node.gpus)
    machines = ", ".join(f"{n} nodes of {gpus}" if n > 1 else gpus for gpus, n in kinds.items())
    return f"fit{with_allowed}: {machines}, {counted}"


def rows(nodes: Sequence[NodeReport]) -> list[tuple[str, Check]]:
    """(where, check) of the table's lines: a check that came out alike on all nodes is one line."""
    out: list[tuple[str, Check]] = []
    names = list(dict.fromkeys(check.name for node in nodes for check in node.checks))
    for name in names:
        groups: dict[Check, list[str]] = {}
        for node in nodes:
            for check in node.checks:
                if check.name == name:
                    groups.setdefault(dataclasses.replace(check, node=""), []).append(check.node or node.host)
        for check, hosts in groups.items():
            out.append(("all" if len(hosts) == len(nodes) else ", ".join(hosts), check))
    return out


def show(nodes: Sequence[NodeReport], console: rich.console.Console) -> None:
    """Prints everything, the verdict last."""
    hosts = [node.host for node in nodes]
    title = f"{hosts[0]}: {nodes[0].gpus or 'no GPU'}" if len(nodes) == 1 else f"{len(nodes)} nodes: {', '.join(hosts)}"
    table = rich.table.Table(title=title, title_justify="left")
    for heading in ("check", *(["node"] if len(nodes) > 1 else []), "state", "expected", "seen"):
        table.add_column(heading, overflow="fold", ratio=2 if heading in ("expected", "seen") else None)
    lines = rows(nodes)
    for where, check in lines:
        cells = [check.name, *([where] if len(nodes) > 1 else []), check.state, check.expected, check.seen]
        table.add_row(*(Text(cell, style=STYLES[check.state] if cell == check.state else "") for cell in cells))
    console.print(table)
    named = [(f"{check.name}{f' on {where}' if len(nodes) > 1 else ''}: {check.seen}", check) for where, check in lines]
    for text, check in named:
        if check.state == NOTE:
            console.print(Text(f"{text}; {check.fix}" if check.fix else text), soft_wrap=True)
    for text, check in named:
        if check.state in (FAULT, MISSING):
            console.print(Text(f"\n{text}", style="bold"))
            console.print(Text(f"  expected: {check.expected}\n  why: {check.why}\n  fix: {check.fix}"))
    console.print(Text(last_line(nodes), style=STYLES[FAULT if verdict(nodes) in (FAULTY, NOT_MET) else OK]), soft_wrap=True)
