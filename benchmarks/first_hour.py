"""The first hour on one H100 or H200, in six stages of at most nine minutes each: first correctness, then speed.

    python -m benchmarks.first_hour --stage=1 --out=runs/first_hour

    1  device and versions; attention against its definition, also sharded; steps as on a CPU; the command line
    2  rates of matmuls, attention and memory, for later estimates; kernels; the cost of packed sequences
    3  train steps in bf16: layers in a loop, layers in a loop with one document a sequence, layers unrolled
    4  FP8: its matmuls against their definition; train steps, layers in a loop and unrolled
    5  other train steps: Pallas attention, deterministic, fewer segments, offload, experts, llama3_1b, XLA's options
    6  a trace; a save and a restore; preflight and its recording; GPU metrics of a run and their cost

Train steps use llama3_8b:half, or llama3_1b on a GPU with less than 100 GiB. Each item that uses the GPU runs in a separate
process with a time limit, so a crash or a timeout of one item does not affect other items.

OUT/stageN has results.md, results.json, receipt.json and logs/, rewritten after each item and packed into OUT/stageN.tar.gz.
A second run of some items (--only) keeps the results of all other items. OUT/work, or --work=DIR, has temporary files: compiled
programs, which all stages share. --summary prints the results of all stages, estimated and measured. --smoke runs every item on
a CPU in tiny shapes.

Exit code 0; 1 an item has a fault or failed, or a correctness check was not done in time; 2 no GPU here, or a wrong
argument; 130 Ctrl-C, finished results are kept.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from jaxtrain import environment, hardware, launch
from jaxtrain.bench import kernels, node_suite, report
from jaxtrain.bench.child import LATE, OK, error_line, module_command, run_case, run_program, save_partial
from jaxtrain.bench.parts import BAD, GOOD, OFF, OUT, Node, Outcome, Part, run_parts
from jaxtrain.bench.report import number
from jaxtrain.bench.train_step import DATA, one_device, start_devices
from jaxtrain.command_line import INTERRUPTED, make_console
from jaxtrain.config import Problem
from jaxtrain.page.numbers import percent
from jaxtrain.plan import rates

SECONDS = 540.0  # time limit of a stage
PACKING_S = 15.0  # of SECONDS, reserved to pack logs and trace
MAX_FILE_BYTES = 15 * 2**20  # of a packed file, so that it can be sent
NEED_GIB = 100.0  # memory of a GPU for llama3_8b:half, whose step does not fit into 80 GB

HALF = (f"--config={launch.REPO}/configs/llama3_8b.py:half",)
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
TINY_EXPERTS = ("--config.model.num_experts=4", "--config.model.experts_per_token=2")
LOOP, UNROLLED = ("--config.parallel.scan_layers=true",), ("--config.parallel.scan_layers=false",)
FP8, PALLAS = ("--config.precision=fp8",), ("--config.attention.impl=pallas",)

# Case of train steps -> (config instead of llama3_8b:half, additional overrides of a smoke test, overrides).
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
# Precision -> tolerated relative difference of losses on the GPU from losses on a CPU, for a model with cuDNN's shapes. Losses
# of the first steps hardly depend on rounding. A wrong mask or a gradient of the wrong sign changes them by more.
PARITY = {"f32": 1e-4, "bf16": 5e-3, "fp8": 2e-2}
PARITY_SHAPE = (
    *("--config.model.num_layers=2", "--config.model.d_model=256", "--config.model.d_ff=512", "--config.model.num_heads=4"),
    *("--config.model.num_kv_heads=2", "--config.model.head_dim=64", "--config.data.seq_len=512"),
    *("--config.train.global_batch=4", "--config.train.grad_accum=2"),
)
RUN_STEPS = 60
TURNS = ("off", "on", "on", "off")  # log.gpu_every_s is 0 for "off"; with 1, "on", the driver is queried each second
# Four layers, so that the checkpoint of a run is small, and a batch whose step takes about a second.
SHORT = (
    f"--config={launch.REPO}/configs/llama3_1b.py:gpus=1",
    *("--config.model.num_layers=4", "--config.train.global_batch=16", "--config.train.grad_accum=4"),
)
TINY = (node_suite.TINY, *node_suite.SMALL, "--config.train.global_batch=8")
LEAN = (
    *(f"--config.train.steps={RUN_STEPS}", "--config.optimizer.warmup_steps=5", "--config.log.every_steps=5"),
    *("--config.eval.every_steps=0", "--config.sample.max_tokens=0", "--config.checkpoint.every_steps=0"),
)


# ---- Stage 1: correctness


def describe_device(node: Node, limit_s: float) -> Outcome:
    """Record the device, versions, and the output of nvidia-smi."""
    lines = []
    for command in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"]):
        if shutil.which(command[0]):
            log = node.path / "logs" / f"{report.file_name(' '.join(command))}.txt"
            lines += ["```text", *run_program(command, log, limit_s=20)[1].splitlines(), "```", ""]
    request = {"cache": node.cache}
    seen = run_case("benchmarks.first_hour:device_facts", request, log=node.folder.log("device"), limit_s=limit_s)
    data = {"devices": dataclasses.asdict(node.devices), "cores": os.cpu_count(), "kernel": os.uname().release, **seen}
    if seen["verdict"] != OK:
        return Outcome(BAD, seen["why"], lines, data)
    packages = node.folder.results["about"]["packages"]
    text = f"{hardware.probe().count} x {seen['kind']}, {node.devices.memory_gib:.1f} GiB; jax {packages.get('jax')}"
    return Outcome(GOOD, text, lines, data)


def device_facts(request: dict[str, Any]) -> dict[str, Any]:
    """Return the device's kind, memory statistics and memory spaces by JAX. `run_case` calls this function in a child."""
    (one,) = start_devices(one_device(request["cache"]), 1)
    spaces = [str(space) for space in one.addressable_memories()]
    return {"verdict": OK, "kind": one.device_kind, "memory": one.memory_stats(), "spaces": spaces}


def compare_with_cpu(node: Node, limit_s: float) -> Outcome:
    """Compare the first losses of a small model on the device and on a CPU, with the same weights and data."""
    shape, deadline = node_suite.SMALL if node.smoke else PARITY_SHAPE, time.monotonic() + limit_s

    def losses(precision: str, where: str) -> dict[str, Any]:
        argv = [node_suite.TINY, *shape, *DATA["synthetic"], f"--config.precision={precision}"]
        argv.append(f"--config.paths.cache={node.cache}")
        environ = os.environ | ({"JAX_PLATFORMS": "cpu"} if where == "cpu" else {})
        left = max(1.0, deadline - time.monotonic())
        return node_suite.time_steps(node, f"{precision} {where}", argv, left, (7, 1), environ, devices=1)

    data, wrong, texts = {}, [], []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # one process uses the GPU, the other CPU cores
        for precision in list(PARITY)[:1] if node.smoke else list(PARITY):
            found = dict(zip(("device", "cpu"), pool.map(functools.partial(losses, precision), ("device", "cpu")), strict=True))
            data[precision] = found
            if failed := [a["why"] for a in found.values() if a["verdict"] != OK]:
                wrong.append(f"{precision}: {'; '.join(failed)}")
                continue
            pairs = [(found["device"]["loss"][when], found["cpu"]["loss"][when]) for when in ("first", "last")]
            difference = max(abs(a - b) / abs(b) for a, b in pairs)
            texts.append(f"{precision} {difference:.1e}")
            if not difference <= PARITY[precision]:
                wrong.append(f"{precision}: losses differ by {difference:.1e}, {PARITY[precision]:.0e} is tolerated")
    return Outcome(BAD if wrong else GOOD, "; ".join(wrong) or f"losses differ by {', '.join(texts)}", data=data)


# ---- Stage 2: rates


def calibrate(node: Node, limit_s: float) -> Outcome:
    """Measure rates of matmuls, attention and memory for later estimates, and copy them to OUT/rates."""
    outcome, gpu = node_suite.calibrate(node, limit_s), hardware.lookup(node.devices.name)
    if outcome.verdict == GOOD and gpu and (file := rates.path(gpu.name)).exists():
        kept = node.path.parent / "rates"
        kept.mkdir(exist_ok=True)
        shutil.copy(file, kept)
    return outcome


def use_rates(out: Path, gpu_name: str) -> str:
    """Copy OUT/rates, measured by an earlier stage, to the folder of calibrations if this folder has no rates of this GPU.

    Return a message; "" if nothing was copied.
    """
    gpu = hardware.lookup(gpu_name)
    kept = rates.path(gpu.name, out / "rates") if gpu else None
    if gpu is None or kept is None or not kept.exists() or (file := rates.path(gpu.name)).exists():
        return ""
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(kept, file)
    return f"estimates use the rates in {kept}, now {file}"


def time_kernels(kind: str, node: Node, limit_s: float) -> Outcome:
    """Time the kernels of one kind (bench/kernels.py), and compare each time with its lower bound."""
    request = {"kind": kind, "limit_s": 0.8 * limit_s, "cache": node.cache}
    answer = run_case(kernels.CASE, request, log=node.folder.log(kind), limit_s=limit_s)
    rows = answer.get("rows", [])
    lines = report.markdown(kernels.make_table(f"Kernels: {kind}", rows))
    bad = [f"{r['kind']} {r['what']}: {r['why']}" for r in rows if r["verdict"] not in (OK, kernels.NOT_TIMED)]
    done = [r for r in rows if r["verdict"] == OK]
    text = f"{len(done)} timed"
    if reached := [r["of_bound"] for r in done if r["of_bound"]]:
        text += f", {min(reached):.0%} to {max(reached):.0%} of their bounds"
    if answer["verdict"] != OK:
        text += f"; {answer['why']}"
    verdict = OFF if answer["verdict"] == LATE and done else GOOD if answer["verdict"] == OK else BAD
    return Outcome(BAD if bad else verdict, "; ".join([text, *bad]), lines, rows)


def compare_packing(node: Node, limit_s: float) -> Outcome:
    """Time attention of a layer, forward and backward, by data.max_segments and by the documents in a sequence."""
    request = {"smoke": node.smoke, "limit_s": 0.8 * limit_s, "cache": node.cache}
    answer = run_case("benchmarks.first_hour:time_packing", request, log=node.folder.log("packing"), limit_s=limit_s)
    rows = answer.get("rows", [])
    done = [r for r in rows if "seconds" in r]
    text = "; ".join(f"{r['max_segments']} segments, {r['documents']} documents {1e3 * r['seconds']:.3g} ms" for r in done)
    if not done:
        return Outcome(BAD, answer.get("why", "no form of sequences could be timed"), data=rows)
    return Outcome(GOOD if answer["verdict"] == OK else OFF, f"{done[0]['kernel']}: {text}", data=rows)


def time_packing(request: dict[str, Any]) -> dict[str, Any]:
    """Time attention for pairs of (data.max_segments, documents in a sequence), in a child process (bench/child.py)."""
    began = time.monotonic()
    (one,) = start_devices(one_device(request["cache"]), 1)
    import jax

    from jaxtrain.bench.microbenchmarks import Sizes, attention_loop, looped, timed
    from jaxtrain.kernels.attention import Spec

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
        body, constants, q_BTNH = attention_loop(one, name, spec, shape, True, documents)
        try:
            program: Any = looped(body, iterations)
            step = program.lower(constants, q_BTNH).compile()
            seconds = statistics.median(timed(step, constants, q_BTNH, sizes=sizes)) / iterations
            used = step.memory_analysis()
            row |= {"seconds": seconds, "temp_gib": used.temp_size_in_bytes / 2**30 if used else None}
        except jax.errors.JaxRuntimeError as error:  # the workspace may exceed the memory
            row["failed"] = error_line(error)
        rows.append(row)
        save_partial(request, {"verdict": LATE, "rows": rows})
    return {"verdict": OK, "rows": rows}


# ---- Stages 3 to 6: train steps


def case_argv(case: str, smoke: bool, memory_gib: float) -> list[str]:
    """Return the command line of one of CASES for a device with this memory."""
    base, tiny, more = CASES[case]
    base = [*TINY, *tiny] if smoke else base or (HALF if memory_gib >= NEED_GIB else ONE)
    # A smoke test has two layers, because a loop needs several layers, and no kernels for Hopper.
    if smoke:
        more = ["--config.model.num_layers=2", *(x for x in more if x not in PALLAS)]
    return [*base, *more, *DATA["synthetic"]]


def time_case(case: str, node: Node, limit_s: float, trace: str = "") -> Outcome:
    """Time the train steps of one of CASES, and compare step time and peak memory with their estimates."""
    argv = [*case_argv(case, node.smoke, node.devices.memory_gib), f"--config.paths.cache={node.cache}"]
    steps = (3, 1) if node.smoke else (8, 2)
    answer = node_suite.time_steps(node, case, argv, limit_s, steps, devices=1, trace=trace)
    if answer["verdict"] != OK:
        return Outcome(LATE if answer["verdict"] == LATE else BAD, f"{answer['verdict']}: {answer['why']}", data=answer)
    planned, peak = answer["planned"] or {}, answer["memory"]["peak_gib"]
    text = (
        f"{report.beside_plan(answer['step_s']['median'], planned.get('step_s'))} s, {answer['tokens_per_s']:,.0f} tokens/s, "
    )
    text += f"MFU {percent(answer['mfu_causal'])} causal, peak {report.beside_plan(peak, planned.get('peak_gib'), '.2f')} GiB"
    lines = report.markdown(report.step_details(case, answer))
    return Outcome(OFF if node_suite.differences_from_plan(case, answer) else GOOD, text, lines, answer)


def trace_steps(node: Node, limit_s: float) -> Outcome:
    """Write a trace of two steps and its report, and pack both."""
    folder, began = node.path / "trace", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    outcome = time_case("bf16 loop", node, limit_s - (10 if node.smoke else 60), str(folder))
    if not folder.exists():
        verdict = BAD if outcome.verdict == GOOD else outcome.verdict
        return dataclasses.replace(outcome, verdict=verdict, found=f"no trace; {outcome.found}")
    command = module_command("profile", str(folder), f"--html={folder}/report.html", f"--json={folder}/report.json")
    code, said = node.run_program("Report of the trace", command, limit_s - (time.monotonic() - began) - PACKING_S)
    files = pack(folder, node.path.parent / "trace.tar.gz")
    shutil.rmtree(folder)
    where = f"{', '.join(file.name for file in files)}, {sum(file.stat().st_size for file in files) / 2**20:.2g} MiB"
    if code != 0:
        return Outcome(BAD, f"{where}; the report: {said.found}", said.lines, outcome.data)
    return dataclasses.replace(outcome, found=where, lines=outcome.lines + said.lines)


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


def check_checkpoint(node: Node, limit_s: float) -> Outcome:
    """Save and restore the state of a small llama3_1b, and compare it bit for bit."""
    argv = [*(TINY if node.smoke else SHORT), *DATA["synthetic"], f"--config.paths.cache={node.cache}"]
    return node_suite.save_and_restore(node, argv, limit_s, devices=1)


# ---- Stage 6: preflight, a run and its receipt. Preflight is recorded, so that tests can use the node (tests/recorded).


def record_preflight(node: Node, limit_s: float) -> Outcome:
    """Run all checks and measurements of preflight, and record the node."""
    file, recorded = node.path / "preflight.json", node.path / "recorded_node"
    command = module_command("preflight", f"--json={file}", f"--record={recorded}")
    code, outcome = node.run_program("Preflight", command, limit_s)
    verdict = {0: GOOD, 3: OFF}.get(code or 0, BAD) if code is not None and file.exists() else BAD
    return Outcome(verdict, outcome.found, outcome.lines, json.loads(file.read_text()) if file.exists() else {})


def train(node: Node, name: str, every_s: int, limit_s: float) -> tuple[Outcome, dict[str, Any]]:
    """Train a short run with GPU metrics every `every_s` seconds. Return its outcome and receipt."""
    folder = node.path / name
    command = module_command("main", *(TINY if node.smoke else SHORT), *DATA["synthetic"], *LEAN)
    command += [f"--config.log.gpu_every_s={every_s}", f"--workdir={folder}"]
    code, outcome = node.run_program(name, command, limit_s)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a checkpoint has gigabytes
    return outcome, json.loads((folder / "receipt.json").read_text()) if code == 0 else {}


def check_gpu_metrics(node: Node, limit_s: float) -> Outcome:
    """Check the GPU metrics of a short run, its report and its receipt."""
    outcome, receipt = train(node, "run", 2, limit_s)
    if outcome.verdict == BAD:
        return outcome
    folder = node.path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen = [line for line in lines if line["kind"] == "gpu"]
    code, said = node.run_program("report", module_command("report", str(folder)), 60)
    if code != 0:
        return Outcome(BAD, f"the report: {said.found}", said.lines, receipt)
    if not seen and not node.smoke:
        return Outcome(BAD, "no GPU metrics", data=receipt)
    missing = sorted({key for line in seen for key, value in line.items() if value is None})
    text = f"lines of GPU metrics: {len(seen)}" + (f"; without {', '.join(missing)}" if missing else "")
    return Outcome(GOOD, f"{text}; receipt, metrics and page in {folder.name}/", data={"gpu": seen, "receipt": receipt})


def time_gpu_metrics(node: Node, limit_s: float) -> Outcome:
    """Time steps alternately with and without GPU metrics, which query the driver each second, and report the difference."""
    medians: dict[str, list[float]] = {"off": [], "on": []}
    turns = TURNS[:2] if node.smoke else TURNS
    for turn, which in enumerate(turns):
        name = f"turn{turn}_{which}"
        outcome, receipt = train(node, name, int(which == "on"), limit_s / len(turns))
        shutil.rmtree(node.path / name, ignore_errors=True)
        if outcome.verdict == BAD:
            return Outcome(BAD, f"turn {turn}, {which}: {outcome.found}", outcome.lines, medians)
        medians[which].append(receipt["speed"]["step_time_s"]["median"])
    on, off = statistics.mean(medians["on"]), statistics.mean(medians["off"])
    times = ", ".join(f"{which} {' and '.join(f'{s:.4g}' for s in seconds)} s" for which, seconds in medians.items())
    return Outcome(GOOD, f"a step takes {on / off - 1:+.2%} with it ({times})", data=medians)


# ---- The stages


def steps_part(case: str, need_s: float = 45.0, most_s: float = 150.0) -> Part:
    return Part(case, functools.partial(time_case, case), most_s, need_s)


def kernels_part(name: str, kind: str, most_s: float, need_s: float) -> Part:
    return Part(name, functools.partial(time_kernels, kind), most_s, need_s)


def tests_part(name: str, file: str, most_s: float, need_s: float) -> Part:
    return Part(name, functools.partial(node_suite.run_gpu_tests, only=file), most_s, need_s)


# The most important item of each stage is first. An unrolled step may compile for minutes, so steps with a loop come before it.
STAGES: dict[int, tuple[Part, ...]] = {
    1: (
        Part("device", describe_device, 60, 10),
        tests_part("attention", "test_gpu_attention.py", 240, 45),
        Part("steps as on a CPU", compare_with_cpu, 150, 45),
        Part("command line", node_suite.train_tiny, 120, 40),
    ),
    2: (
        Part("rates", calibrate, 150, 60),
        kernels_part("gemm", "gemm", 110, 30),
        kernels_part("kernels of attention", "attention", 110, 30),
        Part("cost of packing", compare_packing, 90, 25),
        *(kernels_part(kind, kind, 60, 20) for kind in ("loss", "norm", "optimizer")),
    ),
    3: (*map(steps_part, ("bf16 loop", "bf16 loop, one document a row")), steps_part("bf16 unrolled", 90, 300)),
    4: (
        tests_part("fp8 matmuls", "test_gpu_fp8.py", 80, 25),
        steps_part("fp8 loop"),
        steps_part("fp8 unrolled", 90, 300),
    ),
    5: (
        *(steps_part(name, 45, 110) for name in ("pallas loop", "deterministic loop", "8 segments loop", "offload loop")),
        tests_part("experts", "test_gpu_experts.py", 90, 40),
        kernels_part("kernels of experts", "experts", 90, 30),
        *(steps_part(name, 45, 110) for name in ("mixtral", "mixtral capacity", "1b loop", "XLA's options loop")),
    ),
    6: (
        Part("trace", trace_steps, 200, 60),
        Part("save and restore", check_checkpoint, 110, 40),
        Part("preflight", record_preflight, 75, 30),
        Part("a run and its receipt", check_gpu_metrics, 150, 60),
        Part("cost of sampling", time_gpu_metrics, 300, 120),
    ),
}


def run_stage(stage: int, parts: Sequence[Part], seconds: float, node: Node, console: rich.console.Console) -> int:
    """Run the items of a stage. Return 0, or 1 if an item failed."""
    folder, earlier = node.path, {}
    if (file := folder / "results.json").exists():
        earlier = json.loads(file.read_text()).get("parts", {})
    try:
        done = {p.name: earlier[p.name] for p in STAGES[stage] if p.name in earlier}
        code = run_parts(parts, node, console, seconds - PACKING_S, f"Stage {stage}", done)
    finally:
        pack(folder, folder.with_suffix(".tar.gz"))
    if rest := [p.name for p in parts if done[p.name]["verdict"] in (OUT, LATE)]:
        again = [
            "python",
            "-m",
            "benchmarks.first_hour",
            f"--stage={stage}",
            f"--out={folder.parent}",
            f"--only={';'.join(rest)}",
        ]
        again += [f"--work={Path(node.cache or '').parent}"] + ["--smoke"] * node.smoke
        report.print_line(console, f"not measured: {shlex.join(again)}")
    return code


def clean_environment(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables in `environ` that a run refuses. Some container images set such variables."""
    names = {
        *environment.select_variables(environ),
        *(problem.key for problem in hardware.memory_environment(-1.0, environ)[1]),
    }
    return sorted(name for name in environ if name in names)


# ---- The summary


def summary(out: Path, console: rich.console.Console) -> None:
    """Print the verdict of each item, and estimated and measured train steps."""

    def ratio(measured: float | None, planned: float | None) -> str:
        return f"{measured / planned:.2f}" if measured and planned else "-"

    rows, steps = [], []
    for stage, parts in STAGES.items():
        file = out / f"stage{stage}" / "results.json"
        done = json.loads(file.read_text())["parts"] if file.exists() else {}
        for part in parts:
            result = done.get(part.name, {"verdict": "not run", "found": "", "seconds": None, "data": None})
            rows.append([str(stage), part.name, result["verdict"], number(result["seconds"], ".0f"), result["found"]])
            if (part.name not in CASES and part.name != "trace") or not result["data"]:
                continue
            r = result["data"]
            planned, memory = r.get("planned") or {}, r.get("memory") or {}
            step_s, peak = r.get("step_s", {}).get("median"), memory.get("peak_gib")
            pairs = ((step_s, planned.get("step_s"), ".4g"), (peak, planned.get("peak_gib"), ".2f"))
            cells = [cell for a, b, form in pairs for cell in (number(a, form), number(b, form), ratio(a, b))]
            cells += [number(r.get("tokens_per_s"), ",.0f"), percent(r.get("mfu_causal")), number(r.get("compile_s"), ".1f")]
            steps.append([part.name, *cells, r.get("why") or r.get("not_planned") or ""])
    report.print_table(console, report.make_table("Items", ("stage", "item", "", "s", "result"), rows, text=3))
    report.print_line(console, "Train steps, estimated beside measured", "bold")
    headings = ("case", "step s", "estimated", "ratio", "peak GiB", "estimated", "ratio", "tokens/s", "MFU causal", "compile s")
    report.print_table(console, report.make_table("Train steps", (*headings, ""), steps))


# ---- The command line


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.first_hour", description=__doc__, formatter_class=raw)
    parser.add_argument("--stage", type=int, choices=tuple(STAGES), help="see above")
    parser.add_argument("--out", type=Path, required=True, help="a folder; all stages share it")
    parser.add_argument("--work", type=Path, help="for what need not be kept (OUT/work)")
    parser.add_argument("--only", default="", help="'NAME;NAME': these items of the stage, as its lines name them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the stage, at most (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--summary", action="store_true", help="print all results; with --stage after it has run")
    return parser


def find_problems(args: argparse.Namespace, devices: hardware.Devices) -> list[Problem]:
    """Return the problems of this command line on these devices."""
    if not args.stage:
        return [] if args.summary else [Problem("--stage", None, "missing", "For example --stage=1.")]
    known = [part.name for part in STAGES[args.stage]]
    if [name for name in filter(None, args.only.split(";")) if name not in known]:
        return [Problem("--only", args.only, f"no such item in stage {args.stage}", f"It has {'; '.join(known)}.")]
    if not args.smoke and (devices.kind != "gpu" or not devices.count):
        return [Problem("--stage", args.stage, f"no GPU here ({devices.source})", "Add --smoke to run it on the CPU.")]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage, or print the summary, and return the exit code."""
    args = parser().parse_args(argv)
    out = args.out.expanduser().absolute()
    work = args.work.expanduser().absolute() if args.work else out / "work"
    devices = hardware.probe()
    if problems := find_problems(args, devices):
        return launch.report(problems)
    console, code = make_console(report.WIDTH), 0
    if args.stage:
        if not args.smoke:
            if line := use_rates(out, devices.name):
                report.print_line(console, line)
            if removed := clean_environment(os.environ):
                report.print_line(console, f"removed from the environment of all items: {', '.join(removed)}")
                for name in removed:
                    del os.environ[name]
        folder = report.Folder(str(out / f"stage{args.stage}"), "", "first_hour")
        node = Node(dataclasses.replace(devices, count=1), args.smoke, folder, str(work / "compiled"))
        parts = [part for part in STAGES[args.stage] if not args.only or part.name in args.only.split(";")]
        parts = [dataclasses.replace(part, need_s=0.0) for part in parts] if args.smoke else parts
        try:
            code = run_stage(args.stage, parts, args.seconds, node, console)
        except KeyboardInterrupt:
            print("\nCtrl-C: stopped; finished results are kept.", file=sys.stderr)
            return INTERRUPTED
    if args.summary:
        summary(out, console)
    return code


if __name__ == "__main__":
    sys.exit(main())
