"""Hugging Face folders: reading config.json and tensors, refusals by name, presets, tokenizers."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import helpers
import hugging_face
import jax
import ml_dtypes
import numpy as np
import pytest
from hugging_face import EXPERTS, FAMILIES, tensors_of
from safetensors.numpy import load_file, save_file

from jaxtrain import models
from jaxtrain.commands import hf as command
from jaxtrain.config import schema
from jaxtrain.config.schema import Model
from jaxtrain.data.text_format import TextFormat
from jaxtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxtrain.hf import exporting, importing
from jaxtrain.hf import folder as folders
from jaxtrain.hf.folder import model_of, open_folder
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.names import Entry, match_tensors, model_entries
from jaxtrain.hf.parts import Difference, ModelComparison, largest_difference, ratio
from jaxtrain.hf.tensor_files import same_bits
from jaxtrain.models import family, flops, presets
from jaxtrain.models.attention import Kernel
from jaxtrain.models.hf_tensors import HfTensor
from jaxtrain.models.hugging_face import HuggingFaceError, format_of
from jaxtrain.sharding import replicated
from jaxtrain.step.definition import make_definition
from jaxtrain.step.state import TrainState, abstract_tensors

ROOT = Path(__file__).resolve().parents[2]


def test_configs_of_transformers_4_and_5_say_the_same():
    for name in FAMILIES:
        if "qwen3_5" not in name:  # transformers 4 does not have it
            assert model_of(hugging_face.settings(name, 4)) == model_of(hugging_face.settings(name, 5)), name


def test_the_rotated_part_of_a_head_has_the_default_of_its_class():
    for name, part in {"phi3": 1.0, "glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "minimax_m2": 1.0}.items():
        given = {k: v for k, v in hugging_face.settings(name, 4).items() if k not in ("partial_rotary_factor", "rotary_dim")}
        assert model_of(given).partial_rotary_factor == part, name


# ---- Tensors in other forms


SIZES = {"D": 3, "F": 4, "N": 4, "K": 2, "H": 6, "P": 5, "R": 2, "V": 7, "T": 3, "E": 2, "L": 0, "rotary": 4}
ROWS = "(K (P + P + R V + R V)) D"
CHANNELS = "(K P + K P + K R V) 1 T"
# The axes of a tensor -> those of its parts in jaxtrain, and a definition by loops or numpy's functions.
FUSED = {
    "(N H + K H + K H) D": (
        ["D N H", "D K H", "D K H"],
        lambda q, k, v: np.concatenate([x.reshape(3, -1) for x in (q, k, v)], 1).T,
    ),
    "E D (F (1 + 1))": (["E D F", "E D F"], lambda gate, up: np.stack([gate, up], -1).reshape(2, 3, 8)),
    "(N (H + H)) D": (
        ["D N H", "D N H"],
        lambda q, gate: np.stack([row for i in range(4) for x in (q, gate) for row in x[:, i].T]),
    ),
    ROWS: (
        ["D K P", "D K P", "D (K R) V", "D (K R) V"],
        lambda q, k, v, z: np.concatenate(
            [x.T for i in range(2) for x in (q[:, i], k[:, i], v[:, 2 * i], v[:, 2 * i + 1], z[:, 2 * i], z[:, 2 * i + 1])]
        ),
    ),
    CHANNELS: (
        ["K P T", "K P T", "(K R) V T"],
        lambda q, k, v: np.concatenate([x.reshape(-1, 1, 3) for x in (q, k, v)]),
    ),
}


@pytest.mark.parametrize("theirs", FUSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_holds_several_arrays(theirs, dtype):
    """Each shard of each part is read, and the parts written one after the other make the tensor again."""
    axes, definition = FUSED[theirs]
    parts = [Entry("", ("x",), HfTensor("x", ours, theirs, i), SIZES) for i, ours in enumerate(axes)]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(part.shape).astype(dtype) for part in parts]
    whole = np.ascontiguousarray(definition(*arrays))
    assert {part.hf_shape for part in parts} == {whole.shape}
    written = None
    for part, x in zip(parts, arrays, strict=True):
        for index in [(slice(None),) * x.ndim, (slice(None),) * (x.ndim - 1) + (slice(1, 3),), (slice(1, 2),) * x.ndim]:
            assert same_bits(part.to_jax([whole], x.dtype, index), np.ascontiguousarray(x[index]))
        written = part.to_hf(x, out=written)
    assert written is not None and same_bits(written, whole)


def test_pairs_of_the_first_dimensions_become_halves():
    """Of heads of 6 dimensions, 4 are rotated: pairs (0, 1) and (2, 3) in the checkpoint, (0, 2) and (1, 3) in jaxtrain."""
    entry = Entry("", ("x",), HfTensor("x", "N H", "(N H)", interleaved="H"), SIZES)
    theirs = np.arange(24, dtype=np.float32)
    ours = entry.to_jax([theirs], theirs.dtype, (slice(None), slice(None)))
    np.testing.assert_array_equal(ours[1], 6 + np.array([0, 2, 1, 3, 4, 5]))
    np.testing.assert_array_equal(entry.to_hf(ours), theirs)


def test_experts_in_mxfp4_are_read(tmp_path):
    """Experts are as in published GPT-OSS: blocks and scales in place of each weight. Values are by the format's definition."""
    folder, plain = hugging_face.write_mxfp4(tmp_path)
    packed = tensors_of(folder)
    found = open_folder(folder)
    for name in plain:
        np.testing.assert_array_equal(found.read(name).astype(np.float32), plain[name], err_msg=name)
    assert found.tensors.keys() == plain.keys()
    open_origin(str(folder))
    name = next(name for name in packed if name.endswith("_scales"))
    save_file(packed | {name: packed[name][..., :1]}, folder / "model.safetensors")
    with pytest.raises(HuggingFaceError, match="_blocks"):
        open_folder(folder).tensors  # noqa: B018 - the tensors are read when the property is


# ---- Refusals by name


def rotary(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


# Family -> changes of config.json. The error names the first key of the change.
KEYS = {
    "llama2": [
        *({"model_type": "gpt2"}, {"hidden_act": "gelu"}, {"residual_multiplier": 2.0}),
        *({"rope_scaling": "linear"}, {"tie_word_embeddings": None}, {"hidden_size": "64"}, {"rope_theta": 5.0}),
    ],
    "mistral": [{"sliding_window": 0}, {"attention_bias": True}, {"mlp_bias": True}],
    "gemma": [{"hidden_act": "relu"}, {"hidden_activation": "gelu"}, {"use_bidirectional_attention": True}],
    "olmo3": [rotary("default"), {"sliding_window": None}, {"clip_qkv": 8.0}],
    "olmoe": [{"clip_qkv": 8.0}, {"head_dim": 16}, {"num_local_experts": 4}, {"norm_topk_prob": None}],
    "exaone4": [{"sliding_window_pattern": "LLG", "layer_types": None}, {"sliding_window": None}, {"attention_bias": True}],
    "smollm3": [
        {"no_rope_layers": [1, 0, 1]},
        {"no_rope_layers": [1, 2, 1, 1]},
        {"no_rope_layers": [[1], 1, 1, 1]},
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": None},
    ],
    "granite": [{"logits_scaling": 0}, {"attention_multiplier": None}, {"residual_multiplier": "1"}],
    "granitemoe": [{"position_embedding_type": "nope"}, {"mlp_bias": True}, {"num_local_experts": None}],
    "cwm": [{"attention_bias": True}, {"head_dim": None}, {"sliding_window": None}, {"layer_types": [["full_attention"]]}],
    "mixtral": [{"sliding_window": 0}, {"router_jitter_noise": 0.01}, {"num_local_experts": None}, {"num_experts_per_tok": 7}],
    "gpt_oss": [{"swiglu_limit": 5.0}, {"experts_per_token": 3}, {"quantization_config": {"quant_method": "fp8"}}],
    "qwen2": [{"use_mrope": True}],
    "qwen3_moe": [{"decoder_sparse_step": 2}, {"norm_topk_prob": "yes"}, {"num_experts": 16}],
    "gemma2": [{"sliding_window_size": 7}, {"query_pre_attn_scalar": 0}],
    "phi3": [{"sliding_window": 0}, {"resid_pdrop": 0.1}, {"attention_bias": True}, {"partial_rotary_factor": 0.75}],
    "glm": [{"partial_rotary_factor": 0.25}, {"partial_rotary_factor": "half"}, {"head_dim": None}],
    "seed_oss": [{"attention_dropout": 0.1}, {"residual_dropout": 0.1}],
    "qwen2_moe": [{"mlp_only_layers": [1]}, {"use_sliding_window": True}, {"shared_expert_intermediate_size": None}],
    "ernie4_5": [{"partial_rotary_factor": 0.5}, {"tie_word_embeddings": "yes"}],
    "dots1": [{"scoring_func": "softmax"}, {"use_sliding_window": True}],
    "minimax_m2": [
        *({"attn_type_list": [1, 0, 1, 1]}, {"attn_type_list": 1}, {"layernorm_mlp_beta": 2.0}),
        *({"router_jitter_noise": 0.1}, {"use_qk_norm": False}),
    ],
    "ministral": [{"sliding_window": None}, {"layer_types": ["full_attention"]}, {"attention_bias": True}],
    "helium": [{"head_dim": 16}, {"mlp_bias": 1}],
    "solar_open": [{"first_k_dense_replace": 1}, {"scoring_func": "softmax"}, {"head_dim": None}],
    "hyperclovax": [{"use_post_norm": "yes"}, {"logits_scaling": 0}, {"attention_multiplier": 0.0}],
    "glm4_moe_lite": [
        *({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, {"mlp_layer_types": []}, {"mlp_layer_types": "dense"}),
        *({"first_k_dense_replace": 1}, {"head_dim": 16}, {"rope_interleave": False}),
    ],
    "youtu": [{"rope_interleave": False}, {"attention_bias": True}, {"v_head_dim": None}],
    "deepseek_v3": [{"rope_interleave": False}, {"topk_method": "greedy"}, {"qk_head_dim": 64}, {"n_group": 3}],
}
# (family, changes of config.json, what the error names)
NAMED = [
    ("llama2", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
    ("llama2", rotary("dynamic", factor=4.0), r"--set rope_scaling=null --set 'rope_parameters="),
    ("phi3", rotary("yarn", factor=4.0, original_max_position_embeddings=64), "rope_type = 'yarn'"),
    ("phi3", rotary("longrope", short_factor=[1.0], long_factor=[2.0]), "rope_type = 'longrope'"),
    ("minimax_m2", {"rotary_dim": 4}, "partial_rotary_factor is 0.25"),
    (
        "olmo3",
        {"rope_parameters": {"sliding_attention": {"rope_theta": 0.0}, "full_attention": {"rope_theta": 1e4}}},
        "rope_theta = 0",
    ),
    ("dots1", {"layer_types": None, "sliding_window": 8, "max_window_layers": 2}, "attention_pattern"),
    ("llama2", rotary("yarn", factor=4.0), "original_max_position_embeddings"),
    ("llama2", rotary("yarn", factor=4, original_max_position_embeddings=64, truncate=1), "truncate"),
    ("llama2", {"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ("llama2", {"num_hidden_layers": 3}, "model.layers.3.input_layernorm.weight"),
    ("llama2", {"intermediate_size": 80}, r"mlp.gate_proj.weight: .*\[96, 64\].*\[80, 64\]"),
    ("llama2", {"tie_word_embeddings": True}, "lm_head.weight"),
    ("mixtral", {"num_local_experts": 7}, "experts.6.w1.weight: .*gate"),
    ("deepseek_v3", {"first_k_dense_replace": 2}, "model.layers.1.mlp.gate_proj.weight: .*dense_layers.1.mlp.gate"),
]


def test_what_is_not_understood_is_refused(tmp_path):
    keys = [(name, change, next(iter(change))) for name, changes in KEYS.items() for change in changes]
    for name, change, word in keys + NAMED:
        folder = hugging_face.write(tmp_path / name, name, **change)
        with pytest.raises(HuggingFaceError, match=word):
            open_origin(str(folder))
    assert command.main(["import", str(tmp_path / "llama2"), f"--out={tmp_path / 'ours'}"]) == 2
    assert not (tmp_path / "ours").exists()


# (family, changes of config.json, the letters of its four layers)
OF_LAYERS = [
    ("exaone4", {"sliding_window_pattern": "LLG"}, "llnl"),  # not read beside layer_types
    ("exaone4", {"sliding_window_pattern": 2, "layer_types": None}, "lnln"),
    ("exaone4", {"layer_types": ["full_attention"] * 4}, "nnnn"),
    ("exaone4", {"layer_types": ["full_attention"] * 4, "sliding_window": None}, "gggg"),
    ("smollm3", {"no_rope_layers": [0, 1, 1, 1, 0]}, "nggg"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2, "layer_types": None}, "gngn"),
    (
        "smollm3",
        {"layer_types": ["sliding_attention", *["full_attention"] * 3], "use_sliding_window": True, "sliding_window": 6},
        "lgng",
    ),
    ("olmo3", {"layer_types": None}, "lllg"),
    ("cwm", {"layer_types": None}, "glll"),
]


@pytest.mark.parametrize(("name", "change", "kinds"), OF_LAYERS)
def test_kinds_of_layers_are_those_of_transformers(name, change, kinds):
    """An export says the same, and Granite's and Gemma's other forms are read."""
    model = model_of(hugging_face.settings(name) | change)
    assert model.kinds == kinds
    assert model_of(exporting.config_json(model, "f32", 64, {})) == dataclasses.replace(model, init_std=0.02)


def test_other_forms_of_keys_and_tensors(tmp_path):
    """Gemma's first checkpoints say gelu, and transformers 5 can save Granite's experts with the names of its model."""
    assert model_of(hugging_face.settings("gemma") | {"hidden_act": "gelu"}) == model_of(hugging_face.settings("gemma"))
    folder = hugging_face.write(tmp_path, "granitemoe")
    before = open_origin(str(folder)).stored
    names = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
    names |= {"router.layer.weight": "router.weight"}
    tensors = {functools.reduce(lambda n, x: n.replace(*x), names.items(), k): a for k, a in tensors_of(folder).items()}
    assert "model.layers.3.block_sparse_moe.experts.gate_up_proj" in tensors
    save_file(tensors, folder / "model.safetensors")
    assert open_origin(str(folder)).stored == before


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_in_one_tensor_are_read(tmp_path, name):
    """transformers 5 writes each weight of all experts as one tensor, unless its option for version 4's form is on."""
    folder = hugging_face.write(tmp_path / "apart", name)
    (apart, _), model = open_folder(folder).matched, open_folder(folder).model
    tensors = tensors_of(folder)
    together_ones = re.compile(r"params\.layers\.\d+\.mlp\.(router|gate|up|down)")
    kept = {e.hf_names[0]: tensors[e.hf_names[0]] for e in apart.values() if not together_ones.fullmatch(e.name)}
    for i in range(model.stacked_layers):
        part = {name: apart[f"params.layers.{i}.mlp.{name}"].hf_names for name in ("router", "gate", "up", "down")}
        of = {name: np.stack([tensors[x] for x in theirs]) for name, theirs in part.items()}
        block = f"model.layers.{model.dense_layers + i}.mlp."
        kept[block + "experts.gate_up_proj"] = np.concatenate([of["gate"], of["up"]], axis=1)
        kept |= {block + "experts.down_proj": of["down"], block + "gate.weight": of["router"][0]}
    together = tmp_path / "together"
    together.mkdir()
    shutil.copy(folder / "config.json", together)
    save_file(kept, together / "model.safetensors")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stored = open_origin(str(folder)).stored
    abstract = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for name, a in stored.items()}
    one, other = (open_origin(str(place)).read(abstract) for place in (folder, together))
    assert one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def test_weights_in_fp8_are_read_with_the_scales_of_their_blocks(tmp_path):
    """The blocks do not divide the matrices, and the last blocks are smaller. A missing scale is an error."""
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 24], "activation_scheme": "dynamic"}
    folder = hugging_face.write(tmp_path, "deepseek_v3", quantization_config=quantized)
    tensors, rng, stand_for = tensors_of(folder), np.random.default_rng(0), {}
    for name, x in tensors.copy().items():
        if x.ndim == 2 and ("_proj" in name) and ".self_attn.kv_a" not in name:
            scale = rng.uniform(4e-3, 8e-3, [-(-size // 24) for size in x.shape]).astype(np.float32)
            of_each = scale.repeat(24, axis=0).repeat(24, axis=1)[: x.shape[0], : x.shape[1]]
            tensors[name] = (x / of_each).astype(ml_dtypes.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scale
            stand_for[name] = (tensors[name].astype(np.float32) * of_each).astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    assert len(stand_for) > 80
    opened = open_folder(folder)
    found, _ = opened.matched
    for name, wanted in stand_for.items():
        np.testing.assert_array_equal(opened.read(name), wanted)
    down = found["params.layers.0.mlp.down"]
    assert opened.tensors[down.hf_names[0]].holds == ml_dtypes.bfloat16
    gone = next(iter(stand_for)) + "_scale_inv"
    save_file({k: v for k, v in tensors.items() if k != gone}, folder / "model.safetensors")
    with pytest.raises(HuggingFaceError, match=gone):
        open_origin(str(folder))
    save_file(tensors | {gone: np.ones((1, 1), np.float32)}, folder / "model.safetensors")
    with pytest.raises(HuggingFaceError, match="blocks"):
        open_folder(folder).read(gone.removesuffix("_scale_inv"))


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_special_tensors_of_routed_models(tmp_path, name):
    """The layer of multi-token prediction is left out where config.json does not count it. The router's bias stays in float32
    beside bfloat16 weights, on import and export: rounding would choose other experts.
    """
    folder = hugging_face.write(tmp_path / "theirs", name, num_nextn_predict_layers=0)
    extra = {"model.layers.4.enorm.weight": np.ones(64, np.float32)}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = {k: v if "correction" in k else v.astype(ml_dtypes.bfloat16) for k, v in tensors_of(folder).items()}
    save_file(tensors | extra, folder / "model.safetensors")
    assert open_folder(folder).matched[1].keys() == extra.keys()
    importing.import_folder(open_folder(folder), tmp_path / "ours", "auto", print)
    exporting.export_model(str(tmp_path / "ours"), tmp_path / "back", say=print)
    back = tensors_of(tmp_path / "back")
    assert back.keys() == tensors.keys() and all(back[k].dtype == tensors[k].dtype for k in back)
    assert np.array_equal(back[bias], tensors[bias])


# Parts of published config.json files that matter here, as transformers 4 wrote them, with keys that later versions dropped.
PUBLISHED = {
    "gemma2": {"sliding_window_size": 6, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    "qwen2": {"use_mrope": False, "unsloth_version": "2024.9", "use_sliding_window": False, "layer_types": None},
    "mistral": {"sliding_window": None, "transformers.js_config": {}},
    "gpt_oss": {"experts_per_token": 2, "initial_context_length": 8, "quantization_config": {"quant_method": "mxfp4"}},
    "qwen3_moe": {"max_window_layers": 48, "norm_topk_prob": True},
    "dots1": {"scoring_func": "noaux_tc", "n_group": None, "topk_group": None, "use_sliding_window": False},
    "seed_oss": {"rope_scaling": {"rope_type": "default"}, "pretraining_tp": 1},
    "qwen2_moe": {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False},
    "glm4_moe": {"num_nextn_predict_layers": 1, "rope_scaling": None},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1, "seq_aux": True},
}


def test_published_configs_are_read():
    for name, more in PUBLISHED.items():
        model = model_of(hugging_face.settings(name, 4) | more)
        assert model.sliding_window == {"gemma2": 6, "gpt_oss": 7}.get(name, 0)
    plain = {k: v for k, v in hugging_face.settings("llama2").items() if k not in ("num_key_value_heads", "head_dim")}
    assert (model_of(plain).num_kv_heads, model_of(plain).head_dim) == (8, 8), "every query has a key of its own"
    # If these keys are missing, transformers uses a default that is not None.
    for name, key in (("gemma2", "attn_logit_softcapping"), ("gemma2", "sliding_window"), ("mistral", "sliding_window")):
        with pytest.raises(HuggingFaceError, match=key):
            model_of({k: v for k, v in hugging_face.settings(name, 4).items() if k != key})
    assert model_of(hugging_face.settings("gemma2", 4) | {"query_pre_attn_scalar": 25}).attn_logit_scale == 0.2


# (family, its keys that are missing, keys of config.Model that stand for transformers' default)
DEFAULTS = [
    ("ministral", ["layer_types"], {"sliding_window": 7, "attention_pattern": ""}),
    ("hyperclovax", ["attention_multiplier", "use_post_norm"], {"attn_logit_scale": 0.0, "norm_placement": "sandwich"}),
    ("glm4_moe_lite", ["mlp_layer_types"], {"dense_layers": 1, "dense_d_ff": 96}),
]


@pytest.mark.parametrize(("name", "missing", "wanted"), DEFAULTS)
def test_missing_keys_mean_what_they_do_in_transformers(name, missing, wanted):
    model = model_of({k: v for k, v in hugging_face.settings(name).items() if k not in missing})
    assert {key: getattr(model, key) for key in wanted} == wanted
    assert model == model_of(hugging_face.settings(name) | format_of(name).write(model)), "an export says the same"


def test_families_are_read_and_written_without_an_option(tmp_path):
    given = hugging_face.settings
    folder = hugging_face.write(tmp_path, "hyperclovax", sizes={"use_post_norm": False})
    assert open_folder(folder).model.norm_placement == "pre" and not any("post_norm" in name for name in tensors_of(folder))
    model = model_of(given("ministral") | {"sliding_window": None, "layer_types": None})
    assert model.kinds == "gggg"
    written = format_of("ministral").write(model)
    assert written["sliding_window"], "transformers computes nothing without it"
    assert model_of(given("ministral") | written) == model
    sparse = model_of(given("glm4_moe_lite") | {"mlp_layer_types": 4 * ["sparse"]})
    assert (sparse.dense_layers, sparse.dense_d_ff) == (0, 0)


def test_files_that_are_damaged_are_refused(tmp_path):
    def refused(words, folder):
        with pytest.raises(HuggingFaceError, match=words):
            open_origin(str(folder))

    whole = hugging_face.write(tmp_path / "whole", "llama2")
    file, index = whole / "model.safetensors", whole / "model.safetensors.index.json"
    tensors = load_file(file)
    file.write_bytes(file.read_bytes()[:-1000])
    refused("cut off", whole)
    unused = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {unused: np.ones(4, np.float32)}, file)
    assert [*open_folder(whole).matched[1]] == [unused]
    save_file({k: v for k, v in tensors.items() if "norm" in k}, file)
    refused("embed_tokens.weight", whole)
    save_file({k: v.astype(np.float64) for k, v in tensors.items()}, file)
    refused("F64", whole)
    file.unlink()
    refused("model.safetensors.index.json", whole)
    save_file(tensors, whole / "a.safetensors")
    for names, stored, words in (([*tensors, "more"], "a", "more .*a.safetensors"), (tensors, "b", "b.safetensors")):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, f"{stored}.safetensors")}))
        refused(words, whole)


# ---- Tokenizers


def test_the_byte_tokenizer_is_exported_as_one_of_theirs(tmp_path):
    folders.write_byte_tokenizer(tmp_path)
    theirs, ours = load_tokenizer(str(tmp_path)), ByteTokenizer()
    text = "déjà vu\n\t\x00 日本 <|endoftext|>" + "".join(map(chr, range(300)))
    assert theirs.encode(text) == ours.encode(text) and theirs.eot == ours.eot
    assert theirs.decode(ours.encode(text)) == text


def test_a_lone_tokenizer_is_completed(tmp_path):
    """A tokenizer.json alone is exported with its class and end-of-text token: the control token, not the piece `</s>`."""
    folders.write_byte_tokenizer(tmp_path / "whole")
    described = json.loads((tmp_path / "whole" / "tokenizer.json").read_text())
    described["model"]["vocab"]["</s>"] = 257  # a piece of HTML, as in Gemma's vocabulary
    (tmp_path / "mine.json").write_text(json.dumps(described))
    (tmp_path / "out").mkdir()
    folders.write_tokenizer(str(tmp_path / "mine.json"), TextFormat(eot=256), tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out")).sha256 == load_tokenizer(str(tmp_path / "mine.json")).sha256
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}


def test_an_import_that_is_killed_leaves_no_checkpoint_without_its_tokenizer(tmp_path, monkeypatch):
    theirs, out = hugging_face.write(tmp_path / "theirs", "llama", vocab=264), tmp_path / "ours"
    folders.write_byte_tokenizer(theirs)

    def interrupted(*_):
        assert (out / "tokenizer" / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
        raise KeyboardInterrupt

    monkeypatch.setattr(importing.Checkpoints, "save_now", interrupted)
    with pytest.raises(KeyboardInterrupt):
        importing.import_folder(open_folder(theirs), out, "auto", print)
    assert not out.exists()


def test_a_config_of_an_older_version_is_read_if_its_model_is_one_of_this(tmp_path):
    run, _ = schema.resolve(schema.default_config())
    tree = schema.to_dict(run)
    tree["compiler"]["defaults"] = False
    tree["sharding"]["rules"]["kv_heads"] = "tensor"
    assert folders.stored_run({"config": tree}, tmp_path / "1") == run
    tree["model"]["dropout"] = 0.1
    with pytest.raises(HuggingFaceError, match="model.dropout"):
        folders.stored_run({"config": tree}, tmp_path / "1")


def test_tokens_that_cannot_be_read_are_refused_by_name(tmp_path, capsys):
    folder, tokens = str(hugging_face.write(tmp_path / "theirs", "llama")), tmp_path / "t.npy"
    for content in (b"garbage", b"PK\x03\x04", b"\x93NUMPY\x01\x00\x03\x00{'\n"):
        tokens.write_bytes(content)
        for args in (["logits", folder, f"--out={tmp_path / 'l.npy'}"], ["check", folder, folder]):
            assert command.main([*args, f"--tokens={tokens}"]) == 2
            assert str(tokens) in capsys.readouterr().err


# Parameters as the safetensors indexes on the hub count them. Some small models with a tied head are published with a copy of
# the head. Gemma 3 from 4B on is published with a vision tower: 27 layers of 15,239,504 parameters, 5,399,424 further
# parameters, and a projection to d_model. jaxtrain's models have neither.
VISION = 27 * 15_239_504 + 5_399_424
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "llama3.1_405b": 405_853_388_800,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "llama3.3_70b": 70_553_706_496,
    "mistral_7b": 7_241_732_096,
    "mistral_7b_v0.3": 7_248_023_552,
    "mistral_nemo_12b": 12_247_782_400,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen3_0.6b": 751_632_384 - 151936 * 1024,
    "qwen3_1.7b": 2_031_739_904 - 151936 * 2048,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_next_80b_a3b": 79_674_391_296,  # the multi-token prediction of published weights is left out
    "qwen3_5_0.8b": 752_393_024,
    "qwen3_5_9b": 8_953_803_264,
    "qwen3_5_27b": 26_895_998_464,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "deepseek_v3": 671_026_419_200,  # without the multi-token prediction layer
    "kimi_k2": 1_026_408_232_448,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "phi3_mini_4k": 3_821_079_552,
    "phi3_medium_4k": 13_960_238_080,
    "phi4_14b": 14_659_507_200,
    "glm4_9b": 9_399_951_360,
    "glm4_0414_9b": 9_400_279_040,
    "glm4.5_355b": 352_797_829_024,  # these two, too, without the multi-token prediction layer
    "glm4.5_air_106b": 106_852_251_264,
    "seed_oss_36b": 36_151_104_512,
    "qwen1.5_moe_a2.7b": 14_315_784_192,
    "qwen2_57b_a14b": 57_408_658_944,
    "ernie4.5_0.3b": 360_748_032,
    "dots1_142b": 142_774_381_696,
    "minimax_m2_230b": 228_689_764_864,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "exaone4_1.2b": 1_279_391_488,
    "exaone4_32b": 32_003_216_384,
    "smollm3_3b": 3_075_098_624,
    "granite3.1_2b": 2_533_531_648,
    "granite3.1_8b": 8_170_848_256,
    "granite3.0_1b_a400m": 1_334_628_352,
    "granite3.0_3b_a800m": 3_298_793_472,
    "cwm_32b": 32_581_097_472,
    "olmoe_7b_a1b": 6_919_161_856,
    "flex_olmo_7x7b": 33_270_665_216,
    "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 4_300_079_472 - VISION - 1152 * (2560 + 1),
    "gemma3_12b": 12_187_325_040 - VISION - 1152 * (3840 + 1),
    "gemma3_27b": 27_432_406_640 - VISION - 1152 * (5376 + 1),
}


def test_the_first_part_that_differs_is_named():
    """The first part in the order of the model counts, a NaN is a difference, and logits alone may differ too."""

    def found(*parts: tuple[float, float, float], logits: float = 0.0) -> ModelComparison:
        each = tuple(Difference(f"part {i}", *x, "w", 0) for i, x in enumerate(parts))
        return ModelComparison(each, "", logits, 0.0, 1.0, 1.0, ())

    same, nan = (1e-6, 1e-6, 1e-6), float("nan")
    assert found(same, same).first(1e-3) == ""
    assert found(same, (1e-6, 0.5, 0.25), (9.0, 9.0, 9.0)).first(1e-3) == "part 1: gradients 0.5, gradient of w 0.25"
    assert found(same, (nan, 1e-6, 1e-6)).first(1e-3) == "part 1: activations nan"
    assert found(same, logits=9e-3).first(1e-3) == "", "rounding adds up over the layers"
    assert found(same, logits=0.5).first(1e-3) and found(same, logits=nan).first(1e-3)
    assert ratio(np.float32(nan), 1.0) != 0 and ratio(1.0, 0.0) == float("inf") and ratio(0.0, 0.0) == 0
    theirs = np.full((1, 4, 2), 10.0)  # of which the part adds 1
    assert largest_difference(theirs + np.eye(4)[:, :2], theirs, np.full((1, 4, 2), 1.0)) == pytest.approx(0.5**0.5)


def test_presets_have_the_published_sizes(capsys):
    assert {name: flops.parameters(Model(**keys))["total"] for name, keys in presets().items()} == PARAMETERS
    assert command.main(["presets"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[1:]] == list(PARAMETERS)
    assert "\n".join(listed) in (ROOT / "docs" / "presets.md").read_text()


@pytest.mark.parametrize("name", models.FAMILIES)
def test_presets_are_exported_and_read_back(name):
    """The family's table of names has every parameter of a preset with its shape. config.json gives the preset's model."""
    zero = helpers.program(helpers.tiny()).zero
    for keys in family(name).PRESETS.values():
        tree = schema.default_config()
        tree.model.update(keys | {"family": name})
        run, problems = schema.resolve(tree)
        back = model_of(exporting.config_json(run.model, "bf16", run.data.seq_len, {}))
        assert not problems and back == dataclasses.replace(run.model, init_std=back.init_std)
        params = make_definition(run, zero, Kernel("reference", ())).abstract
        placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated(zero.placement)), params)
        ours = {k: a.shape for k, a in abstract_tensors(TrainState(None, placed, ())).items()}
        assert {k: e.shape for k, e in model_entries(run.model).items()} == ours


def test_qwens_tensors_of_multi_token_prediction_are_left_out():
    """Entries of a layer are those of its kind. Tensors mtp.* are unused, and said."""
    model = model_of(hugging_face.settings("qwen3_next"))
    wanted = model_entries(model)
    shapes = {name: entry.hf_shape for entry in wanted.values() for name in entry.hf_names}
    assert "model.layers.0.linear_attn.A_log" in shapes and "model.layers.0.self_attn.q_proj.weight" not in shapes
    assert "model.layers.1.self_attn.q_proj.weight" in shapes and "model.layers.1.linear_attn.A_log" not in shapes
    assert match_tensors(wanted, shapes, "", model) == {}
    assert [*match_tensors(wanted, shapes | {"mtp.fc.weight": (8, 16)}, "", model)] == ["mtp.fc.weight"]


def test_layers_with_delta_nets_are_counted_where_no_list_names_them():
    given = {key: value for key, value in hugging_face.settings("qwen3_next").items() if key != "layer_types"}
    assert model_of(given).attention_pattern == "dddg"
    assert model_of(given | {"full_attention_interval": 2}).attention_pattern == "dg"
    with pytest.raises(HuggingFaceError, match="full_attention_interval"):
        model_of(hugging_face.settings("qwen3_next") | {"full_attention_interval": 4})
