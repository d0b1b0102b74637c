"""The command line: correct settings pass. All mistakes are reported at once with a fix, before anything is written."""

import dataclasses
import itertools
import json
import os
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

from jaxtrain import config, environment, explain, hardware, launch, main
from jaxtrain.activations import KEPT
from jaxtrain.config import Mesh, Model, Problem, RunConfig
from jaxtrain.context import Context
from jaxtrain.data import pipeline
from jaxtrain.hardware import Devices
from jaxtrain.models import FAMILIES, family
from jaxtrain.optim.moments import INT8
from jaxtrain.validate import validate, validate_step
from jaxtrain.validate.layout import mesh_sizes
from jaxtrain.validate.pipeline import check_kinds

REPO = Path(__file__).resolve().parents[2]
TINY = f"--config={REPO}/configs/tiny.py"
EIGHT_CPUS = Devices("cpu", "cpu", 8, 4.0, "test")
EIGHT_H200 = Devices("gpu", "NVIDIA H200", 8, 140.4, "test")
LARGE = ("llama3_70b", "llama3_405b", "mixtral_8x7b", "qwen3_30b_a3b")  # configs with a layout for each number of GPUs


def nodes(count: int) -> Devices:
    return dataclasses.replace(EIGHT_H200, count=8 * count, node=8)


# Wrong settings for configs/tiny.py on 8 CPUs: the settings, the key in the message, words of the message, and correct settings
# ("": those of the file). Tiny has 4 layers, d_model 128, 4 heads, 700 steps with 50 of warm-up, and batch 16.
RULES = [
    # Keys and their types
    ("model.num_layer=3", "model.num_layer", "Did you mean model.num_layers?", "model.num_layers=3"),
    ("lr=1", "lr", "Did you mean optimizer.lr?", "optimizer.lr=1"),
    ("train.seq_len=1", "train.seq_len", "Did you mean data.seq_len?", ""),
    ("model.dropout=0.1", "model.dropout", "no dropout", ""),
    ("dropout_rate=0.1", "dropout_rate", "no dropout", ""),
    ("train.steps=1e3", "train.steps", "must be a whole number. Write 1000.", "train.steps=1000"),
    ("model.d_model=3.5", "model.d_model", "must be a whole number", ""),
    ("log.tensorboard=maybe", "log.tensorboard", "Write true or false.", "log.tensorboard=true"),
    ("optimizer.lr=nan", "optimizer.lr", "must be a number", "optimizer.lr=1"),
    ("data.seq_len", "data.seq_len", "needs a value", "data.seq_len=256"),
    ("model=llama", "model", "is a section", "model.family=llama"),
    ("data.tokenizer=None", "data.tokenizer", "Write '' for not set", ""),
    # Names
    ("precision=fp16", "precision", "loss scaling, which jaxtrain does not have. Use bf16.", "precision=bf16"),
    ("precision=float16", "precision", "loss scaling", ""),
    ("precision=int8", "precision", "8-bit integers", ""),
    ("precision=mxfp8", "precision", "block-scaled", ""),
    ("precision=nvfp4", "precision", "block-scaled", ""),
    ("precision=float8", "precision", "Did you mean fp8?", ""),
    ("precision=bf61", "precision", "Did you mean bf16?", ""),
    ("dtypes.m=fp16", "dtypes.m", "loss scaling", "dtypes.m=bf16"),
    ("fp8.exclude=wo", "fp8.exclude", "is read only with precision = fp8, which is f32", "precision=fp8 fp8.exclude=wo"),
    ("precision=fp8 fp8.exclude=mlp.dwon", "fp8.exclude", "named 'mlp.dwon'. Did you mean down?", ""),
    ("precision=fp8 fp8.exclude=layers.0", "fp8.exclude", "names a layer by number", ""),
    ("precision=fp8 fp8.exclude=attention,mlp", "fp8.exclude", "leaves no matmul in FP8", "precision=fp8 fp8.exclude=mlp"),
    ("model.family=lama", "model.family", "Did you mean llama?", ""),
    ("loss.name=nothere.losses:mine", "loss.name", "module 'nothere.losses' is not found", ""),
    ("remat.policy=atention", "remat.policy", "Did you mean attention?", "remat.policy=attention"),
    ("data.packing=docs", "data.packing", "no such choice", "data.packing=none"),
    # Ranges
    ("model.num_layers=0", "model.num_layers", "must be at least 1", "model.num_layers=1"),
    ("data.seed=-1", "data.seed", "must be at least 0", "data.seed=0"),
    ("train.memory_fraction=1.5", "train.memory_fraction", "must be at most 1", "train.memory_fraction=1"),
    ("optimizer.beta2=1", "optimizer.beta2", "must be below 1", "optimizer.beta2=0.9999"),
    ("model.norm_eps=0", "model.norm_eps", "must be above 0", "model.norm_eps=1e-9"),
    # The model
    ("model.num_heads=5", "model.d_model", "does not divide into model.num_heads = 5", ""),
    ("model.num_kv_heads=3", "model.num_kv_heads", "Set one of 1, 2, 4", "model.num_kv_heads=4"),
    (
        "model.rope_scaling=yarn model.rope_beta_fast=1.0",
        "model.rope_beta_fast",
        "must be above model.rope_beta_slow = 1",
        "model.rope_scaling=yarn",
    ),
    ("model.rope_scaling=yarn model.rope_base=1.0", "model.rope_base", "divides by its logarithm", "model.rope_scaling=yarn"),
    ("model.head_dim=47", "model.head_dim", "must be even", "model.head_dim=48"),
    ("model.vocab_size=200", "model.vocab_size", "or more", "model.vocab_size=264"),
    # Second moments in bfloat16 need a fast decay.
    ("dtypes.v=bf16 optimizer.beta2=0.981", "dtypes.v", "rounds away the decay", "dtypes.v=bf16 optimizer.beta2=0.98"),
    ("dtypes.v=bf16 optimizer.beta2=0.99 optimizer.name=muon", "dtypes.v", "Set f32.", "dtypes.m=bf16 optimizer.beta2=0.99"),
    # The mesh and what divides over it
    ("mesh.data=2 mesh.fsdp=2", "mesh", "Set sizes whose product is 8", "mesh.data=2 mesh.fsdp=4"),
    ("mesh.seq=-1", "mesh", "only data and fsdp may both be -1", ""),
    ("mesh.tensor=0", "mesh.tensor", "must be a positive number", "mesh.tensor=1"),
    ("mesh.fsdp=3", "mesh", "product of the fixed sizes is 3, but the run has 8 cpu devices", "mesh.fsdp=4"),
    ("mesh.tensor=8", "model.num_heads", "does not divide over mesh.tensor = 8", "mesh.tensor=4"),
    (
        "mesh.tensor=4 model.num_heads=12 model.num_kv_heads=6 model.head_dim=32",
        "model.num_kv_heads",
        "does not divide over mesh.tensor = 4",
        "mesh.tensor=4 model.num_heads=12 model.num_kv_heads=2 model.head_dim=32",
    ),
    ("mesh.seq=2 data.seq_len=254", "data.seq_len", "two chunks for each of 2 ranks of a ring", "mesh.seq=2 data.seq_len=252"),
    ("model.d_model=204 model.head_dim=48", "model.d_model", "does not divide over mesh.fsdp = 8", ""),
    (
        "data.seq_len=255 mesh.tensor=2",
        "data.seq_len",
        "does not divide over mesh.tensor = 2",
        "data.seq_len=254 mesh.tensor=2",
    ),
    ("model.d_ff=513 mesh.tensor=2", "model.d_ff", "does not divide over mesh.tensor = 2", "model.d_ff=514 mesh.tensor=2"),
    ("model.vocab_size=265 mesh.tensor=2", "model.vocab_size", "does not divide", "model.vocab_size=266 mesh.tensor=2"),
    ("train.global_batch=13", "train.global_batch", "Set a multiple of 8, such as 16.", "train.global_batch=24"),
    (
        "train.grad_accum=3",
        "train.global_batch",
        "train.grad_accum = 3 microbatches",
        "train.grad_accum=3 train.global_batch=24",
    ),
    ("train.grad_accum=4", "train.global_batch", "a microbatch of 4 (train.grad_accum = 4) does not", "train.grad_accum=2"),
    ("mesh.fsdp=1 train.global_batch=12", "train.global_batch", "8 devices (data)", "mesh.fsdp=2 mesh.data=4"),
    # The rules of logical axes
    ("sharding.rules.embed=fsdp+tensr", "sharding.rules.embed", "Did you mean tensor?", ""),
    ("sharding.rules.embed=fsdp+fsdp", "sharding.rules.embed", "names a mesh axis twice", "sharding.rules.embed=fsdp"),
    ("sharding.rules.embed=tensor mesh.tensor=2", "sharding.rules.embed", "cannot be sharded over mesh axis 'tensor'", ""),
    ("mesh.tensor=2 sharding.rules.kv_heads=", "sharding.rules.kv_heads", "must be on the device of its key/value head", ""),
    ("mesh.tensor=2 sharding.rules.sequence=tensor", "sharding.rules.sequence", "sharded over mesh axis 'tensor'", ""),
    ("mesh.tensor=2 sharding.rules.head_dim=tensor", "sharding.rules.head_dim", "sharded over mesh axis 'tensor'", ""),
    ("sharding.rules.batch=data", "sharding.rules.embed", "would sum the same gradients", ""),
    ("sharding.rules.vocab=fsdp sharding.rules.embed=", "sharding.rules.vocab", "cannot be sharded over mesh axis 'fsdp'", ""),
    # Steps
    ("optimizer.warmup_steps=701", "optimizer.warmup_steps", "Set 700 or less", "optimizer.warmup_steps=700"),
    ("optimizer.decay_steps=651", "optimizer.decay_steps", "(50) and decay (651) together", "optimizer.decay_steps=650"),
    ("optimizer.decay_steps=700 optimizer.warmup_steps=0", "optimizer.decay_steps", "warmup (0) and decay (700)", ""),
    (
        "optimizer.schedule=wsd optimizer.warmup_steps=600",
        "optimizer.warmup_steps",
        "warmup (600) and decay (140) together",
        "optimizer.schedule=wsd optimizer.warmup_steps=560",
    ),
    ("optimizer.lr_min=1", "optimizer.lr_min", "above the peak", "optimizer.lr_min=0.001 optimizer.lr=0.001"),
    ("checkpoint.step=7", "checkpoint.step", "to resume from", ""),
    ("checkpoint.step=800", "checkpoint.step", "beyond the last step", ""),
    ("profile.start=699", "profile.start", "goes past the last step", "profile.start=697"),
    # Activation checkpointing and attention
    ("remat.policy=custom", "remat.tensors", "needs a list", "remat.policy=custom remat.tensors=q=keep"),
    ("remat.tensors=q=keep", "remat.tensors", "read only with remat.policy = custom", ""),
    ("remat.policy=custom remat.tensors=qq=keep", "remat.tensors", "no activation is named 'qq'", ""),
    ("remat.policy=full remat.every=5", "remat.every", "only model.num_layers = 4", "remat.policy=full remat.every=4"),
    ("attention.impl=cudnn", "attention.impl", "cuDNN needs a GPU", ""),
    # Files and folders
    ("data.eval_source=gone.tok", "data.eval_source", "no such file", ""),
    ("init.from=gone", "init.from", "no such folder", f"init.from={REPO}"),
    ("init.from=az://bucket/run", "init.from", "object stores other than gs:// and s3://", "init.from=gs://bucket/run"),
    ("data.source=s3://a/b.tok eval.every_steps=0", "data.source", "object stores are not supported", ""),
    ("data.source=gs://b/text.tok eval.every_steps=0", "data.source", "checkpoints may be at gs:// or s3://, all other", ""),
    ("checkpoint.dir=az://bucket/run", "checkpoint.dir", "with the store's own tool", "checkpoint.dir=gs://bucket/run"),
    ("checkpoint.dir=s3:/a/run", "checkpoint.dir", "names a local folder, not a bucket. Write s3://BUCKET/PATH.", ""),
    ("checkpoint.dir=gs:///run", "checkpoint.dir", "names no bucket", ""),
    ("checkpoint.dir=gs://bucket/run#2", "checkpoint.dir", "'#' has a special meaning", ""),
    ("paths.cache=/proc/cache", "paths.cache", "/proc is not writable", ""),
    ("--workdir=/proc/jaxtrain", "--workdir", "Name another place", ""),
    # What a resumed run may change
    ("checkpoint.allow_change=data.seqlen", "checkpoint.allow_change", "Did you mean data.seq_len?", ""),
    ("checkpoint.allow_change=model.rop_*", "checkpoint.allow_change", "no such key", "checkpoint.allow_change=model.rope_*"),
    ("checkpoint.allow_change=model.d_model", "checkpoint.allow_change", "can never change on resume", ""),
]
# Besides the rule of the key above, these settings break an independent second rule.
SEVERAL = (
    "model.num_heads",
    "attention.impl",
    "checkpoint.step=800",
    "sharding.rules",
    "mesh.tensor=2 sharding",
)


@pytest.fixture(autouse=True)
def a_plain_shell():
    """Remove the variables for fake CPU devices, which a run on GPUs refuses, and restore the environment afterwards."""
    before = dict(os.environ)
    for name in environment.select_variables(os.environ):
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


def problems(*argv: str, devices: Devices = EIGHT_CPUS, workdir: Path = Path("runs/test"), base: str = TINY) -> list[Problem]:
    """Return every problem of a command line, without starting a process."""
    loaded = launch.load([base, *argv], options={"workdir": str(workdir)})
    checked = validate(loaded.run, devices, Path(loaded.options["workdir"])) if loaded.file_read else []
    return [*loaded.problems, *checked]


def problems_of(*argv: str, **where) -> list[str]:
    """Return every problem of a command line as the text that the user reads."""
    return [str(p) for p in problems(*argv, **where)]


def arguments(settings: str) -> list[str]:
    """Split settings at blanks. Options stay as they are, and KEY=VALUE becomes --config.KEY=VALUE."""
    return [word if word.startswith("--") else f"--config.{word}" for word in settings.split()]


def config_file(folder: Path, body: str, name: str = "mine") -> str:
    """Write a config file whose get_config has this body, and return its --config option."""
    file = folder / f"{name}.py"
    head = (
        "from jaxtrain.config import default_config, parse_arg\n\n\ndef get_config(arg=None):\n    config = default_config()\n"
    )
    file.write_text(head + textwrap.indent(textwrap.dedent(body), "    ") + "\n    return config\n")
    return f"--config={file}"


def listing(*folders: Path) -> list[str]:
    return sorted(str(p) for folder in folders for p in folder.rglob("*"))


@pytest.fixture
def no_data(monkeypatch):
    """Skip the check of the large configs' token files, as if the files existed."""
    monkeypatch.setattr(pipeline, "check", lambda data, model_vocab, need_eval, loss: [])


# --- Mistakes


@pytest.mark.parametrize(("wrong", "key", "words", "right"), RULES, ids=[wrong for wrong, *_ in RULES])
def test_a_mistake_is_one_line_with_key_rule_and_remedy(wrong, key, words, right):
    found = problems(*arguments(wrong))
    assert len(found) == 1 or wrong.startswith(SEVERAL), found
    (line,) = [p for p in found if p.key == key and words in str(p)]
    assert line.rule and line.remedy and str(line).startswith((f"{key} = ", f"{key}: "))
    assert problems_of(*arguments(right)) == []


def test_all_mistakes_of_a_command_are_told_at_once_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    """The exit code is 2, each key's message has a fix, and no file is written, not even a __pycache__ beside the config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    before = listing(tmp_path, REPO / "configs")
    wrong = ["model.num_layer=3", "train.steps=1e3", "mesh.tensor=8", "model.vocab_size=200", "data.eval_source=gone.tok"]
    wrong += ["optimizer.warmup_steps=701", "remat.policy=atention"]
    assert main.main([TINY, *arguments(" ".join(wrong)), "config.model.num_layers=9"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[-1].endswith("problems; nothing was started and nothing written")
    for settings, key, words, _ in RULES:
        if settings in wrong:
            assert any(line.startswith((f"error: {key} = ", f"error: {key}: ")) and words in line for line in lines), (
                key,
                said.err,
            )
    assert "argument 'config.model.num_layers=9'" in said.err and "Write --config.model.num_layers=9." in said.err
    assert listing(tmp_path, REPO / "configs") == before


def test_a_file_that_cannot_be_read_does_not_hide_the_mistakes_of_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["--config=configs/lama3_8b.py", "--config.model.dpeth=2", "stray", "--steps=3"]) == 2
    said = capsys.readouterr().err
    for words in ("llama3_8b.py?", "model.dpeth", "argument 'stray'", "--steps: no such option"):
        assert words in said
    assert "4 problems; nothing was started and nothing written" in said
    assert listing(tmp_path) == []


# 4 layers, two to a stage: stages have different kinds of layers at the same position, unless the pattern repeats after two.
RING = "mesh.stage=2 mesh.seq=2 mesh.data=1 mesh.fsdp=2 train.grad_accum=4 model.sliding_window=8 model.attention_pattern="


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ("lggg", "parallel.context=ulysses"),
        ("lggg parallel.context=gather", "parallel.context=ulysses"),
        ("llg", "parallel.context=ulysses"),
        ("lg model.num_layers=3", "parallel.context=ulysses"),
        ("lggg mesh.seq=4 mesh.fsdp=1 parallel.context=ulysses attention.ulysses=2", "attention.ulysses=0"),
        ("lggg model.num_heads=3 model.num_kv_heads=3 model.head_dim=32", "mesh.stage=1 and mesh.seq=4"),
        # The pattern fits two stages, but not four groups of one layer.
        ("lg pipeline.schedule=interleaved pipeline.groups=2", "parallel.context=ulysses"),
        ("lg", ""),
        ("l", ""),
        ("lggg model.attention_pattern= model.sliding_window=0", ""),
    ],
)
def test_stages_with_layers_of_several_kinds_form_no_ring(more, remedy):
    """Ring attention on stages with different kinds of layers would deadlock. The refusal is one line, and its fix is valid."""
    argv = arguments(RING + more)
    found = problems_of(*argv)
    assert len(found) == bool(remedy), found
    for line in found:
        assert line.startswith("mesh.stage = 2: stages would deadlock"), line
        assert line.endswith(f"Set {remedy}."), line
        assert problems_of(*argv, *arguments(remedy.replace(" and ", " "))) == []


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemma_on_stages_around_a_ring(name):
    """gemma3_12b, with 48 layers, is the only Gemma preset with whole layer patterns on each of 2, 4 or 8 stages."""
    for preset, shape in family(name).PRESETS.items():
        for stages in (2, 4, 8):
            run = RunConfig(model=Model(family=name, **shape), mesh=Mesh(stage=stages, seq=2))
            found = list(check_kinds(run, stages, Context(1, 2), True, set()))
            assert [p.key for p in found] == ([] if preset == "gemma3_12b" else ["mesh.stage"]), (preset, stages)


@pytest.mark.parametrize("kernel", ["cudnn", "pallas"])
def test_rules_of_attention_are_the_kernels(kernel):
    """A config is refused exactly if the kernel does not support it.

    The configs combine GPUs, precisions, head dimensions, packing, soft caps and determinism.
    """
    from jaxtrain.kernels.attention import Hardware, Spec, implementation

    loaded = launch.load([TINY, f"--config.attention.impl={kernel}"])
    for sm, precision, head_dim, packing, softcap, deterministic in (
        (sm, precision, head_dim, packing, softcap, deterministic)
        for sm in (75, 80, 86, 89, 90, 100, 103, 120)
        for precision in ("bf16", "f32")
        for head_dim in (60, 64, 128, 192, 256, 320)
        for packing in ("documents", "none")
        for softcap in (0.0, 30.0)
        for deterministic in (False, True)
    ):
        run = dataclasses.replace(
            loaded.run,
            precision=precision,
            model=dataclasses.replace(loaded.run.model, head_dim=head_dim, attention_softcap=softcap),
            data=dataclasses.replace(loaded.run.data, packing=packing),
            train=dataclasses.replace(loaded.run.train, deterministic=deterministic),
        )
        found = validate_step(run, Devices("gpu", "a GPU", 8, 80.0, "test", sm))
        spec = Spec(head_dim, precision, packing == "documents", 32, softcap=softcap, deterministic=deterministic)
        reason = implementation(kernel, spec).unsupported(spec, Hardware("gpu", divmod(sm, 10)))
        assert bool(reason) == any(p.key == "attention.impl" for p in found), (sm, spec, reason, found)


def test_rules_of_fp8_attention_are_the_kernels():
    """attention.forward=fp8 is refused exactly if the FP8 kernel does not support the GPU, precision or head dimension."""
    from jaxtrain.kernels.attention import KERNEL, Hardware, Spec, implementation

    loaded = launch.load([TINY, "--config.attention.forward=fp8"])
    for sm, precision, head_dim in itertools.product((80, 89, 90, 100), ("bf16", "f32"), (60, 64, 192, 256)):
        run = dataclasses.replace(
            loaded.run, precision=precision, model=dataclasses.replace(loaded.run.model, head_dim=head_dim)
        )
        found = validate_step(run, Devices("gpu", "a GPU", 8, 80.0, "test", sm))
        spec = Spec(head_dim, precision, True, 32, fp8=KERNEL)
        reason = implementation("reference", spec).unsupported(spec, Hardware("gpu", divmod(sm, 10)))
        assert bool(reason) == any(p.key == "attention.forward" for p in found), (sm, spec, reason, found)


def test_packed_rows_of_cudnn_are_not_deterministic():
    """cuDNN's deterministic workspace for packed rows fits no GPU, so it is refused. `auto` and unpacked rows are valid."""
    asked = ["--config.train.deterministic=true", "--config.train.sdc_check_every=9", "--config.precision=bf16"]
    assert problems_of(*asked, devices=EIGHT_H200) == []
    (line,) = problems_of(*asked, "--config.attention.impl=cudnn", devices=EIGHT_H200)
    assert line.startswith("attention.impl = 'cudnn': with train.deterministic") and "Set attention.impl to auto" in line
    assert problems_of(*asked, "--config.attention.impl=cudnn", "--config.data.packing=none", devices=EIGHT_H200) == []


def test_memory_variables_are_checked_on_a_gpu(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert problems_of(devices=EIGHT_CPUS) == []
    (line,) = problems_of(devices=EIGHT_H200)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE = 'false'" in line


def test_a_gpu_that_was_asked_for_and_is_not_there():
    (line,) = problems_of(devices=hardware.probe({"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}))
    assert line.startswith("JAX_PLATFORMS = 'cuda': ")


def test_a_file_where_the_workdir_would_be(tmp_path):
    (tmp_path / "taken").write_text("")
    (line,) = problems_of(workdir=tmp_path / "taken" / "run")
    assert "taken is a file, not a folder" in line


def test_a_folder_without_permission(tmp_path, monkeypatch):
    """The check of the workdir uses os.access, not the permission bits. Root ignores those bits, so os.access is faked for
    root.
    """
    tmp_path.chmod(0o500)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path.resolve())
    (line,) = problems_of(workdir=tmp_path / "run" / "deep")
    assert f"{tmp_path} is not writable" in line


# --- Config files


def test_mistakes_in_a_file(tmp_path):
    file = config_file(tmp_path, "config.model.num_layer = 3\nconfig.model.dropout = 0.1\nconfig.data.source = None")
    lines = problems_of(base=file)
    assert any("Did you mean model.num_layers?" in line for line in lines)
    assert any("no dropout" in line for line in lines)
    assert any("data.source = None" in line or "data.source: must be str" in line for line in lines), lines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config(:\n", "line 1 raises SyntaxError"),
        ("def get_config():\n    return 1 / 0\n", "line 2 raises ZeroDivisionError"),
        ("x = 1\n", "defines no get_config"),
        ("def get_config():\n    return {}\n", "returned dict, not a ConfigDict"),
    ],
)
def test_files_that_are_no_configs(tmp_path, text, words):
    (tmp_path / "bad.py").write_text(text)
    (line,) = problems_of(base=f"--config={tmp_path}/bad.py")
    assert words in line


def test_wrong_type_in_a_file_names_its_line(tmp_path):
    (line,) = problems_of(base=config_file(tmp_path, "config.model.d_model = 'wide'"))
    assert "line 6 raises TypeError" in line


def test_variants(tmp_path):
    file = config_file(
        tmp_path,
        "v = parse_arg(arg, deep=False, seq=256)\nconfig.data.seq_len = v.seq\nconfig.model.num_layers = 9 if v.deep else 3",
    )
    run = launch.load([f"{file}:deep,seq=512"]).run
    assert (run.data.seq_len, run.model.num_layers) == (512, 9)
    lines = problems_of(base=f"{file}:dep,seq=long")
    assert "Did you mean deep?" in lines[0] and "must be a whole number, 1 or more" in lines[1]
    (line,) = problems_of(base=f"{TINY}:big")
    assert "no such variant" in line


def test_a_value_derived_in_a_file_follows_the_command_line(tmp_path):
    file = config_file(tmp_path, "config.model.d_ff = config.model.get_ref('d_model') * 4")
    assert launch.load([file, "--config.model.d_model=96"]).run.model.d_ff == 384


def test_reading_a_file_leaves_nothing_beside_it(tmp_path):
    launch.load([config_file(tmp_path, "")])
    assert listing(tmp_path) == [str(tmp_path / "mine.py")]


# --- Overrides


def test_overrides_take_the_type_of_their_key():
    run = launch.load(
        [
            TINY,
            "--config.optimizer.lr=1",  # a whole number for a float
            "--config.train.steps",
            "7",  # a value as an argument of its own
            "--config.train.steps=8",  # the last one wins
            "--config.log.tensorboard=false",
            "--config.profile.dump_hlo",  # a bare bool
            "--config.mesh.fsdp=-1",
            "--config.sample.prompt=def f(x=1): ",
            "--config.sharding.rules.vocab=",
        ]
    ).run
    assert run.optimizer.lr == 1.0 and isinstance(run.optimizer.lr, float)
    assert run.train.steps == 8
    assert run.log.tensorboard is False and run.profile.dump_hlo is True
    assert run.mesh.fsdp == -1
    assert run.sample.prompt == "def f(x=1): "
    assert dict(run.sharding.rules)["vocab"] == ""


def test_every_key_can_be_overridden():
    """Each key's own value, written as text, is read back as it was, so that keys of every type can be set."""
    values = dict(config.flatten(config.default_config()))
    argv = [f"--config.{key}={'' if value == '' else explain.show(value)}" for key, value in values.items()]
    loaded = launch.load([TINY, *argv])
    assert loaded.problems == []
    assert loaded.run == config.resolve(config.default_config())[0]
    assert {o for k, o in loaded.origins.items() if k in values} == {"command line"} | {
        "derived" for k in values if loaded.origins[k] == "derived"
    }


def test_the_launch_is_recorded():
    loaded = launch.load(
        ["--config=configs/llama3_8b.py:half,gpus=4", "--config.train.steps=9", "--workdir=w"], {"workdir": ""}
    )
    record = loaded.launch
    assert (Path(record.config_file).name, record.variant, record.overrides) == (
        "llama3_8b.py",
        "half,gpus=4",
        (("train.steps", "9"),),
    )
    assert record.name == "llama3_8b-half-gpus-4"
    assert loaded.options == {"workdir": "w"}
    assert json.loads(json.dumps(dataclasses.asdict(record)))["argv"][-1] == "--workdir=w"


@pytest.mark.parametrize("name", LARGE)
def test_another_number_of_gpus_than_the_files_is_named_with_its_variant(name: str):
    def line(variant: str, gpus: int) -> str:
        return launch.load([f"--config=configs/{name}.py{variant}"]).launch.other_size(gpus)

    assert line(":gpus=64", 64) == line("", 128 if name == "llama3_405b" else 8) == ""
    assert line(":gpus=64", 1024).endswith(f"for gpus=64, and there are 1,024. For those: --config=configs/{name}.py:gpus=1024")
    assert line("", 64).endswith(f"--config=configs/{name}.py:gpus=64")


def test_other_variants_stay_in_the_line_and_files_for_any_number_have_none():
    assert launch.load(["--config=configs/llama3_70b.py:int8"]).launch.other_size(16).endswith("llama3_70b.py:int8,gpus=16")
    assert launch.load(["--config=configs/llama3_8b.py:gpus=64"]).launch.other_size(8) == ""


def test_a_run_that_is_refused_names_the_variant_for_its_gpus(no_data, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("jaxtrain.hardware.probe", lambda: dataclasses.replace(EIGHT_H200, count=6))
    assert main.main([f"--config={REPO}/configs/llama3_70b.py", f"--workdir={tmp_path}/run"]) == 2
    said = capsys.readouterr().err
    assert "for gpus=8, and there are 6. For those: --config=" in said and "llama3_70b.py:gpus=6\nerror: " in said


SIZES = [("llama3_405b", 96, "gpus=64, or 128"), ("llama3_70b", 1000, "gpus=512, or 1024")]


@pytest.mark.parametrize(("name", "gpus", "fix"), SIZES)
def test_a_number_of_gpus_without_a_layout_is_refused(name: str, gpus: int, fix: str):
    (problem,) = launch.load([f"--config=configs/{name}.py:gpus={gpus}"]).problems
    assert "power of two" in problem.rule and fix in problem.remedy


def test_405b_on_too_few_gpus_is_refused():
    (problem,) = launch.load(["--config=configs/llama3_405b.py:gpus=32"]).problems
    assert "142 GiB" in problem.rule and "gpus=64" in problem.remedy


# --- Explain, help and docs


def test_a_run_is_not_resumed_with_the_default_config_by_oversight(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A command without --config is refused if a key that it does not set differs from the run in the folder. A run whose own
    command had no settings may be resumed.
    """

    def resume(command: str, *given: str) -> tuple[int, str]:
        stored = config.to_dict(launch.load([TINY, "--config.data.source=synthetic"]).run)
        (tmp_path / "receipt.json").write_text(json.dumps({"command": command, "resolved": stored}))
        return main.main([f"--workdir={tmp_path}", *given, "--explain"]), capsys.readouterr().err

    command = f"python -m jaxtrain.main {TINY} --config.data.source=synthetic --workdir=w"
    code, said = resume(command)
    assert code == 2 and said.count("error:") == 1
    rule = "the folder has a run with other settings, and this command has no --config"
    assert f"--workdir = '{tmp_path}': {rule}. Add those of the run: {TINY} --config.data.source=synthetic" in said
    assert resume(command, TINY)[0] == 0, "a change that the user asks for"
    assert resume(command, "--config.data.source=synthetic", "--config.train.steps=9")[0] == 0, "the same but for one key"
    assert resume("python -m jaxtrain.main --workdir=w")[0] == 0, "a change in the default config's file"


def test_explain_says_who_set_each_key(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main.main([TINY, "--config.train.steps=77", "--explain"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["train.steps"][:3] == ["77", "command", "line"]
    assert rows["data.seq_len"][:2] == ["128", "file"]
    assert rows["model.d_model"][:2] == ["128", "file"], "the file sets it to its default"
    assert rows["model.head_dim"][:4] == ["0", "->", "32", "derived"]
    assert rows["mesh.data"][:3] == ["-1", "->", "1"]
    assert rows["optimizer.decay_steps"][:4] == ["0", "->", "27", "default"]
    assert rows["model.norm_eps"][:2] == ["1e-05", "default"]
    assert rows["checkpoint.dir"][:4] == ["''", "->", "runs/tiny/checkpoints", "default"]
    assert set(rows) == {key for key, _ in config.flatten(config.to_dict(config.RunConfig()))}
    assert listing(tmp_path) == []


def test_a_value_that_a_file_sets_to_the_default_is_the_files(tmp_path):
    body = "config.optimizer.weight_decay = 0.1; config.log = dict(config.log); config.model.get_ref('d_model')"
    origins = launch.load([config_file(tmp_path, body), "--config.train.steps=1000"]).origins
    assert {key for key, who in origins.items() if who == "file"} == {"optimizer.weight_decay"} | {
        f"log.{key}" for key in config.default_config().log
    }
    assert origins["train.steps"] == "command line"


def test_a_copied_config_names_the_file_where_values_differ(tmp_path):
    for copied in ("copy.deepcopy(config)", "config.copy_and_resolve_references()", "type(config)(config)"):
        file = config_file(tmp_path, f"import copy; config.train.steps = 9; config = {copied}")
        origins = launch.load([file]).origins
        assert {key for key, who in origins.items() if who == "file"} == {"train.steps"}, copied


@pytest.mark.parametrize(
    ("settings", "keys", "notes"),
    [
        ("train.steps=20", {"warmup_steps": 1}, ["optimizer.warmup_steps: 50 of 700 steps (file) -> 1 of train.steps = 20"]),
        ("train.steps=350", {"warmup_steps": 50}, []),
        ("train.steps=50", {"warmup_steps": 50}, []),
        ("train.steps=1", {"warmup_steps": 1}, ["optimizer.warmup_steps: 50 of 700"]),
        ("train.steps=4 optimizer.schedule=wsd", {"warmup_steps": 1}, ["optimizer.warmup_steps: 50 of 700"]),
        ("train.steps=40 optimizer.decay_steps=38", {"warmup_steps": 2, "decay_steps": 38}, ["optimizer.warmup_steps: 50"]),
        ("optimizer.lr=1e-5", {"lr_min": 2.5e-7}, ["optimizer.lr_min: 0.0001 of a peak of 0.004 (file) -> 2.5e-07"]),
        ("optimizer.lr=5e-5 optimizer.schedule=constant", {"lr_min": 1e-4}, []),
    ],
)
def test_the_schedule_of_a_file_is_fitted_to_a_shorter_run(settings, keys, notes, no_data):
    loaded = launch.load([TINY, *arguments(settings)])
    assert {name: getattr(loaded.run.optimizer, name) for name in keys} == keys
    assert len(loaded.launch.notes) == len(notes)
    assert all(note.startswith(start) for note, start in zip(loaded.launch.notes, notes, strict=True))
    assert problems_of(*arguments(settings)) == []


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("train.steps=20 optimizer.warmup_steps=21", "optimizer.warmup_steps"),
        ("train.steps=20 optimizer.decay_steps=20", "optimizer.decay_steps"),
        ("optimizer.lr=1e-5 optimizer.lr_min=1e-4", "optimizer.lr_min"),
    ],
)
def test_a_contradiction_that_was_typed_is_refused(settings, key, no_data):
    (problem,) = problems(*arguments(settings))
    assert problem.key == key


def test_a_default_warmup_gives_way_to_the_steps_of_a_file(tmp_path):
    loaded = launch.load([config_file(tmp_path, "config.train.steps = 50")])
    assert loaded.run.optimizer.warmup_steps == 5 and "100 of 1000 steps (default)" in loaded.launch.notes[0]
    both = "config.train.steps = 50; config.optimizer.warmup_steps = 60"
    loaded = launch.load([config_file(tmp_path, both)])
    assert loaded.run.optimizer.warmup_steps == 60 and not loaded.launch.notes, "a file that contradicts itself is refused"


def test_explain_with_problems_shows_both(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main.main([TINY, "--config.mesh.seq=3", "--explain"]) == 2
    captured = capsys.readouterr()
    assert "model.d_model" in captured.out and "seq=3" in captured.err
    assert main.main([TINY, "--config.model.sliding_window=16", "--explain"]) == 0
    assert re.search(r"local_rope_base +0.0 -> 10000.0 +default", capsys.readouterr().out)
    assert main.main([TINY, "--explain=html"]) == 2


def test_every_key_is_documented():
    keys = {key for key, _ in config.flatten(config.to_dict(config.RunConfig()))}
    assert set(config.declared()) == keys
    page = explain.markdown()
    assert not [key for key in keys if f"| `{key}` |" not in page]


# --- Starting


def test_a_right_command_starts_training_with_the_budget_set(monkeypatch, tmp_path):
    """train.attempt gets the config, the workdir and the launch. XLA_CLIENT_MEM_FRACTION is set before the call."""
    seen = {}

    class Train:
        @staticmethod
        def attempt(run, workdir, how, overlay, own_process):
            seen.update(run=run, workdir=workdir, name=how.name, fraction=os.environ["XLA_CLIENT_MEM_FRACTION"])
            assert overlay.set.items() <= os.environ.items()
            return types.SimpleNamespace(exit_code=75, error=None)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "jaxtrain.train.run", Train)
    monkeypatch.setattr("jaxtrain.train.run", Train, raising=False)
    monkeypatch.setattr(hardware, "probe", lambda: EIGHT_H200)
    monkeypatch.setattr(main, "start_jax", lambda *_: None)
    assert main.main([TINY, "--config.train.memory_fraction=0.9"]) == 75
    assert seen["workdir"] == Path("runs/tiny") and seen["name"] == "tiny" and seen["fraction"] == "0.9"
    assert seen["run"].data.seq_len == 128
    assert listing(tmp_path) == []


# --- Host memory of CPU runs


@pytest.mark.parametrize(
    ("count", "argv", "gib"),
    [
        (1, [], 8.030 * 16 / 1.073742),
        (8, ["mesh.data=8", "mesh.fsdp=1"], 8 * 8.030 * 16 / 1.073742),
        (8, ["mesh.data=8", "mesh.fsdp=1", "sharding.zero=0"], 8 * 8.030 * 16 / 1.073742),
        (8, [], 8.030 * 16 / 1.073742),
        (8, ["sharding.zero=0"], 8 * 8.030 * 16 / 1.073742),
        (1, ["dtypes.m=bf16", "dtypes.v=bf16"], 8.030 * 12 / 1.073742),
        (1, ["lora.rank=8", "precision=f32"], 8.030 * 4 / 1.073742),
    ],
)
def test_a_cpu_without_the_memory_for_the_state_is_refused_before_jax_starts(no_data, count, argv, gib):
    devices = Devices("cpu", "cpu", count, 24.0 / count, "test")
    found = problems_of(*(f"--config.{each}" for each in argv), base=f"--config={REPO}/configs/llama3_8b.py", devices=devices)
    (told,) = [text for text in found if text.startswith("devices")]
    assert told.startswith(f"devices = '{count} cpu': a step takes at least {gib:.1f} GiB")
    assert "24.0 GiB of this machine's memory are available" in told and "configs/tiny.py" in told


def test_the_memory_of_cpus_is_that_of_this_process(no_data):
    """Half of the state fits into the memory of each of two processes, so no lack of memory is reported."""
    two = Devices("cpu", "cpu", 2, 100.0, "test", node=1)
    split = "--config.mesh.fsdp=2"
    found = problems_of(split, base=f"--config={REPO}/configs/llama3_8b.py", devices=two)
    assert not [text for text in found if text.startswith("devices")]
    assert not problems_of(devices=Devices("cpu", "cpu", 1, 0.1, "test"))


# --- The shipped configs


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("tiny", EIGHT_CPUS),
        ("tiny", Devices("cpu", "cpu", 1, 4.0, "test")),
        ("tiny", EIGHT_H200),
        ("llama2_7b", EIGHT_H200),
        ("llama3_8b", EIGHT_H200),
        ("llama3_8b:half", dataclasses.replace(EIGHT_H200, count=1)),
        ("llama3_70b", EIGHT_H200),
        ("llama3_70b:int8", EIGHT_H200),
        ("llama3_70b:f32", EIGHT_H200),
        ("llama3_405b", nodes(16)),
        ("llama3_405b:gpus=512", nodes(64)),
        ("mixtral_8x7b", EIGHT_H200),
        ("mixtral_8x7b:gpus=16", nodes(2)),
        ("qwen3_30b_a3b", EIGHT_H200),
        *((f"{name}:gpus={8 * n}", nodes(n)) for name in LARGE for n in (8, 16, 32, 128)),
        *((f"deepseek_v3:gpus={8 * n}", nodes(n)) for n in (16, 32, 128)),
        ("llama3_1b", EIGHT_H200),
        ("llama3_1b:gpus=1", dataclasses.replace(EIGHT_H200, count=1)),
    ],
)
def test_shipped_configs_are_valid(no_data, name, devices):
    stem, _, variant = name.partition(":")
    assert problems_of(base=f"--config={REPO}/configs/{stem}.py:{variant}", devices=devices) == []


@pytest.mark.parametrize("file", sorted((REPO / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_shipped_configs_open_with_their_commands(file):
    head = file.read_text().split('"""')[1]
    assert "./run.sh" in head and (f"configs/{file.stem}.py" in head)


def test_large_configs_have_a_sensible_batch(no_data):
    for name in ("llama2_7b", "llama3_8b", "llama3_70b", "llama3_1b", "llama3_405b", "mixtral_8x7b", "qwen3_30b_a3b"):
        # 70B on a single node has no memory for accumulation; a comment in its config gives the reason.
        variant = ":gpus=16" if name == "llama3_70b" else ""
        run = launch.load([f"--config={REPO}/configs/{name}.py{variant}"]).run
        assert 1e6 <= run.train.global_batch * run.data.seq_len <= 4e6, name


def test_mesh_sizes():
    def sizes(*argv, devices=EIGHT_CPUS):
        return mesh_sizes(launch.load([TINY, *argv]).run, devices)[0]

    one = dict.fromkeys(config.MESH_AXES, 1)
    assert sizes() == one | {"fsdp": 8}
    assert sizes("--config.mesh.tensor=2") == one | {"fsdp": 4, "tensor": 2}
    assert sizes("--config.mesh.data=2", "--config.mesh.fsdp=4") == one | {"data": 2, "fsdp": 4}
    assert sizes("--config.mesh.stage=2", "--config.mesh.expert=2") == one | {"fsdp": 2, "stage": 2, "expert": 2}
    assert sizes("--config.mesh.tensor=3") is None


def test_a_mesh_for_several_devices_on_one_cpu_device():
    """A machine without GPUs has one CPU device, unless JAX_NUM_CPU_DEVICES is higher."""
    run = launch.load([TINY, "--config.mesh.tensor=2", "--config.mesh.seq=2"]).run
    one = hardware.probe({"JAX_PLATFORMS": "cpu"})
    sizes, problems = mesh_sizes(run, one)
    assert sizes is None and [p.remedy for p in problems] == ["Set the variable JAX_NUM_CPU_DEVICES=4 to start 4 CPU devices."]
    assert mesh_sizes(run, hardware.probe({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}))[1] == []


def test_mesh_sizes_on_nodes():
    def sizes(devices=32, node=8, **mesh):
        found = config.mesh_sizes(config.Mesh(**mesh), devices, node)
        return tuple(found[axis] for axis in config.MESH_AXES if found[axis] > 1 or axis not in config.OPTIONAL_AXES)

    assert sizes() == (4, 8, 1, 1)  # data is the number of nodes, and fsdp the devices left inside a node
    assert sizes(tensor=2) == (4, 4, 2, 1)
    assert sizes(tensor=4, seq=2) == (4, 1, 4, 2)
    assert sizes(seq=16) == (2, 1, 1, 16)  # seq fills two nodes, so no device of a node is left for fsdp
    # Stages are on different nodes, as far as there are several.
    assert sizes(stage=4) == (1, 4, 8, 1, 1) and sizes(devices=64, stage=4) == (2, 4, 8, 1, 1)
    assert sizes(devices=16, stage=4) == (1, 4, 4, 1, 1) and sizes(devices=8, stage=4) == (1, 4, 2, 1, 1)
    assert sizes(stage=8, tensor=4) == (1, 8, 1, 4, 1) and sizes(devices=64, stage=4, tensor=8) == (2, 4, 1, 8, 1)
    assert sizes(data=1) == (1, 32, 1, 1) and sizes(data=2) == (2, 16, 1, 1)
    assert sizes(fsdp=1) == (32, 1, 1, 1) and sizes(fsdp=16, tensor=2) == (1, 16, 2, 1)
    assert sizes(data=2, fsdp=2, tensor=-1) == (2, 2, 8, 1)
    with pytest.raises(config.ConfigError, match="neither divide the 8 of a node nor fill nodes"):
        sizes(devices=24, tensor=3)
    assert sizes(devices=24, tensor=3, data=1) == (1, 8, 3, 1)


def test_defaults_are_among_the_values_that_their_keys_declare():
    values = dict(config.flatten(config.to_dict(config.RunConfig())))
    for name, key in config.declared().items():
        assert not key.choices or values[name] in key.choices, name
        assert key.out_of_range(values[name]) is None, name


def test_declared_choices_are_those_that_exist():
    assert config.choices("model.family") == tuple(FAMILIES)
    assert config.choices("remat.policy") == (*KEPT, "custom")
    assert all(INT8 in config.choices(f"dtypes.{moment}") for moment in ("m", "v"))


def test_a_range_names_the_limit_that_is_broken():
    key = config.Key("", at_least=0, below=1)
    assert key.values == "at least 0, below 1"
    assert key.out_of_range(0) is None
    assert key.out_of_range(-1) == ("must be at least 0", "Set 0 or more.")
    assert key.out_of_range(1) == ("must be below 1", "Set a number from 0 up to, not including, 1.")
    assert config.Key("", above=0).out_of_range(0) == ("must be above 0", "Set a positive number.")
    assert config.Key("", at_most=3).out_of_range(4) == ("must be at most 3", "Set 3 or less.")
