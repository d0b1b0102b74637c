"""The environment of a run: variables that it sets, variables that the shell may set, and variables that are refused."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.config import environment, hardware
from jaxtrain.config.hardware import HOST_LIMIT, Devices
from jaxtrain.config.launch import resolved
from jaxtrain.config.schema import RunConfig, default_config
from jaxtrain.step.validate import validate

H200 = Devices("gpu", "NVIDIA H200", 8, 140.0, "described", 90)
CPU = Devices("cpu", "cpu", 8, 3.0, "described")
# Harmless variables of a shell on a GPU node: those of images, of network settings, and of requests to the scheduler.
USUAL = {
    "PATH": "/usr/bin",
    "CUDA_VERSION": "12.9.1",
    "NCCL_VERSION": "2.28.3",
    "CUDA_HOME": "/usr/local/cuda",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    "NCCL_SOCKET_IFNAME": "eth0",
    "JAX_PLATFORMS": "cuda",
    "JAX_COORDINATOR_ADDRESS": "node1",
    "JAX_COORDINATOR_PORT": "1234",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
    "JAX_LOCAL_DEVICE_IDS": "0",
    "HTTP_PROXY": "http://proxy:3128",
}


def run(**env: Any) -> RunConfig:
    config = default_config()
    config.env.update(env)
    found, problems = resolved(config)
    assert not problems
    return found


def test_the_usual_shell_is_taken_and_recorded():
    overlay, problems = environment.overlay(run(), H200, USUAL)
    assert not problems
    assert overlay.inherited == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert overlay.set["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and overlay.set["NCCL_DEBUG"] == "WARN"
    assert overlay.set["XLA_CLIENT_MEM_FRACTION"] == str(hardware.memory_fraction(140.0))
    assert (
        overlay.unset.keys() >= {"CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_PROTO"} and not overlay.unset.keys() & overlay.set.keys()
    )
    assert overlay.set.keys() == overlay.why.keys()
    said = "\n".join(overlay.lines())
    assert all(f"{name}={value} " in said for name, value in overlay.set.items()) and "NCCL_SOCKET_IFNAME=eth0" in said


@pytest.mark.parametrize("name", ["CUDA_DEVICE_MAX_CONNECTIONS", "XLA_FLAGS", "NVIDIA_TF32_OVERRIDE", "MOCK_GPU_TOPOLOGY"])
def test_what_the_shell_slips_in_is_refused_unless_named(name: str):
    shell = USUAL | {name: "1"}
    (problem,) = environment.overlay(run(), H200, shell)[1]
    assert (problem.key, problem.value) == ("environment", f"{name}=1")
    taken = re.search(r"--config.env.inherit=(\S+)", problem.remedy)
    assert taken, "the line that helps, as it can be typed"
    overlay, problems = environment.overlay(run(inherit=taken[1]), H200, shell)
    assert not problems and overlay.inherited == {name: "1", "NCCL_SOCKET_IFNAME": "eth0"} and name not in overlay.set
    assert not environment.overlay(run(inherit=f"{name[:-1]}*"), H200, shell)[1]
    overlay, problems = environment.overlay(run(set=f"{name}=2"), H200, shell)
    assert not problems and overlay.set[name] == "2"
    assert not environment.overlay(run(), CPU, shell)[1], "CPUs: fake devices come from XLA_FLAGS"


def test_all_that_slips_in_is_told_at_once():
    """The fix is an env.inherit of all refused variables and those allowed before, so that one correction is enough."""
    shell = USUAL | {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "XLA_FLAGS": "--a=b"}
    (problem,) = environment.overlay(run(inherit="NCCL_ALGO"), H200, shell)[1]
    assert problem.value == "NCCL_PROTO=LL XLA_FLAGS=--a=b"
    assert "--config.env.inherit=NCCL_ALGO,NCCL_PROTO,XLA_FLAGS" in problem.remedy


def test_secrets_and_where_libraries_lie_are_no_part_of_it():
    places = ("CUDA_DIR", "CUDA_INSTALL_PATH", "CUDNN_HOME", "NCCL_HOME", "NCCL_INCLUDE_DIR")
    assert environment.select_variables(dict.fromkeys(places, "/x")) == {}
    shell = {"TF_TOKEN_app": "s3cret", "XLA_AUTH_HEADER": "s3cret", "JAX_X_API_KEY": "s3cret", "NCCL_ALGO": "Ring"}
    assert environment.select_variables(shell) == {"NCCL_ALGO": "Ring"}
    overlay, problems = environment.overlay(run(inherit="*"), H200, shell)
    assert not problems and "s3cret" not in "".join(overlay.lines())


def test_the_config_stands_above_table_and_shell():
    asked = run(set="NCCL_CROSS_NIC=1, CUDA_DEVICE_ORDER=FASTEST_FIRST,NCCL_IB_HCA=mlx5_0+mlx5_1")
    overlay, problems = environment.overlay(asked, H200, USUAL | {"NCCL_CROSS_NIC": "1"})
    assert not problems
    expected = {"NCCL_CROSS_NIC": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "NCCL_IB_HCA": "mlx5_0,mlx5_1"}
    assert overlay.set.items() >= expected.items()
    assert overlay.why["NCCL_CROSS_NIC"] == "env.set" and "NCCL_CROSS_NIC" not in overlay.inherited
    assert environment.overlay(asked, CPU, {})[0].set == expected
    flags = environment.overlay(run(set="XLA_FLAGS=--new"), CPU, {"XLA_FLAGS": "--old"})[0]
    assert flags.set == {"XLA_FLAGS": "--new"} and not flags.inherited


def test_without_the_table_only_memory_is_set():
    overlay, _ = environment.overlay(run(defaults=False), H200, {})
    assert overlay.set.keys() == {"XLA_CLIENT_MEM_FRACTION", HOST_LIMIT}
    assert environment.overlay(run(defaults=False), H200, {HOST_LIMIT: "900"})[0].set.keys() == {"XLA_CLIENT_MEM_FRACTION"}
    overlay, problems = environment.overlay(run(), H200, {"NCCL_DEBUG": "INFO"})
    assert not problems and "NCCL_DEBUG" not in overlay.set, "who asks NCCL for more gets more"


@pytest.mark.parametrize(
    ("env", "key"),
    [
        ({"inherit": "NCCL_ALGO=Ring"}, "env.inherit"),
        ({"set": "NCCL_DEBUG"}, "env.set"),
        ({"set": "A B=1"}, "env.set"),
        ({"set": "A=1,A=2"}, "env.set"),
        ({"set": "LD_LIBRARY_PATH=/x"}, "env.set"),  # read before the program starts
        ({"set": "JAXTRAIN_COORDINATOR=a:1"}, "env.set"),
        ({"set": "HF_TOKEN=hf_x"}, "env.set"),
        ({"set": "XLA_CLIENT_MEM_FRACTION=0.5"}, "XLA_CLIENT_MEM_FRACTION"),
        ({"set": "XLA_PYTHON_CLIENT_PREALLOCATE=false"}, "XLA_PYTHON_CLIENT_PREALLOCATE"),
        ({"set": "TF_FORCE_UNIFIED_MEMORY=1"}, "TF_FORCE_UNIFIED_MEMORY"),
    ],
)
def test_mistakes_are_told_once_and_without_secrets(env: dict[str, str], key: str):
    (problem,) = environment.overlay(run(**env), H200, {})[1]
    assert problem.key == key and problem.remedy and "hf_x" not in str(problem)


def test_what_an_earlier_run_of_the_process_has_left_cannot_be_inherited():
    shell = {"NCCL_CROSS_NIC": "1"}
    for left, inheritable in (({}, True), ({environment.EXPORTED: "NCCL_CROSS_NIC"}, False)):
        (problem,) = environment.overlay(run(), H200, shell | left)[1]
        assert problem.key == "environment" and ("env.inherit" in problem.remedy) == inheritable


def test_what_processes_must_have_alike():
    shell = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_ALGO": "Ring"}
    found = environment.overlay(run(inherit="NCCL_*", set="NCCL_CROSS_NIC=1"), H200, shell)[0].common()
    assert found.items() >= {"NCCL_ALGO": "Ring", "NCCL_CROSS_NIC": "1"}.items()
    assert not found.keys() & {"NCCL_SOCKET_IFNAME", HOST_LIMIT}


def test_deterministic_sums():
    asked = run()
    asked = dataclasses.replace(asked, train=dataclasses.replace(asked.train, deterministic=True))
    assert environment.overlay(asked, H200, {})[0].set["NCCL_ALGO"] == hardware.NCCL_ALGO
    other = dataclasses.replace(asked, env=dataclasses.replace(asked.env, set="NCCL_ALGO=Ring"))
    for refused, shell in ((asked, {"NCCL_ALGO": "NVLS"}), (other, {})):
        (problem,) = environment.overlay(refused, H200, shell)[1]
        assert "train.deterministic" in problem.rule


def test_each_generation_has_its_table():
    for sm, known in ((80, 80), (89, 80), (90, 90), (103, 100)):
        assert environment.table(sm) is environment.TABLES[known]
    assert environment.table(75) is environment.ALL


def test_the_environment_of_a_run_is_validated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in environment.select_variables(os.environ):
        monkeypatch.delenv(name)
    config = default_config()
    config.data.source = "synthetic"
    config.train.global_batch = 8
    asked = resolved(config)[0]
    assert not validate(asked, H200, tmp_path)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert [p.value for p in validate(asked, H200, tmp_path)] == ["NCCL_P2P_DISABLE=1"]
