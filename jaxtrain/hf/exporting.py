"""Export a checkpoint of jaxtrain as a Hugging Face folder: `python -m jaxtrain.hf export CKPT --out=DIR`."""

import dataclasses
import functools
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.sharding import SingleDeviceSharding

from jaxtrain import config, lora, windows
from jaxtrain.checkpoint import CheckpointError
from jaxtrain.command_line import progress_bar
from jaxtrain.config import RunConfig
from jaxtrain.data import text_format
from jaxtrain.data.tokenizer import TokenizerError
from jaxtrain.hf import folder as folders
from jaxtrain.hf.folder import CONFIG, GENERATION, INDEX, has_model, model_of, write_json
from jaxtrain.hf.importing import Origin, check_space, counted, open_origin, rate
from jaxtrain.hf.model import placed, read_params
from jaxtrain.hf.names import PREFIX, Entry, entries
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.models import family
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.lora import A, B, adapter_of
from jaxtrain.models.module import is_vector
from jaxtrain.shapes import MTP
from jaxtrain.train.state import TrainState, named_leaves

AT_ONCE = 1 << 26  # least bytes of a checkpoint that are read at a time
YARN = [f"rope_{key}" for key in ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")]
Reader = Callable[[Sequence[Entry]], Iterator[tuple[Entry, np.ndarray]]]


# ---- config.json


def config_json(run: RunConfig, dtype: str, special: Mapping[str, Any], positions: int = 0) -> dict[str, Any]:
    """Return config.json of a model as a dict. Raises HuggingFaceError if the family's format cannot represent the model.

    Args:
        run: the config of the model's run.
        dtype: dtype of the tensors, f32 | bf16.
        special: bos_token_id, eos_token_id and pad_token_id.
        positions: the longest sequence that the models before this run were trained with, in tokens.
    """
    layout = family(run.model.family).FORMAT
    stored = DTYPES[dtype].name
    out = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        **layout.write(run.model),
        "max_position_embeddings": max(run.data.seq_len, positions),
        "torch_dtype": stored,
        "dtype": stored,
        **special,
        "use_cache": True,
    }
    fix = "Set model.family to a family whose checkpoints hold it, if there is one"
    try:
        again, model = in_force(model_of(out)), in_force(run.model)
    except HuggingFaceError as error:
        rule = f"checkpoints of {layout.architecture} cannot hold this model: {error}"
        raise HuggingFaceError(f"model.family = {run.model.family!r}: {rule} {fix}.") from error
    for key in (field.name for field in dataclasses.fields(model)):
        if getattr(again, key) != getattr(model, key):
            rule = f"checkpoints of {layout.architecture} hold {getattr(again, key)!r} only"
            raise HuggingFaceError(f"model.{key} = {getattr(run.model, key)!r}: {rule}. {fix}.")
    return out


def in_force(m: config.Model) -> config.Model:
    """Return an equivalent model that can be compared with others: settings without effect have their defaults.

    Settings of 0 or "" that stand for a computed value have that value.
    """
    default, local = config.Model(), windows.LOCAL in windows.kinds(m)
    changes: dict[str, Any] = {"init_std": default.init_std, "attention_pattern": windows.kinds(m)}
    scale = m.attn_logit_scale or m.head_dim**-0.5
    changes |= {"attn_logit_scale": float(f"{scale:.12g}"), "sliding_window": m.sliding_window if local else 0}
    changes |= {"local_rope_base": (m.local_rope_base or m.rope_base) if local else 0.0}
    if local and not m.local_rope_base and m.rope_scaling != "none":
        changes["local_rope_base"] = 0.0  # local layers have scaled frequencies too, which no base expresses
    without_effect = ["rope_factor"] * (m.rope_scaling == "none")
    without_effect += ["experts_per_token", "router", "renormalize", "routed_scaling"] * (not m.num_experts)
    without_effect += ["router_groups", "groups_per_token"] * (m.groups_per_token == m.router_groups)
    without_effect += ["rope_low_freq", "rope_high_freq"] * (m.rope_scaling != "llama3")
    without_effect += ["rope_original_len"] * (m.rope_scaling not in ("llama3", "yarn"))
    without_effect += YARN * (m.rope_scaling != "yarn")
    return dataclasses.replace(m, **changes, **{name: getattr(default, name) for name in without_effect})


# ---- The folder


def export(
    path: str,
    out: Path,
    *,
    dtype: str = "auto",
    shard_size: str | int = "5GB",
    tokenizer: str = "",
    base: str = "",
    force: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Write a checkpoint as config.json, generation_config.json, safetensors files and the tokenizer's files to a folder.

    The folder has the name OUT.partial until it is complete.

    Args:
        path: a run's folder, or one of its checkpoints.
        out: the folder to write.
        dtype: dtype of the tensors: f32 | bf16 | auto, which is bf16 if all stored matrices are bfloat16, else f32.
        shard_size: largest size of a safetensors file, such as 5GB. The tensors of one file must fit into host memory.
        tokenizer: folder or tokenizer.json of the tokenizer; "": the run's tokenizer.
        base: for a run with adapters, the folder of their base model, if it was moved; "": its path in the checkpoint.
        force: replace an existing folder after the new one is complete. If the process is killed meanwhile, the old folder may
            have the name OUT.replaced.
        say: called with each line of the report.

    Raises:
        HuggingFaceError, CheckpointError: the checkpoint cannot be exported. `out` is unchanged.
    """
    source = open_origin(path)
    source.announce(say)
    run = source.run()
    wanted = entries(run.model)
    if base and not run.lora.rank:
        raise HuggingFaceError(f"--base={base}: {source.name} is of a run without adapters. Leave it out.")
    if out.name in ("", ".."):  # the finished folder could not be renamed to such a name
        raise HuggingFaceError(f"--out={out}: must end in the name of a folder. Fix: --out={out / 'served'}.")
    if out.exists() and not force:
        raise HuggingFaceError(f"{out}: is there already. Name another --out, or replace it with --force.")
    if out.exists() and (not has_model(out) or (out / "checkpoints").exists()):
        raise HuggingFaceError(f"{out}: is no folder with a Hugging Face model, and --force replaces nothing else.")
    stored = {name: a for name, a in source.stored.items() if name.startswith(PREFIX)}
    if run.lora.rank:
        there = base or lora.base_path(source.meta)
        try:
            of_base = open_origin(there)
            stored = {name: a for name, a in of_base.stored.items() if name.startswith(PREFIX)}
        except (CheckpointError, HuggingFaceError) as error:
            raise lora.gone(there, error) from error
        of_base.announce(say)
        # Adapters are trained without the base's modules of multi-token prediction.
        stored = {name: a for name, a in stored.items() if not name.startswith(f"{PREFIX}{MTP}.")}
    missing = sorted(wanted.keys() - stored.keys())
    left = sorted(stored.keys() - wanted.keys())
    if missing or left:
        rule = f"{missing[0]} is not in it" if missing else f"{left[0]} has no name in Hugging Face's {run.model.family}"
        raise HuggingFaceError(f"{source.name}: {rule}.")
    # Scales of norms and biases are float32 with weights in bfloat16; an export rounds them, as published models do.
    matrices = {str(stored[name].dtype) for name in wanted if not is_vector(name)}
    chosen = dtype if dtype != "auto" else ("bf16" if matrices == {"bfloat16"} else "f32")
    spec = tokenizer or run.data.tokenizer
    bare = not tokenizer and not source.text().tokenizer_sha256 and not text_format.is_here(spec)  # and never had one
    try:
        known, text = (None, source.text()) if bare else text_format.load(source.text(), spec)
    except TokenizerError as error:
        raise HuggingFaceError(f"{error} Name its folder: --tokenizer=DIR.") from error
    if known and (lost := source.text().lost(known)):
        say(f"{spec} has no {', '.join(lost)}, with which texts of {source.name} end: no eos of the export")
    special = text.ids_to_write(known.bos if known else ())
    described = config_json(run, chosen, special, source.positions)
    size = sum(math.prod(e.shape) * (1 + len(e.copies)) for e in wanted.values()) * DTYPES[chosen].itemsize
    check_space(out, size)

    place = out.resolve()  # the target of a symbolic link is replaced
    partial, replaced = (place.with_name(f"{place.name}.{state}") for state in ("partial", "replaced"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    started = time.perf_counter()
    wider = sorted({str(a.dtype) for a in stored.values()} - {"bfloat16"})
    read = (
        merged(source, run, base, wide=chosen == "f32" or bool(wider))
        if run.lora.rank
        else functools.partial(read_in_batches, source)
    )
    try:
        with progress_bar(size) as progress:
            files = write_tensors(read, wanted, partial, DTYPES[chosen], shard_size, progress)
    except (CheckpointError, HuggingFaceError):
        shutil.rmtree(partial)
        raise
    seconds = time.perf_counter() - started
    if known is None:
        say(f"{path} has no tokenizer, so {out} has none: copy one there, or name it with --tokenizer")
    else:
        folders.write_tokenizer(spec, text, partial)
    write_json(partial / CONFIG, described)
    write_json(partial / GENERATION, text.generation_to_write(special))
    # The old folder is deleted only when the complete new folder has its name, even if the process is killed.
    if place.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(place, replaced)
    os.rename(partial, place)
    if replaced.exists():
        shutil.rmtree(replaced)
    rounded = f", rounded from {' and '.join(wider)}" if chosen == "bf16" and wider else ""
    tensors = counted(len({name for e in wanted.values() for name in e.theirs}), "tensor")
    architecture = described["architectures"][0]
    if known and text.template:
        say(f"chat template: {text.template_name}")
    say(f"{out}: {architecture}, {tensors} as {chosen}{rounded}, {counted(files, 'file')}, {rate(size, seconds)}")


def write_tensors(
    read: Reader,
    wanted: dict[str, Entry],
    out: Path,
    dtype: np.dtype[Any],
    shard_size: str | int,
    progress: Callable[[str, int], None],
) -> int:
    """Write the safetensors files and, if there are several, their index. Return the number of files.

    The tensors of one file must fit into host memory. An array of experts whose tensors are in two files is read twice.
    """
    places: dict[str, list[Entry]] = {}  # one tensor of the checkpoint may hold two of jaxtrain's
    for entry in wanted.values():
        for name in entry.theirs:
            places.setdefault(name, []).append(entry)
    split = huggingface_hub.split_state_dict_into_shards_factory(
        places,
        get_storage_size=lambda of_name: math.prod(of_name[0].their_shape) * (4 if of_name[0].how.exact else dtype.itemsize),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_size,
    )
    for file, names in split.filename_to_tensors.items():
        arrays = {}
        for entry, x in read(list({entry.ours: entry for name in names for entry in places[name]}.values())):
            converted = x.astype(np.float32 if entry.how.exact else dtype, copy=False)
            for at, name in enumerate(entry.theirs):
                if split.tensor_to_filename[name] == file:
                    arrays[name] = entry.to_theirs(converted, at, arrays.get(name))
                    progress(name, arrays[name].nbytes // len(places[name]))
        # The library renames a temporary file of mode 0600. Permissions must follow the umask, as for all other files.
        (out / file).touch()
        mode = stat.S_IMODE((out / file).stat().st_mode)
        safetensors.numpy.save_file(arrays, out / file, {"format": "pt"})
        (out / file).chmod(mode)
    if split.is_sharded:
        write_json(out / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    return len(split.filename_to_tensors)


def merged(source: Origin, run: RunConfig, base: str, wide: bool) -> Reader:
    """Return a reader of a run's weights with its adapters merged into the base.

    Base and adapters must fit into device memory. wide: read both in float32.
    """
    run = dataclasses.replace(run, precision="f32") if wide else run
    params = read_params(source, run, *placed(run), base)
    leaves = named_leaves(TrainState(jnp.zeros((), jnp.int32), params, ()))
    places = {name: (leaf.array, at) for leaf in leaves for at, name in leaf.places}
    places |= {leaf.name: (leaf.array, None) for leaf in leaves if not leaf.stacked}

    def read(wanted: Sequence[Entry]) -> Iterator[tuple[Entry, np.ndarray]]:
        for entry in wanted:
            names = [entry.ours, *(adapter_of(entry.ours, half) for half in (A, B))]
            found = {name: places[name] for name in names if name in places}
            tensors = {name: np.asarray(x if at is None else x[at]) for name, (x, at) in found.items()}
            for _, x in lora.merged(tensors, run.lora.alpha / run.lora.rank):
                yield entry, np.asarray(x)

    return read


def read_in_batches(source: Origin, wanted: Sequence[Entry]) -> Iterator[tuple[Entry, np.ndarray]]:
    """Yield (entry, array in its stored dtype) of all wanted tensors. Each batch but the last has at least AT_ONCE bytes."""
    try:
        host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        host = SingleDeviceSharding(jax.local_devices()[0])
    batch: list[Entry] = []
    for entry in wanted:
        batch.append(entry)
        held = sum(math.prod(e.shape) * source.stored[e.ours].dtype.itemsize for e in batch)
        if held >= AT_ONCE or entry is wanted[-1]:
            tensors = source.read({e.ours: source.stored[e.ours].update(sharding=host) for e in batch})
            for e in batch:
                yield e, np.asarray(tensors.pop(e.ours))
            batch = []
