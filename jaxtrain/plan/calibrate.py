"""Measures the rates of this machine's GPUs and keeps them. Plans then use these and not published kernel rates.

    python -m jaxtrain.plan --calibrate

A measurement is one jitted program that repeats its operation in a loop, each round waiting for the last, so that no dispatch
is timed and nothing is hoisted or merged (only copies to the host run singly: they are long). It runs until clocks have had
the time to settle, is then timed several times until the devices are done, and the median counts. One process, the GPUs of
one node: what a network reaches is not measured.
"""

import dataclasses
import datetime
import functools
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import hardware, precision
from jaxtrain.kernels import attention, fp8
from jaxtrain.kernels.attention import cudnn
from jaxtrain.plan import rates
from jaxtrain.plan.program.op_cost import ATTENTION_BACKWARD
from jaxtrain.plan.readings import COLLECTIVES, CURVE, CalibrationError, Reading, table, to_rates
from jaxtrain.train import compiler
from jaxtrain.train.kernel import hardware_of

AXIS = "x"
# As training compiles its GEMMs: by cuBLAS, and products of one array with several others each for itself.
OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": ",".join(compiler.WITHOUT)}


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
    curve_mib: tuple[float, ...] = (0.25, 1, 4, 16, 64, 256)  # messages whose rates make the curve over sizes
    curve_rounds: int = 50
    host_mib: int = 1024
    warm_s: float = 1.0  # of each reading: a GPU's one node has about 22 of them in the two minutes of a benchmark's part
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
    curve_mib=(1 / 64, 1 / 16),
    curve_rounds=3,
    host_mib=1,
    warm_s=0.0,
    repeats=3,
)


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


def fp8_gemm(shape: tuple[int, int, int], weight: float, sizes: Sizes) -> Reading:
    """The same three products in 8-bit floating point, of matrices that are rounded already: a plan times rounding apart."""
    M, K, N = shape
    flop = 3 * 2 * M * K * N
    rounds = max(1, math.ceil(sizes.gemm_tflop * 1e12 / flop))
    one = jnp.ones(())

    def body(constants: tuple[jax.Array, ...], state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        w_NK, w_KN, dy_NM = constants
        x_MK, dy_MN, x_KM = state
        y = fp8.multiply(x_MK, one, w_NK, one, jnp.dtype("bfloat16"))
        dx = fp8.multiply(dy_MN, one, w_KN, one, jnp.dtype("bfloat16"))
        dw = fp8.multiply(x_KM, one, dy_NM, one, jnp.dtype("bfloat16"))
        return chain(x_MK, dx, y), chain(dy_MN, y, dw), chain(x_KM, dw, dx)

    constants = normal(0, (N, K), fp8.E4M3), normal(1, (K, N), fp8.E4M3), normal(2, (N, M), fp8.E5M2)
    state = normal(3, (M, K), fp8.E4M3), normal(4, (M, N), fp8.E5M2), normal(5, (K, M), fp8.E4M3)
    taken = timed(looped(body, rounds), constants, state, sizes=sizes)
    return reading("FP8 gemm", f"{M:,} x {K:,} x {N:,}", flop, taken, rounds, weight)


def attention_loop(
    device: Any, name: str, spec: attention.Spec, shape: tuple[int, int, int, int, int], backward: bool
) -> tuple[Callable[..., Any], Any, jax.Array]:
    """(body, constants, state) for `looped`: a kernel, also with its backward pass, on rows that hold one document each.

    shape: B, T, N, K, H.
    """
    B, T, N, K, H = shape
    kernel = attention.implementation(name)
    segments_BT = jnp.ones((B, T), jnp.int32)
    positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    rows = attention.Rows(segments_BT, positions_BT, segments_BT, positions_BT)
    prepared = jax.jit(kernel.prepare, static_argnums=1)(rows, spec)

    def forward(constants: Any, q_BTNH: jax.Array) -> jax.Array:
        k, v, prepared, _ = constants
        return chain(q_BTNH, kernel.attention(q_BTNH, k, v, prepared, spec))

    def both(constants: Any, q_BTNH: jax.Array) -> jax.Array:
        k, v, prepared, do = constants
        o, pull = jax.vjp(lambda q, k, v: kernel.attention(q, k, v, prepared, spec), q_BTNH, k, v)
        return chain(q_BTNH, o, *pull(do))

    # As in the model: cuDNN's kernels want a shard_map that is manual over the whole mesh.
    mesh = Mesh(np.asarray([device]), (AXIS,))
    body = jax.shard_map(both if backward else forward, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    k_BSKH, v_BSKH, do_BTNH = normal(0, (B, T, K, H)), normal(1, (B, T, K, H)), normal(2, (B, T, N, H))
    return body, (k_BSKH, v_BSKH, prepared, do_BTNH), normal(3, (B, T, N, H))


def attention_pair(device: Any, packed: bool, sizes: Sizes) -> tuple[Reading, Reading]:
    """Forward and backward of the kernel that `attention.impl=auto` takes here, for rows that hold one document each.

    FLOPs inside the causal mask, counted as a plan counts them. The backward pass is what a program with both takes beyond
    one with the forward pass alone. Of cuDNN one of the parts in which it runs backward: a plan counts what cuts and joins them
    as memory traffic.
    """
    B, T, N, K, H = sizes.attention
    spec = attention.Spec(H, "bf16", packed, max_segments=32 if packed else 1)
    name, _ = attention.choose("auto", [(spec, T)], hardware_of(device))
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
    done = reading(kind, f"{2 * elements / 2**20:,.3g} MiB over {D} devices", wire, taken, rounds)
    return dataclasses.replace(done, message=2.0 * elements)


def curve(devices: Sequence[Any], sizes: Sizes) -> list[Reading]:
    """All-gathers of several sizes, less the loop's own time: their rates fall with the message."""
    empty = collective("", devices, 64 * len(devices), sizes.curve_rounds, sizes).seconds
    found = []
    for mib in sizes.curve_mib:
        r = collective("all-gather", devices, int(mib * 2**20 / 2), sizes.curve_rounds, sizes)
        found.append(dataclasses.replace(r, kind=CURVE, seconds=r.seconds - empty, message=mib * 2**20))
    return found


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
    """All readings on these devices; those of links only where there are several. `say` is told what comes next.

    What fails becomes a reading that says so, and the rest is measured all the same.
    """
    found: list[Reading] = []

    def add(kinds: Sequence[str], what: str, make: Callable[..., Reading | Iterable[Reading]], *args: Any) -> None:
        say(f"{kinds[0]} {what}".strip())
        try:
            made = make(*args)
        except Exception as error:  # compiler, driver, memory: a rate less, and no reason to have none
            traceback.print_exc()
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            made = [Reading(kind, what, 0.0, 0.0, 0.0, failed=why) for kind in kinds]
        found.extend([made] if isinstance(made, Reading) else made)

    target = hardware_of(devices[0])
    major, minor = target.compute_capability
    eight = target.platform == "cpu" or 10 * major + minor >= precision.SM
    with jax.default_device(devices[0]):
        for shape, weight in sizes.gemms:
            what = " x ".join(f"{n:,}" for n in shape)
            add(["gemm"], what, gemm, shape, weight, sizes)
            # The head, less than once a layer, is never in 8 bits.
            if weight >= 1 and eight:
                add(["FP8 gemm"], what, fp8_gemm, shape, weight, sizes)
        for packed in (False, True):
            kind = "packed attention" if packed else "attention"
            add([f"{kind} forward", f"{kind} backward"], "", attention_pair, devices[0], packed, sizes)
        add(["memory"], "", memory, sizes)
        add(["host"], "", host, devices[0], sizes)
    if len(devices) > 1:
        elements = sizes.collective_mib * 2**20 // 2
        for kind in COLLECTIVES:
            add([kind], "", collective, kind, devices, elements, sizes.collective_rounds, sizes)
        add([CURVE], "", curve, devices, sizes)
    return found


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
                "Run it on the machine that plans are for; without it, plans use published kernel rates."
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
