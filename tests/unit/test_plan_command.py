"""`python -m jaxtrain plan`: its exit codes, before it compiles. proofs/test_plan_programs.py prints a plan."""

import pytest

from jaxtrain.commands import plan as command

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
        ([ON, "--cache=pyproject.toml/plans"], "pyproject.toml"),
        ([ON, f"--cache={'x' * 256}"], "--cache"),
        ([ON, "--experts-load=0"], "--experts-load"),
        ([ON, "--search", "--calibrate"], "--calibrate"),
        ([ON, "--json=plan", "--html=./plan"], "--html"),
        ([ON, "--toplogy=h200:8"], "--topology?"),
        (["--calibrate"], "--config"),
        ([ON, "--cudnn=yes"], "--cudnn"),
        ([ON, "--cudnn=library"], "--cudnn"),
    ],
)
def test_mistakes_are_named(argv, said, capsys):
    assert said in refused(capsys, *SMALL, *argv)


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
