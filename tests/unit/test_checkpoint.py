"""Checkpoints on real files: what comes back is what was saved, and a process killed at any point loses nothing older."""

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain import checkpoint, config, resume, start
from jaxtrain.checkpoint import CheckpointError, Checkpoints, Damaged
from jaxtrain.checkpoint.__main__ import main


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


def save_steps(folder: Path, *steps: int, keep: int = 100, **kwargs: int) -> Checkpoints:
    found = Checkpoints(folder, keep, **kwargs)
    for step in steps:
        found.save(step, placed(values(step), mesh(8, 1)), {"loss": 1.0 / step})
        found.wait()
    return found


def test_restore_is_bit_identical_and_reported(tmp_path: Path):
    found = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert found.latest() is None and not found.directory.exists(), "opening writes nothing"
    tensors = placed(values(1), mesh(8, 1))
    blocked = found.save(5, tensors, {"loss": 2.5, "data": {"position": 40}})
    [saved] = found.wait()
    size = sum(x.nbytes for x in tensors.values())
    assert saved.step == 5 and saved.bytes == size and saved.blocked_s == blocked and saved.total_s >= saved.blocked_s > 0
    assert found.poll() == [], "each save is reported once"
    assert_same(Checkpoints(found.directory, 2).restore(5, abstract(tensors)), values(1))
    meta = found.meta(5)
    assert meta["format"] == 2 and meta["data"] == {"position": 40} and meta["bytes"] == size and meta["step"] == 5
    written = json.loads((tmp_path / "checkpoints/5/meta.json").read_text())
    assert {k: v for k, v in written.items() if k != "seal"} == meta, "plain JSON beside the arrays"
    stored = found.stored(5)
    assert {n: (s.shape, s.dtype) for n, s in stored.items()} == {n: (x.shape, x.dtype) for n, x in tensors.items()}


def test_saving_the_same_step_again_does_nothing(tmp_path: Path):
    found = save_steps(tmp_path, 5)
    assert found.save(5, placed(values(6), mesh(8, 1)), {}) is None
    assert Checkpoints(tmp_path).save(5, placed(values(6), mesh(8, 1)), {}) is None, "nor from a resumed run"
    assert found.wait() == [] and found.meta(5)["loss"] == 0.2


@pytest.mark.parametrize("shape", [(2, 4), (1, 8), (4, 1)])
def test_restore_onto_another_mesh(tmp_path: Path, shape: tuple[int, int]):
    found = save_steps(tmp_path, 1)
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    wanted = abstract(placed(values(1), jax.sharding.Mesh(devices, ("fsdp", "tensor"))))
    got = found.restore(1, wanted)
    assert_same(got, values(1))
    assert all(got[name].sharding == wanted[name].sharding for name in wanted)


def test_donation_right_after_save(tmp_path: Path):
    """What is saved is what the copies held at the call, though the next steps run at once on what they were copied from."""
    onto = mesh(8, 1)
    expected = {"w": np.arange(1 << 22, dtype=np.float32).reshape(1024, -1)}
    state = placed(expected, onto)
    wanted = abstract(state)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * -1.5 + 1, tree), donate_argnums=0)
    step.lower(state).compile()
    found = Checkpoints(tmp_path)
    found.save(1, jax.tree.map(jnp.copy, state), {})
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    found.wait()
    assert_same(found.restore(1, wanted), expected)
    assert not np.array_equal(np.asarray(state["w"]), expected["w"])


def test_only_one_save_at_a_time(tmp_path: Path):
    found = Checkpoints(tmp_path, keep=5)
    for step in (1, 2, 3):
        found.save(step, placed(values(step), mesh(8, 1)), {})
    assert [s.step for s in found.close()] == [1, 2, 3] and found.steps() == [1, 2, 3]


def test_retention_keeps_the_newest_and_every_mth(tmp_path: Path):
    found = save_steps(tmp_path, *range(2, 13, 2), keep=2, keep_every=6)
    assert found.steps() == [6, 10, 12]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "12", "6"]
    with pytest.raises(ValueError, match="checkpoint.keep = 0"):
        Checkpoints(tmp_path, keep=0)


def test_differences_are_named_before_anything_is_read(tmp_path: Path):
    found = save_steps(tmp_path, 1)
    wanted = abstract(placed(values(1), mesh(8, 1)))
    where = wanted["params.norm"].sharding

    def error(**changes: jax.ShapeDtypeStruct | None) -> str:
        tree = {**wanted, **{k.replace("__", "."): v for k, v in changes.items()}}
        with pytest.raises(CheckpointError) as e:
            found.restore(1, {k: v for k, v in tree.items() if v is not None})
        return str(e.value)

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    assert "params.new: not in the checkpoint" in error(params__new=array((2,), "float32"))
    assert "params.norm: in the checkpoint, not in this run" in error(params__norm=None)
    assert "params.norm: shape (64,) in the checkpoint, (65,) in this run" in error(params__norm=array((65,), "float32"))
    assert "params.norm: dtype float32 in the checkpoint, bfloat16 in this run" in error(params__norm=array((64,), "bfloat16"))
    many = error(**{f"params__new{i}": array((2,), "float32") for i in range(20)})
    assert "20 differences" in many and "and 12 more" in many and len(many.splitlines()) < 12 and str(tmp_path) in many


def test_cast_between_floats_only_when_asked(tmp_path: Path):
    found = save_steps(tmp_path, 1)
    wanted = abstract(placed(values(1), mesh(8, 1)))
    name = "params.layers.0.attention.wq"
    wanted[name] = jax.ShapeDtypeStruct(wanted[name].shape, jnp.bfloat16, sharding=wanted[name].sharding)
    got = found.restore(1, wanted, cast=True)
    np.testing.assert_array_equal(np.asarray(got[name]), values(1)[name].astype(jnp.bfloat16))
    wanted["optimizer.count"] = jax.ShapeDtypeStruct((), jnp.float32, sharding=wanted["optimizer.count"].sharding)
    with pytest.raises(CheckpointError, match="optimizer.count: dtype int32"):
        found.restore(1, wanted, cast=True)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes read through Linux's /proc")
def test_a_subset_does_not_read_the_rest(tmp_path: Path):
    large = {f"optimizer.{i}": np.full((1024, 4096), i, np.float32) for i in range(4)}
    small = {"params.a": np.arange(64, dtype=np.float32), "params.b": np.ones((8, 8), np.float32)}
    tensors = placed({**large, **small}, mesh(8, 1))
    found = Checkpoints(tmp_path)
    found.save(1, tensors, {})
    found.wait()

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    wanted = {k: v for k, v in abstract(tensors).items() if k.startswith("params.")}
    with pytest.raises(CheckpointError, match=r"optimizer\.0: in the checkpoint, not in this run"):
        found.restore(1, wanted)
    before = bytes_read()
    assert_same(found.restore(1, wanted, subset=True), small)
    assert bytes_read() - before < 4 << 20, "the other tensors hold 64 MiB"
    before = bytes_read()
    found.restore(1, abstract(tensors))
    assert bytes_read() - before > 60 << 20, "reads do show in this count"


# A save cut off at any point. The child saves step 1, then dies while saving step 2.

CHILD = """
import os, shutil, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[3:5]
import jax, numpy as np
from test_checkpoint import mesh, placed, values
from jaxtrain import checkpoint
from jaxtrain.checkpoint import Checkpoints

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def then_die(function):
    def both(*args, **kwargs):
        function(*args, **kwargs)
        die()
    return both

def half_delete(path):
    next(p for p in Path(path).rglob("*") if p.is_file()).unlink()
    die()

folder, point = Path(sys.argv[1]), sys.argv[2]
found = Checkpoints(folder, keep=1)
found.save(1, placed(values(1), mesh(8, 1)), {"loss": 1.0})
found.wait()
tensors = placed(values(2, width=1024), mesh(8, 1))
jax.block_until_ready(tensors)
if point == "meta":
    Checkpoints._write_meta = die
if point == "arrays":
    Checkpoints._write_meta = then_die(Checkpoints._write_meta)
if point == "sync":
    checkpoint.place.sync_tree = die
if point == "delete":
    shutil.rmtree = half_delete
print("go", flush=True)
found.save(2, tensors, {"loss": 2.0})
if point.startswith("after"):
    time.sleep(float(point.removeprefix("after")))
    die()
found.wait()
time.sleep(60)
"""


@pytest.mark.parametrize("point", ["meta", "arrays", "after0", "after0.05", "sync", "delete"])
def test_sigkill_in_the_middle_of_a_save(tmp_path: Path, point: str):
    here = Path(__file__).parent
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), point, str(here), str(here.parents[1])],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert child.returncode == -signal.SIGKILL and "go" in child.stdout, child.stderr[-2000:]
    found = Checkpoints(tmp_path, keep=1)
    reached = found.latest()
    assert reached is not None
    if point in ("meta", "arrays"):
        assert reached == 1 and found.states()[2] == "unfinished"
    if point == "sync":
        assert found.steps() == [1, 2], "the old step is not deleted before the new one is on disk"
    if point == "delete":
        assert found.steps() == [2], "half a step is not taken for one"
        assert any(p.name.startswith("1") for p in tmp_path.iterdir())
    expected = values(reached) if reached == 1 else values(2, width=1024)
    wanted = abstract(placed(expected, mesh(2, 4)))
    assert_same(found.restore(reached, wanted), expected)
    assert found.meta(reached)["loss"] == float(reached)
    found.save(3, placed(values(3), mesh(8, 1)), {})
    found.close()
    assert [p.name for p in tmp_path.iterdir()] == ["3"], "the next save removes what was left over"


@pytest.fixture
def small_files():
    """The kernel refuses to let files grow beyond 1 MB: a disk that fills up in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_save_is_raised_by_poll(tmp_path: Path, small_files: None):
    found = save_steps(tmp_path, 1)
    large = placed(values(2, width=1024), mesh(8, 1))
    found.save(2, large, {})
    failed = poll_until_settled(found)
    assert failed.step == 2 and re.search(r"File too large.*Complete steps: 1\..*checkpoint\.dir", str(failed.error))
    assert found.poll() == [], "told once"
    assert found.states() == {1: "complete"}, "what it had written is gone"
    found.save(3, large, {})
    found.save(4, large, {})
    found.save(5, placed(values(5), mesh(8, 1)), {})
    assert [(type(end).__name__, end.step) for end in found.close()] == [("Failed", 3), ("Failed", 4), ("Saved", 5)]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["1", "5"], "a later save works"


def test_a_failure_after_the_arrays_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = save_steps(tmp_path, 1)

    def broken(path: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint.place, "sync_tree", broken)
    found.save(2, placed(values(2), mesh(8, 1)), {})
    [failed] = found.wait()
    assert isinstance(failed, checkpoint.Failed) and "Input/output error" in str(failed.error)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path):
    wrong = placed({**values(1), "params.norm": np.array([1, np.nan, np.inf], np.float32)}, mesh(8, 1))
    found = Checkpoints(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"infinite or no number are not saved: params\.norm \(2 values\)"):
        found.save_now(1, wrong, {})
    kept = Checkpoints(tmp_path / "b", finite=False)
    kept.save_now(1, wrong, {})
    assert np.isnan(np.asarray(kept.restore(1, abstract(wrong))["params.norm"])[1])
    with pytest.raises(Damaged, match=r"params\.norm holds values that are infinite"):
        Checkpoints(tmp_path / "b").restore(1, abstract(wrong))


def test_another_disk_under_the_folder_is_refused(tmp_path: Path):
    """An unmounted disk leaves a folder on the disk below it."""
    found = save_steps(tmp_path, 1)
    found._device = 12345
    found.save(2, placed(values(2), mesh(8, 1)), {})
    [failed] = found.wait()
    assert isinstance(failed, checkpoint.Failed) and "was it unmounted?" in str(failed.error) and found.steps() == [1]


def test_a_place_that_cannot_be_written(tmp_path: Path):
    """Told as a failed save; in a child, because what Orbax leaves behind could keep a process from ending."""
    (tmp_path / "file").write_text("in the way")
    code = """
import shutil, sys; sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_checkpoint import mesh, placed, values
from jaxtrain.checkpoint import Checkpoints
found = Checkpoints(Path(sys.argv[1]) / "here")
write_meta = found._write_meta
def swap(folder, text):
    write_meta(folder, text)
    shutil.rmtree(folder)
    folder.write_text("in the way")
found._write_meta = swap
for target in (Checkpoints(Path(sys.argv[1]) / "file" / "checkpoints"), found):
    target.save(1, placed(values(1), mesh(8, 1)), {})
    for end in target.close():
        print(type(end.error).__name__, end.error)
"""
    here = Path(__file__).parent
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(here), str(here.parents[1])],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert child.returncode == 0 and child.stdout.count("CheckpointError saving step 1 to") == 2, (
        child.stdout + child.stderr[-2000:]
    )
    assert child.stdout.count("NotADirectoryError") == 2


def poll_until_settled(found: Checkpoints) -> checkpoint.Failed:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for end in found.poll():
            assert isinstance(end, checkpoint.Failed)
            return end
        time.sleep(0.01)
    raise AssertionError("the save did not end")


def test_a_full_disk_is_noticed_before_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = save_steps(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    found.save(2, placed(values(2), mesh(8, 1)), {})
    [failed] = found.wait()
    assert isinstance(failed, checkpoint.Failed)
    assert re.search(r"0\.00 GiB are free there, a checkpoint needs .* checkpoint\.keep is 100", str(failed.error))
    assert found.states() == {1: "complete"}


def test_never_from_scratch_over_what_cannot_be_read(tmp_path: Path):
    found = save_steps(tmp_path, 1, 2)
    good = (tmp_path / "2/meta.json").read_text()
    for broken, says in {
        '{"loss": 1': "cannot be read",
        "{}": "no JSON object with a seal",
        '{"format": 99}': "format 99, and this jaxtrain reads 2",
        good.replace('"step": 2', '"step": 3'): "do not match its seal",
    }.items():
        (tmp_path / "2/meta.json").write_text(broken)
        with pytest.raises(CheckpointError, match=says + r"(.|\n)*--config\.checkpoint\.step=1"):
            found.latest()
    (tmp_path / "2/meta.json").unlink()
    assert found.steps() == [1] and found.states()[2] == "damaged"
    with pytest.raises(CheckpointError, match=r"meta\.json cannot be read"):
        found.latest()
    (tmp_path / "2/meta.json").write_text(good)
    assert found.latest() == 2
    for p in tmp_path.glob("2/arrays/**/d/*"):
        p.write_bytes(b"")
    with pytest.raises(Damaged, match=r"2/arrays cannot be read: .*was written with .*--config\.checkpoint\.step=1") as e:
        found.restore(2, abstract(placed(values(2), mesh(8, 1))))
    assert len(str(e.value)) < 900, "not Orbax's page"


def test_the_newest_readable_step(tmp_path: Path):
    found = save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "3/meta.json").write_text("{}")
    passed = {2: "its arrays"}
    assert found.latest(passed) == 1 and passed.keys() == {2, 3}
    with pytest.raises(CheckpointError, match=r"no good checkpoint is left(.|\n)*3: (.|\n)*2: its arrays(.|\n)*1: too"):
        found.latest({1: "too", 2: "its arrays"})
    assert Checkpoints(tmp_path / "none").latest({}) is None


def test_a_folder_in_a_step_that_is_not_ours_is_left_alone(tmp_path: Path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "notes.txt").write_text("mine")
    (tmp_path / "8").mkdir()
    found = save_steps(tmp_path, 9)
    assert found.states() == {7: "unfinished", 9: "complete"} and (tmp_path / "7/notes.txt").exists()


def test_set_aside_moves_and_deletes_nothing(tmp_path: Path):
    found = save_steps(tmp_path, 1, 2, 3)
    with pytest.raises(CheckpointError, match=r"no such checkpoint\. Complete steps: 1, 2, 3"):
        found.set_aside(4)
    note = found.set_aside(1)
    [aside] = tmp_path.glob("set_aside-*")
    assert "2, 3" in note and str(aside) in note and found.latest() == 1
    assert_same(Checkpoints(aside).restore(3, abstract(placed(values(3), mesh(8, 1)))), values(3))
    assert found.set_aside(1) == ""
    found.save(3, placed(values(33), mesh(8, 1)), {"loss": 0.0})
    found.wait()
    assert_same(found.restore(3, abstract(placed(values(33), mesh(8, 1)))), values(33))


def test_locate(tmp_path: Path):
    save_steps(tmp_path / "run/checkpoints", 1, 2)
    for path, step in {"run": 2, "run/checkpoints": 2, "run/checkpoints/1": 1, "run/checkpoints/1/": 1}.items():
        found, at = checkpoint.locate(f"{tmp_path}/{path}")
        assert at == step and str(found.directory) == str(tmp_path / "run/checkpoints")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"checkpoint": {"dir": str(tmp_path / "run/checkpoints")}}))
    assert checkpoint.locate(tmp_path / "other")[1] == 2, "checkpoint.dir was elsewhere"
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.locate(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        checkpoint.locate(tmp_path / "run/checkpoints/3")
    with pytest.raises(CheckpointError, match="s3://"):
        checkpoint.locate("s3://bucket/run")


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_steps(tmp_path / "checkpoints", 1, 4)
    (tmp_path / "checkpoints/6").mkdir()
    (tmp_path / "checkpoints/4/meta.json").unlink()
    assert main(["list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for expected in ("1.0000", "complete", "damaged", "unfinished"):
        assert expected in out
    assert main(["list", str(tmp_path / "nowhere")]) == 2
    assert "no checkpoints there" in capsys.readouterr().err


# What may change on resume


def test_every_key_stands_in_exactly_one_row():
    for key in config.docs():
        assert len(resume.rows_for(key)) == 1, key
    for row in resume.TABLE:
        for pattern in row.keys:
            assert any(row in resume.rows_for(k) for k in config.docs() if resume._matching([pattern], [k])), pattern


def tree(**changes: object) -> dict:
    made = config.default_config()
    with made.unlocked():
        made.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    run, problems = config.resolve(made)
    assert not problems
    return config.to_dict(run)


def test_resume_rules():
    assert resume.compare(tree(), tree()) == ([], [])
    notes, problems = resume.compare(tree(), tree(mesh__data=2, optimizer__lr=1e-3, remat__policy="full"))
    assert not problems and len(notes) == 3 and any("optimizer.lr: 0.0003 -> 0.001" in n for n in notes)

    changed = tree(data__seq_len=512, train__global_batch=8)
    notes, problems = resume.compare(tree(), changed)
    assert not notes and {p.key for p in problems} == {"data.seq_len", "train.global_batch"}
    assert all("checkpoint.allow_change=data.seq_len,train.global_batch" in str(p) for p in problems), "ready to paste"
    notes, problems = resume.compare(tree(), changed, "data.seq_len, train.*")
    assert not problems and len(notes) == 2
    _, problems = resume.compare(tree(), tree(train__freeze="head", train__global_batch=8), "train.*")
    assert [p.key for p in problems] == ["train.freeze"], "a pattern does not allow what can never change"

    _, problems = resume.compare(tree(), tree(model__d_model=64, model__num_layers=2), "model.num_layers")
    assert [p.key for p in problems] == ["checkpoint.allow_change", "model.num_layers", "model.d_model", "model.head_dim"]
    assert "init.from" in str(problems[-1]) and "was 128" in str(problems[2])

    _, problems = resume.compare(tree(), tree(), "data.seqlen")
    assert "Did you mean data.seq_len?" in str(problems[0])


def test_documents_are_cut_alike_by_0_and_32():
    """Of 0 the data makes at most 32, so a run that had 32 may leave it open; with any other number it reads other rows."""
    notes, problems = resume.compare(tree(data__max_segments=32), tree())
    assert not problems and notes == ["data.max_segments: 32 -> 0 (the same cut of the data)"]
    assert [p.key for p in resume.compare(tree(data__max_segments=16), tree())[1]] == ["data.max_segments"]


def test_microbatches_of_experts_are_asked_about():
    """Their balance loss is that of a microbatch: another number of them minimises something else."""
    one, two = ({"model__num_experts": 4, "train__grad_accum": n} for n in (1, 2))
    (problem,) = resume.compare(tree(**one), tree(**two))[1]
    assert problem.key == "train.grad_accum" and "those of a microbatch" in problem.rule
    assert "checkpoint.allow_change=train.grad_accum" in str(problem)
    assert resume.compare(tree(**one), tree(**two), "train.grad_accum")[1] == []
    for name in ("experts__balance_loss", "experts__z_loss"):
        alone = {"experts__balance_loss": 0.0, "experts__z_loss": 0.0, name: 0.1}
        assert [p.key for p in resume.compare(tree(**one, **alone), tree(**two, **alone))[1]] == ["train.grad_accum"], name
    off = {"experts__balance_loss": 0.0, "experts__z_loss": 0.0}
    assert resume.compare(tree(**one, **off), tree(**two, **off))[1] == []
    assert resume.compare(tree(train__grad_accum=1), tree(train__grad_accum=2))[1] == []


def test_layouts_of_experts_with_a_capacity_are_asked_about():
    """Which tokens they drop depends on which are on a device at a time."""
    off = {"model__num_experts": 4, "experts__balance_loss": 0.0, "experts__z_loss": 0.0}
    some = off | {"experts__capacity": 1.25}
    for key, value in (("mesh.data", 2), ("mesh.expert", 2), ("train.grad_accum", 2), ("sharding.rules.batch", "data+fsdp")):
        other = {key.replace(".", "__"): value}
        assert resume.compare(tree(**off), tree(**off, **other))[1] == []
        (problem,) = resume.compare(tree(**some), tree(**some, **other))[1]
        assert problem.key == key and "experts drop other tokens" in problem.rule
        assert f"checkpoint.allow_change={key}" in str(problem)
        assert resume.compare(tree(**some), tree(**some, **other), key)[1] == []
    for other in ({"sharding__zero": 1}, {"remat__policy": "full"}, {"attention__context": "gather"}):
        assert resume.compare(tree(**some), tree(**some, **other))[1] == []
    ring = some | {"mesh__seq": 2}
    assert [p.key for p in resume.compare(tree(**ring), tree(**ring, attention__context="ulysses"))[1]] == ["attention.context"]
    assert resume.compare(tree(**off | {"mesh__data": 2}), tree(**off))[1] == [], "nothing is dropped from here on"


def test_meshes_that_follow_the_devices_are_asked_about_by_their_sizes():
    """mesh.fsdp=-1 is another layout on other devices, and then a capacity drops other tokens."""
    run = config.resolve(config.default_config())[0]
    some = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, num_experts=4),
        experts=dataclasses.replace(run.experts, capacity=1.25, balance_loss=0.0, z_loss=0.0),
    )
    for one, asked in ((run, []), (some, ["mesh.fsdp"])):
        meta = {"config": config.to_dict(one), "mesh": {"data": 1, "fsdp": 8, "tensor": 1, "seq": 1}}
        for fsdp, keys in ((8, []), (4, asked)):
            program = SimpleNamespace(placement=SimpleNamespace(mesh=SimpleNamespace(shape=meta["mesh"] | {"fsdp": fsdp})))
            assert [p.key for p in resume.compare(*start._with_meshes(meta, one, program))[1]] == keys


def test_configs_of_other_versions_and_own_axes():
    old = tree()
    del old["model"]["qk_norm"]
    old["model"]["gone"] = 3
    notes, problems = resume.compare(old, tree())
    assert notes == ["model.gone: in the checkpoint's config, no longer a key"] and not problems
    _, problems = resume.compare(old, tree(model__qk_norm=True))
    assert [p.key for p in problems] == ["model.qk_norm"], "a key the old version lacked counts as its default"
    new = tree()
    new["sharding"]["rules"]["channels"] = "tensor"
    notes, problems = resume.compare(tree(), new)
    assert not problems and "sharding.rules.channels: not set -> 'tensor'" in notes[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("data.seed", 1), ("data.packing", "none"), ("model.sliding_window", 16), ("model.attention_softcap", 30.0)),
        *(("optimizer.beta1", 0.8), ("optimizer.beta2", 0.9), ("optimizer.weight_decay", 0.0)),
    ],
)
def test_a_key_that_changes_learning_is_asked_about(key, value):
    name = key.replace(".", "__")
    (problem,) = resume.compare(tree(), tree(**{name: value}))[1]
    assert problem.key == key and f"checkpoint.allow_change={key}" in str(problem)
    assert resume.compare(tree(), tree(**{name: value}), key)[1] == []


def test_docs_show_the_table():
    page = Path(__file__).parents[2] / "docs/checkpoints.md"
    assert resume.markdown() in page.read_text(), (
        "regenerate it: python -c 'from jaxtrain import resume; print(resume.markdown())'"
    )
