"""Bugs that were reported against trainers: documents that leak into each other, wrong gradients, data of other processes.

documents    test_parity.py compares every layout with one device, with documents that straddle its shards. Here one device is
             compared with itself on the same documents in separate sequences.
gradients    of layouts of several mesh axes: test_parity.py.
processes    test_packing.py reads the rows of other processes, this file places them, and campaign/test_elastic.py trains with
             one, two and four processes.
"""

import dataclasses
from collections.abc import Mapping

import helpers
import matrix
import numpy as np
import pytest

from jaxtrain.config.schema import RunConfig
from jaxtrain.step.batch import place_batch
from jaxtrain.train import parity


def separate_documents(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a packed batch, arrays (B, T), with each of its documents in a sequence of its own, padded to T."""
    pairs = [(row, number) for row, segments in enumerate(batch["segments"]) for number in np.unique(segments[segments > 0])]
    out = {name: np.zeros((len(pairs), a.shape[1]), a.dtype) for name, a in batch.items()}
    for i, (row, number) in enumerate(pairs):
        own = batch["segments"][row] == number
        for name, a in batch.items():
            out[name][i, : own.sum()] = 1 if name == "segments" else a[row, own]
    return out


def step(run: RunConfig, batch: Mapping[str, np.ndarray]) -> parity.Trained:
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, global_batch=len(batch["tokens"])))
    made = helpers.program(run)
    return parity.take_steps(made, helpers.compiled(made), helpers.start(made), lambda i: dict(batch), 1)[0]


@pytest.mark.parametrize("model", helpers.few(matrix.MODELS, "2 queries a key"))
def test_packed_documents_train_as_separate_ones(model):
    run = matrix.config(model, "one", "f32")
    packed = helpers.host_batch(run, 0)
    apart = separate_documents(packed)
    assert len(apart["tokens"]) > 3 * len(packed["tokens"])
    reference = step(run, apart)
    comparison = parity.compare_runs(step(run, packed), reference, parity.bounds(reference, None, 1, 1))
    assert not comparison.violations, comparison.violations


def test_rows_that_processes_read_are_placed_as_a_whole_batch():
    """A process gives its rows with their numbers in the batch. Their order does not matter."""
    made = helpers.program(matrix.config("2 queries a key", "data2xfsdp2xseq2/train.grad_accum=2", "f32"))
    host = helpers.host_batch(made.run, 0)
    rows = np.random.default_rng(0).permutation(len(host["tokens"]))
    whole = place_batch(host, made.batch, made.context)
    got = place_batch({name: a[rows] for name, a in host.items()}, made.batch, made.context, rows.tolist())
    assert got.keys() == whole.keys()
    for name, a in whole.items():
        assert got[name].sharding == a.sharding
        np.testing.assert_array_equal(got[name], a)
