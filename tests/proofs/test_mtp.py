"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): definition, documents, experts, names in checkpoints.

tests/matrix.py lists the layouts that train multi-token prediction.
"""

import dataclasses
import functools
import json

import helpers
import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from safetensors.numpy import save_file

from jaxtrain.config import schema
from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import ConfigError
from jaxtrain.config.shapes import BATCH_KEYS, mtp_keys
from jaxtrain.hf import importing
from jaxtrain.hf.folder import open_folder
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.step.batch import mtp_targets, place_batch
from jaxtrain.step.state import abstract_tensors, to_host
from jaxtrain.step.validate import validate_step
from jaxtrain.train import initial_state
from jaxtrain.train.generation import Sampler

MTP = {
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.d_ff": 24,
    "model.init_std": 0.2,
    "train.global_batch": 4,
    "data.seq_len": 32,
    "data.max_segments": 6,
}
EXPERTS = {"model.num_experts": 4, "model.router": "sigmoid", "model.router_bias": True}
T = 32
LENGTHS = (9, 2, 1, 12)  # documents of a row; the rest of the row is padding


def weighted_batch(run):
    """Return rows of documents as short as one token. Targets have fractional weights, some of them zero."""
    rng, rows = np.random.default_rng(1), run.train.global_batch
    tokens = rng.integers(0, run.model.vocab_size, (rows, T + 1)).astype(np.int32)
    segments = np.repeat([*range(1, len(LENGTHS) + 1), 0], [*LENGTHS, T - sum(LENGTHS)]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*LENGTHS, T - sum(LENGTHS))]).astype(np.int32)
    weights = rng.choice([0.0, 0.5, 1.0], (rows, T)).astype(np.float32)
    weights[:, np.append(segments[1:] != segments[:-1], True)] = 0  # targets of documents' last tokens
    weights[:, segments == 0] = 0
    same = {name: np.repeat(x[None], rows, 0) for name, x in (("segments", segments), ("positions", positions))}
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights} | same


# ---- The report's equations, for one document alone, with all logits


def norm(x, scale, eps):
    return x / ((x * x).mean(-1, keepdims=True) + eps) ** 0.5 * scale


def rotated(x_TNH, base):
    half = x_TNH.shape[-1] // 2
    angle = np.arange(len(x_TNH))[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)
    a, b = x_TNH[..., :half], x_TNH[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def block(x_TD, w, m):
    """Return a Llama block's output: causal attention of one document, and SwiGLU."""
    h = norm(x_TD, w["attention_norm"]["scale"], m.norm_eps)
    a = w["attention"]
    q, k, v = (jnp.einsum("TD,DNH->TNH", h, a[name]) for name in ("wq", "wk", "wv"))
    q, k = (rotated(x, m.rope_base) for x in (q, k))
    k, v = (jnp.repeat(x, m.num_heads // m.num_kv_heads, 1) for x in (k, v))
    scores = jnp.einsum("TNH,SNH->NTS", q, k) / np.sqrt(m.head_dim)
    scores = jnp.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    x_TD += jnp.einsum("NTS,SNH,DNH->TD", jax.nn.softmax(scores), v, a["wo"])
    h = norm(x_TD, w["mlp_norm"]["scale"], m.norm_eps)
    return x_TD + (jax.nn.silu(h @ w["mlp"]["gate"]) * (h @ w["mlp"]["up"])) @ w["mlp"]["down"].T


def losses(params, batch, run, given, hidden_TD):
    """Return the weighted sums of cross entropy of the model and of each module in a row, and the sums of weights."""
    m, D = run.model, run.model.mtp_layers
    sums, counts = [0.0] * (D + 1), [0.0] * (D + 1)

    def add(k, h_TD, targets, weights):
        logits = h_TD @ params["head"].T
        log_p = logits[np.arange(len(targets)), targets] - jax.nn.logsumexp(logits, axis=-1)
        sums[k] -= (weights * log_p).sum()
        counts[k] += weights.sum()

    segments = np.asarray(batch["segments"][0])  # the same in every row
    for segment in range(1, len(LENGTHS) + 1):
        at = np.flatnonzero(segments == segment)
        tokens, targets, weights = (given[name][at] for name in ("tokens", "targets", "weights"))
        h_TD = hidden_TD[at]
        add(0, h_TD, targets, weights)
        for k in range(1, min(D, len(at) - 1) + 1):
            w, count = params["mtp"][str(k - 1)], len(at) - k
            embedded = norm(params["embed"]["embedding"][tokens[k:]], w["embed_norm"]["scale"], m.norm_eps)
            before = norm(h_TD[:count], w["hidden_norm"]["scale"], m.norm_eps)
            M_k = jnp.concatenate([w["hidden_proj"], w["embed_proj"]])  # the paper's order
            h_TD = block(jnp.concatenate([before, embedded], -1) @ M_k, w["block"], m)
            h_TD = norm(h_TD, w["norm"]["scale"], m.norm_eps)
            add(k, h_TD, targets[k:], weights[k:])
    return sums, counts


@functools.cache
def stepped():
    """Return a run, its batch, its parameters, and (loss, other sums) and gradients of a step."""
    run = helpers.tiny(MTP | {"model.mtp_layers": 2, "loss.mtp_weight": 0.4})
    made, batch = helpers.program(run), weighted_batch(run)
    params = helpers.start(made).params
    return run, batch, params, made.gradients(params, place_batch(batch, made.batch, made.context))


def test_loss_and_gradients_are_those_of_the_reports_equations():
    """The loss is main + mtp_weight x the mean of the modules' losses. Module k has the mean cross entropy of token i + k + 1,
    within documents.
    """
    run, batch, params, ((loss, sums), gradients) = stepped()
    made = helpers.program(run)

    def objective(params):
        rows = (jnp.asarray(batch[name]) for name in ("tokens", "segments", "positions"))
        hidden = made.definition.bind(params)(*rows)
        of_row = functools.partial(losses, params, batch, run)
        found, counts = jax.tree.map(jnp.sum, jax.vmap(of_row)(batch, hidden))
        main, *of_modules = (s / n for s, n in zip(found, counts, strict=True))
        mtp = sum(of_modules) / 2
        return main + 0.4 * mtp, (main, mtp)

    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
        (_, (main, mtp)), wanted = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    np.testing.assert_allclose((loss, sums["mtp_loss"]), (main, mtp), rtol=2e-6)
    for (path, got), exact in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True):
        scale = np.abs(exact).max()
        assert scale > 0, path
        # Sums of a few hundred float32 terms, in another order.
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))


def test_targets_lie_in_the_document_of_their_input():
    batch = weighted_batch(helpers.tiny(MTP))
    for k in (1, 2):
        made = mtp_targets(batch, k)
        for i in range(T):
            inside = i + k < T and batch["segments"][0, i] == batch["segments"][0, i + k]
            assert (made[f"weights_{k}"][:, i] == (batch["weights"][:, i + k] if inside else 0)).all()
            assert i + k >= T or (made[f"targets_{k}"][:, i] == batch["targets"][:, i + k]).all()


# ---- Off, evaluation, sampling


def test_a_model_without_modules_has_the_same_program():
    """A model without modules has no arrays of modules in batch and parameters. Its step does not depend on loss.mtp_weight."""
    made = helpers.program(helpers.tiny(MTP))
    assert made.batch.keys() == BATCH_KEYS.keys() and "mtp" not in made.state.params
    assert helpers.lowered(helpers.tiny(MTP)) == helpers.lowered(helpers.tiny(MTP | {"loss.mtp_weight": 0.5}))
    assert "mtp" not in helpers.lowered(helpers.tiny(MTP))


def test_evaluation_and_sampling_are_those_of_the_model_alone():
    run, batch, params, _ = stepped()
    plain = helpers.tiny(MTP)
    made, without = helpers.program(run), helpers.program(plain)
    assert made.batch.keys() == BATCH_KEYS.keys() | mtp_keys(2).keys() and made.eval_batch.keys() == BATCH_KEYS.keys()
    of_model = {name: w for name, w in params.items() if name != "mtp"}
    steps = [p.eval_step(w, place_batch(batch, p.eval_batch, p.context)) for p, w in ((made, params), (without, of_model))]
    assert steps[0] == steps[1] and steps[0][2] == {}
    tokens, logits = np.arange(8, dtype=np.int32)[None], []
    for of, p, w in ((run, made, params), (plain, without, of_model)):
        sampler = Sampler(of, p.placement)
        logits.append(jax.jit(sampler.decode)(w, sampler.empty_cache(1, 16), tokens)[0])
    np.testing.assert_array_equal(*logits)


def test_the_routers_of_modules_learn_to_spread_tokens():
    """The biases of the modules' routers move toward balanced loads. The modules count in the metrics and losses of experts."""
    run = helpers.tiny(MTP | EXPERTS | {"model.mtp_layers": 2})
    made = helpers.program(run)
    state = helpers.start(made)
    batch = place_batch(helpers.host_batch(run, 0), made.batch, made.context)
    assert made.trained["mtp"]["0"]["block"]["mlp"]["router_bias"] is False
    (_, sums), gradients = made.gradients(state.params, batch)
    rows = np.asarray(sums["experts"])
    loads_LE = rows[:, -4:]
    assert len(rows) == 1 + 2
    np.testing.assert_allclose(loads_LE.sum(1), 1, rtol=1e-5)
    assert np.abs(gradients["mtp"]["1"]["block"]["mlp"]["router"]).max() > 0
    names = ["layers.0.mlp.router_bias", *(f"mtp.{i}.block.mlp.router_bias" for i in range(2))]
    before = to_host(state, "params.")
    after, values = helpers.train_step(run)(state, batch)
    np.testing.assert_allclose(values["balance_loss"], rows[:, 0].mean(), rtol=1e-6)
    for name, loads in zip(names, loads_LE, strict=True):
        wanted = before[name] + np.float32(run.moe.bias_rate) * np.sign(0.25 - loads)
        np.testing.assert_allclose(to_host(after, "params.")[name], wanted, rtol=1e-6)


# ---- Hugging Face


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a Hugging Face folder with a module, and the folder of its import."""
    theirs, ours, _ = hugging_face.imported(tmp_path_factory.mktemp("mtp"), "deepseek_v3", mtp=1)
    return theirs, ours


def test_a_checkpoint_with_a_module_goes_there_and_back(folders, tmp_path):
    """After import and export, every tensor has DeepSeek-V3's name and the same bits. Embedding and head occur a second time in
    the module.
    """
    folder, ours = folders
    assert json.loads((ours / "config.json").read_text())["model"]["mtp_layers"] == 1
    hugging_face.exported(ours, tmp_path / "back")
    theirs, back = (hugging_face.tensors_of(place) for place in (folder, tmp_path / "back"))
    last = f"model.layers.{open_folder(folder).model.num_layers}."
    of_module = {name.removeprefix(last) for name in theirs if name.startswith(last)}
    assert of_module >= {
        *("enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight"),
        *("shared_head.norm.weight", "shared_head.head.weight"),
        *("self_attn.kv_b_proj.weight", "mlp.gate.e_score_correction_bias", "mlp.experts.3.up_proj.weight"),
    }
    assert back.keys() == theirs.keys() and all(np.array_equal(back[name], theirs[name]) for name in theirs)
    np.testing.assert_array_equal(back[f"{last}shared_head.head.weight"], back["lm_head.weight"])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_module_of_a_checkpoint_computes_by_its_own_names(folders):
    """The module's projection, as published, multiplies the embedding's half first: eh_proj
    [enorm(embedding); hnorm(hidden)].
    """
    folder, ours = folders
    model = open_folder(folder).model
    last = f"model.layers.{model.num_layers}."
    theirs = {k.removeprefix(last): a for k, a in hugging_face.tensors_of(folder).items() if k.startswith(last)}
    made = helpers.program(helpers.tiny({f"model.{key}": value for key, value in dataclasses.asdict(model).items()}))
    stored = importing.open_origin(str(ours)).read({k: a for k, a in abstract_tensors(made.state).items() if "params.mtp" in k})
    w = {name.removeprefix("params.mtp.0."): np.asarray(a) for name, a in stored.items()}
    np.testing.assert_array_equal(np.concatenate([w["embed_proj"], w["hidden_proj"]]), theirs["eh_proj.weight"].T)
    for name, other in {"embed_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}.items():
        np.testing.assert_array_equal(w[f"{name}.scale"], theirs[f"{other}.weight"])


def test_a_module_with_a_head_of_its_own_is_refused(tmp_path):
    folder = hugging_face.write(tmp_path / "theirs", "deepseek_v3", mtp=1)
    tensors = hugging_face.tensors_of(folder)
    name = next(name for name in tensors if name.endswith("shared_head.head.weight"))
    save_file(tensors | {name: tensors[name] + 1}, folder / "model.safetensors")
    with pytest.raises(HuggingFaceError, match=name):
        importing.import_folder(open_folder(folder), tmp_path / "ours", "auto", lambda line: None)
    assert not (tmp_path / "ours").exists()


def test_a_model_without_modules_starts_from_weights_with_one(folders):
    """Adapters and preference pairs are trained without modules. A model with modules needs weights that contain them."""
    ours = folders[1]
    of = importing.open_origin(str(ours)).run()
    tree = dict(schema.flatten(schema.to_dict(dataclasses.replace(of, data=helpers.tiny().data))))
    tree |= {"init.from": str(ours), "mesh.data": 1, "mesh.fsdp": 1, "train.global_batch": 4, "data.seq_len": 32}
    run, more = (helpers.tiny(tree | {"model.mtp_layers": n}) for n in (0, 2))
    assert any("model.mtp_layers" in note for note in initial_state.check_init_source(helpers.program(run), str(ours)))
    with pytest.raises(ConfigError, match="params.mtp.1"):
        initial_state.check_init_source(helpers.program(more), str(ours))


# ---- Refusals, FLOPs


@pytest.mark.parametrize(
    "change",
    [
        {"loss.name": "dpo"},
        {"lora.rank": 4, "lora.targets": "wq"},
        {"mesh.stage": 2, "train.grad_accum": 2},
        {"model.attention_pattern": "lg", "model.sliding_window": 8},
        {"model.family": "helpers:WiderFamily"},
        {"model.mtp_layers": 64},  # as long as a sequence
        {"model.mtp_layers": 0, "loss.mtp_weight": 0.1},
    ],
    ids=",".join,
)
def test_what_does_not_combine_is_refused(change):
    run = helpers.tiny({"model.mtp_layers": 1} | change)
    problems = validate_step(run, Devices("cpu", "cpu", 2 if "mesh.stage" in change else 1, 8.0, "here"))
    assert ("loss.mtp_weight" if "loss.mtp_weight" in change else "model.mtp_layers") in {p.key for p in problems}


LLAMA = (
    *("model.num_layers=2", "model.d_model=1024", "model.num_heads=8", "model.num_kv_heads=8", "model.head_dim=128"),
    *("model.d_ff=2048", "model.vocab_size=4096", "data.seq_len=2048", "train.global_batch=4", "train.grad_accum=1"),
    *("mesh.fsdp=1", "remat.policy=full", "model.mtp_layers=1"),
)


def test_a_step_on_h200s_computes_what_the_formula_says():
    made = plans.plan("h200:1", *LLAMA, of=plans.LLAMA)
    assert made.flops.hardware_per_step == pytest.approx(made.flops.expected_per_step, rel=0.01)
