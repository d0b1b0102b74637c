"""What can only be checked on a GPU, in one command: attention against its definition, step time and MFU, a whole small run.

    .venv/bin/python -m benchmarks.gpu_checks --out=runs/gpu_checks

Writes results.md and results.json. Every case runs in a process of its own, so that peak memory is that of the case alone. Exit
code 0: all is well; 1: a check failed; 2: no GPU here. `--smoke` runs everything on the CPU in tiny shapes, with the chunked
kernel in cuDNN's place: it tests this script and measures nothing.
"""

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain import flops, hardware, launch
from jaxtrain.receipt import git_state, versions

REPO = Path(__file__).resolve().parent.parent
WARMUP, TIMED = 5, 20  # steps

# (T, query heads, key/value heads, head_dim, window, packed)
SHAPES = [
    *((T, N, K, H, 0, True) for T in (1024, 2048, 4096) for N, K in ((8, 2), (32, 8)) for H in (64, 128)),
    *((2048, 32, 8, H, 500, True) for H in (64, 128)),
    (2048, 32, 8, 128, 0, False),
    (2048, 32, 8, 128, 500, False),
]
# Context parallelism on one GPU, its four ranks computed side by side: (how, T, query heads, key/value heads, head_dim, window,
# packed).
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
SMOKE_SHAPES = [(64, 4, 2, 16, 0, True), (64, 4, 2, 16, 20, True), (48, 4, 4, 16, 0, False)]

SYNTHETIC = ["--config.data.source=synthetic", "--config.data.eval_source=", "--config.eval.every_steps=0"]
STEPS = {
    "llama3_1b": [
        "--config=configs/llama3_1b.py:gpus=1",
        *SYNTHETIC,
        "--config.train.global_batch=16",
        "--config.train.grad_accum=8",
    ],
    "llama3_8b:half": ["--config=configs/llama3_8b.py:half,gpus=1", *SYNTHETIC],
}
SMOKE_STEPS = {
    "tiny": [
        "--config=configs/tiny.py",
        *SYNTHETIC,
        "--config.model.num_layers=1",
        "--config.train.grad_accum=2",
        "--config.train.global_batch=4",
        "--config.mesh.fsdp=1",
    ]
}
SMALL_RUN = ["--config=configs/tiny.py"]
SMOKE_RUN = [
    *SMALL_RUN,
    "--config.model.num_layers=1",
    "--config.train.steps=4",
    "--config.train.global_batch=8",
    "--config.optimizer.warmup_steps=1",
    "--config.eval.batches=1",
    "--config.sample.max_tokens=4",
]


# --- Attention ------------------------------------------------------------------------------------------------------------


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
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], end], strict=True), 1):
            segments[row, start:stop] = number
            positions[row, start:stop] = np.arange(stop - start)
    return segments, positions


def exact_and_bounds(q, k, v, do, rows, spec, blocks: bool = False) -> tuple[Any, Any]:
    """The definition in float32 on the same bfloat16 numbers, and how far a bfloat16 kernel may be from it.

    Both are (o, dq, dk, dv), of the shapes of q, q, k, v. A kernel multiplies bfloat16 numbers exactly and adds in float32; it
    rounds to bfloat16, each time by at most u = 2^-8 of the number, the weights P, dP, dS and every result. With |.| taken
    element by element, and to first order in u, the error is then at most

        o    u (P |v|) + u |o|
        dv   u (P^T |do|) + u |dv|
        E    u |dS| + P (u |dP| + 2 u (|do| . P |v|)) + u |dS|
        dq   (E |k|) / sqrt(H) + u |dq|
        dk   (E^T |q|) / sqrt(H) + u |dk|

    where dP = do v^T, dS = P (dP - delta), delta = sum(do o), and E is the error of dS: of the rounded P, of dP, of delta,
    which is made of the rounded o, and of dS itself. For grouped queries each head's part of dk and dv may be rounded once more
    before the parts are added. These are bounds and not averages: a correct kernel stays below them everywhere.

    blocks: attention is put together from blocks of keys, each of whose results is rounded once more. That adds, at most,
    u (P |v|) to o (and so half as much again to the error of delta), u (|dS| |k|) / sqrt(H) to dq, u (|dS|^T |q|) / sqrt(H) to
    dk and u (P^T |do|) to dv.
    """
    import jax
    import jax.numpy as jnp

    from jaxtrain.kernels.attention import reference

    u, scale = 2.0**-8, spec.head_dim**-0.5
    high = jax.lax.Precision.HIGHEST

    def einsum(eqn, *xs):
        return jnp.einsum(eqn, *xs, precision=high)

    def group(item):
        """One row and one key/value head: q, do (T, G, H), k, v (T, H)."""
        q, k, v, do, segments, positions = item
        one = reference.Rows(*(x[None] for x in (segments, positions, segments, positions)))
        mask = reference.visible(one, spec)

        def definition(q, k, v):
            return reference.masked_attention(q[None], k[None, :, None], v[None, :, None], mask, spec)[0]

        o, back = jax.vjp(definition, q, k, v)
        dq, dk, dv = back(do)

        scores = jnp.where(mask, einsum("TGH,SH->GTS", q, k) * scale, -1e30)
        P = jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0.0)
        dP = einsum("TGH,SH->GTS", do, v)
        dS = P * (dP - jnp.sum(P * dP, axis=-1, keepdims=True))
        Pv = einsum("GTS,SH->TGH", P, jnp.abs(v))
        delta = (3 if blocks else 2) * u * einsum("TGH,TGH->GT", jnp.abs(do), Pv)
        E = u * jnp.abs(dS) + P * (u * jnp.abs(dP) + delta[..., None]) + u * jnp.abs(dS)
        dk_parts = jnp.abs(einsum("GTS,TGH->SGH", dS, q)) * scale
        dv_parts = jnp.abs(einsum("GTS,TGH->SGH", P, do))
        again = u if blocks else 0.0
        more = jnp.abs(dS) * scale
        return (o, dq, dk, dv), (
            (u + again) * Pv + u * jnp.abs(o),
            scale * einsum("GTS,SH->TGH", E, jnp.abs(k)) + u * jnp.abs(dq) + again * einsum("GTS,SH->TGH", more, jnp.abs(k)),
            scale * einsum("GTS,TGH->SH", E, jnp.abs(q))
            + u * jnp.abs(dk)
            + u * dk_parts.sum(1)
            + again * einsum("GTS,TGH->SH", more, jnp.abs(q)),
            (u + again) * einsum("GTS,TGH->SH", P, jnp.abs(do)) + u * jnp.abs(dv) + u * dv_parts.sum(1),
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


def side_by_side(how: str, spec: Any, kernel: str, heads: tuple[int, int], rows: Any) -> Any:
    """`(q, k, v) -> o`, whole sequences to whole sequences, by RANKS ranks that share each: the functions that ranks run, with
    all of them on one device. Under `vmap` with the axis's name, what they send goes from row to row of an array."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxtrain.context import make_context
    from jaxtrain.kernels import context
    from jaxtrain.kernels.attention import Rows
    from jaxtrain.kernels.context.split import Split

    way = make_context(how, 0, RANKS, *heads)
    split, order = Split(way), np.asarray(way.chunks)

    def apart(x):  # (B, T, ...) -> (ranks, B, tokens of each, ...)
        chunks = x.reshape(x.shape[0], len(order), -1, *x.shape[2:])[:, order]
        return jnp.moveaxis(chunks.reshape(x.shape[0], RANKS, -1, *x.shape[2:]), 1, 0)

    def together(x):
        chunks = jnp.moveaxis(x, 0, 1).reshape(x.shape[1], len(order), -1, *x.shape[3:])
        return chunks[:, np.argsort(order)].reshape(x.shape[1], -1, *x.shape[3:])

    def rank(q, k, v, segments, positions):
        prepared = context.prepare(Rows(segments, positions, segments, positions), spec, kernel, split)
        return context.attention(q, k, v, prepared, spec, kernel, split)

    ids = apart(rows.q_segments), apart(rows.q_positions)
    return lambda q, k, v: together(jax.vmap(rank, axis_name="seq")(apart(q), apart(k), apart(v), *ids))


def attention_case(shape: Sequence[Any], kernel_name: str, how: str = "") -> dict[str, Any]:
    """Largest error of o, dq, dk, dv, and the largest ratio of error to bound (must be at most 1).

    how: which kind of context parallelism computes it, over RANKS ranks side by side; "": none.
    """
    import jax
    import jax.numpy as jnp

    from jaxtrain.config import Mesh, RunConfig
    from jaxtrain.kernels import attention
    from jaxtrain.models.attention import Kernel
    from jaxtrain.sharding import make_placement
    from jaxtrain.step import hardware_of

    T, N, K, H, window, packed = shape
    device = jax.devices()[0]
    spec = attention.Spec(H, "bf16", packed, 32 if packed else 1, window)
    attention.choose(kernel_name, spec, hardware_of(device), T)
    placement = make_placement(RunConfig(mesh=Mesh(fsdp=1)), [device])
    segments, positions = documents(T, packed, seed=T + N + H)
    rows = attention.Rows(*(jnp.asarray(x) for x in (segments, positions, segments, positions)))
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (
        jax.random.normal(key, (3, T, heads, H), jnp.bfloat16) for key, heads in zip(keys, (N, K, K, N), strict=True)
    )

    kernel = Kernel(kernel_name, spec)

    def whole(q, k, v):
        return kernel(q, k, v, kernel.prepare(rows, placement), placement)

    @jax.jit
    def measured(q, k, v, do):
        o, back = jax.vjp(side_by_side(how, spec, kernel_name, (N, K), rows) if how else whole, q, k, v)
        return o, *back(do)

    real = rows.q_segments[:, :, None, None] > 0
    do = jnp.where(real, do, 0)
    exact, bounds = jax.jit(lambda q, k, v, do: exact_and_bounds(q, k, v, do, rows, spec, blocks=bool(how)))(q, k, v, do)
    out: dict[str, Any] = {
        "T": T,
        "heads": f"{N}/{K}",
        "head_dim": H,
        "window": window,
        "packed": packed,
        "kernel": f"{kernel_name}, {how} of {RANKS}" if how else kernel_name,
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


def attention_cases(smoke: bool) -> dict[str, Any]:
    """All shapes; one that the kernel cannot do here is listed with the reason."""
    import jax

    rows = []
    cases = [("", *shape) for shape in (SMOKE_SHAPES if smoke else SHAPES)]
    for how, *shape in [*cases, *(SMOKE_SPLIT_SHAPES if smoke else SPLIT_SHAPES)]:
        try:
            rows.append(attention_case(shape, "chunked" if smoke else "cudnn", how))
        except ValueError as error:
            rows.append({"T": shape[0], "heads": f"{shape[1]}/{shape[2]}", "head_dim": shape[3], "refused": str(error)})
    return {"device": jax.devices()[0].device_kind, "rows": rows, "ok": all(row.get("ok") for row in rows)}


# --- Step time ------------------------------------------------------------------------------------------------------------


def step_case(argv: list[str], warmup: int, timed: int) -> dict[str, Any]:
    """Median time of a train step on the first device, run the way the loop runs it: one step ahead of the metrics."""
    import jax

    from jaxtrain import compiler, state, step
    from jaxtrain.data import pipeline

    loaded = launch.load(argv)
    if loaded.problems:
        return {"ok": False, "failed": "; ".join(map(str, loaded.problems))}
    run, device = loaded.run, jax.devices()[0]
    program = step.build(run, [device])
    began = time.perf_counter()
    train = compiler.compile_train(program, compiler.card_of(device, run.train.memory_fraction))
    compile_s = time.perf_counter() - began
    memory = train.memory_analysis()
    out: dict[str, Any] = {
        "device": device.device_kind,
        "attention": program.attention,
        "seq_len": run.data.seq_len,
        "global_batch": run.train.global_batch,
        "grad_accum": run.train.grad_accum,
        "remat": run.remat.policy,
        "remat_tensors": run.remat.tensors,
        "parameters": flops.parameters(run.model)["total"],
        "compile_s": compile_s,
        "compiled_peak_gib": memory.peak_memory_in_bytes / 2**30 if memory else None,
    }
    try:
        current = state.create_state(program.definition, program.tx, program.state, run.train.seed)
        batches = pipeline.open_source(
            run.data, "synthetic", split="train", global_batch=run.train.global_batch, data_dir=Path(run.paths.data)
        )
        marks, losses, waiting = [], [], None
        for i in range(warmup + timed + 1):
            batch = step.place_batch(batches.batch(i), program.batch, program.context)
            current, values = train(current, batch)
            if waiting is not None:
                losses.append(float(waiting["loss"]))
                marks.append(time.perf_counter())
            waiting = values
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return out | {"ok": False, "failed": f"out of memory: {str(error).splitlines()[0][:200]}"}
    seconds = [b - a for a, b in zip(marks[warmup - 1 :], marks[warmup:], strict=False)]
    tokens_per_s = run.train.global_batch * run.data.seq_len / statistics.median(seconds)
    per_token = flops.per_token(run.model, run.data.seq_len)
    gpu = hardware.lookup(device.device_kind)
    peak = gpu.peak(run.precision) if gpu else None
    stats = device.memory_stats() or {}
    return out | {
        "ok": all(map(math.isfinite, losses)),
        "steps_timed": len(seconds),
        "step_s": statistics.median(seconds),
        "step_s_min": min(seconds),
        "step_s_max": max(seconds),
        "tokens_per_s": tokens_per_s,
        "mfu_causal": flops.mfu(per_token.causal, tokens_per_s, peak),
        "mfu_full": flops.mfu(per_token.full, tokens_per_s, peak),
        "peak_tflops": peak,
        "measured_peak_gib": stats["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in stats else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


# --- A small run ----------------------------------------------------------------------------------------------------------


def small_run(smoke: bool, environ: dict[str, str]) -> dict[str, Any]:
    """configs/tiny.py through the command line, in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        places = [f"--workdir={folder}/run", f"--config.paths.data={folder}/data", f"--config.paths.cache={folder}/cache"]
        command = [sys.executable, "-m", "jaxtrain.main", *(SMOKE_RUN if smoke else SMALL_RUN), *places]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=REPO, env=environ, capture_output=True, text=True, check=False)
        out: dict[str, Any] = {"exit_code": done.returncode, "seconds": time.perf_counter() - began}
        record = Path(folder, "run", "metrics.jsonl")
        lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        for kind in ("train", "eval"):
            out[f"{kind}_loss"] = next((line["loss"] for line in reversed(lines) if line["kind"] == kind), None)
        sample = Path(folder, "run", "samples.txt")
        out["sample"] = sample.read_text() if sample.exists() else ""
    ok = done.returncode == 0 and out["eval_loss"] is not None and bool(out["sample"])
    return out | {"ok": ok} | ({} if ok else {"failed": (done.stdout + done.stderr)[-2000:]})


# --- All of it ------------------------------------------------------------------------------------------------------------


def apart(case: str, args: argparse.Namespace, environ: dict[str, str]) -> dict[str, Any]:
    """One case in a process of its own. What breaks it becomes a failed result, so that the others are still made."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "benchmarks.gpu_checks", f"--case={case}", f"--out={result}"]
        command += [f"--warmup={args.warmup}", f"--steps={args.steps}", *(["--smoke"] if args.smoke else [])]
        done = subprocess.run(command, cwd=REPO, env=environ, stderr=subprocess.PIPE, text=True, check=False)
        if result.exists():
            return json.loads(result.read_text())
        return {"ok": False, "failed": f"exit code {done.returncode}: {done.stderr[-2000:]}"}


def show(value: Any, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def markdown(results: dict[str, Any]) -> str:
    """The results as a page."""
    head = results["about"]
    out = [
        f"# GPU checks: {'SMOKE TEST, no measurement' if head['smoke'] else head['device']}",
        "",
        f"{head['date']}; {head['count']} x {head['device']}, {head['memory_gib']:.1f} GiB each; Python {head['python']}; "
        + ", ".join(f"{name} {version}" for name, version in head["packages"].items()),
        "",
        f"commit: {head['git']}",
        "",
        "## Attention against its definition in float32",
        "",
        "Largest error, and in brackets its largest ratio to the bound that follows from bfloat16 (at most 1).",
        "",
        "| kernel | T | heads | head_dim | window | packed | o | dq | dk | dv | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    attention = results["attention"]
    for row in attention.get("rows", []):
        if "refused" in row:
            out.append(f"| - | {row['T']} | {row['heads']} | {row['head_dim']} | | | {row['refused']} | | | | not done |")
            continue
        errors = " | ".join(f"{row[f'{x}_error']:.1e} ({row[f'{x}_ratio']:.2f})" for x in ("o", "dq", "dk", "dv"))
        facts = " | ".join(str(row[x]) for x in ("kernel", "T", "heads", "head_dim", "window", "packed"))
        out.append(f"| {facts} | {errors} | {'ok' if row['ok'] else 'WRONG'} |")
    if "failed" in attention:
        out.append(f"\nfailed: {attention['failed']}")
    out += [
        "",
        "## Step time",
        "",
        f"One device, synthetic data, median of {head['steps']} steps after {head['warmup']}; MFU of the dense peak.",
        "Memory: the compiler's peak, and the allocator's.",
        "",
        "| config | T | batch | remat | attention | step s | tokens/s | MFU causal | MFU full | compiled GiB | measured GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results["steps"].items():
        if "failed" in row:
            out.append(f"| {name} | failed: {row['failed']} | | | | | | | | {show(row.get('compiled_peak_gib'), '.2f')} | |")
            continue
        batch = f"{row['global_batch']} in {row['grad_accum']}"
        out.append(
            f"| {name} | {row['seq_len']} | {batch} | {row['remat']} | {row['attention']} | {row['step_s']:.4f} | "
            f"{row['tokens_per_s']:,.0f} | {show(row['mfu_causal'])} | {show(row['mfu_full'])} | "
            f"{show(row['compiled_peak_gib'], '.2f')} | {show(row['measured_peak_gib'], '.2f')} |"
        )
    run = results["run"]
    out += [
        "",
        "## configs/tiny.py through the command line",
        "",
        f"exit code {run['exit_code']}, {run['seconds']:.0f} s, last train loss {show(run['train_loss'], '.4f')}, "
        f"last held-out loss {show(run['eval_loss'], '.4f')}",
        "",
        "```",
        run["sample"] or run.get("failed", ""),
        "```",
        "",
    ]
    return "\n".join(out)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_checks", description="Checks and figures that need a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder of results.md and results.json")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, to test this script")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps before the timed ones (%(default)s)")
    parser.add_argument("--steps", type=int, default=TIMED, help="timed steps (%(default)s)")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 a check failed; 2 no GPU here."""
    args = parser().parse_args(argv)
    if min(args.warmup, args.steps) < 1:
        parser().error("--warmup and --steps must be at least 1")
    steps = SMOKE_STEPS if args.smoke else STEPS
    if args.case:
        found = (
            attention_cases(args.smoke) if args.case == "attention" else step_case(steps[args.case], args.warmup, args.steps)
        )
        args.out.write_text(json.dumps(found))
        return 0

    environ = dict(os.environ)
    if args.smoke:
        environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""}
    devices = hardware.probe(environ)
    if not args.smoke:
        if devices.kind != "gpu" or devices.count < 1:
            print(f"no GPU here: {devices.source}. --smoke tests this script on the CPU.", file=sys.stderr)
            return 2
        wanted, problems = hardware.memory_environment(hardware.memory_fraction(devices.memory_gib), environ)
        if problems:
            return launch.report(problems)
        environ |= wanted
    about = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "smoke": args.smoke,
        "device": devices.name,
        "count": devices.count,
        "memory_gib": devices.memory_gib,
        "python": platform.python_version(),
        "packages": versions(),
        "git": git_state(REPO / "jaxtrain"),
        "warmup": args.warmup,
        "steps": args.steps,
    }
    results: dict[str, Any] = {"about": about, "attention": apart("attention", args, environ)}
    results["steps"] = {name: apart(name, args, environ) for name in steps}
    # The run sets its own memory budget, and takes all GPUs.
    results["run"] = small_run(args.smoke, {k: v for k, v in environ.items() if k != "XLA_CLIENT_MEM_FRACTION"})
    results["ok"] = all(part["ok"] for part in (results["attention"], *results["steps"].values(), results["run"]))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "results.md").write_text(markdown(results))
    print(markdown(results))
    print(f"{'all checks passed' if results['ok'] else 'A CHECK FAILED'}: {args.out / 'results.md'}")
    return 0 if results["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
