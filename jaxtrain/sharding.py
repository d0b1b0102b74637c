"""The device mesh, the rules that map logical axes onto it, and the collectives that weights need.

Every array has logical axis names ("batch", "embed", "heads", ...). `sharding.rules` maps them onto the mesh axes (data, fsdp,
tensor, seq; and stage and expert where they are used). A `Placement` is that map on a mesh.

Gradients are computed inside one `jax.shard_map` over the whole mesh (step/program.py). Inside it every array is this device's
local shard, and every collective is an explicit call. One rule holds: each device computes a partial loss, and the loss is the
sum of the partial losses of all devices. Autodiff then gives each device a partial gradient of every weight. The gradient of a
weight is the sum of the partial gradients over the mesh axes that do not shard the weight.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config.layout import Layout, resolve_layout, rule_of, rule_problems
from jaxtrain.config.schema import EXPERT_AXIS, ConfigError, Problem, RunConfig

Axes = tuple[str | None, ...]
TOKEN_AXES = ("batch", "sequence", "residual")  # logical axes of activations


def node_of(device: Any) -> int:
    """Return the number of a device's node, as XLA numbers the nodes of a run; in one process, `process_index`."""
    if jax.process_count() > 1:
        for number in ("partition_index", "slice_index"):  # the present name, and the name in older versions of JAX
            if (node := getattr(device, number, None)) is not None:
                return node
    # In a topology without hardware, each node has one process.
    return device.process_index


def make_mesh(layout: Layout, devices: Sequence[Any]) -> Mesh:
    """Return the mesh of a layout, with the devices in the order of their nodes.

    `data` is the outermost axis and crosses nodes first. Neighbours in a node are on the right-most axes, which communicate
    most.
    """
    ordered = sorted(devices, key=lambda d: (node_of(d), d.process_index, d.id))
    shape = layout.used_mesh
    return Mesh(np.asarray(ordered).reshape(*shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


@dataclasses.dataclass(frozen=True)
class Placement:
    """A layout on the mesh of its devices. Hashable, so that modules can hold it as a static field."""

    mesh: Mesh
    layout: Layout
    tokens_replicated: bool = False  # every device has all tokens, as in sampling; weights stay sharded by the rules

    # ---- Mesh axes of a logical axis; all of size above 1

    def size(self, mesh_axes: str | Sequence[str]) -> int:
        """Return the product of the sizes of these mesh axes."""
        return self.layout.size(*((mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes))

    def crosses_nodes(self, mesh_axes: Sequence[str]) -> bool:
        """Return whether devices that differ in these mesh axes alone are on several nodes."""
        group = self.mesh.devices[tuple(slice(None) if a in mesh_axes else slice(1) for a in self.mesh.axis_names)]
        return len({node_of(device) for device in group.flat}) > 1

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """Return the mesh axes that shard this logical axis."""
        if axis is None or (self.tokens_replicated and axis in TOKEN_AXES):
            return ()
        return self.layout.mesh_axes(axis)

    @property
    def all_axes(self) -> tuple[str, ...]:
        """Return all mesh axes of size above 1."""
        return tuple(a for a, size in self.mesh.shape.items() if size > 1)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that shard tokens inside attention and feed-forward blocks."""
        return self.mesh_axes("batch") + self.mesh_axes("sequence")

    @property
    def sequence_parallel_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that shard tokens of the residual stream but not inside blocks.

        This is sequence parallelism as in Megatron (Korthikanti et al. 2022, arXiv:2205.05198).
        """
        return tuple(a for a in self.mesh_axes("residual") if a not in self.mesh_axes("sequence"))

    def gather_axes(self, *axes: str | None) -> tuple[str, ...]:
        """Return the mesh axes along which weights with these logical axes are gathered for use: the axes that shard tokens.

        Experts stay sharded over the axis `expert`, because tokens are sent to them.
        """
        tokens = self.layout.mesh_axes("batch") + self.layout.mesh_axes("sequence")
        return tuple(
            a for axis in axes for a in self.mesh_axes(axis) if a in tokens and not (axis == "experts" and a == EXPERT_AXIS)
        )

    def compute_axes(self, axis: str | None) -> tuple[str, ...]:
        """Return the mesh axes that shard this logical axis of a weight while it is used."""
        return tuple(a for a in self.mesh_axes(axis) if a not in self.gather_axes(axis))

    def replica_axes(self, axes: Axes) -> tuple[str, ...]:
        """Return the mesh axes along which all devices hold the same shard of an array with these logical axes."""
        sharded = {a for axis in axes for a in self.mesh_axes(axis)}
        return tuple(a for a in self.all_axes if a not in sharded)

    @property
    def activation_shards(self) -> dict[str, int]:
        """Return logical axis of activations -> number of its shards; "experts": number of shards of experts while in use."""
        axes = ("batch", "sequence", "residual", "heads", "kv_heads", "mlp", "layers")
        return {axis: self.size(self.mesh_axes(axis)) for axis in axes} | {"experts": self.size(self.compute_axes("experts"))}

    # ---- PartitionSpecs

    def spec(self, axes: Axes, name: str = "array") -> P:
        """Return the PartitionSpec of an array with these logical axes. `name` is for the error."""
        entries = [self.mesh_axes(axis) for axis in axes]
        used = [a for entry in entries for a in entry]
        for a in used:
            if used.count(a) > 1:
                sharing = [str(axis) for axis, entry in zip(axes, entries, strict=True) if a in entry]
                rule = f"mesh axis {a!r} also shards sharding.rules.{rule_of(sharing[1])}, and {name} has both"
                key, value = f"sharding.rules.{rule_of(sharing[0])}", "+".join(self.mesh_axes(sharing[0]))
                raise ConfigError([Problem(key, value, rule, "Name it in one of them only.")])
        return P(*(entry if len(entry) > 1 else (entry[0] if entry else None) for entry in entries))

    def sharding(self, axes: Axes, name: str = "array", shape: tuple[int, ...] | None = None) -> NamedSharding:
        """Return the NamedSharding for these logical axes. With a shape, check that each dimension divides evenly."""
        spec = self.spec(axes, name)
        for dim, axis in enumerate(axes if shape is not None else ()):
            shards = self.size(self.mesh_axes(axis))
            if shape is not None and shape[dim] % shards:
                rule = f"axis {axis!r} of {name} has size {shape[dim]}, which does not divide over {shards} devices"
                value, remedy = "+".join(self.mesh_axes(axis)), "Set mesh sizes that divide it, or another rule."
                raise ConfigError([Problem(f"sharding.rules.{rule_of(str(axis))}", value, rule, remedy)])
        return NamedSharding(self.mesh, spec)

    def shard_map(self, f: Any, in_specs: Any, out_specs: Any) -> Any:
        """Return `f`, which computes with local shards, as a function of global arrays. All mesh axes are manual."""
        # The replication checker does not support axis_index_groups, the Pallas interpreter, and sums over some axes only.
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# ---- Collectives on local shards; each is the identity over no mesh axes


def all_gather(x: jax.Array, over: Sequence[str], dim: int) -> jax.Array:
    """Concatenate, along dimension `dim`, the shards of the devices along the mesh axes `over`."""
    return jax.lax.all_gather(x, tuple(over), axis=dim, tiled=True) if over else x


def reduce_scatter(x: jax.Array, over: Sequence[str], dim: int) -> jax.Array:
    """Sum over the devices along the mesh axes `over`; each keeps its shard of dimension `dim`."""
    return jax.lax.psum_scatter(x, tuple(over), scatter_dimension=dim, tiled=True) if over else x


def all_reduce(x: Any, over: Sequence[str]) -> Any:
    """Sum over the devices along the mesh axes `over`."""
    return jax.lax.psum(x, tuple(over)) if over else x


def all_to_all(x: jax.Array, over: Sequence[str], split: int, concat: int) -> jax.Array:
    """Return `x` with dimension `split` sharded over the mesh axes `over`, instead of dimension `concat`."""
    return jax.lax.all_to_all(x, tuple(over), split_axis=split, concat_axis=concat, tiled=True) if over else x


def device_index(over: Sequence[str]) -> Any:
    """Return this device's position along these mesh axes, int32 ()."""
    return jax.lax.axis_index(tuple(over)) if over else 0


# ---- Tokens between blocks and inside them (sequence parallelism as in Megatron)


def to_residual(x: jax.Array, partial: tuple[str, ...], placement: Placement, dim: int = 1) -> jax.Array:
    """Return a block's output, which has all tokens of the tensor-parallel devices, in the layout of the residual stream.

    Args:
      x: tokens on dimension `dim`.
      partial: mesh axes over which `x` is a partial sum. The sum over a sequence-parallel axis is a reduce-scatter, over any
          other axis an all-reduce. Along sequence-parallel axes that are not in `partial`, each device slices out its tokens.
    """
    for axis in placement.sequence_parallel_axes:
        if axis in partial:
            x = reduce_scatter(x, (axis,), dim)
        else:
            size = x.shape[dim] // placement.size(axis)
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, axis=dim)
    # All-reduces come last, on the smaller arrays: pipeline stages may be on different nodes.
    return all_reduce(x, tuple(a for a in partial if a not in placement.sequence_parallel_axes))


def to_block(x_BTD: jax.Array, placement: Placement) -> jax.Array:
    """Return the residual stream with all tokens of the tensor-parallel devices, for a block.

    The gradient is reduce-scattered.
    """
    return all_gather(x_BTD, placement.sequence_parallel_axes, 1)


# ---- Weights


@dataclasses.dataclass(frozen=True)
class GatherSpec:
    """The gather of one weight, and the reduction of its gradient. Hashable, for use as a static argument."""

    dims: tuple[tuple[int, tuple[str, ...]], ...]  # gathered dimensions, and their mesh axes
    summed: tuple[str, ...]  # replica axes: the gradient is all-reduced over them, after the reduce-scatters
    compute: jnp.dtype
    reduce: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_weight(w: jax.Array, spec: GatherSpec) -> jax.Array:
    """Return a weight in the compute dtype, unsharded along the gathered dimensions.

    The cast comes first, so that the all-gather sends the small dtype. The backward pass has, in the reduce dtype, a
    reduce-scatter for each gathered dimension and an all-reduce over the replicas; then it casts to the dtype of `w`.
    """
    return all_gather_weight(w, spec)


def _gather_fwd(w: jax.Array, spec: GatherSpec) -> tuple[jax.Array, jax.Array]:
    # Residuals may not be dtypes: an empty array carries that of the weight.
    return all_gather_weight(w, spec), jnp.zeros((0,), w.dtype)


# A custom_vjp_call is one operation for remat policies, which then save no part of it (models/remat.py).
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_gather_weight(w: jax.Array, spec: GatherSpec) -> jax.Array:
    """Return a weight, or its FP8 bits, unsharded along the gathered dimensions. Differentiation raises TypeError."""
    w = w.astype(spec.compute)
    for dim, over in spec.dims:
        w = all_gather(w, over, dim)
    return w


def _no_gradient(*_: Any) -> Any:
    raise TypeError("all_gather_weight() has no gradient: differentiate gather_weight()")


all_gather_weight.defvjp(_no_gradient, _no_gradient)


def _gather_bwd(spec: GatherSpec, like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    return (reduce_gradient(grad, spec).astype(like.dtype),)


gather_weight.defvjp(_gather_fwd, _gather_bwd)


def reduce_gradient(grad: jax.Array, spec: GatherSpec) -> jax.Array:
    """Return this device's shard of a weight's gradient, in the reduce dtype.

    `grad`: the device's partial gradient, of the gathered shape.
    """
    grad = grad.astype(spec.reduce)
    for dim, over in reversed(spec.dims):
        grad = reduce_scatter(grad, over, dim)
    return all_reduce(grad, spec.summed)


@jax.custom_vjp
def redirect(value: jax.Array, into: jax.Array) -> jax.Array:
    """Return `value`. `into`, of the same shape, gets the gradient of the result; `value` gets none."""
    return value


def _redirect_fwd(value: jax.Array, into: jax.Array) -> tuple[jax.Array, jax.Array]:
    return value, jnp.zeros((0,), into.dtype)


def _redirect_bwd(like: jax.Array, grad: jax.Array) -> tuple[None, jax.Array]:
    return None, grad.astype(like.dtype)


redirect.defvjp(_redirect_fwd, _redirect_bwd)


# ---- Of a run


def make_placement(run: RunConfig, devices: Sequence[Any]) -> Placement:
    """Return the placement of a run on these devices.

    Raises ConfigError for a mesh or rules that are impossible, and if the nodes hold different numbers of devices.
    """
    counts = collections.Counter(map(node_of, devices))
    if len({*counts.values()}) > 1:
        sizes = ", ".join(str(count) for count in counts.values())
        raise ConfigError([Problem("devices", sizes, "the nodes hold different numbers of devices", "Start as many on each.")])
    layout = resolve_layout(run, len(devices), counts[node_of(devices[0])])
    if problems := rule_problems(layout, run.sharding):
        raise ConfigError(problems)
    return Placement(make_mesh(layout, devices), layout)


def replicated(placement: Placement) -> NamedSharding:
    """Return the NamedSharding that replicates an array on all devices."""
    return NamedSharding(placement.mesh, P())


def large_replicated_arrays(abstract: dict[str, jax.ShapeDtypeStruct], limit_bytes: int = 16 << 20) -> list[str]:
    """Return name and size of each fully replicated array above the limit, if a mesh axis other than `data` could shard it."""
    large_arrays = []
    for name, array in abstract.items():
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding):
            continue
        splits = math.prod(size for axis, size in sharding.mesh.shape.items() if axis != "data")
        size = math.prod(array.shape) * array.dtype.itemsize
        if splits > 1 and size > limit_bytes and sharding.is_fully_replicated:
            large_arrays.append(f"{name} ({size / 2**20:,.0f} MiB on each of {sharding.mesh.size} devices)")
    return large_arrays
