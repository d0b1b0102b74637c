"""Bugs of a layout, planted one at a time: the comparison of `jaxtrain.parity` finds each."""

import jax
import jax.numpy as jnp
import matrix
import pytest

from jaxtrain import sharding, zero
from jaxtrain.kernels import rope
from jaxtrain.kernels.attention import NOTHING, reference
from jaxtrain.kernels.context import ring
from jaxtrain.train import loss

RING = "2 queries a key: fsdp2xseq4"
AXES = "2 queries a key: data2xfsdp2xtensor2"
HSDP = "2 queries a key: data2xfsdp4/train.grad_accum=2"


def wrong_position_offset(monkeypatch):
    """Shift the positions of the second rank along `seq` by one."""
    right = rope.tables

    def tables(positions, *how):
        return right(positions + (jax.lax.axis_index("seq") == 1), *how)

    monkeypatch.setattr(rope, "tables", tables)


def leaked_document(monkeypatch):
    """Let a token attend to all documents in the earlier chunks of its sequence."""
    right = reference.describe_block

    def describe_block(rows, spec, diagonal):
        if not diagonal:
            rows = rows._replace(q_segments=jnp.minimum(rows.q_segments, 1), kv_segments=jnp.minimum(rows.kv_segments, 1))
        return right(rows, spec, diagonal)

    monkeypatch.setattr(reference, "describe_block", describe_block)


def twice_over(axis, module, vectors=False):
    """Return a function that plants a bug: `module` multiplies gradients that it summed over `axis` by the axis's size.

    vectors: the bug affects only gradients of vectors; otherwise only those of matrices and larger arrays.
    """

    def plant(monkeypatch):
        right = module.reduce_gradient

        def reduce_gradient(g, how):
            again = axis in how.summed and (g.ndim == 1) == vectors  # if all gradients doubled, clipping would hide the bug
            return right(g, how) * jax.lax.axis_size(axis) if again else right(g, how)

        monkeypatch.setattr(module, "reduce_gradient", reduce_gradient)

    return plant


def head_twice(monkeypatch):
    """Let the loss multiply the head's gradient by the number of devices along `data`."""
    right = loss._chunked

    def chunked(*args, **how):
        value, d_x, d_head, losses = right(*args, **how)
        return value, d_x, None if d_head is None else d_head * jax.lax.axis_size("data"), losses

    monkeypatch.setattr(loss, "_chunked", chunked)


def dropped_sum(monkeypatch):
    """Let the ring's merge of two attention blocks return the first block's log-sum-exp."""
    right = ring.merge
    monkeypatch.setattr(ring, "merge", lambda one, other: (right(one, other)[0], one[1]))


def blocks_weighed_alike(monkeypatch):
    """Let the ring's merge average two attention blocks instead of weighting them by their softmax sums."""
    right = ring.merge

    def merge(one, other):
        _, both = right(one, other)
        empty = [lse <= NOTHING / 2 for _, lse in (one, other)]
        shares = (jnp.where(empty[0] | empty[1], jnp.exp(lse - both), 0.5) for _, lse in (one, other))
        share, rest = (jnp.swapaxes(x, 1, 2)[..., None] for x in shares)
        return one[0] * share + other[0].astype(jnp.float32) * rest, both

    monkeypatch.setattr(ring, "merge", merge)


def forgotten_shard(monkeypatch):
    """Zero the gradient on the last of the devices along `fsdp` that shard a weight."""
    right = sharding.reduce_gradient

    def reduce_gradient(g, how):
        last = jax.lax.axis_index("fsdp") == jax.lax.axis_size("fsdp") - 1
        return jnp.where(last, 0, right(g, how)) if how.dims else right(g, how)

    monkeypatch.setattr(sharding, "reduce_gradient", reduce_gradient)


BUGS = {
    "wrong position offset on one rank": (RING, wrong_position_offset),
    "leaked document": (RING, leaked_document),
    "gradients of matmuls counted twice on data": (AXES, twice_over("data", sharding)),
    "gradients of norms counted twice on tensor": (AXES, twice_over("tensor", sharding, vectors=True)),
    "gradient of the head counted twice on data": (AXES, head_twice),
    "gradients counted twice at the end of a step": (HSDP, twice_over("data", zero)),
    "part of the gradients forgotten": (AXES, forgotten_shard),
    "dropped log-sum-exp": (RING, dropped_sum),
    "blocks weighed alike": (RING, blocks_weighed_alike),
}


@pytest.fixture
def retraced():
    """Yield a function that clears JAX's caches of traces, to call after the bug is planted. Clear them after the test too."""
    yield jax.clear_caches
    jax.clear_caches()


@pytest.mark.parametrize("precision", ["f32", "bf16"])  # bf16 has wider bounds
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug, precision, monkeypatch, retraced):
    entry, plant = BUGS[bug]
    model, _ = matrix.MATRIX[entry]
    matrix.allowed(model, precision, 8)  # computes the reference without the bug
    plant(monkeypatch)
    retraced()
    comparison = matrix.against_one_device(entry, precision)
    assert not comparison.gradient.ok
    assert any(text.startswith("gradient off by") for text in comparison.wrong)
