"""Hugging Face folders: what is read of config.json and tensors, what is refused by name, presets, tokenizers."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import hugging_face
import jax
import numpy as np
import pytest
from hugging_face import EXPERTS, FAMILIES, TOKENS, tensors_of
from safetensors.numpy import load_file, save_file

from jaxtrain import config, flops, main
from jaxtrain.config import Model
from jaxtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxtrain.hf import __main__ as command
from jaxtrain.hf import exporting, tokenizer_files
from jaxtrain.hf.folder import model_of, open_folder
from jaxtrain.hf.loading import matched
from jaxtrain.hf.origin import open_origin
from jaxtrain.models import family
from jaxtrain.models.hugging_face import HuggingFaceError

ROOT = Path(__file__).resolve().parents[2]
SEGMENTS = np.ones_like(TOKENS)


@pytest.mark.parametrize("name", FAMILIES)
def test_configs_of_transformers_4_and_5_say_the_same(name):
    assert model_of(hugging_face.settings(name, 4)) == model_of(hugging_face.settings(name, 5))


# ---- What is refused, by name


REFUSED = [
    ({"model_type": "gpt2"}, "model_type = 'gpt2': no such architecture in jaxtrain"),
    ({"model_type": "gemma3", "text_config": {}}, "models that see or hear are not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM is a language model"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu': models of this family are built with 'silu' only"),
    ({"attention_bias": True}, "attention_bias = True: biases on attention's projections"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"attention_dropout": 0.1}, "attention_dropout = 0.1: jaxtrain has no dropout"),
    ({"residual_multiplier": 2.0}, "unknown key residual_multiplier = 2.0"),
    ({"quantization_config": {"quant_method": "fp8"}}, "unknown key quantization_config"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type = 'yarn': is not supported"),
    ({"rope_parameters": {"rope_type": "default"}}, "no rope_theta, neither by itself nor in rope_parameters"),
    ({"rope_parameters": None}, "no rope_theta"),
    ({"rope_theta": 5.0}, "rope_theta is 5.0 in the manner of transformers 4 and 777.0 in rope_parameters"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0}}, "no key 'low_freq_factor'"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "beta": 1}}, "unknown key beta = 1"),
    ({"partial_rotary_factor": 0.5}, "unknown key partial_rotary_factor = 0.5"),
    ({"tie_word_embeddings": None}, "no key 'tie_word_embeddings'"),
    ({"rms_norm_eps": None}, "no key 'rms_norm_eps'"),
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
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: all layers are built with experts"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]: all layers are built with experts"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("qwen3_moe", {"norm_topk_prob": None}, "no key 'norm_topk_prob'"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes': must be true or false"),
    ("qwen3_moe", {"num_local_experts": None}, "no key 'num_experts'"),
    ("qwen3_moe", {"num_experts": 16}, "num_experts is 16 and num_local_experts 8"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "no key 'moe_intermediate_size'"),
]


@pytest.mark.parametrize(("name", "change", "words"), WITH_EXPERTS, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_experts_that_are_not_understood_are_refused(tmp_path, name, change, words):
    folder = hugging_face.write(tmp_path, name, **change)
    with pytest.raises(HuggingFaceError, match=re.escape(words)):
        matched(open_folder(folder))


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_in_one_tensor_are_read(tmp_path, name):
    """As transformers 5 writes them where it is told not to write as version 4 did."""
    folder = hugging_face.write(tmp_path / "apart", name)
    apart, model = matched(open_folder(folder)), open_folder(folder).model
    tensors = tensors_of(folder)
    kept = {e.theirs[0]: tensors[e.theirs[0]] for e in apart.used.values() if ".mlp." not in e.ours}
    for i in range(model.num_layers):
        part = {name: apart.used[f"params.layers.{i}.mlp.{name}"].theirs for name in ("router", "gate", "up", "down")}
        of = {name: np.stack([tensors[x] for x in theirs]) for name, theirs in part.items()}
        block = f"model.layers.{i}.mlp."
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


# As published, by what matters here: what transformers 4 wrote, with keys that later ones dropped.
PUBLISHED = {
    "gemma2": {"sliding_window_size": 6, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    "qwen2": {"use_mrope": False, "unsloth_version": "2024.9", "use_sliding_window": False, "layer_types": None},
    "mistral": {"sliding_window": None, "transformers.js_config": {}},
    "mixtral": {"sliding_window": None, "router_aux_loss_coef": 0.02},
    "qwen3_moe": {"max_window_layers": 48, "norm_topk_prob": True},
}
# Keys that say a number where they are not: transformers has another one than none for each.
SAID = {"gemma2": ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"), "mistral": ("sliding_window",)}


def test_published_configs_are_read():
    for name, more in PUBLISHED.items():
        model = model_of(hugging_face.settings(name, 4) | more)
        assert model.sliding_window == (6 if name == "gemma2" else 0)
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
    assert list(matched(open_folder(whole)).unused.values()) == ["follows from config.json"]
    save_file({k: v for k, v in tensors.items() if "norm" in k}, file)
    refused("embed_tokens.weight: missing", whole)
    save_file({k: v.astype(np.float64) for k, v in tensors.items()}, file)
    refused("has dtype F64; F32, BF16, F16 are supported", whole)
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
    tokenizer_files.write_byte_tokenizer(tmp_path)
    theirs, ours = load_tokenizer(str(tmp_path)), ByteTokenizer()
    text = "déjà vu\n\t\x00 日本 <|endoftext|>" + "".join(map(chr, range(300)))
    assert theirs.encode(text) == ours.encode(text) and theirs.eot == ours.eot
    assert theirs.decode(ours.encode(text)) == text


def test_a_lone_tokenizer_is_completed(tmp_path):
    """Without tokenizer_config.json transformers would go by the model's type; what ends a text are control tokens first."""
    tokenizer_files.write_byte_tokenizer(tmp_path / "whole")
    described = json.loads((tmp_path / "whole" / "tokenizer.json").read_text())
    described["model"]["vocab"]["</s>"] = 257  # a piece of HTML, as in Gemma
    (tmp_path / "mine.json").write_text(json.dumps(described))
    spec = str(tmp_path / "mine.json")
    assert load_tokenizer(spec).eot == 256
    (tmp_path / "out").mkdir()
    tokenizer_files.complete(spec, 256, tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out")).sha256 == load_tokenizer(spec).sha256
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}


def test_presets_have_the_published_sizes():
    """Parameters as the model cards' safetensors indexes count them."""
    published = {
        ("llama", "llama32_3b"): 3_212_749_824,
        ("llama", "llama31_405b"): 405_853_388_800,
        ("mistral", "mistral_7b"): 7_241_732_096,
        ("mixtral", "mixtral_8x7b"): 46_702_792_704,
        ("mixtral", "mixtral_8x22b"): 140_620_634_112,
        ("qwen2", "qwen25_500m"): 494_032_768,
        ("qwen3", "qwen3_8b"): 8_190_735_360,
        ("qwen3_moe", "qwen3_30b_a3b"): 30_532_122_624,
        ("qwen3_moe", "qwen3_235b_a22b"): 235_093_634_560,
        ("gemma2", "gemma2_2b"): 2_614_341_888,
        ("gemma3", "gemma3_1b"): 999_885_952,
    }
    for (name, preset), count in published.items():
        assert flops.parameters(Model(**family(name).PRESETS[preset]))["total"] == count


@pytest.mark.parametrize("name", FAMILIES)
def test_presets_read_back(name):
    """What a preset is written as reads as itself."""
    if name == "llama2":
        return
    for preset in family(name).PRESETS.values():
        tree = config.default_config()
        tree.model.update(preset | {"family": name})
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
    """Neither by lora.targets nor of PEFT, in whose files they are named."""
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
