"""Find keys that are set, and that nothing reads, because of the value of another key."""

import fnmatch
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxtrain.config.schema import Problem, RunConfig, format_value

DEFAULTS = RunConfig().flat


@functools.cache
def _matches(pattern: str) -> list[str]:
    return fnmatch.filter(DEFAULTS, pattern)


def find_unread(
    values: Mapping[str, Any], read_with: Iterable[tuple[str, str, Any]], bad: Collection[str]
) -> dict[str, Problem]:
    """Return key -> problem of each key that has another value than its default, and is not read.

    Args:
        values: dotted key -> value.
        read_with: (pattern of keys, another key, the value of this other key with which they are read; None: any but 0, false
            and ''). Of several entries for a key, the first that is broken is reported.
        bad: keys that have an invalid value. They, and the keys that depend on them, have no problem.
    """
    unread: dict[str, Problem] = {}
    for pattern, other_key, needed in read_with:
        now = values[other_key]
        if other_key in bad or (bool(now) if needed is None else now == needed):
            continue
        equal, to = (f" = {format_value(needed)}", f" to {format_value(needed)}") if needed is not None else ("", "")
        rule = f"is read only with {other_key}{equal}, which is {format_value(now)}"
        for key in _matches(pattern):
            if values[key] != DEFAULTS[key] and key not in bad:
                remedy = f"Set {format_value(DEFAULTS[key])}, or {other_key}{to}."
                unread.setdefault(key, Problem(key, values[key], rule, remedy))
    return unread
