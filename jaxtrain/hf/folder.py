"""A folder with a Hugging Face model: config.json, the tensors' names, the tokenizer's files. Imports no jax."""

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from jaxtrain import checkpoint
from jaxtrain.config import installed, schema
from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.schema import Model, RunConfig
from jaxtrain.config.shapes import is_vector
from jaxtrain.data.chat_template import BYTE_TEMPLATE, tokenizer_template
from jaxtrain.data.text_format import GENERATION, TextFormat
from jaxtrain.data.tokenizer import (
    TokenizerError,
    cached_hub_path,
    find_missing_tokens,
    read_json,
    save_command,
    special_tokens,
)
from jaxtrain.hf import mxfp4
from jaxtrain.hf.names import EMBEDDING, HEAD, TIED, Entry, match_tensors, model_entries, raw_entries, text_names
from jaxtrain.hf.tensor_files import (
    ADAPTER,
    BF16,
    INDEX,
    MXFP4,
    SINGLE,
    StoredTensor,
    adapter_alone,
    apply_scales,
    list_tensors,
    read_json_object,
    same_bits,
    weight_files,
    with_scales,
)
from jaxtrain.models import hf_keys, rules
from jaxtrain.models.hf_keys import OWN_SECTION, HfKey, HfRow, Settings
from jaxtrain.models.hugging_face import RAW, HuggingFaceError, family_of, format_of, is_multimodal, text_config

CONFIG = "config.json"
# Files of tokenizers of any family.
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "tokenizer.model", "vocab.json", "merges.txt"),
)
SHOWN = 6  # files named one by one


@dataclasses.dataclass(frozen=True)
class HfFolder:
    """A folder with a Hugging Face model, and the model as jaxtrain's config.

    Attributes:
        path: the folder.
        settings: config.json; of a model that also sees or hears, that of its text part.
        model: the model.
        full_model_type: that of the model whose text part this is; "" for a model of text alone.
    """

    path: Path
    settings: Mapping[str, Any]
    model: Model
    full_model_type: str = ""

    @functools.cached_property
    def all_tensors(self) -> dict[str, StoredTensor]:
        """Return all of the folder's tensors by their names there. Raises HuggingFaceError: missing or damaged files."""
        return list_tensors(self.path)

    @functools.cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors' descriptions by name, as a folder of text alone would have them.

        Raises HuggingFaceError for files that are missing or damaged, and for a text part at an unknown place.
        """
        if not self.full_model_type:
            return with_scales(self.all_tensors)
        return with_scales(
            {name: self.all_tensors[full_name] for full_name, name in text_names(self.all_tensors, self.path).items()}
        )

    @functools.cached_property
    def matched(self) -> tuple[dict[str, Entry], dict[str, str]]:
        """Return (jaxtrain's name -> entry, unused tensor -> reason).

        Raises HuggingFaceError if the tensors do not fit config.json, or if a tied head differs from the embedding.
        """
        if self.raw:  # of bfloat16 matrices, norms and biases may be float32
            exact = {k for k, a in self.tensors.items() if a.dtype == np.float32 and not is_matrix(k, a.shape)}
            return raw_entries(self.tensors, exact), {}
        shapes = {name: stored.shape for name, stored in self.tensors.items()}
        wanted = model_entries(self.model, shapes)
        unused = match_tensors(wanted, shapes, f"{self.path}: its tensors are not those of config.json:", self.model)
        for name in (name for name, why in unused.items() if why == TIED):
            if not same_bits(self.read(name), self.read(EMBEDDING)):
                rule = f"tie_word_embeddings is true, but {name} is not the embedding"
                raise HuggingFaceError(f"{self.path}: {rule}. Remove the wrong one of the two.")
        return wanted, unused

    @property
    def dtype(self) -> str:
        """Return bf16 if all tensors without `HfTensor.exact` are bfloat16 after reading, else f32: none is rounded."""
        names = [name for entry in self.matched[0].values() if not entry.spec.exact for name in entry.hf_names]
        return "bf16" if all(self.tensors[name].holds == BF16 for name in names) else "f32"

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """Return what of the folder is not used although it may count: other weights, adapters, settings for generation."""
        files, _, other_files = weight_files(self.path)
        out = []
        if self.full_model_type:
            unused = {name: a for name, a in self.all_tensors.items() if name not in text_names(self.all_tensors, self.path)}
            modules = dict.fromkeys(name.removeprefix("model.").partition(".")[0] for name in unused)
            size = decimal(sum(a.file_bytes for a in unused.values()))
            shown = f"{len(unused)} tensors, {size} ({', '.join(modules)})" if unused else "no tensors"
            out.append(f"{self.path}: the text part of {self.full_model_type} is used; left out: {shown}")
        adapters = [name for name in other_files if name.startswith("adapter_model.")]
        if (self.path / ADAPTER).is_file() or adapters:
            quoted_path = shlex.quote(str(self.path))
            fix = to_run_sh(f"python -m jaxtrain hf import-adapter {quoted_path} --base={quoted_path} --out=RUN; then use RUN")
            out.append(f"{self.path}: has an adapter of PEFT, which is not applied. With it: {fix}")
        if unused_files := [name for name in other_files if name not in adapters]:
            shown = ", ".join(unused_files[:SHOWN]) + f" and {len(unused_files) - SHOWN} more" * (len(unused_files) > SHOWN)
            used_files = SINGLE if files == [SINGLE] else f"the files in {INDEX}"
            out.append(f"{self.path}: the weights are those of {used_files}, as in transformers; not used: {shown}")
        generation = {key: self.settings.get(key) for key in hf_keys.GENERATION}
        if ignored := [f"{k} = {x!r}" for k, x in generation.items() if x is not None and x != hf_keys.GENERATION[k]]:
            shown = ", ".join(ignored)
            out.append(f"{self.path / CONFIG}: not used, since they are for {GENERATION}: {shown}")
        if not self.seq_len:
            out.append(f"{self.path / CONFIG}: has no max_position_embeddings: data.seq_len is {schema.Data().seq_len}")
        try:
            tokens = find_missing_tokens(str(self.path)) if (self.path / "tokenizer.json").is_file() else []
        except TokenizerError as error:  # text is refused; logits of ids are not
            tokens = []
            out.append(str(error))
        if tokens:
            rule = f"{self.path / 'tokenizer.json'} does not have {', '.join(tokens[:SHOWN])}, which other files name"
            out.append(f"{rule}: read as characters. transformers adds them. Fix: {save_command(self.path)}")
        eos = self.settings.get("eos_token_id")
        ids = [i for i in (eos if isinstance(eos, list) else [eos]) if i is not None]
        if invalid_ids := [i for i in ids if type(i) is not int or not 0 <= i < self.model.vocab_size]:
            rule = f"is no id of a token, which are below vocab_size = {self.model.vocab_size}"
            out.append(f"{self.path / CONFIG}: eos_token_id = {invalid_ids[0]!r}: {rule}: no text ends there")
        return tuple(out)

    @property
    def raw(self) -> bool:
        """Return whether the tensors have jaxtrain's own names and axes, as `hf export --raw` writes them."""
        return self.settings.get("model_type") == RAW

    @property
    def bytes(self) -> int:
        """Return the sum of `StoredTensor.bytes` over all tensors."""
        return sum(stored.bytes for stored in self.tensors.values())

    def run(self, dtype: str = "f32") -> RunConfig:
        """Return the config of a run with this model and tokenizer. dtype: of the weights, f32 | bf16."""
        tree = schema.to_dict(RunConfig())
        tree["model"] = dataclasses.asdict(self.model)
        tree |= {schema.OWN: self.settings[OWN_SECTION]} if OWN_SECTION in self.settings else {}
        tree["precision"] = "f32" if dtype == "f32" else "bf16"
        tree["dtypes"]["params"] = dtype
        tree["data"]["tokenizer"] = str(self.path.absolute())  # also without a tokenizer.json: text is refused then
        # The model was trained with positions up to seq_len, so sampling uses no more.
        tree["data"]["seq_len"] = self.seq_len or schema.Data().seq_len
        run, problems = schema.resolve(tree)
        if problems:
            raise HuggingFaceError("; ".join(map(str, problems)))
        return run

    @property
    def seq_len(self) -> int:
        """Return max_position_embeddings of config.json; 0 if it is missing."""
        return self.settings.get("max_position_embeddings") or 0

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in its stored dtype, or in bfloat16 if it is stored in FP8 or MXFP4.

        FP8 is multiplied by its scales and rounded. bfloat16 represents MXFP4 exactly. Raises HuggingFaceError if the file ends
        early.
        """
        stored = self.tensors[name]
        array = stored.read(name)
        if not stored.scale:
            return array
        scale = stored.scale.read(f"the scales of {name}")
        return mxfp4.unpack_mxfp4(array, scale) if stored.dtype == MXFP4 else apply_scales(array, scale, self.block)

    @property
    def block(self) -> tuple[int, int]:
        """Return (rows, columns) of the blocks that share a scale in FP8. Raises HuggingFaceError if config.json lacks them."""
        sizes = (self.settings.get("quantization_config") or {}).get("weight_block_size")
        if not (isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(n, int) and n > 0 for n in sizes)):
            rule = "weight_block_size must be the rows and columns of a block"
            raise HuggingFaceError(f"{self.path / CONFIG}: quantization_config: {rule}, as [128, 128].")
        return sizes[0], sizes[1]


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor, by jaxtrain's name, is a matrix: those have dtypes.params, and norms and biases float32."""
    return len(shape) > 1 and not is_vector(name)


def has_model(folder: Path) -> bool | None:
    """Return whether config.json is that of a Hugging Face model (True) or of a run (False); None if it tells neither."""
    settings: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(settings, dict) or not ("model_type" in settings or isinstance(settings.get("model"), dict)):
        return None
    return "model_type" in settings


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is hf:NAME, or the folder of a Hugging Face model or adapter, and not of a run.

    A folder whose config.json is missing or damaged is known by its other files. A file is one in such a folder.
    """
    if os.fspath(path).startswith("hf:"):
        return True
    folder = Path(path).expanduser()
    if folder.is_file():
        return True
    if (verdict := has_model(folder)) is not None:
        return verdict
    signs = (INDEX, ADAPTER, GENERATION, *TOKENIZER)
    is_run = any((folder / name).exists() for name in ("checkpoints", "arrays"))
    return not is_run and (any((folder / name).is_file() for name in signs) or any(folder.glob("*.safetensors")))


def is_raw(folder: Path) -> bool:
    """Return whether a folder's tensors have jaxtrain's own names, as `hf export --raw` writes them."""
    return read_settings(folder).get("model_type") == RAW


def locate_folder(name: str) -> Path:
    """Return a model's folder, by its path or by its name in the hub's cache on this machine. Raises HuggingFaceError."""
    path = Path(name.removeprefix("hf:")).expanduser()
    if not name.startswith("hf:") and path.is_dir():
        return path
    if path.is_file():
        raise HuggingFaceError(f"{name}: is a file. Name its folder: {path.parent}.")
    import huggingface_hub

    cached: Any = None
    hub_name = name.removeprefix("hf:")
    with contextlib.suppress(ValueError):  # not a valid name on the hub
        cached = huggingface_hub.try_to_load_from_cache(hub_name, CONFIG)
    if isinstance(cached, str):
        return Path(cached).parent
    if name.startswith(("/", ".", "~")):
        raise HuggingFaceError(f"{name}: no such folder. Name a model's folder, or hf:NAME of one in the hub's cache.")
    raise HuggingFaceError(
        f"{name}: no such folder, and no model of that name in the hub's cache on this machine. "
        f"Fetch it with: {installed.script('hf')} download {hub_name}"
    )


def open_folder(name: str | os.PathLike[str], changes: Mapping[str, Any] | None = None) -> HfFolder:
    """Open a model's folder.

    Args:
        name: path of the folder, or the model's name in the hub's cache.
        changes: keys of config.json to add or replace.

    Raises:
        HuggingFaceError: config.json is missing or damaged, or jaxtrain does not support the model.

    Of a model that also sees or hears, the text part is opened, and `changes` are those of its config.json.
    """
    path = locate_folder(os.fspath(name))
    settings = read_settings(path)
    if changes and settings.get("model_type") == RAW:
        rule = f"is a key of other programs' config.json, and {path} has the sections of jaxtrain's configs"
        raise HuggingFaceError(f"--set={next(iter(changes))}: {rule}. Fix: change `model` in {path / CONFIG}.")
    overrides, full_model_type = dict(changes or {}), ""
    if is_multimodal({**overrides, **settings}):
        full_model_type = str(settings.get("model_type"))
        settings = text_config(
            settings, overrides, str(path / CONFIG), lambda: any(x.endswith(HEAD) for x in list_tensors(path))
        )
    settings |= overrides
    folder = HfFolder(path, settings, model_of(settings, str(path / CONFIG)), full_model_type)
    if not folder.raw and folder.model.mtp_layers and any(path.glob("*.safetensors")):
        # transformers writes the number of modules of multi-token prediction, and none of their tensors.
        last = f"model.layers.{folder.model.num_layers}."
        if not any(name.startswith(last) for name in folder.tensors):
            return dataclasses.replace(folder, model=dataclasses.replace(folder.model, mtp_layers=0))
    return folder


def read_settings(path: Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json. Raises HuggingFaceError if it cannot be read."""
    if not os.path.lexists(path / CONFIG):
        if (path / ADAPTER).is_file():
            raise HuggingFaceError(adapter_alone(path))
        raise HuggingFaceError(f"{path}: has no {CONFIG}. Name the folder of a Hugging Face model.")
    return read_json_object(path / CONFIG)


def model_of(settings: Mapping[str, Any], path: str = CONFIG) -> Model:
    """Return the model that a config.json describes. Raises HuggingFaceError for a model that jaxtrain does not support."""
    if settings.get("model_type") == RAW:
        return _checked_model(settings.get("model"), path, {})
    family = family_of(settings, path)
    layout = format_of(family)
    architectures = settings.get("architectures") or [layout.architecture]
    if not isinstance(architectures, list) or layout.architecture not in architectures:
        rule = f"only {layout.architecture} is a language model of this kind"
        raise HuggingFaceError(f"{path}: architectures = {architectures!r}: {rule}.")
    return _checked_model({"family": family, **layout.read(Settings(settings, path))}, path, layout.keys)


def _checked_model(values: Any, path: str, rows: Mapping[str, HfRow]) -> Model:
    """Return the model with these keys of the section `model`. Raises HuggingFaceError for a model that no run may have.

    rows: the table by which the keys were read, for errors.
    """
    if not isinstance(values, Mapping):
        raise HuggingFaceError(f"{path}: has no section `model`. Write the folder again: hf export RUN --out=DIR --raw.")
    run, problems = schema.resolve(schema.to_dict(schema.RunConfig()) | {"model": values})
    if problems := problems or rules.model_problems(run.model):
        key_names = {f"model.{row.model_key}": key for key, row in rows.items() if isinstance(row, HfKey)}
        shown = (f"{key_names[p.key]}, which is {p}" if p.key in key_names else str(p) for p in problems)
        raise HuggingFaceError(f"{path}: no run may have this model: {'; '.join(shown)}")
    return run.model


# ---- Runs of jaxtrain


def stored_run(meta: Mapping[str, Any], step: str | os.PathLike[str]) -> RunConfig:
    """Return the config in a step's meta.json. step: the step's folder.

    An imported model has a relative `data.tokenizer`. It becomes a path in the run's folder. Keys that no longer exist are
    ignored, except in the sections that decide what the weights compute.

    Raises:
        HuggingFaceError: this version of jaxtrain does not support the config.
    """
    run, problems = schema.resolve(meta["config"])
    problems = [p for p in problems if p.rule != schema.NO_KEY or p.key.startswith(("model.", "lora."))]
    if problems:
        raise HuggingFaceError(f"{step}: its config is not one of this version: {'; '.join(map(str, problems))}")
    tokenizer = Path(step).parent.parent / run.data.tokenizer
    return dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=str(tokenizer))) if tokenizer.exists() else run


def describe(path: str) -> dict[str, dict[str, Any]]:
    """Return the sections of a config file that begins from `path`: `config.update(describe(path))`.

    They are `model` and `data`; `own` for a family from outside the package; `lora` for adapters, which are trained further.

    Args:
        path: a Hugging Face folder, hf:NAME, a run's folder, or one of its checkpoints. No tensor is read.

    Raises:
        HuggingFaceError, CheckpointError: `path` has no model, or this version of jaxtrain does not support its config.
    """
    adapters: dict[str, dict[str, Any]] = {}
    if is_folder(path):
        run = open_folder(path).run()
    else:
        checkpoints, step = checkpoint.locate_checkpoint(path)
        meta = checkpoints.meta(step)
        run = stored_run(meta, checkpoints.directory / str(step))
        adapters = {"lora": dataclasses.asdict(run.lora)} if "base" in meta else {}
    own_section = {schema.OWN: dict(run.own)} if run.own and run.model.outside else {}
    data = {"tokenizer": run.data.tokenizer, "seq_len": run.data.seq_len}
    return {"model": dataclasses.asdict(run.model), "data": data, **own_section, **adapters}


# ---- The tokenizer's files


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files (TOKENIZER) and generation_config.json to `target`, those that `source` has."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (*TOKENIZER, GENERATION):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_tokenizer(spec: str, text: TextFormat, target: Path) -> None:
    """Write the files of the tokenizer that `load_tokenizer(spec)` loads, so that transformers gives the same ids.

    The chat template of `text` replaces the tokenizer's own. Without tokenizer_config.json, transformers would choose a
    tokenizer by model_type and add the tokens of that tokenizer.
    """
    if spec == "byte":
        write_byte_tokenizer(target)
    else:
        file = cached_hub_path(spec.removeprefix("hf:")) if spec.startswith("hf:") else Path(spec).expanduser()
        assert file is not None, spec
        file = file / "tokenizer.json" if file.is_dir() else file
        copy_tokenizer(file.parent, target)
        shutil.copyfile(file, target / "tokenizer.json")
    _, template = tokenizer_template(str(target))
    settings = read_json(str(target), "tokenizer_config.json")
    if not settings and text.eot is not None:
        import tokenizers

        tokenizer: Any = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.id_to_token(text.eot)}
    if text.template:
        lacking = {k: v for k, v in text.tokens.items() if v and k not in special_tokens(str(target))}
        settings = settings | lacking
    if text.template and text.template != template:
        settings.pop("chat_template", None)
        (target / "chat_template.jinja").write_text(text.template, encoding="utf-8")
    if settings != read_json(str(target), "tokenizer_config.json"):
        write_json(target / "tokenizer_config.json", settings)


def write_byte_tokenizer(target: Path) -> None:
    """Write jaxtrain's byte tokenizer as a tokenizer.json with the same ids, and its chat template (BYTE_TEMPLATE)."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # Byte-level BPE writes each byte as one letter: printable bytes as themselves, all others in order from letter 256 on.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    unprintable = [byte for byte in range(256) if chr(byte) not in letters]
    vocab = {c: ord(c) if ord(c) < 256 else unprintable[ord(c) - 256] for c in letters}
    end = "<|endoftext|>"
    tokenizer: Any = tokenizers.Tokenizer(models.BPE(vocab=vocab | {end: 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end])
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "chat_template": BYTE_TEMPLATE,
    }
    write_json(target / "tokenizer_config.json", settings)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file with the indentation that transformers uses."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
