"""What makes a config fit, and what its choices are good for: the order of the knobs, their limits, what is said of them."""

import dataclasses
from collections.abc import Callable

import pytest
from made_plans import H200, RATES, flat, load, made
from rich.console import Console

from jaxtrain.config import Problem, RunConfig
from jaxtrain.plan import topology
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.report import fit_report
from jaxtrain.plan.result import Plan, Rates
from jaxtrain.plan.search import fit, knobs, space
from jaxtrain.plan.search.parallel import Outcome, Request

FILE_70B = "configs/llama3_70b.py"
FULL = ("remat.policy=full", "remat.tensors=")
USABLE = 133.8  # GiB of an H200


def seventy(*overrides: str) -> RunConfig:
    """70B that keeps nothing but the input of each layer."""
    return load(*FULL, *overrides, file=FILE_70B)


def everything_kept() -> RunConfig:
    """8B that does not fit: 8 sequences of 8192 tokens a GPU at a time, and nothing is computed again."""
    return load("remat.policy=none", "remat.tensors=", "train.grad_accum=4", "loss.chunk=256")


def likely(run: RunConfig, machine: topology.Topology, rates: Rates | None = None) -> Plan:
    """What 70B came out at: a sixth above the formula besides its state; much more without checkpoints."""
    c = knobs.candidate(run, (), machine, rates or rates_for(machine.gpu, run.precision))
    above = 1.16 if run.remat.policy != "none" else 1.6
    return made(run, machine, c.least_s * 1.1, c.state_gib + c.rest_gib * above, rates)


class Planned:
    """In place of plan_many: what was asked for, in order, and how it was asked; `by` makes the outcomes."""

    def __init__(self, by: Callable[[RunConfig, topology.Topology, Rates | None], Plan | Outcome]):
        self.by, self.requests, self.batches = by, [], []

    def __call__(self, requests: dict[str, Request], *, on_done, **options) -> None:
        self.batches.append((len(requests), options))
        for label, r in requests.items():
            self.requests.append(r)
            found = self.by(r.run, r.topology, r.rates)
            on_done(label, found if isinstance(found, Outcome) else Outcome(found, "planned"))

    @property
    def runs(self) -> list[RunConfig]:
        return [r.run for r in self.requests]


@pytest.fixture
def planned(monkeypatch):
    """`planned(by)`: plans are made by a function from here on."""

    def put(by=likely) -> Planned:
        fake = Planned(by)
        monkeypatch.setattr(fit, "plan_many", fake)
        return fake

    return put


def advise(run: RunConfig, plan: Plan | None = None, machine: topology.Topology = H200, **options) -> tuple[fit.Advice, ...]:
    plan = plan or likely(run, machine)
    return fit.advise(run, plan, machine, check=space.training_check(machine), jobs=2, **options)


def why(run: RunConfig, plan: Plan | None = None, machine: topology.Topology = H200, **options) -> tuple[fit.Reason, ...]:
    return fit.why(run, plan or likely(run, machine), machine, check=space.training_check(machine), **options)


def size_of(gib: float, step_s: float = 1.0):
    return lambda run, machine, rates: made(run, machine, step_s, gib, rates)


def turned(base: RunConfig, run: RunConfig) -> set[str]:
    """Keys that differ."""
    return {key for key, value in flat(run).items() if value != flat(base)[key]}


# ---- a plan that does not fit


def test_one_cheap_knob_is_found_first(planned):
    """8 sequences of 8192 tokens a GPU, everything kept: smaller microbatches cost next to nothing."""
    fake, run = planned(), everything_kept()
    assert advise(seventy()) == () and not fake.requests, "a plan that fits needs no advice"
    found = advise(run)
    # Both are as fast, and the first leaves more room.
    assert [a.changes for a in found if a.fits] == [("train.grad_accum=32",), ("train.grad_accum=16",)]
    assert found[0].text.startswith("train.grad_accum=32: ") and found[0].text.endswith(" a step (compiled)")
    assert all(turned(run, r) == {"train.grad_accum"} for r in fake.runs)
    assert found[0].plan and found[0].plan.memory.peak_gib < USABLE


def test_storage_types_come_after_all_that_costs_only_time(planned):
    """State, gradients and inputs of 70B with float32 moments are too much, whatever is computed again."""
    fake, run = planned(), seventy("dtypes.m=f32", "dtypes.v=f32")
    found = advise(run)
    changed = [turned(run, r) & {f"dtypes.{name}" for name in ("params", "m", "v", "grads")} for r in fake.runs]
    assert max(map(len, changed)) == 1 and [len(c) for c in changed] == sorted(len(c) for c in changed)
    assert found[0].changes == ("dtypes.m=bf16",) and "first moment is rounded" in found[0].text
    assert found[1].changes == ("dtypes.v=bf16",) and "second moment is rounded" in found[1].text
    # With one microbatch, no gradients are summed.
    assert not any(r.dtypes.grads == "bf16" for r in fake.runs)


def only_types(run: RunConfig) -> space.Check:
    """Nothing but storage types may change."""

    def check(r: RunConfig) -> list[Problem]:
        others = sorted(key for key in turned(run, r) if not key.startswith("dtypes."))
        return [Problem(key, flat(r)[key], "must stay", "Leave it.") for key in others]

    return check


def test_of_summed_gradients_and_moments_the_moments_go_first(planned):
    sizes = ("model.num_layers=60", "train.global_batch=32", "train.grad_accum=4")
    run = seventy("dtypes.m=f32", "dtypes.v=f32", *sizes)
    first = knobs.candidate(run, (), H200, RATES)
    above = (USABLE + 1 - first.state_gib) / first.rest_gib

    def by(r, machine, rates):
        c = knobs.candidate(r, (), machine, rates or rates_for(machine.gpu, "bf16"))
        return made(r, machine, 1.0, c.state_gib + above * c.rest_gib, rates)

    fake = planned(by)
    found = fit.advise(run, by(run, H200, None), H200, check=only_types(run), jobs=1)
    assert found[0].changes == ("dtypes.m=bf16",) and [turned(run, r) for r in fake.runs] == [{"dtypes.m"}]
    assert "4 additions" in fit._loses(run, "dtypes.grads")


def test_weights_change_their_type_last_and_it_is_said_what_that_costs(planned):
    run = seventy()
    fake = planned(lambda r, machine, rates: made(r, machine, 1.0, 130.0 if r.dtypes.params == "bf16" else 134.0, rates))
    found = fit.advise(run, made(run, H200, 1.0, 134.0), H200, check=only_types(run))
    assert "dtypes.params=bf16" in found[0].changes and "rounded to 8 bits each step, up or down by chance" in found[0].text
    assert [turned(run, r) for r in fake.runs] == [{"dtypes.params"}]


def test_what_cannot_fit_by_its_formula_is_not_compiled(planned):
    fake, run = planned(), seventy()
    found = advise(run, machine=topology.parse("h200:4"))
    assert not fake.requests and "formulas alone" in found[0].text and found[0].fits is None
    run = seventy("remat.policy=none", "train.global_batch=32", "dtypes.m=f32")
    advise(run)
    assert fake.requests and all(knobs.candidate(r, (), H200, RATES).least_gib < USABLE for r in fake.runs)


def test_combinations_only_where_no_single_knob_does(planned):
    fake, run = planned(), seventy("remat.policy=none", "train.global_batch=32")
    found = advise(run)
    assert found[0].fits and any(c.startswith("train.grad_accum=") for c in found[0].changes)
    assert any(c.startswith("remat.policy=") for c in found[0].changes)
    assert len(fake.requests) <= fit.MOST


def test_the_fastest_that_fits_is_the_answer(planned):
    run = load("remat.policy=none", "remat.tensors=", "train.global_batch=64", "train.grad_accum=1", "loss.chunk=512")

    def by(r, machine, rates):
        return made(r, machine, 1.0 + 0.3 / r.train.grad_accum, 100.0, rates)

    fake = planned(by)
    found = advise(run, made(run, H200, 1.0, 340.0))
    fitting = [a for a in found if a.fits]
    steps = [a.plan.time.step_ms for a in fitting if a.plan]
    assert len(fitting) > 1 and steps == sorted(steps)
    assert steps[0] == min(by(r, H200, None).time.step_ms for r in fake.runs)
    assert "% longer than as it is" in fitting[0].text


def test_the_overrides_of_an_advice_give_its_plan(planned):
    own = ("remat.policy=none", "train.global_batch=32")
    fake, run = planned(), load(*own, file=FILE_70B)
    plan = dataclasses.replace(likely(run, H200), config=FILE_70B, overrides=own)
    found = advise(run, plan)
    pasted = load(*own, *found[0].changes, file=FILE_70B)
    assert any(pasted == r for r in fake.runs)
    # The plan says how it was asked for: without the own override that is replaced.
    request = next(r for r in fake.requests if r.run == pasted)
    assert request.name == FILE_70B and set(request.overrides) == {own[1], *found[0].changes}


def test_settings_that_training_refuses_are_not_planned(planned):
    run, refused = everything_kept(), []
    legal = space.training_check(H200)

    def check(r: RunConfig) -> list[Problem]:
        if r.train.grad_accum == 16:
            refused.append(r)
            return [Problem("train.grad_accum", 16, "not today", "Set another.")]
        return list(legal(r))

    fake = planned()
    found = fit.advise(run, likely(run, H200), H200, check=check, jobs=2)
    assert refused and fake.runs and not any(r.train.grad_accum == 16 for r in fake.runs)
    assert found[0].changes == ("train.grad_accum=32",)


def test_nothing_fits(planned):
    fake, run = planned(size_of(140.0)), seventy("remat.policy=none", "train.global_batch=32")
    plan = likely(run, H200)
    plan = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, arguments_gib=65.7))
    found = advise(run, plan)
    assert 0 < len(fake.requests) <= fit.MOST and not any(a.fits for a in found)
    assert found[0].fits is False and "nothing was found that fits" in found[0].text and "140.0 GiB" in found[0].text
    # 70.6 B parameters at 8 bytes over 133.8 GiB.
    assert "take 65.7 GiB" in found[1].text and "fills 4 GPUs" in found[1].text


def test_more_gpus_are_the_last_word(planned):
    planned()
    run = seventy("dtypes.m=f32", "dtypes.v=f32")
    last = advise(run)[-1]
    assert last.fits is None and last.text.startswith("16 GPUs, h200:8x2 with train.global_batch=16: about ")
    assert "not compiled" in last.text
    grown = seventy("dtypes.m=f32", "dtypes.v=f32", *last.changes)
    assert not space.training_check(topology.parse("h200:8x2"))(grown)
    assert dict(fit._spread(seventy("train.global_batch=24"), H200, 16))["train.global_batch"] == 32, "and never smaller"
    # A batch that divides stays what it is.
    run = load("train.grad_accum=2", "remat.policy=none", "remat.tensors=", "loss.chunk=256")
    assert advise(run)[-1].changes == ("mesh.data=1",)
    # 4 GPUs grow within their node.
    assert advise(seventy(), machine=topology.parse("h200:4"))[-1].text.startswith("8 GPUs, h200:8")


def test_failures_are_told(planned):
    planned(lambda run, machine, rates: Outcome(None, "crashed", "SIGSEGV, of all things"))
    found = advise(everything_kept())
    assert "no plan was made" in found[0].text
    assert sum("crashed: SIGSEGV, of all things" in a.text for a in found) == fit.MOST


def test_budget_ends_it(planned, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(fit.time, "monotonic", lambda: clock[0])

    def slow(run, machine, rates):
        clock[0] += 30
        return Outcome(None, "stopped", "spent") if clock[0] > 100 else made(run, machine, 1.0, 134.0, rates)

    fake = planned(slow)
    found = advise(seventy(), made(seventy(), H200, 1.0, 134.0), budget_s=100.0)
    assert len(fake.requests) == 4 and [options["budget_s"] for _, options in fake.batches] == [100.0, 40.0]
    assert "within 100 s" in found[0].text and not any("spent" in a.text for a in found)
    fake = planned()
    advise(everything_kept())
    assert fake.batches and all(options["budget_s"] == 0 for _, options in fake.batches), "without a budget there is none"


def test_ctrl_c_reports_what_there_is(planned):
    seen = []

    def by(run, machine, rates):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(run)
        return made(run, machine, 1.0, 134.0, rates)

    planned(by)
    found = advise(seventy(), made(seventy(), H200, 1.0, 134.0))
    assert "before it was interrupted" in found[0].text and found[0].plan


def test_a_family_of_ones_own_is_tried_knob_by_knob(planned):
    """Nothing is known of it by formula."""
    run = load("model.family=helpers:WiderFamily", "remat.policy=none", "remat.tensors=", "train.grad_accum=4")
    fake = planned(lambda r, machine, rates: made(r, machine, 1.0, 100.0 if r.train.grad_accum > 8 else 200.0, rates))
    found = advise(run, made(run, H200, 1.0, 200.0))
    assert found[0].changes == ("train.grad_accum=16",) and len(fake.requests) <= fit.MOST
    assert not any("GPUs" in a.text for a in found)


def test_a_machine_without_a_name_is_refused(planned):
    planned()
    here = dataclasses.replace(H200, chip="NVIDIA Something")
    with pytest.raises(topology.TopologyError):
        fit.advise(load(), made(load(), H200, 1.0, 200.0), here, check=lambda run: [])


# ---- expectations


def test_expectations_follow_the_plans():
    full = knobs.candidate(seventy(), (), H200, RATES)
    none = knobs.candidate(seventy("remat.policy=none"), (), H200, RATES)
    more = knobs.candidate(seventy("remat.every=2"), (), H200, RATES)
    expected = knobs.Expected()
    assert expected.of(full) == (
        pytest.approx(full.state_gib + full.rest_gib * knobs.MEMORY_GUESS),
        knobs.DOUBTS[2],
        pytest.approx(full.least_s * knobs.TIME_GUESS),
    )
    expected.learn(none, made(none.run, H200, none.least_s * 1.5, none.state_gib + 3 * none.rest_gib))
    assert expected.of(full)[1] == knobs.DOUBTS[2]  # a plan without checkpoints says nothing of one with them
    expected.learn(full, made(full.run, H200, full.least_s * 1.25, full.state_gib + 1.5 * full.rest_gib))
    assert expected.of(full) == (pytest.approx(full.state_gib + 1.5 * full.rest_gib), knobs.DOUBTS[0], full.least_s * 1.25)
    assert expected.of(more)[0] == pytest.approx(more.state_gib + 1.5 * more.rest_gib)
    assert expected.of(more)[1] == knobs.DOUBTS[1] and expected.of(none)[0] == pytest.approx(none.state_gib + 3 * none.rest_gib)


def test_state_by_hand():
    """70.55 B parameters over 8 GPUs: float32 weights, bfloat16 moments; the state is exact, as XLA counts it."""
    c = knobs.candidate(seventy(), (), H200, RATES)
    assert c.state_gib == pytest.approx(70_553_706_496 / 8 * 8 / 2**30)
    # The gradients of a microbatch are float32, which the bound does not count on.
    assert c.formula_gib - c.least_gib == pytest.approx(70_553_706_496 / 8 * 2 / 2**30)


def test_gradients_change_their_type_only_where_they_are_summed():
    run = seventy("train.global_batch=32", "train.grad_accum=1")
    groups = knobs.combinations(run, H200, RATES, space.training_check(H200))
    found = [c.run for group in groups for c in group]
    assert {r.train.grad_accum > 1 for r in found if r.dtypes.grads == "bf16"} == {True}
    assert {r.train.grad_accum > 1 for r in found if r.dtypes.params == "bf16"} == {True, False}


@pytest.mark.more
def test_combinations_are_legal_and_each_helps():
    run = everything_kept()
    check = space.training_check(H200)
    groups = [list(group) for group in knobs.combinations(run, H200, RATES, check)]
    assert len(groups) == 5  # none to three of the optimizer's types, then the weights'
    base = knobs.candidate(run, (), H200, RATES)
    single = [c for c in groups[0] if c.knobs == 1]
    assert single and all(c.formula_gib < base.formula_gib for c in single)
    assert {key for c in single for key in turned(run, c.run)} >= {"train.grad_accum", "remat.policy", "mesh.tensor"}
    assert not any(check(c.run) for c in groups[0][::97]) and not any(check(c.run) for c in groups[2][::997])
    assert len({c.run for c in groups[0]}) == len(groups[0]) and run not in {c.run for c in groups[0]}
    assert [c.overrides for c in groups[1] if not c.knobs] == [((f"dtypes.{t}", "bf16"),) for t in ("m", "v", "grads")]


# ---- a plan that fits


def test_every_saving_is_found():

    def of(*overrides, file=FILE_70B):
        run = seventy(*overrides) if file == FILE_70B else load(*overrides, file=file)
        found = knobs.savings(run, H200, RATES, space.training_check(H200))
        return {s.choice: dict(s.instead) for s in found}

    assert of().keys() == {"remat.policy=full", "dtypes.m=bf16", "dtypes.v=bf16"}
    assert of()["dtypes.m=bf16"] == {"dtypes.m": "f32"}
    more = of("remat.every=2", "loss.chunk=1024", "dtypes.grads=bf16", "mesh.tensor=2", "train.global_batch=16")
    assert more["remat.every=2"] == {"remat.every": 1} and more["loss.chunk=1024"] == {"loss.chunk": 2048}
    assert more["mesh.tensor=2"] == {"mesh.fsdp": -1, "mesh.tensor": 1} and "dtypes.grads=bf16" in more
    # The next step up the ladder keeps one more and no fewer, over as many layers.
    step = more["remat.policy=full"]
    assert step["remat.policy"] == "custom" and step["remat.every"] == 2 and str(step["remat.tensors"]).endswith("=keep")
    assert of("remat.policy=none").keys() == {"dtypes.m=bf16", "dtypes.v=bf16"}
    eight = of(file="configs/llama3_8b.py")
    assert eight["remat.policy=auto"]["remat.policy"] == "none" and eight["train.grad_accum=32"] == {"train.grad_accum": 16}
    offloaded = of("remat.policy=custom", "remat.tensors=q=keep,mlp_up=offload")
    assert offloaded["remat.tensors=mlp_up=offload"] == {"remat.tensors": "q=keep,mlp_up=keep"}


def test_what_is_needed_and_what_is_not(planned):
    """Either moment may be float32, both may not."""

    def by(run, machine, rates):
        wide = (run.dtypes.m, run.dtypes.v).count("f32")
        return made(run, machine, 1.02 if wide else 1.0, 150.0 if run.remat.policy != "full" else 115.0 + 17 * wide, rates)

    fake, run = planned(by), seventy()
    found = why(run, by(run, H200, None))
    first, *moments, together = found
    assert first.text.startswith("remat.policy=full: with ") and first.text.endswith(" kept 150.0 GiB, does not fit")
    assert first.needed and first.plan and not first.plan.fits
    assert [r.text for r in moments] == [
        f"dtypes.{name}=bf16: without it 132.0 GiB, would fit too and be 2.0% slower: not needed for memory" for name in "mv"
    ]
    assert [r.instead for r in moments] == [("dtypes.m=f32",), ("dtypes.v=f32",)]
    assert together.choice == "dtypes.m=bf16 and dtypes.v=bf16" and together.needed
    assert together.text == "dtypes.m=bf16 and dtypes.v=bf16: without all of them 149.0 GiB, does not fit"
    assert len(fake.requests) == 4 and [len(turned(run, r)) for r in fake.runs[1:]] == [1, 1, 2]


def test_one_that_is_not_needed_stands_alone(planned):
    fake = planned(size_of(100.0, 0.9))
    run = load("dtypes.m=bf16", "remat.policy=none", "remat.tensors=", "train.global_batch=8", "train.grad_accum=1")
    found = why(run, made(run, H200, 1.0, 90.0))
    assert len(found) == len(fake.requests) == 1
    assert found[0].text == "dtypes.m=bf16: without it 100.0 GiB, would fit too and be 10.0% faster: not needed for memory"


def test_what_is_not_planned_is_said(planned):
    planned(lambda run, machine, rates: Outcome(None, "out of time", "not planned within 9 s"))
    found = why(seventy())
    assert len(found) == 3 and all(r.needed is None for r in found)
    assert "dtypes.m=bf16: without it there is no plan (out of time): not planned within 9 s" in [r.text for r in found]


def test_ctrl_c_keeps_the_reasons_found_and_plans_nothing_more(planned):
    """Not even what two choices that are not needed would come to together."""
    heard = []

    def by(run, machine, rates):
        if run.dtypes.v == "f32":
            raise KeyboardInterrupt
        return made(run, machine, 1.0, 150.0 if run.remat.policy != "full" else 100.0, rates)

    fake = planned(by)
    found = why(seventy(), on_progress=lambda progress: heard.append(progress.interrupted))
    assert [r.needed for r in found] == [True, False, None] and "interrupted" in found[-1].text
    assert len(fake.batches) == 1 and heard[-1] and not heard[0]


def test_reasons_of_a_plan_that_does_not_fit_are_refused(planned):
    planned()
    with pytest.raises(ValueError, match="does not fit"):
        why(seventy(), made(seventy(), H200, 1.0, 140.0))


# ---- to be read


def printed(show: Callable[[Console], None], width: int = 200) -> str:
    console = Console(record=True, width=width)
    show(console)
    return console.export_text()


def test_what_is_printed(planned):
    planned()
    run, heard = everything_kept(), []
    for terminal in (False, True):
        console = Console(record=True, width=120, force_terminal=terminal)
        with fit_report.watch(console) as lines:
            found = advise(run, on_progress=lambda progress: (heard.append(len(progress.finished)), lines(progress)))
        text = console.export_text()
        if terminal:
            assert f"2/{fit.MOST}" in text
        else:
            assert [line.partition(":")[0] for line in text.splitlines()] == ["1", "2"]
            assert heard == sorted(heard) and (heard[0], heard[-1]) == (0, 2)
    text = printed(lambda console: fit_report.show_advice(found, console))
    assert "--config.train.grad_accum=32" in text and printed(lambda console: fit_report.show_advice((), console)) == ""
    reasons = why(seventy())
    text = printed(lambda console: fit_report.show_reasons(reasons, console))
    assert all(r.text in text for r in reasons)
    assert "makes no choice" in printed(lambda console: fit_report.show_reasons((), console))
    plan = fit_report.with_hints(made(run, H200, 1.0, 200.0), found)
    assert plan.hints == tuple(a.text for a in found)


def test_an_empty_value_can_be_seen():
    assert fit._written(("remat.policy=full", "remat.tensors=")) == "remat.policy=full remat.tensors=''"
