"""What changed between two plans: each kind of row, what counts as equal, and small differences."""

import dataclasses
import json
from typing import Any

import pytest
from sample_plan import sample

from jaxtrain.config.schema import ConfigError
from jaxtrain.plan import diff as plan_diff
from jaxtrain.plan.diff import Diff, DiffRow, diff, read_plan_file
from jaxtrain.plan.result import Collective, KernelSummary, Plan, to_json
from jaxtrain.report.plan_diff import print_diff
from jaxtrain.report.tables import render_text


def gather(line: int, ms: float, exposed: float, gib: float = 1.0, **changes: Any) -> Collective:
    made = Collective(
        "all-gather", "bf16", "fsdp", 8, 32, gib, 0.0, ms, exposed, f"jaxtrain/models/x.py:{line}",
        "jit(train_step)/jvp(layers)/mlp/all_gather", f"all-gather-start.{line}",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def gemm(line: int, ms: float, name: str = "forward mlp/BTD,DF->BTF") -> KernelSummary:
    return KernelSummary("gemm", name, f"jaxtrain/models/x.py:{line}", 32, ms, 1.0, 2.0)


def with_step(*parts: Collective | KernelSummary, **changes: Any) -> Plan:
    """Return the sample plan with only these collectives and kernels. Its step takes 709 ms and allocates 40.8 GiB."""
    collectives = tuple(part for part in parts if isinstance(part, Collective))
    kernels = tuple(part for part in parts if isinstance(part, KernelSummary))
    return sample(collectives=collectives, kernels=kernels, **changes)


def only(found: Diff) -> DiffRow:
    assert len(found.rows) == 1 and not found.smaller, found
    return found.rows[0]


def text(found: Diff) -> str:
    return render_text(lambda console: print_diff(found, console, ("before.json", "after.json")), 140)


def test_the_same_plan_has_no_difference():
    found = diff(sample(), sample(compile_s=99.0))
    assert found.same and not found.rows and not found.smaller
    assert text(found).splitlines()[2:] == ["nothing changed"]


def test_a_line_that_moved_is_no_difference():
    """Nor are other names of instructions, nor the order of the paths of collectives that XLA combined."""
    a = with_step(gather(10, 20.0, 5.0), gemm(11, 30.0), gemm(12, 31.0))
    moved = gather(40, 20.0, 5.0, instruction="all-gather-start.7")
    assert diff(a, with_step(moved, gemm(41, 30.0), gemm(42, 31.0))).same
    one, other = (gather(10, 20.0, 5.0, op_name=f"jit(f)/jvp(layers)/weights/({x}:{y})") for x, y in (("q", "k"), ("k", "q")))
    assert diff(with_step(one), with_step(other)).same


def test_a_warning_whose_line_moved_is_no_difference_and_one_of_other_figures_is_the_same_warning():
    a, moved, more = (sample(warnings=(f"{ms} ms at models/x.py:{line}",)) for ms, line in ((12, 1), (12, 7), (13, 1)))
    assert diff(a, moved).same and only(diff(a, more)).change == "changed"


def test_a_collective_that_came_and_one_that_went():
    a, b = with_step(gemm(11, 30.0)), with_step(gemm(11, 30.0), gather(10, 20.0, 5.0, gib=2.0))
    came = only(diff(a, b))
    assert (came.change, came.before, came.source) == ("came", None, "jaxtrain/models/x.py:10")
    assert (came.key.what, came.key.name, came.key.dtype, came.key.axis) == ("collective", "all-gather", "bf16", "fsdp")
    assert (came.increase("ms"), came.increase("link_ms"), came.increase("bytes")) == (5.0, 20.0, 2 * 2**30)
    went = only(diff(b, a))
    assert (went.change, went.after, went.increase("ms"), went.source) == ("went", None, -5.0, came.source)


def test_a_collective_of_another_dtype_is_another_one():
    found = diff(with_step(gather(10, 20.0, 5.0)), with_step(gather(10, 40.0, 10.0, dtype="f32")))
    assert [(row.change, row.key.dtype) for row in found.rows] == [("came", "f32"), ("went", "bf16")]


def test_a_collective_that_is_overlapped_counts_by_its_time_on_the_link():
    row = only(diff(with_step(), with_step(gather(10, 20.0, 0.0))))
    assert (row.change, row.increase("ms"), row.increase("link_ms")) == ("came", 0.0, 20.0)


def test_parts_of_one_key_are_summed_and_the_line_that_grew_is_named():
    a = with_step(gemm(11, 30.0), gemm(12, 31.0))
    row = only(diff(a, with_step(gemm(21, 30.0), gemm(22, 31.0), gemm(23, 32.0))))
    assert (row.change, row.source) == ("grew", "jaxtrain/models/x.py:23")
    assert row.before and row.after and (row.before.ms, row.after.ms, row.after.count) == (61.0, 93.0, 96)
    shrank = only(diff(a, with_step(gemm(11, 30.0), gemm(12, 21.0))))
    assert (shrank.change, shrank.increase("ms"), shrank.source) == ("shrank", -10.0, "jaxtrain/models/x.py:12")


def test_memory_by_array_and_by_class():
    m = sample().memory
    wider = dataclasses.replace(m.largest[0], gib=14.0, shape="f32[32,1,8192,14336]")
    classes = m.by_class | {"saved activations": 28.25, "copies of parameters": 1.0}
    del classes["logits and loss"]
    found = diff(sample(), sample(memory=dataclasses.replace(m, largest=(wider, *m.largest[1:]), by_class=classes)))
    rows = {(row.key.what, row.key.name, row.key.dtype): row for row in found.rows}
    assert rows["array", "saved activations", "bf16"].change == "went"
    came = rows["array", "saved activations", "f32"]
    assert came.change == "came" and came.after and came.after.text == "f32[32,1,8192,14336]" and came.after.bytes == 14 * 2**30
    assert rows["memory class", "saved activations", ""].increase("bytes") == 7 * 2**30
    assert rows["memory class", "copies of parameters", ""].change == "came"
    assert rows["memory class", "logits and loss", ""].change == "went"
    assert [abs(row.increase("bytes")) for row in found.rows] == sorted(
        (abs(row.increase("bytes")) for row in found.rows), reverse=True
    )


def test_settings():
    a = sample(mesh={"fsdp": 8, "tensor": 1}, overrides=("train.grad_accum=1",), versions={"jax": "0.11.2", "numpy": "2"})
    more = {"fsdp": 64, "tensor": 1, "seq": 2}
    b = dataclasses.replace(
        a, mesh=more, overrides=("train.grad_accum=1", "remat.policy=full"), versions={"jax": "0.12.0"},
        options=a.options | {"xla_new": True}, fits=False, warnings=(*a.warnings, "12 GiB more"),
    )  # fmt: skip
    rows = {(row.key.what, row.key.name): row for row in diff(a, b).rows}
    said = {
        key: (row.change, *((side.text if side else None) for side in (row.before, row.after))) for key, row in rows.items()
    }
    assert said == {
        ("mesh", "fsdp"): ("grew", "8", "64"),
        ("mesh", "seq"): ("came", None, "2"),
        ("override", "remat.policy"): ("came", None, "full"),
        ("version", "jax"): ("changed", "0.11.2", "0.12.0"),
        ("version", "numpy"): ("went", "2", None),
        ("compiler option", "xla_new"): ("came", None, "True"),
        ("plan", "verdict"): ("changed", "fits", "does not fit"),
        ("plan", "warning"): ("came", None, "12 GiB more"),
    }
    shown = text(diff(a, b))
    assert all(f"{what} {name}" in shown for what, name in said)


def test_small_differences_are_counted_and_not_dropped():
    """0.1% of the step are 0.709 ms, of the memory 0.04 GiB."""
    a = with_step(gemm(11, 30.0), gemm(12, 40.0, "backward mlp"), gemm(13, 50.0, "optimizer"))
    b = with_step(gemm(11, 30.7), gemm(12, 39.8, "backward mlp"), gemm(13, 50.8, "optimizer"))
    found = diff(a, b)
    assert not found.same and [row.key.scope for row in found.rows] == ["optimizer"]
    assert sum(row.increase("ms") for row in found.smaller) == pytest.approx(0.5) and len(found.smaller) == 2
    assert "2 smaller differences" in text(found) and "0.50 ms" in text(found)


def test_rows_are_sorted_by_time_and_then_by_bytes():
    m = sample().memory
    grown = dataclasses.replace(m, by_class=m.by_class | {"gradients": 9.0, "first moment": 5.0})
    found = diff(with_step(gemm(11, 30.0)), with_step(gemm(11, 33.0), gather(10, 20.0, 5.0), memory=grown, attention="pallas"))
    assert [row.key.name for row in found.rows] == ["all-gather", "gemm", "gradients", "first moment", "attention"]


def test_figures():
    time = dataclasses.replace(sample().time, step_ms=800.0, expected_step_ms=None)
    found = diff(sample(), sample(time=time))
    assert found.figures["step ms"] == (sample().time.step_ms, 800.0)
    assert found.figures["expected step ms, shortest"][1] == 0 and not found.same
    assert "step ms" in text(found) and "800.0" in text(found)


def test_a_diff_is_data():
    tree = json.loads(json.dumps(diff(with_step(gemm(11, 30.0)), with_step(gemm(11, 60.0))).to_json()))
    assert tree["same"] is False and tree["figures"]["step ms"][0] == sample().time.step_ms
    (row,) = tree["rows"]
    assert (row["change"], row["before"]["ms"], row["after"]["ms"]) == ("grew", 30.0, 60.0)
    assert row["source"] == "jaxtrain/models/x.py:11" and row["key"]["scope"] == "forward mlp/BTD,DF->BTF"


def test_a_plan_is_read_from_its_json(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(to_json(sample()) | {"run": {"steps": 3}}))
    assert diff(read_plan_file("A", str(file)), sample()).same


@pytest.mark.parametrize("tree", [None, [], {}, {"config": "x"}, "{", b"\xff\xfe", {"config": "x", "compiled": False}])
def test_files_that_are_no_plan(tree, tmp_path):
    file = tmp_path / "a.json"
    if tree is not None:
        text = tree if isinstance(tree, str | bytes) else json.dumps(tree)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as refused:
        read_plan_file("A", str(file))
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("A", str(file)) and "configs/llama3_8b.py" in problem.remedy


@pytest.mark.parametrize("change", [{"format": 1}, {"format": 99}, {"another": 1}, {"memory": {}}, {"tokens_per_step": "x"}])
def test_plans_of_other_formats_are_refused_with_their_command(change, tmp_path):
    file = tmp_path / "old.json"
    file.write_text(json.dumps(to_json(sample(overrides=("train.grad_accum=1",))) | change))
    with pytest.raises(ConfigError) as refused:
        read_plan_file("B", str(file))
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("B", str(file))
    assert str(change.get("format", plan_diff.FORMAT)) in problem.rule
    command = "plan --config=configs/llama3_8b.py --config.train.grad_accum=1 --topology=h200:8 "
    assert command in problem.remedy and problem.remedy.endswith(f"--json={file}")
