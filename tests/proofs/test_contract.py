"""The contract of families, losses, optimizers and sources: properties that a part needs for correct training.

`./run.sh test --part=model.family=package.module:name` runs all contract tests on your own part, and nothing else. The default
suite tests jaxtrain's own losses, optimizers and sources, one family, and one from outside; a campaign tests all families.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import ledger
import numpy as np
import pytest

from jaxtrain.config import schema
from jaxtrain.config.schema import ConfigError, RunConfig
from jaxtrain.config.shapes import BATCH_KEYS
from jaxtrain.data.batches import open_source
from jaxtrain.models import FAMILIES
from jaxtrain.models.transformer import empty_cache
from jaxtrain.optim.groups import METHODS
from jaxtrain.step.batch import place_batch
from jaxtrain.step.loss import LOSSES, LossSpec, find_loss, token_weight
from jaxtrain.step.program import build_program
from jaxtrain.step.state import abstract_tensors, from_tensors, shardings, to_tensors
from jaxtrain.train import parity
from jaxtrain.train.generation import Sampler

PARTS = {
    "model.family": tuple(FAMILIES),
    "loss.name": tuple(name for name, loss in LOSSES.items() if loss.count is token_weight),  # losses that are sums over tokens
    "optimizer.name": METHODS,
    "data.source": ("synthetic", "stdlib"),
}
# KIND of test_KIND_...
KINDS = {"family": "model.family", "loss": "loss.name", "optimizer": "optimizer.name", "source": "data.source"}
SIZES = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.d_ff": 48,
    # ten times as large as usual: attention scores then differ, so that a wrong mask changes the results
    "model.init_std": 0.2,
    "data.seq_len": 32,
    "data.max_segments": 6,
    "train.global_batch": 4,
    "optimizer.weight_decay": 0.0,
}
# Typical options of jaxtrain's families.
LOCAL = {"model.sliding_window": 12, "model.attention_pattern": "lg"}
OLMO2 = {"model.norm_placement": "post", "model.qk_norm": True, "model.qk_norm_joint": True}
OLMOE = {**OLMO2, "model.num_experts": 8, "model.experts_per_token": 3, "model.renormalize": False}
GRANITE = {"model.embedding_multiplier": 12.0, "model.residual_multiplier": 0.22, "model.logit_multiplier": 1 / 8}
ROUTED = {
    "model.num_layers": 3,
    "model.dense_layers": 1,
    "model.dense_d_ff": 64,
    "model.shared_d_ff": 32,
    "model.num_experts": 8,
    "model.experts_per_token": 3,
    "model.router": "sigmoid",
    "model.router_bias": True,
    "model.routed_scaling": 2.5,
    "model.router_groups": 4,
    "model.groups_per_token": 2,
}
WITH_EXPERTS = {key: value for key, value in ROUTED.items() if "dense" not in key}
LATENT = {"model.kv_lora_rank": 16, "model.q_lora_rank": 24, "model.num_kv_heads": 4}
LATENT |= {"model.qk_nope_head_dim": 12, "model.qk_rope_head_dim": 8, "model.v_head_dim": 10}
USUAL: dict[str, dict[str, Any]] = {
    "mistral": {"model.sliding_window": 12},
    "mixtral": {"model.num_experts": 4},
    "qwen2": {"model.qkv_bias": True},
    "qwen3": {"model.qk_norm": True},
    "qwen3_moe": {"model.qk_norm": True, "model.num_experts": 8, "model.experts_per_token": 3, "model.renormalize": False},
    "gpt_oss": {
        **{f"model.{key}": True for key in ("qkv_bias", "attention_out_bias", "attention_sinks", "router_logit_bias")},
        "model.num_experts": 4,
        "model.expert_bias": True,
        **LOCAL,
        "model.rope_scaling": "yarn",
        "model.rope_original_len": 16,
    },
    "olmo2": OLMO2,
    "olmo3": {**OLMO2, **LOCAL, "model.local_rope_base": 300.0},
    "olmoe": {**OLMOE, "model.norm_placement": "pre"},
    "flex_olmo": OLMOE,
    "exaone4": {"model.norm_placement": "post", "model.qk_norm": True, **LOCAL, "model.attention_pattern": "ln"},
    "smollm3": {"model.attention_pattern": "gn"},
    "cwm": {**LOCAL, "model.attention_pattern": "gl"},
    "granite": GRANITE,
    "granitemoe": {**GRANITE, "model.num_experts": 4},
    "granitemoeshared": {**GRANITE, "model.num_experts": 4, "model.shared_d_ff": 32},
    "vaultgemma": LOCAL,
    "phi3": {"model.partial_rotary_factor": 0.5, "model.sliding_window": 12},
    "glm": {"model.partial_rotary_factor": 0.5, "model.qkv_bias": True},
    "glm4": {"model.partial_rotary_factor": 0.5, "model.norm_placement": "sandwich"},
    "glm4_moe": {"model.partial_rotary_factor": 0.5, "model.qkv_bias": True, "model.qk_norm": True, **ROUTED},
    "seed_oss": {"model.qkv_bias": True, "model.mlp_bias": True, "model.attention_out_bias": True},
    "qwen2_moe": {
        "model.qkv_bias": True,
        "model.num_experts": 8,
        "model.experts_per_token": 3,
        "model.renormalize": False,
        "model.shared_d_ff": 32,
        "model.shared_gate": True,
    },
    "ernie4_5": {"model.tied_head": True},
    "dots1": {"model.qk_norm": True, **ROUTED},
    "minimax_m2": {
        "model.partial_rotary_factor": 0.5,
        "model.qk_norm": True,
        "model.qk_norm_joint": True,
        "model.num_experts": 4,
        "model.router": "sigmoid",
        "model.router_bias": True,
    },
    "ministral": LOCAL,
    "helium": {"model.qkv_bias": True},
    "solar_open": {"model.qkv_bias": True, **WITH_EXPERTS},
    "hyperclovax": {**GRANITE, "model.norm_placement": "sandwich"},
    "glm4_moe_lite": {**LATENT, **ROUTED},
    "youtu": LATENT,
    "gemma2": {"model.norm_placement": "sandwich", **LOCAL},
    "gemma3": {"model.norm_placement": "sandwich", "model.qk_norm": True, **LOCAL},
}
SPLIT = {"mesh.fsdp": 2, "mesh.tensor": 2}
T = SIZES["data.seq_len"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `part`, (key, name), over all parts of the kind in the test's name: family, loss, optimizer or source."""
    if "part" not in metafunc.fixturenames:
        return
    key = KINDS[metafunc.function.__name__.split("_")[1]]
    given = metafunc.config.getoption("part")
    names = PARTS[key]
    if key == "model.family":
        names = (*(names if ledger.is_campaign(metafunc.config) else ("gemma3",)), "own_families:wrapped")
    if given:
        names = [given[1]] if given[0] == key else []
    metafunc.parametrize("part", [(key, name) for name in names], ids=lambda part: part[1])


@pytest.fixture
def run(part: tuple[str, str], request: pytest.FixtureRequest) -> RunConfig:
    """Return a small run with the part, on one device."""
    key, name = part
    sizes = SIZES if key == "model.family" else {**SIZES, "model.num_layers": 1}
    return helpers.tiny({**sizes, **USUAL.get(name, {}), **dict(request.config.getoption("part_config")), key: name})


def on(run: RunConfig, mesh: Mapping[str, int]) -> RunConfig:
    """Return the same run on a mesh."""
    return dataclasses.replace(run, mesh=schema.Mesh(**{"data": 1, "fsdp": 1} | {k[5:]: n for k, n in mesh.items()}))


def far(ours: Any, theirs: Any) -> float:
    """Return the largest difference between the leaves of two trees, relative to the norm of the second tree's leaf."""

    def off(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))

    return max(off(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))


def names_of(tree: Any) -> list[tuple[str, Any]]:
    return [(".".join(str(k.key) for k in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


# ---- Families


@functools.cache
def forward(run: RunConfig) -> Callable[..., Any]:
    definition = helpers.program(run).definition
    return jax.jit(lambda params, *batch: definition.bind(params)(*batch))


@functools.cache
def params_of(run: RunConfig) -> Any:
    return helpers.fresh_state(run).params


def packed() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, segments and positions of one row: documents of 12 and 15 tokens, and padding."""
    tokens = np.random.default_rng(5).integers(0, 256, (1, T)).astype(np.int32)
    segments = np.repeat([1, 2, 0], [12, 15, T - 27]).astype(np.int32)[None]
    positions = np.concatenate([np.arange(12), np.arange(15), np.zeros(T - 27)]).astype(np.int32)[None]
    return tokens, segments, positions


def hidden_of(run: RunConfig, *row: np.ndarray) -> np.ndarray:
    return np.asarray(forward(run)(params_of(run), *row), np.float32)[0]


def test_family_builds(part, run):
    """Parameters have logical axes with rules, and shard over fsdp=2 x tensor=2. Hidden states and head have the config's
    shapes.
    """
    try:
        made = helpers.program(run)
        build_program(on(run, SPLIT), jax.devices()[:4])
    except ConfigError as error:
        pytest.fail(f"axes of parameters have rules, and split over fsdp=2 x tensor=2: {error} (--part-config= sets keys)")

    def shapes(params: Any, *row: Any) -> Any:
        model = made.definition.bind(params)
        return model(*row), model.head_VD

    out, head = jax.eval_shape(shapes, made.definition.abstract, *packed())
    D, V = run.model.d_model, run.model.vocab_size
    assert out.shape == (1, T, D), f"a model returns hidden states (B, T, D), {(1, T, D)}; this one {out.shape}"
    assert head.shape == (V, D), f"head_VD is the output head (V, D), {(V, D)}; this one {head.shape}"
    stacked = "layers" in made.definition.axes or not made.definition.uses_plan_run
    assert stacked, "a model that says uses_plan_run keeps its layers stacked, under the name 'layers'"


def test_family_is_causal(part, run):
    """A change of token t changes no hidden state before t, and changes some from t on."""
    tokens, _, positions = packed()
    ones, positions = np.ones_like(tokens), np.arange(T, dtype=np.int32)[None]
    before, at = hidden_of(run, tokens, ones, positions), 20
    changed = tokens.copy()
    changed[0, at] = (changed[0, at] + 1) % 256
    after = hidden_of(run, changed, ones, positions)
    early = far(after[:at], before[:at])
    assert early < 1e-6, f"attention is causal: a later token changed hidden states before it by {early:.1e}"
    assert far(after[at], before[at]) > 1e-6, "hidden states depend on their own token: changing one changed nothing"
    assert far(after[at + 1 : at + 4], before[at + 1 : at + 4]) > 1e-6, "tokens see those before them: changing one did nothing"


def test_family_keeps_documents_apart(part, run):
    """The second document of a row has the same hidden states as it has alone."""
    tokens, segments, positions = packed()
    together = hidden_of(run, tokens, segments, positions)[12:27]
    alone = [np.roll(x, -12, axis=1) for x in (tokens, segments, positions)]
    for x in alone[1:]:
        x[0, 15:] = 0
    apart = far(together, hidden_of(run, *alone)[:15])
    assert apart < 1e-5, f"documents of a packed row do not see each other: the second is off by {apart:.1e} from being alone"


@functools.cache
def gradients(run: RunConfig) -> tuple[Any, Any]:
    """Return the loss and gradients of one batch on one device."""
    made = helpers.program(run)
    batch = place_batch(helpers.host_batch(run, 0), made.batch, made.context)
    (loss, _), grads = jax.device_get(made.gradients(params_of(run), batch))
    return loss, grads


def test_family_gradients_live(part, run):
    """Every parameter of every layer has a nonzero gradient, and all gradients are finite."""
    loss, grads = gradients(run)
    assert np.isfinite(loss), f"the loss is a number: it is {loss}"
    for name, grad in names_of(grads):
        layers = grad if name.startswith("layers.") else grad[None]
        for i, one in enumerate(layers):
            where = f"{name}, layer {i}" if name.startswith("layers.") else name
            assert np.isfinite(one).all(), f"gradients are finite: that of {where} is not"
            assert one.any(), f"every parameter learns: the gradient of {where} is zero throughout"


KEPT = (
    {"remat.policy": "full", "remat.every": 2},
    {"remat.policy": "dots", "parallel.scan_layers": False},
    {"remat.policy": "attention"},
)


@pytest.mark.parametrize("how", helpers.few(KEPT, KEPT[0]), ids=lambda how: ",".join(f"{k}={v}" for k, v in how.items()))
def test_family_gradients_do_not_depend_on_how_layers_are_run(part, run, how):
    """The gradients are equal for all remat policies, with a loop over layers and without."""
    tree = schema.to_dict(run)
    for key, value in how.items():
        section, name = key.split(".")
        tree[section][name] = value
    other, problems = schema.resolve(tree)
    assert not problems
    off = far(gradients(other), gradients(run))
    assert off < 1e-5, f"loss and gradients are the same with {how}: they are off by {off:.1e}"


@pytest.mark.more
def test_family_takes_the_same_steps_on_any_layout(part, run):
    same_steps(run)


def same_steps(run: RunConfig) -> None:
    """Check that two steps on fsdp=2 x tensor=2 equal those on one device, within the bounds of the parity tests."""
    one, many = (helpers.train(r, 2).taken for r in (run, on(run, SPLIT)))
    found = parity.compare_runs(many, one, parity.bounds(one, None, 1, 1))
    assert not found.violations, (
        f"layouts take the same steps: fsdp=2 x tensor=2 against one device has {'; '.join(found.violations)}"
    )


def test_family_decodes_with_a_cache_what_it_computes_without(part, run):
    definition, placement = helpers.program(run).definition, helpers.program(run).placement
    model = definition.bind(definition.abstract)
    if not (hasattr(model, "decode") and hasattr(model, "logits")):
        pytest.skip("this family has no decode() and logits(): it trains, and cannot write (set sample.max_tokens=0)")
    sampler, n = Sampler(run, placement), 14
    tokens = packed()[0]
    whole = hidden_of(run, tokens, np.ones_like(tokens), np.arange(T, dtype=np.int32)[None])[:n]

    @jax.jit
    def extend(params, cache, new):
        return sampler.definition.bind(params).decode(new, cache)

    cache, parts = empty_cache(run.model, sampler.placement, 1, T, jnp.dtype("float32")), []
    for first, last in ((0, 6), *((i, i + 1) for i in range(6, n))):
        hidden, cache = extend(params_of(run), cache, tokens[:, first:last])
        parts.append(np.asarray(hidden)[0])
    off = far(np.concatenate(parts), whole)
    assert off < 1e-5, f"decoding token by token with the cache gives the hidden states of the whole text: off by {off:.1e}"


# ---- Losses


def loss_inputs(run: RunConfig) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return hidden states, the head and a batch with random weights from 0 to 1, of which about 30% are zero."""
    rng = np.random.default_rng(7)
    B, D, V = run.train.global_batch, run.model.d_model, run.model.vocab_size
    hidden, head = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, T, D), (V, D)))
    batch = dict(helpers.host_batch(run, 0))
    batch["weights"] = (rng.random((B, T)) < 0.7) * rng.random((B, T)).astype(np.float32)
    return hidden, 0.3 * head, batch


@functools.cache
def loss_and_gradients(run: RunConfig) -> Callable[..., Any]:
    """Return jitted `(hidden, head, batch) -> (sum, (gradient of hidden, gradient of the head))` on the run's mesh."""
    zero = helpers.program(run).zero
    spec = LossSpec(zero.numerics, zero.placement, zero, run.loss.chunk, run.model.logit_softcap)
    return helpers.loss_and_gradients(find_loss(run.loss.name).function, spec)


def test_loss_is_a_sum_over_tokens(part, run):
    """The loss is linear in the token weights. The batch's loss is the sum of its microbatches' losses."""
    hidden, head, batch = loss_inputs(run)
    loss, (d_hidden, d_head) = loss_and_gradients(run)(hidden, head, batch)
    assert loss.shape == () and loss.dtype == jnp.float32, f"a loss is one float32 number, not {loss.dtype} {loss.shape}"
    finite = all(np.isfinite(np.asarray(x)).all() for x in (loss, d_hidden, d_head))
    assert finite, "loss and gradients are finite"
    assert np.asarray(d_hidden).any() and np.asarray(d_head).any(), "hidden states and the head have a gradient"
    twice = loss_and_gradients(run)(hidden, head, batch | {"weights": 2 * batch["weights"]})
    off = far(twice, jax.tree.map(lambda x: 2 * x, (loss, (d_hidden, d_head))))
    assert off < 1e-5, f"a loss is the weighted sum over tokens: twice the weights give another sum than twice, by {off:.1e}"
    first = (np.arange(len(hidden)) < len(hidden) // 2)[:, None]
    halves = [loss_and_gradients(run)(hidden, head, batch | {"weights": half * batch["weights"]}) for half in (first, ~first)]
    off = far(jax.tree.map(jnp.add, *halves), (loss, (d_hidden, d_head)))
    assert off < 1e-5, f"the loss of a batch is the sum of its microbatches' losses: off by {off:.1e}"


def test_loss_drops_tokens_of_weight_zero(part, run):
    hidden, head, batch = loss_inputs(run)
    loss, grads = loss_and_gradients(run)(hidden, head, batch)
    dropped = batch["weights"] == 0
    here = np.asarray(grads[0])[dropped]
    assert not here.any(), "a token of weight 0 has no gradient: hidden states of some have one"
    other = batch | {"targets": np.where(dropped, (batch["targets"] + 1) % run.model.vocab_size, batch["targets"])}
    moved = np.where(dropped[..., None], -hidden, hidden)
    off = far(loss_and_gradients(run)(moved, head, other), (loss, grads))
    assert off < 1e-5, f"tokens of weight 0 do not count: other ones in their place change loss or gradients by {off:.1e}"


def test_loss_has_the_gradient_of_its_value(part, run):
    """Gradients match central differences along random directions. The gradient of cross entropy also matches its formula."""
    hidden, head, batch = loss_inputs(run)
    value = loss_and_gradients(run)
    loss, grads = value(hidden, head, batch)
    rng = np.random.default_rng(9)
    for i, what in enumerate(("hidden states", "the head")):
        x = (hidden, head)[i]
        # One half is along the gradient, so that the change is not small beside the loss's own rounding.
        g = np.asarray(grads[i], np.float32)
        noise = rng.standard_normal(x.shape).astype(np.float32)
        along = g / np.linalg.norm(g) + noise / np.linalg.norm(noise)
        step = 0.02 * np.linalg.norm(x) / np.sqrt(x.size)
        moved = ([x + s * step * along if j == i else y for j, y in enumerate((hidden, head))] for s in (1, -1))
        there = [float(value(*given, batch)[0]) for given in moved]
        measured, told = (there[0] - there[1]) / (2 * step), float(np.sum(g * along))
        off = abs(measured - told) / abs(told)
        assert off < 0.01, f"the gradient of {what} is that of the loss: {told:.5g} where the loss changes by {measured:.5g}"
    if run.loss.name != "cross_entropy":
        return

    def formula(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = jnp.einsum("btd,vd->btv", x, w, precision="highest")
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return jnp.sum(batch["weights"] * (jax.nn.logsumexp(logits, -1) - picked))

    assert far((loss, grads), jax.jit(jax.value_and_grad(formula, argnums=(0, 1)))(hidden, head)) < 1e-5


def test_loss_is_the_same_on_any_layout(part, run):
    given = loss_inputs(run)
    off = far(loss_and_gradients(on(run, SPLIT))(*given), loss_and_gradients(run)(*given))
    assert off < 1e-5, f"loss and gradients on fsdp=2 x tensor=2 are those of one device: off by {off:.1e}"


@pytest.mark.more
def test_loss_takes_the_same_steps_on_any_layout(part, run):
    """Within a step, a loss gets the device's shard of the head, and gathers the head."""
    same_steps(run)


# ---- Optimizers


@functools.cache
def update_of(run: RunConfig) -> Callable[..., Any]:
    """Return jitted `(gradients, state, params) -> (updates, state)` on the run's mesh."""
    made = helpers.program(run)
    params, state = shardings(made.state.params), shardings(made.state.optimizer)
    return jax.jit(made.tx.update, in_shardings=(params, state, params), out_shardings=(params, state))


@functools.cache
def random_gradients(run: RunConfig, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32), helpers.program(run).state.params)


def begin(run: RunConfig) -> tuple[Any, Any]:
    """Return the parameters and the optimizer's initial state, which nothing donates."""
    state = helpers.fresh_state(run)
    return state.params, state.optimizer


def test_optimizer_state_is_split_like_the_parameters(part, run):
    try:
        made = helpers.program(on(run, SPLIT))
        abstract_tensors(made.state)
    except ValueError as error:
        pytest.fail(f"the state is made of trees like that of the parameters, in named tuples with names of their own: {error}")
    split = {a.shape for a in jax.tree.leaves(made.state.params) if not a.sharding.is_fully_replicated}
    leaves = jax.tree_util.tree_leaves_with_path(made.state.optimizer)
    whole = [jax.tree_util.keystr(p) for p, a in leaves if a.shape in split and a.sharding.is_fully_replicated]
    assert not whole, (
        f"the state of a parameter is split like it: {', '.join(whole[:3])} would be whole; keep it in trees of "
        "the parameters' structure, in named tuples, as optax's own do"
    )


def test_optimizer_goes_downhill(part, run):
    """The step adds -lr x update, so the first update points along the gradient. Each update has its parameter's shape."""
    grads = random_gradients(run, 0)
    params, state = begin(run)
    updates, _ = update_of(run)(grads, state, params)
    for (name, u), p in zip(names_of(updates), jax.tree.leaves(params), strict=True):
        assert u.shape == p.shape, f"an update has its parameter's shape: {name} has {u.shape}, not {p.shape}"
        assert np.isfinite(np.asarray(u)).all(), f"updates are finite: that of {name} is not"
    along = sum(float(np.sum(np.asarray(u) * g)) for u, g in zip(*map(jax.tree.leaves, (updates, grads)), strict=True))
    assert along > 0, f"the first step goes downhill (it is -lr times the update): update times gradient is {along:.3g}"


def test_optimizer_leaves_weights_that_have_no_gradient(part, run):
    """With weight_decay=0 and zero gradients, the first step changes nothing."""
    params, state = begin(run)
    updates, _ = update_of(run)(jax.tree.map(np.zeros_like, random_gradients(run, 0)), state, params)
    moved = [name for name, u in names_of(updates) if np.asarray(u).any()]
    assert not moved, f"without gradients and weight decay the first step changes nothing: it moves {', '.join(moved[:3])}"


def test_optimizer_resumes_exactly(part, run):
    """After two updates, the state is converted to a checkpoint's tensors and back. The next update is equal, bit for bit."""
    made = helpers.program(run)
    params, state = begin(run)
    for seed in (0, 1):
        _, state = update_of(run)(random_gradients(run, seed), state, params)
    tensors = to_tensors(dataclasses.replace(helpers.fresh_state(run), params=params, optimizer=state))
    restored = from_tensors(made.state, dict(tensors)).optimizer
    last = random_gradients(run, 2)
    ours, theirs = (update_of(run)(last, s, params) for s in (restored, state))
    same = all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True))
    assert same, "a resumed run takes the same steps: after saving and restoring, the next update is another one"


def test_optimizer_is_the_same_on_any_layout(part, run):
    """Equal gradients give equal updates, up to rounding, on one device and on fsdp=2 x tensor=2."""
    many, results = on(run, SPLIT), []
    for one in (run, many):
        params, state = begin(run)
        if one is many:
            made = helpers.program(many).state
            params = jax.device_put(jax.tree.map(np.asarray, params), shardings(made.params))
            state = jax.device_put(jax.tree.map(np.asarray, state), shardings(made.optimizer))
        for seed in (0, 1):
            updates, state = update_of(one)(random_gradients(run, seed), state, params)
        results.append(jax.tree.map(np.asarray, updates))
    off = far(results[1], results[0])
    assert off < 1e-4, f"updates on fsdp=2 x tensor=2 are those of one device: off by {off:.1e}"


# ---- Sources


def opened(run: RunConfig, split: str = "train") -> Any:
    folder = Path(RunConfig().paths.data).expanduser()
    return open_source(run.data, run.data.source, split=split, global_batch=run.train.global_batch, data_dir=folder)


def test_source_gives_the_arrays_of_a_batch(part, run):
    source = opened(run)
    batch = source.batch(3)
    attributes = ("epoch", "synthetic", "masked_fraction", "fingerprint", "bytes_per_token")
    missing = [name for name in attributes if not hasattr(source, name)]
    assert not missing, f"a source has the attributes that a run reads: it lacks {', '.join(missing)}"
    try:
        json.dumps(source.fingerprint)
    except TypeError as error:
        pytest.fail(f"a fingerprint is plain JSON, for receipts: {error}")
    assert set(batch) >= set(BATCH_KEYS), f"a batch has {', '.join(BATCH_KEYS)}: not only {', '.join(batch)}"
    for key, dtype in BATCH_KEYS.items():
        found, shape = batch[key], (run.train.global_batch, T)
        assert found.shape == shape, f"arrays of a batch are (global_batch, seq_len), {shape}: {key} is {found.shape}"
        assert found.dtype == dtype, f"{key} is {dtype}, not {found.dtype}"
    for key in ("tokens", "targets"):
        low, high = int(batch[key].min()), int(batch[key].max())
        assert low >= 0 and high < run.model.vocab_size, (
            f"{key} are ids of the vocabulary, 0 to {run.model.vocab_size - 1}: they reach from {low} to {high}; set "
            "model.vocab_size (--part-config=)"
        )


def test_source_batches_follow_from_the_step(part, run):
    """A step's batch is equal in any order of steps, from a reopened source, and if only some rows are read. So runs resume
    exactly, on any number of hosts.
    """
    source = opened(run)
    first = {step: source.batch(step) for step in (0, 1, 5)}

    def same(found: Any, step: int, what: str, rows: Any = slice(None)) -> None:
        wrong = [k for k in BATCH_KEYS if not np.array_equal(found[k], first[step][k][rows])]
        assert not wrong, f"a batch is a function of its step alone: {', '.join(wrong)} of step {step} differ {what}"

    for step in (5, 0, 1):
        same(source.batch(step), step, "when asked for again, in another order")
    same(opened(run).batch(5), 5, "from a source that is opened anew")
    for rows in (slice(1, 3), np.array([3, 0])):
        same(source.batch(5, rows), 5, f"where only rows {rows} are asked for", rows)
    assert any(not np.array_equal(first[0][k], first[1][k]) for k in BATCH_KEYS), "steps have batches of their own"
    held_out = opened(run, "validation").batch(0)
    assert not np.array_equal(held_out["tokens"], first[0]["tokens"]), "held-out text is not the training text"


def test_source_documents_are_consistent(part, run):
    """Segments, positions, targets and weights describe the same documents."""
    for step in range(4):
        batch = opened(run).batch(step)
        segments, positions, weights = (batch[k] for k in ("segments", "positions", "weights"))
        real, same = segments > 0, segments[:, 1:] == segments[:, :-1]
        assert (segments >= 0).all(), "segments count from 1; 0 is padding"
        counted_up = same | (segments[:, 1:] == segments[:, :-1] + 1) | ~real[:, 1:]
        padded = (real[:, :-1] | ~real[:, 1:]).all() and counted_up.all()
        assert padded, "documents of a row are numbered 1, 2, 3, and its padding is at its end"
        few = segments.max() <= run.data.max_segments or run.data.packing == "none"
        assert few, "a row has at most data.max_segments documents"
        within = real[:, 1:] & same
        starts = np.concatenate([real[:, :1], real[:, 1:] & ~same], axis=1)
        assert not positions[starts].any(), "positions begin at 0 in each document of a row"
        assert (np.diff(positions, axis=1)[within] == 1).all(), "positions go up by 1 within a document"
        assert np.isfinite(weights).all() and (weights >= 0).all(), "weights are finite and not negative"
        assert weights.any(), "a batch has targets: all weights are 0"
        assert not weights[~real].any(), "padding has no targets: its weights are 0"
        if run.data.packing == "documents":
            last = real[:, :-1] & ~same
            assert not weights[:, :-1][last].any(), "the last token of a document has no target in it: its weight is 0"
        counted = within & (weights[:, :-1] > 0)
        shifted = batch["targets"][:, :-1][counted] == batch["tokens"][:, 1:][counted]
        assert shifted.all(), "a target is the token that follows in its document"


def test_source_epochs_go_forward(part, run):
    source = opened(run)
    epochs = [float(source.epoch(step)) for step in (0, 1, 10, 1000)]
    assert epochs[0] == 0 and np.isfinite(epochs).all(), f"epoch(step) is how often the data was seen by then: not {epochs[0]}"
    assert all(a < b for a, b in zip(epochs, epochs[1:], strict=False)), f"epochs go forward with the steps: they are {epochs}"
