"""The layout search with made-up plans: its space, its order, its limits, and layouts that cannot fit by formula."""

import contextlib
import dataclasses
import json
import pickle
from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
from made_plans import H200, RATES, above, load, made, plan_inline, tiny
from rich.console import Console

from jaxtrain.config import Problem, RunConfig
from jaxtrain.plan import topology
from jaxtrain.plan.report import search_report
from jaxtrain.plan.search import cache, parallel, search, space
from jaxtrain.plan.search.bound import bound
from jaxtrain.plan.search.cache import Request

TWO, FOUR = topology.parse("h200:2"), topology.parse("h200:4")
SMALL = ("train.global_batch=16", "train.grad_accum=4")
FILE_70B = "configs/llama3_70b.py"
FULL = ("remat.policy=full", "remat.tensors=")


@pytest.fixture
def inline(monkeypatch) -> list[RunConfig]:
    """Plan in this process, and return the list of planned runs."""
    return plan_inline(monkeypatch)


def find(run: RunConfig | None = None, plan_one: str = "made_plans:above", machine: topology.Topology = FOUR, **options):
    return search.search(run or load(*SMALL), "made", machine, plan_one=plan_one, **options)


def printed(show: Callable[[Console], object]) -> str:
    console = Console(record=True, width=200)
    show(console)
    return console.export_text()


def layouts(*overrides: str, machine: topology.Topology = H200, file: str = "configs/llama3_8b.py") -> list[RunConfig]:
    """Return the runs of `space.fastest_space`, without the config itself."""
    run = load(*overrides, file=file)
    return [space.with_overrides(run, o) for o in space.fastest_space(run, machine, space.training_check(machine)) if o]


# ---- the space


def test_space_is_what_the_checks_accept():
    found = layouts()
    assert len(found) == len(set(found))
    meshes = {(r.mesh.data, r.mesh.fsdp, r.mesh.tensor) for r in found}
    assert meshes == {(d, f, 8 // d // f) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if 8 % (d * f) == 0}
    check = space.training_check(H200)
    assert not any(check(r) for r in found)
    assert {r.mesh.tensor for r in layouts("model.num_kv_heads=4", "model.num_heads=4", "model.head_dim=128")} == {1, 2, 4}


def test_each_zero_stage_is_tried_where_weights_are_sharded():
    held = {(r.mesh.fsdp > 1, r.sharding.zero, r.sharding.gather) for r in layouts(*SMALL, machine=FOUR)}
    every = {(3, "layer"), (3, "forward"), (3, "step"), (2, "layer")}
    assert held == {(False, 3, "layer"), *((True, *stage) for stage in every)}


def test_remat_is_the_configs_own_and_what_fits():
    assert {r.remat.policy for r in layouts()} == {"auto"}
    assert {r.remat.policy for r in layouts(file=FILE_70B)} == {"auto", "custom"}


def test_sequences_are_sharded_where_they_are_long_or_few():
    def of(*overrides):
        return {(r.mesh.seq, r.parallel.context) for r in layouts(*overrides)}

    methods = {(seq, method) for seq in (2, 4, 8) for method in ("ring", "ulysses", "gather")}
    assert of("train.global_batch=16", "train.grad_accum=1") == {(1, "ring")}
    assert of("data.seq_len=131072", "train.global_batch=16", "train.grad_accum=1") == {(1, "ring"), *methods}
    # Two sequences on 8 GPUs: with tensor groups of 4 or 8 the sequences need no sharding.
    assert of("train.global_batch=2", "train.grad_accum=1") == {(1, "ring"), *methods}


def test_stages_are_tried_over_nodes_and_experts_where_there_are_some():
    def of(machine, *overrides, file="configs/llama3_8b.py"):
        found = [dict(mesh) for mesh in space.meshes(load(*overrides, file=file), machine)]
        keys = ("mesh.stage", "pipeline.schedule", "pipeline.groups", "mesh.expert")
        return {tuple(mesh[key] for key in keys) for mesh in found}

    nodes = topology.parse("h200:8x4")
    assert of(H200) == {(1, "1f1b", 1, 1)}, "a dense model on one node has neither"
    piped = {(stage, *how, 1) for stage in (2, 4) for how in (("1f1b", 1), ("interleaved", 2))}
    assert of(nodes) == {(1, "1f1b", 1, 1), *piped}
    asked = of(H200, "mesh.stage=2", "mesh.fsdp=4", "pipeline.schedule=gpipe")
    assert {(stage, schedule) for stage, schedule, *_ in asked} >= {(1, "gpipe"), (2, "gpipe"), (8, "1f1b"), (8, "interleaved")}
    assert {expert for *_, expert in of(H200, file="configs/mixtral_8x7b.py")} == {1, 2, 4, 8}
    # With fewer microbatches than stages, stages are idle most of the time.
    found = layouts("train.global_batch=256", "train.grad_accum=8", machine=nodes)
    assert {r.mesh.stage for r in found} == {1, 2, 4} and all(r.mesh.stage <= r.train.grad_accum for r in found)


def test_what_fits_rounds_more_of_the_state_at_each_rank():
    """Rank 0 of `fitting_space` changes no dtype of the state. The dtype of the weights changes last."""
    run = load(*FULL, "dtypes.m=f32", "dtypes.v=f32", file=FILE_70B)
    found = [(rank, dict(o)) for rank, o in space.fitting_space(run, H200, space.training_check(H200))]
    types = {rank: {key for r, o in found if r == rank for key in o if key.startswith("dtypes.")} for rank, _ in found}
    assert types[0] == set() and types[1] == {"dtypes.m"} and types[2] == {"dtypes.v"}
    assert max(types) == 6 and "dtypes.params" in types[6]
    assert [rank for rank, _ in found] == sorted(rank for rank, _ in found)
    keys = {key for rank, o in found if rank == 0 for key in o}
    assert keys >= {"mesh.tensor", "remat.policy", "loss.chunk"}
    small = topology.parse("h200:4")
    few = [dict(o) for _, o in space.fitting_space(run, small, space.training_check(small))]
    assert few and all("dtypes.m" in o for o in few), "where the state alone is too big, nothing is listed"


# ---- the order by formula


def ranked(run: RunConfig, machine: topology.Topology, objective: search.Objective = "speed") -> search.SearchResult:
    return search.rank(run, "made", machine, objective, space.training_check(machine), RATES)


@pytest.mark.parametrize(("gpus", "machine"), [(64, "h200:8x8"), (1024, "h200:8x128")])
def test_70b_on_many_nodes_saves_more_than_on_one(gpus, machine):
    """On many nodes there is memory for activations that one node must recompute; the search puts remat.policy=auto first."""
    run = load(f"train.global_batch={max(256, gpus)}", f"train.grad_accum={max(256, gpus) // gpus}", file=FILE_70B)
    found = ranked(run, topology.parse(machine))
    assert found.best and found.best.changes == ("remat.policy=auto", "remat.tensors=")
    own = bound(run, topology.parse(machine), RATES)
    assert found.best.bound.step_s < 0.9 * own.step_s


def test_ten_are_shown_that_may_fit_best_first():
    found = ranked(load(), H200)
    assert len(found.shown) == search.SHOWN and found.best is found.shown[0] and found.too_big > 0
    assert all(c.bound.memory_gib <= found.usable_gib for c in found.candidates)
    assert found.shown[0].bound.step_s < 1.05 * min(c.bound.step_s for c in found.candidates)
    text = printed(lambda console: search_report.show_ranked(found, console))
    assert "The best 10 by formula, not compiled" in text and "the config's own" in text


def test_the_config_itself_is_one_of_them():
    """The config is a candidate, once, also if one of its axes is -1."""
    for overrides in (("mesh.fsdp=-1",), ("mesh.fsdp=8",)):
        assert [c.changes for c in ranked(load(*overrides), H200).candidates].count(()) == 1


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


@pytest.mark.parametrize(("requests", "ends"), [(1, "complete"), (2, "at the deadline")])
def test_a_deadline_ends_only_what_is_not_done(inline, monkeypatch, requests, ends):
    clock = MagicMock()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(parallel, "time", clock)
    todo, done = iter(enumerate([Request(load(*SMALL), FOUR, "made")] * requests)), []
    with contextlib.nullcontext() if ends == "complete" else pytest.raises(TimeoutError):
        for n, _ in parallel.plan_each(lambda: next(todo, None), deadline=1.0, plan_one="made_plans:above"):
            done.append(n)
            clock.monotonic.return_value = 2.0  # the caller takes long to process the outcome
    assert done == [0]


def test_layouts_within_the_error_are_equal_and_the_least_on_links_comes_first():
    """Equal layouts are ordered by communication time, then by number of axes, then by step time. 5.1% slower is not equal."""
    found = ranked(tiny(), FOUR)
    figures = ((1.0, 100.0, 0.4, 1), (1.04, 120.0, 0.2, 1), (1.02, 120.0, 0.2, 2), (1.045, 120.0, 0.2, 1))
    for step, gib, links, axes in (*figures, (1.051, 30.0, 0.1, 1), (0.5, 900.0, 0.1, 1)):
        plan = made(tiny(), FOUR, step, gib)
        plan = dataclasses.replace(plan, mesh={"data": 2, "fsdp": 2} if axes == 2 else {"fsdp": 4})
        plan = dataclasses.replace(plan, time=dataclasses.replace(plan.time, communication_ms=links * 1e3))
        c = search.Candidate(tiny(), bound(tiny(), FOUR, RATES), ("a=b",), outcome=parallel.Outcome(plan, "planned"))
        found.tried.append(c)
    search._judge(found)
    steps = [round(c.plan.time.step_ms / 1e3, 3) for c in found.tried if c.plan]
    assert steps == [1.04, 1.045, 1.02, 1.0, 1.051, 0.5]
    assert [c.verdict for c in found.tried] == ["best", *["equal"] * 3, "slower", "too big"]


def test_nothing_fits(inline):
    result = find(plan_one="made_plans:nothing_fits", machine=TWO, most=3)
    assert len(result.tried) == 3 and not any(c.fits for c in result.tried)
    text = printed(lambda console: search_report.show(result, console))
    assert "too big: by" in text and (result.best is None or "by formula, not compiled" in text)


def test_without_a_legal_layout_nothing_is_found(inline):
    # Neither sequences nor tokens divide over the GPUs.
    result = find(load("data.seq_len=8191", "train.global_batch=7", "train.grad_accum=1"), machine=H200)
    assert result.best is None and "no setting is legal" in printed(lambda console: search_report.show(result, console))


def test_report_and_json(inline):
    heard = []
    result = find(most=4, on_ranked=lambda found: heard.append(len(found.tried)))
    assert heard == [0], "the order by formula comes before any plan"
    text, tree = (
        printed(lambda console: search_report.show(result, console)),
        json.loads(json.dumps(search_report.to_json(result))),
    )
    line = search_report.paste(result.best)
    assert "(compiled)" in text and json.dumps(tree) and tree["compiled"] and tree["paste"] == line and len(tree["tried"]) == 4
    assert len(tree["formula"]) == search.SHOWN and tree["tried"][0]["verdict"] == "best"
    # The line, appended to the command, gives the best layout. A search from there finds the config's own layout.
    pasted = load(*SMALL, *(o.removeprefix("--config.") for o in line.split()))
    assert bound(pasted, FOUR, RATES) == result.best.bound
    again = find(pasted, most=4)
    assert () in [c.changes for c in again.tried]
    if again.best.changes == ():
        assert "is the config's own" in printed(lambda console: search_report.show(again, console))


@pytest.mark.parametrize("how", ["budget", "interrupted"])
def test_an_early_end_leaves_the_best_by_formula(inline, monkeypatch, how):
    def press(running):
        raise KeyboardInterrupt

    if how == "interrupted":
        monkeypatch.setattr(parallel, "_wait", press)
    else:
        clock = iter(range(0, 100_000, 10))
        monkeypatch.setattr(search.time, "monotonic", lambda: float(next(clock)))
    result = find(budget_s=1.0 if how == "budget" else 0.0)  # no budget, so that the real clock does not end the search
    assert result.ended == how and not result.tried and result.best and not result.best.fits
    text = printed(lambda console: search_report.show(result, console))
    assert "(by formula, not compiled)" in text
    assert not result.best.changes or search_report.paste(result.best) in text


def test_ctrl_c_reports_the_plans_so_far(inline, monkeypatch):
    calls = []

    def press(running):
        calls.append(running)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return wait(running)

    wait = parallel._wait
    monkeypatch.setattr(parallel, "_wait", press)
    result = find()
    assert result.ended == "interrupted" and len(result.tried) == 1 and result.best and result.best.fits


def test_a_machine_without_a_description_is_refused():
    here = dataclasses.replace(H200, chip="NVIDIA Something")
    with pytest.raises(topology.TopologyError):
        search.search(load(), "made", here)


# ---- Settings that make a config fit


def everything_saved() -> RunConfig:
    """Return a run of Llama 3 8B that does not fit: 8 sequences of 8192 tokens a GPU in a microbatch, and no recompute."""
    return load("remat.policy=none", "remat.tensors=", "train.grad_accum=4", "loss.chunk=512")


def fit(run: RunConfig, plan_one: str = "made_plans:above", machine: topology.Topology = H200, **options):
    """Search for settings that make a run fit, from a plan of it that does not."""
    return search.search(run, "made", machine, "fit", plan_one=plan_one, jobs=1, **options)


def test_what_costs_only_time_comes_first_and_one_change_before_two(inline):
    run = everything_saved()
    result = fit(run)
    assert result.ended == "found" and result.best.fits and result.best.rank == 0
    assert len(result.tried) == 1 and {c.partition("=")[0] for c in result.best.changes} == {"train.grad_accum"}
    text = printed(lambda console: search_report.show(result, console))
    assert f"--config.{result.best.changes[0]}" in text and "this fits (compiled)" in text
    assert search_report.hints(result)[0].startswith(result.best.changes[0])


def test_a_plan_far_above_its_formula_makes_the_search_careful(inline):
    run = everything_saved()
    own = made(run, H200, 1.0, 3 * bound(run, H200, RATES).memory_gib)
    first, careful = fit(run).best, fit(run, own=own).best
    assert careful.bound.likely_gib < first.bound.likely_gib


def test_storage_types_come_after_all_that_costs_only_time(inline):
    """Llama 3 70B exceeds the memory even with full recompute, so the best change also stores the first moment in bf16."""
    run = load(*FULL, "dtypes.m=f32", "dtypes.v=f32", "train.memory_fraction=0.85", file=FILE_70B)
    result = fit(run)
    assert result.best.rank == 1 and "dtypes.m=bf16" in result.best.changes
    assert "the first moment is rounded" in printed(lambda console: search_report.show(result, console))


def test_settings_that_training_refuses_are_not_planned(inline):
    legal = space.training_check(H200)
    accum = int(fit(everything_saved()).best.changes[0].partition("=")[2])

    def check(r: RunConfig) -> list[Problem]:
        return [*legal(r), *([Problem("train.grad_accum", accum, "no", "")] if r.train.grad_accum == accum else [])]

    inline.clear()
    result = fit(everything_saved(), check=check)
    assert result.best.fits and all(r.train.grad_accum != accum for r in inline)


def test_nothing_is_found_that_fits(inline):
    result = fit(load(*FULL, "train.global_batch=32", file=FILE_70B), plan_one="made_plans:nothing_fits")
    assert len(result.tried) == search.MOST_FOR_FIT and result.ended == "most"
    assert not any(c.fits for c in result.tried)


# ---- Layouts that cannot fit, by formula


@pytest.mark.parametrize(
    ("file", "machine", "larger"), [("llama3_405b", "h200:8", "h200:8x16"), ("llama3_70b", "h100:1", "h100:8x2")]
)
def test_what_cannot_fit_is_refused_with_the_next_larger_machine(file, machine, larger):
    run, where = load(file=f"configs/{file}.py"), topology.parse(machine)
    why = search.refuse(run, where)
    assert why and why.least_gib > why.usable_gib and why.fix is None
    there, c = why.larger
    assert there.name == larger and not space.training_check(there)(c.run)
    text = printed(lambda console: search_report.show_refusal(why, "made", (), where, console))
    assert text.startswith("does not fit") and f"--topology={larger}" in text and "MFU" not in text


def test_a_config_that_a_change_makes_fit_is_refused_with_the_change():
    run = load("dtypes.m=f32", "dtypes.v=f32", "train.global_batch=128", "train.grad_accum=1", *FULL, file=FILE_70B)
    why = search.refuse(run, H200)
    assert why and why.fix and why.fix.bound.likely_gib <= why.usable_gib
    lines = printed(lambda console: search_report.show_refusal(why, "made", ("dtypes.m=f32",), H200, console))
    assert all(f"--config.{change}" in lines for change in why.fix.changes)


@pytest.mark.parametrize("file", ["llama3_8b", "llama3_70b", "llama3_1b", "llama2_7b", "mixtral_8x7b", "qwen3_30b_a3b"])
def test_what_fits_is_not_refused(file):
    assert search.refuse(load(file=f"configs/{file}.py"), H200) is None


def test_moments_in_host_memory_are_not_counted():
    run = load("dtypes.m=f32", "dtypes.v=f32", "optimizer.offload=moments", *FULL, file=FILE_70B)
    assert search.refuse(run, H200) is None
    # No mesh is legal here, which is another mistake: the weights alone would fit.
    illegal = space.with_overrides(run, (("mesh.fsdp", 8),))
    assert search.refuse(illegal, FOUR) is None


def test_a_family_of_ones_own_is_not_refused():
    assert search.refuse(load("model.family=helpers:WiderFamily"), H200) is None


def test_a_larger_machine_keeps_the_batch_where_it_divides():
    grown = search.larger_machine(load(*FULL, file=FILE_70B), FOUR, RATES)
    assert grown and grown[0].name == "h200:8" and grown[1].run.train.global_batch == 8
    run = load("dtypes.m=f32", "dtypes.v=f32", "train.global_batch=24", "train.grad_accum=3", *FULL, file=FILE_70B)
    machine, c = search.larger_machine(run, H200, RATES)
    assert machine.name == "h200:8x2" and c.run.train.global_batch == 32, "and is never smaller"


# ---- The need for each setting that saves memory


def test_every_saving_is_found():
    def of(*overrides, file=FILE_70B):
        run = load(*FULL, *overrides, file=file) if file == FILE_70B else load(*overrides, file=file)
        return {choice: dict(o) for choice, o in search.savings(run, space.training_check(H200)).items()}

    assert of().keys() == {"remat.policy=full", "dtypes.m=bf16", "dtypes.v=bf16"}
    assert of()["dtypes.m=bf16"] == {"dtypes.m": "f32"} and of()["remat.policy=full"]["remat.policy"] == "auto"
    more = of("loss.chunk=1024", "dtypes.grads=bf16", "mesh.tensor=2", "train.global_batch=16", "optimizer.offload=moments")
    assert more["loss.chunk=1024"] == {"loss.chunk": 2048} and "optimizer.offload=moments" in more
    assert more["mesh.tensor=2"] == {"mesh.fsdp": -1, "mesh.tensor": 1} and "dtypes.grads=bf16" in more
    eight = of(file="configs/llama3_8b.py")
    assert eight["remat.policy=auto"]["remat.policy"] == "none" and eight["train.grad_accum=32"] == {"train.grad_accum": 16}


def test_what_a_saving_is_needed_for_is_printed():
    run = load(*FULL, file=FILE_70B)
    plan, found = made(run, H200, 1.0, 100.0), search.savings(run, space.training_check(H200))
    plans = [made(run, H200, 0.9, 150.0), made(run, H200, 1.02, 132.0)]
    outcomes = {choice: parallel.Outcome(p, "planned") for choice, p in zip(found, plans, strict=False)}
    text = printed(lambda console: search_report.show_savings(plan, found, outcomes, run, console))
    assert "remat.policy=auto instead, 150.0 GiB, does not fit" in text
    assert "dtypes.m=f32 instead, 1,020 ms, 132.0 GiB, 2.0% slower: not needed for memory" in text and "not compiled" in text
    assert "no setting of the config" in printed(lambda c: search_report.show_savings(plan, {}, {}, run, c))


def test_progress_is_printed_line_by_line(inline):
    console = Console(record=True, width=160)
    with search_report.watch(console) as progress:
        find(most=3, on_progress=progress)
    lines = console.export_text().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["compiled 1", "compiled 2", "compiled 3"]


def test_a_setting_that_could_not_be_compiled_is_not_the_best(inline):
    found = find(plan_one="made_plans:crashes", most=2)
    assert found.tried and all(c.verdict == "failed" for c in found.tried)
    assert found.best is None or found.best not in found.tried


def test_a_process_plans_where_proc_cannot_be_written(monkeypatch, tmp_path):
    def refuse(path, text):
        raise PermissionError(path)

    monkeypatch.setattr(parallel.Path, "write_text", refuse)
    (tmp_path / "request").write_bytes(pickle.dumps((cache.Request(load(), H200, "made"), "made_plans:above")))
    parallel.work(str(tmp_path))
    outcome = pickle.loads((tmp_path / "outcome").read_bytes())
    assert outcome.kind == "planned" and outcome.plan == dataclasses.replace(above(load(), H200), config="made")
