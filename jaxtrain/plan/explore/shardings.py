"""How a run is laid out over its devices: one row for every parameter, moment, gradient and activation of the train step.

Nothing is allocated and nothing is compiled. Parameters and moments come from the abstract state that training would allocate;
activations from the traced train step itself (layouts.py), so there is no second table that could differ from the model.

    table = describe("configs/llama3_8b.py", "h200:8", mesh={"fsdp": 4, "tensor": 2})
    table.filter(name="mlp", kind="parameter")
    picture(table.row("layers.mlp.gate"))
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxtrain import launch
from jaxtrain.activations import ACTIVATIONS
from jaxtrain.config import ConfigError, RunConfig, flatten
from jaxtrain.kernels.context.split import Split
from jaxtrain.kernels.dot import DTYPES
from jaxtrain.loss import LossSpec, loss_function
from jaxtrain.models.attention import Kernel
from jaxtrain.plan import topology as machines
from jaxtrain.plan.explore import layouts
from jaxtrain.plan.explore.layouts import Named, Value
from jaxtrain.plan.explore.pictures import Picture, draw
from jaxtrain.plan.explore.table import Row, Table, parse_filter
from jaxtrain.plan.program import split
from jaxtrain.plan.topology import Topology
from jaxtrain.sharding import Axes
from jaxtrain.step import MICROBATCHES, Program, attention_specs, build, make_definition, numerics_of

# Types by the short names that the config uses too.
SHORT = {"float32": "f32", "bfloat16": "bf16", "int32": "i32", "uint8": "u8", "bool": "bool"}


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
    rows = (*_state_rows(run, program), *_traced_rows(run, program), *_batch_rows(program))
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
    shape: tuple[int, ...],
    dtype: Any,
    axes: Axes | None,
    dims: layouts.Dims | None,
    mesh: jax.sharding.Mesh,
    copies: int = 1,
    saved: str = "",
    layout: str = "stated",
) -> Row:
    short, whole = SHORT.get(str(dtype), str(dtype)), layouts.bytes_of(shape, dtype)
    if dims is None:
        return Row(name, kind, shape, short, axes, None, None, None, whole, None, copies, saved, "compiler", None)
    sharding = NamedSharding(mesh, P(*(part or None for part in dims)))
    local = sharding.shard_shape(shape)
    parts = math.prod(mesh.shape[a] for part in dims for a in part)
    each = layouts.bytes_of(local, dtype)
    return Row(name, kind, shape, short, axes, dims, local, each, whole, mesh.size // parts, copies, saved, layout, sharding)


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
    mesh, axes = program.placement.mesh, _axes(program)
    params = dict(_leaves(program.state.params))
    rows = [
        _row(n, "parameter", a.shape, a.dtype, axes[n], layouts.dims_of(a.sharding, a.ndim), mesh) for n, a in params.items()
    ]
    for name, a in _leaves(program.state.optimizer):
        whole = name.removesuffix(".codes").removesuffix(".scales")  # of 8-bit blocks
        of = next((p for p in params if whole.endswith("." + p) and a.ndim == params[p].ndim), None)
        dims, kind = layouts.dims_of(a.sharding, a.ndim), "moment" if a.shape else "counter"
        saved = "offload" if program.offload and a.shape else ""
        rows.append(_row(name, kind, a.shape, a.dtype, axes[of] if of else None, dims, mesh, saved=saved))
    # As `pinned` in step.py leaves them: split like their parameter, in the type they are summed in.
    grads = DTYPES[run.dtypes.grads]
    rows += [_row(n, "gradient", a.shape, grads, axes[n], layouts.dims_of(a.sharding, a.ndim), mesh) for n, a in params.items()]
    return rows


def _batch_rows(program: Program) -> list[Row]:
    mesh = program.placement.mesh
    return [
        _row(name, "batch", a.shape, a.dtype, MICROBATCHES, layouts.dims_of(a.sharding, len(a.shape)), mesh)
        for name, a in program.batch.items()
    ]


def _traced_rows(run: RunConfig, program: Program) -> list[Row]:
    """Gathered weights and activations, in the model's order, unnamed ones last."""
    mesh, axes = program.placement.mesh, _axes(program)
    closed = program.train_step.trace(program.state, program.batch).jaxpr
    inputs = []
    for path, a in jax.tree_util.tree_leaves_with_path((program.state, program.batch)):
        # Position 0 of the path is that in (state, batch), position 1 the attribute of the state.
        is_param = path[0].idx == 0 and path[1].name == "params"
        inputs.append(Value(layouts.dims_of(a.sharding, a.ndim), True, _dotted(path[2:]) if is_param else ""))
    found = layouts.read(closed.jaxpr, inputs, mesh)
    tags = _tagged(run, program)
    rows = []
    for key, named in found.items():
        of = axes.get(named.origin)
        if of is not None and named.name == layouts.GATHERED:
            logical, name, kind = of[len(of) - len(named.shape) :], named.origin, "gathered"
            rows.append(_row(name, kind, named.shape, named.dtype, logical, named.dims, mesh))
            continue
        logical = layouts.logical(named, tags[key].dims, program.placement) if key in tags else None
        saved = ("offload" if named.on_host else "keep") if named.saved else "recompute"
        layout = "stated" if named.pinned else "follows"
        rows.append(
            _row(
                named.name,
                "activation",
                named.shape,
                named.dtype,
                logical,
                named.dims,
                mesh,
                max(named.saved, 1),
                saved,
                layout,
            )
        )
    order = [layouts.LAYER_INPUT, *ACTIVATIONS]
    return sorted(rows, key=lambda r: (r.kind != "gathered", order.index(r.name) if r.name in order else len(order)))


def _tagged(run: RunConfig, program: Program) -> dict[tuple[str, str], Named]:
    """The same arrays with their logical axes: the loss is traced once more, with constraints that carry them."""
    placement = layouts.tagged(program.placement)
    definition = make_definition(run, placement, Kernel(program.attention, attention_specs(run), Split(program.context)))
    spec = LossSpec(numerics_of(run), placement, run.loss.chunk, run.model.logit_softcap)
    loss = loss_function(run.loss.name)

    def loss_of(params: Any, micro: Any) -> jax.Array:
        model = definition.bind(params)
        hidden = model(micro["tokens"], micro["segments"], micro["positions"])
        return loss(hidden, model.head_VD, micro, spec)

    micro = {k: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for k, a in program.batch.items()}
    closed = jax.make_jaxpr(jax.value_and_grad(loss_of))(definition.abstract, micro)
    axes = _axes(program)
    inputs = [
        Value(layouts.dims_of(placement.sharding(axes[name]), len(axes[name])), True, name)
        for name, _ in _leaves(definition.abstract)
    ]
    inputs += [Value(layouts.dims_of(placement.sharding(MICROBATCHES[1:]), 2), True) for _ in micro]
    return layouts.read(closed.jaxpr, inputs, placement.mesh)


def picture(array: Row | NamedSharding, shape: Sequence[int] | None = None) -> Picture:
    """Which device holds which part of an array: a row of the table, or a sharding and a shape.

    SVG in a notebook, text when printed. `jax.debug.visualize_array_sharding` draws arrays that exist; this needs none, works
    for described devices, and draws more than two dimensions. Raises ValueError for a layout that only the compiler knows.
    """
    if isinstance(array, Row):
        if array.sharding is None:
            raise ValueError(f"{array.name}: its layout is left to the compiler, so there is nothing to draw")
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
