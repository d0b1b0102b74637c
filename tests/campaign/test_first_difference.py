"""`hf check` compares each part of a model with transformers: correct models agree, and a planted bug is named in its layer."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
import packages
import pytest
from hugging_face import FAMILIES, exported, imported, tensors_of
from safetensors.numpy import save_file

from jaxtrain.commands import hf as command
from jaxtrain.hf.check import run_transformers
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.parts import ModelComparison, compare_with_outputs, norm_modules
from jaxtrain.models import attention, layers

LIMIT = 1e-4  # the default of --tolerance
ROUNDING = 2e-5  # correct models differ by at most 4e-6


@pytest.mark.parametrize("name", [*FAMILIES, "with_mtp"])
def test_correct_models_differ_nowhere(tmp_path, monkeypatch, name):
    """In every family, on 8 devices, every part's activations and gradients are those of transformers up to rounding."""
    monkeypatch.setenv("JAXTRAIN_REFERENCE_PYTHON", packages.reference())
    family, modules = ("deepseek_v3", 1) if name == "with_mtp" else (name, 0)
    folder, ours, _ = imported(tmp_path, family, mtp=modules)
    out = tmp_path / "found.json"
    assert command.main(["check", str(ours), str(folder), f"--json={out}"]) == 0
    found = json.loads(out.read_text())
    of_layers = [f"layer {i}, {half}" for i in range(4) for half in ("attention", "mlp")]
    assert [part["part"] for part in found["parts"]] == ["embedding", *of_layers, "final norm and head"]
    assert max(part[what] for part in found["parts"] for what in ("activations", "gradients", "weights")) < ROUNDING, found
    assert found["logits"] < ROUNDING and found["first"] == ""
    assert ("the modules of multi-token prediction" in found["unused"]) == bool(modules)
    # The weights' gradients are compared with others than zeros.
    assert all(part["weights"] > 0 for part in found["parts"])


def test_weights_in_bfloat16_are_compared_in_float32(tmp_path, monkeypatch):
    """An export in bfloat16 differs from transformers by rounding alone, and from the float32 weights by more."""
    monkeypatch.setenv("JAXTRAIN_REFERENCE_PYTHON", packages.reference())
    _, ours, _ = imported(tmp_path, "llama")
    back, out = tmp_path / "back", tmp_path / "found.json"
    exported(ours, back, dtype="bf16")
    assert command.main(["check", str(back), str(back), f"--tolerance={ROUNDING}"]) == 0
    assert command.main(["check", str(ours), str(back), f"--json={out}"]) == 1
    assert command.main(["check", str(ours), str(back), "--tolerance=0.05"]) == 0
    assert json.loads(out.read_text())["first"].startswith("embedding")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Iterator[tuple[Path, Path]]:
    """Yield (folder, what transformers computes of it): layer 2 has full attention, and layers 0, 1 and 3 a window."""
    place = tmp_path_factory.mktemp("gemma3")
    folder, theirs = hugging_face.write(place / "folder", "gemma3"), place / "theirs"
    theirs.mkdir()
    np.save(theirs / "tokens.npy", hugging_face.TOKENS)
    run_transformers(packages.reference(), str(folder), norm_modules(open_origin(str(folder)).run()), theirs)
    yield folder, theirs
    shutil.rmtree(place)


def different(found: ModelComparison) -> dict[str, list[str]]:
    """Return part -> what differs, of the parts that differ."""
    above = {part.part: part.above(LIMIT) for part in found.parts}
    return {name: [what.partition(" of ")[0] for what in values] for name, values in above.items() if values}


EVERYTHING = ["activations", "gradients", "gradient"]  # of the output, of the input, and of a weight


def test_a_bug_in_rope_is_named(gemma, monkeypatch):
    """The rotary tables of layers with a window, used in the layer with full attention, are named there and nowhere else."""
    folder, theirs = gemma
    monkeypatch.setattr(attention, "rotary_tables", lambda shared, kind: shared.rotary[0])
    found = compare_with_outputs(theirs, open_origin(str(folder)))
    assert different(found) == {"layer 2, attention": EVERYTHING}
    assert found.first(LIMIT).startswith("layer 2, attention: activations ") and found.logits > LIMIT


def scale_of(folder: Path, layer: int) -> jax.Array:
    """Return the first element of the scale of a layer's norm before the feed-forward block. No other norm begins with it."""
    return jnp.asarray(tensors_of(folder)[f"model.layers.{layer}.pre_feedforward_layernorm.weight"][0])


def test_a_bug_in_a_norm_is_named(gemma, monkeypatch):
    """A norm that leaves out Gemma's 1 + scale in one layer is named there and nowhere else."""
    folder, theirs = gemma
    mark, right = scale_of(folder, 1), layers.rms_norm

    def wrong(x: Any, scale: Any, eps: float, offset: Any, factor: float) -> Any:
        return right(x, scale, eps, jnp.where(scale.reshape(-1)[0] == mark, 0.0, offset), factor)

    monkeypatch.setattr(layers, "rms_norm", wrong)
    assert different(compare_with_outputs(theirs, open_origin(str(folder)))) == {"layer 1, mlp": EVERYTHING}


def test_a_wrong_order_of_heads_is_named(gemma, tmp_path):
    """Query heads that are shared out over the key heads in turn, not in groups, are named in their layer alone."""
    folder, theirs = gemma
    tensors = tensors_of(folder)
    heads, width = 8, 16
    order = np.arange(heads).reshape(4, 2).T.reshape(-1)  # heads 0, 2, 4, 6 first
    q, o = (f"model.layers.3.self_attn.{name}_proj.weight" for name in ("q", "o"))
    tensors[q] = tensors[q].reshape(heads, width, -1)[order].reshape(tensors[q].shape)
    tensors[o] = np.ascontiguousarray(tensors[o].reshape(-1, heads, width)[:, order].reshape(tensors[o].shape))
    shutil.copytree(folder, tmp_path / "turned")
    save_file(tensors, tmp_path / "turned" / "model.safetensors")
    assert different(compare_with_outputs(theirs, open_origin(str(tmp_path / "turned")))) == {"layer 3, attention": EVERYTHING}


def test_a_bug_in_a_backward_pass_alone_is_named_in_gradients(gemma, monkeypatch):
    """A norm whose custom backward pass is wrong in one layer differs there in gradients, and nowhere in activations."""
    folder, theirs = gemma
    mark, right = scale_of(folder, 2), layers.rms_norm

    @jax.custom_vjp
    def same(x: jax.Array, factor: jax.Array) -> jax.Array:
        return x

    same.defvjp(lambda x, factor: (x, factor), lambda factor, g: (g * factor, jnp.zeros_like(factor)))

    def wrong(x: Any, scale: Any, *numbers: float) -> Any:
        return right(same(x, jnp.where(scale.reshape(-1)[0] == mark, 1.01, 1.0)), scale, *numbers)

    monkeypatch.setattr(layers, "rms_norm", wrong)
    found = compare_with_outputs(theirs, open_origin(str(folder)))
    assert different(found) == {"layer 2, mlp": ["gradients"]} and found.logits < ROUNDING


def test_a_weight_whose_gradient_alone_is_wrong_is_named(gemma, monkeypatch):
    """A projection whose weight gets a wrong gradient in all layers is named in layer 0 first, and by its name."""
    folder, theirs = gemma
    right = layers.dot

    @jax.custom_vjp
    def halved(w: jax.Array) -> jax.Array:
        return w

    halved.defvjp(lambda w: (w, None), lambda _, g: (g / 2,))
    monkeypatch.setattr(layers, "dot", lambda eqn, x, w, n: right(eqn, x, halved(w) if eqn == "BTF,DF->BTD" else w, n))
    found = compare_with_outputs(theirs, open_origin(str(folder)))
    assert different(found) == {f"layer {i}, mlp": ["gradient"] for i in range(4)}
    assert {part.worst for part in found.parts if part.weights > LIMIT} == {f"layers.{i}.mlp.down" for i in range(4)}


def test_a_class_of_its_own_is_compared_by_its_logits(tmp_path, monkeypatch, capsys):
    """Of a model whose class may compute anything, the logits alone are compared, and the command says so."""
    monkeypatch.setenv("JAXTRAIN_REFERENCE_PYTHON", packages.reference())
    folder = hugging_face.write(tmp_path / "theirs", "llama")
    named = "jaxtrain_family=own_families:subclass"
    assert command.main(["import", str(folder), f"--out={tmp_path / 'ours'}", "--set", named]) == 0
    capsys.readouterr()
    assert command.main(["check", str(tmp_path / "ours"), str(folder), f"--json={tmp_path / 'found.json'}"]) == 0
    assert "Subclass" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["parts"] == [] and found["logits"] < ROUNDING
    other = hugging_face.write(tmp_path / "other", "llama", scale=2.0)
    assert command.main(["check", str(tmp_path / "ours"), str(other)]) == 1


def test_other_architectures_are_refused(tmp_path, monkeypatch):
    """A folder with more layers, another width or other norms than the checkpoint is refused, not compared."""
    monkeypatch.setenv("JAXTRAIN_REFERENCE_PYTHON", packages.reference())
    ours = hugging_face.write(tmp_path / "ours", "llama")
    for i, (name, changes) in enumerate([("llama", {"num_hidden_layers": 5}), ("qwen2", {}), ("gemma3", {})]):
        other = hugging_face.write(tmp_path / f"other{i}", name)
        if changes:
            wider = hugging_face.settings(name) | {"vocab_size": 128} | changes
            (other / "config.json").write_text(json.dumps(wider))
        assert command.main(["check", str(ours), str(other)]) == 2
