"""What a run was, as tables: its attempts and the newest one by its receipt, and its GPUs by their lines of metrics."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jaxtrain.page.kit import Column, table
from jaxtrain.page.numbers import column, number, percent
from jaxtrain.receipt.print import rows
from jaxtrain.report.run import MEANING, Run

ELSEWHERE = ("loss_at.", "goodput.")  # fields that have a section of their own on the page


def newest(run: Run) -> str:
    """Return the receipt of the newest attempt as a table."""
    shown = [row for row in rows(run.opened) if not row[0].startswith(ELSEWHERE)]
    fields, values = (list(cells) for cells in zip(*shown, strict=True))
    columns = [Column("field", fields, kind="whole"), Column("value", values, kind="path")]
    return table("The newest attempt, by receipt.json", columns)


def attempts(run: Run) -> str:
    """The attempts of a run as a table; "" where there was one."""
    every = run.opened.attempts if run.receipt else []
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
    every: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in run.gpu:
        every.setdefault((line["process"], line["gpu"]), []).append(line)
    if not every:
        return ""
    lines = [every[key][-1] for key in sorted(every)]
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
    mine = [every[key] for key in sorted(every)]
    shares = [[x["throttled"] for x in of if x.get("throttled") is not None] for of in mine]
    if any(shares):
        mean = [sum(s) / len(s) if s else 0.0 for s in shares]
        why = ["+".join(dict.fromkeys(r for x in of for r in (x.get("throttle_reasons") or "").split("+") if r)) for of in mine]
        columns.append(Column("throttled, of the run", [percent(m) for m in mean], mean))
        columns.append(Column("for", why))
    return table(f"Each GPU at step {lines[-1]['step']:,}", columns, "sortable")
