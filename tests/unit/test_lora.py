"""Low-rank adapters: their initial values, their merge into weights, their base's digest, and their PEFT form."""

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import helpers
import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saved
from safetensors.numpy import load_file, save_file

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config import schema
from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import Lora, to_dict
from jaxtrain.data import loading
from jaxtrain.hf import lora, peft
from jaxtrain.models import flops, presets
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.lora import is_adapter, uniform
from jaxtrain.step import resume, validate
from jaxtrain.step.state import abstract_tensors

PREFIX, RANK, ALPHA = "params.", 3, 6.0
MODEL = {"model.num_layers": 2, "model.d_model": 32, "model.num_heads": 4, "model.num_kv_heads": 2, "model.d_ff": 48}
LORA = {"lora.rank": RANK, "lora.alpha": ALPHA}
# The axes of our weights, inputs and outputs, written down independently.
DELTA = {
    **dict.fromkeys(("wq", "wk", "wv"), "DR,RNH->DNH"),
    "wo": "NHR,RD->DNH",
    "gate": "DR,RF->DF",
    "up": "DR,RF->DF",
    "down": "FR,RD->DF",
}


@pytest.fixture(scope="module")
def tensors():
    """Return random weights and adapters of a model."""
    shapes = abstract_tensors(helpers.program(helpers.tiny(MODEL | LORA)).state)
    rng = np.random.default_rng(0)
    return {k: rng.normal(0, 0.05, a.shape).astype(np.float32) for k, a in shapes.items() if k.startswith(PREFIX)}


def test_adapters_begin_as_pefts_do():
    x = uniform(400)(jax.random.key(0), (400, 30), jnp.float32)
    assert 0.95 / 20 < np.abs(x).max() <= 1 / 20
    assert abs(x.mean()) < 0.01 / 20


def test_adapters_stand_beside_the_base_they_were_trained_with(monkeypatch):
    """The base is read from the path that training used, unless it is gone or another path is given. Adapters are no base."""
    meta = {"step": 7, "config": {"init": {"from": "there"}}, "base": {"path": "/there/checkpoints/4", "digest": "abc"}}
    origins = {"there": False, "moved": False, "adapters": True}

    def resumed(init_from: str, base: str = "", gone: bool = False) -> str:
        known = origins if gone else origins | {"/there/checkpoints/4": False}
        opened = {name: SimpleNamespace(adapters=adapters) for name, adapters in known.items()}
        monkeypatch.setattr(lora, "try_open", opened.get)
        return lora.base_on_resume(meta, schema.Init(init_from, base))

    assert lora.base_path(meta) == resumed("there") == resumed("") == resumed("adapters") == "/there/checkpoints/4"
    assert resumed("moved") == resumed("there", "moved") == resumed("adapters", "moved") == "moved"
    assert resumed("there", gone=True) == "there", "the whole folder was moved"
    assert resumed("nowhere") == "nowhere", "a wrong path is not ignored"
    lora.check_base_digest(meta, "moved", "abc")
    with pytest.raises(CheckpointError):
        lora.check_base_digest(meta, "moved", "abd")
    with pytest.raises(CheckpointError):
        lora.base_path(meta | {"base": None})


def test_merged_gives_the_weights_one_by_one(tensors):
    found = dict(lora.merge_adapters(tensors, ALPHA / RANK))
    assert found.keys() == {k for k in tensors if not is_adapter(k)}
    for name, x in found.items():
        module, _, weight = name.rpartition(".")
        want = tensors[name]
        if weight in DELTA:
            a, b = (tensors[f"{module}.lora.{weight}_{half}"] for half in "ab")
            want = want + ALPHA / RANK * np.einsum(DELTA[weight], a, b)
        np.testing.assert_allclose(x, want, rtol=1e-6, atol=1e-7, err_msg=name)
    half = {k: v for k, v in tensors.items() if not k.endswith("1.mlp.lora.up_b")}
    with pytest.raises(ValueError, match=r"params.layers.1.mlp.up.*up_b"):
        dict(lora.merge_adapters(half, 1.0))
    with pytest.raises(ValueError, match=r"params.layers.0.mlp.lora.gate_a"):
        dict(lora.merge_adapters({k: v for k, v in tensors.items() if k != "params.layers.0.mlp.gate"}, 1.0))


def test_the_base_rests_in_the_compute_dtype_and_adapters_do_not():
    made = helpers.program(helpers.tiny(MODEL | LORA | {"precision": "bf16"}))
    kinds = {
        name.rpartition(".")[2][-2:]: a.dtype for name, a in abstract_tensors(made.state).items() if name.startswith(PREFIX)
    }
    assert kinds["_a"] == kinds["_b"] == jnp.float32
    assert kinds["wq"] == kinds["ad"] == jnp.bfloat16


def test_flops_are_those_of_two_passes():
    run = helpers.tiny(MODEL | LORA)
    m = run.model
    D, F, N, K = m.d_model, m.d_ff, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    linear = 2 * m.num_layers * (2 * D * N + 2 * D * K + 3 * D * F) + 2 * D * m.vocab_size
    adapters = 2 * m.num_layers * RANK * (2 * (D + N) + 2 * (D + K) + 3 * (D + F))
    attention = flops.attention(m, run.data.seq_len).causal * m.num_layers
    assert helpers.training_flops(run).causal == 2 * linear + 3 * attention + 3 * adapters


def adapted(settings: dict[str, object]) -> set[str]:
    """Return the names of the weights that have an adapter in the program of a run."""
    names = abstract_tensors(helpers.program(helpers.tiny(settings)).state)
    return {name.rpartition(".")[2].removesuffix("_a") for name in names if is_adapter(name) and name.endswith("_a")}


EXPERTS = {"model.num_experts": 4, "model.experts_per_token": 2}
LATENT = {"model.kv_lora_rank": 16, "model.q_lora_rank": 16, "model.num_kv_heads": 4, "model.head_dim": 0}
LATENT |= {"model.qk_nope_head_dim": 8, "model.qk_rope_head_dim": 8, "model.v_head_dim": 8, "model.family": "deepseek_v3"}
LATENT |= {"model.router": "sigmoid", "model.router_bias": True, "model.shared_d_ff": 32} | EXPERTS
LATENT |= {"model.dense_layers": 1, "model.dense_d_ff": 64}

HYBRID = {"model.family": "qwen3_next", "model.attention_pattern": "dg", "model.attention_gate": True, "lora.experts": "none"}
HYBRID |= {"model.linear_key_heads": 2, "model.linear_value_heads": 4, "model.linear_key_dim": 8, "model.linear_value_dim": 8}
HYBRID |= {"model.linear_conv": 4, "model.shared_d_ff": 32, "model.shared_gate": True} | EXPERTS


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, "wq wk wv wo gate up down"),
        (EXPERTS, "wq wk wv wo gate up down"),
        (EXPERTS | {"lora.experts": "none"}, "wq wk wv wo"),
        (LATENT, "wq_down wq_up wkv_down wkv_up wo gate up down"),
        (LATENT | {"model.q_lora_rank": 0, "lora.experts": "none"}, "wq wkv_down wkv_up wo gate up down"),
        (HYBRID, "wq wk wv wg wo gate up down"),
    ],
)
def test_a_rank_alone_adapts_all_matrices_that_can_be(settings, weights):
    assert adapted(MODEL | LORA | settings) == {*weights.split()}


TARGETS = ("wq,wk,wv,wo,gate,up,down", "gate,wo", "gate", "wq_up", "wqq,wo", "q_proj")


@pytest.mark.parametrize("name", presets())
def test_adapters_of_every_preset(name):
    """A rank is enough. Of names that the model does not have, one problem names others, and they are accepted."""

    def problems(**lora: object):
        made = schema.default_config()
        made.model.update(presets()[name])
        made.lora.update({"rank": 8, **lora})
        return validate.validate_step(schema.resolve(made)[0], Devices("cpu", "cpu", 1, 1e6, "test"))

    assert problems() == problems(rslora=True) == []
    more = [{"experts": experts} for experts in ("each", "shared", "none") if presets()[name].get("num_experts")]
    assert not any(problems(**one) for one in more)
    for targets, one in itertools.product(TARGETS, more or [{}]):
        one = one | {"targets": targets}
        for _ in range(2):  # shared adapters of experts may be unused by the targets that the first remedy names
            for problem in (found := problems(**one)):
                fix = re.match(r"Set ('[^']*'|[\w,]+)", problem.remedy)
                assert len(found) == 1 and problem.key in ("lora.targets", "lora.experts") and fix
                one |= {problem.key.removeprefix("lora."): fix[1].strip("',")}
        assert problems(**one) == []


def test_adapters_of_an_older_version_go_on():
    """It stored a list of all weights, with a rank of 0 too. The list of a model without experts is that of today."""
    seven = "wq,wk,wv,wo,gate,up,down"
    for settings in (MODEL | LORA, MODEL, MODEL | EXPERTS):
        now = to_dict(helpers.tiny(settings))
        old = now | {"lora": now["lora"] | {"targets": seven}}
        assert resume.compare_configs(old, now) == ([], [])


def test_the_digest_is_of_every_number_and_of_nothing_else():
    x = {"w": jnp.arange(24.0).reshape(4, 6), "layers": {"v": jnp.ones((2, 3))}}
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    split = jax.device_put(x["w"], jax.NamedSharding(mesh, jax.P("a", "b")))
    assert lora.digest(x) == lora.digest(x | {"w": split}) == lora.digest(x | {"w": x["w"].astype(jnp.bfloat16)})
    others = (x["w"].at[2, 3].add(1), x["w"][::-1], x["w"].reshape(6, 4), -x["w"])
    found = {lora.digest(x), *(lora.digest(x | {"w": w}) for w in others), lora.digest({"u": x["w"], "layers": x["layers"]})}
    assert len(found) == 2 + len(others)


def test_the_config_for_finetuning(tmp_path):
    """All variants of configs/finetune.py are valid runs."""
    (tmp_path / "large").mkdir()
    described = hugging_face.settings("llama2", 4) | {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    described |= {"num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128, "num_key_value_heads": 8}
    (tmp_path / "large" / "config.json").write_text(json.dumps(described))
    run = tmp_path / "run"
    saved.write_step(run / "checkpoints", 4, config=to_dict(helpers.tiny()))
    (tmp_path / "small").mkdir()
    small = hugging_face.settings("llama2", 4) | {"max_position_embeddings": 131072}
    (tmp_path / "small" / "config.json").write_text(json.dumps(small))
    large = f"base={tmp_path / 'large'}"
    lengths = {f"base={run}": helpers.tiny().data.seq_len, f"base={tmp_path / 'small'}": 512}
    machines = {f"{large},lora=16": 8, large: 8, f"{large},lora=16,frozen=fp8,gpus=1": 1}
    machines |= {f"model={name},lora=16,frozen=nf4,gpus={n}": n for name, n in (("llama3.1_70b", 1), ("gpt_oss_120b", 8))}
    for arg, devices in {**dict.fromkeys(lengths, 1), **machines}.items():
        loaded = loading.load_config([f"--config=configs/finetune.py:{arg}"])
        assert not loaded.problems
        assert loaded.run.data.seq_len == lengths.get(arg, loaded.run.data.seq_len)
        assert not validate.validate_step(loaded.run, Devices("gpu", "NVIDIA H200", devices, 139.8, "test", 90, 8))
        assert arg not in machines or loaded.run.train.global_batch == 32
        assert loaded.run.lora.base == (re.search(r"frozen=(\w+)", arg) or ["", "bf16"])[1]
    for arg in ("", ":base=nothere", ":model=llama3.1_8b", f":{large},model=llama3.1_8b,lora=16"):
        (problem,) = loading.load_config([f"--config=configs/finetune.py{arg}"]).problems
        assert "base" in str(problem)
    (problem,) = loading.load_config(["--config=configs/finetune.py:model=llama31_8b,lora=16"]).problems
    assert "llama3.1_8b" in problem.remedy
    run = loading.load_config([f"--config=configs/finetune.py:{large},frozen=nf4"]).run
    (problem,) = validate.validate_step(run, Devices("gpu", "NVIDIA H200", 8, 139.8, "test", 90, 8))
    assert problem.key == "lora.base"


# ---- PEFT


MODEL_CONFIG = helpers.tiny(MODEL).model
HOW = Lora(RANK, ALPHA, targets=",".join(DELTA))


def ours(tensors):
    return {k: v for k, v in tensors.items() if is_adapter(k)}


def _written(tensors, folder, more):
    peft.write_adapter(folder, ours(tensors), MODEL_CONFIG, HOW, "the base")
    path = folder / peft.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


def test_to_peft_and_back(tensors, tmp_path):
    adapters, folder = ours(tensors), tmp_path / "peft"
    written = peft.write_adapter(folder, adapters, MODEL_CONFIG, HOW, "the base")
    assert len(written) == len(adapters)
    theirs = load_file(folder / peft.TENSORS)
    q = "base_model.model.model.layers.1.self_attn."
    assert theirs[q + "q_proj.lora_A.weight"].shape == (RANK, 32)
    assert theirs[q + "k_proj.lora_B.weight"].shape == (2 * 8, RANK)
    # A linear layer of PEFT computes x A' B'; the outputs of one head are adjacent.
    x = np.random.default_rng(0).normal(size=32)
    wq_a, wq_b = (adapters[f"params.layers.1.attention.lora.wq_{half}"] for half in "ab")
    mine = np.einsum("D,DR,RNH->NH", x, wq_a, wq_b)
    wide = theirs[q + "q_proj.lora_B.weight"] @ (theirs[q + "q_proj.lora_A.weight"] @ x)
    np.testing.assert_allclose(wide, mine.reshape(-1), rtol=1e-5, atol=1e-7)
    assert json.loads((folder / peft.CONFIG).read_text())["base_model_name_or_path"] == "the base"
    settings, back, notes = peft.read_adapter(folder, MODEL_CONFIG)
    assert (settings.rank, settings.alpha, set(settings.targets.split(","))) == (RANK, ALPHA, set(DELTA)) and not notes
    assert back.keys() == adapters.keys()
    assert all(np.array_equal(back[k], adapters[k]) for k in adapters)
    with pytest.raises(HuggingFaceError, match=str(folder)):
        peft.write_adapter(folder, adapters, MODEL_CONFIG, HOW, "")


FUSED = {"qkv_proj": ("wq", "wk", "wv"), "gate_up_proj": ("gate", "up")}


@pytest.mark.parametrize("targets", ["wq,wk,wv,wo,gate,up,down", "wq,wv,up"])
def test_weights_of_one_module_in_peft(tensors, targets, tmp_path):
    """In Phi-3, queries, keys and values are one module of PEFT. Its delta is ours, zero for weights without adapters."""
    model = dataclasses.replace(MODEL_CONFIG, family="phi3")
    how = dataclasses.replace(HOW, targets=targets)
    mine = {name: x for name, x in ours(tensors).items() if peft.weight_of(name) in targets.split(",")}
    peft.write_adapter(tmp_path, mine, model, how, "")
    settings, theirs = json.loads((tmp_path / peft.CONFIG).read_text()), load_file(tmp_path / peft.TENSORS)
    for module, weights in FUSED.items():
        (key,) = (key for key in settings["rank_pattern"] if re.fullmatch(rf"(.*\.)?({key})", f"model.layers.1.x.{module}"))
        scale = settings["alpha_pattern"][key] / settings["rank_pattern"][key]
        of_layer, inner = ("self_attn", "attention") if "wq" in weights else ("mlp", "mlp")
        a, b = (theirs[f"base_model.model.model.layers.1.{of_layer}.{module}.lora_{half}.weight"] for half in "AB")
        wanted = []
        for weight in weights:
            own_a, own_b = (tensors[f"params.layers.1.{inner}.lora.{weight}_{half}"] for half in "ab")
            adapted = weight in targets.split(",")
            wanted.append(adapted * ALPHA / RANK * np.einsum(DELTA[weight], own_a, own_b).reshape(32, -1).T)
        np.testing.assert_allclose(scale * b @ a, np.concatenate(wanted), rtol=1e-4, atol=1e-7)
    back, found, _ = peft.read_adapter(tmp_path, model)
    assert set(back.targets.split(",")) == set(targets.split(",")) and found.keys() == mine.keys()
    assert all(np.array_equal(found[name], mine[name]) for name in mine)
    theirs[next(name for name in theirs if "qkv_proj.lora_B" in name)][:] = 1
    save_file(theirs, tmp_path / peft.TENSORS)
    with pytest.raises(HuggingFaceError, match="lora_B|wq"):
        peft.read_adapter(tmp_path, model)


def test_pefts_own_adapter_of_several_weights(tmp_path):
    """It has one A for all of them, and outputs of each. Only a rank of an export or this one is read."""
    model = dataclasses.replace(MODEL_CONFIG, family="phi3")
    rng, tensors = np.random.default_rng(0), {}
    for i in range(2):
        name = f"base_model.model.model.layers.{i}.self_attn.qkv_proj"
        tensors[f"{name}.lora_A.weight"] = rng.normal(size=(RANK, 32)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.normal(size=(64, RANK)).astype(np.float32)
    save_file(tensors, tmp_path / peft.TENSORS)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["qkv_proj"]}
    (tmp_path / peft.CONFIG).write_text(json.dumps(settings))
    how, found, notes = peft.read_adapter(tmp_path, model)
    assert (how.targets, how.rank, how.alpha, notes) == ("wq,wk,wv", RANK, ALPHA, [])
    a, b = (tensors[f"base_model.model.model.layers.1.self_attn.qkv_proj.lora_{half}.weight"] for half in "AB")
    of_layer = {
        name: found[f"params.layers.1.attention.lora.{name}"] for name in ("wq_a", "wq_b", "wk_a", "wk_b", "wv_a", "wv_b")
    }
    assert all(np.array_equal(of_layer[f"{weight}_a"], a.T) for weight in ("wq", "wk", "wv"))
    rows = np.concatenate([of_layer[f"{weight}_b"].reshape(RANK, -1) for weight in ("wq", "wk", "wv")], 1)
    np.testing.assert_array_equal(rows, b.T)
    for wrong in (
        {"rank_pattern": {r".*\.qkv_proj": 2}},
        {"rank_pattern": {"o_proj": 6}},
        {"alpha_pattern": {r".*\.qkv_proj": 1}},
    ):
        (tmp_path / peft.CONFIG).write_text(json.dumps(settings | wrong))
        with pytest.raises(HuggingFaceError, match="qkv_proj|rank_pattern"):
            peft.read_adapter(tmp_path, model)


def test_what_does_not_fit_is_named(tensors, tmp_path):
    _written(tensors, tmp_path, {})
    theirs = load_file(tmp_path / peft.TENSORS)
    one = next(iter(theirs))

    def refused(changed, words):
        save_file(changed, tmp_path / peft.TENSORS)
        with pytest.raises(HuggingFaceError, match=words):
            peft.read_adapter(tmp_path, MODEL_CONFIG)

    refused({k: v for k, v in theirs.items() if k != one}, re.escape(one))
    refused(theirs | {"base_model.model.lm_head.lora_A.weight": theirs[one]}, "lm_head.lora_A.weight")
    refused(theirs | {one: np.zeros((2, 2), np.float32)}, r"\[2, 2\]")
    delta_net = "base_model.model.model.layers.0.linear_attn.out_proj.lora_A.weight"
    refused(theirs | {delta_net: theirs[one]}, f"{delta_net}.*merge_and_unload")


def test_settings_of_peft_that_change_the_model_are_refused(tensors, tmp_path):
    refused = {"use_dora": True, "rank_pattern": {"q_proj": 4}, "bias": "all", "modules_to_save": ["lm_head"]}
    refused |= {"init_lora_weights": "pissa", "something_new": 1, "peft_type": "IA3"}
    for key, value in refused.items():
        with pytest.raises(HuggingFaceError, match=key):
            peft.read_adapter(_written(tensors, tmp_path / key, {key: value}), MODEL_CONFIG)
    for key, value in (("r", 4.7), ("r", 0), ("r", True), ("lora_alpha", 0), ("lora_alpha", -3), ("lora_alpha", "8")):
        with pytest.raises(HuggingFaceError, match=f"{key} = "):
            peft.read_adapter(_written(tensors, tmp_path / f"{key}{value}", {key: value}), MODEL_CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        lambda old: f'{old[:-1]}, "r": 2}}',
        lambda old: f'{old[:-1]}, "lora_alpha": NaN}}',
        lambda old: "[" * 100_000,
        lambda old: f'{old[:-1]}, "x": "é"}}'.encode("latin-1"),
    ],
)
def test_a_damaged_config_of_peft_is_named(tensors, tmp_path, change):
    file = _written(tensors, tmp_path / "a", {}) / peft.CONFIG
    made = change(file.read_text().strip())
    file.write_bytes(made if isinstance(made, bytes) else made.encode())
    with pytest.raises(HuggingFaceError, match=str(file)):
        peft.read_adapter(file.parent, MODEL_CONFIG)


def test_rslora_goes_to_peft_and_back(tensors, tmp_path):
    """The scale is alpha / sqrt(rank) (Kalajdzievski 2023)."""
    settings, _, notes = peft.read_adapter(_written(tensors, tmp_path, {"use_rslora": True}), MODEL_CONFIG)
    assert settings == dataclasses.replace(HOW, rslora=True, targets=settings.targets) and not notes
    assert settings.scale == pytest.approx(ALPHA / RANK**0.5) and HOW.scale == pytest.approx(ALPHA / RANK)
    peft.write_adapter(tmp_path / "back", ours(tensors), MODEL_CONFIG, settings, "")
    assert json.loads((tmp_path / "back" / peft.CONFIG).read_text())["use_rslora"] is True


# ---- Adapters of experts

MOE = {"model.family": "qwen3_moe", "model.qk_norm": True} | EXPERTS


@pytest.fixture(scope="module", params=["each", "shared"])
def of_experts(request):
    """Return (settings of the adapters, model, random tensors) of a model with experts."""
    run = helpers.tiny(MODEL | MOE | LORA | {"lora.experts": request.param})
    shapes = abstract_tensors(helpers.program(run).state)
    rng = np.random.default_rng(0)
    made = {k: rng.normal(0, 0.05, a.shape).astype(np.float32) for k, a in shapes.items() if k.startswith(PREFIX)}
    return run.lora, run.model, made


def deltas(how, tensors, i, weight):
    """Return scale a b of layer i's experts, with the axes of our weight, written down independently."""
    a, b = (tensors[f"params.layers.{i}.mlp.lora.{weight}_{half}"] for half in "ab")
    a, b = (x if x.ndim == 3 else np.stack([x] * 4) for x in (a, b))
    return how.alpha / how.rank * np.einsum("EFR,ERD->EDF" if weight == "down" else "EDR,ERF->EDF", a, b)


def test_merged_experts(of_experts):
    how, _, tensors = of_experts
    found = dict(lora.merge_adapters(tensors, how.scale))
    for i, weight in itertools.product(range(2), ("gate", "up", "down")):
        name = f"params.layers.{i}.mlp.{weight}"
        np.testing.assert_allclose(found[name], tensors[name] + deltas(how, tensors, i, weight), rtol=1e-5, atol=1e-7)


def test_experts_in_peft(of_experts, tmp_path):
    """PEFT's delta of gate_up_proj and down_proj, by the einsum in its ParamWrapper, is ours. gate's part is first."""
    how, model, tensors = of_experts
    peft.write_adapter(tmp_path, ours(tensors), model, how, "")
    settings, theirs = json.loads((tmp_path / peft.CONFIG).read_text()), load_file(tmp_path / peft.TENSORS)
    assert settings["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert settings["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    ((pattern, rank),), ((_, alpha),) = settings["rank_pattern"].items(), settings["alpha_pattern"].items()
    assert re.fullmatch(rf"(.*\.)?({pattern})", "model.layers.1.mlp.experts.gate_up_proj")
    for module, r, scale, weights in (
        ("experts.base_layer", rank, alpha / rank, ("gate", "up")),
        ("experts", RANK, ALPHA / RANK, ("down",)),
    ):
        a, b = (theirs[f"base_model.model.model.layers.1.mlp.{module}.lora_{half}.weight"] for half in "AB")
        made = scale * np.einsum("ore,eri->eoi", b.reshape(len(b), r, 4), a.reshape(4, r, -1))
        wanted = [deltas(how, tensors, 1, weight) for weight in weights]
        wanted = wanted[0] if weights == ("down",) else np.concatenate(wanted, 2).swapaxes(1, 2)
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-6)
    back, found, _ = peft.read_adapter(tmp_path, model)
    assert back == dataclasses.replace(how, targets=back.targets, experts="each")
    if how.experts == "each":
        assert found.keys() == ours(tensors).keys() and all(np.array_equal(found[k], tensors[k]) for k in found)


def test_other_ranks_of_experts_are_refused(of_experts, tmp_path):
    """Those of an export are read, and no other ranks, alphas, patterns or full matrices b of the wider rank."""
    how, model, tensors = of_experts
    peft.write_adapter(tmp_path, ours(tensors), model, how, "")
    config, theirs = (tmp_path / peft.CONFIG).read_text(), load_file(tmp_path / peft.TENSORS)

    def refused(settings, tensors, words):
        (tmp_path / peft.CONFIG).write_text(json.dumps(json.loads(config) | settings))
        save_file(tensors, tmp_path / peft.TENSORS)
        with pytest.raises(HuggingFaceError, match=words):
            peft.read_adapter(tmp_path, model)

    pattern = next(iter(json.loads(config)["rank_pattern"]))
    refused({"rank_pattern": {"q_proj": 6}}, theirs, "rank_pattern")
    refused({"alpha_pattern": {pattern: ALPHA}}, theirs, "gate_up_proj")
    refused({"alpha_pattern": {}}, theirs, "gate_up_proj")
    refused({"rank_pattern": {pattern: 4}}, theirs, "gate_up_proj")
    refused({"alpha_pattern": {pattern: 0}}, theirs, "alpha_pattern")
    refused({"lora_alpha": 10**400}, theirs, "lora_alpha")
    refused({"use_rslora": "false"}, theirs, "use_rslora")
    refused({"target_parameters": [3]}, theirs, "target_parameters")
    refused({"rank_pattern": {}, "alpha_pattern": {}}, theirs, "lora_A")
    b = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"
    refused({}, theirs | {b: np.ones_like(theirs[b])}, "lora_B|gate_up_proj")


@pytest.mark.parametrize("half", ["gate", "up"])
def test_one_half_of_gate_up_proj_comes_back_alone(of_experts, half, tmp_path):
    how, model, tensors = of_experts
    alone = {name: x for name, x in ours(tensors).items() if peft.weight_of(name) == half}
    peft.write_adapter(tmp_path, alone, model, dataclasses.replace(how, targets=half), "")
    back, found, notes = peft.read_adapter(tmp_path, model)
    assert back.targets == half and found.keys() == alone.keys() and len(notes) == 1


def test_a_digest_of_layers_is_that_of_their_periods():
    """Layers of the model, as files have them, have the digest of the stack of periods that has them in its elements."""
    rng = np.random.default_rng(0)
    stack = {f"{place}_of_2": {"mlp": {"up": rng.normal(size=(3, 4, 5)).astype(np.float32)}} for place in range(2)}
    by_layer = lora.Digest(2)
    for layer in (3, 0, 5, 1, 2, 4):
        by_layer.add(f"{PREFIX}layers.{layer}.mlp.up", jnp.asarray(stack[f"{layer % 2}_of_2"]["mlp"]["up"][layer // 2]))
    assert by_layer.hex() == lora.digest(jax.tree.map(jnp.asarray, {"layers": stack}))
