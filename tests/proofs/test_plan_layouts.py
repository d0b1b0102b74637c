"""Sharded layouts, planned: the compiled programs of small models communicate and compute what the papers' formulas give.

test_zero.py has the layouts that shard weights in other ways, with their formulas.
"""

import re

import pytest
from plans import TINY, config, plan

from benchmarks import collective_volumes, studies
from benchmarks.collective_volumes import LAYOUTS, Row
from jaxtrain.config.layout import Arrangement
from jaxtrain.config.schema import RunConfig
from jaxtrain.plan.fit import least_memory
from jaxtrain.plan.program import pipeline_moe
from jaxtrain.plan.result import Collective, Plan, from_json, to_json
from jaxtrain.plan.topology import parse_topology
from jaxtrain.report import plan_sections
from jaxtrain.step.stages import Schedule

GIB = 2**30


def rows(run: RunConfig, made: Plan) -> list[Row]:
    """Return the collectives of a plan beside their formulas."""
    return collective_volumes.compare(made, collective_volumes.terms_of(run, made.mesh))


def assert_exact(found: list[Row], within: float = 0.01) -> None:
    """Check that the bytes of each row are those of its formula."""
    assert found and not [row for row in found if abs(row.off) >= within]


def several(cases: dict, *often: str) -> list:
    """Return the names of the cases as parameters. Names that are not in `often` run only in a campaign."""
    assert {*often} <= cases.keys()
    return [pytest.param(name, marks=() if name in often else pytest.mark.more) for name in cases]


# ---- Weights, tokens, stages and experts: Llama 3 8B's layers in the layouts of the literature

BY_NAME = {layout.name: layout for layout in LAYOUTS if layout.name not in ("DDP, ZeRO-0", "ZeRO-1", "ZeRO-3, FSDP")}
LAYERS = {"pipeline parallel, 1F1B": 4, "pipeline parallel, interleaved": 8}  # one layer for each group of each stage


def known(name: str) -> tuple[RunConfig, Plan]:
    layout = BY_NAME[name]
    # Rings are unrolled, so compile time grows with their length. The page has rings on 8 GPUs.
    short = name.startswith("context parallel")
    more = ("mesh.seq=4",) if short else (f"model.num_layers={LAYERS[name]}",) if name in LAYERS else ()
    sizes = ("model.num_layers=2", "model.vocab_size=32768", *layout.overrides, *more)
    machine = "h200:4" if short else layout.machine
    return config(*sizes), plan(machine, *sizes)


@pytest.mark.parametrize("name", several(BY_NAME, "HSDP over two nodes", "tensor parallel"))
def test_a_layout_communicates_what_its_paper_says_and_nothing_else(name):
    assert_exact(rows(*known(name)))


def test_tensor_parallelism_moves_no_weight_and_two_pairs_a_layer():
    run, made = known("tensor parallel")
    found = rows(run, made)
    assert {(row.kind, row.purpose) for row in found} == {("all-gather", "tokens"), ("reduce-scatter", "tokens")}
    assert {dtype for row in found for dtype in row.dtypes} == {"bf16"}
    forward = [c for c in made.collectives if "jvp(layers)" in c.op_name and "transpose(" not in c.op_name]
    count = {kind: sum(c.count for c in forward if c.kind == kind) for kind in ("all-gather", "reduce-scatter")}
    assert count == dict.fromkeys(count, 2 * run.model.num_layers)
    # Each collective has the residual stream of one sequence, of which a seventh stays local. No weight is as large.
    stream = 2 * 8192 * 4096 * 7 / 8
    assert {round(c.wire_gib * GIB / c.count / stream, 2) for c in forward} == {1.0}


def test_replicas_over_nodes_leave_weights_in_their_node():
    _, made = known("HSDP over two nodes")
    assert made.mesh["data"] == 2 and made.mesh["fsdp"] == 8
    large = [c for c in made.collectives if c.wire_gib > 1e-3]
    assert {c.axis for c in large if c.network_gib} == {"data"} and {c.axis for c in large if not c.network_gib} == {"fsdp"}


def test_the_page_lists_every_layout_with_its_formula():
    text = "\n".join(collective_volumes.page({"HSDP over two nodes": known("HSDP over two nodes")[1]}))
    assert "## HSDP over two nodes" in text and "h200:8x2" in text
    page = studies.generated(collective_volumes.PAGE)
    assert [f"## {layout.name}" for layout in LAYOUTS] == re.findall(r"^## (?!How).*$", page, re.MULTILINE)
    off = [float(x) for x in re.findall(r"\| ([+-][\d.]+)% \|", page)]
    assert len(off) >= 2 * len(LAYOUTS) and max(map(abs, off)) < 1.0


# ---- Sequences that are sharded

NARROW = ("num_layers=2", "d_model=512", "num_heads=8", "num_kv_heads=4", "head_dim=64", "d_ff=1024", "vocab_size=2048")
LONG = (*(f"model.{s}" for s in NARROW), "data.seq_len=32768", "train.global_batch=1", "train.grad_accum=1")
CASES = {
    "short ring": ("parallel.context=ring", "mesh.seq=2"),
    "ring": ("parallel.context=ring",),
    "ulysses": ("parallel.context=ulysses",),
    "window": ("parallel.context=ring", "model.sliding_window=1024"),
}


def sharded(case: str) -> tuple[RunConfig, Plan]:
    sizes = (*LONG, "mesh.seq=4", *CASES[case])
    return config(*sizes), plan("h200:2" if case == "short ring" else "h200:4", *sizes)


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_ranks_of_a_sequence_do_equal_work_and_none_for_nothing(case):
    """FLOPs of the program equal the formula's, which without a window is the same for every rank.

    The least memory of the run is below the plan's.
    """
    run, made = sharded(case)
    assert made.attention == "cudnn" and made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)
    assert 0 < least_memory(run, parse_topology(made.topology)).gib < made.memory.taken_gib
    if case != "window":
        asked = made.flops.attention_by_rank
        assert len(asked) == made.mesh["seq"] and max(asked) / min(asked) < 1.02
        assert made.flops.attention_per_step == pytest.approx(max(asked), rel=0.01)


@pytest.mark.parametrize("case", ["short ring", pytest.param("ulysses", marks=pytest.mark.more)])
def test_ranks_of_a_sequence_communicate_what_the_papers_say(case):
    assert_exact([row for row in rows(*sharded(case)) if row.purpose == "attention"])


# ---- Stages and experts, compared with the schedule's formulas

SIZES = ("model.d_model=256", "model.d_ff=512", "model.head_dim=64", "model.vocab_size=2048", "data.seq_len=1024")
SHAPE = ("precision=bf16", "model.num_layers=2", *SIZES, "data.max_segments=4", "data.packing=none")
UNSHARDED = (*SHAPE, "mesh.data=1", "mesh.fsdp=1")
STAGED = (*UNSHARDED, "mesh.stage=2", "train.grad_accum=6", "train.global_batch=6", "remat.policy=attention")
FEW = ("model.num_experts=4", "model.experts_per_token=2")
BATCH = ("train.grad_accum=1", "train.global_batch=2")
ROUTED = (*UNSHARDED, "model.num_layers=1", "mesh.expert=2", *BATCH, "remat.policy=full", *FEW)


def staged() -> tuple[RunConfig, Plan]:
    """Return a run with a stage on each of two nodes, and its plan."""
    return config(*STAGED, of=TINY), plan("h100:1x2", *STAGED, of=TINY)


def routed() -> tuple[RunConfig, Plan]:
    """Return a run with four experts on two GPUs of a node, and its plan."""
    return config(*ROUTED, of=TINY), plan("h100:2", *ROUTED, of=TINY)


def test_the_program_idles_as_the_schedule_says():
    run, made = staged()
    pipe, schedule = made.pipeline, Schedule("1f1b", 2, 1, 6)
    assert pipe is not None and made.experts is None
    assert (pipe.schedule, pipe.stages, pipe.microbatches, pipe.layers) == ("1f1b", 2, 6, ("0", "1"))
    assert pipe.bubble == pytest.approx(1 / 7) and pipe.idle == pytest.approx(pipe.bubble)
    # FLOPs of the compiled program include idle ticks, which do no useful work.
    assert made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)
    assert made.time.hfu < made.flops.hardware_per_step / (parse_topology("h100:1").gpu.bf16 * 1e12 * made.time.step_ms / 1e3)
    # Queries, keys, values and attention's output of one layer, for the microbatches in flight.
    kept = schedule.slots[2] * 1024 * 2 * (256 + 2 * run.model.num_kv_heads * 64 + 256)
    assert pipe.in_flight == schedule.in_flight and pipe.saved_gib >= kept / GIB
    assert from_json(to_json(made)) == made
    assert {"1f1b", "14.3%"} <= {*" ".join(plan_sections.pipeline(made)).split()}


def test_stages_on_two_nodes_communicate_over_the_network():
    _, made = staged()
    over = [c for c in made.collectives if c.axis == "stage"]
    assert {c.kind for c in over} == {"collective-permute", "all-reduce"}
    for c in over:
        assert c.network_gib == pytest.approx(c.wire_gib), c
    found = [row for row in rows(*staged()) if row.purpose == "stages"]
    assert len(found) == 2
    assert_exact(found, 0.02)
    # One sequence of a microbatch on a GPU, forward and backward, in each of seven ticks.
    assert made.pipeline.permute_gib == pytest.approx(2 * 7 * 1024 * 256 * 2 / GIB, rel=0.02)


@pytest.mark.more
@pytest.mark.long
def test_tokens_go_to_experts_and_back_inside_a_node():
    _, made = routed()
    x = made.experts
    assert made.pipeline is None and (x.experts, x.per_token, x.devices, x.rows, x.room) == (4, 2, 2, 2048, 2560)
    travel = [c for c in made.collectives if c.axis == "expert" and c.kind == "all-to-all" and "/experts/" in c.op_name]
    assert travel and not any(c.network_gib for c in made.collectives)
    # Half of the buffer for two experts a token goes to the other GPU. It goes there and back in the forward pass, there again
    # when the backward pass recomputes the layer, and there and back with gradients.
    sent = 2 * 1024 * 1.25 * 256 * 2 / 2
    assert x.layer_gib * GIB == pytest.approx(5 * sent, rel=0.15)
    assert made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)
    further = [count for name, count in made.trip_counts.items() if "further_rounds" in name]
    assert further and not any(further)
    assert_exact([row for row in rows(*routed()) if row.purpose == "experts"], 0.02)


def test_layers_of_stages():
    assert pipeline_moe.stage_layers(Arrangement(10, 4)) == ("0-2", "3-5", "6-7", "8-9")
    assert pipeline_moe.stage_layers(Arrangement(8, 2, 2)) == ("0-1 4-5", "2-3 6-7")
    assert pipeline_moe.stage_layers(Arrangement(2, 2)) == ("0", "1")


def test_ticks_are_counted_by_what_goes_to_a_neighbour():
    schedule = Schedule("interleaved", 4, 2, 8)

    def permute(count: int, gib: float) -> Collective:
        return Collective("collective-permute", "bf16", "stage", 4, count, gib, gib, 1.0, 0.0, "", "", "")

    # 16 passes each way plus 3 ticks of bubble. Sends of statistics beside them are not ticks.
    moved = [permute(19, 1.9), permute(19, 1.9), permute(19, 0.001)]
    assert pipeline_moe._idle(schedule, moved) == pytest.approx(3 / 19) == pytest.approx(schedule.bubble)
    assert pipeline_moe._idle(schedule, [permute(38, 3.8), permute(38, 0.01)]) == pytest.approx(3 / 19)


# ---- The bound of a step with one microbatch, whose gathered weights XLA frees early

ONE_MICROBATCH = (
    *("model.num_layers=2", "model.d_model=2048", "model.num_heads=16", "model.num_kv_heads=4", "model.d_ff=5632"),
    *("model.vocab_size=128000", "data.seq_len=256", "data.max_segments=1", "train.global_batch=8", "train.grad_accum=1"),
    *("remat.policy=full", "remat.tensors="),
)


@pytest.mark.more
@pytest.mark.parametrize("case", [("sharding.gather=step",), ("sharding.zero=2",)], ids=" ".join)
def test_the_least_memory_is_below_the_plan_of_one_microbatch(case):
    """A config whose least memory is too high is refused, so it may not exceed the plan's memory."""
    asked = (*ONE_MICROBATCH, *case)
    made = plan("h200:8", *asked)
    assert least_memory(config(*asked), parse_topology("h200:8")).gib < made.memory.taken_gib
