"""What a comparison of two receipts finds."""

import dataclasses
from collections.abc import Mapping
from typing import Any

GROUPS = ("code", "config", "versions", "environment", "hardware", "data")
ABSENT = "not there"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that differs and can explain a difference in results or speed. `lines`: of a source file.

    earlier: not of the newest attempts, but of earlier ones whose steps are in the result; a and b tell which.
    """

    group: str
    name: str
    a: str
    b: str
    lines: tuple[str, ...] = ()
    earlier: bool = False

    @property
    def title(self) -> str:
        """The name, for people."""
        return f"{self.name} (in earlier attempts)" if self.earlier else self.name


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of it: explains nothing, and is explained."""

    name: str
    a: str
    b: str
    said: str = ""  # the two in one word, as a ratio


@dataclasses.dataclass(frozen=True)
class Comparison:
    """From run A to run B. `notes`: what could not be compared, and why."""

    a: str
    b: str
    differences: tuple[Difference, ...]
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs that could explain anything."""
        return not self.differences

    def record(self) -> dict[str, Any]:
        """For programs."""
        return {"same": self.same, **dataclasses.asdict(self)}


def shown(value: Any) -> str:
    """A value as a comparison shows it."""
    if value is None:
        return ABSENT
    return "''" if value == "" else str(value)


def differing(group: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """One difference for each name whose values are not the same; a name that one of them lacks is one too."""
    names = dict.fromkeys((*a, *b))
    return [Difference(group, n, shown(a.get(n)), shown(b.get(n))) for n in names if a.get(n) != b.get(n)]
