"""The average of the weights, train.ema_decay: its values on all layouts, in checkpoints, in evaluations and in commands."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest
import runs
import safetensors.numpy

import jaxtrain
from jaxtrain import main
from jaxtrain.commands import hf, sample
from jaxtrain.config.schema import ConfigError, RunConfig
from jaxtrain.models.lora import is_adapter
from jaxtrain.plan.shardings import step_rows
from jaxtrain.step import compiler, guard
from jaxtrain.step.batch import place_batch
from jaxtrain.step.memory import memory_by_class
from jaxtrain.step.state import to_host

DECAY = 0.75
# With this eps, an update depends smoothly on its gradient, so that layouts give the same weights up to rounding.
AVERAGED = {"train.ema_decay": DECAY, "model.num_layers": 3, "optimizer.lr": 1e-2, "optimizer.eps": 1e-2}
EXPERTS = {"model.num_experts": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "fsdp and tensor": {"mesh.fsdp": 2, "mesh.tensor": 2},
    "an empty slot": {"mesh.stage": 2, "mesh.fsdp": 2, "train.grad_accum": 2},
    "sequence": {"mesh.data": 2, "mesh.seq": 2, "sharding.zero": 1},
    "moments on the host": {"mesh.fsdp": 2, "optimizer.offload": "moments"},
}
OTHER_WEIGHTS: dict[str, dict[str, Any]] = {
    "experts": {**EXPERTS, "model.router_bias": True, "mesh.expert": 2, "mesh.fsdp": 2},
    "bfloat16": {"dtypes.params": "bf16"},
    "frozen": {"train.freeze": "embed.*,layers.mlp.*"},
    "adapters": {"lora.rank": 2},
}


def tensors_of(state: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """Return the tensors of one kind, params or ema, by their names without it."""
    return {name.removeprefix(f"{kind}."): x for name, x in state.items() if name.startswith(f"{kind}.")}


def trained(run: RunConfig, steps: int, spoiled: int = -1) -> list[dict[str, np.ndarray]]:
    """Return all tensors before the first step, and after each step. The batch of step `spoiled` has weights that are NaN.

    The shardings of the average stay those of the weights.
    """
    made, current = helpers.program(run), helpers.fresh_state(run)
    found = [to_host(current, "")]
    for i in range(steps):
        host = helpers.host_batch(run, i)
        host |= {"weights": host["weights"] * np.float32(np.nan)} if i == spoiled else {}
        current, _ = helpers.train_step(run)(current, place_batch(host, made.batch, made.context))
        current = dataclasses.replace(current, guard=guard.release(current.guard))
        found.append(to_host(current, ""))
    for state in (made.state, current):
        weights = dict(jax.tree_util.tree_leaves_with_path(state.params))
        for path, e in jax.tree_util.tree_leaves_with_path(state.ema):
            assert e.dtype == np.float32 and e.shape == weights[path].shape
            assert e.sharding.is_equivalent_to(weights[path].sharding, e.ndim), jax.tree_util.keystr(path)
    return found


def by_hand(states: list[dict[str, np.ndarray]], decay: float) -> dict[str, np.ndarray]:
    """Return the average of the last of these states in float64."""
    first, *rest = (tensors_of(state, "params") for state in states)
    out = {name: first[name].astype(np.float64) for name in tensors_of(states[0], "ema")}
    for weights in rest:
        out = {name: decay * x + (1 - decay) * weights[name].astype(np.float64) for name, x in out.items()}
    return out


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], atol: float = 1e-7) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-6, atol=atol, err_msg=name)


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_the_average_follows_its_recurrence_on_every_layout(changes: dict[str, Any]) -> None:
    states = trained(helpers.tiny(AVERAGED | changes), 4)
    found = tensors_of(states[-1], "ema")
    assert found.keys() == tensors_of(states[-1], "params").keys()
    assert_close(found, by_hand(states, DECAY))
    assert_close(tensors_of(states[0], "ema"), tensors_of(states[0], "params"), atol=0)
    one = trained(helpers.tiny(AVERAGED), 4)[-1]
    moved = max(np.abs(x - states[0][f"params.{name}"]).max() for name, x in found.items())
    assert moved > 1e-3
    assert_close(found, tensors_of(one, "ema"), atol=1e-5)


@pytest.mark.parametrize("changes", OTHER_WEIGHTS.values(), ids=OTHER_WEIGHTS)
def test_trained_weights_have_averages_of_any_kind(changes: dict[str, Any]) -> None:
    run = helpers.tiny(AVERAGED | changes)
    states = trained(run, 3)
    found, weights = tensors_of(states[-1], "ema"), tensors_of(states[-1], "params")
    without = set()
    if run.lora.rank:
        without = {name for name in weights if not is_adapter(name)}
    elif run.train.freeze:
        without = {name for name in weights if name.startswith("embed.") or ".mlp." in name}
    elif run.model.num_experts:
        without = {name for name in weights if name.endswith("router_bias")}  # a step moves them without gradients
    assert found.keys() == weights.keys() - without
    assert_close(found, by_hand(states, DECAY))


def test_the_average_of_constant_weights_is_these_weights() -> None:
    """In float32, 0.9999 and 1 - 0.9999 add up to less than 1."""
    states = trained(helpers.tiny(AVERAGED | {"train.ema_decay": 0.9999, "optimizer.lr": 0.0, "optimizer.lr_min": 0.0}), 3)
    assert_close(tensors_of(states[-1], "ema"), tensors_of(states[0], "params"), atol=0)


def test_a_skipped_step_does_not_change_the_average() -> None:
    states = trained(helpers.tiny(AVERAGED), 4, spoiled=2)
    before, after = tensors_of(states[2], "ema"), tensors_of(states[3], "ema")
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert_close(tensors_of(states[4], "ema"), by_hand([*states[:3], states[4]], DECAY))


def test_without_a_decay_there_is_no_array_and_with_one_the_plan_counts_it() -> None:
    off, on = (helpers.tiny({"mesh.fsdp": 2, "train.ema_decay": decay}) for decay in (0.0, DECAY))
    assert helpers.program(off).state.ema == () and helpers.program(on).state.ema
    assert helpers.lowered(off) == helpers.lowered(helpers.tiny({"mesh.fsdp": 2}))
    size = compiler.local_bytes(helpers.program(on).state.ema)
    without, counted = (memory_by_class(helpers.program(run), helpers.train_step(run)) for run in (off, on))
    (name,) = counted.keys() - without.keys()
    assert counted[name] == counted["parameters"] == size / 2**30
    argument = [helpers.train_step(run).memory_analysis().argument_size_in_bytes for run in (off, on)]
    assert argument[1] - argument[0] == size
    rows = [row for row in step_rows(helpers.program(on)) if row.kind == "average"]
    assert sum(row.bytes_per_device for row in rows) == size
    host = [
        compiler.local_bytes(compiler.device_arguments(helpers.program(helpers.tiny(AVERAGED | each)))) for each in OFFLOADED
    ]
    assert host[1] - host[0] == compiler.local_bytes(helpers.program(helpers.tiny(AVERAGED | OFFLOADED[1])).state.ema)


OFFLOADED = [{"optimizer.offload": "moments", "train.ema_decay": decay} for decay in (0.0, DECAY)]


# ---- Runs


def train(workdir: Path, **overrides: Any) -> int:
    """Train eight steps of the smallest config with an average, with checkpoints at 4 and 8 and evaluations at 3, 6 and 8."""
    given = {"log__tensorboard": "false", "train__ema_decay": DECAY, "checkpoint__keep_best": "true"}
    return runs.train(runs.small(), workdir, **given | overrides)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("ema") / "run"
    assert train(workdir) == 0
    return workdir


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    return shutil.copytree(base, tmp_path / "run")


def evals(workdir: Path) -> list[dict[str, Any]]:
    return [line for line in runs.lines(workdir) if line["kind"] == "eval"]


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(base: Path, copy: Path) -> None:
    assert train(copy, checkpoint__step=4) == 0
    ours, theirs = runs.tensors(copy, 8), runs.tensors(base, 8)
    assert ours.keys() == theirs.keys() and tensors_of(ours, "ema").keys() == tensors_of(ours, "params").keys()
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    assert runs.exact(copy) == runs.exact(base)


def test_another_mesh_restores_the_average(base: Path, copy: Path) -> None:
    assert train(copy, checkpoint__step=4, mesh__data=2, mesh__fsdp=2, mesh__tensor=2) == 0
    assert_close(tensors_of(runs.tensors(copy, 8), "ema"), tensors_of(runs.tensors(base, 8), "ema"), atol=1e-3)


def test_the_average_is_turned_off_on_and_changed_on_resume(base: Path, copy: Path) -> None:
    """Off: no tensors, and the weights of the run with an average. On again: it begins at the restored weights."""
    assert train(copy, checkpoint__step=4, train__ema_decay=0) == 0
    plain = runs.tensors(copy, 8)
    assert not tensors_of(plain, "ema")
    assert all(plain[name].tobytes() == x.tobytes() for name, x in runs.tensors(base, 8).items() if name in plain)
    assert "train.ema_decay = 0" in (copy / "log.txt").read_text().split("resuming from step 4")[-1]

    assert train(copy, train__steps=9) == 0
    nine = runs.tensors(copy, 9)
    assert_close(tensors_of(nine, "ema"), by_hand([plain | begun(plain), nine], DECAY))
    assert f"train.ema_decay = {DECAY}" in (copy / "log.txt").read_text().split("resuming from step 8")[-1]

    assert train(copy, train__steps=10, train__ema_decay=0.5) == 0
    ten = runs.tensors(copy, 10)
    wanted = {name: 0.5 * x.astype(np.float64) + 0.5 * ten[f"params.{name}"] for name, x in tensors_of(nine, "ema").items()}
    assert_close(tensors_of(ten, "ema"), wanted)


def begun(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of an average that begins at the weights of a state."""
    return {f"ema.{name}": x for name, x in tensors_of(state, "params").items()}


def test_a_rollback_restores_the_average_and_replays_and_repeated_steps_have_one(tmp_path: Path) -> None:
    """The batch of step 4 is not finite. The run goes back to step 3 and continues after it. Every second step runs twice."""
    how = {"data__source": "sources:poisoned", "train__on_divergence": "rollback", "train__max_skipped_steps": 1}
    assert train(tmp_path / "run", **how, train__steps=5, train__sdc_check_every=2, checkpoint__every_steps=1) == 0
    three, four = (runs.tensors(tmp_path / "run", step) for step in (3, 4))
    wanted = {name: DECAY * x + (1 - DECAY) * four[f"params.{name}"] for name, x in tensors_of(three, "ema").items()}
    assert_close(tensors_of(four, "ema"), wanted)
    assert main.main([f"--replay={tmp_path / 'run/replay/step-4'}"]) == 0


def test_a_run_from_other_weights_begins_its_average_there(base: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", init__from=base / "checkpoints/4", train__steps=1, checkpoint__every_steps=1) == 0
    first, one = runs.tensors(base, 4), runs.tensors(tmp_path / "run", 1)
    assert_close(tensors_of(one, "ema"), by_hand([first | begun(first), one], DECAY))


def test_evaluations_and_exports_use_the_average(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss before the first step of a run from an export is the loss that the run wrote after its last step."""
    stored = runs.tensors(base, 8)
    found = evals(base)
    assert [line["weights"] for line in found] == ["ema"] * len(found) and found[-1]["step"] == 8
    assert [line["weights"] for line in runs.receipt(base)["held_out"]] == ["ema"]
    losses = {}
    for kind, option in (("ema", ["--ema"]), ("params", [])):
        out = tmp_path / kind
        capsys.readouterr()
        assert hf.main(["export", str(base / "checkpoints/8"), f"--out={out}", "--raw", *option]) == 0
        assert ("--ema" in capsys.readouterr().err) == (kind == "params"), "a line says that there is an average"
        assert_same(jaxtrain.load_weights(out), tensors_of(stored, kind))
        assert_same(jaxtrain.load_weights(base / "checkpoints/8", ema=kind == "ema"), tensors_of(stored, kind))
        begun = {"init__from": out, "train__ema_decay": 0, "train__steps": 1, "eval__every_steps": 1}
        assert train(tmp_path / f"from {kind}", **begun) == 0
        first = evals(tmp_path / f"from {kind}")[0]
        assert first["step"] == 0 and "weights" not in first
        losses[kind] = first["loss"]
    np.testing.assert_allclose(losses["ema"], found[-1]["loss"], rtol=1e-6)
    assert abs(losses["params"] - found[-1]["loss"]) > 1e-4
    meta = json.loads((base / "checkpoints/8/meta.json").read_text())
    assert meta["held_out_loss"] == found[-1]["loss"]


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], x) for name, x in wanted.items())


def test_samples_and_scores_use_the_average_if_asked(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [f"--workdir={base}", "--prompt=ab", "--tokenizer=byte", "--max-tokens=2"]
    capsys.readouterr()
    assert sample.main([*line, "--ema"]) == 0
    assert "--ema" not in capsys.readouterr().err
    assert sample.main(line) == 0
    assert "--ema" in capsys.readouterr().err
    scores = [jaxtrain.evaluate(base, ["some text"], tokenizer="byte", ema=ema)["loss"] for ema in (False, True)]
    assert scores[0] != scores[1]


def test_without_an_average_the_option_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", train__ema_decay=0, train__steps=1) == 0
    line = [f"--workdir={tmp_path / 'run'}", "--prompt=ab", "--tokenizer=byte", "--max-tokens=2"]
    capsys.readouterr()
    assert sample.main([*line, "--ema"]) == 2
    assert "--ema: " in capsys.readouterr().err
    assert sample.main(line) == 0
    assert "--ema" not in capsys.readouterr().err
    assert hf.main(["export", str(tmp_path / "run"), f"--out={tmp_path / 'out'}", "--raw", "--ema"]) == 2
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError):
        jaxtrain.load_weights(tmp_path / "run", ema=True)


def test_averages_of_adapters_are_saved_resumed_and_merged(base: Path, tmp_path: Path) -> None:
    how = {"init__from": base / "checkpoints/8", "lora__rank": 2, "lora__targets": "wq", "optimizer__warmup_steps": 1}
    assert train(tmp_path / "run", **how) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert train(tmp_path / "copy", **how, checkpoint__step=4) == 0
    ours, theirs = (runs.tensors(tmp_path / name, 8) for name in ("run", "copy"))
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    averages = tensors_of(ours, "ema")
    assert averages.keys() == tensors_of(ours, "params").keys() and all(map(is_adapter, averages))
    merged = jaxtrain.load_weights(tmp_path / "run/checkpoints/8", ema=True)
    a, b = (averages[f"layers.0.attention.lora.wq_{half}"] for half in "ab")
    wanted = runs.tensors(base, 8)["params.layers.0.attention.wq"] + 32 / 2 * np.einsum("DR,RNH->DNH", a, b)
    np.testing.assert_allclose(merged["layers.0.attention.wq"], wanted, rtol=1e-5, atol=1e-6)
    out = tmp_path / "adapter"
    assert hf.main(["export-adapter", str(tmp_path / "run/checkpoints/8"), f"--out={out}", "--base=name", "--ema"]) == 0
    (written,) = (x for name, x in safetensors.numpy.load_file(out / "adapter_model.safetensors").items() if "lora_A" in name)
    assert np.array_equal(written, a.T)
