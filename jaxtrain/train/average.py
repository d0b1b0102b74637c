"""Average the weights of checkpoints: `python -m jaxtrain checkpoint average A B --out=DIR`.

An averaged value is sum(w_i x_i) / sum(w_i) in float64, rounded once, to nearest, to the type that the checkpoints store. The
weights are read in parts of CHUNK_BYTES, or of one tensor if it is larger. Memory holds the average, and on the host some seven
times the size of a part.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.filesize import decimal

from jaxtrain.config import stores
from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.hf.folder import is_folder
from jaxtrain.hf.importing import COPIED, Origin, check_new, check_space, open_origin, spread_sharding, write_run_folder
from jaxtrain.hf.names import PREFIX
from jaxtrain.metrics.progress import progress_bar
from jaxtrain.step.state import Tensors

CHUNK_BYTES = 256 << 20
BLOCK = 1 << 22  # elements that are computed with at a time
LEAST_SUM = 1e-6  # of the weights, as a part of the sum of their magnitudes


def average(
    paths: Sequence[str],
    out: str,
    *,
    weights: Sequence[float] = (),
    ema: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Write the average of checkpoints as a run's folder, with config.json and a checkpoint of step 0.

    The checkpoint holds weights only, as that of an import does. Its config and its texts are those of the first. Its longest
    sequence is the shortest of all. meta.json lists what was averaged (key `averaged`).

    Args:
        paths: runs, folders of checkpoints, or checkpoints.
        out: the folder to write, on a disk.
        weights: a number for each path, also negative; (): all are equal.
        ema: average the averages of the weights (train.ema_decay).
        say: called with each line of the report.

    Raises:
        ConfigError: the command is wrong, or the checkpoints do not fit each other.
        CheckpointError, HuggingFaceError: a checkpoint cannot be read or is damaged, or the folder exists. Nothing is written.
    """
    folder = Path(out).expanduser()
    weights = list(weights) or [1.0] * len(paths)
    if problems := [*_number_problems(paths, weights), *_path_problems(paths, out)]:
        raise ConfigError(problems)
    check_new(folder)
    origins = [_open(path, ema) for path in paths]
    if problem := _difference(paths, origins) or _overlap_problem(folder, paths, origins):
        raise ConfigError([problem])
    first = origins[0]
    stored = _weights_of(first)
    size = sum(_bytes(a) for a in stored.values())
    check_space(folder, size)
    for origin, weight in zip(origins, weights, strict=True):
        prefix = "the average of the weights of " * ema
        say(f"{weight:g} of {math.fsum(weights):g}: {prefix}{origin.name}")
    for origin in origins[1:]:  # such as a base and its chat model
        if different_keys := [key for key, value in first.meta["text"].items() if origin.meta["text"].get(key) != value]:
            say(f"{', '.join(different_keys)} of the texts: as in {first.name}, other than in {origin.name}")

    wanted = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=spread_sharding(a.shape, jax.local_devices()))
        for name, a in stored.items()
    }
    tensors: Tensors = {}
    with progress_bar(size * len(origins)) as progress:
        for chunk in _chunks(wanted):
            for name, mean in _average_chunk(chunk, origins, weights, progress).items():
                tensors[name] = jax.make_array_from_callback(mean.shape, chunk[name].sharding, mean.__getitem__)
    config, tokenizer = _config(first)
    averaged = [
        {"path": origin.path, "step": origin.step, "weight": weight, "ema": ema}
        for origin, weight in zip(origins, weights, strict=True)
    ]
    meta = {"averaged": averaged, "text": first.meta["text"], "positions": min(origin.positions for origin in origins)}
    write_run_folder(folder, config, tensors, meta, tokenizer)
    say(f"wrote {decimal(size)} to {out}")


# ---- Refusals


def _number_problems(paths: Sequence[str], weights: Sequence[float]) -> Iterator[Problem]:
    if len(paths) < 2:
        yield Problem("CKPT", paths[0], "is alone, and an average is of two or more", "Name another checkpoint after it.")
    shown = ",".join(f"{weight:g}" for weight in weights)
    if len(weights) != len(paths):
        rule = f"has {len(weights)} numbers for {len(paths)} checkpoints"
        yield Problem("--weights", shown, rule, "Write one for each, in their order.")
    elif abs(math.fsum(weights)) <= LEAST_SUM * math.fsum(map(abs, weights)):
        yield Problem("--weights", shown, "their sum is 0, and it divides", "Write numbers that add up to another one.")


def _path_problems(paths: Sequence[str], out: str) -> Iterator[Problem]:
    if refused := stores.path_problem(out):
        yield Problem("--out", out, *refused)
    for path in paths:
        if not stores.is_bucket(path) and is_folder(path):
            fix = "Import it (python -m jaxtrain hf import), and name the folder that this writes."
            yield Problem("CKPT", path, "is no checkpoint of jaxtrain", fix)


def _overlap_problem(out: Path, paths: Sequence[str], origins: Sequence[Origin]) -> Problem | None:
    """Return a problem if the folder to write is in the folder of a run, or of checkpoints, that is averaged."""
    for path, origin in zip(paths, origins, strict=True):
        parent = Path(origin.path).parent
        folders = [parent, *[parent.parent] * (parent.name == "checkpoints"), Path(path).expanduser()]
        if not stores.is_bucket(origin.path) and any(out.resolve().is_relative_to(folder.resolve()) for folder in folders):
            return Problem("--out", str(out), f"is in the folder of {origin.name}", "Name a folder beside it.")
    return None


def _open(path: str, ema: bool) -> Origin:
    origin = open_origin(path)
    if origin.adapters:
        rule = "holds adapters, and the product of averaged factors is not the average of their products"
        fix = "Merge each into its base (hf export, and hf import of the result), and average those."
        raise ConfigError([Problem("CKPT", path, rule, fix)])
    return origin.choose(ema)


def _difference(paths: Sequence[str], origins: Sequence[Origin]) -> Problem | None:
    """Return the first difference of a checkpoint from the first one that makes an average meaningless."""
    first = origins[0]
    run, stored, text = first.run(), _weights_of(first), first.meta["text"]
    for path, origin in zip(paths[1:], origins[1:], strict=True):
        other_run = origin.run()
        model, other_model = _model_settings(run), _model_settings(other_run)
        if key := next(
            (key for key in sorted(model.keys() | other_model.keys()) if model.get(key) != other_model.get(key)), ""
        ):
            rule = f"{key} is {other_model.get(key)!r} there, and {model.get(key)!r} in {paths[0]}"
            return Problem("CKPT", path, rule, "Average checkpoints of one model.")
        if rule := _tensor_difference(stored, _weights_of(origin), paths[0]):
            return Problem("CKPT", path, rule, "Average checkpoints with the same tensors (dtypes.params decides their types).")
        if len({text["tokenizer_sha256"], origin.meta["text"]["tokenizer_sha256"]} - {""}) > 1:
            rule = f"it was trained with another tokenizer than {paths[0]} (tokenizer_sha256 in meta.json)"
            return Problem("CKPT", path, rule, "Average checkpoints of one tokenizer.")
    return None


def _model_settings(run: Any) -> dict[str, Any]:
    """Return key -> value of the sections of a config that decide what weights compute."""
    own_settings = {f"own.{name}": value for name, value in run.own} if run.model.outside else {}
    return {f"model.{name}": x for name, x in dataclasses.asdict(run.model).items() if name != "init_std"} | own_settings


def _tensor_difference(stored: Tensors, tensors: Tensors, first: str) -> str:
    """Return the first difference of a checkpoint's tensors from those of `first`; "" if there is none."""
    for name in sorted(stored.keys() | tensors.keys()):
        if name not in tensors or name not in stored:
            return f"has no tensor {name}, which {first} has" if name in stored else f"has {name}, which {first} has not"
        expected, tensor = stored[name], tensors[name]
        if (expected.shape, expected.dtype) != (tensor.shape, tensor.dtype):
            kinds = [f"{a.dtype.name} {list(a.shape)}" for a in (tensor, expected)]
            return f"{name} is {kinds[0]} there, and {kinds[1]} in {first}"
    return ""


# ---- The average


def _weights_of(origin: Origin) -> Tensors:
    return {name: a for name, a in origin.stored.items() if name.startswith(PREFIX)}


def _bytes(a: jax.ShapeDtypeStruct) -> int:
    return math.prod(a.shape) * a.dtype.itemsize


def _chunks(wanted: Tensors) -> Iterator[Tensors]:
    """Yield the tensors in chunks of at most CHUNK_BYTES, or of one tensor."""
    chunk: Tensors = {}
    for name, abstract in wanted.items():
        if chunk and sum(map(_bytes, chunk.values())) + _bytes(abstract) > CHUNK_BYTES:
            yield chunk
            chunk = {}
        chunk[name] = abstract
    yield chunk


def _average_chunk(
    chunk: Tensors, origins: Sequence[Origin], weights: Sequence[float], progress: Callable[[str, int], None]
) -> dict[str, np.ndarray]:
    """Return the averages of some tensors. Raises ConfigError for tensors that have none."""
    sums: dict[str, np.ndarray] = {}
    for origin, weight in zip(origins, weights, strict=True):
        tensors = origin.read(chunk)
        for name, abstract in chunk.items():
            x = np.asarray(tensors.pop(name))
            if jnp.issubdtype(abstract.dtype, jnp.floating):
                weighted = sums.setdefault(name, np.zeros(x.shape))
                for block in _blocks(x):
                    weighted.reshape(-1)[block] += x.reshape(-1)[block].astype(np.float64) * weight
            elif not np.array_equal(sums.setdefault(name, x), x):
                rule = f"{name} holds {abstract.dtype.name}, which has no average, and is not the same as in {origins[0].name}"
                raise ConfigError([Problem("CKPT", origin.path, rule, "Average checkpoints that share it.")])
            progress(name, _bytes(abstract))
    total = math.fsum(weights)
    for name, abstract in chunk.items():
        if jnp.issubdtype(abstract.dtype, jnp.floating):
            mean = np.empty(abstract.shape, abstract.dtype)
            for block in _blocks(mean):
                mean.reshape(-1)[block] = round_once(sums[name].reshape(-1)[block] / total, abstract.dtype)
            sums[name] = mean
    return sums


def _blocks(x: np.ndarray) -> Iterator[slice]:
    return (slice(begin, begin + BLOCK) for begin in range(0, x.size, BLOCK))


def round_once(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Return float64 values rounded once, to nearest, to a float type.

    ml_dtypes rounds to a small type by way of float32, which would round twice. So the float32 is rounded to odd here: of two
    neighbours, the one whose last bit is set. The second rounding then gives the nearest value.
    """
    if np.dtype(dtype).itemsize >= 4:
        return x.astype(dtype)
    with np.errstate(over="ignore"):
        near = np.array(x, np.float32)
    inexact = near != x
    bits = near.view(np.uint32)
    bits -= np.abs(near) > np.abs(x)
    bits |= inexact
    return near.astype(dtype)


def _config(first: Origin) -> tuple[dict[str, Any], Path | None]:
    """Return the config of the average, and the folder of the tokenizer to copy; None if it stays where it is.

    A tokenizer in the folder of the first run is copied, because either folder may be moved. checkpoint.dir of that run would
    make its checkpoints those of the new folder.
    """
    config: Mapping[str, Any] = first.meta["config"]
    tokenizer, run_folder = first.run().data.tokenizer, Path(first.path).parent.parent
    is_inside = (
        Path(tokenizer).is_dir()
        and not stores.is_bucket(first.path)
        and Path(tokenizer).resolve().is_relative_to(run_folder.resolve())
    )
    tokenizer_folder = Path(tokenizer) if is_inside else None
    data = {**config["data"], "tokenizer": COPIED if tokenizer_folder else tokenizer}
    return {**config, "data": data, "checkpoint": {**config["checkpoint"], "dir": ""}}, tokenizer_folder
