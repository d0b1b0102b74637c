"""The supervisor's decisions: restarts and their pauses, exit codes of all nodes, options, the command for another node."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.config import commands
from jaxtrain.runtime import nodes, provenance
from jaxtrain.runtime.messages import Refusal
from jaxtrain.runtime.nodes import Nodes, is_here, remote_line, verdict
from jaxtrain.runtime.options import Options, whole_number
from jaxtrain.runtime.supervisor import Restarts, explain, trains_on_cpu

REPO = Path(__file__).resolve().parents[2]


# ---- Restarts


def test_pauses_double_up_to_a_minute():
    def pauses(count: int, first_s: int) -> list[int]:
        restarts = Restarts(99, first_s, 600)
        return [restarts.take() for _ in range(count)]

    assert pauses(8, 1) == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pauses(2, 90) == [90, 90]
    assert pauses(2, 0) == [0, 0]


@pytest.mark.parametrize(("code", "lasted_s", "row", "pause_s"), [(75, 600, 1, 5), (75, 599, 3, 20), (124, 6000, 3, 20)])
def test_an_attempt_that_made_progress_refills_the_budget(code: int, lasted_s: float, row: int, pause_s: int):
    """An attempt of at least 600 s refills the budget of restarts, unless a hang ended it."""
    restarts = Restarts(3, 5, 600)
    restarts.take()
    restarts.take()
    restarts.count(code, lasted_s)
    assert (restarts.take(), restarts.row, restarts.total) == (pause_s, row, 3)


EXITS = {134: (75, "ABRT"), 138: (75, "USR1"), 129: (129, "HUP"), 137: (137, "KILL")}


@pytest.mark.parametrize("code", [0, 75, 76, 130, 255, *EXITS])
def test_the_meaning_of_an_exit_code(code: int):
    becomes, signal = EXITS.get(code, (code, ""))
    status, text = explain(code)
    assert status == becomes and f"exit {code}" in text and signal in text


def test_gpus_that_the_user_hides():
    hidden = ({"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"})
    shown: tuple[dict[str, str], ...] = ({}, {"JAX_PLATFORMS": "cuda"}, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert all(map(trains_on_cpu, hidden)) and not any(map(trains_on_cpu, shown))


# ---- Options


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        # with the options of the fix, which are tried
        (["--nodes=a"], ""),
        (["--nodes=a,b;rm"], "--nodes=node1,node2"),
        (["--nodes=a,"], ""),
        (["--nodes=a,-oProxyCommand=x"], ""),
        (["--nodes=a,b:22"], ""),  # only the first node has a port
        (["--nodes"], "--nodes=node1,node2"),
        (["--nodes=a,b,a"], ""),
        (["--nodes=a:65536,b"], "--nodes=a:12321,b"),
        (["--nodes=a:0,b"], "--nodes=a:12321,b"),
        (["--nodes=fd00::1:29500,fd00::2"], "--nodes=[fd00::1]:29500,fd00::2"),
        (["--nodes=a,me@fd00::2:29500"], "--nodes=a,me@[fd00::2]"),
        (["--nodes=[fd00::1]:0,b"], "--nodes=[fd00::1]:12321,b"),
        (["--nodes=[a],b"], ""),
        (["--nodes=[fd00::1],fd00::1"], ""),
        (["--no-preflight=1"], ""),
        *((["--nodes=a,b", f"--{name}=1"], "") for name in ("process-id", "num-processes", "coordinator")),
    ],
)
def test_mistakes_in_options_are_refused(given: list[str], fix: str):
    with pytest.raises(Refusal, match=given[-1].partition("=")[0]) as refusal:
        Options(given)
    assert refusal.value.code == 2 and f"Fix: {fix}" in str(refusal.value)
    Options([fix])


def test_options_of_the_supervisor_are_taken_out_of_the_trainers():
    options = Options(["--config=x.py", "--nodes=ada@a.lan:99,b", "a b", "--no-preflight", ""])
    assert options.arguments == ["--config=x.py", "a b", ""] and not options.preflight
    assert options.nodes and options.nodes.hosts == ["ada@a.lan:99", "b"]
    assert options.nodes.arguments(1) == ["--coordinator=a.lan:99", "--num-processes=2", "--process-id=1"]
    alone = Options(["--process-id=1"])
    assert alone.nodes is None and alone.preflight and alone.arguments == ["--process-id=1"]


def test_questions_are_told_from_training():
    for word in ("--help", "-h", "--explain", "--replay=DIR"):
        assert Options(["--config=x.py", word]).answers, word
    assert not Options(["--config=x.py", "-host", "--config.log.explain=1"]).answers


@pytest.mark.parametrize("text", ["-1", "two", "9999999", " 1"])
def test_a_variable_that_is_no_number_is_refused(text: str):
    with pytest.raises(Refusal, match=rf"^N = {text}: .* Fix: N=3\.$"):
        whole_number({"N": text}, "N", 3)


def test_numbers_in_variables():
    assert [whole_number(environ, "N", 3) for environ in ({}, {"N": ""}, {"N": "0"}, {"N": "010"})] == [3, 3, 0, 10]


# ---- Several nodes


@pytest.mark.parametrize(
    ("text", "others", "coordinator"),
    [
        ("[fd00::1],[fd00::2]", ["fd00::2"], "[fd00::1]:12321"),
        ("fd00::1,fd00::2", ["fd00::2"], "[fd00::1]:12321"),
        ("me@[fe80::1%eth0]:4000,me@fd00::2", ["me@fd00::2"], "[fe80::1%eth0]:4000"),
        ("me@a:4000,10.0.0.2", ["10.0.0.2"], "a:4000"),
    ],
)
def test_addresses_of_nodes(text: str, others: list[str], coordinator: str):
    """ssh takes an IPv6 address without brackets, and JAX takes it in brackets."""
    nodes = Nodes(text)
    assert (nodes.hosts[1:], nodes.coordinator) == (others, coordinator)


@pytest.mark.parametrize(
    ("code", "a", "b", "verdict_of_all"),
    [
        *((0, 0, 0, 0), (75, 2, 0, 2), (75, 3, None, 3), (75, 124, None, 124), (76, 76, None, 76), (0, 0, 1, 1)),
        *((75, 1, None, 75), (0, 255, None, 75), (143, 255, None, 75), (76, 255, None, 76), (0, None, None, 0)),
        (143, 1, None, 1),  # this node ended its attempt because the other node failed
    ],
)
def test_the_verdict_of_all_nodes(code: int, a: int | None, b: int | None, verdict_of_all: int):
    assert verdict(code, {"a": a, "b": b}, False) == verdict_of_all
    assert verdict(143, {"a": 1}, True) == 143, "a user's signal ended it"


def test_the_line_for_another_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The words are quoted for the shell on the other node."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    environ = {"JAXTRAIN_COMMIT": "abc", "JAXTRAIN_DIRTY": "no", "JAXTRAIN_RESTART": "2", "JAXTRAIN_NOTE": "/m", "HOME": "/me"}
    line = remote_line(Path("/a root"), ["main", "--config=a b.py", "$HOME"], environ)
    assert line == (
        f"cd '{folder}' && env JAXTRAIN_RESTARTS=0 JAXTRAIN_EXPECTED='abc no' JAXTRAIN_RESTART=2 "
        "'/a root/run.sh' main '--config=a b.py' '$HOME'"
    )


def test_an_address_of_this_node_is_recognised(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    assert is_here("127.0.0.1") and not is_here("192.0.2.1")  # an address reserved for documentation
    monkeypatch.setattr(nodes.socket, "gethostname", lambda: "node1.lan")
    assert is_here("node1") and is_here("node1.lan")
    Nodes("node1,node2").announce()
    assert capfd.readouterr().err == ""
    Nodes("192.0.2.1,node2").announce()
    said = capfd.readouterr().err
    assert "node1.lan" in said and "192.0.2.1" in said
    Nodes("localhost,node2").announce()
    assert "node1.lan" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "1", "RANK": "0"}, False),
        ({"JOB_COMPLETION_INDEX": "3"}, False),
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),
        ({"JAXTRAIN_EXPECTED": "abc no"}, False),
    ],
)
def test_the_first_process_speaks_for_all(environ: dict[str, str], expected: bool):
    assert provenance.prints_common_messages(environ) == expected


# ---- The package


def test_the_supervisor_imports_the_standard_library_alone():
    """The supervisor runs beside every run, so it must start at once and stay small."""
    left, seen = ["jaxtrain.commands.supervise", "jaxtrain.runtime", "jaxtrain.commands"], set()
    while left:
        module = left.pop()
        seen.add(module)
        file = Path(str(importlib.util.find_spec(module).origin))  # pyright: ignore
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in sys.stdlib_module_names or name.startswith("jaxtrain.runtime."), f"{module}: {name}"
            left += [name for name in names if name.startswith("jaxtrain.") and name not in seen]
    assert "jaxtrain.runtime.supervisor" in seen


def test_files_for_any_python_have_the_syntax_of_3_8():
    for name in ("__init__.py", "config/commands.py"):
        ast.parse((REPO / "jaxtrain" / name).read_text(), feature_version=(3, 8))
    with pytest.raises(SyntaxError):
        ast.parse("match x:\n    case 1: pass\n", feature_version=(3, 8))


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "version_info", (3, 11, 2))
    source = compile(Path(jaxtrain.__file__).read_text(), jaxtrain.__file__, "exec")
    with pytest.raises(ImportError, match=r"3\.11\.2: .* 3\.12 .*\./run\.sh"):
        exec(source, {})
    monkeypatch.setattr(sys, "argv", ["-m", "--config=x.py"])  # the module's name while python -m looks it up
    with pytest.raises(SystemExit) as end:
        exec(source, {})
    assert end.value.code == 2 and "3.11.2" in capsys.readouterr().err


# ---- Commands


def test_the_table_names_the_modules_that_run():
    assert not [*(REPO / "jaxtrain").glob("*/**/__main__.py")]
    runs = {path.stem for path in (REPO / "jaxtrain" / "commands").glob("[a-z]*.py")} - {"api", "command", "supervise"}
    assert set(commands.table()) == {"main"} | runs


def test_commands_are_spelled_as_they_were_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = "Check it with: python -m jaxtrain data verify FILE"
    for prefix, line in ((None, "python -m jaxtrain "), ("./run.sh", "./run.sh ")):
        monkeypatch.delenv(commands.PREFIX, raising=False)
        if prefix:
            monkeypatch.setenv(commands.PREFIX, prefix)
        assert commands.spelled(text) == text.replace("python -m jaxtrain ", line)
        assert commands.main([]) == 0 and f"\n  {line}main " in capsys.readouterr().out
    assert commands.main(["configs/a.py"]) == 2 and capsys.readouterr().err.endswith("./run.sh --config=configs/a.py.\n")


@pytest.mark.parametrize(
    ("word", "nearest"), [("pln", " plan"), ("reciept", " receipt"), ("train", ".main --config=FILE"), ("hff", " hf")]
)
def test_an_unknown_command_is_answered_with_the_nearest(
    word: str, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv(commands.PREFIX, raising=False)
    assert commands.main([word]) == 2 and capsys.readouterr().err.endswith(f"python -m jaxtrain{nearest}.\n")
    assert commands.main(["lint"]) == 2 and "jaxtrain.lint" not in capsys.readouterr().err  # no module of run.sh's commands
