"""Data sources, losses and optimizers for configs, such as `sources:poisoned`. Most fail at a step that a test chooses."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config import Paths
from jaxtrain.data import pipeline
from jaxtrain.models.families import llama
from jaxtrain.models.transformer import build_as
from jaxtrain.train.batch_feed import BatchFeed
from jaxtrain.train.loss import cross_entropy

MARK = 250  # first token of the rows at which a loss or a gradient goes wrong
# batch number -> a function that `watched` calls before it returns this training batch
BEFORE: dict[int, Callable[[], None]] = {}


class Source:
    """Synthetic data. Batches with a number in `marked` have MARK as first token, batches in `poisoned` have NaN weights.

    `before`: batch number -> a function that is called before the batch is made.
    """

    synthetic = False
    fingerprint = {"source": "own"}

    def __init__(
        self,
        batches: Any,
        *,
        marked: Sequence[int] = (),
        poisoned: Sequence[int] = (),
        rows: slice = slice(None),  # the rows of a batch that are marked
        before: Mapping[int, Callable[[], None]] = MappingProxyType({}),
    ):
        self.batches, self.marked, self.poisoned, self.rows, self.before = batches, marked, poisoned, rows, before

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

    def opened(data: Any, split: str, global_batch: int) -> Source:
        batches = pipeline.open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir="")
        return Source(batches, **(how if split == "train" else {}))

    return opened


clean = _source()
poisoned = _source(poisoned=(6,))
poisoned_long = _source(poisoned=(6, 7, 8))
poisoned_for_good = _source(poisoned=range(6, 1000))
marked = _source(marked=(41,))
marked_early = _source(marked=(6,))
marked_behind = _source(marked=(6,), rows=slice(4, None))  # the rows of the second of two microbatches
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


def signs(optimizer: Any, dtypes: Any, axes: Any) -> Any:
    """Return sign descent. It has no moments, so its checkpoints differ from Adam's."""
    return optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))


def breaking(optimizer: Any, dtypes: Any, axes: Any) -> Any:
    """Return sign descent that sets one weight of the second layer to NaN in its sixth update."""

    def init(params: Any) -> Any:
        return {"count": jnp.zeros((), jnp.int32)}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        made = jax.tree.map(jnp.sign, grads)
        gate = made["layers"]["mlp"]["gate"]
        made["layers"]["mlp"]["gate"] = gate.at[1, 0, 0].set(jnp.where(state["count"] == 5, jnp.nan, gate[1, 0, 0]))
        return made, {"count": state["count"] + 1}

    return optax.GradientTransformation(init, update)


class Doubled:
    """A model family, as an object with a method `build`: llama with a doubled embedding, so that tests can detect its use."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        model = build_as(llama.STRUCTURE, *args, **kwargs)
        model.embed.embedding.set_value(model.embed.embedding.get_value() * 2)
        return model


family = Doubled()


# ---- For processes that are killed


class Gated:
    """A source that waits before step GATE_STEP until GATE_FILE exists, so that a test can send a signal at exactly that step.

    While the training loop waits for a batch that is held back, the source creates another file, GATE_FILE's name with .waits.
    """

    def __init__(self, batches: Any):
        self.batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def batch(self, step: int, rows: Any = None) -> Any:
        gate = Path(os.environ["GATE_FILE"])
        while step >= int(os.environ.get("GATE_STEP", 1 << 30)) and not gate.exists():
            if _loop_waits():
                gate.with_suffix(".waits").touch()
            time.sleep(0.01)
        return self.batches.batch(step, rows)


def _loop_waits() -> bool:
    """Return whether the main thread waits for a batch."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame and frame.f_code is not BatchFeed.next.__code__:
        frame = frame.f_back
    return frame is not None


class AtEval(Gated):
    """Held-out data whose batches are held back while a file exists: GATE_FILE's name with .no-eval."""

    def batch(self, step: int, rows: Any = None) -> Any:
        while Path(os.environ["GATE_FILE"]).with_suffix(".no-eval").exists():
            Path(os.environ["GATE_FILE"]).with_suffix(".in-eval").touch()
            time.sleep(0.01)
        return self.batches.batch(step, rows)


def gated(data: Any, split: str, global_batch: int) -> Gated:
    """Return Python's standard library as gated data, for training or evaluation."""
    stdlib = pipeline.open_source(data, "stdlib", split=split, global_batch=global_batch, data_dir=Paths().data)
    return Gated(stdlib) if split == "train" else AtEval(stdlib)
