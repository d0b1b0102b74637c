"""Export a checkpoint of jaxtrain as a Hugging Face folder: `python -m jaxtrain hf export CKPT --out=DIR`."""

import dataclasses
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import safetensors.numpy

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config import schema
from jaxtrain.config.numbers import plural
from jaxtrain.config.schema import LOCAL
from jaxtrain.config.shapes import is_vector
from jaxtrain.data import text_format
from jaxtrain.data.tokenizer import TokenizerError
from jaxtrain.hf import folder as folders
from jaxtrain.hf.folder import CONFIG, GENERATION, has_model, is_matrix, model_of, write_json
from jaxtrain.hf.importing import check_space, format_rate, open_origin
from jaxtrain.hf.names import PREFIX, Entry, model_entries, raw_entries
from jaxtrain.hf.tensor_files import INDEX
from jaxtrain.hf.weights import Read, open_weights
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.metrics.progress import progress_bar
from jaxtrain.models.hf_keys import FAMILY, OWN_SECTION
from jaxtrain.models.hugging_face import RAW, ROPE_TYPES, HuggingFaceError, format_of

SHOWN = 8  # tensors named one by one


# ---- config.json


def config_json(model: schema.Model, dtype: str, positions: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a model as a dict. Raises HuggingFaceError if the family's format cannot represent the model.

    Args:
        dtype: dtype of the tensors, f32 | bf16.
        positions: the longest sequence that the model was trained with, in tokens.
        more: further keys: bos_token_id, eos_token_id and pad_token_id, and OWN_SECTION.
    """
    layout = format_of(model.family)
    stored = DTYPES[dtype].name
    out = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        **layout.write(model),
        "max_position_embeddings": positions,
        "torch_dtype": stored,
        "dtype": stored,
        **more,
        "use_cache": True,
    }
    if model.outside:
        out |= {FAMILY: model.family}
    fix = "Set model.family to a family whose checkpoints hold it, if there is one"
    try:
        restored, original = effective_model(model_of(out)), effective_model(model)
    except HuggingFaceError as error:
        rule = f"checkpoints of {layout.architecture} cannot hold this model: {error}"
        raise HuggingFaceError(f"model.family = {model.family!r}: {rule} {fix}.") from error
    for key in (field.name for field in dataclasses.fields(original)):
        if getattr(restored, key) != getattr(original, key):
            rule = f"checkpoints of {layout.architecture} hold {getattr(restored, key)!r} only"
            raise HuggingFaceError(f"model.{key} = {getattr(model, key)!r}: {rule}. {fix}.")
    return out


def effective_model(model: schema.Model) -> schema.Model:
    """Return an equivalent model that can be compared with others: settings without effect have their defaults.

    Settings of 0 or "" that stand for a computed value have that value.
    """
    default, local = schema.Model(), LOCAL in model.kinds
    changes: dict[str, Any] = {"init_std": default.init_std, "attention_pattern": model.kinds}
    scale = model.attn_logit_scale or model.head_dim**-0.5
    changes |= {"attn_logit_scale": float(f"{scale:.12g}"), "logit_multiplier": float(f"{model.logit_multiplier:.12g}")}
    changes |= {"sliding_window": model.sliding_window if local else 0}
    changes |= {"local_rope_base": (model.local_rope_base or model.rope_base) if local else 0.0}
    if local and not model.local_rope_base and model.rope_scaling != "none":
        changes["local_rope_base"] = 0.0  # local layers have scaled frequencies too, which no base expresses
    keys_by_type = {kind: {row.model_key for row in rows.values()} for kind, rows in ROPE_TYPES.items()}
    without_effect = [*set().union(*keys_by_type.values()) - keys_by_type[model.rope_scaling]]
    without_effect += ["experts_per_token", "router", "renormalize", "routed_scaling"] * (not model.num_experts)
    without_effect += ["router_groups", "groups_per_token"] * (model.groups_per_token == model.router_groups)
    return dataclasses.replace(model, **changes, **{name: getattr(default, name) for name in without_effect})


# ---- The folder


def export_model(
    path: str,
    out: Path,
    *,
    dtype: str = "auto",
    shard_size: str | int = "5GB",
    tokenizer: str = "",
    base: str = "",
    ema: bool = False,
    force: bool = False,
    raw: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Write a checkpoint as config.json, generation_config.json, safetensors files and the tokenizer's files to a folder.

    The folder has the name OUT.partial until it is complete.

    Args:
        path: a run's folder, or one of its checkpoints.
        out: the folder to write.
        dtype: dtype of the tensors: f32 | bf16 | auto, which is bf16 if all stored matrices are bfloat16, else f32. With `raw`,
            auto keeps every tensor's dtype, and bf16 rounds matrices alone.
        shard_size: largest size of a safetensors file, such as 5GB. The tensors of one file must fit into host memory.
        tokenizer: folder or tokenizer.json of the tokenizer; "": the run's tokenizer.
        base: for a run with adapters, the folder of their base model, if it was moved; "": its path in the checkpoint.
        ema: export the average of the weights (train.ema_decay).
        force: replace an existing folder after the new one is complete. If the process is killed meanwhile, the old folder may
            have the name OUT.replaced.
        raw: write all tensors with jaxtrain's names and axes, for a model of any family.
        say: called with each line of the report.

    Raises:
        HuggingFaceError, CheckpointError: the checkpoint cannot be exported. `out` is unchanged.
        ConfigError: there is no average of the weights.
    """
    source = open_origin(path).choose(ema)
    source.announce(say)
    run = source.run()
    wanted = {} if raw else model_entries(run.model)
    if out.name in ("", ".."):  # the finished folder could not be renamed to such a name
        raise HuggingFaceError(f"--out={out}: must end in the name of a folder. Fix: --out={out / 'served'}.")
    if out.exists() and not force:
        raise HuggingFaceError(f"{out}: is there already. Name another --out, or replace it with --force.")
    if out.exists() and (not has_model(out) or (out / "checkpoints").exists()):
        raise HuggingFaceError(f"{out}: is no folder with a Hugging Face model, and --force replaces nothing else.")
    stored, read = open_weights(source, base, dtype == "f32", say)
    if raw:
        wanted = raw_entries({name.removeprefix(PREFIX): a for name, a in stored.items()})
    check_complete(wanted, stored, source.name, run.model.family)
    # Scales of norms and biases are float32 with weights in bfloat16; an export rounds them, as published models do.
    matrices = {name for name in wanted if (is_matrix(name, stored[name].shape) if raw else not is_vector(name))}
    needs_float32 = {str(stored[name].dtype) for name in matrices} != {"bfloat16"}
    chosen = dtype if dtype != "auto" else ("f32" if needs_float32 else "bf16")
    dtypes = {name: DTYPES["f32" if entry.spec.exact else chosen] for name, entry in wanted.items()}
    if raw:
        dtypes = {name: a.dtype if dtype == "auto" or name not in matrices else DTYPES[dtype] for name, a in stored.items()}
    spec = tokenizer or run.data.tokenizer
    no_tokenizer = not tokenizer and not source.text().tokenizer_sha256 and not text_format.is_local(spec)  # and never had one
    try:
        loaded_tokenizer, text = (None, source.text()) if no_tokenizer else text_format.load_with_tokenizer(source.text(), spec)
    except TokenizerError as error:
        raise HuggingFaceError(f"{error} Name its folder: --tokenizer=DIR.") from error
    if loaded_tokenizer and (lost := source.text().lost_tokens(loaded_tokenizer)):
        say(f"{spec} has no {', '.join(lost)}, with which texts of {source.name} end: no eos of the export")
    special = text.ids_to_write(loaded_tokenizer.bos if loaded_tokenizer else ())
    positions, more = max(run.data.seq_len, source.positions), dict(special)
    if run.own and run.model.outside:
        more[OWN_SECTION] = dict(run.own)
    if raw:
        settings = {"model_type": RAW, "model": dataclasses.asdict(run.model), "max_position_embeddings": positions, **more}
    else:
        settings = config_json(run.model, chosen, positions, more)
    size = sum(math.prod(e.shape) * (1 + len(e.copies)) * dtypes[name].itemsize for name, e in wanted.items())
    check_space(out, size)

    target = out.resolve()  # the target of a symbolic link is replaced
    partial, replaced = (target.with_name(f"{target.name}.{state}") for state in ("partial", "replaced"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    started = time.perf_counter()
    try:
        with progress_bar(size) as progress:
            files = write_tensors(read, wanted, partial, dtypes, shard_size, progress)
    except (CheckpointError, HuggingFaceError):
        shutil.rmtree(partial)
        raise
    seconds = time.perf_counter() - started
    if loaded_tokenizer is None:
        say(f"{path} has no tokenizer, so {out} has none: copy one there, or name it with --tokenizer")
    else:
        folders.write_tokenizer(spec, text, partial)
    write_json(partial / CONFIG, settings)
    write_json(partial / GENERATION, text.generation_to_write(special))
    # The old folder is deleted only when the complete new folder has its name, even if the process is killed.
    if target.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(target, replaced)
    os.rename(partial, target)
    if replaced.exists():
        shutil.rmtree(replaced)
    wider = sorted({str(a.dtype) for name, a in stored.items() if a.dtype != dtypes[name] == DTYPES["bf16"]})
    rounded = f", rounded from {' and '.join(wider)}" if wider else ""
    tensors = plural(len({name for e in wanted.values() for name in e.hf_names}), "tensor")
    label = f"{run.model.family} with jaxtrain's names" if raw else settings["architectures"][0]
    kinds = " and ".join(sorted({str(dtype) for dtype in dtypes.values()})) if raw else chosen
    if loaded_tokenizer and text.template:
        say(f"chat template: {text.template_name}")
    say(f"{out}: {label}, {tensors} as {kinds}{rounded}, {plural(files, 'file')}, {format_rate(size, seconds)}")


def check_complete(wanted: Mapping[str, Entry], stored: Mapping[str, Any], source_name: str, family: str) -> None:
    """Raise HuggingFaceError unless a family's names and shapes in `wanted` are those of all tensors in `stored`."""

    def list_names(names: Collection[str]) -> str:
        shown = [name.removeprefix(PREFIX) for name in sorted(names)[:SHOWN]]
        return ", ".join(shown) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)

    if missing := wanted.keys() - stored.keys():
        raise HuggingFaceError(f"{source_name}: it has no {list_names(missing)}.")
    if unnamed := stored.keys() - wanted.keys():
        fix = "Fix: --raw, which writes every tensor with jaxtrain's names"
        raise HuggingFaceError(
            f"{source_name}: the FORMAT of model.family = {family!r} has no name for {list_names(unnamed)}. {fix}."
        )
    for name, entry in wanted.items():
        if (shape := tuple(stored[name].shape)) != entry.shape:
            rule = f"{list_names([name])} is {list(shape)}, and {list(entry.shape)} by the FORMAT of model.family = {family!r}"
            raise HuggingFaceError(f"{source_name}: {rule} ({entry.spec.jax_axes!r}).")


def write_tensors(
    read: Read,
    wanted: dict[str, Entry],
    out: Path,
    dtypes: Mapping[str, np.dtype[Any]],
    shard_size: str | int,
    progress: Callable[[str, int], None],
) -> int:
    """Write the safetensors files and, if there are several, their index. Return the number of files.

    The tensors of one file must fit into host memory. An array of experts whose tensors are in two files is read twice.

    dtypes: of the tensors in the files, by jaxtrain's name.
    """
    entries_by_name: dict[str, list[Entry]] = {}  # one tensor of the checkpoint may hold two of jaxtrain's
    for entry in wanted.values():
        for name in entry.hf_names:
            entries_by_name.setdefault(name, []).append(entry)
    split = huggingface_hub.split_state_dict_into_shards_factory(
        entries_by_name,
        get_storage_size=lambda sharing: math.prod(sharing[0].hf_shape) * dtypes[sharing[0].name].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_size,
    )
    for file, names in split.filename_to_tensors.items():
        arrays = {}
        for jax_name, x in read(list(dict.fromkeys(entry.name for name in names for entry in entries_by_name[name]))):
            entry, converted = wanted[jax_name], x.astype(dtypes[jax_name], copy=False)
            for index, name in enumerate(entry.hf_names):
                if split.tensor_to_filename[name] == file:
                    arrays[name] = entry.to_hf(converted, index, arrays.get(name))
                    progress(name, arrays[name].nbytes // len(entries_by_name[name]))
        # The library renames a temporary file of mode 0600. Permissions must follow the umask, as for all other files.
        (out / file).touch()
        mode = stat.S_IMODE((out / file).stat().st_mode)
        safetensors.numpy.save_file(arrays, out / file, {"format": "pt"})
        (out / file).chmod(mode)
    if split.is_sharded:
        write_json(out / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    return len(split.filename_to_tensors)
