"""What a calibration measured (calibrate.py): its readings, beside the data sheet, and the rates that plans read."""

import dataclasses
import datetime
import importlib.metadata
import math
from collections.abc import Iterable, Sequence

import rich.table

from jaxtrain import hardware
from jaxtrain.plan import rates, result

PLAUSIBLE = 1.1  # times the data sheet: more than that means that the clock or the loop is wrong
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
CURVE = "all-gather by size"


class CalibrationError(ValueError):
    """There is nothing to calibrate here, or what was measured cannot be."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One operation, timed."""

    kind: str  # a key of UNITS
    what: str  # shapes or sizes
    work: float  # FLOPs or bytes of one round
    seconds: float  # of one round: the median
    spread: float  # (slowest - fastest) / median
    weight: float = 1.0  # rounds of it, beside the others of its kind
    failed: str = ""  # why there is no such time; then work and seconds are 0
    message: float = 0.0  # of collectives: bytes of the whole array


def rate(readings: Iterable[Reading], *kinds: str) -> float:
    """Work per second of all rounds of these kinds together, weighted; 0 where no time was measured, or a part of it failed."""
    chosen = [r for r in readings if r.kind in kinds]
    seconds = sum(r.weight * r.seconds for r in chosen)
    whole = seconds and not any(r.failed for r in chosen)
    return sum(r.weight * r.work for r in chosen) / seconds if whole else 0.0


def to_rates(readings: Sequence[Reading], gpu: hardware.Gpu, device_kind: str, today: datetime.date) -> result.Rates:
    """What a plan reads. What was not measured, or failed, stays at the published rate, and the source says so.

    Raises CalibrationError where a rate is not positive, or above what the data sheet says can be, and where nothing at all
    could be measured.
    """
    sheet = rates.datasheet(gpu, "bf16")
    # Attention's rates are those of cuDNN's kernels: for packed rows, as training packs them, where it serves those.
    packed = "packed " if any(r.kind.startswith("packed") and r.what.startswith("cudnn") for r in readings) else ""
    # Rate -> the readings that it is made of, and their unit.
    made: dict[str, tuple[tuple[str, ...], float]] = {
        "gemm_tflops": (("gemm",), 1e12),
        "attention_forward_tflops": ((f"{packed}attention forward",), 1e12),
        "attention_backward_tflops": ((f"{packed}attention backward",), 1e12),
        "memory_tb_s": (("memory",), 1e12),
        "host_gb_s": (("host",), 1e9),
        "fp8_tflops": (("FP8 gemm",), 1e12),
        "nvlink_gb_s": (COLLECTIVES, 1e9),
    }
    measured, failed = {}, []
    for key, (kinds, unit) in made.items():
        chosen = [r for r in readings if r.kind in kinds]
        if any(r.failed for r in chosen):
            failed.append(key)
        elif chosen:
            measured[key] = rate(chosen, *kinds) / unit
    if not measured:
        raise CalibrationError(f"nothing could be measured on {device_kind}, and nothing is stored. The errors are above.")
    for key, value in measured.items():
        limit = ceilings(gpu).get(key, math.inf)
        if not 0 < value <= PLAUSIBLE * limit:
            raise CalibrationError(
                f"{key} = {value:.4g} measured, which must be positive and at most {limit:.4g}, the data sheet's, on "
                f"{device_kind}. Nothing is stored. See that nothing else runs on this machine, and calibrate again."
            )
    by_size = sorted((r for r in readings if r.kind == CURVE), key=lambda r: r.message)
    slow = next((r for r in by_size if r.seconds <= 0 and not r.failed), None)
    if slow:
        raise CalibrationError(
            f"collective_curve: {slow.what} took {slow.seconds:.4g} s, which must be positive, on {device_kind}. "
            "Nothing is stored. See that nothing else runs on this machine, and calibrate again."
        )
    curve = {}
    if any(r.failed for r in by_size):
        failed.append("collective_curve")
    elif by_size:
        full = measured.get("nvlink_gb_s", sheet.nvlink_gb_s) * 1e9
        points = [(r.message, min(1.0, r.work / r.seconds / full)) for r in by_size]
        largest = max((r.message for r in readings if r.kind in COLLECTIVES), default=0.0)  # whose rate `full` is
        curve = {"collective_curve": (*points, *([(largest, 1.0)] if largest > points[-1][0] else []))}
    version = importlib.metadata.version("jaxlib")
    rest = "network rates" if any(r.kind in COLLECTIVES for r in readings) else "NVLink and network rates"
    rest += f", and {', '.join(failed)}, whose measurement failed," if failed else ""
    source = f"calibrated on {device_kind}, {today.isoformat()}, jaxlib {version}; {rest} at published kernel rates"
    # 0: an FP8 rate that was not measured is none of this calibration's; a plan that needs one says that it takes the sheet's.
    return dataclasses.replace(sheet, **{"fp8_tflops": 0.0} | measured | curve, source=source)


def ceilings(gpu: hardware.Gpu) -> dict[str, float]:
    """The data sheet's own figure for each measured rate, in that rate's unit."""
    sheet = rates.datasheet(gpu, "bf16")
    return {
        "gemm_tflops": gpu.bf16,
        "fp8_tflops": gpu.fp8,
        "attention_forward_tflops": gpu.bf16,
        "attention_backward_tflops": gpu.bf16,
        "memory_tb_s": gpu.hbm_tb_s,
        "nvlink_gb_s": gpu.nvlink_gb_s / 2,
        "host_gb_s": sheet.host_gb_s / rates.HOST_FRACTION,
    }


# Kind of a reading -> (field of Rates, unit, what one of the unit is in FLOPs or bytes a second)
UNITS = {
    "gemm": ("gemm_tflops", "TFLOP/s", 1e12),
    "FP8 gemm": ("fp8_tflops", "TFLOP/s", 1e12),
    "attention forward": ("attention_forward_tflops", "TFLOP/s", 1e12),
    "attention backward": ("attention_backward_tflops", "TFLOP/s", 1e12),
    "packed attention forward": ("attention_forward_tflops", "TFLOP/s", 1e12),
    "packed attention backward": ("attention_backward_tflops", "TFLOP/s", 1e12),
    "memory": ("memory_tb_s", "TB/s", 1e12),
    "host": ("host_gb_s", "GB/s", 1e9),
    **dict.fromkeys((*COLLECTIVES, CURVE), ("nvlink_gb_s", "GB/s", 1e9)),
}


def table(readings: Iterable[Reading], gpu: hardware.Gpu | None, title: str) -> rich.table.Table:
    """What was measured, beside the data sheet. `gpu` is None where there is none."""
    limits = ceilings(gpu) if gpu else {}
    out = rich.table.Table(title=title, title_justify="left")
    for name in ("measured", "on"):
        out.add_column(name)
    for name in ("rate", "data sheet", "share", "one round", "spread"):
        out.add_column(name, justify="right")
    for r in readings:
        if r.failed:
            out.add_row(r.kind, r.what, r.failed, *["-"] * 4)
            continue
        ms, spread = f"{1e3 * r.seconds:.3g} ms", f"{r.spread:.1%}"
        key, unit, scale = UNITS[r.kind]
        value, limit = rate([r], r.kind) / scale, limits.get(key)
        sheet, share = (f"{limit:,.4g} {unit}", f"{value / limit:.0%}") if limit else ("-", "-")
        out.add_row(r.kind, r.what, f"{value:,.4g} {unit}", sheet, share, ms, spread)
    return out
