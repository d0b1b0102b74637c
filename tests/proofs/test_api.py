"""The Python API, `import jaxtrain as jt`, called as a user does."""

import dataclasses
import math
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

import jaxtrain
from jaxtrain import api
from jaxtrain.config import ConfigError
from jaxtrain.report.run import RunError

SMALL = {
    "data": {"source": "synthetic", "eval_source": "", "seq_len": 32},
    "model": {"num_layers": 1, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ff": 64},
    "train": {"steps": 3, "global_batch": 8},
    "optimizer": {"warmup_steps": 1},
    "eval": {"every_steps": 0},
    "sample": {"max_tokens": 0},
    "log": {"every_steps": 1, "tensorboard": False},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "run"
    result = jaxtrain.train("tiny", folder, **SMALL, paths={"cache": str(folder.parent / "cache")})
    assert (result.exit_code, result.step) == (0, 3)
    return folder


def test_importing_is_light_and_names_are_functions_whatever_was_imported_first():
    code = """
import sys, jaxtrain
assert "jax" not in sys.modules and set(jaxtrain.__all__) <= set(dir(jaxtrain))
assert all(callable(getattr(jaxtrain, name)) for name in jaxtrain.__all__)
import jaxtrain.plan.rates, jaxtrain.train.step, jaxtrain.parity.layouts
assert all(callable(getattr(jaxtrain, name)) for name in jaxtrain.__all__)
from jaxtrain import train
assert train.step.__name__ == "jaxtrain.train.step"
assert jaxtrain.load("tiny") == jaxtrain.load("configs/tiny.py")
try:
    jaxtrain.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=runs.REPO, timeout=300)
    assert (done.returncode, done.stdout) == (0, "module 'jaxtrain' has no attribute 'nothing'\n"), done.stderr


def test_help_reads_as_a_page():
    text = pydoc.render_doc(jaxtrain, renderer=pydoc.plaintext)
    assert all(f"jt.{name}(" in text for name in jaxtrain.__all__)
    assert all(getattr(api, name).__doc__ for name in api.__all__) and api.__all__ == jaxtrain.__all__


def test_load_takes_names_variants_and_sections():
    run = jaxtrain.load("llama3_8b:half", mesh={"fsdp": 4, "tensor": 2}, **{"optimizer.lr": 1e-4})
    assert (run.model.num_layers, run.mesh.tensor, run.optimizer.lr) == (16, 2, 1e-4)
    assert jaxtrain.load(run) is run
    with pytest.raises(TypeError, match="dataclasses.replace"):
        jaxtrain.load(run, precision="f32")
    with pytest.raises(ConfigError, match=r"mesh.tensr = '2': no such key. Did you mean mesh.tensor"):
        jaxtrain.load("tiny", mesh={"tensr": 2})
    with pytest.raises(TypeError, match="set the keys in the dict"):
        api.train({"train": {"steps": 1}}, "runs/none", precision="f32")


def test_a_run_opens_as_data_frames(trained: Path):
    run = jaxtrain.open_run(trained)
    frame = run.to_pandas()
    assert list(frame["step"]) == [1, 2, 3] and list(frame["loss"]) == list(runs.losses(trained).values())
    assert run.write_report().read_text().startswith("<!doctype html>")
    assert run.write_report(trained / "other.html") == trained / "other.html"
    with pytest.raises(RunError, match="no such folder. Fix: "):
        jaxtrain.open_run(trained / "nowhere")


def test_a_model_generates_and_is_evaluated(trained: Path):
    text = jaxtrain.generate(trained, "def ", max_tokens=5, temperature=0.0)
    assert text.startswith("def ") and text == jaxtrain.generate(trained, "def ", max_tokens=5, temperature=0.0)
    texts = ["x = 1\n" * 20, "y"]
    found = jaxtrain.evaluate(trained, texts)
    # Three steps train little: the loss is near that of a uniform guess over the 264 ids.
    assert abs(found["loss"] - math.log(264)) < 0.5
    bits = found["loss"] * found["tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / sum(map(len, texts)))
    with pytest.raises(ValueError, match="no token to predict. Fix: "):
        jaxtrain.evaluate(trained, [])


def test_evaluate_is_the_loss_of_the_logits(trained: Path):
    from jaxtrain.data.tokenizer import load_tokenizer
    from jaxtrain.hf.importing import open_origin
    from jaxtrain.hf.model import logits_of

    tokenizer, text = load_tokenizer("byte"), "def f(x):\n    return x\n"
    ids = [*tokenizer.bos, *tokenizer.encode(text)]
    logits = logits_of(open_origin(str(trained)))(np.array([ids[:-1]], np.int32), np.ones((1, len(ids) - 1), np.int32))
    shifted = logits[0].astype(np.float64)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    expected = -np.mean([log_probs[i, token] for i, token in enumerate(ids[1:])])
    assert jaxtrain.evaluate(trained, [text])["loss"] == pytest.approx(expected, rel=1e-5)


def test_layouts_are_compared():
    keys: dict[str, Any] = SMALL | {"precision": "f32"}
    result = jaxtrain.parity("tiny", "one,fsdp2", steps=2, **keys)
    assert result.agrees and [row.layout.name for row in result.rows] == ["one", "fsdp2"]
    rule = "needs 16 devices, and this process has 8. Set JAX_NUM_CPU_DEVICES=16 before JAX starts."
    with pytest.raises(ConfigError, match=f"^meshes = .one,fsdp16.: {rule}$"):
        jaxtrain.parity("tiny", "one,fsdp16", **SMALL)


def test_a_plan_shows_itself():
    plan = jaxtrain.plan(
        "llama3_1b", "h200:8", model={"num_layers": 1, "vocab_size": 4096}, train={"global_batch": 8, "grad_accum": 1}
    )
    assert (
        plan.fits
        and repr(plan).startswith("fits: ")
        and "--config=configs/llama3_1b.py --config.model.num_layers=1" in repr(plan)
    )
    assert "&lt;!doctype html&gt;" in plan._repr_html_()
    collectives, memory, timeline = (plan.to_pandas(name) for name in ("collectives", "memory", "timeline"))
    assert collectives["wire_gib"].sum() == pytest.approx(sum(c.wire_gib for c in plan.collectives))
    assert memory["gib"].sum() == pytest.approx(plan.memory.peak_gib)
    assert timeline["gib"].max() <= plan.memory.peak_gib + 1e-9 and {"phase", "parameters"} <= set(timeline)
    assert plan.to_pandas("kernels")["ms"].sum() > 0
    with pytest.raises(ValueError, match="no such table. Fix: collectives"):
        plan.to_pandas("memries")
    wrong = dataclasses.replace(jaxtrain.load("llama3_1b"), mesh=dataclasses.replace(jaxtrain.load("llama3_1b").mesh, fsdp=3))
    with pytest.raises(ConfigError, match="the run has 8 NVIDIA H200 devices"):
        jaxtrain.plan(wrong, "h200:8")
