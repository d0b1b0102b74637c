"""Every layout takes the same steps: losses, gradients and parameters on 8 fake devices against one.

What is compared, and how far apart rounding may bring it, is said and done in jaxtrain/parity/compare.py. The matrix of layouts
stands in matrix.py: the suite tries a sample of it, in float32 and bfloat16, and all of it on request:
`./run.sh test tests/proofs/test_parity.py tests/proofs/test_zero.py --campaign`.
"""

import dataclasses

import helpers
import jax
import ledger
import matrix
import numpy as np
import pytest

from jaxtrain import evaluate
from jaxtrain.parity import compare
from jaxtrain.state import abstract_tensors, from_tensors

MESHES = {
    "data=8": {"mesh.data": 8},
    "fsdp=8": {"mesh.fsdp": 8},
    "data=2 x fsdp=4": {"mesh.data": 2, "mesh.fsdp": 4},
    "fsdp=4 x tensor=2": {"mesh.fsdp": 4, "mesh.tensor": 2},
    "fsdp=2 x tensor=4": {"mesh.fsdp": 2, "mesh.tensor": 4},
    "fsdp=2 x tensor=2 x seq=2": {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.seq": 2},
}
OFTEN = {"fsdp=2 x tensor=2 x seq=2"}  # the matrix has three steps on the others; a campaign takes twenty on all
STEPS = 20
# All that can be switched on at once, to be split over a mesh too.
EVERYTHING = {
    **matrix.MODELS["everything"],
    "remat.policy": "attention",
    "remat.every": 3,
    "attention.impl": "chunked",
    "train.grad_accum": 2,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(helpers.text_file(tmp_path_factory.mktemp("text") / "lines.tok"))


def assert_same_steps(run, reference, steps: int = STEPS) -> None:
    ours, theirs = helpers.train(run, steps), helpers.train(reference, steps)
    assert ours.tensors.keys() == theirs.tensors.keys()
    comparison = compare.compare(ours.taken, theirs.taken, compare.bounds(theirs.taken, None, 1, 1))
    assert not comparison.wrong, comparison.wrong


def test_batches_are_packed(text):
    """The premise of this file: rows hold several documents, and documents straddle rows."""
    batch = helpers.host_batch(helpers.tiny({"data.source": text}), 0)
    segments, positions = batch["segments"], batch["positions"]
    assert (segments.max(axis=1) > 1).mean() > 0.3
    assert (positions == 0).sum() > len(segments)
    assert (batch["weights"] == 0).any()
    synthetic = helpers.host_batch(helpers.tiny(), 0)
    assert (synthetic["segments"].max(axis=1) >= 4).all()


def test_losses_fall(text):
    """Twenty steps that learn nothing would agree for the wrong reason."""
    for source in ("synthetic", text):
        curve = helpers.train(helpers.tiny({"data.source": source}), STEPS).loss
        assert curve[-1] < curve[0] - 0.3


@pytest.mark.parametrize(
    ("mesh", "accum"),
    [
        *(pytest.param(m, 1, marks=() if m in OFTEN else pytest.mark.more) for m in MESHES),
        pytest.param("data=2 x fsdp=4", 2, marks=pytest.mark.more),
        pytest.param("fsdp=2 x tensor=2 x seq=2", 2, marks=pytest.mark.more),
    ],
)
def test_mesh_matches_one_device(mesh, accum, text):
    """Real text on the meshes without accumulation, made-up documents with it: both are compared with one plain run."""
    source = {"data.source": text} if accum == 1 else {}
    assert_same_steps(helpers.tiny(MESHES[mesh] | source | {"train.grad_accum": accum}), helpers.tiny(source))


def test_accumulation_matches_one_batch(text):
    """Microbatches with different numbers of targets: the mean over all tokens, not the mean of means."""
    source = {"data.source": text}
    targets = helpers.host_batch(helpers.tiny(source), 0)["weights"].reshape(4, -1).sum(axis=1)
    assert len(set(targets.tolist())) > 1
    assert_same_steps(helpers.tiny(source | {"train.grad_accum": 4}), helpers.tiny(source))


@pytest.mark.more
def test_every_feature_on_a_mesh():
    plain = {
        k: v for k, v in EVERYTHING.items() if k not in ("remat.policy", "remat.every", "attention.impl", "train.grad_accum")
    }
    assert_same_steps(helpers.tiny(MESHES["fsdp=2 x tensor=4"] | EVERYTHING), helpers.tiny(plain), steps=8)


def test_the_matrix_is_whole():
    """At least sixty layouts; a sample of it in which every setting of the others occurs."""
    assert len(matrix.MATRIX) >= 60
    assert {*matrix.SAMPLE, *matrix.SAMPLE_BF16} <= matrix.MATRIX.keys()

    def settings(names):
        runs = [(matrix.MATRIX[n][0], matrix.config(*matrix.MATRIX[n], "f32")) for n in names]
        for model, run in runs:
            yield from {("model", model), *((a, size > 1) for a, size in dataclasses.asdict(run.mesh).items())}
            yield from {("zero", run.sharding.zero), ("gather", run.sharding.gather), ("kernel", run.attention.impl)}
            yield from {("context", run.attention.context), ("accum", run.train.grad_accum > 1)}
            yield from {("remat", run.remat.policy != "none"), ("schedule", run.pipeline.schedule)}

    assert {*settings(matrix.MATRIX)} == {*settings([*matrix.SAMPLE, *matrix.SAMPLE_BF16])}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_documents_straddle_borders_of_shards(ranks):
    """At every border between two chunks of the zigzag order some rows have one document on both sides; all have several."""
    segments = helpers.host_batch(matrix.config("window", "one", "f32"), 0)["segments"]
    assert (segments.max(axis=1) >= 4).all()
    chunk = segments.shape[1] // (2 * ranks)
    for border in range(chunk, segments.shape[1], chunk):
        assert (segments[:, border - 1] == segments[:, border]).any(), border


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"entry", "precision"} <= {*metafunc.fixturenames}:
        every = ledger.is_campaign(metafunc.config)
        chosen = {"f32": matrix.MATRIX if every else matrix.SAMPLE, "bf16": matrix.MATRIX if every else matrix.SAMPLE_BF16}
        metafunc.parametrize(("entry", "precision"), [(entry, p) for p, names in chosen.items() for entry in names])


def test_matrix(entry, precision, request):
    if ledger.is_campaign(request.config):
        jax.clear_caches()  # two hundred programs in one process
    comparison = matrix.against_one_device(entry, precision)
    assert not comparison.wrong, comparison.wrong


@pytest.mark.parametrize("mesh", helpers.few(MESHES, "fsdp=2 x tensor=4", "data=2 x fsdp=4"))
def test_initial_state_is_bit_identical(mesh):
    ours, theirs = (helpers.initial_tensors(helpers.tiny(overrides)) for overrides in (MESHES[mesh], {}))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.parametrize("mesh", helpers.few(MESHES, *OFTEN))
def test_state_is_split_and_stays_split(mesh, text):
    """Parameters and both moments lie as the program says after a step, and no device holds more than its share."""
    run = helpers.tiny(MESHES[mesh] | {"data.source": text})
    program, compiled = helpers.program(run), helpers.train_step(run)
    state, _ = compiled.output_shardings
    for (path, out), (_, want) in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree_util.tree_leaves_with_path(program.state), strict=True
    ):
        assert out.is_equivalent_to(want.sharding, len(want.shape)), jax.tree_util.keystr(path)
    moments = program.state.optimizer[0]
    for moment in (moments.mu, moments.nu):
        assert jax.tree.map(lambda a: a.sharding, moment) == jax.tree.map(lambda a: a.sharding, program.state.params)
    shards = run.mesh.fsdp * run.mesh.tensor * run.mesh.seq
    for path, a in jax.tree_util.tree_leaves_with_path(program.state.params):
        if a.size > 4096:
            held = np.prod(a.sharding.shard_shape(a.shape))
            assert held * shards == a.size, jax.tree_util.keystr(path)


def test_held_out_loss_is_that_of_the_same_sequences_however_they_are_batched():
    """37 sequences: of 16, 8 or 4 at a time, on one device and on meshes, the last batch filled up with padding."""
    experts, losses = {"model.num_experts": 4}, []
    initial = helpers.initial_tensors(helpers.tiny(experts))
    for accum, mesh in ((1, {}), (4, {}), (2, {"mesh.fsdp": 4}), (4, {"mesh.fsdp": 2, "mesh.seq": 2})):
        run = helpers.tiny({"train.grad_accum": accum, "eval.sequences": 37, **experts, **mesh})
        made = helpers.program(run)
        homes = {name: a.sharding for name, a in abstract_tensors(made.state).items()}
        params = from_tensors(made.state, jax.device_put(initial, homes)).params
        held_out = helpers.batches(run.data, run.train.global_batch // accum, "validation")
        how = (params, held_out, made.eval_batch, made.context, run.eval.sequences)
        losses.append(evaluate.evaluate(made.eval_step, *how))
        mean = evaluate.evaluate(lambda params, batch: (batch["weights"].sum(), 1.0), *how)  # of a batch's weight
        weights = [held_out.batch(i)["weights"].sum(1) for i in range(-(-37 // held_out.global_batch))]
        assert mean * len(weights) == np.concatenate(weights)[:37].sum()
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-6)
