"""Measure the rates of this machine's GPUs and store them. Plans for these GPUs then use the measured rates.

    python -m jaxtrain plan --calibrate

The command runs the measurements of node/measure.py in one process, on the GPUs of one node. The network between nodes
is not measured.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.table

from jaxtrain.config import hardware
from jaxtrain.kernels.attention import Hardware
from jaxtrain.models import precision
from jaxtrain.node import measure as micro
from jaxtrain.node.measure import COLLECTIVES, CURVE, Reading, Sizes
from jaxtrain.plan import rates, result
from jaxtrain.runtime.startup import missing_part

PLAUSIBLE = 1.1  # times the data sheet's rate: a higher measured rate is an error of the clock or of the timed loop
# Rate -> (kinds of its readings, its unit, FLOPs or bytes a second in one unit)
MEASURED = {
    "gemm_tflops": (("gemm",), "TFLOP/s", 1e12),
    "attention_forward_tflops": (("attention forward", "packed attention forward"), "TFLOP/s", 1e12),
    "attention_backward_tflops": (("attention backward", "packed attention backward"), "TFLOP/s", 1e12),
    "memory_tb_s": (("memory",), "TB/s", 1e12),
    "host_gb_s": (("host",), "GB/s", 1e9),
    "fp8_tflops": (("FP8 gemm",), "TFLOP/s", 1e12),
    "nvlink_gb_s": ((*COLLECTIVES, CURVE), "GB/s", 1e9),
}


class CalibrationError(ValueError):
    """This machine's GPUs cannot be calibrated, or a measured rate is implausible."""


def measure(devices: Sequence[Any], sizes: Sizes, report: Callable[[str], None] = lambda _: None) -> list[Reading]:
    """Measure kernels on the first device, and collectives over all devices if there are several. Return the readings.

    If a measurement fails, its reading has the error, and the next measurement runs.

    Args:
        report: called with the name of each measurement before the measurement runs.
    """
    found: list[Reading] = []
    first, target = devices[:1], Hardware.of(devices[0])

    def add(kinds: Sequence[str], what: str, make: Callable[[], Reading | list[Reading]]) -> None:
        report(f"{kinds[0]} {what}".strip())
        try:
            made = make()
        except Exception as error:  # compiler, driver, memory
            traceback.print_exc()
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]} {missing_part(str(error))}".rstrip()
            made = [Reading(kind, what, 0.0, 0.0, 0.0, failed=why) for kind in kinds]
        found.extend([made] if isinstance(made, Reading) else made)

    major, minor = target.compute_capability
    has_fp8 = target.platform == "cpu" or 10 * major + minor >= precision.SM
    with jax.default_device(devices[0]):
        for shape, weight in sizes.gemms:
            what = " x ".join(f"{n:,}" for n in shape)
            add(["gemm"], what, functools.partial(micro.gemm, shape, first, sizes, weight))
            if weight >= 1 and has_fp8:  # the head has a weight below 1, and its matmul is never in FP8
                add(["FP8 gemm"], what, functools.partial(micro.fp8_gemm, shape, first, sizes, weight))
        for packed in (False, True):
            kind = "packed attention" if packed else "attention"
            make = functools.partial(micro.attention_pair, devices[0], target, packed, sizes)
            add([f"{kind} forward", f"{kind} backward"], "", make)
        add(["memory"], "", functools.partial(micro.memory, first, sizes))
        add(["host"], "", functools.partial(micro.host, first, sizes))
    if len(devices) > 1:
        elements = sizes.collective_mib * 2**20 // 2
        for kind in COLLECTIVES:
            add([kind], "", functools.partial(micro.collective, kind, devices, elements, sizes.collective_rounds, sizes))
        add([CURVE], "", functools.partial(micro.curve, devices, sizes))
    return found


def run(folder: Path | str = rates.FOLDER, *, console: rich.console.Console | None = None) -> Path:
    """Measure the devices of this process, print the readings, store the rates for plans, and return the path of the file.

    Raises:
        CalibrationError: JAX finds no GPU, the run has several processes, config/hardware.py has no data sheet of the GPU, or
            `to_rates` raises.
    """
    console = console or rich.console.Console()
    devices = jax.local_devices()
    kind = devices[0].device_kind
    if devices[0].platform != "gpu":
        raise CalibrationError(
            f"--calibrate measures the GPUs of this machine, and JAX finds none (its devices are {devices[0].platform}). "
            "Run it on the machine that plans are for; without it, plans use published kernel rates."
        )
    if jax.process_count() > 1:
        raise CalibrationError(
            f"--calibrate runs in one process, and this is one of {jax.process_count()}. Run it on one node, outside the job."
        )
    gpu = hardware.lookup(kind)
    if gpu is None:
        raise CalibrationError(
            f"{kind!r}: its data sheet is not known, so nothing could be checked. Add it to jaxtrain/config/hardware.py."
        )
    found = measure(devices, Sizes(), lambda what: console.print(f"measuring {what}"))
    console.print(table(found, gpu, f"{len(devices)} x {kind}"))
    file = rates.save(to_rates(found, gpu, kind, datetime.date.today()), gpu.name, folder)
    console.print(f"stored as {file}: plans for {gpu.name} use it from now on")
    return file


# ---- the rates of readings


def rate(readings: Sequence[Reading]) -> float:
    """Return the rate of several readings: sum(weight x work) / sum(weight x seconds), or 0 if all seconds are 0."""
    seconds = sum(r.weight * r.seconds for r in readings)
    return sum(r.weight * r.work for r in readings) / seconds if seconds else 0.0


def to_rates(readings: Sequence[Reading], gpu: hardware.Gpu, device_kind: str, today: datetime.date) -> result.Rates:
    """Return the rates for plans, from readings on one node.

    If a measurement fails, the published rate is used and `source` names the rate. If the FP8 rate has no measurement, it is 0,
    and `rates.rates_for` uses the published rate.

    Raises:
        CalibrationError: a rate is not positive or above PLAUSIBLE x the data sheet's, a collective took no time, or no
            measurement succeeded.
    """
    sheet = rates.datasheet(gpu, "bf16")
    # Attention's rates are measured with packed sequences, as in training, if cuDNN supports them; else without packing.
    packed = any(r.kind.startswith("packed") and r.what.startswith("cudnn") for r in readings)
    counted = [r for r in readings if r.kind != CURVE and ("attention" not in r.kind or r.kind.startswith("packed") == packed)]
    limits, measured, failed = ceilings(gpu), {}, []
    for key, (kinds, _, unit) in MEASURED.items():
        chosen = [r for r in counted if r.kind in kinds]
        if any(r.failed for r in chosen):
            failed.append(key)
        elif chosen:
            measured[key] = rate(chosen) / unit
    if not measured:
        raise CalibrationError(f"nothing could be measured on {device_kind}, and nothing is stored. The errors are above.")
    for key, value in measured.items():
        limit = limits[key]
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
        largest = max((r.message for r in readings if r.kind in COLLECTIVES), default=0.0)  # `full` is the rate at this size
        curve = {"collective_curve": (*points, *([(largest, 1.0)] if largest > points[-1][0] else []))}
    version = importlib.metadata.version("jaxlib")
    rest = "network rates" if any(r.kind in COLLECTIVES for r in readings) else "NVLink and network rates"
    rest += f", and {', '.join(failed)}, whose measurement failed," if failed else ""
    source = f"calibrated on {device_kind}, {today.isoformat()}, jaxlib {version}; {rest} at published kernel rates"
    # 0: the FP8 rate was not measured. `rates.rates_for` then uses the published rate and lists it in `source`.
    return dataclasses.replace(sheet, **{"fp8_tflops": 0.0} | measured | curve, source=source)


def ceilings(gpu: hardware.Gpu) -> dict[str, float]:
    """Return key of MEASURED -> the data sheet's rate, in the unit of MEASURED. NVLink's rate is that of one direction."""
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


def table(readings: Iterable[Reading], gpu: hardware.Gpu, title: str) -> rich.table.Table:
    """Return a table of readings, with the data sheet's rate beside each."""
    limits = ceilings(gpu)
    keys = {kind: key for key, (kinds, _, _) in MEASURED.items() for kind in kinds}
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
        _, unit, scale = MEASURED[keys[r.kind]]
        value, limit = rate([r]) / scale, limits[keys[r.kind]]
        sheet, share = (f"{limit:,.4g} {unit}", f"{value / limit:.0%}") if limit else ("-", "-")
        out.add_row(r.kind, r.what, f"{value:,.4g} {unit}", sheet, share, ms, spread)
    return out
