"""Time train steps of a config with the program, compiler options, data path and loop order of training.

Step time is the time from the arrival of one step's metrics to the arrival of the next step's. Metrics are fetched one step
late, so step time is the device's time, or the host's time if that is longer. Memory is the allocator's peak in a process that
runs nothing else.
"""

import dataclasses
import itertools
import json
import math
import os
import re
import statistics
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.console

from jaxtrain.config import environment, hardware
from jaxtrain.config.hardware import WITHOUT_GPUS
from jaxtrain.config.launch import Loaded
from jaxtrain.config.schema import ConfigError, Log, Mesh, Problem, RunConfig, default_config, resolve
from jaxtrain.data import loading, pipeline
from jaxtrain.models import flops
from jaxtrain.report import bench
from jaxtrain.runtime.startup import set_compile_cache, set_environment, start_jax
from jaxtrain.step.state_size import least_gib
from jaxtrain.step.validate import validate_step
from jaxtrain.train.child import FAILED, NO_MEMORY, OK, REFUSED, error_line, run_case, save_partial

if TYPE_CHECKING:  # it imports jax
    from jaxtrain.step.model_flops import ModelFlops

CASE = "jaxtrain.node.train_step:measure"
NO_EVAL = ("--config.data.eval_source=", "--config.eval.every_steps=0")
DATA = {"synthetic": ("--config.data.source=synthetic", *NO_EVAL), "real": NO_EVAL}
TRACED_STEPS = 2
START_S = 120.0  # in which JAX starts on the GPUs of a node
NOT_DONE = "it was not done"  # a trace, if the case ended before it
MIN_STEPS = 3  # least timed steps before a time limit ends a case


# ---- Devices and configs


def devices_for(count: int) -> hardware.Devices:
    """Return the first `count` devices of this machine; 0: all. A CPU can have any number of devices."""
    found = hardware.probe()
    if not count or found.kind == "gpu":
        return dataclasses.replace(found, count=min(count or found.count, found.count))
    return dataclasses.replace(found, count=count, memory_gib=hardware.available_gib() / count)


def gpu_problems() -> list[Problem]:
    """Return the problem of GPUs that the driver reports and JAX cannot start. A child process starts JAX."""
    found = hardware.probe()
    if found.problem or found.kind == "cpu":
        return [found.problem] if found.problem else []
    answer = run_case("jaxtrain.node.train_step:try_start", {}, limit_s=START_S)
    if answer["verdict"] == OK:
        return []
    rule = f"JAX does not start on {found.count} x {found.name}: {answer['why']}"
    broken = [Problem("devices", None, rule, f"Run ./run.sh preflight to check the node, or {WITHOUT_GPUS}.")]
    return [Problem(**fields) for fields in answer.get("problems", ())] or broken


def try_start(request: dict[str, Any]) -> dict[str, Any]:
    """Start JAX on this machine's devices, with little GPU memory. This is a case (child.py). request: not used."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    start_jax(hardware.probe())
    return {"verdict": OK}


def find_problems(loaded: Loaded, count: int) -> list[Problem]:
    """Return the problems of a case: its config on `count` devices, its data, and environment variables refused by training."""
    devices, found = devices_for(count), list(loaded.problems)
    if not loaded.file_read:
        return found
    if count > devices.count and not devices.problem:
        found.append(Problem("--devices", count, f"this machine has {devices.count}", "Ask for fewer, or leave it out."))
    found += validate_step(loaded.run, devices)
    run = loaded.run
    found += pipeline.check(run.data, run.model.vocab_size, False, run.loss, bool(run.init.from_))
    return found + environment.overlay(loaded.run, devices, os.environ)[1]


def one_device(cache: str | None = None) -> RunConfig:
    """Return the default config on one device. cache: folder for compiled programs; None: the folder of the config."""
    run, _ = resolve(default_config())
    paths = run.paths if cache is None else dataclasses.replace(run.paths, cache=cache)
    return dataclasses.replace(run, mesh=Mesh(data=1, fsdp=1), paths=paths)


def start_devices(run: RunConfig, count: int) -> list[Any]:
    """Start JAX as a training run does, with its environment and compile cache. Return the first `count` devices.

    Raises ConfigError if no device can be used, as with CUDA_VISIBLE_DEVICES=MIG-...
    """
    found = devices_for(count)
    if found.problem:
        raise ConfigError([found.problem])
    if found.kind == "cpu" and hardware.probe().count < found.count:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(found.count)
    set_environment(environment.overlay(run, found, os.environ)[0])
    start_jax(found)
    set_compile_cache(run.paths.cache)
    import jax

    return jax.devices()[: found.count]


# ---- The measurement


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Compile and time the train step of a config. This is a case (child.py).

    Args:
      request: `argv`, config file and overrides; `devices`, their number, 0 for all; `warmup` and `steps`, numbers of steps;
        `limit_s`, seconds after which no step begins once MIN_STEPS are timed (null: no limit); `trace`, a folder for a trace
        of further steps ("": no trace).

    Returns:
      `verdict`, facts of the run and its layout, `step_s` (median, quartiles, extremes, in seconds), rates and `memory`.
      `planned` is the plan of this executable, or None for the reason in `not_planned`. `trace` is the folder of the trace, or
      the reason why it failed. The times are returned even if the plan or the trace fails.
    """
    began = time.perf_counter()
    loaded = loading.load(request["argv"])
    if wrong := find_problems(loaded, request["devices"]):
        return {"verdict": REFUSED, "why": "; ".join(dict.fromkeys(map(str, wrong)))}
    run, there = loaded.run, devices_for(request["devices"])
    parts = ("params", "moments") if run.optimizer.offload == "none" else ("params",)
    if there.kind == "gpu" and (least := least_gib(run, parts) / there.count) > there.memory_gib:
        rule = f"parameters and moments alone take {least:.1f} GiB per device, which has {there.memory_gib:.1f}"
        return {"verdict": NO_MEMORY, "why": rule}
    devices = start_devices(run, request["devices"])
    import jax

    out: dict[str, Any] = {}  # filled step by step: if memory runs out, the results so far are kept
    try:
        _measure(run, devices, request, out, began)
    except ConfigError as error:
        return out | {"verdict": REFUSED, "why": str(error)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return out | {"verdict": NO_MEMORY, "why": str(error).splitlines()[0][:200]}
    return out


def _measure(run: RunConfig, devices: Sequence[Any], request: dict[str, Any], out: dict[str, Any], began: float) -> None:
    import jax

    from jaxtrain.config.schema import config_sha256
    from jaxtrain.metrics import throughput
    from jaxtrain.runtime.provenance import device_facts
    from jaxtrain.step import auto_remat, state
    from jaxtrain.step.memory import taken_gib
    from jaxtrain.step.model_flops import model_flops
    from jaxtrain.train.batch_feed import BatchFeed
    from jaxtrain.train.parity import compile_step, open_rows

    digest, auto = config_sha256(dataclasses.asdict(run)), run.remat.policy == "auto"
    rows = open_rows(run)
    compiling = time.perf_counter()
    traced = bool(request.get("trace"))
    program, train, options = compile_step(pipeline.with_documents(run, rows), devices, print, traced)
    run = program.run
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    # XLA's CPU compiler counts memory differently, so there is no figure for CPUs.
    allocated = taken_gib(train) if devices[0].platform == "gpu" else None
    out |= {
        "mesh": dict(program.placement.mesh.shape),
        "attention": program.kernel.name,
        "attention_reason": program.kernel_reason,
        "precision": run.precision,
        "seq_len": run.data.seq_len,
        "packing": run.data.packing,
        "data": run.data.source,
        "global_batch": run.train.global_batch,
        "grad_accum": run.train.grad_accum,
        "remat": run.remat.policy,
        "remat_tensors": run.remat.tensors,
        "remat_auto": auto_remat.words(run.model, run.remat) if auto else "",
        "parameters": program.parameters,
        "config_sha256": digest,
        "devices": device_facts(devices),
        "compile_s": time.perf_counter() - compiling,
        "compiler_options": options,
        "memory": {"peak_gib": None, "compiled_gib": allocated, "budget_gib": limit / 2**30 if limit else None},
    }
    if limit and allocated and allocated > limit / 2**30:
        rule = f"the step takes {allocated:.1f} GiB a device, and {limit / 2**30:.1f} GiB are there"
        out |= {"verdict": NO_MEMORY, "why": rule}
        return

    current = state.create_state(program.definition, program.tx, program.state, run.train.seed, program.trained)
    feed = BatchFeed(rows, 0, program.batch, program.context)
    batches = feed.batches()
    marks, losses, waits, waiting = [], [], [], None
    warmup, steps, limit_s = request["warmup"], request["steps"], request["limit_s"]
    try:
        # A step is done when its metrics have arrived. The next step is dispatched before that, as in training.
        while len(marks) < warmup + steps:
            asked = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - asked)
            current, values = train(current, batch)
            if waiting is not None:
                losses.append(float(waiting["loss"]))
                marks.append(time.perf_counter())
            waiting = values
            if limit_s and time.perf_counter() - began > limit_s and len(marks) >= warmup + MIN_STEPS:
                break
        jax.block_until_ready(current)
        seconds = [b - a for a, b in itertools.pairwise(marks[warmup - 1 :])]
        out["memory"]["peak_gib"] = throughput.memory(devices)[1]
        out |= {
            "verdict": OK,
            "steps": len(seconds),
            "warmup": warmup,
            "step_s": spread(seconds),
            "data_wait_s": statistics.median(waits[warmup:]),
            "loss": {"first": losses[0], "last": losses[-1]},
            "planned": None,
            "not_planned": "the plan was not done",
            "trace": NOT_DONE if traced else "",
        }
        kind = devices[0].device_kind if devices[0].platform == "gpu" else ""
        out |= rates(
            model_flops(run),
            run.tokens_per_step,
            len(devices),
            out["step_s"]["median"],
            peak_tflops(run.log, run.compute, kind),
        )
        if not all(map(math.isfinite, losses)):
            out |= {"verdict": FAILED, "why": f"a loss is not finite: {losses}", "loss": None}
        save_partial(request, out)
        out |= _plan(program, train, devices)
        save_partial(request, out)
        if traced:
            out["trace"] = folder = request["trace"]
            try:
                _trace(Path(folder), program, train, current, batches, out["step_s"]["median"])
            except Exception as error:  # the timings are returned even if the profiler fails
                traceback.print_exc()
                out["trace"] = f"failed: {error_line(error)}"
    finally:
        feed.close()


def _plan(program: Any, executable: Any, devices: Sequence[Any]) -> dict[str, Any]:
    """Return {"planned": plan of this executable or None, "not_planned": reason for None}."""
    from jaxtrain.plan.expect import expect

    gpu, planned, why = hardware.lookup(devices[0].device_kind), None, ""
    if devices[0].platform != "gpu":
        why = "plans are made for GPUs"
    elif gpu is None:
        why = f"{devices[0].device_kind!r} is not in the table of GPUs (jaxtrain/config/hardware.py)"
    else:
        try:
            planned = dataclasses.asdict(expect(program, executable, gpu, len(devices)))
        except Exception as error:  # the timings are returned even if the plan fails
            traceback.print_exc()
            why = error_line(error)
    return {"planned": planned, "not_planned": why}


def _trace(folder: Path, program: Any, train: Any, current: Any, batches: Iterator[Any], step_s: float) -> None:
    """Trace TRACED_STEPS further steps. Write the trace to a folder with the files of a run, for `jaxtrain profile`.

    step_s: the step time without the profiler.
    """
    import jax

    from jaxtrain.config import schema
    from jaxtrain.metrics import files, profiling, table
    from jaxtrain.metrics.receipt import Receipt
    from jaxtrain.runtime.provenance import device_facts

    mesh = program.placement.mesh
    receipt = Receipt(folder)
    receipt.start({"devices": device_facts(mesh.devices.flat), "mesh": dict(mesh.shape), "attention": program.kernel.name})
    files.write_atomic(folder / "config.json", json.dumps(schema.to_dict(program.run), indent=1) + "\n")
    with files.Writers(folder) as writers:
        writers.train(**dict.fromkeys(table.required()) | {"step": 1, "step_time_s": step_s})
    tracer = profiling.Tracer(
        dataclasses.replace(program.run.profile, start=1, steps=TRACED_STEPS), folder, print, program=train
    )
    values = None
    try:
        for number in range(1, TRACED_STEPS + 1):
            tracer.before_step(number)
            current, values = train(current, next(batches))
            tracer.after_step(number, values)
    finally:
        tracer.close(jax.block_until_ready(values))
    receipt.finish(0, "traced")


def peak_tflops(log: Log, compute: str, device_kind: str) -> float | None:
    """Return the dense peak in TFLOP/s of a device for MFU, as in training; None for an unknown device.

    The peak is `log.peak_tflops` if set, else the peak in the dtype of activations. In an fp8 run that dtype is bfloat16.
    """
    gpu = hardware.lookup(device_kind)
    return log.peak_tflops or (gpu.peak(compute) if gpu else None)


def rates(model: "ModelFlops", tokens: int, count: int, step_s: float, peak: float | None) -> dict[str, Any]:
    """Return tokens/s, TFLOP/s, MFU and HFU of a step of `tokens` tokens that takes `step_s` seconds on `count` devices."""
    per_token, recomputed = model.training, model.recomputed
    tokens_per_s = tokens / step_s
    each = tokens_per_s / count
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": each,
        "tflops_per_device": each * per_token.causal / 1e12,
        "peak_tflops": peak,
        "mfu_causal": flops.mfu(per_token.causal, each, peak),
        "mfu_full": flops.mfu(per_token.full, each, peak),
        "hfu": flops.mfu((per_token + recomputed).causal, each, peak) if recomputed else None,
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles and extremes of times in seconds."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(seconds), "max": max(seconds)}


# ---- One config, or a sweep

FORM = "key=value,value;key=value,..., as remat.policy=full,none;mesh.fsdp=4,8"


def combinations(sweep: str) -> tuple[list[tuple[str, ...]], list[Problem]]:
    """Return every combination of --sweep as overrides "key=value", and the problems of malformed or repeated keys.

    A value may contain commas if NAME= follows each comma, as in remat.tensors.
    """
    axes: dict[str, list[str]] = {}
    found = []
    for part in sweep.split(";"):
        key, given, values = part.strip().partition("=")
        chosen = [v.strip() for v in re.split(r",(?!\w+=)", values)]
        if not given or not re.fullmatch(r"\w+(\.\w+)+", key) or not all(chosen):
            found.append(Problem("--sweep", part.strip(), "is no key with its values", f"Write {FORM}."))
        elif key in axes:
            found.append(Problem("--sweep", key, "given twice", "Give all of its values at once."))
        else:
            axes[key] = [f"{key}={value}" for value in chosen]
    return list(itertools.product(*axes.values())), found


def make_cases(base: Sequence[str], name: str, sweep: str) -> tuple[dict[str, list[str]], list[Problem]]:
    """Return (case -> command line, problems of the sweep). Without a sweep, the one case is `base`, with the name `name`."""
    if not sweep:
        return {name: [*base]}, []
    found, wrong = combinations(sweep)
    return {" ".join(over): [*base, *(f"--config.{o}" for o in over)] for over in found}, wrong


def refusals(cases: Mapping[str, Sequence[str]], count: int) -> dict[str, list[Problem]]:
    """Return case -> its problems on `count` devices, for each case with problems."""
    wrong = {name: find_problems(loading.load(argv), count) for name, argv in cases.items()}
    return {name: problems for name, problems in wrong.items() if problems}


def run_cases(
    cases: Mapping[str, list[str]],
    refused: Mapping[str, Sequence[Problem]],
    request: Mapping[str, Any],
    folder: bench.Folder,
    console: rich.console.Console,
) -> int:
    """Measure the cases one after the other. Return 0, or 1 if no case could be measured.

    KeyboardInterrupt passes through after the results so far are printed and written.
    """
    done: dict[str, dict[str, Any]] = {}
    try:
        for i, (name, argv) in enumerate(cases.items(), 1):
            with console.status(f"{i} of {len(cases)}: {name} ..."):
                if name in refused:
                    answer = {"verdict": REFUSED, "why": "; ".join(dict.fromkeys(map(str, refused[name])))}
                else:
                    trace = folder.trace(name) if request["trace"] else ""
                    answer = run_case(CASE, {**request, "argv": argv, "trace": trace}, log=folder.log(name))
            done[name] = answer | {"argv": argv}
            if len(cases) > 1:
                bench.print_line(console, f"{i} of {len(cases)}: {name}: {bench.step_result(answer)}")
            lines = bench.markdown(bench.step_table("Train steps", done))
            if len(cases) == 1:
                lines += bench.markdown(bench.step_details(name, answer))
            folder.write("Step time", lines, cases=[{"name": n, **r} for n, r in done.items()], best=best_case(done))
    finally:
        winner = best_case(done)
        if len(cases) == 1 and done:
            bench.print_table(console, bench.step_details(*next(iter(done.items()))))
        elif done:
            bench.print_table(console, bench.step_table("Train steps", done))
            fastest = f"best: {winner}, {done[winner]['tokens_per_s']:,.0f} tokens/s" if winner else "no case was measured"
            bench.print_line(console, fastest, "bold")
        folder.print_cpu_note(console)
    return 0 if winner else 1


def best_case(done: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the name of the case with the most tokens/s; None if no case was measured."""
    measured = {name: r["tokens_per_s"] for name, r in done.items() if r["verdict"] == OK}
    return max(measured, key=measured.__getitem__) if measured else None
