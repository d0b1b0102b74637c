"""Time train steps of a config with the program, compiler options, data path and loop order of training.

Step time is the time from the arrival of one step's metrics to the arrival of the next step's. Metrics are fetched one step
late, so step time is the device's time, or the host's time if that is longer. Memory is the allocator's peak in a process that
runs nothing else.
"""

import contextlib
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
from typing import Any

import rich.console

from jaxtrain.config import environment, hardware
from jaxtrain.config.hardware import WITHOUT_GPUS
from jaxtrain.config.launch import LoadedConfig
from jaxtrain.config.schema import ConfigError, Mesh, Problem, RunConfig, default_config, resolve
from jaxtrain.data import loading, opening
from jaxtrain.data.batches import resolve_max_segments
from jaxtrain.report import bench
from jaxtrain.runtime.startup import set_compile_cache, set_environment, start_jax
from jaxtrain.step.state_size import least_gib
from jaxtrain.step.validate import validate_step
from jaxtrain.train.child import FAILED, LATE, NO_MEMORY, OK, REFUSED, error_line, run_case, save_partial

CASE = "jaxtrain.node.train_step:measure"
NO_EVAL = ("--config.data.eval_source=", "--config.eval.every_steps=0")
DATA = {"synthetic": ("--config.data.source=synthetic", *NO_EVAL), "real": NO_EVAL}
TRACED_STEPS = 2
START_S = 120.0  # in which JAX starts on the GPUs of a node
NOT_DONE = "it was not done"  # a plan or a trace, if the case ended before it
MIN_STEPS = 3  # least timed steps before a time limit ends a case


# ---- Devices and configs


def devices_for(count: int) -> hardware.Devices:
    """Return the first `count` devices of this machine; 0: all. A CPU can have any number of devices."""
    devices = hardware.probe()
    if not count or devices.kind == "gpu":
        return dataclasses.replace(devices, count=min(count or devices.count, devices.count))
    return dataclasses.replace(devices, count=count, memory_gib=hardware.available_gib() / count)


def gpu_problems() -> list[Problem]:
    """Return the problem of GPUs that the driver reports and JAX cannot start. A child process starts JAX."""
    devices = hardware.probe()
    if devices.problem or devices.kind == "cpu":
        return [devices.problem] if devices.problem else []
    answer = run_case("jaxtrain.node.train_step:try_start", {}, limit_s=START_S)
    rule = f"JAX does not start on {devices.count} x {devices.name}: {answer.get('why')}"
    broken = [Problem("devices", None, rule, f"Run ./run.sh preflight to check the node, or {WITHOUT_GPUS}.")]
    return [] if answer["verdict"] == OK else [Problem(**fields) for fields in answer.get("problems", ())] or broken


def try_start(_: dict[str, Any]) -> dict[str, Any]:
    """Start JAX on this machine's devices, with little GPU memory. This is a case (child.py)."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    start_jax(hardware.probe())
    return {"verdict": OK}


def find_problems(loaded: LoadedConfig, count: int) -> list[Problem]:
    """Return the problems of a case: its config on `count` devices, its data, and environment variables refused by training."""
    devices, problems, run = devices_for(count), list(loaded.problems), loaded.run
    if not loaded.file_read:
        return problems
    if count > devices.count and not devices.problem:
        problems.append(Problem("--devices", count, f"this machine has {devices.count}", "Ask for fewer, or leave it out."))
    problems += validate_step(run, devices)
    problems += opening.check_data(run.data, run.model.vocab_size, False, run.loss, bool(run.init.from_))
    return problems + environment.overlay(run, devices, os.environ)[1]


def one_device(cache: str | None = None) -> RunConfig:
    """Return the default config on one device. cache: folder for compiled programs; None: the folder of the config."""
    run, _ = resolve(default_config())
    paths = run.paths if cache is None else dataclasses.replace(run.paths, cache=cache)
    return dataclasses.replace(run, mesh=Mesh(data=1, fsdp=1), paths=paths)


def start_devices(run: RunConfig, count: int) -> list[Any]:
    """Start JAX as a training run does, with its environment and compile cache. Return the first `count` devices.

    Raises ConfigError if no device can be used, as with CUDA_VISIBLE_DEVICES=MIG-...
    """
    devices = devices_for(count)
    if devices.problem:
        raise ConfigError([devices.problem])
    if devices.kind == "cpu" and hardware.probe().count < devices.count:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices.count)
    set_environment(environment.overlay(run, devices, os.environ)[0])
    start_jax(devices)
    set_compile_cache(run.paths.cache)
    import jax

    return jax.devices()[: devices.count]


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

    Raises ConfigError if the config has problems, and JaxRuntimeError if memory does not suffice.
    """
    began = time.perf_counter()
    loaded, count = loading.load_config(request["argv"]), request["devices"]
    if problems := find_problems(loaded, count):
        raise ConfigError(problems)
    run, available = loaded.run, devices_for(count)
    state_parts = ("params", "moments") if run.optimizer.offload == "none" else ("params",)
    if available.kind == "gpu" and (least := least_gib(run, state_parts) / available.count) > available.memory_gib:
        rule = f"parameters and moments alone take {least:.1f} GiB per device, which has {available.memory_gib:.1f}"
        return {"verdict": NO_MEMORY, "why": rule}
    devices = start_devices(run, count)
    import jax

    from jaxtrain.config.schema import config_sha256
    from jaxtrain.metrics import throughput
    from jaxtrain.metrics.receipt import device_facts
    from jaxtrain.step import auto_remat, state
    from jaxtrain.step.memory import taken_gib
    from jaxtrain.train import step_log
    from jaxtrain.train.batch_feed import BatchFeed
    from jaxtrain.train.parity import compile_step, open_rows

    digest, auto = config_sha256(dataclasses.asdict(run)), run.remat.policy == "auto"
    rows = open_rows(run)
    compiling = time.perf_counter()
    traced = bool(request.get("trace"))
    program, train, options = compile_step(resolve_max_segments(run, rows), devices, print, traced)
    run = program.run
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    # XLA's CPU compiler counts memory differently, so there is no figure for CPUs.
    allocated = taken_gib(train) if devices[0].platform == "gpu" else None
    out: dict[str, Any] = {
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
        "remat_auto": auto_remat.describe_choice(run.model, run.remat) if auto else "",
        "parameters": program.parameters,
        "config_sha256": digest,
        "devices": device_facts(devices),
        "compile_s": time.perf_counter() - compiling,
        "compiler_options": options,
        "memory": {"peak_gib": None, "compiled_gib": allocated, "budget_gib": limit / 2**30 if limit else None},
    }
    save_partial(request, out | {"verdict": LATE})
    if limit and allocated and allocated > limit / 2**30:  # training refuses it too
        rule = f"the step takes {allocated:.1f} GiB a device, and {limit / 2**30:.1f} GiB are there"
        return out | {"verdict": NO_MEMORY, "why": rule}
    current = state.create_state(program.definition, program.tx, program.state, run.train.seed, program.trained)
    marks, losses, waits, pending = [], [], [], None
    warmup, steps, limit_s = request["warmup"], request["steps"], request["limit_s"]
    with contextlib.closing(BatchFeed(rows, 0, program.batch, program.context)) as feed:
        batches = feed.batches()
        # A step is done when its metrics have arrived. The next step is dispatched before that, as in training.
        while len(marks) < warmup + steps:
            fetch_start = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - fetch_start)
            current, values = train(current, batch)
            if pending is not None:
                losses.append(float(pending["loss"]))
                marks.append(time.perf_counter())
            pending = values
            if limit_s and time.perf_counter() - began > limit_s and len(marks) >= warmup + MIN_STEPS:
                break
        jax.block_until_ready(current)
        seconds = [b - a for a, b in itertools.pairwise(marks[warmup - 1 :])]
        step_s, peak = spread(seconds), step_log.peak_tflops(run, devices[0].device_kind)
        out["memory"]["peak_gib"] = throughput.memory_gib(devices)[1]
        out |= {
            "verdict": OK,
            "steps": len(seconds),
            "warmup": warmup,
            "step_s": step_s,
            "data_wait_s": statistics.median(waits[warmup:]),
            "loss": {"first": losses[0], "last": losses[-1]},
            "planned": None,
            "not_planned": NOT_DONE,
            "trace": NOT_DONE if traced else "",
            "peak_tflops": peak,
            **step_log.rates_of(run, len(devices), peak).rates(step_s["median"]),
        }
        if not all(map(math.isfinite, losses)):
            out |= {"verdict": FAILED, "why": f"a loss is not finite: {losses}", "loss": None}
        save_partial(request, out)
        out |= _plan(program, train, devices)
        save_partial(request, out)
        if traced:
            out["trace"] = request["trace"]
            try:
                _trace(Path(request["trace"]), program, train, current, batches, step_s["median"])
            except Exception as error:  # the timings are returned even if the profiler fails
                traceback.print_exc()
                out["trace"] = f"failed: {error_line(error)}"
    return out


def _plan(program: Any, executable: Any, devices: Sequence[Any]) -> dict[str, Any]:
    """Return {"planned": plan of this executable or None, "not_planned": reason for None}."""
    from jaxtrain.plan.expect import expect

    kind = devices[0].device_kind
    gpu = hardware.lookup(kind)
    if gpu is None:
        return {"planned": None, "not_planned": f"plans are made for the GPUs of jaxtrain/config/hardware.py, not for {kind!r}"}
    try:
        return {"planned": dataclasses.asdict(expect(program, executable, gpu, len(devices))), "not_planned": ""}
    except Exception as error:  # the timings are returned even if the plan fails
        traceback.print_exc()
        return {"planned": None, "not_planned": error_line(error)}


def _trace(folder: Path, program: Any, train: Any, current: Any, batches: Iterator[Any], step_s: float) -> None:
    """Trace TRACED_STEPS further steps. Write the trace to a folder with the files of a run, for `jaxtrain profile`.

    step_s: the step time without the profiler.
    """
    from jaxtrain.config import schema
    from jaxtrain.metrics import files, profiling, table
    from jaxtrain.metrics.receipt import Receipt, device_facts

    mesh = program.placement.mesh
    receipt = Receipt(folder)
    receipt.start({"devices": device_facts(mesh.devices.flat), "mesh": dict(mesh.shape), "attention": program.kernel.name})
    files.write_atomic(folder / "config.json", json.dumps(schema.to_dict(program.run), indent=1) + "\n")
    with files.Writers(folder) as writers:
        writers.train(**dict.fromkeys(table.required_names()) | {"step": 1, "step_time_s": step_s})
    profile = dataclasses.replace(program.run.profile, start=1, steps=TRACED_STEPS)
    tracer = profiling.Tracer(profile, folder, print, program=train)
    try:
        for number in range(1, TRACED_STEPS + 1):
            tracer.before_step(number)
            current, values = train(current, next(batches))
            tracer.after_step(number, values)
    finally:
        tracer.close()
    receipt.finish(0, "traced")


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles and extremes of times in seconds."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(seconds), "max": max(seconds)}


# ---- One config, or a sweep

FORM = "key=value,value;key=value,..., as remat.policy=full,none;mesh.fsdp=4,8"


def make_cases(base: Sequence[str], name: str, sweep: str) -> tuple[dict[str, list[str]], list[Problem]]:
    """Return case -> command line for every combination of --sweep, and the problems of malformed or repeated keys.

    Without a sweep, the one case is `base`, with the name `name`. A value may contain commas if NAME= follows each comma, as in
    remat.tensors.
    """
    axes: dict[str, list[str]] = {}
    problems = []
    for axis_text in sweep.split(";") if sweep else ():
        key, separator, values = axis_text.strip().partition("=")
        choices = [v.strip() for v in re.split(r",(?!\w+=)", values)]
        if not separator or not re.fullmatch(r"\w+(\.\w+)+", key) or not all(choices):
            problems.append(Problem("--sweep", axis_text.strip(), "is no key with its values", f"Write {FORM}."))
        elif key in axes:
            problems.append(Problem("--sweep", key, "given twice", "Give all of its values at once."))
        else:
            axes[key] = [f"{key}={value}" for value in choices]
    combined = itertools.product(*axes.values())
    return {" ".join(over) or name: [*base, *(f"--config.{o}" for o in over)] for over in combined}, problems


def run_cases(
    cases: Mapping[str, list[str]],
    problems: Mapping[str, Sequence[Problem]],
    request: Mapping[str, Any],
    folder: bench.BenchFolder,
    console: rich.console.Console,
) -> int:
    """Measure the cases without problems one after the other. Return 0, or 1 if no case could be measured.

    KeyboardInterrupt passes through after the results so far are printed and written.
    """
    answers: dict[str, dict[str, Any]] = {}
    table, best = None, None
    try:
        for i, (name, argv) in enumerate(cases.items(), 1):
            if problems[name]:
                answer = {"verdict": REFUSED, "why": "; ".join(dict.fromkeys(map(str, problems[name])))}
            else:
                trace = str(folder.path / "traces" / bench.file_name(name)) if request["trace"] else ""
                with console.status(f"{i} of {len(cases)}: {name} ..."):
                    answer = run_case(CASE, {**request, "argv": argv, "trace": trace}, log=folder.log(name))
            answers[name] = answer | {"argv": argv}
            if len(cases) > 1:
                bench.print_line(console, f"{i} of {len(cases)}: {name}: {bench.step_result(answer)}")
            table = bench.step_table("Train steps", answers)
            best = max(
                (n for n in answers if answers[n]["verdict"] == OK), key=lambda n: answers[n]["tokens_per_s"], default=None
            )
            rows = [{"name": n, **r} for n, r in answers.items()]
            folder.write("Step time", bench.markdown(table), cases=rows, best=best)
    finally:
        if table:
            bench.print_table(console, table)
        if len(cases) > 1 and answers:
            fastest = f"best: {best}, {answers[best]['tokens_per_s']:,.0f} tokens/s" if best else "no case was measured"
            bench.print_line(console, fastest, "bold")
        folder.print_cpu_note(console)
    return 0 if best else 1
