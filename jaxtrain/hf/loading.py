"""A folder's tensors onto devices, one after the other: the host holds the tensor at hand and the one being read."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.hf.folder import Folder
from jaxtrain.hf.names import TIED, Entry, Matched, copied, entries, match
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.state import Tensors

SHOWN = 12  # problems named one by one
Progress = Callable[[str, int], None]  # (name, bytes) of each tensor that is done


def matched(folder: Folder, wanted: Mapping[str, Entry] | None = None) -> Matched:
    """The tensors of the folder beside those of its model. Raises HuggingFaceError with all that does not fit."""
    shapes = {name: place.shape for name, place in folder.tensors.items()}
    found, wrong = match(entries(folder.model) if wanted is None else wanted, shapes, str(folder.path))
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
    places = {name: folder.tensors[found.used[name].theirs] for name in abstract}
    order = sorted(abstract, key=lambda name: (places[name].file, places[name].offset))
    for name, stored in _read_ahead(folder, [found.used[name] for name in order]):
        a = abstract[name]
        view = found.used[name].to_ours(stored)

        part = functools.partial(_part, view, np.dtype(a.dtype))
        out[name] = jax.make_array_from_callback(a.shape, a.sharding, part)
        out[name].block_until_ready()
        progress(name, stored.nbytes)
    return out


def _part(view: np.ndarray, dtype: np.dtype[Any], index: Any) -> np.ndarray:
    return copied(view[index]).astype(dtype, copy=False)


def _read_ahead(folder: Folder, order: list[Entry]) -> Iterator[tuple[str, np.ndarray]]:
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="safetensors") as reader:
        following = reader.submit(folder.read, order[0].theirs) if order else None
        for entry, after in zip(order, [*order[1:], None], strict=True):
            assert following is not None
            stored = following.result()
            following = reader.submit(folder.read, after.theirs) if after else None
            yield entry.ours, stored
