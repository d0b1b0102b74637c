"""Check the keys and the mesh of a model with experts."""

import fnmatch
from collections.abc import Iterable, Mapping

from jaxtrain.config.layout import Layout
from jaxtrain.config.schema import EXPERT_AXIS, FIT, Problem, RunConfig, split_items
from jaxtrain.kernels.attention import Hardware
from jaxtrain.kernels.experts import support
from jaxtrain.models import FAMILIES
from jaxtrain.models.precision import EXPERTS, fp8_weight_names, matmul_weights

ROUTER = "layers.mlp.router"


def check_experts(run: RunConfig, hardware: Hardware | None, layout: Layout, bad: set[str]) -> Iterable[Problem]:
    """Yield the problems of a model with experts.

    hardware: None if unknown. bad: keys that have an invalid value.
    """
    m, ranks = run.model, layout.size(EXPERT_AXIS)
    if "model.num_experts" in bad:
        return
    if ranks > 1:
        yield from _expert_axis(m.num_experts, ranks, dict(run.sharding.rules), layout)
    if not m.num_experts:
        return
    frozen = run.lora.rank > 0 or any(fnmatch.fnmatchcase(ROUTER, pattern) for pattern in split_items(run.train.freeze))
    if m.renormalize and m.experts_per_token == 1 < m.num_experts and not frozen:
        rule = "one score divided by itself is 1, so with model.experts_per_token = 1 the router gets no gradient from the loss"
        yield Problem("model.renormalize", True, rule, f"Set false, or keep the router as it is: train.freeze={ROUTER}.")
    if not hardware:
        return
    yield from support.matmul_problems(run.moe.impl, hardware, exact=run.precision == "f32")
    even = run.moe.capacity_factor or support.single_expert(run.moe.impl, m.num_experts, ranks)
    # Weights of a family from outside the package have names only after the model is built.
    if m.family in FAMILIES and not even and m.num_experts % ranks == 0:
        weights = EXPERTS & fp8_weight_names(run.precision, run.fp8.exclude, matmul_weights(m))[0]
        names = sorted(name.removeprefix("layers.") for name in weights)
        names = [*split_items(run.fp8.exclude), *names] if names else []
        yield from support.matmul_fp8_problems(run.moe.impl, hardware, names, m.num_experts)


def _expert_axis(experts: int, ranks: int, rules: Mapping[str, str], layout: Layout) -> Iterable[Problem]:
    if not experts:
        yield Problem("mesh.expert", ranks, "shards experts, and model.num_experts = 0", "Set 1, or model.num_experts.")
        return
    if experts % ranks:
        rule = f"does not divide over mesh.expert = {ranks}"
        yield Problem("model.num_experts", experts, rule, f"{FIT}make mesh.expert a divisor.")
    if EXPERT_AXIS not in layout.mesh_axes("experts"):
        rule = f"does not name it, and mesh.expert = {ranks} shards only experts and the batch"
        yield Problem("sharding.rules.experts", rules["experts"], rule, "Name expert first, or set mesh.expert to 1.")
    if EXPERT_AXIS in rules["expert_embed"].split("+"):
        rule = "names mesh axis 'expert', which shards the experts themselves"
        yield Problem("sharding.rules.expert_embed", rules["expert_embed"], rule, "Leave expert to sharding.rules.experts.")
    if EXPERT_AXIS not in layout.mesh_axes("batch"):
        rule = "leaves out mesh axis 'expert': its devices must have different tokens"
        yield Problem("sharding.rules.batch", rules["batch"], rule, "Add expert.")
