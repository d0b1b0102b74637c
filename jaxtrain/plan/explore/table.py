"""The table of a run's arrays: how rows are filtered, summed, compared and shown. What fills it is in shardings.py."""

import dataclasses
import fnmatch
from collections.abc import Iterator
from typing import Any

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import ConfigError, Problem, nearest
from jaxtrain.plan.explore.layouts import Dims
from jaxtrain.plan.explore.pictures import Grid, in_text
from jaxtrain.sharding import Axes

KINDS = {
    "parameter": "master weights, held throughout",
    "moment": "the optimizer's state of a parameter, held throughout",
    "gradient": "as the optimizer reads it, once a step",
    "gathered": "a weight in use: in the compute type, whole over the axes that split the batch",
    "activation": "of one layer and one microbatch",
    "batch": "what a step is given",
    "counter": "step counts",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of a train step, and how it lies on the devices."""

    name: str
    kind: str  # one of KINDS
    shape: tuple[int, ...] | None  # global; None: each device's shard is its own, and part of no one array
    dtype: str
    axes: Axes | None  # logical axis of each dimension, where they are known
    mesh_axes: Dims | None  # mesh axes that shard each dimension; None where `shape` is
    local_shape: tuple[int, ...]  # on one device
    bytes_per_device: int
    total_bytes: int | None  # of the global array, each element once; None where `shape` is
    replicas: int | None  # devices that hold the same part; None where `shape` is
    copies: int  # how many are held at once: one a layer where they are kept for the backward pass
    saved: str  # activations: keep | offload | recompute
    sharding: NamedSharding | None = dataclasses.field(repr=False, compare=False)

    @property
    def spec(self) -> P | None:
        """As JAX writes it."""
        return None if self.mesh_axes is None else P(*(p if len(p) > 1 else (p[0] if p else None) for p in self.mesh_axes))

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory, over all copies; 0 where the array waits in host memory."""
        return 0 if self.saved == "offload" else self.bytes_per_device * self.copies

    @property
    def split(self) -> str:
        """Dimensions in words: logical axis, and after an arrow the mesh axes that split it."""
        if self.mesh_axes is None:
            return "each device's own"
        axes = self.axes or ("?",) * len(self.mesh_axes)
        onto = ["→" + "+".join(part) if part else "" for part in self.mesh_axes]
        return ", ".join(f"{axis or '·'}{where}" for axis, where in zip(axes, onto, strict=True))


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows, as a table in terminals and notebooks."""

    entries: tuple[Row, ...]
    title: str
    mesh: dict[str, int]
    notes: tuple[str, ...] = ()  # which layers and which experts are where

    def __iter__(self) -> Iterator[Row]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def rows(self) -> list[dict[str, Any]]:
        """Plain values, one dict a row: `pandas.DataFrame(table.rows())`."""
        plain = [f.name for f in dataclasses.fields(Row) if f.name != "sharding"]
        return [{**{name: getattr(row, name) for name in plain}, "spec": str(row.spec)} for row in self.entries]

    def filter(self, name: str = "", kind: str = "", axis: str = "", saved: str = "", replicas: int = 0) -> "Table":
        """Rows that fit all that is given.

        Args:
          name: a part of the name, or a pattern with * and ?.
          kind: one of KINDS.
          axis: a mesh axis that splits the array, or a logical axis that it has.
          saved: keep | offload | recompute.
          replicas: at least this many devices hold the same part.

        Raises ConfigError for a kind, an axis or a place that there is not.
        """
        places = ["keep", "offload", "recompute"]
        logical = {a for row in self.entries for a in row.axes or () if a}
        for key, value, known in (
            ("kind", kind, list(KINDS)),
            ("axis", axis, [*self.mesh, *sorted(logical)]),
            ("saved", saved, places),
        ):
            if value and value not in known:
                raise ConfigError([Problem(key, value, f"no array of this table has such a {key}", nearest(value, known))])

        def fits(row: Row) -> bool:
            pattern = name if set(name) & set("*?") else f"*{name}*"
            over = {a for part in row.mesh_axes or () for a in part} | {a for a in row.axes or () if a}
            return (
                fnmatch.fnmatchcase(row.name, pattern)
                and kind in ("", row.kind)
                and (not axis or axis in over)
                and saved in ("", row.saved)
                and (row.replicas or 0) >= replicas
            )

        return dataclasses.replace(self, entries=tuple(row for row in self.entries if fits(row)))

    def row(self, name: str, kind: str = "") -> Row:
        """The row of this name; `kind` where several have it (a parameter, its gradient, its gathered copy).

        Without a kind, the first of them: the parameter. Raises ConfigError where there is none.
        """
        for row in self.entries:
            if row.name == name and kind in ("", row.kind):
                return row
        known = list(dict.fromkeys(row.name for row in self.entries if kind in ("", row.kind)))
        raise ConfigError([Problem("name", name, f"no {kind or 'array'} of this table is called so", nearest(name, known))])

    def totals(self) -> list[dict[str, Any]]:
        """Sums by kind, and for activations by what becomes of them.

        Keys: kind, saved, arrays, held_bytes (of a device's memory), total_bytes (every element once, over all copies), unknown
        (arrays that are each device's own, which total_bytes leaves out).
        """
        sums: dict[tuple[str, str], dict[str, Any]] = {}
        for row in self.entries:
            total = sums.setdefault(
                (row.kind, row.saved),
                {"kind": row.kind, "saved": row.saved, "arrays": 0, "held_bytes": 0, "total_bytes": 0, "unknown": 0},
            )
            total["arrays"] += 1
            total["held_bytes"] += row.held_bytes
            total["total_bytes"] += (row.total_bytes or 0) * row.copies
            total["unknown"] += row.total_bytes is None
        return list(sums.values())

    def sums(self) -> Grid:
        """The totals as text."""
        columns = (
            ("kind", "left"),
            ("what it is", "left"),
            ("arrays", "right"),
            ("in all", "right"),
            ("held by a device", "right"),
        )
        cells = tuple((_kind(t), KINDS[t["kind"]], str(t["arrays"]), _total(t), _sum(t)) for t in self.totals())
        return Grid(self.title, columns, cells)

    def grid(self, narrow: bool = False) -> Grid:
        """The table as text; `narrow` without what one device holds of a single copy."""
        columns = (
            *(("name", "left"), ("kind", "left"), ("array", "left"), ("logical axis→mesh axes", "left")),
            *(("on a device", "left"), ("each", "right"), ("held", "right"), ("same on", "right")),
        )
        cells = tuple(
            (
                row.name,
                _kind({"kind": row.kind, "saved": row.saved}),
                row.dtype + ("[?]" if row.shape is None else str(list(row.shape)).replace(" ", "")),
                row.split,
                str(list(row.local_shape)).replace(" ", ""),
                size(row.bytes_per_device),
                _held(row),
                "?" if row.replicas is None else str(row.replicas),
            )
            for row in self.entries
        )
        footers = tuple(
            (
                f"{t['arrays']} array{'s' if t['arrays'] > 1 else ''}",
                _kind(t),
                f"{_total(t)} in all",
                "",
                "",
                "",
                _sum(t),
                "",
            )
            for t in self.totals()
        )
        held = "held: bytes on one device, of all copies that there are at once. same on: devices with the same part."
        if not narrow:
            notes = (f"each: bytes of one copy on one device. {held}", *self.notes)
            return Grid(self.title, columns, cells, footers, notes)
        kept = [i for i, (header, _) in enumerate(columns) if header not in ("on a device", "each")]

        def cut(row: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(row[i] for i in kept)

        return Grid(self.title, cut(columns), tuple(map(cut, cells)), tuple(map(cut, footers)), (held, *self.notes))

    def __rich__(self) -> Grid:
        return self.grid()

    def _repr_html_(self) -> str:
        return self.grid()._repr_html_()

    def __repr__(self) -> str:
        return in_text(self, 160)


def _kind(row: dict[str, Any]) -> str:
    return f"{row['kind']}, {row['saved']}" if row["saved"] else row["kind"]


def _sum(total: dict[str, Any]) -> str:
    return "on the host" if total["saved"] == "offload" else size(total["held_bytes"])


def _total(total: dict[str, Any]) -> str:
    unknown = f" without {total['unknown']} of each device's own" if total["unknown"] else ""
    return size(total["total_bytes"]) + unknown


def _held(row: Row) -> str:
    if row.saved == "offload":
        return f"{row.copies} on the host"
    return size(row.held_bytes) if row.copies == 1 else f"{row.copies} x = {size(row.held_bytes)}"


def size(count: int) -> str:
    """Bytes as people read them."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:,.2f} {unit}"
    return f"{count} B"


def changes(before: Table, after: Table, title: str = "") -> Grid:
    """What differs between two tables: rows whose layout or size on a device is another, and the sums by kind."""
    title = title or (before.title if before.title == after.title else f"{before.title}  ⇒  {after.title}")
    old = {(row.kind, row.name): row for row in before}
    new = {(row.kind, row.name): row for row in after}
    cells = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if a is not None and b is not None and (a.mesh_axes, a.held_bytes) == (b.mesh_axes, b.held_bytes):
            continue
        pair = [("-", "-") if row is None else (row.split, size(row.held_bytes)) for row in (a, b)]
        cells.append((key[1], key[0], pair[0][0], pair[1][0], pair[0][1], pair[1][1]))
    sums = [{(t["kind"], t["saved"]): t["held_bytes"] for t in table.totals()} for table in (before, after)]
    footers = tuple(
        ("all", ", ".join(filter(None, key)), "", "", size(sums[0].get(key, 0)), size(sums[1].get(key, 0)))
        for key in dict.fromkeys([*sums[0], *sums[1]])
        if sums[0].get(key) != sums[1].get(key)
    )
    columns = (
        *(("name", "left"), ("kind", "left"), ("before", "left"), ("after", "left")),
        *(("held before", "right"), ("held after", "right")),
    )
    return Grid(title, columns, tuple(cells), footers)


def parse_filter(text: str) -> dict[str, Any]:
    """Arguments of `Table.filter` from "mlp" or "kind=activation,axis=fsdp". Raises ConfigError for another key."""
    known, out = ("name", "kind", "axis", "saved", "replicas"), {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, given, value = item.partition("=")
        if not given:
            key, value = "name", item
        if key not in known:
            raise ConfigError([Problem("--shardings", item, f"cannot filter by {key!r}", nearest(key, list(known)))])
        if key == "replicas" and not value.isdigit():
            raise ConfigError([Problem("--shardings", item, "must be a number of devices", "For example replicas=8.")])
        out[key] = int(value) if key == "replicas" else value
    return out
