"""The command line: what is right passes, and what is wrong is reported all at once with a remedy, before anything happens."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from jaxtrain import config, environment, explain, hardware, launch, main
from jaxtrain.config import Mesh, Model, RunConfig
from jaxtrain.context import Context
from jaxtrain.data import pipeline
from jaxtrain.hardware import Devices
from jaxtrain.models import family
from jaxtrain.validate import validate
from jaxtrain.validate.layout import mesh_sizes
from jaxtrain.validate.pipeline import check_kinds
from jaxtrain.validate.values import CHOICES

REPO = Path(__file__).resolve().parents[2]
TINY = f"--config={REPO}/configs/tiny.py"
EIGHT_CPUS = Devices("cpu", "cpu", 8, 4.0, "test")
EIGHT_H200 = Devices("gpu", "NVIDIA H200", 8, 140.4, "test")

# The mistakes that a command line can hold -> (arguments, key that must be named, words that must stand in its line).
MISTAKES = {
    "typo in key": (["--config.model.num_layer=3"], "model.num_layer", "Did you mean model.num_layers?"),
    "wrong type": (["--config.train.steps=1e3"], "train.steps", "must be int. Write 1000."),
    "heads over tensor": (["--config.mesh.tensor=8"], "model.num_heads", "does not divide over mesh.tensor = 8"),
    "batch": (["--config.train.global_batch=13"], "train.global_batch", "does not divide over"),
    "missing data": (["--config.data.eval_source=gone.tok"], "data.eval_source", "no such file"),
    "vocabulary": (["--config.model.vocab_size=200"], "model.vocab_size", "or more"),
    "warmup": (["--config.optimizer.warmup_steps=701"], "optimizer.warmup_steps", "Set 700 or less"),
    "remat name": (["--config.remat.policy=atention"], "remat.policy", "Did you mean attention?"),
    "mesh product": (["--config.mesh.data=2", "--config.mesh.fsdp=2"], "mesh", "Set sizes whose product is 8"),
    "workdir": (["--workdir=/proc/jaxtrain"], "--workdir", "Name another place"),
    "axes": (["--config.sharding.rules.embed=fsdp+tensr"], "sharding.rules.embed", "Did you mean tensor?"),
    "leftover": (["config.model.num_layers=9"], "argument 'config.model.num_layers=9'", "Write --config.model.num_layers=9."),
}


@pytest.fixture(autouse=True)
def a_plain_shell():
    """The suite's own fake devices would be refused on a described node of GPUs; and what a command exports is taken back."""
    before = dict(os.environ)
    for name in environment.changing(os.environ):
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


def problems_of(*argv: str, devices: Devices = EIGHT_CPUS, workdir: Path = Path("runs/test"), base: str = TINY) -> list[str]:
    """Every problem of a command line, as the user reads it, without starting a process."""
    loaded = launch.load([base, *argv], options={"workdir": str(workdir)})
    found = loaded.problems
    if loaded.file_read:
        found = found + validate(loaded.run, devices, Path(loaded.options["workdir"]))
    return [str(p) for p in found]


def config_file(folder: Path, body: str, name: str = "mine") -> str:
    """--config= of a file whose get_config has this body."""
    file = folder / f"{name}.py"
    head = (
        "from jaxtrain.config import default_config, parse_arg\n\n\ndef get_config(arg=None):\n    config = default_config()\n"
    )
    file.write_text(head + textwrap.indent(textwrap.dedent(body), "    ") + "\n    return config\n")
    return f"--config={file}"


def command(*argv: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """python -m jaxtrain.main in a process of its own, with a home and a working folder of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "HOME": str(cwd),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        **environ,
    }
    return subprocess.run(
        [sys.executable, "-m", "jaxtrain.main", *argv],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def listing(*folders: Path) -> list[str]:
    return sorted(str(p) for folder in folders for p in folder.rglob("*"))


@pytest.fixture
def no_data(monkeypatch):
    """The large configs' token files are taken to be there and right."""
    monkeypatch.setattr(pipeline, "check", lambda data, model_vocab, need_eval: [])


# --- Mistakes


def test_a_right_command_line_has_no_problems():
    assert problems_of() == []


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_one_line(name):
    argv, key, words = MISTAKES[name]
    lines = problems_of(*argv)
    assert len(lines) == 1, lines
    assert lines[0].startswith((f"{key} = ", f"{key}: ")) and words in lines[0]


def test_all_mistakes_at_once_through_the_real_command(tmp_path):
    """Exit code 2, every key with its remedy, and not a file anywhere: not even a __pycache__ beside the config."""
    before = listing(tmp_path, REPO / "configs")
    done = command(TINY, *(arg for argv, _, _ in MISTAKES.values() for arg in argv), cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    for _, key, words in MISTAKES.values():
        assert any(line.startswith((f"  {key} = ", f"  {key}: ")) and words in line for line in lines), (key, done.stderr)
    assert lines[0].startswith(f"{len(MISTAKES)} problems")
    assert listing(tmp_path, REPO / "configs") == before


def test_several_mistakes_with_an_unreadable_file(tmp_path):
    """A file that cannot be read does not hide the mistakes of the command line."""
    done = command("--config=configs/lama3_8b.py", "--config.model.dpeth=2", "stray", "--steps=3", cwd=tmp_path)
    assert done.returncode == 2
    for words in ("llama3_8b.py?", "model.dpeth", "argument 'stray'", "--steps: no such option"):
        assert words in done.stderr
    assert "4 problems; nothing was started and nothing written" in done.stderr
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config.precision=fp16"], "loss scaling, which jaxtrain does not have. Use bf16."),
        (["--config.precision=float16"], "loss scaling"),
        (["--config.precision=int8"], "8-bit integers"),
        (["--config.precision=mxfp8"], "block-scaled"),
        (["--config.precision=nvfp4"], "block-scaled"),
        (["--config.precision=float8"], "Did you mean fp8?"),
        (["--config.fp8.exclude=wo"], "is read only with precision = fp8, which is f32"),
        (
            ["--config.precision=fp8", "--config.fp8.exclude=mlp.dwon"],
            "no weight or block is named 'mlp.dwon'. Did you mean down?",
        ),
        (["--config.precision=fp8", "--config.fp8.exclude=layers.0"], "names a layer by number"),
        (["--config.precision=fp8", "--config.fp8.exclude=attention,mlp"], "leaves no matmul in FP8"),
        (["--config.dtypes.m=fp16"], "loss scaling"),
        (["--config.precision=bf61"], "Did you mean bf16?"),
        (["--config.model.dropout=0.1"], "no dropout"),
        (["--config.dropout_rate=0.1"], "no dropout"),
        (["--config.model.d_model=3.5"], "must be int"),
        (["--config.log.tensorboard=maybe"], "Write true or false."),
        (["--config.optimizer.lr=nan"], "must be float"),
        (["--config.data.seq_len"], "needs a value"),
        (["--config.model=llama"], "is a section"),
        (["--config.data.tokenizer=None"], "Write '' for not set"),
        (["--config.lr=1"], "Did you mean optimizer.lr?"),
        (["--config.train.seq_len=1"], "Did you mean data.seq_len?"),
        (["--config.model.family=lama"], "Did you mean llama?"),
        (["--config.loss.name=nothere.losses:mine"], "module 'nothere.losses' is not found"),
        (["--config.model.num_layers=0"], "must be at least 1"),
        (["--config.train.memory_fraction=1.5"], "must be at most 1"),
        (["--config.optimizer.beta2=1"], "must be below 1"),
        (["--config.dtypes.v=bf16", "--config.optimizer.beta2=0.999"], "dtypes.v = 'bf16': rounds away the decay"),
        (["--config.dtypes.v=bf16", "--config.optimizer.beta2=0.981", "--config.optimizer.name=muon"], "dtypes.v = 'bf16'"),
        (["--config.model.norm_eps=0"], "must be above 0"),
        (["--config.model.num_heads=5"], "model.d_model = 128: does not divide"),
        (["--config.model.num_kv_heads=3"], "Set one of 1, 2, 4"),
        (["--config.model.head_dim=47"], "must be even"),
        (["--config.mesh.seq=-1"], "only data and fsdp may both be -1"),
        (["--config.mesh.tensor=0"], "mesh.tensor = 0: must be a positive number"),
        (
            ["--config.mesh.seq=2", "--config.data.seq_len=254"],
            "does not divide into two chunks for each of 2 places of a ring",
        ),
        (["--config.mesh.fsdp=3"], "product of the fixed sizes is 3, but the run has 8 cpu devices"),
        (
            ["--config.model.d_model=204", "--config.model.head_dim=48"],
            "model.d_model = 204: does not divide over mesh.fsdp = 8",
        ),
        (["--config.data.seq_len=255", "--config.mesh.tensor=2"], "data.seq_len = 255: does not divide over mesh.tensor = 2"),
        (["--config.model.d_ff=513", "--config.mesh.tensor=2"], "model.d_ff = 513"),
        (["--config.model.vocab_size=265", "--config.mesh.tensor=2"], "model.vocab_size = 265"),
        (["--config.train.grad_accum=3"], "train.grad_accum = 3 microbatches"),
        (["--config.train.global_batch=12"], "Set a multiple of 8, such as 16."),
        (["--config.train.grad_accum=4"], "a microbatch of 4 (train.grad_accum = 4) does not divide over 8 devices (fsdp)"),
        (["--config.sharding.rules.embed=fsdp+fsdp"], "names a mesh axis twice"),
        (["--config.sharding.rules.embed=tensor", "--config.mesh.tensor=2"], "'tensor' also splits sharding.rules.embed"),
        (["--config.optimizer.decay_steps=690"], "warmup (50) and decay (690) together"),
        (["--config.optimizer.decay_steps=700", "--config.optimizer.warmup_steps=0"], "warmup (0) and decay (700) together"),
        (["--config.optimizer.schedule=wsd", "--config.optimizer.warmup_steps=600"], "warmup (600) and decay (140) together"),
        (["--config.optimizer.lr_min=1"], "above the peak"),
        (["--config.remat.policy=custom"], "needs a list"),
        (["--config.remat.tensors=q=keep"], "read only with remat.policy = custom"),
        (["--config.remat.policy=custom", "--config.remat.tensors=qq=keep"], "no activation is named 'qq'"),
        (["--config.remat.policy=full", "--config.remat.every=5"], "only model.num_layers = 4 layers"),
        (["--config.attention.impl=cudnn"], "cuDNN needs a GPU"),
        (["--config.init.from=gone"], "no such folder"),
        (["--config.init.from=s3://bucket/run"], "object stores are not supported"),
        (["--config.checkpoint.dir=s3://bucket/run"], "finished steps with `aws s3 sync`"),
        (["--config.checkpoint.dir=az://bucket/run"], "object stores are not supported but gs://"),
        (["--config.checkpoint.dir=gs:///run"], "names no bucket"),
        (["--config.checkpoint.dir=gs://bucket/run#2"], "'#' has a meaning of its own"),
        (["--config.data.source=gs://bucket/text.tok"], "checkpoints may lie at gs://, all else"),
        (["--config.checkpoint.step=7"], "to resume from"),
        (["--config.checkpoint.step=800"], "beyond the last step"),
        (["--config.checkpoint.allow_change=data.seqlen"], "Did you mean data.seq_len?"),
        (["--config.profile.start=698"], "goes past the last step"),
        (["--config.mesh.tensor=2", "--config.sharding.rules.kv_heads="], "must be where its key/value head is"),
        (["--config.mesh.tensor=2", "--config.sharding.rules.sequence=tensor"], "keys travel along mesh axis 'seq' only"),
        (["--config.mesh.tensor=2", "--config.sharding.rules.head_dim=tensor"], "a head's width cannot be split"),
        (["--config.sharding.rules.batch=data"], "would add up the same gradients"),
        (["--config.sharding.rules.vocab=fsdp", "--config.sharding.rules.embed="], "every device needs all logits"),
        (["--config.checkpoint.allow_change=model.rop_*"], "no such key"),
        (["--config.checkpoint.allow_change=model.d_model"], "can never change on resume"),
        (["--config.paths.cache=/proc/cache"], "paths.cache = '/proc/cache': /proc is not writable"),
    ],
)
def test_rules(argv, words):
    lines = problems_of(*argv)
    assert any(words in line for line in lines), lines


# 4 layers, two to a stage: at both places of a stage are layers of different kinds, unless the pattern repeats after two.
RING_OF_STAGES = ("mesh.stage=2", "mesh.seq=2", "mesh.data=1", "mesh.fsdp=2", "train.grad_accum=4", "model.sliding_window=8")


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        (("model.attention_pattern=lggg",), "attention.context=ulysses"),
        (("model.attention_pattern=lggg", "attention.context=gather"), "attention.context=ulysses"),
        (("model.attention_pattern=llg",), "attention.context=ulysses"),
        (("model.num_layers=3", "model.attention_pattern=lg"), "attention.context=ulysses"),
        (
            ("mesh.seq=4", "mesh.fsdp=1", "model.attention_pattern=lggg", "attention.context=ulysses", "attention.ulysses=2"),
            "attention.ulysses=0",
        ),
        (
            ("model.num_heads=3", "model.num_kv_heads=3", "model.head_dim=32", "model.attention_pattern=lggg"),
            "mesh.stage=1 and mesh.seq=4",
        ),
        # In phase on two stages, but not on four groups of one layer.
        (
            ("model.attention_pattern=lg", "pipeline.schedule=interleaved", "pipeline.groups=2"),
            "attention.context=ulysses",
        ),
    ],
)
def test_stages_with_layers_of_several_kinds_around_a_ring(more, remedy):
    """They would wait for each other forever. One line says so, and what it says to set is right."""
    argv = [f"--config.{o}" for o in (*RING_OF_STAGES, *more)]
    (line,) = problems_of(*argv)
    assert line.startswith("mesh.stage = 2: stages would wait for each other forever"), line
    assert line.endswith(f"Set {remedy}."), line
    assert problems_of(*argv, *(f"--config.{o}" for o in remedy.split(" and "))) == []


def test_stages_with_layers_of_one_kind_at_each_place_may_form_a_ring():
    for more in ("model.attention_pattern=lg", "model.attention_pattern=l", "model.sliding_window=0"):
        assert problems_of(*(f"--config.{o}" for o in (*RING_OF_STAGES, more))) == []


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemma_on_stages_around_a_ring(name):
    """Of the shipped presets only the 48 layers of the 12B divide into whole patterns."""
    for preset, shape in family(name).PRESETS.items():
        for stages in (2, 4, 8):
            run = RunConfig(model=Model(family=name, **shape), mesh=Mesh(stage=stages, seq=2))
            found = list(check_kinds(run, stages, Context(1, 2), True, set()))
            assert [p.key for p in found] == ([] if preset == "gemma3_12b" else ["mesh.stage"]), (preset, stages)


def test_second_moments_in_bfloat16_need_a_fast_decay():
    slow = ("--config.dtypes.v=bf16", "--config.optimizer.beta2=0.99")
    (line,) = problems_of(*slow)
    assert line.endswith("Set f32.")
    assert problems_of(*slow, "--config.dtypes.v=f32") == []
    for fine in (slow[:1], (slow[0], "--config.optimizer.beta2=0.98"), (slow[1], "--config.dtypes.m=bf16")):
        assert problems_of(*fine) == []


@pytest.mark.parametrize("kernel", ["cudnn", "pallas"])
def test_rules_of_attention_are_the_kernels(kernel):
    """What this says of a kernel is what the kernel says of itself, over everything they ask."""
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
        found = validate(run, Devices("gpu", "a GPU", 8, 80.0, "test", sm), Path("runs/test"))
        spec = Spec(head_dim, precision, packing == "documents", 32, softcap=softcap, deterministic=deterministic)
        reason = implementation(kernel).unsupported(spec, Hardware("gpu", divmod(sm, 10)))
        assert bool(reason) == any(p.key == "attention.impl" for p in found), (sm, spec, reason, found)


def test_packed_rows_of_cudnn_are_not_deterministic():
    """The workspace for that does not fit any GPU. Left to `auto`, a run takes Pallas."""
    asked = ["--config.train.deterministic=true", "--config.train.verify_every=9", "--config.precision=bf16"]
    assert problems_of(*asked, devices=EIGHT_H200) == []
    (line,) = problems_of(*asked, "--config.attention.impl=cudnn", devices=EIGHT_H200)
    assert line.startswith("attention.impl = 'cudnn': with train.deterministic") and "Set attention.impl to auto" in line
    assert problems_of(*asked, "--config.attention.impl=cudnn", "--config.data.packing=none", devices=EIGHT_H200) == []


@pytest.mark.parametrize(
    "argv", [["--config.data.packing=docs"], ["--config.data.source=s3://a/b.tok"], ["--config.data.seed=-1"]]
)
def test_one_mistake_is_one_line_whoever_finds_it(argv):
    assert len(problems_of(*argv, "--config.eval.every_steps=0")) == 1


def test_memory_variables_are_checked_on_a_gpu(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert problems_of(devices=EIGHT_CPUS) == []
    (line,) = problems_of(devices=EIGHT_H200)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE = 'false'" in line


def test_a_gpu_that_was_asked_for_and_is_not_there():
    (line,) = problems_of(devices=Devices("gpu", "", 0, 0.0, "JAX_PLATFORMS=cuda, but no NVIDIA driver"))
    assert "no device to run on (JAX_PLATFORMS=cuda, but no NVIDIA driver)" in line


def test_a_file_where_the_workdir_would_be(tmp_path):
    (tmp_path / "taken").write_text("")
    (line,) = problems_of(workdir=tmp_path / "taken" / "run")
    assert "taken is a file, not a folder" in line


def test_a_folder_without_permission(tmp_path, monkeypatch):
    """Asked of the system, not of the permission bits: for root, whom bits do not stop, the answer is made up here."""
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
    assert "Did you mean deep?" in lines[0] and "must be int" in lines[1]
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
    """Each key's own value, written as text, is read back as it was: no type is beyond the command line."""
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


# --- Explain, help and docs


def test_explain_says_who_set_each_key(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main.main([TINY, "--config.train.steps=77", "--explain"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["train.steps"][:3] == ["77", "command", "line"]
    assert rows["data.seq_len"][:2] == ["128", "file"]
    assert rows["model.head_dim"][:2] == ["32", "derived"]
    assert rows["model.norm_eps"][:2] == ["1e-05", "default"]
    assert rows["optimizer.weight_decay"][:2] == ["0.1", "default"]
    assert rows["checkpoint.dir"][:2] == ["''", "default"]
    assert set(rows) == {key for key, _ in config.flatten(config.to_dict(config.RunConfig()))}
    assert listing(tmp_path) == []


def test_explain_with_problems_shows_both(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main.main([TINY, "--config.mesh.seq=3", "--explain"]) == 2
    captured = capsys.readouterr()
    assert "model.d_model" in captured.out and "seq=3" in captured.err
    assert main.main([TINY, "--explain=html"]) == 2


def test_docs_page_is_current():
    assert (REPO / "docs" / "config.md").read_text() == explain.markdown(), (
        "run: python -m jaxtrain.main --explain=markdown > docs/config.md"
    )


def test_every_key_is_documented():
    keys = {key for key, _ in config.flatten(config.to_dict(config.RunConfig()))}
    assert set(config.docs()) == keys
    page = explain.markdown()
    assert not [key for key in keys if f"| `{key}` |" not in page]


def test_help_is_quick_and_imports_no_jax(tmp_path):
    start = time.monotonic()
    done = command("--help", cwd=tmp_path)
    took = time.monotonic() - start
    assert done.returncode == 0 and "--config.KEY=VALUE" in done.stdout and "llama3_70b" in done.stdout
    assert took < 2.0
    code = "import sys, jaxtrain.main, jaxtrain.models, jaxtrain.models.llama; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


def test_validation_imports_no_jax(tmp_path):
    """The memory budget is set after validation and must come before jax."""
    code = (
        "import sys; from pathlib import Path; from jaxtrain import hardware, launch; from jaxtrain.validate import validate;"
        "run = launch.load([]).run; found = validate(run, hardware.probe(), Path('runs/test')); print(*found);"
        "sys.exit('jax' in sys.modules or len(found))"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=False).returncode == 0


def test_the_list_of_commands(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(REPO)}

    def package(*argv: str):
        return subprocess.run(
            [sys.executable, "-m", "jaxtrain", *argv], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    listed = package("--help")
    assert listed.returncode == 0 and "python -m jaxtrain.main " in listed.stdout
    wrong = package("main")
    assert wrong.returncode == 2 and "Write python -m jaxtrain.main." in wrong.stderr


# --- Starting


def test_a_right_command_starts_training_with_the_budget_set(monkeypatch, tmp_path):
    """train.attempt gets the config, the workdir and the launch; the memory variable is exported before it is imported."""
    seen = {}

    class Train:
        @staticmethod
        def attempt(run, workdir, how, overlay, own_process):
            seen.update(run=run, workdir=workdir, name=how.name, fraction=os.environ["XLA_CLIENT_MEM_FRACTION"])
            assert overlay.set.items() <= os.environ.items()
            return types.SimpleNamespace(exit_code=75, error=None)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "jaxtrain.train", Train)
    monkeypatch.setattr("jaxtrain.train", Train, raising=False)
    monkeypatch.setattr(hardware, "probe", lambda: EIGHT_H200)
    assert main.main([TINY, "--config.train.memory_fraction=0.9"]) == 75
    assert seen["workdir"] == Path("runs/tiny") and seen["name"] == "tiny" and seen["fraction"] == "0.9"
    assert seen["run"].data.seq_len == 128
    assert listing(tmp_path) == []


# --- The memory of CPUs


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
    """Of two processes each holds half of the state."""
    two = Devices("cpu", "cpu", 2, 100.0, "test", node=1)
    split = "--config.mesh.fsdp=2"
    found = problems_of(split, base=f"--config={REPO}/configs/llama3_8b.py", devices=two)
    assert not [text for text in found if text.startswith("devices")]
    assert not problems_of(devices=Devices("cpu", "cpu", 1, 0.1, "test"))


# --- The configs that come with it


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
        ("llama3_70b:gpus=64", dataclasses.replace(EIGHT_H200, count=64)),
        ("llama3_405b", dataclasses.replace(EIGHT_H200, count=128)),
        ("llama3_405b:gpus=512", dataclasses.replace(EIGHT_H200, count=512)),
        ("mixtral_8x7b", EIGHT_H200),
        ("mixtral_8x7b:gpus=16", dataclasses.replace(EIGHT_H200, count=16)),
        ("qwen3_30b_a3b", EIGHT_H200),
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
    assert "python -m jaxtrain.main" in head and (f"configs/{file.stem}.py" in head)


def test_large_configs_have_a_sensible_batch(no_data):
    for name in ("llama2_7b", "llama3_8b", "llama3_70b", "llama3_1b", "llama3_405b", "mixtral_8x7b", "qwen3_30b_a3b"):
        # 70B on a single node has no room for accumulation, and says so in its config.
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


def test_mesh_sizes_on_nodes():
    def sizes(devices=32, node=8, **mesh):
        found = config.mesh_sizes(config.Mesh(**mesh), devices, node)
        return tuple(found[axis] for axis in config.MESH_AXES if found[axis] > 1 or axis not in config.OPTIONAL_AXES)

    assert sizes() == (4, 8, 1, 1)  # what is left inside a node, and the nodes
    assert sizes(tensor=2) == (4, 4, 2, 1)
    assert sizes(tensor=4, seq=2) == (4, 1, 4, 2)
    assert sizes(seq=16) == (2, 1, 1, 16)  # over two nodes: nothing of them is left
    # Stages lie on different nodes, as far as there are some.
    assert sizes(stage=4) == (1, 4, 8, 1, 1) and sizes(devices=64, stage=4) == (2, 4, 8, 1, 1)
    assert sizes(devices=16, stage=4) == (1, 4, 4, 1, 1) and sizes(devices=8, stage=4) == (1, 4, 2, 1, 1)
    assert sizes(stage=8, tensor=4) == (1, 8, 1, 4, 1) and sizes(devices=64, stage=4, tensor=8) == (2, 4, 1, 8, 1)
    assert sizes(data=1) == (1, 32, 1, 1) and sizes(data=2) == (2, 16, 1, 1)
    assert sizes(fsdp=1) == (32, 1, 1, 1) and sizes(fsdp=16, tensor=2) == (1, 16, 2, 1)
    assert sizes(data=2, fsdp=2, tensor=-1) == (2, 2, 8, 1)
    with pytest.raises(config.ConfigError, match="neither divide the 8 of a node nor fill nodes"):
        sizes(devices=24, tensor=3)
    assert sizes(devices=24, tensor=3, data=1) == (1, 8, 3, 1)


def test_choices_hold_the_defaults():
    values = dict(config.flatten(config.to_dict(config.RunConfig())))
    assert all(values[key] in known for key, known in CHOICES.items())
