"""Weights of models from outside the package: loaded, exported with jaxtrain's names or by a FORMAT, and read again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hugging_face import TOKENS, exported, imported, tensors_of, write
from safetensors.numpy import save_file

import jaxtrain as jt
from jaxtrain.checkpoint import CheckpointError
from jaxtrain.commands import hf, sample
from jaxtrain.config import schema
from jaxtrain.config.schema import ConfigError
from jaxtrain.hf import importing, lora, peft
from jaxtrain.hf.folder import open_folder
from jaxtrain.hf.importing import import_folder, open_origin
from jaxtrain.hf.model import logits_function, place_model, read_params
from jaxtrain.models.hugging_face import HuggingFaceError

Arrays = dict[str, np.ndarray]


def same(one: Arrays, two: Arrays) -> bool:
    """Return whether two sets of arrays have the same names, dtypes, shapes and bits."""
    alike = all((a.dtype, a.shape) == (two[k].dtype, two[k].shape) for k, a in one.items() if k in two)
    return one.keys() == two.keys() and alike and all(a.tobytes() == two[k].tobytes() for k, a in one.items())


def changed(folder: Path, add: Arrays | None = None, drop: str = "", **keys: Any) -> Path:
    """Change keys of config.json, the model's keys as `model`, and the tensors of a folder with one file."""
    settings = json.loads((folder / "config.json").read_text())
    settings |= {k: settings.get(k, {}) | v if isinstance(v, dict) else v for k, v in keys.items()}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = tensors_of(folder) | (add or {})
    save_file({k: v for k, v in tensors.items() if k != drop}, folder / "model.safetensors")
    return folder


def own(place: Path, family: str, dtype: str = "auto") -> Path:
    """Return a run of a family of tests/own_families.py with the weights of a Llama, and with the further tensors of `More`."""
    _, run, _ = imported(place, "llama", dtype)
    more = {"bend": np.linspace(0.5, 2, 64, dtype=np.float32), "gain": np.array(1.5, np.float32)}
    more = {} if family in ("like_llama", "gelu", "turned", "unknown_axis", "no_table") else more
    exported(run, place / "raw", raw=True)
    width = jt.load_weights(str(run))["final_norm.scale"].shape[0]
    more = {k: np.resize(v, width) if v.ndim else v for k, v in more.items()}
    raw = changed(place / "raw", more, model={"family": f"own_families:{family}"})
    import_folder(open_folder(raw), place / family, "auto", lambda line: None)
    return place / family


# ---- load_weights


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "deepseek_v3"])
def test_a_run_and_the_folder_that_it_came_from_have_the_same_weights(name: str, tmp_path: Path):
    folder, run, _ = imported(tmp_path, name)
    found = jt.load_weights(run)
    assert same(found, jt.load_weights(folder)) and same(found, jt.load_weights(run / "checkpoints" / "0"))
    assert found.keys() == {name.removeprefix("params.") for name in open_origin(str(run)).stored}
    model = open_origin(str(run)).run().model
    assert found["embed.embedding"].shape == (model.vocab_size, model.d_model)
    assert ("head" in found) == (not model.tied_head)
    if model.num_experts:
        assert found["layers.0.mlp.down"].shape == (model.num_experts, model.d_model, model.d_ff)
    found["final_norm.scale"] += 1  # the arrays are the caller's


def test_dtypes_of_loaded_weights(tmp_path: Path):
    _, run, _ = imported(tmp_path, "llama", "bf16")
    stored = jt.load_weights(run)
    assert {str(x.dtype) for x in stored.values()} == {"bfloat16"}
    wide = jt.load_weights(run, dtype="f32")
    assert same(wide, {k: x.astype(np.float32) for k, x in stored.items()})
    assert same(stored, {k: x.astype(ml_dtypes.bfloat16) for k, x in wide.items()})
    with pytest.raises(ValueError, match="dtype = 'fp8'"):
        jt.load_weights(run, dtype="fp8")
    with pytest.raises(CheckpointError):
        jt.load_weights(tmp_path / "nothing")


def test_weights_are_loaded_without_the_module_of_the_family(tmp_path: Path):
    run = own(tmp_path, "bare")
    found = jt.load_weights(run)
    for name in ("config.json", "checkpoints/0/meta.json"):
        assert (run / name).exists()
    raw = changed(tmp_path / "raw", model={"family": "not_here.at_all:Family"})
    assert same(jt.load_weights(raw), found)


@pytest.mark.parametrize("family", ["llama", "own_families:bare"])
def test_adapters_are_merged_into_their_base(family: str, tmp_path: Path):
    base = own(tmp_path, "bare") if ":" in family else imported(tmp_path, "llama")[1]
    source = open_origin(str(base))
    bare, how = source.run(), schema.Lora(rank=2, alpha=6.0, targets="wq,down")
    model = dataclasses.replace(bare.model, family="llama")  # the one of PEFT's names
    random = np.random.default_rng(0)
    shapes = {k: e.shape for k, e in peft.adapter_entries(model, 2).items() if ".wq_" in k or ".down_" in k}
    adapters = {k: random.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}
    if ":" in family:  # PEFT has no names for it: a run's own checkpoint
        digest = lora.digest(read_params(source, bare, *place_model(bare)))
        more = {"base": {"path": source.path, "digest": digest}, "text": source.text().record(), "positions": 64}
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        tensors = {k: jax.device_put(x, place) for k, x in adapters.items()}
        importing.write_run_folder(tmp_path / "adapted", schema.to_dict(dataclasses.replace(bare, lora=how)), tensors, more)
    else:
        peft.write_adapter(tmp_path / "peft", adapters, model, how, "")
        peft.import_adapter(tmp_path / "peft", str(base), tmp_path / "adapted")
    before, found = jt.load_weights(base), jt.load_weights(tmp_path / "adapted")
    assert {k for k in before if not np.array_equal(before[k], found[k])} == {k for k in before if k.endswith((".wq", ".down"))}
    a, b = (adapters[f"params.layers.0.attention.lora.wq_{half}"] for half in "ab")
    w = before["layers.0.attention.wq"].astype(np.float32) + 3 * np.einsum("dr,rnh->dnh", a, b)
    np.testing.assert_allclose(found["layers.0.attention.wq"], w, rtol=1e-4, atol=1e-4)
    exported(tmp_path / "adapted", tmp_path / "raw_merged", raw=True)
    assert same(jt.load_weights(tmp_path / "raw_merged"), found)


# ---- export --raw


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_raw_folder_has_every_tensor_and_is_read_again_bit_for_bit(dtype: str, tmp_path: Path):
    run = own(tmp_path, "bare", dtype)
    stored = jt.load_weights(run)
    assert {"bend", "gain"} <= stored.keys()
    matrices = np.float32 if dtype == "f32" else ml_dtypes.bfloat16
    assert (stored["gain"].dtype, stored["embed.embedding"].dtype) == (np.float32, matrices)
    out = tmp_path / "out"
    exported(run, out, raw=True, shard_size="50KB")
    assert (out / "model.safetensors.index.json").exists()
    assert same(tensors_of(out), stored) and same(jt.load_weights(out), stored)
    import_folder(open_folder(out), tmp_path / "again", "auto", lambda line: None)
    assert same(jt.load_weights(tmp_path / "again"), stored)
    ours, theirs = (logits_function(open_origin(str(place)))(TOKENS, np.ones_like(TOKENS)) for place in (run, out))
    assert np.array_equal(ours, theirs)


def test_bf16_rounds_the_matrices_of_a_raw_folder_alone(tmp_path: Path):
    run = own(tmp_path, "bare", "f32")
    exported(run, tmp_path / "out", raw=True, dtype="bf16")
    vectors = {"bend", "gain", *(name for name in jt.load_weights(run) if name.endswith("scale"))}
    found = jt.load_weights(tmp_path / "out")
    assert {name for name, x in found.items() if x.dtype == np.float32} == vectors
    assert same({k: found[k] for k in vectors}, {k: x for k, x in jt.load_weights(run).items() if k in vectors})


@pytest.mark.parametrize(
    ("change", "named"), [({"drop": "bend"}, "bend"), ({"add": {"spare": np.ones(3, np.float32)}}, "spare")]
)
def test_a_raw_folder_must_have_the_tensors_that_its_family_builds(change: dict[str, Any], named: str, tmp_path: Path):
    run = own(tmp_path, "bare")
    exported(run, tmp_path / "out", raw=True)
    changed(tmp_path / "out", **change)
    assert hf.main(["import", str(tmp_path / "out"), f"--out={tmp_path / 'again'}"]) == 2
    assert not (tmp_path / "again").exists()
    with pytest.raises(HuggingFaceError, match=named):
        logits_function(open_origin(str(tmp_path / "out")))(TOKENS, np.ones_like(TOKENS))


def test_a_family_without_format_names_raw_as_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, out = own(tmp_path, "bare"), tmp_path / "out"
    assert hf.main(["export", str(run), f"--out={out}"]) == 2
    assert not out.exists() and "--raw" in capsys.readouterr().err
    assert hf.main(["export", str(run), f"--out={out}", "--raw"]) == 0
    assert hf.main(["check", str(run), str(out)]) == 2  # transformers reads no such folder


# ---- FORMAT


def test_a_format_from_outside_exports_and_imports(tmp_path: Path):
    run, out = own(tmp_path, "like_llama"), tmp_path / "out"
    exported(run, out)
    assert same(tensors_of(out), tensors_of(tmp_path / "theirs"))
    described = json.loads((out / "config.json").read_text())
    assert (described["model_type"], described["jaxtrain_family"]) == ("llama", "own_families:like_llama")
    assert open_folder(out).model.family == "own_families:like_llama"
    assert hf.main(["import", str(out), f"--out={tmp_path / 'again'}"]) == 0
    assert same(jt.load_weights(tmp_path / "again"), jt.load_weights(run))
    # a folder of another program, whose family the command names
    foreign = write(tmp_path / "foreign", "llama")
    command = ["import", str(foreign), f"--out={tmp_path / 'third'}", "--set", "jaxtrain_family=own_families:like_llama"]
    assert hf.main(command) == 0
    assert open_origin(str(tmp_path / "third")).run().model.family == "own_families:like_llama"


@pytest.mark.parametrize(("family", "named"), [("not_all", "bend, gain"), ("turned", "mlp.down"), ("unknown_axis", "J")])
def test_a_format_that_does_not_fit_the_model_is_refused(family: str, named: str, tmp_path: Path):
    run = own(tmp_path, family)
    with pytest.raises(HuggingFaceError, match=named):
        exported(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    foreign = changed(write(tmp_path / "foreign", "llama"), jaxtrain_family=f"own_families:{family}")
    assert hf.main(["import", str(foreign), f"--out={tmp_path / 'again'}"]) == 2
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("value", ["own_families:no_table", "own_families:bare", "own_families", 3, "not_here:Family"])
def test_a_folder_that_names_no_family_with_a_format_is_refused(value: Any, tmp_path: Path):
    foreign = changed(write(tmp_path / "foreign", "llama"), jaxtrain_family=value)
    assert hf.main(["import", str(foreign), f"--out={tmp_path / 'run'}"]) == 2


def test_a_format_is_for_its_own_model_type(tmp_path: Path):
    foreign = changed(write(tmp_path / "foreign", "mistral"), jaxtrain_family="own_families:like_llama")
    assert hf.main(["import", str(foreign), f"--out={tmp_path / 'run'}"]) == 2


def test_the_structure_of_a_family_from_outside_is_used(tmp_path: Path):
    """The activation, the offset of norms and the scale of the embedding of STRUCTURE all change the logits."""
    one, two = own(tmp_path / "a", "like_llama"), own(tmp_path / "b", "gelu")
    assert same(jt.load_weights(one), jt.load_weights(two))
    first, second = (logits_function(open_origin(str(run)))(TOKENS, np.ones_like(TOKENS)) for run in (one, two))
    assert np.abs(first - second).max() > 0.1


# ---- A module that is not there


def test_a_run_whose_module_is_missing_is_refused_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    own(tmp_path, "bare")
    raw = str(changed(tmp_path / "raw", model={"family": "not_here.at_all:Family"}))
    assert sample.main([f"--workdir={raw}", "--prompt=a", "--tokenizer=byte"]) == 2
    assert hf.main(["import", raw, f"--out={tmp_path / 'again'}"]) == 2
    for call in (lambda: jt.generate(raw, "a", tokenizer="byte"), lambda: jt.evaluate(raw, ["a"], tokenizer="byte")):
        with pytest.raises(ConfigError) as caught:
            call()
        assert [problem.key for problem in caught.value.problems] == ["model.family"]
    assert capsys.readouterr().err.count("PYTHONPATH") >= 2


def test_a_raw_folder_takes_no_keys_of_other_programs(tmp_path: Path):
    _, run, _ = imported(tmp_path, "llama")
    exported(run, tmp_path / "raw", raw=True)
    assert hf.main(["import", str(tmp_path / "raw"), f"--out={tmp_path / 'again'}", "--set=rms_norm_eps=0.5"]) == 2
    assert not (tmp_path / "again").exists()
