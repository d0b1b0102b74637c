"""Golden plans (the recorded plans in tests/golden): their files, which changes count as differences, and the command.

The command is tests/golden_plans.py. The compared steps, one of them correct, have two layers of Llama 3 8B, compiled ahead of
time for H200s.
"""

import dataclasses

import golden_plans
import jax
import jax.numpy as jnp
import pytest
from golden_plans import SHIPPED, GoldenError, compare, from_plan, load, path, save
from plans import ONE_EACH, TWO, config, plan

from jaxtrain import installed, launch, sharding, zero
from jaxtrain.page.numbers import number
from jaxtrain.plan import topology
from jaxtrain.plan.make import make_plan
from jaxtrain.plan.rates import datasheet
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search import parallel
from jaxtrain.train import loss, program

H200S = topology.parse("h200:8")


# ---- The files


def test_every_shipped_config_has_a_golden_plan():
    """Two configs have no golden plan: tiny.py trains on CPUs, and finetune.py uses its base's model."""
    files = {config.partition(":")[0] for config, _ in SHIPPED.values()}
    assert files == {f"configs/{file.name}" for file in (launch.REPO / "configs").glob("*.py")} - {
        "configs/tiny.py",
        "configs/finetune.py",
    }
    assert {file.stem for file in golden_plans.FOLDER.iterdir()} == set(SHIPPED)


# Expected warnings of shipped configs: the beginnings of their texts.
DESERVED = {
    # Routing statistics are summed over all devices in each layer.
    "gpt_oss_20b": ("exposed communication",),
    # The wait for the experts' tokens is exposed, and routers are gathered in float32, in which they are stored.
    "deepseek_v3": ("exposed communication", "float32 all-gather over fsdp+expert"),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_golden_files_are_what_they_say(name, tmp_path):
    kept = load(path(name))
    assert kept["jaxlib"] == installed.versions()["jaxlib"], f"Fix: {golden_plans.WRITE}"
    assert (kept["config"], kept["topology"]) == SHIPPED[name]
    assert kept["margins"] == golden_plans.MARGINS and kept["peak_gib"] and kept["tflop"] and not kept["overrides"]
    assert not [text for text in kept["warnings"] if not text.startswith(DESERVED.get(name, ("none",)))]
    assert bool(kept["collectives"]) == (kept["topology"] != "h200:1")
    save(kept, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path(name).read_bytes()


# ---- A step that is broken on purpose


def planned_now() -> Plan:
    """Return the plan of the program that the current code makes."""
    return make_plan(config(TWO, *ONE_EACH), H200S, rates=datasheet(H200S.gpu, "bf16"), name="configs/llama3_8b.py")


@pytest.fixture(scope="module")
def healthy() -> Plan:
    return plan("h200:8", TWO, *ONE_EACH)


def test_a_healthy_step_gives_no_warning(healthy):
    """Only a warning of exposed communication is allowed, because two layers leave little to overlap with."""
    assert [w for w in healthy.warnings if not w.startswith("exposed communication")] == []


def named(differences, what):
    """Return the one difference in the figure `what`, as text."""
    (found,) = [d for d in differences if d.startswith(f"{what}: ")]
    return found


def warned(differences):
    return [d.removeprefix("new warning: ") for d in differences if d.startswith("new warning: ")]


def test_float32_gathers_are_found(healthy, monkeypatch):
    """The planted fault clips a weight before its cast, so it is gathered in float32. XLA would move a cast alone before the
    gather.
    """

    def gather(w, how):
        for dim, over in how.dims:
            w = sharding.all_gather(w, over, dim)
        return jnp.clip(w, -100, 100).astype(how.compute)

    broken = jax.custom_vjp(gather, nondiff_argnums=(1,))
    broken.defvjp(lambda w, how: (gather(w, how), jnp.zeros((0,), w.dtype)), sharding._gather_bwd)
    monkeypatch.setattr(zero, "gather_weight", broken)
    differences = compare(from_plan(healthy), planned_now())
    wide = named(differences, "all-gather f32 over fsdp")
    assert "golden has none; +" in wide and "; from jaxtrain/models/transformer.py:" in wide
    assert "no longer from jaxtrain/models/transformer.py:" in named(differences, "all-gather bf16 over fsdp")
    lines = [w for w in warned(differences) if w.startswith("float32 all-gather over fsdp")]
    assert any("from jaxtrain/models/transformer.py:" in w for w in lines)


def test_a_head_that_is_gathered_for_every_chunk_is_found(healthy, monkeypatch):
    """The planted fault calls the loss for one chunk of tokens after another. A barrier keeps XLA from gathering the head only
    once.
    """

    def by_chunk(hidden, head, batch, spec):
        def parts(a):
            return a.reshape(a.shape[0], 8, -1, *a.shape[2:]).swapaxes(0, 1)

        def one(total, item):
            x, held = jax.lax.optimization_barrier((item[0], head))
            return total + loss.cross_entropy(x, held, item[1], spec), None

        chunks = parts(hidden), {k: parts(batch[k]) for k in ("targets", "weights")}
        return jax.lax.scan(one, jnp.zeros((), jnp.float32), chunks)[0]

    monkeypatch.setitem(loss.LOSSES, "cross_entropy", loss.Loss(by_chunk))
    differences = compare(from_plan(healthy), planned_now())
    gathered = named(differences, "all-gather bf16 over fsdp")
    assert "+7 launches" in gathered
    assert "jaxtrain/train/loss.py:" in gathered and "(8 launches, 7.35 GB" in gathered
    assert any("of an array that does not change in the loop around it" in w and "loss.py" in w for w in warned(differences))


def test_replicated_moments_are_found(healthy, monkeypatch):
    made = program.abstract_state

    def whole(definition, tx, placement, *more):
        state = made(definition, tx, placement, *more)
        everywhere = sharding.replicated(placement)
        moments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), state.optimizer)
        return dataclasses.replace(state, optimizer=moments)

    monkeypatch.setattr(program, "abstract_state", whole)
    differences = compare(from_plan(healthy), planned_now())
    peak = named(differences, "peak memory")
    grown = number(7 * healthy.memory.by_class["first moment"])  # eight eighths instead of one
    assert f"first moment +{grown} GiB" in peak and f"second moment +{grown} GiB" in peak
    assert "; from jaxtrain/optim/update.py:" in named(differences, "all-gather f32 over fsdp")
    (moments,) = [w for w in warned(differences) if w.startswith("replicated")]
    assert "optimizer.mu.layers.*.mlp" in moments or "optimizer.mu.head" in moments


# ---- Changes that count as differences, and changes that do not


def moved(plan: Plan, instruction: str, **fields) -> Plan:
    """Return the plan with changed fields in one of its collectives."""
    changed = [dataclasses.replace(c, **fields) if c.instruction == instruction else c for c in plan.collectives]
    return dataclasses.replace(plan, collectives=tuple(changed))


def remembering(plan: Plan, **fields) -> Plan:
    return dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, **fields))


def test_a_harmless_change_is_none(healthy):
    kept = from_plan(healthy)
    assert compare(kept, healthy) == []
    shifted = []
    for c in reversed(healthy.collectives):
        file, _, line = c.source.rpartition(":")
        dtype = "+".join(reversed(c.dtype.split("+")))
        shifted.append(dataclasses.replace(c, source=f"{file}:{int(line) + 7}", dtype=dtype, instruction=f"{c.instruction}.9"))
    other = dataclasses.replace(healthy, collectives=tuple(shifted), config="another", compile_s=1.0)
    other = remembering(other, peak_gib=healthy.memory.peak_gib * 1.005)
    assert compare(kept, other) == []
    renamed = {f"while.{i}": n for i, n in enumerate(n for name, n in healthy.trip_counts.items() if name.startswith("while"))}
    loops = {**renamed, **{k: n for k, n in healthy.trip_counts.items() if not k.startswith("while")}}
    assert compare(kept, dataclasses.replace(healthy, trip_counts=loops)) == []


def test_two_gib_more_are_found_with_what_holds_them(healthy):
    classes = dict(healthy.memory.by_class)
    classes["saved activations"] += 2.0
    more = remembering(
        healthy,
        peak_gib=healthy.memory.peak_gib + 2.0,
        by_class=classes,
        saved={**healthy.memory.saved, "norm_out": 2.0},
    )
    (d,) = compare(from_plan(healthy), more)
    assert d.startswith("peak memory: ") and "; +2.00 GiB (" in d
    assert "saved activations +2.00 GiB" in d and "norm_out +2.00 GiB" in d


def test_an_added_gather_is_found_with_its_line(healthy):
    one = next(
        c for c in healthy.collectives if c.kind == "all-gather" and c.source.startswith("jaxtrain/models/transformer.py")
    )
    added = dataclasses.replace(one, instruction="new", source="jaxtrain/models/transformer.py:999")
    (d,) = compare(from_plan(healthy), dataclasses.replace(healthy, collectives=(*healthy.collectives, added)))
    assert f"{one.count:+,} launches" in d
    assert f"; from jaxtrain/models/transformer.py:999 ({one.count} launch" in d
    (d,) = compare(from_plan(healthy), moved(healthy, one.instruction, wire_gib=one.wire_gib + 1.0))
    assert "+1.07 GB" in d and f"{one.source} (" in d and "before" in d
    # the same bytes in smaller collectives
    (d,) = compare(from_plan(healthy), moved(healthy, one.instruction, count=2 * one.count))
    assert f"; +0 GB (+0.0%), {one.count:+,} launches" in d
    gone = tuple(c for c in healthy.collectives if c.kind != "all-to-all")
    (d,) = compare(from_plan(healthy), dataclasses.replace(healthy, collectives=gone))
    assert d.startswith("all-to-all bf16 over fsdp: none, golden has ") and "no longer from jaxtrain/" in d


def test_loops_work_time_and_warnings_are_compared(healthy):
    kept = from_plan(healthy)

    def only(plan: Plan) -> str:
        (d,) = compare(kept, plan)
        return d

    d = only(dataclasses.replace(healthy, trip_counts={**healthy.trip_counts, "loss": 8}))
    assert d.startswith("trips of loss: 8, golden has ")
    kernel = dataclasses.replace(healthy.kernels[0], op_name="recompute mlp", tflop=5.0)
    flops = dataclasses.replace(healthy.flops, hardware_per_step=healthy.flops.hardware_per_step + 5e12)
    d = only(dataclasses.replace(healthy, kernels=(*healthy.kernels, kernel), flops=flops))
    assert d.startswith("hardware FLOPs: ") and "recompute mlp +5.00 TFLOP" in d
    d = only(dataclasses.replace(healthy, time=dataclasses.replace(healthy.time, step_ms=healthy.time.step_ms * 1.021)))
    assert d.startswith("planned step: ") and "+2.1%" in d
    exposed = healthy.time.exposed_ms + 0.011 * healthy.time.step_ms
    d = only(dataclasses.replace(healthy, time=dataclasses.replace(healthy.time, exposed_ms=exposed)))
    assert d.startswith("exposed share of the step: ") and d.endswith("; +1.1 points")
    d = only(dataclasses.replace(healthy, warnings=("all-to-all that nobody asked for (3 a step)",)))
    assert d == "new warning: all-to-all that nobody asked for (3 a step)"
    known = kept | {"warnings": ["all-to-all that nobody asked for (5 a step)"]}
    assert compare(known, dataclasses.replace(healthy, warnings=("all-to-all that nobody asked for (3 a step)",))) == []


def test_what_cannot_be_compared_is_refused(healthy, tmp_path):
    kept = from_plan(healthy)
    with pytest.raises(GoldenError, match=r"made with jaxlib 0\.1, and this is .*--write"):
        compare(kept | {"jaxlib": "0.1"}, healthy)
    with pytest.raises(GoldenError, match="h200:4 cannot be compared with a plan for h200:8"):
        compare(kept | {"topology": "h200:4"}, healthy)
    file = tmp_path / "plan.json"
    with pytest.raises(GoldenError, match=r"plan\.json: no golden plan can be read .*--write"):
        load(file)
    for text, why in (("{", "Expecting"), ('{"format": 7}', "its format is 7"), ("[]", "TypeError")):
        file.write_text(text)
        with pytest.raises(GoldenError, match=why):
            load(file)


# ---- The command


@pytest.fixture
def run(capsys, tmp_path):
    """Return a function that runs the command with a ready plan. With None, planning crashes."""

    def command(plan: Plan | None, write: bool = False) -> tuple[int, str]:
        def plan_many(requests, *, on_done):
            outcome = parallel.Outcome(plan, "planned") if plan else parallel.Outcome(None, "crashed", "SIGSEGV")
            for name in requests:
                on_done(name, outcome)
            return dict.fromkeys(requests, outcome)

        code = golden_plans.run(["llama3_8b"], write, tmp_path, plan_many)
        return code, capsys.readouterr().out

    return command


def test_the_command_writes_compares_and_prints_what_changed(healthy, tmp_path, run):
    code, text = run(healthy)
    assert code == 1 and "no golden plan can be read" in text and golden_plans.WRITE in text
    code, text = run(healthy, write=True)
    assert code == 0 and "llama3_8b: written to" in text
    assert run(healthy) == (0, "llama3_8b: as its golden plan\n")
    more = remembering(healthy, peak_gib=healthy.memory.peak_gib + 2.0)
    before = (tmp_path / "llama3_8b.json").read_bytes()
    code, text = run(more)
    assert code == 1 and (tmp_path / "llama3_8b.json").read_bytes() == before
    old, new = (number(m.memory.peak_gib) for m in (healthy, more))
    assert f"- peak memory: {new} GiB, golden has {old} GiB; +2.00 GiB (" in text and len(text.splitlines()) == 2
    code, text = run(more, write=True)
    assert code == 0 and "+2.00 GiB" in text
    assert run(more)[0] == 0
    # With `write`, a change within the margins is printed too.
    code, text = run(remembering(more, peak_gib=more.memory.peak_gib + 0.01), write=True)
    assert code == 0 and "peak memory" in text


def test_the_command_reports_what_it_cannot_compare(healthy, tmp_path, run):
    assert run(None, write=True) == (1, "llama3_8b: not compared: no plan, crashed: SIGSEGV\n")
    save(from_plan(healthy) | {"jaxlib": "0.1"}, tmp_path / "llama3_8b.json")
    code, text = run(healthy)
    assert code == 1 and "not compared" in text and "jaxlib 0.1" in text
    with pytest.raises(SystemExit):
        golden_plans.main(["llama3_9b"])
