"""Warnings of a plan, on programs with and without a cause; and of a run that is not as planned."""

import dataclasses
import re

import jax
import pytest
from helpers import program, tiny

from jaxtrain.config import launch
from jaxtrain.config.layout import resolve_layout
from jaxtrain.data import loading
from jaxtrain.plan.expect import ENOUGH, FIRST, Expected, Watch
from jaxtrain.plan.program import collectives, hlo, warnings
from jaxtrain.plan.program.collectives import CollectiveOp
from jaxtrain.plan.rates import PUBLISHED
from jaxtrain.plan.result import Collective
from jaxtrain.sharding import replicated

# Sizes are large enough that arrays exceed the thresholds. Nothing is compiled.
SIZES = {"model.d_model": 512, "model.d_ff": 2048, "model.vocab_size": 8192, "precision": "bf16", "mesh.fsdp": 8}
RUN = tiny(SIZES)
ACCUMULATING = tiny({**SIZES, "train.grad_accum": 2})
MESH = {"data": 1, "fsdp": 8, "tensor": 1, "seq": 1}
# Abbreviations in the modules below.
SHORT = {
    "GROUPS": "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true",
    "STATE": "(s32[], f32[512,2048]{1,0}, f32[4,512,2048]{2,1,0}, f32[512,2048]{1,0})",
    "TRIPS": 'backend_config={"known_trip_count":{"n":"4"}}',
}

# A loop of 4 rounds. It carries a weight that does not change (element 1), a stack of which each round takes a slice (element
# 2), and an array that each round replaces (element 3).
LOOP = """HloModule step, num_partitions=8

%slice (p: f32[4,512,2048], n: s32[]) -> f32[512,2048] {
  %p = f32[4,512,2048]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,512,2048]{2,1,0} dynamic-slice(%p, %n, %zero, %zero), dynamic_slice_sizes={1,512,2048}
  ROOT %flat = f32[512,2048]{1,0} bitcast(%part)
}

%body (s: (s32[], f32[512,2048], f32[4,512,2048], f32[512,2048])) -> (s32[], f32[512,2048], f32[4,512,2048], f32[512,2048]) {
  %s = STATE parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %same = f32[512,2048]{1,0} get-tuple-element(%s), index=1
  %stack = f32[4,512,2048]{2,1,0} get-tuple-element(%s), index=2
  %other = f32[512,2048]{1,0} get-tuple-element(%s), index=3
  %pair = (s32[], f32[512,2048]{1,0}) tuple(%i, %same)
  %tied = f32[512,2048]{1,0} get-tuple-element(%pair), index=1
  %sliced = f32[512,2048]{1,0} fusion(%stack, %i), kind=kLoop, calls=%slice
  %small = bf16[512,2048]{1,0} convert(OPERAND)
  %whole = bf16[4096,2048]{1,0} all-gather(%small), channel_id=1, GROUPS, dimensions={0}, metadata={METADATA}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %changed = f32[512,2048]{1,0} negate(%other)
  ROOT %out = STATE tuple(%next, %same, %stack, %changed)
}

%condition (c: (s32[], f32[512,2048], f32[4,512,2048], f32[512,2048])) -> pred[] {
  %c = STATE parameter(0)
  %at = s32[] get-tuple-element(%c), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%at, %four), direction=LT
}

ENTRY %main (a: f32[512,2048], b: f32[4,512,2048]) -> f32[512,2048] {
  %a = f32[512,2048]{1,0} parameter(0)
  %b = f32[4,512,2048]{2,1,0} parameter(1)
  %start = s32[] constant(0)
  %state = STATE tuple(%start, %a, %b, %a)
  %loop = STATE while(%state), condition=%condition, body=%body, TRIPS
  ROOT %result = f32[512,2048]{1,0} get-tuple-element(%loop), index=3
}
"""
FOUND = CollectiveOp(
    "all-gather", "bf16", "fsdp", 8, 4, 8e6, 0.0, "jaxtrain/models/layers.py:65", "jit(train_step)/x", "gather", ()
)


def parsed(text: str, **written: str) -> hlo.Module:
    """Return a module, with its abbreviations expanded."""
    for name, full in {**SHORT, **written}.items():
        text = text.replace(name, full)
    return hlo.parse_hlo(text)


def judged(found=(), *, run=RUN, made=None, moved=(), step_ms=100.0):
    """Return the warnings about the program LOOP of a run, with these collectives."""
    module = parsed(LOOP, OPERAND="%same", METADATA='op_name="x"')
    return warnings.program_warnings(made or program(run), module, list(found), list(moved), step_ms)


def looped(operand: str, op_name: str = "jit(train_step)/jvp(loss)/while/body/all_gather", run=RUN, swap: str = ""):
    """Return the warnings about LOOP if its body gathers the value `operand`. swap: replaces the body's result, if given."""
    text = LOOP.replace("tuple(%next, %same, %stack, %changed)", swap) if swap else LOOP
    module = parsed(text, OPERAND=operand, METADATA=f'op_name="{op_name}"')
    return warnings.program_warnings(program(run), module, collectives.read_collectives(module, MESH, 8).values(), [], 100.0)


def changed(**fields):
    return dataclasses.replace(FOUND, **fields)


def test_a_healthy_program_gives_none():
    small = changed(dtype="f32", wire_bytes=1000.0)  # statistics of the loss
    assert judged([FOUND, small, changed(kind="reduce-scatter")]) == ()


def test_float32_gathers_are_named_once_for_each_line():
    unrolled = [changed(dtype="f32", instruction=f"gather.{i}") for i in range(3)]
    elsewhere = changed(dtype="s32+f32", source="jaxtrain/models/attention.py:78", wire_bytes=16e6)
    first, second = judged([*unrolled, elsewhere])
    assert first.startswith("float32 all-gather over fsdp (12 a step, 0.10 GB") and "jaxtrain/models/layers.py:65" in first
    assert second.startswith("float32 all-gather") and "jaxtrain/models/attention.py:78" in second
    assert judged(unrolled, run=tiny({**SIZES, "precision": "f32"})) == ()


def test_float32_reductions_are_named_unless_asked_for():
    """Gradients of keys add up in float32 over a ring, as inside one device."""
    found = [changed(kind="reduce-scatter", dtype="f32"), changed(kind="all-reduce", dtype="f32")]
    said = judged(found)
    assert [w.split(" over")[0] for w in said] == ["float32 reduce-scatter", "float32 all-reduce"]
    assert all("dtypes.reduce" in w for w in said)
    assert judged(found, run=tiny({**SIZES, "dtypes.reduce": "f32"})) == ()
    ring = [dataclasses.replace(f, source="jaxtrain/kernels/context_parallel/ring.py:9") for f in found]
    assert judged(ring) == ()


def test_a_gather_that_could_be_outside_its_loop():
    for operand in ("%same", "%tied"):  # %tied is %same behind a barrier with the counter, which returns a tuple
        (warning,) = looped(operand)
        assert "4 a step" in warning
    assert looped("%other") == ()
    assert looped("%sliced") == ()
    # Elements that swap places in each round do change.
    assert looped("%same", swap="tuple(%next, %other, %stack, %same)") == ()


def test_the_loop_over_microbatches_may_gather_again():
    own = "jit(train_step)/while/body/jvp(loss)/shard_map/all_gather"
    assert looped("%same", own, ACCUMULATING) == ()
    assert len(looped("%same", own)) == 1  # without accumulation there is no loop over microbatches
    inner = "jit(train_step)/while/body/jvp(loss)/shard_map/while/body/all_gather"
    assert len(looped("%same", inner, ACCUMULATING)) == 1
    # A microbatch's own collective may be in a kernel's loop that has no scope name.
    found = [changed(loops=("micro",), op_name=own), changed(loops=("around", "micro"), op_name=own)]
    assert warnings.microbatch_loops(2, found) == {"micro"}


def test_resharding_that_the_partitioner_made_up():
    text = """HloModule step, num_partitions=8

ENTRY %main (a: f32[512,2048]) -> f32[512,2048] {
  %a = f32[512,2048]{1,0} parameter(0)
  ROOT %swap = f32[512,2048]{1,0} all-to-all(%a), channel_id=1, GROUPS, dimensions={0}, FRONT metadata={op_name="mlp/dot"}
}
"""

    def of(front: str):
        module = parsed(text, FRONT=front)
        return warnings.program_warnings(
            program(RUN), module, collectives.read_collectives(module, MESH, 8).values(), [], 100.0
        )

    (warning,) = of('frontend_attributes={is_spmd_generated="true"},')
    assert warning.startswith("all-to-all over fsdp") and "mlp/dot" in warning
    assert of("") == ()


def test_replicated_moments_are_named_with_what_they_cost():
    """Largest first: 16 MiB each, then four layers of 4 MiB."""
    made = program(RUN)
    whole = replicated(made.placement)
    moments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), made.state.optimizer)
    broken = dataclasses.replace(made, state=dataclasses.replace(made.state, optimizer=moments))
    (warning,) = judged(made=broken)
    assert "sharding.rules" in warning and ".layers.0." not in warning
    assert "optimizer.mu.embed.embedding, optimizer.mu.head, optimizer.nu.embed.embedding, optimizer.nu.head" in warning


def test_exposed_communication_is_added_up_by_line():
    one = Collective("all-gather", "bf16", "fsdp", 8, 4, 1.0, 0.0, 5.0, 1.5, "jaxtrain/models/layers.py:65", "mlp", "a")
    assert judged(moved=[one]) == ()
    other = dataclasses.replace(one, kind="all-reduce", exposed_ms=5.0, instruction="c")
    (warning,) = judged(moved=[one, dataclasses.replace(one, instruction="b"), other])
    assert warning.index("8 ms") < warning.index("all-reduce over fsdp") < warning.index("(jaxtrain/models/layers.py:65) 3 ms")


def test_too_few_microbatches_for_the_stages():
    def bubble(*overrides: str) -> list[str]:
        asked = ("mesh.stage=4", "mesh.fsdp=1", *overrides)
        run = loading.load_config([f"--config={launch.REPO}/configs/llama3_8b.py", *(f"--config.{o}" for o in asked)]).run
        return list(warnings._bubble(resolve_layout(run, 8, 8), run.train.global_batch))

    (warning,) = bubble("train.global_batch=64", "train.grad_accum=8")
    assert "27%" in warning and "pipeline.groups=2" in warning
    accum, batch = (int(re.findall(rf"{key}=(\d+)", warning)[-1]) for key in ("grad_accum", "global_batch"))
    assert batch == 8 * accum and not bubble(f"train.grad_accum={accum}", f"train.global_batch={batch}")
    (uneven,) = bubble("train.global_batch=60", "train.grad_accum=10")
    assert "interleaved" not in uneven
    groups = ("pipeline.schedule=interleaved", "pipeline.groups=4")
    assert not bubble("train.global_batch=64", "train.grad_accum=8", *groups)
    assert not bubble("mesh.stage=1", "train.grad_accum=1", "train.global_batch=8")


# ---- A run that is not as planned: 1 s and 100 GiB, or a range of seconds


@pytest.mark.parametrize(
    ("step_s", "peak_gib", "rates", "range_s", "warned"),
    [
        (1.1, 95.0, "calibrated", None, 0),
        (1.3, 100.0, "calibrated", None, 1),
        (1.0, 80.0, "calibrated", None, 1),
        (1.3, 120.0, "calibrated", None, 2),
        # At published kernel rates, without comparable runs, no step time is unexpected.
        (1.3, 100.0, PUBLISHED, None, 0),
        (1.2, 100.0, PUBLISHED, (1.07, 1.28), 0),
        (1.3, 100.0, PUBLISHED, (1.07, 1.28), 1),
    ],
)
def test_a_run_that_is_not_as_planned_is_told_once(step_s, peak_gib, rates, range_s, warned):
    watch = Watch(Expected(1.0, 100.0, rates, range_s))
    said = [watch.note(9.0 if n < FIRST else step_s, peak_gib) for n in range(FIRST + ENOUGH + 3)]
    assert [len(lines) for lines in said] == [0] * (FIRST + ENOUGH - 1) + [warned] + [0] * 3
    assert watch.record()["measured"] == {"step_s": step_s, "peak_gib": peak_gib}
