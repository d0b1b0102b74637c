"""Kernels of a train step against their floors, timed by bench/microbenchmarks.py.

A kernel's floor is the longer of two times: its FLOPs at the data sheet's peak, and its bytes, each read and written once, at
the memory bandwidth.
"""

import functools
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.console

from jaxtrain import hardware
from jaxtrain.bench import experts, report
from jaxtrain.bench.child import FAILED, LATE, OK, error_line, run_case, save_partial
from jaxtrain.bench.report import Folder
from jaxtrain.bench.train_step import start_devices
from jaxtrain.bench.work import TINY, Sizes, Work, one_device

KINDS = ("attention", "loss", "norm", "optimizer", "gemm", "experts")
HEADINGS = ("kernel", "on", "one call", "spread", "floor", "of the floor", "TFLOP/s", "GB/s", "")
NO_SCORES = 1024  # tokens of a sequence, above which the reference attention is not timed: it holds all scores


# ---- what is timed


def attention(device: Any, sizes: Sizes) -> Iterator[Work | dict[str, Any]]:
    """Yield every implementation, forward and with its backward pass, for plain and packed sequences (one document each).

    FLOPs are those inside the causal mask; the backward pass counts as 2.5 forward passes.
    """
    from jaxtrain.bench.microbenchmarks import ATTENTION_BACKWARD, attention_loop
    from jaxtrain.kernels import attention as table
    from jaxtrain.train.kernel import hardware_of

    B, T, N, K, H = sizes.attention
    flop, q, kv = 2.0 * B * N * H * T**2, 2.0 * B * T * N * H, 2.0 * B * T * K * H

    for name in table.IMPLEMENTATIONS:
        kernel = table.implementation(name)
        for packed in (False, True):
            spec = table.Spec(H, "bf16", packed, max_segments=32 if packed else 1)
            what = f"{name}{', packed' if packed else ''}; {B} x {T:,}, heads {N}/{K} of {H}"
            why = kernel.unsupported(spec, hardware_of(device))
            if name == "pallas" and device.platform != "gpu":
                why = "interpreted on a CPU"
            if name == "reference" and T > NO_SCORES:
                why = f"holds all {T:,} x {T:,} scores"
            if why:
                yield {"kind": "attention", "what": what, "verdict": "not timed", "why": why}
                continue

            def loop(backward: bool, name: str = name, spec: Any = spec) -> tuple[Callable[..., Any], Any, Any]:
                return attention_loop(device, name, spec, sizes.attention, backward)

            yield Work("attention forward", what, flop, 2 * q + 2 * kv, functools.partial(loop, False))
            # q, k, v, o and do are read, o, dq, dk and dv written.
            moved, flops = 6 * q + 6 * kv, flop * (1 + ATTENTION_BACKWARD)
            yield Work("attention forward+backward", what, flops, moved, functools.partial(loop, True))


def loss(device: Any, sizes: Sizes) -> Iterator[Work]:
    """Cross entropy with its head, and the gradients of both, as the train step calls it."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.bench.microbenchmarks import chain, normal
    from jaxtrain.sharding import make_placement
    from jaxtrain.train.definition import numerics_of
    from jaxtrain.train.loss import LossSpec, loss_function
    from jaxtrain.zero import make_zero

    T, D, V = sizes.loss
    run = one_device()
    placement, numerics = make_placement(run, [device]), numerics_of(run)
    spec = LossSpec(numerics, placement, make_zero(run, placement, numerics), run.loss.chunk, 0.0)
    function = loss_function(run.loss.name)

    def body(constants: Any, hidden_BTD: jax.Array) -> jax.Array:
        head_VD, batch = constants
        value, grads = jax.value_and_grad(lambda h, w: function(h, w, batch, spec) / T, (0, 1))(hidden_BTD, head_VD)
        return chain(hidden_BTD, value, *grads)

    def prepare() -> tuple[Callable[..., Any], Any, Any]:
        targets = jax.random.randint(jax.random.key(0), (1, T), 0, V)
        head_VD = 0.02 * normal(1, (V, D), jnp.float32)
        return body, (head_VD, {"targets": targets, "weights": jnp.ones((1, T), jnp.float32)}), normal(2, (1, T, D))

    # Hidden states and their gradient in bfloat16, the head and its gradient in float32.
    yield Work("cross entropy", f"{T:,} tokens of {D:,}, {V:,} words", 6.0 * T * D * V, 4.0 * T * D + 8.0 * D * V, prepare)


def norm(device: Any, sizes: Sizes) -> Iterator[Work]:
    """RMSNorm forward and backward: x, dy and again x are read, y and dx written."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.bench.microbenchmarks import chain, normal
    from jaxtrain.kernels.norm import rms_norm

    T, D = sizes.norm

    def body(constants: Any, x_BTD: jax.Array) -> jax.Array:
        w, dy = constants
        y: Any
        y, pull = jax.vjp(lambda x, w: rms_norm(x, w, 1e-5), x_BTD, w)
        return chain(x_BTD, y, *pull(dy))

    def prepare() -> tuple[Callable[..., Any], Any, Any]:
        return body, (jnp.ones((D,), jnp.float32), normal(0, (1, T, D))), normal(1, (1, T, D))

    yield Work("norm forward+backward", f"{T:,} tokens of {D:,}", 0.0, 5.0 * 2 * T * D, prepare)


def optimizer(device: Any, sizes: Sizes) -> Iterator[Work]:
    """The update of the train step: parameters and moments read and written, gradients read."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.bench.microbenchmarks import normal
    from jaxtrain.kernels.numerics import DTYPES
    from jaxtrain.optim.optimizer import make_optimizer

    run = one_device()
    tx = make_optimizer(run.optimizer, run.dtypes, {"w": ("layers", "embed", "mlp")})

    def body(grads: Any, state: Any) -> Any:
        params, moments = state
        updates, moments = tx.update(grads, moments, params)
        return jax.tree.map(lambda p, u: (p - 1e-4 * u).astype(p.dtype), params, updates), moments

    def prepare() -> tuple[Callable[..., Any], Any, Any]:
        params = {"w": normal(0, sizes.optimizer, jnp.float32)}
        return body, {"w": normal(1, sizes.optimizer, DTYPES[run.dtypes.grads])}, (params, jax.jit(tx.init)(params))

    params = {"w": jax.ShapeDtypeStruct(sizes.optimizer, jnp.float32)}
    held = jax.tree.leaves((params, jax.eval_shape(tx.init, params)))
    count = math.prod(sizes.optimizer)
    moved = 2.0 * sum(a.size * a.dtype.itemsize for a in held) + count * jnp.dtype(DTYPES[run.dtypes.grads]).itemsize
    yield Work("optimizer", f"{run.optimizer.name}, {count:,} parameters", 0.0, moved, prepare)


def gemm(device: Any, sizes: Sizes) -> Iterator[Work | dict[str, Any]]:
    """Square products, both operands with the summed dimension last, in bfloat16 and where the GPU has them in 8-bit floats."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.bench.microbenchmarks import chain, normal

    gpu = hardware.lookup(device.device_kind)
    types = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}
    for dtype, kind in types.items():
        if dtype == "fp8" and (device.platform != "gpu" or (gpu and not gpu.fp8)):
            yield {"kind": "gemm fp8", "what": "", "verdict": "not timed", "why": "no 8-bit GEMMs here"}
            continue
        for n in sizes.gemm:
            # Several in a round, so that what ties a round to the next does not count.
            calls = 8 if n <= 2048 else 4 if n <= 8192 else 1

            def body(weights: Sequence[jax.Array], x_MK: jax.Array) -> jax.Array:
                def product(w_NK: jax.Array) -> jax.Array:
                    dims = (((1,), (1,)), ((), ()))
                    return jax.lax.dot_general(x_MK, w_NK, dims, preferred_element_type=jnp.bfloat16)

                return chain(x_MK, *map(product, weights))

            def prepare(n: int = n, kind: Any = kind, calls: int = calls, body: Any = body) -> tuple[Any, Any, Any]:
                return body, [normal(i + 1, (n, n), kind) for i in range(calls)], normal(0, (n, n), kind)

            moved = (2 * jnp.dtype(kind).itemsize + 2.0) * n * n
            yield Work(f"gemm {dtype}", f"{n:,} x {n:,} x {n:,}", 2.0 * n**3, moved, prepare, calls, dtype)


MAKERS = dict(zip(KINDS, (attention, loss, norm, optimizer, gemm, experts.products), strict=True))


# ---- timing


def time_one(work: Work, sizes: Sizes, gpu: hardware.Gpu | None) -> dict[str, Any]:
    """A row of the table; a kernel that fails is a row that says so."""
    from jaxtrain.bench import microbenchmarks

    out: dict[str, Any] = {"kind": work.kind, "what": work.what, "flop": work.flop, "bytes": work.bytes}
    rounds = sizes.rounds
    if work.flop:
        rounds = max(1, min(sizes.rounds, math.ceil(sizes.work / (work.flop * work.calls))))
    try:
        body, constants, state = work.prepare()
        taken = microbenchmarks.timed(
            microbenchmarks.looped(body, rounds),
            constants,
            state,
            sizes=microbenchmarks.Sizes(warm_s=sizes.warm_s, repeats=sizes.repeats),
        )
    except Exception as error:  # compiler, driver or kernel: the others are still worth timing
        traceback.print_exc()
        return out | {"verdict": FAILED, "why": error_line(error)}
    r = microbenchmarks.reading(work.kind, work.what, work.flop, taken, rounds * work.calls)
    floor = None
    if gpu:
        floor = max(work.flop / (gpu.peak(work.dtype) * 1e12), work.bytes / (gpu.hbm_tb_s * 1e12))
    return out | {
        "verdict": OK,
        "seconds_a_call": r.seconds,
        "spread": r.spread,
        "floor_s": floor,
        "of_floor": floor / r.seconds if floor else None,
        "tflops": work.flop / r.seconds / 1e12,
        "gb_s": work.bytes / r.seconds / 1e9,
    }


def measure(ask: dict[str, Any]) -> dict[str, Any]:
    """All rows of one of KINDS, `ask["kind"]`, on the first device; none is begun after `ask["limit_s"]` (null: no limit).

    What is known is kept after each row.
    """
    began = time.monotonic()
    (device,) = start_devices(one_device(ask.get("cache")), 1)
    sizes = Sizes() if device.platform == "gpu" else TINY
    gpu = hardware.lookup(device.device_kind) if device.platform == "gpu" else None
    rows: list[dict[str, Any]] = []
    for work in MAKERS[ask["kind"]](device, sizes):
        if not isinstance(work, Work):
            rows.append(work)
        elif ask["limit_s"] and time.monotonic() - began > ask["limit_s"]:
            rows.append({"kind": work.kind, "what": work.what, "verdict": "not timed", "why": "no time was left"})
        else:
            rows.append(time_one(work, sizes, gpu))
        save_partial(ask, {"verdict": LATE, "device": device.device_kind, "rows": rows})
    return {"verdict": OK, "device": device.device_kind, "rows": rows}


def row(r: dict[str, Any]) -> list[str]:
    """As cells of HEADINGS."""
    if r["verdict"] != OK:
        return [r["kind"], r["what"], *["-"] * 6, f"{r['verdict']}: {r['why']}"]
    floor = "-" if r["floor_s"] is None else f"{1e3 * r['floor_s']:.3g} ms"
    tflops = f"{r['tflops']:,.4g}" if r["flop"] else "-"
    cells = [f"{1e3 * r['seconds_a_call']:.3g} ms", f"{r['spread']:.1%}", floor, report.percent(r["of_floor"])]
    return [r["kind"], r["what"], *cells, tflops, f"{r['gb_s']:,.4g}", ""]


def run(kinds: Sequence[str], folder: Folder, console: rich.console.Console) -> int:
    """Times these kinds, each in a process of its own. Exit code 0; 1 where one failed."""
    found: list[dict[str, Any]] = []
    try:
        for kind in kinds:
            with console.status(f"{kind} ..."):
                answer = run_case("jaxtrain.bench.kernels:measure", {"kind": kind, "limit_s": None}, log=folder.log(kind))
            rows = answer.get("rows", [])
            if answer["verdict"] != OK:
                rows.append({"kind": kind, "what": "", "verdict": answer["verdict"], "why": answer["why"]})
            found += rows
            report.print_line(console, f"{kind}: {len(rows)} rows in {answer['seconds']:.0f} s", "dim")
            folder.write("Kernels", report.markdown("Kernels", HEADINGS, map(row, found)), kernels=found)
    finally:
        if found:
            report.print_table(console, HEADINGS, map(row, found), text=2)
        folder.print_cpu_note(console)
    return 1 if any(r["verdict"] not in (OK, "not timed") for r in found) else 0
