"""Hugging Face models in and out: all families give the logits of transformers, and what is not understood is not read."""

import dataclasses
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import helpers
import hugging_face
import jax
import numpy as np
import pytest
from hugging_face import EXPERTS, FAMILIES, GOLDEN, TOKENS
from safetensors.numpy import load_file, save_file

from jaxtrain import config, flops, main
from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config import Model
from jaxtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxtrain.hf import __main__ as command
from jaxtrain.hf import exporting, tokenizer_files
from jaxtrain.hf.folder import model_of, open_folder
from jaxtrain.hf.importing import import_folder
from jaxtrain.hf.loading import matched
from jaxtrain.hf.logits import logits_of, model_logits
from jaxtrain.hf.model import run_at
from jaxtrain.hf.origin import open_origin
from jaxtrain.models import family
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.structure import Structure
from jaxtrain.start import Start, initial_state
from jaxtrain.step import place_batch

ROOT = Path(__file__).resolve().parents[2]
SEGMENTS = np.ones_like(TOKENS)
SAME = 1e-4


def off(logits, name):
    return float(np.abs(logits - GOLDEN[name]).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, name):
    _, logits = model_logits(str(hugging_face.write(tmp_path, name)), "f32")
    assert off(logits(TOKENS, SEGMENTS), name) < SAME


@pytest.mark.parametrize("name", FAMILIES)
def test_configs_of_transformers_4_and_5_say_the_same(name):
    assert model_of(hugging_face.settings(name, 4)) == model_of(hugging_face.settings(name, 5))


# Family -> what is switched off: keys of config.Model, or parts of the family's structure.
OFF = [
    ("llama", {"rope_scaling": "none"}),
    ("llama", {"rope_base": 10_000.0}),
    ("mistral", {"sliding_window": 0}),
    ("mixtral", {"sliding_window": 0}),
    ("mixtral", {"renormalize": False}),
    ("mixtral", {"experts_per_token": 1}),
    ("qwen2", {"attention_pattern": ""}),
    ("qwen3", {"qk_norm": False}),
    ("qwen3", {"rope_scaling": "none"}),
    ("qwen3_moe", {"qk_norm": False}),
    ("qwen3_moe", {"renormalize": True}),
    ("qwen3_moe", {"router": "sigmoid"}),
    ("gemma2", {"attention_softcap": 0.0}),
    ("gemma2", {"logit_softcap": 0.0}),
    ("gemma2", {"query_scale": 0.0}),
    ("gemma2", {"attention_pattern": "gl"}),
    ("gemma2", {"post_norms": False}),
    ("gemma2", {"norm_offset": False}),
    ("gemma2", {"scaled_embedding": False}),
    ("gemma2", {"activation": "silu"}),
    ("gemma3", {"local_rope_base": 0.0}),
    ("gemma3", {"sliding_window": 7}),
    ("gemma3", {"rope_factor": 4.0}),
    ("gemma3", {"qk_norm": False}),
]


@pytest.mark.parametrize(("name", "change"), OFF, ids=lambda x: x if isinstance(x, str) else ",".join(x))
def test_without_any_one_option_they_are_not(tmp_path, name, change, monkeypatch):
    path = str(hugging_face.write(tmp_path, name))
    run, _ = run_at(path)
    of_family = {k: v for k, v in change.items() if k in {f.name for f in dataclasses.fields(Structure)}}
    if of_family:
        module = family(run.model.family)
        monkeypatch.setattr(module, "STRUCTURE", dataclasses.replace(module.STRUCTURE, **of_family))
    else:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, **change))
    assert off(logits_of(run, path, "f32")(TOKENS[:1], SEGMENTS[:1]), name) > 100 * SAME


def test_documents_of_a_row_do_not_see_each_other(tmp_path):
    """Segments: each document's logits are those of the document by itself."""
    _, logits = model_logits(str(hugging_face.write(tmp_path, "gemma3")), "f32")
    segments = np.repeat([[1, 2]], (20, 12), axis=1)
    both = logits(TOKENS[:1], segments)
    apart = [logits(TOKENS[:1, part], np.ones_like(segments[:, part])) for part in (slice(0, 20), slice(20, 32))]
    assert np.abs(both - np.concatenate(apart, axis=1)).max() < SAME


def test_logits_are_those_of_all_experts_whatever_capacity_a_run_had(tmp_path):
    path = str(hugging_face.write(tmp_path, "mixtral"))
    run, _ = run_at(path)
    run = dataclasses.replace(run, experts=dataclasses.replace(run.experts, capacity=0.5))
    assert off(logits_of(run, path, "f32")(TOKENS, SEGMENTS), "mixtral") < SAME


def lines():
    out: list[str] = []
    return out, out.append


def imported(tmp_path, name, dtype="auto", **changes):
    """A folder, and the checkpoint made of it."""
    folder = hugging_face.write(tmp_path / "theirs", name, **changes)
    said, say = lines()
    import_folder(open_folder(folder), tmp_path / "ours", dtype, say)
    return folder, tmp_path / "ours", said


def exported(ckpt, out, **how):
    said, say = lines()
    base = how.pop("base", "")
    given = {"dtype": "auto", "shard_bytes": 10**9, "tokenizer": "", "force": False} | how
    exporting.export(exporting.open_source(str(ckpt), base), out, **given, say=say)
    return said


def tensors_of(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip(tmp_path, name):
    """Imported and exported: the same tensors bit for bit, a config that reads the same, and transformers' own logits."""
    folder, ours, said = imported(tmp_path, name)
    assert "0 unused, 0 missing; stored as f32" in said[0]
    out = tmp_path / "back"
    exported(ours, out, shard_bytes=100_000)
    before, after = tensors_of(folder), tensors_of(out)
    assert before.keys() == after.keys() and len(list(out.glob("*.safetensors"))) > 1
    assert all(np.array_equal(before[k].view(np.uint32), after[k].view(np.uint32)) for k in before)
    assert open_folder(out).model == dataclasses.replace(open_folder(folder).model, init_std=open_folder(out).model.init_std)


def test_transformers_computes_the_same_before_and_after(tmp_path):
    """Of every family, by transformers itself: the logits of what was exported are those of what was imported, bit for bit."""
    hugging_face.reference()
    pairs = []
    for name in FAMILIES:
        folder, ours, _ = imported(tmp_path / name, name)
        exported(ours, tmp_path / name / "back")
        pairs += [folder, tmp_path / name / "back"]
    np.save(tmp_path / "tokens.npy", TOKENS)
    hugging_face.ask(ROOT / "tests" / "reference" / "logits.py", tmp_path / "tokens.npy", *pairs)
    for name in FAMILIES:
        theirs, ours = (np.load(tmp_path / name / x / "logits.npy") for x in ("theirs", "back"))
        assert np.array_equal(theirs, ours), name
        # The torch of another day may add up in another order.
        assert np.abs(theirs - GOLDEN[name]).max() < 1e-5, name


@pytest.mark.more
def test_check_compares_with_transformers(tmp_path, capsys, monkeypatch):
    folder, ours, _ = imported(tmp_path, "qwen3")
    monkeypatch.setenv("JAXTRAIN_REFERENCE_PYTHON", hugging_face.reference())
    assert command.main(["check", str(ours), str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "the likeliest token is the same at 100.0% of 128 positions" in shown and len(shown.splitlines()) == 66
    other = hugging_face.write(tmp_path / "other", "qwen3", rope_parameters={"rope_type": "default", "rope_theta": 3000.0})
    assert command.main(["check", str(ours), str(other)]) == 1
    assert "not the same model" in capsys.readouterr().out


def test_check_without_transformers_says_so(tmp_path, capsys):
    folder = hugging_face.write(tmp_path / "a", "llama2")
    assert command.main(["check", str(folder), str(folder), f"--python={sys.executable}"]) == 2
    assert "Name an interpreter that has transformers and torch" in capsys.readouterr().err


def test_logits_command(tmp_path, capsys):
    folder = hugging_face.write(tmp_path / "a", "mistral")
    np.save(tmp_path / "t.npy", TOKENS)
    args = ["logits", str(folder), f"--tokens={tmp_path / 't.npy'}", f"--out={tmp_path / 'l.npy'}"]
    assert command.main(args) == 0
    assert off(np.load(tmp_path / "l.npy"), "mistral") < SAME
    np.save(tmp_path / "t.npy", TOKENS + 100)
    assert command.main(args) == 2
    assert "the model's vocabulary has 128" in capsys.readouterr().err


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


def test_a_key_that_is_missing_can_be_said(tmp_path, capsys):
    """Llama 2's config.json has no rope_theta."""
    folder = hugging_face.write(tmp_path / "theirs", "llama2", rope_parameters=None)
    args = ["import", str(folder), f"--out={tmp_path / 'ours'}"]
    assert command.main(args) == 2
    assert "--set rope_theta=10000.0" in capsys.readouterr().err
    assert command.main([*args, "--set", "rope_theta=777.0"]) == 0
    _, logits = model_logits(str(tmp_path / "ours"), "f32")
    assert off(logits(TOKENS, SEGMENTS), "llama2") < SAME


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
    refused("no such folder, and no model of that name", tmp_path / "nothere")


def test_export_refuses_what_no_family_holds(tmp_path):
    run = helpers.tiny({"model.qk_norm": True})
    with pytest.raises(HuggingFaceError, match="model.qk_norm = True: transformers' Llama has False only"):
        exporting.config_json(run, "f32", None)
    _, ours, _ = imported(tmp_path, "llama2")
    exported(ours, tmp_path / "back")
    with pytest.raises(HuggingFaceError, match="is there already"):
        exported(ours, tmp_path / "back")
    exported(ours, tmp_path / "back", force=True)
    with pytest.raises(HuggingFaceError, match="--force replaces nothing else"):
        exported(ours, ours, force=True)
    with pytest.raises(HuggingFaceError, match="is there already, and not empty"):
        imported(tmp_path, "llama2")


def test_the_umask_says_who_may_read_what_is_exported(tmp_path):
    _, ours, _ = imported(tmp_path, "llama")
    before = os.umask(0o027)
    try:
        exported(ours, tmp_path / "out", shard_bytes=100_000, tokenizer="byte")
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(modes)
    assert set(modes.values()) == {0o640}, modes


def test_types_are_rounded_only_where_asked(tmp_path):
    folder, ours, _ = imported(tmp_path, "llama")
    said = exported(ours, tmp_path / "half", dtype="bf16")
    assert "rounded from float32" in said[-1]
    half = open_folder(tmp_path / "half")
    assert half.dtype(half.tensors) == "bf16" and half.bytes * 2 == open_folder(folder).bytes
    import_folder(half, tmp_path / "again", "auto", lambda line: None)
    assert {str(a.dtype) for a in exporting.open_source(str(tmp_path / "again")).stored.values()} == {"bfloat16"}


# ---- Training from what was imported


@pytest.mark.more
def test_thirty_steps_follow_torch(tmp_path):
    """AdamW from an imported model on transformers' batches, beside torch.optim.AdamW: within 1e-4 of each loss."""
    for name in ("llama2", "gemma2", "mixtral"):
        folder = hugging_face.write(tmp_path / name, name, scale=0.3)
        shape = {f"model.{k}": v for k, v in dataclasses.asdict(open_folder(folder).model).items()}
        how = {
            "data.seq_len": 32,
            "train.global_batch": 4,
            "mesh.fsdp": 2,
            "optimizer.lr": 1e-3,
            "optimizer.schedule": "constant",
        }
        how |= {"optimizer.warmup_steps": 0, "optimizer.weight_decay": 0.1, "train.steps": 30, "data.packing": "none"}
        how |= {"experts.balance_loss": 0.0, "experts.z_loss": 0.0}  # transformers' own are not minimised unless asked for
        run = helpers.tiny(shape | how | {"init.from": str(folder)})
        made, step = helpers.program(run), helpers.train_step(run)
        state = initial_state(run, made, Start(0, False, False, 0, (), {}), None, lambda line: None)
        losses = []
        for i in range(30):
            rows = hugging_face.random_tokens(128, (4, 33), seed=100 + i % 3)
            ones = np.ones((4, 32), np.int32)
            batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "segments": ones, "weights": ones.astype(np.float32)}
            batch["positions"] = np.broadcast_to(np.arange(32, dtype=np.int32), (4, 32)).copy()
            state, values = step(state, place_batch(batch, made.batch, made.context))
            losses.append(float(values["loss"]))
        wanted = GOLDEN[f"{name}_adamw"]
        assert wanted[-1] < wanted[0] - 0.3  # it learns
        assert np.abs(np.array(losses) / wanted - 1).max() < 1e-4, name


@pytest.mark.more
def test_import_streams(tmp_path):
    """Host memory of an import onto 8 devices, the arrays included, stays below 1.3 times the checkpoint's size.

    Of a checkpoint large enough that the programs of the digests (some 80 MB) and Orbax (50 MB) are little beside it.
    """
    args = [sys.executable, "-m", "benchmarks.import_memory", "--gigabytes=0.8", f"--folder={tmp_path}"]
    ended = subprocess.run(args, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["devices"] == 8 and report["peak_over_size"] < 1.3, report


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
    changes = {"gemma2": ({"query_scale": 0.0}, {"attention_pattern": "lglg"}), "gemma3": ({"num_layers": 4},)}
    for change in changes.get(name, ()):
        model = dataclasses.replace(run.model, **change)
        assert exporting.config_json(dataclasses.replace(run, model=model), "f32", 0)["num_hidden_layers"] == model.num_layers


@pytest.mark.more
def test_a_run_starts_from_a_folder_and_stretches_its_context(tmp_path, capsys):
    """init.from with a Hugging Face folder, and sequences sixteen times as long as it was trained with."""
    folder = hugging_face.write(tmp_path / "theirs", "llama2", scale=0.3, vocab=264)
    model = {k: v for k, v in dataclasses.asdict(open_folder(folder).model).items() if v not in ("", 0, 0.0)}
    model |= {"rope_scaling": "llama3", "rope_factor": 16.0, "rope_original_len": 64}
    keys = {f"model.{k}": v for k, v in model.items()}
    keys |= {"data.source": "synthetic", "data.seq_len": 1024, "train.global_batch": 8, "train.steps": 2}
    keys |= {"optimizer.warmup_steps": 1, "eval.every_steps": 0, "sample.max_tokens": 0, "init.from": folder, "paths.cache": ""}
    args = [f"--config={ROOT / 'configs' / 'tiny.py'}", f"--workdir={tmp_path / 'run'}"]
    args += [f"--config.{k}={v}" for k, v in keys.items()]
    code = main.main(args)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert f"initial weights from {folder}" in shown.out
    assert "model.rope_scaling: 'none' in init.from, 'llama3' here" in shown.out
    shutil.rmtree(tmp_path / "run")
    assert main.main([*args, "--config.model.d_ff=64"]) == 2
    assert "does not fit this model" in capsys.readouterr().err
    assert main.main([*args, "--config.model.family=gemma2"]) == 2
    assert "which computes otherwise" in capsys.readouterr().err
    assert main.main([*args, "--config.init.what=weights+optimizer"]) == 2
    assert "holds no optimizer's state" in capsys.readouterr().err


# ---- Adapters


@pytest.mark.parametrize("name", ["qwen2", pytest.param("mixtral", marks=pytest.mark.more)])
def test_adapters_go_to_peft_and_come_back(tmp_path, name, capsys):
    """A LoRA run on a Hugging Face base: its merged export is base and adapter in PEFT, whose format comes back as it was."""
    folder = hugging_face.write(tmp_path / "theirs", name, scale=0.3, vocab=264)
    config_file = ROOT / "configs" / "finetune.py"
    keys = {"data.source": "synthetic", "data.seq_len": 64, "train.global_batch": 8, "train.steps": 4, "paths.cache": ""}
    keys |= {"optimizer.lr": 0.02, "optimizer.warmup_steps": 1, "eval.every_steps": 0, "sample.max_tokens": 0, "mesh.fsdp": 8}
    keys |= {"lora.targets": "wq,wk,wv,wo"} if name in EXPERTS else {}
    args = [f"--config={config_file}:base={folder},lora=3", f"--workdir={tmp_path / 'run'}"]
    assert main.main([*args, *(f"--config.{k}={v}" for k, v in keys.items())]) == 0, capsys.readouterr().err
    exported(tmp_path / "run", tmp_path / "merged")
    assert command.main(["export-adapter", str(tmp_path / "run"), f"--out={tmp_path / 'adapter'}"]) == 0
    args = ["import-adapter", str(tmp_path / "adapter"), f"--base={folder}", f"--out={tmp_path / 'again'}"]
    assert command.main(args) == 0
    exported(tmp_path / "again", tmp_path / "merged-again")
    base, merged, again = (tensors_of(p) for p in (folder, tmp_path / "merged", tmp_path / "merged-again"))
    assert merged.keys() == base.keys() and all(np.array_equal(merged[k], again[k]) for k in merged)
    changed = {k for k in base if not np.array_equal(base[k], merged[k])}
    assert changed == {k for k in base if "_proj.weight" in k}
    other = hugging_face.write(tmp_path / "other", name, scale=0.31, vocab=264)
    with pytest.raises(CheckpointError, match="are not those that the adapters of step 4 were trained beside"):
        exported(tmp_path / "run", tmp_path / "none", base=str(other))

    hugging_face.reference()
    np.save(tmp_path / "tokens.npy", TOKENS)
    script = ROOT / "tests" / "reference" / "peft_logits.py"
    hugging_face.ask(script, tmp_path / "tokens.npy", folder, tmp_path / "adapter", tmp_path / "peft.npz")
    theirs = np.load(tmp_path / "peft.npz")
    for weight in changed:
        # Both add in float32: the last bit of a sum of three products.
        np.testing.assert_allclose(merged[weight], theirs[f"weight.{weight}"], rtol=0, atol=3e-7)
    _, logits = model_logits(str(tmp_path / "merged"), "f32")
    beside = model_logits(str(tmp_path / "run"), "f32")[1](TOKENS, SEGMENTS)
    assert np.abs(logits(TOKENS, SEGMENTS) - theirs["merged"]).max() < SAME
    assert np.abs(beside - theirs["logits"]).max() < SAME


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
