"""What a training command refuses: each rule's key, and the fix that its message names, which is tried.

The exit code is 2, all mistakes are told at once, a mistake is told once, JAX is not started and nothing is written.
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest
from remedies import named_fix
from token_files import command, write_conversations

from jaxtrain import main
from jaxtrain.checkpoint.storage import COMMITTED
from jaxtrain.commands import hf, plan, sample
from jaxtrain.commands.command import read_line
from jaxtrain.config import explain, hardware, schema
from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import Problem, all_keys
from jaxtrain.data import loading, opening, prepare
from jaxtrain.step.validate import validate

REPO = Path(__file__).resolve().parents[2]
TINY = f"--config={REPO}/configs/tiny.py"
EIGHT_CPUS = Devices("cpu", "cpu", 8, 4.0, "test")
EIGHT_H200 = Devices("gpu", "NVIDIA H200", 8, 140.4, "test")

# 4 layers, two to a stage: stages have different kinds of layers at the same position, unless the pattern repeats after two.
RING = "mesh.stage=2 mesh.seq=2 mesh.data=1 mesh.fsdp=2 train.grad_accum=4 model.sliding_window=8 model.attention_pattern="

# Wrong settings for configs/tiny.py on 8 CPUs, the keys that are told, and a fix for the first: "" is the one that the message
# names. Tiny has 4 layers, d_model 128, 4 heads, 700 steps with 50 of warm-up, and batch 16.
REFUSED = [
    # Keys and their types
    ("model.num_layer=3", "model.num_layer", ""),
    ("dropout_rate=0.1", "dropout_rate", ""),
    ("train.steps=1e3", "train.steps", ""),
    ("log.tensorboard=maybe", "log.tensorboard", ""),
    ("optimizer.lr=nan", "optimizer.lr", ""),
    ("data.seq_len", "data.seq_len", "data.seq_len=256"),
    ("model=llama", "model", "model.family=llama"),
    ("data.tokenizer=None", "data.tokenizer", "data.tokenizer=byte"),
    # Names
    ("precision=fp16", "precision", ""),
    ("precision=mxfp8", "precision", ""),
    ("fp8.exclude=wo", "fp8.exclude", ""),
    ("precision=fp8 fp8.exclude=mlp.dwon", "fp8.exclude", ""),
    ("precision=fp8 fp8.exclude=attention,mlp", "fp8.exclude", "fp8.exclude=mlp"),
    ("model.family=lama", "model.family", ""),
    ("loss.name=nothere.losses:mine", "loss.name", "loss.name=cross_entropy"),
    # Ranges
    ("model.num_layers=0", "model.num_layers", ""),
    ("train.memory_fraction=1.5", "train.memory_fraction", ""),
    ("optimizer.beta2=1", "optimizer.beta2", ""),
    ("train.ema_decay=1", "train.ema_decay", ""),
    ("train.ema_decay=-0.1", "train.ema_decay", ""),
    ("model.norm_eps=0", "model.norm_eps", ""),
    ("optimizer.beta2=0.99999999", "optimizer.beta2", ""),
    ("optimizer.lr=1e-46", "optimizer.lr", ""),
    ("optimizer.eps=1e-39", "optimizer.eps", ""),
    ("optimizer.weight_decay=1e5", "optimizer.weight_decay", ""),
    ("optimizer.groups=embed.*:lr=1e39", "optimizer.groups", "optimizer.groups=embed.*:lr=250"),
    ("optimizer.groups=embed.*:lr=251", "optimizer.groups", "optimizer.groups=embed.*:lr=250"),
    ("optimizer.groups=embed.*:weight_decay=251", "optimizer.groups", "optimizer.groups=embed.*:weight_decay=250"),
    # The model
    ("model.num_heads=5", "model.num_kv_heads model.d_model", "model.num_kv_heads=1 model.head_dim=32"),
    ("model.rope_scaling=yarn model.rope_beta_fast=0.5", "model.rope_beta_fast", "model.rope_beta_fast=32"),
    ("model.rope_scaling=yarn model.rope_base=1.0", "model.rope_base", ""),
    ("model.head_dim=47", "model.head_dim", "model.head_dim=48"),
    ("model.vocab_size=200", "model.vocab_size", ""),
    ("dtypes.v=bf16 optimizer.beta2=0.981", "dtypes.v", ""),
    ("lora.rank=4 lora.targets=wq,wx", "lora.targets", ""),
    ("lora.rank=4 lora.targets=wq,gate,up lora.experts=none model.num_experts=4", "lora.targets", ""),
    ("lora.rank=4 lora.targets=gate,up lora.experts=none model.num_experts=4", "lora.targets", "lora.experts=each"),
    ("lora.targets=wq", "lora.targets", ""),
    ("lora.rslora=true", "lora.rslora", ""),
    ("lora.experts=none model.num_experts=4", "lora.experts", ""),
    ("lora.rank=4 lora.experts=shared", "lora.experts", ""),
    ("lora.rank=4 lora.experts=shared lora.targets=wq model.num_experts=4", "lora.experts", ""),
    ("lora.base=nf4", "lora.base", ""),
    ("lora.rank=4 lora.base=int4", "lora.base", "lora.base=nf4"),
    ("lora.rank=4 lora.base=nf4 precision=fp8", "lora.base", ""),
    ("lora.rank=4 lora.base=nf4 precision=fp8", "lora.base", "precision=bf16"),
    ("lora.rank=4 lora.base=mxfp4", "lora.base", ""),
    ("lora.rank=4 lora.base=mxfp4 model.d_model=144 model.head_dim=36", "lora.base", "lora.base=fp8"),
    ("lora.rank=4 lora.base=nf4 model.d_ff=352", "lora.base", ""),
    ("lora.rank=4 lora.base=nf4 mesh.tensor=4", "lora.base", ""),
    ("lora.rank=4 lora.base=nf4 mesh.tensor=4", "lora.base", "mesh.tensor=2"),
    ("lora.rank=4 lora.base=mxfp4 model.num_experts=4 model.d_ff=360", "lora.base", ""),
    ("lora.rank=4 lora.base=mxfp4 model.num_experts=4 model.d_ff=352", "", ""),
    ("lora.rank=4 lora.base=mxfp4 model.num_experts=4 model.shared_d_ff=36", "", ""),
    ("lora.rank=4 lora.base=nf4 model.family=helpers:WiderFamily", "lora.base", ""),
    ("init.base=runs/gone", "init.base", ""),
    # The mesh and what divides over it
    ("mesh.data=2 mesh.fsdp=2", "mesh", "mesh.fsdp=4"),
    ("mesh.seq=-1", "mesh", "mesh.data=1 mesh.fsdp=8"),
    ("mesh.tensor=0", "mesh.tensor", ""),
    ("mesh.fsdp=3", "mesh", "mesh.fsdp=4"),
    ("mesh.tensor=8", "model.num_heads", "mesh.tensor=4"),
    ("mesh.tensor=4 model.num_heads=12 model.num_kv_heads=6 model.head_dim=32", "model.num_kv_heads", "model.num_kv_heads=2"),
    ("mesh.seq=2 data.seq_len=254", "data.seq_len", ""),
    ("model.d_model=204 model.head_dim=48", "model.d_model", ""),
    ("train.global_batch=13", "train.global_batch", ""),
    ("train.grad_accum=3", "train.global_batch", ""),
    ("train.grad_accum=4", "train.global_batch", ""),
    ("train.batch_ramp=8-100", "train.batch_ramp", "train.batch_ramp=8:100"),
    ("train.batch_ramp=16:100", "train.batch_ramp", ""),
    ("train.batch_ramp=8:100,8:200", "train.batch_ramp", "train.batch_ramp=8:200"),
    ("train.batch_ramp=8:100,24:100 train.global_batch=32", "train.batch_ramp", "train.batch_ramp=8:100,24:200"),
    ("train.batch_ramp=4:100", "train.batch_ramp", ""),
    ("train.batch_ramp=15:100,40:200 train.global_batch=64 train.grad_accum=2", "train.batch_ramp", ""),
    ("train.batch_ramp=8:100 train.global_batch=13", "train.global_batch", ""),
    (
        "train.batch_ramp=16:9 train.global_batch=32 train.grad_accum=8 model.num_layers=8 mesh.stage=4 mesh.fsdp=2 "
        "pipeline.schedule=interleaved pipeline.groups=2",
        "",
        "",
    ),
    (
        "train.batch_ramp=8:9 train.global_batch=32 train.grad_accum=8 model.num_layers=8 mesh.stage=4 mesh.fsdp=2 "
        "pipeline.schedule=interleaved pipeline.groups=2",
        "train.batch_ramp",
        "train.batch_ramp=16:9",
    ),
    # The rules of logical axes
    ("sharding.rules.embed=fsdp+tensr", "sharding.rules.embed", "sharding.rules.embed=fsdp"),
    ("sharding.rules.embed=fsdp+fsdp", "sharding.rules.embed sharding.rules.embed", "sharding.rules.embed=fsdp"),
    ("sharding.rules.vocab=fsdp", "sharding.rules.vocab", ""),
    ("sharding.rules.heads=fsdp", "sharding.rules.heads", ""),
    ("sharding.rules.kv_heads=", "sharding.rules.kv_heads", "sharding.rules.heads="),
    ("mesh.stage=2 train.grad_accum=2 sharding.rules.layers=", "sharding.rules.layers", "mesh.stage=1"),
    ("sharding.rules.batch=data", "sharding.rules.embed", "sharding.rules.embed=data"),
    # Steps
    ("optimizer.warmup_steps=701", "optimizer.warmup_steps", ""),
    ("optimizer.decay_steps=651", "optimizer.decay_steps", "optimizer.decay_steps=650"),
    ("optimizer.lr_min=1", "optimizer.lr_min", "optimizer.lr_min=0.001"),
    ("optimizer.decay_shape=sqrt", "optimizer.decay_shape", ""),
    ("checkpoint.step=7", "checkpoint.step", ""),
    ("checkpoint.keep_best=true eval.every_steps=0", "checkpoint.keep_best", ""),
    ("profile.start=699", "profile.start", "profile.start=697"),
    # Activation checkpointing and attention
    ("remat.policy=custom", "remat.tensors", "remat.tensors=q=keep,mlp_up=offload"),
    ("remat.tensors=q=keep", "remat.tensors", ""),
    ("remat.policy=custom remat.tensors=qq=keep", "remat.tensors", "remat.tensors=q=keep"),
    ("remat.policy=full remat.every=5", "remat.every", ""),
    ("attention.impl=cudnn precision=bf16", "attention.impl", ""),
    # Stages with different kinds of layers around a ring would deadlock.
    (f"{RING}lggg", "mesh.stage", ""),
    (f"{RING}lg model.num_layers=3", "mesh.stage", ""),
    (f"{RING}lggg mesh.seq=4 mesh.fsdp=1 parallel.context=ulysses model.num_heads=2 model.num_kv_heads=2", "mesh.stage", ""),
    # The pattern fits two stages, but not four groups of one layer.
    (f"{RING}lg pipeline.schedule=interleaved pipeline.groups=2", "mesh.stage", ""),
    (f"{RING}lg", "", ""),
    ("train.epochs=2 data.source=synthetic", "train.epochs", "train.epochs=0"),
    ("train.epochs=2 train.steps=700", "train.epochs", "train.epochs=0"),
    # Files and folders
    ("train.epochs=2 data.source=gone.tok eval.every_steps=0", "data.source", "data.source=stdlib"),
    ("data.eval_source=gone.tok", "data.eval_source", "data.eval_source="),
    ("data.source=s3://a/b.tok eval.every_steps=0", "data.source", "data.source=synthetic"),
    ("checkpoint.dir=az://bucket/run", "checkpoint.dir", "checkpoint.dir=gs://bucket/run"),
    ("checkpoint.dir=s3:/a/run", "checkpoint.dir", ""),
    ("checkpoint.dir=gs://bucket/run#2", "checkpoint.dir", "checkpoint.dir=gs://bucket/run2"),
    ("paths.cache=/proc/cache", "paths.cache", "paths.cache="),
    ("--workdir=/proc/jaxtrain", "--workdir", "--workdir=runs/test"),
    ("--workdir=runs/[x]", "--workdir", "--workdir=runs/test"),
    (f"--workdir=runs/{'x' * 256}/y", "--workdir", "--workdir=runs/test"),
    (f"--workdir={'/x' * 3000}", "--workdir", "--workdir=runs/test"),
    ("checkpoint.step=-5", "checkpoint.step", ""),
    ("data.seq_len=0", "data.seq_len", ""),
    ("init.what=weights+optimizer", "init.what", ""),
    ("checkpoint.dir=runs/[x]", "checkpoint.dir", "checkpoint.dir=runs/x"),
    # What a resumed run may change
    ("checkpoint.allow_change=model.rop_*", "checkpoint.allow_change", "checkpoint.allow_change=model.rope_*"),
    ("checkpoint.allow_change=model.d_model", "checkpoint.allow_change", "checkpoint.allow_change="),
]


def arguments(settings: str) -> list[str]:
    """Split settings at blanks, except in quotes. Options stay as they are, and KEY=VALUE becomes --config.KEY=VALUE."""
    return [word if word.startswith("--") else f"--config.{word}" for word in shlex.split(settings)]


def problems(settings: str = "", devices: Devices = EIGHT_CPUS, workdir: object = "runs/test", base: str = TINY):
    """Return every problem of a command line, without starting a process."""
    args = read_line(main.parser(), [base, f"--workdir={workdir}", *arguments(settings)])
    checked = validate(args.loaded.run, devices, Path(args.workdir)) if args.loaded.file_read else []
    return [*args.problems, *checked]


def keys(*args: object, **how: object) -> list[str]:
    return [problem.key for problem in problems(*args, **how)]  # pyright: ignore[reportArgumentType]


def mended(settings: str, fix: str) -> str:
    """Return the settings with a fix, which replaces settings of the same keys. Unknown keys are left out."""
    known = {*all_keys(), "--workdir"} | {f"sharding.rules.{axis}" for axis, _ in schema.RunConfig().sharding.rules}
    replaced = {word.partition("=")[0] for word in fix.split()}
    words = [(word.partition("=")[0], word) for word in settings.split()]
    return " ".join([word for key, word in words if key in known and key not in replaced] + [fix])


@pytest.mark.parametrize(("wrong", "told", "fix"), REFUSED, ids=[wrong for wrong, *_ in REFUSED])
def test_a_mistake_is_told_once_with_its_key_and_a_fix(wrong: str, told: str, fix: str):
    """A fix leaves no problem. Consequences of a mistake, such as those of a wrong mesh, are not told."""
    found = problems(wrong)
    assert [problem.key for problem in found] == told.split(), found
    for problem in found:
        assert problem.rule and problem.remedy and str(problem).startswith((f"{problem.key} = ", f"{problem.key}: "))
    if found:
        assert problems(mended(wrong, fix or named_fix(found[0]))) == []


FLOATS = [key for key, value in schema.flatten(schema.to_dict(schema.RunConfig())) if isinstance(value, float)]


@pytest.mark.parametrize("key", FLOATS)
def test_numbers_that_are_none_in_float32_are_refused_and_the_named_one_is_taken(key: str):
    """1e-39 would become 0, and 1e39 infinite. Below an open limit is a number that rounds to this limit."""
    declaration = all_keys()[key]
    wrong = [1e-46, 1e-39, 1e39] + ([declaration.below * (1 - 1e-9)] if declaration.below else [])
    for value in wrong:
        refused = declaration.out_of_range(value)
        assert refused, (key, value)
        named = re.search(r"[\d.]+(e[-+]\d+)?(?= or (more|less))", refused[1])
        assert named and declaration.out_of_range(float(named[0])) is None, (key, value, refused)
    assert len(problems(f"{key}=1e-46")) == 1


WHOLE = [
    key
    for key, value in schema.flatten(schema.to_dict(schema.RunConfig()))
    if isinstance(value, int) and not isinstance(value, bool)
]


@pytest.mark.parametrize("key", WHOLE)
def test_numbers_above_int32_are_refused(key: str):
    for value in (2**31 if all_keys()[key].at_most is None else all_keys()[key].at_most + 1, 2**63, 10**30):
        (problem,) = [problem for problem in problems(f"{key}={value}") if problem.key == key]
        assert problem.remedy.startswith("Set ") and not problem.remedy.startswith(f"Set {value}")


# ---- Commands: all mistakes at once, and nothing is started or written


@pytest.fixture
def no_jax(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make a start of JAX an error, and work in an empty folder."""

    def start(*_: object) -> None:
        raise AssertionError("JAX was started")

    monkeypatch.setattr(main, "start_processes", start)
    for module in (sample, hf):
        monkeypatch.setattr(module, "start_jax", start)
    monkeypatch.chdir(tmp_path)


def listing(*folders: Path) -> list[str]:
    return sorted(str(p) for folder in folders for p in folder.rglob("*"))


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the keys of the mistakes on stderr. Nothing may be on stdout."""
    said = capsys.readouterr()
    assert said.out == ""
    return re.findall(r"^error: (.+?)(?: = .*)?: ", said.err, re.MULTILINE)


def test_all_mistakes_are_told_at_once_and_nothing_is_written(no_jax, tmp_path, monkeypatch, capsys):
    """Not even a __pycache__ is written beside the config. A config that is missing hides no other mistake."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    before = listing(tmp_path, REPO / "configs")
    wrong = "model.num_layer=3 train.steps=1e3 mesh.tensor=8 model.vocab_size=200 data.eval_source=gone.tok remat.policy=x"
    assert main.main([TINY, *arguments(wrong), "config.model.num_layers=9"]) == 2
    expected = {word.partition("=")[0] for word in wrong.split()} - {"mesh.tensor"}
    assert {*told(capsys)} == expected | {"model.num_heads", "argument 'config.model.num_layers=9'"}
    assert main.main(["--config=configs/lama3_8b.py", "--config.model.dpeth=2", "stray", "--steps=3"]) == 2
    assert {*told(capsys)} == {"--config", "model.dpeth", "argument 'stray'", "--steps"}
    assert main.main([TINY, "--explain=markdown"]) == 2 and told(capsys) == ["--explain"]
    assert listing(tmp_path, REPO / "configs") == before


@pytest.mark.parametrize(
    ("config_of", "machine"),
    [
        ("tiny.py", "h200:8"),
        ("llama3_70b.py", "h200:8"),
        ("llama3_70b.py:gpus=4", "h200:4"),
        ("llama3_70b.py:gpus=64", "h200:8x8"),
        ("llama3_405b.py", "h200:8x16"),
    ],
)
def test_a_plan_that_a_message_names_is_for_the_machine_of_the_config(config_of, machine, no_jax, capsys):
    file = f"--config={REPO}/configs/{config_of}"
    assert main.main([file, "--config.memory_estimation.enable=true"]) == 2
    named = {*re.findall(r"--topology=([\w:]+)", capsys.readouterr().err)}
    assert named == {machine} and f"--topology={machine} does" in explain.unchecked_note(
        loading.load_config([file]), on_gpus=False
    )


def test_a_problem_without_a_remedy_ends_with_its_rule():
    assert str(schema.Problem("cannot start", None, "the disk is full", "")) == "cannot start: the disk is full."


@pytest.mark.parametrize("asked", ["model.vocab_size=128264", "memory_estimation.enable=true"])
def test_a_command_that_a_fix_names_repeats_config_and_overrides(asked, no_jax, capsys, monkeypatch):
    """Typed as it is, it plans the refused config. An override with a mistake of its own is left out."""
    monkeypatch.delenv("JAXTRAIN_COMMAND_PREFIX", raising=False)
    right = [f"--config={REPO}/configs/llama3_70b.py:f32", "--config.sample.prompt=a 'b' c", "--config.model.num_layers=800"]
    assert main.main([*right, f"--config.{asked}", "--config.train.stps=3"]) == 2
    named = re.findall(r"python -m jaxtrain plan (.*? --topology=[\w:]+)", capsys.readouterr().err)
    assert len(named) == (2 if asked.startswith("memory") else 1)
    expected = loading.load_config([*right, *([] if asked.startswith("memory") else [f"--config.{asked}"])]).run
    for words in named:
        parsed = read_line(plan.parser(), shlex.split(words))
        assert parsed.problems == [] and parsed.loaded.run == expected


@pytest.mark.parametrize(
    ("program", "argv", "key"),
    [
        (main, [TINY, "--config.init.from=runs/gone"], "init.from"),
        (sample, ["--workdir=runs/gone"], "--workdir"),
        (hf, ["import", "/tmp/gone", "--out=x"], "/tmp/gone"),
        (hf, ["export", "runs/gone", "--out=x"], "runs/gone"),
    ],
)
def test_folders_and_files_that_do_not_exist(program, argv, key, no_jax, capsys, tmp_path):
    assert program.main(argv) == 2
    assert told(capsys) == [key] and not listing(tmp_path)


def checkpoint(step: int, unfinished: bool = False, **changes: object) -> Path:
    """Write the meta.json of a step of the folder `run`, whose config is tiny.py's with some keys changed.

    unfinished: the arrays of the step were not written to the end.
    """
    loaded = loading.load_config([TINY, *(f"--config.{key.replace('__', '.')}={value}" for key, value in changes.items())])
    meta = Path(f"run/checkpoints/{step}/meta.json")
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"config": schema.to_dict(loaded.run)}))
    if not unfinished:
        (meta.parent / COMMITTED).parent.mkdir()
        (meta.parent / COMMITTED).touch()
    return meta


def starts(*argv: str) -> None:
    """Check that a command is taken: it goes on to start JAX."""
    with pytest.raises(AssertionError, match="JAX was started"):
        main.main([TINY, "--workdir=run", *argv])


@pytest.mark.parametrize(
    ("wrong", "key", "right"),
    [
        ("model.d_ff=384", "model.d_ff", "model.d_ff=96"),  # another model than the checkpoint's
        ("model.d_ff=96 train.steps=19 optimizer.warmup_steps=5", "train.steps", "model.d_ff=96"),  # the run is at step 20
        ("model.d_ff=96 checkpoint.step=15", "checkpoint.step", "model.d_ff=96 checkpoint.step=10"),
        ("model.d_ff=96 data.seq_len=64", "data.seq_len", "model.d_ff=96 data.seq_len=64 checkpoint.allow_change=data.seq_len"),
    ],
)
def test_a_resume_that_its_checkpoint_forbids(wrong, key, right, no_jax, capsys, monkeypatch):
    """A warm-up that was fitted to a shorter run may change."""
    checkpoint(9, model__num_layers=2)  # the newest counts
    checkpoint(10, model__d_ff=96, train__steps=20)
    checkpoint(20, model__d_ff=96, train__steps=20)
    checkpoint(30, unfinished=True, model__d_ff=48)  # a kill in the middle of a save: the run resumes from step 20
    assert main.main([TINY, "--workdir=run", *arguments(wrong)]) == 2
    assert told(capsys) == [key]
    starts(*arguments(right))
    if key == "checkpoint.step":
        monkeypatch.setenv("JAXTRAIN_RESTART", "1")  # an earlier attempt has rolled back to step 15 and deleted it later
        starts(*arguments(wrong))


def test_a_damaged_meta_is_left_to_the_start_of_the_run(no_jax):
    meta = checkpoint(20)
    for text in ("", '{"config": 3}'):
        meta.write_text(text)
        starts()


def test_a_folder_in_which_a_run_is_at_work(no_jax, capsys):
    Path("run").mkdir()
    handle = os.open("run", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert main.main([TINY, "--workdir=run"]) == 2
    assert told(capsys) == ["--workdir"]
    assert main.main([TINY, "--workdir=run", "--explain"]) == 0, "reading a config disturbs no run"
    os.close(handle)
    starts()


def test_a_run_is_not_resumed_with_the_default_config_by_oversight(tmp_path, capsys):
    """A command without --config is refused if a key that it does not set differs from the run in the folder."""

    def resume(past: str, *given: str) -> int:
        stored = schema.to_dict(loading.load_config([TINY, "--config.data.source=synthetic"]).run)
        (tmp_path / "receipt.json").write_text(json.dumps({"command": past, "resolved": stored}))
        return main.main([f"--workdir={tmp_path}", *given, "--explain"])

    past = f"python -m jaxtrain.main {TINY} --config.data.source=synthetic --workdir=w"
    assert resume(past) == 2
    said = capsys.readouterr().err
    assert said.count("error: --workdir = ") == said.count("error:") == 1 and f"{TINY} --config.data.source=synthetic" in said
    assert resume(f"{past} --config.train.steps=5", "--config.train.steps=9") == 2
    assert "train.steps" not in capsys.readouterr().err, "a key that is given is not to be given again"
    assert resume(past, TINY) == 0, "a change that the user asks for"
    assert resume(past, "--config.data.source=synthetic", "--config.train.steps=9") == 0, "the same but for one key"
    assert resume("python -m jaxtrain.main --workdir=w") == 0, "a change in the default config's file"


# ---- The machine


def test_machines_that_cannot_run_it(monkeypatch, tmp_path):
    assert keys(devices=hardware.probe({"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""})) == ["JAX_PLATFORMS"]
    (tmp_path / "taken").write_text("")
    assert keys(workdir=tmp_path / "taken" / "run") == ["--workdir"]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert keys(devices=EIGHT_CPUS) == []
    assert keys(devices=EIGHT_H200) == ["XLA_PYTHON_CLIENT_PREALLOCATE"]


def llama3_8b(monkeypatch, settings: str, devices: Devices) -> list[Problem]:
    """Return the problems with the memory of the devices. The config's token files are taken for present."""
    monkeypatch.setattr(opening, "check_data", lambda *args, **how: [])
    found = problems(settings, devices, base=f"--config={REPO}/configs/llama3_8b.py")
    return [problem for problem in found if problem.key == "devices"]


@pytest.mark.parametrize(
    ("count", "settings", "each"),
    [(1, "", 16), (8, "mesh.data=8 mesh.fsdp=1", 8 * 16), (1, "lora.rank=8 precision=f32", 4)],
)
def test_a_cpu_without_the_memory_for_the_state_is_refused(monkeypatch, count, settings, each):
    """There are 8.030e9 parameters of `each` bytes."""
    (problem,) = llama3_8b(monkeypatch, settings, Devices("cpu", "cpu", count, 24.0 / count, "test"))
    assert f"{8.030 * each / 1.073742:.1f} GiB" in problem.rule and "24.0 GiB" in problem.rule


def test_the_memory_of_cpus_is_that_of_this_process(monkeypatch):
    """Half of the state fits into the memory of each of two processes, so no lack of memory is reported."""
    assert llama3_8b(monkeypatch, "mesh.fsdp=2", Devices("cpu", "cpu", 2, 100.0, "test", node=1)) == []
    assert keys(devices=Devices("cpu", "cpu", 1, 0.1, "test")) == []


def test_a_mesh_for_several_devices_on_one_cpu_device():
    """A machine without GPUs has one CPU device, unless JAX_NUM_CPU_DEVICES is higher."""
    settings = "mesh.tensor=2 mesh.seq=2"
    (problem,) = problems(settings, hardware.probe({"JAX_PLATFORMS": "cpu"}))
    assert problem.key == "mesh" and "JAX_NUM_CPU_DEVICES=4" in problem.remedy
    assert problems(settings, hardware.probe({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"})) == []
    uneven = problems("mesh.fsdp=3", hardware.probe({"JAX_PLATFORMS": "cpu"}))
    assert [p.key for p in uneven] == ["mesh", "model.d_model", "train.global_batch"]  # the last two are those of 3 devices
    assert "CPU_DEVICES" not in problems("mesh.seq=2 mesh.tensor=-1", hardware.probe({"JAX_PLATFORMS": "cpu"}))[0].remedy


@pytest.mark.parametrize(("name", "gpus", "fix"), [("llama3_405b", 32, "gpus=64"), ("llama3_70b", 1000, "gpus=512")])
def test_numbers_of_gpus_without_a_layout_are_refused(name: str, gpus: int, fix: str):
    (problem,) = loading.load_config([f"--config={REPO}/configs/{name}.py:gpus={gpus}"]).problems
    assert problem.key == "--config=FILE:gpus" and fix in problem.remedy
    assert not loading.load_config([f"--config={REPO}/configs/{name}.py:{fix}"]).problems


# ---- Config files


def config_file(folder: Path, body: str) -> str:
    """Write a config file whose get_config has this body, and return its --config option."""
    head = "from jaxtrain.config import default_config, parse_arg\n\ndef get_config(arg=None):\n    config = default_config()\n"
    (folder / "mine.py").write_text(head + textwrap.indent(body, "    ") + "\n    return config\n")
    return f"--config={folder}/mine.py"


def test_mistakes_in_a_file(tmp_path):
    base = config_file(tmp_path, "config.model.num_layer = 3\nconfig.model.dropout = 0.1\nconfig.data.source = None")
    assert {"model.num_layer", "model.dropout", "data.source"} <= {*keys(base=base)}
    variant = config_file(tmp_path, "v = parse_arg(arg, deep=False, seq=256)")
    assert len(problems(base=f"{variant}:dep,seq=long")) == 2 and len(problems(base=f"{TINY}:big")) == 1
    wide = config_file(tmp_path, "config.model.d_model = 'wide'")
    (tmp_path / "bad.py").write_text("def get_config(:\n")
    (tmp_path / "dict.py").write_text("def get_config():\n    return {}\n")
    for base, line in ((wide, "line 5"), (f"--config={tmp_path}/bad.py", "line 1"), (f"--config={tmp_path}/dict.py", "")):
        (problem,) = problems(base=base)
        assert problem.key == "--config" and line in problem.rule


# ---- Data


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """Write token files of bytes (text, text.val, chat) and an own.json without settings into a new folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a text of some length. " * 400)
    prepare.prepare_corpus([str(tmp_path / "in.txt")], tmp_path / "text.tok")
    shutil.copy(tmp_path / "text.tok", tmp_path / "text.val.tok")
    (tmp_path / "own.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "receipt.json").write_text("{}")
    write_conversations(tmp_path / "chat.tok", [200] * 40)
    return tmp_path


TEXT, HELD = "data.source=text.tok", "data.eval_source=text.val.tok"


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        # with the value that the message names in the key's place
        (f"{TEXT} {HELD} model.vocab_size=8", "model.vocab_size", "264"),
        (f"{TEXT} {HELD} data.seq_len=65536", "data.seq_len", "data.packing=best_fit"),
        (f"{TEXT} {HELD} data.tokenizer=own.json", "data.tokenizer", ""),
        (f"{TEXT} {HELD} data.tokenizer={'x' * 300}", "data.tokenizer", ""),  # too long to be opened, even by root
        ("data.tokenizer=own.json", "data.tokenizer", "byte"),
        (f"data.source=txt.tok {HELD}", "data.source", "text.tok"),
        (f"{TEXT} data.eval_source=txt.val.tok", "data.eval_source", "text.val.tok"),
        (f"'data.source=text.tok text.val.tok' {HELD}", "data.source", "text.tok,text.val.tok"),
        (f"{TEXT} 'data.eval_source=text.tok;b/x.val.tok'", "data.eval_source", "text=text.tok;x=b/x.val.tok"),
        ("data.source=chat.tok eval.every_steps=0 loss.name=dpo init.from=.", "data.source", ""),
        (TEXT, "data.eval_source", "Set text.val.tok,"),
        (f"data.source=. {HELD}", "data.source", "chat.tok,text.tok"),
        (f"{TEXT} data.eval_source=.", "data.eval_source", "Set text.val.tok"),
        (f"data.source=run {HELD}", "data.source", ""),  # the folder of a run: no command that reads its logs
    ],
)
def test_a_mistake_in_data_is_one_problem(files, settings, key, value):
    (problem,) = problems(settings)
    assert problem.key == key and value in problem.remedy and "run/" not in problem.remedy


def test_the_command_that_makes_a_token_file_is_named_once(files):
    """The command of the message for a text is run: with its file, the problem is gone."""
    (problem,) = problems(f"data.source=in.txt {HELD}")
    (words,) = re.findall(r"python -m jaxtrain data (prepare --input=\S+ --output=in.tok)", problem.remedy)
    assert problem.key == "data.source" and command(files, *words.split())[0] == 0
    assert problems(f"data.source=in.tok {HELD}") == []
    (problem,) = problems(f"data.source=corpus/web.jsonl.gz {HELD}")
    assert problem.remedy.endswith("--output=corpus/web.tok")


def test_the_commands_for_paths_with_spaces_can_be_typed(files):
    (files / "my texts").mkdir()
    (files / "in.txt").rename(files / "my texts" / "in.txt")
    (problem,) = problems(f"'data.source=my texts/in.txt' {HELD}")
    (words,) = re.findall(r"python -m jaxtrain data (prepare .*) \(", problem.remedy)
    assert command(files, *shlex.split(words))[0] == 0 and problems(f"'data.source=my texts/in.tok' {HELD}") == []
    made = shlex.split(opening.prepare_command("my own/tokenizer.json", "my texts"))
    assert made[5:] == ["--tokenizer=my own/tokenizer.json", "--input=my texts/*.txt", "--output=my texts.tok"]


ANSWERS = {"loss.name=cross_entropy": ("completion",), "loss.name=dpo": ("chosen", "rejected")}


@pytest.mark.parametrize("loss", ANSWERS)
def test_the_command_for_a_missing_file_makes_the_data_that_a_finetune_needs(files, loss):
    """The printed commands are typed: for both files, and for a held-out file that is missing beside its training file."""
    rows = ({"prompt": f"say {i}"} | {key: f"{key} {i}" for key in ANSWERS[loss]} for i in range(200))
    (files / "YOUR.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    needed = f"init.from=. {loss} data.source=new/a.tok 'data.eval_source=new=new/a.val.tok'"
    for missing in (["data.source", "data.eval_source"], ["data.eval_source"]):
        found = problems(needed)
        assert [p.key for p in found] == missing
        (words,) = re.findall(r"python -m jaxtrain data (prepare .*)", "\n".join(p.remedy for p in found))
        assert command(files, *shlex.split(words))[0] == 0 and problems(needed) == []
        (files / "new" / "a.val.tok").unlink()


def test_a_held_out_file_is_not_answered_with_the_one_that_is_learnt(files):
    (files / "text.val.tok").unlink()
    (problem,) = problems(f"{TEXT} {HELD}")
    assert problem.key == "data.eval_source" and "text.tok?" not in problem.remedy and "prepare" in problem.remedy
