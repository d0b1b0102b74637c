"""A folder's tensors onto devices, one after the other: the host holds the tensor at hand and the one being read.

Experts of a layer are one array here and many tensors there, which are read, held and placed together.
"""

import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from jaxtrain.hf.folder import Folder
from jaxtrain.hf.names import TIED, Entry, Matched, entries, match
from jaxtrain.models import family
from jaxtrain.models.hugging_face import EXPERTS_TOGETHER, HfTensor, HuggingFaceError
from jaxtrain.train.state import Tensors

SHOWN = 12  # problems named one by one
Progress = Callable[[str, int], None]  # (name, bytes) of each tensor that is done


def matched(folder: Folder) -> Matched:
    """The tensors of the folder beside those of its model. Raises HuggingFaceError with all that does not fit."""
    shapes = {name: place.shape for name, place in folder.tensors.items()}
    names: Mapping[str, HfTensor] = family(folder.model.family).NAMES
    if folder.model.num_experts and EXPERTS_TOGETHER["layers.{i}.mlp.gate"].name.replace("{i}", "0") in shapes:
        names = {**names, **EXPERTS_TOGETHER}
    found, wrong = match(entries(folder.model, names), shapes)
    if wrong:
        shown = wrong[:SHOWN] + ([f"... and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else [])
        raise HuggingFaceError(f"{folder.path}: its tensors are not those of config.json:\n  " + "\n  ".join(shown))
    for name, why in found.unused.items():
        if why == TIED and not _same(folder.read(name), folder.read("model.embed_tokens.weight")):
            raise HuggingFaceError(
                f"{folder.path}: tie_word_embeddings is true, but {name} is not the embedding. Remove the wrong one of the two."
            )
    return found


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    """Bit for bit."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    bits = np.dtype(f"u{x.dtype.itemsize}")
    return all(np.array_equal(a.view(bits), b.view(bits)) for a, b in zip(x, y, strict=True))


def load(folder: Folder, found: Matched, abstract: Mapping[str, jax.ShapeDtypeStruct], progress: Progress) -> Tensors:
    """The tensors that `abstract` names, each in its dtype and sharding. Floats are rounded where `abstract` has fewer bits.

    Raises HuggingFaceError where one is missing or has another shape.
    """
    for name, a in abstract.items():
        if name not in found.used:
            raise HuggingFaceError(f"{name}: not in {folder.path}.")
        if found.used[name].shape != a.shape:
            raise HuggingFaceError(f"{name}: {list(found.used[name].shape)} in {folder.path}, {list(a.shape)} in this model.")
    out: Tensors = {}
    # In the order in which they lie on the disk.
    places = {name: folder.tensors[found.used[name].theirs[0]] for name in abstract}
    order = sorted(abstract, key=lambda name: (places[name].file, places[name].offset))
    for name, stored in _read_ahead(folder, [found.used[name] for name in order]):
        a = abstract[name]
        part = functools.partial(found.used[name].to_ours, stored, np.dtype(a.dtype))
        out[name] = jax.make_array_from_callback(a.shape, a.sharding, part)
        out[name].block_until_ready()
        progress(name, math.prod(a.shape) * stored[0].itemsize)
    return out


def _read_ahead(folder: Folder, order: list[Entry]) -> Iterator[tuple[str, list[np.ndarray]]]:
    def read(entry: Entry) -> list[np.ndarray]:
        return [folder.read(name) for name in entry.theirs]

    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="safetensors") as reader:
        following = reader.submit(read, order[0]) if order else None
        for entry, after in zip(order, [*order[1:], None], strict=True):
            assert following is not None
            stored = following.result()
            following = reader.submit(read, after) if after else None
            yield entry.ours, stored
