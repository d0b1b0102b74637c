"""What came of what differs between two runs: the first step with another loss, how much faster, how much more memory."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.receipt.opened import Run
from jaxtrain.receipt.result import Outcome, shown

# Chosen from config, hardware and versions, and so no reasons themselves.
CHOSEN = {
    "attention": "attention kernel",
    "remat": "what the backward pass finds kept",
    "compiler_options": "XLA options",
    "mesh": "mesh",
}


def outcomes(a: Run, b: Run) -> tuple[Outcome, ...]:
    """Of A and B. What neither measured is left out; what one of them did not is said."""
    out = [Outcome("end", a.end, b.end)] if a.end != b.end else []
    out.append(loss(a, b))
    speeds = [run.figures["speed"] or {} for run in (a, b)]
    memories = [run.figures["memory"] or {} for run in (a, b)]
    times = [(one.get("step_time_s") or {}).get("median") for one in speeds]
    out += _measured("step time, median", times, "s")
    out += _measured("tokens/s/device", [one.get("tokens_per_s_per_device") for one in speeds], "")
    out += _measured("MFU, causal", [one.get("mfu_causal") for one in speeds], "")
    out += _measured("peak memory", [one.get("peak_gib") for one in memories], "GiB")
    for name, words in CHOSEN.items():
        one, other = a.receipt.get(name), b.receipt.get(name)
        if one != other and one is not None and other is not None:
            out.append(Outcome(words, shown(one), shown(other)))
    return tuple(out)


def first_difference(a: Mapping[int, Any], b: Mapping[int, Any]) -> tuple[list[int], int | None]:
    """(steps that both have, the first of them whose losses are not the same, bit for bit)."""
    both = sorted(set(a) & set(b))
    return both, next((step for step in both if repr(a[step]) != repr(b[step])), None)  # repr: nan is nan


def loss(a: Run, b: Run) -> Outcome:
    """Where the losses part."""
    both, first = first_difference(a.losses, b.losses)
    if not both:
        return Outcome("loss", "", "", "no step whose loss both have")
    if first is None:
        many = f"{len(both)} steps" if len(both) > 1 else "step"
        return Outcome("loss", "", "", f"the same, bit for bit, at the {many} that both have, to step {both[-1]}")
    before = [step for step in both if step < first]
    since = f"from step {first} on; the same to step {before[-1]}" if before else f"at step {first}, the first that both have"
    return Outcome("loss", shown(a.losses[first]), shown(b.losses[first]), f"differs {since}")


def _number(value: float, unit: str) -> str:
    return (f"{value:,.0f}" if value >= 1000 else f"{value:.4g}") + (f" {unit}" if unit else "")


def _measured(name: str, values: list[float | None], unit: str) -> list[Outcome]:
    if values[0] is None and values[1] is None:
        return []
    said = [_number(value, unit) if value is not None else "not measured" for value in values]
    ratio = f"{values[1] / values[0]:.3f} times" if values[0] and values[1] is not None else ""
    return [Outcome(name, said[0], said[1], ratio)]
