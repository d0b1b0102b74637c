"""Which curves a report has: of one run several quantities in a chart, of several runs one quantity, a colour for each run."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.page.curves import COLUMNS, LEAST_COLUMNS, Curve, Limit, Picture, Spread, draw
from jaxtrain.report.columns import Columns
from jaxtrain.report.figures import smoothed
from jaxtrain.report.run import Run

MANY = 8  # runs on a page: as many colours as the page tells apart
LOG_FROM = 4.0  # largest over smallest of a loss, from which on its axis counts in powers of ten
LOG_NORM = 20.0
GPU_CHARTS = (
    ("power_w", "Power of each GPU, W", 1.0),
    ("temperature_c", "Temperature, °C", 1.0),
    ("utilization", "Utilisation, %", 100.0),
    ("throttled", "Throttled, % of the time", 100.0),
    ("sm_clock_mhz", "SM clock, MHz", 1.0),
    ("in_use_gib", "Memory in use of each GPU's pool, GiB", 1.0),
)


def colour(i: int) -> str:
    """CSS colour of the i-th run, or of the i-th curve of one."""
    return f"var(--c{i % MANY + 1})"


def shown(pictures: Sequence[Picture], runs: int = 1) -> str:
    """Charts beside each other, without those that have nothing to draw."""
    columns = max(LEAST_COLUMNS, COLUMNS // runs)
    found = [text for text in (draw(p, columns) for p in pictures) if text]
    return f'<div class="figures">{"".join(found)}</div>' if found else ""


def _scaled(values: Sequence[float | None], scale: float) -> list[float | None]:
    return [None if v is None else v * scale for v in values] if scale != 1.0 else list(values)


def _curves(runs: Sequence[Run], keys: Mapping[str, str], scale: float) -> list[Curve]:
    """Of one run a curve for each key, by its name; of several the first key, by the runs' names."""
    if len(runs) == 1:
        t = runs[0].train
        named = [(key, name) for key, name in keys.items() if t.known(key)]
        return [Curve(name, t.steps, _scaled(t[key], scale), colour(i)) for i, (key, name) in enumerate(named)]
    key = next(iter(keys))
    return [Curve(r.name, r.train.steps, _scaled(r.train[key], scale), colour(i)) for i, r in enumerate(runs)]


def _spans(values: Sequence[float | None], times: float) -> bool:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return bool(known) and min(known) > 0 and max(known) / min(known) >= times


def learning(runs: Sequence[Run]) -> list[Picture]:
    """Loss, held-out loss, the gradient's norm, the learning rate."""
    sizes = {run.tokens_per_step for run in runs}
    pictures = [_loss(runs, "step", lambda run: run.train.steps)]
    if len(sizes) > 1:
        pictures.append(_loss(runs, "tokens", lambda run: run.train["tokens"]))
    pictures += _held_out(runs) if len(runs) > 1 else []
    norms = _curves(runs, {"grad_norm": "gradient norm"}, 1.0)
    log = any(_spans(c.values, LOG_NORM) for c in norms)
    pictures.append(Picture("Norm of the gradient", "step", norms, log=log))
    pictures.append(Picture("Learning rate", "step", _curves(runs, {"lr": "learning rate"}, 1.0), zero=True))
    return pictures


def _loss(runs: Sequence[Run], x: str, places: Callable[[Run], Sequence[float]]) -> Picture:
    curves: list[Curve] = []
    one = len(runs) == 1
    for i, run in enumerate(runs):
        name, raw = ("train" if one else run.name), run.train["loss"]
        if not run.train.steps:
            continue
        curves.append(Curve(name, places(run), raw, colour(i), "faint", keyed=False))
        curves.append(Curve(f"{name}, smoothed", places(run), smoothed(raw), colour(i)))
    if one:
        for i, (name, column) in enumerate(runs[0].evals.items()):
            curves.append(Curve(f"held-out {name}".rstrip(), column.steps, column["loss"], colour((4, 1, 3, 2, 5)[i % 5])))
    log = any(_spans(c.values, LOG_FROM) for c in curves)
    title = f"{'Training loss' if not one else 'Loss'}, nats per token{', log scale' if log else ''}"
    return Picture(f"{title}, against {x}s" if x == "step" else f"{title}, against tokens", x, curves, log=log, kind="first")


def _held_out(runs: Sequence[Run]) -> list[Picture]:
    sets = dict.fromkeys(name for run in runs for name in run.evals)
    empty = Columns([], {})
    return [
        Picture(
            f"Held-out loss{f' on {name}' if name else ''}, nats per token",
            "step",
            [
                Curve(run.name, c.steps, c["loss"], colour(i))
                for i, run in enumerate(runs)
                if (c := run.evals.get(name, empty)).steps
            ],
        )
        for name in sets
    ]


def speed(runs: Sequence[Run]) -> list[Picture]:
    """Throughput, utilisation, step time."""
    many = len(runs) > 1
    step_s = _planned_times(runs)
    per_device = []
    if runs[0].tokens_per_step and runs[0].devices:
        each = runs[0].tokens_per_step / runs[0].devices
        per_device = [Limit(limit.name, each / limit.value) for limit in step_s]
    mfu = {"mfu_causal": "MFU causal", "mfu_full": "MFU full", "hfu": "HFU"}
    times = {"step_time_s": "step", "data_wait_s": "waiting for data"}
    rate = _curves(runs, {"tokens_per_s_per_device": "tokens/s/device"}, 1.0)
    found = [
        Picture("Tokens/s of each device", "step", rate, limits=per_device, zero=True),
        Picture(f"{'MFU, causal' if many else 'Utilisation of the peak'}, %", "step", _curves(runs, mfu, 100.0), zero=True),
        Picture("Time of a step, s", "step", _curves(runs, times, 1.0), limits=step_s, zero=True),
    ]
    if many:
        found.append(Picture("Waiting for data, s a step", "step", _curves(runs, {"data_wait_s": ""}, 1.0), zero=True))
    return found


def memory(runs: Sequence[Run]) -> list[Picture]:
    """Of the fullest device of process 0."""
    keys = {"peak_memory_gib": "peak", "memory_gib": "in use"}
    curves = _curves(runs, keys, 1.0)
    title = f"{'Peak memory' if len(runs) > 1 else 'Memory'} of the fullest device, GiB"
    return [Picture(title, "step", curves, limits=_planned(runs, "peak_gib"), zero=True, kind="first")]


def _planned(runs: Sequence[Run], key: str) -> list[Limit]:
    """A figure of the plan, of one run alone."""
    value = (runs[0].receipt.get("planned") or {}).get(key) if len(runs) == 1 else None
    return [Limit("planned", value)] if value else []


def _planned_times(runs: Sequence[Run]) -> list[Limit]:
    """Both ends of the step time that the plan of one run expects, in seconds; without a range the roofline."""
    planned = (runs[0].receipt.get("planned") or {}) if len(runs) == 1 else {}
    if ends := planned.get("range_s"):
        return [Limit(f"expected, {name}", value) for name, value in zip(("fastest", "slowest"), ends, strict=True)]
    return [Limit("roofline", planned["step_s"])] if planned.get("step_s") else []


@dataclasses.dataclass(frozen=True)
class Moment:
    """All GPUs' samples of a stretch of time, at the last of its steps."""

    step: int
    low: float
    mean: float
    high: float


def moments(run: Run, key: str) -> list[Moment]:
    """Of one quantity, over all GPUs that tell it.

    Each process writes its lines by its own clock, so one step has lines of some nodes and the next those of others. What
    belongs together is therefore told by time, in stretches of twice the time from one line of a GPU to its next.
    """
    lines = [line for line in run.gpu if line.get(key) is not None]
    if not lines:
        return []
    first = [line["time_unix"] for line in lines if all(line[x] == lines[0][x] for x in ("process", "gpu"))]
    apart = [b - a for a, b in zip(first, first[1:], strict=False)]
    width = 2 * statistics.median(apart) if apart else math.inf
    stretches: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        stretches.setdefault(int((line["time_unix"] - first[0]) // width) if width else 0, []).append(line)
    by_step: dict[int, list[float]] = {}  # two stretches may end in one step
    for _, mine in sorted(stretches.items()):
        by_step.setdefault(max(line["step"] for line in mine), []).extend(line[key] for line in mine)
    return [Moment(step, min(v), statistics.fmean(v), max(v)) for step, v in sorted(by_step.items())]


def gpus(runs: Sequence[Run]) -> list[Picture]:
    """What NVML samples say: of one run the range over its GPUs, of several the mean of each."""
    found = []
    for key, title, scale in GPU_CHARTS:
        every = [moments(run, key) for run in runs]

        def curve(i: int, name: str, field: str, every: Any = every, scale: float = scale) -> Curve:
            values = [getattr(m, field) * scale for m in every[i]]
            return Curve(name, [m.step for m in every[i]], values, colour(i))

        if len(runs) == 1:
            if not every[0]:
                continue
            spread = Spread(curve(0, "the lowest GPU", "low"), curve(0, "the highest", "high"))
            found.append(Picture(title, "step", [curve(0, "mean", "mean")], [spread], zero=key != "temperature_c"))
        else:
            curves = [curve(i, run.name, "mean") for i, run in enumerate(runs) if every[i]]
            found.append(Picture(f"{title}, mean", "step", curves, zero=key != "temperature_c"))
    return found
