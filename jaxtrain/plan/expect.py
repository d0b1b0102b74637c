"""Plan the time and memory of a run's compiled step, and warn if the run's measurements differ from the plan.

The run's receipt has the planned and the measured figures.
"""

import dataclasses
import statistics
from typing import Any

from jaxtrain.config import hardware
from jaxtrain.config.commands import to_run_sh
from jaxtrain.plan.program import collectives, hlo, roofline
from jaxtrain.plan.rates import PUBLISHED, expected_ms, rates_for, run_kind
from jaxtrain.step.auto_remat import expert_fill
from jaxtrain.step.memory import taken_gib
from jaxtrain.step.program import Program

APART = 0.15  # largest relative difference from a calibrated plan without a warning
FIRST = 2  # first lines of metrics, which are left out while clocks and caches settle
ENOUGH = 8  # following lines, whose median is compared


@dataclasses.dataclass(frozen=True)
class Expected:
    """Planned time and memory of a compiled step."""

    step_s: float
    peak_gib: float
    rates: str  # the source of the rates
    range_s: tuple[float, float] | None = None  # by published runs of the same kind, at published kernel rates

    @property
    def longest_s(self) -> float | None:
        """Return the longest expected step time: the end of `range_s`; without a range, `step_s` if calibrated, else None."""
        if self.range_s:
            return self.range_s[1]
        return None if self.rates == PUBLISHED else self.step_s

    def is_unexpected(self, step_s: float) -> bool:
        """Return whether a step time is outside `range_s`; without a range, whether it differs from the plan by over APART.

        At published kernel rates without a range, only a shorter step is unexpected.
        """
        if self.range_s:
            low, high = self.range_s
            return not low <= step_s <= high
        difference = step_s / self.step_s - 1
        return difference < -APART or (difference > APART and self.longest_s is not None)


def expect(program: Program, executable: Any, gpu: hardware.Gpu, gpus_per_node: int) -> Expected:
    """Return the planned time and memory of a step that is compiled for the GPUs of this process.

    Raises HloError for a program that cannot be read and ValueError for a GPU whose rates are not known.
    """
    run = program.run
    rates = rates_for(gpu, run.precision)
    module = hlo.parse_hlo(executable.as_text())
    collective_ops = collectives.read_collectives(module, dict(program.placement.mesh.shape), gpus_per_node)
    filled = expert_fill(run.model, run.moe, program.placement.size(program.placement.compute_axes("experts")))
    timing = roofline.predict(module, rates, collective_ops, filled=filled)
    range_ms = expected_ms(timing.step_ms, run_kind(run, gpu, program.placement.mesh.size, program.kernel.name), rates)
    range_s = (range_ms[0] / 1e3, range_ms[1] / 1e3) if range_ms else None
    return Expected(timing.step_ms / 1e3, taken_gib(executable), rates.source, range_s)


class Watch:
    """Collects the measurements of a run, and compares them with the plan once."""

    def __init__(self, expected: Expected):
        self.expected = expected
        self.steps: list[float] = []
        self.peak_gib: float | None = None
        self.num_lines = 0

    def note(self, step_s: float | None, peak_gib: float | None) -> list[str]:
        """Add the step time and peak memory of a line of metrics. Return warnings if the run differs from the plan; else [].

        The comparison is made once, when ENOUGH step times follow the first FIRST lines of metrics.
        """
        self.num_lines += 1
        self.peak_gib = peak_gib
        if step_s is None or self.num_lines <= FIRST:
            return []
        self.steps.append(step_s)
        if len(self.steps) != ENOUGH:
            return []
        planned, measured = self.expected, self.measured()
        warnings = []
        step_s, peak_gib = measured["step_s"], measured["peak_gib"]
        if step_s and planned.is_unexpected(step_s):
            text = f"{planned.range_s[0]:.3g} to {planned.range_s[1]:.3g}" if planned.range_s else f"{planned.step_s:.3g}"
            warnings.append(self._warning("step time", "s", step_s, planned.step_s, text))
        if peak_gib and abs(peak_gib / planned.peak_gib - 1) > APART:
            warnings.append(self._warning("peak memory", "GiB", peak_gib, planned.peak_gib, f"{planned.peak_gib:.3g}"))
        return warnings

    def _warning(self, name: str, unit: str, value: float, planned: float, text: str) -> str:
        return (
            f"{name}: {value:.3g} {unit} measured, {text} {unit} planned ({self.expected.rates}): {value / planned:.2f} times "
            f"{planned:.3g}. {to_run_sh('python -m jaxtrain plan --calibrate')} measures the rates of this machine."
        )

    def measured(self) -> dict[str, float | None]:
        """Return the median step time (s) after FIRST lines of metrics and the latest peak memory (GiB); None if unmeasured."""
        return {"step_s": statistics.median(self.steps) if self.steps else None, "peak_gib": self.peak_gib}

    def record(self) -> dict[str, Any]:
        """Return planned and measured figures for the receipt."""
        return {"planned": dataclasses.asdict(self.expected), "measured": self.measured()}
