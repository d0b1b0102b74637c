"""The settings that a search tries. Settings that training would reject are left out."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxtrain.config import hardware, schema
from jaxtrain.config.context import METHODS
from jaxtrain.config.schema import Pipeline, Problem, RunConfig
from jaxtrain.plan.search_bound import least_state_gib
from jaxtrain.plan.topology import Topology, layout_of
from jaxtrain.step.validate import validate_step

Overrides = tuple[tuple[str, Any], ...]
Check = Callable[[RunConfig], Sequence[Problem]]

LONG = 32_768  # tokens; from this length on, meshes with mesh.seq are tried
VIRTUAL_STAGES = 2  # virtual stages of the interleaved schedules that are tried
FEW_ROWS = 512  # loss.chunk that saves memory. Shorter chunks make small matmuls.
# Storage dtypes of the state; the index is the rank. Higher ranks round more. Dtypes narrower than the config's are tried.
MOMENTS = (("dtypes.m", "bf16"), ("dtypes.v", "bf16"))
STORAGE: tuple[Overrides, ...] = (
    (),
    MOMENTS[:1],
    MOMENTS[1:],
    MOMENTS,
    (*MOMENTS, ("dtypes.grads", "bf16")),
    (("dtypes.m", "int8"), ("dtypes.v", "int8")),
    (*MOMENTS, ("dtypes.params", "bf16")),
)
WIDTH = {"f32": 4, "bf16": 2, "int8": 1}  # bytes


def meshes(run: RunConfig, topology: Topology) -> Iterator[Overrides]:
    """Yield every mesh of the GPUs over the axes data, fsdp, tensor (inside a node), expert, stage and seq.

    mesh.expert exceeds 1 only for models with experts. mesh.seq exceeds 1 only for sequences from LONG tokens, for fewer
    sequences in a step than GPUs, or if the config sets mesh.seq. A stage is one or more whole nodes; if the config sets
    mesh.stage, any number of GPUs.
    """
    long = run.mesh.seq != 1 or run.data.seq_len >= LONG or run.train.global_batch < topology.total
    for pipeline in _pipelines(run.pipeline, run.mesh.stage != 1, run.model.num_layers, topology):
        for expert in _divisors(run.model.num_experts or 1):
            total, rest = divmod(topology.total // dict(pipeline)["mesh.stage"], expert)
            for seq in _divisors(total) if long and not rest else [1] * (not rest):
                for tensor in (t for t in _divisors(total // seq) if t <= topology.gpus):
                    for data in _divisors(total // seq // tensor):
                        sizes = {"data": data, "fsdp": total // seq // tensor // data, "expert": expert}
                        sizes |= {"tensor": tensor, "seq": seq}
                        for context in METHODS if seq > 1 else [run.parallel.context]:
                            axes = ((f"mesh.{axis}", size) for axis, size in sizes.items())
                            yield (*axes, *pipeline, ("parallel.context", context))


def _pipelines(pipeline: Pipeline, asked: bool, layers: int, topology: Topology) -> Iterator[Overrides]:
    own = (pipeline.schedule, pipeline.groups)
    schedules = dict.fromkeys([("1f1b", 1), ("interleaved", VIRTUAL_STAGES), *([own] if asked else [])])
    for stage in _divisors(topology.total if asked else topology.nodes):
        for schedule, groups in schedules if stage > 1 else [own]:
            if stage * groups <= layers or stage == 1:
                yield ("mesh.stage", stage), ("pipeline.schedule", schedule), ("pipeline.groups", groups)


def remat_policies() -> Iterator[Overrides]:
    """Yield remat.policy=auto, full remat of each layer, and full remat of every two layers together."""
    for policy, every in (("auto", 1), ("full", 1), ("full", 2)):
        yield ("remat.policy", policy), ("remat.tensors", ""), ("remat.every", every)


def fastest_space(run: RunConfig, topology: Topology, check: Check) -> Iterator[Overrides]:
    """Yield every layout that might be the fastest: mesh x microbatches x ZeRO x remat.

    The config's own layout is first if it is legal. All layouts have the config's global batch, so their step times can be
    compared.
    """
    if not check(run):
        yield ()
    remats = [next(remat_policies())]
    if run.remat.policy != "auto":
        remats.append(tuple((key, value) for key, value in run.flat.items() if key.startswith("remat.")))
    zeros = [(zero, gather) for zero, gather in ((3, "layer"), (3, "forward"), (3, "step"), (2, "layer"))]
    for mesh in meshes(run, topology):
        sizes = dict(mesh)
        shards = sizes["mesh.data"] * sizes["mesh.fsdp"] * sizes["mesh.expert"]
        sharded = sizes["mesh.fsdp"] * sizes["mesh.expert"] * sizes["mesh.seq"] > 1
        for accum in _divisors(run.train.global_batch):
            # With fewer microbatches than stages, a pipeline is idle for about half of the step.
            if run.train.global_batch % (accum * shards) or accum < sizes["mesh.stage"]:
                continue
            placed = (*mesh, ("train.grad_accum", accum))
            if check(with_overrides(run, placed)):
                continue
            for (zero, gather), remat in itertools.product(zeros if sharded else zeros[:1], remats):
                yield (*placed, ("sharding.zero", zero), ("sharding.gather", gather), *remat)


def fitting_space(run: RunConfig, topology: Topology, check: Check) -> Iterator[tuple[int, Overrides]]:
    """Yield (cost rank, overrides that save memory). Rank 0 costs only time; higher ranks store state in narrower dtypes.

    The overrides set more microbatches, shorter loss chunks, another remat, larger tensor and expert groups, ZeRO-3, and
    narrower dtypes (STORAGE).
    """
    now, experts, flat = layout_of(run, topology).sizes, run.model.num_experts, run.flat
    usable, left = topology.usable_gib(run.train.memory_fraction), topology.total // (now["stage"] * now["seq"])
    groups = [(e, t) for e in (1, 2, 4, 8) for t in (1, 2, 4, 8) if e >= now["expert"] and t >= now["tensor"]]
    groups = [(e, t) for e, t in groups if left % (e * t) == 0 and topology.gpus % (e * t) == 0 and (experts or 1) % e == 0]
    placed: list[Overrides] = [()]
    for e, t in dict.fromkeys(((now["expert"], now["tensor"]), *groups)):
        placed.append((*split_over(run.mesh.fsdp, left // e, t), *((("mesh.expert", e),) if experts else ())))
    accums: list[Overrides] = [()]
    accums += [(("train.grad_accum", n),) for n in _divisors(run.train.global_batch) if n > run.train.grad_accum]
    batches = [(m, a) for m in placed for a in accums if not check(with_overrides(run, (*m, *a)))]
    remats: list[Overrides] = [(), *remat_policies()]
    zeros: list[Overrides] = [(), (("sharding.zero", 3), ("sharding.gather", "layer"))]
    chunks: list[Overrides] = [(), *([(("loss.chunk", FEW_ROWS),)] if run.loss.chunk > FEW_ROWS else [])]
    types: dict[Overrides, int] = {}
    for rank, stored in enumerate(STORAGE):
        types.setdefault(tuple((key, dtype) for key, dtype in stored if WIDTH[dtype] < WIDTH[flat[key]]), rank)

    seen = set()
    for stored, rank in types.items():
        if least_state_gib(with_overrides(run, stored), topology) > usable:
            continue
        for (m, a), r, z, c in itertools.product(batches, remats, zeros, chunks):
            turned = tuple((key, value) for key, value in (*a, *c, *r, *m, *z, *stored) if flat[key] != value)
            if turned and turned not in seen:
                seen.add(turned)
                yield rank, turned


def split_over(fsdp: int, total: int, tensor: int) -> Overrides:
    """Return the overrides of a mesh of `total` GPUs with this size of the tensor axis, and all other GPUs on fsdp.

    fsdp: mesh.fsdp of the config, which stays if it is -1.
    """
    return ("mesh.data", 1), ("mesh.fsdp", -1 if fsdp == -1 else total // tensor), ("mesh.tensor", tensor)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def with_overrides(run: RunConfig, overrides: Iterable[tuple[str, Any]]) -> RunConfig:
    """Return the run with these overrides. Raises ConfigError for an unknown key or a value of a wrong type."""
    # A search makes thousands of runs, so only changed sections are converted to dicts and back.
    tree: dict[str, Any] = {schema.public_name(f.name): getattr(run, f.name) for f in dataclasses.fields(run)}
    for key, value in overrides:
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            if dataclasses.is_dataclass(place[section]):
                place[section] = schema.to_dict(place[section])
            elif isinstance(place[section], tuple):  # config.OWN
                place[section] = dict(place[section])
            place = place[section]
        place[name] = value
    changed, problems = schema.from_dict(tree)
    if problems:
        raise schema.ConfigError(problems)
    return changed


def changes(run: RunConfig, overrides: Overrides, topology: Topology | None = None) -> tuple[str, ...]:
    """Return the overrides that change the run, such as "mesh.fsdp=8". topology: replaces mesh axes of -1 by their size."""
    flat = run.flat
    if topology:
        flat = flat | {f"mesh.{axis}": size for axis, size in layout_of(run, topology).sizes.items()}
    return tuple(f"{key}={value}" for key, value in overrides if flat[key] != value)


def training_check(topology: Topology, source: str = "") -> Check:
    """Return a function that returns the problems of training a run on this machine. source: the machine's name in errors."""
    where = source or topology.name
    devices = hardware.Devices(
        "gpu", topology.device_kind, topology.total, topology.memory_gib, where, topology.gpu.sm, topology.gpus
    )
    return lambda run: validate_step(run, devices, fits=False)
