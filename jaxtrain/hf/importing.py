"""A Hugging Face folder as a checkpoint of jaxtrain: `python -m jaxtrain.hf import DIR --out=CKPT`."""

import contextlib
import dataclasses
import importlib.metadata
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import config
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import RunConfig
from jaxtrain.hf import tokenizer_files
from jaxtrain.hf.folder import Folder
from jaxtrain.hf.loading import load, matched
from jaxtrain.hf.names import Matched, shown
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.metrics import write_atomic
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.train.state import Tensors

TOKENIZER = "tokenizer"  # its folder, beside the checkpoints


def run_of(folder: Folder, tokenizer: str, dtype: str) -> RunConfig:
    """The config that an imported checkpoint carries: the model's, its tokenizer's, and the type its weights are in."""
    tree = config.to_dict(config.RunConfig())
    tree["model"] = dataclasses.asdict(folder.model)
    tree["precision"] = "f32" if dtype == "f32" else "bf16"
    tree["dtypes"]["params"] = dtype
    tree["data"]["tokenizer"] = tokenizer
    # Positions up to here were learnt; sampling sees no farther.
    tree["data"]["seq_len"] = folder.seq_len or config.Data().seq_len
    run, problems = config.resolve(tree)
    if problems:
        raise HuggingFaceError("; ".join(map(str, problems)))
    return run


def spread(shape: tuple[int, ...], devices: list[Any]) -> NamedSharding:
    """Over all devices along the first dimension that divides by their number; whole where none does.

    Along another where each would get one of that dimension, as one expert: a save copies such parts in host memory first.
    """
    mesh = jax.make_mesh((len(devices),), ("all",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    even = [i for i, size in enumerate(shape) if size % len(devices) == 0]
    dim = next((i for i in even if shape[i] > len(devices)), even[0] if even else None)
    return NamedSharding(mesh, P() if dim is None else P(*[None] * dim, "all"))


def import_folder(folder: Folder, out: Path, dtype: str, say: Callable[[str], None], each: bool = False) -> None:
    """Writes OUT/config.json, OUT/checkpoints/0 and OUT/tokenizer. Raises HuggingFaceError, before anything is written.

    each: say also what becomes of each tensor.
    """
    if out.exists() and any(out.iterdir()):
        raise HuggingFaceError(f"{out}: is there already, and not empty. Name another --out, or remove it.")
    found = matched(folder)
    dtype = folder.dtype(x for e in found.used.values() for x in e.theirs) if dtype == "auto" else dtype
    size = sum(int(np.prod(e.shape)) for e in found.used.values()) * DTYPES[dtype].itemsize
    check_space(out, size)
    report(folder, found, dtype, say, each)

    devices = jax.local_devices()
    abstract = {
        name: jax.ShapeDtypeStruct(entry.shape, DTYPES[dtype], sharding=spread(entry.shape, devices))
        for name, entry in found.used.items()
    }
    started = time.perf_counter()
    with progress_bar(folder.bytes) as progress:
        tensors = load(folder, found, abstract, progress)
    seconds = time.perf_counter() - started
    say(
        f"read {gigabytes(folder.bytes)} in {seconds:.1f} s, {gigabytes(folder.bytes / seconds)}/s, onto {len(devices)} "
        f"{'device' if len(devices) == 1 else 'devices'}"
    )

    tokenizer = "byte"
    names = [name for name in tokenizer_files.TOKENIZER if (folder.path / name).is_file()]
    if (folder.path / "tokenizer.json").is_file():
        tokenizer = str((out / TOKENIZER).absolute())
    run = run_of(folder, tokenizer, dtype)
    started = time.perf_counter()
    save(out, run, tensors, {"hugging_face": {"folder": str(folder.path), "config": dict(folder.settings)}})
    if names:
        tokenizer_files.copy_files(folder.path, out / TOKENIZER)
    seconds = time.perf_counter() - started
    say(f"wrote {gigabytes(size)} in {seconds:.1f} s, {gigabytes(size / seconds)}/s, to {out}")
    if tokenizer == "byte":
        say(f"{folder.path} has no tokenizer.json: name one when you train or sample (data.tokenizer, --tokenizer)")


def report(folder: Folder, found: Matched, dtype: str, say: Callable[[str], None], each: bool) -> None:
    """What is there, and what is made of it."""
    m = folder.model
    parameters = sum(int(np.prod(e.shape)) for e in found.used.values())
    files = len({place.file for place in folder.tensors.values()})
    used = len({name for e in found.used.values() for name in e.theirs})
    say(
        f"{folder.path}: {m.family}, {count(parameters)} parameters, {len(folder.tensors)} tensors in {files} "
        f"{'file' if files == 1 else 'files'}; {used} used, {len(found.unused)} unused, 0 missing; stored as {dtype}"
    )
    for entry in found.used.values() if each else ():
        for at, name in enumerate(entry.theirs):
            there = f"{name} {shown(entry.their_shape)} {folder.tensors[name].dtype}"
            say(f"  {there} -> {entry.called(at)} {shown(entry.shape[1:] if entry.how.each_expert else entry.shape)}")
    for name, why in found.unused.items():
        say(f"  unused: {name} ({why})")


def check_space(out: Path, size: int) -> None:
    """Raises HuggingFaceError where the disk has no room."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise HuggingFaceError(
            f"{out}: {size / 2**30:.1f} GiB are needed, and {free / 2**30:.1f} GiB free. Name another --out."
        )


def gigabytes(size: float) -> str:
    """16.06 GB, or 0.76 MB"""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def count(number: int) -> str:
    """8.03 G, or 855 k"""
    scale, unit = next((x for x in ((1e9, "G"), (1e6, "M")) if number >= x[0]), (1e3, "k"))
    return f"{number / scale:.3g} {unit}"


def progress_bar(total: int) -> Any:
    """A context that gives `progress(name, bytes)`; a bar on a terminal, nothing elsewhere."""
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        return contextlib.nullcontext(lambda name, size: None)

    class Bar:
        def __enter__(self) -> Callable[[str, int], None]:
            columns = (
                *(rich.progress.BarColumn(), rich.progress.DownloadColumn(), rich.progress.TransferSpeedColumn()),
                *(rich.progress.TimeRemainingColumn(), rich.progress.TextColumn("{task.description}")),
            )
            self.bar = rich.progress.Progress(*columns, console=console, transient=True)
            self.bar.start()
            task = self.bar.add_task("", total=total)
            return lambda name, size: self.bar.update(task, advance=size, description=name)

        def __exit__(self, *error: object) -> None:
            self.bar.stop()

    return Bar()


def save(out: Path, run: RunConfig, tensors: Tensors, more: Mapping[str, Any]) -> None:
    """As a run of no steps. more: what meta.json says besides."""
    plain = config.to_dict(run)
    meta = {
        "config": plain,
        "data": {"tokens": 0, "fingerprint": {}},
        "loss": None,
        "receipt": None,
        **more,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint")},
    }
    checkpoints = Checkpoints(out / "checkpoints")
    try:
        checkpoints.save(0, tensors, meta)
    finally:
        checkpoints.close()
    write_atomic(out / "config.json", json.dumps(plain, indent=1) + "\n")
