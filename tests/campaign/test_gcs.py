"""Runs that save at gs://, on a server of the same interface in memory: killed in a save, and gone on from."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import gcs_server
import numpy as np
import pytest
import runs
from gcs_server import Server
from saved import abstract, assert_same, mesh, placed, save_steps, values

from jaxtrain.checkpoint import Checkpoints

server, bucket = gcs_server.server, gcs_server.bucket
TESTS = Path(__file__).parents[1]
CHILD = """
import sys
sys.path[:0] = sys.argv[2:]
from saved import mesh, placed, values
from jaxtrain.checkpoint import Checkpoints
found = Checkpoints(sys.argv[1])
found.save(2, placed(values(2), mesh(8, 1)), {})
found.wait()
"""


def test_sigkill_in_the_middle_of_a_save(server: Server, bucket: str):
    """All arrays are written, and what says that they are is not."""
    at = f"{bucket}/run/checkpoints"
    found = save_steps(f"gs://{at}", 1)
    process = subprocess.Popen([sys.executable, "-c", CHILD, f"gs://{at}", str(TESTS), str(TESTS.parent)])

    def kill(method: str, path: str) -> int:
        if method == "PUT" and path == f"{at}/2/arrays/commit_success.txt":
            os.kill(process.pid, signal.SIGKILL)
            return 503
        return 0

    server.fails = kill
    assert process.wait(300) == -signal.SIGKILL
    server.fails = lambda method, path: 0
    assert len(server.names(f"{at}/2/arrays/")) > 5 and found.states() == {1: "complete", 2: "unfinished"}
    assert found.latest() == 1
    found.save(3, placed(values(3), mesh(8, 1)), {})
    found.close()
    assert not server.names(f"{at}/2/") and found.steps() == [1, 3]
    assert_same(found.restore(1, abstract(placed(values(1), mesh(2, 4)))), values(1))


def test_a_run_goes_on(server: Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Saved, started again, gone back, taken as the beginning of another run; and the same numbers as on a disk."""
    config = tmp_path / "small.py"
    config.write_text(runs.SMALL)
    place = {"checkpoint__dir": f"gs://{bucket}/run", "checkpoint__keep": 2, "eval__every_steps": 0}
    assert runs.train(config, tmp_path / "run", train__steps=5, **place) == 0
    assert not (tmp_path / "run/checkpoints").exists()
    assert runs.train(config, tmp_path / "run", train__steps=10, **place) == 0
    assert f"resuming from step 5 in gs://{bucket}/run" in capsys.readouterr().out
    assert runs.train(config, tmp_path / "disk", train__steps=10, eval__every_steps=0) == 0
    there, here = runs.tensors_in(f"gs://{bucket}/run", 10), runs.tensors(tmp_path / "disk", 10)  # pyright: ignore
    assert there.keys() == here.keys() and all(np.array_equal(there[name], here[name]) for name in here)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "disk")
    server.put(f"{bucket}/run/10/meta.json", b"{}")
    assert runs.train(config, tmp_path / "run", train__steps=10, **place) == 0
    assert Checkpoints(f"gs://{bucket}/run").steps() == [5, 10] and "moved to gs://" in capsys.readouterr().out
    other = {"init__from": f"gs://{bucket}/run", "train__steps": 5, "eval__every_steps": 0}
    assert runs.train(config, tmp_path / "other", **other) == 0
    server.buckets.remove(bucket)
    assert runs.train(config, tmp_path / "run", train__steps=12, **place) == 2
    assert "there is no such bucket" in capsys.readouterr().err
