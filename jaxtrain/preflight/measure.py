"""Runs the node's GPUs and disks for some seconds, within a budget: what they reach, to be judged by others.

GPUs work in a process of their own (device_work.py): one that hangs or crashes costs the budget and no more, and gives the
GPUs' memory back. This process never starts JAX. Disks are measured meanwhile, which costs the other process no time: it
begins by starting JAX.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import hardware
from jaxtrain.launch import REPO
from jaxtrain.preflight.bounded import Unmeasured, within
from jaxtrain.preflight.disk_rates import SIZE, DiskRates, Failed, disk_of, rates

GPU_LISTS = ("gemm_tflops", "hbm_gb_s", "h2d_gb_s")  # one figure for each GPU of this process
EACH = ("gpus", *GPU_LISTS, "under_load")  # all that is a list of what the GPUs of a process have
BUS = ("all_reduce_bus_gb_s", "reduce_scatter_bus_gb_s")  # over the GPUs of the node
INTER_NODE = tuple(f"inter_node_{name}" for name in BUS)  # over those of all nodes
PROGRAM = "jaxtrain.preflight.device_work"
BEGIN = 0.8  # of the budget, after which it begins nothing more
MEMORY_GIB = 8.0  # that it is given of each GPU: it holds about 4
MOST = 0.5  # of a card's memory, where that is small
DISK_S = 6.0  # for one disk, at most; and a third of the budget for all of them together
HANG_S = 15.0  # in one collective, after which it hangs; NCCL sets itself up meanwhile, over many nodes for some seconds
PEERS_S = 5.0  # before the end, in which a process may fall because the first of the others was ended
PROBE_S = 20.0  # for the driver to wake its GPUs
ENDED_S = 3.0  # for a process that was killed to be gone: one inside a driver that hangs may not go at all
# Variables that would contradict the memory it asks for; preflight tells of them elsewhere.
IN_THE_WAY = (
    *("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"),
    "TF_FORCE_UNIFIED_MEMORY",
)


def measure(
    places: Mapping[str, Path],
    budget_s: float,
    cluster_args: Sequence[str] = (),
    *,
    on_cpu: bool = False,
    disk_bytes: int = SIZE,
) -> dict[str, Any]:
    """What this node's GPUs and disks reach, found within `budget_s` seconds.

    Args:
        places: name -> folder, there already or not, that is written to and read from. One disk is measured once.
        cluster_args: for a run of several processes, `--coordinator`, `--num-processes`, `--process-id` and, where a process
            does not take the whole node, `--local-devices`, as of python -m jaxtrain.main. All processes call this at the same
            time. The coordinator's port must be another than that at which the callers themselves have met.
        on_cpu: tries the GPUs' programs on CPU devices, in tiny sizes, whose figures mean nothing; for tests.
        disk_bytes: written to and read from each disk.

    Returns:
        gemm_tflops, hbm_gb_s, h2d_gb_s: lists with a figure for each GPU of this process, all of them at work at once; gpus:
        their numbers on the node; under_load: what they told meanwhile (under_load.py);
        all_reduce_bus_gb_s, reduce_scatter_bus_gb_s: bus bandwidth, as nccl-tests define it, over the GPUs of the node, and
        with `inter_node_` before the name over those of all nodes; disk: place -> {write_gb_s, read_gb_s}; left_out: what is
        not known (the names above, and disk.PLACE) -> why; failed: what was tried and broke -> how. What was not measured is
        an empty list, None, or no such place.
    """
    ends = time.monotonic() + budget_s
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    try:
        devices = within(min(PROBE_S, budget_s / 2), "the driver (NVML)", hardware.probe)
    except Unmeasured as error:
        devices, failed["driver"] = hardware.Devices("gpu", "", 0, 0.0, str(error)), str(error)
    wanted = devices.kind == "gpu" and devices.count > 0 or on_cpu
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(DeviceWork(devices, ends - time.monotonic(), cluster_args)) if wanted else None
        disk = disks(places, min(DISK_S, budget_s / 3 / max(len(places), 1)), left_out, failed, disk_bytes)
        found = work.result(ends - time.monotonic(), left_out, failed) if work else {}
        if not work:
            left_out |= dict.fromkeys((*GPU_LISTS, *BUS, *INTER_NODE), f"there is no GPU to measure ({devices.source})")
    lists: dict[str, Any] = {name: found.get(name, []) for name in EACH}
    single = {name: found.get(name) for name in (*BUS, *INTER_NODE)}
    return lists | single | {"disk": disk, "left_out": left_out, "failed": failed}


def disks(
    places: Mapping[str, Path], seconds: float, left_out: dict[str, str], failed: dict[str, str], size: int
) -> dict[str, DiskRates]:
    """The rates of each place. Places on one disk share a measurement."""
    out: dict[str, DiskRates] = {}
    known: dict[int, DiskRates | Unmeasured] = {}
    for name, place in places.items():
        try:
            disk = disk_of(place)
            if disk not in known:
                known[disk] = attempt(place, seconds, size)
            found = known[disk]
            if isinstance(found, Unmeasured):
                raise found
            out[name] = found
        except Unmeasured as error:
            left_out[f"disk.{name}"] = str(error)
            if isinstance(error, Failed):
                failed[f"disk.{name}"] = str(error)
    return out


def attempt(place: Path, seconds: float, size: int) -> DiskRates | Unmeasured:
    """The rates, or why there are none."""
    try:
        return rates(place, seconds, size)
    except Unmeasured as error:
        return error


class DeviceWork:
    """device_work.py at work. A context manager: no such process is left when it ends, by Ctrl-C too."""

    def __init__(self, devices: hardware.Devices, budget_s: float, cluster_args: Sequence[str]):
        self._budget_s = budget_s
        self._environ = environment(devices, os.environ)
        self._options = list(cluster_args)
        self._ended = False

    def __enter__(self) -> "DeviceWork":
        self._folder = tempfile.TemporaryDirectory()
        self._answer, log = Path(self._folder.name, "answer.json"), Path(self._folder.name, "log.txt")
        self._log = log
        options = [f"--answer={self._answer}", f"--limit={BEGIN * self._budget_s}", f"--parent={os.getpid()}"]
        with open(log, "wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *options, *self._options],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environ,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for the driver, and ends when that answers
            self._process.wait(ENDED_S)

    def result(self, seconds: float, left_out: dict[str, str], failed: dict[str, str]) -> dict[str, Any]:
        """What it has found, waiting so long for it. What is missing goes to `left_out`, what broke to `failed` as well."""
        until = time.monotonic() + seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(seconds, 0.0))
        by_itself = not self._options or time.monotonic() < until - PEERS_S
        code = self._process.poll()
        self._end()
        answer = json.loads(self._answer.read_text()) if self._answer.exists() else {}
        measured = answer.get("measured", {})
        left_out |= answer.get("left_out", {})
        failed |= answer.get("failed", {})
        if not answer.get("done"):
            during = f" in {answer['doing']}" if answer.get("doing") else ""
            words = f"not done within {self._budget_s:.0f} s, and ended{during}"
            if code is not None:
                words = f"the process ended with code {code}{during}: {self._last_words()}"
                failed |= {"process": words} if by_itself else {}
            elif hangs(answer):
                failed[answer["key"]] = words
            for name in (*GPU_LISTS, *BUS, *INTER_NODE):
                if name not in measured:
                    left_out.setdefault(name, words)
        return measured

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-2:])[-300:] or "it printed nothing"


def hangs(answer: Mapping[str, Any]) -> bool:
    """Whether GPUs that compute do not come together. What is slow before that may be the start of JAX, or a file system."""
    together = answer.get("key") in (*BUS, *INTER_NODE) and "gemm_tflops" in answer["measured"]
    return together and time.time() - answer["began_unix"] >= HANG_S


def environment(devices: hardware.Devices, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process, but with a small part of each GPU's memory."""
    out = {name: value for name, value in environ.items() if name not in IN_THE_WAY}
    out["PYTHONPATH"] = os.pathsep.join(part for part in (str(REPO), environ.get("PYTHONPATH", "")) if part)
    out["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that CUDA's GPU 5 is nvidia-smi's
    if devices.kind == "gpu" and devices.memory_gib:
        out["XLA_CLIENT_MEM_FRACTION"] = str(round(min(MOST, MEMORY_GIB / devices.memory_gib), 4))
    return out
