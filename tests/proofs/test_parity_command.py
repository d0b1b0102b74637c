"""`python -m jaxtrain parity`: exit code and verdicts for layouts that agree, that differ and that cannot run."""

import json
import os
import subprocess
import sys

import pytest

from jaxtrain import sharding
from jaxtrain.commands import parity as command
from jaxtrain.train import parity

SMALL = (
    "--config=configs/tiny.py",
    "--config.data.source=synthetic",
    "--config.data.seq_len=32",
    "--config.model.num_layers=1",
    "--config.model.d_model=16",
    "--config.model.d_ff=16",
    "--steps=1",
)


def test_layouts_that_agree_differ_and_fail(monkeypatch, tmp_path, request):
    """The planted bug sums a gradient twice over `data`, which exceeds the bound. Layouts with seq=2 raise an error."""
    monkeypatch.chdir(request.config.rootpath)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ[name])  # the command sets these; monkeypatch restores them for later tests
    reduce_gradient, train = sharding.reduce_gradient, parity.first_steps

    def fails_over_seq(run, devices, steps):
        if run.mesh.seq == 2:
            raise ValueError("no such luck\nand much more")
        return train(run, devices, steps)

    def twice(g, how):
        matmul_of_a_layer = g.ndim == 3
        return reduce_gradient(2 * g if matmul_of_a_layer and "data" in how.summed else g, how)

    monkeypatch.setattr(sharding, "reduce_gradient", twice)
    monkeypatch.setattr(parity, "first_steps", fails_over_seq)
    file = tmp_path / "parity.json"
    assert command.main([*SMALL, "--meshes=one,data2,fsdp2,seq2", "--dtype=bf16", f"--json={file}"]) == 1
    tree = json.loads(file.read_text())
    assert not tree["agrees"] and tree["steps"] == 1
    reference, wrong, right, failed = tree["layouts"]
    assert [layout["verdict"] for layout in (reference, wrong, right)] == ["reference", "differs", "agrees"]
    assert failed["verdict"] not in ("reference", "differs", "agrees")
    assert reference["difference"] is None and right["difference"]["gradient"]["ok"]
    assert right["mesh"] == {"data": 1, "fsdp": 2, "tensor": 1, "seq": 1}
    gradient = wrong["difference"]["gradient"]
    assert not gradient["ok"] and gradient["value"] > 5 * gradient["bound"]
    assert command.main([*SMALL, "--meshes=seq2,one"]) == 1, "the first layout could not be run"


@pytest.mark.more
def test_a_machine_with_one_cpu_device(tmp_path, request):
    """The process starts with one CPU device, as a user's does. The command itself sets the number of devices."""
    argv = [*SMALL, "--meshes=one,fsdp2xseq2", f"--json={tmp_path / 'parity.json'}"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))} | {"JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", "jaxtrain", "parity", *argv]
    subprocess.run(words, env=environ, cwd=request.config.rootpath, check=True, timeout=300)
    assert json.loads((tmp_path / "parity.json").read_text())["agrees"]
