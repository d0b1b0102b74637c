"""Plan well-known models on 1 to 128 GPUs: docs/evidence/what_fits.md.

    python -m benchmarks.what_fits [--write]

A row is one model on one machine. It has the fastest layout that a search of a few plans finds (plan/search.py), or the memory
that is missing. Moments are float32. Only if nothing fits, the search tries narrower dtypes of the state.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import studies
from benchmarks.studies import MODELS, Model
from jaxtrain.config.numbers import percent, rough
from jaxtrain.config.schema import ConfigError, RunConfig, default_config, resolve
from jaxtrain.models import flops
from jaxtrain.plan import topology as machines
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search import SearchResult, search
from jaxtrain.plan.topology import Topology
from jaxtrain.report.plan_sections import mesh, span
from jaxtrain.report.tables import markdown_table

PAGE = "docs/evidence/what_fits.md"
COMMAND = "python -m benchmarks.what_fits --write"
ROWS = ("llama2_7b", "llama2_13b", "llama_30b", "llama2_70b", "llama_175b", "llama_180b", "llama3_405b")
MACHINES = ("h200:1", "h200:2", "h200:4", "h200:8", "h200:8x2", "h200:8x4", "h200:8x16")
MOST = 4  # plans of a row: the default layout, the first of another kind, and others until one fits or is faster


def base(model: Model, topology: Topology) -> RunConfig:
    """Return the run that the search changes: one sequence per GPU, in one microbatch."""
    config = default_config()
    config.model.update(model.keys)
    config.data.seq_len = model.seq_len
    config.train.update(global_batch=topology.total, grad_accum=1)
    config.remat.policy = "auto"
    run, problems = resolve(config)
    if problems:
        raise ConfigError(problems)
    return run


def fill(model: Model, machine: str, **how: Any) -> SearchResult:
    """Return the row of a model on a machine. how: arguments of `search`."""
    topology = machines.parse_topology(machine)
    found = search(base(model, topology), model.name, topology, most=MOST, **how)
    best = found.best
    print(f"{model.name} on {machine}: {' '.join(best.changes) or 'default' if best else why_not(found)}", flush=True)
    return found


def why_not(found: SearchResult) -> str:
    """Return the reason why a search found no layout that fits, from GiB of a GPU."""
    needs = f"at least {found.least_gib:,.0f} GiB a GPU"
    for c in found.tried[:1]:  # the smallest plan; if there is none, a failure
        if c.plan is None:
            return f"{c.outcome.kind}: {c.outcome.reason}" if c.outcome else ""
        needs = f"compiled, {c.plan.memory.taken_gib:,.0f} GiB a GPU"
    return f"does not fit: {needs}, {found.usable_gib:.0f} GiB usable"


# ---- The page

HEADINGS = ("GPUs", "layout", "moments", "weights", "moments GiB", "gradients", "activations", "peak", "4 x bf16", "16 B",
            "expected tokens/s/GPU", "roofline", "MFU", "scaling")  # fmt: skip


def cells(found: SearchResult, first: Plan | None) -> list[str]:
    """Return the cells of a row under HEADINGS. first: plan for the smallest machine on which this model fits."""
    name, parameters = found.topology.name, flops.parameters(found.run.model)["total"]
    rules = [f"{parameters * each / found.topology.total / 2**30:.1f}" for each in (8, 16)]
    best = found.best
    if best is None or best.plan is None:
        return [name, why_not(found), *("-",) * 6, *rules, *("-",) * 4]
    held, time = best.plan.memory.by_class, best.plan.time
    moments = held.get("first moment", 0.0) + held.get("second moment", 0.0)
    rest = (held.get(kind, 0.0) for kind in ("gradients", "saved activations"))
    sizes = [f"{size:.1f}" for size in (held.get("parameters", 0.0), moments, *rest, best.plan.memory.peak_gib)]
    saved = best.plan.kept.partition(" keeps ")[2].replace(",", "")  # chosen by remat.policy=auto
    speed = time.tokens_per_s_per_device
    speeds = [span(time.expected_tokens_per_s_per_device), rough(speed, 4), percent(time.mfu_causal)]
    scaling = percent(speed / first.time.tokens_per_s_per_device) if first else "-"
    others = [change for change in best.changes if not change.startswith(("mesh.", "dtypes."))]
    layout = f"{' '.join([mesh(best.plan), *others])}; {f'keep {saved}' if saved else 'remat full'}"
    stored = best.run.dtypes.m + (f", weights {best.run.dtypes.params}" if best.run.dtypes.params != "f32" else "")
    return [name, layout, stored, *sizes, *rules, *speeds, scaling]


def section(model: Model, found: Sequence[SearchResult]) -> list[str]:
    """Return the lines about one model, from its rows."""
    m = found[0].run.model
    first = next((row.best.plan for row in found if row.best), None)
    return [
        "",
        f"## {model.name}",
        "",
        f"{flops.parameters(m)['total'] / 1e9:.1f} B parameters, {m.num_layers} layers of {m.d_model}, {m.num_heads} heads "
        f"({m.num_kv_heads} for keys and values) of {m.head_dim}, feed-forward {m.d_ff}, vocabulary {m.vocab_size:,}; "
        f"sequences of {model.seq_len} ({model.source}).",
        "",
        *markdown_table(HEADINGS, [cells(row, first) for row in found]),
    ]


def page(found: Mapping[str, Sequence[SearchResult]]) -> list[str]:
    """Return the generated lines of the page. found: key of MODELS -> rows."""
    return [*(line for name, rows in found.items() for line in section(MODELS[name], rows)), *studies.footer(COMMAND)]


def main(argv: Sequence[str] | None = None) -> int:
    """Plan the table, and print or write the page. Return the exit code."""
    args = parser().parse_args(argv)
    how = studies.start(args)
    found = {name: [fill(MODELS[name], machine, **how) for machine in MACHINES] for name in ROWS}
    studies.publish(PAGE, page(found), args.write)
    return 0


def parser() -> Any:
    """Return the parser of the command line."""
    return studies.make_parser("what_fits", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
