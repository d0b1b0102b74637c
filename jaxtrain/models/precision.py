"""The matmuls that `precision=fp8` computes in 8 bits, and the devices that support them. Imports no jax."""

from collections.abc import Iterable, Sequence

from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import Mesh, Model, Moe, Problem, split_items, suggest
from jaxtrain.kernels.experts import support
from jaxtrain.models import flops

# Weights of a model with experts that have one matrix for each expert.
EXPERTS = frozenset(f"layers.mlp.{name}" for name in ("gate", "up", "down"))
SM = 89  # compute capability (times ten) from which GPUs multiply 8-bit floating point: Ada, Hopper, Blackwell


def has_uneven_experts(model: Model, moe: Moe, mesh: Mesh) -> bool:
    """Return whether the experts of a device may have different numbers of tokens.

    If so, the matmuls of their weights' gradients stay in bfloat16.
    """
    even = moe.capacity_factor or support.single_expert(moe.impl, model.num_experts, mesh.expert)
    return model.num_experts > 1 and not even


def matmul_weights(model: Model) -> tuple[str, ...]:
    """Return the names of a model's matmul weights, one name for all layers of a stack.

    The head, the router, and wa and wb of delta nets are left out.
    """
    return tuple(name for name in flops.by_weight(model) if not name.endswith((".mlp.router", ".delta.wa", ".delta.wb")))


def fp8_weight_names(precision: str, exclude: str, weights: Sequence[str]) -> tuple[frozenset[str], list[Problem]]:
    """Return the names of the weights whose matmuls are in 8 bits, and the problems of `fp8.exclude`.

    exclude: `fp8.exclude`. weights: names of all matmul weights, as from `matmul_weights`.

    An item of `fp8.exclude` is any part of a name between dots: wo, mlp.down, attention.
    """
    if precision != "fp8":
        return frozenset(), []
    if not weights:
        rule = "this model has no weight from param(..., dot=True)"
        return frozenset(), [
            Problem("precision", precision, rule, "Set precision to bf16, or create its weights with dot=True.")
        ]
    key, chosen, problems = "fp8.exclude", set(weights), []
    for item in split_items(exclude):
        matches = {name for name in weights if f".{item}." in f".{name}."}
        chosen -= matches
        if not matches and any(segment.isdigit() for segment in item.split(".")):
            rule = f"{item!r} names a layer by number, and all layers are run by the same code"
            problems.append(Problem(key, exclude, rule, "Name a weight or a block, which means that of every layer."))
        elif not matches:
            rule = f"no weight or block is named {item!r}"
            problems.append(Problem(key, exclude, rule, suggest(item.rpartition(".")[2], _name_segments(weights))))
    if not chosen and not problems:
        problems.append(Problem(key, exclude, "leaves no matmul in FP8", "Set precision to bf16, or name fewer."))
    return frozenset(chosen), problems


def _name_segments(names: Iterable[str]) -> list[str]:
    segments = [segment for name in names for segment in name.split(".")[1:]]
    return list(dict.fromkeys(segments))


def fp8_problems(precision: str, devices: Devices) -> list[Problem]:
    """Return a problem if precision is fp8 and the devices are GPUs that cannot multiply in 8 bits.

    CPUs emulate FP8 matmuls: they round to 8 bits as a GPU does, and multiply in bfloat16.
    """
    if precision != "fp8" or devices.kind != "gpu" or not 0 < devices.sm < SM:
        return []
    rule = f"FP8 needs a GPU of compute capability 8.9 or above (Ada, Hopper, Blackwell); {devices.name} has {devices.sm / 10}"
    return [Problem("precision", precision, rule, "Set precision to bf16.")]
