"""The layouts of --meshes, and their problems. Imports no jax.

An item such as `fsdp4xtensor2/sharding.zero=1/remat.policy=full` has a mesh and further keys of the config. Axes
without a size have size 1. `one` is a single device.
"""

import dataclasses
import fnmatch
import math
import re
from collections import Counter
from collections.abc import Sequence

from jaxtrain.config import hardware
from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import (
    MESH_AXES,
    OPTIONAL_AXES,
    Dtypes,
    Model,
    Problem,
    RunConfig,
    Train,
    from_dict,
    suggest,
    to_dict,
)
from jaxtrain.data import loading, opening
from jaxtrain.models import FAMILIES, flops
from jaxtrain.optim.groups import METHODS
from jaxtrain.optim.moments import INT8
from jaxtrain.step.resume import EXPERT_LOSSES
from jaxtrain.step.validate import validate_step

DEFAULT = "one,data8,fsdp8,data2xfsdp4,fsdp4xtensor2,data2xfsdp2xtensor2,fsdp4xseq2,fsdp2xtensor2xseq2"
# Further defaults: for several microbatches, for a model with experts, for both.
STAGES = "stage2xfsdp4,stage2xfsdp2xtensor2"
EXPERTS = "fsdp4xexpert2,fsdp2xexpert2xtensor2"
BOTH = "stage2xfsdp2xexpert2"
# Keys that a layout may set: the same step in another layout or order, and stored types.
KEYS = (
    *("sharding.*", "attention.impl", "parallel.*", "remat.*", "dtypes.*", "compiler.*", "pipeline.*", "moe.impl"),
    *("train.grad_accum", "train.accumulate", "loss.chunk"),
)
FORM = "one, or axes with their sizes joined by x, such as fsdp4xtensor2, and further keys, as in fsdp8/sharding.zero=1"
FLOAT32 = (
    "precision=f32",
    "fp8.exclude=",
    "attention.forward=compute",
    *(f"dtypes.{name}=f32" for name in ("params", "m", "v", "grads", "reduce")),
)


@dataclasses.dataclass(frozen=True)
class ParityLayout:
    """One item of --meshes: a mesh and overrides of the config."""

    name: str
    mesh: tuple[tuple[str, int], ...]  # (axis, size) of every axis
    overrides: tuple[str, ...]  # "sharding.zero=1"

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def sizes(self) -> dict[str, int]:
        """Return axis -> size of the mesh, without the axes of OPTIONAL_AXES that have size 1."""
        return {axis: size for axis, size in self.mesh if size > 1 or axis not in OPTIONAL_AXES}

    @property
    def argv(self) -> list[str]:
        """Return the layout as overrides of a config on the command line."""
        return [f"--config.mesh.{axis}={size}" for axis, size in self.mesh] + [f"--config.{o}" for o in self.overrides]


def default_layouts(train: Train, model: Model) -> str:
    """Return the default of --meshes. It adds stages for several microbatches, and an expert axis for experts."""
    staged, experts = train.grad_accum > 1 and model.num_layers > 1, model.num_experts > 0
    return ",".join([DEFAULT, *[STAGES] * staged, *[EXPERTS] * experts, *[BOTH] * (staged and experts)])


def parse_layouts(text: str) -> tuple[list[ParityLayout], list[Problem]]:
    """Parse --meshes: return the layouts of its valid items, and the problems of all other items."""
    layouts, problems = [], []
    # Values may contain commas and slashes. A comma begins a new item unless a word and = follow. A slash begins a new key if a
    # word, which may have dots, and = follow.
    for item in re.split(r",(?!\w+=)", text):
        mesh, *overrides = re.split(r"/(?=[\w.]+=)", item.strip())
        sizes, errors = _sizes(mesh)
        before = len(problems)
        problems += [Problem("--meshes", item, *w) for w in errors]
        for override in overrides:
            key = override.partition("=")[0]
            if key.startswith("mesh."):
                problems.append(
                    Problem("--meshes", item, f"{key} belongs to the mesh, at the beginning of the item", f"Write {FORM}.")
                )
            elif not any(fnmatch.fnmatchcase(key, pattern) for pattern in KEYS):
                rule = f"{key} changes the result of a step, so that layouts could not be compared"
                problems.append(Problem("--meshes", item, rule, f"Set it for all layouts, as --config.{override}."))
        if len(problems) == before:
            layouts.append(
                ParityLayout(item.strip(), tuple({axis: sizes.get(axis, 1) for axis in MESH_AXES}.items()), tuple(overrides))
            )
    return layouts, problems


def _sizes(mesh: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return axis -> size of a mesh such as `fsdp4xtensor2`, and (rule, fix) of its first mistake, if any."""
    if mesh == "one":
        return {}, []
    sizes: dict[str, int] = {}
    for token in re.split(r"(?<=\d)x", mesh):
        form = re.fullmatch(r"([A-Za-z_]+)(\d+)", token)
        if not form:
            return {}, [(f"{token!r} is no axis with its size", f"Write {FORM}.")]
        axis, size = form[1], int(form[2])
        if axis not in MESH_AXES:
            return {}, [(f"no mesh axis {axis!r}", suggest(axis, list(MESH_AXES)))]
        if axis in sizes or size < 1:
            return {}, [(f"{axis} {'twice' if axis in sizes else 'of size 0'}", "Name each axis once, with a size above 0.")]
        sizes[axis] = size
    return sizes, []


def load_layout(layout: ParityLayout, argv: Sequence[str], *more: str) -> tuple[RunConfig, list[Problem]]:
    """Return the config with a layout's mesh and overrides, and its problems on the layout's number of devices.

    Args:
      argv: config file and overrides of the command line.
      more: overrides that are set last.
    """
    loaded = loading.load_config([*argv, *layout.argv, *(f"--config.{m}" for m in more)])
    if not loaded.file_read:
        return loaded.run, loaded.problems
    return loaded.run, [*loaded.problems, *validate_step(loaded.run, find_devices(layout.devices, f"--meshes={layout.name}"))]


def load_layouts(
    layouts: Sequence[ParityLayout], argv: Sequence[str], more: Sequence[str] = (), leave_out: bool = False
) -> tuple[list[tuple[ParityLayout, RunConfig]], list[str], list[Problem]]:
    """Return (layout, config) of each layout; a line for each layout that was left out; the problems of the others.

    Args:
      argv, more: as for `load_layout`.
      leave_out: whether layouts with problems are left out, if there are two without.
    """
    loaded = [(layout, *load_layout(layout, argv, *more)) for layout in layouts]
    valid = [item for item in loaded if not item[2]]
    lines = []
    if leave_out and len(valid) > 1:
        lines = [f"left out: {layout.name}: {layout_problems[0]}" for layout, _, layout_problems in loaded if layout_problems]
        loaded = valid
    problems = merge_problems([(layout.name, layout_problems) for layout, _, layout_problems in loaded])
    if loaded and not problems:
        problems = find_problems([run for _, run, _ in loaded], [layout for layout, _, _ in loaded])
    return [(layout, run) for layout, run, _ in loaded], lines, problems


def find_devices(count: int, source: str = "") -> Devices:
    """Return `count` devices: GPUs if this machine has enough, else CPU devices, of which JAX makes any number.

    If the GPUs cannot be used, return them with the reason in `problem`.
    """
    probed = hardware.probe()
    if probed.problem:
        return probed  # GPUs that cannot be used are an error, not a reason to compare on CPUs
    if probed.kind == "gpu" and probed.count >= count:
        return dataclasses.replace(probed, count=count, source=source or probed.source)
    return Devices("cpu", "cpu", count, hardware.available_gib() / count, source or "CPU devices")


def to_float32(run: RunConfig) -> RunConfig:
    """Return the run with every dtype float32, and with `auto` in place of kernels without float32: cudnn and pallas."""
    tree = to_dict(run)
    tree["precision"] = "f32"
    tree["fp8"]["exclude"], tree["attention"]["forward"] = "", "compute"
    tree["dtypes"] = dict.fromkeys(tree["dtypes"], "f32")
    for section in ("attention", "moe"):
        if tree[section]["impl"] in ("cudnn", "pallas"):
            tree[section]["impl"] = "auto"
    changed, problems = from_dict(tree)
    if problems:
        raise ValueError(f"a resolved config does not resolve: {problems}")
    return changed


def merge_problems(layout_problems: Sequence[tuple[str, Sequence[Problem]]]) -> list[Problem]:
    """Return the problems of several layouts: each problem once if all layouts share it, else with each layout's name."""
    counts = Counter(str(p) for _, problems in layout_problems for p in {str(p): p for p in problems}.values())
    out: dict[str, Problem] = {}
    for name, problems in layout_problems:
        for p in problems:
            shared = counts[str(p)] == len(layout_problems)
            key = p.key if shared or name in str(p) else f"--meshes={name}: {p.key}"
            problem = dataclasses.replace(p, key=key)
            out[str(problem)] = problem
    return list(out.values())


def find_problems(runs: Sequence[RunConfig], layouts: Sequence[ParityLayout]) -> list[Problem]:
    """Return the reasons why these valid runs cannot be compared: data, optimizer, experts, memory."""
    run = runs[0]
    data = dataclasses.replace(run.data, eval_source="")
    problems = opening.check_data(data, run.model.vocab_size, False, run.loss, bool(run.init.from_))
    if run.optimizer.name not in METHODS:
        rule = "gradients are read from Adam's first moment, or Muon's momentum"
        problems.append(Problem("optimizer.name", run.optimizer.name, rule, "Set adamw: the gradients are the same."))
    if any(r.dtypes.m == INT8 for r in runs):
        rule = "gradients are read from Adam's first moment, and its rounding would hide differences"
        problems.append(Problem("dtypes.m", INT8, rule, "Set f32: the gradients are the same."))
    if run.model.num_experts and run.moe.capacity_factor:
        rule = "each device drops the excess of its own tokens, so a layout changes the result"
        problems.append(Problem("moe.capacity_factor", run.moe.capacity_factor, rule, "Set 0."))
    accums = sorted({r.train.grad_accum for r in runs})
    rule = f"is of a microbatch, and these layouts divide a batch into {' and '.join(map(str, accums))}"
    for name in EXPERT_LOSSES if run.model.num_experts and len(accums) > 1 else ():
        if factor := getattr(run.moe, name):
            problems.append(Problem(f"moe.{name}", factor, rule, "Set 0, or one train.grad_accum for all."))
    return problems + check_size(run.model, run.dtypes, layouts)


def check_size(model: Model, dtypes: Dtypes, layouts: Sequence[ParityLayout]) -> list[Problem]:
    """Return a problem if the comparison of these layouts needs more host memory than is available, else []."""
    if model.family not in FAMILIES:
        return []
    count = flops.parameters(model)["total"]
    width = {"f32": 4, "bf16": 2, INT8: 1}
    state = sum(width.get(getattr(dtypes, name), 4) for name in ("params", "m", "v"))
    on_cpu = find_devices(max(layout.devices for layout in layouts)).kind == "cpu"
    # CPU devices share one memory, with a state for each index of `data`; 4 bytes are a gradient. The host has the weights
    # twice and a gradient once, for two runs.
    copies = max(dict(layout.mesh)["data"] for layout in layouts) if on_cpu else 0
    need = count * (copies * (state + 4) + 6 * 4) / 2**30
    if need <= hardware.available_gib():
        return []
    rule = f"{count / 1e9:.1f} billion parameters: these layouts need at least {need:,.0f} GiB, this machine has "
    rule += f"{hardware.available_gib():,.0f} GiB available"
    fix = "Compare a smaller one: --config.model.num_layers=2, then model.vocab_size, model.d_model, model.d_ff"
    return [Problem("model", None, rule, f"{fix}; layouts do not depend on size.")]
