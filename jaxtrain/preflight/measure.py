"""Measures the rates of this node's GPUs and disks within a time budget; rates.py judges them.

The GPUs are measured in a child process, `python -m jaxtrain.preflight.measure`. If it hangs or crashes, it costs the budget
and no more, and the GPUs' memory is free afterwards. It stores each result in a file at once.
This process never starts JAX's devices. It measures the disks while the child starts JAX.
"""

import argparse
import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml

from jaxtrain import hardware, startup
from jaxtrain.bench import disk_rates
from jaxtrain.config import ConfigError
from jaxtrain.distributed import FIELDS, detect
from jaxtrain.launch import REPO
from jaxtrain.metrics import write_atomic
from jaxtrain.monitor.card import Card, Lost, Sample, mean
from jaxtrain.preflight.node import ANSWER_S, Unanswered, call_with_timeout
from jaxtrain.preflight.rates import BUS_RATES, GPU_LISTS, INTER_NODE_RATES, RATES

PROGRAM = "jaxtrain.preflight.measure"
LAST_START = 0.8  # of the budget, after which no measurement begins
MEMORY_GIB = 8.0  # of each GPU; the programs use about 4
MEMORY_SHARE = 0.5  # of a small GPU
DISK_S = 6.0  # for one disk, at most; and a third of the budget for all
HANG_S = 15.0  # in one collective, after which it hangs; NCCL's own start takes some seconds over many nodes
PEERS_S = 5.0  # before the deadline, in which a process may fail because the first of the others was killed
PROBE_S = 20.0  # for the driver to initialize its GPUs
KILLED_S = 3.0  # for a killed process to end; in a hanging driver it may not end at all
SAMPLE_S = 0.5  # the driver's figures are means over up to a second
PR_SET_PDEATHSIG = 1  # prctl: kill this process when its parent ends
# Variables that contradict the memory of the child; the check of memory variables reports them.
MEMORY_VARIABLES = (
    *("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"),
    "TF_FORCE_UNIFIED_MEMORY",
)
# Errors without a fault of the hardware: other processes use the memory, or JAX has no such operation.
NO_FAULT = re.compile(r"RESOURCE_EXHAUSTED|UNIMPLEMENTED|out of memory", re.IGNORECASE)


def measure(
    paths: Mapping[str, Path],
    budget_s: float,
    cluster_args: Sequence[str] = (),
    *,
    on_cpu: bool = False,
    disk_bytes: int = 2**30,
) -> dict[str, Any]:
    """Return the rates of this node's GPUs and disks, measured within `budget_s` seconds.

    Args:
        paths: name -> folder to write to and read from; it need not exist. Each disk is measured once.
        cluster_args: for several processes: --coordinator, --num-processes, --process-id and, if a process does not use the
            whole node, --local-devices, as of python -m jaxtrain.main. All processes call this at the same time. The port must
            not be in use by the callers.
        on_cpu: run the GPUs' programs on CPU devices in tiny sizes, whose figures have no meaning; for tests.
        disk_bytes: written to and read from each disk.

    Returns:
        the rates of `rates.RATES`; gpus: the GPUs' indices; under_load: the driver's samples during the matmuls; disk: name ->
        {write_gb_s, read_gb_s}; left_out: rate (or disk.NAME) -> why it is unknown; failed: measurement -> error. A rate that
        was not measured is an empty list, None, or absent from `disk`.
    """
    deadline = time.monotonic() + budget_s
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    try:
        devices = call_with_timeout(min(PROBE_S, budget_s / 2), "the driver (NVML)", hardware.probe)
    except Unanswered as error:
        devices, failed["driver"] = hardware.Devices("gpu", "", 0, 0.0, str(error)), str(error)
    found: dict[str, Any] = {}
    if devices.kind == "gpu" and devices.count > 0 or on_cpu:
        with Child(devices, deadline - time.monotonic(), cluster_args) as child:
            disk = measure_disks(paths, min(DISK_S, budget_s / 3 / max(len(paths), 1)), left_out, failed, disk_bytes)
            found = child.result(deadline - time.monotonic(), left_out, failed)
    else:
        left_out |= dict.fromkeys(RATES, f"there is no GPU to measure ({devices.source})")
        disk = measure_disks(paths, min(DISK_S, budget_s / 3 / max(len(paths), 1)), left_out, failed, disk_bytes)
    lists = {name: found.get(name, []) for name in GPU_LISTS}
    single = {name: found.get(name) for name in (*BUS_RATES, *INTER_NODE_RATES)}
    return lists | single | {"disk": disk, "left_out": left_out, "failed": failed}


def measure_disks(
    paths: Mapping[str, Path], seconds: float, left_out: dict[str, str], failed: dict[str, str], size: int
) -> dict[str, dict[str, float | None]]:
    """Return the rates of each path's disk. Paths on one disk share a measurement."""
    found: dict[str, dict[str, float | None]] = {}
    by_device: dict[int, dict[str, float | None] | Exception] = {}
    for name, path in paths.items():
        subject = f"{path} (its file system hangs, or is very slow)"
        try:
            folder = call_with_timeout(ANSWER_S, subject, functools.partial(disk_rates.existing, path))
            device = call_with_timeout(ANSWER_S, subject, functools.partial(os.stat, folder)).st_dev
            if device not in by_device:
                try:
                    work = functools.partial(disk_rates.disk, folder, seconds, size)
                    by_device[device] = call_with_timeout(seconds + ANSWER_S, subject, work)
                except (OSError, Unanswered, disk_rates.Unmeasured) as error:
                    by_device[device] = error
            result = by_device[device]
            if isinstance(result, Exception):
                raise result
            found[name] = result
        except (Unanswered, disk_rates.Unmeasured) as error:
            left_out[f"disk.{name}"] = str(error)
        except OSError as error:
            left_out[f"disk.{name}"] = failed[f"disk.{name}"] = f"{path}: {error.strerror or error}"
    return found


# ---- the child, as its parent uses it


class Child:
    """The child process. A context manager that kills the child at its end, by Ctrl-C too."""

    def __init__(self, devices: hardware.Devices, budget_s: float, cluster_args: Sequence[str]):
        self._devices, self._budget_s, self._cluster_args = devices, budget_s, list(cluster_args)
        self._killed = False

    def __enter__(self) -> "Child":
        self._folder = tempfile.TemporaryDirectory()
        self._results, self._log = Path(self._folder.name, "results.json"), Path(self._folder.name, "log.txt")
        options = [f"--results={self._results}", f"--limit={LAST_START * self._budget_s}", f"--parent={os.getpid()}"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *options, *self._cluster_args],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=child_environment(self._devices, os.environ),
                start_new_session=True,
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_S)

    def result(self, seconds: float, left_out: dict[str, str], failed: dict[str, str]) -> dict[str, Any]:
        """Return the child's rates, after waiting for it. Adds missing rates to `left_out`, and errors to `failed`."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(seconds, 0.0))
        own_fault = not self._cluster_args or time.monotonic() < deadline - PEERS_S
        code = self._process.poll()
        self._kill()
        results = json.loads(self._results.read_text()) if self._results.exists() else {}
        measured = results.get("measured", {})
        left_out |= results.get("left_out", {})
        failed |= results.get("failed", {})
        if not results.get("done"):
            current = f" in {results['current']}" if results.get("current") else ""
            text = f"not done within {self._budget_s:.0f} s, and ended{current}"
            if code is not None:
                lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
                last = " | ".join(lines[-2:])[-300:] or "it printed nothing"
                text = f"the process ended with code {code}{current}: {last}"
                failed |= {"process": text} if own_fault else {}
            elif hangs(results):
                failed[results["key"]] = text
            for name in RATES:
                if name not in measured:
                    left_out.setdefault(name, text)
        return measured


def hangs(results: Mapping[str, Any]) -> bool:
    """Return whether a collective hangs on GPUs that compute. Before it, the start of JAX or a file system may be slow."""
    in_collective = results.get("key") in (*BUS_RATES, *INTER_NODE_RATES) and "gemm_tflops" in results["measured"]
    return in_collective and time.time() - results["began_unix"] >= HANG_S


def child_environment(devices: hardware.Devices, environ: Mapping[str, str]) -> dict[str, str]:
    """Return this process's variables, with a small part of each GPU's memory."""
    out = {name: value for name, value in environ.items() if name not in MEMORY_VARIABLES}
    out["PYTHONPATH"] = os.pathsep.join(part for part in (str(REPO), environ.get("PYTHONPATH", "")) if part)
    out["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # CUDA then has nvidia-smi's indices
    if devices.kind == "gpu" and devices.memory_gib:
        out["XLA_CLIENT_MEM_FRACTION"] = str(round(min(MEMORY_SHARE, MEMORY_GIB / devices.memory_gib), 4))
    return out


# ---- the child itself


class Results:
    """The results so far, in a file that is always complete, for the parent of a child that hangs, crashes or is killed."""

    def __init__(self, path: Path, limit_s: float):
        self._path, self._deadline = path, time.monotonic() + limit_s
        self.fields: dict[str, Any] = {"current": "", "key": "", "began_unix": 0.0, "done": False}
        self.fields |= {"measured": {}, "left_out": {}, "failed": {}}

    def begin(self, what: str, key: str = "") -> None:
        self._store(current=what, key=key, began_unix=time.time())

    def end(self) -> None:
        self._store(current="", key="", done=True)

    def add(self, key: str, what: str, measure_it: Callable[[], Any], *, together: bool = False) -> None:
        """Measure `key`; an error becomes its reason.

        Args:
            together: with other processes, which would wait for one that left it out for lack of time.
        """
        if not together and time.monotonic() > self._deadline:
            self.fields["left_out"][key] = "no time was left"
            return
        self.begin(what, key)
        try:
            self.fields["measured"][key] = measure_it()
        except Exception as error:  # compiler, driver, memory: the other measurements still have a use
            traceback.print_exc()
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            self.fields["left_out"][key] = text
            if not NO_FAULT.search(str(error)):
                self.fields["failed"][key] = f"{what}: {text}"

    def _store(self, **fields: Any) -> None:
        self.fields |= fields
        write_atomic(self._path, json.dumps(self.fields))


class LoadSampler:
    """Samples GPUs in a thread while its block runs."""

    def __init__(self, cards: Sequence[Card], sample_s: float = SAMPLE_S):
        self._sample_s = sample_s
        self._samples: dict[Card, list[Sample]] = {card: [] for card in cards}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="GPUs under load", daemon=True)

    def __enter__(self) -> "LoadSampler":
        if self._samples:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._samples:
            self._thread.join(4 * self._sample_s)

    def _sample(self) -> None:
        while not self._over.wait(self._sample_s):  # not at once: clocks rise first
            for card, samples in self._samples.items():
                try:
                    sample = card.sample(time.monotonic())
                except Lost:
                    return  # the matmul fails too, with an error
                samples += [sample] if sample and not self._over.is_set() else []

    def result(self) -> list[dict[str, Any]]:
        """Return, for each GPU with samples: gpu (its index), means of clock and power, and the share of each reason."""
        out = []
        for card, samples in self._samples.items():
            if not samples:
                continue
            reasons = [sample.reasons for sample in samples if sample.reasons is not None]
            names = dict.fromkeys(name for each in reasons for name in each)
            out.append(
                {
                    "gpu": card.index,
                    "sm_mhz": mean([s.sm_clock_mhz for s in samples]),
                    "power_w": mean([s.power_w for s in samples]),
                    "power_limit_w": mean([s.power_limit_w for s in samples]),
                    "reasons": {name: sum(name in each for each in reasons) / len(reasons) for name in names},
                }
            )
        return out


def cards_of(devices: Sequence[Any]) -> list[Card]:
    """Return the NVML cards of JAX's devices, in their order; none for CPUs. CUDA_DEVICE_ORDER must be PCI_BUS_ID."""
    if devices[0].platform != "gpu":
        return []
    pynvml.nvmlInit()
    handles = hardware.visible_handles(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [Card(pynvml, handles[device.local_hardware_id]) for device in devices]


def split_by_node(devices: Sequence[Any], local: Any) -> tuple[list[Any], list[Any]]:
    """Return the devices of the node of `local`, and all devices if there are more nodes, else none."""
    from jaxtrain.sharding import node_of

    node = [device for device in devices if node_of(device) == node_of(local)]
    return node, list(devices) if len(node) < len(devices) else []


def measure_gpus(devices: Sequence[Any], local: Sequence[Any], results: Results) -> None:
    """Measure everything, the most significant first: `local` devices by themselves, and all `devices` of the run together."""
    from jaxtrain.bench import microbenchmarks as micro

    sizes = micro.TINY
    if local[0].platform == "gpu":
        # Square matmuls, for 0.3 s at most: a slow GPU must not take a minute. 1 GiB: nccl-tests reach the full bandwidth with
        # more than 256 MiB (NVIDIA/nccl-tests, issue 212).
        square = (((8192, 8192, 8192), 1.0),)
        sizes = micro.Sizes(square, 220.0, 0.3, memory_rounds=100, collective_mib=1024, repeats=5)
    try:
        cards = cards_of(local)
    except (pynvml.NVMLError, hardware.InvisibleGpu, IndexError) as error:
        cards, results.fields["left_out"]["under_load"] = [], f"NVML: {error}"
    results.fields["measured"]["gpus"] = [card.index for card in cards] or list(range(len(local)))
    sampler = LoadSampler(cards)

    def gemm() -> list[float]:
        return [r.rate / 1e12 for r in micro.gemm(sizes.gemms[0][0], local, sizes, watch=sampler)]

    def bus(kind: str, members: Sequence[Any]) -> float:
        # The matmuls have warmed the GPUs up. All processes must make the same number of calls, so no call depends on time.
        fixed = micro.Sizes(warm_s=0.0, repeats=sizes.repeats)
        elements = sizes.collective_mib * 2**20 // 2
        return micro.collective(kind, members, elements, sizes.collective_rounds, fixed).rate / 1e9

    results.add("gemm_tflops", f"GEMMs on {len(local)} GPUs", gemm)
    results.fields["measured"]["under_load"] = sampler.result()
    node, everywhere = split_by_node(devices, local[0])
    for prefix, members, where in (("", node, "the node's"), ("inter_node_", everywhere, "all")):
        for kind in ("all-reduce", "reduce-scatter"):
            key = f"{prefix}{kind.replace('-', '_')}_bus_gb_s"
            if len(members) > 1:
                what = f"{kind} over {where} {len(members)} GPUs"
                results.add(key, what, functools.partial(bus, kind, members), together=True)
            else:
                results.fields["left_out"][key] = "there is one node" if prefix else "there is one GPU"
    n = len(local)
    results.add("hbm_gb_s", f"memory of {n} GPUs", lambda: [r.rate / 1e9 for r in micro.memory(local, sizes)])
    results.add(
        "h2d_gb_s",
        f"copies from the host to {n} GPUs",
        lambda: [r.rate / 1e9 for r in micro.host(local, sizes, ("host to device",))],
    )


def main(argv: Sequence[str]) -> int:
    """Run the child."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}")
    parser.add_argument("--results", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--limit", type=float, required=True, help="seconds, after which no measurement begins")
    parser.add_argument("--parent", type=int, required=True, help="process whose end ends this one")
    for field in FIELDS:
        parser.add_argument(f"--{field}", default="", help="as of python -m jaxtrain.main")
    given = parser.parse_args(argv)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != given.parent:
            return 1  # the parent ended before the call
    # Options only: the launcher's variables name the address of the run itself.
    cluster, problems = detect({field: getattr(given, field.replace("-", "_")) for field in FIELDS}, {})
    if problems:
        raise ConfigError(problems)
    results = Results(given.results, given.limit)
    results.begin("the start of JAX" + (f" with {cluster.num_processes} processes" if cluster else ""))
    here = hardware.probe()
    startup.start_jax(here, cluster)
    import jax

    if here.kind == "gpu" and jax.devices()[0].platform != "gpu":  # JAX uses the CPU if its plugin does not start
        print(f"JAX does not start on the GPUs ({here.name}): it found {jax.devices()[0].platform} devices", file=sys.stderr)
        return 1
    measure_gpus(jax.devices(), jax.local_devices(), results)
    results.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
