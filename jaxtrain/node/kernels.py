"""Time kernels of a train step (node/kernel_workloads.py) and compare them with the lower bound of their time.

The lower bound is the longer of two times: FLOPs over the GPU's peak FLOP/s, and bytes over the bandwidth of its
memory or link.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import rich.console

from jaxtrain.config import hardware
from jaxtrain.config.durations import duration
from jaxtrain.config.numbers import percent
from jaxtrain.node.train_step import one_device, start_devices
from jaxtrain.report import bench
from jaxtrain.report.bench import BenchFolder, number
from jaxtrain.report.tables import Table
from jaxtrain.train.child import FAILED, LATE, OK, run_case, save_partial

if TYPE_CHECKING:  # it imports JAX
    from jaxtrain.node.measure import WorkReading

CASE = "jaxtrain.node.kernels:measure"
KINDS = ("attention", "loss", "norm", "optimizer", "gemm", "experts")
NOT_TIMED = "not timed"


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Time all kernels of one kind on the first device. This is a case (child.py). Results are saved after each kernel.

    Args:
        request: `kind`, one of KINDS; `limit_s`, seconds after which no kernel starts (null: no limit); `cache`, a folder for
            compiled programs (absent: the folder of the default config).
    """
    began = time.monotonic()
    (device,) = start_devices(one_device(request.get("cache")), 1)
    from jaxtrain.node import measure as micro
    from jaxtrain.node.kernel_workloads import WORKLOADS

    on_gpu = device.platform == "gpu"
    sizes, gpu = (micro.Sizes(flop=50e12, warm_s=0.5), hardware.lookup(device.device_kind)) if on_gpu else (micro.TINY, None)
    rows: list[dict[str, Any]] = []
    for work in WORKLOADS[request["kind"]](device, sizes):
        if request["limit_s"] and time.monotonic() - began > request["limit_s"]:
            work = dataclasses.replace(work, unable="no time was left")
        rows += [make_row(reading, gpu) for reading in micro.try_work(work, sizes)]
        save_partial(request, {"verdict": LATE, "device": device.device_kind, "rows": rows})
    return {"verdict": OK, "device": device.device_kind, "rows": rows}


def make_row(reading: "WorkReading", gpu: hardware.Gpu | None) -> dict[str, Any]:
    """Return the table row of a reading: its time beside its lower bound on this GPU, or the reason why there is no time."""
    work, seconds = reading.work, reading.seconds
    out: dict[str, Any] = {"kind": work.kind, "what": work.label, "flop": work.flop, "bytes": work.bytes}
    if reading.failed:
        return out | {"verdict": NOT_TIMED if work.unable else FAILED, "why": reading.failed}
    bound = work.bound_s(gpu) if gpu else None
    return out | {
        "verdict": OK,
        "seconds_a_call": seconds,
        "spread": reading.spread,
        "bound_s": bound,
        "of_bound": bound / seconds if bound else None,
        "tflops": work.flop / seconds / 1e12,
        "gb_s": work.bytes / seconds / 1e9,
    }


def make_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of kernels."""

    def cells(row: dict[str, Any]) -> list[str]:
        if row["verdict"] != OK:
            return [row["kind"], row["what"], *["-"] * 6, f"{row['verdict']}: {row['why']}"]
        bound = "-" if row["bound_s"] is None else f"{1e3 * row['bound_s']:.3g} ms"
        return [
            row["kind"],
            row["what"],
            f"{1e3 * row['seconds_a_call']:.3g} ms",
            f"{row['spread']:.1%}",
            bound,
            percent(row["of_bound"]),
            number(row["tflops"] if row["flop"] else None),
            number(row["gb_s"]),
            "",
        ]

    headings = ("kernel", "on", "one call", "spread", "bound", "bound / time", "TFLOP/s", "GB/s", "")
    return bench.make_table(title, headings, map(cells, rows), text=2)


def time_kernels(kinds: Sequence[str], folder: BenchFolder, console: rich.console.Console) -> int:
    """Time kernels of these kinds, each kind in a separate process. Return 0, or 1 if a kernel failed."""
    all_rows: list[dict[str, Any]] = []
    try:
        for kind in kinds:
            with console.status(f"{kind} ..."):
                answer = run_case(CASE, {"kind": kind, "limit_s": None}, log=folder.log(kind))
            rows = answer.get("rows", [])
            if answer["verdict"] != OK:
                rows.append({"kind": kind, "what": "", "verdict": answer["verdict"], "why": answer["why"]})
            all_rows += rows
            bench.print_line(console, f"{kind}: {len(rows)} rows in {duration(answer['seconds'])}", "dim")
            folder.write("Kernels", bench.markdown(make_table("Kernels", all_rows)), kernels=all_rows)
    finally:
        if all_rows:
            bench.print_table(console, make_table("Kernels", all_rows))
        folder.print_cpu_note(console)
    return 1 if any(r["verdict"] not in (OK, NOT_TIMED) for r in all_rows) else 0
