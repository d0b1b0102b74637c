"""A frozen base in 8 or 4 bits: its step, its layouts, and how it is read."""

import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from test_dpo import begun, step

from jaxtrain.models.lora import is_adapter
from jaxtrain.step.state import split_layer

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
    out = {name: x for name, x in tensors.items() if split_layer(name.rpartition(".")[0])[0].removeprefix(PREFIX) not in stored}
    weights = {name.removesuffix(".bits"): name for name in tensors if name.endswith(".bits")}
    for weight in weights:
        how = stored[split_layer(weight)[0].removeprefix(PREFIX)]
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
    if layout == "expert" and not MODELS[name]:
        pytest.skip("a model without experts")
    run = run_of(name, LAYOUTS[layout])
    values, mine, after = step(run, helpers.host_batch(run, 0), tensors)
    assert float(values["loss"]) == pytest.approx(loss, rel=1e-6)
    assert mine.keys() == grads.keys()
    for key in mine:
        np.testing.assert_allclose(mine[key], grads[key], rtol=2e-3, atol=2e-6, err_msg=key)
    frozen = [key for key in after if key.startswith(PREFIX) and not is_adapter(key)]
    assert any(after[key].dtype == np.uint8 for key in frozen)
    for key in frozen:
        np.testing.assert_array_equal(after[key], tensors[key], err_msg=key)
