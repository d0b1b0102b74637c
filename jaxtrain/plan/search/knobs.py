"""The knobs that save memory, in the order of what they cost, and what a setting of them will likely take.

What is expected of a setting comes from formulas (bound.py), scaled as the plans made so far came out against theirs.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

from jaxtrain import activations, config
from jaxtrain.config import Loss, RunConfig
from jaxtrain.models import FAMILIES
from jaxtrain.plan.result import Plan, Rates
from jaxtrain.plan.search.bound import (
    BYTES,
    Layout,
    bound,
    ladder,
    master_bytes,
    may_add_layers,
    mesh_sizes,
    moment_bytes,
    saved_bytes,
)
from jaxtrain.plan.search.space import Check, Overrides, changes, microbatches, remat_policies, with_overrides
from jaxtrain.plan.topology import Topology

FASTER = 0.98  # of the best step time: what promises less than that is not worth a compile
SMALLEST_CHUNK = 256  # tokens of the loss at a time; shorter GEMMs waste the card
# How far plans lie above their formulas before any is made: 8B came out 15% above in time, and 70B held 16% more besides its
# state.
TIME_GUESS, MEMORY_GUESS = 1.15, 1.2
# How far off an expected peak may be: by plans that keep the same activations, by plans that keep others, and by the guess.
DOUBTS = (0.03, 0.06, 0.15)
TYPES = ("dtypes.m", "dtypes.v", "dtypes.grads")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A run with some knobs turned, and its formulas; all 0 where nothing is known of the model."""

    overrides: Overrides
    run: RunConfig
    knobs: int  # turned, storage types apart
    rank: int  # of the storage types that change, among as many others
    least_gib: float  # no plan of it is smaller
    state_gib: float  # weights and moments
    rest_gib: float  # what else it holds
    least_s: float

    @property
    def formula_gib(self) -> float:
        return self.state_gib + self.rest_gib


def candidate(
    base: RunConfig, overrides: Overrides, topology: Topology, rates: Rates, knobs: int = 0, rank: int = 0
) -> Candidate:
    run = with_overrides(base, overrides)
    if run.model.family not in FAMILIES:
        return Candidate(overrides, run, knobs, rank, 0.0, 0.0, 0.0, 0.0)
    least = bound(run, topology, rates)
    layout = Layout(run, mesh_sizes(run, topology), topology.gpus)
    on_device = 0.0 if run.optimizer.offload == "moments" else moment_bytes(layout) / 2**30
    state = master_bytes(layout) / 2**30 + on_device
    # The bound counts the gradients of a microbatch as they travel, at two bytes; the step holds them like the weights.
    wide = 0.0 if may_add_layers(run) else sum(layout.gradients.values()) / 2**30 * (BYTES[run.dtypes.params] - 2)
    rest = least.memory_gib - state + wide
    return Candidate(overrides, run, knobs, rank, least.memory_gib, state, rest, least.step_s)


class Expected:
    """Peak and step time of what is not compiled, by its formulas and by how plans came out against theirs."""

    def __init__(self) -> None:
        self._seen: list[tuple[Candidate, float, float]] = []

    def learn(self, c: Candidate, plan: Plan) -> None:
        if c.rest_gib > 0 and c.least_s > 0:
            in_memory = (plan.memory.taken_gib - c.state_gib) / c.rest_gib
            self._seen.append((c, in_memory, plan.time.step_ms / 1e3 / c.least_s))

    def of(self, c: Candidate) -> tuple[float, float, float]:
        """GiB, how far off they may be, and seconds."""
        same = [ratios for seen, *ratios in self._seen if seen.run.remat == c.run.remat]
        # Without checkpoints much is kept that has no name and is not in the formula: that says nothing of the others.
        alike = [ratios for seen, *ratios in self._seen if seen.run.remat.policy != "none" != c.run.remat.policy]
        ratios = same or alike or [[MEMORY_GUESS, TIME_GUESS]]
        doubt = DOUBTS[0 if same else 1 if alike else 2]
        in_memory, in_time = (sum(r) / len(ratios) for r in zip(*ratios, strict=True))
        return c.state_gib + c.rest_gib * in_memory, doubt, c.least_s * in_time

    def next(self, todo: Iterable[Candidate], usable: float, best_s: float) -> Candidate | None:
        """While nothing fits: what is likely to, with few knobs turned and fast; failing that, what may, the smallest first.

        Once something fits: what is likely to fit and to be faster than `best_s`.
        """
        rated = [(c, *self.of(c)) for c in todo]
        promising = [(c, step) for c, peak, _, step in rated if peak <= usable and step < FASTER * best_s]
        if best_s < math.inf:
            return min(promising, key=lambda item: (item[1], item[0].knobs))[0] if promising else None
        if promising:
            return min(promising, key=lambda item: (item[0].knobs, item[0].rank, item[1]))[0]
        near = [(c, peak) for c, peak, doubt, _ in rated if peak <= usable * (1 + doubt)]
        return min(near, key=lambda item: (item[1], item[0].knobs))[0] if near else None


# ---- the knobs


def _larger_accumulation(run: RunConfig, topology: Topology, rates: Rates) -> list[Overrides]:
    settings = (tuple(s.items()) for s in microbatches(run, topology, rates))
    return [s for s in settings if s[0][1] > run.train.grad_accum]


def _chunks(run: RunConfig) -> list[Overrides]:
    halves = itertools.takewhile(lambda c: c >= SMALLEST_CHUNK, (run.loss.chunk // 2**n for n in itertools.count(1)))
    return [(("loss.chunk", chunk),) for chunk in halves]


def _stages(run: RunConfig) -> list[Overrides]:
    """Weights whole only while a layer uses them."""
    least = (("sharding.zero", 3), ("sharding.gather", "layer"))
    return [least] if (run.sharding.zero, run.sharding.gather) != (3, "layer") else []


def _meshes(run: RunConfig, topology: Topology) -> list[Overrides]:
    """Weights split over all GPUs that are not in tensor groups, or on other stages; tensor groups, and the devices that share
    experts, inside a node."""
    now, experts = mesh_sizes(run, topology), run.model.num_experts
    left = topology.total // (now["stage"] * now["seq"])
    present = (now["expert"], now["tensor"])
    wider = [(e, t) for e in (1, 2, 4, 8) for t in (1, 2, 4, 8) if e >= present[0] and t >= present[1]]
    inside = [(e, t) for e, t in wider if topology.gpus % (e * t) == 0 and left % (e * t) == 0 and (experts or 1) % e == 0]
    found = []
    for expert, tensor in dict.fromkeys((present, *inside)):
        own = (("mesh.expert", expert),) if experts else ()
        found.append((*split_over(run, left // expert, tensor), *own))
    return found


def split_over(run: RunConfig, total: int, tensor: int) -> Overrides:
    """Of `total` GPUs, those that data, fsdp and tensor share."""
    return ("mesh.data", 1), ("mesh.fsdp", -1 if run.mesh.fsdp == -1 else total // tensor), ("mesh.tensor", tensor)


def combinations(run: RunConfig, topology: Topology, rates: Rates, check: Check) -> Iterator[Iterator[Candidate]]:
    """Every legal combination of knobs, by the number of storage types that change; the run as it is left out."""
    base = candidate(run, (), topology, rates)

    def useful(settings: Iterable[Overrides]) -> list[Overrides]:
        """And nothing, which is always possible."""
        turned = [candidate(run, s, topology, rates) for s in settings if changes(run, s)]
        return [(), *(c.overrides for c in turned if not base.rest_gib or c.formula_gib < base.formula_gib)]

    def legal(*parts: Overrides) -> bool:
        overrides = tuple(itertools.chain(*parts))
        return not overrides or not check(with_overrides(run, overrides))

    accums, meshes = useful(_larger_accumulation(run, topology, rates)), useful(_meshes(run, topology))
    remats = [r for r in useful(tuple(s.items()) for s in remat_policies(run, topology, rates)) if legal(r)]
    placed = [(mesh, accum) for mesh in meshes for accum in accums if legal(mesh, accum)]
    products = itertools.product(useful(_stages(run)), placed, remats, useful(_chunks(run)))
    parts = [(s, a, c, r, m) for s, (m, a), r, c in products]
    # Where formulas tell no difference, the first knob is turned first.
    parts.sort(key=lambda p: tuple(bool(part) for part in reversed(p)))
    turned = [(tuple(itertools.chain(*p)), sum(map(bool, p))) for p in parts]

    flat = dict(config.flatten(config.to_dict(run)))
    wide = [key for key in TYPES if flat[key] == "f32"]
    groups = [list(itertools.combinations(wide, number)) for number in range(len(wide) + 1)]
    if flat["dtypes.params"] == "f32":
        groups.append([(*wide, "dtypes.params"), (*(key for key in wide if key != "dtypes.grads"), "dtypes.params")])

    def in_place(keys: tuple[str, ...], overrides: Overrides) -> bool:
        """Gradients of a single microbatch are not summed, and dtypes.grads changes nothing of what is held."""
        return "dtypes.grads" not in keys or dict(overrides).get("train.grad_accum", run.train.grad_accum) > 1

    for group in groups:
        yield (
            candidate(run, (*o, *((key, "bf16") for key in keys)), topology, rates, knobs, rank)
            for rank, keys in enumerate(dict.fromkeys(group))
            for o, knobs in turned
            if (o or keys) and in_place(keys, o)
        )


# ---- knobs that a config has turned


@dataclasses.dataclass(frozen=True)
class Saving:
    """A choice that saves memory, and what to put in its place to do without it."""

    choice: str  # "dtypes.m=bf16"
    instead: Overrides
    without: str = "without it"


def savings(run: RunConfig, topology: Topology, rates: Rates, check: Check) -> list[Saving]:
    """Every choice of a config that saves memory and is not the default or the fastest."""
    found = [*_kept_less(run, topology, rates)]
    if run.remat.every > 1 and run.remat.policy != "none":
        found.append(Saving(f"remat.every={run.remat.every}", (("remat.every", 1),)))
    for name in ("m", "v", "grads", "params"):
        if (stored := getattr(run.dtypes, name)) != "f32":
            found.append(Saving(f"dtypes.{name}={stored}", ((f"dtypes.{name}", "f32"),)))
    if run.optimizer.offload != "none":
        found.append(Saving(f"optimizer.offload={run.optimizer.offload}", (("optimizer.offload", "none"),)))
    chunk, usual = run.loss.chunk, Loss().chunk
    if chunk < usual:
        found.append(Saving(f"loss.chunk={chunk}", (("loss.chunk", usual),), f"at {usual}"))
    sizes = mesh_sizes(run, topology)
    if sizes["tensor"] > 1:
        fsdp = sizes["fsdp"] * sizes["tensor"]
        alone = ("mesh.fsdp", -1 if run.mesh.fsdp == -1 else fsdp), ("mesh.tensor", 1)
        found.append(Saving(f"mesh.tensor={sizes['tensor']}", alone, f"with mesh.fsdp={fsdp} instead"))
    if sizes["stage"] > 1:
        fsdp = sizes["fsdp"] * sizes["stage"]
        alone = ("mesh.fsdp", -1 if run.mesh.fsdp == -1 else fsdp), ("mesh.stage", 1)
        found.append(Saving(f"mesh.stage={sizes['stage']}", alone, f"with mesh.fsdp={fsdp} instead"))
    if run.moe.capacity_factor and run.model.num_experts:
        found.append(
            Saving(f"moe.capacity_factor={run.moe.capacity_factor:g}", (("moe.capacity_factor", 0.0),), "with no token dropped")
        )
    found += _larger_microbatch(run, check)
    return [saving for saving in found if not check(with_overrides(run, saving.instead))]


def _kept_less(run: RunConfig, topology: Topology, rates: Rates) -> Iterator[Saving]:
    """What remat does not keep on the device, against the next more that it could."""
    remat = run.remat
    if remat.policy == "none":
        return
    places, _ = activations.parse_tensors(remat.tensors)
    offloaded = [name for name, place in places.items() if place == "offload"]
    if offloaded:
        tensors = ",".join(f"{name}={'keep' if name in offloaded else place}" for name, place in places.items())
        choice = f"remat.tensors={','.join(f'{name}=offload' for name in offloaded)}"
        yield Saving(choice, (("remat.tensors", tensors),), "kept on the device")
        return

    def more(names: tuple[str, ...]) -> Overrides:
        tensors = ",".join(f"{name}=keep" for name in names)
        return ("remat.policy", "custom"), ("remat.tensors", tensors), ("remat.every", remat.every)

    def held(overrides: Overrides) -> float:
        return saved_bytes(Layout(with_overrides(run, overrides), mesh_sizes(run, topology), topology.gpus))

    kept = activations.kept(remat)
    choice = f"remat.policy={remat.policy}"
    rungs = [names for names in ladder(run, rates) if kept < {*names}] if run.model.family in FAMILIES else []
    if not rungs:
        instead = ("remat.policy", "none"), ("remat.tensors", ""), ("remat.every", 1)
        yield Saving(choice, instead, "with everything kept")
        return
    names = min(rungs, key=lambda names: held(more(names)))
    added = [name for name in names if name not in kept]
    yield Saving(choice, more(names), f"with {' and '.join(added)} kept{' too' if kept else ''}")


def _larger_microbatch(run: RunConfig, check: Check) -> Iterator[Saving]:
    accum = run.train.grad_accum
    for fewer in range(accum - 1, 0, -1):
        instead = (("train.grad_accum", fewer),)
        if run.train.global_batch % fewer == 0 and not check(with_overrides(run, instead)):
            yield Saving(f"train.grad_accum={accum}", instead, f"at {fewer}")
            return
