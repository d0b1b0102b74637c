"""Frozen parameters keep their bits: the step has no gradients, no moments and no communication of gradients for them."""

import dataclasses
import math
import re

import helpers
import jax
import numpy as np
import pytest

from jaxtrain import flops

SMALL = {"model.num_layers": 2, "model.num_kv_heads": 2, "train.global_batch": 8, "optimizer.weight_decay": 0.5}
PATTERNS = "embed.*,layers.mlp.*,layers.attention.wk,head"
FROZEN = re.compile(r"params\.(embed\.|layers\.\d\.mlp\.|layers\.\d\.attention\.wk|head)")
# Every way in which a step stores weights and accumulates gradients. Each of 4 ranks copies one of 2 key/value heads.
LAYOUTS = {
    "loop, last layer apart": {"mesh.fsdp": 2, "mesh.tensor": 4, "train.grad_accum": 2},
    "unrolled, added by layer": {"mesh.data": 2, "mesh.fsdp": 2, "train.grad_accum": 2, "parallel.scan_layers": False},
    "gathered once, moments on the host": {"mesh.fsdp": 2, "mesh.seq": 2, "sharding.zero": 1, "optimizer.offload": "moments"},
}
CLIP = {"optimizer.clip_norm": 0.0}  # the norm covers trained parameters alone, so clipping would use another factor


def frozen(names):
    return {name for name in names if FROZEN.match(name)}


@pytest.mark.more
def test_the_rest_goes_as_it_would():
    """After one step, the first moments of all other parameters, and so their gradients, are those of a run without frozen
    parameters.
    """
    one, other = (helpers.train(helpers.tiny(SMALL | CLIP | more), 1).tensors for more in ({}, {"train.freeze": PATTERNS}))
    moments = [name for name in other if name.startswith("optimizer.mu.")]
    assert len(moments) == len([name for name in one if name.startswith("optimizer.mu.")]) - (2 + 2 * 4)
    for name in moments:
        np.testing.assert_allclose(other[name], one[name], rtol=1e-5, atol=1e-8, err_msg=name)


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=() if x.startswith("unrolled") else pytest.mark.more) for x in LAYOUTS]
)
def test_what_is_frozen_stays_on_every_layout(layout):
    run = helpers.tiny(SMALL | CLIP | LAYOUTS[layout] | {"train.freeze": PATTERNS})
    before, after = helpers.initial_tensors(run), helpers.train(run, 1).tensors
    still = {name for name in before if FROZEN.match(name)}
    assert {name for name in before if name.startswith("params.") and np.array_equal(before[name], after[name])} == still
    assert len(still) == 2 + 2 * 4
    one = helpers.train(helpers.tiny(SMALL | CLIP | {"train.freeze": PATTERNS}), 1).tensors
    assert one.keys() == after.keys()
    for name in after:
        if name.startswith("optimizer.mu."):
            np.testing.assert_allclose(after[name], one[name], rtol=2e-4, atol=1e-6, err_msg=name)


def dots(run):
    """Return the numbers of matmuls, of elements in all-reduces and reduce-scatters, and of scatters in the compiled step."""
    text = helpers.train_step(run).as_text()
    assert text is not None
    summed = re.findall(r"= ([^=]*) (?:all-reduce|reduce-scatter)(?:-start)?\(", text)
    numbers = sum(
        math.prod(map(int, filter(None, dims.split(",")))) for made in summed for dims in re.findall(r"\[([\d,]*)\]", made)
    )
    return len(re.findall(r" dot\(", text)), numbers, len(re.findall(r" scatter\(", text))


def size(run, pattern):
    tensors = helpers.initial_tensors(run)
    return sum(a.size for name, a in tensors.items() if re.fullmatch(r"params\." + pattern, name))


@pytest.mark.more
def test_nothing_is_computed_for_what_is_frozen():
    """With unrolled layers, a frozen weight saves the matmul of its gradient, and the sum of this gradient over devices."""
    layout = {"mesh.fsdp": 2, "parallel.scan_layers": False, "remat.policy": "full"}
    everything = helpers.tiny(SMALL | layout)
    less = helpers.tiny(SMALL | layout | {"train.freeze": "layers.attention.w*,layers.mlp.*,head"})
    most = helpers.tiny(SMALL | layout | {"train.freeze": "embed.*,layers.attention.*,layers.mlp.*,head,final_norm.*"})
    a, b, c = (dots(run) for run in (everything, less, most))
    assert a[0] - b[0] == 7 * 2 + 1, "products of frozen weights' gradients are computed"
    weights = size(everything, r"layers\.\d\.(attention\.w.|mlp\..*)|head")
    assert a[1] - b[1] >= weights // 2, "gradients of frozen weights are summed over devices"
    assert b[1] < size(everything, r"embed\..*"), "so is one of what is left: the embedding's needs no sum, norms are small"
    assert (a[2], b[2], c[2]) == (1, 1, 0), "the embedding's gradient is computed"
    assert b[1] - c[1] >= size(everything, r"final_norm\.scale") // 2, "that of the last norm is summed over devices"


def test_a_frozen_run_holds_no_gradient_and_no_moment_of_a_frozen_weight():
    run = helpers.tiny(SMALL | {"train.freeze": PATTERNS})
    made = helpers.program(run)
    learnt = sum(a.size for a, t in zip(*map(jax.tree.leaves, (made.state.params, made.trained)), strict=True) if t)
    held = sum(a.size for a in jax.tree.leaves(made.state.optimizer))
    assert held == 2 * learnt + 1, "two moments of each trained weight, and the count"


def test_only_the_head_needs_no_backward_pass_of_the_layers():
    run = helpers.tiny(SMALL | {"train.freeze": "embed.*,layers.*,final_norm.*", "parallel.scan_layers": False})
    # Without gradients the layers are a loop: one layer's weights and attention, the logits, and the head's gradient.
    assert dots(run)[0] == 7 + 2 + 1 + 1


def test_flops_count_what_is_trained():
    run = helpers.tiny(SMALL)
    m, seq = run.model, run.data.seq_len
    full, forward = flops.per_token(m, seq), flops.forward(m, seq)
    assert flops.training(run) == full

    def frozen(patterns):
        return flops.training(dataclasses.replace(run, train=dataclasses.replace(run.train, freeze=patterns)))

    head = 2 * m.d_model * m.vocab_size
    assert full.causal - frozen("head").causal == head
    assert full.causal - frozen("layers.mlp.*").causal == 2 * 6 * m.d_model * m.d_ff
    assert frozen("embed.*,layers.*").causal == forward.causal + 2 * head
    assert frozen("embed.*,layers.*,final_norm.*").causal == forward.causal + head
