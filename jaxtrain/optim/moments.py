"""Choose the tensors with 8-bit moments of Adam, the dimension that is cut into blocks, and the size of the blocks.

The blocks depend on the tensor and not on the mesh, so a checkpoint has the same values on every mesh. Blocks are cut along a
dimension that fsdp does not shard.
"""

from collections.abc import Sequence

INT8 = "int8"
BLOCK = 256  # values that share a scale, at most; as Dettmers et al. 2023 (bitsandbytes from 0.38 on)
SMALLEST_BLOCK = 16  # smaller blocks would need a 4-byte scale for 8 or fewer 1-byte codes
SMALL = 4096  # tensors of fewer elements stay in float32 (Dettmers et al. 2022, arXiv:2110.02861, section 3)
# Axes without blocks. Tensors with the axis WIDE stay in float32: embeddings as in the paper (its "stable embedding layer"),
# and the head, whose rows of rare tokens also have gradients of another size. Axes in SPLIT either are sharded by fsdp, into
# shards that shrink as the mesh grows, or count matrices.
WIDE, SPLIT = "vocab", ("embed", "expert_embed", "experts")


def block(size: int) -> int:
    """Return the number of values in a block: the largest power of two that divides a dimension's size, at most BLOCK.

    Returns 0 if this number is below SMALLEST_BLOCK.
    """
    most = min(size & -size, BLOCK)
    return most if most >= SMALLEST_BLOCK else 0


def block_axis(axes: Sequence[str | None], shape: Sequence[int]) -> int | None:
    """Return the dimension along which a tensor's moments are cut into blocks; None for a tensor that stays in float32.

    Matrices with at least SMALL elements a layer and without a vocabulary axis may have blocks. The result is their last
    dimension whose axis is not in SPLIT and for whose size `block` is not 0. Without such a dimension the result is None.

    axes: logical axes of the parameter, including "layers" for a stack. shape: sizes of the same dimensions.
    """
    stacked = int(axes[0] == "layers")
    if len(axes) - stacked < 2 or WIDE in axes:
        return None
    elements = 1
    for size in shape[stacked:]:
        elements *= size
    if elements < SMALL:
        return None
    usable = (d for d in reversed(range(stacked, len(axes))) if axes[d] not in SPLIT and block(shape[d]))
    return next(usable, None)
