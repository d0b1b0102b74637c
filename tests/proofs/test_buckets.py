"""Checkpoints at gs://, on a server of the same interface in memory: what is complete, and what becomes of the rest.

The clients are the real ones: tensorstore's for arrays, gcsfs for everything else. The server is not Google's.
"""

import importlib.util
import json
from pathlib import Path

import gcs_server
import pytest
from gcs_server import Server
from saved import abstract, assert_same, mesh, placed, save_steps, values

from jaxtrain import checkpoint, position, stores
from jaxtrain import main as command
from jaxtrain.checkpoint import CheckpointError, Checkpoints, Damaged, Failed
from jaxtrain.checkpoint.__main__ import main
from jaxtrain.checkpoint.errors import Unreachable

server, bucket = gcs_server.server, gcs_server.bucket


def restored(found: Checkpoints, step: int) -> None:
    assert_same(found.restore(step, abstract(placed(values(step), mesh(2, 4)))), values(step))


def saved(bucket: str, *steps: int) -> tuple[Checkpoints, str]:
    """Checkpoints with these steps, and their address in the server."""
    return save_steps(f"gs://{bucket}/run/checkpoints", *steps), f"{bucket}/run/checkpoints"


def test_restore_is_bit_identical(server: Server, bucket: str):
    assert Checkpoints(f"gs://{bucket}/run").latest() is None and Checkpoints(f"gs://{bucket}").states() == {}
    assert not server.names(bucket), "opening writes nothing"
    found, at = saved(bucket, 5)
    assert str(found.directory) == f"gs://{at}" and found.latest() == 5
    again = Checkpoints(f"gs://{at}/")
    restored(again, 5)
    assert again.meta(5)["loss"] == 0.2 and again.states() == {5: "complete"}
    assert {f"{at}/5/{name}" for name in ("meta.json", "integrity.json", "arrays/commit_success.txt")} < set(server.names())
    assert again.save(5, placed(values(5), mesh(8, 1)), {}) is None, "it is saved already"


def test_retention(server: Server, bucket: str):
    found = Checkpoints(f"gs://{bucket}/run", keep=1, keep_every=4)
    for step in (2, 4, 6):
        found.save(step, placed(values(step), mesh(8, 1)), {})
    found.close()
    assert found.steps() == [4, 6]
    assert {name.split("/")[2] for name in server.names(bucket)} == {"4", "6"}


def test_what_somebody_else_put_there_is_left_alone(server: Server, bucket: str):
    server.put(f"{bucket}/run/checkpoints/7/notes.txt", b"mine")
    found, at = saved(bucket, 9)
    assert found.states() == {7: "unfinished", 9: "complete"} and server.names(f"{at}/7/")


def test_a_save_that_fails_leaves_nothing(server: Server, bucket: str):
    found, at = saved(bucket, 1)
    for part in ("arrays/state/manifest.ocdbt", "integrity.json"):
        server.fails = lambda method, path, part=part: 403 if method == "PUT" and path == f"{at}/2/{part}" else 0
        found.save(2, placed(values(2), mesh(8, 1)), {})
        [failed] = found.wait()
        assert isinstance(failed, Failed) and "403" in str(failed.error) or "Forbidden" in str(failed.error), failed
        assert "Complete steps: 1. See whether the bucket can be reached" in str(failed.error)
        assert found.states() == {1: "complete"}
    server.fails = lambda method, path: 0
    found.save_now(2, placed(values(2), mesh(8, 1)), {})
    restored(found, 2)


def test_damage_is_found(server: Server, bucket: str, capsys: pytest.CaptureFixture[str]):
    found, at = saved(bucket, 1, 2, 3)
    largest = max(server.names(f"{at}/2/"), key=lambda name: len(server.objects[name][1]))
    data = bytearray(server.objects[largest][1])
    data[len(data) // 2] ^= 1
    server.put(largest, bytes(data))
    gone = max(server.names(f"{at}/3/"), key=lambda name: len(server.objects[name][1]))
    server.remove(gone)
    with pytest.raises(Damaged, match=r"not what was saved.*checkpoint\.step=1"):
        restored(found, 2)
    with pytest.raises(Damaged, match=r"is gone.*checkpoint\.step=2"):
        restored(found, 3)
    assert main(["verify", f"gs://{at}"]) == 1
    out = capsys.readouterr().out
    assert "step 1: good" in out and "step 2: DAMAGED" in out and "its contents were changed" in out and "is gone" in out
    server.put(f"{at}/3/meta.json", b"{}")
    assert found.latest({2: "its arrays"}) == 1
    server.remove(f"{at}/2/meta.json")
    assert found.states()[2] == "damaged"
    found.save_now(2, placed(values(2), mesh(8, 1)), {})
    restored(found, 2)


def test_a_bucket_that_cannot_be_read_is_not_empty(server: Server, bucket: str):
    """Nothing starts afresh, and nothing is taken for damaged, because a bucket does not answer."""
    found, at = saved(bucket, 1)
    server.fails = lambda method, path: 403 if path.endswith(f"/{bucket}/o") else 0
    with pytest.raises(Unreachable, match=r"Forbidden.*GOOGLE_APPLICATION_CREDENTIALS"):
        Checkpoints(f"gs://{at}").latest({})
    found.save(2, placed(values(2), mesh(8, 1)), {})
    [failed] = found.wait()
    assert isinstance(failed, Failed) and "Complete steps: not known." in str(failed.error)
    server.fails = lambda method, path: 403 if "/arrays/" in path or "%2Farrays" in path else 0
    with pytest.raises(CheckpointError) as error:
        restored(found, 1)
    assert not isinstance(error.value, Damaged)
    server.fails = lambda method, path: 0
    restored(found, 1)
    with pytest.raises(Unreachable, match="there is no such bucket"):
        Checkpoints("gs://bucket-nowhere/run").latest({})


def test_set_aside_copies_before_it_deletes(server: Server, bucket: str):
    found, at = saved(bucket, 1, 2, 3)
    before = server.names(f"{at}/2/") + server.names(f"{at}/3/")
    copies = []

    def second_step(method: str, path: str) -> int:
        copies.extend([path] if "/rewriteTo/" in path else [])
        return 403 if len(copies) > len(before) - 2 else 0

    server.fails = second_step
    with pytest.raises(Unreachable):
        found.set_aside(1)
    server.fails = lambda method, path: 0
    assert set(before) < set(server.names()), "nothing is gone"
    note = found.set_aside(1)
    target = note.split(" moved to ")[1].split(",")[0]
    assert found.steps() == [1] and target.startswith(f"gs://{at}/set_aside-")
    restored(Checkpoints(target), 3)
    found.save_now(3, placed(values(3), mesh(8, 1)), {})
    restored(found, 3)


def test_commands_find_it(server: Server, bucket: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    found, at = saved(bucket, 1, 4)
    for path, step in {f"gs://{bucket}/run": 4, f"gs://{at}": 4, f"gs://{at}/1": 1, f"gs://{at}/1/": 1}.items():
        located, step_meant = checkpoint.locate(path)
        assert step_meant == step and located.directory == found.directory
    (tmp_path / "config.json").write_text(json.dumps({"checkpoint": {"dir": f"gs://{at}"}}))
    assert checkpoint.locate(tmp_path)[1] == 4
    assert main(["list", str(tmp_path)]) == 0 and main(["verify", f"gs://{bucket}/run", "--step=4"]) == 0
    out = capsys.readouterr().out
    assert "0.2500" in out and "step 4: good" in out
    assert main(["list", f"gs://{bucket}/other"]) == 2


def test_skipped_data(server: Server, bucket: str):
    directory = Checkpoints(f"gs://{bucket}/run").directory
    assert position.read(directory) == []
    position.skip(directory, (10, 20), (1, 2), "why", 0)
    assert position.skip(directory, (30, 40), (3, 4), "why", 0) == position.read(directory)
    assert [item["tokens"] for item in position.read(directory)] == [[10, 20], [30, 40]]
    server.put(f"{bucket}/run/{position.NAME}", b"{}")
    with pytest.raises(CheckpointError, match="names data that this run passes over"):
        position.read(directory)


def test_places_that_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for place in ("s3://bucket/run", "az://bucket/run"):
        with pytest.raises(CheckpointError, match=r"Orbax writes to no other.* copy finished steps with"):
            Checkpoints(place)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert stores.refused("gs://bucket/run", checkpoints=True) == (
        "gs:// needs the package `gcsfs`, which is not installed",
        "pip install 'jaxtrain[gcs]'",
    )
    with pytest.raises(CheckpointError, match=r"pip install 'jaxtrain\[gcs\]'"):
        checkpoint.locate("gs://bucket/run")
    monkeypatch.undo()
    assert command.main(["--config.checkpoint.dir=s3://bucket/run", "--workdir=gs://bucket/run"]) == 2
    said = capsys.readouterr().err
    assert "checkpoint.dir = 's3://bucket/run'" in said and "--workdir = 'gs://bucket/run'" in said
