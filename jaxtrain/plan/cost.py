"""A whole run by its plan: days, GPU hours, money, failures, and the interval of saves that loses least time.

A save stops the steps only while it copies the state to pinned host memory (jaxtrain/train/snapshot.py). The copies are written
beside the next steps (jaxtrain/checkpoint/manager.py), and the save after it waits for that. So the cost of a save is the time
of its copies, and saves are at least the time of a write apart.
"""

import dataclasses
import fractions
import math

from jaxtrain.config.numbers import number
from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.plan.result import Plan
from jaxtrain.plan.topology import Topology
from jaxtrain.runtime.service import HEARTBEAT_S
from jaxtrain.runtime.watchdog import parse_budgets

FAILURES = 0.47  # unexpected interruptions per 1,000 GPU-days
REPORT = "Llama 3's report, arXiv 2407.21783"
STORAGE_GB_S = 1.0  # of each node
START_S = 180.0  # from the end of an attempt to the first compilation of the next
HOUR, DAY = 3600.0, 86400.0


@dataclasses.dataclass(frozen=True)
class CostOptions:
    """What the command line says of a run. None: the default, or of the price: no money is counted.

    Attributes:
        storage_gb_s: GB/s of all nodes together at which a save reaches the storage, as the log of a run prints it.
    """

    tokens: int
    price: float | None = None
    failures: float | None = None
    storage_gb_s: float | None = None


@dataclasses.dataclass(frozen=True)
class RunEstimate:
    """A run at one end of the range of its step time."""

    step_s: float
    days: float
    gpu_hours: float
    money: float | None
    failures: float
    failures_s: float  # lost by failures: repeated steps and restarts
    saves_s: float  # lost by copies of saves


@dataclasses.dataclass(frozen=True)
class Cost:
    """A whole run. ends: at the shortest and the longest expected step time; only one: at the roofline, a lower bound."""

    tokens: int
    steps: int
    gpus: int
    ends: tuple[RunEstimate, ...]
    checkpoint_bytes: int
    restart_s: float
    between_failures_s: float
    young_s: float
    daly_s: float
    write_s: float
    every_steps: int  # between saves, to lose least
    config_steps: int
    config_every_steps: int
    config_lost_s: float | None  # by failures and saves with the config's own interval, at the first end; None: without end
    assumptions: tuple[tuple[str, str, str], ...]  # what, value, source


def young_interval(save_s: float, between_s: float) -> float:
    """Return sqrt(2 d M), the best time between saves that take d, with failures M apart (Young 1974, CACM 17(9), 530)."""
    return math.sqrt(2 * save_s * between_s)


def daly_interval(save_s: float, between_s: float) -> float:
    """Return the best time between saves to higher order (Daly 2006, Future Generation Computer Systems 22, 303).

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2M, else M.
    """
    ratio = save_s / (2 * between_s)
    return young_interval(save_s, between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s if ratio < 1 else between_s


def wall_time(solve_s: float, interval_s: float, save_s: float, restart_s: float, between_s: float) -> float:
    """Return the expected time of a run, M exp(R / M) (exp((t + d) / M) - 1) T / t (Daly 2006)."""
    m = between_s
    try:
        return m * math.exp(restart_s / m) * math.expm1((interval_s + save_s) / m) * solve_s / interval_s
    except OverflowError:
        return math.inf


def estimate_cost(plan: Plan, run: RunConfig, topology: Topology, checkpoint_bytes: int, options: CostOptions) -> Cost:
    """Return the whole run of a plan. Raises ConfigError if failures follow so fast that it has no end."""
    gpus, ramp = topology.total, run.ramp
    steps = ramp.steps_for(fractions.Fraction(options.tokens * ramp.full, plan.tokens_per_step))
    full_steps = ramp.before(steps) / ramp.full  # of the plan's batch, with the same sequences
    rate, storage = options.failures or FAILURES, options.storage_gb_s or STORAGE_GB_S * topology.nodes
    copy_s = checkpoint_bytes / gpus / (plan.rates.host_gb_s * 1e9)
    write_s = checkpoint_bytes / (storage * 1e9)
    restart_s = HEARTBEAT_S + START_S + plan.compile_s + write_s
    between_s = 1000 * DAY / (rate * gpus)
    lost_s = restart_s + write_s  # besides repeated steps: a failure during a write goes back to the save before it
    if between_s < lost_s:
        rule = f"a failure every {number(between_s)} s, which costs {number(lost_s)} s and repeated steps: the run has no end"
        if options.failures:
            raise ConfigError([Problem("--failures-per-1000-gpu-days", rate, rule, f"The default is {FAILURES}.")])
        enough = f"{2 * storage * lost_s / between_s:.2g}"  # a write is most of what a failure costs, or no rate is enough
        raise ConfigError([Problem("--storage-gb-s", storage, rule, f"Set {enough} or more, or fewer GPUs.")])
    step_s = [ms / 1e3 for ms in plan.time.expected_step_ms or (plan.time.step_ms,)]
    best_s = daly_interval(copy_s, between_s)
    every = min(steps, max(1, math.ceil(write_s / step_s[0]), round(best_s / step_s[0])))

    def estimate_end(step_s: float, every: int) -> RunEstimate:
        interval_s, solve_s = min(every, steps) * step_s, full_steps * step_s
        save_s = copy_s + max(0.0, write_s - interval_s)
        all_s = wall_time(solve_s, interval_s, save_s, lost_s, between_s)
        saves_s, gpu_hours = solve_s / interval_s * save_s, all_s / HOUR * gpus
        money = gpu_hours * options.price if options.price else None
        failed_s = all_s - solve_s - saves_s
        return RunEstimate(step_s, all_s / DAY, gpu_hours, money, all_s / between_s, failed_s, saves_s)

    config_estimate = estimate_end(step_s[0], run.checkpoint.every_steps or steps)
    kind = f"the expected range, by published runs ({plan.kind})" if plan.time.expected_step_ms else "roofline: a lower bound"
    by_report = f"{REPORT}, table 5: 419 unexpected interruptions in 54 days on 16,384 GPUs"
    by_storage = f"{STORAGE_GB_S:g} GB/s a node, as in {REPORT}, section 3.3.1: 2 TB/s for 2,048 nodes"
    hang_s = parse_budgets(run.train.timeouts)[0]["step"]
    assumptions = (
        *([("price of a GPU-hour", f"{options.price:g}", "--price-per-gpu-hour")] if options.price else []),
        ("step", f"{' to '.join(f'{each:.4g}' for each in step_s)} s", kind),
        (
            "independent failures per 1,000 GPU-days",
            f"{rate:g}",
            "--failures-per-1000-gpu-days" if options.failures else by_report,
        ),
        ("storage, all nodes together", f"{storage:g} GB/s", "--storage-gb-s" if options.storage_gb_s else by_storage),
        ("checkpoint", f"{checkpoint_bytes:,} bytes", "the tensors of this config's parameters and optimizer"),
        ("copies of a save", f"{copy_s:.2g} s", f"no step runs; {plan.rates.host_gb_s:.3g} GB/s from each GPU to its host"),
        ("write or read of a checkpoint", f"{write_s:.3g} s", "by the storage; steps run beside a write, the next save waits"),
        ("lost process noticed", f"{HEARTBEAT_S} s", f"jaxtrain/runtime/service.py; a hang after {hang_s:g} s: train.timeouts"),
        ("start of an attempt", f"{START_S:g} s", "not measured: processes, JAX, NCCL; no wait for another node"),
        ("compilation", f"{plan.compile_s:.3g} s", "this plan's, on this machine; GPUs also tune kernels"),
        ("left out", "", "evaluations, samples, waits for data, slow nodes, planned stops, other waits at a save"),
    )
    return Cost(
        tokens=options.tokens,
        steps=steps,
        gpus=gpus,
        ends=tuple(estimate_end(each, every) for each in step_s),
        checkpoint_bytes=checkpoint_bytes,
        restart_s=restart_s,
        between_failures_s=between_s,
        young_s=young_interval(copy_s, between_s),
        daly_s=best_s,
        write_s=write_s,
        every_steps=every,
        config_steps=run.train.steps,
        config_every_steps=run.checkpoint.every_steps,
        config_lost_s=config_estimate.failures_s + config_estimate.saves_s if math.isfinite(config_estimate.days) else None,
        assumptions=assumptions,
    )
