"""Configs and command lines that are right: what they set, what follows from it, and the shipped configs."""

import dataclasses
import json
import math
import os
import re
import sys
import types
from pathlib import Path

import pytest
from test_refusals import EIGHT_H200, REPO, TINY, arguments, config_file, keys, listing
from token_files import open_batches, write_conversations, write_file

from jaxtrain import main
from jaxtrain.commands.command import read_line
from jaxtrain.config import hardware, launch, layout, schema
from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import RunConfig, format_value
from jaxtrain.data import loading
from jaxtrain.models import FAMILIES
from jaxtrain.models.activations import SAVED
from jaxtrain.optim.moments import INT8
from jaxtrain.step.validate import validate_step

LARGE = ("llama3_70b", "llama3_405b", "mixtral_8x7b", "qwen3_30b_a3b")  # configs with a layout for each number of GPUs


# ---- Rules that are those of the code which they protect


PACKED, RING = "data.packing=documents", "data.packing=none model.sliding_window=64 mesh.seq=2 mesh.fsdp=4 mesh.data=1"


@pytest.mark.parametrize(
    ("asked", "sm", "settings", "refused"),
    [
        ("attention.impl=cudnn", 80, PACKED, True),
        ("attention.impl=cudnn", 90, PACKED, False),
        ("attention.impl=cudnn", 80, "data.packing=none", False),
        ("attention.impl=cudnn", 75, "data.packing=none", True),
        ("attention.impl=cudnn", 80, RING, True),  # the halo of a chunk counts as a document
        ("attention.impl=cudnn", 80, f"{RING} parallel.context=ulysses", False),
        ("attention.impl=cudnn", 90, RING, False),
        ("attention.impl=cudnn", 90, "train.deterministic=true", True),
        ("attention.impl=cudnn", 100, "precision=f32", True),
        ("attention.impl=cudnn", 100, "model.attention_softcap=30.0", True),
        ("attention.impl=pallas", 90, "model.head_dim=256", False),
        ("attention.impl=pallas", 90, "model.head_dim=260", True),
        ("attention.impl=pallas", 100, PACKED, True),
        ("attention.forward=fp8", 90, "model.head_dim=192", False),
        ("attention.forward=fp8", 90, "model.head_dim=200", True),
        ("attention.forward=fp8", 100, PACKED, True),
    ],
)
def test_a_kernel_that_does_not_support_the_run_is_refused_before_jax_starts(asked, sm, settings, refused):
    words = ("precision=bf16", asked, *settings.split())
    run = loading.load_config([TINY, *(f"--config.{word}" for word in words)]).run
    found = validate_step(run, Devices("gpu", "a GPU", 8, 80.0, "test", sm))
    assert [p.key for p in found] == [asked.partition("=")[0]] * refused


# ---- Config files and overrides


def test_variants_and_derived_values(tmp_path):
    file = config_file(
        tmp_path,
        "v = parse_arg(arg, deep=False, seq=256)\nconfig.data.seq_len = v.seq\nconfig.model.num_layers = 9 if v.deep else 3\n"
        "config.model.d_ff = config.model.get_ref('d_model') * 4",
    )
    run = loading.load_config([f"{file}:deep,seq=512", "--config.model.d_model=96"]).run
    assert (run.data.seq_len, run.model.num_layers, run.model.d_ff) == (512, 9, 384)
    assert listing(tmp_path) == [str(tmp_path / "mine.py")], "reading a file leaves nothing beside it"


def test_overrides_take_the_type_of_their_key():
    """--config.KEY=VALUE, a value as an argument of its own, and a bare bool. The last one wins."""
    given = ["optimizer.lr=1", "train.steps=7", "train.steps=8", "log.tensorboard=false", "mesh.fsdp=-1", "profile.dump_hlo"]
    argv = [f"--config.{text}" for text in (*given, "sample.prompt=def f(x=1): ", "sharding.rules.vocab=")]
    run = loading.load_config([TINY, *argv, "--config.data.seq_len", "64"]).run
    assert run.optimizer.lr == 1.0 and isinstance(run.optimizer.lr, float)
    assert (run.train.steps, run.log.tensorboard, run.profile.dump_hlo, run.mesh.fsdp) == (8, False, True, -1)
    assert run.sample.prompt == "def f(x=1): " and dict(run.sharding.rules)["vocab"] == "" and run.data.seq_len == 64


def test_every_key_can_be_overridden():
    """Each key's own value, written as text, is read back as it was, so that keys of every type can be set."""
    values = dict(schema.flatten(schema.default_config()))
    argv = [f"--config.{key}={'' if value == '' else format_value(value)}" for key, value in values.items()]
    loaded = loading.load_config([TINY, *argv])
    assert loaded.problems == []
    assert loaded.run == schema.resolve(schema.default_config())[0]
    assert {loaded.origins[key] for key in values} == {"command line", "derived"}


def test_the_launch_is_recorded():
    argv = [f"--config={REPO}/configs/llama3_8b.py:half,gpus=4", "--config.train.steps=9", "--workdir=w"]
    args = read_line(main.parser(), argv)
    loaded = args.loaded
    record = loaded.launch
    assert (Path(record.config_file).name, record.variant) == ("llama3_8b.py", "half,gpus=4")
    assert (record.overrides, record.name) == ((("train.steps", "9"),), "llama3_8b-half-gpus-4")
    assert args.workdir == "w"
    assert json.loads(json.dumps(dataclasses.asdict(record)))["argv"][-1] == "--workdir=w"


@pytest.mark.parametrize(
    ("name", "gpus", "variant"),
    [
        ("llama3_405b:gpus=64", 64, ""),
        ("llama3_70b", 8, ""),
        ("mixtral_8x7b", 64, "mixtral_8x7b.py:gpus=64"),
        ("llama3_70b:int8", 16, "llama3_70b.py:int8,gpus=16"),
        ("llama3_8b:gpus=64", 8, ""),  # a file for any number of GPUs
    ],
)
def test_another_number_of_gpus_than_the_files_is_named_with_its_variant(name: str, gpus: int, variant: str):
    stem, _, given = name.partition(":")
    line = loading.load_config([f"--config={REPO}/configs/{stem}.py:{given}"]).launch.size_note(gpus)
    assert line.endswith(variant) and bool(line) == bool(variant)


def test_a_variant_that_the_file_refuses_is_not_named():
    line = loading.load_config([f"--config={REPO}/configs/llama3_405b.py"]).launch.size_note(8)
    assert "gpus=128" in line and ":gpus=8" not in line


# ---- Who set each key, and what follows from it


def test_explain_says_who_set_each_key(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main.main([TINY, "--config.train.steps=77", "--config.model.sliding_window=16", "--explain"]) == 0
    *lines, note = capsys.readouterr().out.splitlines()[1:]
    assert note.startswith("optimizer.warmup_steps: 50 ")
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    expected = {
        "train.steps": "77 command line",
        "model.d_model": "128 default",  # the file sets it to its default
        "optimizer.lr": "0.004 file",
        "model.head_dim": "0 -> 32 derived",
        "optimizer.warmup_steps": "50 -> 5 derived",
        "optimizer.decay_steps": "0 -> 72 default",
        "model.norm_eps": "1e-05 default",
        "checkpoint.dir": "'' -> runs/tiny/checkpoints default",
    }
    for key, words in expected.items():
        assert " ".join(rows[key]).startswith(words), key
    assert set(rows) == {key for key, _ in schema.flatten(schema.to_dict(RunConfig()))}
    # an unknown key, an unknown option, an unknown variant, and a problem of validate
    wrong = ("--config.train.stps=3", "--confg=x", f"{TINY}:none", "--config.mesh.seq=3")
    for argument in wrong:
        assert main.main([TINY, argument, "--explain"]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("error: ") == 1, "the error, and no table of another config"
    assert listing(tmp_path) == []


def test_a_value_that_a_file_sets_is_the_files(tmp_path):
    """A value equal to the default is the default's."""
    body = "config.optimizer.weight_decay = 0.2; config.model.norm_eps = 1e-5; config.log = dict(config.log, every_steps=7)"
    origins = loading.load_config([config_file(tmp_path, body), "--config.train.steps=1000"]).origins
    assert {key for key, who in origins.items() if who == "file"} == {"optimizer.weight_decay", "log.every_steps"}
    assert origins["train.steps"] == "command line"


@pytest.mark.parametrize(
    ("settings", "fitted", "noted"),
    [
        ("train.steps=20", {"warmup_steps": 1}, ["optimizer.warmup_steps"]),
        ("train.steps=60", {"warmup_steps": 4}, ["optimizer.warmup_steps"]),
        ("train.steps=60 optimizer.warmup_steps=50", {"warmup_steps": 50}, []),
        ("train.steps=60 optimizer.schedule=constant", {"warmup_steps": 50}, []),
        ("train.steps=20 optimizer.schedule=constant", {"warmup_steps": 1}, ["optimizer.warmup_steps"]),
        ("train.steps=700", {"warmup_steps": 50}, []),
        ("train.steps=7000", {"warmup_steps": 50}, []),
        ("train.steps=4 optimizer.schedule=wsd", {"warmup_steps": 1}, ["optimizer.warmup_steps"]),
        ("train.steps=40 optimizer.decay_steps=38", {"warmup_steps": 2, "decay_steps": 38}, ["optimizer.warmup_steps"]),
        ("optimizer.lr=1e-5", {"lr_min": 2.5e-7}, ["optimizer.lr_min"]),
        ("optimizer.lr=5e-5 optimizer.schedule=constant", {"lr_min": 1e-4}, []),
    ],
)
def test_the_schedule_of_a_file_is_fitted_to_a_shorter_run(settings, fitted, noted):
    loaded = loading.load_config([TINY, *arguments(settings)])
    assert {name: getattr(loaded.run.optimizer, name) for name in fitted} == fitted
    assert [note.partition(":")[0] for note in loaded.launch.notes] == noted
    assert keys(settings) == []


@pytest.mark.parametrize(
    ("body", "steps", "fitted", "notes"),
    [
        ("train.steps = 700", 60, {"warmup_steps": 6}, 1),  # the default: 100 of 1000 steps, whatever the file's
        ("train.steps = 50", 30, {"warmup_steps": 3}, 1),
        *((f"train.steps = {n}", 20, {"warmup_steps": 2}, 1) for n in (99, 100, 101, 150)),
        *(("train.steps = 100", n, {"warmup_steps": n // 10}, 1) for n in (99, 100, 101, 150)),
        ("train.steps = 500", 1000, {"warmup_steps": 100}, 0),
        ("train.steps = 500; config.optimizer.warmup_steps = 90", 60, {"warmup_steps": 10}, 1),  # the file's own
        ("train.steps = 500; config.optimizer.warmup_steps = 90", 800, {"warmup_steps": 90}, 0),
        ("optimizer.warmup_steps = 50", 60, {"warmup_steps": 3}, 1),  # of the 1000 steps that a run of the file has
        ("optimizer.warmup_steps = 0", 60, {"warmup_steps": 0}, 0),
        ("optimizer.schedule = 'wsd'; config.optimizer.decay_steps = 200", 500, {"warmup_steps": 50, "decay_steps": 100}, 2),
        ("optimizer.schedule = 'linear'; config.optimizer.decay_steps = 800", 500, {"warmup_steps": 50, "decay_steps": 400}, 2),
    ],
)
def test_a_shorter_run_keeps_the_fractions_of_the_file(tmp_path, body, steps, fitted, notes):
    loaded = loading.load_config([config_file(tmp_path, f"config.{body}"), f"--config.train.steps={steps}"])
    assert {name: getattr(loaded.run.optimizer, name) for name in fitted} == fitted and loaded.problems == []
    assert len(loaded.launch.notes) == notes


@pytest.mark.parametrize(
    ("body", "typed", "warmup", "origins"),
    [  # One epoch has 26 steps.
        ("warmup_steps = 10", "", 10, None),  # steps of the file, which fit
        ("warmup_steps = 10", "train.steps=13", 5, ["file", "train.epochs", "command line"]),
        ("warmup_steps = 10", "train.epochs=0.5", 5, ["file", "train.epochs", "train.epochs"]),
        ("warmup_steps = 10", "train.epochs=2", 10, None),
        ("warmup_steps = 50", "", 1, ["file", "default", "train.epochs"]),
        ("warmup_steps = 10; config.train.steps = 100", "", 2, ["file", "train.epochs"]),
        ("warmup_steps = 10; config.train.steps = 100", "train.steps=20", 2, ["file", "command line"]),
        ("weight_decay = 0.0", "", 2, ["default", "train.epochs"]),
        ("weight_decay = 0.0", "train.steps=12", 1, ["default", "command line"]),
    ],
)
def test_a_warmup_of_a_file_with_epochs(tmp_path, body, typed, warmup, origins):
    """It is in steps, or a fraction of the file's own train.steps. A note tells whose numbers it compares."""
    text = write_file(tmp_path / "text.tok", [[1] * 64] * 25)
    data = f"data.seq_len = 16; config.train.global_batch = 4; config.data.source = {str(text)!r}; config.train.epochs = 1.0"
    file = config_file(tmp_path, f"config.{data}; config.optimizer.{body}")
    loaded = loading.load_config([file, *arguments(typed)])
    assert loaded.run.optimizer.warmup_steps == warmup and loaded.problems == []
    told = [re.findall(r"\(([a-z. ]+)\)", note) for note in loaded.launch.notes if note.startswith("optimizer.")]
    assert told == ([origins] if origins else [])
    if not typed:
        made = launch.read_config_file(file.removeprefix("--config="), None)[0]
        assert made is not None and loading.resolve_with_epochs(made)[0] == loaded.run


@pytest.mark.parametrize("body", ["optimizer.warmup_steps = 200", "train.steps = 1000; config.optimizer.warmup_steps = 200"])
def test_epochs_of_the_command_line_shorten_the_warmup_of_a_file(tmp_path, body):
    """The file's run has 1000 steps, stated or by default, and one epoch has 26."""
    text = write_file(tmp_path / "text.tok", [[1] * 64] * 25)
    data = f"data.seq_len = 16; config.train.global_batch = 4; config.data.source = {str(text)!r}"
    loaded = loading.load_config([config_file(tmp_path, f"config.{data}; config.{body}"), "--config.train.epochs=1"])
    assert (loaded.run.train.steps, loaded.run.optimizer.warmup_steps) == (26, 5) and len(loaded.launch.notes) == 1


def test_a_mistake_in_the_steps_of_a_file_is_a_problem(tmp_path):
    body = "type(config).unlock(config); config.train = dict(config.train, steps='many')"
    assert [p.key for p in loading.load_config([config_file(tmp_path, body)]).problems] == ["train.steps"]


def test_samples_that_a_file_wants_are_left_out_without_tokens(tmp_path):
    loaded = loading.load_config([config_file(tmp_path, "config.sample.every_steps = 9"), "--config.sample.max_tokens=0"])
    assert loaded.run.sample.every_steps == 0 and [note.partition(":")[0] for note in loaded.launch.notes] == [
        "sample.every_steps"
    ]


def test_epochs_set_the_steps(tmp_path):
    """ceil(epochs x rows / rows of a step), of windows and of packed rows, and the schedule of the file is fitted to them."""
    text = write_file(tmp_path / "text.tok", [[1] * 64] * 25)  # 1600 tokens: 99 windows of 16
    chat = write_conversations(tmp_path / "chat.tok", [17, 9, 8, 8] * 6)
    data = "config.data.seq_len = 16\nconfig.train.global_batch = 4\nconfig.optimizer.warmup_steps = 50"
    for source, epochs in ((text, 0.001), (text, 0.5), (text, 2.0), (chat, 3.0), (f"{text}=0.5,{chat}=0.5", 1.0)):
        body = f"{data}\nconfig.data.source = {str(source)!r}\nconfig.train.epochs = {epochs}"
        loaded = loading.load_config([config_file(tmp_path, body)])
        steps = max(1, math.ceil(epochs * open_batches(source).tokens_per_epoch / 64))
        assert (loaded.run.train.steps, loaded.run.train.epochs, loaded.problems) == (steps, epochs, [])
        assert loaded.origins["train.steps"] == "derived" and 0 < loaded.run.optimizer.warmup_steps <= min(50, steps)
        assert loading.resolve_with_epochs(schema.to_dict(loaded.run))[0] == loaded.run
    # Steps on the command line win, with a note; without the file the config's steps stay, with a note.
    loaded = loading.load_config([config_file(tmp_path, body), "--config.train.steps=7"])
    assert (loaded.run.train.steps, loaded.run.train.epochs, len(loaded.launch.notes)) == (7, 0.0, 2)
    loaded = loading.load_config([config_file(tmp_path, body), f"--config.data.source={tmp_path}/gone.tok"])
    assert (loaded.run.train.steps, loaded.run.train.epochs, loaded.problems) == (1000, 1.0, [])
    assert "gone.tok" in loaded.launch.notes[0]


def test_a_default_warmup_gives_way_to_the_steps_of_a_file(tmp_path):
    """A file that contradicts itself is not fitted, but refused."""
    for body, steps in (("", 5), ("; config.optimizer.warmup_steps = 60", 60)):
        loaded = loading.load_config([config_file(tmp_path, f"config.train.steps = 50{body}")])
        assert loaded.run.optimizer.warmup_steps == steps and bool(loaded.launch.notes) == (not body)


# ---- Starting


def test_a_right_command_starts_training_with_the_budget_set(monkeypatch, tmp_path):
    """train.attempt gets the config, the workdir and the launch. XLA_CLIENT_MEM_FRACTION is set before the call."""
    seen = {}

    def attempt(run, workdir, how, overlay, own_process):
        seen.update(seq_len=run.data.seq_len, workdir=workdir, name=how.name, fraction=os.environ["XLA_CLIENT_MEM_FRACTION"])
        assert overlay.set.items() <= os.environ.items()
        return types.SimpleNamespace(exit_code=75, error=None)

    train = types.SimpleNamespace(attempt=attempt)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "jaxtrain.train.run", train)
    monkeypatch.setattr("jaxtrain.train.run", train, raising=False)
    monkeypatch.setattr(hardware, "probe", lambda: EIGHT_H200)
    monkeypatch.setattr(main, "start_processes", lambda *_: None)
    assert main.main([TINY, "--config.train.memory_fraction=0.9"]) == 75
    assert seen == {"seq_len": 128, "workdir": Path("runs/tiny"), "name": "tiny", "fraction": "0.9"}
    assert listing(tmp_path) == []


# ---- The shipped configs, sizes of the mesh, declared keys


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 8) for name in ("tiny", "llama2_7b", "llama3_1b", "llama3_8b", "mixtral_8x7b", "qwen3_30b_a3b")),
        *((f"llama3_70b:{variant}", 8) for variant in ("", "int8", "f32")),
        ("llama3_8b:half", 1),
        ("llama3_405b", 128),
        ("mixtral_8x7b:gpus=16", 16),
        *((f"{name}:gpus={gpus}", gpus) for name in LARGE for gpus in (64, 1024)),
        *((f"deepseek_v3:gpus={gpus}", gpus) for gpus in (128, 1024)),
    ],
)
def test_shipped_configs_are_valid(monkeypatch, name, count):
    monkeypatch.setattr("jaxtrain.data.opening.check_data", lambda *args, **how: [])  # as if the token files existed
    stem, _, variant = name.partition(":")
    devices = dataclasses.replace(EIGHT_H200, count=count, node=8 if count > 8 else EIGHT_H200.node)
    assert keys(base=f"--config={REPO}/configs/{stem}.py:{variant}", devices=devices) == []


def test_mesh_sizes_on_nodes():
    def sizes(devices=32, node=8, **mesh):
        found = layout.mesh_sizes(schema.Mesh(**mesh), devices, node)
        return tuple(found[axis] for axis in schema.MESH_AXES if found[axis] > 1 or axis not in schema.OPTIONAL_AXES)

    assert sizes() == (4, 8, 1, 1)  # data is the number of nodes, and fsdp the devices left inside a node
    assert sizes(tensor=2) == (4, 4, 2, 1)
    assert sizes(seq=16) == (2, 1, 1, 16)  # seq fills two nodes, so no device of a node is left for fsdp
    # Stages are on different nodes, as far as there are several.
    assert sizes(stage=4) == (1, 4, 8, 1, 1) and sizes(devices=64, stage=4) == (2, 4, 8, 1, 1)
    assert sizes(devices=16, stage=4) == (1, 4, 4, 1, 1) and sizes(devices=64, stage=4, tensor=8) == (2, 4, 1, 8, 1)
    assert sizes(data=1) == (1, 32, 1, 1) and sizes(data=2, fsdp=2, tensor=-1) == (2, 2, 8, 1)
    assert sizes(devices=24, tensor=3, data=1) == (1, 8, 3, 1)
    with pytest.raises(schema.ConfigError):
        sizes(devices=24, tensor=3)


def test_declared_keys_hold_their_defaults_and_the_choices_that_exist():
    values = dict(schema.flatten(schema.to_dict(RunConfig())))
    assert set(schema.all_keys()) == set(values)
    for name, key in schema.all_keys().items():
        assert not key.choices or values[name] in key.choices, name
        assert key.out_of_range(values[name]) is None, name
    assert schema.choices("model.family") == tuple(FAMILIES)
    assert schema.choices("remat.policy") == (*SAVED, "custom")
    assert all(INT8 in schema.choices(f"dtypes.{moment}") for moment in ("m", "v"))
