"""Checkpoints at gs:// and s3://: which steps are complete, and how failures and damage are handled.

The clients are real: tensorstore for arrays, gcsfs and s3fs for all other objects. The stores are emulators.
"""

import importlib.util
import json
from pathlib import Path

import buckets
import pytest
from buckets import Bucket
from saved import abstract, assert_same, mesh, placed, save_steps, values

from jaxtrain import checkpoint
from jaxtrain import main as command
from jaxtrain.checkpoint import CheckpointError, Checkpoints, Damaged, Unreachable
from jaxtrain.commands.checkpoint import main
from jaxtrain.config import stores
from jaxtrain.train import position

server, bucket = buckets.server, buckets.bucket
RUN = "run/checkpoints"


def check_restore(found: Checkpoints, step: int) -> None:
    assert_same(found.restore(step, abstract(placed(values(step), mesh(2, 4)))), values(step))


def save(bucket: Bucket, *steps: int, **options: int) -> Checkpoints:
    return save_steps(f"{bucket.url}/{RUN}", *steps, **options)


def test_restore_is_bit_identical_and_commands_find_it(bucket: Bucket, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    at = f"{bucket.url}/{RUN}"
    assert Checkpoints(at).latest() is None and Checkpoints(bucket.url).states() == {}
    assert not bucket.names(), "opening writes nothing"
    bucket.put(f"{RUN}/7/notes.txt", b"mine")
    found = save(bucket, 1, 4, 5, keep=1, keep_every=4)
    assert str(found.directory) == at and found.latest() == 5
    again = Checkpoints(f"{at}/")
    check_restore(again, 5)
    assert again.meta(5)["loss"] == 0.2 and again.states() == {4: "complete", 5: "complete", 7: "unfinished"}
    assert bucket.names(f"{RUN}/7/") and not bucket.names(f"{RUN}/1/"), "a user's files stay, an old step is deleted"
    marks = {f"{RUN}/5/{name}" for name in ("meta.json", "integrity.json", "arrays/commit_success.txt")}
    assert marks < set(bucket.names()) and not Path(f"{bucket.scheme}:").exists()
    assert again.save(5, placed(values(5), mesh(8, 1)), {}) is None, "it is saved already"

    for path, step in {f"{bucket.url}/run": 5, at: 5, f"{at}/4": 4, f"{at}/4/": 4}.items():
        located, step_meant = checkpoint.locate_checkpoint(path)
        assert step_meant == step and located.directory == found.directory
    (tmp_path / "config.json").write_text(json.dumps({"checkpoint": {"dir": at}}))
    assert checkpoint.locate_checkpoint(tmp_path)[1] == 5
    assert main(["list", str(tmp_path)]) == 0 and main(["verify", f"{bucket.url}/run", "--step=4"]) == 0
    assert "0.2500" in capsys.readouterr().out
    assert main(["list", f"{bucket.url}/other"]) == 2


def test_a_failed_save_leaves_nothing(bucket: Bucket):
    found = save(bucket, 1)
    for part in ("arrays/state/manifest.ocdbt", "integrity.json"):
        bucket.fail("write", f"{RUN}/2/{part}")
        found.save(2, placed(values(2), mesh(8, 1)), {})
        [failed] = found.wait()
        assert failed.error
        bucket.heal()
        assert found.states() == {1: "complete"}
    found.save_now(2, placed(values(2), mesh(8, 1)), {})
    check_restore(found, 2)


def test_damage_is_detected(bucket: Bucket, capsys: pytest.CaptureFixture[str]):
    found = save(bucket, 1, 2, 3)
    largest = max(bucket.names(f"{RUN}/2/"), key=bucket.size)
    data = bytearray(bucket.get(largest))
    data[len(data) // 2] ^= 1
    bucket.put(largest, bytes(data))
    bucket.remove(max(bucket.names(f"{RUN}/3/"), key=bucket.size))
    for step in (2, 3):
        with pytest.raises(Damaged, match=rf"checkpoint\.step={step - 1}"):
            check_restore(found, step)
    assert main(["verify", f"{bucket.url}/{RUN}"]) == 1
    out = capsys.readouterr().out
    assert "step 1: good" in out and "step 2: DAMAGED" in out and "step 3: DAMAGED" in out
    bucket.put(f"{RUN}/3/meta.json", b"{}")
    assert found.latest({2: "its arrays"}) == 1
    bucket.remove(f"{RUN}/2/meta.json")
    assert found.states()[2] == "damaged"
    found.save_now(2, placed(values(2), mesh(8, 1)), {})
    check_restore(found, 2)


def test_an_unreachable_bucket_is_not_empty(bucket: Bucket):
    """If a bucket refuses requests, a run does not start at step 0, and no step counts as damaged."""
    found = save(bucket, 1)
    bucket.fail("list")
    credentials = {"gs": "GOOGLE_APPLICATION_CREDENTIALS", "s3": "AWS_ACCESS_KEY_ID"}[bucket.scheme]
    with pytest.raises(Unreachable, match=credentials):
        Checkpoints(f"{bucket.url}/{RUN}").latest({})
    found.save(2, placed(values(2), mesh(8, 1)), {})
    [failed] = found.wait()
    assert failed.error
    bucket.fail("list read", "/arrays/")
    with pytest.raises(CheckpointError) as error:
        check_restore(found, 1)
    assert not isinstance(error.value, Damaged)
    bucket.heal()
    check_restore(found, 1)
    with pytest.raises(Unreachable, match=credentials):
        Checkpoints(f"{bucket.scheme}://bucket-nowhere/run").latest({})


def test_set_aside_copies_before_it_deletes(bucket: Bucket):
    found = save(bucket, 1, 2, 3)
    before = bucket.names(f"{RUN}/2/") + bucket.names(f"{RUN}/3/")
    bucket.fail("copy", skip=len(bucket.names(f"{RUN}/2/")) - 2)
    with pytest.raises(Unreachable):
        found.set_aside(1)
    bucket.heal()
    assert set(before) < set(bucket.names()), "no object of a step is lost"
    target = found.set_aside(1).split(" moved to ")[1].split(",")[0]
    assert found.steps() == [1] and target.startswith(f"{bucket.url}/{RUN}/set_aside-")
    check_restore(Checkpoints(target), 3)
    found.save_now(3, placed(values(3), mesh(8, 1)), {})
    check_restore(found, 3)


def test_deletions_that_are_refused_are_errors(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    """A refused deletion raises Unreachable; after a save, it is only logged. S3 answers a request to delete several objects
    with status 200, and lists the objects that it did not delete. s3fs drops this list, so that a request seems to succeed.
    So no such request may be made.
    """
    found = save(bucket, 1, 2)
    monkeypatch.setattr(bucket.client, "rm", lambda *paths, **options: None)
    bucket.fail("delete", rf"{RUN}/2/")
    for delete in (lambda: found.set_aside(1), lambda: found.storage.delete(2)):
        with pytest.raises(Unreachable, match=f"{RUN}/2"):
            delete()
    assert found.states() == {1: "complete", 2: "complete"}
    found = Checkpoints(found.directory, keep=1)
    found.save(3, placed(values(3), mesh(8, 1)), {})
    assert [end.error for end in found.wait()] == [None]
    assert found.steps() == [2, 3]
    bucket.fail("delete", rf"{RUN}/2/arrays/state/d/|{RUN}/2/arrays/state/ocdbt.*/d/")
    with pytest.raises(Unreachable):
        found.storage.delete(2)
    left = bucket.names(f"{RUN}/2/")
    assert left and all("/d/" in name for name in left) and found.states() == {2: "unfinished", 3: "complete"}
    bucket.heal()
    found.storage.sweep()
    assert not bucket.names(f"{RUN}/2/") and found.states() == {3: "complete"}


def test_skipped_data(bucket: Bucket):
    directory = Checkpoints(f"{bucket.url}/run").directory
    assert position.read_skipped(directory) == []
    position.add_skipped(directory, (10, 20), (1, 2), "why", 0)
    assert position.add_skipped(directory, (30, 40), (3, 4), "why", 0) == position.read_skipped(directory)
    assert [item["tokens"] for item in position.read_skipped(directory)] == [[10, 20], [30, 40]]
    bucket.put(f"run/{position.NAME}", b"{}")
    with pytest.raises(CheckpointError):
        position.read_skipped(directory)


def test_addresses_that_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(CheckpointError, match="gs://"):
        Checkpoints("az://bucket/run")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        for scheme, package, extra in (("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")):
            rule, remedy = stores.path_problem(f"{scheme}://bucket/run", checkpoints=True) or ("", "")
            assert package in rule and f"--extra {extra}" in remedy
            with pytest.raises(CheckpointError, match=f"--extra {extra}$"):
                checkpoint.locate_checkpoint(f"{scheme}://bucket/run")
    assert command.main(["--config.checkpoint.dir=az://bucket/run", "--workdir=s3://bucket/run"]) == 2
    said = capsys.readouterr().err
    assert "checkpoint.dir = 'az://bucket/run'" in said and "--workdir = 's3://bucket/run'" in said
