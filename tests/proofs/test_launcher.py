"""run.sh and the locked requirements, without installing anything: uv, Python and nvidia-smi are stand-ins that note how they
are called. The real thing, a clean clone with an empty home, is `tests/campaign/fresh_clone.sh`, which downloads everything.
"""

import glob
import os
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from jaxtrain.plan import cudnn_library

REPO = Path(__file__).resolve().parents[2]
SETS = ("plan", "cuda12", "cuda13", "plan-cudnn", "dev", "uv")
# A machine's own GPU shows as a device, which no stand-in can hide; then the launcher rightly takes CUDA.
HAS_GPU = bool(glob.glob("/dev/nvidia[0-9]*"))

FAKE_PYTHON = """#!/bin/bash
if [[ $1 == -c ]]; then echo 3.12; exit 0; fi
printf 'python %s\\n' "$*"
printf 'cwd %s\\npath %s\\n' "$PWD" "${PYTHONPATH-}"
exit "${FAKE_EXIT:-0}"
"""

FAKE_UV = """#!/bin/bash
if [[ $1 == --version ]]; then echo 'uv 9'; exit 0; fi
echo "$*" >>"$FAKE_LOG"
case "$1 $2" in
  'python find') echo /fake/python3.12 ;;
  venv*) mkdir -p .venv/bin && cp "$FAKE_BIN/venv-python" .venv/bin/python ;;
  'pip sync') exit "${FAKE_SYNC_EXIT:-0}" ;;
esac
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Machine:
    """A copy of the launcher in a folder with a space in its name, and a PATH of stand-ins in front of the system's."""

    def __init__(self, folder: Path):
        self.repo = folder / "a folder" / "jaxtrain"
        self.bin = folder / "bin"
        self.cwd = folder / "elsewhere"
        self.log = folder / "uv.log"
        self.cwd.mkdir()
        (self.repo / "jaxtrain").mkdir(parents=True)
        shutil.copy(REPO / "run.sh", self.repo)
        shutil.copy(REPO / ".python-version", self.repo)
        shutil.copytree(REPO / "requirements", self.repo / "requirements")
        (self.repo / "jaxtrain/__init__.py").write_text('"""Package."""\n')
        (self.repo / "jaxtrain/main.py").write_text('"""Train a model."""\n\nif __name__ == "__main__":\n    pass\n')
        (self.repo / "jaxtrain/helpers.py").write_text('"""No command."""\n')
        script(self.repo / "jaxtrain/data/__main__.py", '"""Make token files.\n\nMore.\n"""\n')
        script(self.bin / "uv", FAKE_UV)
        script(self.bin / "venv-python", FAKE_PYTHON)
        script(self.bin / "nvidia-smi", "#!/bin/bash\nexit 9\n")

    def run(self, *args: str, launcher: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        base = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.cwd),
            "FAKE_LOG": str(self.log),
            "FAKE_BIN": str(self.bin),
        }
        return subprocess.run(
            ["bash", str(launcher or self.repo / "run.sh"), *args],
            env=base | env,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """What uv was asked since the last time."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def installed(self) -> list[str]:
        """The requirement files of the one `uv pip sync` since the last time."""
        (sync,) = [line for line in self.calls() if line.startswith("pip sync")]
        assert "--require-hashes" in sync
        return re.findall(r"requirements/([\w-]+)\.txt", sync)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_arguments_installs_and_trains_tiny(machine: Machine):
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"python -m jaxtrain.main --config={machine.repo}/configs/tiny.py",
        f"cwd {machine.cwd}",  # paths in arguments stay the caller's
        f"path {machine.repo}",
    ]
    assert machine.installed() == ["cuda12" if HAS_GPU else "plan"]
    assert "NVIDIA GPU" in done.stderr
    machine.cwd = machine.repo
    assert machine.run().stdout.startswith("python -m jaxtrain.main --config=configs/tiny.py\n")


def test_second_start_is_fast_and_asks_uv_nothing(machine: Machine):
    machine.run("setup")
    machine.calls()
    begin = time.monotonic()
    done = machine.run("--config=x.py", "--config.train.steps=3")
    assert time.monotonic() - begin < 2
    assert done.stdout.startswith("python -m jaxtrain.main --config=x.py --config.train.steps=3\n")
    assert machine.calls() == []
    assert len(done.stderr.splitlines()) == 2  # where it starts from, what it sets


def test_changed_requirements_are_installed_again(machine: Machine):
    machine.run("setup")
    machine.calls()
    for name in ("plan", "cuda12"):
        with open(machine.repo / f"requirements/{name}.txt", "a") as f:
            f.write("# changed\n")
    machine.run("setup")
    calls = machine.calls()
    assert [c.split()[:2] for c in calls] == [["pip", "sync"]]  # the environment itself stays


def test_failed_installation_is_not_taken_for_done(machine: Machine):
    failed = machine.run(FAKE_SYNC_EXIT="1")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "installation failed" in failed.stderr
    machine.calls()
    assert machine.run().returncode == 0
    assert len(machine.installed()) == 1


def test_exit_code_is_the_commands_own(machine: Machine):
    for code in (0, 2, 75, 130):
        assert machine.run("data", "verify", FAKE_EXIT=str(code)).returncode == code


def test_unknown_command_exits_2_with_the_list_and_installs_nothing(machine: Machine):
    for name in ("trian", "helpers", "../x", "__init__"):
        done = machine.run(name)
        assert done.returncode == 2
        assert f"unknown command '{name}'" in done.stderr
        assert re.search(r"^  main +Train a model\.$", done.stderr, re.M)
    assert machine.calls() == []
    assert not (machine.repo / ".venv").exists()


def test_help_lists_commands_and_installs_nothing(machine: Machine):
    for flag in ("help", "--help", "-h"):
        begin = time.monotonic()
        done = machine.run(flag)
        assert time.monotonic() - begin < 2
        assert done.returncode == 0
        assert re.search(r"^  data +Make token files\.$", done.stdout, re.M)
        assert "helpers" not in done.stdout
    assert machine.calls() == []


def test_arguments_arrive_whole(machine: Machine):
    script(machine.bin / "venv-python", '#!/bin/bash\n[[ $1 == -c ]] && echo 3.12 || printf "<%s>" "$@"\n')
    done = machine.run("data", "prepare", "a b", "", "*", "$HOME")
    assert done.stdout == "<-m><jaxtrain.data><prepare><a b><><*><$HOME>"


def test_through_links(machine: Machine, tmp_path: Path):
    folder = tmp_path / "linked folder"
    folder.symlink_to(machine.repo)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/train").symlink_to("../linked folder/run.sh")
    machine.run("setup")
    machine.calls()
    for launcher in (folder / "run.sh", tmp_path / "other/train"):
        done = machine.run("data", launcher=launcher)
        assert f"path {machine.repo}" in done.stdout, done.stderr
    assert machine.calls() == []


def test_callers_pythonpath_is_kept_behind(machine: Machine):
    assert f"path {machine.repo}:/theirs\n" in machine.run("data", PYTHONPATH="/theirs").stdout


def test_suite_runs_in_the_repository_and_keeps_its_tools(machine: Machine):
    default = "cuda12" if HAS_GPU else "plan"
    done = machine.run("test", "-k", "data")
    assert done.stdout.startswith(f"python -m pytest -k data\ncwd {machine.repo}\n")
    assert machine.installed() == [default, "dev"]
    machine.run("data")
    assert machine.calls() == []  # training after testing does not reinstall


def test_a_gpu_that_only_nvidia_smi_shows(machine: Machine):
    script(machine.bin / "nvidia-smi", "#!/bin/bash\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    machine.run("setup")
    assert machine.installed() == ["cuda12"]


def test_cuda_by_request_and_kept_where_no_gpu_shows(machine: Machine):
    done = machine.run("setup", JAXTRAIN_CUDA="13")
    assert machine.installed() == ["cuda13"]
    assert "JAXTRAIN_CUDA=13 asks" in done.stderr
    machine.run("setup")
    # Without a GPU: a login node leaves the compute nodes' CUDA alone. With one, unset means 12.
    assert (machine.installed() if HAS_GPU else machine.calls()) == (["cuda12"] if HAS_GPU else [])
    machine.run("setup", JAXTRAIN_CUDA="12")
    assert HAS_GPU or machine.installed() == ["cuda12"]


@pytest.mark.skipif(HAS_GPU, reason="CUDA 12 brings cuDNN along")
def test_cudnn_by_request_and_kept(machine: Machine):
    machine.run("setup")
    assert machine.installed() == ["plan"]
    machine.run("setup", JAXTRAIN_CUDNN="1")
    assert machine.installed() == ["plan", "plan-cudnn"]
    machine.run("setup")
    assert machine.calls() == []
    machine.run("test", JAXTRAIN_CUDNN="1")
    assert machine.installed() == ["plan", "plan-cudnn", "dev"]
    machine.run("setup", JAXTRAIN_CUDNN="0")
    assert machine.installed() == ["plan", "dev"]
    machine.run("setup", JAXTRAIN_CUDA="12", JAXTRAIN_CUDNN="1")
    assert machine.installed() == ["cuda12", "dev"]


def test_wrong_cudnn_is_refused(machine: Machine):
    done = machine.run(JAXTRAIN_CUDNN="yes")
    assert done.returncode == 2
    assert "JAXTRAIN_CUDNN=yes: must be 0 or 1" in done.stderr
    assert machine.calls() == []


def test_wrong_cuda_is_refused(machine: Machine):
    done = machine.run(JAXTRAIN_CUDA="11")
    assert done.returncode == 2
    assert "JAXTRAIN_CUDA=11: must be 12 or 13" in done.stderr
    assert machine.calls() == []


def test_dry_run_says_and_does_nothing(machine: Machine):
    done = machine.run("data", "a b", JAXTRAIN_DRY_RUN="1", JAXTRAIN_CUDA="12")
    assert done.returncode == 0
    assert "would install from requirements/cuda12.txt" in done.stderr
    assert r"-m jaxtrain.data a\ b" in done.stderr
    assert machine.calls() == []
    assert not (machine.repo / ".venv").exists()


def test_another_python_version_makes_the_environment_anew(machine: Machine):
    machine.run("setup")
    machine.calls()
    (machine.repo / ".python-version").write_text("3.13\n")
    machine.run("setup")
    assert [c.split()[0] for c in machine.calls()] == ["python", "venv", "pip"]


def test_uv_that_does_not_run_is_replaced_by_a_private_one(machine: Machine):
    (machine.bin / "uv").rename(machine.bin / "good-uv")
    script(machine.bin / "uv", "#!/bin/bash\nexit 127\n")  # as a pyenv shim of another version
    script(
        machine.bin / "python3",
        """#!/bin/bash
case "$*" in
  -c*) exit 0 ;;
  '-m venv --clear .uv/venv') mkdir -p .uv/venv/bin && cp "$0" .uv/venv/bin/python ;;
  '-m pip install'*'--require-hashes -r requirements/uv.txt') cp "$FAKE_BIN/good-uv" .uv/venv/bin/uv ;;
  *) exit 1 ;;
esac
""",
    )
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert "this machine has no uv that runs" in done.stderr
    assert len(machine.installed()) == 1


# --- The locked requirements ---


def pins(name: str) -> dict[str, tuple[Requirement, int]]:
    """Requirement and number of hashes of each package in requirements/NAME.txt."""
    text = re.sub(r"\\\n", " ", (REPO / f"requirements/{name}.txt").read_text())
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement = Requirement(line.split(" --hash=")[0])
            found[requirement.name] = requirement, len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", line))
    return found


def pinned(requirement: Requirement) -> Version:
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


@pytest.mark.parametrize("name", SETS)
def test_every_requirement_is_pinned_with_hashes_and_names_no_address(name: str):
    text = (REPO / f"requirements/{name}.txt").read_text()
    assert not re.search(r"://|^-| @ ", text, re.M)
    assert pins(name)
    for requirement, hashes in pins(name).values():
        assert pinned(requirement)
        assert hashes, f"{requirement} has no hash"


def test_pins_satisfy_pyproject():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name in ("plan", "cuda12", "cuda13", "plan-cudnn", "dev"):
        wanted = extras[name] + ([] if name in ("plan-cudnn", "dev") else project["dependencies"])
        held = {re.sub(r"[-_.]+", "-", key).lower(): pin for key, (pin, _) in pins(name).items()}
        for text in wanted:
            requirement = Requirement(text)
            pin = held[re.sub(r"[-_.]+", "-", requirement.name).lower()]
            assert pinned(pin) in requirement.specifier, f"{name}: {pin} does not satisfy {text}; run requirements/lock.sh"
    assert (REPO / ".python-version").read_text().strip() == "3.12"
    assert project["requires-python"] == ">=3.12"


def test_sets_agree_and_hold_what_they_are_for():
    plan, cuda12, cuda13 = pins("plan"), pins("cuda12"), pins("cuda13")
    for other in (cuda12, cuda13, pins("dev")):
        for name in plan.keys() & other.keys():
            assert pinned(plan[name][0]) == pinned(other[name][0]), name
    for line in (REPO / "requirements/constraints.in").read_text().splitlines():
        if not line.startswith("#"):
            exact = Requirement(line.split("#")[0])
            held = [pinned(locked[exact.name][0]) for locked in (plan, cuda12, cuda13) if exact.name in locked]
            assert {*held} == {pinned(exact)}
    jax = pinned(plan["jax"][0])
    assert pinned(plan["jax-cuda12-plugin"][0]) == pinned(plan["jax-cuda12-pjrt"][0]) == jax
    assert pinned(cuda13["jax-cuda13-plugin"][0]) == jax
    assert {"nvidia-cudnn-cu12", "nvidia-nccl-cu12"} <= cuda12.keys()
    assert {"nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= cuda13.keys()
    beside = pins("plan-cudnn")
    assert beside.keys() == {"nvidia-cudnn-cu12", "nvidia-cuda-nvrtc-cu12", "nvidia-cublas-cu12"}
    for name, (requirement, _) in beside.items():
        assert pinned(requirement) == pinned(cuda12[name][0]), name
    assert pinned(beside["nvidia-cudnn-cu12"][0]) == Version(cudnn_library.VERSION)
    # Of CUDA only the assembler, below 100 MB: the libraries are gigabytes.
    assert {name for name in plan if name.startswith("nvidia-")} == {"nvidia-ml-py", "nvidia-cuda-nvcc-cu12"}


def test_shell_scripts_are_executable():
    for name in ("run.sh", "requirements/lock.sh", "tests/campaign/fresh_clone.sh"):
        assert os.access(REPO / name, os.X_OK), name
