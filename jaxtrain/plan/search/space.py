"""The layouts that a search looks through. A knob is one line of KNOBS; a layout is one setting of each.

Which settings are legal is not said here: the config's own checks decide, on the config with the setting put in.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxtrain import activations, config, hardware
from jaxtrain.config import MESH_AXES, Problem, RunConfig
from jaxtrain.context import METHODS
from jaxtrain.plan.result import Rates
from jaxtrain.plan.search.bound import ladder, mesh_sizes
from jaxtrain.plan.topology import Topology
from jaxtrain.validate import validate_step

Overrides = tuple[tuple[str, Any], ...]
Setting = dict[str, Any]  # of one knob: key -> value
Check = Callable[[RunConfig], Sequence[Problem]]


LONG = 32_768  # tokens from which a sequence is split over GPUs too, when layouts are looked for


def meshes(run: RunConfig, topology: Topology, rates: Rates) -> Iterator[Setting]:
    """Every way to divide the GPUs over data x fsdp x tensor; over expert where the model has experts; over stage as in
    `pipelines`; and over seq, by every method, where sequences are long or fewer than GPUs, or where the config splits them."""
    split = run.mesh.seq != 1 or run.data.seq_len >= LONG or run.train.global_batch < topology.total
    for pipeline in pipelines(run, topology):
        for expert in _divisors(run.model.num_experts or 1):
            total, rest = divmod(topology.total // pipeline["mesh.stage"], expert)
            for seq in _divisors(total) if split and not rest else [1] * (not rest):
                for tensor in _divisors(total // seq):
                    for data in _divisors(total // seq // tensor):
                        mesh = {"mesh.data": data, "mesh.fsdp": total // seq // tensor // data, "mesh.expert": expert}
                        mesh |= {"mesh.tensor": tensor, "mesh.seq": seq, **pipeline}
                        for context in METHODS if seq > 1 else [run.parallel.context]:
                            yield mesh | {"parallel.context": context}


GROUPS = (2,)  # of layers on each stage, of interleaved schedules that are tried


def pipelines(run: RunConfig, topology: Topology) -> Iterator[Setting]:
    """No pipeline; on several nodes stages of whole nodes, which send each other the least over the network; any number of
    stages where the config has some. With gpipe only where the config has it: it takes as long as 1f1b, and more memory."""
    own = {"pipeline.schedule": run.pipeline.schedule, "pipeline.groups": run.pipeline.groups}
    yield {"mesh.stage": 1, **own}
    asked = run.mesh.stage != 1
    for stage in _divisors(topology.total if asked else topology.nodes):
        schedules = [("1f1b", 1), *(("interleaved", groups) for groups in GROUPS)]
        schedules += [(run.pipeline.schedule, run.pipeline.groups)] if asked else []
        for schedule, groups in dict.fromkeys(schedules):
            if stage > 1 and stage * groups <= run.model.num_layers:
                yield {"mesh.stage": stage, "pipeline.schedule": schedule, "pipeline.groups": groups}


def stages(run: RunConfig, topology: Topology, rates: Rates) -> Iterator[Setting]:
    """How weights that are split are held. Without zero = 0, which is what another mesh is, and without zero = 1, which is
    gather = step."""
    for zero, gather in ((3, "layer"), (3, "forward"), (3, "step"), (2, "layer")):
        yield {"sharding.zero": zero, "sharding.gather": gather}


def remat_policies(run: RunConfig, topology: Topology, rates: Rates) -> Iterator[Setting]:
    """The named policies, full remat over several layers, and a ladder of tensor sets that keep more and more.

    Without `auto`, which is one of those sets, and by itself a search for it.
    """

    def setting(policy: str, tensors: Iterable[str] = (), every: int = 1) -> Setting:
        return {"remat.policy": policy, "remat.tensors": ",".join(f"{t}=keep" for t in tensors), "remat.every": every}

    for every in (1, 2, 4):
        yield setting("full", every=every)
    named = {policy: {*names} for policy, names in activations.KEPT.items() if policy != "auto"}
    for policy in named:
        if policy != "full":
            yield setting(policy)
    for names in ladder(run, rates):
        if {*names} not in named.values():
            yield setting("custom", names)


def microbatches(run: RunConfig, topology: Topology, rates: Rates) -> Iterator[Setting]:
    """Every number of microbatches that divides the batch."""
    for accum in _divisors(run.train.global_batch):
        yield {"train.grad_accum": accum}


@dataclasses.dataclass(frozen=True)
class Knob:
    """One axis of the space. `apart`: its settings are legal or not whatever the other knobs say, so each is checked once."""

    settings: Callable[[RunConfig, Topology, Rates], Iterable[Setting]]
    keys: tuple[str, ...]
    apart: bool = False


KNOBS = (
    Knob(meshes, (*(f"mesh.{axis}" for axis in MESH_AXES), "pipeline.schedule", "pipeline.groups", "parallel.context")),
    Knob(stages, ("sharding.zero", "sharding.gather")),
    Knob(microbatches, ("train.grad_accum",)),
    Knob(remat_policies, ("remat.policy", "remat.tensors", "remat.every"), apart=True),
)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def with_overrides(run: RunConfig, overrides: Iterable[tuple[str, Any]]) -> RunConfig:
    """The run with some keys changed. Raises ConfigError for a key or a type that does not exist."""
    # Only sections that change are taken apart and put together: a search asks for thousands of runs.
    tree: dict[str, Any] = {config.public_name(f.name): getattr(run, f.name) for f in dataclasses.fields(run)}
    for key, value in overrides:
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            if dataclasses.is_dataclass(place[section]):
                place[section] = config.to_dict(place[section])
            place = place[section]
        place[name] = value
    changed, problems = config.from_dict(tree)
    if problems:
        raise config.ConfigError(problems)
    return changed


def own_layout(run: RunConfig, topology: Topology) -> Overrides:
    """The layout that the config has, in the form the knobs give."""
    flat = dict(config.flatten(config.to_dict(run)))
    flat |= {f"mesh.{axis}": size for axis, size in mesh_sizes(run, topology).items()}
    places, _ = activations.parse_tensors(run.remat.tensors)
    flat["remat.tensors"] = ",".join(f"{name}={places[name]}" for name in activations.ACTIVATIONS if name in places)
    return tuple((key, flat[key]) for knob in KNOBS for key in knob.keys)


def training_check(topology: Topology, source: str = "") -> Check:
    """What training on this machine would refuse in a config. `source`: where the machine is from, for the refusal."""
    gpu = topology.gpu
    devices = hardware.Devices(
        "gpu", topology.device_kind, topology.total, topology.memory_gib, source or topology.name, gpu.sm, topology.gpus
    )
    return lambda run: validate_step(run, devices)


def legal_layouts(
    run: RunConfig, topology: Topology, rates: Rates, check: Check
) -> tuple[list[Overrides], list[tuple[Overrides, str]]]:
    """(layouts that the config's own checks accept, settings that they refuse, with the reason)."""
    refused: list[tuple[Overrides, str]] = []

    def accepted(overrides: Overrides, base: RunConfig) -> bool:
        problems = check(with_overrides(base, overrides))
        if problems:
            refused.append((overrides, str(problems[0])))
        return not problems

    def settings(knob: Knob) -> list[Overrides]:
        return [tuple((key, s[key]) for key in knob.keys) for s in knob.settings(run, topology, rates)]

    layouts: list[Overrides] = [()]
    for knob in (k for k in KNOBS if not k.apart):
        layouts = [(*left, *right) for left in layouts for right in settings(knob)]
    layouts = [o for o in layouts if not _twin(o, run) and not _idle(o) and accepted(o, run)]
    for knob in (k for k in KNOBS if k.apart):
        legal = [s for s in settings(knob) if layouts and accepted(s, with_overrides(run, layouts[0]))]
        layouts = [(*left, *right) for left in layouts for right in legal]
    own = own_layout(run, topology)
    return layouts if own in layouts or check(with_overrides(run, own)) else [own, *layouts], refused


def _twin(overrides: Overrides, run: RunConfig) -> bool:
    """Whether another setting of the same layout is the same program: nothing is gathered where nothing is split, and the
    config's own zero = 1 is gather = step."""
    o = dict(overrides)
    stage = (o["sharding.zero"], o["sharding.gather"])
    if o["mesh.fsdp"] * o["mesh.expert"] * o["mesh.seq"] == 1:
        return stage != (3, "layer")
    return run.sharding.zero == 1 and stage == (3, "step")


def _idle(overrides: Overrides) -> bool:
    """Whether stages have fewer microbatches than there are stages, and wait for half of the step or more."""
    o = dict(overrides)
    return o["mesh.stage"] > o["train.grad_accum"]


def sequences_per_gpu(run: RunConfig, topology: Topology) -> float:
    """Of one microbatch. Below 1 where GPUs share a sequence."""
    return run.train.global_batch / run.train.grad_accum / topology.total


def naive_layouts(run: RunConfig, topology: Topology, layouts: Sequence[Overrides]) -> dict[str, Overrides]:
    """What one would try first, with everything recomputed and a microbatch near one sequence a GPU: for comparison.

    The names say full remat: how much slower such a layout is lies not in its mesh alone.
    """
    found = {}
    for mesh, axis in (("plain fsdp", "fsdp"), ("pure data", "data"), ("pure tensor", "tensor")):
        name = f"{mesh}, full remat"
        wanted = {f"mesh.{axis}": topology.total, "remat.policy": "full", "remat.every": 1}
        wanted |= {"sharding.zero": 3, "sharding.gather": "layer"}
        alike = [o for o in layouts if wanted.items() <= dict(o).items()]
        if alike:
            found[name] = min(alike, key=lambda o: abs(math.log(sequences_per_gpu(with_overrides(run, o), topology))))
    return found


def changes(run: RunConfig, overrides: Overrides) -> tuple[str, ...]:
    """What to put on the command line of the config to get this layout: "mesh.fsdp=8", ..."""
    flat = _flat(run)
    return tuple(f"{key}={value}" for key, value in overrides if flat[key] != value)


@functools.lru_cache(maxsize=4)
def _flat(run: RunConfig) -> dict[str, Any]:
    return dict(config.flatten(config.to_dict(run)))
