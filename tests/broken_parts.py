"""Models, losses, optimizers and data sources that each break one rule of tests/proofs/test_contract.py."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxtrain.data.batches import open_source
from jaxtrain.kernels.embedding import TABLE
from jaxtrain.models.module import normal, param
from jaxtrain.models.transformer import Transformer
from jaxtrain.step.loss import cross_entropy

# ---- Families


class Unruled(Transformer):
    """A model with a parameter that no layer reads, and whose logical axis has no sharding rule."""

    shape, axes = (8,), ("colour",)

    def __init__(self, model: Any, kernel: Any, remat: Any, ctx: Any, rngs: nnx.Rngs):
        super().__init__(model, kernel, remat, ctx, rngs)
        self.more = param(rngs, self.shape, self.axes, normal(0.1), ctx.numerics.params)


class Dead(Unruled):
    """A model with a parameter that no layer reads."""

    shape, axes = (264, 32), TABLE


class Peeking(Transformer):
    """A model in which each token's output depends on the next token."""

    shift = -1

    def __call__(self, tokens_BT: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        x = super().__call__(tokens_BT, segments_BT, positions_BT)
        return x + 0.1 * jnp.roll(x, self.shift, axis=1)


class Mixing(Peeking):
    """A model in which each token's output depends on the token before it, even if that belongs to another document."""

    shift = 1


class Forgetful(Transformer):
    """A model whose decode ignores the segments in the cache, so that each token is generated as if it were the first."""

    def decode(self, tokens_BT: jax.Array, cache: Any) -> Any:
        out, new = super().decode(tokens_BT, dataclasses.replace(cache, segments_BS=0 * cache.segments_BS))
        return out, new


def _family(model: type[Transformer]) -> Any:
    return type("Family", (), {"build": staticmethod(model)})


unruled, dead, peeking, mixing, forgetful = map(_family, (Unruled, Dead, Peeking, Mixing, Forgetful))

# ---- Losses


def leaning(hidden, head, batch, spec):
    """Return a loss that also depends on tokens of weight 0. It is still linear in the loss weights."""
    return cross_entropy(hidden, head, batch, spec) * (1 + 0.1 * jnp.tanh(jnp.mean(hidden)))


def half_gradient(hidden, head, batch, spec):
    value = cross_entropy(hidden, head, batch, spec)
    return value / 2 + jax.lax.stop_gradient(value / 2)


def misspelt(hidden, head, batch, spec):
    return cross_entropy(hidden, head, batch | {"weights": batch["wieghts"]}, spec)


# ---- Optimizers


def restless(optimizer, dtypes, axes, own):
    return optax.stateless(lambda updates, params: jax.tree.map(lambda g: jnp.sign(g + 1e-9), updates))


def whole_moments(optimizer, dtypes, axes, own):
    """Return an optimizer whose moments are named m0, m1, ..., so that no name shows the moment's parameter."""
    return optax.GradientTransformation(
        lambda params: {f"m{i}": jnp.zeros_like(p) for i, p in enumerate(jax.tree.leaves(params))},
        lambda updates, state, params=None: (updates, state),
    )


# ---- Sources


class _Source:
    def __init__(self, data, split, global_batch, own):
        self.inner = open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir="")

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def batch(self, step, rows=None):
        return self.changed(self.inner.batch(step, rows))


class Counting(_Source):
    calls = itertools.count()

    def changed(self, batch):
        return batch | {"tokens": batch["tokens"] + next(self.calls) % 2}


class Crossing(_Source):
    """A source in which the last token of a document counts in the loss. Its target is the next document's first token."""

    def changed(self, batch):
        return batch | {"weights": np.ones_like(batch["weights"])}


class Shifted(_Source):
    def changed(self, batch):
        return batch | {"positions": batch["positions"] + 1}
