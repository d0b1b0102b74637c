"""Placement: the device mesh, the table of logical axes, and the few functions that turn names into shardings.

Every array in jaxtrain has logical axis names ("batch", "embed", "heads", ...). A `Placement` maps them onto the mesh axes
(data, fsdp, tensor, seq; and stage and expert where they are used). Changing how a model is split means changing the table,
never the model.

Weights have two layouts. At rest, they (and their moments and gradients) are split over every axis their names map to. In
use, they are whole over the axes that split the batch (but over `expert` experts stay apart, and tokens go to them): `gather`
moves them there in the compute dtype, and sends the gradient back in the reduce dtype. A step that holds weights, or gradients,
in another way (jaxtrain/zero.py) puts a `Held` in the weight's place.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import (
    EXCHANGE,
    MESH_AXES,
    OPTIONAL_AXES,
    ConfigError,
    RunConfig,
    impossible_rules,
    mesh_sizes,
    rules_in_use,
)

Axes = tuple[str | None, ...]


class LayoutError(ValueError):
    """The mesh or the rules ask for a layout that cannot be."""


def mesh_shape(run: RunConfig, num_devices: int, node: int = 0) -> dict[str, int]:
    """Size of each mesh axis with every -1 filled in, without optional axes of size 1.

    node: devices in a node, 0 for all of them.

    Raises LayoutError where the product is not num_devices.
    """
    try:
        sizes = mesh_sizes(run.mesh, num_devices, node or num_devices)
    except ConfigError as error:
        raise LayoutError(str(error)) from None
    return {axis: sizes[axis] for axis in MESH_AXES if axis not in OPTIONAL_AXES or sizes[axis] > 1}


def node_of(device: Any) -> int:
    """Which node a device is in: XLA numbers the hosts of a run. A process may hold all GPUs of a node, or one of them."""
    if jax.process_count() > 1:
        for number in ("partition_index", "slice_index"):  # its name, and the one that it had in older versions
            if (found := getattr(device, number, None)) is not None:
                return found
    # A described device says by its process which node it is in.
    return device.process_index


def make_mesh(run: RunConfig, devices: Sequence[Any]) -> Mesh:
    """The mesh of a config, node by node: data is the outermost axis and crosses nodes first, and neighbours in a
    node land on the right-most axes, which talk most.

    Axis types are Auto: XLA places what `constrain` leaves open. Raises LayoutError where the nodes hold different numbers of
    devices.
    """
    ordered = sorted(devices, key=lambda d: (node_of(d), d.process_index, d.id))
    counts = collections.Counter(map(node_of, ordered))
    if len({*counts.values()}) > 1:
        held = ", ".join(str(count) for count in counts.values())
        raise LayoutError(f"the nodes hold different numbers of devices ({held}): start as many on each")
    shape = mesh_shape(run, len(ordered), counts[node_of(ordered[0])])
    return Mesh(np.asarray(ordered).reshape(*shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and the rules that map logical axes onto it. Hashable: it may sit in static fields of modules."""

    mesh: Mesh  # inside a shard_map an AbstractMesh, which serves as one
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    manual: tuple[str, ...] = ()  # mesh axes that a shard_map around all this has taken apart already

    def inside(self, axis: str) -> "Placement":
        """The same within a shard_map that is manual over `axis`, where arrays are one device's part along it.

        Layouts then say nothing of that axis; collectives may name it, in a shard_map over the rest.
        """
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"a placement inside {self.manual} has no further inside")
        mesh = self.mesh.abstract_mesh.update_axis_types({axis: AxisType.Manual})
        return dataclasses.replace(self, mesh=cast(Mesh, mesh), manual=(axis,))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes over which weights in use are whole, because each shard of the batch needs all of them."""
        return tuple(dict(self.rules)["batch"]) + tuple(dict(self.rules)["sequence"])

    def size(self, mesh_axes: str | Sequence[str]) -> int:
        """Product of the sizes of these mesh axes."""
        names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
        return math.prod(self.mesh.shape.get(a, 1) for a in names)

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """Mesh axes, of size above 1, that split this logical axis."""
        if axis is None:
            return ()
        table = dict(self.rules)
        if axis not in table:
            raise LayoutError(f"logical axis {axis!r} has no rule: add sharding.rules.{axis} (known: {', '.join(table)})")
        return tuple(a for a in table[axis] if self.mesh.shape.get(a, 1) > 1)

    def parts(self, axis: str | None) -> int:
        """Into how many parts this logical axis of an array is split."""
        return self.size([a for a in self.mesh_axes(axis) if a not in self.manual])

    def in_use(self, axis: str | None) -> tuple[str, ...]:
        """Mesh axes, of size above 1, that split this logical axis of a weight while it is used."""
        stay = (EXCHANGE,) if axis == "experts" else ()
        return tuple(a for a in self.mesh_axes(axis) if a in stay or a not in self.batch_axes)

    def gathered(self, *axes: str) -> tuple[str, ...]:
        """Mesh axes, of size above 1, over which weights with these logical axes are gathered."""
        return tuple(a for axis in axes for a in self.mesh_axes(axis) if a not in self.in_use(axis))

    def spec(self, axes: Axes, name: str = "array") -> P:
        """PartitionSpec of an array with these logical axes. `name` is for the error when one mesh axis splits two dims."""
        parts = [self.mesh_axes(axis) for axis in axes]
        used = [a for part in parts for a in part]
        for a in used:
            if used.count(a) > 1:
                who = [str(x) for x, part in zip(axes, parts, strict=True) if a in part]
                raise LayoutError(
                    f"{name}: logical axes {' and '.join(who)} are both split over mesh axis {a!r}; "
                    f"change sharding.rules.{who[0]} or sharding.rules.{who[1]}"
                )
        return self._laid(parts)

    def _laid(self, parts: Sequence[tuple[str, ...]]) -> P:
        """A PartitionSpec of the axes that split each dimension, without those that are taken apart already."""
        left = [tuple(a for a in part if a not in self.manual) for part in parts]
        return P(*(part if len(part) > 1 else (part[0] if part else None) for part in left))

    def sharding(self, axes: Axes, name: str = "array", shape: tuple[int, ...] | None = None) -> NamedSharding:
        """NamedSharding for these logical axes; with a shape, checks that each dimension divides evenly."""
        spec = self.spec(axes, name)
        for dim, axis in enumerate(axes if shape is not None else ()):
            parts = self.parts(axis)
            if shape is not None and shape[dim] % parts:
                raise LayoutError(
                    f"{name}: axis {axis!r} of size {shape[dim]} does not divide over "
                    f"{'+'.join(self.mesh_axes(axis))} = {parts}; set mesh sizes that divide it, or sharding.rules.{axis}"
                )
        return NamedSharding(self.mesh, spec)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pin an activation's layout; the gradient is pinned to the same."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes))

    def widen(self, x: jax.Array, narrow: Axes, wide: Axes) -> jax.Array:
        """All-gather an activation from a split layout; its gradient, a partial sum, is reduce-scattered back.

        The split layout is pinned first, so that what travels is x in its own dtype and not the float32 it was rounded from.
        """
        return _widen(x, self.sharding(narrow), self.sharding(wide))

    def narrow(self, x: jax.Array, wide: Axes, narrow: Axes) -> jax.Array:
        """Reduce-scatter a partial sum into a split layout; its gradient is all-gathered back. The mirror of `widen`."""
        return _narrow(x, self.sharding(wide), self.sharding(narrow))

    def whole(self, axes: Axes) -> NamedSharding:
        """Layout of a weight in use: whole over the axes that split the batch, still split over the others."""
        return NamedSharding(self.mesh, self._laid([self.in_use(axis) for axis in axes]))

    def home(self, axes: Axes, late: tuple[str, ...] = ()) -> NamedSharding:
        """Layout of a weight's gradient as a backward pass leaves it: that of the weight at rest.

        With `late` axes there is one gradient for each of their devices, on a first dimension, not yet summed; over those axes
        a gradient cannot be split besides.
        """
        if not late:
            return self.sharding(axes)
        kept = [tuple(a for a in self.mesh_axes(axis) if a not in late) for axis in axes]
        return NamedSharding(self.mesh, self._laid([late, *kept]))

    def gather(self, w: jax.Array, axes: Axes, compute: jnp.dtype, reduce: jnp.dtype) -> jax.Array:
        """A weight in the compute dtype, ready for use. The cast comes first, so that the wire carries the small type.

        Its gradient is summed over the batch axes in the `reduce` dtype and comes back split like the weight.
        """
        return _gather(w, self.sharding(axes), self.whole(axes), compute, reduce)


def _spread(x: jax.Array, narrow: NamedSharding, wide: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, narrow), wide)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _widen(x: jax.Array, narrow: NamedSharding, wide: NamedSharding) -> jax.Array:
    return _spread(x, narrow, wide)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _narrow(x: jax.Array, wide: NamedSharding, narrow: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, narrow)


_widen.defvjp(
    lambda x, narrow, wide: (_spread(x, narrow, wide), None),
    lambda narrow, wide, _, g: (jax.lax.with_sharding_constraint(g, narrow),),
)
_narrow.defvjp(
    lambda x, wide, narrow: (_narrow(x, wide, narrow), None),
    lambda wide, narrow, _, g: (_spread(g, narrow, wide),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(w: jax.Array, rest: NamedSharding, use: NamedSharding, compute: jnp.dtype, reduce: jnp.dtype) -> jax.Array:
    small = jax.lax.with_sharding_constraint(w.astype(compute), rest)
    return jax.lax.with_sharding_constraint(small, use)


def _gather_fwd(w, rest, use, compute, reduce):
    # An empty array carries the master dtype to the backward rule: residuals may not be dtypes.
    return _gather(w, rest, use, compute, reduce), jnp.zeros((0,), w.dtype)


def _gather_bwd(rest, use, compute, reduce, like, g):
    return (scatter(g.astype(reduce), rest, like.dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def scatter(g: jax.Array, rest: NamedSharding, dtype: jnp.dtype) -> jax.Array:
    """A weight's gradient, a partial sum on every device, to the weight's own layout and dtype; reduced in the dtype it has."""
    return jax.lax.with_sharding_constraint(g, rest).astype(dtype)


def local_spec(letters: str, weight: str, axes: Axes, placement: Placement) -> P:
    """Layout of an array of an einsum over which a shard_map is manual: activations as in use, weights whole over the batch.

    letters: of the array, such as "BTNH", where B and T are batch and sequence. weight, axes: letters and logical axes of the
    weight in the einsum.
    """
    logical = {"B": "batch", "T": "sequence", **dict(zip(weight, axes, strict=True))}
    used = [placement.mesh_axes(logical[c]) if c in "BT" else placement.in_use(logical[c]) for c in letters]
    return P(*(tuple(a for a in part if a not in placement.manual) or None for part in used))


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A weight in 8 bits: value x scale. One scale for each layer of a stack."""

    value: Any
    scale: Any  # f32, (L,) or ()


jax.tree_util.register_dataclass(Scaled, ["value", "scale"], [])


@dataclasses.dataclass(eq=False)
class Sum:
    """That the gradients of a stack's weight are added to a sum, for one forward pass.

    A loop over layers takes it, once, and for the whole stack: of two runs of the layers each would add its gradients to the
    sum of all before and return both, and of a part of them the sum of the others would be lost.
    """

    dtype: jnp.dtype  # of each layer's gradient
    layers: int
    taken: bool = False

    def take(self, layers: int) -> jnp.dtype:
        """The dtype of each layer's gradient. Raises TypeError where the stack is not run whole and once."""
        if self.taken or layers != self.layers:
            what = "run twice" if self.taken else f"run in part, {layers} of {self.layers} layers"
            raise TypeError(f"a stack whose gradients are added layer by layer is {what}: {NOT_ADDED}")
        self.taken = True
        return self.dtype


NOT_ADDED = "make the model's adds_layers False, or set train.accumulate to microbatch"


@dataclasses.dataclass(frozen=True)
class Held:
    """A weight as a step holds it: the numbers to compute with, and apart from them the place of its gradient.

    It stands where a model has a parameter, and a kernel returns the gradient of `slot` only. So the gradient has a dtype and a
    layout of its own, whatever those of the numbers.
    """

    value: Any  # an array, or Scaled; at rest; where `whole` in the layout of use and, of most, the compute dtype (or 8 bits)
    slot: Any  # no kernel reads it: the gradient has its shape, dtype and layout (`Placement.home`)
    whole: bool
    late: tuple[str, ...]  # mesh axes over which the gradient is not summed by the backward pass
    # Of a stack of layers whose gradient is to be added up: `slot` is the sum of the microbatches so far, and the stack's
    # gradient is that sum with this one's added. None: the gradient is that of this microbatch.
    sum: "Sum | None" = None
    # A weight that is not learnt. Its gradient is as empty as its slot: (layers, 0) of a stack, (0,) otherwise.
    frozen: bool = False

    def __getitem__(self, key: Any) -> "Held":
        if key is not ...:
            raise TypeError(f"a held weight is used as it is, by [...], not by [{key!r}]")
        return self


jax.tree_util.register_dataclass(Held, ["value", "slot"], ["whole", "late", "sum", "frozen"])
Weight = jax.Array | Held


def is_whole(w: Weight) -> bool:
    """Whether a weight is gathered already, in the type to compute with."""
    return isinstance(w, Held) and w.whole


def in_eight(w: Weight) -> bool:
    """Whether a weight is held in 8 bits."""
    return isinstance(w, Held) and isinstance(w.value, Scaled)


def numbers(w: Weight) -> jax.Array:
    """What to compute with. Raises TypeError for a weight in 8 bits, which has products of its own."""
    if in_eight(w):
        raise TypeError(
            "a weight made with param(..., dot=True) is used by kernels.dot.dot, or of experts by their feed_forward, alone; "
            "make it without, or use these"
        )
    return w.value if isinstance(w, Held) else w


def ticket(w: Weight) -> Any:
    """A residual that tells a backward rule where a weight's gradient goes: arrays carry dtypes, which residuals may not be.

    Raises TypeError for a weight of a stack whose gradients are to be added to a sum, where no loop over layers does that.
    """
    if isinstance(w, Held) and w.sum is not None:
        raise TypeError(f"gradients of a stack are to be added layer by layer, but remat.Plan.run does not run it: {NOT_ADDED}")
    if isinstance(w, Held):
        return dataclasses.replace(w, value=None, slot=jnp.zeros((0,), w.slot.dtype))
    return jnp.zeros((0,), w.dtype)


def late(ticket: Any) -> tuple[str, ...]:
    """Mesh axes over which this weight's gradient is not summed yet."""
    return ticket.late if isinstance(ticket, Held) else ()


def slot_dtype(ticket: Any) -> jnp.dtype:
    """The dtype in which this weight's gradient leaves the backward pass."""
    return ticket.slot.dtype if isinstance(ticket, Held) else ticket.dtype


def frozen(ticket: Any) -> bool:
    """Whether this weight has no gradient: a backward rule need not compute one."""
    return isinstance(ticket, Held) and ticket.frozen


def cotangent(ticket: Any, dw: Any) -> Any:
    """What a backward rule returns for a weight whose gradient is dw, in the layout `Placement.home`.

    Of a frozen weight that is nothing, whatever dw is: the compiler then drops what computed and summed it.
    """
    if frozen(ticket):
        return ticket
    dw = dw.astype(slot_dtype(ticket))
    return dataclasses.replace(ticket, slot=dw) if isinstance(ticket, Held) else dw


def still(tokens: Sequence[str], ticket: Any) -> tuple[str, ...]:
    """Of the mesh axes that split the tokens, those over which the backward pass sums this weight's gradient."""
    return tuple(a for a in tokens if a not in late(ticket))


def summed(part: jax.Array, axes: Axes, tokens: Sequence[str], ticket: Any, placement: Placement) -> jax.Array:
    """Inside a shard_map: one device's part of a weight's gradient to its home, by the fewest bytes and in the dtype it has.

    part: the sum over this device's tokens; whole over the axes that split the batch.
    tokens: mesh axes over which other devices have other tokens.
    """
    left = list(still(tokens, ticket))
    for dim, axis in enumerate(axes):
        split = tuple(a for a in placement.mesh_axes(axis) if a in left)
        if split:
            part = jax.lax.psum_scatter(part, split, scatter_dimension=dim, tiled=True)
            left = [a for a in left if a not in split]
    part = jax.lax.psum(part, tuple(left)) if left else part
    return part[None] if late(ticket) else part


def make_placement(run: RunConfig, devices: Sequence[Any]) -> Placement:
    """The placement that a config asks for, on these devices."""
    mesh = make_mesh(run, devices)
    rules = rules_in_use(run, mesh.shape)
    placement = Placement(mesh, tuple(rules.items()))
    table = {axis: list(placement.mesh_axes(axis)) for axis in rules}
    for axis, rule, remedy in impossible_rules(table):
        raise LayoutError(f"sharding.rules.{axis} = {dict(run.sharding.rules)[axis]!r}: {rule}. {remedy}")
    return placement


def describe(config: Any, topology: Any, **overrides: Any) -> Any:
    """A table of how every parameter, moment and activation of a run lies on the devices of a machine; for notebooks.

    It shows itself; `.filter(name=..., kind=..., axis=...)` is a part of it, `.rows()` are plain dicts for a DataFrame. Python
    must have been started with JAX_PLATFORMS=cpu where there is no GPU.

    `describe("configs/llama3_8b.py", "h200:8", mesh={"fsdp": 4, "tensor": 2})`; see plan/explore/shardings.py, which makes it.
    """
    # Imported when called: this is the door that users look for, and the room behind it stands on a floor above.
    from jaxtrain.plan.explore import shardings

    return shardings.describe(config, topology, **overrides)


def replicated(placement: Placement) -> NamedSharding:
    """Every device holds all of it."""
    return NamedSharding(placement.mesh, P())


def left_whole(abstract: dict[str, jax.ShapeDtypeStruct], limit_bytes: int = 16 << 20) -> list[str]:
    """Names of arrays above the limit that every device holds in full although the mesh has axes to split them over."""
    found = []
    for name, a in abstract.items():
        sharding = a.sharding
        if not isinstance(sharding, NamedSharding):
            continue
        splits = math.prod(size for axis, size in sharding.mesh.shape.items() if axis != "data")
        size = math.prod(a.shape) * a.dtype.itemsize
        if splits > 1 and size > limit_bytes and sharding.is_fully_replicated:
            found.append(f"{name} ({size / 2**20:,.0f} MiB on each of {sharding.mesh.size} devices)")
    return found
