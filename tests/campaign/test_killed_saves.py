"""A process that is killed during a save, or cannot write its save, keeps all older steps."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from saved import abstract, assert_same, mesh, placed, values

from jaxtrain.checkpoint import Checkpoints

TESTS = Path(__file__).parents[1]
BEGIN = """
import os, shutil, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import jax
from saved import mesh, placed, values
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.checkpoint.storage import Storage
folder = Path(sys.argv[3])
"""

# Save step 1, then be killed while step 2 is saved. proofs/test_checkpoint_arrays.py has the points between the writes.
KILLED = """
found = Checkpoints(folder, keep=1)
found.save(1, placed(values(1), mesh(8, 1)), {"loss": 1.0})
found.wait()
tensors = placed(values(2, width=1024), mesh(8, 1))
jax.block_until_ready(tensors)
print("go", flush=True)
found.save(2, tensors, {"loss": 2.0})
time.sleep(float(sys.argv[4]))
os.kill(os.getpid(), signal.SIGKILL)
"""

UNWRITABLE = """
found = Checkpoints(folder / "here")
write = Storage.write
def swap(storage, path, text):
    write(storage, path, text)
    if storage is found.storage:
        shutil.rmtree(path.parent)
        path.parent.write_text("in the way")
Storage.write = swap
for target in (Checkpoints(folder / "file" / "checkpoints"), found):
    target.save(1, placed(values(1), mesh(8, 1)), {})
    for end in target.close():
        print(type(end.error).__name__, end.error)
"""


def child(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", BEGIN + code, str(TESTS), str(TESTS.parent), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env={**os.environ, "JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_sigkill_in_the_middle_of_a_save(tmp_path: Path, seconds: float):
    done = child(KILLED, tmp_path, str(seconds))
    assert done.returncode == -signal.SIGKILL and "go" in done.stdout, done.stderr[-2000:]
    found = Checkpoints(tmp_path, keep=1)
    reached = found.latest()
    assert reached is not None
    expected = values(reached) if reached == 1 else values(2, width=1024)
    assert_same(found.restore(reached, abstract(placed(expected, mesh(2, 4)))), expected)
    assert found.meta(reached)["loss"] == float(reached)
    found.save(3, placed(values(3), mesh(8, 1)), {})
    found.close()
    assert [p.name for p in tmp_path.iterdir()] == ["3"], "the next save removes what was left over"


def test_a_place_that_cannot_be_written(tmp_path: Path):
    """A save under a path that is a file ends with CheckpointError.

    The test uses a child process, because Orbax's leftovers of a failed save could keep a process from ending.
    """
    (tmp_path / "file").write_text("in the way")
    done = child(UNWRITABLE, tmp_path)
    assert done.returncode == 0 and done.stdout.count("CheckpointError saving step 1 to") == 2, (
        done.stdout + done.stderr[-2000:]
    )
    assert done.stdout.count("NotADirectoryError") == 2
