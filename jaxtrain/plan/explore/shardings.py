"""How a run is laid out over its devices: one row for every parameter, moment, gradient and activation of the train step.

Nothing is allocated and nothing is compiled. Parameters and moments come from the abstract state that training would allocate,
gathered weights and activations from the traced train step (layouts.py).

    table = describe("configs/llama3_8b.py", "h200:8", mesh={"fsdp": 4, "tensor": 2})
    table.filter(name="mlp", kind="parameter")
    picture(table.row("layers.mlp.gate"))
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from rich.console import Console

from jaxtrain import launch
from jaxtrain.activations import AXES
from jaxtrain.config import ConfigError, RunConfig, flatten
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.models.module import part
from jaxtrain.plan import topology as machines
from jaxtrain.plan.explore import layouts
from jaxtrain.plan.explore.layouts import WEIGHT, Named, Origin
from jaxtrain.plan.explore.pictures import Picture, draw
from jaxtrain.plan.explore.table import Row, Table, parse_filter
from jaxtrain.plan.program import split
from jaxtrain.plan.program.buffers import saved_activations
from jaxtrain.plan.topology import Topology
from jaxtrain.shapes import STACK
from jaxtrain.sharding import Axes
from jaxtrain.train.batch import MICROBATCHES
from jaxtrain.train.program import Program, build

# Dtypes by the short names that the config uses too.
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "i32", "uint32": "u32", "uint8": "u8"}
LAYER_INPUT = "layer_input"


def load(config: str | Path, **overrides: Any) -> RunConfig:
    """The run of a config file ("FILE.py" or "FILE.py:variant"), with keys set as on the command line.

    `overrides` are dotted keys or sections: `load(file, mesh={"fsdp": 4, "tensor": 2}, precision="f32")`.
    Raises ConfigError with all that is wrong.
    """
    given = [f"--config.{key}={value}" for key, value in flatten(overrides)]
    loaded = launch.load([f"--config={config}", *given])
    if loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded.run


def describe(config: RunConfig | str | Path, topology: str | Topology | Sequence[Any], **overrides: Any) -> Table:
    """How every array of a run's train step lies on the devices of a topology.

    Args:
      config: a run, or the path of a config file.
      topology: such as "h200:8", or one that is parsed already, or a list of devices, real or described.
      **overrides: keys of the config file, as `load` takes them.

    Raises ConfigError for a config that cannot be read, LayoutError or Unsupported for a layout that cannot be, and
    TopologyError for an unknown machine.
    """
    if isinstance(config, RunConfig) and overrides:
        raise TypeError("overrides belong to a config file: change the RunConfig with dataclasses.replace, or name its file")
    run = config if isinstance(config, RunConfig) else load(config, **overrides)
    if isinstance(topology, str):
        topology = machines.parse(topology)
    devices = machines.devices(topology) if isinstance(topology, Topology) else list(topology)
    name = topology.name if isinstance(topology, Topology) else f"{len(devices)} x {devices[0].device_kind}"
    program = build(run, devices)
    mesh = dict(program.placement.mesh.shape)
    shown = ", ".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1) or "one device"
    title = f"{run.model.family}, {run.model.num_layers} layers, on {name}: {shown}"
    rows = (*_state_rows(run, program), *_traced_rows(program), *_batch_rows(program))
    return Table(rows, title, mesh, tuple(_where(run, mesh)))


def _where(run: RunConfig, mesh: dict[str, int]) -> Iterator[str]:
    """Which layers lie on which stage, and how many experts on a device."""
    if (stages := mesh.get(split.STAGE, 1)) > 1:
        found = split.layers(run.model.num_layers, split.schedule_of(run, stages))
        yield f"layers by stage: {' | '.join(found)}."
    if (devices := mesh.get(split.EXPERT, 1)) > 1:
        each = run.model.num_experts // devices
        runs = [f"{i * each}-{(i + 1) * each - 1}" if each > 1 else str(i) for i in range(devices)]
        yield f"experts along expert: {' | '.join(runs)}."


def _row(
    name: str,
    kind: str,
    local: tuple[int, ...],
    dtype: Any,
    axes: Axes | None,
    sharding: NamedSharding | None,
    copies: int = 1,
    saved: str = "",
) -> Row:
    """Return the row of an array of which a device holds a shard of shape `local`."""
    short, each = SHORT.get(str(dtype), str(dtype)), math.prod(local) * jnp.dtype(dtype).itemsize
    if sharding is None:
        return Row(name, kind, None, short, None, None, local, each, None, None, copies, saved, None)
    dims = layouts.dims_of(sharding, len(local))
    parts = [math.prod(sharding.mesh.shape[a] for a in over) for over in dims]
    shape = tuple(size * count for size, count in zip(local, parts, strict=True))
    shards = math.prod(parts)
    replicas = sharding.mesh.size // shards
    return Row(name, kind, shape, short, axes, dims, local, each, each * shards, replicas, copies, saved, sharding)


def _at_rest(name: str, kind: str, a: Any, axes: Axes | None, dtype: Any = None, saved: str = "") -> Row:
    """Return the row of an array that a step takes or gives."""
    return _row(name, kind, a.sharding.shard_shape(a.shape), dtype or a.dtype, axes, a.sharding, saved=saved)


def _dotted(path: Any) -> str:
    """Names of attributes and dict keys; positions in tuples say nothing to a reader."""
    parts = [str(getattr(k, "name", None) or getattr(k, "key", "")) for k in path]
    return ".".join(p for p in parts if p)


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(_dotted(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _axes(program: Program) -> dict[str, Axes]:
    """Logical axes of every parameter, by its dotted name."""
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    found = jax.tree_util.tree_leaves_with_path(program.definition.axes, is_leaf=is_axes)
    return {_dotted(path): axes for path, axes in found}


def _state_rows(run: RunConfig, program: Program) -> list[Row]:
    axes, params = _axes(program), dict(_leaves(program.state.params))
    rows = [_at_rest(name, "parameter", a, axes[name]) for name, a in params.items()]
    for name, a in _leaves(program.state.optimizer):
        whole = name.removesuffix(".codes").removesuffix(".scales")  # of 8-bit blocks
        of = next((p for p in params if whole.endswith("." + p) and a.ndim == params[p].ndim), None)
        saved = "offload" if program.offload and a.shape else ""
        rows.append(_at_rest(name, "moment" if a.shape else "counter", a, axes[of] if of else None, saved=saved))
    # They leave the step's shard_map sharded like their parameter, in the dtype in which they are summed.
    learnt, grads = _leaves(part(program.state.params, program.trained)), DTYPES[run.dtypes.grads]
    return rows + [_at_rest(name, "gradient", a, axes[name], grads) for name, a in learnt]


def _batch_rows(program: Program) -> list[Row]:
    return [_at_rest(name, "batch", a, MICROBATCHES) for name, a in program.batch.items()]


def _traced_rows(program: Program) -> list[Row]:
    """Return the rows of gathered weights and activations, in the model's order, with unnamed ones last."""
    axes = _axes(program)
    closed = program.train_step.trace(program.state, program.batch).jaxpr
    origins: list[Origin | None] = []
    for path, _ in jax.tree_util.tree_leaves_with_path((program.state, program.batch)):
        # Position 0 of the path is that in (state, batch), position 1 the attribute of the state.
        is_param = path[0].idx == 0 and path[1].name == "params"
        origins.append(Origin(name := _dotted(path[2:]), axes[name]) if is_param else None)
    named, order = layouts.read(closed.jaxpr, origins), [*AXES]
    saved = _saved(program, next((n.shape for n in named if n.name == "residual"), None))
    activations = _activation_rows(program, named, saved)
    # Of what waits on the host, the last layer's stays on the device: its row comes second.
    activations.sort(key=lambda r: (order.index(r.name) if r.name in order else len(order), r.saved != "offload"))
    return _gathered_rows(program, named, saved) + activations


@dataclasses.dataclass(frozen=True)
class Saved:
    """Equal arrays that the forward pass saves for the backward pass."""

    name: str
    local: tuple[int, ...]  # on a device
    dtype: str  # as HLO calls it
    place: str  # keep | offload


def _saved(program: Program, stream: tuple[int, ...] | None) -> dict[Saved, int]:
    """Return all that the forward pass saves, and how many of each are held at once.

    Args:
      stream: the shape of the residual stream on a device. Saved activations of other shapes can be called layers' inputs too.
    """
    counts = collections.Counter(k for k in saved_activations(program) if not k.again and 0 not in k.dims)
    # A loop over layers saves a layer's input once, a pipeline once in each of its phases, into the same buffers.
    entry = next((k for k in counts if k.stacked and k.name == "layer input" and stream in (None, k.dims[1:])), None)
    found: collections.Counter[Saved] = collections.Counter()
    for k, count in counts.items():
        if k.stacked and entry is not None and k.dims[0] != entry.dims[0]:
            continue  # of a loop within a layer
        if k.stacked:
            count = k.dims[0] * count // (counts[entry] if entry is not None else 1)
        local = k.dims[1:] if k.stacked else k.dims
        name = "select_n" if k.name == "layer input" else k.name.removeprefix("jvp(layers)/")
        # The input of a layer that stands in no loop is the sum that the layer before it returns.
        if stream in (None, local) and (k.name == "layer input" or k.name.endswith("mlp)/add")):
            name = LAYER_INPUT
        found[Saved(name, local, k.dtype, "offload" if k.offloaded else "keep")] += count
    if entry is None:  # that of the first layer is what the embedding returns
        found.update({s: 1 for s in found if s.name == LAYER_INPUT})
    return found


def _gathered_rows(program: Program, named: Sequence[Named], saved: dict[Saved, int]) -> list[Row]:
    weights = [(n, n.origin) for n in named if n.origin is not None]
    alike = collections.Counter(n.shape for n, origin in weights if origin.parameter.startswith(f"{STACK}."))
    rows = []
    for n, origin in weights:
        # The saved ones have no names of their own: weights of one shape share them.
        kept = sum(count for s, count in saved.items() if (s.name, s.local) == (WEIGHT, n.shape))
        copies = max(1, kept // max(1, alike[n.shape])) if origin.parameter.startswith(f"{STACK}.") else 1
        sharding = layouts.in_use(origin.axes, program.placement)
        keep = "keep" if copies > 1 else ""
        rows.append(_row(origin.parameter, "gathered", n.shape, n.dtype, origin.axes, sharding, copies, keep))
    return rows


def _activation_rows(program: Program, named: Sequence[Named], saved: dict[Saved, int]) -> list[Row]:
    def row(name: str, local: tuple[int, ...], dtype: Any, copies: int, place: str) -> Row:
        axes = layouts.activation_axes(name, len(local), program.context)
        sharding = program.placement.sharding(axes, name) if axes else None
        return _row(name, "activation", local, dtype, axes, sharding, copies, place)

    waiting = {(s.name, s.local) for s in saved}
    again = [n for n in named if n.name != WEIGHT and (n.name, n.shape) not in waiting]
    # A saved array can have another dtype than where it is named: what follows may have converted it first.
    rows = [row(s.name, s.local, _dtype(s.dtype), count, s.place) for s, count in saved.items() if s.name != WEIGHT]
    return rows + [row(n.name, n.shape, n.dtype, 1, "recompute") for n in again]


def _dtype(hlo: str) -> Any:
    """Return the dtype that HLO calls by this name."""
    longer = {"pred": "bool", "bf": "bfloat", "f": "float", "u": "uint", "s": "int"}
    short = next(name for name in longer if hlo.startswith(name))
    return jnp.dtype(longer[short] + hlo.removeprefix(short))


def picture(array: Row | NamedSharding, shape: Sequence[int] | None = None) -> Picture:
    """Which device holds which part of an array: a row of the table, or a sharding and a shape.

    SVG in a notebook, text when printed. `jax.debug.visualize_array_sharding` draws arrays that exist; this needs none, works
    for described devices, and draws more than two dimensions. Raises ValueError for shards that make up no one array.
    """
    if isinstance(array, Row):
        if array.sharding is None or array.shape is None:
            raise ValueError(f"{array.name}: each device's shard is its own, and they make up no array to draw")
        names = [axis or f"dim {i}" for i, axis in enumerate(array.axes or (None,) * len(array.shape))]
        return draw(array.sharding, array.shape, names, f"{array.name} ({array.kind}), {array.spec}")
    if shape is None:
        raise ValueError("a sharding is drawn for a shape: picture(sharding, shape)")
    return draw(array, tuple(shape), [f"dim {i}" for i in range(len(shape))], str(array.spec))


def print_table(run: RunConfig, topology: str | Topology | Sequence[Any], filter: str, console: Console) -> None:
    """The table of a run on a console; `filter` as `parse_filter` reads it, "" for all. Raises what `describe` raises,
    and ValueError where no array is like that."""
    asked = parse_filter(filter)
    found = describe(run, topology).filter(**asked)
    if not found.rows():
        raise ValueError(f"--shardings={filter}: no array is like that; --shardings alone lists all of them")
    console.print(found.grid(narrow=console.width < 140))
