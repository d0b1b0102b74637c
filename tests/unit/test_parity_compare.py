"""The parity command without a step: accepted and refused layouts, and the comparison of numbers."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxtrain.commands import parity as command
from jaxtrain.data import loading
from jaxtrain.train import parity, parity_layouts, parity_report

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


def refused(capsys, *argv: str) -> str:
    few = () if any(a.startswith("--mesh") for a in argv) else ("--meshes=one,fsdp2",)
    assert command.main([*SMALL, *argv, *few]) == 2
    return capsys.readouterr().err


# ---- Layouts

WITH_EXPERTS = ("--config.model.num_experts=4", "--config.moe.capacity_factor=1.5")


@pytest.mark.parametrize(
    ("argv", "keys"),
    [
        (["--meshes=one,fdsp8,data3"], ["'fdsp'", "--meshes=data3: train.global_batch = 16"]),
        (["--meshes=one"], ["--meshes = 'one'"]),
        (["--meshes=one,fsdp2xfsdp4"], ["fsdp twice"]),
        (["--meshes=one,seq0"], ["seq of size 0"]),
        (["--meshes=one,fsdp8/sharding.zero=4"], ["sharding.zero = 4"]),
        (["--meshes=one,fsdp8/model.d_model=64"], ["--config.model.d_model=64"]),
        (["--meshes=one,fsdp8/mesh.data=2"], ["mesh.data"]),
        (["--config.mesh.fsdp=2"], ["--config.mesh.fsdp"]),
        (["--config.optimizer.name=helpers:slower_adamw"], ["optimizer.name = 'helpers:slower_adamw'"]),
        (["--config.attention.impl=cudnn"], ["attention.impl = 'cudnn'"]),
        ([*WITH_EXPERTS, "--meshes=one,fsdp2xexpert2"], ["moe.capacity_factor = 1.5"]),
        ([*WITH_EXPERTS, "--meshes=one,fsdp2/train.grad_accum=2"], ["moe.balance_loss = 0.01", "moe.z_loss = 0.001"]),
        (["--steps=-1", "--meshes=one,data3,data5", "--config.optimizer.lr=fast"], ["--steps = '-1'", "data5: train"]),
    ],
)
def test_mistakes_name_their_key(argv, keys, capsys):
    said = refused(capsys, *argv)
    assert all(key in said for key in keys)
    assert said.count("optimizer.lr = 'fast'") <= 1, "what is wrong with all layouts is said once"


def test_a_model_that_is_too_large(monkeypatch, capsys):
    monkeypatch.setattr("jaxtrain.config.hardware.available_gib", lambda: 64.0)
    large = ("--config=configs/llama3_8b.py", "--config.data.source=synthetic", "--config.train.grad_accum=1")
    assert command.main([*large, "--meshes=fsdp8,data8"]) == 2
    assert "8.0 billion parameters" in capsys.readouterr().err


def test_the_float32_reference_takes_kernels_that_have_float32():
    """The reference of a bfloat16 run with named kernels must run: cuDNN's and Pallas kernels have no float32."""
    named = ["--config.attention.impl=pallas", "--config.moe.impl=pallas", "--config.precision=bf16"]
    run = parity_layouts.to_float32(loading.load_config(["--config=configs/qwen3_30b_a3b.py", *named]).run)
    assert (run.attention.impl, run.moe.impl, run.precision, run.dtypes.params) == ("auto", "auto", "f32", "f32")
    ragged = loading.load_config(["--config=configs/qwen3_30b_a3b.py", "--config.moe.impl=ragged"]).run
    assert parity_layouts.to_float32(ragged).moe.impl == "ragged"


def test_layouts_that_are_tried_by_default(monkeypatch):
    """All default layouts are tried that the config allows."""
    asked = []
    monkeypatch.setattr(
        command, "run_parity", lambda args, runs, left_out: asked.append([layout.name for layout, *_ in runs]) or 0
    )
    everything = ",".join((parity_layouts.DEFAULT, parity_layouts.STAGES, parity_layouts.EXPERTS, parity_layouts.BOTH)).split(
        ","
    )
    few_rows = [name for name in parity_layouts.DEFAULT.split(",") if name not in ("data8", "fsdp8", "data2xfsdp4")]
    for keys, names in (
        ((), parity_layouts.DEFAULT.split(",")),
        (("train.global_batch=4",), few_rows),
        (("train.grad_accum=2", "model.num_layers=2", "model.num_experts=4"), everything),
    ):
        assert command.main([*SMALL, *(f"--config.{key}" for key in keys)]) == 0
        assert asked.pop() == names


def test_items_of_meshes():
    found, problems = parity_layouts.parse_layouts(
        "one, fsdp4xtensor2/remat.policy=custom/remat.tensors=q=keep,k=keep,stage2xexpert4"
    )
    assert not problems and [layout.devices for layout in found] == [1, 8, 8]
    assert found[1].overrides == ("remat.policy=custom", "remat.tensors=q=keep,k=keep")
    assert found[1].argv[-2:] == [f"--config.{key}" for key in found[1].overrides]
    assert found[1].sizes == {"data": 1, "fsdp": 4, "tensor": 2, "seq": 1}
    assert found[2].sizes == {"data": 1, "stage": 2, "fsdp": 1, "expert": 4, "tensor": 1, "seq": 1}


# ---- Comparisons


def trained(**changes) -> parity.Trained:
    rng = np.random.default_rng(0)
    start, gradient = rng.normal(size=(2, 1000))
    return dataclasses.replace(
        parity.Trained(
            np.array([2.0, 1.0]), np.array([1.0, 1.0]), {"w": start}, {"w": gradient}, {"w": start - 0.1 * np.sign(gradient)}
        ),
        **changes,
    )


def against(got: parity.Trained) -> parity.ParityComparison:
    return parity.compare_runs(got, trained(), parity.bounds(trained(), None, 8, 100))


def test_each_number_is_compared():
    same = trained()
    assert not against(same).violations
    moved, other = same.weights["w"].copy(), same.start["w"].copy()
    moved[0] += 0.01
    other[7] = np.nextafter(other[7], 9)
    for name, changes in {
        "loss": {"loss": same.loss * (1 + 2e-5)},
        "grad_norm": {"grad_norm": np.array([1.0, 1.1])},
        "gradient": {"gradients": {"w": same.gradients["w"] * 1.001}},
        "parameter": {"weights": {"w": moved}},
        "start": {"start": {"w": other}},
    }.items():
        found = against(trained(**changes))
        measures = {m.name: getattr(found, m.name) for m in dataclasses.fields(found)}
        assert [n for n, m in measures.items() if not m.ok] == [name] and len(found.violations) == 1
    assert against(trained(grad_norm=np.array([1.0, 1.1]))).grad_norm.location == "step 2"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_differs(value):
    for losses in ([value, 1.0], [2.0, value]):
        assert against(trained(loss=np.array(losses))).violations
    assert not parity.worst({"a": 0.5, "b": value, "c": 0.7}, 1.0).ok, "a number before or after it does not hide it"
    gradient = trained().gradients["w"].copy()
    gradient[3] = value
    comparison = against(trained(gradients={"w": gradient}))
    assert not comparison.gradient.ok
    rows = (parity_report.ParityRow(parity_layouts.parse_layouts("one")[0][0], trained(), comparison),)
    found = parity_report.ParityResult("c", (), 2, "float32", "8", rows, None)
    assert not found.agrees and json.dumps(parity_report.to_json(found), allow_nan=False)


def test_a_sign_that_rounding_picks_is_left_out():
    """A weight with a gradient below the threshold may change in either direction; one with a larger gradient may not."""
    same = trained()
    for size, wrong in ((1e-6, False), (1e-3, True)):
        gradient = same.gradients["w"].copy()
        gradient[5] = size
        reference = dataclasses.replace(same, gradients={"w": gradient})
        weights = same.weights["w"].copy()
        weights[5] += 0.2
        got = dataclasses.replace(reference, weights={"w": weights})
        allowed = parity.bounds(reference, None, 8, 100)
        assert parity.compare_runs(got, reference, allowed).parameter.ok != wrong


def test_the_yardstick_grows_with_the_parts_of_a_sum():
    reference = trained(gradients={"w": trained().gradients["w"] * 1.01})
    allowed = [parity.bounds(reference, trained(), parts, 100) for parts in (1, 4, 64)]
    assert [a.gradients["w"] for a in allowed] == pytest.approx([0.01 * math.sqrt(2 + n) for n in (0, 2, 6)])
    assert allowed[0].loss == pytest.approx(0.01 * math.sqrt(2) / 10)


def test_runs_of_different_models_are_not_compared():
    with pytest.raises(ValueError):
        against(trained(weights={"w": np.zeros(3)}))
