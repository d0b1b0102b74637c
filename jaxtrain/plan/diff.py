"""What changed between two plans: figures, settings, and the collectives, kernels and memory of a step.

Rows are matched by what they are, and never by line or instruction number: a commit that only moves lines changes nothing.
"""

import dataclasses
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.plan.program.roofline import op_label
from jaxtrain.plan.result import FORMAT, Plan, from_json

SMALL = 0.001  # of the step time, and of the allocated memory: smaller differences of TIMES and SIZES are only counted
MIB, GIB = 2**20, 2**30
TIMES, SIZES = ("collective", "kernel"), ("memory class", "array")  # rows of the step; all others are settings


@dataclasses.dataclass(frozen=True)
class RowKey:
    """What a row is. A property that it does not have is ""."""

    what: str  # one of TIMES or SIZES, or the kind of a setting: mesh, override, compiler option, version
    name: str  # all-gather, gemm, saved activations, fsdp
    dtype: str = ""
    axis: str = ""
    scope: str = ""
    file: str = ""


@dataclasses.dataclass(frozen=True)
class Amount:
    """The sum of all parts of a plan with one Key. Times and bytes are those of each GPU in a step."""

    text: str = ""  # value of a setting, or shape of the largest array
    count: int = 1
    ms: float = 0.0  # of the step: a kernel's time, a collective's exposed time
    link_ms: float = 0.0  # a collective's time, overlapped or exposed
    bytes: float = 0.0  # sent by a collective, moved by a kernel, held at the peak

    def __add__(self, other: "Amount") -> "Amount":
        sums = (getattr(self, name) + getattr(other, name) for name in ("count", "ms", "link_ms", "bytes"))
        return Amount(max(other, self, key=lambda each: each.bytes).text, *sums)


NONE = Amount(count=0)


@dataclasses.dataclass(frozen=True)
class DiffRow:
    """A difference. `before` or `after` is None if that plan has no such part."""

    key: RowKey
    change: str  # came | went | grew | shrank | changed
    before: Amount | None
    after: Amount | None
    source: str  # file:line,line of the lines whose amounts differ

    def increase(self, field: str) -> float:
        """Return by how much a field of Amount is larger in the second plan."""
        return getattr(self.after or NONE, field) - getattr(self.before or NONE, field)


@dataclasses.dataclass(frozen=True)
class Diff:
    """The differences between two plans."""

    figures: dict[str, tuple[float, float]]  # name -> values of both plans, 0 if it has none; also of those that are equal
    rows: tuple[DiffRow, ...]  # largest first: by ms of the step, ms on the link, bytes; then settings
    smaller: tuple[DiffRow, ...]  # those below SMALL

    @property
    def same(self) -> bool:
        return not self.rows and not self.smaller and all(math.isclose(*both) for both in self.figures.values())

    def to_json(self) -> dict[str, Any]:
        """Return the diff as plain data for `--json`."""
        return {"format": FORMAT, "same": self.same, **dataclasses.asdict(self)}


def diff(old_plan: Plan, new_plan: Plan) -> Diff:
    """Return what changed from plan `old_plan` to plan `new_plan`."""
    before, after = _amounts(old_plan), _amounts(new_plan)
    rows = [row for key in dict.fromkeys([*before, *after]) if (row := _row(key, before.get(key, {}), after.get(key, {})))]
    rows.sort(key=lambda row: tuple(-abs(row.increase(field)) for field in ("ms", "link_ms", "bytes")))
    least_ms = SMALL * max(old_plan.time.step_ms, new_plan.time.step_ms)
    least_bytes = SMALL * max(old_plan.memory.taken_gib, new_plan.memory.taken_gib) * GIB

    def is_small(row: DiffRow) -> bool:
        if row.key.what in TIMES:
            return max(abs(row.increase("ms")), abs(row.increase("link_ms"))) < least_ms
        return row.key.what in SIZES and abs(row.increase("bytes")) < least_bytes

    figures = {name: (value, _figures(new_plan)[name]) for name, value in _figures(old_plan).items()}
    return Diff(figures, tuple(r for r in rows if not is_small(r)), tuple(r for r in rows if is_small(r)))


def _figures(plan: Plan) -> dict[str, float]:
    t, m = plan.time, plan.memory
    shortest, longest = t.expected_step_ms or (0.0, 0.0)
    figures = {"step ms": t.step_ms, "expected step ms, shortest": shortest, "expected step ms, longest": longest}
    figures |= {"GEMM ms": t.gemm_ms, "attention ms": t.attention_ms, "memory-bound ms": t.memory_ms}
    figures |= {"exposed communication ms": t.exposed_ms, "exposed host copies ms": t.host_exposed_ms}
    figures |= {"tokens a step": plan.tokens_per_step, "tokens/s/GPU": t.tokens_per_s_per_device}
    return figures | {"allocated GiB": m.taken_gib, "peak GiB": m.peak_gib, "usable GiB": m.usable_gib, "host GiB": m.host_gib}


def _amounts(plan: Plan) -> dict[RowKey, dict[str, Amount]]:
    """Return the parts of a plan: key -> line -> sum of the parts on this line."""
    out: dict[RowKey, dict[str, Amount]] = {}
    for key, source, amount in (*_setting_amounts(plan), *_step_amounts(plan)):
        file, _, line = source.rpartition(":")
        lines = out.setdefault(dataclasses.replace(key, file=file), {})
        lines[line] = lines[line] + amount if line in lines else amount
    return out


def _setting_amounts(plan: Plan) -> Iterator[tuple[RowKey, str, Amount]]:
    """Yield everything that a plan follows from, its verdict, and its warnings."""
    plan_facts = {"verdict": "fits" if plan.fits else "does not fit", "config": plan.config, "topology": plan.topology}
    plan_facts |= {"chip": plan.chip, "attention": plan.attention, "remat": plan.kept, "comparable runs": plan.kind}
    plan_facts |= {"workspace by": plan.memory.workspace_by}
    overrides = {key: value for key, _, value in (o.partition("=") for o in plan.overrides)}
    groups = {"plan": plan_facts, "override": overrides, "compiler option": plan.options, "version": plan.versions}
    for kind, values in (groups | {"rate": dataclasses.asdict(plan.rates)}).items():
        yield from ((RowKey(kind, name), "", Amount(str(value))) for name, value in values.items() if value != "")
    yield from ((RowKey("mesh", axis), "", Amount(str(n), n)) for axis, n in plan.mesh.items() if n > 1)
    for text in (re.sub(r"(\.py):\d+", r"\1", warning) for warning in plan.warnings):
        yield RowKey("plan", "warning", scope=re.sub(r"\d[\d.,]*", "N", text)), "", Amount(text)


def _step_amounts(plan: Plan) -> Iterator[tuple[RowKey, str, Amount]]:
    """Yield the collectives, kernels and arrays of a step with their sources, and the classes of memory."""
    for c in plan.collectives:
        key = RowKey("collective", c.kind, c.dtype, c.axis, _scope(c.op_name, c.instruction))
        yield key, c.source, Amount("", c.count, c.exposed_ms, c.ms, c.wire_gib * GIB)
    for k in plan.kernels:
        if k.kind != "communication":  # the collectives above
            yield RowKey("kernel", k.kind, scope=k.op_name), k.source, Amount("", k.count, k.ms, bytes=k.gb * 1e9)
    for b in plan.memory.largest:
        key = RowKey("array", b.kind, b.shape.partition("[")[0], scope=_scope(b.op_name, b.instruction))
        yield key, b.source, Amount(b.shape, bytes=b.gib * GIB)
    memory = plan.memory
    classes = {name: gib for name, gib in memory.by_class.items() if name != "temporaries" or not memory.temporaries}
    for name, gib in (classes | {f"temporaries: {part}": gib for part, gib in memory.temporaries.items()}).items():
        yield RowKey("memory class", name), "", Amount(bytes=gib * GIB)


def _scope(op_name: str, instruction: str) -> str:
    """Return the named scopes of an operation, the name of an argument, or the instruction without its number.

    XLA combines collectives, and joins their paths as "prefix/(one:two)" in an order of its own.
    """
    if op_name.startswith(("state.", "batch[")):
        return op_name
    prefix, combined, inside = op_name.partition("/(")
    names = {op_label(f"{prefix}/{path}") for path in inside[:-1].split(":")} if combined else {op_label(op_name)}
    return "; ".join(sorted(names)) or re.sub(r"[.\d]+$", "", instruction)


def _row(key: RowKey, before: Mapping[str, Amount], after: Mapping[str, Amount]) -> DiffRow | None:
    """Return the difference of one key; None if its sums are equal. before, after: line -> amount."""
    x, y = sum(before.values(), NONE), sum(after.values(), NONE)
    # Sums in another order are not exactly equal.
    fields = ("ms", "link_ms", "bytes", "count")
    differing = [field for field in fields if not math.isclose(getattr(x, field), getattr(y, field))]
    if not differing and x.text == y.text:
        return None
    change = "changed" if not differing else "grew" if getattr(y, differing[0]) > getattr(x, differing[0]) else "shrank"
    change = change if before and after else "came" if after else "went"
    lines = sorted(_changed_lines(before, after) or _changed_lines(after, before), key=lambda line: int(line or 0))
    return DiffRow(key, change, x if before else None, y if after else None, f"{key.file}:{','.join(lines)}".strip(":"))


def _changed_lines(before: Mapping[str, Amount], after: Mapping[str, Amount]) -> list[str]:
    """Return the lines of `after` whose amount no line of `before` has: a line that only moved is not among them."""
    counts = Counter(before.values())
    counts.subtract(after.values())
    return [line for line, amount in after.items() if counts[amount] < 0]


def read_plan_file(name: str, path: str) -> Plan:
    """Return the plan in a file of `plan --json`. Raises ConfigError for any other file. name: the argument that names it."""
    tree = None
    try:
        tree = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        settings = [f"--config={tree['config']}", *(f"--config.{o}" for o in tree["overrides"])]
        command = shlex.join([*settings, f"--topology={tree['topology']}", f"--json={path}"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else "is no compiled plan of plan --json"
        if isinstance(tree, dict) and tree.get("compiled") is False:
            rule = "is of a step that cannot fit, and that was not compiled"
        raise ConfigError([Problem(name, path, rule, "Name one, or a config: configs/llama3_8b.py.")]) from error
    try:
        plan = from_json(tree)
        _ = diff(plan, plan).same  # a value of another type cannot be compared
        return plan
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        rule = f"is {error if tree.get('format') != FORMAT else f'a plan of format {FORMAT} of another version: {error}'}"
        raise ConfigError([Problem(name, path, rule, f"Make it again: python -m jaxtrain plan {command}")]) from error
