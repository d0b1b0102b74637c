"""What known layouts move: programs of small models against the formulas, and the page in docs/ that lists all of them."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from jaxtrain.plan.known import textbook
from jaxtrain.plan.known.textbook import LAYOUTS, Row, Term
from jaxtrain.plan.make import make_plan
from jaxtrain.plan.result import Plan
from jaxtrain.plan.topology import parse

PAGE = Path(__file__).resolve().parents[2] / "docs" / "collectives.md"
SMALL = ("model.num_layers=3", "model.vocab_size=32768")
BY_NAME = {layout.name: layout for layout in LAYOUTS}


@functools.cache
def compared(name: str) -> tuple[Plan, list[Row]]:
    layout = BY_NAME[name]
    # Rings are unrolled, so a compilation takes as many times as long as they have places; the page has them on 8 GPUs.
    short = name.startswith("context parallel")
    more = ("mesh.seq=4",) if short else ("model.num_layers=4",) if name.startswith("pipeline") else ()  # a layer a stage
    run = textbook.run_of(layout, (*SMALL, *more))
    plan = make_plan(run, parse("h200:4" if short else layout.machine))
    return plan, textbook.compare(plan, textbook.promised(run, plan.mesh))


# Those that are not here are in test_zero.py with other formulas or in test_plan_split.py with a smaller model, or differ in a
# mesh axis from one that is.
@pytest.mark.parametrize(
    "name",
    [
        "ZeRO-2",
        pytest.param("ZeRO-3, gather=forward", marks=pytest.mark.more),
        "HSDP over two nodes",
        pytest.param("tensor parallel", marks=pytest.mark.more),
        pytest.param("context parallel, ring", marks=pytest.mark.more),
        "context parallel, Ulysses",
        pytest.param("context parallel, gathered keys", marks=pytest.mark.more),
        pytest.param("pipeline parallel, 1F1B", marks=pytest.mark.more),
        pytest.param("expert parallel", marks=pytest.mark.more),
    ],
)
def test_a_layout_moves_what_its_paper_says_and_nothing_else(name):
    _, rows = compared(name)
    assert rows
    for row in rows:
        assert abs(row.off) < 0.01, row


def test_tensor_parallelism_moves_no_weight_and_two_pairs_a_layer():
    plan, rows = compared("tensor parallel")
    assert {(row.kind, row.purpose) for row in rows} == {("all-gather", "tokens"), ("reduce-scatter", "tokens")}
    forward = [c for c in plan.collectives if "jvp(layers)" in c.op_name and "transpose(" not in c.op_name]
    count = {kind: sum(c.count for c in forward if c.kind == kind) for kind in ("all-gather", "reduce-scatter")}
    assert count == {"all-gather": 2 * 3, "reduce-scatter": 2 * 3}
    # Each is the residual stream of one sequence, a seventh of it staying at home, and no weight is as large.
    stream = 2 * 8192 * 4096 * 7 / 8
    assert {round(c.wire_gib * 2**30 / c.count / stream, 2) for c in forward} == {1.0}


def test_replicas_over_nodes_leave_weights_in_their_node():
    plan, _ = compared("HSDP over two nodes")
    assert plan.mesh["data"] == 2 and plan.mesh["fsdp"] == 8
    large = [c for c in plan.collectives if c.wire_gib > 1e-3]
    assert {c.axis for c in large if c.network_gib} == {"data"} and {c.axis for c in large if not c.network_gib} == {"fsdp"}


def test_what_no_formula_promises_has_a_row_and_so_has_what_is_missing():
    plan, rows = compared("ZeRO-2")
    extra = dataclasses.replace(plan.collectives[0], kind="all-gather", axis="data")
    found = textbook.compare(dataclasses.replace(plan, collectives=(*plan.collectives, extra)), [])
    assert {row.formula for row in found} == {"none"} and ("all-gather", "data") in {(r.kind, r.axis) for r in found}
    missing = Term("all-reduce", "seq", "weights", "W", 1e9)
    (row,) = [r for r in textbook.compare(plan, [missing]) if r.kind == "all-reduce"]
    assert row.gb == 0 and row.count == 0 and row.off == -1.0
    double = [dataclasses.replace(c, wire_gib=2 * c.wire_gib) for c in plan.collectives]
    terms = textbook.promised(textbook.run_of(BY_NAME["ZeRO-2"], SMALL), plan.mesh)
    assert any(r.off > 0.9 for r in textbook.compare(dataclasses.replace(plan, collectives=tuple(double)), terms))
    assert rows


def test_the_page():
    plan, _ = compared("ZeRO-2")
    text = textbook.markdown({"ZeRO-2": plan}, "command")
    assert "## ZeRO-2" in text and "| ZeRO-2 | h200:8 | yes |" in text and "```text\ncommand\n```" in text
    page = PAGE.read_text()
    assert [f"## {layout.name}" for layout in LAYOUTS] == re.findall(r"^## (?!How).*$", page, re.MULTILINE)
    off = [float(x) for x in re.findall(r"\| ([+-][\d.]+)% \|", page)]
    assert len(off) >= 2 * len(LAYOUTS) and max(map(abs, off)) < 1.0
    assert "| none |" not in page and "python -m jaxtrain.plan --textbook=docs/collectives.md" in page
