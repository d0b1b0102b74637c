"""Every layout takes the same steps: losses, gradients and parameters on 8 fake devices against one device.

jaxtrain/train/parity.py defines the comparison and its bounds. tests/matrix.py lists the layouts. By default a sample of the
layouts runs; `./run.sh test tests/proofs/test_parity.py --campaign` runs all of them.
"""

import itertools

import helpers
import jax
import matrix
import numpy as np
import pytest

from jaxtrain.config.schema import MESH_AXES
from jaxtrain.train import evaluate, parity


def test_the_sample_has_every_pair_of_axes():
    """A campaign also has every axis with every stage of ZeRO, and triples."""
    axes = {*itertools.combinations(MESH_AXES, 2)}
    assert axes <= matrix.pairs([*matrix.SAMPLE, *matrix.SAMPLE_BF16])
    assert axes | {*itertools.product(MESH_AXES, [f"ZeRO {n}" for n in range(4)])} == matrix.pairs(matrix.MATRIX)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_documents_straddle_shards(ranks):
    """The test's premise: each border between two chunks of the zigzag order is inside a document of some row."""
    segments = helpers.host_batch(matrix.config("2 queries a key", "one", "f32"), 0)["segments"]
    assert (segments.max(axis=1) >= 4).all()
    chunk = segments.shape[1] // (2 * ranks)
    for border in range(chunk, segments.shape[1], chunk):
        assert (segments[:, border - 1] == segments[:, border]).any(), border


OFTEN = [*((name, "f32") for name in matrix.SAMPLE), *((name, "bf16") for name in matrix.SAMPLE_BF16)]
CASES = dict.fromkeys([*OFTEN, *((name, "f32") for name in matrix.MATRIX)])


@pytest.mark.parametrize("case", helpers.few(CASES, *OFTEN), ids="-".join)
def test_matrix(case):
    """A layout takes the steps of one device, and its state stays sharded (helpers.first_steps)."""
    entry, precision = case
    comparison = matrix.against_one_device(entry, precision)
    assert not comparison.violations, comparison.violations
    jax.clear_caches()  # else one process would hold all these programs


def test_evaluation_loss_does_not_depend_on_batches_and_layouts():
    """The loss of 37 sequences is equal in batches of 16 on one device and of 4 on a mesh. Padding fills the last batch."""
    meshes = ({}, {"train.grad_accum": 4, "mesh.fsdp": 2, "mesh.seq": 2})
    one, many = (held_out_loss(mesh) for mesh in meshes)
    assert many == pytest.approx(one, abs=1e-6)


def held_out_loss(mesh: dict[str, int]) -> float:
    run = helpers.tiny({"eval.sequences": 37, "model.num_layers": 1, **mesh})
    made = helpers.program(run)
    held_out = helpers.batches(run.data, run.train.global_batch // run.train.grad_accum, "validation")
    how = (helpers.start(made).params, held_out, made.eval_batch, made.context, run.eval.sequences)
    mean = evaluate.evaluate(lambda params, batch: (batch["weights"].sum(), 1.0, {}), *how)  # the mean of the batches' weights
    weights = [held_out.batch(i)["weights"].sum(1) for i in range(-(-37 // held_out.global_batch))]
    assert mean["loss"] * len(weights) == np.concatenate(weights)[:37].sum()
    return evaluate.evaluate(made.eval_step, *how)["loss"]


@pytest.mark.more
@pytest.mark.parametrize("layout", [{"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.seq": 2}, {"train.grad_accum": 4}])
def test_twenty_steps_on_text_match_one_device(layout, tmp_path_factory):
    """The loss falls over 20 steps, on a mesh as on one device. Microbatches have different numbers of targets."""
    text = helpers.text_file(tmp_path_factory.getbasetemp() / "lines.tok")
    one, many = (helpers.tiny({"data.source": str(text)} | more) for more in ({}, layout))
    batch = helpers.host_batch(one, 0)
    assert (batch["segments"].max(axis=1) > 1).mean() > 0.3
    assert len({*batch["weights"].reshape(4, -1).sum(axis=1).tolist()}) > 1
    reference, got = (helpers.train(run, 20).taken for run in (one, many))
    assert reference.loss[-1] < reference.loss[0] - 0.3
    comparison = parity.compare_runs(got, reference, parity.bounds(reference, None, 1, 1))
    assert not comparison.violations, comparison.violations
