"""Data sources, losses and optimizers that a config can name, as `sources:poisoned`: they go wrong where a test wants it."""

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

MARK = 250  # the first token of rows at which a loss or a gradient goes wrong
BEFORE: dict[int, Callable[[], None]] = {}  # what `watched` does before it gives a training batch, by its number


class Source:
    """Made-up data; with marked and poisoned batches, and with something to do before a batch is there."""

    synthetic = False
    fingerprint = {"source": "own"}

    def __init__(
        self,
        batches: Any,
        *,
        marked: Sequence[int] = (),
        poisoned: Sequence[int] = (),
        rows: slice = slice(None),  # of a batch, that are marked
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
    """A source for `data.source`; held-out data is never changed."""

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
marked_behind = _source(marked=(6,), rows=slice(4, None))  # in the second of two microbatches
watched = _source(before=BEFORE)


def fail() -> None:
    """As a source that cannot read."""
    raise OSError("the disk is on fire\nand the house too")


def interrupt() -> None:
    """As Ctrl-C."""
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
    """Sign descent: no moments, so that its checkpoints differ from Adam's."""
    return optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))


def breaking(optimizer: Any, dtypes: Any, axes: Any) -> Any:
    """Sign descent that makes one weight of the second layer NaN after six updates."""

    def init(params: Any) -> Any:
        return {"count": jnp.zeros((), jnp.int32)}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        made = jax.tree.map(jnp.sign, grads)
        gate = made["layers"]["mlp"]["gate"]
        made["layers"]["mlp"]["gate"] = gate.at[1, 0, 0].set(jnp.where(state["count"] == 5, jnp.nan, gate[1, 0, 0]))
        return made, {"count": state["count"] + 1}

    return optax.GradientTransformation(init, update)


class Doubled:
    """A family is whatever has `build`. The embedding is doubled, so that it can be told from the built-in one."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        model = build_as(llama.STRUCTURE, *args, **kwargs)
        model.embed.embedding.set_value(model.embed.embedding.get_value() * 2)
        return model


family = Doubled()


# ---- For processes that are killed


class Gated:
    """Stops before step GATE_STEP until GATE_FILE appears, so that a signal can be sent at exactly that step. As long as it
    holds back what the training loop itself waits for, it says so in another file."""

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
    """Whether the main thread waits for a batch."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame and frame.f_code is not BatchFeed.next.__code__:
        frame = frame.f_back
    return frame is not None


class AtEval(Gated):
    """Held-out data that is never there, once a file asks for that."""

    def batch(self, step: int, rows: Any = None) -> Any:
        while Path(os.environ["GATE_FILE"]).with_suffix(".no-eval").exists():
            Path(os.environ["GATE_FILE"]).with_suffix(".in-eval").touch()
            time.sleep(0.01)
        return self.batches.batch(step, rows)


def gated(data: Any, split: str, global_batch: int) -> Gated:
    """Python's standard library, behind the gate."""
    stdlib = pipeline.open_source(data, "stdlib", split=split, global_batch=global_batch, data_dir=Paths().data)
    return Gated(stdlib) if split == "train" else AtEval(stdlib)
