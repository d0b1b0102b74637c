"""Two traces: what became slower or faster, by kind, by part and by operation."""

from collections import defaultdict
from collections.abc import Mapping

from jaxtrain.profile.result import Change, Diff, Profile


def diff(before: Profile, after: Profile) -> Diff:
    """From `before` to `after`. Operations are matched by what they are and where they come from, not by the compiler's names,
    which change with every program."""
    return Diff(
        before.trace,
        after.trace,
        Change("step", before.step_ms, after.step_ms),
        _changes(before.by_kind, after.by_kind),
        _changes(_parts(before), _parts(after)),
        _changes(_ops(before), _ops(after)),
    )


def _parts(found: Profile) -> dict[str, float]:
    return {name: sum(kinds.values()) for name, kinds in found.by_part.items()}


def _ops(found: Profile) -> dict[str, float]:
    out: dict[str, float] = defaultdict(float)
    for op in found.ops:
        # Without the line's number: an edit above it moves it.
        out[f"{op.label} ({op.kind}, {op.source.rpartition(':')[0] or op.part})"] += op.ms
    return out


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Change, ...]:
    names = dict.fromkeys((*before, *after))
    found = [Change(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names]
    return tuple(sorted((c for c in found if c.before_ms or c.after_ms), key=lambda c: -abs(c.ms)))
