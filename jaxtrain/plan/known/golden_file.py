"""What is kept of a plan in a golden file: its figures, rounded, and the lines of Python that they come from."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.page.numbers import GB_PER_GIB
from jaxtrain.plan.result import Plan

FORMAT = 1
WRITE = "./run.sh plan --golden=write"
# How far a figure may move, as a part of itself; the exposed share in parts of the step. The scheduler may order instructions
# anew; what is moved and computed stays. Launches and trips are exact. Below `least_gb` a step a collective is bookkeeping.
MARGINS = {"peak": 0.01, "wire": 0.01, "tflop": 0.01, "step": 0.02, "exposed_share": 0.01, "least_gb": 0.001}


class GoldenError(ValueError):
    """A golden plan that is not there, cannot be read, or does not apply."""


@dataclasses.dataclass(frozen=True)
class Moved:
    """All collectives of one kind, dtype and axis, over a step."""

    kind: str
    dtype: str
    axis: str
    launches: int
    wire_gb: float  # what each GPU sends
    lines: dict[str, tuple[int, float]]  # file:line -> (launches, GB)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.dtype} over {self.axis}"


@dataclasses.dataclass(frozen=True)
class Golden:
    """What is kept of a plan."""

    config: str
    overrides: tuple[str, ...]
    topology: str
    chip: str
    jaxlib: str
    margins: dict[str, float]
    peak_gib: float
    classes_gib: dict[str, float]  # at the peak
    saved_gib: dict[str, float]  # activations by name
    tflop: float  # one GPU's in a step
    work_tflop: dict[str, float]  # by pass and scope
    step_ms: float
    exposed_share: float  # of the step: waiting for collectives
    loops: dict[str, tuple[int, ...]]  # trips of the loops of one name, sorted: the compiler peels and unrolls them
    collectives: tuple[Moved, ...]
    warnings: tuple[str, ...]
    format: int = FORMAT


def from_plan(plan: Plan) -> Golden:
    """What a golden plan keeps, rounded."""
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for c in plan.collectives:
        # Several combined into one launch come in any order.
        groups.setdefault((c.kind, "+".join(sorted(c.dtype.split("+"))), c.axis), []).append(c)
    moved = []
    for (kind, dtype, axis), group in sorted(groups.items()):
        lines: dict[str, tuple[int, float]] = {}
        for c in sorted(group, key=lambda c: c.source or c.op_name):
            count, gb = lines.get(c.source or c.op_name, (0, 0.0))
            lines[c.source or c.op_name] = count + c.count, gb + c.wire_gib * GB_PER_GIB
        lines = {line: (count, round(gb, 4)) for line, (count, gb) in lines.items()}
        wire_gb = round(math.fsum(c.wire_gib for c in group) * GB_PER_GIB, 4)
        moved.append(Moved(kind, dtype, axis, sum(c.count for c in group), wire_gb, lines))
    work: dict[str, float] = {}
    for k in plan.kernels:
        work[k.op_name] = work.get(k.op_name, 0.0) + k.tflop
    loops: dict[str, list[int]] = {}
    for name, trips in plan.trip_counts.items():
        loops.setdefault(re.sub(r"\.\d+$| \(\d+\)$", "", name), []).append(trips)
    return Golden(
        config=plan.config,
        overrides=plan.overrides,
        topology=plan.topology,
        chip=plan.chip,
        jaxlib=plan.versions["jaxlib"],
        margins=dict(MARGINS),
        peak_gib=round(plan.memory.peak_gib, 3),
        classes_gib=_rounded(plan.memory.by_class),
        saved_gib=_rounded(plan.memory.saved),
        tflop=round(plan.flops.hardware_per_step / 1e12, 3),
        work_tflop=_rounded(work),
        step_ms=round(plan.time.step_ms, 2),
        exposed_share=round(plan.time.exposed_ms / plan.time.step_ms, 4),
        loops={name: tuple(sorted(trips, reverse=True)) for name, trips in sorted(loops.items())},
        collectives=tuple(moved),
        warnings=plan.warnings,
    )


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(v, 3) for name, v in sorted(values.items()) if round(v, 3)}


def save(golden: Golden, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dataclasses.asdict(golden), indent=1) + "\n", encoding="utf-8")


def load(file: Path) -> Golden:
    """A golden plan from its file. Raises GoldenError where there is none that can be read."""
    if not file.is_file():
        raise GoldenError(f"{file}: no golden plan. Write it with: {WRITE}")
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree.get("format") != FORMAT:
            raise ValueError(f"it is of format {tree.get('format')!r}, not {FORMAT}")
        if set(tree["margins"]) != set(MARGINS):
            raise ValueError(f"its margins are {', '.join(tree['margins'])}, not {', '.join(MARGINS)}")
        moved = []
        for c in tree["collectives"]:
            moved.append(Moved(**{**c, "lines": {line: (int(n), float(gb)) for line, (n, gb) in c["lines"].items()}}))
        plain = {
            "overrides": tuple(tree["overrides"]),
            "loops": {name: tuple(trips) for name, trips in tree["loops"].items()},
            "collectives": tuple(moved),
            "warnings": tuple(tree["warnings"]),
        }
        return Golden(**{**tree, **plain})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GoldenError(f"{file}: not a golden plan ({error}). Write it again with: {WRITE}") from error


def inapplicable(golden: Golden, jaxlib: str) -> str:
    """Why a golden plan says nothing about plans made with this jaxlib; empty where it does apply."""
    if golden.jaxlib == jaxlib:
        return ""
    return (
        f"the golden plan of {golden.config} was made with jaxlib {golden.jaxlib}, and this is {jaxlib}: another compiler's "
        f"program is another program. Write it again with: {WRITE}"
    )
