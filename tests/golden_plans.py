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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import finetuning
from jaxtrain.config import hardware, launch
from jaxtrain.config.numbers import GB_PER_GIB
from jaxtrain.data import loading
from jaxtrain.plan import FOLDER as CACHE
from jaxtrain.plan import search_parallel, topology
from jaxtrain.plan.rates import datasheet
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search_cache import PlanCache
from jaxtrain.runtime.startup import start_jax

FOLDER = launch.REPO / "tests" / "golden"
WRITE = "python tests/golden_plans.py --write"
FORMAT = 1
# Largest relative change of a figure; for the exposed share, the largest absolute change. The scheduler may reorder
# instructions, but may not change bytes and FLOPs. Launches and trips must be equal. Collectives below `least_gb` a step are
# left out.
MARGINS = {"peak": 0.01, "wire": 0.01, "tflop": 0.01, "step": 0.02, "exposed_share": 0.01, "least_gb": 0.001}
NO_MARGINS = dict.fromkeys(MARGINS, 0.0)
LISTED = 4  # most entries of a table that one difference lists
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
    "qwen3_next_80b_a3b": ("configs/qwen3_next_80b_a3b.py", "h200:8x8"),
    "qwen3_next_80b_a3b_on_8": ("configs/qwen3_next_80b_a3b.py:node", "h200:8"),
    "qwen3_5_small": ("configs/qwen3_5_small.py:gpus=1", "h100:1"),
    "gpt_oss_20b": ("configs/gpt_oss_20b.py", "h200:8"),
    "deepseek_v3": ("configs/deepseek_v3.py", "h200:8x16"),
    **{case.name: (case.config, case.machine) for case in finetuning.CASES if case.fits},
}

Golden = dict[str, Any]  # the contents of a golden file


class GoldenError(ValueError):
    """A golden plan cannot be read, made, or compared with another plan."""


# ---- The files


def path(name: str) -> Path:
    """Return the file of a golden plan."""
    return FOLDER / f"{name}.json"


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
        moved.append({"kind": kind, "dtype": dtype, "axis": axis, **group, "wire_gb": wire_gb, "lines": lines})
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
    """Load a golden plan. Raises GoldenError if it has another format."""
    golden = json.loads(file.read_text(encoding="utf-8"))
    if golden["format"] != FORMAT:
        raise GoldenError(f"{file}: format {golden['format']!r}, not {FORMAT}. Fix: {WRITE}")
    return golden


# ---- Comparing


# Figure -> (its margin, the tables that divide it)
FIGURES = {"peak_gib": ("peak", ("classes_gib", "saved_gib")), "tflop": ("tflop", ("work_tflop",)), "step_ms": ("step", ())}


def compare(golden: Golden, plan: Plan, margins: Mapping[str, float] | None = None) -> list[str]:
    """Return a line for each figure of a plan that differs from its golden plan beyond the margins, and each new warning.

    Args:
        margins: as MARGINS; None for the margins that the golden plan stores.

    Raises:
        GoldenError: the plans have different jaxlibs or topologies.
    """
    new, within = from_plan(plan), golden["margins"] if margins is None else margins
    for key in ("jaxlib", "topology"):
        if golden[key] != new[key]:
            raise GoldenError(f"{key}: {new[key]}, golden has {golden[key]}. Another makes another program. Fix: {WRITE}")
    found = []
    for key, (margin, tables) in FIGURES.items():
        if _is_far(golden[key], new[key], within[margin]):
            found.append(_difference(key, golden[key], new[key], *((golden[table], new[table]) for table in tables)))
    if abs(new["exposed_share"] - golden["exposed_share"]) > within["exposed_share"]:
        found.append(_difference("exposed_share", golden["exposed_share"], new["exposed_share"]))
    for name in sorted({*golden["loops"], *new["loops"]}):
        was, now = (g["loops"].get(name, []) for g in (golden, new))
        if was != now:
            found.append(_difference(f"loops.{name}", was, now))
    known = {_without_numbers(w) for w in golden["warnings"]}
    warnings = [f"new warning: {w}" for w in new["warnings"] if _without_numbers(w) not in known]
    return [*found, *_collectives(golden, new, within), *warnings]


def _collectives(old: Golden, new: Golden, margins: Mapping[str, float]) -> Iterable[str]:
    """Yield the collectives whose launches or bytes changed, and the lines that they come from."""
    none = {"launches": 0, "wire_gb": 0.0, "lines": {}}
    before, after = ({f"{c['kind']} {c['dtype']} over {c['axis']}": c for c in g["collectives"]} for g in (old, new))
    for name in sorted({*before, *after}):
        was, now = before.get(name, none), after.get(name, none)
        if max(was["wire_gb"], now["wire_gb"]) <= margins["least_gb"]:
            continue
        if was["launches"] == now["launches"] and not _is_far(was["wire_gb"], now["wire_gb"], margins["wire"]):
            continue
        had, has = (f"{c['launches']} launches with {c['wire_gb']} GB" for c in (was, now))
        yield _difference(name, had, has, (was["lines"], now["lines"]))


def _difference(figure: str, old: Any, new: Any, *tables: tuple[Mapping[str, Any], Mapping[str, Any]]) -> str:
    """Return a figure's change as text, with the entries of its tables (old, new) that changed most."""
    parts = [f"{figure}: {new}, golden has {old}"]
    for before, after in tables:
        changed = {name: abs(_size(after.get(name, 0.0)) - _size(before.get(name, 0.0))) for name in {*before, *after}}
        most = sorted(changed, key=lambda name: (-changed[name], name))[:LISTED]
        parts += [f"{name}: {after.get(name, 0)}, before {before.get(name, 0)}" for name in most if changed[name]]
    return "; ".join(parts)


def _size(entry: Any) -> float:
    """Return the figure of a table's entry: a number, or [launches, GB] of a line."""
    return sum(entry) if isinstance(entry, list) else entry


def _without_numbers(warning: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", warning)


def _is_far(old: float, new: float, margin: float) -> bool:
    return abs(new - old) > margin * max(abs(old), abs(new))


# ---- The command


def requests(names: Iterable[str]) -> dict[str, search_parallel.Request]:
    """Return name -> request to `plan_many`, for golden plans."""
    out = {}
    for name in names:
        config, machine = SHIPPED[name]
        run, where = loading.load_config([f"--config={launch.REPO / config}"]).run, topology.parse_topology(machine)
        out[name] = search_parallel.Request(run, where, config, rates=datasheet(where.gpu, run.precision))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 if all plans agree or are written."""
    parser = argparse.ArgumentParser("python tests/golden_plans.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SHIPPED))
    parser.add_argument("--write", action="store_true", help="write the files anew")
    args = parser.parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    start_jax(hardware.probe())
    codes = [0]

    def report(name: str, outcome: search_parallel.PlanOutcome) -> None:
        if outcome.plan is None:
            print(f"{name}: no plan, {outcome.kind}: {outcome.reason}", flush=True)
            codes.append(1)
            return
        try:
            # With --write, a change within the margins is printed too.
            differences = compare(load(path(name)), outcome.plan, NO_MARGINS if args.write else None)
        except (GoldenError, OSError) as error:
            differences = [str(error)]
        print("\n- ".join([f"{name}: {len(differences)} differences", *differences]), flush=True)
        codes.append(1 if differences and not args.write else 0)
        if args.write:
            save(from_plan(outcome.plan), path(name))

    search_parallel.plan_many(requests(args.names or SHIPPED), on_done=report, cache=PlanCache(CACHE))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
