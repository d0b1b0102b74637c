"""Nothing of a Hugging Face folder is lost in silence: it is read as transformers reads it, told about, or refused by name."""

import importlib.util
import json
import shlex
import shutil
from pathlib import Path

import hugging_face
import jax
import numpy as np
import odd_folders
import pytest
import token_files
from hugging_face import exported, tensors_of
from odd_folders import NOTED, READ, REFUSED, WITHOUT_TEXT
from safetensors.numpy import load_file, save_file

from jaxtrain import main
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.commands import api, lm_eval, sample
from jaxtrain.commands import hf as command
from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import default_config, resolve
from jaxtrain.data.tokenizer import TokenizerError
from jaxtrain.hf.folder import model_of, open_folder
from jaxtrain.hf.importing import Origin, open_origin
from jaxtrain.models import presets
from jaxtrain.models.hf_keys import GENERATION
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.step.validate import validate_step

ROOT = Path(__file__).resolve().parents[2]
FINETUNE = f"--config={ROOT / 'configs' / 'finetune.py'}:base="
ASK = ("--prompt=hi", "--max-tokens=2", "--temperature=0")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_folders.base(tmp_path_factory.mktemp("good") / "base")


def read_all(source: Origin) -> dict[str, np.ndarray]:
    """Return all tensors of an origin."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: np.asarray(x) for name, x in source.read({k: a.update(sharding=here) for k, a in source.stored.items()}).items()
    }


def finetune(base: Path, workdir: Path, *settings: str) -> list[str]:
    """Return the arguments of a run of one step on synthetic data that starts from `base`."""
    keys = ("data.source=synthetic", "data.seq_len=32", "train.steps=1", "train.global_batch=8", "eval.every_steps=0")
    keys += ("sample.max_tokens=0", "optimizer.warmup_steps=1", "paths.cache=", *settings)
    return [f"{FINETUNE}{base}", f"--workdir={workdir}", *(f"--config.{key}" for key in keys)]


# ---- The table of folders


@pytest.mark.parametrize("name", [*READ, *NOTED])
def test_a_folder_is_read_as_transformers_reads_it(good, tmp_path, name):
    """The campaign compares the logits of these folders with those of transformers (test_folders.py)."""
    change, words = (READ[name], ()) if name in READ else NOTED[name]
    source = open_origin(str(odd_folders.changed(good, tmp_path / "odd", change)))
    said = " ".join(source.notes)
    assert all(word in said for word in words) and bool(source.notes) == bool(words)
    found, wanted = read_all(source), read_all(open_origin(str(good)))
    assert found.keys() == wanted.keys()
    for key, x in wanted.items():
        np.testing.assert_allclose(found[key], x, atol=0.01 if name == "mixed dtypes" else 0)


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_be_read_is_refused_by_name_by_every_command(good, tmp_path, name, capsys):
    change, words = REFUSED[name]
    folder = odd_folders.changed(good, tmp_path / "odd", change)
    for act, args in (
        (sample.main, [f"--workdir={folder}", *ASK]),
        (command.main, ["import", str(folder), f"--out={tmp_path / 'ours'}"]),
        (command.main, ["export", str(folder), f"--out={tmp_path / 'back'}"]),
    ):
        assert act(args) == 2, args
        error = capsys.readouterr().err
        assert all(word in error for word in words) and error.startswith("error: "), (args, error)
    assert not any((tmp_path / name).exists() for name in ("ours", "back", "back.partial"))


def test_every_command_tells_what_is_not_used(good, tmp_path, capsys):
    folder = odd_folders.changed(good, tmp_path / "odd", NOTED["a stale index"][0])
    np.save(tmp_path / "t.npy", np.arange(8))
    logits = ["logits", str(folder), f"--tokens={tmp_path / 't.npy'}", f"--out={tmp_path / 'l.npy'}"]
    for act, args in (
        (sample.main, [f"--workdir={folder}", *ASK]),
        (command.main, ["import", str(folder), f"--out={tmp_path / 'ours'}"]),
        (command.main, ["export", str(folder), f"--out={tmp_path / 'back'}"]),
        (command.main, ["config", str(folder)]),
        (command.main, logits),
        (main.main, finetune(folder, tmp_path / "run")),
    ):
        assert act(args) == 0, args
        told = capsys.readouterr()
        assert odd_folders.INDEX in told.out + told.err, args
    assert tensors_of(tmp_path / "back").keys() == load_file(good / "model.safetensors").keys()


# ---- Text of models without a tokenizer


@pytest.mark.parametrize("name", WITHOUT_TEXT)
def test_text_of_a_model_without_a_tokenizer_is_refused(good, tmp_path, name, capsys):
    change, words = WITHOUT_TEXT[name]
    folder = odd_folders.changed(good, tmp_path / "odd", change)
    assert sample.main([f"--workdir={folder}", *ASK]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    for wrong in (
        lambda: api.generate(folder, "hi", max_tokens=2),
        lambda: api.generate(folder, messages=[{"role": "user", "content": "hi"}], max_tokens=2),
        lambda: api.evaluate(folder, ["hi there"]),
    ):
        with pytest.raises(TokenizerError, match=words[0].replace(".", r"\.")):
            wrong()
    # Ids need no tokenizer.
    np.save(tmp_path / "t.npy", np.arange(8))
    assert command.main(["logits", str(folder), f"--tokens={tmp_path / 't.npy'}", f"--out={tmp_path / 'l.npy'}"]) == 0


def test_a_model_without_a_tokenizer_goes_on_with_one_that_is_named(good, tmp_path, capsys):
    """The same holds for its import, and for runs that began from it. Ids go on without a tokenizer."""
    folder = odd_folders.changed(good, tmp_path / "bare", WITHOUT_TEXT["no tokenizer"][0])
    imported_run, run = tmp_path / "ours", tmp_path / "run"
    assert command.main(["import", str(folder), f"--out={imported_run}"]) == 0
    assert main.main(finetune(folder, run)) == 0
    wanted = api.generate(good, "hi", max_tokens=3, temperature=0.0)
    for model in (folder, imported_run):
        assert api.generate(model, "hi", max_tokens=3, temperature=0.0, tokenizer=str(good)) == wanted
        assert api.evaluate(model, ["hi there"], tokenizer=str(good)) == api.evaluate(good, ["hi there"])
    if importlib.util.find_spec("lm_eval"):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            lm_eval.harness_model()(workdir=str(folder))
        lm_eval.harness_model()(workdir=str(folder), tokenizer=str(good))
    for model in (folder, imported_run, run):
        capsys.readouterr()
        assert sample.main([f"--workdir={model}", *ASK]) == 2 and "tokenizer.json" in capsys.readouterr().err
        assert sample.main([f"--workdir={model}", f"--tokenizer={good}", *ASK]) == 0
        exported(model, tmp_path / f"{model.name}.none")  # without a tokenizer, and not with bytes
        assert not any((tmp_path / f"{model.name}.none").glob("tokenizer*"))
        exported(model, tmp_path / f"{model.name}.named", tokenizer=str(good))
        assert (tmp_path / f"{model.name}.named" / "tokenizer.json").read_bytes() == (good / "tokenizer.json").read_bytes()


def test_a_token_file_trains_a_model_without_a_tokenizer(good, tmp_path, monkeypatch, capsys):
    folder = odd_folders.changed(good, tmp_path / "bare", WITHOUT_TEXT["no tokenizer"][0])
    (tmp_path / "in.txt").write_text("a text of some words, again and again. " * 40)
    monkeypatch.chdir(tmp_path)
    for tokenizer in (str(good), "byte"):
        prepare = ["prepare", "--input=in.txt", f"--tokenizer={tokenizer}", "--output=a.tok", "--force"]
        assert token_files.command(tmp_path, *prepare)[0] == 0
        args = finetune(folder, tmp_path / "run", "data.source=a.tok")
        capsys.readouterr()
        assert main.main(args) == 2 and f"data.tokenizer={tokenizer}" in capsys.readouterr().err
        args = finetune(folder, tmp_path / tokenizer.replace("/", "_"), "data.source=a.tok", f"data.tokenizer={tokenizer}")
        assert main.main(args) == 0
    # Samples of a run would be text.
    args = finetune(folder, tmp_path / "run", "sample.max_tokens=4", f"data.source={tmp_path / 'in.txt'}")
    assert main.main(args) == 2


# ---- max_position_embeddings


@pytest.mark.more
def test_an_export_has_the_longest_sequence_of_all_stages(good, tmp_path):
    """Through three stages, two of them gone, and through a base of adapters that was moved."""
    folder = odd_folders.changed(good, tmp_path / "base", odd_folders.keys(max_position_embeddings=4096))

    def positions(checkpoint: Path, **how: str) -> int:
        out = tmp_path / "served"
        exported(checkpoint, out, force=True, **how)
        return json.loads((out / "config.json").read_text())["max_position_embeddings"]

    one, two, adapted, ours = (tmp_path / name for name in ("one", "two", "adapted", "ours"))
    assert main.main(finetune(folder, one, "data.seq_len=64")) == 0
    assert main.main(finetune(one, two)) == 0
    assert command.main(["import", str(folder), f"--out={ours}"]) == 0
    assert main.main(finetune(folder, adapted, "lora.rank=2")) == 0
    assert main.main(finetune(folder, adapted, "lora.rank=2", "train.steps=2")) == 0  # resumed
    shutil.rmtree(one)
    folder.rename(tmp_path / "moved")
    moved = {"base": str(tmp_path / "moved"), "tokenizer": str(good)}
    assert positions(two, tokenizer=str(good)) == positions(ours) == positions(adapted, **moved) == 4096
    shorter = odd_folders.changed(good, tmp_path / "shorter", odd_folders.keys(max_position_embeddings=48))
    assert main.main(finetune(shorter, tmp_path / "longer", "data.seq_len=64")) == 0
    assert positions(tmp_path / "longer") == 64


# ---- Weights that are not finite


def test_experts_that_are_not_finite_are_named(tmp_path):
    """Experts are one array in jaxtrain. The message names the tensor of the expert."""
    folder = hugging_face.write(tmp_path / "theirs", "qwen3_moe")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file(tensors_of(folder) | {name: np.full_like(tensors_of(folder)[name], np.nan)}, folder / "model.safetensors")
    with pytest.raises(HuggingFaceError, match=name.replace(".", r"\.")):
        read_all(open_origin(str(folder)))


@pytest.mark.parametrize("more", [(), ("lora.rank=2",)])
def test_a_run_does_not_start_from_weights_that_are_not_finite(good, tmp_path, more, capsys):
    folder = odd_folders.changed(good, tmp_path / "odd", REFUSED["NaN"][0])
    assert main.main(finetune(folder, tmp_path / "run", *more)) == 2
    told = capsys.readouterr()
    assert odd_folders.UP in told.out + told.err and not Checkpoints(tmp_path / "run" / "checkpoints").steps()


def test_a_checkpoint_that_is_not_finite_is_refused(good, tmp_path, capsys):
    """Such a checkpoint has other authors: no run saves one."""
    assert command.main(["import", str(good), f"--out={tmp_path / 'ours'}"]) == 0
    source = open_origin(str(tmp_path / "ours"))
    name = next(name for name in source.stored if name.endswith("mlp.up"))
    tensors = {k: jax.numpy.asarray(x) for k, x in read_all(source).items()}
    tensors[name] = tensors[name].at[0, 0].set(np.inf)
    shutil.rmtree(tmp_path / "ours" / "checkpoints")
    meta = {key: value for key, value in source.meta.items() if key not in ("tensors", "format", "step", "bytes", "time_unix")}
    Checkpoints(tmp_path / "ours" / "checkpoints", finite=False).save_now(0, tensors, meta)
    capsys.readouterr()
    for act, args in (
        (sample.main, [f"--workdir={tmp_path / 'ours'}", *ASK]),
        (command.main, ["export", str(tmp_path / "ours"), f"--out={tmp_path / 'back'}"]),
        (main.main, finetune(tmp_path / "ours", tmp_path / "run")),
    ):
        assert act(args) == 2, args
        told = capsys.readouterr()
        assert name in told.out + told.err
    assert not (tmp_path / "back").exists()


# ---- Keys of config.json


def test_a_key_that_is_left_out_goes_on(good, tmp_path, capsys, monkeypatch):
    """The command of the message is typed. Every command takes its result."""
    folder = odd_folders.changed(good, tmp_path / "odd", odd_folders.keys(multiplier=3, **{"other one": [1]}))
    monkeypatch.chdir(tmp_path)
    assert main.main(finetune(folder, tmp_path / "run")) == 2
    error = capsys.readouterr().err
    typed = shlex.split(error.partition("python -m jaxtrain hf ")[2].partition(";")[0])
    assert typed.count("--set") == 2 and command.main(typed) == 0
    assert sample.main(["--workdir=RUN", *ASK]) == 0
    wanted, found = (read_all(open_origin(str(place))) for place in (good, tmp_path / "RUN"))
    assert all(np.array_equal(wanted[k], found[k]) for k in wanted)


def test_generation_keys_with_their_defaults_are_no_news(good, tmp_path):
    folder = odd_folders.changed(good, tmp_path / "odd", odd_folders.keys(**GENERATION))
    assert open_folder(folder).notes == ()


def test_rotary_keys_that_are_not_known_can_be_left_out(tmp_path, capsys):
    """For layers alike, and for layers with a base of their own: the command of the message is typed."""
    for name in ("llama", "gemma3"):
        for version in (4, 5):
            settings = hugging_face.settings(name, version)
            rope = (
                settings["rope_parameters"]
                if version == 5
                else settings["rope_scaling"] or {"rope_type": "linear", "factor": 2.0}
            )
            each = rope.get("full_attention", rope)
            each |= {"new_key": 1}
            place = tmp_path / f"{name}{version}"
            folder = hugging_face.write(place, name, version=version)
            odd_folders.keys(**{"rope_parameters" if version == 5 else "rope_scaling": rope})(folder)
            assert command.main(["import", str(folder), f"--out={place}.no"]) == 2
            error = capsys.readouterr().err
            typed = shlex.split(error.partition("python -m jaxtrain hf ")[2].partition("; then")[0])
            assert "new_key" in error
            typed = [word.replace("--out=RUN", f"--out={place}.run") for word in typed]
            assert command.main(typed) == 0, capsys.readouterr().err


# ---- Tensors that a model shares


def test_a_tied_model_with_its_head_alone_is_read(tmp_path):
    """As safetensors' save_model writes it. An untied model needs both."""
    folder = hugging_face.write(tmp_path / "theirs", "llama", tie_word_embeddings=True)
    tensors = tensors_of(folder)
    wanted = read_all(open_origin(str(folder)))
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    found = read_all(open_origin(str(folder)))
    assert found.keys() == wanted.keys() and all(np.array_equal(found[k], wanted[k]) for k in wanted)
    odd_folders.keys(tie_word_embeddings=False)(folder)
    with pytest.raises(HuggingFaceError, match=r"model\.embed_tokens\.weight"):
        open_origin(str(folder))


def test_copies_of_multi_token_prediction_may_be_left_out(tmp_path):
    folder = hugging_face.write(tmp_path / "theirs", "deepseek_v3", mtp=1, num_nextn_predict_layers=1)
    wanted, tensors = read_all(open_origin(str(folder))), tensors_of(folder)
    copies = [name for name in tensors if name.endswith((".shared_head.head.weight", "layers.4.embed_tokens.weight"))]
    assert len(copies) == 2
    save_file({k: x for k, x in tensors.items() if k not in copies}, folder / "model.safetensors")
    found = read_all(open_origin(str(folder)))
    assert found.keys() == wanted.keys() and all(np.array_equal(found[k], wanted[k]) for k in wanted)


# ---- The rules of an import are those of a run


def test_every_preset_may_be_trained():
    for name, keys in presets().items():
        tree = default_config()
        tree.model.update(keys)
        run, problems = resolve(tree)
        found = [
            problem for problem in validate_step(run, Devices("cpu", "cpu", 1, 1e6, "here")) if problem.key.startswith("model.")
        ]
        assert not problems and not found, (name, found)


WRONG = {
    "llama": ({"num_key_value_heads": 3}, {"head_dim": 7}, {"rms_norm_eps": -1.0}),
    "qwen3_yarn": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "deepseek_v3": ({"v_head_dim": 4096}, {"first_k_dense_replace": 99}, {"num_experts_per_tok": 8, "topk_group": 1}),
}


def test_an_import_takes_no_model_that_no_run_may_have():
    """Kimi K2's rotary settings are allowed; faster frequencies than slow ones are needed in both places."""
    for name, changes in WRONG.items():
        for change in changes:
            with pytest.raises(HuggingFaceError):
                print(change, model_of(hugging_face.settings(name) | change))
    settings = hugging_face.settings("deepseek_v3")
    yarn = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0, "original_max_position_embeddings": 64}
    for fast, slow, good in ((1.0, 1.0, True), (32.0, 1.0, True), (1.0, 2.0, False)):
        described = settings | {"rope_parameters": yarn | {"beta_fast": fast, "beta_slow": slow}}
        if good:
            assert model_of(described).rope_beta_fast == fast
        else:
            with pytest.raises(HuggingFaceError, match="rope_beta_fast"):
                model_of(described)


def test_gemma_3_has_no_cap_that_transformers_does_not_apply(tmp_path, capsys):
    assert model_of({k: v for k, v in hugging_face.settings("gemma3").items() if k != "attn_logit_softcapping"})
    folder = hugging_face.write(tmp_path / "theirs", "gemma3", attn_logit_softcapping=5.0)
    assert command.main(["import", str(folder), f"--out={tmp_path / 'a'}"]) == 2
    assert "--set attn_logit_softcapping=null" in capsys.readouterr().err
    assert command.main(["import", str(folder), f"--out={tmp_path / 'a'}", "--set", "attn_logit_softcapping=null"]) == 0
    assert model_of(hugging_face.settings("gemma2") | {"attn_logit_softcapping": 5.0}).attention_softcap == 5.0
