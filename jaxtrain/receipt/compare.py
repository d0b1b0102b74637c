"""Two runs: what differs between them that can explain other results or another speed, and what came of it.

Left out is what explains nothing: times, ids, names of hosts, places of files, what is only written. Where one thing follows
from another, the other is named alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain.receipt import lineage, outcome, settings, things
from jaxtrain.receipt.code import lines_changed
from jaxtrain.receipt.opened import Run, source_of
from jaxtrain.receipt.result import GROUPS, Comparison, Difference, differing, shown
from jaxtrain.receipt.software import WHEELS

AT_THE_END = "as at the end"  # what all earlier attempts of a run had


def compare(a: Run, b: Run) -> Comparison:
    """From A to B. Raises ReceiptError where a file beside a receipt cannot be read."""
    found, notes = between(a, b)
    return Comparison(a.name, b.name, found, outcome.outcomes(a, b), (*a.notes, *b.notes, *notes))


def between(a: Run, b: Run) -> tuple[tuple[Difference, ...], list[str]]:
    """(what differs, what could not be compared): by the newest attempts, by earlier ones whose steps are in the result, and by
    what the first of them began from. Raises ReceiptError."""
    origins = [lineage.lineage(run.attempts)[1] for run in (a, b)]
    told = lineage.ORIGIN if all(one and one["digest"] for one in origins) else ()
    found, notes = differences(a.told, b.told, a.resolved, b.resolved, told)
    return _sorted([*found, *lineage.differences(*origins), *_earlier(a, b)]), notes


def differences(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    config_a: Mapping[str, Any] | None,
    config_b: Mapping[str, Any] | None,
    told: Iterable[str] = (),
) -> tuple[tuple[Difference, ...], list[str]]:
    """(what differs between two attempts in the order of GROUPS, what could not be compared). The configs are resolved ones.

    told: keys of the config that something else tells better.
    """
    notes = []
    data_a, data_b = a.get("data") or {}, b.get("data") or {}
    held_a, held_b = a.get("eval_data"), b.get("eval_data")
    told = [*told, *(settings.FILES if things.by_content(data_a, data_b) else ())]
    told += settings.HELD_OUT if held_a is not None and held_b is not None else ()
    found = code(source_of(a), source_of(b), notes)
    if config_a is not None and config_b is not None:
        found += settings.config(config_a, config_b, a.get("mesh"), b.get("mesh"), told)
    else:
        notes.append("config: not compared, a receipt without `resolved` needs config.json beside it")
    found += versions(a, b)
    found += settings.environment(a, b, [d.name for d in found if d.group == "config"])
    found += things.hardware(a, b)
    found += things.data(data_a, data_b)
    if held_a is not None and held_b is not None:
        for name in dict.fromkeys((*held_a, *held_b)):
            what = f"held out{f' ({name})' if name else ''}: "
            found += things.data(held_a.get(name, {}), held_b.get(name, {}), what)
    return _sorted(found), notes


def _sorted(found: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(found, key=lambda d: GROUPS.index(d.group)))


def code(a: Mapping[str, Any], b: Mapping[str, Any], notes: list[str]) -> list[Difference]:
    """Of two sources: file by file, with the lines where both stand on one commit. Two commits with equal files are the same.

    The config's file is left out: what it says is compared as config.
    """
    if not a.get("files") or not b.get("files"):
        if not a.get("commit") or not b.get("commit"):
            notes.append("code: not compared, a receipt has neither the digests of its files nor a commit")
        elif a["commit"] == b["commit"] and (a.get("dirty") or b.get("dirty")):
            notes.append("code: one commit, with changes that were not committed and that a receipt does not tell")
        return differing("code", {"commit": a.get("commit")}, {"commit": b.get("commit")})
    files_a, files_b = ({n: d for n, d in side["files"].items() if n != side.get("config_file")} for side in (a, b))
    out = []
    for each in differing("code", files_a, files_b):
        sides = (files_a.get(each.name), files_b.get(each.name))
        one, other = (shown(f"sha256 {digest[:12]}" if digest else None) for digest in sides)
        out.append(Difference("code", each.name, one, other, tuple(lines_changed(each.name, a, b))))
    if out and a.get("commit") != b.get("commit"):
        out.insert(0, Difference("code", "commit", shown(a.get("commit")), shown(b.get("commit"))))
    return out


def versions(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Of two attempts: packages, Python, the driver, the container, the operating system."""
    packages = [side.get("packages") or {} for side in (a, b)]
    below = [dict(side.get("versions") or {}) for side in (a, b)]
    for name, wheels in WHEELS.items():
        if any(wheel in side for wheel in wheels for side in packages):  # told as a package
            for side in below:
                side.pop(name, None)
    for side in below:
        for name, version in (side.pop("built_for", None) or {}).items():
            side[f"{name} that jax's plugin was built with"] = version
    others = [{"Python": side.get("python"), "operating system": (side.get("host") or {}).get("system")} for side in (a, b)]
    whole = [{**one, **two, **three} for one, two, three in zip(packages, below, others, strict=True)]
    if not a.get("versions") or not b.get("versions"):  # format 1 does not tell
        whole = [{name: v for name, v in side.items() if name not in (*below[0], *below[1])} for side in whole]
    return differing("versions", *whole)


def history(run: Run) -> dict[tuple[str, str], str]:
    """What earlier attempts had otherwise than the newest one: (group, name) -> "0.9 in attempts 1, 2". Of those attempts alone
    whose steps are in the result."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for attempt in lineage.lineage(run.attempts)[0][:-1]:
        if attempt["format"] != run.receipt["format"]:
            continue
        past, _ = differences(attempt, run.told, attempt.get("resolved"), run.receipt.get("resolved"))
        for d in past:
            found.setdefault((d.group, d.name), {}).setdefault(d.a, []).append(str(attempt.get("attempt")))
    return {key: "; ".join(_in_attempts(*each) for each in values.items()) for key, values in found.items()}


def _in_attempts(value: str, attempts: list[str]) -> str:
    more = f" and {len(attempts) - 3} more" if len(attempts) > 3 else ""
    return f"{value} in attempt{'s' if attempts[1:] else ''} {', '.join(attempts[:3])}{more}"


def _earlier(a: Run, b: Run) -> list[Difference]:
    """Where the earlier attempts of two runs differ, as far as their newest ones do not say so."""
    one, other = history(a), history(b)
    keys = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
    return [Difference(*key, one.get(key, AT_THE_END), other.get(key, AT_THE_END), earlier=True) for key in keys]
