"""Check pipeline stages: layers, microbatches, and saved activations."""

from collections.abc import Iterable

from jaxtrain.config.context import Context
from jaxtrain.config.layout import arrange
from jaxtrain.config.schema import FIT, GLOBAL, LOCAL, Problem, RunConfig
from jaxtrain.models.activations import parse_tensors


def check_pipeline(run: RunConfig, stages: int, bad: set[str]) -> Iterable[Problem]:
    """Yield the problems of a pipeline.

    stages: mesh.stage. bad: keys that have an invalid value.
    """
    p = run.pipeline
    if not bad & {"pipeline.schedule", "pipeline.groups"}:
        yield from _schedule(run)
    if stages == 1:
        return
    several = p.groups > 1 and p.schedule == "interleaved"
    if several and "train.grad_accum" not in bad and run.train.grad_accum % stages:
        rule = f"microbatches go through the groups of a stage in runs of mesh.stage = {stages}, of which it is no multiple"
        yield Problem("train.grad_accum", run.train.grad_accum, rule, f"{FIT}set pipeline.schedule to 1f1b.")
    if run.train.accumulate == "layer":
        rule = f"a pipeline (mesh.stage = {stages}) has its own accumulation of gradients"
        yield Problem("train.accumulate", "layer", rule, "Set auto.")
    if run.optimizer.offload == "moments":
        rule = f"streams moments layer by layer, which mesh.stage = {stages} does not support"
        yield Problem("optimizer.offload", "moments", rule, "Set none; dtypes.m and dtypes.v make moments smaller.")
    if run.remat.policy == "custom" and "offload" in parse_tensors(run.remat.tensors)[0].values():
        rule = f"saved activations of a pipeline (mesh.stage = {stages}) stay on the device"
        yield Problem("remat.tensors", run.remat.tensors, rule, "Write keep or recompute for offload.")
    if not bad & {"model.num_layers", "pipeline.schedule", "pipeline.groups"}:
        yield from _layers(run, stages, bad)


def check_kinds(run: RunConfig, stages: int, context: Context, whole: bool, bad: set[str]) -> Iterable[Problem]:
    """Yield a problem if stages would run layers of different kinds at once, with keys sent or gathered over a ring.

    The kinds are sliding window and full attention. All stages run one program, in which a layer's kind chooses one of several
    branches. The branches have different collectives along the seq axis, and a ring's collective waits for all devices: stages
    in different branches would deadlock. An all-to-all waits only for its own group, which is within one stage. So with Ulysses
    and no ring, stages may run different kinds.

    stages: mesh.stage. context: sharding over the seq axis. whole: Ulysses supports all ranks of the seq axis in one group.
    bad: keys that have an invalid value.
    """
    own = {"model.num_layers", "model.sliding_window", "pipeline.schedule", "pipeline.groups"}
    letters = set(run.model.attention_pattern) - {LOCAL, GLOBAL}
    lying = None if bad & own or letters or context.ring == 1 else arrange(run.model.stacked_layers, run.pipeline, stages)
    if lying is None or run.model.stacked_layers < lying.stages * lying.groups:
        return
    kinds, first = run.model.kinds, run.model.kinds[0]
    # An empty slot runs as a layer of the first kind.
    places = "".join(first if layer is None else kinds[layer] for layer in lying.order)
    groups = [places[i : i + lying.per_group] for i in range(0, len(places), lying.per_group)]
    other = next((group for group in groups if group != groups[0]), None)
    if other is None:
        return
    rule = f"stages would deadlock: some run layers {groups[0]} while others run {other}"
    rule += f" (l: sliding window, g: all tokens), which have different collectives over mesh.seq = {context.size}"
    remedy = "Set parallel.context=ulysses." if whole else f"Set mesh.stage=1 and mesh.seq={stages * context.size}."
    yield Problem("mesh.stage", stages, rule, remedy)


def _schedule(run: RunConfig) -> Iterable[Problem]:
    p = run.pipeline
    if p.schedule == "interleaved" and p.groups < 2:
        rule = "needs several groups of layers on each stage, and pipeline.groups = 1"
        yield Problem("pipeline.schedule", p.schedule, rule, "Set pipeline.groups to 2 or more, or 1f1b.")
    if p.schedule != "interleaved" and p.groups > 1:
        rule = f"is read only with pipeline.schedule = interleaved, which is {p.schedule}"
        yield Problem("pipeline.groups", p.groups, rule, "Set pipeline.schedule to interleaved, or this to 1.")


def _layers(run: RunConfig, stages: int, bad: set[str]) -> Iterable[Problem]:
    lying = arrange(run.model.stacked_layers, run.pipeline, stages)
    count = lying.stages * lying.groups
    of = f"mesh.stage = {stages}" + (f" x pipeline.groups = {lying.groups}" if lying.groups > 1 else "")
    if run.model.stacked_layers < count:
        rule = f"some of the {count} groups of layers ({of}) would be empty"
        yield Problem(
            "model.num_layers",
            run.model.num_layers,
            rule,
            f"{FIT}set a smaller mesh.stage.",
        )
    elif "remat.every" not in bad and run.remat.policy != "none" and lying.per_group % run.remat.every:
        rule = f"does not divide the {lying.per_group} layers that a stage runs at a time ({of})"
        yield Problem("remat.every", run.remat.every, rule, FIT)
