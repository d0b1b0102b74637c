"""Checkpoints of adapters: identify their base, check it, and merge both into one set of weights.

A run with `lora.rank` saves only its adapters. `base` in meta.json has the origin and a digest of the base weights. Without the
digest, a wrong base would give a wrong model without an error.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config import schema
from jaxtrain.config.layout import Arrangement
from jaxtrain.config.shapes import MTP
from jaxtrain.hf.importing import Origin, open_origin
from jaxtrain.hf.names import PREFIX
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.lora import EQUATIONS, A, B, adapter_name, is_adapter
from jaxtrain.models.module import Params, is_stacked
from jaxtrain.step.state import dotted_name, split_layer


@jax.jit
def _sum(x: jax.Array, before: jax.Array, counted: jax.Array) -> jax.Array:
    """Return the sum modulo 2^32 of (each element's bfloat16 bits + 1) times an odd number that depends on its index.

    before: added to the index. counted: 0 for elements to leave out. Both are uint32 and broadcast against x.
    """
    index = jnp.zeros(x.shape, jnp.uint32)
    for dim, size in enumerate(x.shape):
        index = index * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    return jnp.sum(counted * (bits + 1) * (2 * (index + before) * jnp.uint32(0x9E3779B1) + 1), dtype=jnp.uint32)


def _sum_stack(x: jax.Array, order: Sequence[int | None]) -> jax.Array:
    """Return `_sum` of a stack of layers as if they were in order. order: the layer of each slot, None for an empty slot."""
    size = math.prod(x.shape[1:])
    before = [((layer or 0) - slot) * size % 2**32 for slot, layer in enumerate(order)]
    one_each = (-1, *[1] * (x.ndim - 1))
    arrays = (np.array(values, np.uint32).reshape(one_each) for values in (before, [layer is not None for layer in order]))
    return _sum(x, *arrays)


class Digest:
    """A digest of weights, rounded to bfloat16, that are added one by one, in any order.

    It is the same on every mesh, and for weights that were added layer by layer or as stacks. It detects a mix-up of models.
    """

    def __init__(self, period: int = 1) -> None:
        """Args: period: layers in each element of the stack; `add` needs it."""
        self._period = period
        self._sums: dict[str, list[tuple[tuple[int, ...], int]]] = {}  # of each layer, or of all at once

    def add(self, name: str, x: jax.Array) -> None:
        """Add a tensor, with its name in checkpoints. Those of multi-token prediction do not count: adapters do without it."""
        if name.startswith(f"{PREFIX}{MTP}."):
            return
        stacked_name, layer = split_layer(name, self._period)
        before = np.uint32((layer or 0) * x.size % 2**32)
        lead = () if layer is None else (1,)
        self._sums.setdefault(stacked_name.removeprefix(PREFIX), []).append(
            ((*lead, *x.shape), int(_sum(x, before, np.uint32(1))))
        )

    def add_params(self, params: Params, layers: Arrangement | None) -> None:
        """Add the arrays of parameters. layers: order of the layers on pipeline stages (TrainState.layers)."""
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            if layers and is_stacked(path):
                entry = (layers.layers, *x.shape[1:]), int(_sum_stack(x, layers.order))
            else:
                entry = x.shape, int(_sum(x, np.uint32(0), np.uint32(1)))
            self._sums[dotted_name(path)] = [entry]

    def hex(self) -> str:
        """Return the digest of all weights so far."""
        hasher = hashlib.sha256()
        for name, sums in sorted(self._sums.items(), key=lambda item: item[0].split(".")):
            shape = sums[0][0] if len(sums) == 1 else (len(sums), *sums[0][0][1:])
            key = "".join(f"['{level}']" for level in name.split("."))
            hasher.update(f"{key} {shape} {sum(x for _, x in sums) % 2**32}\n".encode())
        return hasher.hexdigest()[:32]


def digest(params: Params, layers: Arrangement | None = None) -> str:
    """Return the `Digest` of all parameters. layers: as in `Digest.add_params`."""
    total = Digest()
    total.add_params(params, layers)
    return total.hex()


def base_path(meta: Mapping[str, Any]) -> str:
    """Return the path of the base in the adapters' meta.json. Raises CheckpointError if meta.json names no base."""
    base = meta.get("base")
    if not isinstance(base, Mapping) or not {"path", "digest"} <= base.keys():
        raise CheckpointError(
            f"step {meta.get('step')} holds adapters, and its meta.json names no base: it was not "
            "written by a run with lora.rank."
        )
    return base["path"]


def base_on_resume(meta: Mapping[str, Any], init: schema.Init) -> str:
    """Return the path of the base of a run that resumes: init.base, or another init.from than before, or that of meta.json.

    init.from is also used if the path in meta.json is gone: a folder that was moved as a whole has the same relative paths. It
    is not used if it names adapters, which the run began with.
    """
    recorded = base_path(meta)
    if init.base or not init.from_:
        return init.base or recorded
    same = init.from_ == meta["config"]["init"]["from"]
    if same and try_open(recorded):
        return recorded
    init_origin = try_open(init.from_)
    return recorded if (init_origin.adapters if init_origin else same) else init.from_


def try_open(path: str) -> Origin | None:
    """Return the weights in a path, not read yet; None if there are none."""
    try:
        return open_origin(path)
    except (CheckpointError, HuggingFaceError):
        return None


def comparable_settings(settings: schema.Lora) -> schema.Lora:
    """Return the settings of adapters, to be compared: without the base's storage, and with the targets in one order."""
    return dataclasses.replace(settings, base="", targets=",".join(sorted(set(schema.split_items(settings.targets)))))


def as_options(adapters: Origin) -> str:
    """Return the settings of adapters as text for a command line."""
    settings = adapters.run().lora
    more = f", lora.rslora={str(settings.rslora).lower()}, lora.experts={settings.experts}"
    return f"lora.rank={settings.rank}, lora.alpha={settings.alpha:g}{more} and lora.targets={settings.targets}"


def missing_base_error(path: str, error: Exception) -> CheckpointError:
    """Return the error for a base that cannot be read."""
    return CheckpointError(
        f"the base of these adapters, {path}, cannot be read: {error} Put it back there, or name the place where it is now "
        "(init.base of a run, --base of a command)."
    )


def check_base_digest(meta: Mapping[str, Any], path: str, actual: str) -> None:
    """Raise CheckpointError if the base in `path`, whose digest is `actual`, is not the base that the adapters belong to."""
    if actual != meta["base"]["digest"]:
        raise CheckpointError(
            f"the weights in {path} are not the base of the adapters of step {meta['step']}: their digest "
            f"is {actual}, and was {meta['base']['digest']} in {meta['base']['path']}. Name the right base (init.base of a "
            "run, --base of a command)."
        )


def merge_adapters(tensors: Mapping[str, Any], scale: float) -> Iterator[tuple[str, Any]]:
    """Yield (name, array) of a model without adapters: W + scale a b for adapted weights, all others unchanged.

    tensors: canonical name, with or without a prefix -> weight or adapter (`...attention.lora.wq_a`). Each tensor is looked up
    once, in order. scale: of the adapters, `schema.Lora.scale`.

    The sum is computed in float32 and rounded once, to the weight's own dtype. Raises ValueError for an adapter without its
    second matrix or without its weight.
    """
    adapters = {name for name in tensors if is_adapter(name)}
    for name in [name for name in tensors if name not in adapters]:
        a, b = (adapter_name(name, half) for half in (A, B))
        if not {a, b} & adapters:
            yield name, tensors[name]
            continue
        if not {a, b} <= adapters:
            raise ValueError(f"of the adapter of {name}, {a if a not in adapters else b} is missing")
        adapters -= {a, b}
        yield name, _add_adapter(name, np.asarray(tensors[name]), np.asarray(tensors[a]), np.asarray(tensors[b]), scale)
    if adapters:
        raise ValueError(f"no weight for {', '.join(sorted(adapters))}")


def _add_adapter(name: str, w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Return w + scale a b in the dtype of w. Experts are computed one by one; their a and b may be one pair for all."""
    letters = EQUATIONS[name.rpartition(".")[2]].split("->")[0].split(",")[1]
    if w.ndim == len(letters):
        return (w.astype(np.float32) + scale * adapter_product(name, a, b)).astype(w.dtype)
    per_expert, out = a.ndim + b.ndim > w.ndim + 1, np.empty_like(w)
    for expert, expert_w in enumerate(w):
        out[expert] = _add_adapter(name, expert_w, a[expert] if per_expert else a, b[expert] if per_expert else b, scale)
    return out


def adapter_product(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the matrix product a b in float32, with its dimensions in the order of the weight `name`."""
    xs, ws = EQUATIONS[name.rpartition(".")[2]].split("->")[0].split(",")
    matrix = np.tensordot(a.astype(np.float32), b.astype(np.float32), 1)
    letters = sorted(ws, key=lambda c: c not in xs)  # input dimensions first, as in the matmul
    return matrix.transpose([letters.index(c) for c in ws])
