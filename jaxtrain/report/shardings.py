"""Tables, trees and pictures of the arrays in jaxtrain.plan.shardings, for terminals and notebooks."""

import dataclasses
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from rich.console import Console

from jaxtrain.config.numbers import plural, size
from jaxtrain.config.schema import RunConfig
from jaxtrain.plan import shardings
from jaxtrain.plan.topology import Topology
from jaxtrain.report.tables import Section, Table, data_frame, print_sections, text_table


@dataclasses.dataclass(frozen=True, repr=False)
class Drawing:
    """A picture of the devices of each shard of an array: an SVG in a notebook, a grid of text elsewhere.

    Attributes:
        title: name and type of the array, and the two dimensions that are drawn.
        holders: ids of the devices that hold each shard, by row and column.
        note: sharded dimensions that are not drawn; "" if there are none.
    """

    title: str
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    note: str = ""

    @staticmethod
    def _label(ids: tuple[int, ...]) -> str:
        if len(ids) <= 4:
            return ",".join(map(str, ids))
        in_a_row = ids == tuple(range(ids[0], ids[-1] + 1))
        return f"{ids[0]}-{ids[-1]}" if in_a_row else f"{ids[0]},{ids[1]}, ... {len(ids)} devices"

    def __repr__(self) -> str:
        cells = [[self._label(ids) for ids in row] for row in self.holders]
        width = max(len(cell) for row in cells for cell in row)
        edge = "+" + "+".join("-" * (width + 2) for _ in cells[0]) + "+"
        body = [line for row in cells for line in ("|" + "|".join(f" {cell:<{width}} " for cell in row) + "|", edge)]
        return "\n".join([self.title, edge, *body, *[self.note] * bool(self.note)])

    def _repr_svg_(self) -> str:
        """Return the picture for a notebook. Shards with the same first device have the same colour.

        It is transparent, and its texts outside of shards are of a grey that is readable on light and on dark pages.
        """
        wide = max(48, 7 * max(len(self._label(ids)) for row in self.holders for ids in row) + 12)
        high, top = 30, 22
        firsts = sorted({ids[0] for row in self.holders for ids in row})
        parts = [f'<text x="1" y="14">{escape(self.title)}</text>']
        for y, row in enumerate(self.holders):
            for x, ids in enumerate(row):
                at = f'x="{x * wide + 1}" y="{top + y * high}"'
                colour = f"hsl({360 * firsts.index(ids[0]) // len(firsts)} 60% 85%)"
                parts.append(f'<rect {at} width="{wide - 2}" height="{high - 2}" fill="{colour}" stroke="#555"/>')
                parts.append(f'<text x="{x * wide + 7}" y="{top + y * high + 19}" fill="#222">{self._label(ids)}</text>')
        height = top + len(self.holders) * high + 20 * bool(self.note)
        if self.note:
            parts.append(f'<text x="1" y="{height - 5}">{escape(self.note)}</text>')
        size = f'width="{max(wide * len(self.holders[0]), 8 * len(self.title)) + 2}" height="{height}"'
        style = 'font-family="sans-serif" font-size="13" fill="#767676"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'


class Row(shardings.Row):
    """One array of a train step, which draws its shards."""

    def draw(self) -> Drawing:
        """Return a picture of the devices that hold each shard, along the two dimensions with the most shards.

        Raises:
            ValueError: the array has no known global shape, or is a scalar.
        """
        shape, over = self.shape, self.mesh_axes
        if not shape or not over or self.sharding is None:
            raise ValueError(f"{self.name}: " + ("a single number" if shape == () else "each device's shard is its own"))
        names = [axis or f"dim {i}" for i, axis in enumerate(self.axes or (None,) * len(shape))]
        shards = [whole // local for whole, local in zip(shape, self.local_shape, strict=True)]
        order = sorted(range(len(shape)), key=lambda i: (-shards[i], -shape[i]))
        drawn = sorted(order[:2])
        grid: dict[tuple[int, ...], list[int]] = {}
        for device, index in self.sharding.devices_indices_map(shape).items():
            at = tuple((index[i].start or 0) // self.local_shape[i] for i in drawn)
            grid.setdefault(at if len(drawn) == 2 else (0, *at), []).append(device.id)
        rows, columns = (1 + max(at[i] for at in grid) for i in (0, 1))
        holders = tuple(tuple(tuple(sorted(grid[y, x])) for x in range(columns)) for y in range(rows))
        title = f"{self.name} ({self.kind}) {self.type}: " + " down, ".join(f"{names[i]} {shape[i]}" for i in drawn) + " across"
        sharded = [f"{names[i]} over {'+'.join(over[i])}" for i in order[2:] if shards[i] > 1]
        return Drawing(title, holders, f"not drawn: {', '.join(sharded)}" if sharded else "")


class Shardings(shardings.Shardings[Row]):
    """A table of arrays as the Python API returns it: it shows itself as a tree, and has its tables as data."""

    def diff(self, other: "Shardings", title: str = "") -> Table:
        """Return a table of the arrays that `other` lacks, adds, shards differently, or has in another size on a device."""
        cells = []
        for key, pair in shardings.changes(self, other).items():
            layouts = ("-" if row is None else row.layout for row in pair)
            held = ("-" if row is None else _total([row]) for row in pair)
            cells.append((*key, *layouts, *held))
        headings = ("name", "kind", "before", "after", "held before", "held after")
        title = title or f"{self.title}  ⇒  {other.title}"
        return text_table(title, headings, cells, ("all arrays", "", "", "", _total(self), _total(other)))

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row for each array. Needs pandas."""
        return data_frame(self.rows())

    def table(self) -> Table:
        """Return a table with a line for each array. Column "held": copies x bytes of one copy, on a device or its host."""
        headings = ("name", "kind", "array", "logical axis→mesh axes", "on a device", "held", "replicas")
        cells = []
        for row in self.entries:
            array = row.dtype + ("[?]" if row.shape is None else _shape(row.shape))
            held = _held(row).removesuffix(" recomputed")
            same = "-" if row.replicas is None else str(row.replicas)
            cells.append((row.name, _kind(row), array, row.layout, _shape(row.local_shape), held, same))
        total = (plural(len(self), "array"), "", "", "", "", _total(self), "")
        return text_table(self.title, headings, cells, total)

    def sums(self) -> Table:
        """Return a table of bytes by kind: of the global arrays without replicas, and on one device."""
        groups: dict[str, list[Row]] = {}
        for row in self.entries:
            groups.setdefault(_kind(row), []).append(row)
        cells = []
        for kind, rows in groups.items():
            known = [row.total_bytes * row.copies for row in rows if row.total_bytes is not None]
            unknown = f" without {len(rows) - len(known)} of each device's own" if len(known) < len(rows) else ""
            cells.append((kind, str(len(rows)), _size(sum(known)) + unknown, _total(rows)))
        return text_table(self.title, ("kind", "arrays", "global", "held by a device"), cells)

    def _by_kind(self) -> dict[str, list[Row]]:
        out: dict[str, list[Row]] = {}
        for row in self.entries:
            out.setdefault(row.kind, []).append(row)
        return out

    def __repr__(self) -> str:
        """Return a tree: a heading for each kind, a line for each array."""
        lines = [self.title]
        for kind, rows in self._by_kind().items():
            lines.append(f"{kind}: {plural(len(rows), 'array')}, {_total(rows)} on a device")
            wide = max(len(row.name) for row in rows), max(len(row.type) for row in rows)
            lines += [f"  {row.name:<{wide[0]}}  {row.type:<{wide[1]}}  {_held(row)}" for row in rows]
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        """Return the tree as HTML for a notebook. Kinds and modules can be collapsed."""
        parts = [f"<b>{escape(self.title)}</b>"]
        for kind, rows in self._by_kind().items():
            summary = f"{kind}: {plural(len(rows), 'array')}, {_total(rows)} on a device"
            parts.append(_details(summary, _branch([(row.name.split("."), row) for row in rows]), kind == "parameter"))
        return (
            '<div style="font-family: monospace; text-align: left">'
            + "".join(parts)
            + "</div>"
            + "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        )


def shown(found: shardings.Shardings[shardings.Row]) -> Shardings:
    """Return the table that shows itself."""
    return Shardings(tuple(Row(**vars(row)) for row in found), found.title, found.mesh, found.notes)


def print_shardings(run: RunConfig, topology: Topology | Sequence[Any], filter: str, console: Console) -> None:
    """Print the arrays of a run, and their sums by kind.

    Args:
        filter: text for `shardings.parse_filter`; "" for all rows.

    Raises:
        ValueError: no array matches the filter. Also raises the errors of `shardings.describe`.
    """
    found = shown(shardings.describe(run, topology)).filter(**shardings.parse_filter(filter))
    if not found.entries:
        raise ValueError(f"--shardings={filter}: no array is like that; --shardings alone lists all of them")
    print_sections([Section("Shardings", [found.table(), *found.notes, found.sums()])], console)


def _held(row: Row) -> str:
    """Return the copies and the bytes of one copy on a device, as text."""
    copies = f"{row.copies} x " if row.copies > 1 else ""
    return copies + _size(row.bytes_per_device) + {"offload": " on the host", "recompute": " recomputed"}.get(row.saved, "")


def _details(summary: str, body: str, is_open: bool = False) -> str:
    style = "margin-left: 1.5em"
    return f"<details{' open' * is_open}><summary>{escape(summary)}</summary><div style='{style}'>{body}</div></details>"


def _branch(rows: Sequence[tuple[list[str], Row]]) -> str:
    """Return rows as nested HTML, one level for each component of a dotted name. rows: (components left to nest, row)."""
    groups: dict[str, list[tuple[list[str], Row]]] = {}
    for (first, *rest), row in rows:
        groups.setdefault(first, []).append((rest, row))
    out = []
    for first, group in groups.items():
        leaves = [row for rest, row in group if not rest]
        out += [f"<div>{escape(first)}  <b>{escape(row.type)}</b>  {escape(_held(row))}</div>" for row in leaves]
        if inner := [(rest, row) for rest, row in group if rest]:
            out.append(_details(f"{first}: {_total(row for _, row in inner)}", _branch(inner), True))
    return "".join(out)


def _shape(shape: Sequence[int]) -> str:
    return str(list(shape)).replace(" ", "")


def _kind(row: Row) -> str:
    return f"{row.kind}, {row.saved}" if row.saved else row.kind


def _size(count: int) -> str:
    return size(count / 2**30)


def _total(rows: Iterable[shardings.Row]) -> str:
    """Return the bytes that a device holds of these arrays, as text."""
    return _size(sum(row.held_bytes for row in rows))
