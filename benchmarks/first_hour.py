"""The first hour on one H100 or H200, in six stages of at most nine minutes each: first whether it is right, then how fast.

    python -m benchmarks.first_hour --stage=1 --out=runs/first_hour

    1  device and versions; attention against its definition, also sharded; steps as on a CPU; the command line
    2  rates of matmuls, attention and memory (kept for later estimates); kernels; what packed rows cost
    3  train steps in bf16: layers in a loop, the same with one document a row, layers unrolled
    4  FP8: its matmuls against their definition; train steps, layers in a loop and unrolled
    5  train steps otherwise: Pallas attention, deterministic, fewer segments, offload, experts, llama3_1b, XLA's options
    6  a trace, packed; a save and a restore; preflight, recorded; lines on the GPU and their cost (benchmarks/operate.py)

Steps are those of llama3_8b:half; on a card with less than 100 GiB those of llama3_1b. Each item of a stage is a process of its
own with a time of its own: one that crashes or is late takes nothing from the others, and one that no longer fits is listed as
not run, with the command for it.

OUT/results.jsonl gets a JSON line as soon as something is known. OUT also has the logs of each stage and the trace, in files of
at most 15 MiB. What need not be kept is in OUT/work, or in --work=DIR: compiled programs, which all stages share, and raw logs.
--summary prints what all stages found, estimated beside measured. --smoke runs every item on a CPU in tiny shapes.

Exit code 0; 1 something is wrong or failed, or a check was not done in time; 2 no such GPU here, or a wrong argument;
130 Ctrl-C, what was done is kept.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import shlex
import shutil
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from benchmarks import operate
from jaxtrain import environment, hardware, launch
from jaxtrain.bench import check, experts, kernels, report, suite
from jaxtrain.bench.case import LATE, OK, apart, last_words, program
from jaxtrain.bench.case import run as run_program
from jaxtrain.bench.measure import DATA, start, words
from jaxtrain.bench.parts import BAD, GOOD, INTERRUPTED, OFF, Node, Outcome
from jaxtrain.bench.report import number, percent
from jaxtrain.bench.work import one_device
from jaxtrain.plan import rates

SECONDS = 540.0  # of a stage
PACKING_S = 15.0  # of those, to pack logs and trace
MOST_BYTES = 15 * 2**20  # of a file that is to be sent somewhere
NEED_GIB = 100.0  # of a card for llama3_8b:half; its step takes more than a card of 80 GB has
NOT_RUN = "not run"
FINE = (GOOD, OFF, LATE, NOT_RUN)
# Items that say whether something is right: one that is not done in time may hang, and is not fine.
OF_CORRECTNESS = ("attention", "steps as on a CPU", "command line", "fp8 matmuls", "save and restore", "experts")

HALF = (f"--config={launch.REPO}/configs/llama3_8b.py:half",)
# Fewer microbatches than llama3_1b ships with, which would take ten seconds a step, and of half its size.
ONE = (
    f"--config={launch.REPO}/configs/llama3_1b.py:gpus=1",
    *("--config.train.global_batch=16", "--config.train.grad_accum=8"),
)
# Mixtral's layers, half as wide and 6 of them: 2.3 B parameters, of which a token meets 0.7 B.
MIXTRAL = (
    f"--config={launch.REPO}/configs/mixtral_8x7b.py:gpus=1",
    *("--config.model.num_layers=6", "--config.model.d_model=2048", "--config.model.d_ff=7168"),
    *("--config.model.num_heads=16", "--config.model.num_kv_heads=4", "--config.mesh.expert=1"),
    *("--config.train.global_batch=8", "--config.train.grad_accum=8"),
)
TINY_EXPERTS = ("--config.model.num_experts=4", "--config.model.experts_per_token=2")
LOOP, UNROLLED = ("--config.parallel.scan_layers=true",), ("--config.parallel.scan_layers=false",)
FP8, PALLAS = ("--config.precision=fp8",), ("--config.attention.impl=pallas",)

# Case of train steps -> (the config instead of llama3_8b:half, the same in a smoke test, overrides).
CASES: dict[str, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "bf16 loop": ((), (), LOOP),
    "bf16 loop, one document a row": ((), (), (*LOOP, "--config.data.packing=none")),
    "bf16 unrolled": ((), (), UNROLLED),
    "fp8 loop": ((), (), (*LOOP, *FP8)),
    "fp8 unrolled": ((), (), (*UNROLLED, *FP8)),
    "pallas loop": ((), (), (*LOOP, *PALLAS)),
    "deterministic loop": ((), (), (*LOOP, *PALLAS, "--config.train.deterministic=true")),
    "8 segments loop": ((), (), (*LOOP, "--config.data.max_segments=8")),
    "offload loop": ((), (), (*LOOP, "--config.optimizer.offload=moments")),
    "XLA's options loop": ((), (), (*LOOP, "--config.compiler.defaults=false")),
    "mixtral": (MIXTRAL, TINY_EXPERTS, UNROLLED),
    "mixtral capacity": (MIXTRAL, TINY_EXPERTS, (*UNROLLED, "--config.moe.capacity_factor=1.25")),
    "1b loop": (ONE, (), LOOP),
}
KEPT = (
    *("verdict", "why", "seconds", "compile_s", "step_s", "tokens_per_s", "mfu_causal", "hfu", "memory", "planned", "loss"),
    *("not_planned", "attention", "remat_auto", "data_wait_s", "precision", "global_batch", "seq_len", "trace", "devices"),
)
# Steps on the GPU and on a CPU, of a model with cuDNN's shapes: precision -> how far their losses may be apart, relatively.
# Losses of the first steps hardly depend on rounding; a wrong mask or a gradient of the wrong sign moves them by more.
PARITY = {"f32": 1e-4, "bf16": 5e-3, "fp8": 2e-2}
PARITY_SHAPE = (
    *("--config.model.num_layers=2", "--config.model.d_model=256", "--config.model.d_ff=512", "--config.model.num_heads=4"),
    *("--config.model.num_kv_heads=2", "--config.model.head_dim=64", "--config.data.seq_len=512"),
    *("--config.train.global_batch=4", "--config.train.grad_accum=2"),
)


@dataclasses.dataclass(frozen=True)
class Here:
    """The surroundings of an item. out, work: folders; limit_s: its seconds, from `began` (time.monotonic)."""

    stage: int
    item: str
    out: Path
    work: Path
    smoke: bool
    limit_s: float
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.began)

    @property
    def cache(self) -> str:
        """The folder of compiled programs, of all stages."""
        return str(self.work / "compiled")

    def log(self, name: str) -> Path:
        return self.work / "logs" / f"stage{self.stage}" / f"{report.safe(name)}.txt"

    def put(self, **fields: Any) -> None:
        """Appends a line to the results, on the disk when this returns."""
        line = json.dumps({"stage": self.stage, "item": self.item, **fields}, default=str) + "\n"
        with open(self.out / "results.jsonl", "a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


Found = tuple[str, str]  # verdict, a line on what was found


# ---- stage 1: is it right


def device(here: Here) -> Found:
    """The device, versions, and what NVIDIA's tools say of it."""
    seen = hardware.probe()
    here.put(devices=dataclasses.asdict(seen), host_gib=hardware.host_gib(), cores=os.cpu_count(), kernel=os.uname().release)
    facts = report.about()
    here.put(packages=facts["packages"], python=facts["python"], git=facts["git"])
    for command in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"]):
        if shutil.which(command[0]):
            _, said = run_program(command, here.log("_".join(command)), limit_s=20)
            here.put(command=shlex.join(command), said=said[-3500:])
    (one,) = start(one_device(here.cache), 1)
    here.put(kind=one.device_kind, memory=one.memory_stats(), spaces=[str(space) for space in one.addressable_memories()])
    return GOOD, f"{seen.count} x {one.device_kind}, {seen.memory_gib:.1f} GiB; jax {facts['packages'].get('jax')}"


def checked(cases: Callable[[dict[str, Any]], dict[str, Any]], here: Here) -> Found:
    """A check of the node's suite, its rows as they come: each has `ok`, `refused` or `failed`."""
    ask = {"limit_s": 0.85 * here.left_s, "cache": here.cache, "tell": lambda answer: here.put(row=answer["rows"][-1])}
    answer = cases(ask)
    left_out = f"; {answer['left_out']} left out" if answer["left_out"] else ""
    return (GOOD if answer["verdict"] == OK else BAD), f"{answer['right']} right, {answer['wrong']} wrong{left_out}"


def as_on_a_cpu(here: Here) -> Found:
    """Losses of a small model's first steps on the device and on a CPU: same weights, same data."""
    wanted = list(PARITY)[:1] if here.smoke else list(PARITY)
    shape = suite.SMALL if here.smoke else PARITY_SHAPE

    def losses(precision: str, where: str) -> dict[str, Any]:
        argv = [suite.TINY, *shape, *DATA["synthetic"], f"--config.precision={precision}", f"--config.paths.cache={here.cache}"]
        environ = os.environ | ({"JAX_PLATFORMS": "cpu"} if where == "cpu" else {})
        ask = {"argv": argv, "devices": 1, "warmup": 1, "steps": 7, "limit_s": None}
        return apart("steps", ask, log=here.log(f"{precision} {where}"), environ=environ, limit_s=max(1.0, here.left_s - 5))

    wrong, texts = [], []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # one takes the GPU, the other takes CPU cores
        for precision in wanted:
            found = dict(zip(("device", "cpu"), pool.map(functools.partial(losses, precision), ("device", "cpu")), strict=True))
            kept = {
                where: {key: a[key] for key in ("verdict", "why", "loss", "attention") if key in a}
                for where, a in found.items()
            }
            if any(a["verdict"] != OK for a in found.values()):
                here.put(precision=precision, **kept)
                wrong.append(f"{precision}: {'; '.join(a['why'] for a in found.values() if a['verdict'] != OK)}")
                continue
            pairs = [(found["device"]["loss"][when], found["cpu"]["loss"][when]) for when in ("first", "last")]
            apart_by = max(abs(a - b) / abs(b) for a, b in pairs)
            here.put(precision=precision, apart=apart_by, allowed=PARITY[precision], **kept)
            texts.append(f"{precision} {apart_by:.1e}")
            if not apart_by <= PARITY[precision]:
                wrong.append(f"{precision}: losses are {apart_by:.1e} apart, {PARITY[precision]:.0e} are allowed")
    return (BAD, "; ".join(wrong)) if wrong else (GOOD, f"losses apart by {', '.join(texts)}")


def part(act: Callable[[Node, float], Outcome], here: Here) -> Found:
    """A part of the node's suite, or of operate.py, as an item."""
    folder = report.Folder(str(here.work / "parts" / f"{report.safe(here.item)}_{int(time.time())}"), "", "first_hour")
    node = Node(dataclasses.replace(hardware.probe(), count=1), here.smoke, folder)
    outcome = act(node, max(1.0, here.left_s - 5))
    here.put(data=outcome.data, lines=outcome.lines)
    logs = node.path / "logs"
    if logs.exists():
        shutil.copytree(logs, here.log("x").parent / report.safe(here.item), dirs_exist_ok=True)
    return outcome.verdict, outcome.found


# ---- stage 2: rates


def rates_kept(here: Here) -> Found:
    """Measure the rates of matmuls, attention and memory for later estimates; also in OUT/rates."""
    found = part(suite.part_rates, here)
    gpu = hardware.lookup(hardware.probe().name)
    if found[0] == GOOD and gpu and (file := rates.path(gpu.name)).exists():
        (here.out / "rates").mkdir(exist_ok=True)
        shutil.copy(file, here.out / "rates")
    return (NOT_RUN, found[1]) if here.smoke else found


def rates_found(out: Path, gpu_name: str) -> str:
    """Takes the rates of an earlier stage into use where this machine has none; says so. "" where there is nothing to take."""
    gpu = hardware.lookup(gpu_name)
    kept = rates.path(gpu.name, out / "rates") if gpu else None
    if gpu is None or kept is None or not kept.exists() or (file := rates.path(gpu.name)).exists():
        return ""
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(kept, file)
    return f"estimates use the rates in {kept}, now {file}"


def timed_kernels(kind: str, here: Here) -> Found:
    """Kernels of one kind against their floors, as they come."""
    ask = {"kind": kind, "limit_s": 0.8 * here.left_s, "cache": here.cache}
    answer = kernels.measure(ask | {"tell": lambda answer: here.put(row=answer["rows"][-1])})
    rows = answer["rows"]
    bad = [f"{r['kind']} {r['what']}: {r['why']}" for r in rows if r["verdict"] not in (OK, "not timed")]
    done = [r for r in rows if r["verdict"] == OK]
    text = f"{len(done)} timed"
    if reached := [r["of_floor"] for r in done if r["of_floor"]]:
        text += f", {min(reached):.0%} to {max(reached):.0%} of their floors"
    return (BAD if bad else GOOD), "; ".join([text, *bad])


def cost_of_packing(here: Here) -> Found:
    """Attention of a layer, forward and backward, by how many segments it allows for and how many documents a row has."""
    (one,) = start(one_device(here.cache), 1)
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxtrain.kernels import attention

    T, N, K, H = (128, 4, 2, 16) if here.smoke else (8192, 32, 8, 128)
    name = "chunked" if one.platform == "cpu" else "cudnn"
    kernel = attention.implementation(name)
    mesh = jax.sharding.Mesh(np.asarray([one]), ("all",))
    q, k, v, do = (jax.random.normal(jax.random.key(i), (1, T, n, H), jnp.bfloat16) for i, n in enumerate((N, K, K, N)))
    took: dict[tuple[int, int], float] = {}
    for segments, documents in ((1, 1), (8, 8), (32, 1), (32, 12), (64, 12))[: 2 if here.smoke else None]:
        if here.left_s < 10:
            here.put(max_segments=segments, documents=documents, verdict=NOT_RUN)
            continue
        spec = attention.Spec(H, "bf16", segments > 1, segments)
        starts = np.linspace(0, T, documents, endpoint=False).astype(np.int32)
        document = np.searchsorted(starts, np.arange(T), side="right").astype(np.int32)[None]
        position = np.arange(T, dtype=np.int32)[None] - starts[document - 1]
        rows = attention.Rows(*map(jnp.asarray, (document, position, document, position)))
        prepared = jax.jit(kernel.prepare, static_argnums=1)(rows, spec)

        def both(q, k, v, do, prepared, spec=spec):
            o, back = jax.vjp(lambda q, k, v: kernel.attention(q, k, v, prepared, spec), q, k, v)
            return o, *back(do)

        none = jax.P()
        step = jax.shard_map(both, mesh=mesh, in_specs=(none,) * 5, out_specs=none, check_vma=False)
        try:
            step = jax.jit(step).lower(q, k, v, do, prepared).compile()
            seconds = []
            for _ in range(3 if here.smoke else 15):
                began = time.perf_counter()
                jax.block_until_ready(step(q, k, v, do, prepared))
                seconds.append(time.perf_counter() - began)
        except jax.errors.JaxRuntimeError as error:  # its workspace alone may be more than there is
            here.put(kernel=name, max_segments=segments, documents=documents, failed=words(error))
            continue
        took[segments, documents] = statistics.median(seconds)
        used = step.memory_analysis()
        temp_gib = used.temp_size_in_bytes / 2**30 if used else None
        here.put(kernel=name, max_segments=segments, documents=documents, seconds=took[segments, documents], temp_gib=temp_gib)
    if not took:
        return BAD, "no form of rows could be timed"
    texts = [f"{segments} segments, {documents} documents {1e3 * s:.3g} ms" for (segments, documents), s in took.items()]
    return GOOD, f"{name}: {'; '.join(texts)}"


# ---- stages 3 to 6: train steps


def argv_of(case: str, smoke: bool, memory_gib: float) -> list[str]:
    """The command line of one of CASES on this device."""
    base, tiny, more = CASES[case]
    base = [*operate.TINY, *tiny] if smoke else base or (HALF if memory_gib >= NEED_GIB else ONE)
    # Layers stand in a loop where there are several, so a smoke test has two.
    return [*base, *(["--config.model.num_layers=2"] if smoke else []), *more, *DATA["synthetic"]]


def train_steps(case: str, here: Here, trace: str = "") -> Found:
    """Train steps, estimated beside measured."""
    argv = [*argv_of(case, here.smoke, hardware.probe().memory_gib), f"--config.paths.cache={here.cache}"]
    warmup, count = (1, 3) if here.smoke else (2, 8)
    limit = max(1.0, here.left_s - (60 if trace and not here.smoke else 5))
    ask = {"argv": argv, "devices": 1, "warmup": warmup, "steps": count, "limit_s": 0.8 * limit, "trace": trace}
    answer = apart("steps", ask, log=here.log(case), limit_s=limit)
    here.put(case=case, argv=argv, steps={key: answer[key] for key in KEPT if key in answer})
    if answer["verdict"] != OK:
        return (LATE if answer["verdict"] == LATE else BAD), f"{answer['verdict']}: {answer['why']}"
    planned, peak = answer["planned"] or {}, answer["memory"]["peak_gib"]
    text = f"{report.beside(answer['step_s']['median'], planned.get('step_s'))} s, {answer['tokens_per_s']:,.0f} tokens/s, "
    text += f"MFU {percent(answer['mfu_causal'])} causal, peak {report.beside(peak, planned.get('peak_gib'), '.2f')} GiB"
    return (OFF if suite.unlike_plan(case, answer) else GOOD), text


def fp8_matmuls(here: Here) -> Found:
    """8-bit matmuls of every pair of types against the same numbers in float32, and whether cuBLASLt computes them."""
    (one,) = start(one_device(here.cache), 1)
    import jax
    import jax.numpy as jnp

    from jaxtrain.bench.microbenchmarks import OPTIONS
    from jaxtrain.kernels import fp8

    M, K, N = (64, 32, 48) if here.smoke else (4096, 4096, 14336)
    options = OPTIONS if one.platform == "gpu" else None
    wrong, worst = [], 0.0
    for types in ((fp8.E4M3, fp8.E4M3), (fp8.E5M2, fp8.E4M3), (fp8.E4M3, fp8.E5M2)):
        x, y = jax.random.normal(jax.random.key(0), (M, K)), 3 * jax.random.normal(jax.random.key(1), (N, K))
        scales = [fp8.scale_of(jnp.abs(a).max(), t) for a, t in zip((x, y), types, strict=True)]
        a, b = (fp8.rounded(m, s, t) for m, s, t in zip((x, y), scales, types, strict=True))
        few = [m[:256].astype(jnp.float32) * s for m, s in zip((a, b), scales, strict=True)]
        want = jnp.einsum("mk,nk->mn", *few, precision="highest")
        for sums in (fp8.FAST, fp8.FULL):
            multiply = functools.partial(fp8.multiply, out=jnp.dtype("bfloat16"), sums=sums)
            made = jax.jit(multiply).lower(a, scales[0], b, scales[1]).compile(compiler_options=options)
            got = made(a, scales[0], b, scales[1])[:256, :256].astype(jnp.float32)
            error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
            in_8_bits = "matmul$f8" in (made.as_text() or "")
            here.put(types=[str(t) for t in types], sums=str(sums), error=error, in_8_bits=in_8_bits)
            worst = max(worst, error)
            # Rounding to bfloat16 gives 1.7e-3 (root mean square); sums of 14 bits on Hopper a little more.
            if not error < 1e-2 or (one.platform == "gpu" and not in_8_bits):
                wrong.append(f"{types[0]} x {types[1]}, {sums}: error {error:.1e}, in 8 bits: {in_8_bits}")
    return (BAD, "; ".join(wrong)) if wrong else (GOOD, f"errors up to {worst:.1e} of the result's norm")


def traced(here: Here) -> Found:
    """A trace of two steps, its report, and both packed."""
    folder = here.work / "trace"
    shutil.rmtree(folder, ignore_errors=True)
    verdict, text = train_steps("bf16 loop", here, str(folder))
    if not folder.exists():
        return (BAD if verdict == GOOD else verdict), f"no trace; {text}"
    command = program("profile", str(folder), f"--html={folder}/report.html", f"--json={folder}/report.json")
    code, said = run_program(command, here.log("report of the trace"), limit_s=max(1.0, here.left_s - PACKING_S))
    here.put(report=said[-3000:], code=code)
    files = pack(folder, here.out / "trace.tar.gz")
    where = f"{', '.join(file.name for file in files)}, {sum(file.stat().st_size for file in files) / 2**20:.2g} MiB"
    return (verdict, where) if code == 0 else (BAD, f"{where}; the report: {last_words(said)}")


def pack(folder: Path, target: Path) -> list[Path]:
    """`folder` as one archive, or as TARGET.00, TARGET.01 and so on of at most MOST_BYTES each; `cat` joins them."""
    for old in target.parent.glob(f"{target.name}*"):
        old.unlink()
    with tarfile.open(target, "w:gz") as archive:
        archive.add(folder, folder.name)
    if target.stat().st_size <= MOST_BYTES:
        return [target]
    made = []
    with open(target, "rb") as whole:
        while block := whole.read(MOST_BYTES):
            made.append(target.with_name(f"{target.name}.{len(made):02d}"))
            made[-1].write_bytes(block)
    target.unlink()
    return made


def save_and_restore(here: Here) -> Found:
    """A save of a small llama3_1b's state and a restore, bit for bit."""
    argv = [*(operate.TINY if here.smoke else operate.SHORT), *DATA["synthetic"], f"--config.paths.cache={here.cache}"]
    folder = here.work / "saved"
    try:
        ask = {"argv": argv, "devices": 1, "folder": str(folder)}
        answer = apart("save", ask, log=here.log("save"), limit_s=max(1.0, here.left_s - 5))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gigabytes of no further use
    here.put(answer=answer)
    if answer["verdict"] != OK:
        return (LATE if answer["verdict"] == LATE else BAD), answer["why"]
    return GOOD, (
        f"{answer['gib']:.3g} GiB came back bit for bit; written in {answer['save_s']:.2g} s, of which the loop waits "
        f"{answer['blocked_s']:.2g} s; read in {answer['restore_s']:.2g} s"
    )


# ---- the stages


@dataclasses.dataclass(frozen=True)
class Item:
    """Something to run: it gets `most_s` seconds or what is left of its stage, and is not run below `need_s`."""

    act: Callable[[Here], Found]
    need_s: float
    most_s: float


def of_steps(case: str, need_s: float = 45.0, most_s: float = 150.0) -> Item:
    return Item(functools.partial(train_steps, case), need_s, most_s)


def of_part(act: Callable[[Node, float], Outcome], need_s: float, most_s: float) -> Item:
    return Item(functools.partial(part, act), need_s, most_s)


# The most wanted of each stage first. An unrolled step may compile for minutes, so a loop gives the first figure.
STAGES: dict[int, dict[str, Item]] = {
    1: {
        "device": Item(device, 10, 60),
        "attention": Item(functools.partial(checked, check.attention_cases), 45, 240),
        "steps as on a CPU": Item(as_on_a_cpu, 45, 150),
        "command line": of_part(suite.part_run, 40, 120),
    },
    2: {
        "rates": Item(rates_kept, 60, 150),
        "gemm": Item(functools.partial(timed_kernels, "gemm"), 30, 110),
        "kernels of attention": Item(functools.partial(timed_kernels, "attention"), 30, 110),
        "cost of packing": Item(cost_of_packing, 25, 90),
        **{kind: Item(functools.partial(timed_kernels, kind), 20, 60) for kind in ("loss", "norm", "optimizer")},
    },
    3: {name: of_steps(name) for name in ("bf16 loop", "bf16 loop, one document a row")}
    | {"bf16 unrolled": of_steps("bf16 unrolled", 90, 300)},
    4: {
        "fp8 matmuls": Item(fp8_matmuls, 25, 80),
        "fp8 loop": of_steps("fp8 loop"),
        "fp8 unrolled": of_steps("fp8 unrolled", 90, 300),
    },
    5: {
        **{name: of_steps(name, 45, 110) for name in ("pallas loop", "deterministic loop", "8 segments loop", "offload loop")},
        "experts": Item(functools.partial(checked, experts.cases), 40, 90),
        "kernels of experts": Item(functools.partial(timed_kernels, "experts"), 30, 90),
        **{name: of_steps(name, 45, 110) for name in ("mixtral", "mixtral capacity", "1b loop", "XLA's options loop")},
    },
    6: {
        "trace": Item(traced, 60, 200),
        "save and restore": Item(save_and_restore, 40, 110),
        **{each.name: of_part(each.act, each.need_s, each.most_s) for each in operate.ITEMS},
    },
}


def run_item(here: Here) -> int:
    """A child's work. The last line that it puts has the verdict."""
    verdict, found = STAGES[here.stage][here.item].act(here)
    here.put(verdict=verdict, found=found, seconds=time.monotonic() - here.began)
    return 0


def run_stage(stage: int, names: Sequence[str], seconds: float, here: Here, console: rich.console.Console) -> int:
    """Runs the items of a stage, each in its own process, and returns the exit code."""
    began, verdicts = time.monotonic(), {}
    environ, removed = clean(os.environ, here.smoke)
    here.put(item="stage", removed=removed, items=list(names))
    if removed:
        report.say(console, f"taken from the environment of all items: {', '.join(removed)}")
    for name in names:
        item = STAGES[stage][name]
        left = seconds - PACKING_S - (time.monotonic() - began)
        one = dataclasses.replace(here, item=name)
        if left < item.need_s and not here.smoke:
            one.put(verdict=NOT_RUN, found=f"{max(0.0, left):.0f} s were left, and it needs {item.need_s:.0f}", seconds=0.0)
        else:
            limit = min(item.most_s, left)
            command = [sys.executable, "-m", "benchmarks.first_hour", f"--stage={stage}", f"--item={name}", f"--out={here.out}"]
            command += [f"--work={here.work}", f"--seconds={limit:.0f}", *(["--smoke"] if here.smoke else [])]
            started = time.monotonic()
            code, said = run_program(command, one.log(f"{name} item"), environ=environ, limit_s=limit)
            if code != 0:
                why = f"not done after {limit:.0f} s" if code is None else f"exit code {code}: {last_words(said)}"
                verdict = LATE if code is None else BAD
                one.put(verdict=verdict, found=why, seconds=time.monotonic() - started)
        last = [line for line in read(here.out) if line["item"] == name and line["stage"] == stage and "found" in line][-1]
        verdicts[name] = last["verdict"]
        report.say(console, f"{stage} {name}: {last['verdict']}: {last['found']} ({last['seconds']:.0f} s)")
    logs = here.log("x").parent
    if logs.exists():
        pack(logs, here.out / f"logs{stage}.tar.gz")
    if rest := [name for name in names if verdicts[name] in (NOT_RUN, LATE)]:
        again = ["python", "-m", "benchmarks.first_hour", f"--stage={stage}", f"--out={here.out}", f"--only={';'.join(rest)}"]
        again += [f"--work={here.work}"] * (here.work != here.out / "work") + ["--smoke"] * here.smoke
        report.say(console, f"not measured: {shlex.join(again)}")
    hung = [name for name in OF_CORRECTNESS if verdicts.get(name) == LATE]
    return int(bool(hung) or any(verdict not in FINE for verdict in verdicts.values()))


def clean(environ: Mapping[str, str], smoke: bool) -> tuple[dict[str, str], list[str]]:
    """The environment without what a run refuses, and the names of that. Images set such variables for everybody."""
    names = set() if smoke else set(environment.changing(environ))
    if not smoke:
        names |= {problem.key for problem in hardware.memory_environment(-1.0, environ)[1]}
    return {name: value for name, value in environ.items() if name not in names}, sorted(names)


# ---- what was found


def read(out: Path) -> Iterator[dict[str, Any]]:
    """All lines of the results; one that was cut off in the middle is left out."""
    file = out / "results.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


ITEM_HEADINGS = ("stage", "item", "", "s", "what was found")
STEP_HEADINGS = (
    *("case", "step s", "estimated", "ratio", "peak GiB", "estimated", "ratio", "tokens/s", "MFU causal", "compile s", ""),
)


def summary(out: Path, console: rich.console.Console) -> None:
    """Prints the last verdict of each item, and train steps estimated beside measured."""
    verdicts: dict[tuple[int, str], dict[str, Any]] = {}
    cases: dict[str, dict[str, Any]] = {}
    for line in read(out):
        if "found" in line:
            verdicts[line["stage"], line["item"]] = line
        if "steps" in line:
            cases[line["item"]] = line["steps"]  # the case, or the trace of one

    def ratio(measured: float | None, planned: float | None) -> str:
        return f"{measured / planned:.2f}" if measured and planned else "-"

    rows, steps = [], []
    for stage, items in STAGES.items():
        for name in items:
            line = verdicts.get((stage, name), {"verdict": NOT_RUN, "found": "", "seconds": None})
            rows.append([str(stage), name, line["verdict"], number(line["seconds"], ".0f"), line["found"]])
    for name, r in cases.items():
        planned, memory = r.get("planned") or {}, r.get("memory") or {}
        step_s, peak = r.get("step_s", {}).get("median"), memory.get("peak_gib")
        pairs = ((step_s, planned.get("step_s"), ".4g"), (peak, planned.get("peak_gib"), ".2f"))
        cells = [cell for a, b, form in pairs for cell in (number(a, form), number(b, form), ratio(a, b))]
        cells += [number(r.get("tokens_per_s"), ",.0f"), percent(r.get("mfu_causal")), number(r.get("compile_s"), ".1f")]
        steps.append([name, *cells, r.get("why") or r.get("not_planned") or ""])
    report.show(console, "Items", ITEM_HEADINGS, rows, text=3)
    report.show(console, "Train steps, estimated beside measured", STEP_HEADINGS, steps)


# ---- the command line


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.first_hour", description=__doc__, formatter_class=raw)
    parser.add_argument("--stage", type=int, choices=tuple(STAGES), help="see above")
    parser.add_argument("--out", type=Path, required=True, help="a folder; all stages share it")
    parser.add_argument("--work", type=Path, help="for what need not be kept (OUT/work)")
    parser.add_argument("--only", default="", help="'NAME;NAME': these items of the stage, as its lines name them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the stage, at most (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--summary", action="store_true", help="print what was found; with --stage after it has run")
    parser.add_argument("--item", default="", help=argparse.SUPPRESS)  # what a child runs
    return parser


def refusal(args: argparse.Namespace, devices: hardware.Devices) -> str:
    """Why this cannot be run as asked, with the remedy; "" if it can."""
    if not args.stage:
        return "" if args.summary else "--stage is missing. For example --stage=1."
    if unknown := [name for name in filter(None, args.only.split(";")) if name not in STAGES[args.stage]]:
        return f"--only = {';'.join(unknown)}: no such item in stage {args.stage}. It has {'; '.join(STAGES[args.stage])}."
    if not args.smoke and (devices.kind != "gpu" or not devices.count):
        return f"no GPU here: {devices.source}. --smoke runs a stage on the CPU."
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one stage, or prints the summary, and returns the exit code."""
    args = parser().parse_args(argv)
    out = args.out.expanduser().absolute()
    work = args.work.expanduser().absolute() if args.work else out / "work"
    devices = hardware.probe()
    if wrong := refusal(args, devices):
        print(wrong, file=sys.stderr)
        return 2
    here = Here(args.stage or 0, args.item, out, work, args.smoke, args.seconds)
    if args.item:
        return run_item(here)
    console = rich.console.Console() if sys.stdout.isatty() else rich.console.Console(width=report.WIDTH)
    code = 0
    if args.stage:
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(here.log("x").parent, ignore_errors=True)  # of the same stage before: they are packed
        if not args.smoke and (said := rates_found(out, devices.name)):
            report.say(console, said)
        names = [name for name in STAGES[args.stage] if not args.only or name in args.only.split(";")]
        try:
            code = run_stage(args.stage, names, args.seconds, here, console)
        except KeyboardInterrupt:
            print("\nCtrl-C: stopped; what was done is kept.", file=sys.stderr)
            return INTERRUPTED
    if args.summary:
        summary(out, console)
    return code


if __name__ == "__main__":
    sys.exit(main())
