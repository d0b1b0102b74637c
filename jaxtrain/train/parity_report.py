"""A comparison of layouts as a table and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.train.parity import Bounds, Measure, ParityComparison, Trained
from jaxtrain.train.parity_layouts import ParityLayout

FORMAT = 1  # of --json
COLUMNS = {"loss": "loss", "grad_norm": "grad norm", "gradient": "gradient", "parameter": "update"}
AGREES, DIFFERS, FAILED = "agrees", "DIFFERS", "FAILED"


@dataclasses.dataclass(frozen=True)
class ParityRow:
    """The result of one layout."""

    layout: ParityLayout
    trained: Trained | None = None
    comparison: ParityComparison | None = None  # None for the reference, and for a failed layout
    bounds: Bounds | None = None
    failed: str = ""  # the reason if there are no numbers
    seconds: float = 0.0  # with compile time

    @property
    def verdict(self) -> str:
        if self.failed:
            return FAILED
        if not self.comparison:
            return "reference"
        return DIFFERS if self.comparison.violations else AGREES


@dataclasses.dataclass(frozen=True)
class ParityResult:
    """The rows of all layouts, with the config and the devices of the comparison."""

    config: str
    overrides: tuple[str, ...]
    steps: int
    types: str  # "float32", or the precision of the config
    devices: str
    rows: tuple[ParityRow, ...]
    yardstick: ParityComparison | None  # the reference compared with its own steps in float32

    @property
    def agrees(self) -> bool:
        return all(row.verdict in (AGREES, "reference") for row in self.rows)


def print_result(result: ParityResult, console: Console) -> None:
    """Print the table of layouts, all differences beyond their bounds, the bounds, and the verdict."""
    steps = "1 step" if result.steps == 1 else f"{result.steps} steps"
    _say(console, f"{result.config}, {steps} in {result.types} on {result.devices}", "bold")
    if result.overrides:
        _say(console, f"with {' '.join(result.overrides)}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(Text("layout"), overflow="fold")
    for heading in COLUMNS.values():
        table.add_column(Text(heading), justify="right", no_wrap=True)
    table.add_column(Text(""), no_wrap=True)
    for row in result.rows:
        style = {FAILED: "bold red", DIFFERS: "bold red", "reference": "bold"}.get(row.verdict, "")
        table.add_row(*(Text(cell) for cell in (row.layout.name, *_cells(row), row.verdict)), style=style)
        if row.verdict == "reference" and result.yardstick:
            cells = ("  difference from float32", *_differences(result.yardstick), "")
            table.add_row(*(Text(cell) for cell in cells), style="dim")
    console.print(table)
    first = result.rows[0].layout.name
    _say(
        console,
        f"{first}: loss and gradient norm of the last step. Other layouts: the largest relative difference from {first}",
    )
    _say(console, "of any step's loss and gradient norm, and of any tensor's first gradient and update over all steps.")
    for row in result.rows:
        for why in [row.failed] if row.failed else row.comparison.violations if row.comparison else []:
            _say(console, f"{row.layout.name}: {why}", "red")
    for line in _bounds(result.rows):
        _say(console, line)
    compared = [row for row in result.rows if row.verdict != "reference"]
    agree = sum(row.verdict == AGREES for row in compared)
    verdict = f"{agree} of {len(compared)} layouts agree with {first}"
    _say(console, verdict, "bold green" if result.agrees else "bold red")


def _cells(row: ParityRow) -> list[str]:
    """Return the cells of COLUMNS: the differences; for the reference, the loss and gradient norm of the last step."""
    if row.comparison:
        return _differences(row.comparison)
    if not row.trained:
        return [""] * len(COLUMNS)
    return [f"{row.trained.loss[-1]:.6f}", f"{row.trained.grad_norm[-1]:.6f}", "", ""]


def _differences(comparison: ParityComparison) -> list[str]:
    return [f"{getattr(comparison, name).value:.1e}" for name in COLUMNS]


def _bounds(rows: Sequence[ParityRow]) -> list[str]:
    """Return a line for each set of bounds, with the largest gradient and update bounds of all tensors."""
    lines: dict[str, None] = {}
    for row in rows:
        if row.bounds:
            bounds = row.bounds
            numbers = f"loss {bounds.loss:.1e}, gradient norm {bounds.grad_norm:.1e}"
            numbers += f", gradient {max(bounds.gradients.values()):.1e}, update {max(bounds.weights.values()):.1e}"
            lines[f"bounds: {numbers} ({bounds.why})"] = None
    return list(lines)


def _say(console: Console, line: str, style: str = "") -> None:
    """Print one line of plain text, unwrapped."""
    console.print(Text(line, style=style), soft_wrap=True)


def to_json(result: ParityResult) -> dict[str, Any]:
    """Return the results for --json, with losses and gradient norms of all steps."""

    def to_measures(comparison: ParityComparison | None) -> dict[str, Any] | None:
        if comparison is None:
            return None
        values = {f.name: getattr(comparison, f.name) for f in dataclasses.fields(comparison)}
        return {name: _measure(m) for name, m in values.items()}

    rows = [
        {
            "name": row.layout.name,
            "mesh": row.layout.sizes,
            "overrides": list(row.layout.overrides),
            "verdict": row.verdict.lower(),
            "why": [row.failed] if row.failed else row.comparison.violations if row.comparison else [],
            "loss": _finite_values(row.trained.loss) if row.trained else None,
            "grad_norm": _finite_values(row.trained.grad_norm) if row.trained else None,
            "difference": to_measures(row.comparison),
            "seconds": round(row.seconds, 2),
        }
        for row in result.rows
    ]
    return {
        "format": FORMAT,
        "config": result.config,
        "overrides": list(result.overrides),
        "steps": result.steps,
        "types": result.types,
        "devices": result.devices,
        "agrees": result.agrees,
        "yardstick": to_measures(result.yardstick),
        "layouts": rows,
    }


def _measure(m: Measure) -> dict[str, Any]:
    return {"value": _finite(m.value), "bound": m.bound, "where": m.location, "ok": m.ok}


def _finite_values(values: np.ndarray) -> list[float | None]:
    return [_finite(float(v)) for v in values]


def _finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, which JSON does not support."""
    return value if np.isfinite(value) else None
