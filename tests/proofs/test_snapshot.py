"""Copies of the state for saves: unchanged by later steps, compiled before they are needed, in reused memory."""

import functools
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpoints, digests
from jaxtrain.step.stacks import ON_HOST
from jaxtrain.step.state import to_tensors
from jaxtrain.train.snapshot import Snapshots

SMALL = {"model.num_layers": 2, "model.d_model": 16, "model.d_ff": 16, "model.num_heads": 2, "model.num_kv_heads": 2}
LAYOUTS = {
    "one device": {},
    "replicas": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "sharding.zero": 1},
    "moments on the host": {"mesh.fsdp": 2, "optimizer.offload": "moments"},
}


def begin(layout: str = "one device", **more: Any) -> tuple[Snapshots, Any]:
    """Return the snapshots of a run, and its first state."""
    run = helpers.tiny(SMALL | LAYOUTS[layout] | more)
    return Snapshots(helpers.program(run).state), helpers.fresh_state(run)


@functools.partial(jax.jit, donate_argnums=0)
def changed(arrays: list[jax.Array]) -> list[jax.Array]:
    return [x + 1 for x in arrays]


def step(current: Any) -> Any:
    """Return a new state in the memory of the old one, whose buffers are donated as in a train step."""
    leaves, tree = jax.tree.flatten(current)
    here = [x for x in leaves if x.sharding.memory_kind != ON_HOST]
    rest = [x for x in leaves if x.sharding.memory_kind == ON_HOST]
    new = iter(changed(here))
    moved = iter([jax.device_put(np.asarray(x) + 1, x.sharding) for x in rest])
    for x in rest:
        x.delete()
    kinds = [x.sharding.memory_kind for x in leaves]
    return jax.tree.unflatten(tree, [next(moved if kind == ON_HOST else new) for kind in kinds])


def copied(current: Any) -> dict[str, np.ndarray]:
    return {name: np.array(x) for name, x in to_tensors(current).items()}


def equal(tensors: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> bool:
    assert tensors.keys() == expected.keys()
    return all(np.array_equal(np.asarray(x), expected[name]) for name, x in tensors.items())


@pytest.mark.parametrize("layout", ["replicas", "moments on the host"])
def test_copies_outlive_the_state(layout: str) -> None:
    snapshots, current = begin(layout)
    for _ in range(2):
        expected = copied(current)
        tensors, sums, _ = snapshots.take(current)
        leaf = jax.tree.leaves(current.params)[0]
        current = step(current)
        assert leaf.is_deleted()
        assert equal(tensors, expected)
        found, wanted = sums(), digests.digest_arrays(tensors)
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(found[name], wanted[name]) for name in found)


def test_memory_of_the_save_before_is_used_again(tmp_path: Path) -> None:
    """Each save copies into the memory of the previous save's copies."""
    snapshots, current = begin()
    store, seen = Checkpoints(tmp_path, keep=9), []
    for i in range(3):
        tensors, sums, _ = snapshots.take(current)
        seen.append([part.data.unsafe_buffer_pointer() for x in tensors.values() for part in x.addressable_shards])
        store.save(i + 1, tensors, {}, sums)
        del tensors
        (saved,) = store.wait()
        assert not saved.error and saved.copying < saved.copied < saved.ended
        current = step(current)
    assert seen[0] == seen[1] == seen[2]


def test_what_somebody_still_reads_is_not_written_over() -> None:
    snapshots, current = begin()
    expected = copied(current)
    tensors = snapshots.take(current).tensors
    snapshots.forget()
    current = step(current)
    later = snapshots.take(current).tensors
    assert equal(tensors, expected)
    current = step(current)
    tensors = snapshots.take(current).tensors
    assert all(x.is_deleted() for x in later.values()), "without `forget` the next copies lie where these were"
    # Arrays fetched to the host share the copies' memory.
    read = {name: np.asarray(x) for name, x in tensors.items()}
    expected = {name: x.copy() for name, x in read.items()}
    again = snapshots.take(step(current)).tensors
    jax.block_until_ready(again)
    assert all(np.array_equal(x, expected[name]) for name, x in read.items())
    assert not equal(again, expected)


@pytest.mark.parametrize("layout", ["replicas", "moments on the host"])
def test_memory_of_all_copies_is_allocated_in_another_thread(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, pinning the copies' host memory in the training loop's thread would delay the first save."""
    snapshots, current = begin(layout)
    snapshots._keeps = False
    made, make = [], jax.make_array_from_callback

    def noted(*args: Any) -> jax.Array:
        made.append((threading.current_thread(), make(*args)))
        return made[-1][1]

    monkeypatch.setattr(jax, "make_array_from_callback", noted)
    snapshots.reserve()
    snapshots.reserve()
    snapshots.prepare().result()
    assert snapshots.ready and threading.current_thread() not in {thread for thread, _ in made}
    tensors = snapshots.take(current).tensors
    assert equal(tensors, copied(current))

    def described(arrays: Iterable[jax.Array]) -> list[tuple[Any, ...]]:
        return sorted((x.shape, str(x.dtype), x.addressable_shards[0].data.shape, x.sharding.memory_kind) for x in arrays)

    assert described(x for _, x in made) == described(tensors.values())


@pytest.mark.parametrize("keeps", [True, pytest.param(False, id="as on GPUs")])
def test_the_first_save_finds_everything_compiled(keeps: bool, caplog: pytest.LogCaptureFixture) -> None:
    snapshots, current = begin(**{"model.d_ff": 24})  # shapes of no other test
    snapshots._keeps = keeps
    snapshots.prepare().result()
    with jax.log_compiles():
        tensors, sums, _ = snapshots.take(current)
        found = sums()
    assert found.keys() == tensors.keys()
    assert not [message for message in caplog.messages if "Compiling" in message]
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(1)
    assert [message for message in caplog.messages if "Compiling" in message], "the log would say so"
