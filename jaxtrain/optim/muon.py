"""Muon: orthogonalized momentum, matrix by matrix (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

The momentum of a matrix is U S V^T. The update is about U V^T, computed by five Newton-Schulz iterations, which are matmuls.
The update is scaled to a root mean square of 0.2, like AdamW's updates (Liu et al. 2025, arXiv:2502.16982, section 2.2). So
Muon and AdamW share one learning rate and one weight decay.

Orthogonalization needs complete matrices, and weights are sharded. So an all-to-all over the n devices that shard the matrices
of a stack exchanges shards for complete matrices: each device receives 1 / n of the matrices. The device orthogonalizes these,
and another all-to-all returns the shards. A device holds as many elements as before the exchange, and no work is repeated,
except for padding to a multiple of n. optax's own Muon (optax.contrib.muon) multiplies in float32, leaves the sharding to XLA,
and keeps its coefficients in the state.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.shapes import STACK
from jaxtrain.kernels.dot import einsum
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.sharding import Axes, Placement

# x -> a x + b x^3 + c x^5 on singular values, five times (Jordan et al.): [0.005, 1] is mapped into [0.68, 1.16].
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
RMS = 0.2
MAX_ELEMENTS = 1 << 26  # elements that a device orthogonalizes at one time: enough to fill a GPU, even with small matrices
HEAD_DIM = "head_dim"

Orthogonalizer = Callable[[jax.Array, Axes], jax.Array]  # (an update, its logical axes) -> the update, orthogonalized


def matrix_dims(axes: Axes) -> tuple[int, int]:
    """Return (number of leading dimensions, number of row dimensions) of a weight. The remaining dimensions are the columns.

    Leading dimensions (layers, experts) count matrices. "heads" and "head_dim" together are the rows or the columns: (layers,
    embed, heads, head_dim) is a stack of matrices (embed, heads x head_dim). (0, 0): the weight is not a matrix.
    """
    sizes: list[int] = []
    for i, axis in enumerate(axes):
        if axis == HEAD_DIM and i and axes[i - 1] != STACK:
            sizes[-1] += 1
        else:
            sizes.append(1)
    if len(sizes) - (STACK in axes) < 2:
        return 0, 0
    return sum(sizes[:-2]), sizes[-2]


def newton_schulz(x_SMN: jax.Array, numerics: Numerics) -> jax.Array:
    """Orthogonalize each matrix of a stack approximately, and return the stack in the compute dtype. Zeros stay zeros.

    Matmuls have inputs and results in the compute dtype (bfloat16 in a bf16 run, as published), and sum in float32.
    """
    x = x_SMN.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True))
    x = (x / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)).astype(numerics.compute)
    # x^T x and x x^T give the same result; the smaller of the two is cheaper.
    wide = x.shape[1] <= x.shape[2]
    gram, times = ("SMN,SKN->SMK", "SMK,SKN->SMN") if wide else ("SNM,SNK->SMK", "SNK,SKM->SNM")

    def weighted_sum(*terms: tuple[float, jax.Array]) -> jax.Array:
        return sum(factor * term.astype(jnp.float32) for factor, term in terms).astype(numerics.compute)  # pyright: ignore

    for _ in range(ITERATIONS):
        square = einsum(gram, x, x, numerics=numerics)
        fourth = einsum("SMK,SKN->SMN", square, square, numerics=numerics)
        factor = weighted_sum((B, square), (C, fourth))
        product = einsum(times, *((factor, x) if wide else (x, factor)), numerics=numerics)
        x = weighted_sum((A, x), (1.0, product))
    return x


def make_orthogonalizer(placement: Placement | None, numerics: Numerics) -> Orthogonalizer:
    """Return the function (a parameter's momentum, its logical axes) -> the parameter's update, with root mean square RMS.

    Momentum and update are f32, both sharded by the logical axes.

    placement: the placement of the parameters; None if all arrays are on one device.
    """

    def orthogonalize_stack(x: jax.Array, axes: Axes) -> jax.Array:
        leading, rows = matrix_dims(axes)
        shape = x.shape
        matrix = (math.prod(shape[leading : leading + rows]), math.prod(shape[leading + rows :]))
        x_SMN = x.reshape(-1, *matrix)
        # A loop limits memory: XLA would process all parameters at once, and keep the results of five iterations of each.
        max_chunk = max(1, MAX_ELEMENTS // math.prod(matrix))
        chunk_size = max(n for n in range(1, x_SMN.shape[0] + 1) if x_SMN.shape[0] % n == 0 and n <= max_chunk)
        orthogonalized = jax.lax.map(lambda chunk: newton_schulz(chunk, numerics), x_SMN.reshape(-1, chunk_size, *matrix))
        return orthogonalized.reshape(shape)

    def update(x: jax.Array, axes: Axes) -> jax.Array:
        leading, rows = matrix_dims(axes)
        longest = max(math.prod(x.shape[leading : leading + rows]), math.prod(x.shape[leading + rows :]))
        with jax.named_scope("newton_schulz"):
            momentum = x.astype(numerics.compute)
            if placement is None or placement.mesh.size == 1:
                orthogonalized = orthogonalize_stack(momentum, axes)
            else:
                orthogonalized = _orthogonalize_sharded(momentum, axes, placement, orthogonalize_stack)
            return orthogonalized.astype(jnp.float32) * (RMS * math.sqrt(longest))

    return update


def _orthogonalize_sharded(x: jax.Array, axes: Axes, placement: Placement, orthogonalize_stack: Orthogonalizer) -> jax.Array:
    """Apply `orthogonalize_stack`, which needs complete matrices, to a stack of matrices that are sharded over devices."""
    leading = matrix_dims(axes)[0]
    stack_axes = {a for axis in axes[:leading] for a in placement.mesh_axes(axis)}
    matrix_axes = {
        dim: placement.mesh_axes(axis) for dim, axis in enumerate(axes) if dim >= leading and placement.mesh_axes(axis)
    }
    sharded_axes = stack_axes.union(*matrix_axes.values())
    replica_axes = tuple(a for a, size in placement.mesh.shape.items() if size > 1 and a not in sharded_axes)
    num_shards, num_replicas = (placement.size(names) for names in ([a for d in matrix_axes.values() for a in d], replica_axes))

    def pad(x: jax.Array, unit: int) -> jax.Array:
        return jnp.pad(x, [(0, -x.shape[0] % unit), *[(0, 0)] * (x.ndim - 1)])

    def orthogonalize_shard(x: jax.Array) -> jax.Array:
        local_shape = x.shape
        # The first dimension counts matrices; all others are dimensions of a matrix.
        x = x.reshape(-1, *local_shape[leading:])
        count = x.shape[0]
        x = pad(x, num_shards)
        for dim, names in matrix_axes.items():
            x = jax.lax.all_to_all(x, names, split_axis=0, concat_axis=dim - leading + 1, tiled=True)
        num_local = x.shape[0]
        if replica_axes:  # replicas have equal data, so each processes a part
            x = pad(x, num_replicas)
            per_replica = x.shape[0] // num_replicas
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(replica_axes) * per_replica, per_replica)
        x = orthogonalize_stack(x, (STACK, *axes[leading:]))
        if replica_axes:
            x = jax.lax.all_gather(x, replica_axes, tiled=True)[:num_local]
        for dim, names in reversed(matrix_axes.items()):
            x = jax.lax.all_to_all(x, names, split_axis=dim - leading + 1, concat_axis=0, tiled=True)
        return x[:count].reshape(local_shape)

    spec = placement.spec(axes)
    # The replication checker cannot infer that a gather from all replicas is equal on all of them.
    return jax.shard_map(orthogonalize_shard, mesh=placement.mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def scale_by_muon(
    adam: optax.GradientTransformation,
    momentum: float,
    is_hidden: Callable[[object], bool],
    orthogonalize: Callable[..., jax.Array],
) -> optax.GradientTransformation:
    """Return the transformation that is Muon for hidden matrices, and `adam` (optax's Adam) for other parameters.

    The state is Adam's, in float32. Hidden matrices have their momentum as first moment, and no second moment. The momentum is
    m' = beta m + (1 - beta) g. The direction that is orthogonalized is Nesterov's, beta m' + (1 - beta) g. A constant factor
    of the direction has no effect.

    Args:
      adam: optax's Adam.
      momentum: beta.
      is_hidden: returns whether Muon updates the matrix at a path in the tree of parameters.
      orthogonalize: returns the update of a hidden matrix, from (path, direction).
    """

    def mask_hidden(tree: optax.Params) -> optax.Params:
        return jax.tree_util.tree_map_with_path(lambda path, x: optax.MaskedNode() if is_hidden(path) else x, tree)

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        # `adam.init` runs twice, because optax also calls this function with a placeholder for all parameters.
        return optax.ScaleByAdamState(adam.init(params).count, adam.init(params).mu, adam.init(mask_hidden(params)).nu)  # pyright: ignore

    def update(grads: optax.Updates, state: optax.ScaleByAdamState, params: optax.Params | None = None):
        adam_state = optax.ScaleByAdamState(state.count, mask_hidden(state.mu), state.nu)
        updates, adam_state = adam.update(mask_hidden(grads), adam_state)

        def update_momentum(path, grad, m, adam_mu):
            return momentum * m + (1 - momentum) * grad if is_hidden(path) else adam_mu

        mu = jax.tree_util.tree_map_with_path(update_momentum, grads, state.mu, adam_state.mu)  # pyright: ignore

        def muon_update(path, grad, m, adam_update):
            return orthogonalize(path, momentum * m + (1 - momentum) * grad) if is_hidden(path) else adam_update

        updates = jax.tree_util.tree_map_with_path(muon_update, grads, mu, updates)
        return updates, optax.ScaleByAdamState(adam_state.count, mu, adam_state.nu)  # pyright: ignore

    return optax.GradientTransformation(init, update)  # pyright: ignore
