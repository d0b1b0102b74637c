"""Bugs that a layout can have, planted one at a time: the comparison of test_parity.py and `jaxtrain.parity` finds each."""

import math

import jax
import jax.numpy as jnp
import matrix
import pytest

from jaxtrain import sharding
from jaxtrain.kernels import dot, embedding, rope
from jaxtrain.kernels.attention import NOTHING, reference
from jaxtrain.kernels.context import ring

RING = "2 queries a key: fsdp2xseq4"
AXES = "2 queries a key: data2xfsdp2xtensor2"


def wrong_position_offset(monkeypatch):
    """One rank of four takes its positions for one more than they are."""
    right = rope.tables

    def tables(positions, frequencies):
        quarter = positions.shape[1] // 4
        return right(positions.at[:, quarter : 2 * quarter].add(1), frequencies)

    monkeypatch.setattr(rope, "tables", tables)


def leaked_document(monkeypatch):
    """Across borders of shards, a token sees all documents."""
    right = reference.describe_block

    def describe_block(rows, spec, diagonal):
        if not diagonal:
            rows = rows._replace(q_segments=jnp.minimum(rows.q_segments, 1), kv_segments=jnp.minimum(rows.kv_segments, 1))
        return right(rows, spec, diagonal)

    monkeypatch.setattr(reference, "describe_block", describe_block)


def doubled_on(axis, module):
    """The gradient of what `module` scatters is added up twice over a mesh axis."""

    def plant(monkeypatch):
        right = module.scatter

        def scatter(g, rest, dtype):
            return right(2 * g if rest.mesh.shape[axis] > 1 else g, rest, dtype)

        monkeypatch.setattr(module, "scatter", scatter)

    return plant


def doubled_embedding(monkeypatch):
    """The embedding's gradient is added up twice over `data`."""
    right = jax.lax.psum

    def psum(x, axes):
        summed = right(x, axes)
        return right(summed, "data") / 1 if "data" in axes and x.ndim == 2 else summed

    monkeypatch.setattr(embedding.jax.lax, "psum", psum)


def dropped_sum(monkeypatch):
    """The merge keeps the log-sum-exp of what it had, without that of the block it took in."""
    right = ring.merge
    monkeypatch.setattr(ring, "merge", lambda out, lse, other, other_lse: (right(out, lse, other, other_lse)[0], lse))


def even_shares(monkeypatch):
    """The merge weighs two blocks alike, whatever their sums."""

    def merge(out, lse, other, other_lse):
        log_two = math.log(2)
        both = jnp.logaddexp(lse, other_lse)
        either = (lse <= NOTHING / 2) | (other_lse <= NOTHING / 2)
        share, rest = (jnp.where(either, jnp.exp(x - both), jnp.exp(-log_two)) for x in (lse, other_lse))
        share, rest = (jnp.swapaxes(x, 1, 2)[..., None] for x in (share, rest))
        return out * share + other.astype(jnp.float32) * rest, both

    monkeypatch.setattr(ring, "merge", merge)


BUGS = {
    "wrong position offset on one rank": (RING, wrong_position_offset),
    "leaked document": (RING, leaked_document),
    "gradients of matmuls counted twice on data": (AXES, doubled_on("data", dot)),
    "gradients of norms counted twice on tensor": (AXES, doubled_on("tensor", sharding)),
    "gradient of the embedding counted twice on data": (AXES, doubled_embedding),
    "dropped log-sum-exp": (RING, dropped_sum),
    "blocks weighed alike": (RING, even_shares),
}


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug, precision, monkeypatch):
    entry, plant = BUGS[bug]
    model, _ = matrix.MATRIX[entry]
    matrix.allowed(model, precision, 8)  # the reference is without it
    plant(monkeypatch)
    comparison = matrix.against_one_device(entry, precision)
    assert comparison.wrong
    assert not comparison.gradient.ok
    print(comparison.wrong)
