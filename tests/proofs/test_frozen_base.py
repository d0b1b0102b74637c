"""A frozen base in 8 or 4 bits: its step, its layouts, and how it is read."""

import dataclasses
import re

import helpers
import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_dpo import begun, step

from jaxtrain.config import schema
from jaxtrain.hf.folder import open_folder
from jaxtrain.hf.frozen_base import base_digest, read_base
from jaxtrain.hf.importing import import_folder, open_origin
from jaxtrain.hf.in_bits import InBits
from jaxtrain.hf.model import abstract_state
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.zero import make_zero
from jaxtrain.sharding import make_placement
from jaxtrain.step.definition import make_definition
from jaxtrain.step.kernel import choose_kernel
from jaxtrain.step.state import abstract_tensors, split_layer

PREFIX = "params."
MODEL = {
    "model.num_layers": 2,
    "model.d_model": 128,
    "model.num_heads": 8,
    "model.head_dim": 32,
    "model.num_kv_heads": 2,
    "model.d_ff": 256,
    "data.seq_len": 32,
    "train.global_batch": 8,
    "optimizer.clip_norm": 0.0,
    "lora.rank": 3,
    "lora.alpha": 6.0,
}
EXPERTS = {
    "model.num_experts": 4,
    "model.experts_per_token": 2,
    "lora.targets": "wq,wk,wv,wo",
    "moe.balance_loss": 0.0,
    "moe.z_loss": 0.0,
}
MODELS = {"nf4": {}, "fp8": {}, "mxfp4": EXPERTS, "nf4 experts": EXPERTS}
# Every way in which a step stores and gathers weights. Each of 4 ranks copies one of 2 key/value heads.
LAYOUTS = {
    "tensor": {"mesh.fsdp": 2, "mesh.tensor": 4, "train.grad_accum": 2},
    "zero 1": {"mesh.fsdp": 4, "sharding.zero": 1, "remat.policy": "none"},
    "zero 2": {"mesh.fsdp": 2, "mesh.seq": 2, "sharding.zero": 2, "parallel.scan_layers": False},
    "stages": {"mesh.stage": 2, "mesh.fsdp": 2, "train.grad_accum": 2},
    "expert": {"mesh.expert": 2, "mesh.fsdp": 2, "mesh.data": 2},
}


def run_of(name, more=None, base=None):
    return helpers.tiny(MODEL | MODELS[name] | {"lora.base": base or name.split()[0]} | (more or {}))


def decoded(run, tensors):
    """Return the tensors with each weight in fewer bits as one array."""
    stored = helpers.program(run).definition.stored
    out = {
        name: x for name, x in tensors.items() if split_layer(name.rpartition(".")[0], 1)[0].removeprefix(PREFIX) not in stored
    }
    weights = {name.removesuffix(".bits"): name for name in tensors if name.endswith(".bits")}
    for weight in weights:
        how = stored[split_layer(weight, 1)[0].removeprefix(PREFIX)]
        out[weight] = np.asarray(
            how.decode({part: jnp.asarray(tensors[f"{weight}.{part}"]) for part in how.abstract}, np.dtype("float32"))
        )
    return out


@pytest.fixture(scope="module", params=helpers.few(MODELS, "nf4", "mxfp4"))
def expected(request):
    """Return the model, its tensors, and loss and gradients of a run with the same weights that are not in fewer bits."""
    run, plain = run_of(request.param), run_of(request.param, base="bf16")
    tensors = begun(run)
    values, grads, _ = step(plain, helpers.host_batch(plain, 0), decoded(run, tensors))
    return request.param, tensors, float(values["loss"]), grads


@pytest.mark.parametrize("layout", helpers.few(LAYOUTS, "tensor"))
def test_the_step_is_that_of_the_decoded_weights(layout, expected):
    """Loss and gradients of adapters are those of the decoded weights, in every layout. The step leaves the bits unchanged."""
    name, tensors, loss, grads = expected
    axes = {key: size for key, size in LAYOUTS[layout].items() if MODELS[name] or key != "mesh.expert"}
    run = run_of(name, axes)
    values, mine, after = step(run, helpers.host_batch(run, 0), tensors)
    assert float(values["loss"]) == pytest.approx(loss, rel=1e-6)
    assert mine.keys() == grads.keys()
    for key in mine:
        np.testing.assert_allclose(mine[key], grads[key], rtol=2e-3, atol=2e-6, err_msg=key)
    frozen = [key for key in after if key.startswith(PREFIX) and not is_adapter(key)]
    assert any(after[key].dtype == np.uint8 for key in frozen)
    for key in frozen:
        np.testing.assert_array_equal(after[key], tensors[key], err_msg=key)


# ---- Reading

OF_DEEPSEEK = {"intermediate_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 16}
FOLDERS = {
    "llama nf4": {"intermediate_size": 128, "head_dim": 16},
    "llama fp8": {},
    "gpt_oss mxfp4": {"intermediate_size": 128},
    "deepseek_v3 nf4": OF_DEEPSEEK,
}
MESHES = {"one": schema.Mesh(data=1, fsdp=1, tensor=1, seq=1), "four": schema.Mesh(data=1, fsdp=2, tensor=2, seq=1)}


def weights_in(origin):
    return {name: a for name, a in origin.stored.items() if name.startswith(PREFIX)}


def values_in(origin):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return origin.read({name: a.update(sharding=here) for name, a in weights_in(origin).items()})


def built(run, mesh):
    """Return (definition, placement, tensors of the base) of a run with adapters on a mesh."""
    run = dataclasses.replace(run, mesh=MESHES[mesh])
    placement = make_placement(run, jax.devices()[: 4 if mesh == "four" else 1])
    kernel, _ = choose_kernel(run, placement.layout.context, jax.devices()[0])
    definition = make_definition(run, make_zero(run.sharding, placement), kernel)
    tensors = abstract_tensors(abstract_state(definition, placement))
    return definition, placement, {k: a for k, a in tensors.items() if k.startswith(PREFIX) and not is_adapter(k)}


@pytest.mark.parametrize("case", helpers.few(FOLDERS, "llama nf4", "gpt_oss mxfp4"))
def test_a_folder_in_fewer_bits(case, tmp_path):
    """An import in bits has the bits that a run makes of the folder, on any mesh. All else reads their values.

    The digest is that of the folder's own weights.
    """
    name, form = case.split()
    mtp = int(name == "deepseek_v3")
    folder = open_folder(hugging_face.write(tmp_path / "theirs", name, sizes=FOLDERS[case], mtp=mtp))
    said = []
    import_folder(folder, tmp_path / "ours", "auto", said.append, InBits(folder, form))
    plain, bits = open_origin(str(tmp_path / "theirs")), open_origin(str(tmp_path / "ours"))
    run = dataclasses.replace(bits.run(), lora=schema.Lora(rank=1, targets="wo", base=form))
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, mtp_layers=0))  # as with adapters
    for mesh in MESHES:
        definition, placement, wanted = built(run, mesh)
        made, kept = (read_base(origin, wanted, definition, placement) for origin in (plain, bits))
        other = built(dataclasses.replace(run, lora=dataclasses.replace(run.lora, base="bf16")), mesh)
        of_values = read_base(bits, other[2], *other[:2])
        assert made.digest == kept.digest == of_values.digest and made.errors and not kept.errors
        assert (
            base_digest(plain, wanted, definition, placement) == base_digest(bits, wanted, definition, placement) == made.digest
        )
        assert made.tensors.keys() == kept.tensors.keys() == wanted.keys()
        for key, x in made.tensors.items():
            np.testing.assert_array_equal(np.asarray(x), np.asarray(kept.tensors[key]), err_msg=key)
            assert x.sharding == kept.tensors[key].sharding == wanted[key].sharding
    assert weights_in(bits) == weights_in(plain)
    values, before = values_in(bits), values_in(plain)
    for key, x in before.items():
        off = np.linalg.norm(np.asarray(values[key]) - np.asarray(x)) / np.linalg.norm(np.asarray(x))
        assert off == pytest.approx(made.errors.get(key, 0.0), rel=1e-3), key  # of experts it is the mean
    printed = [float(x) for line in said for x in re.findall(r"([\d.]+)%", line)]
    assert sorted(printed) == sorted(round(100 * x, 2) for x in made.errors.values()) and all(2 < x < 15 for x in printed)


def test_shipped_mxfp4_keeps_every_value(tmp_path):
    """Experts that a folder has in MXFP4 are stored in it again without an error."""
    folder, _ = hugging_face.write_mxfp4(tmp_path / "theirs", sizes={"intermediate_size": 128})
    origin = open_origin(str(folder))
    run = dataclasses.replace(origin.run(), lora=schema.Lora(rank=1, targets="wo", base="mxfp4"))
    definition, placement, wanted = built(run, "four")
    base = read_base(origin, wanted, definition, placement)
    weights = {name.removesuffix(".bits") for name in wanted if name.endswith(".bits")}
    assert base.errors == dict.fromkeys(weights, 0.0) and len(weights) == 3 * run.model.num_layers
    values = values_in(origin)
    for weight in weights:
        how = definition.stored[split_layer(weight, 1)[0].removeprefix(PREFIX)]
        made = how.decode({part: base.tensors[f"{weight}.{part}"] for part in how.abstract}, jnp.dtype("float32"))
        np.testing.assert_array_equal(np.asarray(made), np.asarray(values[weight], np.float32), err_msg=weight)
