"""How the activations of a train step are split, read from the traced program: no compiler, and no table kept by hand.

The program pins some layouts itself: `sharding_constraint` (what `Placement.constrain`, `widen`, `narrow` and `gather` become)
and the edges of every `shard_map`. From there layouts are carried forward through the operations in between, by the rules that
XLA's partitioner follows too: an elementwise result is split like its operands, a matrix product like their free
dimensions. Where these rules do not reach, a layout is unknown (None), and the compiler decides.

What the backward pass finds saved is read from the same trace: arrays that one loop stacks up and another one reads.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.models.layer_loop import SLOTS
from jaxtrain.plan.program.buffers import one_put
from jaxtrain.sharding import Axes, Placement

Dims = tuple[tuple[str, ...], ...]  # mesh axes that split each dimension
GATHERED = "weight"  # the name under which a weight in use stands (kernels/dot.py)
LAYER_INPUT = "layer_input"
TAG = "@"  # marks a logical axis among mesh axes


@dataclasses.dataclass(frozen=True)
class Named:
    """An array of the program that has a name, or that is kept for the backward pass."""

    name: str
    origin: str  # the parameter that it is a copy of; "" for activations
    shape: tuple[int, ...]  # global
    dtype: Any
    dims: Dims | None
    pinned: bool  # the program states this layout itself; False: it follows from those that it states
    saved: int  # how many are kept for the backward pass at one time, one for each layer; 0: computed again
    on_host: bool  # kept in host memory


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of a value while the program is walked."""

    dims: Dims | None = None
    pinned: bool = False
    origin: str = ""
    key: tuple[str, str] | None = None  # of the Named that it is
    count: int = 1
    on_host: bool = False


class Tagged(Placement):
    """A placement whose constraints also carry their logical axes, as mesh axes of size 1. For tracing only."""

    def sharding(self, axes: Axes, name: str = "array", shape: tuple[int, ...] | None = None) -> NamedSharding:
        return _with_tags(super().sharding(axes, name, shape), axes)

    def whole(self, axes: Axes) -> NamedSharding:
        # An axis that is whole only while the weight is in use passes no name on to what the weight meets.
        rules, batch = dict(self.rules), self.batch_axes
        kept = tuple(axis if axis is not None and not set(rules[axis]) & set(batch) else None for axis in axes)
        return _with_tags(super().whole(axes), kept)


def _with_tags(sharding: NamedSharding, axes: Axes) -> NamedSharding:
    parts = [(part,) if isinstance(part, str) else tuple(part or ()) for part in sharding.spec]
    tags = [() if axis is None or axis in axes[:i] else (TAG + axis,) for i, axis in enumerate(axes)]
    return NamedSharding(sharding.mesh, P(*((*part, *tag) for part, tag in zip(parts, tags, strict=True))))


def tagged(placement: Placement) -> Tagged:
    """The same placement for a second trace, in which `split_tags` finds the logical axes."""
    mesh, tags = placement.mesh, tuple(TAG + axis for axis, _ in placement.rules)
    devices = mesh.devices.reshape(mesh.devices.shape + (1,) * len(tags))
    types = (*mesh.axis_types, *[mesh.axis_types[0]] * len(tags))
    return Tagged(Mesh(devices, (*mesh.axis_names, *tags), axis_types=types), placement.rules)


def split_tags(dims: Dims) -> tuple[Dims, Axes]:
    """(mesh axes per dimension, logical axis per dimension) of a layout found in a tagged trace."""
    bare = tuple(tuple(a for a in part if not a.startswith(TAG)) for part in dims)
    found = ["+".join(a.removeprefix(TAG) for a in part if a.startswith(TAG)) for part in dims]
    return bare, tuple(axis or None for axis in found)


def read(jaxpr: Jaxpr, inputs: Sequence[Value], mesh: Mesh) -> dict[tuple[str, str], Named]:
    """Every named array of a train step, by (name, origin), in the order of the program.

    `inputs`: layouts of the jaxpr's arguments, and which parameter each is.
    """
    reader = _Reader(mesh)
    reader.walk(jaxpr, list(inputs), None)
    found = reader.found | {key: named for key, named in reader.again.items() if key not in reader.found}
    for key, (count, on_host) in reader.saved.items():
        found[key] = dataclasses.replace(found[key], saved=count, on_host=on_host)
    return {key: named for key, named in found.items() if named.saved or key not in reader.unnamed}


def dims_of(sharding: NamedSharding, ndim: int) -> Dims:
    """Mesh axes per dimension; axes of size 1 split nothing and are left out, tags stay."""
    return _dims(sharding.spec, ndim, sharding.mesh.shape)


def _dims(spec: P, ndim: int, sizes: Mapping[str, int]) -> Dims:
    parts = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
    parts += [()] * (ndim - len(parts))
    return tuple(tuple(a for a in part if sizes[a] > 1 or a.startswith(TAG)) for part in parts)


def join(layouts: Sequence[Dims | None]) -> Dims | None:
    """The layout of an elementwise result. A split wins over whole; two different splits of one dimension are unknown."""
    known = [dims for dims in layouts if dims is not None]
    if not known or len(known) < len(layouts):
        return None
    out = []
    for parts in zip(*known, strict=True):
        splits = [tuple(a for a in part if not a.startswith(TAG)) for part in parts]
        tags = [tuple(a for a in part if a.startswith(TAG)) for part in parts]
        split = next((s for s in splits if s), ())
        if any(s and s != split for s in splits):
            return None
        out.append((*split, *next((t for t in tags if t), ())))
    return _once(out)


def _once(parts: Sequence[tuple[str, ...]]) -> Dims | None:
    """These parts, or None where one mesh axis would split two dimensions."""
    used = [a for part in parts for a in part if not a.startswith(TAG)]
    return None if len(set(used)) < len(used) else tuple(parts)


# Primitives that only change a value's clothes: it keeps its name, and stays a copy of the same parameter.
ALIASES = ("name", "reduce_precision", "optimization_barrier", "device_put", "copy", "copy_p")
SAME = (*ALIASES, "convert_element_type", "bitcast_convert_type")
# A part of a parameter is still that parameter, and so is one divided by its scale (kernels/fp8.py).
VIEWS = ("slice", "dynamic_slice", "reshape", "squeeze", "transpose", "mul")


def _broadcast(eqn: Any, dims: list[Dims | None]) -> Dims | None:
    source, shape = eqn.invars[0].aval.shape, eqn.params["shape"]
    if dims[0] is None:
        return None
    out: list[tuple[str, ...]] = [()] * len(shape)
    for i, at in enumerate(eqn.params["broadcast_dimensions"]):
        out[at] = dims[0][i] if source[i] == shape[at] else ()
    return tuple(out)


def _reshape(eqn: Any, dims: list[Dims | None]) -> Dims | None:
    source, shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if dims[0] is None:
        return None
    if not any(dims[0]):
        return ((),) * len(shape)
    long = [i for i, size in enumerate(source) if size != 1]
    if [source[i] for i in long] != [size for size in shape if size != 1]:
        return None
    kept = iter([dims[0][i] for i in long])
    return tuple(next(kept) if size != 1 else () for size in shape)


def _dot(eqn: Any, dims: list[Dims | None]) -> Dims | None:
    left, right = dims
    if left is None or right is None:
        return None
    (left_summed, right_summed), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    batch = join([tuple(left[i] for i in left_batch), tuple(right[i] for i in right_batch)])
    if batch is None:
        return None
    free = [left[i] for i in range(len(left)) if i not in (*left_summed, *left_batch)]
    free += [right[i] for i in range(len(right)) if i not in (*right_summed, *right_batch)]
    return _once([*batch, *free])


def _reduced(eqn: Any, dims: list[Dims | None]) -> Dims | None:
    return None if dims[0] is None else tuple(d for i, d in enumerate(dims[0]) if i not in eqn.params["axes"])


def _sliced(eqn: Any, dims: list[Dims | None]) -> Dims | None:
    """Operands of the result's rank; dimensions of another size than the result's must be whole."""
    shape = eqn.outvars[0].aval.shape
    parts = [(v.aval.shape, d) for v, d in zip(eqn.invars, dims, strict=True) if len(v.aval.shape) == len(shape)]
    for source, d in parts:
        if d is None or any(part for part, a, b in zip(d, source, shape, strict=True) if a != b):
            return None
    return join([d for _, d in parts])


REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin")
SLICES = ("slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "split", "rev", "cumsum")
RULES: dict[str, Callable[[Any, list[Dims | None]], Dims | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "dot_general": _dot,
    "transpose": lambda eqn, dims: None if dims[0] is None else tuple(dims[0][i] for i in eqn.params["permutation"]),
    "squeeze": lambda eqn, dims: (
        None if dims[0] is None else tuple(d for i, d in enumerate(dims[0]) if i not in eqn.params["dimensions"])
    ),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(SLICES, _sliced),
}


def _elementwise(eqn: Any, dims: list[Dims | None]) -> Dims | None:
    """Operands are scalars or of the result's shape, but for dimensions of size 1; anything else has no rule."""
    shape = eqn.outvars[0].aval.shape
    big = [(v.aval.shape, d) for v, d in zip(eqn.invars, dims, strict=True) if v.aval.shape]
    if any(len(source) != len(shape) or any(a not in (1, b) for a, b in zip(source, shape, strict=True)) for source, _ in big):
        return None
    return join([d for _, d in big]) if big else ((),) * len(shape)


@dataclasses.dataclass(frozen=True)
class _Region:
    """Inside a shard_map: the arrays at its edges, as (shape on one device, axes it differs over, layout)."""

    edges: tuple[tuple[tuple[int, ...], frozenset[str], Dims], ...]
    sizes: Mapping[str, int]


class _Reader:
    """Walks a jaxpr from its arguments to its results, and collects what has a name."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.found: dict[tuple[str, str], Named] = {}
        self.again: dict[
            tuple[str, str], Named
        ] = {}  # found in what is computed again; some kernels name their results there only
        self.unnamed: set[tuple[str, str]] = set()
        self.saved: dict[tuple[str, str], tuple[int, bool]] = {}
        self.quiet = 0  # above 0: a first look at a loop's body, or what is computed again

    def walk(self, jaxpr: Jaxpr, inputs: list[Value], region: _Region | None) -> list[Value]:
        """The results of a jaxpr, given its arguments."""
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        stacked: set[Any] = set()  # results of loops at this level, one slice an iteration
        single: set[Any] = set()  # results of this level itself: those of a layer outside the loop over layers

        def value(v: Any) -> Value:
            whole = ((),) * len(v.aval.shape)
            return Value(whole) if isinstance(v, Literal) else known.get(v, Value(whole if region is None else None))

        for eqn in jaxpr.eqns:
            operands = [value(v) for v in eqn.invars]
            if eqn.primitive.name in ("scan", "remat2"):
                kept = stacked | single if eqn.primitive.name == "remat2" else stacked
                for v in dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal) and v in kept):
                    self._save(known[v])
            if eqn.primitive.name == "dynamic_update_slice" and str(eqn.source_info.name_stack).endswith(SLOTS):
                room: Any = eqn.outvars[0].aval
                put = one_put(jaxpr, eqn)
                self._wait(self._called(value(put), jaxpr, put, region), room.shape[0])
            results = self._results(eqn, operands, region)
            known.update(zip(eqn.outvars, results, strict=True))
            stacks = _stacks(eqn) if eqn.primitive.name == "scan" else [False] * len(results)
            for v, r, is_stack in zip(eqn.outvars, results, stacks, strict=True):
                if r.key is not None:
                    (stacked if is_stack else single).add(v)
        return [value(v) for v in jaxpr.outvars]

    def _results(self, eqn: Any, operands: list[Value], region: _Region | None) -> list[Value]:
        kind, first = eqn.primitive.name, operands[0] if operands else Value(())
        bodies = list(jaxprs_in_params(eqn.params))
        if kind == "scan":
            return self._scan(eqn, bodies[0], operands, region)
        if kind == "shard_map":
            return self._shard_map(eqn, bodies[0], operands)
        if kind == "name":
            return [self._name(eqn, first, region)]
        if kind == "sharding_constraint" and region is None:
            pinned = Value(dims_of(eqn.params["sharding"], len(eqn.outvars[0].aval.shape)), True, first.origin, first.key)
            return [pinned]
        if len(bodies) == 1 and len(bodies[0].invars) == len(operands) and len(bodies[0].outvars) == len(eqn.outvars):
            self.quiet += kind == "remat2"
            inner = self.walk(bodies[0], operands, region)
            self.quiet -= kind == "remat2"
            return inner
        if kind in SAME and len(eqn.outvars) == len(operands):
            alias = kind in ALIASES
            hosts = [v.aval.memory_space == jax.memory.Space.Host for v in eqn.outvars]
            return [
                dataclasses.replace(o, key=o.key if alias else None, on_host=host)
                for o, host in zip(operands, hosts, strict=True)
            ]
        if region is not None or bodies:
            return [Value() for _ in eqn.outvars]
        rule = RULES.get(kind, _elementwise)
        dims = rule(eqn, [o.dims for o in operands])
        same = [dims is not None and len(v.aval.shape) == len(dims) for v in eqn.outvars]
        return [Value(dims if fits else None, origin=first.origin if kind in VIEWS else "") for fits in same]

    def _name(self, eqn: Any, operand: Value, region: _Region | None) -> Value:
        aval, name = eqn.outvars[0].aval, eqn.params["name"]
        shape, dims, pinned = aval.shape, operand.dims, operand.pinned
        if region is not None:
            shape, dims = _leave(aval, region)
            pinned = dims is not None
        key = (name, operand.origin if name == GATHERED else "")
        self._add(key, Named(*key, shape, aval.dtype, dims, pinned, 0, False))
        return dataclasses.replace(operand, key=key)

    def _add(self, key: tuple[str, str], named: Named) -> None:
        if self.quiet:
            self.again[key] = named
        else:
            self.found.setdefault(key, named)

    def _save(self, value: Value) -> None:
        if not self.quiet and value.key is not None:
            self.saved[value.key] = (self.saved.get(value.key, (0, False))[0] + value.count, value.on_host)

    def _called(self, value: Value, jaxpr: Jaxpr, v: Any, region: _Region | None) -> Value:
        """What a loop keeps, under a key: where the model gave it no name, that of the operation that made it."""
        if self.quiet or value.key not in (None, (LAYER_INPUT, "")):
            return value
        key = value.key or (_produced_by(jaxpr, v), f"#{len(self.unnamed)}")
        shape, layout = (v.aval.shape, value.dims) if region is None else _leave(v.aval, region)
        self._add(key, Named(key[0], "", shape, v.aval.dtype, layout, value.pinned, 0, False))
        self.unnamed.add(key)
        return dataclasses.replace(value, key=key)

    def _wait(self, value: Value, places: int) -> None:
        """What a loop keeps has a place for every layer, or of a pipeline's group for every unit that waits."""
        if not self.quiet and value.key is not None:
            self.saved[value.key] = (places, value.on_host)

    def _scan(self, eqn: Any, body: Any, operands: list[Value], region: _Region | None) -> list[Value]:
        """Arguments and results of the body's own shape are passed whole; the others are taken or stacked slice by slice."""
        sliced = [len(v.aval.shape) > len(b.aval.shape) for v, b in zip(eqn.invars, body.invars, strict=True)]
        stacks = _stacks(eqn)
        inner = [
            dataclasses.replace(o, dims=o.dims[1:] if o.dims is not None and s else o.dims, key=None)
            for o, s in zip(operands, sliced, strict=True)
        ]
        carried = stacks.index(True) if True in stacks else len(stacks)
        start = (sliced.index(True) if True in sliced else len(sliced)) - carried
        self.quiet += 1
        once = self.walk(body, inner, region)
        self.quiet -= 1
        for i in range(carried):
            inner[start + i] = Value(join([inner[start + i].dims, once[i].dims]), key=(LAYER_INPUT, ""))
        results = self.walk(body, inner, region)
        out = []
        for i, (result, v) in enumerate(zip(results, body.outvars, strict=True)):
            if i < carried:
                out.append(Value(result.dims, key=(LAYER_INPUT, "")))
                continue
            key = result.key or (_produced_by(body, v), f"#{i}")
            if result.key in (None, (LAYER_INPUT, "")):
                shape, layout = (v.aval.shape, result.dims) if region is None else _leave(v.aval, region)
                self._add(key, Named(key[0], "", shape, v.aval.dtype, layout, result.pinned, 0, False))
                self.unnamed.add(key)
            dims = None if result.dims is None else ((), *result.dims)
            out.append(dataclasses.replace(result, dims=dims, key=key, count=result.count * eqn.params["length"], origin=""))
        return out

    def _shard_map(self, eqn: Any, body: Any, operands: list[Value]) -> list[Value]:
        """Results leave as the map says; inside, arrays are each device's own part."""
        sizes = self.mesh.shape
        edges = []
        specs = [*zip(body.invars, eqn.params["in_specs"], operands, strict=True)]
        specs += [(v, spec, Value()) for v, spec in zip(body.outvars, eqn.params["out_specs"], strict=True)]
        for v, spec, operand in specs:
            # A shorter spec is that of a value which JAX itself carries between two halves of a differentiated map.
            if len(spec) == len(v.aval.shape):
                dims = _dims(spec, len(spec), sizes)
                axes = frozenset(a for part in dims for a in part)
                bare = operand.dims and split_tags(operand.dims)[0]
                edges.append((v.aval.shape, axes, operand.dims if operand.dims and bare == dims else dims))
        if eqn.params["newly_manual_axes"] == {"stage"}:
            # A pipeline: one stage's part of all, and over the other axes as without one.
            inner = self.walk(body, [dataclasses.replace(o, dims=_without(o.dims, "stage")) for o in operands], None)
        else:
            inner = self.walk(body, [Value(key=o.key, origin=o.origin) for o in operands], _Region(tuple(edges), sizes))
        out = []
        for v, spec, result in zip(eqn.outvars, eqn.params["out_specs"], inner, strict=True):
            dims = _dims(spec, len(v.aval.shape), sizes)
            out.append(Value(dims, True, result.origin, result.key, result.count, result.on_host))
        return out


def _without(dims: Dims | None, axis: str) -> Dims | None:
    return None if dims is None else tuple(tuple(a for a in part if a != axis) for part in dims)


def _stacks(eqn: Any) -> list[bool]:
    """Which results of a loop are stacked, one slice an iteration; the others are carried."""
    body: Any = next(iter(jaxprs_in_params(eqn.params)))
    return [len(v.aval.shape) > len(b.aval.shape) for v, b in zip(eqn.outvars, body.outvars, strict=True)]


def _produced_by(body: Jaxpr, v: Any) -> str:
    """What to call a saved array to which the model gave no name: the scopes it is made in, and the operation."""
    for eqn in reversed(body.eqns):
        if v in eqn.outvars:
            if eqn.primitive.name in (*SAME, "sharding_constraint"):
                v = eqn.invars[0]
                continue
            kind = eqn.params["name"] if eqn.primitive.name == "jit" else eqn.primitive.name
            return "/".join(filter(None, (str(eqn.source_info.name_stack), kind)))
    return "argument"


def _leave(aval: Any, region: _Region) -> tuple[tuple[int, ...], Dims | None]:
    """(global shape, layout) of an array inside a shard_map.

    It is laid out like the argument or result of the map that has its shape and differs over the same axes. If there is none,
    its parts are stacked along the first dimension, which is how JAX hands such an array to the backward pass.
    """
    axes = frozenset(a for a in aval.manual_axis_type.varying if region.sizes[a] > 1)
    for shape, over, dims in region.edges:
        if shape == aval.shape and over == axes:
            return _whole_shape(shape, dims, region.sizes), dims
    order = tuple(a for a in region.sizes if a in axes)
    if not aval.shape:
        return (), None
    dims = (order, *((),) * (len(aval.shape) - 1))
    return _whole_shape(aval.shape, dims, region.sizes), dims


def _whole_shape(shape: tuple[int, ...], dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size * math.prod(sizes[a] for a in part) for size, part in zip(shape, dims, strict=True))


def logical(found: Named, tagged_dims: Dims | None, placement: Placement) -> Axes | None:
    """Logical axes of an array, from its layout in the tagged trace; None where that tells nothing, or else than the rules."""
    if tagged_dims is None or found.dims is None or len(tagged_dims) != len(found.dims):
        return None
    bare, axes = split_tags(tagged_dims)
    known = {axis for axis, _ in placement.rules}
    ruled = [placement.mesh_axes(axis) == part if axis in known else True for axis, part in zip(axes, bare, strict=True)]
    return axes if bare == found.dims and all(ruled) else None


def bytes_of(shape: tuple[int, ...], dtype: Any) -> int:
    """Size of an array of this shape."""
    return math.prod(shape) * np.dtype(dtype).itemsize
