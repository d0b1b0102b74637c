"""Write the summary of a run to the log, before anything is allocated."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.config.counts import short_count
from jaxtrain.config.durations import duration
from jaxtrain.config.schema import RunConfig
from jaxtrain.data import text_format
from jaxtrain.data.opening import epochs_in_words
from jaxtrain.metrics import samples
from jaxtrain.metrics.progress import Console
from jaxtrain.models import flops
from jaxtrain.models.module import select_leaves
from jaxtrain.sharding import large_replicated_arrays
from jaxtrain.step import state
from jaxtrain.step.stages import IDLE, schedule_of
from jaxtrain.train.setup import Setup

MANY = 5  # epochs of conversations or pairs; above them the run warns
LOST = 0.05  # fraction of the tokens of conversations: if more are lost, the run warns


def print_summary(setup: Setup, console: Console) -> None:
    """Write batch, model, mesh, data and the checkpoint to resume from to the log and the terminal."""
    program, start, data, held_out = setup.program, setup.start, setup.data, setup.held_out
    directory = setup.checkpoints.directory
    run = program.run
    mesh, say = program.placement.mesh, console.say
    shards = program.placement.size(program.placement.mesh_axes("batch"))
    devices = pluralize(mesh.size, "device") if shards == mesh.size else f"{shards} shards of {mesh.size} devices"
    each = run.train.global_batch // run.train.grad_accum // shards
    ramp, steps = run.ramp, run.train.steps
    epochs = data.epoch(ramp.before(steps) // ramp.unit)
    in_words = epochs_in_words(epochs)
    say(
        f"global batch {run.train.global_batch} = {devices} x {each} x {pluralize(run.train.grad_accum, 'microbatch')}; "
        f"{short_count(run.train.global_batch * run.data.seq_len)} tokens a step; this run is {in_words} of the data"
    )
    if ramp.phases:
        sizes = ", ".join(f"{size} sequences until step {until}" for size, until in ramp.phases)
        never = "" if ramp.end < steps else f" (train.steps={steps}: the later sizes are not reached)"
        say(f"batch ramp: {sizes}, then {ramp.full}{never}")
    if getattr(data, "answers", False) and epochs > MANY:  # a user's own source may lack it
        console.warn(f"{in_words} of conversations or pairs: a model learns them by heart in a few. Fix: train.epochs=3")
    parameters = short_count(program.parameters)
    active_text = f" ({short_count(flops.active_parameters(run.model))} active in a token)" if run.model.num_experts else ""
    num_trained = sum(math.prod(a.shape) for a in jax.tree.leaves(select_leaves(program.state.params, program.trained)))
    if program.adapters:
        stored = "" if run.lora.base == "bf16" else f" of a base in {run.lora.base}"
        adapters = f"adapters of {short_count(num_trained)} on {run.lora.targets}{stored}"
        parameters = f"{parameters} parameters{active_text}, and {adapters}, the only trained parameters"
    else:
        everything = all(jax.tree.leaves(program.trained))
        parameters += f" parameters{active_text}" + ("" if everything else f", of which {short_count(num_trained)} are trained")
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    say(
        f"model: {parameters}; mesh: {shape}; attention: {program.kernel.name} ({program.kernel_reason})"
        + (f"; each sequence over {program.context.size} devices: {program.context}" if program.context.size > 1 else "")
    )
    if layers := program.state.layers:
        bubble, per_stage = schedule_of(program.layout).bubble, len(layers.order) // layers.stages
        stages = [sum(i is not None for i in layers.order[s * per_stage : (s + 1) * per_stage]) for s in range(layers.stages)]
        say(
            f"pipeline: {run.pipeline.schedule}, {' | '.join(map(str, stages))} layers; stages are idle for "
            f"{bubble:.0%} of a step" + (": a higher train.grad_accum reduces it" if bubble > IDLE else "")
        )
    if data.synthetic:
        say("data: synthetic. Its loss is not that of language.")
    if data.masked_fraction:
        say(
            f"data: {data.masked_fraction:.2%} of tokens come after more than data.max_segments="
            f"{run.data.max_segments} documents in their sequence and are masked"
        )
    conversations, lost, count = getattr(data, "truncated", (0, 0, 0))  # a user's own source may leave it out
    if conversations:
        tell = console.warn if lost > LOST * count else say
        tell(
            f"data: {pluralize(conversations, 'conversation')} of more than data.seq_len={run.data.seq_len} + 1 tokens "
            f"{'loses' if conversations == 1 else 'lose'} {lost:,} of all {count:,} tokens ({lost / count:.1%}). "
            "A higher data.seq_len keeps them."
        )
    for name, batches in {"data": data, **{f"held-out {k}".strip(): x for k, x in held_out.items()}}.items():
        if left_out := getattr(batches, "left_out", 0):
            say(
                f"{name}: {pluralize(left_out, 'pair')} of more than data.seq_len={run.data.seq_len} + 1 tokens "
                f"{'is' if left_out == 1 else 'are'} left out. A higher data.seq_len includes them."
            )
    for name, batches in held_out.items():
        distinct = getattr(batches, "distinct", None)
        if distinct and (n := distinct(run.eval.sequences)) < run.eval.sequences:
            text = f"{pluralize(n, 'different sequence')}, fewer than eval.sequences={run.eval.sequences}; each counts once"
            say(f"{f'held-out {name}'.strip()}: {text}")
    for name, filled in getattr(data, "sparse", {}).items():
        say(
            f"data: rows of {name} are {filled:.0%} full, since each holds at most data.max_segments={run.data.max_segments} "
            "documents. A higher number fills them."
        )
    # Under ZeRO-0 all arrays are replicated, as the user asked.
    for name in large_replicated_arrays(state.abstract_tensors(program.state)) if run.sharding.zero else ():
        console.warn(f"not split over any device, every one holds all of it: {name}. See sharding.rules.")
    for at, why in start.damaged.items():
        console.warn(f"checkpoint {at} is passed over: {why}")
    if start.resumed:
        say(f"resuming from step {start.step} in {directory}")
    for note in start.notes:
        say(f"  changed: {note}")
    if start.resumed and (renewed := other_contents(start.data["fingerprint"], data.fingerprint)):
        console.warn(
            f"the data is not what the checkpoint was trained on so far: other contents or rows in {', '.join(renewed)}"
        )
    if not setup.user_run.data.max_segments and run.data.masks_documents:
        say(f"data: up to {run.data.max_segments} documents in a sequence")
    for prompt in samples.split_prompts(run.sample.prompt) if setup.tokenizer else ():
        if note := text_format.note_control_tokens(prompt, setup.tokenizer, "sample.prompt"):
            console.warn(note)
    if other_templates := getattr(data, "templates", ()):
        template_names = " and ".join([setup.text.template_name, *other_templates])
        console.warn(f"data: written with several chat templates, {template_names}. Samples and exports have the first")


def other_contents(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of data files whose contents or packed rows differ between two fingerprints of the data.

    Files that only one of the two fingerprints names are ignored.
    """
    was, now_is = (
        {file["name"]: (file["content_sha256"], file.get("rows")) for file in each.get("files") or ()} for each in (before, now)
    )
    return [name for name, contents in now_is.items() if was.get(name, contents) != contents]


def pluralize(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural unless it is 1: '1 device', '8 devices', '64 microbatches'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def slow_start(run: RunConfig, done: int, evaluates: bool, seconds: float, limit_s: float) -> str:
    """Return a line on a run whose first step is not done after so many seconds, with the settings that would change it.

    Args:
      done: steps before it. evaluates: whether an evaluation precedes it.
      limit_s: the watchdog's budget for the step; 0: none.
    """
    devices, size = jax.devices(), run.ramp.size(done)
    text = f"step {done + 1} is not done after {duration(seconds)}: {size * run.data.seq_len:,} tokens on {len(devices)} x "
    text += devices[0].device_kind + (", and an evaluation before it" if evaluates else "")
    if devices[0].platform == "cpu":
        batch = "train.batch_ramp" if run.ramp.phases else "train.global_batch"
        lower = [f"data.seq_len ({run.data.seq_len})", f"{batch} ({size})"]
        lower += [f"eval.sequences ({run.eval.sequences})"] if evaluates else []
        text += f". Lower values of {', '.join(lower)} take less time"
    if limit_s:
        text += f". After {duration(limit_s)} the watchdog takes it for a hang, and never with --config.train.timeouts=step=0"
    return text
