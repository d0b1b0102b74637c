"""Times matmuls, attention, memory, the host link and collectives; node/disk_rates.py times disks.

Calibration (node/calibrate.py), node/kernels.py and preflight (node/node_rates.py) use this module.

A measurement is a jitted program that repeats its operation in a loop, so the time of a dispatch does not count. Each
iteration depends on the previous one, so that XLA neither hoists nor merges iterations. Copies from and to the host are single
calls, since they are long. The program first runs untimed until clocks have settled. The result is the median of several
timed runs. Matmuls, memory and host copies run on all given devices at once, since problems with power or cooling show only
under full load. Each device has its own time. Attention runs on one device.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels import attention, fp8
from jaxtrain.kernels.attention import cudnn, support

AXIS = "x"
# Compiler options of the train step for matmuls (step/compiler.py): use cuBLAS, do not merge matmuls that share an operand.
OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_disable_hlo_passes": "rematerialization,dot-merger,dynamic-slice-copy-fusion-async-wrapper,slice-sinker",
}
ATTENTION_BACKWARD = 2.5  # FLOPs of attention's backward pass over those of its forward pass
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
CURVE = "all-gather by size"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements. By default, matmuls and attention are those of Llama 3 8B at 8192 tokens."""

    # ((M, K, N), matmuls of this shape in a layer): q and output, k and v, feed-forward, a chunk of the loss.
    gemms: tuple[tuple[tuple[int, int, int], float], ...] = (
        ((8192, 4096, 4096), 2),
        ((8192, 4096, 1024), 2),
        ((8192, 4096, 14336), 3),
        ((2048, 4096, 128256), 4 / 32),
    )
    gemm_tflop: float = 100.0  # largest TFLOPs of a timed program
    gemm_s: float = math.inf  # approximate seconds of a timed program, whose iterations follow from `gemm_probe` iterations
    gemm_probe: int = 3
    attention: tuple[int, int, int, int, int] = (1, 8192, 32, 8, 128)  # B, T, N, K, H
    attention_rounds: int = 50
    memory_mib: int = 1024  # of each array
    memory_rounds: int = 200  # enough to hide XLA's copies at a loop's entry
    collective_mib: int = 512  # of the global array, in bfloat16
    collective_rounds: int = 20
    curve_mib: tuple[float, ...] = (0.25, 1, 4, 16, 64, 256)  # message sizes of the curve of rates
    curve_rounds: int = 50
    host_mib: int = 1024
    warm_s: float = 1.0
    repeats: int = 7


TINY = Sizes(  # for tests on CPUs: every program runs, but the figures have no meaning
    gemms=(((64, 32, 48), 2), ((32, 32, 80), 0.5)),
    gemm_tflop=1e-6,
    attention=(1, 128, 4, 2, 16),
    attention_rounds=2,
    memory_mib=1,
    memory_rounds=3,
    collective_mib=1,
    collective_rounds=2,
    curve_mib=(1 / 64, 1 / 16),
    curve_rounds=3,
    host_mib=1,
    warm_s=0.0,
    repeats=3,
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The time of one operation on one device, or of one collective."""

    kind: str
    what: str  # shapes or sizes
    work: float  # FLOPs or bytes of one iteration
    seconds: float  # of one iteration: the median
    spread: float  # (slowest - fastest) / median
    weight: float = 1.0  # share among the readings of its kind, such as matmuls of this shape in a layer
    failed: str = ""  # reason why there is no time; then work and seconds are 0
    message: float = 0.0  # bytes of a collective's global array

    @property
    def rate(self) -> float:
        """Return FLOPs or bytes per second."""
        return self.work / self.seconds


# ---- timing


def timed(run: Callable[..., Any], *args: Any, sizes: Sizes) -> list[float]:
    """Return the seconds of `sizes.repeats` calls, each until all devices are done. Untimed calls compile and warm up first."""
    _warm_up(run, *args, sizes=sizes)
    taken = []
    for _ in range(sizes.repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        taken.append(time.perf_counter() - start)
    return taken


def timed_by_device(run: Callable[..., Any], *args: Any, devices: Sequence[Any], sizes: Sizes) -> list[list[float]]:
    """Return the seconds of `sizes.repeats` calls for each device. Devices start together and do not wait for each other."""

    def end_of(shard: Any) -> float:
        shard.data.block_until_ready()
        return time.perf_counter()

    _warm_up(run, *args, sizes=sizes)
    taken: dict[Any, list[float]] = {device: [] for device in devices}
    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        for _ in range(sizes.repeats):
            start = time.perf_counter()
            shards = jax.tree.leaves(run(*args))[0].addressable_shards
            for shard, end in zip(shards, pool.map(end_of, shards), strict=True):
                taken[shard.device].append(end - start)
    return [taken[device] for device in devices]


def _warm_up(run: Callable[..., Any], *args: Any, sizes: Sizes) -> None:
    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    while time.perf_counter() - start < sizes.warm_s:
        jax.block_until_ready(run(*args))


def reading(kind: str, what: str, work: float, taken: Sequence[float], rounds: int = 1, weight: float = 1.0) -> Reading:
    """Return the reading of a program from `taken`, the seconds of its calls.

    Args:
        work: FLOPs or bytes of an iteration.
        rounds: iterations of a call.
    """
    median = statistics.median(taken)
    return Reading(kind, what, work, median / rounds, (max(taken) - min(taken)) / median, weight)


# ---- programs


def looped(body: Callable[..., Any], rounds: int) -> Callable[..., Any]:
    """Return a jitted `(constants, state) -> state` that runs `state = body(constants, state)` `rounds` times."""

    def loop(constants: Any, state: Any) -> Any:
        return jax.lax.fori_loop(0, rounds, lambda _, s: body(constants, s), state)

    return jax.jit(loop, compiler_options=OPTIONS)


def chain(x: jax.Array, *made: jax.Array) -> jax.Array:
    """Return x with one element that depends on all arrays of `made`, so that the next iteration waits for them.

    So XLA removes none of `made` as dead code. The other elements of x keep their random values, since a GPU that multiplies
    zeros uses less power and runs faster. The optimization barrier prevents XLA from
    computing only the used elements of `made`.
    """
    corners = [jax.lax.slice(m, (0,) * m.ndim, (1,) * m.ndim).reshape(()) for m in jax.lax.optimization_barrier(made)]
    drop = jnp.tanh(functools.reduce(jnp.add, [c.astype(jnp.float32) for c in corners]))
    return jax.lax.dynamic_update_slice(x, drop.astype(x.dtype).reshape((1,) * x.ndim), (0,) * x.ndim)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Return normal random values, generated on the device."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def sharded_over(devices: Sequence[Any], memory: str = "device") -> NamedSharding:
    """Return the sharding of the first dimension over these devices."""
    return NamedSharding(Mesh(np.asarray(devices), (AXIS,)), P(AXIS), memory_kind=memory)


def normal_on_each(seed: int, shape: tuple[int, ...], dtype: Any, devices: Sequence[Any]) -> jax.Array:
    """Return an array of random values, sharded in its first dimension. shape: shape of the shard of each device."""
    whole = (len(devices) * shape[0], *shape[1:])
    return jax.jit(functools.partial(normal, seed, whole, dtype), out_shardings=sharded_over(devices))()


def on_each(body: Callable[..., Any], devices: Sequence[Any]) -> Callable[..., Any]:
    """Return a body for `looped` that runs `body` on each device with the device's own shards."""
    spec = P(AXIS)
    mesh = sharded_over(devices).mesh
    return jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)


# ---- matmuls


def gemm(
    shape: tuple[int, int, int],
    devices: Sequence[Any],
    sizes: Sizes,
    weight: float = 1.0,
    watch: AbstractContextManager[Any] | None = None,
) -> list[Reading]:
    """Time bfloat16 matmuls (M, K) x (K, N) as in training: forward, and the gradients of input and weight.

    Args:
        weight: see `Reading`.
        watch: context manager that is entered while the timed program runs.
    """
    M, K, N = shape
    matmul = functools.partial(jnp.einsum, preferred_element_type=jnp.bfloat16)

    def body(w_KN: jax.Array, x_MK: jax.Array) -> jax.Array:
        y_MN = matmul("MK,KN->MN", x_MK, w_KN)
        return chain(x_MK, matmul("MN,KN->MK", y_MN, w_KN), matmul("MK,MN->KN", x_MK, y_MN))

    w_KN, x_MK = normal_on_each(0, (K, N), jnp.bfloat16, devices), normal_on_each(1, (M, K), jnp.bfloat16, devices)
    return _time_gemm("gemm", shape, body, w_KN, x_MK, devices, sizes, weight, watch)


def fp8_gemm(shape: tuple[int, int, int], devices: Sequence[Any], sizes: Sizes, weight: float = 1.0) -> list[Reading]:
    """Time the three matmuls of `gemm` in FP8. Quantizing the operands is not timed, since plans count it separately."""
    M, K, N = shape
    one = jnp.ones(())
    multiply = functools.partial(fp8.multiply, out=jnp.dtype("bfloat16"))

    def body(constants: tuple[jax.Array, ...], state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        w_NK, w_KN, dy_NM = constants
        x_MK, dy_MN, x_KM = state
        y = multiply(x_MK, one, w_NK, one)
        dx = multiply(dy_MN, one, w_KN, one)
        dw = multiply(x_KM, one, dy_NM, one)
        return chain(x_MK, dx, y), chain(dy_MN, y, dw), chain(x_KM, dw, dx)

    def made(*arrays: tuple[tuple[int, int], Any]) -> tuple[jax.Array, ...]:
        return tuple(normal_on_each(seed, array, dtype, devices) for seed, (array, dtype) in enumerate(arrays))

    constants = made(((N, K), fp8.E4M3), ((K, N), fp8.E4M3), ((N, M), fp8.E5M2))
    state = made(((M, K), fp8.E4M3), ((M, N), fp8.E5M2), ((K, M), fp8.E4M3))
    return _time_gemm("FP8 gemm", shape, body, constants, state, devices, sizes, weight)


def _time_gemm(
    kind: str,
    shape: tuple[int, int, int],
    body: Callable[..., Any],
    constants: Any,
    state: Any,
    devices: Sequence[Any],
    sizes: Sizes,
    weight: float,
    watch: AbstractContextManager[Any] | None = None,
) -> list[Reading]:
    M, K, N = shape
    flop = 3 * 2 * M * K * N
    rounds = max(1, math.ceil(sizes.gemm_tflop * 1e12 / flop))
    local = on_each(body, devices)
    if math.isfinite(sizes.gemm_s):
        # Processes may choose different numbers, since no device waits for another in this measurement.
        rounds = min(rounds, rounds_within(looped(local, sizes.gemm_probe), constants, state, sizes))
    run = looped(local, rounds)
    if watch:
        jax.block_until_ready(run(constants, state))  # compile before `watch` is entered
    with watch or contextlib.nullcontext():
        taken = timed_by_device(run, constants, state, devices=devices, sizes=sizes)
    return [reading(kind, f"{M:,} x {K:,} x {N:,}", flop, each, rounds, weight) for each in taken]


def rounds_within(probe: Callable[..., Any], constants: Any, state: Any, sizes: Sizes) -> int:
    """Return the number of iterations that take about `sizes.gemm_s`. probe: a program of `sizes.gemm_probe` iterations."""
    jax.block_until_ready(probe(constants, state))
    start = time.perf_counter()
    jax.block_until_ready(probe(constants, state))
    return max(1, round(sizes.gemm_s * sizes.gemm_probe / (time.perf_counter() - start)))


# ---- attention


def attention_loop(
    device: Any, name: str, spec: attention.Spec, shape: tuple[int, int, int, int, int], backward: bool, documents: int = 1
) -> tuple[Callable[..., Any], Any, jax.Array]:
    """Return (body, constants, state) with which `looped` runs an attention kernel.

    Args:
        shape: B, T, N, K, H.
        backward: whether to run the backward pass too.
        documents: number of documents, of equal length, in each sequence.
    """
    B, T, N, K, H = shape
    kernel = attention.implementation(name, spec)
    starts = np.linspace(0, T, documents, endpoint=False).astype(np.int32)
    segments_T = np.searchsorted(starts, np.arange(T), side="right").astype(np.int32)
    positions_T = np.arange(T, dtype=np.int32) - starts[segments_T - 1]
    segments_BT, positions_BT = (jnp.broadcast_to(jnp.asarray(x), (B, T)) for x in (segments_T, positions_T))
    rows = attention.Rows(segments_BT, positions_BT, segments_BT, positions_BT)
    prepared = jax.jit(kernel.prepare, static_argnums=1)(rows, spec)

    def forward(constants: Any, q_BTNH: jax.Array) -> jax.Array:
        k, v, prepared, _ = constants
        return chain(q_BTNH, kernel.attention(q_BTNH, k, v, prepared, spec))

    def both(constants: Any, q_BTNH: jax.Array) -> jax.Array:
        k, v, prepared, do = constants
        o, pull = jax.vjp(lambda q, k, v: kernel.attention(q, k, v, prepared, spec), q_BTNH, k, v)
        return chain(q_BTNH, o, *pull(do))

    # As in the model, since cuDNN's kernels need a shard_map that is manual over the whole mesh.
    mesh = Mesh(np.asarray([device]), (AXIS,))
    body = jax.shard_map(both if backward else forward, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    k_BSKH, v_BSKH, do_BTNH = normal(0, (B, T, K, H)), normal(1, (B, T, K, H)), normal(2, (B, T, N, H))
    return body, (k_BSKH, v_BSKH, prepared, do_BTNH), normal(3, (B, T, N, H))


def attention_pair(device: Any, hardware: attention.Hardware, packed: bool, sizes: Sizes) -> list[Reading]:
    """Time forward and backward of the kernel that `attention.impl=auto` chooses, on sequences with one document each.

    packed: compile the kernel for packed sequences, with data.max_segments=32.

    FLOPs are those inside the causal mask. The time of the backward pass is the time of both passes minus the time of the
    forward pass. cuDNN's backward pass may run in parts of the batch and heads (cudnn.part_of). Both passes are then timed for
    one part, since a plan counts slicing and joining as memory traffic.
    """
    B, T, N, K, H = sizes.attention
    spec = attention.Spec(H, "bf16", packed, max_segments=32 if packed else 1)
    name, _ = support.choose("auto", [(spec, T)], hardware)
    if name == "cudnn":
        group = N // K
        B, N = cudnn.part_of(B, T, T, N, K, H, spec.max_segments + 1 if packed else 1)
        K = max(1, N // group)
    times = []
    for backward in (False, True):
        body, constants, q_BTNH = attention_loop(device, name, spec, (B, T, N, K, H), backward)
        times.append(timed(looped(body, sizes.attention_rounds), constants, q_BTNH, sizes=sizes))
    what = f"{name}, {B} x {T:,} tokens, {N} heads on {K}, of {H}"
    flop = 4.0 * B * N * H * T**2 / 2
    kind = "packed attention" if packed else "attention"
    forward = reading(f"{kind} forward", what, flop, times[0], sizes.attention_rounds)
    both = reading(f"{kind} backward", what, ATTENTION_BACKWARD * flop, times[1], sizes.attention_rounds)
    return [forward, dataclasses.replace(both, seconds=both.seconds - forward.seconds)]


# ---- memory and host link


def memory(devices: Sequence[Any], sizes: Sizes) -> list[Reading]:
    """Time `a = b + a / 2` in float32 on each device. An iteration reads two arrays and writes one array."""
    count = sizes.memory_mib * 2**20 // 4
    b, a = (normal_on_each(seed, (count,), jnp.float32, devices) for seed in (0, 1))
    taken = timed_by_device(looped(lambda b, a: b + 0.5 * a, sizes.memory_rounds), b, a, devices=devices, sizes=sizes)
    what = f"2 x {sizes.memory_mib} MiB read, 1 written"
    return [reading("memory", what, 3.0 * 4 * count, each, sizes.memory_rounds) for each in taken]


def host(
    devices: Sequence[Any], sizes: Sizes, directions: Sequence[str] = ("device to host", "host to device")
) -> list[Reading]:
    """Time copies between each device and pinned host memory, in each direction, all devices at once.

    The devices may share a PCIe switch and the host's memory.
    """
    count = sizes.host_mib * 2**20 // 4
    shardings = {"device to host": sharded_over(devices, "pinned_host"), "host to device": sharded_over(devices)}
    on_device = normal_on_each(0, (count,), jnp.float32, devices)
    on_host = jax.block_until_ready(jax.device_put(on_device, shardings["device to host"]))
    found = []
    for direction in directions:
        copy = functools.partial(jax.device_put, device=shardings[direction])
        source = on_device if direction == "device to host" else on_host
        taken = timed_by_device(copy, source, devices=devices, sizes=sizes)
        found += [reading("host", direction, 4.0 * count, each) for each in taken]
    return found


# ---- collectives


def collective(kind: str, devices: Sequence[Any], elements: int, rounds: int, sizes: Sizes) -> Reading:
    """Time one collective of bfloat16 over these devices, in one or several processes.

    `work` is the bytes that each device sends in a ring. So the rate is the bus bandwidth of nccl-tests: message bytes over
    time, times 2(n-1)/n for an all-reduce and (n-1)/n for other collectives.

    Args:
        kind: one of COLLECTIVES; "" times the loop without a collective.
        elements: elements of an all-gather's result, or of each device's operand in a reduce-scatter or all-reduce.
        rounds: iterations of the loop.
    """
    D = len(devices)
    elements -= elements % D
    # The all-reduce runs in place, because a chain would make it copy the array. The array is zeros, so the sums stay finite.
    body = {
        "": lambda _, x: chain(x, x),
        "all-gather": lambda _, x: chain(x, jax.lax.all_gather(x, AXIS, tiled=True)),
        "reduce-scatter": lambda _, x: chain(x, jax.lax.psum_scatter(x, AXIS, tiled=True)),
        "all-reduce": lambda _, x: jax.lax.psum(x, AXIS),
    }[kind]
    # Elements on a device: the shard that is gathered, or the whole array that is reduced.
    local = elements if kind in ("reduce-scatter", "all-reduce") else elements // D
    sharding = sharded_over(devices)
    x = jax.jit(lambda: jnp.zeros((D * local,), jnp.bfloat16), out_shardings=sharding)()
    manual = jax.shard_map(body, mesh=sharding.mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS), check_vma=False)
    taken = timed(looped(manual, rounds), (), x, sizes=sizes)
    wire = (2 if kind == "all-reduce" else 1) * (D - 1) / D * 2.0 * elements
    done = reading(kind, f"{2 * elements / 2**20:,.3g} MiB over {D} devices", wire, taken, rounds)
    return dataclasses.replace(done, message=2.0 * elements)


def curve(devices: Sequence[Any], sizes: Sizes) -> list[Reading]:
    """Time all-gathers of several message sizes, minus the time of a loop without a collective."""
    empty = collective("", devices, 64 * len(devices), sizes.curve_rounds, sizes).seconds
    found = []
    for mib in sizes.curve_mib:
        r = collective("all-gather", devices, int(mib * 2**20 / 2), sizes.curve_rounds, sizes)
        found.append(dataclasses.replace(r, kind=CURVE, seconds=r.seconds - empty, message=mib * 2**20))
    return found
