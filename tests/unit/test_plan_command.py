"""`python -m jaxtrain.plan`: its messages about mistakes, before it compiles. proofs/test_plan_programs.py prints a plan."""

import pytest

from jaxtrain.plan import __main__ as command

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


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--topology=h900:8"], "no chip 'h900'. Did you mean"),
        ([], "no machine is named"),
        (["--topology=h200:8", "--config.mesh.fsdp=3"], "the run has 8 NVIDIA H200 devices (--topology=h200:8)"),
        (["--topology=h200:8", "--config.model.num_heads=31"], "model.num_kv_heads"),
        (
            ["--topology=a100:8", "--config.precision=fp8"],
            "precision = 'fp8': FP8 needs a GPU of compute capability 8.9 or above",
        ),
        (["--topology=a100:8", "--config.attention.impl=cudnn"], "packed documents need a GPU from Hopper"),
        (["--topology=h200:8", "--config.optimizer.warmup_steps=99999"], "optimizer.warmup_steps"),
        (["--topology=h200:8", "--budget=soon"], "--budget = 'soon': must be a whole number"),
        (["--topology=h200:8", "--search", "--most=0"], "--most = '0': must be a whole number, 1 or more"),
        (["--topology=h200:8", "--most=5"], "--most: this action does not use it. Leave it out, or add --search."),
        (["--topology=h200:8", "--search", "--html=x.html"], "--html: --search does not use it"),
        (["--topology=h200:8", "--experts-load=0.9"], "--experts-load = '0.9': must be a number from 1"),
        (["--topology=h200:8", "--experts-load=1.5"], "--experts-load = '1.5': the model has no experts. Leave it out."),
        (
            ["--topology=h200:8", "--config.model.num_experts=8", "--experts-load=4.1"],
            "has 4 times an even load, the maximum",
        ),
        (["--topology=h200:8", "--search="], "--search = '': takes no value"),
        (["--topology=h200:8", "--shardings=nosuch"], "--shardings=nosuch: no array is like that"),
        (["--topology=h200:8", "--html=tests"], "is a folder"),
        (["--topology=h200:8", "--cache=pyproject.toml/plans"], "pyproject.toml is not a folder"),
        (["--topology=h200:8", "--search", "--calibrate"], "each of these is an action of its own"),
        (["--topology=h200:8", "--json=nowhere/plan.json"], "there is no folder"),
        (["--topology=h200:8", "--json=plan", "--html=./plan"], "--html = './plan': --json writes this file"),
        (["--topology=h200:8", "--toplogy=h200:8"], "Did you mean --topology?"),
        (["--calibrate"], "--config: --calibrate does not use it"),
        (
            ["--topology=h200:8", "--cudnn=yes"],
            "--cudnn = 'yes': must be one of auto, formula, library. For example --cudnn=formula.",
        ),
        (["--topology=h200:8", "--cudnn=library"], "JAX is imported in this process already"),
    ],
)
def test_mistakes_are_named(argv, said, capsys):
    assert said in refused(capsys, *SMALL, *argv)


def test_help_names_every_option(capsys):
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    for option in command.COMMAND.options:
        assert option.usage in text
    assert "h200_nvl" in text


def test_a_compile_that_fails_is_told(monkeypatch, capsys):
    def broken(run, topology, cudnn):
        raise RuntimeError("INTERNAL: out of registers")

    monkeypatch.setattr("jaxtrain.plan.compile.compile_step", broken)
    assert command.main([*SMALL, "--topology=h200:8"]) == 1
    assert "could not be compiled: RuntimeError: INTERNAL: out of registers" in capsys.readouterr().err


def test_mistakes_without_a_config(capsys):
    assert "JAX finds none" in refused(capsys, "--calibrate")
    assert "--topology: --calibrate does not use it" in refused(capsys, "--calibrate", "--topology=h200:8")


def test_a_folder_that_is_not_writable_is_known_before_compiling(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("jaxtrain.command_line.os.access", lambda path, mode: False)
    assert "may not be written" in refused(capsys, *SMALL, "--topology=h200:8", f"--json={tmp_path}/plan.json")


def test_a_file_that_cannot_be_written_after_all_is_told(monkeypatch, tmp_path, capsys):
    """If the output folder disappears while the step is compiled, the command prints the error and exits with code 1."""
    folder = tmp_path / "gone"
    folder.mkdir()

    def compiles(run, topology, cudnn):
        folder.rmdir()
        raise FileNotFoundError(2, "No such file or directory", str(folder / "plan.json"))

    monkeypatch.setattr("jaxtrain.plan.compile.compile_step", compiles)
    assert command.main([*SMALL, "--topology=h200:8", f"--json={folder}/plan.json"]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_a_search_without_any_plan_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("jaxtrain.plan.topology.devices", none_there)
    assert command.main([*SMALL, "--topology=h200:8", "--search", f"--cache={tmp_path}"]) == 1
    assert "XLA's GPU compiler is not there" in capsys.readouterr().err


def none_there(topology):
    raise RuntimeError("XLA's GPU compiler is not there: install the plan extra")
