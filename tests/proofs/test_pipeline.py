"""Programs of pipelines: their memory and bubble, and steps that equal one device's, with frozen layers, adapters and more.

tests/matrix.py has layouts with stages. Each case here adds a feature that those layouts lack.
"""

from typing import Any

import helpers
import jax
import numpy as np
import pytest
from matrix import MODELS, NO_LOSSES

from jaxtrain.config.schema import ConfigError
from jaxtrain.step.batch import place_batch
from jaxtrain.step.program import build_program
from jaxtrain.step.stages import Schedule
from jaxtrain.train import generation, parity
from jaxtrain.train.scoring import Scorer

# Three layers on two stages: one position is empty.
SMALL = {
    "model.num_layers": 3,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.d_ff": 48,
    "model.init_std": 0.1,
    "data.seq_len": 32,
    "train.global_batch": 8,
    "loss.chunk": 24,
}
TWO = {"mesh.stage": 2, "train.grad_accum": 2}
GROUPS = {"pipeline.schedule": "interleaved", "pipeline.groups": 2}

# ---- Memory and bubble


def program_of(schedule: str, microbatches: int) -> Any:
    """Return the jaxpr of a step with microbatches of 2 rows, and 4 layers on 2 stages."""
    groups = {"pipeline.groups": 2} if schedule == "interleaved" else {}
    asked = {"mesh.stage": 2, "model.num_layers": 4, "pipeline.schedule": schedule, "train.grad_accum": microbatches}
    made = helpers.program(helpers.tiny(SMALL | asked | groups | {"train.global_batch": 2 * microbatches}))
    return jax.make_jaxpr(made.train_step)(made.state, made.batch).jaxpr


def loops(jaxpr: Any, times: int = 1) -> Any:
    """Yield each equation of a program, and how often it runs."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from loops(inner, times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times)


def carried(jaxpr: Any) -> int:
    """Return the largest number of bytes that a loop (scan) of a program returns: its carry, and its stacked results."""
    made = [[v.aval for v in eqn.outvars] for eqn, _ in loops(jaxpr) if eqn.primitive.name == "scan"]
    return max(sum(a.size * a.dtype.itemsize for a in avals) for avals in made)


def test_saved_activations_do_not_grow_with_the_microbatches():
    four, eight = (carried(program_of("1f1b", m)) for m in (4, 8))
    assert four == eight
    assert Schedule("1f1b", 2, 1, 4).slots[2] == Schedule("1f1b", 2, 1, 8).slots[2] == 4
    assert carried(program_of("gpipe", 8)) > carried(program_of("gpipe", 4)) > four


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_program_has_the_ticks_of_the_formula(schedule: str):
    groups = 2 if schedule == "interleaved" else 1
    s = Schedule(schedule, 2, groups, 4)
    # Each tick sends the results of one microbatch: one array forward, and one back.
    ran = sum(times for eqn, times in loops(program_of(schedule, 4)) if eqn.primitive.name == "ppermute")
    assert (ran - 2 * s.units) / ran == s.bubble == 1 / (4 * groups + 1)


# ---- Equal numbers


def steps_of(asked: dict[str, Any]) -> parity.Trained:
    return helpers.first_steps(helpers.tiny(SMALL | asked), 2)


def same(asked: dict[str, Any], layout: dict[str, Any]) -> None:
    """Check that two steps on a layout equal those on one device."""
    reference = steps_of(asked)
    run = helpers.tiny(SMALL | asked | layout)
    bounds = parity.bounds(reference, None, len(helpers.devices_of(run)), 8 * 32)
    assert parity.compare_runs(helpers.first_steps(run, 2), reference, bounds).violations == []


def test_a_custom_loss_sees_the_whole_vocabulary():
    """With a loss that computes all logits, the steps equal those on one device.

    The layers are unrolled, and gradients are summed over `data` at the end of the step.
    """
    asked = {"loss.name": "helpers:whole_logits_loss", "model.tied_head": True, "model.num_layers": 2}
    same(asked, TWO | {"mesh.data": 2, "mesh.tensor": 2, "parallel.scan_layers": False})


ASKED = {
    "adapters": ({"lora.rank": 4}, {"mesh.fsdp": 2}),
    "a frozen table that is the head too": (
        {"train.freeze": "embed.*", "model.tied_head": True, "loss.z_loss": 1e-2, "model.logit_softcap": 3.0},
        {"mesh.tensor": 2},
    ),
    "fewer microbatches than stages": ({"train.freeze": "embed.*,head,final_norm.*"}, {"mesh.stage": 3}),
}


# Layers with weights that are not silent at 0, in stacks with empty slots.
EXPERTS = MODELS["sinks"] | {"model.num_heads": 4, "model.num_kv_heads": 2, "train.global_batch": 8, "model.d_ff": 16}
ROUTED = {"model.router": "sigmoid", "model.router_bias": True, "model.num_experts": 4, "model.experts_per_token": 2}
EMPTY = {
    "an own family": ({"model.family": "helpers:LoudFamily"}, {"mesh.fsdp": 2}),
    "an own family's two layers under one checkpoint": (
        {"model.family": "helpers:LoudFamily", "remat.every": 2},
        {"parallel.scan_layers": False},
    ),
    "biases in groups": ({"model.attention_out_bias": True, "model.qkv_bias": True, "model.num_layers": 5}, GROUPS),
    "experts on several devices": (EXPERTS | {"model.num_layers": 3}, {"mesh.expert": 2}),
    "router biases": (ROUTED | NO_LOSSES | {"moe.bias_rate": 0.25}, {"mesh.expert": 2, "mesh.data": 2}),
}


@pytest.mark.parametrize(
    "case", helpers.few(EMPTY, "an own family's two layers under one checkpoint", "experts on several devices")
)
def test_an_empty_slot_is_not_trained(case: str):
    """Its weights stay 0, and the steps are those of one device."""
    asked, layout = EMPTY[case]
    same(asked, TWO | layout)
    made = helpers.program(run := helpers.tiny(SMALL | asked | TWO | layout))
    state, step = helpers.start(made), helpers.train_step(run)
    for i in range(2):
        state, _ = step(state, place_batch(helpers.host_batch(run, i), made.batch, made.context))
    empty = [slot for slot, layer in enumerate(state.layers.order) if layer is None]
    assert empty
    for name, w in jax.tree_util.tree_leaves_with_path(state.params["layers"]):
        assert not np.asarray(w)[empty].any(), name


@pytest.mark.more
@pytest.mark.parametrize(("asked", "layout"), ASKED.values(), ids=ASKED)
def test_steps_are_those_of_one_device(asked: dict[str, Any], layout: dict[str, Any]):
    same(asked, TWO | layout)


def test_fp8_matmuls_run_on_a_stage():
    asked = {"precision": "fp8", "mesh.fsdp": 2}
    assert "f8E4M3FN" in helpers.lowered(helpers.tiny(SMALL | TWO | asked))


def test_evaluation_and_sampling_on_stages_of_several_groups():
    losses, texts = [], []
    for layout in ({"train.grad_accum": 2}, TWO | GROUPS | {"mesh.tensor": 2}):
        asked = {"model.family": "helpers:LoudFamily", "model.num_layers": 5, "loss.z_loss": 1e-2}
        run = helpers.tiny(SMALL | asked | layout)
        made = helpers.program(run)
        params = helpers.start(made).params
        host = {name: x[:4] for name, x in helpers.host_batch(run, 0).items()}
        total, weight, _ = made.eval_step(params, place_batch(host, made.eval_batch, made.context))
        losses.append(float(total) / float(weight))
        sampler = generation.Sampler(run, made.placement)
        texts.append(list(sampler.tokens(params, range(40, 52), max_tokens=6, temperature=0.0, top_p=1.0, seed=0)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match=r"Set mesh\.stage=1\."):
        Scorer(run, sampler, params)
    alone = helpers.tiny({**SMALL, **asked, "mesh.stage": 1, "mesh.fsdp": 1})
    assert Scorer(alone, generation.Sampler(alone, helpers.program(alone).placement), params).rows == 8


# ---- Refusals


def test_a_model_that_a_pipeline_cannot_divide_is_refused():
    run = helpers.tiny(SMALL | TWO | {"model.family": "helpers:OwnLoopFamily"})
    with pytest.raises(ConfigError) as found:
        build_program(run, helpers.devices_of(run))
    assert [p.key for p in found.value.problems] == ["mesh.stage"]
