"""Measure the rates of this machine's GPUs and store them. Plans for these GPUs then use the measured rates.

    python -m jaxtrain plan --calibrate

The command times the work of node/measure.py in one process, on the GPUs of one node. The network between nodes is not
measured.
"""

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console

from jaxtrain.config import hardware
from jaxtrain.kernels.attention import Hardware, Spec, cudnn, support
from jaxtrain.node import kernels
from jaxtrain.node import measure as micro
from jaxtrain.node.measure import COLLECTIVES, Sizes, TimedWork, WorkReading
from jaxtrain.plan import rates, result
from jaxtrain.report import tables

PLAUSIBLE = 1.1  # times the data sheet's rate: a higher measured rate is an error of the clock or of the timed loop
CURVE = "all-gather by size"
# Rate -> (kinds of its readings, FLOPs or bytes a second in one unit)
MEASURED = {
    "gemm_tflops": (("gemm bf16",), 1e12),
    "attention_forward_tflops": (("attention forward",), 1e12),
    "attention_backward_tflops": (("attention backward",), 1e12),
    "memory_tb_s": (("memory",), 1e12),
    "host_gb_s": (("host",), 1e9),
    "fp8_tflops": (("gemm fp8",), 1e12),
    "nvlink_gb_s": (COLLECTIVES, 1e9),
}


class CalibrationError(ValueError):
    """This machine's GPUs cannot be calibrated, or a measured rate is implausible."""


def measure_rates(devices: Sequence[Any], sizes: Sizes, report: Callable[[str], None] = lambda _: None) -> list[WorkReading]:
    """Measure kernels on the first device, and collectives over all devices if there are several. Return the readings.

    If a measurement fails, its reading has the error, and the next measurement runs. Times of backward passes and of the
    messages of the curve are differences of two times.

    Args:
        report: called with the name of each measurement before the measurement runs.
    """
    first, readings = devices[0], list[WorkReading]()

    def take(work: TimedWork) -> WorkReading:
        report(f"{work.kind} {work.label}")
        (reading,) = micro.try_work(work, sizes)
        return reading

    with jax.default_device(first):
        for shape, weight in sizes.gemms:
            for dtype in ("bf16", "fp8") if weight >= 1 else ("bf16",):  # the head, with a weight below 1, is never in FP8
                readings.append(take(dataclasses.replace(micro.gemm(shape, dtype, [first]), weight=weight)))
        passes: list[WorkReading] = []
        for works in attention(first, sizes):
            forward, forward_backward = map(take, works)
            passes = [forward, forward_backward.minus(forward, "attention backward")]
            if not passes[1].failed:
                break
        readings += passes
        readings.append(take(micro.memory([first], sizes)))
        readings += [take(micro.host(first, sizes, to_host)) for to_host in (True, False)]
    if len(devices) > 1:
        mib, rounds = 2**20, sizes.curve_rounds
        full = [micro.collective(kind, devices, sizes.collective_mib * mib, sizes.collective_rounds) for kind in COLLECTIVES]
        readings += map(take, full)
        empty = take(micro.collective("no collective", devices, 128 * len(devices), rounds))
        by_size = [take(micro.collective("all-gather", devices, size * mib, rounds)) for size in sizes.curve_mib]
        readings += [reading.minus(empty, CURVE) for reading in by_size]
    return readings


def attention(device: Any, sizes: Sizes) -> list[tuple[TimedWork, TimedWork]]:
    """Return both passes of the kernel that `attention.impl=auto` chooses, on sequences with one document each.

    If cuDNN supports packed sequences, the first kernel is compiled for them, as in training, and the second, without packing,
    is for the case that it fails. cuDNN's backward pass may run in parts of the batch and heads (cudnn.backward_chunk). Both
    passes are then timed for one part, since a plan counts slicing and joining as memory traffic.
    """
    B, T, N, K, H = sizes.attention
    packed, plain = Spec(H, "bf16", True, max_segments=32), Spec(H, "bf16", False, max_segments=1)
    pairs = []
    for spec in (packed, plain):
        name, _ = support.choose_attention("auto", [(spec, T)], Hardware.from_device(device))
        rows, heads = B, N
        if name == "cudnn":
            rows, heads = cudnn.backward_chunk(B, T, T, N, K, H, spec.max_segments + 1 if spec.packed else 1)
        if name == "cudnn" or spec is plain:
            pairs.append(micro.attention(device, name, spec, (rows, T, heads, max(1, heads * K // N), H)))
    return pairs


def calibrate_gpus(folder: Path | str = rates.FOLDER, *, console: rich.console.Console | None = None) -> Path:
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
    readings = measure_rates(devices, Sizes(), lambda what: console.print(f"measuring {what}"))
    rows = [kernels.make_row(reading, gpu) for reading in readings]
    tables.print_table(kernels.make_table(f"{len(devices)} x {kind}", rows), console)
    file = rates.save_calibration(to_rates(readings, gpu, kind, datetime.date.today()), gpu.name, folder)
    console.print(f"stored as {file}: plans for {gpu.name} use it from now on")
    return file


# ---- the rates of readings


def rate(readings: Sequence[WorkReading], seconds: Callable[[WorkReading], float]) -> float:
    """Return the rate of several readings: sum(weight x work) / sum(weight x seconds), or 0 if all seconds are 0."""
    total = sum(r.work.weight * seconds(r) for r in readings)
    return sum(r.work.weight * r.work.amount for r in readings) / total if total else 0.0


def to_rates(readings: Sequence[WorkReading], gpu: hardware.Gpu, device_kind: str, today: datetime.date) -> result.Rates:
    """Return the rates for plans, from readings on one node.

    If a measurement fails, the published rate is used and `source` names the rate. If the FP8 rate has no measurement, it is 0,
    and `rates.rates_for` uses the published rate.

    Raises:
        CalibrationError: a rate is not positive or above PLAUSIBLE x the data sheet's, a collective took no time, or no
            measurement succeeded.
    """
    sheet = rates.datasheet(gpu, "bf16")
    limits, measured, failed = {}, {}, []
    for key, (kinds, unit) in MEASURED.items():
        chosen = [r for r in readings if r.work.kind in kinds and not r.work.unable]
        if any(r.failed for r in chosen):
            failed.append(key)
        elif chosen:
            measured[key] = rate(chosen, lambda r: r.seconds) / unit
            limits[key] = rate(chosen, lambda r: r.work.bound_s(gpu)) / unit
    if not measured:
        raise CalibrationError(f"nothing could be measured on {device_kind}, and nothing is stored. The errors are above.")
    for key, value in measured.items():
        limit = limits[key]
        if not 0 < value <= PLAUSIBLE * limit:
            raise CalibrationError(
                f"{key} = {value:.4g} measured, which must be positive and at most {limit:.4g}, the data sheet's, on "
                f"{device_kind}. Nothing is stored. See that nothing else runs on this machine, and calibrate again."
            )
    by_size = sorted((r for r in readings if r.work.kind == CURVE), key=lambda r: r.work.message)
    slow = next((r for r in by_size if r.seconds <= 0 and not r.failed), None)
    if slow:
        raise CalibrationError(
            f"collective_curve: {slow.work.label} took {slow.seconds:.4g} s, which must be positive, on {device_kind}. "
            "Nothing is stored. See that nothing else runs on this machine, and calibrate again."
        )
    curve = {}
    if any(r.failed for r in by_size):
        failed.append("collective_curve")
    elif by_size:
        full = measured.get("nvlink_gb_s", sheet.nvlink_gb_s) * 1e9
        points = [(r.work.message, min(1.0, r.rate / full)) for r in by_size]
        # `full` is the rate at this size.
        largest = max((r.work.message for r in readings if r.work.kind in COLLECTIVES), default=0.0)
        curve = {"collective_curve": (*points, *([(largest, 1.0)] if largest > points[-1][0] else []))}
    version = importlib.metadata.version("jaxlib")
    unmeasured = "network rates" if any(r.work.kind in COLLECTIVES for r in readings) else "NVLink and network rates"
    unmeasured += f", and {', '.join(failed)}, whose measurement failed," if failed else ""
    source = f"calibrated on {device_kind}, {today.isoformat()}, jaxlib {version}; {unmeasured} at published kernel rates"
    # 0: the FP8 rate was not measured. `rates.rates_for` then uses the published rate and lists it in `source`.
    return dataclasses.replace(sheet, **{"fp8_tflops": 0.0} | measured | curve, source=source)
