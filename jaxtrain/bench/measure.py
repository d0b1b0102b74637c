"""Train steps, timed: the program, the compiler options, the data's way and the order of the loop are those of training.

time    from one step's metrics in hand to the next one's, metrics being fetched one step late; so a step's time is the
        device's, or the host's where that is slower
memory  the allocator's peak, of a process that did nothing else
"""

import dataclasses
import itertools
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import environment, flops, hardware, launch
from jaxtrain.bench.case import FAILED, NO_MEMORY, OK, REFUSED, keep
from jaxtrain.config import ConfigError, Problem, RunConfig
from jaxtrain.data import pipeline
from jaxtrain.launch import Loaded
from jaxtrain.startup import set_compile_cache, set_environment, start_jax
from jaxtrain.validate import validate_step

NO_EVAL = ("--config.data.eval_source=", "--config.eval.every_steps=0")
DATA = {"synthetic": ("--config.data.source=synthetic", *NO_EVAL), "real": NO_EVAL}
LEAST = 3  # timed steps of a case that has run out of time
TRACED = 2  # steps of a trace
BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 1.0}  # of a number; what blocks of int8 have besides is left out


def devices_for(count: int) -> hardware.Devices:
    """The first `count` devices of this machine, 0: all. On a CPU there can be as many as are asked for."""
    found = hardware.probe()
    if not count or found.kind == "gpu":
        return dataclasses.replace(found, count=min(count or found.count, found.count))
    return dataclasses.replace(found, count=count, memory_gib=hardware.available_gib() / count)


def problems(loaded: Loaded, count: int) -> list[Problem]:
    """What would refuse this case: the config on these devices, its data, and variables that contradict the memory budget."""
    devices = devices_for(count)
    found = list(loaded.problems)
    if not loaded.file_read:
        return found
    if count > devices.count and not devices.problem:
        found.append(Problem("--devices", count, f"this machine has {devices.count}", "Ask for fewer, or leave it out."))
    found += validate_step(loaded.run, devices)
    found += pipeline.check(loaded.run.data, loaded.run.model.vocab_size, need_eval=False)
    return found + environment.overlay(loaded.run, devices, os.environ)[1]


def state_gib(run: RunConfig, count: int) -> float:
    """GiB that each of `count` devices holds at least of a train step: parameters, and moments that do not rest on the host,
    split over all. No step of this config takes less, whatever it computes again."""
    known = {"adamw": ("m", "v"), "muon": ("m",)}  # Muon's rest, by AdamW, is left out
    moments = known.get(run.optimizer.name, ()) if run.optimizer.offload == "none" else ()
    each = sum(BYTES[getattr(run.dtypes, name)] for name in ("params", *moments))
    return flops.parameters(run.model)["total"] * each / count / 2**30


def open_rows(run: RunConfig) -> Any:
    """The rows that a config trains on."""
    folder = Path(run.paths.data).expanduser()
    return pipeline.open_source(run.data, run.data.source, split="train", global_batch=run.train.global_batch, data_dir=folder)


def start(run: RunConfig, count: int) -> list[Any]:
    """Starts JAX as a training run does, with its environment and compile cache, and returns the devices of the case.

    Raises ConfigError where there is no device to run on, as with CUDA_VISIBLE_DEVICES=MIG-...
    """
    found = devices_for(count)
    if found.problem:
        raise ConfigError([found.problem])
    if found.kind == "cpu" and hardware.probe().count < found.count:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(found.count)
    set_environment(environment.overlay(run, found, os.environ)[0])
    start_jax(found)
    set_compile_cache(run)
    import jax

    return jax.devices()[: found.count]


def compiled(program: Any, run: RunConfig) -> tuple[RunConfig, Any, Any, dict[str, Any]]:
    """(run and program with what remat.policy=auto came to, the train step as training compiles it, XLA's options for it)."""
    from jaxtrain.train import compiler
    from jaxtrain.train.memory import compile_to_fit

    device = program.placement.mesh.devices.flat[0]
    options = compiler.choose(program, compiler.card_of(device, run.train.memory_fraction)).options
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return *compile_to_fit(run, program, options, limit / 2**30 if limit else math.inf, print), options


def steps(ask: dict[str, Any]) -> dict[str, Any]:
    """Compiles and times the train step of a config.

    Args (keys of `ask`): `argv` config file and overrides; `devices` how many, 0 all; `warmup` and `steps`; `limit_s` after
    which no further step is begun, once LEAST are timed (null: none); `trace` a folder for a trace of further steps ("": none).

    Returns plain JSON: what was run, `step_s` (median, quartiles, extremes, in seconds), rates of it, memory, the plan of this
    very executable or why there is none (`not_planned`), and of a trace its folder or why there is none (`trace`). What fails
    after the timing does not undo it.
    """
    began = time.perf_counter()
    loaded = launch.load(ask["argv"])
    if wrong := problems(loaded, ask["devices"]):
        return {"verdict": REFUSED, "why": "; ".join(dict.fromkeys(map(str, wrong)))}
    run, there = loaded.run, devices_for(ask["devices"])
    if there.kind == "gpu" and (least := state_gib(run, there.count)) > there.memory_gib:
        rule = f"parameters and moments alone take {least:.1f} GiB a device, which has {there.memory_gib:.1f}"
        return {"verdict": NO_MEMORY, "why": rule}
    devices = start(run, ask["devices"])
    import jax

    from jaxtrain.kernels.attention import Unsupported
    from jaxtrain.sharding import LayoutError

    out: dict[str, Any] = {}
    try:
        _steps(run, devices, ask, out, began)
    except (ConfigError, LayoutError, Unsupported) as error:
        return out | {"verdict": REFUSED, "why": str(error)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return out | {"verdict": NO_MEMORY, "why": str(error).splitlines()[0][:200]}
    return out


def _steps(run: RunConfig, devices: Sequence[Any], ask: dict[str, Any], out: dict[str, Any], began: float) -> None:
    """Fills `out` as far as it gets: what was known when memory ran out is worth keeping."""
    import jax

    from jaxtrain import throughput
    from jaxtrain.receipt import config_sha256
    from jaxtrain.receipt.machine import device_facts
    from jaxtrain.train import auto_remat, state
    from jaxtrain.train.batch import place_batch
    from jaxtrain.train.memory import taken_gib
    from jaxtrain.train.program import build

    digest = config_sha256(dataclasses.asdict(run))
    rows = open_rows(run)
    run = pipeline.with_documents(run, rows)
    program = build(run, devices)
    compiling, auto = time.perf_counter(), run.remat.policy == "auto"
    run, program, train, options = compiled(program, run)
    out |= _facts(run, program) | {
        "remat_auto": auto_remat.words(run.remat) if auto else "",
        "config_sha256": digest,
        "devices": device_facts(devices),
        "compile_s": time.perf_counter() - compiling,
        "compiler_options": options,
    }
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    # XLA's CPU compiler counts other things than what a process takes.
    taken = taken_gib(train) if devices[0].platform == "gpu" else None
    out["memory"] = {"peak_gib": None, "compiled_gib": taken, "budget_gib": limit / 2**30 if limit else None}
    if limit and taken and taken > limit / 2**30:
        rule = f"the step takes {taken:.1f} GiB a device, and {limit / 2**30:.1f} GiB are there"
        out |= {"verdict": NO_MEMORY, "why": rule}
        return

    current = state.create_state(program.definition, program.tx, program.state, run.train.seed, program.trained)
    batches = pipeline.iterate(rows, 0, run.data.prefetch)
    marks, losses, waits, waiting = [], [], [], None
    warmup, wanted = ask["warmup"], ask["steps"]
    try:
        # A step is done when its metrics are here; one more is on its way by then, as in a long run.
        while len(marks) < warmup + wanted:
            asked = time.perf_counter()
            batch = place_batch(next(batches), program.batch, program.context)
            waits.append(time.perf_counter() - asked)
            current, values = train(current, batch)
            if waiting is not None:
                losses.append(float(waiting["loss"]))
                marks.append(time.perf_counter())
            waiting = values
            spent = time.perf_counter() - began
            if ask["limit_s"] and spent > ask["limit_s"] and len(marks) >= warmup + LEAST:
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
            "trace": "it was not done" if ask.get("trace") else "",
        }
        out |= rates(run, len(devices), statistics.median(seconds), peak_tflops(run, devices[0]))
        if not all(map(math.isfinite, losses)):
            out |= {"verdict": FAILED, "why": f"a loss is no number: {losses}", "loss": None}
        keep(ask, out)
        out |= _planned(run, program, train, devices)
        keep(ask, out)
        if ask.get("trace"):
            out["trace"] = _traced(ask["trace"], run, program, train, current, batches, statistics.median(seconds))
    finally:
        batches.close()


def _traced(folder: str, *args: Any) -> str:
    """`_trace`: the folder, or why there is none."""
    try:
        _trace(Path(folder), *args)
    except Exception as error:  # whatever the profiler breaks, the times stand
        traceback.print_exc()
        return f"failed: {words(error)}"
    return folder


def words(error: Exception) -> str:
    """An exception in a line; its traceback is in the log."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _trace(folder: Path, run: RunConfig, program: Any, train: Any, current: Any, batches: Iterator[Any], step_s: float) -> None:
    """A trace of TRACED further steps in a folder that is like a run's, so that what reads traces of runs reads it.

    step_s: what a step takes without the profiler.
    """
    import jax

    from jaxtrain import config, metrics, profiling
    from jaxtrain.receipt import Receipt
    from jaxtrain.receipt.machine import device_facts
    from jaxtrain.train.batch import place_batch

    mesh = program.placement.mesh
    receipt = Receipt(folder)
    receipt.start({"devices": device_facts(mesh.devices.flat), "mesh": dict(mesh.shape), "attention": program.kernel.name})
    metrics.write_atomic(folder / "config.json", json.dumps(config.to_dict(run), indent=1) + "\n")
    known = {name for name in metrics.TRAIN_KEYS if name not in ("kind", "time_unix")}
    with metrics.Writers(folder) as writers:
        writers.train(**dict.fromkeys(known) | {"step": 1, "step_time_s": step_s})
    tracer = profiling.Tracer(dataclasses.replace(run.profile, start=1, steps=TRACED), folder, print, program=train)
    values = None
    try:
        for number in range(1, TRACED + 1):
            tracer.before_step(number)
            current, values = train(current, place_batch(next(batches), program.batch, program.context))
            tracer.after_step(number, values)
    finally:
        tracer.close(jax.block_until_ready(values))
    receipt.finish(0, "traced")


def _facts(run: RunConfig, program: Any) -> dict[str, Any]:
    """What is run, in the words of its config."""
    return {
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
        "parameters": flops.parameters(run.model)["total"],
    }


def _planned(run: RunConfig, program: Any, executable: Any, devices: Sequence[Any]) -> dict[str, Any]:
    """The plan of this executable, or why there is none."""
    from jaxtrain.plan.expect import expect

    if devices[0].platform != "gpu":
        return {"planned": None, "not_planned": "plans are made for GPUs"}
    gpu = hardware.lookup(devices[0].device_kind)
    if gpu is None:
        return {"planned": None, "not_planned": f"nothing is known of {devices[0].device_kind!r} (jaxtrain/hardware.py)"}
    try:
        found = expect(run, program, executable, gpu, len(devices))
    except Exception as error:  # a plan that cannot be made takes nothing from what was measured
        traceback.print_exc()
        return {"planned": None, "not_planned": words(error)}
    return {"planned": dataclasses.asdict(found), "not_planned": ""}


def peak_tflops(run: RunConfig, device: Any) -> float | None:
    """Dense TFLOP/s that utilisation is taken of, as training takes it: as configured, else the table's for the type of
    activations, which is bfloat16 under fp8 too. None where neither tells."""
    if run.log.peak_tflops:
        return run.log.peak_tflops
    gpu = hardware.lookup(device.device_kind) if device.platform == "gpu" else None
    return gpu.peak(run.compute) if gpu else None


def rates(run: RunConfig, count: int, step_s: float, peak_tflops: float | None) -> dict[str, Any]:
    """Tokens per second and utilisations of a step that takes this long on `count` devices."""
    per_token = flops.training(run)
    hardware_flops = per_token + flops.beyond(run)
    tokens_per_s = run.train.global_batch * run.data.seq_len / step_s
    each = tokens_per_s / count
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": each,
        "tflops_per_device": each * per_token.causal / 1e12,
        "peak_tflops": peak_tflops,
        "mfu_causal": flops.mfu(per_token.causal, each, peak_tflops),
        "mfu_full": flops.mfu(per_token.full, each, peak_tflops),
        "hfu": flops.mfu(hardware_flops.causal, each, peak_tflops),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, lower and upper quartile, and extremes."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(seconds), "max": max(seconds)}
