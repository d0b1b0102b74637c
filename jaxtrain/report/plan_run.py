"""The section of a whole run: what it costs, and how often it saves."""

from jaxtrain.config.counts import short_count
from jaxtrain.config.durations import duration
from jaxtrain.config.numbers import number, plural, rough
from jaxtrain.plan.cost import Cost
from jaxtrain.report.tables import Listing, Section, text_table


def run_section(cost: Cost | None) -> list[Section]:
    """Return the section of a whole run; [] without one."""
    if cost is None:
        return []
    names = ("shortest", "longest") if len(cost.ends) > 1 else ("lower bound",)
    rows = [
        ("days", [rough(end.days) for end in cost.ends]),
        ("GPU-hours", [rough(end.gpu_hours) for end in cost.ends]),
        ("money", [rough(end.money) for end in cost.ends if end.money is not None]),
        ("failures", [rough(end.failures) for end in cost.ends]),
        ("lost by failures", [duration(end.failures_s) for end in cost.ends]),
        ("lost by saves", [duration(end.saves_s) for end in cost.ends]),
    ]
    title = f"{short_count(cost.tokens)} tokens on {plural(cost.gpus, 'GPU')}, with failures and saves"
    table = text_table(title, ("", *names), [(name, *cells) for name, cells in rows if cells])
    end = next(iter(cost.ends))
    bound = "so that each write ends before the next" if cost.write_s > cost.daly_s else "by Daly's formula"
    config_interval = f"every {cost.config_every_steps:,} steps" if cost.config_every_steps else "only at the end"
    lost = "the run has no end" if cost.config_lost_s is None else f"failures and saves lose {duration(cost.config_lost_s)}"
    lines = [
        f"{cost.steps:,} steps; this config has {cost.config_steps:,}",
        f"a checkpoint has {number(cost.checkpoint_bytes / 1e9)} GB, a restart takes {duration(cost.restart_s)}, and a failure "
        f"comes every {duration(cost.between_failures_s)}",
        f"a save every {cost.every_steps:,} steps, {duration(cost.every_steps * end.step_s)}, loses least, {bound}",
        f"intervals for copies of d and failures M apart: {duration(cost.young_s)} by Young 1974, sqrt(2 d M); "
        f"{duration(cost.daly_s)} by Daly 2006, sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d; at least a write",
        f"with saves {config_interval}, as in this config, {lost}; with these, {duration(end.failures_s + end.saves_s)}",
    ]
    options = f"--config.train.steps={cost.steps} --config.checkpoint.every_steps={cost.every_steps}"
    used = text_table("Assumptions", ("", "value", "source"), cost.assumptions)
    return [Section("The whole run", [table, Listing(lines), used, "Options for this run:", options])]
