"""Check pipeline stages: layers, microbatches, and saved activations."""

from collections.abc import Iterable

from jaxtrain.config.context import Context
from jaxtrain.config.layout import Arrangement
from jaxtrain.config.schema import FIT, GLOBAL, LOCAL, UNROTATED, Model, Optimizer, Pipeline, Problem, Remat, Train
from jaxtrain.models.activations import parse_tensors


def check_schedule(pipeline: Pipeline, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem if pipeline.schedule needs more groups. bad: keys that have an invalid value."""
    if pipeline.schedule == "interleaved" and pipeline.groups < 2 and not bad & {"pipeline.schedule", "pipeline.groups"}:
        rule = "needs several groups of layers on each stage, and pipeline.groups = 1"
        yield Problem("pipeline.schedule", pipeline.schedule, rule, "Set pipeline.groups to 2 or more, or 1f1b.")


def check_pipeline(
    model: Model, train: Train, optimizer: Optimizer, remat: Remat, layers: Arrangement, bad: set[str]
) -> Iterable[Problem]:
    """Yield the problems of a pipeline.

    layers: the arrangement of layers on stages. bad: keys that have an invalid value.
    """
    stages = layers.stages
    if layers.groups > 1 and "train.grad_accum" not in bad and train.grad_accum % stages:
        rule = f"microbatches go through the groups of a stage in runs of mesh.stage = {stages}, of which it is no multiple"
        yield Problem("train.grad_accum", train.grad_accum, rule, f"{FIT}set pipeline.schedule to 1f1b.")
    if train.accumulate == "layer":
        rule = f"a pipeline (mesh.stage = {stages}) has its own accumulation of gradients"
        yield Problem("train.accumulate", "layer", rule, "Set auto.")
    if optimizer.offload == "moments":
        rule = f"streams moments layer by layer, which mesh.stage = {stages} does not support"
        yield Problem("optimizer.offload", "moments", rule, "Set none; dtypes.m and dtypes.v make moments smaller.")
    if remat.policy == "custom" and "offload" in parse_tensors(remat.tensors)[0].values():
        rule = f"saved activations of a pipeline (mesh.stage = {stages}) stay on the device"
        yield Problem("remat.tensors", remat.tensors, rule, "Write keep or recompute for offload.")
    if not bad & {"model.num_layers", "pipeline.schedule", "pipeline.groups"}:
        yield from _layers(model, remat, layers, bad)


def check_kinds(model: Model, layers: Arrangement, context: Context, fits_ulysses: bool, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem if stages would run layers of different kinds at once, with keys sent or gathered over a ring.

    The kinds are sliding window and full attention. All stages run one program, in which a layer's kind chooses one of several
    branches. The branches have different collectives along the seq axis, and a ring's collective waits for all devices: stages
    in different branches would deadlock. An all-to-all waits only for its own group, which is within one stage. So with Ulysses
    and no ring, stages may run different kinds.

    layers: the arrangement of layers on stages. context: sharding over the seq axis. fits_ulysses: Ulysses supports all ranks
    of the seq axis in one group. bad: keys that have an invalid value.
    """
    layout_keys = {"model.num_layers", "model.sliding_window", "pipeline.schedule", "pipeline.groups"}
    letters = set(model.attention_pattern) - {LOCAL, GLOBAL, UNROTATED}
    if bad & layout_keys or letters or context.ring == 1 or model.stack_length < layers.stages * layers.groups:
        return
    kinds = model.kinds.replace(UNROTATED, GLOBAL)
    first = kinds[0]
    # An empty slot runs as a layer of the first kind.
    slot_kinds = "".join(first if layer is None else kinds[layer] for layer in layers.order)
    groups = [slot_kinds[i : i + layers.per_group] for i in range(0, len(slot_kinds), layers.per_group)]
    different = next((group for group in groups if group != groups[0]), None)
    if different is None:
        return
    rule = f"stages would deadlock: some run layers {groups[0]} while others run {different}"
    rule += f" (l: sliding window, g: all tokens), which have different collectives over mesh.seq = {context.size}"
    remedy = (
        "Set parallel.context=ulysses." if fits_ulysses else f"Set mesh.stage=1 and mesh.seq={layers.stages * context.size}."
    )
    yield Problem("mesh.stage", layers.stages, rule, remedy)


def _layers(model: Model, remat: Remat, layers: Arrangement, bad: set[str]) -> Iterable[Problem]:
    count = layers.stages * layers.groups
    groups_text = f"mesh.stage = {layers.stages}" + (f" x pipeline.groups = {layers.groups}" if layers.groups > 1 else "")
    if model.stack_length < count:
        rule = f"some of the {count} groups of layers ({groups_text}) would be empty"
        rule += f": a stage has whole periods of {model.attention_pattern}" if model.period > 1 else ""
        yield Problem("model.num_layers", model.num_layers, rule, f"{FIT}set a smaller mesh.stage.")
    elif "remat.every" not in bad and remat.policy != "none" and layers.per_group % remat.every:
        rule = f"does not divide the {layers.per_group} layers that a stage runs at a time ({groups_text})"
        yield Problem("remat.every", remat.every, rule, FIT)
