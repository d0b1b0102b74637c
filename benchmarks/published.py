"""Compare planned step times with published ones: docs/evidence/planned_vs_published.md, and the expected ranges of plans.

    python -m benchmarks.published [--write]

Each run of published_runs.toml is planned as a run of jaxtrain on the published machine. Model, sequences, batch, mesh and
precision are the published ones; the remat policy is the nearest. So the ratio of planned to published step time has two
causes: the error of the estimate, and the difference between the two programs.

--write stores the plans in published_plans.json, writes the page, and writes jaxtrain/plan/published_ranges.json, from which
plans take their expected step times.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import math
import statistics
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import studies
from benchmarks.studies import MODELS
from jaxtrain.config.numbers import percent
from jaxtrain.config.schema import Model, RunConfig, default_config, resolve
from jaxtrain.models import flops
from jaxtrain.plan import rates
from jaxtrain.plan import topology as machines
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search_cache import relevant_config
from jaxtrain.plan.search_parallel import Request
from jaxtrain.plan.topology import Topology
from jaxtrain.report.tables import markdown_table

PAGE = "docs/evidence/planned_vs_published.md"
COMMAND = "python -m benchmarks.published --write"
DATA = tomllib.loads(Path(__file__).with_name("published_runs.toml").read_text(encoding="utf-8"))
STORED = Path(__file__).with_name("published_plans.json")
LEAST = 3  # least number of runs for a range


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run: a table of published_runs.toml, which explains the fields."""

    name: str
    by: str
    source: str
    model: str
    machine: str
    seq_len: int
    sequences: float
    mesh: Mapping[str, int]
    remat: str
    keep: str
    differences: Sequence[str]
    step_s: float = 0.0
    tokens_s: float = 0.0
    tflops: float = 0.0
    gflop_per_token: float = 0.0
    figure: str = ""
    xla: bool = True
    hbm_tb_s: float = 0.0
    network_gbit_s: float = 0.0
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def published_s(self) -> float:
        """Return the published step time in seconds."""
        tokens = self.sequences * self.seq_len
        if self.step_s:
            return self.step_s
        if self.tokens_s:
            return tokens / self.tokens_s
        each = 1e9 * self.gflop_per_token or flops.per_token(Model(**MODELS[self.model].keys), self.seq_len).full
        return each * tokens / (self.tflops * 1e12)

    @property
    def topology(self) -> Topology:
        """Return the nodes and GPUs of the published run."""
        return machines.parse_topology(self.machine)

    @property
    def kept(self) -> str:
        """Return the remat of the planned run: "full", or the names of the saved activations."""
        return DATA["keep"].get(self.keep, self.keep)

    @functools.cached_property
    def run_config(self) -> RunConfig:
        """Return the run as a config of jaxtrain. Raises ValueError if the config has a mistake."""
        config = default_config()
        config.model.update(MODELS[self.model].keys)
        config.data.update(source="synthetic", packing="none", seq_len=self.seq_len)
        config.train.update(global_batch=round(self.topology.total * self.sequences), grad_accum=1)
        config.mesh.update({"data": 1, "fsdp": 1, **self.mesh})
        config.remat.policy = "full" if self.kept == "full" else "custom"
        if config.remat.policy == "custom":
            config.remat.tensors = ",".join(f"{name}=keep" for name in self.kept.split())
        config.update_from_flattened_dict(self.config)
        run, problems = resolve(config)
        if problems:
            raise ValueError(f"{self.name}: {problems[0]}")
        return run

    @property
    def kind(self) -> str:
        """Return the run's kind (rates.run_kind), by which plans are compared with published runs; "" if it has none."""
        return rates.run_kind(self.run_config, self.topology.gpu, self.topology.total, "cudnn")

    @property
    def request(self) -> Request:
        """Return the request for the run's plan, with published kernel rates instead of a local calibration's."""
        changed = {"memory_tb_s": rates.MEMORY_FRACTION * self.hbm_tb_s} if self.hbm_tb_s else {}
        if self.network_gbit_s:
            changed["network_gb_s"] = rates.NETWORK_FRACTION * self.network_gbit_s / 8
        sheet = rates.datasheet(self.topology.gpu, "bf16")
        return Request(self.run_config, self.topology, self.name, (), dataclasses.replace(sheet, **changed))

    @property
    def reasons(self) -> list[str]:
        """Return the known differences between the published program and the plan, in sentences."""
        found = [DATA["notes"].get(text, text) for text in self.differences]
        if self.network_gbit_s:
            part, rate = f"{100 * rates.NETWORK_FRACTION:g}%", f"{self.network_gbit_s:g} Gb/s"
            found.append(
                f"On the network the plan takes {part} of {rate} for each GPU, undisturbed; a shared fabric gives less."
            )
        return found


RUNS = tuple(Run(**table) for table in DATA["run"])


@dataclasses.dataclass(frozen=True)
class Row:
    """A published run and the stored figures of its plan (`figures_of`)."""

    run: Run
    planned: Mapping[str, Any]

    @property
    def ratio(self) -> float:
        """Return planned over published step time, which is below 1 if the plan is faster."""
        return self.planned["step_s"] / self.run.published_s

    @property
    def mfu(self) -> flops.Flops:
        """Return the MFU of the published run, causal and full, by jaxtrain's counts of FLOPs and its peak of the GPU."""
        run = self.run
        per_token = flops.per_token(run.run_config.model, run.seq_len)
        return per_token * (run.sequences * run.seq_len / run.published_s / (run.topology.gpu.peak("bf16") * 1e12))

    @property
    def gemm_rate(self) -> float:
        """Return the rate of GEMMs (TFLOP/s) at which the planned step time would equal the published one."""
        rest = self.run.published_s - (self.planned["step_s"] - self.planned["gemm_s"])
        return self.planned["gemm_tflop"] / rest if rest > 0 else math.inf


def digest(request: Request) -> str:
    """Return a digest of the config, the machine and the rates of a plan.

    Keys at their defaults are left out, so that a new key does not change the digests of stored plans.
    """
    chosen = dataclasses.asdict(request.rates) if request.rates else None
    defaults = RunConfig().flat
    keys = {k: v for k, v in relevant_config(request.run, request.topology).items() if v != defaults[k]}
    facts = [keys, request.topology.name, chosen]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def figures_of(request: Request, plan: Plan) -> dict[str, Any]:
    """Return a plan's figures to store, for one GPU and one step."""
    backward = sum(k.ms for k in plan.kernels if k.kind == "attention" and k.op_name.startswith("backward"))
    figures = {
        "step_s": plan.time.step_ms / 1e3,
        "gemm_s": plan.time.gemm_ms / 1e3,
        "attention_forward_s": (plan.time.attention_ms - backward) / 1e3,
        "attention_backward_s": backward / 1e3,
        "memory_s": plan.time.memory_ms / 1e3,
        "exposed_s": plan.time.exposed_ms / 1e3,
        "gemm_tflop": sum(k.tflop for k in plan.kernels if k.kind == "gemm"),
        "mfu_causal": plan.time.mfu_causal,
        "mfu_full": plan.time.mfu_full,
        "taken_gib": plan.memory.taken_gib,
        "usable_gib": plan.memory.usable_gib,
    }
    return {"asked": digest(request), **{name: float(f"{value:.5g}") for name, value in figures.items()}}


def stored() -> dict[str, Any]:
    """Return the contents of published_plans.json: date, versions and plans."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def rows(tree: Mapping[str, Any]) -> list[Row]:
    """Return each published run with its stored plan. Raises ValueError if a run has no stored plan."""
    if absent := [run.name for run in RUNS if run.name not in tree["plans"]]:
        raise ValueError(f"{STORED}: no plan of {', '.join(absent)}. Fix: {COMMAND}")
    return [Row(run, tree["plans"][run.name]) for run in RUNS]


def rows_by_kind(found: Iterable[Row]) -> dict[str, list[Row]]:
    """Return kind of run -> rows whose ratios define its range.

    If a kind has at least LEAST rows of XLA programs, these rows define its range, else all its rows. A kind with fewer than
    LEAST rows is left out.
    """
    kinds: dict[str, list[Row]] = {}
    for row in found:
        if row.run.kind:
            kinds.setdefault(row.run.kind, []).append(row)
    for kind, of_kind in kinds.items():
        same = [row for row in of_kind if row.run.xla]
        kinds[kind] = same if len(same) >= LEAST else of_kind
    return {kind: chosen for kind, chosen in kinds.items() if len(chosen) >= LEAST}


def spread(found: Iterable[Row]) -> tuple[float, float]:
    """Return (lowest, highest) ratio of planned to published step time."""
    ratios = [row.ratio for row in found]
    return min(ratios), max(ratios)


def mean(found: Iterable[Row]) -> float:
    """Return the geometric mean of the ratios of planned to published step time."""
    return statistics.geometric_mean(row.ratio for row in found)


def ranges(found: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the contents of published_ranges.json.

    `ranges`: kind of run -> `spread` of its rows. `compilers`: kind of run -> text that names the compilers of its rows.
    """
    kinds = rows_by_kind(found)
    return {
        "ranges": {kind: spread(chosen) for kind, chosen in kinds.items()},
        "compilers": {kind: programs(chosen) for kind, chosen in kinds.items()},
    }


def programs(found: Iterable[Row]) -> str:
    """Return a text that names the compilers of the rows' programs."""
    texts = {
        frozenset({True}): "XLA programs",
        frozenset({False}): "programs of other compilers than XLA",
        frozenset({True, False}): "programs of XLA and of other compilers",
    }
    return texts[frozenset(row.run.xla for row in found)]


# ---- The page

KINDS = ("kind", "runs", "programs", "planned over published", "geometric mean")
HEADINGS = ("run", "by", "GPUs", "tokens x sequences", "published s", "planned s", "ratio", "MFU published", "MFU planned")


def kind_cells(kind: str, chosen: Sequence[Row]) -> list[str]:
    """Return the cells of a kind of run under KINDS."""
    of_xla = sum(row.run.xla for row in chosen)
    compilers = "XLA, cuDNN attention" if of_xla == len(chosen) else f"all; too few ({of_xla}) are of XLA"
    return [kind, str(len(chosen)), compilers, "{:.2f} to {:.2f}".format(*spread(chosen)), f"{mean(chosen):.2f}"]


def cells(row: Row) -> list[str]:
    """Return the cells of a run under HEADINGS. MFU is causal / full."""
    run, p = row.run, row.planned
    seconds = (f"{run.published_s:.3f}", f"{p['step_s']:.3f}", f"{row.ratio:.2f}")
    mfu = f"{percent(row.mfu.causal)} / {percent(row.mfu.full)}", f"{percent(p['mfu_causal'])} / {percent(p['mfu_full'])}"
    return [run.name, run.by, run.machine, f"{run.seq_len} x {run.sequences:g}", *seconds, *mfu]


def section(row: Row) -> list[str]:
    """Return the lines about one run: its layout, its plan, and the likely causes of the difference."""
    run, p, peak = row.run, row.planned, row.run.topology.gpu.peak("bf16")
    mesh = " ".join(f"{axis}={size}" for axis, size in run.mesh.items())
    policy = run.kept if run.kept == "full" else f"keep {run.kept}"
    figure = run.figure or (f"{run.tokens_s:,} tokens/s/GPU" if run.tokens_s else "")
    attention = p["attention_forward_s"] + p["attention_backward_s"]
    parts = (("GEMMs", p["gemm_s"]), ("attention", attention), ("memory-bound", p["memory_s"]))
    times = ", ".join(
        f"{name} {seconds * 1e3:,.0f} ms" for name, seconds in (*parts, ("exposed communication", p["exposed_s"]))
    )
    fits = p["taken_gib"] <= p["usable_gib"]
    return [
        f"### {run.name}: {row.ratio:.2f}",
        "",
        f"{run.by}: <{run.source}>. Mesh {mesh}; remat `{run.remat}`, planned as `{policy}`."
        + (f" The figure as published: {figure}." if figure else ""),
        "",
        f"Planned: {times}; memory {p['taken_gib']:.1f} of {p['usable_gib']:.1f} GiB."
        + ("" if fits else " Ours would not fit there in this layout; the time is that of the program."),
        "",
        f"- GEMMs: {p['gemm_s'] / p['step_s']:.0%} of the planned step, at {p['gemm_tflop'] / p['gemm_s']:.0f} TFLOP/s. All of "
        f"the difference is explained by {row.gemm_rate:.0f} TFLOP/s, {row.gemm_rate / peak:.0%} of the bfloat16 peak.",
        *(f"- {line}" for line in run.reasons),
        "",
    ]


def page(tree: Mapping[str, Any]) -> list[str]:
    """Return the generated lines of the page. tree: result of `stored`."""
    found = rows(tree)
    same = [row for row in found if row.run.xla and row.run.run_config.precision == "bf16"]
    low, high = spread(same)
    others = "{:.2f} to {:.2f}".format(*spread(row for row in found if not row.run.xla))
    slowest, fastest = (end(row.gemm_rate for row in same) for end in (min, max))
    return [
        "",
        "## The runs",
        "",
        "For XLA programs in bfloat16 with cuDNN attention, as ours is, planned step times are",
        f"**{low:.2f} to {high:.2f}** of the published ones (geometric mean {mean(same):.2f}): plans are optimistic.",
        f"GEMMs at {slowest:.0f} to {fastest:.0f} TFLOP/s instead of 720 would explain all of the difference. For programs of",
        f"other compilers the ratio is {others}, which says more about the programs than about the estimate.",
        "",
        *markdown_table(KINDS, [kind_cells(kind, chosen) for kind, chosen in rows_by_kind(found).items()]),
        "",
        *markdown_table(HEADINGS, [cells(row) for row in found]),
        "",
        "## Run by run",
        "",
        *(line for row in found for line in section(row)),
        "## Not comparable",
        "",
        "Published too, and not planned, since a setting that the step time depends on is not known:",
        "",
        *(f"- {run['name']} (<{run['source']}>): {run['reason']}." for run in DATA["not_comparable"]),
        *studies.footer(COMMAND, tree["versions"], tree["date"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Plan every run; print the page, or write the page, the plans and the ranges. Return the exit code."""
    args = parser().parse_args(argv)
    requests = {run.name: run.request for run in RUNS}
    plans = studies.plan_all(requests, **studies.start(args))
    tree = {
        "date": datetime.date.today().isoformat(),
        "versions": next(iter(plans.values())).versions,
        "plans": {name: figures_of(requests[name], plan) for name, plan in plans.items()},
    }
    if args.write:
        STORED.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        rates.COMPARED.write_text(json.dumps(ranges(rows(tree)), indent=1) + "\n", encoding="utf-8")
    studies.publish(PAGE, page(tree), args.write)
    return 0


def parser() -> Any:
    """Return the parser of the command line."""
    return studies.make_parser("published", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
