"""Every layout takes the same steps: losses, gradients and parameters on 8 fake devices against one device.

jaxtrain/parity/compare.py defines the comparison and its bounds. tests/matrix.py lists the layouts. By default a sample of the
layouts runs, in float32 and bfloat16; `./run.sh test tests/proofs/test_parity.py --campaign` runs all of them.
"""

import helpers
import jax
import ledger
import matrix
import numpy as np
import pytest

from jaxtrain.parity import compare
from jaxtrain.train import evaluate
from jaxtrain.train.state import abstract_tensors, from_tensors

MESHES = {
    "data=8": {"mesh.data": 8},
    "fsdp=8": {"mesh.fsdp": 8},
    "data=2 x fsdp=4": {"mesh.data": 2, "mesh.fsdp": 4},
    "fsdp=4 x tensor=2": {"mesh.fsdp": 4, "mesh.tensor": 2},
    "fsdp=2 x tensor=4": {"mesh.fsdp": 2, "mesh.tensor": 4},
    "fsdp=2 x tensor=2 x seq=2": {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.seq": 2},
}
STEPS = 20


# ---- The matrix: three steps of every layout


def test_the_sample_has_every_model_and_every_pair_of_settings():
    """The sample has every pair of settings that any layout combines, at least 414. Triples are left to the campaign."""
    sample = [*matrix.SAMPLE, *matrix.SAMPLE_BF16]
    assert {*sample} <= matrix.MATRIX.keys()
    assert {model for model, _ in matrix.MATRIX.values()} == {matrix.MATRIX[name][0] for name in sample}
    every = matrix.pairs(matrix.MATRIX)
    assert len(matrix.MATRIX) >= 230 and len(every) >= 414
    assert not every - matrix.pairs(sample)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_documents_straddle_shards(ranks):
    """The test's premise: each border between two chunks of the zigzag order is inside a document of some row."""
    segments = helpers.host_batch(matrix.config("window", "one", "f32"), 0)["segments"]
    assert (segments.max(axis=1) >= 4).all()
    chunk = segments.shape[1] // (2 * ranks)
    for border in range(chunk, segments.shape[1], chunk):
        assert (segments[:, border - 1] == segments[:, border]).any(), border


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"entry", "precision"} <= {*metafunc.fixturenames}:
        every = ledger.is_campaign(metafunc.config)
        chosen = {"f32": matrix.MATRIX if every else matrix.SAMPLE, "bf16": matrix.MATRIX if every else matrix.SAMPLE_BF16}
        cases = [(entry, p) for p, names in chosen.items() for entry in names]
        # The names are explicit: pytest would replace long names by numbers, and a number is another layout in a campaign.
        metafunc.parametrize(("entry", "precision"), cases, ids=["-".join(case) for case in cases])


def test_matrix(entry, precision, request):
    """A layout takes the steps of one device, and its state stays sharded (helpers.first_steps)."""
    if ledger.is_campaign(request.config):
        jax.clear_caches()  # else one process would hold two hundred programs
    comparison = matrix.against_one_device(entry, precision)
    assert not comparison.wrong, comparison.wrong


# ---- The state


@pytest.mark.parametrize("mesh", helpers.few(MESHES, "fsdp=2 x tensor=4", "data=2 x fsdp=4"))
def test_initial_state_is_bit_identical(mesh):
    ours, theirs = (helpers.initial_tensors(helpers.tiny(overrides)) for overrides in (MESHES[mesh], {}))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.parametrize("mesh", MESHES)
def test_no_device_holds_more_than_its_share(mesh):
    run = helpers.tiny(MESHES[mesh])
    state = helpers.program(run).state
    moments = state.optimizer[0]
    for moment in (moments.mu, moments.nu):
        assert jax.tree.map(lambda a: a.sharding, moment) == jax.tree.map(lambda a: a.sharding, state.params)
    shards = run.mesh.fsdp * run.mesh.tensor * run.mesh.seq
    for path, a in jax.tree_util.tree_leaves_with_path(state.params):
        if a.size > 4096:
            held = np.prod(a.sharding.shard_shape(a.shape))
            assert held * shards == a.size, jax.tree_util.keystr(path)


# ---- Evaluation


@pytest.mark.parametrize(
    ("accum", "mesh"),
    [(4, {}), pytest.param(2, {"mesh.fsdp": 4}, marks=pytest.mark.more), (4, {"mesh.fsdp": 2, "mesh.seq": 2})],
)
def test_evaluation_loss_does_not_depend_on_batches_and_layouts(accum, mesh):
    """The loss of 37 sequences is equal in batches of 16, 8 or 4, on one device and on meshes. Padding fills the last batch."""
    assert held_out_loss(accum, mesh) == pytest.approx(held_out_loss(1, {}), abs=1e-6)


def held_out_loss(accum: int, mesh: dict[str, int]) -> float:
    experts = {"model.num_experts": 4, "model.num_layers": 2}
    run = helpers.tiny({"train.grad_accum": accum, "eval.sequences": 37, **experts, **mesh})
    made = helpers.program(run)
    homes = {name: a.sharding for name, a in abstract_tensors(made.state).items()}
    initial = helpers.initial_tensors(helpers.tiny(experts))
    params = from_tensors(made.state, jax.device_put(initial, homes)).params
    held_out = helpers.batches(run.data, run.train.global_batch // accum, "validation")
    how = (params, held_out, made.eval_batch, made.context, run.eval.sequences)
    mean = evaluate.evaluate(lambda params, batch: (batch["weights"].sum(), 1.0, {}), *how)  # the mean of the batches' weights
    weights = [held_out.batch(i)["weights"].sum(1) for i in range(-(-37 // held_out.global_batch))]
    assert mean["loss"] * len(weights) == np.concatenate(weights)[:37].sum()
    return evaluate.evaluate(made.eval_step, *how)["loss"]


# ---- Twenty steps on real text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(helpers.text_file(tmp_path_factory.mktemp("text") / "lines.tok"))


def assert_same_steps(run, reference, steps: int = STEPS) -> None:
    ours, theirs = helpers.train(run, steps), helpers.train(reference, steps)
    assert ours.tensors.keys() == theirs.tensors.keys()
    comparison = compare.compare(ours.taken, theirs.taken, compare.bounds(theirs.taken, None, 1, 1))
    assert not comparison.wrong, comparison.wrong


@pytest.mark.more
@pytest.mark.parametrize(
    ("mesh", "accum"), [*((mesh, 1) for mesh in MESHES), ("data=2 x fsdp=4", 2), ("fsdp=2 x tensor=2 x seq=2", 2), ("one", 4)]
)
def test_twenty_steps_on_text_match_one_device(mesh, accum, text):
    """The loss falls over 20 steps, on meshes as on one device. Many rows hold several documents, and microbatches have
    different numbers of targets.
    """
    source = {"data.source": text}
    batch = helpers.host_batch(helpers.tiny(source), 0)
    assert (batch["segments"].max(axis=1) > 1).mean() > 0.3
    assert len({*batch["weights"].reshape(4, -1).sum(axis=1).tolist()}) > 1
    reference = helpers.tiny(source)
    curve = helpers.train(reference, STEPS).loss
    assert curve[-1] < curve[0] - 0.3
    assert_same_steps(helpers.tiny(MESHES.get(mesh, {}) | source | {"train.grad_accum": accum}), reference)


@pytest.mark.more
def test_every_feature_on_a_mesh():
    """The model `everything` (tests/matrix.py) takes the steps of one device with grouped remat, chunked attention and two
    microbatches.
    """
    plain = matrix.MODELS["everything"]
    more = {"remat.policy": "attention", "remat.every": 3, "attention.impl": "chunked", "train.grad_accum": 2}
    assert_same_steps(helpers.tiny(MESHES["fsdp=2 x tensor=4"] | plain | more), helpers.tiny(plain), steps=8)
