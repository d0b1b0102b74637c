"""Whether figures of two runs can be compared, by what differs between them: is it another computation, the same one in another
order, or another machine?"""

from collections.abc import Sequence

from jaxtrain.receipt.opened import Run
from jaxtrain.receipt.result import Difference
from jaxtrain.receipt.settings import matches
from jaxtrain.resume import FUNCTION, INPUTS, LAYOUT, MACHINE, effect

# Of the hardware, what changes how fast it is and not what it computes.
CONDITION = ("GPU *: *", "preflight: *", "GPUs: power_limit_w", "GPUs: max_*", "host memory, GiB")
# Of held-out loss alone.
EVALUATED = ("eval.sequences", "data.eval_source")
HELD_OUT = "held out"  # begins the name of a difference in data that no step sees


def other_work(found: Sequence[Difference]) -> list[str]:
    """The differences by which the two compute something else."""
    return [
        f"{d.group} {d.title}"
        for d in found
        if (d.group == "config" and effect(d.name) in (INPUTS, FUNCTION))
        or (d.group == "data" and not d.name.startswith(HELD_OUT))
    ]


def rounding(found: Sequence[Difference]) -> list[str]:
    """Those by which the same is computed in another way. Other code is none: that it computes the same is what is checked."""
    return [
        f"{d.group} {d.title}"
        for d in found
        if d.group in ("versions", "environment")
        or (d.group == "hardware" and not matches(d.name, CONDITION))
        or (d.group == "config" and effect(d.name) in (MACHINE, LAYOUT))
    ]


def in_no_order(*runs: Run) -> list[str]:
    """Why two runs of one program need not have the same bits: cuDNN and NCCL add up in no fixed order, unless told to."""

    def free(run: Run) -> bool:
        told = (run.resolved or {}).get("train", {}).get("deterministic", False)
        return "gpu" in run.receipt.get("devices", {}).get("platform", ()) and not told

    return ["order of sums on GPUs, without train.deterministic"] if any(map(free, runs)) else []


def other_machine(found: Sequence[Difference]) -> list[str]:
    """Those by which times and memory, which are the newest attempt's, say nothing of the code."""
    return [f"{d.group} {d.name}" for d in found if d.group == "hardware" and not d.earlier]


def other_evaluation(found: Sequence[Difference]) -> list[str]:
    """Those by which a held-out loss is that of other data."""
    return [
        f"{d.group} {d.title}"
        for d in found
        if (d.group == "config" and d.name in EVALUATED) or (d.group == "data" and d.name.startswith(HELD_OUT))
    ]
