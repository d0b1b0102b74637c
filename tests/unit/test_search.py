"""The search for a layout: its space, its bounds, its order, its limits, and what it does when a candidate goes wrong."""

import dataclasses
import gzip
import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console
from test_floors import imports

from jaxtrain import config, flops, hardware, launch
from jaxtrain.plan import topology
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.report import search_report
from jaxtrain.plan.result import Buffer, Flops, Memory, Plan, Rates, Time
from jaxtrain.plan.search import best, bound, cache, parallel, space
from jaxtrain.plan.search.cache import Cache, Failure
from jaxtrain.plan.search.parallel import Outcome, Request

H200 = topology.parse("h200:8")
# Where the made-up plans of `above` are fastest.
FASTEST = {"mesh.data": 2, "mesh.fsdp": 4, "mesh.tensor": 1, "train.grad_accum": 16}


def load(*overrides: str, file: str = "configs/llama3_8b.py") -> config.RunConfig:
    loaded = launch.load([f"--config={file}", *(f"--config.{o}" for o in overrides)])
    assert not loaded.problems, loaded.problems
    return loaded.run


def tiny(*overrides: str) -> config.RunConfig:
    """Small enough to be compiled in seconds, with few layouts."""
    sizes = ("num_layers=2", "d_model=256", "num_heads=4", "num_kv_heads=2", "head_dim=64", "d_ff=512", "vocab_size=1024")
    batch = ("data.seq_len=256", "train.global_batch=8", "train.grad_accum=1", "loss.chunk=256", "mesh.fsdp=-1")
    return load(*(f"model.{s}" for s in sizes), *batch, "remat.policy=full", "remat.tensors=", *overrides)


def made(run: config.RunConfig, machine: topology.Topology, step_s: float, peak_gib: float, rates: Rates | None = None) -> Plan:
    """A plan with these two figures."""
    usable = machine.usable_gib()
    buffer = Buffer(peak_gib, "state", "f32[1]", "", "", "p")
    return Plan(
        config="made",
        overrides=(),
        topology=machine.name,
        chip=machine.device_kind,
        mesh={},
        attention="cudnn",
        fits=peak_gib <= usable,
        memory=Memory(
            machine.memory_gib, 6.0, usable, peak_gib, peak_gib, 0.0, 0.0, {}, {}, "", ((0.0, ""),), (buffer,), 0.0, "formula"
        ),
        flops=Flops(0.0, 0.0, 0.0, 0.0),
        collectives=(),
        time=Time(0, 0, 0, 0, 0, 0, 0, step_s * 1e3, 1 / step_s, 1 / step_s, 0.5, 0.5, 0.5, "GEMMs"),
        kernels=(),
        rates=rates or rates_for(machine.gpu, run.precision),
        tokens_per_step=run.train.global_batch * run.data.seq_len,
        compile_s=1.0,
        trip_counts={},
        hints=(),
        warnings=(),
        versions={},
        options={},
    )


def above(run: config.RunConfig, machine: topology.Topology, rates: Rates | None = None) -> Plan:
    """Always a tenth above the bound in time, and more the further the layout is from FASTEST; a fifth above in memory."""
    least = bound.bound(run, machine, rates or rates_for(machine.gpu, run.precision))
    flat = dict(config.flatten(config.to_dict(run)))
    off = sum(flat[key] != value for key, value in FASTEST.items())
    return made(run, machine, least.step_s * (1.1 + 0.05 * off), least.memory_gib * 1.2, rates)


# ---- plans that go wrong, made in real children


def by_accum(run: config.RunConfig, machine: topology.Topology, rates: Rates | None = None) -> Plan:
    """What happens hangs on the number of microbatches."""
    accum = run.train.grad_accum
    if accum == 2:
        raise ValueError("no plan\nof two microbatches")
    if accum == 4:
        os.kill(os.getpid(), signal.SIGSEGV)
    if accum == 8:
        time.sleep(60)
    if accum == 16:
        held = b"x" * (1 << 30)
        time.sleep(60 + len(held))
    return made(run, machine, 1.0 / accum, 10.0, rates)


def killed(run: config.RunConfig, machine: topology.Topology, rates: Rates | None = None) -> Plan:
    os.kill(os.getpid(), signal.SIGKILL)
    return made(run, machine, 1.0, 1.0)


def sleeps(run: config.RunConfig, machine: topology.Topology, rates: Rates | None = None) -> Plan:
    time.sleep(60)
    return made(run, machine, 1.0, 1.0)


@pytest.fixture
def children(monkeypatch):
    """Children find this file."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


class Inline:
    """A pool that plans in this process, one after the other."""

    def __init__(self, jobs=0, *, plan_one, timeout_s=0.0):
        self.waiting, self.plan_one = {}, plan_one
        self.started: list[config.RunConfig] = []

    def __enter__(self):
        Inline.last = self
        return self

    def __exit__(self, *error):
        self.waiting.clear()

    @property
    def running(self):
        return tuple(self.waiting)

    @property
    def room(self):
        return not self.waiting

    def start(self, ident, request):
        self.waiting[ident] = request
        self.started.append(request.run)

    def wait(self, seconds):
        ((ident, r),) = self.waiting.items()
        self.waiting.clear()
        return [(ident, Outcome(parallel.call(self.plan_one, r.run, r.topology, r.rates), "planned"))]


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(best, "Pool", Inline)


def find(run: config.RunConfig, plan_one: str = "test_search:above", machine: topology.Topology = H200, **options):
    return best.search(run, "made", machine, plan_one=plan_one, **options)


# ---- the space


def test_space_is_what_the_checks_accept():
    run = load()
    layouts, refused = space.legal_layouts(run, H200, rates_for(H200.gpu, "bf16"), space.training_check(H200))
    assert len(layouts) == len(set(layouts)) and space.own_layout(run, H200) in layouts
    meshes = {tuple(dict(o)[f"mesh.{a}"] for a in ("data", "fsdp", "tensor")) for o in layouts}
    assert meshes == {(d, f, 8 // d // f) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if 8 % (d * f) == 0}
    # 8 shards of the batch cannot share 4 sequences.
    assert any("does not divide over 8 devices" in reason for _, reason in refused)
    check = space.training_check(H200)
    assert not any(check(space.with_overrides(run, o)) for o in layouts[::97])


def test_stages_of_zero_once_each():
    """Only settings that are different programs: not where nothing is split, and not gather=step beside a config's zero=1."""
    layouts, _ = space.legal_layouts(load(), H200, rates_for(H200.gpu, "bf16"), space.training_check(H200))
    held = {(dict(o)["mesh.fsdp"] > 1, dict(o)["sharding.zero"], dict(o)["sharding.gather"]) for o in layouts}
    every = {(3, "layer"), (3, "forward"), (3, "step"), (2, "layer")}
    assert held == {(False, 3, "layer"), *((True, *stage) for stage in every)}
    layouts, _ = space.legal_layouts(load("sharding.zero=1"), H200, rates_for(H200.gpu, "bf16"), space.training_check(H200))
    held = [(dict(o)["sharding.zero"], dict(o)["sharding.gather"]) for o in layouts]
    assert {*held} == (every - {(3, "step")}) | {(1, "layer")} and held.count((1, "layer")) == 1


def test_sequences_are_split_where_they_are_long_or_few():
    def of(*overrides):
        rates = rates_for(H200.gpu, "bf16")
        layouts, _ = space.legal_layouts(load(*overrides), H200, rates, space.training_check(H200))
        return {(dict(o)["mesh.seq"], dict(o)["attention.context"]) for o in layouts}

    methods = {(seq, method) for seq in (2, 4, 8) for method in ("ring", "ulysses", "gather")}
    assert of() == {(1, "ring")}
    assert of("data.seq_len=131072", "train.global_batch=16") == {(1, "ring"), *methods}
    # Two sequences on 8 GPUs: with tensor groups of 4 or 8 they need no splitting.
    assert of("train.global_batch=2", "train.grad_accum=1") == {(1, "ring"), *methods}
    assert of("mesh.seq=2", "attention.context=gather") >= {(1, "gather"), *methods}


def test_stages_are_tried_over_nodes_and_experts_where_there_are_some():
    def of(machine, *overrides, file="configs/llama3_8b.py"):
        run, found = load(*overrides, file=file), set()
        rates = rates_for(machine.gpu, "bf16")
        for mesh in space.meshes(run, machine, rates):
            found.add((mesh["mesh.stage"], mesh["pipeline.schedule"], mesh["pipeline.groups"], mesh["mesh.expert"]))
            axes = ("stage", "data", "fsdp", "expert", "tensor", "seq")
            assert math.prod(mesh[f"mesh.{axis}"] for axis in axes) == machine.total
        return found

    nodes = topology.parse("h200:8x4")
    assert of(H200) == {(1, "1f1b", 1, 1)}, "a dense model on one node is searched as ever"
    piped = {(stage, *how, 1) for stage in (2, 4) for how in (("1f1b", 1), ("interleaved", 2))}
    assert of(nodes) == {(1, "1f1b", 1, 1), *piped}
    asked = of(H200, "mesh.stage=2", "mesh.fsdp=4", "pipeline.schedule=gpipe")
    assert {(stage, schedule) for stage, schedule, *_ in asked} >= {(1, "gpipe"), (2, "gpipe"), (8, "1f1b"), (8, "interleaved")}
    assert {expert for *_, expert in of(H200, file="configs/mixtral_8x7b.py")} == {1, 2, 4, 8}
    # Fewer microbatches than stages leave most of a step idle.
    layouts, _ = space.legal_layouts(load(file="configs/llama3_70b.py"), nodes, rates_for(nodes.gpu, "bf16"), lambda run: ())
    assert {dict(o)["mesh.stage"] for o in layouts} == {1, 2, 4}
    assert all(dict(o)["mesh.stage"] <= dict(o)["train.grad_accum"] for o in layouts)


def test_heads_that_do_not_divide_are_refused_and_not_planned():
    run = load("model.num_kv_heads=4", "model.num_heads=4", "model.head_dim=128")
    layouts, refused = space.legal_layouts(run, H200, rates_for(H200.gpu, "bf16"), space.training_check(H200))
    assert {dict(o)["mesh.tensor"] for o in layouts} == {1, 2, 4}
    assert any("model.num_heads" in reason for o, reason in refused if dict(o)["mesh.tensor"] == 8)


def test_own_layout_outside_the_grid_is_a_candidate():
    run = load("remat.policy=custom", "remat.tensors=mlp_up=offload,q=keep", "remat.every=8")
    layouts, _ = space.legal_layouts(run, H200, rates_for(H200.gpu, "bf16"), space.training_check(H200))
    assert layouts[0] == space.own_layout(run, H200)
    assert dict(layouts[0])["remat.tensors"] == "q=keep,mlp_up=offload" and dict(layouts[0])["mesh.fsdp"] == 8


def test_ladder_saves_more_at_every_rung_and_ends_without_gemms_to_repeat():
    for file in ("configs/llama3_8b.py", "configs/llama3_70b.py", "configs/tiny.py"):
        run = load(file=file)
        rungs = bound.ladder(run, rates_for(H200.gpu, run.precision))
        again = []
        for names in rungs:
            tensors = ",".join(f"{n}=keep" for n in names)
            remat = dataclasses.replace(run.remat, policy="custom", tensors=tensors, every=1)
            again.append(flops.recompute(run.model, remat, run.data.seq_len).causal)
        assert again == sorted(again, reverse=True) and len(set(again)) == len(again) and again[-1] == 0, file
        assert all({*a} < {*b} for a, b in zip(rungs, rungs[1:], strict=False))
        # What the backward pass gets for free behind another tensor is not worth its bytes.
        assert not {"attention_proj", "mlp_down", "attention_norm"} & {*rungs[-1]}


def test_a_knob_is_one_line(monkeypatch):
    """A new axis of the space multiplies the layouts and shows in their overrides."""
    knob = space.Knob(lambda run, machine, rates: ({"dtypes.m": m} for m in ("f32", "bf16")), ("dtypes.m",), apart=True)
    before, _ = space.legal_layouts(tiny(), H200, rates_for(H200.gpu, "bf16"), space.training_check(H200))
    monkeypatch.setattr(space, "KNOBS", (*space.KNOBS, knob))
    after, _ = space.legal_layouts(tiny(), H200, rates_for(H200.gpu, "bf16"), space.training_check(H200))
    assert len(after) == 2 * len(before) and {dict(o)["dtypes.m"] for o in after} == {"f32", "bf16"}


# ---- the bound


def test_bound_against_a_hand_count():
    """Llama 3 8B, fsdp=8, one sequence a GPU, everything recomputed, no accumulation."""
    run = load("train.global_batch=8", "train.grad_accum=1", "remat.policy=full", "remat.tensors=")
    rates = rates_for(H200.gpu, "bf16")
    least = bound.bound(run, H200, rates)
    params = 8_030_261_248 / 8
    state = params * 12  # f32 weights and moments
    inputs = 32 * 8192 * 4096 * 2
    layers = 2 * 6_979_321_856 / 8
    one_layer = 4096 * 14336 * 2 + 2 * 8192 * 14336 * 2
    assert least.memory_gib == pytest.approx((state + inputs + max(layers + one_layer, 128256 * (4096 * 6 + 2048 * 4))) / 2**30)
    # 51.47 GFLOP a token and what is computed again, at the rates of GEMMs and of attention, is below; 1.1 times that above.
    everything = flops.per_token(run.model, 8192).causal + flops.recompute(run.model, run.remat, 8192).causal
    attention = flops.attention(run.model, 8192).causal * 32  # once forward, once again, and twice that backward
    forward, backward = 539.0, 518.0  # the fastest that any length reaches
    ideal = 8192e-12 * ((everything - 4 * attention) / rates.gemm_tflops + attention * (2 / forward + 2 / backward))
    assert ideal < least.step_s < 1.1 * ideal


def test_bound_knows_what_costs():
    rates = rates_for(H200.gpu, "bf16")

    def of(*overrides, machine=H200):
        return bound.bound(load(*overrides), machine, rates)

    kept, full = of(), of("remat.policy=full", "remat.tensors=")
    assert full.step_s > 1.1 * kept.step_s and full.memory_gib < kept.memory_gib - 10
    # The forward pass waits for its tensor collectives: 4 a layer and microbatch.
    tensor = of("mesh.fsdp=4", "mesh.tensor=2")
    wire = 32 * 4 * 32 * 2 * (8192 * 4096 * 2 / 2)
    assert tensor.step_s - kept.step_s > 0.9 * wire / (rates.nvlink_gb_s * 1e9) / 2
    # Whole weights on every GPU: 12 bytes a parameter.
    assert of("mesh.data=8", "mesh.fsdp=1").memory_gib > 8.03e9 * 12 / 2**30
    # Tensors across nodes go over the network; so does fsdp, which can hide.
    slow = of("mesh.fsdp=1", "mesh.tensor=2", "train.grad_accum=256", machine=topology.parse("h200:1x2"))
    fast = of("mesh.fsdp=1", "mesh.tensor=2", "train.grad_accum=256", machine=topology.parse("h200:2"))
    assert slow.step_s > 1.05 * fast.step_s
    assert of("model.family=helpers:WiderFamily") == bound.Bound(0.0, 0.0)


def test_bound_knows_what_stages_hold_and_move():
    rates = rates_for(H200.gpu, "bf16")
    one = ("train.global_batch=8", "train.grad_accum=1", "remat.policy=full", "remat.tensors=")

    def of(*overrides):
        return bound.bound(load(*one, *overrides), H200, rates)

    params = 8_030_261_248
    layer, forward, step = of(), of("sharding.gather=forward"), of("sharding.gather=step")
    assert of("sharding.zero=1") == step
    # Whole layers in bfloat16, but for the one that a layer's gathers hold anyway; all weights, and whole gradients.
    assert forward.memory_gib - layer.memory_gib > (2 * 6.9e9) / 2**30 - 1
    assert step.memory_gib - layer.memory_gib > (2 * params + 2 * 6.9e9 * 7 / 8) / 2**30 - 2
    assert of("sharding.zero=0").memory_gib > 12 * params / 2**30
    two = of("sharding.zero=2").memory_gib
    assert layer.memory_gib < two < step.memory_gib

    def wires(*overrides):
        run = load(*overrides)
        layout = bound.Layout(run, bound.mesh_sizes(run, H200), 8)
        return {axes: wire for axes, wire, _ in bound._weight_traffic(layout) if wire}

    whole = 2 * params * 7 / 8
    accum = ("train.global_batch=32", "train.grad_accum=4")
    assert wires(*accum, "sharding.zero=1") == {("fsdp",): pytest.approx(2 * whole)}
    assert wires(*accum, "sharding.zero=0") == {("fsdp",): pytest.approx(2 * whole)}  # an all-reduce is as much
    assert wires(*accum, "sharding.gather=forward")["fsdp",] > 4 * 0.9 * 2 * whole
    assert wires(*accum)["fsdp",] > 4 * 0.9 * 2.8 * whole
    assert wires(*accum, "mesh.data=2")["data",] == pytest.approx(2 * params / 4)  # once a step


def test_bound_of_a_pipeline():
    """Two nodes: half of the layers each. Less memory than whole replicas, and longer by the ticks of an idle stage."""
    nodes, rates = topology.parse("h200:8x2"), rates_for(H200.gpu, "bf16")
    batch = ("train.global_batch=128", "train.grad_accum=8", "mesh.fsdp=8", "remat.policy=full", "remat.tensors=")

    def of(*overrides):
        return bound.bound(load(*batch, *overrides), nodes, rates)

    # As many sequences a microbatch on each GPU: 128 in 16 microbatches of a stage, in 8 of replicas.
    plain, piped = of("mesh.data=2"), of("mesh.data=1", "mesh.stage=2", "train.grad_accum=16")
    assert piped.memory_gib < 0.8 * plain.memory_gib
    layers = (51.47e9 - 6 * 4096 * 128256) * 128 * 8192 / 16 / (rates.gemm_tflops * 1e12)
    assert piped.step_s - plain.step_s > 0.9 * layers / 16, "one tick in sixteen more"
    wide = of("mesh.data=1", "mesh.stage=2", "train.grad_accum=16", "pipeline.schedule=interleaved", "pipeline.groups=4")
    assert wide.step_s < piped.step_s, "the ticks are shorter"
    layout = bound.Layout(
        load(*batch, "mesh.data=1", "mesh.stage=2", "train.grad_accum=16"),
        bound.mesh_sizes(load(*batch, "mesh.data=1", "mesh.stage=2", "train.grad_accum=16"), nodes),
        8,
    )
    ((axes, wire, launches),) = bound._stage_traffic(layout)
    assert (axes, launches) == (("stage",), 2 * 16) and wire == 2 * 16 * 8192 * 4096 * 2


def test_bound_of_experts():
    """Mixtral on one node: experts that stay where they are need no gathers, and tokens travel instead."""
    rates = rates_for(H200.gpu, "bf16")
    few = ("train.global_batch=64", "train.grad_accum=8", "remat.policy=full", "remat.tensors=")

    def layout(*overrides):
        run = load(*few, *overrides, file="configs/mixtral_8x7b.py")
        return bound.Layout(run, bound.mesh_sizes(run, H200), 8)

    spread, gathered = layout("mesh.expert=8", "mesh.fsdp=1"), layout("mesh.expert=1", "mesh.fsdp=8")
    experts = 32 * 8 * 3 * 4096 * 14336
    assert spread.parameters["experts"] == gathered.parameters["experts"] == experts / 8
    assert spread.whole["experts"] == experts / 8 and gathered.whole["experts"] == experts
    assert spread.parameters["attention"] == gathered.parameters["attention"], "all else is split alike"
    sent = [{axes: wire for axes, wire, _ in bound._weight_traffic(x) if wire} for x in (spread, gathered)]
    assert sum(sent[0].values()) < sum(sent[1].values()) / 10
    (_, (axes, wire, _)) = bound._chain_traffic(spread, passes=2)
    assert axes == ("expert",) and wire == 4 * 32 * 8 * 8192 * 2 * 4096 * 2 * 7 / 8
    plenty, all_of_it = bound.bound(spread.run, H200, rates), bound.bound(gathered.run, H200, rates)
    assert plenty.memory_gib < all_of_it.memory_gib, "a layer's experts are never all on one GPU"
    roomy = layout("mesh.expert=8", "mesh.fsdp=1", "experts.capacity=2.0")
    assert bound.bound(roomy.run, H200, rates).step_s > 1.3 * plenty.step_s, "places that are empty are computed too"


def test_groups_that_leave_a_node():
    run = load("mesh.data=2", "mesh.fsdp=4", "mesh.tensor=2")
    layout = bound.Layout(run, {"data": 2, "fsdp": 4, "tensor": 2, "seq": 1}, 8)
    assert [bound._nodes(layout, axes) for axes in (("tensor",), ("fsdp",), ("data",), ("data", "fsdp"))] == [1, 1, 2, 2]
    layout = dataclasses.replace(layout, node=4)
    assert [bound._nodes(layout, axes) for axes in (("tensor",), ("fsdp",), ("data",), ("data", "fsdp"))] == [1, 2, 2, 4]


# ---- order, limits, verdicts


def test_search_finds_the_best_and_stops_when_no_bound_is_below_it(inline):
    run = load()
    result = find(run, most=1000)
    fastest = result.front[0]
    best = {key: dict(fastest.overrides)[key] for key in FASTEST}
    everything = [
        (plan, o)
        for o in space.legal_layouts(run, H200, rates_for(H200.gpu, "bf16"), space.training_check(H200))[0]
        if (plan := above(space.with_overrides(run, o), H200)).fits
    ]
    exhaustive = min(everything, key=lambda item: (item[0].time.step_ms, item[0].memory.peak_gib))
    assert best == {key: dict(exhaustive[1])[key] for key in FASTEST}
    assert fastest.plan.time.step_ms == exhaustive[0].time.step_ms
    assert result.ended == "complete" and result.left == 0 and not result.warnings
    assert len(result.tried) + sum(result.cut.values()) == result.layouts
    assert len(result.tried) < result.layouts / 3


@pytest.mark.more
def test_few_plans_are_enough_to_come_close(inline):
    """The order learns: with 24 of 900 layouts planned, the best is within a percent of the best there is."""
    run = load()
    some, every = find(run, most=24), find(run, most=1000)
    assert len(some.tried) == 24 and some.ended == "most" and some.left > 0 and some.could_be < 1
    assert some.front[0].plan.time.step_ms < 1.01 * every.front[0].plan.time.step_ms


def test_naive_layouts_are_always_there(inline):
    result = find(load(), most=8)
    names = {name for c in result.tried for name in c.name.split(" = ") if name}
    assert names == {"the config's own", "plain fsdp, full remat", "pure data, full remat", "pure tensor, full remat"}
    data = next(c for c in result.tried if c.name == "pure data, full remat")
    assert data.verdict == "too big" and "GiB too big" in data.reason and dict(data.overrides)["train.grad_accum"] == 32
    assert result.best.plan.time.step_ms < min(c.plan.time.step_ms for c in result.tried if c.name.startswith("pure"))


@pytest.mark.more
def test_front_holds_what_nothing_beats(inline):
    result = find(load(), most=40)
    fitting = [c for c in result.tried if c.plan and c.plan.fits]
    assert [c for c in result.tried if c.verdict == "best"] == [result.best] and len(result.front) > 2
    for c in fitting:
        better = [
            o for o in fitting if o.plan.time.step_ms <= c.plan.time.step_ms and o.plan.memory.peak_gib < c.plan.memory.peak_gib
        ]
        assert (c in result.front) == (not better) and (c.verdict == "front" or c not in result.front or c.equal)
        assert c.reason and c.verdict in best.VERDICTS
    assert [c.plan.time.step_ms for c in result.front] == sorted(c.plan.time.step_ms for c in result.front)


def some_that_are_close(run, machine, rates=None):
    """Of fsdp alone 16 microbatches are fastest, and half as long on links is 4% slower; with two axes it is 2%.

    With 8, which are as long on links as 32, it is 4.5% slower.
    """
    sizes = {16: (1.0, 100.0, 0.4), 32: (1.04, 120.0, 0.2), 64: (1.051, 30.0, 0.1), 8: (1.045, 120.0, 0.2)}
    step, gib, links = sizes.get(run.train.grad_accum, (9.0, 130.0, 0.0))
    two = run.mesh.data > 1 and run.mesh.fsdp > 1
    step -= 0.02 * (two and run.train.grad_accum == 32)
    plan = made(run, machine, step + 100.0 * (run.mesh.tensor > 1 or (run.mesh.data > 1 and not two)), gib, rates)
    return dataclasses.replace(plan, time=dataclasses.replace(plan.time, communication_ms=links * 1e3))


def test_layouts_within_the_error_are_equal_and_the_least_on_links_comes_first(inline):
    run = load("remat.policy=full", "remat.tensors=")
    result = find(run, "test_search:some_that_are_close", most=300)
    assert result.best.run.train.grad_accum == 32 and best.axes(result.best) == 1, "fewer axes, though 2% slower than with two"
    assert result.best.reason.endswith("equal within 5%: 20% of the fastest step on links, 1 mesh axis")
    equal = [c for c in result.tried if c.equal]
    assert len(equal) > 2 and {c.verdict for c in equal[1:]} == {"equal"} and result.tried[: len(equal)] == tuple(equal)
    assert {c.run.train.grad_accum for c in equal} == {8, 16, 32}, "5.1% slower is slower, with half the bytes"
    alone = [c.run.train.grad_accum for c in equal if best.axes(c) == 1]
    assert alone.index(32) < alone.index(8), "as long on links, and a longer step is no reason to come first"
    assert [best.preference(c) for c in equal] == sorted(best.preference(c) for c in equal)
    console = Console(record=True, width=160)
    search_report.show(result, console)
    shown = console.export_text()
    assert f"{len(equal)} layouts are equal: their steps differ by 5% at most" in shown
    tree = search_report.to_json(result)
    assert tree["format"] == 2 and tree["error"] == 0.05
    assert [row["equal"] for row in tree["tried"] if "equal" in row].count(True) == len(equal)


def below_its_bound(run, machine, rates=None):
    least = bound.bound(run, machine, rates)
    return made(run, machine, least.step_s * (0.9 if run.mesh.data > 1 else 1.1), least.memory_gib * 1.2, rates)


def test_a_bound_that_was_too_high_is_lowered_and_reported(inline):
    result = find(load(), "test_search:below_its_bound", most=30)
    assert result.best.run.mesh.data > 1
    assert any("10.0% less time than its bound" in w for w in result.warnings)


def nothing_fits(run, machine, rates=None):
    return made(run, machine, 1.0, 1000.0, rates)


def test_nothing_fits(inline):
    result = find(load(), "test_search:nothing_fits", most=10)
    assert result.best is None and not result.front and search_report.paste(result) == ""
    console = Console(record=True, width=160)
    search_report.show(result, console)
    assert "no layout that was planned fits" in console.export_text()


def test_without_a_legal_layout_the_refusals_are_told(inline):
    # Neither sequences nor tokens divide over the GPUs.
    result = find(load("data.seq_len=8191", "train.global_batch=7", "train.grad_accum=1"))
    assert result.best is None and result.layouts == 0 and result.refused
    console = Console(record=True, width=200)
    search_report.show(result, console)
    assert "does not divide" in console.export_text()


def test_report_and_json(inline):
    result = find(load(), most=12)
    console = Console(record=True, width=200)
    search_report.show(result, console)
    text = console.export_text()
    assert search_report.paste(result) in text and "pure tensor" in text and "not compiled" in text
    tree = json.loads(json.dumps(search_report.to_json(result)))
    assert tree["best"] == dict(result.best.overrides) and len(tree["tried"]) == 12
    # Pasted behind the config, the line gives the best layout.
    pasted = load(*(o.removeprefix("--config.") for o in search_report.paste(result).split()))
    assert space.own_layout(pasted, H200) == result.best.overrides


@pytest.mark.parametrize("rest", [pytest.param(False, marks=pytest.mark.more), True])
def test_the_best_may_be_the_configs_own(inline, rest):
    """Also where the config leaves an axis to what remains."""
    best = find(load(), most=30).best
    run = space.with_overrides(load(), best.overrides)
    if rest:
        run = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, fsdp=-1))
    result = find(run, most=30)
    console = Console(record=True, width=200)
    search_report.show(result, console)
    assert result.best.overrides == best.overrides and search_report.paste(result) == ""
    assert "the best layout is the config's own" in console.export_text()


def test_budget_ends_the_search(inline, monkeypatch):
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(best.time, "monotonic", lambda: float(next(clock)))
    result = find(load(), budget_s=95)
    assert result.ended == "budget" and 0 < len(result.tried) < 10 and result.left > 0


def test_ctrl_c_reports_what_there_is(inline, monkeypatch):
    def press(self, seconds):
        if len(self.started) > 6:
            raise KeyboardInterrupt
        return wait(self, seconds)

    wait = Inline.wait
    monkeypatch.setattr(Inline, "wait", press)
    result = find(load())
    assert result.ended == "interrupted" and len(result.tried) == 6 and result.best


# ---- the cache


def test_second_search_plans_nothing(inline, tmp_path):
    run, kept = load("train.global_batch=32", "train.grad_accum=4"), Cache(tmp_path)
    first = find(run, most=12, cache=kept)
    assert len(Inline.last.started) == 12
    again = find(run, most=12, cache=kept)
    assert not Inline.last.started and again.ended == first.ended and again.left == first.left
    assert again.best.overrides == first.best.overrides and again.best.outcome.kind == "cached"
    assert again.best.plan.config == "made"
    # Other rates are other plans.
    slower = dataclasses.replace(rates_for(H200.gpu, "bf16"), gemm_tflops=500.0)
    find(run, most=5, cache=kept, rates=slower)
    assert len(Inline.last.started) == 5


def test_key_holds_what_matters_and_nothing_else(tmp_path, monkeypatch):
    kept, run = Cache(tmp_path), load()
    key = kept.key(run, H200, None)
    same = ("log.every_steps=7", "data.seed=3", "checkpoint.keep=9", "mesh.fsdp=8", "sample.max_tokens=1", "train.seed=4")
    for override in same:
        assert kept.key(load(override), H200, None) == key, override
    other = ("model.d_ff=8192", "remat.every=2", "dtypes.m=bf16", "train.grad_accum=16", "optimizer.clip_norm=0.0")
    for override in other:
        assert kept.key(load(override), H200, None) != key, override
    assert kept.key(run, topology.parse("h200:4x2"), None) != key
    monkeypatch.setattr(cache, "_code", lambda: "other code")
    assert kept.key(run, H200, None) != key
    monkeypatch.undo()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert kept.key(run, H200, None) != key


def test_own_code_is_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "my_loss_for_the_key.py"
    file.write_text("def loss(*a): return 1")
    run = load("loss.name=my_loss_for_the_key:loss")
    key = Cache(tmp_path).key(run, H200, None)
    file.write_text("def loss(*a): return 2")
    assert Cache(tmp_path).key(run, H200, None) != key


def test_no_code_that_plans_are_made_of_is_left_out_of_the_key():
    graph, reached, todo = imports(), set(), ["plan.make"]
    while todo:
        name = todo.pop()
        todo += graph[name] - reached
        reached.add(name)
    assert {"step", "kernels.dot", "models.llama", "plan.program.roofline", "compiler"} <= reached
    assert not [name for name in reached if cache._is_other(name)]
    assert cache._is_other("checkpoint") and cache._is_other("data.pipeline") and cache._is_other("plan.search")


@pytest.mark.parametrize("damage", ["", "not gzip", "cut", "{}", '{"format": 0}'])
def test_a_damaged_entry_counts_as_none_with_a_warning(tmp_path, caplog, damage):
    kept = Cache(tmp_path)
    kept.put("a", made(load(), H200, 1.0, 2.0))
    path, whole = kept.path("a"), kept.path("a").read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "not gzip": b"not gzip"}.get(damage, gzip.compress(damage.encode())))
    with caplog.at_level("WARNING", logger="jaxtrain"):
        assert kept.get("a") is None
    assert f"{path} is damaged" in caplog.text


def test_a_damaged_entry_is_planned_again(inline, tmp_path):
    run, kept, machine = load("train.global_batch=8"), Cache(tmp_path), topology.parse("h200:2")
    find(run, machine=machine, most=3, cache=kept)
    path = next(tmp_path.glob("*.json.gz"))
    path.write_bytes(b"")
    find(run, machine=machine, most=3, cache=kept)
    assert len(Inline.last.started) == 1 and isinstance(kept.get(path.name.partition(".")[0]), Plan)


def test_cache_that_cannot_be_written_is_only_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    kept = Cache(tmp_path / "file")
    with caplog.at_level("WARNING", logger="jaxtrain"):
        kept.put("key", Failure("no"))
    assert "not kept" in caplog.text


def test_entries_are_written_whole(tmp_path):
    kept = Cache(tmp_path)
    kept.put("a", made(load(), H200, 1.0, 2.0))
    found = kept.get("a")
    assert isinstance(found, Plan) and found == made(load(), H200, 1.0, 2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json.gz"]
    kept.put("b", Failure("no such layout"))
    assert kept.get("b") == Failure("no such layout") and kept.get("c") is None


# ---- real children


def test_children_that_go_wrong_are_named_and_the_rest_goes_on(children, tmp_path):
    run = load("train.global_batch=32", "train.grad_accum=1", file="configs/tiny.py")
    machine = topology.parse("h200:1")
    requests = {a: Request(space.with_overrides(run, [("train.grad_accum", a)]), machine, "tiny") for a in (1, 2, 4, 32)}
    kept = Cache(tmp_path)
    heard = []
    found = parallel.plan_many(
        requests, jobs=2, cache=kept, plan_one="test_search:by_accum", on_done=lambda ident, outcome: heard.append(ident)
    )
    assert [found[a].kind for a in requests] == ["planned", "failed", "crashed", "planned"] and sorted(heard) == [1, 2, 4, 32]
    assert found[2].reason == "ValueError: no plan of two microbatches" and "SIGSEGV" in found[4].reason
    assert found[32].plan.time.step_ms == pytest.approx(1000 / 32) and found[32].plan.config == "tiny"
    # What planning raised would be raised again; a crash may be chance.
    again = {a: parallel.from_cache(kept, requests[a], "test_search:by_accum") for a in requests}
    assert [a for a in requests if again[a]] == [1, 2, 32]
    assert again[1].plan == found[1].plan and "to try again" in again[2].reason


def test_only_what_would_fail_again_is_kept():
    kinds = [parallel._kind(e) for e in (ValueError("no"), MemoryError(), OSError(28, "no space left"))]
    assert kinds == ["failed", "out of memory", "crashed"]
    assert parallel._kind(RuntimeError("RESOURCE_EXHAUSTED: out of host memory")) == "out of memory"


def test_a_child_that_takes_too_long_is_stopped(children):
    run = load("train.global_batch=32", "train.grad_accum=8", file="configs/tiny.py")
    request = Request(run, topology.parse("h200:1"))
    found = parallel.plan_many({8: request}, jobs=1, plan_one="test_search:by_accum", timeout_s=2.0)
    assert found[8].kind == "out of time" and "within 2 s" in found[8].reason


def test_a_host_without_memory_stops_the_largest_child(children, monkeypatch):
    run = load(file="configs/tiny.py")
    monkeypatch.setattr(parallel, "free_gib", lambda: 0.1)
    with parallel.Pool(1, plan_one="test_search:sleeps") as pool:
        pool.start("one", Request(run, topology.parse("h200:1")))
        found = pool.wait(60.0)
    assert found[0][1].kind == "out of memory" and "0.1 GiB were left" in found[0][1].reason


def test_a_child_that_the_system_kills_ran_out_of_memory(children):
    with parallel.Pool(1, plan_one="test_search:killed") as pool:
        pool.start("one", Request(load(file="configs/tiny.py"), topology.parse("h200:1")))
        found = pool.wait(60.0)
    assert found[0][1].kind == "out of memory" and "killed, as the system does" in found[0][1].reason


def test_budget_stops_children(children):
    requests = {i: Request(load(file="configs/tiny.py"), topology.parse("h200:1")) for i in range(3)}
    began = time.monotonic()
    found = parallel.plan_many(requests, jobs=2, budget_s=1.0, plan_one="test_search:sleeps")
    assert time.monotonic() - began < 20
    assert {o.kind for o in found.values()} == {"stopped"} and "budget of 1 s" in found[0].reason


def test_no_child_outlives_its_pool(children):
    with pytest.raises(KeyboardInterrupt), parallel.Pool(2, plan_one="test_search:sleeps") as pool:
        for i in range(2):
            pool.start(i, Request(load(file="configs/tiny.py"), topology.parse("h200:1")))
        pids = [child.process.pid for child in pool._children.values()]
        assert len(pids) == 2 and not pool.room
        raise KeyboardInterrupt
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_free_memory_is_that_of_this_machine():
    assert 0 < parallel.free_gib() <= hardware.host_gib()


def test_a_real_search(tmp_path, monkeypatch):
    """Two layouts of a small model on two H200s, compiled by XLA:GPU in two processes; then again from the cache."""
    monkeypatch.setattr(space, "KNOBS", tuple(dataclasses.replace(k, settings=few(k.settings)) for k in space.KNOBS))
    run, machine, kept = tiny(), topology.parse("h200:2"), Cache(tmp_path)
    console = Console(record=True, width=160)
    with search_report.watch(console) as progress:
        result = best.search(run, "tiny", machine, jobs=2, cache=kept, on_progress=progress)
    assert [c.outcome.kind for c in result.tried] == ["planned"] * 2, [c.outcome for c in result.tried]
    assert result.ended == "complete" and not result.warnings and result.best.plan.fits
    for c in result.tried:
        assert c.plan.time.step_ms >= c.bound.step_s * 1e3 and c.plan.memory.peak_gib >= c.bound.memory_gib
        assert c.plan.config == "tiny" and c.plan.mesh["fsdp"] == 2
    assert "2: fsdp=2" in console.export_text()
    began = time.monotonic()
    again = best.search(run, "tiny", machine, jobs=2, cache=kept)
    assert time.monotonic() - began < 10
    assert [c.outcome.kind for c in again.tried] == ["cached"] * 2
    assert again.best.plan == result.best.plan


def few(settings):
    """Of a knob's settings those of this test: fsdp=2, weights gathered by layer, one microbatch, full remat or none."""

    def some(*args):
        for s in settings(*args):
            wanted = {"mesh.fsdp": (2,), "train.grad_accum": (1,), "remat.policy": ("full", "none"), "remat.every": (1,)}
            wanted |= {"sharding.zero": (3,), "sharding.gather": ("layer",)}
            if all(s.get(key, values[0]) in values for key, values in wanted.items()):
                yield s

    return some
