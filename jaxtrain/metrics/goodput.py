"""The wall time of a run by cause, over all attempts, summed from its ledger. Imports no jax.

Goodput is the fraction of the wall time spent on steps that are not repeated later. It does not count "stopped" as wall time:
the time between a planned end (exit code 0, or 130 for Ctrl-C) and the next attempt. ledger.py writes the ledger.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.durations import duration

# Cause -> its meaning. "other" is the end of the process, after the last step.
MEANING = {
    "step": "steps that counted",
    "startup": "from the start of the process to the first step, without compiling, restoring and data",
    "compile": "compiling",
    "restore": "reading a checkpoint",
    "data": "waiting for data",
    "save": "waiting for a save",
    "eval": "held-out loss and samples",
    "repeated": "steps that were lost and repeated",
    "hang": "hang, until the watchdog ended it",
    "down": "from a crash or a request to stop to the next attempt, preflight included",
    "other": "the rest",
    "stopped": "between a planned end and the next attempt",
}
CAUSES = tuple(MEANING)
REPEATABLE = ("step", "data", "eval")  # time of a step that was lost
HUNG = 124  # the watchdog's exit code
WANTED = (0, 130)  # exit codes of a planned end
FILE = "goodput.jsonl"
LINE_S = 30.0  # longest time between two lines of the ledger


@dataclasses.dataclass
class Span:
    """A span of time of an attempt, or between two attempts (attempt 0).

    `first` and `last` are the numbers of steps done at its start and at its end. last None: unknown.
    """

    attempt: int
    start: float  # seconds since 1970
    end: float
    seconds: dict[str, float]
    first: int = 0
    last: int | None = 0


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The wall time of a run by cause. `parts` has the seconds of every cause, "stopped" included, and sums to `wall_s`."""

    wall_s: float
    parts: dict[str, float]
    attempts: int
    steps: int  # done
    steps_repeated: int  # at least: the last seconds of a killed attempt are not counted
    spans: list[Span] = dataclasses.field(default_factory=list)

    @property
    def wanted_s(self) -> float:
        """Return the wall time without "stopped", of which goodput is a fraction."""
        return self.wall_s - self.parts["stopped"]

    @property
    def goodput(self) -> float | None:
        """Return the goodput as a fraction of `wanted_s`; None if that time is 0."""
        return self.parts["step"] / self.wanted_s if self.wanted_s > 0 else None

    def record(self) -> dict[str, Any]:
        """Return the goodput as the receipt stores it."""
        parts = {cause: round(s, 3) for cause, s in self.parts.items()}
        counted = {"attempts": self.attempts, "steps": self.steps, "steps_repeated": self.steps_repeated}
        return {"goodput": self.goodput, "wall_s": round(self.wall_s, 3), "parts_s": parts, **counted}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger. The last line also has `seen_last`: the file's modification time, as the run set it last.

    Raises ValueError for a line of another format. A last line cut short by a kill is left out. A missing ledger has no lines.
    """
    try:
        raw, seen = path.read_bytes(), path.stat().st_mtime
    except FileNotFoundError:
        return []
    lines = []
    for number, text in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            line = json.loads(text)
            line["kind"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a line of a goodput ledger ({error!r})") from error
        lines.append(line)
    if lines:
        lines[-1] = lines[-1] | {"seen_last": seen}
    return lines


def summarise(lines: Iterable[Mapping[str, Any]], now: float | None = None) -> Goodput:
    """Sum up the lines of a ledger. now: the present time, for a live run; None: use the last line's `seen_last`."""
    spans: list[Span] = []
    attempts = at = repeated = 0
    began = until = 0.0
    doing: str | None = None  # in the present attempt; None between attempts
    away = "down"
    last_seen: float | None = None
    for line in lines:
        kind = line["kind"]
        if kind == "begin":
            if doing is not None:  # the attempt was killed. Its last activity counts until it was last seen alive.
                until = _tail(spans, attempts, until, line["seen"], doing, at)
                away = "down"
                for span in _spans_without_progress(spans, attempts):
                    span.last = None  # the attempt was killed during unfinished steps
            if attempts:
                gap = max(0.0, line["time"] - until)
                spans.append(Span(0, until, until + gap, {away: gap}, at, at))
                until += gap
            else:
                began = until = line["time"]
            attempts, doing, last_seen = attempts + 1, "startup", None
        elif kind == "spent":
            length = sum(line["seconds"].values())
            done = at if line["step"] is None else line["step"]
            spans.append(Span(attempts, until, until + length, dict(line["seconds"]), at, done))
            until, at, doing = until + length, done, line["doing"]
        elif kind == "back":
            repeated += max(0, at - line["step"])
            at = line["step"]
            _repeat(spans, at)
        elif kind == "end":
            doing, away = None, "stopped" if line["exit_code"] in WANTED else "down"
            if line["exit_code"] == HUNG:
                _hung(spans, attempts)
        last_seen = line.get("seen_last", last_seen)
    if doing is not None:
        until = _tail(spans, attempts, until, now if now is not None else last_seen, doing, at)
    parts = dict.fromkeys(CAUSES, 0.0)
    for span in spans:
        for cause, seconds in span.seconds.items():
            parts[cause] += seconds
    return Goodput(until - began, parts, attempts, at, repeated, spans)


def _tail(spans: list[Span], attempt: int, until: float, seen: float | None, doing: str, at: int) -> float:
    """Add a span from an attempt's last line to the moment when the attempt was last seen. Return the end of the span.

    `seen` is the modification time of the ledger's file. Lines come every LINE_S seconds, so the span has at most 2 LINE_S: a
    file with a later modification time was copied.
    """
    length = min(max(0.0, (seen or until) - until), 2 * LINE_S)
    if length:
        spans.append(Span(attempt, until, until + length, {doing: length}, at, None))
    return until + length


def _spans_without_progress(spans: list[Span], attempt: int) -> list[Span]:
    """Return the newest spans of an attempt, after its last span in which a step was done."""
    newest = itertools.takewhile(lambda span: span.attempt == attempt, reversed(spans))
    return list(itertools.takewhile(lambda span: span.last is None or span.first == span.last, newest))


def _hung(spans: list[Span], attempt: int) -> None:
    """Count the time since the last step as "hang", for an attempt that the watchdog ended."""
    for span in _spans_without_progress(spans, attempt):
        span.seconds = {"hang": sum(span.seconds.values())}


def _repeat(spans: list[Span], step: int) -> None:
    """Count the time of steps after `step` as "repeated": the run takes these steps again."""
    for span in spans:
        if span.last is not None and span.last <= step:
            continue
        whole = span.last is None or span.first >= step
        share = 1.0 if whole or span.last is None else (span.last - step) / (span.last - span.first)
        for cause in REPEATABLE:
            lost = share * span.seconds.get(cause, 0.0)
            if lost:
                span.seconds[cause] -= lost
                span.seconds["repeated"] = span.seconds.get("repeated", 0.0) + lost
        # The rest belongs to steps that count; a later `back` may reduce it too.
        span.last = step if not whole else span.first


def words(found: Goodput) -> str:
    """Return one line: the goodput, and the causes of at least 0.1% of the wall time, except "step" and "stopped"."""
    if found.goodput is None:
        return "goodput: nothing has been measured yet"
    rest = {cause: s for cause, s in found.parts.items() if cause not in ("step", "stopped") and s >= 0.001 * found.wall_s}
    lost = ", ".join(f"{cause} {duration(rest[cause])}" for cause in sorted(rest, key=rest.__getitem__, reverse=True))
    many = f"{found.attempts} attempt{'s' if found.attempts > 1 else ''}"
    again = f"; {found.steps_repeated} steps or more were taken again" if found.steps_repeated else ""
    return f"goodput {found.goodput:.1%} of {duration(found.wanted_s)} in {many}; the rest: {lost or 'nothing'}{again}"
