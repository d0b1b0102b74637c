"""What the GPUs of this process reach in GEMMs, memory, copies from the host and collectives; `measure.py` runs it.

It has a process of its own. All its GPUs work at once, as in training, since trouble with power or cooling shows only then;
each is timed by itself. A measurement is a program that repeats its operation in a loop, as in a calibration
(plan/calibrate.py). What is known is written down after each part, so that a process which is ended keeps what it has found.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pynvml

from jaxtrain import hardware, startup
from jaxtrain.config import ConfigError
from jaxtrain.distributed import FIELDS, detect
from jaxtrain.hardware import InvisibleGpu
from jaxtrain.preflight import under_load
from jaxtrain.preflight.answer import Answer

PR_SET_PDEATHSIG = 1  # Linux's prctl: this process is killed when the one that started it ends, however that happens


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of everything. All arrays are per GPU."""

    gemm: int = 8192  # rows and columns
    gemm_rounds: int = 200  # of a timed program, at most: 0.3 s on an H100 at 700 TFLOP/s
    gemm_s: float = 0.3  # that it should take
    gemm_probe: int = 10  # rounds of the program by which that is found out
    memory_mib: int = 1024
    memory_rounds: int = 100
    host_mib: int = 1024
    collective_mib: int = 1024  # 256 MiB are too few for the full bandwidth of NCCL (NVIDIA/nccl-tests, issue 212)
    collective_rounds: int = 20
    warm_s: float = 1.0
    repeats: int = 5


TINY = Sizes(64, 2, 0.3, 1, 1, 2, 1, 1, 2, 0.0, 3)  # for CPUs: tries everything and measures nothing


# ---- on each GPU by itself, all at once


def timed_each(run: Callable[..., Any], *args: Any, devices: Sequence[Any], sizes: Sizes) -> list[float]:
    """Median seconds of a program on each device. It runs on all of them at once and they do not wait for each other."""
    import jax

    def end_of(shard: Any) -> float:
        shard.data.block_until_ready()
        return time.perf_counter()

    jax.block_until_ready(run(*args))
    warm = time.perf_counter() + sizes.warm_s
    while time.perf_counter() < warm:
        jax.block_until_ready(run(*args))
    taken: dict[Any, list[float]] = {device: [] for device in devices}
    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        for _ in range(sizes.repeats):
            began = time.perf_counter()
            shards = run(*args).addressable_shards
            for shard, end in zip(shards, pool.map(end_of, shards), strict=True):
                taken[shard.device].append(end - began)
    return [statistics.median(taken[device]) for device in devices]


def over(devices: Sequence[Any], memory: str = "device") -> Any:
    """The sharding that gives each of these devices its own part of an array's first dimension."""
    import jax
    import numpy as np

    from jaxtrain.plan.calibrate import AXIS

    mesh = jax.sharding.Mesh(np.asarray(devices), (AXIS,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS), memory_kind=memory)


def random(seed: int, shape: tuple[int, ...], dtype: Any, devices: Sequence[Any]) -> Any:
    """Random values of this shape on each device: a GPU that multiplies zeros draws less power and runs faster."""
    import jax

    from jaxtrain.plan.calibrate import normal

    whole = (len(devices) * shape[0], *shape[1:])
    return jax.jit(functools.partial(normal, seed, whole, dtype), out_shardings=over(devices))()


def gemm_program(devices: Sequence[Any], rounds: int) -> Any:
    """Jitted (w, x) -> x after `rounds` products of the device's own w and x, in bfloat16."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.plan.calibrate import chain, looped

    def body(w_KN: jax.Array, x_MK: jax.Array) -> jax.Array:
        return chain(x_MK, jnp.einsum("MK,KN->MN", x_MK, w_KN, preferred_element_type=jnp.bfloat16))

    mesh, spec = over(devices).mesh, over(devices).spec
    return looped(jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False), rounds)


def gemm(devices: Sequence[Any], sizes: Sizes, watch: AbstractContextManager[Any] | None = None) -> list[float]:
    """TFLOP/s of each device in a square bfloat16 product. `watch` is entered while they are at it."""
    import jax
    import jax.numpy as jnp

    n = sizes.gemm
    w, x = (random(seed, (n, n), jnp.bfloat16, devices) for seed in (0, 1))
    # Processes need not agree on it: no device waits for another here.
    rounds = enough(gemm_program(devices, sizes.gemm_probe), w, x, sizes)
    run = gemm_program(devices, rounds)
    jax.block_until_ready(run(w, x))  # compiled, before anybody watches
    with watch or contextlib.nullcontext():
        seconds = timed_each(run, w, x, devices=devices, sizes=sizes)
    return [2.0 * n**3 * rounds / s / 1e12 for s in seconds]


def enough(probe: Any, w: Any, x: Any, sizes: Sizes) -> int:
    """The rounds that take about `gemm_s`, by a program of `gemm_probe`: a slow card must not be at it for a minute."""
    import jax

    jax.block_until_ready(probe(w, x))
    began = time.perf_counter()
    jax.block_until_ready(probe(w, x))
    one_s = (time.perf_counter() - began) / sizes.gemm_probe
    return max(1, min(sizes.gemm_rounds, round(sizes.gemm_s / one_s)))


def memory(devices: Sequence[Any], sizes: Sizes) -> list[float]:
    """GB/s of each device's memory: two arrays read and one written."""
    import jax.numpy as jnp

    from jaxtrain.plan.calibrate import looped

    count = sizes.memory_mib * 2**20 // 4
    b, a = (random(seed, (count,), jnp.float32, devices) for seed in (0, 1))
    run = looped(lambda b, a: b + 0.5 * a, sizes.memory_rounds)
    seconds = timed_each(run, b, a, devices=devices, sizes=sizes)
    return [3.0 * 4 * count * sizes.memory_rounds / s / 1e9 for s in seconds]


def host(devices: Sequence[Any], sizes: Sizes) -> list[float]:
    """GB/s from pinned host memory to each device, all at once: they may share a switch, and share the host's memory."""
    import jax
    import jax.numpy as jnp

    count = sizes.host_mib * 2**20 // 4
    on_host = jax.block_until_ready(jax.device_put(random(0, (count,), jnp.float32, devices), over(devices, "pinned_host")))
    copy = functools.partial(jax.device_put, device=over(devices))
    seconds = timed_each(copy, on_host, devices=devices, sizes=sizes)
    return [4.0 * count / s / 1e9 for s in seconds]


# ---- all together


def collective(kind: str, devices: Sequence[Any], sizes: Sizes) -> float:
    """Bus bandwidth in GB/s of an all-reduce or reduce-scatter of bfloat16 over these devices, of this or more processes.

    As nccl-tests define it: the array's bytes over the time, times 2(n-1)/n for an all-reduce and (n-1)/n for a
    reduce-scatter. That is what a ring makes each GPU send, and so how a calibration counts.
    """
    from jaxtrain.plan import calibrate

    elements = sizes.collective_mib * 2**20 // 2
    # Warm by the GEMMs before; and a number of calls that is no matter of time, as every process must make the same.
    fixed = calibrate.Sizes(warm_s=0.0, repeats=sizes.repeats)
    found = calibrate.collective(kind, devices, elements, sizes.collective_rounds, fixed)
    return found.work / found.seconds / 1e9


def groups(devices: Sequence[Any], local: Any) -> tuple[list[Any], list[Any]]:
    """(devices of this node, all devices where there are more nodes, else none), of a run's devices; `local` is one of ours."""
    from jaxtrain.sharding import node_of

    node = [device for device in devices if node_of(device) == node_of(local)]
    return node, list(devices) if len(node) < len(devices) else []


# ---- the process


def work(devices: Sequence[Any], mine: Sequence[Any], sizes: Sizes, answer: Answer) -> None:
    """Everything, the most telling first. `devices` are the run's, `mine` this process's."""
    try:
        watched = under_load.cards(mine)
    except (pynvml.NVMLError, InvisibleGpu, IndexError) as error:  # figures are worth having without it
        watched, answer.fields["left_out"]["under_load"] = [], f"NVML: {error}"
    answer.fields["measured"]["gpus"] = [card.index for card in watched] or list(range(len(mine)))
    watch = under_load.UnderLoad(watched)
    answer.add("gemm_tflops", f"GEMMs on {len(mine)} GPUs", lambda: gemm(mine, sizes, watch))
    answer.fields["measured"]["under_load"] = watch.found()
    node, everywhere = groups(devices, mine[0])
    for prefix, members, where in (("", node, "the node's"), ("inter_node_", everywhere, "all")):
        for kind in ("all-reduce", "reduce-scatter"):
            key = f"{prefix}{kind.replace('-', '_')}_bus_gb_s"
            if len(members) > 1:
                words = f"{kind} over {where} {len(members)} GPUs"
                answer.add(key, words, functools.partial(collective, kind, members, sizes), together=True)
            else:
                answer.fields["left_out"][key] = "there is one GPU" if not prefix else "there is one node"
    answer.add("hbm_gb_s", f"memory of {len(mine)} GPUs", lambda: memory(mine, sizes))
    answer.add("h2d_gb_s", f"copies from the host to {len(mine)} GPUs", lambda: host(mine, sizes))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.preflight.device_work")
    parser.add_argument("--answer", type=Path, required=True, help="JSON file that is written")
    parser.add_argument("--limit", type=float, required=True, help="seconds, after which no part is begun")
    parser.add_argument("--parent", type=int, required=True, help="process that ends this one with itself")
    for field in FIELDS:
        parser.add_argument(f"--{field}", default="", help="as of python -m jaxtrain.main")
    given = parser.parse_args(argv)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != given.parent:
            return 1  # it has ended before it could be asked to take this one along
    # Only what was said: the launcher's variables name the address that the run itself will meet at.
    cluster, problems = detect({field: getattr(given, field.replace("-", "_")) for field in FIELDS}, {})
    if problems:
        raise ConfigError(problems)
    answer = Answer(given.answer, given.limit)
    answer.doing("the start of JAX" + (f" with {cluster.num_processes} processes" if cluster else ""))
    here = hardware.probe()
    startup.start_jax(here, cluster)
    import jax

    if here.kind == "gpu" and jax.devices()[0].platform != "gpu":  # JAX goes on with the CPU where its plugin does not start
        print(f"JAX does not start on the GPUs ({here.name}): it found {jax.devices()[0].platform} devices", file=sys.stderr)
        return 1
    work(jax.devices(), jax.local_devices(), Sizes() if here.kind == "gpu" else TINY, answer)
    answer.done()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
