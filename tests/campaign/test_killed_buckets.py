"""Runs that save at gs:// and s3://, in emulators: killed during a save, and resumed."""

import signal
import subprocess
import sys
from pathlib import Path

import buckets
import numpy as np
import pytest
import runs
from buckets import Bucket
from faults import Faults
from saved import abstract, assert_same, mesh, placed, save_steps, values

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.commands.checkpoint import main as command

server, bucket = buckets.server, buckets.bucket
TESTS = Path(__file__).parents[1]
CHILD = """
import sys
sys.path[:0] = sys.argv[2:]
from saved import mesh, placed, values
from jaxtrain.checkpoint import Checkpoints
found = Checkpoints(sys.argv[1])
input("ready")
found.save(2, placed(values(2), mesh(8, 1)), {})
found.wait()
"""
POINTS = {  # request at which the saving process is killed -> states of the steps afterwards
    "meta.json": {1: "complete"},
    "arrays/state/ocdbt.process_0/d/": {1: "complete", 2: "unfinished"},
    "arrays/commit_success.txt": {1: "complete", 2: "unfinished"},
    "integrity.json": {1: "complete", 2: "complete"},
}


@pytest.mark.parametrize("point", POINTS)
def test_sigkill_in_the_middle_of_a_save(bucket: Bucket, point: str):
    at = f"{bucket.url}/run"
    found = save_steps(at, 1)
    command_line = [sys.executable, "-c", CHILD, at, str(TESTS), str(TESTS.parent)]
    with subprocess.Popen(command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout and process.stdout.read(5) == "ready"
        bucket.fail("write", f"run/2/{point}", status=503, kill=process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(300) == -signal.SIGKILL
    bucket.heal()
    assert found.states() == POINTS[point]
    newest = max(step for step, state in POINTS[point].items() if state == "complete")
    assert found.latest() == newest
    assert_same(found.restore(newest, abstract(placed(values(newest), mesh(2, 4)))), values(newest))
    found.save_now(3, placed(values(3), mesh(8, 1)), {})
    assert found.steps() == [*range(1, newest + 1), 3]
    assert newest == 2 or not bucket.names("run/2/"), "the next save removes leftovers"


def test_a_run_resumes(bucket: Bucket, tmp_path: Path):
    """A run is killed during a save, resumed, and resumed from an older step. Another run starts from its checkpoint.

    The resumed run's tensors and losses equal those of a run that saves on a disk.
    """
    config = runs.smallest(tmp_path)
    options = {"checkpoint__dir": f"{bucket.url}/run", "checkpoint__keep": 2, "eval__every_steps": 0}
    line = runs.arguments(config, tmp_path / "run", {"paths__cache": tmp_path / "compiled", **options})
    killed = subprocess.Popen([sys.executable, "-m", "jaxtrain.main", *line], cwd=TESTS.parent)
    bucket.fail("write", "run/8/arrays/commit_success.txt", status=503, kill=killed.pid)
    assert killed.wait(300) == -signal.SIGKILL
    bucket.heal()
    assert Checkpoints(f"{bucket.url}/run").states() == {4: "complete", 8: "unfinished"}
    assert not (tmp_path / "run/checkpoints").exists()
    assert runs.train(config, tmp_path / "run", **options) == 0
    assert runs.receipt(tmp_path / "run")["resumed_from_step"] == 4
    assert runs.train(config, tmp_path / "disk", eval__every_steps=0) == 0
    there, here = runs.tensors_in(f"{bucket.url}/run", 8), runs.tensors(tmp_path / "disk", 8)  # pyright: ignore
    assert there.keys() == here.keys() and all(np.array_equal(there[name], here[name]) for name in here)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "disk")
    assert command(["verify", str(tmp_path / "run")]) == 0 and command(["list", f"{bucket.url}/run"]) == 0
    bucket.put("run/8/meta.json", b"{}")
    assert runs.train(config, tmp_path / "run", **options) == 0
    assert Checkpoints(f"{bucket.url}/run").steps() == [4, 8]
    other = {"init__from": f"{bucket.url}/run", "train__steps": 3, "eval__every_steps": 0}
    assert runs.train(config, tmp_path / "other", **other) == 0
    gone = options | {"checkpoint__dir": f"{bucket.scheme}://bucket-nowhere/run"}
    assert runs.train(config, tmp_path / "run", train__steps=12, **gone) == 2


def test_two_processes_save_together(bucket: Bucket, tmp_path: Path):
    """Two processes write one checkpoint, and `verify` accepts the files of both. One process resumes from it."""
    faults = Faults(tmp_path, checkpoint__dir=f"{bucket.url}/run", checkpoint__keep=2, mesh__fsdp=-1, mesh__data=1)
    for child in faults.processes(tmp_path / "run", 2, 2, train__steps=10):
        code, said = child.end()
        assert code == 0, said
    found = Checkpoints(f"{bucket.url}/run")
    assert found.steps() == [5, 10] and command(["verify", f"{bucket.url}/run"]) == 0
    assert {name.split("/")[4] for name in bucket.names("run/10/arrays/state/ocdbt")} == {"ocdbt.process_0", "ocdbt.process_1"}
    assert faults.in_process(tmp_path / "run", train__steps=12) == 0
    assert found.steps() == [10, 12]
