"""Read weights of a Hugging Face folder onto devices, as a run's first weights or as a checkpoint of jaxtrain.

Tensors are read one after the other. Host memory has the current tensor and the next tensor, which a thread reads meanwhile.
The experts of a layer are one array in jaxtrain, and often one tensor each in the folder. These tensors are read together.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.filesize import decimal

from jaxtrain.checkpoint import CheckpointError, Checkpoints, find_checkpoint
from jaxtrain.checkpoint import NotFinite as SavedNotFinite
from jaxtrain.checkpoint.manager import tensor_specs
from jaxtrain.config import schema
from jaxtrain.config.durations import duration
from jaxtrain.config.numbers import plural
from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.data import text_format
from jaxtrain.data.text_format import TextFormat
from jaxtrain.data.tokenizer import to_ids
from jaxtrain.hf import encoded
from jaxtrain.hf.folder import TOKENIZER, HfFolder, copy_tokenizer, is_folder, open_folder, stored_run
from jaxtrain.hf.names import PREFIX
from jaxtrain.hf.tensor_files import same_bits
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.metrics.files import write_atomic
from jaxtrain.metrics.progress import progress_bar
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.step.state import EMA, Tensors

COPIED = "tokenizer"  # the folder of the tokenizer in that of an import
Progress = Callable[[str, int], None]


class NotFiniteWeights(HuggingFaceError):
    """An error: a tensor has values that are not finite. All processes find it."""


# ---- The weights of a model


@dataclasses.dataclass(frozen=True)
class Origin:
    """The weights of a model: a step of a run, or a Hugging Face folder. No tensor is read yet.

    Attributes:
        name: a name of the weights for log lines.
        path: the folder of the step, or the Hugging Face folder.
        step: the step; 0 for a Hugging Face folder.
        meta: meta.json of the step; for a Hugging Face folder, what an import would write of `config`, `import_record`.
        stored: shape and dtype of every tensor, by its name in jaxtrain's checkpoints.
        read: returns some of the tensors, each with the requested dtype and sharding.
        read_stored: reads tensors of a checkpoint as they are stored; `read` decodes weights in fewer bits (encoded.py).
        folder: the opened Hugging Face folder; None for a step of a run.
        best: whether the step was chosen for its held-out loss, which `name` then tells.
    """

    name: str
    path: str
    step: int
    meta: Mapping[str, Any]
    stored: Mapping[str, jax.ShapeDtypeStruct]
    read: Callable[[Tensors], Tensors]
    read_stored: Callable[[Tensors], Tensors]
    folder: HfFolder | None = None
    best: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what of a Hugging Face folder is not used, or that matrices of a checkpoint are in fewer bits."""
        if form := encoded.low_bits_format(self.meta):
            return (f"the matrices of {self.name} are in {form}, which lora.base={form} keeps; all else uses their values",)
        return () if self.folder is None else self.folder.notes

    def announce(self, say: Callable[[str], None] | None = None) -> None:
        """Tell which step is used, if it was chosen for its held-out loss, and `notes`. say: None: lines on stderr."""
        say = say or functools.partial(print, file=sys.stderr)
        for line in [f"using {self.name}"] * self.best + [f"note: {note}" for note in self.notes]:
            say(line)

    @property
    def averaged(self) -> bool:
        """Return whether the checkpoint has an average of its weights (train.ema_decay)."""
        return bool(averages(self.stored))

    def choose(self, ema: bool) -> "Origin":
        """Return an origin of the averages in place of the weights that have one; without `ema`, this origin.

        Without `ema`, a line on stderr tells of averages that are not used. Raises ConfigError if there are none to use.
        """
        average_names = averages(self.stored)
        if average_names and not ema:
            note = f"{self.name} has an average of its weights too, which --ema (in Python ema=True) would use"
            print(f"note: {note}", file=sys.stderr)
        if not ema:
            return self
        if not average_names:
            rule = f"{self.name} has no average of weights"
            raise ConfigError([Problem("--ema", None, rule, "Leave --ema (in Python ema=True) out.")])
        stored = {name: a for name, a in self.stored.items() if not name.startswith(EMA)}

        def read(wanted: Tensors) -> Tensors:
            arrays = self.read({average_names.get(name, name): a for name, a in wanted.items()})
            return {name: arrays.pop(average_names.get(name, name)) for name in wanted}

        stored |= {name: self.stored[average] for name, average in average_names.items()}
        return dataclasses.replace(self, stored=stored, read=read)

    @property
    def adapters(self) -> bool:
        """Return whether the checkpoint has adapters without their base (jaxtrain/hf/lora.py)."""
        return "base" in self.meta

    def run(self) -> RunConfig:
        """Return the config of the weights' run. Raises HuggingFaceError if this version does not support that config."""
        return stored_run(self.meta, self.path)

    @property
    def positions(self) -> int:
        """Return the longest sequence that the model or one that it began from was trained with, in tokens; 0 if unknown."""
        return self.meta["positions"]

    def text(self) -> TextFormat:
        """Return how the model's texts end, and its chat template. Raises TokenizerError if a file cannot be read."""
        return TextFormat.from_record(self.meta["text"]) if self.folder is None else folder_text(self.folder)


def averages(stored: Iterable[str]) -> dict[str, str]:
    """Return name of a weight -> name of its average, for the weights with an average among the tensors of a checkpoint."""
    return {PREFIX + name.removeprefix(EMA): name for name in stored if name.startswith(EMA)}


def open_origin(path: str) -> Origin:
    """Open the weights of a run (at the step of `find_checkpoint`), a checkpoint, a Hugging Face folder, or a hub name hf:NAME.

    Raises CheckpointError or HuggingFaceError if the weights cannot be read.
    """
    if not is_folder(path):
        checkpoints, step, loss = find_checkpoint(path)
        meta = checkpoints.meta(step)
        step_path = str(checkpoints.directory / str(step))
        read = functools.partial(checkpoints.restore, step, subset=True, cast=True, meta=meta)
        name = f"step {step} of {checkpoints.directory}"
        in_bits = encoded.encoded_weights(meta)
        stored = encoded.decoded_shapes(meta, tensor_specs(meta))
        by = " by the average of its weights" if averages(stored) else ""
        name += "" if loss is None else f" (held-out loss {loss:.4f}{by}, the lowest)"
        return Origin(name, step_path, step, meta, stored, encoded.decoding_reader(read, in_bits), read, best=loss is not None)
    return origin_of(open_folder(path))


def origin_of(folder: HfFolder, progress: Progress = lambda name, size: None) -> Origin:
    """Return the weights of an opened Hugging Face folder. progress: as in `load_tensors`.

    Raises HuggingFaceError if its tensors do not fit config.json.
    """
    stored = {
        jax_name: jax.ShapeDtypeStruct(entry.shape, np.result_type(*(folder.tensors[x].holds for x in entry.hf_names)))
        for jax_name, entry in folder.matched[0].items()
    }
    meta = {"config": schema.to_dict(folder.run(folder.dtype)), **import_record(folder)}
    read = functools.partial(load_tensors, folder, progress=progress)
    return Origin(str(folder.path), str(folder.path.absolute()), 0, meta, stored, read, read, folder)


def folder_text(folder: HfFolder) -> TextFormat:
    """Return the text format of a Hugging Face folder (data/text_format.py). Raises TokenizerError."""
    text = text_format.read_text_format(str(folder.path))
    special = {key: folder.settings.get(key) for key in text_format.SPECIAL}
    return dataclasses.replace(text, special=special, eos=tuple(dict.fromkeys([*text.eos, *to_ids(special["eos_token_id"])])))


def import_record(folder: HfFolder) -> dict[str, Any]:
    """Return entries of meta.json of an imported folder: its path and config.json, and the length of its sequences."""
    record = {"folder": str(folder.path.absolute()), "config": dict(folder.settings)}
    return {"hugging_face": record, "positions": folder.seq_len}


# ---- Tensors onto devices


def load_tensors(folder: HfFolder, wanted: Tensors, progress: Progress) -> Tensors:
    """Return tensors of a folder, rounded where the dtype in `wanted` has fewer bits.

    Args:
        folder: an opened folder.
        wanted: shape, dtype and sharding of each array, by jaxtrain's names.
        progress: called with name and bytes of each tensor, when it is on the devices.

    Raises:
        HuggingFaceError: a tensor is missing, has another shape, differs from its copy, or has values that are not finite
            (NotFiniteWeights).
    """
    entries, _ = folder.matched
    for name, a in wanted.items():
        if name not in entries:
            raise HuggingFaceError(f"{name}: not in {folder.path}.")
        if entries[name].shape != a.shape:
            raise HuggingFaceError(f"{name}: {list(entries[name].shape)} in {folder.path}, {list(a.shape)} in this model.")
    first = {name: folder.tensors[entries[name].hf_names[0]] for name in wanted}
    order = sorted(wanted, key=lambda name: (first[name].file, first[name].offset))
    read_once = functools.lru_cache(1)(folder.read)  # the parts of a tensor are read one after the other

    def read_entry(name: str) -> list[np.ndarray]:
        arrays = [read_once(hf_name) for hf_name in entries[name].sources]
        for copy in entries[name].copies:
            if not same_bits(folder.read(copy), arrays[0]):
                rule = f"multi-token prediction shares {entries[name].hf_names[0]} with the model, but {copy} is another tensor"
                raise HuggingFaceError(f"{folder.path}: {rule}. Leave the modules out: --set num_nextn_predict_layers=0")
        return arrays

    out: Tensors = {}
    finite: dict[str, jax.Array] = {}
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="safetensors") as reader:
        following = [reader.submit(read_entry, name) for name in order[:1]]
        for i, name in enumerate(order):
            stored = following.pop().result()
            following += [reader.submit(read_entry, after) for after in order[i + 1 : i + 2]]
            a, entry = wanted[name], entries[name]
            shard = functools.partial(entry.to_jax, stored, np.dtype(a.dtype))
            out[name] = jax.make_array_from_callback(a.shape, a.sharding, shard).block_until_ready()
            finite[name] = _all_finite(out[name])
            progress(name, math.prod(a.shape) * stored[0].itemsize)
    # All processes have the same flags, so they raise the same error.
    if not_finite := [name for name, x in jax.device_get(finite).items() if not x]:
        used = [hf_name for name in not_finite for hf_name in entries[name].sources]
        names = [hf_name for hf_name in used if not np.isfinite(folder.read(hf_name).astype(np.float32)).all()]
        rule, fix = "has values that are NaN or infinite", "Fetch the folder again."
        if not names:
            names, rule, fix = used, "has values that bfloat16 cannot hold", "Fix: dtypes.params=f32, or hf import --dtype=f32."
        more = f", and so have {len(names) - 1} more tensors" * (len(names) > 1)
        raise NotFiniteWeights(f"{folder.path}: {names[0]} {rule}{more}. {fix}")
    return out


@jax.jit
def _all_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


# ---- `python -m jaxtrain hf import`


def spread_sharding(shape: tuple[int, ...], devices: list[Any]) -> NamedSharding:
    """Return a sharding over all devices, along the first dimension that is a multiple of their number; else replicated.

    A dimension with one element per device, such as experts, is used only if no other fits. A save would first copy such
    shards in host memory.
    """
    mesh = jax.make_mesh((len(devices),), ("all",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    even = [i for i, size in enumerate(shape) if size % len(devices) == 0]
    dim = next((i for i in even if shape[i] > len(devices)), even[0] if even else None)
    return NamedSharding(mesh, P() if dim is None else P(*[None] * dim, "all"))


def import_folder(folder: HfFolder, out: Path, dtype: str, say: Callable[[str], None], in_bits: Any = None) -> None:
    """Write OUT/config.json, OUT/checkpoints/0 and OUT/tokenizer.

    Args:
        folder: an opened folder.
        out: the run's folder to make.
        dtype: dtype of the weights: f32 | bf16 | auto, which is bf16 if all tensors are bfloat16, else f32. Tensors with
            `HfTensor.exact` are f32, and do not count for auto.
        say: called with each line of the report.
        in_bits: the `InBits` of matrices that are stored in fewer bits; None: all are stored in `dtype`.

    Raises:
        HuggingFaceError: the folder cannot be imported, and nothing is written.
    """
    check_new(out)
    entries, unused = folder.matched
    text = folder_text(folder).record()  # a damaged file is an error before the tensors are read
    dtype = folder.dtype if dtype == "auto" else dtype
    parameters = sum(math.prod(entry.shape) for entry in entries.values())
    devices = jax.local_devices()
    wanted: Tensors = {
        name: jax.ShapeDtypeStruct(
            entry.shape, DTYPES["f32" if entry.spec.exact else dtype], sharding=spread_sharding(entry.shape, devices)
        )
        for name, entry in entries.items()
    }
    wanted = in_bits.tensors if in_bits else wanted
    size = sum(math.prod(a.shape) * a.dtype.itemsize for a in wanted.values())
    check_space(out, size)
    files = plural(len({stored.file for stored in folder.tensors.values()}), "file")
    scale, unit = next((x for x in ((1e9, "G"), (1e6, "M")) if parameters >= x[0]), (1e3, "k"))
    say(
        f"{folder.path}: {folder.model.family}, {parameters / scale:.3g} {unit} parameters, {len(folder.tensors)} tensors in "
        f"{files}; {len(folder.tensors) - len(unused)} used, {len(unused)} unused, 0 missing; "
        f"stored as {in_bits.format if in_bits else dtype}"
    )
    for name, why in unused.items():
        say(f"  unused: {name} ({why})")
    for note in folder.notes:
        say(f"  note: {note}")

    started, more, lines = time.perf_counter(), {}, []
    with progress_bar(folder.bytes) as progress:
        if in_bits:
            tensors, more, lines = in_bits.read(progress)
        else:
            tensors = load_tensors(folder, wanted, progress)
    seconds = time.perf_counter() - started
    say(f"read {format_rate(folder.bytes, seconds)}, onto {plural(len(devices), 'device')}")
    for line in lines:
        say(line)

    started = time.perf_counter()
    run = folder.run(dtype)
    no_tokenizer = not (folder.path / "tokenizer.json").is_file()
    if not no_tokenizer:  # a path relative to the run's folder, which can be moved
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=COPIED))
    has_tokenizer = any((folder.path / name).is_file() for name in TOKENIZER)
    tokenizer = folder.path if has_tokenizer else None
    write_run_folder(out, schema.to_dict(run), tensors, {**import_record(folder), "text": text, **more}, tokenizer)
    say(f"wrote {format_rate(size, time.perf_counter() - started)}, to {out}")
    if no_tokenizer:
        say(f"{folder.path} has no tokenizer.json: name one when you train or sample (data.tokenizer, --tokenizer)")


def write_run_folder(
    out: Path, config: Mapping[str, Any], tensors: Tensors, more: Mapping[str, Any], tokenizer: Path | None = None
) -> None:
    """Write a run's folder, with config.json and a checkpoint of step 0.

    Args:
        out: a new folder (`check_new`). If it cannot be written, it is removed.
        config: as in config.json.
        more: further keys of meta.json, `text` and `positions` among them.
        tokenizer: the folder of the tokenizer to copy to OUT/COPIED.

    Raises OSError if the folder cannot be written.
    """
    meta = {
        "config": config,
        "data": {"tokens": 0, "fingerprint": {}},
        "loss": None,
        "receipt": None,
        **more,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint")},
    }
    try:
        if tokenizer:  # before the checkpoint, with which the run counts as complete
            copy_tokenizer(tokenizer, out / COPIED)
        Checkpoints(out / "checkpoints").save_now(0, tensors, meta)
        write_atomic(out / "config.json", json.dumps(config, indent=1) + "\n")
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, CheckpointError) and not isinstance(error, SavedNotFinite):
            raise OSError(f"{error}") from None
        raise


# ---- Shared with the export


def check_new(out: Path) -> None:
    """Raise HuggingFaceError if the folder `out` exists and is not empty."""
    if out.exists() and any(out.iterdir()):
        raise HuggingFaceError(f"{out}: is there already, and not empty. Name another --out, or remove it.")


def check_space(out: Path, size: int) -> None:
    """Raise HuggingFaceError if the disk of folder `out` has fewer than `size` free bytes."""
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise HuggingFaceError(f"{out}: {decimal(size)} are needed, and {decimal(free)} free. Name another --out.")


def format_rate(size: int, seconds: float) -> str:
    """Return a size, time and rate, such as "16.1 GB in 59.5 s, 269.9 MB/s". size: bytes."""
    return f"{decimal(size)} in {duration(seconds)}, {decimal(int(size / seconds))}/s"
