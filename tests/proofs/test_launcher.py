"""run.sh installs packages and starts commands; uv, the environment's Python and nvidia-smi are fakes here.

`tests/campaign/fresh_clone.sh` tests the real installation: a clean clone with an empty home, which downloads everything.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_sh import HAS_GPU, HUNG_S, PATH, REPO, Machine, copy_launcher, script

from jaxtrain.config.commands import command_table

DEFAULT = "cuda12" if HAS_GPU else "plan"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(copy_launcher(tmp_path / "a folder" / "jaxtrain"), tmp_path)


def test_no_arguments_install_once_and_train_tiny(machine: Machine):
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"python <-m> <jaxtrain.commands.supervise> <--config={machine.repo}/configs/tiny.py>",
        f"cwd {machine.cwd}",  # paths in arguments are relative to the caller's folder
        f"path {machine.repo}",
        f"prefix {str(machine.repo / 'run.sh').replace(' ', f'{chr(92)} ')}",
    ]
    assert machine.installed() == [DEFAULT]
    done = machine.run("--config=x.py", "--config.train.steps=3")
    assert done.stdout.startswith("python <-m> <jaxtrain.commands.supervise> <--config=x.py> <--config.train.steps=3>\n")
    assert machine.calls() == [] and done.stderr == "", "a second start asks uv nothing"
    machine.cwd = machine.repo
    assert "<--config=configs/tiny.py>" in machine.run().stdout


def test_a_change_installs_again(machine: Machine):
    """After an installation that failed, and after a change of the requirements. Another Python needs a new environment."""
    failed = machine.run(FAKE_SYNC_EXIT="1")
    assert (failed.returncode, failed.stdout) == (1, "")
    machine.calls()
    assert machine.run("setup").returncode == 0 and machine.installed() == [DEFAULT]
    with open(machine.repo / f"requirements/{DEFAULT}.txt", "a") as f:
        f.write("# changed\n")
    machine.run("setup")
    assert [call.split()[0] for call in machine.calls()] == ["pip"]
    (machine.repo / ".python-version").write_text("3.13\n")
    machine.run("setup")
    assert [call.split()[0] for call in machine.calls()] == ["python", "venv", "pip"]


GPU = {"FAKE_GPU": "1"}
# Calls of run.sh on one machine: command, variables, and the requirement files that it installs.
CALLS = {
    "the second jax": [
        ("setup", {"JAXTRAIN_JAX": "0.12"}, [f"{DEFAULT}-jax0.12"]),
        ("data", {}, []),
        ("data", {"JAXTRAIN_JAX": "0.11"}, [DEFAULT]),
    ],
    "CUDA, which stays on a login node": [
        ("setup", GPU, ["cuda12"]),
        ("setup", {}, []),
        ("setup", {"JAXTRAIN_CUDA": "13"}, ["cuda13"]),
        ("setup", {"JAXTRAIN_CUDNN": "1"}, ["cuda13"]),  # CUDA brings cuDNN along
    ],
    "tools": [
        ("test", {}, [DEFAULT, "dev"]),
        ("notebooks", {}, [DEFAULT, "dev", "notebooks"]),
        ("data", {}, []),
    ],
}
if not HAS_GPU:
    CALLS["cuDNN"] = [
        ("setup", {"JAXTRAIN_CUDNN": "1"}, ["plan", "plan-cudnn"]),
        ("setup", {}, []),
        ("test", {}, ["plan", "plan-cudnn", "dev"]),
        ("setup", {"JAXTRAIN_CUDNN": "0"}, ["plan", "dev"]),
    ]


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS.keys())
def test_packages_are_chosen_once_and_kept(machine: Machine, calls: list[tuple[str, dict[str, str], list[str]]]):
    for command, env, files in calls:
        assert machine.run(command, **env).returncode == 0
        assert machine.installed() == files, (command, env)


def test_the_exit_code_and_the_arguments_are_the_commands_own(machine: Machine):
    """Arguments may hold any text. The caller's PYTHONPATH comes after the repository. run.sh may be called through a link."""
    folder = machine.cwd / "linked folder"
    folder.symlink_to(machine.repo)
    (machine.cwd / "train").symlink_to("linked folder/run.sh")
    for launcher, code in ((None, 0), (folder / "run.sh", 2), (machine.cwd / "train", 75)):
        words = ("prepare", "a b", "", "*", "$HOME")
        done = machine.run("data", *words, launcher=launcher, FAKE_EXIT=str(code), PYTHONPATH="/theirs")
        assert done.returncode == code
        expected = "python <-m> <jaxtrain> <data> <prepare> <a b> <> <*> <$HOME>"
        assert done.stdout.splitlines()[:3] == [expected, f"cwd {machine.cwd}", f"path {machine.repo}:/theirs"]
    assert machine.installed() == [DEFAULT], "once for all three"


def test_commands_search_modules_on_pythonpath_and_not_in_the_current_folder(machine: Machine):
    """An empty item of PYTHONPATH would be the current folder. Tools run in the repository, and search it."""
    safe = 'if [[ $1 == -c ]]; then echo 3.12; else echo "${PYTHONSAFEPATH-no} $PYTHONPATH"; fi\n'
    script(machine.bin / "venv-python", f"#!/bin/bash\n{safe}")
    for given, path in (("", ""), (":/a::b:", ":/a:b"), (".", ":.")):
        for words, expected in (((), "1"), (("data", "--help"), "1"), (("test",), "no")):
            done = machine.run(*words, PYTHONPATH=given)
            assert done.stdout.splitlines()[-1] == f"{expected} {machine.repo}{path}"


@pytest.mark.parametrize(
    ("line", "starts", "folder"),
    [("test -k data", "<pytest> <-k> <data>", ""), ("notebooks --no-browser", "<jupyterlab> <--no-browser>", "/notebooks")],
)
def test_tools_start_in_their_folder(machine: Machine, line: str, starts: str, folder: str):
    done = machine.run(*line.split())
    assert done.stdout.startswith(f"python <-m> {starts}\ncwd {machine.repo}{folder}\n")


def test_the_site_is_built_anew_and_its_tools_stay_installed(machine: Machine):
    """If old builds were kept, a deleted page would stay, and a warning about an unchanged page would not be repeated."""
    old = machine.repo / "build/docs/old.html"
    old.parent.mkdir(parents=True)
    old.touch()
    done = machine.run("docs", "--serve")
    sphinx, _, _, _, page, server, *_ = done.stdout.splitlines()
    assert sphinx.startswith("python <-m> <sphinx> <--fail-on-warning> ") and sphinx.endswith(" <docs> <build/docs>")
    assert page == f"{machine.repo}/build/docs/index.html" and not old.exists()
    assert server == "python <-u> <-m> <http.server> <--bind=127.0.0.1> <--directory=build/docs> <0>"
    assert machine.installed() == [DEFAULT, "docs"]
    machine.run("data")
    assert machine.calls() == []
    done = machine.run("docs", FAKE_EXIT="2")
    assert done.returncode == 2 and "index.html" not in done.stdout, "a failed build names no page"


@pytest.mark.parametrize(
    ("arguments", "env", "named"),
    [
        ("trian", {}, r"run\.sh --config=FILE"),  # resembles `train`
        ("lnit", {}, r"run\.sh lint"),
        ("config", {}, "main, preflight, "),  # a module that is no command
        ("docs --open", {}, "docs --serve"),
        ("lint jaxtrain", {}, "lint jaxtrain"),
        ("../x", {}, r"\.\./x"),
        *(("setup", {f"JAXTRAIN_{name}": "2"}, f"JAXTRAIN_{name}=2") for name in ("CUDA", "CUDNN", "JAX")),
    ],
)
def test_mistakes_install_nothing(machine: Machine, arguments: str, env: dict[str, str], named: str):
    done = machine.run(*arguments.split(), **env)
    assert done.returncode == 2 and re.search(named, done.stderr), done.stderr
    assert machine.calls() == [] and not (machine.repo / ".venv").exists()


def test_help_and_a_dry_run_install_nothing(machine: Machine):
    for words in (["--help"], ["setup", "--help"], ["lint", "-h"], ["docs", "--help"]):
        done = machine.run(*words)
        assert done.returncode == 0 and all(
            f"\n  {name:<12}{purpose}\n" in done.stdout for name, purpose in command_table().items()
        )
    for line, started in (("data", "-m jaxtrain data"), ("--config=x.py", "-m jaxtrain.commands.supervise --config=x.py")):
        done = machine.run(line, JAXTRAIN_DRY_RUN="1", JAXTRAIN_CUDA="12")
        assert done.returncode == 0 and "requirements/cuda12.txt" in done.stderr and started in done.stderr
    assert machine.calls() == [] and not (machine.repo / ".venv").exists()


def test_python_takes_the_launchers_place_with_a_stdin(machine: Machine):
    """Python replaces the launcher, so it gets signals itself. A closed stdin, as a daemon has, becomes /dev/null."""
    script(machine.bin / "venv-python", "#!/bin/bash\n[[ $1 == -c ]] && echo 3.12 && exit\necho $$ $(readlink /dev/fd/0)\n")
    machine.run("setup")
    for words in ([], ["data"]):
        line = ["bash", "-c", 'exec "$@" <&-', "bash", str(machine.repo / "run.sh"), *words]
        process = subprocess.Popen(line, env=machine.environ, cwd=machine.cwd, stdout=subprocess.PIPE, text=True)
        stdout, _ = process.communicate(timeout=HUNG_S)
        assert stdout.split() == [str(process.pid), "/dev/null"]


def test_sourced_it_refuses_and_leaves_the_shell_alone(machine: Machine):
    run = machine.repo / "run.sh"
    line = f'before=$(set -o); . "{run}" --config=x.py; echo "code $?"; [[ $before == $(set -o) ]] && echo same'
    done = subprocess.run(["bash", "-c", line], env={"PATH": PATH}, capture_output=True, text=True, timeout=HUNG_S)
    assert done.stdout.split() == ["code", "2", "same"]


def test_a_uv_that_does_not_run_is_replaced_by_a_private_one(machine: Machine):
    (machine.bin / "uv").rename(machine.bin / "good-uv")
    script(machine.bin / "uv", "#!/bin/bash\nexit 127\n")  # a pyenv shim for another Python version exits like this
    script(
        machine.bin / "python3",
        """#!/bin/bash
bin=$(dirname "$(type -P venv-python)")
case "$*" in
  -c*) exit 0 ;;
  '-m venv --clear .uv/venv') mkdir -p .uv/venv/bin && cp "$0" .uv/venv/bin/python && cp "$bin/venv-python" .uv/venv/bin ;;
  '-m pip install'*'--require-hashes -r requirements/uv.txt') cp "$bin/good-uv" .uv/venv/bin/uv ;;
  *) exit 1 ;;
esac
""",
    )
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.installed() == [DEFAULT]


@pytest.mark.parametrize("command", ["jaxtrain", "jaxtrain.main", "jaxtrain data"])
def test_without_its_packages_a_command_is_refused(command: str, tmp_path: Path):
    """-S starts Python without packages, as outside the environment."""
    line = [sys.executable, "-S", "-m", *command.split(), "--help"]
    done = subprocess.run(line, env={"PYTHONPATH": str(REPO)}, cwd=tmp_path, capture_output=True, text=True, timeout=HUNG_S)
    assert (done.returncode, done.stdout) == (2, "") and f"Python = {sys.executable}: " in done.stderr
    assert "./run.sh" in done.stderr and len(done.stderr.splitlines()) == 1
