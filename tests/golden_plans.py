"""Golden plans: figures of the compiled steps of the shipped configs, in tests/golden. Tests compare with them.

    python tests/golden_plans.py [NAME ...]           compare all plans (or those named), and print the lines that changed
    python tests/golden_plans.py --write [NAME ...]   write these plans anew, and print the differences

The figures belong to one jaxlib: a plan made with another jaxlib is not compared. Times are at published kernel rates, so that
a calibration of this machine does not change them. Counts and bytes are sums over a step, with all rounds of its loops.
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import hardware, launch
from jaxtrain.page.numbers import GB_PER_GIB, number
from jaxtrain.plan import topology
from jaxtrain.plan.rates import datasheet
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search import FOLDER as CACHE
from jaxtrain.plan.search import parallel
from jaxtrain.plan.search.cache import Cache
from jaxtrain.startup import start_jax

FOLDER = launch.REPO / "tests" / "golden"
WRITE = "python tests/golden_plans.py --write"
FORMAT = 1
# Largest relative change of a figure; for the exposed share, the largest absolute change. The scheduler may reorder
# instructions, but may not change bytes and FLOPs. Launches and trips must be equal. Collectives below `least_gb` a step are
# left out.
MARGINS = {"peak": 0.01, "wire": 0.01, "tflop": 0.01, "step": 0.02, "exposed_share": 0.01, "least_gb": 0.001}
NO_MARGINS = dict.fromkeys(MARGINS, 0.0)
LISTED = 4  # most lines or names that one sentence lists
# File -> (config with its variant, topology). The tiny config trains on CPUs, which have no plan.
SHIPPED: Mapping[str, tuple[str, str]] = {
    "llama3_8b": ("configs/llama3_8b.py", "h200:8"),
    "llama3_70b": ("configs/llama3_70b.py", "h200:8"),
    "llama2_7b": ("configs/llama2_7b.py", "h200:8"),
    "llama3_1b": ("configs/llama3_1b.py", "h200:8"),
    "llama3_1b_on_1": ("configs/llama3_1b.py:gpus=1", "h200:1"),
    "llama3_8b_half": ("configs/llama3_8b.py:half", "h200:1"),
    "llama3_8b_long": ("configs/llama3_8b.py:long", "h200:8"),
    "llama3_8b_1m": ("configs/llama3_8b.py:1m", "h200:8"),
    "llama3_70b_on_64": ("configs/llama3_70b.py:gpus=64", "h200:8x8"),
    "llama3_405b": ("configs/llama3_405b.py", "h200:8x16"),
    "mixtral_8x7b": ("configs/mixtral_8x7b.py", "h200:8"),
    "qwen3_30b_a3b": ("configs/qwen3_30b_a3b.py", "h200:8"),
    "gpt_oss_20b": ("configs/gpt_oss_20b.py", "h200:8"),
    "deepseek_v3": ("configs/deepseek_v3.py", "h200:8x16"),
}

Golden = dict[str, Any]  # the contents of a golden file


class GoldenError(ValueError):
    """A golden plan cannot be read, made, or compared with another plan."""


# ---- The files


def path(name: str, folder: Path = FOLDER) -> Path:
    """Return the file of a golden plan."""
    return folder / f"{name}.json"


def from_plan(plan: Plan) -> Golden:
    """Return the figures of a plan, rounded."""
    groups: dict[tuple[str, str, str], Golden] = {}
    for c in sorted(plan.collectives, key=lambda c: c.source or c.op_name):
        # XLA merges several collectives into one launch, in any order.
        key = (c.kind, "+".join(sorted(c.dtype.split("+"))), c.axis)
        group = groups.setdefault(key, {"launches": 0, "wire_gb": [], "lines": {}})
        count, gb = group["lines"].get(c.source or c.op_name, (0, 0.0))
        group["lines"][c.source or c.op_name] = [count + c.count, gb + c.wire_gib * GB_PER_GIB]
        group["launches"] += c.count
        group["wire_gb"].append(c.wire_gib)
    moved = []
    for (kind, dtype, axis), group in sorted(groups.items()):
        lines = {line: [count, round(gb, 4)] for line, (count, gb) in group["lines"].items()}
        wire_gb = round(math.fsum(group["wire_gb"]) * GB_PER_GIB, 4)
        moved.append(
            {"kind": kind, "dtype": dtype, "axis": axis, "launches": group["launches"], "wire_gb": wire_gb, "lines": lines}
        )
    work: dict[str, float] = {}
    for k in plan.kernels:
        work[k.op_name] = work.get(k.op_name, 0.0) + k.tflop
    loops: dict[str, list[int]] = {}
    for name, trips in plan.trip_counts.items():  # the compiler peels and unrolls loops, and gives them the same name
        loops.setdefault(re.sub(r"\.\d+$| \(\d+\)$", "", name), []).append(trips)
    return {
        "config": plan.config,
        "overrides": list(plan.overrides),
        "topology": plan.topology,
        "chip": plan.chip,
        "jaxlib": plan.versions["jaxlib"],
        "margins": dict(MARGINS),
        "peak_gib": round(plan.memory.peak_gib, 3),
        "classes_gib": _rounded(plan.memory.by_class),
        "saved_gib": _rounded(plan.memory.saved),
        "tflop": round(plan.flops.hardware_per_step / 1e12, 3),
        "work_tflop": _rounded(work),
        "step_ms": round(plan.time.step_ms, 2),
        "exposed_share": round(plan.time.exposed_ms / plan.time.step_ms, 4),
        "loops": {name: sorted(trips, reverse=True) for name, trips in sorted(loops.items())},
        "collectives": moved,
        "warnings": list(plan.warnings),
        "format": FORMAT,
    }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(v, 3) for name, v in sorted(values.items()) if round(v, 3)}


def save(golden: Golden, file: Path) -> None:
    """Write a golden plan."""
    file.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


def load(file: Path) -> Golden:
    """Load a golden plan. Raises GoldenError if the file is missing or has another format."""
    try:
        golden = json.loads(file.read_text(encoding="utf-8"))
        if golden["format"] != FORMAT:
            raise ValueError(f"its format is {golden['format']!r}, not {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GoldenError(f"{file}: no golden plan can be read ({error!r}). Fix: {WRITE}") from error
    return golden


# ---- Comparing


# Figure -> (its key, its unit, its margin, the tables that divide it)
FIGURES = {
    "peak memory": ("peak_gib", "GiB", "peak", ("classes_gib", "saved_gib")),
    "hardware FLOPs": ("tflop", "TFLOP", "tflop", ("work_tflop",)),
    "planned step": ("step_ms", "ms", "step", ()),
}


def compare(golden: Golden, plan: Plan, margins: Mapping[str, float] | None = None) -> list[str]:
    """Return a sentence for each figure of a plan that differs from its golden plan beyond the margins, and each new warning.

    Args:
        margins: as MARGINS; None for the margins that the golden plan stores.

    Raises:
        GoldenError: the plans have different jaxlibs or topologies.
    """
    if golden["jaxlib"] != (jaxlib := plan.versions["jaxlib"]):
        made = f"the golden plan of {golden['config']} was made with jaxlib {golden['jaxlib']}, and this is {jaxlib}"
        raise GoldenError(f"{made}. Another compiler makes another program. Fix: {WRITE}")
    if golden["topology"] != plan.topology:
        raise GoldenError(f"a golden plan for {golden['topology']} cannot be compared with a plan for {plan.topology}")
    new, within = from_plan(plan), golden["margins"] if margins is None else margins

    found = []
    for figure, (key, unit, margin, parts) in FIGURES.items():
        old, now = golden[key], new[key]
        if _is_far(old, now, within[margin]):
            changes = (text for name in parts for text in _changes(golden[name], new[name], unit))
            found.append(
                _difference(figure, f"{number(old)} {unit}", f"{number(now)} {unit}", _signed(now, old, unit), *changes)
            )
    found += _collectives(golden, new, within)
    for name in sorted({*golden["loops"], *new["loops"]}):
        was, now = (" + ".join(map(str, g["loops"].get(name, ()))) or "none" for g in (golden, new))
        if was != now:
            found.append(_difference(f"trips of {name}", was, now))
    was, now = golden["exposed_share"], new["exposed_share"]
    if abs(now - was) > within["exposed_share"]:
        found.append(_difference("exposed share of the step", f"{was:.1%}", f"{now:.1%}", f"{100 * (now - was):+.1f} points"))
    known = {_without_numbers(w) for w in golden["warnings"]}
    return found + [f"new warning: {w}" for w in new["warnings"] if _without_numbers(w) not in known]


def _difference(figure: str, old: str, new: str, *changes: str) -> str:
    return "; ".join([f"{figure}: {new}, golden has {old}", *filter(None, changes)])


def _without_numbers(warning: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", warning)


def _is_far(old: float, new: float, margin: float) -> bool:
    return abs(new - old) > margin * max(abs(old), abs(new))


def _signed(new: float, old: float, unit: str) -> str:
    relative = f" ({100 * (new - old) / old:+.1f}%)" if old else ""
    return f"{'+' if new >= old else '-'}{number(abs(new - old))} {unit}{relative}"


def _changes(old: Mapping[str, float], new: Mapping[str, float], unit: str) -> list[str]:
    """Return the LISTED largest changes in a figure's table. Changes below 5% of the largest are left out."""
    pairs = {name: (new.get(name, 0.0), old.get(name, 0.0)) for name in {*old, *new}}
    changes = {name: abs(now - was) for name, (now, was) in pairs.items()}
    ordered = sorted(changes, key=lambda name: (-changes[name], name))[:LISTED]
    return [f"{n} {_signed(*pairs[n], unit)}" for n in ordered if changes[n] > 0.05 * changes[ordered[0]]]


def _collectives(old: Golden, new: Golden, margins: Mapping[str, float]) -> Iterable[str]:
    """Yield the collectives whose launches or bytes changed, and the lines that they come from."""
    none = {"launches": 0, "wire_gb": 0.0, "lines": {}}
    before, after = ({f"{c['kind']} {c['dtype']} over {c['axis']}": c for c in g["collectives"]} for g in (old, new))
    pairs = {name: (before.get(name, none), after.get(name, none)) for name in sorted({*before, *after})}
    for name, (was, now) in sorted(pairs.items(), key=lambda item: -max(c["wire_gb"] for c in item[1])):
        if max(was["wire_gb"], now["wire_gb"]) <= margins["least_gb"]:
            continue
        if was["launches"] == now["launches"] and not _is_far(was["wire_gb"], now["wire_gb"], margins["wire"]):
            continue
        had, has = (f"{number(c['wire_gb'])} GB in {c['launches']:,} launches" if c["launches"] else "none" for c in (was, now))
        change = f"{_signed(now['wire_gb'], was['wire_gb'], 'GB')}, {now['launches'] - was['launches']:+,} launches"
        yield _difference(name, had, has, change, _line_cause(was["lines"], now["lines"]))


def _line_cause(old: dict[str, list[Any]], new: dict[str, list[Any]]) -> str:
    """Return the lines of code whose launches or bytes changed. A line that only moved within its file is left out."""
    less = {line: v for line, v in old.items() if new.get(line) != v}
    more = {line: v for line, v in new.items() if old.get(line) != v}
    for line, v in list(more.items()):
        file = line.rpartition(":")[0]
        if same := [other for other, was in less.items() if was == v and other.rpartition(":")[0] == file]:
            del more[line], less[same[0]]

    def listed(lines: dict[str, list[Any]]) -> str:
        ordered = sorted(lines, key=lambda line: -abs(new.get(line, [0, 0.0])[1] - old.get(line, [0, 0.0])[1]))
        texts = []
        for line in ordered[:LISTED]:
            count, gb = lines[line]
            was = f", before {old[line][0]:,} and {number(old[line][1])} GB" if line in new and line in old else ""
            texts.append(f"{line} ({count:,} launches, {number(gb)} GB{was})")
        return ", ".join(texts + [f"and {len(ordered) - LISTED} more"] * (len(ordered) > LISTED))

    gone = {line: v for line, v in less.items() if line not in new}
    return "; ".join(f"{words} {listed(lines)}" for words, lines in (("from", more), ("no longer from", gone)) if lines)


# ---- The command


def requests(names: Iterable[str]) -> dict[str, parallel.Request]:
    """Return name -> request to `plan_many`, for golden plans. Raises GoldenError for a config with a mistake."""
    out = {}
    for name in names:
        config, machine = SHIPPED[name]
        loaded = launch.load([f"--config={launch.REPO / config}"])
        if loaded.problems:
            raise GoldenError(f"{config}: {'; '.join(map(str, loaded.problems))}")
        where = topology.parse(machine)
        out[name] = parallel.Request(loaded.run, where, config, rates=datasheet(where.gpu, loaded.run.precision))
    return out


def explain(name: str, differences: Sequence[str]) -> str:
    """Return the differences of a golden plan as text, for the message of a failing test."""
    if not differences:
        return f"{name}: as its golden plan"
    return "\n".join([f"{name} differs from tests/golden/{name}.json:", *(f"- {d}" for d in differences)])


def run(
    names: Sequence[str],
    write: bool = False,
    folder: Path = FOLDER,
    plan_many: Callable[..., dict[str, parallel.Outcome]] = parallel.plan_many,
    **how: Any,
) -> int:
    """Plan the shipped configs and print the differences from their files; with `write`, write the files.

    Args:
        how: further arguments of `plan_many`.

    Returns:
        0 if all agree or are written, otherwise 1.
    """
    codes = [0]

    def report(name: str, outcome: parallel.Outcome) -> None:
        try:
            if outcome.plan is None:
                raise GoldenError(f"no plan, {outcome.kind}: {outcome.reason}")
            # With `write`, a change within the margins is printed too.
            differences = compare(load(path(name, folder)), outcome.plan, NO_MARGINS if write else None)
            print(explain(name, differences), flush=True)
            codes.append(1 if differences and not write else 0)
        except GoldenError as error:
            print(f"{name}: not compared: {error}", flush=True)
            codes.append(0 if write and outcome.plan else 1)
        if write and outcome.plan:
            save(from_plan(outcome.plan), path(name, folder))
            print(f"{name}: written to {path(name, folder)}")

    plan_many(requests(names), on_done=report, **how)
    return max(codes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser("python tests/golden_plans.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SHIPPED))
    parser.add_argument("--write", action="store_true", help="write the files anew")
    parser.add_argument("--jobs", type=int, default=0, help="compilations at a time; default: one for each core")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in SHIPPED]:
        parser.error(f"NAME = {unknown[0]!r}: not a golden plan. Fix: one of {', '.join(SHIPPED)}")
    os.environ["JAX_PLATFORMS"] = "cpu"
    start_jax(hardware.probe())
    return run(args.names or list(SHIPPED), args.write, jobs=args.jobs, cache=Cache(CACHE))


if __name__ == "__main__":
    sys.exit(main())
