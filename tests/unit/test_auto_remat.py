"""remat.policy=auto by formula: bytes of the saved activations, and the least recompute that fits into the memory.

proofs/test_plan_memory.py compares it with the compiler.
"""

import dataclasses
import itertools
import math

import helpers
import pytest

from jaxtrain.config.layout import arrange, resolve_layout
from jaxtrain.config.schema import Remat
from jaxtrain.data import loading
from jaxtrain.models import flops
from jaxtrain.models.activations import SAVED, saved_activations
from jaxtrain.step import auto_remat
from jaxtrain.step.memory import compile_to_fit, reduce_saved, taken_gib
from jaxtrain.step.stages import Schedule

WHOLE = dict.fromkeys(("batch", "sequence", "residual", "heads", "kv_heads", "mlp", "experts", "layers"), 1)


def run(*overrides: str):
    sizes = ("--config.train.grad_accum=1", "--config.train.global_batch=8", "--config.remat.policy=auto")
    return loading.load_config(["--config=configs/llama3_8b.py", "--config.remat.tensors=", *sizes, *overrides]).run


def saved(r, axes: dict[str, int], packed: bool) -> auto_remat.Activations:
    layout = resolve_layout(r, 8, 8)
    layout = dataclasses.replace(layout, stages=arrange(r.model.stacked_layers, r.pipeline, axes["layers"]))
    return auto_remat.Activations(r.model, r.moe, layout, axes, r.data.most_documents if packed else 0)


def experts(*overrides: str):
    r = run(*overrides)
    return r.model, r.moe


def test_the_first_choice_computes_no_gemm_again():
    r = run()
    assert flops.recompute(r.model, r.remat, r.data.seq_len).causal == 0
    assert saved_activations(r.remat) == set(SAVED["auto"])


def test_bytes_are_those_of_the_arrays():
    """Llama 3 8B has 32 layers, and each of 8 GPUs has 8192 tokens. For each token and layer, mlp_up has 14,336 bfloat16
    values. The log-sum-exp has a float32 for each of 32 heads and 8 segments: 7 documents and the padding.
    """
    axes = WHOLE | {"batch": 8}
    assert saved(run(), axes, False).saved_bytes(frozenset({"mlp_up"})) == 32 * 8192 * 14336 * 2
    assert saved(run(), axes | {"kv_heads": 2}, False).saved_bytes(frozenset({"k", "v"})) == 32 * 8192 * 2 * 4 * 128 * 2
    lse = saved(run("--config.data.max_segments=7"), axes, True).saved_bytes(frozenset({"attention_lse"}))
    assert lse == 32 * 8192 * 32 * 8 * 4


def test_bytes_of_experts_and_of_a_pipeline():
    """A token has one row for each of its two experts. The shared expert and spare rows (dispatch buffer, capacity) add more.

    With 4 stages, a stage saves its 8 layers for each microbatch in flight. Interleaved, it saves
    the 4 layers of a virtual stage for each pair of virtual stage and microbatch in flight.
    """
    up, axes, one = frozenset({"mlp_up"}), WHOLE | {"batch": 8}, 32 * 8192 * 14336 * 2
    few = ("--config.model.num_experts=8", "--config.model.shared_d_ff=7168")
    assert saved(run(*few), axes, False).saved_bytes(up) == one * 2.5
    assert saved(run(*few), axes | {"experts": 4}, False).saved_bytes(up) == one * (2 * 1.25 + 0.5)
    assert auto_remat.expert_fill(*experts(*few), 4) == 1 / 1.25 and auto_remat.expert_fill(*experts(*few), 1) == 1
    assert saved(run(*few, "--config.moe.capacity_factor=2"), axes | {"experts": 4}, False).saved_bytes(up) == one * 4.5
    # Experts on one device share its buffer. For two experts, an example: loads of 1.5 and 6.5 / 7 even shares average to 1.21.
    # The first round holds 1.25 even shares, and each further round a quarter.
    alone = [auto_remat.expert_rounds(*experts(*few), 8, load) for load in (1.0, 1.25, 1.26, 1.5, 1.51, 2.5, 4.0)]
    assert alone == [1, 1, 2, 2, 3, 6, 12]
    pairs = [auto_remat.expert_rounds(*experts(*few), 4, load) for load in (1.0, 1.5, 1.6, 4.0)]
    assert pairs == [1, 1, 2, 6]
    assert auto_remat.expert_fill(*experts(*few), 8, 1.5) == pytest.approx(1)
    assert auto_remat.expert_fill(*experts(*few), 8, 1.6) == pytest.approx(1.6 / (1.25 + 2 * 0.25))
    assert auto_remat.expert_fill(*experts(*few), 8, 1.25) == pytest.approx(1)
    many = ("--config.train.grad_accum=64", "--config.train.global_batch=512")
    waiting = Schedule("1f1b", 4, 1, 64).slots[2], Schedule("interleaved", 4, 2, 64).slots[2]
    assert saved(run(*many), axes | {"layers": 4}, False).saved_bytes(up) == one / 32 * 8 * waiting[0]
    groups = ("--config.pipeline.schedule=interleaved", "--config.pipeline.groups=2")
    assert saved(run(*many, *groups), axes | {"layers": 4}, False).saved_bytes(up) == one / 32 * 4 * waiting[1]


@pytest.mark.parametrize("excess", [0.1, 9.0, 21.9])
def test_less_is_the_least_arithmetic_that_is_small_enough(excess):
    """The chosen set of saved activations has the least recompute of all sets that free `excess` GiB; all are tried."""
    r, axes = run(), WHOLE | {"batch": 8}
    now = saved(r, axes, True).saved_bytes(saved_activations(r.remat)) / 2**30
    found = saved(r, axes, True).smaller(r.remat, excess)
    assert found is not None
    cost = flops.recompute(r.model, found, r.data.seq_len).causal
    assert saved(r, axes, True).saved_bytes(saved_activations(found)) / 2**30 <= now - excess
    for size, every in ((n, auto_remat.GROUPS) for n in range(len(auto_remat.GROUPS))):
        for groups in itertools.combinations(every, size):
            names = frozenset(itertools.chain(*groups))
            if saved(r, axes, True).saved_bytes(names) / 2**30 <= now - excess:
                other = Remat("custom", ",".join(f"{n}=keep" for n in names)) if names else Remat("full")
                assert flops.recompute(r.model, other, r.data.seq_len).causal >= cost
    assert saved(r, axes, True).smaller(r.remat, now + 1) is None


def test_what_keeps_nothing_is_not_made_smaller():
    r = helpers.tiny({"remat.policy": "auto"})
    program = helpers.program(r)
    assert reduce_saved(program, 10.0, math.inf) is None
    full = reduce_saved(program, 10.0, 1.0)
    assert full is not None and full.remat == Remat("full")
    assert reduce_saved(dataclasses.replace(program, run=full), 10.0, 1.0) is None


def test_a_family_of_the_users_own_saves_less_until_its_compiled_step_fits():
    r = helpers.tiny({"remat.policy": "auto", "model.family": "helpers:WiderFamily", "model.num_layers": 6})
    program, policies, sizes = helpers.program(r), [], []

    def taken(compiled) -> float:
        sizes.append(taken_gib(compiled))
        return sizes[-1]

    for usable in (math.inf, 0.0):
        found, _ = compile_to_fit(program, {}, usable, taken=taken)
        policies.append(found.run.remat.policy)
    assert policies == ["auto", "full"]
    auto, attention, full = dict.fromkeys(sizes)
    assert auto > attention > full
    between, _ = compile_to_fit(program, {}, (auto + attention) / 2 / (1 - auto_remat.MARGIN))
    assert between.run.remat.policy == "attention"
