"""The pictures of the documentation are those that the current code draws, and they show the behaviour of the code."""

import collections
import itertools
import json
import xml.etree.ElementTree as ET
from typing import Any

import jax
import pytest
from test_imports import ROOMS

from benchmarks import pictures
from jaxtrain.config import installed
from jaxtrain.config.context import Context, pairs_per_rank
from jaxtrain.kernels.context_parallel.split import Split
from jaxtrain.step.stages import Schedule

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_stored_picture_is_the_one_that_is_drawn(name: str):
    text = pictures.PICTURES[name]()
    assert (pictures.FOLDER / f"{name}.svg").read_text() == text, "run it with --write"


def test_a_picture_fits_its_frame_and_can_be_read():
    """Letters have at least 11 px at 720 px of width. Boxes and texts are inside the frame. A letter is assumed to
    be 0.55 of the font size wide.
    """
    files = {file.stem: file for file in pictures.FOLDER.glob("*.svg")}
    assert files.keys() == pictures.PICTURES.keys()
    for file in files.values():
        root = ET.parse(file).getroot()
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        assert width == pictures.WIDTH and "width" not in root.attrib and root.findtext(f"{SVG}title")
        for rect in root.iter(f"{SVG}rect"):
            x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            assert min(x, y) >= 0 and x + w <= width and y + h <= height, file
        for text in root.iter(f"{SVG}text"):
            size, words = float(text.attrib["font-size"]), text.text or ""
            long = 0.55 * size * len(words)
            start = float(text.attrib["x"]) - long * {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]]
            assert size * 720 / width >= 11, words
            assert start >= 0 and start + long <= width and 0 < float(text.attrib["y"]) < height, words


# ---- Ring attention


def test_steps_of_a_ring_compute_each_causal_block_once_and_are_equal():
    context = Context(ring=4)
    steps = pictures.ring_blocks(context)
    blocks = [block for step in steps for block in step]
    assert sorted(blocks) == [(q, k) for q in range(8) for k in range(q + 1)]
    for step in steps:
        halves = [gpu for (q, k), gpu in step.items() for _ in range(1 if q == k else 2)]
        assert collections.Counter(halves) == dict.fromkeys(range(4), 4)
    assert pairs_per_rank(context, 64) == [4 * 4 * 8**2 / 2] * 4


def test_keys_come_from_the_gpu_before(monkeypatch: pytest.MonkeyPatch):
    """In the picture of a ring, the keys of the second step are those that the code's ppermute delivers."""
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, axis, ranks: dict(ranks))
    sent: Any = Split(Context(ring=4)).ring_shift
    assert sent(None) == {0: 1, 1: 2, 2: 3, 3: 0}
    held = list(itertools.batched(Context(ring=4).chunks, 2))
    before = {to: held[source] for source, to in sent(None).items()}
    assert all(k in before[place] for (_, k), place in pictures.ring_blocks(Context(ring=4))[1].items())


# ---- Pipelines


@pytest.mark.parametrize(("name", "groups"), [("1f1b", 1), ("interleaved", 2), ("gpipe", 1)])
def test_each_microbatch_passes_each_stage_once_in_each_direction(name: str, groups: int):
    s = Schedule(name, 4, groups, 8)
    found = pictures.passes(s)
    units = collections.Counter((p.stage, p.group, p.microbatch, p.backward) for p in found)
    assert units == dict.fromkeys(itertools.product(range(4), range(groups), range(8), (False, True)), 1)
    for stage in range(4):
        own = sorted((p.start, p.end) for p in found if p.stage == stage)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(own))
    for microbatch in range(8):
        own = [p for p in found if p.microbatch == microbatch]
        path = [(False, group, stage) for group in range(groups) for stage in range(4)]
        path += [(True, group, stage) for _, group, stage in reversed(path)]
        assert [(p.backward, p.group, p.stage) for p in sorted(own, key=lambda p: p.start)] == path
        assert all(p.end <= then.start for p, then in itertools.pairwise(sorted(own, key=lambda p: p.start)))
    busy, end = sum(p.end - p.start for p in found) / 4, max(p.end for p in found)
    assert busy == 8 * 3 and 1 - busy / end == pytest.approx(s.bubble)


# ---- The other pictures


def test_floors_are_those_of_the_test_of_imports():
    assert [room for floor in pictures.floors() for room in floor] == ROOMS.split()


def test_the_stored_schedule_holds_one_layer():
    """The forward pass gathers each large weight of the layer. The backward pass gathers them again and reduces gradients."""
    stored = json.loads(pictures.LANES.read_text())
    assert stored["jaxlib"] == installed.versions()["jaxlib"], "run it with --write --compile"
    lanes = stored["lanes"]
    for phase in ("forward", "backward"):
        gathered = {label for *_, kind, label in lanes[f"{phase}: links"] if kind == "all-gather"}
        assert gathered == {"wq", "wo", "gate", "up", "down", "small"}
    kinds = {phase: collections.Counter(e[2] for e in lanes[f"{phase}: computation"]) for phase in ("forward", "backward")}
    assert (kinds["forward"]["matmul"], kinds["backward"]["matmul"]) == (7, 14)
    assert [e[2] for e in lanes["backward: links"]].count("reduce-scatter") == 2
