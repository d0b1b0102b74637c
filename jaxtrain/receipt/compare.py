"""Two runs: what differs between them that can explain other results or another speed, and what came of it.

Left out is what explains nothing: times, ids, names of hosts, places of files, what is only written. Where one thing follows
from another, the other is named alone.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.receipt import outcome, settings, things
from jaxtrain.receipt.code import lines_changed
from jaxtrain.receipt.opened import Run, source_of
from jaxtrain.receipt.result import GROUPS, Comparison, Difference, differing, shown
from jaxtrain.receipt.software import WHEELS


def compare(a: Run, b: Run) -> Comparison:
    """From A to B, by their newest attempts. Raises ReceiptError where a file beside a receipt cannot be read."""
    found, notes = differences(a.receipt, b.receipt, a.resolved, b.resolved)
    return Comparison(a.name, b.name, found, outcome.outcomes(a, b), (*a.notes, *b.notes, *notes, *_changed(a), *_changed(b)))


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any], config_a: Mapping[str, Any] | None, config_b: Mapping[str, Any] | None
) -> tuple[tuple[Difference, ...], list[str]]:
    """(what differs between two attempts in the order of GROUPS, what could not be compared). The configs are resolved ones."""
    notes = []
    data_a, data_b = a.get("data") or {}, b.get("data") or {}
    held_a, held_b = a.get("eval_data"), b.get("eval_data")
    told = [*(settings.FILES if things.by_content(data_a, data_b) else ())]
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
    return tuple(sorted(found, key=lambda d: GROUPS.index(d.group))), notes


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


def _changed(run: Run) -> list[str]:
    """What earlier attempts of a run had otherwise than its last one, in a line each."""
    out = []
    for attempt in run.attempts[:-1]:
        if attempt["format"] != run.receipt["format"]:
            continue
        found, _ = differences(attempt, run.receipt, attempt.get("resolved"), run.receipt.get("resolved"))
        if found:
            names = ", ".join(f"{d.group} {d.name}" for d in found[:3]) + (f" and {len(found) - 3} more" if found[3:] else "")
            out.append(f"{run.name}: attempt {attempt['attempt']} ran with other {names}")
    return out
