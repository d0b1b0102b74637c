"""A folder with a Hugging Face checkpoint, opened for reading: config.json, and where each tensor's bytes lie. No jax.

Tensors are read with plain reads into memory of their own, and the files are not mapped: the pages of a mapped file count as
memory of the process, so a checkpoint that is read once, from one end to the other, would be held twice.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain import config
from jaxtrain.config import Model
from jaxtrain.models import FAMILIES, family
from jaxtrain.models.hugging_face import HuggingFaceError, Settings

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": np.dtype("float32"), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("float16")}
LONGEST_HEADER = 100 << 20  # as the safetensors format has it
READ_BYTES = 64 << 20  # at a time: the kernel takes no more than 2 GiB


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    file: Path
    offset: int
    size: int  # bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Folder:
    """An opened checkpoint."""

    path: Path
    settings: Mapping[str, Any]  # config.json
    model: Model
    tensors: Mapping[str, Place]

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(place.size for place in self.tensors.values())

    @property
    def seq_len(self) -> int:
        """Positions that the model is made for; 0 where config.json does not say."""
        longest = self.settings.get("max_position_embeddings")
        return longest if isinstance(longest, int) else 0

    def dtype(self, names: Iterable[str]) -> str:
        """The smallest type that holds these tensors without rounding: bf16 | f32."""
        return "bf16" if all(self.tensors[name].dtype == DTYPES["BF16"] for name in names) else "f32"

    def read(self, name: str) -> np.ndarray:
        """A tensor as it is stored, in memory of its own. Raises HuggingFaceError where the file ends early."""
        place = self.tensors[name]
        buffer = bytearray(place.size)
        view, done = memoryview(buffer), 0
        with open(place.file, "rb", buffering=0) as file:
            file.seek(place.offset)
            while done < place.size:
                count = file.readinto(view[done : done + READ_BYTES])
                if not count:
                    raise HuggingFaceError(f"{place.file}: ends inside {name}, which has {place.size:,} bytes. Fetch it again.")
                done += count
        return np.frombuffer(buffer, place.dtype).reshape(place.shape)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a Hugging Face model, and not a run of jaxtrain: both have a config.json."""
    try:
        found = json.loads((Path(path).expanduser() / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "model_type" in found


def locate(name: str) -> Path:
    """The folder of a local path, or of a model's name in the hub's cache on this machine. Raises HuggingFaceError."""
    path = Path(name.removeprefix("hf:")).expanduser()
    if not name.startswith("hf:") and path.is_dir():
        return path
    import huggingface_hub

    found: Any = None
    hub_name = name.removeprefix("hf:")
    with contextlib.suppress(ValueError):  # no name that the hub could have
        found = huggingface_hub.try_to_load_from_cache(hub_name, CONFIG)
    if isinstance(found, str):
        return Path(found).parent
    if name.startswith(("/", ".", "~")):
        raise HuggingFaceError(f"{name}: no such folder. Name a model's folder, or hf:NAME of one in the hub's cache.")
    raise HuggingFaceError(
        f"{name}: no such folder, and no model of that name in the hub's cache on this machine. "
        f"Fetch it with: hf download {hub_name}"
    )


def open_folder(name: str | os.PathLike[str], changes: Mapping[str, Any] | None = None) -> Folder:
    """Config and list of tensors; no tensor is read. Raises HuggingFaceError for what is missing, cut off or not understood.

    changes: keys of config.json that are to be other than they stand there.
    """
    path = locate(os.fspath(name))
    settings = read_settings(path) | dict(changes or {})
    return Folder(path, settings, model_of(settings, str(path / CONFIG)), list_tensors(path))


def read_settings(path: Path) -> dict[str, Any]:
    """config.json as it is."""
    try:
        found = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HuggingFaceError(f"{path}: has no {CONFIG}. Name the folder of a Hugging Face model.") from error
    except (OSError, ValueError) as error:
        raise HuggingFaceError(f"{path / CONFIG}: cannot be read ({error}).") from error
    if not isinstance(found, dict):
        raise HuggingFaceError(f"{path / CONFIG}: is no JSON object.")
    return found


def model_of(settings: Mapping[str, Any], path: str = CONFIG) -> Model:
    """The model that a config.json describes. Raises HuggingFaceError for all that jaxtrain does not build."""
    kind, known = settings.get("model_type"), {family(name).MODEL_TYPE: name for name in FAMILIES}
    if kind not in known:
        if "text_config" in settings:
            rule = "models that see or hear are not supported, nor their text part alone"
        else:
            rule = f"no such architecture in jaxtrain. Known: {', '.join(known)}"
        raise HuggingFaceError(f"{path}: model_type = {kind!r}: {rule}.")
    module = family(known[kind])
    named = settings.get("architectures") or [module.ARCHITECTURE]
    if module.ARCHITECTURE not in named:
        raise HuggingFaceError(
            f"{path}: architectures = {named!r}: only {module.ARCHITECTURE} is a language model of this kind."
        )
    s = Settings(settings, path)
    values = {"family": known[kind], **module.read(s)}
    s.finish()
    std = settings.get("initializer_range")
    tree = config.to_dict(config.RunConfig()) | {"model": values | ({"init_std": std} if isinstance(std, float) else {})}
    run, problems = config.resolve(tree)
    if problems:
        raise HuggingFaceError(f"{path}: " + "; ".join(map(str, problems)))
    return run.model


def list_tensors(path: Path) -> dict[str, Place]:
    """Every tensor of the folder's safetensors files, by its name; headers are read and checked against the files' lengths."""
    if (path / INDEX).exists():
        try:
            named = dict(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise HuggingFaceError(f"{path / INDEX}: cannot be read as an index of safetensors ({error!r}).") from error
        files = sorted(set(named.values()))
    elif (path / SINGLE).exists():
        named, files = None, [SINGLE]
    else:
        others = sorted(p.name for p in path.glob("*.bin"))
        hint = f"It has {others[0]}: save it as safetensors with transformers first." if others else "Name a model's folder."
        raise HuggingFaceError(f"{path}: has neither {SINGLE} nor {INDEX}. {hint}")
    out: dict[str, Place] = {}
    for file in files:
        for name, place in read_header(path / file).items():
            if name in out:
                raise HuggingFaceError(f"{name}: is in {out[name].file.name} and in {file}. Remove one of them.")
            out[name] = place
    if named is not None:
        lost = sorted(name for name in named if name not in out or out[name].file.name != named[name])
        if lost:
            raise HuggingFaceError(f"{path / INDEX}: {lost[0]} should be in {named[lost[0]]}, which does not hold it.")
    return out


def read_header(file: Path) -> dict[str, Place]:
    """The tensors of one safetensors file (https://huggingface.co/docs/safetensors: eight bytes of length, JSON, then data)."""
    try:
        length = file.stat().st_size
        with open(file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if not 2 <= size <= min(LONGEST_HEADER, length - 8):
                raise HuggingFaceError(f"{file}: is no safetensors file, or cut off in its header.")
            header = json.loads(f.read(size))
    except FileNotFoundError as error:
        raise HuggingFaceError(f"{file}: no such file, but the index names it. Fetch it again.") from error
    except (OSError, ValueError) as error:
        if isinstance(error, HuggingFaceError):
            raise
        raise HuggingFaceError(f"{file}: cannot be read ({error}).") from error
    out = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise HuggingFaceError(f"{file}: the header's entry of {name} cannot be read ({info!r}).") from error
        if dtype not in DTYPES:
            raise HuggingFaceError(f"{file}: {name} has dtype {dtype}; {', '.join(DTYPES)} are supported.")
        if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise HuggingFaceError(f"{file}: {name} has {end - start:,} bytes, which is not {list(shape)} of {dtype}.")
        if 8 + size + end > length:
            raise HuggingFaceError(
                f"{file}: cut off: {name} ends at byte {8 + size + end:,}, the file at {length:,}. Fetch it again."
            )
        out[name] = Place(file, 8 + size + start, end - start, DTYPES[dtype], shape)
    return out


def describe(path: str) -> dict[str, dict[str, Any]]:
    """What a config file says of a run that begins from `path`: its section `model`, and what of `data` belongs to it.

    path: a Hugging Face folder, or hf:NAME, or a run's folder. `config.update(describe(path))` takes it over; no tensor is
    read. Raises HuggingFaceError.
    """
    if path.startswith("hf:") or is_folder(path):
        found = locate(path)
        settings = read_settings(found)
        model = dataclasses.asdict(model_of(settings, str(found / CONFIG)))
        longest = settings.get("max_position_embeddings")
        data = {"tokenizer": str(found.absolute())} if (found / "tokenizer.json").is_file() else {}
        return {"model": model, "data": data | ({"seq_len": longest} if isinstance(longest, int) else {})}
    try:
        run, problems = config.resolve(json.loads((Path(path).expanduser() / CONFIG).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise HuggingFaceError(f"{path}: no such folder, of a run or of a Hugging Face model.") from error
    except (OSError, ValueError, AttributeError) as error:
        raise HuggingFaceError(f"{path}: is neither a run's folder nor a Hugging Face model's ({error}).") from error
    if problems:
        raise HuggingFaceError(f"{path}: its config is not one of this version: {'; '.join(map(str, problems))}")
    return {
        "model": dataclasses.asdict(run.model),
        "data": {"tokenizer": run.data.tokenizer, "seq_len": run.data.seq_len},
    }
