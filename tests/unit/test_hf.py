"""Hugging Face folders: reading config.json and tensors, refusals by name, presets, tokenizers."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import hugging_face
import jax
import ml_dtypes
import numpy as np
import pytest
from hugging_face import EXPERTS, FAMILIES, TOKENS, tensors_of
from safetensors.numpy import load_file, save_file

from jaxtrain import config, flops, launch, main, models
from jaxtrain.config import Model
from jaxtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxtrain.hf import __main__ as command
from jaxtrain.hf import exporting, importing
from jaxtrain.hf import folder as folders
from jaxtrain.hf.folder import model_of, open_folder
from jaxtrain.hf.importing import matched, open_origin
from jaxtrain.models import family, presets
from jaxtrain.models.hugging_face import HuggingFaceError

ROOT = Path(__file__).resolve().parents[2]
SEGMENTS = np.ones_like(TOKENS)


@pytest.mark.parametrize("name", FAMILIES)
def test_configs_of_transformers_4_and_5_say_the_same(name):
    assert model_of(hugging_face.settings(name, 4)) == model_of(hugging_face.settings(name, 5))


# ---- MXFP4


def in_mxfp4(tensors: dict[str, np.ndarray], seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the tensors of a GPT-OSS folder with made-up experts in MXFP4, and their values by the format's definition."""
    rng, magnitudes = np.random.default_rng(seed), (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    packed, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 129, (experts, outputs, inputs // 32), np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        made = np.empty((experts, inputs, outputs), np.float32)
        for e, o, b, i in np.ndindex(blocks.shape):
            for half in (0, 1):
                bits = int(blocks[e, o, b, i]) >> (4 * half) & 15
                number = magnitudes[bits & 7] * (-1 if bits & 8 else 1)
                made[e, 32 * b + 2 * i + half, o] = number * 2.0 ** (int(scales[e, o, b]) - 127)
        plain[name] = made
    return packed, plain


def test_experts_in_mxfp4_are_read(tmp_path):
    """The tensors are as in published GPT-OSS: blocks and scales in place of each weight of the experts."""
    folder = hugging_face.write(tmp_path / "plain", "gpt_oss")
    packed, plain = in_mxfp4(tensors_of(folder))
    other = tmp_path / "packed"
    other.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    save_file(packed, other / "model.safetensors")
    found = open_folder(other)
    for name in plain:
        np.testing.assert_array_equal(found.read(name).astype(np.float32), plain[name], err_msg=name)
    assert found.tensors.keys() == plain.keys()
    matched(found)
    damaged = dict(packed)
    name = next(name for name in packed if name.endswith("_scales"))
    damaged[name] = packed[name][..., :1]
    save_file(damaged, other / "model.safetensors")
    with pytest.raises(HuggingFaceError, match="_blocks: .* does not fit its scales"):
        open_folder(other).tensors  # noqa: B018 - the tensors are read when the property is
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(HuggingFaceError, match="quant_method = 'fp8': only mxfp4 is read"):
        open_folder(other)


# ---- Refusals by name


REFUSED = [
    ({"model_type": "gpt2"}, "model_type = 'gpt2': no such architecture in jaxtrain"),
    ({"model_type": "gemma3", "text_config": {}}, "models that see or hear are not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM is a language model"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu': models of this family are built with 'silu' only"),
    ({"attention_bias": True}, "attention_bias = True: Qwen2 and GPT-OSS have biases on attention's projections"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"attention_dropout": 0.1}, "attention_dropout = 0.1: jaxtrain has no dropout"),
    ({"residual_multiplier": 2.0}, "unknown key residual_multiplier = 2.0"),
    ({"quantization_config": {"quant_method": "fp8"}}, "unknown key quantization_config"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        "Up to max_position_embeddings tokens it equals default. Fix: --set rope_scaling=null --set 'rope_parameters="
        '{"rope_type": "default", "rope_theta": 10000.0}\'. Known: default, llama3, linear, yarn',
    ),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "rope_parameters": None},
        "rope_type = 'longrope': is not supported, because its frequencies follow the length of each sequence. Known",
    ),
    (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
        "rope_type = 'proportional': is not supported. Known",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        "no key 'original_max_position_embeddings'",
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "truncate": 1}}
        | {"rope_parameters": None, "rope_theta": 1e4},
        "truncate = 1: must be true or false",
    ),
    ({"rope_parameters": {"rope_type": "default"}}, "no rope_theta, neither by itself nor in rope_parameters"),
    ({"rope_parameters": None}, "no rope_theta"),
    ({"rope_theta": 5.0}, "rope_theta is 5.0 in the form of transformers 4 and 777.0 in rope_parameters"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0}}, "no key 'low_freq_factor'"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "beta": 1}}, "unknown key beta = 1"),
    ({"partial_rotary_factor": 0.5}, "unknown key partial_rotary_factor = 0.5"),
    ({"tie_word_embeddings": None}, "no key 'tie_word_embeddings'"),
    ({"rms_norm_eps": None}, "no key 'rms_norm_eps'"),
    ({"model_type": ["llama"]}, "model_type = ['llama']: no such architecture"),
    ({"rope_scaling": "linear"}, "rope_scaling = 'linear': must be an object of JSON"),
    ({"rope_parameters": [1]}, "rope_parameters = [1]: must be an object of JSON"),
    ({"hidden_size": "64"}, "hidden_size = '64': must be a whole number above 0"),
    ({"num_hidden_layers": 3}, "model.layers.3.input_layernorm.weight: [64], not known"),
    ({"num_hidden_layers": 5}, "model.layers.4.input_layernorm.weight: missing"),
    ({"intermediate_size": 80}, "mlp.gate_proj.weight: its shape is [96, 64], config.json makes it [80, 64]"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is true, but lm_head.weight is not the embedding"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_what_is_not_understood_is_refused(tmp_path, change, words, capsys):
    folder = hugging_face.write(tmp_path / "theirs", "llama2", **change)
    assert command.main(["import", str(folder), f"--out={tmp_path / 'ours'}"]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


WITH_EXPERTS = [
    ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise = 0.01: jaxtrain adds no noise before the router"),
    ("mixtral", {"num_local_experts": None}, "no key 'num_local_experts'"),
    ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7: there are only 6 experts"),
    ("mixtral", {"num_local_experts": 7}, "experts.6.w1.weight: missing (it is layers.0.mlp.gate[6], [96, 64])"),
    ("mixtral", {"num_local_experts": 5}, "block_sparse_moe.experts.5.w1.weight: [96, 64], not known"),
    ("mixtral", {"shared_expert_intermediate_size": 64}, "unknown key shared_expert_intermediate_size = 64"),
    ("mixtral", {"intermediate_size": 80}, "experts.0.w1.weight: its shape is [96, 64], config.json makes it [80, 64]"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias = False: Qwen2 and GPT-OSS have biases"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0: experts are built with this gate only"),
    ("gpt_oss", {"experts_per_token": 3}, "experts_per_token = 3: num_experts_per_tok is another number"),
    ("gpt_oss", {"sliding_window": None}, "no key 'sliding_window'"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: all layers are built with experts"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]: all layers are built with experts"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("qwen3_moe", {"norm_topk_prob": None}, "no key 'norm_topk_prob'"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes': must be true or false"),
    ("qwen3_moe", {"num_local_experts": None}, "no key 'num_experts'"),
    ("qwen3_moe", {"num_experts": 16}, "num_experts is 16 and num_local_experts 8"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "no key 'moe_intermediate_size'"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False: rotary pairs are read as neighbours"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy': experts are chosen by score and bias, in groups"),
    ("deepseek_v3", {"qk_head_dim": 64}, "qk_head_dim = 64: it is qk_nope_head_dim + qk_rope_head_dim"),
    ("deepseek_v3", {"q_lora_rank": 12}, "q_a_proj.weight: its shape is [24, 64], config.json makes it [12, 64]"),
    (
        "deepseek_v3",
        {"first_k_dense_replace": 2},
        "model.layers.1.mlp.gate_proj.weight: missing (it is dense_layers.1.mlp.gate",
    ),
    ("deepseek_v3", {"n_group": 3}, "n_group = 3, topk_group = 2: must divide the 8 experts"),
    ("deepseek_v3", {"topk_group": 5}, "n_group = 4, topk_group = 5: must divide the 8 experts"),
    (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "awq"}},
        "weights in FP8 with the scales of their blocks are read",
    ),
]


@pytest.mark.parametrize(("name", "change", "words"), WITH_EXPERTS, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_experts_that_are_not_understood_are_refused(tmp_path, name, change, words):
    folder = hugging_face.write(tmp_path, name, **change)
    with pytest.raises(HuggingFaceError, match=re.escape(words)):
        matched(open_folder(folder))


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_in_one_tensor_are_read(tmp_path, name):
    """transformers 5 writes each weight of all experts as one tensor, unless its option for version 4's form is on."""
    folder = hugging_face.write(tmp_path / "apart", name)
    (apart, _), model = matched(open_folder(folder)), open_folder(folder).model
    tensors = tensors_of(folder)
    together_ones = re.compile(r"params\.layers\.\d+\.mlp\.(router|gate|up|down)")
    kept = {e.theirs[0]: tensors[e.theirs[0]] for e in apart.values() if not together_ones.fullmatch(e.ours)}
    for i in range(model.stacked_layers):
        part = {name: apart[f"params.layers.{i}.mlp.{name}"].theirs for name in ("router", "gate", "up", "down")}
        of = {name: np.stack([tensors[x] for x in theirs]) for name, theirs in part.items()}
        block = f"model.layers.{model.dense_layers + i}.mlp."
        kept[block + "experts.gate_up_proj"] = np.concatenate([of["gate"], of["up"]], axis=1)
        kept |= {block + "experts.down_proj": of["down"], block + "gate.weight": of["router"][0]}
    together = tmp_path / "together"
    together.mkdir()
    shutil.copy(folder / "config.json", together)
    save_file(kept, together / "model.safetensors")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for name, a in open_origin(str(folder)).stored.items()
    }
    one, other = (open_origin(str(place)).read(abstract) for place in (folder, together))
    assert one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def in_fp8(folder, block):
    """Rewrite a folder's matrices in FP8 with a scale for each block. Returns the stored tensors, and their bfloat16 values."""
    tensors, stand_for = tensors_of(folder), {}
    for name, x in tensors.copy().items():
        if x.ndim == 2 and ("_proj" in name) and ".self_attn.kv_a" not in name:
            rows, columns = (-(-size // block) for size in x.shape)
            padded = np.zeros((rows * block, columns * block), np.float32)
            padded[: x.shape[0], : x.shape[1]] = x
            tiles = padded.reshape(rows, block, columns, block)
            scale = np.abs(tiles).max((1, 3)) / 448.0
            bits = (tiles / scale[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
            whole = (bits.astype(np.float32) * scale[:, None, :, None]).reshape(padded.shape)[: x.shape[0], : x.shape[1]]
            stand_for[name] = whole.astype(ml_dtypes.bfloat16)
            tensors[name] = np.ascontiguousarray(bits.reshape(padded.shape)[: x.shape[0], : x.shape[1]])
            tensors[name + "_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors")
    return tensors, stand_for


def test_weights_in_fp8_are_read_with_the_scales_of_their_blocks(tmp_path):
    """The blocks do not divide the matrices, and the last blocks are smaller. A missing scale is an error."""
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 24], "activation_scheme": "dynamic"}
    folder = hugging_face.write(tmp_path, "deepseek_v3", quantization_config=quantized)
    tensors, stand_for = in_fp8(folder, 24)
    assert len(stand_for) > 80
    opened = open_folder(folder)
    found, _ = matched(opened)
    for name, wanted in stand_for.items():
        np.testing.assert_array_equal(opened.read(name), wanted)
    down = found["params.layers.0.mlp.down"]
    assert opened.tensors[down.theirs[0]].holds == ml_dtypes.bfloat16
    got = down.to_ours([opened.read(name) for name in down.theirs], np.dtype(np.float32), (slice(None),) * 3)
    np.testing.assert_array_equal(got, np.stack([stand_for[name].astype(np.float32) for name in down.theirs]))
    gone = next(iter(stand_for)) + "_scale_inv"
    save_file({k: v for k, v in tensors.items() if k != gone}, folder / "model.safetensors")
    with pytest.raises(HuggingFaceError, match=f"there is no {gone}"):
        matched(open_folder(folder))
    save_file(tensors | {gone: np.ones((1, 1), np.float32)}, folder / "model.safetensors")
    with pytest.raises(HuggingFaceError, match="of a tensor .* in FP8: blocks of"):
        open_folder(folder).read(gone.removesuffix("_scale_inv"))


def test_layers_of_multi_token_prediction_are_left_out(tmp_path):
    """Published checkpoints have one layer more than config.json counts. Tensors of the extra layer are left out, with the
    reason.
    """
    folder = hugging_face.write(tmp_path, "deepseek_v3", num_nextn_predict_layers=0)
    extra = {"model.layers.4.enorm.weight": np.ones(64, np.float32)}
    save_file(tensors_of(folder) | extra, folder / "model.safetensors")
    why = "of multi-token prediction, and num_nextn_predict_layers is 0"
    assert matched(open_folder(folder))[1] == dict.fromkeys(extra, why)


def test_a_router_bias_stays_in_float32(tmp_path):
    """The bias stays in float32 beside bfloat16 weights, on import and export: rounding would choose other experts."""
    folder = hugging_face.write(tmp_path / "theirs", "deepseek_v3")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = {k: v if k.endswith("bias") else v.astype(ml_dtypes.bfloat16) for k, v in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors")
    importing.import_folder(open_folder(folder), tmp_path / "ours", "auto", lambda line: None)
    exporting.export(str(tmp_path / "ours"), tmp_path / "back", say=lambda line: None)
    back = tensors_of(tmp_path / "back")
    assert back.keys() == tensors.keys() and all(back[k].dtype == tensors[k].dtype for k in back)
    assert np.array_equal(back[bias], tensors[bias]) and bias in back


# Parts of published config.json files that matter here, as transformers 4 wrote them, with keys that later versions dropped.
PUBLISHED = {
    "gemma2": {"sliding_window_size": 6, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    "qwen2": {"use_mrope": False, "unsloth_version": "2024.9", "use_sliding_window": False, "layer_types": None},
    "mistral": {"sliding_window": None, "transformers.js_config": {}},
    "mixtral": {"sliding_window": None, "router_aux_loss_coef": 0.02},
    "gpt_oss": {"experts_per_token": 2, "initial_context_length": 8, "quantization_config": {"quant_method": "mxfp4"}},
    "qwen3_moe": {"max_window_layers": 48, "norm_topk_prob": True},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1, "seq_aux": True},
}
# Keys for which config.json must have a number: if they are missing, transformers uses a default that is not None.
SAID = {"gemma2": ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"), "mistral": ("sliding_window",)}


def test_published_configs_are_read():
    for name, more in PUBLISHED.items():
        model = model_of(hugging_face.settings(name, 4) | more)
        assert model.sliding_window == {"gemma2": 6, "gpt_oss": 7}.get(name, 0)
    plain = {k: v for k, v in hugging_face.settings("llama2").items() if k not in ("num_key_value_heads", "head_dim")}
    assert (model_of(plain).num_kv_heads, model_of(plain).head_dim) == (8, 8), "every query has a key of its own"
    for name, keys in SAID.items():
        for key in keys:
            with pytest.raises(HuggingFaceError, match=f"no key '{key}'. Add it, null where"):
                model_of({k: v for k, v in hugging_face.settings(name, 4).items() if k != key})
    windowed = {k: v for k, v in hugging_face.settings("qwen2", 4).items() if k not in ("layer_types", "max_window_layers")}
    with pytest.raises(HuggingFaceError, match="max_window_layers"):
        model_of(windowed)
    with pytest.raises(HuggingFaceError, match="use_mrope = True"):
        model_of(hugging_face.settings("qwen2", 4) | {"use_mrope": True})
    with pytest.raises(HuggingFaceError, match="sliding_window_size = 7: sliding_window is 6"):
        model_of(hugging_face.settings("gemma2", 4) | {"sliding_window_size": 7})
    assert model_of(hugging_face.settings("gemma2", 4) | {"query_pre_attn_scalar": 25}).attn_logit_scale == 0.2
    with pytest.raises(HuggingFaceError, match="query_pre_attn_scalar = 0: must be above 0"):
        model_of(hugging_face.settings("gemma2", 4) | {"query_pre_attn_scalar": 0})


def test_files_that_are_damaged_are_refused(tmp_path):
    def refused(words, folder):
        with pytest.raises(HuggingFaceError, match=words):
            matched(open_folder(folder))

    whole = hugging_face.write(tmp_path / "whole", "llama2")
    file, data = whole / "model.safetensors", (whole / "model.safetensors").read_bytes()
    file.write_bytes(data[:-1000])
    refused("cut off: .* ends at byte", whole)
    file.write_bytes(data[:100])
    refused("cut off in its header", whole)
    file.write_bytes(data)
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}, file)
    assert list(matched(open_folder(whole))[1].values()) == ["follows from config.json"]
    save_file({k: v for k, v in tensors.items() if "norm" in k}, file)
    refused("embed_tokens.weight: missing", whole)
    save_file({k: v.astype(np.float64) for k, v in tensors.items()}, file)
    refused("has dtype F64; F32, BF16, F16, U8, F8_E4M3 are supported", whole)
    file.unlink()
    refused("has neither model.safetensors nor model.safetensors.index.json", whole)
    save_file(tensors, whole / "a.safetensors")
    index = whole / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*tensors, "more"], "a.safetensors")}))
    refused("more should be in a.safetensors", whole)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "b.safetensors")}))
    refused("no such file, but the index names it", whole)
    refused("no such folder. Name a model's folder, or hf:NAME", tmp_path / "nothere")


# ---- Tokenizers


def test_the_byte_tokenizer_is_exported_as_one_of_theirs(tmp_path):
    folders.write_byte_tokenizer(tmp_path)
    theirs, ours = load_tokenizer(str(tmp_path)), ByteTokenizer()
    text = "déjà vu\n\t\x00 日本 <|endoftext|>" + "".join(map(chr, range(300)))
    assert theirs.encode(text) == ours.encode(text) and theirs.eot == ours.eot
    assert theirs.decode(ours.encode(text)) == text


def test_a_lone_tokenizer_is_completed(tmp_path):
    """A tokenizer.json alone is exported with a tokenizer_config.json, which names its class and its end-of-text token. The
    end-of-text token is the control token, not the ordinary piece `</s>`.
    """
    folders.write_byte_tokenizer(tmp_path / "whole")
    described = json.loads((tmp_path / "whole" / "tokenizer.json").read_text())
    described["model"]["vocab"]["</s>"] = 257  # a piece of HTML, as in Gemma's vocabulary
    (tmp_path / "mine.json").write_text(json.dumps(described))
    spec = str(tmp_path / "mine.json")
    assert load_tokenizer(spec).eot == 256
    (tmp_path / "out").mkdir()
    folders.write_tokenizer(spec, 256, tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out")).sha256 == load_tokenizer(spec).sha256
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}


def test_an_import_that_is_killed_leaves_no_checkpoint_without_its_tokenizer(tmp_path, monkeypatch):
    theirs, out = hugging_face.write(tmp_path / "theirs", "llama", vocab=264), tmp_path / "ours"
    folders.write_byte_tokenizer(theirs)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(importing, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        importing.import_folder(open_folder(theirs), out, "auto", lambda line: None)
    assert (out / "tokenizer" / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()


# ---- Tokens


UNREADABLE = {
    "missing": None,
    "empty": b"",
    "garbage": b"garbage",
    "zip": b"PK\x03\x04",
    "header": b"\x93NUMPY\x01\x00\x03\x00{'\n",
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_tokens_that_cannot_be_read_are_refused_by_name(tmp_path, capsys, content):
    folder, tokens = hugging_face.write(tmp_path / "theirs", "llama"), tmp_path / "t.npy"
    if content is not None:
        tokens.write_bytes(content)
    for args in (["logits", str(folder), f"--out={tmp_path / 'l.npy'}"], ["check", str(folder), str(folder)]):
        assert command.main([*args, f"--tokens={tokens}"]) == 2
        said = capsys.readouterr().err
        assert f"{tokens}: cannot be read as .npy: " in said and "pickle" not in said


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
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "deepseek_v3": 671_026_419_200,  # without the multi-token prediction layer
    "kimi_k2": 1_026_408_232_448,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 4_300_079_472 - VISION - 1152 * (2560 + 1),
    "gemma3_12b": 12_187_325_040 - VISION - 1152 * (3840 + 1),
    "gemma3_27b": 27_432_406_640 - VISION - 1152 * (5376 + 1),
}


def test_presets_have_the_published_sizes(capsys):
    assert {name: flops.parameters(Model(**keys))["total"] for name, keys in presets().items()} == PARAMETERS
    assert command.main(["presets"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[1:]] == list(PARAMETERS)
    assert listed[1 + list(PARAMETERS).index("qwen3_30b_a3b")].split()[1:7] == ["qwen3_moe", "30.53", "G", "3.35", "G", "48"]
    assert "\n".join(listed) in (ROOT / "docs" / "presets.md").read_text()


def test_a_config_starts_from_a_preset_by_name(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxtrain.config import default_config\nfrom jaxtrain.models import preset\n"
        "def get_config(arg=None):\n    config = default_config()\n    config.model.update(preset(arg))\n    return config\n"
    )
    run = launch.load([f"--config={file}:gemma3_4b"]).run
    assert (run.model.family, run.model.num_layers, run.model.attention_pattern) == ("gemma3", 34, "lllllg")
    assert main.main([f"--config={file}:llama3_71b", f"--workdir={tmp_path}"]) == 2
    assert "preset = 'llama3_71b': no such preset. Known: llama2_7b, " in capsys.readouterr().err


@pytest.mark.parametrize("name", FAMILIES)
def test_presets_read_back(name):
    """A preset that is written as config.json reads back as the same preset."""
    if name not in models.FAMILIES:
        return
    run = config.RunConfig()
    for keys in family(name).PRESETS.values():
        tree = config.default_config()
        tree.model.update(keys | {"family": name})
        run, problems = config.resolve(tree)
        assert not problems and exporting.config_json(run, "bf16", 0)["model_type"]
    changes = {
        "gemma2": ({"attn_logit_scale": 0.0}, {"attn_logit_scale": 0.3}, {"attention_pattern": "lglg"}),
        "gemma3": ({"num_layers": 4},),
    }
    for change in changes.get(name, ()):
        model = dataclasses.replace(run.model, **change)
        assert exporting.config_json(dataclasses.replace(run, model=model), "f32", 0)["num_hidden_layers"] == model.num_layers


# ---- Adapters


def test_experts_have_no_adapters(tmp_path, capsys):
    """Neither lora.targets nor PEFT files, which name the experts, can give experts adapters."""
    folder = hugging_face.write(tmp_path / "theirs", "mixtral", vocab=264)
    args = [f"--config={ROOT / 'configs' / 'finetune.py'}:base={folder},lora=3", f"--workdir={tmp_path / 'run'}"]
    assert main.main([*args, "--config.data.source=synthetic", "--config.paths.cache="]) == 2
    shown = capsys.readouterr().err
    assert "the weights of experts take no adapters, and gate, up, down are theirs. Name weights of attention" in shown
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    layer = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1"
    halves = {".lora_A.weight": np.zeros((2, 64), np.float32), ".lora_B.weight": np.zeros((96, 2), np.float32)}
    save_file({layer + half: x for half, x in halves.items()}, adapter / "adapter_model.safetensors")
    args = ["import-adapter", str(adapter), f"--base={folder}", f"--out={tmp_path / 'out'}"]
    assert command.main(args) == 2
    assert "experts.0.w1.lora_A.weight adapts experts, which have no adapters in jaxtrain" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
