"""The table of the arrays in jaxtrain.plan.shardings, for terminals and notebooks.

table = jaxtrain.shardings("llama3_8b", "h200:8", mesh={"fsdp": 4, "tensor": 2})
table.filter(name="mlp", kind="parameter")
table.draw("layers.mlp.gate")
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxtrain.config.numbers import plural, size
from jaxtrain.config.schema import ConfigError, Problem, RunConfig, suggest
from jaxtrain.plan import topology as machines
from jaxtrain.plan.program import pipeline_moe
from jaxtrain.plan.shardings import ShardingRow, array_row, step_rows
from jaxtrain.plan.topology import Topology
from jaxtrain.report.tables import Table, data_frame, text_table
from jaxtrain.step.program import build_program

COLUMNS = ("name", "kind", "type", "shape", "dtype", "axes", "mesh_axes", "local_shape", "bytes_per_device", "total_bytes",
           "replicas", "copies", "device_bytes", "saved")  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class Shardings:
    """A table of arrays. It shows itself as a tree."""

    rows: tuple[ShardingRow, ...]
    title: str

    def __iter__(self) -> Iterator[ShardingRow]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> ShardingRow:
        """Return the first row of this name: the parameter, if several kinds have it. Raises ConfigError if no row has it."""
        for row in self:
            if row.name == name:
                return row
        raise _unknown("name", name, [row.name for row in self])

    def filter(self, name: str = "", kind: str = "") -> "Shardings":
        """Return the rows of this kind whose name contains `name`, or matches it if it has * or ?.

        Raises:
            ConfigError: the table has no such row.
        """
        kinds, pattern = [row.kind for row in self], name if set(name) & set("*?") else f"*{name}*"
        if kind and kind not in kinds:
            raise _unknown("kind", kind, kinds)
        rows = tuple(row for row in self if kind in ("", row.kind) and fnmatch.fnmatchcase(row.name, pattern))
        if not rows:
            raise _unknown("name", name, [row.name for row in self])
        return Shardings(rows, self.title)

    def draw(self, name: str) -> Table:
        """Return a picture of an array on the mesh: the indices of each shard, and the devices that hold it.

        The columns are the shards along the last sharded dimension, the lines those along all others.

        Raises:
            ConfigError: no row has this name.
            ValueError: the global layout of the array is unknown.
        """
        row = self[name]
        if row.sharding is None or row.shape is None:
            raise ValueError(f"{name}: each device's shard is its own")
        names = [axis or f"dim {i}" for i, axis in enumerate(row.axes or [""] * len(row.shape))]
        sharded = [i for i, local in enumerate(row.local_shape) if local < row.shape[i]]
        down, across = (sharded[:-1], sharded[-1:]) if len(sharded) > 1 else (sharded, [])
        device_ids: dict[str, dict[str, list[int]]] = {}
        shards = row.sharding.devices_indices_map(row.shape).items()
        for device, index in sorted(shards, key=lambda shard: [at.start or 0 for at in shard[1]]):
            line = ", ".join(f"{index[i].start}:{index[i].stop}" for i in down)
            column = "".join(f"{names[i]} {index[i].start}:{index[i].stop}" for i in across)
            device_ids.setdefault(line, {}).setdefault(column or "devices", []).append(device.id)
        headings = (", ".join(names[i] for i in down), *next(iter(device_ids.values())))
        cells = [(line or "all", *map(_devices, columns.values())) for line, columns in device_ids.items()]
        return text_table(f"{name} ({row.kind}) {row.type}", headings, cells)

    def diff(self, other: "Shardings", title: str = "") -> Table:
        """Return a table of the arrays that `other` lacks, adds, shards differently, or has in another size on a device."""
        old, new = ({(row.name, row.kind): row for row in table} for table in (self, other))
        pairs = {key: (old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])}
        cells = []
        for key, pair in pairs.items():
            before, after = (row and (row.mesh_axes, row.device_bytes) for row in pair)
            if before != after:
                types = [row.type if row else "-" for row in pair]
                cells.append((*key, *types, *(_total([row]) if row else "-" for row in pair)))
        headings = ("name", "kind", "before", "after", "held before", "held after")
        title = title or f"{self.title}  ⇒  {other.title}"
        return text_table(title, headings, cells, ("all arrays", "", "", "", _total(self), _total(other)))

    def sums(self) -> Table:
        """Return a table of bytes by kind: of the global arrays without replicas, and on one device."""
        cells = []
        for kind, rows in _grouped(self, lambda row: f"{row.kind}, {row.saved}" if row.saved else row.kind).items():
            global_bytes = [row.total_bytes * row.copies for row in rows if row.total_bytes is not None]
            unknown = f" without {len(rows) - len(global_bytes)} of each device's own" if len(global_bytes) < len(rows) else ""
            cells.append((kind, str(len(rows)), _size(sum(global_bytes)) + unknown, _total(rows)))
        return text_table(self.title, ("kind", "arrays", "global", "held by a device"), cells)

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row for each array. Needs pandas."""
        return data_frame([{name: getattr(row, name) for name in COLUMNS} for row in self])

    def _tree(self) -> dict[str, str]:
        """Return the heading of each kind -> a line for each array."""
        tree = {}
        for kind, rows in _grouped(self, lambda row: row.kind).items():
            wide = max(len(row.name) for row in rows), max(len(row.type) for row in rows)
            lines = [f"  {row.name:<{wide[0]}}  {row.type:<{wide[1]}}  {_device_bytes(row)}" for row in rows]
            tree[f"{kind}: {plural(len(rows), 'array')}, {_total(rows)} on a device"] = "\n".join(lines)
        return tree

    def __repr__(self) -> str:
        return "\n".join([self.title, *(f"{kind}\n{lines}" for kind, lines in self._tree().items())])

    def _repr_html_(self) -> str:
        """Return the tree as HTML for a notebook. Each kind can be folded; the first one is open."""
        blocks = [f"<summary>{escape(kind)}</summary><pre>{escape(lines)}</pre>" for kind, lines in self._tree().items()]
        kinds = "".join(f"<details{' open' * (i == 0)}>{block}</details>" for i, block in enumerate(blocks))
        return f'<div style="font-family: monospace; text-align: left"><b>{escape(self.title)}</b>{kinds}</div>'


def run_shardings(run: RunConfig, topology: Topology | Sequence[Any]) -> Shardings:
    """Return the table of a run's train step.

    Args:
        topology: a machine, or a list of devices, which need not be present.

    Raises:
        ConfigError: the layout is impossible.
        RuntimeError: the GPUs are not present, and XLA's GPU compiler is not installed.
    """
    devices = machines.devices(topology) if isinstance(topology, Topology) else list(topology)
    machine = topology.name if isinstance(topology, Topology) else f"{len(devices)} x {devices[0].device_kind}"
    program = build_program(run, devices)
    stages = f" ({' | '.join(pipeline_moe.stage_layers(program.layout.stages))} by stage)" if program.layout.pipelined else ""
    layers = plural(run.model.num_layers, "layer") + stages
    return _table(step_rows(program), f"{run.model.family}, {layers}, on {machine}")


def tree_shardings(tree: Any) -> Shardings:
    """Return the table of a pytree of arrays, such as a model's parameters.

    Args:
        tree: leaves are jax.Array or jax.ShapeDtypeStruct with a sharding.

    Raises:
        TypeError: a leaf has no sharding by named axes and is not on one device.
    """
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, sharding = jax.tree_util.keystr(path, simple=True, separator="."), getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.SingleDeviceSharding):
            sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("device",), devices=[*sharding.device_set]), P())
        if not isinstance(sharding, jax.sharding.NamedSharding):
            raise TypeError(f"{name or 'the tree'}: {type(leaf).__name__} without a NamedSharding has no mesh axes to show")
        rows.append(array_row(name, "array", jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)))
    return _table(tuple(rows), plural(len(rows), "array"))


def _table(rows: tuple[ShardingRow, ...], title: str) -> Shardings:
    mesh = {axis: n for row in rows if row.sharding for axis, n in row.sharding.mesh.shape.items() if n > 1}
    return Shardings(rows, f"{title}: {', '.join(f'{axis}={n}' for axis, n in mesh.items()) or 'one device'}")


def _unknown(key: str, value: str, candidates: list[str]) -> ConfigError:
    hint = suggest(value, list(dict.fromkeys(candidates)))
    return ConfigError([Problem(key, value, f"no array of this table has this {key}", hint)])


def _grouped(rows: Iterable[ShardingRow], key: Callable[[ShardingRow], str]) -> dict[str, list[ShardingRow]]:
    groups: dict[str, list[ShardingRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _devices(ids: list[int]) -> str:
    """Return ids of devices as text: 0,4 or 0-7."""
    ids = sorted(ids)
    in_a_row = len(ids) > 2 and ids == list(range(ids[0], ids[-1] + 1))
    return f"{ids[0]}-{ids[-1]}" if in_a_row else ",".join(map(str, ids))


def _device_bytes(row: ShardingRow) -> str:
    """Return the copies and the bytes of one copy on a device, as text."""
    copies = f"{row.copies} x " if row.copies > 1 else ""
    return copies + _size(row.bytes_per_device) + {"offload": " on the host", "recompute": " recomputed"}.get(row.saved, "")


def _size(count: int) -> str:
    return size(count / 2**30)


def _total(rows: Iterable[ShardingRow]) -> str:
    """Return the bytes that a device holds of these arrays, as text."""
    return _size(sum(row.device_bytes for row in rows))
