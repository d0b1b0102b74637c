"""A researcher's path on fsdp=4 x tensor=2: a family, a loss, an optimizer and a source of one's own, with their settings.

Each step is a command, as a user types it: train, resume with a changed setting, plan, export, and the weights in Python.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
from safetensors.numpy import load_file

from jaxtrain.data import loading
from jaxtrain.step.model_flops import model_flops

CONFIG = """
from jaxtrain.config import default_config


def get_config(arg=None):
    config = default_config()
    config.precision = "f32"
    config.model.family = "own_lab:Family"
    config.loss.name = "own_lab:focal"
    config.optimizer.name = "own_lab:slow_adamw"
    config.data.source = "own_lab:Shifted"
    config.own.gain, config.own.gamma, config.own.slow, config.own.shift = 1.5, 2.0, 0.5, 1
    config.mesh.fsdp, config.mesh.tensor = 4, 2
    config.remat.policy = "auto"
    config.model.num_layers, config.model.d_model, config.model.d_ff = 2, 32, 64
    config.data.seq_len, config.train.global_batch, config.train.steps = 32, 8, 8
    config.optimizer.schedule, config.optimizer.warmup_steps, config.optimizer.lr = "constant", 1, 1e-2
    config.eval.every_steps, config.eval.sequences = 4, 8
    config.checkpoint.every_steps, config.checkpoint.keep = 4, 10
    config.log.every_steps, config.log.peak_tflops = 1, 1.0
    config.sample.max_tokens = 0
    return config
"""
TARGETS = ("wq", "wk", "wv", "wo")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "lab.py").write_text(CONFIG, encoding="utf-8")
    assert command(folder, "main", "--workdir=runs/a")[0] == 0
    return folder


def command(lab: Path, module: str, *words: str, devices: int = 8, config: bool = True) -> tuple[int, str]:
    environ = os.environ | {
        "PYTHONPATH": f"{runs.REPO}:{runs.REPO / 'tests'}",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": runs.QUICKLY,
    }
    line = [sys.executable, "-m", "jaxtrain", module, *["--config=lab.py"] * config, *words]
    done = subprocess.run(line, cwd=lab, env=environ, capture_output=True, text=True, encoding="utf-8")
    return done.returncode, done.stdout + done.stderr


def lines(workdir: Path, kind: str = "train") -> list[dict]:
    text = (workdir / "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def test_losses_are_those_of_one_device_and_depend_on_every_setting(lab):
    one = ("--config.mesh.fsdp=1", "--config.mesh.tensor=1")
    assert command(lab, "main", *one, "--workdir=runs/one", devices=1)[0] == 0
    of_eight, of_one = ([line["loss"] for line in lines(lab / "runs" / name)] for name in ("a", "one"))
    np.testing.assert_allclose(of_eight, of_one, rtol=2e-5)
    for setting in ("gain=3.0", "gamma=1.9", "slow=0.4", "shift=2"):
        workdir = f"runs/{setting[:5]}"
        assert command(lab, "main", *one, f"--config.own.{setting}", f"--workdir={workdir}", devices=1)[0] == 0
        assert abs(lines(lab / workdir)[-1]["loss"] / of_one[-1] - 1) > 1e-4, setting


def test_mfu_is_that_of_the_counted_matmuls(lab):
    run = loading.load_config([f"--config={lab / 'lab.py'}"]).run
    m, T = run.model, run.data.seq_len
    attention = 2 * m.d_model * m.num_heads * m.head_dim * 2 + 2 * m.d_model * m.num_kv_heads * m.head_dim * 2
    weights = m.num_layers * (attention + 2 * 2 * m.d_model * m.d_ff) + 2 * m.d_model * m.vocab_size
    causal = 3 * (weights + m.num_layers * 2 * m.num_heads * m.head_dim * T)
    assert model_flops(run).training.causal == causal
    timed = [line for line in lines(lab / "runs/a") if line["tokens_per_s_per_device"]]
    assert timed
    for line in timed:
        assert line["mfu_causal"] == pytest.approx(causal * line["tokens_per_s_per_device"] / 1e12, rel=1e-6)
        assert line["hfu"] is None


def test_a_resume_compares_the_settings(lab):
    more = ("--workdir=runs/b", "--config.own.gamma=3")
    assert command(lab, "main", "--workdir=runs/b", "--config.train.steps=4")[0] == 0
    files = {path: path.stat().st_mtime_ns for path in (lab / "runs/b").rglob("*") if path.is_file()}
    code, said = command(lab, "main", *more)
    assert code == 2 and "own.gamma" in said
    assert files == {path: path.stat().st_mtime_ns for path in (lab / "runs/b").rglob("*") if path.is_file()}
    assert command(lab, "main", *more, "--config.checkpoint.allow_change=own.gamma")[0] == 0
    assert json.loads((lab / "runs/b/config.json").read_text(encoding="utf-8"))["own"]["gamma"] == 3.0
    before, after = ([line["loss"] for line in lines(lab / "runs" / name)] for name in "ab")
    assert before[:4] == after[:4] and before[4] != after[4] and len(after) == 8
    code, said = command(lab, "receipt", "diff", "runs/a", "runs/b", config=False)
    assert "own.gamma" in said and "own.gain" not in said


def test_a_plan_counts_what_the_program_multiplies(lab):
    """Without recomputation, the matmuls of the compiled step are three for each weight, as they are counted."""
    words = ("--topology=h200:8", "--json=plan.json", "--config.precision=bf16", "--config.remat.policy=none")
    assert command(lab, "plan", *words)[0] == 0
    plan = json.loads((lab / "plan.json").read_text(encoding="utf-8"))
    run = loading.load_config([f"--config={lab / 'lab.py'}"]).run
    counted = model_flops(run).training
    assert plan["flops"]["per_token_causal"] == counted.causal
    attention = 3 * run.model.num_layers * 4 * run.model.num_heads * run.model.head_dim * run.data.seq_len
    matmuls = (counted.full - attention) * run.tokens_per_step / 8
    assert plan["flops"]["hardware_per_step"] - plan["flops"]["attention_per_step"] == pytest.approx(matmuls, rel=0.01)
    assert plan["time"]["expected_step_ms"] is None
    assert any("own_lab:Family" in warning for warning in plan["warnings"])


def test_the_weights_leave_by_their_own_names(lab, monkeypatch):
    import jaxtrain as jt

    assert command(lab, "hf", "export", "runs/a", "--out=out", config=False)[0] == 2
    assert not (lab / "out").exists()
    assert command(lab, "hf", "export", "runs/a", "--raw", "--out=raw", config=False)[0] == 0
    monkeypatch.chdir(lab)
    weights, raw = jt.load_weights("runs/a"), jt.load_weights("raw")
    trained = runs.tensors(lab / "runs/a", 8)
    files = {name: x for file in Path("raw").glob("*.safetensors") for name, x in load_file(file).items()}
    assert set(weights) == set(raw) == set(files)
    layer = {"attention_norm.scale", "mlp_norm.scale", *(f"attention.{name}" for name in TARGETS), "mlp.up", "mlp.down"}
    assert set(weights) == {"embed.embedding", "final_norm.scale", "head"} | {
        f"layers.{i}.{name}" for i in range(2) for name in layer
    }
    for name, x in weights.items():
        np.testing.assert_array_equal(x, raw[name])
        np.testing.assert_array_equal(x, files[name])
        np.testing.assert_array_equal(x, trained[f"params.{name}"])


def test_a_mistake_in_an_own_module_is_its_line(lab, tmp_path):
    (tmp_path / "wrong_lab.py").write_text(
        "from own_lab import *\n\ndef focal(hidden_BTD, head_VD, batch, spec):\n    return spec.own.gama * hidden_BTD.sum()\n",
        encoding="utf-8",
    )
    environ = os.environ | {"PYTHONPATH": f"{runs.REPO}:{runs.REPO / 'tests'}:{tmp_path}", "JAX_NUM_CPU_DEVICES": "8"}
    line = [sys.executable, "-m", "jaxtrain.main", "--config=lab.py", "--config.loss.name=wrong_lab:focal", "--workdir=runs/c"]
    done = subprocess.run(line, cwd=lab, env=environ, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode != 0
    first = next(line for line in done.stderr.splitlines() if "wrong_lab" in line)
    assert "wrong_lab.py" in first and "line 4" in first or ":4" in first
    assert "own.gama" in done.stderr and "Traceback" not in done.stderr
