"""The layout search with made-up plans: its space, its order, its limits, and layouts that cannot fit by formula."""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
from made_plans import H200, RATES, above, load, made, plan_inline, tiny
from rich.console import Console

import jaxtrain
from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.plan import search, search_parallel, search_space, topology
from jaxtrain.plan.search_bound import bound
from jaxtrain.plan.search_cache import Request
from jaxtrain.report import search_page

TWO, FOUR = topology.parse("h200:2"), topology.parse("h200:4")
SMALL = ("train.global_batch=16", "train.grad_accum=4")
FILE_70B = "configs/llama3_70b.py"
FULL = ("remat.policy=full", "remat.tensors=")


@pytest.fixture
def inline(monkeypatch) -> list[RunConfig]:
    """Plan in this process, and return the list of planned runs."""
    return plan_inline(monkeypatch)


def find(run: RunConfig | None = None, **options) -> search.SearchResult:
    return search.search(run or load(*SMALL), "made", FOUR, plan_one="made_plans:above", **options)


def printed(show: Callable[[Console], object]) -> str:
    console = Console(record=True, width=200)
    show(console)
    return console.export_text()


def layouts(*overrides: str, machine: topology.Topology = H200, file: str = "configs/llama3_8b.py") -> list[RunConfig]:
    """Return the runs of `space.fastest_space`, without the config itself."""
    run = load(*overrides, file=file)
    return [
        search_space.with_overrides(run, o)
        for o in search_space.fastest_space(run, machine, search_space.training_check(machine))
        if o
    ]


# ---- the space


def test_space_is_what_the_checks_accept():
    found = layouts()
    assert len(found) == len(set(found))
    meshes = {(r.mesh.data, r.mesh.fsdp, r.mesh.tensor) for r in found}
    assert meshes == {(d, f, 8 // d // f) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if 8 % (d * f) == 0}
    check = search_space.training_check(H200)
    assert not any(check(r) for r in found)
    assert {r.mesh.tensor for r in layouts("model.num_kv_heads=4", "model.num_heads=4", "model.head_dim=128")} == {1, 2, 4}


def test_each_zero_stage_is_tried_where_weights_are_sharded():
    held = {(r.mesh.fsdp > 1, r.sharding.zero, r.sharding.gather) for r in layouts(*SMALL, machine=FOUR)}
    every = {(3, "layer"), (3, "forward"), (3, "step"), (2, "layer")}
    assert held == {(False, 3, "layer"), *((True, *stage) for stage in every)}


@pytest.mark.parametrize(
    ("batch", "seq_len", "sharded"),
    [(16, 8192, False), (16, 131072, True), (2, 8192, True)],  # with tensor groups of 4 or 8, two sequences need no sharding
)
def test_sequences_are_sharded_where_they_are_long_or_few(batch, seq_len, sharded):
    found = layouts(f"train.global_batch={batch}", "train.grad_accum=1", f"data.seq_len={seq_len}")
    methods = {(seq, method) for seq in (2, 4, 8) for method in ("ring", "ulysses", "gather")}
    assert {(r.mesh.seq, r.parallel.context) for r in found} == {(1, "ring"), *(methods if sharded else ())}


def test_stages_are_tried_over_nodes_and_experts_where_there_are_some():
    def of(machine, *overrides, file="configs/llama3_8b.py"):
        found = [dict(mesh) for mesh in search_space.meshes(load(*overrides, file=file), machine)]
        keys = ("mesh.stage", "pipeline.schedule", "pipeline.groups", "mesh.expert")
        return {tuple(mesh[key] for key in keys) for mesh in found}

    assert of(H200) == {(1, "1f1b", 1, 1)}  # a dense model on one node has neither
    piped = {(stage, *how, 1) for stage in (2, 4) for how in (("1f1b", 1), ("interleaved", 2))}
    assert of(topology.parse("h200:8x4")) == {(1, "1f1b", 1, 1), *piped}
    assert {expert for *_, expert in of(H200, file="configs/mixtral_8x7b.py")} == {1, 2, 4, 8}
    # With fewer microbatches than stages, stages are idle most of the time.
    found = layouts("train.global_batch=64", "train.grad_accum=4", machine=topology.parse("h200:2x8"))
    assert {r.mesh.stage for r in found} == {1, 2, 4, 8} and all(r.mesh.stage <= r.train.grad_accum for r in found)


def test_what_fits_rounds_more_of_the_state_at_each_rank():
    """Rank 0 of `fitting_space` changes no dtype of the state. The dtype of the weights changes last."""
    run = load(*FULL, "dtypes.m=f32", "dtypes.v=f32", file=FILE_70B)
    found = [(rank, dict(o)) for rank, o in search_space.fitting_space(run, H200, search_space.training_check(H200))]
    types = {rank: {key for r, o in found if r == rank for key in o if key.startswith("dtypes.")} for rank, _ in found}
    assert types[0] == set() and types[1] == {"dtypes.m"} and types[2] == {"dtypes.v"}
    assert max(types) == 6 and "dtypes.params" in types[6]
    assert [rank for rank, _ in found] == sorted(rank for rank, _ in found)
    keys = {key for rank, o in found if rank == 0 for key in o}
    assert keys >= {"mesh.tensor", "remat.policy", "loss.chunk"}
    few = [dict(o) for _, o in search_space.fitting_space(run, FOUR, search_space.training_check(FOUR))]
    assert few and all("dtypes.m" in o for o in few), "where the state alone is too big, nothing is listed"


# ---- the order by formula


def test_ten_are_shown_that_may_fit_best_first():
    found = search.rank(load(), "made", H200, "speed", search_space.training_check(H200), RATES)
    assert len(found.shown) == search.SHOWN and found.best is found.shown[0] and found.too_big > 0
    assert all(c.bound.memory_gib <= found.usable_gib for c in found.candidates)
    assert found.shown[0].bound.step_s < 1.05 * min(c.bound.step_s for c in found.candidates)
    assert printed(lambda console: search_page.show_ranked(found, console)).count("fsdp") >= search.SHOWN
    # The config itself is a candidate, once.
    assert [c.changes for c in found.candidates].count(()) == 1


# ---- compiled


def test_search_finds_the_best_and_ends_when_no_formula_is_below_it(inline):
    run = load(*SMALL)
    result = find(run, most=1000)
    exhaustive = [plan for r in layouts(*SMALL, machine=FOUR) if (plan := above(r, FOUR)).fits]
    fastest = min(plan.time.step_ms for plan in exhaustive)
    assert min(c.plan.time.step_ms for c in result.tried if c.fits) == fastest
    assert result.ended == "complete" and result.best and result.best.fits
    assert result.best.plan.time.step_ms <= (1 + search.ERROR) * fastest
    assert all(c.verdict and c.reason for c in result.tried)
    some = find(run, most=2)
    assert len(some.tried) == 2 and some.ended == "most" and some.best.fits


def test_a_deadline_ends_only_what_is_not_done(inline, monkeypatch):
    for requests, ended in ((1, contextlib.nullcontext()), (2, pytest.raises(TimeoutError))):
        clock = MagicMock()
        clock.monotonic.return_value = 0.0
        monkeypatch.setattr(search_parallel, "time", clock)
        todo, done = iter(enumerate([Request(load(*SMALL), FOUR, "made")] * requests)), []
        with ended:
            for n, _ in search_parallel.plan_each(
                lambda todo=todo: next(todo, None), deadline=1.0, plan_one="made_plans:above"
            ):
                done.append(n)
                clock.monotonic.return_value = 2.0  # the caller takes long to process the outcome
        assert done == [0]


def test_layouts_within_the_error_are_equal_and_the_least_on_links_comes_first():
    """Equal layouts are ordered by communication time, then by number of axes, then by step time. 5.1% slower is not equal."""
    found = search.rank(tiny(), "made", TWO, "speed", search_space.training_check(TWO), RATES)
    figures = ((1.0, 100.0, 0.4, 1), (1.04, 120.0, 0.2, 1), (1.02, 120.0, 0.2, 2), (1.045, 120.0, 0.2, 1))
    for step, gib, links, axes in (*figures, (1.051, 30.0, 0.1, 1), (0.5, 900.0, 0.1, 1)):
        plan = made(tiny(), FOUR, step, gib)
        plan = dataclasses.replace(plan, mesh={"data": 2, "fsdp": 2} if axes == 2 else {"fsdp": 4})
        plan = dataclasses.replace(plan, time=dataclasses.replace(plan.time, communication_ms=links * 1e3))
        c = search.Candidate(tiny(), bound(tiny(), FOUR, RATES), ("a=b",), outcome=search_parallel.Outcome(plan, "planned"))
        found.tried.append(c)
    search._judge(found)
    steps = [round(c.plan.time.step_ms / 1e3, 3) for c in found.tried if c.plan]
    assert steps == [1.04, 1.045, 1.02, 1.0, 1.051, 0.5]
    assert [c.verdict for c in found.tried] == ["best", *["equal"] * 3, "slower", "too big"]


def test_plans_that_the_api_found_show_themselves(inline, monkeypatch, tmp_path):
    monkeypatch.setattr(search, "search", functools.partial(search.search, plan_one="made_plans:above"))
    monkeypatch.setattr("jaxtrain.plan.FOLDER", str(tmp_path))
    best = jaxtrain.search(load(*SMALL), FOUR.name).best
    assert best and best.plan and "on h200:4" in repr(best.plan) and "&lt;!doctype html&gt;" in best.plan._repr_html_()
    assert best.plan.to_pandas("memory")["gib"].sum() == best.plan.memory.peak_gib


def test_report_and_json(inline):
    heard = []
    result = find(most=4, on_ranked=lambda found: heard.append(len(found.tried)))
    assert heard == [0]  # the order by formula comes before any plan
    tree, line = json.loads(json.dumps(search_page.to_json(result))), search_page.paste(result.best)
    assert tree["compiled"] and tree["paste"] == line and len(tree["tried"]) == 4
    assert len(tree["formula"]) == search.SHOWN and tree["tried"][0]["verdict"] == "best"
    # The line, appended to the command, gives the best layout.
    pasted = load(*SMALL, *(o.removeprefix("--config.") for o in line.split()))
    assert bound(pasted, FOUR, RATES) == result.best.bound


@pytest.mark.parametrize("how", ["budget", "interrupted"])
def test_an_early_end_leaves_the_best_by_formula(inline, monkeypatch, how):
    if how == "interrupted":
        monkeypatch.setattr(search_parallel, "_wait", MagicMock(side_effect=KeyboardInterrupt))
    else:
        monkeypatch.setattr(search.time, "monotonic", MagicMock(side_effect=itertools.count(0.0, 10.0)))
    result = find(budget_s=1.0 if how == "budget" else 0.0)  # no budget, so that the real clock does not end the search
    assert result.ended == how and not result.tried and result.best and not result.best.fits
    assert not search_page.to_json(result)["compiled"]


# ---- Settings that make a config fit


def test_what_costs_only_time_comes_first_and_one_change_before_two(inline):
    """The run is of Llama 3 8B, with 8 sequences of 8192 tokens a GPU in a microbatch, and no recompute."""
    run = load("remat.policy=none", "remat.tensors=", "train.grad_accum=4", "loss.chunk=512")

    def fit(**options) -> search.SearchResult:
        return search.search(run, "made", H200, "fit", plan_one="made_plans:above", jobs=1, **options)

    result = fit()
    assert result.ended == "found" and result.best.fits and result.best.rank == 0
    assert len(result.tried) == 1 and {c.partition("=")[0] for c in result.best.changes} == {"train.grad_accum"}
    assert search_page.hints(result)[0].startswith(result.best.changes[0])
    # A plan far above its formula makes the search careful.
    own = made(run, H200, 1.0, 3 * bound(run, H200, RATES).memory_gib)
    assert fit(own=own).best.bound.likely_gib < result.best.bound.likely_gib
    # A setting that training refuses is not planned.
    legal, accum = search_space.training_check(H200), result.best.run.train.grad_accum
    refusal = [Problem("train.grad_accum", accum, "no", "")]
    inline.clear()
    found = fit(check=lambda r: refusal if r.train.grad_accum == accum else legal(r))
    assert found.best.fits and all(r.train.grad_accum != accum for r in inline)


# ---- Layouts that cannot fit, by formula


def test_what_cannot_fit_is_refused_with_the_next_larger_machine():
    run, where = load(file="configs/llama3_405b.py"), topology.parse("h200:8")
    why = search.refuse(run, where)
    assert why and why.least_gib > why.usable_gib and why.fix is None
    there, c = why.larger
    assert there.name == "h200:8x16" and not search_space.training_check(there)(c.run)
    assert "--topology=h200:8x16" in printed(lambda console: search_page.show_refusal(why, "made", (), where, console))


def test_a_config_that_a_change_makes_fit_is_refused_with_the_change():
    run = load("dtypes.m=f32", "dtypes.v=f32", "train.global_batch=128", "train.grad_accum=1", *FULL, file=FILE_70B)
    why = search.refuse(run, H200)
    assert why and why.fix and why.fix.bound.likely_gib <= why.usable_gib


def test_a_larger_machine_keeps_the_batch_where_it_divides():
    grown = search.larger_machine(load(*FULL, file=FILE_70B), FOUR, RATES)
    assert grown and grown[0].name == "h200:8" and grown[1].run.train.global_batch == 8
    run = load("dtypes.m=f32", "dtypes.v=f32", "train.global_batch=24", "train.grad_accum=3", *FULL, file=FILE_70B)
    machine, c = search.larger_machine(run, H200, RATES)
    assert machine.name == "h200:8x2" and c.run.train.global_batch == 32


# ---- The need for each setting that saves memory


def test_every_saving_is_found():
    def of(*overrides, file=FILE_70B):
        run = load(*FULL, *overrides, file=file) if file == FILE_70B else load(*overrides, file=file)
        return {choice: dict(o) for choice, o in search.savings(run, search_space.training_check(H200)).items()}

    assert of().keys() == {"remat.policy=full", "dtypes.m=bf16", "dtypes.v=bf16"}
    assert of()["dtypes.m=bf16"] == {"dtypes.m": "f32"} and of()["remat.policy=full"]["remat.policy"] == "auto"
    more = of("loss.chunk=1024", "dtypes.grads=bf16", "mesh.tensor=2", "train.global_batch=16", "optimizer.offload=moments")
    assert more["loss.chunk=1024"] == {"loss.chunk": 2048} and "optimizer.offload=moments" in more
    assert more["mesh.tensor=2"] == {"mesh.fsdp": -1, "mesh.tensor": 1} and "dtypes.grads=bf16" in more
    eight = of(file="configs/llama3_8b.py")
    assert eight["remat.policy=auto"]["remat.policy"] == "none" and eight["train.grad_accum=32"] == {"train.grad_accum": 16}


# ---- Runs without a formula


@pytest.mark.parametrize("setting", ["lora.rank=8", "train.freeze=layers.mlp.*", "model.family=helpers:WiderFamily"])
@pytest.mark.parametrize("objective", ["speed", "fit"])
def test_a_run_without_a_formula_has_no_figures_before_a_compile(inline, monkeypatch, setting, objective):
    """Such a run has nothing in place of the formula's zeros, and no best setting that was not compiled."""
    run = tiny(setting)
    ranked = search.rank(run, "made", TWO, objective, search_space.training_check(TWO), RATES)
    assert ranked.no_formula and setting in ranked.no_formula and ranked.best is None
    tree = json.loads(json.dumps(search_page.to_json(ranked)))
    assert tree["no_formula"] and tree["formula"] == [] and tree["too_big"] is None and tree["best"] is None
    shown = printed(lambda console: search_page.show_ranked(ranked, console))
    assert setting in shown and "formula ms" not in shown and "GiB" not in shown
    assert search_page.hints(ranked) == ("no setting was found that fits",)

    plans = {"made_plans:above": lambda r, machine, rates=None: made(r, machine, 1.0 + len(inline), 10.0)}
    monkeypatch.setattr(search_parallel.pkgutil, "resolve_name", plans.get, raising=False)
    found = search.search(run, "made", TWO, objective, plan_one="made_plans:above", most=3, jobs=1)
    assert found.best and found.best.fits
    assert all(c["formula"] is None and c["taken_gib"] == 10.0 for c in search_page.to_json(found)["tried"])


def test_a_run_with_a_formula_says_nothing_of_its_lack():
    ranked = search.rank(tiny(), "made", TWO, "speed", search_space.training_check(TWO), RATES)
    tree = search_page.to_json(ranked)
    assert tree["no_formula"] == "" and tree["formula"][0]["formula"]["step_ms"] > 0 and tree["too_big"] >= 0


# ---- Searches in which settings fail


def of_outcomes(monkeypatch, *outcomes: search_parallel.Outcome) -> search.SearchResult:
    """Return the search that has these outcomes, one after the other."""

    def plan_each(following, **_):
        for outcome in outcomes:
            yield following()[0], outcome

    monkeypatch.setattr(search, "plan_each", plan_each)
    return search.search(
        tiny("train.freeze=layers.mlp.*"), "made", TWO, check=search_space.training_check(TWO), most=len(outcomes)
    )


def refused(key: str) -> search_parallel.Outcome:
    problem = Problem(key, "x", "is wrong", "Mend it.")
    return search_parallel.Outcome(None, "refused", str(problem), (problem,))


def test_a_refusal_of_every_setting_ends_the_search(monkeypatch):
    """Of a key that the search does not change, in the first outcome: more compiles would tell the same."""
    for key in ("train.freeze", "model.family"):
        with pytest.raises(ConfigError) as caught:
            of_outcomes(monkeypatch, refused(key))
        assert [p.key for p in caught.value.problems] == [key]
    planned = search_parallel.Outcome(made(tiny(), TWO, 1.0, 1.0), "planned")
    assert of_outcomes(monkeypatch, planned, refused("train.freeze")).best
    assert of_outcomes(monkeypatch, refused("sharding.gather"), planned).best, "another layout may do"


def test_failed_settings_are_no_compiled_ones_and_each_reason_is_told_once(monkeypatch):
    failed = [refused("sharding.gather"), refused("sharding.gather"), search_parallel.Outcome(None, "failed", "another")]
    planned = search_parallel.Outcome(made(tiny(), TWO, 1.0, 1.0), "planned")
    for outcomes in (failed, [*failed, planned]):
        found = of_outcomes(monkeypatch, *outcomes)
        told = printed(lambda console, found=found: show_search(console, found))
        assert f"{len(outcomes) - 3} compiled, 3 failed" in told
        assert told.count("is wrong") == told.count("another") == 1
        assert outcomes is not failed or "fit" not in told


def show_search(console: Console, found: search.SearchResult) -> None:
    """Print a search as the command does: each outcome when it comes, and then all."""
    with search_page.watch(console) as progress:
        progress(found)
    search_page.show(found, console)
