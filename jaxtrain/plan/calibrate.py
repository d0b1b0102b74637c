"""What the GPUs of this machine reach, measured and kept: plans then say "calibrated on ..." and not "data-sheet rates".

    python -m jaxtrain.plan --calibrate

A measurement is one jitted program that repeats its operation in a loop, each round waiting for the last, so that no dispatch
is timed and nothing is hoisted or merged (only copies to the host run singly: they are long). It runs until clocks have had
the time to settle, is then timed several times until the devices are done, and the median counts. One process, the GPUs of
one node: what a network reaches is not measured.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import hardware
from jaxtrain.kernels import attention
from jaxtrain.plan import rates, result
from jaxtrain.plan.program.work import ATTENTION_BACKWARD
from jaxtrain.step import hardware_of

AXIS = "x"
PLAUSIBLE = 1.1  # times the data sheet: more than that means that the clock or the loop is wrong
OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}  # cuBLAS, as training compiles its GEMMs
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


class CalibrationError(ValueError):
    """There is nothing to calibrate here, or what was measured cannot be."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of everything. The defaults are a layer and the head of Llama 3 8B at 8192 tokens."""

    # (M, K, N), and how often a layer multiplies so: queries and output, keys and values, feed-forward, a chunk of the loss
    gemms: tuple[tuple[tuple[int, int, int], float], ...] = (
        ((8192, 4096, 4096), 2),
        ((8192, 4096, 1024), 2),
        ((8192, 4096, 14336), 3),
        ((2048, 4096, 128256), 4 / 32),
    )
    gemm_tflop: float = 100.0  # in one timed program
    attention: tuple[int, int, int, int, int] = (1, 8192, 32, 8, 128)  # B, T, N, K, H
    attention_rounds: int = 50
    memory_mib: int = 1024  # each array
    memory_rounds: int = 200  # the copies that XLA makes at a loop's entry must not count
    collective_mib: int = 512  # the whole array, in bfloat16
    collective_rounds: int = 20
    latency_rounds: int = 200
    host_mib: int = 1024
    warm_s: float = 2.0
    repeats: int = 7


TINY = Sizes(
    gemms=(((64, 32, 48), 2), ((32, 32, 80), 0.5)),
    gemm_tflop=1e-6,
    attention=(1, 128, 4, 2, 16),
    attention_rounds=2,
    memory_mib=1,
    memory_rounds=3,
    collective_mib=1,
    collective_rounds=2,
    latency_rounds=3,
    host_mib=1,
    warm_s=0.0,
    repeats=3,
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """One operation, timed."""

    kind: str  # a key of UNITS, or link latency
    what: str  # shapes or sizes
    work: float  # FLOPs or bytes of one round; 1 for a latency
    seconds: float  # of one round: the median
    spread: float  # (slowest - fastest) / median
    weight: float = 1.0  # rounds of it, beside the others of its kind


def timed(run: Callable[..., Any], *args: Any, sizes: Sizes) -> list[float]:
    """Seconds of each of `sizes.repeats` calls, after one that compiles and as many as warm up the device."""
    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    while time.perf_counter() - start < sizes.warm_s:
        jax.block_until_ready(run(*args))
    taken = []
    for _ in range(sizes.repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        taken.append(time.perf_counter() - start)
    return taken


def reading(kind: str, what: str, work: float, taken: Sequence[float], rounds: int = 1, weight: float = 1.0) -> Reading:
    """A reading from the times of programs that did `rounds` rounds each."""
    median = statistics.median(taken)
    return Reading(kind, what, work, median / rounds, (max(taken) - min(taken)) / median, weight)


def looped(body: Callable[..., Any], rounds: int) -> Callable[..., Any]:
    """Jitted `(constants, state) -> state` after `rounds` times `state = body(constants, state)`."""

    def loop(constants: Any, state: Any) -> Any:
        return jax.lax.fori_loop(0, rounds, lambda _, s: body(constants, s), state)

    return jax.jit(loop, compiler_options=OPTIONS)


def chain(x: jax.Array, *made: jax.Array) -> jax.Array:
    """x, one element of which now depends on all of `made`: the next round must wait for them, and none is dead code.

    The rest of x keeps its random values, whose products cost what they will in training: a GPU that multiplies zeros draws
    less power and runs faster. The barrier keeps XLA from computing only the element that is used.
    """
    corners = [jax.lax.slice(m, (0,) * m.ndim, (1,) * m.ndim).reshape(()) for m in jax.lax.optimization_barrier(made)]
    drop = jnp.tanh(functools.reduce(jnp.add, [c.astype(jnp.float32) for c in corners]))
    return jax.lax.dynamic_update_slice(x, drop.astype(x.dtype).reshape((1,) * x.ndim), (0,) * x.ndim)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random values, made on the device."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


# ---- what is measured


def gemm(shape: tuple[int, int, int], weight: float, sizes: Sizes) -> Reading:
    """Bfloat16 products of an (M, K) with a (K, N) matrix as in training: forward, and the gradients of input and weight."""
    M, K, N = shape
    flop = 3 * 2 * M * K * N
    rounds = max(1, math.ceil(sizes.gemm_tflop * 1e12 / flop))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.bfloat16)

    def body(w_KN: jax.Array, x_MK: jax.Array) -> jax.Array:
        y_MN = product("MK,KN->MN", x_MK, w_KN)
        return chain(x_MK, product("MN,KN->MK", y_MN, w_KN), product("MK,MN->KN", x_MK, y_MN))

    taken = timed(looped(body, rounds), normal(0, (K, N)), normal(1, (M, K)), sizes=sizes)
    return reading("gemm", f"{M:,} x {K:,} x {N:,}", flop, taken, rounds, weight)


def attention_pair(device: Any, packed: bool, sizes: Sizes) -> tuple[Reading, Reading]:
    """Forward and backward of the kernel that `attention.impl=auto` takes here, for rows that hold one document each.

    FLOPs inside the causal mask, counted as a plan counts them. The backward pass is what a program with both takes beyond
    one with the forward pass alone.
    """
    B, T, N, K, H = sizes.attention
    spec = attention.Spec(H, "bf16", packed, max_segments=32 if packed else 1)
    name, _ = attention.choose("auto", spec, hardware_of(device), T)
    kernel = attention.implementation(name)
    segments_BT = jnp.ones((B, T), jnp.int32)
    positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    prepared = jax.jit(kernel.prepare, static_argnums=1)(
        attention.Rows(segments_BT, positions_BT, segments_BT, positions_BT), spec
    )
    k_BSKH, v_BSKH, do_BTNH = normal(0, (B, T, K, H)), normal(1, (B, T, K, H)), normal(2, (B, T, N, H))

    def forward(constants: Any, q_BTNH: jax.Array) -> jax.Array:
        k, v, prepared, _ = constants
        return chain(q_BTNH, kernel.attention(q_BTNH, k, v, prepared, spec))

    def both(constants: Any, q_BTNH: jax.Array) -> jax.Array:
        k, v, prepared, do = constants
        o, pull = jax.vjp(lambda q, k, v: kernel.attention(q, k, v, prepared, spec), q_BTNH, k, v)
        return chain(q_BTNH, o, *pull(do))

    mesh = Mesh(np.asarray([device]), (AXIS,))
    times = []
    for body in (forward, both):
        # As in the model: cuDNN's kernels want a shard_map that is manual over the whole mesh.
        manual = jax.shard_map(body, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        run = looped(manual, sizes.attention_rounds)
        times.append(timed(run, (k_BSKH, v_BSKH, prepared, do_BTNH), normal(3, (B, T, N, H)), sizes=sizes))
    what = f"{name}, {B} x {T:,} tokens, {N} heads on {K}, of {H}"
    flop = 4.0 * B * N * H * T**2 / 2
    kind = "packed attention" if packed else "attention"
    ahead = reading(f"{kind} forward", what, flop, times[0], sizes.attention_rounds)
    whole = reading(f"{kind} backward", what, ATTENTION_BACKWARD * flop, times[1], sizes.attention_rounds)
    return ahead, dataclasses.replace(whole, seconds=whole.seconds - ahead.seconds)


def memory(sizes: Sizes) -> Reading:
    """Two arrays read and one written, elementwise in float32: `a = b + a / 2`."""
    count = sizes.memory_mib * 2**20 // 4
    run = looped(lambda b, a: b + 0.5 * a, sizes.memory_rounds)
    taken = timed(run, normal(0, (count,), jnp.float32), normal(1, (count,), jnp.float32), sizes=sizes)
    return reading("memory", f"2 x {sizes.memory_mib} MiB read, 1 written", 3.0 * 4 * count, taken, sizes.memory_rounds)


def collective(kind: str, devices: Sequence[Any], elements: int, rounds: int, sizes: Sizes) -> Reading:
    """One collective of bfloat16 over all `devices`; `elements` of the whole array. Work is what a ring makes each GPU send.

    `kind` "" is the loop alone.
    """
    D = len(devices)
    elements -= elements % D
    # An all-reduce passes its result on, since it would otherwise have to work on a copy; zeros keep the sums finite.
    body = {
        "": lambda _, x: chain(x, x),
        "all-gather": lambda _, x: chain(x, jax.lax.all_gather(x, AXIS, tiled=True)),
        "reduce-scatter": lambda _, x: chain(x, jax.lax.psum_scatter(x, AXIS, tiled=True)),
        "all-reduce": lambda _, x: jax.lax.psum(x, AXIS),
    }[kind]
    # Every device holds its own array of this size: the shard that is gathered, or the whole that is reduced.
    held = elements if kind in ("reduce-scatter", "all-reduce") else elements // D
    mesh = Mesh(np.asarray(devices), (AXIS,))
    x = jax.jit(lambda: jnp.zeros((D * held,), jnp.bfloat16), out_shardings=NamedSharding(mesh, P(AXIS)))()
    manual = jax.shard_map(body, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS), check_vma=False)
    taken = timed(looped(manual, rounds), (), x, sizes=sizes)
    wire = (2 if kind == "all-reduce" else 1) * (D - 1) / D * 2.0 * elements
    return reading(kind, f"{2 * elements / 2**20:,.3g} MiB over {D} devices", wire, taken, rounds)


def latency(devices: Sequence[Any], sizes: Sizes) -> list[Reading]:
    """Collectives of so few bytes that only their launch and their way through the group count, less the loop's own time."""
    empty, *found = (
        collective(kind, devices, 64 * len(devices), sizes.latency_rounds, sizes)
        for kind in ("", "all-gather", "reduce-scatter")
    )
    return [Reading("link latency", r.kind, 1.0, r.seconds - empty.seconds, r.spread) for r in found]


def host(device: Any, sizes: Sizes) -> list[Reading]:
    """Copies between the device and pinned host memory. One copy is long, so what its dispatch adds does not show."""
    there, back = SingleDeviceSharding(device, memory_kind="pinned_host"), SingleDeviceSharding(device, memory_kind="device")
    count = sizes.host_mib * 2**20 // 4
    on_device = jax.device_put(normal(0, (count,), jnp.float32), back)
    on_host = jax.block_until_ready(jax.device_put(on_device, there))
    return [
        reading("host", what, 4.0 * count, timed(functools.partial(jax.device_put, device=to), x, sizes=sizes))
        for what, x, to in (("device to host", on_device, there), ("host to device", on_host, back))
    ]


def measure(devices: Sequence[Any], sizes: Sizes, say: Callable[[str], None] = lambda _: None) -> list[Reading]:
    """All readings on these devices; those of links only where there are several. `say` is told what comes next."""
    found: list[Reading] = []
    with jax.default_device(devices[0]):
        for shape, weight in sizes.gemms:
            say(f"GEMM {' x '.join(map(str, shape))}")
            found.append(gemm(shape, weight, sizes))
        for packed in (False, True):
            say("packed attention" if packed else "attention")
            found += attention_pair(devices[0], packed, sizes)
        say("device memory")
        found.append(memory(sizes))
        say("host memory")
        found += host(devices[0], sizes)
    if len(devices) > 1:
        for kind in COLLECTIVES:
            say(kind)
            elements = sizes.collective_mib * 2**20 // 2
            found.append(collective(kind, devices, elements, sizes.collective_rounds, sizes))
        say("link latency")
        found += latency(devices, sizes)
    return found


# ---- what is made of it


def rate(readings: Iterable[Reading], *kinds: str) -> float:
    """Work per second of all rounds of these kinds together, weighted; 0 where no time was measured."""
    chosen = [r for r in readings if r.kind in kinds]
    seconds = sum(r.weight * r.seconds for r in chosen)
    return sum(r.weight * r.work for r in chosen) / seconds if seconds else 0.0


def to_rates(readings: Sequence[Reading], gpu: hardware.Gpu, device_kind: str, today: datetime.date) -> result.Rates:
    """What a plan reads. What was not measured stays by the data sheet, and the source says so.

    Raises CalibrationError where a rate is not positive, or above what the data sheet says can be.
    """
    sheet = rates.datasheet(gpu, "bf16")
    # Attention's rates are those of cuDNN's kernels: for packed rows, as training packs them, where it serves those.
    packed = "packed " if any(r.kind.startswith("packed") and r.what.startswith("cudnn") for r in readings) else ""
    measured = {
        "gemm_tflops": rate(readings, "gemm") / 1e12,
        "attention_forward_tflops": rate(readings, f"{packed}attention forward") / 1e12,
        "attention_backward_tflops": rate(readings, f"{packed}attention backward") / 1e12,
        "memory_tb_s": rate(readings, "memory") / 1e12,
        "host_gb_s": rate(readings, "host") / 1e9,
    }
    rest = "NVLink and network rates"
    if any(r.kind in COLLECTIVES for r in readings):
        measured["nvlink_gb_s"] = rate(readings, *COLLECTIVES) / 1e9
        measured["nvlink_latency_us"] = 1e6 * statistics.mean(r.seconds for r in readings if r.kind == "link latency")
        rest = "network rates"
    for key, value in measured.items():
        limit = ceilings(gpu).get(key, math.inf)
        if not 0 < value <= PLAUSIBLE * limit:
            raise CalibrationError(
                f"{key} = {value:.4g} measured, which must be positive and at most {limit:.4g}, the data sheet's, on "
                f"{device_kind}. Nothing is stored. See that nothing else runs on this machine, and calibrate again."
            )
    version = importlib.metadata.version("jaxlib")
    source = f"calibrated on {device_kind}, {today.isoformat()}, jaxlib {version}; {rest} by the data sheet"
    return dataclasses.replace(sheet, **measured, source=source)


def ceilings(gpu: hardware.Gpu) -> dict[str, float]:
    """The data sheet's own figure for each measured rate, in that rate's unit."""
    sheet = rates.datasheet(gpu, "bf16")
    return {
        "gemm_tflops": gpu.bf16,
        "attention_forward_tflops": gpu.bf16,
        "attention_backward_tflops": gpu.bf16,
        "memory_tb_s": gpu.hbm_tb_s,
        "nvlink_gb_s": gpu.nvlink_gb_s / 2,
        "host_gb_s": sheet.host_gb_s / rates.HOST_FRACTION,
    }


# Kind of a reading -> (field of Rates, unit, what one of the unit is in FLOPs or bytes a second)
UNITS = {
    "gemm": ("gemm_tflops", "TFLOP/s", 1e12),
    "attention forward": ("attention_forward_tflops", "TFLOP/s", 1e12),
    "attention backward": ("attention_backward_tflops", "TFLOP/s", 1e12),
    "packed attention forward": ("attention_forward_tflops", "TFLOP/s", 1e12),
    "packed attention backward": ("attention_backward_tflops", "TFLOP/s", 1e12),
    "memory": ("memory_tb_s", "TB/s", 1e12),
    "host": ("host_gb_s", "GB/s", 1e9),
    **dict.fromkeys(COLLECTIVES, ("nvlink_gb_s", "GB/s", 1e9)),
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
        ms, spread = f"{1e3 * r.seconds:.3g} ms", f"{r.spread:.1%}"
        if r.kind == "link latency":
            out.add_row(r.kind, r.what, f"{1e6 * r.seconds:.1f} us", "-", "-", ms, spread)
            continue
        key, unit, scale = UNITS[r.kind]
        value, limit = rate([r], r.kind) / scale, limits.get(key)
        sheet, share = (f"{limit:,.4g} {unit}", f"{value / limit:.0%}") if limit else ("-", "-")
        out.add_row(r.kind, r.what, f"{value:,.4g} {unit}", sheet, share, ms, spread)
    return out


def run(folder: Path | str = rates.FOLDER, *, on_cpu: bool = False, console: rich.console.Console | None = None) -> Path | None:
    """Measures the devices of this process, prints what was found, and stores it for plans; returns the file.

    On CPU it raises CalibrationError unless `on_cpu`, which tries every measurement in tiny sizes, stores nothing and returns
    None. Also raises it for several processes, and for a GPU without a data sheet in jaxtrain/hardware.py.
    """
    console = console or rich.console.Console()
    devices = jax.local_devices()
    kind = devices[0].device_kind
    if devices[0].platform != "gpu":
        if not on_cpu:
            raise CalibrationError(
                f"--calibrate measures the GPUs of this machine, and JAX finds none (its devices are {devices[0].platform}). "
                "Run it on the machine that plans are for; without it, plans use data-sheet rates."
            )
        found = measure(devices, TINY, lambda what: console.print(f"measuring {what}"))
        console.print(table(found, None, "CPU, tiny sizes: of no use for plans, nothing is stored"))
        return None
    if jax.process_count() > 1:
        raise CalibrationError(
            f"--calibrate runs in one process, and this is one of {jax.process_count()}. Run it on one node, outside the job."
        )
    gpu = hardware.lookup(kind)
    if gpu is None:
        raise CalibrationError(
            f"{kind!r}: its data sheet is not known, so nothing could be checked. Add it to jaxtrain/hardware.py."
        )
    found = measure(devices, Sizes(), lambda what: console.print(f"measuring {what}"))
    console.print(table(found, gpu, f"{len(devices)} x {kind}"))
    file = rates.save(to_rates(found, gpu, kind, datetime.date.today()), gpu.name, folder)
    console.print(f"stored as {file}: plans for {gpu.name} use it from now on")
    return file
