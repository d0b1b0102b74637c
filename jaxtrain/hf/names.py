"""From a model's tensors to those of a Hugging Face checkpoint and back: names, shapes, and the order of axes. No jax."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.config import Model
from jaxtrain.models import family
from jaxtrain.models.hugging_face import HfTensor

COLUMNS = 64  # of a transposed copy at a time: what fits the cache on both sides is several times faster
PREFIX = "params."  # of parameters among the tensors of a train state
# Buffers that old versions of transformers saved, and that follow from config.json.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|original_inv_freq)")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a model, and those of a checkpoint that it is made of: one, or for experts one for each."""

    ours: str  # as checkpoints name it
    theirs: tuple[str, ...]
    shape: tuple[int, ...]  # ours
    their_shape: tuple[int, ...]  # of each of theirs
    how: HfTensor
    sizes: tuple[tuple[str, int], ...]  # of each axis by its letter

    def to_ours(self, stored: Sequence[np.ndarray], dtype: np.dtype[Any], index: Any) -> np.ndarray:
        """A part of ours, contiguous, of all arrays of theirs. Those that `index` leaves out are not touched.

        index: a slice of each axis of ours.
        """
        if not self.how.each_expert:
            return copied(self._turned(stored[0])[index]).astype(dtype, copy=False)
        experts, *rest = index
        parts = [self._turned(x)[tuple(rest)] for x in stored[experts]]
        out = np.empty((len(parts), *parts[0].shape), dtype)
        for room, part in zip(out, parts, strict=True):
            room[...] = copied(part).astype(dtype, copy=False)
        return out

    def to_theirs(self, x: np.ndarray, at: int = 0) -> np.ndarray:
        """The inverse of `to_ours`, contiguous: number `at` of their arrays."""
        theirs, ours = flat(self.how.theirs), flat(self.how.each)
        one = x[at] if self.how.each_expert else x
        return copied(one.transpose([ours.index(a) for a in theirs])).reshape(self.their_shape)

    def _turned(self, x: np.ndarray) -> np.ndarray:
        """One of their arrays with the axes of ours: a view."""
        theirs, ours = flat(self.how.theirs), flat(self.how.each)
        sizes = dict(self.sizes) | {"2": 2}
        x = x.reshape([sizes[a] for a in theirs])
        if "2" in theirs:
            x = np.moveaxis(x, theirs.index("2"), 0)[self.how.half]
            theirs.remove("2")
        return x.transpose([theirs.index(a) for a in ours])

    def called(self, at: int) -> str:
        """What becomes of number `at` of theirs: layers.0.mlp.gate[3], or just layers.0.mlp_norm.scale."""
        return self.ours.removeprefix(PREFIX) + (f"[{at}]" if self.how.each_expert else "")


def flat(axes: str) -> list[str]:
    """The letters of "(N H) D" in their order."""
    return axes.replace("(", "").replace(")", "").split()


def grouped(axes: str) -> list[list[str]]:
    """The letters of each axis of "(N H) D"."""
    return [part.strip("()").split() for part in re.findall(r"\([^)]*\)|\S+", axes)]


def entries(model: Model, names: Mapping[str, HfTensor] | None = None) -> dict[str, Entry]:
    """Every tensor of a model by its name in checkpoints, in the order of layers.

    names: those that are to be used, if not those of model.family.
    """
    known: Mapping[str, HfTensor] = family(model.family).NAMES if names is None else names
    letters = {"D": model.d_model, "N": model.num_heads, "K": model.num_kv_heads, "H": model.head_dim}
    letters |= {"F": model.d_ff, "V": model.vocab_size, "E": model.num_experts, "2": 2}
    absent = {"head": model.tied_head, ".bq": not model.qkv_bias, ".bk": not model.qkv_bias, ".bv": not model.qkv_bias}
    out: dict[str, Entry] = {}

    def add(ours: str, how: HfTensor, layer: int | None) -> None:
        name, called = (text if layer is None else text.replace("{i}", str(layer)) for text in (PREFIX + ours, how.name))
        each = tuple(called.replace("{e}", str(e)) for e in range(model.num_experts if how.each_expert else 1))
        sizes = tuple((a, letters[a]) for a in flat(how.ours))
        shape = tuple(size for _, size in sizes)
        theirs = tuple(math.prod(letters[a] for a in group) for group in grouped(how.theirs))
        out[name] = Entry(name, each, shape, theirs, how, sizes)

    gone = tuple(end for end, is_absent in absent.items() if is_absent)
    present = [(ours, how) for ours, how in known.items() if not ours.endswith(gone or "?")]
    for ours, how in present:
        if "{i}" not in ours and ours != "head" and not ours.startswith("final"):
            add(ours, how, None)
    for layer in range(model.num_layers):
        for ours, how in present:
            if "{i}" in ours:
                add(ours, how, layer)
    for ours, how in present:
        if ours == "head" or ours.startswith("final"):
            add(ours, how, None)
    return out


@dataclasses.dataclass(frozen=True)
class Matched:
    """The tensors of a checkpoint beside those of a model."""

    used: dict[str, Entry]  # by our name
    unused: dict[str, str]  # theirs -> why it is not needed


def match(wanted: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Matched, list[str]]:
    """Which tensors of a folder are used, and what is wrong: missing ones, wrong shapes, names that nothing is known of.

    shapes: of the folder's tensors.
    """
    wrong = []
    by_name = [(name, entry, at) for entry in wanted.values() for at, name in enumerate(entry.theirs)]
    known = {name for name, _, _ in by_name}
    for name, entry, at in by_name:
        if name not in shapes:
            wrong.append(f"{name}: missing (it is {entry.called(at)}, {shown(entry.their_shape)})")
        elif shapes[name] != entry.their_shape:
            wrong.append(f"{name}: its shape is {shown(shapes[name])}, config.json makes it {shown(entry.their_shape)}")
    unused = {}
    for name in sorted(shapes.keys() - known):
        if DERIVED.fullmatch(name):
            unused[name] = "follows from config.json"
        elif name == "lm_head.weight" and "model.embed_tokens.weight" in known:
            unused[name] = TIED
        else:
            wrong.append(f"{name}: {shown(shapes[name])}, not known in models of this family")
    return Matched({entry.ours: entry for entry in wanted.values()}, unused), wrong


TIED = "the head is the embedding"


def shown(shape: Iterable[int]) -> str:
    """[4096, 14336]"""
    return str(list(shape))


def copied(view: np.ndarray) -> np.ndarray:
    """A contiguous copy of a view with its axes in another order."""
    # As integers: numpy copies types it does not know element by element.
    words = view.view(np.uint16) if view.dtype.itemsize == 2 else view
    if words.flags.c_contiguous or words.ndim < 2:
        return np.array(words).view(view.dtype)
    out = np.empty(words.shape, words.dtype)
    step = max(1, COLUMNS // max(1, int(np.prod(words.shape[2:]))))
    for i in range(0, words.shape[1], step):
        out[:, i : i + step] = words[:, i : i + step]
    return out.view(view.dtype)
