"""run.sh installs packages and starts commands; uv, the environment's Python and nvidia-smi are fakes here.

`tests/campaign/fresh_clone.sh` tests the real installation: a clean clone with an empty home, which downloads everything.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_sh import HAS_GPU, HUNG_S, PATH, REPO, Machine, copy_launcher, script

from jaxtrain import commands

DEFAULT = "cuda12" if HAS_GPU else "plan"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(copy_launcher(tmp_path / "a folder" / "jaxtrain"), tmp_path)


def test_no_arguments_install_once_and_train_tiny(machine: Machine):
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"python <-m> <jaxtrain.runtime> <main> <--config={machine.repo}/configs/tiny.py>",
        f"cwd {machine.cwd}",  # paths in arguments are relative to the caller's folder
        f"path {machine.repo}",
        f"prefix {str(machine.repo / 'run.sh').replace(' ', f'{chr(92)} ')}",
    ]
    assert machine.installed() == [DEFAULT] and "NVIDIA GPU" in done.stderr
    done = machine.run("--config=x.py", "--config.train.steps=3")
    assert done.stdout.startswith("python <-m> <jaxtrain.runtime> <main> <--config=x.py> <--config.train.steps=3>\n")
    assert machine.calls() == [] and done.stderr == "", "a second start asks uv nothing"
    machine.cwd = machine.repo
    assert machine.run().stdout.startswith("python <-m> <jaxtrain.runtime> <main> <--config=configs/tiny.py>\n")


def test_a_change_installs_again(machine: Machine):
    """run.sh installs again after an installation that failed and after a change of the requirements. Another Python also needs
    a new environment.
    """
    failed = machine.run(FAKE_SYNC_EXIT="1")
    assert (failed.returncode, failed.stdout) == (1, "") and "installation failed" in failed.stderr
    machine.calls()
    assert machine.run("setup").returncode == 0 and machine.installed() == [DEFAULT]
    with open(machine.repo / f"requirements/{DEFAULT}.txt", "a") as f:
        f.write("# changed\n")
    machine.run("setup")
    assert [call.split()[0] for call in machine.calls()] == ["pip"]
    (machine.repo / ".python-version").write_text("3.13\n")
    machine.run("setup")
    assert [call.split()[0] for call in machine.calls()] == ["python", "venv", "pip"]


def test_the_second_jax_stays_until_the_first_is_asked_for(machine: Machine):
    machine.run("setup", JAXTRAIN_JAX="0.12")
    assert machine.installed() == [f"{DEFAULT}-jax0.12"]
    machine.run("data")
    assert machine.calls() == [], "a command without the variable keeps it"
    machine.run("data", JAXTRAIN_JAX="0.11")
    assert machine.installed() == [DEFAULT]


def test_the_exit_code_and_the_arguments_are_the_commands_own(machine: Machine):
    """Arguments may hold any text. The caller's PYTHONPATH comes after the repository. run.sh may be called through a link."""
    folder = machine.cwd / "linked folder"
    folder.symlink_to(machine.repo)
    (machine.cwd / "train").symlink_to("linked folder/run.sh")
    for launcher, code in ((None, 0), (folder / "run.sh", 2), (machine.cwd / "train", 75)):
        words = ("prepare", "a b", "", "*", "$HOME")
        done = machine.run("data", *words, launcher=launcher, FAKE_EXIT=str(code), PYTHONPATH="/theirs")
        assert done.returncode == code
        expected = "python <-m> <jaxtrain.data> <prepare> <a b> <> <*> <$HOME>"
        assert done.stdout.splitlines()[:3] == [expected, f"cwd {machine.cwd}", f"path {machine.repo}:/theirs"]
    assert machine.installed() == [DEFAULT], "once for all three"


def test_the_suite_runs_in_the_repository_and_keeps_its_tools(machine: Machine):
    done = machine.run("test", "-k", "data")
    assert done.stdout.startswith(f"python <-m> <pytest> <-k> <data>\ncwd {machine.repo}\n")
    assert machine.installed() == [DEFAULT, "dev"]
    machine.run("data")
    assert machine.calls() == [], "training after testing does not reinstall"


def test_notebooks_open_in_their_folder_and_stay_installed(machine: Machine):
    done = machine.run("notebooks", "--no-browser")
    assert done.stdout.startswith(f"python <-m> <jupyterlab> <--no-browser>\ncwd {machine.repo}/notebooks\n")
    assert machine.installed() == [DEFAULT, "notebooks"]
    machine.run("data")
    assert machine.calls() == []
    machine.run("test")
    assert machine.installed() == [DEFAULT, "dev", "notebooks"]


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
    ("arguments", "env", "said"),
    [
        ("trian", {}, r"^error: command = 'trian': is unknown\. Fix: \S*/run\.sh --config=FILE\.$"),  # resembles `train`
        ("lnit", {}, r"^error: command = 'lnit': is unknown\. Fix: \S*/run\.sh lint\.$"),
        # a module that is no command
        ("config", {}, r"^error: command = 'config': is unknown\. Fix: one of main, preflight, "),
        ("docs --open", {}, r"^run\.sh: docs --open: it takes --serve alone\. Fix: ./run\.sh docs --serve$"),
        ("../x", {}, r"^error: command = '\.\./x': is unknown\."),
        ("setup", {"JAXTRAIN_CUDA": "11"}, "JAXTRAIN_CUDA=11: must be 12 or 13; unset it"),
        ("setup", {"JAXTRAIN_CUDNN": "yes"}, "JAXTRAIN_CUDNN=yes: must be 0 or 1; unset it"),
        ("setup", {"JAXTRAIN_JAX": "0.13"}, "JAXTRAIN_JAX=0.13: must be 0.11 or 0.12; unset it"),
    ],
)
def test_refusals_name_the_mistake_and_install_nothing(machine: Machine, arguments: str, env: dict[str, str], said: str):
    done = machine.run(*arguments.split(), **env)
    done.stderr = done.stderr.replace("\\ ", "_")  # spaces in the folder's name
    assert done.returncode == 2 and re.search(said, done.stderr), done.stderr
    assert machine.calls() == [] and not (machine.repo / ".venv").exists()


def test_help_and_a_dry_run_install_nothing(machine: Machine):
    for flag in ("help", "--help", "-h"):
        done = machine.run(flag)
        assert done.returncode == 0
        assert all(f"\n  {name:<12}{purpose}\n" in done.stdout for name, purpose in commands.table().items())
    done = machine.run("data", "a b", JAXTRAIN_DRY_RUN="1", JAXTRAIN_CUDA="12")
    assert done.returncode == 0 and "would install from requirements/cuda12.txt" in done.stderr
    assert r"-m jaxtrain.data a\ b" in done.stderr
    done = machine.run("--config=x.py", JAXTRAIN_DRY_RUN="1")
    assert done.returncode == 0 and "-m jaxtrain.runtime main --config=x.py" in done.stderr
    assert machine.calls() == [] and not (machine.repo / ".venv").exists()


def test_a_dry_run_of_training_is_the_supervisors_where_it_is_installed(machine: Machine):
    machine.run("setup")
    done = machine.run("--config=x.py", JAXTRAIN_DRY_RUN="1")
    assert done.stdout.startswith("python <-m> <jaxtrain.runtime> <main> <--config=x.py>\n") and done.stderr == ""


def test_python_takes_the_launchers_place_with_a_stdin(machine: Machine):
    """Python replaces the launcher, so it gets signals itself. A closed stdin, as a daemon has, becomes /dev/null."""
    script(machine.bin / "venv-python", "#!/bin/bash\n[[ $1 == -c ]] && echo 3.12 && exit\necho $$ $(readlink /dev/fd/0)\n")
    machine.run("setup")
    for words in ([], ["data"], ["preflight", "--nodes=a,b"]):
        line = ["bash", "-c", 'exec "$@" <&-', "bash", str(machine.repo / "run.sh"), *words]
        process = subprocess.Popen(line, env=machine.environ, cwd=machine.cwd, stdout=subprocess.PIPE, text=True)
        stdout, _ = process.communicate(timeout=HUNG_S)
        assert stdout.split() == [str(process.pid), "/dev/null"]


def test_sourced_it_refuses_and_leaves_the_shell_alone(machine: Machine):
    run = machine.repo / "run.sh"
    line = f'before=$(set -o); . "{run}" --config=x.py; echo "code $?"; [[ $before == $(set -o) ]] && echo same'
    done = subprocess.run(["bash", "-c", line], env={"PATH": PATH}, capture_output=True, text=True, timeout=HUNG_S)
    assert done.stdout.split() == ["code", "2", "same"] and "do not source it" in done.stderr


def test_packages_are_chosen_once_and_kept(machine: Machine):
    """CUDA is installed if there is a GPU or on request, and stays installed on a login node."""
    script(machine.bin / "nvidia-smi", "#!/bin/bash\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    machine.run("setup")
    assert machine.installed() == ["cuda12"], "a GPU that only nvidia-smi shows"
    script(machine.bin / "nvidia-smi", "#!/bin/bash\nexit 9\n")
    machine.run("setup")
    assert machine.calls() == []
    assert "JAXTRAIN_CUDA=13 asks" in machine.run("setup", JAXTRAIN_CUDA="13").stderr
    assert machine.installed() == ["cuda13"]
    machine.run("setup", JAXTRAIN_CUDNN="1")
    assert machine.installed() == ["cuda13"], "CUDA brings cuDNN along"


@pytest.mark.skipif(HAS_GPU, reason="CUDA 12 brings cuDNN along")
def test_cudnn_is_chosen_and_kept(machine: Machine):
    machine.run("setup", JAXTRAIN_CUDNN="1")
    assert machine.installed() == ["plan", "plan-cudnn"]
    machine.run("setup")
    assert machine.calls() == []
    machine.run("test")
    assert machine.installed() == ["plan", "plan-cudnn", "dev"]
    machine.run("setup", JAXTRAIN_CUDNN="0")
    assert machine.installed() == ["plan", "dev"]


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
    assert "this machine has no uv that runs" in done.stderr and len(machine.installed()) == 1


def test_a_start_outside_the_environment_ends_with_a_sentence(tmp_path: Path):
    """Without its packages, a command ends with one error. -S starts Python without packages, as outside the environment."""
    for module in ("jaxtrain.main", "jaxtrain.data", "jaxtrain"):
        command = [sys.executable, "-S", "-m", module, "--help"]
        done = subprocess.run(command, env={"PYTHONPATH": str(REPO)}, cwd=tmp_path, capture_output=True, text=True)
        rule = "the packages of jaxtrain are not installed there. Fix: ./run.sh COMMAND"
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: Python = {sys.executable}: {rule}")
