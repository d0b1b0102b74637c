"""The locked requirements: every package is pinned with hashes, the files agree, and they satisfy pyproject.toml."""

import itertools
import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import jaxtrain
from jaxtrain.config import installed
from jaxtrain.plan import cudnn_library

REPO = Path(__file__).resolve().parents[2]
SECOND = tuple(f"{name}-jax0.12" for name in ("plan", "cuda12", "cuda13"))


def pins(name: str) -> dict[str, tuple[Requirement, int]]:
    """Return {package: (requirement, number of hashes)} of requirements/NAME.txt."""
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


ALL = ("plan", "cuda12", "cuda13", *SECOND, "plan-cudnn", "dev", "notebooks", "docs")
ALONE = ("plan-cudnn", "dev", "notebooks", "docs")  # sets that are installed beside another


@pytest.mark.parametrize("name", (*ALL, "uv"))
def test_every_requirement_is_pinned_with_hashes_and_names_no_address(name: str):
    assert not re.search(r"://|^-| @ ", (REPO / f"requirements/{name}.txt").read_text(), re.M)
    assert pins(name)
    for requirement, hashes in pins(name).values():
        assert pinned(requirement) and hashes, requirement


def test_pins_satisfy_pyproject():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name in ALL:
        wanted = extras[name.removesuffix("-jax0.12")] + ([] if name in ALONE else project["dependencies"])
        held = {re.sub(r"[-_.]+", "-", key).lower(): pin for key, (pin, _) in pins(name).items()}
        for text in wanted:
            requirement = Requirement(text)
            pin = held[re.sub(r"[-_.]+", "-", requirement.name).lower()]
            assert pinned(pin) in requirement.specifier, f"{name}: {pin}, {text}"
    assert project["requires-python"] == f">={(REPO / '.python-version').read_text().strip()}"
    assert project["version"] == jaxtrain.__version__ == installed.VERSION


def test_sets_agree_and_hold_what_they_are_for():
    plan, cuda12, cuda13 = pins("plan"), pins("cuda12"), pins("cuda13")
    for other in (cuda12, cuda13, pins("dev"), pins("notebooks"), pins("docs")):
        for name in plan.keys() & other.keys():
            assert pinned(plan[name][0]) == pinned(other[name][0]), name
    for one, other in itertools.combinations(map(pins, ("dev", "notebooks", "docs")), 2):  # one environment may hold them all
        assert all(pinned(one[name][0]) == pinned(other[name][0]) for name in one.keys() & other.keys())
    for line in (REPO / "requirements/constraints.in").read_text().splitlines():
        if not line.startswith("#"):
            exact = Requirement(line.split("#")[0])
            held = [pinned(locked[exact.name][0]) for locked in (plan, cuda12, cuda13) if exact.name in locked]
            assert {*held} == {pinned(exact)}
    jax = pinned(plan["jax"][0])
    assert jax == pinned(plan["jax-cuda12-plugin"][0]) == pinned(plan["jax-cuda12-pjrt"][0])
    assert pinned(cuda13["jax-cuda13-plugin"][0]) == jax
    for cuda, held in (("cu12", cuda12), ("cu13", cuda13)):
        assert {f"nvidia-cudnn-{cuda}", f"nvidia-nccl-{cuda}"} <= held.keys()
    beside = pins("plan-cudnn")
    assert beside.keys() == {"nvidia-cudnn-cu12", "nvidia-cuda-nvrtc-cu12", "nvidia-cublas-cu12"}
    for name, (requirement, _) in beside.items():
        assert pinned(requirement) == pinned(cuda12[name][0]), name
    assert pinned(beside["nvidia-cudnn-cu12"][0]) == Version(cudnn_library.VERSION)
    # The plan extra has only CUDA's assembler, below 100 MB: CUDA's libraries take gigabytes.
    assert {name for name in plan if name.startswith("nvidia-")} == {"nvidia-ml-py", "nvidia-cuda-nvcc-cu12"}


@pytest.mark.parametrize("name", SECOND)
def test_the_second_sets_differ_in_jax_alone(name: str):
    first, second = pins(name.removesuffix("-jax0.12")), pins(name)
    differ = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    cuda = "cuda13" if "cuda13" in name else "cuda12"
    assert differ == {"jax", "jaxlib", f"jax-{cuda}-plugin", f"jax-{cuda}-pjrt"}
    assert {pinned(second[key][0]) for key in differ} == {Version("0.12.0.1")}


@pytest.mark.parametrize("name", ["run.sh", "requirements/lock.sh", "tests/campaign/fresh_clone.sh"])
def test_shell_scripts_are_executable(name: str):
    assert os.access(REPO / name, os.X_OK)
