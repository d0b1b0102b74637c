"""What pipeline stages ask of layers, microbatches, and what layers keep for their backward pass."""

from collections.abc import Iterable, Mapping

from jaxtrain.activations import parse_tensors
from jaxtrain.config import EXCHANGE, Problem, RunConfig
from jaxtrain.stages import arrangement


def check_pipeline(run: RunConfig, stages: int, table: Mapping[str, list[str]], bad: set[str]) -> Iterable[Problem]:
    """stages: mesh.stage. table: mesh axes above 1 by the logical axis that they split. bad: keys wrong in themselves."""
    p = run.pipeline
    if not bad & {"pipeline.schedule", "pipeline.groups"}:
        yield from _schedule(run)
    if stages == 1:
        return
    if not table["layers"]:
        rule = f"leaves layers whole, and mesh.stage = {stages} splits nothing but layers"
        yield Problem("sharding.rules.layers", dict(run.sharding.rules)["layers"], rule, "Set stage, or mesh.stage to 1.")
    several = p.groups > 1 and p.schedule == "interleaved"
    if several and "train.grad_accum" not in bad and run.train.grad_accum % stages:
        rule = f"microbatches go through the groups of a stage in runs of mesh.stage = {stages}, of which it is no multiple"
        yield Problem(
            "train.grad_accum", run.train.grad_accum, rule, f"Set a multiple of {stages}, or pipeline.schedule to 1f1b."
        )
    if run.train.accumulate == "layer":
        rule = f"a pipeline (mesh.stage = {stages}) adds gradients up in a way of its own"
        yield Problem("train.accumulate", "layer", rule, "Set auto.")
    if run.optimizer.offload == "moments":
        rule = f"streams moments layer by layer, and with mesh.stage = {stages} each stage has another layer at a time"
        yield Problem("optimizer.offload", "moments", rule, "Set none; dtypes.m and dtypes.v make moments smaller.")
    if "offload" in parse_tensors(run.remat.tensors)[0].values():
        rule = f"what waits for its backward pass in a pipeline (mesh.stage = {stages}) waits on the device"
        yield Problem("remat.tensors", run.remat.tensors, rule, "Write keep or recompute for offload.")
    if not bad & {"model.num_layers", "pipeline.schedule", "pipeline.groups"}:
        yield from _layers(run, stages, table, bad)


def _schedule(run: RunConfig) -> Iterable[Problem]:
    p = run.pipeline
    if p.schedule == "interleaved" and p.groups < 2:
        rule = "takes turns among several groups of layers on each stage, and pipeline.groups = 1"
        yield Problem("pipeline.schedule", p.schedule, rule, "Set pipeline.groups to 2 or more, or 1f1b.")
    if p.schedule != "interleaved" and p.groups > 1:
        rule = f"is read only with pipeline.schedule = interleaved, which is {p.schedule}"
        yield Problem("pipeline.groups", p.groups, rule, "Set pipeline.schedule to interleaved, or this to 1.")


def _layers(run: RunConfig, stages: int, table: Mapping[str, list[str]], bad: set[str]) -> Iterable[Problem]:
    lying = arrangement(run, stages)
    if lying is None:
        return
    count = lying.stages * lying.groups
    of = f"mesh.stage = {stages}" + (f" x pipeline.groups = {lying.groups}" if lying.groups > 1 else "")
    if run.model.num_layers < count:
        rule = f"some of the {count} groups of layers ({of}) would be empty"
        yield Problem("model.num_layers", run.model.num_layers, rule, f"Set {count} or more, or a smaller mesh.stage.")
    elif run.model.num_layers % count and run.model.num_experts and EXCHANGE in table["experts"] and not run.experts.capacity:
        # Its router's logits are all equal.
        over = f"mesh.{EXCHANGE}"
        rule = (
            f"does not divide into {count} groups ({of}); an empty place would send all tokens to the same experts over {over}"
        )
        remedy = f"Set a multiple of {count}, another mesh.stage, {over} to 1, or experts.capacity."
        yield Problem("model.num_layers", run.model.num_layers, rule, remedy)
    elif "remat.every" not in bad and run.remat.policy != "none" and lying.per_group % run.remat.every:
        rule = f"does not divide the {lying.per_group} layers that a stage runs at a time ({of})"
        fits = ", ".join(str(n) for n in range(1, lying.per_group + 1) if lying.per_group % n == 0)
        yield Problem("remat.every", run.remat.every, rule, f"Set one of {fits}.")
