"""The sharding of every array of a train step: a row for each parameter, moment, gradient, gathered weight and activation.

Nothing is allocated and nothing is compiled. Parameters and moments come from the abstract state of the run. Activations come
from the traced step: inside its shard_map each array has the shape of a device's shard. The trace lacks the global layout of
these shards, which comes from the logical axes of jaxtrain/models/activations.py.

    found = jaxtrain.shardings("llama3_8b", "h200:8", mesh={"fsdp": 4, "tensor": 2})
    found.filter(name="mlp", kind="parameter")
    found["layers.mlp.gate"].draw()
"""

import collections
import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config.layout import Layout
from jaxtrain.config.numbers import plural
from jaxtrain.config.schema import EXPERT_AXIS, ConfigError, Problem, RunConfig, nearest
from jaxtrain.config.shapes import STACK
from jaxtrain.models.activations import AXES, PLACES
from jaxtrain.models.module import part
from jaxtrain.plan import topology as machines
from jaxtrain.plan.program import pipeline_moe
from jaxtrain.plan.program.buffers import WEIGHT, saved_activations
from jaxtrain.plan.topology import Topology
from jaxtrain.sharding import Axes
from jaxtrain.step.batch import MICROBATCHES
from jaxtrain.step.definition import fp8_weights
from jaxtrain.step.program import Program, build

KINDS = ("parameter", "counter", "moment", "gradient", "gathered", "activation", "batch", "array")
# JAX name of a dtype -> short name, as in the config.
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "i32", "uint32": "u32", "uint8": "u8"}
LAYER_INPUT = "layer_input"
EMBEDDING, HEAD = "embed.embedding", "head"
FILTERS = ("name", "kind", "axis", "saved", "replicas")

Dims = tuple[tuple[str, ...], ...]  # mesh axes that shard each dimension


# ---- Tables


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of a train step, and its shards.

    Attributes:
        kind: one of KINDS. "gathered": a weight in use, in the compute dtype, replicated over the axes that shard the batch.
            "activation": an activation of one layer and one microbatch.
        local_shape: shape of a device's shard.
        axes: logical axis of each dimension, if they are known.
        sharding: None: the global layout of the shards is unknown, and so is the global shape.
        copies: arrays of this shape in memory at the same time, such as one for each layer that saves the activation.
        saved: keep | offload | recompute for activations; keep for saved gathered weights; offload for moments in host memory;
            else "".
    """

    name: str
    kind: str
    local_shape: tuple[int, ...]
    dtype: str
    bytes_per_device: int  # of one copy
    axes: Axes | None
    sharding: NamedSharding | None = dataclasses.field(repr=False)
    copies: int = 1
    saved: str = ""

    @property
    def spec(self) -> P | None:
        """Return the PartitionSpec; None if the global layout is unknown."""
        return None if self.sharding is None else self.sharding.spec

    @property
    def mesh_axes(self) -> Dims | None:
        """Return the mesh axes that shard each dimension; None if the global layout is unknown."""
        if self.spec is None:
            return None
        dims = [(over,) if isinstance(over, str) else tuple(over or ()) for over in self.spec]
        return (*dims, *[()] * (len(self.local_shape) - len(dims)))

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return the global shape; None if it is unknown."""
        if self.sharding is None or self.mesh_axes is None:
            return None
        mesh = self.sharding.mesh.shape
        return tuple(n * math.prod(mesh[a] for a in over) for n, over in zip(self.local_shape, self.mesh_axes, strict=True))

    @property
    def total_bytes(self) -> int | None:
        """Return the bytes of the global array without replicas; None if its shape is unknown."""
        return None if self.shape is None else self.bytes_per_device * math.prod(self.shape) // math.prod(self.local_shape)

    @property
    def replicas(self) -> int | None:
        """Return the number of devices that hold the same shard; None if the global layout is unknown."""
        if self.sharding is None or self.total_bytes is None:
            return None
        return self.sharding.mesh.size * self.bytes_per_device // self.total_bytes

    @property
    def held_bytes(self) -> int:
        """Return the bytes of all copies on one device; 0 if the array is in host memory."""
        return 0 if self.saved == "offload" else self.bytes_per_device * self.copies

    @property
    def type(self) -> str:
        """Return dtype, global shape and mesh axes, such as f32[32, 4096@fsdp, 14336@tensor]."""
        if self.shape is None or self.mesh_axes is None:
            return f"{self.dtype}[?]"
        dims = (f"{n}@{'+'.join(over)}" if over else str(n) for n, over in zip(self.shape, self.mesh_axes, strict=True))
        return f"{self.dtype}[{', '.join(dims)}]"

    @property
    def layout(self) -> str:
        """Return "logical axis→mesh axes" of each dimension; "each device's own" if the global layout is unknown."""
        if self.mesh_axes is None:
            return "each device's own"
        axes = self.axes or ("?",) * len(self.mesh_axes)
        return ", ".join(
            f"{axis or '·'}{'→' + '+'.join(over) if over else ''}" for axis, over in zip(axes, self.mesh_axes, strict=True)
        )


PLAIN = ("name", "kind", "type", "shape", "dtype", "axes", "mesh_axes", "local_shape", "bytes_per_device", "total_bytes",
         "replicas", "copies", "saved")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shardings[R: Row]:
    """A table of arrays, such as those of a train step. notes: the layers of each stage, and the experts of each device."""

    entries: tuple[R, ...]
    title: str
    mesh: dict[str, int]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[R]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> R:
        """Return the row of this name: the parameter, if several kinds have the name. Raises ConfigError if no row has it."""
        return self.row(name)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict of plain values for each row."""
        return [{**{name: getattr(row, name) for name in PLAIN}, "spec": str(row.spec)} for row in self.entries]

    def filter(self, name: str = "", kind: str = "", axis: str = "", saved: str = "", replicas: int = 0) -> Self:
        """Return the rows that meet all conditions.

        Args:
            name: a substring of the name, or a pattern with * and ?.
            kind: one of KINDS.
            axis: a mesh axis that shards the array, or a logical axis that it has.
            saved: keep | offload | recompute.
            replicas: at least this many devices hold the same shard.

        Raises:
            ConfigError: a kind, an axis or a value of `saved` that does not exist.
        """
        logical = {a for row in self.entries for a in row.axes or () if a}
        choices = {"kind": [*KINDS], "axis": [*self.mesh, *sorted(logical)], "saved": [*PLACES]}
        for key, value in (("kind", kind), ("axis", axis), ("saved", saved)):
            if value and value not in choices[key]:
                hint = nearest(value, choices[key])
                raise ConfigError([Problem(key, value, f"no array of this table has such a {key}", hint)])
        pattern = name if set(name) & set("*?") else f"*{name}*"

        def matches(row: Row) -> bool:
            over = {a for dim in row.mesh_axes or () for a in dim} | {*(row.axes or ())}
            return (
                fnmatch.fnmatchcase(row.name, pattern)
                and kind in ("", row.kind)
                and (not axis or axis in over)
                and saved in ("", row.saved)
                and (row.replicas or 0) >= replicas
            )

        return dataclasses.replace(self, entries=tuple(filter(matches, self.entries)))

    def row(self, name: str, kind: str = "") -> R:
        """Return the row of this name and kind; without `kind`, the first. Raises ConfigError if no row matches."""
        for row in self.entries:
            if row.name == name and kind in ("", row.kind):
                return row
        known = list(dict.fromkeys(row.name for row in self.entries if kind in ("", row.kind)))
        raise ConfigError([Problem("name", name, f"no {kind or 'array'} of this table is called so", nearest(name, known))])


def changes[R: Row](before: Shardings[R], after: Shardings[R]) -> dict[tuple[str, str], tuple[R | None, R | None]]:
    """Return (name, kind) -> rows before and after of the arrays that differ in sharding or in size on a device.

    None: this side does not have the array.
    """
    old, new = ({(row.name, row.kind): row for row in found} for found in (before, after))
    pairs = {key: (old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])}

    def layout(row: R | None) -> tuple[Dims | None, int] | None:
        return row and (row.mesh_axes, row.held_bytes)

    return {key: (a, b) for key, (a, b) in pairs.items() if layout(a) != layout(b)}


def parse_filter(text: str) -> dict[str, Any]:
    """Parse "mlp" or "kind=activation,axis=fsdp" to arguments of `Shardings.filter`. Raises ConfigError for other text."""
    out: dict[str, Any] = {}
    for item in filter(None, (word.strip() for word in text.split(","))):
        key, given, value = item.partition("=")
        if not given:
            key, value = "name", item
        if key not in FILTERS:
            raise ConfigError([Problem("--shardings", item, f"cannot filter by {key!r}", nearest(key, list(FILTERS)))])
        if key == "replicas" and not value.isdigit():
            raise ConfigError([Problem("--shardings", item, "must be a number of devices", "For example replicas=8.")])
        out[key] = int(value) if key == "replicas" else value
    return out


# ---- The arrays of a run


def describe(run: RunConfig, topology: Topology | Sequence[Any]) -> Shardings[Row]:
    """Return the sharding of every array of a run's train step.

    Args:
        topology: a machine, or a list of devices, which need not be present.

    Raises:
        ConfigError: the layout is impossible.
        RuntimeError: the GPUs are not present, and XLA's GPU compiler is not installed.
    """
    devices = machines.devices(topology) if isinstance(topology, Topology) else list(topology)
    name = topology.name if isinstance(topology, Topology) else f"{len(devices)} x {devices[0].device_kind}"
    program = build(run, devices)
    mesh = dict(program.placement.mesh.shape)
    shown = ", ".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1) or "one device"
    title = f"{run.model.family}, {plural(run.model.num_layers, 'layer')}, on {name}: {shown}"
    named = _named_activations(program)
    saved = _saved_activations(program, named)
    rows = (*_state_rows(program), *_gathered_rows(program, saved), *_activation_rows(program, named, saved))
    batch = (_global_row(name, "batch", a, MICROBATCHES) for name, a in program.batch.items())
    return Shardings((*rows, *batch), title, mesh, tuple(_places(program.layout, run.model.num_experts)))


def of_tree(tree: Any) -> Shardings[Row]:
    """Return the sharding of every array of a pytree, such as a model's parameters.

    Args:
        tree: leaves are jax.Array or jax.ShapeDtypeStruct with a sharding.

    Raises:
        TypeError: a leaf has no sharding by named axes and is not on one device.
    """
    rows, mesh = [], {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, sharding = jax.tree_util.keystr(path, simple=True, separator="."), getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.SingleDeviceSharding):
            one = jax.sharding.Mesh(np.array(list(sharding.device_set)), ("device",))
            sharding = NamedSharding(one, P())
        if not isinstance(sharding, NamedSharding):
            raise TypeError(f"{name or 'the tree'}: {type(leaf).__name__} without a NamedSharding has no mesh axes to show")
        mesh |= dict(sharding.mesh.shape)
        rows.append(_row(name, "array", sharding.shard_shape(leaf.shape), leaf.dtype, None, sharding))
    shown = ", ".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1) or "one device"
    return Shardings(tuple(rows), f"{plural(len(rows), 'array')}: {shown}", mesh)


def _places(layout: Layout, num_experts: int) -> Iterator[str]:
    """Yield texts about the layers of each stage, and the experts of each index along mesh.expert."""
    if layout.pipelined:
        yield f"layers by stage: {' | '.join(pipeline_moe.layers(layout.stages))}."
    if (devices := layout.size(EXPERT_AXIS)) > 1:
        each = num_experts // devices
        runs = [f"{i * each}-{(i + 1) * each - 1}" if each > 1 else str(i) for i in range(devices)]
        yield f"experts along expert: {' | '.join(runs)}."


def _row(name: str, kind: str, local: tuple[int, ...], dtype: Any, *more: Any) -> Row:
    """Return the row of an array. local: shape of a device's shard. more: the fields of Row from `axes` on."""
    return Row(name, kind, local, SHORT.get(str(dtype), str(dtype)), math.prod(local) * jnp.dtype(dtype).itemsize, *more)


def _global_row(name: str, kind: str, a: Any, axes: Axes | None, dtype: Any = None, saved: str = "") -> Row:
    """Return the row of an argument or a result of the step. a: jax.ShapeDtypeStruct of global shape, with a sharding."""
    return _row(name, kind, a.sharding.shard_shape(a.shape), dtype or a.dtype, axes, a.sharding, 1, saved)


def _leaves(tree: Any, **how: Any) -> dict[str, Any]:
    """Return dotted name -> leaf of a pytree. The names leave out indices of tuples."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, **how):
        names = [str(getattr(key, "name", None) or getattr(key, "key", "")) for key in path]
        found[".".join(filter(None, names))] = leaf
    return found


def _axes(program: Program) -> dict[str, Axes]:
    """Return the logical axes of every parameter, by its dotted name."""
    return _leaves(program.definition.axes, is_leaf=lambda x: isinstance(x, tuple))


def _state_rows(program: Program) -> Iterator[Row]:
    """Yield the rows of parameters, moments, counters and gradients."""
    axes, params = _axes(program), _leaves(program.state.params)
    for name, a in params.items():
        yield _global_row(name, "parameter", a, axes[name])
    for name, a in _leaves(program.state.optimizer).items():
        whole = name.removesuffix(".codes").removesuffix(".scales")  # arrays of 8-bit moments
        of = next((p for p in params if whole.endswith("." + p) and a.ndim == params[p].ndim), None)
        saved = "offload" if program.offload and a.shape else ""
        yield _global_row(name, "moment" if a.shape else "counter", a, axes[of] if of else None, saved=saved)
    # Gradients leave the step's shard_map sharded like their parameter, in the dtype in which they are summed.
    for name, a in _leaves(part(program.state.params, program.trained)).items():
        yield _global_row(name, "gradient", a, axes[name], program.zero.numerics.sums)


def _gathered_rows(program: Program, saved: "Saved") -> Iterator[Row]:
    """Yield the rows of gathered weights, by the same rules as the step (jaxtrain/models/zero.py)."""
    p, zero, numerics = program.placement, program.zero, program.zero.numerics
    params, all_axes, exact = _leaves(program.state.params), _axes(program), _leaves(program.definition.exact)
    fp8 = _leaves(fp8_weights(program.run.precision, program.run.fp8.exclude, program.definition))
    found = []
    for name, a in params.items():
        if name == EMBEDDING and HEAD in params and not zero.reduce_once:
            continue  # the lookup sends rows of the sharded embedding and gathers nothing
        of_layer = all_axes[name][0] == "layers" and not zero.gather_once
        axes, shape = (all_axes[name][1:], a.shape[1:]) if of_layer else (all_axes[name], a.shape)
        sharding = NamedSharding(p.mesh, P(*(p.compute_axes(axis) or None for axis in axes)))
        dtype = jnp.dtype("uint8") if fp8[name] else a.dtype if exact[name] else numerics.compute
        found.append((name, sharding.shard_shape(shape), dtype, axes, sharding))
    # Saved gathered weights have no names, so their copies are divided among the weights of that shape.
    alike = collections.Counter(local for name, local, *_ in found if name.startswith(f"{STACK}."))
    for name, local, dtype, axes, sharding in found:
        kept = sum(count for (saved_name, shape, *_), count in saved.items() if (saved_name, shape) == (WEIGHT, local))
        copies = max(1, kept // max(1, alike[local])) if name.startswith(f"{STACK}.") else 1
        yield _row(name, "gathered", local, dtype, axes, sharding, copies, "keep" if copies > 1 else "")


Named = dict[tuple[str, tuple[int, ...]], Any]  # (name, shape on a device) -> dtype
Saved = dict[tuple[str, tuple[int, ...], str, str], int]  # (name, shape on a device, HLO dtype, keep | offload) -> copies


def _named_activations(program: Program) -> Named:
    """Return the arrays that the model names by `checkpoint_name`, in the order of the traced step."""
    found: Named = {}

    def walk(jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            for body in jaxprs_in_params(eqn.params):
                walk(body)
            if eqn.primitive.name == "name" and eqn.params["name"] != WEIGHT:
                aval: Any = eqn.outvars[0].aval
                found.setdefault((eqn.params["name"], aval.shape), aval.dtype)

    walk(program.train_step.trace(program.state, program.batch).jaxpr.jaxpr)
    return found


def _saved_activations(program: Program, named: Named) -> Saved:
    """Return (name, local shape, dtype, keep | offload) -> number of such saved activations in memory at the same time."""
    counts = collections.Counter(k for k in saved_activations(program) if not k.again and 0 not in k.dims)
    # A layer's input has the shape of the residual stream. Other saved arrays can have the name "layer input" too.
    stream = next((shape for name, shape in named if name == "residual"), None)
    # A loop over layers saves a layer's input once. A pipeline saves it in each of its phases, in the same buffers.
    entry = next((k for k in counts if k.stacked and k.name == "layer input" and stream in (None, k.dims[1:])), None)
    found: collections.Counter[tuple[str, tuple[int, ...], str, str]] = collections.Counter()
    for k, count in counts.items():
        if k.stacked and entry is not None and k.dims[0] != entry.dims[0]:
            continue  # saved by a loop within a layer
        if k.stacked:
            count = k.dims[0] * count // (counts[entry] if entry is not None else 1)
        local = k.dims[1:] if k.stacked else k.dims
        name = "select_n" if k.name == "layer input" else k.name.removeprefix("jvp(layers)/")
        # The input of a layer outside of a loop is the sum that the previous layer returns.
        if stream in (None, local) and (k.name == "layer input" or k.name.endswith("mlp)/add")):
            name = LAYER_INPUT
        found[name, local, k.dtype, "offload" if k.offloaded else "keep"] += count
    if entry is None:  # the first layer's input is the output of the embedding
        found.update({key: 1 for key in found if key[0] == LAYER_INPUT})
    return found


def _activation_rows(program: Program, named: Named, saved: Saved) -> list[Row]:
    """Return the rows of activations in the order of the model. Activations without a name are last.

    The global layout is unknown for the tokens of a device's experts and for arrays without a name. It is also unknown for
    outputs of Ulysses attention, since their shards are heads instead of tokens.
    """

    def row(name: str, local: tuple[int, ...], dtype: Any, copies: int, place: str) -> Row:
        axes, exchanged = AXES.get(name, ()), program.context.ulysses > 1 and name in ("attention_out", "attention_lse")
        known = len(axes) == len(local) and not exchanged
        how = (axes, program.placement.sharding(axes, name)) if known else (None, None)
        return _row(name, "activation", local, dtype, *how, copies, place)

    # A saved array can have another dtype than the named array, since later operations can convert it before it is saved.
    rows = [row(name, local, _dtype(hlo), n, place) for (name, local, hlo, place), n in saved.items() if name != WEIGHT]
    names = {(name, local) for name, local, *_ in saved}
    rows += [row(*key, dtype, 1, "recompute") for key, dtype in named.items() if key not in names]
    order = [*AXES]
    # If some layers offload an array and the last layer keeps it on the device, the row of the kept array is second.
    return sorted(rows, key=lambda r: (order.index(r.name) if r.name in order else len(order), r.saved != "offload"))


def _dtype(hlo: str) -> Any:
    """Return the dtype that has this name in HLO."""
    longer = {"pred": "bool", "bf": "bfloat", "f": "float", "u": "uint", "s": "int"}
    short = next(name for name in longer if hlo.startswith(name))
    return jnp.dtype(longer[short] + hlo.removeprefix(short))
