"""Families of models on several devices: each family's model of reference/golden takes the steps of one device."""

import dataclasses
import functools

import helpers
import hugging_face
import pytest
from hugging_face import FAMILIES

from jaxtrain.config.schema import RunConfig
from jaxtrain.hf.folder import model_of
from jaxtrain.train import parity

LAYOUTS = {
    "fsdp2xtensor2": {"mesh.fsdp": 2, "mesh.tensor": 2},
    "fsdp2xseq2": {"mesh.fsdp": 2, "mesh.seq": 2},
    "stage2xtensor2": {"mesh.stage": 2, "mesh.tensor": 2, "train.grad_accum": 2},
    "expert2xtensor2": {"mesh.expert": 2, "mesh.tensor": 2},
}
# Larger weights than usual make attention scores differ, so that a wrong mask or position changes the results. The routers'
# losses are computed for each microbatch, so that they would differ between layouts. Tokens are few: of many, one may be so
# near to two experts that rounding chooses. AdamW divides an element of a gradient by its size: with the usual eps of 1e-8, the
# sign of an element that is rounding alone would decide a whole update.
STEPS = {"data.seq_len": 32, "data.max_segments": 6, "train.global_batch": 4, "moe.balance_loss": 0.0, "moe.z_loss": 0.0}
STEPS |= {"optimizer.eps": 1e-6}


def run_of(name: str, layout: str = "") -> RunConfig:
    """Return a run of the model `name` of reference/golden on a layout; "": on one device.

    Without multi-token prediction, which no stage of a pipeline has.
    """
    model = dataclasses.replace(model_of(hugging_face.settings(name)), vocab_size=264, init_std=0.1, mtp_layers=0)
    how = STEPS | LAYOUTS.get(layout, {}) | ({"parallel.context": "ulysses"} if model.delta_layers else {})
    return helpers.tiny({f"model.{k}": v for k, v in dataclasses.asdict(model).items()} | how)


@functools.lru_cache(1)
def one_device(name: str) -> parity.Trained:
    return helpers.first_steps(run_of(name), 2)


# Experts after delta nets: rounding is at the bounds here (gradients off by 1.0e-5 to 1.1e-5, losses by 1e-7; on one device,
# another number of microbatches alone gives 5e-6). Layouts of delta nets with experts are proved in test_delta_net.py, of the
# gate of shared experts here with qwen2_moe.
ROUNDING = ("qwen3_next", "qwen3_5_moe")
CASES = [
    (name, layout)
    for name in FAMILIES
    if name not in ROUNDING
    for layout in LAYOUTS
    if "expert" not in layout or model_of(hugging_face.settings(name)).num_experts
]


@pytest.mark.parametrize("case", helpers.few(CASES, ("olmo2", "fsdp2xtensor2"), ("phi3", "fsdp2xseq2")), ids="-".join)
def test_layouts_take_the_steps_of_one_device(case):
    """Losses, gradients and weights agree with one device's, within the parity tests' bounds for float32."""
    one = one_device(case[0])
    comparison = parity.compare_runs(helpers.first_steps(run_of(*case), 2), one, parity.bounds(one, None, 1, 1))
    assert not comparison.violations, comparison.violations
