"""Checkpoints on real files: a restore returns the saved arrays; failed and interrupted saves leave usable folders."""

import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved import abstract, assert_same, mesh, placed, save_steps, values

from jaxtrain.checkpoint import HELD_OUT, HELD_OUT_SETS, CheckpointError, Checkpoints, Damaged, files
from jaxtrain.checkpoint.storage import Storage


def test_restore_is_bit_identical_and_reported(tmp_path: Path):
    found = Checkpoints(tmp_path / "checkpoints", keep=2)
    tensors = placed(values(1), mesh(8, 1))
    begun = found.save(5, tensors, {"loss": 2.5, "data": {"position": 40}})
    [saved] = found.wait()
    size = sum(x.nbytes for x in tensors.values())
    assert saved.step == 5 and saved.bytes == size and saved is begun and saved.error is None
    assert saved.began <= saved.copying < saved.copied < saved.ended and saved.began < saved.returned <= saved.ended
    assert found.poll() == [], "each save is reported once"
    assert_same(Checkpoints(found.directory, 2).restore(5, abstract(tensors)), values(1))
    meta = found.meta(5)
    assert meta["format"] == 5 and meta["data"] == {"position": 40} and meta["bytes"] == size and meta["step"] == 5
    written = json.loads((tmp_path / "checkpoints/5/meta.json").read_text())
    assert {k: v for k, v in written.items() if k != "seal"} == meta, "plain JSON beside the arrays"
    stored = found.tensor_specs(5)
    assert {n: (s.shape, s.dtype) for n, s in stored.items()} == {n: (x.shape, x.dtype) for n, x in tensors.items()}
    assert files.check_files(found.directory / "5") == files.FileVerdict(
        True, (), files.check_files(found.directory / "5").bytes
    )
    # A save of the same step again changes nothing.
    assert found.save(5, placed(values(6), mesh(8, 1)), {}) is None
    assert Checkpoints(found.directory).save(5, placed(values(6), mesh(8, 1)), {}) is None, "nor from a resumed run"
    assert found.wait() == [] and found.meta(5)["loss"] == 2.5


def test_retention_keeps_the_newest_and_every_mth(tmp_path: Path):
    """Each save waits for the previous save."""
    found = Checkpoints(tmp_path, keep=1, keep_every=3)
    for step in range(1, 6):
        found.save(step, placed(values(step), mesh(8, 1)), {})
    assert [saved.step for saved in found.close()] == [1, 2, 3, 4, 5]
    assert found.steps() == [3, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "5"]
    # And the one with the lowest held-out loss, the older of two
    found = Checkpoints(tmp_path / "best", keep=1, keep_best=True)
    for step, loss in enumerate([3.0, 1.0, None, 1.0, 2.0], start=1):
        found.save(step, placed(values(step), mesh(8, 1)), {} if loss is None else {HELD_OUT: loss})
        assert step < 2 or found.best("") == 1.0, "also while it is being saved"
    assert [saved.step for saved in found.close()] == [1, 2, 3, 4, 5]
    assert found.steps() == [2, 5] and found.lowest() == (2, 1.0)
    (tmp_path / "best/2/meta.json").write_text("{}")
    assert found.lowest() == (5, 2.0)
    later = Checkpoints(tmp_path / "best", keep=1, keep_best=True)
    later.save_now(6, placed(values(6), mesh(8, 1)), {HELD_OUT: 9.0, HELD_OUT_SETS: "others"})
    assert found.lowest() == (6, 9.0) and found.lowest("") is None, "losses of other sets are not compared, nor kept"


def test_differences_are_named_before_anything_is_read(tmp_path: Path):
    found = save_steps(tmp_path, 1)
    wanted = abstract(placed(values(1), mesh(8, 1)))
    where = wanted["params.norm"].sharding

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=where)

    def error(tree: dict[str, jax.ShapeDtypeStruct], cast: bool = False) -> str:
        with pytest.raises(CheckpointError) as e:
            found.restore(1, tree, cast=cast)
        return str(e.value)

    assert "params.new:" in error(wanted | {"params.new": array((2,), "float32")})
    assert "params.norm:" in error({name: x for name, x in wanted.items() if name != "params.norm"})
    for changed, both in ((array((65,), "float32"), ("(64,)", "(65,)")), (array((64,), "bfloat16"), ("float32", "bfloat16"))):
        said = error(wanted | {"params.norm": changed})
        assert "params.norm:" in said and all(value in said for value in both)
    assert "optimizer.count:" in error(wanted | {"optimizer.count": array((), "float32")}, cast=True)
    many = error(wanted | {f"params.new{i}": array((2,), "float32") for i in range(20)})
    assert len(many.splitlines()) < 12 and str(tmp_path) in many
    rounded = wanted | {"params.norm": array((64,), "bfloat16")}
    got = np.asarray(found.restore(1, rounded, cast=True)["params.norm"])
    np.testing.assert_array_equal(got, values(1)["params.norm"].astype(jnp.bfloat16))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes read through Linux's /proc")
def test_a_subset_does_not_read_the_rest(tmp_path: Path):
    large = {f"optimizer.{i}": np.full((512, 1024), i, np.float32) for i in range(4)}
    small = {"params.a": np.arange(64, dtype=np.float32), "params.b": np.ones((8, 8), np.float32)}
    tensors = placed({**large, **small}, mesh(8, 1))
    found = Checkpoints(tmp_path)
    found.save_now(1, tensors, {})

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    wanted = {k: v for k, v in abstract(tensors).items() if k.startswith("params.")}
    with pytest.raises(CheckpointError, match=r"optimizer\.0"):
        found.restore(1, wanted)
    before = bytes_read()
    assert_same(found.restore(1, wanted, subset=True), small)
    assert bytes_read() - before < 1 << 20, "the other tensors hold 8 MiB"
    before = bytes_read()
    found.restore(1, abstract(tensors))
    assert bytes_read() - before > 7 << 20, "reads do show in this count"


def test_what_a_kill_would_leave_at_each_point_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy of the folder is taken at each point of a save. Runs restore each copy, onto another mesh, and save into it."""
    folder = tmp_path / "run"
    found = save_steps(folder, 1, keep=1)
    write, sync, rmtree = Storage.write, Storage.sync, shutil.rmtree

    def killed(point: str) -> None:
        shutil.copytree(folder, tmp_path / point)

    def written(storage: Storage, path: Path, text: str) -> None:
        if path.name == "meta.json":
            killed("before meta")
        write(storage, path, text)
        if path.name == "meta.json":
            killed("before arrays")

    def synced(storage: Storage, step: int) -> None:
        killed("before sync")
        sync(storage, step)

    def half_deleted(path: Path, **options: object) -> None:
        if str(path) == str(folder / "1"):
            next(p for p in Path(path).rglob("*") if p.is_file()).unlink()
            killed("while deleting")
        rmtree(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write", written)
        patch.setattr(Storage, "sync", synced)
        patch.setattr(shutil, "rmtree", half_deleted)
        found.save(2, placed(values(2), mesh(8, 1)), {"loss": 0.5})
        assert [end.error for end in found.wait()] == [None]
    states = {
        "before meta": {1: "complete", 2: "unfinished"},
        "before arrays": {1: "complete", 2: "unfinished"},
        "before sync": {1: "complete", 2: "complete"},  # the old step is deleted after the new step is on disk
        "while deleting": {1: "unfinished", 2: "complete"},  # a partly deleted step is not complete
    }
    for point, want in states.items():
        left = Checkpoints(tmp_path / point, keep=1)
        assert left.states() == want, point
        reached = left.latest()
        assert reached == max(step for step, state in want.items() if state == "complete")
        assert_same(left.restore(reached, abstract(placed(values(reached), mesh(2, 4)))), values(reached))
        left.save_now(3, placed(values(3), mesh(8, 1)), {})
        assert [p.name for p in (tmp_path / point).iterdir()] == ["3"], "the next save removes what was left over"


def test_a_failed_save_is_told_once_and_later_ones_work(tmp_path: Path):
    """The size of files is limited to 1 MB, as if the disk filled up in the middle of a write."""
    found = save_steps(tmp_path, 1)
    large = placed(values(2, width=1024), mesh(8, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        found.save(2, large, {})
        [failed] = found.wait()
        assert failed.error and failed.step == 2
        assert found.poll() == [], "told once"
        assert found.states() == {1: "complete"}, "what it had written is gone"
        found.save(3, large, {})
        found.save(5, placed(values(5), mesh(8, 1)), {})
        assert [(end.step, end.error is None) for end in found.close()] == [(3, False), (5, True)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["1", "5"], "a later save works"


def test_a_folder_that_cannot_be_listed_fails_one_save_alone(tmp_path: Path):
    found = save_steps(tmp_path / "steps", 1)
    (tmp_path / "steps").rename(tmp_path / "away")
    (tmp_path / "steps").write_text("")
    found.save(2, placed(values(2), mesh(8, 1)), {})
    [failed] = found.wait()
    assert isinstance(failed.error, CheckpointError)
    (tmp_path / "steps").unlink()
    (tmp_path / "away").rename(tmp_path / "steps")
    found.save_now(3, placed(values(3), mesh(8, 1)), {})
    assert found.steps() == [1, 3]


def broken(storage: Storage, step: int) -> None:
    raise OSError(5, "Input/output error")


def full(path: Path) -> object:
    return shutil._ntuple_diskusage(10, 10, 1000)


def read_only(storage: Storage, step: int) -> None:
    raise OSError(30, "Read-only file system")


@pytest.mark.parametrize(
    ("change", "full_disk"),
    [
        ((Storage, "sync", broken), False),
        ((shutil, "disk_usage", full), True),
        ((Storage, "make", read_only), False),
        ((None, "_device", 12345), False),
    ],
)
def test_a_save_that_cannot_end_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple, full_disk: bool
):
    """An error after the arrays, a full disk, one without the right to write, another disk mounted in place of the first."""
    found = save_steps(tmp_path, 1)
    copies = placed(values(2), mesh(8, 1))
    kept = [weakref.ref(x) for x in copies.values()]
    gc.disable()  # as during a run
    try:
        with monkeypatch.context() as patch:
            patch.setattr(change[0] or found.storage, *change[1:])
            found.save(2, copies, {})
            del copies
            [failed] = found.wait()
        assert [ref() for ref in kept] == [None] * len(kept), "its copies are freed at once"
    finally:
        gc.enable()
    assert failed.error
    assert ("Free some space" in str(failed.error)) == full_disk
    assert found.states() == {1: "complete"}
    found.save_now(2, placed(values(2), mesh(8, 1)), {})
    assert_same(found.restore(2, abstract(placed(values(2), mesh(8, 1)))), values(2))


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path):
    wrong = placed({**values(1), "params.norm": np.array([1, np.nan, np.inf], np.float32)}, mesh(8, 1))
    found = Checkpoints(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"params\.norm \(2 "):
        found.save_now(1, wrong, {})
    kept = Checkpoints(tmp_path / "b", finite=False)
    kept.save_now(1, wrong, {})
    assert np.isnan(np.asarray(kept.restore(1, abstract(wrong))["params.norm"])[1])
    with pytest.raises(Damaged, match=r"params\.norm"):
        Checkpoints(tmp_path / "b").restore(1, abstract(wrong))


def test_a_step_set_aside_can_be_saved_again(tmp_path: Path):
    found = save_steps(tmp_path, 1, 2, 3)
    found.set_aside(1)
    found.save_now(3, placed(values(33), mesh(8, 1)), {"loss": 0.0})
    assert_same(found.restore(3, abstract(placed(values(33), mesh(8, 1)))), values(33))


def test_values_that_are_not_those_saved_are_refused(tmp_path: Path):
    """Orbax does not detect flipped bits, but the digests do. For unreadable files, the error is short, without Orbax's page of
    text.
    """
    found = save_steps(tmp_path, 1, 2, 3)
    wanted = abstract(placed(values(2), mesh(8, 1)))
    name = "params.layers.1.attention.wq"
    shard = values(2)[name][:8].tobytes()
    [data] = [path for path in tmp_path.glob("2/arrays/**/d/*") if shard in path.read_bytes()]
    good = data.read_bytes()
    at = good.index(shard)
    data.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(Damaged, match=name + r"(.|\n)*--config\.checkpoint\.step=1 "):
        found.restore(2, wanted)
    data.write_bytes(good)
    assert_same(found.restore(2, wanted), values(2))
    for path in tmp_path.glob("2/arrays/**/d/*"):
        path.write_bytes(b"")
    with pytest.raises(Damaged, match=r"2/arrays .*--config\.checkpoint\.step=1 ") as e:
        found.restore(2, wanted)
    assert len(str(e.value)) - len(str(tmp_path)) < 850, "not Orbax's page"


HOST_MEMORY = """
import resource, sys, threading
import jax, jax.numpy as jnp
from jaxtrain.checkpoint import HELD_OUT, Checkpoints, arrays
from jaxtrain.train.saver import read_resident_gib
arrays.WRITE_BYTES = 1  # least: twice the largest tensor
found = Checkpoints(sys.argv[1])
found.save(1, {"params.a": jnp.ones(8)}, {})
found.wait()
tensors = jax.block_until_ready({f"params.{i}": jnp.full((32, 1 << 20), i, jnp.float32) for i in range(4)})
before, peaks, ended = read_resident_gib(), [0.0], threading.Event()
def watch():
    while not ended.wait(0.002):
        peaks.append(read_resident_gib())
thread = threading.Thread(target=watch)
thread.start()
found.save(2, tensors, {})
[saved] = found.close()
ended.set()
thread.join()
print(saved.bytes / 2**30, max(peaks) - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 - max(peaks))
"""


@pytest.mark.more
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory through Linux's /proc")
def test_a_save_of_half_a_gib_needs_little_more_host_memory(tmp_path: Path):
    """A save of four tensors of 128 MiB with the lowest limit holds about two of them in host memory."""
    line = [sys.executable, "-c", HOST_MEMORY, str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    ended = subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    size, more, reported = map(float, ended.stdout.split())
    assert size == 0.5 and 0.0 < more < 0.4 and reported > -0.05
