"""Sharded layouts, planned: the compiled programs of small models communicate and compute what the papers' formulas give.

test_zero.py has the layouts that shard weights in other ways, with their formulas.
"""

import dataclasses
import re

import pytest
from plans import TINY, config, plan

from benchmarks import collective_volumes, studies
from benchmarks.collective_volumes import LAYOUTS, Row, Term
from jaxtrain import launch
from jaxtrain.config import Pipeline, RunConfig, Train
from jaxtrain.context import Context, make_context, pairs
from jaxtrain.plan import topology
from jaxtrain.plan.compile import NO_TUNING
from jaxtrain.plan.program import pipeline_moe
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.report import sections
from jaxtrain.plan.result import Collective, Plan, from_json, to_json
from jaxtrain.plan.search.bound import bound
from jaxtrain.plan.shardings import describe
from jaxtrain.plan.topology import parse
from jaxtrain.train import compiler
from jaxtrain.train.program import build
from jaxtrain.train.stages import Schedule

GIB = 2**30


def rows(run: RunConfig, made: Plan) -> list[Row]:
    """Return the collectives of a plan beside their formulas."""
    return collective_volumes.compare(made, collective_volumes.terms_of(run, made.mesh))


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


@pytest.mark.parametrize("name", several(BY_NAME, "ZeRO-2", "HSDP over two nodes", "tensor parallel"))
def test_a_layout_communicates_what_its_paper_says_and_nothing_else(name):
    found = rows(*known(name))
    assert found
    for row in found:
        assert abs(row.off) < 0.01, row


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


def test_what_no_formula_promises_has_a_row_and_so_has_what_is_missing():
    run, made = known("ZeRO-2")
    extra = dataclasses.replace(made.collectives[0], kind="all-gather", axis="data")
    found = collective_volumes.compare(dataclasses.replace(made, collectives=(*made.collectives, extra)), [])
    assert {row.formula for row in found} == {"none"} and ("all-gather", "data") in {(r.kind, r.axis) for r in found}
    missing = Term("all-reduce", "seq", "weights", "W", 1e9)
    (row,) = [r for r in collective_volumes.compare(made, [missing]) if r.kind == "all-reduce"]
    assert row.gb == 0 and row.count == 0 and row.off == -1.0
    double = [dataclasses.replace(c, wire_gib=2 * c.wire_gib) for c in made.collectives]
    assert any(row.off > 0.9 for row in rows(run, dataclasses.replace(made, collectives=tuple(double))))


def test_the_page_lists_every_layout_with_its_formula():
    text = "\n".join(collective_volumes.page({"ZeRO-2": known("ZeRO-2")[1]}))
    assert "## ZeRO-2" in text and "| ZeRO-2 | h200:8 | yes |" in text
    page = studies.generated(collective_volumes.PAGE)
    assert [f"## {layout.name}" for layout in LAYOUTS] == re.findall(r"^## (?!How).*$", page, re.MULTILINE)
    off = [float(x) for x in re.findall(r"\| ([+-][\d.]+)% \|", page)]
    assert len(off) >= 2 * len(LAYOUTS) and max(map(abs, off)) < 1.0
    assert "| none |" not in page and collective_volumes.COMMAND in page and collective_volumes.COMMAND in text


# ---- Sequences that are sharded

NARROW = ("num_layers=2", "d_model=512", "num_heads=8", "num_kv_heads=4", "head_dim=64", "d_ff=1024", "vocab_size=2048")
LONG = (*(f"model.{s}" for s in NARROW), "data.seq_len=32768", "train.global_batch=1", "train.grad_accum=1")
CASES = {
    "short ring": ("parallel.context=ring", "mesh.seq=2"),
    "ring": ("parallel.context=ring",),
    "ulysses": ("parallel.context=ulysses",),
    "gather": ("parallel.context=gather",),
    "ulysses x ring": ("parallel.context=ulysses", "attention.ulysses=2"),
    "window": ("parallel.context=ring", "model.sliding_window=1024"),
    "full remat": ("parallel.context=ring", "remat.policy=full", "remat.tensors="),
}


def sharded(case: str) -> tuple[RunConfig, Plan]:
    sizes = (*LONG, "mesh.seq=4", *CASES[case])
    return config(*sizes), plan("h200:2" if case == "short ring" else "h200:4", *sizes)


@pytest.mark.parametrize("case", several(CASES, "short ring", "ulysses", "window"))
def test_ranks_of_a_sequence_do_equal_work_and_none_for_nothing(case):
    """FLOPs of the program equal the formula's, which without a window is the same for every rank.

    The search's bounds on step time and memory are below the plan's figures.
    """
    run, made = sharded(case)
    assert made.attention == "cudnn" and made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)
    least = bound(run, parse(made.topology), rates_for(parse(made.topology).gpu, run.precision))
    assert 0 < least.step_s < made.time.step_ms / 1e3 and 0 < least.memory_gib < made.memory.taken_gib
    if case != "window":
        asked = made.flops.attention_by_rank
        assert len(asked) == made.mesh["seq"] and max(asked) / min(asked) < 1.02
        assert made.flops.attention_per_step == pytest.approx(max(asked), rel=0.01)
        said = sections.work(made)
        assert f"on each of {len(asked)} ranks of seq" in said and "+0.0%" in said
    assert from_json(to_json(made)) == made


# The papers have no formula for a window or for two groups of ranks. Full remat sends keys and values again in the backward
# pass, and XLA merges some of these transfers with those of the gradients.
IN_PAPERS = {case: CASES[case] for case in CASES if case not in ("window", "ulysses x ring", "full remat")}


@pytest.mark.parametrize("case", several(IN_PAPERS, "short ring", "ulysses"))
def test_ranks_of_a_sequence_communicate_what_the_papers_say(case):
    found = [row for row in rows(*sharded(case)) if row.purpose == "attention"]
    assert found
    for row in found:
        assert abs(row.off) < 0.01, row


def test_pairs_of_each_rank():
    ring = make_context("ring", 0, 4, 8, 8)
    assert sum(pairs(ring, 4096)) == 4096**2 / 2 and len({*pairs(ring, 4096)}) == 1
    # Chunks in the order of the text would be most uneven. A window evens them out, except for the first chunk.
    assert pairs(Context(1, 1), 4096) == [4096**2 / 2]
    windowed = pairs(ring, 4096, 256)
    assert sum(windowed) == pytest.approx(4096 * 256 - 256**2 / 2)
    assert windowed[0] < windowed[1] == windowed[2] == windowed[3]
    assert pairs(make_context("ulysses", 2, 4, 8, 8), 4096) == [4096**2 / 8] * 4


@pytest.mark.more
def test_activations_grow_with_tokens_and_sends_are_hidden():
    """With twice the tokens, memory beside the state at most doubles. With wide heads the sends overlap with attention."""
    wide = ("num_layers=2", "d_model=2048", "num_heads=16", "num_kv_heads=4", "head_dim=128", "d_ff=4096", "vocab_size=2048")
    sizes = (*(f"model.{s}" for s in wide), "train.global_batch=1", "train.grad_accum=1", "mesh.seq=4")
    short, long = (plan("h200:4", *sizes, f"data.seq_len={1 << n}") for n in (16, 17))
    assert long.memory.temp_gib > 3  # activations are compared, not the state
    assert long.memory.temp_gib <= 2.02 * short.memory.temp_gib
    sent = [c for c in long.collectives if c.kind == "collective-permute"]
    assert sum(c.ms for c in sent) > 5
    assert sum(c.exposed_ms for c in sent) < 0.01 * long.time.attention_ms


# ---- Stages and experts, compared with the schedule's formulas

SIZES = ("model.d_model=256", "model.d_ff=512", "model.head_dim=64", "model.vocab_size=2048", "data.seq_len=1024")
SHAPE = ("precision=bf16", "model.num_layers=2", *SIZES, "data.max_segments=4", "data.packing=none")
UNSHARDED = (*SHAPE, "mesh.data=1", "mesh.fsdp=1")
STAGED = (*UNSHARDED, "mesh.stage=2", "train.grad_accum=6", "train.global_batch=6", "remat.policy=attention")
FEW = ("model.num_experts=4", "model.experts_per_token=2", "moe.buffer=1.5")
BATCH = ("train.grad_accum=1", "train.global_batch=2")
ROUTED = (*UNSHARDED, "model.num_layers=1", "mesh.expert=2", *BATCH, "remat.policy=full", *FEW)


def staged() -> tuple[RunConfig, Plan]:
    """Return a run with a stage on each of two nodes, and its plan."""
    return config(*STAGED, of=TINY), plan("h100:1x2", *STAGED, of=TINY)


def routed(load: float = 1.0) -> tuple[RunConfig, Plan]:
    """Return a run with four experts on two GPUs of a node, and its plan. load: the busiest expert's load, as a multiple of an
    even load.
    """
    return config(*ROUTED, of=TINY), plan("h100:2", *ROUTED, of=TINY, experts_load=load)


def test_the_program_idles_as_the_schedule_says():
    run, made = staged()
    pipe, schedule = made.pipeline, Schedule("1f1b", 2, 1, 6)
    assert pipe is not None and made.experts is None
    assert (pipe.schedule, pipe.stages, pipe.microbatches, pipe.layers) == ("1f1b", 2, 6, ("0", "1"))
    assert pipe.bubble == pytest.approx(1 / 7) and pipe.idle == pytest.approx(pipe.bubble)
    # FLOPs of the compiled program include idle ticks, which do no useful work.
    assert made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)
    assert made.time.hfu < made.flops.hardware_per_step / (parse("h100:1").gpu.bf16 * 1e12 * made.time.step_ms / 1e3)
    # Queries, keys, values and attention's output of one layer, for the microbatches in flight.
    kept = schedule.slots[2] * 1024 * 2 * (256 + 2 * run.model.num_kv_heads * 64 + 256)
    assert pipe.in_flight == schedule.in_flight and pipe.saved_gib >= kept / GIB


def test_stages_on_two_nodes_communicate_over_the_network():
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
    # Half of the buffer for two experts a token goes to the other GPU. It goes there and back in the forward pass, there again
    # when the backward pass recomputes the layer, and there and back with gradients.
    rows = 2 * 1024 * 1.5 * 256 * 2 / 2
    assert x.layer_gib * GIB == pytest.approx(5 * rows, rel=0.15)
    assert made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)
    further = [count for name, count in made.trip_counts.items() if "further_rounds" in name]
    assert further and not any(further), "rounds that an even load does not need"


def test_stages_and_experts_communicate_what_their_formulas_say():
    for (run, made), purpose, count in ((staged(), "stages", 2), (routed(), "experts", 1)):
        found = [row for row in rows(run, made) if row.purpose == purpose]
        assert len(found) == count
        for row in found:
            assert abs(row.off) < 0.02, row


def test_an_uneven_load_of_experts_is_priced():
    """One expert has three times an even load, and the other expert of its device has a third of an even load.

    So their device has 1.67 times its even load. The first round has room for 1.5, and a further round for 0.25.
    """
    (_, even), (_, uneven) = routed(), routed(3.0)
    assert (even.experts.load, even.experts.rounds, uneven.experts.load, uneven.experts.rounds) == (1.0, 1, 3.0, 2)
    assert {n for name, n in uneven.trip_counts.items() if "further_rounds" in name} == {1}
    assert uneven.experts.layer_gib == pytest.approx((1.5 + 0.25) / 1.5 * even.experts.layer_gib, rel=0.1)
    assert uneven.time.step_ms > even.time.step_ms and uneven.memory == even.memory
    # Each loop, forward and backward, reads its end on the host once, and again after each round. The backward loop is inside a
    # second loop, which alone reads it if no round is needed. The host waits for nothing else.
    waits = [sorted(made.host_waits.values()) for made in (even, uneven)]
    assert waits == [[1, 1], [2, 4]]
    assert all("further_rounds" in name for made in (even, uneven) for name in made.host_waits)
    assert sections.headline(even).endswith("expert load 1.0") and sections.headline(uneven).endswith("expert load 3.0")
    assert sections.command(uneven).endswith("--experts-load=3.0") and "load" not in sections.command(even)
    assert f"{sum(waits[1]):,} times a step" in sections.host_waits(uneven)
    assert from_json(to_json(uneven)) == uneven


@pytest.mark.more
def test_experts_on_stages():
    both = ("mesh.stage=2", "train.grad_accum=6", "train.global_batch=12", "mesh.expert=2", *FEW)
    made = plan("h100:2x2", *UNSHARDED, *both, of=TINY)
    assert made.pipeline.idle == pytest.approx(made.pipeline.bubble) and made.experts.devices == 2
    assert made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)


def test_plans_with_stages_and_experts_are_written_and_read():
    made = dataclasses.replace(routed()[1], pipeline=staged()[1].pipeline)
    assert from_json(to_json(made)) == made
    said = " ".join(sections.pipeline(made) + sections.experts(made))
    for words in (
        "1f1b over 2 stages, 6 microbatches; layers 0 | 1",
        "bubble 14.3% of the step",
        "2 on each of 2 GPUs",
        "load 1.0",
    ):
        assert words in said, said
    plain = dataclasses.replace(made, pipeline=None, experts=None)
    assert sections.pipeline(plain) == sections.experts(plain) == []


def test_tables_of_layouts_show_what_waits_on_a_stage():
    table = describe(config(*STAGED, of=TINY), parse("h100:1x2"))
    q = table.row("q")
    assert (q.saved, q.copies, q.shape) == ("keep", Schedule("1f1b", 2, 1, 6).slots[2], (1, 1024, 4, 64))
    assert table.row("mlp_up").saved == "recompute" and table.row("layers.mlp.up").mesh_axes[0] == ("stage",)
    assert table.notes == ("layers by stage: 0 | 1.",)


def test_layers_of_stages():
    assert pipeline_moe.layers(10, Schedule("1f1b", 4, 1, 8)) == ("0-2", "3-5", "6-7", "8-9")
    assert pipeline_moe.layers(8, Schedule("interleaved", 2, 2, 8)) == ("0-1 4-5", "2-3 6-7")
    assert pipeline_moe.layers(2, Schedule("1f1b", 2, 1, 8)) == ("0", "1")


def test_ticks_are_counted_by_what_goes_to_a_neighbour():
    run = RunConfig(pipeline=Pipeline("interleaved", 2), train=Train(grad_accum=8))
    schedule = pipeline_moe.schedule_of(run, 4)

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
EARLY = {
    "zero 2": ("sharding.zero=2",),
    "zero 1": ("sharding.zero=1",),
    "gather step": ("sharding.gather=step",),
    "zero 2, loop": ("sharding.zero=2", "parallel.scan_layers=true"),
}


@pytest.mark.parametrize("case", several(EARLY, "zero 2", "gather step"))
def test_the_bound_is_below_the_plan_of_one_microbatch(case):
    """The search never compiles a config whose bound on memory is too high, so this bound may not exceed the plan's memory."""
    asked = (*ONE_MICROBATCH, *EARLY[case])
    made = plan("h200:8", *asked)
    least = bound(config(*asked), parse("h200:8"), made.rates)
    assert least.memory_gib < made.memory.taken_gib, (least.memory_gib, made.memory.taken_gib)


@pytest.mark.more
def test_options_put_further_rounds_into_cuda_graphs(tmp_path):
    """In XLA's thunks, with the options of docs/evidence/exchange.md every loop of further rounds is in a CUDA graph."""
    (option,) = re.findall(
        r"^--config\.(compiler\.options=\S*WHILE\S*)$", (launch.REPO / "docs/evidence/exchange.md").read_text(), re.MULTILINE
    )
    outside = {}
    for name, more in (("XLA's own", ()), ("graphs", (option,))):
        run, where = config(*ROUTED, *more, of=TINY), parse("h100:2")
        program = build(run, topology.devices(where))
        chosen = compiler.choose(program, compiler.card(where.memory_gib, run.train.memory_fraction))
        compiler.compile_train(program, chosen.options, NO_TUNING | {"xla_dump_to": str(tmp_path / name)})
        (thunks,) = (tmp_path / name).glob("*thunk_sequence_after_thunk_passes.txt")
        outside[name] = loops_outside_graphs(thunks.read_text())
    # The step has no other loops than one in the forward pass, and one inside another in the backward pass.
    assert outside == {"XLA's own": 3, "graphs": 0}


def loops_outside_graphs(thunks: str) -> int:
    """Return the number of loops outside of CUDA graphs. A thunk inside another is indented more."""
    graphs: list[int] = []
    outside = 0
    for line in thunks.splitlines():
        if not (found := re.match(r"( *)\d+: (k\w+)", line)):
            continue
        margin, kind = len(found[1]), found[2]
        graphs = [g for g in graphs if g < margin] + [margin] * (kind == "kCommandBuffer")
        outside += kind == "kWhile" and not [g for g in graphs if g < margin]
    return outside
