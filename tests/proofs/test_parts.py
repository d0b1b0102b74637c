"""`hf check` compares a model part by part: with the activations and gradients of the whole model, the parts agree."""

import dataclasses
from pathlib import Path
from typing import Any

import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.config.shapes import STACK
from jaxtrain.hf import parts
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.model import place_model, read_params, segment_positions
from jaxtrain.hf.names import HEAD, PREFIX, model_entries
from jaxtrain.models.module import leaf_names
from jaxtrain.sharding import all_reduce

ROUNDING = 2e-5


def write_whole(source: Any, theirs: Path, tokens_BT: np.ndarray) -> None:
    """Write what torch_reference.py would write, computed by autodiff of the whole model, one row at a time."""
    run = parts.run_on(source, tokens_BT)
    definition, placement = place_model(run)
    params = read_params(source, run, definition, placement, "")
    sections = list(parts.model_sections(run.model, run.loss.chunk))
    shape = (len(sections) - 1, 1, tokens_BT.shape[1], run.model.d_model)

    def local(params: Any, taps: jax.Array, *rows: jax.Array) -> Any:
        def loss(each: list[Any], taps: jax.Array) -> Any:
            x, states = jnp.zeros((1, 1, 1), jnp.float32), []
            for i, (section, own) in enumerate(zip(sections, each, strict=True)):
                one = own[STACK], section.index
                own = {**own, STACK: jax.tree.map(lambda w, at=one[1]: jax.lax.dynamic_slice_in_dim(w, at, 1), one[0])}
                model = definition.bind(own)
                y, shown = section.compute(model, model.share(*rows[1:]), x, rows[0])
                if i < len(taps):
                    x = y + taps[i]
                    states.append(x)
            return y / (tokens_BT.size * placement.mesh.size), (jnp.stack(states), shown)

        (own, dx), (states, logits) = jax.grad(loss, (0, 1), has_aux=True)([params] * len(sections), taps)
        zero = definition.bind(params).ctx.zero
        return (
            [zero.reduce_gradients(tree, definition.axes) for tree in own],
            all_reduce(dx, placement.all_axes),
            states,
            logits,
        )

    specs = definition.specs(placement)
    whole = jax.jit(placement.shard_map(local, (specs, *(P(),) * 4), ([specs] * len(sections), P(), P(), P())))
    made, weights = {"logits": [], "states": [], "cotangents": []}, {}
    known = model_entries(run.model, {} if run.model.tied_head else None)
    for row in range(len(tokens_BT)):
        rows = tokens_BT[row : row + 1], np.ones((1, tokens_BT.shape[1]), np.int32)
        own, dx, states, logits = whole(params, np.zeros(shape, np.float32), *rows, segment_positions(rows[1]))
        for name, array in (("logits", logits), ("states", states[:, 0]), ("cotangents", dx[:, 0])):
            made[name].append(np.asarray(array[0] if name == "logits" else array))
        for section, tree in zip(sections, own, strict=True):
            for name, gradient in zip(jax.tree.leaves(leaf_names(tree)), jax.tree.leaves(tree), strict=True):
                if name.startswith(section.weights):
                    full = name.replace(STACK, f"{STACK}.{section.index}", 1) if name.startswith(f"{STACK}.") else name
                    entry, x = known[PREFIX + full], np.asarray(gradient)
                    if full.startswith("embed") and section is sections[-1]:
                        entry = dataclasses.replace(entry, sources=(HEAD,), copies=())
                    x = x[section.index] if full != name else x
                    weights[entry.hf_names[0]] = weights.get(entry.hf_names[0], 0) + entry.to_hf(x)
    (theirs / "weights").mkdir(parents=True)
    np.save(theirs / "tokens.npy", tokens_BT)
    for name, arrays in made.items():
        np.save(theirs / f"{name}.npy", np.stack(arrays))
    for name, array in weights.items():
        np.save(theirs / "weights" / f"{name}.npy", array)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_parts_agree_with_the_whole_model(tmp_path: Path, name: str):
    """Of tied and other heads. A weight that is changed afterwards is named in its part alone."""
    source = open_origin(str(hugging_face.write(tmp_path / "folder", name)))
    theirs = tmp_path / "theirs"
    write_whole(source, theirs, hugging_face.TOKENS[:, :24])
    found = parts.compare_with_outputs(theirs, source)
    worst = max(max(part.activations, part.gradients, part.weights) for part in found.parts)
    assert worst < ROUNDING and found.logits < ROUNDING and found.first(1e-4) == ""

    file = next((theirs / "weights").glob("*layers.2.self_attn.v_proj*"))
    np.save(file, 1.01 * np.load(file))
    states = np.load(theirs / "cotangents.npy")
    states[:, 3] *= 1.01  # the input of layer 1's feed-forward block
    np.save(theirs / "cotangents.npy", states)
    above = {part.part: [*part.above(1e-4)] for part in parts.compare_with_outputs(theirs, source).parts if part.above(1e-4)}
    assert above.pop("layer 2, attention") == ["gradient of layers.2.attention.wv"]
    assert set(above) == {"layer 1, attention", "layer 1, mlp"} and above["layer 1, mlp"] == ["gradients"]
    assert "activations" not in above["layer 1, attention"]
