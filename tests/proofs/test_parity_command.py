"""`python -m jaxtrain.parity`: output and exit code for layouts that agree, that differ and that cannot run."""

import json
import os
import re
import subprocess
import sys

import pytest

from jaxtrain import sharding
from jaxtrain.parity import __main__ as command
from jaxtrain.parity import compare

SMALL = (
    "--config=configs/tiny.py",
    "--config.data.source=synthetic",
    "--config.data.seq_len=32",
    "--config.model.num_layers=1",
    "--config.model.d_model=32",
    "--config.model.d_ff=64",
)


@pytest.fixture(autouse=True)
def at_home(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        # The command sets these variables; monkeypatch restores them for later tests.
        monkeypatch.setenv(name, os.environ[name])


def row(printed: str, name: str) -> list[str]:
    """Return the cells of a layout's line in the table."""
    (line,) = [line for line in printed.splitlines() if re.match(rf"{re.escape(name)}  ", line)]
    return line.split()[1:]


def test_layouts_that_agree_differ_and_fail(monkeypatch, capsys, tmp_path):
    """The planted bug sums a gradient twice over `data`, which exceeds the bound of bfloat16. Layouts with seq=2 raise an
    error.
    """
    reduce_gradient, train = sharding.reduce_gradient, compare.train

    def fails_over_seq(run, devices, steps):
        if run.mesh.seq == 2:
            raise ValueError("no such luck\nand much more")
        return train(run, devices, steps)

    def twice(g, how):
        matmul_of_a_layer = g.ndim == 3
        return reduce_gradient(2 * g if matmul_of_a_layer and "data" in how.summed else g, how)

    monkeypatch.setattr(sharding, "reduce_gradient", twice)
    monkeypatch.setattr(compare, "train", fails_over_seq)
    file = tmp_path / "parity.json"
    assert command.main([*SMALL, "--meshes=one,data2,fsdp2,seq2", "--steps=1", "--dtype=bf16", f"--json={file}"]) == 1
    printed = capsys.readouterr().out
    verdicts = [row(printed, name)[-1] for name in ("one", "data2", "fsdp2", "seq2")]
    assert verdicts == ["reference", "DIFFERS", "agrees", "FAILED"]
    assert "seq2: ValueError: no such luck\n" in printed
    (found,) = re.findall(r"^data2: gradient off by (\S+) \(layers.0.\S+\), bound (\S+)$", printed, re.MULTILINE)
    assert float(found[0]) > 5 * float(found[1])
    assert "sqrt(2 + log2 2) = 1.73 times the first layout's difference from float32" in printed
    assert printed.splitlines()[-1].startswith("1 of 3 layouts")

    tree = json.loads(file.read_text())
    assert not tree["agrees"] and tree["steps"] == 1
    reference, wrong, right, failed = tree["layouts"]
    assert f"{reference['loss'][-1]:.6f}" == row(printed, "one")[0] and reference["difference"] is None
    assert right["mesh"] == {"data": 1, "fsdp": 2, "tensor": 1, "seq": 1} and right["verdict"] == "agrees"
    assert right["difference"]["gradient"]["ok"] and not wrong["difference"]["gradient"]["ok"]
    assert failed["verdict"] not in ("agrees", "reference")

    assert command.main([*SMALL, "--meshes=seq2,one", "--steps=1"]) == 1
    assert "the first layout, seq2, could not be run" in capsys.readouterr().err


@pytest.mark.more
def test_a_machine_with_one_cpu_device():
    """The process starts with one CPU device, as a user's does. The command itself sets the number of devices."""
    argv = [*SMALL, "--meshes=one,fsdp2xseq2,tensor2/sharding.zero=1", "--steps=2"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxtrain.parity", *argv], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "2 steps in float32 on 4 cpu devices" in done.stdout
    for name in ("fsdp2xseq2", "tensor2/sharding.zero=1"):
        *numbers, verdict = row(done.stdout, name)
        assert verdict == "agrees" and len(numbers) == 4
        assert all(float(n) < 1e-5 for n in numbers[:3]) and float(numbers[2]) > 0 and float(numbers[3]) < 1e-3
    assert done.stdout.splitlines()[-1] == "2 of 2 layouts agree with one"
