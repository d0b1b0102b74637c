"""Golden plans: figures of the compiled steps of the shipped configs, in tests/golden. Tests compare with them.

    python tests/golden_plans.py [NAME ...]           compare all (or these), and name the lines of code behind a difference
    python tests/golden_plans.py --write [NAME ...]   write them anew, and print what changed

The figures belong to one compiler: under another jaxlib nothing is compared. Times are at published kernel rates, so that a
calibration of this machine changes nothing. Counts and bytes are those of a whole step, with loops multiplied out.
"""

import argparse
import dataclasses
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
# Largest relative change of a figure; of the exposed share, the largest change. The scheduler may reorder instructions, but not
# change bytes and FLOPs. Launches and trips are exact. Collectives below `least_gb` a step are left out.
MARGINS = {"peak": 0.01, "wire": 0.01, "tflop": 0.01, "step": 0.02, "exposed_share": 0.01, "least_gb": 0.001}
NO_MARGINS = dict.fromkeys(MARGINS, 0.0)
LISTED = 4  # lines or names in one sentence
# File -> (config with its variant, topology). The tiny config trains on CPUs, for which there is no plan.
SHIPPED: Mapping[str, tuple[str, str]] = {
    "llama3_8b": ("configs/llama3_8b.py", "h200:8"),
    "llama3_70b": ("configs/llama3_70b.py", "h200:8"),
    "llama2_7b": ("configs/llama2_7b.py", "h200:8"),
    "llama3_1b": ("configs/llama3_1b.py", "h200:8"),
    "llama3_1b_on_1": ("configs/llama3_1b.py:gpus=1", "h200:1"),
    "llama3_8b_half": ("configs/llama3_8b.py:half", "h200:1"),
    "llama3_8b_long": ("configs/llama3_8b.py:long", "h200:8"),
    "llama3_8b_1m": ("configs/llama3_8b.py:1m", "h200:8"),
    "llama3_405b": ("configs/llama3_405b.py", "h200:8x16"),
    "mixtral_8x7b": ("configs/mixtral_8x7b.py", "h200:8"),
    "qwen3_30b_a3b": ("configs/qwen3_30b_a3b.py", "h200:8"),
}

Golden = dict[str, Any]  # the contents of a golden file


class GoldenError(ValueError):
    """A golden plan that cannot be read, or does not apply."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A figure that changed, and the lines of code or the parts that changed it."""

    figure: str
    old: str
    new: str
    change: str = ""
    cause: str = ""

    def __str__(self) -> str:
        change, cause = (f"{mark} {text}" if text else "" for mark, text in ((":", self.change), (";", self.cause)))
        return f"{self.figure}: {self.new}, golden has {self.old}{change}{cause}"


# ---- The files


def path(name: str, folder: Path = FOLDER) -> Path:
    """Return the file of a golden plan."""
    return folder / f"{name}.json"


def from_plan(plan: Plan) -> Golden:
    """Return the figures of a plan, rounded."""
    groups: dict[tuple[str, str, str], Golden] = {}
    for c in sorted(plan.collectives, key=lambda c: c.source or c.op_name):
        # XLA merges several into one launch in any order.
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
    for name, trips in plan.trip_counts.items():  # the compiler peels and unrolls loops of one name
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
    """Read a golden plan. Raises GoldenError if there is none of this format."""
    try:
        golden = json.loads(file.read_text(encoding="utf-8"))
        if golden["format"] != FORMAT:
            raise ValueError(f"its format is {golden['format']!r}, not {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GoldenError(f"{file}: no golden plan can be read ({error!r}). Fix: {WRITE}") from error
    return golden


# ---- Comparing


def compare(golden: Golden, plan: Plan, margins: Mapping[str, float] | None = None) -> list[Difference]:
    """Return all figures of a plan that differ from its golden plan by more than the margins.

    Args:
        margins: None for those of the golden plan.

    Raises:
        GoldenError: the two cannot be compared, since their jaxlib or topology differs.
    """
    if golden["jaxlib"] != (jaxlib := plan.versions["jaxlib"]):
        made = f"the golden plan of {golden['config']} was made with jaxlib {golden['jaxlib']}, and this is {jaxlib}"
        raise GoldenError(f"{made}. Another compiler makes another program. Fix: {WRITE}")
    if golden["topology"] != plan.topology:
        raise GoldenError(f"a golden plan for {golden['topology']} cannot be compared with a plan for {plan.topology}")
    new, within = from_plan(plan), golden["margins"] if margins is None else margins

    def figure(name: str, key: str, unit: str, cause: str = "") -> Difference:
        old, now = golden[key], new[key]
        return Difference(name, f"{number(old)} {unit}", f"{number(now)} {unit}", _signed(now - old, unit, old), cause)

    found = []
    if _is_far(golden["peak_gib"], new["peak_gib"], within["peak"]):
        found.append(figure("peak memory", "peak_gib", "GiB", _memory_cause(golden, new, plan)))
    found += _collectives(golden, new, within)
    for name in sorted({*golden["loops"], *new["loops"]}):
        was, now = (" + ".join(map(str, g["loops"].get(name, ()))) or "none" for g in (golden, new))
        if was != now:
            found.append(Difference(f"trips of {name}", was, now))
    if _is_far(golden["tflop"], new["tflop"], within["tflop"]):
        causes = _grown(golden["work_tflop"], new["work_tflop"], "TFLOP").values()
        found.append(figure("hardware FLOPs", "tflop", "TFLOP", ", ".join(causes)))
    if _is_far(golden["step_ms"], new["step_ms"], within["step"]):
        found.append(figure("planned step", "step_ms", "ms"))
    if abs(points := new["exposed_share"] - golden["exposed_share"]) > within["exposed_share"]:
        was, now = (f"{g['exposed_share']:.1%} of the step" for g in (golden, new))
        found.append(Difference("exposed communication", was, now, f"{100 * points:+.1f} points", _longest_exposed(plan)))
    known = {_without_numbers(w) for w in golden["warnings"]}
    return found + [Difference("warning", "none", w) for w in new["warnings"] if _without_numbers(w) not in known]


def _without_numbers(warning: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", warning)


def _is_far(old: float, new: float, margin: float) -> bool:
    return abs(new - old) > margin * max(abs(old), abs(new))


def _signed(change: float, unit: str, old: float = 0.0) -> str:
    relative = f" ({100 * change / old:+.1f}%)" if old else ""
    return f"{'+' if change >= 0 else '-'}{number(abs(change))} {unit}{relative}"


def _grown(old: Mapping[str, float], new: Mapping[str, float], unit: str) -> dict[str, str]:
    """Return name -> change of the entries that changed, most first, without those that are small beside the first."""
    changes = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in {*old, *new}}
    ordered = sorted(changes, key=lambda name: (-abs(changes[name]), name))[:LISTED]
    most = abs(changes[ordered[0]]) if ordered else 0.0
    return {n: f"{n} {_signed(changes[n], unit)}" for n in ordered if most and abs(changes[n]) > 0.05 * most}


def _memory_cause(old: Golden, new: Golden, plan: Plan) -> str:
    parts = []
    for name, change in _grown(old["classes_gib"], new["classes_gib"], "GiB").items():
        saved = _grown(old["saved_gib"], new["saved_gib"], "GiB").values() if name == "saved activations" else ()
        lines: dict[str, None] = {}
        if new["classes_gib"].get(name, 0.0) > old["classes_gib"].get(name, 0.0):
            lines = dict.fromkeys(b.source or b.op_name for b in plan.memory.largest if b.kind == name)
        largest = f"the largest from {', '.join([*lines][:LISTED])}" if lines else ""
        cause = ", ".join(saved) or largest
        parts.append(change + (f" [{cause}]" if cause else ""))
    return "; ".join(parts)


def _longest_exposed(plan: Plan) -> str:
    exposed: dict[str, float] = {}
    for c in plan.collectives:
        line = c.source or c.op_name
        exposed[line] = exposed.get(line, 0.0) + c.exposed_ms
    longest = sorted(exposed.items(), key=lambda item: -item[1])[:LISTED]
    return ", ".join(f"{line} {number(ms)} ms" for line, ms in longest if ms)


def _collectives(old: Golden, new: Golden, margins: Mapping[str, float]) -> Iterable[Difference]:
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
        gb = _signed(now["wire_gb"] - was["wire_gb"], "GB", was["wire_gb"])
        launches = now["launches"] - was["launches"]
        yield Difference(name, had, has, f"{gb}, {launches:+,} launches", _line_cause(was["lines"], now["lines"]))


def _line_cause(old: dict[str, list[Any]], new: dict[str, list[Any]]) -> str:
    """Return the lines whose launches or bytes changed. A line that only moved within its file is left out."""
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
    """Return the plans to make for these files. Raises GoldenError for a config with a mistake."""
    out = {}
    for name in names:
        config, machine = SHIPPED[name]
        loaded = launch.load([f"--config={launch.REPO / config}"])
        if loaded.problems:
            raise GoldenError(f"{config}: {'; '.join(map(str, loaded.problems))}")
        where = topology.parse(machine)
        out[name] = parallel.Request(loaded.run, where, config, rates=datasheet(where.gpu, loaded.run.precision))
    return out


def explain(name: str, differences: Sequence[Difference]) -> str:
    """Return the differences as text, such as the message of a failing test."""
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
    """Plan the shipped configs, print what differs from their files, and with `write` write the files anew.

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
            # If a file is written, a change within the margins is printed too.
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
