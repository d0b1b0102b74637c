"""The parity command without a step: accepted and refused layouts, and the comparison of numbers."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxtrain import launch
from jaxtrain.parity import __main__ as command
from jaxtrain.parity import compare, layouts, report

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
    assert command.main([*argv, *few]) == 2
    return capsys.readouterr().err


# ---- Layouts


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--meshes=one,fdsp8"], "no mesh axis 'fdsp'. Did you mean fsdp?"),
        (["--meshes=one,fsdp"], "'fsdp' is no axis with its size. Write one, or axes"),
        (["--meshes=one,fsdp2xfsdp4"], "fsdp twice"),
        (["--meshes=one,seq0"], "seq of size 0"),
        (["--meshes=one,fsdp8,data3"], "--meshes=data3: train.global_batch = 16: a batch of 16 does not divide over 3 devices"),
        (["--meshes=one,fsdp8,tensor3"], "--meshes=tensor3: model.num_heads = 4: does not divide over mesh.tensor = 3"),
        (["--meshes=one,fsdp8/sharding.zreo=1"], "sharding.zreo = '1': no such key. Did you mean sharding.zero?"),
        (["--meshes=one,fsdp8/sharding.zero=4"], "sharding.zero = 4: must be at most 3"),
        (["--meshes=one,fsdp8/model.d_model=64"], "Set it for all layouts, as --config.model.d_model=64."),
        (["--meshes=one,fsdp8/mesh.data=2"], "mesh.data belongs to the mesh"),
        (["--config.mesh.fsdp=2"], "--config.mesh.fsdp: --meshes sets the mesh"),
        (["--config.optimizer.name=helpers:slower_adamw"], "gradients are read from Adam's first moment"),
        (["--config.attention.impl=cudnn"], "cuDNN needs a GPU"),
        (["--steps=0"], "--steps = '0': must be a whole number, 1 or more"),
        (["--dtype=fp16"], "--dtype = 'fp16': must be one of f32, bf16, fp8"),
        (["--json=nowhere/parity.json"], "there is no folder"),
        (["--mesh=fsdp8"], "--mesh: no such option. Did you mean --meshes?"),
    ],
)
def test_mistakes_are_named(argv, said, capsys):
    assert said in refused(capsys, *SMALL, *argv)


def test_a_misspelled_layout_is_the_only_problem(capsys):
    said = refused(capsys, *SMALL, "--meshes=one,fdsp2")
    assert "Did you mean fsdp?" in said and "nothing to compare" not in said
    assert "nothing to compare" in refused(capsys, *SMALL, "--meshes=one")


def test_all_mistakes_come_together(capsys):
    said = refused(capsys, *SMALL, "--steps=-1", "--meshes=one,fdsp8,data3,data5", "--config.optimizer.lr=fast")
    assert "5 problems; nothing was started" in said
    for part in ("--steps", "'fdsp'", "--meshes=data3: train", "--meshes=data5: train", "optimizer.lr"):
        assert part in said
    assert said.count("optimizer.lr = 'fast'") == 1, "what is wrong with all layouts is said once"


def test_a_model_that_is_too_large(monkeypatch, capsys):
    monkeypatch.setattr("jaxtrain.hardware.available_gib", lambda: 64.0)
    large = ("--config=configs/llama3_8b.py", "--config.data.source=synthetic", "--config.train.grad_accum=1")
    said = refused(capsys, *large, "--meshes=fsdp8,data8")
    assert "8.0 billion parameters" in said and "this machine has 64 GiB" in said and "--config.model.num_layers=2" in said


def test_the_float32_reference_takes_kernels_that_have_float32():
    """The reference of a bfloat16 run with named kernels must run: cuDNN's and Pallas kernels have no float32."""
    named = ["--config.attention.impl=pallas", "--config.moe.impl=pallas", "--config.precision=bf16"]
    run = layouts.in_float32(launch.load(["--config=configs/qwen3_30b_a3b.py", *named]).run)
    assert (run.attention.impl, run.moe.impl, run.precision, run.dtypes.params) == ("auto", "auto", "f32", "f32")
    ragged = launch.load(["--config=configs/qwen3_30b_a3b.py", "--config.moe.impl=ragged"]).run
    assert layouts.in_float32(ragged).moe.impl == "ragged"


def test_layouts_that_are_tried_by_default(monkeypatch, capsys):
    """All default layouts are tried that the config allows. The others are left out and listed."""
    asked = []
    monkeypatch.setattr(command, "start_devices", lambda runs: None)
    monkeypatch.setattr(command, "run", lambda parsed, runs, console: asked.append([layout.name for layout, *_ in runs]) or 0)
    assert command.main([*SMALL]) == 0
    assert asked.pop() == layouts.DEFAULT.split(",")
    assert command.main([*SMALL, "--config.train.global_batch=4"]) == 0
    assert asked.pop() == [n for n in layouts.DEFAULT.split(",") if n not in ("data8", "fsdp8", "data2xfsdp4")]
    assert (
        command.main([*SMALL, "--config.train.grad_accum=2", "--config.model.num_layers=2", "--config.model.num_experts=4"])
        == 0
    )
    assert asked.pop() == ",".join((layouts.DEFAULT, layouts.STAGES, layouts.EXPERTS, layouts.BOTH)).split(",")
    assert "left out: fsdp8: train.global_batch = 4" in capsys.readouterr().out


def test_experts_that_compute_another_function_elsewhere(capsys):
    experts = (*SMALL, "--config.model.num_experts=4")
    said = refused(capsys, *experts, "--config.moe.capacity_factor=1.5", "--meshes=one,fsdp2xexpert2")
    assert "moe.capacity_factor = 1.5: each device drops the excess of its own tokens" in said
    said = refused(capsys, *experts, "--meshes=one,fsdp2xexpert2/train.grad_accum=2")
    assert "moe.balance_loss = 0.01: is of a microbatch, and these layouts divide a batch into 1 and 2" in said
    assert "moe.z_loss = 0.001: is of a microbatch" in said


def test_items_of_meshes():
    found, problems = layouts.parse("one, fsdp4xtensor2/remat.policy=custom/remat.tensors=q=keep,k=keep,seq8/sharding.zero=1")
    assert not problems
    assert [layout.devices for layout in found] == [1, 8, 8]
    assert found[1].overrides == ("remat.policy=custom", "remat.tensors=q=keep,k=keep")
    assert found[2].argv[-2:] == ["--config.mesh.seq=8", "--config.sharding.zero=1"]
    (staged,), problems = layouts.parse("stage2xexpert4")
    assert not problems and staged.devices == 8 and dict(staged.mesh)["stage"] == 2
    assert staged.shown == {"data": 1, "stage": 2, "fsdp": 1, "expert": 4, "tensor": 1, "seq": 1}
    assert found[2].shown == {"data": 1, "fsdp": 1, "tensor": 1, "seq": 8}


# ---- Comparisons


def trained(**changes) -> compare.Trained:
    rng = np.random.default_rng(0)
    start, gradient = rng.normal(size=(2, 1000))
    return dataclasses.replace(
        compare.Trained(
            np.array([2.0, 1.0]), np.array([1.0, 1.0]), {"w": start}, {"w": gradient}, {"w": start - 0.1 * np.sign(gradient)}
        ),
        **changes,
    )


def against(got: compare.Trained) -> compare.Comparison:
    return compare.compare(got, trained(), compare.bounds(trained(), None, 8, 100))


def test_each_number_is_compared():
    same = trained()
    assert not against(same).wrong
    assert against(trained(loss=same.loss * (1 + 2e-5))).wrong == ["loss off by 2.0e-05 (step 1), bound 1.0e-05"]
    assert against(trained(grad_norm=np.array([1.0, 1.1]))).wrong == ["gradient norm off by 1.0e-01 (step 2), bound 1.0e-05"]
    assert against(trained(gradients={"w": same.gradients["w"] * 1.001})).wrong == [
        "gradient off by 1.0e-03 (w), bound 1.0e-05"
    ]
    moved = same.weights["w"].copy()
    moved[0] += 0.01
    assert [text.split()[0] for text in against(trained(weights={"w": moved})).wrong] == ["update"]
    other = same.start["w"].copy()
    other[7] = np.nextafter(other[7], 9)
    assert against(trained(start={"w": other})).wrong == ["the initial state off by 1.0e-03 (w), bound 0.0e+00"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_differs(value):
    for losses in ([value, 1.0], [2.0, value]):
        assert against(trained(loss=np.array(losses))).wrong
    assert not compare.worst({"a": 0.5, "b": value, "c": 0.7}, 1.0).ok, "a number before or after it does not hide it"
    gradient = trained().gradients["w"].copy()
    gradient[3] = value
    comparison = against(trained(gradients={"w": gradient}))
    assert not comparison.gradient.ok
    rows = (report.Row(layouts.parse("one")[0][0], trained(), comparison),)
    found = report.Result("c", (), 2, "float32", "8", rows, None)
    assert not found.agrees and json.dumps(report.to_json(found), allow_nan=False)


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
        allowed = compare.bounds(reference, None, 8, 100)
        assert compare.compare(got, reference, allowed).parameter.ok != wrong


def test_what_has_no_gradient_is_compared_by_where_it_began():
    """A frozen weight or a router's bias must start equal. Its changes are not compared."""
    same = trained()
    fixed = {"b": np.ones(4)}
    reference = dataclasses.replace(same, start=same.start | fixed, weights=same.weights | fixed)
    allowed = compare.bounds(reference, None, 8, 100)
    moved = dataclasses.replace(reference, weights=reference.weights | {"b": np.full(4, 1.001)})
    assert not compare.compare(moved, reference, allowed).wrong
    elsewhere = dataclasses.replace(reference, start=reference.start | {"b": np.full(4, 2.0)})
    assert not compare.compare(elsewhere, reference, allowed).start.ok


def test_the_yardstick_grows_with_the_parts_of_a_sum():
    reference = trained(gradients={"w": trained().gradients["w"] * 1.01})
    allowed = [compare.bounds(reference, trained(), parts, 100) for parts in (1, 4, 64)]
    assert [a.gradients["w"] for a in allowed] == pytest.approx([0.01 * math.sqrt(2 + n) for n in (0, 2, 6)])
    assert allowed[0].loss == pytest.approx(0.01 * math.sqrt(2) / 10)


@pytest.mark.parametrize(("size", "wider"), [(4, 2.5), (64, 1.375), (3600, 1.05)])
def test_few_weights_may_scatter_more(size, wider):
    """The reference's weights differ by 2% from those of float32. The bound is sqrt(2) times 2%, times a factor that is larger
    for few weights.
    """
    ones = np.ones(size)
    start = {"w": np.zeros(size)}
    exact = compare.Trained(np.ones(2), np.ones(2), start, {"w": ones}, {"w": ones})
    reference = dataclasses.replace(exact, weights={"w": 1.02 * ones})
    assert compare.bounds(reference, exact, 1, 100).weights["w"] == pytest.approx(0.02 * math.sqrt(2) * wider)


def test_runs_of_different_models_are_not_compared():
    with pytest.raises(ValueError, match="different models"):
        against(trained(weights={"w": np.zeros(3)}))
