"""Check the keys and the mesh of a model with experts."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping

from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import EXPERT_AXIS, FIT, Model, Moe, Problem, RunConfig, parts_of, spelled_value
from jaxtrain.models import FAMILIES
from jaxtrain.models.precision import EXPERTS, eight_bit, matmuls

# Keys that are read only in a model with experts. Without experts, they must have their defaults.
OF_MODEL = (
    *("experts_per_token", "router", "renormalize", "router_bias", "router_logit_bias", "expert_bias", "shared_d_ff"),
    *("routed_scaling", "router_groups", "groups_per_token"),
)
ROUTER = "layers.mlp.router"
PALLAS_SM = 90  # compute capability (times ten) of the GPUs that the Pallas kernels run on


def check_experts(
    run: RunConfig, devices: Devices, sizes: Mapping[str, int], table: Mapping[str, list[str]], bad: set[str]
) -> Iterable[Problem]:
    """Yield the problems of a model with experts; in a model without experts, a problem for each key of experts that is set.

    sizes: sizes of the mesh axes. table: logical axis -> mesh axes of size above 1 that shard it. bad: keys that have an
    invalid value.
    """
    m = run.model
    if "model.num_experts" in bad:
        return
    if m.num_experts == 0:
        yield from _without(run, sizes)
        return
    frozen = run.lora.rank > 0 or any(fnmatch.fnmatchcase(ROUTER, pattern) for pattern in parts_of(run.train.freeze))
    if m.renormalize and m.experts_per_token == 1 < m.num_experts and not frozen:
        rule = "one score divided by itself is 1, so with model.experts_per_token = 1 the router gets no gradient from the loss"
        yield Problem("model.renormalize", True, rule, f"Set false, or keep the router as it is: train.freeze={ROUTER}.")
    ranks, rules = sizes[EXPERT_AXIS], dict(run.sharding.rules)
    if m.num_experts % ranks:
        rule = f"does not divide over mesh.expert = {ranks}"
        yield Problem("model.num_experts", m.num_experts, rule, f"{FIT}make mesh.expert a divisor.")
    if ranks > 1 and EXPERT_AXIS not in table["experts"]:
        rule = f"does not name it, and mesh.expert = {ranks} shards only experts and the batch"
        yield Problem("sharding.rules.experts", rules["experts"], rule, "Name expert first, or set mesh.expert to 1.")
    if ranks > 1 and EXPERT_AXIS in rules["expert_embed"].split("+"):
        rule = "names mesh axis 'expert', which shards the experts themselves"
        yield Problem("sharding.rules.expert_embed", rules["expert_embed"], rule, "Leave expert to sharding.rules.experts.")
    if ranks > 1 and EXPERT_AXIS not in table["batch"]:
        rule = "leaves out mesh axis 'expert': its devices must have different tokens"
        yield Problem("sharding.rules.batch", rules["batch"], rule, "Add expert.")
    if not m.router_bias and run.moe.bias_rate != Moe().bias_rate:
        rule = "is read only with model.router_bias"
        yield Problem("moe.bias_rate", run.moe.bias_rate, rule, f"Set {Moe().bias_rate:g}, or model.router_bias to true.")
    if run.moe.impl == "pallas":
        yield from _pallas(run, devices)
    yield from _fp8(run, devices, ranks)


def _pallas(run: RunConfig, devices: Devices) -> Iterable[Problem]:
    """Yield a problem if the Pallas kernels do not support the devices or the precision (kernels/experts/grouped.py)."""
    if devices.kind != "gpu":
        rule = f"the Pallas kernels need a GPU, and the run would be on {devices.name} ({devices.source})"
        yield Problem("moe.impl", "pallas", rule, "Set auto.")
    elif devices.sm not in (0, PALLAS_SM):
        rule = f"the Pallas kernels need Hopper's WGMMA (sm{PALLAS_SM}); {devices.name} is sm{devices.sm}"
        yield Problem("moe.impl", "pallas", rule, "Set auto.")
    if run.precision == "f32":
        yield Problem("moe.impl", "pallas", "the Pallas kernels have no float32", "Set auto, or precision to bf16.")


def _fp8(run: RunConfig, devices: Devices, ranks: int) -> Iterable[Problem]:
    """Yield a problem if experts need grouped matmuls in FP8 that moe.impl or the devices do not support."""
    wanted, alone = EXPERTS & eight_bit(run, matmuls(run.model))[0], ranks == run.model.num_experts
    # Weights of a family from outside the package have names only after the model is built.
    if not wanted or run.moe.capacity_factor or run.model.num_experts % ranks or run.model.family not in FAMILIES:
        return
    names = ",".join(sorted(name.removeprefix("layers.") for name in wanted))
    remedy = f"or moe.capacity_factor, or leave them in bfloat16: fp8.exclude={names}."
    if run.moe.impl == "ragged":
        rule = "moe.impl = ragged has no matmul in 8 bits"
        yield Problem("precision", run.precision, rule, f"Set moe.impl=auto, {remedy}")
    elif not alone and devices.kind == "gpu" and devices.sm not in (0, PALLAS_SM):
        rule = (
            f"only Hopper multiplies uneven numbers of rows of a device's experts in 8 bits; {devices.name} is sm{devices.sm}"
        )
        yield Problem("precision", run.precision, rule, f"Set mesh.expert={run.model.num_experts}, {remedy}")


def _without(run: RunConfig, sizes: Mapping[str, int]) -> Iterable[Problem]:
    if sizes["expert"] > 1:
        rule = "shards experts, and model.num_experts = 0"
        yield Problem("mesh.expert", run.mesh.expert, rule, "Set 1, or model.num_experts.")
    usual = [("model", run.model, Model(), OF_MODEL)]
    usual += [("moe", run.moe, Moe(), tuple(f.name for f in dataclasses.fields(Moe)))]
    for section, given, default, names in usual:
        for name in names:
            value = getattr(given, name)
            if value != getattr(default, name):
                rule = "is read only of a model with experts, and model.num_experts = 0"
                remedy = f"Set {spelled_value(getattr(default, name))}, or model.num_experts."
                yield Problem(f"{section}.{name}", value, rule, remedy)
