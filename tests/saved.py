"""Tensors with NaN, infinite and subnormal values, checkpoints of them, and step folders for code that reads no tensor."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.checkpoint import Checkpoints, files
from jaxtrain.checkpoint.manager import FORMAT


def mesh(rows: int, columns: int) -> jax.sharding.Mesh:
    return jax.make_mesh((rows, columns), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def values(seed: int, width: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for i in range(3):
        out[f"params.layers.{i}.attention.wq"] = rng.standard_normal((width, 2 * width), dtype=np.float32)
        out[f"optimizer.mu.layers.{i}.attention.wq"] = np.array(jnp.asarray(rng.standard_normal((width, 8)), jnp.bfloat16))
    out["params.norm"] = rng.standard_normal(width, dtype=np.float32)
    out["optimizer.odd"] = np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)
    out["optimizer.count"] = np.array(seed, np.int32)
    return out


def placed(arrays: dict[str, np.ndarray], onto: jax.sharding.Mesh) -> dict[str, jax.Array]:
    def spec(x: np.ndarray) -> PartitionSpec:
        return PartitionSpec("fsdp", "tensor") if x.ndim == 2 else PartitionSpec()

    return {name: jax.device_put(x, NamedSharding(onto, spec(x))) for name, x in arrays.items()}


def abstract(tensors: dict[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in tensors.items()}


def assert_same(got: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        y = np.asarray(got[name])
        assert y.dtype == x.dtype and y.shape == x.shape and y.tobytes() == x.tobytes(), name


def save_steps(folder: str | os.PathLike[str], *steps: int, keep: int = 100, **options: int) -> Checkpoints:
    """Save `values(step)` for each step, and return the checkpoints."""
    found = Checkpoints(folder, keep, **options)
    for step in steps:
        found.save(step, placed(values(step), mesh(8, 1)), {"loss": 1.0 / step})
        for ended in found.wait():
            if ended.error:
                raise ended.error
    return found


def write_step(folder: Path, step: int, **meta: object) -> Path:
    """Write a step folder with checksums and without tensors. Code that reads no tensor finds a complete step."""
    made = folder / str(step)
    (made / "arrays/d").mkdir(parents=True)
    for name in ("arrays/d/0", "arrays/manifest", "arrays/commit_success.txt"):
        (made / name).write_bytes(name.encode() * 40)
    record = {"format": FORMAT, "step": step, "bytes": 800, "tensors": {}, "time_unix": 0.0, "loss": 1.0 / step, **meta}
    (made / "meta.json").write_text(files.to_sealed_json(record))
    (made / files.NAME).write_text(files.encode_digests(files.digest_files(made, files.list_step_files(made))))
    return made


def killed_after(monkeypatch: pytest.MonkeyPatch, place: Path, changes: int, act: Callable[[], object]) -> bool:
    """Interrupt `act` after `changes` renames or deletions of paths below `place`. Returns whether it was interrupted."""
    made = itertools.count(1)

    def until_killed(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **options: Any) -> Any:
            if str(path).startswith(str(place)) and next(made) > changes:
                raise KeyboardInterrupt
            return change(path, *args, **options)

        return changed

    with monkeypatch.context() as patch:
        for owner, name in ((os, "rename"), (os, "replace"), (Path, "unlink"), (shutil, "rmtree")):
            patch.setattr(owner, name, until_killed(getattr(owner, name)))
        try:
            act()
        except KeyboardInterrupt:
            return True
    return False
