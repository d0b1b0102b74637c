"""Read the text of a scheduled, partitioned HLO module (`compiled.as_text()`).

Instructions are in the order in which they start, each with the computations that it calls and its line of Python. `walk`
counts an instruction once per iteration of its loops. A line that cannot be parsed is an error, since a skipped collective
would be missing in every figure.

The text is parsed instead of the HloProto, because XLA documents the text's syntax. The text also has the number of partitions,
and one instruction for each asynchronous start.
"""

import collections
import dataclasses
import functools
import itertools
import math
import operator
import os
import re
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.kernels.experts.feed_forward import FURTHER_ROUNDS

# Bits of one element. Types smaller than a byte are packed, as XLA:GPU stores them.
BITS = {
    **dict.fromkeys(("token", "opaque"), 0),
    **dict.fromkeys(("s1", "u1"), 1),
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("f8e3m4", "f8e4m3", "f8e4m3fn", "f8e4m3fnuz", "f8e4m3b11fnuz", "f8e5m2", "f8e5m2fnuz", "f8e8m0fnu"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
}

_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{[\d,]*(?::(?:[A-Z]\([^)]*\))*)?\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_INDEX = re.compile(r"/\*index=\d+\*/")
_PARENTHESIS = re.compile(r"[()]")
_HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (?=(.))")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_NAME = r"%?[A-Za-z_][\w.\-]*"
_OPERANDS = re.compile(rf"(?:{_NAME}(?:, {_NAME})*)?")
_SPLIT = re.compile(r'"(?:[^"\\]|\\.)*"|[{\[(]|[}\])]|, (?=[a-z][\w\-]*=)')
_CALLED = ("calls", "to_apply", "condition", "body", "branch_computations", "called_computations", "select", "scatter")
_CALLED += ("true_computation", "false_computation", "async_execution_body")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_TABLE_ROW = re.compile(r"(\d+) (.*)$")
_PACKAGE = Path(__file__).resolve().parents[2]
# An instruction of these files is attributed to the line that calls them.
HELPERS = ("jaxtrain/sharding.py", "jaxtrain/models/zero.py", "jaxtrain/kernels/dot.py")
_CALLS = ("call", "conditional", "async-start", "call-start")
_FUSIONS = ("fusion", "fusion-start")
_MOST_TRIPS = 20_000  # largest trip count that is found by evaluating the loop's counter


class HloError(ValueError):
    """A line of the module cannot be parsed, or the cost of an instruction is unknown. The message has the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The dtype, local shape and memory space of an array on one device."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0  # 5 is pinned host memory

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return (self.elements * BITS[self.dtype] + 7) // 8


type Type = Shape | tuple["Type", ...]


def leaves(type: Type) -> list[Shape]:
    """Return every array of a type, in order."""
    return [type] if isinstance(type, Shape) else [leaf for element in type for leaf in leaves(element)]


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation. Names have no leading %."""

    name: str
    opcode: str
    type: Type
    operands: tuple[str, ...]
    called: tuple[str, ...]  # computations that it calls, in the order of the text
    attributes: dict[str, str]  # name -> raw text; a constant's value is under "literal"
    op_name: str  # the path of named scopes in the Python program; "" if the compiler made the instruction
    source: str  # file:line of the innermost frame in this package, else of the innermost frame; "" without frames
    parameter_number: int | None
    is_root: bool

    @property
    def target(self) -> str:
        """Return the target of a custom call; "" for other instructions."""
        return self.attributes.get("custom_call_target", "").strip('"')


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions: in a scheduled module, in the order in which they are started."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions if i.is_root)

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Return the parameters in the order of their numbers."""
        instructions = [i for i in self.instructions if i.parameter_number is not None]
        return tuple(sorted(instructions, key=lambda i: i.parameter_number or 0))


@dataclasses.dataclass(frozen=True)
class Module:
    """The program that each device runs."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    num_partitions: int
    is_scheduled: bool
    further_rounds: int = 0  # assumed rounds of each expert dispatch after the first; the program does not have their number
    kind_shares: tuple[float, ...] = ()  # fraction of the looped layers that are of each kind, which selects a branch

    @functools.cached_property
    def owners(self) -> dict[str, Computation]:
        """Return instruction name -> its computation. Names are unique in a module."""
        return {i.name: c for c in self.computations.values() for i in c.instructions}

    @functools.cached_property
    def callers(self) -> dict[str, list[Instruction]]:
        """Return computation name -> the instructions that call it."""
        by_callee: dict[str, list[Instruction]] = collections.defaultdict(list)
        for i in itertools.chain.from_iterable(c.instructions for c in self.computations.values()):
            for called in i.called:
                by_callee[called].append(i)
        return dict(by_callee)

    def instruction(self, name: str) -> Instruction:
        return self.owners[name].by_name[name]


# ---- Text to module


def parse_hlo(text: str, further_rounds: int = 0) -> Module:
    """Return the module of an HLO text. further_rounds: assumed rounds of each expert dispatch after the first.

    Raises HloError for a line that cannot be parsed.
    """
    lines = iter(_INDEX.sub("", text).split("\n"))
    first = next(lines)
    if not first.startswith("HloModule "):
        raise HloError(f"not an HLO module: the text starts with {first[:80]!r}, not with 'HloModule'")
    name, _, fields = first.removeprefix("HloModule ").partition(",")
    header = _parse_attributes("," + fields if fields else "")
    tables: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    table: dict[int, str] | None = None
    sources: dict[int, str] = {}
    for line in lines:
        if not line:
            table = None
        elif line in tables:
            table = tables[line]
        elif table is not None:
            row = _TABLE_ROW.match(line)
            if not row:
                raise HloError(f"not a row of one of the tables {', '.join(_TABLES)}: {line[:200]!r}")
            table[int(row[1])] = row[2]
        else:
            head = _HEAD.match(line)
            if not head:
                raise HloError(f"not the start of a computation: {line[:200]!r}")
            sources = sources or _sources(tables)
            computation = computations[head[1]] = _parse_computation(head[1], lines, sources)
            entry = computation if line.startswith("ENTRY ") else entry
    if entry is None:
        raise HloError(f"module {name}: there is no ENTRY computation")
    scheduled = header.get("is_scheduled") == "true"
    partitions = int(header.get("num_partitions", 1))
    return Module(name, computations, entry, partitions, scheduled, further_rounds)


def _parse_computation(name: str, lines: Iterator[str], sources: dict[int, str]) -> Computation:
    """Parse the rest of a computation, after its first line."""
    instructions: list[Instruction] = []
    for line in lines:
        if line.startswith("}"):
            return Computation(name, tuple(instructions))
        if not line:
            break
        start = _INSTRUCTION.match(line)
        if not start:
            raise HloError(f"not an instruction: {line.strip()[:200]!r}")
        try:
            instructions.append(_parse_instruction(line, start, sources))
        except HloError as error:
            raise HloError(f"{start[2]}: {error}") from None
    raise HloError(f"computation {name}: the text ends inside it")


def _parse_instruction(line: str, start: re.Match[str], sources: dict[int, str]) -> Instruction:
    at = start.end()
    end = _closing(line, at) if start[3] == "(" else line.find(" ", at)
    opcode = _OPCODE.match(line, end)
    if end < 0 or not opcode:
        raise HloError(f"no opcode after its type: {line.strip()[:200]!r}")
    close = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : close - 1]
    attributes = _parse_attributes(line[close:])
    operands: tuple[str, ...] = ()
    number = None
    if opcode[1] == "constant":
        attributes["literal"] = inside
    elif opcode[1] == "parameter":
        if not inside.isdigit():
            raise HloError(f"parameter({inside}) has no number")
        number = int(inside)
    else:
        operands = _parse_operands(inside)
    called = (c.strip().removeprefix("%") for k in attributes if k in _CALLED for c in attributes[k].strip("{}").split(","))
    metadata = attributes.get("metadata", "")
    op_name, frame = _OP_NAME.search(metadata), _FRAME.search(metadata)
    if frame and int(frame[1]) not in sources:
        raise HloError(f"stack frame {frame[1]} is not in the module's tables")
    return Instruction(
        name=start[2],
        opcode=opcode[1],
        type=_parse_type(line[at:end]),
        operands=operands,
        called=tuple(filter(None, called)),
        attributes=attributes,
        op_name=re.sub(r"\\(.)", r"\1", op_name[1]) if op_name else "",
        source=sources[int(frame[1])] if frame else "",
        parameter_number=number,
        is_root=start[1] is not None,
    )


def _closing(line: str, at: int) -> int:
    """Return the index after the parenthesis that closes the parenthesis at `at`."""
    depth = 0
    for token in _PARENTHESIS.finditer(line, at):
        depth += 1 if token[0] == "(" else -1
        if not depth:
            return token.end()
    raise HloError(f"a parenthesis is not closed: {line.strip()[:200]!r}")


def _parse_operands(text: str) -> tuple[str, ...]:
    if not _OPERANDS.fullmatch(text):
        raise HloError(f"its operands cannot be read: {text[:200]!r}")
    return tuple(o.removeprefix("%") for o in text.split(", ")) if text else ()


def _top_level(text: str) -> list[str]:
    """Return the items of a comma-separated list. Commas inside brackets do not separate."""
    items, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            items.append(text[start:i].strip())
            start = i + 1
    return [*items, text[start:].strip()] if text.strip() else []


def _parse_attributes(text: str) -> dict[str, str]:
    """Return name -> value of `, name=value, name=value`. Commas inside brackets and strings do not separate."""
    depth, starts = 0, []
    for token in _SPLIT.finditer(text):
        char = token[0][0]
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and not depth:
            starts.append(token)
    if depth or (text.strip() and not (starts and not starts[0].start())):
        raise HloError(f"its attributes cannot be read: {text[:200]!r}")
    ends = [*(token.start() for token in starts[1:]), len(text)]
    pairs = (text[token.end() : end].partition("=") for token, end in zip(starts, ends, strict=False))
    return {key: value.strip() for key, _, value in pairs}


@functools.lru_cache(maxsize=1 << 16)
def _parse_type(text: str) -> Type:
    if text.startswith("("):
        return tuple(_parse_type(item) for item in _top_level(text[1:-1]))
    match = _SHAPE.fullmatch(text)
    if not match or match[1] not in BITS:
        raise HloError(f"its type cannot be read: {text}")
    dims = tuple(map(int, re.findall(r"\d+", match[2])))  # `<=n` is a dynamic dimension: its bound n
    space = _SPACE.search(text)
    return Shape(match[1], dims, int(space[1]) if space else 0)


def _sources(tables: dict[str, dict[int, str]]) -> dict[int, str]:
    """Return stack frame -> file:line, of the innermost frame in this package outside of HELPERS, else of the innermost frame.

    parent_frame_id is the parent's number plus 1; 1 means that there is no parent.
    """

    def rows(table: str, *names: str) -> dict[int, list[int]]:
        """Return row number -> values of the named fields. XLA does not print a field that is 0."""
        fields = {i: dict(re.findall(r"(\w+)=(\d+)", text)) for i, text in tables[table].items()}
        return {i: [int(row.get(name, 0)) for name in names] for i, row in fields.items()}

    files = {i: _short(text.strip('"')) for i, text in tables["FileNames"].items()}
    lines = {i: (files.get(file, ""), line) for i, (file, line) in rows("FileLocations", "file_name_id", "line").items()}
    frames = rows("StackFrames", "file_location_id", "parent_frame_id")
    out = {}
    for i in frames:
        frame, stack = i, []
        while frame in frames and len(stack) <= len(frames):
            stack.append(lines.get(frames[frame][0], ("", 0)))
            frame = frames[frame][1] - 1
        package_frames = [location for location in stack if location[0].startswith(f"{_PACKAGE.name}/")]
        file, line = next(
            iter([location for location in package_frames if location[0] not in HELPERS] or package_frames or stack)
        )
        out[i] = f"{file}:{line}" if file else ""
    return out


def _short(path: str) -> str:
    """Return a path relative to this package's parent folder or to site-packages; for other files, the file's name."""
    path = os.path.normpath(path)  # a notebook may have imported jaxtrain from ".."
    _, installed, inside = path.rpartition("/site-packages/")
    if installed:
        return inside
    return path.removeprefix(f"{_PACKAGE.parent}/") if path.startswith(f"{_PACKAGE.parent}/") else path.rsplit("/", 1)[-1]


# ---- Trip counts


def walk(module: Module, fusions: bool = False) -> Iterator[tuple[Instruction, Computation, int, tuple[str, ...]]]:
    """Yield every instruction that a step runs: (instruction, its computation, executions per step, the enclosing loops).

    Instructions are in scheduled order, a caller before its computations. Loops are listed from the outermost. Executions
    count every iteration of these loops. A loop's condition is included only without a recorded trip count, since XLA
    evaluates the condition only then. Every branch of a conditional counts as if it ran each time, which is an upper bound.
    Computations that are applied to elements (the addition of a reduction) are left out.

    Args:
      fusions: whether to enter fusions. If not, a fusion is one instruction.

    Raises HloError for a loop whose `trip_count` cannot be found.
    """
    yield from _walk(module, module.entry, 1, (), fusions)


def _walk(module: Module, computation: Computation, times: int, loops: tuple[str, ...], fusions: bool):
    for i in computation.instructions:
        yield i, computation, times, loops
        if i.opcode == "while":
            count, inside = trip_count(module, i), (*loops, i.name)
            if not _count_is_known(i):
                yield from _walk(module, _loop_computation(module, i, "condition"), times * (count + 1), inside, fusions)
            if count:
                yield from _walk(module, _loop_computation(module, i, "body"), times * count, inside, fusions)
        elif i.opcode in _CALLS or (fusions and i.opcode in _FUSIONS):
            for called in i.called:
                yield from _walk(module, module.computations[called], times, loops, fusions)


def host_waits(module: Module) -> Iterator[tuple[Instruction, int]]:
    """Yield (loop or conditional for which the host waits for a value on the device, waits per step).

    For a while loop without a recorded trip count, XLA:GPU copies the predicate to the host before each iteration and after the
    last. For a conditional, it copies the branch index each time. The host launches no kernel before the copy is done.
    """
    for i, _, times, _ in walk(module):
        if i.opcode == "while" and not _count_is_known(i):
            yield i, times * (trip_count(module, i) + 1)
        elif i.opcode == "conditional":
            yield i, times


def _count_is_known(loop: Instruction) -> bool:
    return bool(_TRIPS.search(loop.attributes.get("backend_config", "")))


def _loop_computation(module: Module, loop: Instruction, role: str) -> Computation:
    """Return a loop's condition or body."""
    if role not in loop.attributes:
        raise HloError(f"{loop.name}: a while loop without a {role}: {loop.attributes}")
    return module.computations[loop.attributes[role].removeprefix("%")]


def trip_count(module: Module, loop: Instruction) -> int:
    """Return the trip count of a while loop.

    XLA's passes record the count. Without a record, this function evaluates a counter that starts from a constant and depends
    only on itself, as in the loop over Qwen3's experts. A loop over further rounds of an expert dispatch has the module's
    `further_rounds` iterations. A loop around such a loop has at most one iteration. Raises HloError if any other count depends
    on data.
    """
    if recorded := _TRIPS.search(loop.attributes.get("backend_config", "")):
        return int(recorded[1])
    condition, body = _loop_computation(module, loop, "condition"), _loop_computation(module, loop, "body")
    outside = module.owners[loop.name]
    state = _evaluate(module, outside, loop.operands[0], (None,) * len(outside.parameters), {})
    for count in range(_MOST_TRIPS):
        continues = _evaluate(module, condition, condition.root.name, (state,), {})
        if continues is None:
            break
        if not continues:
            return count
        state = _evaluate(module, body, body.root.name, (state,), {})
    if any(f"/{FURTHER_ROUNDS}/" in i.op_name for i in (loop, *body.instructions)):
        around = any(i.opcode == "while" and not _count_is_known(i) for i in body.instructions)
        return min(1, module.further_rounds) if around else module.further_rounds
    raise HloError(
        f"{loop.name} ({loop.op_name or 'no op_name'}, {loop.source or 'no source'}): how often this loop runs cannot be read "
        f"from the program: it depends on data, or is more than {_MOST_TRIPS}. Use a loop of fixed length, as jax.lax.scan is."
    )


# The result of an evaluation: a number, a tuple, or None if constants do not determine the value.
type Value = int | tuple["Value", ...] | None

_ARITHMETIC = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
}
_COMPARE = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne}
_SAME = ("copy", "bitcast", "convert")


def _evaluate(
    module: Module, computation: Computation, name: str, arguments: tuple[Value, ...], cache: dict[str, Value]
) -> Value:
    """Return the value of one instruction, computed from constants and `arguments`; None if these do not determine it."""
    if name in cache:
        return cache[name]
    i, out = computation.by_name[name], None

    def operands() -> tuple[Value, ...]:
        return tuple(_evaluate(module, computation, o, arguments, cache) for o in i.operands)

    if i.opcode == "constant":
        literal = i.attributes["literal"]
        out = int(literal) if re.fullmatch(r"-?\d+", literal) else {"true": 1, "false": 0}.get(literal)
    elif i.parameter_number is not None:
        out = arguments[i.parameter_number]
    elif i.opcode == "tuple":
        out = operands()
    elif i.opcode == "get-tuple-element":
        (elements,) = operands()
        out = elements[int(i.attributes["index"])] if isinstance(elements, tuple) else None
    elif i.opcode in _SAME and isinstance(i.type, Shape) and not i.type.dims:
        (out,) = operands()
    elif i.opcode in ("fusion", "call"):
        called = module.computations[i.called[0]]
        out = _evaluate(module, called, called.root.name, operands(), {})
    elif i.opcode in _ARITHMETIC or i.opcode == "compare":
        a, b = operands()
        if isinstance(a, int) and isinstance(b, int):
            out = int((_ARITHMETIC.get(i.opcode) or _COMPARE[i.attributes["direction"]])(a, b))
    cache[name] = out
    return out
