"""Import and export of Hugging Face models: all families give transformers' logits, and a round trip changes nothing."""

import dataclasses
import json
import math
import os
import stat
from pathlib import Path

import helpers
import hugging_face
import jax
import numpy as np
import pytest
import saved
from hugging_face import DOCUMENTS, FAMILIES, GOLDEN, SAME, TOKENS, YARN, exported, imported, off, tensors_of

from jaxtrain import main, sample
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.checkpoint.storage import Storage
from jaxtrain.hf import __main__ as command
from jaxtrain.hf import exporting, peft
from jaxtrain.hf.folder import describe, is_folder, model_of, open_folder, write_byte_tokenizer
from jaxtrain.hf.importing import import_folder, open_origin
from jaxtrain.hf.model import logits_of, read_params
from jaxtrain.hf.names import entries
from jaxtrain.models import family
from jaxtrain.models.attention import rotary_factor, rotary_frequencies, score_factor
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.structure import Structure
from jaxtrain.train.batch import place_batch
from jaxtrain.train.state import TrainState, to_tensors

ROOT = Path(__file__).resolve().parents[2]
SEGMENTS = np.ones_like(TOKENS)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, name):
    logits = logits_of(open_origin(str(hugging_face.write(tmp_path, name))))
    assert off(logits(TOKENS, SEGMENTS), name) < SAME


# Family -> features that are switched off: keys of config.Model, or fields of the family's structure.
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
    ("qwen3_yarn", {"rope_scaling": "none"}),
    ("qwen3_yarn", {"rope_scaling": "linear"}),
    ("qwen3_yarn", {"rope_factor": 2.0}),
    ("qwen3_yarn", {"rope_original_len": 64}),
    ("qwen3_yarn", {"rope_beta_fast": 32.0}),
    ("qwen3_yarn", {"rope_beta_slow": 1.0}),
    ("qwen3_yarn", {"rope_truncate": False}),
    ("qwen3_yarn", {"rope_attention_factor": 1.0}),
    ("qwen3_yarn", {"rope_mscale": 0.5, "rope_mscale_all_dim": 1.0}),
    ("qwen3_moe", {"qk_norm": False}),
    ("qwen3_moe", {"renormalize": True}),
    ("qwen3_moe", {"router": "sigmoid"}),
    ("gpt_oss", {"attention_sinks": False}),
    ("gpt_oss", {"attention_out_bias": False}),
    ("gpt_oss", {"qkv_bias": False}),
    ("gpt_oss", {"router_logit_bias": False}),
    ("gpt_oss", {"expert_bias": False}),
    ("gpt_oss", {"renormalize": False}),
    ("gpt_oss", {"attention_pattern": "gl"}),
    ("gpt_oss", {"rope_truncate": True}),
    ("gpt_oss", {"activation": "silu"}),
    ("deepseek_v3", {"router": "softmax"}),
    ("deepseek_v3", {"routed_scaling": 1.0}),
    ("deepseek_v3", {"groups_per_token": 4}),
    ("deepseek_v3", {"renormalize": False}),
    ("deepseek_v3", {"attn_logit_scale": 0.1}),
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
    source = open_origin(str(hugging_face.write(tmp_path, name)))
    run = source.run()
    of_family = {k: v for k, v in change.items() if k in {f.name for f in dataclasses.fields(Structure)}}
    if of_family:
        module = family(run.model.family)
        monkeypatch.setattr(module, "STRUCTURE", dataclasses.replace(module.STRUCTURE, **of_family))
    else:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, **change))
    assert off(logits_of(source, run=run)(TOKENS[:1], SEGMENTS[:1]), name) > 100 * SAME


@pytest.mark.parametrize("form", [4, 5])
def test_yarn_turns_as_in_transformers(form):
    """YaRN's factor and frequencies equal transformers', for config.json as transformers 4 and 5 write it. Export writes the
    same settings.
    """
    tree = hugging_face.settings("qwen3_yarn", form)
    for settings, (factor, *frequencies) in zip(YARN, GOLDEN["yarn"], strict=True):
        rotary = {"rope_type": "yarn", **settings}
        old, new = {"rope_theta": 3000.0, "rope_scaling": rotary}, {"rope_parameters": {"rope_theta": 3000.0, **rotary}}
        model = model_of({**tree, **(old if form == 4 else new)})
        np.testing.assert_allclose(rotary_factor(model), factor, rtol=1e-12)
        # A power in float32 may be off by some ten roundings.
        np.testing.assert_allclose(rotary_frequencies(model), frequencies, rtol=2e-6)
        run = helpers.tiny({f"model.{key}": value for key, value in dataclasses.asdict(model).items()})
        written = exporting.config_json(run, "f32", 0)
        assert {k: v for k, v in settings.items() if written["rope_parameters"][k] != v} == {}
        assert written["rope_scaling"] == {k: v for k, v in written["rope_parameters"].items() if k != "rope_theta"}


def test_deepseek_multiplies_scores_by_the_square_of_mscale():
    model = model_of(hugging_face.settings("qwen3_yarn"))
    assert score_factor(model) == 1.0
    model = dataclasses.replace(model, rope_factor=40.0, rope_mscale_all_dim=0.7)
    assert score_factor(model) == pytest.approx((0.07 * math.log(40.0) + 1) ** 2, rel=1e-12)
    assert score_factor(dataclasses.replace(model, rope_scaling="linear")) == 1.0


def packed_documents() -> dict[str, np.ndarray]:
    """Return a batch of one row with documents of the lengths DOCUMENTS."""
    rows = [hugging_face.random_tokens(128, (1, n + 1), seed=200 + i) for i, n in enumerate(DOCUMENTS)]
    batch = {"tokens": np.concatenate([row[:, :-1] for row in rows], 1), "targets": np.concatenate([x[:, 1:] for x in rows], 1)}
    batch |= {"segments": np.repeat([[1, 2]], DOCUMENTS, axis=1).astype(np.int32)}
    batch |= {"weights": np.ones(batch["tokens"].shape, np.float32)}
    return batch | {"positions": np.concatenate([np.arange(n, dtype=np.int32) for n in DOCUMENTS])[None]}


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_gradients_are_those_of_transformers(tmp_path, name):
    """Every parameter's gradient agrees with transformers' in norm and in a random projection. Two documents share a row;
    transformers computed each alone.
    """
    folder = open_folder(hugging_face.write(tmp_path, name))
    shape = {f"model.{k}": v for k, v in dataclasses.asdict(folder.model).items()}
    how = {"data.seq_len": sum(DOCUMENTS), "train.global_batch": 1, "data.max_segments": len(DOCUMENTS)}
    run = helpers.tiny(shape | how | {"moe.balance_loss": 0.0, "moe.z_loss": 0.0})
    made, origin = helpers.program(run), open_origin(str(folder.path))
    params = read_params(origin, run, made.definition, made.placement)
    _, gradients = made.gradients(params, place_batch(packed_documents(), made.batch, made.context))
    state = TrainState(jax.device_put(np.int32(0), made.state.step.sharding), gradients, ())
    ours = {key: np.asarray(x, np.float64) for key, x in to_tensors(state).items() if key.startswith("params.")}
    theirs: dict[str, np.ndarray] = {}
    for key, entry in entries(folder.model).items():
        if not entry.how.exact:
            theirs |= {hf: entry.to_theirs(ours[key], at, theirs.get(hf)) for at, hf in enumerate(entry.theirs)}
    got = np.array([[np.linalg.norm(g), (g * hugging_face.random_weight(n, g.shape)).sum()] for n, g in sorted(theirs.items())])
    wanted = hugging_face.GOLDEN[f"{name}_gradients"]
    assert got.shape == wanted.shape and (wanted[:, 0] > 0).mean() > 0.9
    # Sums of a few thousand float32 terms in another order differ by some 1e-6 of the norm.
    np.testing.assert_allclose(got[:, 0], wanted[:, 0], rtol=1e-5, atol=1e-6)
    assert (np.abs(got[:, 1] - wanted[:, 1]) <= 1e-5 * wanted[:, 0] + 1e-6).all()


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_logits_of_packed_documents_are_those_of_transformers(tmp_path, name):
    """Two documents share a row; transformers computed each alone. Without segments the logits differ."""
    batch = packed_documents()
    logits = logits_of(open_origin(str(hugging_face.write(tmp_path, name))))
    assert np.abs(logits(batch["tokens"], batch["segments"])[0] - GOLDEN[f"{name}_documents"]).max() < SAME
    assert np.abs(logits(batch["tokens"], np.ones_like(batch["segments"]))[0] - GOLDEN[f"{name}_documents"]).max() > 100 * SAME


def test_documents_of_a_row_do_not_see_each_other(tmp_path):
    """With segments, each document's logits equal those of the document alone."""
    logits = logits_of(open_origin(str(hugging_face.write(tmp_path, "gemma3"))))
    segments = np.repeat([[1, 2]], (20, 12), axis=1)
    both = logits(TOKENS[:1], segments)
    apart = [logits(TOKENS[:1, part], np.ones_like(segments[:, part])) for part in (slice(0, 20), slice(20, 32))]
    assert np.abs(both - np.concatenate(apart, axis=1)).max() < SAME


def test_logits_are_those_of_all_experts_whatever_capacity_a_run_had(tmp_path):
    source = open_origin(str(hugging_face.write(tmp_path, "mixtral")))
    run = source.run()
    run = dataclasses.replace(run, moe=dataclasses.replace(run.moe, capacity_factor=0.5))
    assert off(logits_of(source, run=run)(TOKENS, SEGMENTS), "mixtral") < SAME


@pytest.mark.parametrize("name", helpers.few(FAMILIES, "qwen2", "gemma3", "mixtral", "deepseek_v3"))
def test_round_trip(tmp_path, name):
    """After import and export, the tensors are equal bit for bit, and config.json gives the same model, except init_std."""
    folder, ours, said = imported(tmp_path, name)
    assert "0 unused, 0 missing; stored as f32" in said[0]
    out = tmp_path / "back"
    exported(ours, out, shard_size=100_000)
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
    """Llama 2's config.json has no rope_theta, so the user sets it with --set."""
    folder = hugging_face.write(tmp_path / "theirs", "llama2", rope_parameters=None)
    args = ["import", str(folder), f"--out={tmp_path / 'ours'}"]
    assert command.main(args) == 2
    assert "--set rope_theta=10000.0" in capsys.readouterr().err
    assert command.main([*args, "--set", "rope_theta=777.0"]) == 0
    logits = logits_of(open_origin(str(tmp_path / "ours")))
    assert off(logits(TOKENS, SEGMENTS), "llama2") < SAME


@pytest.mark.more
def test_an_imported_run_can_be_moved(tmp_path, capsys, monkeypatch):
    """The tokenizer moves with the run. --base gives adapters the new path of their base."""
    theirs = hugging_face.write(tmp_path / "theirs", "llama", vocab=264)
    write_byte_tokenizer(theirs)
    assert command.main(["import", str(theirs), f"--out={tmp_path / 'first' / 'model'}"]) == 0
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "first" / "model").rename(tmp_path / "elsewhere" / "model")
    monkeypatch.chdir(tmp_path)
    at = str(moved / "tokenizer")
    assert describe("elsewhere/model")["data"]["tokenizer"] == open_origin("elsewhere/model").run().data.tokenizer == at
    assert open_origin(f"{moved}/checkpoints/0").run().data.tokenizer == at
    assert sample.main(["--workdir=elsewhere/model", "--prompt=def", "--max-tokens=2"]) == 0
    assert command.main(["export", "elsewhere/model", "--out=served"]) == 0
    same = [(folder / "tokenizer.json").read_bytes() for folder in (theirs, moved / "tokenizer", tmp_path / "served")]
    assert same[0] == same[1] == same[2]

    config = f"--config={ROOT / 'configs' / 'finetune.py'}:base=elsewhere/model,lora=3"
    small = ["--config.data.source=synthetic", "--config.paths.cache=", "--config.train.steps=1", "--config.eval.every_steps=0"]
    assert main.main([config, "--workdir=tuned", *small]) == 0
    assert command.main(["export-adapter", "tuned", "--out=adapter"]) == 0
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(theirs)
    moved = moved.rename(tmp_path / "again")
    capsys.readouterr()
    assert command.main(["export", "tuned", "--out=merged"]) == 2
    assert "name the place where it is now" in capsys.readouterr().err
    now = ["--base=again", "--tokenizer=again/tokenizer"]
    assert command.main(["export", "tuned", "--out=merged", *now]) == 0
    assert sample.main(["--workdir=tuned", "--prompt=def", "--max-tokens=2", *now]) == 0


def test_an_import_that_cannot_be_saved_is_an_error(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Storage, "sync", full)
    folder = hugging_face.write(tmp_path / "theirs", "llama")
    assert command.main(["import", str(folder), f"--out={tmp_path / 'ours'}"]) == 2
    said = capsys.readouterr()
    assert "saving step 0 to" in said.err and "No space left" in said.err and "wrote" not in said.out
    assert not (tmp_path / "ours" / "config.json").exists()


def test_peft_finds_the_base_by_its_name(tmp_path):
    """PEFT finds a base in the hub's cache by its hub name. A base that jaxtrain trained has no hub name."""
    cached = hugging_face.write(tmp_path / "models--some--model-1B" / "snapshots" / "0123abcd", "llama")
    assert peft.base_name(str(cached)) == "some/model-1B"
    import_folder(open_folder(cached), tmp_path / "ours", "auto", lambda line: None)
    assert peft.base_name(str(tmp_path / "ours" / "checkpoints" / "0")) == "some/model-1B"
    path = str(saved.save_steps(tmp_path / "trained", 4).directory / "4")
    with pytest.raises(
        HuggingFaceError, match=f"--base: is needed, because the base.*{path}.* Fix: .*hf export {path} --out=DIR"
    ):
        peft.base_name(path)


def test_export_refuses_what_no_family_holds(tmp_path):
    run = helpers.tiny({"model.qk_norm": True})
    with pytest.raises(
        HuggingFaceError, match="model.qk_norm = True: checkpoints of LlamaForCausalLM hold False only. Set model.family to"
    ):
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


def test_a_replaced_export_survives_a_kill(tmp_path, monkeypatch):
    """A kill at any moment leaves the complete old or new model in a folder. A later export deletes this folder only after it
    has written a complete model.
    """
    _, ours, _ = imported(tmp_path, "llama")
    out, moved = tmp_path / "out", tmp_path / "out.replaced"
    exported(ours, out)
    old = tensors_of(out)
    for changes in range(9):
        killed = saved.killed_after(monkeypatch, out, changes, lambda: exported(ours, out, force=True))
        kept = out if out.exists() else moved
        assert tensors_of(kept).keys() == old.keys() and is_folder(kept), changes
        if not out.exists():  # the next export may be killed too, and needs no --force
            assert saved.killed_after(monkeypatch, out, 1, lambda: exported(ours, out))
            assert is_folder(moved)
            exported(ours, out)
        if not killed:
            break
    assert changes > 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "out", "theirs"]


def test_an_export_needs_the_name_of_a_folder(tmp_path, capsys, monkeypatch):
    _, ours, _ = imported(tmp_path, "llama")
    exported(ours, tmp_path / "served")
    monkeypatch.chdir(tmp_path / "served")
    for out in (".", "..", "/"):
        assert command.main(["export", str(ours), f"--out={out}", "--force"]) == 2
        assert f"--out={out}: must end in the name of a folder. Fix: --out=" in capsys.readouterr().err
    (tmp_path / "link").symlink_to("served")
    exported(ours, tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink() and is_folder(tmp_path / "served")


def test_a_checkpoint_is_listed_once_however_many_tensors_are_exported(tmp_path, monkeypatch):
    """An export of one tensor at a time lists the checkpoint and reads meta.json as often as an export of all at once. In a
    bucket, each listing and each read is a request.
    """
    _, ours, _ = imported(tmp_path, "llama")
    calls: list[str] = []

    def counting(owner: type, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: calls.append(name) or function(*args, **options))

    for name in ("state", "states", "files", "blocks"):
        counting(Storage, name)
    counting(Checkpoints, "restore")
    exported(ours, tmp_path / "together")
    together = calls.copy()
    calls.clear()
    monkeypatch.setattr(exporting, "AT_ONCE", 1)
    exported(ours, tmp_path / "apart")
    assert together.count("restore") == 1 and calls.count("restore") > 9
    assert [name for name in calls if name != "restore"] == [name for name in together if name != "restore"] != []


def test_the_umask_says_who_may_read_what_is_exported(tmp_path):
    _, ours, _ = imported(tmp_path, "llama")
    before = os.umask(0o027)
    try:
        exported(ours, tmp_path / "out", shard_size=100_000, tokenizer="byte")
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
    assert {str(a.dtype) for a in open_origin(str(tmp_path / "again")).stored.values()} == {"bfloat16"}
