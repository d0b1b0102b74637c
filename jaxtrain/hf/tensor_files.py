"""The safetensors files of a Hugging Face folder: which have the weights, and what tensors are in them. Imports no jax."""

import dataclasses
import json
import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from jaxtrain.config.commands import to_run_sh
from jaxtrain.data.rows import reject_duplicate_keys
from jaxtrain.hf import mxfp4
from jaxtrain.models.hugging_face import HuggingFaceError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER = "adapter_config.json"  # of PEFT
TRAINING_FILES = ("optimizer.pt", "rng_state.pth", "scaler.pt", "scheduler.pt", "training_args.bin")  # files without weights
# Ends of the names of files with weights, of any program.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
LFS = b"version https://git-lfs"  # the first bytes of a file that stands for one in Git LFS
BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two arrays of a tensor in MXFP4
SCALE = "_scale_inv"  # suffix of the scales of a tensor in FP8, one scale for each block of rows and columns
FP8, MXFP4, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype("uint8"), np.dtype(ml_dtypes.bfloat16)
# The first two are read only with the scales of their blocks.
DTYPES = {"F8_E4M3": FP8, "U8": MXFP4, "BF16": BF16, "F16": np.dtype("float16"), "F32": np.dtype("float32")}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        file: the file.
        offset: of the tensor's data in the file, in bytes.
        dtype, dims: dtype and shape in the file.
        scale: the scales by which its blocks are multiplied; None for a tensor that is not quantized.
        unread: the dtype in the file if it is none of DTYPES. `dtype` and `dims` are then those of its bytes.
    """

    file: Path
    offset: int
    dtype: np.dtype[Any]
    dims: tuple[int, ...]
    scale: "StoredTensor | None" = None
    unread: str = ""

    @property
    def holds(self) -> np.dtype[Any]:
        """Return the dtype of the tensor after `HfFolder.read`."""
        return BF16 if self.scale else self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor after `HfFolder.read`. The dimensions of a tensor in MXFP4 are in hf/mxfp4.py."""
        if not self.scale or self.dtype != MXFP4:
            return self.dims
        experts, outputs, count, _ = self.dims
        return experts, count * mxfp4.BYTES * 2, outputs

    @property
    def bytes(self) -> int:
        """Return the size of the tensor after `HfFolder.read`."""
        return math.prod(self.shape) * self.holds.itemsize

    @property
    def file_bytes(self) -> int:
        """Return the size of the tensor in the file."""
        return math.prod(self.dims) * self.dtype.itemsize

    def read(self, name: str) -> np.ndarray:
        """Return the array in the file. name: of the tensor. Raises HuggingFaceError if the file ends early."""
        # The library's own read holds Python's lock, so no tensor could be read while another is copied to devices.
        out = np.empty(self.dims, self.dtype)
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            if file.readinto(out.reshape(-1).view(np.uint8)) < out.nbytes:
                raise HuggingFaceError(f"{self.file}: ends inside {name}, which has {out.nbytes:,} bytes. Fetch it again.")
        return out


def weight_files(path: Path) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the names of (files that hold the model's weights, file of each tensor in the index, other files with weights).

    As in transformers, model.safetensors goes before an index. The second is {} if the index is not used.

    Raises HuggingFaceError if there are no weights, or if the index is damaged.
    """
    weight_map = {}
    if os.path.lexists(path / INDEX):
        weight_map = read_json_object(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise HuggingFaceError(f"{path / INDEX}: weight_map is no object with the file of each tensor. Fetch it again.")
    if os.path.lexists(path / SINGLE):
        files, weight_map = [SINGLE], weight_map if set(weight_map.values()) == {SINGLE} else {}
    else:
        files = sorted(set(weight_map.values()))
    present = sorted(p.name for p in path.iterdir() if p.name.lower().endswith(WEIGHTS) and p.name not in TRAINING_FILES)
    other_files = [name for name in present if name not in files]
    if not files:
        fix = "Name a model's folder."
        if (path / ADAPTER).is_file():
            raise HuggingFaceError(adapter_alone(path))
        if shards := [name for name in other_files if name.lower().endswith(".safetensors")]:
            fix = f"It has {shards[0]}: fetch {INDEX}, too, or rename a file that has all tensors to {SINGLE}."
        elif other_files:
            fix = f"It has {other_files[0]}: save it as safetensors with transformers first."
        raise HuggingFaceError(f"{path}: has neither {SINGLE} nor {INDEX}. {fix}")
    unused = [INDEX] if os.path.lexists(path / INDEX) and not weight_map else []
    return files, weight_map, unused + other_files


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's safetensors files by name. Raises HuggingFaceError for a damaged file or wrong index."""
    files, weight_map, _ = weight_files(path)
    out: dict[str, StoredTensor] = {}
    for file in files:
        tensors = list_file(path / file)
        for name in sorted(tensors.keys() & out.keys()):
            if not same_bits(out[name].read(name), tensors[name].read(name)):
                rule = f"{name} is another tensor in {out[name].file.name} than in {file}"
                raise HuggingFaceError(f"{path}: {rule}. Fetch both again.")
        out |= {name: stored for name, stored in tensors.items() if name not in out or weight_map.get(name) == file}
    lost = sorted(name for name in weight_map if name not in out or out[name].file.name != weight_map[name])
    if lost:
        raise HuggingFaceError(f"{path / INDEX}: {lost[0]} should be in {weight_map[lost[0]]}, which does not hold it.")
    return out


def with_scales(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors, each in FP8 or MXFP4 joined with its scales.

    Raises HuggingFaceError for a dtype that is not read, for FP8 without scales, and for scales that do not fit.
    """
    for name, stored in tensors.items():
        if stored.unread:
            rule = f"{name} has dtype {stored.unread}; {', '.join(DTYPES)} are read"
            raise HuggingFaceError(f"{stored.file}: {rule}. Save it as float32 first.")
    out = {name: stored for name, stored in tensors.items() if not name.endswith(SCALE)}
    for name, stored in out.items():
        scale = tensors.get(name + SCALE)
        if (stored.dtype == FP8) != (scale is not None):
            rule = f"is {stored.dtype}, and there is {'no' if scale is None else 'a'} {name}{SCALE}"
            scales = "scales are read of tensors in FP8, and those with scales alone"
            raise HuggingFaceError(f"{stored.file}: {name} {rule}: {scales}.")
        out[name] = dataclasses.replace(stored, scale=scale)
    for name in [name for name in out if name.endswith(BLOCKS)]:
        tensor_name = name.removesuffix(BLOCKS)
        blocks, scale = out[name], out.get(tensor_name + SCALES)
        if scale is None or {blocks.dtype, scale.dtype} != {MXFP4}:
            continue
        if blocks.dims != (*scale.dims, mxfp4.BYTES) or len(scale.dims) != 3:
            rule = f"{list(blocks.dims)} does not fit its scales, {list(scale.dims)}"
            raise HuggingFaceError(f"{blocks.file}: {name}: {rule}. Fetch it again.")
        del out[name], out[tensor_name + SCALES]
        out[tensor_name] = dataclasses.replace(blocks, scale=scale)
    return out


def apply_scales(x: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return a matrix in bfloat16, each block multiplied by its scale in float32 and rounded once.

    Raises HuggingFaceError unless there is one scale for each block.
    """
    wanted = tuple(-(-size // extent) for size, extent in zip(x.shape, block, strict=True)) if x.ndim == 2 else ()
    if scale.shape != wanted:
        raise HuggingFaceError(
            f"scales {list(scale.shape)} of a tensor {list(x.shape)} in FP8: blocks of {block} have {wanted}."
        )
    rows, columns = (np.repeat(np.arange(n), extent)[:size] for n, extent, size in zip(wanted, block, x.shape, strict=True))
    return (x.astype(np.float32) * scale.astype(np.float32)[rows][:, columns]).astype(BF16)


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether two arrays have the same dtype, shape and bits."""
    bits = [x.reshape(-1).view(np.uint8) for x in (first, second)]
    return (first.dtype, first.shape) == (second.dtype, second.shape) and np.array_equal(bits[0], bits[1])


def list_file(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name. Raises HuggingFaceError if the file is damaged.

    The file begins with the length of its header (eight bytes) and the header (JSON). The data follows.
    """
    first = b""
    try:
        with open(file, "rb") as f:
            first = f.read(len(LFS))
            with safetensors.safe_open(file, framework="np"):  # it checks that sizes fit, and that no tensors overlap
                f.seek(0)
                start = 8 + int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(start - 8), object_pairs_hook=reject_duplicate_keys)
    except FileNotFoundError as error:
        raise HuggingFaceError(f"{file}: no such file. Fetch it again.") from error
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        if first == LFS:
            rule = "only names a file in Git LFS, which was not fetched"
            raise HuggingFaceError(f"{file}: {rule}. Fix: git lfs pull, in the folder.") from error
        raise HuggingFaceError(f"{file}: is no safetensors file, damaged or cut off ({error}). Fetch it again.") from error
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        kind, (begin, end) = entry["dtype"], entry["data_offsets"]
        readable = kind in DTYPES
        dtype, dims = (DTYPES[kind], tuple(entry["shape"])) if readable else (np.dtype("uint8"), (end - begin,))
        out[name] = StoredTensor(file, start + begin, dtype, dims, unread="" if readable else kind)
    return out


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the contents of a file that holds a JSON object. Raises HuggingFaceError if it cannot be read or is damaged."""
    try:
        value = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=reject_duplicate_keys, parse_constant=_reject_number
        )
    except (OSError, ValueError, RecursionError) as error:
        raise HuggingFaceError(f"{path}: cannot be read as JSON ({error}). Fetch it again, or correct it.") from error
    if not isinstance(value, dict):
        raise HuggingFaceError(f"{path}: is no JSON object. Fetch it again.")
    return value


def _reject_number(word: str) -> Any:
    raise ValueError(f"it has the number {word}")


def adapter_alone(path: Path) -> str:
    fix = to_run_sh(f"python -m jaxtrain hf import-adapter {shlex.quote(str(path))} --base=MODEL --out=RUN; then use RUN")
    return f"{path}: has an adapter of PEFT, and no model. Fix: {fix}."
