"""Pictures of which device holds which shard of an array: SVG for notebooks, text for terminals."""

import dataclasses
import html
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding
from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text

# Eight light colours that are told apart by colour-blind readers too, with dark text on top (after Okabe and Ito 2008).
COLOURS = ("#f2b84b", "#8fd0f5", "#5fc9a5", "#f5ee8c", "#7fb0dd", "#ec9a63", "#dcaac8", "#c9c9c9")
MOST = 16  # shards drawn along a dimension; of more, the first ones and the last


def render_text(shown: Any, width: int) -> str:
    """Return what a terminal of this width prints, without colours."""
    console = Console(width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


@dataclasses.dataclass(frozen=True)
class Picture:
    """Which devices hold which shard of an array. Shards are drawn along two dimensions, in a panel for each one of a third.

    Attributes:
        rows, columns: labels of the dimensions that run downwards and to the right.
        panels: (heading, devices of each shard by row and column). None: shards that are left out.
        aspect: height over width of a panel.
    """

    title: str
    caption: str
    rows: str
    columns: str
    panels: tuple[tuple[str, tuple[tuple[tuple[int, ...] | None, ...], ...]], ...]
    aspect: float

    def _repr_svg_(self) -> str:
        return _svg(self)

    def __rich__(self) -> Group:
        headings = len(self.panels) > 1
        table = RichTable(show_header=False, show_lines=True)
        for heading, grid in self.panels:
            for i, row in enumerate(grid):
                cells = ["…" if part is None else ids(part) for part in row]
                table.add_row(*(Text(cell) for cell in ([heading if i == 0 else ""] if headings else []) + cells))
        along = ", ".join(filter(None, (self.rows and f"{self.rows} ↓", self.columns and f"{self.columns} →")))
        return Group(Text(self.title, "bold"), Text(along), table, Text(self.caption))

    def __repr__(self) -> str:
        return render_text(self, 160)


def ids(devices: Sequence[int]) -> str:
    """Return device numbers as text, with runs of three and more shortened: 0-3 8."""
    runs: list[list[int]] = []
    for d in sorted(devices):
        if runs and d == runs[-1][-1] + 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    return " ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else " ".join(map(str, r)) for r in runs)


def draw(sharding: NamedSharding, shape: tuple[int, ...], names: Sequence[str], title: str) -> Picture:
    """Return the picture of an array of this shape.

    The two dimensions with the most shards are drawn; of equal ones the longest. Other sharded dimensions get panels. Other
    replicated dimensions are named in the caption.

    Args:
        names: labels of the dimensions.
    """
    local = sharding.shard_shape(shape)
    parts = [size // part if part else 1 for size, part in zip(shape, local, strict=True)]
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        at = tuple((s.start or 0) // part if part else 0 for s, part in zip(index, local, strict=True))
        holders.setdefault(at, []).append(device.id)
    order = sorted(range(len(shape)), key=lambda i: (-parts[i], -shape[i], i))
    down, right = (sorted(order[:2]) + [None, None])[:2] if len(shape) > 1 else (None, 0 if shape else None)
    others = [i for i in range(len(shape)) if i not in (down, right) and parts[i] > 1]
    left_out = [i for i in range(len(shape)) if i not in (down, right, *others)]

    def label(i: int | None) -> str:
        if i is None:
            return ""
        axes = sharding.spec[i] if i < len(sharding.spec) else ()
        over = [f"{a}={sharding.mesh.shape[a]}" for a in ((axes,) if isinstance(axes, str) else axes or ())]
        return f"{names[i]} {shape[i]}" + (f" over {', '.join(over)}" if parts[i] > 1 else "")

    def cell(at: dict[int, int | None]) -> tuple[int, ...] | None:
        index = tuple(at.get(i, 0) for i in range(len(shape)))
        return None if None in index else tuple(sorted(holders[index]))  # pyright: ignore[reportArgumentType]

    panels = []
    for where in itertools.product(*(_drawn(parts[i]) for i in others)):
        fixed = dict(zip(others, where, strict=True))
        heading = ", ".join(f"{names[i]} {_range(j, local[i])}" for i, j in fixed.items())
        grid = []
        for y in _drawn(parts[down]) if down is not None else [0]:
            row = []
            for x in _drawn(parts[right]) if right is not None else [0]:
                at = fixed | ({down: y} if down is not None else {}) | ({right: x} if right is not None else {})
                row.append(cell(at))
            grid.append(tuple(row))
        panels.append((heading, tuple(grid)))
    same = len(next(iter(holders.values())))
    of = "x".join(map(str, local)) or "one number"
    if len(holders) == 1:
        caption = f"whole on {'one device' if same == 1 else f'all {same} devices'}: {of}"
    elif same == 1:
        caption = f"{len(holders)} parts of {of}, each on one device"
    else:
        caption = f"{len(holders)} parts of {of}, each on {same} devices (colours with no line between them)"
    if left_out:
        caption += f". Not drawn: {', '.join(label(i) for i in left_out)}, whole on every device"
    ratio = math.sqrt(shape[down] / shape[right]) if down is not None and right is not None and shape[right] else 0.2
    return Picture(title, caption, label(down), label(right), tuple(panels), min(max(ratio, 0.4), 1.0))


def _drawn(parts: int) -> list[int | None]:
    return [*range(parts)] if parts <= MOST else [*range(MOST - 2), None, parts - 1]


def _range(index: int | None, size: int) -> str:
    return "…" if index is None else f"[{index * size}:{(index + 1) * size}]"


WIDTH, GAP, LEFT = 300, 22, 30


def _svg(picture: Picture) -> str:
    height = max(round(WIDTH * picture.aspect), 13 * max(len(grid) for _, grid in picture.panels))
    columns = min(len(picture.panels), 4)
    scale = 1.0 if columns < 3 else 0.62
    wide, high = round(WIDTH * scale), max(round(height * scale), 44)
    lines = -(-len(picture.panels) // columns)
    top = 60 if len(picture.panels) > 1 else 46
    total_w = max(LEFT + columns * (wide + GAP), 7 * max(len(picture.caption), len(picture.title)) + 12)
    total_h = top + lines * (high + GAP) + 22
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_w}" height="{total_h}" viewBox="0 0 {total_w} {total_h}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{total_w}" height="{total_h}" fill="#ffffff"/>',
        _text(6, 18, picture.title, "start", 'font-weight="bold"'),
        _text(LEFT, 38, f"{picture.columns} →", "start"),
    ]
    middle = top + (lines * (high + GAP)) // 2
    if picture.rows:
        out.append(_text(0, 0, f"← {picture.rows}", "middle", f'transform="translate(18,{middle - GAP // 2}) rotate(-90)"'))
    for i, (heading, grid) in enumerate(picture.panels):
        x, y = LEFT + (i % columns) * (wide + GAP), top + (i // columns) * (high + GAP)
        if heading:
            out.append(_text(x, y - 5, heading, "start", 'font-size="10"'))
        for r, row in enumerate(grid):
            for c, part in enumerate(row):
                box = (x + c * wide / len(row), y + r * high / len(grid), wide / len(row), high / len(grid))
                out += _part(box, part)
    out += [_text(6, total_h - 8, picture.caption, "start"), "</svg>"]
    return "\n".join(out)


def _part(box: tuple[float, float, float, float], devices: tuple[int, ...] | None) -> list[str]:
    """Return the SVG of a shard, in the colours of its devices; of more than eight, eight."""
    x, y, w, h = box
    if devices is None:
        return [_text(x + w / 2, y + h / 2 + 4, "…", "middle")]
    shown = devices if len(devices) <= 8 else devices[:: len(devices) // 8][:8]
    out = ["<g>", f"<title>device {ids(devices)}</title>"]
    for i, device in enumerate(shown):
        colour = COLOURS[(device if len(devices) <= 8 else i) % len(COLOURS)]
        left, part = x + i * w / len(shown), w / len(shown)
        out.append(f'<rect x="{left:.1f}" y="{y:.1f}" width="{part:.1f}" height="{h:.1f}" fill="{colour}"/>')
    out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="none" stroke="#333333"/>')
    if shown == devices and h >= 11 and w / len(shown) >= 7 * len(str(max(devices))) + 2:
        centres = [x + (i + 0.5) * w / len(shown) for i in range(len(shown))]
        out += [_text(at, y + h / 2 + 4, str(device), "middle") for at, device in zip(centres, devices, strict=True)]
    elif h >= 11 and w >= 7 * len(ids(devices)):
        out.append(_text(x + w / 2, y + h / 2 + 4, ids(devices), "middle"))
    return [*out, "</g>"]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="#222222" {more}>{html.escape(text)}</text>'
