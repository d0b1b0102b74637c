"""Figures of a run, computed from its metrics.jsonl. A figure that was not measured is None."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NAMES = ("speed", "memory", "throttled", "loss_at", "measured_over_planned")
LEFT_OUT = 0.2  # fraction of the timed lines that is left out at the start, while clocks, caches and input pipeline settle
ENOUGH = 5  # least lines in the window, since percentiles need some lines
RATES = ("tokens_per_s", "tokens_per_s_per_device", "tflops_per_device", "mfu_causal", "mfu_full", "hfu")

Line = Mapping[str, Any]


def of_run(lines: Sequence[Line], receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the newest attempt, and the losses of the whole run.

    Args:
      lines: lines of metrics.jsonl, of all kinds.
      receipt: the receipt, whose top level describes this attempt.
    """
    since = receipt.get("resumed_from_step") or 0
    mine = [line for line in lines if line["step"] > since]
    found = {"speed": speed(mine), "memory": memory(mine, receipt.get("memory_gib") or {}), "throttled": throttled(mine)}
    out: dict[str, Any] = found | {"loss_at": loss_at(lines)}
    if planned := receipt.get("planned"):
        out["measured_over_planned"] = {
            "step_s": _ratio((found["speed"]["step_time_s"] or {}).get("median"), planned.get("step_s")),
            "peak_gib": _ratio(found["memory"]["peak_gib"], planned.get("peak_gib")),
        }
    return out


def speed(lines: Iterable[Line]) -> dict[str, Any]:
    """Return step time in seconds and rates (medians), over the train lines of the returned `window`.

    A line's step time is the mean over the steps since the previous line, so percentiles are over lines, not steps.
    `peak_tflops` is the device's peak from which the MFU of these lines was computed.
    """
    timed = [line for line in lines if line["kind"] == "train" and line.get("step_time_s") is not None]
    left_out = math.ceil(LEFT_OUT * len(timed))
    window = timed[left_out:]
    if len(window) < ENOUGH:
        why = f"{len(window)} train lines with a step time are left after the first {LEFT_OUT:.0%}, and {ENOUGH} are needed"
        return {"step_time_s": None, **dict.fromkeys(RATES), "peak_tflops": None, "window": None, "why": why}
    times = sorted(line["step_time_s"] for line in window)
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    rates = {name: _median(line.get(name) for line in window) for name in RATES}
    used, reached = rates["tflops_per_device"], rates["mfu_causal"]
    return {
        "step_time_s": {"median": statistics.median(times), "p10": tenths[0], "p90": tenths[-1]},
        **rates,
        "peak_tflops": used / reached if used and reached else None,
        "window": {
            "first_step": window[0]["step"],
            "last_step": window[-1]["step"],
            "lines": len(window),
            "left_out": left_out,
        },
    }


def memory(lines: Iterable[Line], compiled: Mapping[str, float]) -> dict[str, float | None]:
    """Return memory figures of one device in GiB. compiled: the receipt's `memory_gib`, from XLA's memory analysis."""
    lines = list(lines)
    train = [line for line in lines if line["kind"] == "train"]
    pools = [line.get("pool_gib") for line in lines if line["kind"] == "gpu"]
    return {
        "peak_gib": max(filter(None, (line.get("peak_memory_gib") for line in train)), default=None),
        "in_use_gib": _median(line.get("memory_gib") for line in train),
        "pool_gib": max(filter(None, pools), default=None),
        "compiler_peak_gib": compiled.get("peak"),
    }


def throttled(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return the throttled GPUs of process 0, each with the fraction of samples in which it was throttled, and the reasons."""
    found: dict[int, list[Line]] = {}
    for line in lines:
        if line["kind"] == "gpu" and line.get("throttled") is not None:
            found.setdefault(line["gpu"], []).append(line)
    out = []
    for gpu, mine in sorted(found.items()):
        reasons = dict.fromkeys(why for line in mine for why in (line.get("throttle_reasons") or "").split("+") if why)
        share = statistics.fmean(line["throttled"] for line in mine)
        out += [{"gpu": gpu, "share": share, "reasons": "+".join(reasons)}] if share else []
    return out


def loss_at(lines: Iterable[Line]) -> dict[str, float | str]:
    """Return step -> training loss with all digits, at steps 1, 2, 5, 10, 20, 50, ... and the last step.

    NaN and infinities are text, since JSON has no number for them.
    """
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "train" and line.get("loss") is not None}
    last = max(losses, default=0)
    wanted = [digit * 10**power for power in range(len(str(last))) for digit in (1, 2, 5)]
    steps = [step for step in wanted if step in losses and step < last] + [last] * bool(losses)
    return {str(step): losses[step] if math.isfinite(losses[step]) else str(losses[step]) for step in steps}


def saves(done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return figures of an attempt's saves: count, seconds, GB/s, seconds that the loop waited, and peak host memory.

    Args:
      done: the completed saves, each a `checkpoint.Saved` as a dict.
    """
    return {
        "count": len(done),
        "seconds": {"median": _median(s["total_s"] for s in done), "max": max((s["total_s"] for s in done), default=None)},
        "gb_per_s": _median(s["bytes"] / max(s["total_s"], 1e-9) / 1e9 for s in done),
        "loop_waited_s": math.fsum(s["blocked_s"] for s in done),
        "host_gib": max((s["host_gib"] for s in done), default=None),
    }


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _ratio(measured: float | None, planned: float | None) -> float | None:
    return measured / planned if measured and planned else None
