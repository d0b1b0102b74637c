"""From a model's tensors to those of a Hugging Face checkpoint and back: names, shapes, and the order of axes. No jax."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

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
    """One tensor of a model."""

    ours: str  # as checkpoints name it
    theirs: str
    shape: tuple[int, ...]  # ours
    their_shape: tuple[int, ...]
    how: HfTensor
    sizes: tuple[tuple[str, int], ...]  # of each axis by its letter

    def to_ours(self, x: np.ndarray) -> np.ndarray:
        """Their array with our axes: a view."""
        theirs, ours = flat(self.how.theirs), flat(self.how.ours)
        sizes = dict(self.sizes)
        return x.reshape([sizes[a] for a in theirs]).transpose([theirs.index(a) for a in ours])

    def to_theirs(self, x: np.ndarray) -> np.ndarray:
        """The inverse of `to_ours`, contiguous."""
        theirs, ours = flat(self.how.theirs), flat(self.how.ours)
        return copied(x.transpose([ours.index(a) for a in theirs])).reshape(self.their_shape)


def flat(axes: str) -> list[str]:
    """The letters of "(N H) D" in their order."""
    return axes.replace("(", "").replace(")", "").split()


def grouped(axes: str) -> list[list[str]]:
    """The letters of each axis of "(N H) D"."""
    return [part.strip("()").split() for part in re.findall(r"\([^)]*\)|\S+", axes)]


def entries(model: Model, names: Mapping[str, HfTensor] | None = None) -> dict[str, Entry]:
    """Every tensor of a model by its name in checkpoints, in the order of layers.

    names: of its family, if not that of model.family.
    """
    known: Mapping[str, HfTensor] = family(model.family).NAMES if names is None else names
    letters = {"D": model.d_model, "N": model.num_heads, "K": model.num_kv_heads, "H": model.head_dim}
    letters |= {"F": model.d_ff, "V": model.vocab_size}
    absent = {"head": model.tied_head, ".bq": not model.qkv_bias, ".bk": not model.qkv_bias, ".bv": not model.qkv_bias}
    out: dict[str, Entry] = {}

    def add(ours: str, how: HfTensor, layer: int | None) -> None:
        filled = [text if layer is None else text.replace("{i}", str(layer)) for text in (ours, how.name)]
        sizes = tuple((a, letters[a]) for a in flat(how.ours))
        shape = tuple(size for _, size in sizes)
        theirs = tuple(math.prod(letters[a] for a in group) for group in grouped(how.theirs))
        out[PREFIX + filled[0]] = Entry(PREFIX + filled[0], filled[1], shape, theirs, how, sizes)

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


def match(wanted: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]], path: str) -> tuple[Matched, list[str]]:
    """Which tensors of a folder are used, and what is wrong: missing ones, wrong shapes, names that nothing is known of.

    shapes: of the folder's tensors.
    """
    wrong = []
    by_name = {entry.theirs: entry for entry in wanted.values()}
    for name, entry in by_name.items():
        if name not in shapes:
            wrong.append(f"{name}: missing (it is {entry.ours.removeprefix(PREFIX)}, {shown(entry.their_shape)})")
        elif shapes[name] != entry.their_shape:
            wrong.append(f"{name}: its shape is {shown(shapes[name])}, config.json makes it {shown(entry.their_shape)}")
    unused = {}
    for name in sorted(shapes.keys() - by_name.keys()):
        if DERIVED.fullmatch(name):
            unused[name] = "follows from config.json"
        elif name == "lm_head.weight" and "model.embed_tokens.weight" in by_name:
            unused[name] = TIED
        else:
            wrong.append(f"{name}: {shown(shapes[name])}, not known in models of this family")
    return Matched({entry.ours: entry for entry in by_name.values()}, unused), wrong


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
