"""`python -m jaxtrain plan`: its exit codes, before it compiles. proofs/test_plan_programs.py prints a plan."""

import dataclasses
import json
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from sample_plan import sample

from jaxtrain.commands import plan as command
from jaxtrain.commands.command import read_line
from jaxtrain.plan import result

SMALL = (
    "--config=configs/llama3_1b.py",
    "--config.model.num_layers=2",
    "--config.model.vocab_size=1024",
    "--config.data.seq_len=1024",
    "--config.train.global_batch=8",
    "--config.train.grad_accum=1",
)


@pytest.fixture(autouse=True)
def at_home(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # The command sets these variables; monkeypatch restores them for later tests.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def refused(capsys, *argv: str) -> str:
    assert command.main([*argv]) == 2
    return capsys.readouterr().err


def test_shardings_are_printed_without_compiling(capsys):
    assert command.main([*SMALL, "--topology=h200:8", "--shardings=mlp"]) == 0
    printed = capsys.readouterr().out
    assert "mlp.gate" in printed and "attention.wq" not in printed
    assert command.main([*SMALL, "--topology=h200:8", "--shardings=kind=activation"]) == 0
    printed = capsys.readouterr().out
    assert "mlp_gate" in printed and "mlp.gate" not in printed


def told(said: str) -> list[str]:
    """Return the keys of the mistakes that a command told."""
    return re.findall(r"^error: (.+?)(?: = .*)?: ", said, re.MULTILINE)


@pytest.fixture
def no_compile(monkeypatch):
    monkeypatch.setattr("jaxtrain.report.planning.compile_step", None)


ON = "--topology=h200:8"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--topology=h900:8"], "h900"),
        ([], "--topology"),
        ([ON, "--config.mesh.fsdp=3"], "mesh = "),
        ([ON, "--config.model.num_heads=31"], "model.num_kv_heads"),
        (["--topology=a100:8", "--config.precision=fp8"], "precision"),
        (["--topology=a100:8", "--config.attention.impl=cudnn"], "attention.impl"),
        ([ON, "--budget=soon"], "--budget"),
        ([ON, "--search", "--most=0"], "--most"),
        ([ON, "--most=5"], "--search"),
        ([ON, "--search", "--html=x.html"], "--html"),
        ([ON, "--experts-load=1.5"], "--experts-load"),
        ([ON, "--config.model.num_experts=8", "--experts-load=4.1"], "--experts-load"),
        ([ON, "--shardings=nosuch"], "name = 'nosuch'"),
        ([ON, "--shardings=kind=nosuch"], "kind = 'nosuch'"),
        ([ON, "--search", "--cache=pyproject.toml/plans"], "pyproject.toml"),
        ([ON, "--search", f"--cache={'x' * 256}"], "--cache"),
        ([ON, "--experts-load=0"], "--experts-load"),
        ([ON, "--search", "--calibrate"], "--calibrate"),
        ([ON, "--json=plan", "--html=./plan"], "--html"),
        ([ON, "--toplogy=h200:8"], "--topology?"),
        (["--calibrate"], "--config"),
        ([ON, "--cudnn=yes"], "--cudnn"),
        ([ON, "--tokens=many"], "--tokens"),
        ([ON, "--tokens=0"], "--tokens"),
        ([ON, "--tokens=1e12", "--search"], "--tokens"),
        ([ON, "--price-per-gpu-hour=2"], "--price-per-gpu-hour"),
        ([ON, "--failures-per-1000-gpu-days=1"], "--failures-per-1000-gpu-days"),
        ([ON, "--storage-gb-s=8"], "--storage-gb-s"),
        ([ON, "--tokens=1e12", "--storage-gb-s=0"], "--storage-gb-s"),
        ([ON, "--tokens=1e12", "--price-per-gpu-hour=free"], "--price-per-gpu-hour"),
        ([ON, "diff", "a.json", "b.json"], "argument 'diff'"),
        ([ON, "--cudnn=library"], "--cudnn"),
    ],
)
def test_mistakes_are_named(argv, said, capsys):
    assert said in refused(capsys, *SMALL, *argv)


@pytest.mark.parametrize(
    "wrong", ["--tokens=many", "--price-per-gpu-hour=free", "--failures-per-1000-gpu-days=-1", "--storage-gb-s=inf"]
)
def test_the_example_that_a_refusal_names_is_accepted(wrong, capsys):
    given = [*SMALL, ON, "--tokens=1e12"]
    (example,) = re.findall(r"For example (--.*)\.$", refused(capsys, *given, wrong), re.MULTILINE)
    assert example.partition("=")[0] == wrong.partition("=")[0]
    assert not read_line(command.parser(), [*given, example]).problems


def test_the_command_that_makes_an_old_plan_again_is_accepted(plans, capsys):
    said = refused(capsys, "diff", str(plans / "a.json"), str(plans / "old.json"))
    (words,) = re.findall(r"jaxtrain plan (--config.*)$", said, re.MULTILINE)
    again = read_line(command.parser(), shlex.split(words))
    assert not again.problems and again.json == str(plans / "old.json")
    assert again.loaded.launch.overrides == (("train.global_batch", "8"), ("train.grad_accum", "1"))


@pytest.fixture
def plans(tmp_path):
    """Write the sample plan, one of another step time, and one of an older format."""
    slower = sample(time=dataclasses.replace(sample().time, step_ms=900.0))
    trees = {"a": result.to_json(sample()), "b": result.to_json(slower), "old": result.to_json(sample()) | {"format": 1}}
    for name, tree in trees.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(tree))
    return tmp_path


def test_two_files_of_plans_are_compared(plans, capsys):
    a, b, out = (str(plans / f"{name}.json") for name in ("a", "b", "out"))
    assert command.main(["diff", a, a]) == 0
    assert command.main(["diff", a, b, f"--json={out}"]) == 1
    tree = json.loads(Path(out).read_text())
    assert tree["same"] is False and tree["figures"]["step ms"] == [708.8, 900.0]
    assert "900" in capsys.readouterr().out


def test_mistakes_of_a_diff(plans, capsys, no_compile):
    a, old = str(plans / "a.json"), str(plans / "old.json")
    assert told(refused(capsys, "diff")) == ["A", "B"]
    assert told(refused(capsys, "diff", a)) == ["B"]
    assert told(refused(capsys, "diff", a, a, a)) == [f"argument {a!r}"]
    assert told(refused(capsys, "diff", "gone.json", old)) == ["A", "B"]
    assert told(refused(capsys, "diff", a, a, ON)) == ["--topology"]
    assert told(refused(capsys, "diff", a, "configs/tiny.py")) == ["--topology"]
    assert told(refused(capsys, "diff", a, "configs/tiny.py", "--topology=h900:8")) == ["--topology"]
    assert told(refused(capsys, "diff", "configs/gone.py", old, ON)) == ["A"]
    assert told(refused(capsys, "diff", "configs/llama3_8b.py", old, "--topology=a100:3"))[::2] == ["model.d_model", "B"]
    assert told(refused(capsys, "diff", a, a, "--config.train.steps=3")) == ["--config.train.steps"]


def test_a_config_is_compiled_for_a_diff(plans, capsys, monkeypatch):
    made = []
    monkeypatch.setattr("jaxtrain.report.planning.compile_step", lambda run, topology, cudnn: made.append(topology.name))
    monkeypatch.setattr("jaxtrain.report.planning.read_plan", lambda compiled, topology, name: sample(config=name))
    assert command.main(["diff", str(plans / "a.json"), "configs/llama3_8b.py", ON]) == 0
    assert command.main(["diff", "configs/llama3_8b.py", "configs/llama3_8b.py:long", ON]) == 1
    assert made == ["h200:8"] * 3 and "configs/llama3_8b.py:long" in capsys.readouterr().out


def test_a_diff_whose_config_cannot_be_compiled_differs_from_one_that_finds_a_change(plans, capsys, monkeypatch):
    def broken(run, topology, cudnn):
        raise RuntimeError("INTERNAL: out of registers")

    monkeypatch.setattr("jaxtrain.report.planning.compile_step", broken)
    assert "out of registers" in refused(capsys, "diff", str(plans / "a.json"), "configs/llama3_8b.py", ON)


@pytest.fixture
def made_plan(monkeypatch):
    """Let the command find the sample plan, of a checkpoint of 96 GB, without compiling. Return what replaces fields of it."""
    changes = {}
    step = SimpleNamespace(program=SimpleNamespace(checkpoint_bytes=96 * 10**9), module=None)
    monkeypatch.setattr("jaxtrain.report.planning.compile_step", lambda *_: step)
    monkeypatch.setattr("jaxtrain.report.planning.read_plan", lambda *_, **__: sample(**changes))
    monkeypatch.setattr("jaxtrain.report.layer_schedule.layer_events", lambda *_: {})
    return changes


def test_the_whole_run_is_in_report_page_and_json(made_plan, tmp_path, capsys):
    files = [f"--{name}={tmp_path / name}" for name in ("json", "html")]
    assert command.main([*SMALL, ON, "--tokens=1.5T", "--price-per-gpu-hour=2", "--storage-gb-s=4", *files]) == 0
    tree = json.loads((tmp_path / "json").read_text())
    run = tree["run"]
    assert (run["tokens"], run["gpus"], run["checkpoint_bytes"], run["write_s"]) == (15 * 10**11, 8, 96 * 10**9, 24.0)
    assert run["steps"] == math.ceil(1.5e12 / 65_536) and len(run["ends"]) == 2
    assert run["ends"][0]["money"] == pytest.approx(2 * run["ends"][0]["gpu_hours"])
    options = f"--config.train.steps={run['steps']} --config.checkpoint.every_steps={run['every_steps']}"
    assert options in capsys.readouterr().out and options in (tmp_path / "html").read_text()
    assert result.from_json(tree) == sample()  # a plan that is read back has no run
    assert command.main([*SMALL, ON, f"--json={tmp_path / 'json'}"]) == 0
    assert "run" not in json.loads((tmp_path / "json").read_text())


def test_a_step_that_does_not_fit_has_no_run(made_plan, tmp_path, capsys):
    made_plan["fits"] = False
    assert command.main([*SMALL, ON, "--tokens=1e12", f"--json={tmp_path / 'json'}"]) == 0
    assert "--tokens" in capsys.readouterr().out and "run" not in json.loads((tmp_path / "json").read_text())


def test_failures_without_end_are_refused(made_plan, capsys):
    said = refused(capsys, *SMALL, ON, "--tokens=1e12", "--failures-per-1000-gpu-days=1e6")
    assert told(said) == ["--failures-per-1000-gpu-days"]


def test_help_names_every_option(capsys):
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert not [option.usage for option in command.parser().options if option.usage not in text] and "h200_nvl" in text


def test_a_compile_that_fails_is_told(monkeypatch, capsys):
    def broken(run, topology, cudnn):
        raise RuntimeError("INTERNAL: out of registers")

    monkeypatch.setattr("jaxtrain.report.planning.compile_step", broken)
    assert command.main([*SMALL, ON]) == 1
    assert "INTERNAL: out of registers" in capsys.readouterr().err


def test_a_search_without_any_plan_fails(monkeypatch, tmp_path, capsys):
    def none_there(topology):
        raise RuntimeError("no compiler is there")

    monkeypatch.setattr("jaxtrain.plan.topology.devices", none_there)
    assert command.main([*SMALL, ON, "--search", f"--cache={tmp_path}"]) == 1
    assert "no compiler" in capsys.readouterr().err
