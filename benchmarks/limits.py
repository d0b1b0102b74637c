"""Compare shipped configs with the shortest step that published kernel rates allow: docs/evidence/limits.md.

    python -m benchmarks.limits [--write]

The limit of a layout is, for one GPU and its share of the tokens,

    limit = matmul FLOPs / best matmul rate + attention FLOPs / best attention rate + memory-bound time + least remat

FLOPs are those of the model (flops.py), with 2.5 times as many for backward attention as for forward. The memory-bound time is
that of the bytes of the optimizer, sums of gradients, norms, SwiGLU and logits. The remat is the least whose saved activations
fit beside the arrays that the step holds anyway (plan/fit.py), without temporaries. The limit has no exposed communication, no
pipeline bubble, and no padding in experts' matmuls.

--write stores the figures of the plans in limits_plans.json and writes the page. Tests compare the figures with tests/golden.
"""

import dataclasses
import datetime
import functools
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import published, studies
from jaxtrain.config import launch
from jaxtrain.config.numbers import percent, rough
from jaxtrain.config.schema import ConfigError, Remat, RunConfig
from jaxtrain.data import loading
from jaxtrain.models import flops
from jaxtrain.plan import fit, rates
from jaxtrain.plan import topology as machines
from jaxtrain.plan.program.op_cost import ATTENTION_BACKWARD
from jaxtrain.plan.result import KernelSummary, Plan
from jaxtrain.plan.search_parallel import Request
from jaxtrain.plan.topology import Topology
from jaxtrain.report.plan_sections import span
from jaxtrain.report.tables import markdown_table
from jaxtrain.step.auto_remat import Activations
from jaxtrain.step.compiler import local_bytes
from jaxtrain.step.program import Program, build_program

PAGE = "docs/evidence/limits.md"
COMMAND = "python -m benchmarks.limits --write"
STORED = Path(__file__).with_name("limits_plans.json")
TABLE = tomllib.loads(Path(__file__).with_name("limits_cases.toml").read_text(encoding="utf-8"))
# Best published rates of single kernels on an H100 or H200, TFLOP/s. Matmuls: the fastest shapes of a search
# (stas00/ml-engineering, Maximum Achievable Matmul FLOPS). Attention: FlashAttention-3, causal, head_dim 128
# (arXiv 2407.08608).
BEST = {"bf16": 794.5, "fp8": 1453.0, "forward": 602.0, "backward": 561.0}
WIDE = ("loss ", "router")  # names of matmuls that precision=fp8 leaves in bfloat16

Work = dict[str, float]  # key of BEST -> TFLOP of one GPU in a step


@dataclasses.dataclass(frozen=True)
class Case:
    """A shipped config on a machine: a table of limits_cases.toml, which explains the fields."""

    name: str
    config: str
    topology: str
    changes: Sequence[str] = ()
    peers: Sequence[str] = ()
    before: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return the name of the case on the page: the config's name and the overrides."""
        return " ".join([self.config.removeprefix("configs/").replace(".py", ""), *self.changes])

    @property
    def machine(self) -> Topology:
        """Return the nodes and GPUs that `topology` names."""
        return machines.parse_topology(self.topology)

    @functools.cached_property
    def run_config(self) -> RunConfig:
        """Return the config with the case's overrides. Raises ConfigError if a key or a value is wrong."""
        loaded = loading.load_config(
            [f"--config={launch.REPO / self.config}", *(f"--config.{change}" for change in self.changes)]
        )
        if loaded.problems:
            raise ConfigError(loaded.problems)
        return loaded.run

    @property
    def request(self) -> Request:
        """Return the request for the case's plan, with published kernel rates instead of a local calibration's."""
        sheet = rates.datasheet(self.machine.gpu, self.run_config.precision)
        return Request(self.run_config, self.machine, self.config, tuple(self.changes), sheet)


CASES = tuple(Case(**table) for table in TABLE["case"])


# ---- Stored figures


def figures_of(request: Request, plan: Plan) -> dict[str, Any]:
    """Return a plan's figures to store, for one GPU and one step. `work`: key of BEST -> TFLOP; `again`: recomputed TFLOP."""
    time = plan.time
    seconds = {
        "step_s": time.step_ms,
        "arithmetic_s": time.gemm_ms + time.attention_ms,
        "memory_s": time.memory_ms,
        "exposed_s": time.exposed_ms,
        "host_s": time.host_exposed_ms,
    }
    figures = {name: float(f"{ms / 1e3:.6g}") for name, ms in seconds.items()}
    figures |= {"allocated_gib": plan.memory.taken_gib, "peak_gib": plan.memory.peak_gib}
    figures |= {"expected_tokens_s": time.expected_tokens_per_s_per_device, "tokens_s": time.tokens_per_s_per_device}
    again = [k for k in plan.kernels if k.op_name.startswith("recompute")]
    work = {"work": _work(request.run, plan.kernels), "again": _work(request.run, again)}
    return {"asked": published.digest(request), **{name: _rounded(value) for name, value in (figures | work).items()}}


def _work(run: RunConfig, kernels: Sequence[KernelSummary]) -> Work:
    found = dict.fromkeys(BEST, 0.0)
    for k in kernels:
        if k.kind == "attention":
            found["backward" if k.op_name.startswith("backward") else "forward"] += k.tflop
        elif k.kind == "gemm":
            found["fp8" if run.precision == "fp8" and not any(w in k.op_name for w in WIDE) else "bf16"] += k.tflop
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items() if v}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value if value is None else float(f"{value:.6g}")


def stored() -> dict[str, Any]:
    """Return the contents of limits_plans.json: date, versions and plans."""
    return json.loads(STORED.read_text(encoding="utf-8"))


# ---- The limit


def best_s(work: Mapping[str, float]) -> float:
    """Return the seconds of this work at the best published rates."""
    return sum(tflop / BEST[kind] for kind, tflop in work.items())


def model_work(run: RunConfig, gpus: int) -> Work:
    """Return the work of the model's matmuls and attention on each GPU in a step, without recomputation."""
    model, tokens = run.model, run.tokens_per_step / gpus / 1e12
    attention = flops.attention(model, run.data.seq_len).causal * model.num_layers
    head = 3 * 2 * model.d_model * model.vocab_size
    layers = flops.per_token(model, run.data.seq_len).causal - 3 * attention - head
    router = 3 * model.num_layers * flops.gemms(model).get("router", 0.0)
    eight = layers - router if run.precision == "fp8" else 0.0
    found = {"bf16": layers + head - eight, "fp8": eight, "forward": attention, "backward": ATTENTION_BACKWARD * attention}
    return {kind: each * tokens for kind, each in found.items()}


def memory_bytes(program: Program, sums_bytes: float) -> float:
    """Return the bytes that optimizer, sums of gradients, norms, SwiGLU and logits read and write on each GPU in a step.

    sums_bytes: bytes of the sums of the microbatches' gradients (fit.LeastMemory).
    """
    run, numerics, p = program.run, program.zero.numerics, program.placement
    m, micro, shards, compute = run.model, run.train.grad_accum, p.activation_shards, numerics.compute.itemsize
    # The update reads and writes the state. The gradients are read for their norm, and for the update.
    weights = sum(local_bytes(a) / a.dtype.itemsize for a in jax.tree.leaves(program.state.params))
    gradient = numerics.sums.itemsize if micro > 1 else numerics.reduce.itemsize
    moved = 2 * local_bytes(program.state) + 2 * weights * gradient
    if micro > 1:  # each sum is read and written, and the microbatch's gradient read
        moved += micro * sums_bytes * (2 + numerics.reduce.itemsize / gradient)
    # Each of two norms accesses two arrays forward and three backward; SwiGLU three and five.
    residual = m.d_model * shards["sequence"] / shards["residual"]
    full = dataclasses.replace(run.moe, capacity_factor=1.0)  # buffers without an empty row
    rows = m.d_ff * flops.expert_rows(m, full, run.mesh) + m.shared_d_ff if m.num_experts else m.d_ff
    layer = 2 * (2 + 3) * residual + (3 + 5) * rows / shards["mlp"]
    layers = m.stacked_layers / shards["layers"] + m.dense_layers + m.mtp_layers
    logits = m.vocab_size / p.size(p.mesh_axes("vocab")) * (1 + m.mtp_layers)
    tokens = run.tokens_per_step / shards["batch"] / shards["sequence"]
    return moved + tokens * (layers * layer * compute + logits * (4 + compute))


def least_remat(program: Program, room: float) -> Remat:
    """Return the remat with the least recomputation whose saved activations take at most `room` bytes; "full" if none does."""
    saved = Activations(program.run.model, program.run.moe, program.layout, program.placement.activation_shards)
    return saved.least_recompute(room - saved.saved_bytes(("residual",))) or Remat("full")  # each layer's input is saved


def repeated(run: RunConfig, gpus: int, remat: Remat) -> Work:
    """Return the work that a remat policy repeats on each GPU in a step."""
    model, tokens = run.model, run.tokens_per_step / gpus / 1e12
    attention = flops.attention(model, run.data.seq_len).causal * model.num_layers
    attended = attention * (remat.policy != "none" and not {"attention_out", "attention_lse"} <= flops.saved_activations(remat))
    matmuls = flops.recompute(model, remat, run.data.seq_len).causal - attended
    return {"fp8" if run.precision == "fp8" else "bf16": matmuls * tokens, "forward": attended * tokens}


@dataclasses.dataclass(frozen=True)
class Row:
    """A case and the stored figures of its plan. Times are seconds of a step."""

    case: Case
    planned: Mapping[str, Any]

    @functools.cached_property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of the limit: matmuls and attention, memory-bound kernels, and remat."""
        run, machine = self.case.run_config, self.case.machine
        program, needs = build_program(run, machines.devices(machine)), fit.least_memory(run, machine)
        moved = memory_bytes(program, needs.gradients_gib * 2**30)
        room = (machine.usable_gib(run.train.memory_fraction) - needs.gib) * 2**30
        return {
            "model": best_s(model_work(run, machine.total)),
            "memory": moved / (rates.datasheet(machine.gpu, run.precision).memory_tb_s * 1e12),
            "remat": min(best_s(repeated(run, machine.total, remat)) for remat in (run.remat, least_remat(program, room))),
        }

    @property
    def limit_s(self) -> float:
        """Return the shortest step time by the limit."""
        return sum(self.parts.values())

    @functools.cached_property
    def gaps(self) -> dict[str, float]:
        """Return cause -> seconds by which it lengthens the planned step. Their sum is the step time minus the limit."""
        p, limit = self.planned, self.parts
        work, again = best_s(p["work"]), best_s(p["again"])
        return {
            "remat": again - limit["remat"],
            "empty work": work - again - limit["model"],
            "kernel rates": p["arithmetic_s"] - work,
            "memory-bound": p["memory_s"] - limit["memory"],
            "exposed": p["exposed_s"],
            "host copies": p["host_s"],
        }

    def tokens_s(self, step_s: float) -> float:
        """Return tokens/s per GPU at this step time."""
        return self.case.run_config.tokens_per_step / self.case.machine.total / step_s

    def mfu(self, step_s: float) -> float:
        """Return the causal MFU at this step time."""
        run = self.case.run_config
        peak = self.case.machine.gpu.peak("bf16") * 1e12
        return flops.per_token(run.model, run.data.seq_len).causal * self.tokens_s(step_s) / peak


def rows(tree: Mapping[str, Any]) -> list[Row]:
    """Return each case with its stored plan. Raises ValueError if a case has no stored plan."""
    if absent := [case.name for case in CASES if case.name not in tree["plans"]]:
        raise ValueError(f"{STORED}: no plan of {', '.join(absent)}. Fix: {COMMAND}")
    return [Row(case, tree["plans"][case.name]) for case in CASES]


# ---- The page

SPEEDS = ("config", "machine", "expected tokens/s/GPU", "roofline", "MFU causal", "limit", "of the limit", "allocated GiB",
          "exposed s", "step s")  # fmt: skip
GAPS = ("config", "planned step s", "limit s", "remat", "empty work", "kernel rates", "memory-bound", "exposed", "host copies")
BEFORE = ("config", "machine", "before", "step s", "now", "exposed s", "now", "peak GiB", "now")
PEERS = ("config", "published run", "machine", "tokens/s/GPU", "MFU causal", "ratio", "roofline here", "MFU here")


def speed_cells(row: Row) -> list[str]:
    """Return the cells of a row under SPEEDS."""
    p, step_s = row.planned, row.planned["step_s"]
    speeds = (span(p["expected_tokens_s"] or None), rough(p["tokens_s"], 4), percent(row.mfu(step_s)))
    limit = rough(row.tokens_s(row.limit_s), 4), percent(row.limit_s / step_s)
    rest = f"{p['allocated_gib']:.1f}", f"{p['exposed_s']:.2f}", f"{step_s:.2f}"
    return [row.case.label, row.case.topology, *speeds, *limit, *rest]


def gap_cells(row: Row) -> list[str]:
    """Return the cells of a row under GAPS: the parts of the gap in percent of the planned step."""
    step_s = row.planned["step_s"]
    return [row.case.label, f"{step_s:.2f}", f"{row.limit_s:.2f}", *(percent(s / step_s) for s in row.gaps.values())]


def before_cells(row: Row) -> list[str]:
    """Return the cells of a row under BEFORE: the figures of an earlier commit or layout beside today's."""
    was, p = row.case.before, row.planned
    exposed = was["exposed_s"] if "exposed_s" in was else was["exposed_share"] * was["step_s"]
    # Golden plans have the peak memory; the page of layouts has allocated memory.
    key = "peak_gib" if "peak_gib" in was else "allocated_gib"
    words = was.get("layout") or f"commit {was['commit']}"
    pairs = ((was["step_s"], p["step_s"], 2), (exposed, p["exposed_s"], 2), (was[key], p[key], 1))
    return [row.case.label, row.case.topology, words, *(f"{value:.{places}f}" for *both, places in pairs for value in both)]


def peer_cells(row: Row, peer: published.Row) -> list[str]:
    """Return the cells of a case and a published run under PEERS."""
    run = peer.run
    theirs = run.sequences * run.seq_len / run.published_s
    ours = rough(row.planned["tokens_s"], 4), percent(row.mfu(row.planned["step_s"]))
    return [row.case.label, run.name, run.machine, rough(theirs, 4), percent(peer.mfu.causal), f"{peer.ratio:.2f}", *ours]


def page(tree: Mapping[str, Any]) -> list[str]:
    """Return the generated lines of the page. tree: result of `stored`."""
    found, peers = rows(tree), {row.run.name: row for row in published.rows(published.stored())}
    return [
        "",
        "## Speeds, memory, and the limit",
        "",
        "Expected, roofline and limit in tokens/s of a GPU; seconds are of a step.",
        "",
        *markdown_table(SPEEDS, [speed_cells(row) for row in found]),
        "",
        "## Parts of the gap",
        "",
        "In percent of the planned step. With the limit they add up to 100%.",
        "",
        *markdown_table(GAPS, [gap_cells(row) for row in found]),
        "",
        "## Before and now",
        "",
        "A commit is the first version, before the rewrite; its golden plan is at today's rates. The other rows are from",
        "[layouts.md](layouts.md), with allocated memory in place of the peak.",
        "",
        *markdown_table(BEFORE, [before_cells(row) for row in found if row.case.before]),
        "",
        "## Beside published runs",
        "",
        "The same or the nearest case. Ratio: planned over published step time of that run, in its own layout, on its own GPUs",
        "([planned_vs_published.md](planned_vs_published.md)). Below 1 the plan is the shorter one: plans are optimistic.",
        "",
        *markdown_table(PEERS, [peer_cells(row, peers[name]) for row in found for name in row.case.peers]),
        *studies.footer(COMMAND, tree["versions"], tree["date"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Plan every case; print the page, or store the figures and write the page. Return the exit code."""
    args = parser().parse_args(argv)
    requests = {case.name: case.request for case in CASES}
    plans = studies.plan_all(requests, **studies.start(args))
    tree = {
        "date": datetime.date.today().isoformat(),
        "versions": next(iter(plans.values())).versions,
        "plans": {name: figures_of(requests[name], plan) for name, plan in plans.items()},
    }
    if args.write:
        STORED.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    studies.publish(PAGE, page(tree), args.write)
    return 0


def parser() -> Any:
    """Return the parser of the command line."""
    return studies.make_parser("limits", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
