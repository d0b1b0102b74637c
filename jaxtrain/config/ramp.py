"""The ramp of the batch: how many sequences each optimizer step has, as a pure function of the step."""

import dataclasses
import fractions
import math
import re

from jaxtrain.config.declaration import MOST


@dataclasses.dataclass(frozen=True)
class Ramp:
    """The sequences of each step: those of `phases`, and `full` after the last phase. Without phases, every step has `full`."""

    full: int
    phases: tuple[tuple[int, int], ...] = ()  # (sequences of a step, number of steps until which), both ascending

    @property
    def end(self) -> int:
        """Return the number of steps before the first one of `full` sequences."""
        return self.phases[-1][1] if self.phases else 0

    @property
    def unit(self) -> int:
        """Return the greatest common divisor of all sizes. Data is read in batches of this many sequences."""
        return math.gcd(self.full, *(size for size, _ in self.phases))

    @property
    def note(self) -> str:
        """Return a line beside figures of a full step; "" without phases."""
        return f"train.batch_ramp: figures are of the {self.full} sequences from step {self.end + 1} on" if self.phases else ""

    def size(self, step: int) -> int:
        """Return the sequences of optimizer step `step` + 1."""
        return next((size for size, until in self.phases if step < until), self.full)

    def sizes(self, first: int, last: int) -> list[int]:
        """Return the sequences of the steps after step `first` up to step `last`, each number once, ascending."""
        borders = [first, *(until for _, until in self.phases if first < until < last)]
        return list(dict.fromkeys(self.size(step) for step in borders))

    def until(self, step: int) -> int | None:
        """Return the number of steps after which the size of step `step` + 1 changes; None if it is the full one."""
        return next((until for _, until in self.phases if step < until), None)

    def before(self, step: int) -> int:
        """Return the sequences of the first `step` steps."""
        sequences = begin = 0
        for size, until in self.phases:
            sequences += size * (min(step, until) - begin)
            if step <= until:
                return sequences
            begin = until
        return sequences + self.full * (step - begin)

    def steps_for(self, sequences: int | fractions.Fraction) -> int:
        """Return the smallest number of steps that have this many sequences."""
        begin = 0
        for size, until in self.phases:
            if sequences <= size * (until - begin):
                return begin + math.ceil(sequences / fractions.Fraction(size))
            sequences -= size * (until - begin)
            begin = until
        return begin + math.ceil(sequences / fractions.Fraction(self.full))

    def __str__(self) -> str:
        """Return the text that `parse_ramp` reads."""
        return ",".join(f"{size}:{until}" for size, until in self.phases)


def parse_ramp(text: str, full: int) -> tuple[Ramp, tuple[str, str] | None]:
    """Return (the ramp of train.batch_ramp, None), or (a ramp without phases, (broken rule, remedy)).

    full: train.global_batch.
    """
    phases: list[tuple[int, int]] = []
    for item in text.split(",") if text.strip() else ():
        match = re.fullmatch(r"\s*(\d{1,10})\s*:\s*(\d{1,10})\s*", item)
        if not match:
            return Ramp(full), (f"{item.strip()!r} is not SEQUENCES:STEP", "For example 64:1000,128:3000.")
        size, until = int(match[1]), int(match[2])
        before, begin = phases[-1] if phases else (0, 0)
        if not before < size < full:
            rule = f"{size} sequences a step are not above {before} and below train.global_batch = {full}"
            return Ramp(full), (rule, "Set '' for no ramp, or ascending numbers.")
        if not begin < until <= MOST:
            return Ramp(full), (f"{item.strip()} does not end after step {begin}", "Write the steps in ascending order.")
        phases.append((size, until))
    return Ramp(full, tuple(phases)), None
