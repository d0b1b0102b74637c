"""Measures the rates of this node's GPUs and disks within a time budget; rates.py checks them.

The GPUs are measured in a child process (train/child.py), which saves each result at once. If the child hangs or crashes, only
its time budget is lost, and the GPUs' memory is free afterwards. This process never initialises JAX's backend. It measures the
disks while the child runs.
"""

import contextlib
import dataclasses
import functools
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml

from jaxtrain.config import hardware
from jaxtrain.metrics.nvml import Card, GpuSample, Lost, mean
from jaxtrain.node import disk_rates
from jaxtrain.node.facts import ANSWER_S, Unanswered, call_with_timeout
from jaxtrain.node.rates import BUS_RATES, GPU_LISTS, RATES
from jaxtrain.runtime import startup
from jaxtrain.runtime.distributed import Cluster, all_devices
from jaxtrain.train import child

CASE = "jaxtrain.node.node_rates:measure_in_child"
LAST_START = 0.8  # of the budget, after which no measurement begins
MEMORY_GIB = 8.0  # of each GPU's memory for JAX; the programs use about 4
MEMORY_SHARE = 0.5  # largest fraction of a small GPU's memory for JAX
DISK_S = 6.0  # most seconds for one disk; all disks together have a third of the budget
HANG_S = 15.0  # a collective that takes longer hangs; NCCL's own start takes some seconds over many nodes
PEERS_S = 5.0  # before the deadline; in this time a process may fail because another process was killed already
# Wait for a killed child to end, before this node reports without it. With the last message it has to fit in the 6 s of
# multi_node.RESERVE_S. With a hanging driver, the other nodes would count this node as lost after a longer wait.
KILLED_S = 3.0
PROBE_S = 20.0  # most seconds for the driver to initialize its GPUs
SAMPLE_S = 0.5  # between two samples; the driver's figures are means over up to a second
# Variables that contradict the child's memory fraction. Another check reports them.
MEMORY_VARIABLES = (
    *("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"),
    "TF_FORCE_UNIFIED_MEMORY",
)
# Errors that are no fault of the hardware: other processes use the memory, or JAX has no such operation.
NO_FAULT = re.compile(r"RESOURCE_EXHAUSTED|UNIMPLEMENTED|out of memory", re.IGNORECASE)


def measure_node(
    paths: Mapping[str, Path],
    budget_s: float,
    cluster: Cluster | None = None,
    *,
    on_cpu: bool = False,
    disk_bytes: int = 2**30,
) -> dict[str, Any]:
    """Return the rates of this process's GPUs and of the disks of `paths`, measured within `budget_s` seconds.

    Args:
        paths: name -> folder on the disk to measure. The folder need not exist. Each disk is measured once.
        cluster: cluster that the measuring children of all processes form, with an unused port; None for one process. All
            processes call this function at the same time.
        on_cpu: for tests, run the programs of GPUs on CPU devices in tiny sizes. The figures have no meaning.
        disk_bytes: bytes that are written to and read from each disk.

    Returns:
        the rates of `rates.RATES`; gpus: the GPUs' indices; under_load: the driver's samples during the matmuls; disk: name ->
        {write_gb_s, read_gb_s}; left_out: rate (or disk.NAME) -> reason why it is unknown; failed: measurement -> error. For a
        rate that was not measured, the list is empty, the number is None, or `disk` lacks the name.
    """
    deadline = time.monotonic() + budget_s
    figures: dict[str, Any] = {name: [] for name in GPU_LISTS} | dict.fromkeys(BUS_RATES)
    figures |= {"disk": {}, "left_out": {}, "failed": {}}
    disk_s = min(DISK_S, budget_s / 3 / max(len(paths), 1))
    disks = threading.Thread(target=measure_disks, args=(paths, disk_s, disk_bytes, figures), name="disks", daemon=True)
    disks.start()
    try:
        devices = call_with_timeout(min(PROBE_S, budget_s / 2), "the driver (NVML)", hardware.probe)
    except Unanswered as error:
        devices, figures["failed"]["driver"] = hardware.Devices("gpu", "", 0, 0.0, str(error)), str(error)
    if devices.kind == "gpu" and devices.count > 0 or on_cpu:
        limit_s = max(deadline - time.monotonic(), 1.0)
        request = {"limit_s": LAST_START * limit_s, "cluster": dataclasses.asdict(cluster) if cluster else None}
        environ = child_environment(devices, os.environ)
        answer = child.run_case(CASE, request, environ=environ, limit_s=limit_s, killed_s=KILLED_S)
        add_answer(figures, answer, limit_s, alone=cluster is None)
    else:
        figures["left_out"] |= dict.fromkeys(RATES, f"there is no GPU to measure ({devices.source})")
    disks.join()
    return figures


def add_answer(figures: dict[str, Any], answer: Mapping[str, Any], limit_s: float, alone: bool) -> None:
    """Add the child's answer to `figures`. If the child failed or was killed, add the reason for each rate without a figure.

    alone: whether this process is the only one of the run, so that no lost process can have ended the child.
    """
    measured = answer.get("measured", {})
    figures |= measured
    for name in ("left_out", "failed"):
        figures[name] |= answer.get(name, {})
    if answer["verdict"] == child.OK:
        return
    phase = f" in {answer['current']}" if answer.get("current") else ""
    if answer["verdict"] == child.LATE:
        text = f"not done within {limit_s:.0f} s, and ended{phase}"
        figures["failed"] |= {answer["key"]: text} if hangs(answer) else {}
    else:
        why = "; ".join(problem["rule"] for problem in answer.get("problems", ())) or answer["why"]
        text = f"the process failed{phase}: {why}"
        figures["failed"] |= {"process": text} if alone or answer["seconds"] < limit_s - PEERS_S else {}
    for name in RATES:
        if name not in measured:
            figures["left_out"].setdefault(name, text)


def hangs(answer: Mapping[str, Any]) -> bool:
    """Return whether a collective hangs on GPUs whose matmuls were measured.

    A timeout before the first collective is no hang, since the start of JAX or a file system may be slow.
    """
    in_collective = answer.get("key") in BUS_RATES and "gemm_tflops" in answer["measured"]
    return in_collective and time.time() - answer["began_unix"] >= HANG_S


def measure_disks(paths: Mapping[str, Path], seconds: float, size: int, figures: dict[str, Any]) -> None:
    """Add the rates of each path's disk to `figures`, or the reason why they are unknown.

    Each disk is measured once, for all of its paths.

    Args:
        seconds: time limit for each disk.
        size: bytes to write and read.
    """
    by_device: dict[int, dict[str, float | None] | Exception] = {}
    for name, path in paths.items():
        subject = f"{path} (its file system hangs, or is very slow)"
        try:
            folder = call_with_timeout(ANSWER_S, subject, functools.partial(disk_rates.existing_folder, path))
            device = call_with_timeout(ANSWER_S, subject, functools.partial(os.stat, folder)).st_dev
            if device not in by_device:
                try:
                    work = functools.partial(disk_rates.measure_disk, folder, seconds, size)
                    by_device[device] = call_with_timeout(seconds + ANSWER_S, subject, work)
                except (OSError, Unanswered, disk_rates.Unmeasured) as error:
                    by_device[device] = error
            result = by_device[device]
            if isinstance(result, Exception):
                raise result
            figures["disk"][name] = result
        except (Unanswered, disk_rates.Unmeasured) as error:
            figures["left_out"][f"disk.{name}"] = str(error)
        except OSError as error:
            figures["left_out"][f"disk.{name}"] = figures["failed"][f"disk.{name}"] = f"{path}: {error.strerror or error}"


def child_environment(devices: hardware.Devices, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the child: this process's variables, with a small fraction of each GPU's memory for JAX."""
    out = {name: value for name, value in environ.items() if name not in MEMORY_VARIABLES}
    out["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that CUDA uses nvidia-smi's indices
    if devices.kind == "gpu" and devices.memory_gib:
        out["XLA_CLIENT_MEM_FRACTION"] = str(round(min(MEMORY_SHARE, MEMORY_GIB / devices.memory_gib), 4))
    return out


# ---- in the child


def measure_in_child(request: Mapping[str, Any]) -> dict[str, Any]:
    """Start JAX and measure all rates of GPUs. `child.run_case` calls this function in the child (train/child.py).

    Args:
        request: limit_s: seconds after which no measurement begins, except those that need all processes; cluster: the fields
            of a Cluster, or None.
    """
    results = Results(request, request["limit_s"])
    cluster = Cluster(**request["cluster"]) if request["cluster"] else None
    results.begin("the start of JAX" + (f" with {cluster.num_processes} processes" if cluster else ""))
    startup.start_jax(all_devices(hardware.probe(), cluster), cluster)
    import jax

    measure_gpus(jax.devices(), jax.local_devices(), results)
    return results.answer | {"verdict": child.OK}


class Results:
    """The child's results so far. They are saved before each measurement, so the parent has them even if the child hangs."""

    def __init__(self, request: Mapping[str, Any], limit_s: float):
        self._request, self._deadline = request, time.monotonic() + limit_s
        self.answer: dict[str, Any] = {"verdict": child.LATE, "measured": {}, "left_out": {}, "failed": {}}

    def begin(self, label: str, key: str = "") -> None:
        self.answer |= {"current": label, "key": key, "began_unix": time.time()}
        child.save_partial(self._request, self.answer)

    def add(self, key: str, label: str, measurement: Callable[[], Any], *, together: bool = False) -> None:
        """Measure the rate `key`. If the measurement raises, the error is the reason why the rate is unknown.

        Args:
            together: whether all processes take part. If so, measure even after the limit, since the other processes wait.
        """
        if not together and time.monotonic() > self._deadline:
            self.answer["left_out"][key] = "no time was left"
            return
        self.begin(label, key)
        try:
            self.answer["measured"][key] = measurement()
        except Exception as error:  # of compiler, driver or memory; the other measurements are still useful
            traceback.print_exc()
            text = self.answer["left_out"][key] = child.error_line(error)
            if not NO_FAULT.search(str(error)):
                self.answer["failed"][key] = f"{label}: {text}"


@contextlib.contextmanager
def load_samples(cards: Sequence[Card], out: list[dict[str, Any]], period_s: float = SAMPLE_S) -> Iterator[None]:
    """Sample GPUs in a thread while the block runs.

    Args:
        out: receives a dict for each GPU with samples: index, means of clock and power, and the fraction of samples with each
            throttle reason.
        period_s: seconds between samples.
    """
    samples: dict[Card, list[GpuSample]] = {card: [] for card in cards}
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(period_s):  # the first sample is late, since clocks rise first
            for card, card_samples in samples.items():
                try:
                    reading = card.sample(time.monotonic())
                except Lost:
                    return  # the matmul raises an error too
                card_samples += [reading] if reading and not stop.is_set() else []

    thread = threading.Thread(target=sample, name="GPUs under load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(4 * period_s)
    for card, card_samples in samples.items():
        reasons = [each.reasons for each in card_samples if each.reasons is not None]
        shares = {name: sum(name in each for each in reasons) / len(reasons) for each in reasons for name in each}
        means = {name: mean([getattr(each, name) for each in card_samples]) for name in ("power_w", "power_limit_w")}
        mhz = mean([each.sm_clock_mhz for each in card_samples])
        out += [{"gpu": card.index, "sm_mhz": mhz, **means, "reasons": shares}] if card_samples else []


def cards_of(devices: Sequence[Any]) -> list[Card]:
    """Return the Card (a GPU by its NVML handle) of each of JAX's devices; [] for CPUs.

    CUDA_DEVICE_ORDER must be PCI_BUS_ID.
    """
    if devices[0].platform != "gpu":
        return []
    pynvml.nvmlInit()
    handles = hardware.visible_handles(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [Card(pynvml, handles[device.local_hardware_id]) for device in devices]


def measure_gpus(devices: Sequence[Any], local: Sequence[Any], results: Results) -> None:
    """Measure all rates, most significant first: of each `local` device, of the node, and of all `devices` of the run."""
    from jaxtrain.node import measure as micro
    from jaxtrain.sharding import node_of

    measured, left_out = results.answer["measured"], results.answer["left_out"]
    sizes = micro.TINY
    if local[0].platform == "gpu":
        # Square matmuls for at most 0.3 s, so that a slow GPU does not take a minute. Collectives of 1 GiB, since nccl-tests
        # reach the full bandwidth with more than 256 MiB (NVIDIA/nccl-tests, issue 212).
        limits: dict[str, Any] = {"flop": 220e12, "rounds": 100, "seconds": 0.3, "repeats": 5}
        sizes = micro.Sizes(squares=(8192,), collective_mib=1024, **limits)
    try:
        cards = cards_of(local)
    except (pynvml.NVMLError, hardware.InvisibleGpu, IndexError) as error:
        cards, left_out["under_load"] = [], f"NVML: {error}"
    measured |= {"gpus": [card.index for card in cards] or list(range(len(local))), "under_load": []}

    def measure_gemm() -> list[float]:
        side = sizes.squares[0]
        watch = load_samples(cards, measured["under_load"])
        return [r.rate / 1e12 for r in micro.time_work(micro.gemm((side, side, side), "bf16", local), sizes, watch)]

    def measure_memory() -> list[float]:
        return [r.rate / 1e9 for r in micro.time_work(micro.memory(local, sizes), sizes)]

    def measure_bus(members: Sequence[Any]) -> float:
        # All processes must make the same number of calls, so no warm-up by time. The matmuls have warmed the GPUs up.
        fixed = dataclasses.replace(sizes, warm_s=0.0)
        work = micro.collective("all-reduce", members, sizes.collective_mib * 2**20, sizes.collective_rounds)
        return micro.time_work(work, fixed)[0].rate / 1e9

    count = len(local)
    results.add("gemm_tflops", f"GEMMs on {count} GPUs", measure_gemm)
    node = [device for device in devices if node_of(device) == node_of(local[0])]
    everywhere = devices if len(node) < len(devices) else ()
    for key, members, scope in zip(BUS_RATES, (node, everywhere), ("GPU", "node"), strict=True):
        if len(members) > 1:
            label = f"all-reduce over {len(members)} GPUs of {'the node' if members is node else 'all nodes'}"
            results.add(key, label, functools.partial(measure_bus, members), together=True)
        else:
            left_out[key] = f"there is one {scope}"
    results.add("hbm_gb_s", f"memory of {count} GPUs", measure_memory)
