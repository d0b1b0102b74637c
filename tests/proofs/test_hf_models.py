"""Hugging Face models in and out: all families give the logits of transformers, and come back as they were."""

import dataclasses
import os
import stat
from pathlib import Path

import helpers
import hugging_face
import numpy as np
import pytest
from hugging_face import FAMILIES, SAME, TOKENS, exported, imported, off, tensors_of

from jaxtrain.hf import __main__ as command
from jaxtrain.hf import exporting
from jaxtrain.hf.folder import open_folder
from jaxtrain.hf.importing import import_folder
from jaxtrain.hf.logits import logits_of, model_logits
from jaxtrain.hf.model import run_at
from jaxtrain.models import family
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.structure import Structure

ROOT = Path(__file__).resolve().parents[2]
SEGMENTS = np.ones_like(TOKENS)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, name):
    _, logits = model_logits(str(hugging_face.write(tmp_path, name)), "f32")
    assert off(logits(TOKENS, SEGMENTS), name) < SAME


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
    ("gemma2", {"attn_logit_scale": 0.0}),
    ("gemma2", {"attention_pattern": "gl"}),
    ("gemma2", {"sandwich_norm": False}),
    ("gemma2", {"norm_offset": False}),
    ("gemma2", {"scaled_embedding": False}),
    ("gemma2", {"activation": "silu"}),
    ("gemma3", {"local_rope_base": 0.0}),
    ("gemma3", {"sliding_window": 7}),
    ("gemma3", {"rope_factor": 4.0}),
    ("gemma3", {"qk_norm": False}),
]


@pytest.mark.parametrize(("name", "change"), OFF, ids=lambda x: x if isinstance(x, str) else ",".join(x))
@pytest.mark.more
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
    run = dataclasses.replace(run, moe=dataclasses.replace(run.moe, capacity_factor=0.5))
    assert off(logits_of(run, path, "f32")(TOKENS, SEGMENTS), "mixtral") < SAME


@pytest.mark.parametrize("name", helpers.few(FAMILIES, "qwen2", "gemma3", "mixtral"))
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


def test_logits_command(tmp_path, capsys):
    folder = hugging_face.write(tmp_path / "a", "mistral")
    np.save(tmp_path / "t.npy", TOKENS)
    args = ["logits", str(folder), f"--tokens={tmp_path / 't.npy'}", f"--out={tmp_path / 'l.npy'}"]
    assert command.main(args) == 0
    assert off(np.load(tmp_path / "l.npy"), "mistral") < SAME
    np.save(tmp_path / "t.npy", TOKENS + 100)
    assert command.main(args) == 2
    assert "the model's vocabulary has 128" in capsys.readouterr().err


def test_a_key_that_is_missing_can_be_said(tmp_path, capsys):
    """Llama 2's config.json has no rope_theta."""
    folder = hugging_face.write(tmp_path / "theirs", "llama2", rope_parameters=None)
    args = ["import", str(folder), f"--out={tmp_path / 'ours'}"]
    assert command.main(args) == 2
    assert "--set rope_theta=10000.0" in capsys.readouterr().err
    assert command.main([*args, "--set", "rope_theta=777.0"]) == 0
    _, logits = model_logits(str(tmp_path / "ours"), "f32")
    assert off(logits(TOKENS, SEGMENTS), "llama2") < SAME


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
