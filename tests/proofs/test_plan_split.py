"""What plans say of stages and of experts: read from compiled programs, beside the schedule's formulas."""

import dataclasses
import functools

import pytest

from jaxtrain import launch
from jaxtrain.config import Pipeline, RunConfig, Train
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.explore.shardings import describe
from jaxtrain.plan.known import textbook
from jaxtrain.plan.make import make_plan, read_plan
from jaxtrain.plan.program import split
from jaxtrain.plan.report import figures
from jaxtrain.plan.result import Collective, Plan, from_json, to_json
from jaxtrain.plan.topology import parse
from jaxtrain.stages import Schedule

GIB = 2**30
SIZES = ("model.d_model=256", "model.d_ff=512", "model.head_dim=64", "model.vocab_size=2048", "data.seq_len=1024")
SHAPE = (
    "precision=bf16",
    "model.num_layers=2",
    *SIZES,
    "data.max_segments=4",
    "data.packing=none",
    "mesh.data=1",
    "mesh.fsdp=1",
)
STAGES = ("mesh.stage=2", "train.grad_accum=6", "train.global_batch=6", "remat.policy=attention")
EXPERTS = ("model.num_layers=1", "mesh.expert=2", "train.grad_accum=1", "train.global_batch=2", "remat.policy=full")
FEW = ("model.num_experts=4", "model.experts_per_token=2", "experts.buffer=1.5")


@functools.cache
def plan(machine: str, *more: str) -> tuple[RunConfig, Plan]:
    loaded = launch.load(["--config=configs/tiny.py", *(f"--config.{o}" for o in (*SHAPE, *more))])
    assert not loaded.problems, loaded.problems
    return loaded.run, make_plan(loaded.run, parse(machine))


def staged() -> tuple[RunConfig, Plan]:
    """A stage on each of two nodes."""
    return plan("h100:1x2", *STAGES)


def routed() -> tuple[RunConfig, Plan]:
    """Four experts on two GPUs of a node."""
    return plan("h100:2", *EXPERTS, *FEW)


def test_the_program_idles_as_the_schedule_says():
    run, made = staged()
    pipe, schedule = made.pipeline, Schedule("1f1b", 2, 1, 6)
    assert pipe is not None and made.experts is None
    assert (pipe.schedule, pipe.stages, pipe.microbatches, pipe.layers) == ("1f1b", 2, 6, ("0", "1"))
    assert pipe.bubble == pytest.approx(1 / 7) and pipe.idle == pytest.approx(pipe.bubble)
    # FLOPs of the compiled program, those of idle ticks included, which are no use.
    assert made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)
    assert made.time.hfu < made.flops.hardware_per_step / (parse("h100:1").gpu.bf16 * 1e12 * made.time.step_ms / 1e3)
    # Queries, keys, values and the attention's output of one layer, of the microbatches that wait.
    kept = schedule.slots[2] * 1024 * 2 * (256 + 2 * run.model.num_kv_heads * 64 + 256)
    assert pipe.in_flight == schedule.in_flight and pipe.saved_gib >= kept / GIB


def test_what_goes_over_stage_crosses_the_network():
    _, made = staged()
    over = [c for c in made.collectives if c.axis == "stage"]
    assert {c.kind for c in over} == {"collective-permute", "all-reduce"}
    for c in over:
        assert c.network_gib == pytest.approx(c.wire_gib), c
    # One sequence of a microbatch on a GPU, forward and backward, in each of seven ticks.
    assert made.pipeline.permute_gib == pytest.approx(2 * 7 * 1024 * 256 * 2 / GIB, rel=0.02)


def test_tokens_go_to_experts_and_back_inside_a_node():
    _, made = routed()
    x = made.experts
    assert made.pipeline is None and (x.experts, x.per_token, x.devices, x.rows, x.room) == (4, 2, 2, 2048, 3072)
    travel = [c for c in made.collectives if c.axis == "expert" and c.kind == "all-to-all" and "/experts/" in c.op_name]
    assert travel and not any(c.network_gib for c in made.collectives)
    # Of the room for two experts a token half goes to the other GPU: there and back, there again for the backward pass, which
    # computes the layer again, and there and back with gradients.
    rows = 2 * 1024 * 1.5 * 256 * 2 / 2
    assert x.layer_gib * GIB == pytest.approx(5 * rows, rel=0.15)
    assert made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)
    further = [count for name, count in made.trip_counts.items() if "further_rounds" in name]
    assert further and not any(further), "rounds that an even load does not need"


def test_both_move_what_their_formulas_say():
    for (run, made), purpose in ((staged(), "stages"), (routed(), "experts")):
        rows = [row for row in textbook.compare(made, textbook.promised(run, made.mesh)) if row.purpose == purpose]
        assert len(rows) == (2 if purpose == "stages" else 1)
        for row in rows:
            assert abs(row.off) < 0.02, row


def test_an_uneven_load_is_priced():
    """One expert on each of 4 GPUs: 2 even shares take a second round of 1.5, forward, again, and backward."""
    sizes = (*SHAPE, "mesh.expert=4", "train.grad_accum=1", "train.global_batch=4", *FEW)
    run = launch.load(["--config=configs/tiny.py", *(f"--config.{size}" for size in sizes)]).run
    machine = parse("h100:4")
    compiled = compile_step(run, machine)
    even, uneven = (read_plan(compiled, run, machine, experts_load=load) for load in (1.0, 2.0))
    assert (even.experts.load, even.experts.rounds, uneven.experts.load, uneven.experts.rounds) == (1.0, 1, 2.0, 2)
    assert {n for name, n in uneven.trip_counts.items() if "further_rounds" in name} == {1}
    assert uneven.experts.layer_gib == pytest.approx(2 * even.experts.layer_gib, rel=0.1)
    assert uneven.time.step_ms > even.time.step_ms and uneven.memory == even.memory
    # Each of the loops asks for its end, and after a round once more.
    waits = [plan.host_waits for plan in (even, uneven)]
    assert waits[0] and {name: 2 * n for name, n in waits[0].items()} == waits[1]
    assert all("further_rounds" in name for name in waits[0])
    assert figures.headline(even).endswith("experts' load 1.0") and figures.headline(uneven).endswith("experts' load 2.0")
    assert figures.command(uneven).endswith("--experts-load=2.0") and "load" not in figures.command(even)
    assert f"{sum(waits[1].values()):,} times a step" in figures.host_waits(uneven)
    assert from_json(to_json(uneven)) == uneven


@pytest.mark.more
def test_experts_on_stages():
    _, made = plan("h100:2x2", "mesh.stage=2", "train.grad_accum=6", "train.global_batch=12", "mesh.expert=2", *FEW)
    assert made.pipeline.idle == pytest.approx(made.pipeline.bubble) and made.experts.devices == 2
    assert made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)


def test_plans_with_both_are_written_and_read():
    _, made = routed()
    made = dataclasses.replace(made, pipeline=staged()[1].pipeline)
    again = from_json(to_json(made))
    assert again == made
    said = " ".join(figures.pipeline(made) + figures.experts(made))
    for words in ("1f1b over 2 stages, 6 microbatches; layers 0 | 1", "14.3% of the step", "2 on each of 2 GPUs", "load 1.0"):
        assert words in said, said
    plain = dataclasses.replace(made, pipeline=None, experts=None)
    assert figures.pipeline(plain) == figures.experts(plain) == []


def test_tables_of_layouts_show_what_waits_on_a_stage():
    run, _ = staged()
    table = describe(run, "h100:1x2")
    q = table.row("q")
    assert (q.saved, q.copies, q.shape, q.layout) == ("keep", Schedule("1f1b", 2, 1, 6).slots[2], (1, 1024, 4, 64), "stated")
    assert table.row("mlp_up").saved == "recompute" and table.row("layers.mlp.up").mesh_axes[0] == ("stage",)
    assert table.notes == ("layers by stage: 0 | 1.",)


def test_layers_of_stages():
    assert split.layers(10, Schedule("1f1b", 4, 1, 8)) == ("0-2", "3-5", "6-7", "8-9")
    assert split.layers(8, Schedule("interleaved", 2, 2, 8)) == ("0-1 4-5", "2-3 6-7")
    assert split.layers(2, Schedule("1f1b", 2, 1, 8)) == ("0", "1")


def test_passes_are_counted_by_what_goes_on_to_a_neighbour():
    run = RunConfig(pipeline=Pipeline("interleaved", 2), train=Train(grad_accum=8))
    schedule = split.schedule_of(run, 4)

    def permute(count: int, gib: float) -> Collective:
        return Collective("collective-permute", "bf16", "stage", 4, count, gib, gib, 1.0, 0.0, "", "", "")

    # 16 units each way, 3 ticks more; statistics that travel beside them are no passes of their own.
    moved = [permute(19, 1.9), permute(19, 1.9), permute(19, 0.001)]
    assert split._idle(schedule, moved) == pytest.approx(3 / 19) == pytest.approx(schedule.bubble)
    assert split._idle(schedule, [permute(38, 3.8), permute(38, 0.01)]) == pytest.approx(3 / 19)
