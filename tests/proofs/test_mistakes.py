"""Classic mistakes of a layout: the plan of a layout with one warns of it, and the plan of a mended layout does not."""

import re

import plans
import pytest
from plans import LOOP, ONE_EACH, TWO

from jaxtrain.plan.program import warnings
from jaxtrain.plan.result import Plan


def plan(machine: str, *overrides: str) -> Plan:
    """Return a plan of two layers in a loop over layers, as in most configs."""
    return plans.plan(machine, TWO, LOOP, *overrides)


def told(made: Plan, about: str) -> list[str]:
    return [w for w in made.warnings if about in w]


def test_a_healthy_layout_makes_none():
    made = plan("h200:8", *ONE_EACH)
    for about in ("across nodes", "tokens", "once a step", "too big"):
        assert not told(made, about), about


@pytest.mark.more
def test_tensor_groups_across_nodes():
    made = plan("h200:2x2", "mesh.tensor=4", "train.global_batch=2", "train.grad_accum=2")
    (warning,) = told(made, "across nodes")
    assert "tensor groups of 4 reach across nodes of 2 GPUs" in warning and "set mesh.tensor=2 or less" in warning
    # The table of collectives lists its cost.
    over = [c for c in made.collectives if c.axis == "tensor"]
    sent = float(re.findall(r"sends ([\d.]+) GB", warning)[0])
    assert sent == pytest.approx(sum(c.network_gib for c in over) * 2**30 / 1e9, abs=0.01)
    assert f"and {sum(c.exposed_ms for c in over):.1f} ms a step" in warning
    mended = plan("h200:2x2", "mesh.tensor=2", "train.global_batch=2", "train.grad_accum=1")
    assert not told(mended, "across nodes")


def test_microbatches_too_small_to_overlap_their_weights():
    made = plan("h200:8", "data.seq_len=512", "train.global_batch=64", "train.grad_accum=8")
    (warning,) = told(made, "too few to overlap the communication of weights")
    assert warning.startswith("a microbatch gives each GPU 512 tokens")
    (fewer,) = re.findall(r"set train.grad_accum=(\d)\.", warning)
    mended = plan("h200:8", "data.seq_len=512", "train.global_batch=64", f"train.grad_accum={fewer}")
    assert mended.time.step_ms < 0.7 * made.time.step_ms
    assert not told(mended, "too few to overlap the communication of weights")


@pytest.mark.more
def test_matrix_products_with_few_rows():
    made = plan("h200:1", "data.seq_len=128", "train.global_batch=16", "train.grad_accum=16")
    (warning,) = told(made, "takes longer to read its weights than to compute")
    assert "each GPU 128 tokens" in warning and "set train.grad_accum=8." in warning
    mended = plan("h200:1", "data.seq_len=128", "train.global_batch=16", "train.grad_accum=8")
    assert mended.time.gemm_ms < made.time.gemm_ms and not told(mended, "takes longer to read")


@pytest.mark.more
def test_too_few_microbatches_for_communication_once_a_step():
    made = plan("h200:2x4", "data.seq_len=2048", *ONE_EACH)
    (warning,) = told(made, "once a step")
    over = sum(c.exposed_ms for c in made.collectives if c.axis == "data")
    assert made.mesh["data"] == 4 and f"gradients are summed over data once a step, and {over:.1f} ms" in warning
    assert re.search(r"set train.grad_accum=\d+ and train.global_batch=\d+ for 2%", warning)
    assert not told(plan("h200:8", "data.seq_len=2048", *ONE_EACH), "once a step")  # no replicas


@pytest.mark.more
def test_no_remat_where_the_step_does_not_fit():
    batch = ("model.num_layers=3", "train.global_batch=256", "train.grad_accum=1")
    made = plan("h200:8", *batch, "remat.policy=none", "remat.tensors=")
    assert not made.fits
    (warning,) = told(made, "GiB too big")
    assert f"saves {sum(made.memory.saved.values()):.1f} GiB of activations" in warning and "mlp_gate" in warning
    policy, promised = re.findall(r"remat.policy=(\w+) remat.tensors='': about (\d+) GiB less", warning)[0]
    less = made.memory.taken_gib - plan("h200:8", *batch, f"remat.policy={policy}", "remat.tensors=").memory.taken_gib
    assert less == pytest.approx(float(promised), rel=0.25)
    assert not told(plan("h200:8", *ONE_EACH, "remat.policy=none", "remat.tensors="), "too big")


def test_too_few_microbatches_for_the_stages():
    def bubble(*overrides: str) -> list[str]:
        run = plans.config("mesh.stage=4", "mesh.fsdp=1", *overrides)
        return list(warnings._bubble(run, run.mesh.stage))

    (warning,) = bubble("train.global_batch=64", "train.grad_accum=8")
    assert "the bubble of 4 stages is 27% of the step" in warning and "pipeline.groups=2" in warning
    accum, batch = (int(re.findall(rf"{key}=(\d+)", warning)[-1]) for key in ("grad_accum", "global_batch"))
    assert batch == 8 * accum and not bubble(f"train.grad_accum={accum}", f"train.global_batch={batch}")
    assert "interleaved" not in bubble("train.global_batch=60", "train.grad_accum=10")[0], "not in whole runs of stages"
    groups = ("pipeline.schedule=interleaved", "pipeline.groups=4")
    assert not bubble("train.global_batch=64", "train.grad_accum=8", *groups)
    assert not bubble("mesh.stage=1", "train.grad_accum=1", "train.global_batch=8")
