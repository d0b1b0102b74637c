"""Check an attempt before any file is written, and compile its steps before device memory is allocated."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import CheckpointError, Checkpoints
from jaxtrain.config import hardware, own_parts
from jaxtrain.config.durations import duration
from jaxtrain.config.launch import Launch
from jaxtrain.config.schema import Checkpoint, ConfigError, Problem, RunConfig, resolve, shared_settings
from jaxtrain.data import text_format
from jaxtrain.data.batches import resolve_max_segments
from jaxtrain.data.text_format import TextFormat
from jaxtrain.data.tokenizer import TokenizerError, load_tokenizer
from jaxtrain.hf.importing import open_origin
from jaxtrain.metrics import profiling, samples
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.plan.expect import Watch, expect
from jaxtrain.runtime.distributed import Peers
from jaxtrain.runtime.watchdog import parse_budgets
from jaxtrain.sharding import node_of
from jaxtrain.step import compiler
from jaxtrain.step.memory import (
    OutOfMemory,
    check_host_memory,
    compile_to_fit,
    explain_memory,
    format_gib,
    memory_by_class,
    taken_gib,
)
from jaxtrain.step.model_flops import model_flops
from jaxtrain.step.program import Program, build_program
from jaxtrain.step.state import eval_weights
from jaxtrain.train import generation
from jaxtrain.train.child import OK
from jaxtrain.train.initial_state import Start, choose_start, drop_used_step, import_named_parts, open_data
from jaxtrain.train.services import Services

REFUSALS = (CheckpointError, HuggingFaceError, TokenizerError, OSError)  # with a remedy


@dataclasses.dataclass(frozen=True)
class Setup:
    """Config, program, data and start of an attempt."""

    user_run: RunConfig  # the config as the user gave it
    workdir: Path
    launch: Launch
    program: Program
    options: compiler.XlaOptions  # XLA's
    checkpoints: Checkpoints
    start: Start
    data: Any  # training batches
    held_out: Mapping[str, Any]  # held-out batches by name
    tokenizer: Any  # for samples; None without
    text: TextFormat  # how texts of the model end, and its chat template
    positions: int  # longest sequence that the model, or one that it began from, was trained with

    @property
    def run(self) -> RunConfig:
        """Return the config with settings from the data, and from compiling (remat.policy=auto)."""
        return self.program.run

    def options_of(self, size: int) -> dict[str, str | bool]:
        """Return XLA's options for a train step of `size` sequences."""
        options = self.options.options
        return options if size == self.run.train.global_batch else compiler.options_for_size(options, size)


@dataclasses.dataclass(frozen=True)
class CompiledSteps:
    """The compiled train and evaluation steps, and the train step's memory: class -> GiB on one device."""

    program: Program  # of the train step: that of the run, or the same with a smaller batch (train.batch_ramp)
    train: Any
    eval: Any
    memory: dict[str, float]

    @property
    def size(self) -> int:
        """Return the sequences of a train step."""
        return self.program.run.train.global_batch


def open_checkpoints(settings: Checkpoint, workdir: Path, peers: Peers) -> Checkpoints:
    """Return the `Checkpoints` of the folder checkpoint.dir, by default of `checkpoints` in the run's folder."""
    return Checkpoints(
        settings.dir or workdir / "checkpoints", settings.keep, settings.keep_every, peers, keep_best=settings.keep_best
    )


def check_setup(run: RunConfig, workdir: Path, launch: Launch, checkpoints: Checkpoints, own_process: bool) -> Setup:
    """Open the data, choose the checkpoint to start from, and build the program. Writes nothing.

    Args: own_process: the watchdog may end this process.

    Raises ConfigError for a run that cannot start, with the problems of the first check that fails.
    """
    devices = jax.devices()
    shared_settings.cache_clear()  # what an earlier run of this process has read
    try:
        import_named_parts(run)
        run = drop_used_step(run, checkpoints)
        data, held_out = open_data(run)
        user_run, run = run, resolve_max_segments(run, data, *held_out.values())
        program = build_program(run, devices)
        model_flops(run)  # a family may state them wrongly
        options = compiler.choose_options(program, compiler.card_of(jax.local_devices()[0], run.train.memory_fraction))
        step_s = parse_budgets(run.train.timeouts)[0]["step"] if own_process else 0.0
        start = choose_start(user_run, checkpoints, program)
        traced = run.profile.start > 0 and start.step < run.profile.start + run.profile.steps
        on_gpus = devices[0].platform == "gpu"
        options = compiler.add_run_options(options, on_gpus, step_s, run.train.deterministic, workdir, traced)
        text = text_of_run(run.data.tokenizer, run.init.from_, data, checkpoints, start)
        positions = positions_of_run(run.data.seq_len, run.init.from_, checkpoints, start)
        # The tokenizer is read now: a missing or wrong tokenizer must not end the run at its first sample.
        tokenizer = None
        if run.sample.max_tokens and not data.synthetic:
            tokenizer, text = text_format.load_with_tokenizer(text, run.data.tokenizer)
        if tokenizer:
            generation.check_decodes(run.model.family, run.sample.max_tokens, program.definition)
        for prompt in samples.split_prompts(run.sample.prompt) if tokenizer else ():
            generation.prompt_ids(tokenizer, prompt, run.model.vocab_size)
    except Exception as error:
        if isinstance(error, ConfigError) or not (problem := refusal_of(error)):
            raise
        raise ConfigError([problem]) from error
    return Setup(user_run, workdir, launch, program, options, checkpoints, start, data, held_out, tokenizer, text, positions)


def text_of_run(spec: str, init_from: str, data: Any, checkpoints: Checkpoints, start: Start) -> TextFormat:
    """Return the text format of a run's checkpoints: of its data, its checkpoint or init.from, and its tokenizer's files.

    Raises CheckpointError, HuggingFaceError or TokenizerError if one of them cannot be read.
    """
    tokenizer = load_tokenizer(spec) if not data.synthetic and text_format.is_local(spec) else None
    tokenizer_text = text_format.read_text_format(spec) if tokenizer else TextFormat()
    data_text = getattr(data, "text", tokenizer_text)  # a user's own source may leave it out
    if start.resumed:
        before = TextFormat.from_record(checkpoints.meta(start.step)["text"])
    else:
        before = open_origin(init_from).text() if init_from else TextFormat()
    if data.synthetic:  # it teaches no end of a text
        return before if before.tokenizer_sha256 else data_text
    return text_format.merge_formats(data_text, tokenizer, before, tokenizer_text)


def positions_of_run(seq_len: int, init_from: str, checkpoints: Checkpoints, start: Start) -> int:
    """Return the longest sequence of this run, or of those that it began from: max_position_embeddings of an export."""
    if start.resumed:
        before = checkpoints.meta(start.step)["positions"]
    else:
        before = open_origin(init_from).positions if init_from else 0
    return max(before, seq_len)


def compile_steps(setup: Setup, services: Services) -> tuple[Setup, CompiledSteps]:
    """Compile the first train step and the evaluation step, and report the train step's memory by class.

    With train.batch_ramp, `resize_steps` compiles the steps of other sizes.

    Returns (setup, compiled steps). With remat.policy=auto, the returned setup has the choice of saved activations that fits.
    Raises OutOfMemory if the train step does not fit.
    """
    console, receipt = services.console, services.receipt
    if setup.options.why:
        console.say(f"XLA options: {setup.options.why}")
    for warning in setup.options.warnings():
        console.warn(warning)
    device = jax.local_devices()[0]
    if setup.run.train.deterministic:
        console.say(
            "deterministic: kernels with a fixed order of sums, no sums in switches, XLA's autotuning stored with the run. "
            "Its cost on this GPU is not measured: compare two runs"
            if device.platform == "gpu"
            else "deterministic: no settings needed, programs on CPUs are deterministic"
        )
    console.say("compiling the train step ...")
    began = time.perf_counter()
    program, train = compile_size(setup, setup.run.ramp.size(setup.start.step), console.say)
    if program.run.train.global_batch == setup.run.train.global_batch:
        setup = dataclasses.replace(setup, program=program)
    run, full_program = program.run, setup.program
    evaluation = None
    if run.eval.every_steps:
        evaluation = full_program.eval_step.lower(eval_weights(full_program.state), full_program.eval_batch).compile()
    seconds = time.perf_counter() - began
    memory = memory_by_class(program, train)
    by_class = ", ".join(f"{name} {format_gib(gib)}" for name, gib in memory.items())
    console.say(f"compiled in {duration(seconds)}; per device: {by_class}")
    options = compiler.remove_run_options(setup.options.options)  # the receipt has no options that differ in every run
    receipt.update(remat=dataclasses.asdict(run.remat), compile_s=seconds, memory_gib=memory, compiler_options=options)
    if run.profile.dump_hlo:
        profiling.dump_hlo(train, setup.workdir, console.say)
    compiled = CompiledSteps(program, train, evaluation, memory)
    check_memory(compiled)
    return setup, compiled


def compile_size(setup: Setup, size: int, say: Callable[[str], None]) -> tuple[Program, Any]:
    """Return (program, compiled train step) of a batch of `size` sequences; of remat.policy=auto, with a choice that fits."""
    program = setup.program
    if size != setup.run.train.global_batch:
        program = build_program(setup.run.with_batch_size(size), jax.devices())
    return compile_to_fit(program, setup.options_of(size), usable_gib(), say)


def resize_steps(setup: Setup, compiled: CompiledSteps, size: int, services: Services) -> CompiledSteps:
    """Return the steps with a train step of another size (train.batch_ramp). Raises OutOfMemory if it does not fit."""
    say = services.console.say
    say(f"compiling the train step of {size} sequences ...")
    began = time.perf_counter()
    program, train = compile_size(setup, size, say)
    say(f"compiled in {duration(time.perf_counter() - began)}")
    if program.run.profile.dump_hlo:
        profiling.dump_hlo(train, setup.workdir, say)
    steps = dataclasses.replace(compiled, program=program, train=train, memory=memory_by_class(program, train))
    check_memory(steps)
    services.receipt.update(remat=dataclasses.asdict(program.run.remat), memory_gib=steps.memory)
    return steps


def usable_gib() -> float:
    """Return the memory that JAX may allocate on a device of this process, in GiB; inf if unknown."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit / 2**30 if limit else math.inf


def check_memory(compiled: CompiledSteps) -> None:
    """Raise OutOfMemory if a compiled train step does not fit in the memory of a device, or of the host."""
    usable, allocated = usable_gib(), taken_gib(compiled.train)
    if allocated > usable:
        memory = compiled.memory | {"allocated memory": allocated}
        raise OutOfMemory(explain_memory(compiled.program.run, memory, f"the budget of {usable:.1f} GiB a device"))
    if jax.local_devices()[0].platform == "gpu":
        on_host = compiled.train.memory_analysis().host_temp_size_in_bytes
        check_host_memory(compiled.program, hardware.pinned_limit_gib(os.environ), on_host)


def expected_times(setup: Setup, compiled: CompiledSteps, services: Services) -> Watch | None:
    """Return the `Watch` that compares the run with the plan of its compiled step; None without a plan.

    There is no plan on CPUs, nor on GPUs that are not in hardware.py, nor of a smaller batch (train.batch_ramp). If a step
    cannot be planned, the reason is logged.
    """
    device = jax.local_devices()[0]
    gpu = hardware.lookup(device.device_kind) if device.platform == "gpu" else None
    if gpu is None or compiled.size < setup.run.train.global_batch:
        return None
    try:
        per_node = sum(node_of(d) == node_of(device) for d in jax.devices())
        watch = Watch(expect(compiled.program, compiled.train, gpu, per_node))
    except Exception as error:  # XLA's text may have a form that the plan does not know: no reason to end a run
        services.console.warn(f"no plan to compare this run with: {type(error).__name__}: {error}")
        return None
    services.receipt.update(**watch.record())  # the measured part follows at the end
    expected = watch.expected
    step = f"{expected.step_s:.3g} s a step"
    if expected.range_s:
        step = "{:.3g} to {:.3g} s a step expected, roofline".format(*expected.range_s) + f" {expected.step_s:.3g} s"
    services.console.say(f"planned: {step}, peak {format_gib(expected.peak_gib)} ({expected.rates})")
    return watch


def start_problems(run: RunConfig, workdir: Path) -> list[Problem]:
    """Return the first problems of `check_setup` that do not depend on the contents of the data. Reads and writes no data."""
    try:
        import_named_parts(run)
        checkpoints = open_checkpoints(run.checkpoint, workdir, Peers(0, 1))
        program = build_program(run, jax.devices())
        compiler.choose_options(program, compiler.card_of(jax.local_devices()[0], run.train.memory_fraction))
        choose_start(drop_used_step(run, checkpoints), checkpoints, program)
        if run.sample.max_tokens and run.data.source != "synthetic":
            generation.check_decodes(run.model.family, run.sample.max_tokens, program.definition)
            tokenizer = load_tokenizer(run.data.tokenizer)
            for prompt in samples.split_prompts(run.sample.prompt):
                generation.prompt_ids(tokenizer, prompt, run.model.vocab_size)
    except ConfigError as error:
        return error.problems
    except Exception as error:
        if problem := refusal_of(error):
            return [problem]
        raise
    return []


def refusal_of(error: Exception) -> Problem | None:
    """Return the problem of an error with a remedy, or of the user's own modules, which may raise anything; else None."""
    refused = Problem("cannot start", None, str(error).rstrip("."), "") if isinstance(error, REFUSALS) else None
    return own_parts.problem_of(error) or refused


def check_start(request: Mapping[str, Any]) -> dict[str, Any]:
    """Build the program of a config as its start would, abstractly: a case of child.run_case. Raises ConfigError.

    request: "config", "workdir", and "gpus": whether the devices are GPUs.
    """
    run, _ = resolve(request["config"])
    if request["gpus"]:  # kernels that these CPUs do not have
        attention, moe = dataclasses.replace(run.attention, impl="auto"), dataclasses.replace(run.moe, impl="auto")
        run = dataclasses.replace(run, attention=attention, moe=moe)
    if problems := start_problems(run, Path(request["workdir"])):
        raise ConfigError(problems)
    return {"verdict": OK}
