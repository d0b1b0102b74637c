"""Data sources, losses and optimizers for configs, such as `sources:poisoned`. Most fail at a step that a test chooses."""

import dataclasses
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.data.batches import open_source
from jaxtrain.step.loss import cross_entropy

MARK = 250  # first token of the rows at which a loss or a gradient goes wrong
# batch number -> a function that `watched` calls before it returns this training batch
BEFORE: dict[int, Callable[[], None]] = {}


@dataclasses.dataclass
class Source:
    """Synthetic data. Batches with a number in `marked` have MARK as first token, batches in `poisoned` have NaN weights."""

    batches: Any
    marked: Sequence[int] = ()
    poisoned: Sequence[int] = ()
    rows: Sequence[int] = range(8)  # the rows of a batch that are marked
    before: Mapping[int, Callable[[], None]] = dataclasses.field(default_factory=dict)  # called before a batch is made

    synthetic: ClassVar = False
    fingerprint: ClassVar = {"source": "own"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def batch(self, step: int, rows: Any = None) -> Any:
        if step in self.before:
            self.before[step]()
        batch = self.batches.batch(step, rows)
        batch["tokens"] = np.where(batch["tokens"] == MARK, 0, batch["tokens"])
        if step in self.marked:
            batch["tokens"][self.rows, 0] = MARK
        if step in self.poisoned:
            batch["weights"] = batch["weights"] * np.float32("nan")
        return batch


def _source(**how: Any) -> Callable[..., Source]:
    """Return a function for `data.source`. The options `how` of Source apply to training data alone."""

    def opened(data: Any, split: str, global_batch: int, own: Any) -> Source:
        batches = open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir="")
        return Source(batches, **(how if split == "train" else {}))

    return opened


clean = _source()
poisoned = _source(poisoned=(3,))
poisoned_for_good = _source(poisoned=range(3, 1000))
marked = _source(marked=(41,))
marked_behind = _source(marked=(3,), rows=range(4, 8))  # the rows of the second of two microbatches
watched = _source(before=BEFORE)


def fail() -> None:
    """Raise the error of a source that cannot read its disk."""
    raise OSError("the disk is on fire\nand the house too")


def interrupt() -> None:
    """Send Ctrl-C to this process."""
    os.kill(os.getpid(), signal.SIGINT)


# ---- Losses and optimizers


def halved(hidden_BTD: Any, head_VD: Any, batch: Any, spec: Any) -> jax.Array:
    return cross_entropy(hidden_BTD, head_VD, batch, spec) / 2


def is_marked(batch: Any) -> jax.Array:
    return (batch["tokens"][:, 0] == MARK).any()


def spiky(hidden_BTD: Any, head_VD: Any, batch: Any, spec: Any) -> jax.Array:
    return cross_entropy(hidden_BTD, head_VD, batch, spec) * jnp.where(is_marked(batch), 100.0, 1.0)


@jax.custom_jvp
def spoiled(x: jax.Array, bad: jax.Array) -> jax.Array:
    return x


@spoiled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    x, bad = primals
    return x, tangents[0] * jnp.where(bad, jnp.nan, 1.0)


def bad_gradient(hidden_BTD: Any, head_VD: Any, batch: Any, spec: Any) -> jax.Array:
    return cross_entropy(spoiled(hidden_BTD, is_marked(batch)), head_VD, batch, spec)


def signs(optimizer: Any, dtypes: Any, axes: Any, own: Any) -> Any:
    """Return sign descent. It has no moments, so its checkpoints differ from Adam's."""
    return optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))


def exploding(optimizer: Any, dtypes: Any, axes: Any, own: Any) -> Any:
    """Return sign descent by steps of 1e30 times the learning rate."""
    return optax.stateless(lambda updates, params: jax.tree.map(lambda g: 1e30 * jnp.sign(g), updates))


def breaking(optimizer: Any, dtypes: Any, axes: Any, own: Any) -> Any:
    """Return sign descent that sets one weight of the second layer to NaN in its sixth update."""

    def init(params: Any) -> Any:
        return {"count": jnp.zeros((), jnp.int32)}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        made = jax.tree.map(jnp.sign, grads)
        gate = made["layers"]["mlp"]["gate"]
        made["layers"]["mlp"]["gate"] = gate.at[1, 0, 0].set(jnp.where(state["count"] == 5, jnp.nan, gate[1, 0, 0]))
        return made, {"count": state["count"] + 1}

    return optax.GradientTransformation(init, update)
