"""Low-rank adapters: their gradients, their checkpoints, their base, and PEFT's form of them."""

import dataclasses
import json
import re
import shutil

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from jaxtrain import flops, generate, launch, lora, validate
from jaxtrain.checkpoint import CheckpointError, Checkpoints
from jaxtrain.config import ConfigError, to_dict
from jaxtrain.data import tokenizer
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.hardware import Devices
from jaxtrain.hf import __main__ as hugging_face_command
from jaxtrain.hf import peft
from jaxtrain.models.llama import NAMES
from jaxtrain.models.lora import equations, is_adapter
from jaxtrain.state import abstract_tensors, from_tensors, to_tensors
from jaxtrain.step import build, place_batch

RANK, ALPHA = 3, 6.0
MODEL = {"model.num_layers": 2, "model.num_kv_heads": 2, "train.global_batch": 8, "optimizer.clip_norm": 0.0}
LORA = {"lora.rank": RANK, "lora.alpha": ALPHA}
# Of 2 key/value heads each of 4 ranks has a copy.
LAYOUTS = {
    "one device": {},
    "loop": {"mesh.fsdp": 2, "mesh.tensor": 4, "train.grad_accum": 2},
    "unrolled": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.seq": 2, "train.grad_accum": 2, "compiler.unroll": True},
    "moments on the host": {"mesh.fsdp": 2, "sharding.zero": 1, "optimizer.offload": "moments"},
}
# Our weight's letters: inputs and outputs, written down again.
DELTA = {
    **dict.fromkeys(("wq", "wk", "wv"), "DR,RNH->DNH"),
    "wo": "NHR,RD->DNH",
    "gate": "DR,RF->DF",
    "up": "DR,RF->DF",
    "down": "FR,RD->DF",
}
PREFIX = "params."


def begun(run):
    """Tensors of a run's initial state, with numbers in b too."""
    tensors = dict(helpers.initial_tensors(run))
    for i, name in enumerate(sorted(tensors)):
        if name.startswith(PREFIX) and name.endswith("_b"):
            tensors[name] = np.random.default_rng(i).normal(0, 0.05, tensors[name].shape).astype(np.float32)
    return tensors


def step(run, tensors):
    """(loss, gradients by canonical name, tensors) of one step from these tensors."""
    made = helpers.program(run)
    shapes = {k: a.sharding for k, a in abstract_tensors(made.state).items()}
    state = from_tensors(made.state, {k: jax.device_put(tensors[k], shapes[k]) for k in shapes})
    batch = place_batch(helpers.host_batch(run, 0), made.batch, made.context)
    state, values = helpers.train_step(run)(state, batch)
    after = {k: np.asarray(v) for k, v in to_tensors(state).items()}
    mu = "optimizer.mu."
    grads = {k.removeprefix(mu): v / (1 - run.optimizer.beta1) for k, v in after.items() if k.startswith(mu)}
    return float(values["loss"]), grads, after


@pytest.fixture(scope="module")
def expected():
    """Loss and gradients of adapters by the chain rule: those of W + s a b, in a model without adapters."""
    run = helpers.tiny(MODEL | LORA)
    tensors = begun(run)
    plain = helpers.tiny(MODEL)
    merged, scale = {k: v for k, v in tensors.items() if not is_adapter(k)}, ALPHA / RANK
    halves = {}
    for name in list(merged):
        weight = name.rpartition(".")[2]
        if name.startswith(PREFIX) and weight in DELTA:
            a, b = (tensors[f"{name.rpartition('.')[0]}.lora.{weight}_{half}"] for half in "ab")
            merged[name] = merged[name] + scale * np.einsum(DELTA[weight], a, b)
            halves[name.removeprefix(PREFIX)] = a, b
    loss, grads, _ = step(plain, merged | {k: v for k, v in helpers.initial_tensors(plain).items() if k not in merged})
    out = {}
    for name, (a, b) in halves.items():
        module, _, weight = name.rpartition(".")
        of_a = jax.vjp(lambda a, b, e=DELTA[weight]: scale * jnp.einsum(e, a, b), a, b)[1](jnp.asarray(grads[name]))
        out[f"{module}.lora.{weight}_a"], out[f"{module}.lora.{weight}_b"] = map(np.asarray, of_a)
    return tensors, loss, out


@pytest.mark.parametrize("layout", helpers.few(LAYOUTS, "unrolled"))
def test_gradients_are_those_of_the_merged_weights(layout, expected):
    """And nothing else moves: the base stays as it is to the bit."""
    tensors, loss, grads = expected
    run = helpers.tiny(MODEL | LORA | LAYOUTS[layout])
    found, mine, after = step(run, tensors)
    assert found == pytest.approx(loss, rel=1e-5)
    assert mine.keys() == grads.keys()
    assert len(mine) == 2 * 2 * 7
    for name in mine:
        np.testing.assert_allclose(mine[name], grads[name], rtol=2e-3, atol=2e-6, err_msg=name)
    params = {k for k in after if k.startswith(PREFIX)}
    assert {k for k in params if np.array_equal(after[k], tensors[k])} == {k for k in params if not is_adapter(k)}


def test_merged_gives_the_weights_one_by_one(expected):
    tensors = {k: v for k, v in expected[0].items() if k.startswith(PREFIX)}
    found = dict(lora.merged(tensors, ALPHA / RANK))
    assert found.keys() == {k for k in tensors if not is_adapter(k)}
    for name, x in found.items():
        module, _, weight = name.rpartition(".")
        want = tensors[name]
        if weight in DELTA:
            a, b = (tensors[f"{module}.lora.{weight}_{half}"] for half in "ab")
            want = want + ALPHA / RANK * np.einsum(DELTA[weight], a, b)
        np.testing.assert_allclose(x, want, rtol=1e-6, atol=1e-7, err_msg=name)
    half = {k: v for k, v in tensors.items() if not k.endswith("1.mlp.lora.up_b")}
    with pytest.raises(ValueError, match=r"of the adapter of params.layers.1.mlp.up, .*up_b is missing"):
        dict(lora.merged(half, 1.0))
    with pytest.raises(ValueError, match=r"no weight for params.layers.0.mlp.lora.gate_a"):
        dict(lora.merged({k: v for k, v in tensors.items() if k != "params.layers.0.mlp.gate"}, 1.0))


def test_adapters_begin_as_pefts_do():
    tensors = helpers.initial_tensors(helpers.tiny(MODEL | LORA))
    for name, x in tensors.items():
        if name.startswith(PREFIX) and name.endswith("_b"):
            assert not x.any()
        if name.startswith(PREFIX) and name.endswith("_a"):
            bound = np.prod(x.shape[:-1]) ** -0.5
            assert bound * 0.95 < np.abs(x).max() <= bound
            assert abs(x.mean()) < 0.2 * bound


def test_equations():
    assert equations("BTD,DNH->BTNH") == ("BTD,DR->BTR", "BTR,RNH->BTNH")
    assert equations("BTNH,DNH->BTD") == ("BTNH,NHR->BTR", "BTR,RD->BTD")


def test_nothing_is_computed_for_the_base():
    """Unrolled and recomputed in full, by count: no product for a gradient of the base, and no embedding's gradient."""
    run = helpers.tiny(MODEL | LORA | {"compiler.unroll": True, "lora.targets": "wq,up"})
    text = helpers.train_step(run).as_text()
    assert text is not None
    layers, adapters, attention = 2 * 7 * 2, 2 * 2 * 6, 2 * 6  # forward and dx; three each of two; two and four
    first = 6  # nothing needs the gradient of the first layer's input: wq, wk, wv and their adapters' down
    found = len(re.findall(r" dot\(", text))
    assert layers + adapters + attention + 2 - first <= found <= layers + adapters + attention + 2
    assert not re.findall(r" scatter\(", text)


def test_the_base_rests_in_the_compute_dtype_and_adapters_do_not():
    made = helpers.program(helpers.tiny(MODEL | LORA | {"precision": "bf16"}))
    kinds = {
        name.rpartition(".")[2][-2:]: a.dtype for name, a in abstract_tensors(made.state).items() if name.startswith(PREFIX)
    }
    assert kinds["_a"] == kinds["_b"] == jnp.float32
    assert kinds["wq"] == kinds["ad"] == jnp.bfloat16


def test_an_fp8_base():
    """What is in 8 bits is the base alone."""
    text = helpers.lowered(helpers.tiny(MODEL | LORA | {"precision": "fp8", "mesh.fsdp": 2}))
    assert "f8E4M3FN" in text


def test_flops_are_those_of_two_passes():
    run = helpers.tiny(MODEL | LORA)
    m = run.model
    D, F, N, K = m.d_model, m.d_ff, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    linear = 2 * m.num_layers * (2 * D * N + 2 * D * K + 3 * D * F) + 2 * D * m.vocab_size
    adapters = 2 * m.num_layers * RANK * (2 * (D + N) + 2 * (D + K) + 3 * (D + F))
    attention = flops.attention(m, run.data.seq_len).causal * m.num_layers
    assert flops.training(run).causal == 2 * linear + 3 * attention + 3 * adapters


# ---- Whole runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base, and adapters beside it, on short instructions."""
    folder = tmp_path_factory.mktemp("lora")
    config = folder / "small.py"
    config.write_text(runs.SMALL)
    byte = tokenizer.ByteTokenizer()
    for name, seed in (("train", 0), ("held_out", 1)):
        draws = np.random.default_rng(seed)
        with TokenWriter(folder / f"{name}.tok", tokenizer.info(byte)) as writer:
            for _ in range(400):
                word = "".join(draws.choice(list("abcdefgh"), 4))
                writer.write(byte.encode(text := f"Say {word}. {word}"), len(text))
                writer.end_document()
    assert runs.train(config, folder / "base", train__steps=4, data__source="synthetic", mesh__fsdp=2, mesh__tensor=4) == 0
    assert runs.train(config, folder / "adapters", **over(folder), train__steps=16) == 0
    return folder


def over(folder, base="base"):
    return {
        "data__source": str(folder / "train.tok"),
        "data__eval_source": str(folder / "held_out.tok"),
        "init__from": str(folder / base),
        "lora__rank": 4,
        "optimizer__lr": 2e-2,
        "mesh__fsdp": 4,
        "mesh__tensor": 2,
        "checkpoint__every_steps": 8,
        "eval__every_steps": 4,
    }


def test_held_out_loss_falls(trained):
    held_out = [line["loss"] for line in runs.lines(trained / "adapters") if line["kind"] == "eval"]
    assert held_out[-1] < held_out[0] - 0.3
    assert held_out[-1] < 5.3 < np.log(264)


def test_checkpoints_hold_adapters_alone_and_name_the_base(trained):
    stored = runs.tensors(trained / "adapters")
    assert {re.sub(r"\d+", "i", name) for name in stored if "lora" not in name and "guard" not in name} == {
        "step",
        "optimizer.count",
    }
    assert len([name for name in stored if name.startswith(PREFIX)]) == 2 * 2 * 7
    base = Checkpoints(trained / "adapters" / "checkpoints").meta(16)["base"]
    assert base["path"] == str(trained / "base" / "checkpoints" / "4")
    said = (trained / "adapters" / "log.txt").read_text()
    assert "and adapters of 4.1 k, which alone are trained" in said


def test_resumes_to_the_bit(trained):
    """Ended after step 8, and gone on with."""
    parts, again = over(trained), trained / "again"
    assert runs.train(trained / "small.py", again, **parts, train__steps=8) == 0
    assert runs.train(trained / "small.py", again, **parts, train__steps=16) == 0
    one, two = runs.tensors(trained / "adapters"), runs.tensors(again)
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_what_was_saved_can_be_used(trained):
    """Sampling and evaluation get the base and the adapters: the same logits as of merged weights."""
    run, sampler, params, at = generate.load(str(trained / "adapters"), jax.devices()[:2])
    assert (at, run.lora.rank) == (16, 4)
    prompt = {"max_tokens": 6, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    made = list(sampler.tokens(params, [83, 97, 121], **prompt))
    base = runs.tensors(trained / "base")
    tensors = base | runs.tensors(trained / "adapters")
    merged = dict(lora.merged({k: v for k, v in tensors.items() if k.startswith(PREFIX)}, 32.0 / 4))
    plain = dataclasses.replace(run, lora=dataclasses.replace(run.lora, rank=0))
    other = generate.Sampler(plain, sampler.placement)
    shapes = jax.tree.map(lambda a: a, other.definition.abstract)
    flat = {k: jnp.asarray(v) for k, v in merged.items()}
    stacked = jax.tree_util.tree_map_with_path(lambda path, a: _gathered(path, flat, run.model.num_layers), shapes)
    assert list(other.tokens(stacked, [83, 97, 121], **prompt)) == made
    without = {k: jnp.asarray(v) for k, v in base.items()}
    stacked = jax.tree_util.tree_map_with_path(lambda path, a: _gathered(path, without, run.model.num_layers), shapes)
    assert list(other.tokens(stacked, [83, 97, 121], **prompt)) != made


def _gathered(path, flat, layers):
    name = PREFIX + ".".join(key.key for key in path)
    if name in flat:
        return flat[name]
    return jnp.stack([flat[name.replace(".layers.", f".layers.{i}.")] for i in range(layers)])


def test_the_command_writes_what_peft_reads(trained, tmp_path, capsys):
    out = tmp_path / "adapter"
    assert hugging_face_command.main(["export-adapter", str(trained / "adapters"), f"--out={out}", "--base=some/model"]) == 0
    settings, tensors = peft.read(out, NAMES)
    assert (settings.rank, settings.alpha, settings.base, len(tensors)) == (4, 32.0, "some/model", 2 * 2 * 7)
    stored = {k.removeprefix(PREFIX): v for k, v in runs.tensors(trained / "adapters").items() if k.startswith(PREFIX)}
    back = peft.from_peft(tensors, NAMES, {k: v.shape for k, v in stored.items()})
    assert all(np.array_equal(back[k], stored[k]) for k in stored)
    capsys.readouterr()
    assert hugging_face_command.main(["export-adapter", str(trained / "base"), f"--out={tmp_path / 'none'}"]) == 2
    assert "is of a run without adapters" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_another_base_is_refused(trained, tmp_path, capsys):
    """Under the same path, and gone."""
    folder = tmp_path / "copy"
    shutil.copytree(trained / "adapters", folder)
    shutil.copytree(trained / "base", tmp_path / "base")
    moved = over(trained) | {"init__from": str(tmp_path / "base")}
    config = trained / "small.py"
    assert runs.train(config, folder, **moved, train__steps=17) == 0, "the same base in another place"
    one = Checkpoints(tmp_path / "base" / "checkpoints")
    tensors = runs.tensors(tmp_path / "base")
    tensors["params.head"] = tensors["params.head"][::-1].copy()
    meta = one.meta(4)
    shutil.rmtree(tmp_path / "base" / "checkpoints" / "4")
    again = Checkpoints(tmp_path / "base" / "checkpoints")
    again.save(4, {k: jnp.asarray(v) for k, v in tensors.items()}, meta)
    again.close()
    capsys.readouterr()
    before = runs.steps(folder)
    assert runs.train(config, folder, **moved, train__steps=18) == 1
    assert "are not those that the adapters of step 17 were trained beside" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="are not those"):
        generate.load(str(folder), jax.devices()[:1])
    assert runs.steps(folder) == before
    shutil.rmtree(tmp_path / "base" / "checkpoints" / "4")
    files = runs.tree(folder)
    assert runs.train(config, folder, **moved, train__steps=18) == 2
    assert f"the base of these adapters, {tmp_path / 'base'}" in capsys.readouterr().err
    assert runs.tree(folder) == files, "nothing was written"
    with pytest.raises(CheckpointError, match="--base of a command"):
        generate.load(str(folder), jax.devices()[:1])
    assert generate.load(str(folder), jax.devices()[:1], str(trained / "base"))[3] == 17


def test_runs_that_are_refused(trained, tmp_path, capsys):
    config, parts = trained / "small.py", over(trained)
    assert runs.train(config, tmp_path / "x", **{**parts, "init__from": ""}) == 2
    assert "adapters stand beside the weights of a model" in capsys.readouterr().err
    assert runs.train(config, tmp_path / "x", **{**parts, "init__from": str(trained / "adapters")}) == 2
    assert "holds adapters alone" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    changed = {**parts, "lora__rank": 2, "train__steps": 17}
    assert runs.train(config, trained / "adapters", **changed) == 2
    assert "can never change on resume: other tensors are trained" in capsys.readouterr().err


def test_the_digest_is_of_every_number_and_of_nothing_else():
    x = {"w": jnp.arange(24.0).reshape(4, 6), "layers": {"v": jnp.ones((2, 3))}}
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    split = jax.device_put(x["w"], jax.NamedSharding(mesh, jax.P("a", "b")))
    assert lora.digest(x) == lora.digest(x | {"w": split}) == lora.digest(x | {"w": x["w"].astype(jnp.bfloat16)})
    others = (x["w"].at[2, 3].add(1), x["w"][::-1], x["w"].reshape(6, 4), -x["w"])
    found = {lora.digest(x), *(lora.digest(x | {"w": w}) for w in others), lora.digest({"u": x["w"], "layers": x["layers"]})}
    assert len(found) == 2 + len(others)


def test_the_config_for_finetuning(tmp_path):
    """Its variants are runs that may start; how the small one goes, test_lora's own runs show."""
    (tmp_path / "large").mkdir()
    described = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336}
    described |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    described |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 5e5, "max_position_embeddings": 131072}
    (tmp_path / "large" / "config.json").write_text(json.dumps(described))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(to_dict(helpers.tiny())))
    large = f"base={tmp_path / 'large'}"
    for arg, devices in (("", 1), (f"base={run},lora=8", 1), (f"{large},lora=16", 8), (large, 8)):
        loaded = launch.load([f"--config=configs/finetune.py:{arg}"])
        assert not loaded.problems
        assert not validate.validate_step(loaded.run, Devices("gpu", "NVIDIA H200", devices, 139.8, "test", 90, 8))
    found = str(launch.load(["--config=configs/finetune.py:base=nothere"]).problems[0])
    assert "nothere: no such folder" in found


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"lora.targets": "wq,w2"}, "lora.targets"),
        ({"lora.targets": " "}, "lora.targets"),
        ({"train.freeze": "embed.*"}, "train.freeze"),
        ({"init.what": "weights+optimizer"}, "init.what"),
        ({"dtypes.m": "int8"}, "dtypes.m"),
        ({"lora.alpha": 0.0}, "lora.alpha"),
    ],
)
def test_settings_that_are_refused(more, key):
    run = helpers.tiny(MODEL | LORA | more)
    problems = validate.validate_step(run, Devices("cpu", "cpu", 1, 0.0, "test", 0, 1))
    assert [p.key for p in problems if p.key == key] == [key]


def test_a_model_of_ones_own_must_have_adapters():
    run = helpers.tiny(MODEL | LORA | {"lora.targets": "experts"})
    with pytest.raises(ConfigError, match="gives no adapter to experts"):
        build(run, jax.devices()[:1])


# ---- PEFT


def ours(expected):
    return {k.removeprefix(PREFIX): v for k, v in expected[0].items() if k.startswith(PREFIX) and is_adapter(k)}


def test_to_peft_and_back(expected, tmp_path):
    adapters = ours(expected)
    written = peft.write(tmp_path / "peft", adapters, NAMES, alpha=ALPHA, base="the base")
    assert len(written) == len(adapters)
    settings, tensors = peft.read(tmp_path / "peft", NAMES)
    assert (settings.rank, settings.alpha, settings.base) == (RANK, ALPHA, "the base")
    assert set(settings.targets) == set(DELTA)
    q = "base_model.model.model.layers.1.self_attn."
    assert tensors[q + "q_proj.lora_A.weight"].shape == (RANK, 64)
    assert tensors[q + "k_proj.lora_B.weight"].shape == (2 * 8, RANK)
    # A linear layer of theirs computes x A' B': a head's outputs lie one after another.
    x = np.random.default_rng(0).normal(size=64)
    mine = np.einsum("D,DR,RNH->NH", x, adapters["layers.1.attention.lora.wq_a"], adapters["layers.1.attention.lora.wq_b"])
    theirs = tensors[q + "q_proj.lora_B.weight"] @ (tensors[q + "q_proj.lora_A.weight"] @ x)
    np.testing.assert_allclose(theirs, mine.reshape(-1), rtol=1e-5, atol=1e-7)
    back = peft.from_peft(tensors, NAMES, {k: v.shape for k, v in adapters.items()})
    assert back.keys() == adapters.keys()
    assert all(np.array_equal(back[k], adapters[k]) for k in adapters)
    with pytest.raises(peft.PeftError, match="holds an adapter already"):
        peft.write(tmp_path / "peft", adapters, NAMES, alpha=ALPHA, base="")


def test_what_does_not_fit_is_named(expected, tmp_path):
    adapters = ours(expected)
    shapes = {k: v.shape for k, v in adapters.items()}
    tensors = peft.to_peft(adapters, NAMES)
    one = next(iter(tensors))
    with pytest.raises(peft.PeftError, match=re.escape(f"{one}: not in the adapter")):
        peft.from_peft({k: v for k, v in tensors.items() if k != one}, NAMES, shapes)
    with pytest.raises(peft.PeftError, match="lm_head.lora_A.weight: no weight of this model"):
        peft.from_peft(tensors | {"base_model.model.lm_head.lora_A.weight": tensors[one]}, NAMES, shapes)
    with pytest.raises(peft.PeftError, match=r"shape \(2, 2\)"):
        peft.from_peft(tensors | {one: np.zeros((2, 2), np.float32)}, NAMES, shapes)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"something_new": 1}, "something_new"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_settings_of_peft_that_change_the_model_are_refused(expected, tmp_path, more, found):
    settings = _written(expected, tmp_path, more)
    with pytest.raises(peft.PeftError, match=found):
        peft.read(settings.parent, NAMES)


def _written(expected, tmp_path, more):
    peft.write(tmp_path, ours(expected), NAMES, alpha=ALPHA, base="")
    path = tmp_path / peft.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return path


def test_rslora_is_read_by_its_scale(expected, tmp_path):
    settings, _ = peft.read(_written(expected, tmp_path, {"use_rslora": True}).parent, NAMES)
    assert settings.alpha / settings.rank == pytest.approx(ALPHA / RANK**0.5)
    assert "use_rslora" in settings.notes[0]
