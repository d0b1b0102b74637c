"""The items of benchmarks/first_minutes.py: checks and measurements on one H100 or H200, correctness and then speed.

An item is a function of (node, seconds) that returns an Outcome (node/suite.py). What uses the GPU runs in a process of its
own, with a time limit, so a crash or a timeout of one item does not affect the others.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import math
import os
import shutil
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import peer_torch
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import hardware, launch
from jaxtrain.data import loading
from jaxtrain.node import kernels, suite
from jaxtrain.node.suite import BAD, GOOD, OFF, OUT, Node, PartOutcome
from jaxtrain.node.train_step import DATA, NOT_DONE, one_device, start_devices
from jaxtrain.plan import rates
from jaxtrain.report import bench
from jaxtrain.train.child import (
    FAILED,
    LATE,
    OK,
    error_line,
    jaxtrain_command,
    last_lines,
    open_program,
    run_case,
    run_program,
    save_partial,
)

MAX_FILE_BYTES = 15 * 2**20  # of a file that is sent back
CPU = {"JAX_PLATFORMS": "cpu"}

LOOP, UNROLLED = ("--config.parallel.scan_layers=true",), ("--config.parallel.scan_layers=false",)
FP8, PALLAS = ("--config.precision=fp8",), ("--config.attention.impl=pallas",)
ONE_DOCUMENT = ("--config.data.packing=none",)
HALF = (f"--config={launch.REPO}/configs/llama3_8b.py:half",)
EIGHT = (*HALF, "--config.model.num_layers=8")  # fits both GPUs, so their speeds can be compared
# llama3_1b with fewer and smaller microbatches than shipped, since a step of the shipped batch takes ten seconds.
ONE = (
    f"--config={launch.REPO}/configs/llama3_1b.py:gpus=1",
    *("--config.train.global_batch=16", "--config.train.grad_accum=8"),
)
# Mixtral with 6 layers of half the width: 2.3 B parameters, 0.7 B of them active.
MIXTRAL = (
    f"--config={launch.REPO}/configs/mixtral_8x7b.py:gpus=1",
    *("--config.model.num_layers=6", "--config.model.d_model=2048", "--config.model.d_ff=7168"),
    *("--config.model.num_heads=16", "--config.model.num_kv_heads=4", "--config.mesh.expert=1"),
    *("--config.train.global_batch=8", "--config.train.grad_accum=8"),
)
TINY = (suite.TINY, *suite.SMALL, "--config.train.global_batch=8")
TINY_EXPERTS = ("--config.model.num_experts=4", "--config.model.experts_per_token=2")
TINY_STEPS = (*TINY, "--config.model.num_layers=2")  # a loop needs several layers

# Case of train steps -> (config, further overrides of a smoke test, overrides). "Half" is half of Llama 3 8B, for an H200. The
# other cases of Llama 3 8B have eight of its layers.
CASES: dict[str, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "one document, loop": (EIGHT, (), (*LOOP, *ONE_DOCUMENT)),
    "one document, unrolled": (EIGHT, (), (*UNROLLED, *ONE_DOCUMENT)),
    "packed, loop": (EIGHT, (), LOOP),
    "packed, unrolled": (EIGHT, (), UNROLLED),
    "fp8, packed, loop": (EIGHT, (), (*LOOP, *FP8)),
    "pallas, packed, loop": (EIGHT, (), (*LOOP, *PALLAS)),
    "deterministic, pallas, loop": (EIGHT, (), (*LOOP, *PALLAS, "--config.train.deterministic=true")),
    "8 segments, loop": (EIGHT, (), (*LOOP, "--config.data.max_segments=8")),
    "offload, loop": (EIGHT, (), (*LOOP, "--config.optimizer.offload=moments")),
    "half, packed, loop": (HALF, (), LOOP),
    "half, packed, unrolled": (HALF, (), UNROLLED),
    "half, fp8, unrolled": (HALF, (), (*UNROLLED, *FP8)),
    "mixtral": (MIXTRAL, TINY_EXPERTS, UNROLLED),
    "mixtral capacity": (MIXTRAL, TINY_EXPERTS, (*UNROLLED, "--config.moe.capacity_factor=1.25")),
    "1b loop": (ONE, (), LOOP),
}
HALF_GIB = 100.0  # memory of a GPU for half of Llama 3 8B
# Precision -> tolerated relative difference of 20 losses on the GPU from losses on a CPU, for a model with cuDNN's shapes.
# Losses of the first steps hardly depend on rounding. A wrong mask or a gradient of the wrong sign changes them by more.
PARITY = {"f32": 1e-4, "bf16": 5e-3, "fp8": 2e-2}
PARITY_SHAPE = (
    *("--config.model.num_layers=2", "--config.model.d_model=256", "--config.model.d_ff=512", "--config.model.num_heads=4"),
    *("--config.model.num_kv_heads=2", "--config.model.head_dim=64", "--config.data.seq_len=512"),
    *("--config.train.global_batch=4", "--config.train.grad_accum=2"),
)
LOSSES = {"steps": 19, "warmup": 1}
# Kernels of attention that decide whether llama3_8b and llama3_1b are right, and one of each other kind.
FIRST_KERNELS = (
    *(f"cudnn-{shape}" for shape in ("T4096-heads32:8-dim128-packed", "T4096-heads32:8-dim64-packed")),
    *(f"cudnn-{shape}" for shape in ("T2048-heads32:8-dim128", "T2048-heads32:8-dim128-window500-packed")),
)
MORE_KERNELS = (
    *(
        f"pallas-{shape}"
        for shape in ("T4096-heads32:8-dim128-packed", "T2048-heads32:8-dim64-packed", "T2048-heads32:8-dim128")
    ),
    *(f"cudnn-{shape}" for shape in ("ring-T4096-heads32:8-dim128", "ulysses-T4096-heads32:8-dim128-packed")),
)
SMOKE_KERNELS = ("chunked-T64-heads4:2-dim16-packed",)
RESUMED = (  # a run to be killed and resumed; each step is in metrics.jsonl
    *("--config.precision=bf16", "--config.train.steps=3000", "--config.checkpoint.every_steps=500"),
    *("--config.log.every_steps=1", "--config.eval.every_steps=0", "--config.optimizer.warmup_steps=50"),
)
SMOKE_RESUMED = (
    *("--config.train.steps=400", "--config.checkpoint.every_steps=50", "--config.optimizer.warmup_steps=2"),
    *suite.SMALL,
)
REPEATED = 50  # steps after a checkpoint that the run takes before it is killed
RESUME_ERROR = 0.05  # tolerated relative difference of repeated losses: cuDNN and cuBLAS add in any order
# Settings of PyTorch, in the order in which they are tried: memory may run out without checkpointing.
TORCH = "cudnn,layers; cudnn,layers,checkpoint; flash,layers; flash,layers,checkpoint"
REPORT_S = 40.0  # for the report of a trace
METRICS_RUN = "run_with_gpu_metrics"  # folder
# Four layers, so that the checkpoint of a run is small, and a batch whose step takes about a second.
SHORT = (
    f"--config={launch.REPO}/configs/llama3_1b.py:gpus=1",
    *("--config.model.num_layers=4", "--config.train.global_batch=16", "--config.train.grad_accum=4"),
)
LEAN = (
    *("--config.train.steps=60", "--config.optimizer.warmup_steps=5", "--config.log.every_steps=5"),
    *("--config.eval.every_steps=0", "--config.sample.max_tokens=0", "--config.checkpoint.every_steps=0"),
)


# ---- The machine


def look(node: Node, limit_s: float) -> PartOutcome:
    """Record driver, compiler, memory, libraries and versions, without JAX."""
    commands = {
        "nvidia-smi": "nvidia-smi",
        "gpu": "nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm --format=csv",
        "vboost": "nvidia-smi boost-slider --list",
        "topology": "nvidia-smi topo -m",
        "ptxas": "command -v ptxas nvcc; ptxas --version | tail -2; ls -d /usr/local/cuda*",
        "libraries": "ldconfig -p | grep -E 'nvrtc|cudnn|libcuda.so|cublasLt'",
        "memory": "grep -E 'MemTotal|MemAvailable|HugePages_Total' /proc/meminfo; nproc; df -h /tmp | tail -1; ulimit -l",
        "variables": "env | cut -d= -f1 | sort | tr '\\n' ' '",
        "versions": f"{sys.executable} -m pip list --format=freeze 2>/dev/null | grep -i -E "
        "'^(jax|flax|optax|orbax|tensorstore|etils|protobuf|rich|numpy|torch|triton|transformers|nvidia|cuda)'",
    }
    lines, data, gpu, deadline = [], {}, "no nvidia-smi", time.monotonic() + limit_s
    for name, command in commands.items():
        log = node.path / "logs" / f"look_{name}.txt"
        code, data[name] = run_program(["bash", "-c", command], log, limit_s=max(1.0, min(15.0, deadline - time.monotonic())))
        lines += [f"### {name}", "", "```text", *data[name].splitlines()[:80], "```", ""]
        if name == "gpu" and code == 0:
            gpu = data[name].splitlines()[-1]
    return PartOutcome(GOOD, f"{gpu}; {' '.join(data['memory'].split()[:3])}", lines, data)


def compute(node: Node, limit_s: float) -> PartOutcome:
    """Compute on the GPU: a product, functions, host memory, cuDNN's attention; two rates as ceilings."""
    request = {"cache": node.cache}
    seen = run_case("benchmarks.gpu_items:try_jax", request, log=node.log("compute"), limit_s=limit_s)
    if "product" not in seen:  # a crash of a library later leaves the first results
        return PartOutcome(BAD, seen.get("why", "no answer"), data=seen)
    errors = {name: seen.get(name, "not done") for name in ("product", "functions", "pinned", "attention")}
    wrong = [name for name, error in errors.items() if not (isinstance(error, float) and error < 1e-2)]
    found = {key: seen[key] for key in ("kind", *errors, "tflops", "tb_s") if key in seen}
    text = ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items())
    verdict = BAD if {"product", "functions"} & {*wrong} else OFF if wrong else GOOD
    return PartOutcome(verdict, f"WRONG: {', '.join(wrong)}; {text}" if wrong else text, data=seen)


def try_jax(request: dict[str, Any]) -> dict[str, Any]:
    """Return relative errors of small computations, rates, and facts of the device. This is a case (train/child.py)."""
    (one,) = start_devices(one_device(request["cache"]), 1)
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxtrain.kernels.attention import Rows, Spec
    from jaxtrain.models.attention import Kernel
    from jaxtrain.node import measure as micro

    on_gpu = one.platform == "gpu"
    out: dict[str, Any] = {"verdict": LATE, "kind": one.device_kind, "memory": one.memory_stats()}
    out["spaces"] = [str(space) for space in one.addressable_memories()]
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((512, 512), np.float32) for _ in range(2))
    exact = a.astype(np.float64)

    def error(got: Any, want: Any) -> float:
        return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))

    def product() -> float:
        return error(jax.jit(functools.partial(jnp.matmul, precision="highest"))(a, b), exact @ b)

    def functions() -> float:
        powers = np.exp(exact - exact.max(-1, keepdims=True))
        want = np.exp(np.sin(exact)) + powers / powers.sum(-1, keepdims=True)
        return error(jax.jit(lambda x: jnp.exp(jnp.sin(x)) + jax.nn.softmax(x))(a), want)

    def pinned() -> float:
        there = jax.device_put(jnp.asarray(a), jax.sharding.SingleDeviceSharding(one, memory_kind="pinned_host"))
        return error(jax.device_put(there, jax.sharding.SingleDeviceSharding(one)), exact)

    def attention() -> float:
        T, spec = 256, Spec(64, "bf16", False, 1)
        segments, positions = np.ones((1, T), np.int32), np.arange(T, dtype=np.int32)[None]
        rows = Rows(*(jnp.asarray(x) for x in (segments, positions, segments, positions)))
        q, k, v = (jnp.asarray(rng.standard_normal((1, T, n, 64)), jnp.bfloat16) for n in (4, 2, 2))

        def by(name: str) -> Any:
            kernel = Kernel(name, (spec,))
            return jax.jit(lambda q, k, v: kernel(q, k, v, kernel.prepare(rows), 0))(q, k, v)

        return error(by("cudnn" if on_gpu else "reference"), np.asarray(by("reference"), np.float64))

    sizes = micro.Sizes(flop=30e12, rounds=40, warm_s=0.3, repeats=5)

    def tflops() -> float:
        return micro.time_work(micro.gemm((8192, 8192, 8192), "bf16", [one]), sizes)[0].rate / 1e12

    def tb_s() -> float:
        return micro.time_work(micro.memory([one], sizes), sizes)[0].rate / 1e12

    for act in (product, functions, pinned, attention, *((tflops, tb_s, loaded_cudnn) if on_gpu else ())):
        try:
            out[act.__name__] = act()
        except Exception as wrong:  # of XLA or a library: the other computations tell more
            out[act.__name__] = error_line(wrong)
        save_partial(request, out)
    return out | {"verdict": OK}


def loaded_cudnn() -> int:
    """Return the version of cuDNN that JAX's plugin has loaded, which may differ from the installed package."""
    name = next(f"jax_plugins.xla_cuda{n}" for n in (12, 13) if importlib.util.find_spec(f"jax_plugins.xla_cuda{n}"))
    return importlib.import_module(name).cuda_versions.cudnn_get_version()


# ---- Correctness


def check_kernels(title: str, names: Sequence[str], node: Node, limit_s: float) -> PartOutcome:
    """Compare some kernels of attention with their definition (tests/gpu)."""
    chosen = SMOKE_KERNELS if node.smoke else names
    targets = [f"test_gpu_attention.py::test_attention[{name}]" for name in chosen]
    return suite.run_gpu_tests(node, limit_s, title, targets)


class Background:
    """Work of the CPU beside the GPU's work: losses of a CPU, and PyTorch's examples. Each is begun once.

    is_busy: whether some of it is not done.
    """

    def __init__(self):
        self._pool = concurrent.futures.ThreadPoolExecutor(2)
        self._begun: dict[str, concurrent.futures.Future[dict[str, Any]]] = {}

    def begin(self, name: str, act: Callable[[], dict[str, Any]]) -> None:
        if name not in self._begun:
            self._begun[name] = self._pool.submit(act)

    @property
    def is_busy(self) -> bool:
        return not all(work.done() for work in self._begun.values())

    def result(self, name: str, limit_s: float) -> dict[str, Any]:
        """Return the answer of a case (train/child.py); with the verdict LATE or FAILED if there is none."""
        try:
            return self._begun[name].result(max(0.1, limit_s))
        except concurrent.futures.TimeoutError:
            return {"verdict": LATE, "why": f"{name}: not done in time on the CPU"}
        except Exception as error:
            return {"verdict": FAILED, "why": f"{name}: {error_line(error)}"}


background = Background()


def take_losses(node: Node, precision: str, where: str, limit_s: float) -> dict[str, Any]:
    """Return the answer of `train_step.measure` for a small model. where: "device" or "cpu"."""
    shape = suite.SMALL if node.smoke else PARITY_SHAPE
    argv = [suite.TINY, *shape, *DATA["synthetic"], f"--config.precision={precision}"]
    argv.append(f"--config.paths.cache={node.cache}")
    environ = os.environ | (CPU if where == "cpu" else {})
    return suite.time_steps(node, f"losses {precision} {where}", argv, limit_s, environ, devices=1, **LOSSES)


def precisions(node: Node) -> list[str]:
    return list(PARITY)[:1] if node.smoke else list(PARITY)


def compare_losses(node: Node, limit_s: float) -> PartOutcome:
    """Compare the losses of 20 steps with losses on a CPU, from the same weights and data."""
    deadline, data, wrong, texts = time.monotonic() + limit_s, {}, [], []
    for precision in precisions(node):
        if (left := deadline - time.monotonic()) < 8:
            wrong.append(f"{precision}: no time was left")
            continue
        here = take_losses(node, precision, "device", left)
        there = background.result(f"losses {precision}", deadline - time.monotonic())
        data[precision] = {"device": here, "cpu": there}
        if failed := [answer["why"] for answer in (here, there) if answer["verdict"] != OK]:
            wrong.append(f"{precision}: {'; '.join(failed)}")
        elif here["steps"] != there["steps"]:  # the last losses are of different steps
            wrong.append(f"{precision}: in time {here['steps']} steps were taken on the device, {there['steps']} on the CPU")
        else:
            difference = max(abs(here["loss"][when] / there["loss"][when] - 1) for when in ("first", "last"))
            texts.append(f"{precision} {difference:.1e} ({here['attention']})")
            if not difference <= PARITY[precision]:
                wrong.append(f"{precision}: losses differ by {difference:.1e}, {PARITY[precision]:.0e} is tolerated")
    return PartOutcome(BAD if wrong else GOOD, "; ".join([*wrong, *texts]), data=data)


def kill_and_resume(node: Node, limit_s: float) -> PartOutcome:
    """Kill a run (SIGKILL) after a checkpoint, resume it, and compare the losses of the steps that both have taken."""
    folder, deadline = node.path / "resume", time.monotonic() + limit_s
    shutil.rmtree(folder, ignore_errors=True)
    argv = [suite.TINY, *RESUMED, *(SMOKE_RESUMED if node.smoke else ()), f"--config.paths.cache={node.cache}"]
    command = [*jaxtrain_command("main", *argv), f"--workdir={folder}"]

    def losses() -> dict[int, float]:
        file = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
        return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}

    log, saved = node.path / "logs" / "resume_1.txt", []
    with open_program(command, log) as first:
        while first.poll() is None and time.monotonic() < deadline - limit_s / 3:
            saved = Checkpoints(folder / "checkpoints").steps()
            if saved and max(losses(), default=0) >= saved[-1] + REPEATED:
                break
            time.sleep(0.02)
        ended = first.poll()
    before = losses()
    if ended is not None or not saved:
        why = "no checkpoint in time" if ended is None else f"the first attempt ended by itself, exit code {ended}"
        return PartOutcome(BAD, f"{why}: {last_lines(log.read_text(errors='replace'))}")
    code, outcome = node.run_program("resume 2", command, deadline - time.monotonic())
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    after, receipt = losses(), json.loads((folder / "receipt.json").read_text())
    resumed = receipt.get("resumed_from_step") or 0
    both = sorted(step for step in before.keys() & after.keys() if step > resumed)
    difference = max((abs(after[step] / before[step] - 1) for step in both), default=math.nan)
    equal = sum(after[step] == before[step] for step in both)
    text = f"killed at step {max(before)}, resumed at {resumed}; of {len(both)} repeated losses {equal} are equal bit for bit, "
    text += f"the others within {difference:.1e}"
    data = {"killed": max(before), "resumed": resumed, "repeated": len(both), "equal": equal, "difference": difference}
    if code != 0 or not resumed or not difference <= RESUME_ERROR:
        return PartOutcome(BAD, f"{text}; {outcome.found}", outcome.lines, data)
    return PartOutcome(GOOD, f"{text}; last loss {after[max(after)]:.4f}", outcome.lines, data)


def check_checkpoint(node: Node, limit_s: float) -> PartOutcome:
    """Save and restore the state of a small llama3_1b, and compare it bit for bit."""
    argv = [*(TINY if node.smoke else SHORT), *DATA["synthetic"], *suite.SAVED, f"--config.paths.cache={node.cache}"]
    return suite.train_and_restore("checkpoint", node, limit_s, argv)


# ---- Train steps


def step_argv(case: str, smoke: bool) -> list[str]:
    """Return the command line of one of CASES; in a smoke test, of a tiny model without kernels for Hopper."""
    base, tiny, more = CASES[case]
    if smoke:
        base, more = (*TINY_STEPS, *tiny), [word for word in more if word not in PALLAS]
    return [*base, *more, *DATA["synthetic"]]


def time_step(case: str, node: Node, limit_s: float, trace: str = "") -> PartOutcome:
    """Time the train steps of one of CASES, beside their estimate. If cuDNN's attention fails, time Pallas' attention."""
    argv, name = [*step_argv(case, node.smoke), f"--config.paths.cache={node.cache}"], f"{case}{' trace' if trace else ''}"
    request = {"steps": 3, "warmup": 1} if node.smoke or trace else {"steps": 8, "warmup": 2}
    request |= {"devices": 1, "trace": trace}
    began, note = time.monotonic(), ""
    answer = suite.time_steps(node, name, argv, limit_s, **request)
    if answer["verdict"] == FAILED and "cudnn" in answer["why"].lower() and not {*PALLAS} & {*argv}:
        note, left = f"cuDNN failed ({answer['why'][:300]}); with Pallas: ", limit_s - (time.monotonic() - began)
        answer = suite.time_steps(node, f"{name} pallas", [*argv, *PALLAS], left, **request)
    if answer["verdict"] != OK:
        verdict = LATE if answer["verdict"] == LATE else BAD
        return PartOutcome(verdict, f"{note}{answer['verdict']}: {answer['why']}", data=answer)
    text = bench.step_result(answer)
    if answer["not_planned"] and not node.smoke:
        text += f"; not planned: {answer['not_planned']}"
    if background.is_busy:
        text += "; the CPU worked beside it"
    off = suite.differences_from_plan(answer)
    text = "; ".join([text, *off])
    return PartOutcome(
        OFF if off or note else GOOD, note + text, bench.markdown(bench.step_table(name, {name: answer})), answer
    )


def trace_step(case: str, node: Node, limit_s: float) -> PartOutcome:
    """Trace two train steps of one of CASES, report the trace, and keep both."""
    folder, deadline = node.path / "trace", time.monotonic() + limit_s
    shutil.rmtree(folder, ignore_errors=True)
    outcome = time_step(case, node, limit_s - REPORT_S, trace=str(folder))
    if not [*folder.rglob("*.xplane.pb")]:
        late = outcome.verdict == LATE or outcome.data.get("trace") == NOT_DONE
        return dataclasses.replace(outcome, verdict=LATE if late else BAD, found=f"no trace; {outcome.found}")
    command = jaxtrain_command("profile", str(folder), f"--html={folder}/report.html", f"--json={folder}/report.json")
    code, said = node.run_program("Report of the trace", command, deadline - time.monotonic())
    files = pack(folder, node.path / "keep" / "trace.tar.gz")
    shutil.rmtree(folder)
    found = f"{sum(file.stat().st_size for file in files) / 2**20:.2g} MiB in {len(files)} files; report: {said.found}"
    verdict = LATE if code is None else BAD if code else outcome.verdict
    return dataclasses.replace(outcome, verdict=verdict, found=f"{found}; {outcome.found}", lines=outcome.lines + said.lines)


def pack(folder: Path, target: Path) -> list[Path]:
    """Pack a folder into one archive, or into TARGET.00, TARGET.01, ... of at most MAX_FILE_BYTES, which `cat` joins."""
    for old in target.parent.glob(f"{target.name}*"):
        old.unlink()
    with tarfile.open(target, "w:gz") as archive:
        archive.add(folder, folder.name)
    if target.stat().st_size <= MAX_FILE_BYTES:
        return [target]
    made = []
    with open(target, "rb") as whole:
        while block := whole.read(MAX_FILE_BYTES):
            made.append(target.with_name(f"{target.name}.{len(made):02d}"))
            made[-1].write_bytes(block)
    target.unlink()
    return made


# ---- PyTorch


PEERS = ("one document, loop", "one document, unrolled")  # the cases with which PyTorch is compared


def begin_examples(node: Node) -> None:
    """Begin to make the batches, weights and losses for PyTorch, on the CPU."""
    argv, folder = step_argv(PEERS[1], node.smoke), node.path / "peer"
    shutil.rmtree(folder, ignore_errors=True)
    log = node.log
    background.begin("small example", lambda: peer_torch.export_small(argv, folder / "small", log("example small"), 300.0))
    background.begin("example", lambda: peer_torch.export(argv, folder, log=log("example"), limit_s=300.0))


def time_torch(node: Node, limit_s: float) -> PartOutcome:
    """Time the step of one document a sequence in PyTorch, after a comparison of losses of a small model."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        return PartOutcome(OUT, "this Python has no torch or no transformers")
    deadline = time.monotonic() + limit_s
    small, example = (background.result(name, (deadline - time.monotonic()) / 2) for name in ("small example", "example"))
    platform = "cpu" if node.smoke else "gpu"
    same = peer_torch.compare_losses(
        small, sys.executable, node.log("torch small"), (deadline - time.monotonic()) / 2, platform
    )
    if wrong := [answer["why"] for answer in (same, example) if answer["verdict"] != OK]:
        return PartOutcome(BAD, "; ".join(dict.fromkeys(wrong)), data={"same": same})
    settings = peer_torch.read_settings("sdpa,none" if node.smoke else TORCH)
    steps = (2, 3) if node.smoke else (2, 6)
    spec = example["spec"] | {"platform": platform, "settings": settings, "tune_s": 0.0, "warmup": steps[0], "steps": steps[1]}
    timed = peer_torch.run_peer(sys.executable, spec, node.log("torch"), deadline - time.monotonic())
    answer = peer_torch.as_our_answer(timed, loading.load_config(step_argv(PEERS[1], node.smoke)).run)
    text, data = f"losses of a small model agree to {same['off']:.1e}", {"same": same, "torch": answer}
    if answer["verdict"] != OK:
        verdict = LATE if answer["verdict"] == LATE else BAD
        return PartOutcome(verdict, f"{answer['verdict']}: {answer['why']}; {text}", data=data)
    text = f"{bench.step_result(answer)}, {answer['settings']}; {text}"
    for name in PEERS:
        ours = node.results.get("parts", {}).get(name, {}).get("data") or {}
        if ours.get("verdict") == OK:
            text = f"{ours['tokens_per_s'] / answer['tokens_per_s']:.3f} x PyTorch ({name}); {text}"
    return PartOutcome(GOOD, text, bench.markdown(bench.step_table("PyTorch", {"PyTorch": answer})), data)


# ---- Rates


def calibrate(node: Node, limit_s: float) -> PartOutcome:
    """Measure the rates of this GPU for plans, and keep them. Later items are compared with the same rates as earlier items."""
    gpu = hardware.lookup(node.devices.name)
    file = rates.calibration_path(gpu.name) if gpu else None
    earlier = file.read_bytes() if file and file.exists() else None
    outcome = suite.calibrate(node, limit_s)
    if outcome.verdict == OUT and not node.smoke:
        outcome = dataclasses.replace(outcome, verdict=LATE)
    if file and file.exists() and outcome.verdict == GOOD:
        shutil.copy(file, node.path / "keep")
        file.unlink()
        if earlier is not None:
            file.write_bytes(earlier)
    return outcome


def time_kernels(kind: str, node: Node, limit_s: float) -> PartOutcome:
    """Time the kernels of one kind (node/kernels.py), and compare each time with its lower bound."""
    request = {"kind": kind, "limit_s": 0.8 * limit_s, "cache": node.cache}
    answer = run_case(kernels.CASE, request, log=node.log(f"kernels {kind}"), limit_s=limit_s)
    rows = answer.get("rows", [])
    lines = bench.markdown(kernels.make_table(f"Kernels: {kind}", rows))
    bad = [f"{r['kind']} {r['what']}: {r['why']}" for r in rows if r["verdict"] not in (OK, kernels.NOT_TIMED)]
    done = [r for r in rows if r["verdict"] == OK]
    text = f"{len(done)} timed"
    if reached := [r["of_bound"] for r in done if r["of_bound"]]:
        text += f", {min(reached):.0%} to {max(reached):.0%} of their bounds"
    if answer["verdict"] != OK:
        text += f"; {answer['why']}"
    verdict = OFF if answer["verdict"] == LATE and done else GOOD if answer["verdict"] == OK else BAD
    return PartOutcome(BAD if bad else verdict, "; ".join([text, *bad]), lines, rows)


def compare_packing(node: Node, limit_s: float) -> PartOutcome:
    """Time attention of a layer, forward and backward, by data.max_segments and by the documents in a sequence."""
    request = {"smoke": node.smoke, "limit_s": 0.8 * limit_s, "cache": node.cache}
    answer = run_case("benchmarks.gpu_items:time_packing", request, log=node.log("packing"), limit_s=limit_s)
    rows = answer.get("rows", [])
    done = [r for r in rows if "seconds" in r]
    text = "; ".join(f"{r['max_segments']} segments, {r['documents']} documents {1e3 * r['seconds']:.3g} ms" for r in done)
    if not done:
        return PartOutcome(BAD, answer.get("why", "no form of sequences could be timed"), data=rows)
    return PartOutcome(GOOD if answer["verdict"] == OK else OFF, f"{done[0]['kernel']}: {text}", data=rows)


def time_packing(request: dict[str, Any]) -> dict[str, Any]:
    """Time attention for pairs of (data.max_segments, documents in a sequence), in a child process (train/child.py)."""
    began = time.monotonic()
    (one,) = start_devices(one_device(request["cache"]), 1)
    import jax

    from jaxtrain.kernels.attention import Spec
    from jaxtrain.node.measure import Sizes, attention, make_loop, time_calls

    smoke = request["smoke"]
    shape, iterations = ((1, 128, 4, 2, 16), 2) if smoke else ((1, 8192, 32, 8, 128), 10)
    sizes = Sizes(warm_s=0.0, repeats=3) if smoke else Sizes()
    name = "chunked" if one.platform == "cpu" else "cudnn"
    rows: list[dict[str, Any]] = []
    for segments, documents in ((1, 1), (8, 8), (32, 1), (32, 12), (64, 12))[: 2 if smoke else None]:
        if time.monotonic() - began > request["limit_s"]:
            break
        row = {"kernel": name, "max_segments": segments, "documents": documents}
        spec = Spec(shape[-1], "bf16", segments > 1, segments)
        _, both = attention(one, name, spec, shape, documents)
        body, constants, q_BTNH = both.prepare()
        try:
            program: Any = make_loop(body, iterations)
            step = program.lower(constants, q_BTNH).compile()
            seconds = statistics.median(time_calls(step, constants, q_BTNH, sizes=sizes)[0]) / iterations
            used = step.memory_analysis()
            row |= {"seconds": seconds, "temp_gib": used.temp_size_in_bytes / 2**30 if used else None}
        except jax.errors.JaxRuntimeError as error:  # the workspace may exceed the memory
            row["failed"] = error_line(error)
        rows.append(row)
        save_partial(request, {"verdict": LATE, "rows": rows})
    return {"verdict": OK, "rows": rows}


# ---- Preflight, and runs. Preflight is recorded, so that tests can use the node (tests/recorded).


def record_preflight(node: Node, limit_s: float) -> PartOutcome:
    """Run all checks and measurements of preflight, and record the node."""
    file, recorded = node.path / "preflight.json", node.path / "recorded_node"
    command = jaxtrain_command("preflight", f"--json={file}", f"--record={recorded}")
    code, outcome = node.run_program("Preflight", command, limit_s)
    verdict = {0: GOOD, 3: OFF}.get(code or 0, BAD) if code is not None and file.exists() else BAD
    return PartOutcome(verdict, outcome.found, outcome.lines, json.loads(file.read_text()) if file.exists() else {})


def check_gpu_metrics(node: Node, limit_s: float) -> PartOutcome:
    """Check the GPU metrics of a short run, its report and its receipt."""
    deadline, folder = time.monotonic() + limit_s, node.path / METRICS_RUN
    command = jaxtrain_command("main", *(TINY if node.smoke else SHORT), *DATA["synthetic"], *LEAN, f"--workdir={folder}")
    code, outcome = node.run_program(METRICS_RUN, command, limit_s)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a checkpoint has gigabytes
    receipt = json.loads((folder / "receipt.json").read_text()) if code == 0 else {}
    if outcome.verdict == BAD:
        return outcome
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen = [line for line in lines if line["kind"] == "gpu"]
    code, said = node.run_program("report", jaxtrain_command("report", str(folder)), deadline - time.monotonic())
    if code != 0:
        return PartOutcome(BAD, f"the report: {said.found}", said.lines, receipt)
    if not seen and not node.smoke:
        return PartOutcome(BAD, "no GPU metrics", data=receipt)
    missing = sorted({key for line in seen for key, value in line.items() if value is None})
    text = f"lines of GPU metrics: {len(seen)}" + (f"; without {', '.join(missing)}" if missing else "")
    return PartOutcome(GOOD, f"{text}; receipt, metrics and page in {folder.name}/", data={"gpu": seen, "receipt": receipt})
