"""Times pieces of work on GPUs: matmuls, attention, memory, the host link and collectives. node/disk_rates.py times disks.

Kernels (node/kernels.py), calibration (node/calibrate.py) and preflight (node/node_rates.py) are all timed as `TimedWork`.

The timed program repeats the work in a jitted loop, so the time of a dispatch does not count. Each iteration depends on the
previous one, so that XLA neither hoists nor merges iterations. The program first runs untimed until clocks have settled. The
result is the median of several timed runs. Matmuls and memory run on all given devices at once, since problems with power or
cooling show only under full load, and each device has its own time.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import hardware
from jaxtrain.kernels import attention as attention_table
from jaxtrain.kernels import fp8
from jaxtrain.models import precision
from jaxtrain.plan import rates
from jaxtrain.train.child import error_line

AXIS = "x"
# Compiler options of the train step for matmuls (step/compiler.py): use cuBLAS, do not merge matmuls that share an operand.
OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_disable_hlo_passes": "rematerialization,dot-merger,dynamic-slice-copy-fusion-async-wrapper,slice-sinker",
}
ATTENTION_BACKWARD = 2.5  # FLOPs of attention's backward pass over those of its forward pass
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
PROBE = 3  # iterations of the program that finds out how many iterations take `Sizes.seconds`

Loop = tuple[Callable[..., Any], Any, Any]  # (body, constants, state) for `make_loop`


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the work, and parameters of its timing. The default shapes are those of Llama 3 8B at 8,192 tokens."""

    # ((M, K, N), matmuls of this shape in a layer): q and output, k and v, feed-forward, a chunk of the loss.
    gemms: tuple[tuple[tuple[int, int, int], float], ...] = (
        ((8192, 4096, 4096), 2),
        ((8192, 4096, 1024), 2),
        ((8192, 4096, 14336), 3),
        ((2048, 4096, 128256), 4 / 32),
    )
    squares: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)  # square matmuls
    attention: tuple[int, int, int, int, int] = (1, 8192, 32, 8, 128)  # B, T, N, K, H
    loss: tuple[int, int, int] = (8192, 4096, 128256)  # T, D, V
    norm: tuple[int, int] = (16384, 4096)  # T, D
    optimizer: tuple[int, int, int] = (4, 4096, 14336)  # layers, D, F
    # (rows, E, D, F) of 8,192 tokens in a layer of Mixtral 8x7B (2 experts per token) and of Qwen3 30B A3B (8 per token).
    experts: tuple[tuple[int, int, int, int], ...] = ((16384, 8, 4096, 14336), (65536, 128, 2048, 768))
    memory_mib: int = 1024  # of each array
    host_mib: int = 1024
    collective_mib: int = 512  # of the global array, in bfloat16
    curve_mib: tuple[float, ...] = (0.25, 1, 4, 16, 64, 256)  # message sizes of the curve of rates
    collective_rounds: int = 20
    curve_rounds: int = 50
    flop: float = 100e12  # approximate FLOPs of a timed program
    rounds: int = 200  # most iterations of a timed program, enough to hide XLA's copies at a loop's entry
    seconds: float = math.inf  # approximate seconds of a timed program, if shorter
    warm_s: float = 1.0
    repeats: int = 7


TINY = Sizes(  # for tests on CPUs: every program runs, but the figures have no meaning
    gemms=(((64, 32, 48), 2), ((32, 32, 80), 0.5)),
    squares=(32, 64),
    attention=(1, 64, 4, 2, 16),
    loss=(64, 32, 264),
    norm=(64, 32),
    optimizer=(2, 32, 64),
    experts=((64, 4, 32, 64),),
    memory_mib=1,
    host_mib=1,
    collective_mib=1,
    curve_mib=(1 / 64, 1 / 16),
    collective_rounds=2,
    curve_rounds=3,
    flop=1e6,
    rounds=2,
    warm_s=0.0,
    repeats=3,
)


@dataclasses.dataclass(frozen=True)
class TimedWork:
    """A piece of work for timing."""

    kind: str
    label: str  # shapes or sizes
    flop: float  # FLOPs of one call
    bytes: float  # bytes that one call moves over the link `over`
    prepare: Callable[[], Loop]  # creates the operands
    calls: int = 1  # in one iteration of the loop
    dtype: str = "bf16"  # of the operands; the lower bound of the time uses the GPU's peak FLOP/s in this dtype
    over: str = "memory"  # or "host", "NVLink"
    devices: Sequence[Any] = ()  # they work independently of each other, each with its own time; empty: there is one time
    rounds: int = 0  # iterations of the timed program; 0: as many as `Sizes` allows
    looped: bool = True  # if not, the timed program is one call of `body`
    message: float = 0.0  # bytes of a collective's global array
    weight: float = 1.0  # share among the work of its kind, such as matmuls of this shape in a layer
    unable: str = ""  # reason why it cannot be timed here

    @property
    def amount(self) -> float:
        """Return the FLOPs of one call; for work without FLOPs, its bytes."""
        return self.flop or self.bytes

    def bound_s(self, gpu: hardware.Gpu) -> float:
        """Return the lower bound of a call's time: the longer of FLOPs and bytes over the data sheet's rates."""
        host_gb_s = rates.datasheet(gpu, "bf16").host_gb_s / rates.HOST_FRACTION
        gb_s = {"memory": 1e3 * gpu.hbm_tb_s, "host": host_gb_s, "NVLink": gpu.nvlink_gb_s / 2}[self.over]
        return max(self.flop / (gpu.peak(self.dtype) * 1e12), self.bytes / (gb_s * 1e9))


@dataclasses.dataclass(frozen=True)
class WorkReading:
    """The time of some work on one device, or on several devices together."""

    work: TimedWork
    seconds: float = 0.0  # of one call: the median
    spread: float = 0.0  # (slowest - fastest) / median
    failed: str = ""  # reason why there is no time

    @property
    def rate(self) -> float:
        """Return FLOPs per second; for work without FLOPs, bytes per second."""
        return self.work.amount / self.seconds

    def minus(self, baseline: "WorkReading", kind: str) -> "WorkReading":
        """Return the reading of this work without `baseline`, as work of this kind."""
        flop, moved_bytes = self.work.flop - baseline.work.flop, self.work.bytes - baseline.work.bytes
        work = dataclasses.replace(self.work, kind=kind, flop=flop, bytes=moved_bytes)
        return WorkReading(work, self.seconds - baseline.seconds, self.spread, self.failed or baseline.failed)


# ---- timing


def time_work(work: TimedWork, sizes: Sizes, watch: AbstractContextManager[Any] | None = None) -> list[WorkReading]:
    """Time work. Return a reading for each of its devices, or one reading.

    Args:
        watch: context manager that is entered while the timed program runs.
    """
    body, constants, state = work.prepare()
    rounds = work.rounds
    if not rounds:
        rounds = max(1, min(sizes.rounds, math.ceil(sizes.flop / (work.flop * work.calls)) if work.flop else sizes.rounds))
        if math.isfinite(sizes.seconds):
            # Processes may choose different numbers, since no device waits for another in such work.
            probe = time_calls(
                make_loop(body, PROBE), constants, state, sizes=dataclasses.replace(sizes, warm_s=0.0, repeats=1)
            )
            rounds = max(1, min(rounds, round(sizes.seconds * PROBE / probe[0][0])))
    run = make_loop(body, rounds) if work.looped else body
    if watch:
        jax.block_until_ready(run(constants, state))  # compile before `watch` is entered
    with watch or contextlib.nullcontext():
        times = time_calls(run, constants, state, sizes=sizes, devices=work.devices)
    readings = []
    for seconds in times:
        median = statistics.median(seconds)
        readings.append(WorkReading(work, median / (rounds * work.calls), (max(seconds) - min(seconds)) / median))
    return readings


def try_work(work: TimedWork, sizes: Sizes) -> list[WorkReading]:
    """Return the readings of `time_work`. If the work cannot be timed, the reading has the reason."""
    if work.unable:
        return [WorkReading(work, failed=work.unable)]
    try:
        return time_work(work, sizes)
    except Exception as error:  # of compiler, driver, memory or kernel; other work is still timed
        traceback.print_exc()
        return [WorkReading(work, failed=error_line(error))]


def time_calls(run: Callable[..., Any], *args: Any, sizes: Sizes, devices: Sequence[Any] = ()) -> list[list[float]]:
    """Return the seconds of `sizes.repeats` calls. Untimed calls compile and warm up first.

    Args:
        devices: devices with their own times, one list each; if there is none, one list with the time of all together.
    """

    def finish_time(arrays: Any) -> float:
        jax.block_until_ready(arrays)
        return time.perf_counter()

    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    while time.perf_counter() - start < sizes.warm_s:
        jax.block_until_ready(run(*args))
    times: list[list[float]] = [[] for _ in devices or (None,)]
    with concurrent.futures.ThreadPoolExecutor(len(times)) as pool:
        for _ in range(sizes.repeats):
            start = time.perf_counter()
            outputs = run(*args)
            if len(times) == 1:
                times[0].append(finish_time(outputs) - start)
                continue
            shards = {shard.device: shard.data for shard in jax.tree.leaves(outputs)[0].addressable_shards}
            for device_times, end in zip(times, pool.map(finish_time, [shards[device] for device in devices]), strict=True):
                device_times.append(end - start)
    return times


# ---- programs


def make_loop(body: Callable[..., Any], rounds: int) -> Callable[..., Any]:
    """Return a jitted `(constants, state) -> state` that runs `state = body(constants, state)` `rounds` times."""

    def loop(constants: Any, state: Any) -> Any:
        return jax.lax.fori_loop(0, rounds, lambda _, s: body(constants, s), state)

    return jax.jit(loop, compiler_options=OPTIONS)


def chain(x: jax.Array, *arrays: jax.Array) -> jax.Array:
    """Return x with one element that depends on all arrays of `arrays`, so that the next iteration waits for them.

    So XLA removes none of `arrays` as dead code. The other elements of x keep their random values, since a GPU that multiplies
    zeros uses less power and runs faster. The optimization barrier prevents XLA from computing only the used elements of
    `arrays`.
    """
    return set_first(x, depend_on(*arrays))


def depend_on(*arrays: jax.Array) -> jax.Array:
    """Return a number that depends on all arrays of `arrays`."""
    corners = [jax.lax.slice(m, (0,) * m.ndim, (1,) * m.ndim).reshape(()) for m in jax.lax.optimization_barrier(arrays)]
    return jnp.tanh(functools.reduce(jnp.add, [c.astype(jnp.float32) for c in corners]))


def set_first(x: jax.Array, number: jax.Array) -> jax.Array:
    """Return x with this number as its first element."""
    return jax.lax.dynamic_update_slice(x, number.astype(x.dtype).reshape((1,) * x.ndim), (0,) * x.ndim)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Return normal random values, generated on the device."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def sharding_over(devices: Sequence[Any]) -> NamedSharding:
    """Return the sharding of the first dimension over these devices."""
    return NamedSharding(Mesh(np.asarray(devices), (AXIS,)), P(AXIS))


def normal_on_each(seed: int, shape: tuple[int, ...], dtype: Any, devices: Sequence[Any]) -> jax.Array:
    """Return an array of random values, sharded in its first dimension. shape: shape of the shard of each device."""
    global_shape = (len(devices) * shape[0], *shape[1:])
    return jax.jit(functools.partial(normal, seed, global_shape, dtype), out_shardings=sharding_over(devices))()


def per_device_body(body: Callable[..., Any], devices: Sequence[Any], constants: P, state: P) -> Callable[..., Any]:
    """Return a body for `make_loop` that runs `body` on each device with the device's own shards. The specs are for shards."""
    mesh = sharding_over(devices).mesh
    return jax.shard_map(body, mesh=mesh, in_specs=(constants, state), out_specs=state, check_vma=False)


# ---- matmuls


def gemm(shape: tuple[int, int, int], dtype: str, devices: Sequence[Any]) -> TimedWork:
    """Return the matmuls (M, K) x (K, N) of training: forward, and the gradients of input and weight. A call is one matmul.

    Quantizing the operands of FP8 is not timed, since plans count it separately.

    Args:
        dtype: "bf16" or "fp8".
    """
    M, K, N = shape
    # An iteration has several small matmuls, so that the dependency between iterations costs little.
    copies, is_fp8, bf16 = 3 if max(shape) <= 2048 else 1, dtype == "fp8", jnp.dtype("bfloat16")
    value, gradient = (fp8.E4M3, fp8.E5M2) if is_fp8 else (bf16, bf16)
    constants, state = [((K, N), value)], [((M, K), value)]
    if is_fp8:  # these matmuls contract the last dimension of both operands, so they need transposed operands
        constants += [((N, K), value), ((N, M), gradient)]
        state += [((M, N), gradient), ((K, M), value)]

    def times(a: jax.Array, b: jax.Array) -> jax.Array:
        if is_fp8:
            return fp8.multiply(a, jnp.ones(()), b, jnp.ones(()), out=bf16)
        return jnp.einsum("MK,NK->MN", a, b, preferred_element_type=bf16)

    def body(constants: Sequence[Sequence[jax.Array]], state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (x_MK, *fp8_state), products = state, []
        for w_KN, *fp8_constants in constants:
            if is_fp8:
                (w_NK, dy_NM), (dy_MN, x_KM) = fp8_constants, fp8_state
                products += [times(x_MK, w_NK), times(dy_MN, w_KN), times(x_KM, dy_NM)]
            else:
                y_MN = times(x_MK, w_KN.T)
                products += [times(y_MN, w_KN), times(x_MK.T, y_MN.T)]
        last = jax.lax.optimization_barrier(depend_on(*products))  # computed once for all arrays of the state
        return tuple(set_first(x, last) for x in state)

    def prepare() -> Loop:
        seeds = itertools.count()

        def make_arrays(specs: Sequence[tuple[tuple[int, int], Any]]) -> tuple[jax.Array, ...]:
            return tuple(normal_on_each(next(seeds), shape, dtype, devices) for shape, dtype in specs)

        return (
            per_device_body(body, devices, P(AXIS), P(AXIS)),
            [make_arrays(constants) for _ in range(copies)],
            make_arrays(state),
        )

    gpu_hardware = attention_table.Hardware.from_device(devices[0])
    major, minor = gpu_hardware.compute_capability
    unable = is_fp8 and gpu_hardware.platform != "cpu" and 10 * major + minor < precision.SM
    element_bytes = (2 * value.itemsize + 2) / 3  # bytes of an element: two matrices are read, the third is written
    return TimedWork(
        f"gemm {dtype}",
        f"{M:,} x {K:,} x {N:,}",
        2.0 * M * K * N,
        element_bytes * (M * K + K * N + M * N),
        prepare,
        calls=3 * copies,
        dtype=dtype,
        devices=devices,
        unable="no 8-bit matmuls here" if unable else "",
    )


# ---- attention


def attention(
    device: Any, name: str, spec: attention_table.Spec, shape: tuple[int, int, int, int, int], documents: int = 1
) -> tuple[TimedWork, TimedWork]:
    """Return an attention kernel's forward pass, and its forward and backward pass. FLOPs are those inside the mask.

    Args:
        shape: B, T, N, K, H.
        documents: number of documents, of equal length, in each sequence.
    """
    B, T, N, K, H = shape

    def prepare(backward: bool) -> Loop:
        kernel = attention_table.implementation(name, spec)
        starts = np.linspace(0, T, documents, endpoint=False).astype(np.int32)
        segments_T = np.searchsorted(starts, np.arange(T), side="right").astype(np.int32)
        positions_T = np.arange(T, dtype=np.int32) - starts[segments_T - 1]
        segments_BT, positions_BT = (jnp.broadcast_to(jnp.asarray(x), (B, T)) for x in (segments_T, positions_T))
        rows = attention_table.Rows(segments_BT, positions_BT, segments_BT, positions_BT)
        prepared = jax.jit(kernel.prepare, static_argnums=1)(rows, spec)

        def body(constants: Any, q_BTNH: jax.Array) -> jax.Array:
            k, v, prepared, do = constants
            attend = functools.partial(kernel.attention, prepared=prepared, spec=spec)
            if not backward:
                return chain(q_BTNH, attend(q_BTNH, k, v))
            o, pull = jax.vjp(attend, q_BTNH, k, v)
            return chain(q_BTNH, o, *pull(do))

        k_BSKH, v_BSKH, do_BTNH = normal(0, (B, T, K, H)), normal(1, (B, T, K, H)), normal(2, (B, T, N, H))
        # As in the model, since cuDNN's kernels need a shard_map that is manual over the whole mesh.
        return per_device_body(body, [device], P(), P()), (k_BSKH, v_BSKH, prepared, do_BTNH), normal(3, (B, T, N, H))

    label = f"{name}{', packed' if spec.packed else ''}; {B} x {T:,}, heads {N}/{K} of {H}"
    flop, q, kv = 2.0 * B * N * H * T**2 / documents, 2.0 * B * T * N * H, 2.0 * B * T * K * H
    forward = TimedWork("attention forward", label, flop, 2 * q + 2 * kv, functools.partial(prepare, False))
    # Forward and backward read q, k, v, o and do, and write o, dq, dk and dv.
    flops, moved_bytes = flop * (1 + ATTENTION_BACKWARD), 6 * q + 6 * kv
    return forward, TimedWork("attention forward+backward", label, flops, moved_bytes, functools.partial(prepare, True))


# ---- memory and host link


def memory(devices: Sequence[Any], sizes: Sizes) -> TimedWork:
    """Return `a = b + a / 2` in float32 on each device. A call reads two arrays and writes one array."""
    count = sizes.memory_mib * 2**20 // 4

    def prepare() -> Loop:
        b, a = (normal_on_each(seed, (count,), jnp.float32, devices) for seed in (0, 1))
        return lambda b, a: b + 0.5 * a, b, a

    return TimedWork("memory", f"2 x {sizes.memory_mib} MiB read, 1 written", 0.0, 3.0 * 4 * count, prepare, devices=devices)


def host(device: Any, sizes: Sizes, to_host: bool) -> TimedWork:
    """Return a copy from the device to pinned host memory, or back."""
    count = sizes.host_mib * 2**20 // 4
    source, target = SingleDeviceSharding(device), SingleDeviceSharding(device, memory_kind="pinned_host")
    if not to_host:
        source, target = target, source

    def prepare() -> Loop:
        return lambda _, x: jax.device_put(x, target), (), jax.device_put(normal(0, (count,), jnp.float32), source)

    label = "device to host" if to_host else "host to device"
    return TimedWork("host", label, 0.0, 4.0 * count, prepare, over="host", rounds=1, looped=False)


# ---- collectives


def collective(kind: str, devices: Sequence[Any], message: float, rounds: int) -> TimedWork:
    """Return a collective of bfloat16 over these devices, in one or several processes.

    `bytes` are those that each device sends in a ring. So the rate is the bus bandwidth of nccl-tests: message bytes over
    time, times 2(n-1)/n for an all-reduce and (n-1)/n for other collectives.

    Args:
        kind: one of COLLECTIVES, or "no collective", which is the loop alone.
        message: bytes of an all-gather's result, or of each device's operand in a reduce-scatter or all-reduce.
        rounds: iterations of the loop, the same in all processes.
    """
    D = len(devices)
    elements = int(message / 2) // D * D
    # Elements on a device: the shard that is gathered, or the whole array that is reduced.
    local = elements if kind in ("reduce-scatter", "all-reduce") else elements // D
    # The all-reduce runs in place, because a chain would make it copy the array. The array is zeros, so the sums stay finite.
    body = {
        "no collective": lambda _, x: chain(x, x),
        "all-gather": lambda _, x: chain(x, jax.lax.all_gather(x, AXIS, tiled=True)),
        "reduce-scatter": lambda _, x: chain(x, jax.lax.psum_scatter(x, AXIS, tiled=True)),
        "all-reduce": lambda _, x: jax.lax.psum(x, AXIS),
    }[kind]

    def prepare() -> Loop:
        x = jax.jit(lambda: jnp.zeros((D * local,), jnp.bfloat16), out_shardings=sharding_over(devices))()
        return per_device_body(body, devices, P(), P(AXIS)), (), x

    sent_bytes = {"no collective": 0, "all-reduce": 2}.get(kind, 1) * (D - 1) / D * 2.0 * elements
    label = f"{2 * elements / 2**20:,.3g} MiB over {D} devices"
    return TimedWork(kind, label, 0.0, sent_bytes, prepare, over="NVLink", rounds=rounds, message=2.0 * elements)
