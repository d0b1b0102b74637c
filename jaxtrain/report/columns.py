"""Lines of metrics as columns: one list for each key."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Columns:
    """Lines of one kind, by key; a value that a line does not have is None."""

    steps: list[int]
    values: dict[str, list[Any]]

    def __getitem__(self, key: str) -> list[Any]:
        return self.values.get(key) or [None] * len(self.steps)

    def known(self, key: str) -> list[float]:
        """The values that are numbers, in order."""
        return [v for v in self[key] if v is not None and v == v]

    def last(self, key: str) -> Any:
        """The newest value that is not None; None where there is none."""
        return next((v for v in reversed(self[key]) if v is not None), None)


def columns(lines: Iterable[Mapping[str, Any]]) -> Columns:
    """Lines of metrics.jsonl, of one kind and in order."""
    found = Columns([], {})
    for line in lines:
        for key, value in line.items():
            if key not in found.values:
                found.values[key] = [None] * len(found.steps)  # of lines that an earlier version wrote
            found.values[key].append(value)
        found.steps.append(line["step"])
        for column in found.values.values():
            if len(column) < len(found.steps):
                column.append(None)
    return found
