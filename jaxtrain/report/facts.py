"""What a run was, from its receipt: the facts that a reader asks for first, its attempts, its GPUs, and what differs."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jaxtrain import receipt
from jaxtrain.page.kit import Column, table
from jaxtrain.plan.numbers import column, number, percent, size
from jaxtrain.report.run import MEANING, Run

SHORT = 12  # characters of a hash


def facts(run: Run) -> list[tuple[str, str]]:
    """(what, as it was) of the newest attempt; what its receipt does not hold is left out."""
    r = run.receipt
    source = r.get("source") or r.get("git") or {}
    devices, planned, measured = (r.get(name) or {} for name in ("devices", "planned", "measured"))
    env = r.get("env") or {}
    split = [f"{axis}={n}" for axis, n in (r.get("mesh") or {}).items() if n > 1] or ["one device"]
    found = [
        ("command", r.get("command")),
        ("config", r.get("config")),
        ("changed", _pairs(r.get("overrides"))),
        ("commit", _commit(source)),
        ("devices", f"{devices['count']} x {', '.join(devices['kind'])}" if devices else None),
        ("processes", devices.get("process_count")),
        ("mesh", " ".join(split) if devices else None),
        ("attention", r.get("attention")),
        ("data", _data(r.get("data"), r.get("synthetic"))),
        ("versions", _pairs(r.get("versions"), " ", ", ")),
        ("packages", _pairs(r.get("packages"), " ", ", ")),
        ("environment, set", _pairs(env.get("set"))),
        ("environment, inherited", _pairs(env.get("inherited"))),
        ("environment", _pairs(None if env else r.get("environment"))),
        ("host", (r.get("host") or {}).get("name")),
        ("preflight", _preflight(r.get("preflight"))),
        ("compiled in", f"{r['compile_s']:.1f} s" if r.get("compile_s") else None),
        ("step, planned", f"{planned['step_s']:.4g} s" if planned.get("step_s") else None),
        ("step, measured", f"{measured['step_s']:.4g} s" if measured.get("step_s") else None),
        ("peak memory, planned", size(planned["peak_gib"]) if planned.get("peak_gib") else None),
        ("peak memory, measured", size(measured["peak_gib"]) if measured.get("peak_gib") else None),
        ("receipt", r.get("id")),
    ]
    return [(name, str(value)) for name, value in found if value not in (None, "")]


def _pairs(found: Mapping[str, Any] | None, between: str = "=", after: str = "  ") -> str:
    return after.join(
        f"{name}{between}{value}" for name, value in (found or {}).items() if isinstance(value, str | int | float)
    )


def _commit(source: Mapping[str, Any]) -> str | None:
    if source.get("error"):
        return f"not known: {source['error']}"
    if not source.get("commit"):
        return None
    return source["commit"][:SHORT] + (", with changes that are not committed" if source.get("dirty") else "")


def _data(fingerprint: Any, synthetic: bool | None) -> str | None:
    if synthetic:
        return "made-up tokens"
    text = fingerprint if isinstance(fingerprint, str) else json.dumps(fingerprint)
    return None if fingerprint is None else text if len(text) <= 200 else text[:200] + " ..."


def _preflight(found: Mapping[str, Any] | None) -> str | None:
    if not found:
        return None
    nodes = found.get("nodes") or []
    faults = [f"{c['name']}: {c['seen']}" for node in nodes for c in node.get("checks", ()) if c.get("state") == "FAULT"]
    return "; ".join([str(found.get("verdict")), *faults])


def attempts(run: Run) -> str:
    """The attempts of a run as a table; "" where there was one."""
    r = run.receipt
    every = receipt.attempts(r) if r else []
    if len(every) < 2:
        return ""
    codes = [a.get("exit_code") for a in every]
    ends = [_ending(a, alive=run.alive and a is every[-1]) for a in every]
    resumed = [a.get("resumed_from_step") for a in every]
    columns = [
        Column("attempt", [str(i) for i in range(1, len(every) + 1)]),
        Column("began", [when(a.get("started")) for a in every], kind="whole"),
        Column("ended", [when(a.get("ended")) for a in every], kind="whole"),
        Column("from step", ["0" if step is None else f"{step:,}" for step in resumed], [step or 0 for step in resumed]),
        Column("exit code", ["-" if code is None else str(code) for code in codes], [-1 if c is None else c for c in codes]),
        Column("how it ended", ends),
    ]
    return table("Attempts", columns)


def _ending(attempt: Mapping[str, Any], alive: bool) -> str:
    if attempt.get("ended") is None:
        return "running" if alive else "killed: no end was written"
    code = attempt.get("exit_code")
    return str(attempt.get("reason")) + (f" ({MEANING[code]})" if code in MEANING else "")


def when(text: str | None) -> str:
    """A time of a receipt, to the second."""
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S") if text else "-"


def gpu_table(run: Run) -> str:
    """Each GPU at its newest sample, and what was ever wrong with it."""
    newest = {(line["process"], line["gpu"]): line for line in run.gpu}
    if not newest:
        return ""
    lines = [newest[key] for key in sorted(newest)]
    several = len({line["process"] for line in lines}) > 1
    columns = [Column("GPU", [f"{line['process']}.{line['gpu']}" if several else str(line["gpu"]) for line in lines])]

    def numbers(heading: str, key: str, scale: float = 1.0, cells: Sequence[str] | None = None) -> None:
        values = [line.get(key) for line in lines]
        if any(v is not None for v in values):
            scaled = [(v or 0.0) * scale for v in values]
            texts = cells or [c if v is not None else "-" for c, v in zip(column(scaled), values, strict=True)]
            columns.append(Column(heading, texts, scaled))

    numbers("used %", "utilization", 100)
    numbers("W", "power_w", cells=[f"{number(x.get('power_w'), 0)} of {number(x.get('power_limit_w'), 0)}" for x in lines])
    numbers("°C", "temperature_c")
    numbers("SM MHz", "sm_clock_mhz")
    numbers("memory MHz", "memory_clock_mhz")
    numbers("used GiB", "memory_used_gib")
    numbers("pool GiB", "pool_gib")
    numbers("in use GiB", "in_use_gib")
    numbers("largest free GiB", "largest_free_gib")
    numbers("NVLink sent GB/s", "nvlink_tx_gb_s")
    numbers("received GB/s", "nvlink_rx_gb_s")
    numbers("ECC uncorrected", "ecc_uncorrected")
    mine = [[x for x in run.gpu if (x["process"], x["gpu"]) == key] for key in sorted(newest)]
    shares = [[x["throttled"] for x in of if x.get("throttled") is not None] for of in mine]
    if any(shares):
        mean = [sum(s) / len(s) if s else 0.0 for s in shares]
        why = ["+".join(dict.fromkeys(r for x in of for r in (x.get("throttle_reasons") or "").split("+") if r)) for of in mine]
        columns.append(Column("throttled, of the run", [percent(m) for m in mean], mean))
        columns.append(Column("for", why))
    return table(f"Each GPU at step {lines[-1]['step']:,}", columns, "sortable")


def fact_table(run: Run) -> str:
    """The facts as a table."""
    rows = facts(run)
    columns = [Column("what", [a for a, _ in rows], kind="whole"), Column("as it was", [b for _, b in rows], kind="path")]
    return table("The newest attempt, by receipt.json", columns)
