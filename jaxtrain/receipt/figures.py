"""What a run reached, from its lines of metrics: the figures that a receipt ends with. Pure: lines and facts in, figures out.

Every figure says what it was taken over. What was not measured is None, and `why` says why.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LEFT_OUT = 0.2  # of the timed lines, at the start: clocks, caches and the data's own start settle
ENOUGH = 5  # lines in the window; a percentile of fewer is a guess
RATES = ("tokens_per_s", "tokens_per_s_per_device", "tflops_per_device", "mfu_causal", "mfu_full", "hfu")
FORMULA = {
    "tokens_per_s_per_device": "tokens of a global batch, padding included, over step time and number of devices",
    "tflops_per_device": "tokens_per_s_per_device x model FLOPs a token (causal), forward and backward, nothing counted twice",
    "mfu_causal": "the same over the peak; of the attention square the half that a causal mask leaves (Megatron-LM, MaxText)",
    "mfu_full": "as mfu_causal, with the whole attention square (torchtitan, PaLM)",
    "hfu": "as mfu_causal, with what rematerialisation computes again",
}

Line = Mapping[str, Any]


def of_run(lines: Sequence[Line], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one attempt. lines: of metrics.jsonl, all kinds. facts: the receipt of the attempt."""
    since = facts.get("resumed_from_step") or 0
    mine = [line for line in lines if line["step"] > since]
    found = speed(mine)
    out: dict[str, Any] = {"speed": found, "memory": memory(mine, facts.get("memory_gib") or {}), "loss_at": loss_at(lines)}
    out["throttled"] = throttled(mine)
    if planned := facts.get("planned"):
        out["measured_over_planned"] = {
            "step_s": _ratio((found["step_time_s"] or {}).get("median"), planned.get("step_s")),
            "peak_gib": _ratio(out["memory"]["peak_gib"], planned.get("peak_gib")),
        }
    return out


def speed(lines: Iterable[Line]) -> dict[str, Any]:
    """Step time in seconds and rates, over a stated window of the train lines.

    A line's step time is the mean over the steps since the line before, so the percentiles are those of lines. The peak is
    the one that the lines were made with.
    """
    timed = [line for line in lines if line["kind"] == "train" and line.get("step_time_s") is not None]
    left_out = math.ceil(LEFT_OUT * len(timed))
    window = timed[left_out:]
    nothing = {"step_time_s": None, **dict.fromkeys(RATES), "peak_tflops": None, "window": None}
    if len(window) < ENOUGH:
        rest = f"{len(window)} train lines with a step time are left after the first {LEFT_OUT:.0%}, and {ENOUGH} are needed"
        return nothing | {"why": rest}
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
            "rule": f"train lines of this attempt that have a step time, without the first {LEFT_OUT:.0%} of them",
        },
        "formula": FORMULA,
    }


def memory(lines: Iterable[Line], compiled: Mapping[str, float]) -> dict[str, float | None]:
    """GiB of the fullest device: the peak, what is in use between steps (median), the pool that the driver gave, and the peak
    that the compiler told of. None where nobody told."""
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
    """The GPUs of process 0 whose clocks were held down, in which share of the time, and why; none where nobody watched."""
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
    """Training loss, every digit of it, at steps 1, 2, 5, 10, 20, 50, ... where there is a line, and at the last one. What JSON
    cannot write is a word: nan, inf, -inf."""
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "train" and line.get("loss") is not None}
    last = max(losses, default=0)
    wanted = [digit * 10**power for power in range(len(str(last))) for digit in (1, 2, 5)]
    steps = [step for step in wanted if step in losses and step < last] + [last] * bool(losses)
    return {str(step): losses[step] if math.isfinite(losses[step]) else str(losses[step]) for step in steps}


def saves(done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the saves of an attempt that reached the disk. done: `checkpoint.Saved` as dicts."""
    rates = [one["bytes"] / max(one["total_s"], 1e-9) / 1e9 for one in done]
    return {
        "count": len(done),
        "seconds": {"median": _median(s["total_s"] for s in done), "max": max((s["total_s"] for s in done), default=None)},
        "gb_per_s": _median(rates),
        "loop_waited_s": math.fsum(one["blocked_s"] for one in done),
        "host_gib": max((one["host_gib"] for one in done), default=None),
    }


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _ratio(measured: float | None, planned: float | None) -> float | None:
    return measured / planned if measured and planned else None
