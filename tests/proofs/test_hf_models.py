"""Import and export of Hugging Face models: all families give transformers' logits, and a round trip changes nothing."""

import dataclasses
import io
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
from hugging_face import DOCUMENTS, FAMILIES, GOLDEN, GRADIENTS, SAME, TOKENS, YARN, exported, imported, off, tensors_of

import jaxtrain
from jaxtrain import main
from jaxtrain.checkpoint.storage import Storage
from jaxtrain.commands import hf as command
from jaxtrain.commands import sample
from jaxtrain.data.chat_template import Conversation
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.hf import exporting, peft
from jaxtrain.hf.folder import describe, is_folder, model_of, open_folder, write_byte_tokenizer
from jaxtrain.hf.importing import import_folder, open_origin
from jaxtrain.hf.model import logits_function, read_params
from jaxtrain.hf.names import model_entries
from jaxtrain.metrics.samples import Sampling
from jaxtrain.models.attention import rotary_factor, rotary_frequencies, score_factor
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.step.batch import place_batch
from jaxtrain.step.state import TrainState, to_tensors
from jaxtrain.train import generation

ROOT = Path(__file__).resolve().parents[2]
SEGMENTS = np.ones_like(TOKENS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, Path]:
    """Return a small Hugging Face folder and the run's folder of its import."""
    folder, ours, _ = imported(tmp_path_factory.mktemp("llama"), "llama")
    return folder, ours


@pytest.mark.parametrize("name", helpers.few(FAMILIES, "llama", "mixtral", "gemma2", "gemma3", "phi3", "glm", "qwen3_5"))
def test_logits_are_those_of_transformers(tmp_path, name):
    """They are those of all experts, whatever capacity a run had."""
    source = open_origin(str(hugging_face.write(tmp_path, name)))
    run = source.run()
    run = dataclasses.replace(run, moe=dataclasses.replace(run.moe, capacity_factor=0.5))
    assert off(logits_function(source, run=run)(TOKENS, SEGMENTS), name) < SAME


def test_yarn_turns_as_in_transformers():
    """YaRN's factor and frequencies equal transformers', for config.json as transformers 4 and 5 write it. Export writes the
    same settings.
    """
    for settings, (factor, *frequencies) in zip(YARN, GOLDEN["yarn"], strict=True):
        rotary = {"rope_type": "yarn", **settings}
        old, new = {"rope_theta": 3000.0, "rope_scaling": rotary}, {"rope_parameters": {"rope_theta": 3000.0, **rotary}}
        model = model_of(hugging_face.settings("qwen3_yarn", 5) | new)
        assert model_of(hugging_face.settings("qwen3_yarn", 4) | old) == model
        np.testing.assert_allclose(rotary_factor(model), factor, rtol=1e-12)
        # A power in float32 may be off by some ten roundings.
        np.testing.assert_allclose(rotary_frequencies(model), frequencies, rtol=2e-6)
        run = helpers.tiny({f"model.{key}": value for key, value in dataclasses.asdict(model).items()})
        written = exporting.config_json(run.model, "f32", run.data.seq_len, {})
        assert settings.items() <= written["rope_parameters"].items()
        assert written["rope_scaling"] == {k: v for k, v in written["rope_parameters"].items() if k != "rope_theta"}


def test_deepseek_multiplies_scores_by_the_square_of_mscale():
    model = dataclasses.replace(model_of(hugging_face.settings("qwen3_yarn")), rope_factor=40.0)
    assert score_factor(model) == 1.0
    model = dataclasses.replace(model, rope_mscale_all_dim=0.7)
    assert score_factor(model) == pytest.approx((0.07 * math.log(40.0) + 1) ** 2, rel=1e-12)
    assert score_factor(dataclasses.replace(model, rope_scaling="linear")) == 1.0


def packed_documents() -> dict[str, np.ndarray]:
    """Return a batch of one row with documents of the lengths DOCUMENTS."""
    rows = [hugging_face.random_tokens(128, (1, n + 1), seed=200 + i) for i, n in enumerate(DOCUMENTS)]
    batch = {"tokens": np.concatenate([row[:, :-1] for row in rows], 1), "targets": np.concatenate([x[:, 1:] for x in rows], 1)}
    batch |= {"segments": np.repeat([[1, 2]], DOCUMENTS, axis=1).astype(np.int32)}
    batch |= {"weights": np.ones(batch["tokens"].shape, np.float32)}
    return batch | {"positions": np.concatenate([np.arange(n, dtype=np.int32) for n in DOCUMENTS])[None]}


@pytest.mark.parametrize("name", helpers.few(GRADIENTS, "deepseek_v3", "olmo2", "qwen3_next", "glm4_moe"))
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
    for key, entry in model_entries(folder.model).items():
        if "router_bias" not in key:  # not differentiated
            theirs |= {hf: entry.to_hf(ours[key], at, theirs.get(hf)) for at, hf in enumerate(entry.hf_names)}
    got = np.array([[np.linalg.norm(g), (g * hugging_face.random_weight(n, g.shape)).sum()] for n, g in sorted(theirs.items())])
    wanted = GOLDEN[f"{name}_gradients"]
    assert got.shape == wanted.shape and (wanted[:, 0] > 0).mean() > 0.9
    # Sums of a few thousand float32 terms in another order differ by some 1e-6 of the norm.
    np.testing.assert_allclose(got[:, 0], wanted[:, 0], rtol=1e-5, atol=1e-6)
    assert (np.abs(got[:, 1] - wanted[:, 1]) <= 1e-5 * wanted[:, 0] + 1e-6).all()


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_logits_of_packed_documents_are_those_of_transformers(tmp_path, name):
    """Two documents share a row; transformers computed each alone. Without segments the logits differ."""
    batch = packed_documents()
    logits = logits_function(open_origin(str(hugging_face.write(tmp_path, name))))
    assert np.abs(logits(batch["tokens"], batch["segments"])[0] - GOLDEN[f"{name}_documents"]).max() < SAME
    assert np.abs(logits(batch["tokens"], np.ones_like(batch["segments"]))[0] - GOLDEN[f"{name}_documents"]).max() > 100 * SAME


@pytest.mark.parametrize("name", helpers.few(FAMILIES, "mixtral", "deepseek_v3", "phi3"))
def test_round_trip(tmp_path, name):
    """After import and export, the tensors are equal bit for bit, and config.json gives the same model, except init_std."""
    folder, ours, _ = imported(tmp_path, name)
    out = tmp_path / "back"
    exported(ours, out, shard_size=100_000)
    before, after = tensors_of(folder), tensors_of(out)
    assert before.keys() == after.keys() and len(list(out.glob("*.safetensors"))) > 1
    assert all(np.array_equal(before[k].view(np.uint32), after[k].view(np.uint32)) for k in before)
    assert open_folder(out).model == dataclasses.replace(open_folder(folder).model, init_std=open_folder(out).model.init_std)


def test_logits_command(llama, tmp_path):
    folder, _ = llama
    np.save(tmp_path / "t.npy", TOKENS)
    args = ["logits", str(folder), f"--tokens={tmp_path / 't.npy'}", f"--out={tmp_path / 'l.npy'}"]
    assert command.main(args) == 0
    assert off(np.load(tmp_path / "l.npy"), "llama") < SAME
    np.save(tmp_path / "t.npy", TOKENS + 100)
    assert command.main(args) == 2


def test_a_key_that_is_missing_can_be_set(tmp_path):
    """Llama 2's config.json has no rope_theta."""
    folder = hugging_face.write(tmp_path / "theirs", "llama2", rope_parameters=None)
    args = ["import", str(folder), f"--out={tmp_path / 'ours'}"]
    assert command.main(args) == 2
    assert command.main([*args, "--set", "rope_theta=777.0"]) == 0
    plain = hugging_face.write(tmp_path / "plain", "llama2")
    assert open_origin(str(tmp_path / "ours")).run().model == open_origin(str(plain)).run().model


@pytest.mark.more
def test_an_imported_run_can_be_moved(tmp_path, monkeypatch):
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
    moved.rename(tmp_path / "again")
    assert command.main(["export", "tuned", "--out=merged"]) == 2
    now = ["--base=again", "--tokenizer=again/tokenizer"]
    assert command.main(["export", "tuned", "--out=merged", *now]) == 0
    assert sample.main(["--workdir=tuned", "--prompt=def", "--max-tokens=2", *now]) == 0
    ids = [json.loads((folder / "config.json").read_text())["eos_token_id"] for folder in (theirs, tmp_path / "merged")]
    assert ids[0] == ids[1]


def test_a_text_ends_at_every_eos_of_the_model(tmp_path, monkeypatch, capsys):
    """Each file of a folder may name it. Without one, the text has all tokens; a prompt of control tokens is remarked on."""
    monkeypatch.chdir(tmp_path)
    hugging_face.write_base(tmp_path / "base", ["<|im_start|>", "<|im_end|>"], eos="<|im_end|>")
    model = generation.load_model("base", jax.devices()[:1])
    ask = Sampling("def", max_tokens=6, temperature=0.0)
    talk = [{"role": "user", "content": "def"}]
    prompts = {"prompt": list(b"def"), "chat": generation.Chat(model.text, "base", "chatml").prompt(Conversation(talk))}
    assert prompts["chat"] == [257, *b"user\ndef", 258, *b"\n", 257, *b"assistant\n"]
    made = {kind: generation.continue_ids(model.sampler, model.params, each, ask, ()) for kind, each in prompts.items()}
    decode = load_tokenizer("base").decode
    for kind in prompts:
        count = next((i for i in range(1, 6) if made[kind][i] not in made[kind][:i]), 0)  # the text ends before this token
        stop, want = made[kind][count], decode(made[kind][:count])
        for file in ("config.json", "generation_config.json"):
            before = (tmp_path / "base" / file).read_bytes() if (tmp_path / "base" / file).exists() else b"{}"
            (tmp_path / "base" / file).write_text(json.dumps(json.loads(before) | {"eos_token_id": [256, stop]}))
            asked = {"messages": talk, "chat_template": "chatml"} if kind == "chat" else {"prompt": "def"}
            told = jaxtrain.generate("base", **asked, max_tokens=6, temperature=0.0)
            assert told == want if kind == "chat" else told == "def" + want, (kind, file)
            (tmp_path / "base" / file).write_bytes(before)
    with pytest.warns(UserWarning, match="<|im_end|>"):
        jaxtrain.generate("base", "def<|im_end|>", max_tokens=1)
    rows = [{"messages": [*talk, {"role": "assistant", "content": "yes"}]}, {"prompt": "def"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chatted = ["--workdir=base", "--chat", "--chat-template=chatml", "--temperature=0", "--max-tokens=6"]
    capsys.readouterr()
    assert sample.main([*chatted, "--input=rows.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(decode(made["chat"])) == 2 and shown.count("[reference] yes") == 1
    monkeypatch.setattr("sys.stdin", io.StringIO("def\n\n"))
    assert sample.main(chatted) == 0 and capsys.readouterr().out == decode(made["chat"]) + "\n"
    for wrong in ("--system=s", "--chat --input=no.jsonl", "--chat --prompt=x", "--chat --input=rows.jsonl --prompt=x"):
        assert sample.main(["--workdir=base", *wrong.split()]) == 2, wrong
    with pytest.raises(ValueError, match="prompt"):
        jaxtrain.generate("base", "def", messages=talk)


def test_an_import_that_cannot_be_saved_is_an_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    folder = hugging_face.write(tmp_path / "theirs", "llama")
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "sync", full)
        assert command.main(["import", str(folder), f"--out={tmp_path / 'ours'}"]) == 1
    assert not (tmp_path / "ours").exists()
    assert command.main(["import", str(folder), f"--out={tmp_path / 'ours'}"]) == 0


def test_peft_finds_the_base_by_its_name(tmp_path):
    """PEFT finds a base in the hub's cache by its hub name. A base that jaxtrain trained has no hub name."""
    cached = hugging_face.write(tmp_path / "models--some--model-1B" / "snapshots" / "0123abcd", "llama")
    assert peft.base_name(str(cached)) == "some/model-1B"
    import_folder(open_folder(cached), tmp_path / "ours", "auto", lambda line: None)
    assert peft.base_name(str(tmp_path / "ours" / "checkpoints" / "0")) == "some/model-1B"
    path = str(saved.save_steps(tmp_path / "trained", 4).directory / "4")
    with pytest.raises(HuggingFaceError, match="--base"):
        peft.base_name(path)


def test_export_refuses_what_no_family_holds_and_what_is_there(llama, tmp_path):
    run = helpers.tiny({"model.qk_norm": True})
    with pytest.raises(HuggingFaceError, match=r"model.qk_norm"):
        exporting.config_json(run.model, "f32", run.data.seq_len, {})
    _, ours = llama
    exported(ours, tmp_path / "back")
    with pytest.raises(HuggingFaceError, match=str(tmp_path / "back")):
        exported(ours, tmp_path / "back")
    exported(ours, tmp_path / "back", force=True)
    with pytest.raises(HuggingFaceError, match="--force"):
        exported(ours, ours, force=True)
    with pytest.raises(HuggingFaceError, match=str(ours)):
        imported(ours.parent, "llama")


def test_a_replaced_export_survives_a_kill(llama, tmp_path, monkeypatch):
    """A kill at any moment leaves the complete old or new model in a folder. A later export deletes this folder only after it
    has written a complete model.
    """
    _, ours = llama
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_export_needs_the_name_of_a_folder(llama, tmp_path, monkeypatch):
    """The umask says who may read it."""
    _, ours = llama
    before = os.umask(0o027)
    try:
        exported(ours, tmp_path / "served", shard_size=100_000, tokenizer="byte")
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "served").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(modes)
    assert set(modes.values()) == {0o640}, modes
    monkeypatch.chdir(tmp_path / "served")
    for out in (".", "..", "/"):
        assert command.main(["export", str(ours), f"--out={out}", "--force"]) == 2
    (tmp_path / "link").symlink_to("served")
    exported(ours, tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink() and is_folder(tmp_path / "served")


def test_types_are_rounded_only_where_asked(llama, tmp_path):
    folder, ours = llama
    exported(ours, tmp_path / "half", dtype="bf16")
    half = open_folder(tmp_path / "half")
    assert half.dtype == "bf16" and half.bytes * 2 == open_folder(folder).bytes
    import_folder(half, tmp_path / "again", "auto", lambda line: None)
    assert {str(a.dtype) for a in open_origin(str(tmp_path / "again")).stored.values()} == {"bfloat16"}
