"""The search for a layout with made-up plans: its space, its order, its limits, its verdicts, and the plans that it keeps."""

import ast
import dataclasses
import gzip
import importlib.util
import json
import math
from pathlib import Path

import pytest
from made_plans import FASTEST, H200, RATES, Inline, above, load, made, tiny
from rich.console import Console

from jaxtrain import flops, hardware
from jaxtrain.config import RunConfig
from jaxtrain.plan import topology
from jaxtrain.plan.report import search_report
from jaxtrain.plan.result import Plan, Rates
from jaxtrain.plan.search import best, bound, cache, parallel, space
from jaxtrain.plan.search.cache import Cache, Failure

TWO, FOUR = topology.parse("h200:2"), topology.parse("h200:4")
SMALL = ("train.global_batch=16", "train.grad_accum=4")  # some 700 layouts on FOUR


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(best, "Pool", Inline)


def find(run: RunConfig | None = None, plan_one: str = "made_plans:above", machine: topology.Topology = FOUR, **options):
    return best.search(run or load(*SMALL), "made", machine, plan_one=plan_one, **options)


def layouts(*overrides: str, machine: topology.Topology = H200, file: str = "configs/llama3_8b.py"):
    """(legal layouts as dicts, refused settings) of a config."""
    found, refused = space.legal_layouts(load(*overrides, file=file), machine, RATES, space.training_check(machine))
    return [dict(o) for o in found], refused


def shown(result: best.SearchResult) -> str:
    console = Console(record=True, width=200)
    search_report.show(result, console)
    return console.export_text()


# ---- The space


def test_space_is_what_the_checks_accept():
    run = load()
    found, refused = space.legal_layouts(run, H200, RATES, space.training_check(H200))
    assert len(found) == len(set(found)) and space.own_layout(run, H200) in found
    meshes = {tuple(dict(o)[f"mesh.{a}"] for a in ("data", "fsdp", "tensor")) for o in found}
    assert meshes == {(d, f, 8 // d // f) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if 8 % (d * f) == 0}
    # 8 shards of the batch cannot share 4 sequences.
    assert any("does not divide over 8 devices" in reason for _, reason in refused)
    check = space.training_check(H200)
    assert not any(check(space.with_overrides(run, o)) for o in found[::97])


def test_zero_is_tried_once_for_each_program():
    """Not where nothing is split, and not gather=step beside a config's zero=1."""
    every = {(3, "layer"), (3, "forward"), (3, "step"), (2, "layer")}
    held = {(o["mesh.fsdp"] > 1, o["sharding.zero"], o["sharding.gather"]) for o in layouts(*SMALL, machine=FOUR)[0]}
    assert held == {(False, 3, "layer"), *((True, *stage) for stage in every)}
    held = [(o["sharding.zero"], o["sharding.gather"]) for o in layouts(*SMALL, "sharding.zero=1", machine=FOUR)[0]]
    assert {*held} == (every - {(3, "step")}) | {(1, "layer")} and held.count((1, "layer")) == 1


def test_sequences_are_split_where_they_are_long_or_few():
    def of(*overrides):
        return {(o["mesh.seq"], o["parallel.context"]) for o in layouts(*overrides)[0]}

    methods = {(seq, method) for seq in (2, 4, 8) for method in ("ring", "ulysses", "gather")}
    assert of("train.global_batch=16", "train.grad_accum=1") == {(1, "ring")}
    assert of("data.seq_len=131072", "train.global_batch=16") == {(1, "ring"), *methods}
    # Two sequences on 8 GPUs: with tensor groups of 4 or 8 they need no splitting.
    assert of("train.global_batch=2", "train.grad_accum=1") == {(1, "ring"), *methods}
    assert of("mesh.seq=2", "parallel.context=gather") >= {(1, "gather"), *methods}


def test_stages_are_tried_over_nodes_and_experts_where_there_are_some():
    def of(machine, *overrides, file="configs/llama3_8b.py"):
        found = set()
        for mesh in space.meshes(load(*overrides, file=file), machine, RATES):
            found.add((mesh["mesh.stage"], mesh["pipeline.schedule"], mesh["pipeline.groups"], mesh["mesh.expert"]))
            axes = ("stage", "data", "fsdp", "expert", "tensor", "seq")
            assert math.prod(mesh[f"mesh.{axis}"] for axis in axes) == machine.total
        return found

    nodes = topology.parse("h200:8x4")
    assert of(H200) == {(1, "1f1b", 1, 1)}, "a dense model on one node has neither"
    piped = {(stage, *how, 1) for stage in (2, 4) for how in (("1f1b", 1), ("interleaved", 2))}
    assert of(nodes) == {(1, "1f1b", 1, 1), *piped}
    asked = of(H200, "mesh.stage=2", "mesh.fsdp=4", "pipeline.schedule=gpipe")
    assert {(stage, schedule) for stage, schedule, *_ in asked} >= {(1, "gpipe"), (2, "gpipe"), (8, "1f1b"), (8, "interleaved")}
    assert {expert for *_, expert in of(H200, file="configs/mixtral_8x7b.py")} == {1, 2, 4, 8}
    # Fewer microbatches than stages leave most of a step idle.
    found, _ = space.legal_layouts(load(file="configs/llama3_70b.py"), nodes, RATES, lambda run: ())
    assert {dict(o)["mesh.stage"] for o in found} == {1, 2, 4}
    assert all(dict(o)["mesh.stage"] <= dict(o)["train.grad_accum"] for o in found)


def test_heads_that_do_not_divide_are_refused_and_not_planned():
    found, refused = layouts("model.num_kv_heads=4", "model.num_heads=4", "model.head_dim=128")
    assert {o["mesh.tensor"] for o in found} == {1, 2, 4}
    assert any("model.num_heads" in reason for o, reason in refused if dict(o)["mesh.tensor"] == 8)


def test_own_layout_outside_the_grid_is_a_candidate():
    (own, *_), _ = layouts("remat.policy=custom", "remat.tensors=mlp_up=offload,q=keep", "remat.every=8")
    assert (own["remat.tensors"], own["remat.every"], own["mesh.fsdp"]) == ("q=keep,mlp_up=offload", 8, 8)


@pytest.mark.parametrize("file", ["configs/llama3_8b.py", "configs/llama3_70b.py", "configs/tiny.py"])
def test_ladder_saves_more_at_every_rung_and_ends_without_gemms_to_repeat(file):
    run = load(file=file)
    rungs = bound.ladder(run, RATES)
    again = []
    for names in rungs:
        remat = dataclasses.replace(run.remat, policy="custom", tensors=",".join(f"{n}=keep" for n in names), every=1)
        again.append(flops.recompute(run.model, remat, run.data.seq_len).causal)
    assert again == sorted(again, reverse=True) and len(set(again)) == len(again) and again[-1] == 0
    assert all({*a} < {*b} for a, b in zip(rungs, rungs[1:], strict=False))
    # What the backward pass gets for free behind another tensor is not worth its bytes.
    assert not {"attention_proj", "mlp_down", "attention_norm"} & {*rungs[-1]}


def test_a_knob_is_one_line(monkeypatch):
    """A new axis of the space multiplies the layouts and shows in their overrides."""
    knob = space.Knob(lambda run, machine, rates: ({"dtypes.m": m} for m in ("f32", "bf16")), ("dtypes.m",), apart=True)
    before, _ = space.legal_layouts(tiny(), H200, RATES, space.training_check(H200))
    monkeypatch.setattr(space, "KNOBS", (*space.KNOBS, knob))
    after, _ = space.legal_layouts(tiny(), H200, RATES, space.training_check(H200))
    assert len(after) == 2 * len(before) and {dict(o)["dtypes.m"] for o in after} == {"f32", "bf16"}


# ---- Order, limits, verdicts


def test_search_finds_the_best_and_stops_when_no_bound_is_below_it(inline):
    run = load(*SMALL)
    result = find(run, most=1000)
    plans = [
        (plan, dict(o))
        for o in space.legal_layouts(run, FOUR, RATES, space.training_check(FOUR))[0]
        if (plan := above(space.with_overrides(run, o), FOUR)).fits
    ]
    exhaustive, where = min(plans, key=lambda item: (item[0].time.step_ms, item[0].memory.peak_gib))
    fastest = result.front[0]
    assert fastest.plan.time.step_ms == exhaustive.time.step_ms
    assert {key: dict(fastest.overrides)[key] for key in FASTEST} == {key: where[key] for key in FASTEST}
    assert result.ended == "complete" and result.left == 0 and not result.warnings
    assert len(result.tried) + sum(result.cut.values()) == result.layouts
    assert len(result.tried) < result.layouts / 3
    # The order learns: with 24 of some 700 layouts planned, the best is within a percent of the best there is.
    some = find(run, most=24)
    assert len(some.tried) == 24 and some.ended == "most" and some.left > 0 and some.could_be < 1
    assert some.front[0].plan.time.step_ms < 1.01 * exhaustive.time.step_ms


def test_naive_layouts_are_always_there(inline):
    result = find(most=8)
    names = {name for c in result.tried for name in c.name.split(" = ") if name}
    assert names == {"the config's own", "plain fsdp, full remat", "pure data, full remat", "pure tensor, full remat"}
    data = next(c for c in result.tried if c.name == "pure data, full remat")
    assert data.verdict == "too big" and "GiB too big" in data.reason and dict(data.overrides)["train.grad_accum"] == 4
    assert result.best.plan.time.step_ms < min(c.plan.time.step_ms for c in result.tried if c.name.startswith("pure"))


def test_front_holds_what_nothing_beats(inline):
    result = find(most=40)
    assert [c for c in result.tried if c.verdict == "best"] == [result.best] and len(result.front) > 2
    assert all(c.reason and c.verdict in best.VERDICTS for c in result.tried)
    fitting = {(c.plan.time.step_ms, c.plan.memory.taken_gib) for c in result.tried if c.plan and c.plan.fits}
    front = [(c.plan.time.step_ms, c.plan.memory.taken_gib) for c in result.front]
    assert front == sorted(p for p in fitting if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in fitting))


def verdicts(*plans: tuple[float, float, float, int, int]) -> list[best.Candidate]:
    """Candidates after judgement: (step in s, GiB, seconds on links, data, fsdp) of each plan."""
    progress = best.Progress(FOUR.usable_gib(), 100)
    for step, gib, links, data, fsdp in plans:
        plan = made(tiny(), FOUR, step, gib)
        plan = dataclasses.replace(plan, time=dataclasses.replace(plan.time, communication_ms=links * 1e3))
        overrides = (("mesh.data", data), ("mesh.fsdp", fsdp), ("train.grad_accum", 1))
        progress.note(best.Candidate(overrides, tiny(), bound.Bound(0.5, 1.0), outcome=parallel.Outcome(plan, "planned")))
    best._judge(progress)
    return progress.finished


def test_layouts_within_the_error_are_equal_and_the_least_on_links_comes_first():
    """Then the fewest axes, then the shortest step; 5.1% slower is slower, with half the bytes."""
    found = verdicts(
        (1.0, 100.0, 0.4, 1, 4),  # fastest
        (1.04, 120.0, 0.2, 1, 4),  # half as long on links
        (1.02, 120.0, 0.2, 2, 2),  # as long on links, and faster, over two axes
        (1.045, 120.0, 0.2, 4, 1),  # as long on links, and longer
        (1.051, 30.0, 0.1, 1, 4),
        (1.2, 131.0, 0.1, 1, 4),
        (0.5, 900.0, 0.1, 1, 4),
    )
    assert [c.verdict for c in found] == ["equal", "best", "equal", "equal", "front", "slower", "too big"]
    order = sorted((c for c in found if c.equal), key=best.preference)
    assert [found.index(c) for c in order] == [1, 3, 2, 0]
    assert [best.axes(c) for c in found[:3]] == [1, 1, 2]


def candidate(mesh: int = 4, accum: int = 2, step_s: float = 1.0, gib: float = 100.0) -> best.Candidate:
    return best.Candidate((("mesh.fsdp", mesh), ("train.grad_accum", accum)), tiny(), bound.Bound(step_s, gib))


def test_what_is_cut():
    """By its bounds, as far as plans did not come out below theirs; and by a plan of smaller microbatches that did not fit."""
    progress = best.Progress(110.0, 100)
    assert [progress.cut(candidate(gib=gib), (1.0, 1.0)) for gib in (109.0, 111.0)] == ["", best.TOO_BIG]
    assert progress.cut(candidate(gib=111.0), (1.0, 0.9)) == ""

    done, fits = candidate(accum=4), made(tiny(), FOUR, 2.0, 100.0)
    done.outcome = parallel.Outcome(fits, "planned")
    progress.note(done)
    assert [progress.cut(candidate(step_s=s), (1.0, 1.0)) for s in (1.9, 2.1)] == ["", best.TOO_SLOW]
    assert progress.cut(candidate(step_s=2.1), (0.9, 1.0)) == ""

    big = candidate(accum=4)
    big.outcome = parallel.Outcome(made(tiny(), FOUR, 1.0, 900.0), "planned")
    progress.note(big)
    # One microbatch has no second set of gradients; larger numbers of them, and other meshes, may fit.
    cut = [progress.cut(candidate(mesh, accum), (1.0, 1.0)) for mesh, accum in ((4, 2), (4, 1), (4, 8), (2, 2))]
    assert cut == [best.BIGGER, "", "", ""]


def test_a_bound_that_was_too_high_is_lowered_and_reported(inline):
    result = find(plan_one="made_plans:below_its_bound", most=30)
    assert result.best.run.mesh.data > 1
    assert any("10.0% less time than its bound" in w for w in result.warnings)


def test_nothing_fits(inline):
    result = find(plan_one="made_plans:nothing_fits", machine=TWO, most=10)
    assert result.best is None and not result.front and search_report.paste(result) == ""
    assert "no layout that was planned fits" in shown(result)


def test_without_a_legal_layout_the_refusals_are_told(inline):
    # Neither sequences nor tokens divide over the GPUs.
    result = find(load("data.seq_len=8191", "train.global_batch=7", "train.grad_accum=1"), machine=H200)
    assert result.best is None and result.layouts == 0 and result.refused and "does not divide" in shown(result)


def test_report_and_json(inline):
    result = find(most=12)
    text, tree = shown(result), json.loads(json.dumps(search_report.to_json(result)))
    assert search_report.paste(result) in text and "pure tensor" in text and "not compiled" in text
    assert (tree["format"], tree["error"], tree["best"], len(tree["tried"])) == (2, 0.05, dict(result.best.overrides), 12)
    assert [row.get("equal") for row in tree["tried"]].count(True) == sum(c.equal for c in result.tried)
    # Pasted behind the config, the line gives the best layout. Of that config it is the own one.
    pasted = load(*SMALL, *(o.removeprefix("--config.") for o in search_report.paste(result).split()))
    assert space.own_layout(pasted, FOUR) == result.best.overrides
    # Also where a config leaves an axis to what remains.
    pasted = dataclasses.replace(pasted, mesh=dataclasses.replace(pasted.mesh, fsdp=-1))
    again = find(pasted, most=12)
    assert again.best.overrides == result.best.overrides and search_report.paste(again) == ""
    assert "the best layout is the config's own" in shown(again)


def test_budget_ends_the_search(inline, monkeypatch):
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(best.time, "monotonic", lambda: float(next(clock)))
    result = find(machine=TWO, budget_s=95)
    assert result.ended == "budget" and 0 < len(result.tried) < 10 and result.left > 0


def test_ctrl_c_reports_what_there_is(inline, monkeypatch):
    def press(self, seconds):
        if len(self.started) > 6:
            raise KeyboardInterrupt
        return wait(self, seconds)

    wait = Inline.wait
    monkeypatch.setattr(Inline, "wait", press)
    result = find(machine=TWO)
    assert result.ended == "interrupted" and len(result.tried) == 6 and result.best


# ---- The cache


def test_a_search_again_plans_nothing_but_what_was_damaged(inline, tmp_path, monkeypatch):
    monkeypatch.setattr(space, "KNOBS", space.KNOBS[:3])
    monkeypatch.setattr(best, "KNOBS", space.KNOBS[:3])
    run, kept = load("train.global_batch=2", "train.grad_accum=1"), Cache(tmp_path)
    first = find(run, machine=TWO, most=3, cache=kept)
    assert len(Inline.last.started) == 3
    again = find(run, machine=TWO, most=3, cache=kept)
    assert not Inline.last.started and again.ended == first.ended and again.left == first.left
    assert again.best.overrides == first.best.overrides and again.best.outcome.kind == "cached"
    assert again.best.plan.config == "made"
    path = next(tmp_path.glob("*.json.gz"))
    path.write_bytes(b"")
    find(run, machine=TWO, most=3, cache=kept)
    assert len(Inline.last.started) == 1 and isinstance(kept.get(path.name.partition(".")[0]), Plan)


def test_key_holds_what_matters_and_nothing_else(tmp_path, monkeypatch):
    kept, run = Cache(tmp_path), load()
    key = kept.key(run, H200, None)
    same = ("log.every_steps=7", "data.seed=3", "checkpoint.keep=9", "mesh.fsdp=8", "sample.max_tokens=1", "train.seed=4")
    other = ("model.d_ff=8192", "remat.every=2", "dtypes.m=bf16", "train.grad_accum=16", "optimizer.clip_norm=0.0")
    for override in (*same, *other):
        assert (kept.key(load(override), H200, None) == key) == (override in same), override
    assert kept.key(run, topology.parse("h200:4x2"), None) != key
    slower: Rates = dataclasses.replace(RATES, gemm_tflops=500.0)
    assert kept.key(run, H200, slower) != kept.key(run, H200, RATES), "other rates are other plans"
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


def imported(name: str) -> set[str]:
    """The modules of jaxtrain that a module imports, anywhere in it."""
    spec = importlib.util.find_spec(f"jaxtrain.{name}")
    assert spec and spec.origin, name
    tree = [*ast.walk(ast.parse(Path(spec.origin).read_text()))]
    nodes = [n for n in tree if isinstance(n, ast.ImportFrom)]
    full = [f"{n.module}.{alias.name}" for n in nodes for alias in n.names] + [n.module for n in nodes]
    full += [n.value for n in tree if isinstance(n, ast.Constant) and isinstance(n.value, str)]  # imported by name
    ours = {f.removeprefix("jaxtrain.") for f in full if f and f.startswith("jaxtrain.")}
    root = Path(cache.__file__).parents[2]
    return {m for m in ours if m and ((root / m.replace(".", "/")).is_dir() or (root / f"{m.replace('.', '/')}.py").exists())}


def test_no_code_that_plans_are_made_of_is_left_out_of_the_key():
    reached, todo = set(), {"plan.make"}
    while todo - reached:
        name = (todo - reached).pop()
        todo |= imported(name)
        reached.add(name)
    assert {"train.step", "kernels.dot", "models.families.llama", "plan.program.roofline", "train.compiler"} <= reached
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


def test_cache_that_cannot_be_written_is_only_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level("WARNING", logger="jaxtrain"):
        Cache(tmp_path / "file").put("key", Failure("no"))
    assert "not kept" in caplog.text


def test_entries_are_written_whole(tmp_path):
    kept = Cache(tmp_path)
    kept.put("a", made(load(), H200, 1.0, 2.0))
    assert kept.get("a") == made(load(), H200, 1.0, 2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json.gz"]
    kept.put("b", Failure("no such layout"))
    assert kept.get("b") == Failure("no such layout") and kept.get("c") is None


def test_only_what_would_fail_again_is_kept():
    kinds = [parallel._kind(e) for e in (ValueError("no"), MemoryError(), OSError(28, "no space left"))]
    assert kinds == ["failed", "out of memory", "crashed"]
    assert parallel._kind(RuntimeError("RESOURCE_EXHAUSTED: out of host memory")) == "out of memory"


def test_free_memory_is_that_of_this_machine():
    assert 0 < parallel.free_gib() <= hardware.host_gib()
