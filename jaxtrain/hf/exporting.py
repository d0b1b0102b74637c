"""A checkpoint of jaxtrain as a Hugging Face folder: `python -m jaxtrain.hf export CKPT --out=DIR`."""

import dataclasses
import functools
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors
from jax.sharding import SingleDeviceSharding

from jaxtrain import config, lora, windows
from jaxtrain.checkpoint import CheckpointError, Checkpoints, locate
from jaxtrain.config import RunConfig
from jaxtrain.data.tokenizer import TokenizerError, load_tokenizer
from jaxtrain.hf import tokenizer_files
from jaxtrain.hf.folder import CONFIG, INDEX, SINGLE, is_folder, model_of
from jaxtrain.hf.importing import check_space, gigabytes, progress_bar
from jaxtrain.hf.model import placed, read_params
from jaxtrain.hf.names import PREFIX, Entry, entries
from jaxtrain.hf.origin import open_origin
from jaxtrain.models import FAMILIES, family
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.lora import A, B, adapter_of
from jaxtrain.models.module import Params, is_vector

TYPES = {"f32": np.dtype("float32"), "bf16": np.dtype(ml_dtypes.bfloat16)}
Reader = Callable[[list[Entry]], Iterator[tuple[Entry, np.ndarray]]]
THEIR_TYPES = {"f32": "float32", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint to export, looked at and not yet read."""

    path: str
    base: str  # of adapters, where it is now
    checkpoints: Checkpoints
    step: int
    run: RunConfig
    stored: dict[str, jax.ShapeDtypeStruct]  # weights, those of the base where the checkpoint holds adapters
    bare: bool  # imported from a folder without a tokenizer


def open_source(path: str, base: str = "") -> Source:
    """Raises CheckpointError or HuggingFaceError. base: see `model.read_params`."""
    checkpoints, step = locate(path)
    meta = checkpoints.meta(step)
    run, problems = config.resolve(meta["config"])
    if problems:
        raise HuggingFaceError(f"{path}: its config is not one of this version: {'; '.join(map(str, problems))}")
    if run.model.family not in FAMILIES:
        raise HuggingFaceError(f"model.family = {run.model.family!r}: only jaxtrain's own families have a format to export to.")
    if base and not run.lora.rank:
        raise HuggingFaceError(
            f"--base={base}: step {step} of {checkpoints.directory} is of a run without adapters. Leave it out."
        )
    stored = checkpoints.stored(step)
    if run.lora.rank:
        place = base or lora.base_path(meta)
        try:
            stored = dict(open_origin(place).stored)
        except (CheckpointError, HuggingFaceError) as error:
            raise lora.gone(place, error) from error
    bare = run.data.tokenizer == "byte" and "hugging_face" in meta
    return Source(path, base, checkpoints, step, run, stored, bare)


def longest(run: RunConfig) -> int:
    """Tokens of the longest sequences that the model was trained to see, here or where its weights are from.

    Of that place nothing is asked where it is gone.
    """
    if not run.init.from_:
        return run.data.seq_len
    try:
        return max(run.data.seq_len, open_origin(run.init.from_).seq_len)
    except (CheckpointError, HuggingFaceError):
        return run.data.seq_len


def config_json(run: RunConfig, dtype: str, eos: int | None) -> dict[str, Any]:
    """config.json of a model of one of jaxtrain's families. Raises HuggingFaceError where transformers has none such."""
    module = family(run.model.family)
    out = {
        "architectures": [module.ARCHITECTURE],
        "model_type": module.MODEL_TYPE,
        **module.write(run.model),
        "max_position_embeddings": longest(run),
        "torch_dtype": THEIR_TYPES[dtype],
        "dtype": THEIR_TYPES[dtype],
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        "use_cache": True,
    }
    # What is written must read as what it was.
    again, model = _plain(model_of(out)), _plain(run.model)
    lost = [f.name for f in dataclasses.fields(again) if getattr(again, f.name) != getattr(model, f.name)]
    if lost:
        raise HuggingFaceError(
            f"model.{lost[0]} = {getattr(run.model, lost[0])!r}: config.json of {module.MODEL_TYPE} cannot say it."
        )
    return out


def _plain(m: config.Model) -> config.Model:
    """The model as what it computes: without settings that are not in force, and those in force written out."""
    default, local = config.Model(), windows.LOCAL in windows.kinds(m)
    changes: dict[str, Any] = {"init_std": default.init_std, "attention_pattern": windows.kinds(m)}
    scale = m.attn_logit_scale or m.head_dim**-0.5
    changes |= {"attn_logit_scale": float(f"{scale:.12g}"), "sliding_window": m.sliding_window if local else 0}
    changes |= {"local_rope_base": (m.local_rope_base or m.rope_base) if local else 0.0}
    if local and not m.local_rope_base and m.rope_scaling != "none":
        changes["local_rope_base"] = 0.0  # scaled as in the other layers, which no base says
    if m.rope_scaling == "none":
        changes |= {"rope_factor": default.rope_factor}
    if not m.num_experts:
        changes |= {name: getattr(default, name) for name in ("experts_per_token", "router", "renormalize")}
    if m.rope_scaling != "llama3":
        changes |= {name: getattr(default, name) for name in ("rope_low_freq", "rope_high_freq", "rope_original_len")}
    return dataclasses.replace(m, **changes)


def export(
    source: Source, out: Path, *, dtype: str, shard_bytes: int, tokenizer: str, force: bool, say: Callable[[str], None]
) -> None:
    """Writes config.json, generation_config.json, safetensors, and the tokenizer's files; OUT appears when it is whole.

    dtype: auto (as stored) | f32 | bf16. tokenizer: a folder or file, '' for the run's own. Raises HuggingFaceError before
    anything is written.
    """
    if out.exists() and not force:
        raise HuggingFaceError(f"{out}: is there already. Name another --out, or replace it with --force.")
    if out.exists() and (not is_folder(out) or (out / "checkpoints").exists()):
        raise HuggingFaceError(f"{out}: is no folder with a Hugging Face model, and --force replaces nothing else.")
    run = source.run
    wanted = entries(run.model)
    missing = sorted(name for name in wanted if name not in source.stored)
    left = sorted(name for name in source.stored if name.startswith(PREFIX) and name not in wanted)
    if missing or left:
        what = f"{missing[0]} is not in it" if missing else f"{left[0]} has no name in Hugging Face's {run.model.family}"
        raise HuggingFaceError(f"step {source.step} of {source.checkpoints.directory}: {what}.")
    stored = {name: str(source.stored[name].dtype) for name in wanted}
    # Beside weights in bfloat16, scales of norms and biases are float32: they are rounded as in other models of that type.
    weights = {kind for name, kind in stored.items() if not is_vector(name)}
    chosen = dtype if dtype != "auto" else ("bf16" if weights == {"bfloat16"} else "f32")
    spec = tokenizer or run.data.tokenizer
    bare = source.bare and not tokenizer
    folder = tokenizer_files.source_of(spec)
    try:
        eot = None if bare else load_tokenizer(spec).eot
    except TokenizerError as error:
        raise HuggingFaceError(f"{error} Name another with --tokenizer.") from error
    described = config_json(run, chosen, eot)
    size = sum(int(np.prod(e.shape)) for e in wanted.values()) * TYPES[chosen].itemsize
    check_space(out, size)

    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    started = time.perf_counter()
    with progress_bar(size) as progress:
        files = write_tensors(reader(source, chosen), list(wanted.values()), partial, TYPES[chosen], shard_bytes, progress)
    seconds = time.perf_counter() - started
    if bare:
        say(f"{source.path} was imported without a tokenizer, so {out} has none: copy one there, or name it with --tokenizer")
    elif folder is None:
        tokenizer_files.write_byte_tokenizer(partial)
    elif eot is not None:
        tokenizer_files.copy_files(folder, partial)
        tokenizer_files.complete(spec, eot, partial)
    write_json(partial / CONFIG, described)
    if not (partial / tokenizer_files.GENERATION).exists():  # else it came with the tokenizer
        write_json(partial / tokenizer_files.GENERATION, {"_from_model_config": True, "eos_token_id": eot})
    if out.exists():
        shutil.rmtree(out)
    os.replace(partial, out)
    wider = sorted(set(stored.values()) - {"bfloat16"})
    rounded = f", rounded from {' and '.join(wider)}" if chosen == "bf16" and wider else ""
    count = sum(len(e.theirs) for e in wanted.values())
    say(
        f"{out}: {family(run.model.family).ARCHITECTURE}, {count} tensors as {chosen}{rounded}, {gigabytes(size)} in "
        f"{files} {'file' if files == 1 else 'files'}, {seconds:.1f} s, {gigabytes(size / seconds)}/s"
    )


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """As transformers writes it."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def shards(wanted: list[Entry], itemsize: int, most: int) -> list[dict[str, tuple[Entry, int]]]:
    """What each file of at most so many bytes holds: their tensors in the order of ours, each with the entry of ours that it is
    of and its number among those of that entry. A tensor that is larger has a file of its own."""
    out: list[dict[str, tuple[Entry, int]]] = [{}]
    held = 0
    for entry in wanted:
        size = int(np.prod(entry.their_shape)) * itemsize
        for at, name in enumerate(entry.theirs):
            if out[-1] and held + size > most:
                out.append({})
                held = 0
            out[-1][name] = entry, at
            held += size
    return out


def write_tensors(
    read: Reader, wanted: list[Entry], out: Path, dtype: np.dtype[Any], most: int, progress: Callable[[str, int], None]
) -> int:
    """The safetensors files and, where there are several, their index. Returns how many. The tensors of one file are held.

    An array whose experts lie in two files is read for each.
    """
    files = shards(wanted, dtype.itemsize, most)
    where, total = {}, 0
    for number, part in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        arrays = {}
        for entry, x in read(list({entry.ours: entry for entry, _ in part.values()}.values())):
            converted = x.astype(dtype, copy=False)
            for theirs in [theirs for theirs in entry.theirs if theirs in part]:
                arrays[theirs] = entry.to_theirs(converted, part[theirs][1])
                where[theirs] = name
                total += arrays[theirs].nbytes
                progress(theirs, arrays[theirs].nbytes)
        specs = {
            key: safetensors.TensorSpec(dtype=str(x.dtype), shape=list(x.shape), data_ptr=x.ctypes.data, data_len=x.nbytes)
            for key, x in arrays.items()
        }
        # The library renames a temporary file, which its owner alone may read: the umask decides, as for the other files.
        (out / name).touch()
        mode = stat.S_IMODE((out / name).stat().st_mode)
        safetensors.serialize_file(specs, str(out / name), {"format": "pt"})
        (out / name).chmod(mode)
    if len(files) > 1:
        write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return len(files)


def reader(source: Source, dtype: str) -> Reader:
    """What reads a checkpoint's tensors: as they are stored, or with its adapters merged into their base.

    dtype: that they are to be written in.
    """
    if source.run.lora.rank:
        return functools.partial(_merged, source.run.lora, merged_from(source, dtype))
    return functools.partial(_stored, source)


def merged_from(source: Source, dtype: str) -> Params:
    """The weights of the base and the adapters, in float32 unless the base is stored in bfloat16 and the result is to be."""
    wide = dtype == "f32" or any(str(a.dtype) != "bfloat16" for a in source.stored.values())
    run = dataclasses.replace(source.run, precision="f32") if wide else source.run
    definition, placement = placed(run)
    return read_params(source.path, run, definition, placement, source.base)


def _merged(how: config.Lora, params: Params, wanted: list[Entry]) -> Iterator[tuple[Entry, np.ndarray]]:
    for entry in wanted:
        names = [entry.ours, *(adapter_of(entry.ours, half) for half in (A, B))]
        tensors = {name: x for name in names if (x := tensor_of(params, name)) is not None}
        for _, x in lora.merged(tensors, how.alpha / how.rank):
            yield entry, np.asarray(x)


def tensor_of(params: Params, name: str) -> Any:
    """One layer's tensor of a model's parameters by the name that checkpoints have for it; None where there is no such."""
    found: Any = params
    layer = None
    for part in name.removeprefix(PREFIX).split("."):
        if part.isdecimal():
            layer = int(part)
        elif not isinstance(found, dict) or part not in found:
            return None
        else:
            found = found[part]
    return np.asarray(found if layer is None else found[layer])


def _host() -> Any:
    """A CPU; where JAX was told to start none, the first device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _stored(source: Source, wanted: list[Entry]) -> Iterator[tuple[Entry, np.ndarray]]:
    cpu = SingleDeviceSharding(_host())
    abstract = {e.ours: jax.ShapeDtypeStruct(e.shape, source.stored[e.ours].dtype, sharding=cpu) for e in wanted}
    tensors = source.checkpoints.restore(source.step, abstract, subset=True)
    for entry in wanted:
        yield entry, np.asarray(tensors.pop(entry.ours))
