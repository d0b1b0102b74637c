"""Draws the pictures of the documentation, docs/pictures/*.svg, from jaxtrain's code and a compiled plan.

python -m benchmarks.pictures                    compare; exits with 1 if a stored picture is out of date
python -m benchmarks.pictures --write            write the pictures
python -m benchmarks.pictures --write --compile  compile the step behind fsdp.svg first (a minute)
"""

import argparse
import ast
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxtrain
from benchmarks.file_tree import purpose
from jaxtrain.config import hardware, installed
from jaxtrain.config.context import Context
from jaxtrain.config.numbers import percent, plural
from jaxtrain.report.html import asset
from jaxtrain.runtime.startup import start_jax
from jaxtrain.step.stages import Schedule

REPO = Path(__file__).resolve().parents[1]
FOLDER = REPO / "docs" / "pictures"
LANES = FOLDER / "fsdp.json"  # the compiled schedule of a layer
IMPORTS = REPO / "tests" / "unit" / "test_imports.py"

WIDTH = 600  # of a picture, in SVG units; a page scales it to its own width
SMALL, LARGE = 13, 15  # font sizes in SVG units
# The colours of reports on light pages, which page.css has first.
COLOURS = dict(reversed(re.findall(r"--(\w+): (#\w+)", asset("page.css"))))
INK, QUIET, RULE, GROUND = (COLOURS[name] for name in ("ink", "quiet", "rule", "ground"))
BLUE, GREEN, YELLOW, VIOLET, RED, PINK = (COLOURS[f"c{i}"] for i in range(1, 7))
OF_GPU = (BLUE, GREEN, YELLOW, VIOLET)


class Picture:
    """An SVG with a light background, so that it is readable on dark pages too."""

    def __init__(self, title: str, note: str):
        self._title, self._parts = f"{title}: {note}", []
        self.heading(28, title, note)

    def heading(self, y: float, title: str, note: str) -> None:
        """Write a line in bold and a note below it."""
        self.text(14, y, title, size=LARGE, weight=600)
        self.note(14, y + 20, note)

    def text(self, x: float, y: float, words: str, anchor="start", *, size=SMALL, colour=INK, weight=400) -> None:
        """Write one line of text with its baseline at (x, y)."""
        style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
        self._parts.append(f'<text x="{x:.5g}" y="{y:.5g}" {style}>{escape(words)}</text>')

    def note(self, x: float, y: float, words: str, anchor="start") -> None:
        """Write one line in grey."""
        self.text(x, y, words, anchor, colour=QUIET)

    def box(self, x: float, y: float, w: float, h: float, colour: str, words="", *, tint=0.3, tip="") -> None:
        """Draw a rectangle with lines of text in its middle. tip: text shown at the cursor."""
        style = f'fill="{colour}" fill-opacity="{tint}" stroke="{colour}"'
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(f'<rect x="{x:.5g}" y="{y:.5g}" width="{w:.5g}" height="{h:.5g}" {style}>{inner}</rect>')
        lines = words.split("\n") if words else []
        for i, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + SMALL * (0.36 + 1.25 * (i - (len(lines) - 1) / 2)), line, "middle")

    def path(self, d: str, colour: str = QUIET, *, arrow: bool = False, tint: float = 0) -> None:
        """Draw a line along an SVG path `d`. tint: opacity of the area inside it."""
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self._parts.append(f'<path d="{d}" stroke="{colour}" fill="{colour}" fill-opacity="{tint}"{end}/>')

    def key(self, x: float, y: float, entries: Mapping[str, str]) -> None:
        """Write the legend in a line. entries: name -> colour."""
        for name, colour in entries.items():
            self.box(x, y - 11, 14, 12, colour)
            self.text(x + 20, y, name)
            x += 38 + 7.6 * len(name)

    def svg(self, height: float) -> str:
        """Return the picture as SVG of this height."""
        frame = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" fill="{GROUND}" stroke="{RULE}"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            f'font-family="system-ui, -apple-system, Segoe UI, Arial, sans-serif">\n<title>{escape(self._title)}</title>\n'
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{QUIET}"/></marker></defs>\n' + "\n".join([frame, *self._parts]) + "\n</svg>\n"
        )


# ---- A weight on a mesh


def shards(row: Any) -> dict[int, tuple[int, ...]]:
    """Return device id -> index of its shard along each dimension. row: a row of `jaxtrain.shardings`."""
    return {
        device.id: tuple((index.start or 0) // local for index, local in zip(indices, row.local_shape, strict=True))
        for device, indices in row.sharding.devices_indices_map(row.shape).items()
    }


def mesh() -> str:
    """Return the picture of eight GPUs as a (data, fsdp, tensor) mesh, and the shards of one weight on them."""
    name, sizes = "layers.mlp.gate", {"data": 2, "fsdp": 2, "tensor": 2}
    two = {"model": {"num_layers": 2}, "remat": {"policy": "full"}}  # a layer's shards do not depend on the number of layers
    found: Any = jaxtrain.shardings("llama3_8b", "h200:8", mesh=sizes, **two)
    weight, used, gradient = (found.filter(kind=kind)[name] for kind in ("parameter", "gathered", "gradient"))
    tokens, place = found["tokens"], shards(weight)
    letters = dict(zip(sorted({*place.values()}), "ABCD", strict=True))
    colours = dict(zip(letters, OF_GPU, strict=True))
    p = Picture("mesh.data=2, mesh.fsdp=2, mesh.tensor=2", f"{name} of Llama 3 8B: each shard is on {weight.replicas} GPUs")
    for (d, f, t), gpu in np.ndenumerate(weight.sharding.mesh.device_ids.reshape(2, 2, 2)):
        x, y = 66 + 74 * t, 92 + 168 * d
        p.box(x, y + 54 * f, 68, 48, colours[place[gpu]], f"GPU {gpu}\nshard {letters[place[gpu]]}")
        if not t:
            p.note(58, y + 28 + 54 * f, f"fsdp {f}", "end")
        if not f:
            p.note(x + 34, y - 7, f"tensor {t}", "middle")
        if not (f or t):
            p.path(f"M10 {y - 26}H218V{y + 132}H10z", RULE)
            p.note(18, y + 124, f"data {d}")
    x, y, w, h = 338, 92, 122, 54
    p.note(x + w, y - 8, f"mlp {weight.shape[2]:,}, over tensor", "middle")
    p.note(x - 10, y + h - 4, f"embed {weight.shape[1]:,}", "end")
    p.note(x - 10, y + h + 12, "over fsdp", "end")
    for shard, letter in letters.items():
        p.box(x + w * shard[2], y + h * shard[1], w, h, colours[shard], f"{letter}\n{[*weight.local_shape[1:]]}")
    over = {row.name + row.kind: [a for a in sizes if any(a in dim for dim in row.mesh_axes)] for row in (weight, used, tokens)}
    stored, in_use, batch = over.values()
    gathered = "+".join(axis for axis in stored if axis not in in_use)
    summed = "+".join(axis for axis in batch if axis not in gathered)
    lines = [
        ("stored", weight, "one shard; both moments are sharded alike"),
        ("in use", used, f"all-gather over {gathered}"),
        ("gradient", gradient, f"reduce-scatter over {gathered}, all-reduce over {summed}"),
        ("tokens", tokens, f"the batch is sharded over {'+'.join(batch)}"),
    ]
    p.text(240, 236, "On each GPU, of a layer and a microbatch:", weight=600)
    for y, (what, row, how) in zip(range(262, 400, 42), lines, strict=True):
        p.text(240, y, what)
        p.text(310, y, f"{row.dtype} {[*row.local_shape[-2:]]}")
        p.note(240, y + 16, how)
    return p.svg(424)


# ---- The schedule of a layer

LABELS = {"BTD,DNH->BTNH": "qkv", "BTNH,DNH->BTD": "out", "BTD,DF->BTF": "gate, up", "BTF,DF->BTD": "down"}
KINDS = {"matmul": BLUE, "attention": VIOLET, "memory-bound": QUIET, "all-gather": GREEN, "reduce-scatter": RED}


def compile_schedule() -> dict[str, Any]:
    """Compile Llama 3 8B for 8 H200s and return the schedule of a layer, for the file LANES.

    Keys: `jaxlib`, its version; `exposed_ms`, of communication; `lanes`, lane -> [start ms, end ms, kind, label] of each event.
    """
    from jaxtrain.plan import topology
    from jaxtrain.plan.compile import compile_step
    from jaxtrain.plan.rates import datasheet
    from jaxtrain.report import layer_schedule

    # In a loop over layers, all layers have the same schedule.
    run, machine = jaxtrain.load("llama3_8b", parallel={"scan_layers": True}), topology.parse_topology("h200:8")
    step, rates = compile_step(run, machine), datasheet(machine.gpu, run.precision)
    sizes, passes = dict(step.program.placement.mesh.shape), run.train.grad_accum * run.model.num_layers
    lanes = layer_schedule.layer_events(step.module, sizes, machine, rates, passes)
    gaps = [max(0.0, b.start - a.end) for name in lanes if "links" not in name for a, b in itertools.pairwise(lanes[name])]
    short = {name: shorten(lane) for name, lane in lanes.items()}
    return {"jaxlib": installed.versions()["jaxlib"], "exposed_ms": round(sum(gaps), 3), "lanes": short}


def shorten(lane: Sequence[Any]) -> list[list[Any]]:
    """Return a lane's events of 0.02 ms or more, with short labels. Consecutive memory-bound kernels become one event."""
    out: list[list[Any]] = []
    for e in lane:
        *_, part, operation = f"/{e.label.removesuffix('/transpose')}".split("/")
        kind, label = e.kind, LABELS.get(operation, "") if e.kind == "matmul" else e.kind
        if kind == "communication":
            kind = operation.replace("_", "-")
            # XLA gathers wk, wv and both norms in one launch, which has the name of one of them.
            label = "gradients" if kind == "reduce-scatter" else part.rpartition(".")[2].replace("scale", "small")
        if out and kind == "memory-bound" == out[-1][2] and e.start - out[-1][1] < 0.01:
            out[-1][1] = round(e.end, 3)
        else:
            out.append([round(e.start, 3), round(e.end, 3), kind, label])
    return [event for event in out if event[1] - event[0] >= 0.02]


def fsdp() -> str:
    """Return the picture of one layer's computation and communication, as compiled. The backward pass fills two rows."""
    found = json.loads(LANES.read_text())
    lanes, exposed = found["lanes"], found["exposed_ms"]
    forward, backward = (lanes[f"{phase}: computation"][-1][1] for phase in ("forward", "backward"))
    scale = (WIDTH - 28) / max(forward, backward / 2)
    note = f"estimated from the compiled step; exposed communication: {exposed:.2f} ms"
    p = Picture("One layer of Llama 3 8B on 8 H200s with mesh.fsdp=8", note)
    half = ("backward", backward / 2)
    rows = [(f"forward, {forward:.1f} ms", "forward", forward, 0.0), (f"backward, {backward:.1f} ms", *half, 0.0)]
    for y, (title, phase, span, begin) in zip(itertools.count(78, 118), [*rows, ("backward, second half", *half, half[1])]):
        p.text(14, y, title, weight=600)
        for start, stop, kind, label in lanes[f"{phase}: computation"]:
            x, w = 14 + (max(start, begin) - begin) * scale, (min(stop, begin + span) - max(start, begin)) * scale
            if w > 0:
                p.box(x, y + 8, w, 34, KINDS[kind], label * (w > 7 * len(label)), tip=f"{label}: {start:.2f} to {stop:.2f} ms")
        free = [0.0, 0.0]  # least x of the next label on each line
        for start, stop, kind, label in lanes[f"{phase}: links"]:
            x, w = 14 + (max(start, begin) - begin) * scale, (min(stop, begin + span) - max(start, begin)) * scale
            if w <= 0:
                continue
            p.box(x, y + 46, w, 14, KINDS[kind], tip=f"{label}: {start:.2f} to {stop:.2f} ms")
            if start >= begin:
                line = min((0, 1), key=lambda i: max(free[i], x))
                x = min(max(free[line], x), WIDTH - 16 - 7.6 * len(label))
                p.note(x, y + 73 + 15 * line, label)
                free[line] = x + 7.6 * len(label) + 6
    p.key(14, 426, KINDS)
    p.note(14, 448, "Under each all-gather: its weight. small: wk, wv and both norms in one launch.")
    return p.svg(462)


# ---- Ring attention


def ring_blocks(context: Context) -> list[dict[tuple[int, int], int]]:
    """Return for each step of the ring: (chunk of queries, chunk of keys) -> the GPU that computes this block.

    In step i a GPU has the keys of the GPU i positions before it. Blocks above the causal diagonal are left out.
    """
    held = list(itertools.batched(context.chunks, 2))
    return [
        {(q, k): gpu for gpu, mine in enumerate(held) for q in mine for k in held[(gpu - distance) % context.ring] if k <= q}
        for distance in range(context.ring)
    ]


def ring() -> str:
    """Return the picture of four GPUs of a ring, and the blocks of causal attention that each computes in each step."""
    context, cell = Context(ring=4), 14.5
    count, done = len(context.chunks), set()
    note = f"{count} chunks of a sequence in zigzag order: each GPU has an early and a late one"
    p = Picture("mesh.seq=4 with parallel.context=ring", note)
    for gpu, chunks in enumerate(itertools.batched(context.chunks, 2)):
        p.note(20 + 144 * gpu, 76, f"GPU {gpu}")
        for i, chunk in enumerate(chunks):
            p.box(20 + 144 * gpu + 54 * i, 82, 54, 30, OF_GPU[gpu], str(chunk))
        p.path(f"M{130 + 144 * gpu} 97H{162 + 144 * gpu}" if gpu < 3 else "M562 97H584V128H8V97H18", arrow=True)
    p.note(296, 146, "keys and values go to the next GPU while attention computes", "middle")
    for distance, computed in enumerate(ring_blocks(context)):
        x0, y0 = 28 + 144 * distance, 208
        p.text(x0, 180, f"step {distance}", weight=600)
        p.note(x0, 197, f"keys: {plural(distance, 'GPU')} back" if distance else "own keys")
        for q, k in itertools.product(range(count), repeat=2):
            x, y, gpu = x0 + cell * k, y0 + cell * q, computed.get((q, k))
            colour, tint = (RULE, 0.9 * ((q, k) in done)) if gpu is None else (OF_GPU[gpu], 0.75)
            if q == k:  # the causal mask covers half of the block
                p.path(f"M{x:g} {y:g}V{y + cell:g}H{x + cell:g}z", colour, tint=tint)
            elif k < q:
                p.box(x, y, cell, cell, colour, tint=tint)
        done |= {*computed}
    for i in (0, count - 1):
        p.note(23, 220 + cell * i, str(i), "end")
    p.note(28, 346, "Rows: chunks of queries. Columns: chunks of keys. Grey: done before.")
    p.note(28, 364, "Each GPU computes two blocks in each step; diagonal blocks are half blocks.")
    return p.svg(378)


# ---- Pipeline schedules


class Pass(NamedTuple):
    """One pass of a microbatch through a stage. All layers of a stage take 1 unit of time forward and 2 units backward."""

    stage: int
    start: float
    end: float
    backward: bool
    group: int
    microbatch: int


def passes(s: Schedule) -> list[Pass]:
    """Return all passes of a step. In each of the schedule's ticks, all stages run forward, then all run backward."""
    out, now = [], 0.0
    for tick, backward in itertools.product(range(s.ticks), (False, True)):
        at, unit = (tick - s.wait, s.backward_unit) if backward else (tick, s.forward_unit)
        if at not in range(s.forward_ticks):
            continue
        begin, now = now, now + (1 + backward) / s.groups
        for stage in range(s.stages):
            u = at - (s.stages - 1 - stage if backward else stage)
            if u in range(s.units):
                out.append(Pass(stage, begin, now, backward, *unit(u)))
    return out


def pipeline() -> str:
    """Return the picture of the schedules 1f1b and interleaved, with 4 stages and 8 microbatches, on one time scale."""
    schedules = [Schedule("1f1b", 4, 1, 8), Schedule("interleaved", 4, 2, 8)]
    scale = (WIDTH - 46) / max(each.end for each in passes(schedules[0]))
    notes = [
        f"mesh.stage=4: bubble {percent(s.bubble)}, at most {s.in_flight:g} microbatches in flight on a stage"
        for s in schedules
    ]
    p = Picture("pipeline.schedule=1f1b", notes[0])
    p.heading(212, "pipeline.schedule=interleaved, pipeline.groups=2", notes[1])
    for s, y in zip(schedules, (60, 244), strict=True):
        found = passes(s)
        for stage in range(s.stages):
            p.note(24, y + 18 + 30 * stage, str(stage), "end")
            p.box(32, y + 30 * stage, max(each.end for each in found) * scale, 26, RULE)
        for each in found:
            w, colour, way = (each.end - each.start) * scale, *((GREEN, "backward") if each.backward else (BLUE, "forward"))
            tip = f"microbatch {each.microbatch + 1} {way}, stage {each.stage}, virtual stage {each.group}"
            words, tint = str(each.microbatch + 1) * (w > 9), 0.3 + 0.4 * each.group
            p.box(32 + each.start * scale, y + 30 * each.stage, w, 26, colour, words, tint=tint, tip=tip)
    p.key(32, 396, {"forward": BLUE, "backward": GREEN, "bubble": RULE})
    p.note(WIDTH - 14, 396, "numbers: microbatches", "end")
    p.note(32, 416, "Darker: the second virtual stage. Drawn with backward twice as long as forward.")
    return p.svg(430)


# ---- Experts


def experts() -> str:
    """Return the picture of dispatch and combine: tokens of four GPUs are sent to their experts and back."""
    two = {"model": {"num_layers": 2}, "remat": {"policy": "full"}, "moe": {"impl": "ragged"}}  # traced in a second
    row: Any = jaxtrain.shardings("mixtral_8x7b", "h200:4", mesh={"expert": 4}, **two)["layers.mlp.gate"]
    count, each = row.shape[1], row.local_shape[1]
    top = {each * at[1] + i: 114 + 84 * gpu + 34 * i for gpu, at in shards(row).items() for i in range(each)}
    p = Picture(f"{count} experts with mesh.expert=4", "an example: two tokens of each GPU, two experts for each token")
    titles = ("route", "dispatch", "experts", "combine", "sum")
    notes = ("top 2", "all-to-all", "grouped matmuls", "all-to-all", "by scores")
    for x, title, note in zip((70, 182, 300, 418, 530), titles, notes, strict=True):
        p.text(x, 80, title, "middle", size=LARGE, weight=600)
        p.note(x, 97, note, "middle")
    for gpu in range(4):
        p.box(10, 108 + 84 * gpu, WIDTH - 20, 76, RULE)
        p.note(20, 124 + 84 * gpu, f"GPU {gpu}")
    for gpu, colour in enumerate(OF_GPU):
        for token, y in ((2 * gpu, 132 + 84 * gpu), (2 * gpu + 1, 156 + 84 * gpu)):
            for expert in ((3 * token + 1) % count, (5 * token + 6) % count):
                middle = top[expert] + 15
                p.path(f"M104 {y + 10}C180 {y + 10} 180 {middle} 248 {middle}", colour, arrow=True)
                p.path(f"M352 {middle}C420 {middle} 420 {y + 10} 494 {y + 10}", colour, arrow=True)
            for x in (40, 498):
                p.box(x, y, 62, 20, colour, f"token {token}")
    for expert, y in top.items():
        p.box(250, y, 100, 30, QUIET, f"expert {expert}", tint=0.15)
    return p.svg(454)


# ---- A training step


def step() -> str:
    """Return the picture of host and GPU during three steps. At a save, the loop waits for copies of the state."""
    note = "schematic, not to scale; log 1: metrics of step 1, read after dispatch 2"
    p = Picture("Host and GPU in three steps; a checkpoint is due after step 2", note)
    lanes = {"data thread": 84, "main thread": 146, "GPU": 222, "links": 256, "save": 320}
    one, two, copy, three = 96, 272, 448, 504  # x at which steps and the copy begin on the GPU
    boxes = [
        *(("data thread", x, 84, QUIET, f"read batch {n}") for n, x in ((2, 14), (3, 104), (4, 496))),
        *(("main thread", x, 84, QUIET, f"dispatch {n}") for n, x in ((1, 14), (2, 104), (3, 496))),
        *(("main thread", x, 44, PINK, f"log {n}") for n, x in ((1, two), (2, copy))),
        *(("GPU", x, 56, BLUE, "forward") for x in (one, two, three)),
        *(("links", x + 2, 52, RED, "gather") for x in (one, two, three)),
        *(("GPU", x + 56, w, GREEN, "backward"[:w]) for x, w in ((one, 70), (two, 70), (three, 26))),
        *(("links", x + 58, 66, RED, "reduce") for x in (one, two)),
        *(("GPU", x + 126, 50, YELLOW, "update") for x in (one, two)),
        ("GPU", copy, 48, VIOLET, "copy"),
        ("save", 496, 90, VIOLET, "write files"),
    ]
    for name, y in lanes.items():
        p.box(10, y, WIDTH - 20, 32, RULE)
        p.note(14, y + (-6 if " " in name else 21), name)
    for lane, x, w, colour, words in boxes:
        p.box(x, lanes[lane] + 3, w, 26, colour, words if w > 40 else "")
    for n, x in enumerate((one, two, three), 1):
        p.note(x + 4, 306, f"step {n}")
    for x in (230, 385):
        p.note(x, 167, "waits", "middle")
    for x, to in ((56, one + 1), (160, two), (538, three + 8)):  # arrows of dispatched steps
        p.path(f"M{x} 175L{to} 224", arrow=True)
    for x in (two + 3, copy + 3):  # arrows of metrics, at the end of a step
        p.path(f"M{x} 224L{x + 12} 176", PINK, arrow=True)
    for x, to in ((56, 134), (152, 516)):  # arrows of batches
        p.path(f"M{x} 113L{to} 148", arrow=True)
    p.path("M474 252V336H494", VIOLET, arrow=True)
    return p.svg(364)


# ---- Architecture


def floors() -> list[list[str]]:
    """Return the folders and files of the package by floor, the lowest first, from ROOMS in tests/unit/test_imports.py."""
    tree = ast.parse(IMPORTS.read_text())
    (rooms,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "ROOMS")
    return [line.split() for line in ast.literal_eval(rooms).strip().splitlines()]


def architecture() -> str:
    """Return the picture of the folders of jaxtrain, each with its purpose; a folder imports those below it."""
    p = Picture("Imports point down", "folders of jaxtrain by floor, as tests/unit/test_imports.py checks them")
    y = 64
    for rooms in reversed(floors()[:-1]):  # without the files of the package's own folder
        top, y = y, y + 6
        for room in rooms:
            path = REPO / "jaxtrain" / room
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            p.text(24, y + 17, f"{room}/" if path.is_dir() else file.name, weight=600)
            lines = textwrap.wrap(purpose(file), 62)
            for i, line in enumerate(lines):
                p.text(124, y + 17 + 16 * i, line)
            y += 6 + 16 * len(lines)
        p.box(14, top, WIDTH - 52, y + 6 - top, BLUE, tint=0.1)
        y += 14
    p.path(f"M576 66V{y - 12}", arrow=True)
    return p.svg(y + 6)


DRAWN = (mesh, fsdp, ring, pipeline, experts, step, architecture)
PICTURES: dict[str, Callable[[], str]] = {draw.__name__: draw for draw in DRAWN}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=(__doc__ or "").splitlines()[0])
    out.add_argument("--write", action="store_true", help="write docs/pictures")
    out.add_argument("--compile", action="store_true", help="with --write: compile the step behind fsdp.svg first")
    return out


def main() -> int:
    """Compare or write the pictures. Return 1 if a stored picture is out of date and is not written, else 0."""
    args = parser().parse_args()
    start_jax(hardware.probe())
    if args.compile and args.write:
        LANES.write_text(json.dumps(compile_schedule()) + "\n")
    old = []
    for name, draw in PICTURES.items():
        file, text = FOLDER / f"{name}.svg", draw()
        if not file.exists() or file.read_text() != text:
            old.append(file.name)
            if args.write:
                file.write_text(text)
    if old:
        print(f"{'written' if args.write else 'old'}: {', '.join(old)}")
    return int(bool(old) and not args.write)


if __name__ == "__main__":
    sys.exit(main())
