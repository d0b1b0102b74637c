"""Whether what this machine computes is right: attention against its definition, and a saved state against the one restored.

The tolerance of attention is not chosen: it follows, element by element, from where a kernel must round (bounds.py).
"""

import functools
import math
import time
import traceback
from collections.abc import Sequence
from typing import Any

from jaxtrain import launch
from jaxtrain.bench import bounds, ranks
from jaxtrain.bench.case import FAILED, LATE, OK, REFUSED, keep
from jaxtrain.bench.measure import compiled, open_rows, problems, start, words
from jaxtrain.bench.work import one_device
from jaxtrain.data import pipeline

# (T, query heads, key/value heads, head_dim, window, packed)
SHAPES = [
    *((T, N, K, H, 0, True) for T in (1024, 2048, 4096) for N, K in ((8, 2), (32, 8)) for H in (64, 128)),
    *((2048, 32, 8, H, 500, True) for H in (64, 128)),
    (2048, 32, 8, 128, 0, False),
    (2048, 32, 8, 128, 500, False),
]
# Context parallelism on one GPU, its four ranks computed one after the other (ranks.py):
# (how, T, query heads, key/value heads, head_dim, window, packed).
SPLIT_SHAPES = [
    *(("ring", 4096, 32, 8, 128, window, packed) for window, packed in ((0, True), (0, False), (300, True), (1500, True))),
    ("ring", 4096, 8, 8, 64, 0, True),
    *((how, 4096, 32, 8, 128, 0, packed) for how in ("gather", "ulysses") for packed in (True, False)),
    ("ulysses", 4096, 32, 2, 128, 500, True),
]
SMOKE_SPLIT_SHAPES = [
    ("ring", 64, 4, 2, 16, 0, True),
    ("gather", 64, 4, 2, 16, 20, True),
    ("ulysses", 64, 4, 2, 16, 0, False),
]
RANKS = 4
PALLAS_ONLY = [("bf16", 30.0), ("f32", 0.0)]  # what cuDNN has not: (dtype, soft cap)
SMOKE_SHAPES = [(64, 4, 2, 16, 0, True), (64, 4, 2, 16, 20, True), (48, 4, 4, 16, 0, False)]


# ---- Attention


def documents(T: int, packed: bool, seed: int) -> tuple[Any, Any]:
    """Segments and positions, int32 (3, T): many documents, one document, and documents before a tail of padding."""
    import numpy as np

    rng = np.random.default_rng(seed)
    segments, positions = np.ones((3, T), np.int32), np.tile(np.arange(T, dtype=np.int32), (3, 1))
    if not packed:
        return segments, positions
    for row, (count, end) in {0: (20, T), 2: (7, T - T // 5)}.items():
        starts = [0, *sorted(rng.choice(np.arange(1, end), count - 1, replace=False).tolist())]
        segments[row] = positions[row] = 0
        for number, (first, stop) in enumerate(zip(starts, [*starts[1:], end], strict=True), 1):
            segments[row, first:stop] = number
            positions[row, first:stop] = np.arange(stop - first)
    return segments, positions


def exact_and_bounds(q, k, v, do, rows, spec, blocks: bool = False) -> tuple[Any, Any]:
    """The definition in float32 on the kernel's own numbers, and how far it may be from it (bounds.attention).

    Both are (o, dq, dk, dv), of the shapes of q, q, k, v.
    """
    import jax
    import jax.numpy as jnp

    from jaxtrain.kernels.attention import reference

    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    def group(item):
        """One row and one key/value head."""
        q, k, v, do, segments, positions = item
        one = reference.Rows(*(x[None] for x in (segments, positions, segments, positions)))
        visible = reference.visible(one, spec)[0]
        return bounds.attention(
            q, k, v, do, visible, dtype=spec.dtype, softcap=spec.softcap, blocks=blocks, xp=jnp, einsum=einsum
        )

    B, T, _, H = q.shape
    K = k.shape[2]

    def by_group(x):  # (B, T, N or K, H) -> (B K, T, G or 1, H)
        return jnp.moveaxis(x.astype(jnp.float32).reshape(B, T, K, -1, H), 2, 1).reshape(B * K, T, -1, H)

    def back_again(x):
        return jnp.moveaxis(x.reshape(B, K, T, -1, H), 1, 2).reshape(B, T, -1, H)

    segments, positions = (jnp.repeat(x, K, axis=0) for x in rows[:2])
    found = jax.lax.map(group, (by_group(q), by_group(k)[:, :, 0], by_group(v)[:, :, 0], by_group(do), segments, positions))
    return jax.tree.map(back_again, found)


def by_ranks(how: str, spec: Any, kernel: str, heads: tuple[int, int], rows: Any) -> Any:
    """`(q, k, v, do) -> (o, dq, dk, dv)` of unsharded arrays, computed by RANKS ranks that share each sequence.

    The functions are those that ranks run, forward and backward; ranks.run computes them and what the ranks send.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxtrain.context import make_context
    from jaxtrain.kernels import context
    from jaxtrain.kernels.attention import Rows
    from jaxtrain.kernels.context.split import Split

    way = make_context(how, 0, RANKS, *heads)
    split, order = Split(way), np.asarray(way.chunks)

    def apart(x):  # (B, T, ...) -> (B, tokens of a rank, ...) of each rank
        chunks = x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, order]
        return jnp.split(chunks.reshape(x.shape), RANKS, axis=1)

    def together(by_rank):
        x = jnp.concatenate(by_rank, axis=1)
        return x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, np.argsort(order)].reshape(x.shape)

    def rank(q, k, v, do, segments, positions):
        prepared = context.prepare(Rows(segments, positions, segments, positions), spec, kernel, split)
        o, back = jax.vjp(lambda q, k, v: context.attention(q, k, v, prepared, spec, kernel, split), q, k, v)
        return o, *back(do)

    def all_ranks(q, k, v, do):
        args = [apart(x) for x in (q, k, v, do, rows.q_segments, rows.q_positions)]
        found = ranks.run(rank, split.axis, list(zip(*args, strict=True)))
        return tuple(together(x) for x in zip(*found, strict=True))

    return all_ranks


def attention_case(
    shape: Sequence[Any], kernel_name: str, how: str = "", dtype: str = "bf16", softcap: float = 0.0
) -> dict[str, Any]:
    """Largest error of o, dq, dk, dv, and the largest ratio of error to bound (must be at most 1).

    how: which kind of context parallelism computes it, over RANKS ranks; "": none.
    """
    import jax
    import jax.numpy as jnp

    from jaxtrain.kernels import attention
    from jaxtrain.models.attention import Kernel
    from jaxtrain.train.kernel import hardware_of

    T, N, K, H, window, packed = shape
    device = jax.devices()[0]
    spec = attention.Spec(H, dtype, packed, 32 if packed else 1, window, softcap)
    attention.choose(kernel_name, [(spec, T)], hardware_of(device))
    segments, positions = documents(T, packed, seed=T + N + H)
    rows = attention.Rows(*(jnp.asarray(x) for x in (segments, positions, segments, positions)))
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (
        jax.random.normal(key, (3, T, heads, H), jnp.float32 if dtype == "f32" else jnp.bfloat16)
        for key, heads in zip(keys, (N, K, K, N), strict=True)
    )

    kernel = Kernel(kernel_name, (spec,))

    def by_one(q, k, v, do):
        o, back = jax.vjp(lambda q, k, v: kernel(q, k, v, kernel.prepare(rows), 0), q, k, v)
        return o, *back(do)

    measured = jax.jit(by_ranks(how, spec, kernel_name, (N, K), rows) if how else by_one)
    real = rows.q_segments[:, :, None, None] > 0
    do = jnp.where(real, do, 0)
    exact, bounds = jax.jit(lambda q, k, v, do: exact_and_bounds(q, k, v, do, rows, spec, blocks=bool(how)))(q, k, v, do)
    out: dict[str, Any] = {
        "T": T,
        "heads": f"{N}/{K}",
        "head_dim": H,
        "window": window,
        "packed": packed,
        "kernel": ", ".join(
            [
                kernel_name,
                *([f"{how} of {RANKS}"] if how else []),
                *([dtype] if dtype != "bf16" else []),
                *([f"soft cap {softcap:g}"] if softcap else []),
            ]
        ),
    }
    worst = 0.0
    for name, got, want, bound in zip(("o", "dq", "dk", "dv"), measured(q, k, v, do), exact, bounds, strict=True):
        # What comes out for padding means nothing; its gradients are 0, because those of its output are.
        error = jnp.abs(jnp.where(real if name == "o" else True, got.astype(jnp.float32), 0) - want)
        out[f"{name}_error"] = float(error.max())
        ratio = float((error / (bound + 1e-6)).max())  # 1e-6: rounding of the float32 definition itself
        out[f"{name}_ratio"] = ratio
        worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return out | {"ok": worst <= 1}


def attention_cases(ask: dict[str, Any]) -> dict[str, Any]:
    """All shapes by every fast implementation, and by `chunked` what none of those can do; on a CPU a few small shapes.

    One implementation after the other, cuDNN's first: a kernel that breaks the device then takes nothing from those before it.
    A row has `ok`; or `refused` with the reason, which is no fault; or `failed` with the error, which is one. After
    `ask["limit_s"]` no further shape is begun (null: no limit); `left_out` says how many. What is known is kept after each row.
    """
    began = time.monotonic()
    (device,) = start(one_device(ask.get("cache")), 1)
    from jaxtrain.kernels.attention import IMPLEMENTATIONS

    smoke = device.platform == "cpu"
    fast = [] if smoke else [name for name in IMPLEMENTATIONS if name not in ("reference", "chunked")]
    cases = [("", *shape) for shape in (SMOKE_SHAPES if smoke else SHAPES)] + (SMOKE_SPLIT_SHAPES if smoke else SPLIT_SHAPES)
    todo = [(case, kernel, {}) for kernel in fast for case in cases]
    if not smoke:
        todo += [(("", *SHAPES[-3]), "pallas", {"dtype": dtype, "softcap": softcap}) for dtype, softcap in PALLAS_ONLY]
    todo += [(case, "chunked", {}) for case in cases]
    rows: list[dict[str, Any]] = []
    left_out, served = 0, set()
    for case, kernel, more in todo:
        if kernel == "chunked" and case in served:
            continue
        if ask["limit_s"] and time.monotonic() - began > ask["limit_s"]:
            left_out += 1
            continue
        how, *shape = case
        rows.append(attempt(shape, kernel, how, **more))
        if "refused" not in rows[-1]:
            served.add(case)
        keep(ask, {"verdict": LATE, "device": device.device_kind, "left_out": 0, **summary(rows)})
    return come_to(device.device_kind, rows, left_out)


def come_to(device_kind: str, rows: list[dict[str, Any]], left_out: int) -> dict[str, Any]:
    """The answer: it is good where none is wrong and one at least is right."""
    out = {"device": device_kind, "left_out": left_out, **summary(rows)}
    if out["wrong"] or not out["right"]:
        why = f"{out['wrong']} of {len(rows)} shapes are beyond their bound, or failed"
        return out | {"verdict": FAILED, "why": why if out["wrong"] else "no kernel could be checked"}
    return out | {"verdict": OK}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows, and how many are right and wrong; the rest could not be done by their kernel."""
    done = [row for row in rows if "refused" not in row]
    right = sum(row["ok"] for row in done)
    return {"rows": rows, "right": right, "wrong": len(done) - right}


def attempt(shape: Sequence[Any], kernel: str, how: str, dtype: str = "bf16", softcap: float = 0.0) -> dict[str, Any]:
    """`attention_case`, or a row that says why this kernel cannot do it, or how it failed."""
    label = ", ".join([kernel, *([f"{how} of {RANKS}"] if how else [])])
    facts = {"kernel": label, "T": shape[0], "heads": f"{shape[1]}/{shape[2]}", "head_dim": shape[3]}
    from jaxtrain.kernels.attention import Unsupported

    try:
        return attention_case(shape, kernel, how, dtype, softcap)
    except Unsupported as error:
        return facts | {"refused": str(error)}
    except Exception as error:  # compiler, driver or kernel: the shapes after it are still worth trying
        traceback.print_exc()
        return facts | {"ok": False, "failed": words(error)}


HEADINGS = ("kernel", "T", "heads", "head_dim", "window", "packed", "o", "dq", "dk", "dv", "")


def row(r: dict[str, Any]) -> list[str]:
    """As cells of HEADINGS: the largest error, and in brackets its largest ratio to the bound."""
    if "refused" in r or "failed" in r:
        last = f"not done: {r['refused']}" if "refused" in r else f"WRONG: {r['failed']}"
        return [str(r[x]) for x in ("kernel", "T", "heads", "head_dim")] + [""] * 6 + [last]
    errors = [f"{r[f'{x}_error']:.1e} ({r[f'{x}_ratio']:.2f})" for x in ("o", "dq", "dk", "dv")]
    facts = [str(r[x]) for x in ("kernel", "T", "heads", "head_dim", "window", "packed")]
    return [*facts, *errors, "ok" if r["ok"] else "WRONG"]


# ---- A save and a restore


def save_and_restore(ask: dict[str, Any]) -> dict[str, Any]:
    """Two steps of `ask["argv"]`, a checkpoint in `ask["folder"]`, and whether what comes back is the same bit for bit."""
    loaded = launch.load(ask["argv"])
    if wrong := problems(loaded, ask["devices"]):
        return {"verdict": REFUSED, "why": "; ".join(dict.fromkeys(map(str, wrong)))}
    run = loaded.run
    devices = start(run, ask["devices"])
    import jax
    import jax.numpy as jnp

    from jaxtrain.checkpoint import Checkpoints, Failed
    from jaxtrain.train import state
    from jaxtrain.train.batch import place_batch
    from jaxtrain.train.program import build

    rows = open_rows(run)
    run = pipeline.with_documents(run, rows)
    program = build(run, devices)
    run, program, train, _ = compiled(program, run)
    current = state.create_state(program.definition, program.tx, program.state, run.train.seed, program.trained)
    for i in range(2):  # so that the moments are not zeros
        current, _ = train(current, place_batch(rows.batch(i), program.batch, program.context))
    jax.block_until_ready(current)

    checkpoints = Checkpoints(ask["folder"])
    began = time.perf_counter()
    checkpoints.save(2, state.to_tensors(current), {"config": {}, "data": {}}, began=began)
    (saved,) = checkpoints.wait()
    began = time.perf_counter()
    tensors = checkpoints.restore(2, state.abstract_tensors(program.state))
    restored = jax.block_until_ready(state.from_tensors(program.state, tensors))
    restore_s = time.perf_counter() - began
    checkpoints.close()

    @jax.jit
    def same(a: jax.Array, b: jax.Array) -> jax.Array:
        bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        return jnp.all(jax.lax.bitcast_convert_type(a, bits) == jax.lax.bitcast_convert_type(b, bits))

    pairs = zip(state.to_tensors(current).items(), state.to_tensors(restored).values(), strict=True)
    differ = [name for (name, a), b in pairs if not same(a, b)]
    if isinstance(saved, Failed):
        raise saved.error
    out = {
        "gib": saved.bytes / 2**30,
        "save_s": saved.total_s,
        "blocked_s": saved.blocked_s,
        "restore_s": restore_s,
        "tensors": len(state.abstract_tensors(program.state)),
    }
    if differ:
        return out | {"verdict": FAILED, "why": f"{len(differ)} tensors came back different: {', '.join(differ[:4])}"}
    return out | {"verdict": OK}
