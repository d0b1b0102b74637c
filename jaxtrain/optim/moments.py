"""Choose the tensors with 8-bit moments of Adam, the dimension that is cut into blocks, and the size of the blocks.

The blocks depend on the tensor and not on the mesh, so a checkpoint has the same values on every mesh. Blocks are cut along a
dimension that fsdp does not shard.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxtrain.config.schema import Dtypes, Optimizer, Problem
from jaxtrain.optim import groups

INT8 = "int8"
MAX_BLOCK = 256  # values that share a scale, at most; as Dettmers et al. 2023 (bitsandbytes from 0.38 on)
MIN_BLOCK = 16  # smaller blocks would need a 4-byte scale for 8 or fewer 1-byte codes
MIN_ELEMENTS = 4096  # tensors of fewer elements stay in float32 (Dettmers et al. 2022, arXiv:2110.02861, section 3)
# Axes without blocks. Tensors with the axis VOCAB_AXIS stay in float32: embeddings as in the paper (its "stable embedding
# layer"), and the head, whose rows of rare tokens also have gradients of another size. Axes in UNBLOCKED_AXES either are
# sharded by fsdp, into shards that shrink as the mesh grows, or count matrices.
VOCAB_AXIS, UNBLOCKED_AXES = "vocab", ("embed", "expert_embed", "experts")
MAX_BF16_BETA2 = 0.98  # decay of a second moment in bfloat16, up to which updates are accurate to 1%


def block_size(size: int) -> int:
    """Return the number of values in a block: the largest power of two that divides a dimension's size, at most MAX_BLOCK.

    Returns 0 if this number is below MIN_BLOCK.
    """
    divisor = min(size & -size, MAX_BLOCK)
    return divisor if divisor >= MIN_BLOCK else 0


def block_axis(axes: Sequence[str | None], shape: Sequence[int]) -> int | None:
    """Return the dimension along which a tensor's moments are cut into blocks; None for a tensor that stays in float32.

    Matrices with at least MIN_ELEMENTS elements a layer and without a vocabulary axis may have blocks. The result is their
    last dimension whose axis is not in UNBLOCKED_AXES and for whose size `block_size` is not 0. Without such a dimension the
    result is None.

    axes: logical axes of the parameter, including "layers" for a stack. shape: sizes of the same dimensions.
    """
    stacked = int(axes[0] == "layers")
    if len(axes) - stacked < 2 or VOCAB_AXIS in axes:
        return None
    if math.prod(shape[stacked:]) < MIN_ELEMENTS:
        return None
    usable = (d for d in reversed(range(stacked, len(axes))) if axes[d] not in UNBLOCKED_AXES and block_size(shape[d]))
    return next(usable, None)


def find_block_problems(
    optimizer: Optimizer, dtypes: Dtypes, matrices: Mapping[str, Mapping[str, int]], shards: Callable[[str], int]
) -> Iterable[Problem]:
    """Yield a problem if moments cannot be stored in 8-bit blocks, or none of them would be.

    Args:
      matrices: name of a matrix of the layers -> its logical axes, each with its length; empty with latent attention.
      shards: returns the number of shards of a logical axis. Each shard must have a whole number of blocks.
    """
    key = next((f"dtypes.{name}" for name in ("m", "v") if getattr(dtypes, name) == INT8), "")
    if not key or optimizer.name not in groups.METHODS:
        return
    if (
        optimizer.name == "muon"
        and dtypes.v == INT8
        and "adamw" not in dict(groups.optimizer_overrides(optimizer.groups)).values()
    ):
        rule = "blocks are for matrices of layers, which have no second moment with Muon"
        yield Problem("dtypes.v", INT8, rule, "Set f32 or bf16.")
        return
    if not matrices:
        yield Problem(key, INT8, "blocks are not supported for the weights of latent attention", "Set bf16.")
        return
    block_sizes: dict[tuple[str, int], int] = {}  # (logical axis, its length) -> block size
    for name, lengths in matrices.items():
        axes, shape = [*lengths], [*lengths.values()]
        dim = block_axis(axes, shape)
        if dim is not None:
            block_sizes[axes[dim], shape[dim]] = block_size(shape[dim])
        elif math.prod(shape[1:]) >= MIN_ELEMENTS:
            rule = f"no dimension of {name} divides into blocks of a power of two from {MIN_BLOCK} on"
            yield Problem(key, INT8, rule, "Set bf16, or model.head_dim and model.d_ff to multiples of 16.")
            return
    if not block_sizes:
        rule = f"no matrix of the layers has the {MIN_ELEMENTS} elements from which moments are stored in blocks"
        yield Problem(key, INT8, rule, "Set f32 or bf16.")
    for (axis, length), size in block_sizes.items():
        if length % (shards(axis) * size):
            rule = f"a block of {size} along {axis} = {length} would lie on two of its {shards(axis)} devices"
            yield Problem(key, INT8, rule, f"Set bf16, or mesh sizes whose product divides {length // size}.")


def find_decay_problems(optimizer: Optimizer, dtypes: Dtypes) -> Iterable[Problem]:
    """Yield a problem if Adam's second moment has too few bits for its slow decay.

    A step multiplies the moment by beta2 when gradients become small. bfloat16 has 8 significant bits and rounds to nearest,
    so it loses decreases of less than 2**-9 to 2**-8 of the value. The error of updates (root mean square over parameters) is
    0.2% at beta2 = 0.98, 1.4% at 0.99, and 14% at 0.995. From 0.998 on, the moment never decreases, and the error is half or
    more (test_optimizer_steps.py).
    """
    if dtypes.v == "bf16" and optimizer.name in groups.METHODS and optimizer.beta2 > MAX_BF16_BETA2:
        rule = f"rounds away the decay of optimizer.beta2 = {optimizer.beta2:g}, so the second moment hardly decays"
        yield Problem("dtypes.v", "bf16", rule, "Set f32.")
