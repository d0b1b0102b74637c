"""The layout search with made-up plans: its layouts, their order, its limits, and what is reported."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
from made_plans import H200, above, load, made, plan_inline, tiny
from rich.console import Console

import jaxtrain
from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.plan import fit, search, search_parallel, topology
from jaxtrain.report import search_page

TWO, FOUR = topology.parse_topology("h200:2"), topology.parse_topology("h200:4")
SMALL = ("train.global_batch=16", "train.grad_accum=4")
FILE_70B = "configs/llama3_70b.py"
MIXTRAL = "configs/mixtral_8x7b.py"


@pytest.fixture
def inline(monkeypatch) -> list[RunConfig]:
    """Plan in this process, and return the list of planned runs."""
    return plan_inline(monkeypatch)


def find(run: RunConfig | None = None, machine: topology.Topology = FOUR, **options) -> search.SearchResult:
    return search.search(run or load(*SMALL), "made", machine, **{"plan_one": "made_plans:above", "jobs": 1} | options)


def printed(show: Callable[[Console], object]) -> str:
    console = Console(record=True, width=200)
    show(console)
    return console.export_text()


def planned_by(monkeypatch, plan: Callable[..., Any]) -> None:
    """Let `plan` make the plans, which run in this process."""
    monkeypatch.setattr(search_parallel.pkgutil, "resolve_name", lambda name: plan)


# ---- the layouts


def listed(*overrides: str, machine: topology.Topology = H200, file: str = "configs/llama3_8b.py") -> list[search.Candidate]:
    run, check = load(*overrides, file=file), fit.training_check(machine)
    found = search.SearchResult("made", machine, run, machine.usable_gib(), 8)
    some = search.Space(run, machine, check, found).list_layouts(())
    assert len(some) == len({c.changes for c in some}) and not any(check(c.run) for c in some)
    return some


def meshes(
    *overrides: str, axes: tuple[str, ...], machine: topology.Topology = H200, file: str = "configs/llama3_8b.py"
) -> set[Any]:
    return {tuple(getattr(c, axis) for axis in axes) for c in search.meshes(load(*overrides, file=file), machine)}


def test_meshes_are_of_powers_of_two_with_tensor_groups_inside_a_node():
    every = {(8 // f // t, f, t) for t in (1, 2, 4, 8) for f in (1, 2, 4, 8) if f * t <= 8}
    assert meshes(axes=("data", "fsdp", "tensor")) >= {(1, 8, 1), (8, 1, 1), (1, 4, 2), (1, 1, 8)}
    assert meshes(axes=("data", "fsdp", "tensor")) <= every
    wide = meshes(machine=topology.parse_topology("h200:8x16"), axes=("data", "fsdp", "tensor", "stage"))
    assert {t for *_, t, _ in wide} == {1, 2, 4, 8}
    assert {f for _, f, t, stage in wide if (t, stage) == (1, 1)} == {1, 8, 16, 32, 64, 128}, "groups of 1 to 8 nodes, and all"
    few = listed("model.num_kv_heads=4", "model.num_heads=4", "model.head_dim=128")
    assert {c.run.mesh.tensor for c in few} == {1, 2, 4}, "heads limit tensor groups"


@pytest.mark.parametrize(
    ("batch", "seq_len", "seqs"),
    [(16, 8192, {1}), (16, 131072, {1, 2, 4, 8}), (2, 8192, {1})],  # two sequences have tensor groups of 4 or 8
)
def test_sequences_are_sharded_where_they_are_long(batch, seq_len, seqs):
    some = (f"train.global_batch={batch}", "train.grad_accum=1", f"data.seq_len={seq_len}")
    assert {seq for (seq,) in meshes(*some, axes=("seq",))} == seqs
    assert {seq for (seq,) in meshes(*some, "mesh.seq=2", "mesh.fsdp=4", axes=("seq",))} == {1, 2, 4, 8}


def test_fewer_sequences_than_nodes_are_sharded():
    some = ("train.global_batch=4", "train.grad_accum=1")
    assert meshes(*some, machine=topology.parse_topology("h200:8x16"), axes=("seq",)) == {(4,)}


def test_stages_are_over_nodes_and_experts_where_there_are_some():
    axes = ("stage", "expert")
    assert meshes(axes=axes) == {(1, 1)}, "a dense model on one node has neither"
    assert meshes(machine=topology.parse_topology("h200:8x4"), axes=axes) == {(1, 1), (2, 1), (4, 1)}
    assert meshes(file=MIXTRAL, axes=axes) == {(1, 1), (1, 2), (1, 4), (1, 8)}
    # With fewer microbatches than stages, stages are idle most of the time.
    piped = listed("train.global_batch=64", "train.grad_accum=4", machine=topology.parse_topology("h200:2x8"))
    assert {c.run.mesh.stage for c in piped} >= {1, 2} and all(c.run.mesh.stage <= c.run.train.grad_accum for c in piped)


def test_what_repeats_less_work_comes_first_and_of_equals_what_communicates_less():
    """70B on 8 nodes: a replica in each node would have no memory for saved activations. Tensor groups communicate most."""
    some = listed("mesh.fsdp=-1", "mesh.data=1", machine=topology.parse_topology("h200:8x8"), file=f"{FILE_70B}:gpus=64")
    plain = [c for c in some if not c.choice.kind]
    assert plain[0].choice.fsdp in (32, 64) and plain[-1].choice.fsdp < 32
    assert plain[0].least.repeated < plain[-1].least.repeated
    kinds = list(dict.fromkeys(c.choice.kind for c in some))
    assert kinds[:2] == [(), ("tensor",)]
    moe = list(dict.fromkeys(c.choice.kind for c in listed(file=MIXTRAL)))
    assert set(moe[:2]) == {("expert",), ()} and set(moe[2:]) == {("tensor", "expert"), ("tensor",)}


# ---- what is compiled


def test_the_own_layout_is_compiled_first_then_each_kind_then_neighbours_of_the_best(inline):
    run = load("train.global_batch=16", "train.grad_accum=2")
    result = find(run, machine=H200)
    assert inline[0] == result.run and len(result.tried) == len(inline) <= 8 and result.ended
    assert (inline[1].train.grad_accum, inline[1].mesh.tensor) == (1, 1), "larger microbatches of the own kind"
    assert {r.mesh.tensor > 1 for r in inline[:3]} == {False, True}
    assert {("train.grad_accum=1", f"sharding.{key}") for key in ("zero=1", "zero=2", "gather=forward")} <= {
        c.changes for c in result.tried
    }, "neighbours of the second"
    assert result.best is result.tried[0] and result.best.plan.time.step_ms == min(c.plan.time.step_ms for c in result.tried)
    every = [above(c.run, H200) for c in listed("train.global_batch=16", "train.grad_accum=2")]
    assert result.best.plan.time.step_ms <= min(p.time.step_ms for p in every if p.fits)
    some = find(most=2)
    assert len(some.tried) == 2 and some.ended == "most" and some.best.fits
    assert find(most=1000).ended == "complete"


def test_microbatches_grow_only_while_nothing_more_is_recomputed(inline):
    """The first of each kind has at most 16,384 tokens of a microbatch on a device."""
    find(load("data.seq_len=1024", "train.global_batch=512", "train.grad_accum=64"), machine=H200, most=2)
    assert inline[1].train.grad_accum * 16 * 8 >= 512 * inline[1].mesh.tensor
    assert inline[1].train.global_batch // inline[1].train.grad_accum // (8 // inline[1].mesh.tensor) == 16


def test_nothing_that_training_refuses_or_that_cannot_fit_is_compiled(inline):
    run = load("train.global_batch=256", "train.grad_accum=1", file=f"{FILE_70B}:gpus=64")
    legal = fit.training_check(H200)
    refuses = [Problem("mesh.tensor", 2, "no", "")]
    result = find(run, machine=H200, check=lambda r: refuses if r.mesh.tensor == 2 else legal(r))
    assert result.too_big and inline and all(r.mesh.tensor != 2 for r in inline)
    assert all(fit.least_memory(r, H200).gib <= result.usable_gib for r in inline)


def test_a_refused_own_layout_is_told_and_others_are_searched(inline):
    run = load("mesh.fsdp=3")
    result = find(run)
    assert result.own_problems and all(r != run for r in inline) and result.best and result.best.fits
    assert "fsdp=3" in printed(lambda console: search_page.show_search(result, console))


def test_narrower_state_is_tried_where_nothing_fits_with_the_configs(inline):
    run = load("dtypes.m=f32", "dtypes.v=f32", "train.memory_fraction=0.8", file=FILE_70B)
    result = find(run, machine=H200)
    assert result.too_big and result.best.fits
    assert {"dtypes.m=bf16", "dtypes.v=bf16"} <= {*result.best.changes} and inline[0] != run
    assert "rounded" in printed(lambda console: search_page.show_search(result, console))


def test_plans_that_are_too_big_lead_to_smaller_ones(inline, monkeypatch):
    """If the compiled layouts need more than is there, the one with the least memory comes next, then narrower dtypes."""

    def plan(run, machine, rates=None):
        return made(run, machine, 1.0, 121 + fit.least_memory(run, machine).gib)

    planned_by(monkeypatch, plan)
    result = find(load(*SMALL, "dtypes.m=f32", "dtypes.v=f32"), machine=H200)
    sizes = [fit.least_memory(r, H200).gib for r in inline]
    wide = [gib for gib, r in zip(sizes, inline, strict=True) if r.dtypes.m == "f32"]
    assert len(wide) == 3 and result.best and result.best.run.dtypes.m == "bf16"


def test_what_fits_nowhere_is_told_with_what_is_missing(inline):
    result = find(load(file="configs/llama3_405b.py"), machine=H200)
    assert result.best is None and not inline and result.listed == 0 and result.least_gib > result.usable_gib
    shown = printed(lambda console: search_page.show_search(result, console))
    assert f"{result.least_gib:.1f} GiB" in shown
    tree = json.loads(json.dumps(search_page.to_json(result)))
    assert tree["best"] is None and tree["tried"] == [] and tree["least_gib"] == result.least_gib


@pytest.mark.parametrize("setting", ["lora.rank=8", "train.freeze=layers.mlp.*", "model.family=helpers:WiderFamily"])
def test_adapters_frozen_weights_and_own_families_are_searched(inline, setting):
    found = find(tiny(setting), machine=TWO, most=3)
    assert found.best and found.best.fits and len(found.tried) == 3


# ---- early ends and failures


@pytest.mark.parametrize("how", ["budget", "interrupted"])
def test_an_early_end_keeps_what_is_compiled(inline, monkeypatch, how):
    def plan(run, machine, rates=None):
        if len(inline) == 3:
            if how == "interrupted":
                raise KeyboardInterrupt
            clock.monotonic.return_value = 2.0
        return made(run, machine, 1.0, 10.0)

    clock = MagicMock()
    clock.monotonic.return_value = 0.0
    for module in (search, search_parallel):
        monkeypatch.setattr(module, "time", clock)
    planned_by(monkeypatch, plan)
    result = find(budget_s=1.0 if how == "budget" else 0.0)
    assert result.ended == how and len(result.tried) == (2 if how == "interrupted" else 3) and result.best.fits
    assert not result.running


def test_a_compile_may_take_a_few_times_as_long_as_the_others(inline, monkeypatch):
    """made_plans.made compiles in one second."""
    limits = []
    real = search.plan_many
    monkeypatch.setattr(search, "plan_many", lambda *args, **how: limits.append(how["timeout_s"]) or real(*args, **how))
    find()
    assert limits[0] == search_parallel.TIMEOUT_S and set(limits[1:]) == {search.LEAST_S}


def of_outcomes(monkeypatch, *outcomes: search_parallel.PlanOutcome) -> search.SearchResult:
    """Return the search that has these outcomes, one after the other."""
    left = list(outcomes)

    def plan_many(requests, on_start, on_done, **_):
        done = {ident: left.pop(0) for ident in list(requests)[: len(left)]}
        for ident, outcome in done.items():
            on_start(ident)
            on_done(ident, outcome)
        return done

    monkeypatch.setattr(search, "plan_many", plan_many)
    return search.search(tiny("train.freeze=layers.mlp.*"), "made", TWO, most=len(outcomes))


def refused(key: str) -> search_parallel.PlanOutcome:
    problem = Problem(key, "x", "is wrong", "Mend it.")
    return search_parallel.PlanOutcome(None, "refused", str(problem), (problem,))


def test_a_refusal_of_every_layout_ends_the_search(monkeypatch):
    """Of a key that the search does not change: more compiles would tell the same."""
    for key in ("train.freeze", "model.family"):
        with pytest.raises(ConfigError) as caught:
            of_outcomes(monkeypatch, refused(key), refused(key), refused(key))
        assert [p.key for p in caught.value.problems] == [key]
    planned = search_parallel.PlanOutcome(made(tiny(), TWO, 1.0, 1.0), "planned")
    assert of_outcomes(monkeypatch, planned, refused("train.freeze")).best
    assert of_outcomes(monkeypatch, refused("sharding.gather"), planned).best, "another layout may do"


def test_failed_layouts_are_told_apart_from_compiled_ones(monkeypatch):
    failed = [refused("sharding.gather"), search_parallel.PlanOutcome(None, "crashed", "another")]
    planned = search_parallel.PlanOutcome(made(tiny(), TWO, 1.0, 1.0), "planned")
    found = of_outcomes(monkeypatch, *failed, planned)
    shown = printed(lambda console: search_page.show_search(found, console))
    assert "1 compiled, 2 failed" in shown and shown.count("is wrong") == shown.count("another") == 1
    tree = search_page.to_json(found)
    assert [c["outcome"] for c in tree["tried"]] == ["planned", "refused", "crashed"]


# ---- the report


def test_plans_that_the_api_found_show_themselves(inline, monkeypatch, tmp_path):
    monkeypatch.setattr(search, "search", functools.partial(search.search, plan_one="made_plans:above"))
    monkeypatch.setattr("jaxtrain.plan.FOLDER", str(tmp_path))
    best = jaxtrain.search(load(*SMALL), FOUR.name).best
    assert best and best.plan and "on h200:4" in repr(best.plan) and "&lt;!doctype html&gt;" in best.plan._repr_html_()
    assert best.plan.to_pandas("memory")["gib"].sum() == best.plan.memory.peak_gib


def test_report_and_json(inline):
    heard = []
    result = find(most=4, on_progress=lambda found: heard.append((len(found.tried), len(found.running))))
    assert heard[0] == (0, 0) and heard[-1] == (4, 0) and (0, 1) in heard
    tree, line = json.loads(json.dumps(search_page.to_json(result))), search_page.paste(result.best)
    assert tree["paste"] == line and len(tree["tried"]) == 4 and tree["best"] == tree["tried"][0]
    assert tree["layouts"] == result.listed and math.isfinite(tree["least_gib"])
    # The line, appended to the command, gives the best layout.
    pasted = load(*SMALL, *(o.removeprefix("--config.") for o in line.split()))
    assert fit.least_memory(pasted, FOUR) == result.best.least
    with_progress = printed(lambda console: show_all(console, result))
    assert all(f"{n}: " in with_progress for n in range(1, 5)) and line in with_progress.replace("\n", "")


def show_all(console: Console, found: search.SearchResult) -> None:
    """Print a search as the command does: each plan when it is done, and then all."""
    with search_page.watch(console) as progress:
        progress(found)
    search_page.show_search(found, console)
