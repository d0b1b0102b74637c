"""What follows from a config and its devices, derived once: `resolve_layout`. Imports no jax."""

import dataclasses
import functools
import math
from collections.abc import Mapping

from jaxtrain.config.context import Context, make_context
from jaxtrain.config.schema import (
    EXPERT_AXIS,
    MESH_AXES,
    OPTIONAL_AXES,
    RULES,
    ConfigError,
    Dtypes,
    Mesh,
    Pipeline,
    Problem,
    RunConfig,
    Sharding,
)

# Logical axis -> the mesh axes that its rule may name, in this order: those of its default, and data for weights. The step has
# collectives for these axes only.
ALLOWED = {axis: tuple(onto.split("+")) for axis, onto in RULES.items()} | {
    "embed": ("data", "fsdp", "expert", "seq"),
    "experts": ("expert", "data", "fsdp", "seq"),
    "expert_embed": ("data", "fsdp", "seq"),
}
WEIGHT_AXES = ("embed", "experts", "expert_embed")  # axes whose shards are gathered over axes of tokens


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Assigns layers to the slots of a stack that is sharded evenly over the stages.

    The slots are in order of stage, and within a stage in order of group.
    """

    layers: int
    stages: int = 1
    groups: int = 1  # of each stage

    @property
    def per_group(self) -> int:
        """Return the number of slots in each group."""
        return -(-self.layers // (self.stages * self.groups))

    @property
    def slots(self) -> int:
        """Return the number of slots in the stack."""
        return self.per_group * self.stages * self.groups

    @functools.cached_property
    def order(self) -> tuple[int | None, ...]:
        """Return the layer of each slot; None for an empty slot."""
        count = self.stages * self.groups
        short, longer = divmod(self.layers, count)
        by_group: list[list[int | None]] = []
        first = 0
        for group in range(count):
            size = short + (group < longer)
            by_group.append([*range(first, first + size), *[None] * (self.per_group - size)])
            first += size
        return tuple(layer for s in range(self.stages) for v in range(self.groups) for layer in by_group[v * self.stages + s])


@dataclasses.dataclass(frozen=True)
class StepDtypes:
    """The dtypes of a step, as names: f32 | bf16."""

    compute: str  # activations, gathered weights
    reduce: str  # weight gradients in their reduction over devices
    sums: str  # weight gradients summed over microbatches
    params: str  # master weights, without adapters
    vectors: str  # master weights that are scales of norms or biases
    adapters: str  # master weights of adapters


@dataclasses.dataclass(frozen=True)
class Layout:
    """A train step on its devices: all that follows from a config and the number of devices. Hashable.

    Attributes:
        mesh: (mesh axis, its size), for every axis of MESH_AXES.
        rules: (logical axis, mesh axes that shard it).
        context: the sharding of a sequence's tokens over mesh.seq.
        stages: the layers on the pipeline stages of mesh.stage; one stage without a pipeline.
        schedule: pipeline.schedule.
        batch: microbatches of a step, sequences of a microbatch, tokens of a sequence: (A, B, T).
    """

    mesh: tuple[tuple[str, int], ...]
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    context: Context
    stages: Arrangement
    schedule: str
    dtypes: StepDtypes
    batch: tuple[int, int, int]

    def size(self, *mesh_axes: str) -> int:
        """Return the product of the sizes of these mesh axes."""
        return math.prod(size for axis, size in self.mesh if axis in mesh_axes)

    @functools.cached_property
    def _used(self) -> dict[str, tuple[str, ...]]:
        return {axis: tuple(a for a in onto if self.size(a) > 1) for axis, onto in self.rules}

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Return the mesh axes, of size above 1, that shard a logical axis. Raises ConfigError for an axis without a rule."""
        if axis not in self._used:
            rule = f"is needed for an array of the model, and there are only rules for {', '.join(self._used)}"
            raise ConfigError([Problem(f"sharding.rules.{axis}", None, rule, "Add it; '' replicates the axis.")])
        return self._used[axis]

    def shards(self, axis: str) -> int:
        """Return the number of shards of a logical axis."""
        return self.size(*self.mesh_axes(axis))

    @property
    def sizes(self) -> dict[str, int]:
        """Return mesh axis -> size."""
        return dict(self.mesh)

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return math.prod(size for _, size in self.mesh)

    @property
    def used_mesh(self) -> dict[str, int]:
        """Return mesh axis -> size, without optional axes of size 1: the mesh of the devices."""
        return {axis: size for axis, size in self.mesh if axis not in OPTIONAL_AXES or size > 1}

    @property
    def pipelined(self) -> bool:
        """Return whether the layers are on several stages."""
        return self.stages.stages > 1


def resolve_layout(run: RunConfig, devices: int, node: int, label: str = "") -> Layout:
    """Return the layout of a run on `devices` devices, `node` of them in each node. `rule_problems` checks its rules.

    label: names the devices in an error. Raises ConfigError for a mesh that does not fill the devices.
    """
    sizes = mesh_sizes(run.mesh, devices, node, label)
    rules = rules_in_use(run.sharding, run.model.num_experts, sizes)
    ranks, tensor = (math.prod(sizes.get(a, 1) for a in rules[axis]) for axis in ("sequence", "heads"))
    heads = run.model.num_heads // tensor, max(1, run.model.num_kv_heads // tensor)
    return Layout(
        tuple(sizes.items()),
        tuple(rules.items()),
        make_context(run.parallel.context, ranks, *heads),
        arrange(run.model.stack_length, run.pipeline, sizes["stage"]),
        run.pipeline.schedule,
        step_dtypes(run.compute, run.dtypes, run.lora.rank > 0),
        (run.train.grad_accum, run.train.global_batch // run.train.grad_accum, run.data.seq_len),
    )


def rule_of(axis: str) -> str:
    """Return the axis whose rule shards a logical axis: the axis itself, or heads for kv_heads."""
    return "heads" if axis == "kv_heads" else axis


def rule_problems(layout: Layout, sharding: Sharding) -> list[Problem]:
    """Return the problems of sharding.rules that the step has no collectives for, one for each rule."""
    written, problems = dict(sharding.rules), {}

    def refuse(axis: str, rule: str, remedy: str) -> None:
        problems.setdefault(axis, Problem(f"sharding.rules.{axis}", written[axis], rule, remedy))

    sequence = layout.mesh_axes("sequence")
    tokens = {*layout.mesh_axes("batch"), *sequence, EXPERT_AXIS}
    for axis, allowed in ALLOWED.items():
        onto = layout.mesh_axes(axis)
        ordered = tuple(a for a in allowed if a in onto)
        names = "+".join(a for a in allowed if a in tokens or axis not in WEIGHT_AXES)
        if disallowed := [a for a in onto if a not in allowed]:
            refuse(axis, f"cannot be sharded over mesh axis {disallowed[0]!r}", f"Set '{names}', or fewer of these axes.")
        elif onto != ordered:
            refuse(axis, f"must name its mesh axes in the order {names}", f"Set {'+'.join(ordered)}.")
    if layout.mesh_axes("residual")[: len(sequence)] != sequence:
        rule = f"tokens inside the blocks are sharded over {[*sequence]}, so those of the residual stream must be too"
        refuse("residual", rule, "Begin it with sharding.rules.sequence, as 'seq+tensor'.")
    for axis in WEIGHT_AXES:
        if alone := [a for a in layout.mesh_axes(axis) if a not in tokens]:
            rule = f"mesh axis {alone[0]!r} shards no tokens, so its devices would sum the same gradients"
            refuse(axis, rule, "Name mesh axes of sharding.rules.batch and .sequence only.")
    return list(problems.values())


def arrange(layers: int, pipeline: Pipeline, stages: int) -> Arrangement:
    """Return the arrangement of stacked layers on `stages` pipeline stages."""
    several = stages > 1 and pipeline.schedule == "interleaved"
    return Arrangement(layers, stages, pipeline.groups if several else 1)


def step_dtypes(compute: str, stored: Dtypes, adapters: bool) -> StepDtypes:
    """Return the dtypes of a step. stored: the section `dtypes`. adapters: only these are trained.

    With LoRA, frozen base weights are stored in the compute dtype: every use rounds them to this dtype, and checkpoints do not
    include them. The router stays in dtypes.params.

    Scales of norms, and biases, are float32 for any dtypes.params: near 1, bfloat16 is coarser than their updates.
    """
    params, vectors = (compute, compute) if adapters else (stored.params, "f32")
    return StepDtypes(compute, stored.reduce, stored.grads, params, vectors, stored.params)


def rules_in_use(sharding: Sharding, num_experts: int, sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return logical axis -> mesh axes that shard it, on a mesh of these sizes.

    With sharding.zero = 0, weights, gradients and moments are replicated over mesh axes that shard the batch and the sequence.

    Of sharding.rules.experts, `expert` shards the experts, and so does each further axis as long as the product of the sizes
    divides the number of experts. Other axes of sharding.rules.expert_embed shard the model dimension of experts' weights.
    """
    rules = {axis: tuple(filter(None, onto.split("+"))) for axis, onto in sharding.rules}
    # A query head must be on the device of its key/value head.
    rules |= {"kv_heads": rules["heads"], "head_dim": (), "layers": ("stage",)}
    # Shards of whole experts are contiguous in memory for the all-gather.
    expert_axes: list[str] = []
    for axis in rules["experts"]:
        shards = math.prod(sizes.get(a, 1) for a in (*expert_axes, axis))
        if axis == EXPERT_AXIS or (num_experts > 0 and num_experts % shards == 0):
            expert_axes.append(axis)
    expert_embed = tuple(a for a in rules["expert_embed"] if a not in expert_axes) if num_experts else ()
    rules |= {"experts": tuple(expert_axes), "expert_embed": expert_embed}
    if sharding.zero > 0:
        return rules
    batch = {*rules["batch"], *rules["sequence"]}
    # Experts stay sharded over the expert axis, because tokens are sent to them.
    stay = dict.fromkeys(("batch", "sequence", "residual"), batch) | {"experts": {EXPERT_AXIS}}
    return {k: tuple(a for a in onto if a not in batch or a in stay.get(k, ())) for k, onto in rules.items()}


def mesh_sizes(mesh: Mesh, devices: int, node: int, label: str = "") -> dict[str, int]:
    """Return the size of each mesh axis on `devices` devices, `node` of them in each node, with -1 filled in.

    If data and fsdp are both -1, fsdp is the greatest common divisor of two numbers: the devices divided by all given sizes,
    and the devices of a node divided by expert x tensor x seq. So stages are on different nodes if there are enough nodes. data
    has the size that uses all devices. `label` names the devices in an error. Raises ConfigError for sizes that do not fill the
    devices.
    """
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if axis not in OPTIONAL_AXES or size != 1)
    rule = "must be a positive number, or -1 for the devices that are left"
    invalid = {axis: size for axis, size in sizes.items() if size < 1 and size != -1}
    if invalid:
        raise ConfigError([Problem(f"mesh.{a}", size, rule, "Set 1 to leave the axis unused.") for a, size in invalid.items()])
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1 and free != ["data", "fsdp"]:
        free_names = " or ".join(f"mesh.{axis}" for axis in free)
        rule = "only data and fsdp may both be -1, otherwise the sizes are not determined"
        raise ConfigError([Problem("mesh", shown, rule, f"Set {free_names} to a number.")])
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if devices % fixed or (not free and fixed != devices):
        rule = f"the product of {'the fixed sizes' if free else 'the sizes'} is {fixed}, but the run has "
        remedy = f"Set sizes whose product {'divides' if free else 'is'} {devices}"
        remedy += "." if free else ", or one of them to -1."
        raise ConfigError([Problem("mesh", shown, rule + (label or f"{devices} devices"), remedy)])
    remaining = devices // fixed
    if len(free) < 2:
        return {axis: remaining if size == -1 else size for axis, size in sizes.items()}
    inner = fixed // sizes["stage"]
    if node % inner and inner % node:
        within = [axis for axis in sizes if axis not in (*free, "stage") and (axis not in OPTIONAL_AXES or sizes[axis] > 1)]
        rule = f"groups of {' x '.join(within)} = {inner} devices neither divide the {node} of a node nor fill nodes"
        raise ConfigError([Problem("mesh", shown, rule, "Set mesh.data and mesh.fsdp to numbers.")])
    fsdp = math.gcd(remaining, max(1, node // inner))
    return sizes | {"data": remaining // fsdp, "fsdp": fsdp}
