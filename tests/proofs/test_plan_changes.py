"""A change of one line of a model, found in the difference between its plans before and after."""

import functools
import inspect
import textwrap

import pytest
from plans import FULL, ONE_EACH, TWO, config

from jaxtrain.models import layers
from jaxtrain.plan.diff import Diff, diff
from jaxtrain.plan.make import make_plan
from jaxtrain.plan.result import Plan
from jaxtrain.plan.topology import parse_topology

LINE = "h_BTF = GATED[activation](gate_BTF, up_BTF)"


SIZES = ("d_model=256", "num_heads=4", "num_kv_heads=2", "head_dim=64", "d_ff=512", "vocab_size=1024")
SMALL = (TWO, *(f"model.{size}" for size in SIZES), *ONE_EACH, "data.seq_len=256", "loss.chunk=256", *FULL[:2])


def plan() -> Plan:
    return make_plan(config(*SMALL), parse_topology("h200:8"))


before = functools.cache(plan)


def changed_by(line: str, above: int, monkeypatch) -> tuple[Diff, int]:
    """Return what changes if `line` replaces LINE of a feed-forward block, and the number of the line.

    above: number of lines that are added at the beginning of the file.
    """
    method, file = layers.GatedLinear.__call__, str(inspect.getsourcefile(layers))
    source, first = inspect.getsourcelines(method)
    text, found = textwrap.dedent("".join(source)), dict(vars(layers))
    assert text.count(LINE) == 1
    exec(compile("\n" * (first - 1 + above) + text.replace(LINE, line), file, "exec"), found)
    unchanged = before()
    with monkeypatch.context() as patch:
        patch.setattr(layers.GatedLinear, "__call__", found["__call__"])
        return diff(unchanged, plan()), first + above + text.partition(LINE)[0].count("\n")


def test_an_extra_matmul_is_found_with_its_line(monkeypatch):
    more = 'h_BTF = GATED[activation](gate_BTF, up_BTF) + dot("BTD,DF->BTF", 2 * x_BTD, self.up.get_value(), self.ctx.numerics)'
    found, line = changed_by(more, 0, monkeypatch)
    came = {row.key.scope: row for row in found.rows if row.change == "came" and row.key.name == "gemm"}
    assert {"forward mlp/swiglu/BTD,DF->BTF", "backward mlp/swiglu/BTD,DF->BTF"} < came.keys()
    assert {row.source for row in came.values()} == {f"jaxtrain/models/layers.py:{line}"}
    assert all(row.after and row.after.ms > 0 and row.after.count == 2 for row in came.values())  # 2 layers
    more_ms = found.figures["GEMM ms"][1] - found.figures["GEMM ms"][0]
    assert sum(row.increase("ms") for row in came.values()) == pytest.approx(more_ms) and more_ms > 0


def test_lines_that_only_move_change_nothing(monkeypatch):
    found, _ = changed_by(LINE, 7, monkeypatch)
    assert found.same, found
