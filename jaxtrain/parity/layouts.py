"""Layouts as a command line names them, and all that can be wrong with them. No jax.

`fsdp4xtensor2/sharding.zero=1/remat.policy=full` is a mesh, every axis not named being 1, and further keys of the config. `one`
is a single device.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence

from jaxtrain import flops, hardware, launch
from jaxtrain.config import MESH_AXES, OPTIONAL_AXES, Problem, RunConfig, flatten, from_dict, nearest, to_dict
from jaxtrain.data import pipeline
from jaxtrain.hardware import Devices
from jaxtrain.models import FAMILIES
from jaxtrain.optim.groups import METHODS
from jaxtrain.optim.moments import INT8
from jaxtrain.resume import LAYOUT, effect
from jaxtrain.validate import validate_step

DEFAULT = "one,data8,fsdp8,data2xfsdp4,fsdp4xtensor2,data2xfsdp2xtensor2,fsdp4xseq2,fsdp2xtensor2xseq2"
# What is tried besides, where a step has several microbatches, and where a model has experts.
STAGES = "stage2xfsdp4,stage2xfsdp2xtensor2"
EXPERTS = "fsdp4xexpert2,fsdp2xexpert2xtensor2"
BOTH = "stage2xfsdp2xexpert2"
FORM = "one, or axes with their sizes joined by x, such as fsdp4xtensor2, and further keys, as in fsdp8/sharding.zero=1"
FLOAT32 = ("precision=f32", "fp8.exclude=", *(f"dtypes.{name}=f32" for name in ("params", "m", "v", "grads", "reduce")))


@dataclasses.dataclass(frozen=True)
class Layout:
    """One item of --meshes."""

    name: str
    mesh: tuple[tuple[str, int], ...]  # every axis
    overrides: tuple[str, ...]  # "sharding.zero=1"

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def shown(self) -> dict[str, int]:
        """The mesh without optional axes of size 1."""
        return {axis: size for axis, size in self.mesh if size > 1 or axis not in OPTIONAL_AXES}

    @property
    def argv(self) -> list[str]:
        """As overrides of a config on the command line."""
        return [f"--config.mesh.{axis}={size}" for axis, size in self.mesh] + [f"--config.{o}" for o in self.overrides]


def default(run: RunConfig) -> str:
    """The layouts that are tried where --meshes names none."""
    staged, experts = run.train.grad_accum > 1 and run.model.num_layers > 1, run.model.num_experts > 0
    return ",".join([DEFAULT, *[STAGES] * staged, *[EXPERTS] * experts, *[BOTH] * (staged and experts)])


def parse(text: str) -> tuple[list[Layout], list[Problem]]:
    """The items of --meshes, those that are layouts, and what is wrong with the others."""
    layouts, problems = [], []
    # Values may hold commas and slashes: a new item has no = before its first slash, a new key has dots and one after it.
    for item in re.split(r",(?!\w+=)", text):
        mesh, *overrides = re.split(r"/(?=[\w.]+=)", item.strip())
        sizes, wrong = _sizes(mesh)
        before = len(problems)
        problems += [Problem("--meshes", item, *w) for w in wrong]
        for override in overrides:
            key = override.partition("=")[0]
            if key.startswith("mesh."):
                problems.append(Problem("--meshes", item, f"{key} is what the item begins with", f"Write {FORM}."))
            elif effect(key) != LAYOUT and not key.startswith("dtypes."):
                rule = f"{key} changes what a step computes, so that its layout could not be compared"
                problems.append(Problem("--meshes", item, rule, f"Set it for all layouts, as --config.{override}."))
        if len(problems) == before:
            layouts.append(
                Layout(item.strip(), tuple({axis: sizes.get(axis, 1) for axis in MESH_AXES}.items()), tuple(overrides))
            )
    return layouts, problems


def _sizes(mesh: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Axis -> size of `fsdp4xtensor2`, and (rule, remedy) of each mistake."""
    if mesh == "one":
        return {}, []
    sizes: dict[str, int] = {}
    for part in re.split(r"(?<=\d)x", mesh):
        form = re.fullmatch(r"([A-Za-z_]+)(\d+)", part)
        if not form:
            return {}, [(f"{part!r} is no axis with its size", f"Write {FORM}.")]
        axis, size = form[1], int(form[2])
        if axis not in MESH_AXES:
            return {}, [(f"no mesh axis {axis!r}", nearest(axis, list(MESH_AXES)))]
        if axis in sizes or size < 1:
            return {}, [(f"{axis} {'twice' if axis in sizes else 'of size 0'}", "Name each axis once, with a size above 0.")]
        sizes[axis] = size
    return sizes, []


def load(layout: Layout, argv: Sequence[str], *more: str) -> tuple[RunConfig, list[Problem]]:
    """The config in a layout: of the command line `argv` (config file and overrides only), with `more` set last.

    Problems are those that the config has on as many devices as the layout has.
    """
    loaded = launch.load([*argv, *layout.argv, *(f"--config.{m}" for m in more)])
    if not loaded.file_read:
        return loaded.run, loaded.problems
    return loaded.run, [*loaded.problems, *validate_step(loaded.run, devices(layout.devices, f"--meshes={layout.name}"))]


def devices(count: int, source: str = "") -> Devices:
    """`count` devices: of the GPUs here, where there are as many, else CPU devices, of which there can be any number."""
    found = hardware.probe()
    if found.problem:
        return found  # GPUs are there and cannot be used: that is refused, and not compared on CPUs instead
    if found.kind == "gpu" and found.count >= count:
        return dataclasses.replace(found, count=count, source=source or found.source)
    return Devices("cpu", "cpu", count, hardware.available_gib() / count, source or "CPU devices")


def in_float32(run: RunConfig) -> RunConfig:
    """The same run with every type float32, by whatever attention kernel has it."""
    tree = to_dict(run)
    tree["precision"] = "f32"
    tree["fp8"]["exclude"] = ""
    tree["dtypes"] = dict.fromkeys(tree["dtypes"], "f32")
    if run.attention.impl == "cudnn":
        tree["attention"]["impl"] = "auto"
    changed, problems = from_dict(tree)
    if problems:
        raise ValueError(f"a resolved config does not resolve: {problems}")
    return changed


def together(named: Sequence[tuple[str, Sequence[Problem]]]) -> list[Problem]:
    """Problems of several layouts: those of all once, the others each with the layouts that have them."""
    seen = Counter(str(p) for _, problems in named for p in {str(p): p for p in problems}.values())
    out: dict[str, Problem] = {}
    for name, problems in named:
        for p in problems:
            shared = seen[str(p)] == len(named)
            key = p.key if shared or name in str(p) else f"--meshes={name}: {p.key}"
            made = dataclasses.replace(p, key=key)
            out[str(made)] = made
    return list(out.values())


def check_size(run: RunConfig, layouts: Sequence[Layout]) -> list[Problem]:
    """What is wrong with a model whose state clearly exceeds this machine's memory, on the layout that holds most of it."""
    values = dict(flatten(to_dict(run)))
    if run.model.family not in FAMILIES:
        return []
    count = flops.parameters(run.model)["total"]
    width = {"f32": 4, "bf16": 2, INT8: 1}
    held = sum(width.get(values[f"dtypes.{name}"], 4) for name in ("params", "m", "v"))
    on_cpu = devices(max(layout.devices for layout in layouts)).kind == "cpu"
    # On CPU devices every group along `data` holds a state in the same memory; gradients come with the first step.
    copies = max(dict(layout.mesh)["data"] for layout in layouts) if on_cpu else 0
    need = count * (copies * (held + 4) + 6 * 4) / 2**30  # and weights twice and a gradient once on the host, of two runs
    if need <= hardware.available_gib():
        return []
    rule = f"{count / 1e9:.1f} billion parameters: these layouts need at least {need:,.0f} GiB, this machine has "
    rule += f"{hardware.available_gib():,.0f} GiB available"
    remedy = "Compare a smaller one: --config.model.num_layers=2, then model.vocab_size, model.d_model, model.d_ff"
    return [Problem("model", None, rule, f"{remedy}; layouts do not depend on size.")]


def check_moments(runs: Sequence[RunConfig]) -> list[Problem]:
    """8 bits of a first moment are too few to read gradients from."""
    rule = "gradients are read from Adam's first moment, and its rounding would hide what differs"
    return [Problem("dtypes.m", INT8, rule, "Set f32: the gradients are the same.")] * any(r.dtypes.m == INT8 for r in runs)


def check_experts(runs: Sequence[RunConfig]) -> list[Problem]:
    """What makes experts compute another function on another layout."""
    run, problems = runs[0], []
    if not run.model.num_experts:
        return []
    if run.experts.capacity:
        rule = "each device drops what is too many of its own tokens, so that a layout changes what is computed"
        problems.append(Problem("experts.capacity", run.experts.capacity, rule, "Set 0."))
    accums = sorted({r.train.grad_accum for r in runs})
    rule = f"is of a microbatch, and these layouts cut a batch into {' and '.join(map(str, accums))}"
    for name in ("balance_loss", "z_loss") if len(accums) > 1 else ():
        if factor := getattr(run.experts, name):
            problems.append(Problem(f"experts.{name}", factor, rule, "Set 0, or one train.grad_accum for all."))
    return problems


def check_data(run: RunConfig) -> list[Problem]:
    """What is wrong with a run's data, and with an optimizer whose gradients cannot be seen."""
    problems = pipeline.check(dataclasses.replace(run.data, eval_source=""), run.model.vocab_size, need_eval=False)
    if run.optimizer.name not in METHODS:
        rule = "gradients are read from Adam's first moment, or Muon's momentum"
        problems.append(Problem("optimizer.name", run.optimizer.name, rule, "Set adamw: the gradients are the same."))
    return problems
