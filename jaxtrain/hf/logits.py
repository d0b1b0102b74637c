"""Logits of a model for given tokens, in float32: `python -m jaxtrain.hf logits`, and what `check` compares."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.config import RunConfig
from jaxtrain.hf.model import alone, read_params, run_at
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.sharding import make_placement
from jaxtrain.train.definition import make_definition
from jaxtrain.train.kernel import choose_kernel, context_of


def read_tokens(path: Path, segments: Path | None, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and documents, int32 (B, T), of .npy files with integers of shape (B, T) or (T,). Raises HuggingFaceError."""

    def rows(path: Path) -> np.ndarray:
        try:
            found = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise HuggingFaceError(f"{path}: cannot be read as an array ({error}).") from error
        if found.ndim not in (1, 2) or not np.issubdtype(found.dtype, np.integer) or found.size == 0:
            raise HuggingFaceError(f"{path}: is {found.dtype} of shape {list(found.shape)}; integers [B, T] or [T] are needed.")
        return np.atleast_2d(found).astype(np.int64)

    tokens_BT = rows(path)
    if tokens_BT.min() < 0 or tokens_BT.max() >= vocab:
        worst = tokens_BT.min() if tokens_BT.min() < 0 else tokens_BT.max()
        raise HuggingFaceError(f"{path}: has the id {worst}, and the model's vocabulary has {vocab}.")
    segments_BT = np.ones_like(tokens_BT) if segments is None else rows(segments)
    if segments_BT.shape != tokens_BT.shape:
        raise HuggingFaceError(f"{segments}: is {list(segments_BT.shape)}, the tokens are {list(tokens_BT.shape)}.")
    return tokens_BT.astype(np.int32), segments_BT.astype(np.int32)


def positions_of(segments_BT: np.ndarray) -> np.ndarray:
    """From 0 in each run of one segment, int32 (B, T)."""
    at = np.broadcast_to(np.arange(segments_BT.shape[1]), segments_BT.shape)
    starts = np.concatenate([np.ones_like(segments_BT[:, :1]), np.diff(segments_BT, axis=1) != 0], axis=1)
    return (at - np.maximum.accumulate(np.where(starts, at, 0), axis=1)).astype(np.int32)


def model_logits(path: str, precision: str, base: str = "") -> tuple[RunConfig, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    """The config of a model, and `logits_of` it. path: a run's folder, a checkpoint, or a Hugging Face folder."""
    run, _ = run_at(path)
    return run, logits_of(run, path, precision, base)


def logits_of(run: RunConfig, path: str, precision: str, base: str = "") -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function of (tokens, segments), each int32 (B, T), to the logits, f32 (B, T, V), of a model with the weights at `path`.

    precision: f32 | bf16, of the arithmetic; where that is f32, weights too are taken in f32, which changes no value.
    """
    weights = dataclasses.replace(run.dtypes, params="f32" if precision == "f32" else run.dtypes.params)
    run = alone(dataclasses.replace(run, precision=precision, dtypes=weights), jax.local_devices())
    devices = jax.local_devices()[: run.mesh.fsdp]
    asked = make_placement(run, devices)
    placement = dataclasses.replace(asked, tokens_replicated=True)  # a row is too little to shard
    made: dict[str, Any] = {}

    def prepare(T: int, documents: int) -> None:
        # The kernel is chosen by the length of the rows.
        data = dataclasses.replace(run.data, seq_len=T, packing="documents", max_segments=documents)
        sized = dataclasses.replace(run, data=data)
        kernel, _ = choose_kernel(sized, context_of(sized, placement), devices[0])
        definition = make_definition(sized, placement, kernel)

        def forward(params: Any, tokens_BT: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
            model = definition.bind(params)
            return model.logits(model(tokens_BT, segments_BT, positions_BT))

        specs = definition.specs(placement), P(), P(), P()
        made["forward"], made["shape"] = jax.jit(placement.shard_map(forward, specs, P())), (T, documents)
        if "params" not in made:
            made["params"] = read_params(path, sized, definition, placement, base)

    def logits(tokens_BT: np.ndarray, segments_BT: np.ndarray) -> np.ndarray:
        T, documents = tokens_BT.shape[1], max(1, int(segments_BT.max()))
        if made.get("shape") != (T, documents):
            prepare(T, documents)
        positions_BT = positions_of(segments_BT)
        # Row by row: the logits of all would be many times what the model holds.
        rows = [
            np.asarray(
                made["forward"](made["params"], *(jnp.asarray(x[i : i + 1]) for x in (tokens_BT, segments_BT, positions_BT)))
            )
            for i in range(tokens_BT.shape[0])
        ]
        return np.concatenate(rows)

    return logits


def largest_differences(ours_BTV: np.ndarray, theirs_BTV: np.ndarray) -> np.ndarray:
    """Of each position the largest absolute difference over rows and vocabulary, f32 (T,)."""
    return np.abs(ours_BTV - theirs_BTV).max(axis=(0, 2))
